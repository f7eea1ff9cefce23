"""The roll of a lab: who answers what, across releases and under floods, and what is wrong by the
answers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, Final

import msgpack
import pytest
from xxhash import xxh3_64_digest

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment import reading
from fedstrata.common.host.examination import Finding
from fedstrata.common.metrics import Metrics
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import About, Here, Message, Question
from fedstrata.common.runtime.roll import (
    ASKERS_MOST,
    SESSIONS_KEPT,
    Answer,
    Resources,
    RollEntry,
    call_rolls,
)
from fedstrata.common.runtime.world import Host, World
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.cli import roles
from fedstrata.deploy.kits.answers import faults
from fedstrata.deploy.kits.lab_file import parse
from fedstrata.deploy.kits.units import digest
from fedstrata.deploy.simulation.simulated_broker import Routed
from tests.helpers.nodes import LAB, PARENT
from tests.helpers.sites import SimulatedSite, forever, until, virtual

NORTH: Final = parse(
    {
        "name": "north",
        "broker": "main",
        "machines": {"server": {"address": "10.0.0.1"}, "pi": {"address": "10.0.0.2"}},
        "brokers": {"main": {"machine": "server"}},
        "institutions": {"institution-0": {"machine": "server"}},
        "devices": [{"names": ["device-0..2"], "machine": "pi", "parent": "institution-0"}],
    }
)
TORCH: Final = Finding("PyTorch", True, True, "2.9.0")
NO_TORCH: Final = Finding("PyTorch", True, False, "not installed")


def sound(node: str) -> Answer:
    role, machine, parent = (
        ("institution", "server", "cloud")
        if node == "institution-0"
        else ("device", "pi", "institution-0")
    )
    has = (TORCH, Finding("data sets", False, False, "data: there is no such folder"))
    here = Here(
        "n",
        role,
        parent,
        "",
        version("fedstrata"),
        machine,
        "1 x cpu",
        "",
        digest(NORTH, machine),
        0.0,
        has,
    )
    return Answer(node, here, 0.1)


EVERY: Final = [sound(node) for node in NORTH.parents]


def with_fault(node: str, *, ahead_s: float = 0.0, **fields: Any) -> list[Answer]:
    return [
        replace(each, here=replace(each.here, **fields), ahead_s=ahead_s)
        if each.node == node
        else each
        for each in EVERY
    ]


def test_a_sound_lab_has_no_fault() -> None:
    assert faults(EVERY, NORTH) == {node: [] for node in sorted(NORTH.parents)}
    assert faults(EVERY, None) == {node: [] for node in sorted(NORTH.parents)}
    assert faults([], None) == {}


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (EVERY[:2] + EVERY[3:], "does not answer"),
        ([*EVERY, EVERY[2]], "2 nodes have this name, one on pi"),
        (
            with_fault("device-1", parent="cloud"),
            "its parent is cloud, in the lab's file institution-0",
        ),
        (
            with_fault("device-1", kit="0123456789ab"),
            "the kit of machine pi is not that of this lab file",
        ),
        (with_fault("device-1", release="0.0.1"), "release 0.0.1, here "),
        (with_fault("device-1", ahead_s=312.0), "its clock is 312 s ahead of this one's"),
        (with_fault("device-1", ahead_s=-40.0), "its clock is 40 s behind this one's"),
        (
            with_fault("device-1", findings=(Finding("memory", True, False, "0.1 of 1 GB"),)),
            "memory: 0.1 of 1 GB",
        ),
        (
            with_fault("device-1", findings=(replace(TORCH, note="2.7.1"),)),
            "PyTorch 2.7.1, most nodes have 2.9.0",
        ),
    ],
)
def test_each_fault_is_named_at_its_node(found: list[Answer], line: str) -> None:
    named = faults(found, NORTH)
    assert [node for node, problems in named.items() if problems] == ["device-1"]
    assert any(each.startswith(line) for each in named["device-1"])


def test_a_node_of_another_lab_file_is_named_and_one_without_a_kit_is_not() -> None:
    stranger = replace(EVERY[1], node="device-9")
    assert faults([*EVERY, stranger], NORTH)["device-9"] == ["the lab's file has no such node"]
    assert faults(with_fault("device-1", kit=""), NORTH)["device-1"] == [], "started by hand"


# Asked for on a broker


async def roll(site: SimulatedSite, expected: Sequence[str] = ()) -> list[Answer]:
    def build(world: World) -> asyncio.Task[list[Answer]]:
        asked = call_rolls(
            [site.address],
            lab=LAB,
            name="operator",
            wait_s=2.0,
            connect_timeout_s=30.0,
            expected=expected,
            world=world,
        )
        return asyncio.create_task(asked)

    return await site.make("laptop", build)


class Listed:
    """A node that does nothing but keep its entry in the roll."""

    def __init__(self, site: SimulatedSite, name: str) -> None:
        self.entry, self.task = site.make(name, partial(self._build, site, name))

    @staticmethod
    def _build(
        site: SimulatedSite, name: str, world: World
    ) -> tuple[RollEntry, asyncio.Task[None]]:
        host = Host(site.address, 30.0, Metrics(), lab=LAB, kit="c0ffee", world=world)
        found = Resources("2 x cpu", "mnist", (NO_TORCH,))
        entry = RollEntry(host, name, role="device", parent=PARENT, resources=lambda: found)

        async def keep() -> None:
            async with entry.kept():
                await forever()

        return entry, asyncio.create_task(keep())


async def listed(site: SimulatedSite, *names: str) -> list[Listed]:
    """Return nodes that are in the roll; nothing was routed since."""
    nodes = [Listed(site, name) for name in names]
    await asyncio.sleep(1)
    site.routed.clear()
    return nodes


def ask(site: SimulatedSite, asker: str, nonce: str = "n") -> None:
    question = serialization.encode(Question(nonce, About.ENTRY), "n")
    site.inject(topics.ask(LAB, topics.ALL, asker), question)


def answering(site: SimulatedSite, node: str, answer: Callable[[Here], Iterable[bytes]]) -> None:
    """Let a node answer the operator's roll calls, made of a device's entry."""

    def hook(message: Routed) -> None:
        topic = topics.parse(message.topic)
        if isinstance(topic, topics.AskTopic) and topic.asker == "operator":
            _, asked = serialization.decode(message.body)
            assert isinstance(asked, Question)
            here = Here(asked.nonce, "device", PARENT, "run-9", "9.1", "h", "", "", "", 0.0, ())
            for body in answer(here):
                site.inject(topics.answer(LAB, topic.asker, node), body)

    site.network.hooks.append(hook)


def answers_to(site: SimulatedSite, asker: str) -> list[bytes]:
    """Return the answers that were routed to an asker."""
    topics_to = f"{LAB}/answer/{asker}/"
    return [each.body for each in site.routed if topics_to in each.topic]


def of_the_next_release(message: Message, *more: object, session: str) -> bytes:
    """Return a message of the roll as the next version of the protocol may have it: with other
    fields at its end.
    """
    fields = [getattr(message, name) for name in type(message).__match_args__]
    shared, _ = serialization.SHARED[type(message)]
    code = serialization.KINDS.index(type(message))
    packed = msgpack.packb([serialization.VERSION + 1, session, code, *fields[:shared], *more])
    return xxh3_64_digest(packed) + packed


@virtual
async def test_the_roll_is_read_and_answered_across_versions(site: SimulatedSite) -> None:

    def answer(here: Here) -> list[bytes]:
        return [of_the_next_release(here, ["b"] * 3, 1.5, None, session="s1")]

    answering(site, "device-1", answer)
    _node = await listed(site, "device-0")
    old, new = sorted(await roll(site), key=lambda each: each.node)
    assert (old.node, old.other_release) == ("device-0", "")
    assert (new.node, new.here.role, new.here.parent, new.here.run) == (
        "device-1",
        "device",
        PARENT,
        "run-9",
    )
    ours = f"{version('fedstrata')} (protocol {serialization.VERSION})"
    theirs = f"9.1 (protocol {serialization.VERSION + 1})"
    assert (
        new.other_release
        == f"it is of release {theirs}, this is {ours}: install one release everywhere"
    )
    assert faults([old, new], None)["device-1"] == [new.other_release]
    site.inject(
        topics.ask(LAB, topics.ALL, "next"),
        of_the_next_release(Question("nonce", About.ENTRY), 7, session="s2"),
    )
    await until(lambda: answers_to(site, "next"))
    _, found = serialization.decode(answers_to(site, "next")[0])
    assert isinstance(found, Here) and (found.nonce, found.role) == ("nonce", "device")


def test_nodes_of_another_release_are_left_out_of_the_lab_that_is_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def answer(node: str, protocol: int = serialization.VERSION) -> Answer:
        here = Here("n", "device", CLOUD, "", "9.1", "h", "", "", "", 0.0, ())
        return Answer(node, here, 0.0, protocol)

    line = f"device-1 is left out: it is of release 9.1 (protocol {serialization.VERSION + 1})"
    found = [answer("device-0"), answer("device-1", serialization.VERSION + 1)]
    others = {each.node: each.other_release for each in found if each.other_release}
    assert roles._topology(found, others) == {"institutions": 0, "devices": ["device-0"]}
    assert line in capsys.readouterr().err
    with pytest.raises(
        InvalidExperiment, match=r"no device is there .*Fix what is left out as above: 1 node"
    ):
        roles._topology(found[1:], others)
    assert line in capsys.readouterr().err


def test_an_experiment_names_all_its_nodes_that_cannot_take_part(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lab = reading.parse({"topology": {"institutions": 1, "devices": 4}})
    roles._check_fit(lab, {"stranger": "x"})
    old = {f"device-{i}": f"it is of release 0.{i}" for i in range(4)}
    problem = (
        r"nodes = 'device-0, device-1 and 2 others': 4 of the experiment's nodes cannot "
        r"take part, as above"
    )
    with pytest.raises(InvalidExperiment, match=problem):
        roles._check_fit(lab, old)
    lines = capsys.readouterr().err
    assert all(f"{node} cannot take part: {reason}" in lines for node, reason in old.items())


@virtual
async def test_a_node_that_answers_the_roll_all_the_time_hides_nobody(site: SimulatedSite) -> None:
    """As many sessions as it likes, and messages that no node sends."""
    sent: list[str] = []

    def answer(here: Here) -> Iterator[bytes]:
        for _ in range(50):
            sent.append(f"s{len(sent)}")
            yield serialization.encode(replace(here, hardware="x" * 2000), sent[-1])
        yield bytes(30_000_000)

    answering(site, "device-6", answer)
    _node = await listed(site, "device-0")
    found = await roll(site)
    assert [each.node for each in found] == ["device-0", *["device-6"] * SESSIONS_KEPT] and len(
        sent
    ) == 200
    assert {len(each.here.hardware) for each in found if each.node == "device-6"} == {1000}


@virtual
async def test_the_roll_has_who_answers_and_what_they_do(site: SimulatedSite) -> None:
    assert await roll(site) == []
    first, _second = await listed(site, "device-0", "device-1")
    first.entry.run = "run-7"
    found = await roll(site)
    assert [each.node for each in found] == ["device-0", "device-1"]
    assert [(each.here.role, each.here.parent, each.here.run) for each in found] == [
        ("device", PARENT, "run-7"),
        ("device", PARENT, ""),
    ]
    has = ("2 x cpu", "mnist", "c0ffee", (NO_TORCH,), version("fedstrata"))
    assert all(
        (h.hardware, h.data, h.kit, h.findings, h.release) == has
        for h in (each.here for each in found)
    )
    assert all(abs(each.ahead_s) < 5 for each in found)
    began = asyncio.get_running_loop().time()
    assert len(await roll(site, expected=["device-0", "device-1"])) == 2
    assert asyncio.get_running_loop().time() < began + 0.5, "all that are expected have answered"
    _of_the_same_name = await listed(site, "device-1")
    assert [each.node for each in await roll(site)] == ["device-0", "device-1", "device-1"]


@virtual
async def test_one_that_asks_for_the_roll_all_the_time_takes_no_answer_from_another_one(
    site: SimulatedSite,
) -> None:
    _node = await listed(site, "device-0")
    for nonce in ("n" * 65, "\x1b" * 11):  # longer than 64 characters, escaped
        ask(site, "shouter", nonce)
    for asker in [*["mallory"] * 1000, "person", *(f"x{number}" for number in range(100))]:
        ask(site, asker)
    await asyncio.sleep(0.05)
    answers = [topics.parse(each.topic) for each in site.routed]
    answered = Counter(topic.asker for topic in answers if isinstance(topic, topics.AnswerTopic))
    assert answered["mallory"] == answered["person"] == 1 and not answered["shouter"]
    assert answered.total() == ASKERS_MOST


@virtual
async def test_a_flood_of_roll_calls_has_ten_answers_a_second(site: SimulatedSite) -> None:
    _node = await listed(site, "device-0")
    for number in range(200):
        ask(site, f"stranger-{number}")
        site.inject(topics.ask(LAB, topics.ALL, "stranger"), b"\x00")
        await asyncio.sleep(0.01)
    assert 18 <= sum("/answer/" in routed.topic for routed in site.routed) <= 21
