"""A node's rounds with each rule: what its children get, and what becomes of what they send."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from common.experiment.methods import RULES
from common.experiment.reading import parse
from common.methods import fedcross, fedmr
from common.methods.aggregator import build
from common.methods.fedadp import gompertz
from common.methods.fedcross import FedCross
from common.methods.fedmr import FedMR
from common.methods.rule import Aggregated, Dispatched, Rule, Uploads
from common.methods.statistics import Statistics, gram
from common.model.layout import ModelLayout, Row, Section
from common.randomness import Purpose, generator

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
PLAIN = ModelLayout.build([entry for entry in ENTRIES if entry[2] is Section.PARAMETER])
CHILDREN = ("a", "b", "c", "d", "e")
MANY = {"institutions": 20, "devices": 20}
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
    {"name": "fedcross", "similarity": "pairwise", "propeller_rounds": 2, "dynamic_alpha_rounds": 3},
    {"name": "fedcross", "similarity": "euclidean", "strategy": "highest"},
    {"name": "fedcross", "similarity": "manhattan"},
    {"name": "fedcross", "weights": "data", "first_stage_rounds": 2},
    {"name": "fedmr"},
    {"name": "fedmr", "granularity": "key", "first_stage_rounds": 3},
    {"name": "fedmr", "granularity": "block", "block_fraction": 0.3},
    {"name": "fedmr", "granularity": "model", "weights": "data"},
]


def label(tree: dict[str, Any]) -> str:
    return "-".join(str(value) for value in tree.values())


each_rule = pytest.mark.parametrize("tree", [*SINGLE, *STEPPED, *ROBUST, *SEVERAL], ids=label)
each_of_several = pytest.mark.parametrize("tree", SEVERAL, ids=label)


@dataclass(frozen=True)
class Report:
    samples: int
    loss: float | None
    path_steps: int = 1
    start_loss: float | None = None


def aggregator(
    tree: dict[str, Any],
    *,
    layout: ModelLayout = LAYOUT,
    node: str = "cloud",
    seed: int = 1,
    measures: bool = True,
    folder: Path | None = None,
) -> Rule:
    rule = parse({"cloud": {"aggregation": tree}, "topology": MANY}).tiers[0].aggregation
    memory: dict[tuple[str, int], Rows] = {}

    def rows(name: str, count: int) -> Rows:
        wide = np.full((count, layout.row_bytes + 13), 0xFF, np.uint8)  # a file's rows begin on pages of their own
        return memory.setdefault((name, count), wide[:, : layout.row_bytes])

    return build(rule, layout=layout, node=node, seed=seed, measures=measures, rows=rows, folder=folder)


def first_model(seed: int = 0, layout: ModelLayout = LAYOUT) -> Row:
    row = layout.empty()
    layout.floats(row)[:] = np.random.default_rng(seed).normal(size=layout.columns)
    layout.integers(row)[:] = 100 * seed
    return row


def train(row: Row, child: str, r: int, layout: ModelLayout) -> Row:
    """Return what a child makes of a model: a step towards a point of its own, with noise of the round."""
    step = np.random.default_rng([r, *child.encode()])
    target = np.random.default_rng(list(child.encode())).normal(size=layout.columns)
    trained = row.copy()
    floats = layout.floats(trained)
    floats += (0.3 * (target - floats) + 0.05 * step.normal(size=layout.columns)).astype(np.float32)
    layout.integers(trained)[:] += ord(child[0])
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
    layout: ModelLayout = LAYOUT,
) -> tuple[Uploads, Aggregated]:
    """Play one round; return its uploads as they were, rubbish included, before they were aggregated."""
    models = by_child(rule.dispatch(r, list(children)))
    rows_K = np.full((len(models), layout.row_bytes), 0xFF, np.uint8)  # NaN
    for k, (child, row) in enumerate(models.items()):
        if child not in missing:
            rows_K[k] = train(row, child, r, layout)
    reports = tuple(None if child in missing else report_of(child, unknown=unknown) for child in models)
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
def test_all_children_start_from_the_one_array(tree: dict[str, Any]) -> None:
    rule, model = aggregator(tree), first_model()
    assert not rule.reads_start
    rule.begin(model)
    ((row, children),) = rule.dispatch(0, CHILDREN)
    assert sorted(children) == sorted(CHILDREN) and row is model


@each_rule
def test_rubbish_of_missing_children_goes_nowhere(tree: dict[str, Any]) -> None:
    rule = aggregator(tree)
    rule.begin(first_model())
    for r in range(6):
        _, outcome = play(rule, r, CHILDREN, missing=CHILDREN[r % 3 : r % 3 + 2] if r != 4 else CHILDREN[:4])
        rows = rows_of(rule, r + 1, CHILDREN)
        assert all(np.isfinite(LAYOUT.floats(row)).all() for row in [rule.model, *rows])
        assert all(row.min() >= 0 and LAYOUT.integers(row).tolist()[0] < 2**20 for row in [rule.model, *rows])
        answered = 3 if r != 4 else 1
        assert len(outcome.distances) == (answered if answered >= RULES[tree["name"]](**tree).uploads_least else 0)
        json.dumps(outcome.facts)


@each_rule
def test_the_model_stays_in_its_memory(tree: dict[str, Any]) -> None:
    rule = aggregator(tree)
    rule.begin(first_model())
    model = rule.model
    for r in range(3):
        play(rule, r, CHILDREN)
        assert rule.model is model
        assert model.tobytes() != first_model().tobytes()


@each_rule
def test_the_model_from_above_is_only_read(tree: dict[str, Any]) -> None:
    rule, model = aggregator(tree), first_model()
    rule.begin(model)
    for r in range(4):
        play(rule, r, CHILDREN)
    rule.begin(model)
    play(rule, 4, CHILDREN)
    assert model.tobytes() == first_model().tobytes()


@each_rule
def test_the_same_run_gives_the_same_bits(tree: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for name in ("one", "other"):
        rule = aggregator(tree, folder=tmp_path / name)
        rule.begin(first_model())
        outcomes = [play(rule, r, CHILDREN, missing="b" if r == 2 else "")[1] for r in range(5)]
        found.append((outcomes, rule.model.tobytes(), dispatched(rule, 5, CHILDREN)))
    assert found[0] == found[1]


@each_rule
def test_losses_distances_and_spread_are_brute_force(tree: dict[str, Any]) -> None:
    rule = aggregator(tree)
    rule.begin(first_model())
    parameters = LAYOUT.parameters
    for r in range(6):
        uploads, outcome = play(rule, r, CHILDREN, missing="c" if r == 3 else "")
        losses = [report.loss for report in uploads.reports if report and report.loss is not None]
        assert outcome.loss is not None and min(losses) - 1e-12 <= outcome.loss <= max(losses) + 1e-12
        model = LAYOUT.floats(rule.model)[:parameters].astype(np.float64)
        expected = {
            child: float(np.linalg.norm(LAYOUT.floats(row)[:parameters] - model))
            for child, row, report in zip(uploads.children, uploads.rows_K, uploads.reports, strict=True)
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
    for rule in (cloud, site):
        rule.begin(first_model())
    for r in range(6):
        above, below = (play(rule, r, CHILDREN, missing="c" if r == 3 else "")[1] for rule in (cloud, site))
        assert below.spread == (None if above.spread is None else pytest.approx(above.spread, rel=1e-4, abs=1e-9))
        assert set(below.distances) in (set(), set(above.distances))
        assert cloud.model.tobytes() == site.model.tobytes()
        assert dispatched(cloud, r + 1, CHILDREN) == dispatched(site, r + 1, CHILDREN)


@pytest.mark.parametrize("tree", [*SINGLE, *SEVERAL], ids=label)
def test_a_single_child_is_copied(tree: dict[str, Any]) -> None:
    rule = aggregator(tree | ({"warmup_rounds": 0, "depth": 1} if tree["name"] == "fedcda" else {}))
    rule.begin(first_model())
    for r in range(4):
        uploads, outcome = play(rule, r, "a")
        assert rule.model.tobytes() == uploads.rows_K[0].tobytes()
        assert dispatched(rule, r + 1, "a") == [uploads.rows_K[0].tobytes()]
        assert outcome.spread in (None, 0.0)


@each_rule
@pytest.mark.parametrize("start", ["reset", "recentre"])
def test_a_saved_node_goes_on_bit_for_bit(tree: dict[str, Any], start: str, tmp_path: Path) -> None:
    if tree in SEVERAL:
        tree = tree | {"on_new_model": start}
    draws = DRAWS if tree in SINGLE else [CHILDREN] * len(DRAWS)
    for broken_at in (0, 1, 4, 7):
        straight = aggregator(tree, folder=tmp_path / f"straight{broken_at}")
        straight.begin(first_model())
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
            outcomes = [play(rule, r, draws[r], missing=draws[r][:1])[1] for rule in (straight, resumed)]
            assert outcomes[0] == outcomes[1]
            assert straight.model.tobytes() == resumed.model.tobytes()
            if r == 8:
                assert straight.reads_start == resumed.reads_start
                for rule in (straight, resumed):
                    rule.begin(first_model(3))


@each_rule
def test_what_outlives_a_global_round_is_said(tree: dict[str, Any], tmp_path: Path) -> None:
    """A node that keeps nothing goes on alike after it was forgotten; one that does goes on from what it saved."""
    rules = [aggregator(tree, node="site", measures=False, folder=tmp_path / name) for name in ("one", "other")]
    rules[0].begin(first_model())
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


@pytest.mark.parametrize("measures", [True, False])
def test_distances_are_computed_only_where_they_are_asked_for(measures: bool) -> None:
    rule = aggregator({"name": "fedavg"}, measures=measures)
    rule.begin(first_model())
    assert bool(play(rule, 0, CHILDREN)[1].distances) == measures


# One model


def mean_of(uploads: Uploads, weights: str) -> Doubles:
    there = [k for k, report in enumerate(uploads.reports) if report is not None]
    samples = np.array([float(uploads.reports[k].samples) for k in there])  # type: ignore[union-attr]
    shares = samples / samples.sum() if weights == "data" else np.full(len(there), 1 / len(there))
    return shares @ floats_of([uploads.rows_K[k] for k in there])


@pytest.mark.parametrize("weights", ["data", "uniform"])
def test_fedavg_is_the_mean_of_those_who_answered(weights: str) -> None:
    rule = aggregator({"name": "fedavg", "weights": weights})
    rule.begin(first_model())
    for r, drawn in enumerate(DRAWS):
        uploads, outcome = play(rule, r, drawn, missing=drawn[-1])
        np.testing.assert_allclose(LAYOUT.floats(rule.model), mean_of(uploads, weights), rtol=0, atol=1e-6)
        assert sum(outcome.facts["weights"].values()) == pytest.approx(1.0)  # type: ignore[attr-defined]
        assert uploads.children == tuple(drawn) and drawn[-1] not in outcome.facts["weights"]  # type: ignore[operator]
        assert [row is rule.model for row, _ in rule.dispatch(r + 1, drawn)] == [True]


def trajectory(tree: dict[str, Any], draws: Sequence[Sequence[str]], **options: Any) -> list[bytes]:
    rule = aggregator(tree, **options)
    rule.begin(first_model())
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
def test_rules_at_their_null_setting_are_fedavg_bit_for_bit(tree: dict[str, Any], weights: str) -> None:
    assert trajectory(tree, DRAWS) == trajectory({"name": "fedavg", "weights": weights}, DRAWS)


def test_fedcda_of_depth_1_with_all_children_is_uniform_fedavg() -> None:
    models = []
    for tree in ({"name": "fedcda", "warmup_rounds": 0, "depth": 1}, {"name": "fedavg", "weights": "uniform"}):
        rule = aggregator(tree)
        rule.begin(first_model())
        for r in range(6):
            play(rule, r, CHILDREN)
        models.append(LAYOUT.floats(rule.model))
    np.testing.assert_allclose(models[0], models[1], rtol=0, atol=2e-6)


def test_fedadps_angles_are_taken_from_what_was_dispatched_and_kept() -> None:
    rule = aggregator({"name": "fedadp"})
    rule.begin(first_model())
    past: dict[str, list[float]] = {}
    for r, drawn in enumerate(DRAWS):
        start = rows_of(rule, r, drawn)[0].copy()
        uploads, outcome = play(rule, r, drawn, missing=drawn[-1])
        there = [k for k, report in enumerate(uploads.reports) if report is not None]
        children = [uploads.children[k] for k in there]
        deltas = (floats_of(uploads.rows_K[there]) - floats_of([start]))[:, : LAYOUT.parameters]
        samples = np.array([report_of(child).samples for child in children], float)
        mean = samples / samples.sum() @ deltas
        cosines = deltas @ mean / np.linalg.norm(deltas, axis=1) / np.linalg.norm(mean)
        expected = dict(zip(children, np.arccos(np.minimum(cosines, 1)).tolist(), strict=True))
        assert outcome.facts["angles"] == pytest.approx(expected, rel=1e-4, abs=1e-3)
        for child, theta in outcome.facts["angles"].items():  # type: ignore[attr-defined]
            past.setdefault(child, []).append(theta)
        raw = [
            n * np.exp(gompertz(float(np.mean(past[child])), 5.0)) for n, child in zip(samples, children, strict=True)
        ]
        assert list(outcome.facts["weights"].values()) == pytest.approx(np.array(raw) / sum(raw))  # type: ignore[attr-defined]


# K models


@each_of_several
def test_models_are_dealt_by_a_fresh_random_order(tree: dict[str, Any]) -> None:
    orders = []
    for seed in (1, 2):
        rule = aggregator(tree, seed=seed)
        rule.begin(first_model())
        for r in range(5):
            order = generator(seed, Purpose.DISPATCH, "cloud", r).permutation(5)
            assert list(by_child(rule.dispatch(r, CHILDREN))) == [CHILDREN[place] for place in order]
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
            trainable = list(LAYOUT.floats(rows_K)[:, : LAYOUT.parameters])
            products = gram(trainable, np.zeros_like(trainable[0]))
            similarity_KK = fedcross.similarity(settings, rows_K, products, layout=LAYOUT)
            partners = [fedcross.by_similarity(similarity_KK, lowest=settings.strategy == "lowest")]
        for j, row in enumerate(mixed):
            others = [LAYOUT.floats(rows_K[own[j]]).astype(np.float64) for own in partners]
            weights = [stage.alpha, *[(1 - stage.alpha) / len(partners)] * len(partners)]
            sources = [j, *(own[j] for own in partners)]
            LAYOUT.floats(row)[:] = stage.alpha * LAYOUT.floats(rows_K[j]) + (1 - stage.alpha) * np.mean(others, axis=0)
            heaviest = min(source for source, w in zip(sources, weights, strict=True) if w == max(weights))
            LAYOUT.integers(row)[:] = LAYOUT.integers(rows_K[heaviest])
    return list(mixed)


@each_of_several
def test_rounds_of_k_models_are_the_definitions(tree: dict[str, Any]) -> None:
    rule = aggregator(tree)
    rule.begin(first_model())
    models = [first_model()] * len(CHILDREN)
    for r in range(9):
        missing = CHILDREN[r % 5] if r in (2, 5, 6) else ""
        uploads, outcome = play(rule, r, CHILDREN, missing=missing)
        fallback = [k for k, child in enumerate(uploads.children) if child == missing]
        rows_K = uploads.rows_K.copy()
        for k in fallback:
            rows_K[k] = models[k]
        assert outcome.facts["fallback_models"] == ([missing] if missing else [])
        mean = mean_of(uploads, "data") if tree.get("weights") == "data" else floats_of(rows_K).mean(axis=0)
        np.testing.assert_allclose(LAYOUT.floats(rule.model), mean, rtol=0, atol=1e-6)
        got = rows_of(rule, r + 1, CHILDREN)
        if r < tree.get("first_stage_rounds", 0):
            assert all(row is rule.model for row in got)
            models = [rule.model.copy()] * len(CHILDREN)
            continue
        models = next_models(tree, r, rows_K)
        np.testing.assert_allclose(floats_of(got), floats_of(models), rtol=0, atol=1e-6)
        assert [LAYOUT.integers(row).tolist() for row in got] == [LAYOUT.integers(row).tolist() for row in models]
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
        rule.begin(first_model())
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


def test_models_that_are_never_mixed_go_on_from_their_uploads() -> None:
    rule = aggregator({"name": "independent"})
    rule.begin(first_model())
    for r in range(3):
        uploads, _ = play(rule, r, CHILDREN)
        assert dispatched(rule, r + 1, CHILDREN) == [row.tobytes() for row in uploads.rows_K]


@pytest.mark.parametrize("name", ["fedcross", "fedmr"])
@pytest.mark.parametrize("weights", ["data", "uniform"])
def test_a_first_stage_that_never_ends_is_fedavg(name: str, weights: str) -> None:
    """Bit for bit, but for the order of the sum, which is that of the models here and of the children there."""
    several = aggregator({"name": name, "weights": weights, "first_stage_rounds": 100})
    single = aggregator({"name": "fedavg", "weights": weights})
    for rule in (several, single):
        rule.begin(first_model())
    for r in range(8):
        outcomes = [play(rule, r, CHILDREN)[1] for rule in (several, single)]
        np.testing.assert_allclose(LAYOUT.floats(several.model), LAYOUT.floats(single.model), rtol=0, atol=1e-6)
        assert outcomes[0].loss == pytest.approx(outcomes[1].loss, rel=1e-12)
        assert outcomes[0].spread == 0.0 and outcomes[0].facts["stage"] == "first"


def test_data_weights_give_a_fallback_model_none() -> None:
    rule = aggregator({"name": "independent", "weights": "data"})
    rule.begin(first_model())
    play(rule, 0, CHILDREN)
    uploads, outcome = play(rule, 1, CHILDREN, missing="bd")
    np.testing.assert_allclose(LAYOUT.floats(rule.model), mean_of(uploads, "data"), rtol=0, atol=1e-6)
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
        rule.begin(first_model())
        _, outcome = play(rule, 0, CHILDREN, unknown=unknown)
        found.append((outcome.loss, rule.model.tobytes()))
    (_, whole), (some, model), (none, same) = found
    assert model == same == whole and none is None
    assert some is None or loss_of("a") <= some <= loss_of("e")  # None: a rule used those without a loss alone
    statistics = Statistics.of([report_of(child, unknown="bd") for child in CHILDREN])
    weights_K = np.array([0.1, 0.2, 0.3, 0.1, 0.3])
    wanted = sum(w * loss_of(child) for w, child in zip((0.1, 0.3, 0.3), "ace", strict=True)) / 0.7
    assert statistics.mean_loss(weights_K) == pytest.approx(wanted)
    assert statistics.mean_loss(np.array([0, 0.5, 0, 0.5, 0])) is None


@each_of_several
def test_another_number_of_children_is_refused(tree: dict[str, Any]) -> None:
    rule = aggregator(tree)
    rule.begin(first_model())
    rule.dispatch(0, "abc")  # all models are one: any number will do
    for r in range(4):
        play(rule, r, CHILDREN)
    with pytest.raises(ValueError, match="4 children take part, but there are 5 models"):
        rule.dispatch(4, "abcd")


# From one global round to the next


@each_of_several
def test_reset_starts_all_models_from_what_came(tree: dict[str, Any]) -> None:
    rule = aggregator(tree)
    rule.begin(first_model())
    for r in range(4):
        play(rule, r, CHILDREN)
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
    rule.begin(first_model())
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
    assert np.array_equal(after[:, parameters:], np.repeat(start[:, parameters:], 5, axis=0))  # statistics as received
    assert [LAYOUT.integers(row).tolist() for row in rows] == [LAYOUT.integers(received).tolist()] * 5


@pytest.mark.parametrize("first_stage", [0, 10])
def test_recentre_with_equal_models_is_reset(first_stage: int) -> None:
    """Equal since the first stage shares one row, or since all uploads are the same."""
    rows = {}
    for start in ("reset", "recentre"):
        tree = {"name": "fedcross", "alpha": 1.0, "first_stage_rounds": first_stage, "on_new_model": start}
        rule = aggregator(tree)
        rule.begin(first_model())
        for r in range(3):
            models = by_child(rule.dispatch(r, CHILDREN))
            rows_K = np.repeat(first_model(10 + r)[None], len(models), axis=0)
            rule.aggregate(r, Uploads(tuple(models), rows_K, (Report(1, 1.0),) * 5, lambda: None))
        assert rule.reads_start == (start == "recentre" and first_stage == 0)
        rule.begin(first_model(5))
        rows[start] = dispatched(rule, 3, CHILDREN)
    assert rows["reset"] == rows["recentre"] == [first_model(5).tobytes()] * 5


@pytest.mark.parametrize("tree", [{"name": "fedcross", "strategy": "in_order"}, {"name": "fedmr"}], ids=label)
def test_recentre_to_its_own_mean_changes_nothing(tree: dict[str, Any]) -> None:
    """One institution with one round per global round is two layers, for models without float buffers."""
    rules = [aggregator(tree | {"on_new_model": "recentre"}, layout=PLAIN) for _ in range(2)]
    for rule in rules:
        rule.begin(first_model(0, PLAIN))
    for r in range(10):
        for rule in rules:
            play(rule, r, CHILDREN, layout=PLAIN)
        rules[1].begin(rules[1].model.copy())
        found = [PLAIN.floats(np.array(rows_of(rule, r + 1, CHILDREN))) for rule in rules]
        np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("tree", [*SINGLE[:3], {"name": "fedcda", "history": "keep", "warmup_rounds": 2}], ids=label)
def test_a_node_of_one_model_may_begin_again_with_its_own(tree: dict[str, Any]) -> None:
    straight, again = aggregator(tree), aggregator(tree)
    for rule in (straight, again):
        rule.begin(first_model())
    for r, drawn in enumerate(DRAWS):
        outcomes = [play(rule, r, drawn)[1] for rule in (straight, again)]
        assert outcomes[0] == outcomes[1]
        again.begin(again.model.copy())
    assert straight.model.tobytes() == again.model.tobytes()


def test_a_seed_and_a_node_have_their_own_rounds() -> None:
    found: dict[tuple[str, int], list[bytes]] = {}

    for node in ("cloud", "site"):
        for seed in (1, 2):
            found[node, seed] = trajectory({"name": "fedmr"}, [CHILDREN] * 3, node=node, seed=seed)
    assert len({models[2] for models in found.values()}) == 4
