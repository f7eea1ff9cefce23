"""Labs with different names on one broker: the same node names, and neither notices the other."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiomqtt
import pytest

from fedstrata.cloud.cloud_agent import CloudAgent
from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.errors import WireError
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.metrics import Metrics
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.protocol import topics
from fedstrata.common.protocol.messages import Announcement, NodeState, Presence
from fedstrata.common.protocol.serialization import encode
from fedstrata.common.runtime.world import Host
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.simulation.hardware import SimulatedMember, SimulatedPool
from fedstrata.deploy.watching.follower import Follower
from fedstrata.deploy.watching.lab_state import Event, WatchedLab
from fedstrata.deploy.watching.runs import Runs
from fedstrata.device.device_agent import DeviceAgent
from fedstrata.device.jobs import Prepared
from fedstrata.institution.institution_agent import InstitutionAgent
from tests.helpers.commands import invoke, null_model
from tests.helpers.null_roles import evaluator, hardware
from tests.helpers.sites import in_real_time
from tests.simulation.outcome import model_digest

# chunks, too, go by topics of the lab
TINY: dict[str, Any] = {"rounds": 2, "transfer": {"inline_bytes": 0}}
LABS = {
    lab: parse({**TINY, "training": {"epochs": epochs}})
    for lab, epochs in (("north", 1), ("south", 2))
}


@pytest.fixture
def address(tmp_path: Path) -> Iterator[BrokerAddress]:
    with broker.start(directory=tmp_path) as served:
        yield BrokerAddress(served.host, served.port)


class Seen:
    """What a watch showed: the runs, and the events of each."""

    def __init__(self) -> None:
        self.runs: set[str] = set()
        self.events: list[str] = []
        self.found = asyncio.Event()

    def waiting(self, runs: Runs, brokers: str) -> None:
        pass

    def show(self, lab: WatchedLab, events: Sequence[Event], now: float) -> None:
        self.runs.add(lab.run)
        self.events += [event for event, _ in events]
        self.found.set()


class WatchedPool(SimulatedPool):
    """Devices that train once a watch has found the run: a tiny lab would end before."""

    def __init__(self, watched: asyncio.Event) -> None:
        super().__init__(hardware())
        self.watched = watched

    def member(self, node: str) -> SimulatedMember:
        return WatchedMember(self, node)


class WatchedMember(SimulatedMember):
    _pool: WatchedPool

    async def prepare(self, experiment: Experiment, *, frozen: Path | None = None) -> Prepared:
        await self._pool.watched.wait()
        return await super().prepare(experiment)


async def run_lab(
    lab: str, folder: RunFolder, address: BrokerAddress, watched: asyncio.Event
) -> None:
    """Run a cloud, an institution and a device under the names that every lab of the test has."""
    cloud_host, institution_host, device_host = (
        Host(address, 10.0, Metrics(), lab=lab) for _ in range(3)
    )
    async with asyncio.TaskGroup() as group:
        cloud = CloudAgent(
            folder, cloud_host, resume=False, observe=lambda *_: None, evaluator=evaluator
        )
        institution = InstitutionAgent("institution-0", institution_host, child_broker=address)
        device = DeviceAgent(
            "device-0", device_host, parent="institution-0", pool=WatchedPool(watched)
        )
        for role in (cloud, institution, device):
            group.create_task(role.run())


async def collect(address: BrokerAddress, ready: asyncio.Event, found: list[topics.Topic]) -> None:
    """Collect the topic of each message on the broker until cancelled."""
    async with aiomqtt.Client(address.host, address.port) as client:
        await client.subscribe("#", qos=1)
        ready.set()
        async for message in client.messages:
            found.append(topics.parse(message.topic.value))


@in_real_time
async def test_two_labs_with_the_same_names_share_a_broker(
    address: BrokerAddress, tmp_path: Path
) -> None:
    folders = {
        lab: RunFolder.create(tmp_path / lab, experiment) for lab, experiment in LABS.items()
    }
    found: list[topics.Topic] = []
    seen, ready = {lab: Seen() for lab in LABS}, asyncio.Event()
    collecting = asyncio.create_task(collect(address, ready, found))
    await ready.wait()
    async with asyncio.TaskGroup() as group:
        for lab, folder in folders.items():
            watch = Follower([address], lab=lab, run=None, connect_timeout_s=10.0)
            group.create_task(watch.follow(seen[lab]))
            group.create_task(run_lab(lab, folder, address, seen[lab].found))
    collecting.cancel()
    await asyncio.wait((collecting,))
    assert collecting.cancelled()  # every topic was known
    inside = [
        topic for topic in found if not isinstance(topic, topics.AskTopic | topics.AnswerTopic)
    ]
    runs = {
        lab: {topic.run for topic in inside if topic.lab == lab}
        for lab in {topic.lab for topic in found}
    }
    assert runs == {lab: {folder.run} for lab, folder in folders.items()}
    for lab, folder in folders.items():
        assert seen[lab].runs == {folder.run} and seen[lab].events[-1] == "end"
    digests = {lab: model_digest(tmp_path / lab) for lab in LABS}
    assert digests == {
        lab: await asyncio.to_thread(null_model, experiment) for lab, experiment in LABS.items()
    }
    assert digests["north"] != digests["south"]


async def keep(address: BrokerAddress, lab: str, run: str, *, state: NodeState | None) -> None:
    """Leave a cloud's retained messages on the broker."""
    async with aiomqtt.Client(address.host, address.port) as client:
        announcement = encode(Announcement(parse(TINY).to_json(), "[]"), "cloud-1")
        await client.publish(topics.spec(lab, run, "cloud"), announcement, qos=1, retain=True)
        presence = b"" if state is None else encode(Presence(state, "cloud"), "cloud-1")
        await client.publish(topics.state(lab, run, "cloud"), presence, qos=1, retain=True)


