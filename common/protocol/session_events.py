"""What both kinds of session report, and what they read of the kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from common.accounting.traffic import TcpStats
from common.protocol.fetches import ReceiverEvent
from common.protocol.messages import Probe, Probed


class ByteMeter(Protocol):
    """What the kernel has carried on the connection."""

    def sample(self) -> TcpStats:
        """Return the counts of all its sockets so far."""

    def received(self) -> int:
        """Return the bytes received on the present socket, -1 where nobody knows."""


@dataclass(frozen=True, slots=True)
class NameTaken:
    """Another living node has this node's name, in run `run`."""

    run: str


@dataclass(frozen=True, slots=True)
class BrokerAway:
    """The broker has been away for `idle_s`."""


@dataclass(frozen=True, slots=True)
class ProbeReceived:
    """A peer measures the link, or answers a measurement."""

    peer: str
    message: Probe | Probed


@dataclass(frozen=True, slots=True)
class NoiseFetched:
    """A fetch of noise has ended."""

    result: ReceiverEvent
