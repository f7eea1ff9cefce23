"""Measurement of this machine's speed of training, evaluation, mixing and message handling, in a few seconds.

Training and evaluation use the experiment's own model and data: devices train in turn, as many at once as in the lab.
The other costs of a round were measured by `fedstrata plan --calibrate` on this machine, or once on a reference machine
(`REFERENCE`). Two small loops, packing messages and copying and hashing a model, scale the latter to this machine.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from typing import Final

import numpy as np

from cloud import checkpoint
from cloud.records import GlobalRoundRecord
from cloud.results import RunFolder
from common.accounting.child_report import ChildReport
from common.accounting.counters import Account
from common.accounting.ledger import Ledger
from common.errors import InvalidExperiment
from common.experiment import own
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD
from common.host.files import writing
from common.model.layout import ModelLayout, Row
from common.model.trainer import TrainerTester
from common.protocol import serialization
from common.protocol.manifest import chunk_digest
from common.protocol.messages import Key, Manifest, Task
from common.protocol.round_state import GLOBAL_PHASES
from common.storage.states import write_state
from deploy.local.network import processes_of, shares
from deploy.planning.trainings import TrainingSpeed, train
from deploy.planning.workload import PlannedWorkload

TRAINING_S: Final = 2.0
EVALUATED: Final = 400
EVALUATIONS: Final = 3
PACKING_S: Final = 1.26e-5  # of the first loop on the reference machine
COPYING_S: Final = 1.1e-10  # of the other one there, per byte
MIXED: Final = 3.0  # cost of mixing, in copies of the uploads (tests/bench/aggregation.py)
NOISE_BYTES: Final = 8_000_000
REPEATS: Final = 20
RECORDS: Final = 5  # global rounds whose results are written, at most
RECORDS_S: Final = 2.0  # seconds of writing that are enough


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpeeds:
    """Speeds of a machine: seconds of one core, 0 for what takes no time, and the number of cores.

    step_s: per SGD step    training_s: per training, without its steps    evaluation_s: per pass over the test set
    message_s: messaging of a round with one child, at both ends and in the broker
    round_s: opening, closing and keeping a round at the parent, however many children
    byte_s: messaging per byte of a model, in each direction    mix_byte_s: mixing, per byte of the uploads
    record_s: writing the results of a global round, with a checkpoint
    share: of a core, that the measured trainings had
    """

    step_s: float = 0.0
    training_s: float = 0.0
    evaluation_s: float = 0.0
    message_s: float = 0.0
    round_s: float = 0.0
    byte_s: float = 0.0
    mix_byte_s: float = 0.0
    record_s: float = 0.0
    cores: int
    share: float = 1.0


# The reference machine, a two-core virtual machine, without trainings, evaluations and writes.
REFERENCE: Final = MachineSpeeds(message_s=4e-3, round_s=6e-3, byte_s=1.4e-9, mix_byte_s=MIXED * COPYING_S, cores=2)


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """Seconds of one core, as in `MachineSpeeds`, and the conditions under which they were measured.

    host: its name    measured: UTC, ISO 8601    load: mean number of other running processes in the minute before
    """

    message_s: float
    round_s: float
    byte_s: float
    host: str
    measured: str
    load: float

    def described(self) -> str:
        """Return the conditions as a sentence's end."""
        return f"measured on {self.host} at {self.measured}, under a load of {self.load:.1f}"


def default_file() -> Path:
    """Return the file of this machine: $XDG_CACHE_HOME/fedstrata/calibration.json, by default below ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fedstrata" / "calibration.json"


def read_costs(path: Path | None) -> FittedCosts | None:
    """Return the costs of a file, by default this machine's, or None if it has none. Raises InvalidExperiment."""
    file = path or default_file()
    try:
        costs = FittedCosts(**json.loads(file.read_text(encoding="utf-8")))
        if not all(isinstance(each, float) and each >= 0 for each in (costs.message_s, costs.round_s, costs.byte_s)):
            raise ValueError("costs are not positive numbers")
        return costs
    except FileNotFoundError:
        if path is None:
            return None
        problem = "no such file"
    except OSError as error:
        problem = error.strerror or str(error)
    except (ValueError, TypeError):
        problem = "not a file of --calibrate"
    raise InvalidExperiment("--calibration", str(file), problem, "Measure with `fedstrata plan --calibrate`.")


def write_costs(costs: FittedCosts, path: Path | None) -> Path:
    """Write the costs to a file, by default this machine's, and return it. Raises StorageFailed."""
    file = path or default_file()
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(costs), indent=2) + "\n", encoding="utf-8")
    return file


