"""How a child finds its parent's run: it asks, and the living parent answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fedstrata.common.errors import ConnectionFailed, DuplicateName
from fedstrata.common.metrics import Metrics
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.connection import Handlers
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import Alive, Message, NodeState, Presence, Question
from fedstrata.common.runtime import discovery
from fedstrata.common.runtime.discovery import Found, check_carried, discover
from fedstrata.common.runtime.world import REAL, Host, World
from fedstrata.deploy.brokers.broker import start
from fedstrata.deploy.simulation.simulated_broker import Routed
from tests.helpers.nodes import (
    EXPERIMENT,
    LAB,
    PARENT,
    RUN,
    announcing,
    layout_of,
    living,
    parent_of,
    together,
)
from tests.helpers.sites import SimulatedSite, until, virtual


def seeking(
    site: SimulatedSite, name: str = "device-0", parent: str = PARENT
) -> asyncio.Task[Found]:
    """Let a node look for its parent's run."""

    def build(world: World) -> asyncio.Task[Found]:
        host = Host(site.address, 30.0, Metrics(), lab=LAB, world=world)
        return asyncio.create_task(discover(host, name, parent))

    return site.make(name, build)


def leave_remains(site: SimulatedSite, run: str) -> None:
    """Leave what a parent that lost its power keeps on the broker."""
    for topic, message in (
        (topics.spec(LAB, run, PARENT), EXPERIMENT),
        (topics.state(LAB, run, PARENT), Presence(NodeState.READY, "institution")),
    ):
        site.inject(topic, serialization.encode(message, "dead"), retain=True)


@virtual
async def test_a_child_finds_the_run_of_its_living_parent(site: SimulatedSite) -> None:
    parent = announcing(site)
    async with together(living(site, parent)):
        assert await seeking(site) == Found(RUN, parent.identity.session, EXPERIMENT)


@virtual
async def test_a_child_that_comes_first_finds_the_run_as_soon_as_it_is_announced(
    site: SimulatedSite,
) -> None:
    found = seeking(site)
    await asyncio.sleep(100)
    parent = parent_of(site, ["device-0"], layout=layout_of(4000))
    async with together(living(site, parent)):
        await asyncio.sleep(10)
        assert not found.done(), "there is nothing to join yet"
        parent.announce(EXPERIMENT)
        announced_at = parent.now()
        assert (await found).announcement == EXPERIMENT
        assert parent.now() - announced_at < 3


@virtual
async def test_what_the_dead_left_is_no_run(site: SimulatedSite) -> None:
    leave_remains(site, "run-0")
    leave_remains(site, "run-9")
    found = seeking(site)
    await asyncio.sleep(100)
    assert not found.done()
    parent = announcing(site)
    async with together(living(site, parent)):
        assert (await found).run == RUN


@virtual
async def test_an_answer_to_nothing_that_was_asked_is_no_run(site: SimulatedSite) -> None:
    found = seeking(site)
    await asyncio.sleep(1)
    alive = Alive("another nonce", Presence(NodeState.READY, "institution"), EXPERIMENT)
    for body in (serialization.encode(alive, "stranger"), b"", b"\x00"):
        site.inject(topics.inbox(LAB, RUN, "device-0", PARENT), body)
    await asyncio.sleep(10)
    assert not found.done()
    found.cancel()
    await asyncio.wait((found,))


@virtual
async def test_a_child_asks_less_and_less_often(site: SimulatedSite) -> None:
    asked = list[float]()

    def note(message: Routed) -> None:
        if message.topic == topics.ask(LAB, PARENT, "device-0"):
            asked.append(site.loop.time())

    site.network.hooks.append(note)
    found = seeking(site)
    await asyncio.sleep(8)
    found.cancel()
    await asyncio.wait((found,))
    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert pauses == pytest.approx([0.25, 0.5, 1.0, 2.0, 2.0, 2.0], abs=0.05)


