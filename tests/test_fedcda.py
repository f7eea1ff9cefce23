"""FedCDA against brute force on its equation (5), and what its histories must keep."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from common.errors import InvalidExperiment
from common.experiment.reading import parse
from common.methods.fedcda import CachedUploadRule, Candidates, FedCDA, group, plan, search
from common.methods.rule import Aggregated, RuleContext, Uploads
from common.methods.statistics import gram
from common.model.layout import ModelLayout, Section
from common.randomness import Purpose, generator
from tests.helpers.examples import examples, slow

Doubles = npt.NDArray[np.float64]


def equation_5(rows: Sequence[Doubles], losses: Sequence[float], smoothness: float | Sequence[float]) -> float:
    n = len(rows)
    mean = sum(rows) / n
    of = [smoothness] * n if isinstance(smoothness, (int, float)) else smoothness
    apart = sum(each * float(((row - mean) ** 2).sum()) for each, row in zip(of, rows, strict=True))
    return sum(losses) / n + apart / (2 * n)


def equation_6(rows: Sequence[Doubles], losses: Sequence[float], smoothness: float) -> float:
    n = len(rows)
    mean = sum(rows) / n
    own = sum(loss + smoothness / 2 * float((row**2).sum()) for row, loss in zip(rows, losses, strict=True)) / n
    return own - smoothness / 2 * float((mean**2).sum())


@dataclass
class Problem:
    """Cached uploads of participants, newest first, and the fixed ones of the others."""

    models: list[Doubles]  # of each participant [h, D]
    losses: list[list[float]]
    fixed: Doubles  # [n, D]
    reference: npt.NDArray[np.float32]

    def candidates(
        self, smoothness: float = 1.0, *, fixed: Doubles | None = None, own: Doubles | None = None
    ) -> Candidates:
        """Return them; `fixed`, `own`: the smoothness of each fixed model and of each participant, if they differ."""
        rows = [row.astype(np.float32) for own in self.models for row in own]
        z = self.reference.astype(np.float64)
        total = self.fixed.sum(axis=0) - len(self.fixed) * z
        products = gram(rows, self.reference, along=lambda columns: total[columns])
        places = iter(range(len(rows)))
        of = [[next(places) for _ in own] for own in self.models]
        fixed_N = np.full(len(self.fixed), smoothness) if fixed is None else fixed
        smooth_C = np.repeat(np.full(len(of), smoothness) if own is None else own, [len(each) for each in of])
        weighted = fixed_N @ (self.fixed - z) if len(self.fixed) else np.zeros_like(z)
        weighted_C = np.array([(row.astype(np.float64) - z) @ weighted for row in rows])
        losses_C = np.array([loss for own in self.losses for loss in own])
        return Candidates(products, losses_C, of, len(self.fixed), smooth_C, weighted_C, float(fixed_N.sum()))

    def value(self, members: Sequence[int], choice: Sequence[int], smoothness: float, kept: dict[int, int]) -> float:
        """Return (5) for the members' choices beside the fixed models and what groups before them took."""
        taken = {**kept, **dict(zip(members, choice, strict=True))}
        rows = [*self.fixed, *(self.models[p][c] for p, c in taken.items())]
        losses = [0.0] * len(self.fixed) + [self.losses[p][c] for p, c in taken.items()]
        return equation_5(rows, losses, smoothness)


def brute_force(problem: Problem, groups: Sequence[Sequence[int]], smoothness: float) -> tuple[list[int], float]:
    """Return each participant's choice, and the smallest gap between the best combination and the second best."""
    kept: dict[int, int] = {}
    gap = math.inf
    for members in groups:
        combinations = list(itertools.product(*(range(len(problem.models[p])) for p in members)))
        values = [problem.value(members, choice, smoothness, kept) for choice in combinations]
        ordered = sorted(values)
        if len(ordered) > 1:
            gap = min(gap, (ordered[1] - ordered[0]) / max(1.0, abs(ordered[0])))
        kept |= dict(zip(members, combinations[values.index(ordered[0])], strict=True))
    return [kept[p] for p in range(len(problem.models))], gap


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    random = np.random.default_rng(draw(st.integers(0, 10_000)))
    participants, columns = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    depths = [draw(st.integers(1, 3)) for _ in range(participants)]
    models = [random.normal(size=(h, columns)).astype(np.float32).astype(np.float64) for h in depths]
    losses = [random.uniform(0, 2, h).tolist() for h in depths]
    fixed = random.normal(size=(draw(st.integers(0, 4)), columns)).astype(np.float32).astype(np.float64)
    return Problem(models, losses, fixed, random.normal(size=columns).astype(np.float32))


