"""Rounds: the two cores by hand, and whole rounds of sessions in memory, in virtual time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from session_lab import ALL, ChildNode, Lab, model_of, names_of
from session_lab import manifest_of as blob_of

from common.accounting.traffic import TcpStats, Traffic
from common.errors import RefusedModel
from common.experiment.schema import TransferSettings
from common.experiment.tiers import Closing
from common.protocol.coordinator import Coordinator
from common.protocol.limits import ChildLimits, check_report, plans_of
from common.protocol.messages import (
    Acknowledgement,
    Failure,
    Key,
    Manifest,
    NodeState,
    Phase,
    Presence,
    Progress,
    Result,
    Task,
)
from common.protocol.participant import PHASE_S, Acknowledged, Begin, Participant, ParticipantCause, ParticipantState
from common.protocol.participant import TRANSITIONS as CHILD_TRANSITIONS
from common.protocol.round_state import (
    TRANSITIONS,
    Assignment,
    ChildCause,
    ChildInRound,
    ChildState,
    Closed,
    Restarted,
    ResultAnnounced,
    Stalled,
    Standing,
    Timeline,
    Verdict,
    judge,
)
from common.runtime.round import WorkResult
from common.text import JSON_MOST
from tests.helpers.examples import examples

IDLE_S = 60.0
OLD = Key(0, 0, 0)


def manifest_of(number: int) -> Manifest:
    return Manifest(f"{number:016x}", 1_000_000, 1_000_000, b"d" * 8, "fp32", "layout")


def result_of(key: Key, number: int = 77) -> Result:
    return Result(key, manifest_of(number), None, 10, 0.5, 1, 10, 10, 1.0, 0.0, 0.0, (), "")


def progress_of(key: Key, phase: Phase = Phase.TRAINING, done: int = 0, *, traffic: Traffic | None = None) -> Progress:
    return Progress(key, phase, done, 100, traffic or Traffic(), ())


def assignments(names: Sequence[str], *, model: int = 1, epochs: int = 1) -> dict[str, Assignment]:
    return dict.fromkeys(names, Assignment(manifest_of(model), epochs, b"x" * 1000))


def test_no_child_is_blamed_for_our_own_absence() -> None:
    parent = Coordinator(["a"], idle_s=10.0)
    key = parent.open(global_round=0, local_round=0, assignments=assignments(["a"]), closing=ALL, now=0.0)
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
    assert parent.next_event() == Stalled("a gave up: no data", idle=False, failures=frozenset({Failure.NONE}))


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
        assert child.session.participant.next_deadline() is None
    lab.check()


def test_rounds_follow_each_other() -> None:
    lab = Lab(names_of(3))
    for global_round, local_round in itertools.product(range(3), range(2)):
        closed = lab.round(global_round=global_round, local_round=local_round, epochs=1 + global_round)
        assert closed.key == Key(0, global_round, local_round)
        assert [result.epochs for result in closed.results.values()] == [1 + global_round] * 3
    assert lab.parent.session.coordinator.late == 0
    lab.check()


def test_each_child_may_have_its_own_model() -> None:
    lab = Lab(names_of(3))
    models = {name: model_of(number) for number, name in enumerate(lab.names)}
    assert set(lab.round(models=models).results) == set(lab.names)
    blobs = {child.trained[0][1] for child in lab.children.values()}
    assert blobs == {blob_of(model).blob for model in models.values()}


def test_only_those_named_take_part() -> None:
    lab = Lab(names_of(4))
    assert set(lab.round(["device-1", "device-3"]).results) == {"device-1", "device-3"}
    assert not lab.children["device-0"].trained and not lab.children["device-2"].trained


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


def hit(lab: Lab, what: str, who: int, will_after_s: float | None, back_s: float, store: dict[str, bytes]) -> None:
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
@example(seed=145, children=5, loss=0.4, duplicates=0.3, jitter_s=3.0, inline=False, slots=2, events=[])
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
    transfer = TransferSettings(inline_bytes=10_000 if inline else 0, idle_s=600.0, upload_slots=slots)
    lab = Lab(names_of(children), seed=seed, loss=loss, duplicates=duplicates, jitter_s=jitter_s, transfer=transfer)
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
    """A parent that restarts from an older checkpoint, after a child already offered it a later round's result."""
    lab = Lab(names_of(2))
    for local_round in range(2):
        lab.round(global_round=5, local_round=local_round)
    lab.open(global_round=6)
    lab.until(lambda: all(child.session.participant.state is ParticipantState.ANNOUNCING for child in children_of(lab)))
    lab.restart_parent(reopen_s=None)
    lab.rest(10.0)  # long enough for each child to repeat its offer to a parent that has no round open
    assert set(lab.round(global_round=4, until_s=30.0).results) == set(lab.names)


def children_of(lab: Lab) -> list[ChildNode]:
    return list(lab.children.values())


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
    assert {(a, cause): b for cause, table in TRANSITIONS.items() for a, b in table.items()} == moves
    assert set(TRANSITIONS) == set(ChildCause)


