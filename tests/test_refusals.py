"""Brokers that refuse what a node asks for: it finds out what they lack, and works without it where
it can.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fedstrata.common.errors import ConnectionFailed
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.connection import BrokerConnection, Handlers
from fedstrata.common.net.plain_client import Will
from fedstrata.common.net.refusals import DONE_WITHOUT, FINAL, Asked, Lack, find_lack, short_id
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.brokers.guard import Guard
from tests.helpers.nodes import child_of, living, together
from tests.helpers.sites import SimulatedSite, until, virtual
from tests.simulation.interference import InboxOf
from tests.test_connection import (
    SUBSCRIBE,
    FakeBroker,
    acknowledge,
    client_id,
    logged,
    running,
    scenario,
)

OK = b"\x20\x02\x00\x00"
WILL, QOS1, RETAIN = 4, 8, 32  # flags of a CONNECT
STATE = "fs1/lab/r/device-0/state"
ID = "device-0-abcdef01-0123"
DOCS = Path(__file__).parents[1] / "docs" / "brokers.md"

Connack = Callable[[bytes], bytes | None]


def code(number: int) -> bytes:
    return bytes([0x20, 2, 0, number])


def refusing(answer: bytes | None, flags: int = 0) -> Connack:
    """Return a broker's answer to a CONNECT: this one if it has all these flags, else that it may
    connect.
    """
    return lambda body: answer if body[7] & flags == flags else OK


def long_ids_refused(answer: bytes | None) -> Connack:
    return lambda body: OK if re.fullmatch("[0-9a-zA-Z]{1,23}", client_id(body)) else answer


def node(address: BrokerAddress, *, reads: str = "a") -> BrokerConnection:
    """Return a connection with a will, as an endpoint has it, that subscribes to a topic."""

    async def subscribe() -> None:
        connection.subscribe([reads], qos=0)
        connection.publish(STATE, b"ready", qos=1, retain=True)

    handlers = Handlers(lambda *_: None, subscribe)
    connection = BrokerConnection(
        address, handlers, client_id=ID, keepalive_s=30, will=(STATE, b"lost")
    )
    return connection


# What a broker refuses at the CONNECT, each by its code or by closing the connection

AT_CONNECT = [
    (refusing(code(1)), Lack.VERSION),
    (refusing(code(3)), Lack.UNAVAILABLE),
    (refusing(code(4)), Lack.LOGIN),
    (refusing(code(5)), Lack.LOGIN),
    (refusing(None), Lack.CLIENTS),
    (long_ids_refused(code(2)), Lack.ID),
    (long_ids_refused(None), Lack.ID),
    (refusing(code(5), WILL), Lack.WILL),
    (refusing(None, WILL), Lack.WILL),
    (refusing(None, WILL | QOS1), Lack.QOS1),
    (refusing(None, WILL | RETAIN), Lack.RETAINED),
    (refusing(code(9), WILL | RETAIN), Lack.RETAINED),  # no code of MQTT
]


@pytest.mark.parametrize(("connack", "lack"), AT_CONNECT)
@scenario
async def test_what_a_broker_lacks_that_refuses_to_connect_is_named(
    connack: Connack, lack: Lack, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeBroker(acknowledge, connack=connack) as fake:
        connection = node(fake.address)
        running_it = asyncio.create_task(connection.run(connect_timeout_s=0.5))
        if lack in DONE_WITHOUT:
            await until(lambda: connection._accepted)
            assert len([line for line in logged(caplog) if lack.value in line]) == 1
            running_it.cancel()
            await asyncio.wait((running_it,))
            return
        with pytest.raises(ConnectionFailed) as failed:
            await running_it
    text = str(failed.value)
    if lack is Lack.LOGIN:
        assert "the broker refuses the login: " in text and text.endswith(
            "Are the login and its files right?"
        )
    else:
        assert text == f"broker {fake.address}: {lack.value}."
    assert "Is it running there" not in text
    assert (len(fake.times) < 5) is (lack in FINAL), "the others may come to be right"


@scenario
async def test_a_refused_client_leaves_no_socket_to_the_garbage_collector() -> None:
    def sockets() -> set[str]:
        files = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return {os.readlink(file) for file in files if os.path.exists(file)}

    gc.collect()
    async with FakeBroker(acknowledge, connack=refusing(code(1))) as fake:
        before = sockets()
        gc.disable()
        try:
            assert await asyncio.to_thread(find_lack, fake.address, Asked(ID, 30)) is Lack.VERSION
            await until(lambda: sockets() <= before)
        finally:
            gc.enable()


@scenario
async def test_a_broker_that_lacks_everything_that_a_node_can_do_without_serves() -> None:
    def connack(body: bytes) -> bytes | None:
        return None if body[7] & WILL else long_ids_refused(code(2))(body)

    async with FakeBroker(acknowledge, connack=connack) as fake:
        connection = node(fake.address)
        async with running(connection):
            await until(lambda: connection._accepted)
            ids = {client_id(body) for number, kind, body in fake.packets if kind == 1}
    assert sum(len(each) <= 23 for each in ids) > 1


# What a broker refuses later


@scenario
async def test_a_subscription_at_which_a_broker_closes_is_named() -> None:
    def answer(kind: int, body: bytes) -> bytes | None:
        return None if kind == SUBSCRIBE and b"secret" in body else acknowledge(kind, body)

    async with FakeBroker(answer) as fake:
        with pytest.raises(ConnectionFailed) as failed:
            await node(fake.address, reads="secret").run(connect_timeout_s=1.0)
    assert Lack.READING.value in str(failed.value)


@virtual
async def test_a_subscription_that_is_refused_is_named(
    site: SimulatedSite, caplog: pytest.LogCaptureFixture
) -> None:
    site.broker.refused = InboxOf("device-0")
    async with together(living(site, child_of(site, "device-0"))):
        await until(lambda: bool(caplog.messages))
    (line,) = caplog.messages
    assert line.startswith("device-0: broker broker:1883 refuses the subscription to fs1/")
    assert line.endswith(
        "/device-0/inbox/institution-0: nothing from there arrives. Let this login read it."
    )


def test_nothing_is_concluded_from_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.common.net.plain_client.CONNECT_S", 0.1)
    monkeypatch.setattr("fedstrata.common.net.plain_client.PATIENCE_S", 0.1)
    asked = Asked(ID, 30, Will(STATE), "a")

    async def find(answer: Callable[[int, bytes], bytes | None], connack: Connack) -> Lack | None:
        async with FakeBroker(answer, connack=connack) as fake:
            return await asyncio.to_thread(find_lack, fake.address, asked)

    assert asyncio.run(find(acknowledge, lambda body: b"")) is None
    assert asyncio.run(find(lambda kind, body: b"", refusing(OK))) is None
    assert asyncio.run(find(acknowledge, refusing(OK))) is None


def test_short_ids_are_what_every_broker_takes() -> None:
    drawn = {short_id(name) for name in (ID, ID, "", "ü.-_", "x" * 90)}
    assert len(drawn) == 5 and all(re.fullmatch("[0-9a-zA-Z]{12,23}", each) for each in drawn)


# mosquitto

MOSQUITTO = [
    ({"max_qos": 0}, Lack.QOS1),
    ({"retain_available": "false"}, Lack.RETAINED),
    ({"message_size_limit": 3}, Lack.WILL),
    ({"clientid_prefixes": "other-"}, Lack.LOGIN),
    ({"use_username_as_clientid": "true"}, Lack.BESIDE),
    ({}, None),
]


@pytest.mark.parametrize(("settings", "lack"), MOSQUITTO)
def test_what_a_mosquitto_lacks(
    settings: dict[str, str | int], lack: Lack | None, tmp_path: Path
) -> None:
    if broker.choose() != "mosquitto":
        pytest.skip("mosquitto is not installed")
    guard = Guard(login=("me", "secret"))
    with broker.start(
        directory=tmp_path, kind="mosquitto", guard=guard, settings=settings
    ) as served:
        where = BrokerAddress(served.host, served.port, "me", "secret")
        assert find_lack(where, Asked(ID, 30, Will(STATE), "a")) is lack


@pytest.mark.parametrize("settings", [{"max_qos": 0}, {"retain_available": "false"}])
@scenario
async def test_a_mosquitto_without_qos_1_or_without_a_store_serves(
    settings: dict[str, str | int], tmp_path: Path
) -> None:
    if broker.choose() != "mosquitto":
        pytest.skip("mosquitto is not installed")
    with broker.start(directory=tmp_path, kind="mosquitto", settings=settings) as served:
        connection = node(BrokerAddress(served.host, served.port))
        async with running(connection):
            await until(lambda: connection._accepted)
            await connection.flush()
            assert connection.up and connection.reconnects == 1


# The page


def test_the_page_has_each_refusal() -> None:
    page = DOCS.read_text(encoding="utf-8")
    table = page.partition("## Refusals")[2].partition("\n## ")[0]
    for lack in Lack:
        (row,) = [line for line in table.splitlines() if f"`{lack.value}`" in line]
        ends = "ends at once" in row
        assert ends is (lack in FINAL), row
        assert ("works without" in row) is (lack in DONE_WITHOUT), row
