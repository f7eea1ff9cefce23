"""Tables, written as aligned text, CSV or LaTeX (booktabs).

All but CSV round numbers; CSV has them in full.
"""

from __future__ import annotations

import csv
import io
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import mean, stdev
from typing import Any, Final, TypeAlias, TypeVar

from fedstrata.common.text import escaped
from fedstrata.deploy.console.table_layout import (
    Layout,
    TableSection,
    Width,
    joined,
    layout_of,
    wrapped,
)

THIN: Final = "\u202f"  # narrow no-break space between thousands
COLUMN_PT: Final = 245.0  # of LaTeX: a column of IEEE's and ACM's styles, and some room
_BLANKS: Final = str.maketrans("\t\r\n", "   ")
_POINTS: Final = dict.fromkeys("ijlt.,:;'()|f[] ", 3.1) | dict.fromkeys("mMWw%±", 8.2) | {THIN: 1.5}
_UPPER_PT: Final = 6.4
_LOWER_PT: Final = 4.5
_LATEX: Final = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "°": r"\textdegree{}",
    THIN: r"\,",
    "\N{NO-BREAK SPACE}": "~",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean and its sample standard deviation; None for a single value."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return the mean and the standard deviation (n - 1) of the values, or None if there are
        none.
        """
        if not values:
            return None
        deviation = stdev(values) if len(values) > 1 else None
        return cls(mean(values), deviation)

    def over(self, divisor: float) -> Spread:
        """Return it in a unit that is `divisor` times as large."""
        deviation = None if self.deviation is None else self.deviation / divisor
        return Spread(self.mean / divisor, deviation)


def plain(spread: Spread | None) -> dict[str, float | None] | None:
    """Return a mean and its deviation as JSON has them."""
    if spread is None:
        return None
    return {"mean": spread.mean, "deviation": spread.deviation}


_T = TypeVar("_T")
Cell: TypeAlias = str | int | float | Spread | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its title, its unit, and the number of decimals of a float."""

    name: str
    unit: str = ""
    digits: int = 1
    text: bool = False

    @property
    def head(self) -> str:
        """The name with its unit."""
        if self.unit:
            return f"{self.name}, {self.unit}"
        return self.name


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under columns. `name` is used for files, `title` for display.

    `keys`: the number of the first columns, which name a row: where a table has several sections,
    each has them.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    keys: int = 1

    @classmethod
    def of(
        cls,
        name: str,
        title: str,
        columns: Sequence[tuple[Column, Callable[[_T], Cell]]],
        items: Iterable[_T],
        *,
        keys: int = 1,
    ) -> Table:
        """Return a table with a row for each item. Each column comes with its cell of an item."""
        rows = []
        for item in items:
            rows.append([cell(item) for _, cell in columns])
        return cls(name, title, [column for column, _ in columns], rows, keys=keys)

    @classmethod
    def of_keys(
        cls, name: str, title: str, heads: Mapping[str, Column], rows: Iterable[Mapping[str, Any]]
    ) -> Table:
        """Return a table of rows that have a cell by key, or none; others than `heads` are left
        out.
        """
        cells = [list(map(row.get, heads)) for row in rows]
        return cls(name, title, list(heads.values()), cells)

    def aligned(self, most: float = inf) -> str:
        """Return lines of text of at most this many letters: text columns left-aligned, numbers
        right-aligned.
        """
        layout = self.layout(Width(most))
        above = [part for line in joined(layout.above, "; ", most) for part in wrapped(line, most)]
        parts = ["".join(f"{line}\n" for line in above)] if above else []
        return "\n".join([*parts, *(self._aligned(section) for section in layout.sections)])

    def on_terminal(self) -> str:
        """Return the same for standard output: as wide as the terminal, of any width elsewhere."""
        return self.aligned(terminal_width())

    def fits(self, width: Width) -> bool:
        """Return whether one section suffices."""
        return len(self.layout(width).sections) == 1

    def layout(self, width: Width) -> Layout:
        """Return what fits a width."""
        heads = [column.head for column in self.columns]
        texts = [column.text for column in self.columns]
        return layout_of(heads, list(self.shown()), texts, keys=self.keys, width=width)

    def _aligned(self, section: TableSection) -> str:
        widths = list(map(_widest, _columns(section)))
        sides = [self.columns[place].text for place in section.places]
        lines: list[str] = []
        for cells, below in ((section.heads, True), *((row, False) for row in section.rows)):
            tall = max(map(len, cells))
            for number in range(tall):
                line = ""
                for cell, width, text in zip(cells, widths, sides, strict=True):
                    at = number - (tall - len(cell)) * below
                    part = cell[at] if 0 <= at < len(cell) else ""
                    line += (part.ljust(width) if text else part.rjust(width)) + "  "
                lines.append(line.rstrip() + "\n")
        return "".join(lines)

    def csv(self) -> str:
        """Return CSV with unrounded numbers; a deviation has its own column after the mean."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        heads: list[str] = []
        columns: list[list[object]] = []
        for i, column in enumerate(self.columns):
            cells = [row[i] for row in self.rows]
            heads.append(_plain(column))
            columns.append(list(map(_first, cells)))
            if any(isinstance(cell, Spread) for cell in cells):
                heads.append(f"{_plain(column)}_sd")
                columns.append(list(map(_deviation, cells)))
        writer.writerow(heads)
        writer.writerows(zip(*columns, strict=True))
        return text.getvalue()

    def latex(self) -> str:
        """Return `tabular` environments with booktabs rules, none of them wider than a column of
        two.
        """
        layout = self.layout(LATEX)
        above = [tex("; ".join(layout.above)) + r"\par"] if layout.above else []
        parts = [
            *above,
            "\\par\\medskip\n".join(self._tabular(section) for section in layout.sections),
        ]
        return (
            "\n".join([r"{\footnotesize\setlength{\tabcolsep}{3pt}\noindent", *parts, "}"]) + "\n"
        )

    def _tabular(self, section: TableSection) -> str:
        sides = []
        heads = []
        for place, head in zip(section.places, section.heads, strict=True):
            side = "l" if self.columns[place].text else "r"
            sides.append(side)
            heads.append(_tex_lines(list(map(tex, head)), side, "b"))
        frame = [rf"\noindent\begin{{tabular}}{{@{{}}{''.join(sides)}@{{}}}}", r"\toprule"]
        rows = []
        for line, cells in zip(self.rows, section.rows, strict=True):
            shown = []
            for place, cell, side in zip(section.places, cells, sides, strict=True):
                texts = [_tex_cell(part, line[place]) for part in cell]
                shown.append(_tex_lines(texts, side, "t"))
            rows.append(" & ".join(shown) + r" \\")
        return "\n".join(
            [
                *frame,
                " & ".join(heads) + r" \\",
                r"\midrule",
                *rows,
                r"\bottomrule",
                r"\end{tabular}",
            ]
        )

    def shown(self) -> Iterator[list[str]]:
        """Yield the cells of each row as they are displayed."""
        for row in self.rows:
            yield [
                show(cell, column.digits) for cell, column in zip(row, self.columns, strict=True)
            ]


def terminal_width() -> float:
    """Return the columns of the terminal that is standard output, infinite if it is none."""
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return inf


def _widest(cells: Sequence[Sequence[str]]) -> int:
    return max(len(line) for cell in cells for line in cell)


def _columns(section: TableSection) -> list[Sequence[Sequence[str]]]:
    """Return the head and the cells of each column."""
    return list(zip(section.heads, *section.rows, strict=True))


def show(cell: Cell, digits: int = 1) -> str:
    """Return a cell as display text, with `digits` decimals for floats."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return clean(cell)
    if isinstance(cell, int):
        return f"{cell:,}".replace(",", THIN)
    if isinstance(cell, float):
        return f"{cell:,.{digits}f}".replace(",", THIN)
    shown = show(float(cell.mean), digits)
    if cell.deviation is None:
        return shown
    return f"{shown} ± {show(float(cell.deviation), digits)}"


