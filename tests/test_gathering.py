"""Devices of one process that are trained vmapped: through the pool, in a thread and in a process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.common.accounting.work import TrainingPath, Work
from fedstrata.common.experiment import reading, schema
from fedstrata.common.learning import datasets, models
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.randomness import Purpose, generator
from fedstrata.common.training.scores import ScoredModels, ScoreSums
from fedstrata.device import jobs
from fedstrata.device.jobs import (
    ALONE_ON,
    VMAPPED_DEVICES_MOST,
    Cancelled,
    Ending,
    HostedDevice,
    LocalResult,
    Order,
    gather,
    most_together,
)
from fedstrata.device.pool.pool import Pool
from fedstrata.device.pool.trainers_by_kind import Trainers
from fedstrata.device.training.batches import dropout_seed
from fedstrata.device.vmapped import shared_steps
from fedstrata.device.vmapped import vmapped_trainer as trainer
from fedstrata.device.vmapped.shared_steps import Turn
from fedstrata.device.vmapped.shared_steps import train as train_together
from fedstrata.device.vmapped.stacked_models import Recipe, VmappedModels
from tests.helpers.examples import slow
from tests.helpers.plain import row_of, trained, trainer_of
from tests.test_pool import Notes, fake_pool, members_of, trains

QUICK = {"batch_size": 50, "learning_rate": 0.05}


pytestmark = pytest.mark.usefixtures("one_thread", "vmapped_on_cpu")


def experiment(model: str = "mlp_digits", **training: Any) -> schema.Experiment:
    return reading.parse(
        {"model": {"name": model}, "topology": {"devices": 4}, "training": {**QUICK, **training}}
    )


def rows_of(lab: schema.Experiment) -> tuple[ModelLayout, list[Row]]:
    module = models.build(lab.model.name, lab.seed, inputs=datasets.load(lab.data).inputs)
    layout, rows = models.layout_of(module), []
    for k in range(4):
        row = row_of(module)
        noise = generator(1, Purpose.NOISE, str(k)).standard_normal(layout.parameters, np.float32)
        layout.floats(row)[: layout.parameters] += np.float32(0.01) * noise
        row.flags.writeable = False
        rows.append(row)
    return layout, rows


def alone(lab: schema.Experiment, k: int, *, epochs: int, local_round: int) -> tuple[Row, Work]:
    """Return what a device makes of its model of `rows_of` without the others."""
    return _alone(lab.to_json(), k, epochs, local_round)


@cache
def _alone(lab_json: str, k: int, epochs: int, local_round: int) -> tuple[Row, Work]:
    lab = reading.parse(lab_json)
    row = rows_of(lab)[1][k]
    out, result = trained(
        trainer_of(lab, f"device-{k}"), row, epochs=epochs, local_round=local_round
    )
    out.flags.writeable = False
    return out, result


class Together:
    """Four devices' orders, and how each ended."""

    def __init__(
        self,
        lab: schema.Experiment,
        *,
        rounds: tuple[int, ...] = (2, 2, 2, 2),
        digest: str = "digest",
    ) -> None:
        self.lab = lab
        self.digest = digest
        self.layout, self.rows = rows_of(lab)
        self.outs = [self.layout.empty() for _ in self.rows]
        self.endings: list[Ending | None] = [None] * 4
        self.orders = [
            Order(row, out, 1 + k % 2, rounds[k])
            for k, (row, out) in enumerate(zip(self.rows, self.outs, strict=True))
        ]

    def train(self, trainers: Trainers | None = None) -> list[TrainingPath]:
        """Train and check all; return the path of each."""
        work = [
            (HostedDevice(self.lab, self.digest, f"device-{k}"), order)
            for k, order in enumerate(self.orders)
        ]
        (trainers or Trainers()).train(work, "cpu", self.endings.__setitem__)
        self.check(self.endings)
        return [how.work.path for how in self.endings if isinstance(how, LocalResult)]

    @staticmethod
    def scored(lab: schema.Experiment, k: int, out: Row) -> ScoreSums:
        """Return the sums of a model, as of one that device k receives."""
        order = Order(out, out, 0, 0, scores=True)
        found: list[Any] = []
        Trainers().train(
            [(HostedDevice(lab, "", f"device-{k}"), order)], "cpu", lambda _, how: found.append(how)
        )
        return replace(found[0].work.tests.received, seconds=0.0)

    def check(self, endings: Sequence[Any]) -> None:
        for k, how in enumerate(endings):
            order = self.orders[k]
            wanted, result = alone(self.lab, k, epochs=order.epochs, local_round=order.local_round)
            assert isinstance(how, LocalResult)
            assert (how.work.samples, how.work.steps) == (result.samples, result.steps)
            assert how.work.loss == pytest.approx(result.loss, rel=1e-4)
            apart = np.abs(self.layout.floats(self.outs[k]) - self.layout.floats(wanted))
            assert (
                apart.max() < 1e-4
                and np.abs(self.layout.floats(wanted) - self.layout.floats(self.rows[k])).max()
                > 0.01
            )


