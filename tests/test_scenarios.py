"""What labs once died of, in virtual time: each scenario has a name, and the seconds within which a lab is over it."""

from __future__ import annotations

import asyncio
import gc
import random
import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

import pytest
import typer

from common.accounting.child_report import ChildReport
from common.accounting.counters import packet_bytes
from common.accounting.traffic import Traffic
from common.experiment.reading import parse
from common.experiment.topology import CLOUD
from common.protocol import serialization, topics
from common.protocol.messages import (
    Acknowledgement,
    Ask,
    Key,
    Manifest,
    Message,
    NodeState,
    Phase,
    Presence,
    Progress,
    Reports,
    Result,
    Task,
    WhoIsThere,
)
from common.protocol.presence import CHALLENGED_MOST
from common.protocol.receiver import PATIENCE_S
from deploy.local.agents import run_agents
from deploy.simulation.broker import Routed
from deploy.simulation.hardware import Durations, NullWorkload, SimulatedHardware
from deploy.simulation.lab import AgentFactory, Scenario, SimulatedLab
from deploy.simulation.machines import SimulatedProcess
from deploy.simulation.outcome import LabOutcome
from deploy.simulation.world import SimulatedWorld
from device.agent import DeviceAgent

IDLE_S: Final = 60.0
MODEL_BYTES: Final = 10_000
TREE: Final[dict[str, Any]] = {
    "name": "scenario",
    "rounds": 2,
    "topology": {"institutions": 2, "devices": 4},
    "institution": {"rounds": 2},
    "links": {"check": "off"},
    "transfer": {"inline_bytes": 0, "chunk_bytes": 32_768, "keepalive_s": 10, "idle_s": IDLE_S},
}
ONE: Final = {"institutions": 1, "devices": 4}


def lab(scenario: Scenario | None = None, *, tree: dict[str, Any] | None = None, **options: Any) -> LabOutcome:
    return SimulatedLab(
        parse(TREE | (tree or {})), scenario=scenario, **{"model_bytes": MODEL_BYTES, "time_limit_s": 900.0} | options
    ).run()


def quorum(number: int, *, deadline_s: float) -> dict[str, Any]:
    return {"rule": "quorum", "quorum": number, "deadline_s": deadline_s}


def ended_with(outcome: LabOutcome, node: str) -> str:
    assert node in outcome.ended, outcome
    return outcome.ended[node]


def round_seconds(outcome: LabOutcome) -> list[float]:
    elapsed = [0.0, *(float(row["elapsed_s"]) for row in outcome.rounds)]
    return [after - before for before, after in pairwise(elapsed)]


def warned(outcome: LabOutcome, *patterns: str) -> None:
    """Check that each pattern is in a line of the log."""
    for pattern in patterns:
        assert any(re.search(pattern, line) for line in outcome.warnings), (pattern, outcome.warnings)


@pytest.fixture(scope="module")
def undisturbed() -> LabOutcome:
    outcome = lab()
    assert outcome.ok, outcome
    return outcome


# What scenarios do


def run_of(sim: SimulatedLab) -> str:
    """Return the id of the run whose cloud announced itself last."""
    runs = [topic.split("/")[2] for topic in sim.broker().retained if topic.endswith("/cloud/spec")]
    return runs[-1]


def inbox(sim: SimulatedLab, node: str, sender: str) -> str:
    return topics.inbox(topics.DEFAULT_LAB, run_of(sim), node, sender)


def decoded(body: bytes) -> tuple[str, Message | None]:
    try:
        return serialization.decode(body)
    except Exception:  # noqa: BLE001 - a chunk
        return "", None


def is_for(message: Routed, kind: type[Message], node: str = "") -> bool:
    """Return whether a message of this kind goes to a node, to any without one."""
    receiver, inbox, _ = message.topic.partition("/inbox/")
    return bool(inbox) and receiver.endswith(f"/{node}" if node else "") and isinstance(decoded(message.body)[1], kind)


