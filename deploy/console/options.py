"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Output = Annotated[Literal["table", "json"], typer.Option("--format", help="Standard output: table or JSON lines.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a key: --set training.epochs=2.")]
Runs = Annotated[Path, typer.Option(help="The folder that contains the runs' folders.", envvar="FEDSTRATA_RUNS")]
DataFolder = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="The folder of data sets on this host, in place of the experiment's data.root.",
        envvar="FEDSTRATA_DATA",
        show_default=False,
    ),
]
DataRoot = Annotated[
    Path,
    typer.Option(
        "--data-root",
        help="Without --data: the folder to which the experiment's data.root is relative, and outside of which no "
        "experiment makes this host read.",
        envvar="FEDSTRATA_DATA_ROOT",
    ),
]
