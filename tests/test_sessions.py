"""What the sessions promise: parents and children joined in memory, on a hostile line, in virtual time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from session_lab import (
    CHUNK,
    CHUNKED,
    LAB,
    LAYOUT,
    PARENT,
    RUN,
    ChildNode,
    Lab,
    Node,
    attributes,
    manifest_of,
    model_of,
    names_of,
    sizes,
    snapshot,
)

from common.accounting.child_report import ChildReport
from common.accounting.traffic import Traffic
from common.errors import WireError
from common.experiment.links import LinkSettings
from common.experiment.schema import TransferSettings
from common.experiment.tiers import Closing
from common.host.examination import Finding
from common.protocol import serialization, topics
from common.protocol.admission import (
    ANSWER_S,
    ANSWERS_MOST,
    ASKS_KEPT,
    MESSAGES_MOST,
    SEEKERS_MOST,
    MessageRefused,
    Refusal,
)
from common.protocol.child_session import FAREWELL_S, QUIET_S
from common.protocol.events import (
    BrokerAway,
    GoodbyeReceived,
    ModelFailed,
    NameTaken,
    ParentGone,
    ParentMoved,
    PeerChanged,
    ProbeReceived,
    ResultRefused,
    RunEnded,
    TargetsChanged,
    TaskReceived,
    UploadAnnounced,
    UploadRefused,
)
from common.protocol.limits import ChildLimits
from common.protocol.manifest import ModelForm
from common.protocol.messages import (
    DIGEST_BYTES,
    Acknowledgement,
    Alive,
    Announcement,
    Ask,
    Declined,
    Farewell,
    FrozenOffered,
    FrozenWanted,
    Gone,
    Goodbye,
    Here,
    Key,
    LinkBytes,
    Message,
    NodeState,
    Phase,
    Preparing,
    Presence,
    Probe,
    Probed,
    Progress,
    Reports,
    Result,
    RollCall,
    Status,
    StatusRequest,
    Task,
    WhoIsThere,
)
from common.protocol.outbox import Publish, Subscribe
from common.protocol.participant import ParticipantState
from common.protocol.presence import ASK_MOST_S, ASK_S, Proof
from common.protocol.round_state import Closed, Stalled

IDLE_S = CHUNKED.idle_s
READY = Presence(NodeState.READY, "device", samples=10)
BLOB = manifest_of(b"x" * 3000)


def inject(node: Node, sender: str, session: str, message: Message, *, run: str = RUN) -> None:
    """Hand a node a message from an inbox, whoever wrote it."""
    topic = topics.inbox(LAB, run, node.name, sender)
    node.session.receive(topic, serialization.encode(message, session), retained=False, now=node.lab.now)
    node.wake()


def messages_of(key: Key, blob: str) -> list[Message]:
    """Return one message of each kind, about this round and blob."""
    result = Result(key, replace(BLOB, blob=blob), None, 10, 0.5, 1, 6, 6, 1.0, 0.0, 0.0, (), "")
    return [
        READY,
        Announcement("{}", LAYOUT),
        Task(key, 1, replace(BLOB, blob=blob), None),
        Progress(key, Phase.TRAINING, 99, 100, Traffic(), ()),
        result,
        Acknowledgement(key, ""),
        Acknowledgement(key, "refused"),
        Ask(blob, b"\xff", 0, 0, 8, True),
        Gone(blob),
        Reports((ChildReport("x"),)),
        Farewell(Traffic(), ()),
        Probe(BLOB),
        Probed(blob, 1e6, BLOB),
        WhoIsThere("nonce", RUN),
        Alive("nonce", READY),
        Preparing(7, ""),
        FrozenWanted("0" * 16),
        FrozenOffered(BLOB),
        Declined(key, "no"),
        Goodbye(),
        RollCall("nonce"),
        Here(
            "nonce",
            "device",
            "cloud",
            RUN,
            "1.0",
            "host",
            "1 x cpu",
            "mnist",
            "0123456789ab",
            1.5e9,
            (Finding("memory", True, True, "1 GB"),),
        ),
        StatusRequest(RUN),
        Status(1.0, key, True, False, (LinkBytes(1, 2),), (), ()),
    ]


def test_the_messages_of_this_test_are_all_there_are() -> None:
    assert {type(message) for message in messages_of(Key(0, 0, 0), BLOB.blob)} == set(serialization.KINDS)


def changed(before: object, after: object, path: str = "") -> Iterator[str]:
    """Yield where two snapshots differ."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        for name in before:
            yield from changed(before[name], after[name], f"{path}.{name}")
    elif before != after:
        yield path


def is_offering(child: ChildNode) -> bool:
    return child.session.participant.state is ParticipantState.ANNOUNCING


# Who is not known changes nothing


@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), moment=st.floats(0.0, 6.0), loss=st.sampled_from([0.0, 0.2]))
def test_a_message_of_an_unknown_session_changes_nothing(seed: int, moment: float, loss: float) -> None:
    lab = Lab(names_of(2), seed=seed, loss=loss, jitter_s=0.1, train_s=2.0)
    lab.rest(1.0)
    key = lab.open()
    lab.rest(moment)
    for node, sender in ((lab.parent, "device-0"), (lab.children["device-0"], PARENT)):
        blobs = [*node.session.link.sender._blobs, *(blob for _, blob in node.session.link.receiver.wanted()), "0" * 16]
        for blob, each in itertools.product(blobs, messages_of(key, BLOB.blob)):
            if isinstance(each, WhoIsThere):
                continue  # anybody may ask
            message = replace(each, blob=blob) if isinstance(each, (Ask, Gone)) else each
            before, refused = snapshot(node.session), node.session.link.refusals.total
            inject(node, sender, "unknown", message)
            assert node.session.link.refusals.total == refused + 1
            places = set(changed(before, snapshot(node.session)))
            assert places <= {
                ".link.refusals._counts", ".link.events", ".link.proofs._of", ".link.proofs._look_at",
                    ".link.admission._messages._full_at",
            }  # fmt: skip
            assert node.session.link.proofs.session(sender) != "unknown"
    closed = lab.play(until_s=3000.0)
    assert isinstance(closed, Closed) and set(closed.results) == set(lab.names)
    lab.check()


@pytest.mark.parametrize(("count", "seconds"), [(10_000, 0.0), (2000, 10.0)])
def test_an_unknown_session_is_answered_by_few_questions(count: int, seconds: float) -> None:
    lab = Lab(names_of(2))
    lab.rest(1.0)
    lab.open()
    lab.rest(0.5)
    before = lab.kinds["WhoIsThere"]
    for number in range(count):
        at = seconds * number / count
        message = Progress(Key(0, 0, 0), Phase.TRAINING, number, 9, Traffic(), ())
        lab.loop.after(at, lambda message=message: inject(lab.parent, "device-0", "unknown", message))  # type: ignore[misc]
    closed = lab.play()
    lab.rest(seconds)
    assert isinstance(closed, Closed) and set(closed.results) == set(lab.names)
    assert lab.kinds["WhoIsThere"] - before <= 1 + seconds / ASK_S
    refusals = lab.parent.session.link.refusals
    assert refusals.of(Refusal.SESSION) + refusals.of(Refusal.FLOOD) == count
    assert refusals.of(Refusal.SESSION) >= min(count, MESSAGES_MOST)
    assert len(lab.parent.of(MessageRefused)) <= 2 * 14  # of each reason at 1, 2, 4, 8 ...


def test_a_lost_presence_leaves_nobody_deaf() -> None:
    lab = Lab(names_of(3))
    lab.rest(1.0)
    lab.broker.drop = lambda topic: topic.endswith("/state")
    lab.kill("device-0", will_after_s=None)
    lab.start("device-0")
    lab.restart_parent(will_after_s=None)
    lab.loop.after(5.0, lambda: setattr(lab.broker, "drop", lambda topic: False))
    assert set(lab.round().results) == set(lab.names)
    lab.check()


def test_a_child_whose_first_messages_are_all_lost_is_found_by_its_questions() -> None:
    """Its presences are lost, and its answers to the few questions of a parent that does not know it."""
    lab = Lab(names_of(1), start=False)
    lab.broker.drop = lambda topic: topic.endswith(("/device-0/state", f"/{PARENT}/inbox/device-0"))
    lab.rest(1.0)
    lab.start("device-0")
    lab.rest(20.0)
    assert lab.parent.session.readiness(lab.now).missing == {"device-0": "has not joined yet"}
    lab.broker.drop = lambda topic: topic.endswith("/device-0/state")
    lab.until(lambda: bool(lab.parent.session.readiness(lab.now).ready), within_s=QUIET_S + ASK_MOST_S + 1.0)
    assert set(lab.round().results) == {"device-0"}


