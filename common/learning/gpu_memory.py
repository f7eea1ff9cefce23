"""A GPU's memory: the part of it that a process may hold.

torch keeps what is freed, so that the next training allocates nothing. A process gives that back
only beyond its share: an equal part of all that the processes of fedstrata hold, and of what is
free. Each of them has a file in a folder of its user, locked while it lives, with the bytes that
it held last. What other users, containers and programs hold counts as taken.

The GPU of a board has the memory of its host (unified memory). There a process is capped at its
share, which leaves the host a reserve: beyond it torch reports a lack of memory, from which a
training recovers. Without the cap Linux would kill a process.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Final

import torch

from fedstrata.common.host.files import private, private_folder
from fedstrata.common.host.machine import available_bytes

# of a share: for other libraries and gaps of the allocator
RESERVE_SHARE: Final = 0.2
# of unified memory: for the agents, the broker and the system
HOST_RESERVE_BYTES: Final = 512_000_000
HELD_BYTES: Final = 20  # of a file
LEAST_BYTES: Final = 64_000_000  # of a cap: torch allocates in pieces of 2 to 20 MB


class GpuMemory:
    """The memory of one GPU, as a process that trains there sees it."""

    def __init__(
        self, gpu: torch.device, *, folder: Path | None = None, proc: Path = Path("/proc")
    ) -> None:
        self._gpu = gpu
        self._proc = proc
        self._root = folder or Path(tempfile.gettempdir()) / f"fedstrata-gpus-{os.geteuid()}"
        self._file: int | None = None

    @cached_property
    def _unified(self) -> bool:
        return bool(torch.cuda.get_device_properties(self._gpu).is_integrated)

    @cached_property
    def _total(self) -> int:
        return int(torch.cuda.get_device_properties(self._gpu).total_memory)

    @cached_property
    def _folder(self) -> Path:
        """The folder of the processes that hold memory of this GPU."""
        # its number is each process's own
        uuid = getattr(torch.cuda.get_device_properties(self._gpu), "uuid", self._gpu.index)
        return self._root / str(uuid)

    def begin(self) -> None:
        """Take part, and prepare for a training: on unified memory, cap what this process holds."""
        if not self._unified:
            self._write(torch.cuda.memory_reserved(self._gpu))
            return
        most = max(self.share_bytes(), LEAST_BYTES)
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / self._total), self._gpu)

    def end(self) -> None:
        """Give back after a training what this process holds beyond its share."""
        held = torch.cuda.memory_reserved(self._gpu)
        others = self._others()
        if (self._unified or others) and held > self._share_bytes(others):
            self.give_back()

    def share_bytes(self) -> int:
        """Return the bytes that this process may hold in all, for now."""
        return self._share_bytes(self._others())

    def _share_bytes(self, others: list[int]) -> int:
        free, _ = torch.cuda.mem_get_info(self._gpu)
        if self._unified:
            free = min(free, int(available_bytes(self._proc) or free)) - HOST_RESERVE_BYTES
        held = torch.cuda.memory_reserved(self._gpu)
        self._write(held)
        share = (free + held + sum(others)) // (1 + len(others))
        return max(0, int(min(share, free + held) * (1 - RESERVE_SHARE)))

    def others(self) -> int:
        """Return how many other processes of fedstrata train on this GPU."""
        return len(self._others())

    def give_back(self) -> None:
        """Give back all that is free in this process."""
        torch.cuda.empty_cache()

    def _write(self, held: int) -> None:
        """Take part, and write what this process holds."""
        with suppress(OSError):  # a full or foreign folder: the others do not know of this process
            if self._file is None:
                self._file = self._opened()
            os.pwrite(self._file, str(held).rjust(HELD_BYTES).encode(), 0)

    def _opened(self) -> int:
        """Return the locked file of this process. Raises OSError."""
        private_folder(self._root)
        private_folder(self._folder)
        file = private(str(self._folder / str(os.getpid())), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise
        return file

    def _others(self) -> list[int]:
        """Return what each other process held last, and remove the files of ended ones."""
        found = []
        with suppress(OSError):
            for path in self._folder.iterdir():
                if path.name != str(os.getpid()) and (held := _held(path)) is not None:
                    found.append(held)
        return found


def _held(path: Path) -> int | None:
    """Return what the process of a file held last, None and no file if it has ended."""
    try:
        file = private(str(path), os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(os.read(file, HELD_BYTES) or b"0")
    else:
        path.unlink(missing_ok=True)
        return None
    finally:
        os.close(file)


@cache  # one for all that train in a process: the lock is the process's
def memory_of(accelerator: torch.device) -> GpuMemory | None:
    """Return the memory of an accelerator, None for a CPU."""
    if accelerator.type != "cuda":
        return None
    return GpuMemory(accelerator)
