"""Training and evaluation on a device in place of a GPU (`memory_device.py`): no tensor stays behind
on the CPU, the results are the CPU's, and a lack of memory is survived.

`tests/test_memory_device.py` runs these in a process of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
import torch

from fedstrata.common.errors import RunFailed
from fedstrata.common.experiment import schema
from fedstrata.common.experiment.reading import parse
from fedstrata.common.learning.evaluation import ModelTester
from fedstrata.device.jobs import Order
from fedstrata.device.training import trainer
from fedstrata.device.training.trainer import Trainer
from fedstrata.device.vmapped import shared_steps
from fedstrata.device.vmapped.shared_steps import VmappedResult
from tests.helpers.examples import slow
from tests.helpers.memory_device import DEVICE, at_most, held_bytes, memory_device
from tests.helpers.plain import first_model, trainer_of
from tests.helpers.vmapped import CASES, Case, quick

MB: Final = 1_000_000
SHAPES: Final = {"lenet5": [1, 28, 28], "resnet20": [3, 16, 16]}
NOISE: Final = {
    "unit": "sample", "clip_norm": 0.5, "noise_multiplier": 0.8, "delta": 1e-5, "noise": "seeded"
}  # fmt: skip


def method(name: str, **keys: Any) -> dict[str, Any]:
    """Return the tables of a method with a rule and an objective; `keys`: of the rule."""
    return {
        "cloud": {"aggregation": {"name": name, **keys}},
        "training": {"objective": {"name": name}, "momentum": 0.0},
    }


# name: the model, the tables of the experiment
LABS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "plain": ("mlp_digits", {}),
    "momentum, clipped": ("cnn_digits", {"training": {"momentum": 0.9, "clip_norm": 0.5}}),
    "adam": ("cnn_digits", {"training": {"optimizer": {"name": "adam"}}}),
    "augmented": ("cnn_digits", {"training": {"augmentation": {"flip": True, "crop": 1}}}),
    "max pooling": ("lenet5", {}),
    # one small step: batch statistics multiply differences of rounding, a hundredfold with AVX-512
    "batch norm": ("resnet20", {"training": {"batch_size": 64, "learning_rate": 0.02}}),
    "fedprox": ("mlp_digits", {"training": {"objective": {"name": "fedprox"}}}),
    "feddyn": ("mlp_digits", method("feddyn")),
    "fedsam": ("mlp_digits", {"training": {"objective": {"name": "fedsam"}}}),
    "fedgen": ("mlp_digits", method("fedgen", learning_rate=0.01)),
    "moon": ("mlp_digits", {"training": {"objective": {"name": "moon"}}}),
    "scaffold": ("mlp_digits", method("scaffold")),
    "scored on devices": ("mlp_digits", {"evaluation": {"at": "devices", "held_out": 0.2}}),
    "personal": (
        "mlp_digits",
        {"model": {"personal": ["fc2.*"]}, "evaluation": {"at": "devices", "held_out": 0.2}},
    ),
    "noise on samples": ("mlp_digits", {"cloud": {"privacy": NOISE}}),
}


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainers have the device by its name."""
    memory_device()
    monkeypatch.setattr(trainer, "resolve_accelerator", torch.device)


def lab_of(name: str) -> schema.Experiment:
    model, tables = LABS[name]
    data = {
        "dataset": "synthetic",
        "classes": 10,
        "samples": 240,
        "test_samples": 40,
        "image_shape": SHAPES.get(model, [1, 8, 8]),
    }
    training = {"batch_size": 16, "learning_rate": 0.1, **tables.get("training", {})}
    rest = {"data": data, "topology": {"institutions": 0, "devices": 4}, "model": {"name": model}}
    rest["model"] |= tables.get("model", {})
    return parse({**tables, **rest, "training": training})


def ordered(made: Trainer, lab: schema.Experiment) -> Order:
    """Return an order of one epoch from a lab's first model."""
    row = np.zeros(made.vectors.links.down.row_bytes + made.vectors.kept_bytes, np.uint8)
    first = first_model(lab)
    row[: len(first)] = first
    out = np.zeros(made.vectors.links.up.row_bytes + made.vectors.kept_bytes, np.uint8)
    scores = lab.evaluation.on_devices
    return Order(row, out, 1, 0, scores=scores, scores_trained=scores)


