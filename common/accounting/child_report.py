"""The report on one device in a global round, from its parent to the cloud."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from common.accounting.traffic import Measured, Traffic


class TrainingPath(StrEnum):
    """How a device trained: in its agent's process, in a worker process, or vmapped with other devices.

    The names of earlier releases are accepted as values.
    """

    NONE = ""
    IN_PROCESS = "in-process"
    WORKERS = "workers"
    VMAPPED = "vmapped"

    @classmethod
    def _missing_(cls, value: object) -> TrainingPath | None:
        return EARLIER_PATHS.get(value) if isinstance(value, str) else None


EARLIER_PATHS: Final[Mapping[str, TrainingPath]] = MappingProxyType(
    {"lean": TrainingPath.IN_PROCESS, "stacked": TrainingPath.VMAPPED}
)


@dataclass(frozen=True, slots=True)
class ChildReport:
    """Work of one device in a global round, its link's calibration before the run, and the link's bytes since then.

    Both directions are counted on arrival: `up` at the parent, `down` at the child. The seconds are those of `Result`,
    summed over the rounds.
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
