"""A node's rounds with each rule: what its children get, and what becomes of what they send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from common.aggregation.aggregator import Aggregator, Outcome, Uploads, build
from common.layout import ModelLayout, Row, Section
from common.spec import parse

Rows = npt.NDArray[np.uint8]

LAYOUT = ModelLayout.build(
    [
        ("conv.weight", (3, 2), Section.PARAMETER),
        ("conv.bias", (3,), Section.PARAMETER),
        ("bn.weight", (3,), Section.PARAMETER),
        ("bn.running_mean", (3,), Section.BUFFER),
        ("bn.running_var", (3,), Section.BUFFER),
        ("bn.num_batches_tracked", (), Section.COUNTER),
        ("fc.weight", (2, 3), Section.PARAMETER),
    ]
)


@dataclass
class Report:
    samples: int
    loss: float


def aggregator(
    settings: dict[str, Any], *, node: str = "cloud", seed: int = 1, folder: Path | None = None
) -> Aggregator:
    rule = parse({"cloud": {"aggregation": settings}}).cloud.aggregation
    memory: dict[str, Rows] = {}

    def rows(name: str, count: int) -> Rows:
        return memory.setdefault(name, np.empty((count, LAYOUT.row_bytes), np.uint8))

    return build(rule, layout=LAYOUT, node=node, tier="cloud", seed=seed, rows=rows, folder=folder)


def first_model(seed: int = 0) -> Row:
    row = LAYOUT.empty()
    LAYOUT.floats(row)[:] = np.random.default_rng(seed).normal(size=LAYOUT.columns)
    LAYOUT.integers(row)[:] = seed
    return row


def train(row: Row, child: str, r: int, *, pull: float = 0.3) -> Row:
    """Return what a child makes of a model: a step towards a point of its own, with noise of its own."""
    step = np.random.default_rng([r, *child.encode()])
    target = np.random.default_rng(list(child.encode())).normal(size=LAYOUT.columns)
    trained = row.copy()
    floats = LAYOUT.floats(trained)
    floats += (pull * (target - floats) + 0.05 * step.normal(size=LAYOUT.columns)).astype(np.float32)
    LAYOUT.integers(trained)[:] += 7
    return trained


def play(rule: Aggregator, r: int, children: Sequence[str], *, missing: Sequence[str] = ()) -> tuple[Uploads, Outcome]:
    """Play one round; return its uploads as they were before they were aggregated."""
    models = rule.dispatch(r, children)
    rows_K = np.full((len(models), LAYOUT.row_bytes), 0xFF, np.uint8)  # NaN
    reports: list[Report | None] = []
    for k, (child, row) in enumerate(models.items()):
        if child in missing:
            reports.append(None)
            continue
        rows_K[k] = train(row, child, r)
        reports.append(Report(10 * (children.index(child) + 1), 1.0 + children.index(child)))
    uploads = Uploads(tuple(models), rows_K, tuple(reports), lambda: None)
    before = Uploads(uploads.children, rows_K.copy(), uploads.reports, uploads.release)
    return before, rule.aggregate(r, uploads)


CHILDREN = ("a", "b", "c", "d")


@pytest.mark.parametrize("name", ["fedavg", "independent", "fedcross"])
def test_all_children_start_from_one_array(name: str) -> None:
    rule, model = aggregator({"name": name}), first_model()
    rule.begin(model)
    rows = rule.dispatch(0, CHILDREN)
    assert set(rows) == set(CHILDREN) and all(row is model for row in rows.values())
    play(rule, 0, CHILDREN, missing=["b"])
    assert np.isfinite(LAYOUT.floats(rule.model)).all()
