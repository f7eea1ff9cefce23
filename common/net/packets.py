"""MQTT packets from a byte stream, each payload written once, where its receiver wants it. No socket, no clock.

    buffers()  where the next bytes go: the rest of the packet under way, then the head of what follows it
    feed(n)    so many bytes were written there: complete packets are handed on

So a 1 MB chunk crosses from the kernel to the model's row by one copy, and the system call that ends it brings the
next packet's head as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

HEAD_BYTES: Final = 4096
SCRATCH_BYTES: Final = 65_536
PUBLISH_QOS0: Final = 0x30


class NotMqtt(Exception):
    """The stream holds what no MQTT packet begins with."""


class Place(Protocol):
    """Where a payload is written. Its owner takes `view` away when the memory is needed otherwise."""

    @property
    def view(self) -> memoryview | None:
        """Return the memory, uint8, of the payload's size."""


FindPlace: TypeAlias = Callable[[str, int], Place | None]


@dataclass(slots=True)
class _Body:
    """The packet under way: `left` bytes of it are to come, into the place of its payload or into `packet`."""

    command: int
    topic: str
    place: Place | None
    packet: bytearray
    at: int
    left: int


class PacketReader:
    """Cuts a stream into packets.

    `find_place(topic, bytes)` is asked for the payload of each QoS 0 message; `landed(topic, place)` follows when it
    is there. Where there is no place, and for all other packets, `take(command, packet)` gets the first byte and what
    follows the remaining length.
    """

    def __init__(
        self,
        *,
        find_place: FindPlace,
        landed: Callable[[str, Place], None],
        take: Callable[[int, bytearray], None],
    ) -> None:
        self._find_place = find_place
        self._landed = landed
        self._take = take
        self._head = memoryview(bytearray(HEAD_BYTES))
        self._filled = 0
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._body: _Body | None = None

    def buffers(self) -> list[memoryview]:
        """Return where the next bytes are to be written, in this order."""
        body, head = self._body, self._head[self._filled :]
        if body is None:
            return [head]
        if body.place is None:
            return [memoryview(body.packet)[body.at :], head]
        if body.place.view is None:  # nobody wants it any more
            rest = self._scratch[: body.left]
            return [rest, head] if len(rest) == body.left else [rest]
        return [body.place.view[body.at :], head]

    def feed(self, count: int) -> None:
        """Take the next `count` bytes, which lie in `buffers()`. Raises NotMqtt, and what the callbacks raise."""
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
        """Return the packet at `start` with as much as is there, and where that ends; None = its head is cut."""
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
        if command == PUBLISH_QOS0 and length > 2:
            payload = min(begin + 2 + int.from_bytes(head[begin : begin + 2], "big"), end)
            if max(begin + 2, payload) > stop and (start or stop < HEAD_BYTES):
                return None  # the topic is still to come; one that is longer than `_head` is none of ours
            if begin + 2 < payload <= stop and payload < end:
                topic = str(head[begin + 2 : payload], "utf-8", "replace")
                place = self._find_place(topic, end - payload)
                begin = begin if place is None else payload
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
        else:
            self._take(body.command, body.packet)