def measure(work: PlannedWorkload, *, cores: int, together: bool, fitted: FittedCosts | None = None) -> MachineSpeeds:
    """Measure this machine with an experiment's models and data.

    `together`: all cores train at the same time, as in a lab on this host. `fitted`: the costs of messages.
    """
    experiment, found = work.calibrated, _trainings(work, cores=cores, together=together)
    evaluate, parts = _evaluation(experiment)
    copy_s, speed = copy_seconds(), _best(_packing) / PACKING_S
    if fitted is None:
        message_s, round_s = REFERENCE.message_s * speed, REFERENCE.round_s * speed
        byte_s = REFERENCE.byte_s * copy_s / COPYING_S
    else:
        message_s, round_s, byte_s = fitted.message_s, fitted.round_s, fitted.byte_s
    return MachineSpeeds(
        step_s=mean(one.step_s for one in found),
        training_s=mean(one.training_s for one in found),
        evaluation_s=parts * _best(evaluate, clock=time.process_time, repeats=EVALUATIONS),
        message_s=message_s,
        round_s=round_s,
        byte_s=byte_s,
        mix_byte_s=mixing_s(copy_s),
        record_s=record_seconds(experiment, layout=work.layout, row=work.first, beside=evaluate),
        cores=cores,
        share=min(one.share for one in found),
    )


def _trainings(work: PlannedWorkload, *, cores: int, together: bool) -> list[TrainingSpeed]:
    """Measure the trainings of each device process of a lab on this host, all at once, or of one device alone."""
    text, names = work.calibrated.to_json(), work.calibrated.tree.devices
    devices = sum(work.experiment.sizes()[-1])
    slots = shares(cores, processes_of(devices, cores)) if together else [1]
    jobs = len(slots)
    if jobs == 1:  # a process of its own would load PyTorch once more
        return [train(text, names, min(slots[0], devices), first=work.first, training_s=TRAINING_S)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = [
            pool.submit(
                train, text, names[i::jobs] or names, min(own, devices), first=work.first, training_s=TRAINING_S
            )
            for i, own in enumerate(slots)
        ]
        return [job.result() for job in running]


def _evaluation(experiment: Experiment) -> tuple[Callable[[], object], float]:
    """Return an evaluation of the first model on some test samples, and the number of such parts of the test set."""
    if not experiment.training.trainer.learns_module:
        tester = TrainerTester(experiment)
        return (partial(tester.evaluate, tester.first) if tester.evaluates else lambda: None), 1.0
    from common.learning import datasets, models
    from common.learning.evaluation import evaluate

    data = datasets.load(experiment.data)
    module = models.of(experiment, inputs=data.inputs)
    images, labels = data.test_images[:EVALUATED], data.test_labels[:EVALUATED]

    def some() -> None:
        with own.guarded({"model.name": experiment.model.name}):
            evaluate(module, images, labels=labels, normalise=data.normaliser())

    return some, len(data.test_labels) / max(1, len(labels))


def record_seconds(experiment: Experiment, *, layout: ModelLayout, row: Row, beside: Callable[[], object]) -> float:
    """Return the seconds of writing the tables of a global round, its byte counts and a checkpoint to the disk.

    Meanwhile `beside` evaluates a model in another thread, as in a run: where that takes all cores, each wait for the
    disk ends later.
    """
    tree, seconds = experiment.tree, list[float]()
    below = tree.below_each(CLOUD)
    ledger = Ledger(tree.children[CLOUD], Account(), below=below)
    for child, names in below.items():
        ledger.enter_reports(child, "session", map(ChildReport, names))
    devices = [ChildReport(name) for name in tree.devices]
    with tempfile.TemporaryDirectory(prefix="fedstrata-") as home, ThreadPoolExecutor(1) as evaluator:
        folder = RunFolder.create(Path(home), experiment)
        while len(seconds) < RECORDS and sum(seconds) < RECORDS_S:
            evaluating = evaluator.submit(beside)
            start = time.perf_counter()
            name = f"round-{len(seconds):06d}"
            folder.add_devices(len(seconds), devices)
            record = GlobalRoundRecord(
                global_round=len(seconds), elapsed_s=0.0, train_loss=None, phases=dict.fromkeys(GLOBAL_PHASES, 0.0),
                sgd_steps=0, path_steps=0, bytes_={}, missing=(), refused=(), epochs={}, omega={}, spread={},
            )  # fmt: skip
            folder.add_round(record)
            folder.event("global_round", record.values())
            folder.write_of_ledger(ledger)()
            folder.sync()
            write_state(folder.checkpoints, name, lambda path: {})
            checkpoint.save_model(folder.checkpoints / f"{name}.safetensors", layout=layout, row=row, facts={})
            seconds.append(time.perf_counter() - start)
            evaluating.result()
        folder.release()
    return median(seconds)


def copy_seconds() -> float:
    """Return the seconds of copying and hashing a byte of a model."""
    return _best(_copying()) / NOISE_BYTES


def mixing_s(copy_s: float) -> float:
    """Return the seconds of mixing a byte of the uploads."""
    return MIXED * copy_s


def _best(
    loop: Callable[[], object], *, clock: Callable[[], float] = time.perf_counter, repeats: int = REPEATS
) -> float:
    seconds = []
    for _ in range(repeats):
        start = clock()
        loop()
        seconds.append(clock() - start)
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
