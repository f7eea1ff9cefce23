"""The cloud: starts the evaluator, announces the experiment, plays the iterations, leaves the run's folder."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from cloud import checkpoint
from cloud.evaluator import Evaluator
from cloud.iterations import LABELS, GlobalIterations, Observe
from cloud.results import RunFolder
from common.aggregation import aggregator
from common.errors import FedstrataError, InvalidExperiment
from common.metrics import Metrics
from common.net.link import BrokerAddress
from common.node.identity import Identity, new_session
from common.node.life import export_parent, live
from common.node.parent import ParentFace
from common.node.spool import Spool
from common.spec import CLOUD
from common.wire.messages import Announcement, NodeState

FAREWELL_S = 10.0
PROGRESS_S = 0.5


class CloudAgent:
    """One run's cloud. `observe` gets every event as it happens: a name and JSON-able facts."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        broker: BrokerAddress,
        resume: bool,
        connect_timeout_s: float,
        metrics: Metrics,
        metrics_address: str = "",
        observe: Observe,
        spool: Path | None = None,
    ) -> None:
        self._folder = folder
        self._broker = broker
        self._resume = resume
        self._connect_timeout_s = connect_timeout_s
        self._metrics = metrics
        self._metrics_address = metrics_address
        self._show = observe
        self._spool = spool

    async def run(self) -> Path:
        """Play the run to its end and return the final model's path. Raises FedstrataError."""
        experiment = self._folder.experiment
        identity = Identity(
            self._folder.run, CLOUD, "cloud", new_session(), self._metrics_address, books=self._folder.run
        )
        spool = Spool.open(self._spool, run=identity.run, node=identity.name)
        down = ParentFace(
            self._broker,
            identity,
            links={name: experiment.link(name) for name in experiment.topology.institution_names()},
            transfer=experiment.transfer,
            shaped=experiment.links.enforce == "bucket",
            codecs=experiment.transfer.wan,
            spool=spool,
            observe=self._observe,
        )
        export_parent(self._metrics, down, LABELS)
        facts = {"run": self._folder.run, "experiment": experiment.name, "digest": experiment.digest}
        self._metrics.run.labels(*LABELS).info(facts)
        evaluator = Evaluator(experiment)
        try:
            model = await live(
                (down.endpoint,),
                self._play(down, evaluator, spool),
                connect_timeout_s=self._connect_timeout_s,
                goodbye=lambda: down.farewells(timeout_s=FAREWELL_S),
            )
            spool.close()
            return model
        except FedstrataError as error:
            self._observe("failed", {"reason": str(error)})
            raise
        finally:
            evaluator.close()
            self._folder.write_links(down.ledger)

    async def _play(self, down: ParentFace, evaluator: Evaluator, spool: Spool) -> Path:
        folder, experiment = self._folder, self._folder.experiment
        layout, row = await evaluator.start()
        down.set_layout(layout)
        folder.note(model_bytes=layout.row_bytes)  # of a model as fp32: beside links.csv it shows what codecs save
        rule = aggregator.build(
            experiment.cloud.aggregation,
            layout=layout,
            node=CLOUD,
            tier="cloud",
            seed=experiment.seed,
            rows=partial(spool.memory, row_bytes=layout.row_bytes, resident_mb=experiment.transfer.resident_mb),
            folder=folder.path / "cache",
        )
        iterations = GlobalIterations(
            folder,
            layout=layout,
            row=row,
            rule=rule,
            down=down,
            evaluator=evaluator,
            metrics=self._metrics,
            observe=self._observe,
        )
        if self._resume:
            newest = checkpoint.latest(folder.checkpoints)
            state = checkpoint.load(newest, layout=layout, row=row, rule=rule) if newest else iterations.state
            if state.digest != experiment.digest:
                raise InvalidExperiment("--resume", str(folder.path), "its experiment was changed", "Restore the file.")
            iterations.resume(state)
        down.endpoint.announce(Announcement(experiment.to_json(), layout.to_json()))
        down.endpoint.set_state(NodeState.READY)
        self._observe(
            "run",
            {
                "run": folder.run,
                "folder": str(folder.path),
                "experiment": experiment.name,
                "iterations": experiment.iterations,
                "done": iterations.state.iteration,
                "institutions": {name: len(devices) for name, devices in experiment.topology.children().items()},
                "model": experiment.model.name,
                "model_bytes": layout.row_bytes,
                "metrics": self._metrics_address,
            },
        )
        await down.gather(experiment.cloud.closing)
        await down.measure(experiment.links)
        showing = asyncio.create_task(self._show_progress(down), name="progress")
        try:
            await iterations.run()
        finally:
            showing.cancel()
        path = folder.path / "model.safetensors"
        state = iterations.state
        facts = {"run": folder.run, "experiment": experiment.name, "digest": experiment.digest}
        checkpoint.save_model(path, layout=layout, row=iterations.row, facts=facts)
        self._observe(
            "finished",
            {
                "round": state.iteration,
                "elapsed_s": state.elapsed_s,
                "accuracy": iterations.last.accuracy if iterations.last else None,
                "loss": iterations.last.loss if iterations.last else None,
                "model": str(path),
                "model_bytes": layout.row_bytes,
                **self._bytes(down),
            },
        )
        return path

    async def _show_progress(self, down: ParentFace) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._show("progress", {"states": down.coordinator.progress(), **self._bytes(down)})

    @staticmethod
    def _bytes(down: ParentFace) -> dict[str, object]:
        wan = list(down.ledger.links().values())
        lan = down.ledger.below()
        return {
            "wan_up_bytes": sum(link.received for link in wan),
            "wan_down_bytes": sum(link.sent for link in wan),
            "lan_up_bytes": lan.received,
            "lan_down_bytes": lan.sent,
        }

    def _observe(self, event: str, facts: dict[str, object]) -> None:
        self._folder.event(event, facts)
        self._show(event, facts)
