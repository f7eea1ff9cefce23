"""Rounds: a parent and its children joined in memory by a line that loses, doubles and reorders, on a virtual clock."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.protocol.closing import Standing, Verdict, judge
from common.protocol.coordinator import Assignment, Closed, Coordinator, Offered, Restarted, Stalled
from common.protocol.messages import Acknowledgement, Key, Manifest, NodeState, Phase, Presence, Progress, Result, Task
from common.protocol.participant import Answered, Begin, Participant, ParticipantState
from common.protocol.timeline import Timeline
from common.protocol.traffic import Traffic, Wire
from common.spec import Closing

ALL = Closing()
IDLE_S = 60.0
OLD = Key(0, 0, 0)


def manifest_of(number: int) -> Manifest:
    return Manifest(f"{number:016x}", 1000, 1024, b"d" * 8, "fp32", "layout")


def result_of(key: Key, number: int = 77) -> Result:
    return Result(key, manifest_of(number), None, 10, 0.5, 1, 10, 10, 1.0, 0.0, 0.0, (), "")


def progress_of(key: Key, phase: Phase = Phase.TRAINING, done: int = 0, *, traffic: Traffic | None = None) -> Progress:
    return Progress(key, phase, done, 100, traffic or Traffic(), Traffic())


def names_of(count: int) -> list[str]:
    return [f"device-{i}" for i in range(count)]


def assignments(names: Sequence[str], *, model: int = 1, epochs: int = 1) -> dict[str, Assignment]:
    return dict.fromkeys(names, Assignment(manifest_of(model), epochs, b"x" * 1000))


def test_no_child_is_blamed_for_our_own_absence() -> None:
    parent = Coordinator(["a"], idle_s=10.0)
    key = parent.open(iteration=0, round_=0, assignments=assignments(["a"]), closing=ALL, now=0.0)
    parent.presence("a", "s", Presence(NodeState.READY, "device"), now=0.0)
    parent.receive("a", "s", progress_of(key), now=0.0)
    parent.reconnected(100.0)
    parent.tick(105.0)
    assert not any(isinstance(event, Stalled) for event in iter(parent.next_event, None))
    parent.tick(110.0)
    assert any(isinstance(event, Stalled) for event in iter(parent.next_event, None))


def test_a_child_that_gave_up_before_the_round_is_not_waited_for() -> None:
    parent = Coordinator(["a"], idle_s=10.0)
    parent.presence("a", "s", Presence(NodeState.FAILED, "device", reason="no data"), now=0.0)
    parent.open(iteration=0, round_=0, assignments=assignments(["a"]), closing=ALL, now=1.0)
    parent.tick(1.0)
    assert parent.next_event() == Stalled("a gave up: no data", idle=False)


# The simulated lab


@dataclass
class Child:
    """One child's process, and its successors of the same name."""

    name: str
    train_s: float
    session: str = ""
    participant: Participant = field(default_factory=Participant)
    alive: bool = False
    life: int = 0
    work: int = 0
    trained: list[tuple[str, int, int, str, int]] = field(default_factory=list)
    answered: list[Answered] = field(default_factory=list)


