"""Rounds over links that fedstrata shapes itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from fedstrata.common.protocol.sender import Sender
from fedstrata.common.settings.closing import Closing
from fedstrata.common.settings.links import LinkSettings
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


async def round_of(
    site: SimulatedSite, size: int, link: LinkSettings, **options: Any
) -> tuple[float, Sender, Sender]:
    """Play a round with one child and a model of `size` bytes; return its seconds, and the senders
    of both ends.
    """
    layout = layout_of(size)
    parent = parent_of(site, ["device-0"], layout=layout, link=link, **options)
    child = child_of(site, "device-0", link=link, **options)
    async with together(living(site, parent), serving(site, child, layout, 0)):
        await parent.gather(Closing())
        await introduced(child)
        row, begun = drawn(layout, 1), parent.now()
        assert_models(await play(parent, row), row, layout=layout, places={"device-0": 0})
        return parent.now() - begun, parent.session.link.sender, child.session.link.sender


@virtual
async def test_children_on_fast_links_do_not_wait_for_those_on_slow_ones(
    site: SimulatedSite,
) -> None:
    """Six on links of 80 Mbit/s, five on slow ones, each of another rate: six streams, chunks of
    one size on five.
    """
    layout, chunks = layout_of(2_000_000), -(-2_000_000 // 32_768)
    fast = {f"fast-{i}": LinkSettings(down_mbit=80.0) for i in range(6)}
    slow = {f"slow-{i}": LinkSettings(down_mbit=0.3 + i / 100) for i in range(5)}
    links = fast | slow
    parent = parent_of(site, list(links), layout=layout, transfer=FINE, links=links)
    children = {name: child_of(site, name, transfer=FINE, link=links[name]) for name in links}
    begun: list[str] = []

    async def begin(name: str) -> None:
        begun.append(name)

    of_all = {name: place for place, name in enumerate(links)}
    tasks = [
        serving(site, child, layout, of_all[name], partial(begin, name))
        for name, child in children.items()
    ]
    async with together(living(site, parent), *tasks):
        await parent.gather(Closing())
        await introduced(*children.values())
        row, opened = drawn(layout, 1), parent.now()
        played = await play(parent, row, closing=Closing(rule="quorum", quorum=6, deadline_s=0.001))
        assert_models(played, row, layout=layout, places={name: of_all[name] for name in fast})
        assert sorted(begun) == sorted(fast) and sorted(played.missing) == sorted(slow)
        assert parent.now() - opened < 0.5  # 2 MB at 80 Mbit/s are 0.2 s
        # One publication of each chunk for all that are fast; the slow ones, 50 s each, have hardly
        # begun.
        assert chunks <= parent.session.link.sender.chunks_published < chunks + 5 * chunks // 2
        assert parent.session.link.sender.chunks_repeated == 0


@pytest.mark.parametrize("shaped", [True, False])
@virtual
async def test_a_small_model_goes_in_chunks_where_the_link_is_slow(
    site: SimulatedSite, *, shaped: bool
) -> None:
    """Whoever keeps the rates: what is declared decides what travels inside an announcement, and
    the chunks.
    """
    mbit = 0.8 if shaped else 0.01  # a second, or more than a minute if it were kept
    seconds, *senders = await round_of(
        site, 100_000, LinkSettings(up_mbit=mbit, down_mbit=mbit), shaped=shaped
    )
    assert 1.9 < seconds < 2.2 if shaped else seconds < 1
    assert [sender.chunks_published for sender in senders] == [
        -(-100_000 // (50_000 if shaped else 32_768))
    ] * 2


@virtual
async def test_every_message_comes_later_by_the_delay(site: SimulatedSite) -> None:
    seconds, *senders = await round_of(site, 400_000, LinkSettings(delay_ms=100.0))
    # Task, ask, chunk, result, ask, chunk: six ways one after the other, and nothing is sent twice
    # for it.
    assert 0.6 <= seconds < 0.7 and [sender.chunks_published for sender in senders] == [1, 1]


@virtual
async def test_the_goodbye_waits_for_a_shaped_link(site: SimulatedSite) -> None:
    """A farewell that still waits for its link when a node ends would be lost, and its counts with
    it.
    """
    layout, link = layout_of(4000), LinkSettings(delay_ms=300.0)
    parent = parent_of(site, ["device-0"], layout=layout, link=link)
    child = child_of(site, "device-0", link=link)
    async with together(living(site, parent)):
        await living(site, child, work=child.farewell((), timeout_s=30))
        await until(lambda: "device-0" in parent.session.farewells)


@virtual
async def test_a_model_takes_what_its_link_takes_though_the_broker_is_slower(
    site: SimulatedSite,
) -> None:
    """Where the path is slower than declared, nothing is lost, and nothing is sent twice for it."""
    site.link("device-0").change(down_rate=1e5, up_rate=1e5)
    seconds, *senders = await round_of(
        site, 1_000_000, LinkSettings(up_mbit=80.0, down_mbit=80.0), transfer=FINE
    )
    assert 20 < seconds < 22 and [sender.chunks_repeated for sender in senders] == [0, 0]
