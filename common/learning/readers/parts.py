"""The result of a reader, and the errors for missing or damaged files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common.errors import InvalidExperiment

Samples = npt.NDArray[np.uint8] | npt.NDArray[np.int64] | npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Targets = Labels | npt.NDArray[np.float32]

MOST_BYTES = 16 << 30  # of samples in memory
NAME_MOST = 200  # characters of a name in a message


@dataclass(frozen=True, slots=True)
class Parts:
    """Images uint8 [N, C, H, W] or texts int64 [N, L]; labels int64 [N], below `classes`.

    Tables and own data may be float32 [N, ...], which is taken as it is; their uint8 becomes -1 to 1. Their labels may
    be numbers, float32 [N, T], T being `classes`. `tokens` is 0 but for texts.
    If the files name the users of the training samples, `owners` int64 [N] are indices in `users`, which are sorted.
    `names`: of the classes, if they have any. `notes`: what the user should know of the files, a line each.
    """

    train: Samples
    train_labels: Targets
    test: Samples
    test_labels: Targets
    classes: int
    tokens: int = 0
    users: tuple[str, ...] = ()
    owners: Labels | None = None
    names: Sequence[str] = ()
    notes: Sequence[str] = ()


def some(names: Sequence[object], *, most: int = 3) -> str:
    """Return the first few of many names, long ones cut, and the number of the others."""
    shown = (text if len(text := str(name)) <= NAME_MOST else f"{text[:NAME_MOST]}..." for name in names[:most])
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


def find(root: Path, candidates: Sequence[Sequence[Path]], *, fetch: str) -> list[Path]:
    """Return the first existing path of each group. Raises InvalidExperiment naming all groups without one."""
    found = [next((path for path in group if path.is_file()), None) for group in candidates]
    lacking = [group for group, path in zip(candidates, found, strict=True) if path is None]
    if lacking:
        names = ", ".join(" or ".join(str(path.absolute()) for path in group) for group in lacking)
        raise missing(root, names, fetch=fetch)
    return [path for path in found if path is not None]


def missing(root: Path, names: str, *, fetch: str) -> InvalidExperiment:
    """Return the error for missing files; `fetch` is the command that fetches them."""
    return InvalidExperiment("data.root", str(root), f"not found: {names}", f"To fetch them: {fetch}")


def damaged(path: Path, problem: str) -> InvalidExperiment:
    """Return the error for a file with invalid content."""
    return InvalidExperiment("data.root", str(path), f"this file {problem}", "Delete it and fetch it again.")


def torchvision_fetches(root: Path, dataset: str) -> str:
    """Return the command that fetches a data set of `torchvision.datasets`."""
    return f'python -c "import torchvision; torchvision.datasets.{dataset}({str(root)!r}, download=True)"'