class Lab:
    """A parent, its children, and a broker that keeps the children's presence."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        seed: int = 0,
        loss: float = 0.0,
        duplicates: float = 0.0,
        jitter_s: float = 0.0,
        train_s: float = 3.0,
        idle_s: float = IDLE_S,
    ) -> None:
        self.now = 1000.0
        self.loss, self.duplicates, self.jitter_s, self.idle_s = loss, duplicates, jitter_s, idle_s
        self.children = {name: Child(name, train_s) for name in names}
        self.parent_session = "parent-0"
        self._parent_since = -1e9
        self.coordinator = Coordinator(names, idle_s=idle_s)
        self.retained: dict[str, tuple[str, Presence]] = {}
        self.events: list[object] = []
        self.said: Counter[tuple[str, str, int]] = Counter()
        self.tasks = 0
        self.broker_life = 0
        self.broker_up = True
        self.void: set[tuple[str, Key]] = set()
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._sessions = itertools.count()
        self._opening: tuple[int, int, dict[str, Assignment], Closing] | None = None

    def after(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), action))

    # What happens

    def start(self, name: str) -> None:
        child = self.children[name]
        child.life += 1
        child.alive, child.participant = True, Participant()
        child.session = f"{name}-{next(self._sessions)}"
        self._say_presence(child, NodeState.INIT)
        self._ready_soon(child)

    def kill(self, name: str, *, will_after_s: float) -> None:
        child = self.children[name]
        if child.alive:
            child.alive, session = False, child.session
            child.life += 1
            self.after(will_after_s, lambda: self._publish_presence(name, session, Presence(NodeState.LOST, "device")))

    def restart_parent(self, *, reopen: bool = True) -> None:
        self.parent_session = f"parent-{next(self._sessions)}"
        self._parent_since = self.now
        self.coordinator = Coordinator(self.children, idle_s=self.idle_s)
        for name, (session, presence) in self.retained.items():
            self._tell_presence(name, session, presence)
        if reopen:
            self.after(0.3, self._reopen)

    def restart_broker(self, down_s: float) -> None:
        self.broker_life += 1
        self.broker_up = False
        self.retained.clear()
        self.after(down_s, self._broker_back)

    def open(
        self,
        *,
        iteration: int = 0,
        round_: int = 0,
        wishes: dict[str, Assignment] | None = None,
        closing: Closing = ALL,
    ) -> Key:
        self._opening = (iteration, round_, wishes or assignments(list(self.children)), closing)
        return self._open()

    def play(self, *, until_s: float = 400.0) -> Closed | Stalled:
        """Run until the round is over."""
        end = self.now + until_s
        while True:
            for event in self.events:
                if isinstance(event, (Closed, Stalled)):
                    self.events.remove(event)
                    self._opening = None
                    return event
            due = self._next()
            assert due is not None and due < end, f"the round hangs: {self.coordinator.progress()}"
            self.step(due)

    def rest(self, seconds: float) -> None:
        """Let everything go its way for so long."""
        end = self.now + seconds
        while (due := self._next()) is not None and due <= end:
            self.step(due)
        self.now = end

    def step(self, due: float) -> None:
        self.now = max(self.now, due)
        while self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()
        if self.broker_up:
            for child in self.children.values():
                if child.alive:
                    self._pump_child(child)
        self._pump_parent()

    # How it is joined

    def _next(self) -> float | None:
        times = [self._events[0][0]] if self._events else []
        if self.broker_up:
            times += [
                at for c in self.children.values() if c.alive and (at := c.participant.next_deadline()) is not None
            ]
        if self.broker_up and (at := self.coordinator.next_deadline()) is not None:
            times.append(at)
        return min(times, default=None)

    def _open(self) -> Key:
        assert self._opening is not None
        iteration, round_, wishes, closing = self._opening
        self.after(0.0, lambda: None)
        return self.coordinator.open(
            iteration=iteration, round_=round_, assignments=wishes, closing=closing, now=self.now
        )

    def _reopen(self) -> None:
        if self._opening is not None:
            self._open()

    def _broker_back(self) -> None:
        self.broker_up = True
        for child in self.children.values():
            if child.alive:
                child.participant.reconnected(self.now)
                self._say_presence(child, NodeState.READY)

    def _ready_soon(self, child: Child) -> None:
        life = child.life

        def ready() -> None:
            if child.life == life:
                self._say_presence(child, NodeState.READY)

        self.after(0.2, ready)

    def _say_presence(self, child: Child, state: NodeState) -> None:
        session, name = child.session, child.name
        self.after(0.001, lambda: self._publish_presence(name, session, Presence(state, "device")))

    def _publish_presence(self, name: str, session: str, presence: Presence) -> None:
        """The broker keeps the last word and passes all of them on in their order."""
        if not self.broker_up:
            return
        child = self.children[name]
        self.retained[name] = (session, presence)
        self._tell_presence(name, session, presence)
        if child.alive and session != child.session:  # a living node sees that somebody speaks in its name
            self.after(0.01, lambda: self._say_presence(child, NodeState.READY) if child.alive else None)

    def _tell_presence(self, name: str, session: str, presence: Presence) -> None:
        coordinator, life = self.coordinator, self.broker_life

        def tell() -> None:
            if life == self.broker_life:
                coordinator.presence(name, session, presence, now=self.now)

        self.after(0.01, tell)

    def _carry(self, action: Callable[[], None]) -> None:
        life = self.broker_life
        for _ in range(1 + (self._random.random() < self.duplicates)):
            if self._random.random() >= self.loss:
                self.after(
                    0.01 + self._random.random() * self.jitter_s,
                    lambda: action() if life == self.broker_life else None,
                )

    def _pump_parent(self) -> None:
        self.coordinator.tick(self.now)
        while (event := self.coordinator.next_event()) is not None:
            self.events.append(event)
            if isinstance(event, Offered):
                self._fetch(event)
        if not self.broker_up:
            return
        for name, message in self.coordinator.to_send(self.now):
            self.said["parent", name, int(self.now)] += 1
            self.tasks += isinstance(message, Task)
            self._carry(
                lambda name=name, message=message, session=self.parent_session: self._hear(name, session, message)
            )  # type: ignore[misc]

    def _fetch(self, event: Offered) -> None:
        coordinator, child = self.coordinator, self.children[event.child]
        life = child.life

        def done() -> None:
            if child.life == life:
                coordinator.accept(event.child, event.result.key, now=self.now)
            else:
                coordinator.ask_again(event.child, event.result.key, now=self.now)

        self.after(0.5, done)

    def _hear(self, name: str, session: str, message: Task | Acknowledgement) -> None:
        child = self.children[name]
        if session != self.parent_session and self.now > self._parent_since + 0.3:
            return  # a broker keeps the order of two processes: the successor has spoken by now
        if child.alive:
            child.participant.receive(session, message, now=self.now)

    def _pump_child(self, child: Child) -> None:
        while (event := child.participant.next_event()) is not None:
            if isinstance(event, Begin):
                self._train(child, event.task)
            else:
                child.answered.append(event)
        session, coordinator = child.session, self.coordinator
        for message in child.participant.to_send(self.now, Traffic(), Traffic()):
            self.said[child.name, "parent", int(self.now)] += 1
            self._carry(lambda message=message: coordinator.receive(child.name, session, message, now=self.now))  # type: ignore[misc]

    def _train(self, child: Child, task: Task) -> None:
        child.work += 1
        mine = (child.life, child.work)
        child.trained.append((child.session, task.key.iteration, task.key.round, task.model.blob, task.epochs))
        steps = 6

        def step(number: int) -> None:
            if (child.life, child.work) != mine:
                return
            if number == 0:
                child.participant.begin_work(Phase.TRAINING, now=self.now)
            child.participant.progress(Phase.TRAINING, number, steps, now=self.now)
            if number == steps:
                child.participant.finish(result_of(task.key, number=task.epochs + 100), now=self.now)
            else:
                self.after(child.train_s / steps, lambda: step(number + 1))

        self.after(0.2, lambda: step(0))

    # What must hold

    def check(self) -> None:
        for child in self.children.values():
            assert len(child.trained) == len(set(child.trained)), f"{child.name} trained twice: {child.trained}"
        storms = {who: count for who, count in self.said.items() if count > 12}
        assert not storms, f"messages in one second: {storms}"


def lab_of(count: int, **how: float) -> Lab:
    lab = Lab(names_of(count), **how)  # type: ignore[arg-type]
    for name in lab.children:
        lab.start(name)
    return lab


def settled(event: Closed | Stalled) -> Closed:
    assert isinstance(event, Closed), event
    return event


def test_a_round_without_trouble_says_everything_once() -> None:
    lab = lab_of(5)
    lab.rest(1.0)
    key = lab.open()
    begun = lab.now
    closed = settled(lab.play())
    assert closed.key == key == Key(0, 0, 0) and set(closed.results) == set(lab.children)
    assert not closed.missing and not closed.refused
    assert lab.tasks == 5 and lab.now - begun < 4.0
    assert all(len(child.trained) == 1 for child in lab.children.values())
    lab.rest(0.1)
    assert all(child.participant.state is ParticipantState.DONE for child in lab.children.values())
    assert all(child.answered == [Answered(key, "")] for child in lab.children.values())
    lab.check()


def test_rounds_follow_each_other() -> None:
    lab = lab_of(3)
    for iteration, round_ in itertools.product(range(3), range(2)):
        key = lab.open(iteration=iteration, round_=round_, wishes=assignments(names_of(3), epochs=1 + iteration))
        closed = settled(lab.play())
        assert closed.key == key == Key(0, iteration, round_)
        assert all(result.model == manifest_of(101 + iteration) for result in closed.results.values())
    assert lab.coordinator.late == 0
    lab.check()


def test_only_those_named_take_part() -> None:
    lab = lab_of(4)
    lab.open(wishes=assignments(["device-1", "device-3"]))
    assert set(settled(lab.play()).results) == {"device-1", "device-3"}
    assert not lab.children["device-0"].trained and not lab.children["device-2"].trained


EVENTS = st.lists(
    st.tuples(
        st.floats(0.0, 8.0),
        st.one_of(
            st.tuples(st.just("child"), st.integers(0, 5), st.floats(0.0, 2.0), st.floats(0.0, 3.0)),
            st.tuples(st.just("parent")),
            st.tuples(st.just("broker"), st.floats(0.1, 3.0)),
        ),
    ),
    max_size=4,
)


@settings(max_examples=200)
@example(seed=589898, children=5, loss=0.4, duplicates=0.0, jitter_s=3.0, events=[])
@given(
    seed=st.integers(0, 2**32),
    children=st.integers(1, 6),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    duplicates=st.sampled_from([0.0, 0.3]),
    jitter_s=st.sampled_from([0.0, 0.05, 3.0]),
    events=EVENTS,
)
def test_whatever_happens_the_rounds_complete(
    *, seed: int, children: int, loss: float, duplicates: float, jitter_s: float, events: list[tuple[float, tuple]]
) -> None:
    # Of 40 % lost, thirteen wishes in a row were once: a minute of silence.
    lab = lab_of(children, seed=seed, loss=loss, duplicates=duplicates, jitter_s=jitter_s, idle_s=200.0)

    def hit(what: tuple) -> None:
        if what[0] == "parent":
            lab.restart_parent()
        elif what[0] == "broker":
            lab.restart_broker(what[1])
        else:
            name = f"device-{what[1] % children}"
            lab.kill(name, will_after_s=what[2])
            life = lab.children[name].life
            lab.after(what[3], lambda: lab.start(name) if lab.children[name].life == life else None)

    for moment, what in events:
        lab.after(moment, lambda what=what: hit(what))  # type: ignore[misc]
    for round_ in range(3):
        lab.open(round_=round_, wishes=assignments(names_of(children), model=round_))
        closed = settled(lab.play())
        assert set(closed.results) == set(lab.children)
    lab.check()


def test_a_parent_that_goes_back_gets_new_answers() -> None:
    """A parent that restarts from an older checkpoint, after a child already offered it a later round's result."""
    lab = lab_of(2)
    for round_ in range(2):
        lab.open(iteration=5, round_=round_, wishes=assignments(names_of(2), model=round_))
        settled(lab.play())
    lab.open(iteration=6, wishes=assignments(names_of(2), model=6))
    lab.rest(3.3)
    assert {child.participant.state for child in lab.children.values()} == {ParticipantState.OFFERING}
    lab.restart_parent(reopen=False)
    lab.rest(10.0)  # long enough for each child to repeat its offer to a parent that has no round open
    lab.open(iteration=4, wishes=assignments(names_of(2), model=4))
    assert set(settled(lab.play(until_s=30)).results) == set(lab.children)


