"""What a parent does for a message does not grow with its children, so joining and rounds take time in proportion."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.experiment.reading import announced, parse
from common.protocol.attendance import Attendance, Lacking
from common.protocol.coordinator import Coordinator
from common.protocol.messages import NodeState, Presence
from common.protocol.parent_session import ParentSession
from common.protocol.targets import Targets
from deploy.simulation.lab import SimulatedLab
from deploy.simulation.subscriptions import TopicTree, matches


def test_messages_cost_no_look_at_all_children(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: Counter[str] = Counter()

    def count(owner: type, name: str) -> None:
        function = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            looks[name] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, counted)

    for owner, names in LOOKS.items():
        for name in names:
            count(owner, name)
    experiment = parse({"rounds": 1, "topology": {"institutions": 0, "devices": 60}, "links": {"check": "off"}})
    assert SimulatedLab(experiment, model_bytes=400, spool=False).run().ok
    assert 0 < max(looks.values()) < 20, looks


LOOKS = {Coordinator: ("_judge", "_earliest", "_taking_part"), ParentSession: ("readiness", "ask_quiet")}


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
def test_a_tree_of_topics_finds_what_matches(topics: list[str], removed: set[int], topic_filter: str) -> None:
    tree = TopicTree(topics)
    for topic in topics:
        if topics.index(topic) in removed:
            tree.remove(topic)
    left = [topic for place, topic in enumerate(topics) if place not in removed]
    if not topic_filter.startswith("#/"):
        assert tree.matching(topic_filter) == [topic for topic in left if matches(topic_filter, topic)]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_lacking_children_are_those_that_lack(changes: list[tuple[int, bool]]) -> None:
    lacks = dict.fromkeys(range(4), True)
    found = Lacking(range(4))
    for child, value in changes:
        if value and not lacks[child]:
            found.add(child)
        lacks[child] = value
        assert found.any(lacks.__getitem__) == any(lacks.values())


def test_a_child_is_ready_and_owes_a_farewell_by_its_presence() -> None:
    attendance = Attendance()
    ready, lost = Presence(NodeState.READY, "device"), Presence(NodeState.LOST, "device")
    attendance.note("a", ready, counted=False, farewell=False)
    assert (attendance.ready, attendance.owing) == (set(), {"a"})
    attendance.note("a", ready, counted=True, farewell=True)
    assert (attendance.ready, attendance.owing) == ({"a"}, set())
    attendance.note("a", lost, counted=True, farewell=False)
    assert (attendance.ready, attendance.owing) == (set(), set())


def test_targets_that_did_not_change_are_not_compared() -> None:
    targets = Targets({"institution-0": ()})
    ready = Presence(NodeState.READY, "institution")
    targets.receive("institution-0", ready, now=1.0)
    assert targets.due == float("inf")  # without an address there is nothing to report
    targets.receive("institution-0", Presence(NodeState.READY, "institution", metrics="h:1"), now=1.0)
    targets.receive("institution-0", ready, now=1.5)
    assert targets.changed(2.0) is None and targets.due == float("inf")  # as before
