"""The steps to an MQTT broker, and what no run can do without, examined on a broker that runs:
`fedstrata doctor`.

Plain clients of MQTT 3.1.1 on the lab's own topics, in a run of the examination's own, so that a
broker's access rules apply to them as to nodes.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import time
from collections.abc import Iterator
from math import inf
from typing import Final, TypeAlias, cast

from fedstrata.common.errors import ConnectionFailed
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.host.examination import Finding
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.packet_limit import LEAST_BYTES, PacketLimit, largest_packet
from fedstrata.common.net.plain_client import (
    CONNECT_S,
    ConnectRefused,
    PlainClient,
    Will,
    connected,
    pump,
    reported_limit,
)
from fedstrata.common.net.refusals import CODES, Asked, Lack, both_last, find_lack
from fedstrata.common.net.tls import SOON_S, Tls, reason_of
from fedstrata.common.protocol import topics

DAY_S: Final = 86_400
STEPS: Final = ("name", "TCP", "TLS", "login")
HEADERS: Final = 1000  # more than those of any chunk's packet
REFUSAL_S: Final = 1.0  # within which a forged message would have come
STRANGER: Final = "doctor-stranger"  # no node's name

_Names: TypeAlias = tuple[tuple[tuple[str, str], ...], ...]  # of a decoded certificate


def steps(address: BrokerAddress) -> Iterator[Finding]:
    """Yield the steps to the first of a broker's addresses; one that is needed and not there is the
    last.
    """
    host = address.host
    port = address.port
    try:
        (_, _, _, _, where), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        yield Finding(
            "name",
            True,
            False,
            f"{host}: {error.strerror}. Is --broker right? Is the name server there?",
        )
        return
    other = str(where[0]) * (where[0] != host)
    yield Finding("name", True, True, other)
    began = time.monotonic()
    try:
        raw = socket.create_connection((host, port), timeout=CONNECT_S)
    except OSError as error:
        reason = error.strerror
        if isinstance(error, TimeoutError):
            reason = f"no answer within {CONNECT_S:g} s"
        yield Finding(
            "TCP",
            True,
            False,
            f"{reason}. Is it running there? Does a firewall refuse port {port}?",
        )
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
            who = f"as {address.username}" if address.username else ""
            yield Finding("login", True, True, who)
    except ConnectRefused as refused:
        lack = CODES.get(refused.code or 0, Lack.CLIENTS)
        why = str(refused) if lack is Lack.LOGIN else lack.value
        yield Finding("login", True, False, why)
    except ConnectionFailed as error:
        yield Finding("login", True, False, str(error))


def _tls(raw: socket.socket, tls: Tls, host: str) -> Iterator[Finding]:
    """Yield what the broker's certificate is, and whether it and ours end soon. Raises OSError."""
    with tls.client_context().wrap_socket(raw, server_hostname=host) as secured:
        found = secured.getpeercert() or {}
    issuer = dict(each for part in cast(_Names, found.get("issuer", ())) for each in part)
    whose = issuer.get("commonName", "an unnamed authority")
    ends_at = ssl.cert_time_to_seconds(str(found["notAfter"]))
    yield Finding(
        "TLS",
        True,
        True,
        f"certificate by {whose}, until {time.strftime('%Y-%m-%d', time.gmtime(ends_at))}",
    )
    yield from _ends("the broker's certificate", ends_at)
    if (own := tls.ends_at()) is not None:
        yield from _ends("our certificate", own)


def _ends(whose: str, ends_at: float) -> Iterator[Finding]:
    days = (ends_at - time.time()) / DAY_S
    note = f"it ends in {days:.0f} days" if days > 0 else "it has ended, or has not begun"
    note += "" if days > SOON_S / DAY_S else ": provision again and install the kits"
    yield Finding(f"{whose} is valid for 30 days", False, days > SOON_S / DAY_S, note)


def examine(address: BrokerAddress, *, lab: str, name: str) -> Iterator[Finding]:
    """Yield what is needed of the first of a broker's addresses, as it is found, within some
    seconds.

    Only topics of `name` are used, so that a broker's access rules for that login allow them.
    Raises ConnectionFailed if the broker cannot be reached or refuses the login.
    """

    def inbox(number: int) -> str:
        return topics.inbox(lab, f"{run}-{number}", name, name)

    run = f"doctor-{secrets.token_hex(4)}"
    with connected(address) as first, connected(address) as second:
        both = (first, second)
        lasts = _beside(both)
        yield lasts
        if not lasts.there:
            return  # nothing else can be examined
        granted = second.subscribe([inbox(0)])
        yield _needed("subscriptions are granted", granted, f"this login may not read {inbox(0)}")
        first.publish(inbox(0), b"hello")
        arrived = pump(both, lambda: inbox(0) in second.topics())
        yield _needed("messages are delivered", arrived, f"nothing arrives on {inbox(0)}")
        yield _forged(both, topics.inbox(lab, f"{run}-3", name, STRANGER))
        yield _packets(address, inbox(1))
        yield _as_a_node(address, name, topics.state(lab, f"{run}-2", name))


def _beside(both: tuple[PlainClient, PlainClient]) -> Finding:
    return _needed("two connections of one login", both_last(both), Lack.BESIDE.value)


def _as_a_node(address: BrokerAddress, name: str, topic: str) -> Finding:
    """Connect as a node does, with its id and its will."""
    lack = find_lack(
        address, Asked(f"{name}-01234567-0123-0", TransferSettings().keepalive_s, Will(topic))
    )
    why = "" if lack is None else lack.value
    return _useful("ids and wills of nodes", lack is None, why)


def _needed(item: str, there: bool, otherwise: str) -> Finding:
    note = "" if there else otherwise
    return Finding(item, True, there, note)


def _useful(item: str, there: bool, otherwise: str) -> Finding:
    note = "" if there else otherwise
    return Finding(item, False, there, note)


def _forged(both: tuple[PlainClient, PlainClient], topic: str) -> Finding:
    """Publish under another node's name, into our own inbox."""
    first, second = both
    second.subscribe([topic])
    first.publish(topic, b"hello")
    came = pump(both, lambda: topic in second.topics(), REFUSAL_S)
    otherwise = (
        "whoever may log in passes as any node: use the access rules of `fedstrata provision`"
    )
    return _useful("other nodes' names are refused", not came, otherwise)


def _packets(address: BrokerAddress, topic: str) -> Finding:
    """Find the largest packet that passes, and whether the broker reports that limit."""
    usual = TransferSettings().chunk_bytes + HEADERS
    reported = asyncio.run(reported_limit(address))
    most = min(usual, reported or usual)
    if most < LEAST_BYTES:
        found = PacketLimit(most, most + 1)
    else:
        found = largest_packet(address, topic, most)
    note = ""
    if found.unknown:
        note = "larger ones could not be tried on this link"
    elif found.passes < LEAST_BYTES:
        note = "raise the broker's limit of packets"
    elif (passes := min(found.passes, most)) < usual:
        how = "and it does not report that (mosquitto: message_size_limit)"
        if found.passes > passes:
            how = "as it reports"
        elif found.dropped == inf:
            how = "as far as this link shows"
        note = (
            f"the broker takes {passes} bytes, not {usual}, {how}: chunks are smaller; raise "
            "its limit"
        )
    return Finding(f"packets of {LEAST_BYTES} bytes", True, found.passes >= LEAST_BYTES, note)
