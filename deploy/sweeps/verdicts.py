"""Verdicts on a sweep's results: whether its figures and its order are the paper's, and what is still missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from common.experiment.links import LinkSettings
from deploy.console.tabular import Spread, show
from deploy.sweeps.grid import SweepCell, label_of
from deploy.sweeps.measuring import column_of, sign_of, unit_of
from deploy.sweeps.results import SweepResults
from deploy.sweeps.schema import Measure
from deploy.sweeps.tables import difference

DEVIATIONS: Final = 2.0  # over the seeds, within which a figure agrees
INSIDE: Final = " within a deviation"


@dataclass(frozen=True, slots=True)
class Ranking:
    """The cells that differ in the ranked axis alone, those of which both we and the paper have a value of a measure.

    `ours` and `papers`: means by value of the axis, of costs the negative ones: the larger the better.
    """

    where: str
    measure: Measure
    cells: Mapping[str, SweepCell]
    ours: Mapping[str, float]
    papers: Mapping[str, float]

    @property
    def best(self) -> tuple[str, str]:
        """The best value of the axis, ours and the paper's."""
        mine, theirs = (max(each, key=each.__getitem__) for each in (self.ours, self.papers))
        return mine, theirs


class Verdicts:
    """Comparison of a sweep's results with its paper, as lines of text."""

    def __init__(self, results: SweepResults) -> None:
        self._results = results
        self._file = results.grid.file
        self._paper = self._file.paper.label

    @cached_property
    def rankings(self) -> list[Ranking]:
        """All rankings with two cells or more."""
        results, axis = self._results, self._file.ranked
        found: dict[tuple[str, str], dict[str, SweepCell]] = {}
        for measure in results.ranked:
            for cell in results.grid.rows:
                if results.figure(cell, measure) is not None and results.spread(cell, measure) is not None:
                    rest = label_of(value for key, value in cell.values.items() if key != axis)
                    found.setdefault((rest, measure.label), {})[cell.values[axis]] = cell
        by_label = {measure.label: measure for measure in results.ranked}
        return [self._ranking(rest, by_label[label], cells) for (rest, label), cells in found.items() if len(cells) > 1]

    def agreement(self) -> list[str]:
        """Return how many figures are within the deviations, and a line for each that the tables do not show."""
        inside, known, lines = 0, 0, []
        for cell, measure in self._compared():
            ours = self._results.spread(cell, measure)
            figure = self._results.figure(cell, measure)
            if ours is None or figure is None:
                continue
            verdict = "no verdict of one seed"
            if ours.deviation is not None:
                near = abs(difference(self._results, cell, measure) or 0.0) <= DEVIATIONS * ours.deviation
                verdict = f"{'within' if near else 'not within'} two deviations"
                inside, known = inside + near, known + 1
            if not measure.shown:
                text = f"{cell.label}, {measure.label}: {_shown(ours, measure)}; {self._paper} {figure.text}: {verdict}"
                lines.append(text)
        if known:
            lines.insert(0, f"{inside} of {known} figures ({self._paper}) are within two deviations of ours")
        return lines

    def order(self) -> list[str]:
        """Return whether the paper's order holds, and each contradiction."""
        wrong = list(self.contradictions())
        checked = len(self.rankings)
        if not checked:
            return []
        baseline = self._file.baseline
        against = f", and what is above {baseline} and below it" if baseline else ""
        inside = sum(line.endswith(INSIDE) for line in wrong)
        small = f" ({inside}{INSIDE})" if inside else ""
        verdict = "holds" if not wrong else f"does not hold, {len(wrong)} contradictions{small}"
        count = f"{checked} comparisons" if checked > 1 else "one comparison"
        return [f"the order of {self._paper} in {count} (the best{against}) {verdict}", *wrong]

    def contradictions(self) -> Iterator[str]:
        """Yield a line for each ranking whose best is another one, and for each value on the other side of the base."""
        for ranking in self.rankings:
            parts = [part for part in (ranking.where, self._label(ranking.measure)) if part]
            at = f"contradicts the order: {f'{label_of(parts)}: ' if parts else ''}"
            mine, theirs = ranking.best
            if ranking.ours[mine] > ranking.ours[theirs] and mine != theirs:
                values = " and ".join(f"{value} {self._value(ranking, value)}" for value in (mine, theirs))
                inside = self._inside(ranking, mine, theirs)
                yield f"{at}the best is {mine}, {self._paper}: {theirs}; here {values}{inside}"
            base = self._file.baseline
            if base not in ranking.ours:
                continue
            for value in (each for each in ranking.ours if each != base):
                ours, papers = (each[value] - each[base] for each in (ranking.ours, ranking.papers))
                if ours * papers < 0:
                    side = "above" if papers > 0 else "below"
                    values = f"here {self._value(ranking, value)} and {base} {self._value(ranking, base)}"
                    inside = self._inside(ranking, value, base)
                    yield f"{at}{value} is not {side} {base}, as {self._paper} has it; {values}{inside}"

    def missing(self) -> list[str]:
        """Return a line on the cells whose runs are not all finished."""
        cells = self._results.grid.cells
        lacking = [cell for cell in cells if len(self._results.runs_of(cell)) < len(cell.experiments)]
        if not lacking:
            return []
        runs = len(self._results.grid.experiments)
        done = len(self._results.runs)
        return [f"partial: {done} of {runs} runs are finished; {len(lacking)} of {len(cells)} cells lack some"]

    def to_json(self) -> list[dict[str, Any]]:
        """Return the rankings: means by value of the ranked axis, and the best."""
        found = []
        for ranking in self.rankings:
            sign = sign_of(ranking.measure)
            ours, papers = ({value: sign * mean for value, mean in each.items()}
                            for each in (ranking.ours, ranking.papers))  # fmt: skip
            best, papers_best = ranking.best
            found.append(
                {
                    "where": ranking.where,
                    "measure": ranking.measure.label,
                    "ours": ours,
                    "paper": papers,
                    "best": best,
                    "paper_best": papers_best,
                }
            )
        return found

    def _compared(self) -> Iterator[tuple[SweepCell, Measure]]:
        for measure in self._results.compared:
            for cell in self._results.grid.rows:
                yield cell, measure

    def _ranking(self, where: str, measure: Measure, cells: Mapping[str, SweepCell]) -> Ranking:
        sign, ours, papers = sign_of(measure), {}, {}
        for value, cell in cells.items():
            mine, theirs = self._results.spread(cell, measure), self._results.figure(cell, measure)
            if mine is not None and theirs is not None:
                ours[value], papers[value] = sign * mine.mean, sign * theirs.mean
        return Ranking(where, measure, cells, ours, papers)

    def _value(self, ranking: Ranking, value: str) -> str:
        spread = self._results.spread(ranking.cells[value], ranking.measure)
        return "-" if spread is None else _shown(spread, ranking.measure)

    def _inside(self, ranking: Ranking, one: str, other: str) -> str:
        """Return whether the difference of two values is within the larger one of their deviations, as text."""
        spreads = (self._results.spread(ranking.cells[value], ranking.measure) for value in (one, other))
        deviations = [spread.deviation for spread in spreads if spread is not None and spread.deviation is not None]
        apart = abs(ranking.ours[one] - ranking.ours[other])
        return f",{INSIDE}" if deviations and apart <= max(deviations) else ""

    def _label(self, measure: Measure) -> str:
        return measure.label if len(self._results.ranked) > 1 else ""


