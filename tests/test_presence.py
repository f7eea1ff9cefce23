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


def proofs_of(*peers: str, persistent: bool = False) -> PeerProofs:
    return PeerProofs(peers or ("a",), ME, silent_s=SILENT_S, persistent=persistent)


def asked(proofs: PeerProofs, *, until_s: float) -> list[tuple[float, str]]:
    """Return when each peer is asked, looking only when the deadline reports so."""
    found, now = [], 0.0
    while (due := proofs.next_deadline()) < until_s:
        assert due >= now
        now = due
        proofs.silent(now)
        found += [(now, peer) for peer, _ in proofs.questions(now)]
        assert proofs.next_deadline() > now
    return found


def brought_to(proof: Proof, *, persistent: bool = False) -> PeerProofs:
    """Return the proofs of a peer that has come to this state, by session `old` where one proved
    itself.
    """
    proofs = proofs_of(persistent=persistent)
    if proof is Proof.CLAIMED:
        proofs.receive("a", "old", READY, retained=True, now=0.0)
    elif proof is not Proof.UNKNOWN:
        proofs.receive("a", "old", READY, retained=False, now=0.0)
        if proof is Proof.DOUBTED:
            proofs.reconnected(0.0)
    assert proofs.proof("a") is proof
    return proofs


def apply(proofs: PeerProofs, cause: ProofCause) -> None:
    if cause is ProofCause.LIVE:
        proofs.receive("a", "new", READY, retained=False, now=1.0)
    elif cause is ProofCause.RETAINED:
        proofs.receive("a", "new", READY, retained=True, now=1.0)
    else:
        proofs.reconnected(1.0)


@pytest.mark.parametrize(("proof", "cause"), list(itertools.product(Proof, ProofCause)))
def test_a_proof_changes_as_the_table_defines_and_in_no_other_way(
    proof: Proof, cause: ProofCause
) -> None:
    proofs = brought_to(proof)
    session = proofs.session("a")
    apply(proofs, cause)
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
    proofs = proofs_of()
    assert not proofs.receive("a", "old", Presence(state, "device"), retained=True, now=0.0)
    assert proofs.session("a") == "" and not proofs.speaks("a", "old", 0.0)


@pytest.mark.parametrize("state", NodeState)
def test_a_presence_of_a_session_that_never_proved_itself_counts_only_while_it_lives(
    state: NodeState,
) -> None:
    proofs = brought_to(Proof.PROVEN)
    living = state in (NodeState.INIT, NodeState.READY)
    assert proofs.receive("a", "new", Presence(state, "device"), retained=False, now=0.0) is living
    assert proofs.session("a") == ("new" if living else "old")
    assert proofs.receive(
        "a", proofs.session("a"), Presence(state, "device"), retained=False, now=0.0
    )


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
    proofs = proofs_of()
    proofs.receive("a", "s", READY, retained=True, now=0.0)
    ((peer, question),) = proofs.questions(0.0)
    assert (peer, question) == ("a", Question("my-session", run="run-1"))
    assert (
        not proofs.answered("a", "s", Alive("another nonce", READY)) and proofs.session("a") == ""
    )
    assert proofs.answered("a", "s", Alive(question.nonce, READY))
    assert proofs.proof("a") is Proof.PROVEN and proofs.session("a") == "s"
    assert asked(proofs, until_s=1000.0) == []


def test_a_wanted_presence_is_asked_for_although_its_owner_sends() -> None:
    proofs = proofs_of()
    proofs.receive("a", "s", READY, retained=False, now=0.0)
    proofs.want("a", 0.0)
    assert proofs.speaks("a", "s", 0.1)
    assert len(proofs.questions(ASK_FIRST_S)) == 1
    assert proofs.speaks("a", "s", 0.3)
    ((_, question),) = proofs.questions(ASK_FIRST_S + 2 * PROOF_EVERY_S)
    assert proofs.answered("a", "s", Alive(question.nonce, READY))
    assert asked(proofs, until_s=1000.0) == []


