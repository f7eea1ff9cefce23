"""The kernel's network by `ip` and `tc` of iproute2: commands that give an interface a rate and a
delay, and routes.

Rates count Ethernet frames without preamble and checksum: a full frame has 1514 bytes, 1448 of them
TCP payload.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Collection, Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final, TypeAlias

from fedstrata.common.errors import InvalidExperiment


class CommandRefused(Exception):
    """A command of `ip` or `tc` that failed: the problem, and the remedy where it is known."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy


def path_of(program: str) -> str:
    """Return the path of `ip` or `tc`. Raises CommandRefused if it is not installed."""
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        raise CommandRefused(
            f"the program {program!r} was not found", "Install iproute2 (apt install iproute2)."
        )
    return found


def batch(program: str, lines: Iterable[str]) -> None:
    """Run commands of `ip` or `tc` up to the first that fails. Raises CommandRefused with the
    program's message.
    """
    _output(program, "-batch", "-", given="\n".join(lines))


def query(program: str, *arguments: str) -> list[dict[str, Any]]:
    """Return what `ip` or `tc` lists. Raises CommandRefused with the program's message."""
    listed: list[dict[str, Any]] = json.loads(_output(program, "-json", *arguments) or "[]")
    return [each for each in listed if each]  # `ip` writes {} for what a filter leaves out


def _output(program: str, *arguments: str, given: str = "") -> str:
    command = [path_of(program), *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        message = " ".join(done.stderr.split())
        remedy = "Run as root (sudo)." if "Operation not permitted" in message else ""
        raise CommandRefused(f"{program}: {message}", remedy)
    return done.stdout


FRAME_BYTES: Final = 1514
BURST_S: Final = 0.02
QUEUE_S: Final = 0.1
QUEUE_FRAMES_LEAST: Final = 32
SINGLE_FRAMES_MOST_MBIT: Final = 200.0
NETEM_PACKETS_LEAST: Final = 1000
NETEM_MBIT: Final = 1000.0  # rate by which netem's queue is sized if the link is unlimited


def single_frames(interface: str, mbit: float | None) -> list[str]:
    """Return the `ip` commands by which senders on a slow shaped interface pass single frames
    (gso_max_segs 1).

    With segmentation offload they would pass packets of 64 KB, of which the shaper drops a part, to
    be sent again; the interface's counters would miss their headers, and the bucket would have to
    hold whole packets. On fast links single frames would need more than a core.
    """
    if mbit is None or mbit > SINGLE_FRAMES_MOST_MBIT:
        return []
    return [f"link set dev {interface} gso_max_segs 1"]


def bucket(mbit: float, *, frame_bytes: int = FRAME_BYTES) -> str:
    """Return the tbf of a rate, as `tc` takes it."""
    rate = mbit * 1e6 / 8
    burst = int(max(2 * frame_bytes, rate * BURST_S))
    limit = burst + int(max(QUEUE_FRAMES_LEAST * frame_bytes, rate * QUEUE_S))
    return f"tbf rate {round(8 * rate)}bit burst {burst} limit {limit}"


def shaping(
    interface: str, *, mbit: float | None, delay_ms: float, frame_bytes: int = FRAME_BYTES
) -> list[str]:
    """Return the `tc` commands that shape an interface's outgoing traffic: tbf for the rate, netem
    for the delay.

    The bucket holds 20 ms of the rate, which compensates for late timers on a busy machine, and at
    least two frames. The queue holds 0.1 s, and at least 32 frames, like that of a home router.
    """
    lines = []
    device = f"dev {interface}"
    if mbit is not None:
        lines.append(f"qdisc add {device} root handle 1: {bucket(mbit, frame_bytes=frame_bytes)}")
    if delay_ms:
        in_flight = (mbit or NETEM_MBIT) * 1e3 * delay_ms / 8 / frame_bytes
        place = "root" if mbit is None else "parent 1:1"
        packets = NETEM_PACKETS_LEAST + int(in_flight)
        lines.append(f"qdisc add {device} {place} netem delay {delay_ms:g}ms limit {packets}")
    return lines


def check_delays(interface: str) -> None:
    """Check on an unshaped interface that the kernel can emulate delays. Raises CommandRefused."""
    batch("tc", shaping(interface, mbit=None, delay_ms=1.0))
    batch("tc", [f"qdisc del dev {interface} root"])


LOOPBACK: Final = "lo"

IpAddress: TypeAlias = IPv4Address | IPv6Address


def addresses_of(host: str) -> list[IpAddress]:
    """Return the addresses of a host, given by name or address. Raises InvalidExperiment."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        problem = f"no address is known: {getattr(error, 'strerror', None) or error}"
        raise InvalidExperiment("--to", host, problem, "Name a host or an address.") from None
    texts = [str(place[0]).partition("%")[0] for *_, place in found]
    return [ip_address(text) for text in dict.fromkeys(texts)]


def interface_to(host: str, addresses: Collection[IpAddress]) -> str:
    """Return the interface that leads to a host, by the first of its addresses with a route. Raises
    InvalidExperiment.

    A host may have addresses of a protocol that this host lacks.
    """
    problem = "it has no address"
    for address in addresses:
        try:
            (route,) = query("ip", "route", "get", str(address))
        except CommandRefused as error:
            problem = error.problem
            continue
        if route["dev"] == LOOPBACK:
            raise InvalidExperiment(
                "--to", host, "this host itself", "Name the host at the link's other end."
            )
        return str(route["dev"])
    raise InvalidExperiment(
        "--to", host, f"no route leads there: {problem}", "Name a host that can be reached."
    )
