"""Training on a CUDA device: near to that on a CPU, in each precision and kind of layer. Run by
`pytest -m gpu`.

Warnings are errors here as everywhere: an LSTM whose weights are not one piece of the device's
memory reports so.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedstrata.common.experiment import reading, schema
from fedstrata.common.learning import datasets, models
from fedstrata.common.learning.computing import set_up
from fedstrata.common.learning.evaluation import evaluate
from fedstrata.common.learning.nets import Dropout
from fedstrata.common.model.layout import Row
from fedstrata.common.settings.training import TrainingSettings
from fedstrata.device.training.trainer import Trainer
from tests.helpers.plain import first_model, trained, trainer_of
from tests.test_trainer import experiment, restored, write_leaf

GPU = "cuda"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]


def text_lab(root: Path, **training: Any) -> schema.Experiment:
    write_leaf(root, HAMLET=30, OPHELIA=30)
    return reading.parse(
        {
            "data": {"dataset": "shakespeare", "root": str(root), "partition": "natural"},
            "model": {"name": "char_lstm"},
            "topology": {"devices": 2},
            "training": {"batch_size": 8, "learning_rate": 0.5, **training},
        }
    )


def make(lab: schema.Experiment, node: str = "device-0", *, accelerator: str = GPU) -> Trainer:
    return trainer_of(lab, node, accelerator=accelerator)


def assert_near(trainer: Trainer, one: Row, other: Row, *, apart: float) -> None:
    np.testing.assert_allclose(
        trainer.layout.floats(one), trainer.layout.floats(other), rtol=0, atol=apart
    )


def test_an_lstm_trains_as_on_the_cpu_and_again_alike(tmp_path: Path) -> None:
    lab = text_lab(tmp_path, momentum=0.9, weight_decay=0.01)
    row = first_model(lab)
    on_cpu, wanted = trained(make(lab, accelerator="cpu"), row)
    trainer = make(lab)
    first, result = trained(trainer, row)
    assert result.steps == wanted.steps == 4 and result.loss == pytest.approx(wanted.loss, rel=1e-2)
    assert_near(trainer, first, on_cpu, apart=1e-3)
    # The weights moved by more than the two differ: none was left behind, or paired with another's
    # gradient.
    moved = np.abs(trainer.layout.floats(first) - trainer.layout.floats(row))
    assert np.quantile(moved, 0.9) > 1e-3
    # cuDNN may add up a recurrent net's gradients in another order each time.
    assert_near(trainer, trained(trainer, row)[0], first, apart=1e-5)


def test_an_lstm_learns_and_leaves_no_memory_behind(tmp_path: Path) -> None:
    lab = text_lab(tmp_path)
    row = first_model(lab)
    trainer = make(lab, "device-1")
    trained(trainer, row)
    before = torch.cuda.memory_allocated()
    out, _ = trained(trainer, row, epochs=5)
    assert torch.cuda.memory_allocated() == before
    data = datasets.load(lab.data)
    module = models.build("char_lstm", 1, inputs=data.inputs)
    losses = []
    for state in (row, out):
        models.read_row(module, trainer.layout, state)
        losses.append(
            evaluate(
                module, data.test_images, labels=data.test_labels, normalise=data.normaliser()
            ).loss
        )
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


@pytest.fixture
def dropping(monkeypatch: pytest.MonkeyPatch) -> schema.Experiment:
    torch.manual_seed(1)
    source = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), Dropout(0.5), nn.Linear(32, 10))
    monkeypatch.setattr(models, "build", lambda *_, **__: copy.deepcopy(source))
    # One batch: the order of the samples matters to dropout alone.
    return reading.parse(
        {"topology": {"devices": 4}, "training": {"batch_size": 1000, "learning_rate": 0.5}}
    )


def test_dropout_depends_on_seed_node_and_round_alone(dropping: schema.Experiment) -> None:
    row = first_model(dropping)
    trainers = [make(dropping), make(dropping), make(dropping, "device-1")]
    torch.cuda.manual_seed(2)
    before = torch.cuda.get_rng_state()
    first, again, other = (trained(trainer, row)[0] for trainer in trainers)
    assert torch.equal(torch.cuda.get_rng_state(), before), "the device's own generator was used"
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert not np.array_equal(first, trained(trainers[0], row, local_round=1)[0])
    assert np.array_equal(first, trained(trainers[0], row)[0])


def test_dropout_keeps_half_on_either_device(dropping: schema.Experiment) -> None:
    row = first_model(dropping)
    dropped = [trained(make(dropping, accelerator=where), row)[1].loss for where in ("cpu", GPU)]
    # The draws are other ones, so the losses differ, but by chance only.
    assert dropped[0] == pytest.approx(dropped[1], rel=0.1)


def test_on_a_gpu_nearly_the_same_and_nothing_left_behind() -> None:
    lab = experiment(model="cnn_digits", batch_size=50)
    row = first_model(lab)
    wanted, result = trained(make(lab, accelerator="cpu"), row)
    trainer = make(lab)
    trained(trainer, row)
    before = torch.cuda.memory_allocated()
    out, on_gpu = trained(trainer, row)
    assert torch.cuda.memory_allocated() == before
    assert on_gpu.loss == pytest.approx(result.loss, rel=1e-2)
    assert_near(trainer, out, wanted, apart=1e-2)


@pytest.mark.parametrize("model", ["cnn_digits", "mlp_digits"])
@pytest.mark.parametrize(
    "training", [{}, {"precision": "bf16"}, {"augmentation": {"flip": True, "crop": 1}}]
)
def test_on_a_gpu_deterministic_training_gives_the_same_bits(
    model: str, training: dict[str, Any]
) -> None:
    lab = experiment(model=model, deterministic=True, **training)
    row = first_model(lab)
    try:
        first, again = (trained(make(lab), row, epochs=2)[0] for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
    assert np.array_equal(first, again)


def test_on_a_gpu_fp32_has_the_accuracy_of_fp32_beside_other_precisions() -> None:
    """TF32 rounds inputs to 11 bits: a convolution of 576 products is some 1e-4 off, one in fp32
    1e-6.
    """
    gpu = torch.device("cuda", 0)
    source = torch.Generator().manual_seed(1)
    images, weights = (
        torch.randn(shape, generator=source) for shape in ((8, 64, 16, 16), (64, 64, 3, 3))
    )
    exact = functional.conv2d(images.double(), weights.double())
    errors = {}
    with restored():
        for precision in ("tf32", "fp32", "bf16", "fp32"):
            set_up(gpu, TrainingSettings.model_validate({"precision": precision}))
            found = functional.conv2d(images.to(gpu), weights.to(gpu)).cpu().double()
            errors[precision] = float((found - exact).norm() / exact.norm())
    assert errors["fp32"] < 5e-6
    if torch.cuda.get_device_capability(gpu) >= (8, 0):
        assert errors["tf32"] > 1e-5


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_on_a_gpu_less_precise_is_near_to_fp32(precision: str) -> None:
    lab = experiment(model="cnn_digits")
    row = first_model(lab)
    wanted, result = trained(make(lab), row)
    trainer = make(experiment(model="cnn_digits", precision=precision))
    out, in_low = trained(trainer, row)
    apart = np.abs(trainer.layout.floats(out) - trainer.layout.floats(wanted))
    moved = np.abs(trainer.layout.floats(wanted) - trainer.layout.floats(row))
    assert 0 < np.linalg.norm(apart) < 0.1 * np.linalg.norm(moved)
    assert in_low.loss == pytest.approx(result.loss, rel=2e-2)
