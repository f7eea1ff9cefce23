"""Adversaries: attacks against twins of their papers' formulas, who attacks and when, and labs with
them.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from math import erf, sqrt
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from fedstrata import Run, load
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.common.methods.adversary import Adversaries, Adversary, NearAdversaries
from fedstrata.common.methods.attack import ATTACKS, Attack, AttackedUpload, LabelledSamples
from fedstrata.common.methods.rule import Rule
from fedstrata.common.methods.statistics import Doubles
from fedstrata.deploy.planning.workload import with_tiers
from fedstrata.deploy.results import attacks
from tests.helpers.commands import command, fedstrata, run_lab, table, tensors
from tests.helpers.direct import resumed_run, run_direct
from tests.helpers.rules import LAYOUT, Report, aggregate, rule_of
from tests.helpers.scenarios import TREE, KilledLab
from tests.simulation.outcome import model_digest

pytestmark = pytest.mark.usefixtures("warm")

D: Final = LAYOUT.parameters
LAB: Final[dict[str, Any]] = {
    "rounds": 4,
    "topology": {"institutions": 2, "devices": 6},
    "institution": {"rounds": 2},
    "model": "mlp_digits",
    "training": {"epochs": 1, "learning_rate": 0.05},
}
EVERYWHERE: Final[list[dict[str, Any]]] = [
    {"attack": {"name": "gaussian", "std": 0.05}, "nodes": ["device-0"], "probability": 0.5},
    {"attack": "label_flip", "share": 0.3, "from_round": 2},
    {"attack": {"name": "sign_flip"}, "nodes": ["institution-1"], "probability": 0.5},
    {"attack": {"name": "equivocation", "std": 0.01}, "nodes": ["institution-0"]},
    {"attack": {"name": "equivocation", "std": 0.01}, "links": ["device-3"]},
]

Floats = npt.NDArray[np.float32]


def attack(name: str, **keys: Any) -> Any:
    return ATTACKS[name](name=name, **keys)


def now(
    known: Sequence[Floats] = (), *, colluders: int = 1, children: int = 0, size: int = 50
) -> AttackedUpload:
    source = np.random.default_rng(3)
    trained, received = (source.normal(size=size).astype(np.float32) for _ in range(2))
    return AttackedUpload(trained, received, np.random.default_rng(7), known, colluders, children)


# Single adversaries

TWINS: Final[dict[str, tuple[dict[str, Any], Callable[[Doubles, Doubles, Doubles], Doubles]]]] = {
    "sign_flip": ({"factor": 2.0}, lambda v, z, normal: z - 2 * (v - z)),
    "scaled": ({"factor": 8.0}, lambda v, z, normal: z + 8 * (v - z)),
    "gaussian": ({"std": 0.3}, lambda v, z, normal: v + 0.3 * normal),
    "free_rider": ({"std": 0.1}, lambda v, z, normal: z + 0.1 * normal),
    "backdoor": ({"factor": 3.0}, lambda v, z, normal: z + 3 * (v - z)),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_single_adversary_sends_what_its_formula_gives(name: str) -> None:
    keys, twin = TWINS[name]
    given = now()
    normal = np.random.default_rng(7).standard_normal(50)
    wanted = twin(given.trained_D.astype(np.float64), given.received_D.astype(np.float64), normal)
    np.testing.assert_allclose(attack(name, **keys).upload(given), wanted, rtol=1e-6, atol=1e-6)


def test_labels_are_flipped_and_the_flipped_ones_are_its_tests() -> None:
    samples = LabelledSamples(np.zeros((6, 2)), np.array([0, 1, 2, 1, 4, 3]), 5)
    chance = np.random.default_rng(0)
    assert attack("label_flip").poison(samples, chance).labels.tolist() == [4, 3, 2, 3, 0, 1]
    pair = attack("label_flip", mode="pair", source=1, target=4)
    assert pair.poison(samples, chance).labels.tolist() == [0, 4, 2, 4, 4, 3]
    assert pair.targets(samples).labels.tolist() == [4, 4], "of class 1"
    assert len(attack("label_flip").targets(samples).labels) == 5, "label 2 of 0 to 4 stays"


def test_a_backdoor_marks_a_share_of_the_samples_and_tests_of_all_other_classes() -> None:
    images = np.arange(4 * 9, dtype=np.uint8).reshape(4, 1, 3, 3)
    samples = LabelledSamples(images, np.array([0, 1, 2, 1]), 3)
    backdoor = attack("backdoor", target=2, share=0.5)
    found = backdoor.poison(samples, np.random.default_rng(1))
    changed = [k for k in range(4) if (found.images[k] != images[k]).any()]
    assert len(changed) == 2 and (found.images[changed, 0, 1:, 1:] == 35).all()
    assert (found.images[changed, 0, 0] == images[changed, 0, 0]).all() and (
        found.labels[changed] == 2
    ).all()
    assert images.max() == 35 and images[0, 0, 2, 2] == 8, "what it gets is not written"
    tests = backdoor.targets(samples)
    assert tests.labels.tolist() == [2, 2, 2] and (tests.images[:, 0, 1:, 1:] == 35).all()


# Colluders, on the same uploads


def uploads(count: int, size: int = 40) -> list[Floats]:
    return list(np.random.default_rng(5).normal(size=(count, size)).astype(np.float32))


@pytest.mark.parametrize(("count", "colluders"), [(10, 2), (25, 6), (50, 24), (5, 4)])
def test_lie_is_the_papers_and_hides_behind_a_majority(count: int, colluders: int) -> None:
    """The paper's example of 50 workers, 24 of them corrupted: s = 2, and z is the quantile of 24 /
    26.
    """
    known = uploads(colluders)
    found = attack("lie").upload(now(known, colluders=colluders, children=count, size=40))
    s = count // 2 + 1 - colluders
    z = 0.0
    if s > 0:
        share = (count - colluders - s) / (count - colluders)
        z = min(np.arange(-4, 4, 1e-4), key=lambda z: abs(0.5 * (1 + erf(z / sqrt(2))) - share))
    stack = np.array(known, np.float64)
    mean, deviation = (
        stack.sum(0) / colluders,
        np.sqrt(((stack - stack.mean(0)) ** 2).sum(0) / colluders),
    )
    np.testing.assert_allclose(found, mean - z * deviation, atol=2e-4)
    exact = attack("lie", z=1.5).upload(now(known, colluders=colluders, children=count, size=40))
    np.testing.assert_allclose(exact, mean - 1.5 * deviation, rtol=1e-6, atol=1e-6)
    normal = np.random.default_rng(1).normal(size=100_000)
    assert s <= 0 or abs(np.mean(normal > -z) - share) < 0.01, (
        "so many honest ones are on its other side"
    )


@pytest.mark.parametrize("direction", ["std", "unit", "sign"])
@pytest.mark.parametrize("name", ["min_max", "min_sum"])
def test_min_max_and_min_sum_are_as_far_as_their_bounds_allow(name: str, direction: str) -> None:
    """The twin searches gamma by halving, as the paper's algorithm 1."""
    known, given = uploads(7), now(size=40)
    given = now(known, colluders=7, children=20, size=40)
    z = given.received_D.astype(np.float64)
    steps = np.array(known, np.float64) - z
    mean = steps.mean(0)
    way = {"std": -steps.std(0), "unit": -mean / np.linalg.norm(mean), "sign": -np.sign(mean)}[
        direction
    ]
    between = np.array([[np.linalg.norm(a - b) for b in steps] for a in steps])

    def fits(gamma: float) -> bool:
        far = np.linalg.norm(mean + gamma * way - steps, axis=1)
        if name == "min_max":
            return bool(far.max() <= between.max())
        return bool((far**2).sum() <= (between**2).sum(1).max())

    gamma, step = 50.0, 50.0
    best = 0.0
    while step > 1e-12:
        step /= 2
        if fits(gamma):
            best, gamma = gamma, gamma + step
        else:
            gamma -= step
    found = attack(name, direction=direction).upload(given)
    assert best > 0.1
    np.testing.assert_allclose(found, z + mean + best * way, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("knows", "known"), [("siblings", [0, 2, 4]), ("colluders", [1, 3])])
