"""Models and training of a simulated lab: a trivial workload, or the real one."""

from __future__ import annotations

import threading
import zlib
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from common.experiment.schema import Experiment
from common.model.layout import ModelLayout, Row, Section

if TYPE_CHECKING:
    from device.training.trainer import Trainer

STEPS_MOST: Final = 8
NULL_CHANGE: Final = 0.01


class Workload(Protocol):
    """Models, their training and their evaluation."""

    layout: ModelLayout
    first: Row
    partition: str

    def samples(self, node: str) -> int:
        """Return the number of a device's training samples."""

    def train(self, node: str, row: Row, out: Row, *, epochs: int, local_round: int) -> tuple[float, int]:
        """Train the flat model `row` into `out`; return the loss and the number of steps."""

    def evaluate(self, row: Row) -> tuple[float, float]:
        """Return accuracy and loss."""


class NullWorkload:
    """Workload that adds small noise, determined by node, round and epochs. It does not need torch."""

    partition = "simulated"

    def __init__(self, model_bytes: int) -> None:
        columns = max(2, model_bytes // 4)
        split = columns * 3 // 4
        tensors = [("a.weight", (split,), Section.PARAMETER), ("b.weight", (columns - split,), Section.PARAMETER)]
        self.layout = ModelLayout.build(tensors)
        self.first = self.layout.empty()
        self.layout.floats(self.first)[:] = np.random.default_rng(1).standard_normal(columns, np.float32)

    def samples(self, node: str) -> int:
        """Return 50 to 149 samples, depending on the name."""
        return 50 + zlib.crc32(node.encode()) % 100

    def train(self, node: str, row: Row, out: Row, *, epochs: int, local_round: int) -> tuple[float, int]:
        """Add noise, float32 [D]. The vectors behind the model change it, and each other, so that none may be lost."""
        rng = np.random.Generator(np.random.PCG64([zlib.crc32(node.encode()), local_round, epochs]))
        noise = rng.standard_normal(self.layout.columns, np.float32)
        before_VD, after_VD = (self.layout.extra_columns(each).reshape(-1, len(noise)) for each in (row, out))
        drift = before_VD.mean(0) if len(before_VD) else np.zeros_like(noise)
        self.layout.floats(out)[:] = self.layout.floats(row) + NULL_CHANGE * (noise + drift)
        for place, after in enumerate(after_VD):
            after[:] = noise * (place + 1) - drift / 2
        return 1.0, epochs * STEPS_MOST

    def evaluate(self, row: Row) -> tuple[float, float]:
        """Return constants."""
        return 0.5, 1.0


class RealWorkload:
    """Workload that trains and evaluates real models on the CPU; it needs torch."""

    def __init__(self, experiment: Experiment) -> None:
        from common.learning import splits
        from common.learning.evaluation import ModelTester

        self._tester = ModelTester(experiment)
        self.layout, self.first = self._tester.layout, self._tester.first
        self.partition = splits.split_of(experiment).digest
        self._trainers: dict[str, Trainer] = {}
        self._experiment = experiment

    def samples(self, node: str) -> int:
        """Return the number of a device's training samples."""
        return self._trainer(node).samples

    def train(self, node: str, row: Row, out: Row, *, epochs: int, local_round: int) -> tuple[float, int]:
        """Train for `epochs`."""
        never = threading.Event()
        trainer = self._trainer(node)
        done = trainer.train(
            row, out, epochs=epochs, local_round=local_round, progress=lambda done, of: None, cancelled=never
        )
        return done.loss, done.steps

    def evaluate(self, row: Row) -> tuple[float, float]:
        """Return accuracy and loss on the test set."""
        found = self._tester.evaluate(row)
        return found.score, found.loss

    def _trainer(self, node: str) -> Trainer:
        from device.training.trainer import Trainer

        if node not in self._trainers:
            self._trainers[node] = Trainer(self._experiment, node=node, accelerator="cpu")
            self._trainers[node].prepare()
        return self._trainers[node]