@pytest.mark.parametrize("idle", [True, False])
def test_a_child_that_came_back_while_its_presence_was_lost_is_asked_for_it(idle: bool) -> None:
    """The broker restarted: it sent the child's will, and lost the presence with which the child came back."""
    lab = Lab(names_of(1))
    lab.rest(1.0)
    if not idle:
        lab.open()
        lab.rest(0.1)
    identity = lab.children["device-0"].session.link.identity
    will = serialization.encode(Presence(NodeState.LOST, "device", reason="connection lost"), identity.session)
    lab.broker.drop = lambda topic: topic.endswith("/device-0/state")
    lab.parent.session.receive(topics.state(LAB, RUN, "device-0"), will, retained=False, now=lab.now)
    assert not lab.parent.session.present()
    within_s = QUIET_S + ASK_MOST_S + 1.0 if idle else 3.0
    lab.until(lambda: lab.parent.session.present() == ["device-0"], within_s=within_s)
    assert set((lab.round() if idle else lab.play()).results) == {"device-0"}


@pytest.mark.parametrize("what", ["presence", "answer"])
def test_a_child_whose_presence_a_stranger_cleared_is_asked_for_it(what: str) -> None:
    """The child publishes it again, but that is lost, and the child has nothing else to send."""
    lab = Lab(names_of(1))
    lab.rest(1.0)
    dropped = "/device-0/state" if what == "presence" else "/device-0"  # with the answers to questions, too
    lab.broker.drop = lambda topic: topic.endswith(dropped)
    lab.parent.session.receive(topics.state(LAB, RUN, "device-0"), b"", retained=False, now=lab.now)
    assert not lab.parent.session.present()
    if what == "presence":
        lab.until(lambda: lab.parent.session.present() == ["device-0"], within_s=3.0)
    else:
        lab.rest(20.0)
        lab.broker.drop = lambda topic: topic.endswith("/device-0/state")
        lab.until(lambda: lab.parent.session.present() == ["device-0"], within_s=QUIET_S + ASK_MOST_S)
    assert set(lab.round().results) == {"device-0"}


def test_a_child_whose_only_presence_was_refused_is_asked_for_another_one() -> None:
    lab = Lab(names_of(1), start=False)
    session = lab.parent.session
    session._limits["device-0"] = ChildLimits(samples=20)
    lab.broker.drop = lambda topic: topic.endswith("/device-0/state")
    lab.start("device-0")
    wrong = Presence(NodeState.READY, "device", samples=21)
    body = serialization.encode(wrong, lab.children["device-0"].session.link.identity.session)
    session.receive(topics.state(LAB, RUN, "device-0"), body, retained=False, now=lab.now)
    assert "device-0" not in session.samples
    lab.until(lambda: bool(session.readiness(lab.now).ready), within_s=QUIET_S + ASK_MOST_S + 1.0)


def test_a_strangers_presence_changes_no_count_of_samples() -> None:
    lab = Lab(names_of(2))
    lab.rest(1.0)
    session = lab.parent.session
    assert session.samples == {"device-0": 10, "device-1": 10}
    presence = serialization.encode(Presence(NodeState.READY, "device", samples=7), "stranger")
    session.receive(topics.state(LAB, RUN, "device-0"), presence, retained=False, now=lab.now)
    assert session.samples["device-0"] == 10
    lab.rest(1.0)
    assert session.samples["device-0"] == 10


def test_the_first_count_of_samples_is_not_a_strangers() -> None:
    """A node whose parent counts a stranger's samples would tell its own parent a wrong sum."""
    lab = Lab(names_of(1), start=False)
    lab.rest(1.0)
    session = lab.parent.session
    presence = serialization.encode(Presence(NodeState.READY, "device", samples=7), "stranger")
    session.receive(topics.state(LAB, RUN, "device-0"), presence, retained=False, now=lab.now)
    lab.rest(1.0)
    assert session.samples == {}
    lab.start("device-0")
    lab.rest(1.0)
    assert session.samples == {"device-0": 10}


# The remains of the dead


def leave_remains(lab: Lab, name: str, state: NodeState = NodeState.READY, *, session: str = "dead") -> None:
    presence = Presence(state, "device", samples=99, reason="of another time")
    lab.broker.retained[topics.state(LAB, RUN, name)] = serialization.encode(presence, session)


def test_a_retained_ready_of_a_dead_parent_captures_no_child() -> None:
    lab = Lab(names_of(1), start=False)
    lab.stop_parent(will_after_s=None)
    leave_remains(lab, PARENT)
    child = lab.start("device-0")
    lab.rest(IDLE_S - 1.0)
    assert child.session.link.proofs.proof(PARENT) is Proof.CLAIMED and not child.of(ParentGone)
    assert not child.session.link._known - {PARENT} and not child.session._ledger
    lab.rest(2.0)
    assert child.of(ParentGone) == [ParentGone()]
    assert lab.kinds["WhoIsThere"] >= IDLE_S / 5.0


def test_a_retained_ready_of_a_dead_child_captures_no_parent() -> None:
    lab = Lab(names_of(2), start=False)
    lab.stop_parent(will_after_s=None)
    leave_remains(lab, "device-0")
    lab.restart_parent()
    lab.start("device-1")
    lab.rest(2.0)
    session = lab.parent.session
    assert session.present() == ["device-1"] and session.samples == {"device-1": 10}
    readiness = session.readiness(lab.now)
    assert readiness.ready == {"device-1"} and readiness.missing == {"device-0": "has not joined yet"}
    assert not readiness.failed and not readiness.hanging
    lab.open()
    lab.rest(5.0)
    assert not [name for (sender, name, _), _ in lab.messages.items() if name == "device-0" and sender != PARENT]
    assert lab.kinds["Task"] == 1  # none for the dead
    lab.start("device-0")
    closed = lab.play()
    assert isinstance(closed, Closed) and set(closed.results) == set(lab.names)


@pytest.mark.parametrize("state", [NodeState.FAILED, NodeState.LOST, NodeState.DISCONNECTED, NodeState.FINISHED])
def test_a_retained_end_of_a_dead_child_reports_nothing_of_its_successor(state: NodeState) -> None:
    lab = Lab(names_of(1))
    lab.rest(1.0)
    leave_remains(lab, "device-0", state)
    lab.restart_broker(down_s=1.0)
    assert set(lab.round().results) == {"device-0"}


def test_a_run_that_ended_while_a_child_was_away_ends_it() -> None:
    lab = Lab(names_of(1), start=False)
    lab.parent.set_state(NodeState.FINISHED)
    lab.rest(1.0)
    lab.stop_parent(will_after_s=None)
    child = lab.start("device-0")
    lab.rest(1.0)
    assert child.of(RunEnded) == [RunEnded(NodeState.FINISHED, "")]


def test_a_run_that_ended_under_a_new_parent_while_a_child_was_away_ends_it() -> None:
    lab = Lab(names_of(1))
    lab.rest(1.0)
    child = lab.children["device-0"]
    child.disconnect(will_after_s=0.0)
    lab.restart_parent()
    lab.rest(1.0)
    lab.parent.set_state(NodeState.FINISHED)
    lab.rest(1.0)
    lab.stop_parent(will_after_s=None)
    child.connect()
    lab.rest(IDLE_S)
    assert child.of(RunEnded) == [RunEnded(NodeState.FINISHED, "")] and not child.of(ParentGone)


@pytest.mark.parametrize("store", ["before the restart", "of a run that was resumed"])
def test_an_old_store_ends_nobody_whose_parent_lives(store: str) -> None:
    """A broker that comes back old may hold the end of an earlier process of this run."""
    lab = Lab(names_of(2))
    lab.rest(1.0)
    lab.round()
    if store == "of a run that was resumed":
        lab.parent.set_state(NodeState.FINISHED)
        lab.rest(0.001)
        for child in lab.children.values():
            child.alive = False  # they end, and new ones come
    lab.rest(1.0)
    old = dict(lab.broker.retained)
    lab.restart_parent(will_after_s=None)
    lab.rest(0.1)
    for name in lab.names:
        lab.kill(name)
        lab.start(name, parent_session=lab.parent.session.link.identity.session)
    lab.rest(1.0)
    lab.open(local_round=1)
    lab.rest(1.0)
    lab.restart_broker(down_s=1.0, retained=old)
    closed = lab.play()
    assert isinstance(closed, Closed) and set(closed.results) == set(lab.names)
    for child in lab.children.values():
        assert child.of(RunEnded) == [] and len(child.trained) == 1
    lab.check()


