"""A real lab's messages, recorded once, replayed through the sessions: what one release sent, this
one understands.

`tests/recordings/record.py` records them anew, which is right only where the wire's version is
raised.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from fedstrata.common.accounting.traffic import Traffic
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.model.layout import ModelLayout
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.child_session import ChildSession
from fedstrata.common.protocol.events import (
    ModelArrived,
    RunEnded,
    TaskReceived,
    UploadAnnounced,
    UploadArrived,
)
from fedstrata.common.protocol.limits import limits_below
from fedstrata.common.protocol.manifest import missing
from fedstrata.common.protocol.messages import (
    Acknowledgement,
    Announcement,
    Goodbye,
    Manifest,
    Message,
    NodeState,
    Result,
    Task,
)
from fedstrata.common.protocol.outbox import Output, Publish, PublishChunk
from fedstrata.common.protocol.parent_session import ParentSession
from fedstrata.common.protocol.peers import ToParent
from fedstrata.common.protocol.presence import Identity
from fedstrata.common.protocol.round_state import Assignment, Closed
from fedstrata.common.runtime.link_models import Models
from fedstrata.common.settings.closing import Closing
from fedstrata.common.settings.links import LinkSettings
from tests.helpers.session_lab import NoMeter, parent_session

RECORDING = Path(__file__).parent / "recordings" / "run.msgpack"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One message as the broker passed it on; `message` is None for a chunk or a cleared topic."""

    at: float
    text: str
    topic: topics.Topic
    body: bytes
    session: str
    message: Message | None


@pytest.fixture(scope="module")
def recording() -> dict[str, Any]:
    found: dict[str, Any] = msgpack.unpackb(RECORDING.read_bytes())
    return found


@pytest.fixture(scope="module")
def messages(recording: dict[str, Any]) -> list[Recorded]:
    found = []
    for at, text, body, _ in recording["messages"]:
        topic = topics.parse(text)
        chunk = isinstance(topic, topics.ChunkTopic) or not body
        session, message = ("", None) if chunk else serialization.decode(body)
        found.append(Recorded(at, text, topic, body, session, message))
    return found


@pytest.fixture(scope="module")
def experiment(recording: dict[str, Any]) -> Experiment:
    return parse(recording["experiment"])


def test_every_message_is_understood_and_written_as_it_was(messages: list[Recorded]) -> None:
    kinds = []
    for one in (one for one in messages if one.message is not None):
        assert serialization.encode(one.message, one.session) == one.body
        assert msgpack.unpackb(one.body[8:])[0] == serialization.VERSION
        kinds.append(type(one.message).__name__)
    assert len(kinds) > 50 and set(kinds) >= {
        "Presence",
        "Announcement",
        "Task",
        "Progress",
        "Result",
        "Acknowledgement",
        "Ask",
        "Farewell",
        "Goodbye",
        "Question",
        "Alive",
        "Preparing",
    }


def announcement_in(messages: list[Recorded]) -> Announcement:
    return next(one.message for one in messages if isinstance(one.message, Announcement))


def blobs_in(messages: list[Recorded]) -> dict[str, bytearray]:
    """Return every blob that was announced, put together from the chunks that were sent of it."""
    manifests: dict[str, Manifest] = {}
    for one in messages:
        if isinstance(one.message, Task | Result):
            manifests[one.message.model.blob] = one.message.model
    blobs = {blob: bytearray(manifest.size) for blob, manifest in manifests.items()}
    for one in messages:
        if isinstance(one.topic, topics.ChunkTopic) and one.topic.blob in blobs:
            blobs[one.topic.blob][manifests[one.topic.blob].span(one.topic.index)] = one.body
    return blobs


def session_of(messages: list[Recorded], node: str) -> str:
    return next(
        one.session
        for one in messages
        if isinstance(one.topic, topics.StateTopic) and one.topic.node == node
    )


