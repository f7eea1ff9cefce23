"""A node's rounds with each rule: what its children get, and what becomes of what they send."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fedstrata.common.experiment.reading import parse
from fedstrata.common.methods import fedcross, fedmr
from fedstrata.common.methods.fedcross import FedCross
from fedstrata.common.methods.fedmr import FedMR
from fedstrata.common.methods.rule import Aggregated, Dispatched, Rule, Uploads
from fedstrata.common.methods.settings import RULES
from fedstrata.common.methods.statistics import Statistics
from fedstrata.common.model.layout import ModelLayout, Row, Section
from fedstrata.common.randomness import Purpose, generator
from tests.helpers.rules import Report, mixing_round, rule_of

Rows = npt.NDArray[np.uint8]
Doubles = npt.NDArray[np.float64]

ENTRIES = [
    ("conv.weight", (3, 2), Section.PARAMETER),
    ("conv.bias", (3,), Section.PARAMETER),
    ("bn.weight", (3,), Section.PARAMETER),
    ("bn.running_mean", (3,), Section.BUFFER),
    ("bn.running_var", (3,), Section.BUFFER),
    ("bn.num_batches_tracked", (), Section.COUNTER),
    ("fc.weight", (2, 3), Section.PARAMETER),
]
LAYOUT = ModelLayout.build(ENTRIES)
CHILDREN = ("a", "b", "c", "d", "e")
DRAWS = ["abcde", "aceb", "bcdf", "abcdef", "fa", "cdef", "abdf", "bcef", "ad", "abcdef"]

SINGLE: list[dict[str, Any]] = [
    {"name": "fedavg"},
    {"name": "fedavg", "weights": "uniform"},
    {"name": "fedadp"},
    {"name": "fedcda", "warmup_rounds": 3, "depth": 2},
    {"name": "fedcda", "warmup_rounds": 0, "history": "keep"},
]
STEPPED: list[dict[str, Any]] = [
    {"name": "fedavgm", "momentum": 0.5},
    {"name": "fedadagrad", "learning_rate": 0.05},
    {"name": "fedadam", "learning_rate": 0.1},
    {"name": "fedyogi", "learning_rate": 0.1, "weights": "uniform"},
    {"name": "fedexp"},
]
ROBUST: list[dict[str, Any]] = [
    {"name": "median"},
    {"name": "trimmed_mean", "trim": 0.34},
    {"name": "krum", "wrong": 0},
]
SEVERAL: list[dict[str, Any]] = [
    {"name": "independent"},
    {"name": "fedcross", "strategy": "in_order", "alpha": 0.9},
    {"name": "fedcross"},
    {"name": "fedcross", "strategy": "highest", "similarity": "sum_norm", "alpha": 0.6},
    {
        "name": "fedcross",
        "similarity": "pairwise",
        "propeller_rounds": 2,
        "dynamic_alpha_rounds": 3,
    },
    {"name": "fedcross", "similarity": "euclidean", "strategy": "highest"},
    {"name": "fedcross", "similarity": "manhattan"},
    {"name": "fedcross", "weights": "data", "first_stage_rounds": 2},
    {"name": "fedmr"},
    {"name": "fedmr", "granularity": "key", "first_stage_rounds": 3},
    {"name": "fedmr", "granularity": "block", "block_fraction": 0.3},
    {"name": "fedmr", "granularity": "model", "weights": "data"},
]


# which have products anyway
COMPARING = ("fedadp", "fedcda", "krum", "fedexp", "fedcross", "independent", "fedmr")


def label(tree: dict[str, Any]) -> str:
    return "-".join(str(value) for value in tree.values())


each_rule = pytest.mark.parametrize("tree", [*SINGLE, *STEPPED, *ROBUST, *SEVERAL], ids=label)
each_of_several = pytest.mark.parametrize("tree", SEVERAL, ids=label)


def aggregator(tree: dict[str, Any], **context: Any) -> Rule:
    """Return a node's rule, which begins with the first model."""
    memory: dict[tuple[str, int], Rows] = {}

    def rows(name: str, count: int) -> Rows:
        # a file's rows begin on pages of their own
        wide = np.full((count, LAYOUT.row_bytes + 13), 0xFF, np.uint8)
        return memory.setdefault((name, count), wide[:, : LAYOUT.row_bytes])

    rule = rule_of(tree, layout=LAYOUT, rows=rows, **context)
    rule.begin(first_model())
    return rule