class Changed:
    """A filter of the network that passes on something else in place of the messages that `hits` names."""

    def __init__(self, sim: SimulatedLab, hits: Callable[[Routed], bool], change: Callable[[bytes], bytes]) -> None:
        self.times: list[float] = []
        self._sim, self._hits, self._change = sim, hits, change
        self._passing = False
        sim.network.filters.append(self)

    def __call__(self, message: Routed) -> bool:
        if self._passing or not self._hits(message):
            return True
        self.times.append(self._sim.now())
        self._passing = True
        broker = self._sim.broker(message.broker)
        broker.route(message.topic, self._change(message.body), qos=message.qos, retain=message.retain)
        self._passing = False
        return False


def flipped(draw: random.Random, body: bytes) -> bytes:
    """Return a message with one bit changed."""
    damaged = bytearray(body)
    bit = draw.randrange(8 * len(body))
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def once(hits: Callable[[Routed], object]) -> Callable[[Routed], bool]:
    """Return a condition that is true for the first message alone of each that `hits` returns, None aside."""
    seen: set[object] = set()

    def first(message: Routed) -> bool:
        what = hits(message)
        new = what is not None and what not in seen
        seen.add(what)
        return new

    return first


class OtherAgents:
    """In place of a lab's factory: the agents that `of` names are made by another one."""

    def __init__(self, sim: SimulatedLab) -> None:
        self.usual = sim.agents
        self.of: dict[str, AgentFactory] = {}
        self.resume = True
        sim.agents = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.usual, name)

    def new(self, node: str, world: SimulatedWorld, *, resume: bool, **how: Any) -> Any:
        return self.of.get(node, self.usual).new(node, world, resume=resume and self.resume, **how)


@dataclass(frozen=True)
class RefusingFactory(AgentFactory):
    """Makes devices that allow no code of users."""

    def new(self, node: str, world: SimulatedWorld, **how: Any) -> Any:
        agent = super().new(node, world, **how)
        if isinstance(agent, DeviceAgent):
            agent._host = replace(agent._host, allow=())
        return agent


# 1. A persistent broker that loses power


@pytest.mark.parametrize("clock_offset_s", [0.0, -3600.0], ids=["", "a clock that was put back"])
@pytest.mark.parametrize("first", ["cloud", "children"])
def test_a_dead_runs_retained_presence_captures_nobody(
    first: str, clock_offset_s: float, undisturbed: LabOutcome
) -> None:
    begun: list[float] = []

    async def power_loss(sim: SimulatedLab) -> None:
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
        sim.start(CLOUD, clock_offset_s=clock_offset_s)
        await asyncio.sleep(2.0 if first == "cloud" else 0.0)
        for node in sim.names[1:] if first == "cloud" else ():
            sim.start(node)
        await asyncio.sleep(5.0)
        assert run_of(sim) != dead

    outcome = lab(power_loss)
    assert outcome.ok, outcome
    assert outcome.digest == undisturbed.digest
    assert outcome.virtual_s - begun[0] < 20.0 + undisturbed.virtual_s + 5.0


# 2. One message of an unknown session under a peer's name


KEY: Final = Key(0, 0, 0)
BLOB: Final = "0123456789abcdef"
PROGRESS: Final = Progress(KEY, Phase.TRAINING, 1, 2, Traffic(), ())
RESULT: Final = Result(
    KEY, Manifest(BLOB, 1024, 1024, bytes(8), "fp32", "layout"), None, 1, 0.0, 1, 1, 1, 0.0, 0.0, 0.0, (), ""
)


STRANGERS: Final = (
    (PROGRESS, "cloud", "institution-0"),
    (RESULT, "cloud", "institution-1"),
    (PROGRESS, "institution-0", "device-0"),
    (RESULT, "institution-0", "device-1"),
    (Acknowledgement(KEY, ""), "institution-0", "cloud"),
    (Acknowledgement(KEY, ""), "device-0", "institution-0"),
)


def test_a_message_of_an_unknown_session_changes_nothing(undisturbed: LabOutcome) -> None:
    async def strangers(sim: SimulatedLab) -> None:
        for at in (2.5, 4.0):
            await asyncio.sleep(at - sim.now())
            for message, node, sender in STRANGERS:
                sim.inject(inbox(sim, node, sender), serialization.encode(message, "feedfacefeedface"))

    outcome = lab(strangers)
    assert outcome.ok, outcome
    assert outcome.digest == undisturbed.digest
    assert outcome.virtual_s < undisturbed.virtual_s + 1.0
    refused = [f"{node}: refused a message .unknown session. from {sender}" for _, node, sender in STRANGERS]
    warned(outcome, *refused)


