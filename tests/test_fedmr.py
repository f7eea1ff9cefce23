"""FedMR: what stays together, and the end of a first stage; test_aggregators.py has its rounds."""

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


def test_a_plan_names_its_permutations() -> None:
    digests = {
        planned(FedMR(), mixing_round(uploads(8), LAYOUT, r=r))[1]["permutations"]
        for r in range(20)
    }
    assert len(digests) == 20


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
