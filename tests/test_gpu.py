"""Training on a CUDA device: the kinds of layers that differ there, LSTM and dropout. Run by `pytest -m gpu`.

Warnings are errors here as everywhere: an LSTM whose weights are not one piece of the device's memory reports so.
"""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from common.experiment import reading, schema
from common.learning import datasets, models
from common.learning.evaluation import evaluate
from common.learning.nets import Dropout
from common.model.layout import Row
from device.jobs import LocalResult
from device.training.trainer import Trainer

GPU = "cuda"
TEXT = "to be or not to be that is the question whether tis nobler in the mind to suffer the slings and arrows "

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]


def write_leaf(root: Path) -> None:
    """Write two users of LEAF's Shakespeare, 30 rows each, for training and again for the test."""
    for part in ("train", "test"):
        users = {}
        for start, name in enumerate(("HAMLET", "OPHELIA")):
            text = TEXT[start:] + TEXT * 2
            rows = range(start, start + 30)
            users[name] = {"x": [text[i : i + 80] for i in rows], "y": [text[i + 80] for i in rows]}
        folder = root / "shakespeare" / "data" / part
        folder.mkdir(parents=True)
        tree = {"users": [*users], "num_samples": [30, 30], "user_data": users}
        (folder / "all.json").write_text(json.dumps(tree))


def text_lab(root: Path, **training: Any) -> schema.Experiment:
    write_leaf(root)
    return reading.parse(
        {
            "data": {"dataset": "shakespeare", "root": str(root), "partition": "natural"},
            "model": {"name": "char_lstm"},
            "topology": {"devices": 2},
            "training": {"batch_size": 8, "learning_rate": 0.5, **training},
        }
    )


def make(lab: schema.Experiment, node: str = "device-0", *, accelerator: str = GPU) -> Trainer:
    trainer = Trainer(lab, node=node, accelerator=accelerator)
    trainer.prepare()
    return trainer


def initial(lab: schema.Experiment) -> Row:
    module = models.build(lab.model.name, lab.seed, inputs=datasets.load(lab.data).inputs)
    layout = models.layout_of(module)
    row = layout.empty()
    models.write_row(module, layout, row)
    return row


def run(trainer: Trainer, row: Row, *, epochs: int = 1, local_round: int = 0) -> tuple[Row, LocalResult]:
    out = trainer.layout.empty()
    cancelled = threading.Event()
    return out, trainer.train(
        row, out, epochs=epochs, local_round=local_round, progress=lambda *_: None, cancelled=cancelled
    )


def assert_near(trainer: Trainer, one: Row, other: Row, *, apart: float) -> None:
    np.testing.assert_allclose(trainer.layout.floats(one), trainer.layout.floats(other), rtol=0, atol=apart)


def test_an_lstm_trains_as_on_the_cpu_and_again_alike(tmp_path: Path) -> None:
    lab = text_lab(tmp_path, momentum=0.9, weight_decay=0.01)
    row = initial(lab)
    on_cpu, wanted = run(make(lab, accelerator="cpu"), row)
    trainer = make(lab)
    first, result = run(trainer, row)
    assert result.steps == wanted.steps == 4 and result.loss == pytest.approx(wanted.loss, rel=1e-2)
    assert_near(trainer, first, on_cpu, apart=1e-3)
    # The weights moved by more than the two differ: none was left behind, or paired with another's gradient.
    moved = np.abs(trainer.layout.floats(first) - trainer.layout.floats(row))
    assert np.quantile(moved, 0.9) > 1e-3
    # cuDNN may add up a recurrent net's gradients in another order each time.
    assert_near(trainer, run(trainer, row)[0], first, apart=1e-5)


def test_an_lstm_learns_and_leaves_no_memory_behind(tmp_path: Path) -> None:
    lab = text_lab(tmp_path)
    row = initial(lab)
    trainer = make(lab, "device-1")
    run(trainer, row)
    before = torch.cuda.memory_allocated()
    out, _ = run(trainer, row, epochs=5)
    assert torch.cuda.memory_allocated() == before
    data = datasets.load(lab.data)
    module = models.build("char_lstm", 1, inputs=data.inputs)
    losses = []
    for state in (row, out):
        models.read_row(module, trainer.layout, state)
        losses.append(evaluate(module, data.test_images, labels=data.test_labels, normalise=data.normaliser()).loss)
    assert losses[1] < losses[0] - 0.2


def test_an_lstm_is_evaluated_as_on_the_cpu(tmp_path: Path) -> None:
    lab = text_lab(tmp_path)
    data = datasets.load(lab.data)
    module = models.build("char_lstm", 1, inputs=data.inputs)
    here, there = (
        evaluate(
            copy.deepcopy(module).to(device),
            data.test_images,
            labels=data.test_labels,
            normalise=data.normaliser(device),
        )
        for device in ("cpu", GPU)
    )
    assert there.score == here.score and there.loss == pytest.approx(here.loss, rel=1e-3)


class _Dropping(nn.Module):
    """Dropout between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), Dropout(0.5), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.work(x)
        return logits


@pytest.fixture
def dropping(monkeypatch: pytest.MonkeyPatch) -> schema.Experiment:
    torch.manual_seed(1)
    source = _Dropping()
    monkeypatch.setattr(models, "build", lambda *_, **__: copy.deepcopy(source))
    # One batch: the order of the samples matters to dropout alone.
    return reading.parse({"topology": {"devices": 4}, "training": {"batch_size": 1000, "learning_rate": 0.5}})


def test_dropout_depends_on_seed_node_and_round_alone(dropping: schema.Experiment) -> None:
    row = initial(dropping)
    trainers = [make(dropping), make(dropping), make(dropping, "device-1")]
    torch.cuda.manual_seed(2)
    before = torch.cuda.get_rng_state()
    first, again, other = (run(trainer, row)[0] for trainer in trainers)
    assert torch.equal(torch.cuda.get_rng_state(), before), "the device's own generator was used"
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert not np.array_equal(first, run(trainers[0], row, local_round=1)[0])
    assert np.array_equal(first, run(trainers[0], row)[0])


def test_dropout_keeps_half_on_either_device(dropping: schema.Experiment) -> None:
    row = initial(dropping)
    dropped = [run(make(dropping, accelerator=where), row)[1].loss for where in ("cpu", GPU)]
    # The draws are other ones, so the losses differ, but by chance only.
    assert dropped[0] == pytest.approx(dropped[1], rel=0.1)
