"""Files in which models are assembled, found again by a process that takes over."""

from __future__ import annotations

import os
import time
from pathlib import Path

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
        os.utime(tmp_path / name, (long_ago, long_ago))
    Spool.open(tmp_path, run=new, node="n")
    assert {path.name for path in tmp_path.iterdir()} == {young, new, "thesis"}


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
