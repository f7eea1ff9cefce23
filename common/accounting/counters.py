"""Bytes by peer, direction and kind, counted when a message is passed to or received from the MQTT
client.

`payload`: the bytes of a blob, or the body of a control message; `message`: the whole MQTT packet.
Everything else on the connection (login, subscriptions, presences, acknowledgements, pings) appears
only in the kernel's count: `common.accounting.tcp`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, cast

from fedstrata.common.accounting.traffic import BYTE_FIELDS, NO_WIRE, TcpStats, Traffic

Direction: TypeAlias = Literal["sent", "received"]
Kind: TypeAlias = Literal["control", "model", "extras", "frozen", "probe"]

DIRECTIONS: Final[tuple[Direction, ...]] = ("sent", "received")
# those of a run; probes precede it
LINK_KINDS: Final[tuple[Kind, ...]] = ("model", "extras", "frozen", "control")


def packet_bytes(topic: str, body: int, *, qos: int) -> int:
    """Return the size of an MQTT 3.1.1 PUBLISH packet with `body` bytes of payload."""
    remaining = 2 + len(topic) + (2 if qos else 0) + body
    length_bytes = 1 + (remaining > 127) + (remaining > 16_383) + (remaining > 2_097_151)
    return 1 + length_bytes + remaining


@dataclass(slots=True)
class Tally:
    """One cell of the account, in bytes."""

    payload: int = 0
    message: int = 0


_NONE: Final = Tally()


def _counted_in(field: str) -> tuple[Direction, Kind]:
    """Return what a field of Traffic counts."""
    direction, kind, _ = field.split("_")
    return cast(Direction, direction), cast(Kind, kind)


_IN_ORDER: Final = tuple(map(_counted_in, BYTE_FIELDS[::2]))  # of Traffic, two fields for each


@dataclass(slots=True)
class Account:
    """The bytes of one connection since its creation, across reconnections."""

    cells: defaultdict[tuple[str, Direction, Kind], Tally] = field(
        default_factory=lambda: defaultdict(Tally)
    )
    # over peers
    sums: defaultdict[tuple[Direction, Kind], Tally] = field(
        default_factory=lambda: defaultdict(Tally)
    )

    def add(
        self,
        peer: str,
        direction: Direction,
        *,
        message: int,
        control: int = 0,
        model: int = 0,
        extras: int = 0,
        frozen: int = 0,
        probe: int = 0,
    ) -> None:
        """Count one packet of `message` bytes by its payload of each kind.

        The overhead of a packet with several (a small model inside its announcement, a chunk with
        the end of a model and the first extras) counts for the first kind in this order.
        """
        overhead = message - control - model - extras - frozen - probe
        payloads: tuple[tuple[Kind, int], ...]
        payloads = (
            ("control", control),
            ("model", model),
            ("extras", extras),
            ("frozen", frozen),
            ("probe", probe),
        )
        for kind, payload in payloads:
            if payload:
                for tally in (self.cells[peer, direction, kind], self.sums[direction, kind]):
                    tally.payload += payload
                    tally.message += payload + overhead
                overhead = 0

    def reassign(self, counted: str, peer: str, *, payload: int, message: int) -> None:
        """Count control bytes for this peer that were sent, and counted for another one."""
        for name, sign in ((counted, -1), (peer, 1)):
            cell = self.cells[name, "sent", "control"]
            cell.payload += sign * payload
            cell.message += sign * message

    def forget(self, peer: str) -> None:
        """Forget the counts of a peer; they stay in the sums."""
        for cell in [each for each in self.cells if each[0] == peer]:
            del self.cells[cell]

    def probed(self, peer: str, direction: Direction) -> int:
        """Return the MQTT bytes of probes to or from one peer."""
        return self.cells.get((peer, direction, "probe"), Tally()).message

    def traffic(self, peer: str, wire: TcpStats = NO_WIRE) -> Traffic:
        """Return the bytes to and from one peer, with these wire bytes."""
        counts: list[int] = []
        for direction, kind in _IN_ORDER:
            cell = self.cells.get((peer, direction, kind), _NONE)
            counts += (cell.payload, cell.message)
        return Traffic.of(counts, wire)

    def total(self) -> Traffic:
        """Return the bytes to and from all peers."""
        counts: list[int] = []
        for each in _IN_ORDER:
            tally = self.sums.get(each, _NONE)
            counts += (tally.payload, tally.message)
        return Traffic.of(counts, NO_WIRE)
