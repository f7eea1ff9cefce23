"""FedCDA (Wang et al., ICLR 2024): select cached uploads that are close together at a low loss.

    (5)  min  (1/n) sum F(x_c) + (L/2n) sum ||x_c - xbar||^2,   xbar = (1/n) sum x_c,   over one upload of each child

The round's participants are searched group by group, with all other selections fixed. A common shift changes no
distance, so with e = x - z, s0 = the sum of e over the fixed selections, G = e e^T, u = e.s0 and q = s0.s0:

    J = (1/n) sum F_c + (L/2) [ (1/n) sum G_cc - (q + 2 sum u_c + sum sum G_cc') / n^2 ]  + a constant of the group

The paper has one smoothness L for all children, and names unequal ones as future work. With L_c of each child, the
bound F_c(x_c) + (L_c/2) ||x_c - xbar||^2 of its loss at xbar makes (5) a weighted sum. With t0 = the sum of L e over
the fixed selections, v = e.t0, and Lambda = the sum of L over all n:

    J = (1/n) sum F_c + (1/2n) [ sum L_c G_cc - (2/n) (sum v_c + sum L_c u_c + sum sum L_c G_cc')
                                 + (Lambda/n^2) (q + 2 sum u_c + sum sum G_cc') ]  + a constant of the group
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from common.errors import InvalidExperiment
from common.experiment.methods import CombiningSettings, Rounds, RuleUse, Weights
from common.experiment.tables import Count, Name
from common.host.files import PARTIAL, writing
from common.lazy import np
from common.methods.mixing import Mixture, cut, over
from common.methods.rule import Aggregated, Rule, RuleContext, Uploads
from common.methods.single_model import OneModel
from common.methods.statistics import Doubles, Gram, gram
from common.model.layout import Row
from common.randomness import Purpose, generator

TIE: Final = 1e-12  # of the terms' scale


class FedCDA(CombiningSettings):
    """One model: the mean of one cached upload of each child, chosen to lie close together at a low loss."""

    compares_losses = True

    name: Literal["fedcda"] = "fedcda"  # the rule
    depth: Count = 3  # uploads kept of each child (H)
    groups: Count = 3  # groups in which the children that take part select (B)
    warmup_rounds: Rounds = 50  # first rounds, which are FedAvg
    smoothness: Annotated[float, Field(ge=0)] = 1.0  # weight of closeness beside the loss (L)
    # That of single children, by name, in place of `smoothness`.
    smoothness_of: dict[Name, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    # How an upload is chosen: `close`, by (5), or `random`, each cached one with the same chance, a control.
    choice: Literal["close", "random"] = "close"
    # Most combinations of a group; each takes 8 bytes for every candidate.
    combinations: Annotated[int, Field(ge=1, le=4_000_000)] = 1_000_000
    # What an institution does with its cached uploads when a global model comes.
    history: Literal["clear", "keep"] = "clear"
    memory_mb: Annotated[float, Field(ge=0)] = 512.0  # megabytes of cached uploads in memory; those beyond it are files
    weights: Weights = "data"  # of the warm-up: shares of the samples, or 1/K

    @property
    def remembers(self) -> bool:
        """Whether the cached uploads persist, or the moments of a step."""
        return self.history == "keep" or super().remembers

    def held_bytes(self, row_bytes: int, *, children: int, taking_part: int, resident_bytes: float) -> float:
        """Return the bytes of the cached uploads, and of one or two sums in float64."""
        sums = 4 if self.smoothness_of else 2
        step = super().held_bytes(row_bytes, children=children, taking_part=taking_part, resident_bytes=resident_bytes)
        return min(self.depth * children * row_bytes, self.memory_mb * 1e6) + sums * row_bytes + step

    @property
    def named_children(self) -> Mapping[str, Iterable[str]]:
        """Those with a smoothness of their own."""
        return {"smoothness_of": self.smoothness_of}

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check the number of combinations of a group. Raises InvalidExperiment."""
        super().check(key, children, uploads)
        group = ceil(children / self.groups)
        if self.choice == "close" and self.depth**group > self.combinations:
            raise InvalidExperiment(
                f"{key}.combinations",
                self.combinations,
                f"a group of {group} children with {self.depth} uploads each has {self.depth}^{group} combinations",
                f"Raise {key}.groups or lower {key}.depth.",
            )

    def build(self, context: RuleContext) -> Rule:
        return CachedUploadRule(self, context)

    def advice(self, use: RuleUse) -> Iterator[str]:
        """Yield what a short run or the rule's place makes of histories."""
        key = f"{use.key}.aggregation"
        if use.feedback:
            yield (
                f"{key}.name = 'fedcda': an upload may be used in several rounds or in none, and what a codec with"
                " feedback leaves out of it is added to the next one as if it was used once."
            )
        if use.rounds <= self.warmup_rounds:
            yield (
                f"{key}.warmup_rounds = {self.warmup_rounds}: all {use.rounds} rounds belong to the warm-up, which is"
                " the same as fedavg. In short runs use about half of the rounds."
            )
        if use.depth and self.history == "keep" and not use.alone:
            yield f"{key}.history = 'keep': uploads of past global models ruin training (53 % on digits against 92 %)."
        if use.depth and self.history == "clear" and use.tier_rounds == 1:
            yield (
                f"{key}.name = 'fedcda': with {use.key}.rounds = 1 a history is cleared before it has a second"
                " upload, so there is nothing to choose from."
            )


