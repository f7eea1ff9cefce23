"""A parent's and its children's sessions joined in memory, in virtual time.

The line between them loses, duplicates and reorders; the broker keeps retained messages and sends
wills. Each node is driven as `common.runtime.endpoint` drives its session: it looks at the session
when something came, and at its deadline.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Any

import msgpack
import numpy as np
import xxhash

from fedstrata.common.accounting.traffic import TcpStats
from fedstrata.common.accounting.work import Work
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.child_session import ChildSession
from fedstrata.common.protocol.events import (
    ModelArrived,
    ModelFailed,
    TaskReceived,
    UploadAnnounced,
    UploadArrived,
)
from fedstrata.common.protocol.limits import ChildLimits
from fedstrata.common.protocol.manifest import ModelForm, describe
from fedstrata.common.protocol.messages import (
    DIGEST_BYTES,
    Key,
    Message,
    NodeState,
    Phase,
    Presence,
    Result,
    Task,
)
from fedstrata.common.protocol.outbox import Output, Publish, PublishChunk, Subscribe
from fedstrata.common.protocol.parent_session import ParentSession
from fedstrata.common.protocol.participant import ParticipantState
from fedstrata.common.protocol.peers import ToChildren, ToParent
from fedstrata.common.protocol.presence import Identity
from fedstrata.common.protocol.receiver import Landing
from fedstrata.common.protocol.round_state import Assignment, Closed, Stalled
from fedstrata.common.settings.closing import Closing
from fedstrata.common.settings.links import LinkSettings

LAB, RUN, PARENT, LAYOUT = "lab", "run-1", "cloud", "layout"
CHUNK = 1024
MODEL_BYTES = 6 * CHUNK - 300
FORM = ModelForm(LAYOUT, "fp32", MODEL_BYTES, exact=True, delta=False)
CHUNKED = TransferSettings(inline_bytes=0, idle_s=60.0)
ALL = Closing()
DELAY_S = 0.005
PASSES_MOST = 40  # of one node in one instant: more would be an event loop that spins


def names_of(count: int) -> list[str]:
    return [f"device-{i}" for i in range(count)]


def model_of(number: int, size: int = MODEL_BYTES) -> bytes:
    """Return the bytes of a parent's model."""
    return random.Random(number).randbytes(size)


def trained(model: bytes, name: str, epochs: int) -> bytes:
    """Return what a child makes of a model."""
    return random.Random(f"{xxhash.xxh3_64_hexdigest(model)} {name} {epochs}").randbytes(len(model))


def manifest_of(data: bytes, **more: str) -> Any:
    return describe(memoryview(data), chunk_bytes=CHUNK, codec="fp32", layout=LAYOUT, **more)


class NoMeter:
    """A kernel that measures nothing."""

    def sample(self) -> TcpStats:
        return TcpStats()

    def received(self) -> int:
        return -1


class Loop:
    """A clock, and what is to happen by it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def at(self, due: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._due, (max(due, self.now), next(self._order), action))

    def after(self, delay: float, action: Callable[[], object]) -> None:
        self.at(self.now + delay, action)

    def run_until(self, end: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Let everything happen until `done`, or until `end`; return whether it is done."""
        while not done():
            if not self._due or self._due[0][0] > end:
                self.now = max(self.now, end)
                return False
            self.now, _, action = heapq.heappop(self._due)
            action()
        return True


class Connection:
    """One connection of a client to the broker."""

    def __init__(
        self, receive: Callable[[str, bytes, bool], None], will: tuple[str, bytes] | None
    ) -> None:
        self.receive, self.will = receive, will
        self.filters: dict[str, list[str]] = {}  # those with wildcards, in levels
        self.topics: set[str] = set()
        self.open = True

    def matches(self, topic: str, levels: list[str]) -> bool:
        """Return whether it is subscribed to a topic."""
        return topic in self.topics or any(matches(each, levels) for each in self.filters.values())


