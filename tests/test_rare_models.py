"""More models of users': trained as in a plain loop by default and with `training.recorded = true`,
or one line.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets, models
from fedstrata.common.model.layout import Row
from fedstrata.common.text import NOTE
from tests.helpers import rare_models
from tests.helpers.examples import slow
from tests.helpers.plain import first_model, plain_training, trained_together

HERE = "tests.helpers.rare_models"
DEVICES = ["device-0", "device-1"]
ROUND = 2
APART_MOST = 3e-5
SHARED = {  # models whose file keeps something from training to training, by name
    "LateGlobalCounter": "CALLS",
    "ClassCounter": "ClassCounter.calls",
    "GlobalList": "SEEN",
    "GlobalNorm": "MEAN",
    "DefaultList": "_scaled",
    "FunctionAttribute": "_halved",
}
REFUSED = {"GlobalCounter": "CALLS", "GlobalGenerator": "SOURCE"}
APART = {"dropped"}  # its dropout has masks of its own
TRAINED = [
    name
    for name, value in vars(rare_models).items()
    if getattr(value, "__module__", "") == HERE
    and not name.startswith("_")
    and not name.endswith("_loss")
    and name not in APART | REFUSED.keys()
]
KINDS = (
    "ClampsData",
    "ClampsByNumpy",
    "NumpyInBackward",
    "WithinABand",
    "CounterInAList",
    "CounterOfPython",
    "Ring",
    "HookOfTheLeaf",
    "NumpysGenerator",
    "SampledWeights",
    "Quantised",
    "GradientInside",
    "LSTMNet",
    "Masked",
    "Fused",
    "RoutedInPython",
    "Equilibrium",
    "CachedTable",
    "sequential",
    "counting_hook",
    "parametrised",
    "LateGlobalCounter",
    "DefaultList",
)


def experiment(name: str, **training: Any) -> Experiment:
    settings = {
        "batch_size": 10,
        "learning_rate": 0.02,
        "momentum": 0.9,
        "weight_decay": 0.01,
        **training,
    }
    return parse(
        {"model": {"name": f"{HERE}:{name}"}, "topology": {"devices": 23}, "training": settings}
    )


@cache
def plain(name: str, node: str) -> tuple[Row, int]:
    lab = experiment(name)
    return plain_training(lab, node, first_model(lab), epochs=2, local_round=ROUND, joins=False)


def check(lab: Experiment, name: str, found: list[tuple[Row, Work]], *, within: float) -> None:
    layout = models.layout_of(models.anew(lab, inputs=datasets.load(lab.data).inputs))
    for node, (out, result) in zip(DEVICES, found, strict=True):
        wanted, steps = plain(name, node)
        assert result.steps == steps
        apart = np.abs(layout.floats(out) - layout.floats(wanted)).max()
        assert apart <= within, f"{node}: {apart:.3g}"
        assert np.array_equal(layout.integers(out), layout.integers(wanted))


def test_there_are_many() -> None:
    assert len(TRAINED) + len(REFUSED) >= 85
    assert SHARED.keys() <= set(TRAINED) and set(KINDS) <= set(TRAINED)


@pytest.mark.parametrize("recorded", ["auto", True])
@pytest.mark.parametrize("name", slow(TRAINED, but=KINDS))
def test_it_trains_as_a_plain_loop(
    name: str, recorded: str | bool, caplog: pytest.LogCaptureFixture
) -> None:
    lab = experiment(name, recorded=recorded)
    found, again = trained_together(lab, DEVICES, epochs=2, local_round=ROUND, times=2)
    check(lab, name, found, within=APART_MOST)
    assert all(
        np.array_equal(one, other) for (one, _), (other, _) in zip(found, again, strict=True)
    )
    notes = [
        line
        for line in caplog.messages
        if line.startswith(NOTE) and "training.recorded" not in line
    ]
    problem = "each training changes {}, which the devices of a process share"
    shared = [problem.format(f"{HERE}.{SHARED[name]}")] if name in SHARED else []
    assert [line.split(": ", 2)[2].partition(". Keep")[0] for line in notes] == shared


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_passes_on_what_it_keeps_is_refused_by_name(name: str) -> None:
    problem = (
        rf"^model\.name = '{HERE}:{name}': the same training twice gives other models, and changes"
    )
    with pytest.raises(InvalidExperiment, match=rf"{problem} {HERE}\.{REFUSED[name]}\. Draw"):
        trained_together(experiment(name), DEVICES)


def test_a_loss_whose_weight_changes_is_refused_or_named(caplog: pytest.LogCaptureFixture) -> None:
    data = {"topology": {"devices": 23}, "model": {"name": "mlp_digits"}}
    problem = (
        rf"^training\.loss = '{HERE}:growing_loss': the same training twice gives other "
        r"models, and changes"
    )
    with pytest.raises(InvalidExperiment, match=rf"{problem} {HERE}\.WEIGHT\. Draw"):
        trained_together(parse({**data, "training": {"loss": f"{HERE}:growing_loss"}}), DEVICES)
    trained_together(parse({**data, "training": {"loss": f"{HERE}:late_loss"}}), DEVICES)
    (note,) = [line for line in caplog.messages if line.startswith(NOTE)]
    assert note == (
        f"{NOTE}training.loss = '{HERE}:late_loss': each training changes {HERE}.CALLS, which the "
        "devices of a process"
        " share. Keep it in the model: each training makes a new one."
    )
