"""Children in this process, called in their order: the counterpart of
`common.runtime.parent_endpoint`.

Each child gets a copy of its model, encoded and decoded by the tier's codecs, so that all numbers
equal those of a lab of processes. The bytes of these blobs are counted. No child is late or
missing, unless the recorded round of a replay went without it. Where tasks go on after their
rounds, the oldest ones are done first, as by children of equal speed.

The simulated lab without links gives the same bits. It was measured, and costs 1.02 (the demo's
CNN) to 1.81 times (100 tiny devices) the CPU seconds, for no less code.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np

from fedstrata.common.accounting.counters import Account
from fedstrata.common.accounting.ledger import Ledger
from fedstrata.common.accounting.traffic import Traffic
from fedstrata.common.errors import RefusedModel, RunFailed
from fedstrata.common.methods.rule import Uploads
from fedstrata.common.model.codec_settings import Codecs
from fedstrata.common.model.codecs import codec_of
from fedstrata.common.model.layout import LinkLayouts, Row
from fedstrata.common.protocol.limits import (
    ANY,
    ChildLimits,
    check_report,
    possible_scores,
    with_plausible_costs,
)
from fedstrata.common.protocol.manifest import describe
from fedstrata.common.protocol.messages import Key, Phase, Result, RoundTurn, Task
from fedstrata.common.protocol.round_state import Standing, Timeline, Verdict, judge
from fedstrata.common.runtime.link_models import Arriving, decode_row
from fedstrata.common.runtime.round import ClosedRound, Dispatch, DoTask, Observe, WorkResult
from fedstrata.common.runtime.world import new_session, nothing
from fedstrata.common.secure.member import SecureMember
from fedstrata.common.settings.closing import Closing
from fedstrata.common.storage.spool import Spool
from fedstrata.common.text import by_cause


@dataclass(frozen=True, slots=True)
class RoundDecisions:
    """One round: who took part, None if seed and round determine it; who was not used, or not known
    yet.

    `used`: whose results were used where tasks go on, else None. `absent`: those that could not
    take part.
    """

    taking_part: Sequence[str] | None = None
    without: frozenset[str] = frozenset()
    unreported: frozenset[str] = frozenset()
    used: frozenset[str] | None = None
    absent: frozenset[str] = frozenset()

    def uses(self, name: str) -> bool:
        """Return whether a child's result may be used in this round."""
        return name not in self.without and (self.used is None or name in self.used)


ALL_USED: Final = RoundDecisions()
NO_MEMBERS: Final[Mapping[str, SecureMember | None]] = MappingProxyType({})


class Clock:
    """Monotonic clock that stops during evaluation, which a lab of processes does in parallel."""

    def __init__(self) -> None:
        self._off_s = 0.0

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic() - self._off_s

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock inside the `with` block."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._off_s += time.monotonic() - start


@dataclass(frozen=True, slots=True)
class AssignedCall:
    """A task that a child has not done yet, with its model, as children decode it, and the bytes of
    that one's blob.
    """

    model: Row
    nbytes: int
    task: Task


# when, and with which model
Call: TypeAlias = tuple[float, Row, AssignedCall, Awaitable[WorkResult]]


