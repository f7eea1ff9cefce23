"""The cells of a sweep: an experiment for each combination of the axes' values and each seed; and a
paper's figures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeAlias

from pydantic import ValidationError

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import override, parse, read
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.experiment.validation_messages import explain
from fedstrata.common.settings.tables import proposal, with_tables
from fedstrata.common.settings.training import ACCURACY
from fedstrata.deploy.console.shipped import shipped
from fedstrata.deploy.results.cells import BETWEEN
from fedstrata.deploy.sweeps.sweep_schema import FULL, MEASURE, Measure, Size, SweepFile

OWN_KEYS: Final = ("axes", "title")  # keys of a sweep that no experiment has
FIGURES: Final = "paper.figures"


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """A figure of a paper, or a range. `deviation`: None if it states none."""

    low: float
    high: float
    deviation: float | None = None

    @property
    def mean(self) -> float:
        """The figure, or the middle of its range."""
        return (self.low + self.high) / 2

    @property
    def text(self) -> str:
        """The figure as the paper has it."""
        if self.low != self.high:
            return f"{self.low:g} to {self.high:g}"
        if self.deviation is None:
            return f"{self.mean:g}"
        return f"{self.mean:g} ± {self.deviation:g}"

    def apart(self, value: float) -> float:
        """Return a value minus the figure, 0 within its range."""
        return max(value - self.high, 0.0) + min(value - self.low, 0.0)


# by the axes' values in order, and measure
Figures: TypeAlias = Mapping[tuple[tuple[str, ...], str], PaperFigure]


@dataclass(frozen=True, slots=True)
class SweepCell:
    """One combination of the axes' values: its experiments by seed, and the accuracy to reach, or
    None.

    `members`: of a cell without experiments, the cells of which it stands for the best, by each
    measure anew.
    """

    values: Mapping[str, str]
    experiments: Mapping[int, Experiment]
    target: float | None
    members: Sequence[SweepCell] = ()

    @property
    def label(self) -> str:
        """The values, with commas."""
        return label_of(self.values.values())


@dataclass(frozen=True)
class Grid:
    """A sweep that is ready to run. `axes`: the values that remain, by axis; `stem`: the file's
    name.
    """

    file: SweepFile
    stem: str
    size: Size
    axes: Mapping[str, Sequence[str]]
    cells: Sequence[SweepCell]
    measures: Sequence[Measure]
    figures: Figures  # the paper's; unless the grid `is_whole`, for their order alone
    changes: Sequence[str] = ()  # `key=value` of every cell, on top of the file

    @property
    def title(self) -> str:
        """The file's title, with what makes the cells others than the file's."""
        note = self.file.smaller(self.size).note
        others = [f"{self.size}: {note}" if note else self.size] if self.size != FULL else []
        others += ["changed by --set"] if self.changes else []
        if others:
            return f"{self.file.title} ({', '.join(others)})"
        return self.file.title

    @property
    def is_whole(self) -> bool:
        """Whether the cells are those of the file: neither of a smaller size, nor changed by the
        command.
        """
        return self.size == FULL and not self.changes

    @property
    def folder(self) -> str:
        """The name of the folder of its runs."""
        if self.size == FULL:
            return self.stem
        return f"{self.stem}-{self.size}"

    @property
    def seeds(self) -> list[int]:
        """The seeds."""
        return list(self.cells[0].experiments)

    @cached_property
    def rows(self) -> list[SweepCell]:
        """The cells, and behind its last member each cell that stands for the best of several."""
        found = list(self.cells)
        axis = self.file.ranked
        for name, members in self.file.paper.best.items():
            places: dict[tuple[str, ...], list[SweepCell]] = {}
            for cell in self.cells:
                if cell.values[axis] in members:
                    rest = tuple(value for key, value in cell.values.items() if key != axis)
                    places.setdefault(rest, []).append(cell)
            for each in places.values():
                best = SweepCell({**each[-1].values, axis: name}, {}, each[-1].target, tuple(each))
                found.insert(found.index(each[-1]) + 1, best)
        return found

    @property
    def experiments(self) -> dict[str, Experiment]:
        """The experiments by digest, seed by seed, so that an interrupted sweep has complete
        seeds.
        """
        found = [cell.experiments[seed] for seed in self.seeds for cell in self.cells]
        return {each.digest: each for each in found}

    def labels(self) -> dict[str, str]:
        """Return the label of each experiment by digest: its first cell and its seed."""
        found: dict[str, str] = {}
        for cell in self.cells:
            for seed, experiment in cell.experiments.items():
                found.setdefault(
                    experiment.digest, label_of([*cell.values.values(), f"seed {seed}"])
                )
        return found


def merged(base: Mapping[str, Any], *changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree updated by others, table by table; a table with a `name` key replaces the
    existing one.
    """
    tree = dict(base)
    for change in changes:
        for key, value in change.items():
            deeper = (
                isinstance(value, Mapping)
                and isinstance(tree.get(key), Mapping)
                and "name" not in value
            )
            tree[key] = merged(tree[key], value) if deeper else value
    return tree


