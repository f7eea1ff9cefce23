"""A rule's equations beside the rule, at each node of whole labs without a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from fedstrata.common.methods import aggregator, mixing
from fedstrata.common.methods.rule import (
    Aggregated,
    Rule,
    RuleContext,
    Uploads,
    WrappedRule,
    link_layouts,
)
from fedstrata.common.methods.settings import RULES, RuleSettings
from fedstrata.common.methods.statistics import TrainingReport
from fedstrata.common.model.layout import Row
from fedstrata.deploy.sweeps.grid import merged
from tests.helpers.direct import resumed_run, run_direct

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Round:
    """What a step may read of a node's round: float64, of the K uploads that count, in their order.

    `z_D` was sent in this round, `received_KD` to each child, `ages_K` rounds ago; the node has
    `number` children. `extras`: the vectors behind the uploads. `state` outlives the round.
    """

    r: int
    children: list[str]
    number: int
    z_D: Doubles
    received_KD: Doubles
    uploads_KD: Doubles
    ages_K: Doubles
    reports: list[TrainingReport]
    extras: Mapping[str, Doubles]
    outcome: Aggregated
    state: dict[str, Any]

    @property
    def samples_K(self) -> Doubles:
        return np.array([float(report.samples) for report in self.reports])

    @property
    def steps_KD(self) -> Doubles:
        return self.uploads_KD - self.received_KD

    def shares_K(self, weights: str) -> Doubles:
        """Return the weights of a mean."""
        counts_K = self.samples_K if weights == "data" else np.ones(len(self.children))
        return counts_K / counts_K.sum()


# Returns the next model, [D]
Step = Callable[[Round], Doubles]


class Beside(WrappedRule):
    """A node's rule, whose rounds are compared with those of a step."""

    def __init__(
        self, rule: Rule, settings: RuleSettings, context: RuleContext, twin: Twin
    ) -> None:
        super().__init__(rule)
        self._context, self._twin = context, twin
        self._links = link_layouts(settings, context.layout)
        self._got: dict[str, tuple[int, Doubles]] = {}

    def begin(self, model: Row) -> None:
        super().begin(model)
        self._got = {}

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        rows_K = uploads.rows_K.copy()
        sent = {child: self._exact(row) for child, row in self._received.items()}
        self._got |= {child: (r, row) for child, row in sent.items()}
        done = super().aggregate(r, uploads)
        places = [k for k in uploads.answered if uploads.children[k] not in done.left_out]
        children = [uploads.children[k] for k in places]
        got = [self._got.pop(child) for child in children]
        extras = {
            name: values_K[places].astype(np.float64)
            for name, values_K in self._links.up.extras_of(rows_K).items()
        }
        reports = [report for k in places if (report := uploads.reports[k]) is not None]
        now = Round(
            r,
            children,
            self._context.children,
            next(iter(sent.values())),
            np.array([row for _, row in got]),
            self._exact(rows_K[places]),
            np.array([float(r - since) for since, _ in got]),
            reports,
            extras,
            done,
            {},
        )
        sends = self._links.down.extras_of(next(iter(self._received.values())))
        self._twin.compare(self._context.node, now, self._exact(self.model), sends)
        return done

    def _exact(self, rows: npt.NDArray[np.uint8]) -> Doubles:
        layout = self._context.layout
        return layout.floats(rows)[..., : layout.parameters].astype(np.float64)


class Twin:
    """A step, and its state after each round of each node."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.states: dict[str, dict[int, dict[str, Any]]] = {}

    def compare(
        self, node: str, now: Round, model_D: Doubles, sent: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        """Take the step, and compare; vectors of the state that are sent with the model, too."""
        past = self.states.setdefault(node, {})
        earlier = [r for r in past if r < now.r]
        now = replace(now, state=deepcopy(past[max(earlier)]) if earlier else {})
        where = f"{node}, round {now.r}"
        if node == "cloud" and earlier:
            assert np.array_equal(now.z_D, now.state["model"]), where
        for name, vector in sent.items():
            wanted = now.state.get(name, np.zeros(vector.shape))
            np.testing.assert_allclose(vector, wanted, rtol=0, atol=1e-6, err_msg=where)
        wanted_D = self._step(now)
        np.testing.assert_allclose(model_D, wanted_D, rtol=0, atol=1e-6, err_msg=where)
        if node == "cloud":
            far_K = np.linalg.norm(now.uploads_KD - model_D, axis=1)
            found_K = [now.outcome.distances.get(child, np.nan) for child in now.children]
            np.testing.assert_allclose(found_K, far_K, rtol=1e-4, atol=1e-5, err_msg=where)
        past[now.r] = {**now.state, "model": model_D}


LAB: Final[dict[str, Any]] = {
    "rounds": 3,
    "model": {"name": "mlp_digits"},
    "data": {"partition": "dirichlet", "concentration": 0.5},
    # each device has a last batch of another size: to record its step takes longer than to take it
    "training": {"batch_size": 500, "learning_rate": 0.05, "momentum": 0.0, "recorded": False},
    "cloud": {"checkpoint_every": 2},
}
TIERS: Final[list[dict[str, Any]]] = [
    {"name": "core", "children": "region", "fan_out": 2},
    {"name": "wan", "children": "institution", "fan_out": 2},
    {"name": "lan", "fan_out": 5, "participation": 0.6, "rounds": 2},
]
ONE_TIER: Final = {"topology": {"institutions": 0, "devices": 8}}


def beside(name: str, found: Twin, build: Callable[..., Rule]) -> Callable[..., Rule]:
    """Return `aggregator.build` with the equations beside each rule of a name."""

    def built(settings: RuleSettings, context: RuleContext, **keys: Any) -> Rule:
        rule = build(settings, context, **keys)
        return Beside(rule, settings, context, found) if settings.name == name else rule

    return built


def twin(tree: Mapping[str, Any], step: Step, folder: Path, **tables: Any) -> None:
    """Run a rule with its least lab, killed and resumed, and compare each of its rounds.

    At the cloud of devices, where a bound leaves some out, and in three tiers: in the last one
    alone if it must have devices or three uploads as its children.
    """
    settings = RULES[tree["name"]](**tree)
    below = bool(settings.objective or settings.reads_losses or settings.uploads_least > 2)
    tiers = [
        {**tier, "aggregation": dict(tree)} if number == 2 or not below else dict(tier)
        for number, tier in enumerate(TIERS)
    ]
    one: dict[str, Any] = {"aggregation": dict(tree), "participation": 0.75}
    if not settings.closes_with:
        one["norm_bound"] = {"action": "refuse", "factor": 1.0}
    for number, shape in enumerate((ONE_TIER | {"cloud": one}, {"tiers": tiers})):
        found = Twin(step)
        lab = merged(LAB, shape, tables)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(aggregator, "build", beside(settings.name, found, aggregator.build))
            patch.setattr(mixing.cut, "__defaults__", (1000,))  # a model is several blocks
            resumed_run(run_direct(folder / str(number), lab, until=3))
        nodes = 1 if number == 0 else (4 if below else 7)
        assert len(found.states) == nodes
        assert below or len(found.states["cloud"]) == LAB["rounds"]
