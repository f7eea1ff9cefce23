"""A real lab's messages, recorded once, replayed through the sessions: what one release sent, this
one understands.

`tests/recordings/record.py` records them anew, which is right only where the wire's version is
raised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from fedstrata.common.accounting.traffic import Traffic
from fedstrata.common.experiment.reading import parse
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
    Alive,
    Announcement,
    Ask,
    Farewell,
    Goodbye,
    Key,
    Manifest,
    Message,
    NodeState,
    Preparing,
    Presence,
    Progress,
    Question,
    Result,
    Task,
)
from fedstrata.common.protocol.outbox import Publish, PublishChunk
from fedstrata.common.protocol.parent_session import ParentSession
from fedstrata.common.protocol.presence import Identity
from fedstrata.common.protocol.round_state import Assignment, Closed
from fedstrata.common.runtime.link_models import Models
from fedstrata.common.settings.closing import Closing
from tests.helpers.session_lab import child_session, parent_session

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

    def sent_by(self, node: str, *kinds: type) -> bool:
        """Return whether a node has sent it to an inbox, and it is of these kinds."""
        by = isinstance(self.topic, topics.InboxTopic) and self.topic.sender == node
        return by and isinstance(self.message, kinds)


class Recording:
    """A run's messages."""

    def __init__(self, recorded: Mapping[str, Any]) -> None:
        self.experiment = parse(recorded["experiment"])
        self.messages: list[Recorded] = []
        self.sessions: dict[str, str] = {}
        manifests: dict[str, Manifest] = {}
        for at, text, body, _ in recorded["messages"]:
            topic = topics.parse(text)
            chunk = isinstance(topic, topics.ChunkTopic) or not body
            session, message = ("", None) if chunk else serialization.decode(body)
            self.messages.append(Recorded(at, text, topic, body, session, message))
            if isinstance(topic, topics.StateTopic):
                self.run = topic.run
                self.sessions.setdefault(topic.node, session)
            if isinstance(message, Announcement):
                self.announcement = message
            if isinstance(message, Task | Result):
                manifests[message.model.blob] = message.model
        # every blob that was announced, put together from the chunks that were sent of it
        self.blobs = {blob: bytearray(manifest.size) for blob, manifest in manifests.items()}
        for one in self.messages:
            if isinstance(one.topic, topics.ChunkTopic) and one.topic.blob in self.blobs:
                span = manifests[one.topic.blob].span(one.topic.index)
                self.blobs[one.topic.blob][span] = one.body
        layout = ModelLayout.from_json(self.announcement.layout)
        self.row_bytes = layout.row_bytes
        self.form = Models(sent="fp32", received="fp32").form(layout)

    def identity(self, node: str, role: str, **more: str) -> Identity:
        return Identity(self.run, node, role, self.sessions[node], **more)

    def sent_by(self, node: str, *kinds: type) -> list[tuple[str, Message]]:
        """Return a node's messages of some kinds, each with its receiver, without those that were
        sent again.
        """
        found: list[tuple[str, Message]] = []
        for one in self.messages:
            if one.sent_by(node, *kinds):
                entry = one.topic.node, comparable(one.message)  # type: ignore[union-attr]
                found += [entry] if entry not in found else []
        return found


@pytest.fixture(scope="module")
def recording() -> Recording:
    return Recording(msgpack.unpackb(RECORDING.read_bytes()))


def test_every_message_is_understood_and_written_as_it_was(recording: Recording) -> None:
    kinds = Counter[type]()
    for one in recording.messages:
        if one.message is not None:
            assert serialization.encode(one.message, one.session) == one.body
            assert msgpack.unpackb(one.body[8:])[0] == serialization.VERSION
            kinds[type(one.message)] += 1
    assert kinds.total() > 50 and set(kinds) >= {
        Presence, Announcement, Task, Progress, Result, Acknowledgement, Ask, Farewell, Goodbye,
        Question, Alive, Preparing,
    }  # fmt: skip


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

    def play(self) -> Iterator[tuple[Recorded, float]]:
        """Feed the session; yield each message of the lab before the session gets it."""
        link = self.session.link
        me, peers = link.identity.name, set(link.peers)
        states = [
            isinstance(o.topic, topics.StateTopic) and o.topic.node == me for o in self.messages
        ]
        messages = self.messages[states.index(True) :]
        self.session.connected(messages[0].at)
        for one in messages:
            yield one, one.at
            topic = one.topic
            match topic:
                case topics.InboxTopic():
                    mine = topic.node == me and topic.sender in peers
                case topics.StateTopic():
                    mine = topic.node in {me, *peers}
                case topics.ChunkTopic():
                    mine = (topic.node, topic.blob) in link.receiver.wanted()
                case _:
                    mine = isinstance(topic, topics.AskTopic) and topic.node == me
            if mine:
                link.receive(one.text, one.body, retained=False, now=one.at)
            self.session.tick(one.at)

    def collect(self, now: float) -> None:
        """Keep what the session sends."""
        for output in self.session.to_send(now):
            if isinstance(output, PublishChunk):
                self.session.link.outbox.sent(output.chunk)
            elif isinstance(output, Publish) and output.body:
                topic = topics.parse(output.topic)
                if isinstance(topic, topics.InboxTopic):
                    entry = topic.node, comparable(serialization.decode(output.body)[1])
                    self.sent += [entry] if entry not in self.sent else []

    def of(self, *kinds: type) -> list[tuple[str, Message]]:
        return [sent for sent in self.sent if isinstance(sent[1], kinds)]