@pytest.mark.parametrize("name", ["lie", "min_max", "min_sum"])
def test_a_parent_replaces_the_uploads_of_colluders_before_its_rule(
    name: str, knows: str, known: list[int]
) -> None:
    models_KD = np.random.default_rng(2).normal(size=(5, D)).astype(np.float32)
    keys = {"z": 1.0} if name == "lie" else {}
    settings = Adversaries(attack={"name": name, **keys}, nodes=["c1", "c3"], knows=knows)  # type: ignore[arg-type]
    children = {child: Adversary(child, settings, 1, 1) for child in ("c1", "c3")}
    rule = rule_of(
        {"name": "fedavg", "weights": "uniform"}, adversaries=NearAdversaries(None, children, 1)
    )
    mean = aggregated_mean(rule, models_KD)
    wanted = attack(name, **keys).upload(
        AttackedUpload(
            models_KD[1],
            np.zeros(D, np.float32),
            np.random.default_rng(0),
            list(models_KD[known]),
            2,
            5,
        )
    )
    honest = models_KD[[0, 2, 4]].astype(np.float64)
    np.testing.assert_allclose(mean, (honest.sum(0) + 2 * wanted) / 5, rtol=1e-6, atol=1e-6)


def near(attack: Mapping[str, Any], **keys: Any) -> NearAdversaries:
    """Return the adversaries of one table near a parent."""
    settings = Adversaries(attack=attack, **keys)  # type: ignore[arg-type]
    names = settings.nodes or settings.links
    return NearAdversaries(None, {name: Adversary(name, settings, 1, 1) for name in names}, 1)


