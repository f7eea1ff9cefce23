"""The largest packet that a broker takes: as it reports by MQTT 5, or as packets to ourselves show.

Some brokers report no limit and drop what is larger without a word (mosquitto by
`message_size_limit`). On a loaded machine or a slow link a trial may stay unanswered, which is
neither a limit nor its absence.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Final

from fedstrata.common.errors import ConnectionFailed, InvalidExperiment
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.plain_client import PlainClient, connected, pump, reported_limit

LEAST_BYTES: Final = 33_792  # a packet with the smallest chunk
ANSWER_S: Final = 2.0  # for a small packet to come back, in the first of the trials
TRY_S: Final = 4.0  # for a large one
TRIALS: Final = 3  # each waits for twice as long as the one before
TRIES: Final = 2  # of a packet that does not come back
BEGIN_S: Final = 0.2  # between packets until one comes back

log = logging.getLogger("fedstrata.connection")


@dataclass(frozen=True, slots=True)
class PacketLimit:
    """What is known of a broker's largest packet, bytes.

    Packets of up to `passes` bytes pass; those of `dropped` bytes and more are dropped, inf: none
    that is known. What lies in between may pass.
    """

    passes: float
    dropped: float = inf

    @property
    def unknown(self) -> bool:
        """Whether nothing is known but what every broker must take."""
        return self.passes == LEAST_BYTES and self.dropped == inf


UNLIMITED: Final = PacketLimit(inf)
UNKNOWN: Final = PacketLimit(LEAST_BYTES)


async def packet_limit(address: BrokerAddress, *, topic: str, most: int) -> PacketLimit:
    """Return the packets that a broker takes, as reported or, up to `most` bytes, as tried on a
    topic of our own.

    A trial without an answer is repeated; if all are, the limit is unknown.
    """
    reported = await reported_limit(address)
    if reported is not None:
        return PacketLimit(reported, reported + 1)
    found = UNKNOWN
    for trial in range(TRIALS):
        try:
            found = await asyncio.to_thread(
                largest_packet, address, topic, most, patience=2.0**trial
            )
        except (ConnectionFailed, InvalidExperiment, OSError, ValueError):
            continue
        if not found.unknown:
            break
    if found.unknown:
        _warn_unknown(str(address))
    elif found.passes < most and found.dropped < inf:
        _warn_dropped(str(address), int(found.dropped))
    return found


@cache  # once a process, which may have many devices
def _warn_dropped(broker: str, size: int) -> None:
    log.warning(
        "broker %s drops packets of %d bytes and does not report it: models are sent in smaller "
        "ones. Raise its limit "
        "(mosquitto: message_size_limit).",
        broker,
        size,
    )


@cache
def _warn_unknown(broker: str) -> None:
    log.warning(
        "broker %s: %d trials of its largest packet stayed unanswered: models are sent in packets "
        "of %d bytes",
        broker,
        TRIALS,
        LEAST_BYTES,
    )


@dataclass(frozen=True, slots=True)
class _Trial:
    """Whether a packet passes, None if that cannot be found out; `carried_s`: what it took beyond a
    small packet.
    """

    passes: bool | None
    carried_s: float = 0.0


_NO_ANSWER: Final = _Trial(None)


def largest_packet(
    address: BrokerAddress, topic: str, most: int, *, patience: float = 1.0
) -> PacketLimit:
    """Try packets of `most` bytes, its halves, and the smallest one; UNLIMITED if `most` passes.

    A size that the link would not carry in time, by the smallest packet's seconds, is not tried.
    `patience`: times the usual seconds. Raises ConnectionFailed.
    """
    least = _try(address, topic, LEAST_BYTES, ANSWER_S * patience)
    if least.passes is None:
        return UNKNOWN
    if not least.passes:
        return PacketLimit(LEAST_BYTES - 1, LEAST_BYTES)
    size = most
    dropped = inf
    while size > LEAST_BYTES:
        if least.carried_s * size <= TRY_S * patience * LEAST_BYTES:
            passes = _try(address, topic, size, TRY_S * patience).passes
            if passes is None:
                return PacketLimit(LEAST_BYTES, dropped)
            if passes:
                if size == most:
                    return UNLIMITED
                return PacketLimit(size, dropped)
            dropped = size
        size //= 2
    if most <= LEAST_BYTES:
        return UNLIMITED
    return PacketLimit(LEAST_BYTES, dropped)


def _try(address: BrokerAddress, topic: str, size: int, patience_s: float) -> _Trial:
    """Try a packet, with small ones before and after it.

    A cluster of brokers may lose what comes right after a subscription that it has confirmed, and
    any broker may lose one message: a packet is dropped when it is twice.
    """
    with connected(address) as client:
        if not client.subscribe([topic]):
            return _NO_ANSWER
        trip_s = _begins(client, topic, patience_s)
        if trip_s is None:
            return _NO_ANSWER
        for _ in range(TRIES):
            client.messages.clear()
            began = time.monotonic()
            client.publish(topic, bytes(size - len(topic) - 7))
            client.publish(topic, b"")
            dropped = pump((client,), lambda: 0 in _lengths(client), patience_s)
            if max(_lengths(client), default=0) > 1:
                return _Trial(True, max(0.0, time.monotonic() - began - trip_s))
            if not dropped:
                ended = size > LEAST_BYTES and not client.turn()  # some disconnect who sends it
                if ended:
                    return _Trial(False)
                return _NO_ANSWER
        return _Trial(False)


def _begins(client: PlainClient, topic: str, patience_s: float) -> float | None:
    """Return the seconds of a small packet's round trip, sent until one comes back; None if none
    does.
    """
    deadline = time.monotonic() + patience_s
    while (began := time.monotonic()) < deadline:
        client.publish(topic, b"?")
        if pump((client,), lambda: bool(client.messages), BEGIN_S):
            return time.monotonic() - began
    return None


def _lengths(client: PlainClient) -> list[int]:
    return [length for _, length, _ in client.messages]
