"""qFedAvg against a plain twin, at q = 0, and in a lab: losses at the model received, and fairer scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from common.errors import InvalidExperiment, RefusedModel
from common.experiment.reading import parse
from common.experiment.topology import CLOUD
from common.experiment.training import TrainingSettings
from common.learning import datasets, models, splits
from common.learning.evaluation import ModelTester
from common.methods.aggregator import build
from common.methods.rule import Uploads
from common.model.layout import ModelLayout, Section
from common.protocol.limits import check_report, limits_below
from common.protocol.messages import Key, Manifest, Result
from deploy.results.run import Run
from tests.helpers.direct import run_direct
from tests.helpers.examples import examples
from tests.test_aggregators import Report

LAYOUT = ModelLayout.build([("weight", (4, 3), Section.PARAMETER), ("mean", (2,), Section.BUFFER)])
D = LAYOUT.parameters
LAB: dict[str, Any] = {
    "rounds": 2, "topology": {"institutions": 0, "devices": 4}, "model": {"name": "mlp_digits"},
    "data": {"partition": "dirichlet", "concentration": 0.5},
    "training": {"batch_size": 50, "learning_rate": 0.05, "momentum": 0.0},
    "cloud": {"aggregation": {"name": "qfedavg", "q": 1.0}},
}  # fmt: skip
Doubles = npt.NDArray[np.float64]


def play(aggregation: dict[str, Any], losses: list[float], moves_KD: Doubles, *, rate: float = 0.1) -> Doubles:
    """Return the next model from uploads that moved so far from a model of ones."""
    settings = parse({**LAB, "cloud": {"aggregation": aggregation}}).tiers[0].aggregation
    rule = build(
        settings, layout=LAYOUT, node="cloud", seed=1, measures=False, rows=lambda name, count: np.empty(0, np.uint8),
        training=TrainingSettings(momentum=0.0), learning_rate=lambda local_round: rate,
    )  # fmt: skip
    start = LAYOUT.empty()
    LAYOUT.floats(start)[:] = 1.0
    rule.begin(start)
    rows_K = np.stack([start] * len(losses))
    LAYOUT.floats(rows_K)[:] += moves_KD
    reports = tuple(Report(10 * (k + 1), 0.5, start_loss=loss) for k, loss in enumerate(losses))
    children = tuple(f"device-{k}" for k in range(len(losses)))
    rule.aggregate(0, Uploads(children, rows_K, reports, lambda: None))
    return LAYOUT.floats(rule.model).astype(np.float64)


@examples(60)
@given(
    q=st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 5.0]),
    losses=st.lists(st.floats(0.01, 4.0), min_size=1, max_size=5),
    rate=st.sampled_from([0.01, 0.1, 1.0]),
    seed=st.integers(0, 1000),
)
def test_the_next_model_is_that_of_a_plain_twin(q: float, losses: list[float], rate: float, seed: int) -> None:
    moves_KD = np.random.default_rng(seed).normal(scale=0.1, size=(len(losses), D + 2))
    moves_KD = (1 + moves_KD).astype(np.float32).astype(np.float64) - 1
    lipschitz = 1 / rate
    delta, h = [0.0] * D, 0.0
    for loss, move in zip(losses, moves_KD, strict=True):
        gradient = [-lipschitz * step for step in move[:D]]  # L (z - v_k)
        delta = [total + loss**q * each for total, each in zip(delta, gradient, strict=True)]
        h += q * loss ** (q - 1) * sum(each * each for each in gradient) + lipschitz * loss**q
    wanted = [1 - each / h for each in delta]
    found = play({"name": "qfedavg", "q": q}, losses, moves_KD, rate=rate)
    np.testing.assert_allclose(found[:D], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[D:], 1 + moves_KD[:, D:].mean(0), rtol=1e-6)


@given(seed=st.integers(0, 1000), losses=st.lists(st.floats(0.0, 9.0), min_size=1, max_size=5))
def test_q_of_zero_is_the_uniform_mean(seed: int, losses: list[float]) -> None:
    moves_KD = np.random.default_rng(seed).normal(scale=0.1, size=(len(losses), D + 2))
    found = play({"name": "qfedavg", "q": 0.0}, losses, moves_KD)
    uniform = play({"name": "fedavg", "weights": "uniform"}, losses, moves_KD)
    np.testing.assert_allclose(found, uniform, rtol=1e-6)


def test_a_device_with_a_higher_loss_pulls_the_model_its_way() -> None:
    moves_KD = np.zeros((2, D + 2))
    moves_KD[0, :D], moves_KD[1, :D] = -0.1, 0.1
    assert play({"name": "qfedavg", "q": 2.0}, [2.0, 0.5], moves_KD)[:D].max() < 1


def test_losses_are_those_of_the_model_received(tmp_path: Path) -> None:
    run = Run(run_direct(tmp_path, LAB))
    experiment = parse(LAB)
    tester, data = ModelTester(experiment), datasets.load(experiment.data)
    module = models.of(experiment, inputs=data.inputs)
    models.read_row(module, tester.layout, tester.first)
    first = next(event for event in run.events if event.name == "plan")
    for name, part in zip(experiment.tree.devices, splits.split_of(experiment).partitions, strict=True):
        samples = torch.from_numpy(part)
        with torch.no_grad():
            outputs = module.eval()(data.normaliser()(data.train_images[samples]))
        wanted = float(functional.cross_entropy(outputs, data.train_labels[samples]))
        assert first.facts["start_losses"][name] == pytest.approx(wanted, rel=1e-5)


def test_the_rule_is_for_parents_of_devices() -> None:
    above = {"topology": {"institutions": 2, "devices": 4}, "cloud": LAB["cloud"]}
    with pytest.raises(InvalidExperiment, match="its children must be devices"):
        parse(above)
    parse({"topology": {"institutions": 2, "devices": 4}, "institution": LAB["cloud"]})


def test_a_result_without_the_loss_is_refused() -> None:
    limits = limits_below(parse(LAB), CLOUD)["device-0"]
    manifest = Manifest("0123456789abcdef", 1024, 1024, b"d" * 8, "fp32", "layout")
    result = Result(Key(0, 0, 0), manifest, None, 100, 0.5, 1, 12, 12, 1.0, 0.0, 0.0, (), "", start_loss=2.3)
    check_report(result, limits=limits)
    for loss in (None, float("nan"), 1e40):
        with pytest.raises(RefusedModel, match="model that it received"):
            check_report(replace(result, start_loss=loss), limits=limits)
