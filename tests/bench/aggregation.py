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

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table

from fedstrata.common.learning import models
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.methods import fedcross, mixing
from fedstrata.common.methods.aggregator import build
from fedstrata.common.methods.fedcda import FedCDA
from fedstrata.common.methods.fedcross import FedCrossStage
from fedstrata.common.methods.fedmr import FedMR
from fedstrata.common.methods.mixing import Mixture, whole
from fedstrata.common.methods.rule import Rule, RuleContext, Uploads
from fedstrata.common.methods.settings import RULES, RuleSettings
from fedstrata.common.methods.statistics import Gram
from fedstrata.common.model.layout import ModelLayout
from tests.helpers.rules import LEAST, mixing_round, planned

REPEATS = 5
MODELS = (10, 40)

Rows = npt.NDArray[np.uint8]
States = list[dict[str, torch.Tensor]]


@dataclass
class Report:
    samples: int
    loss: float
    path_steps: int = 1
    start_loss: float | None = None


def least_s(*works: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """Return the least seconds of each call, after one to warm up: what others do on the machine
    only adds.

    They take turns, so that a busy minute meets all of them.
    """
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats + 1):
        for found, work in zip(times, works, strict=True):
            started = time.perf_counter()
            work()
            found.append(time.perf_counter() - started)
    return [min(found[1:]) for found in times]


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
    rows_K, out = rows_of(layout, count), np.zeros((count, layout.row_bytes), np.uint8)
    states = [
        {name: torch.from_numpy(view) for name, view in layout.views(row).items()} for row in rows_K
    ]
    shares = [(1 + 0.01 * k) / sum(1 + 0.01 * k for k in range(count)) for k in range(count)]
    alone, order = FedCrossStage("plain", 0.99, 1, similar=False), [fedcross.in_order(0, count)]
    plans: dict[str, tuple[Any, list[Any], int, Callable[[], object]]] = {
        "FedMR, module": (
            planned(FedMR(), mixing_round(rows_K, layout))[0],
            list(out),
            2 * count,
            lambda: torch_fedmr(states),
        ),
        "FedCross, in order": (
            whole(layout, list(map(Mixture.of, fedcross.mixing_matrix(alone, order, count)))),
            list(out),
            2 * count,
            lambda: torch_fedcross(states, 0.99),
        ),
        "FedAvg": (
            whole(layout, [Mixture.of(shares)]),
            [out[0]],
            count + 1,
            lambda: torch_fedavg(states, shares),
        ),
    }

    def copy() -> None:
        for target, row in zip(out, rows_K, strict=True):
            np.copyto(target, row)

    for name, (plan, target, moved, rival) in plans.items():
        memcpy_s, ours_s = least_s(
            copy,
            lambda plan=plan, target=target: mixing.apply(plan, rows_K, layout=layout, out=target),
        )
        line(table, name, count, ours_s, memcpy_s * moved / (2 * count), *least_s(rival, repeats=1))
    trainable = list(layout.floats(rows_K)[:, : layout.parameters])
    ours_s, *blas_s = least_s(
        lambda: Gram.of(trainable, trainable[0]),
        *(lambda width=width: blas(layout, rows_K, width) for width in (2048, 4096, 16_384)),
    )
    line(
        table,
        "Gram matrix",
        count,
        ours_s,
        min(blas_s),
        *least_s(lambda: torch_cosines(states), repeats=1),
    )


def line(
    table: Table, name: str, count: int, ours_s: float, bound_s: float, torch_s: float
) -> None:
    """Add a measured line."""
    cells = (
        f"{ours_s * 1e3:.0f} ms",
        f"{bound_s * 1e3:.0f} ms",
        f"{ours_s / bound_s:.2f}",
        f"{torch_s / ours_s:.1f}",
    )
    table.add_row(name, str(count), *cells)
    print(".", end="", file=sys.stderr, flush=True)


def blas(layout: ModelLayout, rows_K: Rows, width: int) -> npt.NDArray[np.float64]:
    """Multiply the rows by themselves in float64, block by block, and nothing else."""
    models_KD = layout.floats(rows_K)[:, : layout.parameters]
    held_KC, total_KK = np.empty((len(rows_K), width)), np.zeros((len(rows_K), len(rows_K)))
    for start in range(0, layout.parameters - width + 1, width):
        held_KC[:] = models_KD[:, start : start + width]
        total_KK += held_KC @ held_KC.T
    return total_KK


def node(settings: RuleSettings, layout: ModelLayout, folder: Path | None = None) -> Rule:
    """Return a node that keeps its models in memory."""

    def rows(name: str, count: int) -> Rows:
        return np.zeros((count, layout.row_bytes), np.uint8)

    return build(
        settings,
        RuleContext(layout=layout, node="cloud", seed=1, measures=False, rows=rows, folder=folder),
    )


