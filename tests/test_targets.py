"""Where Prometheus is sent: what the cloud makes of its children's presences."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.metrics import Metrics, NodeLabels
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.protocol.attendance import REPORT_MOST_S, REPORT_S, STAYING, Targets
from fedstrata.common.protocol.limits import ChildLimits
from fedstrata.common.protocol.messages import NodeState, Presence, Target
from fedstrata.common.protocol.peers import ToChildren, ToParent
from fedstrata.common.protocol.presence import Identity
from fedstrata.common.runtime import exports as targets_of_runs
from fedstrata.common.runtime.child_endpoint import ChildEndpoint
from fedstrata.common.runtime.exports import discovery, passed_on, published, reachable
from fedstrata.common.runtime.parent_endpoint import ParentEndpoint
from fedstrata.common.runtime.world import new_session
from fedstrata.common.settings.links import LinkSettings
from fedstrata.common.settings.topology import CLOUD, Tree
from fedstrata.deploy.brokers.broker import BrokerProcess, start

TREE = Tree([{CLOUD: ["i0", "i1"]}, {"i0": ["d0", "d1", "d2"], "i1": ["d3"]}])
FOUR = Tree(
    [
        {CLOUD: ["r0", "r1"]},
        {"r0": ["i0", "i1"], "r1": ["i2"]},
        {"i0": ["d0"], "i1": ["d1"], "i2": ["d2"]},
    ]
)
ALIVE = dict.fromkeys(FOUR.nodes, NodeState.READY)


def watching(tree: Tree, node: str = CLOUD) -> Targets:
    """Return the targets of a parent, before any presence."""
    return Targets(tree.below_each(node))


def presence(state: NodeState, metrics: str = "", *below: tuple[str, str]) -> Presence:
    """Return a presence that publishes its own address and those below."""
    return Presence(state, "institution", metrics, targets=tuple(Target(*each) for each in below))


def found(targets: Targets) -> dict[str, tuple[str, str, str]]:
    """Return role, parent and node of each address."""
    answer = discovery(targets.addresses(), TREE, cloud="10.0.0.1:9464", run="r-1")
    labels = {str(each["targets"][0]): each["labels"] for each in answer}
    assert len(labels) == len(answer)  # an address twice would be scraped twice
    assert all(each["run"] == "r-1" for each in labels.values())
    return {a: (each["role"], each["parent"], each["node"]) for a, each in labels.items()}


def test_devices_of_one_process_are_one_target_with_the_labels_that_they_share() -> None:
    targets = watching(TREE)
    assert found(targets) == {"10.0.0.1:9464": ("cloud", "", "cloud")}
    targets.receive(
        "i0",
        presence(NodeState.READY, "h0:1", ("d0", "h1:1"), ("d1", "h1:1"), ("d2", "h2:1")),
        now=0.0,
    )
    # its own is not published
    targets.receive("i1", presence(NodeState.INIT, "", ("d3", "h2:1")), now=0.0)
    assert found(targets) == {
        "10.0.0.1:9464": ("cloud", "", "cloud"),
        "h0:1": ("institution", "cloud", "i0"),
        "h1:1": ("device", "i0", ""),
        "h2:1": ("device", "", ""),
    }


def test_devices_below_the_cloud_are_targets() -> None:
    tree = Tree([{CLOUD: ["d0", "d1"]}])
    targets = watching(tree)
    targets.receive("d0", presence(NodeState.READY, "h0:1"), now=0.0)
    answer = discovery(targets.addresses(), tree, cloud="10.0.0.1:9464", run="r-1")
    labels = {"role": "device", "parent": "cloud", "node": "d0", "run": "r-1"}
    assert answer[1] == {"targets": ["h0:1"], "labels": labels}


def test_who_is_reached_by_tls_is_a_target_of_that_scheme() -> None:
    targets = watching(TREE)
    addresses = ("https://10.0.0.7:1", "https://[fd00::7]:1", "10.0.0.8:1")
    below = zip(("d0", "d1", "d2"), addresses, strict=True)
    targets.receive("i0", presence(NodeState.READY, "https://gpu-0.example:9464", *below), now=0.0)
    answer = discovery(targets.addresses(), TREE, cloud="https://10.0.0.1:9464", run="r-1")
    assert {each["targets"][0]: each["labels"].get("__scheme__") for each in answer} == {
        "10.0.0.1:9464": "https",
        "gpu-0.example:9464": "https",
        "10.0.0.7:1": "https",
        "[fd00::7]:1": "https",
        "10.0.0.8:1": None,
    }


@pytest.mark.parametrize("state", NodeState)
def test_who_is_gone_is_no_target_and_devices_wait_for_an_institution_that_is_away(
    state: NodeState,
) -> None:
    targets = watching(TREE)
    targets.receive("i0", presence(NodeState.READY, "h0:1", ("d0", "h1:1")), now=0.0)
    last = (
        presence(state) if state is NodeState.LOST else presence(state, "h0:1", ("d0", "h1:1"))
    )  # a will knows nothing
    targets.receive("i0", last, now=0.0)
    here = {NodeState.INIT, NodeState.READY, NodeState.FINISHED}
    assert ("h0:1" in found(targets)) is (state in here)
    assert ("h1:1" in found(targets)) is (state is not NodeState.FAILED)
    targets.receive("i0", None, now=0.0)
    assert len(found(targets)) == 1


def test_nobody_reports_on_others_and_what_is_no_address_is_left_out() -> None:
    targets = watching(TREE)
    lies = (
        ("d3", "h1:1"),
        ("cloud", "h1:2"),
        ("d0", "http://h1:1"),
        ("d0", "https://h1"),
        ("d1", "h1:1/x"),
        ("d2", "h" * 300 + ":1"),
        ("d0", ""),
    )
    targets.receive("i0", presence(NodeState.READY, "no address", *lies), now=0.0)
    assert found(targets) == {"10.0.0.1:9464": ("cloud", "", "cloud")}


class FourLayers:
    """A lab of four layers, where each node publishes the addresses of all nodes below it."""

    def __init__(self) -> None:
        self.targets = {node: watching(FOUR, node) for node in FOUR.children}
        self.states = dict(ALIVE)

    def change(self, states: Mapping[str, NodeState]) -> None:
        """Change the state of each node, the lowest first; those above report each change."""
        for node in reversed(FOUR.nodes):
            self.states[node] = states[node]
            for each in reversed(FOUR.path(node).split("/")[1:]):
                self.targets[FOUR.parent(each)].receive(each, self.presence(each), now=0.0)

    def presence(self, node: str) -> Presence:
        """Return a node's presence; a will knows nothing."""
        state = self.states[node]
        if state is NodeState.LOST:
            return Presence(state, "")
        return Presence(
            state,
            "",
            f"{node}:1",
            targets=self.targets[node].addresses() if node in self.targets else (),
        )

    def found(self) -> dict[str, object]:
        """Return the labels of each node that the cloud finds."""
        answer = discovery(self.targets[CLOUD].addresses(), FOUR, cloud="cloud:1", run="r-1")
        return {str(each["targets"][0]).removesuffix(":1"): each["labels"] for each in answer}


