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
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Final

import psutil
import pytest

from fedstrata.common.errors import (
    DuplicateName,
    InvalidExperiment,
    LabInUse,
    LeftOut,
    NoProgress,
    OutOfReach,
    RunFailed,
)
from fedstrata.common.experiment.reading import parse
from fedstrata.common.metrics import Metrics
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import Alive, NodeState, Presence, Question
from fedstrata.common.runtime.claim import BEGINNING, SEEKING, claim
from fedstrata.common.runtime.discovery import Found, join
from fedstrata.common.runtime.parent_endpoint import ParentEndpoint
from fedstrata.common.runtime.world import Host, World
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.results.run import Run, folders
from tests.helpers.commands import command, fedstrata, invoke, null_model
from tests.helpers.nodes import LAB, PARENT, announcing, layout_of, living, parent_of
from tests.helpers.sites import SimulatedSite, until, virtual
from tests.simulation.outcome import model_digest

pytestmark = pytest.mark.usefixtures("warm")

PATIENCE_S: Final = 60
NEXT: Final = ("9.1", serialization.VERSION + 1)  # a release and its version of the protocol


class Staying:
    """A node that stays; each run ends as the test decides."""

    def __init__(self, site: SimulatedSite) -> None:
        self.runs: list[str] = []
        self.ends: asyncio.Queue[Exception | None] = asyncio.Queue()
        self.usable = True
        self.task = site.make(
            "device-0", lambda world: asyncio.create_task(self._join(site, world))
        )

    async def _join(self, site: SimulatedSite, world: World) -> None:
        host = Host(site.address, 30.0, Metrics(), lab=LAB, stay=True, world=world)
        await join(
            host, "device-0", PARENT, self._take_part, role="device", usable=lambda: self.usable
        )

    async def _take_part(self, found: Found) -> None:
        self.runs.append(found.run)
        if (error := await self.ends.get()) is not None:
            raise error

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait((self.task,))


async def taking_part(site: SimulatedSite) -> tuple[Staying, ParentEndpoint]:
    """Return a node that takes part in run-1, and its parent."""
    node, parent = Staying(site), announcing(site, run="run-1")
    living(site, parent)
    await until(lambda: node.runs == ["run-1"])
    return node, parent


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
    node, first = await taking_part(site)
    node.ends.put_nowait(how)
    await asyncio.sleep(100)
    assert node.runs == ["run-1"], "its parent still answers, but this node has left the run"
    site.kill(first)
    await asyncio.sleep(100)
    living(site, announcing(site, run="run-2"))
    await until(lambda: node.runs == ["run-1", "run-2"])
    await node.cancel()
    end = "device-0: run run-1 finished" if how is None else f"device-0 leaves run run-1: {how}"
    if isinstance(how, LeftOut):
        end = "device-0: run run-1 began without it: its experiment has no such node"
        assert all(
            record.levelno == logging.INFO
            for record in caplog.records
            if "began without" in record.message
        )
    again = f"device-0: waiting for the next run of {PARENT}"
    lines = [line for line in caplog.messages if line.startswith("device-0")]
    assert lines[0].startswith("device-0: connected to broker ")
    assert lines[1:] == [
        "device-0: run run-1: preparing",
        end,
        again,
        "device-0: run run-2: preparing",
    ]


@virtual
async def test_a_node_returns_to_a_run_whose_parent_has_restarted(site: SimulatedSite) -> None:
    node, first = await taking_part(site)
    site.kill(first)
    node.ends.put_nowait(RunFailed("its state was lost"))
    await asyncio.sleep(20)
    again = announcing(site, run="run-1")
    begun = again.now()
    living(site, again)
    await until(lambda: node.runs == ["run-1", "run-1"])
    assert again.now() - begun < 3, "a parent that joins is asked at once"
    await node.cancel()


@virtual
async def test_a_node_returns_to_a_run_whose_parent_was_out_of_reach(site: SimulatedSite) -> None:
    node, _ = await taking_part(site)
    node.ends.put_nowait(OutOfReach("the cloud was not there"))
    await until(lambda: node.runs == ["run-1", "run-1"])
    node.ends.put_nowait(None)
    await asyncio.sleep(100)
    assert node.runs == ["run-1", "run-1"], "it has finished the run"
    await node.cancel()


@virtual
async def test_a_node_that_waits_outlasts_a_broker_that_is_away(site: SimulatedSite) -> None:
    node, first = await taking_part(site)
    site.kill(first)
    node.ends.put_nowait(None)
    site.link("device-0").change(cut=True)
    await asyncio.sleep(1000)
    site.link("device-0").change(cut=False)
    living(site, announcing(site, run="run-2"))
    await until(lambda: node.runs == ["run-1", "run-2"])
    await node.cancel()


