"""Rounds: the two cores by hand, and whole rounds of sessions in memory, in virtual time."""

from __future__ import annotations

import itertools
from math import inf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from session_lab import ALL, Lab, model_of, names_of
from session_lab import manifest_of as blob_of

from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.protocol.coordinator import Coordinator
from fedstrata.common.protocol.messages import (
    Acknowledgement,
    Failure,
    Key,
    NodeState,
    Phase,
    Presence,
)
from fedstrata.common.protocol.participant import TRANSITIONS as CHILD_TRANSITIONS
from fedstrata.common.protocol.participant import ParticipantCause, ParticipantState
from fedstrata.common.protocol.round_state import (
    TRANSITIONS,
    ChildCause,
    ChildInRound,
    ChildState,
    Stalled,
)
from tests.helpers.coordinators import (
    OLD,
    OneChild,
    OneParent,
    assignments,
    children_of,
    progress_of,
    result_of,
    task_of,
)
from tests.helpers.examples import examples

IDLE_S = 60.0


def test_no_child_is_blamed_for_our_own_absence() -> None:
    parent = Coordinator(["a"], idle_s=10.0)
    key = parent.open(
        global_round=0, local_round=0, assignments=assignments(["a"]), closing=ALL, now=0.0
    )
    parent.presence("a", "s", Presence(NodeState.READY, "device"), now=0.0)
    parent.receive("a", progress_of(key), now=0.0)
    parent.reconnected(100.0)
    parent.tick(105.0)
    assert not any(isinstance(event, Stalled) for event in iter(parent.next_event, None))
    parent.tick(110.0)
    assert any(isinstance(event, Stalled) for event in iter(parent.next_event, None))


def test_a_connection_that_breaks_again_and_again_ends_a_round_in_which_nothing_moves() -> None:
    """A parent behind a black hole receives messages of its children, but no chunk reaches them."""
    one = OneParent(1, idle_s=30.0)
    one.receive("device-0", progress_of(one.key, Phase.FETCHING), 0.0)
    stalled_at = None
    for number in range(1, 20):
        one.receive("device-0", progress_of(one.key, Phase.FETCHING), 10.0 * number - 2)
        one.coordinator.reconnected(10.0 * number)
        one.coordinator.tick(10.0 * number)
        if any(isinstance(event, Stalled) for event in one.events()):
            stalled_at = 10.0 * number
            break
    assert stalled_at == 50.0  # 30 s since the first new connection, besides 2 s away three times


def test_a_child_that_gave_up_before_the_round_is_not_waited_for() -> None:
    parent = Coordinator(["a"], idle_s=10.0)
    parent.presence("a", "s", Presence(NodeState.FAILED, "device", reason="no data"), now=0.0)
    parent.open(global_round=0, local_round=0, assignments=assignments(["a"]), closing=ALL, now=1.0)
    parent.tick(1.0)
    assert parent.next_event() == Stalled(
        "a gave up: no data",
        idle=False,
        failures=frozenset({Failure.NONE}),
        children=frozenset("a"),
    )


# Whole rounds, of sessions


def test_a_round_without_trouble_sends_everything_once() -> None:
    lab = Lab(names_of(5))
    lab.rest(1.0)
    begun = lab.now
    closed = lab.round()
    assert closed.key == Key(0, 0, 0) and set(closed.results) == set(lab.names)
    assert not closed.missing and not closed.refused
    assert lab.kinds["Task"] == lab.kinds["Result"] == 5 and lab.now - begun < 4.0
    lab.rest(0.1)
    assert lab.kinds["Acknowledgement"] == 5
    for child in lab.children.values():
        assert len(child.trained) == 1 and child.session.participant.state is ParticipantState.DONE
        assert child.session.participant.next_deadline() == inf
    lab.check()


def test_rounds_follow_each_other_with_those_named_and_a_model_each() -> None:
    lab = Lab(names_of(3))
    for global_round, local_round in itertools.product(range(3), range(2)):
        names = lab.names[: 3 - local_round]
        models = {name: model_of(10 * global_round + number) for number, name in enumerate(names)}
        closed = lab.round(
            names,
            global_round=global_round,
            local_round=local_round,
            epochs=1 + global_round,
            models=models,
        )
        assert closed.key == Key(0, global_round, local_round)
        assert {
            name: result.work.epochs for name, result in closed.results.items()
        } == dict.fromkeys(names, 1 + global_round)
        assert {name: lab.children[name].trained[-1][1] for name in names} == {
            name: blob_of(model).blob for name, model in models.items()
        }
    assert [len(child.trained) for child in lab.children.values()] == [6, 6, 3]
    assert lab.parent.session.coordinator.late == 0
    lab.check()