def test_a_bit_flipped_in_a_task_of_each_node_costs_a_repeat(undisturbed: LabOutcome) -> None:
    def first_task(message: Routed) -> object:
        return message.topic if is_for(message, Task) else None

    async def damage(sim: SimulatedLab) -> None:
        changed.append(Changed(sim, once(first_task), partial(flipped, sim.random("bits"))))

    changed: list[Changed] = []
    outcome = lab(damage)
    assert outcome.ok, outcome
    assert len(changed[0].times) == 6
    assert outcome.digest == undisturbed.digest
    assert outcome.virtual_s < undisturbed.virtual_s + 5.0
    warned(outcome, "device-0: refused a message .malformed. .*damaged message")


def test_a_bit_flipped_in_the_first_message_of_each_kind_costs_repeats(undisturbed: LabOutcome) -> None:
    def first_of_kind(message: Routed) -> object:
        content = decoded(message.body)[1]
        kind = str(content.state) if isinstance(content, Presence) else type(content)
        return (message.topic.partition("/blob/")[0], kind) if message.body else None

    async def damage(sim: SimulatedLab) -> None:
        changed.append(Changed(sim, once(first_of_kind), partial(flipped, sim.random("bits"))))

    changed: list[Changed] = []
    outcome = lab(damage)
    assert outcome.ok, outcome
    assert len(changed[0].times) > 40
    assert outcome.digest == undisturbed.digest
    assert outcome.virtual_s < undisturbed.virtual_s + 60.0


@pytest.mark.parametrize("state", [NodeState.INIT, NodeState.READY, NodeState.FINISHED])
@pytest.mark.parametrize("node", ["cloud", "institution-0", "device-0"])
def test_a_lost_presence_costs_seconds(node: str, state: NodeState, undisturbed: LabOutcome) -> None:
    def first(message: Routed) -> object:
        presence = decoded(message.body)[1] if f"/{node}/state" in message.topic else None
        return message.broker if isinstance(presence, Presence) and presence.state is state else None

    async def lose(sim: SimulatedLab) -> None:
        is_first = once(first)
        sim.network.filters.append(lambda message: not is_first(message))

    outcome = lab(lose, broker_each=True)
    assert outcome.ok, outcome
    assert outcome.digest == undisturbed.digest
    assert outcome.virtual_s < undisturbed.virtual_s + 10.0


def unfit(body: bytes) -> bytes:
    """Return a task whose model has another layout."""
    session, task = serialization.decode(body)
    assert isinstance(task, Task)
    return serialization.encode(replace(task, model=replace(task.model, layout="0" * 16)), session)


def test_a_task_that_does_not_fit_is_declined_and_sent_again(undisturbed: LabOutcome) -> None:
    def first_task(message: Routed) -> object:
        return message.topic if is_for(message, Task) else None

    async def damage(sim: SimulatedLab) -> None:
        Changed(sim, once(first_task), unfit)

    outcome = lab(damage)
    assert outcome.ok, outcome
    assert outcome.digest == undisturbed.digest
    assert outcome.virtual_s < undisturbed.virtual_s + 5.0
    warned(outcome, "device-0: refused a message .does not fit.*layout")


def test_tasks_that_never_fit_end_the_run_with_the_reason() -> None:
    async def damage(sim: SimulatedLab) -> None:
        Changed(sim, lambda message: is_for(message, Task, "device-0"), unfit)

    outcome = lab(damage)
    assert re.search("NoProgress: .*device-0 made no progress.*declined its task: .*layout", ended_with(outcome, CLOUD))
    assert outcome.virtual_s < IDLE_S + 10.0


# 4. Children that offer and do not serve


SERVING: Final = {"topology": {"institutions": 1, "devices": 8}}
WITHHOLDING: Final = tuple(f"device-{i}" for i in range(6))
DEADLINE_S: Final = 5.0