@pytest.mark.parametrize(
    ("error", "usable"), [(DuplicateName("two of them"), True), (NoProgress("nothing"), False)]
)
@virtual
async def test_what_ends_a_node(site: SimulatedSite, error: Exception, usable: bool) -> None:
    node = Staying(site)
    node.usable = usable
    living(site, announcing(site, run="run-1"))
    node.ends.put_nowait(error)
    with pytest.raises(type(error)):
        await node.task


def claiming(
    site: SimulatedSite,
    name: str,
    *,
    queue: bool = False,
    reported: list[str] | None = None,
    holds_s: float = 0.0,
) -> asyncio.Task[None]:
    """Let a cloud on a machine of its own ask for the lab, and hold it for a while; its run is not
    begun here.
    """
    waiting = [] if reported is None else reported

    def build(world: World) -> asyncio.Task[None]:
        async def ask() -> None:
            async with claim(
                site.address,
                lab=LAB,
                connect_timeout_s=30.0,
                queue=queue,
                waiting=waiting.append,
                world=world,
            ):
                await asyncio.sleep(holds_s)

        return asyncio.create_task(ask())

    return site.make(name, build)


def cloud_of(site: SimulatedSite, run: str, *, announced: bool = True) -> ParentEndpoint:
    make = announcing if announced else partial(parent_of, layout=layout_of(4000))
    return make(site, children=["institution-0"], name=CLOUD, run=run)


@virtual
async def test_a_free_lab_is_had_after_a_second(site: SimulatedSite) -> None:
    begun = site.loop.time()
    await claiming(site, "cloud-a")
    assert 1.0 <= site.loop.time() - begun < 1.6


@pytest.mark.parametrize("announced", [True, False], ids=["in its rounds", "still preparing"])
@virtual
async def test_a_lab_with_a_run_is_refused_and_its_run_is_named(
    site: SimulatedSite, announced: bool
) -> None:
    living(site, cloud_of(site, "run-1", announced=announced))
    with pytest.raises(
        LabInUse, match=r"lab lab on broker broker:1883 is used by run run-1\. .*--queue"
    ) as refused:
        await claiming(site, "cloud-b")
    assert refused.value.exit_code == 3


@virtual
async def test_a_queued_cloud_gets_the_lab_when_the_run_is_over(site: SimulatedSite) -> None:
    reported: list[str] = []
    cloud = cloud_of(site, "run-1")
    living(site, cloud)
    queued = claiming(site, "cloud-b", queue=True, reported=reported)
    await asyncio.sleep(500)
    assert not queued.done() and reported == ["run run-1"]
    site.kill(cloud)
    begun = site.loop.time()
    await queued
    assert site.loop.time() - begun < 5


@virtual
async def test_of_clouds_that_ask_at_once_one_gets_the_lab_and_the_queue_keeps_its_order(
    site: SimulatedSite,
) -> None:
    first = claiming(site, "cloud-a", holds_s=1.0)
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
    """It calls the roll, and loads what it evaluates with: longer than a queued cloud waits for a
    reply.
    """
    running, reported = cloud_of(site, "run-1"), (list[str](), list[str]())
    living(site, running)
    first = claiming(site, "cloud-a", queue=True, reported=reported[0], holds_s=600.0)
    await asyncio.sleep(0.1)
    second = claiming(site, "cloud-b", queue=True, reported=reported[1])
    await asyncio.sleep(100)
    site.kill(running)
    await asyncio.sleep(60)
    with pytest.raises(LabInUse, match=BEGINNING):
        await claiming(site, "cloud-c")
    assert not second.done() and reported[0] == ["run run-1"]
    assert set(reported[1]) == {"run run-1", SEEKING, BEGINNING}
    begun = cloud_of(site, "run-2", announced=False)
    living(site, begun)
    await asyncio.sleep(1)
    site.routed.clear()
    await asyncio.sleep(60)
    questions = [
        message for message in site.routed if message.topic == topics.ask(LAB, CLOUD, CLOUD)
    ]
    sessions = {serialization.decode(message.body)[0] for message in questions}
    assert len(sessions) == 1, "only the one that waits asks on"
    assert not second.done() and set(reported[1]) == {"run run-1", SEEKING, BEGINNING, "run run-2"}
    site.kill(begun)
    await second
    first.cancel()


@pytest.mark.parametrize("after_s", [0.02, 0.1, 0.15, 0.2])
@virtual
async def test_each_of_several_clouds_that_ask_is_answered(
    site: SimulatedSite, after_s: float
) -> None:
    """They have one name: the question of one must not take the place of another one's."""
    living(site, cloud_of(site, "run-1"))
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


