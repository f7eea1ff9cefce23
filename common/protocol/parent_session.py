"""A parent's session with its children, without I/O: rounds, uploads, and the children's presence.

For each upload the endpoint answers `UploadAnnounced` with a buffer (`fetch`), and `UploadArrived` with a decision
(`accept`, `refuse`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt

from common.accounting.child_report import ChildReport
from common.accounting.ledger import Ledger
from common.accounting.traffic import Traffic
from common.errors import Misfit, RefusedModel, WireError
from common.experiment.links import LinkSet, LinkSettings
from common.experiment.rounds import Closing
from common.experiment.schema import TransferSettings
from common.protocol import topics
from common.protocol.attendance import Attendance, AwayWatch, readiness
from common.protocol.bounds import SenderBounds
from common.protocol.coordinator import Coordinator
from common.protocol.fetches import Fetched, FetchFailed, FetchFailure, ReceiverEvent
from common.protocol.identity import Identity
from common.protocol.limits import ANY, ChildLimits
from common.protocol.manifest import ModelForm
from common.protocol.messages import (
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
    Reports,
    Result,
    WhoIsThere,
)
from common.protocol.outbox import Output
from common.protocol.parent_events import (
    DevicesAway,
    GoodbyeReceived,
    PeerChanged,
    Readiness,
    TargetsChanged,
    UploadAnnounced,
    UploadArrived,
    UploadRefused,
)
from common.protocol.reports import check_report
from common.protocol.round_state import LIVING, Assignment, Restarted, ResultAnnounced
from common.protocol.session import Session
from common.protocol.session_events import ByteMeter, ProbeReceived
from common.protocol.targets import Targets
from common.text import short

QUIET_S: Final = 5.0  # without a report of a child that prepares; it reports every two seconds
RATED_CHUNKS: Final = 8  # smaller models do not show the rate of their link


class ParentSession(Session):
    """One parent's session with its children on one broker.

    `links`: the children's names in order, each with its link; `shaped`: this end enforces their rates and delays.
    `limits`: what each child may report, and the nodes below it.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        links: Mapping[str, LinkSettings],
        transfer: TransferSettings,
        shaped: bool,
        meter: ByteMeter,
        first_number: int,
        limits: Mapping[str, ChildLimits] | None = None,
    ) -> None:
        ways = LinkSet(
            to={name: link.down for name, link in links.items()},
            from_={name: link.up for name, link in links.items()},
            shaped=shaped,
        )
        super().__init__(
            identity,
            peers=tuple(links),
            transfer=transfer,
            ways=ways,
            meter=meter,
            first_number=first_number,
            persistent=False,
        )
        self._limits = dict.fromkeys(self.peers, ANY) | dict(limits or {})
        online = {name: limit.online for name, limit in self._limits.items()}
        self.coordinator = Coordinator(self.peers, idle_s=transfer.idle_s, online=online)
        self._absence = AwayWatch(idle_s=transfer.idle_s if any(online.values()) else inf)
        below = {name: limit.below.keys() for name, limit in self._limits.items()}
        self._bound()
        self.ledger = Ledger(self.peers, self.counters, wire=meter.sample, below=below)
        self.targets = Targets(below)
        self.samples: dict[str, int] = {}
        self._counted = dict.fromkeys(self.peers, "")  # the session that reported the samples
        self.rates: dict[str, float] = {}
        self.moves = 0
        self.farewells: set[str] = set()
        self._form: ModelForm | None = None
        self._pending: dict[tuple[str, str], Result] = {}
        self._assignments: Mapping[str, Assignment] = {}
        self._last: dict[str, Presence | None] = {}
        self._attendance = Attendance()
        self._waits_for: dict[str, str] = {}
        self._prepared_at: dict[str, float] = {}

    # Rounds

    def begin(self, begun: float) -> None:
        """Note when the run began."""
        super().begin(begun)
        self.coordinator.begin(begun)

    def set_form(self, form: ModelForm) -> None:
        """Set the required form of uploads; must be known before the first round."""
        self._form = form
        self._bound(form.size)

    def open(
        self,
        *,
        global_round: int,
        local_round: int,
        assignments: Mapping[str, Assignment],
        closing: Closing,
        now: float,
        carried: Collection[str] | None = None,
    ) -> Key:
        """Open a round, see `Coordinator.open`."""
        self._assignments = {**self._assignments, **assignments}
        return self.coordinator.open(
            global_round=global_round,
            local_round=local_round,
            assignments=assignments,
            closing=closing,
            now=now,
            carried=carried,
        )

    def fetch(
        self, upload: UploadAnnounced, buffer: memoryview, now: float, *, lacking: npt.NDArray[np.bool_] | None = None
    ) -> bool:
        """Fetch an announced model into `buffer`, uint8 [its size]; `lacking`, bool [chunks]: chunks it lacks.

        Return False if the buffer is not used: the upload is void, or is being fetched into another one.
        """
        child, result = upload.child, upload.result
        if not self.coordinator.is_announced(child, result.key):
            return False  # its process ended, or the round closed, while the buffer was allocated
        self._pending[child, result.model.blob] = result
        if result.inline is not None:
            self.receiver.take(child, result.model, buffer, result.inline)
            return True
        return self.receiver.fetch(child, result.model, buffer, lacking=lacking, now=now)

    def accept(self, upload: UploadArrived, now: float) -> None:
        """Accept an upload that is complete and valid."""
        self.coordinator.accept(upload.child, upload.result.key, now=now)

    def refuse(self, child: str, key: Key, reason: str, now: float) -> None:
        """Refuse a result permanently; the round continues with the other children."""
        reason = short(reason)
        self.coordinator.refuse(child, key, reason=reason, now=now)
        self._events.append(UploadRefused(child, reason))

    def end_round(self, now: float, *, in_flight: Collection[str] = ()) -> list[str]:
        """Stop all transfers with the children but those in flight; return the blobs that are not served any more.

        The buffers of these children and blobs may be overwritten afterwards.
        """
        ended = [name for name in self._assignments if name not in in_flight]
        kept = {name: self._assignments[name] for name in in_flight}
        served = {assignment.model.blob for assignment in kept.values()}
        retired = {assignment.model.blob for assignment in self._assignments.values()} - served
        for blob in retired:
            self.offers.retire(blob)
        for name in ended:
            self.receiver.drop(name, now=now)
        self._pending = {key: result for key, result in self._pending.items() if key[0] in in_flight}
        self._assignments = kept
        self.coordinator.end(but=in_flight)
        return sorted(retired)

    def set_state(
        self, state: NodeState, *, reason: str = "", samples: int = 0, failure: Failure = Failure.NONE
    ) -> None:
        """Publish this node's state, retained. One that ends the run ends all tasks."""
        if state not in LIVING:
            self.coordinator.end()
        super().set_state(state, reason=reason, samples=samples, failure=failure)

    # Presence of the children

    def readiness(self, now: float) -> Readiness:
        """Return which children can take part now."""
        return readiness(
            self.peers,
            last=self._last,
            counted=self.samples.keys(),
            hanging=set(self.coordinator.hanging(now)),
            waits_for=self._waits_for,
            other_releases=self.other_releases,
            idle_s=self.transfer.idle_s,
        )

    @property
    def complete(self) -> bool:
        """Whether all children can take part now."""
        return len(self._attendance.ready) == len(self.peers)

    def ask_quiet(self, now: float) -> None:
        """Ask children that stopped reporting their preparation: the message that they are ready may be lost."""
        preparing = [name for name, last in self._last.items() if last is not None and last.state is NodeState.INIT]
        for name in preparing:
            if now >= self._prepared_at.setdefault(name, now) + QUIET_S:
                self._prepared_at[name] = now
                self.proofs.doubt(name, now)

    def present(self) -> list[str]:
        """Return the children that are present."""
        return [name for name, last in self._last.items() if last is not None and last.state in LIVING]

    @property
    def owes_farewells(self) -> bool:
        """Whether a child that is present or has just finished has not sent its farewell."""
        return bool(self._attendance.owing)

    def _bound(self, blob_bytes: int = 0) -> None:
        """Set the bounds of the children's messages, and of the presences under this node's own name."""
        inline_bytes = self.transfer.inline_bytes
        self._admission.bounds = {
            name: SenderBounds(
                nodes=len(limit.below),
                blob_bytes=blob_bytes,
                inline_bytes=inline_bytes,
                plans=bool(limit.aggregators),
                announces=False,
            )
            for name, limit in self._limits.items()
        } | {self.identity.name: SenderBounds(nodes=sum(len(limit.below) + 1 for limit in self._limits.values()))}

    # Implementation of Side

    def _inboxes(self) -> Iterable[str]:
        lab, run, me = self.identity.lab, self.identity.run, self.identity.name
        return [*(topics.inbox(lab, run, me, peer) for peer in self.peers), topics.seek(lab, me, "+")]

    def _question(self, peer: str, question: WhoIsThere, now: float) -> list[Output]:
        self.outbox.send(peer, question, now)
        return []

    def _elsewhere(self, run: str, sender: str, session: str, message: Message) -> None:
        raise WireError("of another run")

    def _reconnected(self, now: float) -> None:
        """Restart the children's idle times: without the broker nothing could arrive from them."""
        self.coordinator.reconnected(now)

    def _message(self, sender: str, session: str, message: Message, now: float) -> None:
        if isinstance(message, Progress):
            self._receive(sender, message, now)  # first: an error in its counts must not hide its progress
            self._count(sender, session, message.traffic, message.below)
        elif isinstance(message, Result):
            self._receive(sender, message, now)
            self._count(sender, session, message.traffic, message.below)
            self._enter_reports(sender, session, message.children)
        elif isinstance(message, Preparing):
            self._waits_for[sender] = short(message.waits_for)
            self._prepared_at[sender] = now
            self.coordinator.preparing(sender, message.done, waits=bool(message.waits_for), now=now)
            self.moves += 1
        elif isinstance(message, Declined):
            self.coordinator.declined(sender, message.key, short(message.reason))
            raise Misfit(f"it declined its task: {short(message.reason)}")
        elif isinstance(message, Probed):
            self._events.append(ProbeReceived(sender, message))
        elif isinstance(message, Reports):
            self._enter_reports(sender, session, message.children)
        elif isinstance(message, Farewell):
            self.farewells.add(sender)
            self._attendance.owing.discard(sender)
            if self._budget.take(sender, now):
                self.outbox.send(sender, Goodbye(), now)
            self._events.append(GoodbyeReceived(sender))
            self._count(sender, session, message.traffic, message.below)
        else:
            raise WireError(f"a child does not send a {type(message).__name__}")

    def _receive(self, sender: str, message: Progress | Result, now: float) -> None:
        if reason := self.coordinator.receive(sender, message, now=now):
            raise Misfit(reason)

    def _presence(
        self, peer: str, session: str, presence: Presence | None, now: float, *, published: bool = True
    ) -> None:
        if presence is not None:
            most = self._limits[peer].samples
            if presence.samples > most:
                raise Misfit(f"it reports {presence.samples} samples, at most {most} are possible")
            presence = replace(presence, reason=short(presence.reason))
        if not self.coordinator.presence(peer, session, presence, now=now):
            return
        self.targets.receive(peer, presence, now=now)
        before = self._last.get(peer)
        if presence is None or presence.state not in LIVING:
            self.sender.forget(peer)
            self.receiver.yield_slot(peer, now=now)
        elif published or before is None or before.state not in LIVING:  # its connection is new
            self.receiver.ask_again(peer, now=now)
        if presence is not None and presence.samples and (self._limits[peer].below or session != self._counted[peer]):
            if published and self.samples.get(peer, presence.samples) != presence.samples:
                self.proofs.want(peer, now)  # possibly a stranger's: another count is taken from an answer only
            else:  # a device's are the same all the time
                self.samples[peer], self._counted[peer] = presence.samples, session
        self._last[peer] = presence
        self._attendance.note(peer, presence, counted=peer in self.samples, farewell=peer in self.farewells)
        if presence is None or before is None or (before.state, before.reason) != (presence.state, presence.reason):
            state, reason = ("left", "") if presence is None else (str(presence.state), presence.reason)
            self._events.append(PeerChanged(peer, state, reason))

    def _moved(self, peer: str, now: float) -> None:
        self.coordinator.moved(peer, now=now)
        self.moves += 1

    def _transferred(self, event: ReceiverEvent, now: float) -> None:
        result = self._pending.pop((event.owner, event.blob), None)
        if result is None:
            return
        if isinstance(event, Fetched):
            if event.rate and result.model.chunks >= RATED_CHUNKS:
                self.rates[event.owner] = event.rate
            self._events.append(UploadArrived(event.owner, result))
        elif isinstance(event, FetchFailed) and event.cause is FetchFailure.GONE:
            self.coordinator.retry(event.owner, result.key, now=now)
        else:
            self.refuse(event.owner, result.key, event.reason, now)

    def _lives(self, peer: str, session: str, now: float) -> None:
        """Ask a child that was lost and sends for its presence: the one with which it came back was lost."""
        last = self._last.get(peer)
        if last is not None and last.state is NodeState.LOST:
            self.proofs.want(peer, now)

    def _state_of_the_dead(self, peer: str, presence: Presence) -> None:
        pass  # a child is absent until it joins

    def _silent(self, peer: str, now: float) -> None:
        session = self.proofs.session(peer)
        lost = Presence(NodeState.LOST, "", reason="no reply since the broker came back")
        self._presence(peer, session, lost, now)

    def _tick(self, now: float) -> None:
        if self._connected:
            self.coordinator.tick(now)
        if now >= self._absence.due:
            away, all_away = self.coordinator.away(now)
            self.moves += bool(away)  # to wait for them is no idleness, whoever else is lost
            if self._absence.look(away if all_away else (), now):
                self._events.append(DevicesAway(away))
        targets = self.targets.changed(now)
        if targets is not None:
            self._events.append(TargetsChanged(targets))

    def _take_events(self, now: float) -> None:
        while (event := self.coordinator.next_event()) is not None:
            if isinstance(event, ResultAnnounced):
                self._announced(event, now)
            elif isinstance(event, Restarted):
                self.receiver.drop(event.child, now=now)
                self.sender.forget(event.child)
                self._pending = {key: result for key, result in self._pending.items() if key[0] != event.child}
            else:
                self._events.append(event)

    def _due(self, now: float) -> Iterable[tuple[str, Message]]:
        return self.coordinator.to_send(now)

    def _next_deadline(self) -> float | None:
        due = self.coordinator.next_deadline()
        at = min(self.targets.due, self._absence.due, inf if due is None else due)
        return at if at < inf else None

    def _next_deadline_away(self) -> float:
        return self.targets.due

    def _enter_reports(self, child: str, session: str, reports: tuple[ChildReport, ...]) -> None:
        self.ledger.enter_reports(child, session, reports)
        if unknown := next((report.name for report in reports if report.name not in self._limits[child].below), None):
            raise Misfit(f"a report on {unknown[:64]!r}, which is not below it")

    def _announced(self, announced: ResultAnnounced, now: float) -> None:
        child, result = announced.child, announced.result
        try:
            if self._form is None:
                raise RefusedModel("no model is expected yet")
            assignment = self._assignments[child]
            self._form.check(result.model, reference=assignment.model.blob)
            check_report(result, limits=self._limits[child], epochs=assignment.epochs)
        except RefusedModel as error:
            self.refuse(child, result.key, str(error), now)
        else:
            self._events.append(UploadAnnounced(child, result))

    def _count(self, child: str, session: str, traffic: Traffic, below: tuple[Traffic, ...]) -> None:
        self.ledger.enter(child, session, link=traffic, below=below)
        self.moves += 1
