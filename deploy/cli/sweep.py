"""The command `fedstrata sweep`."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.host.files import writing
from fedstrata.common.protocol.topics import DEFAULT_LAB
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.text import counted, json_text
from fedstrata.deploy.cli.chosen import warn_of_direct
from fedstrata.deploy.console import logs
from fedstrata.deploy.console.login import Login
from fedstrata.deploy.console.options import (
    Accelerator,
    ConnectTimeout,
    Overrides,
    Runs,
    checked_lab_or_file,
    refuse,
    refuse_given,
    with_records,
)
from fedstrata.deploy.console.reporting import reporting, require
from fedstrata.deploy.console.shipped import SweepArgument
from fedstrata.deploy.console.stages import stages

if TYPE_CHECKING:
    from fedstrata.common.experiment.schema import Experiment
    from fedstrata.deploy.results.run import Run
    from fedstrata.deploy.sweeps.grid import Grid
    from fedstrata.deploy.sweeps.sweep_folder import MissingRun, SweepFolder

CONNECT_S: Final = 30.0
ONE_OF: Final = "use one of --simulate, --direct and a lab"
HERE: Final = "valid only with --direct or --simulate"
OF_RUNNING: Final = (  # parameters without effect where nothing runs
    "jobs",
    "direct",
    "simulate",
    "cluster",
    "accelerator",
    "broker",
    "lab",
    "connect_timeout",
    "dry_run",
)
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="AXIS=VALUE",
        help="Only cells with this value. Repeat it.",
        show_default=False,
    ),
]
Seeds = Annotated[
    int | None,
    typer.Option(
        "--seeds", min=1, help="Seeds 1 to this, in place of the file's.", show_default=False
    ),
]
SizeOption = Annotated[
    Literal["small", "reduced", "full"],
    typer.Option(
        "--size", help="Minutes on digits, the paper's data with fewer rounds, or all of it."
    ),
]


@with_records
def sweep(
    context: typer.Context,
    file: SweepArgument,
    overrides: Overrides = None,
    seeds: Seeds = None,
    only: Only = None,
    size: SizeOption = "full",
    dry_run: Annotated[
        bool, typer.Option(help="List the runs with their digests, and exit.")
    ] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Print the table of what is finished; run nothing.")
    ] = False,
    runs: Runs = Path("runs"),
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "Runs at once.  [default: with --direct by cores, memory and GPUs, with "
                "--simulate by cores; else 1]"
            ),
            show_default=False,
        ),
    ] = None,
    direct: Annotated[
        bool,
        typer.Option(
            "--direct", help="Without a network: each run in a worker process of one thread."
        ),
    ] = False,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate", help="In virtual time, as `run --simulate`: machines of one calibration."
        ),
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help=(
                "With --direct or --simulate: on the workers of the Dask cluster whose scheduler "
                "is tcp://HOST:8786."
            ),
            show_default=False,
        ),
    ] = None,
    accelerator: Accelerator = None,
    broker: Annotated[
        str | None,
        typer.Option(
            help="Run in a lab of staying nodes on this MQTT broker, as `cloud` does: host[:port].",
            show_default=False,
        ),
    ] = None,
    lab: Annotated[
        str | None,
        typer.Option(
            help=(
                "Run in a lab of staying nodes of this name, or of this file lab.toml, which "
                "also names its brokers."
            ),
            callback=checked_lab_or_file,
            show_default=False,
        ),
    ] = None,
    connect_timeout: ConnectTimeout = CONNECT_S,
    kept: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Keep finished runs there in a table; those kept there count as finished.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Literal["table", "csv", "latex", "json"],
        typer.Option("--format", help="Format of standard output."),
    ] = "table",
    *,
    login: Login,
) -> None:
    """Run a sweep: each combination of its axes' values with each seed; print the table beside the
    paper's figures.

    Without --direct or a broker each run is a lab on this machine, as `run` starts it. The runs are
    ordinary ones, in the folder NAME below --runs. Repeated, the command goes on: finished runs are
    skipped, an interrupted one is resumed, a failed one is tried again. Exit code 1: a run failed.
    """
    from fedstrata.common.host.accelerators import check_name
    from fedstrata.deploy.kits.lab_file import reach
    from fedstrata.deploy.local.beforehand import require_torch
    from fedstrata.deploy.sweeps.grid import load
    from fedstrata.deploy.sweeps.sweep_folder import SweepFolder

    if table:
        refuse_given(context, OF_RUNNING, "valid only without --table, which runs nothing")
    refuse(
        dry_run and output not in ("table", "json"),
        "--format",
        "with --dry-run it is table or json",
    )
    staying = broker is not None or lab is not None
    here = direct or simulate
    refuse(direct and staying, "--direct", "--direct uses no network: use it or a lab")
    refuse(simulate and (direct or staying), "--simulate", ONE_OF)
    if not here:
        refuse(accelerator is not None, "--accelerator", HERE)
        refuse(cluster is not None, "--cluster", HERE)
    refuse(staying and jobs not in (None, 1), "--jobs", "a lab has one run at a time")
    as_many = "a cluster has as many runs at once as its workers"
    refuse(cluster is not None and jobs is not None, "--jobs", as_many)
    with reporting():
        if accelerator is not None:
            check_name(accelerator)
        grid = load(file, size=size, overrides=overrides or (), only=only or (), seeds=seeds)
        folder = SweepFolder(runs / grid.folder, kept=kept and kept / grid.folder)
        folder.check()
        if dry_run:
            _list(grid, folder.finished(grid), as_json=output == "json")
            return
        if table:
            _print(grid, folder.finished(grid), output)
            return
        for one in grid.experiments.values() if cluster is None else ():
            require_torch(one)
        folder.check_kept()
        if staying:
            brokers = None if broker is None else [broker]
            reach(lab or DEFAULT_LAB, brokers, login).addresses(CLOUD)
        if cluster is not None:
            require("distributed")
        command = _cloud(broker, lab, connect_timeout, login) if staying else ["run"]
        command += ["--direct"] * direct + ["--simulate", "--workers", "1"] * simulate
        command += [] if staying or here else ["--metrics", "127.0.0.1:0"]
        with folder.held():
            folder.name_cells(grid)
            folder.keep(grid)
            failed = _run(
                grid, folder, command, jobs=jobs, accelerator=accelerator, cluster=cluster
            )
        _print(grid, folder.finished(grid), output)
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
    command: Sequence[str],
    *,
    jobs: int | None,
    accelerator: str | None,
    cluster: str | None,
) -> Mapping[str, str]:
    """Run what a sweep lacks, on this host or a cluster; return the reasons of failures by
    label.
    """
    from fedstrata.deploy.sweeps.execution import RunCommand, RunOrder, WorkerProcess, unpack
    from fedstrata.deploy.sweeps.running import HostExecutor, RunExecutor, SweepProgress, run_jobs

    direct = "--direct" in command
    simulate = "--simulate" in command
    finished = folder.finished(grid)
    missing = folder.missing(grid, finished, direct=direct, simulated=simulate)
    logs.write_line(
        f"{len(finished)} of {len(grid.experiments)} runs are finished, in {folder.path}"
    )
    if not missing:
        return {}
    lacking: dict[str, str] = {}
    if cluster is None:
        missing, lacking = _with_data(missing)
    if direct:
        warn_of_direct(grid.experiments.values())
    speeds = _speeds(folder, missing) if simulate else ""
    words = [*logs.options(), *command]

    def order(job: MissingRun, on: str) -> RunOrder:
        return RunOrder(job.experiment.to_json(), words, folder.path.resolve(), on, speeds)

    executor: RunExecutor
    if cluster is None:
        there = _accelerators(
            missing, direct=direct, simulate=simulate, jobs=jobs, accelerator=accelerator
        )
        slot = WorkerProcess if direct else RunCommand
        executor = HostExecutor(order, there, slot)
        at_once = len(there)
    else:
        from fedstrata.deploy.sweeps.cluster import ClusterExecutor

        executor = ClusterExecutor(cluster, partial(order, on=accelerator or ""), folder.mark)
        at_once = max(1, executor.at_once)
    progress = SweepProgress(len(grid.experiments), finished, jobs=at_once)

    def take(packed: bytes) -> None:
        if packed:
            with writing(folder.path):
                unpack(packed, folder.path)
        folder.keep(grid)

    try:
        with progress.shown(missing):
            run_jobs(missing, executor, progress, take=take)
    except KeyboardInterrupt:
        logs.write_line("\nrepeat the command to go on")
        raise
    return progress.failed | lacking


def _accelerators(
    missing: Sequence[MissingRun],
    *,
    direct: bool,
    simulate: bool,
    jobs: int | None,
    accelerator: str | None,
) -> list[str]:
    """Return the accelerator of each run at once on this host, "" where its command is to
    choose.
    """
    from fedstrata.deploy.sweeps.running import JOBS_STAGE, accelerators_of, default_jobs

    if not direct:
        count = jobs or (len(os.sched_getaffinity(0)) if simulate else 1)
        return [accelerator or ""] * min(count, len(missing))
    there = accelerators_of(accelerator or "cpu")
    if jobs is None:
        with stages(1) as begin:
            begin(JOBS_STAGE)
            jobs = default_jobs([job.experiment for job in missing], there)
    return [there[i % len(there)] for i in range(min(jobs, len(missing)))]


def _speeds(folder: SweepFolder, missing: Sequence[MissingRun]) -> str:
    """Measure this machine once for all simulated runs, now and later; return the text of the
    speeds.
    """
    from fedstrata.deploy.planning.simulated_run import STAGES, keep_speeds
    from fedstrata.deploy.sweeps.execution import SPEEDS

    speeds = folder.path / SPEEDS
    with stages(STAGES) as begin:
        keep_speeds(speeds, [job.experiment for job in missing], begin)
    return speeds.read_text(encoding="utf-8")


def _with_data(missing: Sequence[MissingRun]) -> tuple[list[MissingRun], dict[str, str]]:
    """Return the runs whose data are on this host, and why the others, by label, are left out,
    which is reported once.

    Raises InvalidExperiment if none remains.
    """
    from fedstrata.common.learning.readers.builtin import check_files

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
        logs.write_line(f"left out: {counted(len(jobs), 'runs')}: {reason}", level=logging.WARNING)
    if not there:
        names = " ".join(sorted({job.experiment.data.dataset for job in missing}))
        remedy = f"`fedstrata data check {names}` lists the files."
        raise InvalidExperiment("data.dataset", names, "none of them is on this host", remedy)
    return there, {job.label: reason for reason, jobs in lacking.items() for job in jobs}


def _cloud(
    broker: str | None, lab: str | None, connect_timeout_s: float, login: Login
) -> list[str]:
    """Return the command of a run in a lab of staying nodes; it waits while another run has the
    lab.
    """
    words = ["cloud", "--queue", "--connect-timeout", f"{connect_timeout_s:g}"]
    words += ["--lab", lab] if lab else []
    words += ["--broker", broker] if broker else []
    return [*words, *login.options()]


def _list(grid: Grid, finished: Mapping[str, Run], *, as_json: bool) -> None:
    """Print the runs of a sweep."""
    from fedstrata.common.settings.data import is_there
    from fedstrata.deploy.console.tabular import Column, Table

    lacking = {one.data.dataset for one in grid.experiments.values() if not is_there(one.data)}
    rows: list[dict[str, Any]] = []
    for cell in grid.cells:
        for seed, one in cell.experiments.items():
            facts = {"cell": dict(cell.values), "seed": seed, "digest": one.digest}
            facts |= {"target": cell.target, "global_rounds": one.rounds}
            rows.append(facts | {"state": _state(one, finished, lacking)})
    if as_json:
        for facts in rows:
            typer.echo(json_text(facts))
        return
    heads = {axis: Column(axis, text=True) for axis in grid.axes} | {
        "seed": Column("seed"),
        "global_rounds": Column("global rounds"),
        "digest": Column("digest", text=True),
        "state": Column("state", text=True),
    }
    cells = [facts | facts["cell"] for facts in rows]
    typer.echo(Table.of_keys("runs", grid.title, heads, cells).on_terminal(), nl=False)
    rounds = sum(one.rounds for one in grid.experiments.values())
    left = len(grid.experiments) - len(finished)
    counts = {"cells": len(grid.cells), "runs": len(grid.experiments), "global rounds": rounds}
    known = ", ".join(counted(count, what) for what, count in counts.items())
    typer.echo(f"{known}; {counted(left, 'runs')} missing")
    if lacking:
        names = " ".join(sorted(lacking))
        remedy = f"`fedstrata data check {names}` lists the files"
        typer.echo(f"no data on this host for {names}; {remedy}")


def _state(experiment: Experiment, finished: Mapping[str, Run], lacking: Collection[str]) -> str:
    if experiment.digest in finished:
        return "finished"
    if experiment.data.dataset in lacking:
        return "no data"
    return "missing"


def _print(grid: Grid, finished: Mapping[str, Run], output: str) -> None:
    from fedstrata.deploy.sweeps.measures import SweepResults
    from fedstrata.deploy.sweeps.output import written

    typer.echo(written(SweepResults(grid, finished), output), nl=False)
