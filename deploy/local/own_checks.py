"""What own code must do before a lab relies on it: the properties that fedstrata's own rules and objectives have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from common.errors import InvalidExperiment
from common.experiment import own
from common.experiment.reading import parse
from common.experiment.tiers import Tier
from common.experiment.topology import CLOUD
from common.host.examination import Finding
from common.methods import aggregator
from common.methods.column_rule import ColumnRule, Columns, RoundFacts
from common.methods.mixing import COLUMNS, cut
from common.methods.rule import RuleContext, Uploads, link_layouts
from common.methods.selection import ClientSelection, ResultFacts, Selector
from common.methods.single_model import KEY, GuardedRule, OwnRule
from common.methods.statistics import Statistics, gram
from common.model.delta_codecs import DeltaCodec
from common.model.layout import ModelLayout, Section
from common.model.trainer import ArrayTrainer
from deploy.local import codec_checks, trainer_checks

CHILDREN: Final = 5
ROUNDS: Final = 3
PARAMETERS: Final = 2 * COLUMNS + 11  # three blocks, the last one short


class Report(NamedTuple):
    """A child's statistics."""

    samples: int
    loss: float | None
    path_steps: int = 1
    start_loss: float | None = None


def checks(name: str, keywords: Mapping[str, Any], *, data: Path) -> tuple[str, Iterator[Finding]]:
    """Return what a name of own code is, and its checks, which run one by one. `data`: the samples of a trainer.

    Both raise InvalidExperiment, the latter for own code that fails.
    """
    found = own.load("name", name)
    if isinstance(found, type) and issubclass(found, ColumnRule):
        below = {"aggregation": {**keywords, "name": name}}
        return "rule", _each(_rule(parse({"institution": below}).tiers[-1].aggregation))
    if isinstance(found, type) and issubclass(found, Selector):
        tree = {"cloud": {"selection": {**keywords, "name": name}, "participation": 0.4}}
        return "selector", _each(_selector(parse(tree).tiers[0]))
    if isinstance(found, type) and issubclass(found, ArrayTrainer):
        tree = {"training": {"trainer": {**keywords, "name": name}}, "data": {"root": str(data)}}
        return "trainer", _each(trainer_checks.of(parse(tree)))
    if isinstance(found, type) and issubclass(found, DeltaCodec):
        tree = {"transfer": {"wan": {"up": {**keywords, "name": name}}}}
        return "codec", _each(codec_checks.of(parse(tree).tiers[0].transfer.up))
    if isinstance(found, type):
        from device.training.objectives.objective import Objective

        if issubclass(found, Objective):
            from device.vmapped import objective_checks

            settings = parse({"training": {"objective": {**keywords, "name": name}}}).training
            return "objective", _each(objective_checks.of(settings))
    kinds = "selector (Selector), trainer (ArrayTrainer), codec (DeltaCodec) or objective (Objective)"
    problem = f"is no rule (ColumnRule), {kinds}"
    remedy = "docs/own.md has an example of each. A run names what is wrong with models and data sets."
    raise InvalidExperiment("name", name, problem, remedy)


def _each(steps: Iterator[tuple[str, str]]) -> Iterator[Finding]:
    """Yield a finding for each pair of an item and its problem, "" for none."""
    for item, problem in steps:
        yield Finding(item, True, not problem, problem)


def _rule(settings: Any) -> Iterator[tuple[str, str]]:
    assert isinstance(settings, OwnRule)
    first, again = _Lab(settings), _Lab(settings)
    models = [first.round(r) for r in range(ROUNDS)]
    yield "three rounds", ""
    yield "the same twice", _differs(models, [again.round(r) for r in range(ROUNDS)])
    yield "any cut of the columns", _cuts(settings)
    with TemporaryDirectory() as folder:
        killed, resumed = _Lab(settings), _Lab(settings)
        for r in range(ROUNDS - 1):
            killed.round(r)
        facts = killed.rule.save(Path(folder))
        resumed.rule.begin(killed.rule.model.copy())
        resumed.rule.restore(Path(folder), json.loads(json.dumps(facts)))
        yield "killed and resumed", _differs(models[-1:], [resumed.round(ROUNDS - 1)])
    _Lab(settings).round(0, missing=CHILDREN - 1)
    yield "one upload alone", ""


def _selector(tier: Tier) -> Iterator[tuple[str, str]]:
    first, again, killed, resumed = (ClientSelection(tier, seed=1, node=CLOUD) for _ in range(4))
    chosen = _select(first, range(2 * ROUNDS))
    yield f"{2 * ROUNDS} rounds", ""
    yield "the same twice", "it selects others" if _select(again, range(2 * ROUNDS)) != chosen else ""
    _select(killed, range(ROUNDS))
    resumed.restore(json.loads(json.dumps(killed.save())))
    others = _select(resumed, range(ROUNDS, 2 * ROUNDS)) != chosen[ROUNDS:]
    yield "killed and resumed", "it selects others; what it needs to keep belongs into `numbers`" if others else ""


