"""`make bench NAME=brokers`: what fedstrata uses of a broker beyond the needed; ARGS="HOST:PORT",
else a mosquitto.

Speed, long topics, wildcards, retained messages, wills, statistics, and a reader that pauses: the
rows of docs/brokers.md that `fedstrata doctor` does not have. Each is printed with what follows
where it is missing. It takes half a minute and 32 MB of the broker's memory. What is retained is
cleared again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import median
from typing import Annotated, Final

from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.host.examination import Finding
from fedstrata.common.net.address import PORT, BrokerAddress, parse_hosts
from fedstrata.common.net.plain_client import (
    PATIENCE_S,
    ConnectRefused,
    PlainClient,
    Will,
    connected,
    pump,
)
from fedstrata.common.protocol import topics
from fedstrata.common.runtime.endpoint import HEAP
from fedstrata.deploy.brokers import broker
from tests.bench.running import MB, folder, run

LAB: Final = "bench"
NAME: Final = "operator"
TOPIC_MOST: Final = 290
SLOW_MESSAGES: Final = 32
PAUSE_S: Final = 2.0
ROUND_TRIPS: Final = 20
RATE_BYTES: Final = 32_768
RATE_MESSAGES: Final = (16, 256)  # a few first: all are too many for a slow link
SHORT_S: Final = 0.5


def behaviour(address: BrokerAddress) -> Iterator[Finding]:
    """Yield what a broker does, as it is found. Raises ConnectionFailed."""
    run = f"bench-{secrets.token_hex(4)}"

    def inbox(number: int) -> str:
        return topics.inbox(LAB, f"{run}-{number}", NAME, NAME)

    with connected(address) as first, connected(address) as second:
        both = (first, second)
        second.subscribe([inbox(0)])
        yield from _speed(second, inbox(0))
        below = f"{topics.ROOT}/{LAB}/{run}/{NAME}/blob"
        long = f"{below}/{'x' * (TOPIC_MOST - len(below) - 1)}"
        yield _useful(
            f"topics of {TOPIC_MOST} characters",
            _passes(both, long, long),
            "keep the names of labs and nodes short",
        )
        yield _useful(
            "names with a dot below a wildcard",
            _passes(both, f"{below}/node.1", f"{below}/+"),
            "give labs and nodes names without dots",
        )
        yield from _retained(address, both, topics.state(LAB, run, NAME))
        yield _will(address, second, topics.state(LAB, f"{run}-2", NAME))
        statistics = second.subscribe([HEAP])
        statistics = statistics and pump(both, lambda: HEAP in second.topics())
        yield _useful(
            "statistics below $SYS", statistics, "metrics lack the broker's memory and drops"
        )
    yield _slow_reader(address, inbox(3))


def _useful(item: str, there: bool, otherwise: str) -> Finding:
    return Finding(item, False, there, "" if there else otherwise)


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
    yield Finding(
        "rate",
        False,
        arrived == number,
        rate if arrived == number else f"{arrived} of {number} arrived",
    )


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


def _retained(
    address: BrokerAddress, both: tuple[PlainClient, PlainClient], topic: str
) -> Iterator[Finding]:
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
        yield _useful(
            f"retained messages, {what}", there, "who comes late asks, which takes up to 2 s"
        )
    count = len(second.messages)
    _keep(address, topic, b"")
    seen = pump(
        both, lambda: (topic, 0) in [(name, size) for name, size, _ in second.messages[count:]]
    )
    with connected(address) as late:
        late.subscribe([topic])
        gone = not pump((*both, late), lambda: topic in late.topics(), PATIENCE_S / 3)
    yield _useful(
        "an empty message clears it", seen and gone, "the store keeps what dead runs leave"
    )


def _keep(address: BrokerAddress, topic: str, body: bytes) -> None:
    """Publish a message to be retained, by a client of its own: a broker that retains none may
    disconnect it.
    """
    with connected(address) as client:
        client.publish(topic, body, retain=True)


def _will(address: BrokerAddress, watcher: PlainClient, topic: str) -> Finding:
    watcher.subscribe([topic])
    try:
        mortal = PlainClient(address, will=Will(topic))
    except ConnectRefused:
        mortal = PlainClient(address, will=Will(topic, qos=0, retain=False))  # as nodes do
    mortal.die()
    seen = pump((watcher,), lambda: topic in watcher.topics())
    _keep(address, topic, b"")
    return _useful(
        "the will of a lost client", seen, "a dead node is noticed after transfer.idle_s only"
    )


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
    note = (
        f"{arrived} of {SLOW_MESSAGES} chunks arrived: the others are sent again; raise the "
        "broker's queue limits"
    )
    return _useful("a slow reader gets everything", arrived == SLOW_MESSAGES, note)


def main(address: Annotated[str, "host[:port] of a broker that runs"] = "", /) -> None:
    """Print what a broker does."""
    with folder() as home, ExitStack() as stack:
        if address:
            where = BrokerAddress(*parse_hosts(address, port=PORT)[0])
        else:
            served = stack.enter_context(broker.start(directory=home))
            where = BrokerAddress(served.host, served.port)
        for one in behaviour(where):
            found = "ok     " if one.there else "missing"
            print(f"{found} {one.item}: {one.note}".rstrip(": "), flush=True)


if __name__ == "__main__":
    run(main)
