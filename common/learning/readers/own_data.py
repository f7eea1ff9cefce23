"""Data of the user's own: a function named in the experiment, `data.dataset = "package.module:function"`.

It is called with those of the keywords `root`, a Path, and `node`, the reading node's name, that it accepts. It returns
`Parts`, or a pair of training and test set: each a PyTorch data set, or a pair of samples and targets, or samples,
targets and users. Unless `data.partition` is private the result must be the same everywhere: each node splits the
training samples by itself. If it is private, a device returns None for the test set and the cloud for the training set.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from common.experiment import own
from common.experiment.data import Data
from common.learning.readers.arrays import Refuse, parts_of, stacked
from common.learning.readers.parts import Parts

KEY: Final = "data.dataset"
FORMS: Final = "Return two pairs of samples and targets: (x, y), (x_test, y_test), or two PyTorch data sets."


def read_own(data: Data, root: Path, node: str) -> Parts:
    """Return what the function returns, converted and checked. Raises InvalidExperiment."""
    with own.guarded({KEY: data.dataset}):
        return _read(data, root, node)


def _read(data: Data, root: Path, node: str) -> Parts:
    def refuse(problem: str, remedy: str) -> NoReturn:
        own.refuse(KEY, data.dataset, problem, remedy)

    found = own.load(KEY, data.dataset)
    result = own.call(KEY, data.dataset, found, own.accepted(found, {"root": root, "node": node}))
    if isinstance(result, Parts):
        users = None if result.owners is None else np.array(result.users)[result.owners]
        train, test = (result.train, result.train_labels, users), (result.test, result.test_labels)
        classes, tokens, names, notes = result.classes, result.tokens, result.names, result.notes
        return parts_of(data, train, test, refuse=refuse, classes=classes, tokens=tokens, names=names, notes=notes)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        refuse(f"returns {type(result).__name__}", FORMS)
    train, (x_test, y_test, _) = (_part(each, refuse) for each in result)
    return parts_of(data, train, (x_test, y_test), refuse=refuse)


def _part(found: Any, refuse: Refuse) -> tuple[Any, Any, Any]:
    """Return samples, targets and users, None for what is not there."""
    if found is None:
        return None, None, None
    if isinstance(found, (tuple, list)) and len(found) in (2, 3):
        return found[0], found[1], found[2] if len(found) > 2 else None
    if not (hasattr(found, "__getitem__") and hasattr(found, "__len__")) or hasattr(found, "dtype"):
        refuse(f"returns {type(found).__name__} for one of both sets", FORMS)
    return *stacked(found, refuse), None
