"""Both sessions of a link: nodes that restart, brokers that go away, connections that break."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf
from typing import Any, Final

import pytest

from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.admission import Refusal
from fedstrata.common.protocol.child_session import FAREWELL_S, QUIET_S
from fedstrata.common.protocol.events import (
    BrokerAway,
    GoodbyeReceived,
    NameTaken,
    ParentGone,
    ParentMoved,
    ResultRefused,
    RunEnded,
    TaskReceived,
    UploadAnnounced,
    UploadRefused,
)
from fedstrata.common.protocol.messages import (
    Acknowledgement,
    Alive,
    Announcement,
    Ask,
    Gone,
    Goodbye,
    Key,
    Message,
    NodeState,
    Presence,
    Result,
    Task,
)
from fedstrata.common.protocol.outbox import Publish, Subscribe
from fedstrata.common.protocol.participant import ParticipantState
from fedstrata.common.protocol.presence import ASK_MOST_S, FINAL
from fedstrata.common.protocol.round_state import ChildState
from fedstrata.common.settings.links import LinkSettings
from tests.helpers.coordinators import quorum_of
from tests.helpers.session_lab import (
    CHUNK,
    CHUNKED,
    LAB,
    LAYOUT,
    MODEL_BYTES,
    PARENT,
    RUN,
    WORK,
    ChildNode,
    Lab,
    NoMeter,
    lab_at,
    manifest_of,
    model_of,
    names_of,
    settled,
)
from tests.helpers.session_messages import BLOB, IDLE_S
from tests.simulation.faults import Fault, FaultKind

# Restarts


KILL, CUT, BROKER = FaultKind.KILL, FaultKind.PARTITION, FaultKind.BROKER
RESTARTS: Final[Mapping[str, Fault]] = {
    "the parent": Fault(KILL, 0.0, 0.0, PARENT, 0.5),
    "a child without a will": Fault(KILL, 0.0, 0.0, "device-0", inf),
    "a child": Fault(KILL, 0.0, 0.0, "device-0"),
    "a child whose will is late": Fault(KILL, 0.0, 0.0, "device-0", 5.0),
    "a broker that is empty then": Fault(BROKER, 0.0, 1.0, detail="empty"),
    "a broker": Fault(BROKER, 0.0, 1.0),
}


@pytest.mark.parametrize("who", RESTARTS)
@pytest.mark.parametrize("state", ParticipantState)
def test_a_restart_costs_what_the_process_was_training(state: ParticipantState, who: str) -> None:
    lab = lab_at(state)
    lab.hit(RESTARTS[who])
    lab.rest(0.0)
    if state is ParticipantState.IDLE:
        lab.open()
    lab.finish()
    again = who.startswith("a child") and state is ParticipantState.DONE
    assert len(lab.child.trained) == (not again)
    assert len(lab.children["device-1"].trained) == 1
    lab.check()


MUTE, REMAINS = FaultKind.MUTE, FaultKind.REMAINS
OVERCOME: Final[Mapping[str, list[Fault]]] = {
    **{
        f"{who} dies again and again": [
            Fault(KILL, 0.37 * number, 0.0, who, 3.0) for number in range(20)
        ]
        for who in (PARENT, "device-0")
    },
    "presences are lost": [
        Fault(MUTE, 0.0, 5.0, detail="state"),
        *(Fault(KILL, 0.0, 0.0, who, inf) for who in ("device-0", PARENT)),
    ],
    # it reports nothing of its successor
    **{
        f"the broker has the end of a dead child: {state}": [
            Fault(REMAINS, 0.0, 0.0, "device-0", detail=state),
            Fault(BROKER, 0.0, 1.0),
        ]
        for state in FINAL
    },
}


@pytest.mark.parametrize("name", OVERCOME)
def test_a_round_completes_whatever_happens(name: str) -> None:
    lab = settled(2)
    lab.hit(*OVERCOME[name])
    lab.rest(0.0)
    lab.complete()
    lab.check()


def test_a_result_that_its_child_no_longer_holds_is_asked_for_again() -> None:
    lab = settled(1)
    lab.open()
    child = lab.child
    lab.until(lambda: lab.parent.of(UploadAnnounced))
    child.link.offers.retire(child.answer_blob)
    child.session.participant._result = None  # as after a row that was written again
    lab.finish()
    assert lab.kinds["Gone"] and len(lab.parent.of(UploadAnnounced)) == 2


def test_a_result_that_is_refused_is_reported_to_its_child_and_the_round_goes_on() -> None:
    lab = Lab(names_of(2))
    lab.bad = {"device-0"}
    closed = lab.round()
    assert closed.refused == {"device-0": "holds NaN"} and set(closed.results) == {"device-1"}
    assert lab.parent.of(UploadRefused) == [UploadRefused("device-0", "holds NaN")]
    lab.rest(0.1)
    assert lab.child.of(ResultRefused) == [ResultRefused("holds NaN")]


def test_a_second_process_of_a_living_name_ends() -> None:
    lab = settled(1)
    first, second = lab.child, lab.start()
    lab.rest(1.0)
    assert second.of(NameTaken) and not first.of(NameTaken)
    second.disconnect(will_after_s=0.0)
    second.alive = False
    lab.complete()
    assert len(first.trained) == 1


# The end of a child


END, STRANGER = FaultKind.TERMINATE, FaultKind.STRANGER
PARENT_IS_GONE = Fault(KILL, 0.0, inf, PARENT, inf)
OVER = {state: RunEnded(state, "it is over") for state in (NodeState.FINISHED, NodeState.FAILED)}
# what happens, when a child's end comes, and what it is
ENDS: Final[Mapping[str, tuple[list[Fault], float, list[object]]]] = {
    "a parent never comes back": ([Fault(KILL, 0.0, inf, PARENT)], IDLE_S, [ParentGone()]),
    "a parent dies while a child is cut off": (
        [PARENT_IS_GONE, Fault(BROKER, 0.0, 0.1, detail="empty")],
        IDLE_S,
        [ParentGone()],
    ),
    # the message that said so is lost; nobody sends, and the broker is not away
    "a parent ends while the broker is away": (
        [
            PARENT_IS_GONE,
            Fault(BROKER, 0.0, 2.0, detail="empty"),
            Fault(MUTE, 0.0, inf, detail="state"),
        ],
        IDLE_S + ASK_MOST_S,
        [ParentGone()],
    ),
    "an old end was disproved": (
        [
            Fault(REMAINS, 0.0, 0.0, PARENT, detail="finished"),
            Fault(CUT, 0.0, 0.0, "device-0", inf),
            replace(PARENT_IS_GONE, at_s=10.0),
            Fault(BROKER, 10.0, 0.1, detail="empty"),
        ],
        IDLE_S + 10.0,
        [ParentGone()],
    ),
    "a run ends while a child is away": (
        [
            Fault(CUT, 0.0, 3.0, "device-0"),
            Fault(END, 1.0, 0.0, PARENT, detail="finished"),
            replace(PARENT_IS_GONE, at_s=2.0),
        ],
        4.0,
        [OVER[NodeState.FINISHED]],
    ),
    "a run ends under a new parent while a child is away": (
        [
            Fault(CUT, 0.0, 3.0, "device-0"),
            Fault(KILL, 0.0, 0.0, PARENT, 0.5),
            Fault(END, 1.0, 0.0, PARENT, detail="finished"),
            replace(PARENT_IS_GONE, at_s=2.0),
        ],
        IDLE_S,
        [OVER[NodeState.FINISHED]],
    ),
    # whose process stays for farewells
    **{
        f"a stranger takes the name of a parent, whose run has {state}": (
            [
                Fault(STRANGER, 0.0, 0.0, PARENT, detail="ready"),
                *(Fault(END, at_s, 0.0, PARENT, detail=state) for at_s in (0.1, 0.2, 0.3)),
            ],
            1.0,
            [OVER[state]],
        )
        for state in OVER
    },
    **{
        f"a stranger in the name of a living {name} is {state}": (
            [Fault(STRANGER, 0.0, 0.0, name, detail=state)],
            1.0,
            [],
        )
        for state, name in itertools.product(FINAL, (PARENT, "device-0"))
    },
}


@pytest.mark.parametrize("name", ENDS)
def test_a_child_ends_once_when_its_run_does(name: str) -> None:
    lab = settled(1)
    child = lab.child
    faults, at_s, ends = ENDS[name]
    lab.hit(*faults)
    if at_s >= IDLE_S:
        lab.rest(IDLE_S - 1.0)
        assert not child.of(ParentGone)
        at_s -= IDLE_S - 2.0
    for seconds in (at_s, IDLE_S + 1.0):
        lab.rest(seconds)
        assert child.of(ParentGone | RunEnded | BrokerAway) == ends
    if not ends:
        lab.complete()
        assert lab.kinds["Question"] <= 4


# The parent elsewhere


def gone_parent() -> tuple[Lab, ChildNode]:
    lab = settled(1)
    lab.kill(PARENT, will_after_s=0.0)
    lab.rest(1.0)
    return lab, lab.child


SPEC = Announcement("{}", LAYOUT)
HERE = Presence(NodeState.READY, "cloud")


def elsewhere(child: ChildNode, message: Message | None = None, *, sender: str = PARENT) -> None:
    """Take an answer of a parent that went on to another run, or another message from there."""
    child.inject(sender, "elsewhere", message or Alive(child.process, HERE, SPEC), run="run-2")


def test_a_parent_that_went_on_to_another_run_is_followed_once() -> None:
    lab, child = gone_parent()
    for _ in range(3):
        elsewhere(child)
        lab.rest(0.1)
    assert child.of(ParentMoved) == [ParentMoved("run-2", "elsewhere", SPEC)]
    lab.rest(2 * IDLE_S)
    assert not child.of(ParentGone)


class Meter(NoMeter):
    """A kernel that counts the bytes of the present socket."""

    count = 50_000

    def received(self) -> int:
        return self.count


def test_the_count_of_a_new_connection_is_no_sign_of_the_parent() -> None:
    """It begins at zero again, so it differs from the last one; the parent went on to another run
    meanwhile.
    """
    lab = settled(1)
    child = lab.child
    child.link.meter = meter = Meter()
    lab.rest(QUIET_S)
    child.disconnect(back_after_s=QUIET_S + 1.0)
    lab.kill(PARENT, will_after_s=inf)
    lab.rest(QUIET_S)
    meter.count = 100
    lab.rest(1.1)
    elsewhere(child)
    lab.rest(0.1)
    assert len(child.of(ParentMoved)) == 1


def test_only_an_answer_to_its_own_question_moves_a_child() -> None:
    lab, child = gone_parent()
    elsewhere(child, Alive("of another", HERE, SPEC))
    elsewhere(child, Alive(child.process, HERE))
    elsewhere(child, Task(Key(0, 0, 0), 1, BLOB, None))
    elsewhere(child, sender="stranger")
    lab.rest(1.0)
    assert not child.of(ParentMoved | TaskReceived) and child.refused() == 3


def test_a_child_whose_parent_is_there_goes_nowhere() -> None:
    lab = settled(1)
    elsewhere(lab.child)
    lab.rest(1.0)
    assert not lab.child.of(ParentMoved)
    lab.complete()


# Farewells


def test_a_farewell_is_repeated_until_it_is_answered() -> None:
    lab = settled(2)
    lab.round()
    child = lab.child
    assert child.session.goodbye_answered
    child.send_goodbye(ChildReport("below"))
    lab.mute("device-0/inbox/cloud")
    lab.rest(10 * FAREWELL_S)
    assert not child.session.goodbye_answered and 10 <= lab.kinds["Farewell"] <= 12
    assert lab.parent.session.farewells == {"device-0"}
    lab.mute()
    lab.rest(2 * FAREWELL_S)
    assert child.session.goodbye_answered
    assert lab.parent.of(GoodbyeReceived)[0] == GoodbyeReceived("device-0")
    before = lab.kinds["Farewell"]
    lab.rest(10 * FAREWELL_S)
    assert lab.kinds["Farewell"] == before
    link = lab.parent.session.ledger.links()["device-0"]
    assert link.sent_model_payload == link.received_model_payload == MODEL_BYTES


def test_a_reply_to_the_last_report_is_not_counted() -> None:
    """The report cannot include it, and links.csv is made of reports."""
    lab = Lab(names_of(1))
    lab.round()
    counted = []
    for message in (None, Goodbye(), Acknowledgement(Key(0, 0, 0), "")):
        if message is not None:
            lab.child.inject(PARENT, lab.parent.process, message)
        counted.append(lab.child.link.counters.traffic(PARENT).received_control_message)
    assert counted[0] == counted[1] < counted[2]


def test_a_farewell_outlives_a_broker_that_restarts() -> None:
    lab = settled(1)
    lab.child.disconnect(will_after_s=0.0, back_after_s=3.0)
    lab.child.send_goodbye()
    lab.rest(2.0)
    assert lab.kinds["Farewell"] == 0
    lab.rest(2.0)
    assert lab.child.session.goodbye_answered
    assert lab.kinds["Farewell"] == 1 and lab.kinds["Reports"] == 0


def test_a_farewell_is_sent_at_once_on_a_new_connection() -> None:
    lab = settled(1)
    lab.mute("inbox")
    lab.child.send_goodbye()
    lab.rest(0.1)
    lab.child.disconnect(back_after_s=0.1)
    lab.rest(0.2)
    assert lab.kinds["Farewell"] == 2


@pytest.mark.parametrize("keep_state", [True, False])
@pytest.mark.parametrize("announced", [True, False])
def test_who_leaves_clears_what_it_kept_on_the_broker(keep_state: bool, announced: bool) -> None:
    lab = Lab(names_of(1))
    kept, state = lab.broker.retained, topics.state(LAB, RUN, PARENT)
    spec = topics.spec(LAB, RUN, PARENT)
    if announced:
        lab.parent.link.announce(SPEC)
    lab.parent.set_state(NodeState.FINISHED)
    lab.rest(1.0)
    assert state in kept and (spec in kept) is announced
    lab.parent.leave(keep_state=keep_state)
    lab.rest(1.0)
    assert (state in kept) is keep_state and spec not in kept
    assert lab.child.of(RunEnded) == [RunEnded(NodeState.FINISHED, "")]


# The broker


def messages_in(outputs: Iterable[object]) -> list[object]:
    return [serialization.decode(o.body)[1] for o in outputs if isinstance(o, Publish) and o.body]


def test_nothing_is_sent_while_the_broker_is_away_and_nothing_is_kept() -> None:
    lab = settled(1)
    lab.open()
    lab.rest(1.0)
    for node in (lab.parent, lab.child):
        node.disconnect()
        session = node.session
        for state in (NodeState.INIT, NodeState.READY, NodeState.READY):
            session.set_state(state, samples=10)
        for number in range(50):
            session.tick(lab.now + number)
            assert session.to_send(lab.now + number) == [] and node.link.outbox.empty
        session.connected(lab.now)
        subscribed, second, *others = session.to_send(lab.now)
        assert isinstance(subscribed, Subscribe) and subscribed.first
        assert not isinstance(second, Subscribe)
        sent = [o for o in (second, *others) if isinstance(o, Publish)]
        assert [o.retain for o in sent if o.topic.endswith("/state")] == [True]


def test_streams_are_subscribed_before_they_are_asked_for() -> None:
    lab = settled(1)
    passes: list[list[Any]] = []
    inner = lab.child.session.to_send

    def watched(now: float) -> list[Any]:
        passes.append(inner(now))
        return passes[-1]

    lab.child.session.to_send = watched  # type: ignore[method-assign]
    lab.round()
    streams = 0
    for out in passes:
        asked = False
        for each in out:
            asked = asked or any(isinstance(message, Ask) for message in messages_in([each]))
            streams += isinstance(each, Subscribe)
            assert not (asked and isinstance(each, Subscribe))
    assert streams == 1


INLINE = TransferSettings(inline_bytes=262_144, idle_s=60.0)


def test_a_packet_limit_of_the_broker_is_kept() -> None:
    lab = Lab(names_of(1), transfer=INLINE)
    offers = lab.parent.link.offers
    lab.parent.session.connected(lab.now, packet_most=40_000)
    assert offers.cut(["device-0"])[0] == 40_000
    for size, fits in ((50_000, False), (30_000, True)):
        data = bytes(size)
        inline = offers.add(manifest_of(data), memoryview(data), ["device-0"])
        assert inline == (data if fits else None)


def test_a_model_that_does_not_fit_in_a_packet_with_its_reports_is_fetched() -> None:
    lab = Lab(names_of(1), transfer=INLINE)
    link = lab.parent.link
    lab.rest(1.0)
    link.connected(lab.now, inboxes=(), packet_most=40_000)
    model, plans = bytes(39_000), '{"up": [' + "{}," * 700 + "{}]}"
    result = Result(Key(0, 0, 0), manifest_of(model), model, WORK, 6, (), plans)
    sent = [
        each for each in link.to_send(lab.now, [("device-0", result)]) if isinstance(each, Publish)
    ]
    (body,) = (each.body for each in sent if each.topic.endswith("/device-0/inbox/cloud"))
    assert len(body) < 40_000 and serialization.decode(body)[1] == replace(result, inline=None)


# A connection, and what belongs to it


def fetching_child() -> tuple[Lab, ChildNode, str]:
    """Return a lab whose child has its task and gets no chunk of its model, and that model's blob."""
    lab = settled(1)
    lab.mute(f"{PARENT}/blob")
    lab.open()
    lab.until(lab.child.link.receiver.wanted)
    lab.rest(0.1)
    ((_, blob),) = lab.child.link.receiver.wanted()
    return lab, lab.child, blob


