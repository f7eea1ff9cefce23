"""Baselines: what plain TCP on loopback needs for the traffic of one federated round.

A round sends `devices` models down and the same number up again. `raw_tcp` joins two processes by one connection;
`relay` puts a third between them, so that each byte crosses two sockets: the ceiling of anything with a broker.
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

from deploy.processes import spawn, stop

_RELAY_BYTES = 1_000_000
_PATIENCE_S = 30.0


def raw_tcp(nbytes_per_device: int, devices: int, *, repeats: int = 5) -> float:
    """Return the median seconds of a round between two processes, after one to warm up."""
    return statistics.median(_rounds(nbytes_per_device, devices, repeats=repeats, relayed=False))


def relay(nbytes_per_device: int, devices: int, *, repeats: int = 5) -> float:
    """Return the median seconds of a round through a third process, after one to warm up."""
    return statistics.median(_rounds(nbytes_per_device, devices, repeats=repeats, relayed=True))


def _rounds(nbytes: int, devices: int, *, repeats: int, relayed: bool) -> Sequence[float]:
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server.settimeout(_PATIENCE_S)
        port = server.getsockname()[1]
        if relayed:
            process = spawn([sys.executable, str(Path(__file__)), "relay", str(port)])
            stack.callback(stop, process)
            assert process.stdout is not None
            port = int(process.stdout.readline())
        process = spawn([sys.executable, str(Path(__file__)), "peer", str(port), str(nbytes), str(devices)])
        stack.callback(stop, process)
        connection = stack.enter_context(server.accept()[0])
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = _warm(nbytes)
        return [_round(connection, buffer, devices) for _ in range(1 + repeats)][1:]


def _round(connection: socket.socket, buffer: bytearray, devices: int) -> float:
    started = time.perf_counter()
    for _ in range(devices):
        connection.sendall(buffer)
    for _ in range(devices):
        _receive(connection, buffer)
    return time.perf_counter() - started


def _run_peer(port: int, nbytes: int, devices: int) -> None:
    buffer = _warm(nbytes)
    with _connect(port) as connection:
        while True:
            for _ in range(devices):
                _receive(connection, buffer)
            for _ in range(devices):
                connection.sendall(buffer)


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
        case ["peer", port, nbytes, devices]:
            _run_peer(int(port), int(nbytes), int(devices))
        case ["relay", port]:
            _run_relay(int(port))
        case _:
            gigabytes = 2 * 10 * 45e6 / 1e9
            print(f"raw TCP  {gigabytes / raw_tcp(45_000_000, 10):.2f} GB/s  (10 x 45 MB down and up)")
            print(f"relay    {gigabytes / relay(45_000_000, 10):.2f} GB/s")


if __name__ == "__main__":
    _main(sys.argv[1:])
