"""The files of data sets: found, or named with the command that fetches them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedstrata.common.errors import InvalidExperiment


def find(root: Path, candidates: Sequence[Sequence[Path]], *, fetch: str) -> list[Path]:
    """Return the first existing path of each group. Raises InvalidExperiment naming all groups
    without one.
    """
    found = [next((path for path in group if path.is_file()), None) for group in candidates]
    lacking = [group for group, path in zip(candidates, found, strict=True) if path is None]
    if lacking:
        names = ", ".join(" or ".join(str(path.absolute()) for path in group) for group in lacking)
        raise missing(root, names, fetch=fetch)
    return [path for path in found if path is not None]


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
