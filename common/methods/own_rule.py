"""A rule of the user's own, `aggregation.name = "package.module:Class"`: a class of `RuleSettings`
or `ColumnRule`.

A class of `RuleSettings` is a table as fedstrata's own rules are: its fields are keys, and `build`
returns its `Rule`. What all nodes must know of it, it declares where its user's experiment is read;
this travels with the experiment, so that nodes which do not run the rule never import it. A class
of `ColumnRule` gets the keys as keywords.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Never

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from fedstrata.common.errors import InvalidExperiment, RefusedModel
from fedstrata.common.lazy import np
from fedstrata.common.methods.column_rule import ColumnRule, Columns, RoundFacts
from fedstrata.common.methods.mixing import Floats
from fedstrata.common.methods.rule import (
    RULE_KEY,
    SUM_TOLERANCE,
    Aggregated,
    Dispatched,
    Rule,
    RuleContext,
    Uploads,
    WrappedRule,
)
from fedstrata.common.methods.selection import Choose
from fedstrata.common.methods.settings import RuleSettings, RuleUse, Weights
from fedstrata.common.methods.single_model import single_model
from fedstrata.common.methods.statistics import Doubles
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.settings import own
from fedstrata.common.settings.data import ModelSettings
from fedstrata.common.settings.own import OwnName, OwnSettings
from fedstrata.common.settings.tables import SettingsTable, form
from fedstrata.common.settings.training import TrainingSettings

ExtraName = Annotated[
    str, form(r"^[a-z][a-z0-9_]{0,31}$", "lower-case letters, digits and _, a letter first")
]


def settings_of(tree: Mapping[str, Any]) -> RuleSettings:
    """Return the table of an own rule. Raises InvalidExperiment, ValidationError.

    The class is imported, unless the tree has what it declares; where it cannot or must not be, the
    table is that of a `ColumnRule`, and the error is that of whoever builds it.
    """
    if "declared" in tree:
        return OwnTable.model_validate(tree)
    try:
        found = own.load(RULE_KEY, str(tree["name"]))
    except InvalidExperiment:
        found = None
    if not (isinstance(found, type) and issubclass(found, RuleSettings)):
        return OwnRule.model_validate(tree)
    return OwnTable.of(found, tree)


class Declared(SettingsTable):
    """What the class of an own rule declares to all nodes: the answers of `RuleSettings` of these
    names.
    """

    objective: str | None = None
    reads_losses: bool = False
    compares_losses: bool = False
    sends: list[ExtraName] = Field(default_factory=list)
    returns: list[ExtraName] = Field(default_factory=list)
    shaped: bool = False
    of_mean: Weights | None = None
    remembers: bool = False
    acts_from: int = 1
    several: bool = False
    selects: bool = False
    closes_with: int | None = None
    refiner: OwnName | None = None
    reads_samples: bool = False
    uploads_least: int = 1

    @model_serializer(mode="wrap")
    def _of_note(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # TOML has no empty table
        return {key: value for key, value in dump(self).items() if value or key == "several"}


def _declared(key: str) -> Any:
    return property(lambda self: getattr(self.declared, key))


class OwnTable(RuleSettings, OwnSettings):
    """A rule of the user's own, whose class is the table of its keys."""

    name: OwnName  # the class, `package.module:Name`
    declared: Declared

    objective = _declared("objective")
    reads_losses = _declared("reads_losses")
    compares_losses = _declared("compares_losses")
    sends = _declared("sends")
    returns = _declared("returns")
    shaped = _declared("shaped")
    of_mean = _declared("of_mean")
    remembers = _declared("remembers")
    acts_from = _declared("acts_from")
    several = _declared("several")
    selects = _declared("selects")
    closes_with = _declared("closes_with")
    refiner = _declared("refiner")
    reads_samples = _declared("reads_samples")
    uploads_least = _declared("uploads_least")

    @classmethod
    def of(cls, table: type[RuleSettings], tree: Mapping[str, Any]) -> OwnTable:
        """Return the table of a class, all keys included. Raises InvalidExperiment,
        ValidationError.
        """
        made = _made(table, tree)
        name = made.name
        with own.guarded({RULE_KEY: name}):
            dumped = made.model_dump(mode="json", exclude={"name"}, exclude_none=True)
            # TOML has no empty tables here
            keys = {key: value for key, value in dumped.items() if value != {}}
            answers = {key: getattr(made, key) for key in Declared.model_fields}
        if "declared" in keys:
            own.refuse(RULE_KEY, name, "has a key `declared`, which is fedstrata's", "Rename it.")
        answers |= {key: list(answers[key]) for key in ("sends", "returns")}
        try:
            declared = Declared.model_validate(answers)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            problem = (
                f"answers {wrong['input']!r:.60} for {wrong['loc'][0]}, which is wrong: "
                f"{wrong['msg']}"
            )
            own.refuse(RULE_KEY, name, problem, "Correct it.")
        found = cls(name=name, declared=declared, **keys)
        vars(found)["resolved"] = made
        return found

    @cached_property
    def resolved(self) -> RuleSettings:
        """The table itself; its class is imported when it is first used. Raises
        InvalidExperiment.
        """
        found = own.load(RULE_KEY, self.name)
        if not (isinstance(found, type) and issubclass(found, RuleSettings)):
            own.refuse(
                RULE_KEY, self.name, "is not a class of RuleSettings", "Use one file on all nodes."
            )
        try:
            again = OwnTable.of(found, {"name": self.name, **self.keywords})
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            key = ".".join(map(str, wrong["loc"]))
            own.refuse(
                f"aggregation.{key}",
                wrong["input"],
                f"{self.name}: {wrong['msg']}",
                "Correct the value.",
            )
        if again.declared != self.declared:
            problem = "declares something else than where the experiment was read"
            own.refuse(
                RULE_KEY,
                self.name,
                problem,
                "Use one file on all nodes, and omit the table `declared` in yours.",
            )
        return again.resolved

    @property
    def keywords(self) -> Mapping[str, Any]:
        """The keys of the class."""
        return self.model_extra or {}

    def made(self, key: str) -> RuleSettings:
        return self.resolved

    def build(self, context: RuleContext) -> Rule:
        """Return the rule, checked. Raises InvalidExperiment."""
        with own.guarded({RULE_KEY: self.name}):
            rule: object = self.resolved.build(context)
        if not isinstance(rule, Rule):
            own.refuse(
                RULE_KEY,
                self.name,
                f"builds {type(rule).__name__}, not Rule",
                "Return the rule of a node.",
            )
        return rule

    @property
    def packages(self) -> Sequence[str]:
        """Those of the class."""
        found: Sequence[str] = self._asked("packages")
        return found

    @property
    def named_children(self) -> Mapping[str, Iterable[str]]:
        """Those of the class, where the experiment was first read."""
        found: Mapping[str, Iterable[str]] = self._asked("named_children") if self._imported else {}
        return found

    def shapes(self, model: ModelLayout) -> Mapping[str, Sequence[int]]:
        found: Mapping[str, Sequence[int]] = self._asked("shapes", model) if self.shaped else {}
        return found

    def held_bytes(
        self, row_bytes: int, *, children: int, taking_part: int, resident_bytes: float
    ) -> float:
        given = {"children": children, "taking_part": taking_part, "resident_bytes": resident_bytes}
        return float(self._asked("held_bytes", row_bytes, **given))

    def check(self, key: str, children: int, uploads: int) -> None:
        if self._imported:
            self._asked("check", key, children, uploads)

    def check_devices(self, key: str, training: TrainingSettings, model: ModelSettings) -> None:
        if self._imported:
            self._asked("check_devices", key, training, model)

    def advice(self, use: RuleUse) -> Iterable[str]:
        with own.guarded({RULE_KEY: self.name}):
            return list(self.resolved.advice(use))

    @property
    def _imported(self) -> bool:
        return "resolved" in vars(self)

    def _asked(self, key: str, *arguments: Any, **keywords: Any) -> Any:
        """Return what the class answers. Raises InvalidExperiment."""
        table = self.resolved
        with own.guarded({RULE_KEY: self.name}):
            found = getattr(table, key)
            if arguments:
                return found(*arguments, **keywords)
            return found