def parent_with_child_in(state: ChildState) -> tuple[Coordinator, Key]:
    """Return a coordinator that came to have its only child of two in this state, and its round's key."""
    parent = Coordinator(["a", "b"], idle_s=10.0)
    for name in "ab":
        parent.presence(name, f"{name}-1", Presence(NodeState.READY, "device"), now=0.0)
    names = ["b"] if state is ChildState.IDLE else ["a", "b"]
    key = parent.open(global_round=0, local_round=0, assignments=assignments(names), closing=ALL, now=0.0)
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
def test_a_coordinator_moves_a_child_as_the_table_defines(state: ChildState, cause: ChildCause) -> None:
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
    if cause is ChildCause.RESULT and state is ChildState.ASSIGNED:  # it is a message of this round, too
        expected = ChildState.ANNOUNCED
    else:
        expected = TRANSITIONS[cause].get(state, state)
    assert parent.children["a"].state is expected


@pytest.mark.parametrize(("state", "cause"), list(itertools.product(ParticipantState, ParticipantCause)))
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
    new = state is ParticipantState.IDLE and cause is ParticipantCause.SAME_TASK  # it has none: any is a new one
    expected = ParticipantState.FETCHING if new else CHILD_TRANSITIONS[cause].get(state, state)
    assert child.state is expected


# The parent by hand


class OneParent:
    """A coordinator in the hand of a test, all children READY and their tasks sent."""

    def __init__(self, count: int = 3, *, idle_s: float = 20.0, closing: Closing = ALL, ready: bool = True) -> None:
        self.names = names_of(count)
        self.coordinator = Coordinator(self.names, idle_s=idle_s)
        if ready:
            for name in self.names:
                self.presence(name, NodeState.READY, 0.0)
        self.key = self.open(closing=closing)
        if ready:
            assert {name for name, _ in self.coordinator.to_send(0.0)} == set(self.names)

    def open(self, *, global_round: int = 3, local_round: int = 0, closing: Closing = ALL, now: float = 0.0) -> Key:
        return self.coordinator.open(
            global_round=global_round,
            local_round=local_round,
            assignments=assignments(self.names),
            closing=closing,
            now=now,
        )

    def presence(self, name: str, state: NodeState, now: float, *, session: str = "", reason: str = "") -> None:
        presence = Presence(state, "device", reason=reason)
        self.coordinator.presence(name, session or f"{name}-a", presence, now=now)

    def receive(self, name: str, message: Progress | Result, now: float) -> None:
        self.coordinator.receive(name, message, now=now)

    def finish(self, name: str, now: float) -> None:
        self.receive(name, progress_of(self.key), now)
        self.receive(name, result_of(self.key), now)
        self.coordinator.accept(name, self.key, now=now)

    def events(self) -> list[object]:
        return list(iter(self.coordinator.next_event, None))

    def tasks(self, now: float) -> list[tuple[str, Task]]:
        return [(name, message) for name, message in self.coordinator.to_send(now) if isinstance(message, Task)]

    def acknowledgements(self, now: float) -> list[tuple[str, Acknowledgement]]:
        return [
            (name, message) for name, message in self.coordinator.to_send(now) if isinstance(message, Acknowledgement)
        ]


def test_a_small_model_travels_with_the_first_task_only() -> None:
    one = OneParent(1, ready=False)
    one.presence("device-0", NodeState.READY, 0.0)
    ((_, first),) = one.tasks(0.0)
    assert first.inline == b"x" * 1000 and first.key == one.key
    times = []
    while (due := one.coordinator.next_deadline()) is not None and due < 19:
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
    assert one.coordinator.states() == {"device-0": "init", "device-1": "lost", "device-2": "absent"}


def test_a_message_of_an_old_round_does_not_silence_the_task() -> None:
    """A child that works on a round which closed without it reports that for hours; the lost task is sent again."""
    one = OneParent(1)
    for tenth in range(1, 100):
        now = tenth / 10
        if tenth % 5 == 0:
            one.receive("device-0", progress_of(OLD, done=tenth), now)
        if one.tasks(now):
            break
    else:
        pytest.fail("the task was never sent again")
    assert now < 2.0


def test_a_busy_child_gets_its_task_again_only_after_silence() -> None:
    one = OneParent(1)
    for second in range(1, 11):
        one.receive("device-0", progress_of(one.key, done=second), float(second))
        assert one.tasks(float(second)) == []
    assert one.tasks(14.9) == [] and len(one.tasks(15.0)) == 1


def test_a_refused_result_leaves_the_round_to_the_others() -> None:
    one = OneParent(3)
    for name in one.names:
        one.receive(name, result_of(one.key), 1.0)
    assert [event.child for event in one.events() if isinstance(event, ResultAnnounced)] == one.names
    one.coordinator.refuse("device-1", one.key, reason="holds NaN", now=2.0)
    assert ("device-1", Acknowledgement(one.key, "holds NaN")) in one.acknowledgements(2.0)
    one.receive("device-1", result_of(one.key), 3.0)  # its acknowledgement was lost
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
    check_report(replace(result_of(Key(1, 0, 0)), plans='{"institution-0": [{"spread": 0.1}]}'), limits=ABOVE)
    with pytest.raises(RefusedModel, match="not a finite number"):
        check_report(
            replace(result_of(Key(1, 0, 0)), plans=f'{{"institution-0": [{{"spread": {spread}}}]}}'), limits=ABOVE
        )


