"""Every topic of fedstrata, built and parsed.

    fs1/{run}/{node}/state                                  retained presence; its will = death
    fs1/{run}/{node}/spec                                   retained experiment, for the node's children
    fs1/{run}/{node}/inbox/{sender}                         control
    fs1/{run}/{node}/blob/{lane}/{blob}/{index}/{number}    chunks; lane = `all` or a receiver's name

A node writes only below its own name and, under its own name, into others' inboxes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, TypeAlias

from common.errors import WireError

ROOT: Final = "fs1"
ALL: Final = "all"
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_TOPIC: Final = re.compile(
    rf"{ROOT}/(?P<run>{_NAME})/(?P<node>{_NAME})/"
    rf"(?:(?P<state>state)|(?P<spec>spec)|inbox/(?P<sender>{_NAME})"
    rf"|blob/(?P<lane>{_NAME})/(?P<blob>[0-9a-f]{{16}})/(?P<index>\d{{1,9}})/(?P<number>\d{{1,18}}))",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class StateTopic:
    """Where `node` says that it lives."""

    run: str
    node: str


@dataclass(frozen=True, slots=True)
class SpecTopic:
    """Where the parent `node` keeps the experiment."""

    run: str
    node: str


@dataclass(frozen=True, slots=True)
class InboxTopic:
    """Control from `sender` to `node`."""

    run: str
    node: str
    sender: str


@dataclass(frozen=True, slots=True)
class ChunkTopic:
    """Chunk `index` of `node`'s blob, its `number`-th publication on that lane."""

    run: str
    node: str
    lane: str
    blob: str
    index: int
    number: int


Topic: TypeAlias = StateTopic | SpecTopic | InboxTopic | ChunkTopic


def parse(topic: str) -> Topic:
    """Return the typed topic. Raises WireError on any other."""
    match = _TOPIC.fullmatch(topic)
    if match is None:
        raise WireError(f"no topic of ours: {topic[:80]!r}")
    run, node = match["run"], match["node"]
    if match["state"]:
        return StateTopic(run, node)
    if match["spec"]:
        return SpecTopic(run, node)
    if match["sender"]:
        return InboxTopic(run, node, match["sender"])
    return ChunkTopic(run, node, match["lane"], match["blob"], int(match["index"]), int(match["number"]))


def state(run: str, node: str) -> str:
    """Return a node's presence topic; `+` as the run matches every run."""
    return f"{ROOT}/{run}/{node}/state"


def spec(run: str, node: str) -> str:
    """Return the topic of a parent's experiment; `+` as the run matches every run."""
    return f"{ROOT}/{run}/{node}/spec"


def inbox(run: str, node: str, sender: str) -> str:
    """Return the control topic from `sender` to `node`."""
    return f"{ROOT}/{run}/{node}/inbox/{sender}"


def chunk(run: str, node: str, lane: str, blob: str, index: int, number: int) -> str:
    """Return the topic of one publication of a chunk."""
    return f"{ROOT}/{run}/{node}/blob/{lane}/{blob}/{index}/{number}"


def lanes(run: str, owner: str, receiver: str, blob: str) -> tuple[str, str]:
    """Return the two filters under which `receiver` gets `owner`'s blob."""
    return tuple(f"{ROOT}/{run}/{owner}/blob/{lane}/{blob}/+/+" for lane in (ALL, receiver))  # type: ignore[return-value]
