"""Data of the user's own: a function named in the experiment, `data.dataset = "package.module:function"`.

It is called with the keyword `root`, a Path, on each node that reads, and returns `Parts`, the same everywhere: each
node splits the training samples by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from common.experiment import own
from common.learning.readers.parts import Parts

KEY: Final = "data.dataset"


def read_own(name: str, root: Path) -> Parts:
    """Return what the function does, checked. Raises InvalidExperiment."""
    parts = own.call(KEY, name, own.load(KEY, name), {"root": root})
    if not isinstance(parts, Parts):
        problem = f"returns {type(parts).__name__}"
        own.refuse(KEY, name, problem, f"Return the Parts of {Parts.__module__}.")
    right = {"int64": 2} if parts.tokens else {"uint8": 4, "float32": 4}
    for samples in (parts.train, parts.test):
        if not isinstance(samples, np.ndarray) or right.get(samples.dtype.name) != samples.ndim:
            wanted = "int64 [N, L]" if parts.tokens else "uint8 or float32 [N, C, H, W]"
            own.refuse(KEY, name, f"has samples that are not arrays of {wanted}", "Convert them.")
        if parts.tokens and len(samples) and not 0 <= samples.min() <= samples.max() < parts.tokens:
            own.refuse(KEY, name, f"has tokens outside of 0 to {parts.tokens - 1}", "Check `tokens`.")
    for labels in (parts.train_labels, parts.test_labels):
        if not isinstance(labels, np.ndarray) or labels.dtype != np.int64 or labels.ndim != 1:
            own.refuse(KEY, name, "has labels that are not arrays of int64 [N]", "Convert them.")
    if parts.train.dtype != parts.test.dtype or parts.train.shape[1:] != parts.test.shape[1:]:
        own.refuse(KEY, name, "has training and test samples of different shapes or types", "Convert one of them.")
    return parts
