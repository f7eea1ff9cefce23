"""The command `fedstrata plan`: predict the costs of a run, or of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from common.text import json_text
from deploy.cli.sweep import Only, Seeds, SmallForm
from deploy.console.logs import write_line
from deploy.console.options import Overrides
from deploy.console.reporting import reporting
from deploy.console.shipped import OptionalExperimentFile
from deploy.console.stages import stages

if TYPE_CHECKING:
    from deploy.planning.predicting import Predictor
    from deploy.sweeps.grid import Grid


def plan(
    experiment: OptionalExperimentFile = None,
    overrides: Overrides = None,
    one_host: Annotated[
        bool, typer.Option("--one-host", help="Predict a lab on this machine, as started by `fedstrata run`.")
    ] = False,
    interface: Annotated[
        float, typer.Option(min=0.001, help="Rate of each host's network interface, Mbit/s.")
    ] = 1000.0,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Global rounds to simulate.  [default: 3, of a sweep's runs 2]", show_default=False),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Nodes to simulate at most; of a larger lab, a sample of its branches.  [default: 300]",
            show_default=False,
        ),
    ] = None,
    calibrated: Annotated[
        bool, typer.Option("--calibrate", help="First measure what messages cost on this machine, and keep it.")
    ] = False,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="File of --calibrate.  [default: $XDG_CACHE_HOME/fedstrata/calibration.json]", show_default=False
        ),
    ] = None,
    small: SmallForm = False,
    only: Only = None,
    seeds: Seeds = None,
    direct: Annotated[
        bool, typer.Option("--direct", help="Of a sweep: as `sweep --direct` runs it, on this machine.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, help="Of a sweep: runs at once.  [default: as `sweep`]", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write the prediction to this file, as JSON.", show_default=False)
    ] = None,
    output: Annotated[
        Literal["table", "json"], typer.Option("--format", help="Standard output: table or JSON.")
    ] = "table",
) -> None:
    """Predict seconds, bytes and memory of a run: its agents run in virtual time, with this machine's measured speed.

    The prediction has the load of this machine during the measurement: on a busy one it is for a busy one. Without
    --one-host each node is assumed to have its own machine, as fast as this one. --calibrate measures what messages
    cost here.

    Of a sweep's file: hours, bytes and memory of all its runs. Runs that differ only in the seed, in the number of
    global rounds or in how data are distributed are predicted once.
    """
    from common.experiment.reading import load, read
    from common.host.files import check_writable, writing
    from deploy.sweeps.grid import is_sweep

    with reporting():
        if calibrated:
            from deploy.planning.predicting import calibrate

            with stages(1) as begin:
                begin("measures what messages cost, in labs that compute nothing")
                costs = calibrate(calibration)
            write_line(costs)
        if experiment is None:
            if calibrated:
                return
            raise typer.BadParameter("name an experiment, or add --calibrate", param_hint="EXPERIMENT")
        if out is not None:
            check_writable(out)
        sweeps = is_sweep(read(experiment))
        if sweeps:
            from deploy.sweeps import grid, planning

            cells = grid.load(experiment, small=small, overrides=overrides or (), only=only or (), seeds=seeds)
        else:
            own = {"--small": small, "--only": only, "--seeds": seeds, "--direct": direct, "--jobs": jobs}
            for option in (option for option, value in own.items() if value):
                raise typer.BadParameter("valid only for a sweep", param_hint=option)
            chosen = load(experiment, overrides or ())
        from deploy.planning.predicting import STAGES, Predictor, text_of
        from deploy.planning.simulated import Site

        site = Site.DIRECT if direct else Site.ONE_HOST if one_host else Site.HOSTS
        rounds = rounds or (planning.ROUNDS if sweeps else None)
        predictor = Predictor(site=site, interface_mbit=interface, rounds=rounds, nodes=nodes, calibration=calibration)
        if sweeps:
            found = _sweep(cells, predictor, direct=direct, jobs=jobs)
            text = planning.written(found, output)
        else:
            with stages(STAGES) as begin:
                found = predictor.predict(chosen, begin=begin, reach=begin.reach)
            text = f"{json_text(found)}\n" if output == "json" else text_of(found)
        if out is not None:
            with writing(out):
                out.write_text(json_text(found, indent=2) + "\n", encoding="utf-8")
        typer.echo(text, nl=False)


def _sweep(grid: Grid, predictor: Predictor, *, direct: bool, jobs: int | None) -> dict[str, Any]:
    """Return the plan of a sweep's runs."""
    from deploy.sweeps import planning
    from deploy.sweeps.running import JOBS_STAGE, default_jobs

    groups, count = planning.groups_of(grid), jobs or 1
    fits = direct and jobs is None
    with stages(len(groups) + fits) as begin:
        planned = planning.plan_of(groups, lambda one: predictor.predict(one, reach=begin.reach), begin)
        if fits:
            begin(JOBS_STAGE)
            count = default_jobs(grid.experiments.values(), ("cpu",))
    return planning.to_json(grid, planned, jobs=min(count, len(grid.experiments)))
