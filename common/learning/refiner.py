"""A node's refiner in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from common.experiment.data import check_alike
from common.experiment.schema import Experiment
from common.experiment.tables import named_in_module
from common.learning.computing import calls_own_code
from common.learning.node_samples import NodeDraws, NodeSamples, one_thread
from common.learning.own import seeded
from common.model.refinement import RoundModels
from common.randomness import Purpose, torch_seed

Refine = Callable[[Any, Any, RoundModels], Mapping[str, Any]]


class NodeRefiner:
    """The method of one node, and its samples if it reads some.

    `partition`: the digest of the cloud's split; `watch`: of progress.
    Raises InvalidExperiment, also if the node's split differs from the cloud's.
    """

    def __init__(
        self, experiment: Experiment, node: str, *, partition: str, watch: Callable[[], None] = lambda: None
    ) -> None:
        self._experiment = experiment
        self._settings = experiment.tier_below(node).aggregation
        assert self._settings.refiner is not None
        self._refine: Refine = named_in_module(self._settings.refiner)
        self._watch = watch
        self._seed, self._name = experiment.seed, node
        self._moves = 0
        if not self._settings.reads_samples:
            self._node = NodeDraws(experiment, node, moved=self._moved)
            return
        self._node = samples = NodeSamples(experiment, node, moved=self._moved)
        check_alike(experiment.data, node, partition=samples.partition, clouds=partition)

    @property
    def moves(self) -> int:
        """Counter of batches."""
        return self._moves

    @calls_own_code
    def refine(self, models: RoundModels) -> Mapping[str, Any]:
        """Refine the mean, or learn weights or a generator; return facts, with the seconds that it took."""
        started = time.monotonic()
        own_seed = torch_seed(self._seed, Purpose.OWN_CODE, self._name, models.r)
        with one_thread(), seeded(own_seed):
            facts = self._refine(self._node, self._settings, models)
        return {**facts, "seconds": round(time.monotonic() - started, 3)}

    def cancel(self) -> None:
        """Do nothing: the caller's thread computes."""

    def allow(self) -> None:
        """Do nothing."""

    def _moved(self) -> None:
        self._moves += 1
        self._watch()
