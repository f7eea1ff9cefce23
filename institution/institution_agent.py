"""The institution agent: a node between the cloud and the devices, the parent of devices or of
other institutions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from fedstrata.common.experiment.reading import announced
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.examination import examine_host
from fedstrata.common.host.offload import beside
from fedstrata.common.metrics import NodeLabels
from fedstrata.common.model.layout import ModelLayout
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.protocol.limits import tests_below
from fedstrata.common.protocol.messages import LIVING, NodeState, Task
from fedstrata.common.protocol.peers import to_children, to_parent
from fedstrata.common.protocol.round_state import PHASES
from fedstrata.common.runtime.child_endpoint import ChildEndpoint
from fedstrata.common.runtime.discovery import Found, activity, join
from fedstrata.common.runtime.exports import export_child, export_parent, passed_on
from fedstrata.common.runtime.lifecycle import live
from fedstrata.common.runtime.link_models import Arriving
from fedstrata.common.runtime.parent_endpoint import ParentEndpoint
from fedstrata.common.runtime.refining import RefinerProcess
from fedstrata.common.runtime.roll import Resources
from fedstrata.common.runtime.round import DoTask, NodeContext, Report, WorkResult
from fedstrata.common.runtime.world import Host
from fedstrata.common.secure.links import links_of
from fedstrata.common.settings.own import permit
from fedstrata.common.settings.topology import CLOUD, check_parent
from fedstrata.common.storage.spool import FrozenFiles, Spool
from fedstrata.institution.rounds import LocalRounds

FAREWELL_S = 5.0
REPORT_S = 1.0
NO_CHILD_S = 5.0  # before it is reported; a broker that restarts loses all children for a moment

log = logging.getLogger("fedstrata.institution")


class InstitutionAgent:
    """One institution; its children may be on another broker than its parent. Only rules that need
    data read any.
    """

    def __init__(
        self, name: str, host: Host, *, parent: str = CLOUD, child_broker: BrokerAddress
    ) -> None:
        self._name = name
        self._host = host
        self._parent = parent
        self._child_broker = child_broker
        self._metrics = host.metrics
        self._labels = NodeLabels("institution", name, parent=parent)

    async def run(self) -> None:
        """Take part in one run until its end, or in each run of its parent if it stays. Raises
        FedstrataError.
        """
        await join(
            self._host,
            self._name,
            self._parent,
            self._take_part,
            role="institution",
            resources=self._resources,
        )

    def _resources(self) -> Resources:
        return Resources(findings=tuple(examine_host(self._host.folders, learns=False)))

    async def _take_part(self, found: Found) -> None:
        with self._metrics.run_of(self._labels):
            await self._serve(found)

    async def _serve(self, found: Found) -> None:
        run = found.run
        announcement = found.announcement
        host = self._host
        experiment = announced(announcement.experiment)
        layout = ModelLayout.from_json(announcement.layout)
        tree = experiment.tree
        check_parent(tree, self._name, self._parent, role="institution", among=tree.aggregators)
        children = tree.children[self._name]
        above = experiment.tier_above(self._name)
        tier = experiment.tier_below(self._name)
        identity = host.identity(run, self._name, "institution")
        spool = Spool.open(host.spool, run=run, node=self._name)
        files = FrozenFiles(host.spool, self._name, run=host.keeps_files_of(run))

        def observe(event: str, _: object) -> None:
            if event == "child":
                presence.look()

        down = ParentEndpoint(
            self._child_broker,
            identity,
            to_children(experiment, self._name),
            codecs=tier.transfer,
            minimum_of=tier.minimum_of,
            spool=spool,
            observe=observe,
            world=host.world,
        )
        up = ChildEndpoint(
            host.broker,
            identity,
            to_parent(
                experiment,
                self._name,
                self._parent,
                session=found.parent_session,
                below=down.ledger,
                frozen=layout.frozen,
            ),
            codecs=above.transfer,
            spool=spool,
            files=files,
            world=host.world,
        )
        down.set_layouts(links_of(experiment, tier, layout))
        down.frozen.source = up.frozen
        down.remember(spool.counts())
        down.announce(announcement)
        facts = {"run": run, "experiment": experiment.name, "algorithm": tier.aggregation.name}
        self._metrics.introduce(self._labels, facts, phases=PHASES)
        export_child(self._metrics, up, self._labels, tier=above.name)
        export_parent(self._metrics, down, self._labels, tier=tier.name)
        refiner = self._refiner(experiment, announcement.partition)
        context = NodeContext(
            down=down, spool=spool, metrics=self._metrics, refiner=refiner, world=host.world
        )
        rounds = LocalRounds(self._name, experiment, context, layout=layout)

        def tests() -> int:
            if tier.entering or len(down.tests) != len(children):
                return 0  # more may come
            return tests_below(experiment, down.tests)

        presence = _OwnPresence(self._name, up, down, kind=tier.children, tests=tests)
        presence.look()

        async def work() -> None:
            targets = self._pass_targets_on(up, down)
            begin = self._pass_begin_on(up, down)
            try:
                async with beside(targets, name="targets"), beside(begin, name="begin"):
                    permit(experiment.code_at(self._name), host.allow)
                    if await up.unless_over(self._prepare(up, down, experiment, layout, refiner)):
                        samples = sum(down.samples.values())
                        presence.publish(NodeState.READY, samples=samples)
                        activity.info(
                            "%s: run %s: taking part with %d of %d %ss, %d samples",
                            self._name,
                            run,
                            len(down.samples),
                            len(children),
                            tier.children,
                            samples,
                        )
                        await up.serve(
                            links_of(experiment, above, layout),
                            _counting(rounds, down, spool),
                            member=rounds.member,
                        )
            finally:
                presence.close()
                if refiner is not None:
                    refiner.close()

        async def goodbye() -> None:
            await down.farewells(timeout_s=FAREWELL_S)
            await up.farewell(rounds.reports(), timeout_s=FAREWELL_S)

        await live(
            (up, down),
            work(),
            connect_timeout_s=host.connect_timeout_s,
            goodbye=goodbye,
            last_scrape=self._metrics.last_scrape,
        )
        spool.close()
        files.close()

    def _refiner(self, experiment: Experiment, partition: str) -> RefinerProcess | None:
        """Return the refiner of a rule that needs one. Raises InvalidExperiment if it may not read
        the data.
        """
        rule = experiment.tier_below(self._name).aggregation
        if not rule.refines:
            return None
        here = self._host.placed(experiment, self._name) if rule.reads_samples else experiment
        return RefinerProcess(here, self._name, partition=partition)

    async def _prepare(
        self,
        up: ChildEndpoint,
        down: ParentEndpoint,
        experiment: Experiment,
        layout: ModelLayout,
        refiner: RefinerProcess | None,
    ) -> bool:
        """Gather the children and calibrate their links; report the progress, and which children it
        waits for.

        A refiner loads its data first, so that missing data end the run before its first round.
        """
        waits_for = ""

        def waiting(text: str) -> None:
            nonlocal waits_for
            waits_for = text

        async def report() -> None:
            while True:
                up.preparing(
                    down.moves + up.frozen.moves, waits_for=waits_for or up.frozen.waits_for
                )
                await asyncio.sleep(REPORT_S)

        async with beside(report(), name="preparing"):
            if refiner is not None:
                await refiner.prepare(layout, up.frozen.file)
            await down.gather(experiment.tier_below(self._name).closing, waiting=waiting)
            waits_for = ""
            await down.measure(experiment.links)
        return True

    @staticmethod
    async def _pass_begin_on(up: ChildEndpoint, down: ParentEndpoint) -> None:
        """Pass the run's time zero on to the children."""
        while True:
            down.session.begin(await up.began())
            down.wake()

    async def _pass_targets_on(self, up: ChildEndpoint, down: ParentEndpoint) -> None:
        """Publish the /metrics addresses of the nodes below with this node's presence, on both
        brokers.

        If both are one broker, the last presence of either endpoint is the node's.
        """
        while True:
            targets = passed_on(await down.targets_changed(), self._host.broker)
            for endpoint in (up, down):
                endpoint.link.own.set_targets(targets)
                endpoint.wake()


