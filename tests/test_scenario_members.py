"""Whole labs in virtual time: wrong nodes, floods, slow links, brokers that refuse."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import pytest
import typer

from fedstrata.common.accounting.counters import packet_bytes
from fedstrata.common.experiment.reading import parse
from fedstrata.common.protocol.messages import Result, Task
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.local.agents import run_agents
from fedstrata.deploy.simulation.hardware import Durations, NullWorkload, SimulatedHardware
from fedstrata.deploy.simulation.simulated_broker import Routed
from fedstrata.deploy.simulation.simulated_lab import AgentFactory
from fedstrata.deploy.simulation.simulated_machines import SimulatedProcess
from fedstrata.deploy.simulation.simulated_world import SimulatedWorld
from fedstrata.device.device_agent import DeviceAgent
from tests.helpers.scenarios import (
    IDLE_S,
    MODEL_BYTES,
    TREE,
    OtherAgents,
    is_for,
    lab,
    survived,
    warned,
)
from tests.simulation.lab import ScenarioLab


@dataclass(frozen=True)
class RefusingFactory(AgentFactory):
    """Makes devices that allow no code of users."""

    def new(self, node: str, world: SimulatedWorld, **how: Any) -> Any:
        agent = super().new(node, world, **how)
        if isinstance(agent, DeviceAgent):
            agent._host = replace(agent._host, allow=())
        return agent


# 7. The wrong experiment, the wrong device


@pytest.mark.parametrize(
    "other", [{}, {"rounds": 3, "seed": 9}], ids=["the same again", "another experiment"]
)
def test_a_cloud_that_begins_another_run_takes_its_children_along(other: dict[str, Any]) -> None:
    experiment = parse(TREE | other)

    async def without_resume(sim: ScenarioLab) -> None:
        await asyncio.sleep(3.0)
        sim.kill(CLOUD)
        agents = OtherAgents(sim)
        agents.resume, agents.of[CLOUD] = False, replace(agents.usual, experiment=experiment)
        await asyncio.sleep(2.0)
        sim.start(CLOUD)

    alone = lab(tree=other)
    outcome = lab(without_resume)
    assert outcome.ok, outcome
    assert outcome.digest == alone.digest
    assert outcome.virtual_s < 5.0 + alone.virtual_s + 10.0
    warned(
        outcome, "institution-0 leaves run .*: the parent went on to run", "device-0 leaves run .*"
    )


MINE: Final = {"model": {"name": "mine:build"}}


def test_a_device_that_is_wrong_in_three_ways_holds_up_the_lab_until_it_is_right() -> None:
    wrong: list[str] = []

    async def one_after_another(sim: ScenarioLab) -> None:
        agents = OtherAgents(sim)
        other_data = NullWorkload(MODEL_BYTES)
        other_data.partition = "of other data"
        right = agents.usual
        refusing = RefusingFactory(
            **{field.name: getattr(right, field.name) for field in fields(right)}
        )
        wrong_data = replace(right, hardware=SimulatedHardware(other_data, Durations(), sim.seed))
        for node in sim.names[1:]:
            if node != "device-0":
                sim.start(node)
        for factory, parent in ((refusing, None), (right, "institution-1"), (wrong_data, None)):
            agents.of["device-0"] = factory
            await sim.start("device-0", parent=parent).ended.wait()
            wrong.append(sim.ended["device-0"])
            await asyncio.sleep(2 * IDLE_S)
        agents.of["device-0"] = right
        sim.start("device-0")

    outcome = survived(one_after_another, tree=MINE, autostart=[CLOUD], within_s=6 * IDLE_S + 5.0)
    for error, words in zip(
        wrong, ("--allow mine", "belongs to institution-0", "splits the data"), strict=True
    ):
        assert error.startswith("InvalidExperiment") and words in error
    warned(
        outcome,
        "institution-0 waits for its children: device-0 gave up: .*--allow mine",
        (
            "cloud waits for its children: institution-0 waits for .*device-0 gave up: .*splits "
            "the data"
        ),
    )


def test_a_device_that_is_interrupted_before_the_first_round_is_waited_for() -> None:
    async def interrupted(sim: ScenarioLab) -> None:
        sim.hardware.hanging.add("device-1")
        await asyncio.sleep(1.5)
        for node in ("device-0", "device-1"):
            sim.terminate(node)
            await sim.processes[node].ended.wait()
        sim.hardware.hanging.clear()
        await asyncio.sleep(5 * IDLE_S)
        for node in ("device-0", "device-1"):
            sim.start(node)

    outcome = survived(interrupted, within_s=5 * IDLE_S + 6.5)
    warned(outcome, "institution-0 waits for its children: device-0 was lost, or left")


def test_an_institution_names_a_device_again_and_again_whose_parent_is_mistyped() -> None:
    async def mistyped(sim: ScenarioLab) -> None:
        sim.start("device-0", parent="instituion-0")
        await asyncio.sleep(400.0)
        sim.kill("device-0")
        sim.start("device-0")

    outcome = lab(mistyped)
    assert outcome.ok, outcome
    # it waits, which is normal
    assert not [line for line in outcome.warnings if line.startswith("device-0")]
    line = "institution-0 waits for its children: device-0 has not joined yet"
    assert sum(line in warning for warning in outcome.warnings) >= 5
    assert outcome.virtual_s < 400.0 + 15.0


# 8. Floods and duplicates


async def start_again(sim: ScenarioLab, *nodes: str) -> int:
    """Run a second process of one or more nodes to its end and return its exit code."""
    host = f"second {nodes[0]}"
    world, factory = (
        SimulatedWorld(sim.network, host, generation=99),
        replace(sim.agents, spool=False),
    )
    codes: list[int] = []

    async def main() -> None:
        agents = {node: factory.new(node, world, resume=False).run for node in nodes}
        try:
            await run_agents(agents, shared_failure=lambda: None)
        except typer.Exit as end:
            codes.append(end.exit_code)

    world.process = SimulatedProcess(sim.loop, host, main)
    await world.process.ended.wait()
    return codes[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["device-0", "device-1"], ["device-0"]),
        (["device-0"], ["device-0", "device-1"]),
        ([], ["institution-0"]),
    ],
    ids=["a device", "a device beside another one", "an institution"],
)
def test_a_second_node_of_a_name_ends_and_the_lab_does_not(
    first: list[str], second: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []

    async def twice(sim: ScenarioLab) -> None:
        await asyncio.sleep(2.5)
        codes.append(await start_again(sim, *second))

    others = [CLOUD, "institution-0", "institution-1", "device-2", "device-3"]
    survived(
        twice, autostart=[*others, *(first or ["device-0", "device-1"])], grace_s=5.0, within_s=8.0
    )
    assert codes == [3] and f"{second[0]} is already alive" in capsys.readouterr().err


# 9. Slow links, chunks that never arrive, who is away at the end


def test_a_wan_that_is_slower_than_the_lan_ends_no_run() -> None:
    links = {"check": "off", "wan": {"up_mbit": 2.0, "down_mbit": 2.0}}
    transfer = {"keepalive_s": 10, "idle_s": IDLE_S}
    model_bytes = 1_000_000
    tree = {"links": links, "transfer": transfer, "topology": {"institutions": 1, "devices": 2}}
    outcome = lab(tree=tree, model_bytes=model_bytes)
    assert outcome.ok, outcome
    crossing_s = 8 * model_bytes / 2e6
    assert 4 * crossing_s < outcome.virtual_s < 4 * crossing_s + 15.0


# bytes of a model, Mbit/s: 6 to 10 s
SHAPED: Final = ((40_000, 0.05), (1_000_000, 1.0), (10_000_000, 8.0))
QUICK: Final = (50_000, 20.0)  # 20 ms


@pytest.mark.parametrize(
    ("model_bytes", "mbit"), [*SHAPED, QUICK], ids=["40 kB", "1 MB", "10 MB", "50 kB in 20 ms"]
)
@pytest.mark.parametrize("way", ["down", "up"])
def test_a_shaped_link_takes_payload_and_headers_by_its_rate(
    way: str, model_bytes: int, mbit: float
) -> None:
    sender, receiver = ("cloud", "institution-0") if way == "down" else ("institution-0", "cloud")
    announcement = Task if way == "down" else Result
    times: list[float] = []
    carried: list[int] = []
    until = 0  # what comes behind the last chunk is not on its way

    async def follow(sim: ScenarioLab) -> None:
        def note(message: Routed) -> None:
            nonlocal until
            size = packet_bytes(message.topic, len(message.body), qos=message.qos)
            if is_for(message, announcement, receiver) and not times:
                times.append(sim.now())
            elif times and f"/{sender}/" in message.topic and "/blob/" in message.topic:
                times.append(sim.now())
                carried.append(size)
                until = len(carried)
            elif times and f"/{receiver}/inbox/{sender}" in message.topic:
                carried.append(size)

        sim.network.hooks.append(note)

    tree = {
        "rounds": 1,
        "topology": {"institutions": 1, "devices": 1},
        "institution": {"rounds": 1},
        "links": {"check": "off", "wan": {f"{way}_mbit": mbit}},
        "transfer": {"inline_bytes": 0, "idle_s": IDLE_S},
    }
    outcome = lab(follow, tree=tree, model_bytes=model_bytes)
    assert outcome.ok, outcome
    expected = sum(carried[:until]) / (1e6 * mbit / 8)
    assert sum(carried[:until]) >= model_bytes and (expected > 5.0 or mbit == QUICK[1])
    # and two messages' round trips
    assert times[-1] - times[0] == pytest.approx(expected, rel=0.01, abs=0.004)


# 10. Brokers that refuse


@pytest.mark.parametrize("closes", [False, True])
def test_a_broker_that_refuses_its_statistics_or_closes_then_is_asked_once(closes: bool) -> None:
    asked: list[str] = []

    async def refuse(sim: ScenarioLab) -> None:
        broker = sim.broker()
        subscribe = broker.subscribe

        def refusing(session: Any, filters: list[str], *, qos: int) -> list[int]:
            if not filters[0].startswith("$SYS"):
                return subscribe(session, filters, qos=qos)
            asked.append(session.client_id)
            if closes:
                broker.abort(session)
            return [] if closes else [0x80] * len(filters)

        broker.subscribe = refusing  # type: ignore[method-assign]

    survived(refuse, within_s=5.0)
    assert 0 < len(asked) <= 3
