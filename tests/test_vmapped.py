"""Devices trained vmapped: equal to each one's own training, whoever leaves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedstrata.common.learning.computing import set_up
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.nets import Dropout
from fedstrata.common.settings.training import TrainingSettings
from fedstrata.device.jobs import Cancelled
from fedstrata.device.vmapped import shared_steps
from fedstrata.device.vmapped import vmapped_trainer as trainer
from fedstrata.device.vmapped.schedule import Load
from fedstrata.device.vmapped.shared_steps import VmappedResult
from fedstrata.device.vmapped.stacked_models import VmappedModels, keep_batch_norm_fp32
from fedstrata.device.vmapped.vmapped_trainer import most_in_memory
from tests.helpers.examples import slow
from tests.helpers.vmapped import (
    CASES,
    CPU,
    Case,
    dropping,
    mlp,
    needs_cuda,
    of,
    quick,
    resnet_in,
    rows_of,
)
from tests.helpers.vmapped_steps import problem_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "name", slow(CASES, but=CASES.keys() - {"fedsam, resnet20", "resnet20_preact"})
)
def test_vmapped_training_gives_what_each_gives_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]()
    states = case.states(monkeypatch)
    for k, (state, how) in enumerate(zip(states, case.ended, strict=True)):
        wanted, loss, steps = case.alone(k)
        before = torch.from_numpy(case.layout.floats(case.rows[k]).copy())
        assert (
            isinstance(how, VmappedResult)
            and how.steps == steps
            and how.loss == pytest.approx(loss, abs=1e-10)
        )
        for entry, tensor in state.items():
            torch.testing.assert_close(tensor, wanted[entry], rtol=0, atol=1e-10)
        views = case.layout.views(how.row)
        for entry, view in views.items():
            # a view is float32
            np.testing.assert_allclose(view, wanted[entry], rtol=2.0**-23, atol=1e-6)
        assert np.abs(case.layout.floats(how.row) - before.numpy()).max() > 1e-3


def test_bf16_is_near_its_own_training() -> None:
    # In smaller batches a CPU's linear layers compute in fp32 (`device.training.sgd`), but not
    # vmapped.
    training = TrainingSettings(batch_size=32, learning_rate=0.05, precision="bf16")
    case = Case(mlp(Inputs((1, 8, 8), 10)), (1, 8, 8), training=training, dtype=torch.float32)
    for k, how in enumerate(case.train()):
        wanted, loss, _ = case.alone(k)
        assert how.loss == pytest.approx(loss, rel=0.02)
        for entry, view in case.layout.views(how.row).items():
            np.testing.assert_allclose(view, wanted[entry], rtol=0, atol=5e-3)


def test_on_a_gpu_batch_norm_computes_in_fp32_beside_bf16() -> None:
    norm, training = nn.BatchNorm2d(4), TrainingSettings(batch_size=8, precision="bf16")
    module = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Flatten(), nn.Linear(144, 10))
    case = Case(module, (1, 8, 8), (Load(8, 1), Load(8, 1)), training, torch.float32)
    inputs = torch.randn(2, 8, 4, 6, 6).to(torch.bfloat16)
    wanted = norm(inputs[0].float())

    def outputs(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = norm(batch)
        return found

    keep_batch_norm_fp32(case.module, case.training, device=CPU)
    keep_batch_norm_fp32(case.module, TrainingSettings(), device=torch.device("cuda"))
    assert outputs(inputs[0]).dtype == torch.bfloat16
    keep_batch_norm_fp32(case.module, case.training, device=torch.device("cuda"))
    assert torch.equal(outputs(inputs[0]), wanted)
    assert problem_of(case.recipe, case.turns) == ""  # nor does it change the trial in float64


def test_each_reports_its_own_progress_and_ends_with_its_own_last_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_steps, "LOOK_S", 0.0)
    case = quick()
    ends: list[int] = []
    turns = [replace(turn, done=lambda _, k=k: ends.append(k)) for k, turn in enumerate(case.turns)]
    shared_steps.train(case.recipe, turns, most=100)
    totals = [4, 3, 3, 5, 4]
    assert [seen[-1] for seen in case.progress] == [(total, total) for total in totals]
    assert all(seen == sorted(seen) for seen in case.progress)
    assert [totals[k] for k in ends] == sorted(totals)


class _Clock:
    """Every step takes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        step = VmappedModels.step

        def slow(*args: Any) -> None:
            self.now += 1.0
            step(*args)

        monkeypatch.setattr(VmappedModels, "step", slow)
        monkeypatch.setattr(shared_steps.time, "monotonic", lambda: self.now)


