"""State of a run, built from the messages on its brokers: a tree of nodes, and events. Sans-IO.

The messages show each node's presence and round, the progress of transfers and trainings, bytes and training losses.
They do not show accuracies and aggregation decisions, which the cloud does not publish: `deploy.watching.cloud_feed`
adds them in the process that has the cloud's events.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
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
from deploy.watching.node import Node, TierMeters

GOODBYE_S: Final = 12.0  # a cloud that has finished leaves within this time
EVENTS_KEPT: Final = 10_000
GLOBAL_ROUNDS_KEPT: Final = 10
SCORES_KEPT: Final = 40
SILENT_S: Final = 15.0  # a working child sends a message every two seconds
OVER: Final = ("left", NodeState.FINISHED, NodeState.FAILED)

Event: TypeAlias = tuple[str, dict[str, object]]


@dataclass(frozen=True, slots=True)
class Flow:
    """Traffic in one direction: total bytes in the byte ledger, and bytes per second."""

    total: int
    rate: float


@dataclass(slots=True)
class WatchedBroker:
    """One of the brokers. `since`: time of the last change of `up`, seconds."""

    address: str
    up: bool
    since: float


class WatchedLab:
    """One run. The caller passes in every message and the time, and takes the events until the run has ended.

    Messages of other labs and runs are ignored.

    `brokers`: their addresses, the cloud's first. If a node is on several brokers, the first one's state counts.
    `deep`: whether messages of the links below the cloud's are received; if not, little is known of the nodes there.
    """

    def __init__(
        self,
        run: str,
        experiment: Experiment,
        *,
        brokers: Sequence[str],
        now: float,
        lab: str = topics.DEFAULT_LAB,
        deep: bool = True,
    ) -> None:
        self.run = run
        self.name = lab
        self.deep = deep
        self.folder = ""
        self.closed = 0  # global rounds, by the cloud's events
        self.losses: deque[float] = deque(maxlen=SCORES_KEPT)  # of training, by global round
        self.evaluations: deque[tuple[float, float]] = deque(maxlen=SCORES_KEPT)  # score and loss
        self.counted: dict[str, RateMeter] = {}  # the cloud's own counts by tier and direction, if they are known
        self.experiment = experiment
        self.brokers = [WatchedBroker(address, True, now) for address in brokers]
        self.cloud = Node(CLOUD, "cloud")
        self.nodes = {CLOUD: self.cloud}
        for parent, children in experiment.tree.children.items():
            for name in children:
                role = "institution" if name in experiment.tree.children else "device"
                node = self._add(name, role, self.nodes[parent])
                node.below = tuple(TierMeters() for _ in experiment.tiers[experiment.tree.depth(name) :])
        self.received = RateMeter()
        self._received_bytes = 0
        self.controls = 0
        self.ignored = 0
        self.began = now
        self.end: FedstrataError | None = None
        self.ended = False
        self._starts: deque[float] = deque(maxlen=GLOBAL_ROUNDS_KEPT)
        self._alive_at = now
        self._finished_at: float | None = None
        self._ready_at: float | None = None
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)  # until they are shown, twice a second
        facts = {"run": run, "experiment": experiment.name, "global_rounds": experiment.rounds}
        self._emit("run", {**facts, "nodes": experiment.count_by_kind()})

    # Inputs

    def receive(self, broker: int, topic_text: str, body: bytes, now: float, *, retained: bool = False) -> None:
        """Process a message of the broker with this index. Malformed messages are counted in `ignored`."""
        self._received_bytes += len(topic_text) + len(body)
        self.received.take(self._received_bytes, now)
        try:
            topic = topics.parse(topic_text)
            if isinstance(topic, topics.OutsideRuns) or (topic.lab, topic.run) != (self.name, self.run):
                return
            if isinstance(topic, topics.StateTopic):
                self._state(broker, topic.node, body, retained=retained)
            elif isinstance(topic, topics.InboxTopic):
                self._control(broker, topic, body, now)
        except WireError:
            self.ignored += 1

    def connected(self, broker: int, now: float) -> None:
        """Record that a broker is connected again. Its retained messages follow; it may have lost some of them."""
        self._set_broker(broker, up=True, now=now)
        for node in self.nodes.values():
            node.states.pop(broker, None)
            node.assigned_by = ""

    def disconnected(self, broker: int, now: float) -> None:
        """Record that a broker is disconnected."""
        self._set_broker(broker, up=False, now=now)

    def tick(self, now: float) -> None:
        """Decide whether the run has ended by now, by the rule by which nodes give up an absent parent."""
        roots = self._roots()
        if any(root.alive and self.brokers[min(root.states)].up for root in roots):
            self._alive_at = now
        failed = next((root for root in roots if root.state == NodeState.FAILED), None)
        over = bool(roots) and all(root.state in OVER for root in roots)
        if over and self._finished_at is None:
            self._finished_at = now
        elif not over:
            self._finished_at = None
        self._check_silence(now)
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
        """Return the next event, its name and JSON-serialisable facts, or None."""
        return self._events.popleft() if self._events else None

    # State

    @property
    def global_round(self) -> int:
        """The current global round, counted from 1; 0 before the first."""
        key = self.cloud.round_key
        return max(self.closed, key.global_round + 1 if key is not None else 0)

    @property
    def begun(self) -> bool:
        """Whether a global round has begun, by what was received so far."""
        return bool(self._starts)

    @property
    def loss(self) -> float | None:
        """The mean training loss of the last results that the cloud received, weighted by their samples, or None."""
        results = [node.result for node in self.cloud.children.values() if node.result is not None]
        results = [result for result in results if math.isfinite(result.loss)]
        samples = sum(result.samples for result in results)
        return sum(result.loss * result.samples for result in results) / samples if samples else None

    def flows(self, now: float) -> dict[str, Flow]:
        """Return each tier's traffic, `wan_up`, `wan_down` and so on, in MQTT bytes counted by the nodes.

        A parent reports the sums of the tiers below it. Without that report, its children's own counts are summed. The
        cloud's own counts, where they are known, are those of links.csv.
        """
        if self.counted:
            return {name: _sum((meter,), now) for name, meter in self.counted.items()}
        flows = {}
        for depth, tier in enumerate(self.experiment.tier_names):
            meters = list(_meters(self.cloud, depth))
            flows[f"{tier}_up"] = _sum((each.up for each in meters), now)
            flows[f"{tier}_down"] = _sum((each.down for each in meters), now)
        return flows

    def left_s(self, now: float) -> float | None:
        """Return the remaining seconds, extrapolated from the last global rounds, or None before the first is over."""
        seen = len(self._starts) - 1
        if seen < 1:
            return None
        each = (self._starts[-1] - self._starts[0]) / seen
        return max(0.0, each * (self.experiment.rounds - self.global_round + 1) - (now - self._starts[-1]))

    def follow_below(self) -> None:
        """Begin to receive the messages of all links, in place of the cloud's events."""
        self.deep = True
        for node in self.cloud.children.values():
            node.measured, node.waits_for = True, ""

    def begin_round(self, now: float) -> None:
        """Record that a global round begins, and the training loss of the last one."""
        self._starts.append(now)
        if self.loss is not None:
            self.losses.append(self.loss)

    # Messages

    def _state(self, broker: int, name: str, body: bytes, *, retained: bool) -> None:
        node = self._node(name)
        session, message = serialization.decode(body) if body else ("", None)
        if not (message is None or isinstance(message, Presence)):
            raise WireError("not a presence, on a state topic")
        if message is not None or node.states:  # else an earlier process cleared it
            self._present(node, broker, session, message, retained=retained)

    def _present(self, node: Node, broker: int, session: str, presence: Presence | None, *, retained: bool) -> None:
        before = node.session
        if not node.on_presence(broker, session, presence, retained=retained):
            return
        self._check_session(node, before)
        if node.shown_state != node.state:
            node.shown_state = node.state
            reason = {"reason": node.reason} if node.reason else {}
            self._emit("state", {"node": node.name, "role": node.role, "state": node.state, **reason})

    def _control(self, broker: int, topic: topics.InboxTopic, body: bytes, now: float) -> None:
        sender, receiver = self._node(topic.sender), self._node(topic.node)
        if sender.parent is not receiver and receiver.parent is not sender:
            raise WireError("sender and receiver are not parent and child")
        session, message = serialization.decode(body)
        if isinstance(message, Alive) and session not in sender.retired:
            self._present(sender, broker, session, message.presence, retained=False)
        if not sender.is_from(session):
            return
        self.controls += 1
        if receiver.parent is sender:
            self._from_parent(receiver, session, message, now)
        else:
            self._from_child(sender, message, now)

    def _from_parent(self, child: Node, session: str, message: Message, now: float) -> None:
        if isinstance(message, Task):
            self._check_begin(child, child.on_task(message, session), now)
        elif isinstance(message, Ask):
            child.on_parent_ask(message)
        elif isinstance(message, Probe):
            child.measuring = True
        elif isinstance(message, Acknowledgement) and child.on_acknowledgement(message):
            self._emit("refused", {**_round(child), "reason": message.reason})

    def _from_child(self, child: Node, message: Message, now: float) -> None:
        if isinstance(message, Progress):
            self._check_begin(child, child.on_progress(message, now), now)
        elif isinstance(message, Ask):
            child.on_ask(message)
        elif isinstance(message, Probed):
            child.measuring = False
        elif isinstance(message, Result):
            begins, first = child.on_result(message, now)
            self._check_begin(child, begins, now)
            if first:
                self._emit("result", _result(child, message))
        elif isinstance(message, Reports):
            child.take_reports(message.children)
        elif isinstance(message, Farewell):
            child.on_farewell(message.traffic, message.below, now)
        elif isinstance(message, Preparing) and child.on_preparing(message):
            self._emit("waiting", {"node": child.name, "waits_for": child.waits_for})
        elif isinstance(message, Declined) and child.on_declined(message):
            self._emit("declined", {**_round(child), "reason": message.reason})

    def _check_begin(self, child: Node, begins: bool, now: float) -> None:
        """Emit an event if `begins` and this child is the first of its parent's round."""
        parent, key = child.parent, child.key
        if not begins or parent is None or key is None or key != parent.round_key or len(parent.participants()) > 1:
            return
        if parent is self.cloud:
            self.begin_round(now)
            self._emit("global_round", {"global_round": key.global_round + 1})
        else:
            self._emit(
                "local_round",
                {"node": parent.name, "global_round": key.global_round + 1, "local_round": key.local_round + 1},
            )

    # Helpers

    def _add(self, name: str, role: str, parent: Node) -> Node:
        node = self.nodes[name] = parent.children[name] = Node(name, role, parent)
        return node

    def _node(self, name: str) -> Node:
        if name not in self.nodes:
            raise WireError(f"unknown node: {name}")
        return self.nodes[name]

    def _check_session(self, node: Node, before: str) -> None:
        """Handle a node's new session: its children's rounds start again."""
        if not before or node.session == before:
            return
        self._emit("restarted", {"node": node.name})
        for child in node.children.values():
            child.on_parent_restart(node.session)

    def _roots(self) -> list[Node]:
        """Return the nodes whose states decide when the run ends: the cloud, or if it is unseen the institutions."""
        if self.cloud.states or self.cloud.shown_state:
            return [self.cloud]
        return [node for node in self.cloud.children.values() if node.states]

    def _check_silence(self, now: float) -> None:
        """Warn once if a working lab's messages are not received: access rules may hide topics from this login."""
        parts = (self.cloud, *self.cloud.children.values())
        if self.controls or any(node.state != NodeState.READY for node in parts):
            self._ready_at = None
        elif self._ready_at is None:
            self._ready_at = now
        elif now >= self._ready_at + SILENT_S:
            self._ready_at = math.inf
            self._emit("warning", {"reason": "no control message received: check that this login may read the inboxes"})

    def _set_broker(self, place: int, *, up: bool, now: float) -> None:
        broker = self.brokers[place]
        if broker.up != up:
            broker.up, broker.since = up, now
            self._emit("broker", {"broker": broker.address, "state": "connected" if up else "away"})

    def _finish(self, error: FedstrataError | None) -> None:
        if not self.ended:
            self._emit("end", {"state": "finished"} if error is None else {"state": "failed", "reason": str(error)})
            self.ended, self.end = True, error

    def _emit(self, event: str, facts: dict[str, object]) -> None:
        if not self.ended:  # "end" is the last event: afterwards nodes only leave
            self._events.append((event, facts))


def _meters(node: Node, depth: int) -> Iterator[TierMeters | Node]:
    """Yield the meters of a tier below a node; `depth` 0: of the links to its children."""
    for child in node.children.values():
        if depth == 0:
            yield child
        elif child.below[depth - 1].up.known:
            yield child.below[depth - 1]
        else:
            yield from _meters(child, depth - 1)


def _sum(meters: Iterable[RateMeter], now: float) -> Flow:
    counted = list(meters)
    return Flow(sum(meter.total for meter in counted), sum(meter.rate(now) for meter in counted))


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
