"""The forms of a model on the wire: what they keep, by how much they err, and that foreign bytes do
no harm.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedstrata.common.errors import RefusedModel, WireError
from fedstrata.common.experiment.reading import parse
from fedstrata.common.model.codec_settings import DOWN, UP
from fedstrata.common.model.codecs import BUILT_IN, PIECE_COLUMNS, SCALE_COLUMNS, Codec, codec_of
from fedstrata.common.model.layout import ModelLayout, Row, Section
from tests.helpers.examples import examples

FLOAT32_MAX = float(np.finfo(np.float32).max)
TINY = 2.0**-126
ANY_FLOAT = st.floats(width=32)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
WIDTHS = st.lists(
    st.integers(1, 40) | st.sampled_from([0, 1, 1023, 1024, 1025, 2049]), min_size=1, max_size=6
)

Floats = npt.NDArray[np.float32]


def layout_of(widths: list[int], buffers: int = 0, counters: int = 0) -> ModelLayout:
    tensors: list[tuple[str, tuple[int, ...], Section]] = [
        (f"layer{i}.weight", (width,), Section.PARAMETER) for i, width in enumerate(widths)
    ]
    tensors.append(("norm.running_var", (buffers,), Section.BUFFER))
    tensors += [(f"norm.count{i}", (), Section.COUNTER) for i in range(counters)]
    return ModelLayout.build(tensors)


def row_of(layout: ModelLayout, columns: Any, seed: int = 0) -> Row:
    """Return a row with these trainable columns; its buffers and counters are random."""
    row = np.random.default_rng(seed).integers(0, 256, layout.row_bytes).astype(np.uint8)
    layout.floats(row)[: layout.parameters] = columns
    return row


def trainable(layout: ModelLayout, row: Row) -> Floats:
    return layout.floats(row)[: layout.parameters]


def travel(codec: Codec, layout: ModelLayout, row: Row, reference: Row | None = None) -> Row:
    """Return the row as the receiver has it."""
    if not codec.delta:
        reference = None
    blob = bytes(codec.encode(layout, row, reference=reference))
    got = np.full(layout.row_bytes, 0xA5, np.uint8)
    buffer = codec.buffer(layout, got, size=len(blob))
    buffer[:] = blob
    codec.decode(layout, buffer, got, reference=reference)
    return got


def errors(x: Floats, got: Floats) -> npt.NDArray[np.float64]:
    return np.abs(x.astype(np.float64) - got.astype(np.float64))


@st.composite
def models(draw: st.DrawFn, elements: st.SearchStrategy[float] = FINITE) -> tuple[ModelLayout, Row]:
    layout = layout_of(draw(WIDTHS), draw(st.integers(0, 5)), draw(st.integers(0, 3)))
    x = draw(hnp.arrays(np.float32, layout.parameters, elements=elements, fill=elements))
    return layout, row_of(layout, x, draw(st.integers(0, 9)))


# Names


def test_the_names_are_a_closed_list() -> None:
    assert DOWN == (
        "fp32",
        "fp32+zstd",
        "fp16",
        "fp16+zstd",
        "bf16",
        "bf16+zstd",
        "int8",
        "int8+zstd",
    )
    assert (*DOWN, *(f"delta+{name}" for name in DOWN[1:])) == UP
    assert tuple(BUILT_IN) == UP and all(codec_of(name).name == name for name in UP)
    for name in UP:
        codec = codec_of(name)
        assert codec.delta == ("delta" in name) and codec.fixed == ("zstd" not in name)
        assert codec.exact == ("fp32" in name)


@pytest.mark.parametrize(
    "name", ["", "fp8", "zstd", "delta", "delta+fp32", "zstd+fp16", "fp16+delta", "FP16", "fp16+"]
)
def test_a_foreign_name_is_a_wire_error(name: str) -> None:
    with pytest.raises(WireError, match="unknown codec"):
        codec_of(name)


@pytest.mark.parametrize("tier", ["wan", "lan"])
@pytest.mark.parametrize(("direction", "known"), [("up", UP), ("down", DOWN)])
def test_an_experiment_names_its_codecs(tier: str, direction: str, known: tuple[str, ...]) -> None:
    for name in known:
        codecs = parse({"transfer": {tier: {direction: name}}}).tiers[tier == "lan"].transfer
        assert (codecs.up.name if direction == "up" else codecs.down) == name


# What every codec keeps


@pytest.mark.parametrize("name", UP)
@examples(40)
@given(model=models(ANY_FLOAT), other=ANY_FLOAT)
def test_buffers_and_counters_travel_exactly_and_the_sizes_hold(
    name: str, model: tuple[ModelLayout, Row], other: float
) -> None:
    layout, row = model
    codec, reference = codec_of(name), row_of(layout, np.float32(other), seed=99)
    before = row.copy(), reference.copy()
    blob = codec.encode(layout, row, reference=reference)
    assert (
        blob.nbytes == codec.size(layout) if codec.fixed else 0 < blob.nbytes <= codec.size(layout)
    )
    out = np.full(codec.size(layout), 0x5A, np.uint8)
    assert codec.encode(layout, row, reference=reference, out=out) == blob, (
        "the same bytes in a used buffer"
    )
    assert (row == before[0]).all() and (reference == before[1]).all()
    try:
        got = travel(codec, layout, row, reference)
    except RefusedModel:
        with np.errstate(over="ignore", invalid="ignore"):
            difference = trainable(layout, row) - np.float32(other)
        assert (
            "int8" in name
            and not np.isfinite(difference if codec.delta else trainable(layout, row)).all()
        )
        return
    tail = 4 * layout.parameters
    assert got[tail:].tobytes() == row[tail:].tobytes()
    if codec.exact:
        assert got.tobytes() == row.tobytes()


@pytest.mark.parametrize("name", UP[1:])
def test_a_blob_is_unpacked_alike_within_the_row_and_apart(name: str) -> None:
    codec = codec_of(name)
    layout = layout_of([3 * PIECE_COLUMNS + 7, 10, 2 * SCALE_COLUMNS, 2], buffers=3, counters=2)
    random = np.random.default_rng(5)
    row = row_of(layout, random.standard_normal(layout.parameters))
    reference = row_of(layout, random.standard_normal(layout.parameters), seed=1)
    blob = codec.encode(layout, row, reference=reference)
    apart = layout.empty()
    codec.decode(layout, blob, apart, reference=reference)
    within = layout.empty()
    buffer = codec.buffer(layout, within, size=blob.nbytes)
    assert np.shares_memory(np.frombuffer(buffer, np.uint8), within) == codec.fixed
    buffer[:] = blob
    codec.decode(layout, buffer, within, reference=reference)
    assert within.tobytes() == apart.tobytes()


def test_fp32_is_the_row_itself() -> None:
    layout = layout_of([7], buffers=2, counters=1)
    row = row_of(layout, 1.5)
    codec = codec_of("fp32")
    assert np.shares_memory(np.frombuffer(codec.encode(layout, row), np.uint8), row)
    buffer = codec.buffer(layout, row, size=layout.row_bytes)
    assert np.shares_memory(np.frombuffer(buffer, np.uint8), row) and buffer.nbytes == codec.size(
        layout
    )


# fp16


@given(model=models(ANY_FLOAT))
def test_fp16_rounds_as_ieee_defines(model: tuple[ModelLayout, Row]) -> None:
    layout, row = model
    x = trainable(layout, row)
    got = trainable(layout, travel(codec_of("fp16"), layout, row))
    for value, half in zip(x.tolist(), got.tolist(), strict=True):
        try:
            (twin,) = struct.unpack("<e", struct.pack("<e", value))  # Python's own conversion
        except OverflowError:
            twin = math.copysign(math.inf, value)
        assert (math.isnan(half) and math.isnan(twin)) or half == twin, value
        assert math.copysign(1, half) == math.copysign(1, value) or math.isnan(value)
    fits = np.abs(x) <= 65504
    bound = np.where(np.abs(x) >= 2.0**-14, 2.0**-11 * np.abs(x, dtype=np.float64), 2.0**-25)
    assert (errors(x[fits], got[fits]) <= bound[fits]).all()


def test_every_half_comes_back_and_what_lies_between_is_rounded_as_numpy_does() -> None:
    every = np.arange(65_536, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = every[:0x7C00]
    middles = (halves[:-1] + halves[1:]) / 2  # exact; ties
    x = np.concatenate(
        [
            halves,
            middles,
            np.nextafter(middles, np.float32(0)),
            np.nextafter(middles, np.float32(9e4)),
        ]
    )
    x = np.concatenate([x, -x, every[~np.isnan(every)]])
    layout = layout_of([x.size])
    got = trainable(layout, travel(codec_of("fp16"), layout, row_of(layout, x)))
    assert got.tobytes() == x.astype(np.float16).astype(np.float32).tobytes()
    nans = travel(codec_of("fp16"), layout_of([1]), row_of(layout_of([1]), np.nan))
    assert np.isnan(trainable(layout_of([1]), nans)).all()


def test_too_large_for_fp16_is_refused_by_name() -> None:
    layout = layout_of([3, 4])
    row = row_of(layout, [0, 0, 0, 1, 65519, 2, 3])
    layout.check_finite(travel(codec_of("fp16"), layout, row))
    layout.floats(row)[4] = 65520
    with pytest.raises(RefusedModel, match=r"entry layer1\.weight holds NaN or Inf"):
        layout.check_finite(travel(codec_of("fp16"), layout, row))


# bf16


def brain_twin(value: float) -> float:
    """Return the nearest bfloat16, ties to even, of a float32: among the two neighbours in steps of
    its exponent.
    """
    if not math.isfinite(value) or value == 0:
        return value
    exponent = max(math.frexp(abs(value))[1] - 1, -126)
    step = math.ldexp(1.0, exponent - 7)
    # Python's round is to even, and all of this is exact in double precision
    return round(value / step) * step


@given(
    model=models(
        ANY_FLOAT | st.sampled_from([0.0, -0.0, math.inf, -math.inf, 2.0**-133, 2.0**-134])
    )
)
def test_bf16_rounds_to_nearest_even(model: tuple[ModelLayout, Row]) -> None:
    layout, row = model
    x = trainable(layout, row)
    got = trainable(layout, travel(codec_of("bf16"), layout, row))
    for value, brain in zip(x.tolist(), got.tolist(), strict=True):
        twin = brain_twin(value)
        if abs(twin) > FLOAT32_MAX:
            twin = math.copysign(math.inf, value)
        assert (math.isnan(brain) and math.isnan(twin)) or brain == twin, value
        assert math.copysign(1, brain) == math.copysign(1, value) or math.isnan(value)
    fits = np.abs(x) <= 3.38e38
    bound = np.where(np.abs(x) >= TINY, 2.0**-8 * np.abs(x, dtype=np.float64), 2.0**-134)
    assert (errors(x[fits], got[fits]) <= bound[fits]).all()


@pytest.mark.parametrize("bits", [0x7F80_0001, 0x7FFF_FFFF, 0xFF80_0001, 0xFFFF_FFFF, 0x7FC0_0000])
def test_nan_stays_nan_in_bf16(bits: int) -> None:
    layout = layout_of([3])
    row = row_of(layout, 1)
    row.view(np.uint32)[1] = bits
    for name in ("bf16", "bf16+zstd"):
        got = travel(codec_of(name), layout, row)
        assert np.isnan(trainable(layout, got)).tolist() == [False, True, False]
        with pytest.raises(RefusedModel, match="layer0"):
            layout.check_finite(got)


@pytest.mark.parametrize("name", DOWN)
@examples(100)
@given(model=models(st.floats(-(2.0**127), 2.0**127, width=32) | st.floats(-1, 1, width=32)))
def test_what_was_rounded_once_is_not_rounded_again(
    name: str, model: tuple[ModelLayout, Row]
) -> None:
    layout, row = model
    codec = codec_of(name)
    once = travel(codec, layout, row)
    assert codec.encode(layout, once) == codec.encode(layout, row)
    assert travel(codec, layout, once).tobytes() == once.tobytes()


# int8


def scaled_twin(x: Floats) -> tuple[list[float], list[float]]:
    """Return one block's columns as the receiver has them, and their error bound, in plain
    Python.
    """
    scale = float(np.float32(max(map(abs, x.tolist()))) / np.float32(127))
    if scale < TINY:
        return [0.0] * x.size, [127 * TINY] * x.size
    step = math.ldexp(1.0, math.frexp(scale)[1] - 17)
    scale = math.ceil(scale / step) * step
    integers = [round(float(np.float32(value) / np.float32(scale))) for value in x.tolist()]
    assert all(abs(q) <= 127 for q in integers)
    return [q * scale for q in integers], [scale / 2 * (1 + 2.0**-16)] * x.size


@given(model=models(st.floats(-(2.0**127), 2.0**127, width=32) | st.floats(-1, 1, width=32)))
def test_int8_errs_by_half_a_step_of_its_block(model: tuple[ModelLayout, Row]) -> None:
    layout, row = model
    x = trainable(layout, row)
    got = trainable(layout, travel(codec_of("int8"), layout, row))
    for entry in layout.entries:
        if entry.section is Section.PARAMETER:
            for start in range(entry.start, entry.stop, SCALE_COLUMNS):
                block = slice(start, min(start + SCALE_COLUMNS, entry.stop))
                twin, bound = scaled_twin(x[block])
                assert got[block].tolist() == twin
                assert (errors(x[block], got[block]) <= bound).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["int8", "delta+int8", "int8+zstd"])
def test_int8_refuses_what_is_not_finite_by_name(name: str, value: float) -> None:
    layout = layout_of([3, 4, 3])
    row = row_of(layout, np.arange(10))
    layout.floats(row)[5] = value
    with pytest.raises(RefusedModel, match=r"entry layer1\.weight: a scale of int8 is (nan|inf)"):
        travel(codec_of(name), layout, row, row_of(layout, 0))


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, -1e-40])
def test_a_hostile_scale_is_refused(scale: float) -> None:
    layout, codec = layout_of([2000, 3]), codec_of("int8")
    blob = bytearray(codec.encode(layout, row_of(layout, 1)))
    blob[4:8] = struct.pack("<f", scale)  # the second block's, of two
    with pytest.raises(RefusedModel, match=r"entry layer0\.weight: a scale of int8"):
        codec.decode(layout, memoryview(blob), layout.empty())


def test_a_huge_scale_becomes_infinite_and_is_refused_later() -> None:
    layout, codec = layout_of([3]), codec_of("int8")
    got = layout.empty()
    codec.decode(layout, memoryview(struct.pack("<fbbb", FLOAT32_MAX, 127, 1, 0)), got)
    with pytest.raises(RefusedModel, match="layer0"):
        layout.check_finite(got)


# Deltas


@pytest.mark.parametrize("name", [name for name in UP if "delta" in name and "fp32" not in name])
@examples(40)
@given(model=models(st.floats(-1000, 1000, width=32)), data=st.data())
def test_a_lossy_delta_errs_by_its_form_and_two_roundings(
    name: str, model: tuple[ModelLayout, Row], data: st.DataObject
) -> None:
    layout, row = model
    x = trainable(layout, row)
    near = data.draw(hnp.arrays(np.float32, x.size, elements=st.floats(-1, 1, width=32)))
    reference = row_of(layout, x + near, seed=3)
    r = trainable(layout, reference)
    got = trainable(layout, travel(codec_of(name), layout, row, reference))
    exact = np.abs(x.astype(np.float64) - r)
    plain = codec_of(name.removeprefix("delta+"))
    difference = row_of(layout, x - r)
    of_form = errors(x - r, trainable(layout, travel(plain, layout, difference)))
    assert (errors(x, got) <= of_form + 2.0**-24 * (exact + np.abs(got)) + TINY).all()


@given(model=models(ANY_FLOAT), seed=st.integers(0, 5))
def test_an_exact_delta_is_exact_against_anything(
    model: tuple[ModelLayout, Row], seed: int
) -> None:
    layout, row = model
    reference = np.random.default_rng(seed).integers(0, 256, layout.row_bytes).astype(np.uint8)
    got = travel(codec_of("delta+fp32+zstd"), layout, row, reference)
    assert got.tobytes() == row.tobytes()


def test_an_unchanged_model_costs_nothing() -> None:
    layout = layout_of([3 * PIECE_COLUMNS])
    row = row_of(layout, np.random.default_rng(1).standard_normal(layout.parameters))
    for name in UP:
        codec = codec_of(name)
        if codec.delta and not codec.fixed:
            assert codec.encode(layout, row, reference=row).nbytes < 200
        if codec.delta:
            assert travel(codec, layout, row, row).tobytes() == row.tobytes()


# Foreign bytes


def decode_or_refuse(codec: Codec, layout: ModelLayout, blob: bytes, reference: Row) -> None:
    row = layout.empty()
    buffer = (
        codec.buffer(layout, row, size=len(blob))
        if len(blob) <= codec.size(layout)
        else memoryview(blob)
    )
    if buffer.nbytes == len(blob) and not buffer.readonly:
        buffer[:] = blob
    try:
        codec.decode(layout, buffer, row, reference=reference)
    except (WireError, RefusedModel):
        pass


@pytest.mark.parametrize("name", UP)
@examples(60)
@given(data=st.data())
def test_foreign_bytes_are_refused_and_nothing_else_happens(name: str, data: st.DataObject) -> None:
    codec, layout = codec_of(name), layout_of([1500, 1, 40], buffers=2, counters=1)
    reference = row_of(layout, 0.5)
    blob = bytearray(
        codec.encode(
            layout, row_of(layout, np.linspace(-1, 1, layout.parameters)), reference=reference
        )
    )
    kind = data.draw(st.sampled_from(["flipped", "random"]))
    if kind == "flipped":
        for place, mask in data.draw(
            st.lists(st.tuples(st.integers(0, 2**31), st.integers(1, 255)), max_size=4)
        ):
            blob[place % len(blob)] ^= mask
    else:
        blob = bytearray(data.draw(st.binary(min_size=len(blob), max_size=len(blob))))
    decode_or_refuse(codec, layout, bytes(blob), reference)


@pytest.mark.parametrize("name", [name for name in UP if name != "fp32"])
def test_a_blob_that_is_cut_or_prolonged_is_a_wire_error(name: str) -> None:
    codec, layout = codec_of(name), layout_of([300], buffers=2, counters=1)
    reference = row_of(layout, 0)
    blob = bytes(codec.encode(layout, row_of(layout, np.arange(300)), reference=reference))
    for cut in (0, 1, 3, 4, 10, len(blob) // 2, len(blob) - 1):
        with pytest.raises(WireError):
            codec.decode(layout, memoryview(blob[:cut]), layout.empty(), reference=reference)
    if codec.fixed:
        with pytest.raises(WireError, match="1 bytes too many"):
            codec.decode(layout, memoryview(blob + b"x"), layout.empty(), reference=reference)


def test_a_zstd_bomb_is_inflated_no_further_than_a_model() -> None:
    layout, codec = layout_of([1000]), codec_of("fp16+zstd")
    bomb = memoryview(zstandard.ZstdCompressor().compress(bytes(300_000_000)))
    assert bomb.nbytes < 50_000
    with pytest.raises(WireError, match="more than a model"):
        codec.decode(layout, bomb, layout.empty())


@pytest.mark.parametrize("size", [1 << 40, (1 << 64) - 1])
def test_a_frame_that_promises_much_is_not_believed(size: int) -> None:
    # RFC 8878, 3.1.1: magic number, descriptor (8 bytes of content size, a window follows), window
    # of 1 kB, size;
    # then a last block of one repeated byte.
    head = struct.pack("<IBBQ", 0xFD2FB528, 0b1100_0000, 0, size)
    codec, layout = codec_of("fp16+zstd"), layout_of([2])
    with pytest.raises(WireError):
        codec.decode(layout, memoryview(head + b"\x03\x00\x00A"), layout.empty())


@pytest.mark.parametrize(("window_log", "fits"), [(23, True), (24, False), (27, False)])
def test_a_frame_that_wants_a_large_window_is_refused(window_log: int, fits: bool) -> None:
    layout, codec = layout_of([100]), codec_of("fp16+zstd")
    settings = zstandard.ZstdCompressionParameters(compression_level=1, window_log=window_log)
    # of unknown size: the window as set
    stream = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    blob = memoryview(stream.compress(bytes(200)) + stream.flush())
    if fits:
        codec.decode(layout, blob, layout.empty())
    else:
        with pytest.raises(WireError, match="not a zstd frame"):
            codec.decode(layout, blob, layout.empty())


def test_incompressible_bytes_fit_into_what_is_set_aside() -> None:
    layout, codec = layout_of([3 * PIECE_COLUMNS + 11], buffers=70_000), codec_of("fp32+zstd")
    row = np.random.default_rng(2).integers(0, 256, layout.row_bytes).astype(np.uint8)
    blob = codec.encode(layout, row)
    assert layout.row_bytes < blob.nbytes <= codec.size(layout)
    assert travel(codec, layout, row).tobytes() == row.tobytes()
