"""The tiers of a lab: between the nodes of one layer and those of the next, and the tree of all nodes.

    cloud  --tier 0-->  institutions  --tier 1-->  devices

A tier has the rounds of its parents over their children, and the links between them. Any number of tiers makes a lab:
one has a cloud and devices, two have institutions between, three have regions above these, and so on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import Field

from common.errors import InvalidExperiment, LeftOut
from common.experiment.links import Codecs, LinkSettings
from common.experiment.methods import Aggregation, NormBound, Selection, fedavg, fraction
from common.experiment.rounds import Closing, Share
from common.experiment.tables import NAME_FORM, Count, Name, SettingsTable, form, proposal
from common.experiment.topology import CLOUD, RESERVED

DEVICE: Final = "device"
TIER_NAME: Final = r"[a-z][a-z0-9-]{0,15}"
TIERS_MOST: Final = 16
NODES_MOST: Final = 1_000_000  # each has its name in memory
TAKEN: Final = ("epochs", "omega", "spread")  # rounds.csv has columns of nodes that begin with these


class Tier(SettingsTable):
    """One tier, from the root down: who its children are, its parents' rounds over them, and the links between."""

    # Of its columns in rounds.csv and its rows in links.csv: small letters, digits, dashes.
    name: Annotated[str, form(rf"^{TIER_NAME}$", "lower-case letters, digits and -, at most 16, a letter first")]
    # What its children are: `region` makes the names `region-0`, `region-1`, ...; the last tier's are devices.
    children: Annotated[str, form(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,47}$", NAME_FORM.format(48))] = DEVICE
    fan_out: Count = 1  # children of each parent
    # The children of each parent by name, in place of `fan_out`.
    members: dict[Name, list[Name]] = Field(default_factory=dict)
    rounds: Count = 1  # of a parent, for each round of the tier above; the first tier's are the experiment's `rounds`
    participation: Share = 1.0  # share of a parent's children in a round, above 0: max(1, floor(share * number))
    selection: Selection = Field(default_factory=fraction)
    aggregation: Aggregation = Field(default_factory=fedavg)
    norm_bound: NormBound = NormBound()
    closing: Closing = Closing()
    link: LinkSettings = LinkSettings()  # between a parent and a child; `links.of.NODE` is that of a single node
    transfer: Codecs = Codecs()

    @property
    def timed(self) -> bool:
        """Whether the models depend on time."""
        return self.closing.rule == "quorum" or self.aggregation.buffers

    def closing_of(self, children: int) -> Closing:
        """Return when a round closes of which so many children may answer."""
        if (enough := self.aggregation.closes_with) is not None:
            return Closing.model_construct(rule="quorum", quorum=enough, deadline_s=0.0)
        return self.closing.among(children)

    @property
    def remembers(self) -> bool:
        """Whether its parents below the cloud have state that persists between their tasks."""
        return self.aggregation.remembers or self.selection.remembers


def check_alone(key: str, tier: Tier) -> None:
    """Check that a tier has no settings that its rule replaces. Raises InvalidExperiment."""
    rule, replaced = tier.aggregation, []
    if rule.selects or rule.buffers:
        replaced.append(("selection.name", tier.selection.name, "fraction"))
    if rule.buffers:
        replaced += [
            ("closing.rule", tier.closing.rule, "all"),
            ("norm_bound.action", tier.norm_bound.action, "off"),
        ]
    for name, value, default in replaced:
        if value != default:
            problem = f"the rule {rule.name} goes without it"
            raise InvalidExperiment(f"{key}.{name}", value, problem, f"Use {default!r}, or another rule.")


class Tree:
    """The nodes of a lab. `layers`: the children of each parent, by layer from the cloud down; names are unique.

    `devices`: in the order of their data partitions, if that is not the order of the tree.
    """

    def __init__(self, layers: Sequence[Mapping[str, Sequence[str]]], devices: Sequence[str] | None = None) -> None:
        self.children = {parent: list(names) for layer in layers for parent, names in layer.items()}
        self.layers = [[CLOUD], *([name for names in layer.values() for name in names] for layer in layers)]
        self.devices = list(self.layers[-1] if devices is None else devices)
        self._parents = {child: parent for parent, names in self.children.items() for child in names}
        self._depths = {name: depth for depth, names in enumerate(self.layers) for name in names}
        self._below: dict[str, int] = {}
        for parent, names in reversed(self.children.items()):
            self._below[parent] = sum(1 + self.count_below(name) for name in names)

    def __contains__(self, node: object) -> bool:
        return node in self._depths

    @property
    def aggregators(self) -> list[str]:
        """The nodes between the cloud and the devices, from the top down."""
        return [name for layer in self.layers[1:-1] for name in layer]

    @property
    def nodes(self) -> list[str]:
        """All nodes but the cloud, from the top down; the devices in the order of their data partitions."""
        return [*self.aggregators, *self.devices]

    def parent(self, node: str) -> str:
        """Return a node's parent. Raises KeyError for the cloud and for unknown nodes."""
        return self._parents[node]

    def depth(self, node: str) -> int:
        """Return the number of links between a node and the cloud. Raises KeyError."""
        return self._depths[node]

    def path(self, node: str) -> str:
        """Return the names from the cloud down to a node, with `/` between them. Raises KeyError."""
        names = [node]
        while names[-1] != CLOUD:
            names.append(self._parents[names[-1]])
        return "/".join(reversed(names))

    def below(self, node: str) -> Iterator[str]:
        """Yield all nodes below a node, children before grandchildren."""
        for child in self.children.get(node, ()):
            yield child
        for child in self.children.get(node, ()):
            yield from self.below(child)

    def count_below(self, node: str) -> int:
        """Return the number of nodes below a node."""
        return self._below.get(node, 0)

    def below_each(self, node: str) -> dict[str, tuple[str, ...]]:
        """Return for each child of a node all nodes below that child."""
        return {child: tuple(self.below(child)) for child in self.children[node]}


def check_tiers(tiers: Sequence[Tier]) -> None:
    """Check the form of `[[tiers]]`, each by itself and beside the others. Raises InvalidExperiment."""
    if len(tiers) > TIERS_MOST:
        raise InvalidExperiment("tiers", f"{len(tiers)} tables", "too many tiers", f"Use at most {TIERS_MOST}.")
    for key in ("name", "children"):
        double = _double(getattr(tier, key) for tier in tiers)
        if double:
            raise InvalidExperiment(f"tiers.{key}", double, "two tiers have it", "Give every tier its own.")
    for tier in tiers:
        if tier.name in TAKEN:
            raise InvalidExperiment("tiers.name", tier.name, "rounds.csv has other columns of this name", "Rename it.")
    if tiers[0].rounds != 1:
        raise InvalidExperiment(
            "tiers.0.rounds", tiers[0].rounds, "the first tier's rounds are the global rounds", "Set rounds."
        )
    parents = [CLOUD]
    for place, tier in enumerate(tiers):
        if tier.members:
            _check_members(f"tiers.{place}", tier, parents)
        elif len(parents) * tier.fan_out > NODES_MOST:
            problem = f"{len(parents)} parents would have more than {NODES_MOST:,} children"
            raise InvalidExperiment(f"tiers.{place}.fan_out", tier.fan_out, problem, "Use fewer.")
        parents = [name for names in _layer(tier, parents).values() for name in names]
    everybody = [CLOUD, *(name for layer in layers_of(tiers) for names in layer.values() for name in names)]
    double = _double(everybody)
    if double or any(name in RESERVED for name in everybody[1:]):
        problem = "two nodes share this name" if double else "the name is reserved"
        name = double or next(name for name in everybody[1:] if name in RESERVED)
        raise InvalidExperiment("tiers", name, problem, "Give every node its own name.")


def check_parent(tree: Tree, node: str, parent: str, *, role: str, among: Sequence[str]) -> None:
    """Check the parent that a node was started with; `among`: the nodes of its role.

    Raises InvalidExperiment, LeftOut if the node has no parent there.
    """
    home = tree.parent(node) if node in among else None
    if home != parent:
        problem = f"it belongs to {home}" if home else f"no {role} of this experiment"
        there = [name for name in tree.children.get(parent, ()) if name in among]
        remedy = f"{parent} has {', '.join(there or [f'no {role}'])}."
        refused = InvalidExperiment if home else LeftOut
        raise refused("--parent", parent, f"{node} is not there: {problem}", remedy)


def layers_of(tiers: Sequence[Tier]) -> list[dict[str, list[str]]]:
    """Return the children of each parent, by layer from the cloud down."""
    parents, layers = [CLOUD], []
    for tier in tiers:
        layers.append(_layer(tier, parents))
        parents = [name for names in layers[-1].values() for name in names]
    return layers


def _layer(tier: Tier, parents: Sequence[str]) -> dict[str, list[str]]:
    if tier.members:
        return {parent: list(tier.members[parent]) for parent in parents}
    size = tier.fan_out
    return {
        parent: [f"{tier.children}-{i}" for i in range(place * size, (place + 1) * size)]
        for place, parent in enumerate(parents)
    }


def _check_members(key: str, tier: Tier, parents: Sequence[str]) -> None:
    for unknown in tier.members.keys() - set(parents):
        remedy = proposal(unknown, parents, what="There are")
        raise InvalidExperiment(f"{key}.members.{unknown}", tier.members[unknown], "no parent has this name", remedy)
    for parent in parents:
        if not tier.members.get(parent):
            raise InvalidExperiment(f"{key}.members", parent, "it would have no child", "Give every parent children.")


def _double(names: Any) -> str | None:
    return next((name for name, times in Counter(names).items() if times > 1), None)
