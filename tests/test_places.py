"""Places of devices that the experiment does not name: how they are taken, and that they are given
back.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest

from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.attendance import Attendance
from fedstrata.common.protocol.messages import NodeState, Presence, Question
from fedstrata.common.protocol.peer_link import SEEKER_READ_S
from tests.helpers.scenarios import played, run_of
from tests.simulation.lab import Scenario, ScenarioLab
from tests.simulation.monitor import endpoints

LAB: Final[dict[str, Any]] = {
    "rounds": 6,
    "links": {"check": "off"},
    "topology": {"institutions": 2, "devices": 4},
    "transfer": {"idle_s": 20.0, "keepalive_s": 5},
    "cloud": {"min_available": 2, "start_wait_s": 10},
    "institution": {"rounds": 2, "min_available": 0.5, "start_wait_s": 5, "entering": 10},
}
GUESTS: Final = tuple(f"device-{number}" for number in range(10, 20))


def visited(at_s: float, until_s: float, *, clean: bool) -> Scenario:
    """Return the scenario in which ten guests take part below institution-1, and leave together."""

    async def disturb(lab: ScenarioLab) -> None:
        await asyncio.sleep(at_s)
        for name in GUESTS:
            lab.start(name, parent="institution-1")
        await asyncio.sleep(until_s - at_s)
        for name in GUESTS:
            if clean:
                lab.terminate(name)
            else:
                lab.kill(name)

    return disturb


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize(
    "times", [(0.5, 3.0), *((3.0, until_s) for until_s in (9.0, 9.7, 10.4, 11.1))]
)
def test_guests_that_leave_do_not_raise_what_a_round_needs(
    times: tuple[float, float], *, clean: bool
) -> None:
    """Half of the children are needed: of the two that the experiment names, and those that are
    present.

    A named one leaves with the guests, before the first round or in one: only while one is away do
    the others count.
    """

    async def disturb(lab: ScenarioLab) -> None:
        await visited(*times, clean=clean)(lab)
        lab.kill("device-2")

    outcome, _, tables = played(LAB, disturb, time_limit_s=600)
    assert not outcome.ended["cloud"] and not outcome.ended["institution-1"], outcome.result
    below = [row for row in tables["devices"] if row["node"].startswith("cloud/institution-1/")]
    worked = [
        (row["global_round"], row["node"].rpartition("/")[2])
        for row in below
        if int(row["local_rounds"])
    ]
    assert [name for global_round, name in worked if global_round == "6"] == ["device-3"]
    if times[1] > 3.0:
        assert {name for _, name in worked} >= {"device-2", *GUESTS}


def test_present_guests_count_when_a_round_opens() -> None:
    """Of two named devices and ten guests half are needed: six, which are there though both named
    ones are gone.
    """

    async def disturb(lab: ScenarioLab) -> None:
        await asyncio.sleep(3.0)
        for name in GUESTS:
            lab.start(name, parent="institution-1")
        await asyncio.sleep(5.0)
        for name in ("device-2", "device-3"):
            lab.kill(name)

    outcome, found, _ = played(LAB, disturb)
    assert not outcome.ended["cloud"] and not outcome.ended["institution-1"], outcome.result
    absent = [event.get("absent", []) for event in found if event["node"] == "institution-1"]
    assert absent[-1] == ["device-2", "device-3"]


def test_children_that_are_missing_are_named_by_what_matters_first() -> None:
    """Those that gave up, then those of the experiment in its order, then those that have entered
    and are present.
    """
    attendance = Attendance([f"device-{number}" for number in (2, 10, 11)])
    for name in ("guest-1", "guest-2"):
        attendance.add(name)
    for name, state in (
        ("device-11", NodeState.FAILED),
        ("guest-1", NodeState.INIT),
        ("guest-2", NodeState.LOST),
    ):
        attendance.receive(
            name, "session", Presence(state, "device", reason="no data"), published=True
        )
    found = attendance.readiness(hanging=set(), other_releases={}, idle_s=20.0)
    assert found.text == (
        "device-11 gave up: no data; device-2 has not joined yet; device-10 has not joined yet; "
        "guest-1 prepares"
    )
    assert not attendance.complete
    for name in ("device-2", "device-10", "device-11", "guest-1"):
        attendance.receive(
            name, "s", Presence(NodeState.READY, "device", samples=1), published=False
        )
    assert attendance.complete  # nobody waits for guest-2


WEEK: Final[dict[str, Any]] = {
    **LAB,
    "rounds": 40,
    "transfer": {"idle_s": 8.0, "keepalive_s": 5},
    "institution": {**LAB["institution"], "entering": 4},
}
TWO_TIERS: Final[dict[str, Any]] = {
    **{
        key: value for key, value in WEEK.items() if key not in ("institution", "topology", "cloud")
    },
    "topology": {"institutions": 0, "devices": 3},
    "cloud": {"min_available": 0.5, "start_wait_s": 5, "entering": 4},
}


def bytes_of(rows: list[dict[str, str]], node: str) -> int:
    """Return the message bytes of a device's link, both ways."""
    return sum(
        int(row["message_bytes"])
        for row in rows
        if node in (row["from"], row["to"]) and row["kind"] == "all"
    )


