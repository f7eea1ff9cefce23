"""The device: waits for the experiment, then trains what its institution wishes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from common.data import check_alike, permit
from common.errors import InvalidExperiment
from common.layout import Row
from common.metrics import Metrics
from common.net.link import BrokerAddress
from common.node.arriving import Arriving
from common.node.child import Answer, ChildFace, Report
from common.node.discovery import discover
from common.node.exports import export_child
from common.node.identity import Identity, new_session
from common.node.life import live
from common.node.spool import Spool
from common.spec import Experiment, parse
from common.wire.messages import NodeState, Phase, Task
from common.wire.topics import DEFAULT_LAB, check_lab
from device.pace import keep
from device.pool import Pool
from device.work import answer_of, round_of

FAREWELL_S = 3.0
PHASES = ("train", "wait", "pause", "stack")
WAITING_S = 1.0


class DeviceAgent:
    """One device. It is given only its broker, its lab, its name and its institution.

    `allow_models`: the packages whose models an experiment may name.
    """

    def __init__(
        self,
        name: str,
        *,
        institution: str,
        broker: BrokerAddress,
        pool: Pool,
        connect_timeout_s: float,
        metrics: Metrics,
        metrics_address: str = "",
        lab: str = DEFAULT_LAB,
        spool: Path | None = None,
        allow_models: Sequence[str] = (),
    ) -> None:
        self._name = name
        self._institution = institution
        self._broker = broker
        self._training = pool.member(name)
        self._connect_timeout_s = connect_timeout_s
        self._metrics = metrics
        self._metrics_address = metrics_address
        self._lab = check_lab(lab)
        self._spool = spool
        self._allow_models = allow_models
        self._labels = ("device", institution, name)

    async def run(self) -> None:
        """Take part in one run, to its end. Raises FedstrataError."""
        run, announcement = await discover(
            self._broker, self._institution, lab=self._lab, connect_timeout_s=self._connect_timeout_s
        )
        experiment = parse(announcement.experiment)
        self._check_home(experiment)  # before anybody hears of this name
        identity = Identity(run, self._name, "device", new_session(), self._metrics_address, lab=self._lab)
        spool = Spool.open(self._spool, run=run, node=self._name)
        up = ChildFace(
            self._broker,
            identity,
            parent=self._institution,
            transfer=experiment.transfer,
            link=experiment.link(self._name),
            shaped=experiment.links.enforce == "bucket",
            codecs=experiment.transfer.lan,
            spool=spool,
        )
        export_child(self._metrics, up, self._labels)
        self._metrics.introduce(self._labels, {"run": run, "experiment": experiment.name}, phases=PHASES)
        await live(
            (up.endpoint,),
            self._train_all(up, experiment, announcement.partition),
            connect_timeout_s=self._connect_timeout_s,
            goodbye=lambda: up.farewell((), timeout_s=FAREWELL_S),
            last_look=self._metrics.last_look,
        )
        spool.close()

    async def _train_all(self, up: ChildFace, experiment: Experiment, partition: str) -> None:
        permit(experiment.model, self._allow_models)
        prepared = await self._training.prepare(experiment)
        check_alike(experiment.data, self._name, partition=prepared.partition, clouds=partition)
        up.endpoint.set_state(NodeState.READY, samples=prepared.samples)
        out, rounds = prepared.layout.empty(), experiment.institution.rounds
        machine = experiment.machine(self._name)

        async def work(task: Task, model: Arriving, report: Report) -> Answer:
            row, since = await model.whole(), up.endpoint.now()
            answer = await self._train(task, row, out, rounds=rounds, report=report)
            answer = await keep(machine, answer, since=since, report=report)
            self._metrics.phase_seconds.labels(*self._labels, "pause").inc(answer.pause_s)
            return answer

        await up.serve(prepared.layout, work)

    def _check_home(self, experiment: Experiment) -> None:
        children = experiment.topology.children()
        if self._name not in children.get(self._institution, ()):
            home = next((name for name, devices in children.items() if self._name in devices), None)
            problem = f"it belongs to {home}" if home else "no device of this experiment"
            raise InvalidExperiment(
                "--institution",
                self._institution,
                f"{self._name} is not there: {problem}",
                f"{self._institution} has {', '.join(children.get(self._institution, ['no device']))}.",
            )

    async def _train(self, task: Task, row: Row, out: Row, *, rounds: int, report: Report) -> Answer:
        def train_aloud(done: int, total: int) -> None:
            waiting.cancel()
            report(Phase.TRAINING, done, total)

        async def wait_aloud() -> None:
            while True:
                report(Phase.WAITING, self._training.moves, 0)
                await asyncio.sleep(WAITING_S)

        waiting = asyncio.create_task(wait_aloud(), name=f"{self._name} waits")
        try:
            result = await self._training.train(
                row, out, epochs=task.epochs, round_=round_of(task, rounds=rounds), progress=train_aloud
            )
        finally:
            waiting.cancel()
        answer = answer_of(task, out, result)
        self._metrics.closed(self._labels)
        self._metrics.steps.labels(*self._labels).inc(answer.steps)
        self._metrics.train_loss.labels(*self._labels).set(answer.loss)
        self._metrics.epochs.labels(*self._labels).set(task.epochs)
        self._metrics.phase_seconds.labels(*self._labels, "train").inc(answer.train_s)
        self._metrics.phase_seconds.labels(*self._labels, "wait").inc(answer.wait_s)
        self._metrics.phase_seconds.labels(*self._labels, "stack").inc(result.wall_s)
        return answer
