"""Nodes that stay: they take part in one run after the other, and a lab has one run at a time."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import threading
import time
import tomllib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgpack
import psutil
import pytest
from xxhash import xxh3_64_digest

from common.errors import DuplicateName, InvalidExperiment, LabInUse, LeftOut, NoProgress, OutOfReach, RunFailed
from common.experiment.reading import parse
from common.experiment.topology import CLOUD
from common.host.examination import Finding
from common.metrics import Metrics
from common.protocol import serialization, topics
from common.protocol.messages import Alive, Announcement, Here, Message, NodeState, Presence, RollCall, WhoIsThere
from common.runtime.discovery import Found, join
from common.runtime.parent_endpoint import ParentEndpoint
from common.runtime.roll import BEGINNING, SEEKING, SESSIONS_KEPT, Answer, Resources, RollEntry, call_rolls, claim
from common.runtime.world import Host, World
from deploy.brokers import broker
from deploy.cli import roles
from deploy.kits.answers import faults
from deploy.results.run import Run, folders
from deploy.simulation.broker import Routed
from deploy.simulation.outcome import model_digest
from tests.helpers.commands import command, fedstrata, invoke, null_model
from tests.helpers.nodes import LAB, PARENT, layout_of, living, parent_of
from tests.helpers.sites import SimulatedSite, forever, until, virtual

EXPERIMENT = Announcement("{}", "[]", "split-1")
PATIENCE_S: Final = 60
NEXT: Final = ("9.1", serialization.VERSION + 1)  # a release and its version of the protocol
NO_TORCH: Final = Finding("PyTorch", True, False, "not installed")


class Staying:
    """A node that stays; each run ends as the test decides."""

    def __init__(self, site: SimulatedSite) -> None:
        self.runs: list[str] = []
        self.ends: asyncio.Queue[Exception | None] = asyncio.Queue()
        self.usable = True
        self.task = site.make("device-0", lambda world: asyncio.create_task(self._join(site, world)))

    async def _join(self, site: SimulatedSite, world: World) -> None:
        host = Host(site.address, 30.0, Metrics(), lab=LAB, stay=True, world=world)
        await join(host, "device-0", PARENT, self._take_part, role="device", usable=lambda: self.usable)

    async def _take_part(self, found: Found) -> None:
        self.runs.append(found.run)
        if (error := await self.ends.get()) is not None:
            raise error

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait((self.task,))


def announcing(site: SimulatedSite, run: str) -> ParentEndpoint:
    parent = parent_of(site, ["device-0"], layout=layout_of(4000), run=run)
    parent.announce(EXPERIMENT)
    return parent


@pytest.mark.parametrize(
    "how",
    [
        None,
        NoProgress("the refiner made no progress"),
        InvalidExperiment("a", 1, "no", "Yes."),
        LeftOut("--parent", PARENT, "no device of this experiment", "It has others."),
    ],
)
@virtual
async def test_a_node_waits_for_the_next_run_however_the_last_one_ended(
    site: SimulatedSite, how: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fedstrata")
    node = Staying(site)
    first = announcing(site, "run-1")
    living(site, first)
    await until(lambda: node.runs == ["run-1"])
    node.ends.put_nowait(how)
    await asyncio.sleep(100)
    assert node.runs == ["run-1"], "its parent still answers, but this node has left the run"
    site.kill(first)
    await asyncio.sleep(100)
    living(site, announcing(site, "run-2"))
    await until(lambda: node.runs == ["run-1", "run-2"])
    await node.cancel()
    end = "device-0: run run-1 finished" if how is None else f"device-0 leaves run run-1: {how}"
    if isinstance(how, LeftOut):
        end = "device-0: run run-1 began without it: its experiment has no such node"
        assert all(record.levelno == logging.INFO for record in caplog.records if "began without" in record.message)
    again = f"device-0: waiting for the next run of {PARENT}"
    lines = [line for line in caplog.messages if line.startswith("device-0")]
    assert lines[0].startswith("device-0: connected to broker ")
    assert lines[1:] == ["device-0: run run-1: preparing", end, again, "device-0: run run-2: preparing"]


@virtual
async def test_a_node_returns_to_a_run_whose_parent_has_restarted(site: SimulatedSite) -> None:
    node = Staying(site)
    first = announcing(site, "run-1")
    living(site, first)
    await until(lambda: node.runs == ["run-1"])
    site.kill(first)
    node.ends.put_nowait(RunFailed("its state was lost"))
    await asyncio.sleep(20)
    again = announcing(site, "run-1")
    begun = again.now()
    living(site, again)
    await until(lambda: node.runs == ["run-1", "run-1"])
    assert again.now() - begun < 3, "a parent that joins is asked at once"
    await node.cancel()


@virtual
async def test_a_node_returns_to_a_run_whose_parent_was_out_of_reach(site: SimulatedSite) -> None:
    node = Staying(site)
    living(site, announcing(site, "run-1"))
    await until(lambda: node.runs == ["run-1"])
    node.ends.put_nowait(OutOfReach("the cloud was not there"))
    await until(lambda: node.runs == ["run-1", "run-1"])
    node.ends.put_nowait(None)
    await asyncio.sleep(100)
    assert node.runs == ["run-1", "run-1"], "it has finished the run"
    await node.cancel()


@virtual
async def test_a_node_that_waits_outlasts_a_broker_that_is_away(site: SimulatedSite) -> None:
    node = Staying(site)
    first = announcing(site, "run-1")
    living(site, first)
    await until(lambda: node.runs == ["run-1"])
    site.kill(first)
    node.ends.put_nowait(None)
    site.link("device-0").change(cut=True)
    await asyncio.sleep(1000)
    site.link("device-0").change(cut=False)
    living(site, announcing(site, "run-2"))
    await until(lambda: node.runs == ["run-1", "run-2"])
    await node.cancel()


@pytest.mark.parametrize(("error", "usable"), [(DuplicateName("two of them"), True), (NoProgress("nothing"), False)])
@virtual
async def test_what_ends_a_node(site: SimulatedSite, error: Exception, usable: bool) -> None:
    node = Staying(site)
    node.usable = usable
    living(site, announcing(site, "run-1"))
    node.ends.put_nowait(error)
    with pytest.raises(type(error)):
        await node.task


async def roll(site: SimulatedSite, expected: Sequence[str] = ()) -> list[Answer]:
    def build(world: World) -> asyncio.Task[list[Answer]]:
        asked = call_rolls(
            [site.address], lab=LAB, name="operator", wait_s=2.0, connect_timeout_s=30.0, expected=expected, world=world
        )
        return asyncio.create_task(asked)

    return await site.make("laptop", build)


class Listed:
    """A node that does nothing but keep its entry in the roll."""

    def __init__(self, site: SimulatedSite, name: str) -> None:
        self.entry, self.task = site.make(name, lambda world: self._build(site, name, world))

    @staticmethod
    def _build(site: SimulatedSite, name: str, world: World) -> tuple[RollEntry, asyncio.Task[None]]:
        host = Host(site.address, 30.0, Metrics(), lab=LAB, kit="c0ffee", world=world)
        found = Resources("2 x cpu", "mnist", (NO_TORCH,))
        entry = RollEntry(host, name, role="device", parent=PARENT, resources=lambda: found)

        async def keep() -> None:
            async with entry.kept():
                await forever()

        return entry, asyncio.create_task(keep())


def of_the_next_release(message: Message, *more: object, session: str) -> bytes:
    """Return a message of the roll as the next version of the protocol may have it: with other fields at its end."""
    fields = [getattr(message, name) for name in type(message).__match_args__]
    shared, _ = serialization.SHARED[type(message)]
    code = serialization.KINDS.index(type(message))
    packed = msgpack.packb([serialization.VERSION + 1, session, code, *fields[:shared], *more])
    return xxh3_64_digest(packed) + packed


@virtual
async def test_the_roll_is_read_and_answered_across_versions(site: SimulatedSite) -> None:
    node, nexts = Listed(site, "device-0"), list[Routed]()

    def answer(message: Routed) -> None:
        topic = topics.parse(message.topic)
        if isinstance(topic, topics.RollTopic) and topic.asker == "operator":
            (_, asked), where = serialization.decode(message.body), topics.here(LAB, topic.asker, "device-1")
            assert isinstance(asked, RollCall)
            here = Here(asked.nonce, "device", PARENT, "run-9", "9.1", "h", "", "", "", 0.0, ())
            site.inject(where, of_the_next_release(here, ["b"] * 3, 1.5, None, session="s1"))
        elif isinstance(topic, topics.HereTopic) and topic.asker == "next":
            nexts.append(message)

    site.network.hooks.append(answer)
    await asyncio.sleep(1)
    old, new = sorted(await roll(site), key=lambda each: each.node)
    assert (old.node, old.other_release) == ("device-0", "")
    assert (new.node, new.here.role, new.here.parent, new.here.run) == ("device-1", "device", PARENT, "run-9")
    ours = f"{version('fedstrata')} (protocol {serialization.VERSION})"
    theirs = f"9.1 (protocol {serialization.VERSION + 1})"
    assert new.other_release == f"it is of release {theirs}, this is {ours}: install one release everywhere"
    assert faults([old, new], None)["device-1"] == [new.other_release]
    site.inject(topics.roll(LAB, "next"), of_the_next_release(RollCall("nonce"), 7, session="s2"))
    await until(lambda: nexts)
    _, found = serialization.decode(nexts[0].body)
    assert isinstance(found, Here) and (found.nonce, found.role) == ("nonce", "device")
    node.task.cancel()


def test_nodes_of_another_release_are_left_out_of_the_lab_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(node: str, role: str, parent: str, protocol: int = serialization.VERSION) -> Answer:
        return Answer(node, Here("n", role, parent, "", "9.1", "h", "", "", "", 0.0, ()), 0.0, protocol)

    found = [answer("device-0", "device", CLOUD), answer("device-1", "device", CLOUD, NEXT[1])]
    others = {each.node: each.other_release for each in found if each.other_release}
    assert roles._topology(found, others) == {"institutions": 0, "devices": ["device-0"]}
    assert f"device-1 is left out: it is of release 9.1 (protocol {NEXT[1]})" in capsys.readouterr().err
    with pytest.raises(InvalidExperiment, match=r"no device is there that could take part\. Fix the 1 nodes"):
        roles._topology(found[1:], others)
    assert f"device-1 is left out: it is of release 9.1 (protocol {NEXT[1]})" in capsys.readouterr().err


def test_an_experiment_names_all_its_nodes_that_cannot_take_part(capsys: pytest.CaptureFixture[str]) -> None:
    lab = parse({"topology": {"institutions": 1, "devices": 4}})
    roles._check_fit(lab, {"stranger": "x"})
    old = {f"device-{i}": f"it is of release 0.{i}" for i in range(4)}
    problem = r"nodes = 'device-0, device-1 and 2 others': 4 of the experiment's nodes cannot take part, as above"
    with pytest.raises(InvalidExperiment, match=problem):
        roles._check_fit(lab, old)
    lines = capsys.readouterr().err
    assert all(f"{node} cannot take part: {reason}" in lines for node, reason in old.items())


@virtual
async def test_a_node_that_answers_the_roll_all_the_time_hides_nobody(site: SimulatedSite) -> None:
    """As many sessions as it likes, and messages that no node sends."""
    sent: list[str] = []

    def answer(message: Routed) -> None:
        topic = topics.parse(message.topic)
        if isinstance(topic, topics.RollTopic):
            (_, asked), where = serialization.decode(message.body), topics.here(LAB, topic.asker, "device-6")
            assert isinstance(asked, RollCall)
            here = Here(asked.nonce, "device", PARENT, "", "1", "h", "x" * 2000, "", "", 0.0, ())
            for _ in range(50):
                sent.append(f"s{len(sent)}")
                site.inject(where, serialization.encode(here, sent[-1]))
            site.inject(where, bytes(30_000_000))

    site.network.hooks.append(answer)
    Listed(site, "device-0")
    await asyncio.sleep(1)
    found = await roll(site)
    assert [each.node for each in found] == ["device-0", *["device-6"] * SESSIONS_KEPT] and len(sent) == 200
    assert {len(each.here.hardware) for each in found if each.node == "device-6"} == {1000}


@virtual
async def test_the_roll_has_who_answers_and_what_they_do(site: SimulatedSite) -> None:
    assert await roll(site) == []
    first, second = Listed(site, "device-0"), Listed(site, "device-1")
    await asyncio.sleep(1)
    first.entry.run = "run-7"
    found = await roll(site)
    assert [each.node for each in found] == ["device-0", "device-1"]
    assert [(each.here.role, each.here.parent, each.here.run) for each in found] == [
        ("device", PARENT, "run-7"),
        ("device", PARENT, ""),
    ]
    has = ("2 x cpu", "mnist", "c0ffee", (NO_TORCH,), version("fedstrata"))
    assert all((h.hardware, h.data, h.kit, h.findings, h.release) == has for h in (each.here for each in found))
    assert all(abs(each.ahead_s) < 5 for each in found)
    began = asyncio.get_running_loop().time()
    assert len(await roll(site, expected=["device-0", "device-1"])) == 2
    assert asyncio.get_running_loop().time() < began + 0.5, "all that are expected have answered"
    of_the_same_name = Listed(site, "device-1")
    await asyncio.sleep(1)
    assert [each.node for each in await roll(site)] == ["device-0", "device-1", "device-1"]
    for each in (first, second, of_the_same_name):
        each.task.cancel()


@virtual
async def test_a_flood_of_roll_calls_has_ten_answers_a_second(site: SimulatedSite) -> None:
    node = Listed(site, "device-0")
    await asyncio.sleep(1)
    site.routed.clear()
    for number in range(200):
        site.inject(topics.roll(LAB, f"stranger-{number}"), serialization.encode(RollCall("nonce"), "stranger"))
        site.inject(topics.roll(LAB, "stranger"), b"\x00")
        await asyncio.sleep(0.01)
    assert 18 <= sum("/here/" in routed.topic for routed in site.routed) <= 21
    node.task.cancel()


def claiming(
    site: SimulatedSite, name: str, *, queue: bool = False, reported: list[str] | None = None, holds_s: float = 0.0
) -> asyncio.Task[None]:
    """Let a cloud on a machine of its own ask for the lab, and hold it for a while; its run is not begun here."""
    waiting = [] if reported is None else reported

    def build(world: World) -> asyncio.Task[None]:
        async def ask() -> None:
            async with claim(
                site.address, lab=LAB, connect_timeout_s=30.0, queue=queue, waiting=waiting.append, world=world
            ):
                await asyncio.sleep(holds_s)

        return asyncio.create_task(ask())

    return site.make(name, build)


def cloud_of(site: SimulatedSite, run: str, *, announced: bool) -> ParentEndpoint:
    cloud = parent_of(site, ["institution-0"], layout=layout_of(4000), name=CLOUD, run=run)
    if announced:
        cloud.announce(EXPERIMENT)
    return cloud


@virtual
async def test_a_free_lab_is_had_after_a_second(site: SimulatedSite) -> None:
    begun = site.loop.time()
    await claiming(site, "cloud-a")
    assert 1.0 <= site.loop.time() - begun < 1.6


@pytest.mark.parametrize("announced", [True, False], ids=["in its rounds", "still preparing"])
@virtual
async def test_a_lab_with_a_run_is_refused_and_its_run_is_named(site: SimulatedSite, announced: bool) -> None:
    living(site, cloud_of(site, "run-1", announced=announced))
    with pytest.raises(LabInUse, match=r"lab lab on broker broker:1883 is used by run run-1\. .*--queue") as refused:
        await claiming(site, "cloud-b")
    assert refused.value.exit_code == 3


@virtual
async def test_a_queued_cloud_gets_the_lab_when_the_run_is_over(site: SimulatedSite) -> None:
    reported: list[str] = []
    cloud = cloud_of(site, "run-1", announced=True)
    living(site, cloud)
    queued = claiming(site, "cloud-b", queue=True, reported=reported)
    await asyncio.sleep(500)
    assert not queued.done() and reported == ["run run-1"]
    site.kill(cloud)
    begun = site.loop.time()
    await queued
    assert site.loop.time() - begun < 5


@virtual
async def test_of_clouds_that_ask_at_once_one_gets_the_lab_and_the_queue_keeps_its_order(site: SimulatedSite) -> None:
    first = claiming(site, "cloud-a")
    await asyncio.sleep(0.1)
    second, reported = claiming(site, "cloud-b"), list[str]()
    third = claiming(site, "cloud-c", queue=True, reported=reported)
    await first
    with pytest.raises(LabInUse, match=SEEKING):
        await second
    await third  # the first one had the lab, and began no run
    assert reported == [SEEKING, BEGINNING]


@virtual
async def test_a_cloud_that_has_the_lab_keeps_it_until_its_run_begins(site: SimulatedSite) -> None:
    """It calls the roll, and loads what it evaluates with: longer than a queued cloud waits for a reply."""
    running, reported = cloud_of(site, "run-1", announced=True), (list[str](), list[str]())
    living(site, running)
    first = claiming(site, "cloud-a", queue=True, reported=reported[0], holds_s=600.0)
    await asyncio.sleep(0.1)
    second = claiming(site, "cloud-b", queue=True, reported=reported[1])
    await asyncio.sleep(100)
    site.kill(running)
    await asyncio.sleep(60)
    with pytest.raises(LabInUse, match=BEGINNING):
        await claiming(site, "cloud-c")
    assert not second.done() and reported == (["run run-1"], ["run run-1", SEEKING, BEGINNING])
    begun = cloud_of(site, "run-2", announced=False)
    living(site, begun)
    await asyncio.sleep(1)
    site.routed.clear()
    await asyncio.sleep(60)
    questions = [message for message in site.routed if message.topic == topics.seek(LAB, CLOUD, CLOUD)]
    sessions = {serialization.decode(message.body)[0] for message in questions}
    assert len(sessions) == 1, "only the one that waits asks on"
    assert not second.done() and reported[1] == ["run run-1", SEEKING, BEGINNING, "run run-2"]
    site.kill(begun)
    await second
    first.cancel()


@pytest.mark.parametrize("after_s", [0.02, 0.1, 0.15, 0.2])
@virtual
async def test_each_of_several_clouds_that_ask_is_answered(site: SimulatedSite, after_s: float) -> None:
    """They have one name: the question of one must not take the place of another one's."""
    living(site, cloud_of(site, "run-1", announced=True))
    clouds = []
    for number in range(3):
        clouds.append(claiming(site, f"cloud-{number}", queue=True))
        await asyncio.sleep(after_s)
    await asyncio.sleep(60)
    assert not any(cloud.done() for cloud in clouds)
    for cloud in clouds:
        cloud.cancel()


