"""The rates and the round-trip time between this host and a listener, and their comparison with a link's numbers."""

from __future__ import annotations

import math
import socket
import statistics
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from common.errors import ConnectionFailed, NoProgress, WireError
from common.experiment.links import Profile
from common.net.address import host_port
from deploy.links.exchange import (
    MAGIC,
    PATIENCE_S,
    PINGS,
    RATE,
    REQUEST,
    Mode,
    receive_exactly,
    send_noise,
    time_noise,
)

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
