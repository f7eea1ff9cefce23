"""A paper's figures: the nested tables of [paper], by cell and measure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from common.errors import InvalidExperiment
from common.experiment.tables import proposal
from deploy.sweeps.schema import SweepFile

MEASURE: Final = ""  # in place of an axis: its values are the measures' labels; no axis has this name
FORMS: Final = "Write a number, [mean, deviation], or { from = ..., to = ... }."

Figures: TypeAlias = "Mapping[tuple[tuple[str, ...], str], PaperFigure]"  # by the axes' values in order, and measure


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
        return f"{self.mean:g}" if self.deviation is None else f"{self.mean:g} ± {self.deviation:g}"


def figures_of(file: SweepFile, labels: Sequence[str]) -> Figures:
    """Return the paper's figures by cell and measure; `labels`: those of the measures. Raises InvalidExperiment."""
    axes: dict[str, Sequence[str]] = {axis: list(values) for axis, values in file.axes.items()}
    axes[file.ranked] = [*axes[file.ranked], *file.paper.best]
    if len(labels) > 1:
        axes[MEASURE] = labels
    found: dict[tuple[tuple[str, ...], str], PaperFigure] = {}
    for path, named, figure in _leaves(file.paper.figures, ("paper", "figures"), axes, {}):
        whole = {axis: values[0] for axis, values in axes.items() if len(values) == 1} | named
        for axis in (axis for axis in axes if axis not in whole):
            problem = f"it names no value of {f'the axis {axis!r}' if axis else 'the measures'}"
            remedy = f"Use a key of it: {', '.join(axes[axis])}."
            raise InvalidExperiment(path, figure.text, problem, remedy)
        place = tuple(whole[axis] for axis in file.axes), whole.get(MEASURE, labels[0])
        if place in found:
            raise InvalidExperiment(path, figure.text, "this cell has a figure already", "Remove one.")
        found[place] = figure
    return found


def _leaves(
    tree: Mapping[str, Any], path: tuple[str, ...], axes: Mapping[str, Sequence[str]], named: Mapping[str, str]
) -> Iterator[tuple[str, dict[str, str], PaperFigure]]:
    """Yield each figure with its path of keys and the values that these name."""
    for key, value in tree.items():
        below, at = (*path, key), ".".join((*path, key))
        left = {axis: values for axis, values in axes.items() if axis not in named}
        readings = list(_readings(key, left))
        if len(readings) != 1:
            problem = "several readings" if readings else "no values of axes"
            known = [each for values in left.values() for each in values]
            remedy = "Nest the tables." if readings else proposal(key, known, what="There are")
            raise InvalidExperiment(".".join(path), key, problem, remedy)
        found = {**named, **readings[0]}
        if isinstance(value, Mapping) and not value.keys() <= {"from", "to"}:
            yield from _leaves(value, below, axes, found)
        else:
            yield at, found, _figure(at, value)


def _readings(key: str, axes: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Yield each way to read a key as values of different axes with commas between them."""
    for axis, values in axes.items():
        for value in values:
            if key == value:
                yield {axis: value}
            elif key.startswith(f"{value}, "):
                rest = {other: each for other, each in axes.items() if other != axis}
                for reading in _readings(key[len(value) + 2 :], rest):
                    yield {axis: value, **reading}


def _figure(path: str, value: Any) -> PaperFigure:
    numbers = [value[end] for end in ("from", "to") if end in value] if isinstance(value, Mapping) else value
    numbers = numbers if isinstance(numbers, list) else [numbers]
    if not all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in numbers):
        raise InvalidExperiment(path, value, "no figure", FORMS)
    match value, numbers:
        case Mapping(), [low, high] if low <= high:
            return PaperFigure(low, high)
        case list(), [mean, deviation] if deviation >= 0:
            return PaperFigure(mean, mean, deviation)
        case int() | float() | list(), [mean]:
            return PaperFigure(mean, mean)
    raise InvalidExperiment(path, value, "no figure", FORMS)
