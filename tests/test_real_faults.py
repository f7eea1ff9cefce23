"""The worst of what labs once died of, on a real mosquitto: real agents in this process, or real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import aiomqtt
import pytest
from PIL import Image
from safetensors.numpy import load_file

from cloud.agent import CloudAgent
from cloud.results import RunFolder
from common.accounting.traffic import Traffic
from common.errors import InvalidExperiment, NoProgress, WireError
from common.experiment.reading import parse, to_toml
from common.experiment.schema import Experiment
from common.metrics import Metrics
from common.net.address import BrokerAddress
from common.protocol import participant, receiver, serialization, topics
from common.protocol.messages import Acknowledgement, Key, Message, NodeState, Phase, Presence, Progress, Task
from common.runtime.round import Observe
from common.runtime.world import Host
from deploy.brokers import broker
from deploy.brokers.broker import BrokerProcess
from deploy.local.namespaces import VethPair, joined
from device.agent import DeviceAgent
from device.pool.pool import Pool
from institution.agent import InstitutionAgent
from tests.helpers.commands import DEMO, PATIENCE_S, command, fedstrata, sets, table
from tests.helpers.evaluation import HereEvaluator
from tests.helpers.netns import in_namespaces
from tests.helpers.sites import in_real_time

SMALL: Final[dict[str, Any]] = {
    "name": "faults",
    "seed": 5,
    "rounds": 1,
    "topology": {"institutions": 1, "devices": 2},
    "model": {"name": "mlp_digits"},
    "training": {"epochs": 1},
    "links": {"check": "off"},
}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[BrokerProcess]:
    with broker.start(directory=tmp_path) as one:
        yield one


@pytest.fixture
def address(served: BrokerProcess) -> BrokerAddress:
    return BrokerAddress(served.host, served.port)


class Agents:
    """Agents of one experiment as tasks of this process, by their names; `start` begins one, or one again."""

    def __init__(self, experiment: Experiment, address: BrokerAddress, runs: Path, pool: Pool) -> None:
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self._experiment = experiment
        self._runs = runs
        self._pool = pool
        self._host = Host(address, 10.0, Metrics(), data_root=runs.parent)

    def cloud(self, *, observe: Observe = lambda event, facts: None) -> asyncio.Task[Any]:
        folder = RunFolder.create(self._runs, self._experiment)
        agent = CloudAgent(folder, self._host, resume=False, observe=observe, evaluator=HereEvaluator)
        return self._start("cloud", agent.run())

    def institution(self, name: str) -> asyncio.Task[Any]:
        agent = InstitutionAgent(name, self._host, child_broker=self._host.broker)
        return self._start(name, agent.run())

    def device(self, name: str, institution: str, *, allow: Sequence[str] = ()) -> asyncio.Task[Any]:
        agent = DeviceAgent(name, replace(self._host, allow=allow), parent=institution, pool=self._pool)
        return self._start(name, agent.run())

    def all(self, *, observe: Observe = lambda event, facts: None) -> None:
        self.cloud(observe=observe)
        for name in self._experiment.tree.aggregators:
            members = self._experiment.tree.children[name]
            self.institution(name)
            for member in members:
                self.device(member, name)

    def _start(self, name: str, running: Any) -> asyncio.Task[Any]:
        self.tasks[name] = asyncio.create_task(running, name=name)
        return self.tasks[name]


@asynccontextmanager
async def agents_of(experiment: Experiment, address: BrokerAddress, runs: Path) -> AsyncIterator[Agents]:
    async with AsyncExitStack() as stack:
        devices = len(experiment.tree.devices)
        pool = await stack.enter_async_context(Pool(accelerator="cpu", slots=1, devices=devices))
        agents = Agents(experiment, address, runs, pool)
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield agents
        finally:
            for task in agents.tasks.values():
                task.cancel()
            await asyncio.wait(agents.tasks.values())


def tensors(runs: Path) -> Mapping[str, bytes]:
    """Return the final model of the only run in a folder that ended."""
    (path,) = runs.glob("*/model.safetensors")
    return {name: entry.tobytes() for name, entry in load_file(path).items()}


# Chunks that never arrive


def test_chunks_that_the_broker_drops_end_the_run_for_lack_of_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device sends its chunks again and again; that is no progress, as none of them arrives."""
    if broker.choose() != "mosquitto":
        pytest.skip("the ACL is mosquitto's")
    monkeypatch.setattr(receiver, "REPAIR_S", 0.2)  # several times in idle_s, as in a lab whose idle_s is minutes
    monkeypatch.setattr(participant, "ANNOUNCE_MOST_S", 0.5)
    (tmp_path / "acl").write_text("topic readwrite #\ntopic read $SYS/#\ntopic deny fs1/+/+/device-0/blob/#\n")
    experiment = parse(SMALL | {"model": {"name": "cnn_digits"}, "transfer": {"inline_bytes": 0, "idle_s": 2.0}})
    began: list[float] = []

    def observe(event: str, facts: dict[str, object]) -> None:
        if (event, facts.get("state")) == ("child", "ready"):
            began.append(time.monotonic())

    async def run(address: BrokerAddress) -> None:
        async with agents_of(experiment, address, tmp_path / "runs") as agents:
            agents.all(observe=observe)
            with pytest.raises(NoProgress, match="institution-0 gave up: device-0 made no progress for 2 s") as ended:
                await agents.tasks["cloud"]
            assert ended.value.exit_code == 5
            assert 2.0 < time.monotonic() - began[0] < 2 * 2.0 + 2.0

    with broker.start(directory=tmp_path, settings={"acl_file": str(tmp_path / "acl")}) as served:
        asyncio.run(run(BrokerAddress(served.host, served.port)))


