"""State of a run for a live view: each node's presence, joined with the status records of the parents. Sans-IO.

Presence is the base, as a view is needed most when the cloud hangs: then its last record is shown with its age.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from common.errors import FedstrataError, NoProgress, RunFailed, WireError
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD
from common.protocol import serialization, topics
from common.protocol.messages import LIVING, ChildStatus, Key, LinkBytes, NodeState, Presence, RunStatus, Status, Step
from common.protocol.status import ROUNDS_KEPT, STEPS

GOODBYE_S: Final = 12.0  # a cloud that has finished leaves within this time
EVENTS_KEPT: Final = 10_000
SILENT_S: Final = 5.0  # without a record of a parent that is asked for one every second
WARN_S: Final = 15.0
LEAST_S: Final = 0.1  # between two records
RATE_S: Final = 5.0  # over which a rate is taken; a working child reports its bytes every two seconds
SESSIONS_KEPT: Final = 8
OVER: Final = ("left", NodeState.FINISHED, NodeState.FAILED)
AT_WORK: Final = STEPS[STEPS.index(Step.ASSIGNED) : STEPS.index(Step.DONE)]

Event: TypeAlias = tuple[str, dict[str, object]]


@dataclass(frozen=True, slots=True)
class Flow:
    """Traffic in one direction: total MQTT bytes in the byte ledger, and bytes per second."""

    total: int
    rate: float


@dataclass(slots=True)
class WatchedBroker:
    """One of the brokers. `since`: time of the last change of `up`, seconds."""

    address: str
    up: bool
    since: float


@dataclass(slots=True)
class Node:
    """One node. `states`: its state by broker, `left` if it has cleared its presence there.

    shown_state: the state of the last event    entry: what its parent's last record has on it
    status: its own last record, if it is a parent    received_at: when that arrived    history: bytes of the last ones
    proven: its session has shown itself since the watch began, so it is not only a retained presence
    """

    name: str
    role: str
    parent: Node | None = None
    children: dict[str, Node] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    shown_state: str = ""
    reason: str = ""
    session: str = ""
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=SESSIONS_KEPT))
    proven: bool = False
    entry: ChildStatus | None = None
    status: Status | None = None
    received_at: float = -math.inf
    history: deque[Status] = field(default_factory=deque)

    @property
    def state(self) -> str:
        """Its presence at the first broker that has one, else what its parent reports: `absent` if nobody saw one."""
        if self.states:
            return self.states[min(self.states)]
        if self.entry is not None and self.entry.state is not None:
            return self.entry.state
        return "absent" if self.status is None else NodeState.READY

    @property
    def alive(self) -> bool:
        """Whether it is initialising or ready."""
        return self.state in LIVING

    @property
    def step(self) -> Step | None:
        """Its step in its parent's last round, None if it is not known."""
        return None if self.entry is None else self.entry.step

    @property
    def works(self) -> bool:
        """Whether its parent's open round waits for it."""
        is_open = self.parent is None or self.parent.status is None or self.parent.status.open
        return is_open and self.step in AT_WORK

    @property
    def done(self) -> float:
        """Its progress within its step, 0 to 1; 0 if that is not known."""
        return min(1.0, self.entry.done / self.entry.total) if self.entry is not None and self.entry.total else 0.0

    @property
    def text(self) -> str:
        """Why it is not at work: its own reason, or its parent's."""
        return self.reason or ("" if self.entry is None else self.entry.text)

    @property
    def key(self) -> Key | None:
        """Its children's last round, None if it is not known."""
        return None if self.status is None else self.status.key

    @property
    def participants(self) -> tuple[int, int]:
        """How many of its children have answered in its last round, and how many take part; 0 of 0 if unknown."""
        if self.status is None or self.status.key is None:
            return 0, 0
        steps = [(child.step, 1, child.state) for child in self.status.children]
        steps += [(group.step, group.count, group.state) for group in self.status.others]
        part = [(step, count) for step, count, state in steps if step is not Step.IDLE and not is_gone(state)]
        return sum(count for step, count in part if step not in AT_WORK), sum(count for _, count in part)

    def rates(self) -> Mapping[str, tuple[float, float]]:
        """Return the bytes per second up and down of each child's link, over the last records."""
        if len(self.history) < 2:
            return {}
        first, last = self.history[0], self.history[-1]
        before, seconds = {each.name: each for each in first.children}, _between(first, last)
        return {
            each.name: (max(0, each.up - known.up) / seconds, max(0, each.down - known.down) / seconds)
            for each in last.children
            if (known := before.get(each.name)) is not None
        }

    def take(self, status: Status, now: float) -> bool:
        """Take a record of its own; return False for one that is not newer than the last one."""
        if not math.isfinite(status.at_s):
            return False
        if self.status is not None and status.at_s <= self.status.at_s < status.at_s + RATE_S:
            return False
        if self.status is not None and status.at_s <= self.status.at_s:
            self.history.clear()  # of another clock
        self.history.append(status)
        while status.at_s - self.history[0].at_s > RATE_S and len(self.history) > 2:
            self.history.popleft()
        self.status, self.received_at, self.proven = status, now, True
        named = {each.name: each for each in status.children}
        for name, child in self.children.items():
            child.entry = named.get(name)
            child.proven = child.proven or (child.entry is not None and child.entry.state in LIVING)
        return True

    def on_presence(self, broker: int, session: str, presence: Presence | None, *, retained: bool = False) -> bool:
        """Process its presence; None = cleared. Return False for the last presence of a process that was replaced."""
        if presence is None:
            self.states[broker] = "left"
            return True
        if presence.state not in LIVING and self.session not in ("", session):
            return False
        if presence.state in LIVING:
            if session in self.retired:  # the broker's order decides which session holds the name
                self.retired.remove(session)
            if self.session not in ("", session):
                self.retired.append(self.session)
            self.proven = (self.proven and session == self.session) or not retained
            self.session = session
        self.states[broker] = str(presence.state)
        self.reason = presence.reason
        return True


