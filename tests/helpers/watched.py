"""A watched lab, and what it receives."""

from __future__ import annotations

import math
import os
from typing import Any

from hypothesis import strategies as st
from rich.console import Console

from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import (
    Announcement,
    ChildCount,
    ChildStatus,
    Goodbye,
    Key,
    LinkBytes,
    NodeState,
    PhaseSeconds,
    Presence,
    RoundScore,
    RunStatus,
    Status,
    Step,
)
from fedstrata.deploy.watching.lab_state import Event, WatchedLab
from fedstrata.deploy.watching.nodes import Node
from fedstrata.deploy.watching.view import View
from tests.helpers.status import child, record

LAB = "lab"
RUN = "20260101T000000Z-abcdef"
MANY = 2**63 - 1


def experiment_of(
    institutions: int = 2, devices: int = 4, *, rounds: int = 2, global_rounds: int = 10
) -> Experiment:
    topology = {"institutions": institutions, "devices": devices}
    return parse(
        {
            "name": "small",
            "rounds": global_rounds,
            "topology": topology,
            "institution": {"rounds": rounds},
        }
    )


class Watched:
    """A lab that is reported of by hand, on a clock of its own."""

    def __init__(self, experiment: Experiment | None = None, *, brokers: int = 1) -> None:
        self.now = 0.0
        names = [f"b{place}:1883" for place in range(brokers)]
        self.lab = WatchedLab(RUN, experiment or experiment_of(), brokers=names, now=0.0)
        self.sessions: dict[str, str] = {}
        self.events()

    def __getitem__(self, name: str) -> Node:
        return self.lab.nodes[name]

    def session(self, name: str) -> str:
        return self.sessions.setdefault(name, f"{name}-1")

    def state(
        self,
        name: str,
        state: NodeState | None,
        *,
        session: str = "",
        reason: str = "",
        retained: bool = False,
    ) -> None:
        """Receive a presence; None clears it."""
        presence = None if state is None else Presence(state, "device", reason=reason)
        body = (
            b""
            if presence is None
            else serialization.encode(presence, session or self.session(name))
        )
        self.lab.receive(topics.StateTopic(LAB, RUN, name), body, self.now, retained=retained)

    def status(
        self, name: str, *children: ChildStatus, at_s: float | None = None, **facts: Any
    ) -> None:
        """Receive a parent's record."""
        message = record(*children, at_s=self.now if at_s is None else at_s, **facts)
        body = serialization.encode(message, self.session(name))
        self.lab.receive(topics.StatusTopic(LAB, RUN, name), body, self.now)

    def events(self) -> list[Event]:
        return self.lab.new_events()

    def all_ready(self) -> None:
        """Receive the cloud's presence, and the records of parents all of whose children are ready."""
        self.state("cloud", NodeState.READY)
        for parent, children in self.lab.experiment.tree.children.items():
            self.status(parent, *map(child, children), at_s=self.now - 0.5)
        self.events()


# Whatever comes

NAMES = ["cloud", "institution-0", "institution-1", "device-0", "device-1", "device-3", "stranger"]
KEYS = st.builds(Key, *[st.integers(0, 2) | st.just(MANY)] * 3)
COUNTS = st.sampled_from([0, 1, 7, MANY])
NUMBERS = st.sampled_from([0.0, 0.5, -1.0, 3.0, math.nan, math.inf, -math.inf, 1e308, -1e308])
TEXTS = st.sampled_from(["", "device-0 has not joined yet", "x" * 1000])
STATES = st.none() | st.sampled_from(NodeState)
STEPS = st.sampled_from(Step)
ENTRIES = st.builds(
    ChildStatus,
    st.sampled_from(NAMES),
    STATES,
    STEPS,
    *[COUNTS] * 6,
    st.none() | NUMBERS,
    NUMBERS,
    TEXTS,
)
RUNS = st.builds(
    RunStatus, COUNTS, NUMBERS, NUMBERS, st.just((PhaseSeconds("x", math.inf),)),
    st.lists(st.builds(RoundScore, COUNTS, *[st.none() | NUMBERS] * 3), max_size=4).map(tuple),
)  # fmt: skip
MESSAGES = st.one_of(
    st.builds(Presence, st.sampled_from(NodeState), st.just("device"), st.just(""), st.just(MANY)),
    st.builds(
        Status,
        NUMBERS,
        st.none() | KEYS,
        st.booleans(),
        st.booleans(),
        st.lists(st.builds(LinkBytes, COUNTS, COUNTS), max_size=3).map(tuple),
        st.lists(ENTRIES, max_size=4).map(tuple),
        st.lists(st.builds(ChildCount, STATES, STEPS, COUNTS), max_size=3).map(tuple),
        st.none() | RUNS,
    ),
    st.builds(Announcement, st.just("{"), st.just("[")),
    st.just(Goodbye()),
)
BODIES = st.one_of(
    st.binary(max_size=40),
    st.builds(serialization.encode, MESSAGES, st.sampled_from(["a", "b", "c"])),
    st.just(b""),
)


def drawn(
    watched: Watched,
    width: int,
    *,
    height: int = 40,
    plain: bool = False,
    devices: bool | None = None,
) -> str:
    console = Console(width=width, height=height, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        lines = View(width, height, devices=devices, plain=plain).picture(
            watched.lab, watched.now, ["device-2: lost"]
        )
        console.print(*lines, sep="\n")
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    return "\n".join(line.rstrip() for line in text.splitlines())
