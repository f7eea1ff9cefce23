"""The trainings of several devices of one process, vmapped if that is faster."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from common.accounting.child_report import TrainingPath
from common.errors import InvalidExperiment
from common.experiment.schema import Experiment
from common.learning import datasets, models
from common.learning.computing import first_line, out_of_memory, set_up
from device.jobs import Cancelled, Ending, HostedDevice, LocalResult, Order
from device.training.augmentation import Changes
from device.training.batches import LocalDataset, dropout_seed, load_local_dataset, orders, uniform_numbers
from device.training.network import network_of
from device.training.objectives.table import objective_of
from device.training.sgd import captured_of, is_captured, keep_linear_fp32
from device.training.updates import finish, vectors_of
from device.vmapped.calibration import StepTimes, measure, most_in_memory, problem_of
from device.vmapped.gathering import VmappedMode
from device.vmapped.loop import Turn, Visits, VmappedResult, train
from device.vmapped.models import Recipe, keep_batch_norm_fp32, logits_of
from device.vmapped.schedule import Load, plan

CPU: Final = torch.device("cpu")
KEY: Final = "training.vmapped"

log = logging.getLogger("fedstrata.vmapped")

Done = Callable[[int, Ending], None]
Work = tuple[HostedDevice, Order]


class VmappedTrainer:
    """Trains devices of one experiment together on one accelerator; another experiment replaces the last one."""

    def __init__(self, accelerator: torch.device) -> None:
        self._accelerator = accelerator
        self._digest = ""
        self._shared: _Shared | None = None
        self._failed: set[str] = set()  # the digests of experiments with a failed step

    def check(self, device: HostedDevice) -> None:
        """Try vmapped steps of the experiment's model with a device's samples. Raises InvalidExperiment."""
        set_up(self._accelerator, device.experiment.training)
        try:
            self._shared_of(device).check(device)
        except torch.OutOfMemoryError:
            self._shared = None  # in training, devices without memory for a common step train one after another

    def train(self, work: Sequence[Work], done: Done, *, timed: bool) -> list[int]:
        """Train devices together; `done` gets each one's number and outcome. Return the others' numbers.

        `timed`: only those that are faster together, which is measured. If a step fails, the devices that are not done
        are returned, and later rounds of the experiment are not vmapped.
        """
        first, _ = work[0]
        left = list(range(len(work)))
        if len(work) == 1 or first.digest in self._failed:
            return left

        def end(number: int, how: Ending) -> None:
            left.remove(number)
            done(number, how)

        set_up(self._accelerator, first.experiment.training)
        try:
            self._train(work, end, timed=timed)
        except RuntimeError as error:
            self._shared = None  # frees its memory for those that are left
            if not out_of_memory(error):
                self._failed.add(first.digest)
                name = f"{first.experiment.model.name} on {self._accelerator}"
                log.warning("%s: a vmapped step failed. Devices train one after another: %s", name, first_line(error))
        if self._accelerator.type == "cuda":
            torch.cuda.empty_cache()  # other processes may train on it too
        return left

    def _shared_of(self, device: HostedDevice) -> _Shared:
        if self._shared is None or self._digest != device.digest:
            self._digest, self._shared = device.digest, _Shared(device.experiment, self._accelerator)
        return self._shared

    def _train(self, work: Sequence[Work], done: Done, *, timed: bool) -> None:
        shared = self._shared_of(work[0][0])
        by_rate: defaultdict[float, list[int]] = defaultdict(list)  # the rate may differ between global rounds
        for number, (_, order) in enumerate(work):
            by_rate[shared.rate(order)].append(number)
        shared.know([device.node for device, _ in work])
        for rate, numbers in by_rate.items():
            recipe = shared.recipe(rate)
            turns = [shared.turn(*work[number], partial(done, number)) for number in numbers]
            if most := self._most(shared, recipe, turns, timed=timed):
                train(recipe, turns, most=most)

    def _most(self, shared: _Shared, recipe: Recipe, turns: Sequence[Turn], *, timed: bool) -> int:
        """Return how many to train in one group, 0 if they are faster one after another."""
        if len(turns) == 1:
            return 0
        most, speeds = shared.trial(recipe, turns, timed=timed)
        if most and speeds is not None:
            made = plan([turn.load for turn in turns], batch_size=recipe.training.batch_size, pad=recipe.pads)
            return most if speeds.together_s(made) < speeds.one_by_one_s(made) else 0
        return most


class _Shared:
    """The shared state of an experiment's devices on an accelerator: a module, and all their samples, once."""

    def __init__(self, experiment: Experiment, accelerator: torch.device) -> None:
        self._experiment = experiment
        self._accelerator = accelerator
        self._local: dict[str, LocalDataset] = {}
        self._problem: str | None = None
        self._trials: dict[int, tuple[int, StepTimes | None]] = {}  # by the binary logarithm of the group's size

    def know(self, nodes: Sequence[str]) -> None:
        """Load the data of new devices and copy the samples of all devices to the accelerator."""
        new = [node for node in nodes if node not in self._local]
        if not new:
            return
        self._local.update({node: load_local_dataset(self._experiment, node, accelerator=CPU) for node in new})
        sources: dict[int, list[LocalDataset]] = {}
        for local in self._local.values():
            sources.setdefault(local.images.data_ptr(), []).append(local)
        first = next(iter(self._local.values()))
        module = models.of(self._experiment, inputs=first.inputs)
        keep_linear_fp32(module, self._experiment.training, device=self._accelerator)
        keep_batch_norm_fp32(module, self._experiment.training, device=self._accelerator)
        self._vectors = vectors_of(self._experiment, nodes[0], models.layout_of(module))
        self._draws = objective_of(self._experiment.training).draws(self._vectors.shapes, first.inputs.classes)
        self._module = module.to(self._accelerator).train()
        captured = is_captured(module, self._experiment, device=self._accelerator)
        self._captured = captured_of(logits_of(module), self._experiment.training) if captured else None
        # On a CPU a device alone is trained with another form of the model.
        on_cpu = self._accelerator.type == "cpu"
        self._network = network_of(self._experiment, first.inputs, accelerator=CPU) if on_cpu else None
        data = datasets.load(self._experiment.data, node=nodes[0])
        self._normalise = data.normaliser(self._accelerator)
        self._held: dict[int, tuple[int, Tensor]] = {}  # by source: the offset of its samples here, and their indices
        images, labels, begin = [], [], 0
        for source, parts in sources.items():
            samples = torch.unique(torch.cat([local.samples for local in parts]))
            self._held[source] = begin, samples
            images.append(parts[0].images[samples])
            labels.append(parts[0].labels[samples])
            begin += len(samples)
        self._images, self._labels = (torch.cat(each).to(self._accelerator) for each in (images, labels))

    def check(self, device: HostedDevice) -> None:
        """Try two copies of a device together. Raises InvalidExperiment, torch.OutOfMemoryError."""
        self.know([device.node])
        row, layout = self._vectors.received.empty(), self._vectors.layout
        row[:] = 0
        models.write_row(self._module, layout, row)
        order = Order(row, row, 1, 0, lambda *_: None, threading.Event())
        recipe = self.recipe(self.rate(order))
        if problem := problem_of(recipe, [self.turn(device, order, lambda _: None)] * 2):
            problem = f"it is impossible here, because of {problem}"
            remedy = "Use auto, which trains such models one after another, or never."
            raise InvalidExperiment(KEY, VmappedMode.ALWAYS.value, problem, remedy)

    def rate(self, order: Order) -> float:
        """Return the learning rate of the order's global round."""
        return self._experiment.learning_rate_in(order.local_round)

    def recipe(self, rate: float) -> Recipe:
        """Return what the devices share at this learning rate."""
        shared = (self._module, self._vectors, self._images, self._labels, self._normalise)
        return Recipe(*shared, self._experiment.training, rate, self._captured)

    def turn(self, device: HostedDevice, order: Order, done: Callable[[Ending], None]) -> Turn:
        """Return a device's order as a turn of vmapped training."""
        local = self._local[device.node]
        begin, samples = self._held[local.images.data_ptr()]
        visited = list(
            orders(local, self._experiment, node=device.node, epochs=order.epochs, local_round=order.local_round)
        )
        places = torch.cat([places for places, _ in visited])
        changes = [changes for _, changes in visited if changes is not None]
        numbers = uniform_numbers(
            self._experiment, self._draws, node=device.node, local_round=order.local_round, device=CPU
        )
        visits = Visits(
            begin + torch.searchsorted(samples, places),
            _joined(changes) if changes else None,
            None if numbers is None else numbers(len(places)),
        )
        load = Load(len(local.samples), order.epochs)

        def end(how: VmappedResult | Cancelled) -> None:
            if not isinstance(how, VmappedResult):
                done(how)
                return
            order.out[: how.row.size] = how.row
            local_round = order.local_round
            finish(
                self._experiment, self._vectors, local, order.row, order.out, steps=how.steps, local_round=local_round
            )
            costs = (how.train_s, how.wall_s - how.train_s)
            done(LocalResult(load.samples, how.loss, how.steps, *costs, TrainingPath.VMAPPED, how.wall_s))

        seed = dropout_seed(self._experiment, node=device.node, local_round=order.local_round)
        return Turn(order.row, load, visits, order.progress, order.cancelled, end, seed)

    def trial(self, recipe: Recipe, turns: Sequence[Turn], *, timed: bool) -> tuple[int, StepTimes | None]:
        """Return how many fit in one group, 0 for none, and their step times if `timed`; measured once per size."""
        name = f"{self._experiment.model.name} on {self._accelerator}"
        if self._problem is None:
            self._problem = problem_of(recipe, turns)
            if self._problem:
                log.warning("%s: trained one device after another, because of %s", name, self._problem)
        if self._problem:
            return 0, None
        size = len(turns).bit_length()
        if size not in self._trials:
            most = most_in_memory(recipe, turns)
            speeds = measure(recipe, turns[:most], self._network) if timed else None
            self._trials[size] = most, speeds
            log.info("%s: at most %d together, %s", name, most, speeds)
        return self._trials[size]


def _joined(changes: Sequence[Changes]) -> Changes:
    return Changes(torch.cat([each.flips for each in changes]), torch.cat([each.shifts for each in changes]))
