"""A parent's round, over a network or in one process: its tasks, the work of a child on one, and
their results.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.ledger import Ledger
from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import InvalidBelow, RunFailed
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.experiment.tiers import Tier
from fedstrata.common.methods.rule import Rule, RuleContext, Uploads
from fedstrata.common.methods.selection import NOTHING, Choose, ClientSelection, ResultFacts
from fedstrata.common.metrics import Metrics
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.model.refinement import Refiner
from fedstrata.common.protocol.messages import Manifest, Phase, Result, RoundTurn, Task
from fedstrata.common.protocol.round_state import Timeline
from fedstrata.common.runtime.link_models import Arriving
from fedstrata.common.runtime.world import REAL, World, nothing
from fedstrata.common.settings.closing import Closing
from fedstrata.common.storage.spool import Spool
from fedstrata.common.text import JSON_MOST, named, short

# takes an event: its name, and facts that JSON can hold
Observe: TypeAlias = Callable[[str, dict[str, object]], None]

NUMBERS: Final = "numbers"  # of a device's trainer, in place of decisions
NOTES: Final = "notes"  # beside them: what the trainer's user should know
UNSCORED: Final = "unscored"  # in a plan: nodes whose scores are left out

log = logging.getLogger("fedstrata.round")


class KeysNeeded(Exception):
    """A child's process lacks the keys of the secure sum that it is asked about: they are made
    anew.
    """

    def __init__(self, child: str) -> None:
        super().__init__(child)
        self.child = child


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The tasks of a round."""

    global_round: int
    local_round: int
    # Each flat model, uint8 [row_bytes], with the children that receive it. A lossy codec
    # overwrites it with what they decode, so that the node goes on from the model that its children
    # had. One that is still arriving stays as it is, and is forwarded chunk by chunk; its codec is
    # that of the children, or theirs is exact.
    models: Sequence[tuple[Row | Arriving, Sequence[str]]]
    epochs: Mapping[str, int]  # at least those of the children that take part
    closing: Closing
    selected: Sequence[str] = ()  # the children that take part, in the node's order
    absent: Collection[str] = ()  # those that could not be selected
    # each child's last task whose result was used, as in the message Task; 0 for none
    follows: Mapping[str, int] = field(default_factory=dict)
    # The children whose tasks of earlier rounds go on, None if tasks end with their round (see
    # `Coordinator.open`); the models that were sent to them must not have changed.
    carried: Collection[str] | None = None
    last: bool = False  # no round follows, so no task goes on
    able: Collection[str] = ()  # the children that could be selected

    @property
    def children(self) -> tuple[str, ...]:
        """The children that take part, in the order of their models."""
        return tuple(child for _, children in self.models for child in children)


