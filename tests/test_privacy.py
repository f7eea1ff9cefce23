"""Privacy of children: clipping, noise, the ledger, whole labs."""

from __future__ import annotations

import stat
import tomllib
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import count
from math import exp, inf, sqrt
from operator import or_
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from torch import nn

from fedstrata.cloud.privacy_ledger import PrivacyLedger
from fedstrata.cloud.records import GlobalRoundRecord
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment import lint
from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.methods.private import NoiseSource, PrivateRule, PrivateUpdates
from fedstrata.common.methods.rule import Aggregated, Rule
from fedstrata.common.metrics import Metrics
from fedstrata.common.model.layout import ModelLayout, Row, Section
from fedstrata.common.randomness import Purpose, SecretNoise, SeededNoise
from fedstrata.common.runtime.world import RealWorld
from fedstrata.common.settings import accountant
from fedstrata.common.settings.privacy import PrivacySettings
from fedstrata.common.storage.spool import Spool
from fedstrata.deploy.local.replay import replayed
from fedstrata.deploy.results.page import compose
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.simulation.simulated_world import SimulatedWorld
from tests.helpers import rules
from tests.helpers.commands import table, tensors
from tests.helpers.direct import resumed_run, run_direct
from tests.helpers.rules import LEAST, Report
from tests.helpers.scenarios import KilledLab

LAYOUT: Final = ModelLayout.build([("weight", (40, 1000), Section.PARAMETER)])
D: Final = LAYOUT.parameters
CHILDREN: Final = ("a", "b", "c", "d", "e")
SECRET: Final = bytes(range(32))
C: Final = 2.0
DEVICE: Final[dict[str, Any]] = {
    "unit": "device",
    "clip_norm": C,
    "noise_multiplier": 1.5,
    "delta": 1e-5,
}

Doubles = npt.NDArray[np.float64]


def settings(**keys: Any) -> PrivacySettings:
    return PrivacySettings(**{**DEVICE, "noise": "seeded", **keys})


def row(values: Doubles | float) -> Row:
    found = np.zeros(LAYOUT.row_bytes, np.uint8)
    LAYOUT.floats(found)[:] = values
    return found


def steps(lengths: Sequence[float], r: int = 0) -> Doubles:
    """Return steps of these lengths in random directions, [K, D]."""
    found = np.random.default_rng(r).normal(size=(len(lengths), D))
    found *= (np.array(lengths) / np.linalg.norm(found, axis=1))[:, None]
    return found


# A child's updates


def source(
    privacy: PrivacySettings, *, node: str = "device-0", secret: bytes = SECRET
) -> NoiseSource:
    return NoiseSource(privacy, seed=7, node=node, secret=lambda: secret)


def protected(
    privacy: PrivacySettings,
    step: Doubles | float,
    *,
    number: int = 3,
    secret: bytes = SECRET,
    start: float = 1.0,
) -> Doubles:
    """Return the update that a child sends."""
    received, result = row(start), row(start + np.asarray(step))
    PrivateUpdates(privacy, LAYOUT, source(privacy, secret=secret)).protect(
        received, result, number=number
    )
    return LAYOUT.floats(result).astype(np.float64) - start


@pytest.mark.parametrize("length", [0.0, 0.5, 1.99, 2.01, 50.0])
def test_an_update_is_clipped_to_the_bound_and_keeps_its_direction(length: float) -> None:
    (step,) = steps([length or 1.0])
    step = step if length else step * 0
    found = protected(settings(noise_multiplier=0.0), step, start=0.0)
    assert np.linalg.norm(found) <= C * (1 + 1e-6)
    np.testing.assert_allclose(
        found, step * (C / length if length > C else 1.0), rtol=1e-6, atol=1e-12
    )


