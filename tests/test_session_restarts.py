"""Both sessions of a link: nodes that restart, brokers that go away, connections that break."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import pytest
from session_lab import (
    CHUNK,
    LAB,
    LAYOUT,
    PARENT,
    RUN,
    ChildNode,
    Lab,
    NoMeter,
    lab_at,
    manifest_of,
    model_of,
    names_of,
    settled,
)

from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.work import Work
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.admission import Refusal
from fedstrata.common.protocol.child_session import FAREWELL_S, QUIET_S
from fedstrata.common.protocol.events import (
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
    NodeState,
    Presence,
    Result,
    Task,
)
from fedstrata.common.protocol.outbox import Publish, Subscribe
from fedstrata.common.protocol.participant import ParticipantState
from fedstrata.common.protocol.presence import Proof
from fedstrata.common.settings.closing import Closing
from fedstrata.common.settings.links import LinkSettings
from tests.helpers.session_messages import BLOB, IDLE_S, inject, leave_remains, silence_chunks

# Restarts


def restart_child(lab: Lab, will_after_s: float | None) -> None:
    lab.kill("device-0", will_after_s=will_after_s)
    lab.start("device-0")


RESTARTS: Final[Mapping[str, Callable[[Lab], None]]] = {
    "the parent": lambda lab: lab.restart_parent(),
    "a child without a will": lambda lab: restart_child(lab, None),
    "a child": lambda lab: restart_child(lab, 0.0),
    "a child whose will is late": lambda lab: restart_child(lab, 5.0),
    "a broker that is empty then": lambda lab: lab.restart_broker(down_s=1.0, retained={}),
    "a broker": lambda lab: lab.restart_broker(down_s=1.0),
}


@pytest.mark.parametrize("who", RESTARTS)
@pytest.mark.parametrize("state", ParticipantState)
def test_a_restart_costs_what_the_process_was_training(state: ParticipantState, who: str) -> None:
    lab = lab_at(state)
    RESTARTS[who](lab)
    if state is ParticipantState.IDLE:
        lab.open()
    lab.finish()
    again = who.startswith("a child") and state is ParticipantState.DONE
    assert len(lab.child.trained) == (not again)
    assert len(lab.children["device-1"].trained) == 1
    lab.check()


@pytest.mark.parametrize("who", ["parent", "child"])
def test_a_process_that_dies_again_and_again_is_followed(who: str) -> None:
    lab = settled(2)
    lab.open()
    for number in range(20):
        at = 0.37 * number
        if who == "parent":
            lab.loop.after(at, lambda: lab.restart_parent(will_after_s=3.0))
        else:
            lab.loop.after(
                at, lambda: (lab.kill("device-0", will_after_s=3.0), lab.start("device-0"))
            )
    lab.finish()
    lab.check()


def test_a_result_that_its_child_no_longer_holds_is_asked_for_again() -> None:
    lab = settled(1)
    lab.open()
    child = lab.child
    lab.until(lambda: bool(lab.parent.of(UploadAnnounced)))
    child.session.link.offers.retire(child._answer_blob)
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
    first = lab.child
    second = lab.start("device-0")
    lab.rest(1.0)
    assert second.of(NameTaken) and not first.of(NameTaken)
    second.disconnect(will_after_s=0.0)
    second.alive = False
    assert set(lab.round().results) == {"device-0"} and len(first.trained) == 1


# The parent elsewhere


def gone_parent() -> tuple[Lab, ChildNode]:
    lab = settled(1)
    lab.stop_parent(will_after_s=0.0)
    lab.rest(1.0)
    return lab, lab.child


def alive(child: ChildNode, *, nonce: str = "", announced: bool = True) -> Alive:
    announcement = Announcement("{}", LAYOUT) if announced else None
    return Alive(nonce or child.process, Presence(NodeState.READY, "cloud"), announcement)


def test_a_parent_that_went_on_to_another_run_is_followed_once() -> None:
    lab, child = gone_parent()
    for _ in range(3):
        inject(child, PARENT, "elsewhere", alive(child), run="run-2")
        lab.rest(0.1)
    assert child.of(ParentMoved) == [ParentMoved("run-2", "elsewhere", Announcement("{}", LAYOUT))]
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
    child.session.link.meter = meter = Meter()
    lab.rest(QUIET_S)
    child.disconnect(will_after_s=None)
    lab.stop_parent(will_after_s=None)
    lab.rest(QUIET_S + 1.0)
    meter.count = 100
    child.connect()
    lab.rest(0.1)
    inject(child, PARENT, "elsewhere", alive(child), run="run-2")
    lab.rest(0.1)
    assert len(child.of(ParentMoved)) == 1


def test_only_an_answer_to_its_own_question_moves_a_child() -> None:
    lab, child = gone_parent()
    inject(child, PARENT, "elsewhere", alive(child, nonce="of another"), run="run-2")
    inject(child, PARENT, "elsewhere", alive(child, announced=False), run="run-2")
    inject(child, PARENT, "elsewhere", Task(Key(0, 0, 0), 1, BLOB, None), run="run-2")
    inject(child, "stranger", "elsewhere", alive(child), run="run-2")
    lab.rest(1.0)
    assert (
        not child.of(ParentMoved)
        and not child.of(TaskReceived)
        and child.session.link.refusals.total == 3
    )


def test_a_child_whose_parent_is_there_goes_nowhere() -> None:
    lab = settled(1)
    child = lab.child
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


# The end


def test_a_farewell_is_repeated_until_it_is_answered() -> None:
    lab = settled(2)
    lab.round()
    child = lab.child
    assert child.session.goodbye_answered
    child.session.send_goodbye((ChildReport("below"),), lab.now)
    child.wake()
    lab.broker.drop = lambda topic: topic.endswith("device-0/inbox/cloud")
    lab.rest(10 * FAREWELL_S)
    assert not child.session.goodbye_answered and 10 <= lab.kinds["Farewell"] <= 12
    assert lab.parent.session.farewells == {"device-0"}
    lab.broker.drop = lambda topic: False
    lab.rest(2 * FAREWELL_S)
    assert child.session.goodbye_answered and lab.parent.of(GoodbyeReceived)[0] == GoodbyeReceived(
        "device-0"
    )
    before = lab.kinds["Farewell"]
    lab.rest(10 * FAREWELL_S)
    assert lab.kinds["Farewell"] == before
    (link,) = [lab.parent.session.ledger.links()["device-0"]]
    assert link.sent_model_payload == link.received_model_payload == manifest_of(model_of(0)).size


def test_a_reply_to_the_last_report_is_not_counted() -> None:
    """The report cannot include it, and links.csv is made of reports."""
    lab = Lab(names_of(1))
    lab.round()
    child, session = lab.child, lab.parent.process

    def counted() -> int:
        return child.session.link.counters.traffic(PARENT).received_control_message

    before = counted()
    inject(child, PARENT, session, Goodbye())
    assert counted() == before
    inject(child, PARENT, session, Acknowledgement(Key(0, 0, 0), ""))
    assert counted() > before


def test_a_farewell_outlives_a_broker_that_restarts() -> None:
    lab = settled(1)
    child = lab.child
    child.disconnect(will_after_s=0.0, back_after_s=3.0)
    child.session.send_goodbye((), lab.now)
    child.wake()
    lab.rest(2.0)
    assert lab.kinds["Farewell"] == 0
    lab.rest(2.0)
    assert (
        child.session.goodbye_answered and lab.kinds["Farewell"] == 1 and lab.kinds["Reports"] == 0
    )


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
    assert lab.child.of(RunEnded) == [RunEnded(NodeState.FINISHED, "")]


def test_the_end_of_a_run_is_reported_once() -> None:
    lab = settled(1)
    for _ in range(3):
        lab.parent.set_state(NodeState.FAILED, reason="disk full")
        lab.rest(0.1)
    assert lab.child.of(RunEnded) == [RunEnded(NodeState.FAILED, "disk full")]


# The broker


def test_nothing_is_sent_while_the_broker_is_away_and_nothing_is_kept() -> None:
    lab = settled(1)
    lab.open()
    lab.rest(1.0)
    child = lab.child
    for node in (lab.parent, child):
        node.disconnect(will_after_s=None)
        for state in (NodeState.INIT, NodeState.READY, NodeState.READY):
            node.session.set_state(state, samples=10)
        for number in range(50):
            node.session.tick(lab.now + number)
            assert node.session.to_send(lab.now + number) == [] and node.session.link.outbox.empty
        node.session.connected(lab.now)
        out = node.session.to_send(lab.now)
        assert (
            isinstance(out[0], Subscribe)
            and out[0].first
            and not any(isinstance(o, Subscribe) for o in out[1:2])
        )
        states = [o for o in out if isinstance(o, Publish) and o.topic.endswith("/state")]
        assert len(states) == 1 and states[0].retain


def messages_in(outputs: Iterable[object]) -> list[object]:
    return [serialization.decode(o.body)[1] for o in outputs if isinstance(o, Publish) and o.body]


def test_streams_are_subscribed_before_they_are_asked_for() -> None:
    lab = settled(1)
    passes: list[list[object]] = []
    inner = lab.child.session.to_send

    def watched(now: float) -> list[Any]:
        passes.append(out := inner(now))
        return out

    lab.child.session.to_send = watched  # type: ignore[method-assign]
    lab.round()
    for out in passes:
        asks = [
            place
            for place, o in enumerate(out)
            if any(isinstance(each, Ask) for each in messages_in([o]))
        ]
        streams = [place for place, o in enumerate(out) if isinstance(o, Subscribe)]
        assert not asks or not streams or max(streams) < min(asks)
    assert sum(isinstance(o, Subscribe) for out in passes for o in out) == 1


def test_a_packet_limit_of_the_broker_is_kept() -> None:
    lab = Lab(names_of(1), transfer=TransferSettings(inline_bytes=262_144, idle_s=60.0))
    session = lab.parent.session
    session.connected(lab.now, packet_most=40_000)
    assert session.link.offers.cut(["device-0"])[0] == 40_000
    large = manifest_of(bytes(50_000))
    assert session.link.offers.add(large, memoryview(bytes(50_000)), ["device-0"]) is None
    small = manifest_of(bytes(30_000))
    assert session.link.offers.add(small, memoryview(bytes(30_000)), ["device-0"]) == bytes(30_000)


def test_a_model_that_does_not_fit_in_a_packet_with_its_reports_is_fetched() -> None:
    lab = Lab(names_of(1), transfer=TransferSettings(inline_bytes=262_144, idle_s=60.0))
    link = lab.parent.session.link
    lab.rest(1.0)
    link.connected(lab.now, inboxes=(), packet_most=40_000)
    model = bytes(39_000)
    result = Result(
        Key(0, 0, 0),
        manifest_of(model),
        model,
        Work(10, 0.5, 1, 6, 1.0, 0.0, 0.0),
        6,
        (),
        '{"up": [' + "{}," * 700 + "{}]}",
    )
    sent = link.to_send(lab.now, [("device-0", result)])
    (body,) = (
        each.body
        for each in sent
        if isinstance(each, Publish) and each.topic.endswith("/device-0/inbox/cloud")
    )
    assert len(body) < 40_000 and serialization.decode(body)[1] == replace(result, inline=None)


def test_a_chunk_that_was_placed_and_is_not_wanted_any_more_is_written_nowhere() -> None:
    lab = settled(1)
    lab.open()
    child = lab.child
    silence_chunks(lab, PARENT)
    lab.until(lambda: child.session.link.receiver.wanted() != set())
    assert child.task is not None
    manifest = child.task.model
    topic = topics.chunk(LAB, RUN, PARENT, "all", manifest.blob, 0, 1)
    landing = child.session.link.place(topic, CHUNK)
    assert landing is not None and landing.view is not None
    child.session.stop_fetching(child.task, lab.now)
    assert landing.view is None
    child.session.link.landed(topic, landing, lab.now)
    assert child.session.link.place(topic, CHUNK) is None
    assert child.session.link.place(topics.state(LAB, RUN, PARENT), CHUNK) is None
    assert child.session.link.place("no topic", CHUNK) is None


# A connection, and what belongs to it


def fetching_child(**how: Any) -> tuple[Lab, ChildNode, str]:
    """Return a lab whose child has its task and gets no chunk of its model, and that model's blob."""
    lab = settled(1, **how)
    silence_chunks(lab, PARENT)
    lab.open()
    child = lab.child
    lab.until(lambda: bool(child.session.link.receiver.wanted()))
    lab.rest(0.1)
    ((_, blob),) = child.session.link.receiver.wanted()
    return lab, child, blob


