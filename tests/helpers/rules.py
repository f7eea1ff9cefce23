"""The rules of aggregation at a node, and the least that the table of each needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fedstrata.common.methods import aggregator
from fedstrata.common.methods.mixing import MixedColumns
from fedstrata.common.methods.multi_model import MixingRound, MixingRule, MultiModelRule
from fedstrata.common.methods.rule import Aggregated, Rule, RuleContext, Uploads
from fedstrata.common.methods.settings import RULES
from fedstrata.common.model.layout import ModelLayout, Section
from fedstrata.common.model.refinement import RoundModels

_NEEDED: Final[Mapping[str, Mapping[str, Any]]] = {
    **{name: {"learning_rate": 0.1} for name in ("fedadagrad", "fedadam", "fedyogi")},
    "krum": {"wrong": 0},  # for any number of children, as the next three
    "bulyan": {"wrong": 0},
    "trimmed_mean": {"trim": 0.0},
    "fedbuff": {"buffer": 1},
    "feddf": {"steps": 0},  # without samples at the node, as the next two
    "fedbe": {"epochs": 0},
    "fedlaw": {"epochs": 0},
    "fedgen": {"steps": 0},  # without a refiner, as the next one
    "fltrust": {"epochs": 0},
}
# Of rules whose children must be devices with an objective, or with their losses: they stand in the
# last tier.
WITH_OBJECTIVE: Final[Mapping[str, str]] = {
    name: rule.objective or "cross_entropy"
    for name, rule in RULES.items()
    if rule.objective or rule.reads_losses
}
LEAST: Final[Mapping[str, dict[str, Any]]] = {
    name: {"name": name, **_NEEDED.get(name, {})} for name in RULES
}


def least_lab(name: str) -> dict[str, Any]:
    """Return the least experiment with this rule below the cloud, which then has devices if the
    rule needs them.
    """
    tree: dict[str, Any] = {
        "cloud": {"aggregation": LEAST[name]},
        "topology": {"institutions": 3, "devices": 3},
    }
    if name in WITH_OBJECTIVE:
        tree |= {"topology": {"institutions": 0, "devices": 3}}
        tree |= {"training": {"objective": {"name": WITH_OBJECTIVE[name]}}}
    return tree


# Columns of two blocks, a buffer and a counter.
LAYOUT: Final = ModelLayout.build(
    [
        ("weight", (40, 1000), Section.PARAMETER),
        ("mean", (3,), Section.BUFFER),
        ("steps", (), Section.COUNTER),
    ]
)


@dataclass(frozen=True)
class Report:
    """A child's training statistics."""

    samples: int
    loss: float | None
    path_steps: int = 1
    start_loss: float | None = None


def rule_of(
    tree: Mapping[str, Any], *, layout: ModelLayout = LAYOUT, start: float = 0.0, **context: Any
) -> Rule:
    """Return the cloud's rule, which begins with a model whose floats are all `start`, counters
    zero.
    """
    given: dict[str, Any] = {"node": "cloud", "seed": 1, "measures": True}
    given["rows"] = lambda name, count: np.zeros((count, layout.row_bytes), np.uint8)
    given |= context
    passed = ("bound", "privacy", "secret", "hides_uploads", "adversaries")
    others = {key: given.pop(key) for key in passed if key in given}
    if "training" in given:
        given.setdefault("learning_rate", lambda local_round: given["training"].learning_rate)
    rule = aggregator.build(RULES[tree["name"]](**tree), RuleContext(layout, **given), **others)
    first = np.zeros(layout.row_bytes, np.uint8)
    layout.floats(first)[:] = start
    rule.begin(first)
    return rule


def aggregate(
    rule: Rule,
    r: int,
    children: Iterable[str],
    rows_K: npt.NDArray[np.uint8],
    reports: Iterable[Report | None],
) -> Aggregated:
    """Aggregate uploads by a rule."""
    return rule.aggregate(r, Uploads(tuple(children), rows_K, tuple(reports), lambda: None))


def mixing_round(
    rows_K: npt.NDArray[np.uint8],
    layout: ModelLayout,
    *,
    r: int = 0,
    seed: int = 1,
    node: str = "cloud",
) -> MixingRound:
    """Return round r of K models with these uploads."""
    context = RuleContext(
        layout, node, seed, measures=False, rows=lambda name, count: np.zeros_like(rows_K)
    )
    return MixingRound(
        r,
        Uploads(tuple(map(str, range(len(rows_K)))), rows_K, (None,) * len(rows_K), lambda: None),
        context,
    )


def planned(
    settings: MixingRule, now: MixingRound
) -> tuple[list[MixedColumns], Mapping[str, object]]:
    """Return how the kernel mixes a round's uploads, and the facts of the plan."""
    parts, facts = MultiModelRule(settings, now.context)._planned(now)
    return [part.columns for part in parts], facts


class AddingRefiner:
    """Refiner that adds one to the parameters of the mean, and returns given facts."""

    moves = 0

    def __init__(self, **facts: Any) -> None:
        self.facts = facts
        self.asked: list[RoundModels] = []

    def refine(self, models: RoundModels) -> Mapping[str, Any]:
        """Add one."""
        self.asked.append(models)
        models.layout.floats(models.mean)[: models.layout.parameters] += 1
        return self.facts

    def cancel(self) -> None:
        """Raise: nothing cancels it."""
        raise AssertionError

    def allow(self) -> None:
        """Raise: nothing allows it."""
        raise AssertionError
