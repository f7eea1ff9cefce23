"""Watching a run from its brokers: status records, and presences of what has no parent there."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.errors import NoProgress, RunFailed, WireError
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import (
    ChildCount,
    Goodbye,
    Key,
    NodeState,
    PhaseSeconds,
    RoundScore,
    RunStatus,
    Step,
)
from fedstrata.common.text import json_text
from fedstrata.deploy.watching import formatting
from fedstrata.deploy.watching.lab_state import GOODBYE_S, SILENT_S, WARN_S
from fedstrata.deploy.watching.view import View
from tests.helpers.status import child
from tests.helpers.watched import BODIES, LAB, NAMES, RUN, Watched, drawn, experiment_of


def line_of(watched: Watched, name: str) -> str:
    """Return a node's line in the picture."""
    lines = View(160, 60).picture(watched.lab, watched.now, [])
    return next(line.plain for line in lines if line.plain.split()[:1] == [name])


# Presence, and what parents report


def test_a_device_is_as_its_parents_record_has_it_whatever_its_presence() -> None:
    watched = Watched()
    watched.all_ready()
    watched.state("device-0", NodeState.LOST)
    assert watched["device-0"].state == "ready" and not watched.events()
    watched.now = 2.0
    lost = child("device-0", state=NodeState.LOST, text="connection lost")
    watched.status("institution-0", lost, child("device-1"))
    assert watched["device-0"].state == "lost"
    watched.now = 14.0
    assert "connection lost; last seen 14 s ago" in line_of(watched, "device-0")
    facts = {"node": "device-0", "role": "device", "state": "lost", "reason": "connection lost"}
    assert watched.events() == [("state", facts)]


def test_children_that_a_record_only_counts_have_the_state_that_all_of_these_have() -> None:
    watched = Watched(experiment_of(1, 100))
    counted = ChildCount(NodeState.READY, Step.DONE, 98)
    watched.status(
        "institution-0", child("device-0"), child("device-1", state=None), others=(counted,)
    )
    assert Counter(node.state for node in watched.lab.nodes.values() if node.role == "device") == {
        "ready": 99, "absent": 1
    }  # fmt: skip
    both = counted, ChildCount(NodeState.INIT, Step.IDLE, 1)
    watched.now = 1.0
    watched.status("institution-0", child("device-99"), others=both)
    assert watched["device-1"].state == "absent"  # it is one of the two: not known which


def test_a_child_that_prepares_is_shown_with_those_whom_it_waits_for() -> None:
    watched = Watched()
    watched.state("cloud", NodeState.INIT)
    text = "device-0 gave up: no data here"
    for _ in range(3):
        watched.now += 1.0
        watched.status("cloud", child("institution-0", state=NodeState.INIT, text=text))
        gone, prepares = (
            child("device-0", state=NodeState.FAILED),
            child("device-1", state=NodeState.INIT),
        )
        watched.status("institution-0", gone, prepares)
    waiting = {"node": "institution-0", "waits_for": text}
    assert [event for event in watched.events() if event[0] != "state"] == [("waiting", waiting)]
    assert formatting.line(watched.lab, "waiting", waiting) == f"institution-0: waits for {text}"
    assert f"1/2 present, waits for {text}" in line_of(watched, "institution-0")
    assert formatting.branch(watched["institution-0"], 0.0)["text"] == text
    assert "prepares" in line_of(watched, "device-1") and "waits" not in line_of(
        watched, "device-1"
    )
    watched.state("cloud", NodeState.READY)
    watched.status("cloud", child("institution-0"), at_s=10.0)
    assert formatting.activity(watched["institution-0"]) == "ready"
    assert "waits" not in line_of(watched, "institution-0")


def test_what_is_refused_or_declined_is_reported_once_with_its_reason() -> None:
    watched = Watched()
    watched.all_ready()
    for _ in range(3):
        watched.now += 1.0
        declined, refused = (
            child("device-0", Step.ASSIGNED, text="why"),
            child("device-1", Step.REFUSED, text="so"),
        )
        watched.status("institution-0", declined, refused)
    events = watched.events()
    reasons = {"device-0": "why", "device-1": "so"}
    assert [event for event, _ in events] == ["declined", "refused"]
    assert [facts for _, facts in events] == [
        {"node": node, "reason": reason} for node, reason in reasons.items()
    ]
    assert [formatting.note(watched.lab, *event) for event in events] == [
        "device-0: declined (why)", "device-1: refused (so)"
    ]  # fmt: skip


