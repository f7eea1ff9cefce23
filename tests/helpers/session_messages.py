"""What tests of sessions send and look at."""

from __future__ import annotations

from dataclasses import replace

from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.traffic import Traffic
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
from tests.helpers.session_lab import CHUNKED, LAB, LAYOUT, PARENT, RUN, WORK, Lab, manifest_of

IDLE_S = CHUNKED.idle_s
READY = Presence(NodeState.READY, "device", samples=10)
BLOB = manifest_of(b"x" * 3000)


def messages_of(key: Key, blob: str) -> list[Message]:
    """Return one message of each kind, about this round and blob."""
    model = replace(BLOB, blob=blob)
    return [
        READY,
        Announcement("{}", LAYOUT),
        Task(key, 1, model, None),
        Progress(key, Phase.TRAINING, 99, 100, Traffic(), ()),
        Result(key, model, None, WORK, 6, (), ""),
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


def seek(lab: Lab, child: str = "device-0", nonce: str = "n") -> None:
    """Let a node look for the parent's run."""
    lab.parent.receive(topics.ask(LAB, PARENT, child), serialization.encode(Question(nonce), nonce))
    lab.parent.wake()
