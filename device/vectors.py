"""The vectors behind the models of a device's tasks, float32.

    row = [ model | sent by the parent | kept by the device ]
    out = [ model | returned to the parent | kept by the device ]

Those that are kept are the state of the device's objective, [D], zeros at first, D being the model's trainable columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from common.methods.mixing import Floats
from common.model.layout import LinkLayouts, ModelLayout, Row, Section


@dataclass(frozen=True)
class TaskVectors:
    """What an experiment's tasks have behind the model: what the links carry, and the names of what is kept."""

    links: LinkLayouts
    kept: tuple[str, ...] = ()

    @property
    def layout(self) -> ModelLayout:
        """The layout of the model."""
        return self.links.model

    @cached_property
    def received(self) -> ModelLayout:
        """The layout of `row`."""
        return self.links.down.with_extras(dict.fromkeys(self.kept, (self.layout.parameters,)))

    @cached_property
    def returned(self) -> ModelLayout:
        """The layout of `out`."""
        return self.links.up.with_extras(dict.fromkeys(self.kept, (self.layout.parameters,)))

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the vectors of `row`, by name."""
        return self.received.extra_shapes

    @property
    def expected(self) -> tuple[str, ...]:
        """The names of the vectors of `out`."""
        return tuple(self.returned.extra_shapes)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the vectors that are kept."""
        return 4 * self.layout.parameters * len(self.kept)

    def read(self, row: Row) -> dict[str, Floats]:
        """Return the vectors of a row by name, as views."""
        return self.received.extras_of(row)

    def write(self, out: Row, found: Mapping[str, Floats]) -> None:
        """Write the vectors that are returned, and those that are kept. Raises KeyError, ValueError."""
        for name, place in self.returned.extras_of(out).items():
            place[...] = found[name]

    def split(self, name: str, vector: Floats) -> dict[str, Floats]:
        """Return a vector's parts: one of shape [D] has a part for each parameter, by its name and in its shape.

        The parts are in the order of the parameters in the row. Other vectors are one part. A vector may have more
        dimensions before its own.
        """
        if self.shapes[name] != (self.layout.parameters,):
            return {name: vector}
        parameters = (entry for entry in self.layout.entries if entry.section is Section.PARAMETER)
        return {entry.name: vector[..., entry.start : entry.stop].reshape((*vector.shape[:-1], *entry.shape))
                for entry in parameters}  # fmt: skip
