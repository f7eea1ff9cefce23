"""The scores of a run's models, of the cloud and of devices, and what a run does by them.

The cloud evaluates a model beside the next global round, and devices score the one that they
receive with it. So a row's scores are complete when the next global round closes, and what a run
does by them begins after it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Final

from fedstrata.cloud import checkpoint
from fedstrata.cloud.evaluator import Beginning, EvaluationResult, evaluated
from fedstrata.cloud.records import HONEST, PERSONALISED, GlobalRoundRecord, device_columns
from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.host.offload import offload
from fedstrata.common.metrics import Metrics, NodeLabels
from fedstrata.common.model.layout import Row
from fedstrata.common.processes.shared_rows import new_row
from fedstrata.common.runtime.round import Observe
from fedstrata.common.settings.stopping import Course, StopReason, check_evaluated
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.settings.training import ACCURACY
from fedstrata.common.training.scores import ScoreSums, distribution, summed, unpacked

LABELS: Final = NodeLabels("cloud", CLOUD)
# of an evaluation, beside other_scores
ROW_FACTS: Final = ("accuracy", "loss", "mixed_accuracy", "mixed_loss")

Evaluate = Callable[[int, Row], Awaitable[EvaluationResult | None]]
Write = Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A row of rounds.csv whose scores are awaited: of the cloud, by `evaluating`, and of the
    devices.

    `row`: its model, uint8 [row_bytes], if it may have to be kept.
    """

    record: GlobalRoundRecord
    row: Row | None
    evaluating: asyncio.Task[list[EvaluationResult]] | None
    by_devices: bool