@virtual
async def test_a_cloud_that_fails_before_its_run_gives_the_lab_back(site: SimulatedSite) -> None:
    first = claiming(site, "cloud-a", holds_s=20.0)
    await asyncio.sleep(5)
    second = claiming(site, "cloud-b", queue=True)
    await first
    begun = site.loop.time()
    await second
    assert site.loop.time() - begun < 5


@virtual
async def test_retained_questions_and_replies_are_nobodys(site: SimulatedSite) -> None:
    site.inject(topics.seek(LAB, CLOUD, CLOUD), serialization.encode(WhoIsThere("0" * 20), "s"), retain=True)
    alive = Alive("0" * 20, Presence(NodeState.READY, "cloud"))
    site.inject(topics.inbox(LAB, "run-1", CLOUD, CLOUD), serialization.encode(alive, "s"), retain=True)
    await claiming(site, "cloud-a")


# Processes

SMALL = """
name = "stays"
rounds = 2
seed = {seed}
transfer = {{ idle_s = 10 }}
[topology]
devices = 2
"""
# Own code that the cloud finds when it checks the experiment, and no device allows.
FOREIGN = SMALL + '[model]\nname = "tests.helpers.examples:examples"\n'
LONG = SMALL.replace("rounds = 2", "rounds = 1000") + "[training]\nepochs = 100\n"  # a second for each

