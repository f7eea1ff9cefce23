"""Parents and children for tests, wherever they live (`tests.helpers.sites`).

    @virtual
    async def test_a_round(site: SimulatedSite) -> None:
        parent = parent_of(site, ["device-0"], layout=layout)
        async with together(living(site, parent), serving(site, child_of(site, "device-0"), layout,
        0)):
            await play(parent, row)

A minute of a virtual test takes milliseconds, and the same test takes the same course each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fedstrata.common.accounting.work import Work
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.model.codec_settings import PLAIN, Codecs
from fedstrata.common.model.layout import FrozenForm, LinkLayouts, ModelLayout, Row, Section
from fedstrata.common.protocol.messages import (
    Announcement,
    Ask,
    Message,
    NodeState,
    Phase,
    Result,
    Task,
)
from fedstrata.common.protocol.peers import ToChildren, ToParent
from fedstrata.common.protocol.presence import Identity, Proof
from fedstrata.common.protocol.topics import ChunkTopic
from fedstrata.common.runtime.child_endpoint import ChildEndpoint
from fedstrata.common.runtime.endpoint import Endpoint
from fedstrata.common.runtime.lifecycle import live
from fedstrata.common.runtime.link_models import Arriving
from fedstrata.common.runtime.parent_endpoint import ParentEndpoint
from fedstrata.common.runtime.round import ClosedRound, Dispatch, Report, WorkResult
from fedstrata.common.runtime.world import World, new_session
from fedstrata.common.settings.closing import Closing
from fedstrata.common.settings.links import LinkSettings
from fedstrata.common.storage.spool import Spool
from tests.helpers.sites import PATIENCE_S, RealSite, Site, forever, until

LAB: Final = "lab"
RUN: Final = "run-1"
PARENT: Final = "institution-0"
FINE: Final = TransferSettings(chunk_bytes=32_768)
EXPERIMENT: Final = Announcement("{}", "[]", "split-1")

Facts = tuple[str, dict[str, object]]


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


def assert_models(
    played: ClosedRound, row: Row, *, layout: ModelLayout, places: Mapping[str, int]
) -> None:
    """Assert that each child at its place, and no other, changed the model as it does."""
    assert set(played.models) == set(places)
    for name, upload in played.models.items():
        np.testing.assert_array_equal(
            layout.floats(upload), changed(layout, row, places[name]), err_msg=name
        )


# Nodes


def parent_of(
    site: Site,
    children: Sequence[str],
    *,
    layout: ModelLayout,
    name: str = PARENT,
    run: str = RUN,
    transfer: TransferSettings | None = None,
    link: LinkSettings | None = None,
    links: Mapping[str, LinkSettings] | None = None,
    shaped: bool = True,
    codecs: Codecs = PLAIN,
    spool: Spool | None = None,
    observed: list[Facts] | None = None,
    identity: Identity | None = None,
) -> ParentEndpoint:
    """Return a parent that is ready."""
    seen = [] if observed is None else observed

    def build(world: World) -> ParentEndpoint:
        return ParentEndpoint(
            site.address,
            identity or Identity(run, name, "institution", new_session(world)),
            ToChildren(
                links=links or dict.fromkeys(children, link or LinkSettings()),
                transfer=transfer or TransferSettings(),
                shaped=shaped,
            ),
            codecs=codecs,
            spool=spool,
            observe=lambda event, facts: seen.append((event, facts)),
            world=world,
        )

    parent = site.make(name, build)
    parent.set_layouts(LinkLayouts.plain(layout))
    parent.set_state(NodeState.READY)
    return parent


def announcing(
    site: Site, *, name: str = PARENT, children: Sequence[str] = ("device-0",), run: str = RUN
) -> ParentEndpoint:
    """Return a parent that has announced its experiment."""
    parent = parent_of(site, children, layout=layout_of(4000), name=name, run=run)
    parent.announce(EXPERIMENT)
    return parent


def child_of(
    site: Site,
    name: str,
    *,
    parent: str = PARENT,
    transfer: TransferSettings | None = None,
    link: LinkSettings | None = None,
    shaped: bool = True,
    codecs: Codecs = PLAIN,
    spool: Spool | None = None,
    frozen: FrozenForm | None = None,
    ready: bool = True,
    identity: Identity | None = None,
) -> ChildEndpoint:
    """Return a child, `ready` or preparing."""

    def build(world: World) -> ChildEndpoint:
        return ChildEndpoint(
            site.address,
            identity or Identity(RUN, name, "device", new_session(world)),
            ToParent(
                parent=parent,
                transfer=transfer or TransferSettings(),
                link=link or LinkSettings(),
                shaped=shaped,
                frozen=frozen,
            ),
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
    work = work or forever()
    return site.start(
        endpoints[0], live(endpoints, work, connect_timeout_s=PATIENCE_S, goodbye=goodbye)
    )


def serving(
    site: Site,
    child: ChildEndpoint,
    layout: ModelLayout,
    place: int,
    before: Callable[[], Awaitable[object]] = nothing,
    *,
    last: float | None = None,
) -> asyncio.Task[Any]:
    """Let a child serve: it waits for `before`, then adds 1 + place to each number; the last one is
    another, if that is given.
    """
    out = layout.empty()

    async def work(task: Task, model: Arriving, report: Report) -> WorkResult:
        row = await model.whole()
        report(Phase.TRAINING, 0, 1)
        await before()
        layout.floats(out)[:] = changed(layout, row, place)
        if last is not None:
            layout.floats(out)[-1] = last
        blob = child.models.sent.encode(layout, out, reference=row)
        return WorkResult(blob, Work(1 + place, 0.5, task.epochs, 1, 0.0, 0.0))

    return living(site, child, work=child.serve(LinkLayouts.plain(layout), work))


def lying(
    site: Site, child: ChildEndpoint, layout: ModelLayout, change: Callable[[Result], Result]
) -> asyncio.Task[Any]:
    """Let a child serve as the others do, and change its result."""
    honest = child.session.participant.finish
    child.session.participant.finish = lambda result, *, now: honest(change(result), now=now)  # type: ignore[method-assign]
    return serving(site, child, layout, 0)


def ending_with(
    site: Site, child: ChildEndpoint, layout: ModelLayout, value: float
) -> asyncio.Task[Any]:
    """Let a child serve a model whose last entry is `value`."""
    return serving(site, child, layout, 0, last=value)


class Middle:
    """An institution as the protocol sees it: one name, an endpoint upward and one downward, on one
    broker.
    """

    def __init__(
        self, site: Site, layout: ModelLayout, *, children: Sequence[str], codecs: Codecs = PLAIN
    ) -> None:
        def build(world: World) -> tuple[ChildEndpoint, ParentEndpoint]:
            inside = RealSite(site.address, world)
            identity = Identity(RUN, PARENT, "institution", new_session(world))
            how: dict[str, Any] = {"codecs": codecs, "identity": identity}
            return (
                child_of(inside, PARENT, parent="cloud", **how),
                parent_of(inside, children, layout=layout, **how),
            )

        self._site, self._layout = site, layout
        self.up, self.down = site.make(PARENT, build)

    def live(self) -> asyncio.Task[Any]:
        """Connect both endpoints, and answer each task with the first child's model."""
        return living(
            self._site,
            self.up,
            self.down,
            work=self.up.serve(LinkLayouts.plain(self._layout), self._work),
        )

    async def _work(self, task: Task, model: Arriving, report: Report) -> WorkResult:
        played = await play(self.down, model)
        row = np.array(played.uploads.rows_K[0])
        blob = self.up.models.sent.encode(self._layout, row, reference=model.row)
        return WorkResult(blob, Work(1, 0.5, 1, 1, 0.0, 0.0))


