"""The result of a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.aggregation.uploads import Uploads
from common.model.layout import Row
from common.protocol.messages import Result
from common.protocol.timeline import Timeline


@dataclass(frozen=True, slots=True)
class ClosedRound:
    """A closed round, its children in the order of their models.

    `results`: those of the children that answered, in that order. `uploads`: their models, in rows that are valid until
    the next round opens.
    """

    results: Mapping[str, Result]
    uploads: Uploads
    missing: tuple[str, ...]
    refused: Mapping[str, str]
    timeline: Timeline

    @property
    def models(self) -> dict[str, Row]:
        """The flat model of each child that answered."""
        uploads = self.uploads
        return {uploads.children[k]: uploads.rows_K[k] for k in uploads.answered}