def offered_upload() -> tuple[Lab, ChildNode]:
    """Return a lab whose child offers a result of which no chunk arrives."""
    lab = settled(1)
    silence_chunks(lab, "device-0")
    lab.open()
    lab.until(lambda: bool(lab.parent.session.link.receiver.wanted()))
    lab.rest(0.1)
    return lab, lab.child


def test_what_was_in_flight_is_asked_for_again_on_a_new_connection() -> None:
    lab, child, blob = fetching_child()
    child.session.link.disconnected(lab.now)
    child.session.connected(lab.now)
    (ask,) = (each for each in messages_in(child.session.to_send(lab.now)) if isinstance(each, Ask))
    assert ask.blob == blob and ask.restart


def test_what_waits_dies_with_its_connection() -> None:
    lab = settled(1, link=LinkSettings(down_mbit=0.001))
    lab.open()
    lab.rest(0.5)
    link = lab.parent.session.link
    assert not link.outbox.empty
    link.disconnected(lab.now)
    assert link.outbox.empty


def test_an_ask_is_answered_and_one_of_a_lost_connection_is_not() -> None:
    lab = settled(1)
    mine, session = lab.child.process, lab.parent.session
    for lost in (False, True):
        inject(lab.parent, "device-0", mine, Ask("0" * 16, b"x", 0, 0, 8, True))
        if lost:
            session.link.disconnected(lab.now)
            session.connected(lab.now)
        assert (Gone("0" * 16) in messages_in(session.to_send(lab.now))) is not lost


