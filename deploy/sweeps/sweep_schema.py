"""A sweep as typed data: the keys of its TOML file. docs/sweeps.md explains them.

An unknown key or a wrong value is an InvalidExperiment that names the key, the value and the
remedy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.settings.tables import Count, Fraction, SettingsTable, proposal
from fedstrata.deploy.results.cells import CellOrder

EACH_CELL: Final = ("experiment", "skip", "target")  # keys of [[where]] that are no axes
MEASURE: Final = "measure"  # the column of a paper's figures that has the measures' labels
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Size = Literal["small", "reduced", "full"]
FULL: Final = "full"  # the size that the file's other tables have
Keys = dict[str, Any]  # keys of an experiment, a part of its tree
SCALES: Final[Mapping[str, float]] = {
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "kB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
}
UNITS: Final[Mapping[str, tuple[str, ...]]] = {
    "seconds": ("s", "min", "h"),
    "bytes": ("MB", "kB", "GB"),
}
ONLY_FOR: Final[Mapping[str, str]] = {  # keys of a measure that belong to one name
    **dict.fromkeys(("last", "best", "round", "every", "of", "personalised"), "accuracy"),
    **dict.fromkeys(("tier", "direction"), "bytes"),
}


def short_forms(tree: Any) -> Any:
    """Return a sweep's tree with its short forms written out: an axis as a list, a measure
    alone.
    """
    if not isinstance(tree, Mapping):
        return tree
    tree = dict(tree)
    if isinstance(axes := tree.get("axes"), Mapping):
        tree["axes"] = {name: _axis(name, values) for name, values in axes.items()}
    if isinstance(tree.get("measure"), Mapping):
        tree["measure"] = [tree["measure"]]
    return tree


def _axis(name: str, values: Any) -> Any:
    """Return an axis that is a list of values of the key `name` as a table."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return values
    found = {}
    for value in values:
        branch: Any = value
        for key in reversed(name.split(".")):
            branch = {key: branch}
        label = _label(value)
        if label in found:
            raise InvalidExperiment(
                f"axes.{name}", value, "a value twice", "Write each value once."
            )
        found[label] = branch
    return found


def _label(value: Any) -> str:
    """Return how a value of an axis is called."""
    if isinstance(value, str):
        return value
    return json.dumps(value)


def _values(given: Any) -> Any:
    """Return the labels of one value of an axis or several; a table is left for its own check."""
    if isinstance(given, Mapping):
        return given
    values = given if isinstance(given, list) else [given]
    return list(map(_label, values))


class Measure(SettingsTable):
    """What is measured in each run: an accuracy, or a cost of reaching one."""

    # accuracy in percent; or rounds (global rounds), seconds, bytes, steps, path_steps (of each
    # round the slowest device's steps), epsilon (of privacy, the worst unit's): until the target is
    # reached; or reached: how many runs reached it.
    name: Literal[
        "accuracy", "rounds", "seconds", "bytes", "steps", "path_steps", "epsilon", "reached"
    ] = "accuracy"
    label: str = ""  # the column's head; without it, made from the other keys
    # accuracy: the mean of the last evaluations; without any of these four, of the last one
    last: Count | None = None
    best: bool = False  # accuracy: the best of the run
    round: Count | None = None  # accuracy: after this global round
    every: Count | None = None  # accuracy: after every so many global rounds, a curve
    # accuracy: over all test samples; or over the devices that scored, `worst` for the worst tenth
    # of them, and alike over the honest ones; or `attack`: the success of the first attack that has
    # tests of its own.
    of: Literal["samples", "devices", "worst", "spread", "honest", "honest_worst", "attack"] = (
        "samples"
    )
    # accuracy: of the models that devices trained, with `evaluation.personalised`
    personalised: bool = False
    target: Fraction | None = None  # costs: the accuracy to reach; without it, the cell's
    # costs: until the target is reached, or of the whole run
    until: Literal["target", "end"] = "target"
    tier: str = ""  # bytes: of this tier only
    direction: Literal["", "up", "down"] = ""  # bytes: in this direction only
    against: str = ""  # compared with the cell that has this value of its axis, seed by seed
    # With `against`: this value minus the other, or, for costs, how many times as large the other
    # is.
    relation: Literal["difference", "speed_up"] = "difference"
    unit: Literal["", "s", "min", "h", "kB", "MB", "GB"] = ""  # of seconds and bytes
    digits: Annotated[int, Field(ge=0, le=6)] | None = None  # decimals
    shown: bool = True  # false: not in the table, but in CSV and JSON

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        default = Measure.model_construct()
        for key, name in ONLY_FOR.items():
            if self.name != name and getattr(self, key) != getattr(default, key):
                problem = f"it belongs to name = {name!r}; this is {self.name!r}"
                raise InvalidExperiment(
                    f"measure.{key}", getattr(self, key), problem, f"Remove {key}."
                )
        chosen = [key for key in ("last", "best", "round", "every") if getattr(self, key)]
        if len(chosen) > 1:
            raise InvalidExperiment(
                "measure", chosen, "only one of these is possible", f"Keep {chosen[0]}."
            )
        if self.unit and self.unit not in UNITS.get(self.name, ()):
            if self.name in UNITS:
                remedy = f"Use {' or '.join(UNITS[self.name])}."
            else:
                remedy = "Remove unit."
            raise InvalidExperiment("measure.unit", self.unit, f"no unit of {self.name}", remedy)
        if self.relation == "speed_up" and (
            self.name in ("accuracy", "reached") or not self.against
        ):
            problem = "it compares costs"
            remedy = "Give the name of a cost, and against."
            raise InvalidExperiment("measure.relation", self.relation, problem, remedy)
        if self.until == "end" and (
            self.target is not None or self.name in ("accuracy", "reached")
        ):
            if self.target:
                problem = "costs of the whole run have no target"
            else:
                problem = f"not for {self.name}"
            raise InvalidExperiment("measure.until", self.until, problem, "Remove until.")
        return self

    @property
    def needs_target(self) -> bool:
        """Whether a cell without a target has no value."""
        return self.name != "accuracy" and self.until == "target"


