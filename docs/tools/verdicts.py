"""Compare the runs of a sweep with its paper: which figures agree, and whether the order of the
methods holds.

    python -m docs.tools.verdicts papers/tempo-table1 --size reduced --kept docs/results

A figure agrees if it is within two deviations, over our seeds, of our mean. The order is compared
for each combination of the other axes: which value is best, and which ones are above or below the
baseline. Cells that are smaller than the file's are other experiments than the paper's: only their
order is compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedstrata.deploy.console.shipped import file_of
from fedstrata.deploy.console.tabular import Spread, show
from fedstrata.deploy.sweeps.grid import PaperFigure, SweepCell, label_of, load
from fedstrata.deploy.sweeps.measures import SweepResults, sign_of, unit_of
from fedstrata.deploy.sweeps.output import column_of
from fedstrata.deploy.sweeps.sweep_folder import SweepFolder
from fedstrata.deploy.sweeps.sweep_schema import FULL, Measure

DEVIATIONS: Final = 2.0  # over the seeds, within which a figure agrees


@dataclass(frozen=True, slots=True)
class Agreement:
    """Our value of a cell beside the paper's figure. `near`: within the deviations; None: one seed
    has none.
    """

    cell: SweepCell
    measure: Measure
    ours: Spread
    figure: PaperFigure
    near: bool | None


@dataclass(frozen=True, slots=True)
class Ranking:
    """The cells that differ in the ranked axis alone, those of which both we and the paper have a
    value of a measure.

    By value of the axis. `where`: the values of the other axes.
    """

    where: str
    measure: Measure
    ours: dict[str, Spread]
    papers: dict[str, PaperFigure]

    @property
    def sign(self) -> float:
        """1 if a larger value is the better one, -1 if a smaller one is: a speed-up is of costs."""
        return 1.0 if self.measure.relation == "speed_up" else sign_of(self.measure)

    @property
    def best(self) -> tuple[str, str]:
        """The best value of the axis, ours and the paper's."""
        return max(self.ours, key=lambda value: self.sign * self.ours[value].mean), max(
            self.papers, key=lambda value: self.sign * self.papers[value].mean
        )

    def contradictions(self, baseline: str) -> Iterator[Contradiction]:
        """Yield what contradicts the paper's order: another best, and each value on the other side
        of the baseline.
        """
        mine, theirs = self.best
        if self.sign * (self.ours[mine].mean - self.ours[theirs].mean) > 0:
            yield Contradiction(self, mine, theirs)
        for value in self.ours if baseline in self.ours else ():
            ours, papers = (
                self.sign * (each[value].mean - each[baseline].mean)
                for each in (self.ours, self.papers)
            )
            if ours * papers < 0:
                yield Contradiction(self, value, baseline, above=papers > 0)


@dataclass(frozen=True, slots=True)
class Contradiction:
    """In a ranking `value` is better than the paper's best, `other`; or on the other side of the
    baseline, `other`.

    `above`: the paper has it above the baseline; None: `value` is the best.
    """

    ranking: Ranking
    value: str
    other: str
    above: bool | None = None

    @property
    def inside(self) -> bool:
        """Whether the two differ by no more than the larger one of their deviations."""
        one, other = (self.ranking.ours[value] for value in (self.value, self.other))
        deviations = [spread.deviation for spread in (one, other) if spread.deviation is not None]
        return bool(deviations) and abs(one.mean - other.mean) <= max(deviations)


def agreements(results: SweepResults) -> Iterator[Agreement]:
    """Yield our values beside the paper's figures."""
    for measure in results.compared:
        for cell in results.grid.rows:
            ours, figure = results.spread(cell, measure), results.figure(cell, measure)
            if ours is not None and figure is not None:
                near = None
                if ours.deviation is not None:
                    near = abs(figure.apart(ours.mean)) <= DEVIATIONS * ours.deviation
                yield Agreement(cell, measure, ours, figure, near)


