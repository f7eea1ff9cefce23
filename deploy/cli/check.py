"""The command `fedstrata check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedstrata.common.text import json_text
from fedstrata.deploy.console.options import Output, refuse_given
from fedstrata.deploy.console.reporting import reporting
from fedstrata.deploy.console.tabular import Column, Table


def check(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            help=(
                "A rule, selector, trainer, codec, objective, attack or model of your own: "
                "package.module:Class."
            ),
            show_default=False,
        ),
    ] = None,
    keywords: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help=(
                "A keyword of the class, key=value; of a model a key of the experiment. Repeatable."
            ),
            show_default=False,
        ),
    ] = None,
    data: Annotated[Path, typer.Option(help="Of a trainer: a device's folder of samples.")] = Path(
        "data"
    ),
    names: Annotated[
        bool,
        typer.Option(
            "--list",
            help=(
                "List the names of rules, objectives, codecs and trainers, also of installed "
                "packages."
            ),
        ),
    ] = False,
    output: Output = "table",
) -> None:
    """Check a rule, selector, trainer, codec, objective, attack or model of your own: does a lab
    get what you mean?

    A rule: three rounds, the same twice, whichever blocks of columns, killed and resumed, with one
    upload. A selector: some rounds, the same twice, killed and resumed. A trainer: three rounds,
    the same twice, killed and resumed, its samples and steps. A codec: sizes, the same twice,
    unbiased or a contraction, whatever bytes arrive. An objective: gradients, weights, loss, the
    same twice. An attack: each method that it replaces, the same twice. A model: a step of
    training, the same twice, and whether its steps can be recorded. All: nothing is kept in the
    file's globals and classes. Exit codes: 0 right, 1 something is wrong, 4 it fails, or cannot be
    imported or built.
    """
    from fedstrata.common.errors import InvalidExperiment
    from fedstrata.common.experiment.reading import override
    from fedstrata.common.host.examination import Finding
    from fedstrata.deploy.checking.own_checks import checks

    if names:
        refuse_given(
            context, ("name", "keywords", "data"), "valid only without --list, which checks nothing"
        )
    if name is None and not names:
        raise typer.BadParameter(
            "missing. Name a class, package.module:Class, or give --list.", param_hint="NAME"
        )
    failed: InvalidExperiment | None = None
    with reporting():
        if names or name is None:
            _list(output)
            return
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
                facts = {"kind": kind, "item": one.item, "right": one.there, "note": one.note}
                typer.echo(json_text(facts))
        else:
            verdicts = {True: "right", False: "wrong"}
            cells = [[one.item, verdicts[one.there], one.note] for one in found]
            columns = [Column(title, text=True) for title in (kind, "is", "note")]
            typer.echo(Table("check", name, columns, cells).on_terminal(), nl=False)
        if failed is not None:
            raise failed
    if not all(one.there for one in found):
        raise typer.Exit(1)


def _list(output: str) -> None:
    """Print the names of rules, objectives, codecs and trainers: fedstrata's, and those of
    installed packages.
    """
    from fedstrata.common.methods.settings import RULES
    from fedstrata.common.model.codec_settings import CODEC_TABLES
    from fedstrata.common.settings.tables import PACKAGE, installed
    from fedstrata.common.settings.trainers import TRAINERS
    from fedstrata.common.settings.training import OBJECTIVES

    cells = []
    for group, ours in (
        ("rules", RULES),
        ("objectives", OBJECTIVES),
        ("codecs", CODEC_TABLES),
        ("trainers", TRAINERS),
    ):
        found = {**installed(group), **dict.fromkeys(ours, PACKAGE)}
        cells += [[group.removesuffix("s"), name, found[name]] for name in sorted(found)]
    if output == "json":
        for kind, name, place in cells:
            typer.echo(json_text({"kind": kind, "name": name, "class": place}))
        return
    columns = [Column(title, text=True) for title in ("kind", "name", "class")]
    typer.echo(Table("names", "installed", columns, cells).on_terminal(), nl=False)