@pytest.mark.parametrize("store", ["empty", "kept"])
@pytest.mark.parametrize("state", [s for s in ParticipantState if s is not ParticipantState.IDLE])
def test_a_broker_that_restarts_costs_no_training(state: ParticipantState, store: str) -> None:
    lab = Lab(names_of(2))
    lab.rest(1.0)
    lab.open()
    child = lab.children["device-0"]
    lab.children["device-1"].train_s = 20.0  # the round is open when one is DONE
    lab.until(lambda: child.session.participant.state is state)
    lab.restart_broker(down_s=1.0, retained={} if store == "empty" else None)
    closed = lab.play()
    assert isinstance(closed, Closed) and set(closed.results) == set(lab.names)
    assert all(len(each.trained) == 1 for each in lab.children.values())
    lab.check()


def test_who_died_while_the_broker_was_away_is_found_out() -> None:
    lab = Lab(names_of(3))
    lab.rest(1.0)
    lab.restart_broker(down_s=1.0)  # it crashed: no will is sent, and the store has everybody READY
    lab.kill("device-0", will_after_s=None)
    lab.rest(50.0)
    assert lab.parent.session.present() == ["device-1", "device-2"]
    (lost,) = [event for event in lab.parent.of(PeerChanged) if event.state == "lost"]
    assert lost.child == "device-0" and "no reply" in lost.reason
    begun = lab.now
    closed = lab.round(closing=Closing(rule="quorum", quorum=2, deadline_s=300.0))
    assert closed.missing == ("device-0",) and lab.now - begun < 10.0


# A task that does not fit


def test_a_task_that_does_not_fit_changes_nothing_at_the_child() -> None:
    lab = Lab(names_of(1))
    lab.rest(1.0)
    lab.round()
    child = lab.children["device-0"]
    lab.rest(1.0)
    manifest = manifest_of(model_of(5))
    lies = [replace(manifest, layout="other"), replace(manifest, codec="zip"), manifest_of(model_of(5, 9000))]
    for number, lie in enumerate(lies):
        before = snapshot(child.session)
        task = Task(Key(0, 1, number), 1, lie, None)
        topic = topics.inbox(LAB, RUN, "device-0", PARENT)
        body = serialization.encode(task, lab.parent.session.link.identity.session)
        child.session.receive(topic, body, retained=False, now=lab.now)
        places = set(changed(before, snapshot(child.session)))
        assert places <= {
            ".link.refusals._counts", ".link.events", "._declined", ".link.counters.cells", ".link.counters.sums",
            ".link.receiver._last_arrival", ".link.receiver._arrived", ".link.receiver._carried", "._quiet_at",
            ".link.admission._messages._full_at", ".link.answers._full_at",
        }  # fmt: skip
        child.wake()
        lab.rest(0.1)
        assert lab.kinds["Declined"] == number + 1
    assert not child.of(ModelFailed) and len(child.of(TaskReceived)) == 1
    assert child.session.participant.state is ParticipantState.DONE
    assert child.session.link.refusals.of(Refusal.MISFIT) == len(lies)


def test_a_round_whose_task_fits_nobody_stalls_with_the_reason() -> None:
    lab = Lab(names_of(2))
    lab.rest(1.0)
    for child in lab.children.values():
        child.session.set_form(ModelForm("their own layout", "fp32", 5000, exact=True, delta=False))
    begun = lab.now
    lab.open()
    stalled = lab.play()
    assert isinstance(stalled, Stalled) and lab.now - begun <= IDLE_S + 1.0
    declined = "made no progress for 60 s (its state is ready; it declined its task: wrong"
    assert f"device-0 and device-1 {declined}" in stalled.reason
    assert lab.kinds["Task"] == lab.kinds["Declined"] <= 2 * 16
    assert not any(child.of(TaskReceived) for child in lab.children.values())


def test_a_child_that_does_not_know_its_form_yet_takes_its_task() -> None:
    lab = Lab(names_of(1), start=False)
    lab.start("device-0", ready_s=None)
    assert set(lab.round().results) == {"device-0"}


# Floods


def flood(lab: Lab, sender: str, messages: Iterable[Message], *, seconds: float) -> None:
    """Let the parent get these messages of a child's own session, evenly over so long."""
    session, several = lab.children[sender].session.link.identity.session, list(messages)
    for number, message in enumerate(several):
        at = seconds * number / len(several)
        lab.loop.after(at, lambda message=message: inject(lab.parent, sender, session, message))  # type: ignore[misc]


def sent_to(lab: Lab, name: str) -> int:
    return sum(count for (sender, receiver, _), count in lab.messages.items() if (sender, receiver) == (PARENT, name))


FLOODS: dict[str, Callable[[random.Random], Message]] = {
    "who is there": lambda draw: WhoIsThere(f"{draw.getrandbits(64):x}", RUN),
    "asks for anything": lambda draw: Ask(f"{draw.getrandbits(64):016x}", b"\xff", 0, 0, 64, True),
    "asks for what never was": lambda draw: Ask("0" * 16, b"\xff", draw.getrandbits(60), 0, 64, False),
    "farewells": lambda draw: Farewell(Traffic(), ()),
    "answers": lambda draw: Alive("cloud/0", replace(READY, samples=draw.randrange(1, 9))),
    "preparing": lambda draw: Preparing(draw.randrange(9), ""),
    "declined": lambda draw: Declined(Key(0, 0, 0), "no"),
    "goodbyes": lambda draw: Goodbye(),
    "late results": lambda draw: Result(
        Key(0, 0, 0), BLOB, None, 1, 0.1, 1, 1, 1, 1.0, 0.0, 0.0, (), "", Traffic(), ()
    ),
}


def check_flood(lab: Lab, messages: Iterable[Message], *, seconds: float) -> None:
    """Check that a flood costs few answers, no chunk, and the other children nothing."""
    lab.rest(1.0)
    lab.round()  # with the key of the late results
    before, chunks = sent_to(lab, "device-0"), lab.parent.session.link.sender.chunks_published
    flood(lab, "device-0", messages, seconds=seconds)
    begun = lab.now
    closed = lab.round(["device-1", "device-2"], local_round=1)
    assert set(closed.results) == {"device-1", "device-2"} and lab.now - begun < 5.0
    lab.rest(1.0)
    assert sent_to(lab, "device-0") - before <= ANSWERS_MOST + 2 + seconds / ANSWER_S
    assert lab.parent.session.link.sender.chunks_published - chunks == manifest_of(model_of(1)).chunks


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_costs_few_answers_and_leaves_the_others_alone(kind: str) -> None:
    draw = random.Random(0)
    check_flood(Lab(names_of(3)), (FLOODS[kind](draw) for _ in range(1000)), seconds=2.0)


@pytest.mark.parametrize("kind", ["who is there", "asks for anything", "farewells", "late results"])
def test_ten_thousand_messages_at_once_cost_few_answers(kind: str) -> None:
    draw = random.Random(0)
    check_flood(Lab(names_of(3)), (FLOODS[kind](draw) for _ in range(10_000)), seconds=0.0)


@pytest.mark.parametrize("lies", [True, False])
def test_a_flood_of_asks_for_a_model_costs_few_chunks_of_it(lies: bool) -> None:
    """By restarts, or by asks that pretend to have seen whatever was published, and to lack it."""
    lab = Lab(names_of(3))
    lab.rest(1.0)
    blob, draw = manifest_of(model_of(0)), random.Random(0)

    def ask() -> Ask:
        seen = (draw.getrandbits(40), draw.getrandbits(40)) if lies else (0, 0)
        return Ask(blob.blob, b"\xfc", *seen, 64, not lies)

    flood(lab, "device-0", (ask() for _ in range(3000)), seconds=3.0)
    begun = lab.now
    closed = lab.round(closing=Closing(rule="quorum", quorum=2, deadline_s=4.0))
    assert set(closed.results) >= {"device-1", "device-2"} and lab.now - begun < 5.0
    assert lab.parent.session.link.sender.chunks_published <= blob.chunks * 4 + 64 * (4 if lies else 0)


def test_an_answer_to_a_seeker_waits_until_the_last_has_left() -> None:
    """An experiment of 20 kB takes 20 s at 8 kbit/s; meanwhile the child asks every other second."""
    lab = Lab(names_of(1), link=LinkSettings(up_mbit=1.0, down_mbit=0.008), start=False)
    lab.parent.session.link.announce(Announcement("e" * 20_000, LAYOUT))
    lab.rest(1.0)
    body = serialization.encode(WhoIsThere("n"), "n")
    for number in range(30):
        lab.loop.after(
            number,
            lambda: (
                lab.parent.session.receive(topics.seek(LAB, PARENT, "device-0"), body, retained=False, now=lab.now),
                lab.parent.wake(),
            ),
        )
    lab.rest(35.0)
    assert lab.kinds["Alive"] == 1 and len(lab.parent.session.link.outbox._waiting) <= 1


