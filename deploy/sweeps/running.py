"""Running what a sweep lacks: how many at once, one after another in each slot, and what is shown meanwhile."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any, Final, Protocol, TypeAlias

from rich.console import Console
from rich.live import Live
from rich.text import Text

from common.errors import ConnectionFailed, FedstrataError, InvalidExperiment, RunFailed, StorageFailed
from common.experiment.reading import parse, to_toml
from common.experiment.schema import Experiment
from common.host import nvidia
from common.host.accelerators import choose
from common.host.files import writing
from common.host.machine import available_bytes
from common.host.offload import offload
from common.host.processes import spawn, stop
from common.host.subprocess_channel import ProcessEnded, SubprocessChannel
from deploy.console.logs import ERROR, FRAME, as_json, frame_lines, last_error, options, write_line
from deploy.console.tabular import age
from deploy.local.lab import ROLE
from deploy.results.run import Run
from deploy.sweeps.folder import MissingRun
from device.pool.pool import cores

JOBS_STAGE: Final = "finds how many runs at once fit into the memory of this machine"  # what `default_jobs` does
MEMORY_SHARE: Final = 0.9  # of the memory that is available
WORKER: Final = "deploy.sweeps.worker"
STOP_S: Final = 20.0  # in which a lab ends its roles
Watch: TypeAlias = Callable[[str, Mapping[str, Any]], None]
RUNNING_MOST: Final = 4  # runs that the live line names
REMIND_S: Final = 20.0  # between looks at what labs wait for


# How many runs at once


def accelerators_of(name: str) -> Sequence[str]:
    """Return the accelerators that `--accelerator` selects, of this machine's. Raises InvalidExperiment."""
    if name == "cpu":
        return ("cpu",)
    gpus = nvidia.find()
    return choose(name, ["cpu", *(f"cuda:{gpu.index}" for gpu in (gpus.states() if gpus else ()))])


def default_jobs(experiments: Iterable[Experiment], accelerators: Sequence[str]) -> int:
    """Return how many of the experiments run at once without a network: one per GPU, or per core if memory permits."""
    if accelerators[0] != "cpu":
        return len(accelerators)
    most, available = cores(), available_bytes()
    if most == 1 or available is None:
        return most
    kinds = {str((one.model, one.data.dataset, one.sizes())): one for one in experiments}  # their memory may differ
    return fitting(most, available, max(map(_in_process, kinds.values())))