def rounds(layout: ModelLayout, count: int, table: Table) -> None:
    """Measure a whole round of each rule: mean, statistics, plan, mixing."""
    rows_K = rows_of(layout, count)
    children = tuple(f"child-{k}" for k in range(count))
    reports = tuple(Report(100 + k, 0.5) for k in range(count))
    cells = []
    for name, table_ in RULES.items():
        more = {"warmup_rounds": 0, "memory_mb": 1e6, "groups": 10} if table_ is FedCDA else {}
        settings: Any = table_(**LEAST[name], **more)
        rule = node(settings, layout)
        rule.begin(rows_K[0].copy())
        r = 0

        def play(rule: Rule = rule) -> None:
            nonlocal r
            rule.dispatch(r, children)
            rule.aggregate(r, Uploads(children, rows_K, reports, lambda: None))
            r += 1

        cells.append((name, *least_s(play, repeats=3)))
        print(".", end="", file=sys.stderr, flush=True)
    for name, seconds in cells:
        table.add_row(name, str(count), f"{seconds * 1e3:.0f} ms")


def peak_mb() -> float:
    """Return the most memory that was resident since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1e3


def forget_peak() -> None:
    """Begin to count anew."""
    Path("/proc/self/clear_refs").write_text("5")


def cached(
    layout: ModelLayout, folder: Path, *, children: int, drawn: int, groups: int, table: Table
) -> None:
    """Measure FedCDA's rounds with histories in files."""
    settings = FedCDA(groups=groups, warmup_rounds=0, memory_mb=0.0)
    rule = node(settings, layout, folder / "histories")
    rows_K = rows_of(layout, drawn)
    rule.begin(rows_K[0].copy())
    forget_peak()
    before_mb, times = peak_mb(), []
    draws = [
        [(r * drawn + k) % children for k in range(drawn)] for r in range(4 * children // drawn)
    ]
    for r, members in enumerate(draws):
        layout.floats(rows_K)[:, :1000] += np.float32(0.01) * (r + 1)
        uploads = Uploads(
            tuple(f"child-{m}" for m in members),
            rows_K,
            tuple(Report(100, 1 / (m + r + 1)) for m in members),
            lambda: None,
        )
        started = time.perf_counter()
        rule.aggregate(r, uploads)
        times.append(time.perf_counter() - started)
    grown_mb = peak_mb() - before_mb
    candidates = list((folder / "histories").iterdir())[: settings.depth * drawn]

    def read() -> None:
        for path in candidates:
            np.fromfile(path, np.uint8).sum()

    (pass_s,) = least_s(read, repeats=2)
    last_s = min(times[-children // drawn :])
    table.add_row(
        f"{children} children, {drawn} drawn, B = {groups}",
        f"{children * settings.depth * layout.row_bytes / 1e6:.0f} MB",
        f"{last_s * 1e3:.0f} ms",
        f"{last_s / pass_s:.2f}",
        f"{grown_mb:.0f} MB",
        f"{grown_mb * 1e6 / layout.row_bytes:.1f}",
    )
    print(".", end="", file=sys.stderr, flush=True)


def tables(*columns: tuple[str, ...]) -> list[Table]:
    """Return tables with these columns, all but the first set to the right."""
    made = [Table(*names) for names in columns]
    for table in made:
        for column in table.columns[1:]:
            column.justify = "right"
    return made


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true", help="FedCDA's histories are ResNet-18's")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":  # before numpy is loaded
        os.execve(
            sys.executable, [sys.executable, *sys.argv], {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        )
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    layout = models.layout_of(models.build("resnet18_cifar", 1, inputs=Inputs((3, 32, 32), 10)))
    mixed, whole_rounds, histories = tables(
        ("plan", "K", "time", "bound", "x bound", "torch / ours"),
        ("a round at an institution", "K", "time"),
        (
            "FedCDA, H = 3, files",
            "on disk",
            "a round",
            "x reading the candidates",
            "memory",
            "in models",
        ),
    )
    for count in MODELS:
        kernel(layout, count, mixed)
        rounds(layout, count, whole_rounds)
    small = (
        layout
        if options.full
        else models.layout_of(models.build("cnn_digits", 1, inputs=Inputs((1, 8, 8), 10)))
    )
    for children, drawn, groups in ((20, 4, 3), (100, 10, 10)):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            cached(
                small, Path(folder), children=children, drawn=drawn, groups=groups, table=histories
            )
    console = Console(width=140)
    console.print(
        f"\n{platform.machine()}, one core, Python {platform.python_version()}, numpy "
        f"{np.__version__}"
    )
    console.print(
        "bound: the traffic at memcpy's speed; for the Gram matrix, float64 BLAS on blocks"
    )
    for table in (mixed, whole_rounds, histories):
        console.print(table)


if __name__ == "__main__":
    main()
