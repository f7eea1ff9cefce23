"""Codecs of changes: what each must do, fedstrata's and one's own, whatever is encoded and whatever
arrives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedstrata.common.errors import InvalidExperiment, RefusedModel, WireError
from fedstrata.common.experiment.reading import parse
from fedstrata.common.model import codecs_by_name
from fedstrata.common.model.codec_settings import CODEC_TABLES, CodecSettings
from fedstrata.common.model.codecs import codec_of
from fedstrata.common.model.delta_codecs import PIECE_COLUMNS, SCALE_COLUMNS, DeltaCodec, OwnCodec
from fedstrata.common.model.layout import ModelLayout, Row, Section
from fedstrata.common.runtime.link_models import decode_row
from tests.helpers.examples import examples

Floats = npt.NDArray[np.float32]

TREES: Final[tuple[Mapping[str, Any], ...]] = (
    *({"name": "topk", "share": share} for share in (0.01, 0.1, 0.5, 1.0, 1e-9)),
    {"name": "sign"},
    *({"name": "qsgd", "bits": bits} for bits in (2, 3, 4, 7, 8)),
    {"name": "tests.test_delta_codecs:Divided", "by": 4},
)
COLUMNS: Final = st.integers(1, 60) | st.sampled_from([1023, 1024, 1025, 2049])
NORMAL: Final = st.floats(-1e3, 1e3, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)


class Divided(DeltaCodec):
    """A codec of a user's: each column, divided by `by`."""

    def __init__(self, *, by: int = 2) -> None:
        self.by = by

    def nbytes(self, columns: int) -> int:
        return 4 * columns

    def encode(self, delta_D: Floats, chance: np.random.Generator) -> bytes:
        return (delta_D / np.float32(self.by)).tobytes()

    def decode(self, data: bytes, columns: int) -> Floats:
        return np.frombuffer(data, np.float32, columns)


def settings_of(tree: Mapping[str, Any]) -> CodecSettings:
    return parse({"transfer": {"wan": {"up": dict(tree)}}}).tiers[0].transfer.up


