"""Watching a run from its brokers: presences and status records, their picture, and a lab of processes."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiomqtt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from common.errors import ConnectionFailed, NoProgress, RunFailed, WireError
from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.host.processes import free_port
from common.net.address import BrokerAddress
from common.protocol import serialization, topics
from common.protocol.messages import (
    Announcement,
    ChildCount,
    ChildStatus,
    Goodbye,
    Key,
    LinkBytes,
    Message,
    NodeState,
    PhaseSeconds,
    Presence,
    RoundScore,
    RunStatus,
    Status,
    StatusRequest,
    Step,
)
from common.text import json_text
from deploy.brokers import broker
from deploy.watching import formatting
from deploy.watching import runs as watched_runs
from deploy.watching.follower import Follower
from deploy.watching.lab import GOODBYE_S, SILENT_S, WARN_S, Event, Node, WatchedLab
from deploy.watching.runs import NAMES_COST, SETTLE_S, Runs
from deploy.watching.screens import look
from deploy.watching.view import View
from tests.helpers.commands import DEMO, PATIENCE_S, command, invoke, sets
from tests.helpers.null_lab import MODEL_BYTES
from tests.helpers.status import child, record

LAB = "lab"
RUN = "20260101T000000Z-abcdef"
MANY = 2**63 - 1


def experiment_of(institutions: int = 2, devices: int = 4, *, rounds: int = 2, global_rounds: int = 10) -> Experiment:
    return parse(
        {
            "name": "small",
            "rounds": global_rounds,
            "topology": {"institutions": institutions, "devices": devices},
            "institution": {"rounds": rounds},
        }
    )


class Watched:
    """A lab that is reported of by hand, on a clock of its own."""

    def __init__(self, experiment: Experiment | None = None, *, brokers: int = 1) -> None:
        self.now = 0.0
        self.lab = WatchedLab(
            RUN, experiment or experiment_of(), brokers=[f"b{i}:1883" for i in range(brokers)], now=0.0
        )
        self.sessions: dict[str, str] = {}
        self.events()

    def __getitem__(self, name: str) -> Node:
        return self.lab.nodes[name]

    def session(self, name: str) -> str:
        return self.sessions.setdefault(name, f"{name}-1")

    def state(
        self,
        name: str,
        state: NodeState | None,
        *,
        session: str = "",
        reason: str = "",
        at: int = 0,
        retained: bool = False,
    ) -> None:
        presence = None if state is None else Presence(state, "device", reason=reason)
        body = b"" if presence is None else serialization.encode(presence, session or self.session(name))
        self.lab.receive(at, topics.StateTopic(LAB, RUN, name), body, self.now, retained=retained)

    def status(self, name: str, *children: ChildStatus, at_s: float | None = None, **facts: Any) -> None:
        """Receive a parent's record."""
        message = record(*children, at_s=self.now if at_s is None else at_s, **facts)
        body = serialization.encode(message, self.session(name))
        self.lab.receive(0, topics.StatusTopic(LAB, RUN, name), body, self.now)

    def events(self) -> list[Event]:
        found = []
        while (event := self.lab.next_event()) is not None:
            found.append(event)
        return found

    def all_ready(self) -> None:
        for name in self.lab.nodes:
            self.state(name, NodeState.READY)
        self.events()


def line_of(watched: Watched, name: str) -> str:
    """Return a node's line in the picture."""
    lines = View(160, 60).picture(watched.lab, watched.now, [])
    return next(line.plain for line in lines if line.plain.split()[:1] == [name])


# Presence, and what parents report


def test_an_institution_on_two_brokers_is_as_the_first_reports() -> None:
    watched = Watched(brokers=2)
    watched.state("institution-0", NodeState.READY, at=1)
    assert watched["institution-0"].state == "ready"
    watched.state("institution-0", NodeState.LOST, at=0)
    assert watched["institution-0"].state == "lost"
    assert [facts["state"] for _, facts in watched.events()] == ["ready", "lost"]


def test_a_child_that_prepares_is_shown_with_those_whom_it_waits_for() -> None:
    watched = Watched()
    for name in ("cloud", "institution-0", "device-1"):
        watched.state(name, NodeState.INIT)
    watched.events()
    text = "device-0 gave up: no data here"
    for _ in range(3):
        watched.now += 1.0
        watched.status("cloud", child("institution-0", state=NodeState.INIT, text=text))
    waiting = {"node": "institution-0", "waits_for": text}
    assert watched.events() == [("waiting", waiting)]
    assert formatting.line(watched.lab, "waiting", waiting) == f"institution-0: waits for {text}"
    assert f"1/2 present, waits for {text}" in line_of(watched, "institution-0")
    assert formatting.branch(watched.lab, watched["institution-0"], 0.0)["text"] == text
    assert "prepares" in line_of(watched, "device-1") and "waits" not in line_of(watched, "device-1")
    for name in ("institution-0", "device-1"):
        watched.state(name, NodeState.READY)
    watched.status("cloud", child("institution-0"), at_s=10.0)
    assert formatting.activity(watched["institution-0"]) == "ready"
    assert "waits" not in line_of(watched, "institution-0")


