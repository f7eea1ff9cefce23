"""The commands on folders of runs: `report`, `compare`, `replay`, `experiments`, `runs ...`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.text import counted, json_text
from fedstrata.deploy.cli.chosen import Names, named_runs
from fedstrata.deploy.console.logs import write_line
from fedstrata.deploy.console.options import Output, Runs
from fedstrata.deploy.console.reporting import reporting, require

if TYPE_CHECKING:
    from fedstrata.deploy.results.page import Page
    from fedstrata.deploy.results.run import Run

CENTRALISED: Final = (
    "Name one: topology = { institutions = 0, devices = 1 }, as many epochs in all."
)
DISTANCES: Final = (0.1, 0.2, 0.5)  # of `sharpness`
LENGTHS_MOST: Final = 1000  # of a filter, how far from it
REASON_MOST: Final = 60  # characters of a reason in the list
Labels = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        help="A name for each series of runs, in order.  [default: the keys that differ]",
        show_default=False,
    ),
]

app = typer.Typer(
    help="List and delete runs, and examine their models.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def report(
    names: Names,
    runs: Runs = Path("runs"),
    out: Annotated[
        Path | None,
        typer.Option(
            help=(
                "The HTML file.  [default: report.html in a run's folder; of several runs, "
                "beside their folders]"
            ),
            show_default=False,
        ),
    ] = None,
    label: Labels = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            help="Also write each figure and table into this folder, with CSV and LaTeX.",
            show_default=False,
        ),
    ] = None,
    formats: Annotated[
        str, typer.Option("--figure-formats", help="Formats of the figures, of pdf,png,svg.")
    ] = "svg,png",
    output: Output = "table",
) -> None:
    """Write a report of one or several runs as a self-contained HTML file.

    Runs that differ only in the seed are one line with a band. Figures of several runs are those
    that compare them.
    """
    from fedstrata.deploy.console.stages import stages
    from fedstrata.deploy.results.page import compose, default_file

    with reporting():
        kinds = _listed(formats, ("pdf", "png", "svg"), "--figure-formats")
        for package in ("matplotlib", "jinja2"):
            require(package)
        found = named_runs(names, runs)
        file = out or default_file(found)
        if figures is not None:
            _write("--figures", figures, {})  # before they are drawn
        with stages(2) if figures or len(found) > 1 else nullcontext(lambda stage: None) as begin:
            begin(f"reading {counted(len(found), 'runs')}")
            page = compose(found, label or ())
            written = _write("--out", file, {file: page.html()})
            if figures is not None:
                begin(f"drawing {len(page.figures)} figures, {', '.join(kinds)}")
                files = {figures / name: each for name, each in _files(page, kinds)}
                written += _write("--figures", figures, files)
        if output == "json":
            ids = [run.id for run in found]
            facts = {"report": str(file), "runs": ids, "files": list(map(str, written))}
            typer.echo(json_text(facts))
            return
        typer.echo(file)
        if figures is not None:
            typer.echo(figures)
            count = f"{len(page.figures)} figures and {len(page.tables)} tables"
            write_line(f"{count} are in {figures}")


def compare(
    names: Names,
    runs: Runs = Path("runs"),
    target: Annotated[
        float | None,
        typer.Option(
            help=(
                "Score to reach, an accuracy is 0 to 1.  [default: the experiments' own; without "
                "one, none]"
            ),
            show_default=False,
        ),
    ] = None,
    label: Labels = None,
    output: Annotated[
        Literal["table", "json", "csv", "latex"],
        typer.Option("--format", help="Format of standard output."),
    ] = "table",
) -> None:
    """Compare the costs of reaching a score, as accuracy: global rounds, seconds, bytes and SGD
    steps, over seeds.

    Without a score, whole runs are compared: final and best score, loss, seconds, bytes, epsilon
    and energy.
    Runs that differ only in the seed form a group. Runs that did not reach the score are in no
    mean. Speed-ups are relative to the sweep's baseline, else to FedAvg, else to the first group,
    of the same task: of the same data, partition, nodes, model and score, and with or without a
    network. Other links, hardware or versions are named, and simulated seconds beside measured
    ones.
    """
    from fedstrata.deploy.results.compare import compared

    with reporting():
        found = named_runs(names, runs)
        notes, table, tree = compared(found, target=target, label=label or ())
        for note in notes:
            write_line(note)
        if output == "json":
            typer.echo(json_text(tree()))
            return
        typer.echo(
            {"table": table.on_terminal, "csv": table.csv, "latex": table.latex}[output](), nl=False
        )


def experiments(output: Output = "table") -> None:
    """List the experiments and sweeps that fedstrata brings along, for `fedstrata run demo` and
    `fedstrata sweep`.
    """
    from fedstrata.common.experiment.reading import load
    from fedstrata.deploy.console.shipped import shipped, shipped_sweeps
    from fedstrata.deploy.console.tabular import Column, Table
    from fedstrata.deploy.sweeps import grid

    with reporting():
        rows = []
        for name, path in shipped().items():
            one = load(path, ())
            facts = {
                "name": name,
                "aggregation": " + ".join(tier.aggregation.name for tier in one.tiers),
                "model": one.model.name,
                "dataset": one.data.dataset,
                "nodes": ", ".join(counted(n, kind) for kind, n in one.count_by_kind().items()),
                "rounds": one.rounds,
            }
            rows.append(facts | {"file": str(path)})
        sweeps = []
        for name, path in shipped_sweeps().items():
            cells = grid.load(path)
            facts = {"name": name, "title": cells.file.title, "cells": len(cells.cells)}
            sweeps.append(facts | {"runs": len(cells.experiments), "file": str(path)})
        if output == "json":
            for facts in (*rows, *sweeps):
                typer.echo(json_text(facts))
            return
        heads = {
            "name": Column("name", text=True),
            "aggregation": Column("aggregation, from the cloud down", text=True),
            "model": Column("model", text=True),
            "dataset": Column("data", text=True),
            "nodes": Column("nodes", text=True),
            "rounds": Column("global rounds"),
        }
        typer.echo(Table.of_keys("experiments", "Experiments", heads, rows).on_terminal())
        heads = {
            "name": Column("sweep", text=True),
            "title": Column("title", text=True),
            "cells": Column("cells"),
            "runs": Column("runs"),
        }
        typer.echo(Table.of_keys("sweeps", "Sweeps", heads, sweeps).on_terminal(), nl=False)


@app.command("list")
def list_runs(runs: Runs = Path("runs"), output: Output = "table") -> None:
    """List the runs of a folder, with their states, their costs so far, and why they failed."""
    from fedstrata.deploy.console.tabular import Column, Table, age, size

    heads = {
        **{key: Column(key, text=True) for key in ("run", "name", "state")},
        "done": Column("global rounds"),
        "score": Column("score", digits=4),
        "seconds": Column("time", "s"),
        "carried": Column("bytes"),
        "age": Column("age"),
        "score_name": Column("score is", text=True),
        "time": Column("time is", text=True),
        "aggregation": Column("aggregation", text=True),
        "model": Column("model", text=True),
        "dataset": Column("data", text=True),
        "brief": Column("reason", text=True),
    }
    with reporting():
        rows = []
        for run, facts in _all(runs):
            if output == "json":
                typer.echo(json_text(facts))
            old = run.age_s(time.time())
            shown = {
                "done": f"{len(run.rounds)}/{run.experiment.rounds}",
                "carried": size(sum(run.totals.values())),
                "age": "-" if old is None else age(old),
                "time": "simulated" if run.simulated else "measured",
                "brief": shorten(run.reason, REASON_MOST),
            }
            rows.append(facts | shown)
        if output == "table":
            typer.echo(Table.of_keys("runs", "Runs", heads, rows).on_terminal(), nl=False)


@app.command()
def delete(
    names: Names,
    runs: Runs = Path("runs"),
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete runs with all their files. One that is running is refused."""
    with reporting():
        chosen = named_runs(names, runs)
        for run in chosen:
            write_line(f"{run.path}: {run.state}, {counted(len(run.rounds), 'global rounds')}")
        if not yes:
            typer.confirm(f"Delete {counted(len(chosen), 'runs')}?", abort=True, err=True)
        for run in chosen:
            run.delete()
            typer.echo(run.path)


