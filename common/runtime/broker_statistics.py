"""Statistics that a broker publishes about itself, on mosquitto's topics below `$SYS`.

Other brokers publish other topics or none. The statistics are optional: a broker may refuse the subscription, leave it
unanswered, or close the connection because of it.
"""

from __future__ import annotations

import logging
from typing import Final

HEAP: Final = "$SYS/broker/heap/current"
DROPPED: Final = "$SYS/broker/publish/messages/dropped"
CLOSES_WITHIN_S: Final = 2.0

log = logging.getLogger("fedstrata.broker_statistics")


class BrokerStatistics:
    """The values that a broker published last (mosquitto: every ten seconds), by topic; empty without statistics."""

    topics = (HEAP, DROPPED)

    def __init__(self, broker: str) -> None:
        self.values: dict[str, int] = {}
        self._broker = broker
        self._closes = False  # the broker closed a connection at the subscription
        self._subscribed_at: float | None = None

    def to_subscribe(self, now: float) -> list[str]:
        """Return the topics to subscribe to on a new connection, after the node's own subscriptions."""
        if self._closes:
            return []
        self._subscribed_at = now
        return list(self.topics)

    def disconnected(self, now: float) -> None:
        """Note the loss of a connection: if it directly followed the subscription, do not subscribe again."""
        if self._subscribed_at is not None and now - self._subscribed_at <= CLOSES_WITHIN_S:
            self._closes = True
            log.info("broker %s closed the connection at a subscription to $SYS: no broker statistics", self._broker)
        self._subscribed_at = None

    def take(self, topic: str, body: bytes) -> bool:
        """Return whether this is one of the broker's statistics, not a message of a node."""
        if topic not in self.topics:
            return False
        if len(body) <= 19 and body.isdigit():
            self.values[topic] = int(body)
        return True
