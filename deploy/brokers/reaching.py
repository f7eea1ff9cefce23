"""The steps to a broker, one by one: its name, TCP, TLS and the login."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from typing import Final, TypeAlias, cast

from common.errors import ConnectionFailed
from common.host.examination import Finding
from common.net.address import BrokerAddress
from common.net.plain_client import CONNECT_S, connected
from common.net.tls import SOON_S, Tls, reason_of

DAY_S: Final = 86_400
STEPS: Final = ("name", "TCP", "TLS", "login")

_Names: TypeAlias = tuple[tuple[tuple[str, str], ...], ...]  # of a decoded certificate


def steps(address: BrokerAddress) -> Iterator[Finding]:
    """Yield the steps to the first of a broker's addresses; one that is needed and not there is the last."""
    host, port = address.host, address.port
    try:
        (_, _, _, _, where), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        yield Finding("name", True, False, f"{host}: {error.strerror}. Is --broker right? Is the name server there?")
        return
    yield Finding("name", True, True, "" if where[0] == host else str(where[0]))
    began = time.monotonic()
    try:
        raw = socket.create_connection((host, port), timeout=CONNECT_S)
    except OSError as error:
        reason = f"no answer within {CONNECT_S:g} s" if isinstance(error, TimeoutError) else error.strerror
        yield Finding("TCP", True, False, f"{reason}. Is it running there? Does a firewall refuse port {port}?")
        return
    with raw:
        yield Finding("TCP", True, True, f"{1e3 * (time.monotonic() - began):.1f} ms")
        try:
            yield from _tls(raw, address.tls, host) if address.tls is not None else ()
        except OSError as error:
            yield Finding("TLS", True, False, reason_of(error))
            return
    try:
        with connected(address):
            yield Finding("login", True, True, f"as {address.username}" if address.username else "")
    except ConnectionFailed as error:
        yield Finding("login", True, False, str(error))


def _tls(raw: socket.socket, tls: Tls, host: str) -> Iterator[Finding]:
    """Yield what the broker's certificate is, and whether it and ours end soon. Raises OSError."""
    with tls.client_context().wrap_socket(raw, server_hostname=host) as secured:
        found = secured.getpeercert() or {}
    issuer = dict(each for part in cast(_Names, found.get("issuer", ())) for each in part)
    whose, ends_at = issuer.get("commonName", "an unnamed authority"), ssl.cert_time_to_seconds(str(found["notAfter"]))
    yield Finding("TLS", True, True, f"certificate by {whose}, until {time.strftime('%Y-%m-%d', time.gmtime(ends_at))}")
    yield from _ends("the broker's certificate", ends_at)
    if (own := tls.ends_at()) is not None:
        yield from _ends("our certificate", own)


def _ends(whose: str, ends_at: float) -> Iterator[Finding]:
    days = (ends_at - time.time()) / DAY_S
    note = f"it ends in {days:.0f} days" if days > 0 else "it has ended, or has not begun"
    note += "" if days > SOON_S / DAY_S else ": provision again and install the kits"
    yield Finding(f"{whose} is valid for 30 days", False, days > SOON_S / DAY_S, note)
