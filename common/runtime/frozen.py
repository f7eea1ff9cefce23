"""The run's frozen arrays at one node, as a file in safetensors' format: its own, fetched once,
offered to children.

They travel only where somebody lacks them. A child that builds other arrays than the announced ones
asks its parent. An institution asks its own parent when the first of its children asks, and
forwards the chunks as they arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from fedstrata.common.errors import RefusedModel, RunFailed
from fedstrata.common.host.offload import offload
from fedstrata.common.model import tensors
from fedstrata.common.model.layout import FrozenForm, Row
from fedstrata.common.model.parts import read_frozen_file
from fedstrata.common.protocol.events import FrozenAsked
from fedstrata.common.protocol.manifest import FROZEN_CODEC, describe, missing
from fedstrata.common.protocol.messages import FrozenOffered, Manifest
from fedstrata.common.protocol.receiver import Fetched, ReceiverEvent
from fedstrata.common.runtime.endpoint import Endpoint
from fedstrata.common.runtime.link_models import Arriving, ModelUnavailable
from fedstrata.common.storage.spool import FrozenFiles

WHOLE_CHUNKS: Final = 1_000_000  # bytes; of arrays that are complete, and cut anew for each link


class FrozenSource(Protocol):
    """Where a parent gets the arrays for its children."""

    async def arriving(self) -> Arriving:
        """Return the arrays, perhaps before they are complete."""


class OwnFrozen:
    """The arrays of the cloud, which knows them: `form`, and `files` for those of its processes
    that build others.
    """

    def __init__(
        self, arrays: tensors.Tensors, form: FrozenForm | None, files: FrozenFiles
    ) -> None:
        self._arrays = arrays
        self._form = form
        self._files = files
        self._whole: asyncio.Task[Arriving] | None = None

    async def arriving(self) -> Arriving:
        """Return the arrays, in memory."""
        if self._whole is None:
            self._whole = asyncio.create_task(self._written(), name="frozen arrays")
        return await asyncio.shield(self._whole)

    async def file(self) -> Path:
        """Return a file with the arrays, for a process that builds others."""
        assert self._form is not None
        digest, nbytes = self._form
        row = await (await self.arriving()).whole()

        def write() -> None:
            self._files.row(digest, nbytes).array[0] = row
            self._files.used(digest)

        await offload(write)
        return self._files.path(digest)

    async def _written(self) -> Arriving:
        assert self._form is not None

        def write() -> Row:
            tensors.write(file := BytesIO(), self._arrays, {})
            return np.frombuffer(file.getbuffer(), np.uint8)

        return await _complete(await offload(write), self._form)


class FrozenFetch:
    """A child's frozen arrays of its parent: those of `files`, or else fetched there.

    `form`: as announced; `want`: asks the parent for them.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        parent: str,
        form: FrozenForm | None,
        files: FrozenFiles,
        want: Callable[[float], None],
    ) -> None:
        self._endpoint = endpoint
        self._parent = parent
        self._form = form
        self._files = files
        self._want = want
        self._begun: asyncio.Task[Arriving] | None = None
        self._found: asyncio.Future[Manifest] | None = None
        self._fetching: Arriving | None = None

    @property
    def waits_for(self) -> str:
        """What this node waits for before it can fetch, "" for nothing."""
        waits = self._found is not None and not self._found.done()
        if waits:
            return f"{self._parent}: the model's frozen arrays"
        return ""

    @property
    def moves(self) -> int:
        """The number of chunks that have come."""
        if self._fetching is None:
            return 0
        manifest = self._fetching.manifest
        return manifest.chunks - self._endpoint.link.receiver.lacks(self._parent, manifest.blob)

    async def held(self) -> Path | None:
        """Return the file of an earlier run, if it has the arrays."""
        if self._form is None:
            return None
        digest = self._form.digest
        path = self._files.path(digest)

        def check() -> bool:
            try:
                read_frozen_file(path, digest)
            except RefusedModel:
                return False
            self._files.used(digest)
            return True

        if await offload(check):
            return path
        return None

    async def file(self) -> Path:
        """Return a file with the arrays, fetched if this node has none.

        Raises RunFailed if the parent's are not the announced ones, or the disk is full.
        """
        while True:
            try:
                await (await self.arriving()).whole()
            except ModelUnavailable:
                continue  # the parent has begun anew
            break
        if (path := await self.held()) is None:
            assert self._form is not None
            self._files.path(self._form.digest).unlink(missing_ok=True)
            raise RunFailed(
                f"{self._parent}'s frozen arrays cannot be used: their content is not the "
                "announced one, or "
                f"{self._files.path(self._form.digest).parent} is full"
            )
        return path

    async def arriving(self) -> Arriving:
        """Return the arrays, perhaps before they are complete; ask the parent for them if this node
        has none.
        """
        if self._begun is None:
            self._begun = asyncio.create_task(self._begin(), name="frozen arrays")
        return await asyncio.shield(self._begun)

    def take(self, offered: Manifest) -> None:
        """Handle the parent's offer."""
        if self._found is not None and not self._found.done():
            self._found.set_result(offered)

    def transferred(self, event: ReceiverEvent) -> None:
        """Handle the end of a fetch, perhaps of another blob."""
        if self._fetching is None or event.blob != self._fetching.manifest.blob:
            return
        arrays = self._fetching
        self._fetching = None
        if isinstance(event, Fetched):
            arrays.arrived()
        else:  # the parent is another process: its chunks stay
            self._begun = None
            arrays.fail(ModelUnavailable(event.reason))

    def chunk_came(self) -> None:
        """Note that a message has come, perhaps a chunk."""
        if self._fetching is not None:
            self._fetching.chunk_came()

    def close(self) -> None:
        """End what waits for the parent."""
        if self._begun is not None:
            self._begun.cancel()

    async def _begin(self) -> Arriving:
        assert self._form is not None
        digest, nbytes = self._form
        if await self.held() is not None:
            return await _complete(self._files.row(digest, nbytes).array[0], self._form)
        self._found = asyncio.get_running_loop().create_future()
        self._want(self._endpoint.now())
        self._endpoint.wake()
        manifest = await self._found
        rows = await offload(partial(self._files.row, digest, nbytes))
        row = rows.array[0]
        lacking = np.ones(manifest.chunks, np.bool_)
        if rows.take_found(0):
            lacking = await offload(partial(missing, manifest, row.data))
        arrays = self._fetching = Arriving(manifest, row, row.data, lacking)
        link = self._endpoint.link
        link.fetch_aside(
            "frozen", self._parent, manifest, row.data, self._endpoint.now(), lacking=lacking
        )
        self._endpoint.wake()
        return arrays


