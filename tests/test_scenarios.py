"""What labs once died of, in virtual time: rows of faults with the seconds within which a lab is
over them, and scenarios of what no fault is.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Final

import pytest

from fedstrata.common.protocol.messages import NodeState, Presence
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.simulation.simulated_broker import Routed
from fedstrata.deploy.simulation.simulated_lab import BROKER
from tests.helpers.scenarios import (
    TREE,
    OtherAgents,
    completed,
    decoded,
    ended_with,
    lab,
    quorum,
    run_of,
    survived,
    undisturbed,
    warned,
)
from tests.helpers.session_messages import IDLE_S
from tests.simulation.fault_injection import inject_faults
from tests.simulation.faults import Fault, FaultKind
from tests.simulation.lab import Scenario, ScenarioLab
from tests.test_metrics import get

# Faults that end


ENDS_S: Final = 6.4  # shortly before the end of the last round
SURVIVED: Final[Mapping[str, Fault]] = {
    "a device is killed": Fault(FaultKind.KILL, 2.0, 0.5, "device-0"),
    "an institution is killed": Fault(FaultKind.KILL, 3.0, 0.5, "institution-0"),
    "a cloud is killed": Fault(FaultKind.KILL, 3.0, 0.5, CLOUD),
    "a device comes back with an empty disk and another clock": Fault(
        FaultKind.TERMINATE, 2.5, 0.0, "device-0", -3600.0, keep=False
    ),
    "a device is stopped for longer than its keep-alive": Fault(
        FaultKind.STOP, 2.5, 25.0, "device-0"
    ),
    "an institution is cut off": Fault(FaultKind.PARTITION, 2.5, 25.0, "institution-0"),
    "a worker dies": Fault(FaultKind.WORKER, 2.5, 0.0, "device-0", 1.0),
    **{
        f"a broker comes back {store}": Fault(
            FaultKind.BROKER, 1.5, 1.0, BROKER, detail=store, clean=store == "current"
        )
        for store in ("empty", "current", "old")
    },
    **{
        f"a broker is away for {away_s:.0f} s as the run ends": Fault(
            FaultKind.BROKER, ENDS_S, away_s, BROKER, detail="current"
        )
        for away_s in (1.0, 0.8 * IDLE_S)
    },
    **{
        f"presences of {node} are lost from {at_s:.0f} s": Fault(
            FaultKind.MUTE, at_s, 3.0, node, detail="Presence"
        )
        for node in (CLOUD, "institution-0", "device-0")
        for at_s in (0.0, ENDS_S)
    },
    "strangers use the names of peers": Fault(FaultKind.STRANGER, 2.0, 6.0, "institution-0", 30.0),
    "half of the messages are damaged": Fault(FaultKind.FLIP, 0.0, 6.0, "institution-0", 0.5),
    "a member asks for anything": Fault(FaultKind.FLOOD, 2.5, 0.5, "device-1"),
    "anybody looks for a run": Fault(FaultKind.SEEKERS, 2.5, 0.5, CLOUD),
}
LOGGED: Final = {
    FaultKind.STRANGER: "refused a message",
    FaultKind.FLIP: "refused a message .malformed. .*damaged message",
}


@pytest.mark.parametrize("name", SURVIVED)
def test_a_disturbed_lab_gives_the_same_model_soon(name: str) -> None:
    fault = SURVIVED[name]
    spare_s = 60.0 if fault.kind is FaultKind.FLIP else 10.0
    outcome = survived(
        lambda sim: inject_faults(sim, (fault,)),
        broker_each=fault.kind is FaultKind.MUTE,
        within_s=fault.for_s + spare_s,
    )
    assert outcome.faults
    if fault.kind in LOGGED:
        warned(outcome, LOGGED[fault.kind])


# A persistent broker that loses power


@pytest.mark.parametrize("first", ["cloud", "children"])
def test_a_dead_runs_retained_presence_captures_nobody(first: str) -> None:
    begun: list[float] = []

    async def power_loss(sim: ScenarioLab) -> None:
        await asyncio.sleep(3.0)  # in the first round
        sim.broker().kill()
        for node in sim.names:
            sim.kill(node)
        await asyncio.sleep(5.0)
        sim.broker().start("current")  # what it had kept: nobody was there to publish a will
        dead = run_of(sim)
        OtherAgents(sim).resume = False
        begun.append(sim.now())
        for node in sim.names[1:] if first == "children" else ():
            sim.start(node)
        await asyncio.sleep(20.0 if first == "children" else 0.0)
        sim.start(CLOUD, clock_offset_s=-3600.0)
        await asyncio.sleep(2.0 if first == "cloud" else 0.0)
        for node in sim.names[1:] if first == "cloud" else ():
            sim.start(node)
        await asyncio.sleep(5.0)
        assert run_of(sim) != dead

    outcome = survived(power_loss)
    assert outcome.virtual_s - begun[0] < 20.0 + undisturbed().virtual_s + 5.0


# Faults for good


@pytest.mark.parametrize("node", [CLOUD, "institution-0", "device-0"])
@pytest.mark.parametrize("loss", ["stop", "cut", "black hole"])
def test_a_node_that_is_lost_for_good_ends_all_others(loss: str, node: str) -> None:
    async def lose(sim: ScenarioLab) -> None:
        await asyncio.sleep(2.0)
        if loss == "stop":
            sim.stop(node)
        else:
            sim.link(node).change(**({"cut": True} if loss == "cut" else {"mtu_bytes": 1500}))

    outcome = lab(lose, grace_s=1.5 * IDLE_S)
    others = {CLOUD, "institution-0", "institution-1", *(f"device-{i}" for i in range(4))} - {node}
    assert all(ended_with(outcome, other) for other in others)
    assert outcome.virtual_s < 3 * IDLE_S


# A child that hangs while it prepares


async def hanging(sim: ScenarioLab) -> None:
    sim.hardware.hanging.add("device-0")


@pytest.mark.parametrize(("scenario", "state"), [(None, "finished"), (hanging, "failed")])
def test_the_last_metrics_have_the_state_of_the_run(scenario: Scenario | None, state: str) -> None:
    found = dict[str, str]()

    def at_end(sim: ScenarioLab) -> None:
        metrics = get(sim.agents.metrics, "/metrics")[1]
        found.update(re.findall(r'run_state{.*state="(\w+)"} (\S+)', metrics))

    lab(scenario, at_end=at_end)
    assert {name for name, value in found.items() if float(value)} == {state}, found


def test_a_child_that_hangs_while_it_prepares_ends_a_run_that_needs_it() -> None:
    outcome = lab(hanging)
    reason = (
        "NoProgress: the run cannot begin: institution-0: gave up: .*device-0: no progress "
        "in preparing for 60 s"
    )
    assert re.search(reason, ended_with(outcome, CLOUD))
    assert outcome.virtual_s < IDLE_S + 5.0


def test_a_child_that_hangs_while_it_prepares_costs_a_quorum_its_first_deadline() -> None:
    outcome = lab(
        hanging, tree={"institution": {"rounds": 2, "closing": quorum(1, deadline_s=20.0)}}
    )
    assert ended_with(outcome, CLOUD) == "", outcome
    warned(outcome, "institution-0 begins without: device-0 prepares")
    assert outcome.virtual_s < undisturbed().virtual_s + 20.0 + 15.0


# Children that are lost


def presences(sim: ScenarioLab, node: str) -> list[tuple[float, str, str]]:
    """Return a list that grows with the presences of a node that differ from the last: time, state
    and reason.
    """
    found: list[tuple[float, str, str]] = []

    def note(message: Routed) -> None:
        presence = decoded(message.body)[1] if message.topic.endswith(f"/{node}/state") else None
        if isinstance(presence, Presence) and (presence.state, presence.reason) != (
            found[-1][1:] if found else ()
        ):
            found.append((sim.now(), presence.state, presence.reason))

    sim.network.hooks.append(note)
    return found


@pytest.mark.parametrize("broker_each", [False, True], ids=["one broker", "a broker of its own"])
def test_an_institution_without_any_device_reports_it_until_some_come_back(
    broker_each: bool,
) -> None:
    async def losing(sim: ScenarioLab) -> None:
        found.append(presences(sim, "institution-0"))
        await asyncio.sleep(3.0)
        for away_s in (40.0, 2.0, 20.0):  # the second one is too short to be reported
            for device in ("device-0", "device-1"):
                sim.kill(device)
            await asyncio.sleep(away_s)
            for device in ("device-0", "device-1"):
                sim.start(device)
            await asyncio.sleep(2.0)

    found: list[list[tuple[float, str, str]]] = []
    outcome = survived(losing, broker_each=broker_each, within_s=62.0 + 3 * 5.0)
    reasons = [(at, reason) for at, state, reason in found[0] if state == NodeState.READY]
    assert [reason for _, reason in reasons][:5] == ["", *["no device is present", ""] * 2]
    for (at, _), begun in zip(reasons[1:5], (8.0, 43.0, 54.0, 69.0), strict=True):
        assert begun <= at < begun + 1.0
    warned(outcome, "institution-0: no device is present")


def test_an_institution_whose_devices_never_came_reports_it() -> None:
    async def late(sim: ScenarioLab) -> None:
        found.append(presences(sim, "institution-0"))
        await asyncio.sleep(200.0)
        for device in ("device-0", "device-1"):
            sim.start(device)

    found: list[list[tuple[float, str, str]]] = []
    names = ["cloud", "institution-0", "institution-1", "device-2", "device-3"]
    outcome = lab(late, autostart=names)
    assert outcome.ok, outcome
    reasons = [(state, reason) for _, state, reason in found[0]]
    assert (NodeState.INIT, "no device is present") in reasons and (NodeState.READY, "") in reasons
    warned(
        outcome,
        "cloud waits for its children: institution-0 waits for device-0 has not joined yet; "
        "device-1 has not joined yet",
    )


def test_an_institution_that_still_waits_when_the_run_ends_ends_with_it() -> None:
    outcome = lab(
        autostart=[CLOUD, "institution-0", "institution-1", "device-0", "device-1", "device-2"],
        tree={"cloud": {"closing": quorum(1, deadline_s=2.0)}},
    )
    assert outcome.ok, outcome
    assert outcome.virtual_s < undisturbed().virtual_s + 2.0 + 5.0


def test_an_institution_that_restarts_knows_the_samples_of_a_device_that_is_lost() -> None:
    """Under a quorum the run goes on without the device, whose samples weigh as before."""

    async def lose(sim: ScenarioLab) -> None:
        while sim.hardware.trainings < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        sim.kill("device-0")
        await asyncio.sleep(7.0)
        sim.kill("institution-0")
        sim.broker().kill()
        await asyncio.sleep(1.0)
        sim.broker().start("empty")  # with it the last presence of the device is gone
        sim.start("institution-0")

    tree = {"rounds": 8, "institution": {"rounds": 1, "closing": quorum(1, deadline_s=5.0)}}
    outcome, found, _ = completed(TREE | tree, lose, seed=0, time_limit_s=900.0)
    assert any(what == "kill institution-0" for _, what in outcome.faults), outcome
    plans = [event for event in found if event["node"] == "institution-0"]
    assert len(plans) == 8 and plans[-1]["without"] == ["device-0"]
    assert not [plan for plan in plans if "unreported" in plan]
