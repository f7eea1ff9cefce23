"""How a child joins a run: it knows only its broker and its parent's name, it asks, and the living
parent replies.

Retained messages decide nothing: a broker's store may have messages of dead nodes, or none at all.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Final

from fedstrata.common.errors import (
    ConnectionFailed,
    DuplicateName,
    FedstrataError,
    InvalidExperiment,
    LeftOut,
    OtherRelease,
    OutOfReach,
    as_known,
)
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import About, Alive, Announcement, Question
from fedstrata.common.runtime.claim import NameClaim
from fedstrata.common.runtime.lab_client import RETRY_S, LabCallbacks, LabClient, Reply
from fedstrata.common.runtime.roll import Resources, RollEntry
from fedstrata.common.runtime.world import REAL, Host, World, within

SEEK_EVERY_S: Final = 0.25
ASK_MOST_S: Final = 2.0
IDLE_ASK_MOST_S: Final = 15.0  # between two runs: the presence of a parent that joins shortens it
NAME_OTHERS_S: Final = 10.0  # without an answer of the parent
SETTLED_S: Final = 2.0  # without an answer of another process of its name, a node has the name
SETTLE_S: Final = 0.05  # a presence and the experiment arrive together
OTHERS_KEPT: Final = 100
PLAIN: Final = "plain"  # a name without dots
CHECK_S: Final = 0.5
ASKS_OF_ONE: Final = 2  # before another parent is asked
CHECKS: Final = 10
SEEKER: Final = "seeker"  # the client of a node that waits for a run

log = logging.getLogger("fedstrata.discovery")
# what a node does, a line for each change, for people
activity = logging.getLogger("fedstrata.node")


@dataclass(frozen=True, slots=True)
class Found:
    """A run whose parent is alive: its id, the parent's session, and its announcement."""

    run: str
    parent_session: str
    announcement: Announcement


class Moved(FedstrataError):
    """The parent is alive in another run: leave this run and join that one."""

    def __init__(self, found: Found) -> None:
        super().__init__(f"the parent went on to run {found.run}")
        self.found = found


async def discover(host: Host, name: str, parent: str, *, left: Found | None = None) -> Found:
    """Wait for a run whose parent is alive, and return it.

    If the parent does not reply soon, a line names the other parents, because this one's name may
    be mistyped. To wait is the normal state of a node: the line comes once, and is no warning.
    `left`: the run that this node has left, in which it does not take part again with that session
    of its parent; after a run the line does not come. Raises ConnectionFailed, and DuplicateName if
    another process of this name looks for a run on this broker.
    """
    return await _Seeker(host, name, parent, left=left).seek(
        connect_timeout_s=host.connect_timeout_s
    )


async def join(
    host: Host,
    name: str,
    parent: str,
    take_part: Callable[[Found], Awaitable[None]],
    *,
    role: str,
    usable: Callable[[], bool] = lambda: True,
    resources: Callable[[], Resources] = Resources,
) -> None:
    """Find the parent's run and take part in it until its end; follow the parent to another run.

    A node that stays waits for the next run after each one, however it ended, and for a broker that
    is away, and keeps an entry in the roll of the lab, with its host's `resources`; it ends after a
    run if this process is not `usable` any more. Raises ConnectionFailed if the first connection
    fails or the broker does not carry the names, DuplicateName, and what `take_part` raises if
    nothing follows.
    """
    await check_carried(
        host.broker, name, lab=host.lab, connect_timeout_s=host.connect_timeout_s, world=host.world
    )
    if not host.stay:
        await _play(await discover(host, name, parent), name, take_part, None, usable)
        return
    entry = RollEntry(host, name, role=role, parent=parent, resources=resources)
    left: Found | None = None
    async with entry.kept():
        while True:
            try:
                found = await discover(host, name, parent, left=left)
            except ConnectionFailed as error:
                if left is None:
                    raise
                log.warning("%s: %s", name, error)
                await asyncio.sleep(RETRY_S)
                continue
            left = await _play(found, name, take_part, entry, usable)
            activity.info("%s: waiting for the next run of %s", name, parent)
            gc.collect()  # a run's agents refer to each other, and hold its models and files


