"""A node's aggregation rule, what it is built for, what it gets and what it returns.

Call order: `begin` with the parent's model (at the cloud once, with the initial model), then
`dispatch` and `aggregate` in each of the node's rounds. An institution calls `begin` in every
global round. To resume from a checkpoint, the cloud calls `begin` with the saved model and then
`restore`; an institution calls `restore`, and `begin` when the next model arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from fedstrata.common.lazy import np, npt
from fedstrata.common.methods.mixing import Floats
from fedstrata.common.methods.selection import Choose
from fedstrata.common.methods.settings import RuleSettings
from fedstrata.common.methods.statistics import Statistics, TrainingReport
from fedstrata.common.model.layout import LinkLayouts, ModelLayout, Row
from fedstrata.common.model.refinement import Refiner
from fedstrata.common.randomness import Purpose, generator
from fedstrata.common.settings.training import TrainingSettings

NO_TRAINING: Final = TrainingSettings()
RULE_KEY: Final = "aggregation.name"
SUM_TOLERANCE: Final = 1e-4  # of weights that may be float32

Dispatched: TypeAlias = Sequence[tuple[Row, Sequence[str]]]
"""A round's models, uint8 [row_bytes], each with the children that receive it."""


@dataclass(frozen=True, slots=True)
class Uploads:
    """A round's uploads: row k of `rows_K`, uint8 [K, row_bytes], is the upload of `children[k]`.

    The order is that of the dispatched models' children, so it does not depend on arrivals. The
    rows of missing children (`reports` has None) are undefined; at least one upload is present.
    `release` lets the rows that were read leave memory (see `mixing.apply`). `extras`: the vectors
    behind the models, float32 [K, ...] each, if they were separated from the rows.
    """

    children: tuple[str, ...]
    rows_K: npt.NDArray[np.uint8]
    reports: tuple[TrainingReport | None, ...]
    release: Callable[[], None]
    extras: Mapping[str, Floats] = field(default_factory=dict)

    @property
    def answered(self) -> tuple[int, ...]:
        """The indices of the rows with uploads, ascending."""
        return tuple(k for k, report in enumerate(self.reports) if report is not None)

    @property
    def senders(self) -> list[str]:
        """The children of these rows."""
        return [self.children[k] for k in self.answered]

    @property
    def statistics(self) -> Statistics:
        """Samples and losses of the children with uploads, in row order."""
        return Statistics.of([report for report in self.reports if report is not None])


@dataclass(frozen=True, slots=True)
class RuleContext:
    """What a rule is built for: the node, the form of its models, and memory.

    `measures`: the distances of the uploads to the next model are wanted, which Tempo reads.
    `rows(name, count)` allocates memory for models, uint8 [count, row_bytes]. `folder`: where a
    rule stores what exceeds its memory limit; None: all stays in memory. `children`: how many the
    node has. `training`: that of the devices below, with their `learning_rate` in each of their
    local rounds, of which they do `rounds_below` in a round of the node. `refiner`: of a rule that
    needs one.
    """

    layout: ModelLayout
    node: str
    seed: int
    measures: bool
    rows: Callable[[str, int], npt.NDArray[np.uint8]]
    folder: Path | None = None
    children: int = 1
    training: TrainingSettings = NO_TRAINING
    learning_rate: Callable[[int], float] = lambda local_round: NO_TRAINING.learning_rate
    rounds_below: int = 1
    refiner: Refiner | None = None

    def refiner_of(self, settings: RuleSettings) -> Refiner | None:
        """Return the refiner of a rule that needs one, None for the others."""
        if settings.refines and self.refiner is None:
            raise RuntimeError(f"the rule {settings.name} needs a refiner")
        if settings.refines:
            return self.refiner
        return None

    def chance(self, r: int, purpose: str = "rule", *, place: str = "") -> np.random.Generator:
        """Return the node's random generator of a round, of a purpose of `randomness.py`, for one
        of several places.
        """
        return generator(
            self.seed, Purpose[purpose.upper()], self.node + (place and f"/{place}"), r
        )


