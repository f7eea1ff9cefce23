"""Presence: a node's identity and its own retained state, and the proof of life of its peers.

A retained presence outlives its process: a broker that restarts after a power failure has the
presences of dead processes. So a peer counts as present only once its session has proved itself on
the present connection, by `TRANSITIONS`:

    UNKNOWN --retained--> CLAIMED --live--> PROVEN --reconnected--> DOUBTED --live--> PROVEN
       +---------------------live-------------^                        +----retained----+

A retained presence of a DOUBTED session is asked for, not believed.
`live` is a presence published during the connection, a reply to a question with its nonce, or any
message of a session that was proved before. The order of presences at the broker decides which
session represents a name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf
from typing import Final, TypedDict, Unpack

from fedstrata.common.protocol import topics
from fedstrata.common.protocol.messages import (
    LIVING,
    Alive,
    Failure,
    NodeState,
    Presence,
    Question,
    Target,
)
from fedstrata.common.protocol.topics import DEFAULT_LAB
from fedstrata.common.text import short

CHALLENGED_MOST: Final = 16  # sessions; a peer with access to the state topic can send any number
PROOF_EVERY_S: Final = 0.5
ASK_MOST_S: Final = 5.0
ASK_FIRST_S: Final = 0.2  # time for a living peer's presence to arrive before it is asked for
# the same for a child of which nothing is known: many of them may be starting
ASK_UNKNOWN_S: Final = 2.0
ELAPSED_MOST_S: Final = 1e10
MOVED_S: Final = 0.25  # by which a later report of time zero must differ to count
FINAL: Final = (NodeState.FINISHED, NodeState.FAILED, NodeState.LOST, NodeState.DISCONNECTED)


@dataclass(slots=True)
class Claim:
    """One process's claim to its name: the last sessions that it challenged, and whether it lost
    the name.
    """

    challenged: deque[str] = field(default_factory=lambda: deque(maxlen=CHALLENGED_MOST))
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Identity:
    """A node's identity in a run of a lab."""

    run: str
    name: str
    role: str
    session: str  # of its process, which its endpoints share
    metrics: str = ""  # its /metrics address
    # The id of the byte ledger that its children count for, empty: the session, because the ledger
    # is not kept across restarts.
    ledger: str = ""
    lab: str = DEFAULT_LAB
    claim: Claim = field(default_factory=Claim, compare=False)  # shared, as the session is

    def topic(self, form: Callable[[str, str, str], str], node: str = "") -> str:
        """Return the topic of a node in this run, by default of this node."""
        return form(self.lab, self.run, node or self.name)

    def inbox_from(self, peer: str) -> str:
        """Return the topic of a peer's messages to this node."""
        return topics.inbox(self.lab, self.run, self.name, peer)

    def inbox_of(self, peer: str) -> str:
        """Return the topic of this node's messages to a peer."""
        return topics.inbox(self.lab, self.run, peer, self.name)


class StateFacts(TypedDict, total=False):
    """What a node publishes with its state; the fields of its presence, by default of none."""

    reason: str
    samples: int
    tests: int
    failure: Failure


NO_FACTS: Final[StateFacts] = {"reason": "", "samples": 0, "tests": 0, "failure": Failure.NONE}


