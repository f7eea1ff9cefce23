"""The HTTP server of a role's metrics: who may read them, when they were read, and what strangers
cannot exhaust.

Its connections, the bytes of a request and the time of one are bounded, so that whoever reaches the
port takes neither the descriptors of the role nor a scrape's turn. prometheus_client's own server
cannot take its place: it makes the TLS handshake in the thread that accepts, so one client that
does not continue its handshake stops all scrapes; and it has no login, no list of revoked
certificates, and no other pages.

A role that ends waits for Prometheus to read its last values. How often Prometheus asks is known
from its requests:
the time between two, and what it states in a header of each.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import sys
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hmac import compare_digest
from io import BytesIO
from math import isfinite
from socketserver import ThreadingMixIn
from threading import Lock, Thread
from typing import Any, Final
from wsgiref.handlers import SimpleHandler
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

BEAT_S: Final = 1.0
REQUEST_S: Final = 30.0  # from the connection to the end of the reply, the TLS handshake included
HEAD_MOST: Final = 16_384  # bytes of a request
CONNECTIONS_MOST: Final = 32
REST_S: Final = 0.2  # of a process without descriptors, before it accepts again
CERTIFIED: Final = "fedstrata.certified"
HANGS_S: Final = 30.0  # without a beat: a small board under load is late, too
SCRAPE_MOST_S: Final = 60.0
INTERVALS: Final = 3  # without a scrape: on a loaded host one comes late
# in a lab's certificates: no broker's name, whose machine it may be
SERVER_NAME: Final = "metrics.fedstrata.invalid"
# Of Prometheus' requests for the targets, and for metrics; a scrape's timeout is at most its
# interval.
REFRESH: Final = "HTTP_X_PROMETHEUS_REFRESH_INTERVAL_SECONDS"
TIMEOUT: Final = "HTTP_X_PROMETHEUS_SCRAPE_TIMEOUT_SECONDS"


class Heartbeat:
    """The time at which an event loop ran last, for the server's thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last: float | None = None

    def beat(self) -> None:
        """Beat now, and then once a BEAT_S, as long as the running event loop runs."""
        self._last = self._now()
        asyncio.get_running_loop().call_later(BEAT_S, self.beat)

    def failure(self) -> str:
        """Return why the process is not healthy; empty if its loop has run in the last HANGS_S."""
        if self._last is None:
            return "the event loop has not begun"
        age_s = self._now() - self._last
        if age_s > HANGS_S:
            return f"the event loop last ran {age_s:.1f} s ago"
        return ""


class Scrapes:
    """The times of the requests for /metrics, or for /sd."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last: tuple[float, float] | None = None
        self._interval_s = 0.0
        self._awaited: set[tuple[asyncio.AbstractEventLoop, asyncio.Event, float]] = set()

    def serve(
        self, answer: Callable[[], Iterable[bytes]], *, interval: str = ""
    ) -> Iterator[bytes]:
        """Yield the body of a response, generated now; the scrape counts once the body has been
        sent.

        `interval`: seconds between two requests, at least, as the request states them; else two are
        needed to know.
        """
        begun = self._now()
        yield from answer()
        since_last_s = 0.0 if self._last is None else begun - self._last[0]
        self._interval_s = max(since_last_s, _seconds(interval))
        self._last = begun, self._now()
        for loop, seen, since in list(self._awaited):
            if begun >= since:
                loop.call_soon_threadsafe(seen.set)

    def patience_s(self) -> float:
        """Return how long to wait for the next scrape: INTERVALS, 0 if scrapes have stopped."""
        if self._last is None or self._now() - self._last[0] > INTERVALS * self._interval_s:
            return 0.0
        return min(INTERVALS * self._interval_s, SCRAPE_MOST_S)

    async def wait_for_next(self) -> None:
        """Wait for a scrape that begins after this call, at most `patience_s`."""
        wanted = asyncio.get_running_loop(), asyncio.Event(), self._now()
        self._awaited.add(wanted)
        try:
            async with asyncio.timeout(self.patience_s()):
                await wanted[1].wait()
        except TimeoutError:
            pass
        finally:
            self._awaited.discard(wanted)


def _seconds(text: str) -> float:
    """Return the seconds in a header, 0 if these are none."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    if isfinite(value) and value > 0:
        return value
    return 0.0