@pytest.mark.parametrize("noise", ["seeded", "system"])
def test_the_noise_of_a_million_columns_has_its_variance(noise: Any) -> None:
    layout = ModelLayout.build([("weight", (1000, 1000), Section.PARAMETER)])
    zeros = np.zeros(layout.row_bytes, np.uint8)
    result, privacy = zeros.copy(), settings(noise=noise)
    PrivateUpdates(privacy, layout, source(privacy)).protect(zeros, result, number=0)
    found = layout.floats(result).astype(np.float64)
    std, columns = 1.5 * C, len(found)
    assert abs(found.mean()) < 4 * std / sqrt(columns)
    assert found.var() == pytest.approx(std**2, rel=4 * sqrt(2 / columns))
    # of a normal distribution
    assert (found**4).mean() == pytest.approx(3 * std**4, rel=4 * sqrt(96 / columns) / 3)
    assert abs((found[1:] * found[:-1]).mean()) < 4 * std**2 / sqrt(columns)
    within = [(np.abs(found) < times * std).mean() for times in (1, 2, 3)]
    assert within == pytest.approx([0.682689, 0.954500, 0.997300], abs=2e-3)


def test_uniform_numbers_of_a_secret_are_uniform() -> None:
    found = SecretNoise(SECRET).uniforms(1_000_000)
    assert found.min() >= 0 and found.max() < 1
    assert found.mean() == pytest.approx(0.5, abs=2e-3) and found.var() == pytest.approx(
        1 / 12, abs=1e-3
    )


@pytest.mark.parametrize("noise", ["seeded", "system"])
def test_a_repeated_result_has_the_same_noise_and_another_task_another(noise: Any) -> None:
    privacy = settings(noise=noise)
    (step,) = steps([1.0])
    once, again = (protected(privacy, step) for _ in range(2))
    assert np.array_equal(once, again)
    assert not np.allclose(once, protected(privacy, step, number=4), atol=0.1)


def test_only_a_secret_has_other_noise_for_other_data() -> None:
    """Else the difference of two results would be without noise."""
    one, other = steps([1.0]), steps([1.0], r=1)
    for noise, same in (("seeded", True), ("system", False)):
        privacy = settings(noise=noise)
        noises = [protected(privacy, step[0]) - step[0] for step in (one, other)]
        assert np.allclose(*noises, atol=1e-5) is same
    secret = settings(noise="system")
    found = [protected(secret, one[0], secret=key) for key in (SECRET, SECRET[::-1])]
    assert not np.allclose(*found, atol=0.1)


def test_a_seeded_update_is_that_of_a_plain_twin() -> None:
    (step,) = steps([10.0])
    drawn = SeededNoise(7, Purpose.PRIVACY, "device-0", 3)
    # by blocks of columns
    noise = np.concatenate([drawn.normals(32_768), drawn.normals(D - 32_768)])
    expected = step * C / 10.0 + 1.5 * C * noise
    np.testing.assert_allclose(protected(settings(), step), expected, atol=2e-6)


# The parent


def rule_of(
    privacy: PrivacySettings | None, tree: Mapping[str, Any] | None = None, **keys: Any
) -> Rule:
    tree = {"name": "fedavg", "weights": "uniform"} if tree is None else tree
    keys |= {} if privacy is None else {"privacy": privacy}
    return rules.rule_of(
        tree,
        layout=LAYOUT,
        start=1.0,
        seed=7,
        secret=lambda: SECRET,
        children=len(CHILDREN),
        **keys,
    )


def play(
    rule: Rule,
    lengths: Sequence[float],
    *,
    r: int = 0,
    missing: str = "",
    samples: Sequence[int] = (10,) * 5,
) -> tuple[Doubles, Aggregated]:
    """Let the children move so far; return the uploads' steps [K, D], in their order, and the
    outcome.
    """
    sent = {child: model for model, those in rule.dispatch(r, CHILDREN) for child in those}
    places = {child: CHILDREN.index(child) for child in sent}
    rows_K = np.stack(list(sent.values()))
    steps_KD = steps(lengths, r)[list(places.values())]
    LAYOUT.floats(rows_K)[:] += steps_KD.astype(np.float32)
    reports = [
        None if child == missing else Report(samples[place], 0.5) for child, place in places.items()
    ]
    return steps_KD, rules.aggregate(rule, r, sent, rows_K, reports)


def noise_at(r: int, times: int) -> Doubles:
    """Return the seeded noise of the cloud's round r, for `times` uploads, [times, D]."""
    drawn = SeededNoise(7, Purpose.PRIVACY_OF_CHILDREN, "cloud", r)
    return np.stack(
        [np.concatenate([drawn.normals(32_768), drawn.normals(D - 32_768)]) for _ in range(times)]
    )


