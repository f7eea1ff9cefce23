"""Brokers with several addresses, and with IPv6 addresses."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from fedstrata.common.errors import ConnectionFailed, InvalidExperiment
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.host.processes import free_port
from fedstrata.common.net.address import BrokerAddress, parse_hosts
from fedstrata.common.net.attempts import Attempts
from fedstrata.common.net.connection import BrokerConnection, Handlers
from fedstrata.common.protocol.outbox import Publish
from fedstrata.common.runtime.endpoint import PACKET_ROOM
from fedstrata.common.settings.links import LinkSettings
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.brokers.broker import BrokerProcess
from fedstrata.deploy.console.login import Login
from tests.helpers.commands import invoke
from tests.helpers.nodes import (
    FINE,
    assert_models,
    child_of,
    drawn,
    layout_of,
    living,
    parent_of,
    play,
    serving,
    together,
)
from tests.helpers.sites import BROKER, RealSite, SimulatedSite, real, until, virtual

# How they are written


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("localhost", (("localhost", 1883),)),
        ("10.0.0.1:1884", (("10.0.0.1", 1884),)),
        (
            "nats-0:1883,nats_1.lab.:1884,[fe80::1]:1883",
            (("nats-0", 1883), ("nats_1.lab.", 1884), ("fe80::1", 1883)),
        ),
        ("[::1],[fe80::1%eth0]:65535", (("::1", 1883), ("fe80::1%eth0", 65_535))),
    ],
)
def test_a_list_of_addresses_is_read_and_printed(
    text: str, found: tuple[tuple[str, int], ...]
) -> None:
    assert parse_hosts(text) == found
    address = BrokerAddress(*found[0], "user", "secret", found[1:])
    assert parse_hosts(str(address)) == address.hosts == found
    assert [(one.hosts, one.username, one.password) for one in address.each] == [
        ((one,), "user", "secret") for one in found
    ]
    assert str(BrokerAddress("::1", 1, others=(("a", 2),))) == "[::1]:1,a:2"


@pytest.mark.parametrize(
    "text",
    [
        "", ",", "a,", "a,,b", ":1883", "a:", "a:x", "a, b", "a:0", "a:65536", "a b", "a;b",
        "mqtt://a", "a/b", "a..b",
        f"{'a' * 64}.lab", "::1", "fe80::1:1883", "[::1", "[]:1883", "[a]:1883", "[1.2.3.4]",
        "[::1]1883", "[::g]",
        "a:1883,b,a", "[::1],[::1]:1883",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_with_value_and_remedy(text: str) -> None:
    with pytest.raises(InvalidExperiment) as refused:
        Login().address(text, node="device-0", option="--child-broker")
    assert str(refused.value).startswith(f"--child-broker = {text!r}: ")
    assert "[IPv6 address]:port" in str(refused.value)


def test_a_command_ends_with_4_if_its_broker_is_no_address() -> None:
    done = invoke("lab", "status", "--broker", "nats-0,::1")
    (line,) = done.stderr.splitlines()
    assert (
        done.exit_code == 4 and "--broker = 'nats-0,::1': '::1' is not an address. Write " in line
    )


# In which order they are tried

THREE = BrokerAddress("a", others=(("b", 1883), ("c", 1883)))


def attempts_at(address: BrokerAddress, *, give_up: float) -> Attempts:
    attempts = Attempts(address, draw=lambda _, most: most)
    attempts.begin(0.0, timeout_s=give_up)
    return attempts


def fail(attempts: Attempts, *, lasted: bool = False, now: float = 0.0) -> tuple[str, float]:
    """Let the present address fail; return the next one, and the pause before it."""
    pause = attempts.failed(f"no {attempts.address.host}", lasted=lasted, now=now)
    return attempts.address.host, pause


def test_pauses_grow_with_whole_turns_and_begin_anew_after_a_connection_that_lasted() -> None:
    attempts = attempts_at(THREE, give_up=100.0)
    assert [fail(attempts) for _ in range(7)] == [
        ("b", 0.0), ("c", 0.0), ("a", 0.1), ("b", 0.0), ("c", 0.0), ("a", 0.2), ("b", 0.0),
    ]  # fmt: skip
    assert fail(attempts, lasted=True) == ("c", 0.0)
    assert [fail(attempts) for _ in range(4)] == [("a", 0.1), ("b", 0.0), ("c", 0.0), ("a", 0.2)]


def test_addresses_that_work_and_fail_at_once_are_not_flooded() -> None:
    attempts = attempts_at(THREE, give_up=100.0)
    assert sum(fail(attempts, lasted=True)[1] for _ in range(300)) >= 100 * 0.1 - 1e-9


def test_the_attempts_end_with_a_whole_turn_after_the_time_limit_unless_one_has_worked() -> None:
    attempts = attempts_at(THREE, give_up=1.0)
    assert [fail(attempts, now=now)[1] for now in (0.0, 0.5, 0.95)] == [
        0.0,
        0.0,
        pytest.approx(0.05),
    ]
    assert [fail(attempts, now=now)[1] for now in (1.0, 1.0)] == [0.0, 0.0]
    with pytest.raises(
        ConnectionFailed, match=r"^broker a:1883: no a; b:1883: no b; c:1883: no c\. Is it running"
    ):
        fail(attempts, now=1.0)
    attempts.begin(0.0, timeout_s=1.0)
    fail(attempts, lasted=True, now=9.0)
    assert attempts.reasons() == "a:1883: no a"  # the others' reasons are from before
    for _ in range(9):
        fail(attempts, now=9.0)


def test_a_connection_that_is_thrown_out_as_soon_as_it_is_accepted_ends_the_attempts() -> None:
    attempts = attempts_at(BrokerAddress("a"), give_up=30.0)

    def thrown_out(now: float) -> float:
        return attempts.failed("closed", now=now, accepted=True, thrown_out=True)

    pauses = [thrown_out(float(now)) for now in range(30)]
    assert pauses[:7] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0], "they grow, though each was accepted"
    with pytest.raises(
        ConnectionFailed, match=r"^broker a:1883: closed\. Another client has its id, or the broker"
    ):
        thrown_out(30.0)


def test_a_broker_that_restarts_soon_after_a_first_connection_is_waited_for() -> None:
    attempts = attempts_at(BrokerAddress("a"), give_up=30.0)
    attempts.failed("closed", now=3.0, accepted=True, thrown_out=True)
    for now in range(4, 100):
        fail(attempts, now=float(now))
    for now in range(100, 107):  # it drops a few at its start
        attempts.failed("closed", now=float(now), thrown_out=True)
    fail(attempts, lasted=True, now=200.0)
    for now in range(300, 330):  # a new series
        attempts.failed("closed", now=float(now), accepted=True, thrown_out=True)


def test_what_fails_for_good_at_all_addresses_ends_at_once_unless_a_connection_has_worked() -> None:
    attempts = attempts_at(THREE, give_up=100.0)
    finals = (True, False, True, True, True)  # the second is not there yet
    for final in finals:
        attempts.failed("no", now=0.0, final=final)
    with pytest.raises(
        ConnectionFailed, match=r"a:1883: no; b:1883: no; c:1883: no. Are the login and its files"
    ):
        attempts.failed("no", now=0.0, final=True)
    attempts.begin(0.0, timeout_s=100.0)
    attempts.failed("no", lasted=True, now=0.0, final=True)
    for _ in range(9):
        attempts.failed("no", now=0.0, final=True)


# Nodes


@virtual
async def test_a_node_whose_way_to_the_broker_is_cut_in_mid_transfer_goes_on_by_the_other_address(
    site: SimulatedSite,
) -> None:
    site.network.brokers["other"] = site.broker  # a server with two addresses
    site.address = replace(site.address, others=(("other", 1883),))
    layout, link = layout_of(2_000_000), LinkSettings(up_mbit=16.0, down_mbit=16.0)
    parent = parent_of(site, ["device-0"], layout=layout, transfer=FINE, link=link)
    child = child_of(site, "device-0", transfer=FINE, link=link)
    meter = child.connection.meter
    async with together(living(site, parent), serving(site, child, layout, 4)):
        row = drawn(layout, 1)
        playing = asyncio.create_task(play(parent, row))
        await until(lambda: meter.sample().received > layout.row_bytes // 2)
        site.link("device-0").change(cut=True)
        before = meter.sample()
        assert_models(await playing, row, layout=layout, places={"device-0": 4})
        after = meter.sample()
        assert (
            child.connection.attempts.address == BrokerAddress("other")
            and child.connection.reconnects == 1
        )
        assert (
            parent.connection.attempts.address == BrokerAddress(BROKER)
            and parent.connection.reconnects == 0
        )
        assert after.connections == 2 and after.sent > layout.row_bytes
        assert layout.row_bytes < after.received < layout.row_bytes * 1.2, (
            "the chunks that had arrived came again"
        )
        assert after.received > before.received


@virtual
async def test_the_least_packet_limit_of_the_addresses_that_were_used_is_kept(
    site: SimulatedSite,
) -> None:
    other = site.network.add_broker("other")
    other.packet_limit = 40_000
    site.address = replace(site.address, others=(("other", 1883),))
    parent = parent_of(site, ["device-0"], layout=layout_of(4000))
    chunk_most = parent.session.link.offers.chunk_most

    async def at(host: str) -> int:
        await until(
            lambda: parent.connection.up and parent.connection.attempts.address.host == host
        )
        await asyncio.sleep(1.0)
        return parent.session.link.offers.chunk_most

    async with together(living(site, parent)):
        assert await at(BROKER) == chunk_most == TransferSettings().chunk_bytes
        site.broker.kill()
        assert await at("other") == 40_000 - PACKET_ROOM
        site.broker.start("empty")
        other.kill()
        assert await at(BROKER) == 40_000 - PACKET_ROOM


@pytest.mark.parametrize(("body_bytes", "fits"), [(39_900, True), (40_000, False)])
@virtual
async def test_a_message_that_fits_in_a_packet_is_sent(
    site: SimulatedSite, body_bytes: int, fits: bool
) -> None:
    """A model inside its announcement may fill the limit but for the room of the rest of the
    packet.
    """
    site.broker.packet_limit = 40_000
    parent = parent_of(site, ["device-0"], layout=layout_of(4000))
    async with together(living(site, parent)):
        await until(lambda: parent.connection.up)
        await asyncio.sleep(1.0)
        message = Publish("a/topic", bytes(body_bytes))
        if fits:
            parent._perform(message)
            await asyncio.sleep(1.0)
            assert parent.connection.up and parent.connection.reconnects == 0
        else:
            with pytest.raises(ConnectionFailed, match="cannot be cut"):
                parent._perform(message)


# Real sockets


@pytest.mark.parametrize("command", [["lab", "status"], ["watch", "--once"]])
def test_a_broker_away_at_all_addresses_ends_with_3_and_each_reason(command: list[str]) -> None:
    where = f"127.0.0.1:{free_port()},[::1]:{free_port()}"
    done = invoke(*command, "--connect-timeout", "0.1", env={"FEDSTRATA_BROKER": where})
    (line,) = done.stderr.splitlines()[-1:]
    assert done.exit_code == 3, done.output
    first, second = where.split(",")
    assert (
        line.startswith(f"fedstrata: broker {first}: connection refused; {second}: ")
        and "Errno" not in line
    )


def test_a_broker_at_an_ipv6_address_is_reached_and_named(tmp_path: Path) -> None:
    if broker.choose() != "mosquitto" or not socket.has_ipv6:
        pytest.skip("mosquitto or IPv6 is missing")

    async def pass_a_message(address: BrokerAddress) -> None:
        received = asyncio.get_running_loop().create_future()

        async def connected() -> None:
            connection.subscribe(
                ["t"], qos=1, acknowledged=lambda: connection.publish("t", b"hello", qos=1)
            )

        handlers = Handlers(
            lambda topic, body, retained: received.set_result((topic, body)), connected
        )
        connection = BrokerConnection(address, handlers, client_id="c", keepalive_s=30)
        running = asyncio.create_task(connection.run(connect_timeout_s=30.0))
        try:
            assert await received == ("t", b"hello")
        finally:
            running.cancel()
            await asyncio.wait((running,))

    with broker.start(directory=tmp_path, host="::1") as served:
        address = BrokerAddress(served.host, served.port)
        real(pass_a_message(address))
        text = f"127.0.0.1:{free_port()},{address}"
        assert text.endswith(f",[::1]:{served.port}")
        done = invoke("lab", "status", "--wait", "0.1", "--broker", text)
        assert done.exit_code == 5 and f"answered on broker {text} within" in done.stderr
        with pytest.raises(
            ConnectionFailed, match=rf"the broker cannot listen on \[::1\]:{served.port}: "
        ):
            broker.start(directory=tmp_path, host="::1", port=served.port)


def test_a_broker_of_a_bridged_pair_dies_and_the_run_goes_on_over_the_other(tmp_path: Path) -> None:
    if broker.choose() != "mosquitto":
        pytest.skip("mosquitto is not installed")

    async def run(dying: BrokerProcess, staying: BrokerProcess) -> None:
        first, second = (BrokerAddress(one.host, one.port) for one in (dying, staying))
        above = RealSite(replace(first, others=second.hosts))
        below = RealSite(replace(second, others=first.hosts))
        layout = layout_of(200_000)
        parent, child = parent_of(above, ["device-0"], layout=layout), child_of(below, "device-0")
        async with together(living(above, parent), serving(below, child, layout, 4)):
            for global_round in range(2):
                row = drawn(layout, global_round)
                played = await play(parent, row, global_round=global_round)
                assert_models(played, row, layout=layout, places={"device-0": 4})
                if not global_round:
                    dying.process.kill()
                    await asyncio.to_thread(dying.stop)
            assert parent.connection.attempts.address == child.connection.attempts.address == second
            assert (parent.connection.reconnects, child.connection.reconnects) == (1, 0)

    with broker.start(directory=tmp_path) as dying:
        bridge = {
            "connection": "pair",
            "address": f"{dying.host}:{dying.port}",
            "topic": "fs1/# both 1",
        }
        with broker.start(directory=tmp_path, settings=bridge) as staying:
            real(run(dying, staying))
