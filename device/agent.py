"""The device: waits for the experiment, then trains what its institution wishes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from common.data import check_alike, permit
from common.errors import InvalidExperiment
from common.layout import Row
from common.metrics import Metrics
from common.net.link import BrokerAddress
from common.node.arriving import Arriving
from common.node.child import Answer, ChildFace, Report
from common.node.discovery import discover
from common.node.identity import Identity, new_session
from common.node.life import export_child, live
from common.node.offload import offload
from common.node.spool import Spool
from common.spec import Experiment, parse
from common.wire.messages import NodeState, Phase, Task
from device.pace import keep
from device.slots import Slots
from device.trainer import Trainer
from device.work import LocalWork

FAREWELL_S = 3.0
WAITING_S = 1.0


class DeviceAgent:
    """One device. It is told only its broker, its name and its institution.

    `allow_models`: the packages whose models an experiment may name.
    """

    def __init__(
        self,
        name: str,
        *,
        institution: str,
        broker: BrokerAddress,
        accelerator: str,
        slots: Slots,
        connect_timeout_s: float,
        metrics: Metrics,
        metrics_address: str = "",
        spool: Path | None = None,
        allow_models: Sequence[str] = (),
    ) -> None:
        self._name = name
        self._institution = institution
        self._broker = broker
        self._accelerator = accelerator
        self._slots = slots
        self._connect_timeout_s = connect_timeout_s
        self._metrics = metrics
        self._metrics_address = metrics_address
        self._spool = spool
        self._allow_models = allow_models
        self._labels = ("device", institution, name)
        # Not asyncio's pool: a training that waits for its slot must not keep others from hashing a model.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self) -> None:
        """Take part in one run, to its end. Raises FedstrataError."""
        run, announcement = await discover(self._broker, self._institution, connect_timeout_s=self._connect_timeout_s)
        experiment = parse(announcement.experiment)
        self._check_home(experiment)  # before anybody hears of this name
        identity = Identity(run, self._name, "device", new_session(), self._metrics_address)
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
        self._metrics.run.labels(*self._labels).info({"run": run, "experiment": experiment.name})
        await live(
            (up.endpoint,),
            self._train_all(up, experiment, announcement.partition),
            connect_timeout_s=self._connect_timeout_s,
            goodbye=lambda: up.farewell((), timeout_s=FAREWELL_S),
        )
        spool.close()

    async def _train_all(self, up: ChildFace, experiment: Experiment, partition: str) -> None:
        permit(experiment.model, self._allow_models)
        trainer = Trainer(experiment, node=self._name, accelerator=self._accelerator, slots=self._slots)
        await offload(trainer.prepare, executor=self._thread)
        check_alike(experiment.data, self._name, partition=trainer.partition, clouds=partition)
        up.endpoint.set_state(NodeState.READY, samples=trainer.samples)
        local = LocalWork(trainer, rounds=experiment.institution.rounds)
        machine = experiment.machine(self._name)

        async def work(task: Task, model: Arriving, report: Report) -> Answer:
            row, since = await model.whole(), up.endpoint.now()
            answer = await self._train(local, task, row=row, report=report)
            answer = await keep(machine, answer, since=since, report=report)
            self._metrics.phase_seconds.labels(*self._labels, "pause").inc(answer.pause_s)
            return answer

        await up.serve(trainer.layout, work)

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

    async def _train(self, local: LocalWork, task: Task, *, row: Row, report: Report) -> Answer:
        loop = asyncio.get_running_loop()
        cancelled = threading.Event()

        def progress(done: int, total: int) -> None:
            self._slots.moves += 1
            loop.call_soon_threadsafe(train_aloud, done, total)

        def train_aloud(done: int, total: int) -> None:
            waiting.cancel()
            report(Phase.TRAINING, done, total)

        async def wait_aloud() -> None:
            while True:
                report(Phase.WAITING, self._slots.moves, 0)
                await asyncio.sleep(WAITING_S)

        train = partial(local, task, row, progress=progress, cancelled=cancelled)
        waiting = asyncio.create_task(wait_aloud(), name=f"{self._name} waits")
        try:
            answer = await offload(train, executor=self._thread, cancel=cancelled.set)
        finally:
            waiting.cancel()
        self._metrics.round.labels(*self._labels).inc()
        self._metrics.steps.labels(*self._labels).inc(answer.steps)
        self._metrics.train_loss.labels(*self._labels).set(answer.loss)
        self._metrics.epochs.labels(*self._labels).set(task.epochs)
        self._metrics.phase_seconds.labels(*self._labels, "train").inc(answer.train_s)
        self._metrics.phase_seconds.labels(*self._labels, "wait").inc(answer.wait_s)
        return answer