LENGTHS: Final = (0.5, 1.0, 3.0, 1.9, 80.0)


def clipped(steps_KD: Doubles) -> Doubles:
    return steps_KD * np.minimum(1, C / np.linalg.norm(steps_KD, axis=1))[:, None]


def moved(rule: Rule) -> Doubles:
    return LAYOUT.floats(rule.model).astype(np.float64) - 1.0


@pytest.mark.parametrize(
    "tree", [{"name": "fedavg"}, {"name": "fedavgm", "momentum": 0.0}], ids=["mean", "step"]
)
@pytest.mark.parametrize("missing", ["", "b"])
@pytest.mark.parametrize("weights", ["data", "uniform"])
def test_a_mean_gets_one_noise_of_its_largest_weight(
    tree: dict[str, Any], missing: str, weights: str
) -> None:
    rule, samples = (
        rule_of(settings(noise_by="parent"), {**tree, "weights": weights}),
        (10, 20, 40, 20, 10),
    )
    steps_KD, outcome = play(rule, LENGTHS, samples=samples, missing=missing)
    counts = np.array([n if weights == "data" else 1 for n in samples], float) * [
        child != missing for child in CHILDREN
    ]
    shares = counts / counts.sum()
    (noise,) = noise_at(0, 1)
    expected = shares @ clipped(steps_KD) + shares.max() * 1.5 * C * noise
    np.testing.assert_allclose(moved(rule), expected, atol=2e-6)
    assert outcome.facts["clip_norm"] == C and outcome.facts["noise"] == 1.5 * C
    assert not outcome.distances  # of uploads without noise


@pytest.mark.parametrize("name", ["median", "fedcross", "fedmr", "independent", "read by Tempo"])
def test_where_single_uploads_count_each_gets_noise(name: str) -> None:
    options: dict[str, Any] = (
        {"hides_uploads": False} if name == "read by Tempo" else {"tree": {"name": name}}
    )
    rule = rule_of(settings(noise_by="parent"), **options)
    steps_KD, outcome = play(rule, LENGTHS)
    noisy_KD = clipped(steps_KD) + 1.5 * C * noise_at(0, 5)
    expected = np.median(noisy_KD, axis=0) if name == "median" else noisy_KD.mean(0)
    np.testing.assert_allclose(moved(rule), expected, atol=3e-6)
    apart = np.linalg.norm(noisy_KD - expected, axis=1)
    assert list(outcome.distances.values()) == pytest.approx(apart.tolist(), rel=1e-4)


ALLOWED: Final = [
    name for name in LEAST if name not in ("scaffold", "fedgen", "fedbuff", "qfedavg", "fedcda")
]


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize(
    "keys", [{"clip_norm": None, "noise_multiplier": 0.0}, {"clip_norm": 1e6}], ids=["no", "wide"]
)
def test_without_noise_and_clipping_no_bit_of_any_rule_changes(
    name: str, keys: dict[str, Any]
) -> None:
    privacy = settings(noise_by="parent", **{"noise_multiplier": 0.0, **keys})
    rule, plain = rule_of(privacy, LEAST[name]), rule_of(None, LEAST[name])
    assert isinstance(rule, PrivateRule) is (keys["clip_norm"] is not None)
    for r in range(3):
        for each in (rule, plain):
            play(each, LENGTHS, r=r)
        assert np.array_equal(rule.model, plain.model)


# Clipping by quantile

QUANTILE: Final[dict[str, Any]] = {"noise_by": "parent", "quantile": 0.5, "quantile_rate": 0.2}


def test_the_bound_follows_the_noisy_count_of_a_plain_twin() -> None:
    privacy, bound = settings(**QUANTILE), C
    rule = rule_of(privacy)
    counted = max(5 / 20, 2 * 1.5)
    multiplier = (1.5**-2 - counted**-2) ** -0.5
    for r in range(4):
        _, outcome = play(rule, LENGTHS, r=r)
        assert outcome.facts["clip_norm"] == pytest.approx(bound)
        assert outcome.facts["noise"] == pytest.approx(multiplier * bound)
        drawn = SeededNoise(7, Purpose.PRIVACY_OF_CHILDREN, "cloud", r)
        for columns in (32_768, D - 32_768):
            drawn.normals(columns)
        below = sum(length <= bound for length in LENGTHS)
        share = (below + counted * drawn.normals(1)[0]) / 5
        bound *= exp(-0.2 * (share - 0.5))


