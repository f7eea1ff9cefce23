"""Errors that no code expects: each is logged with its place, and ends only what raised it."""

from __future__ import annotations

import logging
from typing import Final

from common.errors import FedstrataError, RunFailed

UNEXPECTED: Final = "ended by an unexpected error"

log = logging.getLogger("fedstrata.lifecycle")


def as_known(error: BaseException, node: str) -> FedstrataError | None:
    """Return the first FedstrataError, see `first_error`; log any other error and return it as RunFailed.

    Return None for exceptions that are no errors, such as an interruption.
    """
    known = first_error(error)
    if known is None and isinstance(error, Exception):
        log.error("%s %s", node, UNEXPECTED, exc_info=error)
        inner: BaseException = error
        while isinstance(inner, BaseExceptionGroup):
            inner = inner.exceptions[0]
        known = RunFailed(f"unexpected {type(inner).__name__}: {inner}")
        known.__cause__ = error
    return known


def first_error(error: BaseException) -> FedstrataError | None:
    """Return the first FedstrataError in an exception or a group of them."""
    if isinstance(error, FedstrataError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := first_error(inner))), None)
    return None
