"""A parent's session with its children, without I/O: rounds, uploads, and the children's presence.

For each upload the endpoint answers `UploadAnnounced` with a buffer (`fetch`), and `UploadArrived`
with a decision (`accept`, `refuse`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import Final, Unpack

import numpy as np
import numpy.typing as npt

from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.ledger import Ledger
from fedstrata.common.accounting.traffic import Traffic
from fedstrata.common.errors import Misfit, RefusedModel, WireError
from fedstrata.common.model.layout import FrozenForm
from fedstrata.common.protocol import topics
from fedstrata.common.protocol.arrivals import (
    Arrival,
    Elsewhere,
    Joined,
    Living,
    Proven,
    Received,
    Sought,
)
from fedstrata.common.protocol.attendance import (
    Attendance,
    AwayWatch,
    ProgressBelow,
    Readiness,
    Targets,
)
from fedstrata.common.protocol.coordinator import NOTHING_USED, Coordinator
from fedstrata.common.protocol.events import (
    BlobFetched,
    CostsUnknown,
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
from fedstrata.common.protocol.limits import (
    ANY,
    NODES_MOST,
    SenderBounds,
    bounds_of_children,
    check_report,
    with_plausible_costs,
)
from fedstrata.common.protocol.manifest import EXCHANGE_MOST, ModelForm, check_exchange
from fedstrata.common.protocol.messages import (
    LIVING,
    About,
    Declined,
    Failure,
    Farewell,
    Goodbye,
    Key,
    Message,
    NodeState,
    Preparing,
    Presence,
    Probed,
    Progress,
    Question,
    Reports,
    Result,
    RoundTurn,
    Status,
)
from fedstrata.common.protocol.outbox import Output
from fedstrata.common.protocol.peer_link import ByteMeter, PeerLink
from fedstrata.common.protocol.peers import ToChildren
from fedstrata.common.protocol.places import Places
from fedstrata.common.protocol.presence import Identity, StateFacts
from fedstrata.common.protocol.receiver import Fetched, FetchFailed, FetchFailure, ReceiverEvent
from fedstrata.common.protocol.round_state import MOVED, Assignment, Restarted, Stalled
from fedstrata.common.protocol.status import RunProgress, status_of
from fedstrata.common.settings.closing import Closing
from fedstrata.common.settings.links import LinkSet
from fedstrata.common.text import short

RATED_CHUNKS: Final = 8  # smaller models do not show the rate of their link


class ParentSession:
    """One parent's session with its children on one broker."""

    def __init__(
        self, identity: Identity, below: ToChildren, *, meter: ByteMeter, first_number: int
    ) -> None:
        links = below.links
        transfer = below.transfer
        ways = LinkSet(
            to={name: link.down for name, link in links.items()},
            from_={name: link.up for name, link in links.items()},
            shaped=below.shaped,
            onward=below.onward,
        )
        self.link = PeerLink(
            identity,
            peers=tuple(links),
            transfer=transfer,
            ways=ways,
            meter=meter,
            first_number=first_number,
            seeks=False,
            take=self._take,
            progressed=self._progressed,
        )
        self.limits = dict.fromkeys(links, ANY) | dict(below.limits)  # of what each child reports
        self._places = Places(below.entering)
        self._form_bytes = 0
        self._secure = below.secure
        online = {name: limit.online for name, limit in self.limits.items()}
        self.coordinator = Coordinator(links, idle_s=transfer.idle_s, online=online)
        looks_s = transfer.idle_s if any(online.values()) else inf
        self._absence = AwayWatch(idle_s=looks_s)
        nodes = {name: limit.below.keys() for name, limit in self.limits.items()}
        self._bound()
        self.ledger = Ledger(links, self.link.counters, wire=meter.sample, below=nodes)
        self.targets = Targets(nodes, {name: limit.guests for name, limit in self.limits.items()})
        self.attendance = Attendance(
            links, varying=[name for name, names in nodes.items() if names]
        )
        self.samples = self.attendance.samples
        self.farewells = self.attendance.farewells
        self.rates: dict[str, float] = {}
        self.moves = ProgressBelow(idle_s=transfer.idle_s)
        self.frozen: FrozenForm | None = None  # the run's frozen arrays
        self._form: ModelForm | None = None
        self._pending: dict[tuple[str, str], Result] = {}
        self._without_costs: set[str] = set()
        self._assignments: Mapping[str, Assignment] = {}
        self._now = 0.0
        self.run: RunProgress | None = None  # at the cloud
        self.measuring = False  # the links are being calibrated

    # Rounds

    def begin(self, begun: float) -> None:
        """Note when the run began."""
        self.link.begin(begun)
        self.coordinator.begin(begun)

    def set_form(self, form: ModelForm) -> None:
        """Set the required form of uploads; must be known before the first round."""
        self._form = form
        self._form_bytes = max(form.size, EXCHANGE_MOST * self._secure)
        self._bound()

    def open(
        self,
        *,
        global_round: int,
        local_round: int,
        assignments: Mapping[str, Assignment],
        closing: Closing,
        now: float,
        used: Mapping[str, tuple[int, int]] = NOTHING_USED,
        carried: Collection[str] | None = None,
        turn: RoundTurn = RoundTurn.MODEL,
    ) -> Key:
        """Open a round, see `Coordinator.open`."""
        self._assignments = {**self._assignments, **assignments}
        return self.coordinator.open(
            global_round=global_round,
            local_round=local_round,
            assignments=assignments,
            closing=closing,
            now=now,
            used=used,
            carried=carried,
            turn=turn,
        )

    def fetch(
        self,
        upload: UploadAnnounced,
        buffer: memoryview,
        now: float,
        *,
        lacking: npt.NDArray[np.bool_] | None = None,
    ) -> bool:
        """Fetch an announced model into `buffer`, uint8 [its size]; `lacking`, bool [chunks]:
        chunks it lacks.

        Return False if the buffer is not used: the upload is void, or is being fetched into another
        one.
        """
        child = upload.child
        result = upload.result
        if not self.is_announced(upload):
            return False  # its process ended, or the round closed, while the buffer was allocated
        self._pending[child, result.model.blob] = result
        if result.inline is not None:
            self.link.receiver.take(child, result.model, buffer, result.inline)
            return True
        return self.link.receiver.fetch(child, result.model, buffer, lacking=lacking, now=now)

    def is_announced(self, upload: UploadAnnounced | UploadArrived) -> bool:
        """Return whether an upload may still be accepted: its child's process lives, and its round
        is open.
        """
        return self.coordinator.is_announced(upload.child, upload.result.key)

    def accept(self, upload: UploadArrived, now: float) -> None:
        """Accept an upload that is complete and valid."""
        self.coordinator.accept(upload.child, upload.result.key, now=now)

    def refuse(self, child: str, key: Key, reason: str, now: float) -> None:
        """Refuse a result permanently; the round continues with the other children."""
        reason = short(reason)
        self.coordinator.refuse(child, key, reason=reason, now=now)
        self.link.events.append(UploadRefused(child, reason))

    def end_round(self, now: float, *, in_flight: Collection[str] = ()) -> list[str]:
        """Stop all transfers with the children but those in flight; return the blobs that are not
        served any more.

        The buffers of these children and blobs may be overwritten afterwards.
        """
        ended = [name for name in self._assignments if name not in in_flight]
        kept = {name: self._assignments[name] for name in in_flight}
        served = {assignment.model.blob for assignment in kept.values()}
        retired = {assignment.model.blob for assignment in self._assignments.values()} - served
        for blob in retired:
            self.link.offers.retire(blob)
        for name in ended:
            self.link.receiver.drop(name, now=now)
        self._forget_pending(ended)
        self._assignments = kept
        self.coordinator.end(but=in_flight)
        return sorted(retired)

    def _forget_pending(self, children: Collection[str]) -> None:
        for key in [key for key in self._pending if key[0] in children]:
            del self._pending[key]

    def set_state(self, state: NodeState, **facts: Unpack[StateFacts]) -> None:
        """Publish this node's state, retained. One that ends the run ends all tasks."""
        if state not in LIVING:
            self.coordinator.end()
            self.link.publishing.hasten()
        self.link.own.set_state(state, **facts)

    # Presence of the children

    def readiness(self, now: float) -> Readiness:
        """Return which children can take part now."""
        return self.attendance.readiness(
            hanging=set(self.coordinator.hanging(now)),
            other_releases=self.link.other_releases,
            idle_s=self.link.transfer.idle_s,
        )

    def status(self, now: float) -> Status:
        """Return this node's status record."""
        coordinator = self.coordinator
        run = None if self.run is None else self.run.status
        return status_of(
            coordinator.children,
            self.ledger,
            now=now,
            key=coordinator.key,
            is_open=coordinator.is_open,
            measuring=self.measuring,
            waits_for=self.attendance.waits_for,
            uploads=self.link.receiver.arrived(),
            run=run,
        )

    def ask_quiet(self, now: float) -> None:
        """Ask children that stopped reporting their preparation: the message that they are ready
        may be lost.
        """
        for name in self.attendance.quiet(now):
            self.link.proofs.doubt(name, now)

    def give_back_places(self, now: float) -> list[str]:
        """Forget the children that had entered and have been away for `idle_s`, between two tasks;
        return them.
        """
        left = self._places.given_back(now, idle_s=self.link.transfer.idle_s)
        for name in left:
            del self.limits[name]
            self.rates.pop(name, None)
            self.coordinator.remove(name)
            self.attendance.remove(name)
            self.targets.remove(name, now=now)
            self.ledger.retire(name)
            self._bound()
            self.link.remove_peer(name, now=now)
        return left

    def _sought(self, name: str, now: float) -> None:
        """Expect a node that looks for a run here, if it may enter. Raises Misfit if there is no
        room, or Flooded.
        """
        if self._places.open_to(name, children=len(self.link.peers)):
            self.link.expect(name, now)

    def _enter(self, name: str, now: float) -> None:
        """Take in an expected node that has joined. Raises Misfit if there is no room."""
        entering = self._places.enter(name, now, children=len(self.link.peers))
        self.limits[name] = limits = entering.limits(name)
        self.link.ways.add(name, entering.link(name))
        self.coordinator.add(name, online=limits.online)
        self.attendance.add(name)
        self.ledger.add(name, parent=self.link.identity.name)
        self._bound()
        self.link.add_peer(name)
        self.link.events.append(Entered(name))

    def _bound(self) -> None:
        """Set the bounds of the children's messages, and of the presences under this node's own
        name.
        """
        inline_bytes = self.link.transfer.inline_bytes
        bounds, everybody = bounds_of_children(
            self.limits, blob_bytes=self._form_bytes, inline_bytes=inline_bytes
        )
        bounds[self.link.identity.name] = SenderBounds(nodes=everybody)
        self.link.admission.bounds = bounds

    # Between the link and the endpoint

    def connected(self, now: float, *, packet_most: float = inf) -> None:
        """Note a new connection to a broker that accepts packets of at most `packet_most` bytes.

        The children's idle times begin again: without the broker nothing could arrive from them.
        """
        own = self.link.identity
        inboxes = [*map(own.inbox_from, self.link.peers), topics.ask(own.lab, own.name, "+")]
        self.link.connected(now, inboxes=inboxes, packet_most=packet_most)
        self.coordinator.reconnected(now)
        self.moves.vouch_later(now)

    def to_send(self, now: float) -> list[Output]:
        """Return what is due, in order; nothing while the broker is away."""
        link = self.link
        if link.up and link.publishing.due(now):
            topic = link.identity.topic(topics.status)
            size = link.outbox.publish(topic, self.status(now), now)
            link.publishing.published(size, now)
        return link.to_send(now, self._due(now))

    def tick(self, now: float) -> None:
        """Evaluate the state machines at this time."""
        self._now = now
        for peer in self.link.tick(now):
            lost = Presence(NodeState.LOST, "", reason="no reply since the broker came back")
            self._presence(Proven(peer, self.link.proofs.session(peer), lost), now)
        if self.link.up:
            self.coordinator.tick(now)
            self.moves.tick(now)
        if now >= self._absence.due:
            away, all_away = self.coordinator.away(now)
            if away:
                # waiting for them does not count as idle, whoever else is lost
                self.moves.note(now)
            if not all_away:
                away = {}
            if self._absence.look(away, now):
                self.link.events.append(DevicesAway(away))
        targets = self.targets.changed(now)
        if targets is not None:
            self.link.events.append(TargetsChanged(targets))
        self._collect(now)

    def next_event(self) -> object | None:
        """Return the next event; an event that follows from the handling of another one is returned
        too.
        """
        if not self.link.events:
            self._collect(self._now)
        return self.link.next_event()

    def next_deadline(self, now: float) -> float:
        """Return when `tick` or `to_send` next has something to do, inf for never."""
        at = min(self.link.next_deadline(now), self.targets.due)
        if not self.link.up:
            return at
        publishing_at = self.link.publishing.next_deadline()
        at = min(at, self._absence.due, self.moves.due)
        return min(at, publishing_at, self.coordinator.next_deadline())

    # Handling of what has come

    def _take(self, arrival: Arrival, now: float) -> None:
        if isinstance(arrival, Received):
            self._message(arrival.peer, arrival.session, arrival.message, now)
        elif isinstance(arrival, Living):
            last = self.attendance.last.get(arrival.peer)
            if last is None or last.state is NodeState.LOST:
                # its presence was lost, refused, or cleared by a stranger
                self.link.proofs.want(arrival.peer, now)
        elif isinstance(arrival, Proven):
            self._presence(arrival, now)
        elif isinstance(arrival, Sought):
            self._sought(arrival.name, now)
        elif isinstance(arrival, Joined):
            self._enter(arrival.name, now)
        elif isinstance(arrival, Elsewhere):
            raise WireError("of another run")
        # a child with a retained state that nobody proved is absent until it joins

    def _message(self, sender: str, session: str, message: Message, now: float) -> None:
        if isinstance(message, Progress | Result):
            # first: an error in its counts must not hide its progress
            self._receive(sender, message, now)
            self._count(sender, session, message.traffic, message.below)
            if isinstance(message, Result):
                self._enter_reports(sender, session, message.children)
        elif isinstance(message, Preparing):
            self._prepares(sender, message, now)
        elif isinstance(message, Question) and message.about is About.FROZEN:
            if self.frozen is None:
                raise Misfit("it asks for frozen arrays, which this run does not have")
            if self.link.answers.take(sender, now):  # else it asks again
                self.link.events.append(FrozenAsked(sender))
        elif isinstance(message, Declined):
            self._declined(sender, message)
        elif isinstance(message, Probed):
            self.link.events.append(ProbeReceived(sender, message))
        elif isinstance(message, Reports):
            self._enter_reports(sender, session, message.children)
        elif isinstance(message, Farewell):
            self.attendance.farewell(sender)
            if self.link.answers.take(sender, now):
                self.link.outbox.send(sender, Goodbye(), now)
            self.link.events.append(GoodbyeReceived(sender))
            self._count(sender, session, message.traffic, message.below)
        else:
            raise WireError(f"a child does not send a {type(message).__name__}")

    def _receive(self, sender: str, message: Progress | Result, now: float) -> None:
        if reason := self.coordinator.receive(sender, message, now=now):
            raise Misfit(reason)

    def _declined(self, sender: str, message: Declined) -> None:
        """Note why a child declined its task. Raises Misfit if the task is not possible."""
        reason = short(message.reason)
        self.coordinator.declined(sender, message.key, reason)
        if not message.lacks_keys:
            raise Misfit(f"it declined its task: {reason}")
        self.link.events.append(KeysLost(sender, message.key))

    def _presence(self, proven: Proven, now: float) -> None:
        """Handle a child's proven presence. Raises Misfit."""
        peer = proven.peer
        session = proven.session
        presence = None
        if proven.presence is not None:
            presence = self._checked(peer, proven.presence)
        lives = presence is not None and presence.state in LIVING
        before = self.attendance.last.get(peer)
        lived = before is not None and before.state in LIVING
        self.coordinator.presence(peer, session, presence, now=now)
        self.targets.receive(peer, presence, now=now)
        if self.attendance.has_entered(peer):
            self._places.note(peer, now, present=lives)
        if presence is None and lived:
            # a node finishes before it leaves: a stranger may have cleared it
            self.link.proofs.want(peer, now)
        if not lives:
            self.link.sender.forget(peer)
            self.link.receiver.yield_slot(peer, now=now)
        elif proven.published or not lived:  # its connection is new
            self.link.receiver.ask_again(peer, now=now)
        if self.attendance.receive(peer, session, presence, published=proven.published):
            self.link.proofs.want(peer, now)
        if presence is None:
            self.link.events.append(PeerChanged(peer, "left", ""))
        elif before is None or (before.state, before.reason) != (presence.state, presence.reason):
            state = MOVED if presence.failure is Failure.MOVED else str(presence.state)
            self.link.events.append(PeerChanged(peer, state, presence.reason))

    def _checked(self, child: str, presence: Presence) -> Presence:
        """Return a child's presence as it counts here. Raises Misfit."""
        most = self.limits[child].samples
        if presence.samples > most:
            raise Misfit(f"it reports {presence.samples} samples, at most {most} are possible")
        parent = presence.parent
        if parent in ("", self.link.identity.name):
            return replace(presence, reason=short(presence.reason))
        if not self._places.may_move_to(parent):
            raise Misfit(f"it names {parent!r} as its parent, which takes in no devices of others")
        return replace(
            presence,
            state=NodeState.DISCONNECTED,
            reason=f"moved to {parent}",
            failure=Failure.MOVED,
        )

    def _prepares(self, child: str, message: Preparing, now: float) -> None:
        self.attendance.preparing(child, short(message.waits_for), now)
        waits = bool(message.waits_for)
        if self.coordinator.preparing(child, message.done, waits=waits, now=now):
            self.moves.note(now)

    def _progressed(self, child: str, now: float) -> None:
        self.coordinator.progressed(child, now=now)
        self.moves.note(now)

    def _collect(self, now: float) -> None:
        """Handle the ended fetches, and what the coordinator has to say."""
        while (fetch := self.link.receiver.next_event()) is not None:
            self._transferred(fetch, now)
        while (event := self.coordinator.next_event()) is not None:
            if isinstance(event, UploadAnnounced):
                self._announced(event, now)
            elif isinstance(event, Restarted):
                self.link.receiver.drop(event.child, now=now)
                self.link.sender.forget(event.child)
                self._forget_pending({event.child})
            else:
                if isinstance(event, Stalled):
                    self.moves.note(now)  # the round begins again without the lost ones, if it can
                self.link.events.append(event)

    def _due(self, now: float) -> Iterator[tuple[str, Message]]:
        """Yield each child's due messages, when the link is about to send them."""
        yield from self.coordinator.to_send(now)

    def _transferred(self, event: ReceiverEvent, now: float) -> None:
        result = self._pending.pop((event.owner, event.blob), None)
        if result is None:
            self.link.events.append(BlobFetched(event))
        elif isinstance(event, Fetched):
            if event.rate and result.model.chunks >= RATED_CHUNKS:
                self.rates[event.owner] = event.rate
            self.link.events.append(UploadArrived(event.owner, result))
        elif isinstance(event, FetchFailed) and event.cause is FetchFailure.GONE:
            self.coordinator.retry(event.owner, result.key, now=now)
        else:
            self.refuse(event.owner, result.key, event.reason, now)

    def _enter_reports(self, child: str, session: str, reports: tuple[ChildReport, ...]) -> None:
        known = []
        unknown = []
        for report in reports:
            if self.limits[child].most_samples(report) is None:
                unknown.append(report)
            else:
                known.append(report)
        self.ledger.enter_reports(child, session, known)
        if unknown:
            raise Misfit(f"a report on {unknown[0].name[:64]!r}, which is not below it")

    def _announced(self, announced: UploadAnnounced, now: float) -> None:
        child = announced.child
        result = announced.result
        try:
            if self._form is None:
                raise RefusedModel("no model is expected yet")
            if result.key.turn != RoundTurn.MODEL:
                check_exchange(result.model)
                self.link.events.append(announced)
                return
            if result.withdrawn:
                raise RefusedModel(result.withdrawn)
            assignment = self._assignments[child]
            if assignment.epochs:
                self._form.check(result.model, reference=assignment.model.blob)
            result, liars = with_plausible_costs(result, child=child, limits=self.limits[child])
            check_report(result, limits=self.limits[child], epochs=assignment.epochs)
        except RefusedModel as error:
            self.refuse(child, result.key, str(error), now)
        else:
            if not assignment.epochs:  # the model was scored alone, and none comes back
                self.coordinator.accept(child, result.key, now=now)
                return
            self.link.events.append(replace(announced, result=result))
            self._costs_unknown(liars)

    def _costs_unknown(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            if node not in self._without_costs and len(self._without_costs) < NODES_MOST:
                self._without_costs.add(node)
                self.link.events.append(CostsUnknown(node))

    def _count(
        self, child: str, session: str, traffic: Traffic, below: tuple[Traffic, ...]
    ) -> None:
        self.ledger.enter(child, session, link=traffic, below=below)
        self.moves.note(self._now)