class Broker:
    """An MQTT broker and the lines to its clients. What is no presence may be lost, duplicated and
    reordered.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        seed: int = 0,
        loss: float = 0.0,
        duplicates: float = 0.0,
        jitter_s: float = 0.0,
    ) -> None:
        self.loop = loop
        self.loss, self.duplicates, self.jitter_s = loss, duplicates, jitter_s
        self.state_loss = 0.0
        self.up = True
        self.retained: dict[str, bytes] = {}
        self.connections: list[Connection] = []
        self.drop: Callable[[str], bool] = lambda topic: False
        self.sent: Counter[str] = Counter()
        self._random = random.Random(seed)

    def connect(
        self, receive: Callable[[str, bytes, bool], None], will: tuple[str, bytes] | None
    ) -> Connection:
        connection = Connection(receive, will)
        self.connections.append(connection)
        return connection

    def end(self, connection: Connection, *, will_after_s: float | None) -> None:
        """End a connection; its will comes so much later, or never."""
        if connection.open:
            connection.open = False
            self.connections.remove(connection)
            if will_after_s is not None and connection.will is not None:
                topic, body = connection.will
                self.loop.after(will_after_s, lambda: self.route(topic, body, retain=True))

    def restart(self, *, retained: Mapping[str, bytes]) -> None:
        """Lose all connections and what is on its way; come back with that store."""
        for connection in self.connections:
            connection.open = False
        self.connections = []
        self.retained = dict(retained)

    def publish(self, connection: Connection, topic: str, body: bytes, *, retain: bool) -> None:
        """Take a client's message, which is on its way for a while."""
        self.sent[topic] += 1
        if connection.open:
            self.loop.after(DELAY_S, lambda: self.route(topic, body, retain=retain))

    def subscribe(self, connection: Connection, filters: Iterable[str]) -> None:
        def arrive() -> None:
            for each in filters:
                if "+" in each:
                    connection.filters[each] = each.split("/")
                else:
                    connection.topics.add(each)
                for topic, body in list(self.retained.items()):
                    if matches(each.split("/"), topic.split("/")):
                        self._deliver(connection, topic, body, retained=True)

        self.loop.after(DELAY_S, arrive)

    def unsubscribe(self, connection: Connection, filters: Iterable[str]) -> None:
        for each in filters:
            connection.filters.pop(each, None)
            connection.topics.discard(each)

    def route(self, topic: str, body: bytes, *, retain: bool) -> None:
        """Pass a message on."""
        if not self.up:
            return
        if retain and body:
            self.retained[topic] = body
        elif retain:
            self.retained.pop(topic, None)
        levels = topic.split("/")
        for connection in self.connections:
            if connection.matches(topic, levels):
                self._deliver(connection, topic, body, retained=False)

    def _deliver(self, connection: Connection, topic: str, body: bytes, *, retained: bool) -> None:
        def arrive() -> None:
            if connection.open:
                connection.receive(topic, body, retained)

        if self.drop(topic):
            return
        if topic.endswith("/state"):
            if self._random.random() >= self.state_loss:
                self.loop.after(DELAY_S, arrive)
            return
        for _ in range(1 + (self._random.random() < self.duplicates)):
            if self._random.random() >= self.loss:
                self.loop.after(DELAY_S + self._random.random() * self.jitter_s, arrive)


def matches(wanted: list[str], levels: list[str]) -> bool:
    """Return whether an MQTT filter matches a topic, both in levels."""
    if len(wanted) != len(levels):
        return False
    return all(each in ("+", level) for each, level in zip(wanted, levels, strict=True))


