"""The pool: who trains when and where, with lanes that only write down; and real workers, killed
and called off.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest

from fedstrata.common.accounting.work import TrainingPath, Work
from fedstrata.common.errors import AcceleratorLost, InvalidExperiment, RunFailed
from fedstrata.common.experiment import reading, schema
from fedstrata.common.host.accelerators import choose, may_have_gpu
from fedstrata.common.learning import splits
from fedstrata.common.model.layout import ModelLayout, Row, Section
from fedstrata.common.processes import shared_rows
from fedstrata.common.processes.shared_rows import SHARED_BYTES
from fedstrata.device import jobs
from fedstrata.device.jobs import (
    Cancelled,
    HostedDevice,
    Job,
    LocalResult,
    Order,
    PoolRequest,
    Prepared,
)
from fedstrata.device.pool import executors
from fedstrata.device.pool.executors import Executor, Thread, Worker
from fedstrata.device.pool.pool import Member, Pool
from tests.helpers.loops import in_loop
from tests.helpers.plain import first_model, trained, trainer_of

pytestmark = pytest.mark.usefixtures("warm")

T = TypeVar("T")
PATIENCE_S = 110.0
LAYOUT = ModelLayout.build([("w", (2,), Section.PARAMETER)])

# A model that does in training what files beside it say.
NETS = """
import os, pathlib, signal, sys, torch
from torch import nn

HERE = pathlib.Path(__file__).parent

class Moody(nn.Module):
    def __init__(self):
        super().__init__()
        self.work = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        self.calls = 0

    def forward(self, x):
        self.calls += 1  # so its steps are not recorded
        if self.training and torch.is_grad_enabled():  # not where a model is tried as it is built
            for path in HERE.glob("do-*"):
                count = int(path.read_text()) - 1
                path.unlink() if count == 0 else path.write_text(str(count))
                if path.name == "do-kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if path.name == "do-exhaust":
                    raise torch.OutOfMemoryError("no memory")
                if path.name == "do-fail":
                    raise KeyError("a bug")
                if path.name == "do-exit":
                    sys.exit(1)
                if path.name == "do-lose":
                    raise RuntimeError("CUDA error: an illegal memory access was encountered\\nand so on")
        return self.work(x)

def build(*, shape, classes):
    return Moody()
