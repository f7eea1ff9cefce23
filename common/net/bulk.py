"""Large payloads to and from paho-mqtt's socket without copies.

paho copies the unsent rest of a packet at every partial write, and each received payload several times. `BulkClient`
is paho's client with other hands at the socket: a chunk leaves by scatter-gather from the memory where it lies, and
arrives where its receiver wants it. All else (connecting, acknowledgements, keep-alives) stays paho's.

It leans on private names of paho, so it serves only the versions that it was written for, and after a self-test
(`usable`); otherwise the stock client does, slower. FEDSTRATA_MQTT=stock asks for that.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any, Final

import paho.mqtt.client as mqtt
from paho.mqtt import MQTTException
from paho.mqtt import __version__ as PAHO_VERSION
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode

from common.net.packets import PUBLISH_QOS0, FindPlace, NotMqtt, PacketReader, Place

_STAMPS: Final = {"2.1.0": "_last_msg_in", "2.2.0": "_last_bytes_received"}  # what feeds the keep-alive, by version
CLOSED: Final = "closed by the broker"
_TURN_BYTES: Final = 4_000_000  # at most so much in one turn of the event loop

log = logging.getLogger("fedstrata.connection")


class Body:
    """A payload that is not copied as long as its memory stays as it is."""

    __slots__ = ("view",)

    def __init__(self, view: memoryview) -> None:
        self.view = view

    def detach(self) -> None:
        """Copy it, so that its memory may be written."""
        self.view = memoryview(bytes(self.view))


class _Packet:
    """A packet in two parts for paho's queue, which slices off what has been sent."""

    __slots__ = ("_body", "_head")

    def __init__(self, head: bytearray, body: Body) -> None:
        self._head = memoryview(head)
        self._body = body

    def __len__(self) -> int:
        return len(self._head) + len(self._body.view)

    def __getitem__(self, rest: slice) -> tuple[memoryview, ...]:
        sent = rest.start - len(self._head)
        return (self._head[sent:], self._body.view) if sent < 0 else (self._body.view[sent:],)


class _SentInfo:
    """Stands in for paho's MQTTMessageInfo, to hear when a packet has left."""

    __slots__ = ("_set_as_published",)

    def __init__(self, done: Callable[[], None]) -> None:
        self._set_as_published = done


class BulkClient(mqtt.Client):
    """paho's client with a faster way for large payloads; made of a stock client by `adopt`.

    `ended`: why the connection ended, where that was seen here.
    """

    ended: str
    _reader: PacketReader
    _taken: MQTTErrorCode

    @classmethod
    def adopt(cls, client: mqtt.Client, *, find_place: FindPlace, landed: Callable[[str, Place], None]) -> BulkClient:
        """Turn a stock client that is not yet connected into this one; for the callbacks see PacketReader."""
        client.__class__ = cls
        assert isinstance(client, cls)
        client.ended = ""
        client._taken = MQTTErrorCode.MQTT_ERR_SUCCESS
        client._reader = PacketReader(find_place=find_place, landed=landed, take=client._take)
        return client

    def publish_body(self, topic: str, body: Body, *, done: Callable[[], None]) -> None:
        """Queue a QoS 0 message; `done` is called when the socket has taken all of it."""
        name = topic.encode()
        head = bytearray([PUBLISH_QOS0])
        self._pack_remaining_length(head, 2 + len(name) + len(body.view))
        self._pack_str16(head, name)
        packet: Any = _Packet(head, body)
        info: Any = _SentInfo(done)
        self._packet_queue(mqtt.PUBLISH, packet, self._mid_generate(), 0, info)

    def loop_read(self, max_packets: int = 1) -> MQTTErrorCode:
        """Take what the socket has; aiomqtt calls it whenever there is something."""
        budget = _TURN_BYTES
        while budget > 0:
            sock: Any = self._sock
            if sock is None:
                return MQTTErrorCode.MQTT_ERR_NO_CONN
            buffers = self._reader.buffers()
            try:
                plain = type(sock) is socket.socket  # TLS has no scatter-gather
                count = sock.recvmsg_into(buffers)[0] if plain else sock.recv_into(buffers[0])
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self.ended = _why(error)
                count = 0
            if count == 0:
                self.ended = self.ended or CLOSED
                return self._loop_rc_handle(MQTTErrorCode.MQTT_ERR_CONN_LOST)
            budget -= count
            setattr(self, _STAMPS[PAHO_VERSION], time.monotonic())
            try:
                self._reader.feed(count)
            except (NotMqtt, MQTTException) as error:
                self.ended = f"no MQTT: {error}"
                self._taken = MQTTErrorCode.MQTT_ERR_PROTOCOL
            if self._taken > 0:
                return self._loop_rc_handle(self._taken)
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def _take(self, command: int, packet: bytearray) -> None:
        """Let paho handle a packet, unless an earlier one ended the connection."""
        if self._taken == MQTTErrorCode.MQTT_ERR_SUCCESS:
            whole: Any = {"command": command, "remaining_length": len(packet), "packet": packet, "pos": 0}
            self._in_packet = whole
            self._taken = self._packet_handle()

    def _sock_send(self, buf: Any) -> int:
        try:
            return self._send_parts(buf) if isinstance(buf, tuple) else super()._sock_send(buf)
        except BlockingIOError:
            raise
        except OSError as error:
            self.ended = _why(error)
            raise

    def _send_parts(self, parts: tuple[memoryview, ...]) -> int:
        sock: Any = self._sock
        if sock is None:
            raise ConnectionError("not connected")
        try:
            plain = type(sock) is socket.socket
            sent: int = sock.sendmsg(parts) if plain else super()._sock_send(bytes(parts[0]))
        except BlockingIOError:
            self._call_socket_register_write()
            raise
        return sent


