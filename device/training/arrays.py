"""Training by a trainer that is not fedstrata's (`common.training`): named arrays in and out,
without PyTorch.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from fedstrata.common.accounting.costs import DeviceCosts
from fedstrata.common.accounting.work import TrainingPath, Work
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.files import PARTIAL, make_usable, remove_folder, writing
from fedstrata.common.host.offload import repeated
from fedstrata.common.model.layout import Row
from fedstrata.common.randomness import Purpose, torch_seed
from fedstrata.common.settings.topology import number_of
from fedstrata.common.training.array_trainer import LocalTask, TrainerCode, TrainingSite
from fedstrata.common.training.scores import ScoreSums, packed_sums
from fedstrata.device.jobs import (
    WAITS_S,
    Cancelled,
    DeviceOrder,
    Done,
    Examined,
    HostedDevice,
    LocalResult,
    Order,
    Prepared,
    TrainerFolder,
    failure_to,
)

LOOK_S: Final = 1.0
BUSY_SHARE: Final = 0.05  # of a core; a training that waits uses less

log = logging.getLogger("fedstrata.training")


class ArrayTraining:
    """One device's training; call `prepare` first, then `train` any number of times, one at a time.

    `first`: the first model of a run.
    """

    def __init__(self, experiment: Experiment, *, node: str, accelerator: str) -> None:
        self._experiment = experiment
        self._code = TrainerCode(experiment)
        self._layout, _ = self._code.first(experiment.seed)
        devices = experiment.tree.devices
        data = Path(experiment.data.root.replace("{node}", node))
        place = len(devices) + (number_of(node) or 0)  # of one that enters
        if node in devices:
            place = devices.index(node)
        self._site = TrainingSite(
            node=node,
            place=place,
            places=len(devices),
            data=data,
            seed=experiment.seed,
            epochs=experiment.training.epochs,
            settings=experiment.settings_in(0),
            accelerator=accelerator,
        )
        self._samples = 0

    @property
    def evaluates(self) -> bool:
        """Whether it can score models, once prepared. Raises InvalidExperiment."""
        return self._code.evaluates

    def prepare(self) -> Prepared:
        """Load the device's samples, and return its facts. Raises InvalidExperiment."""
        self._samples = self._code.prepare(self._site)
        if self._experiment.evaluation.on_devices and not self._code.evaluates:
            self._code.refuse("it has no evaluate", 'Write one, or set evaluation.at = "cloud".')
        keeps = self._experiment.training.trainer.remembers
        return Prepared(self._layout, self._samples, "", tests=self._code.tests, folder=keeps)

    def train(self, order: Order) -> LocalResult:
        """Score and train as ordered; without a folder in a temporary one. Raises Cancelled,
        InvalidExperiment.
        """
        if order.folder is not None:
            with self._attempt(order.folder) as folder:
                return self._train(order, folder)
        with TemporaryDirectory(prefix="fedstrata-") as temporary:
            return self._train(order, Path(temporary))

    @contextmanager
    def _attempt(self, kept: TrainerFolder) -> Iterator[Path]:
        """Yield a copy of the trainer's folder, which is renamed if the `with` block succeeds: it
        may be repeated.
        """
        copy = kept.after.with_name(kept.after.name + PARTIAL)
        with writing(copy):
            for old in (kept.after, copy):
                remove_folder(old)
            if kept.before is None:
                copy.mkdir(parents=True)
            else:
                shutil.copytree(kept.before, copy, symlinks=True)
        yield copy
        with writing(copy):
            self._check_kept(copy)
            os.replace(copy, kept.after)

    def _check_kept(self, folder: Path) -> None:
        """Check that what a trainer has left in its folder can be copied; a folder that it removed
        is empty.
        """
        if folder.is_symlink() or folder.is_file():
            problem = "it leaves a file in place of the folder task.state"
            self._code.refuse(problem, "Leave the folder, or nothing.")
        folder.mkdir(exist_ok=True)
        make_usable(folder)
        for path in folder.rglob("*"):
            if not (path.is_symlink() or path.is_dir() or path.is_file()):
                problem = f"it leaves {path.relative_to(folder)} in task.state, which is no file"
                self._code.refuse(problem, "Remove it before train returns.")

    def _train(self, order: Order, state: Path) -> LocalResult:
        experiment = self._experiment
        site = self._site
        rounds = self._experiment.device_rounds
        if order.cancelled.is_set():
            raise Cancelled

        def progress(done: int, of: int) -> None:
            if order.cancelled.is_set():
                raise Cancelled
            order.progress(int(done), int(of))

        task = LocalTask(
            node=site.node,
            data=site.data,
            seed=torch_seed(experiment.seed, Purpose.OWN_CODE, site.node, order.local_round),
            epochs=order.epochs,
            global_round=order.local_round // rounds + 1,
            local_round=order.local_round + 1,
            settings=experiment.settings_in(order.local_round),
            deadline_s=experiment.tier_above(site.node).closing.deadline_s,
            state=state,
            progress=progress,
        )
        try:
            received = Examined()
            if order.scores:
                before = replace(task, global_round=task.global_round - 1)
                received = Examined(self._score(order.row, before))
            if not order.epochs:
                return received.of(LocalResult(Work(self._samples)))
            # as one of several models a task may come all the same: its result is refused
            if not self._samples:
                order.out[:] = order.row
                return received.of(LocalResult(Work(epochs=order.epochs)))
            start = time.monotonic()
            cpu_start = time.thread_time()
            samples = self._samples
            found = self._code.train(self._layout, order.row, order.out, task, samples=samples)
            train_s = time.monotonic() - start
            cpu_s = time.thread_time() - cpu_start
            trained = None
            if order.scores_trained:
                trained = self._score(order.out, task)
        except InvalidExperiment:
            if order.cancelled.is_set():
                raise Cancelled from None
            raise
        rule = experiment.compares_losses
        if found.loss is None and rule:
            self._code.refuse_of("train", "returns no loss", f"Return one: {rule} compares losses.")
        order.progress(found.steps, found.steps)
        if found.samples is not None:
            samples = found.samples
        work = Work(
            samples,
            found.loss,
            order.epochs,
            found.steps,
            train_s,
            path=TrainingPath.IN_PROCESS,
            costs=DeviceCosts(cpu_s=cpu_s),
        )
        return received.of(LocalResult(work, numbers=found.numbers, notes=found.notes), trained)

    def _score(self, row: Row, task: LocalTask) -> ScoreSums | None:
        """Return the sums of a model over the device's test samples, None if it has none now."""
        start = time.monotonic()
        found = self._code.evaluate(self._layout, row, task)
        if found is None:
            return None
        n = found.samples
        return ScoreSums(
            n, n * found.loss, packed_sums([n * found.score]), seconds=time.monotonic() - start
        )


