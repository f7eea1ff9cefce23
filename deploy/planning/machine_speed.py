"""Measurement of this machine's speed of training, evaluation, mixing and message handling, in a
few seconds.

Training and evaluation use the experiment's own model and data: devices train in turn. The other
costs of a round were measured once on a reference machine (`REFERENCE`). Two small loops, packing
messages and copying and hashing a model, scale them to this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.machine import MachineLoad
from fedstrata.common.protocol import serialization
from fedstrata.common.protocol.manifest import chunk_digest
from fedstrata.common.protocol.messages import Key, Manifest, Task
from fedstrata.common.settings import own
from fedstrata.common.training.array_trainer import TrainerTester
from fedstrata.deploy.planning.trainings import train
from fedstrata.deploy.planning.workload import PlannedWorkload

TRAINING_S: Final = 2.0
EVALUATED: Final = 400
EVALUATIONS: Final = 3
PACKING_S: Final = 1.26e-5  # of the first loop on the reference machine
COPYING_S: Final = 1.1e-10  # of the other one there, per byte
MIXED: Final = 3.0  # cost of mixing, in copies of the uploads (tests/bench/aggregation.py)
NOISE_BYTES: Final = 8_000_000
REPEATS: Final = 20
SHARE_LEAST: Final = 0.9  # of a core, that trainings have on an idle machine
OTHERS_MOST: Final = 0.1  # share of all cores that others may use


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpeeds:
    """Speeds of a machine: seconds of one core, 0 for what takes no time, and the number of cores.

    step_s: per SGD step    training_s: per training, without its steps    evaluation_s: per pass
    over the test set message_s: messaging of a round with one child, at both ends and in the broker
    round_s: opening, closing and keeping a round at the parent, however many children
    byte_s: messaging per byte of a model, in each direction    mix_byte_s: mixing, per byte of the
    uploads share: of a core, that the measured trainings had
    """

    step_s: float = 0.0
    training_s: float = 0.0
    evaluation_s: float = 0.0
    message_s: float = 0.0
    round_s: float = 0.0
    byte_s: float = 0.0
    mix_byte_s: float = 0.0
    cores: int
    share: float = 1.0


# The reference machine, a two-core virtual machine, without trainings and evaluations.
REFERENCE: Final = MachineSpeeds(
    message_s=4e-3, round_s=6e-3, byte_s=1.4e-9, mix_byte_s=MIXED * COPYING_S, cores=2
)


def measure(work: PlannedWorkload, *, cores: int) -> MachineSpeeds:
    """Measure this machine with an experiment's models and data."""
    found = train(work.calibrated, first=work.first, training_s=TRAINING_S)
    packing = _best(_packing) / PACKING_S
    copy_s = _best(_copying()) / NOISE_BYTES
    return replace(
        REFERENCE,
        step_s=found.step_s,
        training_s=found.training_s,
        evaluation_s=_evaluation_s(work.calibrated),
        message_s=REFERENCE.message_s * packing,
        round_s=REFERENCE.round_s * packing,
        byte_s=REFERENCE.byte_s * copy_s / COPYING_S,
        mix_byte_s=MIXED * copy_s,
        cores=cores,
        share=found.share,
    )


def _evaluation_s(experiment: Experiment) -> float:
    """Return the CPU seconds of an evaluation of the first model, on some test samples, times their
    number of parts.
    """
    clock = partial(_best, clock=time.process_time, repeats=EVALUATIONS)
    if not experiment.training.trainer.learns_module:
        tester = TrainerTester(experiment)
        if tester.evaluates:
            return clock(partial(tester.evaluate, tester.first))
        return 0.0
    from fedstrata.common.learning import datasets, models
    from fedstrata.common.learning.evaluation import evaluate

    data = datasets.load(experiment.data)
    module = models.of(experiment, inputs=data.inputs)
    images = data.test_images[:EVALUATED]
    labels = data.test_labels[:EVALUATED]
    with own.guarded({"model.name": experiment.model.name}):
        seconds = clock(
            partial(evaluate, module, images, labels=labels, normalise=data.normaliser())
        )
    return seconds * len(data.test_labels) / max(1, len(labels))


def is_busy(load: MachineLoad, share: float) -> bool:
    """Return whether other processes had so much of the machine that the measured speeds are not
    its own.
    """
    return share < SHARE_LEAST or (load.others_cores or 0.0) > OTHERS_MOST * load.cores


def load_line(load: Mapping[str, Any], share: float) -> str:
    """Return the line with the load under which this machine was measured."""
    others = "an unknown number" if load["others_cores"] is None else f"{load['others_cores']:.1f}"
    line = (
        f"measured while other processes used {others} of {load['cores']} cores (load average"
        f" {load['load_average']:.1f}); training had {share:.0%} of a core"
    )
    busy = ": this machine is busy, so is the one predicted. Measure again when it is idle."
    return f"{line}{busy if load['busy'] else ''}\n"


def _best(
    loop: Callable[[], object],
    *,
    clock: Callable[[], float] = time.perf_counter,
    repeats: int = REPEATS,
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