ROUNDS_OF_NOISE: Final = 40  # the deviation of as many numbers is within 11 % in two of three cases


def released(privacy: PrivacySettings, lengths: Sequence[float], r: int) -> tuple[Doubles, float]:
    """Return what a round of a fresh node releases: the mean of the updates, and its count, by the
    next bound.
    """
    rule = rule_of(privacy)
    play(rule, lengths, r=r)
    mean = moved(rule)
    _, outcome = play(rule, lengths, r=r + 1)
    bound = outcome.facts["clip_norm"]
    assert isinstance(bound, float)
    return mean, len(lengths) * (0.5 - np.log(bound / C) / 0.2)


@pytest.mark.parametrize("multiplier", [0.1, 1.0])
def test_mean_and_count_cost_together_what_the_multiplier_costs(multiplier: float) -> None:
    """Of what two neighbours release, with the same noise: (distance / deviation)^2 of all sums to
    1 / z^2.
    """
    privacy = settings(noise_multiplier=multiplier, **QUANTILE)
    means, counts = zip(
        *(released(privacy, LENGTHS, r) for r in range(0, 2 * ROUNDS_OF_NOISE, 2)), strict=True
    )
    neighbour_mean, neighbour_count = released(privacy, (*LENGTHS[:-1], 0.0), 0)
    count_share = (neighbour_count - counts[0]) / np.std(counts)
    noise_D = means[0] - clipped(steps(LENGTHS)).mean(axis=0)
    mean_share = np.linalg.norm(neighbour_mean - means[0]) / np.std(noise_D)
    assert count_share**2 + mean_share**2 == pytest.approx(multiplier**-2, rel=0.2)


def test_the_bound_comes_to_the_quantile_and_persists(tmp_path: Path) -> None:
    privacy = settings(noise_multiplier=0.0, **QUANTILE)
    rule, lengths = rule_of(privacy), (1.0, 2.0, 4.0, 8.0, 16.0)
    for r in range(60):
        _, outcome = play(rule, lengths, r=r)
    bound = outcome.facts["clip_norm"]
    assert isinstance(bound, float) and 3.5 < bound < 4.6  # the median is 4
    facts = rule.save(tmp_path)
    other = rule_of(privacy)
    other.begin(rule.model.copy())
    other.restore(tmp_path, facts)
    for each in (rule, other):
        _, outcome = play(each, lengths, r=60)
        assert (
            outcome.facts["clip_norm"] == pytest.approx(bound, rel=0.2)
            and outcome.facts["clip_norm"] != C
        )
    assert np.array_equal(rule.model, other.model)


# A node's secret


def test_a_secret_is_drawn_once_and_is_its_users_alone(tmp_path: Path) -> None:
    drawn = count()
    spool = Spool(tmp_path / "device-0")

    def draw(nbytes: int) -> bytes:
        return bytes([next(drawn)]) * nbytes

    first = spool.secret(draw)
    assert (
        first == spool.secret(draw) == Spool(tmp_path / "device-0").secret(draw)
        and len(first) == 32
    )
    assert stat.S_IMODE((tmp_path / "device-0" / "secret").stat().st_mode) == 0o600
    (tmp_path / "device-0" / "secret").write_bytes(b"")  # as after a power loss
    assert len(Spool(tmp_path / "device-0").secret(draw)) == 32
    (tmp_path / "file").write_bytes(b"")
    assert len(Spool(tmp_path / "file" / "device-0").secret(draw)) == 32  # there can be no folder
    memory = Spool(None)
    assert memory.secret(draw) == memory.secret(draw) != first


# The ledger


def experiment_of(tree: Mapping[str, Any]) -> Experiment:
    return parse({"links": {"check": "off"}, **tree})


