"""A run's global rounds at the cloud, over a network or in one process: from the first model or a checkpoint on.

Each: dispatch, wait, aggregate, decide the epochs, evaluate in parallel with the next one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, starmap
from math import inf
from pathlib import Path
from typing import Any, Final

from cloud import checkpoint, tempo
from cloud.checkpoint import RunState
from cloud.evaluator import Beginning, EvaluationResult, evaluated
from cloud.privacy import PrivacyLedger
from cloud.records import PERSONALISED, GlobalRoundRecord, device_columns, tier_bytes
from cloud.results import RunFolder
from common.accounting.child_report import ChildReport
from common.errors import InvalidExperiment, RunFailed
from common.experiment import lint
from common.experiment.stopping import Course, StopReason, check_evaluated
from common.experiment.topology import CLOUD
from common.experiment.training import ACCURACY
from common.host.files import replacing, until_written
from common.host.offload import offload
from common.methods import aggregator
from common.methods.rule import Aggregated
from common.methods.selection import Choose, ClientSelection
from common.methods.statistics import tensor_distances
from common.metrics import Metrics, NodeLabels
from common.model.layout import Row
from common.model.refinement import Refiner
from common.model.scores import ScoreSums, distribution, summed, unpacked
from common.protocol.limits import plans_of
from common.protocol.messages import Result
from common.randomness import Purpose, generator
from common.runtime.refining import run_refining
from common.runtime.round import NUMBERS, Children, ClosedRound, Observe, run_round, unreported
from common.runtime.world import REAL, World
from common.storage.spool import Spool

LABELS: Final = NodeLabels("cloud", CLOUD)
LINKS_S: Final = 5.0  # between two writes of links.csv, which has a row for each link
LINKS_SHARE: Final = 0.02  # of the time, if it takes long: of thousands of devices
ROW_FACTS: Final = ("accuracy", "loss", "mixed_accuracy", "mixed_loss")  # of an evaluation, beside other_scores
SPREAD_MOST: Final = 0.37  # measured on digits; up to 0.15 was healthy

Evaluate = Callable[[int, Row], Awaitable[EvaluationResult]]


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A row of rounds.csv whose scores are awaited: of the cloud, by `evaluating`, and of the devices.

    `row`: its model, uint8 [row_bytes], if it may have to be kept.
    """

    record: GlobalRoundRecord
    row: Row | None
    evaluating: asyncio.Task[list[EvaluationResult]] | None
    by_devices: bool