def test_going_back_in_one_process_is_a_new_attempt() -> None:
    lab = lab_of(2)
    assert lab.open(iteration=1, round_=1) == Key(0, 1, 1)
    settled(lab.play())
    assert lab.open(iteration=1, round_=0) == Key(1, 1, 0)
    settled(lab.play())
    assert lab.open(iteration=1, round_=0) == Key(2, 1, 0)
    settled(lab.play())
    assert lab.open(iteration=1, round_=1) == Key(2, 1, 1)
    settled(lab.play())
    # The same wish again is answered without training; the others are rounds of their own by then.
    assert [trained[1:3] for trained in lab.children["device-0"].trained] == [(1, 1), (1, 0), (1, 1)]


# The parent by hand


class Desk:
    """A coordinator in the hand of a test, all children READY and their wishes said."""

    def __init__(self, count: int = 3, *, idle_s: float = 20.0, closing: Closing = ALL, ready: bool = True) -> None:
        self.names = names_of(count)
        self.coordinator = Coordinator(self.names, idle_s=idle_s)
        if ready:
            for name in self.names:
                self.presence(name, NodeState.READY, 0.0)
        self.key = self.open(closing=closing)
        if ready:
            assert {name for name, _ in self.coordinator.to_send(0.0)} == set(self.names)

    def open(self, *, iteration: int = 3, round_: int = 0, closing: Closing = ALL, now: float = 0.0) -> Key:
        return self.coordinator.open(
            iteration=iteration, round_=round_, assignments=assignments(self.names), closing=closing, now=now
        )

    def presence(self, name: str, state: NodeState, now: float, *, session: str = "", reason: str = "") -> None:
        presence = Presence(state, "device", reason=reason)
        self.coordinator.presence(name, session or f"{name}-a", presence, now=now)

    def say(self, name: str, message: Progress | Result, now: float, *, session: str = "") -> None:
        self.coordinator.receive(name, session or f"{name}-a", message, now=now)

    def answer(self, name: str, now: float) -> None:
        self.say(name, progress_of(self.key), now)
        self.say(name, result_of(self.key), now)
        self.coordinator.accept(name, self.key, now=now)

    def events(self) -> list[object]:
        return list(iter(self.coordinator.next_event, None))

    def tasks(self, now: float) -> list[tuple[str, Task]]:
        return [(name, message) for name, message in self.coordinator.to_send(now) if isinstance(message, Task)]

    def receipts(self, now: float) -> list[tuple[str, Acknowledgement]]:
        return [
            (name, message) for name, message in self.coordinator.to_send(now) if isinstance(message, Acknowledgement)
        ]


def test_a_small_model_travels_with_the_first_wish_only() -> None:
    desk = Desk(1, ready=False)
    desk.presence("device-0", NodeState.READY, 0.0)
    ((_, first),) = desk.tasks(0.0)
    assert first.inline == b"x" * 1000 and first.key == desk.key
    times = []
    while (due := desk.coordinator.next_deadline()) is not None and due < 19:
        for _, task in desk.tasks(due):
            assert task == replace(first, inline=None)
            times.append(due)
    assert times == [1.0, 3.0, 7.0, 12.0, 17.0]


