"""The evaluator: its own process leaves the split and evaluates as a tester does in this one."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fedstrata.cloud.evaluator import Evaluator
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import splits
from fedstrata.common.learning.evaluation import CPU_BATCH, ModelTester, accelerator_of
from tests.helpers.sites import in_real_time

pytestmark = pytest.mark.usefixtures("warm")

NET = """
import pathlib
from torch import nn

HERE = pathlib.Path(__file__).parent

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.work = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x):
        if (HERE / "fail").exists():
            raise KeyError("a bug")
        print("forward")
        return self.work(x)

def build(*, shape, classes):
    return Net()
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    """An experiment with a model that does what files beside it say."""
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join((str(Path(__file__).parents[1]), str(tmp_path)))
    )
    return parse({"model": {"name": "net:build"}, "evaluation": {"accelerator": "auto"}})


@in_real_time
async def test_the_evaluator_leaves_the_split_evaluates_as_its_tester_does_and_reports_its_end(
    tmp_path: Path, net: Experiment
) -> None:
    tester = ModelTester(net, accelerator=accelerator_of(net))
    folder = tmp_path / "run"
    folder.mkdir()
    evaluator = Evaluator(net, folder)
    evaluator.close()
    try:
        beginning = await evaluator.start()
        assert beginning.layout == tester.layout and np.array_equal(beginning.row, tester.first)
        assert evaluator._process.channel is not None and evaluator._process.channel.idle_s == 120
        assert beginning.accelerator == str(accelerator_of(net))
        assert beginning.partition == splits.split_of(net).digest
        assert {path.name for path in folder.iterdir()} == {"partition.npz", "partition.json"}
        for global_round, row in ((1, tester.first), (2, np.zeros_like(tester.first))):
            found, wanted = await evaluator.evaluate(global_round, row), tester.evaluate(row)
            assert (found.global_round, found.score) == (global_round, wanted.score)
            assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
        assert np.array_equal(beginning.row, tester.first)
        (tmp_path / "fail").touch()
        place = r"in Net\.forward \(.*net\.py:14\)"
        with pytest.raises(
            InvalidExperiment, match=rf"^model\.name = 'net:build': .* KeyError: 'a bug', {place}"
        ):
            await evaluator.evaluate(3, beginning.row)
    finally:
        evaluator.close()


def test_each_batch_of_an_evaluation_is_progress() -> None:
    moves: list[int] = []
    experiment = parse({})
    tester = ModelTester(experiment, watch=lambda: moves.append(1))
    tester.evaluate(tester.first)
    assert len(moves) == -(-359 // CPU_BATCH)
