"""Models in other forms than rows, over one hop and two; and models that are passed on as they
come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from fedstrata.common.errors import RunFailed
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.model.codec_settings import Codecs
from fedstrata.common.model.codecs import codec_of
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import NodeState, Presence, Result
from fedstrata.common.protocol.round_state import ChildState
from fedstrata.common.protocol.sender import Publication
from fedstrata.common.protocol.topics import ChunkTopic
from fedstrata.common.runtime.child_endpoint import ChildEndpoint
from fedstrata.common.runtime.round import Dispatch
from fedstrata.common.settings.closing import Closing
from tests.helpers.codecs import codecs_of
from tests.helpers.nodes import (
    FINE,
    LAB,
    PARENT,
    RUN,
    Middle,
    assert_models,
    changed,
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
from tests.helpers.sites import SimulatedSite, until, virtual

Change = Callable[[Result], Result]


# Passed on as it comes


@virtual
async def test_devices_get_chunks_before_their_institution_has_the_model(
    site: SimulatedSite,
) -> None:
    """Cut-through: the cloud sends no second half until a device has chunks of the first one."""
    layout = layout_of(2_000_000)
    cloud = parent_of(site, [PARENT], layout=layout, name="cloud", transfer=FINE)
    middle = Middle(site, layout, children=["device-0", "device-1"])
    devices = [child_of(site, f"device-{i}") for i in range(2)]
    publish, sent = cloud.session.link.sender.next_publication, 0

    def got_some(device: ChildEndpoint) -> bool:
        return device.session.link.counters.traffic(PARENT).received_model_payload > 0

    def held_back(now: float, ready: Callable[[Iterable[str]], bool]) -> Publication | None:
        nonlocal sent
        if sent >= 30 and not all(got_some(device) for device in devices):
            return None
        publication = publish(now, ready)
        sent += publication is not None
        return publication

    cloud.session.link.sender.next_publication = held_back  # type: ignore[method-assign]
    works = [serving(site, device, layout, place) for place, device in enumerate(devices)]
    async with together(living(site, cloud), middle.live(), *works):
        row = drawn(layout, 1)
        playing = asyncio.create_task(play(cloud, row))
        while not playing.done():
            cloud.wake()  # what it waits for happens on other connections
            await asyncio.sleep(0.01)
        assert_models(await playing, row, layout=layout, places={PARENT: 0})
    assert middle.down.session.link.sender.chunks_repeated == 0


@virtual
async def test_a_model_that_fails_on_its_way_ends_the_round_below_and_is_sent_again(
    site: SimulatedSite,
) -> None:
    layout = layout_of(2_000_000)
    cloud = parent_of(site, [PARENT], layout=layout, name="cloud", transfer=FINE)
    middle = Middle(site, layout, children=["device-0"])
    device = child_of(site, "device-0")
    receive = middle.up.session.link.receiver.receive_chunk

    def damage(topic: ChunkTopic, data: bytes | memoryview, *, now: float) -> bool:
        if topic.index >= 20 and not middle.up.refusals:
            data = bytes(len(data))
        return receive(topic, data, now=now)

    middle.up.session.link.receiver.receive_chunk = damage  # type: ignore[method-assign]
    async with together(living(site, cloud), middle.live(), serving(site, device, layout, 0)):
        row = drawn(layout, 1)
        assert_models(await play(cloud, row), row, layout=layout, places={PARENT: 0})
    assert any("damaged" in reason for reason in middle.up.refusals)


# Other forms


def as_received(codec: str, layout: ModelLayout, row: Row, reference: Row) -> Row:
    """Return what arrives of a row."""
    got = layout.empty()
    form = codec_of(codec)
    if form.is_row:
        return row
    form.decode(layout, form.encode(layout, row, reference=reference), got, reference=reference)
    return got


def assert_coded(
    models: Mapping[str, Row],
    row: Row,
    *,
    layout: ModelLayout,
    places: Mapping[str, int],
    codecs: Codecs,
) -> None:
    """Assert that each child changed the model as it came down, and that its result came up as its
    codec makes it.
    """
    held = as_received(codecs.down, layout, row, row)
    assert set(models) == set(places)
    for name, upload in models.items():
        answer = layout.empty()
        layout.floats(answer)[:] = changed(layout, held, places[name])
        assert upload.tobytes() == as_received(codecs.up.name, layout, answer, held).tobytes(), name


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "chunks"])
@pytest.mark.parametrize(
    ("down", "up"),
    [
        ("fp32", "delta+fp32+zstd"), ("fp16", "delta+int8"), ("bf16+zstd", "delta+fp16+zstd"),
        ("int8", "int8+zstd"),
        ("fp32+zstd", "delta+bf16"),
    ],
)  # fmt: skip
@virtual
async def test_models_come_as_their_codecs_make_them(
    site: SimulatedSite, down: str, up: str, inline: bool
) -> None:
    layout, codecs = layout_of(200_000), codecs_of(up=up, down=down)
    transfer = TransferSettings(chunk_bytes=32_768, inline_bytes=262_144 if inline else 0)
    places = {"device-0": 0, "device-1": 1}
    parent = parent_of(site, list(places), layout=layout, transfer=transfer, codecs=codecs)
    children = [child_of(site, name, transfer=transfer, codecs=codecs) for name in places]
    works = [serving(site, child, layout, place) for place, child in enumerate(children)]
    async with together(living(site, parent), *works):
        for global_round in range(3):
            row, exact = drawn(layout, global_round), drawn(layout, global_round)
            played = await play(parent, row, global_round=global_round)
            assert_coded(played.models, exact, layout=layout, places=places, codecs=codecs)
            assert row.tobytes() == as_received(down, layout, exact, exact).tobytes(), (
                "what the children had"
            )
    assert parent.session.coordinator.refused == 0


@virtual
async def test_an_upload_that_is_decoded_is_not_fetched_again_meanwhile(
    site: SimulatedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger with the child's name makes it announce its result again while the row is unpacked
    in a thread.
    """
    layout, codecs, places = layout_of(600_000), codecs_of(up="fp16"), {"device-0": 0}
    parent = parent_of(site, list(places), layout=layout, transfer=FINE, codecs=codecs)
    child = serving(site, child_of(site, "device-0", transfer=FINE, codecs=codecs), layout, 0)
    decode, decoding, go_on = parent.models.decode, asyncio.Event(), asyncio.Event()

    async def slowly(*arguments: Any, **options: Any) -> None:
        decoding.set()
        await go_on.wait()
        await decode(*arguments, **options)

    monkeypatch.setattr(parent.models, "decode", slowly)
    async with together(living(site, parent), child):
        row = drawn(layout, 1)
        playing = asyncio.create_task(play(parent, row))
        await decoding.wait()
        stranger = serialization.encode(Presence(NodeState.READY, "device", samples=1), "stranger")
        site.broker.route(topics.state(LAB, RUN, "device-0"), stranger, qos=1, retain=False)
        announced = len(offers(site))
        await until(lambda: len(offers(site)) >= announced + 2)
        assert parent.session.coordinator.children["device-0"].state is ChildState.ANNOUNCED
        assert not parent.session.link.receiver.wanted()
        go_on.set()
        played = await playing
    assert_coded(played.models, row, layout=layout, places=places, codecs=codecs)


