"""The command `export`: a run's numbers for the trackers that people use."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from common.errors import InvalidExperiment
from common.text import json_text
from deploy.console.options import Output, Runs
from deploy.console.reporting import reporting

if TYPE_CHECKING:
    from deploy.runs.run import State
    from deploy.runs.trackers import Tracker

POLL_S = 1.0


def export(
    name: Annotated[str, typer.Argument(metavar="RUN", help="The run's folder, or a prefix of its id.")],
    runs: Runs = Path("runs"),
    tensorboard: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Write event files for TensorBoard.", show_default=False)
    ] = None,
    mlflow: Annotated[
        str | None,
        typer.Option(metavar="URI", help="Write to MLflow: http://HOST:PORT, or a folder.", show_default=False),
    ] = None,
    wandb: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Write for Weights & Biases: offline, or as WANDB_MODE.", show_default=False
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Write each global round as it ends, until the run does.")
    ] = False,
    output: Output = "table",
) -> None:
    """Export a run to TensorBoard, MLflow or Weights & Biases, afterwards or while it runs.

    Only the run's folder is read: a tracker that is away ends this command, never the run. Exported again, a run is
    replaced (TensorBoard), continued (MLflow), or joined when synchronised (W&B).
    """
    with reporting():
        from deploy.runs.run import Run, State, find
        from deploy.runs.series import complete, series
        from deploy.runs.trackers import TRACKERS

        chosen = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}
        if not any(chosen.values()):
            raise InvalidExperiment("export", name, "no tracker is chosen", "Give --tensorboard, --mlflow or --wandb.")
        folder = find(name, runs)
        run = Run(folder)
        trackers: list[Tracker] = [TRACKERS[kind](run, where) for kind, where in chosen.items() if where]
        written = [tracker.begin() for tracker in trackers]
        while True:
            rows, state = complete(run), run.state
            for place, tracker in enumerate(trackers):
                for row in rows:
                    if row.global_round > written[place]:
                        tracker.write(row.global_round, row.elapsed_s, series(row))
                        written[place] = row.global_round
            if not follow or state is not State.RUNNING:
                break
            time.sleep(POLL_S)
            run = Run(folder)
        for tracker in trackers:
            tracker.end(state)
        _show(trackers, len(rows), state, output)


def _show(trackers: list[Tracker], rounds: int, state: State, output: str) -> None:
    places = [tracker.place for tracker in trackers]
    if output == "json":
        typer.echo(json_text({"event": "exported", "global_rounds": rounds, "state": state, "places": places}))
        return
    for place in places:
        typer.echo(f"{rounds} global rounds of a {state} run: {place}")