def test_decisions_that_are_too_long_for_a_message_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    work = WorkResult(memoryview(b""), 1, 0.5, 1, 1, 0.0, 0.0, plans={"institution-0": [{"partners": "x" * 5}]})
    task = task_of(Key(1, 0, 0))
    assert json.loads(work.announcement(task, task.model).plans) == work.plans
    result = replace(work, plans={"institution-0": [{"partners": "x" * JSON_MOST}]}).announcement(task, task.model)
    assert result.plans == "" and plans_of(result) == {}
    assert "the decisions of 1 rules are not reported" in caplog.text


def test_when_all_are_refused_the_round_stalls_and_names_them() -> None:
    one = OneParent(2)
    for name in one.names:
        one.receive(name, result_of(one.key), 1.0)
        one.coordinator.refuse(name, one.key, reason=f"{name} diverged", now=1.0)
    stalled = one.events()[-1]
    assert isinstance(stalled, Stalled)
    for name in one.names:
        assert f"{name} sent a model that was refused: {name} diverged" in stalled.reason


def test_a_second_task_is_a_clean_sheet() -> None:
    one = OneParent(2)
    one.receive("device-0", result_of(one.key), 1.0)
    one.coordinator.refuse("device-0", one.key, reason="no", now=1.0)
    one.finish("device-1", 2.0)
    one.events()
    one.key = one.open(local_round=1, now=3.0)
    for name in one.names:
        one.finish(name, 4.0)
    closed = one.events()[-1]
    assert isinstance(closed, Closed) and set(closed.results) == set(one.names) and not closed.refused


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
        assert one.acknowledgements(now) == [("device-2", Acknowledgement(one.key, "the round has closed"))]
    one.open(local_round=1, now=8.0)
    one.coordinator.to_send(8.0)
    one.receive("device-2", late, 9.0)
    assert ("device-2", Acknowledgement(one.key, "the round has closed")) in one.coordinator.to_send(9.0)
    assert one.coordinator.late == 1


def test_a_result_that_was_taken_is_never_called_late() -> None:
    """Its acknowledgement was lost: the child asks again after the round has closed, and after the next was opened."""
    one = OneParent(1)
    one.finish("device-0", 1.0)
    one.coordinator.to_send(1.0)
    one.receive("device-0", result_of(one.key), 2.0)
    assert one.acknowledgements(2.0) == [("device-0", Acknowledgement(one.key, ""))]
    one.open(local_round=1, now=3.0)
    one.coordinator.to_send(3.0)
    one.receive("device-0", result_of(one.key), 3.5)
    assert ("device-0", Acknowledgement(one.key, "")) in one.coordinator.to_send(3.5)
    assert one.coordinator.late == 0


def test_a_result_that_was_taken_is_not_called_late_after_a_repeat_of_an_earlier_one() -> None:
    """A stranger's, or the network's: the child would discard the state that its next task starts from."""
    one = OneParent(1)
    first = one.key
    one.finish("device-0", 1.0)
    second = one.key = one.open(local_round=1, now=2.0)
    one.finish("device-0", 3.0)
    one.coordinator.tick(3.0)
    one.coordinator.to_send(3.0)
    one.receive("device-0", result_of(first), 5.0)
    assert one.acknowledgements(5.0) == [("device-0", Acknowledgement(first, "the round has closed"))]
    one.receive("device-0", result_of(second), 7.0)
    one.open(local_round=2, now=8.0)
    one.receive("device-0", result_of(second), 9.0)
    assert {answer for _, answer in one.acknowledgements(9.0)} == {Acknowledgement(second, "")}


def test_a_session_of_the_parent_that_returns_keeps_the_order_of_its_tasks() -> None:
    participant = Participant(idle_s=20.0)
    later, earlier = (Task(Key(0, number, 0), 1, manifest_of(number), None) for number in (1, 0))
    participant.receive(later, now=0.0)
    assert isinstance(participant.next_event(), Begin)
    participant.parent_restarted(1.0)  # a stranger's presence under the parent's name
    participant.parent_restarted(2.0, again=True)
    participant.receive(earlier, now=3.0)
    assert participant.next_event() is None
    participant.parent_restarted(4.0)
    participant.receive(earlier, now=5.0)
    assert isinstance(participant.next_event(), Begin)


def test_a_new_parent_does_not_judge_what_it_never_asked_for() -> None:
    """Before its first round it may be about to open the very one that the result belongs to."""
    coordinator = Coordinator(["device-0"], idle_s=20.0)
    coordinator.receive("device-0", result_of(OLD), now=0.0)
    assert coordinator.to_send(0.0) == [] and coordinator.late == 0


