"""What a command works on: the experiment that it runs, of a file or of a run to resume, and the
runs that it reads.
"""

from __future__ import annotations

import logging
import shlex
from asyncio import CancelledError
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.text import counted, json_text
from fedstrata.deploy.console import logs

if TYPE_CHECKING:
    from fedstrata.cloud.run_folder import RunFolder
    from fedstrata.common.experiment.schema import Experiment
    from fedstrata.deploy.results.run import Run

Names = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...", help="Folders of runs, or of a sweep, or prefixes of runs' ids."
    ),
]
Resume = Annotated[
    Path | None, typer.Option(help="Resume the run of this folder.", show_default=False)
]


def named_runs(names: list[str], root: Path) -> list[Run]:
    """Return the runs that `names` name, and report what is skipped. Raises InvalidExperiment."""
    from fedstrata.deploy.results.run import Run, find_all

    found, others = find_all(names, root)
    if others:
        logs.write_line(f"skipped, no runs: {', '.join(others)}")
    return [Run(path) for path in found]


def tree_of(path: Path | None, overrides: list[str] | None, resume: Path | None) -> dict[str, Any]:
    """Return the experiment of a file with the overrides, or that of a run to resume, as a tree
    that is not validated.

    Raises InvalidExperiment.
    """
    from fedstrata.common.experiment.reading import read
    from fedstrata.deploy.sweeps.grid import is_sweep

    if resume is not None:
        if path is not None or overrides:
            raise typer.BadParameter("a resumed run keeps its experiment: omit the file and --set")
        path = resume / "experiment.toml"
    elif path is None:
        raise typer.BadParameter(
            "name an experiment, or resume a run with --resume FOLDER", param_hint="EXPERIMENT"
        )
    tree = read(path, overrides or ())
    if "machines" in tree:
        raise InvalidExperiment(
            "experiment", str(path), "a lab's file", "Name an experiment, and this one by --lab."
        )
    if is_sweep(tree):
        raise InvalidExperiment(
            "experiment", str(path), "a sweep of several runs", "Use `fedstrata sweep`."
        )
    return tree


def warn_of_direct(experiments: Iterable[Experiment]) -> None:
    """Report what experiments state and runs without a network do not have."""
    from fedstrata.common.settings.devices import HardwareSettings
    from fedstrata.common.settings.links import Links

    some = list(experiments)
    if any(each.links != Links() for each in some):
        logs.write_line("--direct: link rates and delays are not enforced", level=logging.WARNING)
    if any(each.hardware != HardwareSettings() for each in some):
        logs.write_line("--direct: slower hardware is not emulated", level=logging.WARNING)


@contextmanager
def kept_once_begun(folder: RunFolder, command: Sequence[str]) -> Iterator[None]:
    """Remove a new run's folder if the `with` block fails before the first global round, else
    report how to resume it.

    `command`: that resumes it, without its folder; empty if the process that has started this one
    reports it.
    """
    from fedstrata.deploy.results.run import may_resume

    try:
        with folder.removed_unless_begun():
            yield
    except BaseException as error:
        # the terminal shows ^C
        after_signal = "\n" if isinstance(error, KeyboardInterrupt | CancelledError) else ""
        if not folder.path.exists():
            logs.write_line(f"no global round had begun: {folder.path} is removed")
        elif command and may_resume(
            folder.path, by_experiment=isinstance(error, InvalidExperiment)
        ):
            logs.write_line(
                f"{after_signal}resume with: {shlex.join([*command, '--resume', str(folder.path)])}"
            )
        raise


def already_finished(
    path: Path | None,
    overrides: list[str] | None,
    resume: Path | None,
    *,
    direct: bool = False,
    simulated: bool = False,
    output: str,
) -> bool:
    """Return whether a run to resume needs nothing more, and then report that.

    Raises InvalidExperiment for what cannot be resumed: no run's folder, one that another process
    writes to, or one of another kind of lab.
    """
    from fedstrata.cloud.run_folder import RunFolder
    from fedstrata.deploy.results.run import Run, State

    if resume is None or path is not None or overrides:  # which `tree_of` refuses
        return False
    RunFolder.check(resume, direct=direct, simulated=simulated)
    run = Run(resume)
    if run.state is State.RUNNING:
        problem = "another process runs this run"
        remedy = "Wait for its end, or stop it."
        raise InvalidExperiment("--resume", str(resume), problem, remedy)
    if run.state is not State.FINISHED:
        return False
    facts = {
        "run": run.id,
        "folder": str(resume),
        "global_round": len(run.rounds),
        "accuracy": run.accuracy,
    }
    if output == "json":
        typer.echo(
            json_text({"event": "finished", **facts, "model": str(resume / "model.safetensors")})
        )
    done = counted(len(run.rounds), "global rounds")
    logs.write_line(f"--resume = {str(resume)!r}: this run is finished, after {done}")
    return True