EVENTS = st.lists(
    st.tuples(
        st.floats(0.0, 8.0),
        st.sampled_from(["child", "parent", "broker", "child cut off", "parent cut off"]),
        st.integers(0, 5),
        st.sampled_from([None, 0.0, 1.0, 20.0]),  # the will comes so much later, or never
        st.floats(0.0, 3.0),  # it comes back so much later
        st.sampled_from(["empty", "kept", "old"]),
    ),
    max_size=4,
)


def hit(
    lab: Lab,
    what: str,
    who: int,
    will_after_s: float | None,
    back_s: float,
    store: dict[str, bytes],
) -> None:
    """Let something fail, and come back."""
    name = lab.names[who % len(lab.names)]
    if what == "parent":
        lab.restart_parent(will_after_s=will_after_s, after_s=back_s)
    elif what == "broker":
        if lab.broker.up:
            lab.restart_broker(down_s=back_s, retained=store)
    elif what == "child":
        lab.kill(name, will_after_s=will_after_s)
        lab.loop.after(back_s, lambda: lab.children[name].alive or lab.start(name))
    else:
        node = lab.parent if what == "parent cut off" else lab.children[name]
        if node.alive:
            node.disconnect(will_after_s=will_after_s, back_after_s=back_s)


@examples(40)
@example(
    seed=145, children=5, loss=0.4, duplicates=0.3, jitter_s=3.0, inline=False, slots=2, events=[]
)
@given(
    seed=st.integers(0, 2**32),
    children=st.integers(1, 5),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    duplicates=st.sampled_from([0.0, 0.3]),
    jitter_s=st.sampled_from([0.0, 0.05, 3.0]),
    inline=st.booleans(),
    slots=st.sampled_from([1, 2, 4]),
    events=EVENTS,
)
def test_whatever_happens_the_rounds_complete_with_the_right_bytes(
    *,
    seed: int,
    children: int,
    loss: float,
    duplicates: float,
    jitter_s: float,
    inline: bool,
    slots: int,
    events: list[tuple[float, str, int, float | None, float, str]],
) -> None:
    """Of 40 % lost, a dozen asks in a row are, once in many runs: so silence may be long."""
    transfer = TransferSettings(
        inline_bytes=10_000 if inline else 0, idle_s=600.0, upload_slots=slots
    )
    lab = Lab(
        names_of(children),
        seed=seed,
        loss=loss,
        duplicates=duplicates,
        jitter_s=jitter_s,
        transfer=transfer,
    )
    stores: dict[str, dict[str, bytes]] = {"empty": {}, "old": {}}
    lab.loop.after(2.0, lambda: stores["old"].update(lab.broker.retained))

    def fail(what: str, who: int, will_after_s: float | None, back_s: float, store: str) -> None:
        hit(lab, what, who, will_after_s, back_s, stores.get(store, lab.broker.retained))

    for moment, *how in events:
        lab.loop.after(moment, lambda how=how: fail(*how))  # type: ignore[misc]
    for local_round in range(2):
        closed = lab.round(local_round=local_round, until_s=3000.0)
        assert set(closed.results) == set(lab.names)
    lab.check()


def test_a_parent_that_goes_back_gets_new_results() -> None:
    """A parent that restarts from an older checkpoint, after a child already offered it a later
    round's result.
    """
    lab = Lab(names_of(2))
    for local_round in range(2):
        lab.round(global_round=5, local_round=local_round)
    lab.open(global_round=6)
    lab.until(
        lambda: all(
            child.session.participant.state is ParticipantState.ANNOUNCING
            for child in children_of(lab)
        )
    )
    lab.restart_parent(reopen_s=None)
    # long enough for each child to repeat its offer to a parent that has no round open
    lab.rest(10.0)
    assert set(lab.round(global_round=4, until_s=30.0).results) == set(lab.names)


def test_going_back_in_one_process_is_a_new_attempt() -> None:
    lab = Lab(names_of(2))
    rounds = [(1, 1), (1, 0), (1, 0), (1, 1)]
    keys = [lab.round(global_round=a, local_round=b).key for a, b in rounds]
    assert keys == [Key(0, 1, 1), Key(1, 1, 0), Key(2, 1, 0), Key(2, 1, 1)]
    # The same task again is answered without training; the others are rounds of their own by then.
    assert [key[1:] for key, _, _ in lab.children["device-0"].trained] == [(1, 1), (1, 0), (1, 1)]


