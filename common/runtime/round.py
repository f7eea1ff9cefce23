"""A round's outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.aggregation.uploads import Uploads
from common.model.layout import Row
from common.protocol.messages import Result
from common.protocol.timeline import Timeline


@dataclass(frozen=True, slots=True)
class ClosedRound:
    """A closed round, its children in the order in which their models were given.

    `results`: of those that answered, in that order. `uploads`: their models in rows of their own, valid until the
    next round is opened.
    """

    results: Mapping[str, Result]
    uploads: Uploads
    missing: tuple[str, ...]
    refused: Mapping[str, str]
    timeline: Timeline

    @property
    def models(self) -> dict[str, Row]:
        """Return the row of each child that answered."""
        uploads = self.uploads
        return {uploads.children[k]: uploads.rows_K[k] for k in uploads.answered}
