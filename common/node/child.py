"""The upward face: waits for a parent's wishes, gets their models, and offers what the work made of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from common.errors import NoProgress, RefusedModel, RunFailed, WireError
from common.layout import ModelLayout, Row
from common.links import Link, Ways
from common.net.link import BrokerAddress
from common.node.arriving import Arriving, NotHad
from common.node.endpoint import Endpoint
from common.node.identity import Identity
from common.node.models import Models, Reference
from common.node.offload import offload
from common.node.probes import Probes
from common.node.spool import Spool
from common.rounds.participant import Answered, Begin, Participant
from common.runtime.world import REAL, World
from common.spec import PLAIN, Codecs, Transfer
from common.transfer.incoming import Fetched, IncomingEvent
from common.transfer.manifest import missing, shared
from common.wire.messages import (
    ChildReport,
    Farewell,
    Manifest,
    Message,
    NodeState,
    Phase,
    Presence,
    Probe,
    Receipt,
    Reports,
    Result,
    Task,
    Traffic,
    TrainingPath,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the work made of a model: a row, uint8 [row_bytes], and what it cost. Seconds by this node's clock.

    For `path_steps` (None: as `steps`), `plans` and `path` see the message Result.
    """

    row: Row
    samples: int
    loss: float
    epochs: int
    steps: int
    train_s: float
    wait_s: float
    pause_s: float = 0.0
    path_steps: int | None = None
    children: tuple[ChildReport, ...] = ()
    plans: Sequence[Mapping[str, object]] = ()
    path: TrainingPath = TrainingPath.NONE

    def result(self, task: Task, model: Manifest, inline: bytes | None = None) -> Result:
        """Return the message that offers it, `model` being the blob of its row."""
        return Result(
            task.key, model, inline, self.samples, float(self.loss), self.epochs, self.steps,
            self.steps if self.path_steps is None else self.path_steps,
            float(self.train_s), float(self.wait_s), float(self.pause_s), self.children,
            json.dumps(self.plans) if self.plans else "", path=self.path,
        )  # fmt: skip


Report: TypeAlias = Callable[[Phase, int, int], None]
Work: TypeAlias = Callable[[Task, Arriving, Report], Awaitable[Answer]]


