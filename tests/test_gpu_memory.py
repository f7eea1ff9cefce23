"""A GPU's memory, divided among the processes that train there; the GPU is played."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedstrata.common.learning import gpu_memory
from fedstrata.common.learning.gpu_memory import GpuMemory

GB = 1_000_000_000
GPU = torch.device("cuda", 0)
# another process: `LINE` of bytes that it holds, until its standard input ends
OTHER = """
import fcntl, os, sys
file = os.open(sys.argv[1] + f"/{os.getpid()}", os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(file, fcntl.LOCK_EX)
os.write(file, sys.argv[2].rjust(20).encode())
print("holds", flush=True)
sys.stdin.read()
"""


@dataclass
class Played:
    """A GPU of 10 GB, of which this process holds some."""

    free: int = 10 * GB
    held: int = 0
    unified: bool = False
    fractions: list[float] = field(default_factory=list)
    emptied: int = 0

    def empty(self) -> None:
        self.emptied += 1
        self.free += self.held
        self.held = 0

    def properties(self, _: torch.device) -> SimpleNamespace:
        return SimpleNamespace(is_integrated=self.unified, total_memory=10 * GB, uuid="gpu-a")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    made = Played()
    monkeypatch.setattr(torch.cuda, "get_device_properties", made.properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (made.free, 10 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: made.held)
    monkeypatch.setattr(torch.cuda, "empty_cache", made.empty)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda part, _: made.fractions.append(round(part, 3)),
    )
    return made


def hold(played: Played, nbytes: int) -> None:
    played.held += nbytes
    played.free -= nbytes


def start_other(folder: Path, held: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", OTHER, str(folder), str(held)]
    other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "holds\n"
    return other


def end(other: subprocess.Popen[str]) -> None:
    other.communicate("")
    assert other.returncode == 0


def test_alone_a_process_keeps_what_it_holds(tmp_path: Path, played: Played) -> None:
    memory = GpuMemory(GPU, folder=tmp_path / "gpus")
    for _ in range(3):
        memory.begin()
        hold(played, 3 * GB)
        memory.end()
    assert memory.share_bytes() == 8 * GB, "all of it, less the reserve"
    assert (played.emptied, played.fractions) == (0, [])


def test_two_processes_share_what_is_free_and_what_they_hold(
    tmp_path: Path, played: Played
) -> None:
    memory = GpuMemory(GPU, folder=tmp_path / "gpus")
    memory.begin()
    hold(played, 7 * GB)
    played.free -= 1 * GB
    other = start_other(tmp_path / "gpus" / "gpu-a", 1 * GB)
    assert memory.others() == 1
    assert memory.share_bytes() == 4 * GB, "half of the 2 GB that are free and the 8 GB held"
    memory.end()
    assert (played.emptied, played.held) == (1, 0), "it held more than its share"
    hold(played, 3 * GB)
    memory.end()
    assert played.emptied == 1
    end(other)
    assert memory.others() == 0
    assert [path.name for path in (tmp_path / "gpus" / "gpu-a").iterdir()] == [str(os.getpid())]


def test_a_share_is_never_more_than_what_is_free(tmp_path: Path, played: Played) -> None:
    memory = GpuMemory(GPU, folder=tmp_path / "gpus")
    memory.begin()
    played.free = 1 * GB
    other = start_other(tmp_path / "gpus" / "gpu-a", 9 * GB)
    assert memory.share_bytes() == int(0.8 * GB)
    end(other)


def test_a_looker_takes_no_part(tmp_path: Path, played: Played) -> None:
    memory = GpuMemory(GPU, folder=tmp_path / "gpus")
    assert memory.others() == 0
    assert not (tmp_path / "gpus").exists()
    memory.give_back()
    assert played.emptied == 1


@pytest.mark.parametrize(
    ("available", "fraction"), [(6_000_000, 0.451), (1_000_000, 0.041), (400_000, 0.006)]
)
def test_unified_memory_keeps_a_reserve_and_a_cap(
    available: int, fraction: float, tmp_path: Path, played: Played
) -> None:
    """Linux has less available than CUDA reports as free, or more."""
    (tmp_path / "meminfo").write_text(f"MemAvailable: {available} kB\n")
    played.unified = True
    memory = GpuMemory(GPU, folder=tmp_path / "gpus", proc=tmp_path)
    memory.begin()
    assert played.fractions == [fraction]


def test_a_folder_of_another_kind_leaves_a_process_alone(tmp_path: Path, played: Played) -> None:
    (tmp_path / "gpus").touch()
    memory = GpuMemory(GPU, folder=tmp_path / "gpus")
    memory.begin()
    assert memory.share_bytes() == 8 * GB
    assert memory.others() == 0


def test_a_cpu_has_none() -> None:
    assert gpu_memory.memory_of(torch.device("cpu")) is None