def test_a_link_changes_the_model_of_its_child_alone() -> None:
    equivocation = near({"name": "equivocation", "std": 0.5}, links=["c1", "c2"])
    children = ["c0", "c1", "c2", "c3"]
    rule = rule_of({"name": "fedavg"}, adversaries=equivocation, start=1.0)
    plain = rule_of({"name": "fedavg"}, start=1.0)
    honest, first, second = rule.dispatch(0, children)
    assert [each[1] for each in (honest, first, second)] == [["c0", "c3"], ["c1"], ["c2"]], (
        "one stream for those whose model is the rule's"
    )
    ((wanted, _),) = plain.dispatch(0, children)
    np.testing.assert_array_equal(honest[0], wanted)
    for (row, _), child in ((first, "c1"), (second, "c2")):
        floats = LAYOUT.floats(row)
        lie = equivocation.children[child].dispatched(0, child, LAYOUT.floats(wanted)[:D])
        np.testing.assert_array_equal(floats[:D], lie)
        np.testing.assert_array_equal(floats[D:], LAYOUT.floats(wanted)[D:], "only parameters")
    assert rule.reads_start and not rule_of({"name": "fedavg"}).reads_start


class Both(Attack):
    """An attack of both directions."""

    def upload(self, now: AttackedUpload) -> Floats:
        return now.received_D - 1

    def dispatch(self, model_D: Floats, chance: np.random.Generator) -> Floats:
        return model_D + 2


class Counting(Attack):
    """An attack that sends how many colluders and uploads it knows of."""

    def upload(self, now: AttackedUpload) -> Floats:
        return np.full_like(now.trained_D, 10 * now.colluders + now.children)


def test_an_adversary_alone_knows_of_no_other_upload() -> None:
    settings = Adversaries(attack={"name": f"{__name__}:Counting"}, nodes=["c1"])  # type: ignore[arg-type]
    model_D = np.zeros(D, np.float32)
    assert {*Adversary("c1", settings, 1, 1).uploaded(0, model_D, model_D)} == {10.0}


