"""What a receiver keeps of a blob on its way, and what it reports at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from common.protocol.messages import Manifest

PATIENCE_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Fetched:
    """Blob `blob` of `owner` lies complete in its buffer, every chunk checked.

    `rate`: bytes per second from its first chunk's arrival to its last one's, None where they came together.
    """

    owner: str
    blob: str
    rate: float | None = None


class FetchFailure(Enum):
    """Why a blob cannot be had."""

    GONE = "its owner no longer holds it"
    DAMAGED = "wrong digests"


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The blob cannot be had from this owner."""

    owner: str
    blob: str
    cause: FetchFailure
    reason: str


ReceiverEvent: TypeAlias = Fetched | FetchFailed


@dataclass(slots=True)
class Fetch:
    """One blob on its way from its owner."""

    owner: str
    manifest: Manifest
    buffer: memoryview
    lacking: npt.NDArray[np.bool_]
    left: int
    window: int
    pace_s: float = 0.0  # what a chunk takes on the owner's link, if its rate is declared
    share: float = 1.0  # of a slot
    seen: dict[str, int] = field(default_factory=dict)
    trusted: set[str] = field(default_factory=set)  # streams since the last restart: a stranger's number is undone
    since_ask: int = 0
    due: bool = True
    restart: bool = True
    damaged: int = 0  # since the last sound one
    spoilt_at: float = 0.0
    waits_since: float = 0.0  # since then it waits to ask again
    moved: float = 0.0  # since then it has a slot, or has got nothing sound
    patience_s: float = PATIENCE_S
    starved: int = 0  # times since the last sound chunk
    first_at: float | None = None
    since_first: int = 0

    def rate(self, now: float) -> float | None:
        """Return bytes per second from its first chunk's arrival to now, None where nothing tells."""
        seconds = now - self.first_at if self.first_at is not None else 0.0
        return self.since_first / seconds if self.since_first and seconds > 0 else None


@dataclass(slots=True)
class Landing:
    """A chunk that is being written where it belongs; `view` is taken away when its fetch ends."""

    key: tuple[str, str]
    view: memoryview | None
