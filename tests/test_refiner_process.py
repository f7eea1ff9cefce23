"""A node's refiner in a process of its own: the same bits as in this one, its end, and a node without torch."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pytest

from common.errors import InvalidExperiment, NoProgress, RunFailed
from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.host.blocking_channel import BlockingChannel
from common.learning import models
from common.learning.inputs import Inputs
from common.learning.refiner import NodeRefiner
from common.learning.splits import split_of
from common.model.layout import ModelLayout
from common.model.refinement import RoundModels
from common.runtime.refining import MODULE, RefinerProcess, run_refining
from tests.helpers.commands import DEMO, PATIENCE_S, command, run_lab, sets, tensors

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


def round_of(layout: ModelLayout) -> RoundModels:
    rows = np.zeros((5, layout.row_bytes), np.uint8)
    layout.floats(rows)[:] = np.random.default_rng(1).normal(scale=0.1, size=(5, layout.columns))
    layout.floats(rows)[0] = layout.floats(rows)[2:].mean(axis=0)
    return RoundModels(3, layout, rows[0], rows[1], list(rows[2:]), np.array([0.5, 0.25, 0.25]))


def check_same_bits(rule: dict[str, Any], refiner: RefinerProcess, here: NodeRefiner) -> None:
    one, other = round_of(LAYOUT), round_of(LAYOUT)
    before = one.mean.copy()
    found, wanted = ({**each.refine(these), "seconds": 0} for each, these in ((refiner, one), (here, other)))
    assert found == wanted and np.array_equal(one.mean, other.mean)
    assert np.array_equal(one.mean, before) == (rule["name"] == "fedlaw")
    assert refiner.moves > 0


def both(rule: dict[str, Any]) -> tuple[RefinerProcess, NodeRefiner]:
    lab = experiment(rule)
    partition = split_of(lab).digest
    return RefinerProcess(lab, NODE, partition=partition), NodeRefiner(lab, NODE, partition=partition)


def test_a_process_gives_the_same_bits_and_its_end_is_one_line() -> None:
    rule = {"name": "feddf", "steps": 100}
    refiner, here = both(rule)
    try:
        refiner.prepare()
        check_same_bits(rule, refiner, here)
        (process,) = (each for each in psutil.Process().children() if MODULE in each.cmdline())
        process.kill()
        with pytest.raises(RunFailed, match=rf"^{NODE}'s refiner process was killed by SIGKILL$"):
            refiner.refine(round_of(LAYOUT))
        assert not process.is_running()
    finally:
        refiner.close()


@pytest.mark.slow
@pytest.mark.parametrize("rule", [{"name": "fedbe"}, {"name": "fedbe", "teachers": "dirichlet"}, {"name": "fedlaw"}])
def test_a_process_gives_the_same_bits(rule: dict[str, Any]) -> None:
    refiner, here = both(rule)
    try:
        check_same_bits(rule, refiner, here)
    finally:
        refiner.close()


@pytest.mark.slow
def test_a_cancelled_call_ends_at_once_and_the_next_one_has_another_process() -> None:
    rule = {"name": "feddf", "steps": 1_000_000, "patience": 1_000_000}
    refiner, _ = both(rule)
    quick, _ = both({"name": "feddf", "steps": 50})
    refiner.prepare()

    async def play() -> None:
        moved = asyncio.Event()
        before = refiner.moves
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
            refiner.refine(round_of(LAYOUT))
        refiner._experiment = quick._experiment
        assert (await run_refining(lambda: refiner.refine(round_of(LAYOUT)), refiner))["steps"] == 50

    try:
        asyncio.run(asyncio.wait_for(play(), PATIENCE_S))
    finally:
        refiner.close()


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
    assert asyncio.run(run_refining(refiner.work, refiner)) == 5 and "cancel" not in refiner.calls[3:]


def test_a_silent_process_is_given_up() -> None:
    channel = BlockingChannel(MODULE, "the process", patience_s=0.1)  # which waits for a request
    try:
        with pytest.raises(NoProgress, match=r"^the process made no progress for 0\.1 s$") as given_up:
            channel.receive()
        assert given_up.value.exit_code == 5
    finally:
        channel.close()


@pytest.fixture
def without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(Path(__file__).parents[1]))))


@pytest.mark.usefixtures("without_torch")
def test_a_node_without_torch_is_an_invalid_experiment() -> None:
    refiner = RefinerProcess(experiment({"name": "fedlaw"}), NODE, partition="")
    with pytest.raises(InvalidExperiment) as refused:
        refiner.prepare()
    assert str(refused.value) == (
        "institution.aggregation.name = 'fedlaw': torch is not installed where institution-0 runs. "
        "Install fedstrata[learning] there."
    )


# Labs of processes

LAB: Final = (
    "topology.institutions=2", "topology.devices=4", "rounds=2", "institution.rounds=2", "model.name='mlp_digits'",
    "training.batch_size=50", "training.learning_rate=0.05", "data.node_samples=40",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("cloud", "institution"), [("fedlaw", "feddf"), ("feddf", "fedbe")])
def test_a_lab_of_processes_gives_the_model_of_one_process(cloud: str, institution: str, tmp_path: Path) -> None:
    rules = (f"cloud.aggregation.name={cloud!r}", f"institution.aggregation.name={institution!r}")
    direct = run_lab(DEMO, tmp_path / "direct", *LAB, *rules, flags=["--direct"])
    real = run_lab(DEMO, tmp_path / "real", *LAB, *rules)
    assert tensors(real) == tensors(direct)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["cloud", "institution"])
def test_a_killed_refiner_ends_the_run_with_one_line(tier: str, tmp_path: Path) -> None:
    rule = f"{tier}.aggregation={{ name = 'feddf', steps = 1000000, patience = 1000000 }}"
    words = command("run", DEMO, "--runs", tmp_path, *sets(*LAB, rule))
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        try:
            refiner = working_refiner(psutil.Process(run.pid))
            refiner.kill()
            _, errors = run.communicate(timeout=PATIENCE_S)
        finally:
            run.terminate()
    (line,) = (line for line in errors.splitlines() if line.startswith("fedstrata: "))
    assert run.returncode == 1 and line.strip().endswith("'s refiner process was killed by SIGKILL"), errors
    assert "Traceback" not in errors


def working_refiner(run: psutil.Process) -> psutil.Process:
    """Return a refiner's process that has computed for a second beyond its start."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for each in run.children(recursive=True):
            try:
                if MODULE in each.cmdline() and each.cpu_times().user > 8:
                    return each
            except psutil.Error:
                pass  # it has just ended
        time.sleep(0.1)
    raise AssertionError("no refiner computes")
