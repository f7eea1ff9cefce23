"""Executors of a pool's jobs: their interface, and a thread of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from common.accounting.child_report import TrainingPath
from common.experiment.training import TrainingSettings
from common.host.offload import offload
from device.jobs import Ending, HostedDevice, Job, Order, Prepared
from device.vmapped.gathering import most_together

if TYPE_CHECKING:
    from device.pool.trainers import Trainers


class Executor(Protocol):
    """Trains jobs on its accelerator, at most `most` at once; more than one if it may train similar jobs vmapped."""

    path: TrainingPath
    accelerator: str

    def most(self, training: TrainingSettings) -> int:
        """Return how many jobs of an experiment may be trained together. Raises InvalidExperiment."""

    async def start(self) -> Sequence[str]:
        """Return the accelerators of this machine. Raises RunFailed."""

    async def prepare(self, device: HostedDevice) -> Prepared:
        """Return a device's facts. Raises InvalidExperiment, RunFailed."""

    async def train(self, jobs: Sequence[Job]) -> None:
        """Set the outcome of each job, or raise FedstrataError, which becomes the outcome of the remaining jobs."""

    def forget(self, digest: str) -> None:
        """Drop what was made for an experiment, after the jobs under way."""

    async def close(self) -> None:
        """Release all resources; jobs under way are lost."""


class Thread:
    """A thread of this process, which then imports torch: for machines without the memory for two processes."""

    path = TrainingPath.IN_PROCESS

    def __init__(self) -> None:
        self.accelerator = "cpu"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training")
        self._made: Trainers | None = None

    def most(self, training: TrainingSettings) -> int:
        """Return how many jobs of an experiment may be trained together. Raises InvalidExperiment."""
        return most_together(training, self.accelerator)

    async def start(self) -> Sequence[str]:
        """Import torch and ask it for the accelerators."""
        return await offload(self._start, executor=self._thread)

    async def prepare(self, device: HostedDevice) -> Prepared:
        """Return a device's facts. Raises InvalidExperiment."""
        return await offload(partial(self._trainers.prepare, device, self.accelerator), executor=self._thread)

    async def train(self, jobs: Sequence[Job]) -> None:
        """Train the jobs, together or one after another."""
        loop = asyncio.get_running_loop()

        def done(number: int, how: Ending) -> None:
            loop.call_soon_threadsafe(jobs[number].end, how)

        def cancel() -> None:
            for job in jobs:
                job.order.cancelled.set()

        work = [(job.device, _from_thread(job.order)) for job in jobs]
        train = partial(self._trainers.train, work, self.accelerator, done)
        await offload(train, executor=self._thread, cancel=cancel)

    def forget(self, digest: str) -> None:
        """Drop the experiment's trainers."""
        if self._made is not None:
            self._thread.submit(self._made.forget, digest)

    async def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)

    @property
    def _trainers(self) -> Trainers:
        if self._made is None:
            raise RuntimeError("call Thread.start first")
        return self._made

    def _start(self) -> Sequence[str]:
        from common.learning.computing import accelerators  # imports torch: seconds, and 250 MB
        from device.pool.trainers import Trainers

        self._made = Trainers()
        there: Sequence[str] = accelerators()
        return there


def _from_thread(order: Order) -> Order:
    """Return the order with progress reported from another thread."""
    loop, progress = asyncio.get_running_loop(), order.progress

    def report(done: int, of: int) -> None:
        loop.call_soon_threadsafe(progress, done, of)

    return replace(order, progress=report)
