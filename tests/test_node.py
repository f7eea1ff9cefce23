"""Parents and children on a real broker: hostile bytes, bad offers, double names, a broker that goes away."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiomqtt
import numpy as np
import numpy.typing as npt
import pytest

from common.errors import DuplicateName, NoProgress, RunFailed, WireError
from common.layout import ModelLayout, Row, Section
from common.links import Link
from common.net.link import BrokerAddress
from common.protocol import receiver as incoming
from common.protocol import serialization, topics
from common.protocol.identity import Claim, Identity
from common.protocol.manifest import describe
from common.protocol.messages import (
    Acknowledgement,
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
    Result,
    Task,
)
from common.protocol.sender import Publication
from common.protocol.traffic import Traffic, Wire
from common.runtime.arriving import Arriving
from common.runtime.child_endpoint import ChildEndpoint
from common.runtime.endpoint import Endpoint
from common.runtime.lifecycle import live
from common.runtime.parent_endpoint import ParentEndpoint
from common.runtime.round import Round
from common.runtime.work import Answer, Report
from common.runtime.world import new_session
from common.spec import PLAIN, Closing, Codecs, Transfer
from common.storage.spool import Spool
from common.wire.codecs import codec_of
from deploy import broker
from deploy.broker import Broker, Kind

LAB = "lab"
RUN = "run-1"
PARENT = "institution-0"
PATIENCE_S = 30.0
MANY = 2**63 - 1
EVERYTHING = Traffic(*[MANY] * 8, Wire(*[MANY] * 11))

Change = Callable[[Result], Result]
Facts = tuple[str, dict[str, object]]


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Return a broker of the test's own: what an earlier test left retained would speak for these nodes."""
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
    while not condition():  # noqa: ASYNC110 - nothing tells us
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
    links: Mapping[str, Link] | None = None,
    shaped: bool = True,
    codecs: Codecs = PLAIN,
    spool: Spool | None = None,
    observed: list[Facts] | None = None,
) -> ParentEndpoint:
    seen = [] if observed is None else observed
    face = ParentEndpoint(
        address,
        Identity(run, name, "institution", new_session()),
        links=links or dict.fromkeys(children, link or Link()),
        transfer=transfer or Transfer(),
        shaped=shaped,
        codecs=codecs,
        spool=spool,
        observe=lambda event, facts: seen.append((event, facts)),
    )
    face.set_layout(layout)
    face.endpoint.set_state(NodeState.READY)
    return face


def child_of(
    address: BrokerAddress,
    name: str,
    *,
    parent: str = PARENT,
    transfer: Transfer | None = None,
    link: Link | None = None,
    shaped: bool = True,
    codecs: Codecs = PLAIN,
    spool: Spool | None = None,
) -> ChildEndpoint:
    identity = Identity(RUN, name, "device", new_session())
    face = ChildEndpoint(
        address,
        identity,
        parent=parent,
        transfer=transfer or Transfer(),
        link=link or Link(),
        shaped=shaped,
        codecs=codecs,
        spool=spool,
    )
    face.endpoint.set_state(NodeState.READY, samples=1)
    return face


async def nothing() -> None:
    pass


def living(endpoints: list[Endpoint], work: Coroutine[Any, Any, Any] | None = None) -> asyncio.Task[Any]:
    """Connect endpoints and keep them while `work` runs, or until cancelled."""
    work = work or asyncio.Event().wait()
    return asyncio.create_task(live(endpoints, work, connect_timeout_s=PATIENCE_S, goodbye=nothing))


def serving(
    face: ChildEndpoint, layout: ModelLayout, place: int, before: Callable[[], Awaitable[object]] = nothing
) -> asyncio.Task[Any]:
    """Let a child serve: it waits for `before`, then adds 1 + place to each number."""
    out = layout.empty()

    async def work(task: Task, model: Arriving, report: Report) -> Answer:
        row = await model.whole()
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


def play(
    face: ParentEndpoint, row: Row, *, iteration: int = 0, closing: Closing | None = None
) -> Coroutine[Any, Any, Round]:
    return face.round(
        iteration=iteration,
        round_=0,
        models=dict.fromkeys(face.peers, row),
        epochs=dict.fromkeys(face.peers, 1),
        closing=closing or Closing(),
    )


def assert_models(played: Round, row: Row, *, layout: ModelLayout, places: Mapping[str, int]) -> None:
    assert set(played.models) == set(places)
    for name, upload in played.models.items():
        np.testing.assert_array_equal(layout.floats(upload), changed(layout, row, places[name]), err_msg=name)


# Any bytes on any topic


