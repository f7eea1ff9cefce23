"""The command `fedstrata replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.text import json_text
from deploy.console.options import Output, Runs
from deploy.console.reporting import reporting, require


def replay(
    name: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run that finished, or a prefix of its id.")],
    runs: Runs = Path("runs"),
    accelerator: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or auto.")] = "cpu",
    output: Output = "table",
) -> None:
    """Repeat a run in this process with its recorded decisions, and compare the final models.

    Who took part and whose result came too late are taken from the run, so that also a run with quorums, or with a
    selector that reads durations, repeats. The replay is a run of its own. Exit codes: 0 the same model bit for bit,
    1 another model.
    """
    with reporting():
        from cloud.results import HELD
        from common.experiment.reading import load
        from deploy.local.replay import largest_difference, replayed
        from deploy.results.run import Run, find
        from deploy.watching.showing import show

        recorded = Run(find(name, runs))
        if recorded.experiment.training.trainer.learns_module:
            require("torch")
        with show(load(recorded.path / HELD), json_lines=output == "json") as observe:
            path = replayed(recorded, runs, accelerator=accelerator, observe=observe)
        difference = largest_difference(recorded.path, path)
    if output == "json":
        typer.echo(json_text({"replay": str(path), "of": str(recorded.path), "largest_difference": difference}))
    elif difference is not None:
        typer.echo(f"another model: its values differ by up to {difference:.3g}")
    else:
        typer.echo("the same model, bit for bit")
    if difference is not None:
        raise typer.Exit(1)
