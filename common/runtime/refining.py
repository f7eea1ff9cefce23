"""A node's refiner in a process of its own: the agents of cloud and institutions never import torch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import numpy as np

from common.errors import RunFailed
from common.experiment.schema import Experiment
from common.host.blocking_channel import BlockingChannel
from common.host.offload import offload
from common.model.refinement import Refiner, RoundModels

MODULE: Final = "common.learning.refiner_process"
REPORT_S: Final = 1.0

_T = TypeVar("_T")


class RefinerProcess:
    """One node's refiner. The process starts with `prepare` or the first call, and again after a cancelled one.

    `partition`: the digest of the cloud's split, with which the node's must agree.
    """

    def __init__(self, experiment: Experiment, node: str, *, partition: str) -> None:
        self._experiment = experiment
        self._node = node
        self._partition = partition
        self._moves = 0
        self._channel: BlockingChannel | None = None
        self._cancelled = False
        self._changing = threading.Lock()  # of the channel

    @property
    def moves(self) -> int:
        """Counter of records received from the process."""
        return self._moves

    def prepare(self) -> None:
        """Start the process, which loads the data. Raises InvalidExperiment, RunFailed."""
        if self._channel is not None:
            return
        with self._changing:
            if self._cancelled:
                raise RunFailed(f"{self._node}'s refinement was cancelled")
            patience_s = self._experiment.transfer.idle_s
            self._channel = BlockingChannel(MODULE, f"{self._node}'s refiner process", patience_s=patience_s)
        experiment = self._experiment.to_json()
        self._exchange(self._channel, experiment=experiment, node=self._node, partition=self._partition)

    def refine(self, models: RoundModels) -> Mapping[str, Any]:
        """Refine the mean in the process. Raises RunFailed, InvalidExperiment."""
        self.prepare()
        channel = self._channel
        if channel is None:
            raise RuntimeError("the refiner was closed")
        rows, size = [models.mean, models.received, *models.uploads], models.layout.row_bytes
        shared = channel.memory.rows(len(rows), size)
        for target, row in zip(shared, rows, strict=True):
            np.copyto(target, row[:size])
        layout, weights = models.layout.to_json(), models.weights_K.tolist()
        facts = self._exchange(channel, r=models.r, layout=layout, weights=weights)
        np.copyto(models.mean, shared[0])
        return facts

    def allow(self) -> None:
        """Allow calls again."""
        if self._cancelled:
            self.close()
            self._cancelled = False

    def cancel(self) -> None:
        """End a running call and refuse others, until `allow`."""
        with self._changing:
            self._cancelled = True
            if self._channel is not None:
                self._channel.kill()

    def close(self) -> None:
        """End the process."""
        with self._changing:
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    def _exchange(self, channel: BlockingChannel, **request: object) -> Mapping[str, Any]:
        """Send a request; return the facts of its last reply. After an error the process is ended."""
        channel.send(**request)
        try:
            while "facts" not in (reply := channel.receive()):
                self._moves += 1
        except BaseException:
            self.close()
            raise
        self._moves += 1
        found: Mapping[str, Any] = reply["facts"]
        return found


async def run_refining(
    function: Callable[[], _T], refiner: Refiner | None, *, report: Callable[[], None] = lambda: None
) -> _T:
    """Run a function that may use the refiner in a thread and return its result; `report` its progress meanwhile.

    If the caller is cancelled, the refiner's call is ended.
    """
    if refiner is None:
        return await offload(function)

    async def reporting() -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            report()

    refiner.allow()
    reports = asyncio.create_task(reporting(), name="refining")
    try:
        return await offload(function, cancel=refiner.cancel)
    finally:
        reports.cancel()
