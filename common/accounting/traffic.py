"""The bytes of a link, as its two ends and their kernels count them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from operator import add, attrgetter, sub
from typing import Final


@dataclass(frozen=True, slots=True)
class TcpStats:
    """What the kernel carried on a node's connections to one broker, summed over reconnections.

    Bytes are the stream's (TCP payload), each counted once: `sent` what the broker's kernel acknowledged, `received`
    what arrived; what had to be sent again, `retransmitted`, comes on top. Segments are packets on the wire, bare
    acknowledgements included. `rtt_us` is the last smoothed round trip time, `rtt_min_us` the least, 0 where there is
    none. Of the `connections`, `unmeasured` ones told nothing, `retransmitted_unknown` ones no retransmitted bytes.
    """

    sent: int = 0
    received: int = 0
    retransmitted: int = 0
    sent_segments: int = 0
    received_segments: int = 0
    retransmitted_segments: int = 0
    connections: int = 0
    unmeasured: int = 0
    retransmitted_unknown: int = 0
    rtt_us: int = 0
    rtt_min_us: int = 0

    def __add__(self, later: TcpStats) -> TcpStats:
        if later == _NO_WIRE:
            return self
        sums = {name: getattr(self, name) + getattr(later, name) for name in _SUMMED}
        least = min(self.rtt_min_us or later.rtt_min_us, later.rtt_min_us or self.rtt_min_us)
        return TcpStats(**sums, rtt_us=later.rtt_us or self.rtt_us, rtt_min_us=least)

    def __sub__(self, earlier: TcpStats) -> TcpStats:
        """Return what was carried since; the connection of both times counts."""
        since = {name: max(0, getattr(self, name) - getattr(earlier, name)) for name in _SUMMED[:6]}
        return replace(self, **since)

    @property
    def measured(self) -> bool:
        """Return whether these are the bytes of all connections."""
        return self.connections > 0 and not self.unmeasured


_NO_WIRE: Final = TcpStats()
_SUMMED: Final = tuple(f.name for f in fields(TcpStats) if not f.name.startswith("rtt"))


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one link, as one end counted them since it met the other's books.

    `payload`: blob bytes, or message bodies; `message`: whole MQTT packets; `wire`: the connection of the link's lower
    end, which carries nothing else.
    """

    sent_model_payload: int = 0
    sent_model_message: int = 0
    sent_control_payload: int = 0
    sent_control_message: int = 0
    received_model_payload: int = 0
    received_model_message: int = 0
    received_control_payload: int = 0
    received_control_message: int = 0
    wire: TcpStats = TcpStats()

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(add, _COUNTS(self), _COUNTS(other)))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*map(sub, _COUNTS(self), _COUNTS(other)))

    @property
    def sent(self) -> int:
        """Return all MQTT bytes sent."""
        return self.sent_model_message + self.sent_control_message

    @property
    def received(self) -> int:
        """Return all MQTT bytes received."""
        return self.received_model_message + self.received_control_message

    @property
    def carried_models(self) -> int:
        """Return the bytes of models that the wire carried, chunks on their way too; 0 where no kernel told.

        Acknowledgements and the like are among them, a few bytes for each message.
        """
        control = self.sent_control_message + self.received_control_message
        return max(0, self.wire.sent + self.wire.received - control) if self.wire.measured else 0


_COUNTS: Final = attrgetter(*(f.name for f in fields(Traffic)))


@dataclass(frozen=True, slots=True)
class Measured:
    """A link before the run: bytes per second, 0 where nobody measured, and the MQTT bytes that measuring cost."""

    up: float = 0.0
    down: float = 0.0
    up_bytes: int = 0
    down_bytes: int = 0
