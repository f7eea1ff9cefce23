"""Parameters that are one number, have no numbers, or several names: each objective trains them as
the usual ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import models
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.device.training.objectives.objective import norms, scale
from fedstrata.device.training.private import add_clipped
from tests.helpers.examples import slow
from tests.helpers.plain import first_model, trained, trainer_of

HERE = "tests.helpers.shaped"
SHAPES = ("number", "empty", "tied", "everything")
OBJECTIVES: dict[str, dict[str, Any]] = {
    "": {},
    "fedprox": {"mu": 0.5},
    "fedsam": {"rho": 0.3},
    "scaffold": {},
    "feddyn": {"alpha": 0.4},
    "moon": {"mu": 2.0},
    "fedgen": {},
}
RULES = ("scaffold", "feddyn", "fedgen")


def lab(model: str, objective: str, *, unit: str = "") -> Experiment:
    training: dict[str, Any] = {"batch_size": 16, "learning_rate": 0.1}
    if objective:
        training["objective"] = {"name": objective, **OBJECTIVES[objective]}
    cloud: dict[str, Any] = {"aggregation": {"name": objective}} if objective in RULES else {}
    if unit:
        cloud["privacy"] = {"unit": unit, "clip_norm": 0.5, "noise_multiplier": 0.0}
    return parse(
        {
            "topology": {"institutions": 0, "devices": 8}, "rounds": 2, "cloud": cloud,
            "model": {"name": f"{HERE}:{model}"}, "training": training,
        }
    )  # fmt: skip


def filled(layout: ModelLayout, row: Row, size: int) -> Row:
    """Return a model with numbers behind it, as large as gradients, equal for all layouts of so
    many columns.
    """
    behind = (
        np.random.default_rng(3).normal(0, 0.01, (size - layout.row_bytes) // 4).astype(np.float32)
    )
    return np.concatenate([row, behind.view(np.uint8)])


def after(experiment: Experiment) -> tuple[Row, float]:
    """Return what two trainings of a device make of the first model, and the loss."""
    trainer = trainer_of(experiment)
    row = first_model(experiment)
    size = trainer.vectors.links.down.row_bytes + trainer.vectors.kept_bytes
    loss = 0.0
    for local_round in range(2):
        out, result = trained(trainer, filled(trainer.layout, row, size), local_round=local_round)
        row, loss = out[: trainer.layout.row_bytes], result.loss or 0.0
    return row, loss


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("model", slow(SHAPES, but=["everything"]))
def test_each_objective_trains_each_shape_as_the_usual_one(model: str, objective: str) -> None:
    check(after(lab(model, objective)), after(lab("plain", objective)))


def check(found: tuple[Row, float], wanted: tuple[Row, float]) -> None:
    """Check that rows and losses are the same up to rounding: a norm of one tensor more has another
    order.
    """
    row, expected = (np.frombuffer(each, np.float32) for each, _ in (found, wanted))
    np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-6)
    assert found[1] == pytest.approx(wanted[1], rel=1e-5)


@pytest.mark.parametrize("objective", ["", "fedprox"])
@pytest.mark.parametrize("model", SHAPES)
def test_a_private_step_clips_each_shape_as_the_usual_one(model: str, objective: str) -> None:
    check(
        after(lab(model, objective, unit="sample")), after(lab("plain", objective, unit="sample"))
    )


def test_norms_of_numbers_and_of_nothing_are_those_of_all_together() -> None:
    tensors = [torch.tensor([3.0, 0.0]), torch.empty(2, 0, 4), torch.tensor([[[4.0]], [[2.0]]])]
    assert norms(tensors).tolist() == [5.0, 2.0]
    scale(tensors, torch.tensor([2.0, 3.0]))
    assert tensors[0].tolist() == [6.0, 0.0] and tensors[2].flatten().tolist() == [8.0, 6.0]
    sums = {"number": torch.zeros(()), "matrix": torch.zeros(1, 1)}
    add_clipped(
        {"number": torch.tensor([3.0, 0.3]), "matrix": torch.tensor([[[4.0]], [[0.4]]])},
        sums,
        clip_norm=1.0,
    )
    assert float(sums["number"]) == pytest.approx(0.9) and float(sums["matrix"]) == pytest.approx(
        1.2
    )


def test_a_layout_has_all_shapes() -> None:
    row = models.layout_of(models.build(f"{HERE}:everything", 1, inputs=Inputs((1, 8, 8), 10)))
    assert {entry.name: entry.shape for entry in row.entries}["scale"] == ()