class ChildFace:
    """One node's parent on one broker; `serve` works until the parent says that the run is over."""

    def __init__(
        self,
        address: BrokerAddress,
        identity: Identity,
        *,
        parent: str,
        transfer: Transfer,
        link: Link,
        shaped: bool = True,
        spool: Spool | None = None,
        codecs: Codecs = PLAIN,
        world: World = REAL,
    ) -> None:
        self.peers = (parent,)
        self._parent = parent
        self._transfer = transfer
        self.models = Models(sent=codecs.up, received=codecs.down)
        ways = Ways(to={parent: link.up}, from_={parent: link.down}, shaped=shaped)
        self.endpoint = Endpoint(address, identity, face=self, transfer=transfer, ways=ways, world=world)
        self.probes = Probes(self.endpoint, ways.to, transfer)
        self.participant = Participant()
        self.below: Callable[[], Traffic] = Traffic
        self._books = ""
        self._counted_before: dict[str, Traffic] = {}
        self.refusals: list[str] = []
        self._spool = spool or Spool(None)
        self._rows = self._spool.rows("model", 0, 0)
        self._layout: ModelLayout | None = None
        self._begin: asyncio.Queue[Task] = asyncio.Queue()
        self._fetching: Arriving | None = None
        self._decoding: asyncio.Task[None] | None = None
        self._inbox = np.empty(0, np.uint8)
        self._model: Arriving | None = None
        self._answered: tuple[Manifest, Row] | None = None
        self._parent_session = ""
        self._parent_gone_at: float | None = self.endpoint.now()
        self._over: asyncio.Future[Presence] = asyncio.get_running_loop().create_future()

    async def serve(self, layout: ModelLayout, work: Work) -> None:
        """Answer the parent's wishes until it has finished.

        Raises RunFailed when the parent gave up, NoProgress when it stayed away for `idle_s`.
        """
        self._layout = layout
        self._rows = self._spool.rows("model", 1, layout.row_bytes)
        row = self._rows.array[0]
        current: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as group:
            while not self._over.done():
                begin = group.create_task(self._begin.get(), name="next wish")
                await asyncio.wait((begin, self._over), return_when=asyncio.FIRST_COMPLETED)
                await _stop(current)
                if begin.done():
                    current = group.create_task(self._answer(begin.result(), layout, row, work), name="answer")
                else:
                    begin.cancel()
        self._model = None
        over = self._over.result()
        if over.state is NodeState.FAILED:
            raise RunFailed(f"{self._parent} gave up: {over.reason}")

    async def farewell(self, children: tuple[ChildReport, ...], *, timeout_s: float) -> None:
        """Say goodbye: the children's last reports, and when these have left, the final count of this link's bytes."""
        if children:
            self.endpoint.send(self._parent, Reports(children))
        await self.endpoint.flush(timeout_s=timeout_s / 2)
        self.endpoint.send(self._parent, Farewell(self._traffic(), self.below()))
        await self.endpoint.flush(timeout_s=timeout_s / 2)

    # Face

    def received(self, sender: str, session: str, message: Message, now: float) -> None:
        """Take the parent's word."""
        if isinstance(message, Probe):
            self.probes.receive(sender, message)
            return
        if not isinstance(message, (Task, Receipt)):
            raise WireError(f"a parent does not send a {type(message).__name__}")
        self.participant.receive(session, message, now=now)

    def presence(self, node: str, session: str, presence: Presence | None, now: float) -> None:
        """Take the parent's state."""
        if presence is not None and presence.state in (NodeState.INIT, NodeState.READY):
            self._open_books(presence.books)
            if self._parent_gone_at is not None or session != self._parent_session:
                self._parent_gone_at, self._parent_session = None, session
                self.endpoint.incoming.ask_again(node, now=now)
                self.participant.reconnected(now)
        elif presence is not None and self._parent_session not in ("", session):
            return  # the last word of a process that has a successor: a will may come a minute late
        elif self._parent_gone_at is None:
            self._parent_gone_at = now
            self.endpoint.outgoing.forget(node)
        if presence is not None and presence.state in (NodeState.FINISHED, NodeState.FAILED) and not self._over.done():
            self._over.set_result(presence)

    def moved(self, peer: str, now: float) -> None:
        """Say how the fetch goes."""
        if (model := self._fetching) is not None:
            total = model.manifest.chunks
            done = total - self.endpoint.incoming.lacks(peer, model.manifest.blob)
            self.participant.progress(Phase.FETCHING, done, total, now=now)
            model.watch()

    def transferred(self, event: IncomingEvent, now: float) -> None:
        """Let the work go on with a model that is here, or without one that cannot be had."""
        model = self._fetching
        if self.probes.transferred(event):
            return
        if model is None or self._layout is None or event.blob != model.manifest.blob:
            return
        self._fetching = None
        if not isinstance(event, Fetched):
            model.fail(NotHad(event.reason))
        elif self.models.received.is_row:
            self._has(model, now)
        else:
            self._decoding = asyncio.create_task(self._decode(model, self._layout), name="decode")

    def reconnected(self, now: float) -> None:
        """Say again what the old connection may have swallowed."""
        self.participant.reconnected(now)

    def tick(self, now: float) -> None:
        """Start what the parent wished; give up on a parent that stayed away."""
        while (event := self.participant.next_event()) is not None:
            if isinstance(event, Begin):
                self._begin.put_nowait(event.task)
            elif isinstance(event, Answered) and event.reason:
                self.refusals.append(event.reason)
        if self.endpoint.link.up and self._parent_gone_at is None:
            return
        gone_at = self._parent_gone_at
        if gone_at is None:
            self._parent_gone_at = now
        elif now - gone_at > self._transfer.idle_s and not self._over.done():
            raise NoProgress(f"{self._parent} was not there for {self._transfer.idle_s:g} s")

    def to_send(self, now: float) -> Sequence[tuple[str, Message]]:
        """Return progress and results."""
        due = self.participant.next_deadline()
        if due is None or now < due:
            return ()  # the books are summed up when they are told
        return [(self._parent, message) for message in self.participant.to_send(now, self._traffic(), self.below())]

    def next_deadline(self) -> float | None:
        """Return when something is to be said, or the parent is to be given up."""
        times = [self.participant.next_deadline()]
        if self._parent_gone_at is not None:
            times.append(self._parent_gone_at + self._transfer.idle_s + 0.01)
        return min((at for at in times if at is not None), default=None)

    def _open_books(self, books: str) -> None:
        """Count from zero for a parent that begins new books."""
        if books != self._books:
            before = self._counted() if self._books else Traffic()
            self._counted_before.setdefault(books, before)
            self._books = books

    def _traffic(self) -> Traffic:
        return self._counted() - self._counted_before.get(self._books, Traffic())

    def _counted(self) -> Traffic:
        endpoint = self.endpoint
        return replace(endpoint.account.traffic(self._parent), wire=endpoint.link.meter.sample())

    # Work

    async def _answer(self, task: Task, layout: ModelLayout, row: Row, work: Work) -> None:
        endpoint = self.endpoint
        if self._answered is not None:
            endpoint.retire(self._answered[0].blob)  # its row is about to be written
            self.models.release(self._answered[0].blob)
        self.probes.end()
        model = await self._fetch(task, layout, row)
        self._answered = None

        def report(phase: Phase, done: int, total: int) -> None:
            if model.complete:  # before, what counts is how the fetch goes
                self.participant.progress(phase, done, total, now=endpoint.now())
                endpoint.wake()

        try:
            answer = await work(task, model, report)
            await model.whole()  # our children may have been faster with it
        except NotHad as error:
            self.refusals.append(str(error))
            self.participant.abandon()
            return
        finally:
            self._fetching = None
            endpoint.incoming.drop(self._parent, blob=task.model.blob, now=endpoint.now())
            await _stop(self._decoding)  # it writes the row
        reference = Reference(task.model.blob, row) if self.models.sent.delta else None
        cut = endpoint.cut(self.peers)
        manifest, blob = await self.models.encode(layout, answer.row, cut=cut, reference=reference)
        inline = endpoint.offer(manifest, blob, self.peers)
        self._answered = manifest, answer.row
        self.participant.finish(answer.result(task, manifest, inline), now=endpoint.now())
        endpoint.wake()

    async def _fetch(self, task: Task, layout: ModelLayout, row: Row) -> Arriving:
        """Begin to get the task's model into the row, or what is still lacking there."""
        manifest, endpoint = task.model, self.endpoint
        try:
            self.models.check(manifest, layout)
        except RefusedModel as error:
            raise RunFailed(f"{self._parent}'s model does not fit this node's: {error}. Run one release.") from None
        buffer = self._buffer(layout, row, size=manifest.size)
        had = self._model if self._model is not None and self._model.manifest.blob == manifest.blob else None
        lacking = np.ones(manifest.chunks, np.bool_) if had is None else had.lacking
        if self.models.received.is_row and self._rows.take_found(0):
            lacking = await offload(partial(missing, manifest, buffer))
        elif self.models.received.is_row and had is None and task.inline is None:
            last, self._model = self._model, None  # whose row is written from now on
            lacking = await offload(partial(self._lacking, manifest, buffer, last))
        model = self._model = Arriving(manifest, row, buffer, lacking)
        if had is not None and had.complete:
            self._has(model, endpoint.now())
            return model
        self._fetching = model
        if task.inline is not None:
            endpoint.incoming.take(self._parent, manifest, buffer, task.inline)
        else:
            endpoint.incoming.fetch(self._parent, manifest, buffer, lacking=model.lacking, now=endpoint.now())
        endpoint.wake()
        return model

    def _lacking(self, manifest: Manifest, buffer: memoryview, last: Arriving | None) -> npt.NDArray[np.bool_]:
        """Return which chunks, bool [chunks], are neither in the last model nor in our answer.

        Those of the answer are copied to where the last model is. So FedMR's layers that come back to the child that
        trained them do not travel.
        """
        lacking = np.ones(manifest.chunks, np.bool_)
        if last is not None:
            lacking &= ~shared(manifest, last.manifest) | last.lacking
        if self._answered is not None and self.models.sent.is_row:
            ours, row = self._answered
            for index in np.flatnonzero(lacking & shared(manifest, ours)).tolist():
                buffer[manifest.span(index)] = row.data[manifest.span(index)]
                lacking[index] = False
        return lacking

    def _buffer(self, layout: ModelLayout, row: Row, *, size: int) -> memoryview:
        """Return where to assemble a blob: in the row if it is one, else apart, as our own children may pull it."""
        if self.models.received.is_row:
            return row.data
        if self._inbox.size < size:
            self._inbox = np.empty(self.models.received.size(layout), np.uint8)
        return self._inbox.data[:size]

    async def _decode(self, model: Arriving, layout: ModelLayout) -> None:
        try:
            await self.models.decode(layout, model.buffer, model.row)
        except RefusedModel as error:
            model.fail(RunFailed(f"{self._parent}'s model cannot be used: {error}"))
        else:
            self._has(model, self.endpoint.now())

    def _has(self, model: Arriving, now: float) -> None:
        model.lacking[:] = False
        model.arrived()
        self.participant.begin_work(Phase.WAITING, now=now)
        self.endpoint.wake()


async def _stop(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait((task,))
