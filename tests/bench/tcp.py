"""Baselines: what plain TCP on loopback needs for the traffic of one federated round.

A round sends so many models down and the same number up again, over one connection between two
processes. A relay puts a third process between them, so that each byte crosses two sockets: the
ceiling of anything with a broker.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Self

from fedstrata.common.host.processes import spawn, stop

_RELAY_BYTES = 1_000_000
_PATIENCE_S = 30.0


class Baseline:
    """Two processes and one connection, or a relay between; `seconds` times `down` models there and
    `up` back.

    With none back, one byte reports that all has arrived. `pids` are the processes beside the
    caller's own.
    """

    def __init__(self, nbytes: int, *, down: int, up: int, relayed: bool) -> None:
        self._nbytes, self._down, self._up, self._relayed = nbytes, down, up, relayed
        self._buffer = _warm(nbytes)
        self.pids: list[int] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            server.settimeout(_PATIENCE_S)
            port = server.getsockname()[1]
            if self._relayed:
                relay = self._start(stack, "relay", port)
                assert relay.stdout is not None
                port = int(relay.stdout.readline())
            self._start(stack, "peer", port, self._nbytes, self._down, self._up)
            self._connection = stack.enter_context(server.accept()[0])
            _hurry(self._connection)
            self._ends = stack.pop_all()
        self.seconds()  # to warm up
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def _start(self, stack: ExitStack, *words: object) -> subprocess.Popen[bytes]:
        process = spawn([sys.executable, __file__, *map(str, words)])
        stack.callback(stop, process)
        self.pids.append(process.pid)
        return process

    def seconds(self) -> float:
        """Return how long one exchange takes."""
        started = time.perf_counter()
        for _ in range(self._down):
            self._connection.sendall(self._buffer)
        for _ in range(self._up):
            _receive(self._connection, self._buffer)
        if not self._up:
            _receive(self._connection, bytearray(1))
        return time.perf_counter() - started


def _run_peer(port: int, nbytes: int, down: int, up: int) -> None:
    buffer = _warm(nbytes)
    with _connect(port) as connection:
        while True:
            for _ in range(down):
                _receive(connection, buffer)
            for _ in range(up):
                connection.sendall(buffer)
            if not up:
                connection.sendall(b"\x01")


def _run_relay(port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        below, _ = server.accept()
    _hurry(below)
    above = _connect(port)
    threading.Thread(target=_pump, args=(below, above), daemon=True).start()
    _pump(above, below)


def _pump(source: socket.socket, target: socket.socket) -> None:
    buffer = _warm(_RELAY_BYTES)
    view = memoryview(buffer)
    while received := source.recv_into(buffer):
        target.sendall(view[:received])


def _connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S)
    _hurry(connection)
    return connection


def _hurry(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(connection: socket.socket, buffer: bytearray) -> None:
    view = memoryview(buffer)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise SystemExit  # the other end has finished
        view = view[received:]


def _warm(nbytes: int) -> bytearray:
    return bytearray(b"\x01") * nbytes  # written, so that no page is faulted in on the clock


def _main(role: str, *numbers: str) -> None:
    runs: dict[str, Callable[..., None]] = {"peer": _run_peer, "relay": _run_relay}
    runs[role](*map(int, numbers))


if __name__ == "__main__":
    _main(*sys.argv[1:])
