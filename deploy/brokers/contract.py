"""The steps to an MQTT broker, and what fedstrata needs of one, examined on a broker that runs: `fedstrata doctor`.

Plain clients of MQTT 3.1.1 on the lab's own topics, in a run of the examination's own, so that a broker's access rules
apply to them as to nodes. What is retained is cleared again.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import time
from collections.abc import Iterator
from statistics import median
from typing import Final, TypeAlias, cast

from common.errors import ConnectionFailed
from common.experiment.schema import TransferSettings
from common.host.examination import Finding
from common.net.address import BrokerAddress
from common.net.plain_client import (
    CONNECT_S,
    LEAST_BYTES,
    PATIENCE_S,
    PlainClient,
    connected,
    largest_packet,
    pump,
    reported_limits,
)
from common.net.tls import SOON_S, Tls, reason_of
from common.protocol import topics
from common.runtime.endpoint import HEAP

DAY_S: Final = 86_400
STEPS: Final = ("name", "TCP", "TLS", "login")
HEADERS: Final = 1000  # more than those of any chunk's packet
TOPIC_MOST: Final = 290
SLOW_MESSAGES: Final = 32
PAUSE_S: Final = 2.0
REFUSAL_S: Final = 1.0  # within which a forged message would have come
STRANGER: Final = "doctor-stranger"  # no node's name
ROUND_TRIPS: Final = 20
RATE_BYTES: Final = 32_768
RATE_MESSAGES: Final = (16, 256)  # a few first: all are too many for a slow link
SHORT_S: Final = 0.5
MB: Final = 1e6

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


def examine(address: BrokerAddress, *, lab: str, name: str) -> Iterator[Finding]:
    """Yield the items of the contract at the first of a broker's addresses, as they are found, within some 30 seconds.

    Only topics of `name` are used, so that a broker's access rules for that login allow them. Raises ConnectionFailed
    if the broker cannot be reached or refuses the login.
    """

    def inbox(number: int) -> str:
        return topics.inbox(lab, f"{run}-{number}", name, name)

    run = f"doctor-{secrets.token_hex(4)}"
    with connected(address) as first, connected(address) as second:
        both = (first, second)
        granted = second.subscribe([inbox(0)])
        yield Finding(
            "subscriptions are granted", True, granted, "" if granted else f"this login may not read {inbox(0)}"
        )
        first.publish(inbox(0), b"hello")
        arrived = pump(both, lambda: inbox(0) in second.topics())
        yield Finding("messages are delivered", True, arrived, "" if arrived else f"nothing arrives on {inbox(0)}")
        yield from _speed(second, inbox(0)) if arrived else ()
        yield _forged(both, topics.inbox(lab, f"{run}-4", name, STRANGER))
        yield _packets(address, inbox(1))
        below = f"{topics.ROOT}/{lab}/{run}/{name}/blob"
        long = f"{below}/{'x' * (TOPIC_MOST - len(below) - 1)}"
        yield _useful(
            f"topics of {TOPIC_MOST} characters", _passes(both, long, long), "keep the names of labs and nodes short"
        )
        yield _useful(
            "names with a dot below a wildcard",
            _passes(both, f"{below}/node.1", f"{below}/+"),
            "give labs and nodes names without dots",
        )
        yield from _retained(address, both, topics.state(lab, run, name))
        yield _will(address, second, topics.state(lab, f"{run}-2", name))
        statistics = second.subscribe([HEAP])
        statistics = statistics and pump(both, lambda: HEAP in second.topics())
        yield _useful("statistics below $SYS", statistics, "metrics lack the broker's memory and drops")
    yield _slow_reader(address, inbox(3))


def _useful(item: str, there: bool, otherwise: str) -> Finding:
    return Finding(item, False, there, "" if there else otherwise)


def _forged(both: tuple[PlainClient, PlainClient], topic: str) -> Finding:
    """Publish under another node's name, into our own inbox."""
    first, second = both
    second.subscribe([topic])
    first.publish(topic, b"hello")
    came = pump(both, lambda: topic in second.topics(), REFUSAL_S)
    otherwise = "whoever may log in passes as any node: use the access rules of `fedstrata provision`"
    return _useful("other nodes' names are refused", not came, otherwise)


def _speed(client: PlainClient, topic: str) -> Iterator[Finding]:
    """Measure messages to ourselves: up to the broker and down again."""
    trips = []
    for _ in range(ROUND_TRIPS):
        count, began = len(client.messages), time.monotonic()
        client.publish(topic, b"hello")
        if pump((client,), lambda count=count: len(client.messages) > count):  # type: ignore[misc]
            trips.append(time.monotonic() - began)
    note = f"{1e3 * median(trips):.1f} ms" if trips else "no message came back"
    yield Finding("round trip", False, bool(trips), note)
    for number in RATE_MESSAGES:
        count, began = len(client.messages), time.monotonic()
        for _ in range(number):
            client.publish(topic, bytes(RATE_BYTES))
        arrived = _until_quiet((client,), client, count + number) - count
        took_s = time.monotonic() - began
        if arrived < number or took_s > SHORT_S:
            break
    rate = f"{arrived * RATE_BYTES / took_s / MB:.1f} MB/s up and down at once"
    yield Finding("rate", False, arrived == number, rate if arrived == number else f"{arrived} of {number} arrived")


