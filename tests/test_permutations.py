"""The groups of neurons: permuted, a model computes the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from common.learning import models
from common.learning.inputs import Inputs
from common.model.permutations import groups_of, permute
from tests.test_models import SIZES

# The number of groups: layers but the last; of residual nets one for each stage, and the inner ones of their blocks.
GROUPS = {
    "mlp_digits": 1, "cnn_digits": 2, "lenet5": 4, "lenet_cifar": 4, "cnn_femnist": 3, "resnet20": 9, "resnet20_b": 12,
    "resnet20_preact": 16, "resnet18_cifar": 12, "vgg16_bn": 15, "char_lstm": 2, "sent_lstm": 3,
}  # fmt: skip


def batch_of(inputs: Inputs, size: int) -> Tensor:
    draw, shape = torch.Generator().manual_seed(1), (size, *inputs.shape)
    return (
        torch.randint(0, inputs.tokens, shape, generator=draw) if inputs.tokens else torch.rand(shape, generator=draw)
    )


def built(name: str, seed: int, inputs: Inputs, *, projection: int = 0) -> nn.Module:
    """Return a model whose batch norms have seen samples, in eval mode."""
    module = models.build(name, seed, inputs=inputs, projection=projection)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0
    with torch.no_grad():
        module.train()(batch_of(inputs, 4))
    return module.eval()


@pytest.mark.parametrize("projection", [0, 16])
@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        pytest.param(name, inputs, marks=[pytest.mark.slow] if name.startswith(("vgg", "resnet18")) else [])
        for name, inputs in {name: inputs for name, inputs, *_ in SIZES if name != "vgg16"}.items()
    ],
)
def test_a_permuted_model_computes_the_same(name: str, inputs: Inputs, projection: int) -> None:
    draw = np.random.default_rng(1)
    module = built(name, 1, inputs, projection=projection)
    layout = models.layout_of(module)
    row = layout.empty()
    models.write_row(module, layout, row)
    batch = batch_of(inputs, 4)
    with torch.no_grad():
        wanted = module(batch)
    groups, before = groups_of(layout), row.copy()
    if name in GROUPS:
        assert len(groups) == GROUPS[name] + (2 if projection else 0)
    for group in groups:
        permute(layout, row, group, draw.permutation(group.size))
    models.read_row(module, layout, row)
    with torch.no_grad():
        torch.testing.assert_close(module(batch), wanted, rtol=1e-3, atol=1e-4)
    assert not np.array_equal(row, before) and float(wanted.std(0).max()) > 1e-4  # the inputs matter
