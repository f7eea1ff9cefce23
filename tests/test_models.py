"""Models: their shapes, their initial weights, and the way of their state into a row and back."""

from __future__ import annotations

import concurrent.futures

import numpy as np
import pytest
import torch
from torch import nn

from common.errors import InvalidExperiment
from common.layout import ModelLayout, Row, Section
from common.learning import models

SHAPES = {
    "lenet5": (1, 28, 28),
    "mlp_digits": (1, 8, 8),
    "cnn_digits": (1, 8, 8),
    "resnet18_cifar": (3, 32, 32),
}


def row_of(module: nn.Module) -> tuple[ModelLayout, Row]:
    layout = models.layout_of(module)
    row = layout.empty()
    models.write_row(module, layout, row)
    return layout, row


@pytest.mark.parametrize("name", SHAPES)
def test_entries_come_back_in_torchs_order(name: str) -> None:
    module = models.build(name, 1)
    assert [entry.name for entry in models.layout_of(module).in_state_order] == list(module.state_dict())


@pytest.mark.parametrize(
    ("name", "parameters", "entries", "row_bytes"),
    [
        ("lenet5", 61_706, 10, 246_824),
        ("mlp_digits", 2_410, 4, 9_640),
        ("cnn_digits", 9_930, 6, 39_720),
        ("resnet18_cifar", 11_173_962, 122, 44_734_408),
    ],
)
def test_size(name: str, parameters: int, entries: int, row_bytes: int) -> None:
    layout = models.layout_of(models.build(name, 1))
    assert (layout.parameters, len(layout.entries), layout.row_bytes) == (parameters, entries, row_bytes)


@pytest.mark.parametrize("name", SHAPES)
def test_gives_ten_logits(name: str) -> None:
    assert models.build(name, 1)(torch.zeros(2, *SHAPES[name])).shape == (2, 10)


def test_every_model_states_the_images_it_takes() -> None:
    for name, shape in SHAPES.items():
        models.check_images(name, shape)
    with pytest.raises(InvalidExperiment, match=r"lenet5.*\[1, 28, 28\].*\[1, 8, 8\].*mlp_digits or cnn_digits"):
        models.check_images("lenet5", (1, 8, 8))
    with pytest.raises(InvalidExperiment, match="no such model"):
        models.build("vgg", 1)


def test_initial_weights_come_from_the_seed_alone() -> None:
    _, first = row_of(models.build("lenet5", 7))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    _, second = row_of(models.build("lenet5", 7))
    assert torch.equal(torch.get_rng_state(), before), "the process-global generator was used"
    assert np.array_equal(first, second)
    assert not np.array_equal(first, row_of(models.build("lenet5", 8))[1])


def test_concurrent_builds_are_alike() -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        rows = [row[1] for row in pool.map(row_of, pool.map(models.build, ["cnn_digits"] * 8, [3] * 8))]
    assert all(np.array_equal(row, rows[0]) for row in rows)


@pytest.mark.parametrize("layer", ["conv1", "fc1"])
def test_weights_are_uniform_within_the_bound_of_their_inputs(layer: str) -> None:
    module = models.build("lenet5", 1).get_submodule(layer)
    for tensor in (module.weight, module.bias):
        assert isinstance(tensor, torch.Tensor)
        bound = {"conv1": 25, "fc1": 120}[layer] ** -0.5
        assert 0.5 * bound < tensor.abs().max() <= bound


def test_batch_norm_lies_in_its_sections() -> None:
    layout = models.layout_of(models.build("resnet18_cifar", 1))
    sections = {entry.name: entry.section for entry in layout.entries}
    assert [sections[f"bn1.{name}"] for name in ("weight", "bias")] == [Section.PARAMETER] * 2
    assert [sections[f"bn1.{name}"] for name in ("running_mean", "running_var")] == [Section.BUFFER] * 2
    assert sections["bn1.num_batches_tracked"] is Section.COUNTER
    assert (layout.columns - layout.parameters, layout.counters) == (9_600, 20)


def test_batch_norm_starts_neutral() -> None:
    state = models.build("resnet18_cifar", 1).state_dict()
    assert (state["bn1.weight"] == 1).all() and (state["bn1.running_var"] == 1).all()
    assert not state["bn1.bias"].any() and not state["bn1.running_mean"].any()
    assert state["bn1.num_batches_tracked"] == 0


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_state_survives_the_row(memory_format: torch.memory_format) -> None:
    source = models.build("resnet18_cifar", 1).to(memory_format=memory_format)
    source(torch.rand(2, 3, 32, 32))  # moves the running statistics and the counters
    layout, row = row_of(source)
    row.flags.writeable = False
    target = models.build("resnet18_cifar", 2)
    models.read_row(target, layout, row)
    wanted = source.state_dict()
    assert wanted["bn1.num_batches_tracked"] == 1
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name


def test_a_row_may_lie_anywhere_in_memory() -> None:
    module = models.build("cnn_digits", 1)
    layout, row = row_of(module)
    odd = np.empty(layout.row_bytes + 1, np.uint8)[1:]
    odd[:] = row
    other = models.build("cnn_digits", 2)
    models.read_row(other, layout, odd)
    assert np.array_equal(row_of(other)[1], row)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(InvalidExperiment, match="float64"):
        models.layout_of(nn.Linear(2, 2, dtype=torch.float64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_rows_of_a_module_on_a_gpu() -> None:
    layout, row = row_of(models.build("cnn_digits", 1))
    module = models.build("cnn_digits", 2).to("cuda")
    models.read_row(module, layout, row)
    assert np.array_equal(row_of(module)[1], row)