@dataclass(frozen=True, slots=True)
class Aggregated:
    """Results and decisions of a node's rule.

    `loss`: the mean of the training losses that are known, weighted like the node's own mean, None
    if none is. `distances`: ||upload - new mean|| of each child with an upload, over trainable
    columns; empty at an institution whose rule does not need them. `spread`:
    mean_k ||w_k - mean||^2 / ||mean||^2 of K models after mixing, None for rules of one model.
    `facts`: the decisions of the plan, in a form that JSON can hold. `left_out`: why these
    children's uploads were not used.
    """

    loss: float | None
    distances: Mapping[str, float]
    spread: float | None
    facts: Mapping[str, object]
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def plan(self) -> dict[str, object]:
        """The published plan: the loss, the spread if there is one, and the facts."""
        spread = {} if self.spread is None else {"spread": self.spread}
        return {"loss": self.loss, **spread, **self.facts}


class Rule:
    """One node's aggregation rule over its children, and the defaults of what it may leave out."""

    @property
    def reads_start(self) -> bool:
        """Whether the next `begin` reads the model's values, which must have arrived then."""
        return False

    @property
    def choose(self) -> Choose | None:
        """The client selection of a rule that selects the children itself; None: the tier's
        selector does.
        """
        return None

    @property
    def hides_uploads(self) -> bool:
        """Whether the uploads have no noise that the next model has: then nobody else may read
        them.
        """
        return False

    @property
    def model(self) -> Row:
        """The mean: evaluated, uploaded and deployed. One array, written by each `aggregate`."""
        raise NotImplementedError

    @property
    def mixed(self) -> Row | None:
        """The mean of the models after mixing if it differs from `model`, else None."""
        return None

    def begin(self, model: Row) -> None:
        """Start from a model, uint8 [row_bytes], which must not change until the next `begin`.

        Unless `reads_start`, it may still be arriving: all children receive it in the next round.
        It must be complete when the first uploads are aggregated.
        """
        raise NotImplementedError

    def dispatch(self, r: int, children: Sequence[str]) -> Dispatched:
        """Return the models of round r with their children, whose order is that of the uploads'
        rows.

        Equal models are one. The arrays are valid until the next `aggregate` or `begin`. They are
        overwritten with what the children decode of them, so a rule that remembers what it sent
        keeps these arrays, not others.
        Raises ValueError if a multi-model rule has another number of models than there are
        children.
        """
        raise NotImplementedError

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Compute the next models from round r's uploads, whose values are finite. May overwrite
        missing rows.
        """
        raise NotImplementedError

    def save(self, folder: Path) -> dict[str, object]:
        """Write the state besides `model` as files into a new folder; return facts that JSON can
        hold.
        """
        return {}

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Restore the state that `save` wrote; the folder may be removed afterwards."""


class WrappedRule(Rule):
    """A rule around another one: what it does not replace is the other's. `_received`: the model of
    each child.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._received: Mapping[str, Row] = {}

    @property
    def reads_start(self) -> bool:
        return self._rule.reads_start

    @property
    def choose(self) -> Choose | None:
        return self._rule.choose

    @property
    def model(self) -> Row:
        return self._rule.model

    @property
    def mixed(self) -> Row | None:
        return self._rule.mixed

    def begin(self, model: Row) -> None:
        self._rule.begin(model)

    def dispatch(self, r: int, children: Sequence[str]) -> Dispatched:
        found = self._rule.dispatch(r, children)
        self._received = {child: row for row, those in found for child in those}
        return found

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        return self._rule.aggregate(r, uploads)

    def save(self, folder: Path) -> dict[str, object]:
        return self._rule.save(folder)

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self._rule.restore(folder, facts)


def link_layouts(settings: RuleSettings, model: ModelLayout) -> LinkLayouts:
    """Return what goes down and up the links of a tier with a rule; vectors are float32, [D] by
    default.
    """
    shapes = settings.shapes(model)

    def carrying(names: Iterable[str]) -> ModelLayout:
        return model.with_extras({name: shapes.get(name, (model.parameters,)) for name in names})

    return LinkLayouts(model, carrying(settings.sends), carrying(settings.returns))