@pytest.mark.parametrize(("place", "sent"), [("links", 3.0), ("nodes", 1.0)])
def test_a_colluder_changes_what_it_sends_and_a_link_also_what_it_gets(
    place: str, sent: float
) -> None:
    lies = near({"name": f"{__name__}:Both"}, **{place: ["c1"]}, knows="siblings")
    rule = rule_of({"name": "fedavg", "weights": "uniform"}, adversaries=lies, start=1.0)
    received = {child: row for row, those in rule.dispatch(0, ["c0", "c1"]) for child in those}
    assert LAYOUT.floats(received["c1"])[0] == sent and LAYOUT.floats(received["c0"])[0] == 1.0


def test_a_link_changes_an_upload_on_its_own() -> None:
    """On it nobody knows the uploads of others, nor how many there are."""
    models_KD = np.random.default_rng(2).normal(size=(3, D)).astype(np.float32)
    weights = {"name": "fedavg", "weights": "uniform"}
    flipped = near({"name": "sign_flip", "factor": 2.0}, links=["c1"])
    mean = aggregated_mean(rule_of(weights, adversaries=flipped), models_KD)
    sent = models_KD * np.array([[1.0], [-2.0], [1.0]])
    np.testing.assert_allclose(mean, sent.sum(0) / 3, rtol=1e-5, atol=1e-6)


def aggregated_mean(rule: Rule, models_KD: Floats) -> Floats:
    rows_K = np.zeros((len(models_KD), LAYOUT.row_bytes), np.uint8)
    LAYOUT.floats(rows_K)[:, :D] = models_KD
    children = [f"c{k}" for k in range(len(models_KD))]
    rule.dispatch(0, children)
    aggregate(rule, 0, children, rows_K, [Report(10, 0.5) for _ in children])
    return LAYOUT.floats(rule.model)[:D]


# Who attacks, and when


def test_adversaries_are_named_drawn_by_the_seed_or_all_below_an_institution() -> None:
    def at(**keys: Any) -> dict[str, str]:
        found = parse(LAB | keys).attackers.at
        return {name: each.attack.name for name, each in found.items()}

    below = {"attack": "scaled", "below": "institution-1"}
    drawn = {"attack": "sign_flip", "share": 0.5}
    assert list(at(adversaries=[below])) == ["device-3", "device-4", "device-5"]
    several = [at(adversaries=[below, drawn], seed=seed) for seed in range(1, 20)]
    assert all([*each.values()].count("sign_flip") == 3 for each in several), (
        "others than those of the first table"
    )
    several = [at(adversaries=[drawn], seed=seed) for seed in range(1, 20)]
    assert len({tuple(each) for each in several}) > 5 and all(len(each) == 3 for each in several)
    assert at(adversaries=[drawn | {"below": "institution-0", "share": 0.34}], seed=4).keys() < {
        "device-0",
        "device-1",
        "device-2",
    }


def test_whether_one_attacks_depends_on_seed_name_and_round() -> None:
    tree = LAB | {
        "adversaries": [{"attack": "scaled", "share": 1.0, "from_round": 3, "probability": 0.25}]
    }
    found = parse(tree).attackers.adversary("device-2")
    other = parse(tree).attackers.adversary("device-3")
    assert found is not None and other is not None and found.rounds == 2
    acts = [found.acts(number) for number in range(4000)]
    assert not any(acts[:4]) and 0.22 < np.mean(acts) < 0.28
    assert (
        acts
        == [found.acts(number) for number in range(4000)]
        != [other.acts(number) for number in range(4000)]
    )