@pytest.mark.parametrize("name", LABS)
def test_a_device_trains_there_as_on_the_cpu(name: str) -> None:
    lab = lab_of(name)
    found = []
    for where in ("cpu", str(DEVICE)):
        made = trainer_of(lab, accelerator=where)
        order = ordered(made, lab)
        received = made.examine(order)
        held = held_bytes()
        work = made.train(order).work
        assert held_bytes() <= held, "a training leaves nothing behind"
        found.append((order.out, work, received.tests, made.examine_trained(order)))
    (wanted, work, *scores), (row, its, *its_scores) = found
    layout = made.vectors.links.up
    np.testing.assert_allclose(layout.floats(row), layout.floats(wanted), rtol=0, atol=5e-5)
    assert its.loss == pytest.approx(work.loss, rel=1e-4) and its.steps == work.steps
    assert (its_scores[0] is None) is (not lab.evaluation.on_devices)
    for mine, other in zip(its_scores, scores, strict=True):
        assert (mine is None) is (other is None)
        if mine is not None and other is not None:
            assert mine.loss == pytest.approx(other.loss, rel=1e-4)


@pytest.mark.parametrize("name", ["plain", "batch norm"])
def test_a_trainer_recovers_from_a_lack_of_memory(name: str) -> None:
    lab = lab_of(name)
    made = trainer_of(lab, accelerator=str(DEVICE))
    order = ordered(made, lab)
    made.train(order)
    held = held_bytes()
    wanted = order.out.copy()
    order.out[:] = 0
    with at_most(held + 1000), pytest.raises(RunFailed, match="has not enough free memory"):
        made.train(order)
    assert held_bytes() == held
    made.train(order)
    assert np.array_equal(order.out, wanted)


def test_no_training_moves_a_module_that_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer_of(lab_of("batch norm"), accelerator=str(DEVICE))
    moves = []
    monkeypatch.setattr(torch.nn.Module, "to", lambda *_: moves.append(1))
    made.train(ordered(made, lab_of("batch norm")))
    assert not moves


def test_a_tensor_that_stays_behind_is_found() -> None:
    here = torch.ones(3, 4)
    there = here.to(DEVICE)
    assert (there @ there.T).cpu().tolist() == (here @ here.T).tolist()
    for operation in (torch.add, torch.mul, lambda one, other: torch.cat([one, other])):
        with pytest.raises(RuntimeError, match=r"on the same device|was left on cpu"):
            operation(there, here)
    with pytest.raises(RuntimeError, match=r"convolution was left on cpu"):
        torch.conv1d(there[None], torch.ones(1, 3, 2))


# layers and arguments of each kind
VMAPPED: Final = [
    *("mlp", "fedsam", "dropout, batch norm", "augmented", "adamw, odd", "lenet5", "char_lstm"),
    *("lstm, seldom form", "resnet20"),
]


@pytest.mark.parametrize("name", slow(VMAPPED, but=VMAPPED[:3]))
def test_a_group_trains_there_as_on_the_cpu(name: str) -> None:
    made = CASES[name]()
    modules = [copy.deepcopy(made.module).float() for _ in range(2)]
    wanted = replace(made, module=modules[0], dtype=torch.float32)
    case = replace(made, module=modules[1], dtype=torch.float32, device=DEVICE)
    wanted.train()
    case.train()
    assert_alike(case, wanted)


def assert_alike(case: Case, wanted: Case) -> None:
    for mine, its in zip(case.ended, wanted.ended, strict=True):
        assert isinstance(mine, VmappedResult) and isinstance(its, VmappedResult)
        assert mine.steps == its.steps
        np.testing.assert_allclose(
            case.layout.floats(mine.row), wanted.layout.floats(its.row), rtol=0, atol=1e-4
        )


def test_a_group_without_memory_is_halved_there() -> None:
    wanted = quick()
    wanted.train()
    case = replace(quick(), device=DEVICE)
    recipe = case.recipe
    turns = case.turns
    held = held_bytes()
    with at_most(held + 200_000):
        shared_steps.train(recipe, turns, most=100)
    assert_alike(case, wanted)


def test_evaluation_there_copies_the_test_set_once(caplog: pytest.LogCaptureFixture) -> None:
    lab = lab_of("batch norm")
    here = ModelTester(lab)
    there = ModelTester(lab, accelerator=DEVICE)
    wanted = here.evaluate(here.first)
    found = [there.evaluate(there.first)]
    images, _ = there._tests[DEVICE]
    held = held_bytes()
    found.append(there.evaluate(there.first))
    assert there._tests[DEVICE][0] is images and held_bytes() == held
    for each in found:
        assert each.loss == pytest.approx(wanted.loss, rel=1e-4) and each.score == wanted.score
    assert caplog.messages == []
    with at_most(held):
        assert there.evaluate(there.first) == wanted
    assert caplog.messages == [f"{DEVICE} has not enough free memory: evaluated on the CPU"]
    assert held_bytes() < held