def rubbish(draw: random.Random) -> list[bytes]:
    """Return bytes that are no message: random ones, cut ones, deep ones, wrong versions, kinds, fields."""
    whole = serialization.encode(Ask("0" * 16, b"\xff", 1, 1, 8, False), "s")
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
    result = Result(key, huge, None, MANY, float("nan"), 1, 1, 1, 0.0, 0.0, 0.0, (), "[")
    progress = Progress(key, Phase.TRAINING, MANY, MANY, EVERYTHING, EVERYTHING)
    return [
        Task(key, MANY, huge, b"x"), result, progress, Acknowledgement(key, "no"), Gone("f" * 16),
        Farewell(Traffic(), Traffic()), Presence(NodeState.LOST, "device"),
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
            await client.subscribe(f"fs1/{LAB}/{RUN}/+/inbox/+")
            listening = asyncio.create_task(self._listen(client))
            try:
                for cycle in itertools.count():
                    for topic, body, retain in self._cycle(random.Random(cycle)):
                        await client.publish(topic, body, retain=retain, timeout=math.inf)
                    # The last one by QoS 1, so that all were with the broker before the cycle counts.
                    await client.publish(f"fs1/{LAB}/{RUN}/intruder/state", b"\x00", qos=1, timeout=math.inf)
                    self.cycles += 1
                    self.cycled.set()
            finally:
                listening.cancel()
                await asyncio.wait((listening,))

    async def _listen(self, client: aiomqtt.Client) -> None:
        async for message in client.messages:
            topic = topics.parse(message.topic.value)
            try:
                said = serialization.decode(bytes(message.payload))[1]
            except WireError:
                continue
            if isinstance(topic, topics.InboxTopic) and isinstance(said, (Task, Result)):
                self._blobs.get(topic.sender, set()).add(said.model.blob)

    def _cycle(self, draw: random.Random) -> Iterator[tuple[str, bytes, bool]]:
        for node in self._names:
            for body in [*rubbish(draw), b""]:
                yield topics.state(LAB, RUN, node), body, draw.random() < 0.5
                yield topics.spec(LAB, RUN, node), body, draw.random() < 0.5
            yield from self._inbox(node, draw)
            yield from self._lanes(node, draw)

    def _inbox(self, node: str, draw: random.Random) -> Iterator[tuple[str, bytes, bool]]:
        for sender in [*self._names, "intruder"]:
            if sender == node:
                continue
            for body in [*rubbish(draw), b""]:
                yield topics.inbox(LAB, RUN, node, sender), body, draw.random() < 0.2
            for message in misfits(draw, sorted(self._blobs[node])):
                yield topics.inbox(LAB, RUN, node, sender), serialization.encode(message, "intruder"), False
        for message in strangers(self._layout):
            yield topics.inbox(LAB, RUN, node, "intruder"), serialization.encode(message, "intruder"), False
            # What a child says is none of a child's business, and the other way round.
            wrong = (Task, Acknowledgement, Presence) if node == PARENT else (Result, Progress, Farewell, Presence)
            if isinstance(message, wrong):
                for sender in self._names:
                    yield topics.inbox(LAB, RUN, node, sender), serialization.encode(message, "intruder"), False

    def _lanes(self, node: str, draw: random.Random) -> Iterator[tuple[str, bytes, bool]]:
        foreign = f"{draw.getrandbits(64):016x}"
        for blob in [*self._blobs[node], foreign]:
            for lane in (topics.ALL, *self._names):
                yield topics.chunk(LAB, RUN, node, lane, blob, 999_999_999, 10**17), draw.randbytes(50), False
                yield f"fs1/{LAB}/{RUN}/{node}/blob/{lane}/{blob}/-1/x", draw.randbytes(50), False
                yield f"fs1/{LAB}/{RUN}/{node}/blob/{lane}/{blob}/{'9' * 30}/1", b"", False
            if blob not in self._damaged:  # one that hits: it must be asked for again
                self._damaged.add(blob)
                yield topics.chunk(LAB, RUN, node, topics.ALL, blob, 3, 10**17), draw.randbytes(50), False


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


# Offers that cannot be used


def lies(layout: ModelLayout) -> dict[str, tuple[Change, str]]:
    """Return what a child may do to its result, and the word by which its refusal must tell it."""
    huge = describe(memoryview(bytes(4_000_000)), chunk_bytes=1024, codec="fp32", layout=layout.digest)

    def model(**fields: Any) -> Change:
        return lambda result: replace(result, inline=None, model=replace(result.model, **fields))

    def other_bits(data: bytes) -> bytes:
        return bytes(byte ^ 0xFF for byte in data)

    return {
        "huge": (lambda result: replace(result, inline=None, model=huge), "4000000 bytes"),
        "digest": (lambda result: model(digests=other_bits(result.model.digests))(result), "wrong digest"),
        "inline": (lambda result: replace(result, inline=other_bits(result.inline or b"")), "wrong digest"),
        "short": (lambda result: replace(result, inline=(result.inline or b"")[:-4]), "wrong digest"),
        "layout": (model(layout="0123456789abcdef"), "wrong layout '0123456789abcdef'"),
        "codec": (model(codec="zip"), "codec 'zip'"),
        "against": (model(reference="0123456789abcdef"), "against model '0123456789abcdef'"),
        "loss": (lambda result: replace(result, loss=float("nan")), "loss is nan"),
        "samples": (lambda result: replace(result, samples=MANY), f"{MANY} samples"),
        "steps": (lambda result: replace(result, steps=MANY), f"{MANY} steps"),
        "seconds": (lambda result: replace(result, train_s=float("inf")), "inf s of training"),
        "pause": (lambda result: replace(result, pause_s=float("nan")), "a pause of nan s"),
        "empty": (lambda result: replace(result, samples=0), "no samples"),
    }


def lying(face: ChildEndpoint, layout: ModelLayout, change: Change) -> asyncio.Task[Any]:
    """Let a child serve as the others do, and change its result."""
    honest = face.participant.finish
    face.participant.finish = lambda result, *, now: honest(change(result), now=now)  # type: ignore[method-assign]
    return serving(face, layout, 0)


def spoilt(face: ChildEndpoint, layout: ModelLayout, value: float) -> asyncio.Task[Any]:
    """Let a child serve a model with one entry that is no number."""
    out = layout.empty()

    async def work(task: Task, model: Arriving, report: Report) -> Answer:
        out[:] = await model.whole()
        layout.floats(out)[-1] = value
        return Answer(out, 1, 0.5, task.epochs, 1, 0.0, 0.0)

    return living([face.endpoint], face.serve(layout, work))


def test_offers_that_cannot_be_used_are_refused_with_a_reason(
    address: BrokerAddress, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        layout = layout_of(100_000)
        observed: list[Facts] = []
        words = {name: word for name, (_, word) in lies(layout).items()} | {"nan": "NaN or Inf", "inf": "NaN or Inf"}
        names = ["honest", *words]
        transfer = Transfer(chunk_bytes=32_768)
        parent = parent_of(address, names, layout=layout, transfer=transfer, observed=observed)
        faces = {name: child_of(address, name, transfer=transfer) for name in names}
        tasks = [lying(faces[name], layout, change) for name, (change, _) in lies(layout).items()]
        tasks += [spoilt(faces["nan"], layout, math.nan), spoilt(faces["inf"], layout, -math.inf)]
        async with together(living([parent.endpoint]), serving(faces["honest"], layout, 7), *tasks):
            row = drawn(layout, 1)
            with caplog.at_level(logging.WARNING, "fedstrata.parent"):
                played = await play(parent, row)
            assert_models(played, row, layout=layout, places={"honest": 7})
            assert set(played.refused) == set(words)
            assert played.missing == ()
            assert parent.refused_models == len(words)
            told = {str(facts["node"]): str(facts["reason"]) for event, facts in observed if event == "refused"}
            for name, word in words.items():
                assert word in played.refused[name], name
                assert told[name] == played.refused[name]
                assert any(name in line and word in line for line in caplog.messages), name
                await until(lambda name=name: faces[name].refusals)
                assert faces[name].refusals == [played.refused[name]]
            # The next round finds all of them ready again.
            second = await play(parent, row, iteration=1)
            assert set(second.refused) == set(words)

    monkeypatch.setattr(incoming, "SPOILT_S", 0.5)
    scenario(run())


def test_a_round_in_which_all_are_refused_fails_and_names_them(address: BrokerAddress) -> None:
    async def run() -> None:
        layout = layout_of(4000)
        names = ["device-0", "device-1"]
        parent = parent_of(address, names, layout=layout)
        tasks = [spoilt(child_of(address, name), layout, math.nan) for name in names]
        async with together(living([parent.endpoint]), *tasks):
            with pytest.raises(RunFailed, match=r"device-0's model was refused: .*NaN.*device-1's model was refused"):
                await play(parent, drawn(layout, 1))

    scenario(run())


def test_absurd_counts_of_bytes_do_not_travel_on(address: BrokerAddress) -> None:
    async def run() -> None:
        layout = layout_of(4000)
        names = ["device-0", "device-1", "device-2"]
        parent = parent_of(address, names, layout=layout)
        children = [child_of(address, name) for name in names]
        for child in children[1:]:
            child.below = lambda: EVERYTHING
        tasks = [serving(child, layout, place) for place, child in enumerate(children)]
        async with together(living([parent.endpoint]), *tasks):
            row = drawn(layout, 1)
            await play(parent, row)
            total = Farewell(parent.ledger.total(), parent.ledger.below())
            assert serialization.decode(serialization.encode(total, "s"))[1] == total

    scenario(run())


# Two nodes of one name


def test_the_sessions_that_a_name_challenges_are_bounded() -> None:
    claim = Claim()
    for number in range(100):
        claim.challenge(f"s{number}")
        claim.challenge(f"s{number}")
    assert list(claim.challenged) == [f"s{number}" for number in range(84, 100)]


def test_a_second_device_of_a_name_is_told_and_the_first_goes_on(address: BrokerAddress) -> None:
    async def run() -> None:
        layout = layout_of(400_000)
        names = ["device-0", "device-1"]
        parent = parent_of(address, names, layout=layout)
        training, go_on = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            training.set()
            await go_on.wait()

        tasks = [serving(child_of(address, name), layout, place, hold) for place, name in enumerate(names)]
        async with together(living([parent.endpoint]), *tasks):
            row = drawn(layout, 1)
            playing = asyncio.create_task(play(parent, row))
            await training.wait()
            for _ in range(3):
                second = serving(child_of(address, "device-0"), layout, 5)
                with pytest.raises(DuplicateName) as told:
                    await second
                assert "device-0" in str(told.value)
                assert str(address) in str(told.value)
                assert told.value.exit_code == 3
            go_on.set()
            played = await playing
            assert_models(played, row, layout=layout, places={"device-0": 0, "device-1": 1})

    scenario(run())


class Middle:
    """An institution as the protocol sees it: one name, a face upward and a face downward on one broker."""

    def __init__(
        self, address: BrokerAddress, layout: ModelLayout, *, children: list[str], codecs: Codecs = PLAIN
    ) -> None:
        self.identity = Identity(RUN, PARENT, "institution", new_session())
        self.layout = layout
        self.up = ChildEndpoint(address, self.identity, parent="cloud", transfer=Transfer(), link=Link(), codecs=codecs)
        links = dict.fromkeys(children, Link())
        self.down = ParentEndpoint(address, self.identity, links=links, transfer=Transfer(), codecs=codecs)
        self.down.set_layout(layout)
        for face in (self.up, self.down):
            face.endpoint.set_state(NodeState.READY)

    def live(self) -> asyncio.Task[Any]:
        return living([self.up.endpoint, self.down.endpoint], self.up.serve(self.layout, self._work))

    async def _work(self, task: Task, model: Arriving, report: Report) -> Answer:
        played = await play(self.down, model)
        return Answer(np.array(played.uploads.rows_K[0]), 1, 0.5, 1, 1, 0.0, 0.0)


async def half_a_transfer(arrived: Callable[[], int], tasks: list[asyncio.Task[Any]], row_bytes: int) -> None:
    """Wait for a third of a model, then end the tasks as a crash would: nobody says goodbye."""
    await until(lambda: arrived() > row_bytes // 3)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def test_a_parent_that_crashed_in_mid_upload_goes_on_with_what_its_files_hold(
    address: BrokerAddress, tmp_path: Path
) -> None:
    async def run() -> None:
        layout, fine, link = layout_of(2_000_000), Transfer(chunk_bytes=32_768), Link(up_mbit=32.0)
        row, trained = drawn(layout, 1), []

        def parent() -> ParentEndpoint:
            files = Spool.open(tmp_path, run=RUN, node=PARENT)
            return parent_of(address, ["device-0"], layout=layout, transfer=fine, link=link, spool=files)

        async def count() -> None:
            trained.append(True)

        first, child = parent(), child_of(address, "device-0", transfer=fine, link=link)
        async with together(serving(child, layout, 0, count)):
            tasks = [living([first.endpoint]), asyncio.create_task(play(first, row))]
            received = first.endpoint.account
            await half_a_transfer(lambda: received.traffic("device-0").received_model_payload, tasks, layout.row_bytes)
            kept = received.traffic("device-0").received_model_payload
            second = parent()
            async with together(living([second.endpoint])):
                assert_models(await play(second, row), row, layout=layout, places={"device-0": 0})
            rest = second.endpoint.account.traffic("device-0").received_model_payload
            assert trained == [True] and kept + rest <= layout.row_bytes + fine.window * fine.chunk_bytes

    scenario(run())


def test_a_child_that_crashed_in_mid_fetch_goes_on_with_what_its_file_holds(
    address: BrokerAddress, tmp_path: Path
) -> None:
    async def run() -> None:
        layout, fine, link = layout_of(2_000_000), Transfer(chunk_bytes=32_768), Link(down_mbit=32.0)

        def child() -> ChildEndpoint:
            files = Spool.open(tmp_path, run=RUN, node="device-0")
            return child_of(address, "device-0", transfer=fine, link=link, spool=files)

        def got(face: ChildEndpoint) -> int:
            return face.endpoint.account.traffic(PARENT).received_model_payload

        parent, first = parent_of(address, ["device-0"], layout=layout, transfer=fine, link=link), child()
        async with together(living([parent.endpoint])):
            row = drawn(layout, 1)
            playing = asyncio.create_task(play(parent, row))
            await half_a_transfer(lambda: got(first), [serving(first, layout, 0)], layout.row_bytes)
            second = child()
            async with together(serving(second, layout, 0)):
                assert_models(await playing, row, layout=layout, places={"device-0": 0})
            assert got(first) + got(second) <= layout.row_bytes + fine.window * fine.chunk_bytes

    scenario(run())


def test_uploads_beyond_the_resident_budget_give_the_same_models(address: BrokerAddress, tmp_path: Path) -> None:
    async def run() -> None:
        layout, names = layout_of(400_000), [f"device-{i}" for i in range(6)]
        files = Spool.open(tmp_path, run=RUN, node=PARENT)
        parent = parent_of(address, names, layout=layout, transfer=Transfer(resident_mb=1.0), spool=files)
        tasks = [serving(child_of(address, name), layout, place) for place, name in enumerate(names)]
        async with together(living([parent.endpoint]), *tasks):
            row = drawn(layout, 1)
            played = await play(parent, row)
            played.uploads.release()
            assert_models(played, row, layout=layout, places={name: place for place, name in enumerate(names)})

    scenario(run())


def test_devices_get_chunks_before_their_institution_has_the_model(address: BrokerAddress) -> None:
    """Cut-through: the cloud sends no second half until a device has chunks of the first one."""

    async def run() -> None:
        layout = layout_of(2_000_000)
        fine = Transfer(chunk_bytes=32_768)
        cloud = parent_of(address, [PARENT], layout=layout, name="cloud", transfer=fine)
        middle = Middle(address, layout, children=["device-0", "device-1"])
        devices = [child_of(address, f"device-{i}") for i in range(2)]
        publish, sent = cloud.endpoint.outgoing.next_publication, 0

        def got_some(device: ChildEndpoint) -> bool:
            return device.endpoint.account.traffic(PARENT).received_model_payload > 0

        def held_back(now: float, ready: Callable[[Iterable[str]], bool]) -> Publication | None:
            nonlocal sent
            if sent >= 30 and not all(got_some(device) for device in devices):
                return None
            publication = publish(now, ready)
            sent += publication is not None
            return publication

        cloud.endpoint.outgoing.next_publication = held_back  # type: ignore[method-assign]
        works = [serving(device, layout, place) for place, device in enumerate(devices)]
        async with together(living([cloud.endpoint]), middle.live(), *works):
            row = drawn(layout, 1)
            playing = asyncio.create_task(play(cloud, row))
            while not playing.done():
                cloud.endpoint.wake()  # what it waits for happens on other connections
                await asyncio.sleep(0.01)
            assert_models(await playing, row, layout=layout, places={PARENT: 0})
        assert middle.down.endpoint.outgoing.chunks_repeated == 0

    scenario(run())


def test_a_model_that_fails_on_its_way_ends_the_round_below_and_is_wished_again(
    address: BrokerAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        layout = layout_of(2_000_000)
        cloud = parent_of(address, [PARENT], layout=layout, name="cloud", transfer=Transfer(chunk_bytes=32_768))
        middle = Middle(address, layout, children=["device-0"])
        device = child_of(address, "device-0")
        receive = middle.up.endpoint.incoming.receive_chunk

        def damage(owner: str, blob: str, **how: Any) -> bool:
            if how["index"] >= 20 and not middle.up.refusals:
                how["data"] = bytes(len(how["data"]))
            return receive(owner, blob, **how)

        middle.up.endpoint.incoming.receive_chunk = damage  # type: ignore[method-assign]
        async with together(living([cloud.endpoint]), middle.live(), serving(device, layout, 0)):
            row = drawn(layout, 1)
            assert_models(await play(cloud, row), row, layout=layout, places={PARENT: 0})
        assert any("damaged" in reason for reason in middle.up.refusals)

    monkeypatch.setattr(incoming, "SPOILT_S", 0.5)
    scenario(run())


def test_a_second_institution_of_a_name_harms_neither_cloud_nor_devices(address: BrokerAddress) -> None:
    async def run() -> None:
        layout = layout_of(400_000)
        cloud = parent_of(address, [PARENT], layout=layout, name="cloud")
        training, go_on = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            training.set()
            await go_on.wait()

        device = serving(child_of(address, "device-0"), layout, 3, hold)
        first = Middle(address, layout, children=["device-0"])
        async with together(living([cloud.endpoint]), first.live(), device):
            row = drawn(layout, 1)
            playing = asyncio.create_task(play(cloud, row))
            await training.wait()
            for _ in range(10):
                with pytest.raises(DuplicateName, match=PARENT):
                    await Middle(address, layout, children=["device-0"]).live()
            go_on.set()
            assert_models(await playing, row, layout=layout, places={PARENT: 3})

    scenario(run())


def test_a_second_cloud_is_told_even_with_a_run_of_its_own(address: BrokerAddress) -> None:
    async def run() -> None:
        layout = layout_of(4000)
        first = parent_of(address, ["device-0"], layout=layout, name="cloud")
        async with together(
            living([first.endpoint]), serving(child_of(address, "device-0", parent="cloud"), layout, 2)
        ):
            row = drawn(layout, 1)
            await play(first, row)
            second = parent_of(address, ["device-0"], layout=layout, name="cloud", run="run-2")
            with pytest.raises(DuplicateName, match=rf"cloud is already alive on broker {address}.*run"):
                await living([second.endpoint])
            assert_models(await play(first, row, iteration=1), row, layout=layout, places={"device-0": 2})

    scenario(run())


@pytest.mark.parametrize("role", ["device", "institution"])
def test_of_two_that_start_at_once_exactly_one_goes_on(address: BrokerAddress, role: str) -> None:
    def start(layout: ModelLayout) -> asyncio.Task[Any]:
        if role == "device":
            return serving(child_of(address, "device-7"), layout, 0)
        return Middle(address, layout, children=["device-0"]).live()

    async def run() -> None:
        layout = layout_of(4000)
        for _ in range(20):
            contest = {start(layout) for _ in range(2)}
            done, left = await asyncio.wait(contest, return_when=asyncio.FIRST_COMPLETED)
            loser = done.pop()
            assert isinstance(loser.exception(), DuplicateName)
            assert left, "both gave up"
            # The winner is told nothing: a newcomer hears from it, so it has had its chance.
            with pytest.raises(DuplicateName):
                await start(layout)
            (winner,) = left
            assert not winner.done(), winner
            winner.cancel()
            await asyncio.wait(left)

    scenario(run())


def test_who_lost_a_name_leaves_no_last_word_that_ends_the_other(address: BrokerAddress, tmp_path: Path) -> None:
    # The institution's devices are on a broker of their own; only on the cloud's is its double alive.
    async def run(site: BrokerAddress) -> None:
        layout = layout_of(4000)
        said: list[NodeState] = []
        first = child_of(address, PARENT, parent="cloud")
        async with together(serving(first, layout, 0), asyncio.create_task(_hear(site, PARENT, said))):
            identity = Identity(RUN, PARENT, "institution", new_session())
            up = ChildEndpoint(address, identity, parent="cloud", transfer=Transfer(), link=Link())
            down = ParentEndpoint(site, identity, links={"device-0": Link()}, transfer=Transfer())
            starting = living([down.endpoint])
            await until(lambda: said)
            starting.cancel()
            await asyncio.wait((starting,))
            said.clear()
            with pytest.raises(DuplicateName):
                await living([up.endpoint, down.endpoint])
            await until(lambda: NodeState.LOST in said)
            assert NodeState.FAILED not in said

    with broker.start(directory=tmp_path) as site:
        scenario(run(BrokerAddress(site.host, site.port)))


async def _hear(site: BrokerAddress, name: str, said: list[NodeState]) -> None:
    async with aiomqtt.Client(site.host, site.port) as client:
        await client.subscribe(topics.state(LAB, RUN, name), qos=1)
        async for message in client.messages:
            presence = serialization.decode(bytes(message.payload))[1]
            assert isinstance(presence, Presence)
            said.append(presence.state)


# Models in other forms


def as_received(codec: str, layout: ModelLayout, row: Row, reference: Row) -> Row:
    """Return what arrives of a row."""
    got = layout.empty()
    form = codec_of(codec)
    if form.is_row:
        return row
    form.decode(layout, form.encode(layout, row, reference=reference), got, reference=reference)
    return got


def assert_coded(
    models: Mapping[str, Row], row: Row, *, layout: ModelLayout, places: Mapping[str, int], codecs: Codecs
) -> None:
    """Assert that each child changed the model as it came down, and that its answer came up as its codec makes it."""
    held = as_received(codecs.down, layout, row, row)
    assert set(models) == set(places)
    for name, upload in models.items():
        answer = layout.empty()
        layout.floats(answer)[:] = changed(layout, held, places[name])
        assert upload.tobytes() == as_received(codecs.up, layout, answer, held).tobytes(), name


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "chunks"])
@pytest.mark.parametrize(
    ("down", "up"),
    [
        ("fp32", "delta+fp32+zstd"), ("fp16", "delta+int8"), ("bf16+zstd", "delta+fp16+zstd"), ("int8", "int8+zstd"),
        ("fp32+zstd", "delta+bf16"),
    ],
)  # fmt: skip
def test_models_come_as_their_codecs_make_them(address: BrokerAddress, down: str, up: str, inline: bool) -> None:
    async def run() -> None:
        layout, codecs = layout_of(200_000), Codecs(up=up, down=down)
        transfer = Transfer(chunk_bytes=32_768, inline_bytes=262_144 if inline else 0)
        places = {"device-0": 0, "device-1": 1}
        parent = parent_of(address, list(places), layout=layout, transfer=transfer, codecs=codecs)
        children = [child_of(address, name, transfer=transfer, codecs=codecs) for name in places]
        works = [serving(child, layout, place) for place, child in enumerate(children)]
        async with together(living([parent.endpoint]), *works):
            for iteration in range(3):
                row = drawn(layout, iteration)
                played = await play(parent, row, iteration=iteration)
                assert_coded(played.models, row, layout=layout, places=places, codecs=codecs)
        assert parent.refused_models == 0

    scenario(run())


def test_children_with_models_of_their_own_answer_with_deltas_to_those(address: BrokerAddress) -> None:
    async def run() -> None:
        layout, codecs = layout_of(40_000), Codecs(up="delta+int8", down="fp16")
        names = ["device-0", "device-1", "device-2"]
        parent = parent_of(address, names, layout=layout, codecs=codecs)
        works = [serving(child_of(address, name, codecs=codecs), layout, 0) for name in names]
        async with together(living([parent.endpoint]), *works):
            for iteration in range(2):
                rows = [drawn(layout, 10 * iteration + seed) for seed in (1, 2)]
                models = dict(zip(names, [rows[0], rows[1], rows[0]], strict=True))
                played = await parent.round(
                    iteration=iteration, round_=0, models=models, epochs=dict.fromkeys(names, 1), closing=Closing()
                )
                for name in names:
                    alone = {name: played.models[name]}
                    assert_coded(alone, models[name], layout=layout, places={name: 0}, codecs=codecs)

    scenario(run())


@pytest.mark.parametrize("down", ["fp16", "int8+zstd"])
def test_a_coded_model_is_passed_on_as_it_comes(address: BrokerAddress, down: str) -> None:
    async def run() -> None:
        layout, codecs = layout_of(2_000_000), Codecs(up="delta+bf16", down=down)
        fine = Transfer(chunk_bytes=32_768)
        cloud = parent_of(address, [PARENT], layout=layout, name="cloud", transfer=fine, codecs=codecs)
        middle = Middle(address, layout, children=["device-0"], codecs=codecs)
        device = serving(child_of(address, "device-0", codecs=codecs), layout, 0)
        async with together(living([cloud.endpoint]), middle.live(), device):
            row = drawn(layout, 1)
            played = await play(cloud, row)
        held = as_received(down, layout, row, row)
        answer = layout.empty()
        layout.floats(answer)[:] = changed(layout, held, 0)
        for _ in range(2):  # from the device to the institution, from there to the cloud
            answer = as_received("delta+bf16", layout, answer, held)
        assert played.uploads.rows_K[0].tobytes() == answer.tobytes()

    scenario(run())


def test_what_a_form_cannot_hold_is_refused_by_name_and_the_round_goes_on(address: BrokerAddress) -> None:
    async def run() -> None:
        layout, codecs = layout_of(4000), Codecs(up="fp16")
        names = ["honest", "large"]
        parent = parent_of(address, names, layout=layout, codecs=codecs)
        faces = [child_of(address, name, codecs=codecs) for name in names]
        async with together(
            living([parent.endpoint]), serving(faces[0], layout, 0), spoilt(faces[1], layout, 65_520.0)
        ):
            row = drawn(layout, 1)
            played = await play(parent, row)
            assert_coded(played.models, row, layout=layout, places={"honest": 0}, codecs=codecs)
            assert played.refused == {"large": "entry weight holds NaN or Inf (it came as fp16)"}

    scenario(run())


@pytest.mark.parametrize("up", ["fp32", "delta+int8"])
def test_a_parent_whose_model_a_form_cannot_hold_fails_and_says_so(address: BrokerAddress, up: str) -> None:
    async def run() -> None:
        layout, codecs = layout_of(4000), Codecs(up=up, down="fp16")
        parent = parent_of(address, ["device-0"], layout=layout, codecs=codecs)
        child = serving(child_of(address, "device-0", codecs=codecs), layout, 0)
        row = drawn(layout, 1)
        layout.floats(row)[3] = 70_000
        says = r"entry weight holds NaN or Inf \(it came as fp16\)"
        parenting = living([parent.endpoint])
        playing = asyncio.create_task(play(parent, row))
        if up == "fp32":  # nobody but the child looks at what becomes of it
            with pytest.raises(RunFailed, match=f"institution-0's model cannot be used: {says}"):
                await child
        else:
            with pytest.raises(RunFailed, match=f"the model cannot be sent: {says}"):
                await playing
        for task in (playing, child, parenting):
            task.cancel()
        await asyncio.wait((playing, child, parenting))

    scenario(run())


def test_a_delta_to_another_model_is_refused(address: BrokerAddress) -> None:
    async def run() -> None:
        layout, codecs = layout_of(4000), Codecs(up="delta+bf16")
        names = ["honest", "elsewhere", "nowhere"]
        parent = parent_of(address, names, layout=layout, codecs=codecs)
        faces = [child_of(address, name, codecs=codecs) for name in names]

        def against(blob: str) -> Change:
            return lambda result: replace(result, model=replace(result.model, reference=blob))

        tasks = [lying(faces[1], layout, against("0" * 16)), lying(faces[2], layout, against(""))]
        async with together(living([parent.endpoint]), serving(faces[0], layout, 0), *tasks):
            played = await play(parent, drawn(layout, 1))
            assert list(played.models) == ["honest"]
            blob = played.results["honest"].model.reference
            assert played.refused == {
                "elsewhere": f"it is against model '0000000000000000', not against '{blob}'",
                "nowhere": f"it is against model '', not against '{blob}'",
            }

    scenario(run())


# A broker that goes away


class Restarted:
    """A broker that can be killed and started again on its port."""

    def __init__(self, kind: Kind, directory: Path) -> None:
        self._kind = kind
        self._directory = directory
        self._served = broker.start(directory=directory, kind=kind)
        self.address = BrokerAddress(self._served.host, self._served.port)

    async def kill(self) -> None:
        self._served.process.kill()
        await asyncio.to_thread(self._served.stop)

    async def start(self) -> None:
        # From this thread: the broker lives as long as the thread that started it.
        self._served = broker.start(directory=self._directory, kind=self._kind, port=self._served.port)

    def close(self) -> None:
        self._served.stop()


@pytest.fixture
def breakable(kind: Kind, tmp_path: Path) -> Iterator[Restarted]:
    one = Restarted(kind, tmp_path)
    yield one
    one.close()


class Watched:
    """Notes each chunk that arrives at a node and each ask that it sends."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.arrived: dict[tuple[str, str], set[int]] = {}
        self.asks: list[tuple[tuple[str, str], set[int], set[int]]] = []
        self.chunks = self.restarts = 0
        self._chunk, self._send = endpoint.incoming.receive_chunk, endpoint.send
        endpoint.incoming.receive_chunk = self._receive  # type: ignore[method-assign]
        endpoint.send = self._ask  # type: ignore[method-assign]

    def of(self, owner: str) -> set[int]:
        """Return the chunks that arrived from an owner."""
        return set().union(*(indices for (name, _), indices in self.arrived.items() if name == owner))

    def _receive(self, owner: str, blob: str, *, index: int, **known: Any) -> bool:
        fresh = self._chunk(owner, blob, index=index, **known)
        if fresh:
            self.arrived.setdefault((owner, blob), set()).add(index)
            self.chunks += 1
        return fresh

    def _ask(self, peer: str, message: Message) -> None:
        if isinstance(message, Ask):
            lacking = set(np.flatnonzero(np.unpackbits(np.frombuffer(message.lacking, np.uint8))).tolist())
            here = self.arrived.get((peer, message.blob), set())
            self.asks.append(((peer, message.blob), lacking, set(here)))
            self.restarts += message.restart
        self._send(peer, message)


def test_a_broker_that_is_killed_in_mid_transfer_costs_no_chunk_that_had_arrived(breakable: Restarted) -> None:
    async def run() -> None:
        layout = layout_of(2_000_000)
        names = ["device-0", "device-1"]
        transfer, link = Transfer(chunk_bytes=32_768), Link(up_mbit=16.0, down_mbit=16.0)
        parent = parent_of(breakable.address, names, layout=layout, transfer=transfer, link=link)
        children = [child_of(breakable.address, name, transfer=transfer, link=link) for name in names]
        faces = [parent, *children]
        watched = [Watched(face.endpoint) for face in faces]
        chunks = -(-2_000_000 // 32_768)
        begun = [0, 0]

        def counted(place: int) -> Callable[[], Awaitable[None]]:
            async def begin() -> None:
                begun[place] += 1

            return begin

        async def break_when(receiver: Watched, transfers: int) -> None:
            await until(
                lambda: (
                    len(receiver.arrived) == transfers
                    and min(len(indices) for indices in receiver.arrived.values()) >= chunks // 2
                )
            )
            before = {key: set(indices) for key, indices in receiver.arrived.items()}
            assert all(len(indices) < chunks for indices in before.values()), "too late to break anything"
            await breakable.kill()
            await until(lambda: not any(face.endpoint.link.up for face in faces))
            receiver.asks.clear()
            await breakable.start()

        tasks = [serving(child, layout, place, counted(place)) for place, child in enumerate(children)]
        async with together(living([parent.endpoint]), *tasks):
            row = drawn(layout, 1)
            playing = asyncio.create_task(play(parent, row))
            await break_when(watched[1], 1)  # models on their way down
            await break_when(watched[0], 2)  # and on their way up
            played = await playing
            assert_models(played, row, layout=layout, places={"device-0": 0, "device-1": 1})
            assert begun == [1, 1], "a device trained twice"
            for one in watched:
                assert one.asks
                for key, lacking, here in one.asks:
                    assert not lacking & here, key
            assert all(face.endpoint.link.reconnects >= 2 for face in faces)
            again = await play(parent, row, iteration=1)
            assert_models(again, row, layout=layout, places={"device-0": 0, "device-1": 1})

    scenario(run())


def test_a_child_whose_connection_breaks_in_mid_upload_goes_on_where_it_was(address: BrokerAddress) -> None:
    async def run() -> None:
        layout = layout_of(2_000_000)
        names = ["device-0", "device-1"]
        transfer, link = Transfer(chunk_bytes=32_768), Link(up_mbit=16.0)
        parent = parent_of(address, names, layout=layout, transfer=transfer)
        children = [child_of(address, name, transfer=transfer, link=link) for name in names]
        watched = Watched(parent.endpoint)
        tasks = [serving(child, layout, place) for place, child in enumerate(children)]
        async with together(living([parent.endpoint]), *tasks):
            row = drawn(layout, 1)
            playing = asyncio.create_task(play(parent, row))
            for _ in range(2):
                goal = min(len(watched.of("device-0")) + 15, 60)  # of 62: a busy machine may bring many at once
                await until(lambda goal=goal: len(watched.of("device-0")) >= goal)
                breaks = children[0].endpoint.link.reconnects
                client = children[0].endpoint.link._client
                assert client is not None
                client._client.socket().shutdown(socket.SHUT_RDWR)
                await until(lambda breaks=breaks: children[0].endpoint.link.reconnects > breaks)
            played = await playing
            assert_models(played, row, layout=layout, places={"device-0": 0, "device-1": 1})
            for key, lacking, here in watched.asks:
                assert not lacking & here, key
            assert parent.endpoint.link.reconnects == 0

    scenario(run())


def test_chunks_that_a_child_has_in_its_last_model_or_in_its_answer_do_not_travel(address: BrokerAddress) -> None:
    """FedMR deals layers: some come back to the child that trained them, some it was given before."""

    async def run() -> None:
        layout, chunk = layout_of(20 * 32_768), 32_768
        transfer = Transfer(chunk_bytes=chunk, inline_bytes=0)
        names = ["device-0", "device-1"]
        parent = parent_of(address, names, layout=layout, transfer=transfer)
        children = [child_of(address, name, transfer=transfer) for name in names]
        watched = [Watched(child.endpoint) for child in children]
        async with together(living([parent.endpoint]), *(serving(child, layout, 0) for child in children)):
            first = drawn(layout, 1)
            answers = (await play(parent, first)).models
            dealt = {name: answers[name].copy() for name in names}
            dealt["device-0"][: 5 * chunk] = first[: 5 * chunk]  # it has these of the last model,
            dealt["device-0"][12 * chunk :] = drawn(layout, 2)[12 * chunk :]  # these not, and the rest it made
            before = [one.chunks for one in watched]
            played = await parent.round(
                iteration=1, round_=0, models=dealt, epochs=dict.fromkeys(names, 1), closing=Closing()
            )
            assert [one.chunks - begun for one, begun in zip(watched, before, strict=True)] == [8, 0]
            for name in names:
                np.testing.assert_array_equal(layout.floats(played.models[name]), changed(layout, dealt[name], 0))

    scenario(run())


def test_no_name_is_contested_after_a_broker_was_restarted(breakable: Restarted) -> None:
    async def run() -> None:
        layout = layout_of(4000)
        cloud = parent_of(breakable.address, [PARENT], layout=layout, name="cloud")
        middle = Middle(breakable.address, layout, children=["device-0"])
        device = child_of(breakable.address, "device-0")
        endpoints = [cloud.endpoint, middle.up.endpoint, middle.down.endpoint, device.endpoint]
        async with together(living([cloud.endpoint]), middle.live(), serving(device, layout, 4)):
            row = drawn(layout, 1)
            for iteration in range(3):
                played = await play(cloud, row, iteration=iteration)
                assert_models(played, row, layout=layout, places={PARENT: 4})
                await breakable.kill()
                await until(lambda: not any(endpoint.link.up for endpoint in endpoints))
                await breakable.start()
            await play(cloud, row, iteration=3)
            with pytest.raises(DuplicateName, match="device-0"):
                await serving(child_of(breakable.address, "device-0"), layout, 4)

    scenario(run())


def test_a_broker_that_stays_away_ends_all_and_is_named(tmp_path: Path) -> None:
    async def run() -> None:
        layout = layout_of(4000)
        transfer = Transfer(idle_s=1.5)
        parent = parent_of(breakable.address, ["device-0"], layout=layout, transfer=transfer)
        training = asyncio.Event()

        async def hold() -> None:
            training.set()
            await asyncio.Event().wait()

        child = serving(child_of(breakable.address, "device-0", transfer=transfer), layout, 0, hold)
        playing = living([parent.endpoint], play(parent, drawn(layout, 1)))
        await training.wait()
        await breakable.kill()
        for task in (playing, child):
            with pytest.raises(NoProgress, match=rf"broker {breakable.address}.* 1\.5 s"):
                await task

    breakable = Restarted(broker.choose(), tmp_path)
    try:
        scenario(run())
    finally:
        breakable.close()


def test_the_time_that_a_broker_was_away_is_nobodys_idleness(address: BrokerAddress) -> None:
    async def run() -> None:
        layout = layout_of(4000)
        parent = parent_of(address, ["device-0"], layout=layout, transfer=Transfer(idle_s=100.0))
        playing = asyncio.create_task(play(parent, drawn(layout, 1)))
        here = Presence(NodeState.READY, "device", samples=1)
        await until(lambda: parent.coordinator.progress()["device-0"]["epochs"])
        now = parent.endpoint.now()
        parent.presence("device-0", "s", here, now)
        # The link is down: time passes, nobody could say anything.
        parent.tick(now + 101)
        parent.reconnected(now + 102)
        parent.presence("device-0", "s", here, now + 102)
        parent.tick(now + 103)
        await asyncio.sleep(0)
        assert not playing.done()
        playing.cancel()
        await asyncio.wait((playing,))

    scenario(run())


def test_a_cancellation_that_came_with_the_connection_is_not_lost(address: BrokerAddress) -> None:
    # Before Python 3.12 asyncio.wait_for, by which the client waits for the broker's answer, may swallow it.
    async def run() -> None:
        child = child_of(address, "device-0")
        make = child.endpoint.link._new_client

        def swallowing() -> aiomqtt.Client:
            client = make()
            enter = client.__aenter__

            class Swallowing:
                def __getattr__(self, name: str) -> Any:
                    return getattr(client, name)

                async def __aenter__(self) -> aiomqtt.Client:
                    await enter()
                    task.cancel()
                    try:
                        await asyncio.sleep(0)
                    except asyncio.CancelledError:
                        pass
                    return client

                async def __aexit__(self, *error: Any) -> None:
                    await client.__aexit__(*error)

            return Swallowing()  # type: ignore[return-value]

        child.endpoint.link._new_client = swallowing  # type: ignore[method-assign]
        task = asyncio.create_task(child.endpoint.link.run(connect_timeout_s=PATIENCE_S))
        done, _ = await asyncio.wait((task,), timeout=5)
        task.cancel()
        await asyncio.wait((task,))
        assert done, "it went on"

    scenario(run())


# A child that says it gives up; a child that never comes


def test_a_child_that_gives_up_ends_the_round_at_once_with_its_reason(address: BrokerAddress) -> None:
    async def fail() -> None:
        raise RunFailed("the disk is full")

    async def run() -> None:
        layout = layout_of(4000)
        names = ["device-0", "device-1"]
        parent = parent_of(address, names, layout=layout)
        async with together(living([parent.endpoint]), serving(child_of(address, "device-1"), layout, 1)):
            failing = serving(child_of(address, "device-0"), layout, 0, fail)
            with pytest.raises(RunFailed, match="device-0 gave up: the disk is full"):
                await play(parent, drawn(layout, 1))
            await asyncio.wait((failing,))
            assert isinstance(failing.exception(), RunFailed)

    scenario(run())


def test_a_child_that_gave_up_before_the_round_is_told_of_at_once(address: BrokerAddress) -> None:
    async def fail() -> None:
        raise RunFailed("no data here")

    async def run() -> None:
        layout = layout_of(4000)
        names = ["device-0", "device-1"]
        parent = parent_of(address, names, layout=layout)
        late = child_of(address, "device-0")
        async with together(living([parent.endpoint]), serving(child_of(address, "device-1"), layout, 1)):
            await until(lambda: parent.coordinator.states()["device-1"] == "ready")
            with pytest.raises(RunFailed, match="no data here"):
                await living([late.endpoint], fail())
            await until(lambda: parent.coordinator.states()["device-0"] == "failed")
            for attempt in (partial(parent.gather, Closing()), partial(play, parent, drawn(layout, 1))):
                with pytest.raises(RunFailed, match="device-0 gave up: no data here"):
                    await attempt()

    scenario(run())


def test_a_quorum_is_waited_for_before_the_clock_starts(address: BrokerAddress) -> None:
    async def run() -> None:
        parent = parent_of(address, ["device-0", "device-1"], layout=layout_of(4000))
        gathering = asyncio.create_task(parent.gather(Closing(rule="quorum", quorum=1, deadline_s=0.01)))
        done, _ = await asyncio.wait((gathering,), timeout=0.1)
        assert not done, "the deadline is a round's: nobody is there yet"
        parent.presence("device-1", "session", Presence(NodeState.READY, "device", samples=5), now=0.0)
        await gathering
        assert parent.samples == {"device-1": 5}

    scenario(run())


def test_nobody_is_waited_for_longer_than_idle(address: BrokerAddress) -> None:
    async def run() -> None:
        parent = parent_of(address, ["device-0"], layout=layout_of(4000), transfer=Transfer(idle_s=0.05))
        await parent.gather(Closing(rule="quorum", quorum=1, deadline_s=0.01))
        assert not parent.samples

    scenario(run())


def test_a_quorum_closes_by_its_deadline_and_late_results_are_answered(address: BrokerAddress) -> None:
    async def run() -> None:
        layout = layout_of(400_000)
        names = ["device-0", "device-1", "late", "never"]
        parent = parent_of(address, names, layout=layout)
        go_on = asyncio.Event()
        late = child_of(address, "late")
        tasks = [serving(child_of(address, name), layout, place) for place, name in enumerate(names[:2])]
        async with together(living([parent.endpoint]), serving(late, layout, 2, go_on.wait), *tasks):
            row = drawn(layout, 1)
            closing = Closing(rule="quorum", quorum=2, deadline_s=0.5)
            played = await play(parent, row, closing=closing)
            assert_models(played, row, layout=layout, places={"device-0": 0, "device-1": 1})
            assert set(played.missing) == {"late", "never"}
            phases = played.timeline.phases()
            assert sum(phases.values()) >= 0.5
            assert parent.coordinator.late == 0
            go_on.set()
            await until(lambda: late.refusals)
            assert "closed" in late.refusals[0]
            assert parent.coordinator.late == 1
            second = await play(parent, row, iteration=1, closing=Closing(rule="quorum", quorum=3, deadline_s=0.1))
            assert_models(second, row, layout=layout, places={"device-0": 0, "device-1": 1, "late": 2})

    scenario(run())


# Links


def test_children_on_fast_links_do_not_wait_for_those_on_slow_ones(address: BrokerAddress) -> None:
    """Six on links of 80 Mbit/s, five on slow ones, each of another rate: six lanes, chunks of one size on five."""

    async def run() -> None:
        layout, chunks = layout_of(2_000_000), -(-2_000_000 // 32_768)
        fast = {f"fast-{i}": Link(down_mbit=80.0) for i in range(6)}
        slow = {f"slow-{i}": Link(down_mbit=0.3 + i / 100) for i in range(5)}
        links, transfer = fast | slow, Transfer(chunk_bytes=32_768)
        parent = parent_of(address, list(links), layout=layout, transfer=transfer, links=links)
        children = {name: child_of(address, name, transfer=transfer, link=links[name]) for name in links}
        begun: list[str] = []

        def note(name: str) -> Callable[[], Awaitable[None]]:
            async def begin() -> None:
                begun.append(name)

            return begin

        tasks = [serving(child, layout, place, note(name)) for place, (name, child) in enumerate(children.items())]
        async with together(living([parent.endpoint]), *tasks):
            row = drawn(layout, 1)
            played = await play(parent, row, closing=Closing(rule="quorum", quorum=6, deadline_s=0.001))
            places = {name: place for place, name in enumerate(links) if name in fast}
            assert_models(played, row, layout=layout, places=places)
            assert sorted(begun) == sorted(fast) and sorted(played.missing) == sorted(slow)
            # One publication of each chunk for all that are fast; the slow ones, 50 s each, have hardly begun.
            assert chunks <= parent.endpoint.outgoing.chunks_published < chunks + 5 * chunks // 2
            assert parent.endpoint.outgoing.chunks_repeated == 0

    scenario(run())


@pytest.mark.parametrize("shaped", [True, False])
def test_a_small_model_goes_in_chunks_where_the_link_is_slow(address: BrokerAddress, *, shaped: bool) -> None:
    """Whoever keeps the rates: what is declared decides what travels inside an announcement, and the chunks."""

    async def run() -> None:
        layout, mbit = layout_of(100_000), 0.8 if shaped else 0.01  # a second, or more than a minute if it were kept
        link = Link(up_mbit=mbit, down_mbit=mbit)
        parent = parent_of(address, ["device-0"], layout=layout, link=link, shaped=shaped)
        child = child_of(address, "device-0", link=link, shaped=shaped)
        async with together(living([parent.endpoint]), serving(child, layout, 0)):
            row = drawn(layout, 1)
            assert_models(await play(parent, row), row, layout=layout, places={"device-0": 0})
            for face, chunk_bytes in ((parent, 50_000), (child, 50_000)):
                chunks = -(-100_000 // (chunk_bytes if shaped else 32_768))
                assert face.endpoint.outgoing.chunks_published == chunks

    scenario(run())


def test_every_message_comes_later_by_the_delay(address: BrokerAddress) -> None:
    async def run() -> None:
        layout, link = layout_of(400_000), Link(delay_ms=100.0)
        parent = parent_of(address, ["device-0"], layout=layout, link=link)
        child = child_of(address, "device-0", link=link)
        async with together(living([parent.endpoint]), serving(child, layout, 0)):
            await parent.gather(Closing())
            row, begun = drawn(layout, 1), parent.endpoint.now()
            assert_models(await play(parent, row), row, layout=layout, places={"device-0": 0})
            # Wish, ask, chunk, result, ask, chunk: six ways one after the other, and nothing is said twice for it.
            assert parent.endpoint.now() - begun >= 0.6
            assert [face.endpoint.outgoing.chunks_published for face in (parent, child)] == [1, 1]

    scenario(run())


def test_the_keep_alive_is_the_experiments(address: BrokerAddress) -> None:
    async def run() -> None:
        endpoint = child_of(address, "device-0", transfer=Transfer(keepalive_s=7)).endpoint
        assert endpoint.link._new_client()._keepalive == 7

    scenario(run())


def test_the_last_word_waits_for_a_slow_link(address: BrokerAddress) -> None:
    """A farewell that still waits for its link when a node ends would be lost, and its counts with it."""

    async def run() -> None:
        layout, link = layout_of(4000), Link(delay_ms=300.0)
        parent = parent_of(address, ["device-0"], layout=layout, link=link)
        child = child_of(address, "device-0", link=link)

        async def bid() -> None:
            await child.farewell((), timeout_s=PATIENCE_S)

        async with together(living([parent.endpoint])):
            await live([child.endpoint], bid(), connect_timeout_s=PATIENCE_S, goodbye=nothing)
            await until(lambda: "device-0" in parent._farewells)

    scenario(run())


# Deaths of which the broker hears late, and nodes that begin a new life in the middle of a transfer


def earlier_life(address: BrokerAddress, name: str) -> socket.socket:
    """Return a connection of a node's earlier life, as a loss of power leaves it: once it is closed, its will goes."""
    ready, lost = (
        serialization.encode(Presence(state, "device", samples=1), "earlier")
        for state in (NodeState.READY, NodeState.LOST)
    )
    topic = topics.state(LAB, RUN, name).encode()
    fields = [b"earlier-" + name.encode(), topic, lost]
    connect = b"\x00\x04MQTT\x04\x2e\x00\x3c" + b"".join(len(field).to_bytes(2, "big") + field for field in fields)
    publish = len(topic).to_bytes(2, "big") + topic + ready
    assert max(len(connect), len(publish)) < 128
    connection = socket.create_connection((address.host, address.port), timeout=PATIENCE_S)
    connection.sendall(bytes([0x10, len(connect)]) + connect)
    assert connection.recv(4) == b"\x20\x02\x00\x00"
    connection.sendall(bytes([0x31, len(publish)]) + publish)
    return connection


@pytest.mark.parametrize("late", [PARENT, "device-0"])
def test_a_will_of_an_earlier_life_disturbs_no_transfer(address: BrokerAddress, late: str) -> None:
    async def run() -> None:
        layout = layout_of(2_000_000)
        transfer, link = Transfer(chunk_bytes=32_768), Link(down_mbit=16.0)
        said: list[NodeState] = []
        earlier = earlier_life(address, late)
        parent = parent_of(address, ["device-0"], layout=layout, transfer=transfer, link=link)
        child = child_of(address, "device-0", transfer=transfer)
        watched = Watched(child.endpoint)
        hearing = asyncio.create_task(_hear(address, late, said))
        async with together(hearing, living([parent.endpoint]), serving(child, layout, 0)):
            row = drawn(layout, 1)
            playing = asyncio.create_task(play(parent, row))
            await until(lambda: len(watched.of(PARENT)) >= 20)
            earlier.close()
            await until(lambda: NodeState.LOST in said and said[-1] is NodeState.READY)  # it contradicts
            assert len(watched.of(PARENT)) < 60, "too late to disturb anything"
            assert_models(await playing, row, layout=layout, places={"device-0": 0})
        assert parent.endpoint.outgoing.chunks_published == watched.chunks
        assert watched.restarts == 1

    scenario(run())


def test_a_parent_that_begins_a_new_life_finds_its_child_with_what_it_had(address: BrokerAddress) -> None:
    """Though it says for a while, as it has not come so far, that it does not hold the model."""

    async def run() -> None:
        layout = layout_of(2_000_000)
        transfer, link = Transfer(chunk_bytes=32_768), Link(down_mbit=16.0)
        child = child_of(address, "device-0", transfer=transfer)
        watched = Watched(child.endpoint)
        row = drawn(layout, 1)

        def parent() -> ParentEndpoint:
            return parent_of(address, ["device-0"], layout=layout, transfer=transfer, link=link)

        async with together(serving(child, layout, 0)):
            first = parent()
            life = asyncio.create_task(first.endpoint.run(connect_timeout_s=PATIENCE_S))
            playing = asyncio.create_task(play(first, row))
            await until(lambda: len(watched.of(PARENT)) >= 20)
            client = first.endpoint.link._client
            assert client is not None
            client._client.socket().shutdown(socket.SHUT_RDWR)
            for task in (life, playing):  # without a last word
                task.cancel()
            await asyncio.wait((life, playing))
            client._disconnected.exception()  # nobody waits for it any more
            second = parent()
            async with together(living([second.endpoint])):
                await until(lambda: child.refusals)
                assert "no longer holds" in child.refusals[0]
                watched.asks.clear()
                assert_models(await play(second, row), row, layout=layout, places={"device-0": 0})
        assert watched.asks
        for key, lacking, here in watched.asks:
            assert not lacking & here, key
        again = sum(life.endpoint.outgoing.chunks_published for life in (first, second)) - watched.chunks
        assert 0 <= again <= transfer.window

    scenario(run())


def test_a_parent_that_comes_back_is_told_at_once_what_is_offered(address: BrokerAddress) -> None:
    async def run() -> None:
        layout = layout_of(4000)
        parent = parent_of(address, ["device-0"], layout=layout)
        child = child_of(address, "device-0")
        receipt = parent.endpoint.send
        parent.endpoint.send = lambda peer, said: None if isinstance(said, Acknowledgement) else receipt(peer, said)  # type: ignore[method-assign]
        async with together(living([parent.endpoint]), serving(child, layout, 0)):
            await play(parent, drawn(layout, 1))
            now = child.endpoint.now()
            assert (due := child.next_deadline()) is not None and due > now  # it offers again, as nobody thanked
            for state in (NodeState.LOST, NodeState.READY):
                child.presence(PARENT, parent.endpoint.identity.session, Presence(state, "institution"), now)
            assert child.next_deadline() == now

    scenario(run())