def test_a_seeker_that_asks_twice_at_once_is_answered_a_second_time_soon() -> None:
    """By the timer of the answer alone: nothing else happens meanwhile."""
    lab = Lab(names_of(1), start=False)
    lab.parent.session.link.announce(Announcement("{}", LAYOUT))
    lab.rest(60.0)
    before = lab.kinds["Alive"]
    body = serialization.encode(WhoIsThere("n"), "n")
    for _ in range(2):
        lab.parent.session.receive(topics.seek(LAB, PARENT, "device-0"), body, retained=False, now=lab.now)
        lab.parent.wake()
        lab.rest(0.01)
    assert lab.kinds["Alive"] == before + 1
    assert lab.parent.session.next_deadline(lab.now) == pytest.approx(lab.now + ANSWER_S, abs=0.02)
    lab.rest(ANSWER_S)
    assert lab.kinds["Alive"] == before + 2


def test_a_child_that_clears_its_presence_has_left() -> None:
    lab = Lab(names_of(2))
    lab.rest(1.0)
    assert lab.parent.session.present() == names_of(2)
    child = lab.children["device-0"]
    child.session.set_state(NodeState.FINISHED)
    lab.rest(0.1)
    child.session.link.own.leaving = True
    for output in child.session.link.leave(keep_state=False):
        child._perform(output)
    lab.rest(1.0)
    assert [event.state for event in lab.parent.of(PeerChanged) if event.child == "device-0"][-1] == "left"
    assert lab.parent.session.present() == ["device-1"]
    assert lab.parent.session.readiness(lab.now).missing == {"device-0": "was lost, or left"}


def test_seekers_of_any_name_are_answered_in_bounds() -> None:
    lab = Lab(names_of(2))
    lab.parent.session.link.announce(Announcement("{}", LAYOUT))
    lab.rest(1.0)
    body = serialization.encode(WhoIsThere("n"), "n")
    before = lab.kinds["Alive"]
    for number in range(10_000):
        topic = topics.seek(LAB, PARENT, f"anybody-{number}")
        lab.parent.session.receive(topic, body, retained=False, now=lab.now)
    assert len(lab.parent.session.link._questions._questions) <= SEEKERS_MOST + 2
    assert lab.parent.session.link.refusals.of(Refusal.FLOOD) >= 10_000 - SEEKERS_MOST
    lab.parent.wake()
    assert set(lab.round().results) == set(lab.names)
    assert lab.kinds["Alive"] - before <= SEEKERS_MOST


# Slots


def silence_chunks(lab: Lab, *owners: str) -> None:
    lost = tuple(f"fs1/{LAB}/{RUN}/{owner}/blob/" for owner in owners)
    lab.broker.drop = lambda topic: topic.startswith(lost)


@pytest.mark.parametrize("slots", [1, 4])
def test_children_that_offer_and_never_serve_stop_nobody(slots: int) -> None:
    transfer = TransferSettings(inline_bytes=0, idle_s=120.0, upload_slots=slots)
    lab = Lab(names_of(24 if slots == 1 else 44), transfer=transfer, train_s=1.0)
    lab.rest(1.0)
    silent = names_of(slots)
    for name in lab.names[slots:]:
        lab.children[name].train_s = 2.0  # the silent ones are first
    silence_chunks(lab, *silent)
    begun = lab.now
    others = len(lab.names) - slots
    closed = lab.round(closing=Closing(rule="quorum", quorum=others, deadline_s=5.0))
    assert closed.missing == tuple(silent) and len(closed.results) == others
    assert lab.now - begun < 30.0


@pytest.mark.parametrize("owner", [PARENT, "device-0"])
def test_chunks_that_never_arrive_end_the_round_in_time(owner: str) -> None:
    lab = Lab(names_of(2))
    lab.rest(1.0)
    silence_chunks(lab, owner)
    begun = lab.now
    lab.open()
    stalled = lab.play()
    assert isinstance(stalled, Stalled) and stalled.idle and lab.now - begun <= 2 * IDLE_S
    assert stalled.reason.startswith("device-0 ") and "made no progress" in stalled.reason
    assert ("device-1" in stalled.reason) is (owner == PARENT)


def test_chunks_that_are_only_repeated_end_the_round_in_time() -> None:
    """A child that publishes one chunk of its model again and again brings nothing."""
    lab = Lab(names_of(1))
    lab.rest(1.0)
    lab.broker.drop = lambda topic: "/device-0/blob/" in topic and topic.split("/")[7] != "3"
    begun = lab.now
    lab.open()
    stalled = lab.play()
    assert isinstance(stalled, Stalled) and lab.now - begun <= 2 * IDLE_S


def test_nobody_is_given_up_while_chunks_arrive() -> None:
    """A model of 6 chunks at one in 40 s or more, with 120 s of patience."""
    lab = Lab(names_of(1), transfer=TransferSettings(inline_bytes=0, idle_s=120.0))
    lab.rest(1.0)
    begun = last = lab.now

    def drop(topic: str) -> bool:
        nonlocal last
        if "/blob/" not in topic:
            return False
        if lab.now >= last + 40.0:
            last = lab.now
            return False
        return True

    lab.broker.drop = drop
    assert set(lab.round(until_s=3000.0).results) == {"device-0"} and lab.now - begun > 12 * 40.0


# Progress


def test_a_child_that_hangs_while_it_prepares_is_reported() -> None:
    lab = Lab(names_of(3), start=False)
    hangs, works = lab.start("device-0", ready_s=None), lab.start("device-1", ready_s=None)
    waits = lab.start("device-2", ready_s=None)

    def go_on() -> None:
        hangs.session.preparing(7, now=lab.now)
        works.session.preparing(int(lab.now), now=lab.now)
        waits.session.preparing(1, waits_for="device-9 has not joined yet", now=lab.now)
        for child in (hangs, works, waits):
            child.wake()
        lab.loop.after(5.0, go_on)

    go_on()
    lab.rest(IDLE_S - 1.0)
    assert not lab.parent.session.readiness(lab.now).hanging
    lab.rest(10.0)
    readiness = lab.parent.session.readiness(lab.now)
    assert readiness.hanging == {"device-0"} and not readiness.ready and not readiness.failed
    assert readiness.missing == {
        "device-0": "no progress in preparing for 60 s",
        "device-1": "prepares",
        "device-2": "waits for device-9 has not joined yet",
    }
    for child in (hangs, works, waits):
        lab._ready(child)
    lab.rest(1.0)
    assert lab.parent.session.readiness(lab.now).ready == set(lab.names)


def test_preparing_is_reported_in_measure_and_ends_with_it() -> None:
    lab = Lab(names_of(1), start=False)
    child = lab.start("device-0", ready_s=None)
    for number in range(1000):
        lab.loop.after(number / 100, lambda number=number: (child.session.preparing(number, now=lab.now), child.wake()))  # type: ignore[misc]
    lab.rest(10.0)
    assert 4 <= lab.kinds["Preparing"] <= 8
    lab._ready(child)
    lab.rest(0.1)
    before = lab.kinds["Preparing"]
    lab.rest(10.0)
    assert lab.kinds["Preparing"] == before


def test_a_child_that_gave_up_is_named_with_its_reason() -> None:
    lab = Lab(names_of(2))
    lab.rest(1.0)
    lab.children["device-0"].set_state(NodeState.FAILED, reason="no data")
    lab.rest(1.0)
    readiness = lab.parent.session.readiness(lab.now)
    assert readiness.failed == {"device-0"} and readiness.missing == {"device-0": "gave up: no data"}
    lab.open()
    stalled = lab.play()
    assert isinstance(stalled, Stalled) and stalled.reason == "device-0 gave up: no data"


@pytest.mark.parametrize("away_s", [30.0, 100.0])
def test_a_broker_that_is_away_is_no_childs_fault(away_s: float) -> None:
    lab = Lab(names_of(2), train_s=10.0)
    lab.rest(1.0)
    lab.open()
    lab.rest(2.0)
    lab.restart_broker(down_s=away_s)
    closed = lab.play()
    assert isinstance(closed, Closed) and set(closed.results) == set(lab.names)
    longer = away_s > IDLE_S
    for node in lab.nodes():
        assert bool(node.of(BrokerAway)) is longer
        assert not node.of(ParentGone)