def test_absent_children_are_not_told() -> None:
    desk = Desk(3, ready=False)
    assert desk.tasks(5.0) == []
    desk.presence("device-0", NodeState.INIT, 5.0)
    desk.presence("device-1", NodeState.READY, 5.0)
    assert [name for name, _ in desk.tasks(5.0)] == ["device-0", "device-1"]
    desk.presence("device-1", NodeState.LOST, 6.0)
    assert [name for name, _ in desk.tasks(11.0)] == ["device-0"]
    assert desk.coordinator.states() == {"device-0": "init", "device-1": "lost", "device-2": "absent"}


def test_word_of_an_old_round_does_not_silence_the_wish() -> None:
    """A child that works on a round which closed without it reports that for hours; the lost wish is said again."""
    desk = Desk(1)
    for tenth in range(1, 100):
        now = tenth / 10
        if tenth % 5 == 0:
            desk.say("device-0", progress_of(OLD, done=tenth), now)
        if desk.tasks(now):
            break
    else:
        pytest.fail("the wish was never said again")
    assert now < 2.0


def test_a_busy_child_is_told_again_only_after_silence() -> None:
    desk = Desk(1)
    for second in range(1, 11):
        desk.say("device-0", progress_of(desk.key, done=second), float(second))
        assert desk.tasks(float(second)) == []
    assert desk.tasks(14.9) == [] and len(desk.tasks(15.0)) == 1


def test_a_refused_result_leaves_the_round_to_the_others() -> None:
    desk = Desk(3)
    for name in desk.names:
        desk.say(name, result_of(desk.key), 1.0)
    assert [event.child for event in desk.events() if isinstance(event, Offered)] == desk.names
    desk.coordinator.refuse("device-1", desk.key, reason="holds NaN", now=2.0)
    assert ("device-1", Acknowledgement(desk.key, "holds NaN")) in desk.receipts(2.0)
    desk.say("device-1", result_of(desk.key), 3.0)  # its receipt was lost
    assert desk.receipts(3.0) == [("device-1", Acknowledgement(desk.key, "holds NaN"))]
    desk.coordinator.accept("device-1", desk.key, now=3.0)  # too late to change its mind
    desk.coordinator.accept("device-0", desk.key, now=3.0)
    assert desk.events() == []
    desk.coordinator.accept("device-2", desk.key, now=4.0)
    (closed,) = desk.events()
    assert isinstance(closed, Closed) and set(closed.results) == {"device-0", "device-2"}
    assert closed.refused == {"device-1": "holds NaN"} and closed.missing == ()


def test_when_all_are_refused_the_round_stalls_and_names_them() -> None:
    desk = Desk(2)
    for name in desk.names:
        desk.say(name, result_of(desk.key), 1.0)
        desk.coordinator.refuse(name, desk.key, reason=f"{name} diverged", now=1.0)
    stalled = desk.events()[-1]
    assert isinstance(stalled, Stalled)
    for name in desk.names:
        assert f"{name}'s model was refused: {name} diverged" in stalled.reason


def test_a_second_wish_is_a_clean_sheet() -> None:
    desk = Desk(2)
    desk.say("device-0", result_of(desk.key), 1.0)
    desk.coordinator.refuse("device-0", desk.key, reason="no", now=1.0)
    desk.answer("device-1", 2.0)
    desk.events()
    desk.key = desk.open(round_=1, now=3.0)
    for name in desk.names:
        desk.answer(name, 4.0)
    closed = desk.events()[-1]
    assert isinstance(closed, Closed) and set(closed.results) == set(desk.names) and not closed.refused


def test_a_late_result_has_a_receipt_and_is_counted_once() -> None:
    quorum = Closing(rule="quorum", quorum=2, deadline_s=5.0)
    desk = Desk(3, closing=quorum)
    desk.answer("device-0", 1.0)
    desk.answer("device-1", 2.0)
    desk.coordinator.to_send(2.0)
    desk.coordinator.tick(5.0)
    (closed,) = [event for event in desk.events() if isinstance(event, Closed)]
    assert closed.missing == ("device-2",)
    late = result_of(desk.key)
    for now in (6.0, 7.0):  # its repeat, too
        desk.say("device-2", late, now)
        assert desk.receipts(now) == [("device-2", Acknowledgement(desk.key, "the round has closed"))]
    desk.open(round_=1, now=8.0)
    desk.coordinator.to_send(8.0)
    desk.say("device-2", late, 9.0)
    assert ("device-2", Acknowledgement(desk.key, "the round has closed")) in desk.coordinator.to_send(9.0)
    assert desk.coordinator.late == 1


def test_a_result_that_was_taken_is_never_called_late() -> None:
    """Its receipt was lost: the child asks again after the round has closed, and after the next was opened."""
    desk = Desk(1)
    desk.answer("device-0", 1.0)
    desk.coordinator.to_send(1.0)
    desk.say("device-0", result_of(desk.key), 2.0)
    assert desk.receipts(2.0) == [("device-0", Acknowledgement(desk.key, ""))]
    desk.open(round_=1, now=3.0)
    desk.coordinator.to_send(3.0)
    desk.say("device-0", result_of(desk.key), 3.5)
    assert ("device-0", Acknowledgement(desk.key, "")) in desk.coordinator.to_send(3.5)
    assert desk.coordinator.late == 0


def test_a_new_parent_does_not_judge_what_it_never_asked_for() -> None:
    """Before its first round it may be about to open the very one that the result belongs to."""
    coordinator = Coordinator(["device-0"], idle_s=20.0)
    coordinator.receive("device-0", "s", result_of(OLD), now=0.0)
    assert coordinator.to_send(0.0) == [] and coordinator.late == 0


def test_silence_stalls_the_round_and_names_the_child() -> None:
    desk = Desk(3, idle_s=20.0)
    desk.answer("device-0", 1.0)
    desk.say("device-1", progress_of(desk.key, done=1), 5.0)
    desk.presence("device-2", NodeState.LOST, 6.0)
    desk.coordinator.tick(19.9)
    assert not any(isinstance(event, Stalled) for event in desk.events())
    desk.coordinator.tick(25.1)
    (stalled,) = desk.events()
    assert isinstance(stalled, Stalled)
    assert "device-1 made no progress for 20 s (its state is ready)" in stalled.reason
    assert "device-2 made no progress for 20 s (its state is lost)" in stalled.reason
    assert "device-0" not in stalled.reason


