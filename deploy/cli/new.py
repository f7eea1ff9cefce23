"""`fedstrata new`: a folder with an experiment, its code, a sweep and a test, all of which run as
they are.
"""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from fedstrata.common.host.files import writing
from fedstrata.deploy.console.options import refuse
from fedstrata.deploy.console.reporting import reporting

# Python's are texts here: no modules of ours
TEMPLATES: Final = Path(__file__).resolve().parents[1] / "templates"
NAME: Final = r"[A-Za-z][A-Za-z0-9_-]{0,63}"  # also the experiment's


class Template(StrEnum):
    """What the folder shows, each with the least score of its test."""

    NET = "net"
    RULE = "rule"
    CSV = "csv"
    NUMPY = "numpy"
    FLOWER = "flower"


LEAST: Final = {
    Template.NET: 0.6,
    Template.RULE: 0.3,
    Template.CSV: 0.3,
    Template.NUMPY: 0.7,
    Template.FLOWER: 0.5,
}


def new(
    folder: Annotated[
        Path, typer.Argument(metavar="NAME", help="The new folder, and the experiment's name.")
    ],
    rule: Annotated[
        bool, typer.Option("--rule", help="With an aggregation rule of your own, on digits.")
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="With a table of yours.")] = False,
    numpy: Annotated[
        bool, typer.Option("--numpy", help="With a trainer of your own, without PyTorch.")
    ] = False,
    flower: Annotated[
        bool, typer.Option("--flower", help="With a Flower app: pip install flwr.")
    ] = False,
) -> None:
    """Make a folder that runs: experiment, code, sweep, test. By default with a PyTorch model and a
    data function.
    """
    given = {Template.RULE: rule, Template.CSV: csv, Template.NUMPY: numpy, Template.FLOWER: flower}
    wanted = [each for each, is_wanted in given.items() if is_wanted]
    chosen = wanted or [Template.NET]
    refuse(len(wanted) > 1, f"--{chosen[-1]}", "use one of --rule, --csv, --numpy and --flower")
    refuse(
        not re.fullmatch(NAME, folder.name),
        "NAME",
        f"{folder.name!r}: use letters, digits, - and _",
    )
    refuse(folder.exists(), "NAME", f"{str(folder)!r} is there already: name another one")
    with reporting(), writing(folder):
        folder.mkdir(parents=True)
        for source in (*TEMPLATES.glob("*.*"), *(TEMPLATES / chosen[0]).iterdir()):
            text = source.read_text(encoding="utf-8").replace("NAME", folder.name)
            text = text.replace("LEAST", str(LEAST[chosen[0]]))
            (folder / source.name.removesuffix(".txt")).write_text(text, encoding="utf-8")
    typer.echo(f"cd {folder} && fedstrata run lab.toml --direct")
