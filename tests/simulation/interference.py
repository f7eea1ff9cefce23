"""Interference with messages: lost kinds, flipped bits, messages of unknown sessions, and floods."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import fields, replace
from math import inf, nan
from typing import Any, Final, cast

import msgpack
import numpy as np

from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.costs import DeviceCosts
from fedstrata.common.accounting.traffic import Traffic
from fedstrata.common.errors import WireError
from fedstrata.common.host.energy_meters import EnergySource
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.manifest import describe
from fedstrata.common.protocol.messages import (
    DIGEST_BYTES,
    LIVING,
    Acknowledgement,
    Alive,
    Announcement,
    Ask,
    Farewell,
    Gone,
    Goodbye,
    Key,
    Message,
    NodeState,
    Phase,
    Preparing,
    Presence,
    Progress,
    Question,
    Reports,
    Result,
    Target,
    Task,
)
from fedstrata.common.protocol.presence import FINAL
from fedstrata.common.protocol.serialization import KINDS
from fedstrata.common.runtime.endpoint import Endpoint
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.training.scores import ScoredModels, ScoreSums
from fedstrata.deploy.simulation.simulated_broker import Routed
from fedstrata.deploy.simulation.simulated_lab import BROKER
from tests.simulation.faults import SIDE, Fault, FaultKind
from tests.simulation.lab import ScenarioLab

CHUNK: Final = "chunk"
HUGE: Final = 10**9  # more than any experiment has
LIES: Final[Mapping[type, Sequence[Mapping[str, Any]]]] = {
    Result: (
        *({name: HUGE} for name in ("samples", "epochs", "steps", "path_steps")),
        {"samples": 0},
        {"loss": nan},
        {"train_s": -1.0},
        {"plans": "[1]"},
        {"children": (ChildReport("stranger"),)},
        {"costs": DeviceCosts(1e306, 1e306, energy_source=EnergySource.PLUG)},
        {"costs": DeviceCosts(cpu_s=nan)},
        {"tests": ScoredModels(ScoreSums(10**11, 1.0, b""), None)},
    ),
    Task: ({"follows": HUGE}, {"epochs": HUGE}, {"epochs": 0}),
    Presence: (
        {"samples": HUGE},
        {"targets": (Target("stranger", "stranger:1"),) * 99},
        {"state": NodeState.INIT},
        {"elapsed_s": 1e9},
        {"role": "stranger"},
        {"answers": "f" * 16},
        {"parent": "stranger"},
        {"after": HUGE},
        {"tests": 1},
    ),
    Alive: ({"presence": Presence(NodeState.INIT, "stranger")}, {"nonce": "f" * 16}),
    Announcement: ({"experiment": "{}"}, {"layout": "{}"}),
    Preparing: ({"done": HUGE},),
    Progress: ({"below": (Traffic(),) * 99},),
    Ask: ({"lacking": b"\xff" * 64}, {"window": HUGE}, {"seen_all": HUGE}),
    Reports: ({"children": (ChildReport("stranger"),)},),
}
# What lies are about, by the field that has them; those of side numbers cost no model.
SUBJECTS: Final[Mapping[str, str]] = {
    "tests": "scores", "costs": "costs", "parent": "places", "after": "places", "targets": "places",
    "children": "places",
}  # fmt: skip
SIDE_NUMBERS: Final[Mapping[type, Sequence[str]]] = {
    Result: ("tests", "costs"),
    Presence: ("tests", "targets"),
}
SEEN: Final = 50  # messages of each node that a stranger remembers
REPLAYED: Final = 0.4  # share of a stranger's messages that are sent as they were
CLEARED: Final = 0.2  # share of the forged presences that are empty, as when a node leaves
NOISE_BYTES_MOST: Final = 200_000
DEAD_RUN: Final = "20200101T000000Z-dead00"
DEAD_SESSION: Final = "0123456789abcdef"


def kind_of(message: Routed) -> str:
    """Return the kind of a message: its record's name, `chunk`, or "" if it is empty or malformed."""
    if "/blob/" in message.topic:
        return CHUNK
    unpacker = msgpack.Unpacker()
    unpacker.feed(message.body[DIGEST_BYTES:][:200])
    try:
        unpacker.read_array_header()
        unpacker.skip()
        unpacker.skip()
        return str(KINDS[unpacker.unpack()].__name__)
    except (ValueError, TypeError, IndexError, msgpack.UnpackException):
        return ""