def chosen_places(problem: Problem, chosen: Sequence[int]) -> list[int]:
    return [own.index(c) for own, c in zip(problem.candidates().of, chosen, strict=True)]


SMOOTHNESS = st.sampled_from([0.0, 0.1, 1.0, 10.0])


@given(problem=problems(), smoothness=SMOOTHNESS)
def test_equations_5_and_6_agree(problem: Problem, smoothness: float) -> None:
    rows = [*problem.fixed, *(own[0] for own in problem.models)]
    losses = [0.5] * len(rows)
    assert equation_5(rows, losses, smoothness) == pytest.approx(equation_6(rows, losses, smoothness), abs=1e-9)


@examples(300)
@given(problem=problems(), smoothness=SMOOTHNESS, groups=st.integers(1, 5), seed=st.integers(0, 100))
def test_the_search_is_brute_force_on_equation_5(problem: Problem, smoothness: float, groups: int, seed: int) -> None:
    parts = group(len(problem.models), groups, np.random.default_rng(seed))
    expected, gap = brute_force(problem, parts, smoothness)
    assume(gap > 1e-9)
    choice = plan(problem.candidates(smoothness), parts)
    assert chosen_places(problem, choice.chosen) == expected


@examples(300)
@given(problem=problems(), groups=st.integers(1, 5), seed=st.integers(0, 100))
def test_with_a_smoothness_of_each_child_it_is_brute_force_on_the_weighted_sum(
    problem: Problem, groups: int, seed: int
) -> None:
    """FedCDA, conclusion: "improve our method for cases with varying smoothness"."""
    random = np.random.default_rng(seed)
    parts = group(len(problem.models), groups, random)
    fixed, own = random.uniform(0, 5, len(problem.fixed)), random.uniform(0, 5, len(problem.models))
    kept: dict[int, int] = {}
    for members in parts:
        values = {}
        for choice in itertools.product(*(range(len(problem.models[p])) for p in members)):
            taken = {**kept, **dict(zip(members, choice, strict=True))}
            rows = [*problem.fixed, *(problem.models[p][c] for p, c in taken.items())]
            losses = [0.0] * len(problem.fixed) + [problem.losses[p][c] for p, c in taken.items()]
            values[choice] = equation_5(rows, losses, [*fixed, *(own[p] for p in taken)])
        best, *others = sorted(values, key=values.__getitem__)
        assume(not others or values[others[0]] - values[best] > 1e-9 * max(1.0, abs(values[best])))
        kept |= dict(zip(members, best, strict=True))
    choice = plan(problem.candidates(fixed=fixed, own=own), parts)
    assert chosen_places(problem, choice.chosen) == [kept[p] for p in range(len(problem.models))]


@given(problem=problems(), smoothness=SMOOTHNESS, seed=st.integers(0, 100))
def test_no_group_is_worse_off_than_with_all_newest(problem: Problem, smoothness: float, seed: int) -> None:
    parts = group(len(problem.models), 2, np.random.default_rng(seed))
    places = chosen_places(problem, plan(problem.candidates(smoothness), parts).chosen)
    kept: dict[int, int] = {}
    for members in parts:
        chosen = problem.value(members, [places[p] for p in members], smoothness, kept)
        assert chosen <= problem.value(members, [0] * len(members), smoothness, kept) + 1e-9
        kept |= {p: places[p] for p in members}