def test_models_are_scored_before_they_are_trained_together() -> None:
    scores = {"evaluation": {"at": "devices", "data": "test"}}
    work = Together(experiment())
    lab = reading.parse(work.lab.model_dump(mode="json") | scores)
    plain = Together(lab)
    plain.orders = [
        replace(order, scores=k != 1, scores_trained=k != 2) for k, order in enumerate(plain.orders)
    ]
    assert plain.train() == [TrainingPath.VMAPPED] * 4
    only = Together(lab, digest="only")
    only.orders = [replace(order, scores=True, epochs=0) for order in only.orders]
    tasks = [
        (HostedDevice(lab, "only", f"device-{k}"), order) for k, order in enumerate(only.orders)
    ]
    Trainers().train(tasks, "cpu", only.endings.__setitem__)
    for k, (mine, scored) in enumerate(zip(plain.endings, only.endings, strict=True)):
        assert isinstance(mine, LocalResult) and isinstance(scored, LocalResult)
        tests = scored.work.tests
        assert tests is not None and scored.work.steps == 0 and tests.seconds > 0
        assert mine.work.tests is not None and tests.received is not None
        received = None if k == 1 else replace(tests.received, seconds=0.0)
        after = None if k == 2 else Together.scored(lab, k, plain.outs[k])
        assert mine.work.tests.lasting(0.0) == ScoredModels(received, after)


@pytest.mark.parametrize(
    "training",
    slow(
        [{}, {"augmentation": {"flip": True, "crop": 1}}, {"nesterov": True, "clip_norm": 0.5}],
        but=[{"augmentation": {"flip": True, "crop": 1}}],
    ),
)
def test_orders_are_trained_vmapped_as_alone(training: dict[str, Any]) -> None:
    assert Together(experiment("cnn_digits", **training)).train() == [TrainingPath.VMAPPED] * 4


def test_each_device_has_the_seed_of_the_dropout_masks_that_it_has_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(
        trainer,
        "train",
        lambda recipe, turns, most: (
            seeds.extend(turn.seed for turn in turns),
            train_together(recipe, turns, most=most),
        ),
    )
    work = Together(experiment(), rounds=(2, 2, 5, 5))
    assert work.train() == [TrainingPath.VMAPPED] * 4
    wanted = [
        dropout_seed(work.lab, node=f"device-{k}", local_round=r)
        for k, r in enumerate((2, 2, 5, 5))
    ]
    assert seeds == wanted and len(set(seeds)) == 4


def test_each_learning_rate_has_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(
        trainer,
        "train",
        lambda recipe, turns, most: (
            sizes.append(len(turns)),
            train_together(recipe, turns, most=most),
        ),
    )
    work = Together(
        experiment(schedule={"name": "exponential", "factor": 0.5}), rounds=(0, 1, 0, 1)
    )
    assert work.lab.tiers[1].rounds == 1
    assert work.train() == [TrainingPath.VMAPPED] * 4
    assert sizes == [2, 2]


def test_a_deterministic_run_is_not_vmapped() -> None:
    assert Together(experiment(deterministic=True)).train() == [TrainingPath.IN_PROCESS] * 4


@pytest.mark.parametrize("prepared", [0, 1, 3])
def test_memory_is_measured_once(monkeypatch: pytest.MonkeyPatch, prepared: int) -> None:
    measured: list[Turn] = []
    monkeypatch.setattr(trainer, "most_in_memory", lambda _, turn: measured.append(turn) or 100)
    trainers, work = Trainers(), Together(experiment())
    for k in range(prepared):
        trainers.prepare(HostedDevice(work.lab, work.digest, f"device-{k}"), "cpu")
    assert len(measured) == (prepared > 1), "a device alone is no reason to measure"
    assert work.train(trainers) == [TrainingPath.VMAPPED] * 4
    assert work.train(trainers) == [TrainingPath.VMAPPED] * 4
    assert len(measured) == 1, "measured again"


