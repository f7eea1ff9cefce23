"""Where the cloud evaluates: the accelerator that is chosen, its lack of memory, and what a run records."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import AcceleratorLost, InvalidExperiment
from common.experiment.reading import parse
from common.learning import evaluation
from common.learning.evaluation import ModelTester, accelerator_of
from tests.helpers.commands import invoke

GPUS = ["cpu", "cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("name", "there", "beside", "chosen"),
    [
        ("cpu", GPUS, "cuda:1", "cpu"),
        ("auto", ["cpu"], "cpu", "cpu"),
        ("auto", GPUS, "cpu", "cuda:0"),
        ("auto", GPUS, "cuda:1", "cuda:1"),
        ("cuda", GPUS, "cuda:1", "cuda:1"),
        ("cuda", GPUS, "cpu", "cuda:0"),
        ("cuda:1", GPUS, "cuda:0", "cuda:1"),
    ],
)
def test_models_are_evaluated_beside_their_training_if_the_key_allows_it(
    name: str, there: list[str], beside: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "accelerators", lambda: there)
    lab = parse({"evaluation": {"accelerator": name}})
    assert accelerator_of(lab, beside=torch.device(beside)) == torch.device(chosen)


def test_a_missing_gpu_is_named_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "accelerators", lambda: GPUS)
    named = r"^evaluation\.accelerator = 'cuda:2': this machine has no .* or use auto"
    with pytest.raises(InvalidExperiment, match=named):
        accelerator_of(parse({"evaluation": {"accelerator": "cuda:2"}}))


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, fails: Exception) -> tuple[ModelTester, list[str]]:
    """Return a tester on a GPU that fails as soon as the module arrives there, and where the module has been."""
    tester = ModelTester(parse({}), accelerator=torch.device("cuda", 0))
    places: list[str] = []

    def to(device: torch.device) -> None:
        places.append(str(device))
        if device.type == "cuda":
            raise fails

    monkeypatch.setattr(tester._module, "to", to)
    monkeypatch.setattr(evaluation, "set_up_evaluation", lambda device: places.append("set up"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: places.append("freed"))
    return tester, places


def test_without_memory_on_the_gpu_the_cpu_evaluates(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tester, places = on_a_gpu(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    with caplog.at_level(logging.WARNING):
        found = tester.evaluate(tester.first)
    assert found == ModelTester(parse({})).evaluate(tester.first)
    assert places == ["set up", "cuda:0", "cpu", "freed"]
    assert caplog.messages == ["cuda:0 has not enough free memory: evaluated on the CPU"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("CUDA error: an illegal memory access was encountered", AcceleratorLost),  # the process is replaced
        ("CUDA error: invalid argument", RuntimeError),
    ],
)
def test_another_failure_of_the_gpu_is_an_error(
    text: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    tester, places = on_a_gpu(monkeypatch, RuntimeError(text))
    with pytest.raises(error, match=f"^{text}"):
        tester.evaluate(tester.first)
    assert places[-1] == "freed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_run_records_where_it_was_evaluated(tmp_path: Path) -> None:
    few = ["--set", "rounds=1", "--set", "topology.institutions=1", "--set", "topology.devices=1"]
    command = ["run", "demo", "--direct", *few, "--runs", str(tmp_path), "--set"]
    refused = invoke(*command, "evaluation.accelerator=cuda")
    assert refused.exit_code == 4
    assert "evaluation.accelerator = 'cuda': this machine has no such accelerator. It has cpu" in refused.stderr
    assert invoke(*command, "evaluation.accelerator=auto").exit_code == 0
    (manifest,) = tmp_path.glob("*/manifest.json")
    assert json.loads(manifest.read_text())["evaluated_on"] == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("model", ["cnn_digits", "resnet20"])
def test_on_a_gpu_evaluation_is_near_to_the_cpus_and_leaves_no_memory_behind(model: str) -> None:
    data: dict[str, Any] = {"dataset": "synthetic", "classes": 10, "image_shape": [1, 28, 28], "test_samples": 1200}
    lab = parse({"data": data if model == "resnet20" else {}, "model": {"name": model}})
    here, there = ModelTester(lab), ModelTester(lab, accelerator=torch.device("cuda", 0))
    assert np.array_equal(here.first, there.first)
    wanted = here.evaluate(here.first)
    there.evaluate(there.first)
    before = torch.cuda.memory_allocated()
    found = there.evaluate(there.first)
    assert torch.cuda.memory_allocated() == before
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5) and found.score == pytest.approx(wanted.score, abs=0.005)