def _why(error: OSError) -> str:
    return CLOSED if isinstance(error, ConnectionResetError | BrokenPipeError) else str(error)


@functools.cache
def usable() -> bool:
    """Return whether this release of paho takes our hands at its socket: asked for, known, and tried once here."""
    if os.environ.get("FEDSTRATA_MQTT") == "stock":
        return False
    if PAHO_VERSION not in _STAMPS:
        log.warning("paho-mqtt %s is not known here (%s): large models go slower", PAHO_VERSION, ", ".join(_STAMPS))
        return False
    try:
        _try_out()
    except Exception as error:  # noqa: BLE001  # a strange release may raise anything
        log.warning("the fast way to paho-mqtt's socket fails its test (%r): large models go slower", error)
        return False
    return True


def _try_out() -> None:
    """Send and receive over a pair of sockets what the stock client would. Raises where it differs."""
    payload = bytes(range(256)) * 512
    landed: list[tuple[str, bytes]] = []
    messages: list[bytes] = []
    sent_all: list[bool] = []
    clients = [mqtt.Client(CallbackAPIVersion.VERSION2) for _ in range(2)]
    ours, theirs = zip(*(socket.socketpair() for _ in clients), strict=True)
    try:
        for client, end in zip(clients, ours, strict=True):
            client._sock = end
        stock, bulk = (
            clients[0],
            BulkClient.adopt(
                clients[1],
                find_place=lambda topic, size: Body(memoryview(bytearray(size))) if topic == "large" else None,
                landed=lambda topic, place: landed.append((topic, bytes(place.view or b""))),
            ),
        )
        bulk.on_message = lambda client, userdata, message: messages.append(bytes(message.payload))
        stock.publish("large", payload)
        bulk.publish_body("large", Body(memoryview(payload)), done=lambda: sent_all.append(True))
        wanted, sent = (_drain(end) for end in theirs)
        stock.publish("small", b"control", qos=1)
        theirs[1].sendall(wanted + _drain(theirs[0]) + wanted[:1000])
        ours[1].setblocking(False)
        bulk.loop_read()
        theirs[1].sendall(wanted[1000:])
        bulk.loop_read()
        if (sent, landed, messages, sent_all) != (wanted, [("large", payload)] * 2, [b"control"], [True]):
            raise RuntimeError("other bytes than the stock client's")
        if _drain(theirs[1])[:1] != b"\x40":
            raise RuntimeError("no acknowledgement")
    finally:
        for client in clients:
            client._sock = None
        for end in (*ours, *theirs):
            end.close()


def _drain(end: socket.socket) -> bytes:
    """Return what has arrived; on one machine, all that was sent."""
    received = b""
    with contextlib.suppress(BlockingIOError):
        while True:
            received += end.recv(1 << 20, socket.MSG_DONTWAIT)
    return received
