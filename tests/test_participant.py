"""When rounds close, by messages and by time, and a participant by hand: each message."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_lab import ALL, Lab, names_of, settled

from fedstrata.common.accounting.traffic import Traffic
from fedstrata.common.protocol.events import TaskReceived
from fedstrata.common.protocol.messages import Acknowledgement, Key, Phase, Progress, Result
from fedstrata.common.protocol.participant import (
    PHASE_S,
    Acknowledged,
    Participant,
    ParticipantState,
)
from fedstrata.common.protocol.round_state import Standing, Timeline, Verdict, judge
from fedstrata.common.settings.closing import Closing
from tests.helpers.coordinators import (
    COUNTED,
    OLD,
    OneChild,
    OneParent,
    children_of,
    progress_of,
    result_of,
    task_of,
)

# Closing


@pytest.mark.parametrize("rule", ["all", "quorum"])
def test_a_verdict_is_what_its_description_states(rule: str) -> None:
    for accepted, refused, idle, waiting, absent in itertools.product(range(3), repeat=5):
        standing = Standing(accepted, refused, idle, waiting, absent)
        total = accepted + refused + idle + waiting + absent
        quorums = (None, *range(1, total + 1))
        for quorum, overdue in itertools.product(quorums, (False, True)):
            closing = Closing(rule=rule, quorum=quorum, deadline_s=5.0)  # type: ignore[arg-type]
            to_come = waiting + absent
            if rule == "all":
                if idle > 0 or (to_come == 0 and accepted == 0):
                    expected = Verdict.IMPOSSIBLE
                else:
                    expected = Verdict.WAIT if to_come else Verdict.CLOSE
            elif accepted + to_come < (quorum or 1):
                expected = Verdict.IMPOSSIBLE
            elif to_come == 0 or (accepted >= (quorum or 1) and (overdue or waiting == 0)):
                expected = Verdict.CLOSE
            else:
                expected = Verdict.WAIT
            assert judge(closing, standing, overdue=overdue) is expected, (
                closing,
                standing,
                overdue,
            )


def lab_without(*names: str, of: int = 3) -> Lab:
    """Return a lab in which these devices have not been started."""
    lab = Lab(names_of(of), start=False)
    for name in lab.names:
        if name not in names:
            lab.start(name)
    lab.rest(1.0)
    return lab


def quorum_of(count: int, deadline_s: float) -> Closing:
    return Closing(rule="quorum", quorum=count, deadline_s=deadline_s)


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_a_quorum_waits_for_its_deadline_and_no_longer(slow: int) -> None:
    lab = Lab(names_of(5))
    lab.rest(1.0)
    for name in names_of(slow):
        lab.children[name].train_s = 100.0
    begun = lab.now
    closed = lab.round(closing=quorum_of(2, 10.0))
    assert closed.missing == tuple(names_of(slow)) and len(closed.results) == 5 - slow
    assert lab.now - begun == 10.0
    for child in children_of(lab):
        child.train_s = 3.0
    assert not lab.round(local_round=1).missing  # the slow ones leave the old round for the new one
    assert lab.parent.session.coordinator.late == 0
    lab.check()


def test_a_quorum_that_comes_after_the_deadline_closes_at_once() -> None:
    lab = Lab(names_of(3))
    for name, train_s in zip(names_of(3), (20.0, 30.0, 90.0), strict=True):
        lab.children[name].train_s = train_s
    begun = lab.now
    assert lab.round(closing=quorum_of(2, 5.0)).missing == ("device-2",)
    assert 30.0 < lab.now - begun < 32.0


def test_a_quorum_closes_early_when_all_are_here() -> None:
    assert len(Lab(names_of(3)).round(closing=quorum_of(2, 300.0), until_s=10.0).results) == 3


def test_a_quorum_outlives_the_dead() -> None:
    lab = Lab(names_of(4))
    lab.loop.after(1.0, lambda: lab.kill("device-0"))
    lab.children["device-3"].train_s = 60.0
    assert lab.round(closing=quorum_of(3, 5.0)).missing == ("device-0",)


def test_a_quorum_that_can_never_be_filled_stalls() -> None:
    lab = Lab(names_of(3))
    for name in names_of(2):
        lab.loop.after(1.0, lambda name=name: lab.kill(name))  # type: ignore[misc]
    lab.open(closing=quorum_of(2, 500.0))
    stalled = lab.stall()
    assert "device-0 and device-1 made no" in stalled.reason


@pytest.mark.parametrize("seen", [True, False])
def test_a_quorum_does_not_wait_for_those_that_were_lost_before(seen: bool) -> None:
    """With 20 of 100 dead, each round would take its whole deadline."""
    lost = names_of(2)
    lab = settled(5) if seen else lab_without(*lost, of=5)
    for name in lost if seen else ():
        lab.kill(name)
    lab.rest(1.0)
    begun = lab.now
    closed = lab.round(closing=quorum_of(2, 300.0))
    assert closed.missing == tuple(lost) and set(closed.results) == set(lab.names[2:])
    assert lab.now - begun < 10.0


@pytest.mark.parametrize(("closing", "after_s"), [(quorum_of(2, 300.0), 1.0), (ALL, 30.0)])
def test_a_child_that_comes_back_in_time_is_waited_for_again(
    closing: Closing, after_s: float
) -> None:
    lab = lab_without("device-0")
    lab.loop.after(after_s, lambda: lab.start("device-0"))
    assert set(lab.round(closing=closing).results) == set(lab.names)


# Time


MARKS = st.one_of(st.none(), st.integers(0, 1000).map(lambda n: n / 64))


@given(
    opened=st.integers(0, 1000).map(lambda n: n / 64),
    marks=st.tuples(MARKS, MARKS, MARKS),
    took=st.integers(0, 900),
)
def test_the_phases_of_a_round_add_up(
    opened: float, marks: tuple[float | None, ...], took: int
) -> None:
    closed = opened + took / 64
    inside = [None if mark is None else min(opened + mark, closed) for mark in marks]
    phases = Timeline(opened, *inside, closed).phases()
    assert list(phases) == ["dispatch", "train", "wait", "collect"]
    assert sum(phases.values()) == closed - opened and min(phases.values()) >= 0


def test_an_open_round_has_phases_too() -> None:
    assert sum(Timeline(5.0).phases().values()) == 0.0
    assert Timeline(5.0, 7.0).phases() == {
        "dispatch": 2.0,
        "train": 0.0,
        "wait": 0.0,
        "collect": 0.0,
    }


@pytest.mark.parametrize("start", [0.0, 100.0])
def test_the_phases_are_the_moments_seen(start: float) -> None:
    one = OneParent(2)
    one.key = one.open(local_round=5, now=start)
    one.receive("device-0", progress_of(one.key, Phase.FETCHING), start)
    one.receive("device-0", progress_of(one.key), start + 1.0)
    one.receive("device-1", progress_of(one.key), start + 2.0)  # all have the model
    one.receive("device-0", result_of(one.key), start + 5.0)
    one.receive("device-1", result_of(one.key), start + 9.0)
    one.coordinator.accept("device-1", one.key, now=start + 10.0)
    one.coordinator.accept("device-0", one.key, now=start + 17.0)
    assert one.coordinator.timeline.phases() == {
        "dispatch": 2.0,
        "train": 3.0,
        "wait": 4.0,
        "collect": 8.0,
    }


def test_a_result_without_progress_before_it_had_its_model() -> None:
    one = OneParent(1)
    one.receive("device-0", result_of(one.key), 4.0)
    assert one.coordinator.timeline.dispatched == 4.0


def test_a_result_at_the_very_start_of_the_clock_is_the_first() -> None:
    one = OneParent(2)
    one.receive("device-0", result_of(one.key), 0.0)
    one.receive("device-1", result_of(one.key), 4.0)
    assert one.coordinator.timeline.first_result == 0.0


def offer_of(key: Key) -> Result:
    """Return a child's result as it is offered, with the bytes that its link and those below have
    carried.
    """
    return replace(result_of(key), traffic=COUNTED[0], below=COUNTED[1])


def test_a_task_is_begun_once() -> None:
    one = OneChild()
    assert one.receive(task_of(OLD)) == [TaskReceived(task_of(OLD))]
    assert one.receive(replace(task_of(OLD), inline=b"x")) == []
    one.participant.begin_work(Phase.WAITING, now=1.0)
    assert (
        one.receive(task_of(OLD), 2.0) == [] and one.participant.state is ParticipantState.WORKING
    )
    (progress,) = one.to_send(2.0)  # but it is answered
    assert progress == Progress(OLD, Phase.WAITING, 0, 0, Traffic(1), (Traffic(2),))


def test_a_result_is_offered_until_its_acknowledgement() -> None:
    one = OneChild()
    one.work(OLD)
    times = []
    while (due := one.participant.next_deadline()) < 30:
        assert one.to_send(due) == [offer_of(OLD)]
        times.append(due)
    assert times == [0.0, 1.0, 3.0, 7.0, 12.0, 17.0, 22.0, 27.0]
    assert one.receive(Acknowledgement(Key(0, 0, 1), "")) == []
    assert one.receive(Acknowledgement(OLD, "holds NaN")) == [Acknowledged(OLD, "holds NaN")]
    assert (
        one.receive(Acknowledgement(OLD, "holds NaN")) == []
        and one.participant.next_deadline() == inf
    )
    assert one.to_send(100.0) == []


def test_a_small_result_travels_with_the_first_offer_only() -> None:
    one = OneChild()
    one.receive(task_of(OLD))
    one.participant.finish(replace(result_of(OLD), inline=b"x"), now=0.0)
    inlines = [
        message.inline
        for now in (0.0, 1.0, 3.0)
        for message in one.to_send(now)
        if isinstance(message, Result)
    ]
    assert inlines == [b"x", None, None]


def test_a_task_that_was_answered_has_the_same_result() -> None:
    one = OneChild()
    one.work(OLD)
    one.receive(Acknowledgement(OLD, ""))
    again = replace(task_of(OLD), key=Key(1, 0, 0))
    for session, task in (("p", task_of(OLD)), ("p", again), ("new parent", task_of(OLD))):
        assert one.receive(task, 5.0, session=session) == []
        assert one.to_send(5.0) == [offer_of(task.key)]
        one.receive(Acknowledgement(task.key, ""), session=session)


@pytest.mark.parametrize("change", [{"epochs": 2}, {"model": 2}])
def test_another_model_or_number_of_epochs_is_another_task(change: dict[str, int]) -> None:
    one = OneChild()
    one.work(OLD)
    task = task_of(Key(1, 0, 0), **change)
    assert (
        one.receive(task) == [TaskReceived(task)]
        and one.participant.state is ParticipantState.FETCHING
    )


def test_a_task_of_an_earlier_round_is_ignored() -> None:
    one = OneChild()
    task = task_of(Key(0, 5, 1))
    one.receive(task)
    for key in (Key(0, 5, 0), Key(0, 4, 9)):
        assert one.receive(task_of(key)) == []
    later = task_of(Key(1, 4, 0))
    assert one.receive(later) == [TaskReceived(later)]


def test_a_parent_that_restarted_may_go_back() -> None:
    # whatever its first message is
    for first in (None, Acknowledgement(Key(0, 5, 0), "the round has closed")):
        one = OneChild()
        one.work(Key(0, 5, 0))
        if first is not None:
            one.receive(first, session="new")
        task = task_of(Key(0, 4, 0), model=4)
        assert one.receive(task, session="new") == [TaskReceived(task)]
        assert one.receive(task_of(Key(0, 3, 0)), session="new") == []  # once
        assert one.receive(Acknowledgement(Key(0, 5, 0), ""), session="new") == []


def test_the_result_of_a_superseded_task_is_dropped() -> None:
    """It may be ready in the moment in which the next task arrives: it must not pass for the next
    one's result.
    """
    one = OneChild()
    one.receive(task_of(Key(0, 0, 0)))
    one.participant.begin_work(Phase.TRAINING, now=1.0)
    one.receive(task_of(Key(0, 0, 1), model=2), 2.0)
    one.participant.finish(result_of(Key(0, 0, 0)), now=2.0)
    assert one.participant.state is ParticipantState.FETCHING
    assert not any(isinstance(message, Result) for message in one.to_send(2.0))
    one.participant.finish(result_of(Key(0, 0, 1)), now=3.0)
    assert one.participant.state is ParticipantState.ANNOUNCING


def test_a_result_whose_task_got_a_new_key_carries_it() -> None:
    one = OneChild()
    one.receive(task_of(OLD))
    one.participant.begin_work(Phase.TRAINING, now=1.0)
    assert one.receive(task_of(Key(3, 0, 0)), 2.0, session="new") == []
    one.participant.finish(result_of(OLD), now=3.0)
    assert one.to_send(3.0) == [offer_of(Key(3, 0, 0))]


def test_a_task_that_was_abandoned_can_be_begun_again() -> None:
    one = OneChild()
    one.receive(task_of(OLD))
    one.participant.abandon()
    assert one.to_send(10.0) == [] and one.participant.next_deadline() == inf
    one.participant.finish(result_of(OLD), now=10.0)
    assert one.participant.state is ParticipantState.IDLE
    assert one.receive(task_of(OLD), 11.0) == [TaskReceived(task_of(OLD))]


def test_progress_is_sent_in_measure() -> None:
    one = OneChild()
    one.receive(task_of(OLD))
    one.to_send(0.0)
    one.participant.begin_work(Phase.TRAINING, now=0.0)
    sent = []
    for number in range(1, 1001):  # a step each 10 ms
        now = number / 100
        one.participant.progress(Phase.TRAINING, number, 1000, now=now)
        sent += [now for _ in one.to_send(now)]
    assert 18 <= len(sent) <= 22
    quiet = [now / 10 for now in range(101, 301) if one.to_send(now / 10)]
    assert len(quiet) == 10  # a heartbeat each two seconds


def test_phases_that_the_result_follows_at_once_are_not_reported() -> None:
    one = OneChild()
    one.receive(task_of(OLD))
    one.participant.begin_work(Phase.WAITING, now=0.0)
    assert one.participant.next_deadline() == PHASE_S and one.to_send(0.015) == []
    one.participant.progress(Phase.TRAINING, 0, 9, now=0.015)
    one.participant.progress(Phase.TRAINING, 9, 9, now=0.019)
    one.participant.finish(result_of(OLD), now=0.019)
    assert one.to_send(0.019) == [offer_of(OLD)]


def test_an_institution_reports_a_new_phase_at_once() -> None:
    """The parent measures when its institutions have a model."""
    participant = Participant(idle_s=20.0, phase_s=0.0)
    participant.receive(task_of(OLD), now=0.0)
    participant.begin_work(Phase.WAITING, now=0.015)
    assert participant.next_deadline() == 0.015


def test_phases_that_change_all_the_time_are_reported() -> None:
    one = OneChild()
    one.receive(task_of(OLD))
    sent = []
    for number in range(300):
        now, phase = number / 100, (Phase.WAITING, Phase.TRAINING)[number % 2]
        one.participant.progress(phase, number, 0, now=now)
        sent += [now for _ in one.to_send(now)]
    assert len(sent) > 80


def test_progress_after_the_result_does_not_repeat_the_offer() -> None:
    one = OneChild()
    one.work(OLD)
    assert len(one.to_send(0.0)) == 1
    one.participant.progress(Phase.TRAINING, 7, 9, now=0.1)  # a step that a thread reported late
    assert one.to_send(0.1) == [] and one.participant.next_deadline() == 1.0


def test_a_new_connection_carries_how_it_goes() -> None:
    one = OneChild()
    one.receive(task_of(OLD))
    one.to_send(0.2)
    assert one.to_send(0.5) == []
    one.participant.reconnected(0.6)
    assert len(one.to_send(0.6)) == 1
