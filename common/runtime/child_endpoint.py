"""A child's endpoint: receives tasks from the parent, fetches their models, and announces the
results.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import OutOfReach, ParentGaveUp, RefusedModel, RunFailed, WireError
from fedstrata.common.host.offload import offload
from fedstrata.common.model.codec_settings import PLAIN, Codecs
from fedstrata.common.model.layout import LinkLayouts, ModelLayout, Row
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.bulk import Place
from fedstrata.common.protocol.child_session import ChildSession
from fedstrata.common.protocol.events import (
    BlobFetched,
    FrozenFound,
    ModelArrived,
    ModelFailed,
    ParentGone,
    ParentMoved,
    ProbeReceived,
    ResultRefused,
    RunBegan,
    RunEnded,
    TaskReceived,
)
from fedstrata.common.protocol.manifest import EXCHANGE, missing, of_exchange, shared
from fedstrata.common.protocol.messages import Manifest, NodeState, Phase, RoundTurn, Task
from fedstrata.common.protocol.peers import ToParent
from fedstrata.common.protocol.presence import Identity
from fedstrata.common.protocol.receiver import Landing
from fedstrata.common.runtime.calibration import Probes
from fedstrata.common.runtime.discovery import Found, Moved
from fedstrata.common.runtime.endpoint import Endpoint
from fedstrata.common.runtime.frozen import FrozenFetch
from fedstrata.common.runtime.link_models import Arriving, Models, ModelUnavailable
from fedstrata.common.runtime.round import DoTask, WorkResult
from fedstrata.common.runtime.world import REAL, World, within
from fedstrata.common.secure.member import SecureMember
from fedstrata.common.storage.spool import FrozenFiles, Spool

REFUSALS_KEPT: Final = 16

_T = TypeVar("_T")

log = logging.getLogger("fedstrata.child")


class ChildEndpoint(Endpoint):
    """One node's parent on one broker; `serve` works until the parent has ended the run."""

    session: ChildSession

    def __init__(
        self,
        address: BrokerAddress,
        identity: Identity,
        above: ToParent,
        *,
        codecs: Codecs = PLAIN,
        spool: Spool | None = None,  # where a model is assembled, None: in memory
        # the frozen arrays that this node has, None: in a temporary folder
        files: FrozenFiles | None = None,
        after: int | None = None,  # of a device, the task that another parent used last
        world: World = REAL,
    ) -> None:
        transfer = above.transfer
        super().__init__(address, identity, transfer=transfer, world=world)
        self._patience_s = above.gone_after_s
        first_number = int(1e3 * world.wall())
        self.session = ChildSession(
            identity, above, meter=self.connection.meter, first_number=first_number, now=self.now()
        )
        if after is not None:
            self.link.own.below(above.parent, after=after)
        self.models = Models(sent=codecs.up, received=codecs.down)
        self.probes = Probes(self, world)
        files = files or FrozenFiles(None, identity.name)
        want = self.session.want_frozen
        self.frozen = FrozenFetch(
            self, parent=above.parent, form=above.frozen, files=files, want=want
        )
        self.refusals: list[str] = []  # the last ones
        self._spool = spool or Spool(None)
        self._rows = self._spool.rows("model", 0, 0)
        self._layouts: LinkLayouts | None = None
        # None: the run is over
        self._tasks: asyncio.Queue[tuple[Task, Row | None] | None] = asyncio.Queue()
        self._fetching: Arriving | None = None
        self._decoding: asyncio.Task[None] | None = None
        self._inbox = np.empty(0, np.uint8)
        self._model: Arriving | None = None
        self._result_model: tuple[Manifest, memoryview] | None = None
        self._member: SecureMember | None = None
        self._over: asyncio.Future[RunEnded] = asyncio.get_running_loop().create_future()
        self._goodbye = asyncio.Event()
        self._began = asyncio.Event()

    async def run(self, *, connect_timeout_s: float) -> None:
        """Serve until cancelled. Raises what `Endpoint.run` raises."""
        try:
            await super().run(connect_timeout_s=connect_timeout_s)
        finally:
            self.frozen.close()

    def preparing(self, done: int, *, waits_for: str = "") -> None:
        """Report preparation; `done` grows with its progress, `waits_for` names the nodes that this
        node waits for.
        """
        if self.session.preparing(done, waits_for=waits_for, now=self.now()):
            self.wake()

    async def began(self) -> float:
        """Wait until the run begins, or its time zero changes; return that in monotonic seconds."""
        await self._began.wait()
        self._began.clear()
        assert self.link.own.begun is not None
        return self.link.own.begun

    async def unless_over(self, preparing: Coroutine[Any, Any, _T]) -> _T | None:
        """Prepare for the run and return the result, None if the run finished before.

        Raises ParentGaveUp.
        """
        task = asyncio.create_task(preparing, name="prepare")
        try:
            await asyncio.wait((task, self._over), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self._check_end()
            return None
        finally:
            await _stop(task)

    async def serve(
        self, layouts: LinkLayouts, work: DoTask, *, member: SecureMember | None = None
    ) -> None:
        """Do the parent's tasks until it has finished; `layouts`: of the models and extras that go
        down and up. `member`: what answers for a secure sum.

        Raises ParentGaveUp.
        """
        self._layouts = layouts
        self._member = member
        if member is not None:
            self.session.holds = member.holds
        self.session.set_form(self.models.form(layouts.down))
        self.session.prepared()
        current: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as group:
            while (begun := await self._tasks.get()) is not None:
                await _stop(current)
                current = group.create_task(
                    self._do(*begun, layouts=layouts, work=work), name="task"
                )
            await _stop(current)
        self._model = None
        self._check_end()

    async def farewell(self, children: tuple[ChildReport, ...], *, timeout_s: float) -> None:
        """Send the children's final reports and the final byte counts of this link until the parent
        replies.
        """
        self._goodbye.clear()
        self.session.send_goodbye(children, self.now())
        self.wake()
        await within(self._goodbye, timeout_s)  # it may have left, or the broker is away

    def _check_end(self) -> None:
        """Raise ParentGaveUp if the run has ended with the parent's error."""
        over = self._over.result()
        if over.state is NodeState.FAILED:
            raise ParentGaveUp(f"{self.session.parent} gave up: {over.reason}")

    # Events

    def _landed(self, topic: str, place: Place) -> None:
        super()._landed(topic, place)
        self.frozen.chunk_came()
        if isinstance(place, Landing) and self._fetching is not None:
            self._fetching.chunk_came()  # it may be forwarded at once

    def _received(self, topic: str, body: bytes, retained: bool) -> None:
        super()._received(topic, body, retained)
        self.frozen.chunk_came()
        if self._fetching is not None:
            self._fetching.chunk_came()

    def _take(self, event: object) -> None:
        if isinstance(event, TaskReceived):
            if not self._over.done():
                inside = event.row if self.models.received.is_row else None
                self._begin((event.task, inside))
        elif isinstance(event, ModelArrived | ModelFailed):
            self._arrived(event)
        elif isinstance(event, ResultRefused):
            self.refusals = [*self.refusals, event.reason][-REFUSALS_KEPT:]
        elif isinstance(event, RunBegan):
            self._began.set()
        elif isinstance(event, RunEnded):
            self._over.set_result(event)
            self._begin(None)
        elif isinstance(event, ParentMoved):
            raise Moved(Found(event.run, event.session, event.announcement))
        elif isinstance(event, ParentGone):
            raise OutOfReach(f"{self.session.parent} was not there for {self._patience_s:g} s")
        elif isinstance(event, ProbeReceived):
            self.probes.receive(event.peer, event.message)
        elif isinstance(event, FrozenFound):
            self.frozen.take(event.model)
        elif isinstance(event, BlobFetched):
            self.probes.transferred(event.result)
            self.frozen.transferred(event.result)

    def _begin(self, task: tuple[Task, Row | None] | None) -> None:
        """Let the next task, or the end of the run, replace one that waits: it is void."""
        while not self._tasks.empty():
            self._tasks.get_nowait()
        self._tasks.put_nowait(task)

    def _after_pass(self) -> None:
        if self.session.goodbye_answered:
            self._goodbye.set()

    def _arrived(self, event: ModelArrived | ModelFailed) -> None:
        """Let the work continue with an arrived model, or without an unavailable one."""
        model = self._fetching
        if model is None or self._layouts is None or event.blob != model.manifest.blob:
            return
        self._fetching = None
        if isinstance(event, ModelFailed):
            model.fail(ModelUnavailable(event.reason))
        elif self.models.received.is_row or model.manifest.codec == EXCHANGE:
            self._has(model)
        else:
            self._decoding = asyncio.create_task(
                self._decode(model, self._layouts.down), name="decode"
            )

    # Work

    async def _do(
        self, task: Task, inside: Row | None, *, layouts: LinkLayouts, work: DoTask
    ) -> None:
        session = self.session
        if self._result_model is not None:
            self.retire(self._result_model[0].blob)  # it will be overwritten
        self.probes.end()
        if task.key.turn != RoundTurn.MODEL:
            self._result_model = None
            await self._answer(task)
            return
        model = await self._fetch(task, inside, layouts.down)
        task = replace(task, inline=None)  # the model has its bytes
        self._result_model = None

        def report(phase: Phase, done: int, total: int) -> None:
            # Before the model is complete, the progress of the fetch counts.
            if model.complete and session.progress(phase, done, total, self.now()):
                self.wake()

        try:
            result = await work(task, model, report)
            await model.whole()  # this node's children may have finished before
        except ModelUnavailable as error:
            self.refusals = [*self.refusals, str(error)][-REFUSALS_KEPT:]
            session.participant.abandon()
            return
        finally:
            self._fetching = None
            session.stop_fetching(task, self.now())
            await _stop(self._decoding)  # it writes the row
        if not task.epochs or result.withdrawn:  # the model was scored alone, or there is none
            session.participant.finish(result.announcement(task, task.model), now=self.now())
            self.wake()
            return
        cut = self.link.offers.cut(self.link.peers)
        manifest = await self.models.describe(
            layouts.up, result.blob, cut=cut, task=task.model.blob
        )
        inline = self.link.offers.add(manifest, result.blob, self.link.peers)
        self._result_model = manifest, result.blob
        session.participant.finish(result.announcement(task, manifest, inline), now=self.now())
        self.wake()

    async def _answer(self, task: Task) -> None:
        """Answer a question of a secure sum."""
        assert self._member is not None, "the session refuses it"
        manifest = task.model
        row = np.empty(manifest.size, np.uint8)
        model = Arriving(manifest, row, row.data, np.ones(manifest.chunks, np.bool_))
        self._fetching = model
        self.session.fetch(task, model.buffer, self.now(), lacking=model.lacking)
        self.wake()
        try:
            await model.whole()
            answer = await offload(partial(self._member.answer, task.key, model.buffer))
        except ModelUnavailable:
            self.session.participant.abandon()
            return
        except (RefusedModel, WireError) as error:
            self.session.decline(task, str(error), self.now())
            self.wake()
            return
        finally:
            self._fetching = None
            self.session.stop_fetching(task, self.now())
        blob = memoryview(answer)
        peers = self.link.peers
        described = of_exchange(answer, cut=self.link.offers.cut(peers))
        inline = self.link.offers.add(described, blob, peers)
        self._result_model = described, blob
        result = WorkResult(blob, Work()).announcement(task, described, inline)
        self.session.participant.finish(result, now=self.now())
        self.wake()

    async def _fetch(self, task: Task, inside: Row | None, layout: ModelLayout) -> Arriving:
        """Start fetching the task's model into the row, or the chunks that the row lacks.

        A model that is `inside` the task needs no row of its own, and is not kept after the work:
        the next one arrives likewise.
        """
        manifest = task.model
        if inside is not None:
            self._model = None
            model = self._fetching = Arriving(
                manifest, inside, inside.data, np.ones(manifest.chunks, np.bool_)
            )
            self.session.fetch(task, None, self.now())
            self.wake()
            return model
        row = self._row(layout)
        buffer = self._buffer(layout, row, size=manifest.size)
        last = self._model
        again = last is not None and last.manifest.blob == manifest.blob
        lacking = np.ones(manifest.chunks, np.bool_)
        if last is not None and again:
            lacking = last.lacking
        if self.models.received.is_row and self._rows.take_found(0):
            lacking = await offload(partial(missing, manifest, buffer))
        elif self.models.received.is_row and not again:
            self._model = None  # its row will be overwritten
            lacking = await offload(partial(self._lacking, manifest, buffer, last))
        model = self._model = Arriving(manifest, row, buffer, lacking)
        if last is not None and again and last.complete:
            self._has(model)
            return model
        self._fetching = model
        self.session.fetch(task, buffer, self.now(), lacking=model.lacking)
        self.wake()
        return model

    def _lacking(
        self, manifest: Manifest, buffer: memoryview, last: Arriving | None
    ) -> npt.NDArray[np.bool_]:
        """Return the chunks, bool [chunks], that are neither in the last model nor in this node's
        last result.

        Chunks of the result are copied to the place of the last model. So FedMR's layers are not
        transferred back to the child that trained them. A model with another chunk size shares no
        chunk with this one.
        """
        lacking = np.ones(manifest.chunks, np.bool_)
        if last is not None and last.lacking.shape == lacking.shape:
            lacking &= ~shared(manifest, last.manifest) | last.lacking
        if self._result_model is not None and self.models.sent.is_row:
            own, blob = self._result_model
            for index in np.flatnonzero(lacking & shared(manifest, own)).tolist():
                buffer[manifest.span(index)] = blob[manifest.span(index)]
                lacking[index] = False
        return lacking

    def _row(self, layout: ModelLayout) -> Row:
        """Return the row in which models are assembled."""
        if not self._rows.array.size:
            self._rows = self._spool.rows("model", 1, layout.row_bytes)
        row: Row = self._rows.array[0]
        return row

    def _buffer(self, layout: ModelLayout, row: Row, *, size: int) -> memoryview:
        """Return the memory for a blob: the row if it is the row, else separate memory, from which
        it is forwarded.
        """
        if self.models.received.is_row:
            return row.data
        if self._inbox.size < size:
            self._inbox = np.empty(self.models.received.size(layout), np.uint8)
        return self._inbox.data[:size]

    async def _decode(self, model: Arriving, layout: ModelLayout) -> None:
        try:
            await self.models.decode(layout, model.buffer, model.row)
        except RefusedModel as error:
            model.fail(RunFailed(f"{self.session.parent}'s model cannot be used: {error}"))
        else:
            self._has(model)

    def _has(self, model: Arriving) -> None:
        model.lacking[:] = False
        model.arrived()
        self.session.begin_work(self.now())
        self.wake()


async def _stop(task: asyncio.Task[Any] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait((task,))
