"""The trainers of one process. Each kind is imported when an experiment needs it: not every device
has PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from fedstrata.common.errors import InvalidExperiment, installing
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.memory import peak_bytes
from fedstrata.common.settings.tables import named_in_module
from fedstrata.common.settings.trainers import TRAINER_KEY
from fedstrata.device.jobs import (
    DeviceOrder,
    DeviceTrainers,
    Done,
    Ending,
    HostedDevice,
    LocalResult,
    Prepared,
)

MODULES: Final = "fedstrata.device.pool.module_trainers:ModuleTrainers"
ARRAYS: Final = "fedstrata.device.training.arrays:ArrayTrainers"


def imports_of(experiment: Experiment) -> Sequence[str]:
    """Return the module that trains the devices of an experiment, if it imports PyTorch."""
    if experiment.training.trainer.learns_module:
        return (MODULES.partition(":")[0],)
    return ()


class Trainers:
    """Trains for the devices of a process, whatever trains in their experiments."""

    def __init__(self) -> None:
        self._made: dict[str, DeviceTrainers] = {}

    @staticmethod
    def accelerators() -> list[str]:
        """Import PyTorch: seconds, and 250 MB. Return the accelerators of this machine."""
        from fedstrata.common.learning.computing import accelerators

        return accelerators()

    def prepare(self, device: HostedDevice, accelerator: str) -> Prepared:
        """Return a device's facts. Raises InvalidExperiment."""
        return self._of(device.experiment).prepare(device, accelerator)

    def train(self, work: Sequence[DeviceOrder], accelerator: str, done: Done) -> None:
        """Train for devices of one experiment, as `DeviceTrainers` does. Raises
        InvalidExperiment.
        """

        def measured(number: int, how: Ending) -> None:
            if isinstance(how, LocalResult):
                costs = replace(how.work.costs, memory_bytes=peak_bytes())
                how = replace(how, work=replace(how.work, costs=costs))
            done(number, how)

        self._of(work[0][0].experiment).train(work, accelerator, measured)

    def forget(self, digest: str) -> None:
        """Drop what was made for an experiment."""
        for made in self._made.values():
            made.forget(digest)

    def _of(self, experiment: Experiment) -> DeviceTrainers:
        place = MODULES if experiment.training.trainer.learns_module else ARRAYS
        if place not in self._made:
            try:
                self._made[place] = named_in_module(place)()
            except ModuleNotFoundError as error:
                if error.name != "torch":
                    raise
                problem = "needs PyTorch, not installed here"
                remedy = f"{installing('learning')}."
                raise InvalidExperiment(
                    f"{TRAINER_KEY}.name", experiment.training.trainer.name, problem, remedy
                ) from None
        return self._made[place]
