"""The trainers of one process, which train one after another."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from device.jobs import Device, LocalResult, Order, Prepared
from device.slots import Slots
from device.trainer import Trainer

KEPT_BYTES: Final = 256 << 20


class Trainers:
    """Makes a device's trainer when it is first needed, and again if the larger models of others took its place."""

    def __init__(self) -> None:
        self._made: OrderedDict[tuple[str, str, str], Trainer] = OrderedDict()

    def prepare(self, device: Device, accelerator: str) -> Prepared:
        """Load what a device needs and return its facts. Raises InvalidExperiment."""
        trainer = self._trainer(device, accelerator)
        return Prepared(trainer.layout, trainer.samples, trainer.partition)

    def train(self, device: Device, accelerator: str, order: Order) -> LocalResult:
        """Train one device's model. Raises what `Trainer.prepare` and `Trainer.train` raise."""
        return self._trainer(device, accelerator).train(
            order.row,
            order.out,
            epochs=order.epochs,
            round_=order.round_,
            progress=order.progress,
            cancelled=order.cancelled,
        )

    def _trainer(self, device: Device, accelerator: str) -> Trainer:
        key = device.digest, device.node, accelerator
        trainer = self._made.get(key)
        if trainer is None:
            trainer = Trainer(device.experiment, node=device.node, accelerator=accelerator, slots=Slots())
            trainer.prepare()
            self._made[key] = trainer
        self._made.move_to_end(key)
        # Making a module takes about as long as two steps of training it, so large ones need not all stay.
        while len(self._made) > 1 and sum(made.layout.row_bytes for made in self._made.values()) > KEPT_BYTES:
            self._made.popitem(last=False)
        return trainer
