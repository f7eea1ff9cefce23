"""Parents and children for tests: on a simulated broker in virtual time, or on a real one.

    @virtual
    async def test_a_round(site: Site) -> None:
        parent = parent_of(site, ["device-0"], layout=layout)
        async with together(living(parent), serving(child_of(site, "device-0"), layout, 0)):
            await play(parent, row)

A minute of a virtual test takes milliseconds, and the same test takes the same course each time.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from common.layout import ModelLayout, Row, Section
from common.links import Link
from common.net.link import BrokerAddress
from common.protocol.identity import Identity
from common.protocol.messages import Ask, Message, NodeState, Phase, Task
from common.runtime.arriving import Arriving
from common.runtime.child_endpoint import ChildEndpoint
from common.runtime.endpoint import Endpoint
from common.runtime.lifecycle import live
from common.runtime.parent_endpoint import ParentEndpoint
from common.runtime.round import Round
from common.runtime.work import Answer, Report
from common.runtime.world import REAL, World, new_session
from common.spec import PLAIN, Closing, Codecs, Transfer
from common.storage.spool import Spool
from deploy import broker as brokers
from deploy.broker import Kind
from deploy.simulation.broker import Routed
from deploy.simulation.callbacks import OWNER
from deploy.simulation.loop import START_S, VirtualLoop
from deploy.simulation.network import Network, SimulatedLink
from deploy.simulation.process import SimulatedProcess
from deploy.simulation.world import SimulatedWorld

LAB: Final = "lab"
RUN: Final = "run-1"
PARENT: Final = "institution-0"
BROKER: Final = "broker"
PATIENCE_S: Final = 30.0
PATIENCE_VIRTUAL_S: Final = 1200.0
FINE: Final = Transfer(chunk_bytes=32_768)

Facts = tuple[str, dict[str, object]]
_T = TypeVar("_T")


# Where nodes live


class Site(Protocol):
    """A broker, and the processes of the nodes on it."""

    address: BrokerAddress

    def make(self, name: str, build: Callable[[World], _T]) -> _T:
        """Return what `build` makes in a new process."""

    def start(self, endpoint: Endpoint, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the process of an endpoint."""


