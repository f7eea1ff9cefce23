"""A channel between an agent and a process that computes for it, and the replacement of a process
that fails.

The agent starts `python -m MODULE SOCKET MEMORY`; the arguments are descriptors. A record is a line
of JSON on the socket, in either direction. Models are passed in the shared memory. When the agent's
end of the socket closes, however the agent ended, the process ends at once. An error of the process
is a record, too, and so is its progress.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, Final, Protocol, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from fedstrata.common.errors import (
    AcceleratorLost,
    FedstrataError,
    InvalidExperiment,
    NoProgress,
    RunFailed,
    StorageFailed,
    as_known,
)
from fedstrata.common.host.offload import offload, repeated
from fedstrata.common.host.processes import python

# limit of a reply: the longest, a layout, has some 60 for each tensor
RECORD_BYTES: Final = 1 << 24
LAST_BREATH_S: Final = 5.0  # between the end of the socket and the end of the process
REPORT_S: Final = 0.5  # between two reports of progress
# of a core that count as progress; a process that waits, and its reports, take a thousandth of it
BUSY_S: Final = 0.05
MOVES: Final = "moves"
REPLACEMENTS: Final = 3  # of a process, for one request
ADVICE: Final = (
    "If memory was short: run fewer nodes on this machine. If one batch takes longer "
    "than that: raise transfer.idle_s."
)

Record: TypeAlias = Mapping[str, Any]
_T = TypeVar("_T")

log = logging.getLogger("fedstrata.process")


class ProcessEnded(RunFailed):
    """A process ended before it replied: `killed` by a signal, or with an exit code; `how` is the
    predicate.
    """

    def __init__(self, name: str, code: int) -> None:
        self.killed = code < 0
        ended = f"ended with code {code}; the output of its node may have the reason"
        self.how = f"was killed by {signal.Signals(-code).name}" if self.killed else ended
        super().__init__(f"{name} {self.how}")


class Garbled(ProcessEnded):
    """A process sent what is no record, and was ended: own code in it may write to any
    descriptor.
    """

    def __init__(self, name: str) -> None:
        self.killed = False
        self.how = "sent what is no record: own code in it has written to its descriptors"
        RunFailed.__init__(self, f"{name} {self.how}")


class SharedMemory:
    """Rows in a memory file that grows as needed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._mapped: mmap.mmap | None = None

    def rows(self, count: int, row_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the first rows, uint8 [count, row_bytes], each on its own pages; earlier rows
        become invalid.
        """
        stride = -(-row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = count * stride
        descriptor = self._file.fileno()
        if not size:
            return np.empty((count, row_bytes), np.uint8)
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        if self._mapped is None or len(self._mapped) < size:
            self._mapped = mmap.mmap(descriptor, size)
        return np.frombuffer(self._mapped, np.uint8, size).reshape(count, stride)[:, :row_bytes]

    def free(self) -> None:
        """Free the memory; rows that were returned must not be used any more, in any process."""
        self._mapped = None
        os.ftruncate(self._file.fileno(), 0)

    def close(self) -> None:
        """Close the file; the memory is freed with the last of its rows."""
        self._file.close()
        self._mapped = None


class ChildProcess(Protocol):
    """The methods of `subprocess.Popen` that a channel needs."""

    pid: int

    def kill(self) -> None:
        """Kill it, unless it has ended."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code. Raises TimeoutExpired."""


Fork: TypeAlias = Callable[[Sequence[int]], ChildProcess]  # with these descriptors; raises OSError


@dataclass(frozen=True, slots=True, eq=False)
class SubprocessChannel:
    """The agent's end of the channel to one process. Close it even if the process has ended.

    `idle_s`: the longest wait for a record, None: any. `progressed` is called with each report of
    progress.
    """

    name: str
    process: ChildProcess
    memory: SharedMemory
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_s: float | None
    progressed: Callable[[], None]

    @classmethod
    async def start(
        cls,
        module: str,
        name: str,
        *,
        idle_s: float | None = None,
        progressed: Callable[[], None] = lambda: None,
        fork: Fork | None = None,
    ) -> Self:
        """Start the process that runs `module`, by `fork` if that can; errors call it `name`."""
        ours, theirs = socket.socketpair()
        with theirs:
            streams = await asyncio.open_connection(sock=ours, limit=RECORD_BYTES)
            file = _open_memory()
            try:
                process = await _started(module, (theirs.fileno(), file.fileno()), fork)
            except BaseException:
                streams[1].close()  # the process, if there is one, ends with it
                file.close()
                raise
        return cls(name, process, SharedMemory(file), *streams, idle_s, progressed)

    def send(self, **facts: object) -> None:
        """Send a record; it is lost if the process has ended."""
        self.writer.write(encoded(facts))

    async def receive(self) -> Record:
        """Wait for the next record that is no progress.

        Raises ProcessEnded, NoProgress, and the error that a record passes.
        """
        while MOVES in (record := await self._next()):
            self.progressed()
        if (error := error_in(record)) is not None:
            raise error
        return record

    async def request(self, **facts: object) -> Record:
        """Send a record and wait for the reply. Raises what `receive` raises."""
        self.send(**facts)
        return await self.receive()

    async def end(self) -> None:
        """Close it, and wait in a thread meanwhile: the end of a large process takes a while."""
        self.process.kill()
        await offload(self.process.wait)
        self.close()

    def close(self) -> None:
        """Kill the process, wait for its end, and release the socket and the memory."""
        self.process.kill()
        self.process.wait()
        self.writer.close()
        self.memory.close()

    async def _next(self) -> Record:
        try:
            async with asyncio.timeout(self.idle_s):
                line = await self.reader.readline()
        except TimeoutError:
            raise NoProgress(f"{self.name} made no progress for {self.idle_s:g} s") from None
        except ConnectionError:
            line = b""
        if not line.endswith(b"\n"):
            self.writer.close()
            raise ProcessEnded(self.name, await offload(partial(exit_code, self.process)))
        try:
            record: Record = json.loads(line)
        except ValueError:
            raise Garbled(self.name) from None
        if not isinstance(record, dict):
            raise Garbled(self.name)
        return record


async def nothing(_: SubprocessChannel) -> None:
    """Exchange no record."""


class ReplaceableProcess:
    """A process that computes for an agent. It starts with the first request.

    If a signal ends it, if it makes no progress for `idle_s`, or if its accelerator fails for good,
    the request is done again in a new process, `replacements` times. So requests must be
    repeatable. `begin`: the first exchange with each process. `advice`: the end of the error of a
    request that fails in each of them. `fork` starts it, if that is given and can.
    """

    def __init__(
        self,
        module: str,
        name: str,
        *,
        replacements: int = REPLACEMENTS,
        advice: str = ADVICE,
        idle_s: float | None = None,
        begin: Callable[[SubprocessChannel], Awaitable[object]] = nothing,
        fork: Fork | None = None,
    ) -> None:
        self._module = module
        self._name = name
        self._replacements = replacements
        self._advice = advice
        self._idle_s = idle_s
        self._begin = begin
        self._fork = fork
        self.channel: SubprocessChannel | None = None
        self.moves = 0  # reports of progress

    async def do(self, work: Callable[[SubprocessChannel], Awaitable[_T]], *, name: str = "") -> _T:
        """Do the work in the process; errors call that `name`.

        Raises RunFailed, NoProgress, and the error that a record passes. A cancelled caller ends
        the process.
        """
        name = name or self._name
        replaced = 0
        while True:
            try:
                return await work(self.channel or await self._start())
            except (ProcessEnded, NoProgress, AcceleratorLost) as error:
                await self.end()
                how, too, kind = self._how(error)
                if isinstance(error, ProcessEnded) and not error.killed:
                    raise kind(f"{name} {how}") from None
                if replaced == self._replacements:
                    if replaced == 1:
                        others = f"so {too} its replacement"
                    else:
                        others = f"{replaced} replacements failed, too"
                    raise kind(f"{name} {how}, and {others}. {self._advice}") from None
                replaced += 1
                log.warning("%s %s: it is started again", name, how)
            except asyncio.CancelledError:
                self.close()
                raise

    async def end(self) -> None:
        """End the process, if any; the next request starts another one."""
        channel = self.channel
        self.channel = None
        if channel is not None:
            await channel.end()

    def close(self) -> None:
        """End the process at once."""
        channel = self.channel
        self.channel = None
        if channel is not None:
            channel.close()

    async def _start(self) -> SubprocessChannel:
        channel = self.channel = await SubprocessChannel.start(
            self._module,
            self._name,
            idle_s=self._idle_s,
            progressed=self._progressed,
            fork=self._fork,
        )
        try:
            await self._begin(channel)
        except BaseException:
            self.close()
            raise
        return channel

    def _progressed(self) -> None:
        self.moves += 1

    def _how(
        self, error: ProcessEnded | NoProgress | AcceleratorLost
    ) -> tuple[str, str, type[RunFailed]]:
        """Return what happened to the process, as a predicate, its verb, and the class of the error
        for the caller.
        """
        if isinstance(error, ProcessEnded):
            return error.how, "was", RunFailed
        if isinstance(error, NoProgress):
            return f"made no progress for {self._idle_s:g} s", "did", NoProgress
        return f"lost its accelerator ({error.reason})", "did", RunFailed


class AgentChannel:
    """The process's end. A thread reads the records, so that the process ends at once when the
    agent is gone.

    The thread calls `at_once` with each record; a record for which it returns True is not received.
    """

    def __init__(self, at_once: Callable[[Record], bool] = lambda record: False) -> None:
        descriptors = [int(argument) for argument in sys.argv[1:3]]
        for descriptor in descriptors:
            # programs that this process starts must not keep them open
            os.set_inheritable(descriptor, False)
        # it is for the agent, so own code alone raises KeyboardInterrupt
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._reported = time.monotonic()
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

    def progressed(self) -> None:
        """Report progress, unless it was just reported."""
        if time.monotonic() >= self._reported + REPORT_S:
            self._reported = time.monotonic()
            self.send(moves=True)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Report the use of a core as progress in the `with` block, of imports and of reading
        data.
        """
        used = time.process_time()

        def look() -> None:
            nonlocal used
            if time.process_time() >= used + BUSY_S:
                used = time.process_time()
                self.send(moves=True)

        with repeated(look, every_s=REPORT_S):
            yield

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


async def _started(module: str, descriptors: tuple[int, int], fork: Fork | None) -> ChildProcess:
    """Start the process by `fork`, or else as a new interpreter, which takes a millisecond: no
    memory is copied.
    """
    if fork is not None:
        try:
            return await offload(partial(fork, descriptors))
        except OSError as error:
            log.warning("a process could not be forked (%s): it imports its own libraries", error)
    return _spawned(module, descriptors)


def _spawned(module: str, descriptors: tuple[int, int]) -> ChildProcess:
    return subprocess.Popen(
        [*python(module), *map(str, descriptors)],
        stdin=subprocess.DEVNULL,
        stdout=2,  # keeps the output of libraries out of this process's data
        pass_fds=descriptors,
        start_new_session=True,  # Ctrl-C is for the agents, which then close the socket
    )


def exit_code(process: ChildProcess) -> int:
    """Return the exit code of a process that has closed its socket, and may still write its last
    message.
    """
    with suppress(subprocess.TimeoutExpired):
        return process.wait(LAST_BREATH_S)
    process.kill()
    return process.wait()


def error_record(error: Exception) -> Record:
    """Return the facts of a record that passes an error to the agent; an unexpected one is logged
    here.
    """
    known = as_known(error, "the process")
    if isinstance(known, StorageFailed):
        return {"storage": known.parts}
    if isinstance(known, InvalidExperiment):
        return {"invalid": [*known.parts, known.frames]}
    if isinstance(known, AcceleratorLost):
        return {"lost": known.reason}
    return {"failed": str(known)}


def error_in(record: Record) -> FedstrataError | None:
    """Return the error that a record passes, if any."""
    if "invalid" in record:
        return InvalidExperiment(*record["invalid"])
    if "storage" in record:
        return StorageFailed(*record["storage"])
    if "lost" in record:
        return AcceleratorLost(record["lost"])
    if "failed" in record:
        return RunFailed(record["failed"])
    return None


def encoded(facts: Record) -> bytes:
    """Return a record as a line of JSON."""
    return json.dumps(facts, default=str).encode() + b"\n"


def _open_memory() -> IO[bytes]:
    """Return a new memory file, or a file on disk if the system has no memory files."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("fedstrata rows"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)