def test_a_broker_that_came_back_is_not_away_because_nobody_sends() -> None:
    """The parent ended while the broker was away, and the message that said so is lost."""
    lab = Lab(names_of(1))
    lab.rest(1.0)
    lab.stop_parent(will_after_s=None)
    lab.restart_broker(down_s=2.0, retained={})
    lab.broker.drop = lambda topic: topic.endswith("/state")
    lab.rest(3.0 + IDLE_S + ASK_MOST_S)
    (child,) = lab.nodes()
    assert not child.of(BrokerAway) and child.of(ParentGone) == [ParentGone()]


# Restarts


@pytest.mark.parametrize("state", ParticipantState)
def test_a_parent_that_restarts_costs_no_training(state: ParticipantState) -> None:
    lab = Lab(names_of(2))
    lab.rest(1.0)
    child = lab.children["device-0"]
    if state is not ParticipantState.IDLE:
        lab.open()
        lab.children["device-1"].train_s = 20.0
    lab.until(lambda: child.session.participant.state is state)
    lab.restart_parent()
    if state is ParticipantState.IDLE:
        lab.open()
    closed = lab.play()
    assert isinstance(closed, Closed) and set(closed.results) == set(lab.names)
    assert [len(each.trained) for each in lab.children.values()] == [1, 1]
    lab.check()


@pytest.mark.parametrize("will_after_s", [None, 0.0, 5.0])
@pytest.mark.parametrize("state", ParticipantState)
def test_a_child_that_restarts_begins_again(state: ParticipantState, will_after_s: float | None) -> None:
    lab = Lab(names_of(2))
    lab.rest(1.0)
    child = lab.children["device-0"]
    if state is not ParticipantState.IDLE:
        lab.open()
        lab.children["device-1"].train_s = 20.0
    lab.until(lambda: child.session.participant.state is state)
    lab.kill("device-0", will_after_s=will_after_s)
    lab.start("device-0")
    if state is ParticipantState.IDLE:
        lab.open()
    closed = lab.play()
    assert isinstance(closed, Closed) and set(closed.results) == set(lab.names)
    assert len(lab.children["device-0"].trained) == (state is not ParticipantState.DONE)
    assert len(lab.children["device-1"].trained) == 1
    lab.check()


@pytest.mark.parametrize("who", ["parent", "child"])
def test_a_process_that_dies_again_and_again_is_followed(who: str) -> None:
    lab = Lab(names_of(2))
    lab.rest(1.0)
    lab.open()
    for number in range(20):
        at = 0.37 * number
        if who == "parent":
            lab.loop.after(at, lambda: lab.restart_parent(will_after_s=3.0))
        else:
            lab.loop.after(at, lambda: (lab.kill("device-0", will_after_s=3.0), lab.start("device-0")))
    closed = lab.play()
    assert isinstance(closed, Closed) and set(closed.results) == set(lab.names)
    lab.check()


def test_a_result_that_its_child_no_longer_holds_is_asked_for_again() -> None:
    lab = Lab(names_of(1))
    lab.rest(1.0)
    lab.open()
    child = lab.children["device-0"]
    lab.until(lambda: bool(lab.parent.of(UploadAnnounced)))
    child.session.link.retire(child._answer_blob)
    child.session.participant._result = None  # as after a row that was written again
    closed = lab.play()
    assert isinstance(closed, Closed) and lab.kinds["Gone"] and len(lab.parent.of(UploadAnnounced)) == 2


def test_a_result_that_is_refused_is_reported_to_its_child_and_the_round_goes_on() -> None:
    lab = Lab(names_of(2))
    lab.bad = {"device-0"}
    closed = lab.round()
    assert closed.refused == {"device-0": "holds NaN"} and set(closed.results) == {"device-1"}
    assert lab.parent.of(UploadRefused) == [UploadRefused("device-0", "holds NaN")]
    lab.rest(0.1)
    assert lab.children["device-0"].of(ResultRefused) == [ResultRefused("holds NaN")]


def test_a_second_process_of_a_living_name_ends() -> None:
    lab = Lab(names_of(1))
    lab.rest(1.0)
    first = lab.children["device-0"]
    second = lab.start("device-0")
    lab.rest(1.0)
    assert second.of(NameTaken) and not first.of(NameTaken)
    second.disconnect(will_after_s=0.0)
    second.alive = False
    assert set(lab.round().results) == {"device-0"} and len(first.trained) == 1


# The parent elsewhere


def gone_parent() -> tuple[Lab, ChildNode]:
    lab = Lab(names_of(1))
    lab.rest(1.0)
    lab.stop_parent(will_after_s=0.0)
    lab.rest(1.0)
    return lab, lab.children["device-0"]


def alive(child: ChildNode, *, nonce: str = "", announced: bool = True) -> Alive:
    announcement = Announcement("{}", LAYOUT) if announced else None
    return Alive(nonce or child.session.link.identity.session, Presence(NodeState.READY, "cloud"), announcement)


def test_a_parent_that_went_on_to_another_run_is_followed_once() -> None:
    lab, child = gone_parent()
    for _ in range(3):
        inject(child, PARENT, "elsewhere", alive(child), run="run-2")
        lab.rest(0.1)
    assert child.of(ParentMoved) == [ParentMoved("run-2", "elsewhere", Announcement("{}", LAYOUT))]
    lab.rest(2 * IDLE_S)
    assert not child.of(ParentGone)


def test_only_an_answer_to_its_own_question_moves_a_child() -> None:
    lab, child = gone_parent()
    inject(child, PARENT, "elsewhere", alive(child, nonce="of another"), run="run-2")
    inject(child, PARENT, "elsewhere", alive(child, announced=False), run="run-2")
    inject(child, PARENT, "elsewhere", Task(Key(0, 0, 0), 1, BLOB, None), run="run-2")
    inject(child, "stranger", "elsewhere", alive(child), run="run-2")
    lab.rest(1.0)
    assert not child.of(ParentMoved) and not child.of(TaskReceived) and child.session.link.refusals.total == 3


def test_a_child_whose_parent_is_there_goes_nowhere() -> None:
    lab = Lab(names_of(1))
    lab.rest(1.0)
    child = lab.children["device-0"]
    inject(child, PARENT, "elsewhere", alive(child), run="run-2")
    lab.rest(1.0)
    assert not child.of(ParentMoved) and set(lab.round().results) == {"device-0"}


def test_a_parent_that_never_comes_back_is_gone_after_idle_s() -> None:
    lab, child = gone_parent()
    lab.rest(IDLE_S - 2.0)
    assert not child.of(ParentGone)
    lab.rest(2.0)
    assert child.of(ParentGone) == [ParentGone()]
    lab.rest(3 * IDLE_S)
    assert child.of(ParentGone) == [ParentGone()]  # once


def test_a_parent_that_was_away_for_less_is_not_gone() -> None:
    lab, child = gone_parent()
    lab.rest(IDLE_S - 10.0)
    lab.restart_parent()
    lab.rest(2 * IDLE_S)
    assert not child.of(ParentGone) and set(lab.round().results) == {"device-0"}


# The end


def test_a_farewell_is_repeated_until_it_is_answered() -> None:
    lab = Lab(names_of(2))
    lab.rest(1.0)
    lab.round()
    child = lab.children["device-0"]
    assert child.session.goodbye_answered
    child.session.send_goodbye((ChildReport("below"),), lab.now)
    child.wake()
    lab.broker.drop = lambda topic: topic.endswith("device-0/inbox/cloud")
    lab.rest(10 * FAREWELL_S)
    assert not child.session.goodbye_answered and 10 <= lab.kinds["Farewell"] <= 12
    assert lab.parent.session.farewells == {"device-0"}
    lab.broker.drop = lambda topic: False
    lab.rest(2 * FAREWELL_S)
    assert child.session.goodbye_answered and lab.parent.of(GoodbyeReceived)[0] == GoodbyeReceived("device-0")
    before = lab.kinds["Farewell"]
    lab.rest(10 * FAREWELL_S)
    assert lab.kinds["Farewell"] == before
    (link,) = [lab.parent.session.ledger.links()["device-0"]]
    assert link.sent_model_payload == link.received_model_payload == manifest_of(model_of(0)).size


def test_a_reply_to_the_last_report_is_not_counted() -> None:
    """The report cannot include it, and links.csv is made of reports."""
    lab = Lab(names_of(1))
    lab.round()
    child, session = lab.children["device-0"], lab.parent.session.link.identity.session

    def counted() -> int:
        return child.session.link.counters.traffic(PARENT).received_control_message

    before = counted()
    inject(child, PARENT, session, Goodbye())
    assert counted() == before
    inject(child, PARENT, session, Acknowledgement(Key(0, 0, 0), ""))
    assert counted() > before