def test_a_child_that_never_came_is_named() -> None:
    desk = Desk(1, ready=False)
    desk.coordinator.tick(20.0)
    assert desk.events() == [Stalled("device-0 made no progress for 20 s (it never came)", idle=True)]


def wire_of(*, received: int = 0, sent: int = 0, control: int = 0) -> Traffic:
    return Traffic(received_control_message=control, wire=Wire(sent=sent, received=received, connections=1))


@pytest.mark.parametrize("how", ["steps", "phases", "bytes", "upload", "part of a chunk down", "part of a chunk up"])
def test_nobody_is_given_up_while_something_moves(how: str) -> None:
    desk = Desk(1, idle_s=20.0)
    desk.say("device-0", progress_of(desk.key, Phase.FETCHING), 0.0)
    if how == "upload":
        desk.say("device-0", result_of(desk.key), 0.0)
    for number in range(1, 50):
        now = 19.0 * number
        if how == "steps":
            desk.say("device-0", progress_of(desk.key, done=number), now)
        elif how == "phases":
            desk.say("device-0", progress_of(desk.key, [Phase.WAITING, Phase.TRAINING][number % 2]), now)
        elif how == "part of a chunk down":  # 8 kbit/s
            traffic = wire_of(received=19_000 * number, control=100 * number)
            desk.say("device-0", progress_of(desk.key, Phase.FETCHING, traffic=traffic), now)
        elif how == "part of a chunk up":
            desk.say("device-0", progress_of(desk.key, Phase.OFFERING, traffic=wire_of(sent=19_000 * number)), now)
        else:
            desk.coordinator.moved("device-0", now=now)
        desk.coordinator.tick(now + 0.5)
    assert not any(isinstance(event, Stalled) for event in desk.events())
    desk.coordinator.tick(now + 20.0)
    assert any(isinstance(event, Stalled) for event in desk.events())


def test_heartbeats_are_no_progress() -> None:
    desk = Desk(1, idle_s=20.0)
    for number in range(12):
        # Our words and theirs, each acknowledged.
        traffic = wire_of(received=5004 * number, sent=4 * number, control=5000 * number)
        desk.say("device-0", progress_of(desk.key, done=5, traffic=traffic), 2.0 * number)
        desk.coordinator.tick(2.0 * number)
    assert any(isinstance(event, Stalled) for event in desk.events())


def test_a_new_session_counts_its_bytes_anew() -> None:
    desk = Desk(1, idle_s=20.0)
    desk.say("device-0", progress_of(desk.key, Phase.FETCHING, traffic=wire_of(received=10**9)), 1.0)
    for number in range(1, 10):
        traffic = wire_of(received=20_000 * number)
        desk.say("device-0", progress_of(desk.key, Phase.FETCHING, traffic=traffic), 15.0 * number, session="later")
        desk.coordinator.tick(15.0 * number + 0.5)
    assert not any(isinstance(event, Stalled) for event in desk.events())


def test_an_offer_in_the_queue_for_an_upload_slot_is_not_idle() -> None:
    """It did its part; that others upload before it, for longer than `idle_s`, is no silence of its own."""
    desk = Desk(3, idle_s=20.0)
    for name in desk.names:
        desk.say(name, result_of(desk.key), 1.0)
    for now in range(2, 80, 2):
        desk.coordinator.moved("device-0", now=float(now))
        desk.coordinator.tick(float(now))
    assert not any(isinstance(event, Stalled) for event in desk.events())
    desk.coordinator.tick(99.0)  # now nothing moved for any of them
    (stalled,) = desk.events()
    assert isinstance(stalled, Stalled) and all(name in stalled.reason for name in desk.names)


def test_init_is_a_grace() -> None:
    desk = Desk(1, idle_s=20.0, ready=False)
    desk.presence("device-0", NodeState.INIT, 1.0)
    desk.coordinator.tick(1000.0)
    assert desk.events() == []
    desk.presence("device-0", NodeState.READY, 1001.0)
    desk.say("device-0", progress_of(desk.key), 1002.0)
    desk.coordinator.tick(1021.0)
    assert desk.events() == []


def test_the_grace_ends_with_its_process() -> None:
    desk = Desk(1, idle_s=20.0, ready=False)
    desk.presence("device-0", NodeState.INIT, 1.0)
    desk.presence("device-0", NodeState.LOST, 2.0)
    desk.coordinator.tick(22.0)
    assert any(isinstance(event, Stalled) for event in desk.events())


def test_a_child_that_gave_up_is_believed_at_once() -> None:
    desk = Desk(2, idle_s=20.0)
    desk.say("device-0", progress_of(desk.key), 1.0)
    desk.presence("device-0", NodeState.FAILED, 2.0, reason="CUDA out of memory")
    due = desk.coordinator.next_deadline()
    assert due is not None and due <= 2.0
    desk.coordinator.tick(2.0)
    assert desk.events() == [Stalled("device-0 gave up: CUDA out of memory", idle=False)]


def test_a_child_that_came_back_after_giving_up_works_on() -> None:
    desk = Desk(1, closing=Closing(rule="quorum", quorum=1, deadline_s=5.0))
    desk.presence("device-0", NodeState.FAILED, 2.0, reason="no")
    desk.presence("device-0", NodeState.READY, 2.0, session="second")
    desk.coordinator.tick(2.0)
    assert desk.events() == [Restarted("device-0")]
    assert len(desk.tasks(2.0)) == 1


@pytest.mark.parametrize("state", [NodeState.LOST, NodeState.FAILED, NodeState.DISCONNECTED, NodeState.FINISHED])
def test_the_last_word_of_a_process_with_a_successor_is_ignored(state: NodeState) -> None:
    desk = Desk(1)
    desk.presence("device-0", NodeState.READY, 1.0, session="new")
    assert desk.events() == [Restarted("device-0")]
    desk.presence("device-0", state, 2.0, reason="device-0 is already alive")
    desk.coordinator.tick(2.0)
    assert desk.coordinator.states() == {"device-0": "ready"} and desk.events() == []
    assert [name for name, _ in desk.tasks(2.0)] == ["device-0"]


