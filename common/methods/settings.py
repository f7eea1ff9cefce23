"""The `aggregation` and `selection` tables of an experiment: one per rule and per selector,
selected by `name`.

Each is in the file of its method, `common/methods/`. Here is what the experiment and the nodes ask
of all. Rounds are counted by the node and never reset: global rounds at the cloud, local rounds at
an institution.

`weights` applies where a tier takes a plain mean. `data` weights a child by its samples, p_k = n_k
/ sum of n, and `uniform` by 1/K. The default is `data` for FedAvg and FedCDA's warm-up. It is
`uniform`, as in the authors' code, for the mean that a multi-model rule evaluates, uploads and uses
in its first stage. FedAdp starts from p_k, and FedCDA is uniform after its warm-up: there is
nothing to choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.methods import methods_by_name
from fedstrata.common.methods.baselines.baselines_by_name import BASELINES, REFINEMENTS
from fedstrata.common.settings.tables import NamedTables, Selected, SettingsTable

if TYPE_CHECKING:
    from fedstrata.common.methods.rule import Rule, RuleContext
    from fedstrata.common.methods.selection import Selector
    from fedstrata.common.model.layout import ModelLayout
    from fedstrata.common.settings.data import ModelSettings
    from fedstrata.common.settings.training import TrainingSettings

Weights = Literal["data", "uniform"]
Rounds = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleUse:
    """Where an experiment uses a rule.

    key: of the tier's settings    depth: of the nodes, the cloud's is 0    tier_rounds: in each
    round of the tier above rounds: of a node, over the run    fewest: children of a node that take
    part, at least    partial: some do not alone: there is one such node    over_devices: its
    children are devices    learning_rate: of the devices skew: concentration of the labels'
    distribution over the devices, infinite without skew sparse: the children's uploads change some
    columns, each child's others    feedback: they have error feedback
    """

    key: str
    depth: int
    tier_rounds: int
    rounds: int
    fewest: int
    partial: bool
    alone: bool
    over_devices: bool
    learning_rate: float
    skew: float
    sparse: bool = False
    feedback: bool = False


class RuleSettings(SettingsTable):
    """The settings of a rule, what they build, and the answers of a rule that has nothing special.

    `objective`: that of the devices below, which it needs. `reads_losses`: whether it needs the
    training loss of the model that a device received, which devices then compute. `step_models`:
    models that its state and its step take in memory.
    """

    objective: ClassVar[str | None] = None
    reads_losses: ClassVar[bool] = False
    step_models: ClassVar[float] = 0.0
    # of its theorem, on f wrong ones among n uploads; empty: it has none
    condition: ClassVar[str] = ""

    name: str  # the rule

    def build(self, context: RuleContext) -> Rule:
        """Return a node's rule."""
        raise NotImplementedError

    @property
    def keywords(self) -> Mapping[str, Any]:
        """The keys besides `name` and `weights`, as a rule gets them that is written as users write
        theirs.
        """
        return {
            key: getattr(self, key)
            for key in type(self).model_fields
            if key not in ("name", "weights")
        }

    @property
    def compares_losses(self) -> bool:
        """Whether the rule needs the training loss of each result, which a trainer of the user's
        own may not return.
        """
        return False

    @property
    def sends(self) -> Sequence[str]:
        """The vectors behind the models that go down, float32."""
        return ()

    @property
    def returns(self) -> Sequence[str]:
        """The vectors behind the models that come up, float32."""
        return ()

    @property
    def of_mean(self) -> Weights | None:
        """The weights of the mean on which alone the next model depends, None if it depends on
        single uploads.
        """
        return None

    def shapes(self, model: ModelLayout) -> Mapping[str, Sequence[int]]:
        """Return the shapes of those vectors that are not as long as the model has parameters."""
        return {}

    @property
    def shaped(self) -> bool:
        """Whether `shapes` has other shapes than those."""
        return type(self).shapes is not RuleSettings.shapes

    @property
    def resolved(self) -> RuleSettings:
        """These settings; of a user's own rule the object of its class, which is imported for
        that.
        """
        return self

    @property
    def remembers(self) -> bool:
        """Whether the rule at an institution has state that persists between global rounds."""
        return False

    @property
    def named_children(self) -> Mapping[str, Iterable[str]]:
        """The children that keys name, by key: they must be there."""
        return {}

    @property
    def acts_from(self) -> int:
        """The first round of a node, from 1, whose model can differ from that of the plain mean
        with these weights.
        """
        return 1

    @property
    def several(self) -> bool:
        """Whether the children that take part get different models."""
        return False

    @property
    def selects(self) -> bool:
        """Whether the rule selects the children itself."""
        return False

    @property
    def closes_with(self) -> int | None:
        """The results that close a round while the other tasks go on; None: rounds close by the
        tier's `closing`.
        """
        return None

    @property
    def buffers(self) -> bool:
        """Whether tasks go on when a round closes."""
        return self.closes_with is not None

    @property
    def packages(self) -> Sequence[str]:
        """The packages of an extra that the node needs."""
        return ()

    @property
    def refiner(self) -> str | None:
        """What the node computes in a process with torch, `module:function`; None: nothing."""
        return None

    @property
    def refined_by(self) -> RuleSettings:
        """The settings that this gets."""
        return self

    @property
    def refines(self) -> bool:
        """Whether the node computes in a process with torch."""
        return self.refiner is not None

    @property
    def reads_samples(self) -> bool:
        """Whether that needs samples at the node."""
        return self.refines

    def held_bytes(
        self, row_bytes: int, *, children: int, taking_part: int, resident_bytes: float
    ) -> float:
        """Return the most that a node holds in memory beside a round's uploads, their mean and the
        model received.

        `row_bytes`: of a model. `resident_bytes`: of models in a file, what may stay in memory.
        """
        return self.step_models * row_bytes

    @property
    def uploads_least(self) -> int:
        """The uploads that protect a round from wrong ones; with fewer the node keeps its model."""
        return 1

    def tolerates(self, uploads: int) -> int:
        """Return how many wrong ones among so many uploads its theorem covers."""
        return 0

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check the settings against the children that take part in a round, and the uploads that
        close it.

        Raises InvalidExperiment.
        """

    def check_devices(self, key: str, training: TrainingSettings, model: ModelSettings) -> None:
        """Check that the rule can aggregate what devices make of the model. Raises
        InvalidExperiment.
        """

    def advice(self, use: RuleUse) -> Iterable[str]:
        """Return one line for each setting that works badly there, or has no effect: key, value,
        effect.
        """
        return ()


class NormBound(SettingsTable):
    """A bound for the length of a child's step, before any rule: `factor` times the median of the
    round's lengths.
    """

    # What happens to a longer step: nothing, it is clipped to the bound, or the upload is left out.
    action: Literal["off", "clip", "refuse"] = "off"
    factor: Annotated[float, Field(ge=1)] = 3.0  # times the median length


class SelectionSettings(SettingsTable):
    """The settings of a selector, and what they build.

    A tier's `participation` gives the number of children in a round, K; the selector chooses them.
    `remembers`: whether it reads what earlier rounds reported, so that its state persists.
    `compares_losses`: whether it needs the training loss of each result.
    """

    remembers: ClassVar[bool] = True
    compares_losses: ClassVar[bool] = False

    name: str  # the selector

    def check(self, key: str, children: int, taking_part: int) -> None:
        """Check the settings against a parent's children and how many take part. Raises
        InvalidExperiment.
        """

    def build(self) -> Selector:
        """Return a node's selector. Raises InvalidExperiment."""
        raise NotImplementedError