def _all(root: Path) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Yield the runs of a folder, each with its summary; report those whose files are damaged."""
    from fedstrata.deploy.results.run import Run, folders

    for path in folders(root):
        try:
            run = Run(path)
            found = run, _summary(run)
        except InvalidExperiment as error:
            write_line(f"fedstrata: {error}", level=logging.ERROR)
            continue
        yield found


def replay(
    name: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Folder of a run that finished, or a prefix of its id."),
    ],
    runs: Runs = Path("runs"),
    accelerator: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or auto.")] = "cpu",
    output: Output = "table",
) -> None:
    """Repeat a run in this process with its recorded decisions, and compare the final models.

    Who took part and whose result came too late are taken from the run, so that also a run with
    quorums, or with a selector that reads durations, repeats. The replay is a run of its own. Exit
    codes: 0 the same model bit for bit,
    1 another model.
    """
    with reporting():
        from fedstrata.deploy.local.replay import largest_difference, replayed
        from fedstrata.deploy.results.run import Run, find
        from fedstrata.deploy.watching.showing import show

        recorded = Run(find(name, runs))
        if recorded.experiment.training.trainer.learns_module:
            require("torch")
        with show(recorded.experiment, json_lines=output == "json") as observe:
            path = replayed(recorded, runs, accelerator=accelerator, observe=observe)
        difference = largest_difference(recorded.path, path)
    if output == "json":
        facts = {"replay": str(path), "of": str(recorded.path), "largest_difference": difference}
        typer.echo(json_text(facts))
    elif difference is not None:
        typer.echo(f"another model: its values differ by up to {difference:.3g}")
    else:
        typer.echo("the same model, bit for bit")
    if difference is not None:
        raise typer.Exit(1)


@app.command()
def sharpness(
    names: Names,
    runs: Runs = Path("runs"),
    label: Labels = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Training samples, drawn by the seed, at most.")
    ] = 2_000,
    directions: Annotated[int, typer.Option(min=1, help="Random directions.")] = 10,
    distance: Annotated[
        list[float] | None,
        typer.Option(
            min=0,
            max=LENGTHS_MOST,
            help="Shares of each filter's length; repeat it.  [default: 0.1, 0.2, 0.5]",
            show_default=False,
        ),
    ] = None,
    eigenvalue: Annotated[
        bool,
        typer.Option(
            "--eigenvalue", help="Also the Hessian's largest eigenvalue: as slow as 200 gradients."
        ),
    ] = False,
    output: Output = "table",
) -> None:
    """Show how the training loss rises around final models: along random directions, and along the
    steepest way up.

    Directions have the length of the parameters filter by filter (Li et al., NeurIPS 2018). Runs
    that differ only in the seed are one row, with mean and deviation; the random directions of a
    run are averaged before.
    """
    from fedstrata.deploy.console.tabular import Cell, Column, Spread, Table
    from fedstrata.deploy.results.series import series_of

    with reporting():
        require("torch")
        from fedstrata.common.learning.landscape import Around, Surroundings

        series = series_of(named_runs(names, runs), label or ())
        rows = list[list[Cell]]()
        for each in series:
            several = list[list[Around]]()
            tops = list[float]()
            for run in each.runs:
                around = Surroundings.of(run.experiment, run.path, samples=samples)
                places = (0.0, *(distance or DISTANCES))
                several.append([around.at(r, directions=directions) for r in places])
                facts: dict[str, Any] = {"run": run.id, "label": each.label, "seed": run.seed}
                if eigenvalue:
                    tops.append(around.eigenvalue())
                    facts["eigenvalue"] = tops[-1]
                if output == "json":
                    points = [asdict(point) for point in several[-1]]
                    typer.echo(json_text({**facts, "points": points}))
            for places in zip(*several, strict=True):
                away = places[0].distance
                row: list[Cell] = [each.label, away]
                for key in ("loss", "worst_loss", "score", "worst_score"):
                    row.append(Spread.of([getattr(place, key) for place in places]))
                if eigenvalue:  # it is that of the model itself
                    row.append(Spread.of(tops * (not away)))
                rows.append(row)
        score = series[0].runs[0].experiment.score_label
        columns = [Column("", text=True), Column("distance", digits=3)]
        for head in ("loss", "loss, worst", score, f"{score}, worst"):
            columns.append(Column(head, digits=4))
        if eigenvalue:
            columns.append(Column("eigenvalue", digits=3))
        if output == "table":
            typer.echo(Table("sharpness", "Sharpness", columns, rows).on_terminal(), nl=False)


@app.command()
def divergence(
    names: Names, runs: Runs = Path("runs"), label: Labels = None, output: Output = "table"
) -> None:
    """Show how far final models are from those of centralised runs (Tempo, eq. 8).

    The runs with one device are the centralised ones: each other run is compared with the one of
    its seed, which began as the same model. Runs that differ only in the seed are one row, with
    mean and deviation.
    """
    from fedstrata.deploy.console.tabular import Cell, Column, Spread, Table
    from fedstrata.deploy.results.series import series_of

    with reporting():
        require("torch")
        from fedstrata.common.learning.landscape import Surroundings

        given = named_runs(names, runs)
        central = {run.seed: run for run in given if len(run.experiment.tree.devices) == 1}
        others = [run for run in given if central.get(run.seed) is not run]
        rows = list[list[Cell]]()
        for each in series_of(others, label or ()):
            found = []
            for run in each.runs:
                other = central.get(run.seed)
                if other is None:
                    problem = f"{run.id} has no centralised run of its seed"
                    raise InvalidExperiment("seed", run.seed, problem, CENTRALISED)
                model = Surroundings.of(run.experiment, run.path, samples=1)
                target = Surroundings.of(other.experiment, other.path, samples=1)
                found.append(model.divergence(target))
                if output == "json":
                    facts = {"run": run.id, "label": each.label, "seed": run.seed}
                    facts |= {"central": other.id, **asdict(found[-1])}
                    typer.echo(json_text(facts))
            lengths = Spread.of([one.length for one in found])
            rows.append([each.label, lengths, Spread.of([one.relative for one in found])])
        columns = [Column("", text=True)]
        columns += [Column(name, digits=4) for name in ("divergence", "relative")]
        if output == "table":
            typer.echo(Table("divergence", "Divergence", columns, rows).on_terminal(), nl=False)


def _listed(given: str, known: Sequence[str], option: str) -> list[str]:
    """Return the words of a list with commas. Raises BadParameter for an unknown one."""
    words = [word.strip() for word in given.split(",") if word.strip()]
    for unknown in (word for word in words if word not in known):
        raise typer.BadParameter(f"{unknown!r}: use {', '.join(known)}", param_hint=option)
    return words


def _summary(run: Run) -> dict[str, Any]:
    experiment = run.experiment
    return {
        "run": run.id,
        "name": experiment.name,
        "started": run.started,
        "aggregation": run.aggregation,
        "model": experiment.model.name,
        "dataset": experiment.data.dataset,
        "state": str(run.state),
        "reason": run.reason,
        "global_rounds_done": len(run.rounds),
        "global_rounds": experiment.rounds,
        "accuracy": run.accuracy,
        "score": run.score,
        "score_name": experiment.score.name,
        "seconds": run.seconds,
        "simulated": run.simulated,
        "bytes": run.totals,
        "seed": run.seed,
        "folder": str(run.path),
    }


def _files(page: Page, kinds: Sequence[str]) -> Iterator[tuple[str, str | bytes]]:
    """Yield the names and contents of a page's figures and tables as separate files."""
    for figure in page.figures:
        for kind, content in figure.files(kinds).items():
            yield f"{figure.name}.{kind}", content
        if figure.table is not None:
            yield f"{figure.name}.csv", figure.table.csv()
    for table in page.tables:
        yield f"{table.name}.csv", table.csv()
        yield f"{table.name}.tex", table.latex()


def _write(option: str, place: Path, files: Mapping[Path, str | bytes]) -> list[Path]:
    """Write files, make their folders, and return their paths. Raises InvalidExperiment that names
    the option.
    """
    try:
        if not files:
            place.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                path.write_text(content, encoding="utf-8", newline="")
            else:
                path.write_bytes(content)
    except OSError as error:
        raise InvalidExperiment(
            option, str(place), error.strerror or str(error), "Name a writable place."
        ) from None
    return list(files)
