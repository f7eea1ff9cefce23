"""A model on its way to a node, which may pass its chunks on before it has them all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from common.model.layout import Row
from common.protocol.messages import Manifest


class ModelUnavailable(Exception):
    """The model could not be had; the parent sends the task again."""


@dataclass(slots=True, eq=False)
class Arriving:
    """A task's model. `row`, uint8 [row_bytes], holds it once `whole` returns.

    Before that `buffer`, the row or memory apart, fills up with the blob, chunk by chunk, each checked: `lacking`,
    bool [chunks], marks those that are to come; who passes them on asks by `on_chunk` to be called when one came.
    """

    manifest: Manifest
    row: Row
    buffer: memoryview
    lacking: npt.NDArray[np.bool_]
    _watchers: list[Callable[[], None]] = field(default_factory=list)
    _whole: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def complete(self) -> bool:
        """Return whether the row holds the model."""
        return self._whole.done() and not self._whole.cancelled() and self._whole.exception() is None

    async def whole(self) -> Row:
        """Wait for all of it. Raises ModelUnavailable, RunFailed where it can never be used."""
        await asyncio.shield(self._whole)
        return self.row

    def arrived(self) -> None:
        """Note that the row holds the model."""
        if not self._whole.done():
            self._whole.set_result(None)

    def fail(self, error: Exception) -> None:
        """Note that it cannot be had, or not be used."""
        if not self._whole.done():
            self._whole.set_exception(error)
            self._whole.exception()  # nobody need be waiting

    def on_chunk(self, call: Callable[[], None]) -> None:
        """Call this whenever a chunk came."""
        self._watchers.append(call)

    def chunk_came(self) -> None:
        """Note that a chunk came."""
        for call in self._watchers:
            call()

    def on_failure(self, call: Callable[[BaseException], None]) -> None:
        """Call `call` when it turns out that it cannot be had."""

        def look(whole: asyncio.Future[None]) -> None:
            error = None if whole.cancelled() else whole.exception()
            if error is not None:
                call(error)

        self._whole.add_done_callback(look)
