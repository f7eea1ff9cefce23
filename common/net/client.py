"""One connection of aiomqtt (the present name of asyncio-mqtt), which drives paho-mqtt from the
event loop.

The only module that imports aiomqtt. It changes these behaviours of aiomqtt:

- it leaves Nagle's algorithm on (stalls of 40 ms);
- it stops sending after 20 messages without an acknowledgement, which on a slow link waits behind a
  chunk for minutes;
- it passes each message on by a task of its own;
- it registers a socket for writing one turn of the event loop late, when the socket may already be
  closed;
- it notices only after ten seconds that the broker closes the connection before it answers the
  connect;
- after a failed connect or disconnect it leaves the socket open;
- it forgets the end of a connection that comes together with the CONNACK, and waits for ever;
- it wakes up once a second for each connection only to see whether a ping is due;
- it closes its socket right after DISCONNECT. If the broker still sends something, the reply is a
  reset, which may reach the broker before it has read DISCONNECT. It then publishes the will of a
  node that has left regularly.

Callers must handle two more: its time-outs end publications on slow links, so use none
(`math.inf`). Then a call that waits when the connection ends waits forever, so cancel it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import aiomqtt
from aiomqtt import MqttError
from aiomqtt.exceptions import MqttConnectError
from paho.mqtt.client import MQTT_ERR_SUCCESS

from fedstrata.common.net.bulk import CLOSED, BulkClient, FindPlace, Place, Received, usable
from fedstrata.common.net.refusals import FINAL, Lack, lack_of
from fedstrata.common.net.tls import is_final, reason_of

if TYPE_CHECKING:
    import ssl

    import paho.mqtt.client as mqtt

    from fedstrata.common.net.address import BrokerAddress
    from fedstrata.common.net.plain_client import Will

__all__ = ["MqttClient", "MqttError"]

PENDING_CALLS_MOST: Final = 1000  # aiomqtt warns above; a parent sends to all its children at once
LOOKS: Final = 6  # within a keep-alive, whether a ping is due; a broker waits for 1.5 keep-alives
CLOSE_S: Final = 1.0  # for the broker to close the connection after DISCONNECT
SOCKET_OPTIONS: Final = ((socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),)

_log = logging.getLogger("fedstrata.mqtt")
# paho's messages about a broken connection are part of the one line that `BrokerConnection` logs.
_log.addFilter(lambda record: logging.getLogger("fedstrata.connection").isEnabledFor(logging.DEBUG))


class MqttClient(aiomqtt.Client):
    """An asynchronous context, connected inside it. It serves one connection; call `close` after
    that.

    `find_place`, `landed` and `received` are PacketReader's, called as the socket is read.
    """

    def __init__(
        self,
        address: BrokerAddress,
        *,
        client_id: str,
        keepalive_s: int,
        will: tuple[Will, bytes] | None,
        find_place: FindPlace,
        landed: Callable[[str, Place], None],
        received: Received,
        tls: ssl.SSLContext | None,
    ) -> None:
        last_will = None
        if will is not None:
            last_will = aiomqtt.Will(will[0].topic, will[1], qos=will[0].qos, retain=will[0].retain)
        super().__init__(
            address.host,
            address.port,
            username=address.username,
            password=address.password,
            identifier=client_id,
            will=last_will,
            clean_session=True,
            keepalive=keepalive_s,
            socket_options=SOCKET_OPTIONS,
            tls_context=tls,
            max_inflight_messages=PENDING_CALLS_MOST,
            logger=_log,
        )
        self.pending_calls_threshold = PENDING_CALLS_MOST
        self._look_s = max(1.0, keepalive_s / LOOKS)
        self._loop_thread = threading.get_ident()
        self._received = received
        self._error: Exception | None = None
        if usable():
            place = partial(self._guarded, landed)
            BulkClient.adopt(self._client, find_place=find_place, landed=place, received=self._take)

    async def ended(self) -> NoReturn:
        """Wait until the connection ends. Raises MqttError, or what a callback has raised."""
        await asyncio.wait((self._disconnected,))
        if self._error is not None:
            raise self._error
        raise MqttError("disconnected") from self._disconnected.exception()

    def close(self) -> None:
        """Close the socket, which also stops its callbacks."""
        self._client._sock_close()
        for future in (self._connected, self._disconnected):
            if future.done() and not future.cancelled():
                future.exception()  # asyncio would log an exception that is never retrieved

    async def __aenter__(self) -> Self:
        """Connect. Raises MqttError."""
        ended = self._disconnected
        await super().__aenter__()
        self._disconnected = ended  # aiomqtt replaces one that is done
        return self

    async def __aexit__(self, *error: Any) -> None:
        """Disconnect: send DISCONNECT, then read until the broker has closed, for at most
        `CLOSE_S`.
        """
        ours = self._client.socket()
        rest = None
        if isinstance(ours, socket.socket) and not self._disconnected.done():
            # keeps the connection open when paho closes its socket
            rest = socket.socket(fileno=os.dup(ours.fileno()))
            rest.setblocking(False)
        try:
            await super().__aexit__(*error)
            if rest is not None:
                await _read_to_the_end(rest)
        finally:
            if rest is not None:
                rest.close()

    def reason(self, error: MqttError) -> str:
        """Return why the connection ended, or could not be made."""
        ended = self._client.ended if isinstance(self._client, BulkClient) else ""
        if ended and not self._disconnected.done():
            if ended == CLOSED:
                return f"{ended} before CONNACK"
            return ended
        cause = _cause(error)
        if isinstance(cause, MqttConnectError):
            lack = lack_of(cause.rc)
            if lack is Lack.LOGIN:
                text = f"the broker refuses the login: {cause.rc}"
            elif lack is None:
                text = f"the broker refuses the connection: {cause.rc}"
            else:
                text = lack.value
        # paho's only hint
        elif isinstance(cause, aiomqtt.MqttCodeError) and str(cause.rc) == "Unspecified error":
            text = "connection lost"
        else:
            text = reason_of(cause) if isinstance(cause, OSError) else str(cause)
        return ended or text

    def is_final(self, error: MqttError) -> bool:
        """Return whether another attempt would fail, too: the login, the version or a certificate
        is refused.
        """
        if isinstance(self._client, BulkClient) and self._client.final:
            return True
        cause = _cause(error)
        if isinstance(cause, MqttConnectError):
            return lack_of(cause.rc) in FINAL
        return isinstance(cause, OSError) and is_final(cause)

    def is_refused(self, error: MqttError) -> bool:
        """Return whether the broker has refused the CONNECT by a CONNACK."""
        return isinstance(_cause(error), MqttConnectError)

    def _on_message(self, client: object, userdata: object, message: mqtt.MQTTMessage) -> None:
        self._take(message.topic, bytes(message.payload), message.retain)

    def _take(self, topic: str, payload: bytes, retained: bool) -> None:
        self._guarded(self._received, topic, payload, retained)

    def _guarded(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call a callback; its error ends the connection, and `ended` raises it."""
        try:
            callback(*arguments)
        except Exception as error:
            self._error = error
            raise

    async def _misc_loop(self) -> None:
        while self._client.loop_misc() == MQTT_ERR_SUCCESS:  # noqa: ASYNC110 - as in aiomqtt, but less often
            await asyncio.sleep(self._look_s)

    def _on_disconnect(self, *arguments: Any) -> None:
        if not self._connected.done():
            self._connected.set_exception(MqttError(f"{CLOSED} before CONNACK"))
        super()._on_disconnect(*arguments)

    def _on_socket_register_write(self, client: object, userdata: object, sock: Any) -> None:
        """Register the socket at once.

        aiomqtt passes the file descriptor's number to the event loop's next turn. If the connection
        ends within this turn, the number is then unused, which asyncio logs as an error, or belongs
        to another socket.
        """
        if threading.get_ident() == self._loop_thread:
            self._register(sock)
        else:  # connecting runs in its own thread, but only the loop's thread closes sockets
            self._loop.call_soon_threadsafe(self._register, sock)

    def _register(self, sock: Any) -> None:
        if sock.fileno() >= 0:
            self._loop.add_writer(sock.fileno(), self._write)

    def _write(self) -> None:
        try:
            self._client.loop_write()
        except Exception as error:  # noqa: BLE001 - as in aiomqtt: after any error the connection is lost
            if not self._disconnected.done():
                self._disconnected.set_exception(error)


def _cause(error: MqttError) -> BaseException:
    """Return the cause of an error, which aiomqtt hides if the connection could not be made."""
    return error.__cause__ or error.__context__ or error


async def _read_to_the_end(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    try:
        sock.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(CLOSE_S):
            while await loop.sock_recv(sock, 65_536):
                pass
    except (OSError, TimeoutError):
        pass  # the connection ended otherwise, or the broker is slow
