"""Subscriptions to streams of chunks: those of the active fetches."""

from __future__ import annotations

from collections.abc import Iterable, Set

from common.protocol import topics
from common.protocol.identity import Identity
from common.protocol.outbox import Output, Subscribe, Unsubscribe


class Streams:
    """The subscriptions of one connection, by (owner, blob)."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._subscribed: frozenset[tuple[str, str]] = frozenset()

    def clear(self) -> None:
        """Note a new connection, which has no subscriptions."""
        self._subscribed = frozenset()

    def to_send(self, wanted: Set[tuple[str, str]]) -> list[Output]:
        """Return the outputs that change the subscriptions to those of the wanted fetches."""
        if wanted == self._subscribed:
            return []
        ended, begun = self._subscribed - wanted, wanted - self._subscribed
        self._subscribed = frozenset(wanted)
        out: list[Output] = [Unsubscribe(self._filters(ended))] if ended else []
        return [*out, Subscribe(self._filters(begun))] if begun else out

    def _filters(self, fetches: Iterable[tuple[str, str]]) -> tuple[str, ...]:
        lab, run, me = self._identity.lab, self._identity.run, self._identity.name
        return tuple(each for owner, blob in sorted(fetches) for each in topics.streams(lab, run, owner, me, blob))