class ArrayTrainers:
    """Creates a device's training on first use, in its process."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], tuple[ArrayTraining, Prepared]] = {}

    def prepare(self, device: HostedDevice, accelerator: str) -> Prepared:
        """Load a device's samples, and return its facts. Raises InvalidExperiment."""
        return self._of(device, accelerator)[1]

    def train(self, work: Sequence[DeviceOrder], accelerator: str, done: Done) -> None:
        """Train for devices of one experiment, one after another. Raises InvalidExperiment."""
        for number, (device, order) in enumerate(work):
            with failure_to(done, number), use_reported(device, order) as reporting:
                training, _ = self._of(device, accelerator)
                done(number, training.train(reporting))

    def forget(self, digest: str) -> None:
        """Drop an experiment's trainings."""
        self._made = {key: made for key, made in self._made.items() if key[0] != digest}

    def _of(self, device: HostedDevice, accelerator: str) -> tuple[ArrayTraining, Prepared]:
        key = device.digest, device.node
        if key not in self._made:
            training = ArrayTraining(device.experiment, node=device.node, accelerator=accelerator)
            self._made[key] = training, training.prepare()
        return self._made[key]


@contextmanager
def use_reported(device: HostedDevice, order: Order) -> Iterator[Order]:
    """Report the `with` block as training while this process lives; yield the order for it.

    Not every trainer reports its steps. One that neither uses a core nor reports a step waits, for
    a queue or a download, and has expired after a limit.
    """
    experiment = device.experiment
    thread = threading.get_ident()
    limit_s = max(WAITS_S, experiment.transfer.idle_s)
    seen = _cpu_s(thread)
    looks = 0
    active = time.monotonic()
    stepped = False
    expired = False

    def progress(done: int, of: int) -> None:
        nonlocal stepped
        stepped = True
        order.progress(done, of)

    def look() -> None:
        nonlocal seen, looks, active, stepped, expired
        used = _cpu_s(thread)
        now = time.monotonic()
        if stepped or used - seen >= BUSY_SHARE * LOOK_S:
            active = now
        seen = used
        stepped = False
        looks = looks + 1
        if now < active + limit_s:
            order.progress(looks, 0)
        elif not expired:
            expired = True
            error = _waits(experiment, device.node, limit_s)
            log.warning("%s", error)
            order.expired(error)

    with repeated(look, every_s=LOOK_S):
        yield replace(order, progress=progress)


def _waits(experiment: Experiment, node: str, seconds: float) -> InvalidExperiment:
    key, name = next(iter(experiment.training.trainer.code.items()))
    problem = f"it waits for {seconds:g} s on {node} without using a core or reporting a step"
    return InvalidExperiment(
        key, name, problem, "Report task.progress while it waits, or raise transfer.idle_s."
    )


def _cpu_s(thread: int) -> float:
    """Return the CPU seconds of a thread of this process, those of the whole process where threads
    have no clock.
    """
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time()
    return time.clock_gettime(time.pthread_getcpuclockid(thread))
