"""What a parent's session reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.protocol.messages import Result, Target


@dataclass(frozen=True, slots=True)
class UploadAnnounced:
    """A child offers a result whose description fits: `fetch` its model, or `refuse` it."""

    child: str
    result: Result


@dataclass(frozen=True, slots=True)
class UploadArrived:
    """That model's blob lies complete in its buffer, every chunk checked: `accept` or `refuse` it."""

    child: str
    result: Result


@dataclass(frozen=True, slots=True)
class UploadRefused:
    """A child's result was refused, and why."""

    child: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerChanged:
    """A child's presence changed: its state, or `left`; `reason` is its own."""

    child: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class GoodbyeReceived:
    """A child has sent its final counts."""

    child: str


@dataclass(frozen=True, slots=True)
class TargetsChanged:
    """The children's /metrics addresses changed."""

    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Readiness:
    """Who may take part: `ready` children; `missing` ones, each with the reason.

    Among the missing are the `failed` ones, and the `hanging` ones: they have prepared for `idle_s` without progress,
    or failed for lack of progress below them.
    """

    ready: frozenset[str]
    missing: Mapping[str, str]
    hanging: frozenset[str]
    failed: frozenset[str]
