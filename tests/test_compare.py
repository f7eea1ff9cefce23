"""Runs against a target: groups, means, deviations, speed-ups, refusals, and the forms of the
table.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.deploy.console.tabular import Column, Spread, Table, show


@given(values=st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=9))
def test_mean_and_deviation_against_a_plain_twin(values: list[float]) -> None:
    n = len(values)
    mean = sum(values) / n
    spread = Spread.of(values)
    assert spread is not None and spread.mean == pytest.approx(mean)
    if n == 1:
        assert spread.deviation is None
    else:
        variance = sum((value - mean) ** 2 for value in values) / (n - 1)
        assert spread.deviation == pytest.approx(variance**0.5, rel=1e-6, abs=1e-6 * mean)


def test_latex_and_text_escape_what_names_may_hold() -> None:
    found = Table(
        "t",
        "T",
        [Column("a_b", text=True), Column("n", "%")],
        [("50% & #1 {x} \\ ~^$ <\x00\n", 1234567)],
    )
    body = found.latex().splitlines()[5]
    assert not re.search(r"(?<!\\)[%#]|(?<!\\)&.*(?<!\\)&", body) and r"$1\,234\,567$" in body
    assert "\x00" not in found.latex() + found.aligned() + found.csv()
    assert (
        show(1234.567, 2) == "1\u202f234.57"
        and show(Spread(2, 1), 1) == "2.0 ± 1.0"
        and show(None) == "-"
    )
