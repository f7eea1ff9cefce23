"""An institution's local rounds: tau_i rounds with its children for each task of its parent.

The institution's own rule selects each child's model and aggregates the results; the mean of the
last round is uploaded. The first round starts from the parent's model (Tempo, eqs. 4, 5 and 7 if
the rule is FedAvg).

Between its tasks an institution has a state: of its rule, its client selection, and its codec
towards its parent. A task names the one whose state it follows: the parent may repeat a task after
a restart, or not use a result, and a killed institution starts its task again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.work import Work
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.files import until_written
from fedstrata.common.host.offload import offload, work_on
from fedstrata.common.methods import aggregator
from fedstrata.common.methods.private import NoiseSource, PrivateUpdates
from fedstrata.common.methods.rule import Aggregated, Rule, link_layouts
from fedstrata.common.methods.selection import ClientSelection
from fedstrata.common.metrics import NodeLabels
from fedstrata.common.model.codecs import codec_of
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.protocol.limits import plans_of
from fedstrata.common.protocol.messages import Phase, Task
from fedstrata.common.runtime.link_models import Arriving
from fedstrata.common.runtime.refining import run_refining
from fedstrata.common.runtime.round import (
    ClosedRound,
    Dispatch,
    NodeContext,
    Report,
    WorkResult,
    rule_context,
    run_round,
    unreported,
)
from fedstrata.common.runtime.secure_round import player
from fedstrata.common.runtime.upload_encoder import UploadEncoder, hidden
from fedstrata.common.secure.links import member_of
from fedstrata.common.storage.spool import Spool
from fedstrata.common.storage.states import TaskStates

SELECTION: Final = "selection"  # among the facts of a rule's state
LEFT_OUT: Final = "left-out"  # file of what the codec left out
STATE: Final = "the state of this institution's rule"

log = logging.getLogger("fedstrata.institution")


class LocalRounds:
    """The work of one institution; `work` does one task of its parent."""

    def __init__(
        self, name: str, experiment: Experiment, context: NodeContext, *, layout: ModelLayout
    ) -> None:
        spool = context.spool
        secret = partial(spool.secret, context.world.noise)
        self._name = name
        self._experiment = experiment
        self._layout = layout
        tree = experiment.tree
        # in each global round: the parent's rounds
        self._tasks = experiment.rounds_of(tree.depth(name) - 1)
        self._below = {child: frozenset(below) for child, below in tree.below_each(name).items()}
        self._down = context.down
        self._metrics = context.metrics
        self._refiner = context.refiner
        self._labels = NodeLabels("institution", name, parent=tree.parent(name))
        self._tier = experiment.tier_below(name)
        above = experiment.tier_above(name)
        below = self._tier.transfer.down
        # the children decode another model
        self._recodes = below != above.transfer.down and not codec_of(below).exact
        build = partial(
            aggregator.build,
            self._tier.aggregation,
            rule_context(
                experiment,
                name,
                context,
                layout=layout,
                folder=spool.folder("cache"),
                measures=False,
            ),
            bound=self._tier.norm_bound,
            privacy=self._tier.privacy,
            secret=secret,
            adversaries=experiment.attackers.near(name),
        )
        self._adversary = experiment.attackers.adversary(name)
        self._updates: PrivateUpdates | None = None
        if above.privacy.by_child:
            source = NoiseSource(above.privacy, seed=experiment.seed, node=name, secret=secret)
            self._updates = PrivateUpdates(above.privacy, layout, source)
        self._play = player(experiment, name, layout, noise=context.world.noise)
        # its part in the sums of its parent, if these are secure
        self.member = member_of(experiment, name, layout, noise=context.world.noise)
        uploaded = link_layouts(above.aggregation, layout).up
        self._encoder = UploadEncoder.of(experiment, name, uploaded)
        self._memory = Memory(
            build,
            lambda rule: ClientSelection(
                self._tier,
                seed=experiment.seed,
                node=name,
                choose=rule.choose or context.choose,
                named=len(tree.children[name]),
            ),
            remembers=experiment.remembers(name),
            spool=spool,
            rounds_back=experiment.cloud.rounds_back,
            left_out_columns=self._encoder.kept_columns,
        )
        self._did: dict[str, ChildReport] = {}
        # the samples of the children that aggregate, in the present task
        self._counts: dict[str, int] = {}

    async def work(self, task: Task, model: Arriving, report: Report) -> WorkResult:
        """Run the local rounds of one task from the parent's model; return the last mean.

        If the rule only passes the model on, the first round begins at once: the children get its
        chunks as they arrive from the parent. A task without epochs is a single round that scores
        the model, and changes no state. Raises RunFailed if the state of an earlier task is needed
        and lost.
        """
        settings = self._tier
        down = self._down
        down.give_back_places()
        self._did = {}
        self._counts = {}
        train_s = wait_s = pause_s = 0.0
        path_steps = 0
        plans: dict[str, list[dict[str, object]]] = {self._name: []}
        number = task.key.global_round * self._tasks + task.key.local_round

        def progressed() -> None:
            refined = 0 if self._refiner is None else self._refiner.moves
            report(Phase.TRAINING, down.moves + refined, 0)

        rule, selection = await offload(partial(self._memory.before, task.follows))
        if rule.reads_start or self._recodes:
            await model.whole()
        # which the parent's deltas are against
        start = await offload(model.row.copy) if self._recodes else model.row
        await offload(partial(rule.begin, start))
        selection.begin()
        for i in range(settings.rounds):
            r = number * settings.rounds + i
            key = task.key.global_round, task.key.local_round * settings.rounds + i
            last = i + 1 == settings.rounds
            dispatch, closed_round = await run_round(
                down,
                settings,
                selection,
                rule,
                r,
                key,
                epochs=task.epochs,
                last=last,
                arriving=model,
                play=self._play,
                on_progress=progressed,
            )
            selected = dispatch.selected
            await model.whole()  # the children may have finished before it is decoded here
            decided = closed_round.decided(r, unreported=unreported(down))
            decided = selection.facts(selected) | decided
            for result in closed_round.results.values():
                for name, found in plans_of(result).items():
                    plans.setdefault(name, []).extend(found)
            self._gather(closed_round)
            samples = self._samples(dispatch)
            if not task.epochs:
                return self._scored(samples, {**plans, self._name: [decided]})
            aggregate = partial(rule.aggregate, r, closed_round.uploads)
            outcome = await run_refining(aggregate, self._refiner, report=progressed)
            facts = closed_round.facts
            selection.observe(
                r, selected, facts, unused=outcome.left_out, refused=closed_round.refused
            )
            for child, reason in outcome.left_out.items():
                log.warning("%s: %s's model is left out: %s", self._name, child, reason)
            results = closed_round.results.values()
            train_s += max(result.work.train_s for result in results)
            wait_s += max(result.work.wait_s for result in results)
            pause_s += max(result.work.pause_s for result in results)
            path_steps += max(result.path_steps for result in results)
            self._count(closed_round, outcome, epochs=task.epochs)
            plans[self._name].append(outcome.plan | decided)
        row = rule.model
        if self._updates is not None or self._adversary is not None:
            row = await offload(partial(self._sent, row, received=model.row, number=number))
        steps = sum(self._did[name].work.steps for name in down.peers if name in self._did)
        did = Work(samples, outcome.loss, task.epochs, steps, train_s, wait_s, pause_s)
        reported = self._reported(did, number)
        encode = partial(
            self._encoder.encode,
            row,
            received=model.row,
            task=number,
            left_out=self._memory.left_out,
        )
        blob = await work_on(encode, nbytes=rule.model.nbytes)
        save = partial(self._memory.after, number + 1, global_round=task.key.global_round)
        await until_written(
            lambda: offload(save), patience_s=self._experiment.transfer.idle_s, warn=log.warning
        )
        done = WorkResult(blob, reported, path_steps, self.reports(), plans)
        if self.member is None:
            return done
        hide = partial(hidden, self.member, task.key, done, received=model.row)
        return await work_on(hide, nbytes=rule.model.nbytes)

    def _sent(self, model: Row, *, received: Row, number: int) -> Row:
        """Return the model that goes up, of a task of this number; the rule goes on from the one
        without noise.
        """
        row = model.copy()
        size = self._layout.parameters
        if self._updates is not None:
            self._updates.protect(received, row, number=number)
        adversary = self._adversary
        if adversary is not None and adversary.acts(number) and not adversary.hosted:
            columns_D, received_D = (self._layout.floats(each)[:size] for each in (row, received))
            columns_D[:] = adversary.uploaded(number, columns_D, received_D)
        return row

    def _reported(self, did: Work, number: int) -> Work:
        """Return the work of a task of this number as it is reported."""
        if self._adversary is None or not self._adversary.acts(number):
            return did
        samples, loss = self._adversary.reported(did.samples, did.loss)
        return replace(did, samples=samples, loss=loss)

    def _samples(self, dispatch: Dispatch) -> int:
        """Return n_m, which counts all children that could take part, not only the selected ones.

        Of a device it is what it has prepared, whatever its trainings use: a process that has just
        begun knows no more.
        """
        known = self._down.samples | self._counts
        return sum(known[name] for name in dispatch.able if name in known)

    def _scored(
        self, samples: int, plans: Mapping[str, Sequence[Mapping[str, object]]]
    ) -> WorkResult:
        """Return the result of a task without epochs."""
        return WorkResult(memoryview(b""), Work(samples), children=self.reports(), plans=plans)

    def reports(self) -> tuple[ChildReport, ...]:
        """Return the work of each node below in the last task, with its link's bytes in the whole
        run.
        """
        found = []
        for link, report in self._down.ledger.reports(present=True).items():
            did = self._did.get(link, ChildReport(report.name, parent=report.parent))
            found.append(
                replace(did, measured=report.measured, traffic=report.traffic, broker=report.broker)
            )
        return tuple(found)

    def _count(self, closed_round: ClosedRound, outcome: Aggregated, *, epochs: int) -> None:
        """Count a round's work."""
        metrics = self._metrics
        labels = self._labels
        metrics.closed(labels)
        metrics.epochs.labels(*labels).set(epochs)
        metrics.trained(labels, outcome.loss)
        steps = sum(result.work.steps for result in closed_round.results.values())
        metrics.steps.labels(*labels).inc(steps)
        for phase, seconds in closed_round.timeline.phases().items():
            metrics.phase_seconds.labels(*labels, phase).inc(seconds)

    def _gather(self, closed_round: ClosedRound) -> None:
        """Add the reports of a round to those of the task."""
        for name, result in closed_round.results.items():
            below = self._below.get(name, frozenset())
            if below:
                self._counts[name] = result.work.samples
            parent = "" if name in self._below else self._name
            self._add(replace(result.work_of(name), parent=parent))
            for report in result.children:
                if report.name in below or report.parent:
                    self._add(report)

    def _add(self, report: ChildReport) -> None:
        before = self._did.get(report.link, ChildReport(report.name))
        self._did[report.link] = report.with_work_of(before)


