"""The outcome of a simulated lab: its result, its digests and its records."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedstrata.deploy.simulation.simulated_broker import Routed

OK = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class LabOutcome:
    """Outcome of a lab. Equal experiments, seeds and scenarios give equal outcomes.

    result: "ok", or the problem    ended: each node that ended, with its error or ""
    digest: of the final model, or ""    rounds: the rows of rounds.csv
    virtual_s: seconds of virtual time    messages: number of messages routed by the brokers
    trace: digest of all routed messages and their times    trainings: number of completed trainings
    errors: unhandled errors    warnings: the agents' logged warnings
    faults: the scenario's faults, with their times    lies: what members have lied about
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
    lies: frozenset[str] = frozenset()

    @property
    def ok(self) -> bool:
        """Whether the run and every node ended without an unhandled error."""
        return self.result == OK and not self.errors


@dataclass(slots=True)
class TraceDigest:
    """Digest of all routed messages, with the virtual seconds that `now` returns."""

    now: Callable[[], float]
    messages: int = 0
    _digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def __call__(self, message: Routed) -> None:
        """Add a message."""
        self.messages += 1
        head = f"{self.now():.9f} {message.broker} {message.topic} {message.qos} {message.retain} "
        self._digest.update(f"{head}{len(message.body)}\n".encode())
        self._digest.update(message.body)

    def hexadecimal(self) -> str:
        """Return 16 hexadecimal digits."""
        return self._digest.hexdigest()[:16]


def model_digest(runs: Path) -> str:
    """Return a digest of the final model of the runs in a folder, 16 hexadecimal digits, or "" if
    there is none.

    Runs that differ have their digests joined.
    """
    from safetensors.numpy import load_file

    found = set()
    for path in runs.glob("*/model.safetensors"):
        digest = hashlib.sha256()
        for name, tensor in sorted(load_file(path).items()):
            digest.update(name.encode() + tensor.tobytes())
        found.add(digest.hexdigest()[:16])
    return " ".join(sorted(found))


def round_rows(runs: Path) -> tuple[Mapping[str, str], ...]:
    """Return the rows of rounds.csv."""
    path = next(runs.glob("*/rounds.csv"), None)
    if path is None:
        return ()
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))
