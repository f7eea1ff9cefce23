"""A lab without a network: all roles in this process; devices train one after another.

Global rounds, local rounds, aggregation rules and training are the agents' own code; `deploy.local.calls` replaces the
brokers. The final model equals that of a lab of processes bit for bit. Bytes are those of the models only, and seconds
are this machine's computing time.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from cloud.evaluator import Beginning, EvaluationResult
from cloud.global_rounds import GlobalRounds
from cloud.results import RunFolder
from common.errors import FedstrataError, InvalidExperiment, StorageFailed
from common.experiment.data import check_alike
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD
from common.host.files import writing
from common.host.processes import interruptible
from common.learning import splits
from common.learning.computing import resolve_accelerator
from common.learning.evaluation import ModelTester, accelerator_of
from common.learning.inputs import Inputs
from common.learning.refiner import NodeRefiner
from common.methods.rule import link_layouts
from common.methods.selection import Choose
from common.metrics import Metrics
from common.model.layout import Row
from common.protocol.limits import limits_below
from common.protocol.messages import Phase, Task
from common.runtime.models import Arriving
from common.runtime.round import Observe, Report, Work, WorkResult
from common.storage.spool import Spool
from deploy.local.calls import Calls, Clock
from deploy.local.decisions import Decisions
from device.memory import DeviceMemory
from device.training.network import NetworkSource
from device.training.trainer import Trainer
from device.training.work import LocalWork, scored_by
from institution.rounds import LocalRounds


def run_in_process(
    folder: RunFolder, *, resume: bool, accelerator: str, observe: Observe, decisions: Decisions | None = None
) -> Path:
    """Run the experiment of a direct folder to its end, with the decisions of a recorded run; return the model's path.

    Raises FedstrataError, KeyboardInterrupt.
    """
    with interruptible():
        return asyncio.run(_run(folder, resume=resume, accelerator=accelerator, observe=observe, decisions=decisions))


async def _run(
    folder: RunFolder, *, resume: bool, accelerator: str, observe: Observe, decisions: Decisions | None
) -> Path:
    asyncio.get_running_loop().set_default_executor(_AtOnce())
    experiment = folder.experiment
    if experiment.training.vmapped == "always":
        problem, remedy = "--direct trains devices one after another", "Use auto or never, or omit --direct."
        raise InvalidExperiment("training.vmapped", "always", problem, remedy)
    RunFolder.check(folder.path, direct=True)

    def record(event: str, facts: dict[str, object]) -> None:
        folder.event(event, facts)
        observe(event, facts)

    clock, metrics = Clock(), Metrics()
    partition = splits.keep(experiment, folder.path)
    evaluates_on = accelerator_of(experiment, beside=resolve_accelerator(accelerator))
    folder.note(evaluated_on=str(evaluates_on))
    tester = ModelTester(experiment, accelerator=evaluates_on)

    async def evaluate(global_round: int, row: Row) -> EvaluationResult:
        with clock.stopped():
            found = tester.evaluate(row)
        return EvaluationResult(global_round, found.score, found.loss)

    layout = tester.layout
    calls = partial(Calls, resident_mb=experiment.transfer.resident_mb, clock=clock)
    below: dict[str, Calls] = {}
    tree = experiment.tree
    sources: dict[Inputs, NetworkSource] = {}
    trainers = {
        device: _trainer(experiment, device, accelerator, sources, partition=partition) for device in tree.devices
    }
    work = {device: _device(folder, device, trainer) for device, trainer in trainers.items()}
    samples = {device: trainer.samples for device, trainer in trainers.items()}

    def accounting(parent: str) -> dict[str, Any]:
        return {
            "below": lambda child: below[child].ledger.tiers() if child in below else (),
            "limits": limits_below(experiment, parent),
            "recorded": decisions and partial(decisions.of_round, parent),
        }

    def choose(parent: str) -> Choose | None:
        return decisions.choose(parent) if decisions else None

    for name in reversed(tree.aggregators):
        children, spool = tree.children[name], _spool(folder, name)
        below[name] = calls(
            {child: work[child] for child in children},
            samples={child: samples[child] for child in children},
            layouts=link_layouts(experiment.tier_below(name).aggregation, layout),
            codecs=experiment.tier_below(name).transfer,
            spool=spool,
            **accounting(name),
        )
        samples[name] = sum(below[name].samples.values())
        rounds = LocalRounds(
            name,
            experiment,
            layout=layout,
            spool=spool,
            down=below[name],
            metrics=metrics,
            choose=choose(name),
            refiner=_refiner(experiment, name, partition=partition),
        )
        work[name] = rounds.work
    spool = _spool(folder, CLOUD)
    down = calls(
        {child: work[child] for child in tree.children[CLOUD]},
        samples={child: samples[child] for child in tree.children[CLOUD]},
        layouts=link_layouts(experiment.tier_below(CLOUD).aggregation, layout),
        codecs=experiment.tier_below(CLOUD).transfer,
        spool=spool,
        observe=record,
        **accounting(CLOUD),
    )
    try:
        run = GlobalRounds(
            folder,
            Beginning(layout, tester.first, partition, notes=tester.notes, initial=tester.initial),
            spool=spool,
            down=down,
            evaluate=evaluate,
            metrics=metrics,
            observe=record,
            choose=choose(CLOUD),
            refiner=_refiner(experiment, CLOUD, partition=partition),
        )
        if resume:
            run.resume()
        run.introduce()
        model = await run.run()
        folder.finish(down.ledger)
    except BaseException as error:
        if isinstance(error, FedstrataError):
            record("failed", {"reason": str(error)})
        with suppress(StorageFailed):  # it would hide the first error
            folder.finish(down.ledger)
        raise
    keeping = [name for name, trainer in trainers.items() if trainer.vectors.kept]
    for name in (*tree.aggregators, *keeping, CLOUD):
        _spool(folder, name).close()
    return model


def _spool(folder: RunFolder, node: str) -> Spool:
    path = folder.path / "spool" / node
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return Spool(path)


def _refiner(experiment: Experiment, node: str, *, partition: str) -> NodeRefiner | None:
    needed = experiment.tier_below(node).aggregation.refines
    return NodeRefiner(experiment, node, partition=partition) if needed else None


def _trainer(
    experiment: Experiment, name: str, accelerator: str, sources: dict[Inputs, NetworkSource], *, partition: str
) -> Trainer:
    trainer = Trainer(experiment, node=name, accelerator=accelerator, sources=sources)
    trainer.prepare()
    check_alike(experiment.data, name, partition=trainer.partition, clouds=partition)
    return trainer


def _device(folder: RunFolder, name: str, trainer: Trainer) -> Work:
    experiment = folder.experiment
    memory = DeviceMemory(
        link_layouts(experiment.tier_above(name).aggregation, trainer.layout),
        kept_bytes=trainer.vectors.kept_bytes,
        rounds=experiment.device_rounds,
        rounds_back=experiment.cloud.rounds_back,
        spool=_spool(folder, name) if trainer.vectors.kept else Spool(None),
    )
    local = LocalWork(trainer, memory, scored_by(experiment, name))
    never = threading.Event()

    async def work(task: Task, model: Arriving, report: Report) -> WorkResult:
        return local(task, await model.whole(), progress=partial(report, Phase.TRAINING), cancelled=never)

    return work


class _AtOnce(ThreadPoolExecutor):
    """Executor that runs each call immediately in the caller's thread: no keep-alive depends on the event loop here."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            future.set_exception(error)
        return future