def test_what_is_refused_or_declined_is_reported_once_with_its_reason() -> None:
    watched = Watched()
    watched.all_ready()
    for _ in range(3):
        watched.now += 1.0
        watched.status(
            "institution-0",
            child("device-0", Step.ASSIGNED, text="wrong layout"),
            child("device-1", Step.REFUSED, text="its loss is nan"),
        )
    events = watched.events()
    assert events == [
        ("declined", {"node": "device-0", "reason": "wrong layout"}),
        ("refused", {"node": "device-1", "reason": "its loss is nan"}),
    ]
    assert [formatting.note(watched.lab, *event) for event in events] == [
        "device-0: declined (wrong layout)", "device-1: refused (its loss is nan)",
    ]  # fmt: skip


def test_a_retained_presence_is_marked_until_its_session_shows_itself() -> None:
    watched = Watched()
    watched.state("device-0", NodeState.READY, retained=True)
    watched.state("device-1", NodeState.READY)
    assert "ready?" in line_of(watched, "device-0") and "ready?" not in line_of(watched, "device-1")
    watched.status("institution-0", child("device-0", state=None))
    assert not watched["device-0"].proven  # its parent does not see it either
    watched.status("institution-0", child("device-0"), at_s=1.0)
    assert watched["device-0"].proven and "ready?" not in line_of(watched, "device-0")
    watched.state("device-0", NodeState.LOST, retained=True)
    assert "lost?" not in line_of(watched, "device-0")


def test_a_restart_is_reported_and_the_earlier_process_is_not_received() -> None:
    watched = Watched()
    watched.all_ready()
    watched.state("device-0", NodeState.INIT, session="device-0-2")
    watched.state("device-0", NodeState.LOST, session="device-0-1")  # a will may arrive a minute late
    assert watched["device-0"].state == "init"
    assert watched.events() == [
        ("restarted", {"node": "device-0"}),
        ("state", {"node": "device-0", "role": "device", "state": "init"}),
    ]


def test_a_node_on_a_broker_that_is_not_watched_is_as_its_parent_reports() -> None:
    watched = Watched()
    watched.status("institution-0", child("device-0", Step.TRAINING, done=1, total=4), child("device-1", state=None))
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
    assert watched["cloud"].rates() == {"institution-0": (100.0, 0.0)}
    watched.status("cloud", entry, at_s=3.0)  # a cloud on another machine, with a clock of its own
    assert watched["cloud"].rates() == {} and watched.lab.flows()["wan_up"].total == 0
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
    watched.all_ready()
    watched.status("cloud", child("institution-0", Step.TRAINING), key=Key(0, 0, 0))
    watched.status("institution-0", child("device-0", Step.TRAINING), key=Key(0, 0, 0))
    for now, shown in ((SILENT_S - 1, False), (SILENT_S, True), (WARN_S, True), (3 * WARN_S, True)):
        watched.now = now
        assert not ended(watched)
        lines = drawn(watched, 80).splitlines()
        assert (f"no status from the cloud for {now:.0f} s" in lines) is shown
        assert ("no status for" in line_of(watched, "institution-0")) is shown
        assert "no status" not in line_of(watched, "institution-1")  # none was ever received
    (warning,) = watched.events()
    assert warning[0] == "warning" and "no status from the cloud for 15 s" in str(warning[1]["reason"])
    watched.state("cloud", NodeState.LOST, reason="connection lost")  # it is killed
    assert "no status from the cloud for 45 s" in drawn(watched, 80)
    watched.status("cloud", at_s=99.0)
    assert "no status from the cloud" not in drawn(watched, 80)


def test_without_its_broker_no_record_is_missed() -> None:
    watched = Watched()
    watched.all_ready()
    watched.lab.disconnected(0, 0.0)
    watched.now = 60.0
    assert "no status" not in drawn(watched, 80) and "disconnected for 60 s" in drawn(watched, 80)
    watched.lab.connected(0, watched.now)
    watched.state("cloud", NodeState.READY)
    assert "no status" not in drawn(watched, 80)
    watched.now += SILENT_S
    assert "no status from the cloud for 5 s" in drawn(watched, 80)


# How it ends


def ended(watched: Watched) -> bool:
    watched.lab.tick(watched.now)
    return watched.lab.ended


