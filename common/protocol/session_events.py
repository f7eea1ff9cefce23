"""Events of both kinds of session, and the session's interface to the kernel's byte counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from common.accounting.traffic import TcpStats
from common.protocol.fetches import ReceiverEvent
from common.protocol.messages import Probe, Probed


class ByteMeter(Protocol):
    """Byte counts of the connection, by the kernel."""

    def sample(self) -> TcpStats:
        """Return the counts of all its sockets so far."""

    def received(self) -> int:
        """Return the bytes received on the present socket, -1 if unknown."""


@dataclass(frozen=True, slots=True)
class NameTaken:
    """Another living node has this node's name, in run `run`."""

    run: str


@dataclass(frozen=True, slots=True)
class BrokerAway:
    """The broker has been away for `idle_s`."""


@dataclass(frozen=True, slots=True)
class BrokerDrops:
    """The broker has dropped `lost` chunks for this node, while `arrived` others came; reported once."""

    lost: int
    arrived: int


@dataclass(frozen=True, slots=True)
class ProbeReceived:
    """A peer calibrates the link, or replies to a calibration."""

    peer: str
    message: Probe | Probed


@dataclass(frozen=True, slots=True)
class NoiseFetched:
    """A fetch of noise has ended."""

    result: ReceiverEvent
