"""A lab without a network: all roles in this process; devices train one after another, or vmapped
on a GPU.

Global rounds, local rounds, aggregation rules and training are the agents' own code;
`deploy.local.calls` replaces the brokers. The final model equals that of a lab of processes bit for
bit. Bytes are those of the models only, and seconds are this machine's computing time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedstrata.cloud.evaluator import Beginning, EvaluationResult
from fedstrata.cloud.global_rounds import GlobalRounds
from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.accounting.traffic import Traffic
from fedstrata.common.errors import FedstrataError, StorageFailed
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.files import replacing, writing
from fedstrata.common.host.processes import interruptible
from fedstrata.common.methods.selection import Choose
from fedstrata.common.metrics import Metrics
from fedstrata.common.model import tensors
from fedstrata.common.model.layout import Row
from fedstrata.common.model.refinement import Refiner
from fedstrata.common.protocol.limits import limits_below, tests_below
from fedstrata.common.protocol.messages import Phase, Task
from fedstrata.common.runtime.link_models import Arriving
from fedstrata.common.runtime.round import DoTask, NodeContext, Observe, Report, WorkResult
from fedstrata.common.runtime.world import REAL
from fedstrata.common.secure.links import links_of
from fedstrata.common.settings.data import check_alike
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.storage.spool import Spool
from fedstrata.common.training.array_trainer import TrainerTester
from fedstrata.deploy.local.calls import Calls, Clock, RoundDecisions
from fedstrata.device.jobs import Ending, HostedDevice, LocalResult, Order, Prepared, most_together
from fedstrata.device.pool.pool import is_cpu
from fedstrata.device.pool.trainers_by_kind import Trainers
from fedstrata.device.training.tasks import LocalWork
from fedstrata.institution.rounds import LocalRounds

if TYPE_CHECKING:
    from fedstrata.deploy.local.replay import Decisions


def run_in_process(
    folder: RunFolder,
    *,
    resume: bool,
    accelerator: str,
    observe: Observe,
    decisions: Decisions | None = None,
) -> Path:
    """Run the experiment of a direct folder to its end, with the decisions of a recorded run;
    return the model's path.

    Raises FedstrataError, KeyboardInterrupt.
    """
    with interruptible():
        return asyncio.run(
            _run(
                folder, resume=resume, accelerator=accelerator, observe=observe, decisions=decisions
            )
        )


async def _run(
    folder: RunFolder,
    *,
    resume: bool,
    accelerator: str,
    observe: Observe,
    decisions: Decisions | None,
) -> Path:
    asyncio.get_running_loop().set_default_executor(AtOnce())
    experiment = folder.experiment
    RunFolder.check(folder.path, direct=True)

    def record(event: str, facts: dict[str, object]) -> None:
        folder.event(event, facts)
        observe(event, facts)

    clock = Clock()
    metrics = Metrics()
    where = "cpu" if is_cpu(accelerator) else _resolved(accelerator)
    cloud = _evaluating(folder, where)
    folder.note(evaluated_on=cloud.beginning.accelerator)

    async def evaluate(global_round: int, row: Row) -> EvaluationResult | None:
        with clock.stopped():
            found = cloud.evaluate(global_round, row)
        if found is None:
            return None
        return EvaluationResult(global_round, found.score, found.loss, found.more, found.attacks)

    layout = cloud.beginning.layout
    partition = cloud.beginning.partition
    below: dict[str, Calls] = {}
    tree = experiment.tree
    training = _Training(where)
    frozen = _given(folder, cloud.beginning)
    devices = {
        name: HostedDevice(experiment, experiment.digest, name, frozen=frozen)
        for name in tree.devices
    }
    prepared = {name: training.prepare(device) for name, device in devices.items()}
    for name, facts in prepared.items():
        check_alike(experiment.data, name, partition=facts.partition, clouds=partition)
    local = {name: _local(folder, name, facts) for name, facts in prepared.items()}
    work = {name: training.work(devices[name], local[name]) for name in devices}
    members = {name: local[name].member for name in devices}
    samples = {name: facts.samples for name, facts in prepared.items()}
    tests = {name: facts.tests for name, facts in prepared.items()}

    def calls(parent: str, spool: Spool, record: Observe = lambda event, facts: None) -> Calls:
        tier = experiment.tier_below(parent)
        children = tree.children[parent]
        return Calls(
            {child: work[child] for child in children},
            samples={child: samples[child] for child in children},
            tests={child: tests[child] for child in children},
            layouts=links_of(experiment, tier, layout),
            codecs=tier.transfer,
            spool=spool,
            resident_mb=experiment.transfer.resident_mb,
            clock=clock,
            below=partial(_traffic, below),
            limits=limits_below(experiment, parent),
            observe=record,
            recorded=_recorded(decisions, parent),
            silent=partial(_silent, experiment),
            at_once=_at_once(experiment, where, parent),
            members=members,
        )

    def choose(parent: str) -> Choose | None:
        if decisions:
            return decisions.choose(parent)
        return None

    for name in reversed(tree.aggregators):
        spool = _spool(folder, name)
        below[name] = calls(name, spool)
        samples[name] = sum(below[name].samples.values())
        tests[name] = tests_below(experiment, below[name].tests)
        rounds = LocalRounds(
            name,
            experiment,
            NodeContext(
                down=below[name],
                spool=spool,
                metrics=metrics,
                choose=choose(name),
                refiner=_refiner(experiment, name, partition=partition, frozen=frozen),
            ),
            layout=layout,
        )
        work[name] = rounds.work
        members[name] = rounds.member
    spool = _spool(folder, CLOUD)
    down = calls(CLOUD, spool, record)
    try:
        run = GlobalRounds(
            folder,
            cloud.beginning,
            NodeContext(
                down=down,
                spool=spool,
                metrics=metrics,
                choose=choose(CLOUD),
                refiner=_refiner(experiment, CLOUD, partition=partition, frozen=frozen),
            ),
            evaluate=evaluate,
            observe=record,
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
    keeping = [name for name in tree.devices if _keeps(experiment, name)]
    for name in (*tree.aggregators, *keeping, CLOUD):
        _spool(folder, name).close()
    return model


def _traffic(calls: Mapping[str, Calls], child: str) -> tuple[Traffic, ...]:
    """Return the traffic of the tiers below a child."""
    if child in calls:
        return calls[child].ledger.tiers()
    return ()


def _recorded(
    decisions: Decisions | None, parent: str
) -> Callable[[int, int], RoundDecisions] | None:
    """Return what gives the recorded decisions of a parent's rounds, None without a record."""
    if decisions is None:
        return None
    return partial(decisions.of_round, parent)


