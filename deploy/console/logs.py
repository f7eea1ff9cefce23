"""Log lines on standard error: plain text, or one JSON object per line. Neither has control
characters.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Final, TextIO, TypeAlias

from fedstrata.common.text import NOTE, escaped

PLAIN: Final = "%(asctime)s %(name)s %(levelname)s %(message)s"
# the logger of what a node does: shown at the default level, without its name
ACTIVITY: Final = "fedstrata.node"
ERROR: Final = "fedstrata: "  # begins the line of the error that ends a command
FRAME: Final = "  "  # begins a line below it
# node of the current task, in a process of several nodes
NODE: ContextVar[str] = ContextVar("node", default="")


_Raised: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


class PlainLines(logging.Formatter):
    """Formatter that writes a record as one line of text, and the lines of a traceback below it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line."""
        if record.name == ACTIVITY:
            return escaped(f"{record.asctime.partition(',')[0]} {record.message}")
        return escaped(super().formatMessage(record))

    def formatException(self, ei: _Raised) -> str:
        """Return the traceback."""
        return "\n".join(map(escaped, super().formatException(ei).split("\n")))


class JsonLines(logging.Formatter):
    """Formatter that writes a record as one JSON line: time, level, logger, message; node and
    exception if any.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        facts = {
            "time": time,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if node := NODE.get():
            facts["node"] = node
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return json.dumps(facts)


class StandardError(logging.StreamHandler[TextIO]):
    """Handler that writes to standard error as it is at each record: a live view shows lines above
    itself.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        self.setStream(sys.stderr)
        super().emit(record)


def begin(level: str, *, json_lines: bool) -> None:
    """Log to standard error from a level on. Raises ValueError for an unknown level."""
    number = getattr(logging, level.upper(), None)
    if not isinstance(number, int):
        raise ValueError(f"{level!r}: use debug, info, warning or error")
    handler = StandardError()
    formatter = JsonLines() if json_lines else PlainLines(PLAIN)
    handler.setFormatter(formatter)
    handler.addFilter(
        lambda record: (
            record.name != ACTIVITY or record.levelno >= number or number <= logging.WARNING
        )
    )
    logging.basicConfig(level=number, handlers=[handler])
    # systemd's status has its lines at any level
    logging.getLogger(ACTIVITY).setLevel(logging.INFO)
    sys.excepthook = _log_uncaught
    if json_lines:
        logging.captureWarnings(True)


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    logging.getLogger("fedstrata").critical("unforeseen", exc_info=(kind, error, trace))


@contextmanager
def limited(name: str, level: int) -> Iterator[None]:
    """Log of one logger only what has at least `level`, for a while."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def options() -> list[str]:
    """Return the command-line options that give another process the same log level and format."""
    level = logging.getLevelName(logging.getLogger().level).lower()
    return ["--log-level", level, "--log-format", "json" if as_json() else "text"]


def as_json() -> bool:
    """Return whether log lines are JSON."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


def shows_activity() -> bool:
    """Return whether lines about what a node does are shown at the log level."""
    return logging.getLogger().level <= logging.WARNING


def write_line(text: str, *, level: int = logging.INFO) -> None:
    """Write a line to standard error, regardless of the log level. `level` is recorded in JSON
    lines only.

    A line break at the beginning ends the `^C` of a terminal. A terminal that is closed, or a log
    on a full disk, ends nothing.
    """
    line = text.lstrip("\n")
    if as_json():
        shown = JsonLines().format(logging.LogRecord("fedstrata", level, "", 0, line, None, None))
    else:
        shown = text[: len(text) - len(line)] + escaped(line)
    with suppress(OSError):
        if sys.stderr is not None:
            print(shown, file=sys.stderr, flush=True)


def frame_lines(frames: Iterable[str]) -> list[str]:
    """Return the lines for the frames of own code, below that of its error: none above the log
    level info.
    """
    if logging.getLogger().isEnabledFor(logging.INFO):
        return [f"{FRAME}{frame}" for frame in frames]
    return []


def last_error(log: Path) -> list[str]:
    """Return the last error of another process's log, in either format, and its frames below it;
    else the last line.
    """
    lines = [
        line
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    messages = [_message_of(line) for line in lines]
    errors = [place for place, message in enumerate(messages) if message.startswith(ERROR)]
    if not errors:
        return messages[-1:]
    return [
        messages[errors[-1]],
        *takewhile(lambda message: message.startswith(FRAME), messages[errors[-1] + 1 :]),
    ]


def notes_in(lines: str) -> list[str]:
    """Return the warnings of training processes in the lines of another process's log, in either
    format.
    """
    messages = [_message_of(line) for line in lines.splitlines() if NOTE in line]
    return [message[message.index(NOTE) :] for message in messages]


def _message_of(line: str) -> str:
    try:
        return str(json.loads(line)["message"])
    except (ValueError, TypeError, KeyError):
        return line
