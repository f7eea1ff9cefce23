"""Mixing against plain Python, statistics against brute force, FedAvg against its definition."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedstrata.common.methods import mixing
from fedstrata.common.methods.mixing import BLOCK_COLUMNS, MixedColumns, Mixture, whole
from fedstrata.common.methods.statistics import Gram, Statistics, tensor_distances
from fedstrata.common.model.layout import ModelLayout, Section
from tests.helpers.examples import examples
from tests.helpers.rules import Report

Floats = npt.NDArray[np.float32]

NUMBERS = st.floats(-1e6, 1e6, width=32)
MODELS = hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 7)), elements=NUMBERS)


def statistics_of(samples: Sequence[int]) -> Statistics:
    return Statistics.of([Report(count, 0.0) for count in samples])


@st.composite
def convex(draw: st.DrawFn, count: int) -> list[float]:
    """Return weights that sum to 1, some of them zero."""
    raw = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count).filter(any))
    return [number / sum(raw) for number in raw]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Floats, list[list[float]]]:
    models_KF = draw(MODELS)
    return models_KF, draw(
        st.lists(convex(models_KF.shape[0]), min_size=1, max_size=models_KF.shape[0])
    )


def mix(mixtures: Sequence[Mixture], models_KF: Floats, *, out: Floats) -> None:
    """Mix models that are nothing but parameters."""
    layout, rows = layout_of(models_KF.shape[1], 0, 0), list(out.view(np.uint8))
    mixing.apply(
        whole(layout, mixtures), models_KF.view(np.uint8), layout=layout, out=rows[: len(mixtures)]
    )


def layout_of(parameters: int, buffers: int, counters: int) -> ModelLayout:
    sections = [
        (Section.PARAMETER, parameters),
        (Section.BUFFER, buffers),
        (Section.COUNTER, counters),
    ]
    return ModelLayout.build(
        [(f"m.{section}", (width,), section) for section, width in sections if width]
    )


def twin(weights: Sequence[float], models_KF: Floats) -> list[float]:
    """Return the weighted sum of each column, computed exactly and rounded once."""
    return [
        float(
            sum(Fraction(w) * Fraction(float(x)) for w, x in zip(weights, column, strict=True) if w)
        )
        for column in models_KF.T
    ]


def scale_of(models_KF: Floats) -> float:
    return float(np.abs(models_KF).max())


# The kernel


@given(problem=problems())
def test_mixing_is_the_plain_sum(problem: tuple[Floats, list[list[float]]]) -> None:
    models_KF, weights = problem
    before = models_KF.copy()
    out = np.full((len(weights), models_KF.shape[1]), np.nan, np.float32)
    mix([Mixture.of(row) for row in weights], models_KF, out=out)
    assert np.array_equal(models_KF, before)
    for mixed, row in zip(out, weights, strict=True):
        np.testing.assert_allclose(
            mixed, twin(row, models_KF), rtol=0, atol=1e-6 * scale_of(models_KF)
        )


@given(problem=problems())
def test_mixing_in_place_gives_the_same_bits(problem: tuple[Floats, list[list[float]]]) -> None:
    models_KF, weights = problem
    mixtures = [Mixture.of(row) for row in weights]
    apart = np.empty((len(weights), models_KF.shape[1]), np.float32)
    mix(mixtures, models_KF, out=apart)
    untouched = models_KF[len(weights) :].copy()
    mix(mixtures, models_KF, out=models_KF)
    assert models_KF[: len(weights)].tobytes() == apart.tobytes()
    assert np.array_equal(models_KF[len(weights) :], untouched)


def test_mixing_covers_all_columns_of_many_blocks() -> None:
    generator = np.random.default_rng(1)
    for columns in (BLOCK_COLUMNS - 1, BLOCK_COLUMNS, BLOCK_COLUMNS + 1, 2 * BLOCK_COLUMNS + 7):
        models_KF = generator.normal(size=(4, columns)).astype(np.float32)
        weights_KK = np.array([[0.5, 0.5, 0, 0], [0.25] * 4, [0, 0, 1, 0], [0.99, 0, 0, 0.01]])
        mixtures = [Mixture.of(row) for row in weights_KK]
        expected = weights_KK @ models_KF.astype(np.float64)
        out = np.full_like(models_KF, np.nan)
        mix(mixtures, models_KF, out=out)
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6 * scale_of(models_KF))
        assert out[2].tobytes() == models_KF[2].tobytes()
        mix(mixtures, models_KF, out=models_KF)
        assert models_KF.tobytes() == out.tobytes()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 40])
def test_a_single_weight_is_a_copy_bit_for_bit(count: int) -> None:
    bits = np.random.default_rng(count).integers(0, 2**32, (count, 50), dtype=np.uint32)
    bits[:, :3] = (0x7FC00001, 0xFF800000, 0x80000000)  # a NaN with a payload, -Inf, -0.0
    models_KF = bits.view(np.float32)
    for chosen in {0, count // 2, count - 1}:
        weights = [0.0] * count
        weights[chosen] = 1.0
        out = np.zeros((1, 50), np.float32)
        mix([Mixture.of(weights)], models_KF, out=out)
        assert out.view(np.uint32).tobytes() == bits[chosen].tobytes()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_zero_weight_keeps_a_diverged_model_out(poison: float) -> None:
    models_KF = np.ones((6, 3), np.float32)
    models_KF[[1, 4]] = poison
    for weights in ([0.5, 0, 0.5, 0, 0, 0], [0.25, 0, 0.25, 0.25, 0, 0.25], [1, 0, 0, 0, -0.0, 0]):
        out = np.zeros((1, 3), np.float32)
        mix([Mixture.of(weights)], models_KF, out=out)
        assert np.array_equal(out, np.ones((1, 3)))


def test_sums_run_in_row_order() -> None:
    """The same numbers in the same rows give the same bits, whatever else is mixed in the same
    call.
    """
    models_KF = (np.random.default_rng(3).normal(size=(9, 1000)) * 1e3).astype(np.float32)
    weights = np.random.default_rng(4).dirichlet(np.ones(9))
    expected = np.zeros(1000)
    for k in range(9):
        expected += models_KF[k].astype(np.float64) * weights[k]
    alone, together = np.empty((1, 1000), np.float32), np.empty((3, 1000), np.float32)
    mix([Mixture.of(weights)], models_KF, out=alone)
    mix(
        [Mixture.of([1.0] + [0.0] * 8), Mixture.of(weights), Mixture.of(weights)],
        models_KF,
        out=together,
    )
    assert alone.tobytes() == expected.astype(np.float32).tobytes()
    assert together[1].tobytes() == together[2].tobytes() == alone.tobytes()


def test_extrapolating_weights_are_mixed_too() -> None:
    models_KF = np.array([[1.0, 2.0], [3.0, 5.0]], np.float32)
    out = np.empty((1, 2), np.float32)
    mix([Mixture.of([1.5, -0.5])], models_KF, out=out)
    assert out.tolist() == [[0.0, 0.5]]


def test_a_mixture_keeps_what_counts() -> None:
    mixture = Mixture.of([0.0, 0.25, -0.0, 0.5, 0.25])
    assert mixture == Mixture((1, 3, 4), (0.25, 0.5, 0.25)) and mixture.heaviest == 3
    assert Mixture.of([0.3, 0.4, 0.4]).heaviest == 1  # the lowest of equals
    assert Mixture.of(np.array([0.0, 1.0])) == Mixture((1,), (1.0,))


# Plans of parts


@given(seed=st.integers(0, 1000), place=st.sampled_from(["apart", "in place"]))
def test_each_part_is_mixed_by_its_own_weights(seed: int, place: str) -> None:
    layout = layout_of(9, 4, 3)
    random = np.random.default_rng(seed)
    rows_K = np.zeros((3, layout.row_bytes), np.uint8)
    layout.floats(rows_K)[:] = random.normal(size=(3, layout.columns))
    for k, row in enumerate(rows_K):
        layout.integers(row)[:] = [k, 10 + k, 20 + k]
    before = rows_K.copy()
    weights = [random.dirichlet(np.ones(3), 3) for _ in range(2)]
    cuts = [
        ((slice(0, 4), slice(7, 11)), (slice(1, 3),)),
        ((slice(4, 7), slice(11, 13)), (slice(0, 1),)),
    ]
    plan = [
        MixedColumns(tuple(map(Mixture.of, own)), columns, counters)
        for own, (columns, counters) in zip(weights, cuts, strict=True)
    ]
    out = rows_K if place == "in place" else np.zeros_like(rows_K)
    mixing.apply(plan, rows_K, layout=layout, out=list(out))
    for own_KK, (columns, counters) in zip(weights, cuts, strict=True):
        for columns_ in columns:
            expected = own_KK @ layout.floats(before)[:, columns_].astype(np.float64)
            np.testing.assert_allclose(layout.floats(out)[:, columns_], expected, rtol=0, atol=1e-6)
        for row, weights_K in zip(out, own_KK, strict=True):
            source = before[int(np.argmax(weights_K))]
            for counters_ in counters:
                assert (
                    layout.integers(row)[counters_].tolist()
                    == layout.integers(source)[counters_].tolist()
                )


def test_what_was_read_is_released_as_it_goes() -> None:
    columns, calls = 40 * BLOCK_COLUMNS, []
    layout = layout_of(columns, 0, 0)
    rows_K = np.zeros((2, layout.row_bytes), np.uint8)
    plan = whole(layout, [Mixture.of([0.5, 0.5])])
    mixing.apply(
        plan, rows_K, layout=layout, out=[layout.empty()], release=lambda: calls.append("mix")
    )
    Gram.of(
        list(layout.floats(rows_K)), layout.floats(rows_K)[0], release=lambda: calls.append("gram")
    )
    assert calls.count("mix") >= 5 and calls.count("gram") >= 2 and calls[-1] == "gram"


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(11 * BLOCK_COLUMNS + 5, 0, 0)
    rows_K = np.zeros((5, layout.row_bytes), np.uint8)
    layout.floats(rows_K)[:] = np.random.default_rng(9).normal(size=(5, layout.columns))
    mixtures = [Mixture.of([0.2] * 5), Mixture.of([0.9, 0, 0.1, 0, 0]), Mixture.copy(3)]

    def results() -> list[bytes]:
        out = np.zeros((3, layout.row_bytes), np.uint8)
        mixing.apply(whole(layout, mixtures), rows_K, layout=layout, out=list(out))
        products = Gram.of(list(layout.floats(rows_K)), layout.floats(rows_K)[1])
        return [out.tobytes(), products.offsets_KK.tobytes(), products.along_K.tobytes()]

    monkeypatch.setattr(mixing, "_threads", lambda: 1)
    alone = results()
    with ThreadPoolExecutor(threads) as pool:
        monkeypatch.setattr(mixing, "_threads", lambda: threads)
        monkeypatch.setattr(mixing, "_pool", lambda: pool)
        assert results() == alone


# Rows that keep their offsets


@given(count=st.integers(1, 6), seed=st.integers(0, 1000))
def test_recentred_rows_keep_their_offsets(count: int, seed: int) -> None:
    layout = layout_of(20, 3, 2)
    random = np.random.default_rng(seed)
    rows_K = np.zeros((count + 1, layout.row_bytes), np.uint8)
    layout.floats(rows_K)[:] = random.normal(size=(count + 1, layout.columns))
    for k, row in enumerate(rows_K):
        layout.integers(row)[:] = k
    received, before = rows_K[count], layout.floats(rows_K[:count]).astype(np.float64)
    mixing.recentre(list(rows_K[:count]), received, layout=layout)
    after = layout.floats(rows_K[:count])
    expected = layout.floats(received) + before - before.mean(axis=0)
    np.testing.assert_allclose(after[:, :20], expected[:, :20], rtol=0, atol=1e-6)
    assert np.array_equal(
        after[:, 20:], np.repeat(layout.floats(received)[None, 20:], count, axis=0)
    )
    assert all(layout.integers(row).tolist() == [count, count] for row in rows_K)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 10])
def test_equal_rows_become_the_received_model_exactly(count: int, scale: float) -> None:
    layout = layout_of(1000, 0, 0)
    random = np.random.default_rng(count)
    row, received = layout.empty(), layout.empty()
    layout.floats(row)[:] = random.normal(size=1000) * scale
    layout.floats(received)[:] = random.normal(size=1000)
    rows = [row.copy() for _ in range(count)]
    mixing.recentre(rows, received, layout=layout)
    assert all(own.tobytes() == received.tobytes() for own in rows)


# Statistics


@given(models_KD=MODELS, seed=st.integers(0, 100))
def test_gram_is_brute_force(models_KD: Floats, seed: int) -> None:
    reference_D = np.random.default_rng(seed).normal(size=models_KD.shape[1]).astype(np.float32)
    offset_KD = models_KD.astype(np.float64) - reference_D
    expected = [
        [sum(a * b for a, b in zip(x, y, strict=True)) for y in offset_KD] for x in offset_KD
    ]
    products_KK = Gram.of(list(models_KD), reference_D).offsets_KK
    assert products_KK.dtype == np.float64
    np.testing.assert_allclose(
        products_KK, expected, rtol=1e-12, atol=1e-12 * max(1.0, float(np.abs(expected).max()))
    )


def brute_distances(models_KD: Floats, weights_K: npt.NDArray[np.float64]) -> list[float]:
    # so that weights that sum to almost 1 do no harm
    exact = models_KD.astype(np.longdouble) - models_KD[0]
    return [float(np.sqrt(((row - weights_K @ exact) ** 2).sum())) for row in exact]


@examples(200)
@given(models_KD=MODELS, data=st.data())
def test_distances_are_brute_force(models_KD: Floats, data: st.DataObject) -> None:
    weights_K = np.array(data.draw(convex(models_KD.shape[0])))
    expected = brute_distances(models_KD, weights_K)
    products = Gram.of(list(models_KD), models_KD[0])
    largest = float(np.abs(products.offsets_KK).max())
    found = products.distances(weights_K)
    np.testing.assert_allclose(
        found**2, np.square(expected), rtol=1e-9, atol=1e-13 * max(largest, 1e-30)
    )


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
def test_tiny_differences_of_huge_weights_keep_their_digits(size: float) -> None:
    """The last bit of each weight: in float32, or from raw products, nothing of it would be left."""
    base = (np.random.default_rng(6).uniform(1, 2, 10_000) * size).astype(np.float32)
    ulps = np.random.default_rng(7).integers(0, 3, (4, 10_000))
    models_KD = base + (ulps * np.spacing(base)).astype(np.float32)
    weights_K = np.array([0.1, 0.2, 0.3, 0.4])
    for reference in (base, models_KD[0]):
        found = Gram.of(list(models_KD), reference).distances(weights_K)
        np.testing.assert_allclose(found, brute_distances(models_KD, weights_K), rtol=1e-9)


def test_equal_models_have_no_distance() -> None:
    models_KD = np.tile(np.random.default_rng(8).normal(size=1000).astype(np.float32) * 1e5, (3, 1))
    weights_K = np.array([0.2, 0.3, 0.5])
    assert Gram.of(list(models_KD), models_KD[0]).distances(weights_K).tolist() == [0, 0, 0]
    # rounding may not turn into the root of a negative number
    reference = np.zeros(1000, np.float32)
    assert np.isfinite(Gram.of(list(models_KD), reference).distances(weights_K)).all()


@given(
    models_KD=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 6), st.integers(1, 7)),
        elements=st.floats(-9, 9, width=32),
    ),
    seed=st.integers(0, 100),
)
def test_inner_products_come_back_whatever_the_reference(models_KD: Floats, seed: int) -> None:
    exact = models_KD.astype(np.float64)
    norms = np.sqrt((exact**2).sum(axis=1))
    references = [np.zeros(models_KD.shape[1], np.float32), models_KD[0]]
    references.append(
        np.random.default_rng(seed).normal(size=models_KD.shape[1]).astype(np.float32)
    )
    for reference_D in references:
        products = Gram.of(list(models_KD), reference_D)
        np.testing.assert_allclose(products.products_KK, exact @ exact.T, rtol=1e-12, atol=1e-10)
        np.testing.assert_allclose(products.norms_K, norms, rtol=1e-6, atol=1e-5)
        if norms.min() > 1e-2:
            np.testing.assert_allclose(
                products.cosines_KK(), exact @ exact.T / np.outer(norms, norms), atol=1e-7
            )
            np.testing.assert_allclose(
                products.ratios_KK(),
                exact @ exact.T / (norms[:, None] + norms[None]),
                rtol=1e-7,
                atol=1e-7,
            )
        assert (np.abs(products.cosines_KK()) <= 1).all()


def test_a_row_of_zeros_is_like_nobody() -> None:
    models_KD = np.array([[0, 0], [1, 2]], np.float32)
    products = Gram.of(list(models_KD), np.zeros(2, np.float32))
    np.testing.assert_allclose(products.cosines_KK(), [[0, 0], [0, 1]], rtol=0, atol=1e-15)
    assert products.cosines_KK()[0].tolist() == [0, 0]
    assert products.ratios_KK()[0].tolist() == [0, 0]


def test_products_with_another_vector() -> None:
    models_KD = np.random.default_rng(1).normal(size=(3, 2 * BLOCK_COLUMNS + 3)).astype(np.float32)
    other_D = np.random.default_rng(2).normal(size=2 * BLOCK_COLUMNS + 3)
    offset_KD = models_KD.astype(np.float64) - models_KD[0]
    products = Gram.of(list(models_KD), models_KD[0], along=lambda columns: other_D[columns])
    np.testing.assert_allclose(products.offsets_KK, offset_KD @ offset_KD.T, rtol=1e-12)
    np.testing.assert_allclose(products.along_K, offset_KD @ other_D, rtol=1e-9, atol=1e-9)
    assert products.square == pytest.approx(float(other_D @ other_D))


@given(count=st.integers(1, 6), seed=st.integers(0, 1000))
def test_spread_is_that_of_the_mixed_rows(count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    models_KD = (1 + 0.1 * random.normal(size=(count, 30))).astype(np.float32)
    mixing_KK = random.dirichlet(np.ones(count), count)
    mixed_KD = mixing_KK @ models_KD.astype(np.float64)
    mean_D = mixed_KD.mean(axis=0)
    expected = ((mixed_KD - mean_D) ** 2).sum(axis=1).mean() / (mean_D**2).sum()
    for reference_D in (models_KD[0], np.zeros(30, np.float32)):
        assert Gram.of(list(models_KD), reference_D).spread(mixing_KK) == pytest.approx(
            expected, rel=1e-6, abs=1e-12
        )
    assert Gram.of([np.zeros(3, np.float32)], np.zeros(3, np.float32)).spread(np.eye(1)) == 0.0


def test_platos_distance_sums_the_tensors_norms() -> None:
    """Counters and statistics are among them: after unequal epochs they are most of it."""
    layout = layout_of(5, 3, 1)
    random = np.random.default_rng(1)
    rows_K = np.zeros((4, layout.row_bytes), np.uint8)
    layout.floats(rows_K)[:] = random.normal(size=(4, 8))
    for k, row in enumerate(rows_K):
        layout.integers(row)[:] = 100 * k
    centre = rows_K[3]
    found = tensor_distances(list(rows_K), centre, layout=layout)
    for k, row in enumerate(rows_K):
        norms = [
            float(np.linalg.norm(view.astype(np.float64) - layout.views(centre)[name]))
            for name, view in layout.views(row).items()
        ]
        assert len(norms) == 3 and found[k] == pytest.approx(sum(norms), rel=1e-12)
    assert found[3] == 0 and found[0] > 300


# FedAvg


@given(
    samples=st.lists(st.integers(0, 10**6) | st.integers(2**62, 2**63 - 1), min_size=1, max_size=20)
)
def test_uploads_weigh_by_samples_or_alike(samples: list[int]) -> None:
    """Alike also if there is no sample at all: 0 / 0 would be NaN in every weight of the new model."""
    total, count = sum(samples), len(samples)
    statistics = statistics_of(samples)
    wanted = [n / total if total else 1 / count for n in samples]
    assert statistics.weights_K("data").tolist() == pytest.approx(wanted, rel=1e-15 * count)
    assert statistics.weights_K("uniform").tolist() == [1 / count] * count
    assert statistics.samples_K.tolist() == samples
