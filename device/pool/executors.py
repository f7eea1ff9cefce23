"""Executors of a pool's jobs: their interface, a thread of this process, and a worker process as
seen by its agent.

`device.pool.worker_process` is that process, and documents the records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final, Protocol, TypeVar

import numpy as np

from fedstrata.common.accounting.work import TrainingPath, Work
from fedstrata.common.errors import AcceleratorLost
from fedstrata.common.host.offload import offload, work_on
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.processes.fork_server import ForkedProcess, ForkServer
from fedstrata.common.processes.shared_rows import Place, place_of
from fedstrata.common.processes.subprocess_channel import (
    Record,
    ReplaceableProcess,
    SubprocessChannel,
    error_in,
)
from fedstrata.device.jobs import Cancelled, Ending, HostedDevice, Job, LocalResult, Order, Prepared
from fedstrata.device.pool.trainers_by_kind import Trainers, imports_of


class Executor(Protocol):
    """Trains jobs on its accelerator: one, or similar ones that may be trained vmapped."""

    accelerator: str

    async def start(self) -> None:
        """Start; PyTorch is imported when it is needed. Raises RunFailed."""

    async def accelerators(self) -> Sequence[str]:
        """Return the accelerators of this machine, of PyTorch. Raises RunFailed."""

    async def prepare(self, device: HostedDevice) -> Prepared:
        """Return a device's facts. Raises InvalidExperiment, RunFailed."""

    async def train(self, jobs: Sequence[Job]) -> None:
        """Set the outcome of each job, or raise FedstrataError, which becomes the outcome of the
        remaining jobs.
        """

    def forget(self, digest: str) -> None:
        """Drop what was made for an experiment, after the jobs under way."""

    async def close(self) -> None:
        """Release all resources; jobs under way are lost."""


class Thread:
    """A thread of this process: for machines without the memory for two processes."""

    def __init__(self) -> None:
        self.accelerator = "cpu"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training")
        self._trainers = Trainers()

    async def start(self) -> None:
        """Do nothing: the thread starts with its first work."""

    async def accelerators(self) -> Sequence[str]:
        """Import torch and ask it for the accelerators."""
        return await offload(self._trainers.accelerators, executor=self._thread)

    async def prepare(self, device: HostedDevice) -> Prepared:
        """Return a device's facts. Raises InvalidExperiment."""
        return await offload(
            partial(self._trainers.prepare, device, self.accelerator), executor=self._thread
        )

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
        self._thread.submit(self._trainers.forget, digest)

    async def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)


def _from_thread(order: Order) -> Order:
    """Return the order with progress reported from another thread."""
    loop = asyncio.get_running_loop()
    progress = order.progress

    def report(done: int, of: int) -> None:
        loop.call_soon_threadsafe(progress, done, of)

    return replace(order, progress=report)


def _whose(devices: Sequence[HostedDevice]) -> str:
    """Return the names of devices, and of the user's own code that trains them."""
    names = ", ".join(device.node for device in devices)
    trainer = devices[0].experiment.training.trainer
    if trainer.learns_module:
        return names
    return f"{names} by {trainer.whose}"


MODULE: Final = "fedstrata.device.pool.worker_process"
ADVICE: Final = "If memory was short: use fewer --slots."
RETRIES: Final = 1  # of a job whose worker is killed

_T = TypeVar("_T")