def _shown(spread: Spread, measure: Measure) -> str:
    text = show(spread, column_of(measure).digits)
    return f"{text} {unit_of(measure)}".strip()


def conditions(results: SweepResults) -> list[str]:
    """Return a line on the machines and one on the links of the finished runs, which their seconds depend on."""
    runs = list(results.runs.values())
    if not runs:
        return []
    hosts = _distinct(f"{run.manifest.get('host', 'a host')}, {run.manifest.get('cpus')} cores" for run in runs)
    torch = _distinct(f"torch {(run.manifest.get('packages') or {}).get('torch')}" for run in runs)
    lines = [f"hardware: {'; '.join(hosts)}; {', '.join(torch)}"]
    profiles = _distinct(
        str(machine.get("profile"))
        for run in runs
        for machine in (run.manifest.get("hardware") or {}).values()
        if machine.get("profile")
    )
    if all(run.direct for run in runs):
        lines.append("links: none, the runs had no network: seconds are computing time, bytes those of the models")
        return lines
    if profiles:
        lines.append(f"emulated: {', '.join(profiles)}")
    links = _distinct(f"{tier.name}: {_link(tier.link)}" for run in runs for tier in run.experiment.tiers)
    enforced = _distinct(str((run.manifest.get("links") or {}).get("enforce")) for run in runs)
    lines.append(f"links: {'; '.join(links)}; enforced by: {', '.join(enforced)}")
    if any(run.simulated for run in runs):
        lines.append("seconds: simulated, of machines and links as in the runs' manifest.json")
    return lines


def _link(link: LinkSettings) -> str:
    rates = [f"{way} {rate:g} Mbit/s" for way, rate in (("up", link.up_mbit), ("down", link.down_mbit)) if rate]
    delay = [f"{link.delay_ms:g} ms"] if link.delay_ms else []
    return ", ".join([*rates, *delay]) or "unlimited"


def _distinct(texts: Iterator[str] | Sequence[str]) -> list[str]:
    return list(dict.fromkeys(texts))
