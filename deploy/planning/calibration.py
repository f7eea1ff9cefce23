"""Measurement of this machine's speed of training, evaluation, mixing and message handling, in a few seconds.

Training and evaluation use the experiment's own model and data: devices train in turn, as many at once as in the lab.
The other costs of a round were measured by `fedstrata plan --calibrate` on this machine, or once on a reference machine
(`REFERENCE`). Two small loops, packing messages and copying and hashing a model, scale the latter to this machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from multiprocessing import get_context
from statistics import mean
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from common.experiment.reading import parse
from common.model.layout import Row
from common.protocol import serialization
from common.protocol.manifest import chunk_digest
from common.protocol.messages import Key, Manifest, Task
from deploy.planning.constants import FittedCosts
from deploy.planning.prediction import MachineSpeeds
from deploy.planning.recording import record_seconds
from deploy.planning.workload import PlannedWorkload
from device.jobs import Cancelled

if TYPE_CHECKING:
    from common.learning.inputs import Inputs
    from device.training.network import Network
    from device.training.trainer import Trainer

TRAINING_S: Final = 2.0
EVALUATED: Final = 400
DEVICES_MOST: Final = 8  # that one process trains in turn
WARM_UP: Final = 1  # trainings that do not count
LONGER: Final = 3  # times the epochs, of every second training of a device
MIXED: Final = 3.0  # cost of mixing, in copies of the uploads (tests/bench/aggregation.py)
NOISE_BYTES: Final = 8_000_000
REPEATS: Final = 20


@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """Seconds of one core of the reference machine, a two-core virtual machine.

    message_s, byte_s: of a round with one child    round_s: of a round beside that
    packing_s, copying_s: of the two loops, the latter per byte
    """

    message_s: float = 4e-3
    round_s: float = 6e-3
    byte_s: float = 1.4e-9
    packing_s: float = 1.26e-5
    copying_s: float = 1.1e-10


REFERENCE: Final = ReferenceModel()


@dataclass(frozen=True, slots=True)
class TrainingSpeed:
    """Seconds of one core: per SGD step, per training without its steps, and per evaluation of the test set.

    `share`: of a core, that the trainings had.
    """

    step_s: float
    training_s: float
    evaluation_s: float
    share: float = 1.0


class MeasuredTraining(NamedTuple):
    """The steps of a training, its seconds, and the CPU seconds of its thread."""

    steps: int
    seconds: float
    cpu_s: float


def measure(work: PlannedWorkload, *, cores: int, together: bool, fitted: FittedCosts | None = None) -> MachineSpeeds:
    """Measure this machine with an experiment's models and data.

    `together`: all cores train at the same time, as in a lab on this host. `fitted`: the costs of messages.
    """
    jobs, experiment = cores if together else 1, work.calibrated
    names, text = experiment.tree.devices, experiment.to_json()
    shares = [names[index::jobs] or names for index in range(jobs)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = [pool.submit(train, text, _some(share), TRAINING_S) for share in shares]
        found = [job.result() for job in running]
    copy_s, speed = copy_seconds(), _best(_packing) / REFERENCE.packing_s
    if fitted is None:
        message_s, round_s = REFERENCE.message_s * speed, REFERENCE.round_s * speed
        byte_s = REFERENCE.byte_s * copy_s / REFERENCE.copying_s
    else:
        message_s, round_s, byte_s = fitted.message_s, fitted.round_s, fitted.byte_s
    return MachineSpeeds(
        step_s=mean(one.step_s for one in found),
        training_s=mean(one.training_s for one in found),
        evaluation_s=mean(one.evaluation_s for one in found),
        message_s=message_s,
        round_s=round_s,
        byte_s=byte_s,
        mix_byte_s=mixing_s(copy_s),
        record_s=record_seconds(experiment, layout=work.layout, row=work.first),
        cores=cores,
        share=min(one.share for one in found),
    )


def train(experiment_json: str, devices: Sequence[str], training_s: float) -> TrainingSpeed:
    """Train some devices of an experiment in turn for `training_s` or longer on one core; evaluate the first model."""
    from common.learning import datasets, models
    from common.learning.evaluation import evaluate
    from device.training.trainer import Trainer

    experiment = parse(experiment_json)
    data = datasets.load(experiment.data)
    module = models.of(experiment, inputs=data.inputs)
    networks: dict[Inputs, Network] = {}  # shared, as in a worker process
    trainers = [Trainer(experiment, node=name, accelerator="cpu", networks=networks) for name in devices]
    for trainer in trainers:
        trainer.prepare()
    vectors = trainers[0].vectors
    row, out = (np.zeros(each.row_bytes, np.uint8) for each in (vectors.received, vectors.returned))
    models.write_row(module, trainers[0].layout, row)
    until = time.monotonic() + training_s
    measured = list[MeasuredTraining]()
    epochs = experiment.training.epochs
    while time.monotonic() < until or len(measured) <= WARM_UP:
        trainer = trainers[len(measured) % len(trainers)]
        longer = len(measured) // len(trainers) % 2  # to separate the steps from the rest
        measured.append(_measured(trainer, row, out, epochs=epochs * (LONGER if longer else 1), until=until))
    nothing = min(_measured(trainers[0], row, out, epochs=0, until=inf).seconds for _ in range(5))
    images, labels = data.test_images[:EVALUATED], data.test_labels[:EVALUATED]
    start = time.monotonic()
    evaluate(module, images, labels=labels, normalise=data.normaliser())
    evaluation_s = (time.monotonic() - start) * len(data.test_labels) / max(1, len(labels))
    settled = measured[WARM_UP:]
    step_s, rest_s = line(settled, least_s=nothing)
    share = sum(each.cpu_s for each in settled) / sum(each.seconds for each in settled)
    return TrainingSpeed(step_s, rest_s, evaluation_s, min(1.0, share))


def line(measured: Sequence[MeasuredTraining], *, least_s: float) -> tuple[float, float]:
    """Return the seconds of a step, and of a training without its steps, which are at least `least_s`.

    A weighted least squares fit: a training's noise grows with its steps. It keeps the sum of the seconds. If all
    trainings have as many steps, or noise makes one of them too small, the rest is `least_s`.
    """
    steps, seconds = (np.array(column, float) for column in zip(*(each[:2] for each in measured), strict=True))
    weights = 1 / np.sqrt(steps)
    matrix = np.stack([weights, steps * weights], axis=1)
    (rest_s, step_s), _, rank, _ = np.linalg.lstsq(matrix, seconds * weights, rcond=None)
    if rank < 2 or rest_s < least_s or step_s <= 0:
        return max(0.0, seconds.sum() - least_s * len(steps)) / steps.sum(), least_s
    return float(step_s), float(rest_s)


def _measured(trainer: Trainer, row: Row, out: Row, *, epochs: int, until: float) -> MeasuredTraining:
    """Train once, and cancel it if it lasts until a time, of the monotonic clock, and a first progress message."""
    enough, done = threading.Event(), MeasuredTraining(0, 0.0, 0.0)
    start, cpu_start = time.monotonic(), time.thread_time()

    def progress(steps: int, _: int) -> None:
        nonlocal done
        done = MeasuredTraining(steps, time.monotonic() - start, time.thread_time() - cpu_start)
        if time.monotonic() >= until:
            enough.set()

    with suppress(Cancelled):
        result = trainer.train(row, out, epochs=epochs, local_round=0, progress=progress, cancelled=enough)
        done = MeasuredTraining(result.steps, result.train_s, time.thread_time() - cpu_start)
    return done


def _some(names: Sequence[str]) -> Sequence[str]:
    """Return at most DEVICES_MOST of the names, evenly spread."""
    return names[:: -(-len(names) // DEVICES_MOST)]


def copy_seconds() -> float:
    """Return the seconds of copying and hashing a byte of a model."""
    return _best(_copying()) / NOISE_BYTES


def mixing_s(copy_s: float) -> float:
    """Return the seconds of mixing a byte of the uploads."""
    return MIXED * copy_s


def _best(loop: Callable[[], None]) -> float:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        loop()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _packing() -> None:
    manifest = Manifest("b" * 16, 1_000_000, 1_000_000, b"digest-8", "fp32", "l" * 16)
    serialization.decode(serialization.encode(Task(Key(1, 2, 3), 2, manifest, None), "session"))


def _copying() -> Callable[[], None]:
    source = np.random.default_rng(0).integers(0, 256, NOISE_BYTES, np.uint8)
    target = np.zeros_like(source)

    def copy() -> None:
        np.copyto(target, source)
        chunk_digest(target.data)

    return copy
