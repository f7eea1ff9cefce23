"""Median, trimmed mean and Krum: against plain twins, and what poisoned uploads can do to them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidExperiment
from common.experiment.methods import RULES, NormBound
from common.experiment.reading import parse
from common.experiment.tiers import share_of
from common.methods.aggregator import build
from common.methods.rule import Aggregated, Uploads
from common.model.layout import ModelLayout, Section
from deploy.simulation.lab import SimulatedLab
from tests.helpers.examples import examples
from tests.test_aggregators import Report

LAYOUT: Final = ModelLayout.build(
    [("weight", (40, 1000), Section.PARAMETER), ("mean", (3,), Section.BUFFER), ("steps", (), Section.COUNTER)]
)
D: Final = LAYOUT.parameters
SPREAD: Final = 0.1

Floats = npt.NDArray[np.float32]


def aggregated(
    tree: dict[str, Any], models_KD: Floats, *, bound: NormBound | None = None, start: float = 0.0
) -> tuple[npt.NDArray[np.float64], Aggregated]:
    """Return the next model's trainable columns from these uploads, which have 1, 2, 3, ... samples."""
    topology = {"institutions": 20, "devices": 20}
    rule = build(
        parse({"cloud": {"aggregation": tree}, "topology": topology}).tiers[0].aggregation,
        layout=LAYOUT, node="cloud", seed=1, measures=True, rows=lambda name, count: np.empty(0, np.uint8),
        bound=bound or NormBound(),
    )  # fmt: skip
    first = np.zeros(LAYOUT.row_bytes, np.uint8)
    LAYOUT.floats(first)[:] = start
    rule.begin(first)
    rows_K = np.zeros((len(models_KD), LAYOUT.row_bytes), np.uint8)
    LAYOUT.floats(rows_K)[:, :D] = models_KD
    LAYOUT.floats(rows_K)[:, D:] = np.arange(len(models_KD))[:, None]
    children = tuple(f"c{k}" for k in range(len(models_KD)))
    reports = tuple(Report(k + 1, 0.5) for k in range(len(models_KD)))
    rule.dispatch(0, children)
    outcome = rule.aggregate(0, Uploads(children, rows_K, reports, lambda: None))
    found = LAYOUT.floats(rule.model)[:D].astype(np.float64)
    for k, child in enumerate(children if not outcome.left_out else ()):
        far = np.linalg.norm(models_KD[k].astype(np.float64) - found)
        assert outcome.distances[child] == pytest.approx(float(far), rel=1e-5, abs=1e-4)
    return found, outcome


def models(count: int, *, poisoned: int = 0, seed: int = 1) -> Floats:
    """Return uploads around zero; the last ones are far away, in one direction."""
    found = np.random.default_rng(seed).normal(scale=SPREAD, size=(count, D)).astype(np.float32)
    found[count - poisoned :] = 1000.0
    return found


@pytest.mark.parametrize("count", [3, 5, 6, 11])
def test_columns_are_those_of_plain_twins(count: int) -> None:
    uploads = models(count)
    median, outcome = aggregated({"name": "median"}, uploads)
    assert "weights" not in outcome.facts, "no upload has one"
    np.testing.assert_allclose(median, np.median(uploads.astype(np.float64), axis=0), rtol=1e-6, atol=1e-8)
    for trim in (0.0, 0.1, 0.3, 0.34, 0.49):
        out = int(Fraction(str(trim)) * count)
        if trim and not out:
            continue
        left = np.sort(uploads.astype(np.float64), axis=0)[out : count - out]
        trimmed, _ = aggregated({"name": "trimmed_mean", "trim": trim}, uploads)
        np.testing.assert_allclose(trimmed, left.mean(axis=0), rtol=1e-6, atol=1e-8)


