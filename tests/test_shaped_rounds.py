"""Rounds over links that fedstrata shapes itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from common.experiment.links import LinkSettings
from common.experiment.schema import TransferSettings
from common.experiment.tiers import Closing
from tests.helpers.nodes import (
    FINE,
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


@virtual
async def test_children_on_fast_links_do_not_wait_for_those_on_slow_ones(site: SimulatedSite) -> None:
    """Six on links of 80 Mbit/s, five on slow ones, each of another rate: six streams, chunks of one size on five."""
    layout, chunks = layout_of(2_000_000), -(-2_000_000 // 32_768)
    fast = {f"fast-{i}": LinkSettings(down_mbit=80.0) for i in range(6)}
    slow = {f"slow-{i}": LinkSettings(down_mbit=0.3 + i / 100) for i in range(5)}
    links = fast | slow
    parent = parent_of(site, list(links), layout=layout, transfer=FINE, links=links)
    children = {name: child_of(site, name, transfer=FINE, link=links[name]) for name in links}
    begun: list[str] = []

    def note(name: str) -> Callable[[], Awaitable[None]]:
        async def begin() -> None:
            begun.append(name)

        return begin

    tasks = [serving(site, child, layout, place, note(name)) for place, (name, child) in enumerate(children.items())]
    async with together(living(site, parent), *tasks):
        await parent.gather(Closing())
        await introduced(*children.values())
        row, opened = drawn(layout, 1), parent.now()
        played = await play(parent, row, closing=Closing(rule="quorum", quorum=6, deadline_s=0.001))
        places = {name: place for place, name in enumerate(links) if name in fast}
        assert_models(played, row, layout=layout, places=places)
        assert sorted(begun) == sorted(fast) and sorted(played.missing) == sorted(slow)
        assert parent.now() - opened < 0.5  # 2 MB at 80 Mbit/s are 0.2 s
        # One publication of each chunk for all that are fast; the slow ones, 50 s each, have hardly begun.
        assert chunks <= parent.session.link.sender.chunks_published < chunks + 5 * chunks // 2
        assert parent.session.link.sender.chunks_repeated == 0


@pytest.mark.parametrize("shaped", [True, False])
@virtual
async def test_a_small_model_goes_in_chunks_where_the_link_is_slow(site: SimulatedSite, *, shaped: bool) -> None:
    """Whoever keeps the rates: what is declared decides what travels inside an announcement, and the chunks."""
    layout, mbit = layout_of(100_000), 0.8 if shaped else 0.01  # a second, or more than a minute if it were kept
    link = LinkSettings(up_mbit=mbit, down_mbit=mbit)
    parent = parent_of(site, ["device-0"], layout=layout, link=link, shaped=shaped)
    child = child_of(site, "device-0", link=link, shaped=shaped)
    async with together(living(site, parent), serving(site, child, layout, 0)):
        await parent.gather(Closing())
        await introduced(child)
        row, opened = drawn(layout, 1), parent.now()
        assert_models(await play(parent, row), row, layout=layout, places={"device-0": 0})
        seconds = parent.now() - opened
        assert 1.9 < seconds < 2.2 if shaped else seconds < 1
        for endpoint in (parent, child):
            chunks = -(-100_000 // (50_000 if shaped else 32_768))
            assert endpoint.session.link.sender.chunks_published == chunks


@virtual
async def test_every_message_comes_later_by_the_delay(site: SimulatedSite) -> None:
    layout, link = layout_of(400_000), LinkSettings(delay_ms=100.0)
    parent = parent_of(site, ["device-0"], layout=layout, link=link)
    child = child_of(site, "device-0", link=link)
    async with together(living(site, parent), serving(site, child, layout, 0)):
        await parent.gather(Closing())
        await introduced(child)
        row, begun = drawn(layout, 1), parent.now()
        assert_models(await play(parent, row), row, layout=layout, places={"device-0": 0})
        # Task, ask, chunk, result, ask, chunk: six ways one after the other, and nothing is sent twice for it.
        assert 0.6 <= parent.now() - begun < 0.7
        assert [endpoint.session.link.sender.chunks_published for endpoint in (parent, child)] == [1, 1]


@virtual
async def test_the_goodbye_waits_for_a_shaped_link(site: SimulatedSite) -> None:
    """A farewell that still waits for its link when a node ends would be lost, and its counts with it."""
    layout, link = layout_of(4000), LinkSettings(delay_ms=300.0)
    parent = parent_of(site, ["device-0"], layout=layout, link=link)
    child = child_of(site, "device-0", link=link)
    async with together(living(site, parent)):
        await living(site, child, work=child.farewell((), timeout_s=30))
        await until(lambda: "device-0" in parent.session.farewells)


@virtual
async def test_a_model_takes_what_its_link_takes_though_the_broker_is_slower(site: SimulatedSite) -> None:
    """Where the path is slower than declared, nothing is lost, and nothing is sent twice for it."""
    layout = layout_of(1_000_000)
    link = LinkSettings(up_mbit=80.0, down_mbit=80.0)
    parent = parent_of(site, ["device-0"], layout=layout, transfer=TransferSettings(chunk_bytes=32_768), link=link)
    child = child_of(site, "device-0", transfer=TransferSettings(chunk_bytes=32_768), link=link)
    site.link("device-0").change(down_rate=1e5, up_rate=1e5)
    async with together(living(site, parent), serving(site, child, layout, 0)):
        await parent.gather(Closing())
        await introduced(child)
        row, begun = drawn(layout, 1), parent.now()
        assert_models(await play(parent, row), row, layout=layout, places={"device-0": 0})
        assert 20 < parent.now() - begun < 22
        assert [endpoint.session.link.sender.chunks_repeated for endpoint in (parent, child)] == [0, 0]
