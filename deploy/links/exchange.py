"""What both ends of a measurement do on one TCP connection.

    measuring host                    listener
      | --- magic, mode, seconds ------> |
      | <-- magic ---------------------- |   its turn has come
      | <== ping: bytes, sent back ====> |
      | === up: noise ================> |   the listener times what arrives, and sends the rate
      | <== down: noise =============== |   the measuring host times what arrives, and closes the connection

Rates are those of Ethernet frames, as `tc` counts them: 1514 bytes for 1448 of TCP payload.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from contextlib import suppress
from enum import Enum
from typing import Final

from common.accounting.tcp import tcp_info
from common.errors import NoProgress, WireError

MAGIC: Final = b"fedstrata links 1\n"
REQUEST: Final = struct.Struct("!cB")
RATE: Final = struct.Struct("!d")
SECONDS_MOST: Final = 60
PINGS: Final = 11
PATIENCE_S: Final = 10.0
BYTES_MOST: Final = 1 << 36
WARMUP: Final = 1 / 3  # share of the time in which the bucket empties and TCP finds the rate: not counted

_BLOCK_BYTES: Final = 1 << 17
_HEADERS: Final = {socket.AF_INET: 66, socket.AF_INET6: 86}  # of a segment: Ethernet, IP, TCP with timestamps


class Mode(Enum):
    """What a connection is for, seen from the measuring host."""

    PING = b"p"
    UP = b"u"
    DOWN = b"d"


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """Return this number of bytes. Raises NoProgress after `PATIENCE_S` in all, WireError if the peer closes before."""
    give_up = time.monotonic() + PATIENCE_S
    data = b""
    while len(data) < count:
        _wait(sock, give_up)
        part = sock.recv(count - len(data))
        if not part:
            raise WireError("the connection was closed")
        data += part
    return data


def send_noise(sock: socket.socket, seconds: float) -> None:
    """Send noise until the peer sends or closes, at most for these seconds and `BYTES_MOST`. Raises OSError."""
    noise = memoryview(os.urandom(_BLOCK_BYTES))  # which nothing on the way can compress
    give_up = time.monotonic() + seconds
    sent = 0
    sock.setblocking(False)
    while sent < BYTES_MOST and (left := give_up - time.monotonic()) > 0:
        readable, writable, _ = select.select((sock,), (sock,), (), left)
        if readable:
            break
        if writable:
            sent += sock.send(noise)
    sock.settimeout(PATIENCE_S)


def time_noise(sock: socket.socket, seconds: float) -> float:
    """Receive noise for these seconds and return its rate, Mbit/s of Ethernet frames.

    The first third is not counted. Raises NoProgress if nothing arrives for `PATIENCE_S`, WireError if what arrives is
    too little for a rate.
    """
    buffer = bytearray(_BLOCK_BYTES)
    segment = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    first = mark = last = 0.0
    before = total = 0
    while total < BYTES_MOST and last - first <= seconds:
        _wait(sock, time.monotonic() + PATIENCE_S)
        count = sock.recv_into(buffer)
        if not count:
            break
        last = time.monotonic()
        total += count
        first = first or last
        if not mark and last - first >= seconds * WARMUP:
            mark, before = last, _segments(sock, total, segment)
    if not mark or last == mark:
        raise WireError(f"{total} bytes arrived: too few for a rate")
    frame_bytes = segment + _HEADERS[sock.family]
    return (_segments(sock, total, segment) - before) * frame_bytes * 8e-6 / (last - mark)


def _segments(sock: socket.socket, total: int, segment: int) -> int:
    """Return the segments that have arrived, as the kernel counts them, else as many as carry `total` bytes.

    After a loss the kernel holds back what has arrived already, so bytes come later than their segments: on a slow link
    by up to 20 % of three seconds.
    """
    stats = tcp_info(sock)
    return stats.received_segments if stats is not None else total // segment


def discard(sock: socket.socket) -> None:
    """Receive until the peer closes: closing before would withdraw what was sent last. Raises NoProgress."""
    buffer = bytearray(_BLOCK_BYTES)
    give_up = time.monotonic() + PATIENCE_S
    with suppress(ConnectionResetError):  # the peer has discarded what it had not sent yet
        while True:
            _wait(sock, give_up)
            if not sock.recv_into(buffer):
                return


def _wait(sock: socket.socket, give_up: float) -> None:
    """Wait until there is something to receive. Raises NoProgress if that takes too long."""
    left = give_up - time.monotonic()
    if left <= 0 or not select.select((sock,), (), (), left)[0]:
        raise NoProgress(f"nothing arrived for {PATIENCE_S:g} s")
