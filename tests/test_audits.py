"""Audits: their statistics against scipy, what attacks find, and what they do not find."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy import stats

from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.deploy.audits import canaries, estimates, inversion, membership
from fedstrata.deploy.audits.inversion_trials import InversionTrials
from fedstrata.deploy.audits.samples import of_tests
from fedstrata.deploy.audits.uploads import AuditedModel, upload
from tests.helpers.commands import invoke
from tests.helpers.direct import run_direct
from tests.helpers.examples import slow

LAB: Final[dict[str, Any]] = {
    "rounds": 1,
    "topology": {"institutions": 0, "devices": 10},
    "model": {"name": "mlp_digits"},
    "training": {"epochs": 2, "batch_size": 10, "learning_rate": 0.05},
}
# Noisy digits, which a net can only learn by heart.
LEARNED: Final[dict[str, Any]] = {
    **LAB,
    "topology": {"institutions": 0, "devices": 2},
    "data": {"noise": 1.0, "partition": "dirichlet_overlap", "partition_size": 100},
    "training": {"epochs": 40, "batch_size": 10, "learning_rate": 0.01},
}
SEEN: Final = 20.0  # dB, from which a digit is recognised


def lab(**tables: Any) -> Experiment:
    return parse({**LAB, **tables})


@pytest.mark.parametrize(("found", "count"), [(0, 10), (3, 10), (10, 10), (700, 1000)])
def test_intervals_of_shares_are_those_of_scipy(found: int, count: int) -> None:
    exact = stats.binomtest(found, count).proportion_ci(method="exact")
    assert estimates.clopper_pearson(found, count) == pytest.approx(
        (exact.low, exact.high), abs=1e-9
    )


def test_the_area_and_the_true_positives_are_those_of_pairs() -> None:
    chance = np.random.default_rng(1)
    members = chance.normal(1, 1, 300)
    others = np.append(chance.normal(0, 1, 199), members[0])
    area = estimates.auc(members, others, chance)
    twin = stats.mannwhitneyu(members, others).statistic / (300 * 200)
    assert (
        area.value == pytest.approx(twin)
        and area.low < stats.norm.cdf(1 / math.sqrt(2)) < area.high
    )
    third = sorted(others)[-3]  # two others, 1 %, are above it
    assert estimates.true_positives(members, others).value == np.mean(members > third)


@pytest.mark.parametrize("delta", [0.0, 1e-5])
@pytest.mark.parametrize(("guesses", "right"), [(100, 100), (100, 90), (400, 300), (100, 50)])
def test_the_bound_of_one_run_is_where_scipy_refutes_no_more(
    guesses: int, right: int, delta: float
) -> None:
    found = estimates.least_epsilon(1000, guesses, right, delta=delta, p=0.05)

    def p_value(epsilon: float) -> float:
        binomial = stats.binom(guesses, 1 / (1 + math.exp(-epsilon)))
        worst = max(
            (binomial.sf(right - i - 1) - binomial.sf(right - 1)) / i for i in range(1, right + 1)
        )
        return float(binomial.sf(right - 1) + 2 * 1000 * delta * worst)

    assert p_value(found) == pytest.approx(0.05) if found else p_value(0.0) >= 0.05
    assert bool(found) == (right > guesses / 2)


@pytest.mark.parametrize("up", ["fp32", "int8"])
def test_an_upload_is_that_of_a_run(tmp_path: Path, up: str) -> None:
    alone = lab(topology={"institutions": 0, "devices": 1}, transfer={"wan": {"up": up}})
    first = AuditedModel.first(alone)
    sent = upload(alone, "device-0", first, epochs=2, number=0)
    final = load_file(run_direct(tmp_path, alone) / "model.safetensors")
    for name, values in first.layout.views(sent.row).items():
        assert (values == final[name]).all()


def psnr(experiment: Experiment, kind: str, attack: str, number: int = 0) -> float:
    """Return the PSNR of a trial in dB."""
    trials = InversionTrials(experiment, "device-0", count=1)
    made = trials.kinds[kind](number)
    answers = inversion.by_first_layer(made.gradient, made.like)
    if attack in ("DLG", "cosine"):
        module = trials.model.read(trials.model.row)
        answers[attack] = inversion.restored(
            module, made.gradient, made.like, attack=attack, seed=number
        )  # type: ignore[arg-type]
    tests = of_tests(experiment).inputs
    span = float(tests.max() - tests.min())
    return inversion.psnr(answers[attack], made.true.inputs, span=span)[0]


TOPK: Final = {"transfer": {"wan": {"up": {"name": "topk", "share": 0.02}}}}
NOISE: Final = {
    "cloud": {
        "privacy": {
            "unit": "sample",
            "clip_norm": 1.0,
            "noise_multiplier": 0.1,
            "delta": 1e-5,
            "noise": "seeded",
        }
    }
}
RESTORED: Final[list[tuple[dict[str, Any], str, str, bool]]] = [
    ({}, "one step", "DLG", True),
    ({}, "5 epochs", "DLG", False),
    ({"cloud": {"aggregation": "fedmr"}}, "one step, next model of fedmr", "first layer", True),
    ({"cloud": {"aggregation": "fedmr"}}, "one step, next model of fedmr", "DLG", False),
    ({"cloud": {"aggregation": "fedcross"}}, "one step, next model of fedcross", "DLG", True),
    ({"transfer": {"wan": {"up": "int8"}}}, "one step, int8", "DLG", True),
    (TOPK, "one step, topk", "DLG", False),
    (NOISE, "one step, noise 0.1", "DLG", False),
    ({}, "one step", "cosine", True),
]


@pytest.mark.parametrize(("tables", "kind", "attack", "seen"), slow(RESTORED, but=RESTORED[:3]))
def test_inversion_restores_a_digit_of_one_step_and_none_of_five_epochs(
    tables: Mapping[str, Any], kind: str, attack: str, seen: bool
) -> None:
    assert (psnr(lab(**tables), kind, attack) > SEEN) == seen


def test_members_are_found_in_a_model_that_learned_them_by_heart_alone() -> None:
    experiment = parse(LEARNED)
    pairs = membership.MemberPairs.of(experiment, "device-0")
    assert pairs.own("device-0") > 80
    first = AuditedModel.first(experiment)
    of_nothing = membership.success(pairs.phi_2n(first, first.row), 1)["AUC"]
    assert of_nothing.low < 0.5 < of_nothing.high
    for phi_2n in membership.measured(experiment, "device-0", pairs, run=None):
        assert membership.success(phi_2n, 1)["AUC"].low > 0.6


@pytest.mark.slow
def test_shadow_runs_find_more_members_than_the_loss() -> None:
    experiment = parse(LEARNED)
    pairs = membership.MemberPairs.of(experiment, "device-0")
    final, _ = membership.measured(experiment, "device-0", pairs, run=None)
    outs = np.random.default_rng(1).random((6, len(pairs.members))) < 0.5
    outs[1::2] = ~outs[::2]
    shadows = [membership.shadow(experiment, "device-0", pairs, out=out)[0] for out in outs]
    by_loss = membership.success(final, 1)["AUC"]
    assert membership.success(membership.lira(final, shadows, outs), 1)["AUC"].value > by_loss.value


TIGHTEST: Final = {"noise_multiplier": 0.7}
SETTINGS: Final[list[dict[str, Any]]] = [
    TIGHTEST,
    {"noise_multiplier": 0.7, "batch_size": 32},
    {"noise_multiplier": 0.5},
    {"noise_multiplier": 1.0},
    {"noise_multiplier": 2.0},
    {"noise_multiplier": 4.0},
    {"noise_multiplier": 1.0, "clip_norm": 0.1},
    {"noise_multiplier": 1.0, "epochs": 3},
    {"noise_multiplier": 0.7, "sampling_rate": 0.1},
    {"noise_multiplier": 0.7, "noise": "system"},
]


@pytest.mark.parametrize("settings", slow(SETTINGS, but=SETTINGS[:2]))
def test_canaries_bound_epsilon_from_below(settings: Mapping[str, Any]) -> None:
    privacy = {"unit": "sample", "clip_norm": 1.0, "delta": 1e-5, "noise": "seeded", **settings}
    work = {"batch_size": 5000, "epochs": 1, "learning_rate": 0.05}
    training = {name: privacy.pop(name, value) for name, value in work.items()}
    found = canaries.bound(lab(cloud={"privacy": privacy}, training=training), "device-0")
    assert 0 <= found.value < found.high
    if settings is TIGHTEST:
        assert found.value > 0.3 * found.high


def test_the_command_prints_numbers_and_what_they_do_not_show(tmp_path: Path) -> None:
    run = run_direct(tmp_path, lab(topology={"institutions": 0, "devices": 2}))
    done = invoke("audit", run, "--only", "membership", "--device", "device-1", "--format", "json")
    assert done.exit_code == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["of"] for row in rows] == [*["final model"] * 2, *["upload of device-1"] * 2]
    assert all(row["low"] <= row["value"] <= row["high"] and row["limits"] for row in rows)


@pytest.mark.slow
def test_a_picture_has_the_true_and_the_restored_digits(tmp_path: Path) -> None:
    (tmp_path / "lab.toml").write_text("[model]\nname = 'mlp_digits'\n")
    picture = tmp_path / "digits.svg"
    done = invoke("audit", tmp_path / "lab.toml", "--trials", "2", "--picture", picture)
    assert done.exit_code == 0 and "no canaries: " in done.stderr, done.stderr
    # of two kinds the true digit, the mean one, and those of three attacks
    assert picture.read_text().count("<rect") == 2 * 5 * 64


REFUSED: Final = (
    ("--only colours", "--only", 2),
    ("--shadows 3", "--shadows", 2),
    ("--shadows 4 --device device-77", "--device = 'device-77': no device has this name. ", 4),
    ("--set training.trainer.name=plain", "training.trainer", 4),
    ("--only canaries", "canaries audit epsilon of samples. Set it to", 4),
    ("--only inversion --picture /proc/x.svg", "/proc/x.svg", 6),
)


@pytest.mark.parametrize(("words", "problem", "code"), REFUSED)
def test_what_cannot_be_audited_is_refused(
    words: str, problem: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "lab.toml").write_text("[model]\nname = 'mlp_digits'\n")
    done = invoke("audit", tmp_path / "lab.toml", *words.split())
    assert done.exit_code == code and problem in " ".join(done.stderr.split()), done.stderr


@pytest.mark.parametrize(
    ("draw", "code"), [("now.chance.random()", 0), ("len(DRAWN.append(0) or DRAWN)", 1)]
)
def test_an_attack_of_ones_own_is_checked(
    draw: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"attack_{code}"
    text = f"""
from fedstrata import Attack
DRAWN = []
class Mine(Attack):
    factor: float = 1.0
    def upload(self, now):
        return now.received_D + self.factor * {draw}
"""
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    done = invoke("check", f"{name}:Mine", "--set", "factor=2.0", "--format", "json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.exit_code == code and rows[0]["kind"] == "attack", done.output
    assert rows[0]["item"] == "upload" and rows[0]["right"] == (code == 0)
