"""Running what a sweep lacks: how many at once, by which executor, and what is shown meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    CancelledError,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from queue import SimpleQueue
from statistics import mean
from threading import Event
from typing import Any, Final, Protocol, TypeAlias

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fedstrata.common.errors import (
    MESSAGE_MOST,
    ConnectionFailed,
    FedstrataError,
    RunFailed,
    StorageFailed,
    bounded,
    described,
)
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host import nvidia
from fedstrata.common.host.accelerators import choose
from fedstrata.common.host.machine import available_bytes
from fedstrata.deploy.console.logs import as_json, frame_lines, write_line
from fedstrata.deploy.console.tabular import age
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.sweeps.execution import STARTED, RunOrder, Slot
from fedstrata.deploy.sweeps.sweep_folder import MissingRun
from fedstrata.device.pool.pool import cores

# what `default_jobs` does
JOBS_STAGE: Final = "finds how many runs at once fit into the memory of this machine"
MEMORY_SHARE: Final = 0.9  # of the memory that is available
RUNNING_MOST: Final = 4  # runs that the live line names
REMIND_S: Final = 20.0  # between looks at what labs wait for


# How many runs at once


def accelerators_of(name: str) -> Sequence[str]:
    """Return the accelerators that `--accelerator` selects, of this machine's. Raises
    InvalidExperiment.
    """
    if name == "cpu":
        return ("cpu",)
    known = ["cpu"]
    if (gpus := nvidia.find()) is not None:
        known += [f"cuda:{gpu.index}" for gpu in gpus.states()]
    return choose(name, known)


def default_jobs(experiments: Iterable[Experiment], accelerators: Sequence[str]) -> int:
    """Return how many of the experiments run at once without a network: one per GPU, or per core if
    memory permits.
    """
    if accelerators[0] != "cpu":
        return len(accelerators)
    most = cores()
    available = available_bytes()
    if most == 1 or available is None:
        return most
    # their memory may differ
    kinds = {str((one.model, one.data.dataset, one.sizes())): one for one in experiments}
    return fitting(most, available, max(map(_in_process, kinds.values())))


def fitting(cores: int, available: float, each: int) -> int:
    """Return how many processes of `each` bytes fit into the available memory, at least 1 and at
    most one per core.
    """
    return max(1, min(cores, int(MEMORY_SHARE * available // each)))


def _in_process(experiment: Experiment) -> int:
    """Return the memory of a run without a network; found in a process of its own, as it loads data
    and model.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_bytes_of, experiment.to_json()).result()


def _bytes_of(experiment_json: str) -> int:
    """Return the bytes of a process that has all roles of an experiment, given as JSON."""
    from fedstrata.deploy.planning import footprint, workload

    work = workload.workload(parse(experiment_json))
    return footprint.direct_bytes(
        work.experiment, work.layout, data_bytes=work.data_bytes, kept_bytes=work.kept_bytes
    )


# Executors


Watch: TypeAlias = Callable[[MissingRun, Mapping[str, Any]], None]


class RunExecutor(Protocol):
    """Does runs, as many at once as it can."""

    def submit(self, job: MissingRun, watch: Watch) -> Future[bytes]:
        """Do a run in its turn, and return its packed folder if that is not in the sweep's.

        `watch` gets the run's events, from other threads.
        """

    def close(self) -> None:
        """End the runs under way, which can be resumed, and forget the others."""


class HostExecutor:
    """Processes of this host, in threads that wait for them.

    `order` makes the order of a run on an accelerator. `accelerators`: one for each run at once.
    """

    def __init__(
        self,
        order: Callable[[MissingRun, str], RunOrder],
        accelerators: Sequence[str],
        slot: type[Slot],
    ) -> None:
        self._order = order
        self._threads = ThreadPoolExecutor(len(accelerators))
        self._slots = [(slot(), each) for each in accelerators]
        self._free = SimpleQueue[tuple[Slot, str]]()
        self._stopping = Event()
        for each in self._slots:
            self._free.put(each)

    def submit(self, job: MissingRun, watch: Watch) -> Future[bytes]:
        """Do a run, in its turn."""
        return self._threads.submit(self._do, job, watch)

    def close(self) -> None:
        """End the runs under way."""
        self._stopping.set()
        self._threads.shutdown(cancel_futures=True)
        for slot, _ in self._slots:
            slot.close()

    def _do(self, job: MissingRun, watch: Watch) -> bytes:
        slot, accelerator = self._free.get()
        order = self._order(job, accelerator)
        report = partial(watch, job)
        report({"event": STARTED})
        try:
            slot.run(order, order.folder, job.resume, report=report, stopped=self._stopping.is_set)
        finally:
            self._free.put((slot, accelerator))
        return b""


# Progress


@dataclass(slots=True)
class _Running:
    """A run under way: since when, its completed global rounds, and what its lab waits for, if
    anything.
    """

    since: float
    rounds: int = 0
    waits_for: str = ""
    reminded: str = ""  # the last reason that was written
    begun: bool = False  # whether another process had it before


