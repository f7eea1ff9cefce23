"""What a device asks of the pool of its process and what it gets: records without torch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from common.accounting.child_report import TrainingPath
from common.errors import FedstrataError
from common.experiment.schema import Experiment
from common.model.layout import ModelLayout, Row

Progress: TypeAlias = Callable[[int, int], None]


class Cancelled(Exception):
    """The training was called off: its result is no longer wanted."""


@dataclass(frozen=True, slots=True)
class LocalResult:
    """What one local round gave: `loss` is the sample-weighted mean over its last epoch.

    `train_s` are the seconds of the training alone, `wait_s` all others between asking for it and having it.
    In a stack `train_s` is the device's share, and `wall_s` the seconds from the stack's start to this result.
    """

    samples: int
    loss: float
    steps: int
    train_s: float
    wait_s: float
    path: TrainingPath = TrainingPath.IN_PROCESS
    wall_s: float = 0.0


Ending: TypeAlias = LocalResult | FedstrataError | Cancelled


@dataclass(frozen=True, slots=True)
class Prepared:
    """A device's model layout, the number of its training samples, and the digest of the split as its files give it."""

    layout: ModelLayout
    samples: int
    partition: str


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Train the model in `row` for `epochs` and write it into `out`, both uint8 [row_bytes].

    `progress(steps_done, steps_total)` is called where the training runs.
    """

    row: Row
    out: Row
    epochs: int
    local_round: int
    progress: Progress
    cancelled: threading.Event


@dataclass(frozen=True, slots=True)
class HostedDevice:
    """A device in its experiment, whose `digest` is computed once."""

    experiment: Experiment
    digest: str
    node: str


@dataclass(slots=True, eq=False, kw_only=True)
class PoolRequest:
    """A device that is to be prepared; `answer` gets Prepared, or the error. `place`: its number in this process."""

    device: HostedDevice
    place: int
    outcome: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def finish(self, result: LocalResult | Prepared) -> None:
        """Give the answer."""
        if not self.outcome.done():
            self.outcome.set_result(result)

    def fail(self, error: Exception) -> None:
        """Say why there is none."""
        if not self.outcome.done():
            self.outcome.set_exception(error)
            self.outcome.exception()  # whoever asked may have left

    def cancel(self) -> None:
        """Call it off: nobody wants the answer any more."""
        self.outcome.cancel()


@dataclass(slots=True, eq=False, kw_only=True)
class Job(PoolRequest):
    """A training; `answer` gets a LocalResult, or the error. Until then the order's rows are not the device's."""

    order: Order
    on_cancel: Callable[[], None] = lambda: None

    def end(self, how: Ending) -> None:
        """Give the answer, or say why there is none."""
        if isinstance(how, LocalResult):
            self.finish(how)
        else:
            self.fail(how)

    def alike(self, other: PoolRequest) -> bool:
        """Return whether the other is a training of the same model, so that one stack can hold both."""
        return isinstance(other, Job) and self.device.digest == other.device.digest

    def cancel(self) -> None:
        """Call it off: it ends between two steps, with an answer."""
        self.order.cancelled.set()
        self.on_cancel()


class PoolMember(Protocol):
    """One device's access to a pool of trainings; see `device.pool.pool.Member`."""

    @property
    def moves(self) -> int:
        """A count that grows while any training of the pool does."""

    async def prepare(self, experiment: Experiment) -> Prepared:
        """Join an experiment. Raises InvalidExperiment, RunFailed."""

    async def train(self, row: Row, out: Row, *, epochs: int, local_round: int, progress: Progress) -> LocalResult:
        """Train the model in `row` and write it into `out`, both uint8 [row_bytes]. Raises RunFailed."""


class TrainingPool(Protocol):
    """What a device agent asks of a pool; see `device.pool.pool.Pool`."""

    def member(self, node: str) -> PoolMember:
        """Add a device."""
