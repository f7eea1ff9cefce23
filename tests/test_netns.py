"""Labs in network namespaces: who is where, what the kernel gets, that it keeps to it, and that nothing stays."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from ipaddress import IPv4Address, IPv4Network
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidExperiment
from common.experiment.links import RateTrace
from common.experiment.reading import load, parse
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD
from deploy.links.kernel import FRAME_BYTES, shaping
from deploy.links.replay import Replay, TracedInterface
from deploy.local.beforehand import check_replayed
from deploy.local.namespaces import End, Namespace, VethPair, addressing, joined
from deploy.local.netns import by_kernel, lay_out, namespaces, routing, traces
from deploy.local.network import LabNetwork, one_host, shares
from tests.helpers.commands import DEMO, PATIENCE_S, command, invoke, null_model, run_lab, sets
from tests.helpers.examples import slow
from tests.helpers.netns import in_namespaces, with_delays, without_delays
from tests.helpers.roles import until
from tests.simulation.outcome import model_digest

SMALL = ("topology.institutions=2", "topology.devices=4", "rounds=2", "institution.rounds=2")


# The plan


@st.composite
def experiments(draw: st.DrawFn) -> Experiment:
    institutions = draw(st.integers(1, 6))
    devices = draw(st.integers(institutions, 40))
    topology = {"institutions": institutions, "devices": devices}
    rate = st.none() | st.floats(0.05, 1e4)
    link = st.fixed_dictionaries({"up_mbit": rate, "down_mbit": rate, "delay_ms": st.floats(0, 500)})
    single = draw(st.dictionaries(st.sampled_from([f"device-{i}" for i in range(devices)]), link))
    return parse({"topology": topology, "links": {"wan": draw(link), "lan": draw(link), "of": single}})


@given(experiments())
def test_every_node_but_the_cloud_has_a_wire_and_addresses_of_its_own(experiment: Experiment) -> None:
    plan = lay_out(experiment)
    children = experiment.tree.aggregators
    homes = {device: experiment.tree.parent(device) for device in experiment.tree.devices}
    assert set(plan.wires) == {*children, *homes}
    assert set(plan.hosts) == {CLOUD, *children, *plan.groups}
    assert list(plan.groups.values()) == [tuple(experiment.tree.children[name]) for name in children]
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
        assert {*pair.hosts()} == {IPv4Address(wire.parent_address), IPv4Address(wire.child_address)}
    addresses = [a for w in plan.wires.values() for a in (w.parent_address, w.child_address, w.far_address)]
    assert len(set(addresses)) == len(addresses)
    assert all(IPv4Address(address).is_private for address in addresses)


@given(st.integers(1, 64), st.integers(1, 64))
def test_cores_are_shared_out_among_processes(cores: int, processes: int) -> None:
    mine = shares(cores, processes)
    assert len(mine) == processes and min(mine) >= 1 and max(mine) - min(mine) <= 1
    assert sum(mine) == max(cores, processes)


def test_a_device_finds_its_way_past_its_institution_to_the_one_broker() -> None:
    plan = lay_out(parse({"topology": {"institutions": 1, "devices": 1}}))
    wan, lan = plan.wires["institution-0"], plan.wires["device-0"]
    assert routing(plan) == {
        CLOUD: [f"addr add {lan.far_address}/32 dev lo", f"route add {lan.child_address}/32 via {wan.child_address}"],
        "institution-0": [f"route add {lan.far_address}/32 via {wan.parent_address}"],
        "devices@institution-0": [f"route add {lan.far_address}/32 via {lan.parent_address}"],
    }


@given(experiments(), st.booleans())
def test_links_are_left_to_the_kernel_with_or_without_their_delays(experiment: Experiment, delays: bool) -> None:
    left = by_kernel(experiment, delays=delays)
    assert left.links.enforce == "kernel"
    assert parse(left.to_json()) == left
    for child in lay_out(experiment).wires:
        before, after = experiment.link(child), left.link(child)
        assert (after.up_mbit, after.down_mbit) == (before.up_mbit, before.down_mbit)
        assert after.delay_ms == (before.delay_ms if delays else 0.0)


def test_the_kernel_and_the_network_go_together(tmp_path: Path) -> None:
    experiment = load(DEMO, SMALL)
    with pytest.raises(InvalidExperiment, match="run without --netns"):
        namespaces(experiment, tmp_path, one_broker=False).__enter__()
    with pytest.raises(InvalidExperiment, match="Use --netns"):
        one_host(by_kernel(experiment, delays=True), tmp_path).__enter__()


# What the kernel gets


@given(st.floats(0.05, 1e4), st.floats(0.0, 500.0))
def test_a_rate_is_reported_to_the_bit_with_a_small_bucket_and_a_larger_queue(mbit: float, delay_ms: float) -> None:
    first, *rest = shaping("up0", mbit=mbit, delay_ms=delay_ms)
    words = first.split()
    reported = dict(pairwise(words))
    assert words[:3] == ["qdisc", "add", "dev"]
    assert reported["dev"] == "up0"
    assert reported["rate"] == f"{round(mbit * 1e6)}bit"
    burst, limit = int(reported["burst"]), int(reported["limit"])
    assert burst >= 2 * FRAME_BYTES
    assert burst * 8 <= max(2 * FRAME_BYTES * 8, 0.02 * mbit * 1e6) * (1 + 1e-9)  # which floats may miss by a bit
    assert limit >= burst + 32 * FRAME_BYTES
    assert len(rest) == bool(delay_ms)
    for line in rest:
        assert line.startswith("qdisc add dev up0 parent 1:1 netem delay ")
        packets = int(line.rpartition(" ")[2])
        assert packets * FRAME_BYTES * 8 > mbit * 1e6 * delay_ms / 1e3  # what is under way is not dropped


def test_an_unlimited_link_is_delayed_alone() -> None:
    assert shaping("up0", mbit=None, delay_ms=0.0) == []
    (line,) = shaping("up0", mbit=None, delay_ms=20.0)
    assert line.startswith("qdisc add dev up0 root netem delay 20ms limit ")


def test_an_end_of_a_link_is_set_up_and_slow_ends_get_single_frames() -> None:
    plain = ["addr add 10.0.0.1/31 dev up0", "link set dev up0 alias device-0", "link set dev up0 up"]
    single = "link set dev up0 gso_max_segs 1"
    for mbit, expected in ((None, plain), (1000.0, plain), (100.0, [*plain[:2], single, plain[2]])):
        assert addressing(End("up0", "10.0.0.1", "device-0", mbit, 0.0)) == expected


SEVERAL = "device --name a --name b --name c --parent i --broker one --broker two"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (f"run {DEMO} --one-broker", "--netns"),
        (f"run {DEMO} --no-delay", "--netns"),
        (SEVERAL, "2 values given for 3 names"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(words: str, problem: str) -> None:
    done = invoke(*words.split())
    assert done.exit_code == 2 and problem in done.stderr


# What the kernel does


def qdiscs(space: Namespace) -> dict[str, dict[str, Any]]:
    """Return the shapers of a namespace by interface, as tc reports them; rates in bytes per second."""
    with space.entered():
        reported = subprocess.run(["tc", "-json", "qdisc", "show"], capture_output=True, check=True).stdout
    return {each["dev"]: each["options"] for each in json.loads(reported) if each["kind"] == "tbf"}


@in_namespaces
def test_both_ends_keep_the_rates_that_were_wanted() -> None:
    wires = (VethPair(0, "slow", "above", "below", up_mbit=1.0, down_mbit=10.0), VethPair(1, "free", "above", "below"))
    with joined(("above", "below"), wires) as spaces:
        above, below = qdiscs(spaces["above"]), qdiscs(spaces["below"])
    assert {name: options["rate"] for name, options in above.items()} == {"down0": 1_250_000}
    assert {name: options["rate"] for name, options in below.items()} == {"up0": 125_000}


FAR = VethPair(0, "far", "above", "below", up_mbit=1.0, delay_ms=40.0)


TRACE = {"seconds": [0, 0.2, 1.4], "up_mbit": [4, 0, 8], "down_mbit": [8, 8, 8], "delay_ms": [10, 20, 10]}


def test_both_ends_of_a_link_replay_its_trace() -> None:
    experiment = parse({"topology": {"institutions": 1, "devices": 1}, "links": {"wan": {"trace": TRACE}}})
    left = by_kernel(experiment, delays=False)
    plan = lay_out(left)
    wire, free = plan.wires["institution-0"], plan.wires["device-0"]
    assert (free.up_mbit, free.down_mbit, wire.delay_ms) == (None, None, 0.0)
    assert wire.up_mbit == pytest.approx(4 * 0.2 / 1.4) and wire.down_mbit == pytest.approx(8)  # before the run: means
    up, down = traces(left, plan)
    assert (up.host, up.interface, up.peer) == ("institution-0", "up0", wire.parent_address)
    assert (down.host, down.interface, down.peer) == (CLOUD, "down0", wire.child_address)
    rates = [dict(pairwise(up.line(t).split()))["rate"] for t in (0.0, 0.5, 2.0)]
    assert rates == ["4000000bit", "8bit", "8000000bit"]


def test_a_cloud_of_real_hosts_refuses_traces_that_the_kernel_would_have_to_replay() -> None:
    experiment = parse({"links": {"enforce": "kernel", "wan": {"trace": TRACE}}})
    with pytest.raises(InvalidExperiment, match=r"links.enforce = 'kernel': institution-0's link has a trace"):
        check_replayed(experiment)
    check_replayed(parse({"links": {"wan": {"trace": TRACE}}}))


@in_namespaces
@pytest.mark.slow
def test_the_kernel_keeps_an_outage_and_what_waited_leaves_after_it() -> None:
    wire = VethPair(0, "far", "above", "below", up_mbit=4.0)
    trace = RateTrace((0.0, 0.2, 1.4), (5e5, 0.0, 1e6), (0.0,) * 3)
    size, arrived = 300_000, 0
    with joined(("above", "below"), (wire,)) as spaces:

        def change(host: str, traced: Sequence[TracedInterface], t: float) -> None:
            spaces[host].batch("tc", [each.line(t) for each in traced])
            with spaces[host].entered():
                for each in traced:
                    each.wake()

        with spaces["above"].entered():
            listener = socket.create_server((wire.parent_address, 0))
        with spaces["below"].entered():
            sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
        replay = Replay([TracedInterface("below", "up0", wire.parent_address, trace)], change)
        with listener, sender, receiver, replay.running():
            replay.begin(0.0)
            started = time.monotonic()
            sending = threading.Thread(target=sender.sendall, args=(bytes(size),))
            sending.start()
            while arrived < size:
                arrived += len(receiver.recv(1 << 16))
            sending.join()
            took = time.monotonic() - started
    assert 1.4 < took < 10, took  # 100 kB before the outage; TCP sends again a while after it


@in_namespaces
@with_delays
def test_a_delay_is_kept_both_ways() -> None:
    with joined(("above", "below"), (FAR,)) as spaces, spaces["below"].entered():
        started = time.monotonic()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((FAR.parent_address, 9))
        assert time.monotonic() - started >= 0.08


@in_namespaces
@without_delays
def test_a_delay_that_the_kernel_cannot_keep_is_refused() -> None:
    lab = joined(("above", "below"), (FAR,))
    with pytest.raises(InvalidExperiment, match=r"delay_ms of far = 40\.0.* no netem .*modprobe"):
        lab.__enter__()


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


@pytest.fixture(params=[False, True], ids=["site brokers", "one broker"])
def network(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[LabNetwork, bool]]:
    with namespaces(by_kernel(load(DEMO, SMALL), delays=False), tmp_path, one_broker=request.param) as opened:
        yield opened, request.param


@in_namespaces
def test_each_device_reaches_its_broker_by_its_own_wire(network: tuple[LabNetwork, bool]) -> None:
    opened, one_broker = network
    plan = lay_out(load(DEMO, SMALL))

    def reach(process: str, broker: str) -> str:
        host, _, port = broker.partition(":")
        with opened.inside(process), socket.create_connection((host, int(port)), timeout=10) as connection:
            source: str = connection.getsockname()[0]
        return source

    assert reach(CLOUD, opened.upward[CLOUD]) == "127.0.0.1"
    for institution in ("institution-0", "institution-1"):
        assert reach(institution, opened.upward[institution]) == plan.wires[institution].child_address
        near = plan.wires[institution].child_address if one_broker else "127.0.0.1"
        assert reach(institution, opened.downward[institution]) == near
    for group, devices in opened.groups.items():
        for device in devices:
            assert reach(group, opened.upward[device]) == plan.wires[device].child_address
    assert (len({broker.partition(":")[2] for broker in opened.upward.values()}) == 1) == one_broker


@pytest.mark.slow
@in_namespaces
@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_lab_in_namespaces_ends_with_the_same_model(tmp_path: Path) -> None:
    pairs = ("topology.institutions=1", "topology.devices=2", "rounds=2", "institution.rounds=2")
    folder = run_lab(DEMO, tmp_path, *pairs, flags=["--netns", "--no-delay"], null=True)
    assert model_digest(folder.parent) == null_model(load(DEMO, pairs))
    assert load(folder / "experiment.toml") == by_kernel(load(DEMO, pairs), delays=False)


@in_namespaces
@pytest.mark.parametrize("number", slow([signal.SIGKILL, signal.SIGTERM], but=[signal.SIGKILL]), ids=str)
def test_a_lab_that_is_killed_leaves_no_process_no_namespace_and_no_interface(
    number: signal.Signals, tmp_path: Path
) -> None:
    with ExitStack() as stack, (tmp_path / "lab.log").open("wb") as log:
        small = sets("topology.institutions=2", "topology.devices=2")
        words = command("run", DEMO, "--runs", tmp_path, "--netns", "--no-delay", *small, null=True)
        lab = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=log)
        stack.callback(lab.wait)
        stack.callback(lab.kill)
        processes: list[psutil.Process] = []
        spaces: dict[str, int] = {}

        def all_there() -> bool:
            assert lab.poll() is None, (tmp_path / "lab.log").read_text()
            spaces.clear()
            with suppress(psutil.NoSuchProcess, FileNotFoundError):
                processes[:] = psutil.Process(lab.pid).children(recursive=True)
                spaces.update({os.readlink(f"/proc/{process.pid}/ns/net"): process.pid for process in processes})
            spaces.pop(os.readlink("/proc/self/ns/net"), None)
            return len(spaces) == 1 + 2 + 2

        until(all_there, "the cloud's, two institutions' and two groups of devices' namespaces")
        watch = stack.enter_context(Namespace())
        # The other end of each of these goes with the namespace that it was put into.
        watch.batch("ip", [f"link add w{i} type veth peer name w netns {pid}" for i, pid in enumerate(spaces.values())])
        lab.send_signal(number)
        assert lab.wait(PATIENCE_S) == (-signal.SIGKILL if number == signal.SIGKILL else 130)
        until(lambda: not any(process.is_running() for process in processes), "all processes gone")
        with watch.entered():
            until(lambda: [name for _, name in socket.if_nameindex()] == ["lo"], "all namespaces gone")


@in_namespaces
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv (util-linux) takes away a right")
@pytest.mark.parametrize("right", ["sys_admin", pytest.param("net_admin", marks=pytest.mark.slow)])
def test_a_user_without_the_right_learns_what_to_do(right: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["setpriv", f"--bounding-set=-{right}", *command("run", DEMO, "--netns", "--runs", tmp_path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 4
    assert "--netns" in done.stderr
    assert "as root" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is refused before")
def test_a_machine_without_iproute2_learns_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(InvalidExperiment, match="apt install iproute2"):
        Namespace()
