"""The experiments and sweeps that fedstrata brings along, by name, and arguments that take a name or a file."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final

import typer

from common.experiment.tables import proposal

HELP: Final = "The experiment: a TOML file, or a name that `fedstrata experiments` lists."
SWEEP_HELP: Final = "The sweep: a TOML file, or the name of one that fedstrata brings along, such as study/two."


def shipped() -> dict[str, Path]:
    """Return the files of the experiments, by name."""
    folder = Path(str(files("deploy") / "experiments"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def shipped_sweeps() -> dict[str, Path]:
    """Return the files of the sweeps, by folder and name: `study/two`."""
    folder = Path(str(files("deploy") / "experiments"))
    return {f"{path.parent.name}/{path.stem}": path for path in sorted(folder.glob("*/*.toml"))}


def _found(given: Path | None) -> Path | None:
    """Return the file of an experiment's or a sweep's name; a file that is there comes first."""
    if given is None or given.exists() or given.suffix:
        return given
    known = shipped() | shipped_sweeps()
    if str(given) not in known:
        remedy = proposal(str(given), known, what="There are")
        raise typer.BadParameter(f"no file and no experiment has the name {str(given)!r}. {remedy}")
    return known[str(given)]


ExperimentFile = Annotated[Path, typer.Argument(help=HELP, callback=_found)]
OptionalExperimentFile = Annotated[Path | None, typer.Argument(help=HELP, callback=_found, show_default=False)]
SweepArgument = Annotated[Path, typer.Argument(metavar="FILE", help=SWEEP_HELP, callback=_found)]
