"""A parent's endpoint: runs rounds with the children of one broker, models in and out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final

from fedstrata.common.accounting.ledger import Ledger
from fedstrata.common.errors import InvalidBelow, NoProgress, RefusedModel, RunFailed
from fedstrata.common.experiment.tiers import Minimum
from fedstrata.common.model.codec_settings import PLAIN, Codecs
from fedstrata.common.model.layout import LinkLayouts
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.protocol.attendance import Readiness
from fedstrata.common.protocol.events import (
    BlobFetched,
    DevicesAway,
    Entered,
    FrozenAsked,
    GoodbyeReceived,
    KeysLost,
    PeerChanged,
    ProbeReceived,
    TargetsChanged,
    UploadAnnounced,
    UploadArrived,
    UploadRefused,
)
from fedstrata.common.protocol.limits import possible_scores
from fedstrata.common.protocol.manifest import of_exchange
from fedstrata.common.protocol.messages import Announcement, Failure, RoundTurn, Target
from fedstrata.common.protocol.parent_session import ParentSession
from fedstrata.common.protocol.peers import ToChildren
from fedstrata.common.protocol.presence import Identity
from fedstrata.common.protocol.round_state import Assignment, Closed, Stalled
from fedstrata.common.runtime.calibration import Probes, measure_all
from fedstrata.common.runtime.endpoint import BrokerStatistics, Endpoint
from fedstrata.common.runtime.frozen import FrozenOffers
from fedstrata.common.runtime.incoming import IncomingUploads
from fedstrata.common.runtime.incoming_answers import IncomingAnswers
from fedstrata.common.runtime.link_models import Arriving, Models
from fedstrata.common.runtime.round import ClosedRound, Dispatch, KeysNeeded, Observe
from fedstrata.common.runtime.world import REAL, World, nothing, within
from fedstrata.common.settings.closing import Closing
from fedstrata.common.settings.links import LinkDirection, Links
from fedstrata.common.storage.spool import Spool
from fedstrata.common.text import by_cause

log = logging.getLogger("fedstrata.parent")

REMIND_FIRST_S: Final = 5.0  # before the first log line about missing children before the run
REMIND_S: Final = 60.0
LOOK_S: Final = 1.0
LOOK_AGAIN_S: Final = 0.2
WRITTEN_S: Final = 1e-4  # for each character of an event that children can change as they like
# before the end of the run is sent again to children that have not sent their farewell
REPEAT_END_S: Final = 2.0


def _no_minimum(children: int) -> Minimum | None:
    """Return None: rounds wait for each child."""
    return None


class ParentEndpoint(Endpoint):
    """A parent's children on one broker; `run` keeps the connection, `round` runs a round."""

    session: ParentSession

    def __init__(
        self,
        address: BrokerAddress,
        identity: Identity,
        below: ToChildren,
        *,
        codecs: Codecs = PLAIN,
        # what rounds need of a number of children, None: they wait for each
        minimum_of: Callable[[int], Minimum | None] = _no_minimum,
        spool: Spool | None = None,  # where uploads are assembled, None: in memory
        observe: Observe = lambda event, facts: None,
        world: World = REAL,
    ) -> None:
        transfer = below.transfer
        self.statistics = BrokerStatistics(str(address))
        super().__init__(
            address, identity, transfer=transfer, world=world, statistics=self.statistics
        )
        first_number = int(1e3 * world.wall())
        self.session = ParentSession(
            identity, below, meter=self.connection.meter, first_number=first_number
        )
        self.transfer = transfer
        self._rounds = below.rounds
        self._minimum_of = minimum_of
        self.named = tuple(below.links)
        self.models = Models(sent=codecs.down, received=codecs.up)
        self.probes = Probes(self, world)
        self.frozen = FrozenOffers(self)
        self._layouts: LinkLayouts | None = None
        self._uploads = IncomingUploads(self, self.session, self.models, spool or Spool(None))
        self._incoming: IncomingUploads | IncomingAnswers = self._uploads
        # of the open turn of a secure sum: how many children may lack its keys, and which do
        self._spare = 0
        self._without_keys: set[str] = set()
        self._sent: dict[str, int] = {}  # bytes of the model of each child with a task
        self._closed: asyncio.Future[Closed] | None = None
        self._changed = asyncio.Event()
        self._targets: tuple[Target, ...] = ()
        self._new_targets = asyncio.Event()
        self._observe = observe
        self._on_progress: Callable[[], None] = nothing
        self._moves = 0

    @property
    def peers(self) -> tuple[str, ...]:
        """The children's names in order."""
        return self.session.link.peers

    @property
    def samples(self) -> dict[str, int]:
        """The training samples of each child that has reported them."""
        return self.session.samples

    @property
    def tests(self) -> Mapping[str, int]:
        """The test samples of each child that has reported its training samples; 0 if they are not
        known.
        """
        return self.session.attendance.tests

    @property
    def ready(self) -> Collection[str]:
        """The children that can take part now."""
        return self.session.readiness(self.now()).ready

    @property
    def available(self) -> Collection[str]:
        """The children that can take part now, or when their traces bring them back."""
        return {*self.ready, *self.session.coordinator.returning(self.now())}

    def remember(self, samples: Mapping[str, int]) -> None:
        """Take the samples that children have reported to an earlier process of this node: one may
        be lost by now.
        """
        named = self.named
        self.session.attendance.samples.update(
            {name: count for name, count in samples.items() if name in named}
        )

    @property
    def after(self) -> Mapping[str, int]:
        """Of children that have come from another parent, the task that this one used last."""
        return self.session.attendance.after

    @property
    def ledger(self) -> Ledger:
        """The bytes of the children's links."""
        return self.session.ledger

    @property
    def moves(self) -> int:
        """A count that grows with any progress below."""
        return self.session.moves.count

    def set_layouts(self, layouts: LinkLayouts) -> None:
        """Set what models and extras go down and up; must be known before the first round."""
        self._layouts = layouts
        self.session.frozen = layouts.model.frozen

    async def run(self, *, connect_timeout_s: float) -> None:
        """Serve until cancelled. Raises what `Endpoint.run` raises."""
        try:
            await super().run(connect_timeout_s=connect_timeout_s)
        finally:
            self.frozen.close()

    def announce(self, announcement: Announcement) -> None:
        """Publish the experiment, retained, and send it to nodes that look for a run."""
        self.link.announce(announcement)
        self.wake()

    async def targets_changed(self) -> tuple[Target, ...]:
        """Wait until the /metrics addresses of the nodes below change, and return them."""
        await self._new_targets.wait()
        self._new_targets.clear()
        return self._targets

    async def round(
        self, dispatch: Dispatch, *, on_progress: Callable[[], None] = nothing
    ) -> ClosedRound:
        """Send each child its model, wait until the round closes, and return the results.

        `on_progress` is called after any progress below. Raises RunFailed if a required child has
        given up, NoProgress if the round can never close, ModelUnavailable if the arriving model is
        not available.
        """
        layout = self._require_layouts().up
        now = self.now()
        # once this node's user has permitted own codecs
        self.session.set_form(self.models.form(layout))
        children = dispatch.children if dispatch.carried is None else self.peers
        assignments = await self._offer(dispatch)
        self._sent |= {name: assignment.model.size for name, assignment in assignments.items()}
        self._uploads.open(children, layout)
        self._closed = asyncio.get_running_loop().create_future()
        for model, _ in dispatch.models:
            if isinstance(model, Arriving):
                model.on_failure(partial(_break_off, self._closed))
        self.session.open(
            global_round=dispatch.global_round,
            local_round=dispatch.local_round,
            assignments=assignments,
            closing=dispatch.closing,
            now=now,
            used={
                name: divmod(task - 1, self._rounds)
                for name, task in dispatch.follows.items()
                if task
            },
            carried=dispatch.carried,
        )
        self._on_progress = on_progress
        self.wake()
        in_flight: Sequence[str] = ()
        try:
            closed = await self._closed
            if not dispatch.last:
                in_flight = self.session.coordinator.in_flight()
        # after this the rows of both directions may be overwritten, but for those of children in
        # flight
        finally:
            self._on_progress = nothing
            retired = self.session.end_round(self.now(), in_flight=in_flight)
            self._detach()
            await self._uploads.settled()
            for blob in retired:
                self.models.release(blob)
            sent = self._sent
            self._sent = {name: self._sent[name] for name in in_flight}
        results = {name: closed.results[name] for name in children if name in closed.results}
        uploads = self._uploads.of(results)
        nbytes = {name: sent[name] + result.model.size for name, result in results.items()}
        results, unscored = possible_scores(results, self.session.limits, tests=self.tests)
        return ClosedRound(
            results,
            uploads,
            closed.missing,
            closed.refused,
            self.session.coordinator.timeline,
            nbytes,
            buffered=dispatch.carried is not None,
            absent=dispatch.absent,
            unscored=unscored,
        )

    async def exchange(
        self,
        turn: RoundTurn,
        key: tuple[int, int],
        questions: Mapping[str, bytes],
        *,
        closing: Closing,
        spare: int = 0,
        on_progress: Callable[[], None] = nothing,
    ) -> Mapping[str, bytes]:
        """Ask children in a turn of a secure sum of a round, `key`, and return the answers.

        Raises KeysNeeded if more than `spare` lack what they need for them, and what `round`
        raises.
        """
        self.session.set_form(self.models.form(self._require_layouts().up))
        assignments = {}
        for name, question in questions.items():
            manifest = of_exchange(question, cut=self.link.offers.cut([name]))
            inline = self.link.offers.add(manifest, memoryview(question), [name])
            assignments[name] = Assignment(manifest, 0, inline)
        incoming = self._incoming = IncomingAnswers(self, self.session)
        self._spare = spare
        self._without_keys.clear()
        self._closed = asyncio.get_running_loop().create_future()
        self.session.open(
            global_round=key[0],
            local_round=key[1],
            assignments=assignments,
            closing=closing,
            now=self.now(),
            turn=turn,
        )
        self._on_progress = on_progress
        self.wake()
        try:
            closed = await self._closed
        finally:
            self._on_progress = nothing
            self.session.end_round(self.now())
            self._incoming = self._uploads
            self._spare = 0
        return {name: incoming.of(name) for name in questions if name in closed.results}

    async def gather(
        self, closing: Closing, *, waiting: Callable[[str], None] = lambda text: None
    ) -> None:
        """Wait until the children are ready: all of them, or as many as a round needs if it may
        close without some.

        So the clock starts when the lab is complete. An absent or failed child never ends the wait:
        the log and calls of `waiting` name it and the reason. When the least number is ready, the
        other children have `start_wait_s` from the start, or a quorum's `deadline_s`. Raises
        NoProgress if a required child makes no progress in preparing.
        """
        need = len(self.named) if closing.rule == "all" else closing.quorum or 1
        begun = self.now()

        def enough(found: Readiness, now: float) -> bool:
            least = self._minimum(found.ready) or Minimum(need, closing.deadline_s or 0.0)
            if len(found.ready.union(self.named)) - len(found.hanging) < least.children:
                hanging = by_cause((f"{name}:", found.missing[name]) for name in found.hanging)
                raise NoProgress(f"the run cannot begin: {hanging}")
            return len(found.ready) >= least.children and now >= begun + least.wait_s

        if (found := await self._ready(enough, waiting=waiting)) is not None:
            log.warning("%s begins without: %.2000s", self.identity.name, found.text)

    def give_back_places(self) -> None:
        """Forget the children that had entered and have been away for `idle_s`; between two tasks
        of this node.
        """
        for name in self.session.give_back_places(self.now()):
            log.info(
                "%s: %s was away for %g s: its place is free",
                self.identity.name,
                name,
                self.transfer.idle_s,
            )
            self.wake()

    async def absent(
        self,
        global_round: int,
        local_round: int,
        *,
        lost: Collection[str] = (),
        on_progress: Callable[[], None] = nothing,
    ) -> Collection[str]:
        """Return the children that are not ready, once as many are as a round needs; none if it
        waits for each.

        The `lost` ones do not count as ready. Raises NoProgress if the others are not ready within
        `idle_s`, without the time in which devices that the round needs are away by their traces:
        then `on_progress` is called.
        """
        if self._minimum(()) is None:
            return ()
        begun = self.now()
        gone = frozenset(lost)

        def enough(found: Readiness, now: float) -> bool:
            nonlocal begun
            minimum = self._minimum(found.ready)
            least = 0 if minimum is None else minimum.children
            ready = len(found.ready - gone)
            if ready >= least:
                return True
            returning = set(self.session.coordinator.returning(now)) - gone
            if ready + len(returning) >= least:
                begun = now
                self.session.moves.note(now)  # as where an open round waits for them
            elif now >= begun + self.transfer.idle_s:
                few = f"{ready} of at least {least} children were ready"
                raise NoProgress(f"{few} for {self.transfer.idle_s:g} s: {found.text}")
            return False

        self._on_progress = on_progress
        try:
            found = await self._ready(enough)
        finally:
            self._on_progress = nothing
        ready = self.ready if found is None else found.ready
        return [name for name in self.peers if name in gone or name not in ready]

    def _minimum(self, ready: Collection[str]) -> Minimum | None:
        """Return what rounds need of the children that the experiment names, and those that entered
        and are `ready`.
        """
        return self._minimum_of(len({*self.named, *ready}))

    async def _ready(
        self,
        enough: Callable[[Readiness, float], bool],
        *,
        waiting: Callable[[str], None] = lambda text: None,
    ) -> Readiness | None:
        """Wait until all children are ready, and return None; or until `enough` are, and return
        which.

        Meanwhile the log, the events and calls of `waiting` name the others and the reasons.
        """
        observe_at = self.now()
        remind_at = observe_at + REMIND_FIRST_S
        failed = frozenset[str]()
        observed: Mapping[str, str] = {}
        while not self.session.attendance.complete:
            now = self.now()
            found = self.session.readiness(now)
            if enough(found, now):
                return found
            waiting(found.text)
            if now >= remind_at or not found.failed <= failed:
                remind_at = max(remind_at, now + REMIND_S)
                failed = found.failed
                log.warning("%s waits for its children: %.2000s", self.identity.name, found.text)
            if found.missing != observed and now >= observe_at:
                observed = found.missing
                observe_at = now + max(LOOK_S, WRITTEN_S * len(found.text))
                self._observe("waiting", {"for": found.text, "nodes": dict(observed)})
            self.session.ask_quiet(now)
            self.wake()
            await self._changed_within(LOOK_S)
            while (
                not self.session.attendance.complete
                and (left_s := now + LOOK_AGAIN_S - self.now()) > 0
            ):
                await self._changed_within(left_s)  # as each look is at all children
        return None

    async def measure(self, links: Links) -> None:
        """Calibrate the links to the ready children. Raises InvalidExperiment if one differs from
        its declaration.
        """
        present = self.ready
        ready = [name for name in self.peers if name in present]
        self.session.measuring = True
        try:
            self.ledger.measured = await measure_all(self.probes, self.link.ways, links, ready)
        finally:
            self.session.measuring = False
        for name, measured in self.ledger.measured.items():
            facts: dict[str, object] = {"node": name}
            if measured.up:
                facts["up_mbit"] = measured.up * 8e-6
            if measured.down:
                facts["down_mbit"] = measured.down * 8e-6
            self._observe("measured", facts)

    async def farewells(self, *, timeout_s: float) -> None:
        """Wait until the present children have sent their farewells, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.session.attendance.owes_farewells:
                    if not await self._changed_within(REPEAT_END_S):
                        self.link.own.repeat()
                        self.wake()
        except TimeoutError:
            log.info("not all children sent their farewell within %g s", timeout_s)

    # Events

    def _take(self, event: object) -> None:
        if isinstance(event, UploadAnnounced):
            self._incoming.fetch(event)
        elif isinstance(event, UploadArrived):
            self._incoming.check(event)
        elif isinstance(event, UploadRefused):
            log.warning("%s: refused %s's model: %s", self.identity.name, event.child, event.reason)
            self._observe("refused", {"node": event.child, "reason": event.reason})
        elif isinstance(event, Entered):
            log.info("%s: takes in %s", self.identity.name, event.child)
            self._observe("entered", {"node": event.child, "parent": self.identity.name})
        elif isinstance(event, PeerChanged):
            self._changed.set()
            self.probes.abandon(event.child)
            reason = {"reason": event.reason} if event.reason else {}
            self._observe("child", {"node": event.child, "state": event.state, **reason})
        elif isinstance(event, DevicesAway):
            found = "; ".join(
                f"{name} returns in {left_s:.0f} s"
                for name, left_s in sorted(event.returns_s.items())
            )
            log.warning(
                "%s waits for devices that are away by their traces: %.2000s",
                self.identity.name,
                found,
            )
            self._observe("away", {"returns_s": dict(event.returns_s)})
        elif isinstance(event, GoodbyeReceived):
            self._changed.set()
        elif isinstance(event, TargetsChanged):
            self._targets = event.targets
            self._new_targets.set()
        elif isinstance(event, ProbeReceived):
            self.probes.receive(event.peer, event.message)
        elif isinstance(event, BlobFetched):
            self.probes.transferred(event.result)
        elif isinstance(event, FrozenAsked):
            self.frozen.take(event)
        elif isinstance(event, Closed | Stalled | KeysLost):
            self._end(event)

    def _end(self, event: Closed | Stalled | KeysLost) -> None:
        """End the round, if it has not ended."""
        if self._closed is None or self._closed.done():
            return
        if isinstance(event, Closed):
            self._closed.set_result(event)
        elif isinstance(event, KeysLost):
            if event.key == self.session.coordinator.key:
                self._without_keys.add(event.child)
            if len(self._without_keys) > self._spare:
                self._closed.set_exception(KeysNeeded(event.child))
        else:
            self._closed.set_exception(_failure(event))

    def _after_pass(self) -> None:
        if self._moves != self.moves and self._on_progress is not nothing:
            self._moves = self.moves
            self._on_progress()

    async def _changed_within(self, timeout_s: float) -> bool:
        """Wait until a child's state changes, at most `timeout_s`; return whether it did."""
        self._changed.clear()
        return await within(self._changed, timeout_s)

    def someone_is_away(self) -> bool:
        """Return whether a child has not sent its farewell."""
        here = set(self.named) | self.session.attendance.last.keys()
        return not self.session.farewells >= here

    # Models

    async def _offer(self, dispatch: Dispatch) -> dict[str, Assignment]:
        """Offer each model once per group of equal links: in a common stream the slowest link would
        set the pace.
        """
        layout = self._require_layouts().down
        offers = self.link.offers
        groups: dict[tuple[int, LinkDirection, int], list[str]] = {}
        for i, (_, children) in enumerate(dispatch.models):
            for name in children:
                equal = (i, self.link.ways.to[name], offers.chunk_bytes(name))
                groups.setdefault(equal, []).append(name)
        assignments: dict[str, Assignment] = {}
        for (i, *_), receivers in groups.items():
            model = dispatch.models[i][0]
            inline = None
            if isinstance(model, Arriving) and self._forwards(model, receivers):
                manifest = offers.forward(
                    model.manifest, model.buffer, receivers, lacking=model.lacking
                )
                model.on_chunk(self.wake)
                self.models.keep(manifest.blob, model)
            else:
                row = await model.whole() if isinstance(model, Arriving) else model
                cut = offers.cut(receivers)
                try:
                    manifest, blob = await self.models.encode(
                        layout, row, cut=cut, adopt=row is model
                    )
                except RefusedModel as error:
                    raise RunFailed(f"the model cannot be sent: {error}") from None
                inline = offers.add(manifest, blob, receivers)
            for name in receivers:
                follows = dispatch.follows.get(name, 0)
                assignments[name] = Assignment(manifest, dispatch.epochs[name], inline, follows)
        return assignments

    def _forwards(self, model: Arriving, receivers: Sequence[str]) -> bool:
        """Return whether the same blob may be forwarded: decoding and encoding it again would give
        the same bytes.
        """
        same = model.manifest.codec == self.models.sent.name and not model.complete
        return same and self.link.offers.forwards(model.manifest, receivers)

    def _require_layouts(self) -> LinkLayouts:
        assert self._layouts is not None, "call set_layouts before the first round"
        return self._layouts


def _failure(stalled: Stalled) -> RunFailed:
    """Return the error of a round that can never close."""
    if Failure.INVALID in stalled.failures:
        return InvalidBelow(stalled.reason)
    idle = stalled.idle or Failure.STALLED in stalled.failures
    error = NoProgress(stalled.reason) if idle else RunFailed(stalled.reason)
    error.without = stalled.children
    return error


def _break_off(closing: asyncio.Future[Closed], error: BaseException) -> None:
    """End a round with an error, unless it has closed."""
    if not closing.done():
        closing.set_exception(error)