def _select(one: ClientSelection, rounds: Iterable[int]) -> list[list[str]]:
    """Play rounds of ten children, of which some results are missing; return who was selected."""
    children, found = [f"device-{k}" for k in range(10)], []
    for r in rounds:
        chosen = one.select(children, r, samples={name: 100 * (k + 1) for k, name in enumerate(children)})
        results = {
            name: ResultFacts(100 * (k + 1), 1 / (k + 1 + r), 1.0 + k, 1000)
            for k, name in enumerate(children)
            if name in chosen and (k + r) % 4
        }
        one.observe(r, chosen, results)
        found.append(chosen)
    return found


class _Lab:
    """A node with a rule, and children whose uploads are random, the same for each lab."""

    def __init__(self, settings: OwnRule) -> None:
        self._layout, self._links = _layout(), link_layouts(settings, _layout())
        self.rule = aggregator.build(
            settings, layout=self._layout, node=CLOUD, seed=1, measures=True, rows=_memory, children=CHILDREN
        )
        start = self._layout.empty()
        self._layout.floats(start)[:] = _random(0, (PARAMETERS + 3,))
        self.rule.begin(start)

    def round(self, r: int, *, missing: int = 0) -> npt.NDArray[np.float32]:
        """Play a round, and return its model."""
        children = tuple(f"device-{k}" for k in range(CHILDREN))
        ((sent, _),) = self.rule.dispatch(r, children)
        rows_K = np.zeros((CHILDREN, self._links.up.row_bytes), np.uint8)
        extras_K = self._links.up.extra_columns(rows_K)
        extras_K[:] = _random(r + 100, extras_K.shape)
        floats_K = self._layout.floats(rows_K)
        floats_K[:] = self._layout.floats(sent) + _random(r + 1, (CHILDREN, PARAMETERS + 3))
        reports = (*[None] * missing, *_reports()[missing:])
        self.rule.aggregate(r, Uploads(children, rows_K, reports, lambda: None))
        return self._layout.floats(self.rule.model).copy()


def _reports() -> list[Report]:
    return [Report(100 * (k + 1), 1.0 / (k + 1)) for k in range(CHILDREN)]


def _layout() -> ModelLayout:
    return ModelLayout.build((("w", (PARAMETERS,), Section.PARAMETER), ("mean", (3,), Section.BUFFER)))


def _memory(name: str, count: int) -> npt.NDArray[np.uint8]:
    return np.zeros((count, _layout().row_bytes), np.uint8)


def _random(seed: int, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _differs(wanted: list[npt.NDArray[np.float32]], found: list[npt.NDArray[np.float32]]) -> str:
    apart = max(float(np.abs(one - other).max()) for one, other in zip(wanted, found, strict=True))
    return f"its models differ by up to {apart:.2g}" if apart else ""


def _cuts(settings: OwnRule) -> str:
    """Return why columns computed in other blocks differ, or ""."""
    context = RuleContext(_layout(), CLOUD, 1, measures=True, rows=_memory, children=CHILDREN)
    uploads_KD, model_D = _random(1, (CHILDREN, PARAMETERS)), _random(2, (PARAMETERS,))
    extras = {name: _random(3 + i, (CHILDREN, PARAMETERS)) for i, name in enumerate(settings.returns)}
    children, statistics = [f"device-{k}" for k in range(CHILDREN)], Statistics.of(_reports())
    found = []
    for width in (PARAMETERS, COLUMNS, 1000):
        rule = GuardedRule(settings)
        products = gram(list(uploads_KD), model_D) if rule.compares else None
        facts = RoundFacts.of(context, 0, children, statistics, weights=settings.weights, products=products)
        rule.begin(facts)
        weights_K = rule.weights(facts)
        state = {name: np.full(PARAMETERS, rule.first(name), np.float32) for name in rule.vectors}
        mean_D = (weights_K @ uploads_KD).astype(np.float32)
        whole = Columns(uploads_KD, model_D, mean_D, weights_K, state, extras)
        parts = [rule.columns(_part(whole, columns)) for columns in cut(0, PARAMETERS, width)]
        found.append(np.concatenate(parts).astype(np.float32))
    if all(np.array_equal(found[0], other) for other in found[1:]):
        return ""
    return f"its columns depend on others of the same block. What needs all of them belongs into `begin` ({KEY})"


def _part(whole: Columns, columns: slice) -> Columns:
    state = {name: values[columns] for name, values in whole.state.items()}
    extras = {name: values_K[:, columns] for name, values_K in whole.extras.items()}
    return Columns(
        whole.uploads_KC[:, columns], whole.model_C[columns], whole.mean_C[columns], whole.weights_K, state, extras
    )
