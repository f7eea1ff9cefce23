"""Whether the files of a data set are there: what its reader looks for first, without reading them."""

from __future__ import annotations

from pathlib import Path

from common.errors import InvalidExperiment
from common.experiment.data import FOLDERS, Data
from common.experiment.topology import CLOUD
from common.learning.readers import cifar, idx, leaf


def check_files(data: Data, *, node: str = CLOUD) -> None:
    """Raise InvalidExperiment, as the reader does, if a node's files are missing."""
    name, root = data.dataset, Path(data.root.replace("{node}", node))
    if name in ("mnist", "fashionmnist"):
        idx.find_mnist_like(root, FOLDERS[name])
    elif name in ("cifar10", "cifar100"):
        cifar.FINDERS[name](root)
    elif name in ("femnist", "shakespeare", "sent140"):
        leaf.check_parts(root, name)
    elif name == "folder" and not (folder := root / ("test" if node == CLOUD else "train")).is_dir():
        problem, remedy = f"not found: {folder.absolute()}", "Put this node's own images there."
        raise InvalidExperiment("data.root", str(root), problem, remedy)