def run_of(messages: list[Recorded]) -> str:
    return next(one.topic.run for one in messages if isinstance(one.topic, topics.StateTopic))


def sent_by(
    node: str, messages: list[Recorded], kinds: tuple[type, ...]
) -> list[tuple[str, Message]]:
    """Return a node's messages of some kinds, each with its receiver, without those that were sent
    again.
    """
    found = []
    for one in messages:
        if (
            isinstance(one.topic, topics.InboxTopic)
            and one.topic.sender == node
            and isinstance(one.message, kinds)
        ):
            entry = one.topic.node, comparable(one.message)
            if entry not in found:
                found.append(entry)
    return found


def comparable(message: Message | None) -> Message:
    """Return a message without what the kernel or the clock adds to it."""
    assert message is not None
    if isinstance(message, Result):
        return replace(message, traffic=Traffic(), below=())
    return message


class Replay:
    """One session that gets what its node got, at the same times; `sent` are its own messages."""

    def __init__(self, session: ParentSession | ChildSession, messages: list[Recorded]) -> None:
        self.session = session
        self.messages = messages
        self.sent: list[tuple[str, Message]] = []
        self.chunks: dict[str, set[int]] = defaultdict(set)

    def play(self) -> Iterator[tuple[Recorded, float]]:
        """Feed the session; yield each message of the lab before the session gets it."""
        me, peers = self.session.link.identity.name, set(self.session.link.peers)
        first = next(
            o.at
            for o in self.messages
            if isinstance(o.topic, topics.StateTopic) and o.topic.node == me
        )
        self.session.connected(first)
        for one in self.messages:
            if one.at < first:
                continue
            yield one, one.at
            topic = one.topic
            mine = (
                (
                    isinstance(topic, topics.InboxTopic)
                    and topic.node == me
                    and topic.sender in peers
                )
                or (isinstance(topic, topics.StateTopic) and topic.node in {me, *peers})
                or (isinstance(topic, topics.AskTopic) and topic.node == me)
                or (
                    isinstance(topic, topics.ChunkTopic)
                    and (topic.node, topic.blob) in self.session.link.receiver.wanted()
                )
            )
            if mine:
                self.session.link.receive(one.text, one.body, retained=False, now=one.at)
            self.session.tick(one.at)

    def collect(self, outputs: list[Output]) -> None:
        """Keep what the session sends."""
        for output in outputs:
            if isinstance(output, PublishChunk):
                self.chunks[output.chunk.blob].add(output.chunk.index)
                self.session.link.outbox.sent(output.chunk)
            elif isinstance(output, Publish) and output.body:
                topic = topics.parse(output.topic)
                if isinstance(topic, topics.InboxTopic):
                    entry = topic.node, comparable(serialization.decode(output.body)[1])
                    self.sent += [entry] if entry not in self.sent else []

    def of(self, *kinds: type) -> list[tuple[str, Message]]:
        return [sent for sent in self.sent if isinstance(sent[1], kinds)]


