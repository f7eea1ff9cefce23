"""Tables, written as aligned text, CSV, LaTeX (booktabs), Markdown or HTML.

All but CSV round numbers; CSV has them in full.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from statistics import mean, stdev
from typing import Final, TypeAlias

from common.text import escaped

DENSE, WIDE = 8, 13  # columns of a table beyond which it is printed in small letters, or across a page
NAME_MOST: Final = 32  # letters of a text without blanks that is not broken into lines
THIN: Final = "\u202f"  # narrow no-break space between thousands
_BLANKS: Final = str.maketrans("\t\r\n", "   ")
_LATEX: Final = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean and its sample standard deviation; None for a single value."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return the mean and the standard deviation (n - 1) of the values, or None if there are none."""
        if not values:
            return None
        return cls(mean(values), stdev(values) if len(values) > 1 else None)


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
        return f"{self.name}, {self.unit}" if self.unit else self.name


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under columns. `name` is used for files, `title` for display."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def aligned(self) -> str:
        """Return lines of text: text columns left-aligned, numbers right-aligned."""
        lines = [[column.head for column in self.columns], *self._shown(" ± ", "-")]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        return "".join(
            "  ".join(
                cell.ljust(width) if column.text else cell.rjust(width)
                for cell, width, column in zip(line, widths, self.columns, strict=True)
            ).rstrip()
            + "\n"
            for line in lines
        )

    def csv(self) -> str:
        """Return CSV with unrounded numbers; a deviation has its own column after the mean."""
        spread = [any(isinstance(row[i], Spread) for row in self.rows) for i in range(len(self.columns))]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        heads = [
            [_plain(column)] + [f"{_plain(column)}_sd"] * two for column, two in zip(self.columns, spread, strict=True)
        ]
        writer.writerow([head for pair in heads for head in pair])
        for row in self.rows:
            cells: list[object] = []
            for cell, two in zip(row, spread, strict=True):
                if isinstance(cell, Spread):
                    cells += [cell.mean, "" if cell.deviation is None else cell.deviation]
                else:
                    cells += ["" if cell is None else clean(cell) if isinstance(cell, str) else cell, *[""] * two]
            writer.writerow(cells)
        return text.getvalue()

    def latex(self) -> str:
        """Return a `tabular` environment with booktabs rules."""
        heads = " & ".join(tex(column.head) for column in self.columns)
        rows = (" & ".join(cells) + r" \\" for cells in self._shown(r" \pm ", "--", _tex_cell))
        frame = [rf"\begin{{tabular}}{{{''.join('l' if c.text else 'r' for c in self.columns)}}}", r"\toprule"]
        return "\n".join([*frame, heads + r" \\", r"\midrule", *rows, r"\bottomrule", r"\end{tabular}"]) + "\n"

    def markdown(self) -> str:
        """Return a table of Markdown."""
        lines = [[column.head for column in self.columns], *self._shown(" ± ", "-")]
        cells = [[clean(cell).replace("|", "\\|") for cell in line] for line in lines]
        rule = ["---" if column.text else "---:" for column in self.columns]
        return "".join(f"| {' | '.join(line)} |\n" for line in [cells[0], rule, *cells[1:]])

    def html(self, short: Mapping[str, str] | None = None) -> str:
        """Return a `table` element; the first cell of each row is its header.

        `short`: shorter texts for names of columns and for first cells.
        """
        names = short or {}
        columns = [replace(column, name=names.get(column.name, column.name)) for column in self.columns]
        heads = "".join(f'<th scope="col"{_side(column)}>{html(column.head)}</th>' for column in columns)
        lines = []
        for head, *others in self._shown(" ± ", "-"):
            cells = [names.get(head, head), *others]
            first, *rest = zip(cells, self.columns, strict=True)
            row = f'<th scope="row"{_side(first[1], first[0])}>{html(first[0])}</th>'
            row += "".join(f"<td{_side(column, cell)}>{html(cell)}</td>" for cell, column in rest)
            lines.append(f"<tr>{row}</tr>")
        body = "\n".join(lines)
        count = len(self.columns)
        kind = "scroll wide" if count > WIDE else "scroll dense" if count > DENSE else "scroll"
        return (
            f'<div class="{kind}" tabindex="0" role="region" aria-label="{html(self.title)}"><table>'
            f"<caption>{html(self.title)}</caption>\n<thead><tr>{heads}</tr></thead>\n"
            f"<tbody>\n{body}\n</tbody></table></div>"
        )

    def _shown(
        self, between: str, nothing: str, write: Callable[[str, Cell], str] = lambda shown, cell: shown
    ) -> Iterator[list[str]]:
        for row in self.rows:
            cells = zip(row, self.columns, strict=True)
            yield [write(show(cell, column.digits, between, nothing), cell) for cell, column in cells]


def show(cell: Cell, digits: int = 1, between: str = " ± ", nothing: str = "-") -> str:
    """Return a cell as display text, with `digits` decimals for floats."""
    if cell is None:
        return nothing
    if isinstance(cell, str):
        return clean(cell)
    if isinstance(cell, int):
        return f"{cell:,}".replace(",", THIN)
    if isinstance(cell, float):
        return f"{cell:,.{digits}f}".replace(",", THIN)
    shown = show(float(cell.mean), digits)
    return shown if cell.deviation is None else f"{shown}{between}{show(float(cell.deviation), digits)}"


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
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def html(text: str) -> str:
    """Return text that is safe in HTML, SVG and UTF-8: without markup, control characters or surrogates."""
    return escape(clean(text))


def clean(text: str) -> str:
    """Return text in one line, with control characters, surrogates and bidirectional marks escaped."""
    return escaped(text.translate(_BLANKS))


def tex(text: str) -> str:
    """Return text escaped for LaTeX."""
    return "".join(_LATEX.get(letter, letter) for letter in clean(text))


def _tex_cell(shown: str, cell: Cell) -> str:
    if isinstance(cell, str):
        return tex(shown)
    return shown if cell is None else f"${shown.replace(THIN, chr(92) + ',')}$"


def _plain(column: Column) -> str:
    unit = {"%": "percent"}.get(column.unit, column.unit)
    return "_".join(f"{column.name} {unit}".lower().replace("/", " per ").split())


def _side(column: Column, cell: str = "") -> str:
    if not column.text:
        return ""
    return ' class="text name"' if cell and " " not in cell and len(cell) <= NAME_MOST else ' class="text"'