class CachedUploadRule(OneModel):
    """One model at one node, and each child's last uploads.

    A running float64 sum of all selected uploads is kept, so that a round reads only the participants' candidates.
    Children without any upload are in no mean. The selection of a child that fails does not change.
    """

    def __init__(self, settings: FedCDA, context: RuleContext) -> None:
        layout = context.layout
        super().__init__(layout)
        self._settings = settings
        self._node = context.node
        self._seed = context.seed
        self._measures = context.measures
        self._cache = UploadCache(context.folder, row_bytes=layout.row_bytes, memory_bytes=settings.memory_mb * 1e6)
        self._queues: dict[str, list[CachedUpload]] = {}  # oldest first
        self._selected: dict[str, CachedUpload] = {}
        self._sum_F: Doubles = np.zeros(layout.columns)
        # sum of L x over the selected uploads, if L differs
        self._weighted_D: Doubles | None = np.zeros(layout.parameters) if settings.smoothness_of else None

    def begin(self, model: Row) -> None:
        """Dispatch this model next, and drop the cached uploads unless the history is kept."""
        super().begin(model)
        if self._settings.history == "clear":
            for kept in (kept for queue in self._queues.values() for kept in queue):
                self._cache.drop(kept)
            self._queues, self._selected = {}, {}
            self._forget_sums()

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Add the uploads to their histories, select one per participant, and take the mean of all selected ones."""
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
            outcome = self._warm_up(uploads, participants)
        else:
            outcome = self._select(r, uploads, participants)
        for child in participants:
            for kept in self._queues[child]:
                kept.close()
        self._current = self._mean
        return outcome

    def save(self, folder: Path) -> dict[str, object]:
        """Write the histories, as links if they are files already, and the sum of the selected uploads."""
        self._cache.save(folder, (kept for queue in self._queues.values() for kept in queue))
        (folder / "sum").write_bytes(self._sum_F.data)  # `tofile` hides the errno of a full disk
        if self._weighted_D is not None:
            (folder / "weighted").write_bytes(self._weighted_D.data)
        return {
            "queues": {child: [[kept.r, kept.loss] for kept in queue] for child, queue in self._queues.items()},
            "selected": {child: kept.r for child, kept in self._selected.items()},
        }

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Restore the histories."""
        self._queues = {
            child: [self._cache.restore(folder, child, r, loss=loss) for r, loss in queue]
            for child, queue in facts["queues"].items()
        }
        self._selected = {
            child: next(kept for kept in self._queues[child] if kept.r == r) for child, r in facts["selected"].items()
        }
        self._sum_F[:] = np.fromfile(folder / "sum")
        if self._weighted_D is not None:
            self._weighted_D[:] = np.fromfile(folder / "weighted")

    def _warm_up(self, uploads: Uploads, participants: list[str]) -> Aggregated:
        """Select this round's uploads and return their mean."""
        statistics = uploads.statistics
        newest = {child: self._queues[child][-1] for child in participants}
        self._selected |= newest
        self._add(list(newest.values()), 1)
        weights_K = statistics.weights_K(self._settings.weights)
        distances: dict[str, float] = {}
        if self._measures:
            found_K = self._products(uploads, self._current).distances(weights_K)
            distances = dict(zip(participants, found_K.tolist(), strict=True))
        self._average(uploads, Mixture.of(weights_K))
        facts = {"stage": "warm-up", "seen": len(self._selected)}
        return Aggregated(statistics.mean_loss(weights_K), distances, None, facts)

    def _select(self, r: int, uploads: Uploads, participants: list[str]) -> Aggregated:
        """Select one upload from each participant's history; take the mean of all selected ones."""
        layout, settings, fixed = self._layout, self._settings, len(self._selected)
        kept = [kept for child in participants for kept in reversed(self._queues[child])]
        places = iter(range(len(kept)))
        of = [[next(places) for _ in self._queues[child]] for child in participants]
        z = layout.floats(self._current)

        def others(columns: slice) -> Doubles:
            offset: Doubles = self._sum_F[columns] - fixed * z[columns].astype(np.float64)
            return offset

        def release() -> None:
            for candidate in kept:
                candidate.release()

        rows = [layout.floats(candidate.row)[: layout.parameters] for candidate in kept]
        products = gram(rows, z[: layout.parameters], along=others, release=release)
        smooth_C = np.array([self._smoothness(candidate.child) for candidate in kept])
        fixed_L = sum(map(self._smoothness, self._selected))
        weighted_C = smooth_C * products.along_K
        if self._weighted_D is not None:
            weighted_D = self._weighted_D
            products_L = gram(rows, z[: layout.parameters], along=lambda at: weighted_D[at] - fixed_L * z[at])
            weighted_C = products_L.along_K
        losses_C = np.array([candidate.loss for candidate in kept])
        candidates = Candidates(products, losses_C, of, fixed, smooth_C, weighted_C, fixed_L)
        draw = generator(self._seed, Purpose.GROUPING, self._node, r)
        if settings.choice == "random":
            groups: list[list[int]] = []
            drawn = [own[int(draw.integers(len(own)))] for own in of]
            choice = Choice(tuple(drawn), candidates.beside(drawn).products)
        else:
            groups = group(len(participants), settings.groups, draw)
            choice = plan(candidates, groups)
        chosen = [kept[c] for c in choice.chosen]
        self._add(chosen, 1)
        self._selected |= dict(zip(participants, chosen, strict=True))
        n = len(self._selected)
        np.divide(self._sum_F, n, out=layout.floats(self._mean), casting="same_kind")
        first = self._selected[min(self._selected)]  # equal weights: the counters are those of the first
        layout.integers(self._mean)[:] = layout.integers(first.row)
        first.close()
        facts: dict[str, object] = {
            "stage": "selection",
            "seen": n,
            "groups": [[participants[p] for p in members] for members in groups],
            "selected": {child: candidate.r for child, candidate in zip(participants, chosen, strict=True)},
        }
        distances = choice.distances([own[0] for own in of], n)
        loss = float(np.mean([self._selected[child].loss for child in sorted(self._selected)]))
        return Aggregated(loss, dict(zip(participants, distances, strict=True)), None, facts)

    def _smoothness(self, child: str) -> float:
        return self._settings.smoothness_of.get(child, self._settings.smoothness)

    def _forget_sums(self) -> None:
        self._sum_F.fill(0.0)
        if self._weighted_D is not None:
            self._weighted_D.fill(0.0)

    def _add(self, uploads: Sequence[CachedUpload], sign: int) -> None:
        rows = [self._layout.floats(kept.row) for kept in uploads]

        def add(columns: slice) -> None:
            total = self._sum_F[columns]
            weighted = None if self._weighted_D is None else self._weighted_D[columns]
            term = np.empty(len(total))
            for row, kept in zip(rows, uploads, strict=True):
                np.copyto(term, row[columns])
                (np.add if sign > 0 else np.subtract)(total, term, out=total)
                if weighted is not None:
                    weighted += sign * self._smoothness(kept.child) * term[: len(weighted)]

        def release() -> None:
            for kept in uploads:
                kept.release()

        over(list(cut(0, len(self._sum_F))), add, release=release)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The cached uploads of the round's participants: G, u and q, their losses, and their owners.

    `of[p]`: participant p's candidates as rows of G, newest first. `fixed`: the number of other children with uploads,
    and `fixed_L` the sum of their L. `smooth_C`: L of each candidate's child; `weighted_C`: v.
    """

    products: Gram
    losses_C: Doubles
    of: Sequence[Sequence[int]]
    fixed: int
    smooth_C: Doubles
    weighted_C: Doubles
    fixed_L: float

    def beside(self, found: list[int]) -> Candidates:
        """Return the candidates beside what was fixed and these ones, which are fixed from now on."""
        g_KK, u_K, smooth_K = self.products.offsets_KK, self.products.along_K, self.smooth_C[found]
        square = self.products.square + float(2 * u_K[found].sum() + g_KK[np.ix_(found, found)].sum())
        return replace(
            self,
            products=Gram(g_KK, u_K + g_KK[:, found].sum(axis=1), square),
            fixed=self.fixed + len(found),
            weighted_C=self.weighted_C + g_KK[:, found] @ smooth_K,
            fixed_L=self.fixed_L + float(smooth_K.sum()),
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """Each participant's selected candidate, and the products with the sum of all selected uploads."""

    chosen: tuple[int, ...]
    products: Gram

    def distances(self, rows: Sequence[int], n: int) -> list[float]:
        """Return ||x_c - xbar|| of candidates, for the mean xbar of all n selected uploads."""
        g, u, q = self.products.offsets_KK, self.products.along_K, self.products.square
        return [float(np.sqrt(max(g[c, c] - 2 * u[c] / n + q / n**2, 0.0))) for c in rows]


