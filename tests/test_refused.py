"""What cannot be is refused by one line with its value and a remedy, and by its exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.refused import KINDS, Refusal, refusals

FOREIGN: Final = (
    "Errno",
    "Input should be",
    "Value error",
    "validation error",
    "Traceback",
    "^[",
    "Usage:",
    "string_",
)


@pytest.mark.parametrize("case", refusals(), ids=lambda case: case.given.rpartition("\n")[2][:99])
def test_it_is_refused_by_the_kept_line(case: Refusal, tmp_path: Path) -> None:
    found = KINDS[case.kind](case.given, tmp_path)
    assert case.agrees(found), f"\nfound: {found}\nkept:  {case.line}"
    assert not any(text in found for text in FOREIGN)