@given(hundredths=st.integers(1, 49), count=st.integers(1, 1000))
@examples(200)
def test_shares_are_of_decimal_numbers(hundredths: int, count: int) -> None:
    """0.29 * 100 is 28.999999999999996."""
    assert share_of(count, hundredths / 100) == hundredths * count // 100
    least = RULES["trimmed_mean"](name="trimmed_mean", trim=hundredths / 100).uploads_least
    assert hundredths * least >= 100 > hundredths * (least - 1)


@pytest.mark.parametrize("tree", [{"name": "trimmed_mean", "trim": 0.0}, {"name": "krum", "wrong": 0, "keep": 7}])
def test_the_null_setting_is_uniform_fedavg(tree: dict[str, Any]) -> None:
    uploads = models(7)
    uniform, _ = aggregated({"name": "fedavg", "weights": "uniform"}, uploads)
    np.testing.assert_allclose(aggregated(tree, uploads)[0], uniform, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("count", "wrong", "keep"), [(5, 1, 1), (7, 2, 3), (11, 4, 2)])
def test_krum_chooses_by_its_formula(count: int, wrong: int, keep: int) -> None:
    uploads = models(count)
    found, outcome = aggregated({"name": "krum", "wrong": wrong, "keep": keep}, uploads)
    apart = np.array([[((a - b).astype(np.float64) ** 2).sum() for b in uploads] for a in uploads])
    scores = [float(np.sort(np.delete(row, k))[: count - wrong - 2].sum()) for k, row in enumerate(apart)]
    scored: Any = outcome.facts["scores"]
    assert list(scored.values()) == pytest.approx(scores, rel=1e-5)
    chosen = sorted(np.argsort(scores)[:keep])
    assert outcome.facts["chosen"] == [f"c{k}" for k in chosen]
    np.testing.assert_allclose(found, uploads[chosen].mean(axis=0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tree", [{"name": "median"}, {"name": "trimmed_mean", "trim": 0.3}])
@given(seed=st.integers(0, 1000), poisoned=st.integers(0, 3))
def test_poisoned_uploads_move_no_column_beyond_the_others(tree: dict[str, Any], seed: int, poisoned: int) -> None:
    uploads = models(11, poisoned=poisoned, seed=seed)
    honest = uploads[: 11 - poisoned].astype(np.float64)
    found, _ = aggregated(tree, uploads)
    assert (found >= honest.min(axis=0) - 1e-6).all() and (found <= honest.max(axis=0) + 1e-6).all()
    average, _ = aggregated({"name": "fedavg"}, uploads)
    assert poisoned == 0 or (average > honest.max(axis=0)).all()


@pytest.mark.parametrize("keep", [1, 3])
@given(seed=st.integers(0, 1000))
def test_krum_stays_within_the_bound_of_its_theorem(keep: int, seed: int) -> None:
    # Blanchard et al. 2017, Proposition 1: eta sigma sqrt(d), for f of n uploads.
    n, f = 11, 3
    uploads = models(n, poisoned=f, seed=seed)
    found, outcome = aggregated({"name": "krum", "wrong": f, "keep": keep}, uploads)
    eta = np.sqrt(2 * (n - f + (f * (n - f - 2) + f**2 * (n - f - 1)) / (n - 2 * f - 2)))
    assert np.linalg.norm(found) <= eta * SPREAD * np.sqrt(D)
    assert not {f"c{k}" for k in range(n - f, n)} & set(outcome.facts["chosen"])  # type: ignore[call-overload]
    average, _ = aggregated({"name": "fedavg"}, uploads)
    assert np.linalg.norm(average) > 100 * eta * SPREAD * np.sqrt(D)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"name": "krum", "wrong": 9}, r"wrong = 9: needs 21 uploads, of 20 children that take part. Lower it"),
        ({"name": "krum", "keep": 20}, r"keep = 20: 1 of 20 uploads may be wrong. Use at most 19"),
        (
            {"name": "trimmed_mean", "trim": 0.04},
            r"trim = 0.04: needs 25 uploads, of 20 children that take part. Raise",
        ),
        ({"name": "trimmed_mean", "trim": 0.5}, r"trim = 0.5: too large. Write a number below 0.5"),
        ({"name": "median", "weights": "data"}, r"weights = 'data': unknown key. It belongs to fedavg and"),
    ],
)
def test_what_cannot_be_is_refused(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidExperiment, match=message):
        parse({"cloud": {"aggregation": tree}, "topology": {"institutions": 20, "devices": 20}})