def chance(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def ids(tree: Mapping[str, Any]) -> str:
    return " ".join(map(str, tree.values()))


def test_every_codec_of_the_table_is_tried_here() -> None:
    assert {
        tree["name"] for tree in TREES
    } >= codecs_by_name.CODECS.keys() and codecs_by_name.CODECS.keys() <= CODEC_TABLES.keys()


@st.composite
def changes(draw: st.DrawFn, elements: st.SearchStrategy[float] = NORMAL) -> Floats:
    return draw(hnp.arrays(np.float32, draw(COLUMNS), elements=elements, fill=elements))


@pytest.mark.parametrize("tree", TREES, ids=ids)
@examples(60)
@given(delta_D=changes(), seed=st.integers(0, 9))
def test_a_codec_keeps_what_it_declares(
    tree: Mapping[str, Any], delta_D: Floats, seed: int
) -> None:
    """Its size holds, the same chance gives the same bytes, its input stays, and a contraction
    contracts.
    """
    codec, before = settings_of(tree).build(), delta_D.copy()
    data = codec.encode(delta_D, chance(seed))
    assert len(data) <= codec.nbytes(delta_D.size)
    assert codec.encode(delta_D, chance(seed)) == data and delta_D.tobytes() == before.tobytes()
    found = codec.decode(data, delta_D.size)
    assert found.shape == delta_D.shape and found.dtype == np.float32
    d, c = delta_D.astype(np.float64), found.astype(np.float64)
    if not codec.unbiased:
        assert np.sum((d - c) ** 2) <= np.sum(d**2) * (1 - 1e-6 / d.size) or not d.any()


@pytest.mark.parametrize(
    "tree", [tree for tree in TREES if settings_of(tree).build().unbiased], ids=ids
)
@pytest.mark.parametrize("columns", [3, 1500])
def test_an_unbiased_codec_has_the_change_as_its_mean(
    tree: Mapping[str, Any], columns: int
) -> None:
    codec, draws = settings_of(tree).build(), 1000 if columns < 10 else 400
    delta_D = np.random.default_rng(7).laplace(0, 1e-3, columns).astype(np.float32)
    delta_D[0] = 0
    random = chance(1)
    found = np.array(
        [codec.decode(codec.encode(delta_D, random), columns) for _ in range(draws)], np.float64
    )
    spread = found.std(axis=0).max() / math.sqrt(draws)
    assert (
        np.abs(found.mean(axis=0) - delta_D) <= 5 * spread + 2.0**-15 * np.abs(delta_D).max()
    ).all()
    assert np.abs((found.mean(axis=0) - delta_D).mean()) <= 5 * spread / math.sqrt(columns)


@pytest.mark.parametrize("tree", TREES, ids=ids)
@examples(100)
@given(
    data=st.binary(max_size=400),
    columns=st.integers(1, 90),
    cut=st.integers(-3, 3),
    at=st.integers(0, 10**6),
)
def test_any_bytes_give_a_change_or_are_refused(
    tree: Mapping[str, Any], data: bytes, columns: int, cut: int, at: int
) -> None:
    codec = settings_of(tree).build()
    sound = codec.encode(np.arange(columns, dtype=np.float32), chance())
    flipped = bytearray(sound)
    flipped[at % len(sound)] ^= 1 << (at % 8)
    for each in (
        data,
        data[: codec.nbytes(columns)],
        bytes(flipped),
        sound[: len(sound) + cut],
        sound + b"x",
    ):
        if len(each) <= codec.nbytes(columns):
            try:
                found = codec.decode(each, columns)
            except (WireError, ValueError, RefusedModel):
                continue
            assert found.shape == (columns,) and found.dtype == np.float32


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tree", [tree for tree in TREES if tree.get("by") is None], ids=ids)
def test_what_is_not_finite_is_refused_by_the_receiver(
    tree: Mapping[str, Any], value: float
) -> None:
    layout = layout_of(3000)
    row, reference = row_of(layout, np.linspace(-1, 1, 3000)), row_of(layout, 0.5)
    layout.floats(row)[1234] = value
    codec = codec_of(settings_of(tree))
    blob = codec.encode(layout, row, reference=reference, chance=chance())
    with pytest.raises(RefusedModel):
        decode_row(codec, layout, blob, layout.empty(), reference)


# The blob


def layout_of(columns: int) -> ModelLayout:
    tensors: list[tuple[str, tuple[int, ...], Section]] = [
        ("weight", (columns,), Section.PARAMETER)
    ]
    tensors += [("norm.var", (5,), Section.BUFFER), ("norm.count", (), Section.COUNTER)]
    return ModelLayout.build(tensors).with_extras({"control": (7,)})


def row_of(layout: ModelLayout, columns: Any, seed: int = 0) -> Row:
    row = np.zeros(layout.row_bytes, np.uint8)
    random = np.random.default_rng(seed)
    layout.floats(row)[:] = random.standard_normal(layout.columns)
    layout.integers(row)[:] = 2**40 + 3
    layout.extra_columns(row)[:] = random.standard_normal(layout.extras)
    layout.floats(row)[: layout.parameters] = columns
    return row


@pytest.mark.parametrize("tree", TREES, ids=ids)
def test_buffers_counters_and_extras_are_exact_and_the_change_is_added(
    tree: Mapping[str, Any],
) -> None:
    layout, settings = layout_of(2500), settings_of(tree)
    row, z = (
        row_of(layout, np.random.default_rng(i).standard_normal(2500), seed=i) for i in (1, 2)
    )
    codec, changes_of = codec_of(settings), settings.build()
    blob = codec.encode(layout, row, reference=z, chance=chance(4))
    assert blob.nbytes <= codec.size(layout) and codec.delta and not codec.exact
    out = np.full(codec.size(layout), 0xA5, np.uint8)
    assert codec.encode(layout, row, reference=z, out=out, chance=chance(4)) == blob
    got = np.full(layout.row_bytes, 0xA5, np.uint8)
    buffer = codec.buffer(layout, got, size=blob.nbytes)
    buffer[:] = blob
    codec.decode(layout, buffer, got, reference=z)
    delta_D = layout.floats(row)[:2500] - layout.floats(z)[:2500]
    wanted = layout.floats(z)[:2500] + changes_of.decode(
        changes_of.encode(delta_D, chance(4)), 2500
    )
    np.testing.assert_array_equal(layout.floats(got)[:2500], wanted)
    assert got[4 * 2500 :].tobytes() == row[4 * 2500 :].tobytes()
    for size in (0, 10, blob.nbytes - 1 - 4 * 2500, codec.size(layout) + 1):
        with pytest.raises((WireError, RefusedModel)):
            decode_row(codec, layout, memoryview(bytes(max(0, size))), layout.empty(), z)


# Each by its own formula


@examples(100)
@given(delta_D=changes(), share=st.floats(1e-4, 1))
def test_the_largest_columns_are_sent_and_ties_go_to_the_lowest(
    delta_D: Floats, share: float
) -> None:
    size = delta_D.size
    codec = settings_of({"name": "topk", "share": share}).build()
    found = codec.decode(codec.encode(delta_D, chance()), size)
    count = max(1, math.ceil(share * size - 1e-9))
    chosen = set(sorted(range(size), key=lambda i: (-abs(float(delta_D[i])), i))[:count])
    twin = [float(delta_D[i]) if i in chosen else 0.0 for i in range(size)]
    assert found.tolist() == twin
    assert codec.nbytes(size) <= 4 * count + (count * (2 + math.log2(size / count)) + 8) / 8 + 2


@pytest.mark.parametrize("tree", TREES, ids=ids)
def test_pieces_are_coded_as_a_whole_is(tree: Mapping[str, Any]) -> None:
    """Of three pieces, the last one short, the columns of each block come back as close as in one
    piece.
    """
    columns, codec = 2 * PIECE_COLUMNS + 1500, settings_of(tree).build()
    delta_D = np.random.default_rng(3).standard_normal(columns).astype(np.float32)
    found = codec.decode(codec.encode(delta_D, chance()), columns)
    errors = [
        np.mean((found[part] - delta_D[part]) ** 2)
        for part in (slice(0, PIECE_COLUMNS), slice(-1500, None))
    ]
    assert errors[1] == pytest.approx(errors[0], rel=0.2, abs=1e-12)


def test_one_percent_costs_five_bytes_a_column() -> None:
    columns = 1_000_000
    assert settings_of({"name": "topk"}).build().nbytes(columns) / (
        columns // 100
    ) == pytest.approx(5.07, abs=0.01)
    assert settings_of({"name": "sign"}).build().nbytes(columns) == 125_000 + 4 * 977
    assert settings_of({"name": "qsgd"}).build().nbytes(columns) == 500_000 + 4 * 977


@examples(40)
@given(delta_D=changes())
def test_signs_have_the_mean_magnitude_of_their_block(delta_D: Floats) -> None:
    codec = settings_of({"name": "sign"}).build()
    found = codec.decode(codec.encode(delta_D, chance()), delta_D.size)
    assert (np.signbit(found) == np.signbit(delta_D)).all()
    for at in range(0, delta_D.size, SCALE_COLUMNS):
        block, got = (each[at : at + SCALE_COLUMNS] for each in (delta_D, found))
        np.testing.assert_allclose(np.abs(got), np.abs(block).astype(np.float64).mean(), rtol=1e-5)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -0.5])
