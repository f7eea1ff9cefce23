"""A subscription to the messages of one run, in a thread of its own: for the live view of a lab on this machine."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from common.errors import FedstrataError
from common.net.address import BrokerAddress
from common.net.connection import BrokerConnection, Handlers
from common.protocol.round_state import HEARTBEAT_S
from deploy.watching.follower import KEEPALIVE_S, topics_of

CONNECT_S: Final = 5 * HEARTBEAT_S


class Subscription:
    """The messages of a run on one broker, until `close`. A view without them has the cloud's events still.

    `received` and `connected` are called in the subscription's thread.
    """

    def __init__(
        self,
        address: BrokerAddress,
        *,
        lab: str,
        run: str,
        received: Callable[[str, bytes, bool], None],
        connected: Callable[[bool], None],
    ) -> None:
        self._address = address
        self._topics = topics_of(lab, run)
        self._received = received
        self._connected = connected
        self._loop = asyncio.new_event_loop()
        self._closed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="subscription", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Disconnect."""
        with suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._keep())

    async def _keep(self) -> None:
        async def connected() -> None:
            connection.subscribe(self._topics, qos=0, acknowledged=lambda: self._connected(True))

        connection = BrokerConnection(
            self._address,
            Handlers(self._received, connected, lambda: self._connected(False)),
            client_id=f"view-{secrets.token_hex(8)}",
            keepalive_s=KEEPALIVE_S,
        )
        with suppress(FedstrataError):  # the view has the cloud's events still
            keeping = asyncio.create_task(connection.run(connect_timeout_s=CONNECT_S), name="connection")
            closing = asyncio.create_task(self._closed.wait(), name="close")
            await asyncio.wait((keeping, closing), return_when=asyncio.FIRST_COMPLETED)
            closing.cancel()
            if keeping.done():
                keeping.result()
            keeping.cancel()
            await asyncio.wait((keeping,))
