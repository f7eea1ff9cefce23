"""How a simulated lab ended, and what it left."""

from __future__ import annotations

import csv
import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from deploy.simulation.broker import Routed
from deploy.simulation.loop import START_S, VirtualLoop

OK = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class LabOutcome:
    """How a lab ended. Equal experiments, seeds and scenarios give equal outcomes.

    result: "ok", or what went wrong    ended: each node that ended, with its error or ""
    digest: of the final model, or ""    rounds: the rows of rounds.csv
    virtual_s: seconds of virtual time    messages: how many the brokers routed
    trace: digest of all routed messages and their times    trainings: how many were done
    errors: what nobody handled    warnings: what the agents logged
    faults: what the scenario did, with its time
    """

    result: str
    ended: Mapping[str, str]
    digest: str
    virtual_s: float
    messages: int
    trace: str
    trainings: int
    errors: tuple[str, ...]
    warnings: tuple[str, ...]
    faults: tuple[tuple[float, str], ...]
    rounds: tuple[Mapping[str, str], ...]

    @property
    def ok(self) -> bool:
        """Whether the run ended, and every node with it, and nothing was left unhandled."""
        return self.result == OK and not self.errors


@dataclass(slots=True)
class TraceDigest:
    """A digest of all messages that brokers route, with their virtual times."""

    loop: VirtualLoop
    messages: int = 0
    _digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def __call__(self, message: Routed) -> None:
        """Add a message."""
        self.messages += 1
        head = f"{self.loop.time() - START_S:.9f} {message.broker} {message.topic} {message.qos} {message.retain} "
        self._digest.update(f"{head}{len(message.body)}\n".encode())
        self._digest.update(message.body)

    def hexadecimal(self) -> str:
        """Return 16 digits."""
        return self._digest.hexdigest()[:16]


def model_digest(runs: Path) -> str:
    """Return 16 digits of the final model of the run in a folder, "" if there is none."""
    from safetensors.numpy import load_file

    path = next(runs.glob("*/model.safetensors"), None)
    if path is None:
        return ""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(name.encode() + tensor.tobytes())
    return digest.hexdigest()[:16]


def round_rows(runs: Path) -> tuple[Mapping[str, str], ...]:
    """Return the rows of rounds.csv."""
    path = next(runs.glob("*/rounds.csv"), None)
    if path is None:
        return ()
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collect what the agents log at WARNING and above, in place of their usual handlers."""
    found: list[str] = []
    handler = _Collector(found)
    logger = logging.getLogger("fedstrata")
    before = logger.propagate, list(logger.handlers)
    logger.propagate, logger.handlers = False, [handler]
    try:
        yield found
    finally:
        logger.propagate, logger.handlers = before


class _Collector(logging.Handler):
    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        self._found.append(record.getMessage())
