"""Training in each of its ways, by pairs: what devices make of two tasks is what a plain loop makes.

A row of the table is one experiment. Each two values of different columns are together in one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import pytest
import torch

from fedstrata.common.accounting.work import TrainingPath, Work
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets, models
from fedstrata.common.model.layout import Row
from fedstrata.common.randomness import Noise, Purpose, SecretNoise, SeededNoise
from fedstrata.common.runtime.upload_encoder import UploadEncoder
from fedstrata.common.settings.training import (
    DynamicRegulariser,
    ScaffoldCorrection,
    TrainingSettings,
)
from fedstrata.device.jobs import HostedDevice, Order
from fedstrata.device.pool.pool import Pool
from fedstrata.device.pool.trainers_by_kind import Trainers
from fedstrata.device.training.vectors import TaskVectors
from tests.helpers.pairwise import pairwise
from tests.helpers.plain import ended_works, optimiser_of, train_plainly, trainer_of

NODES: Final = ("device-0", "device-1")
TASKS: Final = 2
KEY: Final = bytes(range(32))
SAMPLE: Final = {"unit": "sample", "clip_norm": 0.5, "noise_multiplier": 0.8, "delta": 1e-5}
# What stands in the tables of an experiment, by the columns of the table, and their values.
COLUMNS: Final[Mapping[str, Mapping[str, Any]]] = {
    "optimiser": {
        "sgd": {"momentum": 0.0, "clip_norm": 0.5},
        "momentum": {"momentum": 0.9},
        "nesterov": {"momentum": 0.5, "nesterov": True, "weight_decay": 0.01},
        "adam": {"optimizer": {"name": "adam", "weight_decay": 0.1}, "learning_rate": 0.002},
        "adamw": {
            "optimizer": {"name": "adamw", "beta1": 0.5},
            "clip_norm": 0.3,
            "learning_rate": 0.002,
        },
    },
    "objective": {
        "cross_entropy": {},
        "fedprox": {"mu": 0.3},
        "fedsam": {"rho": 0.1},
        "scaffold": {},
        "feddyn": {"alpha": 0.2},
        "moon": {"mu": 2.0},
    },
    "model": {
        "mlp": {"name": "mlp_digits"},
        "cnn": {"name": "cnn_digits"},
        "shaped": {"name": "tests.helpers.shaped:Shaped"},
    },
    "parts": {"whole": [], "frozen": [0], "personal": [-2, -1]},  # places of parameters
    "privacy": {
        "open": {},
        "noise": {**SAMPLE, "noise": "seeded"},
        "poisson": {**SAMPLE, "noise": "system", "sampling_rate": 0.1},
    },
    "codec": {"fp32": "fp32", "int8": "delta+int8", "topk": {"name": "topk", "share": 0.3}},
    "schedule": {"constant": {}, "step": {"schedule": {"name": "step", "every": 1, "factor": 0.5}}},
    "executor": {"in process": {}, "worker": {}, "vmapped": {}},
    "steps": {"plain": {"recorded": False}, "recorded": {"recorded": True}},
}
APART_MOST: Final = 1e-4  # the median over trainings
KINK_MOST: Final = 1e-2  # where rounding takes a sample across a kink of ReLU


def fits(row: Mapping[str, str]) -> bool:
    """Return whether an experiment can have all of it, and whether a training has all of it."""
    adaptive = row["optimiser"].startswith("adam")
    is_open = row["privacy"] == "open"
    single = row["objective"] in ("cross_entropy", "fedprox")
    return not (
        (row["objective"] == "scaffold" and adaptive)
        or (row["objective"] == "moon" and row["parts"] == "personal")
        or not (is_open or single)
    )


def lab_of(row: Mapping[str, str]) -> Experiment:
    """Return the experiment of a row."""
    chosen = {name: values[row[name]] for name, values in COLUMNS.items()}
    rule = row["objective"] if row["objective"] in ("scaffold", "feddyn") else "fedavg"
    model = dict(chosen["model"])
    plain = parse({"model": model, "data": {"dataset": "digits"}})
    names = [
        name
        for name, _ in models.of(plain, inputs=datasets.load(plain.data).inputs).named_parameters()
    ]
    if row["parts"] != "whole":
        model[row["parts"]] = [names[place] for place in chosen["parts"]]
    training = {"batch_size": 16, "learning_rate": 0.1, "epochs": 2}
    training |= {"objective": {"name": row["objective"], **chosen["objective"]}}
    return parse(
        {
            "rounds": TASKS,
            "topology": {"institutions": 0, "devices": 20},
            "data": {"dataset": "digits"},
            "model": model,
            "evaluation": {"at": "devices" if row["parts"] == "personal" else "cloud"},
            "training": training | chosen["optimiser"] | chosen["schedule"] | chosen["steps"],
            "cloud": {"aggregation": rule, "privacy": chosen["privacy"]},
            "transfer": {"wan": {"up": chosen["codec"]}},
        }
    )


# By the product


Trained: TypeAlias = tuple[Row, Row, Work]  # the row of a task, what came of it, and the work
Train: TypeAlias = Callable[[Sequence[HostedDevice], Sequence[Order]], list[Work]]


def in_process() -> Train:
    """Return what trains by one process's trainers."""
    trainers = Trainers()
    return lambda devices, orders: ended_works(trainers, devices, orders)


