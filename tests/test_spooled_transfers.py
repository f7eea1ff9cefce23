"""What need not travel: chunks in the files of a process that crashed, in the last model, in the own result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np

from common.experiment.links import LinkSettings
from common.experiment.schema import TransferSettings
from common.experiment.tiers import Closing
from common.runtime.child_endpoint import ChildEndpoint
from common.runtime.parent_endpoint import ParentEndpoint
from common.runtime.round import Dispatch
from common.storage.spool import Spool
from tests.helpers.nodes import (
    FINE,
    PARENT,
    RUN,
    Watched,
    assert_models,
    changed,
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


async def third_of_a_transfer(arrived: Callable[[], int], row_bytes: int) -> None:
    """Wait for a third of a model."""
    await until(lambda: arrived() > row_bytes // 3)


@virtual
async def test_a_parent_that_crashed_in_mid_upload_goes_on_with_what_its_files_hold(
    site: SimulatedSite, tmp_path: Path
) -> None:
    layout, link = layout_of(2_000_000), LinkSettings(up_mbit=32.0)
    row, trained = drawn(layout, 1), []

    def parent() -> ParentEndpoint:
        files = Spool.open(tmp_path, run=RUN, node=PARENT)
        return parent_of(site, ["device-0"], layout=layout, transfer=FINE, link=link, spool=files)

    async def count() -> None:
        trained.append(True)

    def received(endpoint: ParentEndpoint) -> int:
        return endpoint.session.link.counters.traffic("device-0").received_model_payload

    first, child = parent(), child_of(site, "device-0", transfer=FINE, link=link)
    async with together(serving(site, child, layout, 0, count)):
        crashed = living(site, first, work=play(first, row))
        await third_of_a_transfer(lambda: received(first), layout.row_bytes)
        site.kill(first)
        kept = received(first)
        second = parent()
        async with together(living(site, second), crashed):
            assert_models(await play(second, row), row, layout=layout, places={"device-0": 0})
        assert trained == [True]
        assert kept + received(second) <= layout.row_bytes + FINE.window * FINE.chunk_bytes


@virtual
async def test_a_child_that_crashed_in_mid_fetch_goes_on_with_what_its_file_holds(
    site: SimulatedSite, tmp_path: Path
) -> None:
    layout, link = layout_of(2_000_000), LinkSettings(down_mbit=32.0)

    def child() -> ChildEndpoint:
        files = Spool.open(tmp_path, run=RUN, node="device-0")
        return child_of(site, "device-0", transfer=FINE, link=link, spool=files)

    def received(endpoint: ChildEndpoint) -> int:
        return endpoint.session.link.counters.traffic(PARENT).received_model_payload

    parent, first = parent_of(site, ["device-0"], layout=layout, transfer=FINE, link=link), child()
    async with together(living(site, parent)):
        row = drawn(layout, 1)
        playing = asyncio.create_task(play(parent, row))
        crashed = serving(site, first, layout, 0)
        await third_of_a_transfer(lambda: received(first), layout.row_bytes)
        site.kill(first)
        second = child()
        async with together(serving(site, second, layout, 0), crashed):
            assert_models(await playing, row, layout=layout, places={"device-0": 0})
        assert received(first) + received(second) <= layout.row_bytes + FINE.window * FINE.chunk_bytes


@virtual
async def test_uploads_beyond_the_resident_budget_give_the_same_models(site: SimulatedSite, tmp_path: Path) -> None:
    layout, names = layout_of(400_000), [f"device-{i}" for i in range(6)]
    files = Spool.open(tmp_path, run=RUN, node=PARENT)
    parent = parent_of(site, names, layout=layout, transfer=TransferSettings(resident_mb=1.0), spool=files)
    tasks = [serving(site, child_of(site, name), layout, place) for place, name in enumerate(names)]
    async with together(living(site, parent), *tasks):
        row = drawn(layout, 1)
        played = await play(parent, row)
        played.uploads.release()
        assert_models(played, row, layout=layout, places={name: place for place, name in enumerate(names)})


@virtual
async def test_chunks_that_a_child_has_in_its_last_model_or_in_its_result_do_not_travel(site: SimulatedSite) -> None:
    """FedMR deals layers: some come back to the child that trained them, some it was given before."""
    layout, chunk = layout_of(20 * 32_768), 32_768
    transfer = TransferSettings(chunk_bytes=chunk, inline_bytes=0)
    names = ["device-0", "device-1"]
    parent = parent_of(site, names, layout=layout, transfer=transfer)
    children = [child_of(site, name, transfer=transfer) for name in names]
    watched = [Watched(child) for child in children]
    async with together(living(site, parent), *(serving(site, child, layout, 0) for child in children)):
        first = drawn(layout, 1)
        answers = (await play(parent, first)).models
        dealt = {name: answers[name].copy() for name in names}
        dealt["device-0"][: 5 * chunk] = first[: 5 * chunk]  # it has these of the last model,
        dealt["device-0"][12 * chunk :] = drawn(layout, 2)[12 * chunk :]  # these not, and the rest it made
        before = [one.chunks for one in watched]
        models = [(row, [name]) for name, row in dealt.items()]
        played = await parent.round(Dispatch(1, 0, models=models, epochs=dict.fromkeys(names, 1), closing=Closing()))
        assert [one.chunks - begun for one, begun in zip(watched, before, strict=True)] == [8, 0]
        for name in names:
            np.testing.assert_array_equal(layout.floats(played.models[name]), changed(layout, dealt[name], 0))
