"""Large payloads through paho-mqtt's socket without copies.

paho copies the unsent rest of a packet at every partial write, and each received payload several
times. `BulkClient` is paho's client with replaced socket operations: a chunk is sent by
scatter-gather from its own memory, and received directly in its destination. Everything else
(connecting, acknowledgements, keep-alives) remains paho's.

It uses private names of paho, so it is only enabled for known versions (`usable`). Otherwise the
stock client is used, which is slower, and which reads messages of any size into memory before they
can be refused.
FEDSTRATA_MQTT=stock selects the stock client.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import paho.mqtt.client as mqtt
from paho.mqtt import MQTTException
from paho.mqtt import __version__ as PAHO_VERSION
from paho.mqtt.enums import MQTTErrorCode

from fedstrata.common.net.tls import is_final, reason_of
from fedstrata.common.protocol.limits import SKIPPED

HEAD_BYTES: Final = 4096
# for bytes that nobody reads, of all connections of this process
_SCRATCH: Final = memoryview(bytearray(65_536))
PUBLISH_QOS0: Final = 0x30
RETAINED: Final = 0x01
# bytes of a packet without a payload, such as an acknowledgement of subscriptions
OTHER_MOST: Final = 1 << 20
_QOS0: Final = (PUBLISH_QOS0, PUBLISH_QOS0 | RETAINED)
# the keep-alive's timestamp, by version
_STAMPS: Final = {"2.1.0": "_last_msg_in", "2.2.0": "_last_bytes_received"}
CLOSED: Final = "closed by the broker"
_TURN_BYTES: Final = 4_000_000  # limit of the bytes read in one turn of the event loop
# one read counts as so many: it may have a hundred messages, which take as long
_READ_LEAST: Final = 100_000

log = logging.getLogger("fedstrata.connection")


class NotMqtt(Exception):
    """The stream has bytes that begin no MQTT packet."""


class Place(Protocol):
    """Destination of a payload. Its owner sets `view` to None when it needs the memory
    otherwise.
    """

    @property
    def view(self) -> memoryview | None:
        """The memory, uint8, of the payload's size."""


FindPlace: TypeAlias = Callable[[str, int], Place | None]
# takes a message: topic, payload, whether it was retained
Received: TypeAlias = Callable[[str, bytes, bool], None]


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
        if sent < 0:
            return (self._head[sent:], self._body.view)
        return (self._body.view[sent:],)


class _SentInfo:
    """Replacement for paho's MQTTMessageInfo that calls `done` when a packet has been sent."""

    __slots__ = ("_set_as_published",)

    def __init__(self, done: Callable[[], None]) -> None:
        self._set_as_published = done


class BulkClient(mqtt.Client):
    """paho's client with a faster path for large payloads; `adopt` converts a stock client.

    `ended`: why the connection ended, if the reason was seen here; `final`: another attempt would
    fail, too.
    """

    ended: str
    final: bool
    _reader: PacketReader
    _taken: MQTTErrorCode

    @classmethod
    def adopt(
        cls,
        client: mqtt.Client,
        *,
        find_place: FindPlace,
        landed: Callable[[str, Place], None],
        received: Received,
    ) -> BulkClient:
        """Convert a stock client that is not yet connected; for the callbacks see PacketReader."""
        client.__class__ = cls
        assert isinstance(client, cls)
        client.ended = ""
        client.final = False
        client._taken = MQTTErrorCode.MQTT_ERR_SUCCESS
        client._reader = PacketReader(
            find_place=find_place, landed=landed, received=received, take=client._take
        )
        return client

    def publish_body(self, topic: str, body: Body, *, done: Callable[[], None]) -> None:
        """Send a QoS 0 message, or queue it; `done` is called when the socket has taken all of
        it.
        """
        name = topic.encode()
        head = bytearray([PUBLISH_QOS0])
        self._pack_remaining_length(head, 2 + len(name) + len(body.view))
        self._pack_str16(head, name)
        packet: Any = _Packet(head, body)
        info: Any = _SentInfo(done)
        entry: Any = {
            "command": mqtt.PUBLISH,
            "mid": 0,
            "qos": 0,
            "pos": 0,
            "to_process": len(packet),
        }
        self._out_packet.append(entry | {"packet": packet, "info": info})
        if len(self._out_packet) == 1:
            self._packet_write()
        if self._out_packet:
            # also after an error, which the event loop's call handles
            self._call_socket_register_write()

    def loop_read(self, max_packets: int = 1) -> MQTTErrorCode:
        """Read from the socket; aiomqtt calls it whenever there is data."""
        budget = _TURN_BYTES
        while True:
            sock: Any = self._sock
            if sock is None:
                return MQTTErrorCode.MQTT_ERR_NO_CONN
            plain = type(sock) is socket.socket  # TLS has no scatter-gather
            # what TLS has decrypted wakes no event loop
            if budget <= 0 and (plain or not sock.pending()):
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
            whole: Any = {
                "command": command,
                "remaining_length": len(packet),
                "packet": packet,
                "pos": 0,
            }
            self._in_packet = whole
            self._taken = self._packet_handle()

    def _packet_write(self) -> MQTTErrorCode:
        """Send the queued packets, as paho does, but without creating MQTT 5's reason and
        properties for each.
        """
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
        if queue:
            return super()._packet_write()
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def _sock_send(self, buf: Any) -> int:
        try:
            if isinstance(buf, tuple):
                return self._send_parts(buf)
            return super()._sock_send(buf)
        except BlockingIOError:
            raise
        except OSError as error:
            self._end(error)
            raise

    def _end(self, error: OSError) -> None:
        closed = isinstance(error, ConnectionResetError | BrokenPipeError | ssl.SSLEOFError)
        self.ended = CLOSED if closed else reason_of(error)
        self.final = is_final(error)

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
    """Return whether the faster path can be used: it is not disabled, and this release of paho is
    known.
    """
    if os.environ.get("FEDSTRATA_MQTT") == "stock":
        return False
    if PAHO_VERSION not in _STAMPS:
        log.warning(
            "paho-mqtt %s is unknown (known: %s): large models are slower",
            PAHO_VERSION,
            ", ".join(_STAMPS),
        )
        return False
    return True


