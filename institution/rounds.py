"""An institution's local rounds: tau_i rounds with its children for each task of its parent.

The institution's own rule selects each child's model and aggregates the results; the mean of the last round is
uploaded. The first round starts from the parent's model (Tempo, eqs. 4, 5 and 7 if the rule is FedAvg).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from common.accounting.child_report import ChildReport
from common.experiment.schema import Experiment
from common.host.files import until_written
from common.host.offload import offload
from common.methods import aggregator
from common.methods.private import NoiseSource, PrivateUpdates
from common.methods.rule import Aggregated, link_layouts
from common.methods.selection import Choose, ClientSelection
from common.metrics import Metrics, NodeLabels
from common.model.codecs import codec_of
from common.model.layout import ModelLayout
from common.model.refinement import Refiner
from common.protocol.limits import plans_of
from common.protocol.messages import Phase, Task
from common.runtime.models import Arriving, work_on
from common.runtime.refining import run_refining
from common.runtime.round import Children, ClosedRound, Report, WorkResult, run_round, unreported
from common.runtime.uploads import UploadEncoder
from common.runtime.world import REAL, World
from common.storage.spool import Spool
from institution.memory import Memory

log = logging.getLogger("fedstrata.institution")


class LocalRounds:
    """The work of one institution; `work` does one task of its parent. `choose`: a client selection, as recorded."""

    def __init__(
        self,
        name: str,
        experiment: Experiment,
        *,
        layout: ModelLayout,
        spool: Spool,
        down: Children,
        metrics: Metrics,
        choose: Choose | None = None,
        refiner: Refiner | None = None,
        world: World = REAL,
    ) -> None:
        secret = partial(spool.secret, world.noise)
        self._name = name
        self._experiment = experiment
        tree = experiment.tree
        self._tasks = experiment.rounds_of(tree.depth(name) - 1)  # in each global round: the parent's rounds
        self._below = {child: frozenset(below) for child, below in tree.below_each(name).items()}
        self._down = down
        self._metrics = metrics
        self._refiner = refiner
        self._labels = NodeLabels("institution", name, parent=tree.parent(name))
        self._tier = experiment.tier_below(name)
        down_above, below = experiment.tier_above(name).transfer.down, self._tier.transfer.down
        self._recodes = below != down_above and not codec_of(below).exact  # the children decode another model
        build = partial(
            aggregator.build,
            self._tier.aggregation,
            layout=layout,
            node=name,
            seed=experiment.seed,
            measures=False,
            rows=partial(spool.memory, row_bytes=layout.row_bytes, resident_mb=experiment.transfer.resident_mb),
            folder=spool.folder("cache"),
            children=len(tree.children[name]),
            training=experiment.training,
            learning_rate=experiment.learning_rate_in,
            rounds_below=experiment.rounds_below(name),
            refiner=refiner,
            bound=self._tier.norm_bound,
            privacy=self._tier.privacy,
            secret=secret,
        )
        above = experiment.tier_above(name).privacy
        source = NoiseSource(above, seed=experiment.seed, node=name, secret=secret)
        self._updates = PrivateUpdates(above, layout, source) if above.by_child else None
        self._encoder = UploadEncoder.of(
            experiment, name, link_layouts(experiment.tier_above(name).aggregation, layout).up
        )
        self._memory = Memory(
            build,
            lambda rule: ClientSelection(
                self._tier,
                seed=experiment.seed,
                node=name,
                choose=rule.choose or choose,
                named=len(tree.children[name]),
            ),
            remembers=experiment.remembers(name),
            spool=spool,
            rounds_back=experiment.cloud.rounds_back,
            left_out_columns=self._encoder.kept_columns,
        )
        self._did: dict[str, ChildReport] = {}

    async def work(self, task: Task, model: Arriving, report: Report) -> WorkResult:
        """Run the local rounds of one task from the parent's model; return the last mean.

        If the rule only passes the model on, the first round begins at once: the children get its chunks as they arrive
        from the parent. A task without epochs is a single round that scores the model, and changes no state. Raises
        RunFailed if the state of an earlier task is needed and lost.
        """
        settings, down = self._tier, self._down
        self._did = {}
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
        start = await offload(model.row.copy) if self._recodes else model.row  # which the parent's deltas are against
        await offload(partial(rule.begin, start))
        selection.begin()
        for i in range(settings.rounds):
            r = number * settings.rounds + i
            key = task.key.global_round, task.key.local_round * settings.rounds + i
            last = i + 1 == settings.rounds
            dispatch, closed_round = await run_round(
                down, settings, selection, rule, r, key, epochs=task.epochs, last=last, arriving=model,
                on_progress=progressed,
            )  # fmt: skip
            selected = dispatch.selected
            await model.whole()  # the children may have finished before it is decoded here
            decided = selection.facts(selected) | closed_round.decided(r, unreported=unreported(down))
            for result in closed_round.results.values():
                for name, found in plans_of(result).items():
                    plans.setdefault(name, []).extend(found)
            if not task.epochs:
                return self._scored(closed_round, {**plans, self._name: [decided]})
            aggregate = partial(rule.aggregate, r, closed_round.uploads)
            outcome = await run_refining(aggregate, self._refiner, report=progressed)
            facts = closed_round.facts
            selection.observe(r, selected, facts, unused=outcome.left_out, refused=closed_round.refused)
            for child, reason in outcome.left_out.items():
                log.warning("%s: %s's model is left out: %s", self._name, child, reason)
            train_s += max(result.train_s for result in closed_round.results.values())
            wait_s += max(result.wait_s for result in closed_round.results.values())
            pause_s += max(result.pause_s for result in closed_round.results.values())
            path_steps += max(result.path_steps for result in closed_round.results.values())
            self._count(closed_round, outcome, epochs=task.epochs)
            plans[self._name].append(outcome.plan | decided)
        row = rule.model
        if self._updates is not None:  # the rule goes on from the model without noise
            row = await offload(row.copy)
            await offload(partial(self._updates.protect, model.row, row, number=number))
        encode = partial(self._encoder.encode, row, received=model.row, task=number, left_out=self._memory.left_out)
        blob = await work_on(encode, nbytes=rule.model.nbytes)
        await until_written(
            lambda: offload(partial(self._memory.after, number + 1, global_round=task.key.global_round)),
            patience_s=self._experiment.transfer.idle_s,
            warn=log.warning,
        )
        samples = self._samples(closed_round.absent)
        steps = sum(self._did[name].steps for name in down.peers if name in self._did)
        return WorkResult(
            blob, samples, outcome.loss, task.epochs, steps, train_s, wait_s, pause_s,
            path_steps=path_steps, children=self.reports(), plans=plans,
        )  # fmt: skip

    def _samples(self, absent: Collection[str]) -> int:
        """Return n_m, which counts all children that could take part, not only the selected ones."""
        return sum(samples for name, samples in self._down.samples.items() if name not in absent)

    def _scored(self, closed_round: ClosedRound, plans: Mapping[str, Sequence[Mapping[str, object]]]) -> WorkResult:
        """Return the result of a task without epochs."""
        self._gather(closed_round)
        return WorkResult(
            memoryview(b""), self._samples(closed_round.absent), None, 0, 0, 0.0, 0.0,
            children=self.reports(), plans=plans,
        )  # fmt: skip

    def reports(self) -> tuple[ChildReport, ...]:
        """Return the work of each node below in the last task, with its link's bytes in the whole run."""
        counted = self._down.ledger.reports()
        return tuple(
            replace(
                self._did.get(link, ChildReport(report.name, parent=report.parent)),
                measured=report.measured,
                traffic=report.traffic,
                broker=report.broker,
            )
            for link, report in counted.items()
        )

    def _count(self, closed_round: ClosedRound, outcome: Aggregated, *, epochs: int) -> None:
        """Count a round's work."""
        self._gather(closed_round)
        metrics, labels = self._metrics, self._labels
        metrics.closed(labels)
        metrics.epochs.labels(*labels).set(epochs)
        metrics.trained(labels, outcome.loss)
        metrics.steps.labels(*labels).inc(sum(result.steps for result in closed_round.results.values()))
        for phase, seconds in closed_round.timeline.phases().items():
            metrics.phase_seconds.labels(*labels, phase).inc(seconds)

    def _gather(self, closed_round: ClosedRound) -> None:
        """Add the reports of a round to those of the task."""
        for name, result in closed_round.results.items():
            self._down.samples[name] = result.samples
            below = self._below.get(name, frozenset())
            own = replace(result.work_of(name), parent="" if name in self._below else self._name)
            for report in (own, *(each for each in result.children if each.name in below or each.parent)):
                self._did[report.link] = report.with_work_of(self._did.get(report.link, ChildReport(report.name)))
