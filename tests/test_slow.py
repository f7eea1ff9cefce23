"""Slow receivers on a real mosquitto: what a transfer costs and who waits for whom."""

from __future__ import annotations

import asyncio
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

from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import ConnectionFailed
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.model.layout import LinkLayouts, ModelLayout, Row
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.protocol import topics
from fedstrata.common.protocol.messages import Task
from fedstrata.common.protocol.sender import Publication
from fedstrata.common.runtime.link_models import Arriving
from fedstrata.common.runtime.round import ClosedRound, Report, WorkResult
from fedstrata.common.settings.closing import Closing
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.brokers.broker import BrokerProcess
from tests.bench.running import peak_bytes
from tests.helpers.nodes import FINE, child_of, drawn, layout_of, living, parent_of, play
from tests.helpers.sites import PATIENCE_S, RealSite, in_real_time

PARENT = "parent"
MOSQUITTOS_DEFAULTS = {
    "max_queued_messages": 1000,
    "max_inflight_messages": 20,
    "max_queued_bytes": 0,
}


@contextmanager
def mosquitto(
    directory: Path, settings: Mapping[str, int] | None = None
) -> Iterator[BrokerProcess]:
    try:
        served = broker.start(directory=directory, kind="mosquitto", settings=settings)
    except ConnectionFailed as error:
        pytest.skip(str(error))
    with served:
        yield served


def site_at(served: BrokerProcess) -> RealSite:
    return RealSite(BrokerAddress(served.host, served.port))


class Sender:
    """A parent that plays one round; it begins when all have asked, and notes what it publishes."""

    def __init__(
        self,
        served: BrokerProcess,
        names: Sequence[str],
        layout: ModelLayout,
        *,
        transfer: TransferSettings,
    ) -> None:
        self._site, self._names = site_at(served), names
        self.parent = parent_of(self._site, names, layout=layout, name=PARENT, transfer=transfer)
        self.published: list[Publication] = []
        self._publish = self.parent.session.link.sender.next_publication
        self.parent.session.link.sender.next_publication = self._noted  # type: ignore[method-assign]

    async def play(self, row: Row) -> ClosedRound:
        """Play the round from beginning to end, and end the run."""

        async def work() -> ClosedRound:
            await self.parent.gather(Closing())
            return await play(self.parent, row)

        async def keep_awake() -> None:
            while True:  # what it waits for happens elsewhere
                self.parent.wake()
                await asyncio.sleep(0.005)

        waking = asyncio.create_task(keep_awake())
        try:
            played: ClosedRound = await living(self._site, self.parent, work=work())
            return played
        finally:
            waking.cancel()

    @property
    def streams(self) -> Counter[str]:
        """Return how many chunks went on each stream."""
        return Counter(publication.stream for publication in self.published)

    def _noted(self, now: float, ready: Callable[[Iterable[str]], bool]) -> Publication | None:
        sender = self.parent.session.link.sender
        if not self.published and not all(sender.serving(name) for name in self._names):
            return None
        publication = self._publish(now, ready)
        if publication is not None:
            self.published.append(publication)
        return publication


def receiving(
    served: BrokerProcess,
    name: str,
    layout: ModelLayout,
    *,
    got: Callable[[], object] = lambda: None,
    per_chunk: Callable[[], object] = lambda: None,
    transfer: TransferSettings,
) -> asyncio.Task[Any]:
    """Serve until the run is over: return each model as it is, having called `got`, and `per_chunk`
    for each chunk.
    """
    site = site_at(served)
    child = child_of(site, name, parent=PARENT, transfer=transfer)
    out = layout.empty()
    receive = child.session.link.receiver.receive_chunk

    def slowly(*what: Any, **more: Any) -> bool:
        per_chunk()
        return receive(*what, **more)

    async def work(task: Task, model: Arriving, report: Report) -> WorkResult:
        np.copyto(out, await model.whole())
        got()
        return WorkResult(out.data, Work(1, 0.5, 1, 1, 0.0, 0.0))

    child.session.link.receiver.receive_chunk = slowly  # type: ignore[method-assign]
    return living(site, child, work=child.serve(LinkLayouts.plain(layout), work))


