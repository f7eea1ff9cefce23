"""What own code returns in place of what it should: one line, with the key, the method, the file
and the line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from torch import Tensor

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.methods.column_rule import ColumnRule, Columns, RoundFacts
from fedstrata.common.methods.own_rule import GuardedRule, OwnRule
from fedstrata.common.methods.selection import GuardedSelector, OwnSelection, Selector, Situation
from fedstrata.common.model.delta_codecs import DeltaCodec
from fedstrata.common.training.array_trainer import ArrayTrainer, TrainerCode
from fedstrata.device.training.objectives.objective import Minibatch, Objective
from tests.helpers.direct import run_direct
from tests.helpers.plain import trainer_of

HERE: Final = "tests.test_own_results"
UPLOADS: Final = 3
FACTS: Final[Any] = RoundFacts(
    children=("a", "b", "c"),
    samples_K=np.ones(UPLOADS, np.int64),
    losses_K=np.ones(UPLOADS),
    steps_K=np.ones(UPLOADS),
    weights_K=np.full(UPLOADS, 1 / UPLOADS),
    products=None,
    all_children=UPLOADS,
    training=parse({}).training,
    learning_rate=0.1,
    local_rounds=1,
    start_losses_K=np.ones(UPLOADS),
)
BLOCK: Final = Columns(
    np.ones((UPLOADS, 5), np.float32),
    np.ones(5, np.float32),
    np.ones(5, np.float32),
    np.ones(3),
    {},
)


class Loss(Objective):
    """An objective whose `losses` return what `make` makes of the loss of each sample, or
    `backward` of the loss.
    """

    def __init__(self, *, made: str) -> None:
        self._made = made

    def losses(self, batch: Minibatch, logits: Tensor) -> Any:
        """Return it."""
        each = self.sample_loss(logits, batch.labels)
        ways: dict[str, Callable[[], Any]] = {
            "none": lambda: None,
            "float": lambda: 0.5,
            "numpy": lambda: each.detach().numpy().mean(),
            "each": lambda: each,
            "detached": lambda: each.mean().detach(),
        }
        return ways[self._made]() if self._made in ways else each.mean()

    def backward(self, batch: Minibatch) -> Any:
        """Return it."""
        found = super().backward(batch)
        return {"backward none": None, "backward float": float(found)}.get(self._made, found)


class Rule(ColumnRule):
    """A rule, one method of which returns a value."""

    vectors = ("m",)
    value: Any = None

    def begin(self, facts: RoundFacts) -> Any:
        """Return it."""
        return self.value

    def first(self, vector: str) -> Any:
        """Return it."""
        return self.value

    def weights(self, facts: RoundFacts) -> Any:
        """Return it."""
        return self.value

    def columns(self, block: Columns) -> Any:
        """Return it."""
        return self.value


class Listless(ColumnRule):
    """Its vectors are the letters of a text."""

    vectors = "momentum"


class Chooser(Selector):
    """A selector that returns a value."""

    value: Any = None

    def select(self, now: Situation) -> Any:
        """Return it."""
        return self.value


class Arrays(ArrayTrainer):
    """A trainer without arrays."""

    def initial(self, seed: int) -> Any:
        """Return none."""
        return


class Bytes(DeltaCodec):
    """A codec that cannot decode what it encodes."""

    def __init__(self, *, made: str) -> None:
        self._made = made

    def nbytes(self, columns: int) -> int:
        """Return those of float32."""
        return 4 * columns

    def encode(self, delta_D: Any, chance: Any) -> bytes:
        """Return them."""
        found: bytes = delta_D.tobytes()
        return found

    def decode(self, data: bytes, columns: int) -> Any:
        """Return something else."""
        found = np.frombuffer(data, np.float32)
        ways: dict[str, Callable[[], Any]] = {
            "fails": lambda: {}["x"],
            "shape": lambda: found.reshape(3, -1, 7),
            "none": lambda: None,
            "double": lambda: found.astype(np.float64),
            "short": lambda: found[1:],
        }
        return ways[self._made]()


def place(method: Any) -> str:
    """Return the method, file and line, as an error has them."""
    return (
        f"in {method.__qualname__} (tests/test_own_results.py:{inspect.getsourcelines(method)[1]})"
    )


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(InvalidExperiment) as found:
        make()
    assert "\n" not in str(found.value) and found.value.exit_code == 4
    return str(found.value)


@pytest.mark.parametrize(
    ("made", "method", "problem"),
    [
        ("none", "losses", "losses returns NoneType, not a tensor"),
        ("float", "losses", "losses returns float, not a tensor"),
        ("numpy", "losses", "losses returns float32, not a tensor"),
        ("each", "losses", "losses returns a tensor of ["),
        ("detached", "losses", "losses returns a loss that does not depend on the model"),
        ("backward none", "backward", "backward returns NoneType, not a tensor"),
        ("backward float", "backward", "backward returns float, not a tensor"),
    ],
)
def test_a_loss_that_is_none_is_refused_before_the_training(
    made: str, method: str, problem: str
) -> None:
    objective = {"name": f"{HERE}:Loss", "made": made}
    experiment = parse(
        {"training": {"objective": objective, "batch_size": 10}, "model": {"name": "mlp_digits"}}
    )
    line = refused(lambda: trainer_of(experiment, "device-0"))
    assert line.startswith(f"training.objective.name = '{HERE}:Loss': {problem}")
    assert f", {place(getattr(Loss, method))}. " in line


def test_a_loss_that_is_one_trains() -> None:
    objective = {"name": f"{HERE}:Loss", "made": "mean"}
    trainer_of(
        parse({"training": {"objective": objective}, "model": {"name": "mlp_digits"}}), "device-0"
    )


@pytest.mark.parametrize(
    ("method", "call", "values"),
    [
        ("first", lambda rule: rule.first("m"), [None, "x", float("nan"), [1.0]]),
        ("begin", lambda rule: rule.begin(FACTS), [5, "x", {"x": np.ones(1)}]),
        (
            "weights",
            lambda rule: rule.weights(FACTS),
            [None, "x", [1.0], [0.5, 0.5, np.nan], [1, 2, 3], [0, 0, 0]],
        ),
        (
            "columns",
            lambda rule: rule.columns(BLOCK),
            [None, "x", 1.0, [1.0] * 4, [np.nan] * 5, [[1.0] * 5] * 3],
        ),
    ],
)
def test_what_a_rule_returns_is_checked(
    method: str, call: Callable[[Any], object], values: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in values:
        monkeypatch.setattr(Rule, "value", value)
        line = refused(lambda: call(GuardedRule(OwnRule(name=f"{HERE}:Rule"))))
        assert line.startswith(f"aggregation.name = '{HERE}:Rule': ") and method in line
        assert f", {place(getattr(Rule, method))}. " in line


def test_what_a_rule_may_return(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = GuardedRule(OwnRule(name=f"{HERE}:Rule"))
    assert rule.begin(FACTS) == {}
    monkeypatch.setattr(Rule, "value", np.float32(0.5))
    assert rule.first("m") == 0.5
    monkeypatch.setattr(Rule, "value", [0.25, 0.25, 0.5])
    assert rule.weights(FACTS).tolist() == [0.25, 0.25, 0.5]
    monkeypatch.setattr(Rule, "value", (np.ones(7, np.float32) / 7)[:3] * 7 / 3)
    assert rule.weights(FACTS).dtype == np.float64


def test_vectors_that_are_a_text_are_refused() -> None:
    line = refused(lambda: GuardedRule(OwnRule(name=f"{HERE}:Listless")))
    assert line.endswith("its `vectors` are 'momentum'. List their names, each a text.")


@pytest.mark.parametrize(
    "value", [None, 3, "a", ["a", "a"], ["a"], ["a", "x"], [["a"], ["b"]], [0, 1], ["a", "b", "c"]]
)
def test_what_a_selector_returns_is_checked(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chooser, "value", value)
    now = Situation(["a", "b", "c"], 2, {}, {}, 1, "cloud", 0)
    line = refused(lambda: GuardedSelector(OwnSelection(name=f"{HERE}:Chooser")).select(now))
    assert line.startswith(f"selection.name = '{HERE}:Chooser': selects ")
    assert line.endswith(
        f" of 3 children, {place(Chooser.select)}. Return 2 different ones of `now.children`."
    )


def test_what_a_selector_may_return(monkeypatch: pytest.MonkeyPatch) -> None:
    now = Situation(["a", "b", "c"], 2, {}, {}, 1, "cloud", 0)
    for value in (["a", "c"], ("a", "c"), {"a", "c"}, np.array(["a", "c"]), {"a": 1, "c": 2}):
        monkeypatch.setattr(Chooser, "value", value)
        assert sorted(GuardedSelector(OwnSelection(name=f"{HERE}:Chooser")).select(now)) == [
            "a",
            "c",
        ]


def test_first_arrays_that_are_none_are_refused() -> None:
    code = TrainerCode(parse({"training": {"trainer": {"name": f"{HERE}:Arrays"}}}))
    line = refused(lambda: code.first(1))
    problem = (
        f"initial returns arrays as None, {place(Arrays.initial)}. Return a dict of arrays by name."
    )
    assert line == f"training.trainer.name = '{HERE}:Arrays': {problem}"


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ("fails", "fails with KeyError: 'x'"),
        ("shape", "fails with ValueError: cannot reshape"),
        ("none", "decode returns NoneType, not float32 [3000]"),
        ("double", "decode returns float64 [3000], not float32 [3000]"),
        ("short", "decode returns float32 [2999], not float32 [3000]"),
    ],
)
def test_a_codec_that_cannot_decode_is_refused_where_it_encodes(made: str, problem: str) -> None:
    up = {"name": f"{HERE}:Bytes", "made": made}
    codec = parse({"transfer": {"wan": {"up": up}}}).tiers[0].transfer.up.build()
    line = refused(lambda: codec.encode(np.ones(3000, np.float32), np.random.default_rng(1)))
    assert line.startswith(f"up.name = '{HERE}:Bytes': {problem}")
    assert ", in Bytes.decode" in line and "(tests/test_own_results.py:" in line
    # `decode` may refuse it
    assert len(codec.encode(np.full(3, np.nan, np.float32), np.random.default_rng(1))) == 12


def test_a_codec_that_cannot_decode_ends_the_run_as_own_code(tmp_path: Any) -> None:
    """Not as models of the devices that were refused."""
    tree = {
        "model": {"name": "mlp_digits"},
        "transfer": {"wan": {"up": {"name": f"{HERE}:Bytes", "made": "fails"}}},
    }
    line = refused(lambda: run_direct(tmp_path, tree))
    assert "up.name" in line and "fails with KeyError: 'x', in Bytes.decode" in line