def is_gone(state: str | None) -> bool:
    """Return whether this is the state of a node that was there."""
    return state in (NodeState.LOST, NodeState.FAILED, NodeState.DISCONNECTED)


class WatchedLab:
    """One run. The caller passes in every message and the time, and takes the events until the run has ended.

    Messages of other labs and runs are ignored.

    `brokers`: their addresses, the cloud's first. If a node is on several brokers, the first one's state counts.
    `follows`: the messages on these brokers are received; else only the cloud's record is.
    """

    def __init__(
        self,
        run: str,
        experiment: Experiment,
        *,
        brokers: Sequence[str],
        now: float,
        lab: str = topics.DEFAULT_LAB,
        follows: bool = True,
    ) -> None:
        self.run = run
        self.name = lab
        self.follows = follows
        self.folder = ""
        self.experiment = experiment
        self.brokers = [WatchedBroker(address, True, now) for address in brokers]
        self.progress = RunStatus()
        self.cloud = Node(CLOUD, "cloud")
        self.nodes = {CLOUD: self.cloud}
        for parent, children in experiment.tree.children.items():
            for name in children:
                role = "institution" if name in experiment.tree.children else "device"
                above = self.nodes[parent]
                self.nodes[name] = above.children[name] = Node(name, role, above)
        self.began = now
        self.end: FedstrataError | None = None
        self.ended = False
        self._asked_since = self._closed_at = self._alive_at = now
        self._finished_at: float | None = None
        self._warned = False
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)  # until they are shown, twice a second
        facts = {"run": run, "experiment": experiment.name, "global_rounds": experiment.rounds}
        self._emit("run", {**facts, "nodes": experiment.count_by_kind()})

    # Inputs

    def receive(self, broker: int, topic: topics.Topic, body: bytes, now: float, *, retained: bool = False) -> None:
        """Process a message of the broker with this index. Raises WireError."""
        if not isinstance(topic, topics.StateTopic | topics.StatusTopic):
            return
        if (topic.lab, topic.run) != (self.name, self.run):
            return
        if (node := self.nodes.get(topic.node)) is None:
            raise WireError(f"unknown node: {topic.node}")
        session, message = serialization.decode(body) if body else ("", None)
        if isinstance(topic, topics.StatusTopic):
            if not isinstance(message, Status):
                raise WireError("not a status, on a status topic")
            self.take(topic.node, message, now)
        elif message is not None and not isinstance(message, Presence):
            raise WireError("not a presence, on a state topic")
        elif message is not None or node.states:  # else an earlier process cleared it
            self._present(node, broker, session, message, retained=retained)

    def take(self, name: str, status: Status, now: float) -> None:
        """Process a parent's record."""
        node = self.nodes[name]
        tree, entering = self.experiment.tree, self.experiment.tiers[-1].entering
        most = len(tree.children.get(name, ())) + (entering if name in tree.parents else 0)
        for each in status.children:
            if each.name not in node.children and len(node.children) < most:  # it has entered, or moved
                child = node.children[each.name] = Node(each.name, "device", node)
                self.nodes.setdefault(each.name, child)
        before = {child: each.entry for child, each in node.children.items()}
        if not node.take(status, now):
            return
        if node is self.cloud:
            self._warned = False
            if status.run is not None:
                self.report(status.run, now)
        for child in node.children.values():
            self._compare(child, before[child.name])

    def report(self, progress: RunStatus, now: float) -> None:
        """Process the run's progress."""
        before, self.progress = self.progress, progress
        if progress.closed != before.closed:
            self._closed_at = now
        known = {each.global_round: each for each in before.scores}
        for each in progress.scores[-ROUNDS_KEPT:]:
            place = {"global_round": each.global_round}
            if each.global_round not in known:
                self._emit("global_round", {**place, "loss": each.train_loss})
            old = known.get(each.global_round)
            if each.score is not None and (old is None or old.score is None):
                self._emit("evaluated", {**place, "score": each.score, "loss": each.loss})

    def connected(self, broker: int, now: float) -> None:
        """Record that a broker is connected again. Its retained messages follow; it may have lost some of them."""
        self._set_broker(broker, up=True, now=now)
        self._asked_since = now
        for node in self.nodes.values():
            node.states.pop(broker, None)

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
        if (silent_s := self.silent_s(self.cloud, now)) >= WARN_S and not self._warned:
            self._warned = True
            why = "it hangs, or the broker's access rules do not let this login ask"
            self._emit("warning", {"reason": f"no status from the cloud for {silent_s:.0f} s: {why}"})
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
        key = self.cloud.key
        return max(self.progress.closed, key.global_round + 1 if key is not None else 0)

    @property
    def begun(self) -> bool:
        """Whether a global round has begun, by what was received so far."""
        return self.cloud.key is not None or bool(self.progress.scores)

    @property
    def loss(self) -> float | None:
        """The training loss of the last global round, None if it is not known."""
        closed = [each for each in self.progress.scores if each.global_round <= self.progress.closed]
        return closed[-1].train_loss if closed else None

    @property
    def score(self) -> float | None:
        """The score of the last evaluated global round, None if there is none."""
        scores = [each.score for each in self.progress.scores if each.score is not None]
        return scores[-1] if scores else None

    def silent_s(self, node: Node, now: float) -> float:
        """Return for how many seconds a parent's record is missing, 0 if none is due.

        Of the cloud it is due while it has not left, of an institution once one was received.
        """
        if node.state in ("absent", *OVER) or not all(broker.up for broker in self.brokers):
            return 0.0
        if node is not self.cloud and node.status is None:
            return 0.0
        silent_s = now - max(node.received_at, self._asked_since)
        return silent_s if silent_s >= SILENT_S else 0.0

    def flows(self) -> dict[str, Flow]:
        """Return each tier's traffic, `wan_up`, `wan_down` and so on, in MQTT bytes as parents count them."""
        flows = {}
        for depth, tier in enumerate(self.experiment.tier_names):
            pairs = list(_tiers(self.cloud, depth))
            for way in ("up", "down"):
                counts = [(getattr(old, way), getattr(new, way), seconds) for old, new, seconds in pairs]
                rate = sum(max(0, new - old) / seconds for old, new, seconds in counts)
                flows[f"{tier}_{way}"] = Flow(sum(new for _, new, _ in counts), rate)
        return flows

    def left_s(self, now: float) -> float | None:
        """Return the remaining seconds, extrapolated from the last global rounds, or None before the first is over."""
        if not 0 < self.progress.round_s < math.inf:
            return None
        rounds = self.experiment.rounds - self.progress.closed
        return max(0.0, self.progress.round_s * rounds - (now - self._closed_at))

    # Helpers

    def _present(self, node: Node, broker: int, session: str, presence: Presence | None, *, retained: bool) -> None:
        before = node.session
        if not node.on_presence(broker, session, presence, retained=retained):
            return
        if before and node.session != before:
            self._emit("restarted", {"node": node.name})
        self._check_state(node)

    def _check_state(self, node: Node) -> None:
        if node.shown_state != node.state:
            node.shown_state = node.state
            reason = {"reason": node.text} if node.text else {}
            self._emit("state", {"node": node.name, "role": node.role, "state": node.state, **reason})

    def _compare(self, child: Node, before: ChildStatus | None) -> None:
        """Emit what a new record of its parent has on a child."""
        entry = child.entry
        if entry is None:
            return
        if not child.states and entry.state is not None:
            self._check_state(child)
        if not entry.text or (before is not None and before.text == entry.text):
            return
        if entry.step is Step.REFUSED:
            self._emit("refused", {"node": child.name, "reason": entry.text})
        elif entry.state is NodeState.INIT:
            self._emit("waiting", {"node": child.name, "waits_for": entry.text})
        elif entry.step is Step.ASSIGNED and entry.state is NodeState.READY and entry.text != child.reason:
            self._emit("declined", {"node": child.name, "reason": entry.text})

    def _roots(self) -> list[Node]:
        """Return the nodes whose states decide when the run ends: the cloud, or if it is unseen the institutions."""
        if self.cloud.states or self.cloud.shown_state:
            return [self.cloud]
        return [node for node in self.cloud.children.values() if node.states]

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


def _tiers(node: Node, depth: int) -> Iterator[tuple[LinkBytes, LinkBytes, float]]:
    """Yield the counts of a tier below a node at two times, with the seconds between.

    `depth` 0: of the links to its children. Where its own record is not known, those of its children are.
    """
    if node.status is not None and depth < len(node.status.tiers):
        first, last = node.history[0], node.history[-1]
        yield (first if depth < len(first.tiers) else last).tiers[depth], last.tiers[depth], _between(first, last)
    elif depth:
        for child in node.children.values():
            yield from _tiers(child, depth - 1)


def _between(first: Status, last: Status) -> float:
    """Return the seconds between two records, at least LEAST_S."""
    return max(LEAST_S, last.at_s - first.at_s)
