"""CSV files that users write: a header, then rows of as many cells. Data sets and traces are read
by the same reader.

The separator is that of comma, semicolon and tab which the header has most often outside quotes.
Files are in UTF-8, or in UTF-16 with a byte order mark, as spreadsheets write them. Blank lines,
and spaces around cells, do not count.
"""

from __future__ import annotations

import codecs
import csv
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self, TextIO

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.text import counted

if TYPE_CHECKING:
    from _csv import Reader

SEPARATORS: Final = ",;\t"
# in lower case
MISSING: Final = frozenset({"", "na", "n/a", "#n/a", "<na>", "nan", "-nan", "null", "none", "?"})
FLOAT32_MOST: Final = (2 - 2.0**-23) * 2.0**127
_HEADER_MOST: Final = 1 << 17  # characters; csv's own limit of one cell
_QUOTED: Final = re.compile(r'"[^"]*("|$)')
_DECIMAL_COMMA: Final = re.compile(r"[+-]?\d*,\d+")


class CsvTable:
    """A table that is read row by row: `header`, and `line`, the number of the line in which the
    last row begins.

    `key` of the experiment stands in the errors. All methods raise InvalidExperiment, and OSError
    as files do.
    """

    def __init__(self, key: str, path: Path, file: TextIO) -> None:
        self.key = key
        self.path = path
        self.line = 1
        unquoted = _QUOTED.sub("", file.read(_HEADER_MOST)).lstrip(" \r\n")
        bare, *_ = re.split(r"[\r\n]", unquoted, maxsplit=1)
        file.seek(0)
        self._separator = max(SEPARATORS, key=bare.count)
        self._lines: Reader = csv.reader(
            file, delimiter=self._separator, skipinitialspace=True, strict=True
        )
        self.header = [name.strip() for name in next(self._rows(), [])]
        if not self.header or all(number_in(name) is not None for name in self.header):
            raise self.wrong("has no header", "Begin it with a line of the columns' names.")
        for place, name in enumerate(self.header):
            problem = ""
            if not name:
                problem = f"has a column without a name, number {place + 1}"
            elif name in self.header[:place]:
                problem = f"has columns with the same name, {name!r}"
            if problem:
                raise self.wrong(problem, "Name each column once.")

    @classmethod
    @contextmanager
    def open(cls, key: str, path: Path) -> Iterator[Self]:
        """Open a file, read its header, and close it after the `with` block."""
        with path.open("rb") as file:
            wide = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        encoding = "utf-16" if wide else "utf-8-sig"
        with path.open(encoding=encoding, newline="") as text:
            try:
                yield cls(key, path, text)
            except UnicodeDecodeError as error:
                where = "" if wide else f" in line {_first_undecodable(path)}"
                problem = f"is no CSV file in UTF-8 (byte 0x{error.object[error.start]:02x}{where})"
                raise InvalidExperiment(key, str(path), problem, "Save it as UTF-8.") from None

    def __iter__(self) -> Iterator[list[str]]:
        """Yield the remaining rows that are not blank, each with a cell for every column."""
        width = len(self.header)
        for row in self._rows():
            if len(row) != width:
                remedy = "Correct that line."
                if self._separator == ",":
                    remedy = "Correct that line; decimals have a point."
                cells = f"has {counted(len(row), 'cells')} in line {self.line}"
                raise self.wrong(f"{cells}, and {counted(width, 'columns')}", remedy)
            yield row

    def _rows(self) -> Iterator[list[str]]:
        while True:
            self.line = self._lines.line_num + 1
            try:
                row = next(self._lines)
            except StopIteration:
                return
            except csv.Error as error:
                problem = f"is no CSV file: {error}, in line {self.line}"
                raise self.wrong(problem, "Correct that line.") from None
            if len(row) > 1 or any(cell.strip() for cell in row):
                yield row

    def places(self, names: Sequence[str]) -> list[int]:
        """Return the places of columns in the rows."""
        for name in names:
            if name not in self.header:
                remedy = f"Write the first line {','.join(names)}."
                raise self.wrong(f"has no column {name}", remedy)
        return [self.header.index(name) for name in names]

    def number(self, row: Sequence[str], place: int, *, remedy: str = "Correct it.") -> float:
        """Return the number in a cell, finite also as float32."""
        cell = row[place]
        found = number_in(cell)
        if found is not None and abs(found) <= FLOAT32_MOST:
            return found
        at = f"line {self.line}, column {self.header[place]!r}"
        problem = f"has no number in {at}: {cell.strip()[:40]!r}"
        if found is not None or _is_infinite(cell):
            problem += " is not finite in float32"
        if _DECIMAL_COMMA.fullmatch(cell.strip()):
            remedy = "Write decimals with a point, and no other commas."
        raise self.wrong(problem, remedy)

    def wrong(self, problem: str, remedy: str) -> InvalidExperiment:
        """Return the error for this file."""
        return InvalidExperiment(self.key, str(self.path), problem, remedy)


def number_in(cell: str) -> float | None:
    """Return the finite number that a cell has, None for anything else."""
    try:
        found = float(cell)
    except ValueError:
        return None
    if math.isfinite(found) and "_" not in cell:
        return found
    return None


def _is_infinite(cell: str) -> bool:
    try:
        return math.isinf(float(cell))
    except ValueError:
        return False


def _first_undecodable(path: Path) -> int:
    """Return the number of the first line that is not UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 0  # the file was replaced meanwhile
