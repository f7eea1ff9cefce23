"""The trainings of several devices of one process, vmapped: those of nets that ship."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from fedstrata.common.accounting.costs import DeviceCosts
from fedstrata.common.accounting.work import TrainingPath, Work
from fedstrata.common.errors import AcceleratorLost
from fedstrata.common.host.accelerators import is_lost, out_of_memory
from fedstrata.common.learning import datasets, models
from fedstrata.common.learning.computing import first_line, set_up
from fedstrata.common.learning.gpu_memory import memory_of
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.model.parts import given_arrays
from fedstrata.device.jobs import (
    Cancelled,
    DeviceOrder,
    Done,
    Ending,
    HostedDevice,
    LocalResult,
    Order,
)
from fedstrata.device.training.batches import (
    Changes,
    LocalDataset,
    dropout_seed,
    load_local_dataset,
    orders,
    uniform_numbers,
)
from fedstrata.device.training.objectives.objectives_by_name import objective_of
from fedstrata.device.training.vectors import finish, vectors_of
from fedstrata.device.vmapped.schedule import Load, plan
from fedstrata.device.vmapped.shared_steps import Batches, Turn, Visits, VmappedResult, train
from fedstrata.device.vmapped.stacked_models import Recipe, VmappedModels, keep_batch_norm_fp32

CPU: Final = torch.device("cpu")
PEAK_STEPS: Final = 3  # after which a group's memory is known
UNLIMITED_DEVICES: Final = 1 << 20  # where memory is the host's

log = logging.getLogger("fedstrata.vmapped")


class VmappedTrainer:
    """Trains devices of one experiment together on one accelerator; another experiment replaces the
    last one.
    """

    def __init__(self, accelerator: torch.device) -> None:
        self._accelerator = accelerator
        self._built: tuple[str, str] | None = None
        self._shared: _Shared | None = None
        self._failed: set[str] = set()  # the digests of experiments with a failed step

    def prepare(self, device: HostedDevice) -> None:
        """Measure how many devices fit into the memory of a common step, before the run begins.

        Once, with the second device of the experiment in this process: the first one might be
        alone. Raises AcceleratorLost.
        """
        set_up(self._accelerator, device.experiment.training)
        try:
            self._shared_of(device).prepare(device)
        except Exception as error:  # noqa: BLE001 - any kernel may be missing; each device alone finds its place
            self._give_up(device, error)

    def train(self, work: Sequence[DeviceOrder], done: Done) -> list[int]:
        """Train devices together; `done` gets each one's number and outcome. Return the others'
        numbers.

        If a step fails, the devices that are not done are returned, and later rounds of the
        experiment are not vmapped. Raises AcceleratorLost.
        """
        first, _ = work[0]
        left = list(range(len(work)))
        if len(work) == 1 or first.digest in self._failed:
            return left

        def end(number: int, how: Ending) -> None:
            left.remove(number)
            done(number, how)

        set_up(self._accelerator, first.experiment.training)
        memory = memory_of(self._accelerator)
        if memory is not None:
            memory.begin()
        try:
            self._train(work, end)
        except Exception as error:  # noqa: BLE001 - any kernel may be missing; each device alone finds its place
            self._give_up(first, error)
        if memory is not None:
            memory.end()
        return left

    def _give_up(self, device: HostedDevice, error: Exception) -> None:
        """Free the memory of a step that failed, and vmap the experiment no more if that was not
        for lack of memory.
        """
        if is_lost(error):
            raise AcceleratorLost(first_line(error)) from None
        self._shared = None
        if not out_of_memory(error):
            self._failed.add(device.digest)
            name = f"{device.experiment.model.name} on {self._accelerator}"
            log.warning(
                "%s: a vmapped step failed. Devices train one after another: %s",
                name,
                first_line(error),
            )

    def _shared_of(self, device: HostedDevice) -> _Shared:
        if self._shared is None or self._built != device.built:
            self._built = device.built
            self._shared = _Shared(device, self._accelerator)
        return self._shared

    def _train(self, work: Sequence[DeviceOrder], done: Done) -> None:
        shared = self._shared_of(work[0][0])
        # the rate may differ between global rounds
        by_rate: defaultdict[float, list[int]] = defaultdict(list)
        for number, (_, order) in enumerate(work):
            by_rate[shared.rate(order)].append(number)
        shared.know([device.node for device, _ in work])
        for rate, numbers in by_rate.items():
            recipe = shared.recipe(rate)
            turns = [shared.turn(*work[number], partial(done, number)) for number in numbers]
            if len(turns) > 1:
                train(recipe, turns, most=shared.most(recipe, turns[0]))


class _Shared:
    """The shared state of an experiment's devices on an accelerator: a module, and all their
    samples, once.
    """

    def __init__(self, device: HostedDevice, accelerator: torch.device) -> None:
        self._experiment = device.experiment
        self._frozen = given_arrays(device.frozen)
        self._accelerator = accelerator
        self._local: dict[str, LocalDataset] = {}
        self._prepared = 0
        self._most: int | None = None
        self._others = 0  # processes that shared the accelerator then

    def know(self, nodes: Sequence[str]) -> None:
        """Load the data of new devices and copy the samples of all devices to the accelerator."""
        new = [node for node in nodes if node not in self._local]
        if not new:
            return
        first = not self._local
        self._local.update(
            {node: load_local_dataset(self._experiment, node, accelerator=CPU) for node in new}
        )
        if first:
            self._begin(nodes[0])
        sources: dict[int, list[LocalDataset]] = {}
        for local in self._local.values():
            sources.setdefault(local.images.data_ptr(), []).append(local)
        # by source: the offset of its samples here, and their indices
        self._held: dict[int, tuple[int, Tensor]] = {}
        images = []
        labels = []
        begin = 0
        for source, parts in sources.items():
            samples = torch.unique(torch.cat([local.samples for local in parts]))
            self._held[source] = begin, samples
            images.append(parts[0].images[samples])
            labels.append(parts[0].labels[samples])
            begin += len(samples)
        self._images, self._labels = (
            torch.cat(each).to(self._accelerator) for each in (images, labels)
        )

    def _begin(self, node: str) -> None:
        """Make what all devices share; `node` is any of them."""
        inputs = self._local[node].inputs
        self._module = self._build(inputs)
        parts = models.parts_of(self._module, self._experiment.model)
        self._vectors = vectors_of(self._experiment, node, parts)
        self._draws = objective_of(self._experiment.training).draws(
            self._vectors.shapes, inputs.classes
        )
        data = datasets.load(self._experiment.data, node=node)
        self._normalise = data.normaliser(self._accelerator)

    def _build(self, inputs: Inputs) -> nn.Module:
        experiment = self._experiment
        module = models.of(experiment, inputs=inputs)
        models.read_frozen(module, self._frozen)
        keep_batch_norm_fp32(module, experiment.training, device=self._accelerator)
        return module.to(self._accelerator).train()

    def prepare(self, device: HostedDevice) -> None:
        """Measure copies of the second device together. Raises RuntimeError."""
        self._prepared += 1
        if self._prepared != 2:
            return
        self.know([device.node])
        row = np.zeros(self._vectors.links.down.row_bytes + self._vectors.kept_bytes, np.uint8)
        models.write_row(self._module, self._vectors.layout, row)
        order = Order(row, row, 1, 0, lambda *_: None, threading.Event())
        self.most(self.recipe(self.rate(order)), self.turn(device, order, lambda _: None))

    def rate(self, order: Order) -> float:
        """Return the learning rate of the order's global round."""
        return self._experiment.learning_rate_in(order.local_round)

    def recipe(self, rate: float) -> Recipe:
        """Return what the devices share at this learning rate."""
        shared = (self._module, self._vectors.inner, self._images, self._labels, self._normalise)
        return Recipe(*shared, self._experiment.training, rate, self._vectors.personal)

    def turn(self, device: HostedDevice, order: Order, done: Callable[[Ending], None]) -> Turn:
        """Return a device's order as a turn of vmapped training."""
        local = self._local[device.node]
        begin, samples = self._held[local.images.data_ptr()]
        experiment = self._experiment
        node = device.node
        local_round = order.local_round
        visited = list(
            orders(local, experiment, node=node, epochs=order.epochs, local_round=local_round)
        )
        places = torch.cat([places for places, _ in visited])
        numbers = uniform_numbers(
            experiment, self._draws, node=node, local_round=local_round, device=CPU
        )
        uniform = None if numbers is None else numbers(len(places))
        changes = Changes.joined(changes for _, changes in visited)
        visits = Visits(begin + torch.searchsorted(samples, places), changes, uniform)
        load = Load(len(local.samples), order.epochs)

        def end(how: VmappedResult | Cancelled) -> None:
            if not isinstance(how, VmappedResult):
                done(how)
                return
            self._vectors.end(how.row, order.out)
            finish(experiment, self._vectors, local, order, node=node, steps=how.steps)
            work = Work(
                load.samples,
                how.loss,
                order.epochs,
                how.steps,
                how.train_s,
                wait_s=how.wall_s - how.train_s,
                path=TrainingPath.VMAPPED,
                costs=DeviceCosts(cpu_s=how.cpu_s),
            )
            done(LocalResult(work, wall_s=how.wall_s))

        seed = dropout_seed(experiment, node=node, local_round=local_round)
        return Turn(
            self._vectors.begin(order.row), load, visits, order.progress, order.cancelled, end, seed
        )

    def most(self, recipe: Recipe, turn: Turn) -> int:
        """Return how many devices fit in one group: measured with any turn, once for each number
        of processes that share the accelerator.
        """
        memory = memory_of(self._accelerator)
        others = 0 if memory is None else memory.others()
        if self._most is None or others != self._others:
            self._most = most_in_memory(recipe, turn)
            self._others = others
            log.info(
                "%s on %s: at most %d together",
                self._experiment.model.name,
                self._accelerator,
                self._most,
            )
        return self._most


def most_in_memory(recipe: Recipe, turn: Turn) -> int:
    """Return the number of devices that fit into this process's share of the accelerator's memory,
    estimated from copies of a turn.
    """
    memory = memory_of(recipe.accelerator)
    if memory is None:
        return UNLIMITED_DEVICES
    each_bytes = max(1, (_peak_bytes(recipe, [turn] * 4) - _peak_bytes(recipe, [turn])) // 3)
    room_bytes = memory.share_bytes() - torch.cuda.memory_allocated(recipe.accelerator)
    return max(1, room_bytes // each_bytes)


def _peak_bytes(recipe: Recipe, turns: Sequence[Turn]) -> int:
    before = torch.cuda.memory_allocated(recipe.accelerator)
    torch.cuda.reset_peak_memory_stats(recipe.accelerator)
    made = plan(
        [turn.load for turn in turns], batch_size=recipe.training.batch_size, pad=recipe.pads
    )
    state = VmappedModels(recipe, [turn.row for turn in turns], [turn.seed for turn in turns])
    places, batch = Batches(recipe, made, turns).of(0)
    for _ in range(PEAK_STEPS):
        state.step(places, batch)
    return torch.cuda.max_memory_allocated(recipe.accelerator) - before