def sender_of(topic: str) -> str:
    """Return the sender of a message, by its topic; "" for a topic that is not fedstrata's."""
    try:
        return topics.sender_of(topics.parse(topic))
    except WireError:
        return ""


class MuteFilter:
    """Filter that drops one kind of message, of one sender or of all."""

    def __init__(self, lab: ScenarioLab, fault: Fault) -> None:
        self._fault = fault

    def __call__(self, message: Routed) -> bool:
        """Return whether a message is forwarded."""
        fault = self._fault
        return kind_of(message) != fault.detail or fault.node not in ("", sender_of(message.topic))


class Flipper:
    """Filter that flips one bit in a share of one sender's messages."""

    def __init__(self, lab: ScenarioLab, fault: Fault) -> None:
        self._lab, self._fault = lab, fault
        self._rng = random.Random(f"{lab.seed} flip {fault}")
        self._flipping = False

    def __call__(self, message: Routed) -> bool:
        """Return whether a message is forwarded unchanged."""
        if self._flipping or not message.body or sender_of(message.topic) != self._fault.node:
            return True
        if self._rng.random() >= self._fault.amount:
            return True
        body = bytearray(message.body)
        place = self._rng.randrange(8 * len(body))
        body[place // 8] ^= 1 << place % 8
        self._flipping = True
        self._lab.broker(message.broker).route(
            message.topic, bytes(body), qos=message.qos, retain=message.retain
        )
        self._flipping = False
        return False


class Liar:
    """Filter that replaces the content of a share of one member's messages, which remain those of
    its own session.

    Only by what the experiment, or another message, contradicts: no node can know that another
    number is wrong.
    """

    def __init__(self, lab: ScenarioLab, fault: Fault) -> None:
        self._lab, self._fault = lab, fault
        self._rng = random.Random(f"{lab.seed} lies {fault}")
        self._lying = False

    def __call__(self, message: Routed) -> bool:
        """Return whether a message is forwarded as it was sent."""
        lab, rng, fault = self._lab, self._rng, self._fault
        if (
            lab.injecting
            or self._lying
            or kind_of(message) in ("", CHUNK)
            or sender_of(message.topic) != fault.node
        ):
            return True
        try:
            session, content = serialization.decode(message.body)
        except WireError:
            return True  # damaged on its way
        lies = _lies(content, rng)
        if fault.detail == SIDE:
            side = SIDE_NUMBERS.get(type(content), ())
            lies = [lie for lie in lies if all(field in side for field in lie)]
        if not lies or rng.random() >= fault.amount:
            return True
        lie = rng.choice(lies)
        lab.lies.update(SUBJECTS[field] for field in lie if field in SUBJECTS)
        body = serialization.encode(_altered(content, lie), session)
        if fault.detail == SIDE:  # all else is what the member has sent
            self._lying = True
            lab.broker(message.broker).route(
                message.topic, body, qos=message.qos, retain=message.retain
            )
            self._lying = False
        else:
            lab.inject(
                message.topic, body, qos=message.qos, retain=message.retain, broker=message.broker
            )
        return False


def _lies(content: Message, rng: random.Random) -> list[Mapping[str, Any]]:
    """Return what a member may change in a message, none if nothing in it can be wrong."""
    kind: Any = type(content)
    changes = list(LIES.get(kind, ()))
    if isinstance(content, Task | Result | Acknowledgement):
        changes.append({"key": content.key._replace(global_round=HUGE)})
    if isinstance(content, Task | Result):
        model = content.model
        larger = memoryview(bytes(model.size + 4))
        models = [
            describe(larger, chunk_bytes=model.chunk_bytes, codec=model.codec, layout=model.layout),
            replace(model, layout="0" * 16),
            replace(model, codec="none"),
            replace(model, reference="f" * 16),
            replace(model, digests=rng.randbytes(len(model.digests))),
            replace(model, blob=rng.randbytes(8).hex()),
        ]
        changes += [{"model": each, "inline": None} for each in models]
    tests = content.work.tests if isinstance(content, Result) else None
    if tests is not None and tests.received is not None:
        received = tests.received
        false = [
            replace(received, samples=10**11),
            replace(received, loss=-inf),
            replace(received, loss=nan),
        ]
        changes += [{"tests": replace(tests, received=each)} for each in false]
    return changes


def _altered(content: Any, lie: Mapping[str, Any]) -> Message:
    """Return a message with the fields of a lie, of which a result has some in its work."""
    if not isinstance(content, Result):
        return cast(Message, replace(content, **lie))
    own = {field.name for field in fields(content)}
    work = replace(content.work, **{name: value for name, value in lie.items() if name not in own})
    return replace(
        content, work=work, **{name: value for name, value in lie.items() if name in own}
    )


class InboxOf(Container[str]):
    """The filters of the messages to a node."""

    def __init__(self, node: str) -> None:
        self._node = node

    def __contains__(self, topic_filter: object) -> bool:
        return f"/{self._node}/inbox/" in str(topic_filter)


class Wiretap:
    """What a stranger has seen of a lab: its latest messages by sender, and the sessions of each
    node in order.

    It forges no proof of life: a session that proves itself is a new process of its peer to a node.
    """

    def __init__(self, lab: ScenarioLab) -> None:
        self._lab = lab
        self.messages: dict[str, deque[Routed]] = {}
        self.sessions: dict[str, list[str]] = {}
        self._present: dict[str, Task] = {}  # the last task of each node

    def __call__(self, message: Routed) -> None:
        """Take a message that a node has sent."""
        if self._lab.injecting or "/blob/" in message.topic or not message.body:
            return
        node = sender_of(message.topic)
        try:
            topic, (session, content) = (
                topics.parse(message.topic),
                serialization.decode(message.body),
            )
        except WireError:
            return
        if isinstance(content, Task) and isinstance(topic, topics.InboxTopic):
            self._present[topic.node] = content
        sessions = self.sessions.setdefault(node, [])
        # Whoever only seeks a run has no session in it: the last one there is believed until then.
        if session not in sessions and not isinstance(topic, topics.AskTopic):
            sessions.append(session)
        self.messages.setdefault(node, deque(maxlen=SEEN)).append(message)

    def forge(self, node: str, rng: random.Random) -> Routed | None:
        """Return a real message of a node: as it was, or of another session, with another model
        where it has one.
        """
        seen = self.messages.get(node)
        if not seen or not self.sessions[node]:
            return None
        message = rng.choice(seen)
        _, content = serialization.decode(message.body)
        if isinstance(content, Alive):
            return None
        if rng.random() < REPLAYED and not (
            isinstance(content, Presence) and content.state in LIVING
        ):
            return message
        *old, _own = self.sessions[node]
        others = [name for each, names in self.sessions.items() if each != node for name in names]
        session = rng.choice([rng.randbytes(8).hex(), *old[-1:], *others[-3:]])
        present = self._present.get(node)
        if isinstance(content, Result | Progress) and present is not None:
            content = replace(content, key=present.key)
        if isinstance(content, Task | Result):
            content = _with_noise(content, rng)
        elif isinstance(content, Acknowledgement):
            content = replace(content, reason=rng.choice(["", "no"]))
        elif isinstance(content, Presence) and rng.random() < CLEARED:
            return message._replace(body=b"")
        elif isinstance(content, Presence):
            content = replace(content, state=rng.choice(FINAL))  # a late will, or last message
        elif isinstance(content, Ask):
            answers: list[Message] = [Gone(content.blob), replace(content, lacking=b"")]
            content = rng.choice(answers)
        return message._replace(body=serialization.encode(content, session))


def send_as_stranger(lab: ScenarioLab, fault: Fault, number: int, tap: Wiretap | None) -> None:
    """Publish a message under a node's name: one seen before, as it was or forged; else one of an
    unknown session.
    """
    rng = random.Random(f"{lab.seed} stranger seen {fault} {number}")
    seen = None if tap is None else tap.forge(fault.node, rng)
    if tap is None:
        _send_unseen(lab, fault, number)
    elif seen is not None:
        # a new process believes such a state
        retain = seen.retain and rng.random() < 0.3 and not _ends_a_run(seen)
        lab.inject(seen.topic, seen.body, qos=seen.qos, retain=retain, broker=seen.broker)


def _ends_a_run(message: Routed) -> bool:
    content = serialization.decode(message.body)[1] if message.body else None
    return isinstance(content, Presence) and content.state in (NodeState.FINISHED, NodeState.FAILED)


def _with_noise(content: Task | Result, rng: random.Random) -> Task | Result:
    """Return a task or a result with another model of the same form, inside the message."""
    model = content.model
    noise = rng.randbytes(min(model.size, NOISE_BYTES_MOST))
    if model.size > NOISE_BYTES_MOST or model.codec != "fp32":
        return content
    floats = np.frombuffer(noise, np.uint8).astype(np.float32)[: model.size // 4]
    body = memoryview(np.resize(floats, model.size // 4).tobytes())
    return replace(
        content,
        model=describe(body, chunk_bytes=model.chunk_bytes, codec=model.codec, layout=model.layout),
        inline=bytes(body),
    )


def _send_unseen(lab: ScenarioLab, fault: Fault, number: int) -> None:
    """Publish a message of an unknown session under a node's name."""
    node, rng = fault.node, random.Random(f"{lab.seed} stranger {fault} {number}")
    for endpoint in _endpoints(lab, node):
        identity = endpoint.identity
        session = rng.randbytes(8).hex()
        peer = rng.choice(endpoint.link.peers)
        body = serialization.encode(rng.choice(_messages(node == CLOUD)), session)
        broker = endpoint.connection.address.host
        if rng.random() < 0.2:
            state = rng.choice([NodeState.INIT, NodeState.READY, NodeState.LOST])
            body = serialization.encode(Presence(state, identity.role, samples=7), session)
            lab.inject(
                topics.state(identity.lab, identity.run, node),
                body,
                retain=rng.random() < 0.5,
                broker=broker,
            )
        else:
            lab.inject(topics.inbox(identity.lab, identity.run, peer, node), body, broker=broker)


def flood(lab: ScenarioLab, fault: Fault, number: int) -> None:
    """Publish one message of a flood: asks of a node's own session, or searches of unknown nodes
    for it.
    """
    rng = random.Random(f"{lab.seed} flood {fault} {number}")
    for endpoint in _endpoints(lab, fault.node):
        identity, broker = endpoint.identity, endpoint.connection.address.host
        if fault.kind is FaultKind.SEEKERS:
            question = Question(f"{number:016x}", run=identity.run)
            body = serialization.encode(question, f"{number:016x}")
            lab.inject(
                topics.ask(identity.lab, fault.node, f"stranger-{number}"),
                body,
                qos=0,
                broker=broker,
            )
        else:
            ask = Ask(rng.randbytes(8).hex(), b"\xff" * 8, 0, 0, 64, True)
            for peer in endpoint.link.peers:
                topic = topics.inbox(identity.lab, identity.run, peer, fault.node)
                lab.inject(topic, serialization.encode(ask, identity.session), qos=0, broker=broker)


def leave_remains(lab: ScenarioLab, fault: Fault) -> None:
    """Publish the remains of a dead run on a broker: retained READY presences, and an experiment."""
    presence = Presence(NodeState.READY, "device", samples=10, ledger=DEAD_SESSION)
    for node in {fault.node, lab.homes.get(fault.node, CLOUD), CLOUD}:
        for broker in lab.network.brokers:
            topic = topics.state("lab", DEAD_RUN, node)
            lab.inject(
                topic, serialization.encode(presence, DEAD_SESSION), retain=True, broker=broker
            )
    announcement = serialization.encode(Announcement("{}", "{}"), DEAD_SESSION)
    lab.inject(topics.spec("lab", DEAD_RUN, CLOUD), announcement, retain=True, broker=BROKER)


def _endpoints(lab: ScenarioLab, node: str) -> list[Endpoint]:
    if not lab.alive(node):
        return []
    users = [connection.user for connection in lab.worlds[node][-1].connections if connection.up]
    return [user for user in users if isinstance(user, Endpoint)]


def _messages(parent: bool) -> list[Message]:
    key, nothing, blob = Key(0, 99, 0), Traffic(), "0123456789abcdef"
    alive = Alive("f" * 16, Presence(NodeState.READY, "x"))
    both: list[Message] = [Ask(blob, b"\xff", 0, 0, 8, True), Gone(blob), Question("f" * 16), alive]
    if parent:
        manifest: Any = describe(
            memoryview(b"1" * 64), chunk_bytes=32_768, codec="fp32", layout="0" * 16
        )
        return [*both, Task(key, 1, manifest, None), Acknowledgement(key, "no"), Goodbye()]
    return [
        *both,
        Progress(key, Phase.TRAINING, 1, 2, nothing, ()),
        Preparing(1, ""),
        Farewell(nothing, ()),
    ]
