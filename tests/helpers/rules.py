"""The rules of aggregation, each with the least that its table needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from common.experiment.methods import RULES

_NEEDED: Final[Mapping[str, Mapping[str, Any]]] = {
    **{name: {"learning_rate": 0.1} for name in ("fedadagrad", "fedadam", "fedyogi")},
    "krum": {"wrong": 0},  # for any number of children, as the next two
    "trimmed_mean": {"trim": 0.0},
    "fedbuff": {"buffer": 1},
    "feddf": {"steps": 0},  # without samples at the node, as the next two
    "fedbe": {"epochs": 0},
    "fedlaw": {"epochs": 0},
    "fedgen": {"steps": 0},  # without a refiner
}
# Of rules whose children must be devices with an objective, or with their losses: they stand in the last tier.
WITH_OBJECTIVE: Final[Mapping[str, str]] = {
    name: rule.objective or "cross_entropy" for name, rule in RULES.items() if rule.objective or rule.reads_losses
}
LEAST: Final[Mapping[str, dict[str, Any]]] = {name: {"name": name, **_NEEDED.get(name, {})} for name in RULES}


def least_lab(name: str) -> dict[str, Any]:
    """Return the least experiment with this rule below the cloud, which then has devices if the rule needs them."""
    tree: dict[str, Any] = {"cloud": {"aggregation": LEAST[name]}, "topology": {"institutions": 3, "devices": 3}}
    if name in WITH_OBJECTIVE:
        tree |= {"topology": {"institutions": 0, "devices": 3}}
        tree |= {"training": {"objective": {"name": WITH_OBJECTIVE[name]}}}
    return tree
