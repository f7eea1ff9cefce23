"""fedstrata in scripts and notebooks: runs, sweeps and comparisons, by the command of the same
name.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fedstrata.common.errors import InvalidExperiment, RunFailed
from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.common.host.processes import python
from fedstrata.deploy.console.shipped import file_of
from fedstrata.deploy.results.compare import compared
from fedstrata.deploy.results.run import Run, find

ERRORS: Final = 20  # lines of standard error that are kept
Observe = Callable[[str, Mapping[str, Any]], None]
Mode: TypeAlias = Literal["lab", "direct", "simulate"]
"""How a run is done: a lab of processes on this machine, without a network, or in virtual time."""

MODES: Final[Mapping[str, Sequence[str]]] = {
    "lab": (),
    "direct": ("--direct",),
    "simulate": ("--simulate",),
}


def load(run: str | Path, *, runs: str | Path = "runs") -> Run:
    """Return a run by its folder, or by a prefix of its id below `runs`. Raises
    InvalidExperiment.
    """
    return Run(find(str(run), Path(runs)))


def run(
    experiment: str | Path | Mapping[str, Any],
    set: Mapping[str, Any] | None = None,  # noqa: A002 - as the command's option
    *,
    mode: Mode = "lab",
    runs: str | Path = "runs",
    progress: bool = True,
) -> Run:
    """Run an experiment, with a progress bar on standard error, and return the finished run:
    `fedstrata run`.

    For the arguments see `start`. Raises RunFailed with the last line that the command wrote.

        run = fedstrata.run("demo", {"rounds": 5}, mode="direct")
    """
    if not progress:
        return start(experiment, set, mode=mode, runs=runs).wait()
    with _bar() as observe:
        return start(experiment, set, mode=mode, runs=runs, observe=observe).wait()


def start(
    experiment: str | Path | Mapping[str, Any],
    set: Mapping[str, Any] | None = None,  # noqa: A002 - as the command's option
    *,
    mode: Mode = "lab",
    runs: str | Path = "runs",
    observe: Observe = lambda event, facts: None,
) -> RunningLab:
    """Start a run in processes of its own, and go on: `run` without waiting.

    `experiment`: a TOML file, the name of one that fedstrata brings along, or its keys as a tree.
    `set`: values by dotted key. `runs`: the folder of runs' folders. `observe(event, facts)` gets
    each event of the cloud, from another thread. Own code is imported from the current folder.
    Raises InvalidExperiment for a tree or a value that cannot be.
    """
    words = ["run", *_mode(mode), "--format", "json", "--runs", str(runs), *_overrides(set)]
    if isinstance(experiment, Mapping):
        return RunningLab(words, observe, text=to_toml(parse(experiment)))
    return RunningLab([*words, "--", str(experiment)], observe)


def sweep(
    file: str | Path,
    set: Mapping[str, Any] | None = None,  # noqa: A002 - as the command's option
    *,
    only: Mapping[str, str | Sequence[str]] | None = None,
    seeds: int | None = None,
    size: Literal["small", "reduced", "full"] = "full",
    mode: Mode = "direct",
    jobs: int | None = None,
    runs: str | Path = "runs",
) -> Mapping[str, Sequence[Run]]:
    """Run what a sweep lacks, and return its runs by cell, each cell's by seed: `fedstrata sweep`.

    `only`: the values of axes. `jobs`: runs at once. Progress and warnings are written to standard
    error. Raises InvalidExperiment, and RunFailed if a run failed; repeated, the call goes on.
    """
    from fedstrata.deploy.sweeps import grid as grids
    from fedstrata.deploy.sweeps.sweep_folder import SweepFolder

    chosen = []
    for axis, values in (only or {}).items():
        several = [values] if isinstance(values, str) else values
        chosen += [f"{axis}={value}" for value in several]
    overrides = _overrides(set)
    words = ["sweep", *_mode(mode), "--size", size, "--runs", str(runs), *overrides]
    words += [word for each in chosen for word in ("--only", each)]
    words += [] if seeds is None else ["--seeds", str(seeds)]
    words += [] if jobs is None else ["--jobs", str(jobs)]
    grid = grids.load(
        file_of(Path(file)), size=size, overrides=overrides[1::2], only=chosen, seeds=seeds
    )
    done = subprocess.run(
        [*python("fedstrata"), *words, "--", str(file)], stdout=subprocess.DEVNULL, check=False
    )
    if done.returncode != 0:
        raise RunFailed(f"the sweep {file} is not finished (exit code {done.returncode})")
    finished = SweepFolder(Path(runs) / grid.folder).finished(grid)
    found = {}
    for cell in grid.cells:
        found[cell.label] = [finished[each.digest] for each in cell.experiments.values()]
    return found


def compare(runs: Sequence[Run | str | Path], *, target: float | None = None) -> Mapping[str, Any]:
    """Return what runs cost until they reached a score, over seeds, as `fedstrata compare --format
    json` prints it.

    `target`: the score, by default the experiments' own; without one whole runs are compared.
    Raises InvalidExperiment if they cannot be compared.
    """
    found = []
    for each in runs:
        run = each if isinstance(each, Run) else load(each)
        found.append(run)
    _, _, tree = compared(found, target=target)
    return tree()


class RunningLab:
    """A started run. `await lab`, or `lab.wait()`, gives the finished Run."""

    def __init__(self, words: list[str], observe: Observe, *, text: str = "") -> None:
        self.folder: Path | None = None  # once the run has one
        self._observe = observe
        self._file: Path | None = None
        if text:
            handle, name = tempfile.mkstemp(prefix="fedstrata-", suffix=".toml")
            self._file = Path(name)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            words = [*words, "--", name]
        self._errors: deque[str] = deque(maxlen=ERRORS)
        self._process = subprocess.Popen(
            [*python("fedstrata"), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
        self._readers = [
            threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()

    def wait(self, timeout_s: float | None = None) -> Run:
        """Return the run once it has finished.

        Raises RunFailed with the last line that the command wrote if it failed or was refused, and
        TimeoutError, after which it can be waited for again.
        """
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the run is not finished after {timeout_s:g} s") from None
        for reader in self._readers:
            reader.join()
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        if code != 0 or self.folder is None:
            raise self._failure(code)
        return Run(self.folder)

    def __await__(self) -> Generator[Any, None, Run]:
        """Wait without blocking the event loop."""
        return asyncio.to_thread(self.wait).__await__()

    def stop(self) -> None:
        """Interrupt the run, which can be resumed: `fedstrata run --resume FOLDER`."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                facts = json.loads(line)
                event = facts.pop("event")
                if event == "run":
                    self.folder = Path(facts["folder"])
                self._observe(event, facts)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            self._errors.extend(line.strip() for line in lines if line.strip())

    def _failure(self, code: int) -> RunFailed:
        if self._errors:
            reason = self._errors[-1].removeprefix("fedstrata: ")
        else:
            reason = "the command wrote nothing"
        return RunFailed(f"{reason} (exit code {code})")


