"""Users' own models of every kind: trained as in a plain loop, on several devices of a process, or
refused before, in one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import nn

from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment import reading, schema
from fedstrata.common.learning import datasets, models
from fedstrata.common.learning.evaluation import ModelTester
from fedstrata.common.model.layout import Row
from fedstrata.common.text import NOTE
from tests.helpers import odd_models, rare_models
from tests.helpers.examples import slow
from tests.helpers.plain import first_model, plain_training, trained_together

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")

DEVICES: Final = ["device-0", "device-1"]
ROUND: Final = 2
JOINING: Final = ("Normed", "Squeezes", "scripted")  # a last batch of one sample to the one before
ODD: Final = odd_models.__name__
RARE: Final = rare_models.__name__
REFUSED: Final[Mapping[str, str]] = {
    "AllFrozen": "it has no parameter that is trained",
    "SystemNoise": "the same training twice gives other models",
    "SparseEmbedding": "the gradient of its table.weight is sparse. Use sparse=False",
    "ExtraState": "_extra_state in its state_dict is neither a parameter nor a buffer. Keep that "
    "state in buffers",
    "ExtraTensor": "_extra_state in its state_dict is neither a parameter nor a buffer. Keep that "
    "state in buffers",
    "bool_buffer": "its buffer mask is torch.bool.*model.frozen.*persistent=False",
    "half_buffer": "its buffer mask is torch.float16.*Use float32",
    "brain_buffer": "its buffer mask is torch.bfloat16.*Use float32",
    "double_buffer": "its buffer mask is torch.float64.*Use float32",
    "short_counter": "its buffer mask is torch.int32.*int64",
    "HalfParameter": "its parameter extra is torch.float16.*Use float32",
    "HiddenParameter": "its parameter last.bias is not in its state_dict",
    "shared_module": "returns the same module, or a part of it, again.*Make a new one in each call",
    "shared_part": "returns the same module, or a part of it, again.*Make a new one in each call",
    "Tuple": "returns tuple for two samples, not logits",
    "BadBackward": "modified by an inplace operation",
    "TrainOnlyFault": "no attribute 'absent'",
    "NoGradient": "does not require grad",
    "GlobalCounter": rf"gives other models, and changes {RARE}\.CALLS\. Draw",
    "GlobalGenerator": rf"gives other models, and changes {RARE}\.SOURCE\. Draw",
}
SHARED: Final = {  # models whose file keeps something from training to training, by name
    "LateGlobalCounter": "CALLS",
    "ClassCounter": "ClassCounter.calls",
    "GlobalList": "SEEN",
    "GlobalNorm": "MEAN",
    "DefaultList": "_scaled",
    "FunctionAttribute": "_halved",
}
APART: Final = {"dropped"}  # its dropout has masks of its own
# A division by the weights' deviation: on one CPU ours and the plain loop are 1.9e-5 and 1.4e-5
# from one in float64.
APART_MOST: Final = {"WeightStandardised": 6e-5}
HELPERS: Final = {"Once", "changed", "with_buffer"}


def named_in(module: ModuleType) -> list[str]:
    """Return the names of the models of a file."""
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
        and not name.startswith("_")
        and not name.endswith("_loss")
        and name not in HELPERS
    ]


PLACES: Final = {
    name: module.__name__ for module in (odd_models, rare_models) for name in named_in(module)
}
TRAINED: Final = [name for name in PLACES if name not in REFUSED.keys() | APART]
LATER: Final = (  # of each kind of oddness one or two are quick, these not
    *("WeightStandardised", "RunningMean", "AfterAccumulation", "NumpyNoise", "NoiseInABranch"),
    *("DroppedLSTM", "MomentumNone", "bool_table", "FreezesAfterSteps", "KeepsEval"),
    *("ClampsAll", "HookCounts", "ClampsByOperation", "CountsByNumpy", "ReadsStorage"),
    *("LateInAList", "Replaced", "OwnGenerator", "Exits", "own_layer"),
    *("own_stack", "counting_layer", "counting_forward", "hooked_weight", "watched_weight"),
    *("orthogonal", "frozen_layer", "ClassCounter", "GlobalList", "GlobalNorm"),
    "FunctionAttribute",
)


def experiment(name: str, **training: Any) -> schema.Experiment:
    settings = {
        "batch_size": 10,
        "learning_rate": 0.02,
        "momentum": 0.9,
        "weight_decay": 0.01,
        **training,
    }
    model = {"name": f"{PLACES[name]}:{name}"}
    return reading.parse({"model": model, "topology": {"devices": 23}, "training": settings})


@cache
def plain(text: str, node: str) -> tuple[Row, int]:
    lab = reading.parse(text)
    joins = lab.model.name.endswith(JOINING)
    return plain_training(lab, node, first_model(lab), epochs=2, local_round=ROUND, joins=joins)


def trained(lab: schema.Experiment, times: int = 1) -> list[list[tuple[Row, Work]]]:
    """Train two devices of one process as often from the first model."""
    return trained_together(lab, DEVICES, epochs=2, local_round=ROUND, times=times)


def check(lab: schema.Experiment, found: list[tuple[Row, Work]], *, within: float = 3e-5) -> None:
    layout = models.layout_of(models.anew(lab, inputs=datasets.load(lab.data).inputs))
    alike = lab.model_copy(
        update={"training": lab.training.model_copy(update={"recorded": "auto"})}
    )
    for node, (out, result) in zip(DEVICES, found, strict=True):
        wanted, steps = plain(alike.to_json(), node)
        assert result.steps == steps
        apart = np.abs(layout.floats(out) - layout.floats(wanted)).max()
        assert apart <= within, f"{node}: {apart:.3g}"
        assert np.array_equal(layout.integers(out), layout.integers(wanted))


def test_every_name_is_that_of_a_model() -> None:
    assert {*REFUSED, *SHARED, *LATER, *APART, *JOINING} <= PLACES.keys()
    assert len(PLACES) == len(named_in(odd_models)) + len(named_in(rare_models)) > 100


def cases() -> list[Any]:
    """Return each model, and those with state of a rare kind with recorded steps, too."""
    every = [(name, "auto") for name in TRAINED]
    every += [(name, True) for name in TRAINED if PLACES[name] == RARE]
    return slow(every, but=[case for case in every if case[0] not in LATER])


@pytest.mark.parametrize(("name", "recorded"), cases())
def test_it_trains_as_a_plain_loop_on_each_device_of_a_process(
    name: str, recorded: str | bool, caplog: pytest.LogCaptureFixture
) -> None:
    lab = experiment(name, recorded=recorded)
    found, again = trained(lab, 2)
    check(lab, found, within=APART_MOST.get(name, 3e-5))
    assert all(
        np.array_equal(one, other) for (one, _), (other, _) in zip(found, again, strict=True)
    )
    notes = [
        line
        for line in caplog.messages
        if line.startswith(NOTE) and "training.recorded" not in line
    ]
    problem = "each training changes {}, which the devices of a process share"
    shared = [problem.format(f"{RARE}.{SHARED[name]}")] if name in SHARED else []
    assert [line.split(": ", 2)[2].partition(". Keep")[0] for line in notes] == shared


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_before_the_run_in_one_line(name: str) -> None:
    problem = rf"(?s)^model\.name = '{PLACES[name]}:{name}': .*{REFUSED[name]}"
    with pytest.raises(InvalidExperiment, match=problem) as caught:
        trained(experiment(name))
    assert caught.value.exit_code == 4


def test_a_loss_whose_weight_changes_is_refused_or_named(caplog: pytest.LogCaptureFixture) -> None:
    data = {"topology": {"devices": 23}, "model": {"name": "mlp_digits"}}
    problem = (
        rf"^training\.loss = '{RARE}:growing_loss': the same training twice gives other "
        r"models, and changes"
    )
    with pytest.raises(InvalidExperiment, match=rf"{problem} {RARE}\.WEIGHT\. Draw"):
        trained(reading.parse({**data, "training": {"loss": f"{RARE}:growing_loss"}}))
    trained(reading.parse({**data, "training": {"loss": f"{RARE}:late_loss"}}))
    (note,) = [line for line in caplog.messages if line.startswith(NOTE)]
    assert note == (
        f"{NOTE}training.loss = '{RARE}:late_loss': each training changes {RARE}.CALLS, which the "
        "devices of a process"
        " share. Keep it in the model: each training makes a new one."
    )


@pytest.mark.parametrize("name", JOINING)
def test_a_last_batch_of_one_sample_joins_the_one_before_where_it_cannot_be_trained_on(
    name: str,
) -> None:
    lab = experiment(name, batch_size=31)  # of 63 samples
    (found,) = trained(lab)
    check(lab, found)
    assert [(result.samples, result.steps) for _, result in found] == [(63, 2 * 2)] * 2


def test_a_model_that_cannot_train_on_one_sample_refuses_batches_of_one() -> None:
    with pytest.raises(
        InvalidExperiment, match=r"fails in training on 1 sample.*more than 1 value per channel"
    ):
        trained(experiment("Normed", batch_size=1))


@pytest.mark.parametrize("name", ["StepCounter", "RunningMean", "NumpyNoise"])
def test_it_is_evaluated_as_it_is_made_each_time(name: str) -> None:
    lab = experiment(name)
    tester = ModelTester(lab)
    (((row, _), _),) = trained(lab)
    once, again = tester.evaluate(row), tester.evaluate(row)
    data = datasets.load(lab.data)
    module: nn.Module = models.anew(lab, inputs=data.inputs)
    models.read_row(module, tester.layout, row)
    with torch.no_grad():
        right = module.eval()(data.normaliser()(data.test_images)).argmax(1) == data.test_labels
    assert once == again
    assert once.score == pytest.approx(float(right.float().mean()), abs=1e-6)