def test_the_retained_presence_of_a_cloud_is_marked_until_it_is_seen() -> None:
    watched = Watched()
    watched.state("cloud", NodeState.READY, retained=True)
    assert "ready?" in line_of(watched, "cloud")
    watched.status("cloud", child("institution-0"))
    assert "ready" in line_of(watched, "cloud") and "ready?" not in line_of(watched, "cloud")
    watched = Watched()
    watched.state("cloud", NodeState.LOST, retained=True)
    assert "lost?" not in line_of(watched, "cloud")


def test_a_restart_is_reported_and_the_earlier_process_is_not_received() -> None:
    watched = Watched()
    watched.all_ready()
    for name in ("cloud", "device-0"):
        watched.state(name, NodeState.READY)
        watched.state(name, NodeState.INIT, session=f"{name}-2")
        watched.state(name, NodeState.LOST, session=f"{name}-1")  # a will may arrive a minute late
    assert watched["cloud"].state == "init"
    assert watched.events() == [
        ("restarted", {"node": "cloud"}),
        ("state", {"node": "cloud", "role": "cloud", "state": "init"}),
        ("restarted", {"node": "device-0"}),
    ]


def test_a_node_on_a_broker_that_is_not_watched_is_as_its_parent_reports() -> None:
    watched = Watched()
    watched.status(
        "institution-0",
        child("device-0", Step.TRAINING, done=1, total=4),
        child("device-1", state=None),
    )
    states = {name: watched[name].state for name in ("institution-0", "device-0", "device-1")}
    assert states == {"institution-0": "ready", "device-0": "ready", "device-1": "absent"}
    assert ("state", {"node": "device-0", "role": "device", "state": "ready"}) in watched.events()
    assert "training 25 %" in line_of(watched, "device-0")


def test_rounds_scores_and_the_time_left_come_from_the_cloud() -> None:
    watched = Watched()
    watched.all_ready()
    scores = (RoundScore(1, 0.9, 0.5, 1.5), RoundScore(2, 0.7, None, None))
    run = RunStatus(2, 20.0, 10.0, (PhaseSeconds("train", 4.0),), scores)
    watched.status("cloud", child("institution-0"), key=Key(0, 2, 0), run=run)
    assert watched.events() == [
        ("global_round", {"global_round": 1, "loss": 0.9}),
        ("evaluated", {"global_round": 1, "score": 0.5, "loss": 1.5}),
        ("global_round", {"global_round": 2, "loss": 0.7}),
    ]
    watched.now = 3.0
    assert (watched.lab.global_round, watched.lab.loss, watched.lab.left_s(3.0)) == (3, 0.7, 77.0)
    again = RunStatus(2, 20.0, 10.0, (), (*scores[:1], RoundScore(2, 0.7, 0.75, None)))
    watched.status("cloud", run=again)
    (event,) = watched.events()
    assert event == ("evaluated", {"global_round": 2, "score": 0.75, "loss": None})
    assert formatting.line(watched.lab, *event) == "global round 2: accuracy 0.7500"
    tree = formatting.tree(watched.lab, 3.0)
    assert (tree["score"], tree["train_loss"], tree["global_round"]) == (0.75, 0.7, 2)


def test_bytes_and_rates_are_those_of_the_last_records() -> None:
    watched = Watched()
    for second in range(8):
        watched.now = float(second)
        entry = child("institution-0", Step.TRAINING, up=100 * second, down=0)
        watched.status("cloud", entry, at_s=1e6 + second, tiers=((1000 * second, 50), (7, 8)))
    flows = watched.lab.flows()
    assert {name: flow.total for name, flow in flows.items()} == {
        "wan_up": 7000, "wan_down": 50, "lan_up": 7, "lan_down": 8,
    }  # fmt: skip
    assert flows["wan_up"].rate == 1000.0 and flows["wan_down"].rate == 0.0
    assert watched["institution-0"].rates == (100.0, 0.0)
    watched.status("cloud", entry, at_s=3.0)  # a cloud on another machine, with a clock of its own
    assert watched["institution-0"].rates is None and watched.lab.flows()["wan_up"].total == 0
    watched.status("cloud", child("institution-0", up=1), at_s=2.5)  # one that comes late
    assert watched["institution-0"].entry is not None and watched["institution-0"].entry.up == 700


