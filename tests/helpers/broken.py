"""Transfers that break half-way, on a simulated broker as on a real one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from fedstrata.common.runtime.child_endpoint import ChildEndpoint
from fedstrata.common.settings.links import LinkSettings
from tests.helpers.nodes import (
    FINE,
    Watched,
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
from tests.helpers.sites import Site, until

CHUNKS: Final = -(-2_000_000 // 32_768)
NAMES: Final = ["device-0", "device-1"]
PLACES: Final = {"device-0": 0, "device-1": 1}


def assert_nothing_asked_twice(watched: Watched) -> None:
    """Check that no ask lacks a chunk that had arrived."""
    for key, lacking, here in watched.asks:
        assert not lacking & here, key


async def broker_killed_in_mid_transfer(
    site: Site, *, kill: Callable[[], Awaitable[None]], start: Callable[[], Awaitable[None]]
) -> None:
    """Kill the broker while models are on their way down, and again on their way up."""
    layout, link = layout_of(2_000_000), LinkSettings(up_mbit=16.0, down_mbit=16.0)
    parent = parent_of(site, NAMES, layout=layout, transfer=FINE, link=link)
    children = [child_of(site, name, transfer=FINE, link=link) for name in NAMES]
    endpoints = [parent, *children]
    watched = [Watched(endpoint) for endpoint in endpoints]
    begun = [0, 0]

    def counted(place: int) -> Callable[[], Awaitable[None]]:
        async def begin() -> None:
            begun[place] += 1

        return begin

    async def break_when(receiver: Watched, transfers: int) -> None:
        def half() -> bool:
            arrived = receiver.arrived.values()
            return len(arrived) == transfers and min(map(len, arrived)) >= CHUNKS // 2

        await until(half)
        assert all(len(indices) < CHUNKS for indices in receiver.arrived.values()), (
            "too late to break anything"
        )
        await kill()
        await until(lambda: not any(endpoint.connection.up for endpoint in endpoints))
        receiver.asks.clear()
        await start()

    tasks = [
        serving(site, child, layout, place, counted(place)) for place, child in enumerate(children)
    ]
    async with together(living(site, parent), *tasks):
        row = drawn(layout, 1)
        playing = asyncio.create_task(play(parent, row))
        await break_when(watched[1], 1)
        await break_when(watched[0], 2)
        assert_models(await playing, row, layout=layout, places=PLACES)
        assert begun == [1, 1], "a device trained twice"
        for one in watched:
            assert one.asks
            assert_nothing_asked_twice(one)
        assert all(endpoint.connection.reconnects >= 2 for endpoint in endpoints)
        assert_models(await play(parent, row, global_round=1), row, layout=layout, places=PLACES)


async def connection_broken_in_mid_upload(
    site: Site, break_connection: Callable[[ChildEndpoint], None]
) -> None:
    """Break a child's connection twice during its upload."""
    layout, link = layout_of(2_000_000), LinkSettings(up_mbit=16.0)
    parent = parent_of(site, NAMES, layout=layout, transfer=FINE)
    children = [child_of(site, name, transfer=FINE, link=link) for name in NAMES]
    watched = Watched(parent)
    tasks = [serving(site, child, layout, place) for place, child in enumerate(children)]
    async with together(living(site, parent), *tasks):
        row = drawn(layout, 1)
        playing = asyncio.create_task(play(parent, row))
        for _ in range(2):
            # a busy machine may bring many at once
            goal = min(len(watched.of("device-0")) + 15, CHUNKS - 2)
            await until(lambda goal=goal: len(watched.of("device-0")) >= goal)
            breaks = children[0].connection.reconnects
            break_connection(children[0])
            await until(lambda breaks=breaks: children[0].connection.reconnects > breaks)
        assert_models(await playing, row, layout=layout, places=PLACES)
        assert_nothing_asked_twice(watched)
        assert parent.connection.reconnects == 0
