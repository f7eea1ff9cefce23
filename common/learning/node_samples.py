"""A node's held-out samples, and a module that computes on them: on the CPU, in one thread, in eval mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from common.experiment.own import is_own
from common.experiment.schema import Experiment
from common.learning import datasets, models, splits
from common.model.layout import Row
from common.randomness import Purpose, generator

BATCH: Final = 500  # samples of an evaluation at once


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread inside the `with` block: sums must not depend on the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class NodeDraws:
    """The random numbers of a node. `moved` is called after each batch."""

    def __init__(self, experiment: Experiment, node: str, *, moved: Callable[[], None] = lambda: None) -> None:
        self.moved = moved
        self._node = node
        self._seed = experiment.seed

    def draw(self, purpose: Purpose, *, r: int) -> np.random.Generator:
        """Return the node's random generator of a round and a purpose."""
        return generator(self._seed, purpose, self._node, r)


class NodeSamples(NodeDraws):
    """The N held-out samples of an experiment at a node, and its module. Raises InvalidExperiment.

    The module is in eval mode: its buffers never change.
    """

    def __init__(self, experiment: Experiment, node: str, *, moved: Callable[[], None] = lambda: None) -> None:
        super().__init__(experiment, node, moved=moved)
        dataset, split = datasets.load(experiment.data, node=node), splits.split_of(experiment, node=node)
        places = torch.from_numpy(split.held_out)
        self.partition = split.digest
        self._anew = partial(models.anew, experiment, inputs=dataset.inputs) if is_own(experiment.model.name) else None
        self.module = models.of(experiment, inputs=dataset.inputs).eval()
        self.layout = models.layout_of(self.module)
        self.weights = list(self.module.parameters())
        self.labels = dataset.train_labels.index_select(0, places)
        self._samples = dataset.train_images.index_select(0, places)
        self._normalise = dataset.normaliser()

    def load(self, row: Row) -> None:
        """Copy a flat model, uint8 [row_bytes], into the module, a new one if it is the user's own (see `own.py`)."""
        if self._anew is not None:
            self.module = self._anew().eval()
            self.weights = list(self.module.parameters())
        models.read_row(self.module, self.layout, row)

    def store(self, row: Row) -> None:
        """Copy the module into a flat model."""
        models.write_row(self.module, self.layout, row)

    def logits(self, places: Tensor) -> Tensor:
        """Return the module's logits, float32 [n, classes], for samples with these indices, int64 [n]."""
        logits: Tensor = self.module(self._normalise(self._samples.index_select(0, places)))
        self.moved()
        return logits

    @torch.no_grad()
    def all_logits(self) -> Tensor:
        """Return the module's logits for all samples, float32 [N, classes], without gradients."""
        return torch.cat([self.logits(places) for places in torch.split(torch.arange(len(self.labels)), BATCH)])

    def divergence(self, target: Tensor) -> float:
        """Return the mean over the samples of KL(target || softmax(logits)), in nats; `target` [N, classes]."""
        logs = functional.log_softmax(self.all_logits().double(), dim=1)
        return float(functional.kl_div(logs, target.double(), reduction="batchmean"))

    def loss(self) -> float:
        """Return the mean cross-entropy over the samples, in nats."""
        return float(functional.cross_entropy(self.all_logits().double(), self.labels))

    def passes(self, size: int, *, r: int) -> Iterator[list[Tensor]]:
        """Yield one pass over the samples after another, in a new order: batches of indices, the last one smaller.

        The orders depend on seed, node and round alone.
        """
        order = self.draw(Purpose.DISTILLATION, r=r)
        while True:
            yield list(torch.split(torch.from_numpy(order.permutation(len(self.labels))), size))
