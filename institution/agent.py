"""The institution: a child of the cloud and the parent of its devices, joined by a few lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from common.errors import InvalidExperiment
from common.layout import ModelLayout
from common.metrics import Metrics
from common.net.link import BrokerAddress
from common.node.child import ChildFace
from common.node.discovery import discover
from common.node.exports import export_child, export_parent
from common.node.identity import Identity, new_session
from common.node.life import live
from common.node.parent import ParentFace
from common.node.spool import Spool
from common.rounds.timeline import PHASES
from common.spec import CLOUD, Experiment, parse
from common.wire.messages import NodeState, Target
from common.wire.topics import DEFAULT_LAB, check_lab
from institution.rounds import LocalRounds

FAREWELL_S = 5.0


class InstitutionAgent:
    """One institution of a lab; its devices may be on another broker than the cloud."""

    def __init__(
        self,
        name: str,
        *,
        cloud_broker: BrokerAddress,
        device_broker: BrokerAddress,
        connect_timeout_s: float,
        metrics: Metrics,
        metrics_address: str = "",
        lab: str = DEFAULT_LAB,
        spool: Path | None = None,
    ) -> None:
        self._name = name
        self._cloud_broker = cloud_broker
        self._device_broker = device_broker
        self._connect_timeout_s = connect_timeout_s
        self._metrics = metrics
        self._metrics_address = metrics_address
        self._lab = check_lab(lab)
        self._spool = spool

    async def run(self) -> None:
        """Take part in one run, to its end. Raises FedstrataError."""
        run, announcement = await discover(
            self._cloud_broker, CLOUD, lab=self._lab, connect_timeout_s=self._connect_timeout_s
        )
        experiment = parse(announcement.experiment)
        layout = ModelLayout.from_json(announcement.layout)
        devices = self._devices(experiment)
        identity = Identity(run, self._name, "institution", new_session(), self._metrics_address, lab=self._lab)
        spool = Spool.open(self._spool, run=run, node=self._name)
        shaped = experiment.links.enforce == "bucket"
        up = ChildFace(
            self._cloud_broker,
            identity,
            parent=CLOUD,
            transfer=experiment.transfer,
            link=experiment.link(self._name),
            shaped=shaped,
            codecs=experiment.transfer.wan,
            spool=spool,
        )
        down = ParentFace(
            self._device_broker,
            identity,
            links={name: experiment.link(name) for name in devices},
            transfer=experiment.transfer,
            shaped=shaped,
            codecs=experiment.transfer.lan,
            spool=spool,
        )
        up.below = lambda: replace(down.ledger.total(), wire=down.ledger.broker())
        down.set_layout(layout)
        down.endpoint.announce(announcement)
        labels = ("institution", self._name, "")
        facts = {"run": run, "experiment": experiment.name, "algorithm": experiment.institution.aggregation.name}
        self._metrics.introduce(labels, facts, phases=PHASES)
        export_child(self._metrics, up, labels)
        export_parent(self._metrics, down, labels)

        def tell(targets: tuple[Target, ...]) -> None:
            for face in (up, down):  # where both have one broker, the last word of either is the node's
                face.endpoint.set_targets(targets)

        down.targets.tell = tell
        rounds = LocalRounds(self._name, experiment, layout=layout, spool=spool, down=down, metrics=self._metrics)

        async def work() -> None:
            await down.gather(experiment.institution.closing)
            await down.measure(experiment.links)
            for face in (up, down):
                face.endpoint.set_state(NodeState.READY, samples=sum(down.samples.values()))
            await up.serve(layout, rounds.work)

        async def goodbye() -> None:
            await down.farewells(timeout_s=FAREWELL_S)
            await up.farewell(rounds.reports(), timeout_s=FAREWELL_S)

        ends = (up.endpoint, down.endpoint)
        await live(
            ends,
            work(),
            connect_timeout_s=self._connect_timeout_s,
            goodbye=goodbye,
            last_look=self._metrics.last_look,
        )
        spool.close()

    def _devices(self, experiment: Experiment) -> list[str]:
        children = experiment.topology.children()
        if self._name not in children:
            raise InvalidExperiment(
                "--name", self._name, "this experiment has no such institution", f"It has {', '.join(children)}."
            )
        return children[self._name]