async def uplinks_that_carry_no_chunk(sim: SimulatedLab) -> None:
    sim.broker().denied += [f"fs1/+/+/{device}/blob/#" for device in WITHHOLDING]


async def black_holes(sim: SimulatedLab) -> None:
    await asyncio.sleep(3.0)
    for device in WITHHOLDING:
        sim.link(device).change(mtu_bytes=1500)


@pytest.mark.parametrize("withhold", [uplinks_that_carry_no_chunk, black_holes])
def test_children_that_offer_and_do_not_serve_hold_no_slots_under_a_quorum(withhold: Scenario) -> None:
    institution = {"rounds": 2, "closing": quorum(2, deadline_s=DEADLINE_S)}
    outcome = lab(withhold, tree=SERVING | {"institution": institution})
    assert outcome.ok, outcome
    assert len(outcome.rounds) == 2
    assert float(outcome.rounds[-1]["elapsed_s"]) < 4 * (PATIENCE_S + DEADLINE_S)


@pytest.mark.parametrize("withhold", [uplinks_that_carry_no_chunk, black_holes])
def test_children_that_offer_and_do_not_serve_end_a_run_that_needs_them(withhold: Scenario) -> None:
    outcome = lab(withhold, tree=SERVING)
    reason = "NoProgress: institution-0 gave up: device-0, device-1 and 4 others made no progress"
    assert re.search(reason, ended_with(outcome, CLOUD))
    assert outcome.virtual_s < 2 * IDLE_S


@pytest.mark.parametrize("node", [CLOUD, "institution-0", "device-0"])
@pytest.mark.parametrize("loss", ["stop", "cut", "black hole"])
def test_a_node_that_is_lost_for_good_ends_all_others(loss: str, node: str) -> None:
    async def lose(sim: SimulatedLab) -> None:
        await asyncio.sleep(2.0)
        if loss == "stop":
            sim.stop(node)
        else:
            sim.link(node).change(**({"cut": True} if loss == "cut" else {"mtu_bytes": 1500}))

    outcome = lab(lose, grace_s=1.5 * IDLE_S)
    others = {CLOUD, "institution-0", "institution-1", *(f"device-{i}" for i in range(4))} - {node}
    assert all(ended_with(outcome, other) for other in others)
    assert outcome.virtual_s < 3 * IDLE_S


# 5. A child that hangs while it prepares


async def hanging(sim: SimulatedLab) -> None:
    sim.hardware.hanging.add("device-0")


def test_a_child_that_hangs_while_it_prepares_ends_a_run_that_needs_it() -> None:
    outcome = lab(hanging)
    reason = "NoProgress: the run cannot begin: institution-0: gave up: .*device-0: no progress in preparing for 60 s"
    assert re.search(reason, ended_with(outcome, CLOUD))
    assert outcome.virtual_s < IDLE_S + 5.0


def test_a_child_that_hangs_while_it_prepares_costs_a_quorum_its_first_deadline(undisturbed: LabOutcome) -> None:
    outcome = lab(hanging, tree={"institution": {"rounds": 2, "closing": quorum(1, deadline_s=20.0)}})
    assert ended_with(outcome, CLOUD) == "", outcome
    warned(outcome, "institution-0 begins without: device-0 prepares")
    assert outcome.virtual_s < undisturbed.virtual_s + 20.0 + 15.0


# 6. Children that are lost


def test_a_lost_device_costs_a_quorum_one_deadline_at_most() -> None:
    async def losing(sim: SimulatedLab) -> None:
        await asyncio.sleep(2.0)
        sim.kill("device-3")

    institution = {"rounds": 1, "closing": quorum(3, deadline_s=20.0)}
    outcome = lab(losing, tree={"rounds": 6, "topology": ONE, "institution": institution})
    assert ended_with(outcome, CLOUD) == "", outcome
    seconds = round_seconds(outcome)
    assert len(seconds) == 6 and max(seconds[1:]) < 3.0 and seconds[0] < 20.0 + 3.0


