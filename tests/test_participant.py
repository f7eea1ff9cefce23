"""A participant by hand: each message, and the table of its states."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf

import pytest

from fedstrata.common.protocol.events import TaskReceived
from fedstrata.common.protocol.messages import Acknowledgement, Key, Phase, Progress, Result
from fedstrata.common.protocol.participant import (
    PHASE_S,
    TRANSITIONS,
    Acknowledged,
    ParticipantCause,
    ParticipantState,
)
from tests.helpers.coordinators import COUNTED, OLD, OneChild, due, result_of, task_of

TAKEN = Acknowledgement(OLD, "")


def offer_of(key: Key = OLD) -> Result:
    """Return a child's result as it is offered, with the bytes that its link and those below have
    carried.
    """
    return result_of(key, **COUNTED)


def begun(phase: Phase = Phase.TRAINING) -> OneChild:
    """Return a child at work, which has reported it."""
    one = OneChild()
    one.begin(phase)
    one.sends(PHASE_S)
    return one


# Tasks


def test_a_task_is_begun_once() -> None:
    one, task = OneChild(), task_of(OLD)
    assert one.take(task) == [TaskReceived(task)]
    assert one.take(replace(task, inline=b"x")) == []
    one.begin_work(Phase.WAITING, now=1.0)
    assert one.take(task, 2.0) == [] and one.state is ParticipantState.WORKING
    assert one.sends(2.0) == [Progress(OLD, Phase.WAITING, 0, 0, **COUNTED)]  # but it is answered


@pytest.mark.parametrize("change", [{"epochs": 2}, {"model": 2}])
def test_another_model_or_number_of_epochs_is_another_task(change: dict[str, int]) -> None:
    one, task = OneChild(), task_of(Key(1, 0, 0), **change)
    one.work()
    assert one.take(task) == [TaskReceived(task)] and one.state is ParticipantState.FETCHING


def test_a_task_of_an_earlier_round_is_ignored() -> None:
    one, later = OneChild(), task_of(Key(1, 4, 0))
    one.take(task_of(Key(0, 5, 1)))
    for key in (Key(0, 5, 0), Key(0, 4, 9)):
        assert one.take(task_of(key)) == []
    assert one.take(later) == [TaskReceived(later)]


@pytest.mark.parametrize("first", [None, "the round has closed"])
def test_a_parent_that_restarted_may_go_back(first: str | None) -> None:
    one, latest, task = OneChild(), Key(0, 5, 0), task_of(Key(0, 4, 0), model=4)
    one.work(latest)
    if first is not None:  # whatever its first message is
        one.take(Acknowledgement(latest, first), session="new")
    assert one.take(task, session="new") == [TaskReceived(task)]
    for message in (task_of(Key(0, 3, 0)), Acknowledgement(latest, "")):
        assert one.take(message, session="new") == []  # once


def test_a_task_that_was_abandoned_can_be_begun_again() -> None:
    one = OneChild()
    one.take(task_of(OLD))
    one.abandon()
    assert one.sends(10.0) == [] and one.next_deadline() == inf
    one.finish(result_of(OLD), now=10.0)
    assert one.state is ParticipantState.IDLE
    one.begin(now=11.0)


# Results


def test_a_result_is_offered_until_its_acknowledgement() -> None:
    one = OneChild()
    one.work()
    offers = due(one.next_deadline, one.sends, until_s=30.0)
    assert offers == [(at, offer_of()) for at in (0.0, 1.0, 3.0, 7.0, 12.0, 17.0, 22.0, 27.0)]
    refused = Acknowledgement(OLD, "holds NaN")
    assert one.take(Acknowledgement(Key(0, 0, 1), "")) == []
    assert one.take(refused) == [Acknowledged(OLD, "holds NaN")]
    assert one.take(refused) == [] and one.next_deadline() == inf
    assert one.sends(100.0) == []


def test_a_small_result_travels_with_the_first_offer_only() -> None:
    one = OneChild()
    one.begin()
    one.finish(replace(result_of(OLD), inline=b"x"), now=0.0)
    assert [each.inline for now in (0.0, 1.0, 3.0) for each in one.sends(now)] == [  # type: ignore[union-attr]
        b"x", None, None,
    ]  # fmt: skip


def test_a_task_that_was_answered_has_the_same_result() -> None:
    one = OneChild()
    one.work()
    one.take(TAKEN)
    for session, key in (("p", OLD), ("p", Key(1, 0, 0)), ("new parent", OLD)):
        assert one.take(task_of(key), 5.0, session=session) == []
        assert one.sends(5.0) == [offer_of(key)]
        one.take(Acknowledgement(key, ""), session=session)


def test_the_result_of_a_superseded_task_is_dropped() -> None:
    """It may be ready in the moment in which the next task arrives: it must not pass for the next
    one's result.
    """
    one, second = begun(), Key(0, 0, 1)
    one.take(task_of(second, model=2), 2.0)
    one.finish(result_of(OLD), now=2.0)
    assert one.state is ParticipantState.FETCHING
    assert not any(isinstance(message, Result) for message in one.sends(2.0))
    one.finish(result_of(second), now=3.0)
    assert one.state is ParticipantState.ANNOUNCING


def test_a_result_whose_task_got_a_new_key_carries_it() -> None:
    one, again = begun(), Key(3, 0, 0)
    assert one.take(task_of(again), 2.0, session="new") == []
    one.finish(result_of(OLD), now=3.0)
    assert one.sends(3.0) == [offer_of(again)]


# Progress


def test_progress_is_sent_in_measure() -> None:
    one = OneChild()
    one.begin()
    sent = []
    for number in range(1, 1001):  # a step each 10 ms
        now = number / 100
        one.progress(Phase.TRAINING, number, 1000, now=now)
        sent += one.sends(now)
    assert 18 <= len(sent) <= 22
    quiet = [now for now in range(101, 301) if one.sends(now / 10)]
    assert len(quiet) == 10  # a heartbeat each two seconds


def test_phases_that_the_result_follows_at_once_are_not_reported() -> None:
    one = OneChild()
    one.begin(Phase.WAITING)
    assert one.next_deadline() == PHASE_S and one.sends(0.015) == []
    one.progress(Phase.TRAINING, 0, 9, now=0.015)
    one.progress(Phase.TRAINING, 9, 9, now=0.019)
    one.finish(result_of(OLD), now=0.019)
    assert one.sends(0.019) == [offer_of()]


def test_an_institution_reports_a_new_phase_at_once() -> None:
    """The parent measures when its institutions have a model."""
    one = OneChild(phase_s=0.0)
    one.begin(Phase.WAITING, 0.015)
    assert one.next_deadline() == 0.015


def test_phases_that_change_all_the_time_are_reported() -> None:
    one, sent = begun(), []
    for number, phase in zip(range(300), itertools.cycle((Phase.WAITING, Phase.TRAINING))):
        one.progress(phase, number, 0, now=number / 100)
        sent += one.sends(number / 100)
    assert len(sent) > 80


def test_progress_after_the_result_does_not_repeat_the_offer() -> None:
    one = OneChild()
    one.work()
    assert one.sends(0.0) == [offer_of()]
    one.progress(Phase.TRAINING, 7, 9, now=0.1)  # a step that a thread reported late
    assert one.sends(0.1) == [] and one.next_deadline() == 1.0


def test_a_new_connection_carries_how_it_goes() -> None:
    one = begun()
    assert one.sends(0.5) == []
    one.reconnected(0.6)
    assert len(one.sends(0.6)) == 1


# The table


CAUSES: Mapping[ParticipantCause, Callable[[OneChild], object]] = {
    ParticipantCause.NEW_TASK: lambda one: one.take(task_of(Key(0, 0, 1), model=9), 1.0),
    ParticipantCause.SAME_TASK: lambda one: one.take(task_of(OLD), 1.0),
    ParticipantCause.MODEL: lambda one: one.begin_work(Phase.TRAINING, now=1.0),
    ParticipantCause.FINISH: lambda one: one.finish(result_of(OLD), now=1.0),
    ParticipantCause.ACKNOWLEDGE: lambda one: one.take(TAKEN),
    ParticipantCause.ABANDON: lambda one: one.abandon(),
}
WAY = [*CAUSES][1:5]  # each leads to the next state


@pytest.mark.parametrize("cause", ParticipantCause)
@pytest.mark.parametrize("state", ParticipantState)
def test_a_participant_moves_as_the_table_defines_and_in_no_other_way(
    state: ParticipantState, cause: ParticipantCause
) -> None:
    one = OneChild()
    for before in WAY[: [*ParticipantState].index(state)]:
        CAUSES[before](one)
    assert one.state is state
    CAUSES[cause](one)
    # it has none: any is a new one
    new = state is ParticipantState.IDLE and cause is ParticipantCause.SAME_TASK
    expected = ParticipantState.FETCHING if new else TRANSITIONS[cause].get(state, state)
    assert one.state is expected
