"""What a role says on standard error: lines for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Final

PLAIN: Final = "%(asctime)s %(name)s %(levelname)s %(message)s"
NODE: ContextVar[str] = ContextVar("node", default="")  # whose task this is, where a process has several nodes


class JsonLines(logging.Formatter):
    """Writes a record as a line of JSON: time, level, logger, message, and node and exception where there are."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        facts = {"time": time, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if node := NODE.get():
            facts["node"] = node
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return json.dumps(facts)


def begin(level: str, *, json_lines: bool) -> None:
    """Log from a level on, to standard error. Raises ValueError where no level has the name."""
    number = getattr(logging, level.upper(), None)
    if not isinstance(number, int):
        raise ValueError(f"{level!r}: use debug, info, warning or error")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if json_lines else logging.Formatter(PLAIN))
    logging.basicConfig(level=number, handlers=[handler])
    if json_lines:
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("fedstrata").critical("unforeseen", exc_info=(kind, error, trace))


def options() -> list[str]:
    """Return the command line's options that make another process log as this one does."""
    level = logging.getLevelName(logging.getLogger().level).lower()
    return ["--log-level", level, "--log-format", "json" if as_json() else "text"]


def as_json() -> bool:
    """Return whether standard error has JSON lines."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


def tell(words: str, *, level: int = logging.INFO) -> None:
    """Say something to people, whatever the level from which is logged."""
    if as_json():
        words = JsonLines().format(logging.LogRecord("fedstrata", level, "", 0, words.strip(), None, None))
    print(words, file=sys.stderr, flush=True)


def words_of(line: str) -> str:
    """Return the message of a line that another process said in either form."""
    try:
        return str(json.loads(line)["message"])
    except (ValueError, TypeError, KeyError):
        return line
