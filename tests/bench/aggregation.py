"""`make bench NAME=aggregation`: what aggregation costs on one core, ResNet-18's rows mixed,
measured and selected.

The kernel is measured beside the memory traffic that it must have, at the speed of memcpy (bytes
read and written, row by row, in the same run), and beside a loop over the state's keys in torch as
public code has it. The Gram matrix is measured beside float64 BLAS on blocks, which is what remains
of it without reference row and norms. FedCDA's planning is measured beside one pass over its
candidates, on a small model unless `--full` is given: then 100 histories of ResNet-18, 13.4 GB, lie
in a folder (`--folder`).
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch

from fedstrata.common.learning import models
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.methods import fedcross, mixing
from fedstrata.common.methods.aggregator import build
from fedstrata.common.methods.fedcda import FedCDA
from fedstrata.common.methods.fedcross import FedCrossStage
from fedstrata.common.methods.fedmr import FedMR
from fedstrata.common.methods.mixing import MixedColumns, Mixture, whole
from fedstrata.common.methods.rule import Rule, RuleContext, link_layouts
from fedstrata.common.methods.settings import RULES, RuleSettings
from fedstrata.common.methods.statistics import Gram
from fedstrata.common.model.layout import ModelLayout
from tests.bench.running import MB, Table, folder, least_s, on_one_core, peak_bytes, run
from tests.helpers.rules import LEAST, Report, aggregate, mixing_round, planned

REPEATS = 5
MODELS = (10, 40)

Rows = npt.NDArray[np.uint8]
States = list[dict[str, torch.Tensor]]


def rows_of(layout: ModelLayout, count: int) -> Rows:
    """Return models that differ a little."""
    rows_K = np.zeros((count, layout.row_bytes), np.uint8)
    base = np.random.default_rng(0).standard_normal(layout.columns, np.float32)
    for k, row in enumerate(rows_K):
        noise = np.random.default_rng(k).standard_normal(layout.columns, np.float32)
        layout.floats(row)[:] = base + np.float32(0.01) * noise
    return rows_K


# As public code does it


def torch_fedavg(states: States, shares: list[float]) -> dict[str, torch.Tensor]:
    """Sum key by key."""
    mean = {}
    for key in states[0]:
        mean[key] = states[0][key] * shares[0]
        for state, share in zip(states[1:], shares[1:], strict=True):
            mean[key] += state[key] * share
    return mean


def torch_fedcross(states: States, alpha: float) -> States:
    """Mix each model with the next one, key by key."""
    partners = [*states[1:], states[0]]
    return [
        {key: alpha * one[key] + (1.0 - alpha) * other[key] for key in one}
        for one, other in zip(states, partners, strict=True)
    ]


def torch_fedmr(states: States) -> States:
    """Deal each key's tensors anew."""
    dealt: States = [{} for _ in states]
    for key in states[0]:
        for target, source in zip(
            dealt, np.random.default_rng(0).permutation(len(states)), strict=True
        ):
            target[key] = states[source][key].clone()
    return dealt


def torch_cosines(states: States) -> list[torch.Tensor]:
    """Compare each pair of models, flattened."""
    flat = [torch.cat([tensor.flatten() for tensor in state.values()]) for state in states]
    return [torch.cosine_similarity(x, y, dim=0) for i, x in enumerate(flat) for y in flat[i + 1 :]]


# Ours


def kernel(layout: ModelLayout, count: int, table: Table) -> None:
    """Measure the kernel and the Gram matrix with K models."""
    rows_K = rows_of(layout, count)
    out = np.zeros_like(rows_K)
    states = [
        {name: torch.from_numpy(view) for name, view in layout.views(row).items()} for row in rows_K
    ]
    weights = 1 + 0.01 * np.arange(count)
    shares = (weights / weights.sum()).tolist()
    alone = FedCrossStage("plain", 0.99, 1, similar=False)
    crossed = fedcross.mixing_matrix(alone, [fedcross.in_order(0, count)], count)

    def copy() -> None:
        for target, source in zip(out, rows_K, strict=True):
            np.copyto(target, source)

    def row(
        name: str,
        plan: Sequence[MixedColumns],
        target: Sequence[Rows],
        public_code: Callable[[], object],
    ) -> None:
        memcpy_s, ours_s = least_s(
            REPEATS, copy, lambda: mixing.apply(plan, rows_K, layout=layout, out=target)
        )
        moved = (len(target) + count) / (2 * count)
        line(table, name, count, ours_s, memcpy_s * moved, public_code)

    dealt = planned(FedMR(), mixing_round(rows_K, layout))[0]
    in_order = whole(layout, list(map(Mixture.of, crossed)))
    row("FedMR, module", dealt, list(out), partial(torch_fedmr, states))
    row("FedCross, in order", in_order, list(out), partial(torch_fedcross, states, 0.99))
    mean = whole(layout, [Mixture.of(shares)])
    row("FedAvg", mean, [out[0]], partial(torch_fedavg, states, shares))
    trainable = list(layout.floats(rows_K)[:, : layout.parameters])
    ours_s, *blas_s = least_s(
        REPEATS,
        partial(Gram.of, trainable, trainable[0]),
        *(partial(blas, layout, rows_K, width) for width in (2048, 4096, 16_384)),
    )
    line(table, "Gram matrix", count, ours_s, min(blas_s), partial(torch_cosines, states))


