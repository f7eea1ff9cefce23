"""Bytes by peer, direction and kind, counted when a message is passed to or received from the MQTT client.

`payload`: the bytes of a blob, or the body of a control message; `message`: the whole MQTT packet. Everything else on
the connection (login, subscriptions, presences, acknowledgements, pings) appears only in the kernel's count:
`common.accounting.tcp`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from common.accounting.traffic import Traffic

Direction: TypeAlias = Literal["sent", "received"]
Kind: TypeAlias = Literal["model", "control", "probe"]


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


@dataclass(slots=True)
class Account:
    """The bytes of one connection since its creation, across reconnections."""

    cells: defaultdict[tuple[str, Direction, Kind], Tally] = field(default_factory=lambda: defaultdict(Tally))

    def add(
        self, peer: str, direction: Direction, *, message: int, model: int = 0, control: int = 0, probe: int = 0
    ) -> None:
        """Count one packet of `message` bytes with model, probe or control payload.

        A packet with both a model and control payload (a small model inside its announcement) counts its overhead as
        control.
        """
        if probe:
            cell = self.cells[peer, direction, "probe"]
            cell.payload += probe
            cell.message += message
        if model:
            cell = self.cells[peer, direction, "model"]
            cell.payload += model
            cell.message += model if control else message
        if control:
            cell = self.cells[peer, direction, "control"]
            cell.payload += control
            cell.message += message - model

    def probed(self, peer: str, direction: Direction) -> int:
        """Return the MQTT bytes of probes to or from one peer."""
        return self.cells.get((peer, direction, "probe"), Tally()).message

    def traffic(self, peer: str) -> Traffic:
        """Return the bytes to and from one peer, without wire bytes."""
        counts: list[Any] = []
        for direction in ("sent", "received"):
            for kind in ("model", "control"):
                cell = self.cells.get((peer, direction, kind), Tally())
                counts += [cell.payload, cell.message]
        return Traffic(*counts)
