"""A run's global rounds at the cloud, over a network or in one process: from the first model or a
checkpoint on.

Each: dispatch, wait, aggregate, decide the epochs, evaluate in parallel with the next one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from typing import Final

import numpy as np

from fedstrata.cloud import checkpoint, tempo
from fedstrata.cloud.checkpoint import RunState
from fedstrata.cloud.evaluator import Beginning, evaluated
from fedstrata.cloud.node_reports import NodeReports
from fedstrata.cloud.privacy_ledger import PrivacyLedger
from fedstrata.cloud.records import GlobalRoundRecord, tier_bytes
from fedstrata.cloud.round_scores import LABELS, Evaluate, RoundScores
from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.errors import InvalidExperiment, RunFailed
from fedstrata.common.experiment import lint
from fedstrata.common.host.files import until_written
from fedstrata.common.host.offload import offload
from fedstrata.common.methods import aggregator
from fedstrata.common.methods.rule import Aggregated
from fedstrata.common.methods.selection import ClientSelection
from fedstrata.common.methods.statistics import tensor_distances
from fedstrata.common.metrics import NodeLabels
from fedstrata.common.protocol.limits import plans_of
from fedstrata.common.randomness import Purpose, generator
from fedstrata.common.runtime.refining import run_refining
from fedstrata.common.runtime.round import (
    ClosedRound,
    NodeContext,
    Observe,
    rule_context,
    run_round,
    unreported,
)
from fedstrata.common.runtime.secure_round import player
from fedstrata.common.settings.stopping import StopReason
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.settings.training import ACCURACY

LINKS_S: Final = 5.0  # between two writes of links.csv, which has a row for each link
LINKS_SHARE: Final = 0.02  # of the time, if it takes long: of thousands of devices
EMPTY: Final = np.empty(0, np.uint8)


class GlobalRounds:
    """One run's global rounds, from the initial model, that of `beginning`, to the last one.

    The initial model is freed with the first round if its owner keeps `beginning`, which is without
    it.
    """

    def __init__(
        self,
        folder: RunFolder,
        beginning: Beginning,
        context: NodeContext,
        *,
        evaluate: Evaluate,
        observe: Observe,
    ) -> None:
        self._folder = folder
        self._experiment = experiment = folder.experiment
        self._row = beginning.row
        self.beginning = beginning = replace(beginning, row=EMPTY)
        self._layout = layout = beginning.layout
        tier = experiment.tier_below(CLOUD)
        self._rule = rule = aggregator.build(
            tier.aggregation,
            rule_context(
                experiment,
                CLOUD,
                context,
                layout=layout,
                folder=folder.path / "cache",
                measures=True,
            ),
            bound=tier.norm_bound,
            privacy=tier.privacy,
            secret=partial(context.spool.secret, context.world.noise),
            hides_uploads=experiment.cloud.epoch_control.name == "fixed",  # else it reads them
            adversaries=experiment.attackers.near(CLOUD),
        )
        rule.begin(self._row)
        self._down = down = context.down
        self._privacy = PrivacyLedger(experiment, layout)
        tree = experiment.tree
        self._selection = ClientSelection(
            tier,
            seed=experiment.seed,
            node=CLOUD,
            choose=rule.choose or context.choose,
            named=len(tree.children[CLOUD]),
        )
        play = player(experiment, CLOUD, self._layout, noise=context.world.noise)
        self._run = partial(run_round, down, tier, self._selection, rule, play=play)
        self._reports = NodeReports(folder, beginning.notes, observe=observe)
        self._refiner = context.refiner
        self._scores = RoundScores(
            folder,
            beginning,
            evaluate=evaluate,
            metrics=context.metrics,
            observe=observe,
            write=self._written,
        )
        self._metrics = context.metrics
        self._observe = observe
        start_epochs = dict.fromkeys(down.peers, experiment.training.epochs)
        self._state = RunState(folder.run, experiment.digest, 0, 0.0, start_epochs)
        self._mark = 0.0
        self._links_at = -inf  # when links.csv is written next
        self._bytes: Mapping[str, int] = self._tier_bytes()  # up to the last global round

    def resume(self) -> None:
        """Continue from the last checkpoint that can be read, with a warning for each other one.

        Raises InvalidExperiment if that is impossible.
        """
        self._state = state = self._newest_state()
        if state.digest != self._experiment.digest:
            problem = "its experiment was changed"
            raise InvalidExperiment(
                "--resume", str(self._folder.path), problem, "Restore the file."
            )
        self._selection.restore(state.selection)
        self._privacy.restore(state.privacy)
        self._metrics.round.labels(*LABELS).set(state.global_round)
        self._scores.restore(state.course)
        written = self._folder.forget_after(state.global_round)
        self._folder.restore(self._down.ledger)
        self._bytes = self._tier_bytes()
        if written and self._due:
            self._expect_again(written[-1])
        elif written:
            self._scores.take_last(written[-1])

    def _expect_again(self, last: GlobalRoundRecord) -> None:
        """Expect the scores of the last row, as before the interruption: they count once the next
        round has closed.

        Only a run that needs no further round may have them all.
        """
        evaluation = self._experiment.evaluation
        by_cloud = evaluation.on_cloud
        by_devices = evaluation.on_devices
        if self.complete:
            by_cloud = by_cloud and last.score is None
            by_devices = by_devices and last.scored is None
        if by_cloud or by_devices:
            self._scores.expect(
                last, self._row, self._rule.mixed, by_cloud=by_cloud, by_devices=by_devices
            )
        if not by_cloud and not (by_devices and not evaluation.on_cloud):
            self._scores.take_last(last)

    def introduce(self, *, metrics_address: str = "") -> None:
        """Record the run's facts, and report them and the warnings about its experiment and
        data.
        """
        experiment = self._experiment
        layout = self._layout
        # The size of a model as fp32; together with links.csv it shows the savings of the codecs.
        self._folder.note(model_bytes=layout.row_bytes, partition=self.beginning.partition)
        if self.beginning.initial:
            self._folder.note(
                initial={"model": experiment.model.initial, "content": self.beginning.initial}
            )
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
        for reason in (*lint.warnings(experiment), *self.beginning.notes):
            self._observe("warning", {"reason": reason})

    @property
    def elapsed_s(self) -> float:
        """The seconds of the global rounds so far."""
        return self._state.elapsed_s

    @property
    def _stopped(self) -> StopReason | None:
        """Why the run ends before its last global round, None while it goes on."""
        within = 0 < self._state.global_round < self._experiment.rounds
        if within and self._privacy.spent(self._state.epochs):
            return StopReason.PRIVACY
        return self._scores.ended

    @property
    def complete(self) -> bool:
        """Whether no global round remains."""
        return self._state.global_round >= self._experiment.rounds or self._stopped is not None

    @property
    def needs_children(self) -> bool:
        """Whether a global round remains, or devices have the last model to score."""
        return not self.complete or self._scores.awaits_devices

    async def run(self) -> Path:
        """Run the remaining global rounds, or until `[stop]` ends them; return the final model's
        path.
        """
        folder = self._folder
        experiment = self._experiment
        self._check_tested()
        folder.begun = True
        self._mark = self._down.now()
        while not self.complete:
            await self._run_round()
        await self._scores.finish(await self._score_last(), last=True)
        path = folder.path / "model.safetensors"
        facts = {"run": folder.run, "experiment": experiment.name, "digest": experiment.digest}
        save = partial(
            checkpoint.save_model,
            path,
            layout=self._layout,
            row=self._row,
            facts=facts,
            frozen=self.beginning.frozen,
        )
        await self._written(lambda: offload(save))
        await self._scores.keep_best()
        sizes = {"model_bytes": self._layout.row_bytes, **self._tier_bytes()}
        self._observe("finished", {**self._end(), "model": str(path), **sizes})
        return path

    def _end(self) -> dict[str, object]:
        """Return how the run ended."""
        state = self._state
        found: dict[str, object] = {
            "global_round": state.global_round,
            "elapsed_s": state.elapsed_s,
        }
        if self._stopped is not None:
            found["stopped"] = self._stopped.value
        for tier, epsilon in self._privacy.epsilons.items():
            found[f"epsilon_{tier}"] = epsilon
        if self._experiment.stop.best:
            found["best_round"] = self._scores.best_round
        return found | evaluated(self._experiment.score, self._scores.of(state.global_round))

    def _check_tested(self) -> None:
        """Check that a device has test samples if devices score and all are known. Raises
        InvalidExperiment.
        """
        experiment = self._experiment
        tests = self._down.tests
        # Where a parent begins without some, it publishes no number of test samples for those that
        # it does not know.
        varies = any(
            tier.entering or tier.min_available is not None or tier.closing.rule != "all"
            for tier in experiment.tiers
        )
        known = (
            experiment.training.trainer.learns_module
            and not varies
            and tests.keys() >= set(self._down.peers)
        )
        if not experiment.evaluation.on_devices or not known or any(tests.values()):
            return
        problem = "no device has test samples"
        remedy = (
            'Use "cloud", or give devices some: with evaluation.data = "held_out", two '
            "samples or more."
        )
        raise InvalidExperiment("evaluation.at", experiment.evaluation.at, problem, remedy)

    def _newest_state(self) -> RunState:
        """Load the newest checkpoint that can be read, if there is any. Raises
        InvalidExperiment.
        """
        found = checkpoint.newest_first(self._folder.checkpoints)
        for path in found:
            try:
                return checkpoint.load(path, layout=self._layout, row=self._row, rule=self._rule)
            except InvalidExperiment as error:
                if path == found[-1]:
                    raise
                reason = f"{error} The run continues from the checkpoint before it."
                self._observe("warning", {"reason": reason})
        return self._state

    async def _run_round(self) -> None:
        state = self._state
        r = self._state.global_round
        started = self._down.now()
        c = self._experiment.training.epochs
        self._down.give_back_places()
        last = r + 1 == self._experiment.rounds
        dispatch, closed_round = await self._run(
            r, (r, 0), epochs=c, epochs_of=state.epochs, last=last
        )
        selected = dispatch.selected
        aggregate = partial(self._rule.aggregate, r, closed_round.uploads)
        outcome = await run_refining(aggregate, self._refiner)
        facts = closed_round.facts
        refused = closed_round.refused
        self._selection.observe(r, selected, facts, unused=outcome.left_out, refused=refused)
        decided = closed_round.decided(r, unreported=unreported(self._down))
        decided = self._selection.facts(selected) | decided
        outcome = replace(outcome, facts={**outcome.facts, **decided})
        for name, reason in outcome.left_out.items():
            self._observe("refused", {"node": name, "reason": reason})
        self._scores.leave_out(self._reports.unscored(closed_round))
        self._row = self._rule.model
        omegas = await offload(partial(self._omegas, closed_round, outcome))
        epochs = state.epochs | self._next_epochs(omegas)
        closed = closed_round.timeline.closed or started
        aggregated = self._down.now()
        await self._scores.finish(self._reports.of_devices(closed_round.results), last=False)
        ended = self._down.now()
        # "record": the writes of the last global round.
        phases = {"record": started - self._mark} | closed_round.timeline.phases()
        phases["dispatch"] += closed_round.timeline.opened - started
        phases |= {"aggregate": aggregated - closed, "evaluate": ended - aggregated}
        # equal in the file and the metrics
        phases = {phase: round(seconds, 6) for phase, seconds in phases.items()}
        elapsed_s = state.elapsed_s + ended - self._mark
        self._mark = ended
        self._state = RunState(state.run, state.digest, state.global_round + 1, elapsed_s, epochs)
        if self._privacy.settings:
            self._privacy.take(
                selected, self._reports.plans_below(closed_round.results), state.epochs
            )
        record = self._record(
            closed_round, outcome, phases=phases, epochs=state.epochs, omegas=omegas
        )
        if self._due:
            by_cloud = self._experiment.evaluation.on_cloud
            by_devices = self._experiment.evaluation.on_devices
            mixed = await offload(lambda: self._rule.mixed) if by_cloud else None
            self._scores.expect(record, self._row, mixed, by_cloud=by_cloud, by_devices=by_devices)
        await self._written(self._write)

    async def _score_last(self) -> list[ChildReport]:
        """Let devices score the run's last model, those that a further global round would select;
        return the reports.

        Its bytes are in links.csv, and in no row of rounds.csv. Its seconds are off the clock, as
        the cloud's are.
        """
        if not self._scores.awaits_devices:
            return []
        r = self._state.global_round
        dispatch, closed_round = await self._run(r, (r, 0), epochs=0, last=True)
        decided = closed_round.decided(r, unreported=unreported(self._down))
        plans = {CLOUD: [self._selection.facts(dispatch.selected) | decided]}
        for node, (plan, *_) in (plans | self._reports.plans_below(closed_round.results)).items():
            self._folder.event(
                "scoring", {"global_round": r, "node": node, "local_round": 0, **plan}
            )
        self._scores.leave_out(self._reports.unscored(closed_round))
        return self._reports.of_devices(closed_round.results)

    async def _written(self, write: Callable[[], Awaitable[None]]) -> None:
        """Write to the run's folder; wait while the disk is full or read-only. Raises StorageFailed
        after `idle_s`.
        """
        await until_written(
            write,
            patience_s=self._experiment.transfer.idle_s,
            warn=lambda reason: self._observe("warning", {"reason": reason}),
        )

    async def _write(self) -> None:
        """Write the tables, and what is due after a global round. Raises StorageFailed."""
        state = self._state
        folder = self._folder
        folder.catch_up()
        due = self.complete or state.global_round % self._experiment.cloud.checkpoint_every == 0
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
        state = replace(
            self._state,
            selection=self._selection.save(),
            privacy=self._privacy.save(),
            course=self._scores.save(),
        )
        checkpoint.save(
            self._folder.checkpoints, state, layout=self._layout, row=self._row, rule=self._rule,
            frozen=self.beginning.frozen,
        )  # fmt: skip

    def _omegas(self, closed_round: ClosedRound, outcome: Aggregated) -> dict[str, float]:
        """Return the distances of the children's models to the new mean, as the epoch control
        measures them.
        """
        found: Mapping[str, float] = outcome.distances
        if self._experiment.cloud.epoch_control.variant == "plato" and not self._rule.hides_uploads:
            distances_K = tensor_distances(
                list(closed_round.models.values()), self._rule.model, layout=self._layout
            )
            found = dict(zip(closed_round.models, distances_K.tolist(), strict=True))
        lost = closed_round.models.keys() - found.keys() - outcome.left_out.keys()
        if lost and self._experiment.cloud.epoch_control.name != "fixed":
            raise RunFailed(
                f"Tempo: the rule has no distance of {', '.join(sorted(lost))} to the next model"
            )
        return {name: found[name] for name in self._down.peers if name in found}

    def _next_epochs(self, omegas: Mapping[str, float]) -> dict[str, int]:
        """Return the epochs of each reporting child in the next global round."""
        state = self._state
        control = self._experiment.cloud.epoch_control
        if control.name == "fixed":
            return {}
        chance = generator(self._experiment.seed, Purpose.EPOCHS, CLOUD, state.global_round)
        c = self._experiment.training.epochs
        samples = self._down.samples
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
        r = self._state.global_round
        before = self._bytes
        self._bytes = self._tier_bytes()
        tree = self._experiment.tree
        names = tree.children[CLOUD]
        answered = closed_round.results
        results = {name: answered[name] for name in self._down.peers if name in answered}
        plans = {CLOUD: [outcome.plan | self._tempo(omegas)]}
        reports = {name: self._reports.of_child(name, result) for name, result in results.items()}
        for name, result in results.items():
            found = plans_of(result)
            plans |= self._reports.of_aggregators(name, found)
            self._folder.add_devices(r, reports[name], plans)
            for each in reports[name]:
                self._reports.add_numbers(r, each.name, found.get(each.name, ()))
        steps = sum(result.work.steps for result in results.values())
        spreads = self._reports.add_plans(r, plans)
        ran = {name: epochs[name] for name in names if name in results}
        record = GlobalRoundRecord(
            global_round=r,
            elapsed_s=round(self._state.elapsed_s, 6),
            train_loss=outcome.loss,
            phases=phases,
            sgd_steps=steps,
            path_steps=max(result.path_steps for result in results.values()),
            bytes_={name: count - before[name] for name, count in self._bytes.items()},
            missing=closed_round.missing,
            refused=(*closed_round.refused, *outcome.left_out),
            epochs={name: ran.get(name) for name in names},
            omega={name: omegas.get(name) for name in names},
            spread={name: spreads.get(name) for name in (CLOUD, *tree.aggregators)},
            epsilon=self._privacy.epsilons,
            other_scores=dict.fromkeys(self._score_columns),
            by_devices=self._scores.by_devices([*chain(*reports.values())]),
        )
        self._folder.add_round(record)
        self._observe("global_round", record.values())
        metrics = self._metrics
        metrics.closed(LABELS, rounds=r)
        metrics.trained(LABELS, outcome.loss)
        metrics.steps.labels(*LABELS).inc(steps)
        self._privacy.export(metrics, LABELS)
        for phase, seconds in phases.items():
            metrics.phase_seconds.labels(*LABELS, phase).inc(seconds)
        for name in names:
            metrics.epochs.labels(*NodeLabels("cloud", name, parent=CLOUD)).set(epochs[name])
        return record

    @property
    def _score_columns(self) -> Iterator[str]:
        """The columns of scores beside accuracy and loss; attacks that have tests of their own have
        one where the cloud scores.
        """
        experiment = self._experiment
        if experiment.score.name != ACCURACY:
            yield from ("score", "mixed_score")
        yield from experiment.score.columns.values()
        if experiment.evaluation.on_cloud:
            yield from experiment.attackers.targeted

    def _tier_bytes(self) -> dict[str, int]:
        return tier_bytes(self._down.ledger, self._experiment.tier_names)

    def _tempo(self, omegas: Mapping[str, float]) -> dict[str, object]:
        """Return the input and the result of the epoch control."""
        if self._experiment.cloud.epoch_control.name == "fixed":
            return {}
        return {"omegas": dict(omegas), "next_epochs": self._state.epochs}

    @property
    def _due(self) -> bool:
        """Whether the present model is scored: a run's last one is, whatever ended the run."""
        return self._scores.due(self._state.global_round, last=self.complete)
