"""FedCDA (Wang et al., ICLR 2024): select cached uploads that are close together at a low loss.

    (5)  min  (1/n) sum F(x_c) + (L/2n) sum ||x_c - xbar||^2,   xbar = (1/n) sum x_c,   over one
    upload of each child

The round's participants are searched group by group, with all other selections fixed. A common
shift changes no distance, so with e = x - z, s0 = the sum of e over the fixed selections, G = e
e^T, u = e.s0 and q = s0.s0:

    J = (1/n) sum F_c + (L/2) [ (1/n) sum G_cc - (q + 2 sum u_c + sum sum G_cc') / n^2 ]  + a
    constant of the group

The paper has one smoothness L for all children, and names unequal ones as future work. With L_c of
each child, the bound F_c(x_c) + (L_c/2) ||x_c - xbar||^2 of its loss at xbar makes (5) a weighted
sum. With t0 = the sum of L e over the fixed selections, v = e.t0, and Lambda = the sum of L over
all n:

    J = (1/n) sum F_c + (1/2n) [ sum L_c G_cc - (2/n) (sum v_c + sum L_c u_c + sum sum L_c G_cc')
                                 + (Lambda/n^2) (q + 2 sum u_c + sum sum G_cc') ]  + a constant of
                                 the group
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import Field, NonNegativeFloat

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.lazy import np, npt
from fedstrata.common.methods.cached_uploads import CachedUpload, UploadCache
from fedstrata.common.methods.column_rule import MeanRule
from fedstrata.common.methods.mixing import by_block
from fedstrata.common.methods.rule import Aggregated, Rule, RuleContext, Uploads
from fedstrata.common.methods.settings import RuleUse, StagedSettings
from fedstrata.common.methods.single_model import SingleModelRule
from fedstrata.common.methods.statistics import Gram
from fedstrata.common.model.refinement import RoundModels

Doubles: TypeAlias = "npt.NDArray[np.float64]"
Row: TypeAlias = "npt.NDArray[np.uint8]"
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
TIE: Final = 1e-12  # of the terms' scale


class FedCDA(StagedSettings):
    """One model: the mean of one cached upload of each child, chosen to lie close together at a low
    loss.
    """

    compares_losses: ClassVar[bool] = True

    name: Literal["fedcda"] = "fedcda"  # the rule
    depth: Count = 3  # uploads kept of each child (H)
    groups: Count = 3  # groups in which the children that take part select (B)
    smoothness: NonNegativeFloat = 1.0  # weight of closeness beside the loss (L)
    # That of single children, by name, in place of `smoothness`.
    smoothness_of: dict[Name, NonNegativeFloat] = Field(default_factory=dict)
    # How an upload is chosen: `close`, by (5), or `random`, each cached one with the same chance, a
    # control.
    choice: Literal["close", "random"] = "close"
    # Most combinations of a group; each takes 8 bytes for every candidate.
    combinations: Annotated[int, Field(ge=1, le=4_000_000)] = 1_000_000
    # What an institution does with its cached uploads when a global model comes.
    history: Literal["clear", "keep"] = "clear"
    # megabytes of cached uploads in memory; those beyond it are files
    memory_mb: NonNegativeFloat = 512.0

    @property
    def remembers(self) -> bool:
        """Whether the cached uploads persist, or the moments of a step or of the warm-up."""
        return self.history == "keep" or super().remembers

    @property
    def acts_from(self) -> int:
        """The round after the warm-up, at least the second: in the first one there is nothing to
        choose.

        A warm-up with steps of the server differs from the first one on.
        """
        if self.begins_with.remembers:
            return 1
        return max(self.warmup_rounds, 1) + 1

    def held_bytes(
        self, row_bytes: int, *, children: int, taking_part: int, resident_bytes: float
    ) -> float:
        """Return the bytes of the cached uploads, and of one or two sums in float64."""
        sums = 4 if self.smoothness_of else 2
        cached = min(self.depth * children * row_bytes, self.memory_mb * 1e6)
        rest = super().held_bytes(
            row_bytes, children=children, taking_part=taking_part, resident_bytes=resident_bytes
        )
        return cached + sums * row_bytes + rest

    @property
    def named_children(self) -> Mapping[str, Iterable[str]]:
        """Those with a smoothness of their own."""
        return {"smoothness_of": self.smoothness_of}

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check the number of combinations of a group. Raises InvalidExperiment."""
        super().check(key, children, uploads)
        group = ceil(children / self.groups)
        if self.choice == "close" and self.depth**group > self.combinations:
            of_group = f"a group of {group} children with {self.depth} uploads each"
            problem = f"{of_group} has {self.depth}^{group} combinations"
            remedy = f"Raise {key}.groups or lower {key}.depth."
            raise InvalidExperiment(f"{key}.combinations", self.combinations, problem, remedy)

    def build(self, context: RuleContext) -> Rule:
        return CachedUploadRule(self, context)

    def advice(self, use: RuleUse) -> Iterator[str]:
        """Yield what a short run or the rule's place makes of histories."""
        key = f"{use.key}.aggregation"
        if use.feedback:
            yield (
                f"{key}.name = 'fedcda': an upload may be used in several rounds or in none, and "
                "what a codec with feedback leaves out of it is added to the next one as if it "
                "was used once."
            )
        if use.rounds <= self.warmup_rounds:
            yield (
                f"{key}.warmup_rounds = {self.warmup_rounds}: all {use.rounds} rounds belong to "
                f"the warm-up, which is the same as {self.begins_with.name}. In short runs use "
                "about half of the rounds."
            )
        if use.depth and self.history == "keep" and not use.alone:
            yield (
                f"{key}.history = 'keep': uploads of past global models ruin training (53 % on "
                "digits against 92 %)."
            )
        if use.depth and self.history == "clear" and use.tier_rounds == 1:
            yield (
                f"{key}.name = 'fedcda': with {use.key}.rounds = 1 a history is cleared before it "
                "has a second upload, so there is nothing to choose from."
            )


