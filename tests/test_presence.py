"""Who is there: proof of life, a node's own presence, and what peers want to know."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.protocol.admission import (
    ANSWER_S,
    ANSWERS_MOST,
    ASKS_KEPT,
    SEEKERS_MOST,
    Budget,
    PendingAnswers,
    PendingAsks,
)
from fedstrata.common.protocol.messages import Alive, Ask, Failure, NodeState, Presence, Question
from fedstrata.common.protocol.presence import (
    ASK_FIRST_S,
    ASK_MOST_S,
    ASK_UNKNOWN_S,
    FINAL,
    PROOF_EVERY_S,
    TRANSITIONS,
    Identity,
    OwnPresence,
    PeerProofs,
    Proof,
    ProofCause,
)

ME = Identity("run-1", "cloud", "cloud", "my-session")
READY = Presence(NodeState.READY, "device")
SILENT_S = 30.0


class Proofs(PeerProofs):
    """The proofs of peers, in the hand of a test."""

    def __init__(self, peers: str = "a", *, persistent: bool = False) -> None:
        super().__init__(peers, ME, silent_s=SILENT_S, persistent=persistent)

    def take(
        self,
        session: str = "s",
        state: NodeState = NodeState.READY,
        *,
        peer: str = "a",
        retained: bool = False,
        now: float = 0.0,
    ) -> bool:
        """Take a presence; return whether it counts."""
        presence = Presence(state, "device")
        return self.receive(peer, session, presence, retained=retained, now=now)

    def asks(self, *, until_s: float) -> list[float]:
        """Return when peers are asked, looking only when the deadline reports so."""
        found, now = [], 0.0
        while (due := self.next_deadline()) < until_s:
            assert due >= now
            now = due
            self.silent(now)
            found += [now] * len(self.questions(now))
            assert self.next_deadline() > now
        return found


def brought_to(proof: Proof, *, persistent: bool = False) -> Proofs:
    """Return the proofs of a peer that has come to this state, by session `old` where one proved
    itself.
    """
    proofs = Proofs(persistent=persistent)
    if proof is not Proof.UNKNOWN:
        proofs.take("old", retained=proof is Proof.CLAIMED)
    if proof is Proof.DOUBTED:
        proofs.reconnected(0.0)
    assert proofs.proof("a") is proof
    return proofs


@pytest.mark.parametrize("cause", ProofCause)
@pytest.mark.parametrize("proof", Proof)
def test_a_proof_changes_as_the_table_defines_and_in_no_other_way(
    proof: Proof, cause: ProofCause
) -> None:
    proofs = brought_to(proof)
    session = proofs.session("a")
    if cause is ProofCause.RECONNECTED:
        proofs.reconnected(1.0)
    else:
        proofs.take("new", retained=cause is ProofCause.RETAINED, now=1.0)
    assert proofs.proof("a") is TRANSITIONS[cause].get(proof, proof)
    assert proofs.session("a") == ("new" if cause is ProofCause.LIVE else session)


def test_the_picture_of_the_proofs_is_the_table() -> None:
    moves = {
        (Proof.UNKNOWN, ProofCause.RETAINED): Proof.CLAIMED,
        (Proof.CLAIMED, ProofCause.RECONNECTED): Proof.UNKNOWN,
        (Proof.PROVEN, ProofCause.RECONNECTED): Proof.DOUBTED,
        **{(proof, ProofCause.LIVE): Proof.PROVEN for proof in Proof},
    }
    assert {
        (a, cause): b for cause, table in TRANSITIONS.items() for a, b in table.items()
    } == moves


@pytest.mark.parametrize("state", NodeState)
def test_a_retained_presence_proves_nothing(state: NodeState) -> None:
    proofs = Proofs()
    assert not proofs.take("old", state, retained=True)
    assert proofs.session("a") == "" and not proofs.speaks("a", "old", 0.0)


@pytest.mark.parametrize("state", NodeState)
def test_a_presence_of_a_session_that_never_proved_itself_counts_only_while_it_lives(
    state: NodeState,
) -> None:
    proofs = brought_to(Proof.PROVEN)
    living = state in (NodeState.INIT, NodeState.READY)
    assert proofs.take("new", state) is living
    assert proofs.session("a") == ("new" if living else "old")
    assert proofs.take(proofs.session("a"), state)


def test_an_unknown_session_is_asked_about_once_in_a_while() -> None:
    proofs, questions = brought_to(Proof.PROVEN), []
    for hundredth in range(1000):
        now = hundredth / 100
        assert not proofs.speaks("a", "unknown", now)
        questions += [now] * len(proofs.questions(now))
    gaps = [later - earlier for earlier, later in itertools.pairwise(questions)]
    assert questions[0] == pytest.approx(PROOF_EVERY_S, abs=0.011)
    assert min(gaps) >= PROOF_EVERY_S and len(questions) <= 5


def test_an_answer_ends_the_questions() -> None:
    proofs = Proofs()
    proofs.take(retained=True)
    ((peer, question),) = proofs.questions(0.0)
    assert (peer, question) == ("a", Question("my-session", run="run-1"))
    assert (
        not proofs.answered("a", "s", Alive("another nonce", READY)) and proofs.session("a") == ""
    )
    assert proofs.answered("a", "s", Alive(question.nonce, READY))
    assert proofs.proof("a") is Proof.PROVEN and proofs.session("a") == "s"
    assert proofs.asks(until_s=1000.0) == []


def test_a_wanted_presence_is_asked_for_although_its_owner_sends() -> None:
    proofs = Proofs()
    proofs.take()
    proofs.want("a", 0.0)
    assert proofs.speaks("a", "s", 0.1)
    assert len(proofs.questions(ASK_FIRST_S)) == 1
    assert proofs.speaks("a", "s", 0.3)
    ((_, question),) = proofs.questions(ASK_FIRST_S + 2 * PROOF_EVERY_S)
    assert proofs.answered("a", "s", Alive(question.nonce, READY))
    assert proofs.asks(until_s=1000.0) == []


def test_a_parent_asks_a_child_of_which_it_knows_nothing_a_few_times() -> None:
    proofs = Proofs()
    proofs.reconnected(0.0)
    times = proofs.asks(until_s=1000.0)
    assert times[0] == ASK_UNKNOWN_S and 3 <= len(times) <= 5  # a thousand of them may be starting


@pytest.mark.parametrize(
    ("proof", "persistent"),
    [(Proof.CLAIMED, False), (Proof.DOUBTED, False), (Proof.UNKNOWN, True), (Proof.PROVEN, False)],
)
def test_who_is_or_was_there_or_wanted_and_a_parent_are_asked_until_they_answer(
    proof: Proof, persistent: bool
) -> None:
    """Every answer may be lost, and a child that has nothing to do sends nothing else."""
    proofs = brought_to(proof, persistent=persistent)
    if persistent:
        proofs.reconnected(0.0)
    if proof is Proof.PROVEN:
        proofs.want("a", 0.0)
    times = proofs.asks(until_s=1000.0)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[-1] > 990.0 and max(gaps) <= ASK_MOST_S + 1e-9 and min(gaps) >= PROOF_EVERY_S


def test_who_lived_and_does_not_answer_is_silent_once() -> None:
    proofs = Proofs("abc")
    for peer in "ab":
        proofs.take(peer=peer)
    proofs.reconnected(100.0)
    assert proofs.speaks("b", "s", 110.0)
    silent = []
    while (due := proofs.next_deadline()) < 300.0:
        silent += [(due, peer) for peer in proofs.silent(due)]
        proofs.questions(due)
    assert silent == [(100.0 + SILENT_S, "a")]


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["live", "retained", "lost", "reconnect", "message", "answer", "look"]),
            st.sampled_from("ab"),
            st.sampled_from(["s", "t", "u"]),
            st.floats(0.0, 20.0),
        ),
        max_size=40,
    )
)
def test_whatever_happens_nothing_due_is_missed_and_nobody_speaks_unproved(
    steps: list[tuple[str, str, str, float]],
) -> None:
    proofs, now = Proofs("ab"), 0.0
    proved: dict[str, set[str]] = {"a": set(), "b": set()}
    for what, peer, session, gap in steps:
        now += gap
        if what == "reconnect":
            proofs.reconnected(now)
        elif what == "look":
            proofs.silent(now)
            proofs.questions(now)
            assert proofs.next_deadline() > now
        elif what == "message":
            assert proofs.speaks(peer, session, now) == (proofs.session(peer) == session)
        elif what == "answer":
            open_question = proofs._of[peer].asked or session == proofs.session(peer)
            assert proofs.answered(peer, session, Alive(proofs.nonce, READY)) == open_question
            proved[peer].add(session)
        else:
            state = NodeState.LOST if what == "lost" else NodeState.READY
            proofs.take(session, state, peer=peer, retained=what == "retained", now=now)
            if what == "live":
                proved[peer].add(session)
        assert proofs.session(peer) in proved[peer] | {""}
        earliest = min(min(known.ask_at, known.silent_at) for known in proofs._of.values())
        # a look too many costs little, one too few never comes
        assert proofs.next_deadline() <= earliest


# Our own


class Own(OwnPresence):
    """A node's own presence, in the hand of a test."""

    def __init__(self, session: str = "my-session") -> None:
        super().__init__(Identity("run-1", "a", "device", session))
        self.connected()

    def publish(self, state: NodeState = NodeState.READY) -> None:
        self.set_state(state, reason="", samples=7, failure=Failure.NONE)

    def take(
        self,
        state: NodeState,
        *,
        session: str = "other",
        run: str = "run-1",
        retained: bool = False,
        **more: str,
    ) -> None:
        """Take a presence under its name, without more of another process."""
        self.receive(run, session, Presence(state, "device", **more), retained=retained)

    def states(self) -> list[NodeState]:
        """Return the states that it publishes now."""
        return [presence.state for presence in self.to_send()]


