"""The tiers of a lab: between the nodes of one layer and those of the next.

    cloud  --tier 0-->  institutions  --tier 1-->  devices

A tier has the rounds of its parents over their children, and the links between them. Any number of
tiers makes a lab: one has a cloud and devices, two have institutions between, three have regions
above these, and so on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import Annotated, Final, Literal

from pydantic import Field

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.methods.settings import (
    Aggregation,
    NormBound,
    RuleSettings,
    Selection,
    fedavg,
    fraction,
)
from fedstrata.common.model.codec_settings import Codecs
from fedstrata.common.settings.links import LinkSettings
from fedstrata.common.settings.privacy import PrivacySettings
from fedstrata.common.settings.tables import (
    NAME_FORM,
    Count,
    Name,
    Positive,
    SettingsTable,
    form,
    proposal,
)
from fedstrata.common.settings.topology import CLOUD, RESERVED, Tree, participants

DEVICE: Final = "device"
TIER_NAME: Final = r"[a-z][a-z0-9-]{0,15}"
TIERS_MOST: Final = 16
NODES_MOST: Final = 1_000_000  # each has its name in memory
# rounds.csv has columns of nodes that begin with these
TAKEN: Final = ("epochs", "omega", "spread", "epsilon")


class Closing(SettingsTable):
    """When a round closes: with all results, or with `quorum` of them once `deadline_s` has
    passed.
    """

    # `all` waits for every child that takes part; `quorum` needs the two keys below.
    rule: Literal["all", "quorum"] = "all"
    quorum: Count | None = None  # results that are enough
    # seconds since the round opened; before that the round waits for all
    deadline_s: Positive | None = None

    def among(self, children: int) -> Closing:
        """Return the rule of a round with so many children: a larger quorum is all of them."""
        if (self.quorum or 0) <= children:
            return self
        return self.model_copy(update={"quorum": children})

    def uploads_of(self, children: int) -> int:
        """Return how many uploads of so many children close a round."""
        if self.rule == "all":
            return children
        return min(self.quorum or children, children)


@dataclass(frozen=True, slots=True)
class Minimum:
    """The children that a parent needs, and how long the first round waits for the others once
    these are ready.
    """

    children: int
    wait_s: float


class RoundSettings(SettingsTable):
    """The rounds of a tier's parents: who takes part, the rule, and when a round closes."""

    # Share of a parent's children in a round, above 0: max(1, floor(share * number)).
    participation: Annotated[float, Field(le=1)] = 1.0
    selection: Selection = Field(default_factory=fraction)
    aggregation: Aggregation = Field(default_factory=fedavg)
    norm_bound: NormBound = NormBound()
    privacy: PrivacySettings = PrivacySettings()
    closing: Closing = Closing()
    # The children that a parent needs: their number, or a share of them below 1. Others may be
    # absent when the run begins and take part once they are ready, and may leave. Without it the
    # parent waits for each child.
    min_available: Count | Annotated[float, Field(gt=0, lt=1)] | None = None
    # Seconds for which the first round waits for other children once `min_available` are ready.
    start_wait_s: Annotated[float, Field(ge=0)] = 60.0
    # Devices that each parent takes in at a time while the run goes on: nodes of the lab that the
    # experiment does not name, and devices that move to it. They take part from the next round on,
    # and give back their places when they have been away for `transfer.idle_s`. It needs
    # `min_available`.
    entering: Annotated[int, Field(ge=0, le=10_000)] = 0
    # Seconds after which a device whose parent is gone moves to another one; omitted: it waits for
    # its own.
    move_after_s: Positive | None = None


class TierNodes(SettingsTable):
    """The children of a tier's parents, and how often they take part."""

    # Of its columns in rounds.csv and its rows in links.csv: small letters, digits, dashes.
    name: Annotated[
        str, form(rf"^{TIER_NAME}$", "lower-case letters, digits and -, at most 16, a letter first")
    ]
    # What its children are: `region` makes the names `region-0`, `region-1`, ...; the last tier's
    # are devices.
    children: Annotated[str, form(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,47}$", NAME_FORM.format(48))] = (
        DEVICE
    )
    fan_out: Count = 1  # children of each parent
    # Children of all parents together, in place of `fan_out`: their numbers differ by at most one.
    number: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    # The children of each parent by name, in place of `fan_out`.
    members: dict[Name, list[Name]] = Field(default_factory=dict)
    # of a parent, for each round of the tier above; the first tier's are the experiment's `rounds`
    rounds: Count = 1

    def sizes(self, parents: int) -> list[int]:
        """Return the number of children of each of so many parents."""
        if self.members:
            return [len(names) for names in self.members.values()]
        if self.number is None:
            return [self.fan_out] * parents
        return shares(self.number, parents)

    def below(self, parents: Sequence[str]) -> dict[str, list[str]]:
        """Return the names of each parent's children."""
        if self.members:
            return {parent: list(self.members[parent]) for parent in parents}
        ends = accumulate(self.sizes(len(parents)), initial=0)
        return {
            parent: [f"{self.children}-{i}" for i in range(start, end)]
            for parent, (start, end) in zip(parents, pairwise(ends), strict=True)
        }