def test_it_ends_when_the_cloud_has_finished_and_left() -> None:
    watched = Watched()
    watched.all_ready()
    watched.state("cloud", NodeState.FINISHED)
    assert not ended(watched)
    watched.state("cloud", None)
    assert ended(watched) and watched.lab.end is None
    watched.state("device-0", None)
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
        watched.lab.disconnected(0, watched.now)
    idle_s = watched.lab.experiment.transfer.idle_s
    watched.now = idle_s - 1
    assert not ended(watched)
    watched.now = idle_s
    assert ended(watched)
    assert isinstance(watched.lab.end, NoProgress) and ("broker b0" in str(watched.lab.end)) == (how == "broker")


def test_a_cloud_that_comes_back_is_waited_for_again() -> None:
    watched = Watched()
    watched.state("cloud", NodeState.LOST)
    watched.now = 100.0
    watched.sessions["cloud"] = "cloud-2"
    watched.state("cloud", NodeState.READY)
    assert not ended(watched)
    watched.now = 210.0
    assert not ended(watched)


def test_a_broker_that_restarts_is_reported_of_and_forgets_what_it_kept() -> None:
    watched = Watched()
    watched.all_ready()
    watched.now = 5.0
    watched.lab.disconnected(0, watched.now)
    watched.lab.disconnected(0, 6.0)  # each failed attempt reports so
    assert watched["device-0"].state == "ready"
    watched.lab.connected(0, 7.0)
    assert watched["device-0"].state == "absent"
    watched.state("device-0", NodeState.READY)
    assert watched["device-0"].state == "ready"
    states = [facts.get("state") for _, facts in watched.events()]
    assert states == ["away", "connected"]  # and nothing of nodes that are as they were


def test_a_site_alone_ends_with_its_institution() -> None:
    watched = Watched()
    watched.state("institution-1", NodeState.READY)
    assert not ended(watched)
    watched.state("institution-1", NodeState.FINISHED)
    watched.state("institution-1", None)
    assert ended(watched) and watched.lab.end is None


# Whatever comes

NAMES = ["cloud", "institution-0", "institution-1", "device-0", "device-1", "device-3", "stranger"]
KEYS = st.builds(Key, *[st.integers(0, 2) | st.just(MANY)] * 3)
COUNTS = st.sampled_from([0, 1, 7, MANY])
NUMBERS = st.sampled_from([0.0, 0.5, -1.0, 3.0, math.nan, math.inf, -math.inf, 1e308, -1e308])
TEXTS = st.sampled_from(["", "device-0 has not joined yet", "x" * 1000])
STATES = st.none() | st.sampled_from(NodeState)
STEPS = st.sampled_from(Step)
ENTRIES = st.builds(
    ChildStatus, st.sampled_from(NAMES), STATES, STEPS, *[COUNTS] * 6, st.none() | NUMBERS, NUMBERS, TEXTS
)
RUNS = st.builds(
    RunStatus, COUNTS, NUMBERS, NUMBERS, st.just((PhaseSeconds("x", math.inf),)),
    st.lists(st.builds(RoundScore, COUNTS, *[st.none() | NUMBERS] * 3), max_size=4).map(tuple),
)  # fmt: skip
MESSAGES = st.one_of(
    st.builds(Presence, st.sampled_from(NodeState), st.just("device"), st.just(""), st.just(MANY)),
    st.builds(
        Status, NUMBERS, st.none() | KEYS, st.booleans(), st.booleans(),
        st.lists(st.builds(LinkBytes, COUNTS, COUNTS), max_size=3).map(tuple),
        st.lists(ENTRIES, max_size=4).map(tuple),
        st.lists(st.builds(ChildCount, STATES, STEPS, COUNTS), max_size=3).map(tuple), st.none() | RUNS,
    ),
    st.builds(Announcement, st.just("{"), st.just("[")),
    st.just(Goodbye()),
)  # fmt: skip
BODIES = st.one_of(
    st.binary(max_size=40), st.builds(serialization.encode, MESSAGES, st.sampled_from(["a", "b", "c"])), st.just(b"")
)
TOPICS = st.one_of(
    st.builds(topics.StateTopic, st.just(LAB), st.sampled_from([RUN, "other-1"]), st.sampled_from(NAMES)),
    st.builds(topics.StatusTopic, st.just(LAB), st.just(RUN), st.sampled_from(NAMES)),
    st.sampled_from([topics.SpecTopic(LAB, RUN, "cloud"), topics.SeekTopic(LAB, "a", "b")]),
)