def test_a_farewell_outlives_a_broker_that_restarts() -> None:
    lab = Lab(names_of(1))
    lab.rest(1.0)
    child = lab.children["device-0"]
    child.disconnect(will_after_s=0.0, back_after_s=3.0)
    child.session.send_goodbye((), lab.now)
    child.wake()
    lab.rest(2.0)
    assert lab.kinds["Farewell"] == 0
    lab.rest(2.0)
    assert child.session.goodbye_answered and lab.kinds["Farewell"] == 1 and lab.kinds["Reports"] == 0


@pytest.mark.parametrize("keep_state", [True, False])
@pytest.mark.parametrize("announced", [True, False])
def test_who_leaves_clears_what_it_kept_on_the_broker(keep_state: bool, announced: bool) -> None:
    lab = Lab(names_of(1))
    if announced:
        lab.parent.session.link.announce(Announcement("{}", LAYOUT))
    lab.parent.set_state(NodeState.FINISHED)
    lab.rest(1.0)
    state, spec = topics.state(LAB, RUN, PARENT), topics.spec(LAB, RUN, PARENT)
    assert state in lab.broker.retained and (spec in lab.broker.retained) is announced
    lab.parent.session.link.own.leaving = True
    for output in lab.parent.session.link.leave(keep_state=keep_state):
        lab.parent._perform(output)
    lab.rest(1.0)
    assert (state in lab.broker.retained) is keep_state and spec not in lab.broker.retained
    assert lab.children["device-0"].of(RunEnded) == [RunEnded(NodeState.FINISHED, "")]


def test_the_end_of_a_run_is_reported_once() -> None:
    lab = Lab(names_of(1))
    lab.rest(1.0)
    for _ in range(3):
        lab.parent.set_state(NodeState.FAILED, reason="disk full")
        lab.rest(0.1)
    assert lab.children["device-0"].of(RunEnded) == [RunEnded(NodeState.FAILED, "disk full")]


# The broker


def test_nothing_is_sent_while_the_broker_is_away_and_nothing_is_kept() -> None:
    lab = Lab(names_of(1))
    lab.rest(1.0)
    lab.open()
    lab.rest(1.0)
    child = lab.children["device-0"]
    for node in (lab.parent, child):
        node.disconnect(will_after_s=None)
        for state in (NodeState.INIT, NodeState.READY, NodeState.READY):
            node.session.set_state(state, samples=10)
        for number in range(50):
            node.session.tick(lab.now + number)
            assert node.session.to_send(lab.now + number) == [] and node.session.link.outbox.empty
        node.session.connected(lab.now)
        out = node.session.to_send(lab.now)
        assert isinstance(out[0], Subscribe) and out[0].first and not any(isinstance(o, Subscribe) for o in out[1:2])
        states = [o for o in out if isinstance(o, Publish) and o.topic.endswith("/state")]
        assert len(states) == 1 and states[0].retain


def test_streams_are_subscribed_before_they_are_asked_for() -> None:
    lab = Lab(names_of(1))
    lab.rest(1.0)
    child = lab.children["device-0"]
    passes: list[list[object]] = []
    inner = child.session.to_send

    def watched(now: float) -> list[Any]:
        passes.append(out := inner(now))
        return out

    child.session.to_send = watched  # type: ignore[method-assign]
    lab.round()
    for out in passes:
        asks = [place for place, o in enumerate(out) if isinstance(o, Publish) and is_ask(o)]
        streams = [place for place, o in enumerate(out) if isinstance(o, Subscribe)]
        assert not asks or not streams or max(streams) < min(asks)
    assert sum(isinstance(o, Subscribe) for out in passes for o in out) == 1


def is_ask(output: Publish) -> bool:
    return bool(output.body) and isinstance(serialization.decode(output.body)[1], Ask)


def test_a_packet_limit_of_the_broker_is_kept() -> None:
    lab = Lab(names_of(1), transfer=TransferSettings(inline_bytes=262_144, idle_s=60.0))
    session = lab.parent.session
    session.connected(lab.now, packet_most=40_000)
    assert session.link.cut(["device-0"])[0] == 40_000
    large = manifest_of(bytes(50_000))
    assert session.link.offer(large, memoryview(bytes(50_000)), ["device-0"]) is None
    small = manifest_of(bytes(30_000))
    assert session.link.offer(small, memoryview(bytes(30_000)), ["device-0"]) == bytes(30_000)


def test_a_model_that_does_not_fit_in_a_packet_with_its_reports_is_fetched() -> None:
    lab = Lab(names_of(1), transfer=TransferSettings(inline_bytes=262_144, idle_s=60.0))
    link = lab.parent.session.link
    lab.rest(1.0)
    link.connected(lab.now, inboxes=(), packet_most=40_000)
    model = bytes(39_000)
    result = Result(
        Key(0, 0, 0), manifest_of(model), model, 10, 0.5, 1, 6, 6, 1.0, 0.0, 0.0, (), '{"up": [' + "{}," * 700 + "{}]}"
    )
    sent = link.to_send(lab.now, [("device-0", result)])
    (body,) = (each.body for each in sent if isinstance(each, Publish) and each.topic.endswith("/device-0/inbox/cloud"))
    assert len(body) < 40_000 and serialization.decode(body)[1] == replace(result, inline=None)


def test_a_chunk_that_was_placed_and_is_not_wanted_any_more_is_written_nowhere() -> None:
    lab = Lab(names_of(1))
    lab.rest(1.0)
    lab.open()
    child = lab.children["device-0"]
    silence_chunks(lab, PARENT)
    lab.until(lambda: child.session.link.receiver.wanted() != set())
    assert child.task is not None
    manifest = child.task.model
    topic = topics.chunk(LAB, RUN, PARENT, "all", manifest.blob, 0, 1)
    landing = child.session.link.place(topic, CHUNK)
    assert landing is not None and landing.view is not None
    child.session.stop_fetching(child.task, lab.now)
    assert landing.view is None
    child.session.landed(topic, landing, lab.now)
    assert child.session.link.place(topic, CHUNK) is None
    assert child.session.link.place(topics.state(LAB, RUN, PARENT), CHUNK) is None
    assert child.session.link.place("no topic", CHUNK) is None


# A connection, and what belongs to it


def fetching_child(**how: Any) -> tuple[Lab, ChildNode, str]:
    """Return a lab whose child has its task and gets no chunk of its model, and that model's blob."""
    lab = Lab(names_of(1), **how)
    lab.rest(1.0)
    silence_chunks(lab, PARENT)
    lab.open()
    child = lab.children["device-0"]
    lab.until(lambda: bool(child.session.link.receiver.wanted()))
    lab.rest(0.1)
    ((_, blob),) = child.session.link.receiver.wanted()
    return lab, child, blob


def offered_upload() -> tuple[Lab, ChildNode]:
    """Return a lab whose child offers a result of which no chunk arrives."""
    lab = Lab(names_of(1))
    lab.rest(1.0)
    silence_chunks(lab, "device-0")
    lab.open()
    lab.until(lambda: bool(lab.parent.session.link.receiver.wanted()))
    lab.rest(0.1)
    return lab, lab.children["device-0"]


def asks_in(outputs: Iterable[object]) -> list[Ask]:
    messages = [serialization.decode(o.body)[1] for o in outputs if isinstance(o, Publish) and o.body]
    return [message for message in messages if isinstance(message, Ask)]


def test_what_was_in_flight_is_asked_for_again_on_a_new_connection() -> None:
    lab, child, blob = fetching_child()
    child.session.link.disconnected(lab.now)
    child.session.connected(lab.now)
    (ask,) = asks_in(child.session.to_send(lab.now))
    assert ask.blob == blob and ask.restart


def test_what_waits_dies_with_its_connection() -> None:
    lab = Lab(names_of(1), link=LinkSettings(down_mbit=0.001))
    lab.rest(1.0)
    lab.open()
    lab.rest(0.5)
    session = lab.parent.session
    assert not session.link.outbox.empty
    inject(
        lab.parent,
        "device-0",
        lab.children["device-0"].session.link.identity.session,
        Ask("0" * 16, b"x", 0, 0, 8, True),
    )
    session.link.disconnected(lab.now)
    assert session.link.outbox.empty
    session.connected(lab.now)
    session.to_send(lab.now)
    assert not any(message for _, message in session.link._asks.take())
    bodies = [entry[2].output.body for entry in session.link.outbox._waiting if isinstance(entry[2].output, Publish)]
    assert not any(isinstance(serialization.decode(body)[1], Gone) for body in bodies)