@pytest.mark.parametrize("node", ["cloud", "institution-0"])
def test_a_parent_plays_the_recorded_rounds_again(
    node: str, messages: list[Recorded], experiment: Experiment
) -> None:
    blobs = blobs_in(messages)
    children = ["institution-0"] if node == "cloud" else experiment.tree.devices
    run = run_of(messages)
    session = parent_session(
        children,
        identity=Identity(run, node, "cloud", session_of(messages, node), ledger=run),
        transfer=experiment.transfer,
        shaped=False,
        limits=limits_below(experiment, node),
        first_number=1,
    )
    announcement = announcement_in(messages)
    session.set_form(
        Models(sent="fp32", received="fp32").form(ModelLayout.from_json(announcement.layout))
    )
    session.link.announce(announcement)
    replay = Replay(session, messages)
    tasks = {}
    for one in messages:
        if (
            isinstance(one.topic, topics.InboxTopic)
            and one.topic.sender == node
            and isinstance(one.message, Task)
        ):
            tasks.setdefault(one.message.key, {})[one.topic.node] = one.message
    closed: list[Closed] = []
    uploads: dict[str, bytearray] = {}
    opened = set()
    for one, now in replay.play():
        mine = isinstance(one.topic, topics.InboxTopic) and one.topic.sender == node
        if mine and isinstance(one.message, Task) and one.message.key not in opened:
            key = one.message.key
            opened.add(key)
            given = {
                child: Assignment(task.model, task.epochs, follows=task.follows)
                for child, task in tasks[key].items()
            }
            for task in tasks[key].values():
                session.link.offers.add(task.model, memoryview(blobs[task.model.blob]), children)
            numbers = {"global_round": key.global_round, "local_round": key.local_round}
            assert session.open(**numbers, assignments=given, closing=Closing(), now=now) == key
        while (event := session.next_event()) is not None:
            if isinstance(event, UploadAnnounced):
                buffer = uploads[event.result.model.blob] = bytearray(event.result.model.size)
                session.fetch(event, memoryview(buffer), now)
            elif isinstance(event, UploadArrived):
                session.accept(event, now)
            elif isinstance(event, Closed):
                closed.append(event)
                session.end_round(now)
        replay.collect(session.to_send(now))
    assert [event.key for event in closed] == sorted(tasks)
    assert all(set(event.results) == set(children) and not event.missing for event in closed)
    assert uploads and all(uploads[blob] == blobs[blob] for blob in uploads)
    expected = sent_by(node, messages, (Task, Acknowledgement, Goodbye))
    assert sorted(map(repr, replay.of(Task, Acknowledgement, Goodbye))) == sorted(
        map(repr, expected)
    )
    assert not session.link.refusals.total


@pytest.mark.parametrize("node", ["institution-0", "device-0", "device-1"])
def test_a_child_answers_the_recorded_tasks_again(
    node: str, messages: list[Recorded], experiment: Experiment
) -> None:
    layout, blobs = ModelLayout.from_json(announcement_in(messages).layout), blobs_in(messages)
    parent = "cloud" if node == "institution-0" else "institution-0"
    session = ChildSession(
        Identity(run_of(messages), node, "device", session_of(messages, node)),
        ToParent(
            parent=parent,
            session=session_of(messages, parent),
            link=LinkSettings(),
            transfer=experiment.transfer,
            shaped=False,
        ),
        meter=NoMeter(),
        first_number=1,
        now=0.0,
    )
    session.set_form(Models(sent="fp32", received="fp32").form(layout))
    replay = Replay(session, messages)
    models: dict[str, np.ndarray[Any, np.dtype[np.uint8]]] = {}
    ended: list[NodeState] = []
    answer = bytearray(layout.row_bytes)
    for one, now in replay.play():
        mine = isinstance(one.topic, topics.InboxTopic) and one.topic.sender == node
        if mine and isinstance(one.message, Result):
            answer = blobs[one.message.model.blob]  # what comes back of it does not travel
            session.link.offers.add(
                one.message.model, memoryview(blobs[one.message.model.blob]), (parent,)
            )
            session.participant.finish(one.message, now=now)
        while (event := session.next_event()) is not None:
            if isinstance(event, TaskReceived):
                buffer = models[event.task.model.blob] = np.frombuffer(bytearray(answer), np.uint8)
                session.fetch(
                    event.task, buffer.data, now, lacking=missing(event.task.model, buffer.data)
                )
            elif isinstance(event, ModelArrived):
                session.begin_work(now)
            elif isinstance(event, RunEnded):
                ended.append(event.state)
        replay.collect(session.to_send(now))
    assert models and all(models[blob].tobytes() == blobs[blob] for blob in models)
    assert replay.of(Result) == sent_by(node, messages, (Result,))
    assert ended == [NodeState.FINISHED]
    assert not session.link.refusals.total
