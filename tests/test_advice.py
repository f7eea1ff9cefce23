"""Each setting that is known to do nothing, or to collapse, has its line, and no other setting has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.experiment.lint import warnings
from common.experiment.methods import RULES
from common.experiment.reading import load, parse
from tests.helpers.rules import LEAST, WITH_OBJECTIVE

FILES = sorted((Path(__file__).parent.parent / "deploy" / "experiments").glob("*.toml"))
SIZE: dict[str, Any] = {"rounds": 100, "topology": {"institutions": 3, "devices": 12}}
ROUNDS = {"rounds": 4}


def lines(tree: dict[str, Any]) -> list[str]:
    return warnings(parse(SIZE | tree))


def at(tier: str, name: str, *, tree: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Return an experiment with a rule at a tier."""
    table = {"aggregation": {"name": name, **settings}} | (ROUNDS if tier == "institution" else {})
    return {tier: table} | (tree or {})


def bounded(name: str, action: str) -> dict[str, Any]:
    """Return an experiment with a method whose devices keep vectors, and a bound of their steps."""
    institution = {**ROUNDS, "aggregation": {"name": name}, "norm_bound": {"action": action}}
    return {"training": {"objective": {"name": name}}, "institution": institution}


@pytest.mark.parametrize("tier", ["cloud", "institution"])
@pytest.mark.parametrize("name", [name for name in RULES if name not in WITH_OBJECTIVE])
def test_a_rules_defaults_are_sound(tier: str, name: str) -> None:
    assert lines(at(tier, **LEAST[name])) == []


@pytest.mark.parametrize("name", WITH_OBJECTIVE)
def test_the_defaults_of_a_rule_with_an_objective_are_sound(name: str) -> None:
    objective = {"training": {"objective": {"name": WITH_OBJECTIVE[name]}}}
    assert lines(at("institution", **LEAST[name], tree=objective)) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_experiments_that_ship_are_sound(path: Path) -> None:
    assert warnings(load(path)) == []


