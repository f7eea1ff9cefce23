"""The connection to a broker: brokers that restart, that drop a client at once, or that refuse a subscription."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from common.net.link import BrokerAddress, BrokerConnection
from deploy import broker

PATIENCE_S = 30.0


def scenario(play: Coroutine[Any, Any, None]) -> list[dict[str, Any]]:
    """Run a test's coroutine, at most `PATIENCE_S`; return what asyncio's exception handler was called with."""
    called: list[dict[str, Any]] = []

    async def bounded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: called.append(context))
        async with asyncio.timeout(PATIENCE_S):
            await play
        gc.collect()  # a future whose exception nobody retrieved complains as it is freed
        await asyncio.sleep(0)

    asyncio.run(bounded())
    return called


async def until(condition: Callable[[], object]) -> None:
    """Wait until something outside this test's control has come true."""
    while not condition():  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.005)


async def nothing() -> None:
    pass


def connection_to(
    address: BrokerAddress,
    *,
    received: Callable[[str, bytes, bool], None] = lambda *_: None,
    connected: Callable[[], Coroutine[Any, Any, None]] = nothing,
    lost: Callable[[], None] = lambda: None,
) -> BrokerConnection:
    return BrokerConnection(address, client_id="c", keepalive_s=30, received=received, connected=connected, lost=lost)


# A broker that restarts


def test_a_socket_that_closes_with_a_write_pending_is_not_watched() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            client = connection_to(BrokerAddress("nowhere"))._new_client()
            client._client._sock = ours
            client._client.publish("t", b"")
            client._client._sock_close()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    assert scenario(run()) == []


def test_a_broker_that_restarts_under_traffic_leaves_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if broker.choose() != "mosquitto":
        pytest.skip("mosquitto is not installed")

    async def run() -> None:
        served = broker.start(directory=tmp_path)
        count = 0

        def received(*_: object) -> None:
            nonlocal count
            count += 1
            connection.publish("t", b"x", qos=count % 2)

        async def connected() -> None:
            connection.subscribe(["t"], qos=1)
            connection.publish("t", b"x", qos=1)

        async def publish() -> None:
            while True:
                connection.publish("u", b"x", qos=0)
                await asyncio.sleep(0)

        connection = connection_to(BrokerAddress(served.host, served.port), received=received, connected=connected)
        tasks = [asyncio.create_task(connection.run(connect_timeout_s=PATIENCE_S)), asyncio.create_task(publish())]
        try:
            for _ in range(8):
                before = count
                await until(lambda before=before: count > before + 50)
                served.process.kill()
                await asyncio.to_thread(served.stop)
                await until(lambda: not connection.up)
                served = broker.start(directory=tmp_path, kind="mosquitto", port=served.port)
            await until(lambda: connection.up)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            served.stop()

    with caplog.at_level(logging.WARNING, "asyncio"):
        assert scenario(run()) == []
    assert [record for record in caplog.records if record.name == "asyncio"] == []