def _at_once(experiment: Experiment, accelerator: str, parent: str) -> int:
    """Return how many children of a parent are called before a result is awaited."""
    if parent in experiment.tree.layers[-2]:
        return most_together(experiment, accelerator)
    return 1


def _local(folder: RunFolder, device: str, facts: Prepared) -> LocalWork:
    """Return the work of a device."""
    experiment = folder.experiment
    states = _spool(folder, device) if _keeps(experiment, device) else Spool(None)
    return LocalWork(
        experiment, device, facts, states=states, secret=partial(states.secret, REAL.noise)
    )


def _keeps(experiment: Experiment, device: str) -> bool:
    return experiment.devices_remember or experiment.keeps_secret(device)


def _spool(folder: RunFolder, node: str) -> Spool:
    path = folder.path / "spool" / node
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return Spool(path)


def _given(folder: RunFolder, beginning: Beginning) -> Path | None:
    """Return a file of the frozen arrays, if they come from `model.initial`; else each module has
    them.
    """
    form = beginning.layout.frozen
    if folder.experiment.model.initial is None or form is None:
        return None
    _spool(folder, CLOUD)
    with replacing(path := folder.path / "spool" / CLOUD / form.digest) as file:
        tensors.write(file, beginning.frozen, {})
    return path


def _silent(experiment: Experiment, child: str, task: Task) -> bool:
    """Return whether a child is an adversary that sends no result of a task."""
    adversary = experiment.attackers.adversary(child)
    key = task.key
    if adversary is None or not task.epochs:
        return False
    return adversary.silent(key.global_round * adversary.rounds + key.local_round)


