"""Rules of the user's own: `aggregation.name = "package.module:Class"`, a class that inherits from `ColumnRule`.

docs/extend.md has an example. The rest is not its work: distances for Tempo, checkpoints, resuming, buffers (batch
statistics are the weighted mean), and memory, which is used block by block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Never

from common.experiment import own
from common.experiment.rules import OwnRule
from common.lazy import np
from common.methods.columns import ColumnMean, Columns
from common.methods.mixing import Floats, Mixture
from common.methods.statistics import Doubles, Gram, Statistics
from common.methods.uploads import RuleContext

KEY = "aggregation.name"


@dataclass(frozen=True, slots=True)
class RoundFacts:
    """What is known of a round's K uploads, in their order.

    `children`: the children that sent them. `samples_K`, int64 [K], `losses_K` and `steps_K`, float64 [K]: what they
    reported. `weights_K`, float64 [K]: by `weights` of the experiment. `products`: the inner products of the uploads'
    steps v_k - z from the model z that they received, if the rule `compares`; else None. `all_children`: how many the
    node has, whether they took part or not.
    """

    children: Sequence[str]
    samples_K: np.ndarray[Any, np.dtype[np.int64]]
    losses_K: Doubles
    steps_K: Doubles
    weights_K: Doubles
    products: Gram | None
    all_children: int


class ColumnRule(own.Kept):
    """A rule that computes the next model column by column. Its keywords are the experiment's keys.

    `vectors` names vectors of state, float32 [D] each, zeros at first, which persist as `numbers` do. Those that the
    experiment's `extras_down` names are vectors of state too, and devices receive them with each model.
    """

    vectors: ClassVar[Sequence[str]] = ()
    compares: ClassVar[bool] = False

    def begin(self, facts: RoundFacts) -> Mapping[str, object] | None:
        """Prepare a round; return facts for its published plan, of what JSON can hold."""

    def columns(self, block: Columns) -> Doubles | Floats:
        """Return columns of the next model, [C]. Several threads may call it: write only into `block.state`."""
        raise NotImplementedError


class _Vectors(dict[str, Floats]):
    """Vectors of a block by name; an assignment writes into the vector, which is kept, and not into this table."""

    def __init__(self, vectors: Mapping[str, Floats], *, named_in: str) -> None:
        super().__init__(vectors)
        self._named_in = named_in

    def __missing__(self, name: str) -> Never:
        raise LookupError(f"the rule has no vector {name!r}: name it in {self._named_in}")

    def __setitem__(self, name: str, values: Floats) -> None:
        self[name][...] = values


class OwnColumns(ColumnMean):
    """The user's rule as a plan of columns. An error in it ends the run as InvalidExperiment."""

    reads_model = True

    def __init__(self, settings: OwnRule, context: RuleContext) -> None:
        super().__init__(settings)
        rule = own.build(KEY, settings, ColumnRule)
        self.compares = rule.compares
        self._rule = rule
        self._name = settings.name
        with own.guarded({KEY: settings.name}):
            names = dict.fromkeys((*rule.vectors, *settings.sends))
        self._vectors = {name: np.zeros(context.layout.parameters, np.float32) for name in names}
        self._all_children = context.children

    def of(
        self, r: int, statistics: Statistics, products: Gram | None, children: Sequence[str]
    ) -> tuple[Mixture, Mapping[str, object]]:
        """Return the weights of the buffers, and the rule's facts."""
        mixture, _ = super().of(r, statistics, products, children)
        weights_K = mixture.dense(len(children))
        facts = RoundFacts(
            children,
            statistics.samples_K,
            statistics.losses_K,
            statistics.steps_K,
            weights_K,
            products if self.compares else None,
            self._all_children,
        )
        with own.guarded({KEY: self._name}):
            return mixture, own.kept(KEY, self._name, self._rule.begin(facts) or {}, "`begin` returns")

    def columns(self, block: Columns) -> Doubles:
        """Return the rule's columns as float64. Raises InvalidExperiment unless they are C finite numbers."""
        name = self._name
        with own.guarded({KEY: name}):
            state = _Vectors(block.state, named_in="its `vectors`, or in extras_down of the experiment")
            extras = _Vectors(block.extras, named_in="extras_up of the experiment")
            found = np.asarray(self._rule.columns(replace(block, state=state, extras=extras)), np.float64)
        if found.shape != block.model_C.shape:
            problem = f"returns {list(found.shape)} for columns of {list(block.model_C.shape)}"
            own.refuse(KEY, name, problem, "Return one number for each column.")
        if not np.isfinite(found).all():
            own.refuse(KEY, name, "computes numbers that are not finite", "Look for a division by zero.")
        return found

    def state(self) -> Mapping[str, Floats]:
        """Return the rule's vectors."""
        return self._vectors

    def save(self) -> dict[str, object]:
        """Return the rule's numbers."""
        return {"numbers": own.kept(KEY, self._name, self._rule.numbers, "`numbers` are")}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Restore them."""
        self._rule.numbers = facts["numbers"]