def test_the_cloud_finds_the_nodes_of_all_layers() -> None:
    lab = FourLayers()
    lab.change(ALIVE)
    labels = {CLOUD: NodeLabels("cloud", CLOUD)}
    labels |= {
        node: NodeLabels("institution", node, parent=FOUR.parent(node)) for node in FOUR.aggregators
    }
    labels |= {node: NodeLabels("device", node, parent=FOUR.parent(node)) for node in FOUR.devices}
    assert lab.found() == {node: each._asdict() | {"run": "r-1"} for node, each in labels.items()}


@given(st.lists(st.sampled_from(NodeState), min_size=len(FOUR.nodes), max_size=len(FOUR.nodes)))
def test_nodes_below_an_absent_one_stay_targets_and_those_below_a_failed_one_do_not(
    drawn: list[NodeState],
) -> None:
    states, lab = dict(zip(FOUR.nodes, drawn, strict=True)), FourLayers()
    lab.change(ALIVE)
    lab.change(states)
    living = {node for node, state in states.items() if state in STAYING}
    failed = {node for node, state in states.items() if state is NodeState.FAILED}
    assert set(lab.found()) == {CLOUD} | {
        node for node in living if not failed & {*FOUR.path(node).split("/")}
    }
    lab.change(ALIVE)
    assert set(lab.found()) == {CLOUD, *FOUR.nodes}


@pytest.mark.parametrize("node", [CLOUD, "r0", "r1", "i2", "d2", "unknown"])
def test_a_child_reports_on_nodes_below_it_only(node: str) -> None:
    targets = watching(FOUR)
    targets.receive(
        "r0",
        presence(NodeState.READY, "h0:1", ("i0", "h1:1"), (node, "h2:1"), ("d0", "h3:1")),
        now=0.0,
    )
    assert targets.addresses() == (Target("d0", "h3:1"), Target("i0", "h1:1"), Target("r0", "h0:1"))


