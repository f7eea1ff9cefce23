"""Names with dots, which a broker may not carry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConnectionFailed
from common.net.address import BrokerAddress
from common.net.connection import Handlers
from common.runtime import discovery
from common.runtime.discovery import check_carried
from common.runtime.world import REAL
from deploy.brokers.broker import start


class Broker:
    """A world with one connection, to a broker that sends back what `carries` lets pass."""

    def __init__(self, carries: Callable[[str], bool]) -> None:
        self.published: list[str] = []
        self._carries = carries

    token = staticmethod(REAL.token)

    def connection(self, address: BrokerAddress, handlers: Handlers, **rest: Any) -> Broker:
        self._handlers = handlers
        return self

    async def run(self, *, connect_timeout_s: float) -> None:
        await self._handlers.connected()
        await asyncio.Event().wait()

    def subscribe(self, topics: list[str], *, qos: int, refused: Callable[[str], None]) -> None:
        pass

    def publish(self, topic: str, payload: bytes, *, qos: int) -> None:
        self.published.append(topic)
        if self._carries(topic):
            self._handlers.received(topic, payload, False)


def check(broker: Broker, name: str, lab: str = "lab") -> None:
    world: Any = broker
    asyncio.run(check_carried(BrokerAddress("b"), name, lab=lab, connect_timeout_s=1.0, world=world))


def test_a_name_without_dots_needs_no_message() -> None:
    broker = Broker(lambda topic: False)
    check(broker, "device-0")
    assert not broker.published


@pytest.mark.parametrize(("name", "lab", "named"), [("pi.3", "lab", "pi.3 in lab lab"), ("pi", "a.b", "lab a.b")])
def test_a_broker_that_does_not_carry_dots_is_named(name: str, lab: str, named: str) -> None:
    with pytest.raises(ConnectionFailed, match=f"broker b:1883 does not carry the dot in the name of {named},"):
        check(Broker(lambda topic: "." not in topic), name, lab)


def test_a_lost_message_is_sent_again() -> None:
    broker = Broker(lambda topic: len(broker.published) > 2)
    check(broker, "pi.3")
    assert len(broker.published) == 4


def test_a_broker_that_denies_the_other_name_too_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "CHECKS", 2)
    check(Broker(lambda topic: False), "pi.3")


def test_a_real_broker_carries_dots(tmp_path: Path) -> None:
    with start(directory=tmp_path) as broker:
        address = BrokerAddress(broker.host, broker.port)
        asyncio.run(check_carried(address, "pi.3", lab="my.lab", connect_timeout_s=10.0))