@given(said=st.lists(st.tuples(TOPICS, BODIES, st.sampled_from([0.0, 0.5, 30.0, 1e9])), max_size=30))
def test_no_message_is_fatal(said: list[tuple[topics.Topic, bytes, float]]) -> None:
    watched = Watched()
    for topic, body, later in said:
        watched.now += later
        with suppress(WireError):
            watched.lab.receive(0, topic, body, watched.now, retained=later == 0.5)
        watched.lab.tick(watched.now)
    lab = watched.lab
    assert len(lab.nodes) == 7
    for event, facts in watched.events():
        json_text(formatting.facts_of(lab, event, facts, watched.now))
        formatting.line(lab, event, facts)
    json_text(formatting.tree(lab, watched.now))
    for node in lab.nodes.values():
        assert 0.0 <= node.done <= 1.0
        assert all(rate >= 0.0 for both in node.rates().values() for rate in both)
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
            watched.lab.receive(0, topic, body, 0.0)
    for other in (topics.StateTopic(LAB, "other-1", "cloud"), topics.StateTopic("other", RUN, "cloud")):
        watched.lab.receive(0, other, b"\xff", 0.0)
    assert not watched.events()


# Which run


def announce(runs: Runs, run: str, *, node: str = "cloud", text: str | None = None, now: float = 0.0) -> None:
    announcement = Announcement(experiment_of().to_json() if text is None else text, "[]")
    runs.receive(topics.SpecTopic(LAB, run, node), serialization.encode(announcement, "s"), now)


def live(runs: Runs, run: str, *, node: str = "cloud", state: NodeState = NodeState.READY) -> None:
    runs.receive(topics.StateTopic(LAB, run, node), serialization.encode(Presence(state, "cloud"), "s"), 0.0)


def test_the_newest_living_run_is_watched() -> None:
    runs = Runs(None)
    for run, state in (("r-1", NodeState.READY), ("r-2", NodeState.INIT), ("r-3", NodeState.FAILED)):
        live(runs, run, state=state)
        assert runs.choose(99.0) is None or run != "r-1"
        announce(runs, run)
    live(runs, "r-4")  # and nothing announced
    assert runs.choose(SETTLE_S / 2) is None  # more may be kept there
    chosen = runs.choose(SETTLE_S)
    assert chosen is not None and chosen[0] == "r-2" and chosen[1] == experiment_of()


def test_a_run_may_be_chosen_dead_or_alive() -> None:
    runs = Runs("r-3")
    live(runs, "r-4")
    announce(runs, "r-4")
    assert runs.choose(99.0) is None
    announce(runs, "r-3")
    chosen = runs.choose(99.0)
    assert chosen is not None and chosen[0] == "r-3"


def test_a_run_whose_experiment_cannot_be_read_is_passed_over() -> None:
    runs = Runs(None)
    huge = '{"topology": {"devices": 1000000000}}'
    for run, text in (("r-1", None), ("r-2", "{"), ("r-3", '{"seed": "x"}'), ("r-4", huge)):
        live(runs, run)
        announce(runs, run, text=text)
    chosen = runs.choose(SETTLE_S)
    assert chosen is not None and chosen[0] == "r-1" and runs.ignored == 3


def test_an_institutions_announcement_serves_where_the_cloud_is_not_received() -> None:
    runs = Runs(None)
    announce(runs, "r-1", node="institution-0")
    assert runs.choose(99.0) is None
    live(runs, "r-1", node="institution-0")
    assert runs.choose(99.0) is not None


def test_a_run_that_ends_while_it_is_looked_for_is_not_chosen() -> None:
    runs = Runs(None)
    live(runs, "r-1")
    announce(runs, "r-1")
    for topic in (topics.SpecTopic(LAB, "r-1", "cloud"), topics.StateTopic(LAB, "r-1", "cloud")):
        runs.receive(topic, b"", 0.0)
    assert runs.choose(SETTLE_S) is None and runs.names() == []


RUN_TOPICS = st.sampled_from(
    [
        topics.SpecTopic(LAB, "a-1", "n"), topics.StateTopic(LAB, "a-1", "n"), topics.SpecTopic(LAB, "b-1", "m"),
        topics.SeekTopic(LAB, "a", "b"), topics.SpecTopic("x", "a-1", "n"),
    ]
)  # fmt: skip


@given(said=st.lists(st.tuples(RUN_TOPICS, BODIES)))
def test_no_announcement_is_fatal(said: list[tuple[topics.Topic, bytes]]) -> None:
    runs = Runs(None)
    for topic, body in said:
        runs.receive(topic, body, 0.0)
    assert runs.choose(99.0) is None


def test_the_runs_of_another_lab_are_not_watched() -> None:
    runs = Runs(None, lab="north")
    live(runs, "r-9")
    announce(runs, "r-9")
    assert runs.choose(99.0) is None and runs.names() == [] and runs.ignored == 2