def group(participants: int, groups: int, draw: np.random.Generator) -> list[list[int]]:
    """Return the participants 0 .. P-1, shuffled, in groups of near-equal size; the first P mod B are larger by one."""
    return [part.tolist() for part in np.array_split(draw.permutation(participants), min(groups, participants))]


def plan(candidates: Candidates, groups: Sequence[Sequence[int]]) -> Choice:
    """Return each participant's selection: one group after another, without the groups that follow."""
    chosen = [-1] * len(candidates.of)
    for members in groups:
        found = search(candidates, [candidates.of[p] for p in members])
        for p, c in zip(members, found, strict=True):
            chosen[p] = c
        candidates = candidates.beside(found)
    return Choice(tuple(chosen), candidates.products)


def search(candidates: Candidates, members: Sequence[Sequence[int]]) -> list[int]:
    """Return the candidate of each member whose combination minimises J, n = fixed + members.

    Combinations run from all newest to all oldest. Of those within 1e-12 of the minimum the first one is returned.
    """
    n, products, losses_C = candidates.fixed + len(members), candidates.products, candidates.losses_C
    g_CC, u_C, v_C, smooth_C = products.offsets_KK, products.along_K, candidates.weighted_C, candidates.smooth_C
    squares_C = np.diagonal(g_CC)
    share = (candidates.fixed_L + sum(float(smooth_C[own[0]]) for own in members)) / n  # mean L
    spread_C = (
        smooth_C * squares_C - (2 * (v_C + smooth_C * (u_C + squares_C)) - share * (2 * u_C + squares_C)) / n
    ) / (2 * n)
    pair_C = (smooth_C - share / 2) / n**2  # half of each unordered pair's: the other half is the other one's
    values = np.zeros(1)
    pulls = np.zeros((1, len(losses_C)))  # [combinations, C]: those of the candidates chosen so far
    scale = share / 2 * products.square / n**2
    for own in map(list, members):
        pull = pulls[:, own]
        step = losses_C[own] / n + spread_C[own] - pull
        scale += float(np.abs(losses_C[own] / n).max() + np.abs(spread_C[own]).max() + np.abs(pull).max())
        values = (values[:, None] + step).ravel()
        pulls = (pulls[:, None, :] + (pair_C[own][:, None] + pair_C) * g_CC[own]).reshape(len(values), -1)
    best = int(np.argmax(values <= values.min() + TIE * scale))
    chosen: list[int] = []
    for own in map(list, reversed(members)):
        best, place = divmod(best, len(own))
        chosen.append(own[place])
    return chosen[::-1]


