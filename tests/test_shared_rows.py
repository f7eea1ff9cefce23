"""Rows that another process maps: found by their place, and freed with their last array."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedstrata.common.processes import shared_rows
from fedstrata.common.processes.shared_rows import SHARED_BYTES, Row, new_row, place_of, row_at
from fedstrata.common.storage.spool import Spool

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems do not name open files"
)
OTHER = """
import sys
from fedstrata.common.processes.shared_rows import row_at
path, before, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
given, own = row_at((path, before), size, writable=False), row_at((path, before), size, writable=True)
print(int(given.sum()), given.flags.writeable)
own[-1] = 9
"""


def in_memory(_: Path) -> Row:
    return new_row(SHARED_BYTES)


def in_a_file(folder: Path) -> Row:
    return Spool(folder).rows("model", 1, SHARED_BYTES).array[0]


@pytest.mark.parametrize("made", [in_memory, in_a_file])
@pytest.mark.parametrize("before", [0, 5000])
def test_another_process_finds_a_row_or_a_part_of_it(
    before: int, made: Callable[[Path], Row], tmp_path: Path
) -> None:
    row = made(tmp_path)
    part = row[before:]
    part[:3] = 1, 2, 4
    place = place_of(part)
    assert place is not None and place[1] == before
    words = [sys.executable, "-c", OTHER, place[0], str(place[1]), str(part.size)]
    done = subprocess.run(
        words, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    assert done.stdout.split() == ["7", "False"] and part[-1] == row[-1] == 9


def test_small_rows_and_those_of_the_heap_have_no_place() -> None:
    assert place_of(new_row(SHARED_BYTES - 1)) is None
    assert place_of(np.zeros(SHARED_BYTES, np.uint8)) is None


def test_descriptors_and_memory_go_with_the_last_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_rows, "SHARED_BYTES", 1)
    before = len(os.listdir("/proc/self/fd"))
    rows = [new_row(1 << 12) for _ in range(50)]
    part = rows[0][100:200]
    places = [place_of(row) for row in rows]
    assert len({place for place in places if place}) == 50
    del rows
    gc.collect()
    # of the part: its memory's own, and that of its place
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    kept = place_of(part)
    assert kept is not None and not row_at(kept, part.size, writable=False).any()


def test_without_descriptors_rows_are_of_the_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none_left)
    row = new_row(SHARED_BYTES)
    assert not row.any() and place_of(row) is None