def first_model(seed: int = 0) -> Row:
    row = LAYOUT.empty()
    LAYOUT.floats(row)[:] = np.random.default_rng(seed).normal(size=LAYOUT.columns)
    LAYOUT.integers(row)[:] = 100 * seed
    return row


def train(row: Row, child: str, r: int) -> Row:
    """Return what a child makes of a model: a step towards a point of its own, with noise of the
    round.
    """
    step = np.random.default_rng([r, *child.encode()])
    target = np.random.default_rng(list(child.encode())).normal(size=LAYOUT.columns)
    trained = row.copy()
    floats = LAYOUT.floats(trained)
    floats += (0.3 * (target - floats) + 0.05 * step.normal(size=LAYOUT.columns)).astype(np.float32)
    LAYOUT.integers(trained)[:] += ord(child[0])
    return trained


def loss_of(child: str) -> float:
    return 0.01 * ord(child[0])


def report_of(child: str, *, unknown: Sequence[str] = ()) -> Report:
    return Report(10 * ord(child[0]) - 900, None if child in unknown else loss_of(child))


def play(
    rule: Rule,
    r: int,
    children: Sequence[str],
    *,
    missing: Sequence[str] = (),
    unknown: Sequence[str] = (),
) -> tuple[Uploads, Aggregated]:
    """Play one round; return its uploads as they were, rubbish included, before they were
    aggregated.
    """
    models = by_child(rule.dispatch(r, list(children)))
    rows_K = np.full((len(models), LAYOUT.row_bytes), 0xFF, np.uint8)  # NaN
    for k, (child, row) in enumerate(models.items()):
        if child not in missing:
            rows_K[k] = train(row, child, r)
    reports = tuple(
        None if child in missing else report_of(child, unknown=unknown) for child in models
    )
    before = Uploads(tuple(models), rows_K.copy(), reports, lambda: None)
    outcome = rule.aggregate(r, Uploads(tuple(models), rows_K, reports, lambda: None))
    rows_K[:] = 0xFF  # the memory is the next round's
    return before, outcome


def by_child(models: Dispatched) -> dict[str, Row]:
    return {child: row for row, children in models for child in children}


def rows_of(rule: Rule, r: int, children: Sequence[str]) -> list[Row]:
    return list(by_child(rule.dispatch(r, list(children))).values())


def dispatched(rule: Rule, r: int, children: Sequence[str]) -> list[bytes]:
    return [row.tobytes() for row in rows_of(rule, r, children)]


def floats_of(rows: Sequence[Row]) -> Doubles:
    return np.array([LAYOUT.floats(row) for row in rows], np.float64)


# All rules


@each_rule
def test_rubbish_of_missing_children_goes_nowhere(tree: dict[str, Any]) -> None:
    rule = aggregator(tree)
    for r in range(6):
        _, outcome = play(
            rule, r, CHILDREN, missing=CHILDREN[r % 3 : r % 3 + 2] if r != 4 else CHILDREN[:4]
        )
        rows = rows_of(rule, r + 1, CHILDREN)
        assert all(np.isfinite(LAYOUT.floats(row)).all() for row in [rule.model, *rows])
        assert all(
            row.min() >= 0 and LAYOUT.integers(row).tolist()[0] < 2**20
            for row in [rule.model, *rows]
        )
        answered = 3 if r != 4 else 1
        assert len(outcome.distances) == (
            answered if answered >= RULES[tree["name"]](**tree).uploads_least else 0
        )
        json.dumps(outcome.facts)


@each_rule
def test_the_model_from_above_is_dispatched_as_it_is_and_only_read(tree: dict[str, Any]) -> None:
    rule, model, first = aggregator(tree), first_model(), first_model().tobytes()
    own = rule.model
    for begun in (0, 4):
        rule.begin(model)
        assert not rule.reads_start
        ((row, children),) = rule.dispatch(begun, CHILDREN)
        assert sorted(children) == sorted(CHILDREN) and row is model
        for r in range(begun, begun + 4):
            play(rule, r, CHILDREN)
            assert rule.model is own and own.tobytes() != first == model.tobytes()