def serve(
    answer: Callable[[Any, Any], Iterable[bytes]],
    host: str,
    port: int,
    *,
    tls: Callable[[], ssl.SSLContext] | None,
) -> int:
    """Serve a WSGI application from a thread and return the port; port 0 selects a free one. Raises
    OSError.
    """
    family = _Server6 if ":" in host else _Server
    server = make_server(host, port, answer, family, _Silent)
    server.tls = tls
    Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_port)


@dataclass(frozen=True, slots=True)
class MetricsGuard:
    """Who may read the metrics: clients with a certificate that `tls` accepts, or with `login`,
    name:password.

    `tls` returns the context of the next connection.
    """

    tls: Callable[[], ssl.SSLContext] | None
    login: str = field(default="", repr=False)

    def admits(self, environ: Mapping[str, Any]) -> bool:
        """Return whether a request may be answered."""
        if environ[CERTIFIED]:
            return True
        wanted = "Basic " + b64encode(self.login.encode()).decode()
        return bool(self.login) and compare_digest(
            environ.get("HTTP_AUTHORIZATION", "").encode(), wanted.encode()
        )


class _Server(ThreadingMixIn, WSGIServer):
    """A server with a thread for each of at most CONNECTIONS_MOST connections.

    A further one takes the place of the oldest of the host that has the most, so that no host takes
    another's.
    """

    daemon_threads = True
    request_queue_size = 128
    tls: Callable[[], ssl.SSLContext] | None = None

    def __init__(self, *arguments: Any) -> None:
        # host and beginning of each, the oldest first
        self._open: dict[socket.socket, tuple[str, float]] = {}
        self._lock = Lock()
        super().__init__(*arguments)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept; a client's handshake waits for its own thread."""
        try:
            connection, client = super().get_request()
        except OSError as error:
            # the socket stays readable: do not try without a pause
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(REST_S)
            raise
        connection.settimeout(REQUEST_S)
        if self.tls is not None:
            connection = self.tls().wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        with self._lock:
            if len(self._open) >= CONNECTIONS_MOST:
                (host, _), *_ = Counter(host for host, _ in self._open.values()).most_common(1)
                self._end(next(each for each, (of, _) in self._open.items() if of == host))
            self._open[connection] = client[0], time.monotonic()
        return connection, client

    def service_actions(self) -> None:
        """End the connections whose time is over."""
        with self._lock:
            for each in [
                each
                for each, (_, begun) in self._open.items()
                if begun + REQUEST_S < time.monotonic()
            ]:
                self._end(each)

    def _end(self, connection: socket.socket) -> None:
        """End a connection, which its own thread closes then."""
        del self._open[connection]
        with suppress(OSError):
            # that of TLS may not be called by another thread
            socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; by TLS so that the client knows that the reply is complete."""
        with self._lock:
            self._open.pop(request, None)
        if isinstance(request, ssl.SSLSocket):
            request.settimeout(0)
            with suppress(OSError, ValueError):
                request.unwrap()  # sends that it ends, and does not wait for the client's
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log nothing: a client that speaks no HTTP or TLS, or goes away."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Reply(SimpleHandler):
    def log_exception(self, exc_info: Any) -> None:
        """Log what is wrong here, and nothing of a client that goes away."""
        if not isinstance(exc_info[1], OSError):
            super().log_exception(exc_info)


class _Silent(WSGIRequestHandler):
    def handle(self) -> None:
        """Answer one request, once all of it has come."""
        head = b""
        while b"\r\n\r\n" not in head:
            if len(head) > HEAD_MOST or not (part := self.connection.recv(HEAD_MOST)):
                return
            head += part
        self.rfile.close()
        self.rfile = BytesIO(head)
        self.raw_requestline = self.rfile.readline()
        if self.parse_request():
            server: Any = self.server
            out: Any = self.wfile
            _Reply(self.rfile, out, sys.stderr, self.get_environ()).run(server.get_app())

    def get_environ(self) -> dict[str, Any]:
        certified = isinstance(self.connection, ssl.SSLSocket) and bool(
            self.connection.getpeercert()
        )
        return {**super().get_environ(), CERTIFIED: certified}

    def log_message(self, *_: object) -> None:
        """Log nothing."""