class Node:
    """One process: a session, its connection, and the loop that drives them."""

    def __init__(self, lab: Lab, session: ParentSession | ChildSession) -> None:
        self.lab, self.session = lab, session
        self.connection: Connection | None = None
        self.alive = True
        self.events: list[object] = []
        self.passes = 0
        self._due = -1.0
        self._passed_at, self._passes_now = -1.0, 0
        self._awake = False

    @property
    def name(self) -> str:
        return self.session.link.identity.name

    @property
    def process(self) -> str:
        """The session's id, which each process has anew."""
        return self.session.link.identity.session

    def connect(self) -> None:
        """Connect to the broker, or do so as soon as it is there."""
        if not self.alive or (self.connection is not None and self.connection.open):
            return
        if not self.lab.broker.up:
            self.lab.loop.after(0.1, self.connect)
            return
        identity = self.session.link.identity
        will = Presence(NodeState.LOST, identity.role, reason="connection lost")
        topic = topics.state(identity.lab, identity.run, identity.name)
        body = serialization.encode(will, identity.session)
        self.connection = self.lab.broker.connect(self._receive, (topic, body))
        self.session.connected(self.lab.loop.now)
        self.wake()

    def disconnect(self, *, will_after_s: float | None, back_after_s: float | None = None) -> None:
        """Lose the connection."""
        if self.connection is not None:
            self.lab.broker.end(self.connection, will_after_s=will_after_s)
        self.session.link.disconnected(self.lab.loop.now)
        self.wake()
        if back_after_s is not None:
            self.lab.loop.after(back_after_s, self.connect)

    def wake(self) -> None:
        """Look at the session at this moment, after what else happens now."""
        if not self._awake:
            self._awake = True
            self.lab.loop.after(0.0, self._pass)

    def receive(self, topic: str, body: bytes, *, retained: bool = False) -> None:
        """Let the session handle a message at once, whoever wrote it."""
        self.session.link.receive(topic, body, retained=retained, now=self.lab.loop.now)

    def set_state(self, state: NodeState, **more: Any) -> None:
        self.session.set_state(state, **more)
        self.wake()

    def take(self, event: object) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        """Return the events of a kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def _pass(self) -> None:
        self._awake = False
        if not self.alive:
            return
        now, session = self.lab.loop.now, self.session
        self._passes_now = self._passes_now + 1 if now == self._passed_at else 0
        self._passed_at = now
        self.passes += 1
        assert self._passes_now < PASSES_MOST, f"{self.name} spins at {now}"
        session.tick(now)
        while (event := session.next_event()) is not None:
            self.take(event)
        for output in session.to_send(now):
            self._perform(output)
        due = session.next_deadline(now)
        if due < inf and due != self._due:
            self._due = due
            self.lab.loop.at(due, lambda: self._timer(due))

    def _timer(self, due: float) -> None:
        if due == self._due:
            self._due = -1.0
            self.wake()

    def _receive(self, topic: str, body: bytes, retained: bool) -> None:
        if not self.alive:
            return
        session, now = self.session, self.lab.loop.now
        landing = session.link.place(topic, len(body)) if self.lab.random.random() < 0.5 else None
        if landing is None:
            self.receive(topic, body, retained=retained)
        elif isinstance(landing, Landing) and landing.view is not None:
            landing.view[:] = body
            session.link.landed(topic, landing, now)
        self.wake()

    def _perform(self, output: Output) -> None:
        connection, broker = self.connection, self.lab.broker
        assert connection is not None
        if isinstance(output, Publish):
            self.lab.note(self.name, output)
            broker.publish(connection, output.topic, output.body, retain=output.retain)
        elif isinstance(output, PublishChunk):
            broker.publish(connection, output.topic, bytes(output.chunk.data), retain=False)
            self.lab.loop.after(0.001, lambda: self._sent(output))
        elif isinstance(output, Subscribe):
            broker.subscribe(connection, output.topics)
        else:
            broker.unsubscribe(connection, output.topics)

    def _sent(self, output: PublishChunk) -> None:
        self.session.link.outbox.sent(output.chunk)
        self.wake()


class ParentNode(Node):
    """A parent's process. It takes each result whose bytes are right, and fails the test on any
    other.
    """

    session: ParentSession

    def __init__(self, lab: Lab, session: ParentSession) -> None:
        super().__init__(lab, session)
        self.buffers: dict[tuple[str, str], bytearray] = {}
        self.expected: dict[str, bytes] = {}
        self.over: Closed | Stalled | None = None

    def take(self, event: object) -> None:
        super().take(event)
        if isinstance(event, UploadAnnounced):
            self.lab.loop.after(self.lab.work_s(0.05), lambda: self._fetch(event))
        elif isinstance(event, UploadArrived):
            self.lab.loop.after(self.lab.work_s(0.3), lambda: self._accept(event))
        elif isinstance(event, Closed | Stalled):
            assert self.over is None
            self.over = event

    def open(self, opening: Opening) -> Key:
        assignments = {}
        for model in set(opening.models.values()):
            receivers = [name for name, each in opening.models.items() if each == model]
            manifest = manifest_of(model)
            inline = self.session.link.offers.add(manifest, memoryview(model), receivers)
            assignments |= {
                name: Assignment(manifest, opening.epochs, inline) for name in receivers
            }
        self.expected = {
            name: trained(model, name, opening.epochs) for name, model in opening.models.items()
        }
        key = self.session.open(
            global_round=opening.global_round,
            local_round=opening.local_round,
            assignments=assignments,
            closing=opening.closing,
            now=self.lab.loop.now,
        )
        self.wake()
        return key

    def _fetch(self, event: UploadAnnounced) -> None:
        if self.alive:
            buffer = self.buffers[event.child, event.result.model.blob] = bytearray(
                event.result.model.size
            )
            self.session.fetch(event, memoryview(buffer), self.lab.loop.now)
            self.wake()

    def _accept(self, event: UploadArrived) -> None:
        if not self.alive:
            return
        session, now = self.session, self.lab.loop.now
        if session.coordinator.is_announced(event.child, event.result.key):
            buffer = self.buffers[event.child, event.result.model.blob]
            assert buffer == self.expected[event.child], f"wrong bytes from {event.child}"
        if event.child in self.lab.bad:
            session.refuse(event.child, event.result.key, "holds NaN", now)
        else:
            session.accept(event, now)
        self.wake()


class ChildNode(Node):
    """A child's process, which trains what it is asked for."""

    session: ChildSession

    def __init__(self, lab: Lab, session: ChildSession, *, train_s: float) -> None:
        super().__init__(lab, session)
        self.train_s = train_s
        self.trained: list[tuple[Key, str, int]] = []
        self.task: Task | None = None
        self.buffer = bytearray()
        self.serves = True
        self._work = 0
        self._answer: bytes | None = None
        self._answer_blob = ""

    def take(self, event: object) -> None:
        super().take(event)
        if isinstance(event, TaskReceived):
            self._begin(event.task)
        elif (
            isinstance(event, ModelArrived)
            and self.task is not None
            and event.blob == self.task.model.blob
        ):
            self._train(self.task)
        elif (
            isinstance(event, ModelFailed)
            and self.task is not None
            and event.blob == self.task.model.blob
        ):
            self._stop()
            self.session.participant.abandon()
            self.wake()

    def _stop(self) -> None:
        self._work += 1
        if self.task is not None:
            self.session.stop_fetching(self.task, self.lab.loop.now)
        self.task = None

    def _begin(self, task: Task) -> None:
        self._stop()
        if self._answer_blob:
            self.session.link.offers.retire(self._answer_blob)
            self._answer_blob = ""
        self.task, self.buffer = task, bytearray(task.model.size)
        self._later(self.lab.work_s(0.02), self._fetch)

    def _fetch(self) -> None:
        assert self.task is not None
        self.session.fetch(self.task, memoryview(self.buffer), self.lab.loop.now)

    def _train(self, task: Task) -> None:
        model, steps = bytes(self.buffer), 6
        assert manifest_of(model).digests == task.model.digests
        self.trained.append((task.key, task.model.blob, task.epochs))

        def step(number: int) -> None:
            self.session.progress(Phase.TRAINING, number, steps, self.lab.loop.now)
            if number < steps:
                self._later(self.train_s / steps, lambda: step(number + 1))
            else:
                self._finish(task, trained(model, self.name, task.epochs))

        def begin() -> None:
            self.session.begin_work(self.lab.loop.now)
            step(0)

        self._later(0.0, begin)

    def _finish(self, task: Task, answer: bytes) -> None:
        self._stop()
        manifest = manifest_of(answer)
        inline = self.session.link.offers.add(manifest, memoryview(answer), self.session.link.peers)
        if not self.serves:
            self.session.link.offers.retire(manifest.blob)
        self._answer, self._answer_blob = answer, manifest.blob
        result = Result(
            task.key, manifest, inline, Work(10, 0.5, task.epochs, 6, 1.0, 0.0, 0.0), 6, (), ""
        )
        self.session.participant.finish(result, now=self.lab.loop.now)

    def _later(self, delay: float, action: Callable[[], None]) -> None:
        work = self._work

        def act() -> None:
            if self.alive and self._work == work:
                action()
                self.wake()

        self.lab.loop.after(delay, act)


