"""What the files of a run's folder hold besides its tables (`cloud.records`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

PREDICTION: Final = "prediction.json"  # in a run's folder, if a prediction was made


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
