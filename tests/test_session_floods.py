"""Both sessions of a link: floods, slots, progress, and any bytes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import msgpack
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.common.accounting.traffic import Traffic
from fedstrata.common.errors import WireError
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.admission import (
    ANSWER_S,
    ANSWERS_MOST,
    ASKS_KEPT,
    SEEKERS_MOST,
    Refusal,
)
from fedstrata.common.protocol.events import (
    BrokerAway,
    ParentGone,
    PeerChanged,
    ProbeReceived,
    TargetsChanged,
)
from fedstrata.common.protocol.messages import (
    DIGEST_BYTES,
    Alive,
    Announcement,
    Ask,
    Declined,
    Farewell,
    Gone,
    Goodbye,
    Key,
    Message,
    NodeState,
    Preparing,
    Presence,
    Probed,
    Question,
    Result,
)
from fedstrata.common.settings.links import LinkSettings
from tests.helpers.coordinators import quorum_of
from tests.helpers.examples import DRAWN, PROFILE
from tests.helpers.session_lab import (
    LAB,
    LAYOUT,
    PARENT,
    RUN,
    WORK,
    Lab,
    Node,
    manifest_of,
    model_of,
    names_of,
    settled,
)
from tests.helpers.session_messages import BLOB, IDLE_S, READY, messages_of, seek
from tests.helpers.snapshots import sizes

# Floods


def announcing(experiment: str = "{}", *, count: int = 1, **how: Any) -> Lab:
    """Return a settled lab whose parent announces an experiment to nodes that look for a run."""
    lab = Lab(names_of(count), **how)
    lab.parent.link.announce(Announcement(experiment, LAYOUT))
    lab.rest(1.0)
    return lab


def sent_to(lab: Lab, name: str) -> int:
    return sum(
        count
        for (sender, receiver, _), count in lab.messages.items()
        if (sender, receiver) == (PARENT, name)
    )


FLOODS: dict[str, Callable[[random.Random], Message]] = {
    "who is there": lambda draw: Question(f"{draw.getrandbits(64):x}", run=RUN),
    "asks for anything": lambda draw: Ask(f"{draw.getrandbits(64):016x}", b"\xff", 0, 0, 64, True),
    "asks for what never was": lambda draw: Ask(
        "0" * 16, b"\xff", draw.getrandbits(60), 0, 64, False
    ),
    "farewells": lambda draw: Farewell(Traffic(), ()),
    "answers": lambda draw: Alive("cloud/0", replace(READY, samples=draw.randrange(1, 9))),
    "preparing": lambda draw: Preparing(draw.randrange(9), ""),
    "declined": lambda draw: Declined(Key(0, 0, 0), "no"),
    "goodbyes": lambda draw: Goodbye(),
    "late results": lambda draw: Result(Key(0, 0, 0), BLOB, None, WORK, 1, (), ""),
}


AT_ONCE = {
    "who is there": 3000,
    "asks for anything": 10_000,
    "farewells": 3000,
    "late results": 3000,
}


@pytest.mark.parametrize(
    ("kind", "count", "seconds"),
    [*((kind, 1000, 2.0) for kind in FLOODS), *((*each, 0.0) for each in AT_ONCE.items())],
)
def test_a_flood_costs_few_answers_and_leaves_the_others_alone(
    kind: str, count: int, seconds: float
) -> None:
    lab, draw = settled(3), random.Random(0)
    lab.round()  # with the key of the late results
    sender, session = lab.parent.link.sender, lab.child.process
    before, chunks = sent_to(lab, "device-0"), sender.chunks_published
    lab.flood(lambda _: lab.parent.inject("device-0", session, FLOODS[kind](draw)), count, seconds)
    begun = lab.now
    closed = lab.round(["device-1", "device-2"], local_round=1)
    assert set(closed.results) == {"device-1", "device-2"} and lab.now - begun < 5.0
    lab.rest(1.0)
    assert sent_to(lab, "device-0") - before <= ANSWERS_MOST + 2 + seconds / ANSWER_S
    assert sender.chunks_published - chunks == manifest_of(model_of(1)).chunks


@pytest.mark.parametrize("lies", [True, False])
def test_a_flood_of_asks_for_a_model_costs_few_chunks_of_it(lies: bool) -> None:
    """By restarts, or by asks that pretend to have seen whatever was published, and to lack it."""
    lab = settled(3)
    blob, draw = manifest_of(model_of(0)), random.Random(0)

    def ask(_: int) -> None:
        seen = (draw.getrandbits(40), draw.getrandbits(40)) if lies else (0, 0)
        message = Ask(blob.blob, b"\xfc", *seen, 64, not lies)
        lab.parent.inject("device-0", lab.child.process, message)

    lab.flood(ask, 1500, 3.0)
    begun = lab.now
    closed = lab.round(closing=quorum_of(2, 4.0))
    assert set(closed.results) >= {"device-1", "device-2"} and lab.now - begun < 5.0
    assert lab.parent.link.sender.chunks_published <= blob.chunks * 4 + lies * 4 * 64


def test_an_answer_to_a_seeker_waits_until_the_last_has_left() -> None:
    """An experiment of 20 kB takes 20 s at 8 kbit/s; meanwhile the child asks every other second."""
    lab = announcing("e" * 20_000, link=LinkSettings(up_mbit=1.0, down_mbit=0.008), start=False)
    lab.flood(lambda _: seek(lab), 30, 30.0)
    lab.rest(35.0)
    assert lab.kinds["Alive"] == 1 and len(lab.parent.link.outbox._waiting) <= 1


def test_a_seeker_that_asks_twice_at_once_is_answered_a_second_time_soon() -> None:
    """By the timer of the answer alone: nothing else happens meanwhile."""
    lab = announcing(start=False)
    lab.rest(60.0)
    before = lab.kinds["Alive"]
    for _ in range(2):
        seek(lab)
        lab.rest(0.01)
    assert lab.kinds["Alive"] == before + 1
    assert lab.parent.session.next_deadline(lab.now) == pytest.approx(lab.now + ANSWER_S, abs=0.02)
    lab.rest(ANSWER_S)
    assert lab.kinds["Alive"] == before + 2


def test_a_child_that_clears_its_presence_has_left() -> None:
    lab = settled(2)
    assert lab.parent.session.attendance.present() == names_of(2)
    lab.child.set_state(NodeState.FINISHED)
    lab.rest(0.1)
    lab.child.leave(keep_state=False)
    lab.rest(1.0)
    states = [event.state for event in lab.parent.of(PeerChanged) if event.child == "device-0"]
    assert states[-1] == "left" and lab.parent.session.attendance.present() == ["device-1"]
    assert lab.readiness.missing == {"device-0": "was lost, or left"}


def test_seekers_of_any_name_are_answered_in_bounds() -> None:
    lab = announcing(count=2)
    before = lab.kinds["Alive"]
    for number in range(2000):
        seek(lab, f"anybody-{number}")
    assert len(lab.parent.link._questions._questions) <= SEEKERS_MOST + 2
    assert lab.parent.refused(Refusal.FLOOD) >= 2000 - SEEKERS_MOST
    lab.complete()
    assert lab.kinds["Alive"] - before <= SEEKERS_MOST


@pytest.mark.parametrize("slots", [1, 4])
def test_children_that_offer_and_never_serve_stop_nobody(slots: int) -> None:
    transfer = TransferSettings(inline_bytes=0, idle_s=120.0, upload_slots=slots)
    lab = settled(24 if slots == 1 else 44, transfer=transfer, train_s=1.0)
    silent = names_of(slots)
    for name in lab.names[slots:]:
        lab.children[name].train_s = 2.0  # the silent ones are first
    lab.mute(*(f"/{name}/blob" for name in silent))
    begun = lab.now
    others = len(lab.names) - slots
    closed = lab.round(closing=quorum_of(others, 5.0))
    assert closed.missing == tuple(silent) and len(closed.results) == others
    assert lab.now - begun < 30.0


@pytest.mark.parametrize("owner", [PARENT, "device-0"])
def test_chunks_that_never_arrive_end_the_round_in_time(owner: str) -> None:
    lab = settled(2)
    lab.mute(f"{owner}/blob")
    begun = lab.now
    lab.open()
    stalled = lab.stall()
    assert stalled.idle and lab.now - begun <= 2 * IDLE_S
    assert stalled.reason.startswith("device-0 ") and "made no progress" in stalled.reason
    assert ("device-1" in stalled.reason) is (owner == PARENT)


def test_chunks_that_are_only_repeated_end_the_round_in_time() -> None:
    """A child that publishes one chunk of its model again and again brings nothing."""
    lab = settled(1)
    lab.broker.drop = lambda topic: "/device-0/blob/" in topic and topic.split("/")[7] != "3"
    begun = lab.now
    lab.open()
    lab.stall()
    assert lab.now - begun <= 2 * IDLE_S


def test_nobody_is_given_up_while_chunks_arrive() -> None:
    """A model of 6 chunks at one in 40 s or more, with 120 s of patience."""
    lab = settled(1, transfer=TransferSettings(inline_bytes=0, idle_s=120.0))
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
    lab.complete(until_s=3000.0)
    assert lab.now - begun > 12 * 40.0


# Progress


def test_a_child_that_hangs_while_it_prepares_is_reported() -> None:
    lab = Lab(names_of(3), start=False)
    children = [lab.start(name, ready_s=inf) for name in lab.names]

    def go_on(_: int) -> None:
        waits_for = ["", "", "device-9 has not joined yet"]
        for child, done, why in zip(children, [7, int(lab.now), 1], waits_for, strict=True):
            child.session.preparing(done, waits_for=why, now=lab.now)
            child.wake()

    lab.flood(go_on, 100, 500.0)
    lab.rest(IDLE_S - 1.0)
    assert not lab.readiness.hanging
    lab.rest(10.0)
    readiness = lab.readiness
    assert readiness.hanging == {"device-0"} and not readiness.ready and not readiness.failed
    assert readiness.missing == {
        "device-0": "no progress in preparing for 60 s",
        "device-1": "prepares",
        "device-2": "waits for device-9 has not joined yet",
    }
    for child in children:
        lab.ready(child)
    lab.rest(1.0)
    assert lab.readiness.ready == set(lab.names)


def test_preparing_is_reported_in_measure_and_ends_with_it() -> None:
    lab = Lab(names_of(1), start=False)
    child = lab.start(ready_s=inf)

    def go_on(number: int) -> None:
        child.session.preparing(number, now=lab.now)
        child.wake()

    lab.flood(go_on, 1000, 10.0)
    lab.rest(10.0)
    assert 4 <= lab.kinds["Preparing"] <= 8
    lab.ready(child)
    lab.rest(0.1)
    before = lab.kinds["Preparing"]
    lab.rest(10.0)
    assert lab.kinds["Preparing"] == before


def test_a_child_that_gave_up_is_named_with_its_reason() -> None:
    lab = settled(2)
    lab.child.set_state(NodeState.FAILED, reason="no data")
    lab.rest(1.0)
    assert lab.readiness.failed == {"device-0"}
    assert lab.readiness.missing == {"device-0": "gave up: no data"}
    lab.open()
    assert lab.stall().reason == "device-0 gave up: no data"


@pytest.mark.parametrize("away_s", [30.0, 100.0])
def test_a_broker_that_is_away_is_no_childs_fault(away_s: float) -> None:
    lab = settled(2, train_s=10.0)
    lab.open()
    lab.rest(2.0)
    lab.restart_broker(down_s=away_s)
    lab.finish()
    for node in lab.nodes():
        assert bool(node.of(BrokerAway)) is (away_s > IDLE_S) and not node.of(ParentGone)


# Any bytes


LEAVES: list[Any] = [
    None,
    True,
    -1,
    0,
    17,
    2**63,
    2**63 - 1,
    0.0,
    float("nan"),
    float("inf"),
    "",
    "x",
    "a" * 5000,
    "0" * 16,
    RUN,
    "device-0",
    b"",
    b"\xff" * 9,
    [],
    [[]],
    [1, 2, 3],
    {},
]


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
            topics.ask(LAB, node, sender),
            topics.chunk(
                LAB, run, node, sender, draw.choice(blobs), draw.randrange(9), draw.randrange(10**6)
            ),
            f"fs1/{LAB}/{draw.getrandbits(32):x}/{node}",
            "",
            "\0" * 9,
            "fs1" + "/+" * 6,
        ]
    )
    session = draw.choice([*(each.process for each in lab.processes), "unknown"])
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


@settings(max_examples=DRAWN[PROFILE] // 4)
@given(seed=st.integers(0, 2**32), moment=st.floats(0.0, 4.0))
def test_any_bytes_on_any_topic_raise_nothing(seed: int, moment: float) -> None:
    lab, draw = settled(2, seed=seed, train_s=1.0), random.Random(seed)
    lab.open()
    lab.rest(moment)
    for _ in range(150):
        topic, body = any_message(draw, lab)
        for node in lab.nodes():
            session, refused = node.session, node.refused()
            node.link.place(topic, len(body))
            node.receive(topic, body, retained=draw.random() < 0.3)
            if is_malformed(topic, body):
                assert node.refused() == refused + 1, (topic, body)
            session.next_deadline(lab.now)
            node.wake()
        lab.rest(0.02)
    for node in lab.nodes():  # it is what it was: whoever speaks next is received
        assert node.refused(Refusal.MALFORMED) > 0
        assert len(node.link.refusals._counts) <= 6 * 3
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


@settings(max_examples=DRAWN[PROFILE] // 7)
@given(seed=st.integers(0, 2**32))
def test_a_storm_of_other_peoples_messages_spoils_no_round(seed: int) -> None:
    """All that strangers, other runs and unknown sessions may publish; peers' own messages are
    another matter.
    """
    lab, draw = settled(3, seed=seed, train_s=2.0), random.Random(seed)

    def storm(_: int) -> None:
        for _ in range(20):
            topic, body = any_message(draw, lab)
            try:
                session, _ = serialization.decode(body)
            except WireError:
                session = "unknown"
            parsed = topic.split("/")
            if session == "unknown" and "state" not in parsed and "blob" not in parsed:
                for node in lab.nodes():
                    node.receive(topic, body)
                    node.wake()

    lab.flood(storm, 1000, 100.0)
    for local_round in range(2):
        lab.complete(local_round=local_round)


def test_nothing_grows_without_bound() -> None:
    """One child does all the harm that it can, with its own session and on its own topics, over a
    slow link.
    """
    lab = settled(3, link=LinkSettings(up_mbit=10.0, down_mbit=0.1))
    draw, parent, mine = random.Random(1), lab.parent, lab.child.process

    def attack() -> None:
        blob = f"{draw.getrandbits(64):016x}"
        key = Key(draw.randrange(3), draw.randrange(9), draw.randrange(9))
        for message in [*messages_of(key, blob), Question(blob, run=RUN)]:
            if not isinstance(message, Alive):
                parent.inject("device-0", mine, message)
        parent.inject("device-0", blob, Gone(blob))
        for node, number in itertools.product(("device-0", "device-1", f"x{blob}"), range(2)):
            topic = topics.chunk(LAB, RUN, node, "all", blob, number, draw.getrandbits(30))
            parent.receive(topic, draw.randbytes(30))
        seek(lab, f"x{blob}", blob)
        parent.receive(
            topics.state(LAB, RUN, f"x{blob}"), serialization.encode(Question(blob), blob)
        )
        body = serialization.encode(replace(READY, reason=blob, targets=()), mine)
        state = topics.state(LAB, RUN, "device-0")
        parent.receive(state, body, retained=bool(draw.randrange(2)))
        parent.receive(topics.state(LAB, f"run-{blob}", PARENT), body)

    for _ in range(300):
        attack()
        lab.rest(0.01)
        parent.events.clear()
    check_sizes(parent)
    assert set(lab.round(["device-1", "device-2"]).results) == {"device-1", "device-2"}


def check_sizes(node: Node) -> None:
    """Check that nothing in a session has grown without bound."""
    large = {path: size for path, size in sizes(node.session).items() if size > 2 * ASKS_KEPT}
    assert not large


def test_what_a_parent_does_to_a_child_is_bounded_too() -> None:
    lab = settled(1)
    child, mine = lab.child, lab.parent.process
    for number in range(200):
        for message in messages_of(Key(0, 0, number), f"{number:016x}"):
            if not isinstance(message, Alive):
                child.inject(PARENT, mine, message)
        child.inject_state(PARENT, mine, Presence(NodeState.READY, "cloud", ledger=f"{number}"))
        if number % 10 == 0:
            lab.rest(0.01)
        child.events.clear()
    check_sizes(child)


def test_events_of_kinds_that_shells_know() -> None:
    lab = settled(1)
    probed = Probed("0" * 16, 1.0, BLOB)
    lab.parent.inject("device-0", lab.child.process, probed)
    lab.child.link.own.presence = replace(READY, metrics="h:1")
    lab.child.set_state(NodeState.READY, samples=10)
    lab.rest(2.0)
    assert [event.message for event in lab.parent.of(ProbeReceived)] == [probed]
    targets = [event.targets for event in lab.parent.of(TargetsChanged)]
    assert [[target.metrics for target in each] for each in targets] == [["h:1"]]


def test_a_node_that_lost_its_name_answers_no_question() -> None:
    lab = announcing()
    before = lab.kinds["Alive"]
    lab.parent.link.identity.claim.lost = True  # on its other broker
    seek(lab)
    lab.rest(1.0)
    assert lab.kinds["Alive"] == before