def test_a_restarted_child_begins_again() -> None:
    desk = Desk(2)
    desk.say("device-0", result_of(desk.key), 1.0)
    desk.events()
    desk.presence("device-0", NodeState.READY, 2.0, session="new")
    assert desk.events() == [Restarted("device-0")]
    assert [name for name, task in desk.tasks(2.0) if task.inline] == ["device-0"]
    desk.coordinator.accept("device-0", desk.key, now=2.1)  # the old process' upload
    desk.say("device-0", result_of(desk.key), 2.2)  # and its words
    assert desk.events() == [] and desk.coordinator.to_send(2.2) == []
    desk.say("device-0", result_of(desk.key), 3.0, session="new")
    assert [type(event) for event in desk.events()] == [Offered]
    desk.coordinator.accept("device-0", desk.key, now=3.5)
    desk.answer("device-1", 4.0)
    assert isinstance(desk.events()[-1], Closed)


def test_a_new_process_is_known_by_its_first_word() -> None:
    desk = Desk(1)
    desk.say("device-0", progress_of(desk.key), 1.0)
    desk.say("device-0", progress_of(OLD), 2.0, session="new")
    assert desk.events() == [Restarted("device-0")]
    assert len(desk.tasks(2.0)) == 1


def test_a_restart_after_the_result_was_taken_changes_nothing() -> None:
    desk = Desk(2)
    desk.answer("device-0", 1.0)
    desk.presence("device-0", NodeState.READY, 2.0, session="new")
    assert [name for name, _ in desk.tasks(2.0)] == ["device-1"]
    desk.answer("device-1", 3.0)
    closed = desk.events()[-1]
    assert isinstance(closed, Closed) and set(closed.results) == set(desk.names)


def test_a_model_that_its_child_no_longer_holds_is_asked_for_again() -> None:
    desk = Desk(1)
    desk.say("device-0", result_of(desk.key), 1.0)
    desk.coordinator.ask_again("device-0", desk.key, now=2.0)
    assert len(desk.tasks(2.0)) == 1
    desk.coordinator.accept("device-0", desk.key, now=2.1)
    assert not any(isinstance(event, Closed) for event in desk.events())
    desk.answer("device-0", 3.0)
    assert isinstance(desk.events()[-1], Closed)


def test_words_about_another_round_or_from_strangers_change_nothing() -> None:
    desk = Desk(1)
    desk.say("stranger", result_of(desk.key), 1.0, session="s")
    desk.coordinator.presence("stranger", "s", Presence(NodeState.READY, "device"), now=1.0)
    desk.coordinator.moved("stranger", now=1.0)
    for key in (Key(0, 2, 0), Key(0, 3, 1), Key(1, 3, 0)):
        desk.say("device-0", progress_of(key), 1.0)
        desk.say("device-0", result_of(key), 1.0)
        desk.coordinator.accept("device-0", key, now=1.0)
        desk.coordinator.refuse("device-0", key, reason="no", now=1.0)
    assert desk.events() == []
    assert desk.receipts(1.0) == [("device-0", Acknowledgement(Key(0, 2, 0), "the round has closed"))]


def test_a_deadline_that_passed_is_no_reason_to_wake() -> None:
    """What has been judged is judged: a deadline in the past would keep the event loop spinning."""
    quorum = Closing(rule="quorum", quorum=2, deadline_s=500.0)
    desk = Desk(3, idle_s=20.0, closing=quorum)
    now = 0.0
    for _ in range(400):
        desk.say("device-1", progress_of(desk.key, done=int(now)), now)
        desk.say("device-2", progress_of(desk.key, done=int(now)), now)
        desk.coordinator.tick(now)
        desk.coordinator.to_send(now)
        due = desk.coordinator.next_deadline()
        assert due is None or due > now
        now += 0.5
    assert desk.events() == []
    desk = Desk(2, idle_s=20.0, closing=Closing(rule="all", quorum=1, deadline_s=5.0))
    desk.answer("device-0", 1.0)
    desk.say("device-1", progress_of(desk.key), 6.0)
    desk.coordinator.tick(6.0)
    desk.coordinator.to_send(6.0)
    due = desk.coordinator.next_deadline()
    assert due is not None and due > 6.0


def test_no_round_no_deadline() -> None:
    desk = Desk(1)
    desk.answer("device-0", 1.0)
    assert desk.coordinator.next_deadline() is None and not desk.tasks(100.0)
    desk.coordinator.tick(1000.0)
    assert [type(event) for event in desk.events()] == [Offered, Closed]


def test_a_person_can_read_how_it_goes() -> None:
    desk = Desk(2)
    desk.say("device-0", progress_of(desk.key, Phase.TRAINING), 1.0)
    assert desk.coordinator.progress() == {
        "device-0": {"presence": "ready", "state": "working", "phase": "training", "epochs": 1},
        "device-1": {"presence": "ready", "state": "assigned", "phase": "", "epochs": 1},
    }


# Closing


@pytest.mark.parametrize("rule", ["all", "quorum"])
def test_a_verdict_is_what_its_description_says(rule: str) -> None:
    counts = range(4)
    for accepted, refused, idle, waiting in itertools.product(counts, repeat=4):
        total = accepted + refused + idle + waiting
        for quorum, elapsed in itertools.product(range(1, total + 1), (0.0, 4.999, 5.0, 6.0)):
            closing = Closing(rule=rule, quorum=quorum, deadline_s=5.0)  # type: ignore[arg-type]
            verdict = judge(closing, Standing(accepted, refused, idle, waiting), elapsed_s=elapsed)
            answered = waiting == 0  # nobody is left who could still answer
            if rule == "all":
                if idle > 0 or (answered and accepted == 0):
                    expected = Verdict.IMPOSSIBLE
                else:
                    expected = Verdict.CLOSE if answered else Verdict.WAIT
            elif accepted + waiting < quorum:
                expected = Verdict.IMPOSSIBLE
            elif answered or (elapsed >= 5.0 and accepted >= quorum):
                expected = Verdict.CLOSE
            else:
                expected = Verdict.WAIT
            assert verdict is expected, (rule, accepted, refused, idle, waiting, quorum, elapsed)