def test_an_ask_is_answered_and_one_of_a_lost_connection_is_not() -> None:
    lab = Lab(names_of(1))
    lab.rest(1.0)
    mine, session = lab.children["device-0"].session.link.identity.session, lab.parent.session
    for lost in (False, True):
        inject(lab.parent, "device-0", mine, Ask("0" * 16, b"x", 0, 0, 8, True))
        if lost:
            session.link.disconnected(lab.now)
            session.connected(lab.now)
        sent = [serialization.decode(o.body)[1] for o in session.to_send(lab.now) if isinstance(o, Publish) and o.body]
        assert any(isinstance(message, Gone) for message in sent) is not lost


def test_a_chunk_of_another_run_is_none_of_ours() -> None:
    lab, child, blob = fetching_child()
    data = model_of(0)[:CHUNK]
    for run, wanted in (("run-2", False), (RUN, True)):
        topic = topics.chunk(LAB, run, PARENT, "all", blob, 0, 1)
        assert (child.session.link.place(topic, CHUNK) is not None) is wanted
        child.session.receive(topic, data, retained=False, now=lab.now)
        assert (child.session.link.receiver.lacks(PARENT, blob) == 5) is wanted
    assert child.session.link.refusals.of(Refusal.STRANGER) == 1


def test_a_child_that_died_is_served_no_more_and_frees_its_slot() -> None:
    lab, _, _ = fetching_child()
    assert lab.parent.session.link.sender.serving("device-0")
    lab.kill("device-0", will_after_s=0.0)
    lab.rest(0.1)
    assert not lab.parent.session.link.sender.serving("device-0")
    lab = Lab(names_of(2), transfer=TransferSettings(inline_bytes=0, idle_s=60.0, upload_slots=1))
    lab.rest(1.0)
    silence_chunks(lab, "device-0")
    lab.children["device-1"].train_s = 4.0
    lab.open()
    lab.until(lambda: len(lab.parent.of(UploadAnnounced)) == 2)
    lab.rest(1.0)
    lab.kill("device-0", will_after_s=0.0)
    lab.rest(1.0)
    assert lab.parent.session.coordinator.children["device-1"].state.value == "accepted"


def test_a_child_that_reconnects_is_asked_for_the_rest_at_once() -> None:
    lab, child = offered_upload()
    before = lab.kinds["Ask"]
    child.disconnect(will_after_s=None, back_after_s=0.0)
    lab.rest(0.2)
    assert lab.kinds["Ask"] == before + 1


def test_a_buffer_that_was_found_too_late_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(names_of(2))
    lab.rest(1.0)
    lab.children["device-1"].train_s = 100.0
    lab.open(closing=Closing(rule="quorum", quorum=1, deadline_s=4.0))
    monkeypatch.setattr(lab.parent, "_fetch", lambda event: None)  # the buffer is looked for
    lab.until(lambda: bool(lab.parent.of(UploadAnnounced)))
    (upload,) = lab.parent.of(UploadAnnounced)
    lab.kill("device-0", will_after_s=0.0)
    lab.start("device-0")
    lab.rest(0.5)
    lab.parent.session.fetch(upload, memoryview(bytearray(upload.result.model.size)), lab.now)
    assert not lab.parent.session.link.receiver.wanted() and not lab.parent.session._pending


def test_an_upload_that_is_announced_twice_at_once_is_fetched_into_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two changes of the session come in one pass, each with an announcement; both fetches follow."""
    lab = Lab(names_of(1))
    lab.rest(1.0)
    lab.open()
    monkeypatch.setattr(lab.parent, "_fetch", lambda event: None)  # as a shell that is busy
    lab.until(lambda: bool(lab.parent.of(UploadAnnounced)))
    (upload,) = lab.parent.of(UploadAnnounced)
    first, second = (bytearray(upload.result.model.size) for _ in range(2))
    lab.parent.buffers["device-0", upload.result.model.blob] = first
    assert lab.parent.session.fetch(upload, memoryview(first), lab.now)
    assert not lab.parent.session.fetch(upload, memoryview(second), lab.now)
    lab.parent.wake()
    closed = lab.play()
    assert isinstance(closed, Closed) and first == lab.parent.expected["device-0"] and not any(second)


@pytest.mark.parametrize("why", ["the round closed", "its child restarted"])
def test_an_upload_that_is_void_is_not_written_any_more(why: str) -> None:
    lab, child = offered_upload()
    (buffer,) = lab.parent.buffers.values()
    result = child.session.participant._result
    assert result is not None and child._answer is not None
    if why == "the round closed":
        lab.parent.session.end_round(lab.now)
    else:
        lab.kill("device-0", will_after_s=None)
        lab.start("device-0")
        lab.rest(0.2)
    session = lab.parent.session
    for index in range(result.model.chunks):
        topic = topics.chunk(LAB, RUN, "device-0", "all", result.model.blob, index, index + 1)
        data = child._answer[result.model.span(index)]
        assert session.link.place(topic, len(data)) is None
        session.receive(topic, data, retained=False, now=lab.now)
    assert buffer == bytes(len(buffer)) and not session.link.receiver.wanted() and not session._pending


def test_a_parent_that_comes_back_learns_at_once_what_is_offered() -> None:
    lab, child = offered_upload()
    lab.rest(10.0)  # the result is repeated each 5 s by now
    lab.parent.disconnect(will_after_s=0.0, back_after_s=0.5)
    before = lab.kinds["Result"]
    lab.rest(0.6)
    assert lab.kinds["Result"] == before + 1
    assert child.session.participant.state is ParticipantState.ANNOUNCING


def test_a_farewell_is_sent_at_once_on_a_new_connection() -> None:
    lab = Lab(names_of(1))
    lab.rest(1.0)
    child = lab.children["device-0"]
    lab.broker.drop = lambda topic: "inbox" in topic
    child.session.send_goodbye((), lab.now)
    child.wake()
    lab.rest(0.1)
    child.disconnect(will_after_s=None, back_after_s=0.1)
    lab.rest(0.2)
    assert lab.kinds["Farewell"] == 2


def test_an_old_end_that_was_disproved_is_forgotten() -> None:
    lab = Lab(names_of(1))
    lab.rest(1.0)
    child = lab.children["device-0"]
    leave_remains(lab, PARENT, NodeState.FINISHED)
    child.disconnect(will_after_s=None, back_after_s=0.0)
    lab.rest(10.0)
    assert child.session.link.proofs.proof(PARENT) is Proof.PROVEN
    lab.stop_parent(will_after_s=None)
    lab.restart_broker(down_s=0.1, retained={})
    lab.rest(IDLE_S + 1.0)
    assert child.of(ParentGone) and not child.of(RunEnded)


def test_a_parent_that_dies_while_a_child_is_cut_off_is_missed() -> None:
    lab = Lab(names_of(1))
    lab.rest(1.0)
    child = lab.children["device-0"]
    lab.stop_parent(will_after_s=None)
    lab.broker.retained.clear()
    child.session.link.disconnected(lab.now)
    child.connection = None
    child.connect()
    lab.rest(IDLE_S - 1.0)
    assert not child.of(ParentGone)
    lab.rest(2.0)
    assert child.of(ParentGone)


def test_a_child_counts_its_bytes_for_each_ledger_of_its_parent() -> None:
    lab = Lab(names_of(1))
    lab.rest(1.0)
    child, size = lab.children["device-0"].session, manifest_of(model_of(0)).size
    counted: dict[str, list[int]] = {}
    for books in ("a", "b", "a"):
        lab.parent.session.link.own.presence = replace(lab.parent.session.link.own.presence, ledger=books)
        lab.parent.set_state(NodeState.READY)
        lab.rest(0.1)
        lab.round(model=model_of(sum(map(len, counted.values())), len(model_of(0))))
        counted.setdefault(books, []).append(child._traffic()[0].received_model_payload)
    assert counted == {"a": [size, 3 * size], "b": [size]}


# Any bytes


LEAVES: list[Any] = [
    None, True, -1, 0, 17, 2**63, 2**63 - 1, 0.0, float("nan"), float("inf"), "", "x", "a" * 5000, "0" * 16, RUN,
    "device-0", b"", b"\xff" * 9, [], [[]], [1, 2, 3], {},
]  # fmt: skip


def mutated(draw: random.Random, tree: Any) -> Any:
    """Return a message's tree with one leaf or branch replaced."""
    if isinstance(tree, (list, tuple)) and tree and draw.random() < 0.8:
        place = draw.randrange(len(tree))
        return [mutated(draw, each) if i == place else each for i, each in enumerate(tree)]
    return draw.choice(LEAVES)