def offers(site: SimulatedSite) -> list[Result]:
    """Return the result announcements that passed the broker."""
    inboxes = (routed for routed in site.routed if "/inbox/" in routed.topic)
    messages = (serialization.decode(routed.body)[1] for routed in inboxes)
    return [message for message in messages if isinstance(message, Result)]


@virtual
async def test_children_with_models_of_their_own_answer_with_deltas_to_those(
    site: SimulatedSite,
) -> None:
    layout, codecs = layout_of(40_000), codecs_of(up="delta+int8", down="fp16")
    names = ["device-0", "device-1", "device-2"]
    parent = parent_of(site, names, layout=layout, codecs=codecs)
    works = [serving(site, child_of(site, name, codecs=codecs), layout, 0) for name in names]
    async with together(living(site, parent), *works):
        for global_round in range(2):
            rows = [drawn(layout, 10 * global_round + seed) for seed in (1, 2)]
            models = dict(zip(names, [rows[0], rows[1], rows[0]], strict=True))
            played = await parent.round(
                Dispatch(
                    global_round,
                    0,
                    models=[(rows[0], [names[0], names[2]]), (rows[1], [names[1]])],
                    epochs=dict.fromkeys(names, 1),
                    closing=Closing(),
                )
            )
            for name in names:
                alone = {name: played.models[name]}
                assert_coded(alone, models[name], layout=layout, places={name: 0}, codecs=codecs)


