"""The sweeps of the papers: their settings against the papers' texts, their figures, and a cell of
each small form.
"""

from __future__ import annotations

import json
import re
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pytest

from docs.tools import reproduction
from docs.tools.kept_dots import dots
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.lint import warnings
from fedstrata.common.experiment.reading import load as load_experiment
from fedstrata.common.experiment.reading import override
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.settings.topology import participants
from fedstrata.deploy.console.shipped import shipped_sweeps
from fedstrata.deploy.results.kept import brief
from fedstrata.deploy.results.run import Run, State, folders
from fedstrata.deploy.results.series import series_of
from fedstrata.deploy.sweeps.grid import Grid, SweepCell, figures_of, load
from fedstrata.deploy.sweeps.schema import FULL, Size
from tests.helpers.commands import EXPERIMENTS, invoke, table
from tests.helpers.direct import run_direct
from tests.helpers.figures import drawn

PAGE: Final = Path(__file__).parents[1] / "docs" / "reproduction.md"
# By file: cells and seeds, those of the small form, and how many figures the paper prints.
SIZES: Final = {
    "fedcda-figure2a": (15, 2, 15, 5, 0),
    "fedcda-figure2b": (4, 2, 4, 5, 0),
    "fedcda-figure2cd": (6, 2, 6, 5, 0),
    "fedcda-figure3": (7, 2, 7, 5, 0),
    "fedcda-figure4": (5, 2, 5, 5, 0),
    "fedcda-table1": (180, 2, 60, 5, 180),
    "fedcda-table2": (30, 2, 30, 5, 30),
    "fedcross-figure6": (30, 3, 30, 3, 0),
    "fedcross-figure7": (30, 3, 18, 3, 0),
    "fedcross-figure9": (20, 3, 10, 5, 0),
    "fedcross-table1": (6, 1, 6, 1, 5),
    "fedcross-table2": (174, 3, 24, 5, 174),
    "fedcross-table3": (18, 3, 18, 5, 18),
    "fedmr-figure4": (3, 3, 3, 5, 0),
    "fedmr-figure5": (4, 3, 4, 5, 0),
    "fedmr-table1": (189, 3, 28, 5, 2),
    "tempo-figure2": (4, 3, 4, 3, 1),
    "tempo-table1": (63, 3, 12, 3, 27),
}
# The papers' words: devices, how many of them train in a round of their parent, epochs, batch,
# learning rate, momentum, weight decay, global rounds; None: depends on the cell, or the paper does
# not state it.
TRAINING: Final = {
    "fedcross-table1": (100, 10, 5, 50, 0.01, 0.5, 0.0, None),
    "fedcross-table2": (None, None, 5, 50, 0.01, 0.5, 0.0, None),
    "fedcross-table3": (100, 10, 5, 50, 0.01, 0.5, 0.0, 2000),
    "fedcross-figure6": (100, None, 5, 50, 0.01, 0.5, 0.0, 2000),
    "fedcross-figure7": (None, None, 5, 50, 0.01, 0.5, 0.0, 2000),
    "fedcross-figure9": (100, 10, 5, 50, 0.01, 0.5, 0.0, 1000),
    "fedmr-table1": (None, None, 5, 50, 0.01, None, 0.0, None),
    "fedmr-figure4": (100, 10, 5, 50, 0.01, None, 0.0, None),
    "fedmr-figure5": (100, 10, 5, 50, 0.01, None, 0.0, None),
    "fedcda-table1": (20, 4, 20, 64, 0.001, 0.0001, 0.00001, 200),
    "fedcda-table2": (100, 10, 5, None, 0.1, 0.0, 0.001, None),
    "fedcda-figure2a": (None, 10, 20, 64, 0.001, 0.0001, 0.00001, 200),
    "fedcda-figure2b": (20, 4, 20, 64, 0.001, 0.0001, 0.00001, 200),
    "fedcda-figure2cd": (20, 4, None, 64, 0.001, 0.0001, 0.00001, 200),
    "fedcda-figure3": (50, 10, 20, 64, 0.001, 0.0001, 0.00001, 200),
    "fedcda-figure4": (20, 4, 20, 64, 0.001, 0.0001, 0.00001, 200),
    "tempo-table1": (200, 40, None, 10, 0.01, None, 0.0, None),
    "tempo-figure2": (200, 40, None, 10, 0.01, None, 0.0, None),
}
# Of cells with these values, in the order of the axes: how many devices, how many of them train,
# global rounds.
SCALES: Final = {
    "fedcross-table2": {
        "CNN, CIFAR-10": (100, 10, 2000),
        "CNN, CIFAR-100": (100, 10, 2000),
        "CNN, FEMNIST": (180, 18, 2000),
        "ResNet-20, CIFAR-10": (100, 10, 2000),
        "ResNet-20, CIFAR-100": (100, 10, 2000),
        "ResNet-20, FEMNIST": (180, 18, 2000),
        "VGG-16, CIFAR-10": (100, 10, 1000),
        "VGG-16, CIFAR-100": (100, 10, 1000),
        "VGG-16, FEMNIST": (180, 18, 1000),
        "LSTM, Shakespeare": (128, 12, 1000),
        "LSTM, Sent140": (803, 80, 3000),
    },
    "fedcross-figure6": {
        "5": (100, 5, 2000),
        "10": (100, 10, 2000),
        "20": (100, 20, 2000),
        "50": (100, 50, 2000),
        "100": (100, 100, 2000),
    },
    "fedcross-figure7": {
        "50": (50, 5, 2000),
        "100": (100, 10, 2000),
        "200": (200, 20, 2000),
        "500": (500, 50, 2000),
        "1000": (1000, 100, 2000),
    },
}
# A paper's figures, read once more: file, cell, mean and deviation.
FIGURES: Final = [
    ("fedcross-table2", "CNN, CIFAR-10, beta 0.1, FedAvg", 46.12, 2.35),
    ("fedcross-table2", "CNN, CIFAR-100, beta 0.5, SCAFFOLD", 33.49, 0.73),
    ("fedcross-table2", "CNN, FEMNIST, natural, CluSamp", 80.80, 0.40),
    ("fedcross-table2", "ResNet-20, CIFAR-10, IID, FedCross", 75.01, 0.09),
    ("fedcross-table2", "ResNet-20, CIFAR-100, beta 0.1, FedGen", 32.40, 1.45),
    ("fedcross-table2", "VGG-16, CIFAR-10, beta 0.5, FedGen", 78.90, 0.39),
    ("fedcross-table2", "VGG-16, CIFAR-100, IID, FedCross", 70.81, 0.07),
    ("fedcross-table2", "LSTM, Shakespeare, natural, SCAFFOLD", 48.94, 0.18),
    ("fedcross-table2", "LSTM, Sent140, natural, FedCross", 71.33, 0.12),
    ("fedcross-table3", "0.9, highest", 46.91, 0.97),
    ("fedcross-table3", "0.99, lowest", 62.16, 0.42),
    ("fedcross-table3", "0.999, in-order", 40.85, 1.82),
    ("fedmr-table1", "ResNet-20, CIFAR-10, beta 0.1, SCAFFOLD", 50.46, None),
    ("fedmr-table1", "ResNet-20, CIFAR-10, beta 0.1, FedMR", 62.09, None),
    ("fedcda-table1", "FashionMNIST, 2 shards, FedAvg", 64.69, 5.62),
    ("fedcda-table1", "FashionMNIST, Dir 0.1, FedDF", 80.03, 1.04),
    ("fedcda-table1", "CIFAR-10, 4 shards, FedLAW", 46.81, 3.61),
    ("fedcda-table1", "CIFAR-10, Dir 0.1, FedCDA", 62.46, 0.22),
    ("fedcda-table1", "CIFAR-10, Dir 0.1, FedExP", 60.63, 4.32),
    ("fedcda-table1", "CIFAR-100, 8 shards, GAMF", 24.15, 0.49),
    ("fedcda-table1", "CIFAR-100, Dir 0.5, FedBE", 40.81, 0.17),
    ("fedcda-table2", "Dir 0.1, FedCDA", 47.38, 0.23),
    ("fedcda-table2", "Dir 0.3, FedSAM", 20.53, 0.25),
    ("tempo-table1", "MNIST, IID, Tempo", 4.87, None),
    ("tempo-table1", "FashionMNIST, Dir 0.1, Tempo", 8.82, None),
    ("tempo-table1", "CIFAR-10, Dir 1, Tempo", 22.62, None),
    ("tempo-figure2", "Tempo", 85.37, None),
]
# Rounds of the short runs: those after which all parts of a rule have been in use.
SHORT: Final = {
    "warmup_rounds": 1,
    "first_stage_rounds": 1,
    "propeller_rounds": 1,
    "dynamic_alpha_rounds": 1,
}


