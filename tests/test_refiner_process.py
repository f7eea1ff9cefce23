"""A node's refiner in a process of its own: the same bits as in this one, its end, and a node
without torch.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pytest

from fedstrata.common.errors import InvalidExperiment, RunFailed, installing
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.offload import offload
from fedstrata.common.learning import models
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.refiner import NodeRefiner
from fedstrata.common.learning.splits import split_of
from fedstrata.common.model.layout import FrozenForm, ModelLayout
from fedstrata.common.model.refinement import RoundModels
from fedstrata.common.runtime.refining import MODULE, RefinerProcess, run_refining
from tests.helpers.commands import DEMO, PATIENCE_S, command, run_lab, sets, table, tensors

pytestmark = pytest.mark.usefixtures("warm")

NODE: Final = "institution-0"
LAYOUT: Final = models.layout_of(models.build("mlp_digits", 1, inputs=Inputs((1, 8, 8), 10)))


def experiment(rule: dict[str, Any], **transfer: Any) -> Experiment:
    return parse(
        {
            "topology": {"institutions": 1, "devices": 2},
            "model": {"name": "mlp_digits"},
            "data": {"node_samples": 40},
            "institution": {"aggregation": rule},
            "transfer": transfer,
        }
    )


async def nothing() -> Path:
    raise AssertionError("it builds the arrays of the run")


def round_of(layout: ModelLayout) -> RoundModels:
    rows = np.zeros((5, layout.row_bytes), np.uint8)
    layout.floats(rows)[:] = np.random.default_rng(1).normal(scale=0.1, size=(5, layout.columns))
    layout.floats(rows)[0] = layout.floats(rows)[2:].mean(axis=0)
    return RoundModels(3, layout, rows[0], rows[1], list(rows[2:]), np.array([0.5, 0.25, 0.25]))


async def check_same_bits(rule: dict[str, Any], refiner: RefinerProcess, here: NodeRefiner) -> None:
    one, other = round_of(LAYOUT), round_of(LAYOUT)
    before = one.mean.copy()
    found = {**await run_refining(partial(refiner.refine, one), refiner), "seconds": 0}
    assert found == {**here.refine(other), "seconds": 0} and np.array_equal(one.mean, other.mean)
    assert np.array_equal(one.mean, before) == (rule["name"] == "fedlaw")
    assert refiner.moves > 0


def with_both(
    rule: dict[str, Any],
    work: Callable[[RefinerProcess, NodeRefiner], Coroutine[Any, Any, None]],
    **transfer: Any,
) -> None:
    """Do something with a refiner's process and one of this process."""
    lab = experiment(rule, **transfer)
    partition = split_of(lab).digest

    async def play() -> None:
        refiner = RefinerProcess(lab, NODE, partition=partition)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await work(refiner, NodeRefiner(lab, NODE, partition=partition))
        finally:
            refiner.close()

    asyncio.run(play())


def test_a_process_gives_the_same_bits_and_is_replaced_if_it_is_killed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rule = {"name": "feddf", "steps": 30}

    async def work(refiner: RefinerProcess, here: NodeRefiner) -> None:
        await refiner.prepare(LAYOUT, nothing)
        await check_same_bits(rule, refiner, here)
        (process,) = (each for each in psutil.Process().children() if MODULE in each.cmdline())
        assert refiner._process.channel is not None and refiner._process.channel.idle_s == 120
        process.kill()
        await check_same_bits(rule, refiner, here)
        assert not process.is_running()
        assert caplog.messages == [
            f"{NODE}'s refiner process was killed by SIGKILL: it is started again"
        ]

    with_both(rule, work)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [{"name": "fedbe"}, {"name": "fedbe", "teachers": "dirichlet"}, {"name": "fedlaw"}]
)
def test_a_process_gives_the_same_bits(rule: dict[str, Any]) -> None:
    with_both(rule, partial(check_same_bits, rule))


@pytest.mark.slow
def test_a_cancelled_call_ends_at_once_and_the_next_one_has_another_process() -> None:
    async def work(refiner: RefinerProcess, _: NodeRefiner) -> None:
        await refiner.prepare(LAYOUT, nothing)
        moved, before = asyncio.Event(), refiner.moves
        working = asyncio.create_task(
            run_refining(
                lambda: refiner.refine(round_of(LAYOUT)),
                refiner,
                report=lambda: moved.set() if refiner.moves > before else None,
            )
        )
        await moved.wait()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        with pytest.raises(RunFailed, match="was cancelled"):
            await offload(lambda: refiner.refine(round_of(LAYOUT)))
        refiner._experiment = experiment({"name": "feddf", "steps": 50})
        assert (await run_refining(lambda: refiner.refine(round_of(LAYOUT)), refiner))[
            "steps"
        ] == 50

    with_both({"name": "feddf", "steps": 1_000_000, "patience": 1_000_000}, work)


