"""Files in which models are assembled, found again by a process that takes over."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.errors import StorageFailed
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.protocol.manifest import describe, missing
from fedstrata.common.runtime.child_endpoint import ChildEndpoint
from fedstrata.common.runtime.parent_endpoint import ParentEndpoint
from fedstrata.common.runtime.round import Dispatch
from fedstrata.common.settings.closing import Closing
from fedstrata.common.settings.links import LinkSettings
from fedstrata.common.storage.spool import KEPT_S, Spool
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


def test_what_a_process_left_is_found_by_the_next(tmp_path: Path) -> None:
    first = Spool.open(tmp_path, run="r", node="n").rows("uploads", 3, 10_000)
    first.array[1] = 7
    assert not any(first.take_found(place) for place in range(3))
    second = Spool.open(tmp_path, run="r", node="n").rows("uploads", 3, 10_000)
    np.testing.assert_array_equal(second.array, first.array)
    assert second.take_found(1) and not second.take_found(1)


def test_another_shape_begins_anew(tmp_path: Path) -> None:
    Spool.open(tmp_path, run="r", node="n").rows("uploads", 3, 10_000).array[:] = 7
    other = Spool.open(tmp_path, run="r", node="n").rows("uploads", 4, 10_000)
    assert not other.take_found(0) and not other.array.any()


def test_released_rows_keep_their_models(tmp_path: Path) -> None:
    rows = Spool.open(tmp_path, run="r", node="n").rows("uploads", 5, 123_456)
    rows.array[:] = np.arange(5, dtype=np.uint8)[:, None]
    for place in (0, 3, None):
        rows.release(place)
    assert (rows.array == np.arange(5, dtype=np.uint8)[:, None]).all()


def test_memory_keeps_nothing_and_releases_nothing() -> None:
    rows = Spool(None).rows("uploads", 2, 100)
    rows.array[:] = 5
    rows.release()
    assert (rows.array == 5).all() and not rows.take_found(0)


def test_a_run_that_is_over_leaves_nothing(tmp_path: Path) -> None:
    one, other = (
        Spool.open(tmp_path, run="r", node="one"),
        Spool.open(tmp_path, run="r", node="other"),
    )
    rows = one.rows("uploads", 1, 100)
    rows.array[:] = 3
    one.close()
    assert (rows.array == 3).all() and (tmp_path / "r" / "other").exists()
    other.close()
    assert not list(tmp_path.iterdir())


def test_files_of_a_run_that_nobody_took_up_again_go_after_a_week(tmp_path: Path) -> None:
    old, young, new = (f"2026010{day}T000000Z-abcdef" for day in (1, 2, 3))
    Spool.open(tmp_path, run=old, node="n").rows("uploads", 1, 100)
    Spool.open(tmp_path, run=young, node="n").rows("uploads", 1, 100)
    (tmp_path / "thesis").mkdir()  # the user's own, in a folder that was named by --spool
    long_ago = time.time() - KEPT_S - 1
    for name in (old, "thesis"):
        age(tmp_path / name, long_ago)
    Spool.open(tmp_path, run=new, node="n")
    assert {path.name for path in tmp_path.iterdir()} == {young, new, "thesis"}


def age(folder: Path, at: float) -> None:
    """Set when a run's files were last written."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (at, at))


def names(days: Iterable[int]) -> list[str]:
    return [f"202601{day:02d}T000000Z-abcdef" for day in days]


def test_files_of_killed_runs_take_a_share_of_the_disk_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the run that was used last are kept, however many they are: it may be resumed."""
    now, size = time.time(), 1 << 20
    runs = names(range(1, 7))
    disk = shutil.disk_usage(tmp_path)._replace(total=35 * size)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    for place, run in enumerate(runs):
        Spool.open(tmp_path, run=run, node="n").rows("uploads", 1, size)
        age(tmp_path / run, now - 10_000 + place)
    left = {path.name for path in tmp_path.iterdir()}
    Spool.open(tmp_path, run=names([7])[0], node="n")
    assert left >= set(runs[-4:]) and {path.name for path in tmp_path.iterdir()} == {
        *runs[-3:],
        *names([7]),
    }
    age(tmp_path / names([7])[0], now - 5000)
    Spool.open(tmp_path, run=names([8])[0], node="n").rows("uploads", 1, 50 * size)
    age(tmp_path / names([8])[0], now)
    Spool.open(tmp_path, run=names([9])[0], node="n")
    assert {path.name for path in tmp_path.iterdir()} == set(names([8, 9]))


def test_files_of_a_run_that_a_process_uses_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=0))
    living, killed, last, new = names([1, 2, 3, 4])
    used = [Spool.open(tmp_path, run=living, node=node) for node in ("n", "m")]
    script = f"""
