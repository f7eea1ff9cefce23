"""Runs on the workers of a Dask cluster: `fedstrata sweep --cluster tcp://HOST:8786`.

Dask decides where a run is done, starts workers again, and gives the runs of a worker that died to
others. A worker whose disk has the sweep's folder writes there, so that the next one resumes its
run. Another one sends the folder of the finished run: what a worker that died had done is lost.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fedstrata.common.errors import ConnectionFailed, RunFailed
from fedstrata.deploy.console.logs import write_line
from fedstrata.deploy.results.run import Run, State
from fedstrata.deploy.sweeps.execution import (
    STARTED,
    RunCommand,
    RunOrder,
    Slot,
    WorkerProcess,
    packed,
    unpack,
)
from fedstrata.deploy.sweeps.running import Watch
from fedstrata.deploy.sweeps.sweep_folder import LOCK, MissingRun, begun_in, settled

CONNECT_S: Final = 30.0
REPORT_S: Final = 1.0  # between two reports of a run's global rounds
AT_WORK: Final = ("executing", "long-running")  # states of a task that the scheduler still wants


@dataclass(frozen=True, slots=True)
class ClusterOrder:
    """An order with what a worker needs beside it.

    `mark`: the text in the lock of the sweep's folder. `begun`: the folder of a run that goes on,
    packed, or empty. `label`, `topic`: whose events are published, and where.
    """

    run: RunOrder
    digest: str
    mark: str
    begun: bytes
    label: str
    topic: str


class ClusterExecutor:
    """The workers of a Dask cluster, as many runs at once as these have threads. Raises
    ConnectionFailed.
    """

    def __init__(self, address: str, order: Callable[[MissingRun], RunOrder], mark: str) -> None:
        from distributed import Client

        logging.getLogger("distributed").setLevel(logging.CRITICAL)  # its errors are those of runs
        try:
            self._client = Client(address, timeout=CONNECT_S, set_as_default=False)
        except (OSError, ValueError) as error:
            remedy = "Start `dask scheduler`, or name another one."
            raise ConnectionFailed(
                f"--cluster: {address}: {error or type(error).__name__}. {remedy}"
            ) from None
        self._executor = self._client.get_executor(pure=False)
        self._order = order
        self._mark = mark
        self._watches: dict[str, Callable[[Mapping[str, Any]], None]] = {}  # by label
        self._topic = f"fedstrata-{mark}"
        self._client.subscribe_topic(self._topic, self._published)
        self.at_once = sum(self._client.nthreads().values())
        if not self.at_once:
            write_line(f"{address} has no workers yet: start `dask worker {address}`")

    def submit(self, job: MissingRun, watch: Watch) -> Future[bytes]:
        """Do a run on whichever worker."""
        self._watches[job.label] = lambda facts: watch(job, facts)
        begun = packed(job.resume, finished=False) if job.resume else b""
        order = self._order(job)
        sent = ClusterOrder(order, job.experiment.digest, self._mark, begun, job.label, self._topic)
        future: Future[bytes] = self._executor.submit(on_worker, sent)
        return future

    def close(self) -> None:
        """End the runs under way: their workers see that nobody waits for them."""
        self._executor.shutdown(wait=False)
        self._client.close()

    def _published(self, event: tuple[float, Mapping[str, Any]]) -> None:
        _, facts = event
        self._watches[facts["label"]](facts)


def on_worker(order: ClusterOrder) -> bytes:
    """Do a run on this worker of a cluster; return its packed folder, empty if it is in the
    sweep's.

    Raises FedstrataError.
    """
    from distributed import get_worker

    worker = get_worker()
    task = worker.get_current_task()
    reported = 0.0

    def stopped() -> bool:
        known = worker.state.tasks.get(task)
        return known is None or known.state not in AT_WORK

    def report(facts: Mapping[str, Any]) -> None:
        nonlocal reported
        now = time.monotonic()
        if facts["event"] != "global_round" or now >= reported + REPORT_S:
            reported = now
            worker.log_event(order.topic, {**facts, "label": order.label})

    def do(runs: Path, resume: Path | None) -> None:
        # Of this run alone: own code may be another one in the next.
        slot: Slot = WorkerProcess() if order.run.kind[0] else RunCommand()
        try:
            slot.run(order.run, runs, resume, report=report, stopped=stopped)
        finally:
            slot.close()

    report({"event": STARTED})
    if _sees(order.run.folder, order.mark):
        resume = begun_in(order.run.folder, order.digest, order.run.kind)
        if resume is not None and not settled(resume):
            raise RunFailed(f"another process runs {resume}")
        if resume is not None and Run(resume).state is State.FINISHED:  # its worker died after it
            return b""
        do(order.run.folder, resume)
        return b""
    with tempfile.TemporaryDirectory(dir=worker.local_directory, prefix="fedstrata-") as home:
        resume = unpack(order.begun, Path(home)) if order.begun else None
        do(Path(home), resume)
        (folder,) = Path(home).iterdir()
        return packed(folder, finished=True)


def _sees(folder: Path, mark: str) -> bool:
    """Return whether a folder of this host is the sweep's."""
    try:
        return (folder / LOCK).read_text(encoding="utf-8") == mark
    except (OSError, ValueError):
        return False