@each_rule
def test_losses_distances_and_spread_are_brute_force(tree: dict[str, Any]) -> None:
    rule = aggregator(tree)
    parameters = LAYOUT.parameters
    for r in range(6):
        uploads, outcome = play(rule, r, CHILDREN, missing="c" if r == 3 else "")
        losses = [report.loss for report in uploads.reports if report and report.loss is not None]
        assert (
            outcome.loss is not None and min(losses) - 1e-12 <= outcome.loss <= max(losses) + 1e-12
        )
        model = LAYOUT.floats(rule.model)[:parameters].astype(np.float64)
        expected = {
            child: float(np.linalg.norm(LAYOUT.floats(row)[:parameters] - model))
            for child, row, report in zip(
                uploads.children, uploads.rows_K, uploads.reports, strict=True
            )
            if report
        }
        assert outcome.distances == pytest.approx(expected, rel=1e-5)
        if tree not in SEVERAL:
            assert outcome.spread is None and (rule.mixed is None or tree["name"] == "fedexp")
            continue
        rows_KD = floats_of(rows_of(rule, r + 1, CHILDREN))[:, :parameters]
        mean_D = rows_KD.mean(axis=0)
        spread = ((rows_KD - mean_D) ** 2).sum(axis=1).mean() / (mean_D**2).sum()
        assert outcome.spread == pytest.approx(spread, rel=1e-4, abs=1e-12)


@each_rule
def test_an_institution_finds_the_same_spread_without_distances(tree: dict[str, Any]) -> None:
    """What only Tempo at the cloud needs is not computed below it; models and spreads are the same."""
    cloud, site = aggregator(tree), aggregator(tree, measures=False)
    for r in range(6):
        above, below = (
            play(rule, r, CHILDREN, missing="c" if r == 3 else "")[1] for rule in (cloud, site)
        )
        assert set(below.distances) in (set(), set(above.distances))
        assert not below.distances or tree["name"] in COMPARING
        assert below.spread == (
            None if above.spread is None else pytest.approx(above.spread, rel=1e-4, abs=1e-9)
        )
        assert cloud.model.tobytes() == site.model.tobytes()
        assert dispatched(cloud, r + 1, CHILDREN) == dispatched(site, r + 1, CHILDREN)


@pytest.mark.parametrize("tree", [*SINGLE, *SEVERAL], ids=label)
def test_a_single_child_is_copied(tree: dict[str, Any]) -> None:
    rule = aggregator(tree | ({"warmup_rounds": 0, "depth": 1} if tree["name"] == "fedcda" else {}))
    for r in range(4):
        uploads, outcome = play(rule, r, "a")
        assert rule.model.tobytes() == uploads.rows_K[0].tobytes()
        assert dispatched(rule, r + 1, "a") == [uploads.rows_K[0].tobytes()]
        assert outcome.spread in (None, 0.0)


RECENTRED = [tree | {"on_new_model": "recentre"} for tree in SEVERAL]


@pytest.mark.parametrize("tree", [*SINGLE, *STEPPED, *ROBUST, *SEVERAL, *RECENTRED], ids=label)
def test_a_saved_node_goes_on_bit_for_bit(tree: dict[str, Any], tmp_path: Path) -> None:
    draws = DRAWS if tree in SINGLE else [CHILDREN] * len(DRAWS)
    for broken_at in (0, 1, 4, 7):
        straight = aggregator(tree, folder=tmp_path / f"straight{broken_at}")
        for r in range(broken_at):
            play(straight, r, draws[r])
        saved = tmp_path / f"saved{broken_at}"
        saved.mkdir()
        facts = json.loads(json.dumps(straight.save(saved)))
        resumed = aggregator(tree, folder=tmp_path / f"resumed{broken_at}")
        resumed.begin(straight.model.copy() if broken_at else first_model())
        resumed.restore(saved, facts)
        for path in saved.iterdir():
            path.unlink()
        for r in range(broken_at, len(DRAWS)):
            outcomes = [
                play(rule, r, draws[r], missing=draws[r][:1])[1] for rule in (straight, resumed)
            ]
            assert outcomes[0] == outcomes[1]
            assert straight.model.tobytes() == resumed.model.tobytes()
            if r == 8:
                assert straight.reads_start == resumed.reads_start
                for rule in (straight, resumed):
                    rule.begin(first_model(3))


