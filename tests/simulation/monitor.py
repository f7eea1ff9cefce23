"""Observation of a running lab and its end: sizes of containers, tasks, bytes, retained messages."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from fedstrata.common.accounting.counters import packet_bytes
from fedstrata.common.accounting.traffic import Traffic
from fedstrata.common.errors import WireError
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.child_session import ChildSession
from fedstrata.common.protocol.limits import plans_of
from fedstrata.common.protocol.messages import (
    Acknowledgement,
    Alive,
    Key,
    Message,
    Presence,
    Result,
    RoundTurn,
    Task,
)
from fedstrata.common.protocol.parent_session import ParentSession
from fedstrata.common.runtime.endpoint import Endpoint
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.simulation.simulated_broker import Routed
from fedstrata.deploy.simulation.simulated_world import SimulatedConnection
from tests.simulation.interference import kind_of
from tests.simulation.lab import ScenarioLab
from tests.simulation.outcome import LabOutcome

SAMPLE_S: Final = 3.3
SAMPLE_GROWTH: Final = 1.9
ANNOUNCEMENT_LEAST: Final = 1000  # bytes; a message with an experiment is larger
CONTAINERS: Final = (dict, list, set, deque, frozenset)
PACKAGES: Final = ("fedstrata.common.protocol", "fedstrata.common.runtime")


@dataclass(slots=True)
class LinkCount:
    """MQTT bytes between a parent and a child, over all their processes, as counted by each end."""

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Evidence:
    """Observations of one lab.

    sizes: the largest size of each container, by its path    tasks: the most asyncio tasks of each
    role zero_s: when the traces began, as the cloud's last process has it    closed_s: when each
    global round closed failed_s: when the cloud failed retained: topics retained by the brokers at
    the end up, down: each child's link to its parent, by (parent, child)
    ledgers: each parent's byte ledger at the end, every link below it
    trained: how often each device completed each round    starts: processes of each node    late:
    late results before_join: bytes of a parent's messages to a child that had not joined the run,
    by (parent, child) unsettled: results that a parent has accepted, and neither used in one closed
    round nor taken back left_s: when each node last cleared its retained messages: it has left the
    run misled: tasks that follow one whose result was refused, or taken back; results accepted
    before they arrived, and results of rounds that were not trained weighed: results of parents of
    devices whose samples are not those that their children had prepared
    """

    sizes: Counter[str] = field(default_factory=Counter)
    tasks: Counter[str] = field(default_factory=Counter)
    zero_s: float | None = None
    closed_s: list[float] = field(default_factory=list)
    failed_s: float | None = None
    retained: list[str] = field(default_factory=list)
    up: dict[tuple[str, str], LinkCount] = field(default_factory=dict)
    down: dict[tuple[str, str], LinkCount] = field(default_factory=dict)
    ledgers: dict[str, Mapping[str, Traffic]] = field(default_factory=dict)
    trained: Counter[tuple[str, int]] = field(default_factory=Counter)
    starts: Counter[str] = field(default_factory=Counter)
    before_join: Counter[tuple[str, str]] = field(default_factory=Counter)
    late: int = 0
    unsettled: list[str] = field(default_factory=list)
    misled: list[str] = field(default_factory=list)
    weighed: list[str] = field(default_factory=list)
    left_s: dict[str, float] = field(default_factory=dict)
    # Of each exchange and child: which of its two secrets others have given shares of, True for its
    # own mask, False for its key.
    opened: dict[tuple[bytes, str], set[bool]] = field(default_factory=lambda: defaultdict(set))


@dataclass(frozen=True, slots=True)
class LabRun:
    """A completed lab: its outcome, and the evidence that the monitor collected."""

    outcome: LabOutcome
    evidence: Evidence


class Monitor:
    """Collector of one lab's evidence."""

    def __init__(self) -> None:
        self.evidence = Evidence()
        self._joined: set[tuple[str, str]] = set()  # runs, and their nodes
        # by a parent's session, the child and its round
        self._answers: dict[tuple[str, str, int, int], str] = {}
        # the last key that was answered, by the same
        self._answered: dict[tuple[str, str], Key] = {}
        # each device's samples, as it has published or answered
        self._prepared: dict[str, int] = {}
        self.lab: ScenarioLab

    def observe(self, event: str, facts: dict[str, object]) -> None:
        """Record an event of the cloud."""
        if event == "begun":
            self.evidence.zero_s = self.lab.now() - cast(float, facts["elapsed_s"])
        elif event == "global_round":
            self.evidence.closed_s.append(self.lab.now())
        elif event == "failed":
            self.evidence.failed_s = self.lab.now()

    def routed(self, message: Routed) -> None:
        """Count messages to a node that has not joined the run: questions, and answers to its
        search.
        """
        topic = topics.parse(message.topic)
        if isinstance(topic, topics.StateTopic):
            self._joined.add((topic.run, topic.node))
        elif isinstance(topic, topics.InboxTopic):
            late = len(message.body) > ANNOUNCEMENT_LEAST and kind_of(message) == "Alive"
            if late or (topic.run, topic.node) not in self._joined:
                size = packet_bytes(message.topic, len(message.body), qos=message.qos)
                self.evidence.before_join[topic.sender, topic.node] += size

    def answered(self, message: Routed) -> None:
        """Compare what each task follows with the last answer of its parent's session to that
        task's result.

        And each result of a device with the rounds that it has trained, each of its parent with the
        devices' samples.
        """
        if self.lab.injecting:
            return
        if not message.body:
            self._note_leaving(topics.parse(message.topic))
        if kind_of(message) not in ("Task", "Acknowledgement", "Result", "Presence", "Alive"):
            return
        try:
            topic, (session, content) = (
                topics.parse(message.topic),
                serialization.decode(message.body),
            )
        except WireError:
            return  # damaged on its way
        self._note_samples(topic, content)
        if not isinstance(topic, topics.InboxTopic):
            return
        experiment = self.lab.agents.experiment
        if isinstance(content, Result) and content.key.turn == RoundTurn.MODEL:
            self._announced(topic.sender, content)
        elif isinstance(content, Acknowledgement):
            if content.key < self._answered.get((session, topic.node), content.key):
                return  # the child has a later task, and ignores it
            self._answered[session, topic.node] = content.key
            if content.key.turn != RoundTurn.MODEL:
                return
            place = session, topic.node, content.key.global_round, content.key.local_round
            self._answers[place] = content.reason
            if not content.reason and self._awaits(topic.sender, session, topic.node, content.key):
                self.evidence.misled.append(
                    f"{topic.node}'s result {tuple(content.key)} is accepted before it arrived"
                )
        elif isinstance(content, Task) and content.follows:
            rounds = experiment.rounds_of(experiment.tree.depth(topic.sender))
            place = session, topic.node, *divmod(content.follows - 1, rounds)
            # by the child, to its own harm
            claimed = "places" in self.lab.lies and experiment.tiers[-1].entering
            if (reason := self._answers.get(place)) and not claimed:
                self.evidence.misled.append(
                    f"{topic.node} follows its task {content.follows}: {reason}"
                )

    def _announced(self, node: str, result: Result) -> None:
        """Compare a device's result with what it has trained, its parent's with the samples of its
        last round.
        """
        experiment, key = self.lab.agents.experiment, result.key
        if result.work.epochs and node in self.lab.homes:
            number = key.global_round * experiment.device_rounds + key.local_round
            if not self.lab.hardware.trained[node, number]:
                self.evidence.misled.append(
                    f"{node} announces round {number}, which it has not trained"
                )
        elif node in experiment.tree.layers[-2]:
            last = plans_of(result)[node][-1]
            absent = {*last.get("absent", ()), *last.get("unreported", ())}
            expected = sum(
                self._prepared.get(child, 0)
                for child in experiment.tree.children[node]
                if child not in absent
            )
            if result.samples != expected:
                wrong = (
                    f"{node} weighs {result.samples} in round {tuple(key)}, its devices have "
                    f"{expected}"
                )
                self.evidence.weighed.append(wrong)

    def _note_samples(self, topic: topics.Topic, content: Message) -> None:
        """Note the samples that a node reports, on its topic or in an answer."""
        found: tuple[str, Presence] | None = None
        if isinstance(topic, topics.StateTopic) and isinstance(content, Presence):
            found = topic.node, content
        elif isinstance(topic, topics.InboxTopic) and isinstance(content, Alive):
            found = topic.sender, content.presence
        if found is not None and found[1].samples:
            self._prepared[found[0]] = found[1].samples

    def _note_leaving(self, topic: topics.Topic) -> None:
        if isinstance(topic, topics.StateTopic | topics.SpecTopic):
            self.evidence.left_s[topic.node] = self.lab.now()

    def _awaits(self, parent: str, session: str, child: str, key: Key) -> bool:
        """Return whether a parent has yet to receive the model of a result that a child announced."""
        found = (endpoint.session for endpoint in endpoints(self.lab, parent, last=True))
        parents = [
            each
            for each in found
            if isinstance(each, ParentSession) and each.link.identity.session == session
        ]
        return any(
            child in each.link.peers and each.coordinator.is_announced(child, key)
            for each in parents
        )

    async def sample(self) -> None:
        """Sample all sessions at growing intervals until cancelled."""
        pause_s = SAMPLE_S
        while True:
            await asyncio.sleep(pause_s)
            self.look()
            pause_s *= SAMPLE_GROWTH

    def look(self) -> None:
        """Record the current sizes."""
        lab, evidence = self.lab, self.evidence
        for node, process in lab.processes.items():
            if not process.alive:
                continue
            role = "cloud" if node == CLOUD else "device" if node in lab.homes else "institution"
            evidence.tasks[role] = max(evidence.tasks[role], len(process.tasks))
            for endpoint in endpoints(lab, node, last=True):
                for path, size in sizes(endpoint):
                    evidence.sizes[f"{role} {path}"] = max(evidence.sizes[f"{role} {path}"], size)

    def end(self, lab: ScenarioLab) -> None:
        """Record the state of the lab at its end."""
        self.look()
        evidence = self.evidence
        evidence.trained = lab.hardware.trained
        evidence.starts = Counter({node: len(worlds) for node, worlds in lab.worlds.items()})
        evidence.retained = sorted(
            {topic for broker in lab.network.brokers.values() for topic in broker.retained}
        )
        for node in lab.worlds:
            for endpoint in endpoints(lab, node):
                self._count(node, endpoint.session)
                self._settle(node, endpoint)

    def _settle(self, node: str, endpoint: Endpoint) -> None:
        if not isinstance(endpoint.session, ParentSession):
            return
        assert isinstance(endpoint.connection, SimulatedConnection)
        coordinator, process = endpoint.session.coordinator, endpoint.connection.process
        goes_on = process.alive or process.killed  # a process that has ended settles all
        pending = len(coordinator.unsettled()) if goes_on else 0
        lost = coordinator.accepted - coordinator.used - coordinator.taken_back - pending
        if lost:
            self.evidence.unsettled.append(f"{node}: {lost} of {coordinator.accepted}")

    def _count(self, node: str, session: ParentSession | ChildSession) -> None:
        evidence = self.evidence
        if isinstance(session, ParentSession):
            evidence.ledgers[node] = {
                name: report.traffic for name, report in session.ledger.reports().items()
            }
            evidence.late += session.coordinator.late
        for (peer, direction, kind), tally in session.link.counters.cells.items():
            if isinstance(session, ParentSession):
                to = evidence.down if direction == "sent" else evidence.up
                link = to.setdefault((node, peer), LinkCount())
            else:
                assert isinstance(session, ChildSession)
                to = evidence.up if direction == "sent" else evidence.down
                link = to.setdefault((peer, node), LinkCount())
            counts = link.sent if direction == "sent" else link.received
            counts[kind] += tally.message
            counts[f"{kind} payload"] += tally.payload


def endpoints(lab: ScenarioLab, node: str, *, last: bool = False) -> Iterator[Endpoint]:
    """Yield the endpoints of all processes of a node, or of the last one."""
    for world in lab.worlds[node][-1:] if last else lab.worlds[node]:
        for connection in world.connections:
            if isinstance(connection.user, Endpoint):
                yield connection.user


def sizes(thing: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, int]]:
    """Yield the path and the size of every container in an object of PACKAGES."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, CONTAINERS):
        yield path, len(thing)
        for item in list(thing.values() if isinstance(thing, dict) else thing):
            if _is_internal(item) or isinstance(item, CONTAINERS):
                yield from sizes(item, f"{path}[]", seen)
    elif _is_internal(thing):
        for name in _fields(thing):
            value = getattr(thing, name, None)
            if isinstance(value, CONTAINERS) or _is_internal(value):
                yield from sizes(value, f"{path}.{name}" if path else name, seen)


def _is_internal(thing: Any) -> bool:
    return type(thing).__module__.startswith(PACKAGES) and not isinstance(thing, type)


def _fields(thing: Any) -> list[str]:
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*slots, *getattr(thing, "__dict__", ())]