def test_a_mean_magnitude_that_none_can_be_is_refused_with_its_value(wrong: float) -> None:
    codec = settings_of({"name": "sign"}).build()
    data = bytearray(codec.encode(np.ones(2 * SCALE_COLUMNS, np.float32), chance()))
    data[4:8] = np.float32(wrong).tobytes()
    with pytest.raises(WireError, match=f"a mean magnitude is {wrong}"):
        codec.decode(bytes(data), 2 * SCALE_COLUMNS)


@examples(40)
@given(delta_D=changes(), bits=st.integers(2, 8))
def test_qsgd_rounds_to_one_of_the_two_neighbouring_steps(delta_D: Floats, bits: int) -> None:
    codec = settings_of({"name": "qsgd", "bits": bits}).build()
    found = codec.decode(codec.encode(delta_D, chance(3)), delta_D.size)
    for at in range(0, delta_D.size, SCALE_COLUMNS):
        block, got = (each[at : at + SCALE_COLUMNS].astype(np.float64) for each in (delta_D, found))
        step = max(np.abs(block).max() / (2 ** (bits - 1) - 1), 2.0**-126)
        np.testing.assert_allclose(got / step, np.rint(got / step), atol=1e-4)
        assert (np.abs(got - block) < step * (1 + 1e-5)).all()


