"""Models at one end of a link: arriving, encoded and decoded, outside the event loop and in reused
buffers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from fedstrata.common.errors import RefusedModel, WireError
from fedstrata.common.host.offload import SMALL_BYTES, work_on
from fedstrata.common.model.codec_settings import CodecSettings
from fedstrata.common.model.codecs import Codec, codec_of
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.protocol.manifest import ModelForm, describe
from fedstrata.common.protocol.messages import Manifest


class ModelUnavailable(Exception):
    """The model is not available; the parent sends the task again."""


@dataclass(slots=True, eq=False)
class Arriving:
    """A task's model, forwarded perhaps before it is complete. `row`, uint8 [row_bytes], has it
    once `whole` returns.

    Before that `buffer`, which is the row or separate memory, is filled with the blob, one checked
    chunk after another. `lacking`, bool [chunks], marks the missing ones. To forward chunks,
    register a callback with `on_chunk`.
    """

    manifest: Manifest
    row: Row
    buffer: memoryview
    lacking: npt.NDArray[np.bool_]
    _watchers: list[Callable[[], None]] = field(default_factory=list)
    _whole: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def complete(self) -> bool:
        """Whether the row has the model."""
        return (
            self._whole.done() and not self._whole.cancelled() and self._whole.exception() is None
        )

    async def whole(self) -> Row:
        """Wait for the complete model. Raises ModelUnavailable; RunFailed if it can never be
        used.
        """
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


class Models:
    """One end's codecs: `sent` for the models that it offers, `received` for those that it fetches.

    It keeps the models that it sent as references for deltas in return.
    """

    def __init__(self, *, sent: str | CodecSettings, received: str | CodecSettings) -> None:
        self._sent = sent
        self._received = received
        self._spare: list[Row] = []
        self._lent: dict[str, Row] = {}
        self._kept: dict[str, Row | Arriving] = {}

    @cached_property
    def sent(self) -> Codec:
        """That of the models that it offers. Raises InvalidExperiment for own code."""
        return codec_of(self._sent)

    @cached_property
    def received(self) -> Codec:
        """That of the models that it fetches. Raises InvalidExperiment for own code."""
        return codec_of(self._received)

    async def encode(
        self, layout: ModelLayout, row: Row, *, cut: tuple[int, str], adopt: bool = False
    ) -> tuple[Manifest, memoryview]:
        """Encode a row as a blob, valid until `release`.

        `cut`: the chunk size, and a salt that distinguishes this blob from the same one for other
        links. `adopt`: the row becomes what the other end decodes. Raises RefusedModel if that is
        not finite.
        """
        codec = self.sent
        buffer = None if codec.is_row else self._borrow(codec.size(layout))

        def write() -> tuple[Manifest, memoryview]:
            blob = codec.encode(layout, row, out=buffer)
            if adopt and not codec.exact:
                decode_row(codec, layout, blob, row, None)
            return self._described(layout, blob, cut, ""), blob

        manifest, blob = await work_on(write, nbytes=layout.row_bytes)
        if buffer is not None:
            self._lent[manifest.blob] = buffer
        if self.received.delta:
            self._kept[manifest.blob] = row
        return manifest, blob

    async def describe(
        self, layout: ModelLayout, blob: memoryview, *, cut: tuple[int, str], task: str
    ) -> Manifest:
        """Return the manifest of a result that is encoded; `task`: the blob of its task's model."""
        reference = task if self.sent.delta else ""
        return await work_on(
            partial(self._described, layout, blob, cut, reference), nbytes=len(blob)
        )

    def _described(
        self, layout: ModelLayout, blob: memoryview, cut: tuple[int, str], reference: str
    ) -> Manifest:
        chunk_bytes, salt = cut
        return describe(
            blob,
            chunk_bytes=chunk_bytes,
            codec=self.sent.name,
            layout=layout.digest,
            reference=reference,
            salt=salt,
            extras=4 * layout.extras,
        )

    def keep(self, blob: str, model: Arriving) -> None:
        """Keep a model that is forwarded under this blob's id, until `release`."""
        self._kept[blob] = model

    def release(self, blob: str) -> None:
        """Forget a blob and reuse its buffers."""
        self._kept.pop(blob, None)
        if (buffer := self._lent.pop(blob, None)) is not None:
            self._spare.append(buffer)

    def form(self, layout: ModelLayout) -> ModelForm:
        """Return the required form of fetched models."""
        codec = self.received
        extras = 4 * layout.extras
        return ModelForm(
            layout.digest, codec.name, codec.size(layout), codec.fixed, codec.delta, extras
        )

    def decoder(
        self, layout: ModelLayout, blob: memoryview, row: Row, *, reference: str = ""
    ) -> Callable[[], None] | None:
        """Return a function that does `decode`'s work, None if it takes too long for the event
        loop.
        """
        kept = self._kept.get(reference)
        if layout.row_bytes > SMALL_BYTES or isinstance(kept, Arriving):
            return None
        return partial(decode_row, self.received, layout, blob, row, kept)

    async def decode(
        self, layout: ModelLayout, blob: memoryview, row: Row, *, reference: str = ""
    ) -> None:
        """Decode an assembled blob into the row; a delta needs a reference blob that is kept.

        Raises RefusedModel if it is no model or not finite, and what `Arriving.whole` raises.
        """
        kept = self._kept.get(reference)
        against = await kept.whole() if isinstance(kept, Arriving) else kept
        await work_on(
            partial(decode_row, self.received, layout, blob, row, against), nbytes=layout.row_bytes
        )

    def _borrow(self, size: int) -> Row:
        fitting = [place for place, buffer in enumerate(self._spare) if buffer.size >= size]
        if not fitting:
            return np.empty(size, np.uint8)
        return self._spare.pop(min(fitting, key=lambda place: self._spare[place].size))


def decode_row(
    codec: Codec, layout: ModelLayout, blob: memoryview, row: Row, reference: Row | None
) -> None:
    """Decode a blob into the row. Raises RefusedModel if it is no model or not finite."""
    try:
        codec.decode(layout, blob, row, reference=reference)
        layout.check_finite(row)
    except (RefusedModel, WireError) as error:
        form = "" if codec.is_row else f" (as {codec.name})"
        raise RefusedModel(f"{error}{form}") from None
