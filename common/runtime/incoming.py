"""The uploads of a parent's open round: fetched into rows, decoded, and accepted or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from fedstrata.common.errors import FedstrataError
from fedstrata.common.host.offload import offload
from fedstrata.common.methods.rule import Uploads
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.protocol.events import UploadAnnounced, UploadArrived
from fedstrata.common.protocol.manifest import missing
from fedstrata.common.protocol.messages import Result
from fedstrata.common.protocol.parent_session import ParentSession
from fedstrata.common.runtime.endpoint import Endpoint
from fedstrata.common.runtime.link_models import Models
from fedstrata.common.storage.spool import Spool


class IncomingUploads:
    """The uploads to one parent, each in a row of its own; `spool`: where the rows are."""

    def __init__(
        self, endpoint: Endpoint, session: ParentSession, models: Models, spool: Spool
    ) -> None:
        self._endpoint = endpoint
        self._session = session
        self._models = models
        self._spool = spool
        self._rows = spool.rows("uploads", 0, 0)
        self._layout: ModelLayout | None = None
        self._children: Sequence[str] = ()  # in the order of the rows
        self._places: dict[str, int] = {}
        self._buffers: dict[str, memoryview] = {}
        self._running: set[asyncio.Task[None]] = set()
        # the child's upload that is decoded in a thread
        self._checking: dict[str, asyncio.Task[None]] = {}

    def open(self, children: Sequence[str], layout: ModelLayout) -> None:
        """Begin a round with these children, whose uploads have this layout."""
        if self._rows.array.shape != (len(children), layout.row_bytes):
            resident = 1e6 * self._session.link.transfer.resident_mb
            self._rows = self._spool.rows(
                "uploads", len(children), layout.row_bytes, resident_bytes=resident
            )
        self._layout = layout
        self._children = children
        self._places = {name: place for place, name in enumerate(children)}

    async def settled(self) -> None:
        """Wait for what still writes a row."""
        if self._running:
            await asyncio.wait(self._running)

    def of(self, results: dict[str, Result]) -> Uploads:
        """Return the uploads of these results, of children in their order."""
        answers = tuple(map(results.get, self._children))
        return Uploads(tuple(self._children), self._rows.array, answers, self._rows.release)

    def fetch(self, upload: UploadAnnounced) -> None:
        """Fetch an announced upload into its row."""
        if not self._session.is_announced(upload):
            return
        # an announcement after a restart must not change the row meanwhile
        if upload.child in self._checking:
            self._soon(self._fetch_later(upload), name=f"fetch {upload.child}")
            return
        place = self._places[upload.child]
        received = self._models.received
        row = self._rows.array[place]
        buffer = received.buffer(self._decodes, row, size=upload.result.model.size)
        if upload.result.inline is None and self._rows.take_found(place) and received.is_row:
            self._soon(self._fetch_rest(upload, buffer), name=f"scan {upload.child}")
        elif self._session.fetch(upload, buffer, self._endpoint.now()):
            self._buffers[upload.child] = buffer

    async def _fetch_later(self, upload: UploadAnnounced) -> None:
        await asyncio.wait([self._checking[upload.child]])
        self.fetch(upload)
        self._endpoint.wake()

    async def _fetch_rest(self, upload: UploadAnnounced, buffer: memoryview) -> None:
        """Fetch the chunks that an earlier process of this node did not receive."""
        lacking = await offload(partial(missing, upload.result.model, buffer))
        if self._session.fetch(upload, buffer, self._endpoint.now(), lacking=lacking):
            self._buffers[upload.child] = buffer
        self._endpoint.wake()

    def check(self, upload: UploadArrived) -> None:
        """Decode an upload and accept it if it is valid; a small one at once, without a task."""
        if not self._session.is_announced(upload):
            return  # the round has ended, and with it the references of its deltas
        row = self._rows.array[self._places[upload.child]]
        buffer = self._buffers[upload.child]
        reference = upload.result.model.reference
        decode = self._models.decoder(self._decodes, buffer, row, reference=reference)
        if decode is not None:
            with self._judging(upload):
                decode()
            return
        checking = self._soon(self._check_later(upload, buffer, row), name=f"check {upload.child}")
        self._checking[upload.child] = checking
        checking.add_done_callback(lambda task: self._checking.pop(upload.child))

    async def _check_later(self, upload: UploadArrived, buffer: memoryview, row: Row) -> None:
        with self._judging(upload):
            reference = upload.result.model.reference
            await self._models.decode(self._decodes, buffer, row, reference=reference)
        self._endpoint.wake()

    @contextmanager
    def _judging(self, upload: UploadArrived) -> Iterator[None]:
        """Accept an upload if its decoding, the body, succeeds; else refuse it with the reason."""
        now = self._endpoint.now
        try:
            yield
        except FedstrataError as error:
            self._session.refuse(upload.child, upload.result.key, str(error), now())
        else:
            self._rows.release(self._places[upload.child])
            self._session.accept(upload, now())

    def _soon(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    @property
    def _decodes(self) -> ModelLayout:
        assert self._layout is not None, "no round is open"
        return self._layout
