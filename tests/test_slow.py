"""Slow, late and hostile: what a transfer costs and who waits for whom."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ConnectionFailed
from common.experiment.schema import TransferSettings
from common.experiment.tiers import Closing
from common.model.layout import LinkLayouts, ModelLayout, Row
from common.net.address import BrokerAddress
from common.protocol import serialization, topics
from common.protocol.messages import Task
from common.protocol.sender import Publication
from common.runtime.child_endpoint import ChildEndpoint
from common.runtime.models import Arriving
from common.runtime.round import ClosedRound, Report, WorkResult
from deploy.brokers import broker
from deploy.brokers.broker import BrokerProcess
from deploy.simulation.broker import Routed
from tests.helpers.nodes import FINE, LAB, RUN, child_of, drawn, layout_of, living, parent_of, play, together
from tests.helpers.sites import PATIENCE_S, RealSite, SimulatedSite, Site, real, until, virtual

PARENT = "parent"
MOSQUITTOS_DEFAULTS = {"max_queued_messages": 1000, "max_inflight_messages": 20, "max_queued_bytes": 0}


@contextmanager
def mosquitto(directory: Path, settings: Mapping[str, int] | None = None) -> Iterator[BrokerProcess]:
    try:
        served = broker.start(directory=directory, kind="mosquitto", settings=settings)
    except ConnectionFailed as error:
        pytest.skip(str(error))
    with served:
        yield served


def site_at(served: BrokerProcess) -> RealSite:
    return RealSite(BrokerAddress(served.host, served.port))


class Sender:
    """A parent that plays one round; it notes what it publishes, and pauses while `waits` is true.

    By default it begins when all have asked, however long one of them needs to come.
    """

    def __init__(
        self, site: Site, names: Sequence[str], layout: ModelLayout, *, transfer: TransferSettings = FINE
    ) -> None:
        self.site = site
        self.parent = parent_of(site, names, layout=layout, name=PARENT, transfer=transfer)
        self.published: list[Publication] = []
        self.waits: Callable[[int], bool] = lambda published: published == 0 and not self.asked_by(names)
        self._publish = self.parent.session.link.sender.next_publication
        self.parent.session.link.sender.next_publication = self._noted  # type: ignore[method-assign]

    async def play(self, row: Row) -> ClosedRound:
        """Play the round from beginning to end, and end the run."""

        async def work() -> ClosedRound:
            await self.parent.gather(Closing())
            return await play(self.parent, row)

        waking = asyncio.create_task(self.keep_awake())
        try:
            played: ClosedRound = await living(self.site, self.parent, work=work())
            return played
        finally:
            waking.cancel()

    @property
    def streams(self) -> Counter[str]:
        """Return how many chunks went on each stream."""
        return Counter(publication.stream for publication in self.published)

    def asked_by(self, names: Iterable[str]) -> bool:
        return all(self.parent.session.link.sender.serving(name) for name in names)

    async def keep_awake(self) -> None:
        while True:  # what it waits for happens elsewhere
            self.parent.wake()
            await asyncio.sleep(0.005)

    def _noted(self, now: float, ready: Callable[[Iterable[str]], bool]) -> Publication | None:
        if self.waits(len(self.published)):
            return None
        publication = self._publish(now, ready)
        if publication is not None:
            self.published.append(publication)
        return publication


def receiving(
    site: Site,
    name: str,
    layout: ModelLayout,
    *,
    got: Callable[[], object] = lambda: None,
    per_chunk: Callable[[], object] = lambda: None,
    made: Callable[[ChildEndpoint], object] = lambda child: None,
    transfer: TransferSettings = FINE,
) -> asyncio.Task[Any]:
    """Serve until the run is over: return each model as it is, having called `got`, and `per_chunk` for each chunk."""
    child = child_of(site, name, parent=PARENT, transfer=transfer)
    out = layout.empty()
    receive = child.session.link.receiver.receive_chunk

    def slowly(*what: Any, **more: Any) -> bool:
        per_chunk()
        return receive(*what, **more)

    async def work(task: Task, model: Arriving, report: Report) -> WorkResult:
        np.copyto(out, await model.whole())
        got()
        return WorkResult(out.data, 1, 0.5, 1, 1, 0.0, 0.0)

    child.session.link.receiver.receive_chunk = slowly  # type: ignore[method-assign]
    made(child)
    return living(site, child, work=child.serve(LinkLayouts.plain(layout), work))


def receive_on_another_loop(served: BrokerProcess, name: str, layout: ModelLayout, **options: Any) -> None:
    """Serve as `receiving` does, in a thread."""

    async def receive() -> None:
        await receiving(site_at(served), name, layout, **options)

    asyncio.run(receive())


def assert_exact(played: ClosedRound, row: Row, names: Sequence[str]) -> None:
    assert tuple(played.models) == tuple(names)
    for name, upload in played.models.items():
        assert np.array_equal(upload, row), name


# Slow


@pytest.mark.parametrize(
    ("settings", "nbytes"),
    [
        pytest.param(MOSQUITTOS_DEFAULTS, 50_000_000, id="defaults", marks=pytest.mark.slow),
        pytest.param({"max_queued_messages": 50}, 20_000_000, id="queue of 50"),
    ],
)
def test_what_a_broker_drops_for_a_slow_subscriber_is_sent_once_more(
    settings: Mapping[str, int], nbytes: int, tmp_path: Path
) -> None:
    """1 ms for a message, and none is read before another receiver has all: more than queue and sockets hold."""
    layout, names = layout_of(nbytes), ["fast", "slow"]
    row, chunks = drawn(layout, 1), -(-nbytes // FINE.chunk_bytes)
    fast_has_it = threading.Event()

    def slowly() -> None:
        fast_has_it.wait(PATIENCE_S)
        time.sleep(0.001)

    async def run(served: BrokerProcess) -> None:
        sender = Sender(site_at(served), names, layout)
        with ThreadPoolExecutor(1) as thread:
            slow = thread.submit(receive_on_another_loop, served, "slow", layout, per_chunk=slowly)
            fast = receiving(site_at(served), "fast", layout, got=fast_has_it.set)
            assert_exact(await sender.play(row), row, names)
            await fast
            await asyncio.wrap_future(slow)
        again = sender.streams["slow"]
        assert sender.streams == {topics.ALL: chunks, "slow": again}
        assert again == sender.parent.session.link.sender.chunks_repeated
        assert 0 < again < chunks  # nothing twice, and by far not all
        assert len({p.index for p in sender.published if p.stream == "slow"}) == again
        assert "being dropped for client slow" in served.log.read_text()

    with mosquitto(tmp_path, settings) as served:
        real(run(served))


def test_a_receiver_names_a_broker_that_drops_what_it_reads_slowly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout, names = layout_of(20_000_000), ["fast", "slow"]
    row = drawn(layout, 1)

    async def run(served: BrokerProcess) -> None:
        sender = Sender(site_at(served), names, layout)
        with ThreadPoolExecutor(1) as thread:
            pace = partial(time.sleep, 0.02)
            slow = thread.submit(receive_on_another_loop, served, "slow", layout, per_chunk=pace)
            # The broadcast goes on while the slow one lags, else it has no gap to see.
            fast = receiving(site_at(served), "fast", layout, per_chunk=partial(time.sleep, 0.004))
            assert_exact(await sender.play(row), row, names)
            await fast
            await asyncio.wrap_future(slow)
        assert "being dropped for client slow" in served.log.read_text()
        assert [m.partition(" drops")[0] for m in caplog.messages if "chunks were lost" in m] == [
            f"slow: broker 127.0.0.1:{served.port}"
        ]

    with mosquitto(tmp_path, {"max_queued_messages": 10}) as served:
        real(run(served))


def test_six_fast_receivers_do_not_wait_for_four_that_read_nothing(tmp_path: Path) -> None:
    nbytes = 20_000_000
    layout, transfer = layout_of(nbytes), TransferSettings(chunk_bytes=500_000)
    fast, slow = [f"fast-{i}" for i in range(6)], [f"slow-{i}" for i in range(4)]
    row = drawn(layout, 1)
    left = set(fast)
    go_on = threading.Event()

    def fast_has_it(name: str) -> None:
        left.discard(name)
        if not left:
            go_on.set()

    def read_nothing() -> None:
        go_on.wait(PATIENCE_S)

    async def run(served: BrokerProcess) -> None:
        sender = Sender(site_at(served), [*fast, *slow], layout, transfer=transfer)
        with ThreadPoolExecutor(4) as threads:
            waiting = [
                threads.submit(receive_on_another_loop, served, name, layout, per_chunk=read_nothing, transfer=transfer)
                for name in slow
            ]
            running = [
                receiving(site_at(served), name, layout, got=lambda name=name: fast_has_it(name), transfer=transfer)
                for name in fast
            ]
            assert_exact(await sender.play(row), row, [*fast, *slow])
            await asyncio.gather(*running, *map(asyncio.wrap_future, waiting))
        assert sender.streams == {topics.ALL: nbytes // 500_000}
        assert peak_bytes(served) <= 100e6 + len(slow) * nbytes

    with mosquitto(tmp_path) as served:
        real(run(served))


def peak_bytes(served: BrokerProcess) -> int:
    """Return the most memory that the broker has had resident."""
    status = Path(f"/proc/{served.process.pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


# Late


@virtual
async def test_who_joins_in_mid_broadcast_gets_everything_and_delays_nobody(site: SimulatedSite) -> None:
    """The sender waits in the middle for the late one to ask, so that what it missed is known to the chunk."""
    layout = layout_of(2_000_000)
    names, chunks, missed = ["device-0", "device-1", "device-2", "late"], 62, 30
    row = drawn(layout, 1)
    sender = Sender(site, names, layout)
    parent = sender.parent
    joined = asyncio.Event()

    def waits(published: int) -> bool:
        if published == missed:
            joined.set()
        first = published == 0 and not sender.asked_by(names[:3])
        return first or (published == missed and not sender.asked_by(["late"]))

    sender.waits = waits
    waking = asyncio.create_task(sender.keep_awake())
    async with together(living(site, parent), waking, *(receiving(site, name, layout) for name in names[:3])):
        await until(lambda: len(parent.samples) == 3)
        playing = asyncio.create_task(play(parent, row))
        await joined.wait()
        async with together(receiving(site, "late", layout)):
            assert_exact(await playing, row, names)
    assert sender.streams == {topics.ALL: chunks, "late": missed}
    assert sorted(p.index for p in sender.published if p.stream == "late") == list(range(missed))
    assert [p.index for p in sender.published if p.stream == topics.ALL] == list(range(chunks))


# Hostile


class Attack:
    """Sixteen forged chunks after each true one, a thousand in all; counts those that must be refused."""

    def __init__(self, site: SimulatedSite, sender: Sender, row: Row, forge: Callable[..., Any]) -> None:
        self._site, self._sender, self._row = site, sender, row
        self._forged = forge(PARENT, streams=[topics.ALL, "device-0", "device-9"])
        self._draw = random.Random(1)
        self._task: Task | None = None
        self.made = self.refused = 0
        site.network.hooks.append(self._after)

    def _after(self, routed: Routed) -> None:
        topic = topics.parse(routed.topic)
        if isinstance(topic, topics.InboxTopic) and topic.node == "device-0":
            message = serialization.decode(routed.body)[1]
            self._task = message if isinstance(message, Task) else self._task
            return
        numbers = {p.number for p in self._sender.published}
        if self._task is not None and isinstance(topic, topics.ChunkTopic) and topic.number in numbers:
            self._site.loop.call_soon(self._forge, self._task)

    def _forge(self, task: Task) -> None:
        manifest = task.model
        for kind in self._draw.choices(self._forged.kinds, k=min(17, 1000 - self.made)):
            known = [(p.stream, p.index, p.number) for p in self._sender.published]
            it = self._forged(self._draw, kind, manifest, self._row.data, published=known)
            self.made += 1
            ours = it.owner == PARENT and it.blob == manifest.blob and it.stream in (topics.ALL, "device-0")
            sound = it.index < manifest.chunks and it.data == self._row.data[manifest.span(it.index)]
            self.refused += ours and not sound
            self._site.inject(topics.chunk(LAB, RUN, it.owner, it.stream, it.blob, it.index, it.number), it.data)


@virtual
async def test_a_thousand_hostile_chunks_spoil_nothing(site: SimulatedSite, forge: Callable[..., Any]) -> None:
    """The sender keeps the last true chunk back until all of them have arrived."""
    layout, chunks = layout_of(2_000_000), 62
    row = drawn(layout, 1)
    sender = Sender(site, ["device-0"], layout)
    attack = Attack(site, sender, row, forge)
    children: list[ChildEndpoint] = []

    def all_came() -> bool:
        return attack.made == 1000 and children[0].session.link.receiver.chunks_refused == attack.refused

    sender.waits = lambda published: published == chunks - 1 and not all_came()
    child = receiving(site, "device-0", layout, made=children.append)
    assert_exact(await sender.play(row), row, ["device-0"])
    await child
    assert attack.refused > 200
    assert children[0].session.link.receiver.chunks_refused >= attack.refused
    assert len(sender.published) <= 2 * chunks