def test_what_is_kept_of_announcements_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    most, text = 16_000, "x" * 900
    monkeypatch.setattr(watched_runs, "HELD_MOST", most)
    runs = Runs(None)
    for run in range(20):
        announce(runs, f"r-{run}", text=text)
    assert len(runs.names()) == most // (NAMES_COST + len(text)) and runs.ignored == 20 - len(runs.names())
    announce(runs, "r-0", text="y")  # one that is said again replaces itself
    rest = most - 13 * (NAMES_COST + len(text)) - (NAMES_COST + 1)
    announce(runs, "r-20", text="z" * (rest - NAMES_COST + 1))
    assert "r-20" not in runs.names()
    announce(runs, "r-20", text="z" * (rest - NAMES_COST))
    assert "r-20" in runs.names()  # to the last character
    for run in (*range(20), 20):
        runs.receive(topics.SpecTopic(LAB, f"r-{run}", "cloud"), b"", 0.0)
    announce(runs, "r-21", text="z" * (most - NAMES_COST))
    assert runs.names() == ["r-21"]


# The picture


def scene() -> Watched:
    """Return two institutions of two devices in the third global round: one trains, one has been reported."""
    watched = Watched()
    watched.all_ready()
    scores = tuple(RoundScore(each, 1 / each, 0.3 * each, 1.2 / each) for each in (1, 2))
    run = RunStatus(2, 20.0, 10.0, (), scores)
    for second in (0, 2):
        watched.now = 18.0 + second
        watched.status(
            "cloud",
            child("institution-0", Step.TRAINING, epochs=3, up=1_500_000 + 3000 * second, down=900_000, loss=0.4321,
                  seconds=2.0),
            child("institution-1", Step.ASSIGNED, epochs=3),
            key=Key(0, 2, 0), tiers=((1_500_000 + 3000 * second, 930_000), (4_000_000, 3_000_000 + second)), run=run,
        )  # fmt: skip
        watched.status(
            "institution-0",
            child("device-0", Step.TRAINING, done=30, total=120, epochs=3, up=50, down=60_000 * second),
            child("device-1", Step.FETCHING, done=4, total=16, size=16_000, epochs=3),
            key=Key(0, 2, 1),
        )
    watched.state("device-2", NodeState.LOST, reason="connection lost")
    return watched


