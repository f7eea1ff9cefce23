"""A coordinator by hand: each message, and the table of a child's states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest

from fedstrata.common.errors import RefusedModel
from fedstrata.common.protocol.coordinator import CLOSED
from fedstrata.common.protocol.events import TaskReceived, UploadAnnounced
from fedstrata.common.protocol.limits import ChildLimits, check_report, plans_of
from fedstrata.common.protocol.messages import Failure, Key, NodeState, Phase
from fedstrata.common.protocol.round_state import (
    TRANSITIONS,
    ChildCause,
    ChildInRound,
    ChildState,
    Restarted,
    Stalled,
)
from fedstrata.common.runtime.round import WorkResult
from fedstrata.common.settings.closing import Closing
from fedstrata.common.text import JSON_MOST
from tests.helpers.coordinators import (
    OLD,
    OneChild,
    OneParent,
    due,
    quorum_of,
    result_of,
    results_of,
    task_of,
)
from tests.helpers.session_lab import WORK

# Tasks


def test_a_small_model_travels_with_the_first_task_only() -> None:
    one = OneParent(ready=False)
    one.come()
    ((_, first),) = one.tasks(0.0)
    assert first.inline == b"x" * 1000 and first.key == one.key
    again = "a", replace(first, inline=None)
    repeats = due(one.next_deadline, one.tasks, until_s=19.0)
    assert repeats == [(at, again) for at in (1.0, 3.0, 7.0, 12.0, 17.0)]


def test_absent_children_get_no_task() -> None:
    one = OneParent("abc", ready=False)
    assert one.tasks(5.0) == []
    one.come(5.0, NodeState.INIT)
    one.come(5.0, name="b")
    assert [name for name, _ in one.tasks(5.0)] == ["a", "b"]
    one.come(6.0, NodeState.LOST, name="b")
    assert [name for name, _ in one.tasks(11.0)] == ["a"]
    assert one.states() == {"a": "init", "b": "lost", "c": "absent"}


def test_a_message_of_an_old_round_does_not_silence_the_task() -> None:
    """A child that works on a round which closed without it reports that for hours; the lost task
    is sent again.
    """
    one, sent = OneParent(), []
    for tenth in range(1, 20):
        if tenth % 5 == 0:
            one.progress(tenth / 10, done=tenth, key=OLD)
        sent += one.tasks(tenth / 10)
    assert sent


def test_a_busy_child_gets_its_task_again_only_after_silence() -> None:
    one = OneParent()
    for second in range(1, 11):
        one.progress(second, done=second)
        assert one.tasks(second) == []
    assert one.tasks(14.9) == [] and len(one.tasks(15.0)) == 1


# Results


def test_a_refused_result_leaves_the_round_to_the_others() -> None:
    one = OneParent("abc")
    for name in one.names:
        (event,) = one.announce(1.0, name)
        assert event == UploadAnnounced(name, result_of(one.key))
    refused = [("b", one.key, "holds NaN")]
    one.refuse("b", one.key, reason="holds NaN", now=2.0)
    assert one.answers(2.0) == refused
    assert one.announce(3.0, "b") == []  # its acknowledgement was lost
    assert one.answers(3.0) == refused
    for name in "ba":  # too late to change its mind
        one.accept(name, one.key, now=3.0)
    assert one.events() == []
    one.accept("c", one.key, now=4.0)
    (closed,) = one.events()
    assert results_of(closed) == {"a", "c"}
    assert closed.refused == {"b": "holds NaN"} and closed.missing == ()  # type: ignore[attr-defined]


ABOVE = ChildLimits(aggregators=["institution-0"])


def check_spread(spread: str) -> None:
    plans = f'{{"institution-0": [{{"spread": {spread}}}]}}'
    check_report(replace(result_of(OLD), plans=plans), limits=ABOVE)


@pytest.mark.parametrize("spread", ["NaN", "-Infinity", "1" + 400 * "0", '"0.1"'])
def test_a_report_whose_spread_no_float_holds_is_refused(spread: str) -> None:
    check_spread("0.1")
    with pytest.raises(RefusedModel, match="not a finite number"):
        check_spread(spread)


def test_decisions_that_are_too_long_for_a_message_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = task_of(OLD)
    for length, left_out in ((5, False), (JSON_MOST, True)):
        plans = {"institution-0": [{"partners": "x" * length}]}
        work = WorkResult(memoryview(b""), WORK, plans=plans)
        sent = work.announcement(task, task.model)
        assert (sent.plans == "") is left_out and plans_of(sent) == ({} if left_out else plans)
        assert ("the decisions of 1 rules are not reported" in caplog.text) is left_out


def test_when_all_are_refused_the_round_stalls_and_names_them() -> None:
    one = OneParent("ab")
    for name in one.names:
        one.announce(1.0, name)
        one.refuse(name, one.key, reason="diverged", now=1.0)
    stalled = one.stalls(1.0)
    assert stalled and "a and b sent a model that was refused: diverged" in stalled.reason


def test_a_second_task_is_a_clean_sheet() -> None:
    one = OneParent("ab")
    one.announce(1.0)
    one.refuse("a", one.key, reason="no", now=1.0)
    one.finish(2.0, "b")
    one.start(3, 1, now=3.0)
    assert one.finish(4.0, "a") == []
    (closed,) = one.finish(4.0, "b")
    assert results_of(closed) == {"a", "b"} and not closed.refused  # type: ignore[attr-defined]


def test_a_late_result_has_an_acknowledgement_and_is_counted_once() -> None:
    one = OneParent("abc", closing=quorum_of(2, 5.0))
    one.finish(1.0, "a")
    one.finish(2.0, "b")
    one.to_send(2.0)
    one.tick(5.0)
    (closed,) = one.events()
    assert closed.missing == ("c",)  # type: ignore[attr-defined]
    key = one.key
    for now in (6.0, 7.0, 9.0):  # its repeats, too, and in the next round
        if now == 9.0:
            one.start(3, 1, now=8.0)
            one.to_send(8.0)
        one.announce(now, "c", key)
        assert one.answers(now) == [("c", key, CLOSED)]
    assert one.late == 1


def test_a_result_that_was_taken_is_never_called_late() -> None:
    """Its acknowledgement was lost: the child asks again after the round has closed, and after the
    next was opened.
    """
    one = OneParent()
    key = one.key
    one.finish(1.0)
    one.to_send(1.0)
    one.announce(2.0)
    assert one.answers(2.0) == [("a", key, "")]
    one.start(3, 1, now=3.0)
    one.to_send(3.0)
    one.announce(3.5, key=key)
    assert one.answers(3.5) == [("a", key, "")] and one.late == 0


@pytest.mark.parametrize(("used", "reason"), [((2, 1), ""), ((2, 0), CLOSED)])
def test_a_result_that_an_earlier_process_took_is_not_called_late(
    used: tuple[int, int], reason: str
) -> None:
    one = OneParent("ab", opened=False)
    one.start(3, names=["b"], used={"a": used})
    one.announce(1.0, key=Key(0, 2, 1))
    assert one.answers(1.0) == [("a", Key(0, 2, 1), reason)]
    assert one.late == bool(reason)


def test_a_result_that_was_taken_is_not_called_late_after_a_repeat_of_an_earlier_one() -> None:
    """A stranger's, or the network's: the child would discard the state that its next task starts
    from.
    """
    one = OneParent()
    first = one.key
    one.finish(1.0)
    second = one.start(3, 1, now=2.0)
    one.finish(3.0)
    one.tick(3.0)
    one.to_send(3.0)
    one.announce(5.0, key=first)
    assert one.answers(5.0) == [("a", first, CLOSED)]
    one.announce(7.0)
    one.start(3, 2, now=8.0)
    one.announce(9.0, key=second)
    assert set(one.answers(9.0)) == {("a", second, "")}


def test_a_session_of_the_parent_that_returns_keeps_the_order_of_its_tasks() -> None:
    one, earlier = OneChild(), task_of(OLD)
    later = task_of(Key(0, 1, 0), model=2)
    assert one.take(later) == [TaskReceived(later)]
    one.parent_restarted(1.0)  # a stranger's presence under the parent's name
    one.parent_restarted(2.0, again=True)
    assert one.take(earlier, 3.0) == []
    assert one.take(earlier, 5.0, session="another") == [TaskReceived(earlier)]


def test_a_new_parent_does_not_judge_what_it_never_asked_for() -> None:
    """Before its first round it may be about to open the very one that the result belongs to."""
    one = OneParent(opened=False)
    one.announce(0.0, key=OLD)
    assert one.to_send(0.0) == [] and one.late == 0


# Progress


def idle(name: str, state: str = "its state is ready") -> str:
    return f"{name} made no progress for 20 s ({state})"


def test_silence_stalls_the_round_and_names_the_child() -> None:
    one = OneParent("abc")
    one.finish(1.0)
    one.progress(5.0, name="b", done=1)
    one.come(6.0, NodeState.LOST, name="c")
    assert one.stalls(19.9) is None
    stalled = one.stalls(25.1)
    assert stalled and stalled.reason == f"{idle('b')}; {idle('c', 'its state is lost')}"


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (None, idle("a", "it never came")),
        (NodeState.FAILED, "a gave up: no data"),  # before the round
    ],
)
def test_a_child_that_never_came_or_gave_up_is_named(state: NodeState | None, reason: str) -> None:
    one = OneParent(ready=False, opened=False)
    if state is not None:
        one.come(0.0, state, reason="no data")
    one.start(0, now=1.0)
    failures, children = frozenset({Failure.NONE}), frozenset("a")
    stalled = one.stalls(1.0 if state else 21.0)
    assert stalled == Stalled(reason, idle=state is None, failures=failures, children=children)


MOVES: dict[str, Callable[[OneParent, int, float], object]] = {
    "steps": lambda one, number, now: one.progress(now, done=number),
    "phases": lambda one, number, now: one.progress(
        now, [Phase.WAITING, Phase.TRAINING][number % 2]
    ),
    "chunks": lambda one, number, now: one.progressed("a", now=now),
    "part of a chunk down": lambda one, number, now: one.progress(  # 8 kbit/s
        now, Phase.FETCHING, received=19_000 * number, control=100 * number
    ),
    "part of a chunk up": lambda one, number, now: one.progress(
        now, Phase.ANNOUNCING, sent=19_000 * number
    ),
    "preparing": lambda one, number, now: one.preparing("a", number, waits=False, now=now),
}


@pytest.mark.parametrize(("how", "uploads"), [*((how, False) for how in MOVES), ("chunks", True)])
def test_nobody_is_given_up_while_something_moves(how: str, uploads: bool) -> None:
    one, prepares = OneParent(), how == "preparing"
    if prepares:
        one.come(0.0, NodeState.INIT)
    else:
        one.progress(0.0, Phase.FETCHING)
    if uploads:
        one.announce(0.0)
    for number in range(1, 50):
        now = 19.0 * number
        MOVES[how](one, number, now)
        assert one.stalls(now + 0.5) is None and one.hanging(now + 0.5) == []
    if prepares:
        one.come(now + 19.0)
        one.progress(now := now + 20.0)
        assert one.stalls(now + 19.0) is None
    assert one.stalls(now + 20.0) is not None


def test_a_new_session_counts_its_bytes_anew() -> None:
    one = OneParent()
    one.progress(1.0, Phase.FETCHING, received=10**9)
    one.come(2.0, session="later")
    for number in range(1, 10):
        one.progress(15.0 * number, Phase.FETCHING, received=20_000 * number)
        assert one.stalls(15.0 * number + 0.5) is None


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
    one, stalls = OneParent(), []
    for number in range(int(300 / each_s)):
        grown = {name: count * number for name, count in counts.items()}
        one.progress(each_s * number, phase, done=done, **grown)
        stalls.append(one.stalls(each_s * number))
    assert any(stalls)


@pytest.mark.parametrize(
    ("phase", "each_s", "more", "stalls"),
    [
        (Phase.FETCHING, 10.0, 0, [3]),
        (Phase.ANNOUNCING, 10.0, 0, [3]),
        (Phase.FETCHING, 20.0, 20_000, []),
    ],
)
def test_a_connection_that_carries_no_more_than_the_last_one_is_no_progress(
    phase: Phase, each_s: float, more: int, stalls: list[int]
) -> None:
    """Each connection ends after the same part of a chunk, far below the two chunks that count."""
    one, total, found = OneParent(idle_s=30.0), 0, []
    one.progress(0.0, phase)
    for number in range(4):
        now = each_s * number
        one.progress(now, phase, received=total)
        total += 20_000 + more * number
        one.progress(now + 8.0, phase, received=total)
        for state in (NodeState.LOST, NodeState.READY):
            one.come(now + 9.0, state)
        found += [number] if one.stalls(now + 9.0) else []
    assert found == stalls


def test_an_offer_in_the_queue_for_an_upload_slot_is_not_idle() -> None:
    """It did its part; that others upload before it, for longer than `idle_s`, is no silence of its
    own.
    """
    one = OneParent("abc")
    for name in one.names:
        one.announce(1.0, name)
    for now in range(2, 80, 2):
        one.progressed("a", now=now)
        assert one.stalls(now) is None
    stalled = one.stalls(99.0)  # now nothing moved for any of them
    assert stalled and stalled.children == set(one.names)


def test_a_child_that_waits_for_its_own_children_is_not_idle_before_a_round_is_open() -> None:
    one = OneParent(ready=False, opened=False)
    one.come(0.0, NodeState.INIT)
    for now in range(0, 900, 19):
        one.preparing("a", 3, waits=True, now=now)
        assert one.hanging(now + 19.0) == []
    assert one.start(0, now=900.0) == OLD
    for now in range(900, 920, 4):
        one.preparing("a", 3, waits=True, now=now)
        assert one.stalls(now) is None
    assert one.stalls(920.0) is not None


@pytest.mark.parametrize("reports", [True, False])
def test_a_child_that_hangs_while_it_prepares_is_given_up(reports: bool) -> None:
    one = OneParent("ab", ready=False)
    one.come(1.0, NodeState.INIT)
    one.come(1.0, name="b")
    for now in range(2, 22, 2):
        if reports:
            one.preparing("a", 3, waits=False, now=now)  # the same each time
        one.progress(now, name="b", done=now)
    assert one.hanging(20.9) == [] and one.hanging(22.0) == ["a"]
    stalled = one.stalls(22.0)
    assert stalled and stalled.idle and stalled.reason == idle("a", "its state is init")


def test_the_grace_ends_with_its_process() -> None:
    one = OneParent(ready=False)
    one.come(1.0, NodeState.INIT)
    one.come(2.0, NodeState.LOST)
    assert one.stalls(22.0) is not None


def test_no_child_is_blamed_for_our_own_absence() -> None:
    one = OneParent(idle_s=10.0)
    one.progress(0.0)
    one.reconnected(100.0)
    assert one.stalls(105.0) is None and one.stalls(110.0) is not None


def test_a_connection_that_breaks_again_and_again_ends_a_round_in_which_nothing_moves() -> None:
    """A parent behind a black hole receives messages of its children, but no chunk reaches them."""
    one, stalls = OneParent(idle_s=30.0), []
    one.progress(0.0, Phase.FETCHING)
    for now in range(10, 60, 10):
        one.progress(now - 2, Phase.FETCHING)
        one.reconnected(now)
        stalls += [now] if one.stalls(now) else []
    assert stalls == [50]  # 30 s since the first new connection, besides 2 s away three times


# Restarts


def test_a_child_that_came_back_after_giving_up_works_on() -> None:
    one = OneParent(closing=quorum_of(1, 5.0))
    one.come(2.0, NodeState.FAILED, reason="no")
    one.come(2.0, session="second")
    one.tick(2.0)
    assert one.events() == [Restarted("a")] and len(one.tasks(2.0)) == 1


def test_a_restarted_child_begins_again() -> None:
    one = OneParent("ab")
    one.announce(1.0)
    one.come(2.0, session="new")
    assert one.events() == [Restarted("a")]
    assert [name for name, task in one.tasks(2.0) if task.inline] == ["a"]
    one.accept("a", one.key, now=2.1)  # the old process' upload
    assert one.events() == [] and one.to_send(2.2) == []
    one.finish(3.0, "b")
    assert one.timeline.last_result is None  # the result of the process that died is none
    assert [type(event) for event in one.announce(9.0)] == [UploadAnnounced]
    assert one.timeline.last_result == 9.0
    one.accept("a", one.key, now=9.5)
    assert results_of(one.events()[-1]) == {"a", "b"}


def test_messages_about_another_round_change_nothing() -> None:
    one = OneParent()
    for key in (Key(0, 2, 0), Key(0, 3, 1), Key(1, 3, 0)):
        one.progress(1.0, key=key)
        one.announce(1.0, key=key)
        one.accept("a", key, now=1.0)
        one.refuse("a", key, reason="no", now=1.0)
        one.retry("a", key, now=1.0)
        one.declined("a", key, "no")
    assert one.events() == [] and one.children["a"].state is ChildState.ASSIGNED
    assert one.answers(1.0) == [("a", Key(0, 2, 0), CLOSED)]


@pytest.mark.parametrize("taken", [False, True])
def test_why_a_child_declined_is_named_unless_it_took_its_task_after_all(taken: bool) -> None:
    one = OneParent()
    one.declined("a", one.key, "wrong layout")
    assert one.events() == [] and one.tasks(1.0)  # it is sent again: the next may fit
    if taken:
        one.progress(1.0)
        one.declined("a", one.key, "of a duplicate, minutes late")
    stalled = one.stalls(21.0)
    declined = "" if taken else "; it declined its task: wrong layout"
    assert stalled and stalled.reason == idle("a", f"its state is ready{declined}")


@pytest.mark.parametrize("failure", Failure)
def test_a_child_that_gave_up_is_believed_at_once_and_its_reason_passed_on(
    failure: Failure,
) -> None:
    one = OneParent("ab")
    one.progress(1.0)
    one.come(2.0, NodeState.FAILED, reason="CUDA out of memory", failure=failure)
    assert one.next_deadline() <= 2.0
    failures, children = frozenset({failure}), frozenset("a")
    reason = "a gave up: CUDA out of memory"
    assert one.stalls(2.0) == Stalled(reason, idle=False, failures=failures, children=children)


def test_a_deadline_that_passed_is_no_reason_to_wake() -> None:
    """What has been judged is judged: a deadline in the past would keep the event loop spinning."""

    def wakes_later(one: OneParent, now: float) -> bool:
        assert one.stalls(now) is None
        one.to_send(now)
        return one.next_deadline() > now

    one = OneParent("abc", closing=quorum_of(2, 500.0))
    for now in range(200):
        for name in "bc":
            one.progress(now, name=name, done=now)
        assert wakes_later(one, now)
    one = OneParent("ab", closing=Closing(rule="all", quorum=1, deadline_s=5.0))
    one.finish(1.0)
    one.progress(6.0, name="b")
    assert wakes_later(one, 6.0)


def test_no_round_no_deadline() -> None:
    one = OneParent()
    (closed,) = one.finish(1.0)
    assert results_of(closed) == {"a"} and one.next_deadline() == inf and not one.tasks(100.0)
    one.tick(1000.0)
    assert one.events() == []


# Time


@pytest.mark.parametrize("start", [0.0, 100.0])
def test_the_phases_are_the_moments_seen(start: float) -> None:
    one = OneParent("ab")
    one.start(5, now=start)
    one.progress(start, Phase.FETCHING)
    one.progress(start + 1.0)
    one.progress(start + 2.0, name="b")  # all have the model
    one.announce(start + 5.0)
    one.announce(start + 9.0, "b")
    one.accept("b", one.key, now=start + 10.0)
    one.accept("a", one.key, now=start + 17.0)
    phases = {"dispatch": 2.0, "train": 3.0, "wait": 4.0, "collect": 8.0}
    assert one.timeline.phases() == phases


def test_a_result_without_progress_before_it_had_its_model() -> None:
    one = OneParent()
    one.announce(4.0)
    assert one.timeline.dispatched == 4.0


def test_a_result_at_the_very_start_of_the_clock_is_the_first() -> None:
    one = OneParent("ab")
    one.announce(0.0)
    one.announce(4.0, "b")
    assert one.timeline.first_result == 0.0


# The table


@pytest.mark.parametrize("cause", ChildCause)
@pytest.mark.parametrize("state", ChildState)
def test_a_child_in_a_round_moves_as_the_table_defines_and_in_no_other_way(
    state: ChildState, cause: ChildCause
) -> None:
    child = ChildInRound(state=state)
    after = TRANSITIONS[cause].get(state)
    assert child.go(cause) is (after is not None)
    assert child == ChildInRound(state=after or state)  # and nothing else of it changes


def test_the_picture_of_a_round_is_the_table() -> None:
    s, c = ChildState, ChildCause
    moves = {
        (s.ASSIGNED, c.MESSAGE): s.WORKING,
        (s.WORKING, c.RESULT): s.ANNOUNCED,
        (s.ANNOUNCED, c.ACCEPT): s.ACCEPTED,
        (s.ANNOUNCED, c.REFUSE): s.REFUSED,
        (s.ACCEPTED, c.TAKE_BACK): s.REFUSED,
        (s.ASSIGNED, c.RESTART): s.ASSIGNED,
        (s.WORKING, c.RESTART): s.ASSIGNED,
        (s.ANNOUNCED, c.RESTART): s.ASSIGNED,
        (s.ANNOUNCED, c.RETRY): s.ASSIGNED,
    }
    assert {
        (a, cause): b for cause, table in TRANSITIONS.items() for a, b in table.items()
    } == moves
    assert set(TRANSITIONS) == set(ChildCause)


CAUSES: dict[ChildCause, Callable[[OneParent], object]] = {
    ChildCause.MESSAGE: lambda one: one.progress(2.0, done=7),
    ChildCause.RESULT: lambda one: one.announce(2.0),
    ChildCause.ACCEPT: lambda one: one.accept("a", one.key, now=2.0),
    ChildCause.REFUSE: lambda one: one.refuse("a", one.key, reason="no", now=2.0),
    ChildCause.RETRY: lambda one: one.retry("a", one.key, now=2.0),
    ChildCause.TAKE_BACK: lambda one: one.end(),
    ChildCause.RESTART: lambda one: one.come(2.0, session="2"),
}
WAYS: dict[ChildState, list[ChildCause]] = {
    ChildState.IDLE: [],
    ChildState.ASSIGNED: [],
    ChildState.WORKING: [ChildCause.MESSAGE],
    ChildState.ANNOUNCED: [ChildCause.RESULT],
    ChildState.ACCEPTED: [ChildCause.RESULT, ChildCause.ACCEPT],
    ChildState.REFUSED: [ChildCause.RESULT, ChildCause.REFUSE],
}


@pytest.mark.parametrize("cause", ChildCause)
@pytest.mark.parametrize("state", ChildState)
def test_a_coordinator_moves_a_child_as_the_table_defines(
    state: ChildState, cause: ChildCause
) -> None:
    one = OneParent("ab", opened=False)
    one.start(0, names="b" if state is ChildState.IDLE else "ab")
    for before in WAYS[state]:
        CAUSES[before](one)
    assert one.children["a"].state is state
    CAUSES[cause](one)
    expected = TRANSITIONS[cause].get(state, state)
    # it is a message of this round, too
    if cause is ChildCause.RESULT and state is ChildState.ASSIGNED:
        expected = ChildState.ANNOUNCED
    assert one.children["a"].state is expected