def _until_quiet(clients: tuple[PlainClient, ...], reader: PlainClient, complete: int) -> int:
    """Return how many messages the reader has once it has all, or receives no more."""
    quiet = [len(reader.messages), time.monotonic()]

    def over() -> bool:
        if len(reader.messages) != quiet[0]:
            quiet[:] = len(reader.messages), time.monotonic()
        return len(reader.messages) >= complete or time.monotonic() > quiet[1] + PATIENCE_S

    pump(clients, over, 10 * PATIENCE_S)
    return len(reader.messages)


def _passes(both: tuple[PlainClient, PlainClient], topic: str, filter_: str) -> bool:
    first, second = both
    if not second.subscribe([filter_]):
        return False
    first.publish(topic, b"hello")
    return pump(both, lambda: topic in second.topics())


def _packets(address: BrokerAddress, topic: str) -> Finding:
    """Find the largest packet that passes, and whether the broker reports that limit."""
    usual, reported = TransferSettings().chunk_bytes + HEADERS, asyncio.run(reported_limits(address)).packet_bytes
    most = min(usual, reported or usual)
    found = most if most < LEAST_BYTES else largest_packet(address, topic, most)
    note = ""
    if found is None:
        note = f"{most} bytes could not be tried on this link"
    elif found < LEAST_BYTES:
        note = "raise the broker's limit of packets"
    elif found < usual:
        how = "as it reports" if found == most else "and it does not report that (mosquitto: message_size_limit)"
        note = f"the broker takes {found} bytes, not {usual}, {how}: chunks are smaller; raise its limit"
    return Finding(f"packets of {LEAST_BYTES} bytes", True, found is None or found >= LEAST_BYTES, note)


def _retained(address: BrokerAddress, both: tuple[PlainClient, PlainClient], topic: str) -> Iterator[Finding]:
    _, second = both
    above, _, last = topic.rpartition("/")
    every = f"{above.rpartition('/')[0]}/+/{last}"
    second.subscribe([topic])
    _keep(address, topic, b"state")
    pump(both, lambda: topic in second.topics())
    for what, filter_ in (("at its topic", topic), ("at a wildcard", every)):
        with connected(address) as late:
            late.subscribe([filter_])
            there = pump((*both, late), lambda: topic in late.topics(retained=True))
        yield _useful(f"retained messages, {what}", there, "who comes late asks, which takes up to 2 s")
    count = len(second.messages)
    _keep(address, topic, b"")
    seen = pump(both, lambda: (topic, 0) in [(name, size) for name, size, _ in second.messages[count:]])
    with connected(address) as late:
        late.subscribe([topic])
        gone = not pump((*both, late), lambda: topic in late.topics(), PATIENCE_S / 3)
    yield _useful("an empty message clears it", seen and gone, "the store keeps what dead runs leave")


def _keep(address: BrokerAddress, topic: str, body: bytes) -> None:
    """Publish a message to be retained, by a client of its own: a broker that retains none may disconnect it."""
    with connected(address) as client:
        client.publish(topic, body, retain=True)


def _will(address: BrokerAddress, watcher: PlainClient, topic: str) -> Finding:
    watcher.subscribe([topic])
    try:
        mortal = PlainClient(address, will=topic)
    except ConnectionFailed:
        mortal = PlainClient(address, will=topic, retain=False)  # as nodes do
    mortal.die()
    seen = pump((watcher,), lambda: topic in watcher.topics())
    _keep(address, topic, b"")
    return _useful("the will of a lost client", seen, "a dead node is noticed after transfer.idle_s only")


def _slow_reader(address: BrokerAddress, topic: str) -> Finding:
    """Send a reader that pauses as much as a model has, and count what arrives."""
    with connected(address) as first, connected(address) as reader:
        reader.subscribe([topic])
        body = bytes(TransferSettings().chunk_bytes)
        for _ in range(SLOW_MESSAGES):
            first.publish(topic, body)
        began = time.monotonic()
        pump((first,), lambda: time.monotonic() > began + PAUSE_S, 2 * PAUSE_S)
        arrived = _until_quiet((first, reader), reader, SLOW_MESSAGES)
    note = f"{arrived} of {SLOW_MESSAGES} chunks arrived: the others are sent again; raise the broker's queue limits"
    return _useful("a slow reader gets everything", arrived == SLOW_MESSAGES, note)
