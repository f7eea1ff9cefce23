"""The trainers of one process: those that train one device after another, and those that train several vmapped."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import FedstrataError
from common.learning.computing import resolve_accelerator
from common.learning.inputs import Inputs
from device.jobs import Cancelled, HostedDevice, Prepared
from device.training.network import Network
from device.training.trainer import Trainer
from device.vmapped.gathering import VmappedMode, vmapped_mode
from device.vmapped.trainer import Done, VmappedTrainer, Work


class Trainers:
    """Creates a device's trainer on first use. The devices of an experiment share its model."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str, str], Trainer] = {}
        self._networks: dict[tuple[str, str], dict[Inputs, Network]] = {}
        self._vmapped_trainers: dict[str, VmappedTrainer] = {}

    def prepare(self, device: HostedDevice, accelerator: str) -> Prepared:
        """Load a device's data and model, and return its facts. Raises InvalidExperiment."""
        trainer = self._trainer(device, accelerator)
        mode = vmapped_mode(device.experiment.training, accelerator)
        if mode is not VmappedMode.NEVER:
            self._vmapped_trainer(accelerator).prepare(device, timed=mode is VmappedMode.AUTO)
        return Prepared(trainer.layout, trainer.samples, trainer.partition, trainer.vectors.kept_bytes)

    def train(self, work: Sequence[Work], accelerator: str, done: Done) -> None:
        """Train the models of devices of one experiment; `done` gets each one's number and outcome.

        Raises what `Trainer.prepare` raises.
        """
        left: Sequence[int] = range(len(work))
        device, _ = work[0]
        mode = vmapped_mode(device.experiment.training, accelerator)
        if mode is not VmappedMode.NEVER:
            left = self._vmapped_trainer(accelerator).train(work, done, timed=mode is VmappedMode.AUTO)
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
        self._made = {key: made for key, made in self._made.items() if key[0] != digest}
        self._networks = {key: made for key, made in self._networks.items() if key[0] != digest}
        self._vmapped_trainers.clear()  # what they have learned of an accelerator is soon learned again

    def _vmapped_trainer(self, accelerator: str) -> VmappedTrainer:
        if accelerator not in self._vmapped_trainers:
            self._vmapped_trainers[accelerator] = VmappedTrainer(resolve_accelerator(accelerator))
        return self._vmapped_trainers[accelerator]

    def _trainer(self, device: HostedDevice, accelerator: str) -> Trainer:
        key = device.digest, device.node, accelerator
        if key not in self._made:
            networks = self._networks.setdefault((device.digest, accelerator), {})
            trainer = Trainer(device.experiment, node=device.node, accelerator=accelerator, networks=networks)
            trainer.prepare()
            self._made[key] = trainer
        return self._made[key]
