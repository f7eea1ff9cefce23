"""Network namespaces connected by shaped veth pairs: hosts and links on one machine, emulated by
the Linux kernel.

The namespaces have no names. A namespace and its interfaces exist as long as a process, a socket or
a descriptor holds it, so they vanish with their owner and need no cleanup. A thread enters the
namespace and starts child processes there, so signals reach each role's process directly.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from fedstrata.common.errors import InvalidExperiment
from fedstrata.deploy.links import kernel
from fedstrata.deploy.links.kernel import CommandRefused, shaping, single_frames

_CLONE_NEWNET: Final = 0x40000000
_PRESENT: Final = "/proc/thread-self/ns/net"
# no namespace sees this machine's own network
_ADDRESSES: Final = ipaddress.IPv4Network("10.0.0.0/8")
_IPV6: Final = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")
_FORWARDING: Final = Path("/proc/sys/net/ipv4/ip_forward")


class Namespace:
    """One network namespace, with loopback up and IPv6 off. It vanishes after `close` and its last
    process's end.
    """

    def __init__(self) -> None:
        """Create the namespace. Raises InvalidExperiment if this machine or this user cannot."""
        present = os.open(_PRESENT, os.O_RDONLY)
        try:
            _call("unshare", _CLONE_NEWNET)
            try:
                self._descriptor = os.open(_PRESENT, os.O_RDONLY)
            finally:
                _call("setns", present, _CLONE_NEWNET)
        except OSError as error:
            raise _impossible(
                f"the kernel refused to create a network namespace: {error.strerror}",
                "Run as root, or under `unshare --map-root-user --net` where that is allowed.",
            ) from None
        finally:
            os.close(present)
        self.batch("ip", ["link set lo up"])
        # IPv6 would send router solicitations on every link, some hundred bytes, if it cannot be
        # turned off.
        with self.entered(), suppress(OSError):
            _IPV6.write_text("1")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter the namespace with this thread: its new sockets and child processes belong to it."""
        present = os.open(_PRESENT, os.O_RDONLY)
        try:
            _call("setns", self._descriptor, _CLONE_NEWNET)
            yield
        finally:
            _call("setns", present, _CLONE_NEWNET)
            os.close(present)

    def forward(self) -> None:
        """Enable forwarding between its interfaces."""
        with self.entered():
            _FORWARDING.write_text("1")

    @property
    def path(self) -> str:
        """The path by which `ip` finds the namespace while this process holds it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def batch(self, program: str, lines: Iterable[str]) -> None:
        """Run `ip` or `tc` commands inside the namespace. Raises InvalidExperiment with the
        program's message.
        """
        try:
            with self.entered():
                kernel.batch(program, lines)
        except CommandRefused as error:
            raise _impossible(
                error.problem, error.remedy or "Run as root, on a kernel with veth and sch_tbf."
            ) from None

    def close(self) -> None:
        """Release the namespace."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class End:
    """One interface of a veth pair: it sends at `mbit` Mbit/s, None = unlimited, and delays by
    `delay_ms`.
    """

    interface: str
    address: str
    child: str
    mbit: float | None
    delay_ms: float


@dataclass(frozen=True, slots=True)
class VethPair:
    """A link between two hosts: interface `down<number>` at the parent's end, `up<number>` at the
    child's.

    Each end sends at its direction's rate in Mbit/s, None = unlimited, and delays what it sends by
    `delay_ms`. `child` is the node whose link it is; `parent_host` and `child_host` are the hosts
    of the two ends.
    """

    number: int
    child: str
    parent_host: str
    child_host: str
    up_mbit: float | None = None
    down_mbit: float | None = None
    delay_ms: float = 0.0

    @property
    def parent_address(self) -> str:
        """IPv4 address of the parent's end, unique in the lab."""
        return str(_ADDRESSES[2 * self.number])

    @property
    def child_address(self) -> str:
        """IPv4 address of the child's end."""
        return str(_ADDRESSES[2 * self.number + 1])

    def pair(self, child_namespace: str) -> str:
        """Return the `ip` command that creates both interfaces, to be run at the parent's host."""
        return (
            f"link add down{self.number} type veth peer name up{self.number} netns "
            f"{child_namespace}"
        )

    def ends(self, host: str) -> list[End]:
        """Return the ends on a host."""
        both = {
            self.parent_host: End(
                f"down{self.number}", self.parent_address, self.child, self.down_mbit, self.delay_ms
            ),
            self.child_host: End(
                f"up{self.number}", self.child_address, self.child, self.up_mbit, self.delay_ms
            ),
        }
        return [end for place, end in both.items() if place == host]


@contextmanager
def joined(hosts: Iterable[str], wires: Sequence[VethPair]) -> Iterator[Mapping[str, Namespace]]:
    """Create a namespace for each host and connect them by shaped veth pairs. Raises
    InvalidExperiment.
    """
    with ExitStack() as stack:
        spaces = {host: stack.enter_context(Namespace()) for host in hosts}
        for host, space in spaces.items():
            space.batch(
                "ip",
                [
                    wire.pair(spaces[wire.child_host].path)
                    for wire in wires
                    if wire.parent_host == host
                ],
            )
        for host, space in spaces.items():
            ends = [end for wire in wires for end in wire.ends(host)]
            space.batch("ip", [line for end in ends for line in addressing(end)])
            shaped = [shaping(end.interface, mbit=end.mbit, delay_ms=end.delay_ms) for end in ends]
            space.batch("tc", [line for lines in shaped for line in lines])
        yield spaces


def addressing(end: End) -> list[str]:
    """Return the `ip` commands that bring up one end of a veth pair."""
    device = f"dev {end.interface}"
    return [
        f"addr add {end.address}/31 {device}",
        f"link set {device} alias {end.child}",
        *single_frames(end.interface, end.mbit),
        f"link set {device} up",
    ]


def _call(name: str, *arguments: int) -> None:
    """Call a function of the C library that Python 3.11 does not wrap. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _impossible(problem: str, remedy: str) -> InvalidExperiment:
    return InvalidExperiment("namespaces", "on", problem, remedy)
