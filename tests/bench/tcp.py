"""Baselines: what plain TCP on loopback needs for the traffic of one federated round.

A round sends so many models down and the same number up again, over one connection between two
processes. A relay puts a third process between them, so that each byte crosses two sockets: the
ceiling of anything with a broker.
"""

from __future__ import annotations

import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
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
                process = spawn([sys.executable, str(Path(__file__)), "relay", str(port)])
                stack.callback(stop, process)
                self.pids.append(process.pid)
                assert process.stdout is not None
                port = int(process.stdout.readline())
            sizes = (str(n) for n in (port, self._nbytes, self._down, self._up))
            peer = spawn([sys.executable, str(Path(__file__)), "peer", *sizes])
            stack.callback(stop, peer)
            self.pids.append(peer.pid)
            self._connection = stack.enter_context(server.accept()[0])
            self._connection.settimeout(None)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ends = stack.pop_all()
        self.seconds()  # to warm up
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

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
    below.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _receive(connection: socket.socket, buffer: bytearray) -> None:
    view = memoryview(buffer)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise SystemExit  # the other end has finished
        view = view[received:]


def _warm(nbytes: int) -> bytearray:
    return bytearray(b"\x01") * nbytes  # written, so that no page is faulted in on the clock


def _main(arguments: Sequence[str]) -> None:
    match arguments:
        case ["peer", *sizes]:
            _run_peer(*map(int, sizes))
        case ["relay", port]:
            _run_relay(int(port))
        case _:
            for relayed in (False, True):
                with Baseline(45_000_000, down=10, up=10, relayed=relayed) as baseline:
                    seconds = statistics.median(baseline.seconds() for _ in range(5))
                print(
                    f"{'relay' if relayed else 'raw TCP':8} {0.9 / seconds:.2f} GB/s  (10 x 45 MB "
                    "down and up)"
                )


if __name__ == "__main__":
    _main(sys.argv[1:])
