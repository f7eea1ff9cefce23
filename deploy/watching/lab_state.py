"""State of a run for a live view, from the status records of its parents. Sans-IO.

A record has all that is shown of the nodes below its parent. Presences are read for three facts:
when a node was last seen, whether it was restarted, and whether a parent that no record has, such
as the cloud, is present.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, TypeAlias

from fedstrata.common.errors import FedstrataError, NoProgress, RunFailed, WireError
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import (
    LIVING,
    ChildStatus,
    NodeState,
    Presence,
    RunStatus,
    Status,
    Step,
)
from fedstrata.common.protocol.status import ROUNDS_KEPT
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.watching.nodes import UNKNOWN, Node

GOODBYE_S: Final = 12.0  # a cloud that has finished leaves within this time
EVENTS_KEPT: Final = 10_000
SILENT_S: Final = 5.0  # without a record of a parent that is asked for one every second
WARN_S: Final = 15.0
LEFT: Final = "left"  # the state of a node that has cleared its presence
OVER: Final = (LEFT, NodeState.FINISHED, NodeState.FAILED)

Event: TypeAlias = tuple[str, dict[str, object]]


@dataclass(slots=True)
class Flow:
    """Traffic in one direction: total MQTT bytes in the byte ledger, and bytes per second."""

    total: int = 0
    rate: float = 0.0


@dataclass(slots=True)
class WatchedBroker:
    """One of the brokers. `since`: time of the last change of `up`, seconds."""

    address: str
    up: bool
    since: float

    @property
    def state(self) -> str:
        """Whether it is connected, as a word."""
        if self.up:
            return "connected"
        return "away"


class WatchedLab:
    """One run. The caller passes in every message and the time, and takes the events until the run
    has ended.

    Messages of other labs and runs are ignored. `brokers`: their addresses, the cloud's first.
    """

    def __init__(
        self,
        run: str,
        experiment: Experiment,
        *,
        brokers: Sequence[str],
        now: float,
        lab: str = topics.DEFAULT_LAB,
    ) -> None:
        self.run = run
        self.name = lab
        self.folder = ""
        self.experiment = experiment
        self.brokers = [WatchedBroker(address, True, now) for address in brokers]
        self.progress = RunStatus()
        self.cloud = Node(CLOUD, "cloud")
        self.nodes = {CLOUD: self.cloud}
        for parent, children in experiment.tree.children.items():
            for name in children:
                role = "institution" if name in experiment.tree.children else "device"
                self._add(Node(name, role), self.nodes[parent])
        self.began = now
        self.end: FedstrataError | None = None
        self.ended = False
        self._asked_since = self._closed_at = self._alive_at = now
        self._over_since = inf
        self._warned = False
        # until they are shown, twice a second
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        facts = {"run": run, "experiment": experiment.name, "global_rounds": experiment.rounds}
        self._emit("run", {**facts, "nodes": experiment.count_by_kind()})

    # Inputs

    def receive(
        self, topic: topics.Topic, body: bytes, now: float, *, retained: bool = False
    ) -> None:
        """Process a message. Raises WireError."""
        if not isinstance(topic, topics.StateTopic | topics.StatusTopic):
            return
        if (topic.lab, topic.run) != (self.name, self.run):
            return
        if topic.node not in self.nodes:
            raise WireError(f"unknown node: {topic.node}")
        session, message = serialization.decode(body) if body else ("", None)
        match topic, message:
            case topics.StatusTopic(), Status():
                self.take(topic.node, message, now)
            case topics.StateTopic(), Presence() | None:
                self._present(self.nodes[topic.node], session, message, now, retained=retained)
            case _:
                raise WireError("not a message of its topic")

    def take(self, name: str, status: Status, now: float) -> None:
        """Process a parent's record."""
        parent = self.nodes[name]
        if not parent.take(status, now):
            return
        if parent is self.cloud:
            self._warned = False
            self.report(status.run or self.progress, now)
        if parent.state == UNKNOWN:
            self._set_state(parent, NodeState.READY)
        self._place(parent, status)
        first, _, seconds = parent.span()
        before = {each.name: each for each in first.children}
        named = {each.name: each for each in status.children}
        counted = {group.state or "absent" for group in status.others}
        for child in parent.children.values():
            last = child.entry
            child.entry = named.get(child.name)
            if child.entry is not None:
                self._report_child(child, child.entry, last, now)
            elif len(counted) == 1:  # all that are not named have this state
                self._set_state(child, *counted)
            child.rates = _rates(before.get(child.name), child.entry, seconds)

    def report(self, progress: RunStatus, now: float) -> None:
        """Process the run's progress."""
        before = self.progress
        self.progress = progress
        if progress.closed != before.closed:
            self._closed_at = now
        known = {each.global_round: each.score for each in before.scores}
        for each in progress.scores[-ROUNDS_KEPT:]:
            if each.global_round not in known:
                self._emit(
                    "global_round", {"global_round": each.global_round, "loss": each.train_loss}
                )
            if each.score is not None and known.get(each.global_round) is None:
                facts: dict[str, object] = {
                    "global_round": each.global_round,
                    "score": each.score,
                    "loss": each.loss,
                }
                self._emit("evaluated", facts)

    def set_broker(self, place: int, *, up: bool, now: float) -> None:
        """Record that a broker is connected, so that its retained messages follow, or
        disconnected.
        """
        broker = self.brokers[place]
        if broker.up == up:
            return
        broker.up = up
        broker.since = now
        self._emit("broker", {"broker": broker.address, "state": broker.state})
        if up:
            self._asked_since = now
        if up and place == 0:
            for root in self._roots():
                root.state = UNKNOWN  # it may have lost them

    def tick(self, now: float) -> None:
        """Decide whether the run has ended by now, by the rule by which nodes give up an absent
        parent.
        """
        roots = self._roots()
        if self.brokers[0].up and any(root.alive for root in roots):
            self._alive_at = now
        silent_s = self.silent_s(self.cloud, now)
        if silent_s >= WARN_S and not self._warned:
            self._warned = True
            why = "it hangs, or the broker's access rules do not let this login ask"
            reason = f"no status from the cloud for {silent_s:.0f} s: {why}"
            self._emit("warning", {"reason": reason})
        idle_s = self.experiment.transfer.idle_s
        if not roots or any(root.state not in OVER for root in roots):
            self._over_since = inf
            if now >= self._alive_at + idle_s:
                self._finish(self._absence(idle_s))
            return
        self._over_since = min(self._over_since, now)
        failed = [root for root in roots if root.state == NodeState.FAILED]
        if failed:
            self._finish(RunFailed(f"{failed[0].name} gave up: {failed[0].text}"))
        elif all(root.state == LEFT for root in roots) or now >= self._over_since + GOODBYE_S:
            self._finish(None)

    def _absence(self, idle_s: float) -> NoProgress:
        for broker in self.brokers:
            if not broker.up:
                return NoProgress(f"broker {broker.address} was not there for {idle_s:g} s")
        state = f"its state is {self.cloud.state}"
        return NoProgress(f"{CLOUD} was not there for {idle_s:g} s ({state})")

    def new_events(self) -> list[Event]:
        """Return the events since the last call, each with its name and JSON-serialisable facts."""
        events = [*self._events]
        self._events.clear()
        return events

    # State

    @property
    def global_round(self) -> int:
        """The current global round, counted from 1; 0 before the first."""
        if self.cloud.key is None:
            return self.progress.closed
        return max(self.progress.closed, self.cloud.key.global_round + 1)

    @property
    def loss(self) -> float | None:
        """The training loss of the last global round, None if it is not known."""
        if self.progress.scores:
            return self.progress.scores[-1].train_loss
        return None

    @property
    def score(self) -> float | None:
        """The score of the last evaluated global round, None if there is none."""
        for each in reversed(self.progress.scores):
            if each.score is not None:
                return each.score
        return None

    def silent_s(self, node: Node, now: float) -> float:
        """Return for how many seconds a parent's record is missing, 0 if none is due.

        Of the cloud it is due while it has not left, of an institution once one was received.
        """
        if node.state in (UNKNOWN, "absent", *OVER) or not all(
            broker.up for broker in self.brokers
        ):
            return 0.0
        if node is not self.cloud and node.status is None:
            return 0.0
        silent_s = now - max(node.received_at, self._asked_since)
        if silent_s >= SILENT_S:
            return silent_s
        return 0.0

    def flows(self) -> dict[str, Flow]:
        """Return each tier's traffic, `wan_up`, `wan_down` and so on, in MQTT bytes as parents
        count them.
        """
        tiers = self.experiment.tier_names
        flows = {f"{tier}_{way}": Flow() for tier in tiers for way in ("up", "down")}
        for parent in _highest(self.cloud):
            first, last, seconds = parent.span()
            before = (*first.tiers, *last.tiers[len(first.tiers) :])
            own = tiers[self.experiment.depth(parent.name) :]
            for tier, old, new in zip(own, before, last.tiers, strict=False):
                for way in ("up", "down"):
                    flow = flows[f"{tier}_{way}"]
                    total = getattr(new, way)
                    flow.total += total
                    flow.rate += max(0, total - getattr(old, way)) / seconds
        return flows

    def left_s(self, now: float) -> float | None:
        """Return the remaining seconds, extrapolated from the last global rounds, or None before
        the first is over.
        """
        if not 0 < self.progress.round_s < inf:
            return None
        rounds = self.experiment.rounds - self.progress.closed
        return max(0.0, self.progress.round_s * rounds - (now - self._closed_at))

    # Helpers

    def _add(self, node: Node, parent: Node) -> None:
        """Let a node stand below a parent, and below no other one."""
        if node.parent is not None:
            del node.parent.children[node.name]
        node.parent = parent
        parent.children[node.name] = self.nodes[node.name] = node

    def _place(self, parent: Node, status: Status) -> None:
        """Let devices stand below the parent whose record has them, and visitors leave with their
        entry.
        """
        own = self.experiment.tree.children.get(parent.name, ())
        listed = {each.name for each in status.children}
        for name, child in [*parent.children.items()]:
            counted = bool(status.others) and child.alive
            if name not in self.experiment.tree and name not in listed and not counted:
                del parent.children[name], self.nodes[name]
        for each in status.children:
            if each.name in parent.children or each.state not in LIVING:
                continue
            visitors = sum(name not in own for name in parent.children)
            room = each.name in own or visitors < self.experiment.tiers[-1].entering
            if room and self.experiment.takes(each.name, parent.name):
                self._add(self.nodes.get(each.name) or Node(each.name, "device"), parent)

    def _present(
        self, node: Node, session: str, presence: Presence | None, now: float, *, retained: bool
    ) -> None:
        """Process a presence, None: it was cleared."""
        known = node.session or session
        if not known:
            return  # an earlier process cleared it
        if presence is not None and presence.state in LIVING:
            node.seen_at = node.seen_at if retained else now
            if session != known:
                self._emit("restarted", {"node": node.name})
            known = session
        elif presence is not None and session != known:
            return  # the last presence of a process that was replaced
        node.session = known
        if not node.children or node.entry is not None:
            return
        if presence is None:
            node.reason = ""
            self._set_state(node, LEFT)
        else:
            node.reason = presence.reason
            self._set_state(node, presence.state)

    def _roots(self) -> list[Node]:
        """Return the nodes whose presence decides when the run ends: the cloud, or parents that no
        record has.
        """
        if self.cloud.session:
            return [self.cloud]
        return [
            node
            for node in self.nodes.values()
            if node.children and node.session and node.entry is None
        ]

    def _set_state(self, node: Node, state: str) -> None:
        if node.state != state:
            node.state = state
            reason = {"reason": node.text} if node.text else {}
            self._emit("state", {"node": node.name, "role": node.role, "state": state, **reason})

    def _report_child(
        self, child: Node, entry: ChildStatus, before: ChildStatus | None, now: float
    ) -> None:
        """Process what a new record of its parent has on a child."""
        self._set_state(child, entry.state or "absent")
        if entry.state in LIVING:
            child.seen_at = now
        if not entry.text or (before is not None and before.text == entry.text):
            return
        if entry.step is Step.REFUSED:
            self._emit("refused", {"node": child.name, "reason": entry.text})
        elif entry.state is NodeState.INIT:
            self._emit("waiting", {"node": child.name, "waits_for": entry.text})
        elif entry.state is NodeState.READY and entry.step is Step.ASSIGNED:
            self._emit("declined", {"node": child.name, "reason": entry.text})

    def _finish(self, error: FedstrataError | None) -> None:
        if self.ended:
            return
        facts: dict[str, object] = {"state": "finished"}
        if error is not None:
            facts = {"state": "failed", "reason": str(error)}
        self._emit("end", facts)
        self.ended = True
        self.end = error

    def _emit(self, event: str, facts: dict[str, object]) -> None:
        if not self.ended:  # "end" is the last event: afterwards nodes only leave
            self._events.append((event, facts))


def _rates(
    before: ChildStatus | None, entry: ChildStatus | None, seconds: float
) -> tuple[float, float] | None:
    """Return the bytes per second of a child's link between two entries, None if one is missing."""
    if before is None or entry is None or before is entry:
        return None
    return max(0, entry.up - before.up) / seconds, max(0, entry.down - before.down) / seconds


def _highest(node: Node) -> Iterator[Node]:
    """Yield the highest nodes that have published records: each counts the bytes of all tiers below
    it.
    """
    if node.records:
        yield node
        return
    for child in node.children.values():
        yield from _highest(child)
