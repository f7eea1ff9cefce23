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
from fedstrata.common.experiment.reading import override, parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.settings.links import shipped
from fedstrata.common.settings.topology import participants
from fedstrata.deploy.console.shipped import shipped_sweeps
from fedstrata.deploy.results.kept import brief
from fedstrata.deploy.results.run import Run, State, folders
from fedstrata.deploy.results.series import series_of
from fedstrata.deploy.sweeps.grid import Grid, SweepCell, figures_of, load
from fedstrata.deploy.sweeps.sweep_schema import FULL, Size
from tests.helpers.commands import EXPERIMENTS, invoke, table
from tests.helpers.direct import run_direct
from tests.helpers.figures import drawn
from tests.helpers.sweeps import digest_of
from tests.refused import KEPT

PAGE: Final = Path(__file__).parents[1] / "docs" / "reproduction.md"
NUMBERS: Final = tomllib.loads((KEPT / "numbers.toml").read_text())
SIZES: Final[dict[str, dict[str, Any]]] = NUMBERS["sweeps"]["papers"]
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


def facts_of(cell: SweepCell, experiment: Experiment) -> dict[str, Any]:
    """Return an experiment's tree, and what follows from it."""
    sizes = experiment.sizes()
    return {
        **experiment.model_dump(mode="json"),
        "depth": len(sizes),
        "sizes": [sum(each) for each in sizes],
        "devices": sum(sizes[-1]),
        "devices_of_each": sizes[-1],
        "participants": participants(sizes[-1][0], experiment.tiers[-1].participation),
        "target": cell.target,
    }


def at(tree: Any, key: str) -> Any:
    """Return the value of a key with dots."""
    for part in key.split("."):
        tree = tree[int(part) if isinstance(tree, list) else part]
    return tree


def changed(experiment: Experiment, *pairs: str) -> dict[str, Any]:
    """Return the tree of an experiment with other values, as by --set."""
    tree = experiment.model_dump(mode="json")
    for pair in pairs:
        override(tree, pair)
    return tree


def experiments_of(grid: Grid) -> list[tuple[SweepCell, Experiment]]:
    return [(cell, cell.experiments[grid.seeds[0]]) for cell in grid.cells]


def test_every_table_and_figure_has_its_file() -> None:
    assert {path.stem for path in (EXPERIMENTS / "papers").glob("*.toml")} == SIZES.keys()


def test_the_profiles_of_links_and_machines_are_their_sources() -> None:
    found = {name: parse({"links": {"lan": name}}).link("device-0") for name in shipped()}
    links = {name: [each.up_mbit, each.down_mbit, each.delay_ms] for name, each in found.items()}
    assert links == NUMBERS["links"]
    for name, slowdown in NUMBERS["machines"].items():
        hardware = parse({"hardware": {"default": name}}).hardware.default
        assert (hardware.profile, hardware.slowdown) == (name, slowdown)


@pytest.mark.parametrize("name", SIZES)
def test_a_sweep_has_the_papers_cells_settings_and_figures(name: str) -> None:
    stated, grid, small = SIZES[name], grid_of(name), grid_of(name, size="small")
    assert [len(grid.cells), len(grid.seeds)] == stated["full"]
    assert [len(small.cells), len(small.seeds)] == stated["small"]
    assert digest_of(grid) == NUMBERS["cells"][f"papers/{name}"]
    for when, wanted in stated["cells"]:
        cells = [
            (cell, experiment)
            for cell, experiment in experiments_of(grid)
            if cell.label.startswith(when.get("label", ""))
            and {**cell.values, "label": ""}.items() >= {**when, "label": ""}.items()
        ]
        assert cells, when
        for cell, experiment in cells:
            facts = facts_of(cell, experiment)
            assert {key: at(facts, key) for key in wanted} == wanted, cell.label
    figures = figures_of(grid.file, [measure.label for measure in grid.measures])
    known = {tuple(cell.values.values()) for cell in grid.rows}
    assert {values for values, _ in figures} <= known, "a figure of a cell that is skipped"
    assert len(figures) == stated["printed"]
    for label, *numbers in stated.get("figures", []):
        found = [each for (values, _), each in figures.items() if ", ".join(values) == label]
        assert (found[0].mean, found[0].deviation) == (numbers[0], (numbers[1:] or [None])[0])
    assert grid.file.paper.cite and grid.file.paper.table and grid.file.paper.notes


@pytest.mark.parametrize("name", SIZES)
def test_a_reduced_size_has_the_papers_data_and_skew(name: str) -> None:
    full = grid_of(name)
    if "reduced" not in SIZES[name]:
        with pytest.raises(InvalidExperiment, match=r"has no such size\. Use small or full"):
            grid_of(name, size="reduced")
        return
    grid = grid_of(name, size="reduced")
    cells, seeds = SIZES[name]["reduced"]
    assert (len(grid.cells), len(grid.seeds)) == (cells, seeds)
    assert f"\n| `{name}` | {cells} | {seeds} | " in PAGE.read_text()
    assert f"(reduced: {full.file.reduced.note})" in grid.title
    whole = {cell.label: cell.experiments[1] for cell in full.cells}
    for cell in grid.cells:
        own, theirs = cell.experiments[1], whole[cell.label]
        assert own.data == theirs.data and own.rounds <= theirs.rounds
        assert own.sizes() == theirs.sizes() and own.training == theirs.training


@pytest.mark.parametrize("name", SIZES)
def test_the_page_has_the_sizes_of_each_sweep(name: str) -> None:
    begin = " | ".join([f"| `{name}`", *reproduction.sizes(grid_of(name))])
    assert f"\n{begin} | " in PAGE.read_text(), (
        "print the table anew: python -m docs.tools.reproduction"
    )


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
    (figure,) = dots(name, series)
    assert figure.title.startswith("Simulated seconds to 92.5 %")
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