def play(
    parent: ParentEndpoint,
    row: Row | Arriving,
    *,
    global_round: int = 0,
    closing: Closing | None = None,
) -> Coroutine[Any, Any, ClosedRound]:
    """Play a round in which all children get the same model."""
    return parent.round(
        Dispatch(
            global_round,
            0,
            models=[(row, parent.peers)],
            epochs=dict.fromkeys(parent.peers, 1),
            closing=closing or Closing(),
        )
    )


# Waiting and watching


async def introduced(*children: ChildEndpoint) -> None:
    """Wait until these children know their parent's session, as those do that have found the run."""
    await until(
        lambda: all(c.session.link.proofs.proof(c.session.parent) is Proof.PROVEN for c in children)
    )


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
        # a task of a process that was killed never ends
        await asyncio.wait(tasks, timeout=PATIENCE_S)


class Watched:
    """Notes each chunk that arrives at a node and each ask that it sends."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.arrived: dict[tuple[str, str], set[int]] = {}
        self.asks: list[tuple[tuple[str, str], set[int], set[int]]] = []
        self.chunks = self.restarts = 0
        session = endpoint.session
        self._chunk, self._send = session.link.receiver.receive_chunk, session.link.outbox.send
        session.link.receiver.receive_chunk = self._receive  # type: ignore[method-assign]
        session.link.outbox.send = self._ask  # type: ignore[method-assign]

    def of(self, owner: str) -> set[int]:
        """Return the chunks that arrived from an owner."""
        return set().union(
            *(indices for (name, _), indices in self.arrived.items() if name == owner)
        )

    def _receive(self, topic: ChunkTopic, data: bytes | memoryview, *, now: float) -> bool:
        fresh = self._chunk(topic, data, now=now)
        if fresh:
            self.arrived.setdefault((topic.node, topic.blob), set()).add(topic.index)
            self.chunks += 1
        return fresh

    def _ask(self, peer: str, message: Message, now: float) -> float:
        if isinstance(message, Ask):
            lacking = set(
                np.flatnonzero(np.unpackbits(np.frombuffer(message.lacking, np.uint8))).tolist()
            )
            here = self.arrived.get((peer, message.blob), set())
            self.asks.append(((peer, message.blob), lacking, set(here)))
            self.restarts += message.restart
        return self._send(peer, message, now)
