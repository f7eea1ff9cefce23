"""The downward face: runs a parent's rounds over its children, models in and out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from common.aggregation.uploads import Uploads
from common.errors import FedstrataError, InvalidBelow, NoProgress, RefusedModel, RunFailed, WireError
from common.layout import ModelLayout, Row
from common.links import Link, Links, Way, Ways
from common.net.link import BrokerAddress
from common.node.arriving import Arriving
from common.node.endpoint import Endpoint
from common.node.figures import Figures
from common.node.identity import Identity
from common.node.ledger import Ledger
from common.node.models import Models
from common.node.offload import offload
from common.node.probes import Probes, measure_all
from common.node.round import COUNT_MOST, Round, check_report
from common.node.spool import Spool
from common.node.targets import STAYING, Targets
from common.rounds.coordinator import Assignment, Closed, Coordinator, Offered, Restarted, Stalled
from common.runtime.world import REAL, World
from common.spec import PLAIN, Closing, Codecs, Transfer
from common.transfer.incoming import Fetched, IncomingEvent
from common.transfer.manifest import missing
from common.wire.messages import (
    Farewell,
    Key,
    Manifest,
    Message,
    NodeState,
    Presence,
    Probed,
    Progress,
    Reports,
    Result,
    Traffic,
)

log = logging.getLogger("fedstrata.parent")

RATED_CHUNKS: Final = 8  # a model of fewer tells little of its link
Observe: TypeAlias = Callable[[str, dict[str, object]], None]


class ParentFace:
    """A parent's children on one broker; use `endpoint` to run it and `round` to play a round.

    `links`: the children's names in order, each with its link; `shaped` where the sender keeps rates and delays.
    `spool`: where uploads are assembled, memory without it.
    """

    def __init__(
        self,
        address: BrokerAddress,
        identity: Identity,
        *,
        links: Mapping[str, Link],
        transfer: Transfer,
        shaped: bool = True,
        spool: Spool | None = None,
        codecs: Codecs = PLAIN,
        world: World = REAL,
        observe: Observe = lambda event, facts: None,
    ) -> None:
        self.peers = tuple(links)
        self.transfer = transfer
        self.models = Models(sent=codecs.down, received=codecs.up)
        self.ways = Ways(
            to={name: link.down for name, link in links.items()},
            from_={name: link.up for name, link in links.items()},
            shaped=shaped,
        )
        self.figures = Figures()
        self.endpoint = Endpoint(
            address, identity, face=self, transfer=transfer, ways=self.ways, figures=self.figures, world=world
        )
        self.targets = Targets()
        self.rates: dict[str, float] = {}
        self.probes = Probes(self.endpoint, self.ways.to, transfer)
        self.coordinator = Coordinator(self.peers, idle_s=transfer.idle_s)
        self.refused_models = 0
        self._layout: ModelLayout | None = None
        self._spool = spool or Spool(None)
        self._uploads = self._spool.rows("uploads", 0, 0)
        self._places: dict[str, int] = {}
        self._pending: dict[tuple[str, str], tuple[Key, Manifest, Row, memoryview]] = {}
        self._wished: dict[str, str] = {}
        self._closed: asyncio.Future[Closed] | None = None
        self._checks: set[asyncio.Task[None]] = set()
        self.ledger = Ledger(self.peers, self.endpoint.account, wire=self.endpoint.link.meter.sample)
        self.moves = 0
        self.samples: dict[str, int] = {}
        self._farewells: set[str] = set()
        self._last_state: dict[str, str] = {}
        self._gave_up: dict[str, Presence] = {}
        self._changed = asyncio.Event()
        self._observe = observe
        self.moved_hook: Callable[[], None] = lambda: None

    def set_layout(self, layout: ModelLayout) -> None:
        """Fix the model's layout; it must be known before the first round."""
        self._layout = layout

    def now(self) -> float:
        """Return this node's monotonic seconds."""
        return self.endpoint.now()

    async def round(
        self,
        *,
        iteration: int,
        round_: int,
        models: Mapping[str, Row | Arriving],
        epochs: Mapping[str, int],
        closing: Closing,
    ) -> Round:
        """Send each child its model, wait until the round closes, and return what came back.

        `models`: one row, uint8 [row_bytes], for each child that takes part; children may share a row, and the uploads'
        rows have their order. A model that is itself on its way is passed on chunk by chunk as it comes.
        Raises RunFailed when a child that it needs has given up, NoProgress when it can never close, NotHad when the
        model on its way cannot be had.
        """
        layout = self._require_layout()
        now = self.endpoint.now()
        children = list(models)
        assignments = await self._offer(children, models, epochs)
        if self._uploads.array.shape != (len(children), layout.row_bytes):
            resident = 1e6 * self.transfer.resident_mb
            self._uploads = self._spool.rows("uploads", len(children), layout.row_bytes, resident_bytes=resident)
        self._places = {name: place for place, name in enumerate(children)}
        self._closed = asyncio.get_running_loop().create_future()
        for model in {model for model in models.values() if isinstance(model, Arriving)}:
            model.on_failure(partial(_break_off, self._closed))
        self.coordinator.open(iteration=iteration, round_=round_, assignments=assignments, closing=closing, now=now)
        self.endpoint.wake()
        try:
            closed = await self._closed
        finally:  # from now on the rows of both directions may be written again
            for blob in self._wished.values():
                self.endpoint.retire(blob)
            for name in children:
                self.endpoint.incoming.drop(name, now=self.endpoint.now())
            self._pending.clear()
            if self._checks:
                await asyncio.wait(self._checks)  # a late one still writes its row
            for blob in self._wished.values():
                self.models.release(blob)
        reports = tuple(closed.results.get(name) for name in children)
        uploads = Uploads(tuple(children), self._uploads.array, reports, self._uploads.release)
        results = {name: closed.results[name] for name in children if name in closed.results}
        return Round(results, uploads, closed.missing, closed.refused, self.coordinator.timeline)

    async def gather(self, closing: Closing) -> None:
        """Wait until every child is ready and has told how many samples it has.

        So the clock starts with a lab that stands. They are waited for `idle_s`, or where a round may close without
        some as long as a round would, and then `idle_s` for a quorum; the first round says who is missing. Raises
        RunFailed where one that is needed gave up, and where any cannot take part in the experiment as it is.
        """
        few, soon_s = (closing.quorum or 0, closing.deadline_s) if closing.rule == "quorum" else (0, None)
        for count, wait_s in ((len(self.peers), soon_s or self.transfer.idle_s), (few, self.transfer.idle_s)):
            try:
                async with asyncio.timeout(wait_s):
                    while len(self.samples.keys() | self._gave_up.keys()) < count:
                        self._check_present(closing)
                        self._changed.clear()
                        await self._changed.wait()
            except TimeoutError:
                log.warning("not there yet: %s", ", ".join(sorted(set(self.peers) - set(self.samples))))
        self._check_present(closing)

    async def measure(self, links: Links) -> None:
        """Measure the links to the children that are ready. Raises InvalidExperiment where one is not as declared."""
        ready = [name for name in self.peers if name in self.samples]
        self.ledger.measured = await measure_all(self.probes, self.ways, links, ready)
        for name, measured in self.ledger.measured.items():
            facts = {"node": name, "up_mbit": measured.up * 8e-6, "down_mbit": measured.down * 8e-6}
            self._observe("measured", {key: fact for key, fact in facts.items() if fact})

    async def farewells(self, *, timeout_s: float) -> None:
        """Wait until the children that are present have said goodbye, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._farewells >= {n for n, s in self.coordinator.states().items() if s in STAYING}:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            log.info("not all children said goodbye within %g s", timeout_s)

    # Face

    def received(self, sender: str, session: str, message: Message, now: float) -> None:
        """Take a child's word."""
        if isinstance(message, Progress):
            self._count(sender, session, message.traffic, message.below)
            self.coordinator.receive(sender, session, message, now=now)
        elif isinstance(message, Result):
            self.ledger.enter_reports(sender, session, message.children)
            self.coordinator.receive(sender, session, message, now=now)
            self._count(sender, session, message.traffic, message.below)  # last: its error must not cost the answer
        elif isinstance(message, Reports):
            self.ledger.enter_reports(sender, session, message.children)
        elif isinstance(message, Farewell):
            self._count(sender, session, message.traffic, message.below)
            self._farewells.add(sender)
            self._changed.set()
        elif isinstance(message, Probed):
            self.probes.receive(sender, message)
        else:
            raise WireError(f"a child does not send a {type(message).__name__}")

    def presence(self, node: str, session: str, presence: Presence | None, now: float) -> None:
        """Take a child's state."""
        if not self.coordinator.presence(node, session, presence, now=now):
            return
        self.targets.hear(node, presence)
        if presence is None or presence.state not in (NodeState.INIT, NodeState.READY):
            self.endpoint.outgoing.forget(node)
            self.endpoint.incoming.yield_slot(node, now=now)
        else:
            self.endpoint.incoming.ask_again(node, now=now)
        if presence is not None and 0 < presence.samples <= COUNT_MOST:
            self.samples[node] = presence.samples
        if presence is not None and presence.state is NodeState.FAILED:
            if self._last_state.get(node) in STAYING:  # else it is what an earlier life of this run left behind
                self._gave_up[node] = presence
        else:
            self._gave_up.pop(node, None)
        self._changed.set()
        state = "left" if presence is None else str(presence.state)
        if self._last_state.get(node) != state:
            self._last_state[node] = state
            self._observe("child", {"node": node, "state": state})

    def moved(self, peer: str, now: float) -> None:
        """Note progress on a child's link."""
        self.coordinator.moved(peer, now=now)
        self.moves += 1
        self.moved_hook()

    def reconnected(self, now: float) -> None:
        """Begin to count the children's silence anew: while the broker was away they could not be heard.

        There is nothing to say: their retained states follow and set the wishes going.
        """
        self.coordinator.reconnected(now)

    def transferred(self, event: IncomingEvent, now: float) -> None:
        """Check an upload that is complete, or deal with one that failed."""
        pending = self._pending.pop((event.owner, event.blob), None)
        if pending is None:
            self.probes.transferred(event)
            return
        key, manifest, row, buffer = pending
        if isinstance(event, Fetched):
            if event.rate and manifest.chunks >= RATED_CHUNKS:
                self.rates[event.owner] = event.rate
            checking = self._check_upload(event.owner, key, manifest, row, buffer)
            self._soon(checking, name=f"check {event.owner}")
        elif "no longer holds" in event.reason:
            self.coordinator.ask_again(event.owner, key, now=now)
        else:
            self._refuse(event.owner, key, event.reason)

    def tick(self, now: float) -> None:
        """Judge the round and act on what happened."""
        if self.endpoint.link.up:
            self.coordinator.tick(now)
        while (event := self.coordinator.next_event()) is not None:
            if isinstance(event, Offered):
                self._fetch(event.child, event.result, now)
            elif isinstance(event, Restarted):
                self.endpoint.incoming.drop(event.child, now=now)
                self.endpoint.outgoing.forget(event.child)
            elif self._closed is None or self._closed.done():
                continue
            elif isinstance(event, Stalled):
                self._closed.set_exception(NoProgress(event.reason) if event.idle else self._failure(event.reason))
            else:
                self._closed.set_result(event)

    def to_send(self, now: float) -> Sequence[tuple[str, Message]]:
        """Return wishes and receipts."""
        return self.coordinator.to_send(now)

    def next_deadline(self) -> float | None:
        """Return when the coordinator wants to be asked."""
        return self.coordinator.next_deadline()

    # Models

    async def _offer(
        self, children: list[str], models: Mapping[str, Row | Arriving], epochs: Mapping[str, int]
    ) -> dict[str, Assignment]:
        """Hold each model once for all children with links alike: on a lane together the slowest would set the pace."""
        layout = self._require_layout()
        groups: dict[tuple[int, Way], list[str]] = {}
        for name in children:
            groups.setdefault((id(models[name]), self.ways.to[name]), []).append(name)
        assignments: dict[str, Assignment] = {}
        for receivers in groups.values():
            model, inline = models[receivers[0]], None
            if isinstance(model, Arriving) and self._forwards(model, receivers):
                manifest = self.endpoint.forward(model, receivers)
                self.models.keep(manifest.blob, model)
            else:
                row = await model.whole() if isinstance(model, Arriving) else model
                try:
                    manifest, blob = await self.models.encode(layout, row, cut=self.endpoint.cut(receivers))
                except RefusedModel as error:
                    raise RunFailed(f"the model cannot be sent: {error}") from None
                inline = self.endpoint.offer(manifest, blob, receivers)
            assignments |= {name: Assignment(manifest, epochs[name], inline) for name in receivers}
        self._wished = {name: assignment.model.blob for name, assignment in assignments.items()}
        return assignments

    def _forwards(self, model: Arriving, receivers: Sequence[str]) -> bool:
        """Return whether the very blob may go on: decoded and encoded again it would have the same bytes."""
        return model.manifest.codec == self.models.sent.name and self.endpoint.forwards(model, receivers)

    def _fetch(self, child: str, result: Result, now: float) -> None:
        layout = self._require_layout()
        manifest = result.model
        try:
            self.models.check(manifest, layout, reference=self._wished[child])
            check_report(result)
        except RefusedModel as error:
            self._refuse(child, result.key, str(error))
            return
        place = self._places[child]
        row = self._uploads.array[place]
        buffer = self.models.received.buffer(layout, row, size=manifest.size)
        self._pending[child, manifest.blob] = (result.key, manifest, row, buffer)
        if result.inline is not None:
            self.endpoint.incoming.take(child, manifest, buffer, result.inline)
            self.endpoint.wake()
        elif self._uploads.take_found(place) and self.models.received.is_row:
            self._soon(self._fetch_rest(child, manifest, buffer), name=f"scan {child}")
        else:
            self.endpoint.incoming.fetch(child, manifest, buffer, now=now)

    async def _fetch_rest(self, child: str, manifest: Manifest, buffer: memoryview) -> None:
        """Fetch the chunks that an earlier process of ours did not get."""
        lacking = await offload(partial(missing, manifest, buffer))
        if (child, manifest.blob) in self._pending:
            self.endpoint.incoming.fetch(child, manifest, buffer, lacking=lacking, now=self.endpoint.now())
            self.endpoint.wake()

    def _soon(self, checking: Coroutine[Any, Any, None], *, name: str) -> None:
        task = asyncio.create_task(checking, name=name)
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _check_upload(self, child: str, key: Key, manifest: Manifest, row: Row, buffer: memoryview) -> None:
        try:
            await self.models.decode(self._require_layout(), buffer, row, reference=manifest.reference)
        except FedstrataError as error:
            self._refuse(child, key, str(error))
        else:
            self._uploads.release(self._places[child])
            self.coordinator.accept(child, key, now=self.endpoint.now())
        self.endpoint.wake()

    def _refuse(self, child: str, key: Key, reason: str) -> None:
        log.warning("%s: refused %s's model of %s: %s", self.endpoint.identity.name, child, key, reason)
        self.refused_models += 1
        self.coordinator.refuse(child, key, reason=reason, now=self.endpoint.now())
        self._observe("refused", {"node": child, "reason": reason})

    def _count(self, child: str, session: str, traffic: Traffic, below: Traffic) -> None:
        self.ledger.enter(child, session, link=traffic, below=below)
        self.moves += 1
        self.moved_hook()

    def _check_present(self, closing: Closing) -> None:
        failure = self._failure("; ".join(f"{name} gave up: {last.reason}" for name, last in self._gave_up.items()))
        if self._gave_up and (closing.rule == "all" or isinstance(failure, InvalidBelow)):
            raise failure

    def _failure(self, reason: str) -> RunFailed:
        invalid = any(last.invalid for last in self._gave_up.values())
        return InvalidBelow(reason) if invalid else RunFailed(reason)

    def _require_layout(self) -> ModelLayout:
        if self._layout is None:
            raise AssertionError("set_layout comes before the first round")
        return self._layout


def _break_off(round_: asyncio.Future[Closed], error: BaseException) -> None:
    if not round_.done():
        round_.set_exception(error)