@pytest.mark.parametrize("node", ["cloud", "institution-0"])
def test_a_parent_plays_the_recorded_rounds_again(node: str, recording: Recording) -> None:
    experiment, blobs = recording.experiment, recording.blobs
    children = ["institution-0"] if node == "cloud" else experiment.tree.devices
    session = parent_session(
        children,
        identity=recording.identity(node, "cloud", ledger=recording.run),
        transfer=experiment.transfer,
        shaped=False,
        limits=limits_below(experiment, node),
    )
    session.set_form(recording.form)
    session.link.announce(recording.announcement)
    replay = Replay(session, recording.messages)
    tasks: dict[Key, dict[str, Assignment]] = {}
    for child, task in recording.sent_by(node, Task):
        assignment = Assignment(task.model, task.epochs, follows=task.follows)  # type: ignore[union-attr]
        tasks.setdefault(task.key, {})[child] = assignment  # type: ignore[union-attr]
    closed: list[Closed] = []
    uploads: dict[str, bytearray] = {}
    opened = set[Key]()
    for one, now in replay.play():
        if one.sent_by(node, Task) and one.message.key not in opened:  # type: ignore[union-attr]
            key = one.message.key  # type: ignore[union-attr]
            opened.add(key)
            for task in tasks[key].values():
                session.link.offers.add(task.model, memoryview(blobs[task.model.blob]), children)
            numbers = {"global_round": key.global_round, "local_round": key.local_round}
            assert key == session.open(
                **numbers, assignments=tasks[key], closing=Closing(), now=now
            )
        for event in iter(session.next_event, None):
            if isinstance(event, UploadAnnounced):
                model = event.result.model
                uploads[model.blob] = bytearray(model.size)
                session.fetch(event, memoryview(uploads[model.blob]), now)
            elif isinstance(event, UploadArrived):
                session.accept(event, now)
            elif isinstance(event, Closed):
                closed.append(event)
                session.end_round(now)
        replay.collect(now)
    assert [event.key for event in closed] == sorted(tasks)
    assert all(set(event.results) == set(children) and not event.missing for event in closed)
    assert uploads and all(uploads[blob] == blobs[blob] for blob in uploads)
    kinds = Task, Acknowledgement, Goodbye
    expected = recording.sent_by(node, *kinds)
    assert sorted(map(repr, replay.of(*kinds))) == sorted(map(repr, expected))
    assert not session.link.refusals.total


@pytest.mark.parametrize("node", ["institution-0", "device-0", "device-1"])
def test_a_child_answers_the_recorded_tasks_again(node: str, recording: Recording) -> None:
    blobs = recording.blobs
    parent = "cloud" if node == "institution-0" else "institution-0"
    session = child_session(
        recording.identity(node, "device"),
        parent=parent,
        session=recording.sessions[parent],
        transfer=recording.experiment.transfer,
        shaped=False,
    )
    session.set_form(recording.form)
    replay = Replay(session, recording.messages)
    models: dict[str, np.ndarray[Any, np.dtype[np.uint8]]] = {}
    ended: list[NodeState] = []
    answer = bytearray(recording.row_bytes)
    for one, now in replay.play():
        if one.sent_by(node, Result):
            result: Any = one.message
            answer = blobs[result.model.blob]  # what comes back of it does not travel
            session.link.offers.add(result.model, memoryview(answer), (parent,))
            session.participant.finish(result, now=now)
        for event in iter(session.next_event, None):
            if isinstance(event, TaskReceived):
                model = event.task.model
                buffer = models[model.blob] = np.frombuffer(bytearray(answer), np.uint8)
                lacking = missing(model, buffer.data)
                session.fetch(event.task, buffer.data, now, lacking=lacking)
            elif isinstance(event, ModelArrived):
                session.begin_work(now)
            elif isinstance(event, RunEnded):
                ended.append(event.state)
        replay.collect(now)
    assert models and all(models[blob].tobytes() == blobs[blob] for blob in models)
    assert replay.of(Result) == recording.sent_by(node, Result)
    assert ended == [NodeState.FINISHED]
    assert not session.link.refusals.total
