"""The sweeps that fedstrata brings along, by name, and the argument that takes a name or a file."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final

import typer

from common.experiment.tables import proposal

HELP: Final = "The sweep: a TOML file, or the name of one that fedstrata brings along, such as study/two."


def shipped() -> dict[str, Path]:
    """Return the files of the sweeps, by name: folder and file."""
    folder = Path(str(files("deploy") / "experiments"))
    return {f"{path.parent.name}/{path.stem}": path for path in sorted(folder.glob("*/*.toml"))}


def find_sweep(given: Path) -> Path:
    """Return the file of a sweep's name; a file that is there comes first."""
    if given.exists() or given.suffix:
        return given
    known = shipped()
    if str(given) not in known:
        remedy = proposal(str(given), known, what="There are")
        raise typer.BadParameter(f"no file and no sweep has the name {str(given)!r}. {remedy}")
    return known[str(given)]


SweepArgument = Annotated[Path, typer.Argument(metavar="FILE", help=HELP, callback=find_sweep)]