@dataclass(slots=True)
class _Body:
    """The current packet: `left` bytes are still to come, into its payload's place or into
    `packet`.
    """

    command: int
    topic: str
    place: Place | None
    packet: bytearray
    at: int
    left: int


class PacketReader:
    """Parser of MQTT packets that writes each payload once, in its destination. No socket, no
    clock.

        buffers()  destinations of the next bytes: the rest of the current packet, then the head of
        the following one feed(n)    parses n bytes that were written there: complete packets are
        passed on

    Messages of QoS 0 need no answer, so they are passed on here. All other packets are paho's. So a
    chunk of 1 MB is copied once, from the kernel to the model's row, and the system call that
    completes it also reads the next packet's head.

    `find_place(topic, bytes)` is called for the payload of each QoS 0 message before it arrives,
    `landed(topic, place)` when it has. A place without memory drops the payload. If there is no
    place, `received` gets the message; a retained one has no other place than one that drops it.
    For all other packets, `take(command, packet)` gets the first byte and the bytes after the
    remaining length.
    """

    def __init__(
        self,
        *,
        find_place: FindPlace,
        landed: Callable[[str, Place], None],
        received: Received,
        take: Callable[[int, bytearray], None],
    ) -> None:
        self._find_place = find_place
        self._landed = landed
        self._received = received
        self._take = take
        self._head = memoryview(bytearray(HEAD_BYTES))
        self._filled = 0
        self._body: _Body | None = None

    def buffers(self) -> list[memoryview]:
        """Return the destinations of the next bytes, in this order."""
        body = self._body
        head = self._head[self._filled :]
        if body is None:
            return [head]
        if body.place is None:
            return [memoryview(body.packet)[body.at :], head]
        if body.place.view is None:  # no longer wanted
            rest = _SCRATCH[: body.left]
            if len(rest) == body.left:
                return [rest, head]
            return [rest]
        return [body.place.view[body.at :], head]

    def feed(self, count: int) -> None:
        """Parse the next `count` bytes, which are in `buffers()`. Raises NotMqtt, and what the
        callbacks raise.
        """
        body = self._body
        if body is not None:
            here = min(count, body.left)
            body.at = body.at + here
            body.left = body.left - here
            count -= here
            if body.left:
                return
            self._end(body)
        self._filled += count
        start = 0
        while self._body is None and (begun := self._begin(start)) is not None:
            body, start = begun
            if body.left:
                self._body = body
            else:
                self._end(body)
        rest = bytes(self._head[start : self._filled])
        self._head[: len(rest)] = rest
        self._filled = len(rest)

    def _begin(self, start: int) -> tuple[_Body, int] | None:
        """Return the packet at `start` with its available bytes, and their end; None if its head is
        incomplete.
        """
        head = self._head
        stop = self._filled
        length = 0
        for at in range(start + 1, start + 6):
            if at == start + 5:
                raise NotMqtt("a remaining length of more than four bytes")
            if at >= stop:
                return None
            length |= (head[at] & 127) << 7 * (at - start - 1)
            if head[at] < 128:
                break
        begin = at + 1
        end = begin + length
        command = head[start]
        topic = ""
        place = None
        if command in _QOS0 and length > 2:
            payload = min(begin + 2 + int.from_bytes(head[begin : begin + 2], "big"), end)
            if max(begin + 2, payload) > stop and (start or stop < HEAD_BYTES):
                # the topic is incomplete; a topic longer than `_head` is not fedstrata's
                return None
            if begin + 2 < payload <= stop and payload < end:
                topic = str(head[begin + 2 : payload], "utf-8", "replace")
                place = self._find_place(topic, end - payload)
                if place is not None and place.view is not None and command & RETAINED:
                    place = None
                begin = begin if place is None else payload
            elif payload > stop and length > OTHER_MOST:
                # whoever may publish below one of our filters may also use such a topic
                place = SKIPPED
        if place is None and not topic and length > OTHER_MOST:
            raise NotMqtt(f"a packet of {length} bytes without a topic")
        here = head[begin : min(end, stop)]
        size = end - begin if place is None else 0
        packet = bytearray(size)
        target = memoryview(packet) if place is None else place.view
        if target is not None:
            target[: len(here)] = here
        body = _Body(command, topic, place, packet, len(here), end - begin - len(here))
        return body, begin + len(here)

    def _end(self, body: _Body) -> None:
        self._body = None
        if body.place is not None:
            self._landed(body.topic, body.place)
            return
        packet = memoryview(body.packet)
        payload = 2 + int.from_bytes(packet[:2], "big")
        if body.command in _QOS0 and 2 < payload <= len(packet):
            topic = body.topic or str(packet[2:payload], "utf-8", "replace")
            self._received(topic, bytes(packet[payload:]), bool(body.command & RETAINED))
        else:
            self._take(body.command, body.packet)