def label_of(values: Iterable[str]) -> str:
    """Return values as one text, with commas."""
    return BETWEEN.join(values)


def is_sweep(tree: Mapping[str, Any]) -> bool:
    """Return whether a TOML file's tree is that of a sweep, and not of an experiment."""
    return any(key in tree for key in OWN_KEYS)


def load(path: Path, **options: Any) -> Grid:
    """Return the grid of a sweep's file, with the options of `expand`. Raises InvalidExperiment."""
    tree = read(path)
    if not is_sweep(tree):
        problem = "not a sweep: it has no [axes]"
        remedy = "Use `fedstrata run` for an experiment."
        raise InvalidExperiment("sweep", str(path), problem, remedy)
    return expand(tree, path, **options)


def expand(
    tree: Mapping[str, Any],
    path: Path,
    *,
    size: Size = FULL,
    overrides: Sequence[str] = (),
    only: Sequence[str] = (),
    seeds: int | None = None,
) -> Grid:
    """Return the grid of a sweep's tree; `path`: its file, for names and relative paths. Raises
    InvalidExperiment.

    `overrides`: `key=value` of the experiment, on top of all. `only`: `axis=value`, what remains of
    an axis. `seeds`: 1 to this number, in place of the file's.
    """
    try:
        file = SweepFile.model_validate(tree)
    except ValidationError as error:
        raise explain(error, SweepFile) from None
    for text in overrides:
        key = text.partition("=")[0].strip()
        if key == "seed":
            raise InvalidExperiment("--set", text, "the sweep has seeds", "Use --seeds.")
        if key in file.axes:
            raise InvalidExperiment(
                "--set", text, "an axis of the sweep", f"Use --only {key}=VALUE."
            )
    smaller = file.smaller(size)
    replaced = {key: getattr(smaller, key) for key in ("seeds", "measure", "target")}
    file = file.model_copy(
        update={key: value for key, value in replaced.items() if value is not None}
    )
    axes = _remaining(file, only, size=size)
    base = _base(file.base, path)
    chosen = list(range(1, seeds + 1)) if seeds else _seeds(file)
    cells = []
    for combination in product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        wheres = [where for where in file.where if where.holds(values)]
        trees = [file.experiment, *(file.axes[axis][value] for axis, value in values.items())]
        trees += [where.experiment for where in wheres]
        on_top = [where for where in smaller.where if where.holds(values)]
        trees += [
            smaller.experiment,
            *(smaller.axes.get(axis, {}).get(v, {}) for axis, v in values.items()),
        ]
        trees += [where.experiment for where in on_top]
        wheres += on_top
        if any(where.skip for where in wheres):
            continue
        keys = merged({"name": _name(path.stem)}, base, *map(with_tables, trees))
        experiments = {seed: _experiment(keys, values, seed, overrides) for seed in chosen}
        targets = [file.target or experiments[chosen[0]].stop.target]
        targets += [where.target for where in wheres if where.target is not None]
        cells.append(SweepCell(values, experiments, targets[-1]))
    if not cells:
        raise InvalidExperiment("where", "skip", "no cell remains", "Skip fewer.")
    measures = list(_measures(file, cells))
    labels = [measure.label for measure in measures]
    figures = figures_of(file, labels) if size == FULL else expand(tree, path, seeds=1).figures
    return Grid(file, path.stem, size, axes, cells, measures, figures, tuple(overrides))


def _remaining(file: SweepFile, only: Sequence[str], *, size: Size) -> dict[str, list[str]]:
    """Return the values of each axis that remain, in the file's order."""
    wanted: dict[str, list[str]] = {}
    for text in only:
        axis, equals, value = text.partition("=")
        if not equals:
            raise InvalidExperiment(
                "--only", text, "not of the form axis=value", "Write for instance method=FedAvg."
            )
        file.check_value("--only", axis, value)
        wanted.setdefault(axis, []).append(value)
    kept = file.smaller(size).only
    found = {}
    for axis, values in file.axes.items():
        found[axis] = [
            v for v in values if v in kept.get(axis, values) and v in wanted.get(axis, values)
        ]
        if not found[axis]:
            remedy = proposal("", kept[axis], what="There are")
            raise InvalidExperiment(
                "--only", f"{axis}={wanted[axis][0]}", f"not in the {size} size", remedy
            )
    return found