@dataclass(frozen=True, slots=True)
class ClosedRound:
    """A closed round, its children in the order of `Dispatch.children`; all of the parent's if
    tasks go on.
    """

    results: Mapping[str, Result]  # of the children that answered, in that order
    uploads: Uploads  # their models, in rows that are valid until the next round opens
    missing: tuple[str, ...]
    refused: Mapping[str, str]
    timeline: Timeline
    # of each child that answered, the encoded models that it received and returned
    model_bytes: Mapping[str, int]
    buffered: bool = False  # tasks go on
    absent: Collection[str] = ()  # see `Dispatch`
    # nodes whose scores are left out, each with the reason
    # (`common.protocol.limits.possible_scores`); their models count
    unscored: Mapping[str, str] = field(default_factory=dict)
    # Of a secure sum, whose mean is the only upload: all that took part, and their weights in it.
    summed: Sequence[str] = ()
    weights: Mapping[str, float] = field(default_factory=dict)

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

        `without`: the children that took part, but whose result was not used; `used`: in its place
        where tasks go on; `unreported`: those whose samples are not known yet; `absent`: those that
        could not take part; `unscored`: see the class. Each is left out if there are none.
        """
        found: dict[str, object] = {}
        if self.buffered:
            found["used"] = [*self.results, *self.refused]
        else:
            children = self.summed or self.uploads.children
            found["without"] = [child for child in children if child not in self.results]
        found["unreported"] = list(unreported)
        found["absent"] = list(self.absent)
        found[UNSCORED] = dict(self.unscored)
        found["weights"] = dict(self.weights)
        return {"node_round": r} | {name: children for name, children in found.items() if children}

    @property
    def models(self) -> dict[str, Row]:
        """The flat model of each child that answered."""
        uploads = self.uploads
        return {uploads.children[k]: uploads.rows_K[k] for k in uploads.answered}


@dataclass(frozen=True, slots=True)
class WorkResult:
    """The result of a task: the blob of its model, as the tier's codec has it, and its work.

    `blob` is valid until the next task's work; empty if the model was scored alone. For
    `path_steps` (None: as the work's steps), `children`, `plans` and `start_loss` see the message
    Result.
    """

    blob: memoryview
    work: Work
    path_steps: int | None = None
    children: tuple[ChildReport, ...] = ()
    plans: Mapping[str, Sequence[Mapping[str, object]]] = field(default_factory=dict)
    start_loss: float | None = None
    withdrawn: str = ""  # why there is no model

    def announcement(self, task: Task, model: Manifest, inline: bytes | None = None) -> Result:
        """Return the result announcement; `model` is the manifest of the blob."""
        plans = json.dumps(self.plans) if self.plans else ""
        # a replay needs the decisions, nothing needs the numbers of trainers
        if len(plans) > JSON_MOST:
            decisions = {}
            for name, found in self.plans.items():
                if not all(NUMBERS in each for each in found):
                    decisions[name] = found
            plans = json.dumps(decisions)
        if len(plans) > JSON_MOST:
            log.warning(
                "the decisions of %d rules are not reported: %d characters",
                len(self.plans),
                len(plans),
            )
            plans = ""
        path_steps = self.work.steps if self.path_steps is None else self.path_steps
        return Result(
            task.key,
            model,
            inline,
            self.work,
            path_steps,
            self.children,
            plans,
            start_loss=self.start_loss,
            withdrawn=short(self.withdrawn),
        )


Report: TypeAlias = Callable[[Phase, int, int], None]
DoTask: TypeAlias = Callable[[Task, Arriving, Report], Awaitable[WorkResult]]


class Children(Protocol):
    """The children on a broker (`common.runtime.parent_endpoint`) or in this process
    (`deploy.local.calls`).
    """

    @property
    def samples(self) -> dict[str, int]:
        """The training samples of each child that has reported them."""

    @property
    def tests(self) -> Mapping[str, int]:
        """The test samples of each child that has reported its training samples; 0 if they are not
        known.
        """

    @property
    def ledger(self) -> Ledger:
        """The bytes of the links to them."""

    @property
    def after(self) -> Mapping[str, int]:
        """Of children that have come from another parent, the task that this one used last."""

    @property
    def moves(self) -> int:
        """A count that grows with any progress below."""

    @property
    def peers(self) -> tuple[str, ...]:
        """Their names in order."""

    @property
    def named(self) -> Collection[str]:
        """Those that the experiment names here; the others have entered, or moved."""

    @property
    def available(self) -> Collection[str]:
        """The children that can take part now, or when their traces bring them back."""

    def now(self) -> float:
        """Return the time of the clock that measures rounds, in seconds."""

    def give_back_places(self) -> None:
        """Forget the children that had entered and have been away for `idle_s`; between two tasks
        of this node.
        """

    async def absent(
        self,
        global_round: int,
        local_round: int,
        *,
        lost: Collection[str] = (),
        on_progress: Callable[[], None] = nothing,
    ) -> Collection[str]:
        """Return the children that cannot take part in a round, once those that the tier needs can.

        `lost`: those that an earlier attempt at this round has given up. None are absent if the
        tier waits for each child. See `ParentEndpoint.absent`.
        """

    async def round(
        self, dispatch: Dispatch, *, on_progress: Callable[[], None] = nothing
    ) -> ClosedRound:
        """Send each child its model and return the results, see `Dispatch` and
        `ParentEndpoint.round`.
        """

    async def exchange(
        self,
        turn: RoundTurn,
        key: tuple[int, int],
        questions: Mapping[str, bytes],
        *,
        closing: Closing,
        spare: int = 0,
        on_progress: Callable[[], None] = nothing,
    ) -> Mapping[str, bytes]:
        """Ask children in a turn of a secure sum, and return the answers, see
        `ParentEndpoint.exchange`.
        """


Play: TypeAlias = Callable[[Children, Dispatch, Callable[[], None]], Awaitable[ClosedRound]]


async def played(
    down: Children, dispatch: Dispatch, on_progress: Callable[[], None]
) -> ClosedRound:
    """Run a round as it is dispatched."""
    return await down.round(dispatch, on_progress=on_progress)


async def run_round(
    down: Children,
    tier: Tier,
    selection: ClientSelection,
    rule: Rule,
    r: int,
    key: tuple[int, int],
    *,
    epochs: int,
    epochs_of: Mapping[str, int] = NOTHING,
    last: bool,
    arriving: Arriving | None = None,
    play: Play = played,
    on_progress: Callable[[], None] = nothing,
) -> tuple[Dispatch, ClosedRound]:
    """Run a node's round r with selected children, to each of which the rule gives a model.

    `key`: the global and the local round. `epochs_of`: of single children, in place of `epochs`.
    `play`: how a round that is dispatched is run. `arriving`: the model that the rule passes on,
    while it is not complete. If the children are lost before they answer, others that are available
    take their places, where the tier has `min_available`. Raises what `Children.absent` and
    `Children.round` raise.
    """
    tried = set[str]()
    lost = set[str]()
    while True:
        absent = await down.absent(*key, lost=lost, on_progress=on_progress)
        # Children may enter until they are selected. Those that have left again count for nothing.
        counted = [name for name in down.peers if name in down.named or name not in absent]
        empty = [name for name in counted if down.samples.get(name) == 0]
        if empty and len(empty) == len(counted):
            raise RunFailed(f"no child has samples to train on, of {named(empty)}")
        selected = selection.select(counted, r, samples=down.samples, absent={*absent, *empty})
        # What entered may leave within the round: it must close without them.
        closing = tier.closing_of(len(selected), among=len(down.named))
        given = dict.fromkeys(selected, epochs)
        given |= {name: epochs_of[name] for name in selected if name in epochs_of}
        models = rule.dispatch(r, selected)
        follows = selection.follows(down.peers, r)
        if tier.entering:  # else none can have come from another parent
            came = [name for name in selected if name in down.after]
            follows |= {name: max(follows[name], min(down.after[name], r)) for name in came}
        able = [name for name in counted if name not in absent]
        lacking = [name for name in counted if name in absent]
        dispatch = Dispatch(
            *key,
            models,
            given,
            closing,
            selected,
            lacking,
            follows,
            selection.in_flight,
            last,
            able,
        )
        if arriving is not None and not arriving.complete:
            dispatch = replace(dispatch, models=[(arriving, dispatch.children)])
        try:
            return dispatch, await play(down, dispatch, on_progress)
        except RunFailed as error:
            tried.update(selected)
            # one whose connection comes and goes is ready, again and again
            lost.update(error.without)
            others = set(down.available) - lost
            minimum = tier.minimum_of(len(others.union(down.named)))
            enough = minimum is not None and len(others) >= minimum.children
            if isinstance(error, InvalidBelow) or not enough or others <= tried:
                raise
            log.warning("round %d.%d begins again with other children: %s", *key, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """What a node's rounds are run with, beside its experiment."""

    down: Children
    spool: Spool  # where its rule keeps rows
    metrics: Metrics
    choose: Choose | None = None  # a client selection, as recorded
    refiner: Refiner | None = None
    world: World = REAL


def unreported(children: Children) -> list[str]:
    """Return the children whose samples are not known."""
    return [name for name in children.peers if name not in children.samples]


def rule_context(
    experiment: Experiment,
    node: str,
    context: NodeContext,
    *,
    layout: ModelLayout,
    folder: Path | None,
    measures: bool,
) -> RuleContext:
    """Return what a node's rule is built for; see `RuleContext`."""
    resident_mb = experiment.transfer.resident_mb
    rows = partial(context.spool.memory, row_bytes=layout.row_bytes, resident_mb=resident_mb)
    return RuleContext(
        layout=layout,
        node=node,
        seed=experiment.seed,
        measures=measures,
        rows=rows,
        folder=folder,
        children=len(experiment.tree.children[node]),
        training=experiment.training,
        learning_rate=experiment.learning_rate_in,
        rounds_below=experiment.rounds_below(node),
        refiner=context.refiner,
    )
