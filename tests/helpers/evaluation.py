"""An evaluator of a cloud in the process of the test."""

from __future__ import annotations

from pathlib import Path

from fedstrata.cloud.evaluator import Beginning, EvaluationResult
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import splits
from fedstrata.common.learning.evaluation import ModelTester
from fedstrata.common.model.layout import Row


class HereEvaluator:
    """Evaluate in this process, which has loaded torch already: a process of its own takes seconds
    to start.
    """

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self._experiment, self._folder = experiment, folder

    async def start(self) -> Beginning:
        partition = splits.keep(self._experiment, self._folder)
        self._tester = ModelTester(self._experiment)
        return Beginning(
            self._tester.layout, self._tester.first, partition, frozen=self._tester.frozen
        )

    async def evaluate(self, global_round: int, row: Row) -> EvaluationResult:
        found = self._tester.evaluate(row)
        return EvaluationResult(global_round, found.score, found.loss)

    def close(self) -> None:
        pass
