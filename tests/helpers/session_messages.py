"""What tests of sessions send and look at."""

from __future__ import annotations

from dataclasses import replace

from session_lab import CHUNKED, LAB, LAYOUT, RUN, Lab, Node, manifest_of

from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.traffic import Traffic
from fedstrata.common.accounting.work import Work
from fedstrata.common.host.examination import Finding
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import (
    About,
    Acknowledgement,
    Alive,
    Announcement,
    Ask,
    Declined,
    Farewell,
    FrozenOffered,
    Gone,
    Goodbye,
    Here,
    Key,
    LinkBytes,
    Message,
    NodeState,
    Phase,
    Preparing,
    Presence,
    Probe,
    Probed,
    Progress,
    Question,
    Reports,
    Result,
    Status,
    Task,
)

IDLE_S = CHUNKED.idle_s
READY = Presence(NodeState.READY, "device", samples=10)
BLOB = manifest_of(b"x" * 3000)


def inject(node: Node, sender: str, session: str, message: Message, *, run: str = RUN) -> None:
    """Hand a node a message from an inbox, whoever wrote it."""
    topic = topics.inbox(LAB, run, node.name, sender)
    node.receive(topic, serialization.encode(message, session))
    node.wake()


def inject_state(node: Node, name: str, session: str, state: NodeState) -> None:
    """Hand a node a presence under a name, whoever wrote it."""
    node.receive(
        topics.state(LAB, RUN, name), serialization.encode(Presence(state, "stranger"), session)
    )
    node.wake()


def messages_of(key: Key, blob: str) -> list[Message]:
    """Return one message of each kind, about this round and blob."""
    result = Result(
        key, replace(BLOB, blob=blob), None, Work(10, 0.5, 1, 6, 1.0, 0.0, 0.0), 6, (), ""
    )
    return [
        READY,
        Announcement("{}", LAYOUT),
        Task(key, 1, replace(BLOB, blob=blob), None),
        Progress(key, Phase.TRAINING, 99, 100, Traffic(), ()),
        result,
        Acknowledgement(key, ""),
        Acknowledgement(key, "refused"),
        Ask(blob, b"\xff", 0, 0, 8, True),
        Gone(blob),
        Reports((ChildReport("x"),)),
        Farewell(Traffic(), ()),
        Probe(BLOB),
        Probed(blob, 1e6, BLOB),
        Question("nonce", run=RUN),
        Alive("nonce", READY),
        Preparing(7, ""),
        Question("nonce", About.FROZEN, RUN),
        FrozenOffered(BLOB),
        Declined(key, "no"),
        Goodbye(),
        Question("nonce", About.ENTRY),
        Here(
            "n",
            "device",
            "cloud",
            RUN,
            "1.0",
            "host",
            "cpu",
            "mnist",
            "",
            1.5e9,
            (Finding("memory", True, True, ""),),
        ),
        Question("nonce", About.STATUS, RUN),
        Status(1.0, key, True, False, (LinkBytes(1, 2),), (), ()),
    ]


# The remains of the dead


def leave_remains(
    lab: Lab, name: str, state: NodeState = NodeState.READY, *, session: str = "dead"
) -> None:
    presence = Presence(state, "device", samples=99, reason="of another time")
    lab.broker.retained[topics.state(LAB, RUN, name)] = serialization.encode(presence, session)


# Slots


def silence_chunks(lab: Lab, *owners: str) -> None:
    lost = tuple(f"fs1/{LAB}/{RUN}/{owner}/blob/" for owner in owners)
    lab.broker.drop = lambda topic: topic.startswith(lost)
