"""The `aggregation` tables of an experiment: one per rule, selected by `name`.

The formulas and their sources are in `common/methods/`, one file per rule. Rounds are counted by the node and never
reset: global rounds at the cloud, local rounds at an institution.

`weights` applies where a tier takes a plain mean. `data` weights a child by its samples, p_k = n_k / sum of n, and
`uniform` by 1/K. The default is `data` for FedAvg and FedCDA's warm-up. It is `uniform`, as in the authors' code, for
the mean that a multi-model rule evaluates, uploads and uses in its first stage. FedAdp starts from p_k, and FedCDA is
uniform after its warm-up: there is nothing to choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from types import MappingProxyType
from typing import Annotated, Final, Literal

from pydantic import Field

from common.errors import InvalidExperiment
from common.experiment.refined_rules import FedBE, FedDF, FedGen, FedLAW
from common.experiment.rules import OwnRule, Rounds, RuleSettings, Weights
from common.experiment.tables import Count, Fraction, Positive, Selected, SettingsTable

OnNewModel = Literal["reset", "recentre"]


class FedAvg(RuleSettings):
    """One model: the mean of the uploads."""

    name: Literal["fedavg"] = "fedavg"  # the rule
    weights: Weights = "data"  # each upload's weight: its share of the samples, or 1/K


class MultiModelSettings(RuleSettings):
    """K models, one for each child that takes part."""

    weights: Weights = "uniform"  # of the mean that is evaluated and sent up: shares of the samples, or 1/K
    # How an institution's K models start its next global round: all from the model received, or each at its old offset
    # from their mean.
    on_new_model: OnNewModel = "reset"

    @property
    def remembers(self) -> bool:
        """Whether the offsets of the models persist."""
        return self.on_new_model == "recentre"

    def held_bytes(self, row_bytes: int, *, children: int, taking_part: int, resident_bytes: float) -> float:
        """Return the bytes of the K models."""
        return min(taking_part * row_bytes, resident_bytes)


class Independent(MultiModelSettings):
    """K models that are never mixed: the baseline that separates mixing from averaging."""

    name: Literal["independent"] = "independent"  # the rule


class FedCross(MultiModelSettings):
    """K models, each mixed with a partner: w_j = alpha v_j + (1 - alpha) v_co(j).

    In the first stage all models become their mean. Propellers take rounds 0 .. propeller_rounds - 1, dynamic alpha the
    dynamic_alpha_rounds after those. A first stage takes precedence over both.
    """

    name: Literal["fedcross"] = "fedcross"  # the rule
    alpha: Annotated[float, Field(ge=0.5, le=1)] = 0.99  # weight of the model's own upload
    strategy: Literal["in_order", "lowest", "highest"] = "lowest"  # the partner: in turn, or by similarity
    # Between whole models; `pairwise` by state entries.
    similarity: Literal["cosine", "sum_norm", "pairwise"] = "cosine"
    normalise: bool = False  # of `pairwise`: the mean over the pairs in place of their sum; the ranking is the same
    propeller_rounds: Rounds = 0  # first rounds, in which each model mixes with several partners in order
    propellers: Count = 2  # partners in those rounds, at most K - 1
    propeller_alpha: Fraction | None = None  # own weight in those rounds; not set: 1 / (propellers + 1)
    dynamic_alpha_rounds: Rounds = 0  # the rounds after those, in which alpha rises from 0.5 to `alpha`
    # First rounds, in which all models become their mean; it takes precedence.
    first_stage_rounds: Rounds = 0


class FedMR(MultiModelSettings):
    """K models whose layers are permuted among them in every round after the first stage."""

    name: Literal["fedmr"] = "fedmr"  # the rule
    granularity: Literal["module", "key", "block", "model"] = "module"  # which entries of a model stay together
    block_fraction: Fraction = 0.1  # of `block`: the share of the state's entries in a block
    first_stage_rounds: Rounds = 0  # first rounds, in which all models become their mean


class FedCDA(RuleSettings):
    """One model: the mean of one cached upload of each child, chosen to lie close together at a low loss."""

    name: Literal["fedcda"] = "fedcda"  # the rule
    depth: Count = 3  # uploads kept of each child (H)
    groups: Count = 3  # groups in which the children that take part select (B)
    warmup_rounds: Rounds = 50  # first rounds, which are FedAvg
    smoothness: Annotated[float, Field(ge=0)] = 1.0  # weight of closeness beside the loss (L)
    # Most combinations of a group; each takes 8 bytes for every candidate.
    combinations: Annotated[int, Field(ge=1, le=4_000_000)] = 1_000_000
    # What an institution does with its cached uploads when a global model comes.
    history: Literal["clear", "keep"] = "clear"
    memory_mb: Annotated[float, Field(ge=0)] = 512.0  # megabytes of cached uploads in memory; those beyond it are files
    weights: Weights = "data"  # of the warm-up: shares of the samples, or 1/K

    @property
    def remembers(self) -> bool:
        """Whether the cached uploads persist."""
        return self.history == "keep"

    def held_bytes(self, row_bytes: int, *, children: int, taking_part: int, resident_bytes: float) -> float:
        """Return the bytes of the cached uploads, and of a sum in float64."""
        return min(self.depth * children * row_bytes, self.memory_mb * 1e6) + 2 * row_bytes

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check the number of combinations of a group. Raises InvalidExperiment."""
        group = ceil(children / self.groups)
        if self.depth**group > self.combinations:
            raise InvalidExperiment(
                f"{key}.combinations",
                self.combinations,
                f"a group of {group} children with {self.depth} uploads each has {self.depth}^{group} combinations",
                f"Raise {key}.groups or lower {key}.depth.",
            )