@each_rule
def test_what_outlives_a_global_round_is_said(tree: dict[str, Any], tmp_path: Path) -> None:
    """A node that keeps nothing goes on alike after it was forgotten; one that does goes on from
    what it saved.
    """
    rules = [
        aggregator(tree, node="site", measures=False, folder=tmp_path / name)
        for name in ("one", "other")
    ]
    for r in range(4):
        play(rules[0], r, CHILDREN)
    (tmp_path / "saved").mkdir()
    if RULES[tree["name"]](**tree).remembers:
        rules[1].restore(tmp_path / "saved", rules[0].save(tmp_path / "saved"))
    for rule in rules:
        rule.begin(first_model(7))
    for r in range(4, 7):
        outcomes = [play(rule, r, CHILDREN)[1] for rule in rules]
        assert outcomes[0] == outcomes[1] and rules[0].model.tobytes() == rules[1].model.tobytes()


# One model


def mean_of(uploads: Uploads, weights: str) -> Doubles:
    there = [k for k, report in enumerate(uploads.reports) if report is not None]
    samples = np.array([float(uploads.reports[k].samples) for k in there])  # type: ignore[union-attr]
    shares = samples / samples.sum() if weights == "data" else np.full(len(there), 1 / len(there))
    return shares @ floats_of([uploads.rows_K[k] for k in there])


@pytest.mark.parametrize("weights", ["data", "uniform"])
def test_fedavg_is_the_mean_of_those_who_answered(weights: str) -> None:
    rule = aggregator({"name": "fedavg", "weights": weights})
    for r, drawn in enumerate(DRAWS):
        uploads, outcome = play(rule, r, drawn, missing=drawn[-1])
        np.testing.assert_allclose(
            LAYOUT.floats(rule.model), mean_of(uploads, weights), rtol=0, atol=1e-6
        )
        assert sum(outcome.facts["weights"].values()) == pytest.approx(1.0)  # type: ignore[attr-defined]
        assert uploads.children == tuple(drawn) and drawn[-1] not in outcome.facts["weights"]  # type: ignore[operator]
        assert [row is rule.model for row, _ in rule.dispatch(r + 1, drawn)] == [True]


def trajectory(tree: dict[str, Any], draws: Sequence[Sequence[str]], **options: Any) -> list[bytes]:
    rule = aggregator(tree, **options)
    models = []
    for r, drawn in enumerate(draws):
        play(rule, r, drawn, missing=drawn[1:2])
        models.append(rule.model.tobytes())
    return models


@pytest.mark.parametrize(
    ("tree", "weights"),
    [
        ({"name": "fedadp", "a": 0.0}, "data"),
        ({"name": "fedcda", "warmup_rounds": 100}, "data"),
        ({"name": "fedcda", "warmup_rounds": 100, "weights": "uniform"}, "uniform"),
    ],
)
def test_rules_at_their_null_setting_are_fedavg_bit_for_bit(
    tree: dict[str, Any], weights: str
) -> None:
    assert trajectory(tree, DRAWS) == trajectory({"name": "fedavg", "weights": weights}, DRAWS)


# K models


@each_of_several
def test_models_are_dealt_by_a_fresh_random_order(tree: dict[str, Any]) -> None:
    orders = []
    for seed in (1, 2):
        rule = aggregator(tree, seed=seed)
        for r in range(5):
            order = generator(seed, Purpose.DISPATCH, "cloud", r).permutation(5)
            assert list(by_child(rule.dispatch(r, CHILDREN))) == [
                CHILDREN[place] for place in order
            ]
            orders.append(tuple(order))
            play(rule, r, CHILDREN)
    assert len(set(orders)) == 10


