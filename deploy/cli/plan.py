"""The command `fedstrata plan`: predict the costs of a run, or of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from deploy.planning.predicting import INTERFACE_MBIT, STAGES, calibrate, predict, text_of

if TYPE_CHECKING:
    from common.experiment.schema import Experiment
    from deploy.sweeps.grid import Grid


def plan(
    experiment: OptionalExperimentFile = None,
    overrides: Overrides = None,
    one_host: Annotated[
        bool, typer.Option("--one-host", help="Predict a lab on this machine, as started by `fedstrata run`.")
    ] = False,
    interface: Annotated[
        float, typer.Option(min=0.001, help="Rate of each host's network interface, Mbit/s.")
    ] = INTERFACE_MBIT,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Run the agents themselves in virtual time, up to some 10,000 devices.")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --simulate: global rounds to simulate.  [default: those of the experiment, at most 5]",
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
    """Predict seconds, bytes and memory of a run from its experiment and from this machine's measured speed.

    The prediction has the load of this machine during the measurement: on a busy one it is for a busy one. Without
    --one-host each node is assumed to have its own machine, as fast as this one. --simulate runs the real agents in
    virtual time: with quorums, deadlines and selection. --calibrate measures what messages cost here.

    Of a sweep's file: hours, bytes and memory of all its runs. Runs that differ only in the seed, in the number of
    global rounds or in how data are distributed are predicted once.
    """
    from common.experiment.reading import load, read
    from common.host.files import check_writable, writing
    from deploy.sweeps.grid import is_sweep

    with reporting():
        if rounds is not None and not simulate:
            raise typer.BadParameter("valid only with --simulate", param_hint="--rounds")
        if calibrated:
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
        predicted = partial(
            predict, one_host=one_host or direct, interface_mbit=interface, simulate=simulate, rounds=rounds,
            calibration=calibration,
        )  # fmt: skip
        if is_sweep(read(experiment)):
            from deploy.sweeps import grid, planning

            if simulate and direct:
                raise typer.BadParameter("valid only with a network, not with --direct", param_hint="--simulate")
            cells = grid.load(experiment, small=small, overrides=overrides or (), only=only or (), seeds=seeds)
            found = _sweep(cells, predicted, direct=direct, jobs=jobs)
            text = planning.written(found, output)
        else:
            own = {"--small": small, "--only": only, "--seeds": seeds, "--direct": direct, "--jobs": jobs}
            for option in (option for option, value in own.items() if value):
                raise typer.BadParameter("valid only for a sweep", param_hint=option)
            with stages(STAGES) as begin:
                found = predicted(load(experiment, overrides or ()), begin=begin)
            text = f"{json_text(found)}\n" if output == "json" else text_of(found)
        if out is not None:
            with writing(out):
                out.write_text(json_text(found, indent=2) + "\n", encoding="utf-8")
        typer.echo(text, nl=False)


def _sweep(
    grid: Grid, predict: Callable[[Experiment], dict[str, Any]], *, direct: bool, jobs: int | None
) -> dict[str, Any]:
    """Return the plan of a sweep's runs."""
    from deploy.sweeps import planning
    from deploy.sweeps.jobs import JOBS_STAGE, default_jobs

    def predicted(experiment: Experiment) -> dict[str, Any]:
        found = predict(experiment)
        return planning.without_network(experiment, found) if direct else found

    groups, count = planning.groups_of(grid), jobs or 1
    fits = direct and jobs is None
    with stages(len(groups) + fits) as begin:
        planned = planning.plan_of(groups, predicted, begin)
        if fits:
            begin(JOBS_STAGE)
            count = default_jobs(grid.experiments.values(), ("cpu",))
    return planning.to_json(grid, planned, jobs=min(count, len(grid.experiments)))
