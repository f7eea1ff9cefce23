"""A table in a CSV file, `NAME.csv`: a header, then a row for each sample, numbers but for classes and users.

The separator is a comma, or if the header has none a semicolon or a tab. Columns that are no target, no user and not
ignored are features, float32. Empty cells, NA, nan, null and none are missing values.
"""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from common.errors import InvalidExperiment
from common.experiment.data import Data
from common.experiment.score import NUMBERS
from common.experiment.tables import proposal
from common.learning.readers.arrays import parts_of
from common.learning.readers.parts import MOST_BYTES, Parts
from common.learning.readers.table_rows import rows_to_test

FILE_BYTES: Final = MOST_BYTES // 4  # of the file: a cell of two bytes takes eight in memory
ENCODE: Final = "Encode it as numbers, or list the column in data.ignored_columns."
MISSING: Final = frozenset({"", "na", "n/a", "nan", "null", "none"})


@dataclass(slots=True)
class _Rows:
    """The cells of a file: features and numbers as float64, one row after another; classes and users as text."""

    features: array[float] = field(default_factory=lambda: array("d"))
    numbers: array[float] = field(default_factory=lambda: array("d"))
    classes: list[str] = field(default_factory=list)
    users: list[str] = field(default_factory=list)
    count: int = 0


def read_csv(data: Data, root: Path, *, test: bool) -> Parts:
    """Read a table; of a private one all rows are for training, or `test`. Raises InvalidExperiment."""
    path = root / data.dataset

    def refuse(problem: str, remedy: str) -> NoReturn:
        raise InvalidExperiment("data.dataset", str(path), problem, remedy)

    names, rows = _read(data, path, None)
    tests = _read(data, root / data.test_file, names)[1] if data.test_file and not data.private else None
    known = _classes(data, [rows] if tests is None else [rows, tests], path)
    x, y, user = _arrays(data, rows, known, len(names))
    if data.private:
        mine, none = (x, y), (None, None)
        return parts_of(data, (*(none if test else mine), None), mine if test else none, refuse=refuse)
    if tests is None:
        picked = rows_to_test(rows.count, data.test_share, refuse=refuse)
        train, others = (x[~picked], y[~picked], None if user is None else user[~picked]), (x[picked], y[picked])
    else:
        train, others = (x, y, user), _arrays(data, tests, known, len(names))[:2]
    if data.standardise:
        mean, deviation = train[0].mean(0), train[0].std(0)
        scale = np.where(deviation > 0, deviation, 1.0)
        train, others = ((train[0] - mean) / scale, *train[1:]), ((others[0] - mean) / scale, others[1])
    return parts_of(data, train, others, refuse=refuse, classes=len(known))


def _arrays(data: Data, rows: _Rows, known: Sequence[str], width: int) -> tuple[Any, Any, Any]:
    """Return features float64 [N, F], targets float64 [N, T] or int64 [N], and users, None without a column."""
    x = np.array(rows.features, np.float64).reshape(rows.count, width)
    users = np.array(rows.users) if data.user_column is not None else None
    if data.targets == NUMBERS:
        return x, np.array(rows.numbers, np.float64).reshape(rows.count, -1) / data.target_scale, users
    places = {name: place for place, name in enumerate(known)}
    return x, np.array([places[name] for name in rows.classes], np.int64), users


def _classes(data: Data, tables: Sequence[_Rows], path: Path) -> list[str]:
    """Return the classes' names in the order of their numbers: listed ones, 0 to n - 1, or those that occur, sorted."""
    if data.targets == NUMBERS:
        return []
    found = sorted({name for rows in tables for name in rows.classes}, key=_order)
    if data.classes is None:
        return found
    listed = data.classes if isinstance(data.classes, list) else [str(place) for place in range(data.classes)]
    if unknown := [name for name in found if name not in listed]:
        problem = f"{path} also has {', '.join(map(repr, unknown[:5]))} in column {data.target_column!r}"
        raise InvalidExperiment("data.classes", data.classes, problem, "List all classes, or correct the file.")
    return list(listed)


def _order(name: str) -> tuple[float, str]:
    """Return the place of a class among others: numbers by value, then texts."""
    number = _number(name)
    return (math.inf if number is None else number, name)