def any_message(draw: random.Random, lab: Lab) -> tuple[str, bytes]:
    """Return a topic and bytes that somebody may publish."""
    names = [*lab.names, PARENT, "stranger", "all"]
    runs = [RUN, RUN, RUN, "run-2", "x-y"]
    node, sender, run = draw.choice(names), draw.choice(names), draw.choice(runs)
    blobs = ["0" * 16, manifest_of(model_of(0)).blob]
    topic = draw.choice(
        [
            topics.inbox(LAB, run, node, sender),
            topics.inbox(LAB, RUN, node, sender),
            topics.inbox(LAB, RUN, PARENT, "device-0"),
            topics.inbox(LAB, RUN, "device-0", PARENT),
            topics.state(LAB, run, node),
            topics.spec(LAB, run, node),
            topics.seek(LAB, node, sender),
            topics.chunk(LAB, run, node, sender, draw.choice(blobs), draw.randrange(9), draw.randrange(10**6)),
            f"fs1/{LAB}/{draw.getrandbits(32):x}/{node}",
            "",
            "\0" * 9,
            "fs1" + "/+" * 6,
        ]
    )
    session = draw.choice([*(each.session.link.identity.session for each in lab.processes), "unknown"])
    message = draw.choice(messages_of(Key(0, 0, draw.randrange(2)), draw.choice(blobs)))
    body = serialization.encode(message, session)
    how = draw.randrange(6)
    if how == 0:
        body = draw.randbytes(draw.randrange(40))
    elif how == 1:
        body = body[: draw.randrange(len(body))]
    elif how == 2:
        place = draw.randrange(len(body))
        body = body[:place] + draw.randbytes(1) + body[place + 1 :]
    elif how == 3:
        body = msgpack.packb(mutated(draw, msgpack.unpackb(body[DIGEST_BYTES:])))
        body = xxhash.xxh3_64_digest(body) + body
    return topic, body


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), moment=st.floats(0.0, 4.0))
def test_any_bytes_on_any_topic_raise_nothing(seed: int, moment: float) -> None:
    lab, draw = Lab(names_of(2), seed=seed, train_s=1.0), random.Random(seed)
    lab.rest(1.0)
    lab.open()
    lab.rest(moment)
    for _ in range(150):
        topic, body = any_message(draw, lab)
        for node in lab.nodes():
            session, refused = node.session, node.session.link.refusals.total
            session.link.place(topic, len(body))
            session.receive(topic, body, retained=draw.random() < 0.3, now=lab.now)
            if is_malformed(topic, body):
                assert session.link.refusals.total == refused + 1, (topic, body)
            session.next_deadline(lab.now)
            node.wake()
        lab.rest(0.02)
    for refusals in (node.session.link.refusals for node in lab.nodes()):
        assert refusals.of(Refusal.MALFORMED) > 0 and len(refusals._counts) <= 6 * 3
    for node in lab.nodes():  # it is what it was: whoever speaks next is received
        node.session.tick(lab.now)


def is_malformed(topic: str, body: bytes) -> bool:
    """Return whether nobody can make anything of a message, whoever gets it."""
    try:
        place = topics.parse(topic)
    except WireError:
        return True
    if isinstance(place, topics.ChunkTopic | topics.SpecTopic) or not body:
        return False
    try:
        serialization.decode(body)
    except WireError:
        return True
    return False


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32))
def test_a_storm_of_other_peoples_messages_spoils_no_round(seed: int) -> None:
    """All that strangers, other runs and unknown sessions may publish; peers' own messages are another matter."""
    lab, draw = Lab(names_of(3), seed=seed, train_s=2.0), random.Random(seed)
    lab.rest(1.0)

    def storm() -> None:
        for _ in range(20):
            topic, body = any_message(draw, lab)
            try:
                session, _ = serialization.decode(body)
            except WireError:
                session = "unknown"
            parsed = topic.split("/")
            if session == "unknown" and "state" not in parsed and "blob" not in parsed:
                for node in lab.nodes():
                    node.session.receive(topic, body, retained=False, now=lab.now)
                    node.wake()
        lab.loop.after(0.1, storm)

    storm()
    for local_round in range(2):
        closed = lab.round(local_round=local_round)
        assert set(closed.results) == set(lab.names)


def test_nothing_grows_without_bound() -> None:
    """One child does all the harm that it can, with its own session and on its own topics, over a slow link."""
    lab = Lab(names_of(3), link=LinkSettings(up_mbit=10.0, down_mbit=0.1))
    lab.rest(1.0)
    draw, child = random.Random(1), lab.children["device-0"]
    mine = child.session.link.identity.session

    def attack() -> None:
        session = lab.parent.session
        blob = f"{draw.getrandbits(64):016x}"
        key = Key(draw.randrange(3), draw.randrange(9), draw.randrange(9))
        for message in messages_of(key, blob):
            if not isinstance(message, Alive):
                inject(lab.parent, "device-0", mine, message)
        inject(lab.parent, "device-0", mine, WhoIsThere(blob, RUN))
        inject(lab.parent, "device-0", f"{blob}", Gone(blob))
        for node, number in itertools.product(("device-0", "device-1", f"x{blob}"), range(2)):
            topic = topics.chunk(LAB, RUN, node, "all", blob, number, draw.getrandbits(30))
            session.receive(topic, draw.randbytes(30), retained=False, now=lab.now)
        seek = serialization.encode(WhoIsThere(blob), blob)
        session.receive(topics.seek(LAB, PARENT, f"x{blob}"), seek, retained=False, now=lab.now)
        session.receive(topics.state(LAB, RUN, f"x{blob}"), seek, retained=False, now=lab.now)
        target = replace(READY, reason=blob, targets=())
        body = serialization.encode(target, mine)
        session.receive(topics.state(LAB, RUN, "device-0"), body, retained=bool(draw.randrange(2)), now=lab.now)
        session.receive(topics.state(LAB, f"run-{blob}", PARENT), body, retained=False, now=lab.now)

    def storm(seconds: float) -> dict[str, int]:
        most: dict[str, int] = {}
        for _ in range(int(seconds / 0.01)):
            attack()
            lab.rest(0.01)
            lab.parent.events.clear()
        for path, size in sizes(lab.parent.session).items():
            most[path] = max(most.get(path, 0), size)
        return most

    storm(3.0)
    after = storm(6.0)
    big = {path: size for path, size in after.items() if size > 2 * ASKS_KEPT}
    assert not big
    assert set(lab.round(["device-1", "device-2"]).results) == {"device-1", "device-2"}


def test_what_a_parent_does_to_a_child_is_bounded_too() -> None:
    lab = Lab(names_of(1))
    lab.rest(1.0)
    child = lab.children["device-0"]
    mine = lab.parent.session.link.identity.session
    for number in range(600):
        for message in messages_of(Key(0, 0, number), f"{number:016x}"):
            if not isinstance(message, Alive):
                inject(child, PARENT, mine, message)
        presence = Presence(NodeState.READY, "cloud", ledger=f"{number}")
        body = serialization.encode(presence, mine)
        child.session.receive(topics.state(LAB, RUN, PARENT), body, retained=False, now=lab.now)
        if number % 10 == 0:
            lab.rest(0.01)
        child.events.clear()
    big = {path: size for path, size in sizes(child.session).items() if size > 2 * ASKS_KEPT}
    assert not big


def test_events_of_kinds_that_shells_know(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(names_of(1))
    lab.rest(1.0)
    inject(lab.parent, "device-0", lab.children["device-0"].session.link.identity.session, Probed("0" * 16, 1.0, BLOB))
    presence = replace(READY, metrics="h:1")
    lab.children["device-0"].session.link.own.presence = presence
    lab.children["device-0"].set_state(NodeState.READY, samples=10)
    lab.rest(2.0)
    assert [event.message for event in lab.parent.of(ProbeReceived)] == [Probed("0" * 16, 1.0, BLOB)]
    assert [[t.metrics for t in event.targets] for event in lab.parent.of(TargetsChanged)] == [["h:1"]]
    assert attributes(lab.parent.session)


def test_a_node_that_lost_its_name_answers_no_question() -> None:
    lab = Lab(names_of(1))
    lab.parent.session.link.announce(Announcement("{}", LAYOUT))
    lab.rest(1.0)
    before = lab.kinds["Alive"]
    lab.parent.session.link.identity.claim.lost = True  # on its other broker
    body = serialization.encode(WhoIsThere("n"), "n")
    lab.parent.session.receive(topics.seek(LAB, PARENT, "device-0"), body, retained=False, now=lab.now)
    lab.rest(1.0)
    assert lab.kinds["Alive"] == before