class Memory:
    """One institution's rule and client selection, and `left_out`, float32 [left_out_columns],
    which encoding changes. Tasks are counted over the run, from 1.
    """

    def __init__(
        self,
        build: Callable[[], Rule],
        select: Callable[[Rule], ClientSelection],
        *,
        remembers: bool,  # their state persists between tasks, in the spool
        spool: Spool,
        rounds_back: int,  # global rounds that the cloud may return
        left_out_columns: int = 0,
    ) -> None:
        self.left_out = np.zeros(left_out_columns, np.float32)
        self._build = build
        self._select = select
        self._states: TaskStates | None = None
        if remembers:
            self._states = TaskStates(
                spool.states(), rounds_back=rounds_back, what=STATE, who="institutions"
            )
        self._made: tuple[Rule, ClientSelection] | None = None
        self._stands: int | None = None  # the task after which the state is; None: within a task
        self._follows = 0

    def before(self, follows: int) -> tuple[Rule, ClientSelection]:
        """Return the rule and the selection with their state after task `follows`, 0: new ones,
        about to do another.

        Raises StateLost if their state is lost.
        """
        if self._made is None or (self._states is not None and self._stands != follows):
            rule = self._build()
            self._made = rule, self._select(rule)
            self.left_out[:] = 0
            if self._states is not None and follows:
                self._states.read(follows, self._load)
        self._stands = None
        self._follows = follows
        return self._made

    def after(self, task: int, *, global_round: int) -> None:
        """Save the state after a task. Raises StorageFailed."""
        if self._states is not None and self._made is not None:
            save = partial(self._save, *self._made)
            self._states.write(task, save, follows=self._follows, global_round=global_round)
        self._stands = task

    def _save(self, rule: Rule, selection: ClientSelection, folder: Path) -> dict[str, object]:
        if self.left_out.size:
            (folder / LEFT_OUT).write_bytes(self.left_out.data)
        return rule.save(folder) | {SELECTION: selection.save()}

    def _load(self, folder: Path, facts: Mapping[str, Any]) -> None:
        assert self._made is not None
        rule, selection = self._made
        rule.restore(folder, facts)
        selection.restore(facts[SELECTION])
        if self.left_out.size:
            self.left_out[:] = np.fromfile(folder / LEFT_OUT, np.float32)
