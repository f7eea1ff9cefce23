"""SGD on PyTorch modules for the devices of one process: one device after another, or several
vmapped on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedstrata.common.accounting.work import Work
from fedstrata.common.learning.computing import resolve_accelerator
from fedstrata.common.learning.inputs import Inputs
from fedstrata.device.jobs import (
    DeviceOrder,
    Done,
    Ending,
    Examined,
    HostedDevice,
    LocalResult,
    Prepared,
    failure_to,
    most_together,
)
from fedstrata.device.training.trained_network import NetworkSource
from fedstrata.device.training.trainer import Trainer
from fedstrata.device.vmapped.vmapped_trainer import VmappedTrainer


class ModuleTrainers:
    """Creates a device's trainer on first use. The devices of an experiment share its model."""

    def __init__(self) -> None:
        # with the digest of given frozen arrays
        self._made: dict[tuple[str, str, str], tuple[str, Trainer]] = {}
        self._sources: dict[tuple[str, str, str], dict[Inputs, NetworkSource]] = {}
        self._vmapped_trainers: dict[str, VmappedTrainer] = {}

    def prepare(self, device: HostedDevice, accelerator: str) -> Prepared:
        """Load a device's data and model, and return its facts. Raises InvalidExperiment."""
        trainer = self._trainer(device, accelerator)
        if most_together(device.experiment, accelerator) > 1:
            self._vmapped_trainer(accelerator).prepare(device)
        return trainer.facts

    def train(self, work: Sequence[DeviceOrder], accelerator: str, done: Done) -> None:
        """Train the models of devices of one experiment; `done` gets each one's number and outcome.

        Raises what `Trainer.prepare` raises.
        """
        trainers = [self._trainer(device, accelerator) for device, _ in work]
        received: dict[int, Examined] = {}
        for number, (_, order) in enumerate(work):
            with failure_to(done, number):
                received[number] = trainers[number].examine(order)
        left = set(received)
        if not work[0][1].epochs:  # the models are not trained
            for number in left:
                done(number, received[number].of(LocalResult(Work(trainers[number].samples))))
            return
        work = [
            (device, trainer.start(order))
            for (device, order), trainer in zip(work, trainers, strict=True)
        ]

        def finish(number: int, how: Ending) -> None:
            if not isinstance(how, LocalResult):
                done(number, how)
                return
            with failure_to(done, number):
                done(
                    number,
                    received[number].of(how, trainers[number].examine_trained(work[number][1])),
                )

        alone = {
            number for number in left
            if trainers[number].joins or trainers[number].wrong.used_in(work[number][1].local_round)
        }  # fmt: skip
        together = sorted(left - alone)
        if together and most_together(work[0][0].experiment, accelerator) > 1:
            # scored when the group has released the accelerator's memory
            ended = list[tuple[int, Ending]]()

            def end(place: int, how: Ending) -> None:
                number = together[place]
                left.remove(number)
                if work[number][1].scores_trained:
                    ended.append((number, how))
                else:
                    finish(number, how)

            self._vmapped_trainer(accelerator).train([work[number] for number in together], end)
            for each in ended:
                finish(*each)
        for number in sorted(left):
            with failure_to(done, number):
                finish(number, trainers[number].train(work[number][1]))

    def forget(self, digest: str) -> None:
        """Drop an experiment's trainers."""
        self._made = {key: made for key, made in self._made.items() if key[0] != digest}
        self._sources = {key: made for key, made in self._sources.items() if key[0] != digest}
        # what they have learned of an accelerator is soon learned again
        self._vmapped_trainers.clear()

    def _vmapped_trainer(self, accelerator: str) -> VmappedTrainer:
        if accelerator not in self._vmapped_trainers:
            self._vmapped_trainers[accelerator] = VmappedTrainer(resolve_accelerator(accelerator))
        return self._vmapped_trainers[accelerator]

    def _trainer(self, device: HostedDevice, accelerator: str) -> Trainer:
        (digest, frozen) = device.built
        key = (device.digest, device.node, accelerator)
        made, trainer = self._made.get(key, ("", None))
        if trainer is None or made != frozen:
            sources = self._sources.setdefault((digest, frozen, accelerator), {})
            trainer = Trainer(
                device.experiment,
                node=device.node,
                accelerator=accelerator,
                sources=sources,
                frozen=device.frozen,
            )
            trainer.prepare()
            self._made[key] = frozen, trainer
            used = {(key[0], given, key[2]) for key, (given, _) in self._made.items()}
            self._sources = {key: made for key, made in self._sources.items() if key in used}
        return trainer