@lru_cache
def grid_of(name: str, *, size: Size = FULL) -> Grid:
    return load(EXPERIMENTS / "papers" / f"{name}.toml", size=size)


def training_of(experiment: Experiment) -> tuple[float, ...]:
    training, sizes = experiment.training, experiment.sizes()[-1]
    return (
        sum(sizes),
        participants(sizes[0], experiment.tiers[-1].participation),
        training.epochs,
        training.batch_size,
        training.learning_rate,
        training.momentum,
        training.weight_decay,
        experiment.rounds,
    )


def changed(experiment: Experiment, *pairs: str) -> dict[str, Any]:
    """Return the tree of an experiment with other values, as by --set."""
    tree = experiment.model_dump(mode="json")
    for pair in pairs:
        override(tree, pair)
    return tree


def experiments_of(grid: Grid) -> list[tuple[SweepCell, Experiment]]:
    return [(cell, cell.experiments[grid.seeds[0]]) for cell in grid.cells]


def test_every_table_and_figure_has_its_file() -> None:
    files = {path.stem for path in (EXPERIMENTS / "papers").glob("*.toml")}
    assert files == set(SIZES) == set(TRAINING)


@pytest.mark.parametrize("name", SIZES)
def test_a_sweep_has_its_cells_and_the_papers_figures(name: str) -> None:
    large, small = grid_of(name), grid_of(name, size="small")
    figures = figures_of(large.file, [measure.label for measure in large.measures])
    cells = {tuple(cell.values.values()) for cell in large.rows}
    assert {values for values, _ in figures} <= cells, (
        "each figure belongs to a cell that is not skipped"
    )
    counted = (len(large.cells), len(large.seeds), len(small.cells), len(small.seeds), len(figures))
    assert counted == SIZES[name]
    assert large.file.paper.cite and large.file.paper.table and large.file.paper.notes


