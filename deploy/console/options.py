"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Output = Annotated[Literal["table", "json"], typer.Option("--format", help="Standard output: table or JSON lines.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a key: --set training.epochs=2.")]
Runs = Annotated[Path, typer.Option(help="The folder that contains the runs' folders.", envvar="FEDSTRATA_RUNS")]