@dataclass(slots=True)
class Opening:
    """A round that is to be played, over restarts of the parent too."""

    global_round: int
    local_round: int
    models: dict[str, bytes]
    epochs: int
    closing: Closing


class Lab:
    """A parent, its children and a broker."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        seed: int = 0,
        loss: float = 0.0,
        duplicates: float = 0.0,
        jitter_s: float = 0.0,
        train_s: float = 3.0,
        transfer: TransferSettings = CHUNKED,
        link: LinkSettings = LinkSettings(),  # noqa: B008 - it is frozen
        start: bool = True,
        limits: Mapping[str, ChildLimits] | None = None,
    ) -> None:
        self.loop = Loop()
        self.random = random.Random(seed)
        self.broker = Broker(
            self.loop, seed=seed, loss=loss, duplicates=duplicates, jitter_s=jitter_s
        )
        self.names, self.train_s, self.transfer, self.link = list(names), train_s, transfer, link
        self.limits = limits
        self.bad: set[str] = set()
        self.messages: Counter[tuple[str, str, int]] = Counter()
        self.kinds: Counter[str] = Counter()
        self.children: dict[str, ChildNode] = {}
        self.processes: list[Node] = []
        self._sessions = itertools.count()
        self._opening: Opening | None = None
        self.parent = self._new_parent()
        if start:
            for name in names:
                self.start(name)

    @property
    def now(self) -> float:
        return self.loop.now

    @property
    def child(self) -> ChildNode:
        """The present process of the first child."""
        return self.children[self.names[0]]

    def work_s(self, most: float) -> float:
        """Return how long some work takes this time."""
        return self.random.random() * most

    # What happens

    def start(
        self, name: str, *, ready_s: float | None = 0.2, parent_session: str = ""
    ) -> ChildNode:
        """Start a process of a child; it is ready after so long, or never."""
        identity = Identity(RUN, name, "device", self.new_session(name))
        session = ChildSession(
            identity,
            ToParent(
                parent=PARENT,
                session=parent_session,
                link=self.link,
                transfer=self.transfer,
                shaped=True,
            ),
            meter=NoMeter(),
            first_number=int(1e3 * self.now),
            now=self.now,
        )
        child = self.children[name] = ChildNode(self, session, train_s=self.train_s)
        self.processes.append(child)
        child.connect()
        if ready_s is not None:
            self.loop.after(ready_s, lambda: self._ready(child))
        return child

    def kill(self, name: str, *, will_after_s: float | None = 0.1) -> None:
        """End a child's process as SIGKILL does."""
        self._end(self.children[name], will_after_s)

    def stop_parent(self, *, will_after_s: float | None = 0.1) -> None:
        self._end(self.parent, will_after_s)

    def restart_parent(
        self,
        *,
        will_after_s: float | None = 0.5,
        after_s: float = 0.0,
        reopen_s: float | None = 0.3,
    ) -> None:
        """End the parent's process and start another one, which opens the round again."""
        self.stop_parent(will_after_s=will_after_s)

        def start() -> None:
            if not self.parent.alive:
                self.parent = self._new_parent()
                if reopen_s is not None:
                    self.loop.after(reopen_s, lambda parent=self.parent: self._open(parent))  # type: ignore[misc]

        self.loop.after(after_s, start)

    def restart_broker(self, *, down_s: float, retained: Mapping[str, bytes] | None = None) -> None:
        """Restart the broker, which comes back with this store, its own where None is given."""
        self.broker.up = False
        self.broker.restart(retained=dict(self.broker.retained) if retained is None else retained)
        for node in self.nodes():
            node.session.link.disconnected(self.now)
            node.wake()
            self.loop.after(down_s + self.work_s(0.2), node.connect)

        def back() -> None:
            self.broker.up = True

        self.loop.after(down_s, back)

    def nodes(self) -> list[Node]:
        """Return the living processes."""
        return [node for node in self.processes if node.alive]

    def publish(
        self,
        node: str,
        sender: str,
        session: str,
        message: Message,
        *,
        run: str = RUN,
        retained: bool = False,
    ) -> None:
        """Give a message to the broker in the name of any process."""
        body = serialization.encode(message, session)
        topic = topics.state(LAB, run, sender) if retained else topics.inbox(LAB, run, node, sender)
        self.broker.route(topic, body, retain=retained)

    # Rounds

    def open(
        self,
        names: Collection[str] | None = None,
        *,
        global_round: int = 0,
        local_round: int = 0,
        model: bytes | None = None,
        models: Mapping[str, bytes] | None = None,
        epochs: int = 1,
        closing: Closing = ALL,
    ) -> Key:
        """Open a round; without another model it has one of its own."""
        one = model_of(1000 * global_round + local_round) if model is None else model
        given = dict(models) if models is not None else dict.fromkeys(names or self.names, one)
        self._opening = Opening(global_round, local_round, given, epochs, closing)
        return self._open(self.parent) or Key(0, 0, 0)

    def play(self, *, until_s: float = 400.0) -> Closed | Stalled:
        """Run until the open round is over, over restarts of the parent."""
        over = self.loop.run_until(self.now + until_s, lambda: self.parent.over is not None)
        event, self.parent.over = self.parent.over, None
        assert over and event is not None, (
            f"the round hangs: {self.parent.session.coordinator.children}"
        )
        assert self._opening is not None
        self.parent.session.end_round(self.now)
        self.parent.wake()
        self._opening = None
        if isinstance(event, Closed):
            for name, result in event.results.items():
                assert result.model.digests == manifest_of(self.parent.expected[name]).digests
        return event

    def round(
        self, names: Collection[str] | None = None, *, until_s: float = 400.0, **how: Any
    ) -> Closed:
        """Open a round and play it; it must close."""
        self.open(names, **how)
        event = self.play(until_s=until_s)
        assert isinstance(event, Closed), event
        return event

    def finish(self, *, until_s: float = 400.0) -> Closed:
        """Play the open round, which must close with a result of each child."""
        closed = self.play(until_s=until_s)
        assert isinstance(closed, Closed) and set(closed.results) == set(self.names), closed
        return closed

    def stall(self) -> Stalled:
        """Play the open round, which must stall."""
        stalled = self.play()
        assert isinstance(stalled, Stalled), stalled
        return stalled

    def rest(self, seconds: float) -> None:
        """Let everything go its way for so long."""
        self.loop.run_until(self.now + seconds)

    def until(self, done: Callable[[], bool], *, within_s: float = 60.0) -> None:
        """Let everything go its way until something is so."""
        assert self.loop.run_until(self.now + within_s, done)

    def check(self) -> None:
        """Check what must hold at any time: nothing is trained twice in one process, and there are
        no storms.
        """
        for node in self.processes:
            if isinstance(node, ChildNode):
                assert len(node.trained) == len(set(node.trained)), (
                    f"{node.name} trained twice: {node.trained}"
                )
        storms = {who: count for who, count in self.messages.items() if count > 30}
        assert not storms, f"messages in one second: {storms}"

    def note(self, sender: str, output: Publish) -> None:
        if output.body:
            self.kinds[
                serialization.KINDS[msgpack.unpackb(output.body[DIGEST_BYTES:])[2]].__name__
            ] += 1
            levels = output.topic.split("/")
            if "inbox" in levels:
                self.messages[sender, levels[3], int(self.now)] += 1

    def new_session(self, name: str) -> str:
        return f"{name}/{next(self._sessions)}"

    def _new_parent(self) -> ParentNode:
        identity = Identity(RUN, PARENT, "cloud", self.new_session(PARENT), ledger=RUN)
        session = ParentSession(
            identity,
            ToChildren(
                links=dict.fromkeys(self.names, self.link),
                transfer=self.transfer,
                shaped=True,
                limits=self.limits or {},
            ),
            meter=NoMeter(),
            first_number=int(1e3 * self.now),
        )
        session.set_form(FORM)
        parent = ParentNode(self, session)
        self.processes.append(parent)
        parent.connect()
        parent.set_state(NodeState.READY)
        return parent

    def _open(self, parent: ParentNode) -> Key | None:
        return parent.open(self._opening) if self._opening is not None and parent.alive else None

    def _ready(self, child: ChildNode) -> None:
        if child.alive:
            child.session.set_form(FORM)
            child.session.prepared()
            child.set_state(NodeState.READY, samples=10)

    def _end(self, node: Node, will_after_s: float | None) -> None:
        if node.alive:
            node.alive = False
            if node.connection is not None:
                self.broker.end(node.connection, will_after_s=will_after_s)