@dataclass
class Workers:
    """What trains by two worker processes."""

    runner: asyncio.Runner
    pool: Pool
    members: dict[str, Any] = field(default_factory=dict)

    def __call__(self, devices: Sequence[HostedDevice], orders: Sequence[Order]) -> list[Work]:
        async def one(device: HostedDevice, order: Order) -> Work:
            member = self.members.setdefault(device.node, self.pool.member(device.node))
            await member.prepare(device.experiment)
            return (await member.train(order)).work

        async def all_of_them() -> list[Work]:
            async with asyncio.timeout(100.0):
                return await asyncio.gather(*map(one, devices, orders))

        return self.runner.run(all_of_them())


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with asyncio.Runner() as runner:
        pool = runner.run(Pool(accelerator="cpu", slots=2, devices=2).__aenter__())
        yield Workers(runner, pool)
        runner.run(pool.__aexit__())


def tasks_of(lab: Experiment, vectors: TaskVectors, train: Train) -> list[list[Trained]]:
    """Return each device's row, what it makes of it, and its work, in each of some tasks.

    What a parent sends behind the model are random numbers, and what a device keeps is that of its
    last task. Each task has the first model.
    """
    devices = [HostedDevice(lab, lab.digest, node) for node in NODES]
    down, up, kept = vectors.links.down.row_bytes, vectors.links.up.row_bytes, vectors.kept_bytes
    first = models.of(lab, inputs=datasets.load(lab.data).inputs)
    noise = KEY if lab.tiers[-1].privacy.noise == "system" else b""
    tasks: list[list[Trained]] = []
    for number in range(TASKS):
        orders = []
        for place in range(len(NODES)):
            row, out = np.zeros(down + kept, np.uint8), np.zeros(up + kept, np.uint8)
            models.write_row(first, vectors.layout, row)
            behind = row[vectors.layout.row_bytes : down].view(np.float32)
            behind[:] = np.random.default_rng(number).normal(0, 0.01, len(behind))
            if tasks:
                row[down:] = tasks[-1][place][1][up:]
            orders.append(Order(row, out, lab.training.epochs, number, noise=noise))
        works = train(devices, orders)
        tasks.append([(each.row, each.out, work) for each, work in zip(orders, works, strict=True)])
    return tasks


# By a plain loop


def check_model(
    lab: Experiment, vectors: TaskVectors, number: int, node: str, did: Trained
) -> float:
    """Compare the loss and the steps of a task with those of a plain loop from its row; return how
    far the models are apart, as a share of how far the training moves one.
    """
    row, out, work = did
    layout = vectors.inner.layout
    inner = vectors.begin(row)
    module = models.of(lab, inputs=datasets.load(lab.data).inputs)
    models.read_row(module, layout, inner)
    trains = [name for name, weight in module.named_parameters() if weight.requires_grad]
    given = {}
    for name, vector in vectors.inner.read(inner).items():
        parts = vectors.inner.split(name, vector)
        given[name] = [torch.from_numpy(parts[each].copy()) for each in trains]
    noise: Noise | None = None
    if lab.tiers[-1].privacy.on_samples:
        secret = lab.tiers[-1].privacy.noise == "system"
        seeded = SeededNoise(lab.seed, Purpose.PRIVACY, node, number)
        noise = SecretNoise(KEY) if secret else seeded
    loss, steps = train_plainly(
        module,
        lab,
        node,
        epochs=lab.training.epochs,
        local_round=number,
        vectors=given,
        personal=vectors.personal,
        noise=noise,
    )
    wanted = layout.empty()
    models.write_row(module, layout, wanted)
    start_D, wanted_D, found_D = (
        layout.floats(each).astype(np.float64) for each in (inner, wanted, vectors.trained(out))
    )
    moved = np.linalg.norm(wanted_D - start_D)
    assert moved > 1e-3
    assert work.steps == steps and work.loss == pytest.approx(loss, rel=1e-4)
    return float(np.linalg.norm(found_D - wanted_D) / moved)