class CachedUploadRule(SingleModelRule):
    """One model at one node, and each child's last uploads.

    A running float64 sum of all selected uploads is kept, so that a round reads only the
    participants' candidates. Children without any upload are in no mean. The selection of a child
    that fails does not change.
    """

    def __init__(self, settings: FedCDA, context: RuleContext) -> None:
        layout = context.layout
        super().__init__(context, MeanRule(), weights=settings.weights)
        self._warmup = settings.begins_with.build(context)
        self.mean = self.current = self._warmup.model  # one array: either writes it
        self._settings = settings
        self._refiner = context.refiner_of(settings)
        self._cache = UploadCache(context, memory_bytes=settings.memory_mb * 1e6)
        self._queues: dict[str, list[CachedUpload]] = {}  # oldest first
        self._selected: dict[str, CachedUpload] = {}
        self._sum_F: Doubles = np.zeros(layout.columns)
        # sum of L x over the selected uploads, if L differs
        self._weighted_D: Doubles | None = (
            np.zeros(layout.parameters) if settings.smoothness_of else None
        )

    def begin(self, model: Row) -> None:
        """Dispatch this model next, and drop the cached uploads unless the history is kept."""
        super().begin(model)
        if self._settings.history == "clear":
            for kept in chain.from_iterable(self._queues.values()):
                self._cache.drop(kept)
            self._queues = {}
            self._selected = {}
            self._forget_sums()

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Add the uploads to their histories, select one per participant, and take the mean of all
        selected ones.
        """
        participants = uploads.senders
        old = [self._selected.pop(child) for child in participants if child in self._selected]
        if self._selected:
            self._add(old, -1)
        else:
            self._forget_sums()  # removes the rounding errors too
        for k, child in zip(uploads.answered, participants, strict=True):
            report = uploads.reports[k]
            assert report is not None and report.loss is not None  # `compares_losses`
            queue = self._queues.setdefault(child, [])
            while len(queue) >= self._settings.depth:
                self._cache.drop(queue.pop(0))
            queue.append(self._cache.keep(child, r, uploads.rows_K[k], loss=report.loss))
        if r < self._settings.warmup_rounds:
            outcome = self._warm_up(r, uploads, participants)
        else:
            outcome = self._select(r, uploads, participants)
        for child in participants:
            for kept in self._queues[child]:
                kept.close()
        self.current = self.mean
        return outcome

    def save(self, folder: Path) -> dict[str, object]:
        """Write the histories, as links if they are files already, and the sum of the selected
        uploads.
        """
        self._cache.save(folder, chain.from_iterable(self._queues.values()))
        (folder / "sum").write_bytes(self._sum_F.data)  # `tofile` hides the errno of a full disk
        if self._weighted_D is not None:
            (folder / "weighted").write_bytes(self._weighted_D.data)
        queues = {}
        for child, queue in self._queues.items():
            queues[child] = [[kept.r, kept.loss] for kept in queue]
        return {
            "warmup": self._warmup.save(folder),
            "queues": queues,
            "selected": {child: kept.r for child, kept in self._selected.items()},
        }

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Restore the histories, and the warm-up's state."""
        self._warmup.restore(folder, facts["warmup"])
        self._queues = {}
        self._selected = {}
        for child, queue in facts["queues"].items():
            restored = [self._cache.restore(folder, child, r, loss=loss) for r, loss in queue]
            self._queues[child] = restored
        for child, r in facts["selected"].items():
            self._selected[child] = next(kept for kept in self._queues[child] if kept.r == r)
        self._sum_F[:] = np.fromfile(folder / "sum")
        if self._weighted_D is not None:
            self._weighted_D[:] = np.fromfile(folder / "weighted")

    def _warm_up(self, r: int, uploads: Uploads, participants: list[str]) -> Aggregated:
        """Select this round's uploads and aggregate them by the warm-up's rule."""
        newest = {child: self._queues[child][-1] for child in participants}
        self._selected |= newest
        self._add(list(newest.values()), 1)
        self._warmup.begin(self.current)
        outcome = self._warmup.aggregate(r, uploads)
        facts = {**outcome.facts, "stage": "warm-up", "seen": len(self._selected)}
        return replace(outcome, facts=facts)

    def _select(self, r: int, uploads: Uploads, participants: list[str]) -> Aggregated:
        """Select one upload from each participant's history; take the mean of all selected ones."""
        layout = self.context.layout
        settings = self._settings
        kept, candidates = self._candidates(participants)
        draw = self.context.chance(r, "grouping")
        if settings.choice == "random":
            groups: list[list[int]] = []
            drawn = [own[int(draw.integers(len(own)))] for own in candidates.of]
            choice = Choice(tuple(drawn), candidates.beside(drawn).products)
        else:
            groups = group(len(participants), settings.groups, draw)
            choice = plan(candidates, groups)
        chosen = [kept[c] for c in choice.chosen]
        self._add(chosen, 1)
        self._selected |= dict(zip(participants, chosen, strict=True))
        n = len(self._selected)
        received = self.current
        if self._refiner is not None:
            received = received.copy()
        np.divide(self._sum_F, n, out=layout.floats(self.mean), casting="same_kind")
        # equal weights: the counters are those of the first
        first = self._selected[min(self._selected)]
        layout.integers(self.mean)[:] = layout.integers(first.row)
        first.close()
        named = np.array(participants)
        facts: dict[str, object] = {
            "stage": "selection",
            "seen": n,
            "groups": [named[members].tolist() for members in groups],
            "selected": {child: self._selected[child].r for child in participants},
        }
        newest = choice.distances([own[0] for own in candidates.of], n)
        distances = dict(zip(participants, newest, strict=True))
        selected = [self._selected[child] for child in sorted(self._selected)]
        if self._refiner is not None:
            teachers = [candidate.row for candidate in selected]
            models = RoundModels(r, layout, self.mean, received, teachers, np.full(n, 1 / n))
            facts |= self._refiner.refine(models)
            distances = {}
            if self.context.measures:
                distances = self.distances(uploads)
            for candidate in selected:
                candidate.close()
        loss = float(np.mean([candidate.loss for candidate in selected]))
        return Aggregated(loss, distances, None, facts)

    def _candidates(self, participants: list[str]) -> tuple[list[CachedUpload], Candidates]:
        """Return the participants' cached uploads, each one's newest first, and what (5) needs."""
        layout = self.context.layout
        fixed = len(self._selected)
        kept: list[CachedUpload] = []
        of: list[Sequence[int]] = []
        for child in participants:
            begin = len(kept)
            kept += reversed(self._queues[child])
            of.append(range(begin, len(kept)))
        z = layout.floats(self.current)

        def others(columns: slice) -> Doubles:
            offset: Doubles = self._sum_F[columns] - fixed * z[columns].astype(np.float64)
            return offset

        def release() -> None:
            for candidate in kept:
                candidate.release()

        rows = [layout.floats(candidate.row)[: layout.parameters] for candidate in kept]
        products = Gram.of(rows, z[: layout.parameters], along=others, release=release)
        smooth_C = np.array([self._smoothness(candidate.child) for candidate in kept])
        fixed_L = sum(map(self._smoothness, self._selected))
        weighted_C = smooth_C * products.along_K
        if self._weighted_D is not None:
            total_D = self._weighted_D
            weighted_C = Gram.of(
                rows, z[: layout.parameters], along=lambda at: total_D[at] - fixed_L * z[at]
            ).along_K
        losses_C = np.array([candidate.loss for candidate in kept])
        return kept, Candidates(products, losses_C, of, fixed, smooth_C, weighted_C, fixed_L)

    def _smoothness(self, child: str) -> float:
        return self._settings.smoothness_of.get(child, self._settings.smoothness)

    def _forget_sums(self) -> None:
        self._sum_F.fill(0.0)
        if self._weighted_D is not None:
            self._weighted_D.fill(0.0)

    def _add(self, uploads: Sequence[CachedUpload], sign: int) -> None:
        rows = [self.context.layout.floats(kept.row) for kept in uploads]

        def add(columns: slice) -> None:
            total = self._sum_F[columns]
            weighted = None if self._weighted_D is None else self._weighted_D[columns]
            term = np.empty(len(total))
            change = np.add if sign > 0 else np.subtract
            for row, kept in zip(rows, uploads, strict=True):
                np.copyto(term, row[columns])
                change(total, term, out=total)
                if weighted is not None:
                    weighted += sign * self._smoothness(kept.child) * term[: len(weighted)]

        def release() -> None:
            for kept in uploads:
                kept.release()

        by_block(len(self._sum_F), add, release=release)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The cached uploads of the round's participants."""

    products: Gram  # G, u and q
    losses_C: Doubles
    of: Sequence[Sequence[int]]  # each participant's candidates as rows of G, newest first
    fixed: int  # the number of other children with uploads
    smooth_C: Doubles  # L of each candidate's child
    weighted_C: Doubles  # v
    fixed_L: float  # the sum of L over the others

    def beside(self, found: list[int]) -> Candidates:
        """Return the candidates beside what was fixed and these ones, now fixed, too."""
        g_KK = self.products.offsets_KK
        u_K = self.products.along_K
        smooth_K = self.smooth_C[found]
        added = 2 * u_K[found].sum() + g_KK[np.ix_(found, found)].sum()
        square = self.products.square + float(added)
        return replace(
            self,
            products=Gram(g_KK, u_K + g_KK[:, found].sum(axis=1), square),
            fixed=self.fixed + len(found),
            weighted_C=self.weighted_C + g_KK[:, found] @ smooth_K,
            fixed_L=self.fixed_L + float(smooth_K.sum()),
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """Each participant's selected candidate, and the products with the sum of all selected
    uploads.
    """

    chosen: tuple[int, ...]
    products: Gram

    def distances(self, rows: Sequence[int], n: int) -> list[float]:
        """Return ||x_c - xbar|| of candidates, for the mean xbar of all n selected uploads."""
        g = self.products.offsets_KK
        u = self.products.along_K
        q = self.products.square
        return [float(np.sqrt(max(g[c, c] - 2 * u[c] / n + q / n**2, 0.0))) for c in rows]


def group(participants: int, groups: int, draw: np.random.Generator) -> list[list[int]]:
    """Return the participants 0 .. P-1, shuffled, in groups of near-equal size; the first P mod B
    are larger by one.
    """
    parts = np.array_split(draw.permutation(participants), min(groups, participants))
    return [part.tolist() for part in parts]


def plan(candidates: Candidates, groups: Sequence[Sequence[int]]) -> Choice:
    """Return each participant's selection: one group after another, without the groups that
    follow.
    """
    chosen = [-1] * len(candidates.of)
    for members in groups:
        found = search(candidates, [candidates.of[p] for p in members])
        for p, c in zip(members, found, strict=True):
            chosen[p] = c
        candidates = candidates.beside(found)
    return Choice(tuple(chosen), candidates.products)


def search(candidates: Candidates, members: Sequence[Sequence[int]]) -> list[int]:
    """Return the candidate of each member whose combination minimises J, n = fixed + members.

    Combinations run from all newest to all oldest. Of those within 1e-12 of the minimum the first
    one is returned.
    """
    n = candidates.fixed + len(members)
    products = candidates.products
    losses_C = candidates.losses_C
    g_CC = products.offsets_KK
    u_C = products.along_K
    v_C = candidates.weighted_C
    smooth_C = candidates.smooth_C
    squares_C = np.diagonal(g_CC)
    share = (candidates.fixed_L + sum(float(smooth_C[own[0]]) for own in members)) / n  # mean L
    spread_C = (
        smooth_C * squares_C
        - (2 * (v_C + smooth_C * (u_C + squares_C)) - share * (2 * u_C + squares_C)) / n
    ) / (2 * n)
    # half of each unordered pair's: the other half is the other one's
    pair_C = (smooth_C - share / 2) / n**2
    values = np.zeros(1)
    pulls = np.zeros((1, len(losses_C)))  # [combinations, C]: those of the candidates chosen so far
    scale = share / 2 * products.square / n**2
    for own in map(list, members):
        pull = pulls[:, own]
        step = losses_C[own] / n + spread_C[own] - pull
        terms = np.abs(losses_C[own] / n).max() + np.abs(spread_C[own]).max()
        scale += float(terms + np.abs(pull).max())
        values = (values[:, None] + step).ravel()
        pairs = (pair_C[own][:, None] + pair_C) * g_CC[own]
        pulls = (pulls[:, None, :] + pairs).reshape(len(values), -1)
    best = int(np.argmax(values <= values.min() + TIE * scale))
    chosen: list[int] = []
    for own in map(list, reversed(members)):
        best, place = divmod(best, len(own))
        chosen.append(own[place])
    return chosen[::-1]
