"""Coordinators and participants by hand, and their messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from fedstrata.common.accounting.traffic import TcpStats, Traffic
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
from tests.helpers.session_lab import ALL, WORK

OLD = Key(0, 0, 0)
COUNTED = {"traffic": Traffic(1), "below": (Traffic(2),)}

_T = TypeVar("_T")


def quorum_of(count: int, deadline_s: float) -> Closing:
    return Closing.model_construct(rule="quorum", quorum=count, deadline_s=deadline_s)


def manifest_of(number: int) -> Manifest:
    return Manifest(f"{number:016x}", 1_000_000, 1_000_000, b"d" * 8, "fp32", "layout")


def result_of(key: Key, number: int = 77, **more: Any) -> Result:
    return Result(key, manifest_of(number), None, WORK, 10, (), "", **more)


def progress_of(key: Key, phase: Phase = Phase.TRAINING, done: int = 0, **counts: int) -> Progress:
    return Progress(key, phase, done, 100, traffic_of(**counts), ())


def traffic_of(*, received: int = 0, sent: int = 0, control: int = 0) -> Traffic:
    """Return the counts of a connection: bytes by the kernel, and of received control messages
    among them.
    """
    return Traffic(
        received_control_message=control, wire=TcpStats(sent=sent, received=received, connections=1)
    )


def due(
    next_deadline: Callable[[], float], act: Callable[[float], Iterable[_T]], *, until_s: float
) -> list[tuple[float, _T]]:
    """Act at each deadline; return what came of it, each with its time."""
    found = []
    while (at := next_deadline()) < until_s:
        found += [(at, each) for each in act(at)]
    return found


class OneParent(Coordinator):
    """A coordinator in the hand of a test, all children READY and their tasks sent."""

    def __init__(
        self,
        names: str = "a",
        *,
        idle_s: float = 20.0,
        closing: Closing = ALL,
        ready: bool = True,
        opened: bool = True,
    ) -> None:
        super().__init__(names, idle_s=idle_s)
        self.names, self.closing = names, closing
        for name in names if ready else ():
            self.come(name=name)
        if opened:
            self.start(3)
        if opened and ready:
            assert {name for name, _ in self.to_send(0.0)} == set(names)

    def start(
        self,
        global_round: int,
        local_round: int = 0,
        *,
        now: float = 0.0,
        names: Sequence[str] | None = None,
        **how: Any,
    ) -> Key:
        """Open a round, of all children but for these."""
        task = Assignment(manifest_of(1), 1, b"x" * 1000)
        return self.open(
            global_round=global_round,
            local_round=local_round,
            assignments=dict.fromkeys(self.names if names is None else names, task),
            closing=self.closing,
            now=now,
            **how,
        )

    def come(
        self,
        now: float = 0.0,
        state: NodeState = NodeState.READY,
        *,
        name: str = "a",
        session: str = "1",
        **more: Any,
    ) -> None:
        """Take a child's presence."""
        self.presence(name, session, Presence(state, "device", **more), now=now)

    def progress(
        self,
        now: float,
        phase: Phase = Phase.TRAINING,
        *,
        name: str = "a",
        done: int = 0,
        key: Key | None = None,
        **counts: int,
    ) -> None:
        """Take a child's progress, in the present round; `counts`: see `traffic_of`."""
        self.receive(name, progress_of(key or self.key, phase, done, **counts), now=now)

    def announce(self, now: float, name: str = "a", key: Key | None = None) -> list[object]:
        """Take a child's result, in the present round; return what happened."""
        self.receive(name, result_of(key or self.key), now=now)
        return self.events()

    def finish(self, now: float, name: str = "a") -> list[object]:
        """Take a child's result in the present round and accept it; return what happens then."""
        self.progress(now, name=name)
        self.announce(now, name)
        self.accept(name, self.key, now=now)
        return self.events()

    def events(self) -> list[object]:
        return list(iter(self.next_event, None))

    def stalls(self, now: float) -> Stalled | None:
        """Evaluate the round; return how it has stalled, None if it has not. All events are taken."""
        self.tick(now)
        return next((event for event in self.events() if isinstance(event, Stalled)), None)

    def sends(self, now: float, kind: type[_T]) -> list[tuple[str, _T]]:
        """Return the messages of a kind that are due; all others are taken, too."""
        return [(name, sent) for name, sent in self.to_send(now) if isinstance(sent, kind)]

    def tasks(self, now: float) -> list[tuple[str, Task]]:
        return self.sends(now, Task)

    def answers(self, now: float) -> list[tuple[str, Key, str]]:
        """Return the acknowledgements that are due, each with its child."""
        return [(name, each.key, each.reason) for name, each in self.sends(now, Acknowledgement)]


def results_of(closed: object) -> set[str]:
    """Return the children whose results are in a closed round."""
    assert isinstance(closed, Closed)
    return set(closed.results)


def task_of(key: Key, *, model: int = 1, epochs: int = 1) -> Task:
    return Task(key, epochs, manifest_of(model), None)


class OneChild(Participant):
    """A participant in the hand of a test."""

    def __init__(self, **how: float) -> None:
        super().__init__(**{"idle_s": 20.0} | how)
        self.session = "p"

    def take(
        self, message: Task | Acknowledgement, now: float = 0.0, *, session: str = "p"
    ) -> list[object]:
        """Take a message of the parent's session, which may be a new one; return what happened."""
        if session != self.session:
            self.session = session
            self.parent_restarted(now)
        self.receive(message, now=now)
        return list(iter(self.next_event, None))

    def sends(self, now: float) -> list[Progress | Result]:
        return self.to_send(now, **COUNTED)

    def begin(self, phase: Phase = Phase.TRAINING, now: float = 0.0, *, key: Key = OLD) -> None:
        """Take a task, and begin its work."""
        task = task_of(key)
        assert self.take(task) == [TaskReceived(task)]
        self.begin_work(phase, now=now)

    def work(self, key: Key = OLD) -> None:
        """Do a task."""
        self.begin(key=key)
        self.finish(result_of(key), now=0.0)
