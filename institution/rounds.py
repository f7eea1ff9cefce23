"""An institution's local rounds: tau_i rounds with its devices for each task of the cloud.

The institution's own rule selects each device's model and aggregates the results; the mean of the last round is
uploaded. The first round starts from the cloud's model (Tempo, eqs. 4, 5 and 7 if the rule is FedAvg).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from common.accounting.child_report import ChildReport
from common.accounting.traffic import Measured
from common.aggregation import aggregator
from common.aggregation.selection import select
from common.aggregation.uploads import Aggregated
from common.experiment.aggregation import remembers
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD
from common.host.offload import offload
from common.metrics import Metrics
from common.model.layout import ModelLayout
from common.protocol.messages import Phase, Task
from common.protocol.reports import added
from common.runtime.arriving import Arriving
from common.runtime.children import Children
from common.runtime.round import ClosedRound, Dispatch
from common.runtime.work import Report, WorkResult
from common.storage.spool import Spool
from institution.memory import Memory


class LocalRounds:
    """The work of one institution; `work` does one task of the cloud."""

    def __init__(
        self,
        name: str,
        experiment: Experiment,
        *,
        layout: ModelLayout,
        spool: Spool,
        down: Children,
        metrics: Metrics,
    ) -> None:
        self._name = name
        self._experiment = experiment
        self._down = down
        self._metrics = metrics
        self._labels = ("institution", name, "")
        self._tier = experiment.tier_below(name)
        build = partial(
            aggregator.build,
            self._tier.aggregation,
            layout=layout,
            node=name,
            seed=experiment.seed,
            measures=False,
            rows=partial(spool.memory, row_bytes=layout.row_bytes, resident_mb=experiment.transfer.resident_mb),
            folder=spool.folder("cache"),
        )
        self._memory = Memory(
            build,
            remembers=remembers(self._tier.aggregation),
            folder=spool.folder("states"),
            kept=experiment.cloud.checkpoint_every + 1,
            must_remember=self._took_part_before,
        )
        self._did: dict[str, ChildReport] = {}

    def _took_part_before(self, global_round: int) -> bool:
        """Return whether the cloud selected this institution in an earlier global round.

        False if that is unknown: a quorum may have closed rounds without it.
        """
        tier, names = self._experiment.tier_below(CLOUD), self._experiment.tree.children[CLOUD]
        if tier.closing.rule != "all":
            return False
        selected = (
            select(names, tier.participation, seed=self._experiment.seed, node=CLOUD, r=r) for r in range(global_round)
        )
        return any(self._name in some for some in selected)

    async def work(self, task: Task, model: Arriving, report: Report) -> WorkResult:
        """Run the local rounds of one global round from the cloud's model; return the last mean.

        If the rule only passes the model on, the first round begins at once: the devices get its chunks as they arrive
        from the cloud. Raises RunFailed if the state of an earlier global round is needed and lost.
        """
        settings, seed, down = self._tier, self._experiment.seed, self._down
        self._did = {}
        train_s = wait_s = pause_s = 0.0
        path_steps = 0
        plans: list[dict[str, object]] = []
        rule = await offload(partial(self._memory.before, task.key.global_round))
        if rule.reads_start:
            await model.whole()
        await offload(partial(rule.begin, model.row))
        for i in range(settings.rounds):
            r = task.key.global_round * settings.rounds + i
            selected = select(down.peers, settings.participation, seed=seed, node=self._name, r=r)
            dispatch = Dispatch(
                task.key.global_round,
                i,
                models=rule.dispatch(r, selected),
                epochs=dict.fromkeys(down.peers, task.epochs),
                closing=settings.closing,
            )
            if not model.complete:  # then the rule passes it on
                dispatch = replace(dispatch, models=[(model, dispatch.children)])
            closed_round = await down.round(dispatch, on_progress=lambda: report(Phase.TRAINING, down.moves, 0))
            await model.whole()  # the devices may have finished before it is decoded here
            outcome = await offload(partial(rule.aggregate, r, closed_round.uploads))
            train_s += max(result.train_s for result in closed_round.results.values())
            wait_s += max(result.wait_s for result in closed_round.results.values())
            pause_s += max(result.pause_s for result in closed_round.results.values())
            path_steps += max(result.path_steps for result in closed_round.results.values())
            plans.append(self._count(closed_round, outcome, epochs=task.epochs))
        await offload(partial(self._memory.after, task.key.global_round))
        samples = sum(down.samples.values())  # n_m counts all devices, not only the selected ones
        steps = sum(report.steps for report in self._did.values())
        return WorkResult(
            rule.model, samples, outcome.loss, task.epochs, steps, train_s, wait_s, pause_s,
            path_steps=path_steps, children=self.reports(), plans=plans,
        )  # fmt: skip

    def reports(self) -> tuple[ChildReport, ...]:
        """Return each device's work in the last global round, with its link's bytes in the whole run."""
        ledger = self._down.ledger
        traffic = ledger.links()
        return tuple(
            replace(
                self._did.get(name, ChildReport(name)),
                measured=ledger.measured.get(name, Measured()),
                traffic=traffic[name],
            )
            for name in self._down.peers
        )

    def _count(self, closed_round: ClosedRound, outcome: Aggregated, *, epochs: int) -> dict[str, object]:
        """Count a round's work, and return the decisions of its aggregation."""
        for name, result in closed_round.results.items():
            self._down.samples[name] = result.samples
            self._did[name] = added(self._did.get(name, ChildReport(name)), result)
        metrics, labels = self._metrics, self._labels
        metrics.closed(labels)
        metrics.epochs.labels(*labels).set(epochs)
        metrics.train_loss.labels(*labels).set(outcome.loss)
        metrics.steps.labels(*labels).inc(sum(result.steps for result in closed_round.results.values()))
        for phase, seconds in closed_round.timeline.phases().items():
            metrics.phase_seconds.labels(*labels, phase).inc(seconds)
        return outcome.plan