def test_a_node_has_one_address() -> None:
    targets = watching(FOUR)
    targets.receive(
        "r0", presence(NodeState.READY, "", *(("d0", f"h{i}:1") for i in range(1000))), now=0.0
    )
    assert len(targets.addresses()) == 1


def test_many_that_come_together_are_reported_at_once() -> None:
    targets = watching(TREE)
    assert targets.changed(9.0) is None and targets.due == inf
    for i in range(100):
        targets.receive(
            f"d{i:02}", Presence(NodeState.INIT, "device", f"h{i}:1"), now=10.0 + i / 1000
        )
    targets.receive("d07", Presence(NodeState.LOST, "device"), now=10.5)
    targets.receive("d08", Presence(NodeState.READY, "device", "h8:1"), now=10.5)
    assert targets.due == 10.5 + REPORT_S and targets.changed(11.4) is None
    reported = targets.changed(11.5)
    assert reported is not None and [target.name for target in reported] == [
        f"d{i:02}" for i in range(100) if i != 7
    ]
    targets.receive("d08", Presence(NodeState.READY, "device", "h8:1"), now=12.0)
    assert targets.due == inf and targets.changed(20.0) is None  # nothing new


def test_changes_without_an_end_are_reported_in_time() -> None:
    targets = watching(TREE)
    for i in range(100):
        targets.receive("d07", Presence(NodeState.INIT, "device", f"h{i}:1"), now=10.0 + i / 5)
        assert targets.due == min(10.0 + REPORT_MOST_S, 10.0 + i / 5 + REPORT_S)


def test_who_comes_back_is_a_target_again() -> None:
    targets = watching(TREE)
    targets.receive("d0", Presence(NodeState.READY, "device", "h0:1"), now=0.0)
    assert targets.changed(1.0) == (Target("d0", "h0:1"),)
    targets.receive("d0", Presence(NodeState.LOST, "device"), now=2.0)
    assert targets.changed(3.0) == ()
    targets.receive("d0", Presence(NodeState.INIT, "device", "h1:1"), now=4.0)
    assert targets.changed(5.0) == (Target("d0", "h1:1"),)


def test_the_answer_is_json_also_before_there_is_anything_to_tell() -> None:
    metrics = Metrics()
    port = metrics.serve("127.0.0.1", 0)

    def ask() -> object:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/sd", timeout=10) as answer:
            assert answer.status == 200 and answer.headers["Content-Type"] == "application/json"
            return json.load(answer)

    assert ask() == []
    metrics.serve_targets(lambda asked: [{"targets": [asked], "labels": {"role": "cloud"}}])
    assert ask() == [{"targets": [f"127.0.0.1:{port}"], "labels": {"role": "cloud"}}]


class Routes:
    """This machine's addresses, by the host that a packet goes to."""

    def __init__(self, patch: pytest.MonkeyPatch, **outside: str) -> None:
        self._by = {
            "127.0.0.1": "127.0.0.1",
            "::1": "::1",
            "10.0.0.7": "10.0.0.7",
            "10.0.0.9": "10.0.0.7",
        } | {
            targets_of_runs.OUTSIDE: outside.get("ipv4", ""),
            targets_of_runs.OUTSIDE_6: outside.get("ipv6", ""),
        }
        patch.setattr(targets_of_runs, "_routes", self.find)

    def find(self, hosts: Iterable[tuple[str, int]], family: int) -> Iterator[tuple[str, str]]:
        for host, _ in hosts:
            if (source := self._by.get(host)) and (family != socket.AF_INET or ":" not in host):
                yield source, host


def test_a_server_on_all_addresses_is_found_where_its_broker_is_reached_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, nowhere = BrokerAddress("127.0.0.1"), BrokerAddress("broker.invalid")
    assert reachable("0.0.0.0", here) != "", "by the routes of this machine"
    Routes(monkeypatch)
    assert reachable("192.0.2.7", here) == "192.0.2.7"
    assert reachable("::1", here) == "[::1]"
    assert reachable("0.0.0.0", here) == "127.0.0.1"
    assert reachable("", nowhere) == socket.gethostname()
    assert (
        reachable("0.0.0.0", BrokerAddress("broker.invalid", others=(("127.0.0.1", 1884),)))
        == "127.0.0.1"
    )
    assert reachable("0.0.0.0", BrokerAddress("10.0.0.9")) == "10.0.0.7"