def offered_upload() -> tuple[Lab, ChildNode]:
    """Return a lab whose child offers a result of which no chunk arrives."""
    lab = settled(1)
    lab.mute("device-0/blob")
    lab.open()
    lab.until(lab.parent.link.receiver.wanted)
    lab.rest(0.1)
    return lab, lab.child


def test_a_chunk_that_was_placed_and_is_not_wanted_any_more_is_written_nowhere() -> None:
    lab, child, blob = fetching_child()
    assert child.task is not None
    topic = topics.chunk(LAB, RUN, PARENT, "all", blob, 0, 1)
    landing = child.link.place(topic, CHUNK)
    assert landing is not None and landing.view is not None
    child.session.stop_fetching(child.task, lab.now)
    assert landing.view is None
    child.link.landed(topic, landing, lab.now)
    for each in (topic, topics.state(LAB, RUN, PARENT), "no topic"):
        assert child.link.place(each, CHUNK) is None


def test_what_was_in_flight_is_asked_for_again_on_a_new_connection() -> None:
    lab, child, blob = fetching_child()
    child.link.disconnected(lab.now)
    child.session.connected(lab.now)
    sent = messages_in(child.session.to_send(lab.now))
    (ask,) = (each for each in sent if isinstance(each, Ask))
    assert ask.blob == blob and ask.restart