@pytest.mark.parametrize(
    "tree", [{"name": "sign"}, *({"name": "qsgd", "bits": bits} for bits in (2, 4, 8))], ids=ids
)
def test_a_block_ends_with_its_tensor(tree: Mapping[str, Any]) -> None:
    """As with int8: a layer's biases keep their precision beside weights whose changes are larger."""
    random, columns = np.random.default_rng(5), {"weight": (40, 30), "bias": (30,), "scale": (1,)}
    layout = ModelLayout.build(
        [(name, shape, Section.PARAMETER) for name, shape in columns.items()]
    )
    change = {
        "weight": random.standard_normal(1200),
        "bias": 1e-6 * random.standard_normal(30),
        "scale": [1e-9],
    }
    delta_D = np.concatenate(list(change.values())).astype(np.float32)
    codec, alone = codec_of(settings_of(tree)), settings_of(tree).build()
    row, origin, got = layout.empty(), np.zeros(layout.row_bytes, np.uint8), layout.empty()
    layout.floats(row)[:] = delta_D
    blob = codec.encode(layout, row, reference=origin, chance=chance(2))
    codec.decode(layout, blob, got, reference=origin)
    assert blob.nbytes == codec.size(layout) == sum(alone.nbytes(size) for size in (1200, 30, 1))
    drawn, found = chance(2), layout.floats(got)
    for part in (slice(0, 1200), slice(1200, 1230), slice(1230, 1231)):
        np.testing.assert_array_equal(
            found[part], alone.decode(alone.encode(delta_D[part], drawn), part.stop - part.start)
        )
    assert np.abs(found[1200:] - delta_D[1200:]).max() < 3e-6
    for size in (blob.nbytes - 1, blob.nbytes + 1):
        with pytest.raises(WireError, match="too short or too long"):
            codec.decode(layout, memoryview(bytes(size)), got, reference=origin)


# One's own


def test_a_users_codec_is_built_from_its_keys_and_is_own_on_the_wire() -> None:
    settings = settings_of({"name": "tests.test_delta_codecs:Divided", "by": 3, "feedback": True})
    assert isinstance(settings, OwnCodec) and settings.feedback and settings.keywords == {"by": 3}
    assert codec_of(settings).name == "own"
    code_at = parse({"transfer": {"lan": {"up": {"name": "mine:Codec"}}}}).code_at
    found = [
        code_at(node).get("transfer.lan.up.name") for node in ("cloud", "institution-0", "device-0")
    ]
    assert found == [None, "mine:Codec", "mine:Codec"]


class Long(Divided):
    def encode(self, delta_D: Floats, chance: np.random.Generator) -> bytes:
        return bytes(8 * delta_D.size)


class Shorter(Divided):
    by_tensor = True

    def encode(self, delta_D: Floats, chance: np.random.Generator) -> bytes:
        return bytes(4 * delta_D.size - 1)


class Failing(Divided):
    def encode(self, delta_D: Floats, chance: np.random.Generator) -> bytes:
        raise KeyError("x")

    def decode(self, data: bytes, columns: int) -> Floats:
        raise IndexError("y")


class Double(Divided):
    def decode(self, data: bytes, columns: int) -> Any:
        return np.zeros(columns)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Long", "encode returns 80 bytes of 10 columns, and nbytes is 40"),
        ("Shorter", "encode returns 39 bytes of a tensor of 10 columns, and nbytes is 40"),
        ("Failing", "fails with KeyError: 'x'"),
    ],
)
def test_a_users_codec_that_fails_ends_the_run_with_its_name(name: str, problem: str) -> None:
    codec = settings_of({"name": f"tests.test_delta_codecs:{name}"}).build()
    with pytest.raises(InvalidExperiment, match=problem):
        codec.encode(np.zeros(10, np.float32), chance())


@pytest.mark.parametrize(
    ("name", "problem"), [("Failing", "IndexError: y"), ("Double", r"float64 \[10\]")]
)
def test_a_users_codec_that_cannot_decode_refuses_the_model(name: str, problem: str) -> None:
    layout = ModelLayout.build([("weight", (10,), Section.PARAMETER)])
    codec, row = codec_of(settings_of({"name": f"tests.test_delta_codecs:{name}"})), layout.empty()
    with pytest.raises(RefusedModel, match=problem):
        decode_row(codec, layout, memoryview(bytes(40)), row, np.zeros(40, np.uint8))


# What an experiment cannot have
