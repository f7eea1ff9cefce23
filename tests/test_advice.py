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


# What both have, what is advised against, what is not, and how the line begins.
ADVICE = """\
 | cloud.closing.quorum=2 | cloud.closing={rule='quorum',quorum=2,deadline_s=9.0} | cloud.closing.quorum = 2: no effect with closing.rule = 'all'.
BELOW=scaffold training.objective=scaffold | institution.norm_bound.action=clip | institution.norm_bound.action=refuse | institution.norm_bound.action = 'clip': a device does not know what was clipped
BELOW=feddyn training.objective=feddyn | institution.norm_bound.action=clip | institution.norm_bound.action=refuse | institution.norm_bound.action = 'clip': a device does not know what was clipped
institution.rounds=1 BELOW=fedcross |  | BELOW.alpha=0.9 BELOW.on_new_model=recentre | BELOW.name = 'fedcross': with institution.rounds = 1 and on_new_model 'reset'
BELOW=fedmr | BELOW.on_new_model=recentre |  | BELOW.on_new_model = 'recentre': hurts fedmr
BELOW=independent | BELOW.on_new_model=recentre |  | BELOW.on_new_model = 'recentre': hurts independent
BELOW=fedcross BELOW.on_new_model=recentre | BELOW.alpha=0.91 | BELOW.alpha=0.9 | BELOW.on_new_model = 'recentre': hurts fedcross with alpha above 0.9
ABOVE=fedcross | ABOVE.on_new_model=recentre |  | ABOVE.on_new_model = 'recentre': the cloud has no parent
ABOVE=fedcross ABOVE.propeller_rounds=10 | ABOVE.propeller_alpha=0.99 | ABOVE.propeller_alpha=0.4 | ABOVE.propeller_alpha = 0.99
ABOVE=fedcross | ABOVE.alpha=1.0 | ABOVE.alpha=0.98 | ABOVE.alpha = 1.0: the models are never mixed
ABOVE=fedcross ABOVE.normalise=true |  | ABOVE.similarity=pairwise | ABOVE.normalise = true
 | BELOW=fedcda BELOW.history=keep | ABOVE=fedcda ABOVE.history=keep | BELOW.history = 'keep'
BELOW=fedcda | institution.rounds=1 | institution.rounds=2 | BELOW.name = 'fedcda': with institution.rounds = 1
ABOVE=fedcda | ABOVE.warmup_rounds=100 | ABOVE.warmup_rounds=99 | ABOVE.warmup_rounds = 100: all 100 rounds
BELOW=fedcda | BELOW.warmup_rounds=400 | BELOW.warmup_rounds=399 | BELOW.warmup_rounds = 400: all 400 rounds
ABOVE=fedmr | ABOVE.first_stage_rounds=100 | ABOVE.first_stage_rounds=99 | ABOVE.first_stage_rounds = 100: all 100 rounds
ABOVE=fedmr ABOVE.first_stage_loss=0.5 |  | ABOVE.first_stage_rounds=100 | ABOVE.first_stage_loss = 0.5: there is no first stage
ABOVE=fedcross topology.devices=4 | topology.institutions=1 | topology.institutions=2 | ABOVE.name = 'fedcross': with one child
ABOVE=fedcross | cloud.participation=0.4 | cloud.participation=0.7 | ABOVE.name = 'fedcross': with one child
BELOW=fedmr | institution.participation=0.4 | institution.participation=0.5 | BELOW.name = 'fedmr': with one child
model=resnet18_cifar | data.partition=dirichlet data.concentration=0.5 | data.partition=iid | model.name = 'resnet18_cifar': batch norm
BELOW=fedadp data.partition=dirichlet data.concentration=0.1 | institution.participation=0.5 |  | BELOW.name = 'fedadp': with partial participation
training.learning_rate=0.1 | ABOVE=independent | ABOVE=fedcross ABOVE.alpha=0.9 | training.learning_rate = 0.1: models that hardly mix (ABOVE.name = 'independent')
BELOW=fedcross | training.learning_rate=0.2 | training.learning_rate=0.09 | training.learning_rate = 0.2: models that hardly mix (BELOW.name = 'fedcross')
cloud.epoch_control=tempo topology.devices=4 | topology.institutions=1 | topology.institutions=3 | cloud.epoch_control.name = 'tempo': with one child
cloud.epoch_control.variant=plato |  | cloud.epoch_control.name=tempo | cloud.epoch_control.name = 'fixed': the other keys
training.schedule.factor=0.5 |  | training.schedule.name=exponential | training.schedule.factor = 0.5: no effect with constant; it belongs to step and exponential
training.schedule.factor=0.5 training.schedule.every=3 | training.schedule.name=exponential | training.schedule.name=step | training.schedule.every = 3: no effect with exponential; it belongs to step
training.schedule.final=0.1 training.schedule.warmup=2 |  | training.schedule.name=cosine | training.schedule.final = 0.1: no effect with constant; it belongs to cosine
training.schedule={name='step',factor=0.5,every=3,warmup=2} | rounds=5 | rounds=6 | training.schedule.every = 3: the run ends before the first step
rounds=5 training.schedule=cosine | training.schedule.warmup=5 | training.schedule.warmup=4 | training.schedule.warmup = 5: the run ends during the warm-up
"""


def in_full(text: str) -> str:
    """Return a text with the keys of both rules."""
    return text.replace("ABOVE", "cloud.aggregation").replace("BELOW", "institution.aggregation")


@pytest.mark.parametrize("line", ADVICE.splitlines())
def test_a_setting_has_its_line(line: str) -> None:
    both, bad, good, start = in_full(line).split(" | ")
    (found,) = lines(f"{both} {bad}")
    assert found.startswith(start) and lines(f"{both} {good}") == []


def test_every_line_is_given() -> None:
    given = "BELOW=independent BELOW.on_new_model=recentre training.learning_rate=1.0 "
    given += "ABOVE=fedmr ABOVE.first_stage_rounds=200"
    assert len(lines(in_full(given))) == 4