import os, sys
from pathlib import Path
from fedstrata.common.storage.spool import Spool
spools = [Spool.open(Path({str(tmp_path)!r}), run=run, node="n") for run in ({killed!r}, {living!r})]
print(flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline()
    Spool.open(tmp_path, run=last, node="n")
    for run in (living, killed):
        age(tmp_path / run, time.time() - KEPT_S - 10)
    Spool.open(tmp_path, run=new, node="n")
    assert {path.name for path in tmp_path.iterdir()} == {living, killed, last, new}
    process.kill()
    process.communicate()
    del used[0]
    Spool.open(tmp_path, run=names([5])[0], node="n")
    assert living in {path.name for path in tmp_path.iterdir()} and not (tmp_path / killed).exists()
    used[0].close()
    assert (tmp_path / living / "n").exists()  # of the killed process


def test_many_nodes_of_a_process_hold_one_lock(tmp_path: Path) -> None:
    run, process = names([1])[0], Path("/proc/self/fd")
    gc.collect()  # what earlier tests left open is closed now, not later
    before = len(list(process.iterdir()))
    spools = [Spool.open(tmp_path, run=run, node=f"n{number}") for number in range(50)]
    assert len(list(process.iterdir())) == before + 1
    for spool in spools:
        spool.close()
    spools.clear()
    assert len(list(process.iterdir())) == before and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed, match="--spool"):
        Spool.open(tmp_path / "file", run="r", node="n")


def test_a_full_disk_falls_back_to_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    rows = Spool.open(tmp_path, run="r", node="n").rows("uploads", 2, 100)
    rows.array[:] = 1
    assert not rows.take_found(0) and not (tmp_path / "r" / "n" / "uploads").exists()


@given(st.binary(min_size=1, max_size=5000), st.sets(st.integers(0, 4)))
def test_a_scan_finds_exactly_the_chunks_that_are_not_there(data: bytes, damaged: set[int]) -> None:
    manifest = describe(memoryview(data), chunk_bytes=1024, codec="fp32", layout="l")
    held = bytearray(data)
    for index in (index for index in damaged if index < manifest.chunks):
        held[manifest.span(index).start] ^= 1
    lacking = missing(manifest, memoryview(held))
    assert set(np.flatnonzero(lacking).tolist()) == {
        index for index in damaged if index < manifest.chunks
    }


# What need not travel: chunks in the files of a process that crashed, in the last model, in the own
# result


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
        assert (
            received(first) + received(second) <= layout.row_bytes + FINE.window * FINE.chunk_bytes
        )


@virtual
async def test_uploads_beyond_the_resident_budget_give_the_same_models(
    site: SimulatedSite, tmp_path: Path
) -> None:
    layout, names = layout_of(400_000), [f"device-{i}" for i in range(6)]
    files = Spool.open(tmp_path, run=RUN, node=PARENT)
    parent = parent_of(
        site, names, layout=layout, transfer=TransferSettings(resident_mb=1.0), spool=files
    )
    tasks = [serving(site, child_of(site, name), layout, place) for place, name in enumerate(names)]
    async with together(living(site, parent), *tasks):
        row = drawn(layout, 1)
        played = await play(parent, row)
        played.uploads.release()
        assert_models(
            played, row, layout=layout, places={name: place for place, name in enumerate(names)}
        )


@virtual
async def test_chunks_that_a_child_has_in_its_last_model_or_in_its_result_do_not_travel(
    site: SimulatedSite,
) -> None:
    """FedMR deals layers: some come back to the child that trained them, some it was given before."""
    layout, chunk = layout_of(20 * 32_768), 32_768
    transfer = TransferSettings(chunk_bytes=chunk, inline_bytes=0)
    names = ["device-0", "device-1"]
    parent = parent_of(site, names, layout=layout, transfer=transfer)
    children = [child_of(site, name, transfer=transfer) for name in names]
    watched = [Watched(child) for child in children]
    async with together(
        living(site, parent), *(serving(site, child, layout, 0) for child in children)
    ):
        first = drawn(layout, 1)
        answers = (await play(parent, first)).models
        dealt = {name: answers[name].copy() for name in names}
        dealt["device-0"][: 5 * chunk] = first[: 5 * chunk]  # it has these of the last model,
        # these not, and the rest it made
        dealt["device-0"][12 * chunk :] = drawn(layout, 2)[12 * chunk :]
        before = [one.chunks for one in watched]
        models = [(row, [name]) for name, row in dealt.items()]
        played = await parent.round(
            Dispatch(1, 0, models=models, epochs=dict.fromkeys(names, 1), closing=Closing())
        )
        assert [one.chunks - begun for one, begun in zip(watched, before, strict=True)] == [8, 0]
        for name in names:
            np.testing.assert_array_equal(
                layout.floats(played.models[name]), changed(layout, dealt[name], 0)
            )