def test_silence_stalls_the_round_and_names_the_child() -> None:
    one = OneParent(3, idle_s=20.0)
    one.finish("device-0", 1.0)
    one.receive("device-1", progress_of(one.key, done=1), 5.0)
    one.presence("device-2", NodeState.LOST, 6.0)
    one.coordinator.tick(19.9)
    assert not any(isinstance(event, Stalled) for event in one.events())
    one.coordinator.tick(25.1)
    (stalled,) = one.events()
    assert isinstance(stalled, Stalled)
    assert "device-1 made no progress for 20 s (its state is ready)" in stalled.reason
    assert "device-2 made no progress for 20 s (its state is lost)" in stalled.reason
    assert "device-0" not in stalled.reason


def test_a_child_that_never_came_is_named() -> None:
    one = OneParent(1, ready=False)
    one.coordinator.tick(20.0)
    assert one.events() == [
        Stalled("device-0 made no progress for 20 s (it never came)", idle=True, failures=frozenset({Failure.NONE}))
    ]


def wire_of(*, received: int = 0, sent: int = 0, control: int = 0) -> Traffic:
    return Traffic(received_control_message=control, wire=TcpStats(sent=sent, received=received, connections=1))


@pytest.mark.parametrize("how", ["steps", "phases", "bytes", "upload", "part of a chunk down", "part of a chunk up"])
def test_nobody_is_given_up_while_something_moves(how: str) -> None:
    one = OneParent(1, idle_s=20.0)
    one.receive("device-0", progress_of(one.key, Phase.FETCHING), 0.0)
    if how == "upload":
        one.receive("device-0", result_of(one.key), 0.0)
    for number in range(1, 50):
        now = 19.0 * number
        if how == "steps":
            one.receive("device-0", progress_of(one.key, done=number), now)
        elif how == "phases":
            one.receive("device-0", progress_of(one.key, [Phase.WAITING, Phase.TRAINING][number % 2]), now)
        elif how == "part of a chunk down":  # 8 kbit/s
            traffic = wire_of(received=19_000 * number, control=100 * number)
            one.receive("device-0", progress_of(one.key, Phase.FETCHING, traffic=traffic), now)
        elif how == "part of a chunk up":
            one.receive("device-0", progress_of(one.key, Phase.ANNOUNCING, traffic=wire_of(sent=19_000 * number)), now)
        else:
            one.coordinator.moved("device-0", now=now)
        one.coordinator.tick(now + 0.5)
    assert not any(isinstance(event, Stalled) for event in one.events())
    one.coordinator.tick(now + 20.0)
    assert any(isinstance(event, Stalled) for event in one.events())


def test_heartbeats_are_no_progress() -> None:
    one = OneParent(1, idle_s=20.0)
    for number in range(12):
        # Our messages and theirs, each acknowledged.
        traffic = wire_of(received=5004 * number, sent=4 * number, control=5000 * number)
        one.receive("device-0", progress_of(one.key, done=5, traffic=traffic), 2.0 * number)
        one.coordinator.tick(2.0 * number)
    assert any(isinstance(event, Stalled) for event in one.events())


def test_a_new_session_counts_its_bytes_anew() -> None:
    one = OneParent(1, idle_s=20.0)
    one.receive("device-0", progress_of(one.key, Phase.FETCHING, traffic=wire_of(received=10**9)), 1.0)
    one.presence("device-0", NodeState.READY, 2.0, session="later")
    for number in range(1, 10):
        traffic = wire_of(received=20_000 * number)
        one.receive("device-0", progress_of(one.key, Phase.FETCHING, traffic=traffic), 15.0 * number)
        one.coordinator.tick(15.0 * number + 0.5)
    assert not any(isinstance(event, Stalled) for event in one.events())


def test_repeats_that_get_nowhere_are_no_progress() -> None:
    """Bytes of models count as far as two chunks beyond what has arrived: more of them are the same chunk again."""
    one = OneParent(1, idle_s=20.0)
    for number in range(60):
        traffic = wire_of(received=200_000 * number)
        one.receive("device-0", progress_of(one.key, Phase.FETCHING, traffic=traffic), 5.0 * number)
        one.coordinator.tick(5.0 * number)
    assert any(isinstance(event, Stalled) for event in one.events())


@pytest.mark.parametrize("phase", [Phase.FETCHING, Phase.ANNOUNCING])
def test_a_connection_that_carries_no_more_than_the_last_one_is_no_progress(phase: Phase) -> None:
    """Each connection ends after the same part of a chunk, far below the two chunks that count."""
    one = OneParent(1, idle_s=30.0)
    one.receive("device-0", progress_of(one.key, phase), 0.0)
    for number in range(10):
        now = 10.0 * number
        one.receive("device-0", progress_of(one.key, phase, traffic=wire_of(received=20_000 * number)), now)
        one.receive("device-0", progress_of(one.key, phase, traffic=wire_of(received=20_000 * (number + 1))), now + 8)
        one.presence("device-0", NodeState.LOST, now + 9)
        one.presence("device-0", NodeState.READY, now + 9)
        one.coordinator.tick(now + 9)
        if any(isinstance(event, Stalled) for event in one.events()):
            break
    assert now + 9 == 39


