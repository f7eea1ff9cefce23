"""Names that a broker cannot carry: to RabbitMQ a dot is the separator of its own topics, and `+` does not match it."""

from __future__ import annotations

import asyncio
from typing import Final

from common.errors import ConnectionFailed
from common.experiment.schema import TransferSettings
from common.net.address import BrokerAddress
from common.protocol import topics
from common.runtime.asking import work_over
from common.runtime.world import REAL, World, new_session, nothing

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

    def received(topic_text: str, body: bytes, retained: bool) -> None:
        if topic_text in (wanted, plain):
            came.add(topic_text)
            arrived.set()

    async def subscribe() -> None:
        connection.subscribe([topics.here(lab, name, "+"), topics.here(PLAIN, PLAIN, "+")], qos=0)
        connected.set()

    async def ask() -> None:
        await connected.wait()
        for _ in range(ASKS):
            for topic in (wanted, plain):  # in this order
                connection.publish(topic, b"", qos=0)
            try:
                async with asyncio.timeout(ASK_S):
                    while wanted not in came and plain not in came:
                        arrived.clear()
                        await arrived.wait()
            except TimeoutError:
                continue
            if wanted in came:
                return
        if plain in came:
            where = f"{name} in lab {lab}" if "." in name else f"lab {lab}"
            raise ConnectionFailed(
                f"broker {address} does not carry the dot in the name of {where}, as RabbitMQ does not. "
                "Take a name without dots there."
            )

    connected = asyncio.Event()
    connection = world.connection(
        address,
        client_id=f"{name}-names-{new_session(world)}",
        keepalive_s=TransferSettings().keepalive_s,
        received=received,
        connected=subscribe,
        lost=nothing,
    )
    await work_over(connection, ask(), connect_timeout_s=connect_timeout_s)
