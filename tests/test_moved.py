"""A device that has moved is neither lost nor in two places: in the metrics, the events, the status
and the view.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from prometheus_client import generate_latest

from fedstrata.common.experiment.reading import parse
from fedstrata.common.metrics import STATES, Metrics, NodeLabels
from fedstrata.common.protocol.messages import ChildStatus, NodeState, Status, Step
from fedstrata.common.runtime.exports import export_parent
from fedstrata.common.runtime.parent_endpoint import ParentEndpoint
from fedstrata.deploy.watching.lab_state import WatchedLab
from tests.simulation.lab import ScenarioLab
from tests.simulation.monitor import endpoints
from tests.test_changing_labs import moving

RUN: Final = "run-1"
AWAY: Final = [{"at_s": 5, "parent": "institution-0"}]


def test_a_move_is_a_state_of_its_own() -> None:
    """After the move its old parent expects nothing of it; the new one has it, and lists it alone."""
    found: dict[str, Any] = {}

    def observe(lab: ScenarioLab) -> None:
        for node in ("institution-0", "institution-1"):
            (parent,) = (
                each for each in endpoints(lab, node, last=True) if isinstance(each, ParentEndpoint)
            )
            session = parent.session
            found[node] = {
                "states": session.coordinator.states(),
                "expected": session.coordinator.expected(),
                "listed": {child.name for child in session.status(lab.now()).children},
                "missing": session.readiness(lab.now()).missing,
            }
            metrics = Metrics()
            export_parent(
                metrics, parent, NodeLabels("institution", node, parent="cloud"), tier="lan"
            )
            found[node]["text"] = generate_latest(metrics._registry).decode()

    async def look(lab: ScenarioLab) -> None:
        await asyncio.sleep(9.0)
        observe(lab)

    outcome = ScenarioLab(parse(moving(AWAY)), seed=1, model_bytes=10_000, scenario=look).run()
    assert outcome.ok, outcome.result
    assert found["institution-1"]["states"]["device-4"] == "moved" and "moved" in STATES
    assert (
        "device-4" not in found["institution-1"]["listed"]
        and "device-4" in found["institution-0"]["listed"]
    )
    assert found["institution-1"]["missing"] == {"device-4": "moved to institution-0"}
    assert found["institution-0"]["states"]["device-4"] == "ready"
    up = [
        line
        for line in found["institution-1"]["text"].splitlines()
        if line.startswith("fedstrata_child_up{")
    ]
    assert (
        len(up) == 2
        and not any("device-4" in line for line in up)
        and all(line.endswith(" 1.0") for line in up)
    )


def entry(name: str, state: NodeState = NodeState.READY) -> ChildStatus:
    return ChildStatus(name, state, Step.IDLE, 0, 0, 0, 0, 0, 0, None, 0.0, "")


def record(at_s: float, *names: str) -> Status:
    return Status(at_s, None, True, False, (), tuple(map(entry, names)), (), None)


def watched() -> WatchedLab:
    lab = WatchedLab(RUN, parse(moving(AWAY)), brokers=["broker"], now=0.0)
    lab.take("institution-1", record(1.0, "device-3", "device-4", "device-5"), 1.0)
    return lab


def homes(lab: WatchedLab, device: str) -> list[str]:
    return [node.name for node in lab.nodes.values() if device in node.children]


def test_a_device_that_moves_stands_once_in_the_view_where_a_record_has_it() -> None:
    lab = watched()
    lab.take("institution-0", record(2.0, "device-0", "device-4"), 2.0)
    assert homes(lab, "device-4") == ["institution-0"]
    lab.take("institution-1", record(3.0, "device-3", "device-5"), 3.0)
    assert homes(lab, "device-4") == ["institution-0"]
    lab.take("institution-1", record(4.0, "device-3", "device-4", "device-5"), 4.0)
    assert homes(lab, "device-4") == ["institution-1"]


def test_a_record_moves_no_node_where_it_cannot_be() -> None:
    lab = watched()
    lab.take("cloud", record(2.0, "institution-0", "institution-1", "device-4"), 2.0)
    assert homes(lab, "device-4") == ["institution-1"]


def test_visitors_take_turns_in_the_view() -> None:
    """Institution-0 has three children and two places; a visitor that left makes room for the next
    one.
    """
    lab = watched()
    for number in range(10, 20):
        lab.take(
            "institution-0", record(float(number), "device-0", f"device-{number}"), float(number)
        )
        assert f"device-{number}" in lab.nodes["institution-0"].children
    assert len(lab.nodes["institution-0"].children) == 4
    assert len(lab.nodes) == 1 + 2 + 6 + 1
    lab.take("institution-0", record(30.0, *(f"device-{number}" for number in range(20, 30))), 30.0)
    assert len(lab.nodes["institution-0"].children) == 5, "three of its own, and two places"
