"""SGD on PyTorch modules for the devices of one process: one device after another, or several vmapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from common.errors import FedstrataError
from common.learning.computing import resolve_accelerator
from common.learning.inputs import Inputs
from device.jobs import (
    Cancelled,
    Done,
    Ending,
    Examined,
    HostedDevice,
    LocalResult,
    Prepared,
    VmappedMode,
    Work,
    vmapped_mode,
)
from device.training.network import NetworkSource
from device.training.trainer import Trainer
from device.vmapped.trainer import VmappedTrainer


class ModuleTrainers:
    """Creates a device's trainer on first use. The devices of an experiment share its model."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str, str], tuple[str, Trainer]] = {}  # with the digest of given frozen arrays
        self._sources: dict[tuple[str, str, str], dict[Inputs, NetworkSource]] = {}
        self._vmapped_trainers: dict[str, VmappedTrainer] = {}

    def prepare(self, device: HostedDevice, accelerator: str) -> Prepared:
        """Load a device's data and model, and return its facts. Raises InvalidExperiment."""
        trainer = self._trainer(device, accelerator)
        mode = vmapped_mode(device.experiment, accelerator)
        if mode is not VmappedMode.NEVER:
            self._vmapped_trainer(accelerator).prepare(device, sure=mode is VmappedMode.ALWAYS)
        kept_bytes = trainer.vectors.kept_bytes
        return Prepared(trainer.layout, trainer.samples, trainer.partition, kept_bytes, trainer.tests)

    def train(self, work: Sequence[Work], accelerator: str, done: Done) -> None:
        """Train the models of devices of one experiment; `done` gets each one's number and outcome.

        Raises what `Trainer.prepare` raises.
        """
        trainers = [self._trainer(device, accelerator) for device, _ in work]
        received = self._examined(trainers, work, done)
        left = set(received)
        if not work[0][1].epochs and work[0][1].scores:  # the models are not trained
            for number in left:
                done(number, received[number].of(LocalResult(trainers[number].samples, None, 0, 0.0, 0.0)))
            return
        work = [
            (device, replace(order, row=trainer.start(order.row, local_round=order.local_round)))
            for (device, order), trainer in zip(work, trainers, strict=True)
        ]
        mode = vmapped_mode(work[0][0].experiment, accelerator)
        together = [number for number, trainer in enumerate(trainers) if number in left and not trainer.joins]

        def finish(number: int, how: Ending) -> None:
            (_, order), trained = work[number], None
            try:
                if isinstance(how, LocalResult) and order.scores_trained:
                    trained = trainers[number].examine_trained(
                        order.out, progress=order.progress, cancelled=order.cancelled
                    )
            except (FedstrataError, Cancelled) as error:
                how = error
            done(number, received[number].of(how, trained) if isinstance(how, LocalResult) else how)

        if mode is not VmappedMode.NEVER and together:
            ended = list[tuple[int, Ending]]()  # scored when the group has released the accelerator's memory

            def end(place: int, how: Ending) -> None:
                number = together[place]
                left.remove(number)
                if work[number][1].scores_trained:
                    ended.append((number, how))
                else:
                    finish(number, how)

            alike = [work[number] for number in together]
            self._vmapped_trainer(accelerator).train(alike, end)
            for each in ended:
                finish(*each)
        for number in sorted(left):
            (_, order), trainer = work[number], trainers[number]
            try:
                result = trainer.train(
                    order.row,
                    order.out,
                    epochs=order.epochs,
                    local_round=order.local_round,
                    progress=order.progress,
                    cancelled=order.cancelled,
                    noise=order.noise,
                )
            except (FedstrataError, Cancelled) as error:
                finish(number, error)
            else:
                finish(number, result)

    @staticmethod
    def _examined(trainers: Sequence[Trainer], work: Sequence[Work], done: Done) -> dict[int, Examined]:
        """Examine the models received; return what was found, by the numbers of the devices that go on."""
        found = {}
        for number, (_, order) in enumerate(work):
            try:
                found[number] = trainers[number].examine(
                    order.row,
                    scores=order.scores,
                    trains=order.epochs > 0,
                    progress=order.progress,
                    cancelled=order.cancelled,
                )
            except (FedstrataError, Cancelled) as error:
                done(number, error)
        return found

    def forget(self, digest: str) -> None:
        """Drop an experiment's trainers."""
        self._made = {key: made for key, made in self._made.items() if key[0] != digest}
        self._sources = {key: made for key, made in self._sources.items() if key[0] != digest}
        self._vmapped_trainers.clear()  # what they have learned of an accelerator is soon learned again

    def _vmapped_trainer(self, accelerator: str) -> VmappedTrainer:
        if accelerator not in self._vmapped_trainers:
            self._vmapped_trainers[accelerator] = VmappedTrainer(resolve_accelerator(accelerator))
        return self._vmapped_trainers[accelerator]

    def _trainer(self, device: HostedDevice, accelerator: str) -> Trainer:
        (digest, frozen), key = device.built, (device.digest, device.node, accelerator)
        made, trainer = self._made.get(key, ("", None))
        if trainer is None or made != frozen:
            sources = self._sources.setdefault((digest, frozen, accelerator), {})
            trainer = Trainer(
                device.experiment, node=device.node, accelerator=accelerator, sources=sources, frozen=device.frozen
            )
            trainer.prepare()
            self._made[key] = frozen, trainer
            used = {(key[0], given, key[2]) for key, (given, _) in self._made.items()}
            self._sources = {key: made for key, made in self._sources.items() if key in used}
        return trainer