def _counting(rounds: LocalRounds, down: ParentEndpoint, spool: Spool) -> DoTask:
    """Return the work of the rounds, before which the children's samples are kept for a restart."""

    async def work(task: Task, model: Arriving, report: Report) -> WorkResult:
        spool.keep_counts(down.samples)
        return await rounds.work(task, model, report)

    return work


class _OwnPresence:
    """An institution's own state on both brokers; `reason` is set while none of its children is
    present.

    `kind`: what they are, `device` or `institution`; `tests`: the test samples of all devices
    below, 0 if not known.
    """

    def __init__(
        self,
        name: str,
        up: ChildEndpoint,
        down: ParentEndpoint,
        *,
        kind: str,
        tests: Callable[[], int],
    ) -> None:
        self.reason = ""
        self._name = name
        self._kind = kind
        self._tests = tests
        self._endpoints = (up, down)
        self._down = down
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def look(self) -> None:
        """Publish the samples of a child that has come later, and whether children are present.

        That none is, only after `NO_CHILD_S`.
        """
        own = self._down.link.own.presence
        samples = sum(self._down.samples.values())
        if own.state is NodeState.READY and samples != own.samples:
            self.publish(NodeState.READY, samples=samples)
        if not self._down.session.attendance.present():
            if self._timer is None and not self.reason and not self._closed:
                self._timer = asyncio.get_running_loop().call_later(NO_CHILD_S, self._report)
            return
        self._cancel()
        if self.reason:
            self.reason = ""
            log.info("%s: a child is present again", self._name)
            self._publish_reason()

    def publish(self, state: NodeState, *, samples: int) -> None:
        """Publish a state."""
        for endpoint in self._endpoints:
            endpoint.set_state(state, reason=self.reason, samples=samples, tests=self._tests())

    def close(self) -> None:
        """Stop reporting: the children leave because the run is over."""
        self._closed = True
        self._cancel()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _report(self) -> None:
        self._timer = None
        self.reason = f"no {self._kind} is present"
        log.warning("%s: %s", self._name, self.reason)
        self._publish_reason()

    def _publish_reason(self) -> None:
        presence = self._down.link.own.presence
        if presence.state in LIVING:
            self.publish(presence.state, samples=presence.samples)