def test_a_step_that_fails_before_the_run_leaves_each_to_be_trained_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> int:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(trainer, "most_in_memory", fail)
    trainers, work = Trainers(), Together(experiment())
    for k in range(2):
        trainers.prepare(HostedDevice(work.lab, work.digest, f"device-{k}"), "cpu")
    assert work.train(trainers) == [TrainingPath.IN_PROCESS] * 4
    problem = "a vmapped step failed. Devices train one after another: no such kernel"
    assert caplog.messages == [f"mlp_digits on cpu: {problem}"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
        ),
    ],
)
def test_without_memory_for_the_data_each_is_trained_alone(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise error

    work = Together(experiment())
    with monkeypatch.context() as patch:
        patch.setattr(trainer._Shared, "know", full)
        Trainers().prepare(HostedDevice(work.lab, work.digest, "device-0"), "cpu")
        assert work.train() == [TrainingPath.IN_PROCESS] * 4
    assert work.train() == [TrainingPath.VMAPPED] * 4


class Fault:
    """Lets the vmapped training's k-th step fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: RuntimeError, k: int = 0) -> None:
        self.trainings = 0
        self._left = -1
        take = VmappedModels.step

        def train(recipe: Recipe, turns: Sequence[Turn], *, most: int) -> None:
            self.trainings += 1
            self._left = k
            train_together(recipe, turns, most=most)

        def step(*given: Any) -> None:
            self._left -= 1
            if self._left == -1:
                self._left = 0  # every further step fails, too
                raise error
            take(*given)

        monkeypatch.setattr(trainer, "train", train)
        monkeypatch.setattr(VmappedModels, "step", step)
        monkeypatch.setattr(shared_steps, "LOOK_S", 0.0)


@pytest.mark.parametrize(
    ("k", "done"), [(0, set()), (7, set()), (8, {0, 2}), (12, {0, 2}), (15, {0, 2})]
)
def test_a_failed_step_leaves_those_that_are_not_done_to_be_trained_alone(
    k: int, done: set[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fault = Fault(monkeypatch, RuntimeError("CUDA error: invalid argument\nand so on"), k)
    trainers, work = Trainers(), Together(experiment())
    progress: list[list[tuple[int, int]]] = [[] for _ in work.orders]
    work.orders = [
        replace(order, progress=lambda *now, seen=seen: seen.append(now))
        for order, seen in zip(work.orders, progress, strict=True)
    ]
    paths = work.train(trainers)
    assert paths == [
        TrainingPath.VMAPPED if i in done else TrainingPath.IN_PROCESS for i in range(4)
    ]
    for i, (order, how) in enumerate(zip(work.orders, work.endings, strict=True)):
        own, result = alone(work.lab, i, epochs=order.epochs, local_round=order.local_round)
        assert (
            isinstance(how, LocalResult)
            and how.work.steps == 8 * order.epochs
            and how.work.train_s > 0
        )
        assert progress[i][-1] == (how.work.steps, how.work.steps)
        if i not in done:
            assert np.array_equal(work.outs[i], own) and how.work.loss == result.loss
            # What the failed steps reported; the training alone reports when a step takes long, and
            # at its end.
            assert progress[i][: k + 1] == [(step, how.work.steps) for step in range(k + 1)]
            assert progress[i] == sorted(progress[i])
    assert caplog.messages == [
        (
            "mlp_digits on cpu: a vmapped step failed. Devices train one after another: CUDA "
            "error: "
            "invalid argument"
        )
    ]
    assert work.train(trainers) == [TrainingPath.IN_PROCESS] * 4
    assert fault.trainings == 1 and len(caplog.messages) == 1


def test_another_experiment_is_vmapped_after_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    trainers, work = Trainers(), Together(experiment())
    with monkeypatch.context() as patch:
        Fault(patch, NotImplementedError("no such kernel"))
        assert work.train(trainers) == [TrainingPath.IN_PROCESS] * 4
    other = Together(experiment(), digest="another")
    assert other.train(trainers) == [TrainingPath.VMAPPED] * 4
    assert work.train(trainers) == [TrainingPath.IN_PROCESS] * 4


def test_without_memory_for_a_step_each_is_trained_alone_in_this_round(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainers, work = Trainers(), Together(experiment())
    with monkeypatch.context() as patch:
        Fault(patch, RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
        assert work.train(trainers) == [TrainingPath.IN_PROCESS] * 4
    assert work.train(trainers) == [TrainingPath.VMAPPED] * 4 and caplog.messages == []


def test_who_is_called_off_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Together(experiment())
    work.orders[1].cancelled.set()
    work.check = lambda _: None  # type: ignore[method-assign]
    work.train()
    assert [type(how) for how in work.endings] == [LocalResult, Cancelled, LocalResult, LocalResult]


def test_a_pools_devices_are_trained_vmapped() -> None:
    work = Together(experiment())

    async def play() -> list[LocalResult]:
        async with Pool(accelerator="cpu", slots=1, devices=4) as pool:
            members = [pool.member(f"device-{k}") for k in range(4)]
            prepared = [await member.prepare(work.lab) for member in members]
            assert prepared[0].layout.digest == work.layout.digest

            async def train(k: int) -> LocalResult:
                order, reported = work.orders[k], []
                result = await members[k].train(
                    replace(order, local_round=2, progress=lambda *args: reported.append(args))
                )
                assert reported[-1] == (result.work.steps, result.work.steps)
                return result

            return await asyncio.gather(*(train(k) for k in range(4)))

    results = asyncio.run(play())
    work.check(results)
    assert [result.work.path for result in results] == [TrainingPath.VMAPPED] * 4
    assert all(
        result.work.wait_s >= 0 and result.wall_s >= result.work.train_s > 0 for result in results
    )


@pytest.mark.parametrize(
    ("keys", "most"),
    [({}, VMAPPED_DEVICES_MOST), ({"vmapped": False}, 1), ({"deterministic": True}, 1)],
)
def test_experiment_and_accelerator_choose(
    keys: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "ALONE_ON", ALONE_ON)
    chosen = experiment(**keys)
    assert (most_together(chosen, "cpu"), most_together(chosen, "cuda:0")) == (1, most)


def test_on_a_cpu_devices_train_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "ALONE_ON", ALONE_ON)
    work = Together(experiment())
    assert work.train() == [TrainingPath.IN_PROCESS] * 4


def test_executors_without_work_share_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "QUIET_S", 0.02)
    assert sizes_of([4], slots=2, devices=12) == [2, 2]


def sizes_of(
    rounds: Sequence[int], *, slots: int, devices: int, accelerator: str = "cpu"
) -> list[int]:
    """Let the first so many devices of a pool train in each round, all at once; return the sizes of
    the groups.
    """
    notes = Notes(["cpu", "cuda:0"])
    notes.gate.set()

    async def play() -> None:
        async with fake_pool(notes, accelerator=accelerator, slots=slots, devices=devices) as pool:
            members = await members_of(pool, [f"device-{k}" for k in range(devices)])
            for count in rounds:
                await asyncio.gather(*map(trains, members[:count]))

    asyncio.run(play())
    return sorted((len(names) for _, names in notes.begun), reverse=True)


@pytest.mark.parametrize(("slots", "sizes"), [(1, [4, 3]), (2, [2, 2, 2, 1])])
def test_a_gpus_lane_waits_for_those_who_come_together(
    slots: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "QUIET_S", 0.02)
    monkeypatch.setattr("fedstrata.device.pool.pool.may_have_gpu", lambda: True)
    # In the first round nobody waits longer, in the second only a moment for the fourth.
    assert sizes_of([4, 3], slots=slots, devices=4, accelerator="auto") == sizes


def test_gathering_ends_when_all_are_there_or_nobody_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "QUIET_S", 0.02)
    came, waiting = asyncio.Event(), 1

    async def play() -> float:
        nonlocal waiting
        loop = asyncio.get_running_loop()

        def arrive() -> None:
            nonlocal waiting
            waiting += 1
            came.set()

        loop.call_later(0.005, arrive)
        loop.call_later(0.01, arrive)
        began = loop.time()
        await gather(came, lambda: waiting == 3)
        taken = loop.time() - began
        await gather(came, lambda: waiting == 4)
        return taken

    assert asyncio.run(play()) < 1 and waiting == 3
