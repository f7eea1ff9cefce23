"""How a child that knows only its broker and its parent's name finds the run: it asks, and the living parent answers.

What the broker retains decides nothing: a store may bring back the dead, or keep nothing at all.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from common.errors import FedstrataError, WireError
from common.net.link import BrokerAddress
from common.protocol import serialization, topics
from common.protocol.messages import Alive, Announcement, WhoIsThere
from common.runtime.world import REAL, World, new_session
from common.spec import Transfer

ASK_S: Final = 0.25
ASK_MOST_S: Final = 2.0
COMPLAIN_S: Final = 10.0
COMPLAIN_MOST_S: Final = 600.0
SETTLE_S: Final = 0.05  # a presence and the experiment come together
OTHERS_KEPT: Final = 100

log = logging.getLogger("fedstrata.discovery")


@dataclass(frozen=True, slots=True)
class Found:
    """A run whose parent is alive: its id, the parent's session, and what it announced."""

    run: str
    parent_session: str
    announcement: Announcement


class Moved(FedstrataError):
    """The parent is alive in another run: leave this one and join that."""

    def __init__(self, found: Found) -> None:
        super().__init__(f"the parent went on to run {found.run}")
        self.found = found


async def discover(
    address: BrokerAddress, name: str, parent: str, *, lab: str, connect_timeout_s: float, world: World = REAL
) -> Found:
    """Wait for a run whose parent is alive, and return it.

    Where the parent does not answer soon, a warning names who else is there, as its name may be mistyped; it is
    repeated, less and less often. Raises ConnectionFailed.
    """
    found: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
    others: set[str] = set()
    nonce = new_session(world)
    changed = asyncio.Event()

    def received(topic_text: str, body: bytes, retained: bool) -> None:
        try:
            topic = topics.parse(topic_text)
            session, message = serialization.decode(body) if body else ("", None)
        except WireError:
            return
        if isinstance(topic, topics.SpecTopic) and message is not None and len(others) < OTHERS_KEPT:
            others.add(topic.node)
        elif isinstance(topic, topics.StateTopic):
            changed.set()  # the parent begins, or goes: ask at once
        elif isinstance(topic, topics.InboxTopic) and isinstance(message, Alive):
            if message.nonce == nonce and message.announcement is not None and not found.done():
                found.set_result(Found(topic.run, session, message.announcement))

    async def connected() -> None:
        connection.subscribe([topics.inbox(lab, "+", name, parent), topics.state(lab, "+", parent)], qos=1)
        changed.set()

    async def ask() -> None:
        pause_s = ASK_S
        question = serialization.encode(WhoIsThere(nonce), nonce)
        while True:
            connection.publish(topics.seek(lab, parent, name), question, qos=0)
            changed.clear()
            try:
                async with asyncio.timeout(pause_s):
                    await changed.wait()
                    pause_s = ASK_S
                await asyncio.sleep(SETTLE_S)
            except TimeoutError:
                pause_s = min(2 * pause_s, ASK_MOST_S)

    async def complain() -> None:
        pause_s = COMPLAIN_S
        while True:
            await asyncio.sleep(pause_s / 2)
            connection.subscribe([topics.spec(lab, "+", "+")], qos=1)
            await asyncio.sleep(pause_s / 2)
            there = f"Others are: {', '.join(sorted(others))}." if others else "No other is there either."
            log.warning("%s waits for %s on broker %s. %s", name, parent, address, there)
            pause_s = min(2 * pause_s, COMPLAIN_MOST_S)

    connection = world.connection(
        address,
        client_id=f"seeker-{world.token(8)}",
        keepalive_s=Transfer().keepalive_s,
        received=received,
        connected=connected,
        lost=lambda: None,
    )
    keeping = asyncio.create_task(connection.run(connect_timeout_s=connect_timeout_s), name="discovery")
    helpers = (keeping, asyncio.create_task(ask(), name="ask"), asyncio.create_task(complain(), name="complaint"))
    try:
        await asyncio.wait((keeping, found), return_when=asyncio.FIRST_COMPLETED)
        if not found.done():
            await keeping
        return await found
    finally:
        for task in helpers:
            task.cancel()
        await asyncio.wait(helpers)
