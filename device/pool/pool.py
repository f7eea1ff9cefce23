"""The trainings of all devices of one process: a queue, and the executors that process it.

Devices submit requests and await their outcomes. Nothing here computes, so the devices' connections
stay alive. A single training at a time runs in a thread of this process. For more, each executor
has a worker process, and this process never imports torch. PyTorch is imported with the first
device that needs it, or to find GPUs. On a CPU it is imported once for all workers, by the server
that forks them; where there may be a GPU, each worker imports it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Self

from fedstrata.common.errors import AcceleratorLost
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.accelerators import choose, may_have_gpu
from fedstrata.common.host.offload import offload
from fedstrata.common.processes.fork_server import ForkServer
from fedstrata.device.jobs import (
    HostedDevice,
    Job,
    LocalResult,
    Order,
    PoolRequest,
    Prepared,
    gather,
    most_together,
)
from fedstrata.device.pool.energy_shares import EnergyShares
from fedstrata.device.pool.executors import Executor, Thread, Worker

EVERYWHERE: Final = ("cpu", "auto")  # accelerators that every machine has


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_cpu(accelerator: str) -> bool:
    """Return whether the name of an accelerator surely selects the CPU here; else PyTorch has to be
    asked.
    """
    return accelerator == "cpu" or (
        accelerator == "auto" and not (may_have_gpu() and find_spec("torch"))
    )


class Pool:
    """An asynchronous context in which the executors run. `moves` grows with the progress of any
    training.

    `slots` trainings run at once, by default one per GPU of `accelerator`, or per core that this
    process may use, and never more than there are `devices`. First come, first served; with several
    GPUs each has its share of the devices. `energy`: what the host's energy is divided by; by
    default it is not known.
    """

    def __init__(
        self,
        *,
        accelerator: str,
        slots: int | None,
        devices: int,
        energy: EnergyShares | None = None,
        thread: Callable[[], Executor] = Thread,
        worker: Callable[[], Executor] | None = None,
    ) -> None:
        self.moves = 0
        self.energy = energy or EnergyShares()
        self._accelerator = accelerator
        self._slots = slots
        self._devices = devices
        self._server = ForkServer() if is_cpu(accelerator) and sys.platform == "linux" else None
        if min(slots or cores(), devices) == 1:
            self._new = thread
        else:
            self._new = worker or partial(Worker, self._server)
        self._executors: list[Executor] = []
        self._places: Sequence[str] = ()
        # requests that came before the accelerators were known
        self._early: deque[PoolRequest] = deque()
        self._waiting: defaultdict[str, deque[PoolRequest]] = defaultdict(deque)  # by accelerator
        self._came = asyncio.Event()
        self._members = 0
        self._hosted: Counter[str] = Counter()  # devices by the digest of their experiment
        self._idle: Counter[str] = Counter()  # executors without work, by accelerator
        self._serving: list[asyncio.Task[None]] = []
        self._failure: Exception | None = None

    async def __aenter__(self) -> Self:
        """Start the executors. Raises InvalidExperiment if there is no such accelerator."""
        opening = asyncio.create_task(self._open(), name="pool")
        self._serving += [opening, asyncio.create_task(self.energy.keep_reading(), name="energy")]
        if self._accelerator not in EVERYWHERE:
            try:
                await asyncio.wait((opening,))
                opening.result()
            except BaseException:
                await self.__aexit__()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the executors and their work."""
        for task in self._serving:
            task.cancel()
        # waiting callers have received any error
        await asyncio.gather(*self._serving, return_exceptions=True)
        for executor in self._executors:
            await executor.close()
        if self._server is not None:
            await offload(self._server.close)

    @property
    def failure(self) -> Exception | None:
        """Why no device of this process can train; None while they can."""
        return self._failure

    @property
    def hardware(self) -> str:
        """The accelerators of the executors, such as `2 x cpu`; empty before they are known."""
        if self._places:
            counts = Counter(executor.accelerator for executor in self._executors)
        else:
            counts = Counter[str]()
        return ", ".join(
            f"{count} x {accelerator}" for accelerator, count in sorted(counts.items())
        )

    def trains_together(self, experiment: Experiment) -> bool:
        """Whether devices of an experiment may be trained vmapped here, once the accelerators are
        known.
        """
        return any(
            most_together(experiment, executor.accelerator) > 1 for executor in self._executors
        )

    def member(self, node: str) -> Member:
        """Add one of this process's devices."""
        self._members += 1
        return Member(self, node, self._members - 1)

    def host(self, device: HostedDevice) -> None:
        """Count a device that joins an experiment."""
        self._hosted[device.digest] += 1

    def release(self, device: HostedDevice) -> None:
        """Count a device that leaves its experiment; the last one takes the executors' trainers and
        data along.
        """
        self._hosted[device.digest] -= 1
        if not self._hosted[device.digest]:
            del self._hosted[device.digest]
            for executor in self._executors:
                executor.forget(device.digest)

    async def submit(self, request: PoolRequest) -> Any:
        """Wait for the request's outcome. A cancelled caller still waits until its rows are its own
        again.
        """
        if self._failure is not None:
            raise self._failure
        self._queue_of(request).append(request)
        self._came.set()
        try:
            return await asyncio.shield(request.outcome)
        except AcceleratorLost as error:  # of this process: a worker would have been replaced
            self._failure = error
            raise
        except asyncio.CancelledError:
            request.cancel()
            if request in (queue := self._queue_of(request)):
                queue.remove(request)
            else:
                await asyncio.wait((request.outcome,))
            raise

    async def _open(self) -> None:
        """Start the first executor, which may know the accelerators, and then the number that is
        needed.
        """
        try:
            most = min(self._slots or cores(), self._devices)
            sure = is_cpu(self._accelerator)
            known = most if sure else 1
            await self._start(known)
            there = ["cpu"] if sure else await self._executors[0].accelerators()
            places = choose(self._accelerator, there)
            if places != ("cpu",):
                most = min(self._slots or len(places), self._devices)
            await self._start(most - len(self._executors))
            for executor in self._executors[most:]:
                await executor.close()
            del self._executors[most:]
        except Exception as error:
            self._failure = error
            while self._early:
                self._early.popleft().fail(error)
            raise
        self._places = places[:most]
        while self._early:
            request = self._early.popleft()
            self._queue_of(request).append(request)
        for index, executor in enumerate(self._executors):
            executor.accelerator = self._places[index % len(self._places)]
            self._serving.append(
                asyncio.create_task(self._serve(executor), name=f"executor {index}")
            )

    async def _start(self, count: int) -> None:
        executors = [self._new() for _ in range(count)]
        self._executors += executors
        try:
            async with asyncio.TaskGroup() as group:
                for executor in executors:
                    group.create_task(executor.start())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _serve(self, executor: Executor) -> None:
        while True:
            self._idle[executor.accelerator] += 1
            requests = await self._take(executor)
            self._idle[executor.accelerator] -= 1
            jobs = [request for request in requests if isinstance(request, Job)]
            try:
                if jobs:
                    await self.energy.begin([job.device.node for job in jobs])
                    await executor.train(jobs)
                else:
                    requests[0].finish(await executor.prepare(requests[0].device))
            except Exception as error:  # noqa: BLE001 - after any error nobody may wait forever
                for request in requests:
                    request.fail(error)

    async def _take(self, executor: Executor) -> list[PoolRequest]:
        """Wait for a request for the executor's accelerator; return it with others that can be
        vmapped with it.
        """
        queue = self._waiting[executor.accelerator]
        while not queue:
            self._came.clear()
            await self._came.wait()
        if (most := self._most(executor, queue[0])) == 1:
            return [queue.popleft()]  # no look at the others: there may be thousands
        await gather(self._came, lambda: len(queue) >= most)
        # another executor of this accelerator took them meanwhile, or they were cancelled
        if not queue:
            return await self._take(executor)
        first = queue[0]
        alike = [
            request
            for request in queue
            if request is first or (isinstance(first, Job) and first.alike(request))
        ]
        fair = -(-len(alike) // self._idle[executor.accelerator])
        taken = alike[: min(self._most(executor, first), fair)]
        for request in taken:
            queue.remove(request)
        return taken

    def _most(self, executor: Executor, request: PoolRequest) -> int:
        """Return how many requests like this one the executor may take at once."""
        if not isinstance(request, Job):
            return 1
        if (most := most_together(request.device.experiment, executor.accelerator)) == 1:
            return 1
        return min(most, self._share(executor))

    def _queue_of(self, request: PoolRequest) -> deque[PoolRequest]:
        """Return the queue in which a request waits."""
        if self._places:
            return self._waiting[self._places[request.place % len(self._places)]]
        return self._early

    def _share(self, executor: Executor) -> int:
        """Return the number of devices of an executor if all executors of its accelerator have
        equal shares.
        """
        executors = sum(other.accelerator == executor.accelerator for other in self._executors)
        places = (self._places[place % len(self._places)] for place in range(self._members))
        return max(1, -(-sum(place == executor.accelerator for place in places) // executors))


class Member:
    """One device's access to the pool; call `prepare` first, then `train` any number of times, one
    at a time.
    """

    def __init__(self, pool: Pool, node: str, place: int) -> None:
        self._pool = pool
        self._node = node
        self._place = place
        self._device: HostedDevice | None = None

    @property
    def moves(self) -> int:
        """A count that grows with the progress of any of the pool's trainings: waiting devices are
        alive too.
        """
        return self._pool.moves

    @property
    def failure(self) -> Exception | None:
        """Why this process cannot train; None while it can."""
        return self._pool.failure

    @property
    def hardware(self) -> str:
        """Where the pool trains, as text; empty before it is known."""
        return self._pool.hardware

    def leave(self) -> None:
        """Leave the experiment, if any."""
        if self._device is not None:
            self._pool.release(self._device)
            self._pool.energy.leave(self._node)
            self._device = None

    async def prepare(self, experiment: Experiment, *, frozen: Path | None = None) -> Prepared:
        """Join an experiment and return this device's facts in it; `frozen`: as in `HostedDevice`.

        Raises InvalidExperiment, RunFailed.
        """
        device = HostedDevice(experiment, experiment.digest, self._node, frozen=frozen)
        self._pool.host(device)
        # an experiment that it has left; the same one stays, with what was made for others
        self.leave()
        self._device = device
        prepared: Prepared = await self._pool.submit(
            PoolRequest(device=self._device, place=self._place)
        )
        return prepared

    async def train(self, order: Order) -> LocalResult:
        """Train as ordered; the order's `row` is read-only, and progress is reported on the event
        loop.

        Raises RunFailed, as `Trainer.train` does, and if two workers were killed during it.
        """
        if self._device is None:
            raise RuntimeError("call Member.prepare first")

        def report(done: int, of: int) -> None:
            self._pool.moves += 1
            order.progress(done, of)

        await self._pool.energy.open(self._node)
        asked = time.monotonic()
        job = Job(device=self._device, place=self._place, order=replace(order, progress=report))
        try:
            result: LocalResult = await self._pool.submit(job)
            wait_s = max(0.0, time.monotonic() - asked - result.work.train_s - result.scored_s)
            work = replace(result.work, wait_s=wait_s)
            if order.epochs:
                work = replace(work, costs=await self._pool.energy.end(self._node, work.costs))
            return replace(result, work=work)
        finally:
            self._pool.energy.stop(self._node)
