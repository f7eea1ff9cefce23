"""What a round sends, and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.aggregation.selection.situation import ResultFacts
from common.aggregation.uploads import Uploads
from common.experiment.rounds import Closing
from common.model.layout import Row
from common.protocol.messages import Result
from common.protocol.timeline import Timeline
from common.runtime.arriving import Arriving


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The tasks of a round.

    `models`: each flat model, uint8 [row_bytes], with the children that receive it; a model that is still arriving is
    forwarded chunk by chunk. `epochs`: at least those of the children that take part. `follows`: their tasks, as in the
    message Task; 0 for others.
    """

    global_round: int
    local_round: int
    models: Sequence[tuple[Row | Arriving, Sequence[str]]]
    epochs: Mapping[str, int]
    closing: Closing
    follows: Mapping[str, int] = field(default_factory=dict)

    @property
    def children(self) -> tuple[str, ...]:
        """The children that take part, in the order of their models."""
        return tuple(child for _, children in self.models for child in children)


@dataclass(frozen=True, slots=True)
class ClosedRound:
    """A closed round, its children in the order of `Dispatch.children`.

    `results`: those of the children that answered, in that order. `uploads`: their models, in rows that are valid until
    the next round opens. `model_bytes`: of each child that answered, the encoded models that it received and returned.
    """

    results: Mapping[str, Result]
    uploads: Uploads
    missing: tuple[str, ...]
    refused: Mapping[str, str]
    timeline: Timeline
    model_bytes: Mapping[str, int]

    @property
    def facts(self) -> dict[str, ResultFacts]:
        """What client selection may know of each result."""
        opened, announced = self.timeline.opened, self.timeline.announced
        return {
            name: ResultFacts(result.samples, result.loss, announced[name] - opened, self.model_bytes[name])
            for name, result in self.results.items()
        }

    def decided(self, r: int, *, unreported: Sequence[str]) -> dict[str, object]:
        """Return what a plan records of the node's round r so that it can be replayed.

        `without`: the children that took part, but whose result was not used; `unreported`: those whose samples are not
        known yet. Both are left out if there are none.
        """
        without = [child for child in self.uploads.children if child not in self.results]
        found = {"without": without, "unreported": list(unreported)}
        return {"node_round": r} | {name: children for name, children in found.items() if children}

    @property
    def models(self) -> dict[str, Row]:
        """The flat model of each child that answered."""
        uploads = self.uploads
        return {uploads.children[k]: uploads.rows_K[k] for k in uploads.answered}
