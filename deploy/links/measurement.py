"""Rates and round-trip time between this host and a listener, and their comparison with the numbers of a link.

Both ends do this on one TCP connection; the listener serves one at a time, for a bounded time:

    measuring host                    listener
      | --- magic, mode, seconds ------> |
      | <-- magic ---------------------- |   its turn has come
      | <== ping: bytes, sent back ====> |
      | === up: noise ================> |   the listener times what arrives, and sends the rate
      | <== down: noise =============== |   the measuring host times what arrives, and closes the connection

Rates are those of Ethernet frames, as `tc` counts them: 1514 bytes for 1448 of TCP payload.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import statistics
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Final

from pydantic import ValidationError

from common.accounting.tcp import tcp_info
from common.errors import ConnectionFailed, InvalidExperiment, NoProgress, WireError
from common.experiment.links import LinkSettings, Profile, shipped
from common.experiment.messages import explain
from common.experiment.tables import named
from common.net.address import host_port

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


log = logging.getLogger("fedstrata.links")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 = a free one. Raises InvalidExperiment."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        remedy = "Use an address of this host, or 0.0.0.0, and a free port."
        raise InvalidExperiment("--listen", f"{host}:{port}", error.strerror or str(error), remedy) from None


def serve(listening: socket.socket) -> None:
    """Serve measurements, one connection after another, until the socket is closed. Raises OSError then."""
    while True:
        connection, address = listening.accept()
        with connection:
            try:
                _serve_one(connection)
            except (OSError, NoProgress, WireError) as error:
                log.info("%s: %s", address[0], error)


def _serve_one(connection: socket.socket) -> None:
    connection.settimeout(PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if receive_exactly(connection, len(MAGIC)) != MAGIC:
        raise WireError("no measurement of this release")
    code, seconds = REQUEST.unpack(receive_exactly(connection, REQUEST.size))
    try:
        mode = Mode(code)
    except ValueError:
        raise WireError(f"unknown mode {code!r}") from None
    if not 0 < seconds <= SECONDS_MOST:
        raise WireError(f"{seconds} seconds")
    connection.sendall(MAGIC)
    if mode is Mode.PING:
        for _ in range(PINGS):
            connection.sendall(receive_exactly(connection, 1))
    elif mode is Mode.UP:
        connection.sendall(RATE.pack(time_noise(connection, seconds)))
        discard(connection)
    else:
        send_noise(connection, seconds + PATIENCE_S)


RTT_TOLERANCE_MS: Final = 1.0  # what two hosts take by themselves

_DISCARD: Final = struct.pack("ii", 1, 0)  # SO_LINGER: close at once, without what was not sent yet


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """Rates seen from this host, Mbit/s of Ethernet frames, and the median round-trip time of the idle link, ms."""

    up_mbit: float
    down_mbit: float
    rtt_ms: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A measured number of a link beside the declared one (None: nothing is declared), and whether they agree."""

    name: str
    measured: float
    declared: float | None
    agrees: bool

    @property
    def difference(self) -> float | None:
        """The difference from the declared number, percent of it."""
        return None if self.declared is None else 100 * (self.measured / self.declared - 1)


def measure(host: str, port: int, *, seconds: int) -> MeasuredLink:
    """Measure the link to a listener, each direction for these seconds.

    Raises ConnectionFailed if no listener answers there, NoProgress if a measurement stops.
    """
    with _connected(host, port, Mode.PING, seconds) as sock:
        times = [_ping(sock) for _ in range(PINGS)]
    with _connected(host, port, Mode.UP, seconds) as sock:
        send_noise(sock, seconds + 2 * PATIENCE_S)
        (up,) = RATE.unpack(receive_exactly(sock, RATE.size))
        if not (math.isfinite(up) and up > 0):
            raise ConnectionFailed(f"{host_port(host, port)} sent an impossible rate: {up}")
    with _connected(host, port, Mode.DOWN, seconds) as sock:
        down = time_noise(sock, seconds)
    return MeasuredLink(up, down, 1e3 * statistics.median(times))


def compare(measured: MeasuredLink, link: Profile, tolerance: float) -> list[Comparison]:
    """Return the rates and the round-trip time beside those of a link, twice its delay.

    A round-trip time may differ by `RTT_TOLERANCE_MS` in any case; that of a link without delay is not compared.
    """
    rtt_ms = 2 * link.delay_ms
    return [
        _compared("up_mbit", measured.up_mbit, link.up_mbit, tolerance),
        _compared("down_mbit", measured.down_mbit, link.down_mbit, tolerance),
        _compared("rtt_ms", measured.rtt_ms, rtt_ms or None, max(tolerance, RTT_TOLERANCE_MS / (rtt_ms or 1.0))),
    ]


def _compared(name: str, measured: float, declared: float | None, tolerance: float) -> Comparison:
    return Comparison(name, measured, declared, declared is None or abs(measured / declared - 1) <= tolerance)


@contextmanager
def _connected(host: str, port: int, mode: Mode, seconds: int) -> Iterator[socket.socket]:
    """Open one connection of a measurement; what is still to be sent at the end is discarded."""
    address = host_port(host, port)
    try:
        with socket.create_connection((host, port), timeout=PATIENCE_S) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DISCARD)
            sock.sendall(MAGIC + REQUEST.pack(mode.value, seconds))
            if receive_exactly(sock, len(MAGIC)) != MAGIC:
                raise ConnectionFailed(f"{address} is no listener of this release of fedstrata")
            yield sock
    except NoProgress as error:
        raise NoProgress(f"{address}: {error}. Is another measurement going on there?") from None
    except (OSError, WireError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConnectionFailed(f"{address}: {reason}. Start there: fedstrata links measure --listen") from None


def _ping(sock: socket.socket) -> float:
    """Return the seconds until a byte is back."""
    started = time.monotonic()
    sock.sendall(b"\0")
    receive_exactly(sock, 1)
    return time.monotonic() - started


def link_of(
    profile: str | None, *, up_mbit: float | None, down_mbit: float | None, delay_ms: float | None
) -> LinkSettings:
    """Return a profile's link with the given numbers in place of its own. Raises InvalidExperiment."""
    given = {"profile": profile, "up_mbit": up_mbit, "down_mbit": down_mbit, "delay_ms": delay_ms}
    try:
        return LinkSettings.model_validate(
            named("PROFILE", {key: value for key, value in given.items() if value is not None}, shipped())
        )
    except ValidationError as error:
        raise explain(error, LinkSettings) from None
