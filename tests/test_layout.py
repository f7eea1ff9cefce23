"""The row: what is written under a name is read under it, bit for bit, and nothing foreign fits."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.errors import InvalidExperiment, RefusedModel, WireError
from fedstrata.common.model.layout import Entry, FrozenForm, LinkLayouts, ModelLayout, Section

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> ModelLayout:
    names = draw(
        st.lists(
            st.from_regex(r"[a-z]{1,3}(\.[a-z0-9]{1,3}){0,2}", fullmatch=True),
            min_size=1,
            unique=True,
        )
    )
    tensors = [(name, draw(SHAPES), draw(st.sampled_from(Section))) for name in names]
    name = names[draw(st.integers(0, len(names) - 1))]
    return ModelLayout.build(
        [(n, (3,), Section.PARAMETER) if n == name else (n, s, k) for n, s, k in tensors]
    )


def small() -> ModelLayout:
    return ModelLayout.build(
        [
            ("conv.weight", (2, 2), Section.PARAMETER),
            ("bn.running_mean", (3,), Section.BUFFER),
            ("bn.num_batches_tracked", (), Section.COUNTER),
            ("fc.weight", (1, 3), Section.PARAMETER),
            ("bn2.num_batches_tracked", (2,), Section.COUNTER),
        ]
    )


def state_of(layout: ModelLayout, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    generator = np.random.default_rng(seed)
    return {
        e.name: generator.integers(-(2**62), 2**62, e.shape, dtype=np.int64)
        if e.section is Section.COUNTER
        else np.array(generator.normal(size=e.shape), np.float32)
        for e in layout.entries
    }


def test_entries_come_back_module_by_module() -> None:
    names = [entry.name for entry in small().in_state_order]
    assert names == [
        "conv.weight",
        "fc.weight",
        "bn.running_mean",
        "bn.num_batches_tracked",
        "bn2.num_batches_tracked",
    ]


def test_trainable_columns_come_first_and_counters_last() -> None:
    layout = small()
    assert [(e.name, e.start, e.stop) for e in layout.entries] == [
        ("conv.weight", 0, 4),
        ("fc.weight", 4, 7),
        ("bn.running_mean", 7, 10),
        ("bn.num_batches_tracked", 0, 1),
        ("bn2.num_batches_tracked", 1, 3),
    ]
    assert (layout.parameters, layout.columns, layout.counters, layout.row_bytes) == (7, 10, 3, 64)
    assert [e.module for e in layout.entries] == ["conv", "fc", "bn", "bn", "bn2"]
    assert Entry("weight", (), Section.PARAMETER, 0, 1).module == ""


@given(layout=layouts())
def test_the_sections_tile_the_row(layout: ModelLayout) -> None:
    numberings = (
        ((Section.PARAMETER, Section.BUFFER), layout.columns),
        ((Section.COUNTER,), layout.counters),
        ((Section.EXTRA,), layout.extras),
    )
    for sections, end in numberings:
        spans = [(e.start, e.stop) for e in layout.entries if e.section in sections]
        assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])][: len(spans)]
        assert (spans[-1][1] if spans else 0) == end
    assert layout.model_bytes == 4 * layout.columns + 8 * layout.counters
    assert layout.row_bytes == layout.model_bytes + 4 * layout.extras == layout.empty().nbytes
    buffers = [e.start for e in layout.entries if e.section is Section.BUFFER]
    assert all(start >= layout.parameters for start in buffers)


@given(layout=layouts(), seed=st.integers(0, 1000))
def test_what_is_flattened_is_viewed(layout: ModelLayout, seed: int) -> None:
    state, row = state_of(layout, seed), layout.empty()
    row[:] = 0xAA
    layout.flatten(state, row)
    views = layout.views(row)
    assert list(views) == [e.name for e in layout.entries]
    for name, view in views.items():
        assert view.shape == state[name].shape and view.dtype == state[name].dtype
        assert view.tobytes() == state[name].tobytes()
    other = layout.empty()
    layout.flatten(views, other)
    assert other.tobytes() == row.tobytes()


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("row_at", [0, 1, 2])
def test_counters_behind_an_odd_number_of_columns_are_whole(columns: int, row_at: int) -> None:
    layout = ModelLayout.build([("w", (columns,), Section.PARAMETER), ("n", (2,), Section.COUNTER)])
    rows_K = np.zeros((3, layout.row_bytes), np.uint8)
    row = rows_K[row_at]
    layout.integers(row)[:] = [2**62 + 1, -7]
    layout.floats(row)[:] = 1.5
    assert (
        layout.integers(row).tolist() == [2**62 + 1, -7]
        and layout.floats(rows_K)[row_at].tolist() == [1.5] * columns
    )
    assert not np.delete(rows_K, row_at, 0).any()
    assert layout.views(row)["n"].tolist() == [2**62 + 1, -7]


def test_a_view_writes_into_the_row() -> None:
    layout = small()
    row = np.zeros(layout.row_bytes, np.uint8)
    views = layout.views(row)
    views["fc.weight"][0, 2] = 5.0
    views["bn.num_batches_tracked"][...] = 9
    assert layout.floats(row).tolist() == [0] * 6 + [5.0, 0, 0, 0] and layout.integers(
        row
    ).tolist() == [9, 0, 0]


# Identity


@given(layout=layouts())
def test_a_layout_travels_as_json(layout: ModelLayout) -> None:
    copy = ModelLayout.from_json(layout.to_json())
    assert copy == layout and copy.digest == layout.digest


@pytest.mark.parametrize(
    "change",
    [
        ("conv.bias", (2, 2), Section.PARAMETER),
        ("conv.weight", (4,), Section.PARAMETER),
        ("conv.weight", (2, 3), Section.PARAMETER),
        ("conv.weight", (2, 2), Section.BUFFER),
        ("conv.weight", (2, 2), Section.COUNTER),
    ],
)
def test_any_change_changes_the_digest(change: tuple[str, tuple[int, ...], Section]) -> None:
    tensors = [(e.name, e.shape, e.section) for e in small().entries]
    assert len(small().digest) == 16 and ModelLayout.build(tensors).digest == small().digest
    assert ModelLayout.build([change, *tensors[1:]]).digest != small().digest
    assert ModelLayout.build(tensors[1:]).digest != small().digest
    assert ModelLayout.build([tensors[1], tensors[0], *tensors[2:]]).digest != small().digest


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "null", "5", '"text"', "[]", "[[]]", '{"abc": 1}', '["abc"]', '[["a", [2]]]',
        '[["a", [2], "weight"]]', '[["a", [2], 7]]', '[["a", 2, "parameter"]]',
        '[["a", [[2]], "parameter"]]',
        '[["a", [null], "parameter"]]', '[["a", [Infinity], "parameter"]]',
        '[["a", [NaN], "parameter"]]',
        '[["a", [1e999], "parameter"]]', '[["a", [-3], "parameter"]]',
        '[["a", [2.5], "parameter"]]',
        '[["a", "22", "parameter"]]', '[["a", [true], "parameter"]]', '[[7, [2], "parameter"]]',
        '[["a", [2], "counter"]]', '[["a", [2], "parameter"], ["a", [3], "buffer"]]',
        "[" * 100_000, '[["a", ' + "[" * 5000 + "]" * 5000 + ', "parameter"]]',
        '[["a", [1' + "0" * 5000 + '], "parameter"]]', '[["a", [' + "1," * 40 + '1], "parameter"]]',
    ],
)  # fmt: skip
def test_any_other_json_is_a_wire_error(text: str) -> None:
    with pytest.raises(WireError, match="not a model layout"):
        ModelLayout.from_json(text)


@given(text=st.recursive(st.none() | st.floats() | st.integers() | st.text(max_size=3) | st.sampled_from(Section),
                         lambda inner: st.lists(inner, max_size=4), max_leaves=12).map(json.dumps))  # fmt: skip
def test_any_json_is_a_layout_or_a_wire_error(text: str) -> None:
    try:
        layout = ModelLayout.from_json(text)
    except WireError:
        return
    assert ModelLayout.from_json(layout.to_json()) == layout


FROZEN = FrozenForm("0123456789abcdef", 100)


def test_a_layout_knows_its_frozen_arrays_by_digest_and_size() -> None:
    layout = small()
    frozen = replace(layout, frozen=FROZEN)
    assert ModelLayout.from_json(frozen.to_json()) == frozen != layout
    assert frozen.digest != layout.digest and frozen.row_bytes == layout.row_bytes
    more = frozen.with_extras({"v": (3,)})
    assert (
        more.frozen == LinkLayouts.plain(frozen).down.frozen == FROZEN
        and more.row_bytes == frozen.row_bytes + 12
    )
    assert layout.with_extras({}) is layout
    other = replace(layout, frozen=FROZEN._replace(digest="0" * 16))
    assert frozen.differs_in_frozen(other) and other.differs_in_frozen(frozen)
    longer = ModelLayout.build([("w", (2,), Section.PARAMETER)], other.frozen)
    for alike in (
        frozen,
        layout,
        longer,
        replace(other, frozen=FROZEN._replace(digest="0" * 16, nbytes=1)),
    ):
        assert not frozen.differs_in_frozen(alike)


def test_a_model_without_parameters_is_no_model() -> None:
    with pytest.raises(InvalidExperiment, match="no trainable parameter"):
        ModelLayout.build([("n", (), Section.COUNTER), ("m", (3,), Section.BUFFER)])


# Refusals


@given(layout=layouts(), data=st.data())
def test_a_missing_entry_is_named(layout: ModelLayout, data: st.DataObject) -> None:
    state = state_of(layout)
    name = data.draw(st.sampled_from(sorted(state)))
    del state[name]
    with pytest.raises(RefusedModel, match=rf"entry {name} is missing"):
        layout.flatten(state, layout.empty())


def test_a_misshaped_entry_is_named_with_both_shapes_and_further_ones_are_left_out() -> None:
    layout, row = small(), small().empty()
    layout.flatten({**state_of(layout), "more": np.zeros(9)}, row)
    assert layout.views(row).keys() == state_of(layout).keys()
    for shape in ((4,), (2, 3), (1, 2, 2), ()):
        state = {**state_of(layout), "conv.weight": np.zeros(shape, np.float32)}
        with pytest.raises(RefusedModel) as caught:
            layout.flatten(state, layout.empty())
        assert f"conv.weight is of shape {shape}" in str(caught.value) and "(2, 2)" in str(
            caught.value
        )


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, (np.inf, -np.inf)])
@pytest.mark.parametrize("name", ["conv.weight", "fc.weight", "bn.running_mean"])
def test_what_is_not_finite_is_named(name: str, poison: float | tuple[float, float]) -> None:
    layout, row = small(), small().empty()
    state = state_of(layout)
    state[name].flat[-np.size(poison) :] = poison
    layout.flatten(state, row)
    with pytest.raises(RefusedModel, match=f"entry {name} holds NaN or Inf"):
        layout.check_finite(row)


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e18, 1e20, 3.4e38, -3.4e38])
def test_finite_values_pass_however_large(size: float) -> None:
    layout = ModelLayout.build([("w", (5000,), Section.PARAMETER), ("n", (1,), Section.COUNTER)])
    row = layout.empty()
    layout.floats(row)[:] = size
    layout.integers(row)[:] = -1  # whose bits would be a NaN
    layout.check_finite(row)
