"""Messages that are no good: any bytes on any topic, and results that cannot be used."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from xxhash import xxh3_64_digest

from fedstrata.common.errors import RunFailed, WireError
from fedstrata.common.model.layout import ModelLayout
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.admission import Refusal
from fedstrata.common.protocol.manifest import describe
from fedstrata.common.protocol.messages import Ask, Preparing, Result, Task
from fedstrata.common.settings.links import LinkSettings
from tests.helpers.nodes import (
    FINE,
    LAB,
    PARENT,
    RUN,
    Facts,
    assert_models,
    child_of,
    drawn,
    ending_with,
    layout_of,
    living,
    lying,
    parent_of,
    play,
    serving,
    together,
)
from tests.helpers.records import with_work
from tests.helpers.sites import SimulatedSite, until, virtual

MANY = 2**63 - 1
CYCLE_S = 0.4
LARGE = serialization.encode(Preparing(1, "\x1b" * 20_000_000), "s")

Change = Callable[[Result], Result]


# Any bytes on any topic


def rubbish(draw: random.Random) -> list[bytes]:
    """Return bytes that are no message: random ones, cut ones, deep ones, wrong versions, kinds,
    fields.
    """
    whole = serialization.encode(Ask("0" * 16, b"\xff", 1, 1, 8, False), "s")
    packed = [
        draw.randbytes(draw.randrange(1, 300)),
        whole[8:-2],
        whole[8:] + b"\x00",
        b"\x91" * 3000,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x94\x01\xa1s\x00\x00",
        b"\x93\x02\xa1s\x63",
        b"\x93\x02\xa1s\xd3\x80\x00\x00\x00\x00\x00\x00\x00",
        b"\x93\x02\xa0\x06",
    ]
    damaged = [draw.randbytes(draw.randrange(1, 300)), whole[:-2], whole[:8]]
    return [*damaged, *(xxh3_64_digest(body) + body for body in packed)]


class Intruder:
    """A client that writes on every topic of a run, again and again; it learns the blobs' ids by
    listening.
    """

    def __init__(self, site: SimulatedSite, names: list[str]) -> None:
        self._site = site
        self._names = names
        self._blobs: dict[str, set[str]] = {name: set() for name in names}
        self._damaged: set[str] = set()
        self.cycles = 0

    async def run(self) -> None:
        self._site.network.hooks.append(lambda message: self._listen(message.topic, message.body))
        for cycle in itertools.count():
            for topic, body, retain in list(self._cycle(random.Random(cycle))):
                self._site.inject(topic, body, retain=retain)
            self.cycles += 1
            await asyncio.sleep(CYCLE_S)

    def _listen(self, topic_text: str, body: bytes) -> None:
        try:
            topic = topics.parse(topic_text)
            message = (
                serialization.decode(body)[1] if isinstance(topic, topics.InboxTopic) else None
            )
        except WireError:
            return
        if isinstance(topic, topics.InboxTopic) and isinstance(message, (Task, Result)):
            self._blobs.get(topic.sender, set()).add(message.model.blob)

    def _cycle(self, draw: random.Random) -> Iterator[tuple[str, bytes, bool]]:
        for node in self._names:
            for body in [*rubbish(draw), LARGE, b""]:
                yield topics.state(LAB, RUN, node), body, draw.random() < 0.5
                yield topics.spec(LAB, RUN, node), body, draw.random() < 0.5
                yield topics.ask(LAB, PARENT, node), body, draw.random() < 0.2
            for sender in sorted({*self._names, "intruder"} - {node}):
                for body in [*rubbish(draw), LARGE, b""]:
                    yield topics.inbox(LAB, RUN, node, sender), body, draw.random() < 0.2
            yield from self._streams(node, draw)

    def _streams(self, node: str, draw: random.Random) -> Iterator[tuple[str, bytes, bool]]:
        unknown = f"{draw.getrandbits(64):016x}"
        for blob in [*sorted(self._blobs[node]), unknown]:
            for stream in (topics.ALL, *self._names):
                yield (
                    topics.chunk(LAB, RUN, node, stream, blob, 999_999_999, 10**17),
                    draw.randbytes(50),
                    False,
                )
                yield topics.chunk(LAB, RUN, node, stream, blob, 0, 10**17), LARGE, False
                yield f"fs1/{LAB}/{RUN}/{node}/blob/{stream}/{blob}/-1/x", draw.randbytes(50), False
                yield f"fs1/{LAB}/{RUN}/{node}/blob/{stream}/{blob}/{'9' * 30}/1", b"", False
            if blob not in self._damaged:  # one that hits: it must be asked for again
                self._damaged.add(blob)
                yield (
                    topics.chunk(LAB, RUN, node, topics.ALL, blob, 3, 10**17),
                    draw.randbytes(50),
                    False,
                )


@virtual
async def test_a_round_survives_any_bytes_on_any_topic(site: SimulatedSite) -> None:
    layout = layout_of(2_000_000)
    names = ["device-0", "device-1", "device-2"]
    places = {name: place for place, name in enumerate(names)}
    link = LinkSettings(up_mbit=24.0, down_mbit=24.0)
    parent = parent_of(site, names, layout=layout, transfer=FINE, link=link)
    children = [child_of(site, name, transfer=FINE, link=link) for name in names]
    intruder = Intruder(site, [PARENT, *names])

    async def flooded() -> None:
        before = intruder.cycles
        await until(lambda: intruder.cycles > before + 1)

    flood = asyncio.create_task(intruder.run())
    tasks = [serving(site, child, layout, place, flooded) for place, child in enumerate(children)]
    async with together(living(site, parent), flood, *tasks):
        await until(lambda: intruder.cycles)
        row = drawn(layout, 1)
        played = await play(parent, row)
        assert_models(played, row, layout=layout, places=places)
        assert parent.session.coordinator.refused == 0
        assert intruder.cycles >= 5
        refused = [endpoint.session.link.refusals.total for endpoint in (parent, *children)]
        assert min(refused) > 50, refused
        assert (
            min(
                endpoint.session.link.refusals.of(Refusal.LARGE) for endpoint in (parent, *children)
            )
            > 5
        )
        for endpoint, before in zip((parent, *children), refused, strict=True):
            await until(
                lambda endpoint=endpoint, before=before: (
                    endpoint.session.link.refusals.total > before
                )
            )
    # What it left behind on the broker harms nobody who comes later.
    parent = parent_of(site, names, layout=layout)
    children = [child_of(site, name) for name in names]
    tasks = [serving(site, child, layout, place) for place, child in enumerate(children)]
    async with together(living(site, parent), *tasks):
        played = await play(parent, row)
        assert_models(played, row, layout=layout, places=places)


# Results that cannot be used


def lies(layout: ModelLayout) -> dict[str, tuple[Change, str]]:
    """Return what a child may do to its result, and what the reason of its refusal must name."""
    huge = describe(
        memoryview(bytes(4_000_000)), chunk_bytes=1024, codec="fp32", layout=layout.digest
    )

    def model(**fields: Any) -> Change:
        return lambda result: replace(result, inline=None, model=replace(result.model, **fields))

    def other_bits(data: bytes) -> bytes:
        return bytes(byte ^ 0xFF for byte in data)

    return {
        "huge": (lambda result: replace(result, inline=None, model=huge), "4000000 bytes"),
        "digest": (
            lambda result: model(digests=other_bits(result.model.digests))(result),
            "wrong digest",
        ),
        "inline": (
            lambda result: replace(result, inline=other_bits(result.inline or b"")),
            "wrong digest",
        ),
        "short": (
            lambda result: replace(result, inline=(result.inline or b"")[:-4]),
            "wrong digest",
        ),
        "layout": (model(layout="0123456789abcdef"), "wrong layout '0123456789abcdef'"),
        "codec": (model(codec="zip"), "codec 'zip'"),
        "against": (model(reference="0123456789abcdef"), "reference model '0123456789abcdef'"),
        "loss": (lambda result: with_work(result, loss=float("nan")), "loss is nan"),
        "samples": (lambda result: with_work(result, samples=MANY), f"{MANY} samples"),
        "steps": (lambda result: with_work(result, steps=MANY), f"{MANY} steps"),
        "seconds": (lambda result: with_work(result, train_s=float("inf")), "inf s of training"),
        "pause": (lambda result: with_work(result, pause_s=float("nan")), "a pause of nan s"),
        "empty": (lambda result: with_work(result, samples=0), "no samples"),
    }


def test_offers_that_cannot_be_used_are_refused_with_a_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @virtual
    async def run(site: SimulatedSite) -> None:
        layout = layout_of(100_000)
        observed: list[Facts] = []
        reasons = {name: text for name, (_, text) in lies(layout).items()} | {
            "nan": "NaN or Inf",
            "inf": "NaN or Inf",
        }
        names = ["honest", *reasons]
        parent = parent_of(site, names, layout=layout, transfer=FINE, observed=observed)
        children = {name: child_of(site, name, transfer=FINE) for name in names}
        tasks = [
            lying(site, children[name], layout, change)
            for name, (change, _) in lies(layout).items()
        ]
        tasks += [
            ending_with(site, children["nan"], layout, math.nan),
            ending_with(site, children["inf"], layout, -math.inf),
        ]
        async with together(
            living(site, parent), serving(site, children["honest"], layout, 7), *tasks
        ):
            row = drawn(layout, 1)
            played = await play(parent, row)
            assert_models(played, row, layout=layout, places={"honest": 7})
            assert set(played.refused) == set(reasons)
            assert played.missing == ()
            assert parent.session.coordinator.refused == len(reasons)
            reported = {
                str(facts["node"]): str(facts["reason"])
                for event, facts in observed
                if event == "refused"
            }
            for name, text in reasons.items():
                assert text in played.refused[name], name
                assert reported[name] == played.refused[name]
                assert any(name in line and text in line for line in caplog.messages), name
                await until(lambda name=name: children[name].refusals)
                assert children[name].refusals == [played.refused[name]]
            # The next round finds all of them ready again.
            second = await play(parent, row, global_round=1)
            assert set(second.refused) == set(reasons)

    with caplog.at_level(logging.WARNING, "fedstrata.parent"):
        run()


@virtual
async def test_a_round_in_which_all_are_refused_fails_and_names_them(site: SimulatedSite) -> None:
    layout = layout_of(4000)
    names = ["device-0", "device-1"]
    parent = parent_of(site, names, layout=layout)
    tasks = [ending_with(site, child_of(site, name), layout, math.nan) for name in names]
    async with together(living(site, parent), *tasks):
        with pytest.raises(
            RunFailed, match=r"device-0 and device-1 sent a model that was refused: .*NaN"
        ):
            await play(parent, drawn(layout, 1))