def test_without_the_clouds_record_those_of_institutions_are_summed() -> None:
    watched = Watched()
    watched.status("institution-0", tiers=((5, 6),))
    watched.status("institution-1", tiers=((50, 60),))
    totals = {name: flow.total for name, flow in watched.lab.flows().items()}
    assert totals == {"wan_up": 0, "wan_down": 0, "lan_up": 55, "lan_down": 66}


# A view is needed most when the cloud hangs


def test_a_cloud_that_hangs_is_shown_with_the_age_of_its_last_record() -> None:
    watched = Watched()
    watched.state("cloud", NodeState.READY)
    watched.status(
        "cloud", child("institution-0", Step.TRAINING), child("institution-1"), key=Key(0, 0, 0)
    )
    watched.status("institution-0", child("device-0", Step.TRAINING), key=Key(0, 0, 0))
    for now, shown in ((SILENT_S - 1, False), (SILENT_S, True), (WARN_S, True), (3 * WARN_S, True)):
        watched.now = now
        assert not ended(watched)
        lines = drawn(watched, 80).splitlines()
        assert (f"no status from the cloud for {now:.0f} s" in lines) is shown
        assert ("no status for" in line_of(watched, "institution-0")) is shown
        assert "no status" not in line_of(watched, "institution-1")  # none was ever received
    (warning,) = (event for event in watched.events() if event[0] == "warning")
    assert "no status from the cloud for 15 s" in str(warning[1]["reason"])
    watched.state("cloud", NodeState.LOST, reason="connection lost")  # it is killed
    assert "no status from the cloud for 45 s" in drawn(watched, 80)
    watched.status("cloud", at_s=99.0)
    assert "no status from the cloud" not in drawn(watched, 80)


def test_without_its_broker_no_record_is_missed() -> None:
    watched = Watched()
    watched.all_ready()
    watched.lab.set_broker(0, up=False, now=0.0)
    watched.now = 60.0
    assert "no status" not in drawn(watched, 80) and "disconnected for 60 s" in drawn(watched, 80)
    watched.lab.set_broker(0, up=True, now=watched.now)
    watched.state("cloud", NodeState.READY)
    assert "no status" not in drawn(watched, 80)
    watched.now += SILENT_S
    assert "no status from the cloud for 5 s" in drawn(watched, 80)


# How it ends


def ended(watched: Watched) -> bool:
    watched.lab.tick(watched.now)
    return watched.lab.ended


@pytest.mark.parametrize("root", ["cloud", "institution-1"])
def test_it_ends_when_the_cloud_or_the_institution_of_a_site_alone_has_finished_and_left(
    root: str,
) -> None:
    watched = Watched()
    if root == "cloud":
        watched.all_ready()
    watched.state(root, NodeState.READY)
    assert not ended(watched)
    watched.state(root, NodeState.FINISHED)
    assert not ended(watched)
    watched.state(root, None)
    assert ended(watched) and watched.lab.end is None
    watched.status("institution-0", child("device-0", state=None))
    assert watched.events()[-1] == ("end", {"state": "finished"})


def test_it_waits_for_a_cloud_that_leaves_with_a_goodbye_but_not_for_ever() -> None:
    watched = Watched()
    watched.state("cloud", NodeState.FINISHED)
    assert not ended(watched)
    watched.now = GOODBYE_S
    assert ended(watched) and watched.lab.end is None


def test_it_ends_when_the_cloud_has_failed_with_its_reason() -> None:
    watched = Watched()
    watched.state("cloud", NodeState.FAILED, reason="the disk is full")
    assert ended(watched)
    assert isinstance(watched.lab.end, RunFailed) and "the disk is full" in str(watched.lab.end)


@pytest.mark.parametrize("how", ["lost", "broker", "never"])
def test_it_gives_up_a_cloud_that_stays_away_when_its_nodes_do(how: str) -> None:
    watched = Watched()
    if how != "never":
        watched.all_ready()
    ended(watched)
    if how == "lost":
        watched.state("cloud", NodeState.LOST)
    elif how == "broker":
        watched.lab.set_broker(0, up=False, now=watched.now)
    idle_s = watched.lab.experiment.transfer.idle_s
    watched.now = idle_s - 1
    assert not ended(watched)
    watched.now = idle_s
    assert ended(watched)
    assert isinstance(watched.lab.end, NoProgress) and ("broker b0" in str(watched.lab.end)) == (
        how == "broker"
    )