@pytest.mark.parametrize("name", SIZES)
def test_the_page_has_the_sizes_of_each_sweep(name: str) -> None:
    begin = " | ".join([f"| `{name}`", *reproduction.sizes(grid_of(name))])
    assert f"\n{begin} | " in PAGE.read_text(), (
        "print the table anew: python -m docs.tools.reproduction"
    )


@pytest.mark.parametrize("name", TRAINING)
def test_the_settings_are_the_papers(name: str) -> None:
    for cell, experiment in experiments_of(grid_of(name)):
        for stated, ours in zip(TRAINING[name], training_of(experiment), strict=True):
            assert stated is None or stated == ours, cell.label
        devices, taking_part, *_, rounds = training_of(experiment)
        assert [sum(sizes) for sizes in experiment.sizes()] == (
            [5, 200] if name.startswith("tempo") else [devices]
        )
        scales = [
            scale
            for values, scale in SCALES.get(name, {}).items()
            if cell.label.startswith(f"{values}, ")
        ]
        assert scales == [(devices, taking_part, rounds)] * (name in SCALES), cell.label


def test_tempo_has_the_papers_epochs_samples_and_targets() -> None:
    targets = {
        ("MNIST", "IID"): 0.982,
        ("MNIST", "Dir 1"): 0.965,
        ("MNIST", "Dir 0.1"): 0.925,
        ("FashionMNIST", "IID"): 0.859,
        ("FashionMNIST", "Dir 1"): 0.855,
        ("FashionMNIST", "Dir 0.1"): 0.85,
        ("CIFAR-10", "IID"): 0.791,
        ("CIFAR-10", "Dir 1"): 0.673,
        ("CIFAR-10", "Dir 0.1"): 0.552,
    }
    epochs = {"FedAdp 4": 4, "FedAdp 8": 8}
    for cell, experiment in experiments_of(grid_of("tempo-table1")):
        method, rules = cell.values["method"], [tier.aggregation.name for tier in experiment.tiers]
        assert cell.target == targets[cell.values["data"], cell.values["distribution"]]
        assert experiment.stop.target == cell.target
        assert (
            experiment.training.epochs == epochs.get(method, 6) and experiment.tiers[1].rounds == 4
        )
        assert experiment.data.partition_size == 600
        assert experiment.sizes()[-1] == [40] * 5
        control = experiment.cloud.epoch_control
        assert control.name == ("tempo" if method.startswith("Tempo") else "fixed")
        assert rules == ["fedadp" if method.startswith("FedAdp") else "fedavg"] * 2
        controls = {"Tempo, shuffled": "shuffled", "Tempo, fixed mean": "fixed_mean"}
        assert controls.get(method, "none") == getattr(control, "control", "none")