DESCRIBED = """
name = "lab"
broker = "main"
tls = false
brokers = {{ main = {{ addresses = ["{address}"] }} }}
machines = {{ here = {{ address = "localhost" }} }}
institutions = {{ institution-0 = {{ machine = "here" }} }}
devices = [{{ names = ["device-0..1", "device-7"], machine = "here", parent = "institution-0" }}]
"""


class Lab:
    """An institution and two devices of one process, which stay; clouds come and go."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        self.home, self._stack = home, stack
        self.upgraded: set[str] = set()
        served = stack.enter_context(broker.start(directory=home))
        self.address = f"{served.host}:{served.port}"
        self._words: dict[str, list[str | Path]] = {
            "institution": ["--name", "institution-0", "--spool", home / "spool"],
            "device": ["--name", "device-0", "--name", "device-1", "--parent", "institution-0"],
        }
        self.nodes = {role: self._start(role, *words) for role, words in self._words.items()}

    def upgrade(self, *upgraded: str) -> None:
        """Install another release on the machines of these roles: a node that waits is started again."""
        self.upgraded |= set(upgraded)
        for role in self.nodes.keys() & set(upgraded):
            self.nodes[role].terminate()
            assert self.nodes[role].wait(PATIENCE_S) == 130
            self.nodes[role] = self._start(role, *self._words[role])

    def release(self, role: str) -> dict[str, str]:
        """Return the environment of a role's machine; commands are started where the cloud is."""
        return {"NULL_LAB_RELEASE": ":".join(map(str, NEXT))} if role in self.upgraded else {}

    def _start(self, role: str, *words: str | Path) -> subprocess.Popen[str]:
        line = command(role, *words, "--broker", self.address, null=True, stay=True)
        with (self.home / f"{role}.log").open("wb") as log:
            errors = subprocess.PIPE if role == "cloud" else log
            env = os.environ | self.release(role)
            process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
        self._stack.callback(process.communicate)
        self._stack.callback(process.kill)
        return process

    def said(self, role: str) -> str:
        return (self.home / f"{role}.log").read_text()

    def cloud(self, text: str = SMALL, *flags: str, seed: int) -> subprocess.Popen[str]:
        file = self.home / f"{seed}.toml"
        file.write_text(text.format(seed=seed))
        return self._start("cloud", file, "--runs", self.runs(seed), "--spool", "none", "--format", "json", *flags)

    def runs(self, seed: int) -> Path:
        return self.home / f"runs-{seed}"

    def run(self, seed: int, *flags: str) -> str:
        """Run an experiment and return the digest of its final model."""
        ends(self.cloud(SMALL, *flags, seed=seed), 0)
        return model_digest(self.runs(seed))