class Building:
    """A process, and its channel, that builds other frozen arrays unless it gets a file."""

    def __init__(self, refiner: RefinerProcess, layout: ModelLayout) -> None:
        self.refiner = refiner
        self.layout = layout
        self.given = list[str | None]()

    async def do(self, _: object) -> None:
        await self.refiner._begin(self)  # type: ignore[arg-type]

    async def request(self, *, frozen: str | None, **_: object) -> Mapping[str, str]:
        self.given.append(frozen)
        built = (
            replace(self.layout, frozen=FrozenForm("0" * 16, 8)) if frozen is None else self.layout
        )
        return {"layout": built.to_json()}

    async def end(self) -> None:
        """Do nothing: each `do` begins again."""


def test_a_process_that_builds_other_frozen_arrays_gets_those_of_the_run() -> None:
    layout = replace(LAYOUT, frozen=FrozenForm("1" * 16, 8))

    async def file() -> Path:
        return Path("frozen")

    async def play() -> Building:
        refiner = RefinerProcess(experiment({"name": "fedlaw"}), NODE, partition="")
        process = Building(refiner, layout)
        refiner._process = process  # type: ignore[assignment]
        await refiner.prepare(layout, file)
        return process

    assert asyncio.run(play()).given == [None, "frozen"]


class Waiting:
    """Refiner of a call that lasts until it is cancelled."""

    moves = 0

    def __init__(self, started: Callable[[], object] = lambda: None) -> None:
        self.started, self.over = started, threading.Event()
        self.calls = list[str]()

    def refine(self, models: RoundModels) -> Mapping[str, Any]:
        raise AssertionError

    def work(self) -> int:
        self.calls.append("work")
        self.started()
        self.over.wait()
        return 5

    def cancel(self) -> None:
        self.calls.append("cancel")
        self.over.set()

    def allow(self) -> None:
        self.calls.append("allow")


def test_cancelling_a_round_cancels_its_refinement() -> None:
    async def play() -> Waiting:
        started, loop = asyncio.Event(), asyncio.get_running_loop()
        refiner = Waiting(lambda: loop.call_soon_threadsafe(started.set))
        working = asyncio.create_task(run_refining(refiner.work, refiner))
        await started.wait()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        refiner.started = lambda: None
        return refiner

    refiner = asyncio.run(play())
    assert refiner.calls == ["allow", "work", "cancel"]
    assert (
        asyncio.run(run_refining(refiner.work, refiner)) == 5 and "cancel" not in refiner.calls[3:]
    )


@pytest.fixture
def without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    )
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join((str(tmp_path), str(Path(__file__).parents[1])))
    )


@pytest.mark.usefixtures("cold", "without_torch")
def test_a_node_without_torch_is_an_invalid_experiment() -> None:
    async def play() -> None:
        await RefinerProcess(experiment({"name": "fedlaw"}), NODE, partition="").prepare(
            LAYOUT, nothing
        )

    with pytest.raises(InvalidExperiment) as refused:
        asyncio.run(play())
    assert str(refused.value) == (
        "institution.aggregation.name = 'fedlaw': torch is not installed where institution-0 runs. "
        f"There: {installing('learning')}."
    )


# Labs of processes

LAB: Final = (
    "topology.institutions=2",
    "topology.devices=4",
    "rounds=2",
    "institution.rounds=2",
    "model.name='mlp_digits'",
    "training.batch_size=50",
    "training.learning_rate=0.05",
    "data.node_samples=40",
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_lab(DEMO, tmp_path_factory.mktemp("runs"), *DISTURBED)


DISTURBED: Final = (
    *LAB,
    "rounds=3",
    "transfer.idle_s=20",
    "cloud.aggregation={ name = 'feddf', steps = 100 }",
)
# in each run, bit for bit
SAME: Final = ("global_round", "accuracy", "loss", "train_loss", "sgd_steps", "missing")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lab_whose_evaluator_and_refiner_are_killed_or_stopped_ends_undisturbed(
    number: signal.Signals, undisturbed: Path, tmp_path: Path
) -> None:
    words = command("run", DEMO, "--runs", tmp_path, "--format", "json", *sets(*DISTURBED))
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            next(line for line in run.stdout if json.loads(line)["event"] == "evaluated")
            found = {
                module: process
                for process in psutil.Process(run.pid).children(recursive=True)
                for module in (MODULE, "fedstrata.cloud.evaluator_process")
                if module in process.cmdline()
            }
            assert len(found) == 2
            for process in found.values():
                process.send_signal(number)
            _, errors = run.communicate(timeout=PATIENCE_S)
        finally:
            run.terminate()
    assert run.returncode == 0, errors
    (folder,) = tmp_path.iterdir()
    log = (folder / "logs" / "cloud.log").read_text()
    how = "was killed by SIGKILL" if number is signal.SIGKILL else "made no progress for 20 s"
    for name in ("the evaluator process", "cloud's refiner process"):
        assert log.count(f"{name} {how}: it is started again") == 1, log
    rows, wanted = (
        [{key: row[key] for key in SAME} for row in table(each / "rounds.csv")]
        for each in (folder, undisturbed)
    )
    assert rows == wanted and len(rows) == 3
    assert tensors(folder) == tensors(undisturbed)