class Tier(RoundSettings, TierNodes):
    """One tier, from the root down: who its children are, its parents' rounds over them, and the
    links between.
    """

    # between a parent and a child; `links.of.NODE` is that of a single node
    link: LinkSettings = LinkSettings()
    transfer: Codecs = Codecs()

    @property
    def timed(self) -> bool:
        """Whether the models depend on time."""
        return (
            self.closing.rule == "quorum"
            or self.aggregation.buffers
            or self.min_available is not None
        )

    def minimum_of(self, children: int) -> Minimum | None:
        """Return what a parent of so many children needs; None: it waits for each of them."""
        if self.min_available is None:
            return None
        given = self.min_available
        return Minimum(
            given if isinstance(given, int) else participants(children, given), self.start_wait_s
        )

    def closing_of(self, children: int, *, among: int) -> Closing:
        """Return when a round closes in which so many children take part, of a parent of `among`
        children.

        With `min_available` a lost child is left out: the round needs what this minimum makes of
        the participation.
        """
        if (enough := self.aggregation.closes_with) is not None:
            return Closing.model_construct(rule="quorum", quorum=enough, deadline_s=0.0)
        minimum = self.minimum_of(among)
        if minimum is not None and self.closing.rule == "all":
            quorum = min(children, participants(minimum.children, self.participation))
            return Closing.model_construct(rule="quorum", quorum=quorum, deadline_s=inf)
        return self.closing.among(children)

    @property
    def compares_losses(self) -> bool:
        """Whether a result must have a training loss."""
        return self.aggregation.compares_losses or self.selection.compares_losses

    @property
    def remembers(self) -> bool:
        """Whether its parents below the cloud have state that persists between their tasks."""
        return self.aggregation.remembers or self.selection.remembers or self.privacy.remembers


