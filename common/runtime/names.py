"""Names that a broker cannot carry: to RabbitMQ a dot is the separator of its own topics, and `+` does not match it."""

from __future__ import annotations

import asyncio
from typing import Final

from common.errors import ConnectionFailed
from common.net.address import BrokerAddress
from common.protocol import topics
from common.runtime.lab_client import LabClient
from common.runtime.world import REAL, World

PLAIN: Final = "plain"
ASK_S: Final = 0.5
ASKS: Final = 10


async def check_carried(
    address: BrokerAddress, name: str, *, lab: str, connect_timeout_s: float, world: World = REAL
) -> None:
    """Return if the broker delivers messages of a node `name`, which are sent to itself.

    Raises ConnectionFailed if it delivers those of another name only, or cannot be reached.
    """
    if "." not in lab + name:
        return
    wanted, plain = topics.here(lab, name, name), topics.here(PLAIN, PLAIN, PLAIN)
    came: set[str] = set()
    arrived = asyncio.Event()

    def received(topic: topics.Topic, body: bytes, retained: bool) -> None:
        for each in (wanted, plain):
            if topic == topics.parse(each):
                came.add(each)
                arrived.set()

    def ask() -> None:
        for topic in (wanted, plain):  # in this order
            client.publish_body(topic, b"")

    reads = [topics.here(lab, name, "+"), topics.here(PLAIN, PLAIN, "+")]
    client = LabClient(address, f"{name}-names", reads=reads, received=received, world=world)
    async with client.connected(timeout_s=connect_timeout_s):
        await client.ask(ask, until=arrived, every_s=ASK_S, times=ASKS)
    if plain in came and wanted not in came:
        where = f"{name} in lab {lab}" if "." in name else f"lab {lab}"
        raise ConnectionFailed(
            f"broker {address} does not carry the dot in the name of {where}, as RabbitMQ does not. "
            "Take a name without dots there."
        )