def _read(data: Data, path: Path, wanted: Sequence[str] | None) -> tuple[list[str], _Rows]:
    """Return the features' names and the cells of a file, whose features should be `wanted`, if given."""
    try:
        if path.stat().st_size > FILE_BYTES:
            raise _wrong(path, f"has more than {FILE_BYTES >> 30} GiB", "Use a part of it.")
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            separator = next((each for each in (",", ";", "\t") if each in first), ",")
            lines = csv.reader(file, delimiter=separator, strict=True)
            return _cells(data, path, lines, wanted)
    except FileNotFoundError:
        raise InvalidExperiment(
            "data.root", str(path.parent), f"not found: {path.absolute()}", "Put it there."
        ) from None
    except OSError as error:
        raise InvalidExperiment("data.root", str(path), error.strerror or str(error), "Check the file.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise _wrong(path, f"is no CSV file in UTF-8 ({error})", "Save it again.") from None


def _cells(data: Data, path: Path, lines: Any, wanted: Sequence[str] | None) -> tuple[list[str], _Rows]:
    header = [name.strip() for name in next(lines, [])]
    features = _features(data, path, header)
    if wanted is not None and features != list(wanted):
        problem = (
            f"has other features than {data.dataset}: {', '.join(sorted({*features} ^ {*wanted})) or 'their order'}"
        )
        raise _wrong(path, problem, "Give both files the same columns.")
    target = data.target_column
    targets = [header.index(name) for name in (target if isinstance(target, list) else [str(target)])]
    places = [header.index(name) for name in features]
    user = None if data.user_column is None else header.index(data.user_column)
    needed = [*places, *targets, *([] if user is None else [user])]
    rows = _Rows()
    for line in _full(lines, path, len(header)):
        absent = next((place for place in needed if line[place].strip().lower() in MISSING), None)
        if absent is not None and data.missing == "drop":
            continue
        if absent is not None:
            problem = f"has no value in line {lines.line_num}, column {header[absent]!r}"
            raise _wrong(path, problem, "Fill it in, or set data.missing = 'drop' to leave out such rows.")

        def number(place: int, remedy: str, line: list[str] = line) -> float:
            found = _number(line[place])
            if found is None:
                problem = f"has no number in line {lines.line_num}, column {header[place]!r}: {line[place][:40]!r}"
                raise _wrong(path, problem, remedy)
            return found

        rows.features.extend(number(place, ENCODE) for place in places)
        if data.targets == NUMBERS:
            rows.numbers.extend(number(place, "Correct it, or set data.targets = 'classes'.") for place in targets)
        else:
            rows.classes.append(_class(line[targets[0]]))
        if user is not None:
            rows.users.append(line[user].strip())
        rows.count += 1
    return features, rows


def _features(data: Data, path: Path, header: Sequence[str]) -> list[str]:
    """Return the features' names, having checked the header."""
    if not header or all(_number(name) is not None for name in header):
        raise _wrong(path, "has no header", "Begin it with a line of the columns' names.")
    if len(set(header)) < len(header) or "" in header:
        raise _wrong(path, "has columns without a name, or with the same", "Name each column once.")
    target = data.target_column
    targets = target if isinstance(target, list) else [str(target)]
    named = {"target_column": targets, "user_column": [data.user_column] if data.user_column else []}
    named["ignored_columns"] = data.ignored_columns
    for key, columns in named.items():
        for column in (each for each in columns if each not in header):
            remedy = proposal(column, header, what="There are")
            raise InvalidExperiment(f"data.{key}", column, f"{path} has no such column", remedy)
    others = {column for columns in named.values() for column in columns}
    features = [name for name in header if name not in others]
    if not features:
        raise _wrong(path, "has no column that is a feature", "Ignore fewer.")
    return features


def _full(lines: Any, path: Path, width: int) -> Iterator[list[str]]:
    """Yield the rows that are not empty. Raises InvalidExperiment for one of another length."""
    for line in lines:
        if line and len(line) != width:
            problem = f"has {len(line)} cells in line {lines.line_num}, and {width} columns"
            raise _wrong(path, problem, "Correct that line.")
        if line:
            yield line


def _class(cell: str) -> str:
    """Return the name of a class: a whole number without a point, else the text."""
    number, text = _number(cell), cell.strip()
    return str(int(number)) if number is not None and number.is_integer() and abs(number) < 1e15 else text


def _number(cell: str) -> float | None:
    """Return a finite number, None for anything else."""
    try:
        found = float(cell)
    except ValueError:
        return None
    return found if math.isfinite(found) and "_" not in cell else None


def _wrong(path: Path, problem: str, remedy: str) -> InvalidExperiment:
    return InvalidExperiment("data.dataset", str(path), problem, remedy)
