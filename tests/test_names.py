"""Two nodes of one name: the living one keeps it, and the other ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.errors import DuplicateName
from common.experiment.links import LinkSettings
from common.experiment.schema import TransferSettings
from common.model.layout import ModelLayout
from common.net.address import BrokerAddress
from common.protocol import serialization, topics
from common.protocol.identity import Claim, Identity
from common.protocol.messages import NodeState, Presence
from common.runtime.child_endpoint import ChildEndpoint
from common.runtime.parent_endpoint import ParentEndpoint
from common.runtime.world import World, new_session
from tests.helpers.nodes import (
    LAB,
    PARENT,
    RUN,
    Middle,
    assert_models,
    child_of,
    drawn,
    layout_of,
    living,
    parent_of,
    play,
    serving,
    together,
)
from tests.helpers.sites import SimulatedSite, until, virtual


def test_the_sessions_that_a_name_challenges_are_bounded() -> None:
    claim = Claim()
    for number in range(100):
        claim.challenge(f"s{number}")
        claim.challenge(f"s{number}")
    assert list(claim.challenged) == [f"s{number}" for number in range(84, 100)]


class Hold:
    """Work that has begun and goes on when it is let."""

    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        self.begun.set()
        await self.go_on.wait()


@virtual
async def test_a_second_device_of_a_name_ends_and_the_first_goes_on(site: SimulatedSite) -> None:
    layout = layout_of(400_000)
    names = ["device-0", "device-1"]
    parent = parent_of(site, names, layout=layout)
    hold = Hold()
    tasks = [serving(site, child_of(site, name), layout, place, hold) for place, name in enumerate(names)]
    async with together(living(site, parent), *tasks):
        row = drawn(layout, 1)
        playing = asyncio.create_task(play(parent, row))
        await hold.begun.wait()
        for _ in range(3):
            with pytest.raises(DuplicateName) as raised:
                await serving(site, child_of(site, "device-0"), layout, 5)
            assert "device-0" in str(raised.value)
            assert str(site.address) in str(raised.value)
            assert raised.value.exit_code == 3
        hold.go_on.set()
        assert_models(await playing, row, layout=layout, places={"device-0": 0, "device-1": 1})


@virtual
async def test_a_second_institution_of_a_name_harms_neither_cloud_nor_devices(site: SimulatedSite) -> None:
    layout = layout_of(400_000)
    cloud = parent_of(site, [PARENT], layout=layout, name="cloud")
    hold = Hold()
    device = serving(site, child_of(site, "device-0"), layout, 3, hold)
    first = Middle(site, layout, children=["device-0"])
    async with together(living(site, cloud), first.live(), device):
        row = drawn(layout, 1)
        playing = asyncio.create_task(play(cloud, row))
        await hold.begun.wait()
        for _ in range(10):
            with pytest.raises(DuplicateName, match=PARENT):
                await Middle(site, layout, children=["device-0"]).live()
        hold.go_on.set()
        assert_models(await playing, row, layout=layout, places={PARENT: 3})


@virtual
async def test_a_second_cloud_ends_even_with_a_run_of_its_own(site: SimulatedSite) -> None:
    layout = layout_of(4000)
    first = parent_of(site, ["device-0"], layout=layout, name="cloud")
    child = serving(site, child_of(site, "device-0", parent="cloud"), layout, 2)
    async with together(living(site, first), child):
        row = drawn(layout, 1)
        await play(first, row)
        second = parent_of(site, ["device-0"], layout=layout, name="cloud", run="run-2")
        with pytest.raises(DuplicateName, match=rf"cloud is already alive on broker {site.address}.*run"):
            await living(site, second)
        assert_models(await play(first, row, global_round=1), row, layout=layout, places={"device-0": 2})


@pytest.mark.parametrize("role", ["device", "institution"])
@virtual
async def test_of_two_that_start_at_once_exactly_one_goes_on(site: SimulatedSite, role: str) -> None:
    def start(layout: ModelLayout) -> asyncio.Task[Any]:
        if role == "device":
            return serving(site, child_of(site, "device-7"), layout, 0)
        return Middle(site, layout, children=["device-0"]).live()

    layout = layout_of(4000)
    for _ in range(20):
        contest = {start(layout) for _ in range(2)}
        done, left = await asyncio.wait(contest, return_when=asyncio.FIRST_COMPLETED)
        loser = done.pop()
        assert isinstance(loser.exception(), DuplicateName)
        assert left, "both gave up"
        # The winner gets no message of it; but a newcomer is answered, so the winner has had its chance.
        with pytest.raises(DuplicateName):
            await start(layout)
        (winner,) = left
        assert not winner.done(), winner
        winner.cancel()
        await asyncio.wait(left)


@virtual
async def test_who_lost_a_name_leaves_no_last_state_that_ends_the_other(site: SimulatedSite) -> None:
    # The institution's devices are on a broker of their own; only on the cloud's is its double alive.
    below = BrokerAddress("site")
    site.network.add_broker(below.host)

    def states() -> list[NodeState]:
        topic = topics.state(LAB, RUN, PARENT)
        bodies = [routed.body for routed in site.routed if (routed.broker, routed.topic) == (below.host, topic)]
        found = [serialization.decode(body)[1] for body in bodies if body]
        return [presence.state for presence in found if isinstance(presence, Presence)]

    def build(world: World) -> tuple[ChildEndpoint, ParentEndpoint]:
        identity = Identity(RUN, PARENT, "institution", new_session(world))
        up = ChildEndpoint(
            site.address, identity, parent="cloud", transfer=TransferSettings(), link=LinkSettings(), world=world
        )
        down = ParentEndpoint(
            below, identity, links={"device-0": LinkSettings()}, transfer=TransferSettings(), world=world
        )
        return up, down

    layout = layout_of(4000)
    first = child_of(site, PARENT, parent="cloud")
    async with together(serving(site, first, layout, 0)):
        with pytest.raises(DuplicateName):
            await living(site, *site.make(PARENT, build))
        await until(lambda: NodeState.LOST in states())
        assert NodeState.FAILED not in states()