def test_all_needs_no_quorum_and_no_deadline() -> None:
    assert judge(ALL, Standing(3, 0, 0, 0), elapsed_s=0.0) is Verdict.CLOSE
    assert judge(ALL, Standing(2, 1, 0, 0), elapsed_s=0.0) is Verdict.CLOSE
    assert judge(ALL, Standing(2, 0, 0, 1), elapsed_s=1e9) is Verdict.WAIT
    assert judge(ALL, Standing(2, 0, 1, 0), elapsed_s=0.0) is Verdict.IMPOSSIBLE


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_a_quorum_waits_for_its_deadline_and_no_longer(slow: int) -> None:
    lab = lab_of(5)
    for name in names_of(5)[:slow]:
        lab.children[name].train_s = 100.0
    lab.open(closing=Closing(rule="quorum", quorum=2, deadline_s=10.0))
    begun = lab.now
    closed = settled(lab.play())
    assert closed.missing == tuple(names_of(slow)) and len(closed.results) == 5 - slow
    assert lab.now - begun == 10.0
    lab.open(round_=1, closing=ALL)  # the slow ones leave the old round for the new one
    for child in lab.children.values():
        child.train_s = 3.0
    assert not settled(lab.play()).missing and lab.coordinator.late == 0
    lab.check()


def test_a_quorum_that_comes_after_the_deadline_closes_at_once() -> None:
    lab = lab_of(3)
    for name, train_s in zip(names_of(3), (20.0, 30.0, 90.0), strict=True):
        lab.children[name].train_s = train_s
    lab.open(closing=Closing(rule="quorum", quorum=2, deadline_s=5.0))
    begun = lab.now
    assert settled(lab.play()).missing == ("device-2",)
    assert 30.0 < lab.now - begun < 32.0


def test_a_quorum_closes_early_when_all_are_here() -> None:
    lab = lab_of(3)
    lab.open(closing=Closing(rule="quorum", quorum=2, deadline_s=300.0))
    assert len(settled(lab.play(until_s=10.0)).results) == 3


def test_a_quorum_outlives_the_dead() -> None:
    lab = lab_of(4, idle_s=20.0)
    lab.after(1.0, lambda: lab.kill("device-0", will_after_s=0.1))
    lab.children["device-3"].train_s = 60.0
    lab.open(closing=Closing(rule="quorum", quorum=3, deadline_s=5.0))
    assert settled(lab.play()).missing == ("device-0",)


def test_a_quorum_that_can_never_be_filled_stalls() -> None:
    lab = lab_of(3, idle_s=20.0)
    for name in names_of(2):
        lab.after(1.0, lambda name=name: lab.kill(name, will_after_s=0.1))  # type: ignore[misc]
    lab.open(closing=Closing(rule="quorum", quorum=2, deadline_s=500.0))
    stalled = lab.play()
    assert isinstance(stalled, Stalled) and "device-0 made no" in stalled.reason and "device-1 made" in stalled.reason


# Time


MARKS = st.one_of(st.none(), st.integers(0, 1000).map(lambda n: n / 64))


@given(
    opened=st.integers(0, 1000).map(lambda n: n / 64), marks=st.tuples(MARKS, MARKS, MARKS), took=st.integers(0, 900)
)
def test_the_phases_of_a_round_add_up(opened: float, marks: tuple[float | None, ...], took: int) -> None:
    closed = opened + took / 64
    inside = [None if mark is None else min(opened + mark, closed) for mark in marks]
    phases = Timeline(opened, *inside, closed).phases()
    assert list(phases) == ["dispatch", "train", "wait", "collect"]
    assert sum(phases.values()) == closed - opened and min(phases.values()) >= 0


def test_an_open_round_has_phases_too() -> None:
    assert sum(Timeline(5.0).phases().values()) == 0.0
    assert Timeline(5.0, 7.0).phases() == {"dispatch": 2.0, "train": 0.0, "wait": 0.0, "collect": 0.0}


@pytest.mark.parametrize("start", [0.0, 100.0])
def test_the_phases_are_the_moments_seen(start: float) -> None:
    desk = Desk(2)
    desk.key = desk.open(round_=5, now=start)
    desk.say("device-0", progress_of(desk.key, Phase.FETCHING), start)
    desk.say("device-0", progress_of(desk.key), start + 1.0)
    desk.say("device-1", progress_of(desk.key), start + 2.0)  # all have the model
    desk.say("device-0", result_of(desk.key), start + 5.0)
    desk.say("device-1", result_of(desk.key), start + 9.0)
    desk.coordinator.accept("device-1", desk.key, now=start + 10.0)
    desk.coordinator.accept("device-0", desk.key, now=start + 17.0)
    assert desk.coordinator.timeline.phases() == {"dispatch": 2.0, "train": 3.0, "wait": 4.0, "collect": 8.0}


def test_a_result_without_a_word_before_it_had_its_model() -> None:
    desk = Desk(1)
    desk.say("device-0", result_of(desk.key), 4.0)
    assert desk.coordinator.timeline.dispatched == 4.0


def test_a_result_at_the_very_start_of_the_clock_is_the_first() -> None:
    desk = Desk(2)
    desk.say("device-0", result_of(desk.key), 0.0)
    desk.say("device-1", result_of(desk.key), 4.0)
    assert desk.coordinator.timeline.first_result == 0.0


# The child by hand


def task_of(key: Key, *, model: int = 1, epochs: int = 1) -> Task:
    return Task(key, epochs, manifest_of(model), None)


COUNTED = Traffic(1), Traffic(2)


def offer_of(key: Key) -> Result:
    """Return a pupil's answer as it is offered, with the bytes that its link and those below have carried."""
    return replace(result_of(key), traffic=COUNTED[0], below=COUNTED[1])


class Pupil:
    """A participant in the hand of a test."""

    def __init__(self) -> None:
        self.participant = Participant()

    def hear(self, message: Task | Acknowledgement, now: float = 0.0, *, session: str = "p") -> list[object]:
        self.participant.receive(session, message, now=now)
        return list(iter(self.participant.next_event, None))

    def say(self, now: float) -> list[Progress | Result]:
        return self.participant.to_send(now, *COUNTED)

    def work(self, key: Key, now: float = 0.0, **what: int) -> None:
        task = task_of(key, **what)
        assert self.hear(task, now) == [Begin(task)]
        self.participant.begin_work(Phase.TRAINING, now=now)
        self.participant.finish(result_of(key), now=now)


def test_a_wish_is_begun_once() -> None:
    pupil = Pupil()
    assert pupil.hear(task_of(OLD)) == [Begin(task_of(OLD))]
    assert pupil.hear(replace(task_of(OLD), inline=b"x")) == []
    pupil.participant.begin_work(Phase.WAITING, now=1.0)
    assert pupil.hear(task_of(OLD), 2.0) == [] and pupil.participant.state is ParticipantState.WORKING
    (progress,) = pupil.say(2.0)  # but it is answered
    assert progress == Progress(OLD, Phase.WAITING, 0, 0, Traffic(1), Traffic(2))