class FedAdp(RuleSettings):
    """One model: a mean that favours children whose step points where the mean of all points."""

    name: Literal["fedadp"] = "fedadp"  # the rule
    a: Annotated[float, Field(ge=0)] = 5.0  # height and steepness of the weight over the angle; 0 is FedAvg

    @property
    def remembers(self) -> bool:
        """Whether the angles persist: always."""
        return True


class FedAvgM(RuleSettings):
    """One model: the server moves it by the mean of the steps, with momentum."""

    step_models = 3.0

    name: Literal["fedavgm"] = "fedavgm"  # the rule
    weights: Weights = "data"  # of the mean: shares of the samples, or 1/K
    learning_rate: Positive = 1.0  # of the server (eta); 1 without momentum is FedAvg
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # share of the last move that is kept (beta)

    @property
    def remembers(self) -> bool:
        """Whether the momentum persists: always."""
        return True


class _AdaptiveSettings(RuleSettings):
    """One model: the server moves each weight at its own rate."""

    step_models = 4.0

    name: str  # the rule
    weights: Weights = "data"  # of the mean: shares of the samples, or 1/K
    learning_rate: Positive | None = None  # of the server (eta): none suits all, the paper tunes it from 0.003 to 1
    beta_1: Annotated[float, Field(ge=0, lt=1)] = 0.9  # decay of the first moments
    tau: Positive = 0.001  # added to the root of the second moments: small values adapt more

    @property
    def remembers(self) -> bool:
        """Whether the moments persist: always."""
        return True

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check that there is a learning rate. Raises InvalidExperiment."""
        if self.learning_rate is None:
            problem = f"{self.name} needs the server's learning rate; the paper tunes it"
            raise InvalidExperiment(f"{key}.learning_rate", "not set", problem, "Try 0.01, 0.1 and 1.")


class FedAdagrad(_AdaptiveSettings):
    """One model: the server moves it by Adagrad."""

    name: Literal["fedadagrad"] = "fedadagrad"  # the rule
    beta_1: Annotated[float, Field(ge=0, lt=1)] = 0.0  # decay of the first moments


class FedAdam(_AdaptiveSettings):
    """One model: the server moves it by Adam, without bias correction."""

    name: Literal["fedadam"] = "fedadam"  # the rule
    beta_2: Annotated[float, Field(ge=0, lt=1)] = 0.99  # decay of the second moments


class FedYogi(_AdaptiveSettings):
    """One model: the server moves it by Yogi, whose second moments fall slowly."""

    name: Literal["fedyogi"] = "fedyogi"  # the rule
    beta_2: Annotated[float, Field(ge=0, lt=1)] = 0.99  # decay of the second moments


class FedExP(RuleSettings):
    """One model: the server goes farther than the mean where the steps of the children differ."""

    step_models = 2.0

    name: Literal["fedexp"] = "fedexp"  # the rule
    weights: Weights = "data"  # of the mean: shares of the samples, or 1/K
    epsilon: Positive = 0.001  # times the children that took part, added to the squared length of the mean step


class FedNova(RuleSettings):
    """One model: the mean of the steps, each divided by the child's number of SGD steps."""

    step_models = 2.0

    name: Literal["fednova"] = "fednova"  # the rule
    weights: Weights = "data"  # of the mean: shares of the samples, or 1/K