def test_a_unit_is_counted_in_the_rounds_in_which_it_is_selected() -> None:
    lab = {
        "topology": {"institutions": 2, "devices": 4},
        "cloud": {"privacy": {**DEVICE, "unit": "institution"}},
        "institution": {"rounds": 2, "privacy": DEVICE},
    }
    ledger = PrivacyLedger(experiment_of(lab), LAYOUT)
    once, twice = {"taking_part": ["device-0"]}, {"taking_part": ["device-0", "device-1"]}
    ledger.take(["institution-0"], {"institution-0": [once, twice]}, {"institution-0": 1})
    assert ledger.save() == {"wan": {"institution-0": 1}, "lan": {"device-0": 2, "device-1": 1}}
    assert ledger.epsilons["lan"] == accountant.epsilon(1.5, releases=2, delta=1e-5)
    ledger.take(
        ["institution-0", "institution-1"],
        {"institution-0": [once, {}]},
        {"institution-0": 1, "institution-1": 1},
    )
    counts = ledger.save()
    assert counts["wan"] == {"institution-0": 2, "institution-1": 1}
    # no report: each round
    assert counts["lan"] == {"device-0": 4, "device-1": 2, "device-2": 2, "device-3": 2}
    again = PrivacyLedger(experiment_of(lab), LAYOUT)
    again.restore(counts)
    assert again.epsilons == ledger.epsilons


@pytest.mark.parametrize(
    "chosen", [["device-9"], "device-0", [["device-0"]], None, 7, {"device-0": 1}]
)
def test_a_selection_that_is_none_counts_no_unknown_device(chosen: object) -> None:
    lab = {"topology": {"institutions": 1, "devices": 2}, "institution": {"privacy": DEVICE}}
    ledger = PrivacyLedger(experiment_of(lab), LAYOUT)
    ledger.take(
        ["institution-0"], {"institution-0": [{"taking_part": chosen}]}, {"institution-0": 1}
    )
    assert ledger.save()["lan"].keys() <= {"device-0", "device-1"}


@pytest.mark.parametrize(
    ("keys", "releases"), [({}, 3), ({"sampling_rate": 0.1}, 30)], ids=["shuffled", "poisson"]
)
def test_samples_are_released_in_each_epoch_or_step(keys: dict[str, Any], releases: int) -> None:
    privacy = {**DEVICE, "unit": "sample", **keys}
    lab = {"topology": {"institutions": 0, "devices": 2}, "cloud": {"privacy": privacy}}
    ledger = PrivacyLedger(experiment_of(lab), LAYOUT)
    ledger.take(["device-1"], {}, {"device-0": 2, "device-1": 3})
    assert ledger.save() == {"wan": {"device-1": releases}}
    expected = accountant.epsilon(
        1.5, releases=releases, delta=1e-5, sampling_rate=keys.get("sampling_rate", 1.0)
    )
    assert ledger.epsilons == {"wan": expected}


def test_tasks_of_a_tier_multiply_the_rounds_of_the_next() -> None:
    tiers = [
        {"name": "wan", "children": "region", "number": 1},
        {"name": "metro", "children": "institution", "number": 1, "rounds": 3},
        {"name": "lan", "number": 2, "rounds": 2, "privacy": DEVICE},
    ]
    ledger = PrivacyLedger(experiment_of({"tiers": tiers}), LAYOUT)
    plans = {"region-0": [{}, {}, {}], "institution-0": [{"taking_part": ["device-0"]}] * 6}
    ledger.take(["region-0"], plans, {"region-0": 1})
    assert ledger.save() == {"lan": {"device-0": 6}}
    ledger.take(["region-0"], {"region-0": [{}, {}, {}]}, {"region-0": 1})
    assert ledger.save() == {"lan": {"device-0": 12, "device-1": 6}}


# The experiment

TWO: Final = {"topology": {"institutions": 2, "devices": 6}, "links": {"check": "off"}}


def below(**keys: Any) -> dict[str, Any]:
    """Return an experiment's tables with privacy of devices; keys of the tier besides."""
    privacy = {
        **DEVICE,
        **{key: value for key, value in keys.items() if key in PrivacySettings.model_fields},
    }
    return {
        "institution": {
            "privacy": privacy,
            **{key: keys[key] for key in keys.keys() - privacy.keys()},
        }
    }