def test_a_cloud_that_comes_back_is_waited_for_again() -> None:
    watched = Watched()
    watched.state("cloud", NodeState.LOST)
    watched.now = 100.0
    watched.sessions["cloud"] = "cloud-2"
    watched.state("cloud", NodeState.READY)
    assert not ended(watched)
    watched.now = 210.0
    assert not ended(watched)


def test_a_broker_that_restarts_is_reported_and_may_have_lost_the_cloud() -> None:
    watched = Watched()
    watched.all_ready()
    watched.now = 5.0
    watched.lab.set_broker(0, up=False, now=watched.now)
    watched.lab.set_broker(0, up=False, now=6.0)  # each failed attempt reports so
    assert watched["cloud"].state == watched["device-0"].state == "ready"
    watched.lab.set_broker(0, up=True, now=7.0)
    assert watched["cloud"].state == "unknown" and watched["device-0"].state == "ready"
    watched.state("cloud", NodeState.READY)
    states = [facts.get("state") for _, facts in watched.events()]
    assert states == ["away", "connected", "ready"]


def test_another_broker_that_restarts_has_lost_no_cloud() -> None:
    watched = Watched(brokers=2)
    watched.all_ready()
    watched.state("cloud", NodeState.FINISHED)
    watched.lab.set_broker(1, up=False, now=1.0)
    watched.lab.set_broker(1, up=True, now=2.0)
    watched.now = GOODBYE_S
    assert not ended(watched) and watched["cloud"].state == "finished"
    watched.now = 2 * GOODBYE_S
    assert ended(watched) and watched.lab.end is None


TOPICS = st.one_of(
    st.builds(
        topics.StateTopic, st.just(LAB), st.sampled_from([RUN, "other-1"]), st.sampled_from(NAMES)
    ),
    st.builds(topics.StatusTopic, st.just(LAB), st.just(RUN), st.sampled_from(NAMES)),
    st.sampled_from([topics.SpecTopic(LAB, RUN, "cloud"), topics.AskTopic(LAB, "a", "b")]),
)


@given(
    said=st.lists(st.tuples(TOPICS, BODIES, st.sampled_from([0.0, 0.5, 30.0, 1e9])), max_size=30)
)
def test_no_message_is_fatal(said: list[tuple[topics.Topic, bytes, float]]) -> None:
    watched = Watched()
    for topic, body, later in said:
        watched.now += later
        with suppress(WireError):
            watched.lab.receive(topic, body, watched.now, retained=later == 0.5)
        watched.lab.tick(watched.now)
    lab = watched.lab
    assert len(lab.nodes) == 7
    for event, facts in watched.events():
        json_text(formatting.facts_of(lab, event, facts, watched.now))
        formatting.line(lab, event, facts)
    json_text(formatting.tree(lab, watched.now))
    for node in lab.nodes.values():
        assert 0.0 <= node.done <= 1.0
        assert all(rate >= 0.0 for rate in node.rates or ())
    for width in (20, 60, 160):
        lines = View(width, 24).picture(lab, watched.now, [])
        assert all(line.cell_len <= width for line in lines)


def test_strangers_and_rubbish_change_nothing() -> None:
    watched = Watched()
    state, status = topics.StateTopic(LAB, RUN, "cloud"), topics.StatusTopic(LAB, RUN, "cloud")
    goodbye = serialization.encode(Goodbye(), "s")
    for topic, body in (
        (topics.StateTopic(LAB, RUN, "stranger"), goodbye), (state, b"\xff"), (state, goodbye),
        (status, goodbye), (status, b"\xff"), (status, b""),
    ):  # fmt: skip
        with pytest.raises(WireError):
            watched.lab.receive(topic, body, 0.0)
    for other in (
        topics.StateTopic(LAB, "other-1", "cloud"),
        topics.StateTopic("other", RUN, "cloud"),
    ):
        watched.lab.receive(other, b"\xff", 0.0)
    assert not watched.events()