def _base(name: str, path: Path) -> dict[str, Any]:
    """Return the tree of the experiment that a sweep begins with, without its name and seed."""
    if not name:
        return {}
    file = path.parent / name
    if not file.exists():
        known = shipped()
        if name not in known:
            remedy = proposal(name, known, what="There are")
            raise InvalidExperiment("base", name, "no file and no experiment has this name", remedy)
        file = known[name]
    tree = read(file)
    if is_sweep(tree):
        raise InvalidExperiment("base", name, "a sweep", "Name an experiment.")
    return dict(
        with_tables({key: value for key, value in tree.items() if key not in ("name", "seed")})
    )


def _seeds(file: SweepFile) -> list[int]:
    seeds = list(range(1, file.seeds + 1)) if isinstance(file.seeds, int) else file.seeds
    if not seeds or len(set(seeds)) < len(seeds):
        problem = "a seed twice" if seeds else "no seed"
        raise InvalidExperiment("seeds", seeds, problem, "Write for instance 5, or [1, 2, 3].")
    return seeds


def _experiment(
    keys: Mapping[str, Any], values: Mapping[str, str], seed: int, overrides: Sequence[str]
) -> Experiment:
    """Return a cell's experiment. Raises InvalidExperiment, with the cell's name."""
    try:
        tree = merged(keys, {"seed": seed})
        for each in overrides:
            override(tree, each)
        return parse(tree)
    except InvalidExperiment as error:
        key, value, problem, remedy = error.parts
        raise InvalidExperiment(
            f"cell {label_of(values.values())}: {key}", value, problem, remedy
        ) from None


def _measures(file: SweepFile, cells: Sequence[SweepCell]) -> Iterator[Measure]:
    """Yield the measures, a curve as one for each of its global rounds. Raises InvalidExperiment.

    Each has a target where it needs one, a value that it is compared with where it has one, and a
    label of its own.
    """
    rounds = max(experiment.rounds for cell in cells for experiment in cell.experiments.values())
    labels = set()
    for measure in file.measure:
        for cell in cells:
            score = next(iter(cell.experiments.values())).score.name
            if score != ACCURACY and (measure.name == ACCURACY or measure.needs_target):
                problem = f"cell {cell.label} has the score {score}, not accuracy"
                remedy = 'Measure costs with until = "end"; `fedstrata compare` has other scores.'
                raise InvalidExperiment("measure.name", measure.name, problem, remedy)
            if measure.needs_target and measure.target is None and cell.target is None:
                problem = f"cell {cell.label} has no target"
                raise InvalidExperiment(
                    "measure.name", measure.name, problem, 'Set target, or until = "end".'
                )
        if measure.against:
            axis_of(file, measure.against)
        curve = range(measure.every, rounds + 1, measure.every) if measure.every else [None]
        for number in curve:
            if number is None:
                changed = measure
            else:
                changed = measure.model_copy(update={"every": None, "round": number})
            found = changed.model_copy(
                update={"label": _label(changed, several=number is not None)}
            )
            if found.label in labels:
                raise InvalidExperiment(
                    "measure.label", found.label, "two measures have it", "Give one another label."
                )
            labels.add(found.label)
            yield found


def axis_of(file: SweepFile, value: str) -> str:
    """Return the only axis that has a value. Raises InvalidExperiment."""
    if value in file.paper.best:
        axes = [file.ranked]
    else:
        axes = [axis for axis, each in file.axes.items() if value in each]
    if len(axes) > 1:
        problem = "several axes have this value"
        raise InvalidExperiment("measure.against", value, problem, "Rename one of them.")
    if not axes:
        known = [each for values in file.axes.values() for each in values]
        remedy = proposal(value, known, what="There are")
        raise InvalidExperiment("measure.against", value, "no axis has this value", remedy)
    return axes[0]