def test_a_connection_that_carries_more_than_the_last_one_is_progress() -> None:
    one = OneParent(1, idle_s=30.0)
    one.receive("device-0", progress_of(one.key, Phase.FETCHING), 0.0)
    total = 0
    for number in range(1, 5):
        now, total = 20.0 * number, total + 20_000 * number
        one.receive("device-0", progress_of(one.key, Phase.FETCHING, traffic=wire_of(received=total)), now)
        one.presence("device-0", NodeState.LOST, now + 1)
        one.presence("device-0", NodeState.READY, now + 1)
        one.receive("device-0", progress_of(one.key, Phase.FETCHING, traffic=wire_of(received=total)), now + 2)
        one.coordinator.tick(now + 3)
    assert not any(isinstance(event, Stalled) for event in one.events())


def test_an_offer_in_the_queue_for_an_upload_slot_is_not_idle() -> None:
    """It did its part; that others upload before it, for longer than `idle_s`, is no silence of its own."""
    one = OneParent(3, idle_s=20.0)
    for name in one.names:
        one.receive(name, result_of(one.key), 1.0)
    for now in range(2, 80, 2):
        one.coordinator.moved("device-0", now=float(now))
        one.coordinator.tick(float(now))
    assert not any(isinstance(event, Stalled) for event in one.events())
    one.coordinator.tick(99.0)  # now nothing moved for any of them
    (stalled,) = one.events()
    assert isinstance(stalled, Stalled) and all(name in stalled.reason for name in one.names)


def test_a_child_that_prepares_is_waited_for_as_long_as_it_gets_on() -> None:
    one = OneParent(1, idle_s=20.0, ready=False)
    one.presence("device-0", NodeState.INIT, 1.0)
    for number in range(1, 50):
        one.coordinator.preparing("device-0", number, waits=False, now=19.0 * number)
        one.coordinator.tick(19.0 * number + 0.5)
        assert one.coordinator.hanging(19.0 * number + 0.5) == []
    one.presence("device-0", NodeState.READY, 950.0)
    one.receive("device-0", progress_of(one.key), 951.0)
    one.coordinator.tick(970.0)
    assert one.events() == []


def test_a_child_that_waits_for_its_own_children_is_not_idle_before_a_round_is_open() -> None:
    parent = Coordinator(["a"], idle_s=20.0)
    parent.presence("a", "s", Presence(NodeState.INIT, "institution"), now=0.0)
    for now in range(0, 900, 19):
        parent.preparing("a", 3, waits=True, now=float(now))
        assert parent.hanging(now + 19.0) == []
    key = parent.open(global_round=0, local_round=0, assignments=assignments(["a"]), closing=ALL, now=900.0)
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
            one.coordinator.preparing("device-0", 3, waits=False, now=float(now))  # the same each time
        one.receive("device-1", progress_of(one.key, done=now), float(now))
    assert one.coordinator.hanging(20.9) == [] and one.coordinator.hanging(22.0) == ["device-0"]
    one.coordinator.tick(22.0)
    (stalled,) = one.events()
    assert isinstance(stalled, Stalled) and stalled.idle
    assert "device-0 made no progress for 20 s (its state is init)" in stalled.reason


def test_the_grace_ends_with_its_process() -> None:
    one = OneParent(1, idle_s=20.0, ready=False)
    one.presence("device-0", NodeState.INIT, 1.0)
    one.presence("device-0", NodeState.LOST, 2.0)
    one.coordinator.tick(22.0)
    assert any(isinstance(event, Stalled) for event in one.events())


def test_a_child_that_gave_up_is_believed_at_once() -> None:
    one = OneParent(2, idle_s=20.0)
    one.receive("device-0", progress_of(one.key), 1.0)
    one.presence("device-0", NodeState.FAILED, 2.0, reason="CUDA out of memory")
    due = one.coordinator.next_deadline()
    assert due is not None and due <= 2.0
    one.coordinator.tick(2.0)
    (stalled,) = one.events()
    assert isinstance(stalled, Stalled) and not stalled.idle
    assert stalled.reason == "device-0 gave up: CUDA out of memory"


def test_a_child_that_came_back_after_giving_up_works_on() -> None:
    one = OneParent(1, closing=Closing(rule="quorum", quorum=1, deadline_s=5.0))
    one.presence("device-0", NodeState.FAILED, 2.0, reason="no")
    one.presence("device-0", NodeState.READY, 2.0, session="second")
    one.coordinator.tick(2.0)
    assert one.events() == [Restarted("device-0")]
    assert len(one.tasks(2.0)) == 1


