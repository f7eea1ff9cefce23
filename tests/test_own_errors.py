"""A user's code that raises: one line with file, line and function of theirs, and exit code 4,
wherever it runs.
"""

from __future__ import annotations

import logging
import os
import re
import signal
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from fedstrata.common.errors import InvalidExperiment, RunFailed, bounded, described
from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.common.host.processes import interruptible
from fedstrata.common.learning.refiner import NodeRefiner
from fedstrata.common.learning.splits import split_of
from fedstrata.common.model.refinement import RoundModels
from fedstrata.common.settings import own
from fedstrata.common.settings.tables import write
from fedstrata.deploy.console import logs
from tests.helpers.commands import fedstrata, invoke
from tests.helpers.direct import run_direct
from tests.helpers.examples import slow

pytestmark = pytest.mark.usefixtures("warm")

# Code that fails where its name is, with the error of the environment; `fail` is the innermost
# frame.
FAULTY: Final = """
import builtins, os
import numpy as np
import torch
from torch import nn

from fedstrata.common.methods.column_rule import ColumnRule
from fedstrata.common.methods.selection import Selector
from fedstrata.device.training.objectives.objective import Objective


def fail():
    raise getattr(builtins, os.environ.get("FAULT", "KeyError"))("a bug")


class Net(nn.Module):
    def __init__(self, shape, classes, when):
        super().__init__()
        self.when = when
        self.work = nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))

    def forward(self, x):
        if self.when == "training" and torch.is_grad_enabled() or self.when == "evaluation" and len(x) > 50:
            fail()
        if self.when == "images" and torch.is_grad_enabled() and x.unique().numel() < x.numel() / 2:
            fail()  # not in a trial, on random numbers
        return self.work(x)


def sound(*, shape, classes): return Net(shape, classes, "never")
def training(*, shape, classes): return Net(shape, classes, "training")
def images(*, shape, classes): return Net(shape, classes, "images")
def evaluation(*, shape, classes): return Net(shape, classes, "evaluation")
def construction(*, shape, classes): fail()


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient): fail()


class InBackward(Net):
    def forward(self, x): return Backward.apply(super().forward(x))


def backward(*, shape, classes): return InBackward(shape, classes, "never")


def loss(outputs, targets): fail()
def score(outputs, targets): fail()
def data(*, root): fail()


class Items:
    def __len__(self): return 40
    def __getitem__(self, place): return (np.zeros((1, 8, 8), np.float32), place % 10) if place < 3 else fail()


def items(): return Items(), Items()


class Goal(Objective):
    def __init__(self, *, where): self.where = where
    def draws(self, shapes, classes):
        if self.where == "draws": fail()
        return 0
    def losses(self, batch, logits):
        if self.where == "losses": fail()
        return super().losses(batch, logits)


class Keeping(Objective):
    keeps = ("mine",)
    def finish(self, update): fail()


class Short(Keeping):
    def finish(self, update): return {"mine": np.zeros(3, np.float32)}


class Nothing(Keeping):
    def finish(self, update): return None


class Facts(ColumnRule):
    def begin(self, facts): return {"numpy": np.float32(1)}


class Text(Facts):
    def begin(self, facts): return "facts"


class Numbers(Facts):
    def begin(self, facts): self.numbers["set"] = {1, 2}
    def columns(self, block): return block.uploads_KC.mean(0)


class Rule(ColumnRule):
    def __init__(self, *, where):
        self.where = where
        if where == "init": fail()
    def begin(self, facts):
        if self.where == "begin": fail()
    def columns(self, block):
        if self.where == "columns": fail()
        return block.uploads_KC.mean(0)


class Chosen(Selector):
    def select(self, now): fail()
"""
LINE: Final = next(i for i, text in enumerate(FAULTY.splitlines(), 1) if "raise getattr" in text)
SMALL: Final = {
    "rounds": 2,
    "topology": {"institutions": 1, "devices": 2},
    "model": {"name": "mlp_digits"},
    "training": {"epochs": 1, "batch_size": 400},
    "institution": {"rounds": 1},
}
# What is wrong, by the experiment's key; and the function that called `fail`.
FAULTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "training": ("model.name", {"model": {"name": "faulty:training"}}),
    "images": ("model.name", {"model": {"name": "faulty:images"}}),
    "evaluation": ("model.name", {"model": {"name": "faulty:evaluation"}}),
    "construction": ("model.name", {"model": {"name": "faulty:construction"}}),
    "backward": ("model.name", {"model": {"name": "faulty:backward"}}),
    "loss": ("training.loss", {"training": {"loss": "faulty:loss"}}),
    "score": ("score.name", {"score": {"name": "faulty:score", "better": "higher"}}),
    "data": (
        "data.dataset",
        {"data": {"dataset": "faulty:data"}, "model": {"name": "faulty:sound"}},
    ),
    "items": (
        "data.dataset",
        {"data": {"dataset": "faulty:items"}, "model": {"name": "faulty:sound"}},
    ),
    "draws": (
        "training.objective.name",
        {"training": {"objective": {"name": "faulty:Goal", "where": "draws"}}},
    ),
    "losses": (
        "training.objective.name",
        {"training": {"objective": {"name": "faulty:Goal", "where": "losses"}}},
    ),
    "losses of an own model": (
        "training.objective.name",
        {
            "training": {"objective": {"name": "faulty:Goal", "where": "losses"}},
            "model": {"name": "faulty:sound"},
        },
    ),
    "finish": ("training.objective.name", {"training": {"objective": {"name": "faulty:Keeping"}}}),
    "init": (
        "aggregation.name",
        {"cloud": {"aggregation": {"name": "faulty:Rule", "where": "init"}}},
    ),
    "begin": (
        "aggregation.name",
        {"cloud": {"aggregation": {"name": "faulty:Rule", "where": "begin"}}},
    ),
    "columns": (
        "aggregation.name",
        {"institution": {"aggregation": {"name": "faulty:Rule", "where": "columns"}}},
    ),
    "selector": (
        "selection.name",
        {"institution": {"participation": 0.5, "selection": {"name": "faulty:Chosen"}}},
    ),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the code."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join((str(Path(__file__).parents[1]), str(tmp_path)))
    )
    return tmp_path


