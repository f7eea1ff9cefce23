"""A channel to a process that computes, for code outside the event loop; the process's end is an `AgentChannel`."""

from __future__ import annotations

import json
import socket

from common.errors import NoProgress
from common.host.subprocess_channel import ProcessEnded, Record, encoded, error_in, exit_code, spawn


class BlockingChannel:
    """The agent's end. `patience_s`: how long `receive` waits; errors call the process `name`."""

    def __init__(self, module: str, name: str, *, patience_s: float) -> None:
        self._name = name
        self._patience_s = patience_s
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process, self.memory = spawn(module, theirs)
        self._socket.settimeout(patience_s)
        self._lines = self._socket.makefile("rb")

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def send(self, **facts: object) -> None:
        """Send a record; it is lost if the process has ended."""
        try:
            self._socket.sendall(encoded(facts))
        except OSError:
            pass  # `receive` reports how it ended

    def receive(self) -> Record:
        """Wait for the next record. Raises ProcessEnded, NoProgress, and the error that a record passes."""
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise NoProgress(f"{self._name} made no progress for {self._patience_s:g} s") from None
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise ProcessEnded(self._name, exit_code(self._process))
        record: Record = json.loads(line)
        if (error := error_in(record)) is not None:
            raise error
        return record

    def kill(self) -> None:
        """Kill the process, so that a waiting `receive` ends; for other threads."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process, wait for its end, and release the socket and the memory."""
        self._process.kill()
        self._process.wait()
        self._lines.close()
        self._socket.close()
        self.memory.close()