def test_the_table_is_written_and_read_again() -> None:
    experiment = parse(
        {
            **TWO,
            "cloud": {"privacy": {**DEVICE, "unit": "institution", **QUANTILE, "max_epsilon": 9.0}},
        }
    )
    again = parse(tomllib.loads(to_toml(experiment)))
    assert (
        again.digest == experiment.digest and again.tiers[0].privacy == experiment.tiers[0].privacy
    )


def warnings(privacy: Mapping[str, Any], **tables: Any) -> str:
    return "\n".join(lint.warnings(parse({**TWO, "institution": {"privacy": privacy, **tables}})))


def test_what_the_rule_makes_of_the_noise_is_said_before_the_run() -> None:
    parent = {**DEVICE, "noise_by": "parent"}
    assert (
        "fedavg takes a mean, which alone has noise: 1 in each column with 3 equal uploads"
        in warnings(parent)
    )
    assert "each upload has noise of 3 in each column; a mean of 3 uploads 1.732" in warnings(
        DEVICE
    )
    several = warnings(parent, aggregation={"name": "fedcross", "on_new_model": "recentre"})
    assert (
        "fedcross makes models of single uploads: each of them has noise of 3 in each column"
        in several
    )
    epsilon = accountant.epsilon(1.5, releases=10, delta=1e-5)
    assert (
        f"takes part in all 10 global rounds is {epsilon:.4g}, without amplification"
        in warnings(DEVICE)
    )
    assert "without amplification by sampling" in warnings(DEVICE, participation=0.5)
    assert "Nobody is protected" in warnings({**DEVICE, "noise": "seeded"})
    assert "training losses and numbers of samples are sent without noise" in warnings(DEVICE)
    assert "oort reads losses without noise" in warnings(
        DEVICE, selection="oort", participation=0.5
    )
    assert "with Poisson sampling" in warnings({**DEVICE, "unit": "sample", "sampling_rate": 0.01})
    assert "privacy" not in "\n".join(lint.warnings(parse(TWO)))


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        ({}, []),
        ({"normalise": "own"}, ['data.normalise = "own": mean and deviation of the samples.']),
        (
            {"dataset": "a.csv", "target_column": "y"},
            [
                "data.standardise: mean and deviation of each feature.",
                "data.classes is not set: the classes that occur.",
            ],
        ),
        ({"dataset": "a.csv", "target_column": "y", "standardise": False, "classes": 2}, []),
        ({"dataset": "a.csv", "target_column": "y", "partition": "private", "classes": 2}, []),
        ({"dataset": "mine:load", "classes": 2}, []),
        ({"dataset": "mine:load"}, ["data.classes is not set: the classes that occur."]),
        ({"dataset": "mine:load", "targets": "numbers"}, []),
    ],
)
def test_what_is_computed_of_all_samples_is_named_before_the_run(
    data: dict[str, Any], lines: list[str]
) -> None:
    tree = {**TWO, "data": data, "model": {"name": "mine:net"}, "institution": {"privacy": DEVICE}}
    said = (
        "institution.privacy.unit = 'device': epsilon does not cover what is computed before "
        "the training. "
    )
    found = [
        line.removeprefix(said) for line in lint.warnings(parse(tree)) if line.startswith(said)
    ]
    assert found == lines
    assert not any(
        "before the training" in line for line in lint.warnings(parse({**tree, "institution": {}}))
    )


# Labs in virtual time

LAB: Final[dict[str, Any]] = {
    "rounds": 4,
    "links": {"check": "off"},
    "topology": {"institutions": 3, "devices": 9},
    "cloud": {"privacy": {**DEVICE, "unit": "institution", "noise": "seeded", **QUANTILE}},
    "institution": {"rounds": 2, "participation": 0.67, "privacy": {**DEVICE, "noise": "seeded"}},
}
TURNED: Final[dict[str, Any]] = {
    **LAB,
    "cloud": {"privacy": {**DEVICE, "unit": "institution"}, "aggregation": "fedmr"},
    "institution": {"rounds": 2, "privacy": {**DEVICE, **QUANTILE}},
}


LABS: Final = {
    "seeded": KilledLab(LAB, model_bytes=10_000),
    "system": KilledLab(TURNED, model_bytes=10_000),
}