# A stranger's message, and a damaged one


async def follow(address: BrokerAddress, react: Callable[[topics.InboxTopic, Message, bytes], bytes | None]) -> None:
    """Answer each control message with what `react` returns, published on its own topic."""
    async with aiomqtt.Client(address.host, address.port) as client:
        await client.subscribe("fs1/lab/+/+/inbox/+", qos=1)
        async for message in client.messages:
            topic, body = topics.parse(message.topic.value), bytes(message.payload)
            try:
                content = serialization.decode(body)[1]
            except WireError:
                continue
            if isinstance(topic, topics.InboxTopic) and (answer := react(topic, content, body)) is not None:
                await client.publish(message.topic.value, answer, qos=1)


@in_real_time
async def test_strangers_and_damaged_messages_change_nothing(
    address: BrokerAddress, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each task comes a second time with a flipped bit, each acknowledgement and progress from an unknown session."""
    experiment = parse(SMALL | {"transfer": {"inline_bytes": 0, "idle_s": 5.0}, "institution": {"rounds": 2}})
    stranger = "feedfacefeedface"

    def disturb(topic: topics.InboxTopic, message: Message, body: bytes) -> bytes | None:
        if serialization.decode(body)[0] == stranger:
            return None
        if isinstance(message, Task):
            return body[:-3] + bytes([body[-3] ^ 4]) + body[-2:]
        if isinstance(message, Progress):
            return serialization.encode(Progress(message.key, Phase.TRAINING, 1, 2, Traffic(), ()), stranger)
        if isinstance(message, Acknowledgement):
            return serialization.encode(Acknowledgement(Key(9, 9, 9), "no"), stranger)
        return None

    for runs, disturbed in (("alone", False), ("disturbed", True)):
        async with agents_of(experiment, address, tmp_path / runs) as agents:
            following = asyncio.create_task(follow(address, disturb)) if disturbed else None
            agents.all()
            await asyncio.gather(*agents.tasks.values())
            if following is not None:
                assert not following.done()
                while not following.done():  # the client may swallow one that comes with a message
                    following.cancel()
                    await asyncio.wait((following,), timeout=1.0)
    assert tensors(tmp_path / "alone") == tensors(tmp_path / "disturbed")
    for words in ("refused a message (malformed)", "refused a message (unknown session)"):
        assert any(words in line for line in caplog.messages), words


# A device that is wrong before the first round


NET: Final = """
from torch import nn

def build(*, shape, classes):
    c, h, w = shape
    return nn.Sequential(nn.Flatten(), nn.Linear(c * h * w, classes))
"""


def pictures(folder: Path) -> None:
    """Leave an image of each class."""
    for place, kind in enumerate(("cat", "dog")):
        (folder / kind).mkdir(parents=True)
        Image.new("RGB", (8, 6), (100 * place, 50, 50)).save(folder / kind / "a.png")


def of_own_images(root: Path, **more: Any) -> Experiment:
    """Return an experiment in which each device reads images of its own."""
    data = {"dataset": "folder", "partition": "natural", "classes": ["cat", "dog"], "image_shape": [3, 6, 8]}
    return parse(SMALL | {"data": {**data, "root": f"{root}/{{node}}"}, "model": {"name": "net_of_mine:build"}} | more)


@pytest.mark.slow
@in_real_time
async def test_a_device_that_is_wrong_in_three_ways_holds_up_the_lab_until_it_is_right(
    address: BrokerAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net_of_mine.py").write_text(NET)
    monkeypatch.syspath_prepend(str(tmp_path))
    pictures(tmp_path / "cloud" / "test")
    pictures(tmp_path / "device-1" / "train")
    experiment = of_own_images(tmp_path, topology={"institutions": 2, "devices": 2}, transfer={"idle_s": 4.0})
    mine = ["net_of_mine"]
    async with agents_of(experiment, address, tmp_path / "runs") as agents:
        agents.cloud()
        for name in ("institution-0", "institution-1"):
            agents.institution(name)
        agents.device("device-1", "institution-1", allow=mine)
        for reason, parent, allowed in (
            ("--allow net_of_mine", "institution-0", []),
            ("it belongs to institution-0", "institution-1", mine),
            ("data.root = .*device-0", "institution-0", mine),
        ):
            with pytest.raises(InvalidExperiment, match=reason):
                await agents.device("device-0", parent, allow=allowed)
            await asyncio.sleep(1.0)
            ended = {name: task for name, task in agents.tasks.items() if task.done()}
            assert ended.keys() == {"device-0"}, ended
        await asyncio.sleep(4.0)  # longer than idle_s
        pictures(tmp_path / "device-0" / "train")
        agents.device("device-0", "institution-0", allow=mine)
        await asyncio.gather(*agents.tasks.values())
    assert tensors(tmp_path / "runs")


# Real processes


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_lab_of_one_host_in_which_one_device_has_no_data_ends_with_4(tmp_path: Path) -> None:
    (tmp_path / "net_of_mine.py").write_text(NET)
    pictures(tmp_path / "cloud" / "test")
    pictures(tmp_path / "device-1" / "train")
    (tmp_path / "device-0" / "train").mkdir(parents=True)
    file = tmp_path / "own.toml"
    file.write_text(to_toml(of_own_images(tmp_path)))
    path = os.pathsep.join([str(tmp_path), str(DEMO.parents[2])])
    done = fedstrata("run", file, "--runs", tmp_path / "runs", env={"PYTHONPATH": path})
    assert done.returncode == 4
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("fedstrata: device-0: data.root = ") and f"{tmp_path}/device-0" in last
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_wan_that_is_slower_than_the_lan_ends_no_run(tmp_path: Path) -> None:
    pairs = (
        "rounds=2", "topology.institutions=1", "topology.devices=2", "data.dataset=synthetic", "data.classes=10",
        "data.samples=200", "model.name=resnet20", "links.wan={up_mbit=2,down_mbit=2}",
    )  # fmt: skip
    done = fedstrata("run", DEMO, "--runs", tmp_path, "--format", "json", *sets(*pairs))
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()].count("evaluated") == 2


class Processes:
    """The roles of an experiment as processes on one broker."""

    def __init__(self, home: Path, experiment: Experiment, address: str) -> None:
        self.all: list[subprocess.Popen[bytes]] = []
        self.runs = home / "runs"
        self._home = home
        self._address = address
        self._file = home / "experiment.toml"
        self._file.write_text(to_toml(experiment))

    def start(self, *arguments: str | Path) -> subprocess.Popen[bytes]:
        with (self._home / f"{len(self.all)}-{arguments[0]}.log").open("wb") as log:
            words = command("--log-level", "info", *arguments, "--broker", self._address)
            self.all.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=log))
        return self.all[-1]

    def cloud(self) -> subprocess.Popen[bytes]:
        return self.start("cloud", self._file, "--runs", self.runs, "--spool", "none")

    def institution(self) -> subprocess.Popen[bytes]:
        return self.start("institution", "--name", "institution-0", "--spool", "none")

    def devices(self, *names: str) -> subprocess.Popen[bytes]:
        words = [word for name in names for word in ("--name", name)]
        return self.start("device", *words, "--parent", "institution-0", "--slots", "1")

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(self._home.glob("*.log")))

    def ends(self, *processes: subprocess.Popen[bytes]) -> None:
        """Wait until these have ended well."""
        for process in processes:
            try:
                code: int | None = process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                code = None
            assert code == 0, self.logs()

    def end(self) -> None:
        for process in self.all:
            process.kill()
            process.wait()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as one:
        yield one


def retained_states(address: BrokerAddress) -> dict[str, NodeState]:
    """Return the states that a broker keeps, by topic."""

    async def ask() -> dict[str, NodeState]:
        found: dict[str, NodeState] = {}
        async with aiomqtt.Client(address.host, address.port) as client:
            await client.subscribe([("fs1/+/+/+/state", 1), ("end", 1)])
            await client.publish("end", qos=1)
            async for message in client.messages:
                if message.topic.value == "end":
                    break
                content = serialization.decode(bytes(message.payload))[1]
                assert isinstance(content, Presence)
                found[message.topic.value] = content.state
        return found

    return asyncio.run(ask())


def until(condition: Callable[[], object], what: Callable[[], str]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, what()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_persistent_broker_that_loses_power_with_its_lab_holds_up_no_later_one(
    tmp_path: Path, stack: ExitStack
) -> None:
    """All are killed at once; the broker comes back with the dead run's READY, and children before their cloud."""
    if broker.choose() != "mosquitto":
        pytest.skip("the store is mosquitto's")
    store = tmp_path / "store"
    store.mkdir()
    settings = {
        "persistence": "true", "persistence_location": f"{store}/",
        "autosave_interval": 1, "autosave_on_changes": "true",
    }  # fmt: skip
    experiment = parse(SMALL | {"rounds": 200})
    served = stack.enter_context(broker.start(directory=tmp_path, settings=settings))
    address = BrokerAddress(served.host, served.port)
    (first_home := tmp_path / "first").mkdir()
    first = Processes(first_home, experiment, str(address))
    stack.callback(first.end)
    first.cloud(), first.institution(), first.devices("device-0", "device-1")
    until(lambda: len([s for s in retained_states(address).values() if s is NodeState.READY]) == 4, first.logs)
    time.sleep(0.5)
    for process in (served.process, *first.all):
        os.kill(process.pid, signal.SIGKILL)
    first.end()
    served.process.wait()
    again = stack.enter_context(broker.start(directory=tmp_path, port=served.port, settings=settings))
    assert again.port == served.port
    left = retained_states(address)
    assert [topic.split("/")[3] for topic, state in left.items() if state is NodeState.READY].count("cloud") == 1
    (second_home := tmp_path / "second").mkdir()
    second = Processes(second_home, parse(SMALL), str(address))
    stack.callback(second.end)
    children = [second.institution(), second.devices("device-0", "device-1")]
    time.sleep(3.0)
    second.ends(second.cloud(), *children)
    assert tensors(second.runs) and "Traceback" not in second.logs()


@pytest.mark.slow
@in_namespaces
@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_device_whose_large_packets_vanish_costs_a_quorum_its_deadlines(tmp_path: Path, stack: ExitStack) -> None:
    """Its uplink drops frames of more than 1,000 bytes: it reports and offers, but none of its chunks comes."""
    closing = {"rule": "quorum", "quorum": 1, "deadline_s": 1.0}
    transfer = {"inline_bytes": 0, "keepalive_s": 5}
    experiment = parse(
        SMALL
        | {"rounds": 3, "institution": {"closing": closing}, "transfer": transfer, "model": {"name": "cnn_digits"}}
    )
    wire = VethPair(0, "device-0", "above", "below", up_mbit=50.0, down_mbit=50.0)
    spaces = stack.enter_context(joined(("above", "below"), (wire,)))
    spaces["below"].batch("tc", ["qdisc replace dev up0 root handle 1: tbf rate 50mbit burst 1000 limit 100000"])
    with spaces["above"].entered():
        served = stack.enter_context(broker.start(directory=tmp_path, host="0.0.0.0"))
        lab = Processes(tmp_path, experiment, f"{wire.parent_address}:{served.port}")
        stack.callback(lab.end)
        ending = [lab.cloud(), lab.institution(), lab.devices("device-1")]
    with spaces["below"].entered():
        ending.append(lab.devices("device-0"))
    lab.ends(*ending)
    (path,) = lab.runs.glob("*/devices.csv")
    did = [(row["node"].rpartition("/")[2], row["local_rounds"]) for row in table(path)]
    assert sorted(did) == [("device-0", "0")] * 3 + [("device-1", "1")] * 3