def figures_of(file: SweepFile, labels: Sequence[str]) -> Figures:
    """Return the paper's figures by cell and measure; `labels`: those of the measures. Raises
    InvalidExperiment.

    The first row of the file's table has the heads. Below an axis, or `measure`, are its values.
    Any other head is a value itself, of an axis that has no column, and below it are figures.
    """
    axes: dict[str, Sequence[str]] = {
        **{axis: list(values) for axis, values in file.axes.items()},
        MEASURE: labels,
    }
    axes[file.ranked] = [*axes[file.ranked], *file.paper.best]
    only = {axis: values[0] for axis, values in axes.items() if len(values) == 1}
    heads, *rows = file.paper.figures or [[]]
    columns: list[tuple[str, str | None]] = []
    for text in map(str, heads):
        if text in axes:
            columns.append((text, None))
        else:
            columns.append((_axis_with(text, heads, axes), text))
    found: dict[tuple[tuple[str, ...], str], PaperFigure] = {}
    for number, row in enumerate(rows, 1):
        if len(row) > len(heads):
            raise InvalidExperiment(
                f"{FIGURES}.{number}", row[len(heads)], "no column", "Give each figure a head."
            )
        pairs = list(zip(columns, row, strict=False))
        keys = only | {axis: value for (axis, head), value in pairs if head is None}
        for axis, value in keys.items():
            if value not in axes[axis]:
                remedy = proposal(str(value), axes[axis], what="There are")
                raise InvalidExperiment(
                    f"{FIGURES}.{number}", value, f"no value of {axis!r}", remedy
                )
        for (axis, head), value in (
            (column, value) for column, value in pairs if column[1] and value != ""
        ):
            whole = {**keys, axis: head}
            at = f"{FIGURES}.{number}.{head}"
            if absent := [each for each in axes if each not in whole]:
                remedy = f"Add a column {absent[0]!r}."
                raise InvalidExperiment(at, value, f"it has no value of {absent[0]!r}", remedy)
            place = tuple(str(whole[each]) for each in file.axes), str(whole[MEASURE])
            if place in found:
                raise InvalidExperiment(at, value, "this cell has a figure already", "Remove one.")
            found[place] = _figure(at, value)
    return found


def _axis_with(head: str, heads: Sequence[str], axes: Mapping[str, Sequence[str]]) -> str:
    """Return the only axis without a column that has a value."""
    left = {axis: values for axis, values in axes.items() if axis not in heads}
    having = [axis for axis, values in left.items() if head in values]
    if len(having) != 1:
        known = [*axes, *(value for values in left.values() for value in values)]
        problem = "several axes have this value" if having else "no axis, and no value of one"
        if having:
            remedy = f"Add a column {having[0]!r}."
        else:
            remedy = proposal(head, known, what="There are")
        raise InvalidExperiment(FIGURES, head, problem, remedy)
    return having[0]


def _figure(key: str, value: Any) -> PaperFigure:
    numbers = [value.get("from"), value.get("to")] if isinstance(value, Mapping) else value
    numbers = numbers if isinstance(numbers, list) else [numbers]
    if all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers):
        match value, numbers:
            case Mapping(), [low, high] if low <= high:
                return PaperFigure(low, high)
            case list(), [mean, deviation] if deviation >= 0:
                return PaperFigure(mean, mean, deviation)
            case int() | float() | list(), [mean]:
                return PaperFigure(mean, mean)
    remedy = 'Write a number, [mean, deviation], { from = ..., to = ... }, or "" for none.'
    raise InvalidExperiment(key, value, "no figure", remedy)


def _label(measure: Measure, *, several: bool) -> str:
    """Return a measure's label: its own, or one made from its keys."""
    names = {
        "accuracy": "accuracy",
        "rounds": "global rounds",
        "seconds": "time",
        "path_steps": "path",
    }
    of = {
        "samples": "",
        "devices": ", mean of devices",
        "worst": ", worst devices",
        "spread": ", spread",
    }
    of |= {
        "honest": ", honest devices",
        "honest_worst": ", worst honest devices",
        "attack": ", attack success",
    }
    text = measure.label or names.get(measure.name, measure.name)
    if several:
        text = f"{measure.label} round {measure.round}".strip()
    elif not measure.label:
        if measure.round:
            text = f"round {measure.round}"
        elif measure.best:
            text = f"best {text}"
        text += of[measure.of]
        text += ", personalised" if measure.personalised else ""
        text += f" to {100 * measure.target:g} %" if measure.target is not None else ""
        text += f", {measure.tier}" if measure.tier else ""
        text += f" {measure.direction}" if measure.direction else ""
    if measure.against and not measure.label:
        text += ", speed-up" if measure.relation == "speed_up" else ", Δ"
    return text


def _name(stem: str) -> str:
    """Return the name of a sweep's experiments: that of its file."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", stem).lstrip("_.-")[:64] or "sweep"
