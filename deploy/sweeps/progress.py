"""Progress of a sweep on standard error: a live line on a terminal, else a line for each run; with the time left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import mean
from typing import Any, Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from common.experiment.schema import Experiment
from deploy.console.logs import as_json, frame_lines, write_line
from deploy.console.tabular import age
from deploy.results.run import Run
from deploy.sweeps.folder import MissingRun
from deploy.sweeps.slots import CellFailed

RUNNING_MOST: Final = 4  # runs that the live line names


class SweepProgress:
    """State of a running sweep. `finished`: its runs that were there, by digest; `runs`: how many it has in all."""

    def __init__(self, runs: int, finished: Mapping[str, Run], *, jobs: int) -> None:
        self.failed: dict[str, str] = {}  # reasons by label
        self._runs = runs
        self._done = len(finished)
        self._jobs = jobs
        self._pending: dict[str, MissingRun] = {}
        self._begun: dict[str, float] = {}  # start of the running ones, by label
        self._resumed: set[str] = set()
        self._rounds: dict[str, int] = {}
        self._waits: dict[str, str] = {}  # what a lab waits for, by label
        self._reminded: dict[str, str] = {}
        self._seconds: dict[str, list[float]] = {}  # of the finished ones, by kind
        for run in (run for run in finished.values() if not run.simulated):
            self._seconds.setdefault(_kind(run.experiment), []).append(run.seconds)
        self._live: Live | None = None

    @contextmanager
    def shown(self, jobs: list[MissingRun]) -> Iterator[None]:
        """Show the progress of these jobs inside the `with` block."""
        self._pending = {job.label: job for job in jobs}
        errors = Console(stderr=True)
        if not errors.is_terminal or as_json():
            yield
            return
        with Live(console=errors, refresh_per_second=2, transient=True, get_renderable=self.picture) as live:
            self._live = live
            yield
        self._live = None

    def begin(self, job: MissingRun) -> None:
        """Take the start of a run."""
        self._begun[job.label] = time.monotonic()
        if job.resume is not None:
            self._resumed.add(job.label)

    def take(self, job: MissingRun, event: str, facts: Mapping[str, Any]) -> None:
        """Take an event of a run."""
        if event == "waiting":
            self._waits[job.label] = str(facts["for"])
        elif event in ("run", "global_round"):
            self._rounds[job.label] = int(facts.get("global_round", facts.get("done", 0)))
            if event == "global_round":
                self._waits.pop(job.label, None)

    def remind(self) -> None:
        """Write what labs wait for, once for each reason."""
        for label, reason in self._waits.items():
            if self._reminded.get(label) != reason:
                self._reminded[label] = reason
                self._write(f"{label} waits for {reason}")

    def finish(self, job: MissingRun) -> None:
        """Take the end of a run."""
        seconds = self._end(job)
        if job.label not in self._resumed:
            self._seconds.setdefault(_kind(job.experiment), []).append(seconds)
        self._done += 1
        self._write(f"{self.count}: {job.label}, {age(seconds)}{self._left()}")

    def fail(self, job: MissingRun, error: CellFailed) -> None:
        """Take the failure of a run."""
        self._end(job)
        self.failed[job.label] = str(error)
        self._write(f"{self.count}: {job.label} failed: {error}")
        for line in frame_lines(error.frames):
            self._write(line)

    @property
    def count(self) -> str:
        """How many runs are finished, such as 3/12."""
        return f"{self._done}/{self._runs}"

    def left_s(self) -> float | None:
        """Return the seconds until the end: from finished runs of the same kind, or else of all kinds."""
        known = [seconds for several in self._seconds.values() for seconds in several]
        if not known:
            return None
        now = time.monotonic()
        total = longest = 0.0
        for label, job in self._pending.items():
            whole = mean(self._seconds.get(_kind(job.experiment), known))
            rest = whole
            if label in self._begun:
                rounds = self._rounds.get(label, 0) / job.experiment.rounds
                rest = max(0.0, min(whole - (now - self._begun[label]), whole * (1 - rounds)))
            total, longest = total + rest, max(longest, rest)
        return max(total / self._jobs, longest)

    def picture(self) -> Text:
        """Return the live line."""
        running = [
            f"{label} {self._rounds.get(label, 0)}/{self._pending[label].experiment.rounds}" for label in self._begun
        ]
        more = [f"and {len(running) - RUNNING_MOST} more"] if len(running) > RUNNING_MOST else []
        failed = f", {len(self.failed)} failed" if self.failed else ""
        shown = "; ".join([*running[:RUNNING_MOST], *more])
        return Text.assemble((f"{self.count} runs{failed}", "bold"), self._left(), f"  {shown}")

    def _left(self) -> str:
        left_s = self.left_s() if self._pending else None
        return "" if left_s is None else f", about {age(left_s)} left"

    def _end(self, job: MissingRun) -> float:
        del self._pending[job.label]
        self._rounds.pop(job.label, None)
        self._waits.pop(job.label, None)
        return time.monotonic() - self._begun.pop(job.label)

    def _write(self, line: str) -> None:
        """Write a line above the live one."""
        if self._live is not None:
            self._live.console.print(Text(line))
        else:
            write_line(line)


def _kind(experiment: Experiment) -> str:
    """Return what runs of about the same duration share: the experiment without its seed."""
    return experiment.model_copy(update={"seed": 0}).to_json()
