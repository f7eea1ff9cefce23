"""The evaluator: its own process leaves the split and evaluates as a tester does in this one, and reports its end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from cloud.evaluator import Evaluator
from common.errors import RunFailed
from common.experiment.reading import parse
from common.learning import splits
from common.learning.evaluation import ModelTester, accelerator_of

PATIENCE_S = 110.0

NET = """
import pathlib, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.work = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x):
        if (pathlib.Path(__file__).parent / "fail").exists():
            raise KeyError("a bug")
        print("forward")
        return self.work(x)

def build(*, shape, classes):
    return Net()
"""


def test_the_evaluator_leaves_the_split_evaluates_as_its_tester_does_and_reports_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(Path(__file__).parents[1]), str(tmp_path))))
    experiment = parse({"model": {"name": "net:build"}, "cloud": {"evaluate_on": "auto"}})
    tester = ModelTester(experiment, accelerator=accelerator_of(experiment))
    folder = tmp_path / "run"
    folder.mkdir()

    async def play() -> None:
        async with asyncio.timeout(PATIENCE_S):
            evaluator = Evaluator(experiment, folder)
            evaluator.close()
            try:
                beginning = await evaluator.start()
                assert beginning.layout == tester.layout and np.array_equal(beginning.row, tester.first)
                assert beginning.accelerator == str(accelerator_of(experiment))
                assert beginning.partition == splits.split_of(experiment).digest
                assert {path.name for path in folder.iterdir()} == {"partition.npz", "partition.json"}
                for global_round, row in ((1, tester.first), (2, np.zeros_like(tester.first))):
                    found, wanted = await evaluator.evaluate(global_round, row), tester.evaluate(row)
                    assert (found.global_round, found.score) == (global_round, wanted.score)
                    assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
                assert np.array_equal(beginning.row, tester.first)
                (tmp_path / "fail").touch()
                with pytest.raises(RunFailed, match=r"^the evaluator process ended with code 1; its message is above$"):
                    await evaluator.evaluate(3, beginning.row)
            finally:
                evaluator.close()

    asyncio.run(play())
