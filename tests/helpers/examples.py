"""How many examples Hypothesis draws, by HYPOTHESIS_PROFILE, and how many of many like cases are
quick tests.

`quick` (`make test`) draws 20, `more` (`make test-slow`) 40, `thorough` (`make test-all`) 200; the
few are among the many.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Final

import pytest
from hypothesis import settings

PROFILE: Final = os.environ.get("HYPOTHESIS_PROFILE", "quick")
DRAWN: Final = {"quick": 20, "more": 40, "thorough": 200}


def examples(count: int) -> settings:
    """Return settings with `count` examples in the thorough profile, else their share, and at least
    the profile's.
    """
    share = count * DRAWN[PROFILE] // DRAWN["thorough"]
    return settings(max_examples=min(count, max(DRAWN[PROFILE], share)))


def slow(cases: Iterable[Any], *, but: Iterable[Any]) -> list[Any]:
    """Return the cases of a parametrised test, marked slow `but` for those that show what is likely
    to break.
    """
    quick = list(but)
    assert quick
    return [
        case if case in quick else pytest.param(*_values(case), marks=pytest.mark.slow)
        for case in cases
    ]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