def test_the_dry_run_names_the_data_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "cifar-10-batches-py").mkdir(parents=True)
    words = [
        "sweep",
        "papers/fedcross-table2",
        "--dry-run",
        "--seeds",
        "1",
        "--only",
        "method=FedCross",
    ]
    *rows, total, lacking = invoke(*words).stdout.splitlines()[1:]
    assert total.startswith("29 cells, 29 runs, ")
    assert lacking.startswith("no data on this host for cifar100 femnist sent140 shakespeare;")
    assert all(row.endswith("missing" if "CIFAR-10 " in row else "no data") for row in rows)
    assert "no data" not in invoke(*words, "--size", "small").stdout


def test_tempos_lab_is_a_cell_of_its_table() -> None:
    values = {"data": "FashionMNIST", "distribution": "Dir 0.1", "method": "Tempo"}
    cell = next(cell for cell in grid_of("tempo-table1").cells if cell.values == values)
    lab = load_experiment(EXPERIMENTS / "tempo-fashionmnist.toml")
    assert lab.model_copy(update={"name": "tempo-table1"}) == cell.experiments[1]


def test_fedprox_fedcross_and_fedcda_have_the_papers_parameters() -> None:
    mu = {"CIFAR-10": 0.01, "CIFAR-100": 0.001, "FEMNIST": 0.1}
    for name in ("fedcross-table2", "fedmr-table1"):
        for cell, experiment in experiments_of(grid_of(name)):
            rule, objective = (
                experiment.tiers[0].aggregation.model_dump(),
                experiment.training.objective.model_dump(),
            )
            if cell.values["method"] == "FedProx" and cell.values["data"] in mu:
                assert objective == {"name": "fedprox", "mu": mu[cell.values["data"]]}
            if cell.values["method"] == "FedCross":
                assert (rule["name"], rule["alpha"], rule["strategy"]) == (
                    "fedcross",
                    0.99,
                    "lowest",
                )
            if cell.values["method"] == "FedMR":
                first = 0 if cell.values["model"] == "CNN" else 100
                assert (rule["name"], rule["granularity"], rule["first_stage_rounds"]) == (
                    "fedmr",
                    "module",
                    first,
                )
    for name in ("fedcda-table1", "fedcda-table2"):
        for cell, experiment in experiments_of(grid_of(name)):
            if cell.values["method"] == "FedCDA":
                rule = experiment.tiers[0].aggregation.model_dump()
                found = tuple(
                    rule[key] for key in ("name", "depth", "groups", "warmup_rounds", "smoothness")
                )
                assert found == ("fedcda", 3, 3, 50, 1.0)


@pytest.mark.parametrize(("name", "cell", "mean", "deviation"), FIGURES)
def test_figures_are_the_papers(name: str, cell: str, mean: float, deviation: float | None) -> None:
    grid = grid_of(name)
    figures = figures_of(grid.file, [measure.label for measure in grid.measures])
    found = next(figure for (values, _), figure in figures.items() if ", ".join(values) == cell)
    assert (found.mean, found.deviation) == (mean, deviation)


@pytest.mark.parametrize("name", SIZES)
def test_nothing_is_advised_against(name: str) -> None:
    # The papers chose batch norm; FedCDA's Figure 4 has FedAvg as a warm-up of all rounds.
    own = ("model.name", "cloud.aggregation.warmup_rounds = 200")
    for cell, experiment in experiments_of(grid_of(name)):
        assert [reason for reason in warnings(experiment) if not reason.startswith(own)] == [], (
            cell.label
        )


QUICK: Final = ("fedcross-table3", "fedmr-figure5", "fedcda-table2", "fedcda-figure4")
RUNS: Final = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SIZES
]


@pytest.mark.parametrize("name", RUNS)
def test_the_last_cell_of_each_small_form_runs(name: str, tmp_path: Path) -> None:
    grid = grid_of(name, size="small")
    tree = changed(grid.cells[-1].experiments[grid.seeds[0]], "rounds=2", "training.epochs=1")
    rule = tree["tiers"][0]["aggregation"]
    rule.update({key: min(rule[key], most) for key, most in SHORT.items() if key in rule})
    path = run_direct(tmp_path, tree)
    assert len(table(path / "rounds.csv")) == 2


