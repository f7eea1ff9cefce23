"""The connections of a live view to its brokers: they subscribe, ask the parents for their status,
and reconnect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final, Protocol

from fedstrata.common.errors import ConnectionFailed, NoProgress
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.protocol import topics
from fedstrata.common.protocol.messages import About
from fedstrata.common.protocol.status import PUBLISH_S
from fedstrata.common.runtime.lab_client import LabCallbacks, LabClient
from fedstrata.common.runtime.world import REAL, World
from fedstrata.deploy.console.login import OPERATOR
from fedstrata.deploy.watching.lab_state import Event, WatchedLab
from fedstrata.deploy.watching.runs import Runs

DRAW_S: Final = 0.5
STATUS_EVERY_S: Final = 3.0
LOOK_S: Final = 3 * PUBLISH_S  # every parent has published a record by then
NOTHING_ANNOUNCED: Final = "no run is announced there, or this login may not read the announcements"


class Screen(Protocol):
    """Output of a watch."""

    def waiting(self, runs: Runs, brokers: str) -> None:
        """Show that there is no run yet."""

    def show(self, lab: WatchedLab, events: Sequence[Event], now: float) -> None:
        """Show the events since the last call, and the current state."""


class Follower:
    """Client that follows one run of a lab on one or several brokers, the cloud's first.

    It publishes nothing but requests for the status of the run: of `run`, None: the newest active
    one.
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
        self._brokers = [str(address) for address in addresses]
        self._connect_timeout_s = connect_timeout_s
        self._runs = Runs(run, lab=lab)
        self._lab: WatchedLab | None = None
        self._ask_at = 0.0
        self._now = asyncio.get_running_loop().time
        self._refused: ConnectionFailed | None = None
        self._clients = [
            LabClient(
                address,
                "watch",
                lab=lab,
                node=OPERATOR,
                reads=[
                    topics.spec(lab, "+", "+"),
                    topics.state(lab, "+", "+"),
                    topics.status(lab, "+", "+"),
                ],
                on=LabCallbacks(
                    received=self._received,
                    subscribed=partial(self._set_broker, place, up=True),
                    lost=partial(self._set_broker, place, up=False),
                    refused=partial(self._refuse, address),
                ),
                world=world,
            )
            for place, address in enumerate(addresses)
        ]

    async def follow(self, screen: Screen) -> None:
        """Show the run until it ends.

        Raises ConnectionFailed if a broker cannot be reached or refuses the subscriptions,
        RunFailed if the run fails, and NoProgress if the cloud is absent for `transfer.idle_s`.
        """

        async def watch() -> None:
            lab = await self._found(partial(screen.waiting, self._runs, ", ".join(self._brokers)))
            while not lab.ended:
                await self._turn(lab)
                screen.show(lab, lab.new_events(), self._now())
            if lab.end is not None:
                raise lab.end

        await self._connected(watch())

    async def look(self, show: Callable[[WatchedLab, float], None], *, timeout_s: float) -> None:
        """Show the current state once. Raises NoProgress if a broker is reached, and no run found
        in `timeout_s`.
        """

        async def watch() -> None:
            await self._clients[0].once_connected.wait()
            try:
                async with asyncio.timeout(timeout_s):
                    lab = await self._found(lambda: None)
            except TimeoutError:
                others = ", ".join(self._runs.names()[:3])
                if others:
                    hint = f"--run NAME shows a run that has ended: {others}"
                else:
                    hint = NOTHING_ANNOUNCED
                where = f"lab {self._lab_name} on broker {', '.join(self._brokers)}"
                raise NoProgress(
                    f"no active run of {where} within {timeout_s:g} s; {hint}"
                ) from None
            await self._turn(lab, pause_s=LOOK_S)
            show(lab, self._now())

        await self._connected(watch())

    async def feed(self, lab: WatchedLab) -> None:
        """Keep a lab up to date until cancelled. Raises ConnectionFailed if a broker cannot be
        reached.
        """

        async def ask() -> None:
            while True:
                await self._turn(lab)

        self._lab = lab
        await self._connected(ask())

    async def _connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work that ends with the first connection that cannot be had, or is refused."""
        async with AsyncExitStack() as stack:
            for client in self._clients:
                await stack.enter_async_context(client.connected(timeout_s=self._connect_timeout_s))
            for client in self._clients:
                work = client.during(work)
            await work

    async def _found(self, waiting: Callable[[], None]) -> WatchedLab:
        while (chosen := self._runs.choose(self._now())) is None:
            waiting()
            await self._pause(DRAW_S / 2)
        run, experiment = chosen
        now = self._now()
        self._lab = lab = WatchedLab(
            run, experiment, brokers=self._brokers, now=now, lab=self._lab_name
        )
        for place, client in enumerate(self._clients):
            if client.up:
                client.subscribe(topics.state(self._lab_name, run, "+"))  # for what is retained
            else:
                lab.set_broker(place, up=False, now=now)
        return lab

    async def _turn(self, lab: WatchedLab, *, pause_s: float = DRAW_S) -> None:
        """Ask the parents when it is time, receive for a while, and let a lab evaluate its
        state.
        """
        if self._now() >= self._ask_at:
            self._ask_at = self._now() + STATUS_EVERY_S
            for client in self._clients:
                for parent in lab.experiment.tree.children:
                    client.question(parent, About.STATUS, lab.run)
        await self._pause(pause_s)
        lab.tick(self._now())

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self._refused is not None:
            raise self._refused

    def _received(self, topic: topics.Topic, body: bytes, retained: bool) -> None:
        now = self._now()
        if self._lab is None:
            self._runs.receive(topic, body, now)
        else:
            self._lab.receive(topic, body, now, retained=retained)
        if isinstance(topic, topics.StateTopic) and not retained:
            # it may be a parent that has just come
            self._ask_at = min(self._ask_at, now + PUBLISH_S)

    def _set_broker(self, place: int, *, up: bool) -> None:
        if up:
            self._ask_at = 0.0
        if self._lab is not None:
            self._lab.set_broker(place, up=up, now=self._now())

    def _refuse(self, address: BrokerAddress, topic: str) -> None:
        who = f"login {address.username!r}" if address.username else "a client without a login"
        remedy = f"Watch with a login that may read {topics.ROOT}/{self._lab_name}/#."
        text = f"broker {address} does not let {who} read {topic}. {remedy}"
        self._refused = self._refused or ConnectionFailed(text)