class OwnPresence:
    """One node's presence on one broker, and the defence of its name.

    A living node replies to the first presence of a second node with its name. The broker's order
    of messages decides which node is the second one; no timer is involved.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self.presence = Presence(
            NodeState.INIT,
            identity.role,
            identity.metrics,
            ledger=identity.ledger or identity.session,
        )
        self._due: deque[Presence] = deque()
        self._remains: deque[str] = deque()
        self.begun: float | None = None
        self._established = False
        self.leaving = False
        self.taken = ""

    def set_state(self, state: NodeState, **facts: Unpack[StateFacts]) -> None:
        """Publish this node's state. An end is final: work that is being stopped may go on for a
        while.
        """
        if state in LIVING and self.presence.state in FINAL:
            return
        known: StateFacts = {**NO_FACTS, **facts}
        known["reason"] = short(known["reason"])
        self.presence = replace(self.presence, state=state, **known)
        self._due.append(self.presence)

    def below(self, parent: str, *, after: int) -> None:
        """Publish from now on whose child this node is, and which task another parent used last."""
        self.presence = replace(self.presence, parent=parent, after=after)

    def set_targets(self, targets: tuple[Target, ...]) -> None:
        """Publish the /metrics addresses of the nodes below."""
        self.presence = replace(self.presence, targets=targets)
        if not self.leaving:
            self._due.append(self.presence)

    def repeat(self) -> None:
        """Publish the presence again for nodes that may have missed it."""
        self._due.append(self.presence)

    def connected(self) -> None:
        """Publish the presence on a new connection. The name is claimed once the broker has sent it
        back.
        """
        self._established = False
        self._due.clear()
        self._due.append(self.presence)

    def receive(self, run: str, session: str, presence: Presence | None, *, retained: bool) -> None:
        """Handle a message on this name's state topic, in any run; `taken` is set if another node
        has the name.
        """
        claim = self._identity.claim
        mine = self._identity.session
        if session == mine:
            if presence is not None and presence.state is NodeState.LOST is not self.presence.state:
                self._due.append(self.presence)  # the will of this node's own broken connection
            else:
                self._established = True
        elif retained:
            if run != self._identity.run and presence is not None and presence.state in FINAL:
                # left by a run that has ended; the present owner of the name clears it
                self._remains.append(run)
        elif self.leaving or claim.lost or (presence is None and run != self._identity.run):
            return
        elif presence is not None and presence.answers == mine:
            if session in claim.challenged and session > mine:
                return  # both started at once and challenged each other: one of them stays
            claim.lost = True
            self.taken = run
        elif self._established and (
            presence is None or not presence.answers or presence.state in FINAL
        ):
            if session not in claim.challenged:
                claim.challenged.append(session)
            # the second node reads it and ends
            self._due.append(replace(self.presence, answers=session))

    def begin(self, begun: float) -> None:
        """Note when the run's first global round began, and publish the presence again with the
        seconds since then.
        """
        self.begun = begun
        self.repeat()

    def timed(self, presence: Presence, now: float) -> Presence:
        """Return a presence as of now."""
        if self.begun is None:
            return presence
        return replace(presence, elapsed_s=max(0.0, now - self.begun))

    def to_send(self) -> list[Presence]:
        """Return the presences to publish, in order."""
        due = list(self._due)
        self._due.clear()
        return due

    def remains(self) -> list[str]:
        """Return the other runs in which this name's retained state is to be cleared."""
        due = list(self._remains)
        self._remains.clear()
        return due


class TimeZero:
    """When the run's first global round began, in monotonic seconds of this node, None: it has not.

    Clocks of machines are never compared: a presence has the seconds that have passed when it is
    sent, so the error is the time for which it travels.
    """

    def __init__(self) -> None:
        self.begun: float | None = None
        self._session = ""

    def note(self, elapsed_s: float, session: str, now: float, *, published: bool) -> float | None:
        """Note the seconds in a presence of the parent's session; return time zero if it has
        changed.

        `published`: by itself; a reply may have waited for its link, and counts only for a session
        that is new.
        """
        if not 0 <= elapsed_s <= ELAPSED_MOST_S or (session == self._session and not published):
            return None
        self._session = session
        begun = now - elapsed_s
        if self.begun is not None and abs(begun - self.begun) < MOVED_S:
            return None
        self.begun = begun
        return begun


class Proof(Enum):
    """The certainty that a peer's session is alive."""

    UNKNOWN = "unknown"
    CLAIMED = "claimed"
    PROVEN = "proven"
    DOUBTED = "doubted"


class ProofCause(Enum):
    """The causes of a proof's transitions."""

    LIVE = "live"
    RETAINED = "retained"
    RECONNECTED = "reconnected"


TRANSITIONS: Final[Mapping[ProofCause, Mapping[Proof, Proof]]] = {
    ProofCause.LIVE: dict.fromkeys(Proof, Proof.PROVEN),
    ProofCause.RETAINED: {Proof.UNKNOWN: Proof.CLAIMED},
    ProofCause.RECONNECTED: {Proof.PROVEN: Proof.DOUBTED, Proof.CLAIMED: Proof.UNKNOWN},
}


@dataclass(slots=True)
class _Peer:
    proof: Proof = Proof.UNKNOWN
    session: str = ""
    ask_at: float = inf
    ask_s: float = PROOF_EVERY_S
    silent_at: float = inf
    wanted: bool = False  # its presence, although it lives
    asked: bool = False  # and not answered yet

    def go(self, cause: ProofCause) -> None:
        self.proof = TRANSITIONS[cause].get(self.proof, self.proof)