def shares(number: int, parents: int) -> list[int]:
    """Return how many of so many children each parent has, in numbers that differ by at most
    one.
    """
    return [
        end - start
        for start, end in pairwise(number * place // parents for place in range(parents + 1))
    ]


def check_rounds(key: str, tier: Tier, sizes: Sequence[int]) -> None:
    """Check that rounds of a tier whose parents have so many children are possible. Raises
    InvalidExperiment.
    """
    if tier.participation <= 0:
        remedy = "Give a fraction above 0 and at most 1."
        raise InvalidExperiment(
            f"{key}.participation", tier.participation, "selects no clients", remedy
        )
    selected = [participants(size, tier.participation) for size in set(sizes)]
    _check_closing(f"{key}.closing", tier.closing, min(selected))
    _check_minimum(key, tier, min(sizes))
    for size in {min(sizes), max(sizes)}:
        count = participants(size, tier.participation)
        uploads = tier.closing.uploads_of
        for taking_part in {count, min(count, _fewest(tier, size))}:
            fewest = min(uploads(taking_part), _fewest(tier, size))
            tier.aggregation.check(f"{key}.aggregation", taking_part, fewest)
    tier.selection.check(f"{key}.selection", max(sizes), max(selected))
    _check_alone(key, tier)


def _fewest(tier: Tier, size: int) -> int:
    """Return how many of so many children take part at least."""
    minimum = tier.minimum_of(size)
    return participants(size if minimum is None else minimum.children, tier.participation)


def _check_minimum(key: str, tier: Tier, fewest: int) -> None:
    """Check a parent's least children against the fewest that one has. Raises InvalidExperiment."""
    given = tier.min_available
    if given is None:
        return
    if given > fewest:
        problem = f"more than the children of a parent ({fewest})"
        remedy = f"Use at most {fewest}."
        raise InvalidExperiment(f"{key}.min_available", given, problem, remedy)
    if tier.aggregation.selects:
        problem = f"the rule {tier.aggregation.name} selects from all children"
        raise InvalidExperiment(
            f"{key}.min_available", given, problem, "Omit it, or use another rule."
        )


def check_tiers(tiers: Sequence[Tier]) -> None:
    """Check the form of `[[tiers]]`, each by itself and beside the others. Raises
    InvalidExperiment.
    """
    if len(tiers) > TIERS_MOST:
        raise InvalidExperiment(
            "tiers", f"{len(tiers)} tables", "too many tiers", f"Use at most {TIERS_MOST}."
        )
    for key in ("name", "children"):
        double = _double(getattr(tier, key) for tier in tiers)
        if double:
            raise InvalidExperiment(
                f"tiers.{key}", double, "two tiers have it", "Give every tier its own."
            )
    for tier in tiers:
        if tier.name in TAKEN:
            raise InvalidExperiment(
                "tiers.name", tier.name, "rounds.csv has other columns of this name", "Rename it."
            )
    if tiers[0].rounds != 1:
        key = f"tiers.{tiers[0].name}.rounds"
        problem = "the first tier's rounds are the global rounds"
        raise InvalidExperiment(key, tiers[0].rounds, problem, "Set rounds.")
    parents = 1
    for place, tier in enumerate(tiers):
        key = f"tiers.{tier.name}"
        given = {
            "fan_out": tier.fan_out > 1,
            "number": tier.number is not None,
            "members": bool(tier.members),
        }
        if sum(given.values()) > 1:
            first, second, *_ = (name for name, is_given in given.items() if is_given)
            raise InvalidExperiment(
                f"{key}.{second}", getattr(tier, second), f"{first} is given too", "Remove one."
            )
        if tier.members:
            _check_members(key, tier, Tree(layers_of(tiers[:place])).layers[-1])
        elif tier.number is not None and tier.number < parents:
            raise InvalidExperiment(
                f"{key}.number", tier.number, f"there are {parents} parents", f"Use {parents}."
            )
        elif tier.number is None and parents * tier.fan_out > NODES_MOST:
            problem = f"{parents} parents would have more than {NODES_MOST:,} children"
            raise InvalidExperiment(f"{key}.fan_out", tier.fan_out, problem, "Use fewer.")
        parents = sum(tier.sizes(parents))
    if any(tier.members for tier in tiers):  # names by number cannot clash: their beginnings differ
        _check_names(
            [name for layer in layers_of(tiers) for names in layer.values() for name in names]
        )


def layers_of(tiers: Sequence[Tier]) -> list[dict[str, list[str]]]:
    """Return the children of each parent, by layer from the cloud down."""
    layers: list[dict[str, list[str]]] = []
    for tier in tiers:
        layers.append(
            tier.below(
                [name for names in layers[-1].values() for name in names] if layers else [CLOUD]
            )
        )
    return layers


def sizes_of(tiers: Sequence[Tier]) -> list[list[int]]:
    """Return the number of children of each parent, by tier: without names, there may be
    millions.
    """
    sizes: list[list[int]] = []
    for tier in tiers:
        sizes.append(tier.sizes(sum(sizes[-1]) if sizes else 1))
    return sizes


def _check_closing(key: str, closing: Closing, children: int) -> None:
    """Check that a round with this number of children can close. Raises InvalidExperiment."""
    if closing.rule == "all":
        return
    if closing.quorum is None or closing.deadline_s is None:
        missing = "quorum" if closing.quorum is None else "deadline_s"
        raise InvalidExperiment(
            f"{key}.{missing}", None, "rule 'quorum' needs it", f"Set {key}.{missing}."
        )
    if closing.quorum > children:
        problem = f"more than the children that take part ({children})"
        raise InvalidExperiment(
            f"{key}.quorum", closing.quorum, problem, f"Give at most {children}."
        )


def _check_alone(key: str, tier: Tier) -> None:
    """Check that a tier has no settings that its rule replaces. Raises InvalidExperiment."""
    rule = tier.aggregation
    replaced = []
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
            raise InvalidExperiment(
                f"{key}.{name}", value, problem, f"Use {default!r}, or another rule."
            )


def _check_members(key: str, tier: Tier, parents: Sequence[str]) -> None:
    for unknown in tier.members.keys() - set(parents):
        remedy = proposal(unknown, parents, what="There are")
        raise InvalidExperiment(
            f"{key}.members.{unknown}", tier.members[unknown], "no parent has this name", remedy
        )
    for parent in parents:
        if not tier.members.get(parent):
            raise InvalidExperiment(
                f"{key}.members", parent, "it would have no child", "Give every parent children."
            )


def _check_names(nodes: Sequence[str]) -> None:
    double = _double(nodes)
    for name in nodes:
        if name in RESERVED or name == double:
            problem = "two nodes share this name" if name == double else "the name is reserved"
            raise InvalidExperiment("tiers", name, problem, "Give every node its own name.")


def _double(names: Iterable[str]) -> str | None:
    return next((name for name, times in Counter(names).items() if times > 1), None)


def check_private(key: str, rule: RuleSettings, *, unit: str) -> None:
    """Check that a rule's models depend on private data by the noised updates alone. Raises
    InvalidExperiment.

    `unit`: of the rule's tier, or of one below it.
    """
    problem = ""
    if rule.reads_losses or rule.compares_losses:
        problem = "its models depend on training losses, which have no noise"
    elif rule.returns:
        problem = (
            f"devices return {', '.join(rule.returns)}, which are not clipped and have no noise"
        )
    elif rule.buffers:
        problem = "its uploads belong to models of several rounds"
    if problem:
        remedy = f"Use another rule, or no privacy of unit {unit!r}."
        raise InvalidExperiment(f"{key}.name", rule.name, problem, remedy)
