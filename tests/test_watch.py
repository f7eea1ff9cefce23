"""Watching a run from its broker: the tree that messages tell, its picture, and a lab of processes that is watched."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiomqtt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from common.accounting.child_report import ChildReport
from common.accounting.traffic import TcpStats, Traffic
from common.errors import ConnectionFailed, NoProgress, RunFailed
from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.host.processes import free_port
from common.net.address import BrokerAddress
from common.protocol import serialization, topics
from common.protocol.manifest import describe
from common.protocol.messages import (
    Acknowledgement,
    Alive,
    Announcement,
    Ask,
    Declined,
    Farewell,
    Gone,
    Goodbye,
    Key,
    Manifest,
    Message,
    NodeState,
    Phase,
    Preparing,
    Presence,
    Probe,
    Probed,
    Progress,
    Reports,
    Result,
    Task,
    WhoIsThere,
)
from deploy.brokers import broker
from deploy.watching import formatting
from deploy.watching.follower import Follower
from deploy.watching.lab import GOODBYE_S, SILENT_S, Event, WatchedLab
from deploy.watching.meter import SILENCE_S, SMOOTHING_S, RateMeter
from deploy.watching.node import Node, NodeStep
from deploy.watching.runs import HELD_MOST, SETTLE_S, Runs
from deploy.watching.screens import look
from deploy.watching.view import View
from tests.helpers.commands import DEMO, PATIENCE_S, command, invoke, sets
from tests.helpers.null_lab import MODEL_BYTES

LAB = "lab"
RUN = "20260101T000000Z-abcdef"
MANY = 2**63 - 1
ALL_MANY = Traffic(*[MANY] * 8, TcpStats(*[MANY] * 11))


def experiment_of(institutions: int = 2, devices: int = 4, *, rounds: int = 2, global_rounds: int = 10) -> Experiment:
    return parse(
        {
            "name": "small",
            "rounds": global_rounds,
            "topology": {"institutions": institutions, "devices": devices},
            "institution": {"rounds": rounds},
        }
    )


def manifest_of(size: int, *, chunk_bytes: int = 1024, seed: int = 0) -> Manifest:
    data = random.Random(seed).randbytes(size)
    return describe(memoryview(data), chunk_bytes=chunk_bytes, codec="fp32", layout="layout")


def lacking(chunks: int, left: int) -> bytes:
    """Return an ask's bitmap of which the first `left` chunks lack."""
    bits = "1" * left + "0" * (chunks - left)
    return int(bits.ljust(-(-chunks // 8) * 8, "0"), 2).to_bytes(-(-chunks // 8), "big") if left else b""


MODEL = manifest_of(16 * 1024)
ANSWER = manifest_of(8 * 1024, seed=1)


def traffic(sent: int, received: int) -> Traffic:
    return Traffic(sent_model_message=sent, received_model_message=received)


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
        role: str = "device",
        retained: bool = False,
    ) -> None:
        presence = None if state is None else Presence(state, role, reason=reason)
        body = b"" if presence is None else serialization.encode(presence, session or self.session(name))
        self.lab.receive(at, topics.state(LAB, RUN, name), body, self.now, retained=retained)

    def say(self, sender: str, receiver: str, message: Message, *, session: str = "") -> None:
        body = serialization.encode(message, session or self.session(sender))
        self.lab.receive(0, topics.inbox(LAB, RUN, receiver, sender), body, self.now)

    def events(self) -> list[Event]:
        found = []
        while (event := self.lab.next_event()) is not None:
            found.append(event)
        return found

    def all_ready(self) -> None:
        for name in self.lab.nodes:
            self.state(name, NodeState.READY)
        self.events()


def task(key: Key, *, model: Manifest = MODEL, inline: bytes | None = None, epochs: int = 3) -> Task:
    return Task(key, epochs, model, inline)


def progress(key: Key, phase: Phase, done: int, total: int, *, sent: int = 0, received: int = 0) -> Progress:
    return Progress(key, phase, done, total, traffic(sent, received), ())


def result(key: Key, *, loss: float = 0.5, samples: int = 10, inline: bytes | None = None, **more: Any) -> Result:
    return Result(
        key, ANSWER, inline, samples, loss, epochs=3, steps=30, path_steps=30, train_s=1.5, wait_s=0.5, pause_s=0.0,
        children=more.pop("children", ()), plans="", **more,
    )  # fmt: skip


# The tree


def test_a_child_goes_through_its_round() -> None:
    watched, key = Watched(), Key(0, 0, 0)
    watched.all_ready()
    device, home = watched["device-0"], "institution-0"
    assert device.parent is watched[home] and device.step is NodeStep.IDLE
    watched.say(home, "device-0", task(key))
    assert (device.step, device.epochs, device.key) == (NodeStep.ASSIGNED, 3, key)
    watched.say("device-0", home, Ask(MODEL.blob, lacking(16, 12), 0, 0, 8, True))
    assert (device.step, device.done, device.fetch.size) == (NodeStep.FETCHING, 0.25, 16 * 1024)
    watched.say("device-0", home, progress(key, Phase.FETCHING, 8, 16))
    assert device.done == 0.5
    watched.say("device-0", home, progress(key, Phase.WAITING, 0, 0))
    assert (device.step, formatting.activity(device)) == (NodeStep.WAITING, "waiting")
    watched.say("device-0", home, progress(key, Phase.TRAINING, 3, 12))
    assert (device.step, device.done) == (NodeStep.TRAINING, 0.25)
    watched.say("device-0", home, progress(key, Phase.FETCHING, 16, 16))  # it comes late
    assert (device.step, device.done) == (NodeStep.TRAINING, 0.25)
    watched.say("device-0", home, result(key))
    assert (device.step, device.done) == (NodeStep.OFFERING, 0.0)
    watched.say(home, "device-0", Ask(ANSWER.blob, lacking(8, 2), 0, 0, 8, False))
    assert device.done == 0.75
    watched.say(home, "device-0", Ask("f" * 16, b"\xff", 0, 0, 8, False))  # of another blob
    assert device.done == 0.75
    watched.say(home, "device-0", Ask(ANSWER.blob, b"", 0, 0, 8, False))
    assert device.done == 1.0
    watched.say(home, "device-0", Acknowledgement(key, ""))
    assert device.step is NodeStep.DONE
    names = [name for name, _ in watched.events()]
    assert names == ["local_round", "result"]


def test_a_model_inside_its_message_is_here_at_once() -> None:
    watched, key = Watched(), Key(0, 0, 0)
    watched.say("institution-0", "device-0", task(key, inline=b"x"))
    assert watched["device-0"].fetch.share == 1.0
    watched.say("device-0", "institution-0", result(key, inline=b"x"))
    assert (watched["device-0"].step, watched["device-0"].done) == (NodeStep.OFFERING, 1.0)


def test_a_watch_that_comes_late_learns_the_round_from_words_of_children() -> None:
    watched, key = Watched(), Key(0, 6, 1)
    watched.say("device-0", "institution-0", Ask(MODEL.blob, lacking(16, 4), 0, 0, 8, False))
    assert watched["device-0"].step is NodeStep.IDLE  # nobody knows of which round it is
    watched.say("device-0", "institution-0", progress(key, Phase.FETCHING, 4, 16))
    watched.say("device-0", "institution-0", Ask(MODEL.blob, lacking(16, 4), 0, 0, 8, False))
    assert (watched["device-0"].key, watched["device-0"].done) == (key, 0.75)
    watched.say("institution-0", "cloud", progress(Key(0, 6, 0), Phase.TRAINING, 99, 0))
    assert watched.lab.global_round == 7
    assert watched.events() == [
        ("local_round", {"node": "institution-0", "global_round": 7, "local_round": 2}),
        ("global_round", {"global_round": 7}),
    ]


def test_a_refused_answer_is_reported_with_its_reason() -> None:
    watched, key = Watched(), Key(0, 0, 0)
    watched.say("institution-0", "device-0", task(key))
    watched.say("device-0", "institution-0", result(key, loss=float("nan")))
    for _ in range(2):  # receipts may come twice
        watched.say("institution-0", "device-0", Acknowledgement(key, "its training loss is nan"))
    assert watched["device-0"].step is NodeStep.REFUSED
    *_, (first, facts), (second, why) = watched.events()
    assert (first, facts["loss"], second, why["reason"]) == ("result", None, "refused", "its training loss is nan")
    assert (
        json.loads(json.dumps(formatting.facts_of(watched.lab, "result", facts, 1.0), allow_nan=False))["loss"] is None
    )


def test_a_restarted_child_begins_its_part_again_and_its_earlier_life_is_not_received() -> None:
    watched, key = Watched(), Key(0, 2, 0)
    watched.all_ready()
    device = watched["device-0"]
    watched.say("institution-0", "device-0", task(key))
    watched.say("device-0", "institution-0", progress(key, Phase.TRAINING, 6, 12, sent=1000))
    watched.sessions["device-0"] = "device-0-2"
    watched.state("device-0", NodeState.INIT)
    assert (device.step, device.done) == (NodeStep.ASSIGNED, 0.0)
    watched.state("device-0", NodeState.LOST, session="device-0-1")  # its will comes late
    watched.say("device-0", "institution-0", progress(key, Phase.TRAINING, 7, 12, sent=1100), session="device-0-1")
    assert (device.state, device.step, device.up.total) == ("init", NodeStep.ASSIGNED, 1000)
    watched.say("device-0", "institution-0", progress(key, Phase.FETCHING, 1, 16, sent=200))
    assert (device.step, device.up.total) == (NodeStep.FETCHING, 1200)
    assert ("restarted", {"node": "device-0"}) in watched.events()


def test_a_parent_that_begins_anew_may_go_back_whatever_its_children_still_say() -> None:
    watched = Watched()
    watched.all_ready()
    watched.say("cloud", "institution-0", task(Key(0, 7, 0)))
    assert watched.lab.global_round == 8
    watched.sessions["cloud"] = "cloud-2"
    watched.state("cloud", NodeState.INIT)
    watched.say("institution-0", "cloud", progress(Key(0, 7, 0), Phase.TRAINING, 1, 0))
    assert watched.lab.global_round == 0
    watched.say("cloud", "institution-0", task(Key(0, 5, 0)))
    watched.say("institution-0", "cloud", progress(Key(0, 7, 0), Phase.TRAINING, 2, 0))
    assert watched.lab.global_round == 6
    watched.say("institution-0", "cloud", progress(Key(0, 5, 0), Phase.TRAINING, 2, 0))
    assert watched["institution-0"].step is NodeStep.TRAINING


def test_global_rounds_and_rounds_are_reported_once_however_many_take_part() -> None:
    watched = Watched()
    for global_round in range(2):
        for m in range(2):
            watched.say("cloud", f"institution-{m}", task(Key(0, global_round, 0)))
        for i in range(2):
            for device in ("device-0", "device-1"):
                for _ in range(2):  # tasks are repeated
                    watched.say("institution-0", device, task(Key(0, global_round, i)))
    events = watched.events()
    assert [facts["global_round"] for name, facts in events if name == "global_round"] == [1, 2]
    rounds = [(facts["global_round"], facts["local_round"]) for name, facts in events if name == "local_round"]
    assert rounds == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_the_loss_is_the_mean_of_the_institutions_by_samples() -> None:
    watched, key = Watched(), Key(0, 0, 0)
    assert watched.lab.loss is None
    for m, (loss, samples) in enumerate([(1.0, 30), (2.0, 10)]):
        watched.say("cloud", f"institution-{m}", task(key))
        watched.say(f"institution-{m}", "cloud", result(key, loss=loss, samples=samples))
    assert watched.lab.loss == 1.25


def test_devices_on_a_broker_of_their_own_are_known_from_their_institutions_reports() -> None:
    watched, key = Watched(), Key(0, 0, 0)
    watched.say("cloud", "institution-0", task(key))
    reports = tuple(
        ChildReport(name, 10, 2, 6, 60, 0.25, train_s=2.5, wait_s=1.0, pause_s=1.0)
        for name in ("device-0", "device-1", "stranger")
    )
    watched.say("institution-0", "cloud", result(key, children=reports, below=(traffic(70, 50),)))
    assert watched["device-1"].report == reports[1]
    assert "slowest device-0, 4.5 s in its last global round" in formatting.counts(watched["institution-0"])
    flows = watched.lab.flows(0.0)
    assert (flows["lan_up"].total, flows["lan_down"].total) == (50, 70)  # as its parent counts, so the other way
    watched.say("institution-0", "cloud", Reports((replace(reports[0], train_s=9.0),)))
    assert watched["device-0"].report.train_s == 9.0  # type: ignore[union-attr]


def test_bytes_and_rates_come_from_what_nodes_count() -> None:
    watched, key = Watched(), Key(0, 0, 0)
    watched.say("cloud", "institution-0", task(key))
    for second in range(30):
        watched.now = float(second)
        word = Progress(key, Phase.TRAINING, 1, 0, traffic(100 * second, 200 * second), (traffic(400 * second, 0),))
        watched.say("institution-0", "cloud", word)
    flows = watched.lab.flows(watched.now)
    assert [flows[name].total for name in ("wan_up", "wan_down", "lan_down")] == [2900, 5800, 11_600]
    assert [round(flows[name].rate) for name in ("wan_up", "wan_down", "lan_down")] == [100, 200, 400]
    assert watched.lab.flows(watched.now + 60)["wan_up"].rate < 1
    watched.say("institution-0", "cloud", Farewell(traffic(3000, 5800), (Traffic(),)))
    assert watched.lab.flows(watched.now)["wan_up"].total == 3000


def test_what_lacks_an_institutions_sum_is_summed_up_from_its_devices() -> None:
    watched = Watched()
    watched.say("device-2", "institution-1", progress(Key(0, 0, 0), Phase.TRAINING, 1, 2, sent=5, received=7))
    flows = watched.lab.flows(0.0)
    assert (flows["lan_up"].total, flows["lan_down"].total) == (5, 7)


def test_links_that_are_measured() -> None:
    watched = Watched()
    watched.all_ready()
    watched.say("institution-0", "device-0", Probe(MODEL))
    assert formatting.activity(watched["device-0"]) == "measuring"
    watched.say("device-0", "institution-0", Probed(MODEL.blob, 1e6, MODEL))
    assert formatting.activity(watched["device-0"]) == "ready"


def test_an_institution_on_two_brokers_is_as_the_first_reports() -> None:
    watched = Watched(brokers=2)
    watched.state("institution-0", NodeState.READY, at=1)
    assert watched["institution-0"].state == "ready"
    watched.state("institution-0", NodeState.LOST, at=0)
    assert watched["institution-0"].state == "lost"
    assert [facts["state"] for _, facts in watched.events()] == ["ready", "lost"]


# Before the rounds, and who is there


def line_of(watched: Watched, name: str) -> str:
    """Return a node's line in the picture."""
    lines = View(160, 60).picture(watched.lab, watched.now, [])
    return next(line.plain for line in lines if line.plain.split()[:1] == [name])


def test_a_child_that_prepares_is_shown_with_those_whom_it_waits_for() -> None:
    watched = Watched()
    watched.state("institution-0", NodeState.INIT)
    watched.events()
    watched.say("institution-0", "cloud", Preparing(1, ""))
    assert formatting.activity(watched["institution-0"]) == "preparing" and not watched.events()
    for done in range(3):  # it is repeated every second
        watched.say("institution-0", "cloud", Preparing(done, "device-1 gave up: no data here"))
    waiting = {"node": "institution-0", "waits_for": "device-1 gave up: no data here"}
    assert watched.events() == [("waiting", waiting)]
    assert (
        formatting.line(watched.lab, "waiting", waiting, 0.0)
        == "institution-0: waits for device-1 gave up: no data here"
    )
    assert "0/2 present, waits for device-1 gave up: no data here" in line_of(watched, "institution-0")
    assert formatting.branch(watched["institution-0"], 0.0)["waits_for"] == "device-1 gave up: no data here"
    watched.state("device-1", NodeState.INIT)
    watched.say("device-1", "institution-0", Preparing(7, ""))
    assert "prepares" in line_of(watched, "device-1")
    for name in ("institution-0", "device-1"):
        watched.state(name, NodeState.READY)
        assert formatting.activity(watched[name]) == "ready"
    assert "waits" not in line_of(watched, "institution-0")


def test_a_task_that_is_declined_is_reported_once_with_its_reason() -> None:
    watched, key = Watched(), Key(0, 0, 0)
    watched.all_ready()
    watched.say("institution-0", "device-0", task(key))
    for _ in range(3):  # the task is sent again
        watched.say("device-0", "institution-0", Declined(key, "wrong layout"))
    declined = [facts for event, facts in watched.events() if event == "declined"]
    assert declined == [{"node": "device-0", "global_round": 1, "local_round": 1, "reason": "wrong layout"}]
    assert formatting.line(watched.lab, "declined", declined[0], 0.0) == "device-0: declined (wrong layout)"


def test_a_retained_presence_is_marked_until_its_session_sends_something() -> None:
    watched = Watched()
    watched.state("device-0", NodeState.READY, retained=True)
    watched.state("device-1", NodeState.READY)
    assert "ready?" in line_of(watched, "device-0") and "ready?" not in line_of(watched, "device-1")
    watched.say("device-0", "institution-0", Gone("0" * 16), session="another")
    assert not watched["device-0"].proven
    watched.say("device-0", "institution-0", Gone("0" * 16))
    assert watched["device-0"].proven and "ready?" not in line_of(watched, "device-0")
    watched.state("device-0", NodeState.LOST, retained=True)
    assert "lost?" not in line_of(watched, "device-0")


def test_a_session_changes_by_presences_alone() -> None:
    watched, key = Watched(), Key(0, 0, 0)
    watched.all_ready()
    watched.say("institution-0", "device-0", task(key))
    watched.say("device-0", "institution-0", progress(key, Phase.TRAINING, 6, 12), session="stranger")
    device = watched["device-0"]
    assert (device.step, device.session) == (NodeStep.ASSIGNED, "device-0-1") and not device.retired
    alive = Alive("nonce", Presence(NodeState.READY, "device"))
    watched.say("device-0", "institution-0", alive, session="device-0-2")  # its own presence was lost
    assert device.session == "device-0-2" and ("restarted", {"node": "device-0"}) in watched.events()
    watched.say("device-0", "institution-0", alive, session="device-0-1")  # an answer that comes late
    assert device.session == "device-0-2"


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


def test_a_lab_at_work_that_is_not_received_is_warned_of_once() -> None:
    watched = Watched()
    watched.all_ready()
    for now in (0.0, SILENT_S - 1, SILENT_S, 2 * SILENT_S):
        watched.now = now
        assert not ended(watched)
    assert [name for name, _ in watched.events()] == ["warning"]
    delivered = Watched()
    delivered.all_ready()
    delivered.say("cloud", "institution-0", Gone("0" * 16))
    for now in (0.0, SILENT_S, 2 * SILENT_S):
        delivered.now = now
        assert not ended(delivered)
    assert not delivered.events()


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
MODELS = st.sampled_from([MODEL, ANSWER])
LOSSES = st.sampled_from([0.5, -1.0, float("nan"), float("inf"), 1e308])
TRAFFICS = st.sampled_from([Traffic(), traffic(1000, 10), traffic(5, 3), ALL_MANY])
REPORTS = st.builds(
    ChildReport, st.sampled_from(NAMES), st.just(MANY), st.just(1), st.just(1), st.just(1), LOSSES, LOSSES
).map(lambda report: (report,))
MESSAGES = st.one_of(
    st.builds(Presence, st.sampled_from(NodeState), st.just("device"), st.just(""), st.just(MANY)),
    st.builds(Task, KEYS, st.just(MANY), MODELS, st.none() | st.just(b"x")),
    st.builds(Progress, KEYS, st.sampled_from(Phase), st.just(MANY) | st.integers(0, 9), st.integers(0, 9), TRAFFICS,
              TRAFFICS),
    st.builds(Result, KEYS, MODELS, st.none(), st.just(MANY), LOSSES, *[st.just(1)] * 3, *[LOSSES] * 3, REPORTS,
              st.just("["), TRAFFICS, TRAFFICS),
    st.builds(Acknowledgement, KEYS, st.sampled_from(["", "no"])),
    st.builds(Ask, st.sampled_from([MODEL.blob, ANSWER.blob, "0" * 16]), st.binary(max_size=9), st.just(0), st.just(0),
              st.just(MANY), st.booleans()),
    st.builds(Probe, MODELS),
    st.builds(Gone, st.just("0" * 16)),
    st.builds(Reports, REPORTS),
    st.builds(Farewell, TRAFFICS, TRAFFICS),
    st.builds(Announcement, st.just("{"), st.just("[")),
    st.builds(Preparing, st.integers(0, 3), st.sampled_from(["", "device-0 has not joined yet", "x" * 1000])),
    st.builds(Declined, KEYS, st.just("wrong layout")),
    st.builds(WhoIsThere, st.just("nonce"), st.just(RUN)),
    st.builds(Alive, st.just("nonce"), st.builds(Presence, st.sampled_from(NodeState), st.just("device"))),
    st.just(Goodbye()),
)  # fmt: skip
BODIES = st.one_of(
    st.binary(max_size=40), st.builds(serialization.encode, MESSAGES, st.sampled_from(["a", "b", "c"])), st.just(b"")
)
TOPICS = st.one_of(
    st.builds(topics.state, st.just(LAB), st.sampled_from([RUN, "other-1"]), st.sampled_from(NAMES)),
    st.builds(topics.inbox, st.just(LAB), st.just(RUN), st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.sampled_from(
        [
            topics.spec(LAB, RUN, "cloud"),
            f"fs1/{LAB}/{RUN}/cloud/blob/all/{'0' * 16}/0/0",
            topics.seek(LAB, "a", "b"),
            "fs2",
            "",
        ]
    ),
)


@given(said=st.lists(st.tuples(TOPICS, BODIES, st.sampled_from([0.0, 0.5, 30.0, 1e9])), max_size=30))
def test_no_message_is_fatal(said: list[tuple[str, bytes, float]]) -> None:
    watched = Watched()
    for topic, body, later in said:
        watched.now += later
        watched.lab.receive(0, topic, body, watched.now, retained=later == 0.5)
        watched.lab.tick(watched.now)
    lab = watched.lab
    assert len(lab.nodes) == 7
    for event, facts in watched.events():
        json.dumps(formatting.facts_of(lab, event, facts, watched.now))
        formatting.line(lab, event, facts, watched.now)
    json.dumps(formatting.tree(lab, watched.now))
    for node in lab.nodes.values():
        assert 0.0 <= node.done <= 1.0
        assert node.up.rate(watched.now) >= 0.0
    for width in (20, 60, 160):
        lines = View(width, 24).picture(lab, watched.now, [])
        assert all(line.cell_len <= width for line in lines)


def test_strangers_and_rubbish_are_counted() -> None:
    watched = Watched()
    key = Key(0, 0, 0)
    watched.say("device-0", "cloud", progress(key, Phase.TRAINING, 1, 2))  # it is not its parent
    watched.say("stranger", "cloud", progress(key, Phase.TRAINING, 1, 2))
    watched.state("stranger", NodeState.READY)
    watched.lab.receive(0, topics.state(LAB, RUN, "cloud"), b"\xff", 0.0)
    watched.lab.receive(0, topics.state(LAB, RUN, "cloud"), serialization.encode(Acknowledgement(key, ""), "s"), 0.0)
    watched.lab.receive(0, "nonsense", b"", 0.0)
    assert watched.lab.ignored == 6
    watched.lab.receive(0, topics.state(LAB, "other-1", "cloud"), b"\xff", 0.0)
    watched.lab.receive(0, topics.state("other", RUN, "cloud"), b"\xff", 0.0)
    watched.lab.receive(0, topics.seek(LAB, "cloud", "institution-0"), b"\xff", 0.0)
    assert watched.lab.ignored == 6 and not watched.events()


# Which run


def announce(runs: Runs, run: str, *, node: str = "cloud", text: str | None = None, now: float = 0.0) -> None:
    announcement = Announcement(experiment_of().to_json() if text is None else text, "[]")
    runs.receive(topics.spec(LAB, run, node), serialization.encode(announcement, "s"), now)


def live(runs: Runs, run: str, *, node: str = "cloud", state: NodeState = NodeState.READY) -> None:
    runs.receive(topics.state(LAB, run, node), serialization.encode(Presence(state, "cloud"), "s"), 0.0)


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
    for topic in (topics.spec(LAB, "r-1", "cloud"), topics.state(LAB, "r-1", "cloud")):
        runs.receive(topic, b"", 0.0)
    assert runs.choose(SETTLE_S) is None and runs.names() == []


RUN_TOPICS = st.sampled_from(
    ["fs1/lab/a-1/n/spec", "fs1/lab/a-1/n/state", "fs1/lab/b-1/m/spec", "fs1/lab/seek/a/b", "fs1/x/a-1/n/spec", "x"]
)


@given(said=st.lists(st.tuples(RUN_TOPICS, BODIES)))
def test_no_announcement_is_fatal(said: list[tuple[str, bytes]]) -> None:
    runs = Runs(None)
    for topic, body in said:
        runs.receive(topic, body, 0.0)
    assert runs.choose(99.0) is None


def test_the_runs_of_another_lab_are_not_watched() -> None:
    runs = Runs(None, lab="north")
    live(runs, "r-9")
    announce(runs, "r-9")
    assert runs.choose(99.0) is None and runs.names() == [] and runs.ignored == 2


def test_what_is_kept_of_announcements_is_bounded() -> None:
    runs, text = Runs(None), "x" * 3_900_000
    for run in range(20):
        announce(runs, f"r-{run}", text=text)
    assert len(runs.names()) == HELD_MOST // len(text) and runs.ignored == 20 - len(runs.names())
    announce(runs, "r-0", text="y")  # one that is said again replaces itself
    announce(runs, "r-20", text="z" * 3_000_000)
    assert "r-20" in runs.names()


# Rates


@given(
    steps=st.lists(st.tuples(st.integers(0, 10**9), st.floats(0.001, 30.0)), min_size=1, max_size=30),
    quiet=st.floats(0, 100),
)
def test_a_rate_lies_within_those_that_it_is_made_of(steps: list[tuple[int, float]], quiet: float) -> None:
    meter, count, now = RateMeter(), 5, 0.0
    meter.take(count, now)
    for passed, seconds in steps:
        count, now = count + passed, now + seconds
        meter.take(count, now)
    assert meter.total == count
    highest = max(passed / seconds for passed, seconds in steps)
    assert 0.0 <= meter.rate(now + quiet) <= highest * (1 + 1e-9)


def test_a_steady_rate_is_found_whatever_the_steps() -> None:
    for step in (0.1, 1.0, 2.0):
        meter = RateMeter()
        for tick in range(round(10 * SMOOTHING_S / step)):
            meter.take(round(1000 * step * tick), step * tick)
        assert meter.rate(step * tick) == pytest.approx(1000, rel=0.001)
        assert meter.rate(step * tick + SILENCE_S - 0.01) == meter.rate(step * tick)


def test_a_count_that_falls_has_begun_anew() -> None:
    meter = RateMeter()
    for now, count in enumerate([100, 150, 30, 40]):
        meter.take(count, float(now))
    assert meter.total == 190
    meter.restart()
    meter.take(60, 5.0)
    assert meter.total == 250


# The picture


def scene() -> Watched:
    """Return two institutions of two devices in the third global round: one trains, one has been reported."""
    watched = Watched()
    watched.all_ready()
    for global_round in (1, 2):
        watched.now += 10.0
        for m in range(2):
            watched.say("cloud", f"institution-{m}", task(Key(0, global_round, 0)))
        if global_round == 1:
            watched.say(
                "institution-0",
                "cloud",
                result(Key(0, 1, 0), loss=0.4321, traffic=traffic(1_500_000, 900_000), below=(Traffic(),)),
            )
    key = Key(0, 2, 1)
    watched.say("institution-0", "cloud", Progress(Key(0, 2, 0), Phase.TRAINING, 7, 0, traffic(1_530_000, 930_000),
                                                   (traffic(3_000_000, 4_000_000),)))  # fmt: skip
    watched.say("institution-0", "device-0", task(key))
    watched.say("device-0", "institution-0", progress(key, Phase.TRAINING, 30, 120, sent=50, received=60_000))
    watched.say("institution-0", "device-1", task(key, model=manifest_of(16_000, chunk_bytes=1024)))
    watched.say("device-1", "institution-0", progress(key, Phase.FETCHING, 4, 16))
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
small  global round 3/10  about 80 s left
training loss 0.4321
20260101T000000Z-abcdef
WAN  up    1.5 MB    2.9 kB/s  down  930.0 kB    2.9 kB/s
LAN  up    4.0 MB  385.7 kB/s  down    3.0 MB  289.3 kB/s

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
    100: """
small  global round 3/10  about 80 s left
training loss 0.4321
20260101T000000Z-abcdef
WAN  up    1.5 MB    2.9 kB/s  down  930.0 kB    2.9 kB/s
LAN  up    4.0 MB  385.7 kB/s  down    3.0 MB  289.3 kB/s

node                   state           round          up        down
cloud                  ready            3/10                         ░░░░░░░░ 0/2 results
  institution-0        ready             2/2    2.9 kB/s    2.9 kB/s ████░░░░ 0/2 devices
    device-0           ready             3.2       0 B/s       0 B/s ██░░░░░░ training 25 %
    device-1           ready             3.2       0 B/s       0 B/s ██░░░░░░ fetching 25 %
  institution-1        ready                                         assigned
    device-2           lost                                          connection lost
    device-3           ready
device-2: lost
""",
    160: """
small  global round 3/10  about 80 s left
training loss 0.4321
20260101T000000Z-abcdef
WAN  up    1.5 MB    2.9 kB/s  down  930.0 kB    2.9 kB/s
LAN  up    4.0 MB  385.7 kB/s  down    3.0 MB  289.3 kB/s

node                   state           round          up        down     loss epochs
cloud                  ready            3/10                                         ░░░░░░░░░░░░░░░░░░░░ 0/2 results
  institution-0        ready             2/2    2.9 kB/s    2.9 kB/s   0.4321      3 ██████████░░░░░░░░░░ 0/2 devices
    device-0           ready             3.2       0 B/s       0 B/s               3 █████░░░░░░░░░░░░░░░ training 25 %
    device-1           ready             3.2       0 B/s       0 B/s               3 █████░░░░░░░░░░░░░░░ fetching 25 %  4.0 kB of 16.0 kB
  institution-1        ready                                                       3 assigned
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
    region, task_key = "region-0", Key(0, 0, 0)
    watched.say("cloud", region, task(task_key))
    watched.say(region, "institution-0", task(Key(0, 0, 1)))
    watched.say("institution-0", "device-0", task(Key(0, 0, 3)))
    below = (traffic(30, 40), traffic(500, 600))
    watched.say(region, "cloud", Progress(task_key, Phase.TRAINING, 1, 0, traffic(7, 8), below))
    watched.say("institution-1", "region-1", Progress(task_key, Phase.TRAINING, 1, 0, traffic(1, 2), (below[1],)))
    totals = {name: flow.total for name, flow in watched.lab.flows(0.0).items()}
    assert totals == {
        "wan_up": 7, "wan_down": 8, "metro_up": 40 + 1, "metro_down": 30 + 2, "lan_up": 2 * 600, "lan_down": 2 * 500,
    }  # fmt: skip
    lines = {line.split()[0]: line.split() for line in drawn(watched, 100).splitlines() if line.strip()}
    assert lines["METRO"][1:4] == ["up", "41", "B"] and "2/3" in lines[region] and lines[region][-1] == "institutions"
    assert "4/6" in lines["institution-0"] and "1.4" in lines["device-0"]


@pytest.mark.parametrize("width", [60, 100, 160])
def test_the_picture(width: int) -> None:
    assert drawn(scene(), width) == PICTURES[width].strip("\n")


def test_a_picture_in_ascii() -> None:
    assert drawn(scene(), 100, plain=True).isascii()


def test_a_large_lab_is_drawn_as_the_height_permits_lost_and_slow_devices_first() -> None:
    watched = Watched(experiment_of(5, 200))
    watched.all_ready()
    assert drawn(watched, 80, height=30, devices=False).count("40 devices: 40 ready") == 5
    assert len(drawn(watched, 80, height=30).splitlines()) <= 30
    for device in range(40):
        watched.say("institution-0", f"device-{device}", task(Key(0, 0, 0)))
        watched.say(f"device-{device}", "institution-0", progress(Key(0, 0, 0), Phase.TRAINING, device, 40))
    watched.say("device-7", "institution-0", result(Key(0, 0, 0)))
    watched.state("device-0", NodeState.LOST)
    counts = formatting.counts(watched["institution-0"])
    assert counts == "1 lost, 38 training, 1 offering; slowest device-1, training 2 %"
    lines = drawn(watched, 80, height=20).splitlines()
    rows = [line.split()[0] for line in lines if line.startswith("    device-")]
    assert rows == [f"device-{device}" for device in range(len(rows))] and len(rows) >= 2
    assert any(line.split()[:3] == [str(40 - len(rows)), "more", "devices:"] for line in lines) and len(lines) <= 20
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


def follower(*addresses: BrokerAddress, light: bool = False) -> Follower:
    return Follower(addresses, run=None, light=light, connect_timeout_s=PATIENCE_S)


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


@pytest.mark.parametrize("light", [False, True])
def test_a_light_watch_does_not_hear_devices_and_no_watch_receives_chunks(
    address: BrokerAddress, *, light: bool
) -> None:
    async def run() -> None:
        seen, key = Seen(), Key(0, 0, 0)
        await keep(address, "spec", Announcement(experiment_of().to_json(), "[]"))
        await keep(address, "state", Presence(NodeState.READY, "cloud"))
        watch = follower(address, light=light)
        following = asyncio.create_task(watch.follow(seen))
        await seen.sees("state", node="cloud", state="ready")
        async with aiomqtt.Client(address.host, address.port) as client:
            said: list[tuple[str, bytes]] = [
                (topics.chunk(LAB, RUN, "cloud", "all", MODEL.blob, 0, 0), bytes(1000)),
                (topics.inbox(LAB, RUN, "device-0", "institution-0"), serialization.encode(task(key), "i")),
                (topics.inbox(LAB, RUN, "institution-0", "cloud"), serialization.encode(task(key), "cloud-1")),
                (
                    topics.state(LAB, RUN, "cloud"),
                    serialization.encode(Presence(NodeState.FINISHED, "cloud"), "cloud-1"),
                ),
                (topics.state(LAB, RUN, "cloud"), b""),
            ]
            for topic, body in said:
                await client.publish(topic, body, qos=1)
        await following
        assert ("global_round", {"global_round": 1}) in seen.events
        assert any(name == "local_round" for name, _ in seen.events) is not light
        assert watch._lab is not None and watch._lab.ignored == 0 and watch._lab._received_bytes < 1000

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
    pairs = ("topology.institutions=1", "topology.devices=2", "rounds=3", "institution.rounds=1")
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
            if reported[-1]["event"] == "global_round" and reported[-1]["global_round"] == 2:
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
    results = [line["global_round"] for line in reported if line["event"] == "result" and line["node"] == "device-0"]
    assert results == [1, 2, 3]
    last = reported[-1]
    assert (last["event"], last["state"]) == ("end", "finished")
    assert last["loss"] > 0
    assert min(last[f"{tier}_{way}_bytes"] for tier in ("wan", "lan") for way in ("up", "down")) > 3 * MODEL_BYTES
