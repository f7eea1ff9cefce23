"""Links of real hosts: the commands, and an interface shaped and restored by the kernel."""

from __future__ import annotations

import json
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any

import pytest

from fedstrata.common.accounting.tcp import tcp_info
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.settings.links import LinkSettings, Profile
from fedstrata.deploy.links import interface
from fedstrata.deploy.links.interface import (
    Interface,
    apply,
    blocks,
    clear,
    filters,
    link_of,
    shapers,
)
from fedstrata.deploy.links.kernel import addresses_of, interface_to, query
from tests.helpers.commands import command, invoke
from tests.helpers.namespaces import Namespace, VethPair, joined
from tests.helpers.netns import in_namespaces, with_delays, without_delays

ETH = Interface("eth0", 2, 1514, 65535)
SLOW, FAST = Profile(up_mbit=1.0, down_mbit=20.0), Profile(up_mbit=1000.0, down_mbit=1000.0)
WIRE = VethPair(0, "pi", "server", "pi")

Spaces = Mapping[str, Namespace]


# The commands


def test_each_direction_has_a_block_of_its_own_and_slow_senders_single_frames() -> None:
    assert blocks(ETH, SLOW) == [
        "link add fs-up-2 type ifb",
        "link set dev fs-up-2 up",
        "link add fs-down-2 type ifb",
        "link set dev fs-down-2 up",
        "link set dev fs-up-2 alias gso_max_segs=65535",
        "link set dev eth0 gso_max_segs 1",
    ]
    assert blocks(ETH, Profile(down_mbit=1.0)) == [
        "link add fs-down-2 type ifb",
        "link set dev fs-down-2 up",
    ]
    assert not any("gso" in line for line in blocks(ETH, FAST))


def test_blocks_are_shaped_by_rate_and_delay_and_hold_two_of_the_largest_frames() -> None:
    up, down = shapers(ETH, SLOW)
    assert up == "qdisc add dev fs-up-2 root handle 1: tbf rate 1000000bit burst 3028 limit 51476"
    assert down.startswith("qdisc add dev fs-down-2 root handle 1: tbf rate 20000000bit ")
    jumbo, _ = shapers(Interface("eth0", 2, 9014, 65535), SLOW)
    assert " burst 18028 " in jumbo
    rate, delay, only_delay = shapers(ETH, Profile(up_mbit=1.0, delay_ms=20.0))
    assert "tbf" in rate and "parent 1:1 netem delay 20ms" in delay
    assert only_delay.startswith("qdisc add dev fs-down-2 root netem delay 20ms")


def test_all_traffic_is_redirected_or_that_with_the_peers() -> None:
    up = "action mirred egress redirect dev fs-up-2"
    down = "action mirred egress redirect dev fs-down-2"
    assert filters(ETH, SLOW, ()) == [
        "qdisc add dev eth0 clsact",
        f"filter add dev eth0 egress protocol all prio 1 u32 match u32 0 0 {up}",
        f"filter add dev eth0 ingress protocol all prio 1 u32 match u32 0 0 {down}",
    ]
    assert filters(ETH, SLOW, [ip_address("10.0.0.9"), ip_address("fd00::9")]) == [
        "qdisc add dev eth0 clsact",
        f"filter add dev eth0 egress protocol ip prio 1 u32 match ip dst 10.0.0.9/32 {up}",
        f"filter add dev eth0 egress protocol ipv6 prio 2 u32 match ip6 dst fd00::9/128 {up}",
        f"filter add dev eth0 ingress protocol ip prio 1 u32 match ip src 10.0.0.9/32 {down}",
        f"filter add dev eth0 ingress protocol ipv6 prio 2 u32 match ip6 src fd00::9/128 {down}",
    ]
    assert len(filters(ETH, Profile(up_mbit=1.0), ())) == 2