def test_a_lost_institution_costs_a_quorum_one_deadline_at_most() -> None:
    async def losing(sim: SimulatedLab) -> None:
        await asyncio.sleep(2.0)
        for node in ("institution-1", "device-2", "device-3"):
            sim.kill(node)

    outcome = lab(losing, tree={"rounds": 6, "cloud": {"closing": quorum(1, deadline_s=20.0)}})
    assert ended_with(outcome, CLOUD) == "", outcome
    seconds = round_seconds(outcome)
    assert len(seconds) == 6 and max(seconds[1:]) < 6.0 and seconds[0] < 20.0 + 6.0


def presences(sim: SimulatedLab, node: str) -> list[tuple[float, str, str]]:
    """Return a list that grows with the presences of a node that differ from the last: time, state and reason."""
    found: list[tuple[float, str, str]] = []

    def note(message: Routed) -> None:
        presence = decoded(message.body)[1] if message.topic.endswith(f"/{node}/state") else None
        if isinstance(presence, Presence) and (presence.state, presence.reason) != (found[-1][1:] if found else ()):
            found.append((sim.now(), presence.state, presence.reason))

    sim.network.hooks.append(note)
    return found


@pytest.mark.parametrize("broker_each", [False, True], ids=["one broker", "a broker of its own"])
def test_an_institution_without_any_device_reports_it_until_some_come_back(
    broker_each: bool, undisturbed: LabOutcome
) -> None:
    async def losing(sim: SimulatedLab) -> None:
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
    outcome = lab(losing, broker_each=broker_each)
    assert outcome.ok, outcome
    assert outcome.digest == undisturbed.digest
    assert outcome.virtual_s < undisturbed.virtual_s + 62.0 + 3 * 5.0
    reasons = [(at, reason) for at, state, reason in found[0] if state == NodeState.READY]
    assert [reason for _, reason in reasons][:5] == ["", *["no device is present", ""] * 2]
    for (at, _), begun in zip(reasons[1:5], (8.0, 43.0, 54.0, 69.0), strict=True):
        assert begun <= at < begun + 1.0
    warned(outcome, "institution-0: no device is present")


def test_an_institution_whose_devices_never_came_reports_it() -> None:
    async def late(sim: SimulatedLab) -> None:
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


def test_an_institution_that_still_waits_when_the_run_ends_ends_with_it(undisturbed: LabOutcome) -> None:
    outcome = lab(autostart=[CLOUD, "institution-0", "institution-1", "device-0", "device-1", "device-2"],
                  tree={"cloud": {"closing": quorum(1, deadline_s=2.0)}})  # fmt: skip
    assert outcome.ok, outcome
    assert outcome.virtual_s < undisturbed.virtual_s + 2.0 + 5.0


# 7. The wrong experiment, the wrong device


@pytest.mark.parametrize("other", [{}, {"rounds": 3, "seed": 9}], ids=["the same again", "another experiment"])
def test_a_cloud_that_begins_another_run_takes_its_children_along(
    other: dict[str, Any], undisturbed: LabOutcome
) -> None:
    experiment = parse(TREE | other)

    async def without_resume(sim: SimulatedLab) -> None:
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
    warned(outcome, "institution-0 leaves run .*: the parent went on to run", "device-0 leaves run .*")


def vars_of(factory: AgentFactory) -> dict[str, Any]:
    return {field.name: getattr(factory, field.name) for field in fields(factory)}


MINE: Final = {"model": {"name": "mine:build"}}


def test_a_device_that_is_wrong_in_three_ways_holds_up_the_lab_until_it_is_right(undisturbed: LabOutcome) -> None:
    wrong: list[str] = []

    async def one_after_another(sim: SimulatedLab) -> None:
        agents = OtherAgents(sim)
        other_data = NullWorkload(MODEL_BYTES)
        other_data.partition = "of other data"
        usual = vars_of(agents.usual)
        right, refusing = agents.usual, RefusingFactory(**usual)
        wrong_data = AgentFactory(**usual | {"hardware": SimulatedHardware(other_data, Durations(), sim.seed)})
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

    outcome = lab(one_after_another, tree=MINE, autostart=[CLOUD])
    assert outcome.ok, outcome
    assert outcome.digest == undisturbed.digest
    for error, words in zip(wrong, ("--allow mine", "belongs to institution-0", "splits the data"), strict=True):
        assert error.startswith("InvalidExperiment") and words in error
    assert outcome.virtual_s < 6 * IDLE_S + undisturbed.virtual_s + 5.0
    warned(outcome, "institution-0 waits for its children: device-0 gave up: .*--allow mine",
           "cloud waits for its children: institution-0 waits for .*device-0 gave up: .*splits the data")  # fmt: skip


