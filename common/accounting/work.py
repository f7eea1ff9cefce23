"""What a node did, in one record that passes from a device's training up to the cloud's tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final, Self

from fedstrata.common.accounting.costs import UNKNOWN_COSTS, DeviceCosts
from fedstrata.common.host.energy_meters import EnergySource
from fedstrata.common.training.scores import ScoredModels, summed


class TrainingPath(StrEnum):
    """How a device trained: in its agent's process, in a worker process, or vmapped with other
    devices.
    """

    NONE = ""
    IN_PROCESS = "in-process"
    WORKERS = "workers"
    VMAPPED = "vmapped"


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a node in one task of its parent, or the sum over several. Seconds are durations
    on its own clock.

    Of an institution `epochs` are those of its task, `steps` the sum over the devices below it, and
    the seconds sums over its rounds of its children's maximum.
    """

    samples: int = 0  # that the node trained on
    # the mean training loss of the last epoch; None: not known, or it did not train
    loss: float | None = None
    epochs: int = 0
    steps: int = 0  # of SGD
    train_s: float = 0.0
    wait_s: float = 0.0  # for a slot, before the training
    pause_s: float = 0.0  # after it, to emulate slower hardware
    path: TrainingPath = TrainingPath.NONE
    tests: ScoredModels | None = None  # sums over a device's test samples; None: it scored none
    costs: DeviceCosts = UNKNOWN_COSTS  # a device's

    def after(self, earlier: Work) -> Work:
        """Return this work and an earlier one, of which samples, loss and path are this one's."""
        return replace(
            self,
            epochs=earlier.epochs + self.epochs,
            steps=earlier.steps + self.steps,
            train_s=earlier.train_s + self.train_s,
            wait_s=earlier.wait_s + self.wait_s,
            pause_s=earlier.pause_s + self.pause_s,
            tests=summed((earlier.tests, self.tests)),
            costs=self._costs_after(earlier),
        )

    def to_json(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        tests = None if self.tests is None else self.tests.to_json()
        return {
            **{name: getattr(self, name) for name in self.__slots__},
            "tests": tests,
            "costs": asdict(self.costs),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Return the work of `to_json`."""
        tests = found["tests"]
        costs = found["costs"]
        known = {
            "path": TrainingPath(found["path"]),
            "tests": None if tests is None else ScoredModels.from_json(tests),
            "costs": DeviceCosts(
                **{**costs, "energy_source": EnergySource(costs["energy_source"])}
            ),
        }
        return cls(**{**found, **known})

    def _costs_after(self, earlier: Work) -> DeviceCosts:
        if not self.epochs:  # it only scored
            return earlier.costs
        if earlier.epochs:
            return self.costs.after(earlier.costs)
        return self.costs


NO_WORK: Final = Work()
