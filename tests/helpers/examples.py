"""How many examples Hypothesis draws: few in quick tests, more in `make test-slow`, and the few are among them."""

from __future__ import annotations

import os
from typing import Final

from hypothesis import settings

PROFILE: Final = os.environ.get("HYPOTHESIS_PROFILE", "quick")


def examples(count: int) -> settings:
    """Return settings with `count` examples; quick tests draw a quarter of them, or 20."""
    return settings(max_examples=count if PROFILE == "thorough" else min(count, max(20, count // 4)))