class FrozenOffers:
    """A parent's offers of the run's frozen arrays to children that ask. `source`: where they come
    from.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.source: FrozenSource | None = None
        self._endpoint = endpoint
        # by the cut of a link
        self._offered: dict[tuple[int, str], tuple[Manifest, memoryview]] = {}
        self._answers: dict[str, asyncio.Task[None]] = {}

    def take(self, event: FrozenAsked) -> None:
        """Answer a child, once at a time: it asks until it is answered."""
        if self.source is not None and event.child not in self._answers:
            answer = asyncio.create_task(
                self._answer(event.child, self.source), name=f"frozen arrays {event.child}"
            )
            self._answers[event.child] = answer
            answer.add_done_callback(lambda _: self._answers.pop(event.child))

    def close(self) -> None:
        """End what waits for the arrays."""
        for answer in self._answers.values():
            answer.cancel()

    async def _answer(self, child: str, source: FrozenSource) -> None:
        endpoint = self._endpoint
        link = self._endpoint.link
        cut = link.offers.cut((child,))
        try:
            if cut not in self._offered:
                arrays = await source.arriving()
                offered = await self._cut(arrays, cut, child)
                self._offered.setdefault(cut, offered)
        except ModelUnavailable:
            return  # the child asks again
        manifest, data = self._offered[cut]
        link.offers.add_aside("frozen", manifest, data, child)
        link.outbox.send(child, FrozenOffered(manifest), endpoint.now())
        endpoint.wake()

    async def _cut(
        self, arrays: Arriving, cut: tuple[int, str], child: str
    ) -> tuple[Manifest, memoryview]:
        """Return the arrays as a blob for links like a child's, the one that arrives if its chunks
        suit them.
        """
        endpoint = self._endpoint
        link = self._endpoint.link
        if not arrays.complete and link.offers.forwards(arrays.manifest, (child,)):
            if cut in self._offered:
                return self._offered[cut]
            manifest = link.offers.forward(
                arrays.manifest, arrays.buffer, (child,), lacking=arrays.lacking
            )
            arrays.on_chunk(endpoint.wake)
            arrays.on_failure(partial(self._withdraw, cut, manifest.blob))
            return manifest, arrays.buffer
        row = await arrays.whole()
        (chunk_bytes, salt) = cut
        description = partial(
            describe,
            row.data,
            chunk_bytes=chunk_bytes,
            codec=FROZEN_CODEC,
            layout=arrays.manifest.layout,
            salt=salt,
        )
        return await offload(description), row.data

    def _withdraw(self, cut: tuple[int, str], blob: str, _: BaseException) -> None:
        """Stop forwarding arrays that do not arrive: the children ask for them again."""
        self._offered.pop(cut, None)
        self._endpoint.retire(blob)


async def _complete(row: Row, form: FrozenForm) -> Arriving:
    """Return arrays that are complete."""
    description = partial(
        describe, row.data, chunk_bytes=WHOLE_CHUNKS, codec=FROZEN_CODEC, layout=form.digest
    )
    manifest = await offload(description)
    arrays = Arriving(manifest, row, row.data, np.zeros(manifest.chunks, np.bool_))
    arrays.arrived()
    return arrays