def test_what_waits_dies_with_its_connection() -> None:
    lab = settled(1, link=LinkSettings(down_mbit=0.001))
    lab.open()
    lab.rest(0.5)
    link = lab.parent.link
    assert not link.outbox.empty
    link.disconnected(lab.now)
    assert link.outbox.empty


def test_an_ask_is_answered_and_one_of_a_lost_connection_is_not() -> None:
    lab = settled(1)
    session, blob = lab.parent.session, "0" * 16
    for lost in (False, True):
        lab.parent.inject("device-0", lab.child.process, Ask(blob, b"x", 0, 0, 8, True))
        if lost:
            session.link.disconnected(lab.now)
            session.connected(lab.now)
        assert (Gone(blob) in messages_in(session.to_send(lab.now))) is not lost


def test_a_chunk_of_another_run_is_none_of_ours() -> None:
    _, child, blob = fetching_child()
    for run, wanted in (("run-2", False), (RUN, True)):
        topic = topics.chunk(LAB, run, PARENT, "all", blob, 0, 1)
        assert (child.link.place(topic, CHUNK) is not None) is wanted
        child.receive(topic, model_of(0)[:CHUNK])
        assert (child.link.receiver.lacks(PARENT, blob) == 5) is wanted
    assert child.refused(Refusal.STRANGER) == 1