def test_a_server_beside_its_broker_is_published_by_an_address_of_its_family_that_others_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as outside:
        Routes(outside, ipv4="10.0.0.7", ipv6="fd00::7")
        assert reachable("0.0.0.0", BrokerAddress("127.0.0.1")) == "10.0.0.7"
        assert reachable("::", BrokerAddress("::1")) == "[fd00::7]"
    Routes(monkeypatch)
    assert reachable("0.0.0.0", BrokerAddress("::1", others=(("127.0.0.1", 1883),))) == "127.0.0.1"
    assert reachable("::", BrokerAddress("::1")) == "[::1]"


def test_an_address_of_this_machine_alone_is_published_on_this_machine_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert published("127.0.0.1:9464", BrokerAddress("localhost")) == "127.0.0.1:9464", (
        "by this machine's routes"
    )
    Routes(monkeypatch)
    here, own, there = (
        BrokerAddress("127.0.0.1"),
        BrokerAddress("10.0.0.7"),
        BrokerAddress("10.0.0.9"),
    )
    for address in ("127.0.0.1:1", "https://127.0.0.1:1", "[::1]:1"):
        assert published(address, here) == published(address, own) == address
        assert (
            published(address, there) == published(address, BrokerAddress("broker.invalid")) == ""
        )
    assert published("10.0.0.7:1", there) == "10.0.0.7:1" and published("", here) == ""
    below = (Target("d0", "127.0.0.1:1"), Target("d1", "10.0.0.7:1"))
    assert passed_on(below, here) == below and passed_on(below, there) == below[1:]


def test_a_prometheus_elsewhere_gets_no_address_of_the_clouds_machine_alone() -> None:
    below = [Target("d0", "127.0.0.1:1"), Target("d1", "https://10.0.0.7:1")]
    for cloud, wanted in (
        ("10.0.0.1:9464", ["10.0.0.7:1"]),
        ("https://127.0.0.1:9464", ["127.0.0.1:1", "10.0.0.7:1"]),
    ):
        assert [each["targets"][0] for each in discovery(below, TREE, cloud=cloud, run="r")][
            1:
        ] == wanted


def test_devices_on_a_broker_of_their_own_are_found_lost_and_found_again(tmp_path: Path) -> None:
    async def play(wan: BrokerProcess, lan: BrokerProcess) -> None:
        at = {broker.port: BrokerAddress(broker.host, broker.port) for broker in (wan, lan)}

        def identity(name: str, role: str) -> Identity:
            return Identity("run-1", name, role, new_session(), f"{name}.lab:1")

        def device() -> ChildEndpoint:
            return ChildEndpoint(
                at[lan.port],
                identity("d0", "device"),
                ToParent(parent="i0", transfer=TransferSettings(), link=LinkSettings()),
            )

        async def pass_on() -> None:
            while True:
                up.session.link.own.set_targets(await down.targets_changed())
                up.wake()

        async def until(*wanted: str) -> None:
            while set(found(cloud.session.targets)) != {"10.0.0.1:9464", *wanted}:  # noqa: ASYNC110 - nothing reports it
                await asyncio.sleep(0.01)

        cloud = ParentEndpoint(
            at[wan.port],
            identity("cloud", "cloud"),
            ToChildren(
                links={"i0": LinkSettings()},
                transfer=TransferSettings(),
                limits={"i0": ChildLimits(below={"d0": 1})},
            ),
        )
        middle = identity("i0", "institution")
        up = ChildEndpoint(
            at[wan.port],
            middle,
            ToParent(parent="cloud", transfer=TransferSettings(), link=LinkSettings()),
        )
        down = ParentEndpoint(
            at[lan.port],
            middle,
            ToChildren(links={"d0": LinkSettings()}, transfer=TransferSettings()),
        )
        first, second = device(), device()
        async with asyncio.timeout(30):
            serving = [
                asyncio.create_task(each.run(connect_timeout_s=9))
                for each in (cloud, up, down, first)
            ]
            serving.append(asyncio.create_task(pass_on()))
            await until("i0.lab:1", "d0.lab:1")
            first.set_state(NodeState.DISCONNECTED)
            await until("i0.lab:1")
            ended = serving.pop(3)  # its process: one that goes on would answer for its name
            ended.cancel()
            await asyncio.wait((ended,))
            serving.append(asyncio.create_task(second.run(connect_timeout_s=9)))
            await until("i0.lab:1", "d0.lab:1")
            up.set_state(NodeState.LOST)  # as its will does
            await until("d0.lab:1")
        for task in serving:
            task.cancel()
        await asyncio.wait(serving)

    with ExitStack() as stack:
        for name in ("wan", "lan"):
            (tmp_path / name).mkdir()
        wan, lan = (
            stack.enter_context(start(directory=tmp_path / name)) for name in ("wan", "lan")
        )
        asyncio.run(play(wan, lan))
