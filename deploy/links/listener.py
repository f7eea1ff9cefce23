"""The listener of `fedstrata links measure --listen`: it serves one connection at a time, for a bounded time."""

from __future__ import annotations

import logging
import socket

from common.errors import InvalidExperiment, NoProgress, WireError
from deploy.links.exchange import (
    MAGIC,
    PATIENCE_S,
    PINGS,
    RATE,
    REQUEST,
    SECONDS_MOST,
    Mode,
    discard,
    receive_exactly,
    send_noise,
    time_noise,
)

log = logging.getLogger("fedstrata.links")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 = a free one. Raises InvalidExperiment."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        remedy = "Use an address of this host, or 0.0.0.0, and a free port."
        raise InvalidExperiment("--listen", f"{host}:{port}", error.strerror or str(error), remedy) from None


def serve(listening: socket.socket) -> None:
    """Serve measurements, one connection after another, until the socket is closed. Raises OSError then."""
    while True:
        connection, address = listening.accept()
        with connection:
            try:
                _serve_one(connection)
            except (OSError, NoProgress, WireError) as error:
                log.info("%s: %s", address[0], error)


def _serve_one(connection: socket.socket) -> None:
    connection.settimeout(PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if receive_exactly(connection, len(MAGIC)) != MAGIC:
        raise WireError("no measurement of this release")
    code, seconds = REQUEST.unpack(receive_exactly(connection, REQUEST.size))
    try:
        mode = Mode(code)
    except ValueError:
        raise WireError(f"unknown mode {code!r}") from None
    if not 0 < seconds <= SECONDS_MOST:
        raise WireError(f"{seconds} seconds")
    connection.sendall(MAGIC)
    if mode is Mode.PING:
        for _ in range(PINGS):
            connection.sendall(receive_exactly(connection, 1))
    elif mode is Mode.UP:
        connection.sendall(RATE.pack(time_noise(connection, seconds)))
        discard(connection)
    else:
        send_noise(connection, seconds + PATIENCE_S)
