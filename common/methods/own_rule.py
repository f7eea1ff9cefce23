"""Rules of the user's own: `aggregation.name = "package.module:Class"`, a class that inherits from `ColumnRule`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Never

from pydantic import Field

from common.errors import InvalidExperiment
from common.experiment import own
from common.experiment.methods import RuleSettings, Weights
from common.experiment.own import OwnName, OwnSettings
from common.experiment.tables import form
from common.lazy import np
from common.methods.column_rule import ColumnRule, Columns, RoundFacts
from common.methods.mixing import Floats
from common.methods.rule import Rule, RuleContext
from common.methods.single_model import single_model
from common.methods.statistics import Doubles

KEY: Final = "aggregation.name"
ExtraName = Annotated[str, form(r"^[a-z][a-z0-9_]{0,31}$", "lower-case letters, digits and _, a letter first")]


class OwnRule(RuleSettings, OwnSettings):
    """A rule of the user's own; the other keys are its keywords."""

    name: OwnName  # the class, `package.module:Name`
    weights: Weights = "data"  # of the buffers, and of the loss that is reported: shares of the samples, or 1/K
    # Vectors of the rule that devices get with each model.
    extras_down: list[ExtraName] = Field(default_factory=list)
    # Vectors that the devices' objective returns with each model.
    extras_up: list[ExtraName] = Field(default_factory=list)

    @property
    def keywords(self) -> Mapping[str, Any]:
        """The keywords for the class: all keys but those above."""
        return self.model_extra or {}

    @property
    def sends(self) -> Sequence[str]:
        """The vectors behind the models that go down."""
        return self.extras_down

    @property
    def returns(self) -> Sequence[str]:
        """The vectors behind the models that come up."""
        return self.extras_up

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check that no vector is named twice. Raises InvalidExperiment."""
        for direction, names in (("extras_down", self.extras_down), ("extras_up", self.extras_up)):
            if len(set(names)) < len(names):
                raise InvalidExperiment(f"{key}.{direction}", names, "duplicate name", "Name each vector once.")

    @property
    def remembers(self) -> bool:
        """Whether its state persists: always, it may have some."""
        return True

    def build(self, context: RuleContext) -> Rule:
        return single_model(self, context, GuardedRule(self), weights=self.weights)


class _Vectors(dict[str, Floats]):
    """Vectors of a block by name; an assignment writes into the vector, which is kept, and not into this table."""

    def __init__(self, vectors: Mapping[str, Floats], *, named_in: str) -> None:
        super().__init__(vectors)
        self._named_in = named_in

    def __missing__(self, name: str) -> Never:
        raise LookupError(f"the rule has no vector {name!r}: name it in {self._named_in}")

    def __setitem__(self, name: str, values: Floats) -> None:
        self[name][...] = values


class GuardedRule(ColumnRule):
    """The user's rule. An error in it ends the run as InvalidExperiment."""

    def __init__(self, settings: OwnRule) -> None:
        self._name = settings.name
        self._rule = rule = own.build(KEY, settings, ColumnRule)
        self.numbers, self.compares, self.averages = rule.numbers, rule.compares, rule.averages
        with own.guarded({KEY: self._name}):
            self.vectors = tuple(dict.fromkeys((*rule.vectors, *settings.sends)))

    def first(self, vector: str) -> float:
        """Return the rule's first value of a vector."""
        with own.guarded({KEY: self._name}):
            return self._rule.first(vector)

    def begin(self, facts: RoundFacts) -> Mapping[str, object]:
        """Return the rule's facts, and keep its numbers."""
        name, rule = self._name, self._rule
        rule.numbers = self.numbers
        with own.guarded({KEY: name}):
            found = rule.begin(facts) or {}
        self.numbers = own.kept(KEY, name, rule.numbers, "`numbers` are")
        published: Mapping[str, object] = own.kept(KEY, name, found, "`begin` returns")
        return published

    def weights(self, facts: RoundFacts) -> Doubles:
        """Return the rule's weights."""
        with own.guarded({KEY: self._name}):
            return self._rule.weights(facts)

    def columns(self, block: Columns) -> Doubles:
        """Return the rule's columns as float64. Raises InvalidExperiment unless they are C finite numbers."""
        name = self._name
        with own.guarded({KEY: name}):
            state = _Vectors(block.state, named_in="its `vectors`, or in extras_down of the experiment")
            extras = _Vectors(block.extras, named_in="extras_up of the experiment")
            given = replace(block, uploads_KC=block.uploads_KC.copy(), state=state, extras=extras)
            found = np.asarray(self._rule.columns(given), np.float64)
        if found.shape != block.model_C.shape:
            problem = f"returns {list(found.shape)} for columns of {list(block.model_C.shape)}"
            own.refuse(KEY, name, problem, "Return one number for each column.")
        if not np.isfinite(found).all():
            own.refuse(KEY, name, "computes numbers that are not finite", "Look for a division by zero.")
        return found
