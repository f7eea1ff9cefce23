"""Tables that fit a width: constant columns are said once above, the others stand in sections below
one another.

Widths are in letters, or in any unit that a function measures. Heads and texts are broken at
blanks, numbers never.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

Measure = Callable[[str], float]
TEXT_LEAST: Final = 16  # letters to which a text is broken at most
# of the width, to which texts are broken so that one section suffices
SHARES: Final = (1.0, 0.7, 0.5, 0.3)


@dataclass(frozen=True, slots=True)
class TableSection:
    """Some columns of a table: their places, the lines of each head, and those of each cell, row by
    row.
    """

    places: Sequence[int]
    heads: Sequence[Sequence[str]]
    rows: Sequence[Sequence[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Width:
    """The width that a table may have.

    gap: between two columns    measure: of a text
    """

    most: float
    gap: float = 2.0
    measure: Measure = len

    def fits(self, section: TableSection) -> bool:
        """Return whether a section is no wider."""
        every = [section.heads, *section.rows]
        columns = zip(*every, strict=True)
        wide = 0.0
        for column in columns:
            wide += self.gap + max(self.measure(line) for cell in column for line in cell)
        return wide - self.gap <= self.most


@dataclass(frozen=True, slots=True)
class Layout:
    """A table that fits: texts that stand above it, as they are true of all rows, and the other
    columns.
    """

    above: Sequence[str]
    sections: Sequence[TableSection]


def layout_of(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    texts: Sequence[bool],
    *,
    keys: int,
    width: Width,
) -> Layout:
    """Return the layout of a table of shown cells.

    `texts`: whether a column has texts, which may be broken. `keys`: the first columns, which name
    a row, and stand in each section.
    """
    places = range(len(heads))
    lines = [_one_line_each(row) for row in rows]
    plain = TableSection(places, _one_line_each(heads), lines)
    if width.fits(plain):
        return Layout([], [plain])
    above: list[str] = []
    kept: list[int] = []
    for place in places:
        cells = {row[place] for row in rows}
        if place < keys or len(rows) < 2 or len(cells) > 1:
            kept.append(place)
        elif heads[place]:
            above.append(f"{heads[place]}: {rows[0][place]}")
    for share in SHARES:
        columns = {
            place: _broken(heads, rows, place, share, width, text=texts[place]) for place in kept
        }
        whole = _section(kept, columns)
        if width.fits(whole):
            return Layout(above, [whole])
    columns = {place: _broken(heads, rows, place, 0.5, width, text=texts[place]) for place in kept}
    names = [place for place in kept if place < keys]
    found: list[TableSection] = []
    chosen = list(names)
    for place in (place for place in kept if place >= keys):
        if len(chosen) > len(names) and not width.fits(_section([*chosen, place], columns)):
            found.append(_section(chosen, columns))
            chosen = list(names)
        chosen.append(place)
    if len(chosen) > len(names) or not found:
        found.append(_section(chosen, columns))
    return Layout(above, found)


def wrapped(text: str, most: float, measure: Measure = len) -> list[str]:
    """Return a text in lines that are broken at blanks; a word that is longer than `most` stays
    whole.
    """
    return joined(text.split(" "), " ", most, measure)


def joined(parts: Sequence[str], between: str, most: float, measure: Measure = len) -> list[str]:
    """Return parts in lines of at most a width, none of them broken."""
    lines: list[str] = []
    for part in parts:
        longer = f"{lines[-1]}{between}{part}" if lines else part
        if lines and measure(longer) <= most:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def _one_line_each(cells: Sequence[str]) -> list[list[str]]:
    return [[cell] for cell in cells]


# by place: the lines of the head, and of each cell
Columns = dict[int, tuple[list[str], list[list[str]]]]


def _broken(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    place: int,
    share: float,
    width: Width,
    *,
    text: bool,
) -> tuple[list[str], list[list[str]]]:
    """Return a column with a head no wider than its cells, if its words permit that, and broken
    texts.
    """
    cells = [[row[place]] for row in rows]
    measure = width.measure
    if text:
        bound = max(share * width.most, TEXT_LEAST * measure("n"))
        cells = [wrapped(line, bound, measure) for (line,) in cells]
    lines = [line for cell in cells for line in cell]
    widest = max([*map(measure, lines), *map(measure, heads[place].split(" "))])
    return wrapped(heads[place], widest, measure), cells


def _section(places: Sequence[int], columns: Columns) -> TableSection:
    cells = [columns[place][1] for place in places]
    return TableSection(
        list(places), [columns[place][0] for place in places], list(zip(*cells, strict=True))
    )