async def _play(
    found: Found,
    name: str,
    take_part: Callable[[Found], Awaitable[None]],
    entry: RollEntry | None,
    usable: Callable[[], bool],
) -> Found:
    """Take part in a run, and in those to which the parent goes on meanwhile; return the last one.

    It has no session of a parent that was only out of reach: then this node returns once the parent
    answers. Raises what `take_part` raises, unless a node with an entry, which stays, may wait for
    the next run.
    """
    while True:
        activity.info("%s: run %s: preparing", name, found.run)
        if entry is not None:
            entry.run = found.run
        try:
            await take_part(found)
        except Moved as moved:
            log.warning("%s leaves run %s: %s", name, found.run, moved)
            found = moved.found
            continue
        except Exception as error:  # an announcement may contain anything
            known = as_known(error, name)
            if entry is None or isinstance(error, DuplicateName) or not usable() or known is None:
                raise
            if isinstance(known, LeftOut):
                activity.info(
                    "%s: run %s began without it: its experiment has no such node", name, found.run
                )
            else:
                log.error("%s leaves run %s: %s", name, found.run, known)
                for frame in known.frames if isinstance(known, InvalidExperiment) else ():
                    log.info("  %s", frame)
            if isinstance(known, OutOfReach):
                found = replace(found, parent_session="")
        else:
            activity.info("%s: run %s finished", name, found.run)
        if entry is not None:
            entry.run = ""
        return found


async def another_parent(
    host: Host, name: str, parents: Sequence[str], *, run: str, for_s: float
) -> tuple[str, str] | None:
    """Return the first of these parents that is alive in a run, and its session; None if none
    answers in `for_s` s.

    One is asked at a time, in turn.
    """
    found: list[tuple[str, str]] = []
    answered = asyncio.Event()

    def note(reply: Reply) -> None:
        if isinstance(reply.message, Alive):
            found.append((reply.node, reply.session))
            answered.set()

    reads = [topics.inbox(host.lab, run, name, parent) for parent in parents]
    client = LabClient(
        host.broker,
        f"{name}-moves",
        lab=host.lab,
        node=name,
        reads=reads,
        on=LabCallbacks(answered=note),
        world=host.world,
    )
    try:
        async with asyncio.timeout(for_s), client.connected():
            for parent in cycle(parents):
                about = About.PRESENCE
                await client.ask(
                    parent, about, run=run, until=answered, every_s=ASK_MOST_S, times=ASKS_OF_ONE
                )
                if found:
                    return found[0]
    except TimeoutError:
        pass
    return None


