"""Devices trained vmapped where memory runs out: in smaller groups, with the same bits."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from device.vmapped import calibration
from device.vmapped import models as vmapped_models
from device.vmapped.calibration import most_in_memory, problem_of
from device.vmapped.loop import VmappedResult
from device.vmapped.models import VmappedModels
from tests.helpers.vmapped import (
    CASES,
    Case,
    dropping,
    quick,
)

pytestmark = pytest.mark.usefixtures("one_thread")


EXHAUSTED = (
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)


def short_of_memory(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Let steps of more than `most` places run out of memory; return the sizes of those that did not."""
    errors = itertools.cycle(EXHAUSTED)
    sizes: list[int] = []
    outputs_of = VmappedModels._outputs

    def tight(state: VmappedModels, run: Any, weights: Any, buffers: Any, batch: Any) -> Any:
        made = outputs_of(state, run, weights, buffers, batch)
        if len(batch.samples) > most:
            raise next(errors)
        sizes.append(len(batch.samples))
        return made

    monkeypatch.setattr(VmappedModels, "_outputs", tight)
    return sizes


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *(("mlp", most) for most in (1, 2, 3, 4)),
        ("fedprox", 2),
        ("fedsam", 2),
        pytest.param("resnet20", 2, marks=pytest.mark.slow),
    ],
)
def test_a_group_without_memory_is_halved(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]()
    plenty = CASES[name]()
    plenty.train()
    sizes = short_of_memory(monkeypatch, most)
    case.train()
    assert max(sizes) <= most
    for mine, its in zip(case.ended, plenty.ended, strict=True):
        assert isinstance(mine, VmappedResult) and isinstance(its, VmappedResult) and mine.steps == its.steps
        np.testing.assert_allclose(case.layout.floats(mine.row), case.layout.floats(its.row), rtol=0, atol=1e-6)
        assert np.array_equal(case.layout.integers(mine.row), case.layout.integers(its.row))
        assert mine.loss == pytest.approx(its.loss, abs=1e-9)


def test_no_step_is_taken_again_where_memory_runs_out_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    case = quick()
    outputs_of, calls, samples = VmappedModels._outputs, 0, 0

    def tight(state: VmappedModels, run: Any, weights: Any, buffers: Any, batch: Any) -> Any:
        nonlocal calls, samples
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        samples += len(batch.samples)
        return outputs_of(state, run, weights, buffers, batch)

    monkeypatch.setattr(VmappedModels, "_outputs", tight)
    assert [how.steps for how in case.train()] == [4, 3, 3, 5, 4]
    assert samples == 4 + 3 + 3 + 5 + 4


@pytest.mark.parametrize("failing", [3, 4, 9, 10])  # calls: two for each step
def test_a_second_pass_without_memory_leaves_the_weights(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, plenty = CASES["fedsam"](), CASES["fedsam"]()
    plenty.train()
    outputs_of, calls = VmappedModels._outputs, 0

    def tight(state: VmappedModels, *rest: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return outputs_of(state, *rest)

    monkeypatch.setattr(VmappedModels, "_outputs", tight)
    for mine, its in zip(case.train(), plenty.ended, strict=True):
        assert isinstance(its, VmappedResult) and mine.steps == its.steps
        np.testing.assert_allclose(case.layout.floats(mine.row), case.layout.floats(its.row), rtol=0, atol=1e-6)


def test_without_memory_for_one_device_none_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    case = quick()
    short_of_memory(monkeypatch, 0)
    assert case.train() == [] and case.ended == [None] * 5
    with pytest.raises(torch.OutOfMemoryError, match="cpu has no memory for one vmapped step"):
        problem_of(case.recipe, case.turns)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_cap_makes_several_groups(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = short_of_memory(monkeypatch, most)
    case = quick()
    case.train(most)
    assert max(sizes) == most and all(isinstance(how, VmappedResult) for how in case.ended)


def test_memory_that_runs_out_after_a_draw_changes_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    plenty, case = (Case(dropping(), (1, 8, 8), dtype=torch.float32) for _ in range(2))
    plenty.train()
    step_of, calls = vmapped_models.sgd.step, 0

    def tight(batch: Any, *rest: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            batch.forward()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step_of(batch, *rest, **settings)

    monkeypatch.setattr(vmapped_models.sgd, "step", tight)
    case.train()
    assert calls > 3
    for mine, its in zip(case.ended, plenty.ended, strict=True):
        assert isinstance(mine, VmappedResult) and isinstance(its, VmappedResult)
        np.testing.assert_allclose(case.layout.floats(mine.row), case.layout.floats(its.row), rtol=0, atol=1e-6)


def test_a_cap_follows_from_what_a_few_devices_take(monkeypatch: pytest.MonkeyPatch) -> None:
    case = quick()
    assert most_in_memory(case.recipe, case.turns[0]) >= 5  # a host's memory is not asked
    gpu = SimpleNamespace(accelerator=torch.device("cuda", 0))
    monkeypatch.setattr(calibration, "_peak_bytes", lambda _, turns: 100 + 50 * len(turns))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 5000))
    assert most_in_memory(gpu, case.turns[0]) == 16  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10, 5000))
    assert most_in_memory(gpu, case.turns[0]) == 1  # type: ignore[arg-type]
