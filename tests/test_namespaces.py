"""Labs in network namespaces: who is where, what the kernel gets, that it keeps to it, and that
nothing stays.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from ipaddress import IPv4Address, IPv4Network
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import load, parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.links.kernel import FRAME_BYTES, shaping
from fedstrata.deploy.local.lab_network import one_host, shares
from tests.bench.namespaces import by_kernel, lay_out, namespaces, run_in_namespaces
from tests.helpers.commands import DEMO, PATIENCE_S, null_model
from tests.helpers.namespaces import Namespace, VethPair, joined
from tests.helpers.netns import in_namespaces, with_delays
from tests.simulation.outcome import model_digest

SMALL = ("topology.institutions=2", "topology.devices=4", "rounds=2", "institution.rounds=2")


# The plan


@st.composite
def experiments(draw: st.DrawFn) -> Experiment:
    institutions = draw(st.integers(1, 6))
    devices = draw(st.integers(institutions, 40))
    topology = {"institutions": institutions, "devices": devices}
    rate = st.none() | st.floats(0.05, 1e4)
    link = st.fixed_dictionaries(
        {"up_mbit": rate, "down_mbit": rate, "delay_ms": st.floats(0, 500)}
    )
    single = draw(st.dictionaries(st.sampled_from([f"device-{i}" for i in range(devices)]), link))
    return parse(
        {"topology": topology, "links": {"wan": draw(link), "lan": draw(link), "of": single}}
    )


@given(experiments())
def test_every_node_but_the_cloud_has_a_wire_and_addresses_of_its_own(
    experiment: Experiment,
) -> None:
    plan = lay_out(experiment)
    children = experiment.tree.aggregators
    homes = {device: experiment.tree.parent(device) for device in experiment.tree.devices}
    assert set(plan.wires) == {*children, *homes}
    assert set(plan.hosts) == {CLOUD, *children, *plan.groups}
    assert list(plan.groups.values()) == [
        tuple(experiment.tree.children[name]) for name in children
    ]
    for child, wire in plan.wires.items():
        assert wire.child == child
        link = experiment.link(child)
        wanted = (link.up_mbit, link.down_mbit, link.delay_ms)
        assert (wire.up_mbit, wire.down_mbit, wire.delay_ms) == pytest.approx(wanted)
        if child in children:
            assert (wire.parent_host, wire.child_host) == (CLOUD, child)
        else:
            assert wire.parent_host == homes[child]
            assert child in plan.groups[wire.child_host]
        pair = IPv4Network(f"{wire.parent_address}/31")
        assert {*pair.hosts()} == {
            IPv4Address(wire.parent_address),
            IPv4Address(wire.child_address),
        }
    addresses = [a for w in plan.wires.values() for a in (w.parent_address, w.child_address)]
    assert len(set(addresses)) == len(addresses)
    assert all(IPv4Address(address).is_private for address in addresses)


@given(st.integers(1, 64), st.integers(1, 64))
def test_cores_are_shared_out_among_processes(cores: int, processes: int) -> None:
    mine = shares(cores, processes)
    assert len(mine) == processes and min(mine) >= 1 and max(mine) - min(mine) <= 1
    assert sum(mine) == max(cores, processes)


@given(experiments(), st.booleans())
def test_links_are_left_to_the_kernel_with_or_without_their_delays(
    experiment: Experiment, delays: bool
) -> None:
    left = by_kernel(experiment, delays=delays)
    assert left.links.enforce == "kernel"
    assert parse(left.to_json()) == left
    for child in lay_out(experiment).wires:
        before, after = experiment.link(child), left.link(child)
        assert (after.up_mbit, after.down_mbit) == (before.up_mbit, before.down_mbit)
        assert after.delay_ms == (before.delay_ms if delays else 0.0)


# What the kernel gets


@given(st.floats(0.05, 1e4), st.floats(0.0, 500.0))
def test_a_rate_is_reported_to_the_bit_with_a_small_bucket_and_a_larger_queue(
    mbit: float, delay_ms: float
) -> None:
    first, *rest = shaping("up0", mbit=mbit, delay_ms=delay_ms)
    words = first.split()
    reported = dict(pairwise(words))
    assert words[:3] == ["qdisc", "add", "dev"]
    assert reported["dev"] == "up0"
    assert reported["rate"] == f"{round(mbit * 1e6)}bit"
    burst, limit = int(reported["burst"]), int(reported["limit"])
    assert burst >= 2 * FRAME_BYTES
    # which floats may miss by a bit
    assert burst * 8 <= max(2 * FRAME_BYTES * 8, 0.02 * mbit * 1e6) * (1 + 1e-9)
    assert limit >= burst + 32 * FRAME_BYTES
    assert len(rest) == bool(delay_ms)
    for line in rest:
        assert line.startswith("qdisc add dev up0 parent 1:1 netem delay ")
        packets = int(line.rpartition(" ")[2])
        # what is under way is not dropped
        assert packets * FRAME_BYTES * 8 > mbit * 1e6 * delay_ms / 1e3


def test_an_unlimited_link_is_delayed_alone() -> None:
    assert shaping("up0", mbit=None, delay_ms=0.0) == []
    (line,) = shaping("up0", mbit=None, delay_ms=20.0)
    assert line.startswith("qdisc add dev up0 root netem delay 20ms limit ")


def test_a_lab_on_one_machine_has_no_links_for_the_kernel(tmp_path: Path) -> None:
    with pytest.raises(InvalidExperiment, match="Use bucket"):
        one_host(by_kernel(load(DEMO, SMALL), delays=True), tmp_path).__enter__()


# What the kernel does


def qdiscs(space: Namespace) -> dict[str, dict[str, Any]]:
    """Return the shapers of a namespace by interface, as tc reports them; rates in bytes per
    second.
    """
    with space.entered():
        reported = subprocess.run(
            ["tc", "-json", "qdisc", "show"], capture_output=True, check=True
        ).stdout
    return {each["dev"]: each["options"] for each in json.loads(reported) if each["kind"] == "tbf"}


@in_namespaces
def test_both_ends_keep_the_rates_that_were_wanted() -> None:
    wires = (
        VethPair(0, "slow", "above", "below", up_mbit=1.0, down_mbit=10.0),
        VethPair(1, "free", "above", "below"),
    )
    with joined(("above", "below"), wires) as spaces:
        above, below = qdiscs(spaces["above"]), qdiscs(spaces["below"])
    assert {name: options["rate"] for name, options in above.items()} == {"down0": 1_250_000}
    assert {name: options["rate"] for name, options in below.items()} == {"up0": 125_000}


FAR = VethPair(0, "far", "above", "below", up_mbit=1.0, delay_ms=40.0)


@in_namespaces
@with_delays
def test_a_delay_is_kept_both_ways() -> None:
    with joined(("above", "below"), (FAR,)) as spaces, spaces["below"].entered():
        started = time.monotonic()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((FAR.parent_address, 9))
        assert time.monotonic() - started >= 0.08


@in_namespaces
def test_a_namespace_is_left_as_it_was_entered_and_sees_nothing_of_this_machine() -> None:
    def look() -> None:
        with space.entered():
            assert os.readlink("/proc/thread-self/ns/net") != here
            assert [name for _, name in socket.if_nameindex()] == ["lo"]
            raise KeyboardInterrupt

    here = os.readlink("/proc/thread-self/ns/net")
    with Namespace() as space:
        with pytest.raises(KeyboardInterrupt):
            look()
        assert os.readlink("/proc/thread-self/ns/net") == here


@in_namespaces
def test_each_device_reaches_its_broker_by_its_own_wire(tmp_path: Path) -> None:
    plan = lay_out(by_kernel(load(DEMO, SMALL), delays=False))

    def reach(host: str, broker: str) -> str:
        address, _, port = broker.partition(":")
        with (
            lab.inside(host),
            socket.create_connection((address, int(port)), timeout=10) as connection,
        ):
            source: str = connection.getsockname()[0]
        return source

    with namespaces(plan, tmp_path) as lab:
        for host, address in lab.downward.items():
            assert reach(host, address) == "127.0.0.1"
        for node, wire in plan.wires.items():
            assert reach(wire.child_host, lab.upward[node]) == wire.child_address


@pytest.mark.slow
@in_namespaces
@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_lab_in_namespaces_ends_with_the_same_model(tmp_path: Path) -> None:
    pairs = ("topology.institutions=1", "topology.devices=2", "rounds=2", "institution.rounds=2")
    experiment = by_kernel(load(DEMO, pairs), delays=False)
    folder = run_in_namespaces(experiment, tmp_path, null=True)
    assert model_digest(folder.parent) == null_model(load(DEMO, pairs))
    assert load(folder / "experiment.toml") == experiment
