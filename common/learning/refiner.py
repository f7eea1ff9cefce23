"""A node's refiner in this process, and what methods refine with: held-out samples and a module,
draws, an optimiser.

The module computes on the CPU, in one thread, in eval mode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets, models, splits
from fedstrata.common.learning.computing import calls_own_code, seeded
from fedstrata.common.learning.optimizers import AdaptiveMoments, take
from fedstrata.common.methods.rule import RULE_KEY
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.model.parts import given_arrays
from fedstrata.common.model.refinement import RoundModels
from fedstrata.common.randomness import Purpose, generator, torch_seed
from fedstrata.common.settings import own
from fedstrata.common.settings.data import check_alike
from fedstrata.common.settings.own import is_own
from fedstrata.common.settings.tables import named_in_module
from fedstrata.common.settings.training import Adam

BATCH: Final = 500  # samples of an evaluation at once
Refine = Callable[[Any, Any, RoundModels], Mapping[str, Any]]


class NodeRefiner:
    """The method of one node, and its samples if it reads some.

    `partition`: the digest of the cloud's split; `frozen`: a file of the cloud's frozen arrays, if
    this node builds others; `watch`: of progress.
    Raises InvalidExperiment, also if the node's split differs from the cloud's.
    """

    def __init__(
        self,
        experiment: Experiment,
        node: str,
        *,
        partition: str,
        frozen: Path | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self._experiment = experiment
        self._settings = settings = experiment.tier_below(node).aggregation.resolved.refined_by
        assert settings.refiner is not None
        load = partial(own.load, RULE_KEY) if is_own(settings.name) else named_in_module
        self._refine: Refine = load(settings.refiner)
        self._watch = watch
        self._seed = experiment.seed
        self._name = node
        self._moves = 0
        self.layout: ModelLayout | None = None  # of its own model, if it builds one
        if not self._settings.reads_samples:
            self._node = NodeDraws(experiment, node, moved=self._moved)
            return
        self._node = samples = NodeSamples(experiment, node, frozen=frozen, moved=self._moved)
        self.layout = samples.layout
        check_alike(experiment.data, node, partition=samples.partition, clouds=partition)

    @property
    def moves(self) -> int:
        """Counter of batches."""
        return self._moves

    @calls_own_code
    def refine(self, models: RoundModels) -> Mapping[str, Any]:
        """Refine the mean, or learn weights or a generator; return facts, with the seconds that it
        took.
        """
        started = time.monotonic()
        own_seed = torch_seed(self._seed, Purpose.OWN_CODE, self._name, models.r)
        name = self._settings.name
        with one_thread(), seeded(own_seed), own.guarded({RULE_KEY: name}):
            facts = self._refine(self._node, self._settings, models)
        if is_own(name):
            own.kept(RULE_KEY, name, facts, "its refiner returns", at=own.place(self._refine))
        return {**facts, "seconds": round(time.monotonic() - started, 3)}

    def cancel(self) -> None:
        """Do nothing: the caller's thread computes."""

    def allow(self) -> None:
        pass

    def _moved(self) -> None:
        self._moves += 1
        self._watch()


class NodeDraws:
    """The random numbers of a node. `moved` is called after each batch."""

    def __init__(
        self, experiment: Experiment, node: str, *, moved: Callable[[], None] = lambda: None
    ) -> None:
        self.moved = moved
        self._node = node
        self._seed = experiment.seed

    def chance(self, r: int, purpose: str = "rule") -> np.random.Generator:
        """Return the node's random generator of a round and a purpose of `randomness.py`."""
        return generator(self._seed, Purpose[purpose.upper()], self._node, r)

    def adam(
        self, weights: Sequence[Tensor], *, weight_decay: float = 0.0
    ) -> Callable[[float], None]:
        """Return what takes a step of Adam at a learning rate, by the weights' gradients, which it
        removes.
        """
        optimizer = AdaptiveMoments(Adam(weight_decay=weight_decay))
        moments = optimizer.begin(weights)
        return lambda rate: take(optimizer, weights, moments, rate=rate)


class NodeSamples(NodeDraws):
    """The N held-out samples of an experiment at a node, and its module. Raises InvalidExperiment.

    The module is in eval mode: its buffers never change.
    """

    def __init__(
        self,
        experiment: Experiment,
        node: str,
        *,
        frozen: Path | None = None,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(experiment, node, moved=moved)
        self._frozen = given_arrays(frozen)
        dataset = datasets.load(experiment.data, node=node)
        split = splits.split_of(experiment, node=node)
        places = torch.from_numpy(split.held_out)
        self.partition = split.digest
        self._anew = None
        if is_own(experiment.model.name):
            self._anew = partial(models.anew, experiment, inputs=dataset.inputs)
        self.module = models.of(experiment, inputs=dataset.inputs, frozen=self._frozen).eval()
        self.layout = models.layout_of(self.module, experiment.model)
        self.weights = list(self.module.parameters())
        self.labels = dataset.train_labels.index_select(0, places)
        self._samples = dataset.train_images.index_select(0, places)
        self._normalise = dataset.normaliser()

    def load(self, row: Row) -> None:
        """Copy a flat model, uint8 [row_bytes], into the module, anew if it is the user's own (see
        `models.py`).
        """
        if self._anew is not None:
            self.module = self._anew().eval()
            models.read_frozen(self.module, self._frozen)
            self.weights = list(self.module.parameters())
        models.read_row(self.module, self.layout, row)

    def store(self, row: Row) -> None:
        """Copy the module into a flat model."""
        models.write_row(self.module, self.layout, row)

    def logits(self, places: Tensor) -> Tensor:
        """Return the module's logits, float32 [n, classes], for samples with these indices, int64
        [n].
        """
        logits: Tensor = self.module(self._normalise(self._samples.index_select(0, places)))
        self.moved()
        return logits

    @torch.no_grad()
    def all_logits(self) -> Tensor:
        """Return the module's logits for all samples, float32 [N, classes], without gradients."""
        return torch.cat(
            [self.logits(places) for places in torch.split(torch.arange(len(self.labels)), BATCH)]
        )

    def divergence(self, target: Tensor) -> float:
        """Return the mean over the samples of KL(target || softmax(logits)), in nats; `target` [N,
        classes].
        """
        logs = functional.log_softmax(self.all_logits().double(), dim=1)
        return float(functional.kl_div(logs, target.double(), reduction="batchmean"))

    def loss(self) -> float:
        """Return the mean cross-entropy over the samples, in nats."""
        return float(functional.cross_entropy(self.all_logits().double(), self.labels))

    def passes(self, size: int, *, r: int) -> Iterator[list[Tensor]]:
        """Yield one pass over the samples after another, in a new order: batches of indices, the
        last one smaller.

        The orders depend on seed, node and round alone.
        """
        order = self.chance(r, "distillation")
        while True:
            yield list(torch.split(torch.from_numpy(order.permutation(len(self.labels))), size))


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread inside the `with` block: sums must not depend on the number of
    cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