class Worker:
    """Worker process, replaced if it is killed or loses its accelerator; a job is retried once.

    With a server it is forked when a device needs it, with what that imports: they share the memory
    of PyTorch.
    """

    def __init__(self, server: ForkServer | None = None) -> None:
        self.accelerator = "cpu"
        self._server = server
        self._imports: Sequence[str] = ()
        fork = None if server is None else self._fork
        self._process = ReplaceableProcess(
            MODULE,
            "the worker process",
            replacements=RETRIES,
            advice=ADVICE,
            begin=self._begin,
            fork=fork,
        )
        self._known: set[str] = set()  # digests of the experiments that were sent to the process
        self._jobs = 0

    @property
    def pid(self) -> int | None:
        """The process's id, None if none runs."""
        channel = self._process.channel
        if channel is None:
            return None
        return channel.process.pid

    async def start(self) -> None:
        """Start the process, and wait until it serves, unless it is forked. Raises RunFailed."""
        if self._server is None:
            await self._do(lambda channel: channel.request(ready=True), "devices")

    async def accelerators(self) -> Sequence[str]:
        """Return the accelerators, once the process has imported torch. Raises RunFailed."""
        reply = await self._do(lambda channel: channel.request(accelerators=True), "devices")
        return list(reply["accelerators"])

    async def prepare(self, device: HostedDevice) -> Prepared:
        """Return a device's facts. Raises InvalidExperiment, RunFailed."""
        self._imports = imports_of(device.experiment)
        reply = await self._do(
            lambda channel: channel.request(prepare=self._name(device, channel)), _whose([device])
        )
        layout = ModelLayout.from_json(reply["layout"])
        return Prepared(**{**reply, "layout": layout})

    async def train(self, jobs: Sequence[Job]) -> None:
        """Train the jobs in the process. Raises RunFailed if it was killed, or lost its
        accelerator, twice.
        """
        await self._do(partial(self._train, jobs), _whose([job.device for job in jobs]))

    def forget(self, digest: str) -> None:
        """Let the process drop the experiment."""
        if self._process.channel is not None and digest in self._known:
            self._known.discard(digest)
            self._process.channel.send(forget=digest)

    async def close(self) -> None:
        """Kill the process."""
        await self._process.end()

    async def _do(self, work: Callable[[SubprocessChannel], Awaitable[_T]], names: str) -> _T:
        return await self._process.do(work, name=f"the process that trained {names}")

    def _fork(self, descriptors: Sequence[int]) -> ForkedProcess:
        assert self._server is not None
        return self._server.fork(f"{MODULE}:main", descriptors, imports=self._imports)

    async def _begin(self, _: SubprocessChannel) -> None:
        self._known.clear()

    async def _train(self, jobs: Sequence[Job], channel: SubprocessChannel) -> None:
        begun: dict[int, Job] = {}
        for job in jobs:
            if job.order.cancelled.is_set():
                job.fail(Cancelled())
            elif not job.outcome.done():  # it may have been set before the process was killed
                self._jobs += 1
                begun[self._jobs] = job
        if not begun:
            return
        copies = await self._order(begun, channel)
        for number, job in begun.items():
            job.on_cancel = partial(channel.send, cancel=number)
            if job.order.cancelled.is_set():
                job.on_cancel()
        while begun:
            reply = await channel.receive()
            job = begun[reply["job"]]
            if "steps" in reply:
                job.order.progress(reply["steps"], reply["of"])
                continue
            if "result" in reply:
                if (out := copies.get(reply["job"])) is not None:
                    await work_on(partial(np.copyto, job.order.out, out), nbytes=out.nbytes)
                job.finish(_result_in(reply))
            else:
                error = error_in(reply["failure"]) or Cancelled()
                if isinstance(error, AcceleratorLost):
                    raise error
                job.fail(error)
            del begun[reply["job"]]

    async def _order(
        self, jobs: Mapping[int, Job], channel: SubprocessChannel
    ) -> Mapping[int, Row]:
        """Send the orders of jobs; return the rows that the process writes for those whose own rows
        it cannot map.
        """
        first = next(iter(jobs.values())).order
        row_bytes = first.row.nbytes
        out_bytes = first.out.nbytes
        places = {number: _places(job.order) for number, job in jobs.items()}
        copied = [number for number in jobs if places[number] is None]
        both = channel.memory.rows(2 * len(copied), max(row_bytes, out_bytes))
        for number, row in zip(copied, both[::2, :row_bytes], strict=True):
            await work_on(partial(np.copyto, row, jobs[number].order.row), nbytes=row_bytes)
        wanted = []
        for number, job in jobs.items():
            device = self._name(job.device, channel)
            order = job.order
            facts: dict[str, object] = {"epochs": order.epochs, "round": order.local_round}
            facts |= {"scores": order.scores, "scores_trained": order.scores_trained}
            folder = order.folder and [
                order.folder.before and str(order.folder.before),
                str(order.folder.after),
            ]
            facts |= {"folder": folder, "noise": order.noise.hex(), "places": places[number]}
            wanted.append({"job": number, "device": device, **facts})
        channel.send(train=wanted, row_bytes=row_bytes, out_bytes=out_bytes)
        return dict(zip(copied, both[1::2, :out_bytes], strict=True))

    def _name(self, device: HostedDevice, channel: SubprocessChannel) -> list[object]:
        """Return a device's identification in the process, after sending its experiment if
        necessary.
        """
        if device.digest not in self._known:
            channel.send(experiment=device.experiment.to_json(), digest=device.digest)
            self._known.add(device.digest)
        frozen = None if device.frozen is None else str(device.frozen)
        return [device.digest, device.node, self.accelerator, frozen]


def _places(order: Order) -> tuple[Place, Place] | None:
    """Return where the process finds the rows of an order, None if they must be copied."""
    row = place_of(order.row)
    out = place_of(order.out)
    if row is None or out is None:
        return None
    return (row, out)


def _result_in(reply: Record) -> LocalResult:
    """Return the result of a training in a worker process."""
    work = Work.from_json(reply["result"])
    if work.path is not TrainingPath.VMAPPED:
        work = replace(work, path=TrainingPath.WORKERS)
    return LocalResult(work, **reply["more"])