class PeerProofs:
    """The proofs of life of one session's peers.

    `silent_s`: a peer that was alive before a reconnection and does not prove itself within this
    time counts as lost. `persistent`: ask without end, as a child asks for its parent. A parent
    asks an unknown child only a few times, because a child publishes its presence when it joins.
    """

    def __init__(
        self, peers: Iterable[str], identity: Identity, *, silent_s: float, persistent: bool
    ) -> None:
        self._of = {peer: _Peer() for peer in peers}
        self._identity = identity
        self._silent_s = silent_s
        self._persistent = persistent
        self._look_at = inf  # nothing is due before

    def add(self, peer: str) -> None:
        """Add a peer that came later."""
        self._of[peer] = _Peer()

    def remove(self, peer: str) -> None:
        """Forget a peer."""
        del self._of[peer]

    @property
    def nonce(self) -> str:
        """The nonce of this process's questions, which a reply must contain."""
        return self._identity.session

    def proof(self, peer: str) -> Proof:
        """Return the state of a peer's proof."""
        return self._of[peer].proof

    def session(self, peer: str) -> str:
        """Return the last session that represented a peer, empty if none has."""
        return self._of[peer].session

    def speaks(self, peer: str, session: str, now: float) -> bool:
        """Return whether this session represents the peer; any message of it proves that it is
        alive.

        Another session is asked for its presence, which may be lost or delayed, at most once per
        PROOF_EVERY_S.
        """
        known = self._of[peer]
        if session == known.session:
            self._live(known)
            return True
        if known.ask_at == inf:
            self._ask(known, now + known.ask_s)
        return False

    def receive(
        self, peer: str, session: str, presence: Presence, *, retained: bool, now: float
    ) -> bool:
        """Handle a presence; return whether it counts, because it was published during this
        connection.

        The last message of another session may be the late will of a replaced process, or the end
        of a process whose name a stranger has taken: who answers the question that follows
        represents the peer.
        """
        known = self._of[peer]
        if not retained:
            if presence.state in LIVING:
                known.session = session
                known.wanted = False
                self._live(known)
            elif known.session not in ("", session):
                self._ask(known, now + known.ask_s)
                return False
            return True
        if presence.state in LIVING:
            known.go(ProofCause.RETAINED)
            known.ask_s = PROOF_EVERY_S
            self._ask(known, now)
            return False
        return session == known.session != ""

    def answered(self, peer: str, session: str, answer: Alive) -> bool:
        """Handle a reply to a question; return whether it belongs to a question of this node.

        Only an open question admits another session: a late reply of a process that ended must not
        replace its successor.
        """
        known = self._of[peer]
        if answer.nonce != self.nonce or not (known.asked or session == known.session):
            return False
        known.session = session
        known.wanted = False
        self._live(known)
        return True

    def know(self, peer: str, session: str) -> None:
        """Add a session that proved itself elsewhere; it must prove itself on this connection
        too.
        """
        self._of[peer].session = session
        self._of[peer].proof = Proof.DOUBTED

    def reconnected(self, now: float) -> None:
        """Doubt all peers: a peer that was alive before the connection was lost may be dead now."""
        for known in self._of.values():
            known.go(ProofCause.RECONNECTED)
            likely = self._persistent or known.proof is Proof.DOUBTED
            known.ask_s = PROOF_EVERY_S if likely else ASK_UNKNOWN_S
            known.ask_at = now + (ASK_FIRST_S if likely else ASK_UNKNOWN_S)
            known.silent_at = now + self._silent_s if known.proof is Proof.DOUBTED else inf
        self._look_at = now

    def doubt(self, peer: str, now: float) -> None:
        """Ask a peer that was lost or has left for proof of life."""
        self._ask(self._of[peer], now + ASK_FIRST_S)

    def want(self, peer: str, now: float) -> None:
        """Ask a peer for its presence until it answers, or publishes one, whatever else it
        sends.
        """
        self._of[peer].wanted = True
        self.doubt(peer, now)

    def questions(self, now: float) -> list[tuple[str, Question]]:
        """Return the questions that are due, each with its peer."""
        if now < self._look_at:
            return []
        due = []
        for peer, known in self._of.items():
            if now >= known.ask_at:
                due.append((peer, Question(self.nonce, run=self._identity.run)))
                known.asked = True
                # it may have nothing else to send
                likely = known.proof in (Proof.CLAIMED, Proof.DOUBTED)
                endless = self._persistent or likely or known.wanted
                again = endless or known.ask_s < ASK_MOST_S
                known.ask_s = min(2 * known.ask_s, ASK_MOST_S)
                known.ask_at = now + known.ask_s if again else inf
        self._look_at = min(
            (min(known.ask_at, known.silent_at) for known in self._of.values()), default=inf
        )
        return due

    def silent(self, now: float) -> list[str]:
        """Return the peers that were alive before and have not proved themselves since the
        reconnection, each once.
        """
        if now < self._look_at:
            return []
        found = [peer for peer, known in self._of.items() if now >= known.silent_at]
        for peer in found:
            self._of[peer].silent_at = inf
        return found

    def next_deadline(self) -> float:
        """Return the earliest time at which `questions` or `silent` has something."""
        return self._look_at

    def _ask(self, known: _Peer, at: float) -> None:
        known.ask_at = min(known.ask_at, at)
        self._look_at = min(self._look_at, known.ask_at)

    @staticmethod
    def _live(known: _Peer) -> None:
        known.go(ProofCause.LIVE)
        known.silent_at = inf
        if not known.wanted:
            known.ask_at = inf
            known.ask_s = PROOF_EVERY_S
            known.asked = False
