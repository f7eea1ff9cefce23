"""A model that is being received by a node, which may forward its chunks before it is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from common.model.layout import Row
from common.protocol.messages import Manifest


class ModelUnavailable(Exception):
    """The model is not available; the parent sends the task again."""


@dataclass(slots=True, eq=False)
class Arriving:
    """A task's model. `row`, uint8 [row_bytes], has it once `whole` returns.

    Before that `buffer`, which is the row or separate memory, is filled with the blob, one checked chunk after another.
    `lacking`, bool [chunks], marks the missing ones. To forward chunks, register a callback with `on_chunk`.
    """

    manifest: Manifest
    row: Row
    buffer: memoryview
    lacking: npt.NDArray[np.bool_]
    _watchers: list[Callable[[], None]] = field(default_factory=list)
    _whole: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def complete(self) -> bool:
        """Whether the row has the model."""
        return self._whole.done() and not self._whole.cancelled() and self._whole.exception() is None

    async def whole(self) -> Row:
        """Wait for the complete model. Raises ModelUnavailable; RunFailed if it can never be used."""
        await asyncio.shield(self._whole)
        return self.row

    def arrived(self) -> None:
        """Note that the row has the model."""
        if not self._whole.done():
            self._whole.set_result(None)

    def fail(self, error: Exception) -> None:
        """Note that the model is not available, or not usable."""
        if not self._whole.done():
            self._whole.set_exception(error)
            self._whole.exception()  # retrieve it: possibly nobody waits

    def on_chunk(self, call: Callable[[], None]) -> None:
        """Call this function whenever a chunk arrives."""
        self._watchers.append(call)

    def chunk_came(self) -> None:
        """Note the arrival of a chunk."""
        for call in self._watchers:
            call()

    def on_failure(self, call: Callable[[BaseException], None]) -> None:
        """Call `call` when the model turns out to be unavailable."""

        def look(whole: asyncio.Future[None]) -> None:
            error = None if whole.cancelled() else whole.exception()
            if error is not None:
                call(error)

        self._whole.add_done_callback(look)
