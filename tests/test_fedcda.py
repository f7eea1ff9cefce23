"""FedCDA against brute force on its equation (5), and what its histories must keep."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.methods.baselines.refined import FedDF
from fedstrata.common.methods.fedcda import CachedUploadRule, FedCDA, group
from fedstrata.common.methods.optimisers import FedAdam
from fedstrata.common.methods.rule import Aggregated, RuleContext
from fedstrata.common.model.layout import ModelLayout, Section
from fedstrata.common.randomness import Purpose, generator
from tests.helpers.commands import tensors
from tests.helpers.direct import events, run_direct
from tests.helpers.examples import slow
from tests.helpers.rules import AddingRefiner, Report, aggregate

Doubles = npt.NDArray[np.float64]


def equation_5(
    rows: Sequence[Doubles], losses: Sequence[float], smoothness: Sequence[float]
) -> float:
    """Return (5) with the smoothness of each child, as the weighted sum of the module's docstring."""
    n = len(rows)
    mean = sum(rows) / n
    apart = sum(
        each * float(((row - mean) ** 2).sum()) for each, row in zip(smoothness, rows, strict=True)
    )
    return sum(losses) / n + apart / (2 * n)


@given(participants=st.integers(1, 30), groups=st.integers(1, 40), seed=st.integers(0, 50))
def test_groups_are_of_near_equal_size(participants: int, groups: int, seed: int) -> None:
    parts = group(participants, groups, np.random.default_rng(seed))
    used = min(groups, participants)
    sizes = [participants // used + (b < participants % used) for b in range(used)]
    assert [len(part) for part in parts] == sizes and sorted(itertools.chain(*parts)) == list(
        range(participants)
    )


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
class Node:
    """A node, and a plain-Python twin of its queues."""

    settings: FedCDA
    folder: Path | None = None
    seed: int = 1
    refiner: AddingRefiner | None = None
    queues: dict[str, deque[tuple[int, Doubles, float]]] = field(default_factory=dict)
    selected: dict[str, tuple[int, Doubles, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        context = RuleContext(
            LAYOUT,
            "cloud",
            self.seed,
            measures=True,
            rows=no_rows,
            folder=self.folder,
            refiner=self.refiner,
        )
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
            reports.append(
                None if child in missing else Report(10 + ord(child), float(random.uniform(0.5, 1)))
            )
            if child in missing:
                continue
            rows_K[k] = dispatched
            LAYOUT.floats(rows_K[k])[:] += random.normal(size=LAYOUT.columns).astype(np.float32)
            LAYOUT.integers(rows_K[k])[:] = 1000 * r + ord(child)
            queue = self.queues.setdefault(child, deque(maxlen=self.settings.depth))
            queue.append((r, LAYOUT.floats(rows_K[k]).astype(np.float64), reports[k].loss))  # type: ignore[union-attr]
        outcome = aggregate(self.rule, r, children, rows_K, reports)
        rows_K[:] = 0xFF  # the memory is the next round's
        if self.refiner is not None or self.settings.warmup is not None:
            return outcome  # their tests check it
        self.check(r, [child for child in children if child not in missing], outcome)
        return outcome

    def check(self, r: int, participants: list[str], outcome: Aggregated) -> None:
        """Choose by (5) itself, and compare."""
        for child in participants:
            self.selected.pop(child, None)
        if r < self.settings.warmup_rounds:
            self.selected |= {child: self.queues[child][-1] for child in participants}
            samples = np.array([10.0 + ord(child) for child in participants])
            weights = (
                samples / samples.sum()
                if self.settings.weights == "data"
                else samples * 0 + 1 / len(samples)
            )
            newest = np.array([self.queues[child][-1][1] for child in participants])
            np.testing.assert_allclose(
                LAYOUT.floats(self.rule.model), weights @ newest, rtol=0, atol=1e-6
            )
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
        assert outcome.facts["selected"] == {
            child: self.selected[child][0] for child in participants
        }
        mean = np.mean([x for _, x, _ in self.selected.values()], axis=0)
        np.testing.assert_allclose(LAYOUT.floats(self.rule.model), mean, rtol=0, atol=1e-6)
        first = min(self.selected)
        assert LAYOUT.integers(self.rule.model).tolist() == [
            1000 * self.selected[first][0] + ord(first)
        ]
        assert outcome.loss == pytest.approx(
            np.mean([loss for _, _, loss in self.selected.values()])
        )
        for child in participants:
            distance = np.linalg.norm(self.queues[child][-1][1][:5] - mean[:5])
            assert outcome.distances[child] == pytest.approx(distance, rel=1e-5)


DRAWS = ["abcd", "cdef", "ab", "bdf", "aef", "cd", "abcdef", "ace", "bd", "acdf", "be", "abcf"]


MEMORY_MB = {"files": 0.0, "both": 1.5e-4, "memory": 512.0}


@pytest.mark.parametrize(
    ("memory", "depth", "groups"),
    slow(itertools.product(MEMORY_MB, (1, 2, 3), (1, 2, 5)), but=[
        ("files", 3, 1), ("files", 1, 2), ("both", 2, 1), ("both", 3, 5), ("memory", 3, 2),
        ("memory", 1, 1),
    ]),
)  # fmt: skip
@pytest.mark.parametrize("of", [{}, {"a": 0.0, "d": 3.0, "f": 0.2}], ids=["equal", "unequal"])
def test_rounds_are_the_twins(
    tmp_path: Path, depth: int, groups: int, memory: str, of: dict[str, float]
) -> None:
    settings = FedCDA(
        depth=depth,
        groups=groups,
        warmup_rounds=4,
        smoothness=0.7,
        memory_mb=MEMORY_MB[memory],
        smoothness_of=of,
    )
    node = Node(settings, tmp_path / "histories")
    for r, drawn in enumerate(DRAWS):
        outcome = node.play(r, drawn, missing="d" if r in (1, 9) else "")
        assert outcome.facts["seen"] == len(node.selected)
        files = len(list((tmp_path / "histories").iterdir()))
        held = sum(len(queue) for queue in node.queues.values())
        room = int(MEMORY_MB[memory] * 1e6 // LAYOUT.row_bytes)
        assert files == max(0, held - room)


@pytest.mark.parametrize(("oldest", "chosen"), [(0.5 - 1e-15, 2), (0.4999, 0)])
def test_the_newest_wins_ties(oldest: float, chosen: int) -> None:
    rule = Node(FedCDA(depth=3, warmup_rounds=0)).rule
    for r, loss in enumerate((oldest, 0.5 + 1e-15, 0.5)):
        ((row, _),) = rule.dispatch(r, "ab")
        outcome = aggregate(rule, r, "ab", np.stack([row, row]), [Report(1, loss)] * 2)
    assert outcome.facts["selected"] == {"a": chosen, "b": chosen}


def test_the_sum_that_runs_along_does_not_drift() -> None:
    node = Node(FedCDA(depth=2, groups=2, warmup_rounds=0))
    for r in range(200):
        node.play(r, DRAWS[r % len(DRAWS)])


def adam_twin(state: dict[str, Doubles], z: Doubles, mean: Doubles, *, rate: float) -> Doubles:
    """Take a step of Reddi et al., Algorithm 2, with beta 0.9 and 0.99, tau 0.001."""
    delta = mean - z
    state["m"] = 0.9 * state.get("m", 0 * z) + 0.1 * delta
    state["v"] = 0.99 * state.get("v", 0 * z + 1e-6) + 0.01 * delta**2
    return z + rate * state["m"] / (np.sqrt(state["v"]) + 1e-3)


def test_the_warm_up_may_take_the_steps_of_a_server(tmp_path: Path) -> None:
    """Warm-up rounds are those of FedAdam written out, also of a restored node; then the selection
    is FedCDA's.
    """
    settings = FedCDA(depth=2, warmup_rounds=5, warmup=FedAdam(name="fedadam", learning_rate=0.3))
    node, state = Node(settings), dict[str, Doubles]()
    z = np.full(5, 0.5)
    for r, drawn in enumerate(DRAWS[:5]):
        if r == 3:
            facts, old = node.rule.save(tmp_path), node
            node = Node(settings)
            node.rule.begin(old.rule.model.copy())
            node.rule.restore(tmp_path, facts)
            node.queues = old.queues
        assert node.play(r, drawn).facts["stage"] == "warm-up"
        newest = np.array([node.queues[child][-1][1] for child in drawn])
        samples = np.array([10.0 + ord(child) for child in drawn])
        mean = samples / samples.sum() @ newest
        z = adam_twin(state, z, mean[:5], rate=0.3)
        np.testing.assert_allclose(LAYOUT.floats(node.rule.model)[:5], z, rtol=0, atol=1e-5)
        np.testing.assert_allclose(LAYOUT.floats(node.rule.model)[5:], mean[5:], rtol=0, atol=1e-6)
    outcome = node.play(5, "ab")
    selected = outcome.facts["selected"]
    assert isinstance(selected, dict)
    chosen = [next(x for r, x, _ in node.queues[child] if r == selected[child]) for child in "ab"]
    absent = [queue[-1][1] for child, queue in node.queues.items() if child not in "ab"]
    mean = np.mean([*chosen, *absent], axis=0)
    np.testing.assert_allclose(LAYOUT.floats(node.rule.model), mean, rtol=0, atol=1e-6)
    assert settings.remembers and settings.acts_from == 1


@pytest.mark.parametrize("memory_mb", [0.0, 512.0], ids=["files", "memory"])
def test_what_is_selected_teaches_the_mean(tmp_path: Path, memory_mb: float) -> None:
    """The teachers are the selected uploads of all children with equal weights; the student begins
    as their mean.
    """
    plain = Node(
        FedCDA(depth=2, groups=2, warmup_rounds=2, memory_mb=memory_mb), tmp_path / "plain"
    )
    settings = FedCDA(depth=2, groups=2, warmup_rounds=2, memory_mb=memory_mb, refine=FedDF())
    refiner = AddingRefiner(kept_step=7)
    node = Node(settings, tmp_path / "refined", refiner=refiner)
    for r in range(3):
        before = node.rule.model.copy() if r else None
        wanted, found = plain.play(r, DRAWS[r]), node.play(r, DRAWS[r])
    (models,) = refiner.asked  # none in the warm-up
    teachers = [LAYOUT.floats(row).astype(np.float64) for row in models.uploads]
    selected = [plain.selected[child][1] for child in sorted(plain.selected)]
    np.testing.assert_array_equal(teachers, selected)
    assert (
        before is not None
        and np.array_equal(models.received, before)
        and models.weights_K.tolist() == [1 / 6] * 6
    )
    moved = LAYOUT.floats(plain.rule.model) + np.repeat(np.array([1, 0], np.float32), [5, 2])
    np.testing.assert_array_equal(LAYOUT.floats(node.rule.model), moved)
    assert found.facts == {**wanted.facts, "kept_step": 7} and found.loss == wanted.loss
    for child in DRAWS[2]:
        far = np.linalg.norm(node.queues[child][-1][1][:5] - LAYOUT.floats(node.rule.model)[:5])
        assert found.distances[child] == pytest.approx(far, rel=1e-5)


def test_a_lab_distils_behind_the_selection(tmp_path: Path) -> None:
    """A lab whose last plan has less divergence, with FedDF's steps; without steps it is FedCDA bit
    for bit.
    """

    def lab(**rule: Any) -> dict[str, Any]:
        return {
            "rounds": 3,
            "topology": {"institutions": 0, "devices": 4},
            "model": {"name": "mlp_digits"},
            "data": {"node_samples": 40, "partition": "dirichlet", "concentration": 0.1},
            "training": {"batch_size": 50, "learning_rate": 0.05},
            "cloud": {"aggregation": {"name": "fedcda", "warmup_rounds": 1, **rule}},
        }

    done = run_direct(tmp_path / "one", lab(refine={"name": "feddf", "steps": 60}))
    first, *later = events(done, "plan")
    assert "steps" not in first and len(later) == 2
    for facts in later:
        assert facts["steps"] == 60 and 0 < facts["divergence_after"] < facts["divergence_before"]
    null, plain = (run_direct(tmp_path / name, lab(**rule)) for name, rule in
                   (("null", {"refine": {"name": "feddf", "steps": 0}}), ("plain", {})))  # fmt: skip
    assert tensors(null) == tensors(plain) != tensors(done)


def test_a_random_choice_takes_each_cached_upload() -> None:
    """FedCDA, Figure 2 (a): "we randomly select a local model from multiple rounds to aggregate"."""
    node = Node(FedCDA(depth=3, warmup_rounds=0, choice="random"))
    facts: list[Any] = [node.play(r, "abcd").facts["selected"] for r in range(60)]
    ages = Counter(r - chosen for r in range(2, 60) for chosen in facts[r].values())
    assert ages.total() == 4 * 58 and all(abs(ages[age] - 4 * 58 / 3) < 26 for age in range(3))


@pytest.mark.parametrize(("history", "left"), [("clear", 0), ("keep", 6)])
def test_a_model_from_above_clears_the_histories_unless_kept(
    tmp_path: Path, history: Any, left: int
) -> None:
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
    settings = FedCDA(
        depth=2, groups=2, warmup_rounds=2, memory_mb=memory_mb, smoothness_of={"b": 4.0}
    )

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
