"""What a round sends, and its result."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import InvalidBelow, NoProgress, RunFailed
from common.experiment.rounds import Closing
from common.methods.rule import Uploads
from common.methods.selection import ResultFacts
from common.model.layout import Row
from common.protocol.messages import Failure, Result
from common.protocol.round_state import Closed, Stalled
from common.protocol.timeline import Timeline
from common.runtime.arriving import Arriving


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The tasks of a round.

    `models`: each flat model, uint8 [row_bytes], with the children that receive it. A lossy codec overwrites it with
    what they decode, so that the node goes on from the model that its children had. One that is still arriving stays
    as it is, and is forwarded chunk by chunk; its codec is that of the children, or theirs is exact. `epochs`: at least
    those of the children that take part. `follows`: their tasks, as in the message Task; 0 for others. `carried`: the
    children whose tasks of earlier rounds go on, None if tasks end with their round (see `Coordinator.open`); the
    models that were sent to them must not have changed. `last`: no round follows, so no task goes on.
    """

    global_round: int
    local_round: int
    models: Sequence[tuple[Row | Arriving, Sequence[str]]]
    epochs: Mapping[str, int]
    closing: Closing
    follows: Mapping[str, int] = field(default_factory=dict)
    carried: Collection[str] | None = None
    last: bool = False

    @property
    def children(self) -> tuple[str, ...]:
        """The children that take part, in the order of their models."""
        return tuple(child for _, children in self.models for child in children)


@dataclass(frozen=True, slots=True)
class ClosedRound:
    """A closed round, its children in the order of `Dispatch.children`; all of the parent's if tasks go on.

    `results`: those of the children that answered, in that order. `uploads`: their models, in rows that are valid until
    the next round opens. `model_bytes`: of each child that answered, the encoded models that it received and returned.
    `buffered`: tasks go on.
    """

    results: Mapping[str, Result]
    uploads: Uploads
    missing: tuple[str, ...]
    refused: Mapping[str, str]
    timeline: Timeline
    model_bytes: Mapping[str, int]
    buffered: bool = False

    @property
    def facts(self) -> dict[str, ResultFacts]:
        """What client selection may know of each result."""
        seconds = self.timeline.seconds
        return {
            name: ResultFacts(result.samples, result.loss, seconds[name], self.model_bytes[name])
            for name, result in self.results.items()
        }

    def decided(self, r: int, *, unreported: Sequence[str]) -> dict[str, object]:
        """Return what a plan records of the node's round r so that it can be replayed.

        `without`: the children that took part, but whose result was not used; `used`: in its place where tasks go on;
        `unreported`: those whose samples are not known yet. Each is left out if there are none.
        """
        used = [*self.results, *self.refused] if self.buffered else []
        without = [] if self.buffered else [child for child in self.uploads.children if child not in self.results]
        found = {"without": without, "used": used, "unreported": list(unreported)}
        return {"node_round": r} | {name: children for name, children in found.items() if children}

    @property
    def models(self) -> dict[str, Row]:
        """The flat model of each child that answered."""
        uploads = self.uploads
        return {uploads.children[k]: uploads.rows_K[k] for k in uploads.answered}


def failure(stalled: Stalled) -> RunFailed:
    """Return the error of a round that can never close."""
    if Failure.INVALID in stalled.failures:
        return InvalidBelow(stalled.reason)
    idle = stalled.idle or Failure.STALLED in stalled.failures
    return NoProgress(stalled.reason) if idle else RunFailed(stalled.reason)


def break_off(closing: asyncio.Future[Closed], error: BaseException) -> None:
    """End a round with an error, unless it has closed."""
    if not closing.done():
        closing.set_exception(error)
