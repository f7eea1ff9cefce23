"""The command `fedstrata plan`: predict the costs of a run, or of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from fedstrata.common.text import json_text
from fedstrata.deploy.cli.links import LEAST, MOST
from fedstrata.deploy.cli.sweep import Only, Seeds, SizeOption
from fedstrata.deploy.console.options import Overrides, refuse
from fedstrata.deploy.console.reporting import reporting
from fedstrata.deploy.console.shipped import ExperimentFile
from fedstrata.deploy.console.stages import stages

if TYPE_CHECKING:
    from fedstrata.common.experiment.schema import Experiment

OF_SWEEPS: Final = "valid only for a sweep"


def plan(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    interface: Annotated[
        float,
        typer.Option(min=LEAST, max=MOST, help="Rate of each host's network interface, Mbit/s."),
    ] = 1000.0,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Global rounds to simulate.  [default: 3, of a sweep's runs 2]",
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=2,
            help=(
                "Nodes to simulate at most; of a larger lab, a sample of its branches.  "
                "[default: 300]"
            ),
            show_default=False,
        ),
    ] = None,
    speeds: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Machines as fast as in this simulated run.  [default: measured]",
            show_default=False,
        ),
    ] = None,
    size: SizeOption = "full",
    only: Only = None,
    seeds: Seeds = None,
    output: Annotated[
        Literal["table", "json"], typer.Option("--format", help="Standard output: table or JSON.")
    ] = "table",
) -> None:
    """Predict seconds, bytes and memory of a run: `run --simulate` for some global rounds, with
    noise for training.

    Each node has its own machine, as fast as this one, as in another simulated run (--speeds), or
    as the experiment states. The prediction has the load of this machine during the measurement: on
    a busy one it is for a busy one.

    Of a sweep's file: hours, bytes and memory of all its runs, one after another. Runs that differ
    only in the seed, in the number of global rounds or in how data are distributed are predicted
    once.
    """
    from fedstrata.common.experiment.reading import load, read
    from fedstrata.deploy.sweeps import grid, planning

    with reporting():
        sweeps = grid.is_sweep(read(experiment))
        if sweeps:
            cells = grid.load(
                experiment, size=size, overrides=overrides or (), only=only or (), seeds=seeds
            )
            rounds = rounds or planning.ROUNDS
        else:
            refuse(size != "full", "--size", OF_SWEEPS)
            refuse(only, "--only", OF_SWEEPS)
            refuse(seeds, "--seeds", OF_SWEEPS)
            chosen = load(experiment, overrides or ())
        from fedstrata.deploy.planning.predicting import STAGES, Predictor, text_of

        predictor = Predictor(interface_mbit=interface, rounds=rounds, nodes=nodes, speeds=speeds)
        if sweeps:
            groups = planning.groups_of(cells)
            with stages(len(groups)) as begin:

                def predict(one: Experiment) -> dict[str, Any]:
                    return predictor.predict(one, reach=begin.reach)

                found = planning.to_json(cells, planning.plan_of(groups, predict, begin))
            text = planning.text_of(found)
        else:
            with stages(STAGES) as begin:
                found = predictor.predict(chosen, begin=begin, reach=begin.reach)
            text = text_of(found)
        if output == "json":
            text = json_text(found) + "\n"
        typer.echo(text, nl=False)
