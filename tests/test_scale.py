"""What a parent does for a message does not grow with its children, so joining and rounds take time
in proportion.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.client import topic_matches_sub

from fedstrata.common.accounting.counters import Account
from fedstrata.common.accounting.traffic import Traffic
from fedstrata.common.accounting.work import Work
from fedstrata.common.experiment.reading import announced, parse
from fedstrata.common.model.layout import shared_row
from fedstrata.common.protocol.attendance import REPORT_S, Attendance, Targets
from fedstrata.common.protocol.coordinator import Coordinator, Lacking
from fedstrata.common.protocol.events import TaskReceived, UploadAnnounced
from fedstrata.common.protocol.manifest import describe
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
from fedstrata.common.protocol.outbox import Outbox, Publish
from fedstrata.common.protocol.parent_session import ParentSession
from fedstrata.common.protocol.participant import Participant
from fedstrata.common.protocol.presence import Identity
from fedstrata.common.protocol.round_state import HEARTBEAT_S, Assignment, waiting_most_s
from fedstrata.common.protocol.sender import Sender
from fedstrata.common.protocol.serialization import decode
from fedstrata.common.settings.closing import Closing
from fedstrata.common.settings.links import LinkDirection, LinkSet
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.simulation.hardware import Durations
from fedstrata.deploy.simulation.simulated_broker import TopicTree
from fedstrata.deploy.simulation.simulated_lab import BROKER
from fedstrata.deploy.simulation.simulated_machines import MessageCosts, Placement
from tests.helpers.nodes import (
    child_of,
    drawn,
    layout_of,
    living,
    parent_of,
    play,
    serving,
    together,
)
from tests.helpers.sites import SimulatedSite, virtual
from tests.simulation.interference import kind_of
from tests.simulation.lab import ScenarioLab

READY = Presence(NodeState.READY, "device")


def described(model: bytes) -> Manifest:
    return describe(memoryview(model), chunk_bytes=1024, codec="fp32", layout="a")


def opened(
    parent: Coordinator,
    manifest: Manifest,
    number: int = 0,
    *,
    now: float = 0.0,
    inline: bytes | None = None,
) -> Key:
    """Open a round of the child a."""
    assignments = {"a": Assignment(manifest, 1, inline)}
    return parent.open(
        global_round=number, local_round=0, assignments=assignments, closing=Closing(), now=now
    )


def test_messages_cost_no_look_at_all_children(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: Counter[str] = Counter()

    def count(owner: type, name: str) -> None:
        function = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            looks[name] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, counted)

    for name in ("_judge", "_earliest", "_taking_part"):
        count(Coordinator, name)
    for name in ("readiness", "ask_quiet"):
        count(ParentSession, name)
    experiment = parse(
        {"rounds": 1, "topology": {"institutions": 0, "devices": 60}, "links": {"check": "off"}}
    )
    assert ScenarioLab(experiment, model_bytes=400, spool=False).run().ok
    assert 0 < max(looks.values()) < 20, looks


def test_nodes_of_one_process_share_their_experiment() -> None:
    text = parse({"name": "shared", "topology": {"devices": 5}}).to_json()
    one, other = announced(text), announced(text)
    assert one is other
    moved = one.with_data_root("/elsewhere")
    assert moved.data.root == "/elsewhere" and moved.tree is one.tree


@given(
    topics=st.lists(st.from_regex(r"[a$](/[ab]){0,3}", fullmatch=True), unique=True),
    removed=st.sets(st.integers(0, 20)),
    topic_filter=st.from_regex(r"([a+$]|#)(/[ab+]){0,3}(/#)?", fullmatch=True),
)
def test_a_tree_of_topics_finds_what_matches(
    topics: list[str], removed: set[int], topic_filter: str
) -> None:
    tree: TopicTree[str] = TopicTree()
    for topic in topics:
        tree.setdefault(topic, topic)
    left = [topic for place, topic in enumerate(topics) if place not in removed]
    for topic in set(topics) - set(left):
        tree.remove(topic)
    if not topic_filter.startswith("#/"):
        assert sorted(tree.covered(topic_filter)) == sorted(
            t for t in left if topic_matches_sub(topic_filter, t)
        )


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_lacking_children_are_those_that_lack(changes: list[tuple[int, bool]]) -> None:
    lacks = dict.fromkeys(range(4), True)
    found = Lacking(range(4))
    for child, value in changes:
        if value and not lacks[child]:
            found.add(child)
        lacks[child] = value
        assert found.any(lacks.__getitem__) == any(lacks.values())
    assert len(found._children) <= len(lacks)  # each is kept once


def test_a_child_is_ready_and_owes_a_farewell_by_its_presence() -> None:
    attendance = Attendance("a")
    ready, lost = Presence(NodeState.READY, "device"), Presence(NodeState.LOST, "device")
    attendance.receive("a", "1", replace(ready, state=NodeState.INIT), published=False)
    assert not attendance.complete and attendance.owes_farewells  # its samples are unknown
    attendance.farewell("a")
    attendance.receive("a", "1", replace(ready, samples=10), published=False)
    assert attendance.complete and not attendance.owes_farewells
    attendance.farewells.clear()
    attendance.receive("a", "1", lost, published=True)
    assert (
        not attendance.complete
        and not attendance.owes_farewells
        and attendance.samples == {"a": 10}
    )


def test_targets_that_did_not_change_are_not_compared() -> None:
    targets = Targets({"institution-0": ()})
    ready = Presence(NodeState.READY, "institution")
    targets.receive("institution-0", ready, now=1.0)
    assert targets.due == float("inf")  # without an address there is nothing to report
    targets.receive(
        "institution-0", Presence(NodeState.READY, "institution", metrics="h:1"), now=1.0
    )
    targets.receive("institution-0", ready, now=1.5)
    assert targets.changed(2.5) is None and targets.due == float("inf")  # as before


def test_targets_of_nodes_that_join_are_reported_when_they_have_joined() -> None:
    names = [f"device-{number}" for number in range(300)]
    targets, reports = Targets(dict.fromkeys(names, ())), 0
    for number, name in enumerate(names):  # ten a second
        now = 0.1 * number
        targets.receive(name, Presence(NodeState.INIT, "device", metrics="h:1"), now=now)
        reports += targets.changed(now) is not None
    assert reports == 2  # each goes to all devices
    assert targets.changed(now + REPORT_S) is not None and len(targets.addresses()) == 300


def test_a_child_that_waits_reports_less_and_less_often() -> None:
    """All devices of a host wait for one another, so a round of N devices has reports of N devices
    for N trainings.
    """
    participant = Participant(idle_s=120.0)
    manifest = described(bytes(8))
    participant.receive(Task(Key(0, 0, 0), 1, manifest, None), now=0.0)
    participant.begin_work(Phase.WAITING, now=0.0)
    sent, sooner, last = 0, 0, 0.0
    for tick in range(1200):
        now = 0.1 * tick
        # another device of this host has trained
        sooner += participant.progress(Phase.WAITING, tick, 0, now=now)
        if participant.to_send(now, Traffic(), ()):
            sent, last = sent + 1, now
    assert sent == 11 and not sooner  # at the model's arrival, and after 2, 4, 8 and 15 seconds
    assert participant.progress(Phase.TRAINING, 1, 2, now=last + 0.1)  # at once
    assert (
        waiting_most_s(120.0) == 15.0
        and waiting_most_s(40.0) == 5.0
        and waiting_most_s(4.0) == HEARTBEAT_S
    )


def test_a_waiting_child_does_not_get_its_task_again_meanwhile() -> None:
    parent = Coordinator(["a"], idle_s=120.0)
    manifest = described(bytes(8))
    parent.presence("a", "s", READY, now=0.0)
    key = opened(parent, manifest)
    assert len(parent.to_send(0.0)) == 1
    parent.receive("a", Progress(key, Phase.WAITING, 0, 0, Traffic(), ()), now=0.5)
    assert parent.to_send(0.5 + waiting_most_s(120.0)) == [] and len(parent.to_send(25.0)) == 1


def test_messages_are_repeated_less_often_to_a_busy_peer() -> None:
    """A host with a thousand devices answers late: repeats at a fixed rate would make it later."""
    manifest = described(bytes(8))
    parent, child = Coordinator(["a"], idle_s=120.0), Participant(idle_s=120.0)
    parent.presence("a", "s", READY, now=0.0)
    for number, (answer_s, task_s, result_s) in enumerate(
        [(2.0, 1.0, 1.0), (0.1, 4.0, 4.0), (0.1, 1.0, 1.0)]
    ):
        begun = 100.0 * number
        opened(parent, manifest, number, now=begun)
        ((_, task),) = parent.to_send(begun)
        assert isinstance(task, Task) and parent.next_deadline() == begun + task_s
        child.receive(task, now=begun)
        child.finish(
            Result(task.key, manifest, None, Work(1, 0.5, 1, 1, 0.1, 0.0, 0.0), 1, (), ""),
            now=begun,
        )
        (result,) = child.to_send(begun, Traffic(), ())
        child.receive(task, now=begun + 0.1)  # its repeat has crossed the result
        assert isinstance(result, Result) and child.next_deadline() == begun + result_s
        parent.receive("a", result, now=begun + answer_s)
        parent.accept("a", task.key, now=begun + answer_s)
        assert parent.to_send(begun + answer_s) == [("a", Acknowledgement(task.key, ""))]
        child.receive(Acknowledgement(task.key, ""), now=begun + answer_s)


def test_a_busy_host_gets_each_message_of_a_round_once() -> None:
    experiment = parse(
        {"rounds": 3, "topology": {"institutions": 1, "devices": 10}, "links": {"check": "off"}}
    )
    sent, lab_round = Counter[tuple[int, str]](), itertools.count(1)
    now = [0]

    def observe(event: str, facts: dict[str, object]) -> None:
        if event in ("begun", "global_round"):
            now[0] = next(lab_round)

    async def count(lab: ScenarioLab) -> None:
        lab.network.hooks.append(lambda message: sent.update([(now[0], kind_of(message))]))

    lab = ScenarioLab(
        experiment,
        model_bytes=400,
        spool=False,
        scenario=count,
        observe=observe,
        durations=Durations(boot_s=0.1, train_s=0.0, evaluate_s=0.0),
        placement=Placement(
            cores=2,
            hosts=dict.fromkeys((CLOUD, *experiment.tree.nodes), "host"),
            brokers={BROKER: "host"},
            costs=MessageCosts(agent_s=0.03, broker_s=0.0075),
            interface=None,
            work_s=immediately,
        ),
    )
    assert lab.run().ok
    assert sent[1, "Result"] + sent[2, "Result"] < 50  # 95 with repeats at a fixed rate
    nodes = 11  # ten devices and their institution
    assert [sent[3, kind] for kind in ("Task", "Result", "Acknowledgement")] == [nodes] * 3


def immediately(begin: Callable[[], None], host: str) -> float:
    begin()
    return 0.0


def test_equal_tasks_are_one_message_in_memory() -> None:
    """A parent sends all tasks of a round at once: with a copy of the model in each they fill its
    memory.
    """
    model = bytes(5000)
    manifest = described(model)
    ways = LinkSet(to=dict.fromkeys("abc", LinkDirection()), from_={}, shaped=False)
    outbox = Outbox(
        Identity("r-1", "p", "institution", "s"),
        sender=Sender(first_number=1),
        counters=Account(),
        ways=ways,
    )
    for name, epochs in (("a", 1), ("b", 1), ("c", 2)):
        outbox.send(name, Task(Key(0, 0, 0), epochs, manifest, model), 0.0)
    one, other, third = (
        output.body for output in outbox.to_send(0.0) if isinstance(output, Publish)
    )
    assert one is other and third != one
    assert [decode(body)[1] for body in (one, third)] == [
        Task(Key(0, 0, 0), e, manifest, model) for e in (1, 2)
    ]


def test_the_state_of_a_round_has_no_models() -> None:
    model = bytes(5000)
    manifest = described(model)
    parent, child = Coordinator(["a"], idle_s=120.0), Participant(idle_s=120.0)
    parent.presence("a", "s", READY, now=0.0)
    key = opened(parent, manifest, inline=model)
    ((_, task),) = parent.to_send(0.0)
    assert isinstance(task, Task) and task.inline is model
    child.receive(task, now=0.0)
    assert child.next_event() == TaskReceived(task)
    result = Result(key, manifest, model, Work(1, 0.5, 1, 1, 0.1, 0.0, 0.0), 1, (), "")
    parent.receive("a", result, now=1.0)
    assert parent.next_event() == UploadAnnounced("a", result)
    assert all(
        model not in gc.get_referents(each) for each in (child._task, parent.children["a"].result)
    )


@virtual
async def test_sent_messages_are_not_kept(site: SimulatedSite) -> None:
    """An idle endpoint sleeps with what it sent last: a model for each device."""
    layout = layout_of(4000)
    parent = parent_of(site, ["device-0"], layout=layout)
    async with together(living(site, parent), serving(site, child_of(site, "device-0"), layout, 0)):
        await play(parent, drawn(layout, seed=1))
        assert sum("pump" in task.get_name() for task in asyncio.all_tasks()) == 2
        assert not [
            each for each in gc.get_objects() if isinstance(each, Publish) and len(each.body) > 4000
        ]


def test_nodes_of_a_process_share_the_model_inside_their_tasks_as_it_is_read() -> None:
    model, begun = bytes(range(256)) * 20, []
    manifest = described(model)
    for _ in range(2):
        child, task = (
            Participant(idle_s=120.0),
            Task(Key(0, 0, 0), 1, manifest, bytes(bytearray(model))),
        )
        child.receive(task, now=0.0)
        event = child.next_event()
        assert (
            event == TaskReceived(task)
            and isinstance(event, TaskReceived)
            and event.row is not None
        )
        begun.append((event.row, event.task.inline))
    (row, inline), (other, others) = begun
    assert row is other and inline is others and row.tobytes() == model


def test_equal_models_of_a_process_share_their_memory() -> None:
    one, equal, other = bytes(range(100)), bytes(range(100)), bytes(100)
    assert one is not equal
    row = shared_row("id", one)
    assert shared_row("id", equal) is row and row.tobytes() == one and not row.flags.writeable
    different = shared_row("id", other)  # the id may be anybody's
    assert different.tobytes() == other and row.tobytes() == one
    gone = ref(different)
    del different
    assert gone() is None  # with the last node that uses it
