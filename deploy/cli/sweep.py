"""The command `fedstrata sweep`."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from common.errors import InvalidExperiment
from common.experiment.topology import CLOUD
from common.host.files import check_writable, writing
from common.host.processes import ending_signals
from common.protocol.topics import DEFAULT_LAB
from common.text import json_text
from deploy.cli.chosen import warn_of_direct
from deploy.console import logs
from deploy.console.login import Login, with_login
from deploy.console.options import ConnectTimeout, Overrides, Runs
from deploy.console.reporting import reporting
from deploy.console.shipped import SweepArgument
from deploy.console.stages import stages

if TYPE_CHECKING:
    from common.experiment.schema import Experiment
    from deploy.results.run import Run
    from deploy.sweeps.folder import MissingRun, SweepFolder
    from deploy.sweeps.grid import Grid
    from deploy.sweeps.running import Slot, SweepProgress

CONNECT_S: Final = 30.0
SPEEDS: Final = "speeds.json"  # in a sweep's folder: those of the machines of its simulated runs
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="AXIS=VALUE", help="Only cells with this value. Repeat it.", show_default=False),
]
Seeds = Annotated[
    int | None, typer.Option("--seeds", min=1, help="Seeds 1 to this, in place of the file's.", show_default=False)
]
SmallForm = Annotated[bool, typer.Option("--small", help="The small form.")]


@with_login
def sweep(
    file: SweepArgument,
    overrides: Overrides = None,
    seeds: Seeds = None,
    only: Only = None,
    small: SmallForm = False,
    dry_run: Annotated[bool, typer.Option(help="List the runs with their digests, and exit.")] = False,
    table: Annotated[bool, typer.Option("--table", help="Print the table of what is finished; run nothing.")] = False,
    runs: Runs = Path("runs"),
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Runs at once.  [default: with --direct by cores, memory and GPUs, with --simulate by cores; else 1]",
            show_default=False,
        ),
    ] = None,
    direct: Annotated[
        bool, typer.Option("--direct", help="Without a network: each run in a worker process of one thread.")
    ] = False,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="In virtual time, as `run --simulate`: machines of one calibration.")
    ] = False,
    accelerator: Annotated[
        str | None,
        typer.Option(
            help="With --direct or --simulate: cpu, cuda, cuda:N or auto.  [default: cpu]", show_default=False
        ),
    ] = None,
    broker: Annotated[
        str | None,
        typer.Option(
            help="Run in a lab of staying nodes on this MQTT broker, as `cloud` does: host[:port].", show_default=False
        ),
    ] = None,
    lab: Annotated[
        str | None,
        typer.Option(
            help="Run in a lab of staying nodes of this name, or of this file lab.toml, which also names its brokers.",
            show_default=False,
        ),
    ] = None,
    connect_timeout: ConnectTimeout = CONNECT_S,
    kept: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Keep finished runs there as small tables; those kept there count as finished.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page of HTML.", show_default=False)] = None,
    output: Annotated[
        Literal["table", "csv", "latex", "markdown", "json"],
        typer.Option("--format", help="Format of standard output."),
    ] = "table",
    *,
    login: Login,
) -> None:
    """Run a sweep: each combination of its axes' values with each seed; print the table beside the paper's figures.

    Without --direct or a broker each run is a lab on this machine, as `run` starts it. The runs are ordinary ones, in
    the folder NAME below --runs. Repeated, the command goes on: finished runs are skipped, an interrupted one is
    resumed, a failed one is tried again. Exit code 1: a run failed.
    """
    from deploy.kits.lab import reach
    from deploy.local.beforehand import require_torch
    from deploy.sweeps.folder import SweepFolder
    from deploy.sweeps.grid import load

    staying = broker is not None or lab is not None
    for wrong, option, problem in (
        (direct and staying, "--direct", "--direct uses no network: use it or a lab"),
        (simulate and (direct or staying), "--simulate", "use one of --simulate, --direct and a lab"),
        (
            accelerator is not None and not (direct or simulate),
            "--accelerator",
            "valid only with --direct or --simulate",
        ),
        (staying and jobs not in (None, 1), "--jobs", "a lab has one run at a time"),
    ):
        if wrong:
            raise typer.BadParameter(problem, param_hint=option)
    with reporting():
        grid = load(file, small=small, overrides=overrides or (), only=only or (), seeds=seeds)
        name = f"{grid.stem}-small" if small else grid.stem
        folder = SweepFolder(runs / name, kept=None if kept is None else kept / name)
        if dry_run:
            _list(grid, folder.finished(grid), as_json=output == "json")
            return
        if table:
            _print(grid, folder.finished(grid), output, html)
            return
        for one in grid.experiments.values():
            require_torch(one)
        if html is not None:
            check_writable(html)
        if staying:
            reach(lab or DEFAULT_LAB, None if broker is None else [broker], login).addresses(CLOUD)
        command = _cloud(broker, lab, connect_timeout, login) if staying else ["run", "--metrics", "127.0.0.1:0"]
        with folder.held():
            folder.name_cells(grid)
            folder.keep(grid)
            failed = _run(
                grid, folder, command=None if direct else command, simulate=simulate, jobs=jobs, accelerator=accelerator
            )
        _print(grid, folder.finished(grid), output, html)
    alike: dict[str, list[str]] = {}
    for label, reason in failed.items():
        alike.setdefault(reason, []).append(label)
    for reason, (label, *others) in alike.items():
        more = f" and {len(others)} more" if others else ""
        logs.write_line(f"failed: {label}{more}: {reason}", level=logging.ERROR)
    if failed:
        raise typer.Exit(1)


def _run(
    grid: Grid,
    folder: SweepFolder,
    *,
    command: Sequence[str] | None,
    simulate: bool,
    jobs: int | None,
    accelerator: str | None,
) -> Mapping[str, str]:
    """Run what a sweep lacks, without a network or by a command; return the reasons of failures by label."""
    from deploy.sweeps.running import JOBS_STAGE, CommandSlot, DirectSlot, SweepProgress, accelerators_of, default_jobs

    finished = folder.finished(grid)
    missing = folder.missing(grid, finished, direct=command is None, simulated=simulate)
    logs.write_line(f"{len(finished)} of {len(grid.experiments)} runs are finished, in {folder.path}")
    if not missing:
        return {}
    missing, lacking = _with_data(missing)
    if simulate:
        jobs = jobs or len(os.sched_getaffinity(0))
        command = _simulated(folder, missing, accelerator)
    with tempfile.TemporaryDirectory(prefix="fedstrata-sweep-") as home:
        slots: list[Slot]
        if command is None:
            warn_of_direct(grid.experiments.values())
            there = accelerators_of(accelerator or "cpu")
            if jobs is None:
                with stages(1) as begin:
                    begin(JOBS_STAGE)
                    jobs = default_jobs([job.experiment for job in missing], there)
            count = min(jobs, len(missing))
            slots = [DirectSlot(folder.path, there[i % len(there)]) for i in range(count)]
        else:
            count = min(jobs or 1, len(missing))
            slots = [CommandSlot(command, folder.path, Path(home), i) for i in range(count)]
        progress = SweepProgress(len(grid.experiments), finished, jobs=count)
        try:
            with progress.shown(missing):
                asyncio.run(_run_slots(missing, slots, progress, keep=partial(folder.keep, grid)))
        except asyncio.CancelledError:
            logs.write_line("\nrepeat the command to go on")
            raise
    return progress.failed | lacking


def _simulated(folder: SweepFolder, missing: Sequence[MissingRun], accelerator: str | None) -> list[str]:
    """Measure the machines once for all runs, now and later; return the command of a run in virtual time."""
    from deploy.planning.simulated_run import STAGES, keep_speeds

    speeds = folder.path / SPEEDS
    with stages(STAGES) as begin:
        keep_speeds(speeds, [job.experiment for job in missing], begin)
    on = ["--accelerator", accelerator] if accelerator else []
    return ["run", "--simulate", "--workers", "1", "--speeds", str(speeds), *on]


def _with_data(missing: Sequence[MissingRun]) -> tuple[list[MissingRun], dict[str, str]]:
    """Return the runs whose data are on this host, and why the others, by label, are left out, which is reported once.

    Raises InvalidExperiment if none remains.
    """
    from common.learning.readers.builtin import check_files

    there: list[MissingRun] = []
    lacking: dict[str, list[MissingRun]] = {}
    for job in missing:
        try:
            check_files(job.experiment.data)
            there.append(job)
        except InvalidExperiment as error:
            lacking.setdefault(str(error), []).append(job)
            if len(lacking) == 1 and len(lacking[str(error)]) == len(missing):
                raise
    for reason, jobs in lacking.items():
        logs.write_line(f"left out: {len(jobs)} runs: {reason}", level=logging.WARNING)
    if not there:
        names = " ".join(sorted({job.experiment.data.dataset for job in missing}))
        remedy = f"`fedstrata data check {names}` lists the files."
        raise InvalidExperiment("data.dataset", names, "none of them is on this host", remedy)
    return there, {job.label: reason for reason, jobs in lacking.items() for job in jobs}


async def _run_slots(
    missing: Sequence[MissingRun], slots: Sequence[Slot], progress: SweepProgress, *, keep: Callable[[], None]
) -> None:
    """Run the jobs. The ending signals end them."""
    from deploy.sweeps.running import run_jobs

    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in ending_signals():
        loop.add_signal_handler(number, task.cancel)
    await run_jobs(missing, slots, progress, keep=keep)


def _cloud(broker: str | None, lab: str | None, connect_timeout_s: float, login: Login) -> list[str]:
    """Return the command of a run in a lab of staying nodes; it waits while another run has the lab."""
    words = ["cloud", "--queue", "--connect-timeout", f"{connect_timeout_s:g}"]
    given = {"--lab": lab, "--broker": broker}
    return [*words, *(word for option, value in given.items() if value for word in (option, value)), *login.options()]


def _list(grid: Grid, finished: Mapping[str, Run], *, as_json: bool) -> None:
    """Print the runs of a sweep."""
    from common.experiment.data import is_there
    from deploy.console.tabular import Cell, Column, Table

    lacking = {one.data.dataset for one in grid.experiments.values() if not is_there(one.data)}
    rows = [
        (cell, seed, one, _state(one, finished, lacking))
        for cell in grid.cells
        for seed, one in cell.experiments.items()
    ]
    if as_json:
        for cell, seed, one, state in rows:
            facts = {"cell": dict(cell.values), "seed": seed, "digest": one.digest, "target": cell.target}
            typer.echo(json_text(facts | {"global_rounds": one.rounds, "state": state}))
        return
    columns = [*(Column(axis, text=True) for axis in grid.axes), Column("seed"), Column("global rounds")]
    columns += [Column("digest", text=True), Column("state", text=True)]
    cells: list[list[Cell]] = [
        [*cell.values.values(), seed, one.rounds, one.digest, state] for cell, seed, one, state in rows
    ]
    typer.echo(Table("runs", grid.title, columns, cells).aligned(), nl=False)
    rounds = sum(one.rounds for one in grid.experiments.values())
    left = len(grid.experiments) - len(finished)
    typer.echo(f"{len(grid.cells)} cells, {len(grid.experiments)} runs, {rounds} global rounds; {left} runs missing")
    if lacking:
        names = " ".join(sorted(lacking))
        typer.echo(f"no data on this host for {names}; `fedstrata data check {names}` lists the files")


def _state(experiment: Experiment, finished: Mapping[str, Run], lacking: Collection[str]) -> str:
    if experiment.digest in finished:
        return "finished"
    return "no data" if experiment.data.dataset in lacking else "missing"


def _print(grid: Grid, finished: Mapping[str, Run], output: str, html: Path | None) -> None:
    from deploy.sweeps.output import page_of, written
    from deploy.sweeps.results import SweepResults

    results = SweepResults(grid, finished)
    if html is not None:
        with writing(html):
            html.parent.mkdir(parents=True, exist_ok=True)
            html.write_text(page_of(results).html(grid.title), encoding="utf-8")
    typer.echo(written(results, output), nl=False)
