"""The trainers of one process. Each kind is imported when an experiment needs it: not every device has PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from common.errors import InvalidExperiment
from common.experiment.schema import Experiment
from common.experiment.tables import named_in_module
from common.experiment.trainers import KEY
from common.host.memory import peak_bytes
from device.jobs import DeviceTrainers, Done, Ending, HostedDevice, LocalResult, Prepared, Work

MODULES: Final = "device.pool.module_trainers:ModuleTrainers"
ARRAYS: Final = "device.training.arrays:ArrayTrainers"


class Trainers:
    """Trains for the devices of a process, whatever trains in their experiments."""

    def __init__(self) -> None:
        self._made: dict[str, DeviceTrainers] = {}

    @staticmethod
    def accelerators() -> list[str]:
        """Import PyTorch: seconds, and 250 MB. Return the accelerators of this machine."""
        from common.learning.computing import accelerators

        return accelerators()

    def prepare(self, device: HostedDevice, accelerator: str) -> Prepared:
        """Return a device's facts. Raises InvalidExperiment."""
        return self._of(device.experiment).prepare(device, accelerator)

    def train(self, work: Sequence[Work], accelerator: str, done: Done) -> None:
        """Train for devices of one experiment, as `DeviceTrainers` does. Raises InvalidExperiment."""

        def measured(number: int, how: Ending) -> None:
            if isinstance(how, LocalResult):
                how = replace(how, costs=replace(how.costs, memory_bytes=peak_bytes()))
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
                problem, remedy = "needs PyTorch, not installed here", "pip install 'fedstrata[learning]'."
                raise InvalidExperiment(f"{KEY}.name", experiment.training.trainer.name, problem, remedy) from None
        return self._made[place]
