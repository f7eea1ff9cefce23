"""Parents and children on a real broker, in one process: hostile bytes, bad offers, double names, a broker that goes."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiomqtt
import numpy as np
import numpy.typing as npt
import pytest

from common.errors import DuplicateName, FedstrataError, NoProgress, RunFailed, WireError
from common.layout import ModelLayout, Row, Section
from common.net.link import BrokerAddress
from common.node.child import Answer, ChildFace, Report
from common.node.endpoint import Endpoint, Identity, new_session
from common.node.life import live
from common.node.parent import ParentFace, Round
from common.spec import Closing, Link, Transfer
from common.transfer.manifest import describe
from common.wire import messages, topics
from common.wire.messages import (
    Announcement,
    Ask,
    Farewell,
    Gone,
    Key,
    Manifest,
    Message,
    NodeState,
    Phase,
    Presence,
    Progress,
    Receipt,
    Result,
    Task,
    Traffic,
)
from deploy import broker
from deploy.broker import Broker, Kind

RUN = "run-1"
PARENT = "institution-0"
PATIENCE_S = 60.0
MANY = 2**63 - 1

Change = Callable[[Result], Result]
Facts = tuple[str, dict[str, object]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker.start(directory=tmp_path_factory.mktemp("broker")) as one:
        yield one


@pytest.fixture
def address(served: Broker) -> BrokerAddress:
    return BrokerAddress(served.host, served.port)


@pytest.fixture(params=["mosquitto", "embedded"])
def kind(request: pytest.FixtureRequest) -> Kind:
    wanted: Kind = request.param
    if wanted == "mosquitto" and broker.choose() != "mosquitto":
        pytest.skip("mosquitto is not installed")
    return wanted


def scenario(play: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine, at most `PATIENCE_S`."""

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await play

    asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    """Wait until something outside our sight has come true."""
    while not condition():
        await asyncio.sleep(0.005)