def age(seconds: float) -> str:
    """Return a time that has passed, in its largest unit, such as 3 h."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


def size(count: float) -> str:
    """Return a number of bytes with a decimal unit, such as 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            if unit == "B":
                return f"{count:.0f} {unit}"
            return f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def clean(text: str) -> str:
    """Return text in one line, with control characters, surrogates and bidirectional marks
    escaped.
    """
    return escaped(text.translate(_BLANKS))


def tex(text: str) -> str:
    """Return text escaped for LaTeX."""
    return "".join(_LATEX.get(letter, letter) for letter in clean(text))


def points(text: str) -> float:
    """Return about the width of a text in LaTeX's \\footnotesize, 8 pt of Computer Modern, in
    points.
    """
    wide = 0.0
    for letter in text:
        usual = _UPPER_PT if letter.isupper() else _LOWER_PT
        wide += _POINTS.get(letter, usual)
    return wide


LATEX: Final = Width(COLUMN_PT, gap=6.0, measure=points)


def _tex_lines(lines: Sequence[str], side: str, place: str) -> str:
    """Return a cell of one or several lines."""
    if len(lines) == 1:
        return lines[0]
    inside = r" \\ ".join(lines)
    return rf"\begin{{tabular}}[{place}]{{@{{}}{side}@{{}}}}{inside}\end{{tabular}}"


def _tex_cell(shown: str, cell: Cell) -> str:
    if isinstance(cell, str):
        return tex(shown)
    if cell is None:
        return "--"
    number = shown.replace(THIN, r"\,").replace("±", r"\pm").replace("inf", r"\infty")
    return f"${number}$"


def _first(cell: Cell) -> object:
    """Return a cell of CSV, of a mean with a deviation the mean."""
    if isinstance(cell, Spread):
        return cell.mean
    if isinstance(cell, str):
        return clean(cell)
    return "" if cell is None else cell


def _deviation(cell: Cell) -> object:
    if isinstance(cell, Spread) and cell.deviation is not None:
        return cell.deviation
    return ""


def _plain(column: Column) -> str:
    unit = {"%": "percent"}.get(column.unit, column.unit)
    return "_".join(f"{column.name} {unit}".lower().replace("/", " per ").split())
