"""What the links of a tier carry: models with their extras, and with secure sums words upward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.experiment.tiers import Tier
from fedstrata.common.methods.rule import link_layouts
from fedstrata.common.model.layout import LinkLayouts, ModelLayout
from fedstrata.common.secure.member import SecureMember
from fedstrata.common.secure.ring import Ring


def ring_of(experiment: Experiment, tier: Tier, layout: ModelLayout) -> Ring | None:
    """Return the ring of a tier's sums, None if it has none; `layout`: the model's."""
    if tier.secure is None:
        return None
    place = experiment.tier_names.index(tier.name)
    most = max(experiment.sizes()[place]) + tier.entering
    return Ring(tier.secure, layout, tier.secure.word_bits(most))


def links_of(experiment: Experiment, tier: Tier, layout: ModelLayout) -> LinkLayouts:
    """Return what goes down and up the links of a tier."""
    links = link_layouts(tier.aggregation, layout)
    ring = ring_of(experiment, tier, layout)
    return links if ring is None else replace(links, up=ring.layout)


def member_of(
    experiment: Experiment, node: str, layout: ModelLayout, *, noise: Callable[[int], bytes]
) -> SecureMember | None:
    """Return a node's part in the sums of its parent, None if this one has none."""
    ring = ring_of(experiment, experiment.tier_above(node), layout)
    if ring is None:
        return None
    return SecureMember(ring, node=node, seed=experiment.seed, noise=noise)
