"""Each setting that is known to do nothing, or to collapse, has its line, and no other setting has
one.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from fedstrata.common.experiment.lint import warnings
from fedstrata.common.experiment.reading import load, override, parse
from fedstrata.common.methods.settings import RULES
from tests.helpers.rules import LEAST, WITH_OBJECTIVE

FILES = sorted((Path(__file__).parent.parent / "deploy" / "experiments").glob("*.toml"))
SIZE: dict[str, Any] = {
    "rounds": 100,
    "topology": {"institutions": 3, "devices": 12},
    "institution": {"rounds": 4},
}


def lines(settings: str) -> list[str]:
    """Return the advice on an experiment with these settings, written as those of --set."""
    tree = deepcopy(SIZE)
    for setting in settings.split():
        override(tree, setting)
    return warnings(parse(tree))


RULES_AT = [(tier, name) for tier in ("cloud", "institution") for name in RULES]


@pytest.mark.parametrize(
    ("tier", "name"),
    [(tier, name) for tier, name in RULES_AT if tier != "cloud" or name not in WITH_OBJECTIVE],
)
def test_a_rules_defaults_are_sound(tier: str, name: str) -> None:
    objective = WITH_OBJECTIVE.get(name, "cross_entropy")
    tree = {
        "training": {"objective": objective},
        tier: SIZE.get(tier, {}) | {"aggregation": LEAST[name]},
    }
    assert warnings(parse(SIZE | tree)) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_experiments_that_ship_are_sound(path: Path) -> None:
    assert warnings(load(path)) == []


OF_CLOUD, OF_INSTITUTION, SCHEDULE = (
    "cloud.aggregation",
    "institution.aggregation",
    "training.schedule",
)
# What both have, what is advised against, what is not, and how the line begins.
ADVICE = [
    (
        "",
        "cloud.closing.quorum=2",
        "cloud.closing={rule='quorum',quorum=2,deadline_s=9.0}",
        "cloud.closing.quorum = 2: no effect with closing.rule = 'all'.",
    ),
    *(
        (
            f"{OF_INSTITUTION}={name} training.objective={name}",
            "institution.norm_bound.action=clip",
            "institution.norm_bound.action=refuse",
            "institution.norm_bound.action = 'clip': a device does not know what was clipped",
        )
        for name in ("scaffold", "feddyn")
    ),
    (
        f"institution.rounds=1 {OF_INSTITUTION}=fedcross",
        "",
        f"{OF_INSTITUTION}.alpha=0.9 {OF_INSTITUTION}.on_new_model=recentre",
        f"{OF_INSTITUTION}.name = 'fedcross': with institution.rounds = 1 and on_new_model 'reset'",
    ),
    (
        f"{OF_INSTITUTION}=fedmr",
        f"{OF_INSTITUTION}.on_new_model=recentre",
        "",
        f"{OF_INSTITUTION}.on_new_model = 'recentre': hurts fedmr",
    ),
    (
        f"{OF_INSTITUTION}=independent",
        f"{OF_INSTITUTION}.on_new_model=recentre",
        "",
        f"{OF_INSTITUTION}.on_new_model = 'recentre': hurts independent",
    ),
    (
        f"{OF_INSTITUTION}=fedcross {OF_INSTITUTION}.on_new_model=recentre",
        f"{OF_INSTITUTION}.alpha=0.91",
        f"{OF_INSTITUTION}.alpha=0.9",
        f"{OF_INSTITUTION}.on_new_model = 'recentre': hurts fedcross with alpha above 0.9",
    ),
    (
        f"{OF_CLOUD}=fedcross",
        f"{OF_CLOUD}.on_new_model=recentre",
        "",
        f"{OF_CLOUD}.on_new_model = 'recentre': the cloud has no parent",
    ),
    (
        f"{OF_CLOUD}=fedcross {OF_CLOUD}.propeller_rounds=10",
        f"{OF_CLOUD}.propeller_alpha=0.99",
        f"{OF_CLOUD}.propeller_alpha=0.4",
        f"{OF_CLOUD}.propeller_alpha = 0.99",
    ),
    (
        f"{OF_CLOUD}=fedcross",
        f"{OF_CLOUD}.alpha=1.0",
        f"{OF_CLOUD}.alpha=0.98",
        f"{OF_CLOUD}.alpha = 1.0: the models are never mixed",
    ),
    (
        f"{OF_CLOUD}=fedcross {OF_CLOUD}.normalise=true",
        "",
        f"{OF_CLOUD}.similarity=pairwise",
        f"{OF_CLOUD}.normalise = true",
    ),
    (
        "",
        f"{OF_INSTITUTION}=fedcda {OF_INSTITUTION}.history=keep",
        f"{OF_CLOUD}=fedcda {OF_CLOUD}.history=keep",
        f"{OF_INSTITUTION}.history = 'keep'",
    ),
    (
        f"{OF_INSTITUTION}=fedcda",
        "institution.rounds=1",
        "institution.rounds=2",
        f"{OF_INSTITUTION}.name = 'fedcda': with institution.rounds = 1",
    ),
    (
        f"{OF_CLOUD}=fedcda",
        f"{OF_CLOUD}.warmup_rounds=100",
        f"{OF_CLOUD}.warmup_rounds=99",
        f"{OF_CLOUD}.warmup_rounds = 100: all 100 rounds",
    ),
    (
        f"{OF_INSTITUTION}=fedcda",
        f"{OF_INSTITUTION}.warmup_rounds=400",
        f"{OF_INSTITUTION}.warmup_rounds=399",
        f"{OF_INSTITUTION}.warmup_rounds = 400: all 400 rounds",
    ),
    (
        f"{OF_CLOUD}=fedmr",
        f"{OF_CLOUD}.first_stage_rounds=100",
        f"{OF_CLOUD}.first_stage_rounds=99",
        f"{OF_CLOUD}.first_stage_rounds = 100: all 100 rounds",
    ),
    (
        f"{OF_CLOUD}=fedmr {OF_CLOUD}.first_stage_loss=0.5",
        "",
        f"{OF_CLOUD}.first_stage_rounds=100",
        f"{OF_CLOUD}.first_stage_loss = 0.5: there is no first stage",
    ),
    (
        f"{OF_CLOUD}=fedcross topology.devices=4",
        "topology.institutions=1",
        "topology.institutions=2",
        f"{OF_CLOUD}.name = 'fedcross': with one child",
    ),
    (
        f"{OF_CLOUD}=fedcross",
        "cloud.participation=0.4",
        "cloud.participation=0.7",
        f"{OF_CLOUD}.name = 'fedcross': with one child",
    ),
    (
        f"{OF_INSTITUTION}=fedmr",
        "institution.participation=0.4",
        "institution.participation=0.5",
        f"{OF_INSTITUTION}.name = 'fedmr': with one child",
    ),
    (
        "model=resnet18_cifar",
        "data.partition=dirichlet data.concentration=0.5",
        "data.partition=iid",
        "model.name = 'resnet18_cifar': batch norm",
    ),
    (
        f"{OF_INSTITUTION}=fedadp data.partition=dirichlet data.concentration=0.1",
        "institution.participation=0.5",
        "",
        f"{OF_INSTITUTION}.name = 'fedadp': with partial participation",
    ),
    (
        "training.learning_rate=0.1",
        f"{OF_CLOUD}=independent",
        (f"{OF_CLOUD}=fedcross {OF_CLOUD}.alpha=0.9"),
        f"training.learning_rate = 0.1: models that hardly mix ({OF_CLOUD}.name = 'independent')",
    ),
    (
        f"{OF_INSTITUTION}=fedcross",
        "training.learning_rate=0.2",
        "training.learning_rate=0.09",
        (
            f"training.learning_rate = 0.2: models that hardly mix ({OF_INSTITUTION}.name = "
            "'fedcross')"
        ),
    ),
    (
        "cloud.epoch_control=tempo topology.devices=4",
        "topology.institutions=1",
        "topology.institutions=3",
        "cloud.epoch_control.name = 'tempo': with one child",
    ),
    (
        "cloud.epoch_control.variant=plato",
        "",
        "cloud.epoch_control.name=tempo",
        "cloud.epoch_control.name = 'fixed': the other keys",
    ),
    (
        f"{SCHEDULE}.factor=0.5",
        "",
        f"{SCHEDULE}.name=exponential",
        f"{SCHEDULE}.factor = 0.5: no effect with constant; it belongs to step and exponential",
    ),
    (
        f"{SCHEDULE}.factor=0.5 {SCHEDULE}.every=3",
        f"{SCHEDULE}.name=exponential",
        f"{SCHEDULE}.name=step",
        f"{SCHEDULE}.every = 3: no effect with exponential; it belongs to step",
    ),
    (
        f"{SCHEDULE}.final=0.1 {SCHEDULE}.warmup=2",
        "",
        f"{SCHEDULE}.name=cosine",
        f"{SCHEDULE}.final = 0.1: no effect with constant; it belongs to cosine",
    ),
    (
        f"{SCHEDULE}={{name='step',factor=0.5,every=3,warmup=2}}",
        "rounds=5",
        "rounds=6",
        f"{SCHEDULE}.every = 3: the run ends before the first step",
    ),
    (
        f"rounds=5 {SCHEDULE}=cosine",
        f"{SCHEDULE}.warmup=5",
        f"{SCHEDULE}.warmup=4",
        f"{SCHEDULE}.warmup = 5: the run ends during the warm-up",
    ),
]


@pytest.mark.parametrize(("both", "bad", "good", "start"), ADVICE)
def test_a_setting_has_its_line(both: str, bad: str, good: str, start: str) -> None:
    (line,) = lines(f"{both} {bad}")
    assert line.startswith(start) and lines(f"{both} {good}") == []


def test_every_line_is_given() -> None:
    institution = (
        f"{OF_INSTITUTION}=independent {OF_INSTITUTION}.on_new_model=recentre "
        "training.learning_rate=1.0"
    )
    assert len(lines(f"{institution} {OF_CLOUD}=fedmr {OF_CLOUD}.first_stage_rounds=200")) == 4