def test_a_device_that_is_interrupted_before_the_first_round_is_waited_for(undisturbed: LabOutcome) -> None:
    async def interrupted(sim: SimulatedLab) -> None:
        sim.hardware.hanging.add("device-1")
        await asyncio.sleep(1.5)
        for node in ("device-0", "device-1"):
            sim.terminate(node)
            await sim.processes[node].ended.wait()
        sim.hardware.hanging.clear()
        await asyncio.sleep(5 * IDLE_S)
        for node in ("device-0", "device-1"):
            sim.start(node)

    outcome = lab(interrupted)
    assert outcome.ok, outcome
    assert outcome.digest == undisturbed.digest
    assert outcome.virtual_s < 1.5 + 5 * IDLE_S + undisturbed.virtual_s + 5.0
    warned(outcome, "institution-0 waits for its children: device-0 was lost, or left")


def test_a_mistyped_institution_is_named_again_and_again() -> None:
    async def mistyped(sim: SimulatedLab) -> None:
        sim.start("device-0", parent="instituion-0")
        await asyncio.sleep(400.0)
        sim.kill("device-0")
        sim.start("device-0")

    outcome = lab(mistyped)
    assert outcome.ok, outcome
    lines = [line for line in outcome.warnings if line.startswith("device-0 waits for instituion-0")]
    assert len(lines) >= 5 and all("Other parents: cloud, institution-0, institution-1" in line for line in lines)
    warned(outcome, "institution-0 waits for its children: device-0 has not joined yet")
    assert outcome.virtual_s < 400.0 + 15.0


# 8. Floods and duplicates


async def pour(sim: SimulatedLab, bodies: Iterable[tuple[str, bytes]], *, at_once: int = 100) -> None:
    """Publish messages, so many in each 10 ms."""
    for number, (topic, body) in enumerate(bodies):
        sim.inject(topic, body, qos=0)
        if number % at_once == at_once - 1:
            await asyncio.sleep(0.01)


def session_of(sim: SimulatedLab, node: str) -> str:
    retained = sim.broker().retained[topics.state(topics.DEFAULT_LAB, run_of(sim), node)]
    return serialization.decode(retained.body)[0]


def test_a_members_flood_of_asks_does_not_delay_its_siblings(undisturbed: LabOutcome) -> None:
    answers: list[Routed] = []

    async def flood(sim: SimulatedLab) -> None:
        sim.network.hooks.append(
            lambda message: answers.append(message)
            if message.topic.endswith("/device-1/inbox/institution-0") else None
        )  # fmt: skip
        await asyncio.sleep(2.5)
        topic, session = inbox(sim, "institution-0", "device-1"), session_of(sim, "device-1")
        asks = (Ask(f"{number:016x}", b"\x80", 0, 0, 8, True) for number in range(2000))
        await pour(sim, ((topic, serialization.encode(ask, session)) for ask in asks))

    links = {"check": "off", "lan": {"up_mbit": 1.0, "down_mbit": 1.0}}
    alone, outcome = lab(tree={"links": links}), lab(flood, tree={"links": links})
    assert outcome.ok, outcome
    assert outcome.digest == undisturbed.digest
    assert outcome.virtual_s < alone.virtual_s + 5.0
    assert len(answers) < 500
    warned(outcome, "institution-0: refused a message .too many. from device-1")


def kept_of(names: set[str]) -> int:
    """Return how many of these names any set, dictionary or queue of this process holds, `names` aside."""
    kinds = set | dict | deque  # by type(): some of torch's objects warn when they are asked for their class
    gc.unfreeze()  # containers that the imports made, too
    containers = (found for found in gc.get_objects() if issubclass(type(found), kinds) and found is not names)
    count = len({name for container in containers for name in tuple(container) if type(name) is str and name in names})
    gc.freeze()
    return count