@given(problem=problems(), groups=st.integers(1, 4))
def test_without_smoothness_each_takes_its_lowest_loss(problem: Problem, groups: int) -> None:
    parts = group(len(problem.models), groups, np.random.default_rng(0))
    places = chosen_places(problem, plan(problem.candidates(0.0), parts).chosen)
    assert places == [own.index(min(own)) for own in problem.losses]


@given(problem=problems(), seed=st.integers(0, 100), scale=st.sampled_from([0.25, 1.0, 64.0]))
def test_a_common_shift_or_scale_changes_no_choice(problem: Problem, seed: int, scale: float) -> None:
    same = Problem(problem.models, [[1.0] * len(own) for own in problem.losses], problem.fixed, problem.reference)
    parts = group(len(problem.models), 2, np.random.default_rng(seed))
    _, gap = brute_force(same, parts, 1.0)
    assume(gap > 1e-6)
    shift = np.random.default_rng(seed).integers(-8, 8, problem.fixed.shape[1]).astype(np.float64)
    moved = Problem(
        [scale * own + shift for own in same.models], same.losses, scale * same.fixed + shift, same.reference
    )
    for one in (same, moved):
        assert chosen_places(one, plan(one.candidates(1.0), parts).chosen) == chosen_places(
            same, plan(same.candidates(1.0), parts).chosen
        )


@given(problem=problems(), seed=st.integers(0, 100))
def test_distances_are_those_to_the_mean_of_all_choices(problem: Problem, seed: int) -> None:
    parts = group(len(problem.models), 2, np.random.default_rng(seed))
    candidates = problem.candidates()
    choice = plan(candidates, parts)
    places = chosen_places(problem, choice.chosen)
    selected = [*problem.fixed, *(own[c] for own, c in zip(problem.models, places, strict=True))]
    mean = sum(selected) / len(selected)
    expected = [float(np.linalg.norm(own[0] - mean)) for own in problem.models]
    found = choice.distances([own[0] for own in candidates.of], len(selected))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_the_newest_wins_ties() -> None:
    row = np.ones((3, 4))
    losses = [[0.5, 0.5, 0.5], [0.5, 0.5 + 1e-15, 0.5 - 1e-15]]
    problem = Problem([row, row], losses, np.ones((1, 4)), np.zeros(4, np.float32))
    candidates = problem.candidates()
    found = search(candidates, candidates.of)
    assert found == [0, 3]
    candidates.losses_C[5] = 0.4999
    found = search(candidates, candidates.of)
    assert found == [0, 5]


