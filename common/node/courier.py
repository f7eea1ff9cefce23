"""What leaves a node for its peers: control messages and chunks, each at its link's pace, counted as it goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from common.links import Ways
from common.net.accounting import Account, packet_bytes
from common.net.bulk import Body
from common.net.link import Link
from common.net.shaping import Departures, Shaper
from common.node.identity import Identity
from common.transfer.outgoing import Outgoing, Publication
from common.wire import packing, topics
from common.wire.messages import Ask, Message, Progress, Receipt, Result, Task

PUBLISHING_MOST: Final = 4


class Courier:
    """One endpoint's way out. `wake` is called when there is room for more chunks; `noise` are blobs of no model."""

    def __init__(
        self, identity: Identity, link: Link, account: Account, ways: Ways, *, wake: Callable[[], None]
    ) -> None:
        self.outgoing = Outgoing(first_number=time.time_ns() // 1_000_000)
        self._identity = identity
        self._link = link
        self._account = account
        self._shaper = Shaper(ways.to if ways.shaped else {})
        self._departures = Departures(asyncio.get_running_loop())
        self._wake = wake
        self.noise: set[str] = set()
        self._publishing = 0
        self._bodies: dict[Body, str] = {}

    def send(self, peer: str, message: Message, now: float) -> None:
        """Send a control message to a peer's inbox."""
        identity = self._identity
        topic = topics.inbox(identity.lab, identity.run, peer, identity.name)
        body = packing.encode(message, identity.session)
        model = inline_bytes(message)
        qos = qos_of(message)
        size = packet_bytes(topic, len(body), qos=qos)
        self._account.add(peer, "sent", message=size, model=model, control=len(body) - model)
        due = self._shaper.reserve((peer,), size, now)
        self._departures.at(due, partial(self._link.publish, topic, body, qos=qos))

    def publish_chunks(self, now: float) -> float | None:
        """Publish what receivers lack and links have room for; return when there may be more."""
        while self._publishing < PUBLISHING_MOST:
            publication = self.outgoing.next_publication(now, lambda peers: self._shaper.ready(peers, now))
            if publication is None:
                break
            self._publish(publication, now)
        else:
            return None
        waits = (self.outgoing.next_deadline(now), self._shaper.next_ready(now))
        return min((at for at in waits if at is not None), default=None)

    def retire(self, blob: str) -> None:
        """Stop serving a blob; from now on its memory may be written."""
        self.outgoing.retire(blob)
        for body, of in self._bodies.items():
            if of == blob:
                body.detach()

    async def empty(self) -> None:
        """Wait until nothing waits for its link."""
        await self._departures.empty()

    def _publish(self, chunk: Publication, now: float) -> None:
        identity = self._identity
        topic = topics.chunk(
            identity.lab, identity.run, identity.name, chunk.lane, chunk.blob, chunk.index, chunk.number
        )
        body = Body(chunk.data)
        size = packet_bytes(topic, len(chunk.data), qos=0)
        peer = chunk.receivers[0] if len(chunk.receivers) == 1 else topics.ALL
        kind = "probe" if chunk.blob in self.noise else "model"
        self._account.add(peer, "sent", message=size, **{kind: len(chunk.data)})
        self._bodies[body] = chunk.blob
        due = self._shaper.reserve(chunk.receivers, size, now)
        self._departures.at(due, partial(self._hand_over, topic, body, chunk))

    def _hand_over(self, topic: str, body: Body, chunk: Publication) -> None:
        self._publishing += 1  # only now: what waits for a slow link must not keep others from theirs
        self._link.publish_body(topic, body, done=partial(self._left, body, chunk))

    def _left(self, body: Body, chunk: Publication) -> None:
        self._publishing -= 1
        del self._bodies[body]
        self.outgoing.left(chunk)
        self._wake()


def qos_of(message: Message) -> int:
    """Return 0 for what is said again, or asked for again, soon: it spares four acknowledgements."""
    return 0 if isinstance(message, (Ask, Progress, Receipt)) else 1


def inline_bytes(message: Message) -> int:
    """Return how many bytes of a message are a model that travels inside it."""
    return len(message.inline or b"") if isinstance(message, (Task, Result)) else 0
