"""What one device did in a global round, as its parent passes it on and the cloud writes it down."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from common.accounting.traffic import Measured, Traffic


class TrainingPath(StrEnum):
    """How a device's trainings were run: in its own process, by worker processes, or stacked with other devices'."""

    NONE = ""
    LEAN = "lean"
    WORKERS = "workers"
    STACKED = "stacked"


@dataclass(frozen=True, slots=True)
class ChildReport:
    """What one device did in a global round, its link as measured before the run, and the link's bytes since.

    `up` and `down` are each counted where they arrive: `up` at the parent, `down` at the child. The seconds are
    those of `Result`, summed over the rounds.
    """

    name: str
    samples: int = 0
    rounds: int = 0
    epochs: int = 0
    steps: int = 0
    loss: float = 0.0
    train_s: float = 0.0
    wait_s: float = 0.0
    pause_s: float = 0.0
    path: TrainingPath = TrainingPath.NONE
    measured: Measured = Measured()
    traffic: Traffic = Traffic()
