"""An institution's local rounds: tau_i rounds with its devices for each wish of the cloud.

Each round starts from the mean of the last one (Tempo, eqs. 4 and 5); the last mean goes up.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from common.aggregation import fedavg, mixing
from common.aggregation.statistics import Statistics
from common.layout import ModelLayout, Row
from common.metrics import Metrics
from common.node.arriving import Arriving
from common.node.child import Answer, Report
from common.node.offload import offload
from common.node.parent import ParentFace
from common.node.round import Round
from common.randomness import Purpose, generator
from common.rules import FedAvg
from common.spec import Experiment, participants
from common.wire.messages import ChildReport, Measured, Phase, Task


class LocalRounds:
    """The work of one institution; `work` answers one wish of the cloud."""

    def __init__(
        self,
        name: str,
        experiment: Experiment,
        *,
        layout: ModelLayout,
        down: ParentFace,
        metrics: Metrics,
        labels: tuple[str, str, str],
    ) -> None:
        self._name = name
        self._experiment = experiment
        self._layout = layout
        self._down = down
        self._metrics = metrics
        self._labels = labels
        self._mean = layout.empty()
        self._did: dict[str, ChildReport] = {}

    async def work(self, task: Task, model: Arriving, report: Report) -> Answer:
        """Play the rounds of one global iteration from the cloud's model; return the last mean.

        The first round begins at once: the devices get the model's chunks as they come from the cloud.
        """
        settings, down = self._experiment.institution, self._down
        self._did = {}
        train_s = wait_s = 0.0
        loss = 0.0
        down.moved_hook = lambda: report(Phase.TRAINING, down.moves, 0)
        try:
            start: Row | Arriving = model
            for i in range(settings.rounds):
                drawn = self._draw(task.key.iteration * settings.rounds + i)
                played = await down.round(
                    iteration=task.key.iteration,
                    round_=i,
                    models=dict.fromkeys(drawn, start),
                    epochs=dict.fromkeys(drawn, task.epochs),
                    closing=settings.closing,
                )
                loss = await offload(partial(self._aggregate, played))
                train_s += max(result.train_s for result in played.results)
                wait_s += max(result.wait_s for result in played.results)
                start = self._mean
                self._count(played, task.epochs, loss=loss)
        finally:
            down.moved_hook = lambda: None
        samples = sum(down.samples.values())  # n_m counts all devices, also those not drawn
        steps = sum(report.steps for report in self._did.values())
        return Answer(self._mean, samples, loss, task.epochs, steps, train_s, wait_s, self.reports())

    def reports(self) -> tuple[ChildReport, ...]:
        """Return what each device did in the last iteration, with its link's bytes in the whole run."""
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

    def _draw(self, r: int) -> list[str]:
        devices = list(self._down.peers)
        count = participants(len(devices), self._experiment.institution.participation)
        if count == len(devices):
            return devices
        draw = generator(self._experiment.seed, Purpose.DRAW, self._name, r)
        return [devices[place] for place in sorted(draw.choice(len(devices), count, replace=False))]

    def _aggregate(self, played: Round) -> float:
        """Write the round's mean into `self._mean` and return the mean loss, weighted alike."""
        for name, result in zip(played.children, played.results, strict=True):
            self._down.samples[name] = result.samples
        statistics = Statistics.of(played.results)
        settings = self._experiment.institution.aggregation
        assert isinstance(settings, FedAvg)
        mixture = fedavg.plan(statistics, weights=settings.weights)
        plan = mixing.whole(self._layout, [mixture])
        mixing.apply(plan, played.uploads, layout=self._layout, out=[self._mean], release=played.release)
        return float(np.dot(mixture.weights, statistics.losses_K))

    def _count(self, played: Round, epochs: int, *, loss: float) -> None:
        for name, result in zip(played.children, played.results, strict=True):
            before = self._did.get(name, ChildReport(name))
            self._did[name] = replace(
                before,
                samples=result.samples,
                rounds=before.rounds + 1,
                epochs=before.epochs + result.epochs,
                steps=before.steps + result.steps,
                loss=result.loss,
                train_s=before.train_s + result.train_s,
                wait_s=before.wait_s + result.wait_s,
            )
        metrics, labels = self._metrics, self._labels
        metrics.round.labels(*labels).inc()
        metrics.epochs.labels(*labels).set(epochs)
        metrics.train_loss.labels(*labels).set(loss)
        metrics.steps.labels(*labels).inc(sum(result.steps for result in played.results))
        for phase, seconds in played.timeline.phases().items():
            metrics.phase_seconds.labels(*labels, phase).inc(seconds)