def drawn(watched: Watched, width: int, *, height: int = 40, plain: bool = False, devices: bool | None = None) -> str:
    console = Console(width=width, height=height, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        lines = View(width, height, devices=devices, plain=plain).picture(watched.lab, watched.now, ["device-2: lost"])
        console.print(*lines, sep="\n")
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    return "\n".join(line.rstrip() for line in text.splitlines())


PICTURES = {
    60: """
small  global round 3/10  about 78 s left
accuracy 0.6000 ▁█   loss 0.6000 █▁
20260101T000000Z-abcdef
WAN  up    1.5 MB    3.0 kB/s  down  930.0 kB       0 B/s
LAN  up    4.0 MB       0 B/s  down    3.0 MB       1 B/s

node               state     round
cloud              ready      3/10 ░░░░░░░░ 0/2 results
  institution-0    ready       2/2 ████░░░░ 0/2 devices
    device-0       ready       3.2 ██░░░░░░ training 25 %
    device-1       ready       3.2 ██░░░░░░ fetching 25 %
  institution-1    ready           assigned
    device-2       lost            connection lost
    device-3       ready
device-2: lost
""",
    80: """
small  global round 3/10  about 78 s left
accuracy 0.6000 ▁█   loss 0.6000 █▁
20260101T000000Z-abcdef
WAN  up    1.5 MB    3.0 kB/s  down  930.0 kB       0 B/s
LAN  up    4.0 MB       0 B/s  down    3.0 MB       1 B/s

node               state     round
cloud              ready      3/10 ░░░░░░░░ 0/2 results
  institution-0    ready       2/2 ████░░░░ 0/2 devices
    device-0       ready       3.2 ██░░░░░░ training 25 %
    device-1       ready       3.2 ██░░░░░░ fetching 25 %  4.0 kB of 16.0 kB
  institution-1    ready           assigned
    device-2       lost            connection lost
    device-3       ready
device-2: lost
""",
    200: """
small  global round 3/10  about 78 s left
accuracy 0.6000 ▁█   loss 0.6000 █▁
20260101T000000Z-abcdef
WAN  up    1.5 MB    3.0 kB/s  down  930.0 kB       0 B/s
LAN  up    4.0 MB       0 B/s  down    3.0 MB       1 B/s

node                   state           round          up        down     loss epochs
cloud                  ready            3/10                                         ░░░░░░░░░░░░░░░░░░░░ 0/2 results
  institution-0        ready             2/2    3.0 kB/s       0 B/s   0.4321      3 ██████████░░░░░░░░░░ 0/2 devices
    device-0           ready             3.2       0 B/s   60.0 kB/s               3 █████░░░░░░░░░░░░░░░ training 25 %
    device-1           ready             3.2       0 B/s       0 B/s               3 █████░░░░░░░░░░░░░░░ fetching 25 %  4.0 kB of 16.0 kB
  institution-1        ready                       0 B/s       0 B/s               3 assigned
    device-2           lost                                                          connection lost
    device-3           ready
device-2: lost
""",  # noqa: E501
}


def test_a_lab_of_four_layers_has_its_own_words_rounds_and_flows() -> None:
    tiers = [{"name": "wan", "children": "region", "fan_out": 2}, {"name": "metro", "children": "institution",
             "rounds": 3}, {"name": "lan", "fan_out": 2, "rounds": 2}]  # fmt: skip
    watched = Watched(parse({"tiers": tiers}))
    watched.all_ready()
    region = "region-0"
    watched.status("cloud", child(region, Step.TRAINING), key=Key(0, 0, 0), tiers=((7, 8), (41, 32), (1200, 1000)))
    watched.status(region, child("institution-0", Step.TRAINING), key=Key(0, 0, 1))
    watched.status("institution-0", child("device-0", Step.TRAINING), key=Key(0, 0, 3))
    totals = {name: flow.total for name, flow in watched.lab.flows().items()}
    assert totals == {
        "wan_up": 7, "wan_down": 8, "metro_up": 41, "metro_down": 32, "lan_up": 1200, "lan_down": 1000,
    }  # fmt: skip
    for width in (80, 100, 200):
        lines = {line.split()[0]: line.split() for line in drawn(watched, width).splitlines() if line.strip()}
        assert lines["METRO"][1:4] == ["up", "41", "B"] and "2/3" in lines[region]
        assert lines[region][-1] == "institutions" and "4/6" in lines["institution-0"] and "1.4" in lines["device-0"]


def test_a_lab_of_two_layers_has_devices_below_its_cloud() -> None:
    watched = Watched(parse({"tiers": [{"name": "wan", "fan_out": 3}]}))
    watched.all_ready()
    steps = (Step.DONE, Step.TRAINING, Step.OFFERING)
    children = [child(f"device-{place}", step, done=1, total=2) for place, step in enumerate(steps)]
    watched.status("cloud", *children, key=Key(0, 4, 0), tiers=((10, 20),))
    for width in (80, 200):
        lines = {line.split()[0]: line for line in drawn(watched, width).splitlines() if line.strip()}
        assert lines["cloud"].endswith("1/3 results") and lines["device-0"].endswith("done")
        assert lines["device-1"].endswith("training 50 %") and "5.1" in lines["device-2"]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_picture(width: int) -> None:
    assert drawn(scene(), width) == PICTURES[width].strip("\n")


def test_a_picture_in_ascii() -> None:
    assert drawn(scene(), 100, plain=True).isascii()


def test_a_large_lab_is_drawn_as_the_height_permits_lost_and_slow_devices_first() -> None:
    watched = Watched(experiment_of(5, 200))
    watched.all_ready()
    assert drawn(watched, 80, height=30, devices=False).count("40 devices: 40 ready") == 5
    assert len(drawn(watched, 80, height=30).splitlines()) <= 30
    entries = [child(f"device-{place}", Step.TRAINING, done=place, total=40) for place in range(1, 30) if place != 7]
    watched.state("device-0", NodeState.LOST)
    watched.status(
        "institution-0",
        child("device-0", Step.TRAINING, state=NodeState.LOST),
        *entries,
        key=Key(0, 0, 0),
        others=(ChildCount(NodeState.READY, Step.OFFERING, 1), ChildCount(NodeState.READY, Step.DONE, 10)),
    )
    counts = formatting.counts(watched["institution-0"])
    assert counts == "1 lost, 28 training, 1 offering, 10 done; slowest device-1, training 2 %"
    lines = drawn(watched, 80, height=20).splitlines()
    rows = [line.split()[0] for line in lines if line.startswith("    device-")]
    assert rows == [f"device-{device}" for device in range(len(rows))] and len(rows) >= 2
    hidden = next(line for line in lines if line.split()[:3] == [str(40 - len(rows)), "more", "devices:"])
    assert hidden.startswith(f"    {40 - len(rows)} more devices: {29 - len(rows)} training, 1 offering, 10 done")
    assert len(lines) <= 20
    assert drawn(watched, 80, height=300).count("device-") >= 200


# On a broker


@pytest.fixture
def address(tmp_path: Path) -> Iterator[BrokerAddress]:
    with broker.start(directory=tmp_path) as served:
        yield BrokerAddress(served.host, served.port)


class Seen:
    """A screen that keeps what it is shown."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.changed = asyncio.Event()

    def waiting(self, runs: Runs, brokers: str) -> None:
        pass

    def event(self, lab: WatchedLab, event: str, facts: dict[str, object], now: float) -> None:
        self.events.append((event, facts))
        self.changed.set()

    def draw(self, lab: WatchedLab, now: float) -> None:
        pass

    async def sees(self, event: str, **facts: object) -> None:
        while not any(name == event and facts.items() <= reported.items() for name, reported in self.events):
            self.changed.clear()
            await self.changed.wait()


def scenario(play: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await play

    asyncio.run(bounded())


async def keep(address: BrokerAddress, name: str, message: Message | None) -> None:
    """Leave a retained message of the cloud's, or clear it."""
    body = b"" if message is None else serialization.encode(message, "cloud-1")
    async with aiomqtt.Client(address.host, address.port) as client:
        await client.publish(f"fs1/{LAB}/{RUN}/cloud/{name}", body, qos=1, retain=True)


def follower(*addresses: BrokerAddress) -> Follower:
    return Follower(addresses, run=None, connect_timeout_s=PATIENCE_S)


def test_a_watch_survives_its_brokers_restart(tmp_path: Path) -> None:
    async def run() -> None:
        port = free_port()
        address, seen = BrokerAddress("127.0.0.1", port), Seen()
        announcement = Announcement(experiment_of().to_json(), "[]")
        with broker.start(directory=tmp_path, port=port):
            await keep(address, "spec", announcement)
            await keep(address, "state", Presence(NodeState.READY, "cloud"))
            following = asyncio.create_task(follower(address).follow(seen))
            await seen.sees("state", node="cloud", state="ready")
        await seen.sees("broker", state="away")
        with broker.start(directory=tmp_path, port=port):
            await seen.sees("broker", state="connected")
            for state in (NodeState.READY, NodeState.FINISHED, None):
                await keep(address, "state", Presence(state, "cloud") if state is not None else None)
            await following
        assert seen.events[-1] == ("end", {"state": "finished"})

    scenario(run())


class Recording(Follower):
    """A watch that keeps the topics that it receives."""

    seen: list[topics.Topic]

    def _received(self, place: int, topic: topics.Topic, body: bytes, retained: bool) -> None:
        self.seen.append(topic)
        super()._received(place, topic, body, retained)


def test_a_watch_asks_for_the_status_and_receives_no_models(address: BrokerAddress) -> None:
    async def run() -> None:
        seen = Seen()
        await keep(address, "spec", Announcement(experiment_of().to_json(), "[]"))
        await keep(address, "state", Presence(NodeState.READY, "cloud"))
        async with aiomqtt.Client(address.host, address.port) as client:
            await client.subscribe(topics.watch(LAB, "+"))
            watch = Recording([address], run=None, connect_timeout_s=PATIENCE_S)
            watch.seen = []
            following = asyncio.create_task(watch.follow(seen))
            message = await anext(client.messages)
            assert message.topic.value == topics.watch(LAB, "operator") and isinstance(message.payload, bytes)
            assert serialization.decode(message.payload)[1] == StatusRequest(RUN)
            status = record(
                child("institution-0"), at_s=1.0, run=RunStatus(1, 1.0, 1.0, (), (RoundScore(1, 0.5, 0.25, 1.0),))
            )
            for topic, body in (
                (topics.chunk(LAB, RUN, "cloud", "all", "0123456789abcdef", 0, 0), bytes(1000)),
                (topics.inbox(LAB, RUN, "institution-0", "cloud"), serialization.encode(Goodbye(), "cloud-1")),
                (topics.status(LAB, RUN, "cloud"), serialization.encode(status, "cloud-1")),
            ):
                await client.publish(topic, body, qos=1)
            await seen.sees("evaluated", global_round=1, score=0.25)
            for state in (NodeState.FINISHED, None):
                await keep(address, "state", Presence(state, "cloud") if state is not None else None)
            await following
        assert {type(topic) for topic in watch.seen} == {topics.SpecTopic, topics.StateTopic, topics.StatusTopic}

    scenario(run())


def test_a_login_that_may_not_read_learns_it() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (head := await reader.read(1)) and head[0] >> 4 != 14:
            (length,) = await reader.readexactly(1)
            body = await reader.readexactly(length)
            if head[0] >> 4 == 1:
                writer.write(b"\x20\x02\x00\x00")
            elif head[0] >> 4 == 8:
                writer.write(b"\x90\x04" + body[:2] + b"\x80\x01")
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(ConnectionFailed, match=r"does not let login 'guest' read fs1/lab/\+/\+/spec"):
                await follower(BrokerAddress("127.0.0.1", port, "guest", "x")).follow(Seen())

    scenario(run())


def test_a_look_shows_the_present_state(
    address: BrokerAddress, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deploy.watching.follower.LOOK_S", 0.2)

    async def run() -> None:
        await keep(address, "spec", Announcement(experiment_of().to_json(), "[]"))
        await keep(address, "state", Presence(NodeState.READY, "cloud"))
        for json_lines in (False, True):
            await follower(address).look(partial(look, json_lines=json_lines, devices=None), timeout_s=PATIENCE_S)

    scenario(run())
    *picture, tree = capsys.readouterr().out.splitlines()
    assert picture[0] == "small  global round 0/10"
    assert any(line.split() == ["cloud", "ready?", "0/10", "0/2", "present"] for line in picture)
    cloud = json.loads(tree)["nodes"]["cloud"]
    assert (cloud["state"], cloud["proven"]) == ("ready", False)  # nobody has sent anything: it may be a dead run's
    assert json.loads(tree)["nodes"]["cloud"]["children"]["institution-1"]["children"]["device-3"]["state"] == "absent"


def test_a_look_at_a_broker_that_is_not_there_ends_with_3() -> None:
    done = invoke("watch", "--broker", "127.0.0.1:1", "--once", "--timeout", "0.1", "--connect-timeout", "0.3")
    assert done.exit_code == 3 and "connection refused" in done.stderr


def test_where_no_run_is_there_a_look_ends_with_5_and_an_interrupted_watch_with_130(address: BrokerAddress) -> None:
    watch = command("watch", "--broker", address)
    done = subprocess.run(
        [*watch, "--once", "--timeout", "0.5"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (5, "")
    assert f"no active run of lab lab on broker {address}" in done.stderr
    with subprocess.Popen(watch, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None and "waiting for a run of lab lab" in waiting.stderr.readline()
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(PATIENCE_S) == 130


@pytest.mark.timeout(300)  # its devices are started twice
def test_a_lab_of_processes_is_watched_to_its_end(address: BrokerAddress, tmp_path: Path) -> None:
    """Its devices are killed in the second global round, and started again."""
    slow = "hardware.default.overhead_s=1.5"  # a global round: else a record every second may miss some
    pairs = ("topology.institutions=1", "topology.devices=2", "rounds=3", "institution.rounds=1", slow)
    names = ("device-0", "device-1")
    with ExitStack() as stack:

        def start(*arguments: str | Path, output: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
            words = command(*arguments, "--broker", address, null=True)
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.DEVNULL, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        def start_devices() -> subprocess.Popen[str]:
            return start("device", "--parent", "institution-0", *(w for name in names for w in ("--name", name)))

        watch = start("watch", "--format", "json", output=subprocess.PIPE)
        start("cloud", DEMO, "--runs", tmp_path, *sets(*pairs))
        start("institution", "--name", "institution-0", "--spool", "none")
        devices = start_devices()
        reported: list[dict[str, Any]] = []
        assert watch.stdout is not None
        for line in watch.stdout:
            reported.append(json.loads(line))
            if reported[-1]["event"] == "global_round" and reported[-1]["global_round"] == 1:
                devices.kill()
                start_devices()
        assert watch.wait(PATIENCE_S) == 0
    states = {
        name: [line["state"] for line in reported if line["event"] == "state" and line["node"] == name]
        for name in ("cloud", "institution-0", *names)
    }
    for name in names:  # which may be ready before the watch finds the run, or at once, and may leave after its end
        seen = [state for state in states[name] if state not in ("init", "left")]
        assert seen[-4:] == ["ready", "lost", "ready", "finished"]
    assert states["cloud"] == ["ready", "finished", "left"]
    assert [line["node"] for line in reported if line["event"] == "restarted"] in ([*names], [*reversed(names)])
    assert [line["global_round"] for line in reported if line["event"] == "global_round"] == [1, 2, 3]
    scores = {line["global_round"]: line["score"] for line in reported if line["event"] == "evaluated"}
    assert list(scores) == [1, 2, 3]
    last = reported[-1]
    assert (last["event"], last["state"]) == ("end", "finished")
    assert last["train_loss"] > 0 and last["score"] == scores[3]
    assert min(last[f"{tier}_{way}_bytes"] for tier in ("wan", "lan") for way in ("up", "down")) > 3 * MODEL_BYTES