def with_fault(name: str) -> dict[str, Any]:
    _, keys = FAULTS[name]
    return {
        key: {**found, **keys.get(key, {})} if isinstance(found, dict) else found
        for key, found in SMALL.items()
    } | {key: found for key, found in keys.items() if key not in SMALL}


def line_of(key: str, error: str = "KeyError: 'a bug'") -> re.Pattern[str]:
    fails = rf"fails (in training (on \d+ samples )?)?with {error}"
    return re.compile(
        rf"{re.escape(key)} = 'faulty:\w+': {fails}.*, in fail \(faulty\.py:{LINE}\)\. Correct it"
    )


@pytest.mark.parametrize("name", FAULTS)
def test_without_a_network_the_place_is_named(name: str, home: Path) -> None:
    with pytest.raises(InvalidExperiment, match=line_of(FAULTS[name][0])) as caught:
        run_direct(home / "runs", with_fault(name))
    assert caught.value.exit_code == 4 and "\n" not in str(caught.value)
    assert (
        caught.value.frames[-1]
        == f"faulty.py:{LINE}, in fail: {FAULTY.splitlines()[LINE - 1].strip()}"
    )
    # it holds tensors
    assert caught.value.__context__ is not None and caught.value.__context__.__traceback__ is None
    if name == "items":
        assert "its sample 3" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Short", r"its finish returns vectors of another form \(ValueError: "),
        ("Nothing", "fails with TypeError: "),
        ("Facts", r"`begin` returns what JSON cannot hold \(TypeError: .*float32"),
        ("Text", "`begin` returns str, not a table"),
        ("Numbers", r"`numbers` are what JSON cannot hold \(TypeError: .*set"),
    ],
)
def test_what_own_code_returns_in_another_form_is_one_line_too(
    name: str, problem: str, home: Path
) -> None:
    tree, table = (
        with_fault("training") | {"model": {"name": "mlp_digits"}},
        {"name": f"faulty:{name}"},
    )
    if name in ("Short", "Nothing"):
        tree["training"] = {"epochs": 1, "batch_size": 400, "objective": table}
    else:
        tree["cloud"] = {"aggregation": table}
    with pytest.raises(InvalidExperiment, match=f"name = 'faulty:{name}': {problem}"):
        run_direct(home / "runs", tree)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        *(
            ("images", error)
            for error in ("SystemExit", "KeyboardInterrupt", "GeneratorExit", "MemoryError")
        ),
        *(
            (name, "StopIteration")
            for name in ("training", "images", "score", "columns", "data", "selector")
        ),
        *((name, "SystemExit") for name in ("training", "score", "columns", "data", "selector")),
    ],
)
def test_what_is_no_error_to_python_is_one_here(
    name: str, error: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", error)
    with pytest.raises(InvalidExperiment, match=line_of(FAULTS[name][0], f"{error}: a bug")):
        run_direct(home / "runs", with_fault(name))


def test_an_interruption_in_own_code_stays_one() -> None:
    names = {"model.name": "faulty:training"}
    with interruptible(), pytest.raises(KeyboardInterrupt), own.guarded(names):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), own.guarded(names):
        signal.raise_signal(signal.SIGINT)  # by Python's own handler, which leaves no trace


