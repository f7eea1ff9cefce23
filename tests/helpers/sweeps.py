"""Results of small sweeps, of runs that were made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fedstrata.deploy.results.run import Run
from fedstrata.deploy.sweeps.grid import Grid, expand
from fedstrata.deploy.sweeps.measures import SweepResults

MakeRun = Callable[..., Path]
FIGURES = [["split", "FedAvg", "Other"], ["a", [60.0, 1.0], 70], ["b", 50, {"from": 60, "to": 61}]]
ACCURACIES = {  # by split, method and seed
    ("a", "FedAvg"): [(0.2, 0.4, 0.6), (0.4, 0.6, 0.65)],
    ("a", "Other"): [(0.1, 0.5, 0.7), (0.4, 0.7, 0.8)],
    ("b", "FedAvg"): [(0.3, 0.5, 0.9), (0.2, 0.3, 0.4)],
    ("b", "Other"): [(0.3, 0.4, 0.5), (0.1, 0.2, 0.3)],
}
TREE: dict[str, Any] = {
    "title": "Two methods",
    "seeds": 2,
    "target": 0.6,
    "columns": ["method"],
    "experiment": {"rounds": 3},
    "axes": {"split": {"a": {}, "b": {"data": {"noise": 0.4}}}, "method": {
        "FedAvg": {}, "Other": {"training": {"learning_rate": 0.5}}}},
}  # fmt: skip


def results(
    tmp_path: Path,
    make_run: MakeRun,
    *,
    left_out: Sequence[tuple[str, str, int]] = (),
    **changes: Any,
) -> SweepResults:
    grid: Grid = expand({**TREE, **changes}, Path("two.toml"))
    runs = {}
    for cell in grid.cells:
        split, method = cell.values["split"], cell.values["method"]
        for seed, experiment in cell.experiments.items():
            if (split, method, seed) not in left_out:
                accuracies = ACCURACIES[split, method][seed - 1]
                tree = experiment.model_dump(mode="json", exclude_none=True)
                runs[experiment.digest] = Run(make_run(tmp_path, tree, accuracies=accuracies))
    return SweepResults(grid, runs)


def the_best_of_two(tmp_path: Path, make_run: MakeRun) -> SweepResults:
    """Return the results of a sweep whose paper has a figure of the best of two rates alone."""
    rates = {"Slow": 0.1, "Fast": 0.5, "New": 0.2}
    tree = {
        "title": "The best of two rates",
        "seeds": 2,
        "measure": [
            {"name": "accuracy"},
            {"name": "rounds", "target": 0.5},
            {
                "name": "rounds",
                "target": 0.5,
                "against": "Fixed",
                "relation": "speed_up",
                "label": "faster",
            },
        ],
        "experiment": {"rounds": 3},
        "axes": {
            "method": {name: {"training": {"learning_rate": rate}} for name, rate in rates.items()}
        },
        "paper": {
            "best": {"Fixed": ["Slow", "Fast"]},
            "baseline": "Fixed",
            "figures": [
                ["measure", "Fixed", "New"],
                ["accuracy", 75.0, 80.0],
                ["global rounds to 50 %", 2, 3],
            ],
        },
    }
    accuracies = {0.1: (0.4, 0.6, 0.7), 0.5: (0.5, 0.6, 0.6), 0.2: (0.1, 0.4, 0.65)}
    grid = expand(tree, Path("best.toml"))
    runs = {}
    for one in grid.experiments.values():
        each = accuracies[one.training.learning_rate]
        runs[one.digest] = Run(
            make_run(tmp_path, one.model_dump(mode="json", exclude_none=True), accuracies=each)
        )
    return SweepResults(grid, runs)


def digest_of(grid: Grid) -> str:
    """Return a digest of the experiments of a sweep's cells, with the first seed."""
    digest = blake2b(digest_size=8)
    for cell in grid.cells:
        experiment = cell.experiments[grid.seeds[0]]
        digest.update(f"{cell.label} {experiment.digest}\n".encode())
    return digest.hexdigest()
