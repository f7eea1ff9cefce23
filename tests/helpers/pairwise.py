"""Rows of a table in which each two values of different columns occur together."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Final, TypeAlias

Row: TypeAlias = Mapping[str, str]
TRIED: Final = 12  # rows for each one that is taken


def pairwise(columns: Mapping[str, Sequence[str]], fits: Callable[[Row], bool]) -> list[Row]:
    """Return rows that have each pair of values that fit, always the same ones.

    They are drawn, each from a pair that none before it has: of some that fit, the one with most
    such pairs.
    """
    draw = random.Random(1)
    left = [
        {one: mine, other: its}.items()
        for one, other in combinations(columns, 2)
        for mine, its in product(columns[one], columns[other])
    ]
    rows: list[Row] = []
    while left:
        found = []
        for _ in range(100 * TRIED):
            row = {name: draw.choice(values) for name, values in columns.items()} | dict(left[0])
            if fits(row):
                found.append(row)
            if len(found) == TRIED:
                break
        if not found:
            left.pop(0)  # it does not fit with anything
            continue
        rows.append(max(found, key=lambda row: sum(pair <= row.items() for pair in left)))
        left = [pair for pair in left if not pair <= rows[-1].items()]
    return rows