@virtual
async def test_a_child_that_finds_no_parent_names_the_others_once(
    site: SimulatedSite, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fedstrata.node")
    other = announcing(site)
    async with together(living(site, other)):
        found = seeking(site, parent="institution-o")  # mistyped
        await asyncio.sleep(1000)
        found.cancel()
        await asyncio.wait((found,))
    connected = (
        "device-0: connected to broker broker:1883, waiting for a run of institution-o in lab lab"
    )
    line = (
        "device-0 waits for institution-o of lab lab on broker broker:1883. Other parents: "
        f"{PARENT}."
    )
    lines = [record for record in caplog.records if record.getMessage().startswith("device-0")]
    assert [(record.levelname, record.getMessage()) for record in lines] == [
        ("INFO", connected),
        ("INFO", line),
    ]


def of_release(version: int, message: Message) -> bytes:
    """Return a message as another release would send it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serialization, "VERSION", version)
        return serialization.encode(message, "other")


@virtual
async def test_a_node_of_another_release_is_named_with_both_versions_by_either_side(
    site: SimulatedSite, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "fedstrata.discovery")
    versions = f"protocol version 99, this release uses {serialization.VERSION}"
    parent = announcing(site)
    async with together(living(site, parent)):
        await asyncio.sleep(1)  # it has subscribed
        site.inject(topics.ask(LAB, PARENT, "device-0"), of_release(99, Question("nonce")))
        site.inject(topics.ask(LAB, PARENT, "stranger"), of_release(99, Question("nonce")))
        await asyncio.sleep(1)
        ready = parent.session.readiness(parent.now())
        assert ready.missing == {"device-0": f"is of another release: {versions}"}
        assert ready.failed == {"device-0"}, "it is said at once"
        assert list(parent.session.link.other_releases) == ["device-0"]
    found = seeking(site, parent="institution-9")
    await asyncio.sleep(1)
    presence = of_release(99, Presence(NodeState.READY, "institution"))
    for _ in range(5):
        site.inject(topics.state(LAB, "run-9", "institution-9"), presence)
    await asyncio.sleep(1)
    found.cancel()
    await asyncio.wait((found,))
    assert caplog.messages == [f"device-0: institution-9 is of another release: {versions}"]


# Another process of the name


@virtual
async def test_a_second_node_of_a_name_ends_while_there_is_no_run(site: SimulatedSite) -> None:
    first = seeking(site)
    await asyncio.sleep(10)
    second, other = seeking(site), seeking(site, "device-1")
    with pytest.raises(
        DuplicateName,
        match=r"device-0 already waits for a run on broker broker.*, on host .* --name",
    ):
        await second
    assert not first.done() and not other.done()
    first.cancel()
    await asyncio.wait((first,))
    third = seeking(site)
    await asyncio.sleep(100)
    assert not third.done(), "the name is free again"
    for task in (third, other):
        task.cancel()


@virtual
async def test_of_two_nodes_of_a_name_that_come_together_one_stays(site: SimulatedSite) -> None:
    both = [seeking(site) for _ in range(2)]
    done, left = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(100)
    assert [type(task.exception()) for task in done] == [DuplicateName]
    assert not any(task.done() for task in left) and len(left) == 1
    left.pop().cancel()


@virtual
async def test_a_node_that_has_its_name_ends_by_no_answer_about_it(site: SimulatedSite) -> None:
    found, sent = seeking(site), site.routed
    await until(lambda: any(each.topic == topics.ask(LAB, "device-0", "device-0") for each in sent))
    (nonce,) = {
        message.nonce
        for each in sent
        if each.topic == topics.ask(LAB, "device-0", "device-0")
        and isinstance(message := serialization.decode(each.body)[1], Question)
    }
    await asyncio.sleep(10)
    late = serialization.encode(Alive(nonce, Presence(NodeState.INIT, "")), "another")
    site.inject(topics.answer(LAB, "device-0", "device-0"), late)
    site.inject(topics.answer(LAB, "device-0", "device-0"), b"\xff")
    await asyncio.sleep(10)
    assert not found.done()
    found.cancel()


# Names with dots, which a broker may not carry


class Broker:
    """A world with one connection, to a broker that sends back what `carries` lets pass."""

    def __init__(self, carries: Callable[[str], bool]) -> None:
        self.published: list[str] = []
        self._carries = carries

    token = staticmethod(REAL.token)
    wall = staticmethod(REAL.wall)

    def connection(self, address: BrokerAddress, handlers: Handlers, **rest: Any) -> Broker:
        self._handlers = handlers
        return self

    async def run(self, *, connect_timeout_s: float) -> None:
        await self._handlers.connected()
        await asyncio.Event().wait()

    def subscribe(self, topics: list[str], *, qos: int, refused: Callable[[str], None]) -> None:
        pass

    def publish(self, topic: str, payload: bytes, *, qos: int) -> None:
        self.published.append(topic)
        if self._carries(topic):
            self._handlers.received(topic, payload, False)


def check(broker: Broker, name: str, lab: str = "lab") -> None:
    world: Any = broker
    asyncio.run(
        check_carried(BrokerAddress("b"), name, lab=lab, connect_timeout_s=1.0, world=world)
    )


def test_a_name_without_dots_needs_no_message() -> None:
    broker = Broker(lambda topic: False)
    check(broker, "device-0")
    assert not broker.published


@pytest.mark.parametrize(
    ("name", "lab", "named"), [("pi.3", "lab", "pi.3 in lab lab"), ("pi", "a.b", "lab a.b")]
)
def test_a_broker_that_does_not_carry_dots_is_named(name: str, lab: str, named: str) -> None:
    with pytest.raises(
        ConnectionFailed, match=f"broker b:1883 does not carry the dot in the name of {named},"
    ):
        check(Broker(lambda topic: "." not in topic), name, lab)


def test_a_lost_message_is_sent_again() -> None:
    broker = Broker(lambda topic: len(broker.published) > 2)
    check(broker, "pi.3")
    assert len(broker.published) == 4


def test_a_broker_that_denies_the_other_name_too_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "CHECKS", 2)
    check(Broker(lambda topic: False), "pi.3")


def test_a_real_broker_carries_dots(tmp_path: Path) -> None:
    with start(directory=tmp_path) as broker:
        address = BrokerAddress(broker.host, broker.port)
        asyncio.run(check_carried(address, "pi.3", lab="my.lab", connect_timeout_s=10.0))


@virtual
async def test_the_parents_that_are_named_are_bounded(
    site: SimulatedSite, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fedstrata.node")
    for number in range(300):
        site.inject(topics.spec(LAB, f"run-{number}", f"institution-{number}"), b"x", retain=True)
    found = seeking(site, parent="institution-o")
    await asyncio.sleep(100)
    found.cancel()
    await asyncio.wait((found,))
    (line,) = [each for each in caplog.messages if "Other parents: " in each]
    assert line.count("institution-") == 1 + 100
