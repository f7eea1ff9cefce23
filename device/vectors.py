"""The vectors behind the models of a device's tasks, float32 [D] each, D being the model's trainable columns.

    row = [ model | sent by the parent | kept by the device ]
    out = [ model | returned to the parent | kept by the device ]

Those that are kept are the state of the device's objective, zeros at first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from common.aggregation.mixing import Floats
from common.model.layout import ModelLayout, Row, Section


@dataclass(frozen=True, slots=True)
class TaskVectors:
    """The names of an experiment's vectors, in their order, and the layout of its model."""

    layout: ModelLayout
    sent: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Those of `row`."""
        return (*self.sent, *self.kept)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the vectors that are kept."""
        return 4 * self.layout.parameters * len(self.kept)

    def read(self, row: Row) -> dict[str, Floats]:
        """Return the vectors of a row by name, as views."""
        return dict(zip(self.names, self._behind(row), strict=True))

    def write(self, out: Row, found: Mapping[str, Floats]) -> None:
        """Write the vectors that are returned, and those that are kept. Raises KeyError, ValueError."""
        for name, place in zip((*self.returned, *self.kept), self._behind(out), strict=True):
            place[:] = found[name]

    def split(self, vector_D: Floats) -> dict[str, Floats]:
        """Return a vector's part for each parameter by name, in the parameters' shapes and their order in the row."""
        parameters = (entry for entry in self.layout.entries if entry.section is Section.PARAMETER)
        return {entry.name: vector_D[..., entry.start : entry.stop].reshape(*vector_D.shape[:-1], *entry.shape)
                for entry in parameters}  # fmt: skip

    def _behind(self, row: Row) -> Sequence[Floats]:
        return list(row[self.layout.model_bytes :].view(np.float32).reshape(-1, self.layout.parameters))