@pytest.mark.parametrize("down", ["fp16", "int8+zstd"])
@virtual
async def test_a_coded_model_is_passed_on_as_it_comes(site: SimulatedSite, down: str) -> None:
    layout, codecs = layout_of(2_000_000), codecs_of(up="delta+bf16", down=down)
    cloud = parent_of(site, [PARENT], layout=layout, name="cloud", transfer=FINE, codecs=codecs)
    middle = Middle(site, layout, children=["device-0"], codecs=codecs)
    device = serving(site, child_of(site, "device-0", codecs=codecs), layout, 0)
    async with together(living(site, cloud), middle.live(), device):
        row = drawn(layout, 1)
        played = await play(cloud, row)
    held = as_received(down, layout, row, row)
    answer = layout.empty()
    layout.floats(answer)[:] = changed(layout, held, 0)
    for _ in range(2):  # from the device to the institution, from there to the cloud
        answer = as_received("delta+bf16", layout, answer, held)
    assert played.uploads.rows_K[0].tobytes() == answer.tobytes()


@virtual
async def test_what_a_form_cannot_hold_is_refused_by_name_and_the_round_goes_on(
    site: SimulatedSite,
) -> None:
    layout, codecs = layout_of(4000), codecs_of(up="fp16")
    names = ["honest", "large"]
    parent = parent_of(site, names, layout=layout, codecs=codecs)
    children = [child_of(site, name, codecs=codecs) for name in names]
    tasks = [
        serving(site, children[0], layout, 0),
        ending_with(site, children[1], layout, 65_520.0),
    ]
    async with together(living(site, parent), *tasks):
        row = drawn(layout, 1)
        played = await play(parent, row)
        assert_coded(played.models, row, layout=layout, places={"honest": 0}, codecs=codecs)
        assert played.refused == {"large": "entry weight holds NaN or Inf (as fp16)"}


@pytest.mark.parametrize("looks", [False, True])
@virtual
async def test_a_parent_whose_model_a_form_cannot_hold_fails_and_gives_the_reason(
    site: SimulatedSite, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does a child of a parent that does not look at what becomes of its model."""
    layout, codecs = layout_of(4000), codecs_of(down="fp16")
    parent = parent_of(site, ["device-0"], layout=layout, codecs=codecs)
    if not looks:
        encode = parent.models.encode
        monkeypatch.setattr(
            parent.models, "encode", lambda *given, **how: encode(*given, **how | {"adopt": False})
        )
    child = serving(site, child_of(site, "device-0", codecs=codecs), layout, 0)
    row = drawn(layout, 1)
    layout.floats(row)[3] = 70_000
    reason = r"entry weight holds NaN or Inf \(as fp16\)"
    parenting = living(site, parent)
    playing = asyncio.create_task(play(parent, row))
    if not looks:
        with pytest.raises(RunFailed, match=f"institution-0's model cannot be used: {reason}"):
            await child
        with pytest.raises(
            RunFailed, match=f"device-0 gave up: institution-0's model cannot be used: {reason}"
        ):
            await playing
    else:
        with pytest.raises(RunFailed, match=f"the model cannot be sent: {reason}"):
            await playing
    for task in (child, parenting):
        task.cancel()
    await asyncio.wait((child, parenting))


@virtual
async def test_a_delta_to_another_model_is_refused(site: SimulatedSite) -> None:
    layout, codecs = layout_of(4000), codecs_of(up="delta+bf16")
    names = ["honest", "elsewhere", "nowhere"]
    parent = parent_of(site, names, layout=layout, codecs=codecs)
    children = [child_of(site, name, codecs=codecs) for name in names]

    def against(blob: str) -> Change:
        return lambda result: replace(result, model=replace(result.model, reference=blob))

    tasks = [
        lying(site, children[1], layout, against("0" * 16)),
        lying(site, children[2], layout, against("")),
    ]
    async with together(living(site, parent), serving(site, children[0], layout, 0), *tasks):
        played = await play(parent, drawn(layout, 1))
        assert list(played.models) == ["honest"]
        blob = played.results["honest"].model.reference
        assert played.refused == {
            "elsewhere": f"wrong reference model '0000000000000000', expected '{blob}'",
            "nowhere": f"wrong reference model '', expected '{blob}'",
        }