def _made(table: type[RuleSettings], tree: Mapping[str, Any]) -> RuleSettings:
    """Return an object of a class, under the name of the user's. Raises InvalidExperiment,
    ValidationError.
    """
    name = str(tree["name"])
    field = table.model_fields["name"]
    keys = {key: value for key, value in tree.items() if key != "name"}
    for key, value in keys.items():
        if key not in table.model_fields:
            known = ", ".join(sorted(table.model_fields.keys() - {"name"})) or "no keys"
            refusal = f"{name} takes {known}, and not this keyword"
            own.refuse(f"aggregation.{key}", value, refusal, "Correct its name, or omit it.")
    with own.guarded({RULE_KEY: name}):
        try:
            if field.is_required():
                keys["name"] = name
            found = table.model_validate(keys)
            return found.model_copy(update={"name": name})
        except ValidationError as error:
            wrong = error
    raise wrong


class GuardedOwn(WrappedRule):
    """A rule that own code has built, and checks of what it returns. Its errors are
    InvalidExperiment.
    """

    def __init__(self, name: str, rule: Rule, layout: ModelLayout) -> None:
        super().__init__(rule)
        self._name = name
        self._layout = layout

    @property
    def reads_start(self) -> bool:
        with self._guarded():
            return bool(self._rule.reads_start)

    @property
    def hides_uploads(self) -> bool:
        with self._guarded():
            return bool(self._rule.hides_uploads)

    @property
    def choose(self) -> Choose | None:
        with self._guarded():
            return self._rule.choose

    @property
    def model(self) -> Row:
        with self._guarded():
            return self._rule.model

    @property
    def mixed(self) -> Row | None:
        with self._guarded():
            return self._rule.mixed

    def begin(self, model: Row) -> None:
        with self._guarded():
            self._rule.begin(model)

    def dispatch(self, r: int, children: Sequence[str]) -> Dispatched:
        """Return the rule's models. Raises InvalidExperiment unless each child gets one."""
        with self._guarded():
            found = [(row, list(those)) for row, those in super().dispatch(r, children)]
        given = sorted(child for _, those in found for child in those)
        if given != sorted(children):
            _refuse(
                self._name,
                self._rule.dispatch,
                f"gives models to {given!r:.100}",
                "Give each of `children` one.",
            )
        return found

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Aggregate by the rule. Raises InvalidExperiment unless its model is finite and its facts
        are for JSON.
        """
        method = self._rule.aggregate
        with self._guarded():
            found: object = method(r, uploads)
            if not isinstance(found, Aggregated):
                _refuse(
                    self._name, method, f"returns {type(found).__name__}", "Return `Aggregated`."
                )
            model = self._rule.model
        at = own.place(method)
        own.kept(RULE_KEY, self._name, found.facts, "`facts` are", at=at)
        own.kept(RULE_KEY, self._name, found.distances, "`distances` are", at=at)
        try:
            self._layout.check_finite(model)
        except RefusedModel as error:
            _refuse(
                self._name,
                method,
                f"computes a model whose {error}",
                "Look for a division by zero.",
            )
        return found

    def save(self, folder: Path) -> dict[str, object]:
        """Write the rule's state. Raises InvalidExperiment."""
        with self._guarded():
            found = self._rule.save(folder)
        own.kept(RULE_KEY, self._name, found, "`save` returns", at=own.place(self._rule.save))
        return found

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        with self._guarded():
            self._rule.restore(folder, facts)

    def _guarded(self) -> AbstractContextManager[None]:
        return own.guarded({RULE_KEY: self._name})


