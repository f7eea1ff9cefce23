"""How a child that knows only its broker and its parent's name finds the run."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Final

from common.errors import WireError
from common.net.link import BrokerAddress, Link
from common.spec import Transfer
from common.wire import packing, topics
from common.wire.messages import Announcement, NodeState, Presence

PATIENCE_S: Final = 5.0

log = logging.getLogger("fedstrata.discovery")


async def discover(
    address: BrokerAddress, parent: str, *, lab: str, connect_timeout_s: float
) -> tuple[str, Announcement]:
    """Wait for a run of the lab whose parent is alive; return its id and what the parent announced.

    An experiment that a dead parent left on the broker is passed over. Where the parent does not come soon, a
    warning tells who else is there: its name may be mistyped. Raises ConnectionFailed.
    """
    found: asyncio.Future[tuple[str, Announcement]] = asyncio.get_running_loop().create_future()
    announced: dict[str, Announcement] = {}
    alive: set[str] = set()
    others: set[str] = set()

    def received(topic_text: str, body: bytes, retained: bool) -> None:
        try:
            topic = topics.parse(topic_text)
            message = packing.decode(body)[1] if body else None
        except WireError:
            return
        if not isinstance(topic, (topics.SpecTopic, topics.StateTopic)):
            return
        if topic.node != parent:
            (others.add if message is not None else others.discard)(topic.node)
        elif isinstance(message, Announcement):
            announced[topic.run] = message
        elif isinstance(message, Presence) and message.state in (NodeState.INIT, NodeState.READY):
            alive.add(topic.run)
        else:
            announced.pop(topic.run, None) if isinstance(topic, topics.SpecTopic) else alive.discard(topic.run)
        both = alive & set(announced)
        if both and not found.done():
            run = max(both)
            found.set_result((run, announced[run]))

    async def connected() -> None:
        link.subscribe([topics.spec(lab, "+", parent), topics.state(lab, "+", parent)], qos=1)

    async def complain() -> None:
        await asyncio.sleep(PATIENCE_S)
        link.subscribe([topics.spec(lab, "+", "+")], qos=1)
        await asyncio.sleep(PATIENCE_S)
        there = f"There are {', '.join(sorted(others))}." if others else "No other is there either."
        log.warning("waiting for %s of lab %s on broker %s. %s", parent, lab, address, there)

    link = Link(
        address,
        client_id=f"seeker-{secrets.token_hex(8)}",
        keepalive_s=Transfer().keepalive_s,
        received=received,
        connected=connected,
        lost=lambda: None,
    )
    keeping = asyncio.create_task(link.run(connect_timeout_s=connect_timeout_s), name="discovery")
    complaining = asyncio.create_task(complain(), name="complaint")
    try:
        await asyncio.wait((keeping, found), return_when=asyncio.FIRST_COMPLETED)
        if not found.done():
            await keeping
        return await found
    finally:
        for task in (keeping, complaining):
            task.cancel()
        await asyncio.wait((keeping, complaining))