def _refiner(
    experiment: Experiment, node: str, *, partition: str, frozen: Path | None
) -> Refiner | None:
    if not experiment.tier_below(node).aggregation.refines:
        return None
    from fedstrata.common.learning.refiner import NodeRefiner

    return NodeRefiner(experiment, node, partition=partition, frozen=frozen)


def _resolved(accelerator: str) -> str:
    from fedstrata.common.learning.computing import resolve_accelerator

    return str(resolve_accelerator(accelerator))


class _Evaluated(Protocol):
    @property
    def score(self) -> float: ...
    @property
    def loss(self) -> float: ...
    @property
    def more(self) -> Sequence[float]: ...
    @property
    def attacks(self) -> Sequence[float]: ...


@dataclass(frozen=True, slots=True)
class _Evaluating:
    """What the cloud begins with, and its evaluation of a global round's flat model."""

    beginning: Beginning
    evaluate: Callable[[int, Row], _Evaluated | None]


def _evaluating(folder: RunFolder, accelerator: str) -> _Evaluating:
    experiment = folder.experiment
    if not experiment.training.trainer.learns_module:
        trainer = TrainerTester(experiment)
        beginning = Beginning(
            trainer.layout,
            trainer.first,
            "",
            evaluates=trainer.evaluates,
            initial=trainer.initial,
            notes=trainer.notes,
        )
        return _Evaluating(beginning, lambda global_round, row: trainer.evaluate(row, global_round))
    from fedstrata.common.learning import splits
    from fedstrata.common.learning.computing import resolve_accelerator
    from fedstrata.common.learning.evaluation import ModelTester, accelerator_of

    partition = splits.keep(experiment, folder.path)
    evaluates_on = accelerator_of(experiment, beside=resolve_accelerator(accelerator))
    tester = ModelTester(experiment, accelerator=evaluates_on)
    beginning = Beginning(
        tester.layout,
        tester.first,
        partition,
        str(evaluates_on),
        notes=tester.notes,
        initial=tester.initial,
        frozen=tester.frozen,
    )
    return _Evaluating(beginning, lambda global_round, row: tester.evaluate(row))


@dataclass(frozen=True, slots=True)
class _Called:
    """A device's task, which ends when it is awaited; unlike a coroutine it may be dropped."""

    end: Callable[[], WorkResult]

    def __await__(self) -> Generator[None, None, WorkResult]:
        yield from ()
        return self.end()


class _Training:
    """Trains the devices that have been called, in one call of their trainers, when the result of
    one is awaited.
    """

    def __init__(self, accelerator: str) -> None:
        self._accelerator = accelerator
        self._trainers = Trainers()
        self._called: list[tuple[HostedDevice, Order]] = []
        self._endings: dict[str, Ending] = {}

    def prepare(self, device: HostedDevice) -> Prepared:
        """Return a device's facts. Raises InvalidExperiment."""
        return self._trainers.prepare(device, self._accelerator)

    def work(self, device: HostedDevice, local: LocalWork) -> DoTask:
        """Return a device's work, as its parent calls it."""

        def call(task: Task, model: Arriving, report: Report) -> _Called:
            order = local.order(task, model.row, partial(report, Phase.TRAINING))
            if isinstance(order, WorkResult):
                return _Called(lambda: order)
            self._called.append((device, order))
            return _Called(partial(end, task, model.row))

        def end(task: Task, received: Row) -> WorkResult:
            result = local.result(self._trained(device.node))
            if task.epochs:
                result = local.encoded(task, result, received)
                local.keep(task)
            return result

        return call

    def _trained(self, node: str) -> LocalResult:
        if self._called:
            called = self._called
            self._called = []

            def done(number: int, how: Ending) -> None:
                self._endings[called[number][0].node] = how

            self._trainers.train(called, self._accelerator, done)
        how = self._endings.pop(node)
        if isinstance(how, LocalResult):
            return how
        raise how


class AtOnce(ThreadPoolExecutor):
    """Executor that runs each call immediately in the caller's thread: no keep-alive depends on the
    event loop here.
    """

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            future.set_exception(error)
        return future