def layout_of(nbytes: int) -> ModelLayout:
    return ModelLayout.build([("weight", (nbytes // 4,), Section.PARAMETER)])


def drawn(layout: ModelLayout, seed: int) -> Row:
    row = layout.empty()
    layout.floats(row)[:] = np.random.default_rng(seed).standard_normal(layout.columns, np.float32)
    return row


def changed(layout: ModelLayout, row: Row, place: int) -> npt.NDArray[np.float32]:
    """Return what the child at this place makes of a model."""
    return layout.floats(row) + np.float32(1 + place)


def parent_of(
    address: BrokerAddress,
    children: list[str],
    *,
    layout: ModelLayout,
    name: str = PARENT,
    run: str = RUN,
    transfer: Transfer | None = None,
    link: Link | None = None,
    observed: list[Facts] | None = None,
) -> ParentFace:
    seen = [] if observed is None else observed
    face = ParentFace(
        address,
        Identity(run, name, "institution", new_session()),
        children=children,
        transfer=transfer or Transfer(),
        link=link or Link(),
        observe=lambda event, facts: seen.append((event, facts)),
    )
    face.set_layout(layout)
    face.endpoint.set_state(NodeState.READY)
    return face


def child_of(
    address: BrokerAddress, name: str, *, parent: str = PARENT, transfer: Transfer | None = None, link: Link | None = None
) -> ChildFace:
    identity = Identity(RUN, name, "device", new_session())
    face = ChildFace(address, identity, parent=parent, transfer=transfer or Transfer(), link=link or Link())
    face.endpoint.set_state(NodeState.READY, samples=1)
    return face


async def nothing() -> None:
    pass


def living(endpoints: list[Endpoint], work: Coroutine[Any, Any, Any] | None = None) -> asyncio.Task[Any]:
    """Connect endpoints and keep them while `work` runs, or until cancelled."""
    work = work or asyncio.Event().wait()
    return asyncio.create_task(live(endpoints, work, connect_timeout_s=PATIENCE_S, goodbye=nothing))


def serving(face: ChildFace, layout: ModelLayout, place: int, before: Callable[[], Awaitable[object]] = nothing) -> asyncio.Task[Any]:
    """Let a child serve: it waits for `before`, then adds 1 + place to each number."""
    out = layout.empty()

    async def work(task: Task, row: Row, report: Report) -> Answer:
        report(Phase.TRAINING, 0, 1)
        await before()
        layout.floats(out)[:] = changed(layout, row, place)
        return Answer(out, 1 + place, 0.5, task.epochs, 1, 0.0, 0.0)

    return living([face.endpoint], face.serve(layout, work))


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
        await asyncio.wait(tasks)


def play(face: ParentFace, row: Row, *, iteration: int = 0, closing: Closing | None = None) -> Coroutine[Any, Any, Round]:
    return face.round(
        iteration=iteration,
        round_=0,
        models=dict.fromkeys(face.peers, row),
        epochs=dict.fromkeys(face.peers, 1),
        closing=closing or Closing(),
    )


def assert_models(played: Round, row: Row, *, layout: ModelLayout, places: Mapping[str, int]) -> None:
    assert set(played.children) == set(places)
    for name, upload in zip(played.children, played.uploads, strict=True):
        np.testing.assert_array_equal(layout.floats(upload), changed(layout, row, places[name]), err_msg=name)


# Any bytes on any topic


def rubbish(draw: random.Random) -> list[bytes]:
    """Return bytes that are no message: random ones, cut ones, deep ones, wrong versions, kinds, fields."""
    whole = messages.encode(Ask("0" * 16, b"\xff", 1, 1, 8, False), "s")
    return [
        *(draw.randbytes(draw.randrange(1, 300)) for _ in range(6)),
        whole[:-2],
        whole + b"\x00",
        b"\x91" * 3000,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x94\x02\xa1s\x00\x00",
        b"\x93\x01\xa1s\x63",
        b"\x93\x01\xa1s\xd3\x80\x00\x00\x00\x00\x00\x00\x00",
        b"\x93\x01\xa0\x06",
    ]


def misfits(draw: random.Random, blobs: list[str]) -> list[Message]:
    """Return sound messages that ask for nonsense."""
    asks = [
        Ask(blob, bits, MANY, MANY, window, restart)
        for blob in [*blobs, f"{draw.getrandbits(64):016x}"]
        for bits, window, restart in [(b"\x00", 1, False), (b"\xff" * 3000, MANY, True), (b"\xff", 0, False)]
    ]
    return [*asks, Gone(f"{draw.getrandbits(64):016x}"), Presence(NodeState.FAILED, "device"), Announcement("{", "[")]


def strangers(layout: ModelLayout) -> list[Message]:
    """Return sound messages of every kind, models of terabytes among them, for a sender that may not send them."""
    huge = Manifest("f" * 16, 4_000_000 * 1000, 4_000_000, bytes(8000), "fp32", layout.digest)
    key = Key(0, 0, 0)
    result = Result(key, huge, None, MANY, float("nan"), 1, 1, 0.0, 0.0, ())
    progress = Progress(key, Phase.TRAINING, MANY, MANY, Traffic(*[MANY] * 8), Traffic(*[MANY] * 8))
    return [
        Task(key, MANY, huge, b"x"), result, progress, Receipt(key, "no"), Gone("f" * 16),
        Farewell(Traffic(), Traffic(), ()), Presence(NodeState.LOST, "device"),
    ]  # fmt: skip


class Intruder:
    """A client that writes on every topic of a run; it learns the blobs' ids by listening."""

    def __init__(self, address: BrokerAddress, names: list[str], layout: ModelLayout) -> None:
        self._address = address
        self._names = names
        self._layout = layout
        self._blobs: dict[str, set[str]] = {name: set() for name in names}
        self._damaged: set[str] = set()
        self.cycles = 0
        self.fetched = asyncio.Event()
        self.cycled = asyncio.Event()

    async def run(self) -> None:
        async with aiomqtt.Client(self._address.host, self._address.port, identifier="intruder") as client:
            client.pending_calls_threshold = 10_000
            await client.subscribe(f"fs1/{RUN}/+/inbox/+")
            listening = asyncio.create_task(self._listen(client))
            try:
                for cycle in itertools.count():
                    for topic, body, retain in self._cycle(random.Random(cycle)):
                        await client.publish(topic, body, retain=retain, timeout=math.inf)
                    # The last one by QoS 1, so that all were with the broker before the cycle counts.
                    await client.publish(f"fs1/{RUN}/intruder/state", b"\x00", qos=1, timeout=math.inf)
                    self.cycles += 1
                    self.cycled.set()
            finally:
                listening.cancel()
                await asyncio.wait((listening,))

    async def _listen(self, client: aiomqtt.Client) -> None:
        async for message in client.messages:
            topic = topics.parse(message.topic.value)
            try:
                said = messages.decode(bytes(message.payload))[1]
            except WireError:
                continue
            if isinstance(topic, topics.InboxTopic) and isinstance(said, (Task, Result)):
                self._blobs.get(topic.sender, set()).add(said.model.blob)

    def _cycle(self, draw: random.Random) -> Iterator[tuple[str, bytes, bool]]:
        for node in self._names:
            for body in [*rubbish(draw), b""]:
                yield topics.state(RUN, node), body, draw.random() < 0.5
                yield topics.spec(RUN, node), body, draw.random() < 0.5
            yield from self._inbox(node, draw)
            yield from self._lanes(node, draw)

    def _inbox(self, node: str, draw: random.Random) -> Iterator[tuple[str, bytes, bool]]:
        for sender in [*self._names, "intruder"]:
            if sender == node:
                continue
            for body in [*rubbish(draw), b""]:
                yield topics.inbox(RUN, node, sender), body, draw.random() < 0.2
            for message in misfits(draw, sorted(self._blobs[node])):
                yield topics.inbox(RUN, node, sender), messages.encode(message, "intruder"), False
        for message in strangers(self._layout):
            yield topics.inbox(RUN, node, "intruder"), messages.encode(message, "intruder"), False
            # What a child says is none of a child's business, and the other way round.
            wrong = (Task, Receipt, Presence) if node == PARENT else (Result, Progress, Farewell, Presence)
            if isinstance(message, wrong):
                for sender in self._names:
                    yield topics.inbox(RUN, node, sender), messages.encode(message, "intruder"), False

    def _lanes(self, node: str, draw: random.Random) -> Iterator[tuple[str, bytes, bool]]:
        foreign = f"{draw.getrandbits(64):016x}"
        for blob in [*self._blobs[node], foreign]:
            for lane in (topics.ALL, *self._names):
                yield topics.chunk(RUN, node, lane, blob, 999_999_999, 10**17), draw.randbytes(50), False
                yield f"fs1/{RUN}/{node}/blob/{lane}/{blob}/-1/x", draw.randbytes(50), False
                yield f"fs1/{RUN}/{node}/blob/{lane}/{blob}/{'9' * 30}/1", b"", False
            if blob not in self._damaged:  # one that hits: it must be asked for again
                self._damaged.add(blob)
                yield topics.chunk(RUN, node, topics.ALL, blob, 3, 10**17), draw.randbytes(50), False


def test_a_round_survives_any_bytes_on_any_topic(address: BrokerAddress) -> None:
    async def run() -> None:
        layout = layout_of(2_000_000)
        names = ["device-0", "device-1", "device-2"]
        transfer, link = Transfer(chunk_bytes=32_768), Link(up_mbit=24.0, down_mbit=24.0)
        parent = parent_of(address, names, layout=layout, transfer=transfer, link=link)
        children = [child_of(address, name, transfer=transfer, link=link) for name in names]
        intruder = Intruder(address, [PARENT, *names], layout)

        async def flooded() -> None:
            intruder.cycled.clear()
            await intruder.cycled.wait()

        flood = asyncio.create_task(intruder.run())
        tasks = [serving(child, layout, place, flooded) for place, child in enumerate(children)]
        async with together(living([parent.endpoint]), flood, *tasks):
            await intruder.cycled.wait()
            row = drawn(layout, 1)
            played = await play(parent, row)
            assert_models(played, row, layout=layout, places={name: place for place, name in enumerate(names)})
            assert parent.refused_models == 0
            assert intruder.cycles >= 2
            ignored = [face.endpoint.ignored for face in (parent, *children)]
            assert min(ignored) > 50, ignored
            for face, before in zip((parent, *children), ignored, strict=True):
                await until(lambda face=face, before=before: face.endpoint.ignored > before)
        # What it left behind on the broker harms nobody who comes later.
        parent = parent_of(address, names, layout=layout)
        children = [child_of(address, name) for name in names]
        tasks = [serving(child, layout, place) for place, child in enumerate(children)]
        async with together(living([parent.endpoint]), *tasks):
            played = await play(parent, row)
            assert_models(played, row, layout=layout, places={name: place for place, name in enumerate(names)})

    scenario(run())