def line(
    table: Table,
    name: str,
    count: int,
    ours_s: float,
    bound_s: float,
    public_code: Callable[[], object],
) -> None:
    """Measure public code, and print a row."""
    (torch_s,) = least_s(1, public_code)
    table.add(
        name,
        count,
        f"{ours_s * 1e3:.0f} ms",
        f"{bound_s * 1e3:.0f} ms",
        f"{ours_s / bound_s:.2f}",
        f"{torch_s / ours_s:.1f}",
    )


def blas(layout: ModelLayout, rows_K: Rows, width: int) -> npt.NDArray[np.float64]:
    """Multiply the rows by themselves in float64, block by block, and nothing else."""
    models_KD = layout.floats(rows_K)[:, : layout.parameters]
    held_KC, total_KK = np.empty((len(rows_K), width)), np.zeros((len(rows_K), len(rows_K)))
    for start in range(0, layout.parameters - width + 1, width):
        held_KC[:] = models_KD[:, start : start + width]
        total_KK += held_KC @ held_KC.T
    return total_KK


def node(settings: RuleSettings, layout: ModelLayout, **more: Any) -> Rule:
    """Return a node that keeps its models in memory; `more`: of its context."""

    def rows(name: str, count: int) -> Rows:
        return np.zeros((count, layout.row_bytes), np.uint8)

    context = RuleContext(layout, "cloud", 1, measures=False, rows=rows, **more)
    return build(settings, context)


def rounds(layout: ModelLayout, count: int, table: Table) -> None:
    """Measure a whole round of each rule: mean, statistics, plan, mixing."""
    models_K = rows_of(layout, count)
    children = tuple(f"child-{k}" for k in range(count))
    reports = [Report(100 + k, 0.5) for k in range(count)]
    for name, kind in RULES.items():
        more: dict[str, Any] = {}
        if kind is FedCDA:
            more = {"warmup_rounds": 0, "memory_mb": 1e6, "groups": 10}
        settings = kind(**LEAST[name], **more)
        rule = node(settings, layout, children=count)
        rule.begin(models_K[0].copy())
        extras = link_layouts(settings, layout).up.row_bytes - layout.row_bytes
        rows_K = np.pad(models_K, ((0, 0), (0, extras))) if extras else models_K
        numbers = itertools.count()

        def play(
            rule: Rule = rule, rows_K: Rows = rows_K, numbers: Iterator[int] = numbers
        ) -> None:
            r = next(numbers)
            rule.dispatch(r, children)
            aggregate(rule, r, children, rows_K, reports)

        (seconds,) = least_s(3, play)
        table.add(name, count, f"{seconds * 1e3:.0f} ms")


def cached(
    layout: ModelLayout, home: Path, *, children: int, drawn: int, groups: int, table: Table
) -> None:
    """Measure FedCDA's rounds with histories in files."""
    settings = FedCDA(groups=groups, warmup_rounds=0, memory_mb=0.0)
    rule = node(settings, layout, folder=home / "histories")
    rows_K = rows_of(layout, drawn)
    rule.begin(rows_K[0].copy())
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = peak_bytes()
    times = []
    for r in range(4 * children // drawn):
        members = [(r * drawn + k) % children for k in range(drawn)]
        layout.floats(rows_K)[:, :1000] += np.float32(0.01) * (r + 1)
        names = [f"child-{m}" for m in members]
        reports = [Report(100, 1 / (m + r + 1)) for m in members]
        started = time.perf_counter()
        aggregate(rule, r, names, rows_K, reports)
        times.append(time.perf_counter() - started)
    grown = peak_bytes() - before
    candidates = list((home / "histories").iterdir())[: settings.depth * drawn]
    (pass_s,) = least_s(2, lambda: [np.fromfile(path, np.uint8).sum() for path in candidates])
    last_s = min(times[-children // drawn :])
    table.add(
        f"{children} children, {drawn} drawn, B = {groups}",
        f"{children * settings.depth * layout.row_bytes / MB:.0f} MB",
        f"{last_s * 1e3:.0f} ms",
        f"{last_s / pass_s:.2f}",
        f"{grown / MB:.0f} MB",
        f"{grown / layout.row_bytes:.1f}",
    )


def layout_of(name: str, *shape: int) -> ModelLayout:
    """Return a model's layout."""
    return models.layout_of(models.build(name, 1, inputs=Inputs(shape, 10)))


def main(
    *,
    full: Annotated[bool, "FedCDA's histories are ResNet-18's"] = False,
    folder_: Path | None = None,
) -> None:
    """Measure and print the tables."""
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":  # before numpy is loaded
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    on_one_core()
    torch.set_num_threads(1)
    layout = layout_of("resnet18_cifar", 3, 32, 32)
    bound = "bound: the traffic at memcpy's speed; for the Gram matrix, float64 BLAS on blocks"
    table = Table("plan", "K", "time", "bound", "x bound", "torch / ours", title=bound)
    for count in MODELS:
        kernel(layout, count, table)
    table = Table("a round at an institution", "K", "time")
    for count in MODELS:
        rounds(layout, count, table)
    table = Table(
        "FedCDA, H = 3, files",
        "on disk",
        "a round",
        "x reading the candidates",
        "memory",
        "in models",
    )
    if not full:
        layout = layout_of("cnn_digits", 1, 8, 8)
    for children, drawn, groups in ((20, 4, 3), (100, 10, 10)):
        with folder(folder_) as home:
            cached(layout, home, children=children, drawn=drawn, groups=groups, table=table)


if __name__ == "__main__":
    run(main)
