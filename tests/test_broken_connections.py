"""Connections and brokers that go away, wills that come late, and nodes that are restarted in
mid-transfer.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from fedstrata.common.errors import DuplicateName, NoProgress
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import NodeState, Presence
from fedstrata.common.runtime.parent_endpoint import ParentEndpoint
from fedstrata.common.settings.links import LinkSettings
from fedstrata.deploy.simulation.simulated_broker import BrokerSession, SessionWill
from tests.helpers.broken import (
    assert_nothing_asked_twice,
    broker_killed_in_mid_transfer,
    connection_broken_in_mid_upload,
)
from tests.helpers.nodes import (
    FINE,
    LAB,
    PARENT,
    RUN,
    Middle,
    Watched,
    assert_models,
    child_of,
    drawn,
    introduced,
    layout_of,
    living,
    parent_of,
    play,
    serving,
    together,
)
from tests.helpers.sites import SimulatedSite, until, virtual


def states_of(site: SimulatedSite, name: str) -> list[NodeState]:
    """Return a node's published states in order."""
    bodies = [routed.body for routed in site.routed if routed.topic == topics.state(LAB, RUN, name)]
    found = [serialization.decode(body)[1] for body in bodies if body]
    return [presence.state for presence in found if isinstance(presence, Presence)]


# A broker that goes away


@pytest.mark.parametrize("store", ["empty", "current"])
@virtual
async def test_a_broker_that_is_killed_in_mid_transfer_costs_no_chunk_that_had_arrived(
    site: SimulatedSite, store: Literal["empty", "current"]
) -> None:
    async def kill() -> None:
        site.broker.kill()

    async def start() -> None:
        site.broker.start(store)

    await broker_killed_in_mid_transfer(site, kill=kill, start=start)


@pytest.mark.parametrize("store", ["empty", "current"])
@virtual
async def test_no_name_is_contested_after_a_broker_was_restarted(
    site: SimulatedSite, store: Literal["empty", "current"]
) -> None:
    layout = layout_of(4000)
    cloud = parent_of(site, [PARENT], layout=layout, name="cloud")
    middle = Middle(site, layout, children=["device-0"])
    device = child_of(site, "device-0")
    endpoints = [cloud, middle.up, middle.down, device]
    async with together(living(site, cloud), middle.live(), serving(site, device, layout, 4)):
        row = drawn(layout, 1)
        for global_round in range(3):
            played = await play(cloud, row, global_round=global_round)
            assert_models(played, row, layout=layout, places={PARENT: 4})
            site.broker.kill()
            await until(lambda: not any(endpoint.connection.up for endpoint in endpoints))
            site.broker.start(store)
        await play(cloud, row, global_round=3)
        with pytest.raises(DuplicateName, match="device-0"):
            await serving(site, child_of(site, "device-0"), layout, 4)


@pytest.mark.parametrize("wills", [False, True])
@virtual
async def test_a_broker_that_stays_away_ends_all_and_is_named(
    site: SimulatedSite, wills: bool
) -> None:
    """One that ends in order publishes every will; that the parent is gone reports nothing then."""
    layout, transfer = layout_of(4000), TransferSettings(idle_s=20.0)
    parent = parent_of(site, ["device-0"], layout=layout, transfer=transfer)
    child = child_of(site, "device-0", transfer=transfer)
    training = asyncio.Event()

    async def hold() -> None:
        training.set()
        await asyncio.Event().wait()

    serving_child = serving(site, child, layout, 0, hold)
    playing = living(site, parent, work=play(parent, drawn(layout, 1)))
    await training.wait()
    if wills:
        site.broker.terminate()
    else:
        site.broker.kill()
    ended_at = parent.now()
    for task in (playing, serving_child):
        with pytest.raises(NoProgress, match=rf"broker {site.address} was away for 20 s"):
            await task
    assert parent.now() - ended_at < 30


# A connection that breaks


@virtual
async def test_a_child_whose_connection_breaks_in_mid_upload_goes_on_where_it_was(
    site: SimulatedSite,
) -> None:
    await connection_broken_in_mid_upload(site, site.break_connection)


# Deaths that the broker notices late


class NoSubscriber:
    """A client that reads nothing."""

    def pending(self) -> int:
        return 0

    def deliver(self, topic: str, body: bytes, *, qos: int, retain: bool) -> None:
        pass

    def closed_by_broker(self) -> None:
        pass


