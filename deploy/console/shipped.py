"""The experiments and sweeps that fedstrata brings along, by name, and arguments that take a name
or a file.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final

import typer

from fedstrata.common.settings.tables import proposal

HELP: Final = "The experiment: a TOML file, or a name that `fedstrata experiments` lists."
SWEEP_HELP: Final = (
    "The sweep: a TOML file, or the name of one that fedstrata brings along, such as study/two."
)


def _folder() -> Path:
    return Path(str(files("fedstrata.deploy") / "experiments")).resolve()


def shipped() -> dict[str, Path]:
    """Return the files of the experiments, by name."""
    return {path.stem: path for path in sorted(_folder().glob("*.toml"))}


def shipped_sweeps() -> dict[str, Path]:
    """Return the files of the sweeps, by folder and name: `study/two`."""
    return {f"{path.parent.name}/{path.stem}": path for path in sorted(_folder().glob("*/*.toml"))}


def file_of(given: Path) -> Path:
    """Return the file of an experiment's or a sweep's name; a file that is there comes first.
    Another name stays.
    """
    if given.exists() or given.suffix:
        return given
    return (shipped() | shipped_sweeps()).get(str(given), given)


def _found(given: Path | None) -> Path | None:
    found = None if given is None else file_of(given)
    if found is not None and not (found.exists() or found.suffix):
        remedy = proposal(str(given), shipped() | shipped_sweeps(), what="There are")
        raise typer.BadParameter(f"no file and no experiment has the name {str(given)!r}. {remedy}")
    return found


ExperimentFile = Annotated[Path, typer.Argument(help=HELP, callback=_found)]
OptionalExperimentFile = Annotated[
    Path | None, typer.Argument(help=HELP, callback=_found, show_default=False)
]
SweepArgument = Annotated[Path, typer.Argument(metavar="FILE", help=SWEEP_HELP, callback=_found)]
