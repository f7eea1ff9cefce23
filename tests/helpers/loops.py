"""Tests that are coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Let a test run in an event loop of its own."""

    @wraps(test)
    def run(*args: P.args, **keywords: P.kwargs) -> None:
        asyncio.run(test(*args, **keywords))

    return run
