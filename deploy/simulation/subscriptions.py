"""The topic filters and the retained topics of an MQTT broker as trees of topic levels: a step per level and lookup."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
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


@dataclass(slots=True)
class _Names:
    number: int | None = None  # of the topic that ends here
    below: dict[str, _Names] = field(default_factory=dict)


class TopicTree:
    """Topics, found by a filter in the order in which they were added."""

    def __init__(self, topics: Iterable[str] = ()) -> None:
        self._root = _Names()
        self._numbers = count()
        for topic in topics:
            self.add(topic)

    def add(self, topic: str) -> None:
        """Add a topic that is not there."""
        level = self._root
        for part in topic.split("/"):
            level = level.below.setdefault(part, _Names())
        level.number = next(self._numbers)

    def remove(self, topic: str) -> None:
        """Remove an existing topic."""
        passed: list[tuple[_Names, str]] = []
        level = self._root
        for part in topic.split("/"):
            passed.append((level, part))
            level = level.below[part]
        level.number = None
        for above, part in reversed(passed):
            if above.below[part].below or above.below[part].number is not None:
                break
            del above.below[part]

    def matching(self, topic_filter: str) -> list[str]:
        """Return the topics that a filter covers, as `matches`."""
        found: list[tuple[int, str]] = []
        self._find(self._root, topic_filter.split("/"), (), found)
        return [topic for _, topic in sorted(found)]

    def _find(self, level: _Names, parts: list[str], path: tuple[str, ...], found: list[tuple[int, str]]) -> None:
        if (not parts or parts == ["#"]) and level.number is not None and path:
            found.append((level.number, "/".join(path)))
        if not parts:
            return
        part, rest = parts[0], parts if parts[0] == "#" else parts[1:]
        names = level.below if part in ("+", "#") else (part,)
        for name in names:
            if name in level.below and (path or part == name or not name.startswith("$")):
                self._find(level.below[name], rest, (*path, name), found)


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
