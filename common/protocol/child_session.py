"""A child's session with its parent, without I/O: tasks, results, and the parent's presence.

For each task the endpoint answers `TaskReceived` with a buffer (`fetch`). After `ModelArrived` it
reports the start of the work (`begin_work`), its progress (`progress`), and the result
(`participant.finish`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from typing import Final, Unpack

import numpy as np
import numpy.typing as npt

from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.ledger import Mark
from fedstrata.common.accounting.traffic import Traffic
from fedstrata.common.errors import Misfit, RefusedModel, WireError
from fedstrata.common.model.layout import ROW_BYTES_MOST
from fedstrata.common.protocol import topics
from fedstrata.common.protocol.arrivals import (
    Arrival,
    Elsewhere,
    Living,
    Proven,
    Received,
    Unproven,
)
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
from fedstrata.common.protocol.limits import SenderBounds
from fedstrata.common.protocol.manifest import (
    EXCHANGE_MOST,
    FROZEN_CODEC,
    ModelForm,
    check_exchange,
)
from fedstrata.common.protocol.messages import (
    LIVING,
    About,
    Acknowledgement,
    Alive,
    Declined,
    Farewell,
    FrozenOffered,
    Goodbye,
    Key,
    Manifest,
    Message,
    NodeState,
    Phase,
    Preparing,
    Presence,
    Probe,
    Progress,
    Question,
    Reports,
    Result,
    RoundTurn,
    Task,
)
from fedstrata.common.protocol.outbox import Output
from fedstrata.common.protocol.participant import PHASE_S, Participant
from fedstrata.common.protocol.peer_link import ByteMeter, PeerLink
from fedstrata.common.protocol.peers import ToParent
from fedstrata.common.protocol.presence import Identity, Proof, StateFacts, TimeZero
from fedstrata.common.protocol.receiver import Fetched, FetchFailed, ReceiverEvent
from fedstrata.common.protocol.round_state import HEARTBEAT_S
from fedstrata.common.settings.links import LinkSet
from fedstrata.common.text import short

FAREWELL_S: Final = 1.0  # between two farewells
QUIET_S: Final = 30.0  # without a message from the parent, before it is asked for proof of life
# of acknowledgements and pings in that time; more bytes are a model in transfer
QUIET_BYTES: Final = 1024
LEDGERS_KEPT: Final = 16  # of the parent: one per process


class ChildSession:
    """One child's session with its parent on one broker."""

    def __init__(
        self,
        identity: Identity,
        above: ToParent,
        *,
        meter: ByteMeter,
        first_number: int,
        now: float,
    ) -> None:
        parent = above.parent
        link = above.link
        transfer = above.transfer
        ways = LinkSet(to={parent: link.up}, from_={parent: link.down}, shaped=above.shaped)
        self.link = PeerLink(
            identity,
            peers=(parent,),
            transfer=transfer,
            ways=ways,
            meter=meter,
            first_number=first_number,
            seeks=True,
            take=self._take,
            progressed=self._progressed,
        )
        self.parent = parent
        # When the institutions have a model is measured: they report it at once.
        phase_s = PHASE_S if above.below is None else 0.0
        self.participant = Participant(idle_s=transfer.idle_s, phase_s=phase_s)
        self._form: ModelForm | None = None
        self._secure = above.secure
        # whether the node can do a later turn of a secure sum
        self.holds: Callable[[Key], bool] = lambda key: False
        self._frozen = above.frozen
        self._limits = above.limits
        self._bound()
        self._below = above.below
        self._ledger = ""
        self._marks: dict[str, Mark] = {}
        self._fetching: Task | None = None
        self._parent_session = above.session
        self._task_session = ""  # that sent the last task
        self._zero = TimeZero()
        self._gone_since: float | None = now
        self._lost = False
        self._patience_s = above.gone_after_s
        self._entered = above.entered
        self.accepted: Key | None = None  # the task whose result the parent accepted last
        self._quiet_s = min(QUIET_S, self._patience_s / 2)
        self._quiet_at = inf
        self._carried = 0
        self._ended = False
        self._now = 0.0
        self._found_end: Presence | None = None
        self._declined: Declined | None = None
        self._preparing: Preparing | None = None
        self._prepare_at = self._want_at = inf
        self._farewell: tuple[ChildReport, ...] | None = None
        self._farewell_at = inf
        if above.session:
            self.link.proofs.know(parent, above.session)

    # Before the rounds

    def preparing(self, done: int, *, waits_for: str = "", now: float) -> bool:
        """Report preparation; `done` grows with its progress, `waits_for` names the nodes that this
        node waits for.

        Return whether a message is due sooner than before.
        """
        waits_for = short(waits_for)
        changed = self._preparing is None or waits_for != self._preparing.waits_for
        before = self._prepare_at
        self._preparing = Preparing(done, waits_for)
        self._prepare_at = now if changed else min(self._prepare_at, now + HEARTBEAT_S)
        return self._prepare_at < before

    def prepared(self) -> None:
        """Stop reporting preparation."""
        self._preparing = None
        self._prepare_at = inf

    def want_frozen(self, now: float) -> None:
        """Ask the parent for its frozen arrays until it offers them: `FrozenFound` follows."""
        self._want_at = now

    def set_form(self, form: ModelForm) -> None:
        """Set the required form of the parent's models."""
        self._form = form
        self._bound()

    def _bound(self) -> None:
        """Set the bounds of the parent's messages, and of the presences under this node's own
        name.
        """
        limits = self._limits
        if limits is None:
            return
        blob_bytes = ROW_BYTES_MOST if self._form is None else self._form.size
        if self._secure:
            blob_bytes = max(blob_bytes, EXCHANGE_MOST)
        frozen_bytes = 0 if self._frozen is None else self._frozen.nbytes
        above = SenderBounds(
            nodes=limits.below_parent,
            blob_bytes=blob_bytes,
            inline_bytes=self.link.transfer.inline_bytes,
            frozen_bytes=frozen_bytes,
            plans=False,
        )
        self.link.admission.bounds = {
            self.parent: above,
            self.link.identity.name: SenderBounds(nodes=limits.below_node),
        }

    # A task

    def fetch(
        self,
        task: Task,
        buffer: memoryview | None,
        now: float,
        *,
        lacking: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Fetch a task's model into `buffer`, uint8 [its size]; None: check it where it is, inside
        the task.

        `lacking`, bool [chunks], marks the chunks that the buffer lacks, None: all. It is kept up
        to date, so that others may follow the fetch.
        """
        self._fetching = task
        if task.inline is not None:
            self.link.receiver.take(self.parent, task.model, buffer, task.inline)
        else:
            assert buffer is not None
            self.link.receiver.fetch(self.parent, task.model, buffer, lacking=lacking, now=now)

    def begin_work(self, now: float) -> None:
        """Note that the model has arrived and been decoded, and that the work begins."""
        self.participant.begin_work(Phase.WAITING, now=now)

    def progress(self, phase: Phase, done: int, total: int, now: float) -> bool:
        """Note the progress of the work; return whether a message is due sooner than before."""
        return self.participant.progress(phase, done, total, now=now)

    def stop_fetching(self, task: Task, now: float) -> None:
        """Stop fetching a task's model; its buffer is not written any more."""
        if self._fetching is not None and self._fetching.model.blob == task.model.blob:
            self._fetching = None
        self.link.receiver.drop(self.parent, blob=task.model.blob, now=now)

    # The end

    def send_goodbye(self, children: tuple[ChildReport, ...], now: float) -> None:
        """Send the final reports and the final byte counts of this link until the parent
        replies.
        """
        self._farewell = children
        self._farewell_at = now

    @property
    def goodbye_answered(self) -> bool:
        """Whether the parent has replied to the farewell, or none has been sent."""
        return self._farewell is None

    def set_state(self, state: NodeState, **facts: Unpack[StateFacts]) -> None:
        """Publish this node's state, retained."""
        self.link.own.set_state(state, **facts)

    # Between the link and the endpoint

    def connected(self, now: float, *, packet_most: float = inf) -> None:
        """Note a new connection to a broker that accepts packets of at most `packet_most` bytes.

        What may have been lost with the old one is repeated; the parent is asked for proof of life.
        """
        own = self.link.identity
        # any run: a parent that moved replies from its new one
        inbox = topics.inbox(own.lab, "+", own.name, self.parent)
        self.link.connected(now, inboxes=[inbox], packet_most=packet_most)
        self.participant.reconnected(now)
        if self._gone_since is None:
            self._gone_since = now
        self._carried = self.link.meter.received()  # of the new connection
        self._farewell_at = now if self._farewell is not None else inf

    def to_send(self, now: float) -> list[Output]:
        """Return what is due, in order; nothing while the broker is away."""
        return self.link.to_send(now, self._due(now))

    def tick(self, now: float) -> None:
        """Evaluate the state machines at this time."""
        self._now = now
        # else the parent's absence is counted already
        if self.link.tick(now) and self._found_end is not None:
            self._end(self._found_end)
        if self.link.up and now >= self._quiet_at:
            self._quiet(now)
        if now >= self._gone_at():
            self._ended = True
            self.link.events.append(ParentGone())
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
        at = min(self.link.next_deadline(now), self._gone_at())
        if not self.link.up:
            return at
        if self._declined is not None:
            return -inf
        if not self._ended:
            at = min(at, self._quiet_at)
        reports_at = min(self._prepare_at, self._want_at, self._farewell_at)
        return min(at, reports_at, self.participant.next_deadline())

    # Handling of what has come

    def _take(self, arrival: Arrival, now: float) -> None:
        if isinstance(arrival, Received):
            self._message(arrival.peer, arrival.message, now)
        elif isinstance(arrival, Living):
            self._lives(arrival.peer, arrival.session, now)
        elif isinstance(arrival, Proven):
            self._presence(arrival, now)
        elif isinstance(arrival, Unproven):
            self._state_of_the_dead(arrival.peer, arrival.presence)
        elif isinstance(arrival, Elsewhere):
            self._elsewhere(arrival)

    def _message(self, sender: str, message: Message, now: float) -> None:
        if isinstance(message, Task):
            self._take_task(message, now)
        elif isinstance(message, Acknowledgement):
            self.participant.receive(message, now=now)
        elif isinstance(message, FrozenOffered):
            self._take_frozen(message.model)
        elif isinstance(message, Probe):
            self.link.events.append(ProbeReceived(sender, message))
        elif isinstance(message, Goodbye):
            self._farewell = None
            self._farewell_at = inf
        else:
            raise WireError(f"a parent does not send a {type(message).__name__}")

    def _take_task(self, task: Task, now: float) -> None:
        try:
            self._check_task(task)
        except RefusedModel as error:
            self._decline(task, str(error), now)
            raise Misfit(f"a task: {error}") from None
        scores = task.key.turn == RoundTurn.MODEL and not task.epochs
        later = task.key.turn != RoundTurn.KEYS and not scores
        if self._secure and later and not self.holds(task.key):
            self._decline(task, "its keys are those of another process", now, lacks_keys=True)
            return
        self._task_session = self._parent_session
        self.participant.receive(task, now=now)

    def _check_task(self, task: Task) -> None:
        """Check a task's numbers and the form of its model. Raises RefusedModel."""
        if task.key.turn != RoundTurn.MODEL:
            if not self._secure:
                raise RefusedModel("a secure sum, which this tier does not have")
            check_exchange(task.model)
        elif self._form is not None:
            self._form.check(task.model)
        if self._limits is not None:
            self._limits.check(task)

    def decline(self, task: Task, reason: str, now: float) -> None:
        """Reject a task that this node cannot do, with the reason; the parent may send it again."""
        self.participant.abandon()
        self._decline(task, reason, now)

    def _decline(self, task: Task, reason: str, now: float, *, lacks_keys: bool = False) -> None:
        # the task is repeated until it is answered
        if self.link.answers.take(self.parent, now):
            self._declined = Declined(task.key, short(reason), lacks_keys)

    def _take_frozen(self, offered: Manifest) -> None:
        """Take the parent's offer of frozen arrays; one that nobody waits for is late. Raises
        Misfit.
        """
        if self._frozen is None:
            raise Misfit("frozen arrays, which this run does not have")
        if self._want_at == inf:
            return
        form = ModelForm(
            self._frozen.digest, FROZEN_CODEC, self._frozen.nbytes, exact=True, delta=False
        )
        try:
            form.check(offered)
        except RefusedModel as error:
            raise Misfit(f"frozen arrays: {error}") from None
        self._want_at = inf
        self.link.events.append(FrozenFound(offered))

    def _presence(self, proven: Proven, now: float) -> None:
        peer = proven.peer
        session = proven.session
        presence = proven.presence
        if presence is not None and presence.state in LIVING:
            self._begin_count(presence.ledger)
            self._lives(peer, session, now)
            begun = self._zero.note(presence.elapsed_s, session, now, published=proven.published)
            if begun is not None:
                self.link.begin(begun)
                self.link.events.append(RunBegan(begun))
            return
        if self._gone_since is None:
            self._gone_since = now
        self._lost = True
        self.link.proofs.doubt(peer, now)
        self.link.sender.forget(peer)
        if presence is not None and presence.state in (NodeState.FINISHED, NodeState.FAILED):
            self._end(presence)

    def _state_of_the_dead(self, peer: str, presence: Presence) -> None:
        """Handle the parent's retained final state, kept for children that were away when the run
        ended.

        An old broker store may have the state of a run that was resumed later: a parent that was
        present before is asked first.
        """
        proof = self.link.proofs.proof(peer)
        if presence.state is not NodeState.FINISHED or proof is Proof.PROVEN:
            return
        if proof is Proof.DOUBTED:
            self._found_end = presence
        else:
            self._end(presence)

    def _elsewhere(self, arrival: Elsewhere) -> None:
        answer = arrival.message
        if not isinstance(answer, Alive) or answer.nonce != self.link.proofs.nonce:
            raise WireError("of another run")
        if self._gone_since is not None and answer.announcement is not None and not self._ended:
            self._ended = True
            self.link.events.append(ParentMoved(arrival.run, arrival.session, answer.announcement))

    def _progressed(self, parent: str, now: float) -> None:
        if self._fetching is not None:
            model = self._fetching.model
            done = model.chunks - self.link.receiver.lacks(parent, model.blob)
            self.participant.progress(Phase.FETCHING, done, model.chunks, now=now)

    def _collect(self, now: float) -> None:
        """Handle the ended fetches, and what the participant has to say."""
        while (fetch := self.link.receiver.next_event()) is not None:
            self._transferred(fetch)
        while (event := self.participant.next_event()) is not None:
            if isinstance(event, TaskReceived):
                self.link.events.append(event)
            elif event.reason:
                self.link.events.append(ResultRefused(event.reason))
            elif event.key.turn == RoundTurn.MODEL and (
                self.accepted is None or event.key > self.accepted
            ):
                self.accepted = event.key

    def _transferred(self, event: ReceiverEvent) -> None:
        if self._fetching is None or event.blob != self._fetching.model.blob:
            self.link.events.append(BlobFetched(event))
            return
        self._fetching = None
        if isinstance(event, Fetched):
            self.link.events.append(ModelArrived(event.blob))
        elif isinstance(event, FetchFailed):
            self.link.events.append(ModelFailed(event.blob, event.reason))

    def _quiet(self, now: float) -> None:
        """Ask a parent that has been silent for proof of life: the message of its end may be
        lost.
        """
        carried = self.link.meter.received()
        if abs(carried - self._carried) > QUIET_BYTES:
            if not self._lost:
                self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now
            self.link.proofs.doubt(self.parent, now)
        self._carried = carried
        self._quiet_at = now + self._quiet_s

    def _due(self, now: float) -> Iterator[tuple[str, Message]]:
        """Yield the messages that are due, each with the parent, when the link is about to send
        them.
        """
        messages: list[Message] = []
        if self._declined is not None:
            messages.append(self._declined)
            self._declined = None
        if self._preparing is not None and now >= self._prepare_at:
            messages.append(self._preparing)
            self._prepare_at = inf
        if self._frozen is not None and now >= self._want_at:
            messages.append(Question(self.link.proofs.nonce, About.FROZEN, self.link.identity.run))
            self._want_at = now + HEARTBEAT_S
        if self._farewell is not None and now >= self._farewell_at:
            if self._farewell:
                messages.append(Reports(self._mark.reports_since(self._farewell)))
            messages.append(Farewell(*self._traffic()))
            self._farewell_at = now + FAREWELL_S
        if now >= self.participant.next_deadline():  # the counts are summed only when they are sent
            messages += map(self._counted_since, self.participant.to_send(now, *self._traffic()))
        yield from ((self.parent, message) for message in messages)

    def _gone_at(self) -> float:
        if self._gone_since is None or self.link.away_since is not None or self._ended:
            return inf
        if self.link.own.begun is None:
            return self._gone_since + self.link.transfer.idle_s
        return self._gone_since + self._patience_s

    def _lives(self, peer: str, session: str, now: float) -> None:
        self._gone_since = self._found_end = None
        self._quiet_at = now + self._quiet_s
        if session != self._parent_session or self._lost:
            self.link.receiver.ask_again(peer, now=now)  # its connection is new
        if session != self._parent_session:
            self._parent_session = session
            if self._entered:
                self.link.proofs.want(peer, now)
            self.participant.parent_restarted(now, again=session == self._task_session)
        elif self._lost:
            self.participant.reconnected(now)
        self._lost = False

    def _end(self, presence: Presence) -> None:
        if not self._ended:
            self._ended = True
            self.link.events.append(RunEnded(presence.state, short(presence.reason)))

    def _begin_count(self, ledger: str) -> None:
        """Count from zero for a new ledger of the parent."""
        if ledger == self._ledger:
            return
        mark = Mark()
        if self._ledger:
            reports = {} if self._below is None else self._below.reports()
            mark = Mark(*self._counted(), reports)
        self._marks.setdefault(ledger, mark)
        self._ledger = ledger
        if len(self._marks) > LEDGERS_KEPT:
            del self._marks[next(iter(self._marks))]

    @property
    def _mark(self) -> Mark:
        return self._marks.get(self._ledger, Mark())

    def _traffic(self) -> tuple[Traffic, tuple[Traffic, ...]]:
        """Return what the parent's ledger gets: the bytes of this link, and of the tiers below."""
        link, below = self._counted()
        return link - self._mark.link, self._mark.since(below)

    def _counted_since(self, message: Progress | Result) -> Progress | Result:
        if isinstance(message, Result) and self._mark.reports:
            return replace(message, children=self._mark.reports_since(message.children))
        return message

    def _counted(self) -> tuple[Traffic, tuple[Traffic, ...]]:
        link = self.link.counters.traffic(self.parent, self.link.meter.sample())
        if self._below is None:
            return link, ()
        return link, self._below.tiers()
