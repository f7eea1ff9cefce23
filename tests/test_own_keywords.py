"""The constructor of own code: each keyword of an experiment is taken by somebody, or refused with
its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final

import pytest
from pydantic import BaseModel

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.methods.column_rule import ColumnRule, Columns
from fedstrata.common.methods.own_rule import GuardedRule, OwnRule
from fedstrata.common.methods.selection import GuardedSelector, OwnSelection, Selector, Situation
from fedstrata.common.model.delta_codecs import DeltaCodec
from fedstrata.common.settings import own
from fedstrata.common.training.array_trainer import ArrayTrainer, TrainerCode
from fedstrata.deploy.local.beforehand import check_code
from fedstrata.device.training.batches import OwnSamples
from fedstrata.device.training.objectives.objective import Objective
from fedstrata.device.training.objectives.objectives_by_name import objective_of

HERE: Final = "tests.test_own_keywords"


class Attribute(ColumnRule):
    """The keyword is an attribute, and there is no constructor."""

    beta = 0.9


class Named(ColumnRule):
    """One keyword with its name."""

    def __init__(self, beta: float = 0.9) -> None:
        self.beta = beta


class Inheriting(Named):
    """Another's constructor."""


class Passing(Named):
    """A constructor that passes on what it does not know."""

    def __init__(self, more: int = 1, **rest: Any) -> None:
        super().__init__(**rest)
        self.more = more


class Collecting(ColumnRule):
    """A constructor that takes any keyword."""

    beta = 0.9

    def __init__(self, **rest: Any) -> None:
        pass


class ByPlace(ColumnRule):
    """A parameter that no keyword names, and a `**` that would take its name."""

    def __init__(self, beta: float = 0.9, /, **rest: Any) -> None:
        self.beta = beta


class ByNew(ColumnRule):
    """A constructor of the other kind."""

    beta: float

    def __new__(cls, beta: float = 0.9) -> ByNew:
        made = super().__new__(cls)
        made.beta = beta
        return made


@dataclass
class Data(ColumnRule):
    """A data class."""

    beta: float = 0.9


@dataclass(frozen=True)
class Frozen(ColumnRule):
    """A data class that cannot be changed, and so has no numbers."""

    beta: float = 0.9


class Pydantic(BaseModel, ColumnRule):
    """A model of pydantic, which ignores keywords that it does not know."""

    beta: float = 0.9


class Open(BaseModel, ColumnRule, extra="allow"):
    """A model of pydantic that takes any keyword."""

    beta: float = 0.9


class Needy(ColumnRule):
    """A keyword without a default."""

    def __init__(self, beta: float) -> None:
        self.beta = beta


class OfTable(ColumnRule):
    """A keyword with the name of a key of the table, which never reaches it."""

    def __init__(self, weights: str = "data") -> None:
        self.weighting = weights


class Elsewhere(ColumnRule):
    """A constructor that returns something else."""

    def __new__(cls) -> Any:
        return None


class Counting(ColumnRule):
    """Numbers of the class, which all of its objects would share."""

    numbers = {"seen": 0}  # noqa: RUF012

    def begin(self, facts: object) -> None:
        """Count the rounds."""
        self.numbers["seen"] += 1

    def columns(self, block: Columns) -> Any:
        """Return the mean."""
        return block.mean_C


class AnySelector(Selector):
    """A selector without a constructor."""

    def select(self, now: Situation) -> list[str]:
        """Select the first ones."""
        return list(now.children[: now.count])


class AnyObjective(Objective):
    """An objective without a constructor."""


class AnyCodec(DeltaCodec):
    """A codec without a constructor."""


class AnyTrainer(ArrayTrainer):
    """A trainer without a constructor."""


class AnyAugmentation:
    """An augmentation without a constructor."""


def augmented(most: float = 1.0) -> Any:
    """Return an augmentation."""
    return lambda sample: sample * most


def wrapped(function: Any) -> Any:
    """Return a decorated function."""

    @wraps(function)
    def inner(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    return inner


decorated = wrapped(augmented)


def net(*, shape: list[int], depth: int) -> None:
    """Need what a model does not get."""


def placed(shape: list[int], /) -> None:
    """Need it by its place."""


def everything(**given: Any) -> Mapping[str, Any]:
    """Return what it gets."""
    return given


def rule(name: str, **keywords: Any) -> Any:
    """Return the object of a rule of this file."""
    return GuardedRule(OwnRule(name=f"{HERE}:{name}", **keywords))._rule


@pytest.mark.parametrize(
    "name", ["Named", "Inheriting", "Passing", "ByNew", "Data", "Pydantic", "Open", "Needy"]
)
def test_a_keyword_that_somebody_takes_arrives(name: str) -> None:
    guarded = GuardedRule(OwnRule(name=f"{HERE}:{name}", beta=0.1))
    facts: Any = None
    assert guarded._rule.beta == 0.1  # type: ignore[attr-defined]
    assert guarded.begin(facts) == {} and guarded.numbers == {}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "Attribute",
            "takes no keywords; an attribute is none. Write an __init__ that takes beta.",
        ),
        ("Collecting", r"collects any keyword in **rest, used or not. Name beta in its signature."),
        ("ByPlace", "takes beta by its place alone. Omit the / of its signature."),
    ],
)
def test_a_keyword_that_nobody_takes_is_refused(name: str, problem: str) -> None:
    with pytest.raises(InvalidExperiment) as refused:
        rule(name, beta=0.1)
    assert str(refused.value) == f"aggregation.beta = 0.1: {HERE}:{name} {problem}"