@contextmanager
def _bar() -> Iterator[Observe]:
    """Yield a callback for a run's events that moves a progress bar on standard error."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=Console(file=sys.stderr)) as bar:
        task = bar.add_task("waiting", total=0)

        def observe(event: str, facts: Mapping[str, Any]) -> None:
            if event == "run":
                bar.update(
                    task,
                    description=facts["experiment"],
                    total=facts["global_rounds"],
                    completed=facts["done"],
                )
            elif event == "global_round":
                bar.update(task, completed=facts["global_round"])
            elif event == "evaluated" and facts["score"] is not None:
                bar.update(task, description=f"score {facts['score']:.4f}")

        yield observe


def _mode(mode: str) -> Sequence[str]:
    """Return the options of a mode. Raises ValueError for another one."""
    if mode not in MODES:
        raise ValueError(f"mode = {mode!r}: there are {', '.join(MODES)}")
    return MODES[mode]


def _overrides(changes: Mapping[str, Any] | None) -> list[str]:
    return [
        word
        for key, value in (changes or {}).items()
        for word in ("--set", f"{key}={_toml(key, value)}")
    ]


def _toml(key: str, value: Any) -> str:
    """Return a value as `--set` reads it. Raises InvalidExperiment."""
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{_toml(key, name)} = {_toml(key, part)}" for name, part in value.items())
            + "}"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(key, part) for part in value) + "]"
    if isinstance(value, (bool, int, float, str)):
        return json.dumps(value, ensure_ascii=False)
    problem = "no value of an experiment"
    remedy = "Give a number, a text, true or false, or a list or table of them."
    raise InvalidExperiment(key, value, problem, remedy)