def test_numbers_of_a_command_go_before_those_of_its_profile() -> None:
    none = {"up_mbit": None, "down_mbit": None, "delay_ms": None}
    assert link_of("lte", **none) == LinkSettings(
        profile="lte", up_mbit=6.0, down_mbit=13.0, delay_ms=35.0
    )
    changed = link_of("lte", **none | {"down_mbit": 2.0, "delay_ms": 0.0})
    assert (changed.up_mbit, changed.down_mbit, changed.delay_ms) == (6.0, 2.0, 0.0)
    with pytest.raises(InvalidExperiment, match=r"'ltee': no profile .* Did you mean 'lte'"):
        link_of("ltee", **none)
    with pytest.raises(InvalidExperiment, match="up_mbit = nan"):
        link_of(None, **none | {"up_mbit": float("nan")})


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("apply", "lte"), 2, "--to"),
        (("apply", "--device", "eth0", "--up", "0"), 2, "--up"),
        (("apply", "lte", "--to", "a" * 64), 4, "no address is known"),
    ],
)
def test_wrong_usage_is_one_line_with_the_remedy(
    arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = invoke("links", *arguments)
    assert done.exit_code == code
    assert message in done.stderr


def test_a_machine_without_iproute2_learns_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    done = invoke("links", "apply", "lte", "--device", "eth0")
    assert done.exit_code == 4
    assert "apt install iproute2" in done.stderr


# What the kernel does


@pytest.fixture
def spaces() -> Iterator[Spaces]:
    with joined(("server", "pi"), (WIRE,)) as opened:
        yield opened


def state() -> tuple[Any, Any]:
    """Return the interfaces and the qdiscs of this thread's namespace."""
    listed = query("ip", "-details", "link", "show")
    carrier = ("flags", "operstate")  # which a new veth pair gets a moment later
    return [{key: each[key] for key in each if key not in carrier} for each in listed], query(
        "tc", "qdisc", "show"
    )


def rates() -> dict[str, int]:
    """Return the rates of the shapers of this thread's namespace, bytes per second."""
    return {each["dev"]: each["options"]["rate"] for each in state()[1] if each["kind"] == "tbf"}


def segments() -> int:
    """Return gso_max_segs of the interface at the child's end."""
    (shown,) = query("ip", "-details", "link", "show", "dev", "up0")
    return int(shown["gso_max_segs"])


@in_namespaces
def test_a_second_apply_replaces_the_first_and_clear_restores_all(spaces: Spaces) -> None:
    with spaces["pi"].entered():
        before = state()
        apply("up0", SLOW)
        index = socket.if_nametoindex("up0")
        assert rates() == {f"fs-up-{index}": 125_000, f"fs-down-{index}": 2_500_000}
        assert segments() == 1
        slow = query("tc", "filter", "show", "dev", "up0", "egress")
        apply("up0", SLOW)
        assert len(query("tc", "filter", "show", "dev", "up0", "egress")) == len(slow)
        apply("up0", FAST, [ip_address(WIRE.parent_address), ip_address("fd00::1")])
        assert rates() == {f"fs-up-{index}": 125_000_000, f"fs-down-{index}": 125_000_000}
        assert segments() == 65535
        assert clear() == ["up0"]
        assert state() == before
        assert clear() == clear("up0") == []


@in_namespaces
def test_clear_leaves_the_other_interfaces_and_what_remains_of_lost_ones_goes(
    spaces: Spaces,
) -> None:
    with spaces["server"].entered():
        before = state()
        spaces["server"].batch("ip", ["link add spare type ifb", "link set dev spare up"])
        apply("down0", SLOW)
        apply("spare", SLOW)
        assert clear("down0") == ["down0"]
        assert len(rates()) == 2
        spaces["server"].batch("ip", ["link del dev spare"])
        assert clear() == []
        assert state() == before


@in_namespaces
@pytest.mark.parametrize(
    ("kind", "place"), [("htb", "root"), ("ingress", "ingress"), ("clsact", "clsact")]
)
def test_an_interface_that_something_else_shapes_is_refused(
    spaces: Spaces, kind: str, place: str
) -> None:
    line = f"qdisc add dev up0 root {kind}" if place == "root" else f"qdisc add dev up0 {kind}"
    spaces["pi"].batch("tc", [line])
    with spaces["pi"].entered():
        before = state()
        with pytest.raises(
            InvalidExperiment, match=f"qdisc {kind} .* tc qdisc del dev up0 {place}"
        ):
            apply("up0", SLOW)
        assert state() == before


@in_namespaces
def test_a_command_that_fails_leaves_nothing(
    spaces: Spaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        interface, "filters", lambda *_: ["qdisc add dev up0 clsact", "filter add dev up0 nowhere"]
    )
    with spaces["pi"].entered():
        before = state()
        with pytest.raises(InvalidExperiment, match=r"tc: .* modprobe"):
            apply("up0", SLOW)
        assert state() == before


@in_namespaces
@without_delays
def test_a_delay_that_the_kernel_cannot_emulate_is_refused(spaces: Spaces) -> None:
    with spaces["pi"].entered():
        before = state()
        done = invoke("links", "apply", "lte", "--device", "up0")
        assert done.exit_code == 4
        assert "delay_ms = 35.0" in done.stderr and "modprobe sch_netem" in done.stderr
        assert state() == before


@in_namespaces
@with_delays
def test_a_delay_is_set_in_both_directions(spaces: Spaces) -> None:
    with spaces["pi"].entered():
        apply("up0", link_of("lte", up_mbit=None, down_mbit=None, delay_ms=None))
        assert len([each for each in state()[1] if each["kind"] == "netem"]) == 2


@in_namespaces
def test_the_interface_is_the_one_that_leads_to_the_host(spaces: Spaces) -> None:
    with spaces["pi"].entered():
        far, near = addresses_of(WIRE.parent_address), addresses_of(WIRE.child_address)
        assert interface_to("server", [ip_address("fd00::1"), *far]) == "up0"
        with pytest.raises(InvalidExperiment, match="this host itself"):
            interface_to("pi", near)
        with pytest.raises(InvalidExperiment, match="no route"):
            interface_to("elsewhere", addresses_of("192.0.2.1"))
        for name in ("lo", "eth9"):
            with pytest.raises(InvalidExperiment, match="There are: up0"):
                apply(name, SLOW)
        with pytest.raises(InvalidExperiment, match="no rate and no delay"):
            apply("up0", Profile())


@in_namespaces
def test_the_commands_report_what_is_set(spaces: Spaces) -> None:
    with spaces["pi"].entered():
        words = ("--up", "2", "--delay", "0", "--to", WIRE.parent_address)
        done = invoke("links", "apply", "lte", *words, "--format", "json")
        assert json.loads(done.stdout) == {
            "device": "up0",
            "up_mbit": 2.0,
            "down_mbit": 13.0,
            "delay_ms": 0.0,
            "to": WIRE.parent_address,
        }
        other = invoke("links", "apply", "lte", *words, "--device", "eth9")
        assert other.exit_code == 4
        assert "reached by up0, not by eth9" in other.stderr
        assert invoke("links", "clear").stdout == "up0\n"
        assert invoke("links", "clear").stdout == ""


@in_namespaces
@pytest.mark.skipif(
    shutil.which("setpriv") is None, reason="setpriv (util-linux) takes away a right"
)
def test_a_user_without_the_right_learns_what_to_do(spaces: Spaces) -> None:
    words = command("links", "apply", "--up", "1", "--device", "up0")
    with spaces["pi"].entered():
        done = subprocess.run(
            ["setpriv", "--bounding-set=-net_admin", *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 4
    assert "Run as root" in done.stderr and "Traceback" not in done.stderr


# Measured


SECONDS = 3.0
FRAME_BYTES = 1514


@contextmanager
def listening(space: Namespace) -> Iterator[socket.socket]:
    with space.entered():
        found = socket.create_server(("0.0.0.0", 0))
    with found:
        yield found


def rate(listening: socket.socket, host: str) -> float:
    """Return the rate from this thread's namespace to the listener, Mbit/s of frames in the last
    two thirds.

    Segments are counted as the kernel has received them: after a loss it holds back what has
    arrived.
    """
    with (
        socket.create_connection((host, listening.getsockname()[1])) as sender,
        listening.accept()[0] as receiver,
    ):
        # without a byte acknowledged there are no statistics of an accepted connection
        receiver.send(b".")
        sender.setblocking(False)
        begun = time.monotonic()
        marks: list[tuple[float, int]] = []
        while not marks or marks[-1][0] - begun < SECONDS:
            readable, writable, _ = select.select((receiver,), (sender,), ())
            if writable:
                sender.send(bytes(65536))
            if readable and receiver.recv(65536) and time.monotonic() - begun > SECONDS / 3:
                found = tcp_info(receiver)
                assert found is not None
                marks.append((time.monotonic(), found.received_segments))
        (since, first), (until, last) = marks[0], marks[-1]
        return (last - first) * FRAME_BYTES * 8e-6 / (until - since)


@pytest.mark.slow
@in_namespaces
@pytest.mark.parametrize(("up", "down"), [(1, 1), (20, 20), (100, 100), (5, 50)])
def test_a_shaped_link_has_its_rates(spaces: Spaces, up: int, down: int) -> None:
    with spaces["pi"].entered():
        link = ("--up", str(up), "--down", str(down))
        assert invoke("links", "apply", *link, "--to", WIRE.parent_address).exit_code == 0
    with listening(spaces["server"]) as server, spaces["pi"].entered():
        assert rate(server, WIRE.parent_address) == pytest.approx(up, rel=0.1)
    with listening(spaces["pi"]) as pi, spaces["server"].entered():
        assert rate(pi, WIRE.child_address) == pytest.approx(down, rel=0.1)


@pytest.mark.slow
@in_namespaces
def test_traffic_with_other_hosts_keeps_its_speed(spaces: Spaces) -> None:
    spaces["server"].batch("ip", ["addr add 10.9.0.1/31 dev down0"])
    spaces["pi"].batch("ip", ["addr add 10.9.0.0/31 dev up0"])
    with listening(spaces["server"]) as server, spaces["pi"].entered():
        apply("up0", Profile(up_mbit=1.0, down_mbit=1.0), addresses_of(WIRE.parent_address))
        assert rate(server, "10.9.0.1") > 10.0
        assert rate(server, WIRE.parent_address) == pytest.approx(1.0, rel=0.1)
