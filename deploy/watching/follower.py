"""Connections of a watch to its brokers: they only subscribe, and reconnect by themselves."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, Protocol

from common.errors import ConnectionFailed, NoProgress
from common.experiment.topology import CLOUD
from common.net.address import BrokerAddress
from common.net.connection import BrokerConnection, Handlers
from common.protocol import topics
from common.protocol.round_state import HEARTBEAT_S
from deploy.watching.lab import WatchedLab
from deploy.watching.runs import Runs, filters

DRAW_S: Final = 0.5
LOOK_S: Final = HEARTBEAT_S + 0.5  # every working node has sent a message by then
NOTHING_ANNOUNCED: Final = "no run is announced there, or this login may not read the announcements"
KEEPALIVE_S: Final = 10  # short: a broker queues messages for a stopped client until the keep-alive expires


def topics_of(lab: str, run: str, *, light: bool = False) -> list[str]:
    """Return the topics of a run's presence and control messages; `light`: those of the cloud's links only."""
    cloud = [topics.inbox(lab, run, CLOUD, "+"), topics.inbox(lab, run, "+", CLOUD)]
    return [topics.state(lab, run, "+"), *(cloud if light else [topics.inbox(lab, run, "+", "+")])]


class Screen(Protocol):
    """Output of a watch."""

    def waiting(self, runs: Runs, brokers: str) -> None:
        """Show that there is no run yet."""

    def event(self, lab: WatchedLab, event: str, facts: dict[str, object], now: float) -> None:
        """Show an event."""

    def draw(self, lab: WatchedLab, now: float) -> None:
        """Show the current state."""


class Follower:
    """Client that follows one run of a lab on one or several brokers, the cloud's first. It publishes nothing."""

    def __init__(
        self,
        addresses: Sequence[BrokerAddress],
        *,
        lab: str = topics.DEFAULT_LAB,
        run: str | None,
        light: bool,
        connect_timeout_s: float,
    ) -> None:
        self._lab_name = topics.check_lab(lab)
        self._names = [str(address) for address in addresses]
        self._light = light
        self._connect_timeout_s = connect_timeout_s
        self._runs = Runs(run, lab=lab)
        self._lab: WatchedLab | None = None
        self._screen: Screen | None = None
        self._loop = asyncio.get_running_loop()
        self._refused: asyncio.Future[None] = self._loop.create_future()
        self._reached = asyncio.Event()
        self._connections = [self._connection(place, address) for place, address in enumerate(addresses)]

    async def follow(self, screen: Screen) -> None:
        """Show the run until it ends.

        Raises ConnectionFailed if a broker cannot be reached or refuses the subscriptions, RunFailed if the run fails,
        and NoProgress if the cloud is absent for `transfer.idle_s`.
        """

        async def watch() -> None:
            self._screen = screen
            lab = await self._found(screen)
            while not lab.ended:
                lab.tick(self._loop.time())
                self._show_events()
                screen.draw(lab, self._loop.time())
                await asyncio.sleep(DRAW_S)
            if lab.end is not None:
                raise lab.end

        await self._connected(watch())

    async def look(self, show: Callable[[WatchedLab, float], None], *, timeout_s: float) -> None:
        """Show the current state once. Raises NoProgress if a broker is reached, and no run found in `timeout_s`."""

        async def watch() -> None:
            await self._reached.wait()
            try:
                async with asyncio.timeout(timeout_s):
                    lab = await self._found(None)
            except TimeoutError:
                others = ", ".join(self._runs.names()[:3])
                hint = f"--run NAME shows a run that has ended: {others}" if others else NOTHING_ANNOUNCED
                raise NoProgress(
                    f"no active run of lab {self._lab_name} on broker {self._all()} within {timeout_s:g} s; {hint}"
                ) from None
            await asyncio.sleep(LOOK_S)
            show(lab, self._loop.time())

        await self._connected(watch())

    async def _connected(self, watching: Coroutine[Any, Any, None]) -> None:
        keeping = [
            asyncio.create_task(connection.run(connect_timeout_s=self._connect_timeout_s), name=f"connection {name}")
            for name, connection in zip(self._names, self._connections, strict=True)
        ]
        work = asyncio.create_task(watching, name="watch")
        try:
            await asyncio.wait((work, self._refused, *keeping), return_when=asyncio.FIRST_COMPLETED)
            for end in (self._refused, *keeping):
                if end.done():
                    end.result()
            await work
        finally:
            for task in (work, *keeping):
                task.cancel()
            await asyncio.wait((work, *keeping))

    async def _found(self, screen: Screen | None) -> WatchedLab:
        while (chosen := self._runs.choose(self._loop.time())) is None:
            if screen is not None:
                screen.waiting(self._runs, self._all())
            await asyncio.sleep(DRAW_S / 2)
        run, experiment = chosen
        self._lab = lab = WatchedLab(
            run, experiment, brokers=self._names, now=self._loop.time(), lab=self._lab_name, deep=not self._light
        )
        for place, connection in enumerate(self._connections):
            if connection.up:
                connection.unsubscribe(list(filters(self._lab_name)))
                self._subscribe(place, connection, lab)
            else:
                lab.disconnected(place, self._loop.time())
        return lab

    def _connection(self, place: int, address: BrokerAddress) -> BrokerConnection:
        async def connected() -> None:
            self._reached.set()
            if self._lab is None:
                connection.subscribe(list(filters(self._lab_name)), qos=0, refused=partial(self._refuse, connection))
            else:
                self._lab.connected(place, self._loop.time())
                self._subscribe(place, connection, self._lab)
                self._show_events()

        connection = BrokerConnection(
            address,
            Handlers(partial(self._received, place), connected, partial(self._lost, place)),
            client_id=f"watch-{secrets.token_hex(8)}",
            keepalive_s=KEEPALIVE_S,
        )
        return connection

    def _subscribe(self, place: int, connection: BrokerConnection, lab: WatchedLab) -> None:
        """Subscribe to a run."""
        refused = partial(self._refuse, connection)
        connection.subscribe(topics_of(self._lab_name, lab.run, light=self._light), qos=0, refused=refused)

    def _received(self, place: int, topic: str, body: bytes, retained: bool) -> None:
        now = self._loop.time()
        if self._lab is None:
            self._runs.receive(topic, body, now)
        else:
            self._lab.receive(place, topic, body, now, retained=retained)
            self._show_events()

    def _lost(self, place: int) -> None:
        if self._lab is not None and not self._lab.ended:
            self._lab.disconnected(place, self._loop.time())
            self._show_events()

    def _refuse(self, connection: BrokerConnection, topic: str) -> None:
        if not self._refused.done():
            address = connection.attempts.address
            who = f"login {address.username!r}" if address.username else "a client without a login"
            remedy = f"Watch with a login that may read {topics.ROOT}/{self._lab_name}/#."
            text = f"broker {address} does not let {who} read {topic}. {remedy}"
            self._refused.set_exception(ConnectionFailed(text))

    def _show_events(self) -> None:
        lab, screen = self._lab, self._screen
        while lab is not None and (event := lab.next_event()) is not None:
            if screen is not None:
                screen.event(lab, *event, self._loop.time())

    def _all(self) -> str:
        return ", ".join(self._names)