class Scaffold(RuleSettings):
    """One model: the mean of the uploads, which devices correct by control variates."""

    objective = "scaffold"
    step_models = 5.0

    name: Literal["scaffold"] = "scaffold"  # the rule
    learning_rate: Positive = 1.0  # of the server (eta): 1 takes the mean of the uploads

    @property
    def sends(self) -> Sequence[str]:
        """The control variate of all children."""
        return ("control",)

    @property
    def returns(self) -> Sequence[str]:
        """The change of the child's own."""
        return ("control_change",)

    @property
    def remembers(self) -> bool:
        """Whether the control variate persists: always."""
        return True


class FedDyn(RuleSettings):
    """One model: the mean of the uploads, moved by the sum of all steps so far."""

    objective = "feddyn"
    step_models = 3.0

    name: Literal["feddyn"] = "feddyn"  # the rule

    @property
    def remembers(self) -> bool:
        """Whether the sum persists: always."""
        return True


class FedBuff(RuleSettings):
    """One model: a step by each `buffer` results, while the other children go on training; asynchronous."""

    buffers = True
    step_models = 2.0

    name: Literal["fedbuff"] = "fedbuff"  # the rule
    weights: Weights = "uniform"  # of the steps in a buffer: 1/K, or shares of their samples
    buffer: Count = 2  # results that make a step (K)
    learning_rate: Positive = 1.0  # of the server (eta)
    staleness: Annotated[float, Field(ge=0)] = 0.5  # exponent a of the weight 1 / (1 + t)^a of a step t rounds old

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check that so many children train at once. Raises InvalidExperiment."""
        if self.buffer > children:
            problem = f"more than the {children} children that train at once"
            raise InvalidExperiment(f"{key}.buffer", self.buffer, problem, f"Use at most {children}.")

    def held_bytes(self, row_bytes: int, *, children: int, taking_part: int, resident_bytes: float) -> float:
        """Return the bytes of the step, and of the models that children in flight received."""
        return (self.step_models + taking_part) * row_bytes


class CluSamp(RuleSettings):
    """One model: FedAvg over children that the rule draws from clusters of similar steps."""

    selects = True

    name: Literal["clusamp"] = "clusamp"  # the rule
    # Of two children's last steps: the angle between them, the sum of the absolute differences, or of their squares.
    distance: Literal["cosine", "l1", "l2"] = "cosine"

    @property
    def packages(self) -> Sequence[str]:
        """The packages of an extra that the node needs."""
        return ("scipy",)

    @property
    def remembers(self) -> bool:
        """Whether the last steps persist: always."""
        return True

    def held_bytes(self, row_bytes: int, *, children: int, taking_part: int, resident_bytes: float) -> float:
        """Return the bytes of all children's last steps."""
        return min(children * row_bytes, resident_bytes)


class MatchedSettings(RuleSettings):
    """One model: the mean of the uploads, whose neurons were matched before."""

    permutes = True

    weights: Weights = "data"  # of the mean: shares of the samples, or 1/K
    matching: bool = True  # false is FedAvg

    @property
    def packages(self) -> Sequence[str]:
        """The packages of an extra that the node needs."""
        return ("scipy",) if self.matching else ()

    def held_bytes(self, row_bytes: int, *, children: int, taking_part: int, resident_bytes: float) -> float:
        """Return the bytes of the matched uploads and, as measured with ResNet-18, of what the matching takes."""
        return min(taking_part * row_bytes, resident_bytes) + self.step_models * taking_part * row_bytes


