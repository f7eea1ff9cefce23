"""The trainers of one process: those that train one device after another, and those that train several vmapped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from common.errors import FedstrataError
from device.jobs import Cancelled, HostedDevice, Prepared
from device.training.computing import resolve_accelerator
from device.training.trainer import Trainer
from device.vmapped.gathering import most_together, vmapped_mode
from device.vmapped.trainer import Done, VmappedTrainer, Work

KEPT_BYTES: Final = 256 << 20


class Trainers:
    """Creates a device's trainer on first use, and again if larger models of other devices replaced it."""

    def __init__(self) -> None:
        self._made: OrderedDict[tuple[str, str, str], Trainer] = OrderedDict()
        self._vmapped_trainers: dict[str, VmappedTrainer] = {}

    def prepare(self, device: HostedDevice, accelerator: str) -> Prepared:
        """Load a device's data and model, and return its facts. Raises InvalidExperiment."""
        trainer = self._trainer(device, accelerator)
        return Prepared(trainer.layout, trainer.samples, trainer.partition, trainer.vectors.kept_bytes)

    def train(self, work: Sequence[Work], accelerator: str, done: Done) -> None:
        """Train the models of devices of one experiment; `done` gets each one's number and outcome.

        Raises what `Trainer.prepare` raises.
        """
        left: Sequence[int] = range(len(work))
        if most_together(accelerator) > 1:
            left = self._vmapped_trainer(accelerator).train(work, done)
        for number in left:
            device, order = work[number]
            trainer = self._trainer(device, accelerator)
            try:
                result = trainer.train(
                    order.row,
                    order.out,
                    epochs=order.epochs,
                    local_round=order.local_round,
                    progress=order.progress,
                    cancelled=order.cancelled,
                )
            except (FedstrataError, Cancelled) as error:
                done(number, error)
            else:
                done(number, result)

    def forget(self, digest: str) -> None:
        """Drop an experiment's trainers."""
        for key in [key for key in self._made if key[0] == digest]:
            del self._made[key]
        self._vmapped_trainers.clear()  # what they have learned of an accelerator is soon learned again

    def _vmapped_trainer(self, accelerator: str) -> VmappedTrainer:
        if accelerator not in self._vmapped_trainers:
            self._vmapped_trainers[accelerator] = VmappedTrainer(resolve_accelerator(accelerator), vmapped_mode())
        return self._vmapped_trainers[accelerator]

    def _trainer(self, device: HostedDevice, accelerator: str) -> Trainer:
        key = device.digest, device.node, accelerator
        trainer = self._made.get(key)
        if trainer is None:
            trainer = Trainer(device.experiment, node=device.node, accelerator=accelerator)
            trainer.prepare()
            self._made[key] = trainer
        self._made.move_to_end(key)
        # Creating a module takes about as long as two training steps, so large ones need not all be kept.
        while len(self._made) > 1 and sum(made.layout.row_bytes for made in self._made.values()) > KEPT_BYTES:
            self._made.popitem(last=False)
        return trainer
