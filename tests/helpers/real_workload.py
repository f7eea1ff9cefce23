"""A simulated lab's workload that trains real models, one after another in the thread of the
simulation.
"""

from __future__ import annotations

from pathlib import Path

from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import splits
from fedstrata.common.learning.evaluation import ModelTester
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.device.jobs import Order
from fedstrata.device.training.trainer import Trainer


class RealWorkload:
    """Trains and evaluates real models on the CPU."""

    def __init__(self, experiment: Experiment) -> None:
        self._tester = ModelTester(experiment)
        self.layout, self.first = self._tester.layout, self._tester.first
        self.frozen = self._tester.frozen
        self.partition = splits.split_of(experiment).digest
        self._trainers: dict[str, Trainer] = {}
        self._experiment = experiment

    def layout_at(self, node: str, frozen: Path | None) -> ModelLayout:
        """Build the device's model, with the cloud's frozen arrays if they are given."""
        if frozen is not None:
            self._trainers[node] = Trainer(
                self._experiment, node=node, accelerator="cpu", frozen=frozen
            )
            self._trainers[node].prepare()
        return self._trainer(node).layout

    def samples(self, node: str, experiment: Experiment) -> tuple[int, int]:
        """Return the numbers of a device's training and test samples."""
        return self._trainer(node).samples, self._trainer(node).facts.tests

    def kept_bytes(self, experiment: Experiment) -> int:
        """Return those of any device."""
        return self._trainer(experiment.tree.devices[0]).vectors.kept_bytes

    def train(
        self, node: str, row: Row, out: Row, *, epochs: int, local_round: int
    ) -> tuple[float, int]:
        """Train for `epochs`."""
        done = self._trainer(node).train(Order(row, out, epochs, local_round))
        return done.work.loss, done.work.steps

    def evaluate(self, row: Row) -> tuple[float, float]:
        """Return accuracy and loss on the test set."""
        found = self._tester.evaluate(row)
        return found.score, found.loss

    def _trainer(self, node: str) -> Trainer:
        if node not in self._trainers:
            self._trainers[node] = Trainer(self._experiment, node=node, accelerator="cpu")
            self._trainers[node].prepare()
        return self._trainers[node]
