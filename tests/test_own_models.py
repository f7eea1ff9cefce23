"""Models of one's own, named in the experiment: built from the seed, and every way in which they may be wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from common.data import Model, permit
from common.errors import InvalidExperiment
from common.learning import models
from common.learning.inputs import Inputs
from common.learning.nets.layers import Dropout
from common.spec import parse

GREY = Inputs((1, 8, 8), 10)
TEXT = Inputs((5,), 3, tokens=7)

NETS = """
import torch
from torch import nn

def build(*, shape, classes):
    c, h, w = shape
    return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(c * h * w, classes))

def words(*, shape, classes, tokens):
    return nn.Sequential(nn.Embedding(tokens, 4), nn.Flatten(), nn.Linear(4 * shape[0], classes))

def fails(*, shape, classes):
    raise RuntimeError("no luck")

def positional(shape, classes, depth):
    return build(shape=shape, classes=classes)

def returns_a_class(*, shape, classes):
    return nn.Linear

def for_other_shapes(*, shape, classes):
    return nn.Linear(3, classes)

def keeps_the_batch(*, shape, classes):
    return nn.Flatten()

def in_double(*, shape, classes):
    return build(shape=shape, classes=classes).double()

net = 3
"""


@pytest.fixture(autouse=True)
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mynets").mkdir()
    (tmp_path / "mynets" / "small.py").write_text(NETS)
    (tmp_path / "mynets" / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "mynets"]:
        monkeypatch.delitem(sys.modules, name)


def test_it_is_built_from_the_seed_alone_and_leaves_the_global_generator() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (models.build("mynets.small:build", seed, inputs=GREY) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(first, nn.Sequential) and isinstance(first[1], Dropout) and first.training
    weights = [module.state_dict()["2.weight"] for module in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_text_models_are_told_the_number_of_tokens() -> None:
    module = models.build("mynets.small:words", 1, inputs=TEXT)
    assert module(torch.full((4, 5), 6)).shape == (4, 3)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("mynets.absent:build", "cannot be imported.*ModuleNotFoundError"),
        ("mynets.broken:build", "cannot be imported.*ZeroDivisionError"),
        ("mynets.small:absent", "cannot be imported.*AttributeError"),
        ("mynets.small:net", "is no function but int"),
        ("mynets.small:positional", "does not take the keywords shape, classes"),
        ("mynets.small:words", "does not take the keywords shape, classes.*tokens"),
        ("os:system", "is in Python's own library"),
        ("mynets.small:fails", "fails with RuntimeError: no luck"),
        ("mynets.small:returns_a_class", "returns type, not nn.Module"),
        ("mynets.small:for_other_shapes", r"fails with RuntimeError.*on images of \[1, 8, 8\]"),
        ("mynets.small:keeps_the_batch", r"gives \[2, 64\] for two samples, not logits of \[2, 10\]"),
        ("mynets.small:in_double", "fails with RuntimeError"),
    ],
)
def test_what_is_wrong_is_said(name: str, problem: str) -> None:
    with pytest.raises(InvalidExperiment, match=rf"(?s)^model\.name = '{name}': .*{problem}") as caught:
        models.build(name, 1, inputs=GREY)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("allowed", "may"),
    [
        ([], False),
        (["mynets"], True),
        (["mynets.small"], True),
        (["other", "mynets.small:build"], True),
        (["mynet"], False),
        (["mynets.sma"], False),
        (["mynets.small:buil"], False),
        ([""], False),
    ],
)
def test_a_device_builds_only_what_its_host_allows(allowed: list[str], may: bool) -> None:
    permit(Model(), [])  # one of ours
    if may:
        permit(Model(name="mynets.small:build"), allowed)
        return
    with pytest.raises(InvalidExperiment, match="--allow-models mynets,") as told:
        permit(Model(name="mynets.small:build"), allowed)
    assert told.value.exit_code == 4


@pytest.mark.parametrize("name", ["a:", ":b", "a:b:c", "a b:c", "a.b:c()", "../a:b"])
def test_the_form_of_the_name_is_checked_with_the_experiment(name: str) -> None:
    with pytest.raises(InvalidExperiment, match="not of the form"):
        parse({"model": {"name": name}})
    assert parse({"model": {"name": "mynets.small:build"}}).model.name == "mynets.small:build"


def test_a_mistyped_model_has_a_proposal() -> None:
    with pytest.raises(InvalidExperiment, match=r"no such model.*Did you mean 'lenet5'"):
        parse({"model": {"name": "lenet"}})
