"""Requests of a device to the pool of its process, their results, and the gathering of those that
can share a group.

Records without torch. `most_together` decides how many devices of a process train in common steps.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import FedstrataError
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.settings.own import is_own
from fedstrata.common.training.scores import ScoredModels, ScoreSums

Progress: TypeAlias = Callable[[int, int], None]


class Cancelled(Exception):
    """The training was cancelled: its result is no longer wanted."""


@dataclass(frozen=True, slots=True)
class LocalResult:
    """The result of one local round.

    Of its work `train_s` are the seconds of the training itself, of vmapped training the device's
    share, and `wait_s` all other seconds between the request and the result but those of scoring.
    """

    work: Work
    wall_s: float = 0.0  # of vmapped training: from its group's start to this result
    numbers: Mapping[str, float] = field(default_factory=dict)  # of the trainer's choice
    notes: Sequence[str] = ()  # what its user should know
    # of the model received, where the parent's rule reads it; its seconds are training
    start_loss: float | None = None

    @property
    def scored_s(self) -> float:
        """The seconds of scoring."""
        if self.work.tests is None:
            return 0.0
        return self.work.tests.seconds


@dataclass(frozen=True, slots=True)
class Examined:
    """Sums of the model that a device received, over its test and its training samples, where asked
    for.
    """

    tests: ScoreSums | None = None
    start: ScoreSums | None = None

    def of(self, result: LocalResult, trained: ScoreSums | None = None) -> LocalResult:
        """Return the result of the training that followed, with these; the loss at its start is a
        part of it.

        `trained`: of the trained model, over the device's test samples.
        """
        work = result.work
        if self.tests is not None or trained is not None:
            work = replace(work, tests=ScoredModels(self.tests, trained))
        if self.start is None:
            return replace(result, work=work)
        work = replace(work, train_s=work.train_s + self.start.seconds)
        return replace(result, work=work, start_loss=self.start.mean_loss)


Ending: TypeAlias = LocalResult | FedstrataError | Cancelled


@dataclass(frozen=True, slots=True)
class Prepared:
    """A device's model layout, the number of its training samples, and the digest of the split of
    its files.

    `kept_bytes`: of the vectors that its objective keeps from task to task. `tests`: its test
    samples. `folder`: its trainer keeps a folder, too.
    """

    layout: ModelLayout
    samples: int
    partition: str
    kept_bytes: int = 0
    tests: int = 0
    folder: bool = False

    @property
    def keeps(self) -> bool:
        """Whether the device has state that persists between its tasks."""
        return self.kept_bytes > 0 or self.folder


@dataclass(frozen=True, slots=True)
class TrainerFolder:
    """What a trainer keeps of a task: `before`, as the last one left it, None: nothing; and
    `after`, which it makes.

    `before` never changes, so a training that is killed can be repeated.
    """

    before: Path | None
    after: Path


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Train the model in `row` for `epochs` and write it into `out`, uint8;
    `device.training.vectors` has their form.

    `scores`: score it before, on the device's test samples; without epochs it is not trained.
    `scores_trained`: score what training makes of it, too.
    `progress(steps_done, steps_total)` is called in the thread of the training, every half second
    and at the end. `cancelled`: set, it ends the training between two steps. `folder`: of a trainer
    that keeps a state. `noise`: the key of DP-SGD's noise, empty if it comes from the seed.
    `expired` is called, in another thread, when a trainer has waited too long.
    """

    row: Row
    out: Row
    epochs: int
    local_round: int
    progress: Progress = lambda done, of: None
    cancelled: threading.Event = field(default_factory=threading.Event)
    scores: bool = False
    scores_trained: bool = False
    folder: TrainerFolder | None = None
    noise: bytes = b""
    expired: Callable[[FedstrataError], None] = lambda error: None


@dataclass(frozen=True, slots=True)
class HostedDevice:
    """A device in its experiment, with the experiment's `digest`, computed once.

    `frozen`: a file of the cloud's frozen arrays, named by their digest, if the device builds
    others.
    """

    experiment: Experiment
    digest: str
    node: str
    frozen: Path | None = None

    @property
    def built(self) -> tuple[str, str]:
        """The digests of the experiment, and of frozen arrays of the cloud, of which its model is
        built.
        """
        return self.digest, "" if self.frozen is None else self.frozen.name


@dataclass(slots=True, eq=False, kw_only=True)
class PoolRequest:
    """A request to prepare a device; `outcome` gets Prepared, or the error. `place`: its number in
    this process.
    """

    device: HostedDevice
    place: int
    outcome: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def finish(self, result: LocalResult | Prepared) -> None:
        """Set the result."""
        if not self.outcome.done():
            self.outcome.set_result(result)

    def fail(self, error: Exception) -> None:
        """Set the error."""
        if not self.outcome.done():
            self.outcome.set_exception(error)
            self.outcome.exception()  # retrieve it: the caller may have left

    def cancel(self) -> None:
        """Cancel the request: nobody waits for the outcome any more."""
        self.outcome.cancel()


