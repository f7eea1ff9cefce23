"""When rounds close, and whole rounds of sessions in memory, in virtual time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import inf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.protocol.messages import Key
from fedstrata.common.protocol.participant import ParticipantState
from fedstrata.common.protocol.round_state import Standing, Timeline, Verdict, judge
from fedstrata.common.settings.closing import Closing
from tests.helpers.coordinators import quorum_of
from tests.helpers.examples import examples
from tests.helpers.session_lab import ALL, PARENT, Lab, manifest_of, model_of, names_of
from tests.simulation.faults import Fault, FaultKind

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
            found = judge(closing, standing, overdue=overdue)
            assert found is expected, (closing, standing, overdue)


DIES, DEAD, ABSENT = -1.0, -2.0, -3.0  # after a second, before the round, not yet started


@pytest.mark.parametrize(
    ("train_s", "closing", "missing", "took_s"),
    [
        *(([100.0] * slow + [3.0] * (5 - slow), quorum_of(2, 10.0), slow, 10.0) for slow in (1, 2, 3)),
        ([90.0, 30.0, 20.0], quorum_of(2, 5.0), 1, 31.0),  # it comes after the deadline
        ([3.0, 3.0, 3.0], quorum_of(2, 300.0), 0, 4.0),  # all are here
        ([DIES, 3.0, 3.0, 60.0], quorum_of(3, 5.0), 1, 60.0),
        # With 20 of 100 dead, each round would take its whole deadline.
        ([DEAD, DEAD, 3.0, 3.0, 3.0], quorum_of(2, 300.0), 2, 4.0),
        ([ABSENT, ABSENT, 3.0, 3.0, 3.0], quorum_of(2, 300.0), 2, 4.0),
    ],
)  # fmt: skip
def test_a_quorum_waits_for_its_deadline_and_no_longer(
    train_s: list[float], closing: Closing, missing: int, took_s: float
) -> None:
    lab = Lab(names_of(len(train_s)), start=False)
    for name, each_s in zip(lab.names, train_s, strict=True):
        if each_s != ABSENT:
            lab.start(name).train_s = abs(each_s)
        if each_s == DEAD:
            lab.after(0.5, lab.kill, name)
        if each_s == DIES:
            lab.after(2.0, lab.kill, name)
    lab.rest(1.0)
    begun = lab.now
    closed = lab.round(closing=closing)
    assert closed.missing == tuple(lab.names[:missing])
    assert set(closed.results) == set(lab.names[missing:])
    assert lab.now - begun == pytest.approx(took_s, abs=1.0 if took_s != 10.0 else 0.0)
    living = {node.name for node in lab.nodes()} & set(lab.names)
    for name in living:
        lab.children[name].train_s = 3.0
    # the slow ones leave the old round for the new one
    assert set(lab.round(local_round=1, closing=closing).results) == living
    assert lab.coordinator.late == 0
    lab.check()


def test_a_quorum_that_can_never_be_filled_stalls() -> None:
    lab = Lab(names_of(3))
    lab.hit(*(Fault(FaultKind.KILL, 1.0, inf, name) for name in names_of(2)))
    lab.open(closing=quorum_of(2, 500.0))
    assert "device-0 and device-1 made no" in lab.stall().reason


@pytest.mark.parametrize(("closing", "after_s"), [(quorum_of(2, 300.0), 1.0), (ALL, 30.0)])
def test_a_child_that_comes_back_in_time_is_waited_for_again(
    closing: Closing, after_s: float
) -> None:
    lab = Lab(names_of(3), start=False)
    for name, at_s in zip(lab.names, (1.0 + after_s, 0.0, 0.0), strict=True):
        lab.after(at_s, lab.start, name)
    lab.rest(1.0)
    lab.complete(closing=closing)


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
    assert [*Timeline(5.0, 7.0).phases().values()] == [2.0, 0.0, 0.0, 0.0]


# Whole rounds


def test_a_round_without_trouble_sends_everything_once() -> None:
    lab = Lab(names_of(5))
    lab.rest(1.0)
    begun = lab.now
    closed = lab.complete()
    assert closed.key == Key(0, 0, 0) and not closed.missing and not closed.refused
    assert lab.kinds["Task"] == lab.kinds["Result"] == 5 and lab.now - begun < 4.0
    lab.rest(0.1)
    assert lab.kinds["Acknowledgement"] == 5
    for child in lab.children.values():
        participant = child.session.participant
        assert len(child.trained) == 1 and participant.state is ParticipantState.DONE
        assert participant.next_deadline() == inf
    lab.check()


def test_rounds_follow_each_other_with_those_named_and_a_model_each() -> None:
    lab = Lab(names_of(3))
    for global_round, local_round in itertools.product(range(3), range(2)):
        names, epochs = lab.names[: 3 - local_round], 1 + global_round
        models = {name: model_of(10 * global_round + number) for number, name in enumerate(names)}
        closed = lab.round(
            global_round=global_round, local_round=local_round, epochs=epochs, models=models
        )
        assert closed.key == Key(0, global_round, local_round)
        assert {name: result.work.epochs for name, result in closed.results.items()} == (
            dict.fromkeys(names, epochs)
        )
        assert {name: lab.children[name].trained[-1][1] for name in names} == {
            name: manifest_of(model).blob for name, model in models.items()
        }
    assert [len(child.trained) for child in lab.children.values()] == [6, 6, 3]
    assert lab.coordinator.late == 0
    lab.check()


FAULTS = st.builds(
    Fault,
    st.sampled_from([FaultKind.KILL, FaultKind.PARTITION, FaultKind.BROKER]),
    st.floats(0.0, 8.0),
    st.floats(0.0, 3.0),
    st.sampled_from([PARENT, *names_of(5)]),
    st.sampled_from([inf, 0.0, 1.0, 20.0]),  # the will comes so much later, or never
    st.sampled_from(["empty", "kept", "old"]),
)


@examples(40)
@example(seed=145, children=5, loss=0.4, duplicates=0.3, jitter_s=3.0, inline=0, slots=2, faults=[])
@given(
    seed=st.integers(0, 2**32),
    children=st.integers(1, 5),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    duplicates=st.sampled_from([0.0, 0.3]),
    jitter_s=st.sampled_from([0.0, 0.05, 3.0]),
    inline=st.sampled_from([0, 10_000]),
    slots=st.sampled_from([1, 2, 4]),
    faults=st.lists(FAULTS, max_size=4),
)
def test_whatever_happens_the_rounds_complete_with_the_right_bytes(
    *, children: int, inline: int, slots: int, faults: list[Fault], **line: float
) -> None:
    """Of 40 % lost, a dozen asks in a row are, once in many runs: so silence may be long."""
    transfer = TransferSettings(inline_bytes=inline, idle_s=600.0, upload_slots=slots)
    lab = Lab(names_of(children), transfer=transfer, **line)  # type: ignore[arg-type]
    lab.after(2.0, lambda: lab.stores.update(old=dict(lab.broker.retained)))
    nodes = dict(zip(names_of(5), itertools.cycle(lab.names), strict=False))
    lab.hit(*(replace(fault, node=nodes.get(fault.node, PARENT)) for fault in faults))
    for local_round in range(2):
        lab.complete(local_round=local_round, until_s=3000.0)
    lab.check()


def test_a_parent_that_goes_back_gets_new_results() -> None:
    """A parent that restarts from an older checkpoint, after a child already offered it a later
    round's result.
    """
    lab = Lab(names_of(2))
    for local_round in range(2):
        lab.round(global_round=5, local_round=local_round)
    lab.open(global_round=6)
    participants = [child.session.participant for child in lab.children.values()]
    lab.until(lambda: {one.state for one in participants} == {ParticipantState.ANNOUNCING})
    lab.opening = None
    lab.kill(PARENT, for_s=0.0)
    # long enough for each child to repeat its offer to a parent that has no round open
    lab.rest(10.0)
    lab.complete(global_round=4, until_s=30.0)


def test_going_back_in_one_process_is_a_new_attempt() -> None:
    lab = Lab(names_of(2))
    rounds = [(1, 1), (1, 0), (1, 0), (1, 1)]
    keys = [lab.round(global_round=a, local_round=b).key for a, b in rounds]
    assert keys == [Key(0, 1, 1), Key(1, 1, 0), Key(2, 1, 0), Key(2, 1, 1)]
    # The same task again is answered without training; the others are rounds of their own by then.
    assert [key.round for key, _, _ in lab.child.trained] == [(1, 1), (1, 0), (1, 1)]