def ends(cloud: subprocess.Popen[str], code: int) -> str:
    """Wait for a cloud's end, check its exit code, and return what it said on standard error."""
    _, errors = cloud.communicate(timeout=PATIENCE_S)
    assert cloud.returncode == code, errors
    return errors


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with ExitStack() as stack:
        yield Lab(tmp_path, stack)


def alone(seed: int) -> str:
    """Return the digest of the final model of a lab of its own."""
    return null_model(parse(tomllib.loads(SMALL.format(seed=seed))))


def resources(process: subprocess.Popen[str]) -> tuple[int, int]:
    """Return a process's file descriptors and threads."""
    node = psutil.Process(process.pid)
    return node.num_fds(), node.num_threads()


@pytest.mark.slow
def test_queued_clouds_that_take_the_nodes_that_are_there_follow_one_another(lab: Lab) -> None:
    flags = ("--queue", "--set", "topology=lab")
    clouds = [lab.cloud(SMALL, *flags, seed=seed) for seed in (1, 2, 3)]
    for seed, cloud in enumerate(clouds, start=1):
        ends(cloud, 0)
        assert model_digest(lab.runs(seed)) == alone(seed)


@pytest.mark.slow
def test_one_run_follows_the_other_over_the_same_processes(lab: Lab) -> None:
    assert lab.run(1) == alone(1)
    foreign = lab.cloud(FOREIGN, seed=2)
    assert (
        foreign.stderr is not None and "'tests.helpers.examples:examples'" in foreign.stderr.readline()
    )  # no device allows it
    foreign.terminate()
    ends(foreign, 130)
    assert lab.run(3) == alone(3)
    before = {role: resources(process) for role, process in lab.nodes.items()}
    lab.run(4)
    assert lab.run(5, "--set", "topology=lab") == alone(5)
    assert {role: resources(process) for role, process in lab.nodes.items()} == before
    for role, nodes in (("institution", ("institution-0",)), ("device", ("device-0", "device-1"))):
        for node in nodes:
            assert len(re.findall(rf"{node}: run \S+: preparing", lab.said(role))) == 5
    assert "device-0 leaves run" in lab.said("device") and "'tests.helpers.examples:examples'" in lab.said("device")
    assert "Traceback" not in lab.said("institution") + lab.said("device")


