"""The MQTT topics of fedstrata, built and parsed.

    fs1/{lab}/{run}/{node}/state            retained presence; the will is sent here
    fs1/{lab}/{run}/{node}/spec             retained experiment, for the node's children
    fs1/{lab}/{run}/{node}/inbox/{sender}   control messages
    fs1/{lab}/{run}/{node}/status           what a parent knows of its children, while asked
    fs1/{lab}/{run}/{node}/blob/{stream}/{blob}/{index}/{number}
                                            chunks; stream = `all` or a receiver's name
    fs1/{lab}/ask/{node}/{asker}            a question to a node, or to `all` that stay
    fs1/{lab}/answer/{asker}/{node}         a node's answer, outside its runs

Labs share a broker without reading each other's topics. A run's id contains a dash, so no run is
named `ask`. A node writes only below its own name and, with its own name as the last level, into
others' inboxes, ask and answer topics.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from fedstrata.common.errors import WireError
from fedstrata.common.settings.topology import RESERVED

ROOT: Final = "fs1"
ALL: Final = "all"
DEFAULT_LAB: Final = "lab"
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_LEVEL: Final = re.compile(_NAME, re.ASCII)
_TOPIC: Final = re.compile(
    rf"{ROOT}/(?P<lab>{_NAME})/"
    rf"(?:ask/(?P<asked>{_NAME})/(?P<asker>{_NAME})|answer/(?P<reader>{_NAME})/(?P<answerer>{_NAME})"
    rf"|(?P<run>(?=[^/]*-){_NAME})/(?P<node>{_NAME})/"
    rf"(?:(?P<state>state)|(?P<spec>spec)|(?P<status>status)|inbox/(?P<sender>{_NAME})"
    rf"|blob/(?P<stream>{_NAME})/(?P<blob>[0-9a-f]{{16}})/(?P<index>\d{{1,9}})/(?P<number>\d{{1,18}})))",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class StateTopic:
    """Presence of `node`."""

    lab: str
    run: str
    node: str


@dataclass(frozen=True, slots=True)
class SpecTopic:
    """The experiment announced by the parent `node`."""

    lab: str
    run: str
    node: str


@dataclass(frozen=True, slots=True)
class InboxTopic:
    """Control messages from `sender` to `node`."""

    lab: str
    run: str
    node: str
    sender: str


@dataclass(frozen=True, slots=True)
class ChunkTopic:
    """Chunk `index` of `node`'s blob, its `number`-th publication on that stream."""

    lab: str
    run: str
    node: str
    stream: str
    blob: str
    index: int
    number: int


@dataclass(frozen=True, slots=True)
class AskTopic:
    """Question of `asker` to `node`, or to all."""

    lab: str
    node: str
    asker: str


@dataclass(frozen=True, slots=True)
class AnswerTopic:
    """Answer of `node` to `asker`."""

    lab: str
    asker: str
    node: str


@dataclass(frozen=True, slots=True)
class StatusTopic:
    """Status of the parent `node`."""

    lab: str
    run: str
    node: str


Topic: TypeAlias = (
    StateTopic | SpecTopic | InboxTopic | ChunkTopic | StatusTopic | AskTopic | AnswerTopic
)


def check_lab(name: str) -> str:
    """Return a lab's name. Raises ValueError if it is not valid as one level of a topic."""
    return _checked(name, "lab")


def check_node(name: str) -> str:
    """Return the name of an institution or device. Raises ValueError if it is reserved or not one
    level of a topic.
    """
    if name in RESERVED:
        raise ValueError(f"{name!r} is reserved: use another name")
    return _checked(name, "node")


def is_node(name: str) -> bool:
    """Return whether a node other than the cloud may have this name."""
    return name not in RESERVED and _LEVEL.fullmatch(name) is not None


def _checked(name: str, kind: str) -> str:
    if _LEVEL.fullmatch(name) is None:
        raise ValueError(
            f"{name!r} is not a {kind} name. "
            "Use 1 to 64 letters, digits, '_', '.' or '-'; the first is a letter or a digit."
        )
    return name


# by the last group of a match
_FORMS: Final[Mapping[str, tuple[Callable[..., Topic], Sequence[str]]]] = {
    "asker": (AskTopic, ("lab", "asked", "asker")),
    "answerer": (AnswerTopic, ("lab", "reader", "answerer")),
    "state": (StateTopic, ("lab", "run", "node")),
    "spec": (SpecTopic, ("lab", "run", "node")),
    "status": (StatusTopic, ("lab", "run", "node")),
    "sender": (InboxTopic, ("lab", "run", "node", "sender")),
}


def parse(topic: str) -> Topic:
    """Return the typed topic. Raises WireError on any other."""
    match = _TOPIC.fullmatch(topic)
    if match is None:
        raise WireError(f"unknown topic: {topic[:80]!r}")
    if match["number"]:
        lab, run, node, stream, blob = match.group("lab", "run", "node", "stream", "blob")
        return ChunkTopic(lab, run, node, stream, blob, int(match["index"]), int(match["number"]))
    kind, names = _FORMS[match.lastgroup or ""]
    return kind(*match.group(*names))


def state(lab: str, run: str, node: str) -> str:
    """Return a node's presence topic; `+` as the run matches every run."""
    return f"{ROOT}/{lab}/{run}/{node}/state"


def spec(lab: str, run: str, node: str) -> str:
    """Return the topic of a parent's experiment; `+` as the run matches every run."""
    return f"{ROOT}/{lab}/{run}/{node}/spec"


def inbox(lab: str, run: str, node: str, sender: str) -> str:
    """Return the control topic from `sender` to `node`."""
    return f"{ROOT}/{lab}/{run}/{node}/inbox/{sender}"


def ask(lab: str, node: str, asker: str) -> str:
    """Return the topic of a question to a node, or to `ALL`; `+` as the asker matches every
    asker.
    """
    return f"{ROOT}/{lab}/ask/{node}/{asker}"


def answer(lab: str, asker: str, node: str) -> str:
    """Return the topic of a node's answer; `+` as the node matches every node."""
    return f"{ROOT}/{lab}/answer/{asker}/{node}"


def status(lab: str, run: str, node: str) -> str:
    """Return the topic of a parent's status; `+` as the run matches every run."""
    return f"{ROOT}/{lab}/{run}/{node}/status"


def chunk(lab: str, run: str, node: str, stream: str, blob: str, index: int, number: int) -> str:
    """Return the topic of one publication of a chunk."""
    return f"{ROOT}/{lab}/{run}/{node}/blob/{stream}/{blob}/{index}/{number}"


def streams(lab: str, run: str, owner: str, receiver: str, blob: str) -> tuple[str, str]:
    """Return the two topic filters by which `receiver` gets `owner`'s blob."""
    return tuple(
        f"{ROOT}/{lab}/{run}/{owner}/blob/{stream}/{blob}/+/+" for stream in (ALL, receiver)
    )  # type: ignore[return-value]


def sender_of(topic: Topic) -> str:
    """Return the node that may publish on a topic."""
    if isinstance(topic, InboxTopic):
        return topic.sender
    if isinstance(topic, AskTopic):
        return topic.asker
    return topic.node
