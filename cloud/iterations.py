"""The cloud's global iterations: dispatch, wait, aggregate, decide the epochs, evaluate beside the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from cloud import checkpoint, tempo
from cloud.checkpoint import RunState
from cloud.evaluator import Accuracy, Evaluator
from cloud.results import RunFolder
from common.aggregation import fedavg, mixing
from common.aggregation.statistics import Statistics, gram
from common.layout import ModelLayout, Row
from common.metrics import Metrics
from common.node.offload import offload
from common.node.parent import ParentFace
from common.node.round import Round
from common.rules import FedAvg
from common.spec import Experiment
from common.wire.messages import Traffic

LABELS: Final = ("cloud", "", "")

Observe = Callable[[str, dict[str, object]], None]


@dataclass(frozen=True, slots=True)
class _Mixed:
    """What an aggregation found: distances of the institutions' models to the new mean, and the mean loss."""

    omegas: dict[str, float]
    loss: float


class GlobalIterations:
    """One run's iterations at the cloud, from a first model or a checkpoint to the last."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        layout: ModelLayout,
        row: Row,
        down: ParentFace,
        evaluator: Evaluator,
        metrics: Metrics,
        observe: Observe,
    ) -> None:
        self._folder = folder
        self._experiment: Experiment = folder.experiment
        self._layout = layout
        self._row = row
        self._down = down
        self._evaluator = evaluator
        self._metrics = metrics
        self._observe = observe
        start_epochs = dict.fromkeys(down.peers, self._experiment.training.epochs)
        self._state = RunState(folder.run, self._experiment.digest, 0, 0.0, start_epochs)
        self._evaluating: asyncio.Task[Accuracy] | None = None
        self._reached = False
        self._mark = 0.0
        self._wan, self._lan = Traffic(), Traffic()
        self.last: Accuracy | None = None

    def resume(self, state: RunState) -> None:
        """Go on after the iterations of a checkpoint, whose model is already in the row."""
        self._state = state
        written = self._folder.forget_after(state.iteration)
        self._folder.restore(self._down.ledger)
        self._wan, self._lan = self._totals()
        target = self._experiment.target_accuracy
        self._reached = target is not None and any(float(row["accuracy"] or 0) >= target for row in written)
        if written and not written[-1]["accuracy"] and self._evaluates(state.iteration):
            self._evaluate()  # the run ended before that was known

    @property
    def row(self) -> Row:
        """Return the global model."""
        return self._row

    @property
    def state(self) -> RunState:
        """Return how far the run is."""
        return self._state

    async def run(self) -> None:
        """Play the iterations that are left, until the last or until the target accuracy."""
        self._mark = self._down.endpoint.now()
        while self._state.iteration < self._experiment.iterations and not self._reached:
            await self._iterate()
        await self._finish_evaluation()

    async def _iterate(self) -> None:
        state, settings = self._state, self._experiment.cloud
        started = self._down.endpoint.now()
        played = await self._down.round(
            iteration=state.iteration,
            round_=0,
            models=dict.fromkeys(self._down.peers, self._row),
            epochs=state.epochs,
            closing=settings.closing,
        )
        mixed = await offload(partial(self._aggregate, played))
        epochs = dict(state.epochs)
        if settings.epoch_control.name == "tempo":
            epochs |= tempo.next_epochs(mixed.omegas, self._experiment.training.epochs)
        closed = played.timeline.closed or started
        aggregated = self._down.endpoint.now()
        await self._finish_evaluation()
        ended = self._down.endpoint.now()
        phases = {"record": started - self._mark} | played.timeline.phases()  # what the last iteration left to write
        phases["dispatch"] += played.timeline.opened - started
        phases |= {"aggregate": aggregated - closed, "evaluate": ended - aggregated}
        elapsed_s = state.elapsed_s + ended - self._mark
        self._mark = ended
        self._state = RunState(state.run, state.digest, state.iteration + 1, elapsed_s, epochs)
        self._record(played, mixed, phases=phases, epochs=state.epochs)
        if self._evaluates(self._state.iteration):
            self._evaluate()
        last = self._state.iteration == self._experiment.iterations
        if last or self._state.iteration % settings.checkpoint_every == 0:
            folder = self._folder.checkpoints
            await offload(partial(checkpoint.save, folder, self._state, layout=self._layout, row=self._row))

    def _aggregate(self, played: Round) -> _Mixed:
        layout = self._layout
        statistics = Statistics.of(played.results)
        settings = self._experiment.cloud.aggregation
        assert isinstance(settings, FedAvg)
        mixture = fedavg.plan(statistics, weights=settings.weights)
        weights_K = np.zeros(len(played.children))
        weights_K[list(mixture.indices)] = mixture.weights
        trainable = slice(0, layout.parameters)
        products = gram(list(layout.floats(played.uploads)[:, trainable]), layout.floats(self._row)[trainable])
        plan = mixing.whole(layout, [mixture])
        mixing.apply(plan, played.uploads, layout=layout, out=[self._row], release=played.release)
        omegas = dict(zip(played.children, products.distances(weights_K).tolist(), strict=True))
        return _Mixed(omegas, float(weights_K @ statistics.losses_K))

    def _record(self, played: Round, mixed: _Mixed, *, phases: Mapping[str, float], epochs: Mapping[str, int]) -> None:
        wan, lan = self._totals()
        wan_new, lan_new = wan - self._wan, lan - self._lan
        self._wan, self._lan = wan, lan
        for name, result in zip(played.children, played.results, strict=True):
            self._folder.add_devices(self._state.iteration, name, result.children)
        steps = sum(result.steps for result in played.results)
        row: dict[str, object] = {
            "round": self._state.iteration,
            "elapsed_s": round(self._state.elapsed_s, 6),
            "accuracy": "",
            "loss": "",
            "train_loss": _short(mixed.loss),
            **{f"{phase}_s": round(seconds, 6) for phase, seconds in phases.items()},
            "sgd_steps": steps,
            "wan_up_bytes": wan_new.received,
            "wan_down_bytes": wan_new.sent,
            "lan_up_bytes": lan_new.received,
            "lan_down_bytes": lan_new.sent,
            "missing": " ".join(played.missing),
            "refused": " ".join(played.refused),
            **{f"epochs_{name}": epochs[name] for name in self._down.peers},
            **{f"omega_{name}": _short(mixed.omegas.get(name)) for name in self._down.peers},
        }
        self._folder.add_round(row)
        self._folder.write_links(self._down.ledger)
        self._observe("iteration", dict(row))
        metrics = self._metrics
        metrics.round.labels(*LABELS).inc()
        metrics.train_loss.labels(*LABELS).set(mixed.loss)
        metrics.steps.labels(*LABELS).inc(steps)
        for phase, seconds in phases.items():
            metrics.phase_seconds.labels(*LABELS, phase).inc(seconds)
        for name in self._down.peers:
            metrics.epochs.labels("cloud", name, "").set(epochs[name])

    def _totals(self) -> tuple[Traffic, Traffic]:
        """Return the bytes of all WAN links and of all LAN links in the run."""
        return sum(self._down.ledger.links().values(), Traffic()), self._down.ledger.below()

    def _evaluates(self, iteration: int) -> bool:
        return iteration == self._experiment.iterations or iteration % self._experiment.cloud.evaluate_every == 0

    def _evaluate(self) -> None:
        evaluation = self._evaluator.evaluate(self._state.iteration, self._row.copy())
        self._evaluating = asyncio.create_task(evaluation, name="evaluate")

    async def _finish_evaluation(self) -> None:
        """Wait for the evaluation under way, and add it to its row."""
        if self._evaluating is not None:
            self.last = await self._evaluating
            self._evaluating = None
            target = self._experiment.target_accuracy
            self._reached = target is not None and self.last.accuracy >= target
            self._metrics.accuracy.labels(*LABELS).set(self.last.accuracy)
            self._metrics.test_loss.labels(*LABELS).set(self.last.loss)
            found = {"accuracy": _short(self.last.accuracy), "loss": _short(self.last.loss)}
            self._folder.complete_round(self.last.iteration, found)
            self._observe(
                "evaluated",
                {"round": self.last.iteration, "accuracy": self.last.accuracy, "loss": self.last.loss},
            )


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
