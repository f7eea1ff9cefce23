"""Parser of MQTT packets from a byte stream that writes each payload once, in its destination. No socket, no clock.

    buffers()  destinations of the next bytes: the rest of the current packet, then the head of the following one
    feed(n)    parses n bytes that were written there: complete packets are passed on

Messages of QoS 0 need no answer, so they are passed on here. All other packets are paho's.

So a chunk of 1 MB is copied once, from the kernel to the model's row, and the system call that completes it also reads
the next packet's head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

HEAD_BYTES: Final = 4096
_SCRATCH: Final = memoryview(bytearray(65_536))  # for bytes that nobody reads, of all connections of this process
PUBLISH_QOS0: Final = 0x30
RETAINED: Final = 0x01
OTHER_MOST: Final = 1 << 20  # bytes of a packet without a payload, such as an acknowledgement of subscriptions
_QOS0: Final = (PUBLISH_QOS0, PUBLISH_QOS0 | RETAINED)


class NotMqtt(Exception):
    """The stream has bytes that begin no MQTT packet."""


class Place(Protocol):
    """Destination of a payload. Its owner sets `view` to None when it needs the memory otherwise."""

    @property
    def view(self) -> memoryview | None:
        """The memory, uint8, of the payload's size."""


FindPlace: TypeAlias = Callable[[str, int], Place | None]
Received: TypeAlias = Callable[[str, bytes, bool], None]  # takes a message: topic, payload, whether it was retained


@dataclass(frozen=True, slots=True)
class _Nowhere:
    """The place of a payload that nobody can want."""

    view: None = None


_NOWHERE: Final = _Nowhere()


@dataclass(slots=True)
class _Body:
    """The current packet: `left` bytes are still to come, into its payload's place or into `packet`."""

    command: int
    topic: str
    place: Place | None
    packet: bytearray
    at: int
    left: int


class PacketReader:
    """Splits a stream into packets.

    `find_place(topic, bytes)` is called for the payload of each QoS 0 message before it arrives, `landed(topic, place)`
    when it has. A place without memory drops the payload. If there is no place, `received` gets the message; a retained
    one has no other place than one that drops it. For all other packets, `take(command, packet)` gets the first byte
    and the bytes after the remaining length.
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
        body, head = self._body, self._head[self._filled :]
        if body is None:
            return [head]
        if body.place is None:
            return [memoryview(body.packet)[body.at :], head]
        if body.place.view is None:  # no longer wanted
            rest = _SCRATCH[: body.left]
            return [rest, head] if len(rest) == body.left else [rest]
        return [body.place.view[body.at :], head]

    def feed(self, count: int) -> None:
        """Parse the next `count` bytes, which are in `buffers()`. Raises NotMqtt, and what the callbacks raise."""
        body = self._body
        if body is not None:
            here = min(count, body.left)
            body.at, body.left = body.at + here, body.left - here
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
        """Return the packet at `start` with its available bytes, and their end; None if its head is incomplete."""
        head, stop = self._head, self._filled
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
        command, topic, place = head[start], "", None
        if command in _QOS0 and length > 2:
            payload = min(begin + 2 + int.from_bytes(head[begin : begin + 2], "big"), end)
            if max(begin + 2, payload) > stop and (start or stop < HEAD_BYTES):
                return None  # the topic is incomplete; a topic longer than `_head` is not fedstrata's
            if begin + 2 < payload <= stop and payload < end:
                topic = str(head[begin + 2 : payload], "utf-8", "replace")
                place = self._find_place(topic, end - payload)
                if place is not None and place.view is not None and command & RETAINED:
                    place = None
                begin = begin if place is None else payload
            elif payload > stop and length > OTHER_MOST:
                place = _NOWHERE  # whoever may publish below one of our filters may also use such a topic
        if place is None and not topic and length > OTHER_MOST:
            raise NotMqtt(f"a packet of {length} bytes without a topic")
        here = head[begin : min(end, stop)]
        packet = bytearray(end - begin if place is None else 0)
        target = memoryview(packet) if place is None else place.view
        if target is not None:
            target[: len(here)] = here
        return _Body(command, topic, place, packet, len(here), end - begin - len(here)), begin + len(here)

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
