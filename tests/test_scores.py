"""Losses and scores against plain Python, the names an experiment may give, and where models are
evaluated.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.errors import AcceleratorLost, InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.learning import evaluation, models
from fedstrata.common.learning.evaluation import ModelTester, accelerator_of, evaluate, score_of
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.losses import loss_of, try_loss
from fedstrata.common.model.layout import LinkLayouts
from fedstrata.common.settings.data import NUMBERS
from fedstrata.common.settings.training import LOSSES, Score
from fedstrata.device.jobs import Order
from fedstrata.device.training.batches import load_local_dataset
from fedstrata.device.training.objectives.objective import Minibatch
from fedstrata.device.training.objectives.objectives_by_name import objective_of
from fedstrata.device.training.trainer import Trainer
from fedstrata.device.training.vectors import TaskVectors
from fedstrata.device.vmapped.schedule import Load
from fedstrata.device.vmapped.shared_steps import Turn, Visits
from fedstrata.device.vmapped.stacked_models import Recipe
from tests.helpers.commands import invoke
from tests.helpers.examples import examples
from tests.helpers.steps import batches_of
from tests.helpers.vmapped_steps import problem_of

OWN = """
import torch

def cubed(outputs, targets): return ((outputs - targets).abs() ** 3).mean(1)
def averaged(outputs, targets): return ((outputs - targets) ** 2).mean()
def constant(outputs, targets): return torch.zeros(len(outputs))
def failing(outputs, targets): return outputs.nonsense()
def worst(outputs, targets): return abs(outputs - targets).max()
def empty(outputs, targets): return float("nan")
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own losses and scores, in the current folder."""
    (tmp_path / "ownscores.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def plain(name: str, o: float, t: float) -> float:
    """Return the loss of one number."""
    e = abs(o - t)
    match name:
        case "mean_squared_error":
            return e * e
        case "mean_absolute_error":
            return e
        case "huber":
            return e * e / 2 if e <= 1 else e - 0.5
        case _:
            s = 1 / (1 + math.exp(-o))
            return -t * math.log(s) - (1 - t) * math.log(1 - s)


NUMBER = st.floats(-8, 8, width=32)
PAIRS = st.integers(1, 3).flatmap(
    lambda width: st.lists(
        st.lists(st.tuples(NUMBER, NUMBER), min_size=width, max_size=width), min_size=1, max_size=6
    )
)


@pytest.mark.parametrize("name", LOSSES[NUMBERS])
@examples(40)
@given(rows=PAIRS)
def test_a_loss_of_numbers_is_its_formula(name: str, rows: list[list[tuple[float, float]]]) -> None:
    outputs = torch.tensor([[o for o, _ in row] for row in rows], dtype=torch.float64)
    targets = torch.tensor([[t for _, t in row] for row in rows])
    if name == "binary_cross_entropy":
        targets = (targets > 0).float()
    wanted = [
        sum(plain(name, o, t) for o, t in zip(out, of, strict=True)) / len(out)
        for out, of in zip(outputs.tolist(), targets.tolist(), strict=True)
    ]
    assert loss_of(name)(outputs, targets).tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-9)


@examples(40)
@given(rows=PAIRS)
def test_scores_of_numbers_are_their_formulas(rows: list[list[tuple[float, float]]]) -> None:
    outputs, targets = (
        np.array([[pair[i] for pair in row] for row in rows], np.float64) for i in (0, 1)
    )
    count, width = targets.shape
    flat = [pair for row in rows for pair in row]
    squares, errors = ([abs(o - t) ** power for o, t in flat] for power in (2, 1))
    assert score_of("mean_squared_error")(outputs, targets) == pytest.approx(
        sum(squares) / len(flat)
    )
    assert score_of("mean_absolute_error")(outputs, targets) == pytest.approx(
        sum(errors) / len(flat)
    )
    r2 = []
    for k in range(width):
        column = [row[k] for row in rows]
        mean = sum(t for _, t in column) / count
        rest, whole = sum((o - t) ** 2 for o, t in column), sum((t - mean) ** 2 for _, t in column)
        r2.append(1 - rest / whole if whole > 0 else float(rest == 0))
    assert score_of("r2")(outputs, targets) == pytest.approx(sum(r2) / width, rel=1e-6, abs=1e-6)
    signs = [(o > 0) == (t > 0.5) for o, t in flat]
    assert score_of("binary_accuracy")(outputs, targets) == pytest.approx(sum(signs) / len(signs))


def test_accuracy_is_what_is_evaluated_batch_by_batch() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4))
    samples, labels = torch.randn(17, 3), torch.randint(0, 4, (17,))
    found = evaluate(module, samples, labels=labels, normalise=torch.clone, batch_size=5)
    with torch.no_grad():
        outputs = module(samples)
    assert found.score == (outputs.argmax(1) == labels).double().mean()
    assert found.loss == pytest.approx(
        float(torch.nn.functional.cross_entropy(outputs, labels)), rel=1e-6
    )


@pytest.mark.parametrize("name", ["mean_squared_error", "binary_cross_entropy", "ownscores:cubed"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_step_of_several_models_has_the_losses_of_each(
    name: str, weighted: bool, mine: None
) -> None:
    objective = objective_of(parse({"data": DATA, "training": {"loss": name}}).training)
    outputs, targets = torch.randn(2, 5, 3), torch.rand(2, 5, 3)
    weights = torch.softmax(torch.randn(2, 5), 1) if weighted else None
    together = objective.losses(Minibatch(lambda: outputs, targets, [], [], weights), outputs)
    for a in range(2):
        each = loss_of(name)(outputs[a], targets[a])
        alone = objective.losses(Minibatch(lambda: outputs, targets[a], [], []), outputs[a])
        assert float(alone) == pytest.approx(float(each.mean()), rel=1e-6)
        wanted = each.mean() if weights is None else (each * weights[a]).sum()
        assert float(together[a]) == pytest.approx(float(wanted), rel=1e-6)


def test_a_score_of_ones_own_gets_all_outputs_and_targets(mine: None) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 1))
    samples, targets = torch.randn(11, 3), torch.randn(11, 1)
    found = evaluate(
        module,
        samples,
        labels=targets,
        normalise=torch.clone,
        batch_size=4,
        loss="ownscores:cubed",
        scores=["ownscores:worst"],
    )
    with torch.no_grad():
        errors = (module(samples) - targets).abs()
    assert found.score == pytest.approx(float(errors.max()))
    assert found.loss == pytest.approx(float((errors**3).mean()), rel=1e-6)
    with pytest.raises(
        InvalidExperiment, match=r"score\.name = 'ownscores:failing': fails with AttributeError"
    ):
        evaluate(
            module,
            samples,
            labels=targets,
            normalise=torch.clone,
            loss="huber",
            scores=["ownscores:failing"],
        )


def test_a_score_of_ones_own_that_is_nan_is_named_once(
    mine: None, caplog: pytest.LogCaptureFixture
) -> None:
    module, targets = torch.nn.Sequential(torch.nn.Linear(3, 1)), torch.randn(11, 1)
    for samples in (torch.full((11, 3), torch.nan), torch.randn(11, 3), torch.randn(11, 3)):
        found = evaluate(
            module,
            samples,
            labels=targets,
            normalise=torch.clone,
            loss="huber",
            scores=["ownscores:empty"],
        )
        assert math.isnan(found.score)
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning.startswith(
        "score.name = 'ownscores:empty': returns nan for finite outputs, in empty ("
    )
    assert warning.endswith("ownscores.py:9). It is left out: return a number.")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "averaged",
            r"returns \[\] for 2 samples, not the loss of each, \[2\], in .*\. Return no mean",
        ),
        ("constant", "does not depend on the outputs"),
        ("failing", "fails with AttributeError"),
        ("absent", "cannot be imported"),
    ],
)
def test_a_loss_of_ones_own_that_is_wrong_is_refused(name: str, problem: str, mine: None) -> None:
    with pytest.raises(
        InvalidExperiment, match=rf"^training\.loss = 'ownscores:{name}': .*{problem}"
    ):
        try_loss(f"ownscores:{name}", Inputs((3,), 1, numbers=True))
    try_loss("ownscores:cubed", Inputs((3,), 1, numbers=True))


DATA: dict[str, Any] = {"dataset": "mine:load", "targets": "numbers"}


@pytest.mark.parametrize(
    ("tree", "loss", "score"),
    [
        ({}, "cross_entropy", "accuracy"),
        ({"data": DATA}, "mean_squared_error", "r2"),
        (
            {"data": DATA, "training": {"loss": "binary_cross_entropy"}},
            "binary_cross_entropy",
            "binary_accuracy",
        ),
        (
            {"data": DATA, "score": {"name": "mean_absolute_error"}},
            "mean_squared_error",
            "mean_absolute_error",
        ),
        ({"score": {"name": "a:b", "better": "lower"}}, "cross_entropy", "a:b"),
    ],
)
def test_the_targets_decide_the_defaults(tree: dict[str, Any], loss: str, score: str) -> None:
    experiment = parse(tree)
    assert (experiment.training.loss, experiment.score.name) == (loss, score)
    assert parse(experiment.to_json()).to_json() == experiment.to_json()


def test_a_target_is_reached_in_the_scores_direction() -> None:
    assert Score(name="r2").reached(0.5, 0.5) and not Score(name="r2").reached(0.4, 0.5)
    lower = Score(name="mean_squared_error")
    assert lower.reached(0.4, 0.5) and not lower.reached(0.6, 0.5) and not lower.reached(None, 0.5)
    assert Score(name="m:f", better="lower").reached(-1.0, 0.0) and not lower.reached(0.1, None)
    assert (
        not Score(name="r2").reached(math.nan, 0.0) and Score(name="m:nice_one").label == "nice one"
    )


def numbers_recipe(training: dict[str, Any]) -> tuple[Recipe, list[Turn]]:
    """Return what the vmapped training of two devices needs, with two numbers to predict of each
    sample.
    """
    settings = parse({"data": DATA, "training": {"momentum": 0.9, **training}}).training
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    samples, targets = torch.randn(40, 4), torch.rand(40, 2).round()
    layout = models.layout_of(module)
    vectors = TaskVectors(LinkLayouts(layout, layout, layout), tuple(objective_of(settings).keeps))
    row = np.zeros(layout.row_bytes + 4 * layout.parameters * len(vectors.shapes), np.uint8)
    models.write_row(module, layout, row)
    recipe, ignore = (
        Recipe(module, vectors, samples, targets, torch.clone, settings, 0.05),
        lambda *_: None,
    )
    visits = [Visits(places, None) for places in torch.arange(40).view(2, -1)]
    return recipe, [
        Turn(row, Load(20, 1), each, ignore, threading.Event(), ignore) for each in visits
    ]


@pytest.mark.parametrize("loss", [*LOSSES[NUMBERS], "ownscores:cubed"])
@pytest.mark.parametrize("objective", ["", "fedprox", "fedsam", "moon"])
def test_vmapped_steps_of_numbers_are_those_of_each_device(
    loss: str, objective: str, mine: None
) -> None:
    named = {"objective": {"name": objective}} if objective else {}
    assert problem_of(*numbers_recipe({"loss": loss, **named})) == ""


@pytest.mark.parametrize("objective", ["", "fedprox"])
def test_training_of_numbers_is_a_plain_loop(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(1)
    x = draw.normal(size=(60, 3))
    np.savez(tmp_path / "t.npz", x=x, y=x @ [1.0, -2.0, 0.5] + 0.1)
    (tmp_path / "plainnet.py").write_text(
        "from torch import nn\ndef build(): return nn.Linear(3, 1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    tree: dict[str, Any] = {
        "topology": {"institutions": 0, "devices": 2},
        "data": {"dataset": "t.npz", "root": str(tmp_path), "targets": "numbers"},
        "model": {"name": "plainnet:build"},
        "training": {"batch_size": 10, "learning_rate": 0.05, "momentum": 0.9, "epochs": 2},
    }
    if objective:
        tree["training"]["objective"] = {"name": objective, "mu": 0.3}
    experiment = parse(tree)
    trainer = Trainer(experiment, node="device-1", accelerator="cpu")
    trainer.prepare()
    row, out = (np.zeros(trainer.layout.row_bytes, np.uint8) for _ in range(2))
    trainer.train(Order(row, out, 2, 0))
    weights = {
        "weight": torch.zeros(1, 3, requires_grad=True),
        "bias": torch.zeros(1, requires_grad=True),
    }
    optimiser = torch.optim.SGD(weights.values(), 0.05, momentum=0.9)
    local = load_local_dataset(experiment, "device-1", accelerator=torch.device("cpu"))
    for _, inputs, targets in batches_of(
        local, experiment, node="device-1", epochs=2, local_round=0
    ):
        term = 0.15 * sum((weight**2).sum() for weight in weights.values()) if objective else 0.0
        loss = (
            torch.nn.functional.mse_loss(torch.nn.functional.linear(inputs, **weights), targets)
            + term
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    for name, found in trainer.layout.views(out).items():
        assert np.allclose(found, weights[name].detach().numpy(), rtol=1e-4, atol=1e-6)


# Where models are evaluated

GPUS = ["cpu", "cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("name", "there", "beside", "chosen"),
    [
        ("cpu", GPUS, "cuda:1", "cpu"),
        ("auto", ["cpu"], "cpu", "cpu"),
        ("auto", GPUS, "cpu", "cuda:0"),
        ("auto", GPUS, "cuda:1", "cuda:1"),
        ("cuda", GPUS, "cuda:1", "cuda:1"),
        ("cuda", GPUS, "cpu", "cuda:0"),
        ("cuda:1", GPUS, "cuda:0", "cuda:1"),
    ],
)
def test_models_are_evaluated_beside_their_training_if_the_key_allows_it(
    name: str, there: list[str], beside: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "accelerators", lambda: there)
    lab = parse({"evaluation": {"accelerator": name}})
    assert accelerator_of(lab, beside=torch.device(beside)) == torch.device(chosen)


def test_a_missing_gpu_is_named_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "accelerators", lambda: GPUS)
    named = r"^evaluation\.accelerator = 'cuda:2': this machine has no .* or use auto"
    with pytest.raises(InvalidExperiment, match=named):
        accelerator_of(parse({"evaluation": {"accelerator": "cuda:2"}}))


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, fails: Exception) -> tuple[ModelTester, list[str]]:
    """Return a tester on a GPU that fails as soon as the module arrives there, and where the module
    has been.
    """
    tester = ModelTester(parse({}), accelerator=torch.device("cuda", 0))
    places: list[str] = []

    def to(device: torch.device) -> None:
        places.append(str(device))
        if device.type == "cuda":
            raise fails

    monkeypatch.setattr(tester._module, "to", to)
    monkeypatch.setattr(evaluation, "set_up_evaluation", lambda device: places.append("set up"))
    memory = SimpleNamespace(others=lambda: 0, give_back=lambda: places.append("freed"))
    monkeypatch.setattr(evaluation, "memory_of", lambda _: memory)
    return tester, places


def test_without_memory_on_the_gpu_the_cpu_evaluates(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tester, places = on_a_gpu(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    with caplog.at_level(logging.WARNING):
        found = tester.evaluate(tester.first)
    assert found == ModelTester(parse({})).evaluate(tester.first)
    assert places == ["set up", "cuda:0", "cpu", "freed"]
    assert caplog.messages == ["cuda:0 has not enough free memory: evaluated on the CPU"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        # the process is replaced
        ("CUDA error: an illegal memory access was encountered", AcceleratorLost),
        ("CUDA error: invalid argument", RuntimeError),
    ],
)
def test_another_failure_of_the_gpu_is_an_error(
    text: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    tester, places = on_a_gpu(monkeypatch, RuntimeError(text))
    with pytest.raises(error, match=f"^{text}"):
        tester.evaluate(tester.first)
    assert places[-1] == "freed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_run_records_where_it_was_evaluated(tmp_path: Path) -> None:
    few = ["--set", "rounds=1", "--set", "topology.institutions=1", "--set", "topology.devices=1"]
    command = ["run", "demo", "--direct", *few, "--runs", str(tmp_path), "--set"]
    refused = invoke(*command, "evaluation.accelerator=cuda")
    assert refused.exit_code == 4
    assert (
        "evaluation.accelerator = 'cuda': this machine has no such accelerator. It has cpu"
        in refused.stderr
    )
    assert invoke(*command, "evaluation.accelerator=auto").exit_code == 0
    (manifest,) = tmp_path.glob("*/manifest.json")
    assert json.loads(manifest.read_text())["evaluated_on"] == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("model", ["cnn_digits", "resnet20"])
def test_on_a_gpu_evaluation_is_near_to_the_cpus_and_leaves_no_memory_behind(model: str) -> None:
    data: dict[str, Any] = {
        "dataset": "synthetic",
        "classes": 10,
        "image_shape": [1, 28, 28],
        "test_samples": 1200,
    }
    lab = parse({"data": data if model == "resnet20" else {}, "model": {"name": model}})
    here, there = ModelTester(lab), ModelTester(lab, accelerator=torch.device("cuda", 0))
    assert np.array_equal(here.first, there.first)
    wanted = here.evaluate(here.first)
    there.evaluate(there.first)
    before = torch.cuda.memory_allocated()
    found = there.evaluate(there.first)
    assert torch.cuda.memory_allocated() == before
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5) and found.score == pytest.approx(
        wanted.score, abs=0.005
    )