@pytest.mark.parametrize("state", [NodeState.LOST, NodeState.FAILED, NodeState.DISCONNECTED, NodeState.FINISHED])
def test_the_last_message_of_a_process_with_a_successor_is_ignored(state: NodeState) -> None:
    one = OneParent(1)
    one.presence("device-0", NodeState.READY, 1.0, session="new")
    assert one.events() == [Restarted("device-0")]
    one.presence("device-0", state, 2.0, reason="device-0 is already alive")
    one.coordinator.tick(2.0)
    assert one.coordinator.states() == {"device-0": "ready"} and one.events() == []
    assert [name for name, _ in one.tasks(2.0)] == ["device-0"]


def test_a_restarted_child_begins_again() -> None:
    one = OneParent(2)
    one.receive("device-0", result_of(one.key), 1.0)
    one.events()
    one.presence("device-0", NodeState.READY, 2.0, session="new")
    assert one.events() == [Restarted("device-0")]
    assert [name for name, task in one.tasks(2.0) if task.inline] == ["device-0"]
    one.coordinator.accept("device-0", one.key, now=2.1)  # the old process' upload
    assert one.events() == [] and one.coordinator.to_send(2.2) == []
    one.receive("device-0", result_of(one.key), 3.0)
    assert [type(event) for event in one.events()] == [ResultAnnounced]
    one.coordinator.accept("device-0", one.key, now=3.5)
    one.finish("device-1", 4.0)
    assert isinstance(one.events()[-1], Closed)


def test_the_result_of_a_process_that_died_is_no_result_of_the_round() -> None:
    one = OneParent(2)
    one.receive("device-0", result_of(one.key), 1.0)
    one.presence("device-0", NodeState.READY, 2.0, session="new")
    one.receive("device-1", result_of(one.key), 3.0)
    assert one.coordinator.timeline.last_result is None
    one.receive("device-0", result_of(one.key), 9.0)
    assert one.coordinator.timeline.last_result == 9.0


def test_a_restart_after_the_result_was_taken_changes_nothing() -> None:
    one = OneParent(2)
    one.finish("device-0", 1.0)
    one.presence("device-0", NodeState.READY, 2.0, session="new")
    assert [name for name, _ in one.tasks(2.0)] == ["device-1"]
    one.finish("device-1", 3.0)
    closed = one.events()[-1]
    assert isinstance(closed, Closed) and set(closed.results) == set(one.names)


def test_a_model_that_its_child_no_longer_holds_is_asked_for_again() -> None:
    one = OneParent(1)
    one.receive("device-0", result_of(one.key), 1.0)
    one.coordinator.retry("device-0", one.key, now=2.0)
    assert len(one.tasks(2.0)) == 1
    one.coordinator.accept("device-0", one.key, now=2.1)
    assert not any(isinstance(event, Closed) for event in one.events())
    one.finish("device-0", 3.0)
    assert isinstance(one.events()[-1], Closed)


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
    assert one.acknowledgements(1.0) == [("device-0", Acknowledgement(Key(0, 2, 0), "the round has closed"))]


def test_why_a_child_declined_is_named_when_it_gets_nowhere() -> None:
    one = OneParent(1, idle_s=20.0)
    one.coordinator.declined("device-0", one.key, "wrong layout")
    assert one.events() == [] and one.tasks(1.0)  # it is sent again: the next may fit
    one.coordinator.tick(20.0)
    (stalled,) = one.events()
    assert isinstance(stalled, Stalled) and "it declined its task: wrong layout" in stalled.reason


def test_a_child_that_took_its_task_after_all_has_declined_nothing() -> None:
    one = OneParent(1, idle_s=20.0)
    one.coordinator.declined("device-0", one.key, "wrong layout")
    one.receive("device-0", progress_of(one.key), 1.0)
    one.coordinator.declined("device-0", one.key, "of a duplicate, minutes late")
    one.coordinator.tick(21.0)
    (stalled,) = one.events()
    assert isinstance(stalled, Stalled) and "declined" not in stalled.reason


@pytest.mark.parametrize("failure", Failure)
def test_why_a_child_gave_up_is_passed_on(failure: Failure) -> None:
    one = OneParent(1)
    failed = Presence(NodeState.FAILED, "device", reason="no data", failure=failure)
    one.coordinator.presence("device-0", "device-0-a", failed, now=1.0)
    one.coordinator.tick(1.0)
    assert one.events() == [Stalled("device-0 gave up: no data", idle=False, failures=frozenset({failure}))]


def test_a_deadline_that_passed_is_no_reason_to_wake() -> None:
    """What has been judged is judged: a deadline in the past would keep the event loop spinning."""
    quorum = Closing(rule="quorum", quorum=2, deadline_s=500.0)
    one = OneParent(3, idle_s=20.0, closing=quorum)
    now = 0.0
    for _ in range(400):
        one.receive("device-1", progress_of(one.key, done=int(now)), now)
        one.receive("device-2", progress_of(one.key, done=int(now)), now)
        one.coordinator.tick(now)
        one.coordinator.to_send(now)
        due = one.coordinator.next_deadline()
        assert due is None or due > now
        now += 0.5
    assert one.events() == []
    one = OneParent(2, idle_s=20.0, closing=Closing(rule="all", quorum=1, deadline_s=5.0))
    one.finish("device-0", 1.0)
    one.receive("device-1", progress_of(one.key), 6.0)
    one.coordinator.tick(6.0)
    one.coordinator.to_send(6.0)
    due = one.coordinator.next_deadline()
    assert due is not None and due > 6.0