def next_models(tree: dict[str, Any], r: int, rows_K: Rows) -> list[Row]:
    """Mix uploads into the next models by the rules' own definitions, in float64."""
    count = len(rows_K)
    settings = parse({"cloud": {"aggregation": tree}}).tiers[0].aggregation
    mixed = rows_K.copy()
    if isinstance(settings, FedMR):
        for place, layer in enumerate(fedmr.layers(settings, LAYOUT)):
            order = generator(1, Purpose.RECOMBINATION, f"cloud/{place}", r).permutation(count)
            for k, row in enumerate(mixed):
                for entry in layer:
                    LAYOUT.views(row)[entry.name][...] = LAYOUT.views(rows_K[order[k]])[entry.name]
    if isinstance(settings, FedCross):
        stage = fedcross.stage(settings, r, count)
        partners = [fedcross.in_order(r, count, place) for place in range(stage.partners)]
        if stage.similar:
            similarity_KK = fedcross.similarity(settings, mixing_round(rows_K, LAYOUT))
            partners = [fedcross.by_similarity(similarity_KK, lowest=settings.strategy == "lowest")]
        for j, row in enumerate(mixed):
            others = [LAYOUT.floats(rows_K[own[j]]).astype(np.float64) for own in partners]
            weights = [stage.alpha, *[(1 - stage.alpha) / len(partners)] * len(partners)]
            sources = [j, *(own[j] for own in partners)]
            LAYOUT.floats(row)[:] = stage.alpha * LAYOUT.floats(rows_K[j]) + (
                1 - stage.alpha
            ) * np.mean(others, axis=0)
            heaviest = min(
                source for source, w in zip(sources, weights, strict=True) if w == max(weights)
            )
            LAYOUT.integers(row)[:] = LAYOUT.integers(rows_K[heaviest])
    return list(mixed)


@each_of_several
def test_rounds_of_k_models_are_the_definitions(tree: dict[str, Any]) -> None:
    rule = aggregator(tree)
    models = [first_model()] * len(CHILDREN)
    for r in range(9):
        missing = CHILDREN[r % 5] if r in (2, 5, 6) else ""
        uploads, outcome = play(rule, r, CHILDREN, missing=missing)
        fallback = [k for k, child in enumerate(uploads.children) if child == missing]
        rows_K = uploads.rows_K.copy()
        for k in fallback:
            rows_K[k] = models[k]
        assert outcome.facts["fallback_models"] == ([missing] if missing else [])
        mean = (
            mean_of(uploads, "data")
            if tree.get("weights") == "data"
            else floats_of(rows_K).mean(axis=0)
        )
        np.testing.assert_allclose(LAYOUT.floats(rule.model), mean, rtol=0, atol=1e-6)
        got = rows_of(rule, r + 1, CHILDREN)
        if r < tree.get("first_stage_rounds", 0):
            assert all(row is rule.model for row in got)
            models = [rule.model.copy()] * len(CHILDREN)
            continue
        models = next_models(tree, r, rows_K)
        np.testing.assert_allclose(floats_of(got), floats_of(models), rtol=0, atol=1e-6)
        assert [LAYOUT.integers(row).tolist() for row in got] == [
            LAYOUT.integers(row).tolist() for row in models
        ]
        models = [row.copy() for row in got]
        after = floats_of(models).mean(axis=0)
        if rule.mixed is None:
            np.testing.assert_allclose(after, LAYOUT.floats(rule.model), rtol=0, atol=1e-6)
        else:
            np.testing.assert_allclose(after, LAYOUT.floats(rule.mixed), rtol=0, atol=1e-6)


def test_only_plans_that_move_the_mean_have_a_mean_after_mixing() -> None:
    found = {}
    for tree in SEVERAL:
        rule = aggregator(tree)
        for r in range(6):
            play(rule, r, CHILDREN)
        found[label(tree)] = rule.mixed is not None
        rule.begin(first_model())
        assert rule.mixed is None
    moved = [
        "fedcross",
        "fedcross-highest-sum_norm-0.6",
        "fedcross-pairwise-2-3",
        "fedcross-euclidean-highest",
        "fedcross-manhattan",
        "fedcross-data-2",
        "fedmr-model-data",
    ]
    assert [name for name, differs in found.items() if differs] == moved