class _Seeker:
    """One node that looks for its parent's run, and meanwhile claims its name."""

    def __init__(self, host: Host, name: str, parent: str, *, left: Found | None) -> None:
        self._left = left
        self._name = name
        self._parent = parent
        self._lab = host.lab
        self._found: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self._others: set[str] = set()
        self._complained = self._reported = False
        self._changed = asyncio.Event()
        lab = host.lab
        own = NameClaim.reads(lab, name)
        above = [topics.inbox(lab, "+", name, parent), topics.state(lab, "+", parent)]
        on = LabCallbacks(
            received=self._received, answered=self._answered, subscribed=self._subscribed
        )
        self._client = LabClient(
            host.broker, SEEKER, lab=lab, node=name, reads=[*own, *above], on=on, world=host.world
        )
        self._claim = NameClaim(self._client, free_s=SETTLED_S, reason=socket.gethostname())
        self._claim.held = left is not None

    async def seek(self, *, connect_timeout_s: float) -> Found:
        """Ask until the parent replies."""
        async with self._client.connected(timeout_s=connect_timeout_s):
            return await self._client.during(self._search())

    async def _search(self) -> Found:
        tasks = [
            asyncio.create_task(self._ask(), name="ask"),
            asyncio.create_task(self._settle(), name="claim"),
        ]
        if self._left is None:
            tasks.append(asyncio.create_task(self._name_others(), name="name others"))
        try:
            return await self._found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _received(self, topic: topics.Topic, body: bytes, retained: bool) -> None:
        if isinstance(topic, topics.SpecTopic):
            # who announces is enough: announcements are large
            if body and len(self._others) < OTHERS_KEPT:
                self._others.add(topic.node)
        elif isinstance(topic, topics.AskTopic):
            self._claim.asked(body, retained)
        elif isinstance(topic, topics.StateTopic):
            self._parent_changed(body)

    def _parent_changed(self, body: bytes) -> None:
        """Ask at once: the parent joins or leaves a run."""
        try:
            if body:
                serialization.decode(body)
        except OtherRelease as error:
            if not self._complained:
                self._complained = True
                log.error("%s: %s is of another release: %s", self._name, self._parent, error)
            return
        self._changed.set()

    def _answered(self, reply: Reply) -> None:
        message = reply.message
        if not reply.run:
            self._claim.answered(reply)
            return
        left = self._left is not None and (self._left.run, self._left.parent_session) == (
            reply.run,
            reply.session,
        )
        if (
            isinstance(message, Alive)
            and message.announcement is not None
            and not left
            and not self._found.done()
        ):
            self._found.set_result(Found(reply.run, reply.session, message.announcement))

    async def _settle(self) -> None:
        """Claim this node's name; another process that has it ends this one."""
        await self._client.once_connected.wait()
        while not (self._claim.held or self._claim.by):
            await self._claim.ask()
        if not self._claim.held and not self._found.done():
            self._found.set_exception(
                DuplicateName(
                    f"{self._name} already waits for a run on broker {self._client.address}, on "
                    f"host {self._claim.by}. "
                    "Give this one another --name, or end the other."
                )
            )

    def _subscribed(self) -> None:
        self._claim.connected()
        if self._left is None and not self._reported:
            self._reported = True
            name = self._name
            parent = self._parent
            lab = self._lab
            address = self._client.address
            activity.info(
                "%s: connected to broker %s, waiting for a run of %s in lab %s",
                name,
                address,
                parent,
                lab,
            )
        self._changed.set()

    async def _ask(self) -> None:
        most_s = ASK_MOST_S if self._left is None else IDLE_ASK_MOST_S
        while True:
            self._changed.clear()
            await self._client.ask(
                self._parent,
                About.PRESENCE,
                until=self._changed,
                every_s=SEEK_EVERY_S,
                most_s=most_s,
            )
            await asyncio.sleep(SETTLE_S)

    async def _name_others(self) -> None:
        await asyncio.sleep(NAME_OTHERS_S / 2)
        self._client.subscribe(topics.spec(self._lab, "+", "+"))
        await asyncio.sleep(NAME_OTHERS_S / 2)
        names = ", ".join(sorted(self._others))
        there = f"Other parents: {names}." if names else "No other parent was seen either."
        address = self._client.address
        activity.info(
            "%s waits for %s of lab %s on broker %s. %s",
            self._name,
            self._parent,
            self._lab,
            address,
            there,
        )


async def check_carried(
    address: BrokerAddress, name: str, *, lab: str, connect_timeout_s: float, world: World = REAL
) -> None:
    """Return if the broker delivers messages of a node `name`, which are sent to itself.

    Not every broker carries a dot: to RabbitMQ it is the separator of its own topics, and `+` does
    not match it.
    Raises ConnectionFailed if it delivers those of another name only, or cannot be reached.
    """
    if "." not in lab + name:
        return
    wanted = topics.ask(lab, name, name)
    plain = topics.ask(PLAIN, PLAIN, PLAIN)
    came: set[str] = set()
    arrived = asyncio.Event()

    def received(topic: topics.Topic, body: bytes, retained: bool) -> None:
        for each in (wanted, plain):
            if topic == topics.parse(each):
                came.add(each)
                arrived.set()

    async def send() -> None:
        await client.once_connected.wait()
        for _ in range(CHECKS):
            for topic in (wanted, plain):  # in this order
                client.publish(topic, Question(client.nonce))
            if await within(arrived, CHECK_S):
                return

    reads = [topics.ask(lab, name, "+"), topics.ask(PLAIN, PLAIN, "+")]
    on = LabCallbacks(received=received)
    client = LabClient(address, f"{name}-names", reads=reads, on=on, world=world)
    async with client.connected(timeout_s=connect_timeout_s):
        await client.during(send())
    if plain in came and wanted not in came:
        where = f"{name} in lab {lab}" if "." in name else f"lab {lab}"
        raise ConnectionFailed(
            f"broker {address} does not carry the dot in the name of {where}, as RabbitMQ does "
            "not. "
            "Take a name without dots there."
        )
