"""Files in which models are assembled, found again by a process that takes over."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import StorageFailed
from common.protocol.manifest import describe, missing
from common.storage.spool import KEPT_S, Spool


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
    one, other = Spool.open(tmp_path, run="r", node="one"), Spool.open(tmp_path, run="r", node="other")
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


def test_files_of_killed_runs_take_a_share_of_the_disk_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert left >= set(runs[-4:]) and {path.name for path in tmp_path.iterdir()} == {*runs[-3:], *names([7])}
    age(tmp_path / names([7])[0], now - 5000)
    Spool.open(tmp_path, run=names([8])[0], node="n").rows("uploads", 1, 50 * size)
    age(tmp_path / names([8])[0], now)
    Spool.open(tmp_path, run=names([9])[0], node="n")
    assert {path.name for path in tmp_path.iterdir()} == set(names([8, 9]))


def test_files_of_a_run_that_a_process_uses_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=0))
    living, killed, last, new = names([1, 2, 3, 4])
    used = [Spool.open(tmp_path, run=living, node=node) for node in ("n", "m")]
    script = f"""
import os, sys
from pathlib import Path
from common.storage.spool import Spool
spools = [Spool.open(Path({str(tmp_path)!r}), run=run, node="n") for run in ({killed!r}, {living!r})]
print(flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
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
    assert set(np.flatnonzero(lacking).tolist()) == {index for index in damaged if index < manifest.chunks}