def test_a_chunk_of_another_run_is_none_of_ours() -> None:
    _, child, blob = fetching_child()
    data = model_of(0)[:CHUNK]
    for run, wanted in (("run-2", False), (RUN, True)):
        topic = topics.chunk(LAB, run, PARENT, "all", blob, 0, 1)
        assert (child.session.link.place(topic, CHUNK) is not None) is wanted
        child.receive(topic, data)
        assert (child.session.link.receiver.lacks(PARENT, blob) == 5) is wanted
    assert child.session.link.refusals.of(Refusal.STRANGER) == 1


def test_a_child_that_died_is_served_no_more_and_frees_its_slot() -> None:
    lab, _, _ = fetching_child()
    assert lab.parent.session.link.sender.serving("device-0")
    lab.kill("device-0", will_after_s=0.0)
    lab.rest(0.1)
    assert not lab.parent.session.link.sender.serving("device-0")
    lab = settled(2, transfer=TransferSettings(inline_bytes=0, idle_s=60.0, upload_slots=1))
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
    lab = settled(2)
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


def test_an_upload_that_is_announced_twice_at_once_is_fetched_into_one_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two changes of the session come in one pass, each with an announcement; both fetches follow."""
    lab = settled(1)
    lab.open()
    monkeypatch.setattr(lab.parent, "_fetch", lambda event: None)  # as a shell that is busy
    lab.until(lambda: bool(lab.parent.of(UploadAnnounced)))
    (upload,) = lab.parent.of(UploadAnnounced)
    first, second = (bytearray(upload.result.model.size) for _ in range(2))
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
        lab.parent.receive(topic, data)
    assert (
        buffer == bytes(len(buffer)) and not session.link.receiver.wanted() and not session._pending
    )


def test_a_parent_that_comes_back_learns_at_once_what_is_offered() -> None:
    lab, child = offered_upload()
    lab.rest(10.0)  # the result is repeated each 5 s by now
    lab.parent.disconnect(will_after_s=0.0, back_after_s=0.5)
    before = lab.kinds["Result"]
    lab.rest(0.6)
    assert lab.kinds["Result"] == before + 1
    assert child.session.participant.state is ParticipantState.ANNOUNCING


def test_a_farewell_is_sent_at_once_on_a_new_connection() -> None:
    lab = settled(1)
    child = lab.child
    lab.broker.drop = lambda topic: "inbox" in topic
    child.session.send_goodbye((), lab.now)
    child.wake()
    lab.rest(0.1)
    child.disconnect(will_after_s=None, back_after_s=0.1)
    lab.rest(0.2)
    assert lab.kinds["Farewell"] == 2


def test_an_old_end_that_was_disproved_is_forgotten() -> None:
    lab = settled(1)
    child = lab.child
    leave_remains(lab, PARENT, NodeState.FINISHED)
    child.disconnect(will_after_s=None, back_after_s=0.0)
    lab.rest(10.0)
    assert child.session.link.proofs.proof(PARENT) is Proof.PROVEN
    lab.stop_parent(will_after_s=None)
    lab.restart_broker(down_s=0.1, retained={})
    lab.rest(IDLE_S + 1.0)
    assert child.of(ParentGone) and not child.of(RunEnded)


def test_a_parent_that_dies_while_a_child_is_cut_off_is_missed() -> None:
    lab = settled(1)
    child = lab.child
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
    lab = settled(1)
    child, size = lab.child.session, manifest_of(model_of(0)).size
    counted: dict[str, list[int]] = {}
    for books in ("a", "b", "a"):
        lab.parent.session.link.own.presence = replace(
            lab.parent.session.link.own.presence, ledger=books
        )
        lab.parent.set_state(NodeState.READY)
        lab.rest(0.1)
        lab.round(model=model_of(sum(map(len, counted.values())), len(model_of(0))))
        counted.setdefault(books, []).append(child._traffic()[0].received_model_payload)
    assert counted == {"a": [size, 3 * size], "b": [size]}