def test_data_weights_give_a_fallback_model_none() -> None:
    rule = aggregator({"name": "independent", "weights": "data"})
    play(rule, 0, CHILDREN)
    uploads, outcome = play(rule, 1, CHILDREN, missing="bd")
    np.testing.assert_allclose(
        LAYOUT.floats(rule.model), mean_of(uploads, "data"), rtol=0, atol=1e-6
    )
    shares = {child: report_of(child).samples for child in "ace"}
    loss = sum(loss_of(child) * n for child, n in shares.items()) / sum(shares.values())
    assert outcome.loss == pytest.approx(loss)


@each_rule
def test_the_loss_is_the_mean_of_those_that_are_known(tree: dict[str, Any]) -> None:
    if tree["name"] == "fedcda":
        pytest.skip("a device must return one")
    found = []
    for unknown in ("", "bd", CHILDREN):
        rule = aggregator(tree)
        _, outcome = play(rule, 0, CHILDREN, unknown=unknown)
        found.append((outcome.loss, rule.model.tobytes()))
    (_, whole), (some, model), (none, same) = found
    assert model == same == whole and none is None
    # None: a rule used those without a loss alone
    assert some is None or loss_of("a") <= some <= loss_of("e")
    statistics = Statistics.of([report_of(child, unknown="bd") for child in CHILDREN])
    weights_K = np.array([0.1, 0.2, 0.3, 0.1, 0.3])
    wanted = sum(w * loss_of(child) for w, child in zip((0.1, 0.3, 0.3), "ace", strict=True)) / 0.7
    assert statistics.mean_loss(weights_K) == pytest.approx(wanted)
    assert statistics.mean_loss(np.array([0, 0.5, 0, 0.5, 0])) is None


# From one global round to the next


@each_of_several
def test_reset_starts_all_models_from_what_came(tree: dict[str, Any]) -> None:
    rule = aggregator(tree)
    for r in range(4):
        play(rule, r, CHILDREN)
    with pytest.raises(ValueError, match="4 children take part, but there are 5 models"):
        rule.dispatch(4, "abcd")
    assert not rule.reads_start
    received = first_model(5)
    rule.begin(received)
    assert [row is received for row, _ in rule.dispatch(4, CHILDREN)] == [True]
    play(rule, 4, "abc")  # all models are one again: any number will do
    assert len(set(dispatched(rule, 5, "abc"))) == 3


@each_of_several
def test_recentre_keeps_each_models_offset(tree: dict[str, Any]) -> None:
    rule = aggregator(tree | {"on_new_model": "recentre"})
    assert not rule.reads_start
    for r in range(4):
        play(rule, r, CHILDREN)
    assert rule.reads_start
    before = floats_of(rows_of(rule, 4, CHILDREN))
    received = first_model(5)
    rule.begin(received)
    rows = rows_of(rule, 4, CHILDREN)
    after, start, parameters = floats_of(rows), floats_of([received]), LAYOUT.parameters
    expected = start + before - before.mean(axis=0)
    np.testing.assert_allclose(after[:, :parameters], expected[:, :parameters], rtol=0, atol=1e-6)
    np.testing.assert_allclose(after.mean(axis=0), start[0], rtol=0, atol=1e-6)
    # statistics as received
    assert np.array_equal(after[:, parameters:], np.repeat(start[:, parameters:], 5, axis=0))
    assert [LAYOUT.integers(row).tolist() for row in rows] == [
        LAYOUT.integers(received).tolist()
    ] * 5


@pytest.mark.parametrize("first_stage", [0, 10])
def test_recentre_with_equal_models_is_reset(first_stage: int) -> None:
    """Equal since the first stage shares one row, or since all uploads are the same."""
    rows = {}
    for start in ("reset", "recentre"):
        tree = {
            "name": "fedcross",
            "alpha": 1.0,
            "first_stage_rounds": first_stage,
            "on_new_model": start,
        }
        rule = aggregator(tree)
        for r in range(3):
            models = by_child(rule.dispatch(r, CHILDREN))
            rows_K = np.repeat(first_model(10 + r)[None], len(models), axis=0)
            rule.aggregate(r, Uploads(tuple(models), rows_K, (Report(1, 1.0),) * 5, lambda: None))
        assert rule.reads_start == (start == "recentre" and first_stage == 0)
        rule.begin(first_model(5))
        rows[start] = dispatched(rule, 3, CHILDREN)
    assert rows["reset"] == rows["recentre"] == [first_model(5).tobytes()] * 5