class Calls:
    """A parent's children, each as a function.

    `below` returns the traffic of the tiers below a child, `limits` has what it may report.
    `recorded` returns what was decided in a round, from the global round and the local round in it;
    None: everybody's result is used. `silent` returns whether a child sends no result of a task.
    `at_once`: how many children are called before the first one's result is awaited. `members`:
    what answers for each child in a secure sum.
    """

    def __init__(
        self,
        children: Mapping[str, DoTask],
        *,
        samples: Mapping[str, int],
        tests: Mapping[str, int],
        layouts: LinkLayouts,
        codecs: Codecs,
        spool: Spool,
        resident_mb: float,
        clock: Clock,
        below: Callable[[str], tuple[Traffic, ...]] = lambda child: (),
        limits: Mapping[str, ChildLimits] | None = None,
        observe: Observe = lambda event, facts: None,
        recorded: Callable[[int, int], RoundDecisions] | None = None,
        silent: Callable[[str, Task], bool] = lambda child, task: False,
        at_once: int = 1,
        members: Mapping[str, SecureMember | None] = NO_MEMBERS,
    ) -> None:
        self.peers = tuple(children)
        self.samples = dict(samples)
        self.tests = tests
        self.after: Mapping[str, int] = {}
        self.named = self.available = self.peers
        self.moves = 0
        self._account = Account()
        self._limits = dict.fromkeys(self.peers, ANY) | dict(limits or {})
        names = {name: limit.below.keys() for name, limit in self._limits.items()}
        self.ledger = Ledger(self.peers, self._account, below=names)
        self.now = clock.now
        self._children = children
        self._samples = dict(samples)
        self._recorded = recorded
        self._layouts = layouts
        self._down = codec_of(codecs.down)
        self._up = codec_of(codecs.up)
        self._spool = spool
        self._resident_mb = resident_mb
        self._below = below
        self._observe = observe
        self._silent = silent
        self._at_once = at_once
        self._members = members
        self._session = new_session()
        self._sent = dict.fromkeys(self.peers, 0)
        self._tasks = dict.fromkeys(self.peers, 0)
        self._asked = dict.fromkeys(self.peers, 0)  # bytes of questions of secure sums
        self._assigned: dict[str, AssignedCall] = {}
        self._uploads = np.empty((0, layouts.up.row_bytes), np.uint8)
        blank = np.zeros(layouts.down.row_bytes, np.uint8)
        self._manifest = describe(
            blank.data,
            chunk_bytes=1_000_000,
            codec=self._down.name,
            layout=layouts.down.digest,
            reference="",
            salt="",
        )

    def give_back_places(self) -> None:
        """Do nothing: no child enters."""

    async def absent(
        self,
        global_round: int,
        local_round: int,
        *,
        lost: Collection[str] = (),
        on_progress: Callable[[], None] = nothing,
    ) -> Collection[str]:
        """Return the children that were absent in a recorded round; none is `lost` here."""
        if self._recorded:
            return self._recorded(global_round, local_round).absent
        return ()

    async def round(
        self, dispatch: Dispatch, *, on_progress: Callable[[], None] = nothing
    ) -> ClosedRound:
        """Call each child with a copy of its model and return the results. Raises RunFailed,
        RefusedModel.
        """
        buffered = dispatch.carried is not None
        children = self.peers if buffered else dispatch.children
        if self._recorded:
            recorded = self._recorded(dispatch.global_round, dispatch.local_round)
        else:
            recorded = ALL_USED
        if len(self._uploads) != len(children):
            self._uploads = self._spool.memory(
                "uploads",
                len(children),
                row_bytes=self._layouts.up.row_bytes,
                resident_mb=self._resident_mb,
            )
        opened = self.now()
        timeline = Timeline(opened, opened)
        results: dict[str, Result] = {}
        refused: dict[str, str] = {}
        model_bytes: dict[str, int] = {}
        up = self._layouts.up
        await self._assign(dispatch)
        places, silent = self._places(children, recorded)
        wanted = (buffered and recorded.used is None and dispatch.closing.quorum) or len(places)
        called: deque[Call] = deque()
        for number, (place, name) in enumerate(places):
            if len(results) == wanted:
                break
            if not called:
                most = number + min(self._at_once, wanted - len(results))
                called.extend(self._call(child, on_progress) for _, child in places[number:most])
            begun, row, assigned, work = called.popleft()
            task = assigned.task
            done = await work
            try:
                result = done.announcement(task, self._manifest)
                if result.withdrawn:
                    raise RefusedModel(result.withdrawn)
                result, _ = with_plausible_costs(result, child=name, limits=self._limits[name])
                check_report(result, limits=self._limits[name])
                nbytes = 0
                if task.epochs:  # else its model was scored alone, and none comes back
                    nbytes = done.blob.nbytes
                    extras = 4 * up.extras
                    self._account.add(
                        name, "received", message=nbytes, model=nbytes - extras, extras=extras
                    )
                    self._uploads[place] = self._decoded(done.blob, reference=row)
                results[name] = result
                model_bytes[name] = assigned.nbytes + nbytes
            except RefusedModel as error:
                refused[name] = str(error)
                self._observe("refused", {"node": name, "reason": str(error)})
            self._enter(name)
            self.ledger.enter_reports(name, self._session, result.children)
            timeline.last_result = self.now()
            timeline.seconds[name] = timeline.last_result - begun
            timeline.first_result = timeline.first_result or timeline.last_result
        if (
            judge(dispatch.closing, Standing(len(results), len(refused), 0, 0), overdue=False)
            is not Verdict.CLOSE
        ):
            causes = {
                name: f"sent a model that was refused: {reason}" for name, reason in refused.items()
            }
            raise RunFailed(
                by_cause([*causes.items(), *((name, "sends no result") for name in silent)])
            )
        timeline.closed = self.now()
        reports = tuple(results.get(name) for name in children)
        uploads = Uploads(children, self._uploads, reports, lambda: None)
        self.samples = {
            name: count for name, count in self._samples.items() if name not in recorded.unreported
        }
        scored, unscored = possible_scores(results, self._limits, tests=self.tests)
        return ClosedRound(
            scored,
            uploads,
            tuple(name for name in children if name in recorded.without or name in silent),
            refused,
            timeline,
            model_bytes,
            buffered,
            dispatch.absent,
            unscored=unscored,
        )

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
        """Ask each child in a turn of a secure sum of a round, `key`, and return the answers."""
        asked = Key(1, *key, int(turn))
        found = {}
        for name, question in questions.items():
            member = self._members[name]
            assert member is not None, "its tier has no secure sums"
            answer = found[name] = member.answer(asked, question)
            self._asked[name] += len(question)
            size = len(answer)
            self._account.add(name, "received", message=size, extras=size)
            self._enter(name)
        return found

    async def _assign(self, dispatch: Dispatch) -> None:
        """Note the tasks of a round; those that it carries go before them."""
        self._assigned = {
            name: self._assigned[name]
            for name in self._assigned
            if name in (dispatch.carried or ())
        }
        key = Key(1, dispatch.global_round, dispatch.local_round)
        for model, names in dispatch.models:
            row = await model.whole() if isinstance(model, Arriving) else model
            nbytes = self._adopted(row) if names else 0
            for name in names:
                follows = dispatch.follows.get(name, 0)
                task = Task(key, dispatch.epochs[name], self._manifest, None, follows)
                self._assigned[name] = AssignedCall(row, nbytes, task)

    def _adopted(self, row: Row) -> int:
        """Let the row be what its children decode; return the bytes of its blob."""
        codec = self._down
        layout = self._layouts.down
        if codec.is_row:
            return row.nbytes
        blob = codec.encode(layout, row)
        try:
            if not codec.exact:
                decode_row(codec, layout, blob, row, None)
        except RefusedModel as error:
            raise RunFailed(f"the model cannot be sent: {error}") from None
        return len(blob)

    def _decoded(self, blob: memoryview, *, reference: Row) -> Row:
        """Return the flat model of a result. Raises RefusedModel."""
        if self._up.is_row:
            row = np.frombuffer(blob, np.uint8)
            self._layouts.up.check_finite(row)
            return row
        row = self._layouts.up.empty()
        decode_row(self._up, self._layouts.up, blob, row, reference)
        return row

    def _places(
        self, children: Sequence[str], recorded: RoundDecisions
    ) -> tuple[list[tuple[int, str]], Collection[str]]:
        """Return the children to be called, the oldest tasks first, with their places; and the
        silent ones.
        """
        places = {name: place for place, name in enumerate(children)}
        silent = [
            name for name, assigned in self._assigned.items() if self._silent(name, assigned.task)
        ]
        called = [name for name in self._assigned if recorded.uses(name) and name not in silent]
        return [(places[name], name) for name in called], silent

    def _call(self, name: str, on_progress: Callable[[], None]) -> Call:
        """Call a child with its task. Called with others it gets no copy of its model: they would
        be many.
        """
        begun = self.now()
        assigned = self._assigned.pop(name)
        row = assigned.model.copy() if self._at_once == 1 else assigned.model.view()
        row.flags.writeable = self._at_once == 1
        self._sent[name] += assigned.nbytes
        self._tasks[name] += 1
        work = self._children[name](
            assigned.task, self._arrived(row), partial(self._progressed, on_progress)
        )
        return begun, row, assigned, work

    def _arrived(self, row: Row) -> Arriving:
        """Return a completely received model."""
        model = Arriving(self._manifest, row, row.data, np.zeros(self._manifest.chunks, np.bool_))
        model.arrived()
        return model

    def _enter(self, child: str) -> None:
        """Enter the byte counts that the child would have reported into the byte ledger."""
        beside = 4 * self._layouts.down.extras * self._tasks[child]
        sent = self._sent[child] - beside
        extras = beside + self._asked[child]
        link = Traffic(
            received_model_payload=sent,
            received_model_message=sent,
            received_extras_payload=extras,
            received_extras_message=extras,
        )
        self.ledger.enter(child, self._session, link=link, below=self._below(child))

    def _progressed(
        self, on_progress: Callable[[], None], phase: Phase, done: int, total: int
    ) -> None:
        self.moves += 1
        on_progress()