@pytest.mark.parametrize("look_s", [0.0, 3.0, 100.0])
def test_a_steps_time_is_shared_among_those_who_take_it(
    monkeypatch: pytest.MonkeyPatch, look_s: float
) -> None:
    monkeypatch.setattr(shared_steps, "LOOK_S", look_s)
    _Clock(monkeypatch)
    case = quick()
    outcomes = case.train()
    # Steps 1 to 3 have five devices, step 4 three of them, step 5 one.
    wanted = [3 / 5 + 1 / 3, 3 / 5, 3 / 5, 3 / 5 + 1 / 3 + 1, 3 / 5 + 1 / 3]
    assert [how.train_s for how in outcomes] == pytest.approx(wanted)
    assert sum(how.train_s for how in outcomes) == pytest.approx(5)
    assert max(how.wall_s for how in outcomes) == 5
    if look_s == 0.0:
        assert [how.wall_s for how in outcomes] == [4, 3, 3, 5, 4]


@pytest.mark.parametrize("leaving", [{0}, {3}, {1, 4}, {0, 1, 2, 3, 4}])
def test_who_is_called_off_leaves_at_the_next_step_and_the_others_never_see_it(
    leaving: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = quick()
    undisturbed.train()
    case, steps = quick(), 0
    step = VmappedModels.step

    def counted(*args: Any) -> None:
        nonlocal steps
        steps += 1
        step(*args)
        if steps == 2:
            for k in leaving:
                case.cancelled[k].set()

    monkeypatch.setattr(VmappedModels, "step", counted)
    case.train()
    for k, (mine, its) in enumerate(zip(rows_of(case), rows_of(undisturbed), strict=True)):
        assert mine == (None if k in leaving else its)
        assert isinstance(case.ended[k], Cancelled if k in leaving else VmappedResult)
    assert steps == {5: 2, 1: 4 if leaving == {3} else 5, 2: 5}[len(leaving)]


def test_the_leavers_time_goes_to_those_who_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    _Clock(monkeypatch)
    case = quick()
    case.cancelled[0].set()
    assert sum(how.train_s for how in case.train()) == pytest.approx(5)
    assert isinstance(case.ended[0], Cancelled) and not case.progress[0][1:]


# Where memory runs out: in smaller groups, with the same bits

EXHAUSTED = (
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)


def short_of_memory(
    monkeypatch: pytest.MonkeyPatch, fails: Callable[[int, int], bool]
) -> list[int]:
    """Let passes run out of memory by their number, from 1, and their places; return the places of
    the others.
    """
    errors, numbers, sizes = itertools.cycle(EXHAUSTED), itertools.count(1), list[int]()
    outputs_of = VmappedModels._outputs

    def tight(state: VmappedModels, run: Any, weights: Any, buffers: Any, batch: Any) -> Any:
        made = outputs_of(state, run, weights, buffers, batch)
        if fails(next(numbers), len(batch.samples)):
            raise next(errors)
        sizes.append(len(batch.samples))
        return made

    monkeypatch.setattr(VmappedModels, "_outputs", tight)
    return sizes


def assert_alike(case: Case, plenty: Case) -> None:
    for mine, its in zip(case.ended, plenty.ended, strict=True):
        assert (
            isinstance(mine, VmappedResult)
            and isinstance(its, VmappedResult)
            and mine.steps == its.steps
        )
        np.testing.assert_allclose(
            case.layout.floats(mine.row), case.layout.floats(its.row), rtol=0, atol=1e-6
        )
        assert np.array_equal(case.layout.integers(mine.row), case.layout.integers(its.row))
        assert mine.loss == pytest.approx(
            its.loss, abs=1e-6 if case.dtype == torch.float32 else 1e-9
        )


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *(("mlp", most) for most in (1, 2, 3, 4)),
        ("fedprox", 2),
        ("fedsam", 2),
        pytest.param("resnet20", 2, marks=pytest.mark.slow),
    ],
)
def test_a_group_without_memory_is_halved(
    name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, plenty = CASES[name](), CASES[name]()
    plenty.train()
    sizes = short_of_memory(monkeypatch, lambda _, places: places > most)
    case.train()
    assert max(sizes) <= most
    assert_alike(case, plenty)


def test_no_step_is_taken_again_where_memory_runs_out_half_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, sizes = quick(), short_of_memory(monkeypatch, lambda number, _: number == 3)
    assert [how.steps for how in case.train()] == [4, 3, 3, 5, 4]
    assert sum(sizes) == 4 + 3 + 3 + 5 + 4


@pytest.mark.parametrize("failing", [3, 4, 9, 10])  # passes: two for each step
def test_a_second_pass_without_memory_leaves_the_weights(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, plenty = CASES["fedsam"](), CASES["fedsam"]()
    plenty.train()
    short_of_memory(monkeypatch, lambda number, _: number == failing)
    case.train()
    assert_alike(case, plenty)


def test_without_memory_for_one_device_none_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    case = quick()
    short_of_memory(monkeypatch, lambda _, places: places > 0)
    assert case.train() == [] and case.ended == [None] * 5
    with pytest.raises(torch.OutOfMemoryError, match="cpu has no memory for one vmapped step"):
        problem_of(case.recipe, case.turns)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_cap_makes_several_groups(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, sizes = quick(), short_of_memory(monkeypatch, lambda *_: False)
    case.train(most)
    assert max(sizes) == most and all(isinstance(how, VmappedResult) for how in case.ended)


def test_memory_that_runs_out_after_a_draw_changes_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    plenty, case = (Case(dropping(), (1, 8, 8), dtype=torch.float32) for _ in range(2))
    plenty.train()
    sizes = short_of_memory(monkeypatch, lambda number, _: number == 3)
    case.train()
    assert len(sizes) > 2
    assert_alike(case, plenty)


def test_a_cap_follows_from_what_a_few_devices_take(monkeypatch: pytest.MonkeyPatch) -> None:
    case = quick()
    assert most_in_memory(case.recipe, case.turns[0]) >= 5  # a host's memory is not asked
    gpu = SimpleNamespace(accelerator=torch.device("cuda", 0))
    monkeypatch.setattr(trainer, "_peak_bytes", lambda _, turns: 100 + 50 * len(turns))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 200)
    for share, most in ((1000, 16), (210, 1), (0, 1)):
        memory = SimpleNamespace(share_bytes=lambda share=share: share)
        monkeypatch.setattr(trainer, "memory_of", lambda _, memory=memory: memory)
        assert most_in_memory(gpu, case.turns[0]) == most  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cpu") for name in ("char_lstm", "dropout")),  # the test itself
        *(pytest.param(name, "cuda:0", marks=[pytest.mark.gpu, needs_cuda]) for name in CASES),
    ],
)
def test_on_a_gpu_as_alone_on_the_cpu(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]()
    case = replace(case, module=case.module.float(), device=torch.device(device))
    # A GPU's generator draws other masks from a seed than the CPU's.
    drops = any(isinstance(layer, Dropout) for layer in case.module.modules())
    for k, state in enumerate(case.states(monkeypatch)):
        wanted, loss, _ = case.alone(k, on=case.device if drops else CPU)
        for entry, tensor in state.items():
            torch.testing.assert_close(tensor.cpu(), wanted[entry].cpu(), rtol=0, atol=1e-8)
        how = case.ended[k]
        assert isinstance(how, VmappedResult) and how.loss == pytest.approx(loss, abs=1e-8)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_is_left_as_it_was_and_trains_lenet_vmapped(precision: str) -> None:
    training = TrainingSettings.model_validate({"batch_size": 10, "precision": precision})
    module, where = of("lenet5", (1, 28, 28)), torch.device("cuda", 0)
    case = Case(module, (1, 28, 28), (Load(40, 2),) * 40, training, torch.float32, where)
    recipe, turns = case.recipe, case.turns
    assert problem_of(recipe, turns) == ""
    assert most_in_memory(recipe, turns[0]) >= 40
    before = torch.cuda.memory_allocated()
    shared_steps.train(recipe, turns, most=40)
    assert all(isinstance(how, VmappedResult) for how in case.ended)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_gpu_has_kernels_for_vmapped_batch_norm(precision: str) -> None:
    case = resnet_in(precision, torch.device("cuda", 0))
    keep_batch_norm_fp32(case.module, case.training, device=case.device)
    set_up(case.device, case.training)
    assert "Error" not in problem_of(case.recipe, case.turns)


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_that_runs_out_of_memory_halves_the_group() -> None:
    """The process may have some 400 MB, of which 64 models of 2.3 MB, three times each, are too
    much.
    """
    training, where = TrainingSettings(batch_size=4), torch.device("cuda", 0)
    case = Case(
        of("cnn_fedavg", (1, 28, 28)),
        (1, 28, 28),
        (Load(8, 1),) * 64,
        training,
        torch.float32,
        where,
    )
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(where).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, 4e8 / total), where)
    try:
        shared_steps.train(case.recipe, case.turns, most=64)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, where)
    assert all(isinstance(how, VmappedResult) and how.steps == 2 for how in case.ended)
