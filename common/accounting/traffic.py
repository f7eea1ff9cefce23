"""Byte counts of a link, by its two ends and their kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from operator import add, attrgetter
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class TcpStats:
    """Kernel statistics of a node's connections to one broker, summed across reconnections.

    Bytes are TCP payload, each counted once: `sent` as acknowledged by the broker's kernel,
    `received` as arrived. `retransmitted` bytes come on top. Segments are packets on the wire,
    including bare acknowledgements. `rtt_us` is the last smoothed round trip time, `rtt_min_us` the
    smallest, 0 if unknown. Of the `connections`, `unmeasured` had no statistics and
    `retransmitted_unknown` no count of retransmitted bytes.
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
        if later == NO_WIRE:
            return self
        least = min(self.rtt_min_us or later.rtt_min_us, later.rtt_min_us or self.rtt_min_us)
        times = [later.rtt_us or self.rtt_us, least]
        return TcpStats(*map(add, _SUMMED(self), _SUMMED(later)), *times)

    def __sub__(self, earlier: TcpStats) -> TcpStats:
        """Return the difference since an earlier sample; the connection of both samples counts."""
        since = (
            max(0, mine - others)
            for mine, others in zip(_GROWING(self), _GROWING(earlier), strict=True)
        )
        return TcpStats(*since, *_STATE(self))

    @property
    def measured(self) -> bool:
        """Whether these are the bytes of all connections."""
        return self.connections > 0 and not self.unmeasured


NO_WIRE: Final = TcpStats()
_NAMES: Final = tuple(f.name for f in fields(TcpStats))
_GROWING = attrgetter(*_NAMES[:6])
_STATE = attrgetter(*_NAMES[6:])
_SUMMED = attrgetter(*_NAMES[:9])
WIRE_COUNTS: Final = attrgetter(*_NAMES)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one link, counted by one end since its first contact with the other end's ledger.

    `payload`: bytes of blobs, or message bodies; `message`: whole MQTT packets; `wire`: the
    connection of the link's lower end, which carries only this link. `extras`: vectors behind a
    model in its blob. `frozen`: the model's frozen arrays, which go down once.
    """

    sent_model_payload: int = 0
    sent_model_message: int = 0
    sent_control_payload: int = 0
    sent_control_message: int = 0
    received_model_payload: int = 0
    received_model_message: int = 0
    received_control_payload: int = 0
    received_control_message: int = 0
    sent_extras_payload: int = 0
    sent_extras_message: int = 0
    received_extras_payload: int = 0
    received_extras_message: int = 0
    sent_frozen_payload: int = 0
    sent_frozen_message: int = 0
    received_frozen_payload: int = 0
    received_frozen_message: int = 0
    wire: TcpStats = NO_WIRE

    @classmethod
    def of(cls, counts: Iterable[int], wire: TcpStats) -> Traffic:
        """Return the traffic with these counts, in the order of the fields."""
        values: list[Any] = [*counts, wire]
        return cls(*values)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(add, _COUNTS(self), _COUNTS(other)))

    def __sub__(self, other: Traffic) -> Traffic:
        """Return the difference, at least 0: a child may report less than before."""
        if other == NOTHING:
            return self
        counts = (
            max(0, mine - others) for mine, others in zip(BYTES(self), BYTES(other), strict=True)
        )
        return Traffic.of(counts, self.wire - other.wire)

    @property
    def sent(self) -> int:
        """All MQTT bytes sent."""
        blobs = self.sent_model_message + self.sent_extras_message + self.sent_frozen_message
        return blobs + self.sent_control_message

    @property
    def received(self) -> int:
        """All MQTT bytes received."""
        blobs = (
            self.received_model_message
            + self.received_extras_message
            + self.received_frozen_message
        )
        return blobs + self.received_control_message

    @property
    def carried_models(self) -> int:
        """Bytes of blobs on the wire, including unfinished chunks; 0 without kernel statistics.

        Includes acknowledgements and similar packets, a few bytes per message.
        """
        control = self.sent_control_message + self.received_control_message
        if self.wire.measured:
            return max(0, self.wire.sent + self.wire.received - control)
        return 0


_COUNTS: Final = attrgetter(*(f.name for f in fields(Traffic)))
BYTE_FIELDS: Final = tuple(f.name for f in fields(Traffic) if f.name != "wire")
BYTES: Final = attrgetter(*BYTE_FIELDS)
NOTHING: Final = Traffic()


@dataclass(frozen=True, slots=True)
class Measured:
    """Calibration of a link before the run: bytes per second, 0 if unknown, and the MQTT bytes of
    its probes.
    """

    up: float = 0.0
    down: float = 0.0
    up_bytes: int = 0
    down_bytes: int = 0