class OwnRule(RuleSettings, OwnSettings):
    """A rule of the user's own, of columns; the other keys are its keywords."""

    remembers: ClassVar[bool] = True  # it may have state

    name: OwnName  # the class, `package.module:Name`
    # of the buffers, and of the loss that is reported: shares of the samples, or 1/K
    weights: Weights = "data"
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
                raise InvalidExperiment(
                    f"{key}.{direction}", names, "duplicate name", "Name each vector once."
                )

    def build(self, context: RuleContext) -> Rule:
        return single_model(self, context, GuardedRule(self), weights=self.weights)


class GuardedRule(ColumnRule):
    """The user's rule. An error in it ends the run as InvalidExperiment."""

    def __init__(self, settings: OwnRule) -> None:
        self._name = settings.name
        self._rule = rule = own.build(RULE_KEY, settings, ColumnRule)
        self.compares = rule.compares
        self.averages = rule.averages
        with own.guarded({RULE_KEY: self._name}):
            # those of a class would be shared by all nodes of a process
            self.numbers = deepcopy(rule.numbers)
            vectors: object = rule.vectors
        if not isinstance(vectors, Collection) or not all(
            isinstance(each, str) for each in vectors
        ):
            vectors = str(vectors)
        if isinstance(vectors, str):
            own.refuse(
                RULE_KEY,
                self._name,
                f"its `vectors` are {vectors!r:.60}",
                "List their names, each a text.",
            )
        self.vectors = tuple(dict.fromkeys((*vectors, *settings.sends)))

    def first(self, vector: str) -> float:
        """Return the rule's first value of a vector. Raises InvalidExperiment unless it is a finite
        number.
        """
        with own.guarded({RULE_KEY: self._name}):
            found: object = self._rule.first(vector)
        if not isinstance(found, float | int | np.number) or not np.isfinite(found):
            _refuse(
                self._name,
                self._rule.first,
                f"returns {found!r:.60} for {vector}",
                "Return a finite number.",
            )
        return float(found)

    def begin(self, facts: RoundFacts) -> Mapping[str, object]:
        """Return the rule's facts, and keep its numbers."""
        name = self._name
        rule = self._rule
        with own.guarded({RULE_KEY: name}):
            rule.numbers = self.numbers
            found = rule.begin(facts) or {}
        self.numbers = own.kept(RULE_KEY, name, rule.numbers, "`numbers` are")
        at = own.place(rule.begin)
        published: Mapping[str, object] = own.kept(RULE_KEY, name, found, "`begin` returns", at=at)
        return published

    def weights(self, facts: RoundFacts) -> Doubles:
        """Return the rule's weights. Raises InvalidExperiment unless they are K finite numbers of
        sum 1.
        """
        with own.guarded({RULE_KEY: self._name}):
            found: object = self._rule.weights(facts)
        wanted = f"Return one number for each of {len(facts.weights_K)} uploads, of sum 1."
        weights_K = self._numbers(self._rule.weights, found, facts.weights_K.shape, wanted)
        if abs(float(weights_K.sum()) - 1) > SUM_TOLERANCE:
            _refuse(
                self._name,
                self._rule.weights,
                f"returns weights of sum {weights_K.sum():.6g}",
                wanted,
            )
        return weights_K

    def columns(self, block: Columns) -> Doubles:
        """Return the rule's columns as float64. Raises InvalidExperiment unless they are C finite
        numbers.
        """
        name = self._name
        with own.guarded({RULE_KEY: name}):
            state = _KeptVectors(
                block.state, named_in="its `vectors`, or in extras_down of the experiment"
            )
            extras = _KeptVectors(block.extras, named_in="extras_up of the experiment")
            given = replace(block, uploads_KC=block.uploads_KC.copy(), state=state, extras=extras)
            found: object = self._rule.columns(given)
        return self._numbers(
            self._rule.columns, found, block.model_C.shape, "Return one number for each column."
        )

    def _numbers(
        self, method: Callable[..., object], found: object, shape: Sequence[int], remedy: str
    ) -> Doubles:
        """Return what a method has returned, as float64. Raises InvalidExperiment unless it has
        this shape, finite.
        """
        try:
            numbers = None if found is None else np.asarray(found, np.float64)
        except (TypeError, ValueError):
            numbers = None
        if numbers is None:
            _refuse(
                self._name,
                method,
                f"returns {type(found).__name__} for {list(shape)} numbers",
                remedy,
            )
        if numbers.shape != tuple(shape):
            _refuse(
                self._name,
                method,
                f"returns {list(numbers.shape)} for {list(shape)} numbers",
                remedy,
            )
        if not np.isfinite(numbers).all():
            _refuse(
                self._name,
                method,
                "computes numbers that are not finite",
                "Look for a division by zero.",
            )
        return numbers


class _KeptVectors(dict[str, Floats]):
    """Vectors of a block by name; an assignment writes into the vector, which is kept, and not into
    this table.
    """

    def __init__(self, vectors: Mapping[str, Floats], *, named_in: str) -> None:
        super().__init__(vectors)
        self._named_in = named_in

    def __missing__(self, name: str) -> Never:
        raise LookupError(f"the rule has no vector {name!r}: name it in {self._named_in}")

    def __setitem__(self, name: str, values: Floats) -> None:
        self[name][...] = values


def _refuse(name: str, method: Callable[..., object], problem: str, remedy: str) -> Never:
    """Refuse what a method of the user's rule does. Raises InvalidExperiment."""
    own.refuse(RULE_KEY, name, f"{method.__name__} {problem}{own.place(method)}", remedy)
