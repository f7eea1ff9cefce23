"""The status record of a parent: what is in it, how large it is, and when it is published."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.accounting.counters import Account, packet_bytes
from fedstrata.common.accounting.ledger import Ledger
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.admission import Refusal
from fedstrata.common.protocol.limits import STATUS_BYTES
from fedstrata.common.protocol.messages import (
    About,
    Goodbye,
    Key,
    NodeState,
    Phase,
    Presence,
    Question,
    RoundScore,
    RunStatus,
    Status,
    Step,
)
from fedstrata.common.protocol.outbox import OTHERS, Publish, Subscribe
from fedstrata.common.protocol.parent_session import ParentSession
from fedstrata.common.protocol.presence import Identity
from fedstrata.common.protocol.round_state import ChildInRound, ChildState
from fedstrata.common.protocol.status import (
    NAMED_MOST,
    PUBLISH_S,
    ROUNDS_KEPT,
    TEXT_MOST,
    WATCHED_S,
    RunProgress,
    status_of,
    step_of,
)
from tests.helpers.session_lab import LAB, RUN, parent_session


def made(children: dict[str, ChildInRound], **facts: Any) -> Status:
    ledger = Ledger(children, Account())
    usual: dict[str, Any] = {
        "now": 1.0,
        "key": Key(0, 3, 1),
        "is_open": True,
        "measuring": False,
        "run": None,
    }
    return status_of(children, ledger, **usual | {"waits_for": {}, "uploads": {}} | facts)


def at_work(done: int) -> ChildInRound:
    mark = Phase.TRAINING, done
    return ChildInRound(
        presence=NodeState.READY, state=ChildState.WORKING, mark=mark, total=100, loss=0.5
    )


@pytest.mark.parametrize(
    ("state", "mark", "step"),
    [
        (ChildState.IDLE, None, Step.IDLE),
        (ChildState.ASSIGNED, (Phase.TRAINING, 3), Step.ASSIGNED),  # of its earlier process
        (ChildState.WORKING, None, Step.ASSIGNED),
        (ChildState.WORKING, (Phase.FETCHING, 3), Step.FETCHING),
        (ChildState.WORKING, (Phase.WAITING, 0), Step.WAITING),
        (ChildState.WORKING, (Phase.TRAINING, 3), Step.TRAINING),
        (ChildState.WORKING, (Phase.ANNOUNCING, 0), Step.OFFERING),
        (ChildState.ANNOUNCED, (Phase.ANNOUNCING, 0), Step.OFFERING),
        (ChildState.ACCEPTED, (Phase.ANNOUNCING, 0), Step.DONE),
        (ChildState.REFUSED, (Phase.ANNOUNCING, 0), Step.REFUSED),
    ],
)
def test_a_step_is_that_of_the_coordinator(
    state: ChildState, mark: tuple[Phase, int] | None, step: Step
) -> None:
    assert step_of(ChildInRound(state=state, mark=mark)) is step


def test_a_child_is_named_with_its_progress_and_why_it_waits() -> None:
    children = {
        "training": at_work(25),
        "uploading": ChildInRound(presence=NodeState.READY, state=ChildState.ANNOUNCED),
        "preparing": ChildInRound(presence=NodeState.INIT),
        "lost": ChildInRound(
            presence=NodeState.LOST, reason="connection lost", state=ChildState.ASSIGNED
        ),
        "refused": ChildInRound(
            presence=NodeState.READY, state=ChildState.REFUSED, refusal="x" * 1000
        ),
        "ready": ChildInRound(presence=NodeState.READY),
    }
    texts = {"preparing": "device-1 has not joined yet", "ready": "of before"}
    status = made(children, waits_for=texts, uploads={"uploading": (3, 12)})
    found = {each.name: each for each in status.children}
    assert [*found] == [*children] and not status.others
    assert {name: (each.done, each.total) for name, each in found.items() if each.total} == {
        "training": (25, 100), "uploading": (3, 12),
    }  # fmt: skip
    assert {name: each.text for name, each in found.items() if each.text} == {
        "preparing": "device-1 has not joined yet",
        "lost": "connection lost",
        "refused": "x" * TEXT_MOST,
    }


@given(st.integers(NAMED_MOST, 1000), st.integers(0, 3), st.integers(0, 3))
def test_of_many_children_the_missing_and_the_slowest_are_named(
    count: int, lost: int, done: int
) -> None:
    children = {f"device-{place}": at_work(place % 97) for place in range(count)}
    for place in range(lost):
        children[f"device-{place + 10}"].presence = NodeState.LOST
    for place in range(done):
        children[f"device-{place + 20}"].state = ChildState.ACCEPTED
    status = made(children)
    named = {each.name for each in status.children}
    assert len(named) == NAMED_MOST and {f"device-{place + 10}" for place in range(lost)} <= named
    counted = Counter({each.step: each.count for each in status.others})
    assert sum(counted.values()) == count - NAMED_MOST
    if count >= NAMED_MOST + done:
        assert counted[Step.DONE] == done
        slowest = max(each.done for each in status.children if each.state is NodeState.READY)
        rest = [
            child.mark[1]
            for name, child in children.items()
            if name not in named and child.mark is not None
        ]
        assert all(each >= slowest for each in rest if each not in range(20, 24))


def test_a_record_of_any_lab_is_within_its_bound() -> None:
    children = {
        f"{place:0>64}": ChildInRound(
            presence=NodeState.DISCONNECTED,
            state=ChildState.REFUSED,
            refusal="\N{GRINNING FACE}" * 1000,
            mark=(Phase.TRAINING, 2**62),
            total=2**62,
            loss=1e300,
            worked_s=1e300,
        )
        for place in range(1000)
    }
    scores = tuple(RoundScore(2**62, 0.1, 0.1, 0.1) for _ in range(ROUNDS_KEPT))
    status = made(children, run=RunStatus(2**62, 1.0, 1.0, (), scores))
    body = serialization.encode(status, "s" * 32)
    assert len(body) <= STATUS_BYTES and serialization.decode(body)[1] == status


def test_a_runs_progress_is_that_of_the_clouds_events() -> None:
    progress = RunProgress()
    progress.take("run", {"done": 3})
    progress.take("begun", {"elapsed_s": 30.0})
    for closed in range(4, 44):
        facts = {
            "global_round": closed,
            "elapsed_s": 30.0 + 5 * (closed - 3),
            "train_loss": 0.5,
            "train_s": 4.0,
        }
        progress.take("global_round", facts)
        if closed % 2:
            progress.take(
                "evaluated", {"global_round": closed, "score": closed / 100, "loss": math.inf}
            )
    status = progress.status
    assert (status.closed, status.elapsed_s, status.round_s) == (43, 230.0, 5.0)
    assert [(each.name, each.seconds) for each in status.phases] == [("train", 4.0)]
    assert [each.global_round for each in status.scores] == [*range(44 - ROUNDS_KEPT, 44)]
    *_, before, last = status.scores
    assert last == RoundScore(43, 0.5, 0.43, None) and before.score is None


# When it is published


def parent_of(*children: str) -> ParentSession:
    session = parent_session(children, identity=Identity(RUN, "cloud", "cloud", "s"))
    session.connected(0.0)
    return session


def records(session: ParentSession, now: float) -> list[Status]:
    session.tick(now)
    topic = topics.status(LAB, RUN, "cloud")
    out = [o for o in session.to_send(now) if isinstance(o, Publish) and o.topic == topic]
    assert not any(each.retain for each in out)
    found = [serialization.decode(each.body)[1] for each in out]
    return [each for each in found if isinstance(each, Status)]


def ask(session: ParentSession, now: float, *, run: str = RUN, retained: bool = False) -> None:
    body = serialization.encode(Question("nonce", About.STATUS, run), "watcher")
    session.link.receive(topics.ask(LAB, "cloud", "operator"), body, retained=retained, now=now)


def test_nothing_is_published_when_nobody_asks() -> None:
    session = parent_of("device-0", "device-1")
    (subscribe,) = [each for each in session.to_send(0.0) if isinstance(each, Subscribe)]
    assert topics.ask(LAB, "cloud", "+") in subscribe.topics
    ask(session, 1.0, run="another-1")
    ask(session, 1.0, retained=True)
    assert not any(records(session, second / 4) for second in range(200))


def test_records_are_published_every_second_until_nobody_asks_any_more() -> None:
    session = parent_of("device-0", "device-1")
    ask(session, 1.0)
    times = [now for tick in range(10, 400) if records(session, now := tick / 10)]
    assert times == pytest.approx([1.0 + each * PUBLISH_S for each in range(int(WATCHED_S))])
    assert session.link.publishing.next_deadline() == math.inf
    ask(session, 50.0)
    assert records(session, 50.0) and not records(session, 50.9)
    for _ in range(1000):  # a flood of requests is answered by no more records
        ask(session, 50.9)
    assert not records(session, 50.9) and records(session, 51.0)


def test_the_last_record_of_a_run_is_published_at_once() -> None:
    session = parent_of("device-0")
    ask(session, 1.0)
    assert records(session, 1.0) and not records(session, 1.1)
    session.set_state(NodeState.FINISHED)
    assert records(session, 1.1) and not records(session, 1.2)


def test_records_of_many_children_come_more_rarely() -> None:
    session = parent_of(*(f"device-{place}" for place in range(1000)))
    for name in session.link.peers:
        session.coordinator.presence(name, "s", Presence(NodeState.READY, "device"), now=0.0)
    ask(session, 1.0)
    times = [now for tick in range(100) if records(session, now := 1.0 + tick / 10)]
    assert 1 <= len(times) <= WATCHED_S and all(
        later - now >= PUBLISH_S for now, later in pairwise(times)
    )


def test_requests_and_records_count_as_control_of_no_peer() -> None:
    session = parent_of("device-0")
    request = serialization.encode(Question("nonce", About.STATUS, RUN), "watcher")
    ask(session, 1.0)
    (status,) = records(session, 1.0)
    counters = session.link.counters
    topic = topics.status(LAB, RUN, "cloud")
    size = packet_bytes(topic, len(serialization.encode(status, "s")), qos=0)
    assert counters.cells[OTHERS, "sent", "control"].message == size
    assert counters.cells[OTHERS, "received", "control"].payload == len(request)
    assert (
        session.ledger.links()["device-0"].sent == 0 == session.ledger.links()["device-0"].received
    )
    assert session.status(1.0).tiers[0].up > 0  # of all that this node received


def test_a_request_that_is_none_is_refused() -> None:
    session = parent_of("device-0")
    for body in (b"", b"\xff" * 20, serialization.encode(Goodbye(), "s")):
        session.link.receive(topics.ask(LAB, "cloud", "operator"), body, retained=False, now=1.0)
    assert session.link.refusals.of(Refusal.MALFORMED) == 3 and not records(session, 1.0)
