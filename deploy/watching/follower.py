"""The connections of a live view to its brokers: they subscribe, ask the parents for their status, and reconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from common.errors import ConnectionFailed, NoProgress
from common.net.address import BrokerAddress
from common.protocol import topics
from common.protocol.messages import StatusRequest
from common.protocol.status import PUBLISH_S
from common.runtime.lab_client import LabClient
from common.runtime.world import REAL, World
from deploy.console.login import OPERATOR
from deploy.watching.lab import WatchedLab
from deploy.watching.runs import Runs

DRAW_S: Final = 0.5
ASK_S: Final = 3.0
LOOK_S: Final = 3 * PUBLISH_S  # every parent has published a record by then
NOTHING_ANNOUNCED: Final = "no run is announced there, or this login may not read the announcements"

_T = TypeVar("_T")


class Screen(Protocol):
    """Output of a watch."""

    def waiting(self, runs: Runs, brokers: str) -> None:
        """Show that there is no run yet."""

    def event(self, lab: WatchedLab, event: str, facts: dict[str, object], now: float) -> None:
        """Show an event."""

    def draw(self, lab: WatchedLab, now: float) -> None:
        """Show the current state."""


class Follower:
    """Client that follows one run of a lab on one or several brokers, the cloud's first.

    It publishes nothing but requests for the status of the run: of `run`, None: the newest active one.
    """

    def __init__(
        self,
        addresses: Sequence[BrokerAddress],
        *,
        lab: str = topics.DEFAULT_LAB,
        run: str | None,
        connect_timeout_s: float,
        world: World = REAL,
    ) -> None:
        self._lab_name = topics.check_lab(lab)
        self._names = [str(address) for address in addresses]
        self._connect_timeout_s = connect_timeout_s
        self._runs = Runs(run, lab=lab)
        self._lab: WatchedLab | None = None
        self._ask_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._refused: asyncio.Future[None] = self._loop.create_future()
        reads = [topics.spec(lab, "+", "+"), topics.state(lab, "+", "+"), topics.status(lab, "+", "+")]
        self._clients = [
            LabClient(
                address,
                "watch",
                reads=reads,
                received=partial(self._received, place),
                subscribed=partial(self._subscribed, place),
                lost=partial(self._lost, place),
                refused=partial(self._refuse, address),
                world=world,
            )
            for place, address in enumerate(addresses)
        ]

    async def follow(self, screen: Screen) -> None:
        """Show the run until it ends.

        Raises ConnectionFailed if a broker cannot be reached or refuses the subscriptions, RunFailed if the run fails,
        and NoProgress if the cloud is absent for `transfer.idle_s`.
        """

        async def watch() -> None:
            lab = await self._found(partial(screen.waiting, self._runs, ", ".join(self._names)))
            while True:
                self._turn(lab)
                while (event := lab.next_event()) is not None:
                    screen.event(lab, *event, self._loop.time())
                if lab.ended:
                    break
                screen.draw(lab, self._loop.time())
                await asyncio.sleep(DRAW_S)
            if lab.end is not None:
                raise lab.end

        async with self._connected():
            await self._during(watch())

    async def look(self, show: Callable[[WatchedLab, float], None], *, timeout_s: float) -> None:
        """Show the current state once. Raises NoProgress if a broker is reached, and no run found in `timeout_s`."""

        async def watch() -> None:
            await self._clients[0].once_connected.wait()
            try:
                async with asyncio.timeout(timeout_s):
                    lab = await self._found(lambda: None)
            except TimeoutError:
                others = ", ".join(self._runs.names()[:3])
                hint = f"--run NAME shows a run that has ended: {others}" if others else NOTHING_ANNOUNCED
                raise NoProgress(
                    f"no active run of lab {self._lab_name} on broker {', '.join(self._names)} within {timeout_s:g} s; "
                    f"{hint}"
                ) from None
            self._turn(lab)
            await asyncio.sleep(LOOK_S)
            show(lab, self._loop.time())

        async with self._connected():
            await self._during(watch())

    async def feed(self, lab: WatchedLab) -> None:
        """Keep a lab up to date until cancelled. Raises ConnectionFailed if a broker cannot be reached."""

        async def ask() -> None:
            while True:
                self._turn(lab)
                await asyncio.sleep(DRAW_S)

        self._lab = lab
        async with self._connected():
            await self._during(ask())

    def _turn(self, lab: WatchedLab) -> None:
        """Let a lab evaluate its state, and ask the parents when it is time."""
        now = self._loop.time()
        lab.tick(now)
        if now >= self._ask_at:
            self._ask_at = now + ASK_S
            for client in self._clients:
                client.publish(topics.watch(self._lab_name, OPERATOR), StatusRequest(lab.run))

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for client in self._clients:
                await stack.enter_async_context(client.connected(timeout_s=self._connect_timeout_s))
            yield

    async def _during(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do work that ends with the first connection that cannot be had, or is refused."""
        for client in self._clients:
            work = client.during(work)
        working = asyncio.create_task(work, name="watch")
        try:
            await asyncio.wait((working, self._refused), return_when=asyncio.FIRST_COMPLETED)
            if self._refused.done():
                self._refused.result()
            return await working
        finally:
            working.cancel()
            await asyncio.wait((working,))

    async def _found(self, waiting: Callable[[], None]) -> WatchedLab:
        while (chosen := self._runs.choose(self._loop.time())) is None:
            waiting()
            await asyncio.sleep(DRAW_S / 2)
        run, experiment = chosen
        now = self._loop.time()
        self._lab = lab = WatchedLab(run, experiment, brokers=self._names, now=now, lab=self._lab_name)
        for place, client in enumerate(self._clients):
            if client.up:
                client.subscribe(topics.state(self._lab_name, run, "+"))  # for what is retained
            else:
                lab.disconnected(place, now)
        return lab

    def _received(self, place: int, topic: topics.Topic, body: bytes, retained: bool) -> None:
        now = self._loop.time()
        if self._lab is None:
            self._runs.receive(topic, body, now)
            return
        self._lab.receive(place, topic, body, now, retained=retained)
        if isinstance(topic, topics.StateTopic) and not retained:
            self._ask_at = min(self._ask_at, now + PUBLISH_S)  # it may be a parent that has just come

    def _subscribed(self, place: int) -> None:
        self._ask_at = 0.0
        if self._lab is not None:
            self._lab.connected(place, self._loop.time())

    def _lost(self, place: int) -> None:
        if self._lab is not None and not self._lab.ended:
            self._lab.disconnected(place, self._loop.time())

    def _refuse(self, address: BrokerAddress, topic: str) -> None:
        if not self._refused.done():
            who = f"login {address.username!r}" if address.username else "a client without a login"
            remedy = f"Watch with a login that may read {topics.ROOT}/{self._lab_name}/#."
            text = f"broker {address} does not let {who} read {topic}. {remedy}"
            self._refused.set_exception(ConnectionFailed(text))
