"""Slow, late and hostile: what a transfer costs and who waits for whom, on a mosquitto as others set it up."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiomqtt
import numpy as np
import pytest

from common.errors import ConnectionFailed
from common.layout import ModelLayout, Row, Section
from common.links import Link
from common.net.link import BrokerAddress
from common.protocol import serialization, topics
from common.protocol.identity import Identity
from common.protocol.messages import NodeState, Task
from common.protocol.sender import Publication
from common.runtime.arriving import Arriving
from common.runtime.child_endpoint import ChildEndpoint
from common.runtime.lifecycle import live
from common.runtime.parent_endpoint import ParentEndpoint, Round
from common.runtime.work import Answer, Report
from common.runtime.world import new_session
from common.spec import Closing, Transfer
from deploy import broker
from deploy.broker import Broker

LAB = "lab"
RUN = "run-1"
PARENT = "parent"
PATIENCE_S = 30.0
FINE = Transfer(chunk_bytes=32_768)
MOSQUITTOS_DEFAULTS = {"max_queued_messages": 1000, "max_inflight_messages": 20, "max_queued_bytes": 0}


@contextmanager
def mosquitto(directory: Path, settings: Mapping[str, int] | None = None) -> Iterator[Broker]:
    try:
        served = broker.start(directory=directory, kind="mosquitto", settings=settings)
    except ConnectionFailed as error:
        pytest.skip(str(error))
    with served:
        yield served


def scenario(play: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine, at most `PATIENCE_S`."""

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await play

    asyncio.run(bounded())


async def nothing() -> None:
    pass