@pytest.mark.parametrize(
    ("noise", "node", "share"),
    [
        ("seeded", "cloud", 0.5),
        ("seeded", "device-4", 0.9),
        ("system", "cloud", 0.9),
        ("system", "institution-1", 0.5),
    ],
)
def test_a_killed_node_adds_the_noise_that_it_would_have_added(
    noise: str, node: str, share: float
) -> None:
    """A secret is drawn once: by the processes that begin, in both labs alike."""
    LABS[noise].assert_same_if_killed(node, share)


def test_secrets_of_nodes_differ_and_decide_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[bytes] = []
    plain = SimulatedWorld.noise

    def noise(world: SimulatedWorld, nbytes: int) -> bytes:
        found = plain(world, nbytes)
        drawn.append(found)
        return found

    monkeypatch.setattr(SimulatedWorld, "noise", noise)
    once = LABS["system"].run(spool=False)
    assert len(set(drawn)) == len(drawn) == 3  # of the institutions
    monkeypatch.setattr(SimulatedWorld, "noise", lambda world, nbytes: plain(world, nbytes)[::-1])
    assert LABS["system"].run(spool=False).digest != once.digest


# In this process, and in processes

TINY: Final[dict[str, Any]] = {
    "seed": 3,
    "rounds": 3,
    "topology": {"institutions": 2, "devices": 4},
    "model": {"name": "mlp_digits"},
    "training": {"batch_size": 2000, "learning_rate": 0.2},
}
NOISY: Final[dict[str, Any]] = {
    "cloud": {
        "privacy": {**DEVICE, "unit": "institution", "noise_multiplier": 0.01, "noise": "seeded"}
    },
    "institution": {
        "rounds": 2,
        "privacy": {**DEVICE, "noise_by": "parent", "noise": "seeded", "noise_multiplier": 0.1},
    },
}


def direct(root: Path, *tables: Mapping[str, Any], **options: Any) -> Path:
    return run_direct(root, reduce(or_, tables, TINY), **options)


def rows(path: Path) -> list[dict[str, str]]:
    return table(path / "rounds.csv")


def test_neither_noise_nor_clipping_gives_the_bits_of_no_privacy(tmp_path: Path) -> None:
    plain = direct(tmp_path)
    nothing = {"noise_multiplier": 0.0}
    tables = {"cloud": {"privacy": {"unit": "institution", **nothing}}}
    for unit in ("device", "sample"):
        tables |= {"institution": {"privacy": {"unit": unit, **nothing}}}
        assert tensors(direct(tmp_path, tables)) == tensors(plain)


