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
from math import inf, prod
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

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
from fedstrata.common.settings.closing import Closing, refused_closing
from fedstrata.common.settings.links import LinkSettings
from fedstrata.common.settings.privacy import PrivacySettings
from fedstrata.common.settings.secure import SecureSettings
from fedstrata.common.settings.tables import (
    NAME_FORM,
    Count,
    Name,
    Positive,
    Refused,
    SettingsTable,
    check_table,
    form,
    proposal,
)
from fedstrata.common.settings.topology import CLOUD, RESERVED, Tree, joined, participants

DEVICE: Final = "device"
TIER_NAME: Final = r"[a-z][a-z0-9-]{0,15}"
TIERS_MOST: Final = 16
NODES_MOST: Final = 1_000_000  # each has its name in memory
# the tiers that the short form stands for: name, children
SHORT: Final = (("wan", "institution"), ("lan", DEVICE))
TierTable: TypeAlias = Literal["", "link", "transfer"]  # a table of a tier beside its rounds
# rounds.csv has columns of nodes that begin with these
TAKEN: Final = ("epochs", "omega", "spread", "epsilon")


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
    # Parents learn the sum of their children's models alone. Omitted: each model.
    secure: SecureSettings | None = None
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

    @model_serializer(mode="wrap")
    def _without_sums(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if value or key != "secure"}


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
        found = {}
        for parent, (start, end) in zip(parents, pairwise(ends), strict=True):
            found[parent] = [f"{self.children}-{i}" for i in range(start, end)]
        return found


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
        needed = self.min_available
        if needed is None:
            return None
        if not isinstance(needed, int):
            needed = participants(children, needed)
        return Minimum(needed, self.start_wait_s)

    def closing_of(self, children: int, *, among: int) -> Closing:
        """Return when a round closes in which so many children take part, of a parent of `among`
        children.

        With `min_available` a lost child is left out: the round needs what this minimum makes of
        the participation.
        """
        enough = self.aggregation.closes_with
        if enough is not None:
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
    """Return the children of each of so many parents, in numbers that differ by at most one."""
    ends = [number * place // parents for place in range(parents + 1)]
    return [end - start for start, end in pairwise(ends)]


def is_short(tiers: Sequence[Tier]) -> bool:
    """Return whether a file may have these tiers in the short form."""
    shape = tuple((tier.name, tier.children) for tier in tiers)
    counted = all(tier.members or tier.number for tier in tiers)
    return counted and shape in (SHORT, (("wan", DEVICE),))


def key_of(tiers: Sequence[Tier], tier: Tier, table: TierTable = "") -> str:
    """Return the key in the file of a tier's rounds, or of its link or transfer."""
    if not is_short(tiers):
        return f"tiers.{tier.name}.{table}".rstrip(".")
    if table == "link":
        return f"links.{tier.name}"
    if table:
        return f"{table}.{tier.name}"
    return CLOUD if tier.name == "wan" else "institution"


def rounds_of(tiers: Sequence[Tier], depth: int) -> int:
    """Return how many rounds a parent at a depth, the cloud's is 0, runs in a global round."""
    return prod(tier.rounds for tier in tiers[1 : depth + 1])


def check_rounds(key: str, tier: Tier, sizes: Sequence[int]) -> None:
    """Check that rounds of parents with so many children are possible. Raises InvalidExperiment."""
    check_table(key, tier, _refused_share(tier))
    selected = [participants(size, tier.participation) for size in set(sizes)]
    check_table(f"{key}.closing", tier.closing, refused_closing(key, tier.closing, min(selected)))
    check_table(key, tier, _refused_minimum(tier, min(sizes)))
    for size in {min(sizes), max(sizes)}:
        count = participants(size, tier.participation)
        uploads = tier.closing.uploads_of
        for taking_part in {count, min(count, fewest_of(tier, size))}:
            fewest = min(uploads(taking_part), fewest_of(tier, size))
            tier.aggregation.check(f"{key}.aggregation", taking_part, fewest)
    tier.selection.check(f"{key}.selection", max(sizes), max(selected))
    check_table(key, tier, _refused_beside(tier))


def _refused_share(tier: Tier) -> Refused:
    if tier.participation <= 0:
        yield "participation", "selects no clients", "Give a fraction above 0 and at most 1."


def fewest_of(tier: Tier, size: int) -> int:
    """Return how many of so many children take part at least."""
    minimum = tier.minimum_of(size)
    if minimum is not None:
        size = minimum.children
    return participants(size, tier.participation)


def _refused_minimum(tier: Tier, fewest: int) -> Refused:
    """Yield why a parent cannot do with its least children, if one has the `fewest`."""
    if tier.min_available is None:
        return
    if tier.min_available > fewest:
        problem = f"more than the children of a parent ({fewest})"
        yield "min_available", problem, f"Use at most {fewest}."
    if tier.aggregation.selects:
        problem = f"the rule {tier.aggregation.name} selects from all children"
        yield "min_available", problem, "Omit it, or use another rule."


def check_tiers(tiers: Sequence[Tier]) -> None:
    """Check the form of `[[tiers]]`, each by itself and beside the others. Raises
    InvalidExperiment.
    """
    if len(tiers) > TIERS_MOST:
        remedy = f"Use at most {TIERS_MOST}."
        raise InvalidExperiment("tiers", f"{len(tiers)} tables", "too many tiers", remedy)
    for key in ("name", "children"):
        found = double(getattr(tier, key) for tier in tiers)
        if found:
            remedy = "Give every tier its own."
            raise InvalidExperiment(f"tiers.{key}", found, "two tiers have it", remedy)
    for tier in tiers:
        if tier.name in TAKEN:
            problem = "rounds.csv has other columns of this name"
            raise InvalidExperiment("tiers.name", tier.name, problem, "Rename it.")
    first = tiers[0]
    if first.rounds != 1:
        key = f"tiers.{first.name}.rounds"
        problem = "the first tier's rounds are the global rounds"
        raise InvalidExperiment(key, first.rounds, problem, "Set rounds.")
    parents = 1
    for place, tier in enumerate(tiers):
        key = f"tiers.{tier.name}"
        check_table(key, tier, _refused_twice(tier))
        if tier.members:
            _check_members(key, tier, Tree(layers_of(tiers[:place])).layers[-1])
        else:
            check_table(key, tier, _refused_number(tier, parents))
        parents = sum(tier.sizes(parents))
    if any(tier.members for tier in tiers):  # names by number cannot clash: their beginnings differ
        _check_names(Tree(layers_of(tiers)).nodes)


def _refused_twice(tier: Tier) -> Refused:
    """Yield the second of the keys that give the children."""
    keys: dict[str, object] = {"fan_out": 1, "number": None, "members": {}}
    given = [key for key, unset in keys.items() if getattr(tier, key) != unset]
    for key in given[1:]:
        yield key, f"{given[0]} is given too", "Remove one."


def _refused_number(tier: Tier, parents: int) -> Refused:
    if tier.number is None:
        if parents * tier.fan_out > NODES_MOST:
            problem = f"{parents} parents would have more than {NODES_MOST:,} children"
            yield "fan_out", problem, "Use fewer."
    elif tier.number < parents:
        yield "number", f"there are {parents} parents", f"Use {parents}."


def layers_of(tiers: Sequence[Tier]) -> list[dict[str, list[str]]]:
    """Return the children of each parent, by layer from the cloud down."""
    layers: list[dict[str, list[str]]] = []
    parents = [CLOUD]
    for tier in tiers:
        layers.append(tier.below(parents))
        parents = joined(layers[-1].values())
    return layers


def sizes_of(tiers: Sequence[Tier]) -> list[list[int]]:
    """Return the number of children of each parent, by tier: there may be millions."""
    sizes: list[list[int]] = []
    parents = 1
    for tier in tiers:
        sizes.append(tier.sizes(parents))
        parents = sum(sizes[-1])
    return sizes


def _refused_beside(tier: Tier) -> Refused:
    """Yield the settings of a tier that its rule replaces."""
    rule = tier.aggregation
    replaced = {}
    if rule.selects or rule.buffers:
        replaced["selection.name"] = (tier.selection.name, "fraction")
    if rule.buffers:
        replaced["closing.rule"] = (tier.closing.rule, "all")
        replaced["norm_bound.action"] = (tier.norm_bound.action, "off")
    for key, (value, default) in replaced.items():
        if value != default:
            problem = f"the rule {rule.name} goes without it"
            yield key, problem, f"Use {default!r}, or another rule."


def _check_members(key: str, tier: Tier, parents: Sequence[str]) -> None:
    for unknown in tier.members.keys() - set(parents):
        at = f"{key}.members.{unknown}"
        remedy = proposal(unknown, parents, what="There are")
        raise InvalidExperiment(at, tier.members[unknown], "no parent has this name", remedy)
    for parent in parents:
        if not tier.members.get(parent):
            remedy = "Give every parent children."
            raise InvalidExperiment(f"{key}.members", parent, "it would have no child", remedy)


def _check_names(nodes: Sequence[str]) -> None:
    twice = double(nodes)
    for name in nodes:
        if name in RESERVED or name == twice:
            problem = "two nodes share this name" if name == twice else "the name is reserved"
            raise InvalidExperiment("tiers", name, problem, "Give every node its own name.")


def double(names: Iterable[str]) -> str | None:
    """Return the first name that occurs twice, None if all differ."""
    for name, times in Counter(names).items():
        if times > 1:
            return name
    return None


def refused_private(rule: RuleSettings, unit: str) -> Refused:
    """Yield why a rule's models do not depend on private data by the noised updates alone.

    `unit`: of the rule's tier, or of one below it.
    """
    remedy = f"Use another rule, or no privacy of unit {unit!r}."
    if rule.reads_losses or rule.compares_losses:
        problem = "its models depend on training losses, which have no noise"
        yield "aggregation.name", problem, remedy
    if rule.returns:
        vectors = ", ".join(rule.returns)
        problem = f"devices return {vectors}, which are not clipped and have no noise"
        yield "aggregation.name", problem, remedy
    if rule.buffers:
        yield "aggregation.name", "its uploads belong to models of several rounds", remedy
