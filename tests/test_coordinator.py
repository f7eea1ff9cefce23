"""A coordinator by hand: each message."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest
from session_lab import ALL

from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import RefusedModel
from fedstrata.common.protocol.coordinator import Coordinator
from fedstrata.common.protocol.events import TaskReceived, UploadAnnounced
from fedstrata.common.protocol.limits import ChildLimits, check_report, plans_of
from fedstrata.common.protocol.messages import (
    Acknowledgement,
    Failure,
    Key,
    NodeState,
    Phase,
    Presence,
    Task,
)
from fedstrata.common.protocol.participant import Participant
from fedstrata.common.protocol.round_state import Closed, Restarted, Stalled
from fedstrata.common.runtime.round import WorkResult
from fedstrata.common.settings.closing import Closing
from fedstrata.common.text import JSON_MOST
from tests.helpers.coordinators import (
    OLD,
    OneParent,
    assignments,
    manifest_of,
    progress_of,
    result_of,
    task_of,
)


def test_a_small_model_travels_with_the_first_task_only() -> None:
    one = OneParent(1, ready=False)
    one.presence("device-0", NodeState.READY, 0.0)
    ((_, first),) = one.tasks(0.0)
    assert first.inline == b"x" * 1000 and first.key == one.key
    times = []
    while (due := one.coordinator.next_deadline()) < 19:
        for _, task in one.tasks(due):
            assert task == replace(first, inline=None)
            times.append(due)
    assert times == [1.0, 3.0, 7.0, 12.0, 17.0]


def test_absent_children_get_no_task() -> None:
    one = OneParent(3, ready=False)
    assert one.tasks(5.0) == []
    one.presence("device-0", NodeState.INIT, 5.0)
    one.presence("device-1", NodeState.READY, 5.0)
    assert [name for name, _ in one.tasks(5.0)] == ["device-0", "device-1"]
    one.presence("device-1", NodeState.LOST, 6.0)
    assert [name for name, _ in one.tasks(11.0)] == ["device-0"]
    assert one.coordinator.states() == {
        "device-0": "init",
        "device-1": "lost",
        "device-2": "absent",
    }


def test_a_message_of_an_old_round_does_not_silence_the_task() -> None:
    """A child that works on a round which closed without it reports that for hours; the lost task
    is sent again.
    """
    one, sent = OneParent(1), []
    for tenth in range(1, 20):
        if tenth % 5 == 0:
            one.receive("device-0", progress_of(OLD, done=tenth), tenth / 10)
        sent += one.tasks(tenth / 10)
    assert sent


def test_a_busy_child_gets_its_task_again_only_after_silence() -> None:
    one = OneParent(1)
    for second in range(1, 11):
        one.progress(float(second), done=second)
        assert one.tasks(float(second)) == []
    assert one.tasks(14.9) == [] and len(one.tasks(15.0)) == 1


def test_a_refused_result_leaves_the_round_to_the_others() -> None:
    one = OneParent(3)
    for name in one.names:
        one.result(name, 1.0)
    assert [
        event.child for event in one.events() if isinstance(event, UploadAnnounced)
    ] == one.names
    one.coordinator.refuse("device-1", one.key, reason="holds NaN", now=2.0)
    assert ("device-1", Acknowledgement(one.key, "holds NaN")) in one.acknowledgements(2.0)
    one.result("device-1", 3.0)  # its acknowledgement was lost
    assert one.acknowledgements(3.0) == [("device-1", Acknowledgement(one.key, "holds NaN"))]
    one.coordinator.accept("device-1", one.key, now=3.0)  # too late to change its mind
    one.coordinator.accept("device-0", one.key, now=3.0)
    assert one.events() == []
    one.coordinator.accept("device-2", one.key, now=4.0)
    (closed,) = one.events()
    assert isinstance(closed, Closed) and set(closed.results) == {"device-0", "device-2"}
    assert closed.refused == {"device-1": "holds NaN"} and closed.missing == ()


ABOVE = ChildLimits(aggregators=["institution-0"])


@pytest.mark.parametrize("spread", ["NaN", "-Infinity", "1" + 400 * "0", '"0.1"'])
def test_a_report_whose_spread_no_float_holds_is_refused(spread: str) -> None:
    check_report(
        replace(result_of(Key(1, 0, 0)), plans='{"institution-0": [{"spread": 0.1}]}'), limits=ABOVE
    )
    with pytest.raises(RefusedModel, match="not a finite number"):
        check_report(
            replace(
                result_of(Key(1, 0, 0)), plans=f'{{"institution-0": [{{"spread": {spread}}}]}}'
            ),
            limits=ABOVE,
        )


def test_decisions_that_are_too_long_for_a_message_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    work = WorkResult(
        memoryview(b""),
        Work(1, 0.5, 1, 1, 0.0, 0.0),
        plans={"institution-0": [{"partners": "x" * 5}]},
    )
    task = task_of(Key(1, 0, 0))
    assert json.loads(work.announcement(task, task.model).plans) == work.plans
    result = replace(work, plans={"institution-0": [{"partners": "x" * JSON_MOST}]}).announcement(
        task, task.model
    )
    assert result.plans == "" and plans_of(result) == {}
    assert "the decisions of 1 rules are not reported" in caplog.text


def test_when_all_are_refused_the_round_stalls_and_names_them() -> None:
    one = OneParent(2)
    for name in one.names:
        one.result(name, 1.0)
        one.coordinator.refuse(name, one.key, reason=f"{name} diverged", now=1.0)
    stalled = one.tick(1.0)
    assert stalled is not None
    assert all(
        f"{name} sent a model that was refused: {name} diverged" in stalled.reason
        for name in one.names
    )


def test_a_second_task_is_a_clean_sheet() -> None:
    one = OneParent(2)
    one.result("device-0", 1.0)
    one.coordinator.refuse("device-0", one.key, reason="no", now=1.0)
    one.finish("device-1", 2.0)
    one.events()
    one.key = one.open(local_round=1, now=3.0)
    for name in one.names:
        one.finish(name, 4.0)
    closed = one.closed()
    assert set(closed.results) == set(one.names) and not closed.refused


def test_a_late_result_has_an_acknowledgement_and_is_counted_once() -> None:
    quorum = Closing(rule="quorum", quorum=2, deadline_s=5.0)
    one = OneParent(3, closing=quorum)
    one.finish("device-0", 1.0)
    one.finish("device-1", 2.0)
    one.coordinator.to_send(2.0)
    one.coordinator.tick(5.0)
    (closed,) = [event for event in one.events() if isinstance(event, Closed)]
    assert closed.missing == ("device-2",)
    late = result_of(one.key)
    for now in (6.0, 7.0):  # its repeat, too
        one.receive("device-2", late, now)
        assert one.acknowledgements(now) == [
            ("device-2", Acknowledgement(one.key, "the round has closed"))
        ]
    one.open(local_round=1, now=8.0)
    one.coordinator.to_send(8.0)
    one.receive("device-2", late, 9.0)
    assert (
        "device-2",
        Acknowledgement(one.key, "the round has closed"),
    ) in one.coordinator.to_send(9.0)
    assert one.coordinator.late == 1


def test_a_result_that_was_taken_is_never_called_late() -> None:
    """Its acknowledgement was lost: the child asks again after the round has closed, and after the
    next was opened.
    """
    one = OneParent(1)
    one.finish("device-0", 1.0)
    one.coordinator.to_send(1.0)
    one.result("device-0", 2.0)
    assert one.acknowledgements(2.0) == [("device-0", Acknowledgement(one.key, ""))]
    one.open(local_round=1, now=3.0)
    one.coordinator.to_send(3.0)
    one.result("device-0", 3.5)
    assert ("device-0", Acknowledgement(one.key, "")) in one.coordinator.to_send(3.5)
    assert one.coordinator.late == 0


def test_a_result_that_was_taken_is_not_called_late_after_a_repeat_of_an_earlier_one() -> None:
    """A stranger's, or the network's: the child would discard the state that its next task starts
    from.
    """
    one = OneParent(1)
    first = one.key
    one.finish("device-0", 1.0)
    second = one.key = one.open(local_round=1, now=2.0)
    one.finish("device-0", 3.0)
    one.coordinator.tick(3.0)
    one.coordinator.to_send(3.0)
    one.receive("device-0", result_of(first), 5.0)
    assert one.acknowledgements(5.0) == [
        ("device-0", Acknowledgement(first, "the round has closed"))
    ]
    one.receive("device-0", result_of(second), 7.0)
    one.open(local_round=2, now=8.0)
    one.receive("device-0", result_of(second), 9.0)
    assert {answer for _, answer in one.acknowledgements(9.0)} == {Acknowledgement(second, "")}


def test_a_session_of_the_parent_that_returns_keeps_the_order_of_its_tasks() -> None:
    participant = Participant(idle_s=20.0)
    later, earlier = (Task(Key(0, number, 0), 1, manifest_of(number), None) for number in (1, 0))
    participant.receive(later, now=0.0)
    assert isinstance(participant.next_event(), TaskReceived)
    participant.parent_restarted(1.0)  # a stranger's presence under the parent's name
    participant.parent_restarted(2.0, again=True)
    participant.receive(earlier, now=3.0)
    assert participant.next_event() is None
    participant.parent_restarted(4.0)
    participant.receive(earlier, now=5.0)
    assert isinstance(participant.next_event(), TaskReceived)


def test_a_new_parent_does_not_judge_what_it_never_asked_for() -> None:
    """Before its first round it may be about to open the very one that the result belongs to."""
    coordinator = Coordinator(["device-0"], idle_s=20.0)
    coordinator.receive("device-0", result_of(OLD), now=0.0)
    assert coordinator.to_send(0.0) == [] and coordinator.late == 0


def test_silence_stalls_the_round_and_names_the_child() -> None:
    one = OneParent(3, idle_s=20.0)
    one.finish("device-0", 1.0)
    one.progress(5.0, name="device-1", done=1)
    one.presence("device-2", NodeState.LOST, 6.0)
    assert one.tick(19.9) is None
    stalled = one.tick(25.1)
    assert stalled is not None
    assert "device-1 made no progress for 20 s (its state is ready)" in stalled.reason
    assert "device-2 made no progress for 20 s (its state is lost)" in stalled.reason
    assert "device-0" not in stalled.reason


def test_a_child_that_never_came_is_named() -> None:
    reason = "device-0 made no progress for 20 s (it never came)"
    stalled = OneParent(1, ready=False).tick(20.0)
    assert stalled == Stalled(
        reason, idle=True, failures=frozenset({Failure.NONE}), children=frozenset({"device-0"})
    )


MOVES: dict[str, Callable[[OneParent, int, float], None]] = {
    "steps": lambda one, number, now: one.progress(now, done=number),
    "phases": lambda one, number, now: one.progress(
        now, [Phase.WAITING, Phase.TRAINING][number % 2]
    ),
    "chunks": lambda one, number, now: one.coordinator.progressed("device-0", now=now),
    "part of a chunk down": lambda one, number, now: one.progress(  # 8 kbit/s
        now, Phase.FETCHING, received=19_000 * number, control=100 * number
    ),
    "part of a chunk up": lambda one, number, now: one.progress(
        now, Phase.ANNOUNCING, sent=19_000 * number
    ),
}


@pytest.mark.parametrize(("how", "uploads"), [*((how, False) for how in MOVES), ("chunks", True)])
def test_nobody_is_given_up_while_something_moves(how: str, uploads: bool) -> None:
    one = OneParent(1, idle_s=20.0)
    one.progress(0.0, Phase.FETCHING)
    if uploads:
        one.result("device-0", 0.0)
    for number in range(1, 50):
        now = 19.0 * number
        MOVES[how](one, number, now)
        assert one.tick(now + 0.5) is None
    assert one.tick(now + 20.0) is not None


def test_a_new_session_counts_its_bytes_anew() -> None:
    one = OneParent(1, idle_s=20.0)
    one.progress(1.0, Phase.FETCHING, received=10**9)
    one.presence("device-0", NodeState.READY, 2.0, session="later")
    for number in range(1, 10):
        one.progress(15.0 * number, Phase.FETCHING, received=20_000 * number)
        assert one.tick(15.0 * number + 0.5) is None


@pytest.mark.parametrize(
    ("phase", "done", "each_s", "counts"),
    [
        # messages, each acknowledged
        (Phase.TRAINING, 5, 2.0, {"received": 5004, "sent": 4, "control": 5000}),
        # Models count up to two chunks beyond what has arrived: more bytes are the same chunk
        # again.
        (Phase.FETCHING, 0, 5.0, {"received": 200_000}),
    ],
    ids=["heartbeats", "repeats"],
)
def test_bytes_that_bring_nothing_are_no_progress(
    phase: Phase, done: int, each_s: float, counts: dict[str, int]
) -> None:
    one, stalls = OneParent(1, idle_s=20.0), []
    for number in range(int(300 / each_s)):
        grown = {name: count * number for name, count in counts.items()}
        one.progress(each_s * number, phase, done=done, **grown)
        stalls.append(one.tick(each_s * number))
    assert any(stalls)


@pytest.mark.parametrize("phase", [Phase.FETCHING, Phase.ANNOUNCING])
def test_a_connection_that_carries_no_more_than_the_last_one_is_no_progress(phase: Phase) -> None:
    """Each connection ends after the same part of a chunk, far below the two chunks that count."""
    one, stalls = OneParent(1, idle_s=30.0), []
    one.progress(0.0, phase)
    for number in range(4):
        now = 10.0 * number
        one.progress(now, phase, received=20_000 * number)
        one.progress(now + 8, phase, received=20_000 * (number + 1))
        one.reconnect(now + 9)
        stalls.append(one.tick(now + 9) is not None)
    assert stalls == [False, False, False, True]


def test_a_connection_that_carries_more_than_the_last_one_is_progress() -> None:
    one, total = OneParent(1, idle_s=30.0), 0
    one.progress(0.0, Phase.FETCHING)
    for number in range(1, 5):
        now, total = 20.0 * number, total + 20_000 * number
        one.progress(now, Phase.FETCHING, received=total)
        one.reconnect(now + 1)
        one.progress(now + 2, Phase.FETCHING, received=total)
        assert one.tick(now + 3) is None


def test_an_offer_in_the_queue_for_an_upload_slot_is_not_idle() -> None:
    """It did its part; that others upload before it, for longer than `idle_s`, is no silence of its
    own.
    """
    one = OneParent(3, idle_s=20.0)
    for name in one.names:
        one.result(name, 1.0)
    for now in range(2, 80, 2):
        one.coordinator.progressed("device-0", now=float(now))
        assert one.tick(float(now)) is None
    stalled = one.tick(99.0)  # now nothing moved for any of them
    assert stalled is not None and all(name in stalled.reason for name in one.names)


def test_a_child_that_prepares_is_waited_for_as_long_as_it_gets_on() -> None:
    one = OneParent(1, idle_s=20.0, ready=False)
    one.presence("device-0", NodeState.INIT, 1.0)
    for number in range(1, 50):
        one.coordinator.preparing("device-0", number, waits=False, now=19.0 * number)
        assert (
            one.tick(19.0 * number + 0.5) is None
            and one.coordinator.hanging(19.0 * number + 0.5) == []
        )
    one.presence("device-0", NodeState.READY, 950.0)
    one.progress(951.0)
    assert one.tick(970.0) is None


def test_a_child_that_waits_for_its_own_children_is_not_idle_before_a_round_is_open() -> None:
    parent = Coordinator(["a"], idle_s=20.0)
    parent.presence("a", "s", Presence(NodeState.INIT, "institution"), now=0.0)
    for now in range(0, 900, 19):
        parent.preparing("a", 3, waits=True, now=float(now))
        assert parent.hanging(now + 19.0) == []
    key = parent.open(
        global_round=0, local_round=0, assignments=assignments(["a"]), closing=ALL, now=900.0
    )
    assert key == OLD
    for now in range(900, 921, 4):
        parent.preparing("a", 3, waits=True, now=float(now))
        parent.tick(float(now))
    parent.tick(920.0)
    assert isinstance(parent.next_event(), Stalled)


@pytest.mark.parametrize("reports", [True, False])
def test_a_child_that_hangs_while_it_prepares_is_given_up(reports: bool) -> None:
    one = OneParent(2, idle_s=20.0, ready=False)
    one.presence("device-0", NodeState.INIT, 1.0)
    one.presence("device-1", NodeState.READY, 1.0)
    for now in range(2, 22, 2):
        if reports:
            # the same each time
            one.coordinator.preparing("device-0", 3, waits=False, now=float(now))
        one.progress(float(now), name="device-1", done=now)
    assert one.coordinator.hanging(20.9) == [] and one.coordinator.hanging(22.0) == ["device-0"]
    stalled = one.tick(22.0)
    assert stalled is not None and stalled.idle
    assert "device-0 made no progress for 20 s (its state is init)" in stalled.reason


def test_the_grace_ends_with_its_process() -> None:
    one = OneParent(1, idle_s=20.0, ready=False)
    one.presence("device-0", NodeState.INIT, 1.0)
    one.presence("device-0", NodeState.LOST, 2.0)
    assert one.tick(22.0) is not None


def test_a_child_that_came_back_after_giving_up_works_on() -> None:
    one = OneParent(1, closing=Closing(rule="quorum", quorum=1, deadline_s=5.0))
    one.presence("device-0", NodeState.FAILED, 2.0, reason="no")
    one.presence("device-0", NodeState.READY, 2.0, session="second")
    one.coordinator.tick(2.0)
    assert one.events() == [Restarted("device-0")]
    assert len(one.tasks(2.0)) == 1


def test_a_restarted_child_begins_again() -> None:
    one = OneParent(2)
    one.result("device-0", 1.0)
    one.events()
    one.presence("device-0", NodeState.READY, 2.0, session="new")
    assert one.events() == [Restarted("device-0")]
    assert [name for name, task in one.tasks(2.0) if task.inline] == ["device-0"]
    one.coordinator.accept("device-0", one.key, now=2.1)  # the old process' upload
    assert one.events() == [] and one.coordinator.to_send(2.2) == []
    one.result("device-0", 3.0)
    assert [type(event) for event in one.events()] == [UploadAnnounced]
    one.coordinator.accept("device-0", one.key, now=3.5)
    one.finish("device-1", 4.0)
    one.closed()


def test_the_result_of_a_process_that_died_is_no_result_of_the_round() -> None:
    one = OneParent(2)
    one.result("device-0", 1.0)
    one.presence("device-0", NodeState.READY, 2.0, session="new")
    one.result("device-1", 3.0)
    assert one.coordinator.timeline.last_result is None
    one.result("device-0", 9.0)
    assert one.coordinator.timeline.last_result == 9.0


def test_messages_about_another_round_change_nothing() -> None:
    one = OneParent(1)
    for key in (Key(0, 2, 0), Key(0, 3, 1), Key(1, 3, 0)):
        one.receive("device-0", progress_of(key), 1.0)
        one.receive("device-0", result_of(key), 1.0)
        one.coordinator.accept("device-0", key, now=1.0)
        one.coordinator.refuse("device-0", key, reason="no", now=1.0)
        one.coordinator.retry("device-0", key, now=1.0)
        one.coordinator.declined("device-0", key, "no")
    assert one.events() == []
    assert one.acknowledgements(1.0) == [
        ("device-0", Acknowledgement(Key(0, 2, 0), "the round has closed"))
    ]


@pytest.mark.parametrize("taken", [False, True])
def test_why_a_child_declined_is_named_unless_it_took_its_task_after_all(taken: bool) -> None:
    one = OneParent(1, idle_s=20.0)
    one.coordinator.declined("device-0", one.key, "wrong layout")
    assert one.events() == [] and one.tasks(1.0)  # it is sent again: the next may fit
    if taken:
        one.progress(1.0)
        one.coordinator.declined("device-0", one.key, "of a duplicate, minutes late")
    stalled = one.tick(21.0)
    assert (
        stalled is not None
        and ("it declined its task: wrong layout" in stalled.reason) is not taken
    )
    assert taken is ("declined" not in stalled.reason)


@pytest.mark.parametrize("failure", Failure)
def test_a_child_that_gave_up_is_believed_at_once_and_its_reason_passed_on(
    failure: Failure,
) -> None:
    one = OneParent(2, idle_s=20.0)
    one.progress(1.0)
    failed = Presence(NodeState.FAILED, "device", reason="CUDA out of memory", failure=failure)
    one.coordinator.presence("device-0", "device-0-a", failed, now=2.0)
    assert one.coordinator.next_deadline() <= 2.0
    reason = "device-0 gave up: CUDA out of memory"
    assert one.tick(2.0) == Stalled(
        reason, idle=False, failures=frozenset({failure}), children=frozenset({"device-0"})
    )


def test_a_deadline_that_passed_is_no_reason_to_wake() -> None:
    """What has been judged is judged: a deadline in the past would keep the event loop spinning."""

    def wakes_later(one: OneParent, now: float) -> bool:
        assert one.tick(now) is None
        one.coordinator.to_send(now)
        return one.coordinator.next_deadline() > now

    one = OneParent(3, idle_s=20.0, closing=Closing(rule="quorum", quorum=2, deadline_s=500.0))
    for now in range(200):
        for name in ("device-1", "device-2"):
            one.progress(float(now), name=name, done=now)
        assert wakes_later(one, float(now))
    one = OneParent(2, idle_s=20.0, closing=Closing(rule="all", quorum=1, deadline_s=5.0))
    one.finish("device-0", 1.0)
    one.progress(6.0, name="device-1")
    assert wakes_later(one, 6.0)


def test_no_round_no_deadline() -> None:
    one = OneParent(1)
    one.finish("device-0", 1.0)
    assert one.coordinator.next_deadline() == inf and not one.tasks(100.0)
    one.coordinator.tick(1000.0)
    assert [type(event) for event in one.events()] == [UploadAnnounced, Closed]