def test_a_flood_of_sessions_under_a_nodes_name_ends_with_the_flood(undisturbed: LabOutcome) -> None:
    routed: list[Routed] = []
    kept: list[int] = []

    async def flood(sim: SimulatedLab) -> None:
        sim.network.hooks.append(routed.append)
        await asyncio.sleep(2.5)
        for node in ("institution-0", "device-0"):
            topic = topics.state(topics.DEFAULT_LAB, run_of(sim), node)
            presence = Presence(NodeState.INIT, "institution")
            sessions = {f"{number:016x}" for number in range(500)}
            await pour(sim, ((topic, serialization.encode(presence, session)) for session in sorted(sessions)))
            await asyncio.sleep(1.0)
            kept.append(kept_of(sessions))

    outcome = lab(flood)
    assert outcome.ok, outcome
    assert outcome.digest == undisturbed.digest
    assert outcome.virtual_s < undisturbed.virtual_s + 10.0
    assert len(routed) < 3 * 1000 + 300
    assert max(kept) <= 2 * CHALLENGED_MOST


def test_a_flood_of_seekers_and_of_made_up_reports_costs_nothing(undisturbed: LabOutcome) -> None:
    kept: list[int] = []

    async def flood(sim: SimulatedLab) -> None:
        await asyncio.sleep(2.5)
        seek = serialization.encode(WhoIsThere("feedface"), "feedface")
        await pour(sim, ((topics.seek(topics.DEFAULT_LAB, "cloud", f"seeker-{n}"), seek) for n in range(500)))
        session, topic = session_of(sim, "institution-0"), inbox(sim, "cloud", "institution-0")
        made_up = {f"made-up-{number}" for number in range(500)}
        sim.inject(topic, serialization.encode(Reports(tuple(map(ChildReport, sorted(made_up)))), session))
        await asyncio.sleep(1.0)
        kept.extend([kept_of(made_up), kept_of({f"seeker-{number}" for number in range(500)})])

    outcome = lab(flood)
    assert outcome.ok, outcome
    assert outcome.digest == undisturbed.digest
    assert outcome.virtual_s < undisturbed.virtual_s + 5.0
    assert kept == [0, 0]