class RealSite:
    """A broker at an address; all nodes are in this process."""

    def __init__(self, address: BrokerAddress) -> None:
        self.address = address

    def make(self, name: str, build: Callable[[World], _T]) -> _T:
        """Return what `build` makes."""
        return build(REAL)

    def start(self, endpoint: Endpoint, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine."""
        return asyncio.create_task(work)

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        """Run a test's coroutine, at most `PATIENCE_S`."""

        async def bounded() -> None:
            async with asyncio.timeout(PATIENCE_S):
                await test

        asyncio.run(bounded())


class SimulatedSite:
    """A simulated broker, and a simulated process for each node; `routed` are the messages that it passed on."""

    def __init__(self) -> None:
        self.address = BrokerAddress(BROKER)
        self.loop = VirtualLoop()
        self.loop.time_limit = START_S + PATIENCE_VIRTUAL_S
        self.network = Network(self.loop, seed=0)
        self.broker = self.network.add_broker(BROKER)
        self.routed: list[Routed] = []
        self.network.hooks.append(self.routed.append)
        self._contexts: dict[SimulatedProcess, contextvars.Context] = {}

    def make(self, name: str, build: Callable[[World], _T]) -> _T:
        """Return what `build` makes in a new process."""
        world = SimulatedWorld(self.network, name, generation=len(self._contexts))
        world.process = SimulatedProcess(self.loop, name, _forever)
        context = contextvars.copy_context()
        context.run(OWNER.set, world.process)
        self._contexts[world.process] = context
        return context.run(build, world)

    def start(self, endpoint: Endpoint, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the process of an endpoint."""
        return self._contexts[_process(endpoint)].run(asyncio.create_task, work)

    def link(self, name: str, broker: str = BROKER) -> SimulatedLink:
        """Return a node's link to a broker."""
        return self.network.link(name, broker)

    def inject(self, topic: str, body: bytes, *, qos: int = 0, retain: bool = False) -> None:
        """Publish a message as a stranger would."""
        self.broker.route(topic, body, qos=qos, retain=retain)

    def kill(self, endpoint: Endpoint, *others: asyncio.Task[Any]) -> None:
        """Send SIGKILL to an endpoint's process; tasks of the test that use the endpoint end with it."""
        _process(endpoint).kill()
        for task in others:
            task.cancel()

    def break_connection(self, endpoint: Endpoint) -> None:
        """Break the present connection of a node, as a router may."""
        for session in list(self.broker.sessions.values()):
            if session.client_id.startswith(f"{endpoint.identity.name}-{endpoint.identity.session[:8]}-"):
                self.broker.abort(session)

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        """Run a test's coroutine to its end; an error that nobody handled is the test's."""
        try:
            self.loop.run_until_complete(test)
            assert self.loop.errors == []
        finally:
            for process in self._contexts:
                process.discard()
            self.loop.discard()


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in virtual time. Its first parameter is the `SimulatedSite`, the others are fixtures."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        site = SimulatedSite()
        site.run(test(site, **fixtures))

    signature = inspect.signature(test)
    run.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return run


class RestartableBroker:
    """A real broker that can be killed and started again on its port."""

    def __init__(self, kind: Kind, directory: Path) -> None:
        self._kind = kind
        self._directory = directory
        self._served = brokers.start(directory=directory, kind=kind)
        self.address = BrokerAddress(self._served.host, self._served.port)

    async def kill(self) -> None:
        """Send SIGKILL."""
        self._served.process.kill()
        await asyncio.to_thread(self._served.stop)

    async def start(self) -> None:
        """Start it again. From this thread: the broker lives as long as the thread that started it."""
        self._served = brokers.start(directory=self._directory, kind=self._kind, port=self._served.port)

    def close(self) -> None:
        """End it."""
        self._served.stop()


# Models


def layout_of(nbytes: int) -> ModelLayout:
    """Return the layout of a model of so many bytes."""
    return ModelLayout.build([("weight", (nbytes // 4,), Section.PARAMETER)])


def drawn(layout: ModelLayout, seed: int) -> Row:
    """Return a model of normal noise."""
    row = layout.empty()
    layout.floats(row)[:] = np.random.default_rng(seed).standard_normal(layout.columns, np.float32)
    return row


def changed(layout: ModelLayout, row: Row, place: int) -> npt.NDArray[np.float32]:
    """Return what the child at this place makes of a model."""
    return layout.floats(row) + np.float32(1 + place)


def assert_models(played: Round, row: Row, *, layout: ModelLayout, places: Mapping[str, int]) -> None:
    """Assert that each child at its place, and no other, changed the model as it does."""
    assert set(played.models) == set(places)
    for name, upload in played.models.items():
        np.testing.assert_array_equal(layout.floats(upload), changed(layout, row, places[name]), err_msg=name)


# Nodes


def parent_of(
    site: Site,
    children: Sequence[str],
    *,
    layout: ModelLayout,
    name: str = PARENT,
    run: str = RUN,
    transfer: Transfer | None = None,
    link: Link | None = None,
    links: Mapping[str, Link] | None = None,
    shaped: bool = True,
    codecs: Codecs = PLAIN,
    spool: Spool | None = None,
    observed: list[Facts] | None = None,
) -> ParentEndpoint:
    """Return a parent that is ready."""
    seen = [] if observed is None else observed

    def build(world: World) -> ParentEndpoint:
        return ParentEndpoint(
            site.address,
            Identity(run, name, "institution", new_session(world)),
            links=links or dict.fromkeys(children, link or Link()),
            transfer=transfer or Transfer(),
            shaped=shaped,
            codecs=codecs,
            spool=spool,
            observe=lambda event, facts: seen.append((event, facts)),
            world=world,
        )

    parent = site.make(name, build)
    parent.set_layout(layout)
    parent.set_state(NodeState.READY)
    return parent


def child_of(
    site: Site,
    name: str,
    *,
    parent: str = PARENT,
    transfer: Transfer | None = None,
    link: Link | None = None,
    shaped: bool = True,
    codecs: Codecs = PLAIN,
    spool: Spool | None = None,
    ready: bool = True,
) -> ChildEndpoint:
    """Return a child, `ready` or preparing."""

    def build(world: World) -> ChildEndpoint:
        return ChildEndpoint(
            site.address,
            Identity(RUN, name, "device", new_session(world)),
            parent=parent,
            transfer=transfer or Transfer(),
            link=link or Link(),
            shaped=shaped,
            codecs=codecs,
            spool=spool,
            world=world,
        )

    child = site.make(name, build)
    if ready:
        child.set_state(NodeState.READY, samples=1)
    return child


async def nothing() -> None:
    """Do nothing."""


def living(
    site: Site,
    *endpoints: Endpoint,
    work: Coroutine[Any, Any, Any] | None = None,
    goodbye: Callable[[], Awaitable[None]] = nothing,
) -> asyncio.Task[Any]:
    """Connect the endpoints of one node and keep them while `work` runs, or until cancelled."""
    work = work or _forever()
    return site.start(endpoints[0], live(endpoints, work, connect_timeout_s=PATIENCE_S, goodbye=goodbye))


def serving(
    site: Site,
    child: ChildEndpoint,
    layout: ModelLayout,
    place: int,
    before: Callable[[], Awaitable[object]] = nothing,
) -> asyncio.Task[Any]:
    """Let a child serve: it waits for `before`, then adds 1 + place to each number."""
    out = layout.empty()

    async def work(task: Task, model: Arriving, report: Report) -> Answer:
        row = await model.whole()
        report(Phase.TRAINING, 0, 1)
        await before()
        layout.floats(out)[:] = changed(layout, row, place)
        return Answer(out, 1 + place, 0.5, task.epochs, 1, 0.0, 0.0)

    return living(site, child, work=child.serve(layout, work))


class Middle:
    """An institution as the protocol sees it: one name, an endpoint upward and one downward, on one broker."""

    def __init__(self, site: Site, layout: ModelLayout, *, children: Sequence[str], codecs: Codecs = PLAIN) -> None:
        def build(world: World) -> tuple[ChildEndpoint, ParentEndpoint]:
            identity = Identity(RUN, PARENT, "institution", new_session(world))
            links = dict.fromkeys(children, Link())
            up = ChildEndpoint(
                site.address, identity, parent="cloud", transfer=Transfer(), link=Link(), codecs=codecs, world=world
            )
            down = ParentEndpoint(site.address, identity, links=links, transfer=Transfer(), codecs=codecs, world=world)
            return up, down

        self._site, self._layout = site, layout
        self.up, self.down = site.make(PARENT, build)
        self.down.set_layout(layout)
        for endpoint in (self.up, self.down):
            endpoint.set_state(NodeState.READY)

    def live(self) -> asyncio.Task[Any]:
        """Connect both endpoints, and answer each task with the first child's model."""
        return living(self._site, self.up, self.down, work=self.up.serve(self._layout, self._work))

    async def _work(self, task: Task, model: Arriving, report: Report) -> Answer:
        played = await play(self.down, model)
        return Answer(np.array(played.uploads.rows_K[0]), 1, 0.5, 1, 1, 0.0, 0.0)


def play(
    parent: ParentEndpoint, row: Row | Arriving, *, iteration: int = 0, closing: Closing | None = None
) -> Coroutine[Any, Any, Round]:
    """Play a round in which all children get the same model."""
    return parent.round(
        iteration=iteration,
        round_=0,
        models=dict.fromkeys(parent.peers, row),
        epochs=dict.fromkeys(parent.peers, 1),
        closing=closing or Closing(),
    )


# Waiting and watching


async def until(condition: Callable[[], object]) -> None:
    """Wait until something outside the test's control has come true."""
    while not condition():  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.005)


@asynccontextmanager
async def together(*tasks: asyncio.Task[Any]) -> AsyncIterator[None]:
    """Cancel the tasks at the end; a task that ended by itself with an error raises it."""
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=PATIENCE_S)  # a task of a process that was killed never ends


class Watched:
    """Notes each chunk that arrives at a node and each ask that it sends."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.arrived: dict[tuple[str, str], set[int]] = {}
        self.asks: list[tuple[tuple[str, str], set[int], set[int]]] = []
        self.chunks = self.restarts = 0
        session = endpoint.session
        self._chunk, self._send = session.receiver.receive_chunk, session.outbox.send
        session.receiver.receive_chunk = self._receive  # type: ignore[method-assign]
        session.outbox.send = self._ask  # type: ignore[method-assign]

    def of(self, owner: str) -> set[int]:
        """Return the chunks that arrived from an owner."""
        return set().union(*(indices for (name, _), indices in self.arrived.items() if name == owner))

    def _receive(self, owner: str, blob: str, *, index: int, **known: Any) -> bool:
        fresh = self._chunk(owner, blob, index=index, **known)
        if fresh:
            self.arrived.setdefault((owner, blob), set()).add(index)
            self.chunks += 1
        return fresh

    def _ask(self, peer: str, message: Message, now: float) -> None:
        if isinstance(message, Ask):
            lacking = set(np.flatnonzero(np.unpackbits(np.frombuffer(message.lacking, np.uint8))).tolist())
            here = self.arrived.get((peer, message.blob), set())
            self.asks.append(((peer, message.blob), lacking, set(here)))
            self.restarts += message.restart
        self._send(peer, message, now)


async def _forever() -> None:
    await asyncio.Event().wait()


def _process(endpoint: Endpoint) -> SimulatedProcess:
    world = endpoint._world
    assert isinstance(world, SimulatedWorld)
    return world.process
