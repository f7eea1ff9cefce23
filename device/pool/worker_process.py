"""A worker process as seen by its agent; `device.pool.worker` runs in the process and documents the protocol."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from common.accounting.child_report import TrainingPath
from common.errors import InvalidExperiment, RunFailed
from common.host.offload import offload
from common.model.layout import ModelLayout
from device.jobs import Cancelled, HostedDevice, Job, LocalResult, Prepared
from device.pool.shared import SharedRows, open_memory
from device.vmapped.gathering import most_together

LINE_BYTES: Final = 1 << 24  # limit of a reply: the longest, a layout, has some 60 for each tensor
LAST_BREATH_S: Final = 5.0

_T = TypeVar("_T")


class Worker:
    """Worker process, restarted if killed; a job is retried once."""

    path = TrainingPath.WORKERS

    def __init__(self) -> None:
        self.accelerator = "cpu"
        self._process: subprocess.Popen[bytes] | None = None
        self._memory = open_memory()
        self._rows = SharedRows(self._memory)
        self._there: Sequence[str] = ()
        self._known: set[str] = set()  # digests of the experiments that were sent to the process
        self._jobs = 0

    @property
    def most(self) -> int:
        """The number of jobs that may be trained together."""
        return most_together(self.accelerator)

    @property
    def pid(self) -> int | None:
        """The process's id, None if none runs."""
        return None if self._process is None else self._process.pid

    async def start(self) -> Sequence[str]:
        """Start the process, wait until it has imported torch, and return its accelerators. Raises RunFailed."""

        async def there() -> Sequence[str]:
            return self._there

        return await self._insist(there, "devices")

    async def prepare(self, device: HostedDevice) -> Prepared:
        """Return a device's facts. Raises InvalidExperiment, RunFailed."""
        return await self._insist(partial(self._prepare, device), device.node)

    async def train(self, jobs: Sequence[Job]) -> None:
        """Train the jobs in the process. Raises RunFailed if it was killed twice."""
        await self._insist(partial(self._train, jobs), ", ".join(job.device.node for job in jobs))

    async def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            await self._end()
        os.close(self._memory)

    async def _insist(self, work: Callable[[], Awaitable[_T]], names: str) -> _T:
        """Do the work in the process, and once more in a new one if a signal ends it."""
        killed = 0
        while True:
            try:
                if self._process is None:
                    await self._begin()
                return await work()
            except (ConnectionError, EOFError):
                code = await self._end()
            killed += 1
            if code >= 0:
                raise RunFailed(f"the process that trains {names} ended with code {code}; its message is above")
            if killed == 2:
                raise RunFailed(
                    f"the process that trained {names} was killed by {signal.Signals(-code).name}, and so was its "
                    "replacement. If memory was short: use fewer --slots."
                )

    async def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES)
            self._process = subprocess.Popen(  # noqa: ASYNC220 - a millisecond; no fork of this process's memory
                [sys.executable, "-m", "device.pool.worker", str(self._memory)],
                stdin=theirs.fileno(),
                stdout=2,  # keeps the output of libraries out of this process's data
                pass_fds=(self._memory,),
                start_new_session=True,  # Ctrl-C is for the agents, which then close the socket
            )
        self._there = (await self._receive())["accelerators"]

    async def _end(self) -> int:
        """Close the socket, wait for the end of the process and return its code."""
        process, self._process = self._process, None
        self._known.clear()
        if process is None:
            raise RuntimeError("no process to end")
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
        try:
            return await offload(partial(process.wait, LAST_BREATH_S))
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    async def _prepare(self, device: HostedDevice) -> Prepared:
        self._send(prepare=self._name(device))
        reply = await self._receive()
        if "layout" not in reply:
            raise _fault(reply)
        return Prepared(ModelLayout.from_json(reply["layout"]), reply["samples"], reply["partition"])

    async def _train(self, jobs: Sequence[Job]) -> None:
        begun: dict[int, Job] = {}
        for job in jobs:
            if job.order.cancelled.is_set():
                job.fail(Cancelled())
            elif not job.outcome.done():  # it may have been set before the process was killed
                self._jobs += 1
                begun[self._jobs] = job
        if not begun:
            return
        row_bytes = next(iter(begun.values())).order.row.nbytes
        pairs = dict(zip(begun, self._rows.pairs(len(begun), row_bytes), strict=True))
        for number, job in begun.items():
            await offload(partial(np.copyto, pairs[number][0], job.order.row))
        wanted = [
            {
                "job": number,
                "device": self._name(job.device),
                "epochs": job.order.epochs,
                "round": job.order.local_round,
            }
            for number, job in begun.items()
        ]
        self._send(train=wanted, row_bytes=row_bytes)
        for number, job in begun.items():
            job.on_cancel = partial(self._send, cancel=number)
            if job.order.cancelled.is_set():
                job.on_cancel()
        while begun:
            reply = await self._receive()
            job = begun[reply["job"]]
            if "steps" in reply:
                job.order.progress(reply["steps"], reply["of"])
                continue
            del begun[reply["job"]]
            if "result" in reply:
                await offload(partial(np.copyto, job.order.out, pairs[reply["job"]][1]))
                result = LocalResult(*reply["result"])
                vmapped = result.path == TrainingPath.VMAPPED
                job.finish(replace(result, path=TrainingPath.VMAPPED if vmapped else self.path))
            else:
                job.fail(_fault(reply))

    def _name(self, device: HostedDevice) -> list[object]:
        """Return a device's identification in the process, after sending its experiment if necessary."""
        if device.digest not in self._known:
            self._send(experiment=device.experiment.to_json(), digest=device.digest)
            self._known.add(device.digest)
        return [device.digest, device.node, self.accelerator]

    def _send(self, **facts: object) -> None:
        self._writer.write(json.dumps(facts).encode() + b"\n")

    async def _receive(self) -> Mapping[str, Any]:
        """Return the next reply. Raises EOFError, ConnectionError if the process has ended."""
        line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        reply: Mapping[str, Any] = json.loads(line)
        return reply


def _fault(reply: Mapping[str, Any]) -> Exception:
    if "invalid" in reply:
        return InvalidExperiment(*reply["invalid"])
    return RunFailed(reply["failed"]) if "failed" in reply else Cancelled()
