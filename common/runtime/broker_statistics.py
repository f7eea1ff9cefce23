"""What a broker tells of itself, on mosquitto's topics below `$SYS`; another broker tells other things or nothing."""

from __future__ import annotations

from typing import Final

HEAP: Final = "$SYS/broker/heap/current"
DROPPED: Final = "$SYS/broker/publish/messages/dropped"


class Figures:
    """A broker's last word, every ten seconds as mosquitto comes; `told` is empty where it says nothing."""

    topics = (HEAP, DROPPED)

    def __init__(self) -> None:
        self.told: dict[str, int] = {}

    def take(self, topic: str, body: bytes) -> bool:
        """Return whether this was the broker's word, not a node's."""
        if topic not in self.topics:
            return False
        if len(body) <= 19 and body.isdigit():
            self.told[topic] = int(body)
        return True