def test_no_round_no_deadline() -> None:
    one = OneParent(1)
    one.finish("device-0", 1.0)
    assert one.coordinator.next_deadline() is None and not one.tasks(100.0)
    one.coordinator.tick(1000.0)
    assert [type(event) for event in one.events()] == [ResultAnnounced, Closed]


# Closing


@pytest.mark.parametrize("rule", ["all", "quorum"])
def test_a_verdict_is_what_its_description_states(rule: str) -> None:
    for accepted, refused, idle, waiting, absent in itertools.product(range(3), repeat=5):
        standing = Standing(accepted, refused, idle, waiting, absent)
        total = accepted + refused + idle + waiting + absent
        for quorum, overdue in itertools.product(range(1, total + 1), (False, True)):
            closing = Closing(rule=rule, quorum=quorum, deadline_s=5.0)  # type: ignore[arg-type]
            to_come = waiting + absent
            if rule == "all":
                if idle > 0 or (to_come == 0 and accepted == 0):
                    expected = Verdict.IMPOSSIBLE
                else:
                    expected = Verdict.WAIT if to_come else Verdict.CLOSE
            elif accepted + to_come < quorum:
                expected = Verdict.IMPOSSIBLE
            elif to_come == 0 or (accepted >= quorum and (overdue or waiting == 0)):
                expected = Verdict.CLOSE
            else:
                expected = Verdict.WAIT
            assert judge(closing, standing, overdue=overdue) is expected, (closing, standing, overdue)


def test_all_needs_no_quorum_and_no_deadline() -> None:
    assert judge(ALL, Standing(3, 0, 0, 0), overdue=False) is Verdict.CLOSE
    assert judge(ALL, Standing(2, 1, 0, 0), overdue=False) is Verdict.CLOSE
    assert judge(ALL, Standing(2, 0, 0, 1), overdue=True) is Verdict.WAIT
    assert judge(ALL, Standing(2, 0, 0, 0, absent=1), overdue=True) is Verdict.WAIT
    assert judge(ALL, Standing(2, 0, 1, 0), overdue=False) is Verdict.IMPOSSIBLE


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
    stalled = lab.play()
    assert isinstance(stalled, Stalled) and "device-0 and device-1 made no" in stalled.reason


@pytest.mark.parametrize("seen", [True, False])
def test_a_quorum_does_not_wait_for_those_that_were_lost_before(seen: bool) -> None:
    """With 20 of 100 dead, each round would take its whole deadline."""
    lab = Lab(names_of(5), start=False)
    for name in lab.names[0 if seen else 2 :]:
        lab.start(name)
    lab.rest(1.0)
    if seen:
        for name in names_of(2):
            lab.kill(name)
        lab.rest(1.0)
    begun = lab.now
    closed = lab.round(closing=quorum_of(2, 300.0))
    assert closed.missing == tuple(names_of(2)) and set(closed.results) == set(lab.names[2:])
    assert lab.now - begun < 10.0


def test_a_child_that_comes_back_in_time_is_waited_for_again() -> None:
    lab = Lab(names_of(3), start=False)
    for name in lab.names[1:]:
        lab.start(name)
    lab.rest(1.0)
    lab.loop.after(1.0, lambda: lab.start("device-0"))
    assert set(lab.round(closing=quorum_of(2, 300.0)).results) == set(lab.names)


def test_all_waits_for_those_that_were_lost_before() -> None:
    lab = Lab(names_of(3), start=False)
    for name in lab.names[1:]:
        lab.start(name)
    lab.loop.after(30.0, lambda: lab.start("device-0"))
    assert set(lab.round().results) == set(lab.names)


# Time


MARKS = st.one_of(st.none(), st.integers(0, 1000).map(lambda n: n / 64))


@given(
    opened=st.integers(0, 1000).map(lambda n: n / 64), marks=st.tuples(MARKS, MARKS, MARKS), took=st.integers(0, 900)
)
def test_the_phases_of_a_round_add_up(opened: float, marks: tuple[float | None, ...], took: int) -> None:
    closed = opened + took / 64
    inside = [None if mark is None else min(opened + mark, closed) for mark in marks]
    phases = Timeline(opened, *inside, closed).phases()
    assert list(phases) == ["dispatch", "train", "wait", "collect"]
    assert sum(phases.values()) == closed - opened and min(phases.values()) >= 0


def test_an_open_round_has_phases_too() -> None:
    assert sum(Timeline(5.0).phases().values()) == 0.0
    assert Timeline(5.0, 7.0).phases() == {"dispatch": 2.0, "train": 0.0, "wait": 0.0, "collect": 0.0}


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
    assert one.coordinator.timeline.phases() == {"dispatch": 2.0, "train": 3.0, "wait": 4.0, "collect": 8.0}


