"""The command `fedstrata check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.text import json_text
from deploy.console.options import Output
from deploy.console.reporting import reporting
from deploy.console.tabular import Column, Table


def check(
    name: Annotated[
        str, typer.Argument(help="A rule, selector, trainer, codec or objective of your own: package.module:Class.")
    ],
    keywords: Annotated[
        list[str] | None,
        typer.Option("--set", help="A keyword of the class, key=value. Repeatable.", show_default=False),
    ] = None,
    data: Annotated[Path, typer.Option(help="Of a trainer: a device's folder of samples.")] = Path("data"),
    output: Output = "table",
) -> None:
    """Check a rule, a selector, a trainer, a codec or an objective of your own: does a lab get what you mean?

    A rule: three rounds, the same twice, whichever blocks of columns, killed and resumed, with one upload. A selector:
    some rounds, the same twice, killed and resumed. A trainer: three rounds, the same twice, killed and resumed, its
    samples and steps. A codec: sizes, the same twice, unbiased or a contraction, whatever bytes arrive. An objective:
    gradients, weights, loss, the same twice, and vmapped as in-process. Exit codes: 0 right, 1 something is wrong, 4 it
    fails, or cannot be imported or built.
    """
    from common.errors import InvalidExperiment
    from common.experiment.reading import override
    from common.host.examination import Finding
    from deploy.local.own_checks import checks

    failed: InvalidExperiment | None = None
    with reporting():
        given: dict[str, object] = {}
        for text in keywords or ():
            override(given, text)
        kind, steps = checks(name, given, data=data)
        found: list[Finding] = []
        try:
            found.extend(steps)
        except InvalidExperiment as error:
            failed = error
            found.append(Finding("runs", True, False, str(error)))
        if output == "json":
            for one in found:
                typer.echo(json_text({"kind": kind, "item": one.item, "right": one.there, "note": one.note}))
        else:
            cells = [[one.item, "right" if one.there else "wrong", one.note] for one in found]
            columns = [Column(title, text=True) for title in (kind, "is", "note")]
            typer.echo(Table("check", name, columns, cells).aligned(), nl=False)
        if failed is not None:
            raise failed
    if not all(one.there for one in found):
        raise typer.Exit(1)