@pytest.mark.slow
def test_a_lab_has_one_run_at_a_time_a_cloud_that_dies_leaves_it_free_and_nodes_end_on_sigterm(lab: Lab) -> None:
    first = lab.cloud(LONG, seed=1)
    assert first.stdout is not None
    assert any('"global_round"' in line for line in first.stdout)
    threading.Thread(target=deque, args=(first.stdout, 0), daemon=True).start()  # a full pipe would stop the cloud
    listed = invoke("lab", "status", "--broker", lab.address, "--format", "json")
    assert listed.exit_code == 0, listed.stderr
    rows = [json.loads(line) for line in listed.stdout.splitlines()]
    assert [(row["node"], row["role"], row["parent"]) for row in rows] == [
        ("device-0", "device", "institution-0"),
        ("device-1", "device", "institution-0"),
        ("institution-0", "institution", "cloud"),
    ]
    assert len({row["run"] for row in rows} - {""}) == 1
    file = lab.home / "lab.toml"
    file.write_text(DESCRIBED.format(address=lab.address))
    described = invoke("lab", "status", "--lab", file)
    assert described.exit_code == 5, described.stderr
    states = {line.split()[0]: line for line in described.stdout.splitlines()[1:]}
    assert "away" in states["device-7"] and sum("away" in line for line in states.values()) == 1
    refused = ends(lab.cloud(seed=2), 3)
    assert re.search(r"lab lab on broker \S+ is used by run \S+\. Wait for its end with --queue", refused)
    assert not lab.runs(2).exists(), "a refused run leaves no folder"
    queued = lab.cloud(SMALL, "--queue", seed=3)
    assert queued.stderr is not None and "waiting for its end" in queued.stderr.readline()
    first.kill()
    ends(queued, 0)
    assert model_digest(lab.runs(3)) == alone(3)
    for process in lab.nodes.values():
        assert process.poll() is None
        process.terminate()
        assert process.wait(PATIENCE_S) == 130