# The tables


@pytest.mark.parametrize(("state", "cause"), list(itertools.product(ChildState, ChildCause)))
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


def parent_with_child_in(state: ChildState) -> tuple[Coordinator, Key]:
    """Return a coordinator that came to have its only child of two in this state, and its round's
    key.
    """
    parent = Coordinator(["a", "b"], idle_s=10.0)
    for name in "ab":
        parent.presence(name, f"{name}-1", Presence(NodeState.READY, "device"), now=0.0)
    names = ["b"] if state is ChildState.IDLE else ["a", "b"]
    key = parent.open(
        global_round=0, local_round=0, assignments=assignments(names), closing=ALL, now=0.0
    )
    if state not in (ChildState.IDLE, ChildState.ASSIGNED):
        parent.receive("a", progress_of(key), now=1.0)
    if state in (ChildState.ANNOUNCED, ChildState.ACCEPTED, ChildState.REFUSED):
        parent.receive("a", result_of(key), now=1.0)
    if state is ChildState.ACCEPTED:
        parent.accept("a", key, now=1.0)
    if state is ChildState.REFUSED:
        parent.refuse("a", key, reason="no", now=1.0)
    assert parent.children["a"].state is state
    return parent, key


@pytest.mark.parametrize(("state", "cause"), list(itertools.product(ChildState, ChildCause)))
def test_a_coordinator_moves_a_child_as_the_table_defines(
    state: ChildState, cause: ChildCause
) -> None:
    parent, key = parent_with_child_in(state)
    if cause is ChildCause.MESSAGE:
        parent.receive("a", progress_of(key, done=7), now=2.0)
    elif cause is ChildCause.RESULT:
        parent.receive("a", result_of(key), now=2.0)
    elif cause is ChildCause.ACCEPT:
        parent.accept("a", key, now=2.0)
    elif cause is ChildCause.REFUSE:
        parent.refuse("a", key, reason="no", now=2.0)
    elif cause is ChildCause.RETRY:
        parent.retry("a", key, now=2.0)
    elif cause is ChildCause.TAKE_BACK:
        parent.end()
    else:
        parent.presence("a", "a-2", Presence(NodeState.READY, "device"), now=2.0)
    # it is a message of this round, too
    if cause is ChildCause.RESULT and state is ChildState.ASSIGNED:
        expected = ChildState.ANNOUNCED
    else:
        expected = TRANSITIONS[cause].get(state, state)
    assert parent.children["a"].state is expected


@pytest.mark.parametrize(
    ("state", "cause"), list(itertools.product(ParticipantState, ParticipantCause))
)
def test_a_participant_moves_as_the_table_defines_and_in_no_other_way(
    state: ParticipantState, cause: ParticipantCause
) -> None:
    one, task = OneChild(), task_of(OLD)
    child = one.participant
    if state is not ParticipantState.IDLE:
        one.receive(task)
    if state not in (ParticipantState.IDLE, ParticipantState.FETCHING):
        child.begin_work(Phase.TRAINING, now=0.0)
    if state in (ParticipantState.ANNOUNCING, ParticipantState.DONE):
        child.finish(result_of(OLD), now=0.0)
    if state is ParticipantState.DONE:
        one.receive(Acknowledgement(OLD, ""))
    assert child.state is state
    if cause is ParticipantCause.NEW_TASK:
        one.receive(task_of(Key(0, 0, 1), model=9), 1.0)
    elif cause is ParticipantCause.SAME_TASK:
        one.receive(task, 1.0)
    elif cause is ParticipantCause.MODEL:
        child.begin_work(Phase.TRAINING, now=1.0)
    elif cause is ParticipantCause.FINISH:
        child.finish(result_of(OLD), now=1.0)
    elif cause is ParticipantCause.ACKNOWLEDGE:
        one.receive(Acknowledgement(OLD, ""))
    else:
        child.abandon()
    # it has none: any is a new one
    new = state is ParticipantState.IDLE and cause is ParticipantCause.SAME_TASK
    expected = ParticipantState.FETCHING if new else CHILD_TRANSITIONS[cause].get(state, state)
    assert child.state is expected