REDUCED: Final = {
    "tempo-table1": (63, 3),
    "fedcross-table2": (24, 2),
    "fedcross-table3": (3, 2),
    "fedmr-table1": (28, 2),
    "fedcda-table1": (4, 3),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_reduced_size_has_the_papers_data_and_skew(name: str) -> None:
    full = grid_of(name)
    if name not in REDUCED:
        with pytest.raises(
            InvalidExperiment,
            match=r"--size = 'reduced': the sweep has no such size\. Use small or full",
        ):
            grid_of(name, size="reduced")
        return
    grid = grid_of(name, size="reduced")
    cells, seeds = REDUCED[name]
    assert (len(grid.cells), len(grid.seeds)) == (cells, seeds)
    assert f"\n| `{name}` | {cells} | {seeds} | " in PAGE.read_text()
    assert f"(reduced: {full.file.reduced.note})" in grid.title
    whole = {cell.label: cell.experiments[1] for cell in full.cells}
    for cell in grid.cells:
        own, theirs = cell.experiments[1], whole[cell.label]
        assert own.data == theirs.data and own.rounds <= theirs.rounds
        assert own.sizes() == theirs.sizes() and own.training == theirs.training


@pytest.mark.slow
def test_the_bytes_of_fedcross_table_1_are_those_of_its_text(tmp_path: Path) -> None:
    """ "FedCross needs a communication of 2K models, which is the same as FedAvg"; SCAFFOLD "2K
    models plus 2K global control variables"; FedGen "2K models plus K generators"; FedProx and
    CluSamp as FedAvg.
    """
    # 10 % of 60 devices
    grid, rounds, models = grid_of("fedcross-table1", size="small"), 2, 2 * 6 * 2
    found = {}
    for cell in grid.cells:
        path = run_direct(
            tmp_path, changed(cell.experiments[1], f"rounds={rounds}", "training.epochs=1")
        )
        manifest = json.loads((path / "manifest.json").read_text())
        rows = table(path / "rounds.csv")
        up, down = (sum(int(row[f"wan_{way}_bytes"]) for row in rows) for way in ("up", "down"))
        found[cell.values["method"]] = up / manifest["model_bytes"], down / manifest["model_bytes"]
    generators = found.pop("FedGen")
    assert found.pop("SCAFFOLD") == pytest.approx((models, models), rel=0.01)
    assert all(each == pytest.approx((models / 2, models / 2), rel=0.01) for each in found.values())
    assert generators[0] == pytest.approx(models / 2, rel=0.1) and generators[1] > models / 2


def test_each_kept_cell_is_read_by_this_release() -> None:
    kept = folders(PAGE.with_name("results"))
    assert kept
    stems = {name.rpartition("/")[2] for name in shipped_sweeps()}
    for run in map(Run, kept):
        stem = run.path.parent.name.removesuffix("-reduced")  # the folder of a smaller size
        assert stem in stems and run.state is State.FINISHED, run.path
        assert run.rounds[-1].global_round <= run.experiment.rounds and run.cell, run.path
        assert brief(run.experiment) == tomllib.loads(run.text), run.path
        assert re.fullmatch("[0-9a-f]{16}", run.manifest["model"]) and run.manifest["cpu_s"] > 0, (
            run.path
        )
        assert "-dirty" not in run.manifest["commit"], f"{run.path}: of a commit that nobody has"


def test_the_paper_s_seconds_are_drawn_beside_ours_with_its_baseline_at_ours() -> None:
    name = "tempo-table1-reduced"
    runs = [run for run in map(Run, folders(PAGE.with_name("results") / name)) if run.seed == 1]
    series = [each for each in series_of(runs) if each.runs[0].cell.startswith("MNIST, Dir 0.1, ")]
    figure = dots(name, series)
    assert figure is not None and figure.title.startswith("Simulated seconds to 92.5 %")
    seconds = {
        each.runs[0].cell.removeprefix("MNIST, Dir 0.1, "): reached_s(each.runs[0], 0.925)
        for each in series
    }
    best = min(seconds[f"FedAdp {epochs}"] for epochs in (4, 6, 8))
    canvas = drawn(figure)
    at = {
        canvas.tooltips[key][0]: float(line.get_xdata()[0])
        for line in canvas.sheet.axes[0].lines
        if (key := line.get_gid())
    }
    tempo = best * 7.65 / 8.27  # of the paper's hours
    ticks = {text: x for text, x in at.items() if text.startswith("the paper's: ")}
    assert ticks == {f"the paper's: {x:.1f} s": pytest.approx(x) for x in (best, tempo)}
    places = {text.partition(":")[0]: x for text, x in at.items() if text not in ticks}
    assert places == {
        **{name: pytest.approx(x) for name, x in seconds.items()},
        "FedAdp, the best": pytest.approx(best),
    }


def reached_s(run: Run, target: float) -> float:
    """Return the seconds after which a run had an accuracy."""
    return next(
        row.elapsed_s for row in run.rounds if row.accuracy is not None and row.accuracy >= target
    )