class GlobalRounds:
    """One run's global rounds, from the initial model, that of `beginning`, to the last one.

    `spool`: where the rule keeps rows. `choose`: a client selection, as recorded.
    """

    def __init__(
        self,
        folder: RunFolder,
        beginning: Beginning,
        *,
        spool: Spool,
        down: Children,
        evaluate: Evaluate,
        metrics: Metrics,
        observe: Observe,
        choose: Choose | None = None,
        refiner: Refiner | None = None,
        world: World = REAL,
    ) -> None:
        self._folder = folder
        self._experiment = experiment = folder.experiment
        self._beginning = beginning
        check_evaluated(experiment.stop, evaluates=beginning.evaluates or experiment.evaluation.on_devices)
        self._layout = layout = beginning.layout
        self._row = beginning.row
        tier = experiment.tier_below(CLOUD)
        self._rule = rule = aggregator.build(
            tier.aggregation,
            layout=layout,
            node=CLOUD,
            seed=experiment.seed,
            measures=True,
            rows=partial(spool.memory, row_bytes=layout.row_bytes, resident_mb=experiment.transfer.resident_mb),
            folder=folder.path / "cache",
            children=len(experiment.tree.children[CLOUD]),
            training=experiment.training,
            learning_rate=experiment.learning_rate_in,
            rounds_below=experiment.rounds_below(CLOUD),
            refiner=refiner,
            bound=tier.norm_bound,
            privacy=tier.privacy,
            secret=partial(spool.secret, world.noise),
            hides_uploads=experiment.cloud.epoch_control.name == "fixed",  # else it reads them
        )
        rule.begin(self._row)
        self._down = down
        self._privacy = PrivacyLedger(experiment, layout)
        tree = experiment.tree
        chosen, named = rule.choose or choose, len(tree.children[CLOUD])
        self._selection = ClientSelection(tier, seed=experiment.seed, node=CLOUD, choose=chosen, named=named)
        below = {child: (child, *names) for child, names in tree.below_each(CLOUD).items()}
        self._run = partial(run_round, down, tier, self._selection, rule)
        self._devices = {child: [name for name in names if name not in tree.children] for child, names in below.items()}
        self._aggregators = {child: set(names) & tree.children.keys() for child, names in below.items()}
        self._test = evaluate
        self._refiner = refiner
        self._columns = device_columns(experiment)
        self._metrics = metrics
        self._observe = observe
        start_epochs = dict.fromkeys(down.peers, experiment.training.epochs)
        self._state = RunState(folder.run, experiment.digest, 0, 0.0, start_epochs)
        self._pending: _Pending | None = None
        self._course = Course(experiment.stop, experiment.score)
        self._ended: StopReason | None = None
        self._mark = 0.0
        self._links_at = -inf  # when links.csv is written next
        self._bytes: Mapping[str, int] = self._tier_bytes()  # up to the last global round
        self._last: EvaluationResult | None = None

    def resume(self) -> None:
        """Continue from the last checkpoint that can be read, with a warning for each other one.

        Raises InvalidExperiment if that is impossible.
        """
        self._state = state = self._newest_state()
        if state.digest != self._experiment.digest:
            problem = "its experiment was changed"
            raise InvalidExperiment("--resume", str(self._folder.path), problem, "Restore the file.")
        self._selection.restore(state.selection)
        self._privacy.restore(state.privacy)
        self._metrics.round.labels(*LABELS).set(state.global_round)
        written = self._folder.forget_after(state.global_round)
        self._folder.restore(self._down.ledger)
        self._bytes = self._tier_bytes()
        evaluation, due = self._experiment.evaluation, self._evaluates(state.global_round)
        last = written[-1] if written else None
        self._take(written[:-1])
        # A round that is repeated brings the scores of the devices again.
        by_devices = due and evaluation.on_devices and not (self.complete and last and last.scored is not None)
        if last is not None and not (by_devices and not evaluation.on_cloud):
            self._take([last])
        if last is not None and due and (by_devices or last.score is None):
            self._evaluate(last, self._rule.mixed, by_cloud=evaluation.on_cloud and last.score is None)

    def _take(self, rows: Sequence[GlobalRoundRecord]) -> None:
        """Take note of earlier evaluations."""
        for row in rows:
            if row.score is not None and row.loss is not None:
                self._course.take(row.global_round, score=row.score, loss=row.loss)
        self._ended = self._course.ended

    def introduce(self, *, metrics_address: str = "") -> None:
        """Record the run's facts, and report them and the warnings about its experiment and data."""
        experiment, layout = self._experiment, self._layout
        # The size of a model as fp32; together with links.csv it shows the savings of the codecs.
        self._folder.note(model_bytes=layout.row_bytes, partition=self._beginning.partition)
        if self._beginning.initial:
            self._folder.note(initial={"model": experiment.model.initial, "content": self._beginning.initial})
        self._observe(
            "run",
            {
                "run": self._folder.run,
                "folder": str(self._folder.path),
                "experiment": experiment.name,
                "global_rounds": experiment.rounds,
                "done": self._state.global_round,
                "nodes": experiment.count_by_kind(),
                "model": experiment.model.name,
                "model_bytes": layout.row_bytes,
                "score": experiment.score.name,
                "metrics": metrics_address,
            },
        )
        for reason in (*lint.warnings(experiment), *self._beginning.notes):
            self._observe("warning", {"reason": reason})

    @property
    def elapsed_s(self) -> float:
        """The seconds of the global rounds so far."""
        return self._state.elapsed_s

    @property
    def _stopped(self) -> StopReason | None:
        """Why the run ends before its last global round, None while it goes on."""
        if 0 < self._state.global_round < self._experiment.rounds and self._privacy.spent(self._state.epochs):
            return StopReason.PRIVACY
        return self._ended

    @property
    def complete(self) -> bool:
        """Whether no global round remains."""
        return self._state.global_round >= self._experiment.rounds or self._stopped is not None

    @property
    def needs_children(self) -> bool:
        """Whether a global round remains, or devices have the last model to score."""
        return not self.complete or (self._pending is not None and self._pending.by_devices)

    async def run(self) -> Path:
        """Run the remaining global rounds, or until `[stop]` ends them; return the final model's path."""
        folder, experiment = self._folder, self._experiment
        folder.begun = True
        self._mark = self._down.now()
        while not self.complete:
            await self._run_round()
        await self._finish_evaluation(await self._score_last())
        path = folder.path / "model.safetensors"
        facts = {"run": folder.run, "experiment": experiment.name, "digest": experiment.digest}
        save = partial(
            checkpoint.save_model, path, layout=self._layout, row=self._row, facts=facts, frozen=self._beginning.frozen
        )
        await self._written(lambda: offload(save))
        await self._keep_best()
        self._observe(
            "finished",
            {
                "global_round": self._state.global_round,
                "elapsed_s": self._state.elapsed_s,
                **({"stopped": reason.value} if (reason := self._stopped) else {}),
                **{f"epsilon_{tier}": epsilon for tier, epsilon in self._privacy.epsilons.items()},
                **({"best_round": self._course.best} if experiment.stop.best else {}),
                **evaluated(experiment.score, self._last),
                "model": str(path),
                "model_bytes": self._layout.row_bytes,
                **self._tier_bytes(),
            },
        )
        return path

    def _newest_state(self) -> RunState:
        """Load the newest checkpoint that can be read, if there is any. Raises InvalidExperiment."""
        for path in (found := checkpoint.newest_first(self._folder.checkpoints)):
            try:
                return checkpoint.load(path, layout=self._layout, row=self._row, rule=self._rule)
            except InvalidExperiment as error:
                if path == found[-1]:
                    raise
                self._observe("warning", {"reason": f"{error} The run continues from the checkpoint before it."})
        return self._state

    async def _run_round(self) -> None:
        state, r = self._state, self._state.global_round
        started, c = self._down.now(), self._experiment.training.epochs
        last = r + 1 == self._experiment.rounds
        dispatch, closed_round = await self._run(r, (r, 0), epochs=c, epochs_of=state.epochs, last=last)
        selected = dispatch.selected
        outcome = await run_refining(partial(self._rule.aggregate, r, closed_round.uploads), self._refiner)
        self._selection.observe(r, selected, closed_round.facts, unused=outcome.left_out, refused=closed_round.refused)
        decided = self._selection.facts(selected) | closed_round.decided(r, unreported=unreported(self._down))
        outcome = replace(outcome, facts={**outcome.facts, **decided})
        for name, reason in outcome.left_out.items():
            self._observe("refused", {"node": name, "reason": reason})
        self._row = self._rule.model
        omegas = await offload(partial(self._omegas, closed_round, outcome))
        epochs = state.epochs | self._next_epochs(omegas)
        closed = closed_round.timeline.closed or started
        aggregated = self._down.now()
        await self._finish_evaluation(closed_round.results)
        ended = self._down.now()
        # "record": the writes of the last global round.
        phases = {"record": started - self._mark} | closed_round.timeline.phases()
        phases["dispatch"] += closed_round.timeline.opened - started
        phases |= {"aggregate": aggregated - closed, "evaluate": ended - aggregated}
        phases = {phase: round(seconds, 6) for phase, seconds in phases.items()}  # equal in the file and the metrics
        elapsed_s = state.elapsed_s + ended - self._mark
        self._mark = ended
        self._state = RunState(state.run, state.digest, state.global_round + 1, elapsed_s, epochs)
        if self._privacy.settings:
            self._privacy.take(selected, self._plans_below(closed_round.results), state.epochs)
        record = self._record(closed_round, outcome, phases=phases, epochs=state.epochs, omegas=omegas)
        if self._evaluates(self._state.global_round):
            by_cloud = self._experiment.evaluation.on_cloud
            self._evaluate(record, await offload(lambda: self._rule.mixed) if by_cloud else None, by_cloud=by_cloud)
        await self._written(self._write)

    async def _score_last(self) -> Mapping[str, Result]:
        """Let devices score the run's last model, those that a further global round would select; return their results.

        Its bytes are in links.csv, and in no row of rounds.csv. Its seconds are off the clock, as the cloud's are.
        """
        if self._pending is None or not self._pending.by_devices:
            return {}
        r = self._state.global_round
        dispatch, closed_round = await self._run(r, (r, 0), epochs=0, last=True)
        decided = closed_round.decided(r, unreported=unreported(self._down))
        plans = {CLOUD: [self._selection.facts(dispatch.selected) | decided]}
        for node, (plan, *_) in (plans | self._plans_below(closed_round.results)).items():
            self._folder.event("scoring", {"global_round": r, "node": node, "local_round": 0, **plan})
        return closed_round.results

    def _plans_below(self, results: Mapping[str, Result]) -> dict[str, list[dict[str, Any]]]:
        """Return the decisions of the aggregating nodes below the cloud."""
        every = ((child, *plan) for child, result in results.items() for plan in plans_of(result).items())
        return {node: found for child, node, found in every if node in self._aggregators.get(child, ())}

    async def _written(self, write: Callable[[], Awaitable[None]]) -> None:
        """Write to the run's folder; wait while the disk is full or read-only. Raises StorageFailed after `idle_s`."""
        await until_written(
            write,
            patience_s=self._experiment.transfer.idle_s,
            warn=lambda reason: self._observe("warning", {"reason": reason}),
        )

    async def _write(self) -> None:
        """Write the tables, and what is due after a global round. Raises StorageFailed."""
        state, folder = self._state, self._folder
        folder.catch_up()
        last = state.global_round == self._experiment.rounds or self._stopped is StopReason.PRIVACY
        due = last or state.global_round % self._experiment.cloud.checkpoint_every == 0
        if (begun := self._down.now()) >= self._links_at:
            await offload(folder.write_of_links(self._down.ledger))
            ended = self._down.now()
            self._links_at = ended + max(LINKS_S, (ended - begun) / LINKS_SHARE)
        if due:
            await offload(folder.write_of_ledger(self._down.ledger))
            await offload(self._save)

    def _save(self) -> None:
        """Write a checkpoint, after the rows of its global rounds."""
        self._folder.sync()
        state = replace(self._state, selection=self._selection.save(), privacy=self._privacy.save())
        checkpoint.save(
            self._folder.checkpoints, state, layout=self._layout, row=self._row, rule=self._rule,
            frozen=self._beginning.frozen,
        )  # fmt: skip

    def _omegas(self, closed_round: ClosedRound, outcome: Aggregated) -> dict[str, float]:
        """Return the distances of the children's models to the new mean, as the epoch control measures them."""
        found: Mapping[str, float] = outcome.distances
        if self._experiment.cloud.epoch_control.variant == "plato" and not self._rule.hides_uploads:
            distances_K = tensor_distances(list(closed_round.models.values()), self._rule.model, layout=self._layout)
            found = dict(zip(closed_round.models, distances_K.tolist(), strict=True))
        lost = closed_round.models.keys() - found.keys() - outcome.left_out.keys()
        if lost and self._experiment.cloud.epoch_control.name != "fixed":
            raise RunFailed(f"Tempo: the rule has no distance of {', '.join(sorted(lost))} to the next model")
        return {name: found[name] for name in self._down.peers if name in found}

    def _next_epochs(self, omegas: Mapping[str, float]) -> dict[str, int]:
        """Return the epochs of each reporting child in the next global round."""
        state, control = self._state, self._experiment.cloud.epoch_control
        if control.name == "fixed":
            return {}
        chance = generator(self._experiment.seed, Purpose.EPOCHS, CLOUD, state.global_round)
        c, samples = self._experiment.training.epochs, self._down.samples
        return tempo.decide(control, omegas, c=c, ran=state.epochs, samples=samples, draw=chance)

    def _record(
        self,
        closed_round: ClosedRound,
        outcome: Aggregated,
        *,
        phases: Mapping[str, float],
        epochs: Mapping[str, int],
        omegas: Mapping[str, float],
    ) -> GlobalRoundRecord:
        before, self._bytes = self._bytes, self._tier_bytes()
        names = self._experiment.tree.children[CLOUD]
        results = {name: closed_round.results[name] for name in self._down.peers if name in closed_round.results}
        plans = {CLOUD: [outcome.plan | self._tempo(omegas)]}
        reports = {name: self._device_reports(name, result) for name, result in results.items()}
        for name, result in results.items():
            self._folder.add_devices(self._state.global_round, reports[name])
            found = plans_of(result)
            plans |= {node: made for node, made in found.items() if node in self._aggregators.get(name, ())}
            self._report_numbers({each.name: found[each.name] for each in reports[name] if each.name in found})
        steps = sum(result.steps for result in results.values())
        spreads = self._report_plans(plans)
        trained = [each.tests.trained for each in chain(*reports.values()) if each.tests is not None]
        by_devices: dict[str, float | None] = {each: None for columns in self._columns.values() for each in columns}
        if PERSONALISED in self._columns:
            by_devices |= self._over_devices(PERSONALISED, [sums for sums in trained if sums is not None])[0]
        scores = [] if self._experiment.score.name == ACCURACY else ["score", "mixed_score"]
        record = GlobalRoundRecord(
            global_round=self._state.global_round,
            elapsed_s=round(self._state.elapsed_s, 6),
            train_loss=outcome.loss,
            phases=phases,
            sgd_steps=steps,
            path_steps=max(result.path_steps for result in results.values()),
            bytes_={name: count - before[name] for name, count in self._bytes.items()},
            missing=closed_round.missing,
            refused=(*closed_round.refused, *outcome.left_out),
            epochs={name: epochs[name] if name in results else None for name in names},
            omega={name: omegas.get(name) for name in names},
            spread={name: spreads.get(name) for name in (CLOUD, *self._experiment.tree.aggregators)},
            epsilon=self._privacy.epsilons,
            other_scores=dict.fromkeys([*scores, *self._experiment.score.columns.values()]),
            by_devices=by_devices,
        )
        self._folder.add_round(record)
        self._observe("global_round", record.values())
        metrics = self._metrics
        metrics.closed(LABELS, rounds=self._state.global_round)
        metrics.trained(LABELS, outcome.loss)
        metrics.steps.labels(*LABELS).inc(steps)
        self._privacy.export(metrics, LABELS)
        for phase, seconds in phases.items():
            metrics.phase_seconds.labels(*LABELS, phase).inc(seconds)
        for name in names:
            metrics.epochs.labels(*NodeLabels("cloud", name, parent=CLOUD)).set(epochs[name])
        return record

    def _tier_bytes(self) -> dict[str, int]:
        return tier_bytes(self._down.ledger, self._experiment.tier_names)

    def _tempo(self, omegas: Mapping[str, float]) -> dict[str, object]:
        """Return the input and the result of the epoch control."""
        if self._experiment.cloud.epoch_control.name == "fixed":
            return {}
        return {"omegas": dict(omegas), "next_epochs": self._state.epochs}

    def _report_numbers(self, numbers: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Record what the trainers of devices report with each of their results."""
        for node, found in numbers.items():
            for i, each in enumerate(found):
                facts = {"global_round": self._state.global_round, "node": node, "result": i}
                self._folder.event("trained", {**facts, NUMBERS: each.get(NUMBERS, {})})

    def _report_plans(self, plans: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
        """Record each node's aggregation decisions; return the last spread of each multi-model node."""
        global_round = self._state.global_round
        spreads = {}
        for name, found in plans.items():
            for i, plan in enumerate(found):
                self._folder.event("plan", {"global_round": global_round, "node": name, "local_round": i, **plan})
                if "spread" in plan:
                    spreads[name] = float(plan["spread"])
        for name, spread in spreads.items():
            if spread > SPREAD_MOST:
                reason = (
                    f"{name}'s models differ by {spread:.2f} of their size: beyond {SPREAD_MOST} they have collapsed"
                )
                self._observe("warning", {"global_round": global_round, "node": name, "reason": reason})
        return spreads

    def _evaluates(self, global_round: int) -> bool:
        due = global_round == self._experiment.rounds or global_round % self._experiment.evaluation.every == 0
        due = due or (global_round == self._state.global_round and self._stopped is StopReason.PRIVACY)
        return due and (self._beginning.evaluates or self._experiment.evaluation.on_devices)

    def _evaluate(self, record: GlobalRoundRecord, mixed: Row | None, *, by_cloud: bool) -> None:
        """Expect the scores of a global round's model: of the devices with the next results, and those of the cloud.

        The cloud starts here. It evaluates the mean after mixing, too, if it differs.
        """
        evaluation, best = self._experiment.evaluation, self._experiment.stop.best
        rows = [self._row.copy()] if by_cloud or best else []
        rows += [] if mixed is None or not by_cloud else [mixed]

        async def evaluate() -> list[EvaluationResult]:
            found = [await self._test(record.global_round, row) for row in rows]
            await self._improved(found[0], rows[0])
            return found

        evaluating = asyncio.create_task(evaluate(), name="evaluate") if by_cloud else None
        self._pending = _Pending(record, rows[0] if rows else None, evaluating, evaluation.on_devices)

    async def _improved(self, found: EvaluationResult, row: Row | None) -> None:
        """Take note of an evaluation; if wanted, keep the model of an improvement beside the next global round."""
        improved = self._course.take(found.global_round, score=found.score, loss=found.loss)
        if improved and row is not None and self._experiment.stop.best:
            save = partial(
                checkpoint.save_best, self._folder.checkpoints, found.global_round, layout=self._layout, row=row,
                run=self._folder.run, rounds_back=self._experiment.cloud.rounds_back, frozen=self._beginning.frozen,
            )  # fmt: skip
            await self._written(lambda: offload(save))

    async def _finish_evaluation(self, results: Mapping[str, Result]) -> None:
        """Wait for the running evaluation, and add it and the devices' scores, of these results, to their row."""
        if (pending := self._pending) is None:
            return
        score, record, before = self._experiment.score, pending.record, self._last
        mixed: Sequence[EvaluationResult] = ()
        found: EvaluationResult | None = None
        if pending.evaluating is not None:
            found, *mixed = await pending.evaluating
        self._pending = None
        if pending.by_devices:
            by_devices, total = self._scores_of(record.global_round, results)
            record = replace(record, by_devices={**record.by_devices, **by_devices})
            if total is not None and not self._experiment.evaluation.on_cloud:
                first, *further = total.by(score.names)
                found = EvaluationResult(record.global_round, first, total.mean_loss, further)
                await self._improved(found, pending.row)
        self._ended = self._course.ended
        facts: dict[str, Any] = {}
        if found is not None:
            self._last = found
            if score.name == ACCURACY:
                self._metrics.accuracy.labels(*LABELS).set(found.score)
            for name, value in zip(score.names, (found.score, *found.more), strict=True):
                self._metrics.score.labels(*LABELS, name).set(value)
            self._metrics.test_loss.labels(*LABELS).set(found.loss)
            facts |= evaluated(score, found)
        for other in mixed:
            facts |= {f"mixed_{key}": value for key, value in evaluated(score, replace(other, more=())).items()}
        scores = {key: facts.get(key, value) for key, value in record.other_scores.items()}
        of_row = {key: value for key, value in facts.items() if key in ROW_FACTS}
        record = replace(record, **of_row, other_scores=scores)
        self._folder.complete_round(record)
        if record.score is not None:
            shown = (
                evaluated(score, None) | {"score": record.score, "loss": record.loss} | facts | dict(record.by_devices)
            )
            self._observe("evaluated", {"global_round": record.global_round, **shown})
        if found is None:
            return
        again = before is not None and not math.isfinite(before.loss)
        if not math.isfinite(found.loss) and (not again or record.global_round == self._experiment.rounds):
            reason = f"the test loss after global round {record.global_round} is {found.loss}: training has diverged"
            self._observe("warning", {"global_round": record.global_round, "reason": reason})

    def _scores_of(
        self, global_round: int, results: Mapping[str, Result]
    ) -> tuple[dict[str, float | None], ScoreSums | None]:
        """Record the devices' scores of a global round's model; return the columns of its row, and the sums over all.

        Results report on the model with which their global round began, the one of the round before.
        """
        every = chain.from_iterable(starmap(self._device_reports, results.items()))
        reports = [each for each in every if each.tests is not None and each.tests.received is not None]
        self._folder.score_devices(global_round, reports)
        kind = next(iter(self._columns))
        found, total = self._over_devices(kind, [each.tests.received for each in reports if each.tests])
        if total is not None and total.classes:
            counts = unpacked(total.classes)
            by_class = {"samples": counts[::2], "right": counts[1::2]}
            self._observe("classes", {"global_round": global_round, **by_class})
        return found, total

    def _over_devices(
        self, kind: str, each: Sequence[ScoreSums | None]
    ) -> tuple[dict[str, float | None], ScoreSums | None]:
        """Return the columns of models of a kind, by the sums of each device that scored one, and the sums over all."""
        score, sums = self._experiment.score, [found for found in each if found is not None]
        total, over = summed(sums), distribution([one.by(score.names)[0] for one in sums], higher=score.higher)
        values: dict[str, float | None] = {"scored": len(sums)}
        if total is not None:
            first, *further = total.by(score.names)
            values |= {"samples": total.samples, "loss": total.mean_loss, "score": first}
            values |= zip(score.columns.values(), further, strict=True)
        if over is not None:
            spread = {"mean": over.mean, "worst": over.worst, "spread": over.spread}
            metric = self._metrics.personalised_score if kind == PERSONALISED else self._metrics.devices_score
            for statistic, value in spread.items():
                metric.labels(*LABELS, score.name, statistic).set(value)
            values |= spread
        names = [column.removeprefix(f"{kind}_") for column in self._columns[kind]]
        return {f"{kind}_{name}": values.get(name) for name in names}, total

    def _device_reports(self, child: str, result: Result) -> list[ChildReport]:
        """Return the reports on the devices at and below a child, in their order."""
        own = replace(result.work_of(child), parent="" if child in self._devices else CLOUD)
        found = {report.link: report for report in (own, *result.children)}
        entered = [report for report in found.values() if report.parent]
        return [found[device] for device in self._devices.get(child, ()) if device in found] + entered

    async def _keep_best(self) -> None:
        """Let the run's folder have the best model beside the final one."""
        best = checkpoint.best_of(self._folder.checkpoints, self._course.best)
        if not self._experiment.stop.best or not self._course.best:
            return
        if not best.exists():
            self._observe("warning", {"reason": f"the best model, of global round {self._course.best}, is lost"})
            return

        def copy() -> None:
            with replacing(self._folder.path / "best.safetensors") as file:
                file.write(best.read_bytes())

        await self._written(lambda: offload(copy))
