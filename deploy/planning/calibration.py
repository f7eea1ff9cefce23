"""Measurement of this machine's speed of training, evaluation, mixing and message handling, in a few seconds.

Training and evaluation use the experiment's own model and data. The other costs of a round were measured by
`fedstrata plan --calibrate` on this machine, or once on a reference machine (`REFERENCE`). Two small loops, packing
messages and copying and hashing a model, scale the latter to this machine.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Final

import numpy as np

from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.protocol import serialization
from common.protocol.manifest import chunk_digest
from common.protocol.messages import Key, Manifest, Task
from deploy.planning.constants import FittedCosts
from deploy.planning.prediction import MachineSpeeds

TRAINING_S: Final = 2.0
EVALUATED: Final = 400
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

    `share`: of a core, that the training had.
    """

    step_s: float
    training_s: float
    evaluation_s: float
    share: float = 1.0


def measure(
    experiment: Experiment, *, cores: int, together: bool, row_bytes: int, fitted: FittedCosts | None = None
) -> MachineSpeeds:
    """Measure this machine with an experiment of one device whose data are available.

    `together`: all cores train at the same time, as in a lab on this host. `fitted`: the costs of messages.
    """
    jobs, text = cores if together else 1, experiment.to_json()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        found = [job.result() for job in [pool.submit(train, text, TRAINING_S) for _ in range(jobs)]]
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
        record_s=_writing(row_bytes),
        cores=cores,
        share=min(one.share for one in found),
    )


def train(experiment_json: str, training_s: float) -> TrainingSpeed:
    """Train the device of an experiment for `training_s` or longer on one core, and evaluate the first model."""
    from common.learning import datasets, models
    from common.learning.evaluation import evaluate
    from device.jobs import Cancelled
    from device.training.trainer import Trainer

    experiment = parse(experiment_json)
    data = datasets.load(experiment.data)
    module = models.of(experiment, inputs=data.inputs)
    trainer = Trainer(experiment, node=experiment.tree.devices[0], accelerator="cpu")
    trainer.prepare()
    row, out = (np.zeros(each.row_bytes, np.uint8) for each in (trainer.vectors.received, trainer.vectors.returned))
    models.write_row(module, trainer.layout, row)
    epochs, steps, spent_s, cpu_s = 1, 0, 0.0, 0.0
    enough, start, cpu_start = threading.Event(), 0.0, 0.0

    def progress(done: int, _: int) -> None:
        nonlocal steps, spent_s, cpu_s
        steps, spent_s, cpu_s = done, time.monotonic() - start, time.thread_time() - cpu_start
        if spent_s >= training_s:
            enough.set()

    while not enough.is_set():
        start, cpu_start = time.monotonic(), time.thread_time()
        try:
            trainer.train(row, out, epochs=epochs, local_round=0, progress=progress, cancelled=enough)
        except Cancelled:
            break
        epochs *= 2  # the first trainings are warm-up; only the last one counts
    nothing = threading.Event()
    overhead = [
        trainer.train(row, out, epochs=0, local_round=0, progress=lambda *_: None, cancelled=nothing).train_s
        for _ in range(5)
    ]
    images, labels = data.test_images[:EVALUATED], data.test_labels[:EVALUATED]
    start = time.monotonic()
    evaluate(module, images, labels=labels, normalise=data.normaliser())
    evaluation_s = (time.monotonic() - start) * len(data.test_labels) / max(1, len(labels))
    return TrainingSpeed(spent_s / steps, min(overhead), evaluation_s, min(1.0, cpu_s / spent_s))


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


def _writing(nbytes: int) -> float:
    """Return the seconds of writing a checkpoint of `nbytes` bytes, with the tables."""
    with tempfile.TemporaryDirectory(prefix="fedstrata-") as home:
        start = time.perf_counter()
        (Path(home) / "model").write_bytes(bytes(nbytes))
        return time.perf_counter() - start + REFERENCE.message_s