def test_a_child_that_died_is_served_no_more_and_frees_its_slot() -> None:
    lab, _, _ = fetching_child()
    for serves in (True, False):
        assert lab.parent.link.sender.serving("device-0") is serves
        lab.kill(will_after_s=0.0)
        lab.rest(0.1)
    lab = settled(2, transfer=CHUNKED.model_copy(update={"upload_slots": 1}))
    lab.mute("device-0/blob")
    lab.children["device-1"].train_s = 4.0
    lab.open()
    lab.until(lambda: len(lab.parent.of(UploadAnnounced)) == 2)
    lab.rest(1.0)
    lab.kill(will_after_s=0.0)
    lab.rest(1.0)
    assert lab.coordinator.children["device-1"].state is ChildState.ACCEPTED


def test_a_child_that_reconnects_is_asked_for_the_rest_at_once() -> None:
    lab, child = offered_upload()
    before = lab.kinds["Ask"]
    child.disconnect(back_after_s=0.0)
    lab.rest(0.2)
    assert lab.kinds["Ask"] == before + 1


def announced_upload(lab: Lab) -> UploadAnnounced:
    """Return the only upload, for which a busy shell still looks for a buffer."""
    lab.parent.busy = True
    lab.until(lambda: lab.parent.of(UploadAnnounced))
    (upload,) = lab.parent.of(UploadAnnounced)
    return upload