class SweepProgress:
    """State of a running sweep. `finished`: its runs that were there, by digest; `runs`: how many
    it has in all.
    """

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
        with Live(
            console=errors, refresh_per_second=2, transient=True, get_renderable=self.picture
        ) as live:
            self._live = live
            yield
        self._live = None

    def take(self, job: MissingRun, facts: Mapping[str, Any]) -> None:
        """Take an event of a run, from whichever thread; an event that arrives behind the run's end
        is ignored.
        """
        event = facts["event"]
        if job.label not in self._pending:
            return
        if event == STARTED:
            known = self._running.get(job.label)
            self._running[job.label] = known or _Running(time.monotonic())
            self._running[job.label].begun = known is not None
        if (running := self._running.get(job.label)) is None:
            return
        if event == "waiting":
            running.waits_for = str(facts["for"])
        elif event == "run":
            done = int(facts["done"])
            if running.begun:
                how = f"resumed behind global round {done}" if done else "run again from its start"
                self._write(f"{job.label}: its process was lost; {how}")
            running.rounds = done
            running.begun = True
        elif event == "global_round":
            running.rounds = int(facts["global_round"])
            running.waits_for = ""

    def remind(self) -> None:
        """Write what labs wait for, once for each reason."""
        for label, running in list(self._running.items()):
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

    def fail(self, job: MissingRun, error: FedstrataError) -> None:
        """Take the failure of a run."""
        self._end(job)
        self.failed[job.label] = str(error)
        self._write(f"{self.count}: {job.label} failed: {error}")
        for line in frame_lines(getattr(error, "frames", ())):
            self._write(line)

    @property
    def count(self) -> str:
        """How many runs are finished, such as 3/12."""
        return f"{self._done}/{self._runs}"

    def left_s(self) -> float | None:
        """Return the seconds until the end: from finished runs of the same kind, or else of all
        kinds.
        """
        known = [seconds for several in self._seconds.values() for seconds in several]
        if not known:
            return None
        now = time.monotonic()
        total = longest = 0.0
        for label, job in list(self._pending.items()):
            whole = mean(self._seconds.get(_kind(job.experiment), known))
            rest = whole
            if (running := self._running.get(label)) is not None:
                share = running.rounds / job.experiment.rounds
                rest = max(0.0, min(whole - (now - running.since), whole * (1 - share)))
            total = total + rest
            longest = max(longest, rest)
        return max(total / self._jobs, longest)

    def picture(self) -> Text:
        """Return the live line."""
        under_way = [
            (label, each.rounds)
            for label, each in list(self._running.items())
            if label in self._pending
        ]
        running = [
            f"{label} {done}/{self._pending[label].experiment.rounds}" for label, done in under_way
        ]
        more = [f"and {len(running) - RUNNING_MOST} more"] if len(running) > RUNNING_MOST else []
        failed = f", {len(self.failed)} failed" if self.failed else ""
        shown = "; ".join([*running[:RUNNING_MOST], *more])
        return Text.assemble((f"{self.count} runs{failed}", "bold"), self._left(), f"  {shown}")

    def _left(self) -> str:
        left_s = self.left_s() if self._pending else None
        if left_s is None:
            return ""
        return f", about {age(left_s)} left"

    def _end(self, job: MissingRun) -> float:
        """Return the seconds since a run began."""
        del self._pending[job.label]
        running = self._running.pop(job.label, None)
        if running is None:
            return 0.0
        return time.monotonic() - running.since

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


def run_jobs(
    jobs: Sequence[MissingRun],
    executor: RunExecutor,
    progress: SweepProgress,
    *,
    take: Callable[[bytes], None] = lambda packed: None,
) -> None:
    """Run all jobs. One that fails is reported, and the others go on.

    `take` gets the packed folder of each that finished, empty if it is in the sweep's.
    Raises the error that each other run would have, too: of the disk, or of the broker.
    Interrupted, it ends the runs, which can be resumed.
    """
    common: list[FedstrataError] = []
    try:
        futures = {executor.submit(job, progress.take): job for job in jobs}
        left = set(futures)
        remind_at = time.monotonic() + REMIND_S
        while left:
            done, left = wait(left, timeout=REMIND_S, return_when=FIRST_COMPLETED)
            if time.monotonic() >= remind_at:
                progress.remind()
                remind_at = time.monotonic() + REMIND_S
            for future in done:
                if future.cancelled() and common:
                    continue
                try:
                    take(_packed(future))
                except FedstrataError as error:
                    progress.fail(futures[future], error)
                    if error.exit_code in (ConnectionFailed.exit_code, StorageFailed.exit_code):
                        common.append(error)
                        for other in left:
                            other.cancel()
                else:
                    progress.finish(futures[future])
    finally:
        executor.close()
    if common:
        raise common[0]


def _packed(future: Future[bytes]) -> bytes:
    """Return a run's packed folder. Raises FedstrataError."""
    try:
        return future.result()
    except CancelledError:
        raise ConnectionFailed("the cluster was lost. Repeat the command to go on.") from None
    except FedstrataError:
        raise
    except Exception as error:  # noqa: BLE001 - what a cluster raises of a worker, too
        raise RunFailed(bounded(described(error), MESSAGE_MOST)) from None