@pytest.mark.parametrize(
    ("bad", "good", "start"),
    [
        (
            {"cloud": {"closing": {"quorum": 2}}},
            {"cloud": {"closing": {"rule": "quorum", "quorum": 2, "deadline_s": 9.0}}},
            "cloud.closing.quorum = 2: no effect with closing.rule = 'all'.",
        ),
        *(
            (
                bounded(name, "clip"),
                bounded(name, "refuse"),
                "institution.norm_bound.action = 'clip': a device does not know what was clipped",
            )
            for name in ("scaffold", "feddyn")
        ),
        *(
            (
                {"training": {"vmapped": mode}},
                {"training": {"vmapped": "never"}},
                f"training.vmapped = '{mode}': the last bits of a model depend on which devices train together",
            )
            for mode in ("auto", "always")
        ),
        (
            {"institution": {"rounds": 1, "aggregation": {"name": "fedcross"}}},
            {
                "institution": {
                    "rounds": 1,
                    "aggregation": {"name": "fedcross", "alpha": 0.9, "on_new_model": "recentre"},
                }
            },
            "institution.aggregation.name = 'fedcross': with institution.rounds = 1 and on_new_model 'reset'",
        ),
        (
            at("institution", "fedmr", on_new_model="recentre"),
            at("institution", "fedcross", on_new_model="recentre", alpha=0.9),
            "institution.aggregation.on_new_model = 'recentre': hurts fedmr",
        ),
        (
            at("institution", "independent", on_new_model="recentre"),
            at("institution", "independent"),
            "institution.aggregation.on_new_model = 'recentre': hurts independent",
        ),
        (
            at("institution", "fedcross", on_new_model="recentre", alpha=0.91),
            at("institution", "fedcross", on_new_model="recentre", alpha=0.9),
            "institution.aggregation.on_new_model = 'recentre': hurts fedcross with alpha above 0.9",
        ),
        (
            at("cloud", "fedcross", on_new_model="recentre"),
            at("cloud", "fedcross"),
            "cloud.aggregation.on_new_model = 'recentre': the cloud has no parent",
        ),
        (
            at("cloud", "fedcross", propeller_rounds=10, propeller_alpha=0.99),
            at("cloud", "fedcross", propeller_rounds=10, propeller_alpha=0.4),
            "cloud.aggregation.propeller_alpha = 0.99",
        ),
        (
            at("cloud", "fedcross", alpha=1.0),
            at("cloud", "fedcross", alpha=0.98),
            "cloud.aggregation.alpha = 1.0: the models are never mixed",
        ),
        (
            at("cloud", "fedcross", normalise=True),
            at("cloud", "fedcross", normalise=True, similarity="pairwise"),
            "cloud.aggregation.normalise = true",
        ),
        (
            at("institution", "fedcda", history="keep"),
            at("cloud", "fedcda", history="keep"),
            "institution.aggregation.history = 'keep'",
        ),
        (
            {"institution": {"rounds": 1, "aggregation": {"name": "fedcda"}}},
            {"institution": {"rounds": 2, "aggregation": {"name": "fedcda"}}},
            "institution.aggregation.name = 'fedcda': with institution.rounds = 1",
        ),
        (
            at("cloud", "fedcda", warmup_rounds=100),
            at("cloud", "fedcda", warmup_rounds=99),
            "cloud.aggregation.warmup_rounds = 100: all 100 rounds",
        ),
        (
            at("institution", "fedcda", warmup_rounds=400),
            at("institution", "fedcda", warmup_rounds=399),
            "institution.aggregation.warmup_rounds = 400: all 400 rounds",
        ),
        (
            at("cloud", "fedmr", first_stage_rounds=100),
            at("cloud", "fedmr", first_stage_rounds=99),
            "cloud.aggregation.first_stage_rounds = 100: all 100 rounds",
        ),
        (
            at("cloud", "fedcross", tree={"topology": {"devices": 4}}),
            at("cloud", "fedcross", tree={"topology": {"institutions": 2, "devices": 4}}),
            "cloud.aggregation.name = 'fedcross': with one child",
        ),
        (
            {"cloud": {"aggregation": {"name": "fedcross"}, "participation": 0.4}},
            {"cloud": {"aggregation": {"name": "fedcross"}, "participation": 0.7}},
            "cloud.aggregation.name = 'fedcross': with one child",
        ),
        (
            {"institution": {"aggregation": {"name": "fedmr"}, "participation": 0.4, "rounds": 4}},
            {"institution": {"aggregation": {"name": "fedmr"}, "participation": 0.5, "rounds": 4}},
            "institution.aggregation.name = 'fedmr': with one child",
        ),
        (
            {"model": {"name": "resnet18_cifar"}, "data": {"partition": "dirichlet", "concentration": 0.5}},
            {"model": {"name": "resnet18_cifar"}, "data": {"partition": "iid"}},
            "model.name = 'resnet18_cifar': batch norm",
        ),
        (
            {
                "institution": {"aggregation": {"name": "fedadp"}, "participation": 0.5},
                "data": {"partition": "dirichlet", "concentration": 0.1},
            },
            {
                "institution": {"aggregation": {"name": "fedadp"}},
                "data": {"partition": "dirichlet", "concentration": 0.1},
            },
            "institution.aggregation.name = 'fedadp': with partial participation",
        ),
        (
            at("cloud", "independent", tree={"training": {"learning_rate": 0.1}}),
            at("cloud", "fedcross", alpha=0.9, tree={"training": {"learning_rate": 0.1}}),
            "training.learning_rate = 0.1: models that hardly mix (cloud.aggregation.name = 'independent')",
        ),
        (
            at("institution", "fedcross", tree={"training": {"learning_rate": 0.2}}),
            at("institution", "fedcross", tree={"training": {"learning_rate": 0.09}}),
            "training.learning_rate = 0.2: models that hardly mix (institution.aggregation.name = 'fedcross')",
        ),
        (
            {"cloud": {"epoch_control": {"name": "tempo"}}, "topology": {"devices": 4}},
            {"cloud": {"epoch_control": {"name": "tempo"}}},
            "cloud.epoch_control.name = 'tempo': with one child",
        ),
        (
            {"cloud": {"epoch_control": {"variant": "plato"}}},
            {"cloud": {"epoch_control": {"name": "tempo", "variant": "plato"}}},
            "cloud.epoch_control.name = 'fixed': the other keys",
        ),
        (
            {"training": {"schedule": {"factor": 0.5}}},
            {"training": {"schedule": {"name": "exponential", "factor": 0.5}}},
            "training.schedule.factor = 0.5: no effect with constant; it belongs to step and exponential",
        ),
        (
            {"training": {"schedule": {"name": "exponential", "factor": 0.5, "every": 3}}},
            {"training": {"schedule": {"name": "step", "factor": 0.5, "every": 3}}},
            "training.schedule.every = 3: no effect with exponential; it belongs to step",
        ),
        (
            {"training": {"schedule": {"final": 0.1, "warmup": 2}}},
            {"training": {"schedule": {"name": "cosine", "final": 0.1, "warmup": 2}}},
            "training.schedule.final = 0.1: no effect with constant; it belongs to cosine",
        ),
        (
            {"rounds": 5, "training": {"schedule": {"name": "step", "factor": 0.5, "every": 3, "warmup": 2}}},
            {"rounds": 6, "training": {"schedule": {"name": "step", "factor": 0.5, "every": 3, "warmup": 2}}},
            "training.schedule.every = 3: the run ends before the first step",
        ),
        (
            {"rounds": 5, "training": {"schedule": {"name": "cosine", "warmup": 5}}},
            {"rounds": 5, "training": {"schedule": {"name": "cosine", "warmup": 4}}},
            "training.schedule.warmup = 5: the run ends during the warm-up",
        ),
    ],
)
def test_a_setting_has_its_line(bad: dict[str, Any], good: dict[str, Any], start: str) -> None:
    found = lines(bad)
    assert len(found) == 1 and found[0].startswith(start), found
    assert lines(good) == []


def test_every_line_is_given() -> None:
    tree = at("institution", "independent", on_new_model="recentre", tree={"training": {"learning_rate": 1.0}})
    assert len(lines(tree | {"cloud": {"aggregation": {"name": "fedmr", "first_stage_rounds": 200}}})) == 4