class CachedUpload:
    """One upload of a child, the round of its arrival, and its loss. The row is read-only."""

    def __init__(self, child: str, r: int, loss: float, *, row: Row | None, path: Path | None) -> None:
        self.name = f"{child}@{r}"
        self.child = child
        self.r = r
        self.loss = loss
        self.path = path
        self._memory = row
        self._mapped: mmap.mmap | None = None

    @property
    def in_memory(self) -> bool:
        """Whether the row is held in memory."""
        return self._memory is not None

    @property
    def row(self) -> Row:
        """The row, uint8 [row_bytes], mapped from its file if it is not in memory."""
        if self._memory is not None:
            return self._memory
        if self._mapped is None:
            assert self.path is not None
            with self.path.open("rb") as file:
                self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(self._mapped, np.uint8)

    def release(self) -> None:
        """Release the pages that were read from a file."""
        if self._mapped is not None:
            self._mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap the file as soon as the row has no more references."""
        self._mapped = None


class UploadCache:
    """Storage of uploads: up to `memory_bytes` in memory, the others in a folder.

    Without a folder all uploads are kept in memory. Files of an earlier process are removed from the folder.
    """

    def __init__(self, folder: Path | None, *, row_bytes: int, memory_bytes: float) -> None:
        self._folder = folder
        self._row_bytes = row_bytes
        self._memory_bytes = memory_bytes
        self._held = 0
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            with writing(folder):
                folder.mkdir(parents=True)

    def keep(self, child: str, r: int, row: Row, *, loss: float) -> CachedUpload:
        """Copy an upload. Raises StorageFailed if the file cannot be written."""
        if (folder := self._folder_beyond_memory()) is None:
            self._held += self._row_bytes
            return CachedUpload(child, r, loss, row=row.copy(), path=None)
        path = folder / f"{child}@{r}"
        _write(path, row)
        return CachedUpload(child, r, loss, row=None, path=path)

    def drop(self, kept: CachedUpload) -> None:
        """Remove an upload."""
        if kept.in_memory:
            self._held -= self._row_bytes
        if kept.path is not None:
            kept.path.unlink(missing_ok=True)

    def save(self, folder: Path, uploads: Iterable[CachedUpload]) -> None:
        """Save uploads to another folder by hard links; a written file never changes."""
        for kept in uploads:
            if kept.path is None and self._folder is not None:
                _write(self._folder / kept.name, kept.row)
                kept.path = self._folder / kept.name
            if kept.path is None:
                _write(folder / kept.name, kept.row)
            else:
                _link(kept.path, folder / kept.name)

    def restore(self, folder: Path, child: str, r: int, *, loss: float) -> CachedUpload:
        """Restore a saved upload. Raises OSError, or ValueError if its size differs."""
        path = folder / f"{child}@{r}"
        if path.stat().st_size != self._row_bytes:
            raise ValueError(f"{path} is not a model of {self._row_bytes} bytes")
        if (own := self._folder_beyond_memory()) is None:
            return self.keep(child, r, np.fromfile(path, np.uint8), loss=loss)
        _link(path, own / path.name)
        return CachedUpload(child, r, loss, row=None, path=own / path.name)

    def _folder_beyond_memory(self) -> Path | None:
        return None if self._held + self._row_bytes <= self._memory_bytes else self._folder


def _write(path: Path, row: Row) -> None:
    partial = path.with_name(path.name + PARTIAL)
    with writing(path):
        with partial.open("wb") as file:  # not synced: the files of an earlier process are removed
            file.write(row.data)
        os.replace(partial, path)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        pass  # of a restoration that failed; a written file never changes
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
