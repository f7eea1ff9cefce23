"""FedMR: what stays together, that nothing is lost, and that permutations are what they are drawn
to be.
"""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.methods import mixing
from fedstrata.common.methods.fedmr import FedMR, layers
from fedstrata.common.model.layout import ModelLayout, Section
from tests.helpers import rules
from tests.helpers.rules import Report, mixing_round, planned

Rows = npt.NDArray[np.uint8]

ENTRIES = [
    ("conv.weight", (3, 2), Section.PARAMETER),
    ("conv.bias", (3,), Section.PARAMETER),
    ("bn.weight", (3,), Section.PARAMETER),
    ("bn.bias", (3,), Section.PARAMETER),
    ("bn.running_mean", (3,), Section.BUFFER),
    ("bn.running_var", (3,), Section.BUFFER),
    ("bn.num_batches_tracked", (), Section.COUNTER),
    ("block.0.weight", (2, 3), Section.PARAMETER),
    ("block.1.running_mean", (2,), Section.BUFFER),
    ("fc.weight", (2, 3), Section.PARAMETER),
    ("fc.bias", (2,), Section.PARAMETER),
]
LAYOUT = ModelLayout.build(ENTRIES)
GRANULARITIES: list[dict[str, Any]] = [
    {"granularity": "module"},
    {"granularity": "key"},
    {"granularity": "model"},
    {"granularity": "block", "block_fraction": 0.3},
]


@pytest.mark.parametrize("name", ["fedmr", "fedcross"])
def test_a_loss_ends_the_first_stage_for_good(name: str, tmp_path: Path) -> None:
    """The mean of the uploads' losses, by the rule's weights; a loss that rises again does not
    begin another one.
    """
    losses = [0.9, 0.61, 0.6, 2.0, 0.1]  # of children with equal weights: their mean in each round
    tree = {"name": name, "first_stage_rounds": 9, "first_stage_loss": 0.6}
    rule, stages = rules.rule_of(tree, layout=LAYOUT), []
    for r, loss in enumerate(losses):
        assert len(rule.dispatch(r, "abc")) == (1 if r < 3 else 3)
        reports = [Report(7, loss - 0.05), Report(70, loss + 0.05), Report(7, loss)]
        stages.append(rules.aggregate(rule, r, "abc", uploads(3), reports).facts["stage"])
        (folder := tmp_path / f"{r}").mkdir()
        saved, model = rule.save(folder), rule.model.copy()
        rule = rules.rule_of(tree, layout=LAYOUT)
        rule.begin(model)
        rule.restore(folder, saved)
    assert [stage == "first" for stage in stages] == [True, True, False, False, False]
    assert FedMR(first_stage_rounds=9, first_stage_loss=0.6).remembers


def settings_of(tree: dict[str, Any]) -> FedMR:
    return FedMR.model_validate(tree)


def names(tree: dict[str, Any], layout: ModelLayout = LAYOUT) -> list[list[str]]:
    return [[entry.name for entry in layer] for layer in layers(settings_of(tree), layout)]


def uploads(count: int) -> Rows:
    """Return rows in which every value reports from which row and column it is."""
    rows_K = np.zeros((count, LAYOUT.row_bytes), np.uint8)
    LAYOUT.floats(rows_K)[:] = np.arange(count * LAYOUT.columns).reshape(count, -1)
    for k, row in enumerate(rows_K):
        LAYOUT.integers(row)[:] = 2**40 + k
    return rows_K


def recombined(
    tree: dict[str, Any], rows_K: Rows, *, seed: int = 1, r: int = 0, in_place: bool = False
) -> Rows:
    parts, _ = planned(settings_of(tree), mixing_round(rows_K, LAYOUT, r=r, seed=seed))
    out = rows_K if in_place else np.zeros_like(rows_K)
    mixing.apply(parts, rows_K, layout=LAYOUT, out=list(out))
    return out


