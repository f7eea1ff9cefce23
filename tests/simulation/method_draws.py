"""Newer methods in a drawn lab, from a generator of their own: labs of lower seeds stay what they were."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, Final

METHODS_FROM: Final = 100_000  # the first seed whose lab has them
STATES_FROM: Final = 200_000  # the first seed whose devices keep a state, and may exchange extras
CLUSTERS_FROM: Final = 300_000  # the first seed whose tiers may select by clusters
BUFFERS_FROM: Final = 400_000  # the first seed whose tiers may be asynchronous
MEMORIES_FROM: Final = 450_000  # the first seed whose devices keep a model in such tiers

_RULES: Final[tuple[Mapping[str, Any], ...]] = (
    {"name": "fedavgm", "momentum": 0.5},
    {"name": "fedadam", "learning_rate": 0.1},
    {"name": "fedyogi", "learning_rate": 0.1},
    {"name": "fedexp"},
    {"name": "fednova"},
    *({"name": "trimmed_mean", "trim": 0.0},) * 2,  # for any number of children, as the next one
    {"name": "krum", "wrong": 0},
)
# Not `oort`: it depends on time, so a disturbed lab has another model than an undisturbed one.
_SELECTORS: Final[tuple[Mapping[str, Any], ...]] = ({"name": "round_robin"}, {"name": "power_of_choice"})


def with_methods(rng: random.Random, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a drawn lab in which some tiers have newer rules, selectors and bounds."""
    if "tiers" in tree:
        return {**tree, "tiers": [_tier(rng, tier) for tier in tree["tiers"]]}
    return {**tree, **{key: _tier(rng, tree[key]) for key in ("cloud", "institution") if key in tree}}


def with_states(rng: random.Random, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a drawn lab whose devices keep vectors, and with SCAFFOLD send and receive some behind the models."""
    name = rng.choice(["scaffold", "scaffold", "feddyn"])
    rule = {"aggregation": {"name": name}}
    found = {**tree, "training": {**tree["training"], "objective": {"name": name}}}
    if "tiers" in tree:
        return {**found, "tiers": [*tree["tiers"][:-1], {**tree["tiers"][-1], **rule}]}
    last = "institution" if "institution" in tree else "cloud"
    return {**found, last: {**tree[last], **rule}}


def with_clusters(rng: random.Random, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a drawn lab whose tiers select by clusters, of children or of their steps, where no quorum has to fit."""
    if "tiers" in tree:
        return {**tree, "tiers": [_clustered(rng, tier) for tier in tree["tiers"]]}
    return {**tree, **{key: _clustered(rng, tree[key]) for key in ("cloud", "institution") if key in tree}}


def with_buffers(rng: random.Random, tree: Mapping[str, Any], *, memories: bool) -> dict[str, Any]:
    """Return a drawn lab of which a tier at least aggregates buffers; with `memories` its devices keep a model."""
    objective = {"objective": {"name": "moon"}} if memories else {}
    settings = {key: value for key, value in tree["training"].items() if key != "objective"}
    found = {**tree, "training": settings | objective}
    if "tiers" in tree:
        chosen = rng.randrange(len(tree["tiers"]))
        tiers = [_buffered(rng, tier, i == chosen) for i, tier in enumerate(tree["tiers"])]
        return {**found, "tiers": tiers, "cloud": _fixed(tree["cloud"])}
    keys = [key for key in ("cloud", "institution") if key in tree]
    chosen = rng.randrange(len(keys))
    found |= {key: _buffered(rng, tree[key], i == chosen) for i, key in enumerate(keys)}
    return {**found, "cloud": _fixed(found["cloud"])}


def _fixed(cloud: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in cloud.items() if key != "epoch_control"}


def _buffered(rng: random.Random, tier: Mapping[str, Any], always: bool) -> dict[str, Any]:
    objective = tier.get("aggregation", {}).get("name") in ("scaffold", "feddyn")
    if not always and rng.random() < 0.5:
        return {**tier, "aggregation": {"name": "fedavg"}} if objective else dict(tier)
    kept = {key: value for key, value in tier.items() if key not in ("closing", "norm_bound", "selection")}
    return {**kept, "aggregation": {"name": "fedbuff", "buffer": rng.choice([1, 1, 2])}}


def _clustered(rng: random.Random, tier: Mapping[str, Any]) -> dict[str, Any]:
    if tier.get("closing"):
        return dict(tier)
    found = {**tier, "participation": rng.choice([0.5, 0.75, 1.0])}
    if tier.get("aggregation", {}).get("name") in ("scaffold", "feddyn") or rng.random() < 0.4:
        return {**found, "selection": {"name": "fedcluster"}}
    found.pop("selection", None)
    return {**found, "aggregation": {"name": "clusamp", "distance": rng.choice(["cosine", "l1", "l2"])}}


def _tier(rng: random.Random, tier: Mapping[str, Any]) -> dict[str, Any]:
    return {**tier, **dict(_changes(rng, tier))}


def _changes(rng: random.Random, tier: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if rng.random() < 0.6:
        yield "aggregation", dict(rng.choice(_RULES))
    if rng.random() < 0.3:
        yield "norm_bound", {"action": rng.choice(["clip", "refuse"]), "factor": rng.choice([1.0, 2.0])}
    if rng.random() < 0.7:
        yield "selection", dict(rng.choice(_SELECTORS))
        if not tier.get("closing"):  # else the quorum may not fit
            yield "participation", rng.choice([0.5, 0.75])