def test_an_experiment_without_adversaries_is_what_it_was() -> None:
    plain, empty = parse(LAB), parse(LAB | {"adversaries": []})
    assert plain.digest == empty.digest and "adversaries" not in plain.to_json() + to_toml(plain)
    attacked = parse(LAB | {"adversaries": EVERYWHERE})
    assert parse(attacked.to_json()).digest == attacked.digest
    assert "[[adversaries]]" in to_toml(attacked)


def test_own_attacks_are_checked_where_they_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "wicked.py").write_text(
        "from fedstrata import Attack\n\n\nclass Push(Attack):\n    by: float = 1.0\n\n"
        "    def upload(self, now):\n        return now.trained_D + self.by\n\n\nclass "
        "Short(Attack):\n"
        "    def upload(self, now):\n        return now.trained_D[:3]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def adversary(**keys: Any) -> Adversary:
        name = {"name": f"wicked:{keys.pop('cls', 'Push')}", **keys}
        found = parse(LAB | {"adversaries": [{"attack": name, "nodes": ["device-1"]}]})
        assert "adversaries[0].attack.name" in found.code_at("device-1")
        assert "adversaries[0].attack.name" not in found.code_at("device-0") | found.code_at(
            "institution-0"
        )
        return found.attackers.at["device-1"]

    ones = np.ones(5, np.float32)
    assert adversary(by=2.0).uploaded(0, ones, ones).tolist() == [3.0] * 5
    for keys, problem in (
        ({"cls": "Short"}, r"returns \[3\] numbers for 5 columns"),
        ({"cls": "Nobody"}, "wicked has no Nobody"),
        ({"by": "far"}, r"adversaries\.attack\.by = 'far'"),
        ({"buy": 1.0}, r"adversaries\.attack\.buy = 1.0"),
    ):
        with pytest.raises(InvalidExperiment, match=problem):
            adversary(**keys).uploaded(0, ones, ones)


# Labs


def test_lies_change_the_models_and_a_resumed_run_repeats_them(tmp_path: Path) -> None:
    tree = LAB | {"adversaries": EVERYWHERE, "cloud": {"checkpoint_every": 2}}
    whole = run_direct(tmp_path / "whole", tree)
    broken = run_direct(tmp_path / "broken", tree, until=3)
    resumed_run(broken)
    assert model_digest(broken.parent) == model_digest(whole.parent) != ""
    found = [model_digest(whole.parent)]
    for left in range(len(EVERYWHERE)):
        run_direct(tmp_path / str(left), tree | {"adversaries": [EVERYWHERE[left]], "rounds": 2})
        found.append(model_digest(tmp_path / str(left)))
    assert len(set(found)) == len(found), "each of them does something"


def test_a_link_is_its_honest_child_with_other_models(tmp_path: Path) -> None:
    """What comes up is changed behind the codec, so without a lossy one the models are those of a
    child that lies. Its scores are those of an honest one.
    """
    tree = LAB | {"rounds": 2, "evaluation": {"at": "both"}}
    flip = {"attack": {"name": "sign_flip", "factor": 2.0}, "probability": 0.5}

    names = ["device-1", "institution-1"]
    feedback = {"transfer": {"lan": {"up": {"name": "topk", "share": 0.1, "feedback": True}}}}
    digests = {}
    honest = {}
    for key in ("links", "nodes"):
        lies = tree | {"adversaries": [flip | {key: names}]}
        run = load(run_direct(tmp_path / key, lies))
        run_direct(tmp_path / f"{key}-codec", lies | feedback)
        digests[key] = model_digest(tmp_path / key), model_digest(tmp_path / f"{key}-codec")
        liars = {each.device for each in run.devices if each.more["adversary"]}
        honest[key] = liars, run.rounds[-1].further("honest_scored")
        where = "on the links of " if key == "links" else ""
        assert f": {where}device-1 and institution-1" in page_of(run)
    assert honest == {"links": (set(), 6), "nodes": ({"device-1"}, 5)}
    assert digests["links"][0] == digests["nodes"][0] != ""
    assert digests["links"][1] != digests["nodes"][1]


def test_claimed_samples_are_weights_and_those_that_nobody_has_are_refused(tmp_path: Path) -> None:
    tree = LAB | {"rounds": 1, "topology": {"institutions": 0, "devices": 4}, "institution": {}}
    tree |= {"data": {"partition": "dirichlet", "concentration": 5.0}}
    lie = {
        "attack": {"name": "false_report", "samples_factor": 2.0, "loss_factor": 0.5},
        "nodes": ["device-1"],
    }
    rows = devices(run_direct(tmp_path / "some", tree | {"adversaries": [lie]}))
    truth = devices(run_direct(tmp_path / "none", tree))
    assert [a["samples"] / b["samples"] for a, b in zip(rows, truth, strict=True)] == [1, 2, 1, 1]
    assert rows[1]["loss"] == pytest.approx(truth[1]["loss"] / 2, rel=1e-5)
    lie["attack"] = {"name": "false_report", "samples_factor": 100.0}
    refused = run_direct(tmp_path / "many", tree | {"adversaries": [lie]})
    assert len(devices(refused)) == 3 and "are possible" in (refused / "events.jsonl").read_text()
    exact = tree | {"adversaries": [lie | {"attack": "false_report"}], "data": {"partition": "iid"}}
    assert len(devices(run_direct(tmp_path / "iid", exact))) == 3, (
        "a parent knows the samples of each device"
    )


def devices(path: Path) -> list[dict[str, float]]:
    return [
        {key: float(row[key]) for key in ("samples", "loss")} for row in table(path / "devices.csv")
    ]


def test_success_stands_beside_accuracy_and_rules_are_seen_to_refuse(tmp_path: Path) -> None:
    """A strong backdoor takes over a mean, and Krum leaves its two devices out in each local round."""
    backdoor = {"attack": {"name": "backdoor", "factor": 6.0}, "nodes": ["device-1", "device-7"]}
    flip = {
        "attack": {"name": "label_flip", "mode": "pair"},
        "nodes": ["device-2"],
        "from_round": 3,
    }
    tree = LAB | {
        "rounds": 3,
        "topology": {"institutions": 2, "devices": 10},
        "adversaries": [backdoor, flip],
    }
    tree |= {"evaluation": {"at": "both"}, "training": {"epochs": 2, "learning_rate": 0.1}}
    found = {}
    for name, rule in (
        ("mean", {}),
        ("krum", {"aggregation": {"name": "krum", "wrong": 1, "keep": 3}}),
    ):
        path = run_direct(tmp_path / name, tree | {"institution": {"rounds": 2, **rule}})
        run = load(path)
        last, honest = run.rounds[-1], [each for each in run.devices if not each.more["adversary"]]
        assert (
            len(honest) == 3 * 7
            and last.further("honest_scored") == 7
            and last.of_devices("scored") == 10
        )
        scores = [each.test_score for each in honest if each.global_round == 3]
        assert last.further("honest_mean") == pytest.approx(
            np.mean([each for each in scores if each is not None])
        )
        assert "attack_success" in (text := page_of(run)) and "backdoor from global round 1" in text
        success = last.further("attack_success")
        refused = {
            each.device: each.more["refused"] for each in run.devices if each.global_round == 1
        }
        found[name] = success, refused
        assert all(
            (each.more["used"] or 0) + (each.more["refused"] or 0) == 2 for each in run.devices
        )
    assert found["mean"][0] > 0.5 and found["krum"][0] < 0.2
    assert not any(found["mean"][1].values())
    assert (
        found["krum"][1]["device-1"] == found["krum"][1]["device-7"] == 2
        and sum(found["krum"][1].values()) == 8
    )


def page_of(run: Run) -> str:
    return " ".join(
        [
            *attacks.facts(run),
            *(each.title for each in attacks.figures(run)),
            *run.rounds[-1].columns(),
        ]
    )


SILENT: Final[dict[str, Any]] = {
    "institution": {"rounds": 2, "closing": {"rule": "quorum", "quorum": 1, "deadline_s": 30.0}},
    "adversaries": [{"attack": "silent", "nodes": ["device-1"], "probability": 0.5}],
}


def test_rounds_close_without_silent_devices_as_without_a_network(tmp_path: Path) -> None:
    lab = KilledLab(TREE | SILENT, model_bytes=2_000)
    found = {row["missing"] for row in lab.undisturbed.rounds}
    assert lab.undisturbed.virtual_s > 30 and found == {""}, (
        "an institution's rounds wait for the deadline"
    )
    path = run_direct(tmp_path, LAB | SILENT | {"rounds": 2})
    plans = (path / "events.jsonl").read_text()
    assert '"without": ["device-1"]' in plans


def test_late_results_come_later_and_count() -> None:
    late = [{"attack": {"name": "late", "hold_s": 40.0}, "nodes": ["device-1"], "from_round": 2}]
    lab = KilledLab(TREE | {"adversaries": late}, model_bytes=2_000)
    honest = KilledLab(TREE, model_bytes=2_000)
    assert lab.undisturbed.digest == honest.undisturbed.digest
    assert lab.undisturbed.virtual_s == pytest.approx(honest.undisturbed.virtual_s + 80, abs=5)


def test_a_plan_simulates_a_sample_of_a_lab_without_its_adversaries() -> None:
    tiers = [{"name": "wan", "children": "institution", "number": 3}, {"name": "lan", "number": 30}]
    experiment = parse({"tiers": tiers, "adversaries": [{"attack": "late", "nodes": ["device-7"]}]})
    assert not with_tiers(experiment, [{"name": "lan"}]).adversaries


LYING: Final = [
    {"attack": {"name": "lie", "z": 1.0}, "nodes": ["device-2", "device-3"], "knows": "colluders"},
    {"attack": {"name": "gaussian", "std": 0.05}, "nodes": ["device-0"], "probability": 0.5},
    {
        "attack": {"name": "equivocation", "std": 0.01},
        "nodes": ["institution-0"],
        "probability": 0.5,
    },
    {"attack": {"name": "sign_flip"}, "links": ["institution-1"], "probability": 0.5},
    {"attack": {"name": "equivocation", "std": 0.01}, "links": ["device-1"]},
]
KILLED: Final = KilledLab(TREE | {"adversaries": LYING}, model_bytes=10_000)


@pytest.mark.parametrize("node", ["cloud", "institution-0", "device-0"])
def test_a_killed_adversary_lies_as_it_did(node: str) -> None:
    assert KILLED.undisturbed.digest != KilledLab(TREE, model_bytes=10_000).undisturbed.digest
    KILLED.assert_same_if_killed(node, 0.6)


@pytest.mark.slow
def test_a_lab_of_processes_killed_and_resumed_gives_the_model_of_one_process(
    tmp_path: Path,
) -> None:
    lies = [
        *EVERYWHERE,
        {"attack": "min_max", "nodes": ["device-4", "device-5"], "knows": "siblings"},
    ]
    experiment = tmp_path / "attacked.toml"
    tree = LAB | {
        "adversaries": [
            each | {"below": "institution-0"} if "share" in each else each for each in lies
        ]
    }
    tree["adversaries"][1] |= {"share": 0.67}
    experiment.write_text(to_toml(parse(tree)))
    direct = run_lab(experiment, tmp_path / "direct", flags=["--direct"])
    words = command("run", experiment, "--runs", tmp_path / "lab", "--format", "json")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as lab:
        assert lab.stdout is not None
        for line in lab.stdout:
            if json.loads(line)["event"] == "global_round":
                break
        lab.kill()
    (run,) = (tmp_path / "lab").iterdir()
    done = fedstrata("run", "--resume", run, "--format", "json")
    assert done.returncode == 0, done.stderr
    assert tensors(run) == tensors(direct)