def sources(rows_K: Rows) -> list[dict[str, int]]:
    """Return, for each row and entry, the upload from which it came: the same one for all of its
    values.
    """
    found = []
    for row in rows_K:
        views = LAYOUT.views(row)
        origin: dict[str, int] = {}
        for name, _, section in ENTRIES:
            values = views[name].ravel().astype(np.int64)
            rows = (
                {int(v - 2**40) for v in values}
                if section is Section.COUNTER
                else set(values // LAYOUT.columns)
            )
            assert len(rows) == 1
            origin[name] = int(rows.pop())
        found.append(origin)
    return found


# What stays together


def test_a_layer_is_a_module_with_all_that_it_has() -> None:
    assert names({"granularity": "module"}) == [
        ["conv.weight", "conv.bias"],
        ["bn.weight", "bn.bias", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked"],
        ["block.0.weight"],
        ["fc.weight", "fc.bias"],
        ["block.1.running_mean"],  # a module without parameters comes last
    ]


def test_keys_and_the_whole_model() -> None:
    assert sorted(names({"granularity": "key"})) == sorted([name] for name, _, _ in ENTRIES)
    assert len(names({"granularity": "model"})) == 1 and len(
        names({"granularity": "model"})[0]
    ) == len(ENTRIES)


def block_twin(count: int, fraction: float) -> list[list[int]]:
    """Begin a new block whenever the entry's index reaches count * fraction * (blocks begun)."""
    blocks: list[list[int]] = []
    for i in range(count):
        if not blocks or i >= round(count * fraction * len(blocks), 9):
            blocks.append([])
        blocks[-1].append(i)
    return blocks


@given(count=st.integers(1, 60), fraction=st.integers(1, 40).map(lambda part: part / 40))
def test_blocks_are_runs_of_about_a_fraction(count: int, fraction: float) -> None:
    layout = ModelLayout.build(
        [(f"layer{i}.weight", (1,), Section.PARAMETER) for i in range(count)]
    )
    found = names({"granularity": "block", "block_fraction": fraction}, layout)
    assert found == [[f"layer{i}.weight" for i in block] for block in block_twin(count, fraction)]


# What recombination does


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tree", GRANULARITIES, ids=lambda tree: tree["granularity"])
@pytest.mark.parametrize("count", [2, 7])
def test_every_tensor_of_every_upload_is_used_once(
    tree: dict[str, Any], count: int, in_place: bool
) -> None:
    rows_K = uploads(count)
    for r in range(5):
        before = rows_K.copy()
        after = recombined(tree, rows_K, r=r, in_place=in_place)
        for name, _, _ in ENTRIES:
            tensors = [
                Counter(LAYOUT.views(row)[name].tobytes() for row in rows)
                for rows in (before, after)
            ]
            assert tensors[0] == tensors[1]
        np.testing.assert_array_equal(
            LAYOUT.floats(after).mean(axis=0), LAYOUT.floats(before).mean(axis=0)
        )


@pytest.mark.parametrize("tree", GRANULARITIES, ids=lambda tree: tree["granularity"])
def test_what_stays_together_has_one_source(tree: dict[str, Any]) -> None:
    apart = set()
    for r in range(20):
        for origin in sources(recombined(tree, uploads(6), r=r)):
            for layer in names(tree):
                assert len({origin[name] for name in layer}) == 1
            apart.add(len(set(origin.values())))
    assert (max(apart) == 1) == (tree["granularity"] == "model")


# Permutations


def orders(seed: int, r: int, node: str = "cloud", count: int = 3) -> list[tuple[int, ...]]:
    parts, _ = planned(FedMR(), mixing_round(uploads(count), LAYOUT, r=r, seed=seed, node=node))
    return [tuple(mixture.indices[0] for mixture in part.mixtures) for part in parts]


def chi_square(counts: Counter[Any], cells: int) -> float:
    expected = counts.total() / cells
    return sum((counts.get(cell, 0) - expected) ** 2 / expected for cell in range(cells))


def test_permutations_are_uniform_and_independent() -> None:
    index = {order: i for i, order in enumerate(permutations(range(3)))}
    first, both, successive = Counter[int](), Counter[int](), Counter[int]()
    for seed in range(1000):
        here, next_ = orders(seed, 0), orders(seed, 1)
        first[index[here[0]]] += 1
        both[6 * index[here[0]] + index[here[1]]] += 1
        successive[6 * index[here[0]] + index[next_[0]]] += 1
    # The 99.9 % points of chi-square with 5 and with 35 degrees of freedom; the seeds are always
    # the same.
    assert (
        chi_square(first, 6) < 20.5
        and chi_square(both, 36) < 66.6
        and chi_square(successive, 36) < 66.6
    )


def test_rounds_seeds_and_nodes_draw_for_themselves() -> None:
    drawn = [
        orders(1, 0, count=8),
        orders(1, 1, count=8),
        orders(2, 0, count=8),
        orders(1, 0, "other", count=8),
    ]
    assert len({tuple(one) for one in drawn}) == 4
    assert drawn[0] == orders(1, 0, count=8)
    digests = {
        planned(FedMR(), mixing_round(uploads(8), LAYOUT, r=r))[1]["permutations"]
        for r in range(20)
    }
    assert len(digests) == 20
