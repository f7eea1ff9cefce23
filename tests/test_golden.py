"""What users see of runs is what is kept."""

from __future__ import annotations

from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path

import pytest

from tests.golden import VIEWS, text_of, views


@pytest.mark.parametrize(("name", "make"), [*views()], ids=[name for name, _ in views()])
def test_a_view_is_the_kept_one(name: str, make: Callable[[Path], str]) -> None:
    kept = (VIEWS / name).read_text().splitlines()
    found = text_of(make).splitlines()
    difference = "\n".join(unified_diff(kept, found, "kept", "now", n=1, lineterm=""))
    assert not difference, f"If it is right: python -m tests.golden\n{difference}"


def test_nothing_else_is_kept() -> None:
    assert {path.name for path in VIEWS.iterdir()} == {name for name, _ in views()}