def test_a_buffer_that_was_found_too_late_is_not_written() -> None:
    lab = settled(2)
    lab.children["device-1"].train_s = 100.0
    lab.open(closing=quorum_of(1, 4.0))
    upload = announced_upload(lab)
    lab.kill(will_after_s=0.0, for_s=0.0)
    lab.rest(0.5)
    lab.parent.session.fetch(upload, memoryview(bytearray(MODEL_BYTES)), lab.now)
    assert not lab.parent.link.receiver.wanted() and not lab.parent.session._pending


def test_an_upload_that_is_announced_twice_at_once_is_fetched_into_one_buffer() -> None:
    """Two changes of the session come in one pass, each with an announcement; both fetches follow."""
    lab = settled(1)
    lab.open()
    upload = announced_upload(lab)
    first, second = bytearray(MODEL_BYTES), bytearray(MODEL_BYTES)
    lab.parent.buffers["device-0", upload.result.model.blob] = first
    assert lab.parent.session.fetch(upload, memoryview(first), lab.now)
    assert not lab.parent.session.fetch(upload, memoryview(second), lab.now)
    lab.parent.wake()
    lab.finish()
    assert first == lab.parent.expected["device-0"] and not any(second)


@pytest.mark.parametrize("why", ["the round closed", "its child restarted"])
def test_an_upload_that_is_void_is_not_written_any_more(why: str) -> None:
    lab, child = offered_upload()
    (buffer,) = lab.parent.buffers.values()
    manifest, link = manifest_of(child.answer), lab.parent.link
    if why == "the round closed":
        lab.parent.session.end_round(lab.now)
    else:
        lab.kill(will_after_s=inf, for_s=0.0)
        lab.rest(0.2)
    for index in range(manifest.chunks):
        topic = topics.chunk(LAB, RUN, "device-0", "all", manifest.blob, index, index + 1)
        data = child.answer[manifest.span(index)]
        assert link.place(topic, len(data)) is None
        lab.parent.receive(topic, data)
    assert not any(buffer) and not link.receiver.wanted() and not lab.parent.session._pending


def test_a_parent_that_comes_back_learns_at_once_what_is_offered() -> None:
    lab, child = offered_upload()
    lab.rest(10.0)  # the result is repeated each 5 s by now
    lab.parent.disconnect(will_after_s=0.0, back_after_s=0.5)
    before = lab.kinds["Result"]
    lab.rest(0.6)
    assert lab.kinds["Result"] == before + 1
    assert child.session.participant.state is ParticipantState.ANNOUNCING


def test_a_child_counts_its_bytes_for_each_ledger_of_its_parent() -> None:
    lab, counted = settled(1), list[int]()
    for number, books in enumerate("aba"):
        own = lab.parent.link.own
        own.presence = replace(own.presence, ledger=books)
        lab.parent.set_state(NodeState.READY)
        lab.rest(0.1)
        lab.round(model=model_of(number))
        counted.append(lab.child.session._traffic()[0].received_model_payload)
    assert counted == [MODEL_BYTES, MODEL_BYTES, 3 * MODEL_BYTES]
