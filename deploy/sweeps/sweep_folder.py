"""The folder of a sweep: the folders of its runs, found by the digests of their experiments."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fedstrata.cloud.run_folder import DIRECT, KINDS, SIMULATED
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.files import check_writable, replacing, writing
from fedstrata.common.text import json_text
from fedstrata.deploy.results.cells import ALIKE
from fedstrata.deploy.results.kept import keep
from fedstrata.deploy.results.kept_table import SWEEP
from fedstrata.deploy.results.run import Run, State, folders
from fedstrata.deploy.sweeps.grid import Grid

LOCK: Final = "sweep.lock"  # it has a text by which another host knows that it sees the same folder
SETTLE_S: Final = 10.0  # time in which the runs of a killed sweep end
POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class MissingRun:
    """A run that a sweep lacks. `resume`: the folder in which it was begun, or None."""

    label: str
    experiment: Experiment
    resume: Path | None


class SweepFolder:
    """A sweep's folder. `kept`: the folder with the table of its kept runs, which count as
    finished, too.
    """

    def __init__(self, path: Path, *, kept: Path | None = None) -> None:
        self.path = path
        self.kept = kept
        self.mark = secrets.token_hex(8)  # in the lock, while the folder is held

    def check(self) -> None:
        """Check that what has the name of a folder is one. Raises InvalidExperiment."""
        for key, path in (("--runs", self.path), ("--kept", self.kept)):
            for place in (path, path.parent) if path is not None else ():
                if place.exists() and not place.is_dir():
                    raise InvalidExperiment(key, str(place), "not a folder", "Name another place.")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Create the folder, and keep other sweeps out of it. Raises InvalidExperiment,
        StorageFailed.
        """
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                remedy = "Wait for its end, or name another folder."
                raise InvalidExperiment(
                    "--runs", str(self.path), "another sweep uses this folder", remedy
                ) from None
            except OSError:
                pass  # a file system without locks
            with writing(self.path):
                os.truncate(file, 0)
                os.pwrite(file, self.mark.encode(), 0)
            yield
        finally:
            os.close(file)

    def check_kept(self) -> None:
        """Check that runs can be kept, before the first one. Raises StorageFailed."""
        if self.kept is not None:
            check_writable(self.kept / SWEEP)

    def name_cells(self, grid: Grid) -> None:
        """Write the axes, and which cells the runs are of, for reports; cells of other choices keep
        their names.

        Raises StorageFailed, and InvalidExperiment for a damaged file.
        """
        file = self.path / SWEEP
        try:
            known = json.loads(file.read_text(encoding="utf-8"))["cells"] if file.exists() else {}
            cells = known | _names(grid)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidExperiment(
                "--runs", str(file), repr(error), "Repair or remove the file."
            ) from None
        _write(file, {**grid.file.order.written(), "cells": cells})

    def finished(self, grid: Grid) -> dict[str, Run]:
        """Return the finished runs of a sweep by the digests of their experiments: of several the
        oldest.
        """
        found: dict[str, Run] = {}
        for digest, runs in self._runs(grid).items():
            for run in runs:
                if run.state is State.FINISHED:
                    found.setdefault(digest, run)
        return found

    def keep(self, grid: Grid) -> None:
        """Keep the finished runs that are not kept yet. Raises StorageFailed."""
        if self.kept is None:
            return
        cells = _names(grid)
        fresh = []
        for digest, runs in self._runs(grid).items():
            done = [run for run in runs if run.state is State.FINISHED]
            if done and not any(run.path.is_relative_to(self.kept) for run in done):
                fresh.append((done[0], cells[digest]))
        if fresh:
            keep(fresh, self.kept, grid.file.order)

    def missing(
        self, grid: Grid, finished: Mapping[str, Run], *, direct: bool, simulated: bool = False
    ) -> list[MissingRun]:
        """Return the runs that are not finished, in order; those begun before are resumed.

        `direct`: whether they are to have no network, `simulated`: whether a simulated one. Raises
        InvalidExperiment if the folder has runs of another kind, whose seconds are not comparable,
        and if another process runs one of them.
        """
        runs = self._runs(grid)
        labels = grid.labels()
        kind = (direct, simulated)
        for run in (run for several in runs.values() for run in several):
            if run.kind != kind and (run.state is State.FINISHED or run.rounds):
                raise self._of_another_kind(run, kind)
        found = []
        for digest, experiment in grid.experiments.items():
            if digest in finished:
                continue
            begun = [run.path for run in runs.get(digest, ()) if run.kind == kind]
            resume = begun[-1] if begun else None
            if resume is not None and not settled(resume):
                problem = f"another process runs run {Run(resume).id}"
                remedy = "Wait for its end, or stop it."
                raise InvalidExperiment("--runs", str(self.path), problem, remedy)
            found.append(MissingRun(labels[digest], experiment, resume))
        return found

    def _of_another_kind(self, run: Run, kind: tuple[bool, bool]) -> InvalidExperiment:
        names = {(True, False): DIRECT, (False, True): SIMULATED}
        had, option = KINDS.get(names.get(run.kind, ""), ("a network", ""))
        options = zip(("--direct", "--simulate"), kind, strict=True)
        change = f"Omit {' and '.join(name for name, given in options if given)}"
        if option:
            change = f"Add {option}"
        remedy = f"{change}, or name another folder."
        return InvalidExperiment("--runs", str(self.path), f"run {run.id} had {had}", remedy)

    def _runs(self, grid: Grid) -> dict[str, list[Run]]:
        """Return the sweep's runs by digest, oldest first, the kept ones last.

        The digest of a kept run is that of its experiment as this release reads it.
        """
        wanted = grid.experiments
        own = [(str(run.manifest.get("experiment_digest")), run) for run in _runs_in(self.path)]
        kept = [(run.experiment.digest, run) for run in _runs_in(self.kept)]
        found: dict[str, list[Run]] = {}
        for digest, run in (*own, *kept):
            if digest in wanted:
                found.setdefault(digest, []).append(run)
        return found


def begun_in(folder: Path, digest: str, kind: tuple[bool, bool]) -> Path | None:
    """Return the folder of the last run of an experiment in a sweep's; None without one.

    `kind`: whether it has no network, and whether a simulated one.
    """
    for path in reversed(folders(folder)):
        run = Run(path)
        if run.manifest.get("experiment_digest") == digest and run.kind == kind:
            return path
    return None


def settled(path: Path) -> bool:
    """Wait until no process writes a run's folder, for at most SETTLE_S; return whether none
    does.
    """
    deadline = time.monotonic() + SETTLE_S
    while Run(path).state is State.RUNNING:
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def _names(grid: Grid) -> dict[str, str]:
    """Return the name of the cell of each experiment by digest; equal experiments have the names of
    all their cells.
    """
    names: dict[str, list[str]] = {}
    for cell in grid.cells:
        for experiment in cell.experiments.values():
            names.setdefault(experiment.digest, []).append(cell.label)
    return {digest: ALIKE.join(labels) for digest, labels in names.items()}


def _write(file: Path, tree: Mapping[str, Any]) -> None:
    with replacing(file) as written:
        written.write(json_text(tree, indent=1).encode() + b"\n")


def _runs_in(folder: Path | None) -> list[Run]:
    if folder is not None and folder.is_dir():
        return [Run(path) for path in folders(folder)]
    return []
