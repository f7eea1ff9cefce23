"""State of a receiver's fetches, and the events at their end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from common.protocol.messages import Manifest
from common.protocol.topics import ChunkTopic

PATIENCE_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Fetched:
    """Blob `blob` of `owner` is complete in its buffer, with every chunk checked.

    `rate`: bytes per second between the arrivals of the first and the last chunk, None if they arrived together.
    """

    owner: str
    blob: str
    rate: float | None = None


class FetchFailure(Enum):
    """Why a blob is not available."""

    GONE = "its owner no longer holds it"
    DAMAGED = "wrong digests"


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The blob is not available from this owner."""

    owner: str
    blob: str
    cause: FetchFailure
    reason: str


ReceiverEvent: TypeAlias = Fetched | FetchFailed


@dataclass(slots=True)
class Fetch:
    """The transfer of one blob from its owner."""

    owner: str
    manifest: Manifest
    buffer: memoryview
    lacking: npt.NDArray[np.bool_]
    left: int
    window: int
    pace_s: float = 0.0  # the time of a chunk on the owner's link, if its rate is declared
    share: float = 1.0  # of a slot
    seen: dict[str, int] = field(default_factory=dict)
    trusted: set[str] = field(default_factory=set)  # streams with a number since the last restart, which undoes others'
    since_ask: int = 0
    due: bool = True
    restart: bool = True
    damaged: int = 0  # since the last valid one
    spoilt_at: float = 0.0
    waits_since: float = 0.0  # before it asks again
    moved: float = 0.0  # since then it has a slot, or has received nothing valid
    patience_s: float = PATIENCE_S
    starved: int = 0  # times since the last valid chunk
    first_at: float | None = None
    since_first: int = 0

    def rate(self, now: float) -> float | None:
        """Return bytes per second from the first chunk's arrival to now, None if unknown."""
        seconds = now - self.first_at if self.first_at is not None else 0.0
        return self.since_first / seconds if self.since_first and seconds > 0 else None


@dataclass(slots=True)
class Landing:
    """A chunk that is being written to its destination; `view` is set to None when its fetch ends."""

    topic: ChunkTopic
    view: memoryview | None
