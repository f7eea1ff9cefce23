"""The command `export`: the numbers of runs for the trackers that people use."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.text import counted, json_text
from fedstrata.deploy.cli.chosen import Names, named_runs
from fedstrata.deploy.console.options import Output, Runs
from fedstrata.deploy.console.reporting import reporting

if TYPE_CHECKING:
    from fedstrata.deploy.results.run import Run

POLL_S = 1.0


def export(
    names: Names,
    runs: Runs = Path("runs"),
    tensorboard: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Write event files for TensorBoard.", show_default=False
        ),
    ] = None,
    wandb: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Write for Weights & Biases: offline, or as WANDB_MODE.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Write each global round as it ends, until the run does."),
    ] = False,
    output: Output = "table",
) -> None:
    """Export runs to TensorBoard or Weights & Biases, afterwards or while they run.

    Only the runs' folders are read: a tracker that is away ends this command, never a run. Exported
    again, a run is replaced (TensorBoard), or joined when synchronised (W&B).
    """
    with reporting():
        places = {"tensorboard": tensorboard, "wandb": wandb}
        chosen = {kind: place for kind, place in places.items() if place}
        if not chosen:
            remedy = "Give --tensorboard or --wandb."
            raise InvalidExperiment("export", " ".join(names), "no tracker is chosen", remedy)
        for run in named_runs(names, runs):
            _export(run, chosen, follow=follow, output=output)


def _export(run: Run, chosen: Mapping[str, str], *, follow: bool, output: str) -> None:
    """Write a run to the chosen trackers, by kind and place, and report where it is."""
    from fedstrata.deploy.results.run import Run, State
    from fedstrata.deploy.results.trackers import TRACKERS, complete, series, time_of

    trackers = [TRACKERS[kind](run, place) for kind, place in chosen.items()]
    written = 0
    while True:
        rows = complete(run)
        state = run.state
        for row in rows[written:]:
            values = series(row, time=time_of(run))
            for tracker in trackers:
                tracker.write(row.global_round, row.elapsed_s, values)
        written = len(rows)
        if not follow or state is not State.RUNNING:
            break
        time.sleep(POLL_S)
        run = Run(run.path)
    for tracker in trackers:
        tracker.end(state)
    places = [tracker.place for tracker in trackers]
    if output == "json":
        facts = {"run": run.id, "global_rounds": len(rows), "state": state, "places": places}
        typer.echo(json_text({"event": "exported", **facts}))
        return
    for place in places:
        typer.echo(f"{counted(len(rows), 'global rounds')} of a {state} run: {place}")