@dataclass(slots=True, eq=False, kw_only=True)
class Job(PoolRequest):
    """A training request; `outcome` gets a LocalResult, or the error. Until then the pool uses the
    order's rows.
    """

    order: Order
    on_cancel: Callable[[], None] = lambda: None

    def end(self, how: Ending) -> None:
        """Set the result or the error."""
        if isinstance(how, LocalResult):
            self.finish(how)
        else:
            self.fail(how)

    def alike(self, other: PoolRequest) -> bool:
        """Return whether the other is a training of the same model, so that one vmapped group can
        have both.
        """
        if not isinstance(other, Job) or self.device.built != other.device.built:
            return False
        return bool(self.order.epochs) == bool(other.order.epochs)

    def cancel(self) -> None:
        """Cancel the training: it ends between two steps, with an outcome."""
        self.order.cancelled.set()
        self.on_cancel()


DeviceOrder: TypeAlias = tuple[HostedDevice, Order]
Done: TypeAlias = Callable[[int, Ending], None]


@contextmanager
def failure_to(done: Done, number: int) -> Iterator[None]:
    """Let an error of one device's training be its outcome, and none of the others'."""
    try:
        yield
    except (FedstrataError, Cancelled) as error:
        done(number, error)


class DeviceTrainers(Protocol):
    """The trainers of a process's devices, of one kind: the interface that a pool asks; see
    `device.pool.trainers_by_kind`.
    """

    def prepare(self, device: HostedDevice, accelerator: str) -> Prepared:
        """Return a device's facts. Raises InvalidExperiment."""

    def train(self, work: Sequence[DeviceOrder], accelerator: str, done: Done) -> None:
        """Train for devices of one experiment; `done` gets each one's number and outcome.

        Raises what `prepare` raises.
        """

    def forget(self, digest: str) -> None:
        """Drop what was made for an experiment."""


class PoolMember(Protocol):
    """One device's access to a pool of trainings; see `device.pool.pool.Member`."""

    @property
    def moves(self) -> int:
        """A count that grows while any training of the pool makes progress."""

    @property
    def failure(self) -> Exception | None:
        """Why no device of the pool can train; None while they can."""

    @property
    def hardware(self) -> str:
        """Where the pool trains, as text; empty before it is known."""

    def leave(self) -> None:
        """Leave the experiment, if any: what was made for it may be dropped."""

    async def prepare(self, experiment: Experiment, *, frozen: Path | None = None) -> Prepared:
        """Join an experiment; `frozen`: as in `HostedDevice`. Raises InvalidExperiment,
        RunFailed.
        """

    async def train(self, order: Order) -> LocalResult:
        """Train as ordered; progress is reported on the event loop. Raises RunFailed."""


class TrainingPool(Protocol):
    """Interface between a device agent and its pool; see `device.pool.pool.Pool`."""

    def member(self, node: str) -> PoolMember:
        """Add a device."""


# So long a trainer that waits, for a queue or a download, counts as progress; `transfer.idle_s` if
# that is more.
WAITS_S: Final = 3600.0
# there recorded steps are faster than vmapped ones (docs/benchmarks.md)
ALONE_ON: Final = frozenset({"cpu"})
VMAPPED_DEVICES_MOST: Final = 1024  # in one group; memory sets another limit
QUIET_S: Final = 0.05
PATIENCE: Final = 10  # quiet times


def most_together(experiment: Experiment, accelerator: str) -> int:
    """Return how many trainings of an experiment may be vmapped together on an accelerator, 1 on a
    CPU.

    On a GPU these are trainings of nets that ship, if `training.vmapped` is not false.
    """
    training = experiment.training
    alone = (
        training.vmapped is False
        or training.deterministic
        or experiment.tiers[-1].privacy.on_samples
    )
    if accelerator in ALONE_ON or alone or not training.trainer.learns_module:
        return 1
    runs_own = any(map(is_own, (experiment.model.name, training.loss, training.objective.name)))
    if runs_own or training.own_augmentation is not None:
        return 1
    return VMAPPED_DEVICES_MOST


async def gather(came: asyncio.Event, complete: Callable[[], bool]) -> None:
    """Wait until nothing has come for a moment, all expected requests are there, or the time limit
    is reached.

    The devices of a host get their models at nearly the same time. A device that comes after a
    group's start would have to wait for a second group.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + PATIENCE * QUIET_S
    while not complete() and (left := end - loop.time()) > 0:
        came.clear()
        try:
            await asyncio.wait_for(came.wait(), min(QUIET_S, left))
        except TimeoutError:
            return