@in_real_time
async def test_a_watch_shows_the_runs_of_its_lab_alone(address: BrokerAddress) -> None:
    old, new = "20260101T000000Z-aaaaaa", "20270101T000000Z-bbbbbb"
    await keep(address, "north", old, state=NodeState.READY)
    await keep(address, "south", new, state=NodeState.READY)
    seen = Seen()
    watch = Follower([address], lab="north", run=None, connect_timeout_s=10.0)
    following = asyncio.create_task(watch.follow(seen))
    await seen.found.wait()
    await keep(address, "south", old, state=NodeState.FAILED)  # even a run of the same id
    for state in (NodeState.FINISHED, None):
        await keep(address, "north", old, state=state)
    await following
    assert seen.runs == {old} and seen.events[-1] == "end"


def test_a_watch_of_an_empty_lab_names_it(address: BrokerAddress) -> None:
    asyncio.run(keep(address, "north", "20260101T000000Z-aaaaaa", state=NodeState.READY))
    done = invoke(
        "watch",
        "--broker",
        str(address),
        "--once",
        "--timeout",
        "0.3",
        env={"FEDSTRATA_LAB": "south"},
    )
    assert done.exit_code == 5 and f"no active run of lab south on broker {address}" in done.output


@pytest.mark.parametrize(
    "command",
    [
        ["run", "x.toml"],
        ["cloud", "x.toml"],
        ["institution", "--name", "i"],
        ["device", "--name", "d", "--parent", "i"],
        ["watch"],
    ],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize("name", ["+", "my lab"])
def test_a_lab_name_of_another_form_is_a_usage_error(command: list[str], name: str) -> None:
    by_option, by_environment = (
        invoke(*command, *flags, env={"FEDSTRATA_LAB": value, "COLUMNS": "200"})
        for flags, value in ((["--lab", name], "north"), ([], name))
    )
    for done in (by_option, by_environment):
        assert done.exit_code == 2
        assert re.search(
            rf"--lab.*{re.escape(repr(name))} is not a lab name\. Use 1 to 64 letters", done.output
        )


def test_a_host_refuses_a_lab_name_that_is_a_filter(address: BrokerAddress) -> None:
    with pytest.raises(ValueError, match="'\\+' is not a lab name"):
        Host(address, 1.0, Metrics(), lab="+")
    with pytest.raises(WireError):
        topics.parse(topics.state("+", "run-1", "cloud"))
