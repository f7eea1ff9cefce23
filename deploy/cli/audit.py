"""The command `fedstrata audit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.text import json_text
from fedstrata.deploy.console.logs import write_line
from fedstrata.deploy.console.options import Output, Overrides, Runs, refuse
from fedstrata.deploy.console.reporting import reporting, require
from fedstrata.deploy.console.stages import stages
from fedstrata.deploy.console.tabular import Column, Table

if TYPE_CHECKING:
    from fedstrata.common.experiment.schema import Experiment
    from fedstrata.deploy.audits.audit import AuditRow

AUDITS: Final = ("membership", "inversion", "canaries")
SHADOWS_LEAST: Final = 4  # a deviation needs two that had a sample, and two that had not


def audit(
    name: Annotated[
        str,
        typer.Argument(
            metavar="RUN|EXPERIMENT",
            help="A finished run, or an experiment, which then is run in this process.",
        ),
    ],
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    device: Annotated[
        str | None,
        typer.Option(
            help="The device of which uploads are audited.  [default: the first]",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="membership, inversion or canaries; repeat it.  [default: all that apply]",
            show_default=False,
        ),
    ] = None,
    shadows: Annotated[
        int, typer.Option(min=0, help="Shadow runs of LiRA: an even number; 0: loss alone.")
    ] = 0,
    trials: Annotated[int, typer.Option(min=2, help="Trials of each inversion.")] = 3,
    samples: Annotated[int, typer.Option(min=1, help="Samples of a step that is inverted.")] = 1,
    picture: Annotated[
        Path | None,
        typer.Option(help="Write true and restored images to this SVG file.", show_default=False),
    ] = None,
    output: Output = "table",
) -> None:
    """Measure what a final model, and a device's upload, reveal of the samples behind them.

    Membership inference by loss, and by shadow runs; gradient inversion of the first upload, as one
    step, five epochs, the experiment's codec, noise and rule make it; a lower bound of epsilon by
    canaries beside the accountant's. Each number has its interval of 95 %.
    """
    refuse(
        shadows % 2 or 0 < shadows < SHADOWS_LEAST, "--shadows", "give an even number from 4, or 0"
    )
    for each in only or ():
        refuse(each not in AUDITS, "--only", f"{each!r}: use {', '.join(AUDITS)}")
    with reporting():
        require("torch")
        from fedstrata.common.host.files import check_writable
        from fedstrata.deploy.audits.audit import LIMITS, Audit

        experiment, run = _chosen(name, overrides or [], runs)
        if picture is not None:
            check_writable(picture)
        rows: list[AuditRow] = []
        skipped: list[str] = []
        with stages(shadows + 8) as begin:
            made = Audit(experiment, device or experiment.tree.devices[0], begin)
            audits: Mapping[str, Callable[[], Iterator[AuditRow]]] = {
                "membership": lambda: made.membership(run, shadows=shadows),
                "inversion": lambda: made.inversion(picture, trials=trials, samples=samples),
                "canaries": made.canaries,
            }
            for each in only or AUDITS:
                try:
                    rows += audits[each]()
                except InvalidExperiment as error:
                    if only:
                        raise
                    skipped.append(f"no {each}: {error}")
        for line in skipped:
            write_line(line)
        if output == "json":
            for row in rows:
                facts = {"audit": row.audit, "of": row.of, "attack": row.attack}
                number = {"measure": row.measure, **row.estimate.facts}
                typer.echo(json_text({**facts, **number, "limits": LIMITS[row.audit]}))
            return
        titles = ("audit", "of", "attack", "measure")
        columns = [Column(title, text=True) for title in titles]
        columns += [Column(title, digits=3) for title in ("value", "low", "high")]
        columns.append(Column("interval", text=True))
        cells = [
            [row.audit, row.of, row.attack, row.measure, *row.estimate.facts.values()]
            for row in rows
        ]
        typer.echo(Table("audit", "Audit", columns, cells, keys=3).on_terminal(), nl=False)
        for each in dict.fromkeys(row.audit for row in rows):
            typer.echo(f"{each}: {LIMITS[each]}")


def _chosen(name: str, overrides: list[str], runs: Path) -> tuple[Experiment, Path | None]:
    """Return an experiment, and the folder of its run if the name is that of one."""
    from fedstrata.common.experiment.reading import load
    from fedstrata.deploy.console.shipped import file_of
    from fedstrata.deploy.local.beforehand import check_lab
    from fedstrata.deploy.results.run import Run, State, find

    file = file_of(Path(name))
    if file.is_file():
        experiment = load(file, overrides)
        check_lab(experiment, None, direct=True)
        return experiment, None
    refuse(overrides, "--set", "valid only for an experiment: a run keeps its own")
    run = Run(find(name, runs))
    if run.state is not State.FINISHED:
        problem = f"it is {run.state}, not finished"
        raise InvalidExperiment("RUN", str(run.path), problem, "Resume it first.")
    return run.experiment, run.path
