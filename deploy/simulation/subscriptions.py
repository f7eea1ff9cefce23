"""The topic filters of an MQTT broker as a tree of topic levels: a lookup takes one step per level."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

_S = TypeVar("_S")


@dataclass(slots=True)
class _Level(Generic[_S]):
    subscribers: dict[_S, int] = field(default_factory=dict)
    below: dict[str, _Level[_S]] = field(default_factory=dict)


class SubscriptionTree(Generic[_S]):
    """Subscribers by topic filter, with their QoS. Lookups return them in the order of subscription."""

    def __init__(self) -> None:
        self._root: _Level[_S] = _Level()

    def add(self, topic_filter: str, subscriber: _S, qos: int) -> None:
        """Add a subscription; it replaces an equal one."""
        level = self._root
        for part in topic_filter.split("/"):
            level = level.below.setdefault(part, _Level())
        level.subscribers[subscriber] = qos

    def remove(self, topic_filter: str, subscriber: _S) -> None:
        """Remove an existing subscription."""
        passed: list[tuple[_Level[_S], str]] = []
        level = self._root
        for part in topic_filter.split("/"):
            passed.append((level, part))
            level = level.below[part]
        del level.subscribers[subscriber]
        for above, part in reversed(passed):
            if above.below[part].subscribers or above.below[part].below:
                break
            del above.below[part]

    def subscribers(self, topic: str) -> dict[_S, int]:
        """Return each subscriber of a topic once, with the highest QoS of its subscriptions."""
        found: dict[_S, int] = {}
        levels = [self._root]
        for depth, part in enumerate(topic.split("/")):
            wild = depth > 0 or not topic.startswith("$")
            following = []
            for level in levels:
                if wild and (rest := level.below.get("#")) is not None:
                    _merge(found, rest.subscribers)
                for name in ("+", part) if wild else (part,):
                    if (next_level := level.below.get(name)) is not None:
                        following.append(next_level)
            levels = following
        for level in levels:
            _merge(found, level.subscribers)
            if (rest := level.below.get("#")) is not None:
                _merge(found, rest.subscribers)
        return found


def matches(topic_filter: str, topic: str) -> bool:
    """Return whether a filter covers a topic."""
    if topic.startswith("$") and topic_filter[:1] in "+#":
        return False
    parts, names = topic_filter.split("/"), topic.split("/")
    for place, part in enumerate(parts):
        if part == "#":
            return True
        if place >= len(names) or part not in ("+", names[place]):
            return False
    return len(parts) == len(names)


def _merge(found: dict[_S, int], subscribers: dict[_S, int]) -> None:
    for subscriber, qos in subscribers.items():
        found[subscriber] = max(qos, found.get(subscriber, 0))