class RoundScores:
    """The scores of one run's models. `write` waits while the disk is full.

    `ended`: why the run ends, by all scores that were complete when its last global round closed.
    """

    def __init__(
        self,
        folder: RunFolder,
        beginning: Beginning,
        *,
        evaluate: Evaluate,
        metrics: Metrics,
        observe: Observe,
        write: Write,
    ) -> None:
        self._folder = folder
        self._experiment = experiment = folder.experiment
        evaluates = beginning.evaluates or experiment.evaluation.on_devices
        check_evaluated(experiment.stop, evaluates=evaluates)
        self.evaluates = evaluates
        self._beginning = beginning
        self._test = evaluate
        self._metrics = metrics
        self._observe = observe
        self._write = write
        self._columns = device_columns(experiment)
        self._pending: _Pending | None = None
        self._course = Course(experiment.stop, experiment.score)
        self.ended: StopReason | None = None
        self._complete = self._course.save()
        self._last: EvaluationResult | None = None
        self._left_out: set[str] = set()  # the nodes that a warning has named
        self._lacks_scores = False  # a warning has said that no device has one

    @property
    def awaits_devices(self) -> bool:
        """Whether devices have a model to score."""
        return self._pending is not None and self._pending.by_devices

    @property
    def best_round(self) -> int:
        """The global round of the best model so far."""
        return self._course.best

    def due(self, global_round: int, *, last: bool) -> bool:
        """Return whether a global round's model is scored; `last`: the run ends with it."""
        return self.evaluates and (last or global_round % self._experiment.evaluation.every == 0)

    def of(self, global_round: int) -> EvaluationResult | None:
        """Return the scores of a global round's model if they are the last ones; None if it has
        none.
        """
        if self._last is None or self._last.global_round != global_round:
            return None
        return self._last

    def save(self) -> dict[str, Any]:
        """Return the course of the complete rows, in a form that JSON can hold."""
        return self._complete

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Restore what `save` returned."""
        self._course.restore(facts)
        self._settle()

    def _settle(self) -> None:
        """Let the evaluations so far decide: all of them are of complete rows."""
        self.ended = self._course.ended
        self._complete = self._course.save()

    def take_last(self, row: GlobalRoundRecord) -> None:
        """Take note of the last row of an earlier process, if it is complete."""
        if self.due(row.global_round, last=row.score is not None):
            found = self._result_of(row)
            self._improves(found)
            self._settle()
            if self._experiment.evaluation.on_cloud or row.scored:
                self._last = found

    def _result_of(self, row: GlobalRoundRecord) -> EvaluationResult:
        """Return a row's evaluation, whose numbers that are not finite are NaN."""
        names = self._experiment.score.columns.values()
        more = [_or_nan(row.other_scores.get(name)) for name in names]
        return EvaluationResult(row.global_round, _or_nan(row.score), _or_nan(row.loss), more)

    def by_devices(self, reports: Sequence[ChildReport]) -> dict[str, float | None]:
        """Return the devices' columns of a new row; known are those of the models that they
        trained, by its reports.
        """
        columns: dict[str, float | None] = dict.fromkeys(chain(*self._columns.values()))
        if PERSONALISED in self._columns:
            sums = [each.work.tests.trained for each in reports if each.work.tests is not None]
            columns |= self._over_devices(PERSONALISED, sums)[0]
        return columns

    def expect(
        self,
        record: GlobalRoundRecord,
        row: Row,
        mixed: Row | None,
        *,
        by_cloud: bool,
        by_devices: bool,
    ) -> None:
        """Expect the scores of a global round's model: of the devices with the next results, and
        those of the cloud.

        The cloud starts here. It evaluates `mixed`, the mean after mixing, too, if it differs.
        """
        rows = []
        kept: Row | None = None
        if by_cloud or self._experiment.stop.best:
            kept = _copied(row)
            rows.append(kept)
        if mixed is not None and by_cloud:
            rows.append(mixed)

        async def evaluate() -> list[EvaluationResult]:
            every = [await self._test(record.global_round, row) for row in rows]
            found = [each for each in every if each is not None]
            if len(found) < len(rows):  # own code scores not in this round
                return []
            await self._improved(found[0], kept)
            return found

        evaluating = asyncio.create_task(evaluate(), name="evaluate") if by_cloud else None
        self._pending = _Pending(record, kept, evaluating, by_devices)

    def _improves(self, found: EvaluationResult) -> bool:
        return self._course.take(found.global_round, score=found.score, loss=found.loss)

    async def _improved(self, found: EvaluationResult, row: Row | None) -> None:
        """Take note of an evaluation; if wanted, keep the model of an improvement beside the next
        global round.
        """
        if self._improves(found) and row is not None and self._experiment.stop.best:
            save = partial(
                checkpoint.save_best,
                self._folder.checkpoints,
                found.global_round,
                layout=self._beginning.layout,
                row=row,
                run=self._folder.run,
                rounds_back=self._experiment.cloud.rounds_back,
                frozen=self._beginning.frozen,
            )
            await self._write(lambda: offload(save))

    async def finish(self, reports: Sequence[ChildReport], *, last: bool) -> None:
        """Wait for the running evaluation, and add it and the devices' scores, in these reports, to
        their row.

        `last`: the row is the run's last one.
        """
        if (pending := self._pending) is None:
            return
        score = self._experiment.score
        record = pending.record
        before = self._last
        mixed: Sequence[EvaluationResult] = ()
        found: EvaluationResult | None = None
        scored = [] if pending.evaluating is None else await pending.evaluating
        if scored:
            found, *mixed = scored
        self._pending = None
        if pending.by_devices:
            by_devices, total = self._scores_of(record.global_round, reports)
            record = replace(record, by_devices={**record.by_devices, **by_devices})
            if total is not None and not self._experiment.evaluation.on_cloud:
                first, *further = total.by(score.names)
                found = EvaluationResult(record.global_round, first, total.mean_loss, further)
                await self._improved(found, pending.row)
            elif total is None:
                self._without_scores(record.global_round)
        self._settle()
        facts: dict[str, Any] = {}
        if found is not None:
            self._last = found
            facts |= self._exported(found)
        for other in mixed:
            for key, value in evaluated(score, replace(other, more=())).items():
                facts[f"mixed_{key}"] = value
        scores = {key: facts.get(key, value) for key, value in record.other_scores.items()}
        of_row = {key: value for key, value in facts.items() if key in ROW_FACTS}
        record = replace(record, **of_row, other_scores=scores)
        self._folder.complete_round(record)
        if record.score is not None:
            shown = evaluated(score, None) | {"score": record.score, "loss": record.loss} | facts
            self._observe(
                "evaluated", {"global_round": record.global_round, **shown, **record.by_devices}
            )
        if found is None:
            return
        again = before is not None and not math.isfinite(before.loss)
        if not math.isfinite(found.loss) and (not again or last):
            reason = (
                f"the test loss after global round {record.global_round} is {found.loss}: "
                "training has diverged"
            )
            self._observe("warning", {"global_round": record.global_round, "reason": reason})

    def _exported(self, found: EvaluationResult) -> dict[str, Any]:
        """Export the scores of a model, and the success of attacks on it; return them as facts of
        its row.
        """
        score = self._experiment.score
        metrics = self._metrics
        if score.name == ACCURACY:
            metrics.accuracy.labels(*LABELS).set(found.score)
        for name, value in zip(score.names, (found.score, *found.more), strict=True):
            metrics.score.labels(*LABELS, name).set(value)
        metrics.test_loss.labels(*LABELS).set(found.loss)
        facts: dict[str, Any] = evaluated(score, found)
        targeted = self._experiment.attackers.targeted if found.attacks else {}
        for (column, adversary), value in zip(targeted.items(), found.attacks, strict=True):
            attack = adversary.settings.attack.name
            metrics.attack_success.labels(*LABELS, column, attack).set(value)
            facts[column] = value
        return facts

    def leave_out(self, nodes: Mapping[str, str]) -> None:
        """Name nodes whose scores are left out, each with the reason, once in a run; plans have
        them in each round.
        """
        for name, reason in nodes.items():
            if name not in self._left_out:
                self._left_out.add(name)
                text = f"{name}'s scores are left out: {reason}"
                self._observe("warning", {"node": name, "reason": text})

    def _without_scores(self, global_round: int) -> None:
        """Note that no device has a score of a model, which so is no improvement where the cloud
        has none either.
        """
        if not self._lacks_scores:
            reason = f"no device has a score of the model after global round {global_round}"
            self._observe("warning", {"global_round": global_round, "reason": reason})
        self._lacks_scores = True
        if not self._experiment.evaluation.on_cloud:
            self._improves(EvaluationResult(global_round, math.nan, math.nan))

    def _scores_of(
        self, global_round: int, reports: Sequence[ChildReport]
    ) -> tuple[dict[str, float | None], ScoreSums | None]:
        """Record the devices' scores of a global round's model; return the columns of its row, and
        the sums over all.

        Reports are on the model with which their global round began, the one of the round before.
        """
        everybody = []
        honest = []
        for each in reports:
            if each.work.tests is not None and each.work.tests.received is not None:
                everybody.append(each.work.tests.received)
                if not self._experiment.attackers.lies(each.name):
                    honest.append(each.work.tests.received)
        self._folder.score_devices(global_round, reports)
        kind = next(iter(self._columns))
        found, total = self._over_devices(kind, everybody)
        if HONEST in self._columns:
            found |= self._over_devices(HONEST, honest)[0]
        if total is not None and total.classes:
            counts = unpacked(total.classes)
            by_class = {"samples": counts[::2], "right": counts[1::2]}
            self._observe("classes", {"global_round": global_round, **by_class})
        return found, total

    def _over_devices(
        self, kind: str, each: Sequence[ScoreSums | None]
    ) -> tuple[dict[str, float | None], ScoreSums | None]:
        """Return the columns of models of a kind, by the sums of each device that scored one, and
        the sums over all.
        """
        score = self._experiment.score
        sums = [found for found in each if found is not None]
        total = summed(sums)
        over = distribution([one.by(score.names)[0] for one in sums], higher=score.higher)
        values: dict[str, float | None] = {"scored": len(sums)}
        if total is not None:
            first, *further = total.by(score.names)
            values |= {"samples": total.samples, "loss": total.mean_loss, "score": first}
            values |= zip(score.columns.values(), further, strict=True)
        if over is not None:
            spread = {"mean": over.mean, "worst": over.worst, "spread": over.spread}
            special = {
                PERSONALISED: self._metrics.personalised_score,
                HONEST: self._metrics.honest_score,
            }
            metric = special.get(kind, self._metrics.devices_score)
            for statistic, value in spread.items():
                metric.labels(*LABELS, score.name, statistic).set(value)
            values |= spread
        names = [column.removeprefix(f"{kind}_") for column in self._columns[kind]]
        return {f"{kind}_{name}": values.get(name) for name in names}, total

    async def keep_best(self) -> None:
        """Let the run's folder have the best model beside the final one."""
        best = checkpoint.best_of(self._folder.checkpoints, self._course.best)
        if not self._experiment.stop.best or not self._course.best:
            return
        copy = partial(checkpoint.copy_best, best, self._folder.path / "best.safetensors")
        try:
            await self._write(lambda: offload(copy))
        except InvalidExperiment as error:
            reason = f"the best model, of global round {self._course.best}, is lost: {error}"
            self._observe("warning", {"reason": reason})


def _or_nan(number: float | None) -> float:
    if number is None:
        return math.nan
    return number


def _copied(row: Row) -> Row:
    """Return a copy, which the evaluator's process reads where it is."""
    copy = new_row(row.size)
    copy[:] = row
    return copy
