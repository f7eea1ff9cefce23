"""What labs once died of, in virtual time: each scenario has a name, and the seconds within which a
lab is over it.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

import pytest

from fedstrata.common.accounting.traffic import Traffic
from fedstrata.common.accounting.work import Work
from fedstrata.common.protocol import serialization
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
from fedstrata.common.protocol.receiver import PATIENCE_S
from fedstrata.common.runtime.parent_endpoint import REPEAT_END_S
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.simulation.broker import Routed
from tests.helpers.scenarios import (
    IDLE_S,
    OtherAgents,
    decoded,
    ended_with,
    inbox,
    is_for,
    lab,
    quorum,
    run_of,
    survived,
    undisturbed,
    warned,
)
from tests.simulation.lab import Scenario, ScenarioLab

ONE: Final = {"institutions": 1, "devices": 4}


class Changed:
    """A filter of the network that passes on something else in place of the messages that `hits`
    names.
    """

    def __init__(
        self, sim: ScenarioLab, hits: Callable[[Routed], bool], change: Callable[[bytes], bytes]
    ) -> None:
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
        broker.route(
            message.topic, self._change(message.body), qos=message.qos, retain=message.retain
        )
        self._passing = False
        return False


def flipped(draw: random.Random, body: bytes) -> bytes:
    """Return a message with one bit changed."""
    damaged = bytearray(body)
    bit = draw.randrange(8 * len(body))
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def once(hits: Callable[[Routed], object]) -> Callable[[Routed], bool]:
    """Return a condition that is true for the first message alone of each that `hits` returns, None
    aside.
    """
    seen: set[object] = set()

    def first(message: Routed) -> bool:
        what = hits(message)
        new = what is not None and what not in seen
        seen.add(what)
        return new

    return first


# 1. A persistent broker that loses power


@pytest.mark.parametrize("clock_offset_s", [0.0, -3600.0], ids=["", "a clock that was put back"])
@pytest.mark.parametrize("first", ["cloud", "children"])
def test_a_dead_runs_retained_presence_captures_nobody(first: str, clock_offset_s: float) -> None:
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
        sim.start(CLOUD, clock_offset_s=clock_offset_s)
        await asyncio.sleep(2.0 if first == "cloud" else 0.0)
        for node in sim.names[1:] if first == "cloud" else ():
            sim.start(node)
        await asyncio.sleep(5.0)
        assert run_of(sim) != dead

    outcome = survived(power_loss)
    assert outcome.virtual_s - begun[0] < 20.0 + undisturbed().virtual_s + 5.0


@pytest.mark.parametrize("away_s", [1.0, 0.8 * IDLE_S])
def test_a_broker_that_is_away_as_the_run_ends_comes_back_to_nodes_that_learn_of_it(
    away_s: float,
) -> None:
    ended = asyncio.Event()

    def observe(event: str, facts: dict[str, object]) -> None:
        if event == "global_round" and facts["global_round"] == 2:
            ended.set()

    async def power_loss(sim: ScenarioLab) -> None:
        await ended.wait()
        sim.broker().kill()
        await asyncio.sleep(away_s)
        sim.broker().start("current")

    survived(power_loss, observe=observe, within_s=away_s + 10.0)


def test_an_end_that_is_lost_is_said_again() -> None:
    async def lose(sim: ScenarioLab) -> None:
        first = once(lambda message: message.topic if finishes(message) else None)
        sim.network.filters.append(lambda message: not first(message))

    def finishes(message: Routed) -> bool:
        presence = decoded(message.body)[1] if message.topic.endswith("/state") else None
        return isinstance(presence, Presence) and presence.state is NodeState.FINISHED

    survived(lose, within_s=2 * REPEAT_END_S + 1.0)


# 2. One message of an unknown session under a peer's name


KEY: Final = Key(0, 0, 0)
BLOB: Final = "0123456789abcdef"
PROGRESS: Final = Progress(KEY, Phase.TRAINING, 1, 2, Traffic(), ())
RESULT: Final = Result(
    KEY,
    Manifest(BLOB, 1024, 1024, bytes(8), "fp32", "layout"),
    None,
    Work(1, 0.0, 1, 1, 0.0, 0.0, 0.0),
    1,
    (),
    "",
)


STRANGERS: Final = (
    (PROGRESS, "cloud", "institution-0"),
    (RESULT, "cloud", "institution-1"),
    (PROGRESS, "institution-0", "device-0"),
    (RESULT, "institution-0", "device-1"),
    (Acknowledgement(KEY, ""), "institution-0", "cloud"),
    (Acknowledgement(KEY, ""), "device-0", "institution-0"),
)


def test_a_message_of_an_unknown_session_changes_nothing() -> None:
    async def strangers(sim: ScenarioLab) -> None:
        for at in (2.5, 4.0):
            await asyncio.sleep(at - sim.now())
            for message, node, sender in STRANGERS:
                sim.inject(
                    inbox(sim, node, sender), serialization.encode(message, "feedfacefeedface")
                )

    outcome = survived(strangers, within_s=1.0)
    refused = [
        f"{node}: refused a message .unknown session. from {sender}"
        for _, node, sender in STRANGERS
    ]
    warned(outcome, *refused)


def first_task(message: Routed) -> object:
    return message.topic if is_for(message, Task) else None


def first_of_kind(message: Routed) -> object:
    content = decoded(message.body)[1]
    kind = str(content.state) if isinstance(content, Presence) else type(content)
    return (message.topic.partition("/blob/")[0], kind) if message.body else None


@pytest.mark.parametrize(
    ("first", "least", "within_s"), [(first_task, 6, 5.0), (first_of_kind, 41, 60.0)]
)
def test_a_bit_flipped_in_the_first_message_costs_repeats(
    first: Callable[[Routed], object], least: int, within_s: float
) -> None:
    async def damage(sim: ScenarioLab) -> None:
        changed.append(Changed(sim, once(first), partial(flipped, sim.random("bits"))))

    changed: list[Changed] = []
    outcome = survived(damage, within_s=within_s)
    assert len(changed[0].times) >= least
    warned(outcome, "device-0: refused a message .malformed. .*damaged message")


@pytest.mark.parametrize("state", [NodeState.INIT, NodeState.READY, NodeState.FINISHED])
@pytest.mark.parametrize("node", ["cloud", "institution-0", "device-0"])
def test_a_lost_presence_costs_seconds(node: str, state: NodeState) -> None:
    def first(message: Routed) -> object:
        presence = decoded(message.body)[1] if f"/{node}/state" in message.topic else None
        return (
            message.broker if isinstance(presence, Presence) and presence.state is state else None
        )

    async def lose(sim: ScenarioLab) -> None:
        is_first = once(first)
        sim.network.filters.append(lambda message: not is_first(message))

    survived(lose, broker_each=True, within_s=10.0)


def unfit(body: bytes) -> bytes:
    """Return a task whose model has another layout."""
    session, task = serialization.decode(body)
    assert isinstance(task, Task)
    return serialization.encode(replace(task, model=replace(task.model, layout="0" * 16)), session)


def test_a_task_that_does_not_fit_is_declined_and_sent_again() -> None:
    def first_task(message: Routed) -> object:
        return message.topic if is_for(message, Task) else None

    async def damage(sim: ScenarioLab) -> None:
        Changed(sim, once(first_task), unfit)

    outcome = survived(damage, within_s=5.0)
    warned(outcome, "device-0: refused a message .does not fit.*layout")


def test_tasks_that_never_fit_end_the_run_with_the_reason() -> None:
    async def damage(sim: ScenarioLab) -> None:
        Changed(sim, lambda message: is_for(message, Task, "device-0"), unfit)

    outcome = lab(damage)
    assert re.search(
        "NoProgress: .*device-0 made no progress.*declined its task: .*layout",
        ended_with(outcome, CLOUD),
    )
    assert outcome.virtual_s < IDLE_S + 10.0


# 4. Children that offer and do not serve


SERVING: Final = {"topology": {"institutions": 1, "devices": 8}}
WITHHOLDING: Final = tuple(f"device-{i}" for i in range(6))
DEADLINE_S: Final = 5.0


async def uplinks_that_carry_no_chunk(sim: ScenarioLab) -> None:
    sim.broker().denied += [f"fs1/+/+/{device}/blob/#" for device in WITHHOLDING]


async def black_holes(sim: ScenarioLab) -> None:
    await asyncio.sleep(3.0)
    for device in WITHHOLDING:
        sim.link(device).change(mtu_bytes=1500)


@pytest.mark.parametrize("withhold", [uplinks_that_carry_no_chunk, black_holes])
def test_children_that_offer_and_do_not_serve_hold_no_slots_under_a_quorum(
    withhold: Scenario,
) -> None:
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


# 5. A child that hangs while it prepares


async def hanging(sim: ScenarioLab) -> None:
    sim.hardware.hanging.add("device-0")


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


# 6. Children that are lost


@pytest.mark.parametrize(
    ("lost", "tree", "round_s"),
    [
        (
            ["device-3"],
            {"topology": ONE, "institution": {"rounds": 1, "closing": quorum(3, deadline_s=20.0)}},
            3.0,
        ),
        (
            ["institution-1", "device-2", "device-3"],
            {"cloud": {"closing": quorum(1, deadline_s=20.0)}},
            6.0,
        ),
    ],
)
def test_lost_nodes_cost_a_quorum_one_deadline_at_most(
    lost: list[str], tree: dict[str, Any], round_s: float
) -> None:
    async def losing(sim: ScenarioLab) -> None:
        await asyncio.sleep(2.0)
        for node in lost:
            sim.kill(node)

    outcome = lab(losing, tree={"rounds": 6} | tree)
    assert ended_with(outcome, CLOUD) == "", outcome
    elapsed = [0.0, *(float(row["elapsed_s"]) for row in outcome.rounds)]
    first, *seconds = [after - before for before, after in pairwise(elapsed)]
    assert len(seconds) == 5 and max(seconds) < round_s and first < 20.0 + round_s


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
    found: list[dict[str, Any]] = []

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

    def read(sim: ScenarioLab) -> None:
        (path,) = sim.agents.runs.glob("*/events.jsonl")
        found.extend(map(json.loads, path.read_text(encoding="utf-8").splitlines()))

    closing = {"rounds": 1, "closing": quorum(1, deadline_s=5.0)}
    outcome = lab(lose, tree={"rounds": 8, "institution": closing}, at_end=read)
    assert outcome.ok and any(what == "kill institution-0" for _, what in outcome.faults), outcome
    plans = [
        event for event in found if event["event"] == "plan" and event["node"] == "institution-0"
    ]
    assert len(plans) == 8 and plans[-1]["without"] == ["device-0"]
    assert not [plan for plan in plans if "unreported" in plan]
