"""Arrays in a file of numpy, `NAME.npz`: x and y, and if there are x_test and y_test, and user.

Nothing is unpickled: arrays of objects are refused. Sizes are checked before memory is allocated.
"""

from __future__ import annotations

import zipfile
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy.typing as npt
from numpy.lib import format as npy

from common.errors import InvalidExperiment
from common.experiment.data import Data
from common.learning.readers.arrays import check_finite, parts_of, rows_to_test
from common.learning.readers.parts import MOST_BYTES, Parts, some

KNOWN: Final = ("x", "y", "x_test", "y_test", "user")
HEADS: Final = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_npz(data: Data, root: Path, *, test: bool) -> Parts:
    """Read a file; of a private one all samples are for training, or `test`. Raises InvalidExperiment."""
    path = root / data.dataset

    def refuse(problem: str, remedy: str) -> NoReturn:
        raise InvalidExperiment("data.dataset", str(path), problem, remedy)

    arrays, unread = _arrays(path)
    for needed in ("x", "y"):
        if needed not in arrays:
            held = some(sorted([*arrays, *unread]), most=9) or "none at all"
            refuse(f"has no array {needed!r} but {held}", "Save x and y, and if you like x_test, y_test and user.")
    for name, array in arrays.items():
        check_finite(array, name, refuse)
    x, y, user = arrays["x"], arrays["y"], arrays.get("user")
    if data.private:
        unread += [name for name in arrays if name not in ("x", "y")]
    notes = [f"{path}: these arrays are not read: {some(unread)}"] if unread else []
    parts = partial(parts_of, data, refuse=refuse, notes=notes)
    if data.private:
        mine, none = (x, y), (None, None)
        return parts((*(none if test else mine), None), mine if test else none)
    if ("x_test" in arrays) != ("y_test" in arrays):
        refuse("has only one of x_test and y_test", "Save both, or none.")
    if "x_test" in arrays:
        return parts((x, y, user), (arrays["x_test"], arrays["y_test"]))
    if x.ndim < 1 or any(each.shape[:1] != x.shape[:1] for each in (y, *([] if user is None else [user]))):
        refuse(f"has x of {list(x.shape)} and y of {list(y.shape)}", "Give each sample one target, and one user.")
    picked = rows_to_test(len(x), data.test_share, refuse=refuse)
    train = (x[~picked], y[~picked], None if user is None else user[~picked])
    return parts(train, (x[picked], y[picked]))


def _arrays(path: Path) -> tuple[dict[str, npt.NDArray[Any]], list[str]]:
    """Return the arrays that count, and the names of the others."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            found: dict[str, npt.NDArray[Any]] = {}
            total = 0
            for name in (name for name in KNOWN if name in members):
                info = members[name]
                with archive.open(info) as file:
                    head = HEADS.get(npy.read_magic(file))
                    if head is None:
                        raise ValueError(f"{name} has another version of numpy's format")
                    shape, _, dtype = head(file)
                    if dtype.hasobject or dtype.kind not in "fbiuUS":
                        raise ValueError(f"{name} is an array of {dtype}")
                    count = 1
                    for length in shape:
                        count *= length
                    total += count * dtype.itemsize
                    if total > MOST_BYTES or count * dtype.itemsize > info.file_size:
                        raise ValueError(f"{name} of {list(shape)} does not fit into this file")
                with archive.open(info) as file:
                    found[name] = npy.read_array(file, allow_pickle=False)
            return found, sorted(members.keys() - found.keys())
    except FileNotFoundError:
        raise InvalidExperiment(
            "data.root", str(path.parent), f"not found: {path.absolute()}", "Put it there."
        ) from None
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, KeyError) as error:
        raise InvalidExperiment("data.dataset", str(path), f"not a sound npz file: {error}", "Save it again.") from None
