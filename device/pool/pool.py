"""The trainings of all devices of one process: a queue, and the lanes that work on it.

Devices ask and await; nothing here computes, so their connections stay alive. One training at a time runs in a thread
of this process; where more run at once, each has a worker process, and this one never loads torch.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Self

from common.experiment.schema import Experiment
from common.model.layout import Row
from device.accelerators import choose, may_have_gpu
from device.jobs import HostedDevice, Job, LocalResult, Order, Prepared, Progress, Wish
from device.pool.executors import Executor, Thread
from device.pool.worker_process import Worker
from device.vmapped.gathering import gather

HARMLESS: Final = ("cpu", "auto")  # which every machine has


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pool:
    """An asynchronous context: the lanes run inside it. `moves` grows as any training does.

    `slots` trainings run at once, by default one on each GPU of `accelerator`, or on each core that this process may
    use. Never more than there are `devices`. First come, first served; with several GPUs each has its share of the
    devices.
    """

    def __init__(
        self,
        *,
        accelerator: str,
        slots: int | None,
        devices: int,
        thread: Callable[[], Executor] = Thread,
        worker: Callable[[], Executor] = Worker,
    ) -> None:
        self.moves = 0
        self._accelerator = accelerator
        self._slots = slots
        self._devices = devices
        self._new = thread if min(slots or cores(), devices) == 1 else worker
        self._lanes: list[Executor] = []
        self._places: Sequence[str] = ()
        self._waiting: deque[Wish] = deque()
        self._came = asyncio.Event()
        self._members = 0
        self._serving: list[asyncio.Task[None]] = []
        self._failure: Exception | None = None

    async def __aenter__(self) -> Self:
        """Begin to start the lanes. Raises InvalidExperiment where there is no such accelerator."""
        opening = asyncio.create_task(self._open(), name="pool")
        self._serving.append(opening)
        if self._accelerator not in HARMLESS:
            try:
                await asyncio.wait((opening,))
                opening.result()
            except BaseException:
                await self.__aexit__()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the lanes, and what is under way with them."""
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)  # those who waited have heard of any
        for lane in self._lanes:
            await lane.close()

    @property
    def failure(self) -> Exception | None:
        """Return why no device of this process can train; None while they can."""
        return self._failure

    def member(self, node: str) -> Member:
        """Take in one of this process's devices."""
        self._members += 1
        return Member(self, node, self._members - 1)

    async def submit(self, wish: Wish) -> Any:
        """Wait for the wish's answer. A caller that is cancelled still waits until its rows are its own again."""
        if self._failure is not None:
            raise self._failure
        self._waiting.append(wish)
        self._came.set()
        try:
            return await asyncio.shield(wish.answer)
        except asyncio.CancelledError:
            wish.cancel()
            if wish in self._waiting:
                self._waiting.remove(wish)
            else:
                await asyncio.wait((wish.answer,))
            raise

    async def _open(self) -> None:
        """Start the first lane, which knows the accelerators, and then as many as are wanted."""
        try:
            most = min(self._slots or cores(), self._devices)
            # On a CPU all lanes load torch at the same time.
            sure = self._accelerator == "cpu" or (self._accelerator == "auto" and not may_have_gpu())
            there = (await self._start(most if sure else 1))[0]
            self._places = choose(self._accelerator, there)
            if self._places != ("cpu",):
                most = min(self._slots or len(self._places), self._devices)
            await self._start(most - len(self._lanes))
            for lane in self._lanes[most:]:
                await lane.close()
            del self._lanes[most:]
        except Exception as error:
            self._failure = error
            while self._waiting:
                self._waiting.popleft().fail(error)
            raise
        self._places = self._places[:most]
        for index, lane in enumerate(self._lanes):
            lane.accelerator = self._places[index % len(self._places)]
            self._serving.append(asyncio.create_task(self._serve(lane), name=f"lane {index}"))

    async def _start(self, count: int) -> list[Sequence[str]]:
        lanes = [self._new() for _ in range(count)]
        self._lanes += lanes
        try:
            async with asyncio.TaskGroup() as group:
                starting = [group.create_task(lane.start()) for lane in lanes]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in starting]

    async def _serve(self, lane: Executor) -> None:
        while True:
            wishes = await self._take(lane)
            jobs = [wish for wish in wishes if isinstance(wish, Job)]
            try:
                if jobs:
                    await lane.train(jobs)
                else:
                    wishes[0].finish(await lane.prepare(wishes[0].device))
            except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for ever
                for wish in wishes:
                    wish.fail(error)

    async def _take(self, lane: Executor) -> list[Wish]:
        """Wait for a wish of the lane's accelerator; return it and, where these go together, others like it."""
        while not self._of(lane):
            self._came.clear()
            await self._came.wait()
        most = min(lane.most, self._share(lane))
        if most > 1 and lane.accelerator != "cpu" and isinstance(self._of(lane)[0], Job):
            await gather(self._came, lambda: len(self._of(lane)) >= most)
        mine = self._of(lane)
        if not mine:  # another lane of this accelerator took them meanwhile, or they were called off
            return await self._take(lane)
        first = mine[0]
        more = [wish for wish in mine[1:] if isinstance(first, Job) and first.alike(wish)]
        taken = [first, *more][:most]
        for wish in taken:
            self._waiting.remove(wish)
        return taken

    def _of(self, lane: Executor) -> list[Wish]:
        """Return the wishes that wait for a lane's accelerator."""
        return [wish for wish in self._waiting if self._places[wish.place % len(self._places)] == lane.accelerator]

    def _share(self, lane: Executor) -> int:
        """Return how many of its accelerator's devices are a lane's where all lanes have as many."""
        lanes = sum(other.accelerator == lane.accelerator for other in self._lanes)
        places = [
            place for place in range(self._members) if self._places[place % len(self._places)] == lane.accelerator
        ]
        return max(1, -(-len(places) // lanes))


class Member:
    """One device's end of the pool; `prepare` first, then `train` any number of times, one at a time."""

    def __init__(self, pool: Pool, node: str, place: int) -> None:
        self._pool = pool
        self._node = node
        self._place = place
        self._device: HostedDevice | None = None

    @property
    def moves(self) -> int:
        """Return what grows while any of the pool's trainings does: those that wait are alive too."""
        return self._pool.moves

    async def prepare(self, experiment: Experiment) -> Prepared:
        """Join an experiment and return this device's facts in it.

        Raises InvalidExperiment, RunFailed.
        """
        self._device = HostedDevice(experiment, experiment.digest, self._node)
        prepared: Prepared = await self._pool.submit(Wish(device=self._device, place=self._place))
        return prepared

    async def train(self, row: Row, out: Row, *, epochs: int, local_round: int, progress: Progress) -> LocalResult:
        """Train the model in `row` for `epochs` and write it into `out`, both uint8 [row_bytes].

        `row` is only read. `progress(steps_done, steps_total)` is called on the event loop, every half second and at
        the end. Raises RunFailed, as `Trainer.train` does and where two workers were killed over it.
        """
        if self._device is None:
            raise RuntimeError("call Member.prepare first")

        def tell(done: int, of: int) -> None:
            self._pool.moves += 1
            progress(done, of)

        asked = time.monotonic()
        order = Order(row, out, epochs, local_round, tell, threading.Event())
        result: LocalResult = await self._pool.submit(Job(device=self._device, place=self._place, order=order))
        return replace(result, wait_s=time.monotonic() - asked - result.train_s)