def test_a_parent_asks_a_child_of_which_it_knows_nothing_a_few_times() -> None:
    proofs = proofs_of()
    proofs.reconnected(0.0)
    times = [at for at, _ in asked(proofs, until_s=1000.0)]
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
    times = [at for at, _ in asked(proofs, until_s=1000.0)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[-1] > 990.0 and max(gaps) <= ASK_MOST_S + 1e-9 and min(gaps) >= PROOF_EVERY_S


def test_who_lived_and_does_not_answer_is_silent_once() -> None:
    proofs = proofs_of("a", "b", "c")
    for peer in ("a", "b"):
        proofs.receive(peer, "s", READY, retained=False, now=0.0)
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
    proofs, now = proofs_of("a", "b"), 0.0
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
            proofs.receive(
                peer, session, Presence(state, "device"), retained=what == "retained", now=now
            )
            if what == "live":
                proved[peer].add(session)
        assert proofs.session(peer) in proved[peer] | {""}
        earliest = min(min(known.ask_at, known.silent_at) for known in proofs._of.values())
        # a look too many costs little, one too few never comes
        assert proofs.next_deadline() <= earliest


# Our own


def own_of(session: str = "my-session") -> OwnPresence:
    return OwnPresence(Identity("run-1", "a", "device", session))


def published_own() -> OwnPresence:
    """Return a node's presence that was published, READY, and came back from the broker."""
    own = own_of()
    own.connected()
    publish(own)
    own.to_send()
    own.receive("run-1", "my-session", READY, retained=False)
    return own


def publish(own: OwnPresence, state: NodeState = NodeState.READY) -> None:
    own.set_state(state, reason="", samples=7, failure=Failure.NONE)


def test_a_presence_is_published_on_each_connection_once() -> None:
    own = own_of()
    own.connected()
    publish(own)
    assert [presence.state for presence in own.to_send()] == [
        NodeState.INIT,
        NodeState.READY,
    ] and not own.to_send()
    publish(own, NodeState.FINISHED)  # while the broker is away
    own.connected()
    (presence,) = own.to_send()
    assert presence.state is NodeState.FINISHED and presence.ledger == "my-session"


def test_the_will_of_our_own_broken_connection_is_corrected() -> None:
    own = published_own()
    own.receive("run-1", "my-session", Presence(NodeState.LOST, "device"), retained=False)
    assert [presence.state for presence in own.to_send()] == [NodeState.READY]
    own.receive("run-1", "my-session", Presence(NodeState.READY, "device"), retained=False)
    assert not own.to_send()


def test_of_two_living_nodes_of_a_name_the_second_ends() -> None:
    first, second = own_of("first"), own_of("second")
    broker: list[tuple[str, Presence]] = []
    for own, session in ((first, "first"), (second, "second")):
        own.connected()
        broker += [(session, presence) for presence in own.to_send()]
    while broker:
        session, presence = broker.pop(0)
        for own, mine in ((first, "first"), (second, "second")):
            own.receive("run-1", session, presence, retained=False)
            broker += [(mine, each) for each in own.to_send()]
    assert (first.taken, second.taken) == ("", "run-1")


@pytest.mark.parametrize("answers", ["", "another"])
@pytest.mark.parametrize("state", FINAL)
def test_an_end_that_another_publishes_under_our_name_is_corrected(
    state: NodeState, answers: str
) -> None:
    own = published_own()
    own.receive("run-1", "other", Presence(state, "device", answers=answers), retained=False)
    assert [(each.state, each.answers) for each in own.to_send()] == [
        (NodeState.READY, "other")
    ] and not own.taken


def test_what_is_left_of_an_earlier_run_is_cleared_by_whoever_holds_the_name() -> None:
    own = published_own()
    for run, state in (
        ("old-1", NodeState.LOST),
        ("old-2", NodeState.READY),
        ("run-1", NodeState.FAILED),
    ):
        own.receive(run, "earlier", Presence(state, "device"), retained=True)
    assert own.remains() == ["old-1"] and not own.remains() and not own.to_send() and not own.taken


def test_a_node_that_leaves_defends_its_name_no_more() -> None:
    own = published_own()
    own.leaving = True
    own.receive("run-1", "other", READY, retained=False)
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