def rankings(results: SweepResults) -> list[Ranking]:
    """Return all rankings with two values or more."""
    axis, found = results.grid.file.ranked, dict[tuple[str, str], Ranking]()
    for measure in results.ranked:
        for cell in results.grid.rows:
            ours, figure = results.spread(cell, measure), results.figure(cell, measure)
            if ours is not None and figure is not None:
                rest = label_of(value for key, value in cell.values.items() if key != axis)
                ranking = found.setdefault((rest, measure.label), Ranking(rest, measure, {}, {}))
                ranking.ours[cell.values[axis]] = ours
                ranking.papers[cell.values[axis]] = figure
    return [ranking for ranking in found.values() if len(ranking.ours) > 1]


def agreement(results: SweepResults) -> Iterator[str]:
    """Yield how many figures are within the deviations, and a line for each that the tables do not
    show.
    """
    paper, found = results.grid.file.paper.label, list(agreements(results))
    if known := [each.near for each in found if each.near is not None]:
        yield f"{sum(known)} of {len(known)} figures ({paper}) are within two deviations of ours"
    near = {
        None: "no verdict of one seed",
        True: "within two deviations",
        False: "not within two deviations",
    }
    for each in found:
        if not each.measure.shown:
            ours = _shown(each.ours, each.measure)
            yield (
                f"{each.cell.label}, {each.measure.label}: {ours}; {paper} {each.figure.text}: "
                f"{near[each.near]}"
            )


def order(results: SweepResults) -> Iterator[str]:
    """Yield whether the paper's order holds, and each contradiction."""
    checked = rankings(results)
    if not checked:
        return
    file = results.grid.file
    wrong = [found for ranking in checked for found in ranking.contradictions(file.baseline)]
    against = f", and what is above {file.baseline} and below it" if file.baseline else ""
    inside = sum(each.inside for each in wrong)
    small = f" ({inside} within a deviation)" if inside else ""
    verdict = "holds" if not wrong else f"does not hold, {len(wrong)} contradictions{small}"
    count = f"{len(checked)} comparisons" if len(checked) > 1 else "one comparison"
    yield f"the order of {file.paper.label} in {count} (the best{against}) {verdict}"
    yield from (_contradiction(results, each) for each in wrong)


def _contradiction(results: SweepResults, found: Contradiction) -> str:
    paper, ranking = results.grid.file.paper.label, found.ranking
    parts = [
        part
        for part in (ranking.where, ranking.measure.label if len(results.ranked) > 1 else "")
        if part
    ]
    at = f"contradicts the order: {f'{label_of(parts)}: ' if parts else ''}"
    value, other = (
        _shown(ranking.ours[each], ranking.measure) for each in (found.value, found.other)
    )
    inside = ", within a deviation" if found.inside else ""
    if found.above is None:
        both = f"{found.value} {value} and {found.other} {other}"
        return f"{at}the best is {found.value}, {paper}: {found.other}; here {both}{inside}"
    side = "above" if found.above else "below"
    text = f"{found.value} is not {side} {found.other}, as {paper} has it"
    return f"{at}{text}; here {value} and {found.other} {other}{inside}"


def _shown(spread: Spread, measure: Measure) -> str:
    text = show(spread, column_of(measure).digits)
    return f"{text} {unit_of(measure)}".strip()


def main() -> None:
    """Print the verdicts on the finished runs of a sweep."""
    options = argparse.ArgumentParser()
    options.add_argument("file", type=Path)
    options.add_argument("--size", choices=("small", "reduced", FULL), default=FULL)
    options.add_argument("--runs", type=Path, default=Path("runs"))
    options.add_argument("--kept", type=Path, default=Path("kept"))
    chosen = options.parse_args()
    grid = load(file_of(chosen.file), size=chosen.size)
    folder = SweepFolder(chosen.runs / grid.folder, kept=chosen.kept / grid.folder)
    results = SweepResults(grid, folder.finished(grid))
    for line in (*agreement(results), *order(results)):
        print(line)


if __name__ == "__main__":
    main()