def settled(count: int, **how: Any) -> Lab:
    """Return a lab of so many devices after its first second: all are ready, in no round."""
    lab = Lab(names_of(count), **how)
    lab.rest(1.0)
    return lab


def lab_at(state: ParticipantState) -> Lab:
    """Return a lab of two devices whose first one is in this state; the other one keeps the round
    open.
    """
    lab = settled(2)
    if state is not ParticipantState.IDLE:
        lab.open()
        lab.children["device-1"].train_s = 20.0
    lab.until(lambda: lab.child.session.participant.state is state)
    return lab


# What a session is made of


def snapshot(thing: object, *, without: Collection[str] = ()) -> object:
    """Return all that an object holds, as plain values that can be compared; `without` attributes
    of these names.
    """
    seen: set[int] = set()

    def look(value: object) -> object:
        if value is None or isinstance(value, (bool, int, float, str, bytes, Enum)):
            return value
        if isinstance(value, (bytearray, memoryview, np.ndarray)):
            return bytes(value)
        if callable(value):
            return "callable"
        if isinstance(value, Mapping):
            return [(look(key), look(each)) for key, each in value.items()]
        if isinstance(value, (set, frozenset)):
            return sorted(map(repr, value))
        if isinstance(value, (list, tuple, deque)):
            return [look(each) for each in value]
        if id(value) in seen:
            return "seen"
        seen.add(id(value))
        return {name: look(each) for name, each in attributes(value).items() if name not in without}

    return look(thing)


def attributes(value: object) -> dict[str, object]:
    """Return an object's attributes."""
    names = [*getattr(value, "__dict__", ())]
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return {name: getattr(value, name) for name in dict.fromkeys(names) if hasattr(value, name)}


def sizes(thing: object) -> dict[str, int]:
    """Return the length of every container that an object holds, by its path."""
    found: dict[str, int] = {}

    def look(value: object, path: str) -> None:
        if isinstance(value, dict):  # an object's attributes
            for name, each in value.items():
                look(each, f"{path}.{name}")
        elif isinstance(value, (list, tuple)):
            found[path] = max(found.get(path, 0), len(value))
            for each in value:
                look(each, f"{path}[]")

    look(snapshot(thing), "")
    return found
