"""A node's refiner in a process of its own: the agents of cloud and institutions never import
torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from fedstrata.common.errors import InvalidExperiment, RunFailed
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.offload import beside, offload
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.model.refinement import Refiner, RoundModels
from fedstrata.common.processes.subprocess_channel import (
    Record,
    ReplaceableProcess,
    SubprocessChannel,
    nothing,
)

MODULE: Final = "fedstrata.common.learning.refiner_process"
REPORT_S: Final = 1.0

_T = TypeVar("_T")


class RefinerProcess:
    """One node's refiner, of an agent on the running event loop. The process starts with `prepare`
    or the first call.

    It is replaced if it is killed or makes no progress: the same models give the same bits.
    `partition`: the digest of the cloud's split, with which the node's must agree.
    """

    def __init__(self, experiment: Experiment, node: str, *, partition: str) -> None:
        self._experiment = experiment
        self._node = node
        self._partition = partition
        self._loop = asyncio.get_running_loop()
        self._cancelled = False
        self._call: asyncio.Task[object] | None = None
        self._layout: ModelLayout | None = None
        self._frozen: Path | None = None
        self._process = ReplaceableProcess(
            MODULE,
            f"{node}'s refiner process",
            idle_s=experiment.transfer.idle_s,
            begin=self._begin,
        )

    @property
    def moves(self) -> int:
        """Counter of progress, also during a call."""
        return self._process.moves

    async def prepare(self, layout: ModelLayout, arrays: Callable[[], Awaitable[Path]]) -> None:
        """Start the process, which loads the data.

        `layout`: the run's. If the process builds other frozen arrays, it gets the file of the
        run's from `arrays`. Raises InvalidExperiment, RunFailed, and what `arrays` raises.
        """
        await self._process.do(nothing)
        if (
            self._layout is not None
            and self._layout != layout
            and self._layout.differs_in_frozen(layout)
        ):
            self._frozen = await arrays()
            await self._process.end()
            await self._process.do(nothing)
        if self._layout is not None and self._layout != layout:
            problem = f"{self._node} builds another model than the cloud"
            remedy = "Use one release of fedstrata, and of the model's package, everywhere."
            raise InvalidExperiment("model.name", self._experiment.model.name, problem, remedy)

    def refine(self, models: RoundModels) -> Mapping[str, Any]:
        """Refine the mean in the process; for other threads than the loop's. Raises RunFailed,
        InvalidExperiment.
        """
        try:
            facts, refined = asyncio.run_coroutine_threadsafe(
                self._refined(models), self._loop
            ).result()
        except CancelledError:
            raise self._refusal() from None
        np.copyto(models.mean, refined)
        return facts

    def allow(self) -> None:
        """Allow calls again."""
        self._cancelled = False

    def cancel(self) -> None:
        """End a running call, and its process, and refuse others, until `allow`; for the loop's
        thread.
        """
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _refusal(self) -> RunFailed:
        return RunFailed(f"{self._node}'s refinement was cancelled")

    async def _begin(self, channel: SubprocessChannel) -> None:
        experiment = self._experiment.to_json()
        frozen = None if self._frozen is None else str(self._frozen)
        reply = await channel.request(
            experiment=experiment, node=self._node, partition=self._partition, frozen=frozen
        )
        self._layout = reply["layout"] and ModelLayout.from_json(reply["layout"])

    async def _refined(self, models: RoundModels) -> tuple[Record, Row]:
        if self._cancelled:
            raise self._refusal()
        self._call = asyncio.current_task()
        return await self._process.do(partial(self._refine, models))

    async def _refine(self, models: RoundModels, channel: SubprocessChannel) -> tuple[Record, Row]:
        rows = [models.mean, models.received, *models.uploads]
        size = models.layout.row_bytes
        shared = channel.memory.rows(len(rows), size)

        def copy() -> None:
            for target, row in zip(shared, rows, strict=True):
                np.copyto(target, row[:size])

        await offload(copy)
        layout = models.layout.to_json()
        weights = models.weights_K.tolist()
        reply = await channel.request(r=models.r, layout=layout, weights=weights)
        self._process.moves += 1
        return reply["facts"], shared[0]


async def run_refining(
    function: Callable[[], _T],
    refiner: Refiner | None,
    *,
    report: Callable[[], None] = lambda: None,
) -> _T:
    """Run a function that may use the refiner in a thread and return its result; `report` its
    progress meanwhile.

    If the caller is cancelled, the refiner's call is ended.
    """
    if refiner is None:
        return await offload(function)

    async def reporting() -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            report()

    refiner.allow()
    async with beside(reporting(), name="refining"):
        return await offload(function, cancel=refiner.cancel)
