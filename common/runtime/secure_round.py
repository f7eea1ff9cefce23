"""A parent's round of a secure sum: keys, shares, the round itself, and what opens its sum.

A child that is lost before it has given keys and shares is left out, and these are made anew. One
that is lost later is taken out of the sum by the shares of the others. Where the process of a child
has begun anew it has no keys: they are made anew for all, who do their task again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from fedstrata.common.errors import RefusedModel, RunFailed, WireError
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.experiment.tiers import Tier
from fedstrata.common.host.offload import work_on
from fedstrata.common.methods.rule import Uploads
from fedstrata.common.model.layout import ModelLayout
from fedstrata.common.protocol.messages import Result, RoundTurn
from fedstrata.common.runtime.link_models import Arriving
from fedstrata.common.runtime.round import Children, ClosedRound, Dispatch, KeysNeeded, Play, played
from fedstrata.common.secure.exchange import SecureExchange
from fedstrata.common.secure.links import ring_of
from fedstrata.common.secure.records import ID_BYTES
from fedstrata.common.secure.ring import Ring, Sum, weight_of
from fedstrata.common.settings.closing import Closing
from fedstrata.common.settings.secure import LEAST
from fedstrata.common.text import named

OPENING_S: Final = 5.0  # in which all may answer, before it is enough that some do
BEGINNINGS_MOST: Final = 4  # of a child's processes in a round, before it goes on without the child

log = logging.getLogger("fedstrata.secure")


@dataclass(frozen=True, slots=True)
class SummedReport:
    """What a rule knows of a sum, in place of single results."""

    samples: int
    loss: float | None
    path_steps: int
    start_loss: float | None = None


def player(
    experiment: Experiment, parent: str, layout: ModelLayout, *, noise: Callable[[int], bytes]
) -> Play:
    """Return how a node runs its rounds: as secure sums where its tier has them."""
    tier = experiment.tier_below(parent)
    ring = ring_of(experiment, tier, layout)
    if ring is None:
        return played

    async def play(
        down: Children, dispatch: Dispatch, on_progress: Callable[[], None]
    ) -> ClosedRound:
        if not any(dispatch.epochs.values()):  # no model comes back
            return await played(down, dispatch, on_progress)
        return await SecureRound(
            down=down, tier=tier, ring=ring, noise=noise, dispatch=dispatch, on_progress=on_progress
        ).run()

    return play


@dataclass(slots=True, kw_only=True)
class SecureRound:
    """One round; `noise`: random bytes of the system."""

    down: Children
    tier: Tier
    ring: Ring
    noise: Callable[[int], bytes]
    dispatch: Dispatch
    on_progress: Callable[[], None]
    left_out: set[str] = field(default_factory=set)
    samples_most: int = 0  # of a child that takes part, 0 if all weigh the same

    async def run(self) -> ClosedRound:
        """Run the round, and return it with the mean of the children's models as its only upload.

        Raises what `Children.round` raises, and RunFailed if the sum cannot be opened.
        """
        opened_at = self.down.now()
        beginnings = Counter[str]()
        while True:
            children = [name for name in self.dispatch.children if name not in self.left_out]
            if len(children) < LEAST:
                problem = f"a secure sum of {len(children)} children would be a model"
                raise RunFailed(f"{problem}: {named(self.dispatch.children)}")
            try:
                closed = await self._tried(children)
            except KeysNeeded as error:
                log.info("%s needs new keys in round %s", error.child, self._where)
                beginnings[error.child] += 1
                if beginnings[error.child] >= BEGINNINGS_MOST:
                    self.left_out.add(error.child)
                continue
            if closed is not None:
                timeline = replace(closed.timeline, opened=opened_at, closed=self.down.now())
                return replace(closed, timeline=timeline)

    async def _tried(self, children: Sequence[str]) -> ClosedRound | None:
        """Return the round, or None after children were lost without whom it begins again."""
        exchange = SecureExchange(self.ring, exchange=self.noise(ID_BYTES))
        keys = await self._ask(RoundTurn.KEYS, dict.fromkeys(children, exchange.begin()))
        members = self._taken(children, keys, exchange.take_keys)
        if exchange.opened:
            # a parent that has begun anew: the children open the same sum again, and no other one
            self._check(exchange.opened, members)
            members = [name for name in members if name in exchange.opened]
            self.left_out.update(set(children).difference(members))
        if len(members) < LEAST:
            return None
        if self.tier.aggregation.of_mean == "data":
            samples = self.down.samples
            self.samples_most = max(1, *(samples.get(name, 0) for name in members))
        roster = exchange.roster(members, samples_most=self.samples_most)
        shares = await self._ask(RoundTurn.SHARES, dict.fromkeys(members, roster))
        if len(self._taken(members, shares, exchange.take_shares)) < len(members):
            return None
        dispatch = self._among(members, opens=exchange.uploads_needed)
        closed = await self.down.round(dispatch, on_progress=self.on_progress)
        present = list(closed.results)
        if exchange.opened:
            self._check(exchange.opened, present)
        if not exchange.enough(present):
            lost = [name for name in members if name not in present]
            log.warning("round %s begins again without %s", self._where, named(lost))
            self.left_out.update(lost)
            return None
        questions = exchange.unmask(present)
        needed = exchange.answers_needed(present)
        closing = Closing.model_construct(rule="quorum", quorum=needed, deadline_s=OPENING_S)
        spare = len(present) - needed
        answers = await self._ask(RoundTurn.UNMASK, questions, closing, spare=spare)
        return self._closed(closed, await self._opened(exchange, closed, answers))

    async def _opened(
        self, exchange: SecureExchange, closed: ClosedRound, answers: Mapping[str, bytes]
    ) -> Sum:
        """Return what the sum of a round is. Raises RunFailed if the answers do not open it."""
        rows = closed.uploads.rows_K[list(closed.uploads.answered)]
        (model, _), *_ = self.dispatch.models
        received = await model.whole() if isinstance(model, Arriving) else model
        weights = self._weights(closed.results)

        def opened() -> Sum:
            total = exchange.total(map(self.ring.words, rows), answers)
            return self.ring.mean(total, received, weights=weights.values())

        try:
            return await work_on(opened, nbytes=rows.nbytes)
        except (RefusedModel, WireError) as error:
            # not without the child that has lied: the others open no second sum
            raise RunFailed(f"the sum of round {self._where} cannot be opened: {error}") from None

    def _closed(self, closed: ClosedRound, summed: Sum) -> ClosedRound:
        """Return the round with the mean of its uploads as the only one."""
        results = closed.results
        if summed.clipped:
            settings = self.ring.settings
            log.warning(
                "round %s: %.2g %% of the values were clipped to %g: raise secure.clip",
                self._where,
                100 * summed.clipped,
                settings.clip,
            )
        samples = sum(result.samples for result in results.values())
        steps = max(result.path_steps for result in results.values())
        report = SummedReport(samples, summed.loss, steps)
        weights = self._weights(results)
        total = sum(weights.values())
        lost = {*closed.missing, *self.left_out}.difference(results)
        return replace(
            closed,
            uploads=Uploads((next(iter(results)),), summed.row[None], (report,), lambda: None),
            missing=tuple(name for name in self.dispatch.children if name in lost),
            summed=self.dispatch.children,
            weights={name: weight / total for name, weight in weights.items()},
        )

    async def _ask(
        self,
        turn: RoundTurn,
        questions: Mapping[str, bytes],
        closing: Closing | None = None,
        *,
        spare: int = 0,
    ) -> Mapping[str, bytes]:
        closing = closing or self._closing(len(questions), least=LEAST)
        key = self.dispatch.global_round, self.dispatch.local_round
        return await self.down.exchange(
            turn, key, questions, closing=closing, spare=spare, on_progress=self.on_progress
        )

    def _taken(
        self,
        children: Iterable[str],
        answers: Mapping[str, bytes],
        take: Callable[[str, bytes], None],
    ) -> list[str]:
        """Take the answers in the children's order; return those that can be used, and leave the
        other children out.
        """
        found = []
        for name in children:
            try:
                if name in answers:
                    take(name, answers[name])
                    found.append(name)
                    continue
            except WireError as error:
                log.warning("%s is left out of round %s: %s", name, self._where, error)
            self.left_out.add(name)
        return found

    def _among(self, members: Sequence[str], *, opens: int) -> Dispatch:
        """Return the dispatch to these children alone; `opens`: with so many uploads a sum can be
        opened, so none closes with fewer.
        """
        models = []
        for model, names in self.dispatch.models:
            models.append((model, [name for name in names if name in members]))
        closing = self._closing(len(members), least=opens)
        return replace(self.dispatch, models=models, closing=closing)

    def _closing(self, children: int, *, least: int) -> Closing:
        """Return when a turn with so many children closes: with `least` of them, or more."""
        closing = self.tier.closing_of(children, among=len(self.down.named))
        if closing.quorum is None or closing.quorum >= least:
            return closing
        return closing.model_copy(update={"quorum": least})

    def _weights(self, results: Mapping[str, Result]) -> dict[str, float]:
        """Return the weights of the children in the sum, in their order."""
        if not self.samples_most:
            return dict.fromkeys(results, 1.0)
        most = self.samples_most
        return {name: weight_of(result.samples, most=most) for name, result in results.items()}

    def _check(self, opened: Collection[str], here: Iterable[str]) -> None:
        """Check that all are here whose sum some children have opened. Raises RunFailed."""
        lacking = set(opened).difference(here)
        if lacking:
            problem = f"round {self._where}: its sum was opened with {named(sorted(lacking))}"
            raise RunFailed(f"{problem}, and another sum would show what these sent")

    @property
    def _where(self) -> str:
        return f"{self.dispatch.global_round}.{self.dispatch.local_round}"