@pytest.mark.parametrize(("unit", "noise"), [("device", "system"), ("sample", "seeded")])
def test_a_resumed_run_has_the_same_noise(
    unit: str, noise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = count()
    monkeypatch.setattr(RealWorld, "noise", lambda _, nbytes: bytes([next(drawn)]) * nbytes)
    privacy = {"institution": {"privacy": {**DEVICE, "unit": unit, "noise": noise}}}
    whole = direct(tmp_path, privacy)
    drawn = count()
    killed = direct(tmp_path, privacy, until=2)
    resumed = resumed_run(killed)
    assert tensors(resumed) == tensors(whole)
    assert [row["epsilon_lan"] for row in rows(resumed)] == [
        row["epsilon_lan"] for row in rows(whole)
    ]
    drawn = count(100)
    assert (tensors(direct(tmp_path, privacy)) == tensors(whole)) is (noise == "seeded")
    assert not list((resumed / "spool").rglob("secret"))  # it goes with the run


def test_a_run_ends_before_the_round_that_could_exceed_its_budget(tmp_path: Path) -> None:
    seen: dict[str, Mapping[str, object]] = {}
    privacy = {**DEVICE, "noise_multiplier": 2.0, "max_epsilon": 3.5}
    most = max(count for count in range(1, 99) if PrivacySettings(**privacy).epsilon(count) <= 3.5)
    tables = {"rounds": 9, "evaluation": {"every": 9}, "institution": {"privacy": privacy}}
    path = direct(tmp_path, tables, observe=lambda event, facts: seen.update({event: facts}))
    found = rows(path)
    assert len(found) == most == 2 and float(found[-1]["epsilon_lan"]) <= 3.5
    assert (
        seen["finished"]["stopped"] == "privacy budget" and seen["finished"]["global_round"] == most
    )
    assert float(found[-1]["accuracy"]) >= 0  # the last model is evaluated
    assert seen["finished"]["epsilon_lan"] == pytest.approx(
        float(found[-1]["epsilon_lan"]), rel=1e-5
    )
    assert (path / "checkpoints" / f"round-{most:06d}.safetensors").exists()
    records = [GlobalRoundRecord.read(row) for row in found]
    assert [record.epsilon["lan"] for record in records] == [
        pytest.approx(accountant.epsilon(2.0, releases=count + 1, delta=1e-5), rel=1e-5)
        for count in range(most)
    ]
    page = compose([Run(path)])
    assert (
        "lan: each device, epsilon" in page.html() and "no amplification by sampling" in page.html()
    )


def test_a_run_from_a_private_model_prints_that_its_epsilon_is_not_all(tmp_path: Path) -> None:
    """Its ledger begins at none: the same epsilon as of the run before, and a line with what is
    missing.
    """
    private = {"institution": {"privacy": {**DEVICE, "noise": "seeded"}}}
    first = direct(tmp_path / "first", private)
    again = direct(
        tmp_path / "again", private, {"model": {**TINY.get("model", {}), "initial": str(first)}}
    )
    assert rows(again)[-1]["epsilon_lan"] == rows(first)[-1]["epsilon_lan"]
    said = (
        "epsilon counts this run alone. What that model has cost the same devices is to be added."
    )
    for path, known in ((first, True), (again, False)):
        run = Run(path)
        page = compose([run])
        assert any(line.endswith(said) for line in lint.warnings(run.experiment)) is not known
        assert ("without what model.initial has cost" in page.html()) is not known


def test_a_gauge_has_epsilon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Metrics] = []
    plain = Metrics.__init__

    def remembered(metrics: Metrics) -> None:
        plain(metrics)
        made.append(metrics)

    monkeypatch.setattr(Metrics, "__init__", remembered)
    path = direct(tmp_path, NOISY)
    labels = {"role": "cloud", "node": "cloud", "parent": "", "tier": "lan", "unit": "device"}
    found = made[-1]._registry.get_sample_value("fedstrata_privacy_epsilon", labels)
    assert found == pytest.approx(float(rows(path)[-1]["epsilon_lan"]), rel=1e-5)


def test_clipping_alone_has_an_infinite_epsilon(tmp_path: Path) -> None:
    path = direct(tmp_path, {"institution": {"privacy": {**DEVICE, "noise_multiplier": 0.0}}})
    (*_, last) = rows(path)
    assert last["epsilon_lan"] == "inf" and GlobalRoundRecord.read(last).epsilon == {"lan": None}
    assert PrivacySettings(**{**DEVICE, "noise_multiplier": 0.0}).epsilon(1) == inf


def test_only_seeded_noise_can_be_replayed(tmp_path: Path) -> None:
    seeded = direct(tmp_path, NOISY)
    again = replayed(Run(seeded), tmp_path, accelerator="cpu", observe=lambda event, facts: None)
    assert tensors(again) == tensors(seeded)
    secret = direct(tmp_path, {"rounds": 1, "institution": {"privacy": DEVICE}})
    with pytest.raises(
        InvalidExperiment,
        match=r"institution\.privacy\.noise = 'system': the noise.*Use \"seeded\"",
    ):
        replayed(Run(secret), tmp_path, accelerator="cpu", observe=lambda event, facts: None)


class Normalised(nn.Sequential):
    """A model with batch norm."""

    def __init__(self, **_: Any) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))


@pytest.mark.parametrize("noise_by", ["child", "parent"])
@pytest.mark.parametrize("unit", ["device", "institution"])
def test_a_model_with_batch_statistics_is_refused(unit: str, noise_by: str, tmp_path: Path) -> None:
    table = "institution" if unit == "device" else "cloud"
    tree = {table: {"privacy": {**DEVICE, "unit": unit, "noise_by": noise_by}}}
    tree |= {"model": {"name": "tests.test_privacy:Normalised"}}
    with pytest.raises(
        InvalidExperiment, match=r"privacy\.unit = '(device|institution)': the model has buffers"
    ):
        direct(tmp_path, tree)