class FedMA(MatchedSettings):
    """One model: the mean of the uploads, whose neurons were matched layer by layer before."""

    step_models = 1.2  # for each upload

    name: Literal["fedma"] = "fedma"  # the rule
    sweeps: Rounds = 5  # over the uploads, each matched to the others; 0: only to the model that the children received


class GAMF(MatchedSettings):
    """One model: the mean of the uploads, whose neurons were matched before, in all layers and uploads together."""

    step_models = 1.8  # for each upload

    name: Literal["gamf"] = "gamf"  # the rule
    temperature: Positive = 1.0  # of the first Sinkhorn pass, relative to the products' standard deviation
    cooling: Annotated[float, Field(gt=0, lt=1)] = 0.8  # factor from pass to pass
    last_temperature: Positive = 0.05  # of the last one, before the Hungarian algorithm


class Median(RuleSettings):
    """One model: the median of each column of the uploads."""

    name: Literal["median"] = "median"  # the rule

    @property
    def uploads_least(self) -> int:
        """Three: the median of two is their mean."""
        return 3

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check that enough uploads come. Raises InvalidExperiment."""
        _check_uploads(f"{key}.name", self.name, self.uploads_least, children, uploads, instead="Use another rule")


class TrimmedMean(RuleSettings):
    """One model: the mean of each column without its largest and smallest values."""

    name: Literal["trimmed_mean"] = "trimmed_mean"  # the rule
    # Share of the uploads left out at each end, rounded down. It must be at least one, of all uploads that close a
    # round; 0 is the uniform mean.
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.1

    @property
    def uploads_least(self) -> int:
        """The least number of which one is left out at each end."""
        return ceil(1 / self.trim - 1e-9) if self.trim else 1

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check that enough uploads come. Raises InvalidExperiment."""
        _check_uploads(f"{key}.trim", self.trim, self.uploads_least, children, uploads, instead="Raise it")


class Krum(RuleSettings):
    """One model: the mean of the uploads that lie closest to most others."""

    name: Literal["krum"] = "krum"  # the rule
    wrong: Annotated[int, Field(ge=0)] = 1  # wrong uploads that are expected (f)
    keep: Count = 1  # uploads of which the mean is taken (m): 1 is Krum, more multi-Krum

    @property
    def uploads_least(self) -> int:
        """2 f + 3, and so many that f may be left out; any number if none is expected to be wrong."""
        return max(2 * self.wrong + 3, self.wrong + self.keep) if self.wrong else 1

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check that enough uploads come. Raises InvalidExperiment."""
        least = 2 * self.wrong + 3 if self.wrong else 1
        _check_uploads(f"{key}.wrong", self.wrong, least, children, uploads, instead="Lower it")
        if self.keep > (most := uploads - self.wrong):
            problem = f"{self.wrong} of {uploads} uploads may be wrong"
            raise InvalidExperiment(f"{key}.keep", self.keep, problem, f"Use at most {most}.")


def _check_uploads(key: str, value: object, least: int, children: int, uploads: int, *, instead: str) -> None:
    if uploads < least:
        has, more = f"of {children} children that take part", "let more children take part"
        if uploads < children:
            has, more = f"and a round closes with {uploads}", "raise the quorum"
        raise InvalidExperiment(key, value, f"needs {least} uploads, {has}", f"{instead}, or {more}.")


class NormBound(SettingsTable):
    """A bound for the length of a child's step, before any rule: `factor` times the median of the round's lengths."""

    # What happens to a longer step: nothing, it is clipped to the bound, or the upload is left out.
    action: Literal["off", "clip", "refuse"] = "off"
    factor: Annotated[float, Field(ge=1)] = 3.0  # times the median length


RULES: Final[Mapping[str, type[RuleSettings]]] = MappingProxyType(
    {
        rule.model_fields["name"].default: rule
        for rule in (
            *(FedAvg, Independent, FedCross, FedMR, FedCDA, FedAdp),
            *(FedAvgM, FedAdagrad, FedAdam, FedYogi, FedExP),
            *(FedNova, Scaffold, FedDyn, CluSamp, FedBuff, FedMA, GAMF),
            *(FedDF, FedBE, FedLAW, FedGen),
            *(Median, TrimmedMean, Krum),
        )
    }
)

Aggregation = Annotated[RuleSettings, Selected(RULES, OwnRule)]
