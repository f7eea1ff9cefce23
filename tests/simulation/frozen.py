"""A workload whose model has frozen arrays that some devices build otherwise, and the invariant of
their bytes.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from fedstrata.common.model import tensors
from fedstrata.common.model.layout import FrozenForm, ModelLayout
from fedstrata.common.model.parts import read_frozen_file
from fedstrata.deploy.simulation.hardware import NullWorkload


class FrozenWorkload(NullWorkload):
    """Null workload with frozen arrays of about so many bytes, at the cloud and at each device that
    builds the same.
    """

    def __init__(self, model_bytes: int, frozen_bytes: int) -> None:
        super().__init__(model_bytes)
        noise = np.random.default_rng(2).standard_normal(frozen_bytes // 4, np.float32)
        self.frozen = {
            "c.weight": noise,
            "c.mask": noise[:9] > 0,
            "c.half": noise[:5].astype(np.float16),
        }
        self.form = FrozenForm(tensors.content(self.frozen, {}), tensors.size(self.frozen, {}))
        self._tensors = [(entry.name, entry.shape, entry.section) for entry in self.layout.entries]
        self.layout = ModelLayout.build(self._tensors, self.form)

    def layout_at(self, node: str, frozen: Path | None) -> ModelLayout:
        """Return the layout of a device's own arrays, or of those in a file. Raises
        RefusedModel.
        """
        if frozen is None:
            return (
                ModelLayout.build(self._tensors, self.form._replace(digest="0" * 16))
                if lacks(node)
                else self.layout
            )
        arrays = read_frozen_file(frozen, self.form.digest)
        return ModelLayout.build(
            self._tensors, FrozenForm(tensors.content(arrays, {}), tensors.size(arrays, {}))
        )


def lacks(node: str) -> bool:
    """Return whether a device builds other frozen arrays than the cloud."""
    return zlib.crc32(f"{node} lacks".encode()) % 2 > 0