@given(participants=st.integers(1, 30), groups=st.integers(1, 40), seed=st.integers(0, 50))
def test_groups_are_of_near_equal_size(participants: int, groups: int, seed: int) -> None:
    parts = group(participants, groups, np.random.default_rng(seed))
    used = min(groups, participants)
    sizes = [participants // used + (b < participants % used) for b in range(used)]
    assert [len(part) for part in parts] == sizes and sorted(itertools.chain(*parts)) == list(range(participants))


def test_ten_thousands_of_combinations_are_searched_at_once() -> None:
    random = np.random.default_rng(1)
    rows = [row.astype(np.float32) for row in random.normal(size=(27, 50))]
    products = gram(rows, np.zeros(50, np.float32))
    losses = random.uniform(0, 1, 27)
    of = [[3 * p, 3 * p + 1, 3 * p + 2] for p in range(9)]
    ones, eleven = np.ones(27), 11  # fixed beside the nine, all at the reference
    found = search(Candidates(products, losses, of, eleven, ones, products.along_K, eleven), of)
    values = []
    for combination in itertools.islice(itertools.product(*of), 0, None, 97):
        c = list(combination)
        g, u, q = products.offsets_KK, products.along_K, products.square
        j = [
            losses[x].sum() / 20 + 0.5 * (g[x, x].sum() / 20 - (q + 2 * u[x].sum() + g[np.ix_(x, x)].sum()) / 400)
            for x in (c, found)
        ]
        values.append(j[0] - j[1])
    assert min(values) >= -1e-12


# The node


def no_rows(name: str, count: int) -> npt.NDArray[np.uint8]:
    raise AssertionError(name)  # it has none


LAYOUT = ModelLayout.build(
    [
        ("w", (5,), Section.PARAMETER),
        ("bn.running_mean", (2,), Section.BUFFER),
        ("bn.num_batches_tracked", (), Section.COUNTER),
    ]
)


@dataclass
class Report:
    samples: int
    loss: float
    path_steps: int = 1
    start_loss: float | None = None


@dataclass
class Node:
    """A node, and a plain-Python twin of its queues."""

    settings: FedCDA
    folder: Path | None = None
    seed: int = 1
    queues: dict[str, deque[tuple[int, Doubles, float]]] = field(default_factory=dict)
    selected: dict[str, tuple[int, Doubles, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        context = RuleContext(LAYOUT, "cloud", self.seed, measures=True, rows=no_rows, folder=self.folder)
        self.rule = CachedUploadRule(self.settings, context)
        row = LAYOUT.empty()
        LAYOUT.floats(row)[:] = 0.5
        LAYOUT.integers(row)[:] = 3
        self.rule.begin(row)

    def play(self, r: int, children: str, *, missing: str = "") -> Aggregated:
        ((dispatched, of),) = self.rule.dispatch(r, list(children))
        assert list(of) == list(children)
        rows_K = np.full((len(children), LAYOUT.row_bytes), 0xFF, np.uint8)
        reports: list[Report | None] = []
        for k, child in enumerate(children):
            random = np.random.default_rng([r, ord(child)])
            reports.append(None if child in missing else Report(10 + ord(child), float(random.uniform(0.5, 1))))
            if child in missing:
                continue
            rows_K[k] = dispatched
            LAYOUT.floats(rows_K[k])[:] += random.normal(size=LAYOUT.columns).astype(np.float32)
            LAYOUT.integers(rows_K[k])[:] = 1000 * r + ord(child)
            queue = self.queues.setdefault(child, deque(maxlen=self.settings.depth))
            queue.append((r, LAYOUT.floats(rows_K[k]).astype(np.float64), reports[k].loss))  # type: ignore[union-attr]
        outcome = self.rule.aggregate(r, Uploads(tuple(children), rows_K, tuple(reports), lambda: None))
        rows_K[:] = 0xFF  # the memory is the next round's
        self.check(r, [child for child in children if child not in missing], outcome)
        return outcome

    def check(self, r: int, participants: list[str], outcome: Aggregated) -> None:
        """Choose by (5) itself, and compare."""
        for child in participants:
            self.selected.pop(child, None)
        if r < self.settings.warmup_rounds:
            self.selected |= {child: self.queues[child][-1] for child in participants}
            samples = np.array([10.0 + ord(child) for child in participants])
            weights = samples / samples.sum() if self.settings.weights == "data" else samples * 0 + 1 / len(samples)
            newest = np.array([self.queues[child][-1][1] for child in participants])
            np.testing.assert_allclose(LAYOUT.floats(self.rule.model), weights @ newest, rtol=0, atol=1e-6)
            return
        draw = generator(self.seed, Purpose.GROUPING, "cloud", r)
        if self.settings.choice == "random":
            cached = {child: list(self.queues[child])[::-1] for child in participants}
            self.selected |= {child: own[draw.integers(len(own))] for child, own in cached.items()}
        for members in group(len(participants), self.settings.groups, draw):
            if self.settings.choice == "random":
                break
            names = [participants[p] for p in members]
            fixed = list(self.selected.values())
            best = min(
                itertools.product(*(list(self.queues[name])[::-1] for name in names)),
                key=lambda choice: equation_5(
                    [x[:5] for _, x, _ in [*fixed, *choice]],
                    [loss for _, _, loss in [*fixed, *choice]],
                    [
                        self.settings.smoothness_of.get(name, self.settings.smoothness)
                        for name in [*self.selected, *names]
                    ],
                ),
            )
            self.selected |= dict(zip(names, best, strict=True))
        assert outcome.facts["selected"] == {child: self.selected[child][0] for child in participants}
        mean = np.mean([x for _, x, _ in self.selected.values()], axis=0)
        np.testing.assert_allclose(LAYOUT.floats(self.rule.model), mean, rtol=0, atol=1e-6)
        first = min(self.selected)
        assert LAYOUT.integers(self.rule.model).tolist() == [1000 * self.selected[first][0] + ord(first)]
        assert outcome.loss == pytest.approx(np.mean([loss for _, _, loss in self.selected.values()]))
        for child in participants:
            distance = np.linalg.norm(self.queues[child][-1][1][:5] - mean[:5])
            assert outcome.distances[child] == pytest.approx(distance, rel=1e-5)


DRAWS = ["abcd", "cdef", "ab", "bdf", "aef", "cd", "abcdef", "ace", "bd", "acdf", "be", "abcf"]


MEMORY_MB = {"files": 0.0, "both": 1.5e-4, "memory": 512.0}


@pytest.mark.parametrize(
    ("memory", "depth", "groups"),
    slow(itertools.product(MEMORY_MB, (1, 2, 3), (1, 2, 5)), but=[
        ("files", 3, 1), ("files", 1, 2), ("both", 2, 1), ("both", 3, 5), ("memory", 3, 2), ("memory", 1, 1),
    ]),
)  # fmt: skip
@pytest.mark.parametrize("of", [{}, {"a": 0.0, "d": 3.0, "f": 0.2}], ids=["equal", "unequal"])
def test_rounds_are_the_twins(tmp_path: Path, depth: int, groups: int, memory: str, of: dict[str, float]) -> None:
    settings = FedCDA(
        depth=depth, groups=groups, warmup_rounds=4, smoothness=0.7, memory_mb=MEMORY_MB[memory], smoothness_of=of
    )
    node = Node(settings, tmp_path / "histories")
    for r, drawn in enumerate(DRAWS):
        outcome = node.play(r, drawn, missing="d" if r in (1, 9) else "")
        assert outcome.facts["seen"] == len(node.selected)
        files = len(list((tmp_path / "histories").iterdir()))
        held = sum(len(queue) for queue in node.queues.values())
        room = int(MEMORY_MB[memory] * 1e6 // LAYOUT.row_bytes)
        assert files == max(0, held - room)


def test_the_sum_that_runs_along_does_not_drift() -> None:
    node = Node(FedCDA(depth=2, groups=2, warmup_rounds=0))
    for r in range(200):
        node.play(r, DRAWS[r % len(DRAWS)])


def test_a_random_choice_takes_each_cached_upload_as_often() -> None:
    """FedCDA, Figure 2 (a): "we randomly select a local model from multiple rounds to aggregate"."""
    node = Node(FedCDA(depth=3, warmup_rounds=0, choice="random"))
    ages: dict[int, int] = dict.fromkeys(range(3), 0)
    for r in range(300):
        outcome = node.play(r, "abcd")
        if r >= 2:
            for chosen in outcome.facts["selected"].values():  # type: ignore[attr-defined]
                ages[r - chosen] += 1
    assert sum(ages.values()) == 4 * 298 and all(abs(count - 4 * 298 / 3) < 60 for count in ages.values())
    again = Node(FedCDA(depth=3, warmup_rounds=0, choice="random"))
    for r in range(3):
        again.play(r, "abcd")
    assert parse({"topology": {"devices": 40}, "cloud": {"aggregation": {"name": "fedcda", "choice": "random"}}})


def test_children_with_a_smoothness_of_their_own_are_there() -> None:
    def tree(name: str) -> dict[str, Any]:
        rule = {"name": "fedcda", "smoothness_of": {name: 2.0}}
        return {"topology": {"institutions": 2, "devices": 4}, "cloud": {"aggregation": rule}}

    assert parse(tree("institution-1"))
    for name, problem in (("institution-2", "no institution or device"), ("device-1", "no institution")):
        with pytest.raises(InvalidExperiment, match=f"cloud.aggregation.smoothness_of.*{problem}"):
            parse(tree(name))


def test_depth_1_is_the_uniform_mean_of_the_newest() -> None:
    nodes = [Node(FedCDA(depth=1, groups=groups, warmup_rounds=0)) for groups in (1, 2, 4)]
    newest: dict[str, Any] = {}
    for r, drawn in enumerate(DRAWS):
        for node in nodes:
            node.play(r, drawn)
        newest |= {child: nodes[0].queues[child][-1][1] for child in drawn}
        mean = np.mean(list(newest.values()), axis=0)
        for node in nodes:
            np.testing.assert_allclose(LAYOUT.floats(node.rule.model), mean, rtol=0, atol=1e-6)
            assert node.rule.model.tobytes() == nodes[0].rule.model.tobytes()


@pytest.mark.parametrize(("history", "left"), [("clear", 0), ("keep", 6)])
def test_a_model_from_above_clears_the_histories_unless_kept(tmp_path: Path, history: Any, left: int) -> None:
    settings = FedCDA(depth=2, warmup_rounds=1, history=history, memory_mb=0.0)
    node = Node(settings, tmp_path / "histories")
    for r in range(3):
        node.play(r, "abc")
    assert settings.remembers == (history == "keep") and not node.rule.reads_start
    model = node.rule.model.copy()
    node.rule.begin(model)
    assert len(list((tmp_path / "histories").iterdir())) == left
    if history == "clear":
        node.queues, node.selected = {}, {}
    outcome = node.play(3, "ad")
    assert outcome.facts["seen"] == (2 if history == "clear" else 4)


@pytest.mark.parametrize("memory_mb", [0.0, 1.5e-4, 512.0], ids=["files", "both", "memory"])
@pytest.mark.parametrize("own", [True, False], ids=["spool", "no spool"])
def test_a_saved_node_goes_on_bit_for_bit(tmp_path: Path, memory_mb: float, own: bool) -> None:
    settings = FedCDA(depth=2, groups=2, warmup_rounds=2, memory_mb=memory_mb, smoothness_of={"b": 4.0})

    def new(name: str) -> Node:
        return Node(settings, tmp_path / name if own else None)

    straight, broken = new("straight"), new("broken")
    for r in range(6):
        straight.play(r, DRAWS[r])
        broken.play(r, DRAWS[r])
    for _ in range(2):  # what is written once is linked thereafter
        saved = tmp_path / "saved"
        if saved.exists():
            for path in saved.iterdir():
                path.unlink()
        saved.mkdir(exist_ok=True)
        facts = broken.rule.save(saved)
    if own:
        for kept in (tmp_path / "broken").iterdir():
            assert kept.samefile(saved / kept.name)
    resumed = new("resumed")
    resumed.queues, resumed.selected = broken.queues, broken.selected
    resumed.rule.begin(broken.rule.model.copy())
    resumed.rule.restore(saved, facts)
    for path in saved.iterdir():
        path.unlink()
    for r in range(6, 12):
        assert resumed.play(r, DRAWS[r]) == straight.play(r, DRAWS[r])
        assert resumed.rule.model.tobytes() == straight.rule.model.tobytes()


@pytest.mark.parametrize(("groups", "drawn"), [(1, 13), (2, 25), (3, 37)])
def test_a_search_that_is_too_long_is_refused_before_the_run(groups: int, drawn: int) -> None:
    def tree(participants: int) -> dict[str, Any]:
        rule = {"name": "fedcda", "groups": groups}
        topology = {"institutions": 2, "devices": 80}
        return {"topology": topology, "institution": {"aggregation": rule, "participation": participants / 40}}

    with pytest.raises(InvalidExperiment) as caught:
        parse(tree(drawn))
    assert str(caught.value).startswith("institution.aggregation.combinations = 1000000: ")
    assert "13 children with 3 uploads each has 3^13" in str(caught.value)
    assert parse(tree(drawn - 1)).tiers[1].aggregation.name == "fedcda"