def published_own() -> Own:
    """Return a node's presence that was published, READY, and came back from the broker."""
    own = Own()
    own.publish()
    own.to_send()
    own.take(NodeState.READY, session="my-session")
    return own


def test_a_presence_is_published_on_each_connection_once() -> None:
    own = Own()
    own.publish()
    assert own.states() == [NodeState.INIT, NodeState.READY] and not own.to_send()
    own.publish(NodeState.FINISHED)  # while the broker is away
    own.connected()
    (presence,) = own.to_send()
    assert presence.state is NodeState.FINISHED and presence.ledger == "my-session"


@pytest.mark.parametrize("end", FINAL)
def test_an_end_is_the_last_word(end: NodeState) -> None:
    """A device that is stopped while it prepares may be ready before its work has ended."""
    own = published_own()
    own.publish(end)
    own.publish(NodeState.READY)
    assert own.states() == [end] and own.presence.state is end


def test_the_will_of_our_own_broken_connection_is_corrected() -> None:
    own = published_own()
    own.take(NodeState.LOST, session="my-session")
    assert own.states() == [NodeState.READY]
    own.take(NodeState.READY, session="my-session")
    assert not own.to_send()


def test_of_two_living_nodes_of_a_name_the_second_ends() -> None:
    nodes = {session: Own(session) for session in ("first", "second")}
    broker = [(name, each) for name, own in nodes.items() for each in own.to_send()]
    while broker:
        session, presence = broker.pop(0)
        for mine, own in nodes.items():
            own.receive("run-1", session, presence, retained=False)
            broker += [(mine, each) for each in own.to_send()]
    assert [own.taken for own in nodes.values()] == ["", "run-1"]


