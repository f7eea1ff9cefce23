"""Training by a trainer that is not fedstrata's (`common.model.trainer`): named arrays in and out, without PyTorch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from common.accounting.costs import DeviceCosts
from common.errors import InvalidExperiment
from common.experiment.schema import Experiment
from common.experiment.topology import number_of
from common.host.offload import repeated
from common.model.layout import Row
from common.model.scores import ScoreSums, packed_sums
from common.model.trainer import LocalTask, TrainerCode, TrainingSite
from common.randomness import Purpose, torch_seed
from device.jobs import Cancelled, Done, Examined, HostedDevice, LocalResult, Order, Prepared, Work, failure_to

LOOK_S: Final = 1.0
BUSY_SHARE: Final = 0.05  # of a core; a training that waits for ever uses less


class ArrayTraining:
    """One device's training; call `prepare` first, then `train` any number of times, one at a time.

    `first`: the first model of a run.
    """

    def __init__(self, experiment: Experiment, *, node: str, accelerator: str) -> None:
        self._experiment = experiment
        self._code = TrainerCode(experiment)
        self._layout, self.first = self._code.first(experiment.seed)
        devices, data = experiment.tree.devices, Path(experiment.data.root.replace("{node}", node))
        self._site = TrainingSite(
            node=node,
            place=devices.index(node) if node in devices else len(devices) + (number_of(node) or 0),
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
        return Prepared(self._layout, self._samples, "", folder=self._experiment.training.trainer.remembers)

    def train(self, order: Order) -> LocalResult:
        """Score and train as ordered; without a folder in a temporary one. Raises Cancelled, InvalidExperiment."""
        if order.folder is not None:
            return self._train(order, order.folder)
        with TemporaryDirectory(prefix="fedstrata-") as folder:
            return self._train(order, Path(folder))

    def _train(self, order: Order, state: Path) -> LocalResult:
        experiment, site, rounds = self._experiment, self._site, self._experiment.device_rounds
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
            with _use_reported(order):
                before = replace(task, global_round=task.global_round - 1)
                received = Examined(self._score(order.row, before) if order.scores else None)
                if not order.epochs:
                    return received.of(LocalResult(self._samples, None, 0, 0.0, 0.0))
                start, cpu_start = time.monotonic(), time.thread_time()
                found = self._code.train(self._layout, order.row, order.out, task, samples=self._samples)
                train_s, cpu_s = time.monotonic() - start, time.thread_time() - cpu_start
                trained = self._score(order.out, task) if order.scores_trained else None
        except InvalidExperiment:
            if order.cancelled.is_set():
                raise Cancelled from None
            raise
        if found.loss is None and (rule := experiment.compares_losses):
            self._code.refuse("train returns no loss", f"Return one: {rule} compares losses.")
        order.progress(found.steps, found.steps)
        samples, costs = found.samples or self._samples, DeviceCosts(cpu_s=cpu_s)
        result = LocalResult(samples, found.loss, found.steps, train_s, 0.0, numbers=found.numbers, costs=costs)
        return received.of(result, trained)

    def _score(self, row: Row, task: LocalTask) -> ScoreSums:
        """Return the sums of a model over the device's test samples."""
        start = time.monotonic()
        found = self._code.evaluate(self._layout, row, task)
        n = found.samples
        return ScoreSums(n, n * found.loss, packed_sums([n * found.score]), seconds=time.monotonic() - start)


class ArrayTrainers:
    """Creates a device's training on first use, in its process."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], tuple[ArrayTraining, Prepared]] = {}

    def prepare(self, device: HostedDevice, accelerator: str) -> Prepared:
        """Load a device's samples, and return its facts. Raises InvalidExperiment."""
        return self._of(device, accelerator)[1]

    def train(self, work: Sequence[Work], accelerator: str, done: Done) -> None:
        """Train for devices of one experiment, one after another. Raises InvalidExperiment."""
        for number, (device, order) in enumerate(work):
            training, _ = self._of(device, accelerator)
            with failure_to(done, number):
                done(number, training.train(order))

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
def _use_reported(order: Order) -> Iterator[None]:
    """Report the use of a core by this thread as progress: not every trainer reports its steps."""
    thread, looks = threading.get_ident(), 0
    seen = _cpu_s(thread)

    def look() -> None:
        nonlocal seen, looks
        if (used := _cpu_s(thread)) - seen >= BUSY_SHARE * LOOK_S:
            looks += 1
            order.progress(looks, 0)
        seen = used

    with repeated(look, every_s=LOOK_S):
        yield


def _cpu_s(thread: int) -> float:
    """Return the CPU seconds of a thread of this process, those of the whole process where threads have no clock."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time()
    return time.clock_gettime(time.pthread_getcpuclockid(thread))
