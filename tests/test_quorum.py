"""Who is waited for: before the run begins, in a round that may close without some, and who gave
up.
"""

from __future__ import annotations

import asyncio
import logging

import pytest

from fedstrata.common.errors import RunFailed
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.settings.closing import Closing
from tests.helpers.nodes import (
    Facts,
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

QUORUM_OF_ONE = Closing(rule="quorum", quorum=1, deadline_s=10.0)


# Before the run begins


@virtual
async def test_a_child_that_failed_before_the_run_ends_nobody(
    site: SimulatedSite, caplog: pytest.LogCaptureFixture
) -> None:
    """The parent waits for another process of its name, and reports why."""
    caplog.set_level(logging.WARNING, "fedstrata.parent")

    async def fail() -> None:
        raise RunFailed("no data here")

    layout = layout_of(4000)
    names = ["device-0", "device-1"]
    observed: list[Facts] = []
    waited_for: list[str] = []
    parent = parent_of(site, names, layout=layout, observed=observed)
    async with together(living(site, parent), serving(site, child_of(site, "device-1"), layout, 1)):
        gathering = asyncio.create_task(parent.gather(Closing(), waiting=waited_for.append))
        with pytest.raises(RunFailed, match="no data here"):
            await living(site, child_of(site, "device-0"), work=fail())
        await asyncio.sleep(1000)
        assert not gathering.done()
        assert waited_for[-1] == "device-0 gave up: no data here"
        waiting = [facts for event, facts in observed if event == "waiting"]  # one for each change
        assert waiting[-1] == {
            "for": waited_for[-1],
            "nodes": {"device-0": "gave up: no data here"},
        }
        assert len(waiting) <= 4
        async with together(serving(site, child_of(site, "device-0"), layout, 0)):
            await gathering
            row = drawn(layout, 1)
            assert_models(
                await play(parent, row), row, layout=layout, places={"device-0": 0, "device-1": 1}
            )
    lines = [
        line
        for line in caplog.messages
        if "waits for its children: device-0 gave up: no data here" in line
    ]
    assert 10 <= len(lines) <= 20  # one each minute


@virtual
async def test_an_absent_child_is_waited_for_however_long_it_takes(site: SimulatedSite) -> None:
    parent = parent_of(
        site, ["device-0"], layout=layout_of(4000), transfer=TransferSettings(idle_s=20.0)
    )
    waited_for: list[str] = []
    async with together(living(site, parent)):
        gathering = asyncio.create_task(parent.gather(QUORUM_OF_ONE, waiting=waited_for.append))
        await asyncio.sleep(500)
        assert not gathering.done() and set(waited_for) == {"device-0 has not joined yet"}
        async with together(living(site, child_of(site, "device-0"))):
            await gathering
        assert parent.samples == {"device-0": 1}


@virtual
async def test_a_quorum_is_waited_for_before_the_clock_starts(site: SimulatedSite) -> None:
    parent = parent_of(site, ["device-0", "device-1"], layout=layout_of(4000))
    async with together(living(site, parent)):
        gathering = asyncio.create_task(parent.gather(QUORUM_OF_ONE))
        await asyncio.sleep(15)
        assert not gathering.done(), "the deadline is a round's: nobody is there yet"
        async with together(living(site, child_of(site, "device-1"))):
            await gathering
        assert parent.samples == {"device-1": 1}


@virtual
async def test_with_a_quorum_there_the_others_have_until_the_deadline(site: SimulatedSite) -> None:
    parent = parent_of(site, ["device-0", "device-1"], layout=layout_of(4000))
    begun = parent.now()
    async with together(living(site, parent), living(site, child_of(site, "device-1"))):
        await parent.gather(QUORUM_OF_ONE)
        assert 10 <= parent.now() - begun < 12


# In a round


@virtual
async def test_a_child_that_gives_up_ends_the_round_at_once_and_not_for_lack_of_progress(
    site: SimulatedSite,
) -> None:
    async def fail() -> None:
        raise RunFailed("the disk is full")

    layout = layout_of(4000)
    parent = parent_of(site, ["device-0", "device-1"], layout=layout)
    async with together(living(site, parent), serving(site, child_of(site, "device-1"), layout, 1)):
        failing, begun = serving(site, child_of(site, "device-0"), layout, 0, fail), parent.now()
        with pytest.raises(RunFailed, match="device-0 gave up: the disk is full") as ended:
            await play(parent, drawn(layout, 1))
        assert type(ended.value) is RunFailed and parent.now() - begun < 5
        await asyncio.wait((failing,))
        assert isinstance(failing.exception(), RunFailed)


@virtual
async def test_a_quorum_closes_by_its_deadline_and_late_results_are_answered(
    site: SimulatedSite,
) -> None:
    layout = layout_of(400_000)
    names = ["device-0", "device-1", "late", "never"]
    parent = parent_of(site, names, layout=layout)
    go_on = asyncio.Event()
    late = child_of(site, "late")
    tasks = [
        serving(site, child_of(site, name), layout, place) for place, name in enumerate(names[:2])
    ]
    async with together(living(site, parent), serving(site, late, layout, 2, go_on.wait), *tasks):
        row = drawn(layout, 1)
        await until(lambda: len(parent.samples) == 3)
        closing = Closing(rule="quorum", quorum=2, deadline_s=0.5)
        played = await play(parent, row, closing=closing)
        assert_models(played, row, layout=layout, places={"device-0": 0, "device-1": 1})
        assert set(played.missing) == {"late", "never"}
        assert sum(played.timeline.phases().values()) >= 0.5
        assert parent.session.coordinator.late == 0
        go_on.set()
        await until(lambda: late.refusals)
        assert "closed" in late.refusals[0]
        assert parent.session.coordinator.late == 1
        second = await play(
            parent, row, global_round=1, closing=Closing(rule="quorum", quorum=3, deadline_s=0.1)
        )
        assert_models(second, row, layout=layout, places={"device-0": 0, "device-1": 1, "late": 2})


# The end


@virtual
async def test_the_goodbye_waits_for_a_slow_link(site: SimulatedSite) -> None:
    """A farewell that still waits for its link when a node ends would be lost, and its counts with
    it.
    """
    layout = layout_of(4000)
    parent = parent_of(site, ["device-0"], layout=layout)
    child = child_of(site, "device-0")
    site.link("device-0").change(delay_s=0.3)
    async with together(living(site, parent)):
        await living(site, child, work=child.farewell((), timeout_s=30))
        assert "device-0" in parent.session.farewells
