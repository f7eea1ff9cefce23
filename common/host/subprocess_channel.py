"""A channel between an agent and a process that computes for it.

The agent starts `python -m MODULE SOCKET MEMORY`; the arguments are descriptors. A record is a line of JSON on the
socket, in either direction. Models are passed in the shared memory. When the agent's end of the socket closes, however
the agent ended, the process ends at once.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from common.errors import FedstrataError, InvalidExperiment, RunFailed, StorageFailed
from common.host.offload import offload
from common.host.processes import python

RECORD_BYTES: Final = 1 << 24  # limit of a reply: the longest, a layout, has some 60 for each tensor
LAST_BREATH_S: Final = 5.0  # between the end of the socket and the end of the process

Record: TypeAlias = Mapping[str, Any]


class ProcessEnded(RunFailed):
    """A process ended before it replied: `killed` by a signal, or with an exit code; `how` is the predicate."""

    def __init__(self, name: str, code: int) -> None:
        self.killed = code < 0
        ended = f"ended with code {code}; its message is above"
        self.how = f"was killed by {signal.Signals(-code).name}" if self.killed else ended
        super().__init__(f"{name} {self.how}")


class SharedMemory:
    """Rows in a memory file that grows as needed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._mapped: mmap.mmap | None = None

    def rows(self, count: int, row_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the first rows, uint8 [count, row_bytes], each on its own pages; earlier rows become invalid."""
        stride = -(-row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size, descriptor = count * stride, self._file.fileno()
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        if self._mapped is None or len(self._mapped) < size:
            self._mapped = mmap.mmap(descriptor, size)
        return np.frombuffer(self._mapped, np.uint8, size).reshape(count, stride)[:, :row_bytes]

    def close(self) -> None:
        """Close the file; the memory is freed with the last of its rows."""
        self._file.close()
        self._mapped = None


@dataclass(frozen=True, slots=True, eq=False)
class SubprocessChannel:
    """The agent's end of the channel to one process. Close it even if the process has ended."""

    name: str
    process: subprocess.Popen[bytes]
    memory: SharedMemory
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, module: str, name: str) -> Self:
        """Start the process that runs `module`; errors call it `name`."""
        ours, theirs = socket.socketpair()
        with theirs:
            streams = await asyncio.open_connection(sock=ours, limit=RECORD_BYTES)
            process, memory = spawn(module, theirs)
        return cls(name, process, memory, *streams)

    def send(self, **facts: object) -> None:
        """Send a record; it is lost if the process has ended."""
        self.writer.write(encoded(facts))

    async def receive(self) -> Record:
        """Wait for the next record. Raises ProcessEnded, and the error that a record passes."""
        try:
            line = await self.reader.readline()
        except ConnectionError:
            line = b""
        if not line.endswith(b"\n"):
            self.writer.close()
            raise ProcessEnded(self.name, await offload(partial(exit_code, self.process)))
        record: Record = json.loads(line)
        if (error := error_in(record)) is not None:
            raise error
        return record

    async def request(self, **facts: object) -> Record:
        """Send a record and wait for the reply. Raises what `receive` raises."""
        self.send(**facts)
        return await self.receive()

    def close(self) -> None:
        """Kill the process, wait for its end, and release the socket and the memory."""
        self.process.kill()
        self.process.wait()
        self.writer.close()
        self.memory.close()


class AgentChannel:
    """The process's end. A thread reads the records, so that the process ends at once when the agent is gone.

    The thread calls `at_once` with each record; a record for which it returns True is not received.
    """

    def __init__(self, at_once: Callable[[Record], bool] = lambda record: False) -> None:
        descriptors = [int(argument) for argument in sys.argv[1:3]]
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)  # programs that this process starts must not keep them open
        self._socket = socket.socket(fileno=descriptors[0])
        self.memory = SharedMemory(os.fdopen(descriptors[1], "r+b", buffering=0))
        self._records: queue.SimpleQueue[Record] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(at_once,), daemon=True).start()

    def receive(self) -> Record:
        """Wait for the next record."""
        return self._records.get()

    def send(self, **facts: object) -> None:
        """Send a record."""
        try:
            self._socket.sendall(encoded(facts))
        except OSError:
            os._exit(0)  # the agent is gone

    def _read(self, at_once: Callable[[Record], bool]) -> None:
        try:
            for line in self._socket.makefile("rb"):
                record = json.loads(line)
                if not at_once(record):
                    self._records.put(record)
        except OSError:
            pass  # the agent is gone
        except Exception:  # noqa: BLE001 - the process cannot go on without its requests
            traceback.print_exc()
            os._exit(1)
        os._exit(0)


def spawn(module: str, theirs: socket.socket) -> tuple[subprocess.Popen[bytes], SharedMemory]:
    """Start the process that runs `module`, with its end of the socket and new shared memory.

    It takes a millisecond: this process's memory is not forked.
    """
    file = _open_memory()
    descriptors = theirs.fileno(), file.fileno()
    process = subprocess.Popen(
        [*python(module), *map(str, descriptors)],
        stdin=subprocess.DEVNULL,
        stdout=2,  # keeps the output of libraries out of this process's data
        pass_fds=descriptors,
        start_new_session=True,  # Ctrl-C is for the agents, which then close the socket
    )
    return process, SharedMemory(file)


def exit_code(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a process that has closed its socket, and may still write its last message."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(LAST_BREATH_S)
    process.kill()
    return process.wait()


def error_record(error: FedstrataError) -> Record:
    """Return the facts of a record that passes an error to the agent."""
    if isinstance(error, StorageFailed):
        return {"storage": error.parts}
    return {"invalid": error.parts} if isinstance(error, InvalidExperiment) else {"failed": str(error)}


def error_in(record: Record) -> FedstrataError | None:
    """Return the error that a record passes, if any."""
    if "invalid" in record:
        return InvalidExperiment(*record["invalid"])
    if "storage" in record:
        return StorageFailed(*record["storage"])
    return RunFailed(record["failed"]) if "failed" in record else None


def encoded(facts: Record) -> bytes:
    """Return a record as a line of JSON."""
    return json.dumps(facts, default=str).encode() + b"\n"


def _open_memory() -> IO[bytes]:
    """Return a new memory file, or a file on disk if the system has no memory files."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("fedstrata rows"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)
