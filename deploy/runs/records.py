"""What the files of a run's folder hold besides its tables (`cloud.records`), and the names of earlier releases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from common.experiment.topology import CLOUD

_T = TypeVar("_T")

PREDICTION: Final = "prediction.json"  # in a run's folder, if a prediction was made
EARLIER_TIERS: Final = ("wan", "lan")  # of runs whose manifest does not name them
RENAMED: Final = {"round": "global_round", "iteration": "global_round", "iterations": "global_rounds"}  # format 1
LATER: Final = ("mixed_accuracy", "mixed_loss", "pause_s", "path")  # columns that the tables of early releases lack


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


def present(row: Mapping[str, str]) -> dict[str, str]:
    """Return a table's row with the present columns; those that an early release lacks are empty."""
    node = {"node": f"{CLOUD}/{row['institution']}/{row['device']}"} if {"institution", "device"} <= row.keys() else {}
    return dict.fromkeys(LATER, "") | renamed(row) | node