def test_what_is_not_of_own_code_passes() -> None:
    names = {"model.name": "faulty:training", "training.loss": "cross_entropy"}
    lost = RuntimeError("CUDA error: misaligned address")
    for error in (RunFailed("a reason"), RuntimeError("CUDA out of memory"), lost):
        with pytest.raises(type(error)) as caught, own.guarded(names):
            raise error
        assert caught.value is error
    with pytest.raises(KeyError), own.guarded({"training.loss": "cross_entropy"}):
        raise KeyError("of fedstrata")
    with pytest.raises(TypeError), own.guarded(names):  # in a deeper frame of fedstrata's
        own.is_own(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("first\nsecond"), "ValueError: first"),
        (ValueError(), "ValueError"),
        (ValueError("x" * 1000), bounded(f"ValueError: {'x' * 1000}", 300)),
    ],
)
def test_a_text_of_another_is_one_line_of_bounded_length(error: Exception, text: str) -> None:
    assert described(error) == text


@pytest.mark.parametrize(("name", "where"), [("faulty:Rule", "columns"), ("faulty:Goal", "losses")])
def test_the_check_of_own_code_names_the_place(name: str, where: str, home: Path) -> None:
    with logs.limited("", logging.INFO):
        done = invoke("check", name, "--set", f"where={where}")
    place = rf"in fail \(faulty\.py:{LINE}\)"
    assert done.exit_code == 4 and re.search(
        rf"^runs +wrong +.*{place}", done.stdout, re.MULTILINE
    ), done.stdout
    line, *frames = done.stderr.splitlines()
    assert re.match(rf"fedstrata: .*{place}", line) and frames[-1].startswith(
        f"  faulty.py:{LINE}, in fail: raise"
    )


SWEEP: Final = {
    "title": "A model that fails",
    "seeds": 1,
    "rows": ["epochs"],
    "measure": [{"name": "accuracy", "last": 1}],
    "axes": {"epochs": {"1": {"training": {"epochs": 1}}, "2": {"training": {"epochs": 2}}}},
}


@pytest.mark.parametrize("command", slow(["plan", "sweep"], but=["plan"]))
def test_a_model_that_cannot_be_built_is_one_line_from_a_pool_of_processes(
    command: str, home: Path
) -> None:
    tree = (
        {**SWEEP, "experiment": with_fault("construction")}
        if command == "sweep"
        else with_fault("construction")
    )
    (home / "file.toml").write_text(write(tree))
    with logs.limited("", logging.INFO):
        done = invoke(command, "file.toml", *(["--direct"] if command == "sweep" else []))
    *_, line, _, frame = done.stderr.splitlines()
    assert done.exit_code == 4 and line_of("model.name").match(line.removeprefix("fedstrata: ")), (
        done.stderr
    )
    assert frame.startswith(f"  faulty.py:{LINE}, in fail: ") and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_plan_that_measures_a_model_that_fails_names_the_place(home: Path) -> None:
    (home / "file.toml").write_text(write(with_fault("images")))
    done = fedstrata("plan", "file.toml")
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 4 and line_of("model.name").match(line.removeprefix("fedstrata: ")), (
        done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_of_a_sweep_that_fails_has_its_place(home: Path) -> None:
    (home / "file.toml").write_text(write({**SWEEP, "experiment": with_fault("images")}))
    done = fedstrata("sweep", "file.toml", "--direct")
    lines = [line for line in done.stderr.splitlines() if " failed: " in line]
    assert done.returncode == 1 and len(lines) == 2, done.stderr
    assert (
        all(line_of("model.name").search(line) for line in lines) and "Traceback" not in done.stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("images", "institution-0 gave up: device-[01]( and device-[01])? gave up: "),
        ("score", ""),
        ("columns", "institution-0 gave up: "),
    ],
)
def test_a_lab_ends_with_the_place_and_the_node_in_the_last_line_of_its_cloud(
    name: str, node: str, home: Path
) -> None:
    (home / "lab.toml").write_text(to_toml(parse(with_fault(name))))
    done = fedstrata("--log-level", "info", "run", "lab.toml")
    lines = [line for line in done.stderr.splitlines() if line.startswith(("fedstrata: ", "  "))]
    line, *frames = lines
    assert done.returncode == 4, done.stderr
    assert re.match(rf"fedstrata: {node}{line_of(FAULTS[name][0]).pattern}", line), done.stderr
    assert (
        frames[-1].startswith(f"  faulty.py:{LINE}, in fail: ") and "Traceback" not in done.stderr
    )


def test_a_refiner_names_the_place(home: Path) -> None:
    rule = {"name": "feddf", "steps": 1}
    lab = parse(
        {**with_fault("training"), "data": {"node_samples": 20}, "cloud": {"aggregation": rule}}
    )
    refiner = NodeRefiner(lab, "cloud", partition=split_of(lab).digest)
    layout = refiner.layout
    assert layout is not None
    mean, received, upload = np.zeros((3, layout.row_bytes), np.uint8)
    with pytest.raises(InvalidExperiment, match=line_of("model.name")):
        refiner.refine(RoundModels(0, layout, mean, received, [upload], np.ones(1)))
