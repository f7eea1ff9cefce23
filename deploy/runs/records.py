"""Records of a run's rows. An invalid row raises ValueError, TypeError or KeyError."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from common.accounting.child_report import EARLIER_PATHS
from common.protocol.timeline import GLOBAL_PHASES

_T = TypeVar("_T")

PREDICTION: Final = "prediction.json"  # in a run's folder, if a prediction was made
TIERS: Final = ("wan", "lan")
COUNTS: Final = tuple(f"{tier}_{way}_bytes" for tier in TIERS for way in ("up", "down"))
RENAMED: Final = {"round": "global_round", "iteration": "global_round", "iterations": "global_rounds"}  # format 1
BROKER: Final = "broker"  # kind of the row in links.csv that counts a parent's whole connection


@dataclass(frozen=True, slots=True)
class GlobalRoundRecord:
    """A row of rounds.csv: one global round. `bytes_` has the four keys of COUNTS; None = unknown so far."""

    number: int
    elapsed_s: float
    accuracy: float | None
    loss: float | None
    train_loss: float | None
    phases: Mapping[str, float]
    sgd_steps: int
    path_steps: int
    bytes_: Mapping[str, int]
    missing: Sequence[str]
    refused: Sequence[str]
    epochs: Mapping[str, int]

    @property
    def seconds(self) -> float:
        """The sum of all phases, seconds."""
        return math.fsum(self.phases.values())


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """A row of links.csv; None = not reported."""

    tier: str
    source: str
    target: str
    kind: str
    payload: int | None
    message: int | None
    wire: int | None
    overhead_percent: float | None
    retransmitted: int | None
    rtt_ms: float | None
    rtt_min_ms: float | None
    measured_mbit: float | None
    probe: int

    @property
    def goes(self) -> str:
        """`source target`, the key of a link's direction in a prediction."""
        return f"{self.source} {self.target}"


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """A row of devices.csv: one device in one global round. Early releases lack `path` and `pause_s`."""

    global_round: int
    institution: str
    device: str
    samples: int
    epochs: int
    sgd_steps: int
    loss: float | None
    train_s: float
    wait_s: float
    pause_s: float | None
    path: str


@dataclass(frozen=True, slots=True)
class Event:
    """A line of events.jsonl."""

    time: str
    name: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prediction:
    """A prediction of one global round: seconds by phase, MQTT bytes by `source target` of a link's direction."""

    seconds: Mapping[str, float]
    bytes_: Mapping[str, float]


def renamed(row: Mapping[str, _T]) -> dict[str, _T]:
    """Return a row, or an event's facts, with the names of format 1 replaced by the current ones."""
    return {RENAMED.get(name, name): value for name, value in row.items()}


def read_round(row: Mapping[str, str]) -> GlobalRoundRecord:
    """Read a row of rounds.csv."""
    return GlobalRoundRecord(
        number=int(row["global_round"]),
        elapsed_s=number(row["elapsed_s"]),
        accuracy=_maybe(row["accuracy"]),
        loss=_maybe(row["loss"]),
        train_loss=_maybe(row["train_loss"]),
        phases={phase: number(row[f"{phase}_s"]) for phase in GLOBAL_PHASES},
        sgd_steps=int(row["sgd_steps"]),
        path_steps=int(row["path_steps"]),
        bytes_={name: int(row[name]) for name in COUNTS},
        missing=row["missing"].split(),
        refused=row["refused"].split(),
        epochs=_named(row, "epochs_"),
    )


def read_link(row: Mapping[str, str]) -> LinkRecord:
    """Read a row of links.csv."""
    return LinkRecord(
        tier=row["tier"],
        source=row["from"],
        target=row["to"],
        kind=row["kind"],
        payload=_count(row["payload_bytes"]),
        message=_count(row["message_bytes"]),
        wire=_count(row["wire_bytes"]),
        overhead_percent=_maybe(row["overhead_percent"]),
        retransmitted=_count(row["retransmitted_bytes"]),
        rtt_ms=_maybe(row["rtt_ms"]),
        rtt_min_ms=_maybe(row["rtt_min_ms"]),
        measured_mbit=_maybe(row["measured_mbit"]),
        probe=_count(row["probe_bytes"]) or 0,
    )


def read_device(row: Mapping[str, str]) -> DeviceRecord:
    """Read a row of devices.csv."""
    return DeviceRecord(
        global_round=int(row["global_round"]),
        institution=row["institution"],
        device=row["device"],
        samples=int(row["samples"]),
        epochs=int(row["epochs"]),
        sgd_steps=int(row["sgd_steps"]),
        loss=_maybe(row["loss"]),
        train_s=number(row["train_s"]),
        wait_s=number(row["wait_s"]),
        pause_s=_maybe(row.get("pause_s") or ""),
        path=str(EARLIER_PATHS.get(row.get("path") or "", row.get("path") or "")),
    )


def _named(row: Mapping[str, str], prefix: str) -> dict[str, int]:
    return {key.removeprefix(prefix): int(cell) for key, cell in row.items() if key.startswith(prefix) and cell}


def number(cell: Any) -> float:
    """Return a finite number. Raises ValueError or TypeError."""
    found = float(cell)
    if not math.isfinite(found):
        raise ValueError(f"{cell!r} is not a finite number")
    return found


def _maybe(cell: str) -> float | None:
    """Return a number, or None for an empty cell or a non-finite loss."""
    found = float(cell) if cell else math.nan
    return found if math.isfinite(found) else None


def _count(cell: str) -> int | None:
    return int(cell) if cell else None
