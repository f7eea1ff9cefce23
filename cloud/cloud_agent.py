"""The cloud agent: starts the evaluator, announces the experiment, runs the global rounds, writes
the run's folder.

The energy of its host during the global rounds goes into manifest.json.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from fedstrata.cloud.evaluator import (
    Beginning,
    EvaluationResult,
    Evaluator,
    InitialModel,
    needs_process,
)
from fedstrata.cloud.global_rounds import GlobalRounds
from fedstrata.cloud.round_scores import LABELS
from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.errors import FedstrataError, StorageFailed
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.energy_meters import EnergyMeter
from fedstrata.common.host.files import until_written
from fedstrata.common.host.offload import beside, offload
from fedstrata.common.model.layout import Row
from fedstrata.common.protocol.admission import Budget
from fedstrata.common.protocol.attendance import ADDRESS, HTTPS
from fedstrata.common.protocol.messages import Announcement, NodeState
from fedstrata.common.protocol.peers import to_children
from fedstrata.common.protocol.round_state import GLOBAL_PHASES
from fedstrata.common.protocol.status import RunProgress
from fedstrata.common.runtime.exports import ScrapeTarget, discovery, export_parent
from fedstrata.common.runtime.frozen import OwnFrozen
from fedstrata.common.runtime.lifecycle import live
from fedstrata.common.runtime.parent_endpoint import ParentEndpoint
from fedstrata.common.runtime.refining import RefinerProcess
from fedstrata.common.runtime.round import NodeContext, Observe
from fedstrata.common.runtime.world import Host
from fedstrata.common.secure.links import links_of
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.storage.spool import FrozenFiles, Spool

FAREWELL_S = 10.0
INTERRUPTED_S = 5.0
STATUS_S = 0.5
CHANGES_MOST = 64  # of each child's state that are recorded at once, then one in CHANGE_S
CHANGE_S = 10.0


class ModelEvaluator(Protocol):
    """Interface between the cloud agent and its evaluator; see `cloud.evaluator.Evaluator`."""

    async def start(self) -> Beginning:
        """Return the initial model. Raises FedstrataError."""

    async def evaluate(self, global_round: int, row: Row) -> EvaluationResult | None:
        """Return the accuracy and loss of a model, uint8 [row_bytes], None if it has none. Raises
        FedstrataError.
        """

    def close(self) -> None:
        """Release the resources that `start` acquired."""


def evaluator_of(experiment: Experiment, folder: Path) -> ModelEvaluator:
    """Return the evaluator of a lab of processes."""
    if needs_process(experiment):
        return Evaluator(experiment, folder)
    return InitialModel(experiment)


class CloudAgent:
    """One run's cloud, in a lab of its broker.

    `observe` is called with every event as it happens: a name and facts that JSON can hold.
    `evaluator` builds the model evaluator from the experiment and the run's folder, None: a
    process, if one is needed. `energy`: of this host, None: it is not recorded.
    """

    def __init__(
        self,
        folder: RunFolder,
        host: Host,
        *,
        resume: bool,
        observe: Observe,
        evaluator: Callable[[Experiment, Path], ModelEvaluator] | None = None,
        energy: EnergyMeter | None = None,
    ) -> None:
        self._folder = folder
        self._host = host
        self._energy = energy
        self._resume = resume
        self._metrics = host.metrics
        self._show = observe
        self._new_evaluator = evaluator or evaluator_of
        self._changes = Budget(CHANGES_MOST, CHANGE_S)
        self._progress = RunProgress()

    async def run(self) -> Path:
        """Run all global rounds and return the path of the final model. Raises FedstrataError."""
        experiment = self._folder.experiment
        host = self._host
        identity = host.identity(self._folder.run, CLOUD, "cloud", ledger=self._folder.run)
        spool = Spool.open(host.spool, run=identity.run, node=identity.name)
        tree = experiment.tree
        tier = experiment.tier_below(CLOUD)
        down = ParentEndpoint(
            host.broker,
            identity,
            to_children(experiment, CLOUD),
            codecs=tier.transfer,
            minimum_of=tier.minimum_of,
            spool=spool,
            observe=self._observe,
            world=host.world,
        )
        down.session.run = self._progress
        export_parent(self._metrics, down, LABELS, tier=tier.name)
        facts = {
            "run": self._folder.run,
            "experiment": experiment.name,
            "digest": experiment.digest,
            "algorithm": tier.aggregation.name,
            "folder": self._folder.path.name,
        }
        self._metrics.introduce(LABELS, facts, phases=GLOBAL_PHASES)
        self._metrics.run_is(LABELS, "running")

        def targets(asked: str) -> list[ScrapeTarget]:
            own = host.metrics_address
            # the address that Prometheus used
            used = HTTPS + asked if own.startswith(HTTPS) else asked
            here = used if ADDRESS.fullmatch(used) else own
            return discovery(down.session.targets.addresses(), tree, cloud=here, run=identity.run)

        self._metrics.serve_targets(targets)
        evaluator = self._new_evaluator(experiment, self._folder.path)
        try:
            model = await live(
                (down,),
                self._run(down, evaluator, spool),
                connect_timeout_s=host.connect_timeout_s,
                goodbye=lambda: down.farewells(timeout_s=FAREWELL_S),
                last_scrape=partial(self._end_scrapes, "finished", down),
            )
            finish = partial(self._folder.finish, down.ledger)
            await until_written(
                lambda: offload(finish),
                patience_s=experiment.transfer.idle_s,
                warn=lambda reason: self._observe("warning", {"reason": reason}),
            )
            spool.close()
            return model
        except BaseException as error:
            if isinstance(error, FedstrataError):
                self._observe("failed", {"reason": str(error)})
            with suppress(StorageFailed):  # it would hide the first error
                self._folder.finish(down.ledger)
            if isinstance(error, FedstrataError):
                await self._end_scrapes("failed")
            elif isinstance(error, asyncio.CancelledError):
                self._metrics.run_is(LABELS, "interrupted")
                with suppress(TimeoutError):  # whoever interrupts a run waits for its end
                    async with asyncio.timeout(INTERRUPTED_S):
                        await asyncio.gather(
                            self._metrics.last_scrape(), self._metrics.last_discovery()
                        )
            raise
        finally:
            evaluator.close()

    async def _end_scrapes(self, state: str, down: ParentEndpoint | None = None) -> None:
        """Let Prometheus see how the run ended, and then that it has no targets any more.

        `down`: with the children, whose own last scrapes need the list of targets until they have
        left.
        """
        self._metrics.run_is(LABELS, state)
        await self._metrics.last_scrape()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._metrics.patience_s()):
                while down is not None and down.session.targets.addresses():
                    await down.targets_changed()
        await self._metrics.last_discovery()

    async def _run(self, down: ParentEndpoint, evaluator: ModelEvaluator, spool: Spool) -> Path:
        experiment = self._folder.experiment
        tier = experiment.tier_below(CLOUD)
        beginning = await evaluator.start()
        if experiment.evaluation.on_cloud:
            self._folder.note(evaluated_on=beginning.accelerator)
        else:
            evaluator.close()  # it has given the first model
        down.set_layouts(links_of(experiment, tier, beginning.layout))
        down.frozen.source = own = OwnFrozen(
            beginning.frozen,
            beginning.layout.frozen,
            FrozenFiles(self._host.spool, CLOUD, run=self._folder.run),
        )
        with ExitStack() as stack:
            refiner = None
            if tier.aggregation.refines:
                refiner = RefinerProcess(experiment, CLOUD, partition=beginning.partition)
                stack.callback(refiner.close)
                await refiner.prepare(beginning.layout, own.file)
            run = GlobalRounds(
                self._folder,
                beginning,
                NodeContext(
                    down=down,
                    spool=spool,
                    metrics=self._metrics,
                    refiner=refiner,
                    world=self._host.world,
                ),
                evaluate=evaluator.evaluate,
                observe=self._observe,
            )
            beginning = run.beginning
            if self._resume:
                run.resume()
            down.announce(
                Announcement(experiment.to_json(), beginning.layout.to_json(), beginning.partition)
            )
            down.set_state(NodeState.READY)
            run.introduce(metrics_address=self._host.metrics_address)
            stack.callback(asyncio.create_task(self._show_status(down), name="status").cancel)
            if self._resume:  # what is away by its trace returns by the time zero of this session
                self._begin(down, run)
            if run.needs_children:  # else the children may have left
                await down.gather(tier.closing)
                await down.measure(experiment.links)
            self._begin(down, run)
            self._observe("begun", {"elapsed_s": run.elapsed_s})
            async with energy_noted(self._folder, self._energy):
                return await run.run()

    @staticmethod
    def _begin(down: ParentEndpoint, run: GlobalRounds) -> None:
        """Begin the traces, at the place that the run has reached."""
        down.session.begin(down.now() - run.elapsed_s)
        down.wake()

    async def _show_status(self, down: ParentEndpoint) -> None:
        """Show the status record that `watch` asks for, in this process."""
        while True:
            self._show("status", asdict(down.session.status(down.now())))
            await asyncio.sleep(STATUS_S)

    def _observe(self, event: str, facts: dict[str, object]) -> None:
        if event == "child":
            now = asyncio.get_running_loop().time()
            if not self._changes.take(str(facts["node"]), now):
                return  # of a child that changes its state, or its reason, as fast as it may
        self._folder.event(event, facts)
        self._progress.take(event, facts)
        self._show(event, facts)


READ_S: Final = 10.0  # a power is integrated between two readings


@asynccontextmanager
async def energy_noted(folder: RunFolder, meter: EnergyMeter | None) -> AsyncIterator[None]:
    """Add what this host takes meanwhile to the run's manifest; nothing if its energy is not
    known.
    """
    if meter is None:
        yield
        return
    begun = time.monotonic()
    before = dict(await offload(meter.read))
    known = set(before)  # at every reading
    try:
        async with beside(_keep_reading(meter, known), name="energy"):
            yield
    finally:
        after = dict(meter.read())
        known.intersection_update(after)
        used = {" ".join(part): after[part] - before[part] for part in before if part in known}
        # what is essential to the run is written by others, who report it
        with suppress(StorageFailed):
            folder.add_energy(used, seconds=time.monotonic() - begun)


async def _keep_reading(meter: EnergyMeter, known: set[tuple[str, ...]]) -> None:
    while True:
        await asyncio.sleep(READ_S)
        known.intersection_update(part for part, _ in await offload(meter.read))