def layout_of(nbytes: int) -> ModelLayout:
    return ModelLayout.build([("weight", (nbytes // 4,), Section.PARAMETER)])


def drawn(layout: ModelLayout) -> Row:
    row = layout.empty()
    layout.floats(row)[:] = np.random.default_rng(1).standard_normal(layout.columns, np.float32)
    return row


class Sender:
    """A parent that plays one round; it notes what it publishes, and `waits` as long as it is told.

    By default it begins when all have asked, however long one of them needs to come.
    """

    def __init__(self, served: Broker, names: Sequence[str], layout: ModelLayout, *, transfer: Transfer = FINE) -> None:
        self.face = ParentEndpoint(
            BrokerAddress(served.host, served.port),
            Identity(RUN, PARENT, "institution", new_session()),
            links=dict.fromkeys(names, Link()),
            transfer=transfer,
        )
        self.face.set_layout(layout)
        self.said: list[Publication] = []
        self.waits: Callable[[int], bool] = lambda chunks_said: chunks_said == 0 and not self.asked_by_all()
        self._publish = self.face.endpoint.outgoing.next_publication
        self.face.endpoint.outgoing.next_publication = self._noted  # type: ignore[method-assign]

    async def play(self, row: Row) -> Round:
        """Play the round from beginning to end and say that the run is over."""
        names = self.face.peers

        async def work() -> Round:
            self.face.endpoint.set_state(NodeState.READY)
            await self.face.gather(Closing())
            return await self.face.round(
                iteration=0, round_=0, models=dict.fromkeys(names, row), epochs=dict.fromkeys(names, 1),
                closing=Closing(),
            )  # fmt: skip

        waking = asyncio.create_task(self._keep_awake())
        try:
            return await live((self.face.endpoint,), work(), connect_timeout_s=PATIENCE_S, goodbye=nothing)
        finally:
            waking.cancel()

    @property
    def lanes(self) -> Counter[str]:
        """Return how many chunks went on each lane."""
        return Counter(publication.lane for publication in self.said)

    def asked_by_all(self) -> bool:
        return all(self.face.endpoint.outgoing.serving(name) for name in self.face.peers)

    def _noted(self, now: float, ready: Callable[[Iterable[str]], bool]) -> Publication | None:
        if self.waits(len(self.said)):
            return None
        publication = self._publish(now, ready)
        if publication is not None:
            self.said.append(publication)
        return publication

    async def _keep_awake(self) -> None:
        while True:  # what it waits for happens elsewhere
            self.face.endpoint.wake()
            await asyncio.sleep(0.005)


async def receiver(
    served: Broker,
    name: str,
    layout: ModelLayout,
    *,
    got: Callable[[], object] = lambda: None,
    per_chunk: Callable[[], object] = lambda: None,
    made: Callable[[ChildEndpoint], object] = lambda face: None,
    transfer: Transfer = FINE,
) -> None:
    """Serve until the run is over: return each model as it is, having called `got`, and `per_chunk` for each chunk."""
    identity = Identity(RUN, name, "device", new_session())
    address = BrokerAddress(served.host, served.port)
    face = ChildEndpoint(address, identity, parent=PARENT, transfer=transfer, link=Link())
    out = layout.empty()
    receive = face.endpoint.incoming.receive_chunk

    def slowly(*what: Any, **more: Any) -> bool:
        per_chunk()
        return receive(*what, **more)

    async def work(task: Task, model: Arriving, report: Report) -> Answer:
        np.copyto(out, await model.whole())
        got()
        return Answer(out, 1, 0.5, 1, 1, 0.0, 0.0)

    face.endpoint.incoming.receive_chunk = slowly  # type: ignore[method-assign]
    face.endpoint.set_state(NodeState.READY, samples=1)
    made(face)
    await live((face.endpoint,), face.serve(layout, work), connect_timeout_s=PATIENCE_S, goodbye=nothing)


def assert_exact(played: Round, row: Row, names: Sequence[str]) -> None:
    assert tuple(played.models) == tuple(names)
    for name, upload in played.models.items():
        assert np.array_equal(upload, row), name


# Slow


@pytest.mark.parametrize(
    "settings", [MOSQUITTOS_DEFAULTS, {"max_queued_messages": 50}], ids=["defaults", "queue of 50"]
)
def test_what_a_broker_drops_for_a_slow_subscriber_is_sent_once_more(
    settings: Mapping[str, int], tmp_path: Path
) -> None:
    """1 ms for a message, and none is read before another receiver has all: more than any queue holds."""
    layout, names = layout_of(50_000_000), ["fast", "slow"]
    row, chunks = drawn(layout), -(-50_000_000 // FINE.chunk_bytes)
    fast_has_it = threading.Event()

    def slowly() -> None:
        fast_has_it.wait(PATIENCE_S)
        time.sleep(0.001)

    async def run(served: Broker) -> None:
        sender = Sender(served, names, layout)
        with ThreadPoolExecutor(1) as own_loop:
            slow = own_loop.submit(asyncio.run, receiver(served, "slow", layout, per_chunk=slowly))
            fast = asyncio.create_task(receiver(served, "fast", layout, got=fast_has_it.set))
            assert_exact(await sender.play(row), row, names)
            await fast
            await asyncio.wrap_future(slow)
        again = sender.lanes["slow"]
        assert sender.lanes == {topics.ALL: chunks, "slow": again}
        assert again == sender.face.endpoint.outgoing.chunks_repeated
        assert 0 < again < chunks  # nothing twice, and by far not all
        assert len({p.index for p in sender.said if p.lane == "slow"}) == again
        assert "being dropped for client slow" in served.log.read_text()

    with mosquitto(tmp_path, settings) as served:
        scenario(run(served))


def test_six_fast_receivers_do_not_wait_for_four_that_read_nothing(tmp_path: Path) -> None:
    nbytes = 20_000_000
    layout, transfer = layout_of(nbytes), Transfer(chunk_bytes=500_000)
    fast, slow = [f"fast-{i}" for i in range(6)], [f"slow-{i}" for i in range(4)]
    row = drawn(layout)
    left = set(fast)
    go_on = threading.Event()

    def fast_has_it(name: str) -> None:
        left.discard(name)
        if not left:
            go_on.set()

    async def run(served: Broker) -> None:
        sender = Sender(served, [*fast, *slow], layout, transfer=transfer)
        with ThreadPoolExecutor(4) as own_loops:
            waiting = [
                own_loops.submit(
                    asyncio.run,
                    receiver(served, name, layout, per_chunk=lambda: go_on.wait(PATIENCE_S), transfer=transfer),
                )
                for name in slow
            ]
            running = [
                asyncio.create_task(
                    receiver(served, name, layout, got=lambda name=name: fast_has_it(name), transfer=transfer)
                )
                for name in fast
            ]
            assert_exact(await sender.play(row), row, [*fast, *slow])
            await asyncio.gather(*running, *map(asyncio.wrap_future, waiting))
        assert sender.lanes == {topics.ALL: nbytes // 500_000}
        assert peak_bytes(served) <= 100e6 + len(slow) * nbytes

    with mosquitto(tmp_path) as served:
        scenario(run(served))


def peak_bytes(served: Broker) -> int:
    """Return the most memory that the broker has had resident."""
    status = Path(f"/proc/{served.process.pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


# Late


def test_who_joins_in_mid_broadcast_gets_everything_and_delays_nobody(tmp_path: Path) -> None:
    """The sender waits in the middle for the late one to ask, so that what it missed is known to the chunk."""
    layout = layout_of(2_000_000)
    names, chunks, missed = ["device-0", "device-1", "device-2", "late"], 62, 30
    row = drawn(layout)

    async def run(served: Broker) -> None:
        sender = Sender(served, names, layout)
        outgoing = sender.face.endpoint.outgoing
        joined = asyncio.Event()

        def waits(said: int) -> bool:
            if said == missed:
                joined.set()
            return said == missed and not outgoing.serving("late")

        async def join() -> None:
            await joined.wait()
            await receiver(served, "late", layout)

        sender.waits = waits
        sender.face.samples["late"] = 1  # known from an earlier life, so that the round begins without it
        running = [asyncio.create_task(receiver(served, name, layout)) for name in names[:3]]
        running.append(asyncio.create_task(join()))
        playing = asyncio.create_task(sender.play(row))
        assert_exact(await playing, row, names)
        await asyncio.gather(*running)
        assert sender.lanes == {topics.ALL: chunks, "late": missed}
        assert sorted(p.index for p in sender.said if p.lane == "late") == list(range(missed))
        assert [p.index for p in sender.said if p.lane == topics.ALL] == list(range(chunks))

    with mosquitto(tmp_path) as served:
        scenario(run(served))


# Hostile


def test_a_thousand_hostile_chunks_by_a_broker_spoil_nothing(forge: Callable[..., Any], tmp_path: Path) -> None:
    """Sixteen after each true one; the sender keeps the last one back until all of them have arrived."""
    layout = layout_of(2_000_000)
    chunks = 62
    row, draw = drawn(layout), random.Random(1)

    async def attack(served: Broker, sender: Sender, expected: Counter[str]) -> None:
        forged = forge(PARENT, streams=[topics.ALL, "device-0", "device-9"])
        async with aiomqtt.Client(served.host, served.port) as client:
            client.pending_calls_threshold = 2000
            await client.subscribe(
                [(topics.inbox(LAB, RUN, "device-0", PARENT), 1), (f"fs1/{LAB}/{RUN}/{PARENT}/blob/#", 0)]
            )
            manifest = None
            async for message in client.messages:
                topic = topics.parse(message.topic.value)
                if isinstance(topic, topics.InboxTopic):
                    said = serialization.decode(bytes(message.payload))[1]
                    manifest = said.model if isinstance(said, Task) else manifest
                if manifest is None or not isinstance(topic, topics.ChunkTopic) or expected["all"] == 1000:
                    continue
                if topic.number not in {p.number for p in sender.said}:
                    continue  # one of our own
                for kind in draw.choices(forged.kinds, k=min(17, 1000 - expected["all"])):
                    known = [(p.lane, p.index, p.number) for p in sender.said]
                    it = forged(draw, kind, manifest, row.data, published=known)
                    text = topics.chunk(LAB, RUN, it.owner, it.stream, it.blob, it.index, it.number)
                    await client.publish(text, it.data)
                    expected["all"] += 1
                    if it.owner == PARENT and it.blob == manifest.blob and it.stream in (topics.ALL, "device-0"):
                        sound = it.index < chunks and it.data == row.data[manifest.span(it.index)]
                        expected["sound" if sound else "refused"] += 1

    async def run(served: Broker) -> None:
        sender = Sender(served, ["device-0"], layout)
        expected: Counter[str] = Counter()
        faces: list[ChildEndpoint] = []

        def all_came() -> bool:
            incoming = faces[0].endpoint.incoming
            return expected["all"] == 1000 and incoming.chunks_refused == expected["refused"]

        sender.waits = lambda said: said == chunks - 1 and not all_came()
        attacking = asyncio.create_task(attack(served, sender, expected))
        running = asyncio.create_task(receiver(served, "device-0", layout, made=faces.append))
        try:
            played = await sender.play(row)
        finally:
            attacking.cancel()
        assert_exact(played, row, ["device-0"])
        await running
        assert expected["refused"] > 200
        assert faces[0].endpoint.incoming.chunks_refused >= expected["refused"]
        assert len(sender.said) <= 2 * chunks

    with mosquitto(tmp_path) as served:
        scenario(run(served))