@pytest.mark.parametrize("answers", ["", "another"])
@pytest.mark.parametrize("state", FINAL)
def test_an_end_that_another_publishes_under_our_name_is_corrected(
    state: NodeState, answers: str
) -> None:
    own = published_own()
    own.take(state, answers=answers)
    (presence,) = own.to_send()
    assert (presence.state, presence.answers) == (NodeState.READY, "other") and not own.taken


def test_what_is_left_of_an_earlier_run_is_cleared_by_whoever_holds_the_name() -> None:
    own = published_own()
    for run, state in (
        ("old-1", NodeState.LOST),
        ("old-2", NodeState.READY),
        ("run-1", NodeState.FAILED),
    ):
        own.take(state, session="earlier", run=run, retained=True)
    assert own.remains() == ["old-1"] and not own.remains() and not own.to_send() and not own.taken


def test_a_node_that_leaves_defends_its_name_no_more() -> None:
    own = published_own()
    own.leaving = True
    own.take(NodeState.READY)
    own.receive("run-1", "", None, retained=False)
    own.set_targets(())
    assert not own.to_send() and not own.taken


# What peers want to know


def ask_of(number: int, *, window: int = 8, restart: bool = False) -> Ask:
    return Ask(f"{number:016x}", b"\xff", 0, 0, window, restart)