RULES: Final = NamedTables[RuleSettings](methods_by_name.RULES)
SELECTORS: Final = NamedTables[SelectionSettings](methods_by_name.SELECTORS)

STEPS: Final = NamedTables[RuleSettings](
    {name: methods_by_name.RULES[name] for name in methods_by_name.STEPS}
)
WARMUPS: Final = NamedTables[RuleSettings](
    {name: methods_by_name.RULES[name] for name in ("fedavg", *methods_by_name.STEPS)}
)
REFINING: Final = NamedTables[RuleSettings]({name: BASELINES[name] for name in REFINEMENTS})


class CombiningSettings(RuleSettings):
    """The settings of a rule of one model, after which the server may take the step of another
    one.
    """

    # What the node makes of the rule's result: the step of `fedavgm`, `fedadagrad`, `fedadam` or
    # `fedyogi` from the model before it, in place of the result itself. A table with the keys of
    # that rule.
    step: Annotated[RuleSettings, Selected(STEPS, methods_by_name.OWN_RULE)] | None = None

    @property
    def keywords(self) -> Mapping[str, Any]:
        """Without the step."""
        return {key: value for key, value in super().keywords.items() if key != "step"}

    @property
    def remembers(self) -> bool:
        """Whether the step's moments persist."""
        return self.step is not None

    def held_bytes(
        self, row_bytes: int, *, children: int, taking_part: int, resident_bytes: float
    ) -> float:
        """Return those of the rule and of the step."""
        rest = super().held_bytes(
            row_bytes, children=children, taking_part=taking_part, resident_bytes=resident_bytes
        )
        return rest + (self.step.step_models * row_bytes if self.step is not None else 0.0)

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check the step. Raises InvalidExperiment."""
        super().check(key, children, uploads)
        if self.step is None:
            return
        if self.step.name not in STEPS:
            remedy = f"Use one of {', '.join(STEPS)}."
            raise InvalidExperiment(
                f"{key}.step.name", self.step.name, "no step of a server", remedy
            )
        self.check_inner(f"{key}.step", self.step, children, uploads)

    def check_inner(self, key: str, inner: RuleSettings, children: int, uploads: int) -> None:
        """Check another rule inside this one, whose weights hold. Raises InvalidExperiment."""
        if (weights := inner.model_dump()["weights"]) != "data":
            raise InvalidExperiment(
                f"{key}.weights", weights, f"the weights are those of {self.name}", "Remove it."
            )
        if isinstance(inner, CombiningSettings) and inner.step is not None:
            raise InvalidExperiment(
                f"{key}.step", inner.step.name, "no place for a step", "Remove it."
            )
        inner.check(key, children, uploads)


class StagedSettings(CombiningSettings):
    """The settings of a rule of one model that begins with another one, and behind which a
    distillation may stand.
    """

    warmup_rounds: Rounds = 50  # first rounds, which are FedAvg
    # Their rule in place of FedAvg: `fedavgm`, `fedadagrad`, `fedadam` or `fedyogi`, a table with
    # its keys.
    warmup: Annotated[RuleSettings, Selected(WARMUPS)] | None = None
    # What learns from the ensemble of the selected uploads, beginning as their mean: `feddf` or
    # `fedbe`, a table with its keys. The warm-up has none.
    refine: Annotated[RuleSettings, Selected(REFINING)] | None = None
    weights: Weights = "data"  # of the warm-up: shares of the samples, or 1/K

    @property
    def begins_with(self) -> RuleSettings:
        """The rule of the warm-up."""
        return (self.warmup or fedavg()).model_copy(update={"weights": self.weights})

    @property
    def refiner(self) -> str | None:
        if self.refine is None:
            return None
        return self.refine.refiner

    @property
    def refined_by(self) -> RuleSettings:
        return self.refine or self

    @property
    def remembers(self) -> bool:
        """Whether the moments of a step or of the warm-up persist."""
        return super().remembers or self.begins_with.remembers

    def held_bytes(
        self, row_bytes: int, *, children: int, taking_part: int, resident_bytes: float
    ) -> float:
        """Return those of the warm-up and of the step."""
        rest = super().held_bytes(
            row_bytes, children=children, taking_part=taking_part, resident_bytes=resident_bytes
        )
        return rest + self.begins_with.step_models * row_bytes

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check the warm-up and the distillation, too. Raises InvalidExperiment."""
        super().check(key, children, uploads)
        for inner, settings in (("warmup", self.warmup), ("refine", self.refine)):
            if settings is not None:
                self.check_inner(f"{key}.{inner}", settings, children, uploads)


Aggregation = Annotated[RuleSettings, Selected(RULES, methods_by_name.OWN_RULE, "rules")]
Selection = Annotated[SelectionSettings, Selected(SELECTORS, methods_by_name.OWN_SELECTOR)]


def fedavg() -> RuleSettings:
    """Return the rule of a tier that names none."""
    return RULES["fedavg"](name="fedavg")


def fraction() -> SelectionSettings:
    """Return the selector of a tier that names none."""
    return SELECTORS["fraction"](name="fraction")