def test_a_result_without_progress_before_it_had_its_model() -> None:
    one = OneParent(1)
    one.receive("device-0", result_of(one.key), 4.0)
    assert one.coordinator.timeline.dispatched == 4.0


def test_a_result_at_the_very_start_of_the_clock_is_the_first() -> None:
    one = OneParent(2)
    one.receive("device-0", result_of(one.key), 0.0)
    one.receive("device-1", result_of(one.key), 4.0)
    assert one.coordinator.timeline.first_result == 0.0


# The child by hand


def task_of(key: Key, *, model: int = 1, epochs: int = 1) -> Task:
    return Task(key, epochs, manifest_of(model), None)


COUNTED = Traffic(1), (Traffic(2),)


def offer_of(key: Key) -> Result:
    """Return a child's result as it is offered, with the bytes that its link and those below have carried."""
    return replace(result_of(key), traffic=COUNTED[0], below=COUNTED[1])


class OneChild:
    """A participant in the hand of a test."""

    def __init__(self) -> None:
        self.participant, self.session = Participant(idle_s=20.0), "p"

    def receive(self, message: Task | Acknowledgement, now: float = 0.0, *, session: str = "p") -> list[object]:
        """Take a message of the parent's session, which may be a new one; return what happened."""
        if session != self.session:
            self.session = session
            self.participant.parent_restarted(now)
        self.participant.receive(message, now=now)
        return list(iter(self.participant.next_event, None))

    def to_send(self, now: float) -> list[Progress | Result]:
        return self.participant.to_send(now, *COUNTED)

    def work(self, key: Key, now: float = 0.0, **what: int) -> None:
        task = task_of(key, **what)
        assert self.receive(task, now) == [Begin(task)]
        self.participant.begin_work(Phase.TRAINING, now=now)
        self.participant.finish(result_of(key), now=now)


def test_a_task_is_begun_once() -> None:
    one = OneChild()
    assert one.receive(task_of(OLD)) == [Begin(task_of(OLD))]
    assert one.receive(replace(task_of(OLD), inline=b"x")) == []
    one.participant.begin_work(Phase.WAITING, now=1.0)
    assert one.receive(task_of(OLD), 2.0) == [] and one.participant.state is ParticipantState.WORKING
    (progress,) = one.to_send(2.0)  # but it is answered
    assert progress == Progress(OLD, Phase.WAITING, 0, 0, Traffic(1), (Traffic(2),))


def test_a_result_is_offered_until_its_acknowledgement() -> None:
    one = OneChild()
    one.work(OLD)
    times = []
    while (due := one.participant.next_deadline()) is not None and due < 30:
        assert one.to_send(due) == [offer_of(OLD)]
        times.append(due)
    assert times == [0.0, 1.0, 3.0, 7.0, 12.0, 17.0, 22.0, 27.0]
    assert one.receive(Acknowledgement(Key(0, 0, 1), "")) == []
    assert one.receive(Acknowledgement(OLD, "holds NaN")) == [Acknowledged(OLD, "holds NaN")]
    assert one.receive(Acknowledgement(OLD, "holds NaN")) == [] and one.participant.next_deadline() is None
    assert one.to_send(100.0) == []


def test_a_small_result_travels_with_the_first_offer_only() -> None:
    one = OneChild()
    one.receive(task_of(OLD))
    one.participant.finish(replace(result_of(OLD), inline=b"x"), now=0.0)
    inlines = [message.inline for now in (0.0, 1.0, 3.0) for message in one.to_send(now) if isinstance(message, Result)]
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
    assert one.receive(task) == [Begin(task)] and one.participant.state is ParticipantState.FETCHING


def test_a_task_of_an_earlier_round_is_ignored() -> None:
    one = OneChild()
    task = task_of(Key(0, 5, 1))
    one.receive(task)
    for key in (Key(0, 5, 0), Key(0, 4, 9)):
        assert one.receive(task_of(key)) == []
    later = task_of(Key(1, 4, 0))
    assert one.receive(later) == [Begin(later)]


def test_a_parent_that_restarted_may_go_back() -> None:
    for first in (None, Acknowledgement(Key(0, 5, 0), "the round has closed")):  # whatever its first message is
        one = OneChild()
        one.work(Key(0, 5, 0))
        if first is not None:
            one.receive(first, session="new")
        task = task_of(Key(0, 4, 0), model=4)
        assert one.receive(task, session="new") == [Begin(task)]
        assert one.receive(task_of(Key(0, 3, 0)), session="new") == []  # once
        assert one.receive(Acknowledgement(Key(0, 5, 0), ""), session="new") == []


def test_the_result_of_a_superseded_task_is_dropped() -> None:
    """It may be ready in the moment in which the next task arrives: it must not pass for the next one's result."""
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
    assert one.to_send(10.0) == [] and one.participant.next_deadline() is None
    one.participant.finish(result_of(OLD), now=10.0)
    assert one.participant.state is ParticipantState.IDLE
    assert one.receive(task_of(OLD), 11.0) == [Begin(task_of(OLD))]


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