@pytest.mark.parametrize(("tree", "parent"), [(WEEK, "institution-1"), (TWO_TIERS, "cloud")])
def test_places_are_given_back(tree: dict[str, Any], parent: str) -> None:
    """Ten visitors come one after another, each for some rounds; the first one comes again at the
    end.
    """

    read: set[str] = set()

    async def visits(lab: ScenarioLab) -> None:
        await asyncio.sleep(3.0)
        for name in (*GUESTS, GUESTS[0]):
            lab.start(name, parent=parent)
            await asyncio.sleep(5.0)
            lab.kill(name)
            await asyncio.sleep(3.0)
        lab.start("device-99", parent=parent)
        await asyncio.sleep(1.0)
        for broker in lab.network.brokers.values():
            for session in broker.sessions.values():
                read.update(session.filters)

    outcome, _, tables = played(tree | {"rounds": 90}, visits, time_limit_s=900)
    assert not outcome.ended["cloud"], outcome.result
    # nobody reads the topics of one whose place was given back
    assert any("/device-99" in each for each in read)
    assert not any(f"/{GUESTS[1]}" in each for each in read)
    worked: dict[str, int] = {}
    for row in tables["devices"]:
        name = row["node"].rpartition("/")[2]
        worked[name] = worked.get(name, 0) + int(row["local_rounds"])
    assert worked.keys() >= {*GUESTS, "device-99"} and all(
        worked[name] for name in (*GUESTS, "device-99")
    ), worked
    # The ledger has each visitor's bytes, also after it has left: one that returned has those of
    # both stays.
    assert bytes_of(tables["links"], GUESTS[0]) > 1.5 * min(
        bytes_of(tables["links"], name) for name in GUESTS[1:]
    )
    assert all(bytes_of(tables["links"], name) > 2 * 10_000 * worked[name] for name in GUESTS)


def test_a_storm_of_visitors_changes_nothing() -> None:
    """Of forty names that ask, join and vanish, none keeps a place from one that comes later."""

    async def storm(lab: ScenarioLab) -> None:
        for number in range(40):
            name = f"device-{100 + number}"
            lab.start(name, parent="institution-1")
            await asyncio.sleep(0.7)
            lab.kill(name)
        await asyncio.sleep(WEEK["transfer"]["idle_s"])
        lab.start("device-99", parent="institution-1")

    outcome, _, tables = played(WEEK, storm, time_limit_s=900)
    assert outcome.virtual_s < 1.3 * played(WEEK)[0].virtual_s
    assert not outcome.ended["cloud"], outcome.result
    assert any(
        int(row["local_rounds"]) for row in tables["devices"] if row["node"].endswith("/device-99")
    )
    own = {f"cloud/institution-1/device-{number}" for number in (2, 3)}
    rounds = [row for row in tables["devices"] if row["node"] in own]
    assert len(rounds) == 2 * 40 and all(row["local_rounds"] == "2" for row in rounds)


def test_a_question_takes_no_place() -> None:
    """A member's certificate lets it ask for every parent under its name; one that joins finds the
    only place free.
    """
    tree = {**LAB, "institution": {**LAB["institution"], "entering": 1}}

    async def ask(lab: ScenarioLab) -> None:
        await asyncio.sleep(2.0)
        for number in range(300):
            for node in ("device-0", f"stranger-{number}"):
                body = serialization.encode(Question(f"{number:016x}", run=""), f"{number:016x}")
                lab.inject(topics.ask("lab", "institution-1", node), body, qos=0)
            await asyncio.sleep(0.01)
        await asyncio.sleep(SEEKER_READ_S)
        lab.start("device-10", parent="institution-1")

    outcome, _, tables = played(tree | {"rounds": 20}, ask)
    assert not outcome.ended["cloud"], outcome.result
    worked = [
        row
        for row in tables["devices"]
        if row["node"].endswith("/device-10") and int(row["local_rounds"])
    ]
    assert {row["node"] for row in worked} == {"cloud/institution-1/device-10"}


def test_a_presence_takes_a_place_at_the_parent_that_it_names_alone() -> None:
    tree = {**LAB, "institution": {**LAB["institution"], "entering": 1}, "rounds": 20}

    async def pretend(lab: ScenarioLab) -> None:
        await asyncio.sleep(2.0)
        run = run_of(lab)
        for parent in ("institution-0", "institution-1"):
            question = serialization.encode(Question("0" * 16, run=run), "5" * 16)
            lab.inject(topics.ask("lab", parent, "stranger"), question, qos=0)
        await asyncio.sleep(0.5)
        for claimed in ("", "institution-0"):
            presence = Presence(NodeState.READY, "device", samples=9, parent=claimed)
            lab.inject(
                topics.state("lab", run, "stranger"), serialization.encode(presence, "5" * 16)
            )
        await asyncio.sleep(0.5)
        for number, parent in ((10, "institution-0"), (11, "institution-1")):
            lab.start(f"device-{number}", parent=parent)

    outcome, _, tables = played(tree, pretend)
    worked = {row["node"] for row in tables["devices"] if int(row["local_rounds"])}
    assert "cloud/institution-1/device-11" in worked, outcome.result
    assert "cloud/institution-0/device-10" not in worked


def test_a_presence_that_names_an_impossible_parent_changes_nothing() -> None:
    """No device may move in this lab: one that claims it is asked again, and its round goes on."""

    async def claim(lab: ScenarioLab) -> None:
        await asyncio.sleep(3.0)
        run = run_of(lab)
        (endpoint,) = endpoints(lab, "device-2", last=True)
        presence = Presence(NodeState.READY, "device", samples=100, parent="institution-0")
        body = serialization.encode(presence, endpoint.identity.session)
        lab.inject(topics.state("lab", run, "device-2"), body)

    plain = {**LAB, "institution": {"rounds": 2}, "cloud": {}}
    outcome, undisturbed = played(plain, claim)[0], played(plain)[0]
    assert outcome.ok and outcome.digest == undisturbed.digest, outcome.result
    assert any("names 'institution-0' as its parent" in line for line in outcome.warnings), (
        outcome.warnings
    )