class Where(SettingsTable):
    """Keys of the cells with some values of axes: `[[where]] model = "VGG-16"`, or `model = ["CNN",
    "VGG-16"]`.
    """

    at: dict[str, list[str]]  # by axis, in the file beside the other keys
    experiment: Keys = Field(default_factory=dict)
    skip: bool = False  # leave these cells out
    target: Fraction | None = None  # accuracy to reach in these cells

    @model_validator(mode="before")
    @classmethod
    def _apart(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        at = {key: _values(value) for key, value in tree.items() if key not in EACH_CELL}
        return {"at": at, **{key: value for key, value in tree.items() if key in EACH_CELL}}

    def holds(self, values: Mapping[str, str]) -> bool:
        """Return whether a cell has the values."""
        return all(values[axis] in wanted for axis, wanted in self.at.items())


class Paper(SettingsTable):
    """What a paper has, to compare with."""

    cite: str = ""
    table: str = ""  # which table or figure of it
    label: str = "paper"  # how its figures are called in the table
    # where text and public code differ, what is not stated
    notes: list[str] = Field(default_factory=list)
    # The figures, in the measures' units, as rows of a table. The first row has the heads: an axis,
    # or `measure`, whose values are below it; or a value of another axis, whose figures are below
    # it. A figure is a number,
    # [mean, deviation], { from = ..., to = ... }, or "" for none.
    figures: list[list[Any]] = Field(default_factory=list)
    # Names for the best of several values of the ranked axis, if the paper has a figure of the best
    # alone:
    # FedAdp = ["FedAdp 4", "FedAdp 6"]. They stand in the tables, in `figures`, `baseline` and a
    # measure's `against`.
    best: dict[str, list[str]] = Field(default_factory=dict)
    order: str = ""  # the axis whose values are ranked; without it `method`, or else the last axis
    # the value with which the others are compared; without it FedAvg, if that is one
    baseline: str = ""


Axis = dict[str, Keys]


class Smaller(SettingsTable):
    """A smaller size of a sweep: keys on top of the full one's, in the same order."""

    note: str = ""  # how it is smaller; it stands in the title
    experiment: Keys = Field(default_factory=dict)
    axes: dict[str, Axis] = Field(default_factory=dict)
    where: list[Where] = Field(default_factory=list)
    only: dict[str, list[str]] = Field(default_factory=dict)  # by axis: the values that remain
    seeds: Count | list[Seed] | None = None
    measure: list[Measure] | None = None
    target: Fraction | None = None

    @model_validator(mode="before")
    @classmethod
    def _forms(cls, tree: Any) -> Any:
        return short_forms(tree)


def _trees(axes: Mapping[str, Axis], where: Sequence[Where]) -> dict[str, Keys]:
    """Return what axes and [[where]] set in experiments, by key."""
    found = {
        f"axes.{axis}.{value}": keys
        for axis, values in axes.items()
        for value, keys in values.items()
    }
    return found | {
        f"where.{place}.experiment": each.experiment for place, each in enumerate(where)
    }


class SweepFile(SettingsTable):
    """A sweep's file."""

    title: str
    # The experiment of each cell: that of `base`, a file or a name that fedstrata brings along,
    # then [experiment], then the axes in their order, then [[where]].
    base: str = ""
    experiment: Keys = Field(default_factory=dict)
    # By axis: its values, each with the keys of the experiment that it sets. An axis may also be a
    # list of values of the key that is its name.
    axes: dict[str, Axis]
    where: list[Where] = Field(default_factory=list)
    seeds: Count | list[Seed] = 1  # so many, from 1 on; or a list
    target: Fraction | None = None  # accuracy to reach; without it, the experiment's stop.target
    # a table, or several: [[measure]]
    measure: list[Measure] = Field(default_factory=lambda: [Measure()])
    # Axes whose values make tables, rows and columns. Axes that are in none are rows.
    tables: list[str] = Field(default_factory=list)
    rows: list[str] = Field(default_factory=list)
    columns: list[str] = Field(default_factory=list)
    paper: Paper = Paper()
    small: Smaller = Smaller()  # minutes, on the digits that come with fedstrata
    # the same data, model and skew, with fewer global rounds or values of axes
    reduced: Smaller = Smaller()

    @model_validator(mode="before")
    @classmethod
    def _forms(cls, tree: Any) -> Any:
        return short_forms(tree)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not self.axes:
            raise InvalidExperiment("axes", {}, "a sweep needs one", "Add [axes.method].")
        for axis, values in self.axes.items():
            if axis in (*EACH_CELL, MEASURE):
                remedy = "Give the axis another name."
                raise InvalidExperiment("axes", axis, "a key of the file's own", remedy)
            if not values:
                raise InvalidExperiment("axes", axis, "it has no values", "Add some.")
        self._check_places()
        for where in self.where:
            self._check_values("where", where.at)
        self._check_sizes()
        if self.paper.order:
            self.check_axis("paper.order", self.paper.order)
        for name, members in self.paper.best.items():
            for value in members:
                self.check_value(f"paper.best.{name}", self.ranked, value)
            if not members or name in self.axes[self.ranked]:
                problem = "a value of the axis" if members else "the best of nothing"
                remedy = "Use another name." if members else "Name some values."
                raise InvalidExperiment("paper.best", name, problem, remedy)
        if self.paper.baseline and self.paper.baseline not in self.paper.best:
            self.check_value("paper.baseline", self.ranked, self.paper.baseline)
        return self

    def _check_sizes(self) -> None:
        """Check the values that smaller sizes name, and that no experiment has a seed."""
        trees = {"experiment": self.experiment, **_trees(self.axes, self.where)}
        for name, smaller in self.sizes.items():
            for where in smaller.where:
                self._check_values(f"{name}.where", where.at)
            self._check_values(f"{name}.axes", smaller.axes)
            self._check_values(f"{name}.only", smaller.only)
            trees[f"{name}.experiment"] = smaller.experiment
            trees |= {
                f"{name}.{key}": tree for key, tree in _trees(smaller.axes, smaller.where).items()
            }
        for key, tree in trees.items():
            if "seed" in tree:
                raise InvalidExperiment(
                    f"{key}.seed", tree["seed"], "the sweep has seeds", "Set seeds instead."
                )

    def _check_places(self) -> None:
        """Check that each axis has one place in the table."""
        for key, axes in (("tables", self.tables), ("rows", self.rows), ("columns", self.columns)):
            for axis in axes:
                self.check_axis(key, axis)
        placed = [*self.tables, *self.rows, *self.columns]
        for axis in placed:
            if placed.count(axis) > 1:
                raise InvalidExperiment("rows", axis, "this axis has two places", "Name it once.")

    @property
    def sizes(self) -> Mapping[str, Smaller]:
        """The smaller sizes that the file has, by name."""
        known = {"small": self.small, "reduced": self.reduced}
        return {name: smaller for name, smaller in known.items() if name in self.model_fields_set}

    def smaller(self, size: Size) -> Smaller:
        """Return what a size changes; the full one nothing. Raises InvalidExperiment if the file
        has no such size.
        """
        if size == FULL:
            return Smaller()
        if size not in self.sizes:
            remedy = f"Use {' or '.join([*self.sizes, FULL])}, or add [{size}] to the file."
            raise InvalidExperiment("--size", size, "the sweep has no such size", remedy)
        return self.sizes[size]

    @property
    def ranked(self) -> str:
        """The axis whose values are ranked."""
        return self.paper.order or ("method" if "method" in self.axes else list(self.axes)[-1])

    @property
    def baseline(self) -> str:
        """The value of that axis with which the others are compared; empty if there is none."""
        return self.paper.baseline or ("FedAvg" if "FedAvg" in self.axes[self.ranked] else "")

    @property
    def order(self) -> CellOrder:
        """The order of the cells; of a baseline that is the best of several values, the first of
        these.
        """
        baseline = self.paper.best.get(self.baseline, [self.baseline])[0]
        return CellOrder(
            {axis: list(values) for axis, values in self.axes.items()}, self.ranked, baseline
        )

    def _check_values(self, key: str, at: Mapping[str, Any]) -> None:
        for axis, values in at.items():
            for value in values:
                self.check_value(key, axis, value)

    def check_axis(self, key: str, axis: str) -> None:
        """Raise InvalidExperiment if there is no such axis."""
        if axis not in self.axes:
            remedy = proposal(axis, self.axes, what="There are")
            raise InvalidExperiment(key, axis, "no axis has this name", remedy)

    def check_value(self, key: str, axis: str, value: str) -> None:
        """Raise InvalidExperiment if there is no such axis, or if it has no such value."""
        self.check_axis(key, axis)
        if value not in self.axes[axis]:
            remedy = proposal(value, self.axes[axis], what="There are")
            if key.startswith("--"):
                raise InvalidExperiment(
                    key, f"{axis}={value}", "the axis has no such value", remedy
                )
            raise InvalidExperiment(f"{key}.{axis}", value, "the axis has no such value", remedy)
