"""Events of a parent's session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.protocol.messages import Result, Target


@dataclass(frozen=True, slots=True)
class UploadAnnounced:
    """A child announces a result with a valid description: call `fetch`, or `refuse` it."""

    child: str
    result: Result


@dataclass(frozen=True, slots=True)
class UploadArrived:
    """The blob of that model is complete in its buffer, with every chunk checked: `accept` or `refuse` it."""

    child: str
    result: Result


@dataclass(frozen=True, slots=True)
class UploadRefused:
    """A child's result was refused, with the reason."""

    child: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerChanged:
    """A child's presence changed: its state, or `left`; `reason` is the child's."""

    child: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class DevicesAway:
    """The round waits for devices all of which are away by their traces; `returns_s`: seconds until each returns."""

    returns_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class GoodbyeReceived:
    """A child has sent its final counts."""

    child: str


@dataclass(frozen=True, slots=True)
class TargetsChanged:
    """The /metrics addresses of the nodes below changed."""

    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Readiness:
    """Which children can take part: the `ready` ones; the `missing` ones, each with the reason.

    The missing ones include the `failed` ones, and the `hanging` ones: these have prepared for `idle_s` without
    progress, or failed for lack of progress below them.
    """

    ready: frozenset[str]
    missing: Mapping[str, str]
    hanging: frozenset[str]
    failed: frozenset[str]

    @property
    def text(self) -> str:
        """The missing ones with their reasons, empty if there are none."""
        return "; ".join(f"{name} {reason}" for name, reason in sorted(self.missing.items()))