async def start_again(sim: SimulatedLab, *nodes: str) -> int:
    """Run a second process of one or more nodes to its end and return its exit code."""
    host = f"second {nodes[0]}"
    world, factory = SimulatedWorld(sim.network, host, generation=99), replace(sim.agents, spool=False)
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
    [(["device-0", "device-1"], ["device-0"]), (["device-0"], ["device-0", "device-1"]), ([], ["institution-0"])],
    ids=["a device", "a device beside another one", "an institution"],
)
def test_a_second_node_of_a_name_ends_and_the_lab_does_not(
    first: list[str], second: list[str], undisturbed: LabOutcome, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []

    async def twice(sim: SimulatedLab) -> None:
        await asyncio.sleep(2.5)
        codes.append(await start_again(sim, *second))

    others = [CLOUD, "institution-0", "institution-1", "device-2", "device-3"]
    outcome = lab(twice, autostart=[*others, *(first or ["device-0", "device-1"])], grace_s=5.0)
    assert outcome.ok, outcome
    assert codes == [3] and f"{second[0]} is already alive" in capsys.readouterr().err
    assert outcome.digest == undisturbed.digest
    assert outcome.virtual_s < undisturbed.virtual_s + 8.0


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


@pytest.mark.parametrize("chunk_bytes", [32_768, 1_000_000])
def test_chunks_that_never_arrive_end_the_run_for_lack_of_progress(chunk_bytes: int) -> None:
    async def denied(sim: SimulatedLab) -> None:
        sim.broker().denied.append("fs1/+/+/device-0/blob/#")

    outcome = lab(denied, tree={"transfer": TREE["transfer"] | {"chunk_bytes": chunk_bytes}})
    assert re.search("NoProgress: .*device-0 made no progress for 60 s", ended_with(outcome, CLOUD))
    assert outcome.virtual_s < 2 * IDLE_S


@pytest.mark.parametrize("broker_each", [False, True], ids=["one broker", "brokers of their own"])
def test_who_is_away_when_the_run_ends_learns_of_it_later(broker_each: bool) -> None:
    back: list[float] = []

    async def away(sim: SimulatedLab) -> None:
        links = (sim.link("institution-0"), sim.link("device-3"))
        await asyncio.sleep(3.0)
        for link in links:
            link.change(cut=True)
        while CLOUD not in sim.ended:  # noqa: ASYNC110 - nothing reports it
            await asyncio.sleep(0.5)
        await asyncio.sleep(20.0)
        back.append(sim.now())
        for link in links:
            link.change(cut=False)

    closing = quorum(1, deadline_s=0.2)
    tree = {"cloud": {"closing": closing}, "institution": {"closing": closing}}
    outcome = lab(away, tree=tree, broker_each=broker_each)
    assert outcome.ok, outcome
    assert outcome.virtual_s < back[0] + 20.0


SHAPED: Final = ((40_000, 0.05), (1_000_000, 1.0), (10_000_000, 8.0))  # bytes of a model, Mbit/s: 6 to 10 s
QUICK: Final = (50_000, 20.0)  # 20 ms


@pytest.mark.parametrize(("model_bytes", "mbit"), [*SHAPED, QUICK], ids=["40 kB", "1 MB", "10 MB", "50 kB in 20 ms"])
@pytest.mark.parametrize("way", ["down", "up"])
def test_a_shaped_link_takes_payload_and_headers_by_its_rate(way: str, model_bytes: int, mbit: float) -> None:
    sender, receiver = ("cloud", "institution-0") if way == "down" else ("institution-0", "cloud")
    announcement = Task if way == "down" else Result
    times: list[float] = []
    carried: list[int] = []
    until = 0  # what comes behind the last chunk is not on its way

    async def follow(sim: SimulatedLab) -> None:
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
    assert times[-1] - times[0] == pytest.approx(expected, rel=0.01, abs=0.004)  # and two messages' round trips


# 10. Brokers that refuse


def test_a_broker_that_refuses_its_statistics_is_usable(undisturbed: LabOutcome) -> None:
    async def refuse(sim: SimulatedLab) -> None:
        broker = sim.broker()
        subscribe = broker.subscribe
        broker.subscribe = lambda session, filters, *, qos: (  # type: ignore[method-assign]
            [0x80] * len(filters) if filters[0].startswith("$SYS") else subscribe(session, filters, qos=qos)
        )

    outcome = lab(refuse)
    assert outcome.ok, outcome
    assert outcome.digest == undisturbed.digest


def test_a_broker_that_closes_at_its_statistics_is_asked_once(undisturbed: LabOutcome) -> None:
    closed: list[str] = []

    async def close(sim: SimulatedLab) -> None:
        broker = sim.broker()
        subscribe = broker.subscribe

        def refusing(session: Any, filters: list[str], *, qos: int) -> list[int]:
            if filters[0].startswith("$SYS"):
                closed.append(session.client_id)
                broker.abort(session)
                return []
            return subscribe(session, filters, qos=qos)

        broker.subscribe = refusing  # type: ignore[method-assign]

    outcome = lab(close)
    assert outcome.ok, outcome
    assert outcome.digest == undisturbed.digest
    assert len(closed) <= 3
    assert outcome.virtual_s < undisturbed.virtual_s + 5.0


def test_a_broker_that_drops_connections_at_once_is_not_overrun(undisturbed: LabOutcome) -> None:
    connects: list[float] = []

    async def drop(sim: SimulatedLab) -> None:
        broker = sim.broker()
        subscribe = broker.subscribe

        def dropping(session: Any, filters: list[str], *, qos: int) -> list[int]:
            if 3.0 < sim.now() < 33.0:
                connects.append(sim.now())
                broker.abort(session)
                return []
            return subscribe(session, filters, qos=qos)

        broker.subscribe = dropping  # type: ignore[method-assign]
        await asyncio.sleep(3.0)
        for session in list(broker.sessions.values()):
            broker.abort(session)

    outcome = lab(drop)
    assert outcome.ok, outcome
    assert outcome.digest == undisturbed.digest
    assert outcome.virtual_s < undisturbed.virtual_s + 30.0 + 10.0
    assert len(connects) < 15 * 9  # nine connections, which pause 2.5 to 5 s after their sixth attempt
