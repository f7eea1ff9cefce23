"""A run as the messages on its brokers tell it: a tree of nodes, and what happens. Sans-IO.

Known from these messages: who is there, who is in which round, how far models have travelled and trainings gone, bytes
and training losses. Not known: accuracies, which the cloud keeps to itself, and what its rules decide.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from common.errors import FedstrataError, NoProgress, RunFailed, WireError
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD
from common.protocol import serialization, topics
from common.protocol.messages import (
    Acknowledgement,
    Alive,
    Ask,
    Declined,
    Farewell,
    Message,
    NodeState,
    Preparing,
    Presence,
    Probe,
    Probed,
    Progress,
    Reports,
    Result,
    Task,
)
from deploy.watching.meter import RateMeter
from deploy.watching.node import Node

GOODBYE_S: Final = 12.0  # what a cloud that has finished takes to leave, at most
GLOBAL_ROUNDS_KEPT: Final = 10
SILENT_S: Final = 15.0  # a child at work says a word every two seconds
OVER: Final = ("left", NodeState.FINISHED, NodeState.FAILED)

Event: TypeAlias = tuple[str, dict[str, object]]


@dataclass(frozen=True, slots=True)
class Flow:
    """What passed one way: bytes since the books began, and bytes per second."""

    total: int
    rate: float


@dataclass(slots=True)
class WatchedBroker:
    """One of the brokers; `since`: when it came or went, seconds."""

    address: str
    up: bool
    since: float


class WatchedLab:
    """One run. Hand it every message, and the time; take its events until it has ended.

    Messages of other labs and runs change nothing.

    `brokers`: their addresses, the cloud's first; a node that is on several counts as the first of them says.
    """

    def __init__(
        self, run: str, experiment: Experiment, *, brokers: Sequence[str], now: float, lab: str = topics.DEFAULT_LAB
    ) -> None:
        self.run = run
        self._lab = lab
        self.experiment = experiment
        self.brokers = [WatchedBroker(address, True, now) for address in brokers]
        self.cloud = Node(CLOUD, "cloud")
        self.nodes = {CLOUD: self.cloud}
        for name, devices in experiment.topology.children().items():
            institution = self._add(name, "institution", self.cloud)
            for device in devices:
                self._add(device, "device", institution)
        self.heard = RateMeter()
        self._heard_bytes = 0
        self.controls = 0
        self.ignored = 0
        self.began = now
        self.end: FedstrataError | None = None
        self.ended = False
        self._starts: deque[float] = deque(maxlen=GLOBAL_ROUNDS_KEPT)
        self._alive_at = now
        self._finished_at: float | None = None
        self._ready_at: float | None = None
        self._events: deque[Event] = deque()
        facts = {"run": run, "experiment": experiment.name, "global_rounds": experiment.rounds}
        sizes = {name: len(node.children) for name, node in self.cloud.children.items()}
        self._tell("run", {**facts, "institutions": sizes})

    # What comes

    def receive(self, broker: int, topic_text: str, body: bytes, now: float, *, retained: bool = False) -> None:
        """Take a message of the broker with this place, whatever its bytes; `retained`: from its store."""
        self._heard_bytes += len(topic_text) + len(body)
        self.heard.take(self._heard_bytes, now)
        try:
            topic = topics.parse(topic_text)
            if isinstance(topic, topics.SeekTopic) or (topic.lab, topic.run) != (self._lab, self.run):
                return
            if isinstance(topic, topics.StateTopic):
                self._state(broker, topic.node, body, retained=retained)
            elif isinstance(topic, topics.InboxTopic):
                self._control(broker, topic, body, now)
        except WireError:
            self.ignored += 1

    def connected(self, broker: int, now: float) -> None:
        """Note that a broker is there again: what it keeps follows, and what it lost with it is not known."""
        self._turn(broker, up=True, now=now)
        for node in self.nodes.values():
            node.says.pop(broker, None)
            node.wished_by = ""

    def disconnected(self, broker: int, now: float) -> None:
        """Note that a broker is away."""
        self._turn(broker, up=False, now=now)

    def tick(self, now: float) -> None:
        """Judge by the time whether the run has ended: its nodes give up a parent by the same rule."""
        roots = self._roots()
        if any(root.alive and self.brokers[min(root.says)].up for root in roots):
            self._alive_at = now
        failed = next((root for root in roots if root.state == NodeState.FAILED), None)
        over = bool(roots) and all(root.state in OVER for root in roots)
        if over and self._finished_at is None:
            self._finished_at = now
        elif not over:
            self._finished_at = None
        self._mind_silence(now)
        idle_s = self.experiment.transfer.idle_s
        if failed is not None and over:
            self._finish(RunFailed(f"{failed.name} gave up: {failed.reason}"))
        elif self._finished_at is not None:
            if all(root.state == "left" for root in roots) or now >= self._finished_at + GOODBYE_S:
                self._finish(None)
        elif now >= self._alive_at + idle_s:
            away = [broker.address for broker in self.brokers if not broker.up]
            who = f"broker {away[0]}" if away else self.cloud.name
            state = "" if away else f" (its state is {self.cloud.state})"
            self._finish(NoProgress(f"{who} was not there for {idle_s:g} s{state}"))

    def next_event(self) -> Event | None:
        """Return the next event: a name, and facts that JSON can tell."""
        return self._events.popleft() if self._events else None

    # What is known

    @property
    def global_round(self) -> int:
        """Return the global round that is under way, from 1, 0 before the first."""
        key = self.cloud.round_key
        return key.global_round + 1 if key is not None else 0

    @property
    def loss(self) -> float | None:
        """Return the mean training loss of the institutions' last answers, weighted by their samples."""
        results = [node.result for node in self.cloud.children.values() if node.result is not None]
        results = [result for result in results if math.isfinite(result.loss)]
        samples = sum(result.samples for result in results)
        return sum(result.loss * result.samples for result in results) / samples if samples else None

    def flows(self, now: float) -> dict[str, Flow]:
        """Return what passed on each tier, `wan_up`, `wan_down`, `lan_up`, `lan_down`, as the nodes count MQTT bytes.

        An institution tells the sum of its devices' links; theirs are summed up here where only they are heard.
        """
        wan = list(self.cloud.children.values())
        lan = [node for node in wan if node.below_up.told]
        alone = [device for node in wan if not node.below_up.told for device in node.children.values()]
        return {
            "wan_up": _sum((node.up for node in wan), now),
            "wan_down": _sum((node.down for node in wan), now),
            "lan_up": _sum((*(node.below_up for node in lan), *(node.up for node in alone)), now),
            "lan_down": _sum((*(node.below_down for node in lan), *(node.down for node in alone)), now),
        }

    def left_s(self, now: float) -> float | None:
        """Return how long the run still takes if its global rounds go on as the last ones, None before one was seen."""
        seen = len(self._starts) - 1
        if seen < 1:
            return None
        each = (self._starts[-1] - self._starts[0]) / seen
        return max(0.0, each * (self.experiment.rounds - self.global_round + 1) - (now - self._starts[-1]))

    # Messages

    def _state(self, broker: int, name: str, body: bytes, *, retained: bool) -> None:
        node = self._node(name)
        session, message = serialization.decode(body) if body else ("", None)
        if not (message is None or isinstance(message, Presence)):
            raise WireError("no presence on a state topic")
        if message is not None or node.says:  # else it was an earlier process's
            self._present(node, broker, session, message, retained=retained)

    def _present(self, node: Node, broker: int, session: str, presence: Presence | None, *, retained: bool) -> None:
        before = node.session
        if not node.presence(broker, session, presence, retained=retained):
            return
        self._met(node, before)
        if node.told != node.state:
            node.told = node.state
            reason = {"reason": node.reason} if node.reason else {}
            self._tell("state", {"node": node.name, "role": node.role, "state": node.state, **reason})

    def _control(self, broker: int, topic: topics.InboxTopic, body: bytes, now: float) -> None:
        sender, receiver = self._node(topic.sender), self._node(topic.node)
        if sender.parent is not receiver and receiver.parent is not sender:
            raise WireError("no parent and child")
        session, message = serialization.decode(body)
        if isinstance(message, Alive) and session not in sender.retired:
            self._present(sender, broker, session, message.presence, retained=False)
        if not sender.speaks(session):
            return
        self.controls += 1
        if receiver.parent is sender:
            self._from_parent(receiver, session, message, now)
        else:
            self._from_child(sender, message, now)

    def _from_parent(self, child: Node, session: str, message: Message, now: float) -> None:
        if isinstance(message, Task):
            self._begun(child, child.wished(message, session), now)
        elif isinstance(message, Ask):
            child.fetched(message)
        elif isinstance(message, Probe):
            child.measuring = True
        elif isinstance(message, Acknowledgement) and child.answered(message):
            self._tell("refused", {**_round(child), "reason": message.reason})

    def _from_child(self, child: Node, message: Message, now: float) -> None:
        if isinstance(message, Progress):
            self._begun(child, child.progressed(message, now), now)
        elif isinstance(message, Ask):
            child.asked(message)
        elif isinstance(message, Probed):
            child.measuring = False
        elif isinstance(message, Result):
            begins, first = child.offered(message, now)
            self._begun(child, begins, now)
            if first:
                self._tell("result", _result(child, message))
        elif isinstance(message, Reports):
            for report in message.children:
                if report.name in child.children:
                    child.children[report.name].report = report
        elif isinstance(message, Farewell):
            child.counted(message.traffic, message.below, now)
        elif isinstance(message, Preparing) and child.prepares(message):
            self._tell("waiting", {"node": child.name, "waits_for": child.waits_for})
        elif isinstance(message, Declined) and child.declines(message):
            self._tell("declined", {**_round(child), "reason": message.reason})

    def _begun(self, child: Node, begins: bool, now: float) -> None:
        """Tell of a round that begins with its first child's."""
        parent, key = child.parent, child.key
        if not begins or parent is None or key is None or key != parent.round_key or len(parent.playing()) > 1:
            return
        if parent is self.cloud:
            self._starts.append(now)
            self._tell("global_round", {"global_round": key.global_round + 1})
        else:
            self._tell(
                "local_round",
                {"node": parent.name, "global_round": key.global_round + 1, "local_round": key.local_round + 1},
            )

    # The rest

    def _add(self, name: str, role: str, parent: Node) -> Node:
        node = self.nodes[name] = parent.children[name] = Node(name, role, parent)
        return node

    def _node(self, name: str) -> Node:
        if name not in self.nodes:
            raise WireError(f"a stranger: {name}")
        return self.nodes[name]

    def _met(self, node: Node, before: str) -> None:
        """Deal with a node's new session: its children's rounds begin anew."""
        if not before or node.session == before:
            return
        self._tell("restarted", {"node": node.name})
        for child in node.children.values():
            child.parent_restarted(node.session)

    def _roots(self) -> list[Node]:
        """Return who decides how the run goes: the cloud, or the institutions where it was never heard."""
        if self.cloud.says or self.cloud.told:
            return [self.cloud]
        return [node for node in self.cloud.children.values() if node.says]

    def _mind_silence(self, now: float) -> None:
        """Warn once where a lab at work is not heard: a broker's rules may hide messages from a login."""
        parts = (self.cloud, *self.cloud.children.values())
        if self.controls or any(node.state != NodeState.READY for node in parts):
            self._ready_at = None
        elif self._ready_at is None:
            self._ready_at = now
        elif now >= self._ready_at + SILENT_S:
            self._ready_at = math.inf
            self._tell("warning", {"reason": "no control message is heard: may this login read the inboxes?"})

    def _turn(self, place: int, *, up: bool, now: float) -> None:
        broker = self.brokers[place]
        if broker.up != up:
            broker.up, broker.since = up, now
            self._tell("broker", {"broker": broker.address, "state": "connected" if up else "away"})

    def _finish(self, error: FedstrataError | None) -> None:
        if not self.ended:
            self._tell("end", {"state": "finished"} if error is None else {"state": "failed", "reason": str(error)})
            self.ended, self.end = True, error

    def _tell(self, event: str, facts: dict[str, object]) -> None:
        if not self.ended:  # the end is the last event: what comes after it are nodes that leave
            self._events.append((event, facts))


def _sum(meters: Iterable[RateMeter], now: float) -> Flow:
    heard = list(meters)
    return Flow(sum(meter.total for meter in heard), sum(meter.rate(now) for meter in heard))


def _round(child: Node) -> dict[str, object]:
    key = child.key
    place = {} if key is None else {"global_round": key.global_round + 1, "local_round": key.local_round + 1}
    return {"node": child.name, **place}


def _result(child: Node, result: Result) -> dict[str, object]:
    seconds = {"train_s": result.train_s, "wait_s": result.wait_s, "pause_s": result.pause_s}
    finite = {name: value if math.isfinite(value) else None for name, value in {"loss": result.loss, **seconds}.items()}
    counts = {"samples": result.samples, "epochs": result.epochs, "steps": result.steps}
    place = {"global_round": result.key.global_round + 1, "local_round": result.key.local_round + 1}
    return {"node": child.name, "role": child.role, **place, **counts, **finite}
