"""Links of real hosts: the commands, an interface shaped and restored by the kernel, and measurements."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from typing import Any

import pytest

from common.errors import ConnectionFailed, InvalidExperiment, NoProgress, WireError
from common.experiment.links import LinkSettings, Profile
from deploy.links import interface, measurement
from deploy.links.interface import Interface, apply, blocks, clear, filters, shapers
from deploy.links.kernel import addresses_of, interface_to, query
from deploy.links.measurement import (
    MAGIC,
    PINGS,
    RATE,
    REQUEST,
    MeasuredLink,
    Mode,
    compare,
    link_of,
    listen,
    measure,
    serve,
    time_noise,
)
from deploy.local.namespaces import Namespace, VethPair, joined
from tests.helpers.commands import command, invoke
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
    assert blocks(ETH, Profile(down_mbit=1.0)) == ["link add fs-down-2 type ifb", "link set dev fs-down-2 up"]
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
    assert link_of("lte", **none) == LinkSettings(profile="lte", up_mbit=6.0, down_mbit=13.0, delay_ms=35.0)
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
        (("measure",), 2, "--to"),
        (("measure", "--to", "a", "--listen", "b"), 2, "--to"),
        (("measure", "--to", "a:b"), 4, "host:port"),
        (("measure", "--listen", "127.0.0.1:0"), 4, "host:port"),
        (("measure", "lan-2g", "--to", "127.0.0.1"), 4, "lan-1g"),
    ],
)
def test_wrong_usage_is_one_line_with_the_remedy(arguments: tuple[str, ...], code: int, message: str) -> None:
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
    return [{key: each[key] for key in each if key not in carrier} for each in listed], query("tc", "qdisc", "show")


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
def test_clear_leaves_the_other_interfaces_and_what_remains_of_lost_ones_goes(spaces: Spaces) -> None:
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
@pytest.mark.parametrize(("kind", "place"), [("htb", "root"), ("ingress", "ingress"), ("clsact", "clsact")])
def test_an_interface_that_something_else_shapes_is_refused(spaces: Spaces, kind: str, place: str) -> None:
    line = f"qdisc add dev up0 root {kind}" if place == "root" else f"qdisc add dev up0 {kind}"
    spaces["pi"].batch("tc", [line])
    with spaces["pi"].entered():
        before = state()
        with pytest.raises(InvalidExperiment, match=f"qdisc {kind} .* tc qdisc del dev up0 {place}"):
            apply("up0", SLOW)
        assert state() == before


@in_namespaces
def test_a_command_that_fails_leaves_nothing(spaces: Spaces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "filters", lambda *_: ["qdisc add dev up0 clsact", "filter add dev up0 nowhere"])
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
            "device": "up0", "up_mbit": 2.0, "down_mbit": 13.0, "delay_ms": 0.0, "to": WIRE.parent_address
        }  # fmt: skip
        other = invoke("links", "apply", "lte", *words, "--device", "eth9")
        assert other.exit_code == 4
        assert "reached by up0, not by eth9" in other.stderr
        assert invoke("links", "clear").stdout == "up0\n"
        assert invoke("links", "clear").stdout == ""


@in_namespaces
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv (util-linux) takes away a right")
def test_a_user_without_the_right_learns_what_to_do(spaces: Spaces) -> None:
    words = command("links", "apply", "--up", "1", "--device", "up0")
    with spaces["pi"].entered():
        done = subprocess.run(
            ["setpriv", "--bounding-set=-net_admin", *words], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 4
    assert "Run as root" in done.stderr and "Traceback" not in done.stderr


# Measurements


@contextmanager
def serving(listening: socket.socket) -> Iterator[int]:
    """Serve measurements in a thread and yield the port."""

    def work() -> None:
        with pytest.raises(OSError, match="Invalid argument"):
            serve(listening)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        listening.close()


@contextmanager
def pretending(*behaviours: Callable[[socket.socket], None]) -> Iterator[int]:
    """Serve one connection with each of these behaviours and yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def work() -> None:
            for behave in behaviours:
                with listening.accept()[0] as connection:
                    connection.recv(len(MAGIC) + REQUEST.size, socket.MSG_WAITALL)
                    behave(connection)

        thread = threading.Thread(target=work)
        thread.start()
        yield listening.getsockname()[1]
        thread.join()


def pings(connection: socket.socket) -> None:
    connection.sendall(MAGIC)
    for _ in range(PINGS):
        connection.sendall(connection.recv(1))


def sending(data: bytes) -> Callable[[socket.socket], None]:
    """Return the behaviour that sends these bytes."""
    return lambda connection: connection.sendall(data)