def test_an_answer_is_offered_until_its_receipt() -> None:
    pupil = Pupil()
    pupil.work(OLD)
    times = []
    while (due := pupil.participant.next_deadline()) is not None and due < 30:
        assert pupil.say(due) == [offer_of(OLD)]
        times.append(due)
    assert times == [0.0, 1.0, 3.0, 7.0, 12.0, 17.0, 22.0, 27.0]
    assert pupil.hear(Acknowledgement(Key(0, 0, 1), "")) == []
    assert pupil.hear(Acknowledgement(OLD, "holds NaN")) == [Answered(OLD, "holds NaN")]
    assert pupil.hear(Acknowledgement(OLD, "holds NaN")) == [] and pupil.participant.next_deadline() is None
    assert pupil.say(100.0) == []


def test_a_small_answer_travels_with_the_first_offer_only() -> None:
    pupil = Pupil()
    pupil.hear(task_of(OLD))
    pupil.participant.finish(replace(result_of(OLD), inline=b"x"), now=0.0)
    inlines = [message.inline for now in (0.0, 1.0, 3.0) for message in pupil.say(now) if isinstance(message, Result)]
    assert inlines == [b"x", None, None]


def test_a_wish_that_was_answered_has_the_same_answer() -> None:
    pupil = Pupil()
    pupil.work(OLD)
    pupil.hear(Acknowledgement(OLD, ""))
    again = replace(task_of(OLD), key=Key(1, 0, 0))
    for session, wish in (("p", task_of(OLD)), ("p", again), ("new parent", task_of(OLD))):
        assert pupil.hear(wish, 5.0, session=session) == []
        assert pupil.say(5.0) == [offer_of(wish.key)]
        pupil.hear(Acknowledgement(wish.key, ""), session=session)


@pytest.mark.parametrize("change", [{"epochs": 2}, {"model": 2}])
def test_another_model_or_number_of_epochs_is_another_wish(change: dict[str, int]) -> None:
    pupil = Pupil()
    pupil.work(OLD)
    task = task_of(Key(1, 0, 0), **change)
    assert pupil.hear(task) == [Begin(task)] and pupil.participant.state is ParticipantState.FETCHING


def test_a_wish_of_an_earlier_round_is_ignored() -> None:
    pupil = Pupil()
    task = task_of(Key(0, 5, 1))
    pupil.hear(task)
    for key in (Key(0, 5, 0), Key(0, 4, 9)):
        assert pupil.hear(task_of(key)) == []
    later = task_of(Key(1, 4, 0))
    assert pupil.hear(later) == [Begin(later)]


def test_a_parent_that_restarted_may_go_back() -> None:
    for first in (None, Acknowledgement(Key(0, 5, 0), "the round has closed")):  # whatever its first word is
        pupil = Pupil()
        pupil.work(Key(0, 5, 0))
        if first is not None:
            pupil.hear(first, session="new")
        task = task_of(Key(0, 4, 0), model=4)
        assert pupil.hear(task, session="new") == [Begin(task)]
        assert pupil.hear(task_of(Key(0, 5, 0))) == []  # the old parent's last words
        assert pupil.hear(Acknowledgement(Key(0, 4, 0), "")) == []


def test_the_answer_to_a_superseded_wish_is_dropped() -> None:
    """It may be ready in the moment in which the next wish arrives: it must not pass for the next one's answer."""
    pupil = Pupil()
    pupil.hear(task_of(Key(0, 0, 0)))
    pupil.participant.begin_work(Phase.TRAINING, now=1.0)
    pupil.hear(task_of(Key(0, 0, 1), model=2), 2.0)
    pupil.participant.finish(result_of(Key(0, 0, 0)), now=2.0)
    assert pupil.participant.state is ParticipantState.FETCHING
    assert not any(isinstance(message, Result) for message in pupil.say(2.0))
    pupil.participant.finish(result_of(Key(0, 0, 1)), now=3.0)
    assert pupil.participant.state is ParticipantState.OFFERING


def test_an_answer_whose_wish_got_a_new_key_carries_it() -> None:
    pupil = Pupil()
    pupil.hear(task_of(OLD))
    pupil.participant.begin_work(Phase.TRAINING, now=1.0)
    assert pupil.hear(task_of(Key(3, 0, 0)), 2.0, session="new") == []
    pupil.participant.finish(result_of(OLD), now=3.0)
    assert pupil.say(3.0) == [offer_of(Key(3, 0, 0))]


def test_a_wish_that_was_abandoned_can_be_begun_again() -> None:
    pupil = Pupil()
    pupil.hear(task_of(OLD))
    pupil.participant.abandon()
    assert pupil.say(10.0) == [] and pupil.participant.next_deadline() is None
    pupil.participant.finish(result_of(OLD), now=10.0)
    assert pupil.participant.state is ParticipantState.IDLE
    assert pupil.hear(task_of(OLD), 11.0) == [Begin(task_of(OLD))]


def test_progress_is_said_in_measure() -> None:
    pupil = Pupil()
    pupil.hear(task_of(OLD))
    pupil.say(0.0)
    pupil.participant.begin_work(Phase.TRAINING, now=0.0)
    said = []
    for number in range(1, 1001):  # a step each 10 ms
        now = number / 100
        pupil.participant.progress(Phase.TRAINING, number, 1000, now=now)
        said += [now for _ in pupil.say(now)]
    assert 18 <= len(said) <= 22
    quiet = [now / 10 for now in range(101, 301) if pupil.say(now / 10)]
    assert len(quiet) == 10  # a heartbeat each two seconds


def test_words_after_the_answer_do_not_repeat_the_offer() -> None:
    pupil = Pupil()
    pupil.work(OLD)
    assert len(pupil.say(0.0)) == 1
    pupil.participant.progress(Phase.TRAINING, 7, 9, now=0.1)  # a step that a thread reported late
    assert pupil.say(0.1) == [] and pupil.participant.next_deadline() == 1.0


def test_a_new_connection_hears_how_it_goes() -> None:
    pupil = Pupil()
    pupil.hear(task_of(OLD))
    pupil.say(0.2)
    assert pupil.say(0.5) == []
    pupil.participant.reconnected(0.6)
    assert len(pupil.say(0.6)) == 1
