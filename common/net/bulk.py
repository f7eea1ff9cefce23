"""Large payloads through paho-mqtt's socket without copies.

paho copies the unsent rest of a packet at every partial write, and each received payload several times. `BulkClient` is
paho's client with replaced socket operations: a chunk is sent by scatter-gather from its own memory, and received
directly in its destination. Everything else (connecting, acknowledgements, keep-alives) remains paho's.

It uses private names of paho, so it is only enabled for known versions and after a self-test (`usable`). Otherwise the
stock client is used, which is slower, and which reads messages of any size into memory before they can be refused.
FEDSTRATA_MQTT=stock selects the stock client.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Final

import paho.mqtt.client as mqtt
from paho.mqtt import MQTTException
from paho.mqtt import __version__ as PAHO_VERSION
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode

from common.net.packets import PUBLISH_QOS0, FindPlace, NotMqtt, PacketReader, Place, Received
from common.net.tls import is_final, reason_of

_STAMPS: Final = {"2.1.0": "_last_msg_in", "2.2.0": "_last_bytes_received"}  # the keep-alive's timestamp, by version
CLOSED: Final = "closed by the broker"
_TURN_BYTES: Final = 4_000_000  # limit of the bytes read in one turn of the event loop
_READ_LEAST: Final = 100_000  # one read counts as so many: it may have a hundred messages, which take as long

log = logging.getLogger("fedstrata.connection")


class Body:
    """A payload that is not copied while its memory does not change."""

    __slots__ = ("view",)

    def __init__(self, view: memoryview) -> None:
        self.view = view

    def detach(self) -> None:
        """Copy the payload, so that its memory may be overwritten."""
        self.view = memoryview(bytes(self.view))


class _Packet:
    """A packet in two parts for paho's queue, which slices off the bytes that have been sent."""

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
    """Replacement for paho's MQTTMessageInfo that calls `done` when a packet has been sent."""

    __slots__ = ("_set_as_published",)

    def __init__(self, done: Callable[[], None]) -> None:
        self._set_as_published = done


class BulkClient(mqtt.Client):
    """paho's client with a faster path for large payloads; `adopt` converts a stock client.

    `ended`: why the connection ended, if the reason was seen here; `final`: another attempt would fail, too.
    """

    ended: str
    final: bool
    _reader: PacketReader
    _taken: MQTTErrorCode

    @classmethod
    def adopt(
        cls, client: mqtt.Client, *, find_place: FindPlace, landed: Callable[[str, Place], None], received: Received
    ) -> BulkClient:
        """Convert a stock client that is not yet connected; for the callbacks see PacketReader."""
        client.__class__ = cls
        assert isinstance(client, cls)
        client.ended, client.final = "", False
        client._taken = MQTTErrorCode.MQTT_ERR_SUCCESS
        client._reader = PacketReader(find_place=find_place, landed=landed, received=received, take=client._take)
        return client

    def publish_body(self, topic: str, body: Body, *, done: Callable[[], None]) -> None:
        """Send a QoS 0 message, or queue it; `done` is called when the socket has taken all of it."""
        name = topic.encode()
        head = bytearray([PUBLISH_QOS0])
        self._pack_remaining_length(head, 2 + len(name) + len(body.view))
        self._pack_str16(head, name)
        packet: Any = _Packet(head, body)
        info: Any = _SentInfo(done)
        entry: Any = {"command": mqtt.PUBLISH, "mid": 0, "qos": 0, "pos": 0, "to_process": len(packet)}
        self._out_packet.append(entry | {"packet": packet, "info": info})
        if len(self._out_packet) == 1:
            self._packet_write()
        if self._out_packet:
            self._call_socket_register_write()  # also after an error, which the event loop's call handles

    def loop_read(self, max_packets: int = 1) -> MQTTErrorCode:
        """Read from the socket; aiomqtt calls it whenever there is data."""
        budget = _TURN_BYTES
        while True:
            sock: Any = self._sock
            if sock is None:
                return MQTTErrorCode.MQTT_ERR_NO_CONN
            plain = type(sock) is socket.socket  # TLS has no scatter-gather
            if budget <= 0 and (plain or not sock.pending()):  # what TLS has decrypted wakes no event loop
                break
            buffers = self._reader.buffers()
            try:
                count = sock.recvmsg_into(buffers)[0] if plain else sock.recv_into(buffers[0])
            except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            except OSError as error:
                self._end(error)
                count = 0
            if count == 0:
                self.ended = self.ended or CLOSED
                return self._loop_rc_handle(MQTTErrorCode.MQTT_ERR_CONN_LOST)
            budget -= max(count, _READ_LEAST)
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
        """Pass a packet to paho, unless an earlier packet ended the connection."""
        if self._taken == MQTTErrorCode.MQTT_ERR_SUCCESS:
            whole: Any = {"command": command, "remaining_length": len(packet), "packet": packet, "pos": 0}
            self._in_packet = whole
            self._taken = self._packet_handle()

    def _packet_write(self) -> MQTTErrorCode:
        """Send the queued packets, as paho does, but without creating MQTT 5's reason and properties for each."""
        queue: Any = self._out_packet
        while queue and isinstance(queue[0]["packet"], _Packet):
            entry = queue[0]
            try:
                sent = self._sock_send(entry["packet"][entry["pos"] :])
            except BlockingIOError:
                return MQTTErrorCode.MQTT_ERR_AGAIN
            except OSError:
                return MQTTErrorCode.MQTT_ERR_CONN_LOST
            entry["pos"] += sent
            entry["to_process"] -= sent
            if not entry["to_process"]:
                queue.popleft()
                entry["info"]._set_as_published()
            self._last_msg_out = time.monotonic()
        return super()._packet_write() if queue else MQTTErrorCode.MQTT_ERR_SUCCESS

    def _sock_send(self, buf: Any) -> int:
        try:
            return self._send_parts(buf) if isinstance(buf, tuple) else super()._sock_send(buf)
        except BlockingIOError:
            raise
        except OSError as error:
            self._end(error)
            raise

    def _end(self, error: OSError) -> None:
        closed = isinstance(error, ConnectionResetError | BrokenPipeError | ssl.SSLEOFError)
        self.ended, self.final = CLOSED if closed else reason_of(error), is_final(error)

    def _send_parts(self, parts: tuple[memoryview, ...]) -> int:
        sock: Any = self._sock
        if sock is None:
            raise ConnectionError("not connected")
        try:
            plain = type(sock) is socket.socket
            sent: int = sock.sendmsg(parts) if plain else super()._sock_send(parts[0])  # type: ignore[arg-type]
        except BlockingIOError:
            self._call_socket_register_write()
            raise
        return sent