def fitting(cores: int, available: float, each: int) -> int:
    """Return how many processes of `each` bytes fit into the available memory, at least 1 and at most one per core."""
    return max(1, min(cores, int(MEMORY_SHARE * available // each)))


def _in_process(experiment: Experiment) -> int:
    """Return the memory of a run without a network; found in a process of its own, as it loads data and model."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_bytes_of, experiment.to_json()).result()


def _bytes_of(experiment_json: str) -> int:
    """Return the bytes of a process that has all roles of an experiment, given as JSON."""
    from deploy.planning import footprint, workload

    work = workload.workload(parse(experiment_json))
    return footprint.direct_bytes(work.experiment, work.layout, data_bytes=work.data_bytes, kept_bytes=work.kept_bytes)


# Slots


class CellFailed(RunFailed):
    """A run of a sweep failed; `exit_code` is that of its own command, `frames` are those of own code that failed."""

    def __init__(self, reason: str, code: int, frames: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.exit_code = code
        self.frames = tuple(frames)


class Slot(Protocol):
    """Runs one experiment at a time."""

    async def run(self, job: MissingRun, watch: Watch) -> None:
        """Run a job to its end; `watch` gets the run's events. Raises CellFailed."""

    def close(self) -> None:
        """End what runs."""


class DirectSlot:
    """A worker process, which runs experiments without a network. It is started again if it ended."""

    def __init__(self, runs: Path, accelerator: str) -> None:
        self._runs = runs
        self._accelerator = accelerator
        self._worker: SubprocessChannel | None = None

    async def run(self, job: MissingRun, watch: Watch) -> None:
        """Run a job to its end."""
        if self._worker is None:
            self._worker = await SubprocessChannel.start(WORKER, "the worker process")
        self._worker.send(**self._request(job))
        try:
            while "event" in (record := await self._worker.receive()):
                watch(str(record["event"]), record)
        except ProcessEnded as error:
            self.close()
            raise CellFailed(str(error), error.exit_code) from None
        except FedstrataError as error:
            frames = error.frames if isinstance(error, InvalidExperiment) else ()
            raise CellFailed(str(error), error.exit_code, frames) from None

    def _request(self, job: MissingRun) -> dict[str, str]:
        what = {"resume": str(job.resume)} if job.resume else {"experiment": job.experiment.to_json()}
        return {"runs": str(self._runs), "accelerator": self._accelerator, **what}

    def close(self) -> None:
        """Kill the worker; its run can be resumed."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


class CommandSlot:
    """A command for each run: `fedstrata run`, or `fedstrata cloud`, with its options.

    `home`: folder of the experiment's file and of the command's messages.
    """

    def __init__(self, command: Sequence[str], runs: Path, home: Path, number: int) -> None:
        self._command = command
        self._runs = runs
        self._file = home / f"experiment-{number}.toml"
        self._log = home / f"messages-{number}.log"
        self._process: subprocess.Popen[bytes] | None = None

    async def run(self, job: MissingRun, watch: Watch) -> None:
        """Run a job to its end."""
        with writing(self._file):
            self._file.write_text(to_toml(job.experiment), encoding="utf-8")
            self._log.write_bytes(b"")
        what = ["--resume", str(job.resume)] if job.resume else [str(self._file)]
        words = [*ROLE, *options(), *self._command, *what, "--runs", str(self._runs), "--format", "json"]
        self._process = process = spawn(words, log=self._log, read_output=True)
        assert process.stdout is not None
        while line := await offload(process.stdout.readline, cancel=process.terminate):
            if (event := _event(line)) is not None:
                watch(str(event["event"]), event)
        code = await offload(process.wait, cancel=process.terminate)
        if code:
            raise self._failure(code)

    def close(self) -> None:
        """Stop the command; its run can be resumed."""
        if self._process is not None:
            stop(self._process, grace_s=STOP_S)

    def _failure(self, code: int) -> CellFailed:
        if code < 0:
            return CellFailed(f"{self._command[0]} was killed by signal {-code}", code)
        last, *frames = last_error(self._log) or [f"{self._command[0]} ended with {code}"]
        return CellFailed(last.removeprefix(ERROR), code, [frame.removeprefix(FRAME) for frame in frames])


def _event(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line, None if it is truncated: the command was killed."""
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return event if "event" in event else None


# Progress


@dataclass(slots=True)
class _Running:
    """A run under way: since when, its completed global rounds, and what its lab waits for, if anything."""

    since: float
    rounds: int = 0
    waits_for: str = ""
    reminded: str = ""  # the last reason that was written


class SweepProgress:
    """State of a running sweep. `finished`: its runs that were there, by digest; `runs`: how many it has in all."""

    def __init__(self, runs: int, finished: Mapping[str, Run], *, jobs: int) -> None:
        self.failed: dict[str, str] = {}  # reasons by label
        self._runs = runs
        self._done = len(finished)
        self._jobs = jobs
        self._pending: dict[str, MissingRun] = {}
        self._running: dict[str, _Running] = {}  # by label
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
        self._running[job.label] = _Running(time.monotonic())

    def take(self, job: MissingRun, event: str, facts: Mapping[str, Any]) -> None:
        """Take an event of a run."""
        running = self._running[job.label]
        if event == "waiting":
            running.waits_for = str(facts["for"])
        elif event == "run":
            running.rounds = int(facts.get("global_round", facts.get("done", 0)))
        elif event == "global_round":
            running.rounds, running.waits_for = int(facts["global_round"]), ""

    def remind(self) -> None:
        """Write what labs wait for, once for each reason."""
        for label, running in self._running.items():
            if running.waits_for not in ("", running.reminded):
                running.reminded = running.waits_for
                self._write(f"{label} waits for {running.waits_for}")

    def finish(self, job: MissingRun) -> None:
        """Take the end of a run."""
        seconds = self._end(job)
        if job.resume is None:
            self._seconds.setdefault(_kind(job.experiment), []).append(seconds)
        self._done += 1
        self._write(f"{self.count}: {job.label}, {age(seconds)}{self._left()}")

    def fail(self, job: MissingRun, error: RunFailed | StorageFailed) -> None:
        """Take the failure of a run."""
        self._end(job)
        self.failed[job.label] = str(error)
        self._write(f"{self.count}: {job.label} failed: {error}")
        for line in frame_lines(error.frames if isinstance(error, CellFailed) else ()):
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
            if (running := self._running.get(label)) is not None:
                share = running.rounds / job.experiment.rounds
                rest = max(0.0, min(whole - (now - running.since), whole * (1 - share)))
            total, longest = total + rest, max(longest, rest)
        return max(total / self._jobs, longest)

    def picture(self) -> Text:
        """Return the live line."""
        running = [
            f"{label} {each.rounds}/{self._pending[label].experiment.rounds}" for label, each in self._running.items()
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
        return time.monotonic() - self._running.pop(job.label).since

    def _write(self, line: str) -> None:
        """Write a line above the live one."""
        if self._live is not None:
            self._live.console.print(Text(line))
        else:
            write_line(line)


def _kind(experiment: Experiment) -> str:
    """Return what runs of about the same duration share: the experiment without its seed."""
    return experiment.model_copy(update={"seed": 0}).to_json()


# Running


async def run_jobs(
    jobs: Sequence[MissingRun],
    slots: Sequence[Slot],
    progress: SweepProgress,
    *,
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Run all jobs. One that fails is reported, and the others go on. `keep` is called after each that finished.

    Raises CellFailed or StorageFailed for an error that each other run would have, too: of the disk, or of the broker.
    Cancelled, it ends the runs, which can be resumed.
    """
    left = deque(jobs)
    common: list[FedstrataError] = []

    async def fill(slot: Slot) -> None:
        while left:
            job = left.popleft()
            progress.begin(job)
            try:
                await slot.run(job, lambda event, facts, job=job: progress.take(job, event, facts))  # type: ignore[misc]
                keep()
            except (CellFailed, StorageFailed) as error:
                progress.fail(job, error)
                if error.exit_code in (ConnectionFailed.exit_code, StorageFailed.exit_code):
                    left.clear()
                    common.append(error)
            else:
                progress.finish(job)

    async def remind() -> None:
        while True:
            await asyncio.sleep(REMIND_S)
            progress.remind()

    reminder = asyncio.create_task(remind())
    try:
        async with asyncio.TaskGroup() as group:
            for slot in slots:
                group.create_task(fill(slot))
    finally:
        reminder.cancel()
        for slot in slots:
            slot.close()
    if common:
        raise common[0]