@pytest.mark.parametrize("lost", ["/answer/", "/ask/"])
@virtual
async def test_two_clouds_never_get_the_lab_though_half_of_the_messages_between_them_are_lost(
    site: SimulatedSite, lost: str
) -> None:
    """Each receives the other's questions, or its replies."""
    numbers = count()
    site.network.filters.append(
        lambda message: lost not in message.topic or (lost == "/ask/" and next(numbers) % 2 == 0)
    )
    first = claiming(site, "cloud-a", holds_s=20.0)
    await asyncio.sleep(0.1)
    second = claiming(site, "cloud-b", queue=True)
    await asyncio.sleep(20)
    assert not second.done()
    await first
    await second


@virtual
async def test_a_lab_is_not_free_while_the_broker_is_away(site: SimulatedSite) -> None:
    first = claiming(site, "cloud-a")
    await asyncio.sleep(0.5)
    site.broker.kill()
    await asyncio.sleep(10)
    assert not first.done()
    site.broker.start()
    await first


@virtual
async def test_retained_questions_and_replies_are_nobodys(site: SimulatedSite) -> None:
    site.inject(
        topics.ask(LAB, CLOUD, CLOUD), serialization.encode(Question("0" * 20), "s"), retain=True
    )
    alive = Alive("0" * 20, Presence(NodeState.READY, "cloud"))
    site.inject(
        topics.inbox(LAB, "run-1", CLOUD, CLOUD), serialization.encode(alive, "s"), retain=True
    )
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
# a second for each
LONG = SMALL.replace("rounds = 2", "rounds = 1000") + "[training]\nepochs = 100\n"

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
        """Install another release on the machines of these roles: a node that waits is started
        again.
        """
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
            process = subprocess.Popen(
                line, stdout=subprocess.PIPE, stderr=errors, text=True, env=env
            )
        self._stack.callback(process.communicate)
        self._stack.callback(process.kill)
        return process

    def said(self, role: str) -> str:
        return (self.home / f"{role}.log").read_text()

    def cloud(self, text: str = SMALL, *flags: str, seed: int) -> subprocess.Popen[str]:
        file = self.home / f"{seed}.toml"
        file.write_text(text.format(seed=seed))
        return self._start(
            "cloud", file, "--runs", self.runs(seed), "--spool", "none", "--format", "json", *flags
        )

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
def test_one_run_follows_the_other_over_the_same_processes(lab: Lab) -> None:
    assert lab.run(1) == alone(1)
    foreign = lab.cloud(FOREIGN, seed=2)
    assert (
        foreign.stderr is not None
        and "'tests.helpers.examples:examples'" in foreign.stderr.readline()
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
    assert "device-0 leaves run" in lab.said(
        "device"
    ) and "'tests.helpers.examples:examples'" in lab.said("device")
    assert "Traceback" not in lab.said("institution") + lab.said("device")


@pytest.mark.slow
def test_a_lab_has_one_run_at_a_time_a_cloud_that_dies_leaves_it_free_and_nodes_end_on_sigterm(
    lab: Lab,
) -> None:
    first = lab.cloud(LONG, seed=1)
    assert first.stdout is not None
    assert any('"global_round"' in line for line in first.stdout)
    # a full pipe would stop the cloud
    threading.Thread(target=deque, args=(first.stdout, 0), daemon=True).start()
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
    assert re.search(
        r"lab lab on broker \S+ is used by run \S+\. Wait for its end with --queue", refused
    )
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
    file.write_text(
        'title = "t"\nbase = "small.toml"\nseeds = [3]\naxes = { "training.epochs" = [1] }\n'
    )
    words = ["sweep", file, "--broker", lab.address, "--runs", lab.home]
    done = fedstrata(*words, null=True)
    assert done.returncode == 0 and "1/1: 1, seed 3" in done.stderr, done.stderr
    assert model_digest(lab.home / "twice") == alone(3)
    more = fedstrata(*words, "--seeds", "1", null=True)
    assert more.returncode == 0 and "0 of 1 runs are finished" in more.stderr, more.stderr
    assert [Run(path).seed for path in folders(lab.home / "twice")] == [3, 1]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["cloud", "device"])
def test_an_upgrade_of_one_role_first_is_named_by_the_commands_and_ends_with_that_of_the_others(
    lab: Lab, first: str
) -> None:
    """The cloud is upgraded with its machine's commands; nobody is away, and each other release is
    named.
    """
    names = {"institution": ["institution-0"], "device": ["device-0", "device-1"]}
    nodes = [name for each in names.values() for name in each]
    others = [
        name
        for role, each in names.items()
        if (role == first) != (first == "cloud")
        for name in each
    ]
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
            # a node that was just started has not joined yet
            assert time.monotonic() < deadline, rows
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
