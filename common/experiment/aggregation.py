"""What an experiment may say about a tier's aggregation rule: one table for each, told apart by its `name`.

The formulas and their sources are in `common/aggregation/`, one file for each rule. Rounds are the node's own count,
which is never reset: the cloud's global rounds, an institution's local rounds.

`weights` is a switch of each tier where a plain mean is taken: `data` weighs a child by its samples, p_k = n_k / sum
of n, `uniform` by 1/K. FedAvg and FedCDA's warm-up weigh by data unless told otherwise; the mean that a rule of K
models evaluates, sends up and plays its first stage with is uniform unless told otherwise (as in the authors' code).
FedAdp starts from p_k and FedCDA is uniform once warmed up: there is nothing to choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from common.errors import InvalidExperiment
from common.experiment.tables import Count, Fraction, SettingsTable

Weights = Literal["data", "uniform"]
Carry = Literal["reset", "recentre"]
Rounds = Annotated[int, Field(ge=0)]


class FedAvg(SettingsTable):
    """One model: the mean of the uploads."""

    name: Literal["fedavg"] = "fedavg"
    weights: Weights = "data"


class _Several(SettingsTable):
    """K models, one for each child that takes part; `carry` says how an institution starts its next global round.

    `reset`: all K from the model that came from above; `recentre`: each keeps its offset from their mean.
    """

    name: str
    weights: Weights = "uniform"
    carry: Carry = "reset"


class Independent(_Several):
    """K models that are never mixed: the reference that shows what mixing gains over mere averaging."""

    name: Literal["independent"] = "independent"


class FedCross(_Several):
    """K models, each mixed with a partner: w_j = alpha v_j + (1 - alpha) v_co(j).

    The first stage's rounds give all models their mean; propellers have rounds 0 .. propeller_rounds - 1 and dynamic
    alpha the dynamic_alpha_rounds after those. Where a first stage overlaps them it goes before.
    """

    name: Literal["fedcross"] = "fedcross"
    alpha: Annotated[float, Field(ge=0.5, le=1)] = 0.99
    strategy: Literal["in_order", "lowest", "highest"] = "lowest"
    similarity: Literal["cosine", "sum_norm", "pairwise"] = "cosine"
    normalise: bool = False  # of `pairwise`: the mean over the pairs in place of their sum; the ranking is the same
    propeller_rounds: Rounds = 0
    propellers: Count = 2
    propeller_alpha: Fraction | None = None  # None: 1 / (propellers + 1), all weights alike
    dynamic_alpha_rounds: Rounds = 0
    first_stage_rounds: Rounds = 0


class FedMR(_Several):
    """K models whose layers are dealt anew among them in every round after the first stage."""

    name: Literal["fedmr"] = "fedmr"
    granularity: Literal["module", "key", "block", "model"] = "module"
    block_fraction: Fraction = 0.1  # of the state's entries, where the granularity is `block`
    first_stage_rounds: Rounds = 0


class FedCDA(SettingsTable):
    """One model: the mean of one cached upload of each child, chosen to lie close together at a low loss."""

    name: Literal["fedcda"] = "fedcda"
    depth: Count = 3  # H: uploads kept of each child
    groups: Count = 3  # B
    warmup_rounds: Rounds = 50
    smoothness: Annotated[float, Field(ge=0)] = 1.0  # L
    combinations: Annotated[int, Field(ge=1, le=4_000_000)] = 1_000_000  # of a group; 8 bytes for each and candidate
    history: Literal["clear", "keep"] = "clear"  # when a model comes from above; nothing does so at the cloud
    memory_mb: Annotated[float, Field(ge=0)] = 512.0  # of cached uploads; those beyond it are files
    weights: Weights = "data"  # of the warm-up


class FedAdp(SettingsTable):
    """One model: a mean that favours children whose step points where the mean of all points."""

    name: Literal["fedadp"] = "fedadp"
    a: Annotated[float, Field(ge=0)] = 5.0


RULES: Final[Mapping[str, type[SettingsTable]]] = MappingProxyType(
    {rule.model_fields["name"].default: rule for rule in (FedAvg, Independent, FedCross, FedMR, FedCDA, FedAdp)}
)

Rule = FedAvg | Independent | FedCross | FedMR | FedCDA | FedAdp
Several = Independent | FedCross | FedMR


def _named(tree: Any) -> Any:
    return {"name": "fedavg", **tree} if isinstance(tree, Mapping) else tree


Aggregation = Annotated[Annotated[Rule, Field(discriminator="name")], BeforeValidator(_named)]


def remembers(rule: Rule) -> bool:
    """Return whether what a rule knows of its children outlives a global round at an institution."""
    if isinstance(rule, FedCDA):
        return rule.history == "keep"
    return isinstance(rule, FedAdp) or (isinstance(rule, Several) and rule.carry == "recentre")


def check(key: str, rule: Rule, children: int) -> None:
    """Check what a rule needs of the number of children that take part in a round. Raises InvalidExperiment."""
    if isinstance(rule, FedCDA):
        group = ceil(children / rule.groups)
        if rule.depth**group > rule.combinations:
            raise InvalidExperiment(
                f"{key}.combinations",
                rule.combinations,
                f"a group of {group} children with {rule.depth} uploads each has {rule.depth}^{group} combinations",
                f"Give more {key}.groups or less {key}.depth.",
            )