def earlier_process(site: SimulatedSite, name: str) -> BrokerSession:
    """Return a connection of a node's earlier process, as a loss of power leaves it: its will comes
    with its end.
    """
    ready, lost = (
        serialization.encode(Presence(state, "device", samples=1), "earlier")
        for state in (NodeState.READY, NodeState.LOST)
    )
    topic = topics.state(LAB, RUN, name)
    session = site.broker.connect(f"earlier-{name}", NoSubscriber(), will=SessionWill(topic, lost))
    site.broker.publish(session, topic, ready, qos=0, retain=True)
    return session


@pytest.mark.parametrize("late", [PARENT, "device-0"])
@virtual
async def test_a_will_of_an_earlier_process_disturbs_no_transfer(
    site: SimulatedSite, late: str
) -> None:
    layout, link = layout_of(2_000_000), LinkSettings(down_mbit=16.0)
    earlier = earlier_process(site, late)
    parent = parent_of(site, ["device-0"], layout=layout, transfer=FINE, link=link)
    child = child_of(site, "device-0", transfer=FINE)
    watched = Watched(child)
    async with together(living(site, parent), serving(site, child, layout, 0)):
        row = drawn(layout, 1)
        playing = asyncio.create_task(play(parent, row))
        await until(lambda: len(watched.of(PARENT)) >= 20)
        site.broker.abort(earlier)
        states = states_of(site, late)
        assert states[-1] is NodeState.LOST
        await until(lambda: states_of(site, late)[-1] is NodeState.READY)  # it contradicts
        assert len(watched.of(PARENT)) < 60, "too late to disturb anything"
        assert_models(await playing, row, layout=layout, places={"device-0": 0})
    assert parent.session.link.sender.chunks_published == watched.chunks
    assert watched.restarts == 1


@virtual
async def test_a_child_whose_parent_never_answers_ends(site: SimulatedSite) -> None:
    """So that it goes back to look for a run."""
    earlier_process(site, PARENT)
    child = child_of(site, "device-0", transfer=TransferSettings(idle_s=30.0))
    with pytest.raises(NoProgress, match=f"{PARENT} was not there for 30 s"):
        await serving(site, child, layout_of(4000), 0)


# A parent that is restarted in mid-transfer


@virtual
async def test_a_parent_that_is_restarted_finds_its_child_with_what_it_had(
    site: SimulatedSite,
) -> None:
    """Though it answers for a while, as it has not come so far, that it does not hold the model."""
    layout, link = layout_of(2_000_000), LinkSettings(down_mbit=16.0)
    child = child_of(site, "device-0", transfer=FINE)
    watched = Watched(child)
    row = drawn(layout, 1)

    def parent() -> ParentEndpoint:
        return parent_of(site, ["device-0"], layout=layout, transfer=FINE, link=link)

    async with together(serving(site, child, layout, 0)):
        first = parent()
        crashed = living(site, first, work=play(first, row))
        await until(lambda: len(watched.of(PARENT)) >= 20)
        site.kill(first)
        second = parent()
        async with together(living(site, second), crashed):
            await until(lambda: child.refusals)
            assert "no longer holds" in child.refusals[0]
            watched.asks.clear()
            assert_models(await play(second, row), row, layout=layout, places={"device-0": 0})
    assert watched.asks
    assert_nothing_asked_twice(watched)
    again = (
        sum(one.session.link.sender.chunks_published for one in (first, second)) - watched.chunks
    )
    assert 0 <= again <= FINE.window


@virtual
async def test_the_time_that_a_broker_was_away_is_not_the_parents_absence(
    site: SimulatedSite,
) -> None:
    layout, transfer = layout_of(4000), TransferSettings(idle_s=20.0)
    parent = parent_of(site, ["device-0"], layout=layout, transfer=transfer)
    child = child_of(site, "device-0", transfer=transfer)
    row = drawn(layout, 1)
    async with together(living(site, parent), serving(site, child, layout, 0)):
        await introduced(child)
        site.link(PARENT).change(cut=True)
        site.broker.kill()
        await asyncio.sleep(15)
        site.broker.start()
        await until(lambda: child.connection.up)
        await asyncio.sleep(15)  # 30 s without the parent, 15 s of which its absence could be seen
        site.link(PARENT).change(cut=False)
        assert_models(await play(parent, row), row, layout=layout, places={"device-0": 0})
