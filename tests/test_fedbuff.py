"""FedBuff: versions in flight, tasks that outlive their rounds, replays."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.experiment.tiers import Tier
from fedstrata.common.methods.selection import ClientSelection, ResultFacts
from fedstrata.common.protocol.coordinator import Coordinator
from fedstrata.common.protocol.events import UploadAnnounced
from fedstrata.common.protocol.messages import Acknowledgement, Key, NodeState
from fedstrata.common.protocol.participant import Acknowledged, ParticipantState
from fedstrata.common.protocol.round_state import TAKEN_BACK, Closed, Stalled
from fedstrata.common.runtime.round import Dispatch
from fedstrata.deploy.local.replay import replayed
from fedstrata.deploy.results.run import Run
from tests.helpers.commands import DEMO, fedstrata, run_lab, tensors
from tests.helpers.coordinators import (
    OLD,
    OneChild,
    OneParent,
    quorum_of,
    result_of,
    results_of,
    task_of,
)
from tests.helpers.direct import events, run_direct
from tests.helpers.examples import examples
from tests.helpers.rules import LAYOUT, Report, aggregate, rule_of
from tests.helpers.scenarios import completed, restarted
from tests.simulation.labs import LABS, read_lab
from tests.simulation.runs import check_lab

pytestmark = pytest.mark.usefixtures("warm")

NAMES: Final = tuple("abcde")
ONE_OF_TWO: Final = quorum_of(1, 0.0)


# The rule


def test_a_node_keeps_the_models_of_children_in_flight() -> None:
    """None once their results are used, or the node begins with another model."""
    rule: Any = rule_of({"name": "fedbuff"})
    rows_K = np.zeros((len(NAMES), LAYOUT.row_bytes), np.uint8)
    for r, (free, used) in enumerate([("abcde", "a"), ("a", "bcd"), ("bcd", "e")]):
        rule.dispatch(r, list(free))
        reports = [Report(1, 1.0) if child in used else None for child in NAMES]
        aggregate(rule, r, NAMES, rows_K, reports)
    assert rule._versions.keys() == {1, 2} and rule._received == {"a": 1, **dict.fromkeys("bcd", 2)}
    rule.begin(rule.model.copy())
    assert rule._versions == {} == rule._received


# Client selection


def test_as_many_children_train_at_once_as_take_part() -> None:
    tier = Tier.model_validate(
        {"name": "wan", "participation": 0.6, "aggregation": {"name": "fedbuff"}}
    )
    one = ClientSelection(tier, seed=3, node="cloud")
    at_once: set[str] = set()
    for r in range(20):
        assert set(one.in_flight or ()) == at_once
        selected = one.select(NAMES, r)
        assert not at_once & set(selected)
        at_once |= set(selected)
        assert len(at_once) == 3
        used = sorted(at_once)[r % 2 : r % 2 + 2]
        one.observe(r, selected, {used[0]: ResultFacts(1, 1.0, 1.0, 1)}, refused=used[1:])
        at_once -= set(used)
    follows = one.follows(NAMES, 20)
    assert all(0 <= number <= 20 for number in follows.values()) and max(follows.values()) > 15
    one.begin()
    assert one.in_flight == []


# The protocol


def two_in_flight() -> tuple[OneParent, Key]:
    """Return a coordinator whose first round has closed with the result of a alone."""
    one = OneParent("ab", idle_s=100.0, closing=ONE_OF_TWO, opened=False)
    first = one.start(0, carried="")
    assert tasks_of(one, 0.0) == {"a": first, "b": first}
    (closed,) = used(one, "a", first, 0.5)
    assert results_of(closed) == {"a"} and not closed.missing  # type: ignore[attr-defined]
    assert one.in_flight() == ["b"]
    return one, first


def tasks_of(one: OneParent, now: float) -> dict[str, Key]:
    return {name: task.key for name, task in one.tasks(now)}


def used(one: OneParent, name: str, key: Key, now: float) -> list[object]:
    """Announce a result and accept it; return what happens then."""
    assert [type(event) for event in one.announce(now, name, key)] == [UploadAnnounced]
    one.accept(name, key, now=now)
    return one.events()


def test_a_task_goes_on_after_its_round_and_counts_in_a_later_one() -> None:
    one, first = two_in_flight()
    second = one.start(1, now=1.0, names="a", carried="b")
    assert tasks_of(one, 9.0)["a"] == second and tasks_of(one, 30.0).get("b", first) == first
    (closed,) = used(one, "b", first, 40.0)
    assert results_of(closed) == {"b"} and one.timeline.seconds == {"b": 40.0}
    assert one.in_flight() == ["a"]


def test_a_result_that_comes_between_two_rounds_counts_in_the_next() -> None:
    one, first = two_in_flight()
    assert used(one, "b", first, 0.7) == []
    one.start(1, now=1.0, names="a", carried="b")
    one.tick(1.0)
    (closed,) = one.events()
    assert results_of(closed) == {"b"}


def test_a_child_in_flight_that_restarts_gets_its_own_task_again() -> None:
    one, first = two_in_flight()
    one.come(name="b", session="2")
    second = one.start(1, now=1.0, names="a", carried="b")
    assert tasks_of(one, 5.0) == {"a": second, "b": first}


def test_a_result_that_was_used_is_acknowledged_again_and_no_more_used() -> None:
    one, first = two_in_flight()
    one.to_send(0.5)
    one.start(1, now=1.0, names="a", carried="b")
    assert one.announce(3.0, "a", first) == []
    assert ("a", first, "") in one.answers(3.0) and one.late == 0


def test_a_round_of_the_usual_kind_ends_all_tasks() -> None:
    one, first = two_in_flight()
    one.end()
    assert one.announce(0.6, "b", first) == [] and one.late == 1
    second = one.start(1, now=1.0, carried="")
    assert tasks_of(one, 5.0) == {"a": second, "b": second}


def test_a_result_accepted_after_the_last_round_is_taken_back() -> None:
    one, first = two_in_flight()
    used(one, "b", first, 0.7)
    one.to_send(0.7)
    one.end()
    assert one.answers(0.8) == [("b", first, TAKEN_BACK)]
    assert one.announce(3.0, "b", first) == []  # it is announced again, as the answer was lost
    assert one.answers(3.0) == [("b", first, TAKEN_BACK)]


@pytest.mark.parametrize(
    ("answers", "learned"),
    [(["", "no"], ["", "no"]), (["no", ""], ["no"]), (["", "no", "no", ""], ["", "no"])],
)
def test_a_child_learns_that_its_result_is_taken_back_whenever_that_comes(
    answers: list[str], learned: list[str]
) -> None:
    child, found = OneChild(), list[object]()
    child.work()
    for reason in answers:
        found += child.take(Acknowledgement(OLD, reason), 2.0)
    assert found == [Acknowledged(OLD, reason) for reason in learned]
    # the same task again gives the same result, which may be used now
    child.take(task_of(OLD), 3.0)
    assert child.state is ParticipantState.ANNOUNCING


STEPS: Final = [*["announce", "accept"] * 4, *["next", "anew"] * 2]
STEPS += ["refuse", "retry", "restart", "fail", "tick", "back", "cancel"]


@pytest.mark.parametrize("buffered", [True, False])
@given(seed=st.integers(0, 2**32))
@examples(40)
def test_each_accepted_result_is_in_one_closed_round_or_is_taken_back(
    buffered: bool, seed: int
) -> None:
    """Whatever happens to tasks and rounds: by the last acknowledgement that the child gets."""
    draw = random.Random(seed)
    closing = quorum_of(2, 0.0 if buffered else 5.0)
    one = OneParent("abc", idle_s=30.0, closing=closing, opened=False)
    accepted, used = set[tuple[str, Key]](), list[tuple[str, Key]]()
    last = dict[tuple[str, Key], str]()
    keys, sessions = dict[str, Key](), Counter("abc")
    now, r, is_open = 0.0, -1, False
    for step in ["next", *draw.choices(STEPS, k=100), "cancel"]:
        name = draw.choice("abc")
        now += 1.0
        if step in ("next", "anew", "back") and not is_open:
            r = max(0, r - 1) if step == "back" else r + 1
            carried = one.in_flight() if buffered and step != "anew" else []
            free = [name for name in "abc" if name not in carried]
            key = one.start(r, now=now, names=free, carried=carried if buffered else None)
            keys.update(dict.fromkeys(free, key))
            is_open = True
        elif step == "announce":
            one.receive(name, result_of(keys[name], ord(name)), now=now)
        elif step == "accept":
            if one.is_announced(name, keys[name]):
                accepted.add((name, keys[name]))
            one.accept(name, keys[name], now=now)
        elif step == "refuse":
            one.refuse(name, keys[name], reason="no", now=now)
        elif step == "retry":
            one.retry(name, keys[name], now=now)
        elif step in ("restart", "fail"):
            sessions[name] += step == "restart"
            state = NodeState.READY if step == "restart" else NodeState.FAILED
            one.come(now, state, name=name, session=str(sessions[name]))
        elif step == "tick":
            now += 10.0
            one.tick(now)
        elif step == "cancel":
            one.end()
            is_open = False
        for event in one.events():
            is_open = is_open and not isinstance(event, Closed | Stalled)
            if isinstance(event, Closed):
                used += [(name, result.key) for name, result in event.results.items()]
        last |= {(name, key): reason for name, key, reason in one.answers(now)}
    assert sorted(used) == sorted(pair for pair in accepted if not last[pair])
    assert one.unsettled() == [] and one.accepted == len(accepted)
    assert (one.used, one.taken_back) == (len(used), len(accepted) - len(used))


# Labs

LAB: Final[dict[str, Any]] = {
    "rounds": 12,
    "links": {"check": "off"},
    "topology": {"institutions": 0, "devices": 4},
    "hardware": {"of": {"device-1": {"overhead_s": 20.0}}},
}


FIRST_TWO: Final = LAB | {"cloud": {"aggregation": {"name": "fedbuff", "buffer": 2}}}


def test_a_slow_device_does_not_hold_up_the_others() -> None:
    (buffered, plans, _), (synchronous, *_) = completed(FIRST_TWO), completed(LAB)
    assert buffered.virtual_s < synchronous.virtual_s / 5
    assert all(len(plan["used"]) >= 2 and "without" not in plan for plan in plans)
    assert len(plans) == 12 and plans[0]["taking_part"] == [f"device-{k}" for k in range(4)]


def test_the_slow_devices_step_comes_with_its_age() -> None:
    lab = {**LAB, "rounds": 30, "hardware": {"of": {"device-1": {"overhead_s": 3.0}}}}
    lab |= {"cloud": {"aggregation": {"name": "fedbuff", "buffer": 3}}}
    plans = [plan for plan in completed(lab)[1] if "device-1" in plan["ages"]]
    ages = [plan["ages"]["device-1"] for plan in plans]
    assert ages and max(ages) >= 2
    weights = [plan["weights"]["device-1"] * len(plan["used"]) for plan in plans]
    assert weights == pytest.approx([(1 + age) ** -0.5 for age in ages])


@pytest.mark.parametrize("node", ["cloud", "device-0", "device-1"])
def test_a_lab_goes_on_after_a_node_was_killed(node: str) -> None:
    completed(FIRST_TWO, restarted(node, 3.0))


def test_a_lab_that_loses_accepted_results_violates_an_invariant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As any run of this lab did, before results were taken back."""

    def end(self: Coordinator, *, but: Collection[str] = ()) -> None:
        self.is_open = False
        for name, child in self.children.items():
            child.carried = child.carried and name in but

    drawn = read_lab(LABS / "buffers-take-back.toml")
    assert check_lab(drawn).violations == ()
    monkeypatch.setattr(Coordinator, "end", end)
    monkeypatch.setattr(Dispatch, "last", property(lambda self: False, lambda self, value: None))
    ((name, wrong),) = check_lab(drawn).violations
    assert (
        name == "undisturbed lab is exact" and "accepted and lost at institution-0: 4 of" in wrong
    )


