"""Coordinators and participants by hand, and their messages."""

from __future__ import annotations

from collections.abc import Sequence

from session_lab import ALL, ChildNode, Lab, names_of

from fedstrata.common.accounting.traffic import TcpStats, Traffic
from fedstrata.common.accounting.work import Work
from fedstrata.common.protocol.coordinator import Coordinator
from fedstrata.common.protocol.events import TaskReceived
from fedstrata.common.protocol.messages import (
    Acknowledgement,
    Key,
    Manifest,
    NodeState,
    Phase,
    Presence,
    Progress,
    Result,
    Task,
)
from fedstrata.common.protocol.participant import Participant
from fedstrata.common.protocol.round_state import Assignment, Closed, Stalled
from fedstrata.common.settings.closing import Closing

OLD = Key(0, 0, 0)


def manifest_of(number: int) -> Manifest:
    return Manifest(f"{number:016x}", 1_000_000, 1_000_000, b"d" * 8, "fp32", "layout")


def result_of(key: Key, number: int = 77) -> Result:
    return Result(key, manifest_of(number), None, Work(10, 0.5, 1, 10, 1.0, 0.0, 0.0), 10, (), "")


def progress_of(
    key: Key, phase: Phase = Phase.TRAINING, done: int = 0, *, traffic: Traffic | None = None
) -> Progress:
    return Progress(key, phase, done, 100, traffic or Traffic(), ())


def traffic_of(*, received: int = 0, sent: int = 0, control: int = 0) -> Traffic:
    """Return the counts of a connection: bytes by the kernel, and of received control messages
    among them.
    """
    return Traffic(
        received_control_message=control, wire=TcpStats(sent=sent, received=received, connections=1)
    )


def assignments(names: Sequence[str], *, model: int = 1, epochs: int = 1) -> dict[str, Assignment]:
    return dict.fromkeys(names, Assignment(manifest_of(model), epochs, b"x" * 1000))


def children_of(lab: Lab) -> list[ChildNode]:
    return list(lab.children.values())


# The parent by hand


class OneParent:
    """A coordinator in the hand of a test, all children READY and their tasks sent."""

    def __init__(
        self, count: int = 3, *, idle_s: float = 20.0, closing: Closing = ALL, ready: bool = True
    ) -> None:
        self.names = names_of(count)
        self.coordinator = Coordinator(self.names, idle_s=idle_s)
        if ready:
            for name in self.names:
                self.presence(name, NodeState.READY, 0.0)
        self.key = self.open(closing=closing)
        if ready:
            assert {name for name, _ in self.coordinator.to_send(0.0)} == set(self.names)

    def open(
        self,
        *,
        global_round: int = 3,
        local_round: int = 0,
        closing: Closing = ALL,
        now: float = 0.0,
    ) -> Key:
        return self.coordinator.open(
            global_round=global_round,
            local_round=local_round,
            assignments=assignments(self.names),
            closing=closing,
            now=now,
        )

    def presence(
        self, name: str, state: NodeState, now: float, *, session: str = "", reason: str = ""
    ) -> None:
        presence = Presence(state, "device", reason=reason)
        self.coordinator.presence(name, session or f"{name}-a", presence, now=now)

    def receive(self, name: str, message: Progress | Result, now: float) -> None:
        self.coordinator.receive(name, message, now=now)

    def progress(
        self,
        now: float,
        phase: Phase = Phase.TRAINING,
        *,
        name: str = "device-0",
        done: int = 0,
        **counts: int,
    ) -> None:
        """Receive a child's progress in the present round; `counts`: see `traffic_of`."""
        self.receive(name, progress_of(self.key, phase, done, traffic=traffic_of(**counts)), now)

    def result(self, name: str, now: float) -> None:
        self.receive(name, result_of(self.key), now)

    def reconnect(self, now: float) -> None:
        """Lose the first child, and see the same process again."""
        for state in (NodeState.LOST, NodeState.READY):
            self.presence("device-0", state, now)

    def finish(self, name: str, now: float) -> None:
        self.progress(now, name=name)
        self.result(name, now)
        self.coordinator.accept(name, self.key, now=now)

    def events(self) -> list[object]:
        return list(iter(self.coordinator.next_event, None))

    def tick(self, now: float) -> Stalled | None:
        """Evaluate the round; return how it has stalled, None if it has not. All events are taken."""
        self.coordinator.tick(now)
        return next((event for event in self.events() if isinstance(event, Stalled)), None)

    def closed(self) -> Closed:
        """Return the closed round, the last event; all events are taken."""
        closed = self.events()[-1]
        assert isinstance(closed, Closed)
        return closed

    def tasks(self, now: float) -> list[tuple[str, Task]]:
        return [
            (name, message)
            for name, message in self.coordinator.to_send(now)
            if isinstance(message, Task)
        ]

    def acknowledgements(self, now: float) -> list[tuple[str, Acknowledgement]]:
        return [
            (name, message)
            for name, message in self.coordinator.to_send(now)
            if isinstance(message, Acknowledgement)
        ]


# The child by hand


def task_of(key: Key, *, model: int = 1, epochs: int = 1) -> Task:
    return Task(key, epochs, manifest_of(model), None)


COUNTED = Traffic(1), (Traffic(2),)


class OneChild:
    """A participant in the hand of a test."""

    def __init__(self) -> None:
        self.participant, self.session = Participant(idle_s=20.0), "p"

    def receive(
        self, message: Task | Acknowledgement, now: float = 0.0, *, session: str = "p"
    ) -> list[object]:
        """Take a message of the parent's session, which may be a new one; return what happened."""
        if session != self.session:
            self.session = session
            self.participant.parent_restarted(now)
        self.participant.receive(message, now=now)
        return list(iter(self.participant.next_event, None))

    def to_send(self, now: float) -> list[Progress | Result]:
        return self.participant.to_send(now, *COUNTED)

    def work(self, key: Key, now: float = 0.0, **what: int) -> None:
        task = task_of(key, **what)
        assert self.receive(task, now) == [TaskReceived(task)]
        self.participant.begin_work(Phase.TRAINING, now=now)
        self.participant.finish(result_of(key), now=now)