@pytest.mark.parametrize("name", ["Named", "Inheriting", "ByNew", "Data", "Needy"])
def test_a_mistyped_keyword_is_refused_with_those_that_are_taken(name: str) -> None:
    with pytest.raises(InvalidExperiment) as refused:
        rule(name, bta=0.1)
    problem = (
        f"aggregation.bta = 0.1: {HERE}:{name} takes beta, and not this keyword. Correct "
        "its name, or omit it."
    )
    assert str(refused.value) == problem


@pytest.mark.parametrize(
    ("name", "keywords", "problem"),
    [
        (
            "Passing",
            {"bta": 1},
            r"aggregation.name .* fails with TypeError: .*'bta', in Passing.__init__ \(tests",
        ),
        (
            "Pydantic",
            {"bta": 1},
            r"aggregation.bta = 1: .* takes averages, beta, .*, and not this keyword",
        ),
        ("Open", {"bta": 1}, r"aggregation.bta = 1: .* collects any keyword in \*\*"),
        (
            "Needy",
            {},
            r"needs beta, which has no default. Set aggregation.beta, or give it a default",
        ),
        (
            "OfTable",
            {},
            r"takes weights, which is a key of the table itself, so that the class does not get it",
        ),
        ("Elsewhere", {}, "makes NoneType, not ColumnRule"),
    ],
)
def test_other_signatures_are_refused(name: str, keywords: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidExperiment, match=problem) as refused:
        rule(name, **keywords)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"cloud": {"aggregation": {"name": "Attribute"}}}, "cloud.aggregation"),
        ({"institution": {"selection": {"name": "AnySelector"}}}, "institution.selection"),
        ({"training": {"objective": {"name": "AnyObjective"}}}, "training.objective"),
        ({"training": {"augmentation": {"name": "AnyAugmentation"}}}, "training.augmentation"),
        ({"training": {"augmentation": {"name": "augmented"}}}, "training.augmentation"),
        ({"training": {"augmentation": {"name": "decorated"}}}, "training.augmentation"),
        ({"training": {"trainer": {"name": "AnyTrainer"}}}, "training.trainer"),
        ({"transfer": {"wan": {"up": {"name": "AnyCodec"}}}}, "transfer.wan.up"),
    ],
)
def test_a_keyword_of_nobody_ends_a_run_before_it_begins(tree: dict[str, Any], key: str) -> None:
    """Of each kind of own code that has keywords."""
    table = tree
    for part in key.split("."):
        table = table[part]
    table["name"] = f"{HERE}:{table['name']}"
    check_code(parse(tree))
    table["beta"] = 0.1
    with pytest.raises(InvalidExperiment, match=rf"^{key}\.beta = 0\.1: {table['name']} takes "):
        check_code(parse(tree))


def _selector() -> object:
    return GuardedSelector(OwnSelection(name=f"{HERE}:AnySelector", beta=0.1))


def _trained(key: str, name: str) -> Any:
    return parse({"training": {key: {"name": f"{HERE}:{name}", "beta": 0.1}}})


def _codec() -> object:
    tree = {"transfer": {"wan": {"up": {"name": f"{HERE}:AnyCodec", "beta": 0.1}}}}
    return parse(tree).tiers[0].transfer.up.build()


@pytest.mark.parametrize(
    "make",
    [
        _selector,
        _codec,
        lambda: objective_of(_trained("objective", "AnyObjective").training),
        lambda: OwnSamples(_trained("augmentation", "AnyAugmentation").training.own_augmentation),
        lambda: TrainerCode(_trained("trainer", "AnyTrainer")),
    ],
)
def test_a_node_refuses_it_too(make: Callable[[], object]) -> None:
    """A device's file may be another one than the cloud's."""
    with pytest.raises(InvalidExperiment, match=r"\.beta = 0\.1: .* takes no keywords"):
        make()


def test_models_and_data_get_what_they_name() -> None:
    offered = {"shape": [1], "classes": 2}
    assert own.call("model.name", f"{HERE}:everything", offered) == offered
    with pytest.raises(
        InvalidExperiment,
        match=r"model\.name = .*: needs depth, which is none of shape, classes\. Give",
    ):
        own.call("model.name", f"{HERE}:net", offered)
    with pytest.raises(
        InvalidExperiment, match=r"model\.name = .*: takes shape by its place alone\. Omit the / of"
    ):
        own.call("model.name", f"{HERE}:placed", offered)


def test_numbers_of_a_class_are_each_nodes_own() -> None:
    one, other = (GuardedRule(OwnRule(name=f"{HERE}:Counting")) for _ in range(2))
    facts: Any = None
    for _ in range(3):
        one.begin(facts)
    assert (one.numbers, other.numbers, Counting.numbers) == ({"seen": 3}, {"seen": 0}, {"seen": 0})


def test_a_frozen_data_class_is_refused_in_a_line() -> None:
    facts: Any = None
    with pytest.raises(InvalidExperiment, match=r"Frozen': fails with FrozenInstanceError"):
        GuardedRule(OwnRule(name=f"{HERE}:Frozen")).begin(facts)
