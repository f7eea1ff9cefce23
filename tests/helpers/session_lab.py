"""A parent's and its children's sessions joined in memory, in virtual time.

The line between them loses, duplicates and reorders; the broker keeps retained messages and sends
wills. Each node is driven as `common.runtime.endpoint` drives its session: it looks at the session
when something came, and at its deadline. What fails are the faults of whole labs
(`tests.simulation.faults`), see `Lab.hit`.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import msgpack
import xxhash

from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.traffic import TcpStats
from fedstrata.common.accounting.work import Work
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.admission import Refusal
from fedstrata.common.protocol.attendance import Readiness
from fedstrata.common.protocol.child_session import ChildSession
from fedstrata.common.protocol.coordinator import Coordinator
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
from fedstrata.common.protocol.peer_link import PeerLink
from fedstrata.common.protocol.peers import ToChildren, ToParent
from fedstrata.common.protocol.presence import Identity
from fedstrata.common.protocol.receiver import Landing
from fedstrata.common.protocol.round_state import Assignment, Closed, Stalled
from fedstrata.common.settings.closing import Closing
from fedstrata.common.settings.links import LinkSettings
from tests.helpers.virtual_line import Connection, SessionBroker, VirtualLine
from tests.simulation.faults import Fault, FaultKind

LAB, RUN, PARENT, LAYOUT = "lab", "run-1", "cloud", "layout"
CHUNK = 1024
MODEL_BYTES = 6 * CHUNK - 300
FORM = ModelForm(LAYOUT, "fp32", MODEL_BYTES, exact=True, delta=False)
CHUNKED = TransferSettings(inline_bytes=0, idle_s=60.0)
ALL = Closing()
WORK = Work(10, 0.5, 1, 6, 1.0)
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


class Node:
    """One process: a session, its connection, and the loop that drives them."""

    def __init__(self, lab: Lab, session: ParentSession | ChildSession) -> None:
        self.lab, self.session = lab, session
        self.connection: Connection | None = None
        self.alive = True
        self.events: list[object] = []
        self._due = -1.0
        self._passed_at, self._passes_now = -1.0, 0
        self._awake = False

    @property
    def link(self) -> PeerLink:
        return self.session.link

    @property
    def name(self) -> str:
        return self.link.identity.name

    @property
    def process(self) -> str:
        """The session's id, which each process has anew."""
        return self.link.identity.session

    def refused(self, *reasons: Refusal) -> int:
        """Return how many messages it has refused, for these reasons or any."""
        refusals = self.link.refusals
        return sum(map(refusals.of, reasons)) if reasons else refusals.total

    def connect(self) -> None:
        """Connect to the broker, or do so as soon as it is there."""
        if not self.alive or (self.connection is not None and self.connection.open):
            return
        if not self.lab.broker.up:
            self.lab.after(0.1, self.connect)
            return
        identity = self.link.identity
        will = Presence(NodeState.LOST, identity.role, reason="connection lost")
        topic = topics.state(identity.lab, identity.run, identity.name)
        body = serialization.encode(will, identity.session)
        self.connection = self.lab.broker.connect(self._receive, (topic, body))
        self.session.connected(self.lab.now)
        self.wake()

    def disconnect(self, *, will_after_s: float = inf, back_after_s: float = inf) -> None:
        """Lose the connection."""
        if self.connection is not None:
            self.lab.broker.end(self.connection, will_after_s=will_after_s)
        self.link.disconnected(self.lab.now)
        self.wake()
        self.lab.after(back_after_s, self.connect)

    def end(self, *, will_after_s: float = inf) -> None:
        """End as by SIGKILL."""
        if self.alive:
            self.alive = False
            if self.connection is not None:
                self.lab.broker.end(self.connection, will_after_s=will_after_s)

    def leave(self, *, keep_state: bool) -> None:
        """Publish what a node does that leaves."""
        self.link.own.leaving = True
        for output in self.link.leave(keep_state=keep_state):
            self._perform(output)

    def wake(self) -> None:
        """Look at the session at this moment, after what else happens now."""
        if not self._awake:
            self._awake = True
            self.lab.after(0.0, self._pass)

    def receive(self, topic: str, body: bytes, *, retained: bool = False) -> None:
        """Let the session handle a message at once, whoever wrote it."""
        self.link.receive(topic, body, retained=retained, now=self.lab.now)

    def inject(self, sender: str, session: str, message: Message, *, run: str = RUN) -> None:
        """Take a message from the inbox, whoever wrote it."""
        self.receive(
            topics.inbox(LAB, run, self.name, sender), serialization.encode(message, session)
        )
        self.wake()

    def inject_state(self, name: str, session: str, presence: Presence) -> None:
        """Take a presence under a name, whoever wrote it."""
        self.receive(topics.state(LAB, RUN, name), serialization.encode(presence, session))
        self.wake()

    def set_state(self, state: NodeState, **more: Any) -> None:
        self.session.set_state(state, **more)
        self.wake()

    def take(self, event: object) -> None:
        self.events.append(event)

    def of(self, kind: Any) -> list[Any]:
        """Return the events of a kind, or of several, so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def _pass(self) -> None:
        self._awake = False
        if not self.alive:
            return
        now, session = self.lab.now, self.session
        self._passes_now = self._passes_now + 1 if now == self._passed_at else 0
        self._passed_at = now
        assert self._passes_now < PASSES_MOST, f"{self.name} spins at {now}"
        session.tick(now)
        while (event := session.next_event()) is not None:
            self.take(event)
        for output in session.to_send(now):
            self._perform(output)
        due = session.next_deadline(now)
        if due < inf and due != self._due:
            self._due = due
            self.lab.at(due, partial(self._timer, due))

    def _timer(self, due: float) -> None:
        if due == self._due:
            self._due = -1.0
            self.wake()

    def _receive(self, topic: str, body: bytes, retained: bool) -> None:
        if not self.alive:
            return
        landing = self.link.place(topic, len(body)) if self.lab.random.random() < 0.5 else None
        if landing is None:
            self.receive(topic, body, retained=retained)
        elif isinstance(landing, Landing) and landing.view is not None:
            landing.view[:] = body
            self.link.landed(topic, landing, self.lab.now)
        self.wake()

    def _perform(self, output: Output) -> None:
        connection, broker = self.connection, self.lab.broker
        assert connection is not None
        if isinstance(output, Publish):
            self.lab.note(self.name, output)
            broker.publish(connection, output.topic, output.body, retain=output.retain)
        elif isinstance(output, PublishChunk):
            broker.publish(connection, output.topic, bytes(output.chunk.data), retain=False)
            self.lab.after(0.001, self._sent, output)
        elif isinstance(output, Subscribe):
            broker.subscribe(connection, output.topics)
        else:
            broker.unsubscribe(connection, output.topics)

    def _sent(self, output: PublishChunk) -> None:
        self.link.outbox.sent(output.chunk)
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
        self.busy = False  # it looks for a buffer of an upload, for ever

    def take(self, event: object) -> None:
        super().take(event)
        if isinstance(event, UploadAnnounced):
            self.lab.after(self.lab.work_s(0.05), self._fetch, event)
        elif isinstance(event, UploadArrived):
            self.lab.after(self.lab.work_s(0.3), self._accept, event)
        elif isinstance(event, Closed | Stalled):
            assert self.over is None
            self.over = event

    def open(self, opening: Opening) -> Key:
        """Open a round, which may be one of before."""
        assignments = {}
        for model in set(opening.models.values()):
            receivers = [name for name, each in opening.models.items() if each == model]
            manifest = manifest_of(model)
            inline = self.link.offers.add(manifest, memoryview(model), receivers)
            task = Assignment(manifest, opening.epochs, inline)
            assignments |= dict.fromkeys(receivers, task)
        self.expected = {
            name: trained(model, name, opening.epochs) for name, model in opening.models.items()
        }
        key = self.session.open(
            global_round=opening.global_round,
            local_round=opening.local_round,
            assignments=assignments,
            closing=opening.closing,
            now=self.lab.now,
        )
        self.wake()
        return key

    def _fetch(self, event: UploadAnnounced) -> None:
        if self.alive and not self.busy:
            model = event.result.model
            buffer = self.buffers[event.child, model.blob] = bytearray(model.size)
            self.session.fetch(event, memoryview(buffer), self.lab.now)
            self.wake()

    def _accept(self, event: UploadArrived) -> None:
        if not self.alive:
            return
        session, now = self.session, self.lab.now
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
        self._work = 0
        self.answer, self.answer_blob = b"", ""

    def take(self, event: object) -> None:
        super().take(event)
        if isinstance(event, TaskReceived):
            self._begin(event.task)
        elif isinstance(event, ModelArrived | ModelFailed):
            if self.task is None or event.blob != self.task.model.blob:
                return
            if isinstance(event, ModelArrived):
                self._train(self.task)
            else:
                self._stop()
                self.session.participant.abandon()
                self.wake()

    def send_goodbye(self, *below: ChildReport) -> None:
        self.session.send_goodbye(below, self.lab.now)
        self.wake()

    def _stop(self) -> None:
        self._work += 1
        if self.task is not None:
            self.session.stop_fetching(self.task, self.lab.now)
        self.task = None

    def _begin(self, task: Task) -> None:
        self._stop()
        if self.answer_blob:
            self.link.offers.retire(self.answer_blob)
            self.answer_blob = ""
        self.task, self.buffer = task, bytearray(task.model.size)
        self._later(self.lab.work_s(0.02), self._fetch)

    def _fetch(self) -> None:
        assert self.task is not None
        self.session.fetch(self.task, memoryview(self.buffer), self.lab.now)

    def _train(self, task: Task) -> None:
        model, steps = bytes(self.buffer), 6
        assert manifest_of(model).digests == task.model.digests
        self.trained.append((task.key, task.model.blob, task.epochs))

        def step(number: int) -> None:
            self.session.progress(Phase.TRAINING, number, steps, self.lab.now)
            if number < steps:
                self._later(self.train_s / steps, partial(step, number + 1))
            else:
                self._finish(task, trained(model, self.name, task.epochs))

        def begin() -> None:
            self.session.begin_work(self.lab.now)
            step(0)

        self._later(0.0, begin)

    def _finish(self, task: Task, answer: bytes) -> None:
        self._stop()
        manifest = manifest_of(answer)
        inline = self.link.offers.add(manifest, memoryview(answer), self.link.peers)
        self.answer, self.answer_blob = answer, manifest.blob
        work = replace(WORK, epochs=task.epochs)
        result = Result(task.key, manifest, inline, work, 6, (), "")
        self.session.participant.finish(result, now=self.lab.now)

    def _later(self, delay: float, action: Callable[[], None]) -> None:
        work = self._work

        def act() -> None:
            if self.alive and self._work == work:
                action()
                self.wake()

        self.lab.after(delay, act)


@dataclass(slots=True)
class Opening:
    """A round that is to be played, over restarts of the parent too."""

    models: dict[str, bytes]
    global_round: int = 0
    local_round: int = 0
    epochs: int = 1
    closing: Closing = ALL


def parent_session(
    children: Iterable[str],
    *,
    identity: Identity,
    link: LinkSettings = LinkSettings(),  # noqa: B008 - it is frozen
    transfer: TransferSettings = CHUNKED,
    shaped: bool = True,
    limits: Mapping[str, ChildLimits] | None = None,
    now: float = 0.0,
) -> ParentSession:
    """Return the session of a parent, whose children have equal links."""
    links = dict.fromkeys(children, link)
    settings = ToChildren(links=links, transfer=transfer, shaped=shaped, limits=limits or {})
    return ParentSession(identity, settings, meter=NoMeter(), first_number=int(1e3 * now))


def child_session(
    identity: Identity,
    *,
    link: LinkSettings = LinkSettings(),  # noqa: B008 - it is frozen
    shaped: bool = True,
    now: float = 0.0,
    **above: Any,
) -> ChildSession:
    """Return the session of a child; `above`: fields of `ToParent`."""
    settings = ToParent(link=link, shaped=shaped, **above)
    first = int(1e3 * now)
    return ChildSession(identity, settings, meter=NoMeter(), first_number=first, now=now)


class Lab(VirtualLine):
    """A parent, its children and a broker."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        seed: int = 0,
        train_s: float = 3.0,
        transfer: TransferSettings = CHUNKED,
        link: LinkSettings = LinkSettings(),  # noqa: B008 - it is frozen
        start: bool = True,
        limits: Mapping[str, ChildLimits] | None = None,
        **line: float,
    ) -> None:
        super().__init__(seed=seed, **line)
        self.random = random.Random(seed)
        self.broker = SessionBroker(self)
        self.names, self.train_s, self.limits = list(names), train_s, limits
        self.both: dict[str, Any] = {"link": link, "transfer": transfer}  # of each side
        self.bad: set[str] = set()
        self.messages: Counter[tuple[str, str, int]] = Counter()
        self.kinds: Counter[str] = Counter()
        self.children: dict[str, ChildNode] = {}
        self.processes: list[Node] = []
        self.opening: Opening | None = None
        self._sessions = itertools.count()
        self.stores: dict[str, Mapping[str, bytes]] = {"empty": {}}  # of brokers that come back
        self.start_parent()
        for name in names if start else ():
            self.start(name)

    @property
    def child(self) -> ChildNode:
        """The present process of the first child."""
        return self.children[self.names[0]]

    @property
    def coordinator(self) -> Coordinator:
        return self.parent.session.coordinator

    @property
    def readiness(self) -> Readiness:
        return self.parent.session.readiness(self.now)

    def node(self, name: str) -> Node:
        """Return the present process of a name."""
        return self.parent if name == PARENT else self.children[name]

    def nodes(self) -> list[Node]:
        """Return the living processes."""
        return [node for node in self.processes if node.alive]

    def work_s(self, most: float) -> float:
        """Return how long some work takes this time."""
        return self.random.random() * most

    # What happens

    def start(self, name: str = "device-0", *, ready_s: float = 0.2, parent: str = "") -> ChildNode:
        """Start a process of a child, and return it; it is ready after so long. `parent`: the
        session that it knows.
        """
        session = child_session(
            self.identity(name, "device"), parent=PARENT, session=parent, now=self.now, **self.both
        )
        child = self.children[name] = ChildNode(self, session, train_s=self.train_s)
        self.processes.append(child)
        child.connect()
        self.after(ready_s, self.ready, child)
        return child

    def start_parent(self) -> None:
        """Start a process of the parent, which opens the round again."""
        session = parent_session(
            self.names,
            identity=self.identity(PARENT, "cloud", ledger=RUN),
            limits=self.limits,
            now=self.now,
            **self.both,
        )
        session.set_form(FORM)
        self.parent = ParentNode(self, session)
        self.processes.append(self.parent)
        self.parent.connect()
        self.parent.set_state(NodeState.READY)
        if self.opening is not None:
            self.after(0.3, self._open, self.parent)

    def identity(self, name: str, role: str, **more: str) -> Identity:
        """Return the identity of a new process."""
        return Identity(RUN, name, role, f"{name}/{next(self._sessions)}", **more)

    def ready(self, child: ChildNode) -> None:
        """Let a child be ready."""
        if child.alive:
            child.session.set_form(FORM)
            child.session.prepared()
            child.set_state(NodeState.READY, samples=10)

    def kill(
        self, name: str = "device-0", *, will_after_s: float = 0.1, for_s: float = inf
    ) -> None:
        """End a process as SIGKILL does; another one of its name comes later."""

        def start() -> None:
            if not self.node(name).alive:
                self.start_parent() if name == PARENT else self.start(name)

        self.node(name).end(will_after_s=will_after_s)
        self.after(for_s, start)

    def restart_broker(self, *, down_s: float, retained: Mapping[str, bytes] | None = None) -> None:
        """Restart the broker, which comes back with this store, its own where None is given."""
        self.broker.up = False
        self.broker.restart(retained=self.broker.retained if retained is None else retained)
        for node in self.nodes():
            node.disconnect(back_after_s=down_s + self.work_s(0.2))
        self.after(down_s, setattr, self.broker, "up", True)

    def hit(self, *faults: Fault) -> None:
        """Let these faults happen.

        `amount`: the seconds until the will of a node comes that is killed or cut off. `detail`:
        the state of the remains of a dead process, of a stranger, or in which a node ends; the part
        of the topics that are lost; the store of a restarted broker.
        """
        for fault in faults:
            self.after(fault.at_s, self._hit, fault)

    def _hit(self, fault: Fault) -> None:
        name, for_s, detail = fault.node, fault.for_s, fault.detail
        if fault.kind is FaultKind.BROKER:
            if self.broker.up:
                self.restart_broker(down_s=for_s, retained=self.stores.get(detail))
        elif fault.kind is FaultKind.REMAINS:
            self.remains(name, NodeState(detail))
        elif fault.kind is FaultKind.STRANGER:
            for node in self.nodes():
                if node.name != name:
                    node.inject_state(name, "stranger", Presence(NodeState(detail), "stranger"))
        elif fault.kind is FaultKind.TERMINATE:
            self.node(name).set_state(NodeState(detail), reason="it is over")
        elif fault.kind is FaultKind.MUTE:
            self.mute(f"{name}/{detail}", for_s=for_s)
        elif fault.kind is FaultKind.KILL:
            self.kill(name, will_after_s=fault.amount, for_s=for_s)
        elif self.node(name).alive:
            assert fault.kind is FaultKind.PARTITION
            self.node(name).disconnect(will_after_s=fault.amount, back_after_s=for_s)

    def mute(self, *parts: str, for_s: float = inf) -> None:
        """Lose all messages whose topics have one of these parts; none without any."""
        self.broker.drop = lambda topic: any(part in topic for part in parts)
        self.after(for_s, self.mute)

    def remains(self, name: str, state: NodeState = NodeState.READY) -> None:
        """Leave the retained presence of a dead process."""
        presence = Presence(state, "device", samples=99, reason="of another time")
        body = serialization.encode(presence, "dead")
        self.broker.retained[topics.state(LAB, RUN, name)] = body

    def publish(
        self, node: str, sender: str, session: str, message: Message, *, retained: bool = False
    ) -> None:
        """Give a message to the broker in the name of any process."""
        body = serialization.encode(message, session)
        topic = topics.state(LAB, RUN, sender) if retained else topics.inbox(LAB, RUN, node, sender)
        self.broker.route(topic, body, retained)

    def flood(self, action: Callable[[int], object], count: int, seconds: float) -> None:
        """Do something again and again, evenly over so long."""
        for number in range(count):
            self.after(seconds * number / count, action, number)

    # Rounds

    def open(
        self,
        names: Collection[str] | None = None,
        *,
        model: bytes | None = None,
        models: dict[str, bytes] | None = None,
        **how: Any,
    ) -> Key:
        """Open a round; without another model it has one of its own. `how`: fields of `Opening`."""
        self.opening = opening = Opening(models or {}, **how)
        one = model or model_of(1000 * opening.global_round + opening.local_round)
        opening.models = models or dict.fromkeys(names or self.names, one)
        return self._open(self.parent) or Key(0, 0, 0)

    def play(self, *, until_s: float = 400.0) -> Closed | Stalled:
        """Run until the open round is over, over restarts of the parent."""
        over = self.run_until(self.now + until_s, lambda: self.parent.over is not None)
        event, self.parent.over = self.parent.over, None
        assert over and event is not None, f"the round hangs: {self.coordinator.children}"
        self.parent.session.end_round(self.now)
        self.parent.wake()
        self.opening = None
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

    def complete(self, *, until_s: float = 400.0, **how: Any) -> Closed:
        """Open a round and play it; it must close with a result of each child."""
        self.open(**how)
        return self.finish(until_s=until_s)

    def stall(self) -> Stalled:
        """Play the open round, which must stall."""
        stalled = self.play()
        assert isinstance(stalled, Stalled), stalled
        return stalled

    def rest(self, seconds: float) -> None:
        """Let everything go its way for so long."""
        self.run_until(self.now + seconds)

    def until(self, done: Callable[[], object], *, within_s: float = 60.0) -> None:
        """Let everything go its way until something is so."""
        assert self.run_until(self.now + within_s, lambda: bool(done()))

    def check(self) -> None:
        """Check what must hold at any time: nothing is trained twice in one process, and there are
        no storms.
        """
        for node in self.processes:
            if isinstance(node, ChildNode):
                assert len(node.trained) == len(set(node.trained)), f"twice: {node.trained}"
        storms = {who: count for who, count in self.messages.items() if count > 30}
        assert not storms, f"messages in one second: {storms}"

    def note(self, sender: str, output: Publish) -> None:
        if output.body:
            kind = msgpack.unpackb(output.body[DIGEST_BYTES:])[2]
            self.kinds[serialization.KINDS[kind].__name__] += 1
            levels = output.topic.split("/")
            if "inbox" in levels:
                self.messages[sender, levels[3], int(self.now)] += 1

    def _open(self, parent: ParentNode) -> Key | None:
        return parent.open(self.opening) if self.opening is not None and parent.alive else None


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
