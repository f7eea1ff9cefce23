"""The device agent: waits for an experiment, then trains each model that its parent assigns.

The result of a device that emulates a slower machine is delayed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import ceil, inf
from pathlib import Path
from typing import Final

from fedstrata.common.errors import InvalidExperiment, OutOfReach, ParentGaveUp
from fedstrata.common.experiment.reading import announced
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.examination import examine_host
from fedstrata.common.host.files import until_written
from fedstrata.common.host.offload import offload, work_on
from fedstrata.common.metrics import NodeLabels
from fedstrata.common.model.layout import ModelLayout
from fedstrata.common.protocol.messages import NodeState, Phase, Task
from fedstrata.common.protocol.peers import to_parent
from fedstrata.common.runtime.child_endpoint import ChildEndpoint
from fedstrata.common.runtime.discovery import Found, activity, another_parent, join
from fedstrata.common.runtime.exports import export_child
from fedstrata.common.runtime.lifecycle import MovesAway, live, through_absences, while_online
from fedstrata.common.runtime.link_models import Arriving
from fedstrata.common.runtime.roll import Resources
from fedstrata.common.runtime.round import Report, WorkResult
from fedstrata.common.runtime.world import Host
from fedstrata.common.secure.links import links_of
from fedstrata.common.settings.data import Data, check_alike, examine_data, found_in
from fedstrata.common.settings.devices import Move, Pace
from fedstrata.common.settings.own import permit
from fedstrata.common.settings.topology import check_parent
from fedstrata.common.storage.spool import FrozenFiles, Spool
from fedstrata.device.jobs import WAITS_S, LocalResult, Order, Prepared, TrainingPool
from fedstrata.device.training.tasks import LocalWork

FAREWELL_S = 3.0
PHASES = ("evaluate", "train", "wait", "pause", "vmapped")
WAITING_S = 2.0  # as often as a node reports
REPORT_S: Final = 1.0  # while a slower machine is emulated

log = logging.getLogger("fedstrata.device")


@dataclass(slots=True)
class _PartInRun:
    """A device's part in a run, which it keeps while it is away; `work`: once it has prepared.

    `layout`: the cloud's; `files`: frozen arrays of this run and of earlier ones. `parent`: its
    present one, and `session` that one's; `begun`: the run has; `used`: the last task that a parent
    used, and which one. `moving`: its last move by its trace, and `failed`: those to parents that
    did not take it.
    """

    found: Found
    experiment: Experiment
    layout: ModelLayout
    spool: Spool
    states: Spool
    files: FrozenFiles
    parent: str
    session: str
    begun: bool = False
    used: tuple[int, str] = (0, "")
    moving: Move | None = None
    failed: list[Move] = field(default_factory=list)
    work: LocalWork | None = None


class DeviceAgent:
    """One device, which initially knows only its host's broker, its name and its parent.

    `states`: the folder of what it keeps from task to task, None: a temporary one.
    """

    def __init__(
        self, name: str, host: Host, *, parent: str, pool: TrainingPool, states: Path | None = None
    ) -> None:
        self._name = name
        self._host = host
        self._parent = parent
        self._training = pool.member(name)
        self._metrics = host.metrics
        self._states = states
        self._labels = NodeLabels("device", name, parent=parent)
        self._scores: Sequence[str] = ()  # the names of the run's
        self._moved_to = ""

    async def run(self) -> None:
        """Take part in one run until its end, or in each run of its parent if it stays. Raises
        FedstrataError.
        """
        await join(
            self._host,
            self._name,
            self._parent,
            self._take_part,
            role="device",
            usable=lambda: self._training.failure is None,
            resources=self._resources,
        )

    def _resources(self) -> Resources:
        host = self._host
        asked = host.data or str(host.data_root / Data.model_fields["root"].default)
        root = Path(asked.replace("{node}", self._name))
        findings = [
            *examine_host(host.folders, learns=True),
            examine_data(root, needed=host.data is not None),
        ]
        return Resources(
            self._training.hardware,
            ", ".join(found_in(root)),
            tuple(findings),
            parent=self._moved_to,
        )

    async def _take_part(self, found: Found) -> None:
        try:
            with self._metrics.run_of(self._labels):
                await self._serve(found)
        finally:
            self._moved_to = ""
            self._training.leave()

    async def _serve(self, found: Found) -> None:
        run = found.run
        host = self._host
        experiment = host.placed(announced(found.announcement.experiment), self._name)
        tree = experiment.tree
        if not experiment.takes(self._name, self._parent):  # before it publishes its name
            check_parent(tree, self._name, self._parent, role="device", among=tree.devices)
        spool = Spool.open(host.spool, run=run, node=self._name)
        keeps = experiment.devices_remember or experiment.keeps_secret(self._name)
        folder = self._states if keeps else None
        states = Spool.open(folder, run=run, node=self._name)
        self._metrics.introduce(
            self._labels, {"run": run, "experiment": experiment.name}, phases=PHASES
        )
        layout = ModelLayout.from_json(found.announcement.layout)
        files = FrozenFiles(self._states, self._name, run=host.keeps_files_of(run))
        part = _PartInRun(
            found, experiment, layout, spool, states, files, self._parent, found.parent_session
        )
        once = partial(self._take_part_moving, part)
        times = experiment.online(self._name)
        await through_absences(once, host, self._name, lambda: part.parent, run=run, times=times)
        spool.close()
        states.close()
        files.close()

    async def _take_part_moving(self, part: _PartInRun) -> None:
        """Take part in a run to its end, below another parent after each move. Raises Away."""
        host = self._host
        name = self._name
        experiment = part.experiment
        patience_s = experiment.tiers[-1].move_after_s if len(experiment.tree.parents) > 1 else None
        while True:
            try:
                return await self._take_part_once(part, patience_s)
            except MovesAway as away:
                part.moving = away.move
                part.parent = away.move.parent
                part.session = ""
            except (OutOfReach, ParentGaveUp) as error:
                if patience_s is None or not part.begun:
                    raise
                if part.moving is not None:
                    part.failed.append(part.moving)
                run = part.found.run
                for_s = experiment.transfer.idle_s
                parents = [parent for parent in experiment.tree.parents if parent != part.parent]
                activity.info("%s: run %s: looks for another parent: %s", name, run, error)
                found = await another_parent(host, name, parents, run=run, for_s=for_s)
                if found is None:
                    raise
                part.parent, part.session = found
            self._moved_to = part.parent
            activity.info("%s: run %s: moves to %s", name, part.found.run, part.parent)

    async def _take_part_once(self, part: _PartInRun, patience_s: float | None) -> None:
        """Take part in a run to its end. Raises Away or MovesAway if the device's traces take it
        away before.
        """
        host = self._host
        experiment = part.experiment
        found = part.found
        tier = experiment.tier_above(self._name)
        used, by = part.used
        after = 0 if by == part.parent else used
        up = ChildEndpoint(
            host.broker,
            host.identity(found.run, self._name, "device"),
            to_parent(
                experiment,
                self._name,
                part.parent,
                session=part.session,
                frozen=part.layout.frozen,
                patience_s=patience_s,
                entered=self._name not in experiment.tree.children[part.parent],
            ),
            codecs=tier.transfer,
            spool=part.spool,
            files=part.files,
            after=after,
            world=host.world,
        )
        export_child(self._metrics, up, self._labels, tier=tier.name)
        times = experiment.online(self._name)
        moves = experiment.moves(self._name)
        try:
            await live(
                (up,),
                while_online(up, times, self._work(up, part), moves=moves, failed=part.failed),
                connect_timeout_s=host.connect_timeout_s,
                goodbye=partial(up.farewell, (), timeout_s=FAREWELL_S),
                last_scrape=self._metrics.last_scrape,
            )
        finally:
            part.begun = part.begun or up.link.own.begun is not None
            if (key := up.session.accepted) is not None:
                part.used = (
                    experiment.device_rounds * key.global_round + key.local_round + 1,
                    part.parent,
                )

    async def _work(self, up: ChildEndpoint, part: _PartInRun) -> None:
        part.work = part.work or await self._join(up, part)
        if part.work is not None:
            await self._train_all(up, part.experiment, part.work)

    async def _join(self, up: ChildEndpoint, part: _PartInRun) -> LocalWork | None:
        """Prepare for a run; return None if it is over before."""
        experiment = part.experiment
        announcement = part.found.announcement
        permit(experiment.code_at(self._name), self._host.allow)
        prepared = await up.unless_over(self._prepare(up, experiment, part.layout))
        if prepared is None:
            return None
        check_alike(
            experiment.data, self._name, partition=prepared.partition, clouds=announcement.partition
        )
        if prepared.layout != part.layout:
            raise InvalidExperiment(
                "model.name",
                experiment.model.name,
                (
                    f"this host builds another model than the cloud ({prepared.layout.digest}, "
                    f"{part.layout.digest})"
                ),
                "Use one release of fedstrata, and of the model's package, everywhere.",
            )
        secret = partial(part.states.secret, self._host.world.noise)
        noise = self._host.world.noise
        work = LocalWork(
            experiment, self._name, prepared, states=part.states, secret=secret, noise=noise
        )
        run = up.identity.run
        model = experiment.model.name
        activity.info(
            "%s: run %s: training %s with %d samples", self._name, run, model, prepared.samples
        )
        return work

    async def _train_all(self, up: ChildEndpoint, experiment: Experiment, local: LocalWork) -> None:
        tests = local.prepared.tests if experiment.evaluation.on_devices else 0
        up.set_state(NodeState.READY, samples=local.prepared.samples, tests=tests)
        machine = experiment.machine(self._name)
        keeps = local.keeps
        self._scores = experiment.score.names
        off = keeps or experiment.keeps_secret(self._name)

        async def work(task: Task, model: Arriving, report: Report) -> WorkResult:
            row = await model.whole()
            since = up.now()
            begin = partial(local.order, task, row, partial(report, Phase.TRAINING))
            order = await offload(begin) if off else begin()
            if isinstance(order, WorkResult):
                return order
            result = local.result(await self._train(order, report))
            if not task.epochs:
                return result
            result = await emulate(machine, result, since=since, report=report)
            self._metrics.phase_seconds.labels(*self._labels, "pause").inc(result.work.pause_s)
            await hold_back(local.delay_s(task), report=report)
            result = await work_on(partial(local.encoded, task, result, row), nbytes=row.nbytes)
            if keeps:
                keep = partial(local.keep, task)
                idle_s = experiment.transfer.idle_s
                await until_written(lambda: offload(keep), patience_s=idle_s, warn=log.warning)
            return result

        tier = experiment.tier_above(self._name)
        links = links_of(experiment, tier, local.prepared.layout)
        await up.serve(links, work, member=local.member)

    async def _prepare(
        self, up: ChildEndpoint, experiment: Experiment, layout: ModelLayout
    ) -> Prepared:
        """Prepare, with the cloud's frozen arrays if this host builds others; meanwhile report the
        progress.
        """

        trainer = experiment.training.trainer
        limit_s = max(WAITS_S, experiment.transfer.idle_s)

        async def report() -> None:
            for waits in count():
                # it may download samples
                looks = 0 if trainer.learns_module else min(waits, int(limit_s / WAITING_S))
                up.preparing(
                    self._training.moves + up.frozen.moves + looks, waits_for=up.frozen.waits_for
                )
                await asyncio.sleep(WAITING_S)

        reporting = asyncio.create_task(report(), name=f"{self._name} prepares")
        try:
            prepared = await self._training.prepare(experiment, frozen=await up.frozen.held())
            if not prepared.layout.differs_in_frozen(layout):
                return prepared
            path = await up.frozen.file()
            activity.info(
                "%s: has the cloud's frozen arrays, %d bytes", self._name, path.stat().st_size
            )
            return await self._training.prepare(experiment, frozen=path)
        finally:
            reporting.cancel()

    async def _train(self, order: Order, report: Report) -> LocalResult:
        """Train as ordered; report the progress of this process's trainings until this one's
        begins.
        """

        def report_training(done: int, total: int) -> None:
            waiting.cancel()
            order.progress(done, total)

        async def report_waiting() -> None:
            while True:
                report(Phase.WAITING, self._training.moves, 0)
                await asyncio.sleep(WAITING_S)

        waiting = asyncio.create_task(report_waiting(), name=f"{self._name} waits")
        try:
            result = await self._training.train(replace(order, progress=report_training))
        finally:
            waiting.cancel()
        self._observe_tests(result)
        if not order.epochs:
            return result
        self._metrics.closed(self._labels)
        self._metrics.steps.labels(*self._labels).inc(result.work.steps)
        self._metrics.trained(self._labels, result.work.loss)
        self._metrics.epochs.labels(*self._labels).set(order.epochs)
        self._metrics.phase_seconds.labels(*self._labels, "train").inc(result.work.train_s)
        self._metrics.phase_seconds.labels(*self._labels, "wait").inc(result.work.wait_s)
        self._metrics.phase_seconds.labels(*self._labels, "vmapped").inc(result.wall_s)
        if result.work.costs.joules is not None:
            self._metrics.device_energy.labels(*self._labels).inc(result.work.costs.joules)
        return result

    def _observe_tests(self, result: LocalResult) -> None:
        """Export the scores of the model received, if this device has some, and the seconds of
        scoring.
        """
        if (tests := result.work.tests) is None:
            return
        metrics = self._metrics
        labels = self._labels
        names = self._scores
        if (sums := tests.received) is not None:
            metrics.scored(
                labels, dict(zip(names, sums.by(names), strict=True)), loss=sums.mean_loss
            )
        metrics.phase_seconds.labels(*labels, "evaluate").inc(tests.seconds)


async def hold_back(seconds: float, *, report: Report) -> None:
    """Hold the result of an adversary back, for ever if it is silent, until its task is
    replaced.
    """
    if seconds == inf:
        await asyncio.Event().wait()
    for reported in range(ceil(seconds / REPORT_S)):
        report(Phase.WAITING, reported, 0)
        await asyncio.sleep(min(REPORT_S, seconds - reported * REPORT_S))


async def emulate(pace: Pace, result: WorkResult, *, since: float, report: Report) -> WorkResult:
    """Return the result after the delay that emulates slower hardware; the model arrived at
    `since`, loop seconds.

    The delay occupies no slot. A count that grows every second reports to the parent that this
    device is alive.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    scored_s = 0.0 if result.work.tests is None else result.work.tests.seconds
    due = (
        since
        + pace.emulated_s(result.work.train_s, steps=result.work.steps)
        + pace.slowdown * scored_s
    )
    if due <= begun:
        return result
    for reported in count(1):
        left_s = due - loop.time()
        if left_s <= 0:
            break
        report(Phase.WAITING, reported, 0)
        await asyncio.sleep(min(REPORT_S, left_s))
    return replace(result, work=replace(result.work, pause_s=loop.time() - begun))
