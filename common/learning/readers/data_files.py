"""The files of data sets: found, or named with the command that fetches them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedstrata.common.errors import InvalidExperiment


def find(root: Path, candidates: Sequence[Sequence[Path]], *, fetch: str) -> list[Path]:
    """Return the first existing path of each group. Raises InvalidExperiment naming all groups
    without one.
    """
    found = []
    lacking = []
    for group in candidates:
        there = [path for path in group if path.is_file()]
        found += there[:1]
        if not there:
            lacking.append(" or ".join(str(path.absolute()) for path in group))
    if lacking:
        raise missing(root, ", ".join(lacking), fetch=fetch)
    return found


def missing(root: Path, names: str, *, fetch: str) -> InvalidExperiment:
    """Return the error for missing files; `fetch` is the command that fetches them."""
    return InvalidExperiment(
        "data.root", str(root), f"not found: {names}", f"To fetch them: {fetch}"
    )


def damaged(path: Path, problem: str) -> InvalidExperiment:
    """Return the error for a file with invalid content."""
    return InvalidExperiment(
        "data.root", str(path), f"this file {problem}", "Delete it and fetch it again."
    )
