"""Models of one's own, named in the experiment: built from the seed, and every way in which they
may be wrong.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.learning import models
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.nets import Dropout

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

def with_nan(*, shape, classes):
    module = build(shape=shape, classes=classes)
    nn.init.constant_(module[2].bias, float("nan"))
    return module

def in_double(*, shape, classes):
    return build(shape=shape, classes=classes).double()

net = 3
"""


@pytest.fixture(autouse=True)
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mynets").mkdir()
    (tmp_path / "mynets" / "small.py").write_text(NETS)
    (tmp_path / "mynets" / "broken.py").write_text("1 / 0\n")
    (tmp_path / "mynets" / "needs.py").write_text("import nopackage.part\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_it_is_built_from_the_seed_alone_and_leaves_the_global_generator() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (
        models.build("mynets.small:build", seed, inputs=GREY) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(first, nn.Sequential) and isinstance(first[1], Dropout) and first.training
    weights = [module.state_dict()["2.weight"] for module in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_text_models_know_the_number_of_tokens() -> None:
    module = models.build("mynets.small:words", 1, inputs=TEXT)
    assert module(torch.full((4, 5), 6)).shape == (4, 3)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "mynets.absent:build",
            "cannot be imported.*ModuleNotFoundError.*Start each command in its folder",
        ),
        (
            "mynets.needs:build",
            "cannot be imported.*ModuleNotFoundError.*Install nopackage wherever it runs",
        ),
        ("mynets.broken:build", "cannot be imported.*ZeroDivisionError.* Correct it"),
        ("mynets.small:absent", "cannot be imported.*AttributeError.*It has: torch, nn, build"),
        ("mynets.small:buidl", r"cannot be imported.*AttributeError.*Did you mean 'build'\?"),
        ("mynets.small:net", "is neither a class nor a function but int"),
        ("mynets.small:positional", "needs depth, which is none of shape, classes"),
        ("mynets.small:words", "needs tokens, which is none of shape, classes"),
        ("os:system", "is in Python's standard library"),
        ("mynets.small:fails", "fails with RuntimeError: no luck"),
        ("mynets.small:returns_a_class", "returns type, not nn.Module"),
        ("mynets.small:for_other_shapes", r"fails with RuntimeError.*on images of \[1, 8, 8\]"),
        (
            "mynets.small:keeps_the_batch",
            r"returns \[2, 64\] for two samples, not logits of \[2, 10\]",
        ),
        (
            "mynets.small:with_nan",
            r"makes 2\.bias with nan or infinity, in with_nan \(.*small\.py:\d+\)",
        ),
        ("mynets.small:in_double", "fails with RuntimeError"),
    ],
)
def test_what_is_wrong_is_said(name: str, problem: str) -> None:
    with pytest.raises(
        InvalidExperiment, match=rf"(?s)^model\.name = '{name}': .*{problem}"
    ) as caught:
        models.build(name, 1, inputs=GREY)
    assert caught.value.exit_code == 4


RANDOM = """
import torch
from torch import nn
from torch.nn import functional

class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.middle = middle
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        return self.last(self.middle(self.norm(x)).flatten(1))

class Noise(nn.Module):
    def forward(self, x):
        return functional.dropout(x, 0.5, self.training)

class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.5)

    def forward(self, x):
        return self.lstm(x.squeeze(1))[0]

def whole(*, shape, classes): return Net(nn.Dropout2d(0.25))
def plain(*, shape, classes): return Net(nn.Identity())
def alpha(*, shape, classes): return Net(nn.AlphaDropout())
def rrelu(*, shape, classes): return Net(nn.Sequential(nn.ReLU(), nn.RReLU()))
def inline(*, shape, classes): return Net(Noise())
def rows(*, shape, classes): return Net(Rows())
"""


@pytest.fixture
def random_nets(tmp_path: Path) -> None:
    (tmp_path / "mynets" / "random.py").write_text(RANDOM)


@pytest.mark.usefixtures("random_nets")
def test_the_trial_in_training_mode_leaves_no_trace() -> None:
    module = models.build("mynets.random:plain", 1, inputs=GREY)
    assert module.training and not module._forward_hooks and not module._forward_pre_hooks
    state = module.state_dict()
    assert state["norm.num_batches_tracked"] == 0 and state["norm.running_var"] == 1


@pytest.mark.usefixtures("random_nets")
def test_dropout_of_whole_channels_is_ours() -> None:
    drop = models.build("mynets.random:whole", 1, inputs=GREY).get_submodule("middle")
    assert isinstance(drop, Dropout) and drop.whole and drop.p == 0.25
    drop.source = torch.Generator().manual_seed(1)
    out = drop(torch.ones(50, 40, 3, 2))
    channels = out.flatten(2)
    assert torch.equal(channels.amin(2), channels.amax(2))
    kept = channels[..., 0]
    assert kept.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert 0.7 < float((kept > 0).float().mean()) < 0.8
    assert torch.equal(drop.eval()(torch.ones(2, 3)), torch.ones(2, 3))