def check_kept(lab: Experiment, vectors: TaskVectors, number: int, node: str, did: Trained) -> None:
    """Compare what a device keeps, and returns, with the formula of its method."""
    row, out, work = did
    layout, objective = vectors.layout, lab.training.objective
    if not vectors.expected:
        return
    encoder = UploadEncoder.of(lab, node, layout)
    uploaded = encoder.decoded(
        out[: layout.row_bytes], received=row[: layout.row_bytes], task=number
    )
    received_D, trained_D, uploaded_D = (
        layout.floats(each)[: layout.parameters].astype(np.float64) for each in (row, out, uploaded)
    )
    before, after = vectors.read(row), vectors.returned.extras_of(out)
    wanted = {}
    if isinstance(objective, ScaffoldCorrection):
        rate = lab.learning_rate_in(number)
        change = (received_D - trained_D) / rate / gradient_weight(lab.training, rate, work.steps)
        wanted["control_change"] = change - before["control"]
        wanted["own_control"] = before["own_control"] + wanted["control_change"]
    elif isinstance(objective, DynamicRegulariser):
        step = objective.alpha * (uploaded_D - received_D)
        wanted["own_gradient"] = before["own_gradient"] - step
    else:
        wanted["previous"] = trained_D
    assert wanted.keys() == after.keys()
    for name, vector in wanted.items():
        np.testing.assert_allclose(after[name], vector, rtol=1e-4, atol=1e-5)


def gradient_weight(training: TrainingSettings, rate: float, steps: int) -> float:
    """Return how far steps of SGD lead on a slope of 1, over the learning rate."""
    weight = torch.zeros(1, dtype=torch.float64)
    optimiser = optimiser_of(training, [weight], rate)
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimiser.step()
    return -float(weight) / rate


ROWS: Final = pairwise({name: list(values) for name, values in COLUMNS.items()}, fits)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ", ".join(row.values()))
def test_each_pair_trains_as_a_plain_loop(
    row: Mapping[str, str], request: pytest.FixtureRequest
) -> None:
    lab, executor = lab_of(row), row["executor"]
    trainer = trainer_of(lab, NODES[0])
    private = row["privacy"] != "open"
    assert trainer.recorded is (row["steps"] == "recorded" and not private)
    vectors = trainer.vectors
    plain = lab.model_copy(update={"training": lab.training.model_copy(update={"recorded": False})})
    alone = tasks_of(plain, vectors, in_process())
    found = alone
    path = TrainingPath.IN_PROCESS
    if executor == "vmapped":
        request.getfixturevalue("vmapped_on_cpu")
        if not private and row["model"] != "shaped":
            path = TrainingPath.VMAPPED
    elif executor == "worker":
        path = TrainingPath.WORKERS
    if executor != "in process" or row["steps"] == "recorded":
        train = request.getfixturevalue("workers") if executor == "worker" else in_process()
        found = tasks_of(lab, vectors, train)
    apart = []
    for number, devices in enumerate(found):
        for place, (node, did) in enumerate(zip(NODES, devices, strict=True)):
            apart.append(check_model(lab, vectors, number, node, did))
            check_kept(lab, vectors, number, node, did)
            assert did[2].path is path
            if path is not TrainingPath.VMAPPED:
                assert np.array_equal(did[1], alone[number][place][1]), "bit for bit"
    assert np.median(apart) < APART_MOST and max(apart) < KINK_MOST


def test_personal_batch_norm_is_trained_vmapped_as_alone(request: pytest.FixtureRequest) -> None:
    """With the vectors of SCAFFOLD. Batch norm over few samples amplifies rounding."""
    images = {"dataset": "synthetic", "classes": 10, "image_shape": [1, 16, 16], "samples": 120}
    one_batch = {"batch_size": 20}
    lab = parse(
        {
            "rounds": TASKS,
            "topology": {"institutions": 0, "devices": 6},
            "data": images,
            "model": {"name": "resnet20", "personal": ["*bn*"]},
            "evaluation": {"at": "devices"},
            "training": {"learning_rate": 0.05, "epochs": 1, "objective": "scaffold", **one_batch},
            "cloud": {"aggregation": "scaffold"},
        }
    )
    vectors = trainer_of(lab, NODES[0]).vectors
    alone = tasks_of(lab, vectors, in_process())
    request.getfixturevalue("vmapped_on_cpu")
    together = tasks_of(lab, vectors, in_process())
    for mine, its in zip(together[-1], alone[-1], strict=True):
        assert mine[2].path is TrainingPath.VMAPPED
        # counters, the last columns, are no floats
        found, wanted = (each[1].view(np.float32)[:-200] for each in (mine, its))
        apart = (found - wanted)[np.isfinite(wanted)]
        assert np.linalg.norm(apart) < 1e-2 * np.linalg.norm(wanted[np.isfinite(wanted)])