# Too few uploads

UNPROTECTED: Final[list[tuple[dict[str, Any], int]]] = [
    ({"name": "median"}, 3),
    ({"name": "trimmed_mean"}, 10),
    ({"name": "trimmed_mean", "trim": 0.3}, 4),
    ({"name": "trimmed_mean", "trim": 0.34}, 3),
    ({"name": "krum"}, 5),
    ({"name": "krum", "wrong": 2, "keep": 8}, 10),
]


@pytest.mark.parametrize(("tree", "least"), UNPROTECTED)
def test_a_round_with_too_few_uploads_keeps_the_model(tree: dict[str, Any], least: int) -> None:
    found, outcome = aggregated(tree, models(least - 1, poisoned=1), start=0.25)
    assert (found == 0.25).all() and outcome.distances == {}
    assert outcome.facts == {"uploads": least - 1, "uploads_least": least}
    assert set(outcome.left_out) == {f"c{k}" for k in range(least - 1)}
    assert outcome.left_out["c0"] == (
        f"{least - 1} uploads do not protect from wrong ones, {least} do: the model is kept"
    )
    enough, outcome = aggregated(tree, models(least, poisoned=1), start=0.25)
    assert np.abs(enough).max() < 10 * SPREAD and not outcome.left_out


def test_uploads_that_a_bound_leaves_out_do_not_protect() -> None:
    """Krum gets four of five uploads, of which one may be wrong."""
    _, outcome = aggregated({"name": "krum"}, models(5, poisoned=1), bound=NormBound(action="refuse", factor=2.0))
    assert outcome.left_out["c4"].startswith("its step is") and outcome.left_out["c0"].startswith("4 uploads")


@pytest.mark.parametrize(("tree", "least"), UNPROTECTED)
@pytest.mark.parametrize("by", ["children", "participation", "quorum"])
def test_an_experiment_whose_rounds_may_have_too_few_uploads_is_refused(
    tree: dict[str, Any], least: int, by: str
) -> None:
    def parsed(uploads: int) -> None:
        children = uploads if by == "children" else 20
        cloud: dict[str, Any] = {"aggregation": tree, "participation": uploads / 20 if by == "participation" else 1.0}
        if by == "quorum":
            cloud["closing"] = {"rule": "quorum", "quorum": uploads, "deadline_s": 1.0}
        parse({"cloud": cloud, "topology": {"institutions": 0, "devices": children}})

    parsed(least)
    has = f"and a round closes with {least - 1}" if by == "quorum" else f"of {least - 1} children that take part"
    keep = tree.get("keep", 1) + tree.get("wrong", 0) == least
    with pytest.raises(InvalidExperiment, match="may be wrong" if keep else f"needs {least} uploads, {has}"):
        parsed(least - 1)


def test_a_lab_whose_uploads_are_refused_goes_on_with_its_model() -> None:
    """Three devices, of which the bound leaves out at most one in a round: two uploads have no median."""
    tree = {
        "rounds": 2,
        "topology": {"institutions": 0, "devices": 3},
        "links": {"check": "off"},
        "cloud": {"aggregation": {"name": "median"}, "norm_bound": {"action": "refuse", "factor": 1.0}},
    }
    plans: list[Any] = []
    lab = SimulatedLab(
        parse(tree), seed=1, model_bytes=10_000, observe=lambda event, facts: plans.append((event, facts))
    )
    outcome = lab.run()
    assert outcome.ok, outcome.result
    reasons = [facts["reason"] for event, facts in plans if event == "refused"]
    assert len(reasons) == 2 * 3
    assert sum("2 uploads do not protect from wrong one" in reason for reason in reasons) == 2 * 2