TINY: Final[dict[str, Any]] = {
    "seed": 3,
    "rounds": 5,
    "topology": {"institutions": 2, "devices": 6},
    "model": {"name": "mlp_digits"},
    "training": {"batch_size": 2000, "learning_rate": 0.2},
}


def test_without_a_network_the_oldest_tasks_are_done_first_and_a_replay_is_the_same(
    tmp_path: Path,
) -> None:
    tree = {**TINY, "cloud": {"aggregation": {"name": "fedbuff", "buffer": 1}}}
    tree["institution"] = {
        "rounds": 3,
        "participation": 0.67,
        "aggregation": {"name": "fedbuff", "buffer": 1},
    }
    path = run_direct(tmp_path, tree)
    plans = events(path, "plan", node="cloud")
    assert [plan["used"] for plan in plans] == [[f"institution-{r % 2}"] for r in range(5)]
    assert [list(plan["ages"].values()) for plan in plans] == [[0], [1], [1], [1], [1]]
    again = replayed(Run(path), tmp_path, accelerator="cpu", observe=lambda event, facts: None)
    assert tensors(again) == tensors(path)


@pytest.mark.slow
def test_a_lab_of_processes_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    recorded = run_lab(
        DEMO, tmp_path, "rounds=10", "topology.devices=6", "training.batch_size=100",
        'institution={rounds=3, aggregation={name="fedbuff", buffer=1}}',
        'cloud={aggregation={name="fedbuff", buffer=2}}', 'hardware.of={device-1={overhead_s=0.3}}',
    )  # fmt: skip
    done = fedstrata("replay", recorded, "--runs", tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "the same model, bit for bit"), (
        done.stderr
    )