"""


def experiment(model: str = "cnn_digits", devices: int = 4, **training: Any) -> schema.Experiment:
    return reading.parse(
        {"model": {"name": model}, "topology": {"devices": devices}, "training": training}
    )


def alone(
    lab: schema.Experiment, node: str, row: Row, *, epochs: int = 1, local_round: int = 0
) -> tuple[Row, Work]:
    return trained(trainer_of(lab, node), row, epochs=epochs, local_round=local_round)


# Who trains when: lanes that only write down


@dataclass
class Notes:
    """What happened on all lanes, and the gate that trainings wait at."""

    there: list[str]
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    lanes: list[FakeLane] = field(default_factory=list)
    begun: list[tuple[str, list[str]]] = field(default_factory=list)
    failure: Exception | None = None

    def lane(self) -> FakeLane:
        self.lanes.append(FakeLane(self))
        return self.lanes[-1]


class FakeLane:
    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.accelerator = "?"
        self.closed = False
        self.forgotten: list[str] = []

    async def start(self) -> None:
        if self.notes.failure:
            raise self.notes.failure

    async def accelerators(self) -> Sequence[str]:
        return self.notes.there

    async def prepare(self, device: HostedDevice) -> Prepared:
        return Prepared(LAYOUT, 7, "")

    async def train(self, jobs: Sequence[Job]) -> None:
        self.notes.begun.append((self.accelerator, [job.device.node for job in jobs]))
        calls_off = asyncio.Event()
        for job in jobs:
            job.on_cancel = calls_off.set
        waits = [asyncio.create_task(event.wait()) for event in (self.notes.gate, calls_off)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        for job in jobs:
            if job.order.cancelled.is_set():
                job.fail(Cancelled())
            else:
                job.order.progress(1, 1)
                job.finish(
                    LocalResult(
                        Work(7, 0.5, steps=1, train_s=0.0, wait_s=0.0, path=TrainingPath.VMAPPED)
                    )
                )

    def forget(self, digest: str) -> None:
        self.forgotten.append(digest)

    async def close(self) -> None:
        self.closed = True


def fake_pool(
    notes: Notes, *, accelerator: str = "cpu", slots: int | None = 1, devices: int = 4
) -> Pool:
    return Pool(
        accelerator=accelerator, slots=slots, devices=devices, thread=notes.lane, worker=notes.lane
    )


def trains(member: Member, row: Row | None = None) -> asyncio.Task[LocalResult]:
    rows = LAYOUT.empty() if row is None else row, LAYOUT.empty()
    return asyncio.create_task(member.train(Order(*rows, 1, 0)))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def members_of(
    pool: Pool, names: Sequence[str], lab: schema.Experiment | None = None
) -> list[Member]:
    members = [pool.member(name) for name in names]
    for member in members:
        await member.prepare(lab or experiment())
    return members


@in_loop
async def test_first_come_first_served_and_who_leaves_the_queue_is_skipped() -> None:
    notes = Notes(["cpu"])
    async with fake_pool(notes) as pool:
        members = await members_of(pool, ["a", "b", "c", "d"])
        tasks = []
        for member in (members[2], members[0], members[3], members[1]):
            tasks.append(trains(member))
            await settle()
        assert notes.begun == [("cpu", ["c"])]
        tasks[2].cancel()
        notes.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [nodes for _, nodes in notes.begun] == [["c"], ["a"], ["b"]]
        assert isinstance(results[2], asyncio.CancelledError)
        assert all(
            isinstance(result, LocalResult) and result.work.wait_s >= 0
            for result in results
            if result is not results[2]
        )
        assert pool.moves == members[0].moves == 3
    assert all(lane.closed for lane in notes.lanes)


@in_loop
async def test_an_experiment_is_forgotten_when_the_last_device_has_left_it() -> None:
    notes, first, second = Notes(["cpu"]), experiment(), experiment(epochs=7)
    async with fake_pool(notes) as pool:
        a, b = await members_of(pool, ["a", "b"], first)
        a.leave()
        a.leave()
        assert notes.lanes[0].forgotten == []
        await a.prepare(second)
        await b.prepare(second)  # it goes on to another run at once
        assert notes.lanes[0].forgotten == [first.digest]
        b.leave()
        a.leave()
        assert notes.lanes[0].forgotten == [first.digest, second.digest]


@in_loop
async def test_a_training_that_is_called_off_ends_before_its_rows_are_free() -> None:
    notes = Notes(["cpu"])
    async with fake_pool(notes) as pool:
        members = await members_of(pool, ["a", "b"])
        first, second = trains(members[0]), trains(members[1])
        await settle()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await settle()
        assert [nodes for _, nodes in notes.begun] == [["a"], ["b"]]
        notes.gate.set()
        assert (await second).work.samples == 7


def test_a_training_alone_costs_no_look_at_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Counter[str]()
    alike, share = Job.alike, Pool._share

    def counted_alike(job: Job, other: PoolRequest) -> bool:
        looks["alike"] += 1
        return alike(job, other)

    def counted_share(pool: Pool, executor: Executor) -> int:
        looks["share"] += 1
        return share(pool, executor)

    monkeypatch.setattr(Job, "alike", counted_alike)
    monkeypatch.setattr(Pool, "_share", counted_share)

    async def play(most: int) -> int:
        monkeypatch.setattr("fedstrata.device.pool.pool.most_together", lambda *_: most)
        notes = Notes(["cpu"])
        notes.gate.set()
        async with fake_pool(notes, devices=50) as pool:
            members = await members_of(pool, [f"device-{number}" for number in range(50)])
            await asyncio.gather(*map(trains, members))
        return looks.total()

    assert asyncio.run(play(1)) == 0
    assert asyncio.run(play(50)) > 0


@in_loop
async def test_a_lane_that_takes_several_gets_trainings_of_one_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def at_once(*_: object) -> None:
        """Wait for nobody."""

    monkeypatch.setattr("fedstrata.device.pool.pool.gather", at_once)
    monkeypatch.setattr("fedstrata.device.pool.pool.most_together", lambda *_: 3)

    notes = Notes(["cpu"])
    other = experiment(learning_rate=0.5)
    async with fake_pool(notes, devices=6) as pool:
        members = await members_of(pool, ["a", "b", "c", "d", "e"])
        (stranger,) = await members_of(pool, ["f"], other)
        first = trains(members[0])
        await settle()
        rest = [trains(member) for member in (members[1], stranger, *members[2:])]
        await settle()
        notes.gate.set()
        await asyncio.gather(first, *rest)
        assert [nodes for _, nodes in notes.begun] == [["a"], ["b", "c", "d"], ["f"], ["e"]]


@pytest.mark.parametrize(
    ("accelerator", "slots", "wanted"),
    [
        ("cuda", None, ["cuda:0", "cuda:1", "cuda:2"]),
        ("auto", None, ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda", 2, ["cuda:0", "cuda:1"]),
        ("cuda", 5, ["cuda:0", "cuda:1", "cuda:2", "cuda:0", "cuda:1"]),
        ("cuda:1", None, ["cuda:1"]),
        ("cpu", 2, ["cpu", "cpu"]),
    ],
)
@in_loop
async def test_devices_go_round_the_gpus(
    accelerator: str, slots: int | None, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstrata.device.pool.pool.may_have_gpu", lambda: True)

    notes = Notes(["cpu", "cuda:0", "cuda:1", "cuda:2"])
    names = [f"d{i}" for i in range(9)]
    async with fake_pool(notes, accelerator=accelerator, slots=slots, devices=9) as pool:
        members = await members_of(pool, names)
        notes.gate.set()
        await asyncio.gather(*map(trains, members))
        assert [lane.accelerator for lane in notes.lanes if not lane.closed] == wanted
        places = {node: where for where, nodes in notes.begun for node in nodes}
        gpus = list(dict.fromkeys(wanted))
        assert [places[name] for name in names] == [gpus[i % len(gpus)] for i in range(9)]


def test_an_accelerator_that_is_not_there_is_refused_at_the_start() -> None:
    async def play(accelerator: str) -> None:
        async with fake_pool(Notes(["cpu", "cuda:0"]), accelerator=accelerator):
            pytest.fail("it began")

    for accelerator in ("mps", "CPU", "cuda:-1", ""):
        with pytest.raises(
            InvalidExperiment,
            match=f"--accelerator = '{accelerator}': no accelerator has this name",
        ):
            asyncio.run(play(accelerator))
    with pytest.raises(
        InvalidExperiment, match=r"--accelerator = 'cuda:7'.*It has cpu, cuda:0; or use auto"
    ):
        asyncio.run(play("cuda:7"))
    with pytest.raises(InvalidExperiment, match="It has cpu;"):
        choose("cuda", ["cpu"])


@in_loop
async def test_lanes_that_cannot_start_fail_whoever_waits_and_whoever_comes() -> None:
    async with fake_pool(Notes(["cpu"], failure=RunFailed("no torch"))) as pool:
        for name in ("a", "b"):
            with pytest.raises(RunFailed, match="no torch"):
                await pool.member(name).prepare(experiment())


@pytest.mark.parametrize("name", ["nvidia0", "nvhost-gpu", "nvgpu", "nvmap", "kfd", "dxg"])
def test_a_driver_makes_it_worth_looking_for_gpus(name: str, tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    assert not may_have_gpu(tmp_path)
    (tmp_path / name).touch()
    assert may_have_gpu(tmp_path)


# Real workers


@dataclass
class Lab:
    """Two workers on an event loop that lives as long as the module's tests; `folder` has their
    model's orders.
    """

    runner: asyncio.Runner
    pool: Pool
    folder: Path
    names: dict[str, Member] = field(default_factory=dict)

    def member(self, name: str) -> Member:
        return self.names.setdefault(name, self.pool.member(name))

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        async def in_time() -> T:
            async with asyncio.timeout(PATIENCE_S):
                return await work

        return self.runner.run(in_time())

    def pids(self) -> set[int]:
        return {
            lane.pid
            for lane in self.pool._executors
            if isinstance(lane, Worker) and lane.pid is not None
        }

    def order(self, what: str, times: int = 1) -> None:
        (self.folder / f"do-{what}").write_text(str(times))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("nets")
    (folder / "moody.py").write_text(NETS)
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        root = str(Path(__file__).parents[1])
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join(filter(None, (root, str(folder), os.environ.get("PYTHONPATH")))),
        )
        patch.syspath_prepend(folder)

        async def open_pool() -> Pool:
            return await Pool(accelerator="cpu", slots=2, devices=4).__aenter__()

        pool = runner.run(open_pool())
        yield Lab(runner, pool, folder)
        runner.run(pool.__aexit__())
    assert [
        child
        for child in psutil.Process().children()
        if "fedstrata.device.pool.worker_process" in child.cmdline()
    ] == []


@pytest.fixture(params=[SHARED_BYTES, 1], ids=["copied", "mapped"])
def new_rows(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Row], Row]:
    """Make copies of rows, which workers get copied, or map."""
    monkeypatch.setattr(shared_rows, "SHARED_BYTES", request.param)

    def copied(row: Row) -> Row:
        copy = shared_rows.new_row(row.size)
        assert (shared_rows.place_of(copy) is None) is (request.param == SHARED_BYTES)
        copy[:] = row
        return copy

    return copied


def test_workers_give_the_bits_of_a_trainer_alone(lab: Lab, new_rows: Callable[[Row], Row]) -> None:
    what = experiment(batch_size=20, momentum=0.9)
    row = new_rows(first_model(what))
    row.flags.writeable = False
    nodes = [f"device-{i}" for i in range(4)]

    async def together() -> list[tuple[Prepared, LocalResult, Row]]:
        async def one(node: str) -> tuple[Prepared, LocalResult, Row]:
            member = lab.member(node)
            prepared = await member.prepare(what)
            out = new_rows(prepared.layout.empty())
            return prepared, await member.train(Order(row, out, 2, 3)), out

        return await asyncio.gather(*map(one, nodes))

    for node, (prepared, result, out) in zip(nodes, lab.do(together()), strict=True):
        wanted, single = alone(what, node, row, epochs=2, local_round=3)
        assert np.array_equal(out, wanted)
        did = result.work
        assert (did.samples, did.loss, did.steps) == (single.samples, single.loss, single.steps)
        assert prepared.samples == did.samples and prepared.layout.row_bytes == row.nbytes
        assert prepared.partition == splits.split_of(what, node=node).digest != ""
        assert (
            result.work.path == "workers"
            and single.path == "in-process"
            and result.work.train_s > 0
            and result.work.wait_s >= 0
        )


def test_workers_train_devices_vmapped(
    monkeypatch: pytest.MonkeyPatch, vmapped_on_cpu: None
) -> None:
    monkeypatch.setattr(executors, "MODULE", "tests.helpers.vmapped_worker")
    # a busy machine brings both devices of a worker within it
    monkeypatch.setattr(jobs, "QUIET_S", 1.0)
    what = experiment("mlp_digits", batch_size=50)
    row = first_model(what)

    async def one(member: Member) -> tuple[LocalResult, Row]:
        out, reported = np.zeros_like(row), list[tuple[int, int]]()
        result = await member.train(Order(row, out, 1, 2, lambda *done: reported.append(done)))
        assert (
            reported[-1] == (result.work.steps, result.work.steps)
            and result.wall_s >= result.work.train_s > 0
        )
        return result, out

    async def together() -> list[tuple[LocalResult, Row]]:
        async with asyncio.timeout(PATIENCE_S), Pool(accelerator="cpu", slots=2, devices=4) as pool:
            members = [pool.member(f"device-{k}") for k in range(4)]
            for member in members:
                await member.prepare(what)
            return await asyncio.gather(*map(one, members))  # all at once: two for each worker

    for k, (result, out) in enumerate(asyncio.run(together())):
        wanted, single = alone(what, f"device-{k}", row, local_round=2)
        assert (result.work.path, result.work.samples, result.work.steps) == (
            TrainingPath.VMAPPED,
            single.samples,
            single.steps,
        )
        assert np.abs(out.view(np.float32) - wanted.view(np.float32)).max() < 1e-4


def test_one_slot_is_a_thread_and_gives_the_same_bits() -> None:
    what = experiment()
    row = first_model(what)

    async def play() -> tuple[LocalResult, Row]:
        async with Pool(accelerator="cpu", slots=1, devices=2) as pool:
            member = pool.member("device-1")
            out = (await member.prepare(what)).layout.empty()
            result = await member.train(Order(row, out, 1, 2))
            assert [type(lane) for lane in pool._executors] == [Thread]
            with pytest.raises(InvalidExperiment, match="device-9"):
                await pool.member("device-9").prepare(what)
            return result, out

    result, out = asyncio.run(play())
    assert (
        np.array_equal(out, alone(what, "device-1", row, epochs=1, local_round=2)[0])
        and result.work.path == "in-process"
    )


def test_progress_is_reported_and_a_running_training_is_called_off(
    lab: Lab, new_rows: Callable[[Row], Row]
) -> None:
    what = experiment()
    row = new_rows(first_model(what))
    seen: list[tuple[int, int]] = []

    async def play() -> Row:
        member = lab.member("device-0")
        out = new_rows((await member.prepare(what)).layout.empty())
        before.update(lab.pids())
        out[:] = 7
        moved = asyncio.Event()

        def progress(done: int, of: int) -> None:
            seen.append((done, of))
            moved.set()

        task = asyncio.create_task(member.train(Order(row, out, 100_000, 0, progress)))
        await moved.wait()
        moves = member.moves
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert moves > 0 and (out == 7).all()
        await member.train(Order(row, out, 1, 0, progress))
        return out

    before: set[int] = set()
    out = lab.do(play())
    assert np.array_equal(out, alone(what, "device-0", row)[0])
    assert 0 < seen[0][0] < seen[0][1] == 3_600_000 and seen[-1] == (36, 36)
    assert before <= lab.pids()


def test_what_was_forgotten_is_made_again(lab: Lab) -> None:
    what = experiment("mlp_digits")
    row = first_model(what)

    async def joins_twice(member: Member) -> list[Row]:
        outs = []
        for _ in range(2):
            await member.prepare(what)
            outs.append(np.zeros_like(row))
            await member.train(Order(row, outs[-1], 1, 0))
            member.leave()
        return outs

    async def in_a_thread() -> list[Row]:
        async with Pool(accelerator="cpu", slots=1, devices=1) as pool:
            return await joins_twice(pool.member("device-0"))

    first, *others = [*lab.do(joins_twice(lab.member("device-0"))), *lab.do(in_a_thread())]
    assert first.any()
    for other in others:
        np.testing.assert_array_equal(first, other)


@pytest.fixture
def moody(lab: Lab) -> schema.Experiment:
    return experiment("moody:build")


def train_moody(
    lab: Lab,
    what: schema.Experiment,
    *,
    order: str = "",
    new_rows: Callable[[Row], Row] = lambda row: row,
) -> Row:
    """Prepare and train; `order`: what the model does in the training."""

    async def play() -> Row:
        member = lab.member("device-0")
        out = new_rows((await member.prepare(what)).layout.empty())
        if order:
            lab.order(order)
        await member.train(Order(new_rows(first_model(what)), out, 1, 0))
        return out

    return lab.do(play())


@pytest.mark.parametrize("order", ["kill", pytest.param("lose", marks=pytest.mark.slow)])
def test_a_worker_is_replaced_once_at_no_cost_for_the_training(
    order: str, lab: Lab, moody: schema.Experiment, new_rows: Callable[[Row], Row]
) -> None:
    train_moody(lab, moody)
    before = lab.pids()
    again = train_moody(lab, moody, order=order, new_rows=new_rows)
    assert len(lab.pids()) == 2 and len(lab.pids() & before) == 1
    assert np.array_equal(again, alone(moody, "device-0", first_model(moody))[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("kill", "was killed by SIGKILL, and so was .*--slots"),
        ("lose", r"lost its accelerator \(CUDA error: an illegal .*, and so did"),
    ],
)
def test_a_training_that_ends_two_workers_fails_and_spares_the_others(
    order: str, reason: str, lab: Lab, moody: schema.Experiment
) -> None:
    lab.order(order, 2)
    with pytest.raises(RunFailed, match=f"trained device-0 {reason}"):
        train_moody(lab, moody)
    assert np.array_equal(train_moody(lab, moody), alone(moody, "device-0", first_model(moody))[0])


def test_exhausted_memory_fails_the_training_and_spares_the_worker(
    lab: Lab, moody: schema.Experiment
) -> None:
    train_moody(lab, moody)
    before = lab.pids()
    with pytest.raises(RunFailed, match=r"training\.batch_size = 10.*smaller"):
        train_moody(lab, moody, order="exhaust")
    train_moody(lab, moody)
    assert before <= lab.pids()


@pytest.mark.parametrize(
    ("order", "error"), [("fail", "KeyError: 'a bug'"), ("exit", "SystemExit: 1")]
)
def test_a_model_that_fails_is_reported_with_its_place_and_spares_the_worker(
    order: str, error: str, lab: Lab, moody: schema.Experiment
) -> None:
    train_moody(lab, moody)
    before = lab.pids()
    # in the trial of the model, or in its training if this worker has tried it
    lab.order(order, 100)
    with pytest.raises(InvalidExperiment) as caught:
        train_moody(lab, moody)
    file = lab.folder / "moody.py"
    line = (
        next(i for i, text in enumerate(file.read_text().splitlines()) if f"do-{order}" in text) + 2
    )
    problem, _, where = str(caught.value).partition(f"with {error}")
    assert re.fullmatch(
        r"model\.name = 'moody:build': fails (in training on \d+ samples )?", problem
    )
    assert where == f", in Moody.forward ({file}:{line}). Correct it."
    (frame,) = caught.value.frames
    assert frame.startswith(f"{file}:{line}, in Moody.forward: ") and caught.value.exit_code == 4
    (lab.folder / f"do-{order}").unlink()
    train_moody(lab, moody)
    assert before <= lab.pids()


@in_loop
async def test_an_accelerator_that_fails_for_good_ends_a_process_that_trains_in_a_thread(
    lab: Lab, moody: schema.Experiment
) -> None:
    async with Pool(accelerator="cpu", slots=1, devices=2) as pool:
        member, other = pool.member("device-0"), pool.member("device-1")
        out = (await member.prepare(moody)).layout.empty()
        await other.prepare(moody)
        lab.order("lose")
        for each in (member, other):
            with pytest.raises(AcceleratorLost, match=r"^CUDA error: an illegal memory access was"):
                await each.train(Order(first_model(moody), out, 1, 0))
        assert pool.failure is not None and member.failure is pool.failure


def test_what_is_wrong_with_an_experiment_is_reported_whole(lab: Lab) -> None:
    with pytest.raises(InvalidExperiment, match=r"model\.name = 'lenet5'.*Use") as caught:
        lab.do(lab.member("device-0").prepare(experiment("lenet5")))
    assert caught.value.exit_code == 4 and len(caught.value.parts) == 4


def test_what_cannot_be_trained_fails_with_its_parts_and_spares_the_worker(lab: Lab) -> None:
    what = experiment()
    before = lab.pids()

    async def play(node: str) -> None:
        job = Job(
            device=HostedDevice(what, what.digest, node),
            place=0,
            order=Order(first_model(what), first_model(what), 1, 0),
        )
        await lab.pool.submit(job)

    with pytest.raises(InvalidExperiment, match="device-9") as caught:
        lab.do(play("device-9"))
    assert len(caught.value.parts) == 4
    lab.do(play("device-1"))
    assert before <= lab.pids()


def test_workers_hear_no_interrupt_of_the_terminal(lab: Lab) -> None:
    assert all(os.getsid(pid) == pid != os.getsid(0) for pid in lab.pids())


AGENT = """
import asyncio, os, sys
from fedstrata.common.experiment.reading import parse
from fedstrata.device.device_agent import DeviceAgent
from fedstrata.device.pool.pool import Pool

async def main():
    async with Pool(accelerator="cpu", slots=2, devices=2) as pool:
        made = {"dataset": "synthetic", "classes": 2, "image_shape": [1, 8, 8]}
        what = parse({"data": made, "topology": {"devices": 2}})
        await asyncio.gather(*(pool.member(f"device-{i}").prepare(what) for i in range(2)))
        print(*(lane.pid for lane in pool._executors), "torch" in sys.modules, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_workers_end_with_their_agent_which_has_no_torch() -> None:
    root = str(Path(__file__).parents[1])
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert agent.stdout is not None
    with agent:
        *pids, torch = agent.stdout.readline().split()
        workers = [psutil.Process(int(pid)) for pid in pids]
        agent.kill()
    assert len(workers) == 2 and torch == "False"
    _, alive = psutil.wait_procs(workers, timeout=PATIENCE_S)
    assert alive == []