def test_the_last_ask_for_each_blob_counts_and_few_blobs_are_kept() -> None:
    asks = PendingAsks()
    for number in range(1000):
        assert asks.receive("a", ask_of(number)) is (number < ASKS_KEPT)
    assert asks.receive("b", ask_of(1, window=3)) and asks.receive("b", ask_of(1, window=4))
    taken = asks.take()
    assert [ask for peer, ask in taken if peer == "b"] == [ask_of(1, window=4)]
    assert [ask for peer, ask in taken if peer == "a"] == [
        ask_of(number) for number in range(1000 - ASKS_KEPT, 1000)
    ]
    assert asks.take() == []


def test_a_restart_is_not_lost_with_the_ask_that_had_it() -> None:
    asks = PendingAsks()
    asks.receive("a", ask_of(1, restart=True))
    asks.receive("a", ask_of(1, window=4))
    assert asks.take() == [("a", ask_of(1, window=4, restart=True))]
    asks.receive("a", ask_of(1))
    assert asks.take() == [("a", ask_of(1))]


def test_the_last_question_of_each_node_is_answered_once_in_a_while() -> None:
    answers, answered = PendingAnswers(frozenset("a")), []
    for hundredth in range(300):
        now = hundredth / 100
        assert answers.receive("a", Question(f"{hundredth}"), now=now)
        answered += [(now, question.nonce) for _, question in answers.due(now)]
    assert all(nonce == f"{round(100 * now)}" for now, nonce in answered)
    gaps = [b[0] - a[0] for a, b in itertools.pairwise(answered)]
    assert (
        answered[0] == (0.0, "0") and min(gaps) >= ANSWER_S - 1e-9 and max(gaps) <= ANSWER_S + 0.011
    )


def test_unknown_nodes_that_ask_take_no_room_from_peers() -> None:
    answers = PendingAnswers(frozenset("a"))
    taken = [answers.receive(f"x{number}", Question("n"), now=0.0) for number in range(1000)]
    assert sum(taken) == SEEKERS_MOST and answers.receive("a", Question("n"), now=0.0)
    assert len(answers.due(0.0)) == SEEKERS_MOST + 1 and not answers.due(0.0)


def test_a_budget_of_answers_is_spent_and_comes_back() -> None:
    budget = Budget()
    assert sum(budget.take("a", 10.0) for _ in range(1000)) == ANSWERS_MOST
    assert budget.take("b", 10.0)  # each its own
    assert sum(
        budget.take("a", 10.0 + number / 1000) for number in range(1, 2001)
    ) == pytest.approx(2 / ANSWER_S, abs=1)
    assert sum(budget.take("a", 1000.0) for _ in range(1000)) == pytest.approx(ANSWERS_MOST, abs=1)