def ask(port: int, data: bytes) -> bytes:
    """Send bytes to a listener and return what it sends until it closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        received = b""
        while part := sock.recv(1 << 16):
            received += part
        return received


@pytest.mark.parametrize(
    "garbage",
    [
        b"", b"GET / HTTP/1.1\r\n\r\n", MAGIC, MAGIC + REQUEST.pack(b"x", 3), MAGIC + REQUEST.pack(b"p", 0),
        MAGIC + REQUEST.pack(b"u", 255),
    ],
)  # fmt: skip
def test_garbage_gets_no_answer_and_the_next_measurement_is_served(garbage: bytes) -> None:
    with serving(listen("127.0.0.1", 0)) as port:
        try:
            assert ask(port, garbage) == b""
        except ConnectionResetError:  # closed with unread garbage
            pass
        assert ask(port, MAGIC + REQUEST.pack(Mode.PING.value, 1) + b"abc") == MAGIC + b"abc"


def test_a_silent_client_loses_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "PATIENCE_S", 0.05)
    with serving(listen("127.0.0.1", 0)) as port, ExitStack() as stack:
        silent = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        assert silent.recv(1) == b""


def test_noise_that_ends_early_gives_no_rate() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sender = socket.create_connection(listening.getsockname())
        receiver, _ = listening.accept()
        with sender, receiver:
            sender.sendall(bytes(10))
            sender.close()
            with pytest.raises(WireError, match="10 bytes arrived: too few"):
                time_noise(receiver, 1.0)


def test_a_peer_that_is_no_listener_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def expect(error: type[Exception], message: str, *behaviours: Callable[[socket.socket], None]) -> None:
        with pretending(*behaviours) as port, pytest.raises(error, match=message):
            measure("127.0.0.1", port, seconds=1)

    expect(ConnectionFailed, "no listener of this release", sending(b"HTTP/1.1 400 Bad request\r\n"))
    for rate in (float("nan"), -1.0):
        expect(ConnectionFailed, "impossible rate", pings, sending(MAGIC + RATE.pack(rate)))
    monkeypatch.setattr(measurement, "PATIENCE_S", 0.05)
    expect(NoProgress, "another measurement", assert_closed)


def assert_closed(peer: socket.socket) -> None:
    try:
        assert peer.recv(1) == b""
    except ConnectionResetError:
        pass


def test_nobody_there_is_a_failed_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    done = invoke("links", "measure", "--to", f"127.0.0.1:{port}")
    assert done.exit_code == 3
    assert "measure --listen" in done.stderr


def test_an_address_in_use_is_refused() -> None:
    with listen("127.0.0.1", 0) as listening:
        done = invoke("links", "measure", "--listen", f"127.0.0.1:{listening.getsockname()[1]}")
    assert done.exit_code == 4
    assert "--listen" in done.stderr


def test_rates_differ_by_a_share_and_round_trips_by_a_millisecond_too() -> None:
    def agree(link: Profile, *, up: float = 10.0, rtt_ms: float = 5.0) -> list[bool]:
        return [one.agrees for one in compare(MeasuredLink(up, 20.0, rtt_ms), link, 0.1)]

    assert agree(Profile()) == [True, True, True]
    assert agree(Profile(up_mbit=10.9, down_mbit=20.0, delay_ms=2.5)) == [True, True, True]
    assert agree(Profile(up_mbit=11.5, down_mbit=23.0)) == [False, False, True]
    assert agree(Profile(delay_ms=0.1), rtt_ms=1.1) == [True, True, True]
    assert agree(Profile(delay_ms=0.1), rtt_ms=1.3) == [True, True, False]
    assert agree(Profile(delay_ms=50.0), rtt_ms=5.0) == [True, True, False]
    (up, *_) = compare(MeasuredLink(9.0, 1.0, 1.0), Profile(up_mbit=10.0), 0.1)
    assert up.difference == pytest.approx(-10.0)


@pytest.mark.slow
@in_namespaces
@pytest.mark.parametrize(("up", "down"), [(1, 1), (20, 20), (100, 100), (5, 50)])
def test_a_shaped_link_is_measured_within_the_tolerance(spaces: Spaces, up: int, down: int) -> None:
    with spaces["server"].entered():
        listening = listen("0.0.0.0", 0)
    with serving(listening) as port, spaces["pi"].entered():
        link = ("--up", str(up), "--down", str(down))
        assert invoke("links", "apply", *link, "--to", WIRE.parent_address).exit_code == 0
        done = invoke("links", "measure", *link, "--to", f"{WIRE.parent_address}:{port}", "--format", "json")
        assert done.exit_code == 0, done.stderr
        measured = {row["name"]: row["measured"] for row in map(json.loads, done.stdout.splitlines())}
        assert measured["up_mbit"] == pytest.approx(up, rel=0.1)
        assert measured["down_mbit"] == pytest.approx(down, rel=0.1)
        off = invoke("links", "measure", "--up", str(2 * up), "--to", f"{WIRE.parent_address}:{port}", "--seconds", "1")
        assert off.exit_code == 1
        assert "up_mbit" in off.stderr


@pytest.mark.slow
@in_namespaces
def test_traffic_with_other_hosts_keeps_its_speed(spaces: Spaces) -> None:
    spaces["server"].batch("ip", ["addr add 10.9.0.1/31 dev down0"])
    spaces["pi"].batch("ip", ["addr add 10.9.0.0/31 dev up0"])
    with spaces["server"].entered():
        listening = listen("0.0.0.0", 0)
    with serving(listening) as port, spaces["pi"].entered():
        apply("up0", Profile(up_mbit=1.0, down_mbit=1.0), addresses_of(WIRE.parent_address))
        free = measure("10.9.0.1", port, seconds=1)
        assert min(free.up_mbit, free.down_mbit) > 10.0
        assert measure(WIRE.parent_address, port, seconds=3).up_mbit == pytest.approx(1.0, rel=0.1)