async def race(
    served: BrokerProcess,
    layout: ModelLayout,
    *,
    fast: Mapping[str, Callable[[], object]],
    slow: Sequence[str],
    per_chunk: Callable[[], object],
    fast_per_chunk: Callable[[], object] = lambda: None,
    transfer: TransferSettings = FINE,
) -> Sender:
    """Play a round in which all get the model; `fast` have a function that is called once they have
    it.

    Each slow one is on a loop of its own and calls `per_chunk` for each chunk.
    """
    row, names = drawn(layout, 1), [*fast, *slow]
    sender = Sender(served, names, layout, transfer=transfer)

    async def receive(name: str) -> None:
        await receiving(served, name, layout, per_chunk=per_chunk, transfer=transfer)

    with ThreadPoolExecutor(len(slow)) as threads:
        apart = [threads.submit(lambda name=name: asyncio.run(receive(name))) for name in slow]
        here = [
            receiving(served, name, layout, got=got, per_chunk=fast_per_chunk, transfer=transfer)
            for name, got in fast.items()
        ]
        played = await sender.play(row)
        await asyncio.gather(*here, *map(asyncio.wrap_future, apart))
    assert tuple(played.models) == tuple(names)
    assert all(np.array_equal(upload, row) for upload in played.models.values())
    return sender


@pytest.mark.parametrize(
    ("settings", "nbytes"),
    [
        pytest.param(MOSQUITTOS_DEFAULTS, 50_000_000, id="defaults", marks=pytest.mark.slow),
        pytest.param({"max_queued_messages": 50}, 20_000_000, id="queue of 50"),
    ],
)
@in_real_time
async def test_what_a_broker_drops_for_a_slow_subscriber_is_sent_once_more(
    settings: Mapping[str, int], nbytes: int, tmp_path: Path
) -> None:
    """1 ms for a message, and none is read before another receiver has all: more than queue and
    sockets hold.
    """
    chunks, fast_has_it = -(-nbytes // FINE.chunk_bytes), threading.Event()

    def slowly() -> None:
        fast_has_it.wait(PATIENCE_S)
        time.sleep(0.001)

    with mosquitto(tmp_path, settings) as served:
        sender = await race(
            served,
            layout_of(nbytes),
            fast={"fast": fast_has_it.set},
            slow=["slow"],
            per_chunk=slowly,
        )
        again = sender.streams["slow"]
        assert sender.streams == {topics.ALL: chunks, "slow": again}
        assert again == sender.parent.session.link.sender.chunks_repeated
        assert 0 < again < chunks  # nothing twice, and by far not all
        assert len({p.index for p in sender.published if p.stream == "slow"}) == again
        assert "being dropped for client slow" in served.log.read_text()


@in_real_time
async def test_a_receiver_names_a_broker_that_drops_what_it_reads_slowly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mosquitto(tmp_path, {"max_queued_messages": 10}) as served:
        await race(
            served,
            layout_of(40_000_000),
            fast={"fast": lambda: None},
            slow=["slow"],
            per_chunk=partial(time.sleep, 0.06),
            # The broadcast goes on while the slow one lags, else it has no gap to see.
            fast_per_chunk=partial(time.sleep, 0.012),
            transfer=TransferSettings(chunk_bytes=250_000),
        )
        assert "being dropped for client slow" in served.log.read_text()
        assert [m.partition(" drops")[0] for m in caplog.messages if "chunks were lost" in m] == [
            f"slow: broker 127.0.0.1:{served.port}"
        ]


@in_real_time
async def test_six_fast_receivers_do_not_wait_for_four_that_read_nothing(tmp_path: Path) -> None:
    nbytes, transfer = 14_000_000, TransferSettings(chunk_bytes=500_000)
    left, go_on = {f"fast-{i}" for i in range(6)}, threading.Event()
    slow = [f"slow-{i}" for i in range(4)]

    def fast_has_it(name: str) -> None:
        left.discard(name)
        if not left:
            go_on.set()

    fast = {name: partial(fast_has_it, name) for name in sorted(left)}
    with mosquitto(tmp_path) as served:
        idle_bytes = peak_bytes(served.process.pid)  # with the libraries that it maps
        sender = await race(
            served,
            layout_of(nbytes),
            fast=fast,
            slow=slow,
            per_chunk=partial(go_on.wait, PATIENCE_S),
            transfer=transfer,
        )
        assert sender.streams == {topics.ALL: nbytes // 500_000}
        assert peak_bytes(served.process.pid) - idle_bytes <= 100e6 + len(slow) * nbytes