@pytest.mark.slow
def test_the_runs_of_a_sweep_follow_each_other_in_the_lab(lab: Lab) -> None:
    (lab.home / "small.toml").write_text(SMALL.format(seed=1))
    file = lab.home / "twice.toml"
    file.write_text('title = "t"\nbase = "small.toml"\nseeds = [3]\naxes = { "training.epochs" = [1] }\n')
    words = ["sweep", file, "--broker", lab.address, "--runs", lab.home]
    done = fedstrata(*words, null=True)
    assert done.returncode == 0 and "1/1: 1, seed 3" in done.stderr, done.stderr
    assert model_digest(lab.home / "twice") == alone(3)
    more = fedstrata(*words, "--seeds", "1", null=True)
    assert more.returncode == 0 and "0 of 1 runs are finished" in more.stderr, more.stderr
    assert [Run(path).seed for path in folders(lab.home / "twice")] == [3, 1]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["cloud", "institution", "device"])
def test_an_upgrade_of_one_role_first_is_named_by_the_commands_and_ends_with_that_of_the_others(
    lab: Lab, first: str
) -> None:
    """The cloud is upgraded with its machine's commands; nobody is away, and each other release is named."""
    names = {"institution": ["institution-0"], "device": ["device-0", "device-1"]}
    nodes = [name for each in names.values() for name in each]
    others = [name for role, each in names.items() if (role == first) != (first == "cloud") for name in each]
    present = (version("fedstrata"), serialization.VERSION)
    theirs, ours = (present, NEXT) if first == "cloud" else (NEXT, present)
    reason = "it is of release {} (protocol {}), this is {} (protocol {})".format(*theirs, *ours)

    def status() -> list[dict[str, object]]:
        words = ("lab", "status", "--broker", lab.address, "--format", "json")
        listed = fedstrata(*words, null=True, env=lab.release("cloud"))
        lines.append(listed.stderr)
        return [json.loads(line) for line in listed.stdout.splitlines()]

    def answers_of_all() -> list[dict[str, object]]:
        rows, deadline = status(), time.monotonic() + PATIENCE_S
        while {row["node"] for row in rows} != {*nodes}:
            assert time.monotonic() < deadline, rows  # a node that was just started has not joined yet
            rows = status()
        return rows

    lines = list[str]()
    answers_of_all()
    lab.upgrade(first)
    rows = answers_of_all()
    assert all(f"{name}: {reason}" in lines[-1] for name in others), lines[-1]
    assert {row["node"]: row["release"] for row in rows} == {
        name: theirs[0] if name in others else ours[0] for name in nodes
    }
    refused = ends(lab.cloud(SMALL, "--set", "topology=lab", seed=1), 4)
    assert all(f"{name} is left out: {reason}" in refused for name in others), refused

    waiting = lab.cloud(seed=2)
    assert waiting.stderr is not None
    versions = f"is of another release: protocol version {theirs[1]}, this release uses {ours[1]}"
    met = others if first == "device" else ["institution-0"]
    line = next(line for line in waiting.stderr if "of another release" in line)
    assert all(f"{name} {versions}" in line for name in met), line
    waiting.terminate()
    ends(waiting, 130)
    lab.upgrade("cloud", *(role for role in names if role != first))
    assert lab.run(3) == alone(3)