@functools.cache
def usable() -> bool:
    """Return whether the faster path can be used: not disabled, known release of paho, self-test passed."""
    if os.environ.get("FEDSTRATA_MQTT") == "stock":
        return False
    if PAHO_VERSION not in _STAMPS:
        log.warning("paho-mqtt %s is unknown (known: %s): large models are slower", PAHO_VERSION, ", ".join(_STAMPS))
        return False
    try:
        _try_out()
    except Exception as error:  # noqa: BLE001  # an unknown release may raise anything
        log.warning("the self-test of the fast path with paho-mqtt failed (%r): large models are slower", error)
        return False
    return True


def _try_out() -> None:
    """Compare the bytes sent and received over a socket pair with the stock client's. Raises if they differ."""
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
                received=lambda topic, payload, retained: messages.append(payload),
            ),
        )
        bulk.on_message = lambda client, userdata, message: messages.append(bytes(message.payload))
        stock.publish("large", payload)
        bulk.publish_body("large", Body(memoryview(payload)), done=lambda: sent_all.append(True))
        wanted, sent = (_drain(end) for end in theirs)
        stock.publish("small", b"state", retain=True)
        stock.publish("small", b"control", qos=1)
        theirs[1].sendall(wanted + _drain(theirs[0]) + wanted[:1000])
        ours[1].setblocking(False)
        bulk.loop_read()
        theirs[1].sendall(wanted[1000:])
        bulk.loop_read()
        if (sent, landed, messages, sent_all) != (wanted, [("large", payload)] * 2, [b"state", b"control"], [True]):
            raise RuntimeError("the bytes differ from the stock client's")
        if _drain(theirs[1])[:1] != b"\x40":
            raise RuntimeError("no acknowledgement")
    finally:
        for client in clients:
            client._sock = None
        for end in (*ours, *theirs):
            end.close()


def _drain(end: socket.socket) -> bytes:
    """Return the received bytes; on one machine these are all sent bytes."""
    received = b""
    with contextlib.suppress(BlockingIOError):
        while True:
            received += end.recv(1 << 20, socket.MSG_DONTWAIT)
    return received
