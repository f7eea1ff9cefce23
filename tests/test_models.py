"""Models: their shapes, their initial weights, the way of their state into a row and back, and
their neurons.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import sys

import numpy as np
import pytest
import torch
from torch import nn

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.learning import models
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.nets import ARCHITECTURES, Dropout, draw_vgg16, own_dropout, reseed
from fedstrata.common.methods.baselines.permutations import groups_of, permute
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.settings.data import MODELS

DIGITS, GREY, COLOUR = Inputs((1, 8, 8), 10), Inputs((1, 28, 28), 10), Inputs((3, 32, 32), 10)
FEMNIST = Inputs((1, 28, 28), 62)


def colour(classes: int) -> Inputs:
    return Inputs((3, 32, 32), classes)


USUAL = {"mlp_digits": DIGITS, "cnn_digits": DIGITS, "lenet5": GREY, "resnet18_cifar": COLOUR}


def built(name: str, seed: int) -> nn.Module:
    return models.build(name, seed, inputs=USUAL[name])


def row_of(module: nn.Module) -> tuple[ModelLayout, Row]:
    layout = models.layout_of(module)
    row = layout.empty()
    models.write_row(module, layout, row)
    return layout, row


@pytest.mark.parametrize("name", USUAL)
def test_entries_come_back_in_torchs_order(name: str) -> None:
    module = built(name, 1)
    assert [entry.name for entry in models.layout_of(module).in_state_order] == list(
        module.state_dict()
    )


SIZES = [
    ("linear_digits", DIGITS, 650, 2, 2_600),
    ("mlp_digits", DIGITS, 2_410, 4, 9_640),
    ("cnn_digits", DIGITS, 9_930, 6, 39_720),
    ("lenet5", GREY, 61_706, 10, 246_824),
    ("lenet_cifar", colour(10), 62_006, 10, 248_024),
    ("lenet_cifar", colour(20), 62_856, 10, 251_424),
    ("lenet_cifar", colour(100), 69_656, 10, 278_624),
    ("cnn_femnist", FEMNIST, 160_510, 8, 642_040),
    ("cnn_motions", Inputs((6, 1, 128), 7), 62_247, 8, 248_988),
    ("cnn_fedavg", GREY, 582_026, 8, 2_328_104),
    ("cnn_fedavg", FEMNIST, 608_702, 8, 2_434_808),
    ("cnn_fedavg", colour(10), 878_538, 8, 3_514_152),
    ("cnn_fedavg_padded", GREY, 1_663_370, 8, 6_653_480),
    ("cnn_fedavg_padded", colour(10), 2_156_490, 8, 8_625_960),
    ("resnet20", colour(10), 269_722, 116, 1_084_544),
    ("resnet20_b", colour(10), 272_474, 128, 1_096_336),
    ("resnet20_preact", colour(10), 219_482, 119, None),
    ("resnet20_preact", colour(20), 222_052, 119, None),
    ("resnet20_preact", FEMNIST, 232_558, 119, None),
    ("resnet18_cifar", colour(10), 11_173_962, 122, 44_734_408),
    ("resnet18_cifar", colour(100), 11_220_132, 122, None),
    ("vgg16_bn", colour(10), 33_646_666, 97, None),
    ("vgg16_bn", colour(20), 33_687_636, 97, None),
    ("vgg16_bn", colour(100), 34_015_396, 97, None),
    ("vgg16", colour(10), 134_301_514, 32, 537_206_056),
    ("vgg16", Inputs((3, 224, 224), 1000), 138_357_544, 32, 553_430_176),
    ("vgg_femnist", FEMNIST, 8_024_958, 14, 32_099_832),
    ("char_lstm", Inputs((80,), 80, tokens=80), 819_920, 11, 3_279_680),
    ("sent_lstm", Inputs((25,), 2, tokens=401), 40_100 + 174_786, 13, 859_544),
]
SMALL = {name: inputs for name, inputs, *_ in SIZES if name != "vgg16"}


@pytest.mark.parametrize(("name", "inputs", "parameters", "entries", "row_bytes"), SIZES)
def test_size(
    name: str, inputs: Inputs, parameters: int, entries: int, row_bytes: int | None
) -> None:
    with torch.device("meta"):
        module = ARCHITECTURES[name](inputs)
    layout = models.layout_of(module)
    assert (layout.parameters, len(layout.entries)) == (parameters, entries)
    assert layout.row_bytes == (row_bytes or 4 * layout.columns + 8 * layout.counters)


def test_every_name_of_the_experiment_is_a_model() -> None:
    assert set(ARCHITECTURES) == set(MODELS) == {name for name, *_ in SIZES}


@pytest.mark.parametrize(("name", "inputs"), SMALL.items())
def test_gives_logits_from_weights_that_the_seed_gives(name: str, inputs: Inputs) -> None:
    module = models.build(name, 1, inputs=inputs).eval()
    logits = module(models.random_samples(inputs, 2))
    assert logits.shape == (2, inputs.classes) and logits.isfinite().all()
    assert all(tensor.isfinite().all() for tensor in module.state_dict().values())


def test_a_model_is_built_without_sympy(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's one way to sympy
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)
    models.build("cnn_digits", 1, inputs=Inputs((1, 8, 8), 10))


def test_existing_models_keep_their_first_weights() -> None:
    digests = {
        name: hashlib.blake2b(row_of(built(name, 1))[1], digest_size=8).hexdigest()
        for name in USUAL
    }
    assert digests == {
        "mlp_digits": "11dd196a5641b345",
        "cnn_digits": "208d5a4ad203e8ae",
        "lenet5": "d4913dfc0fff4eb0",
        "resnet18_cifar": "8740034339e1e767",
    }


def test_a_model_that_does_not_take_the_data() -> None:
    with pytest.raises(
        InvalidExperiment, match=r"lenet5.*images of \[1, 8, 8\].*mlp_digits or cnn_digits"
    ):
        models.build("lenet5", 1, inputs=DIGITS)
    with pytest.raises(
        InvalidExperiment, match=r"lenet5.*rows of 80 tokens.*char_lstm or sent_lstm"
    ):
        models.build("lenet5", 1, inputs=Inputs((80,), 80, tokens=80))
    with pytest.raises(InvalidExperiment, match=r"char_lstm.*cnn_fedavg"):
        models.build("char_lstm", 1, inputs=COLOUR)


@pytest.mark.slow
def test_vgg16_has_the_entries_of_torchvision() -> None:
    from torchvision.models import vgg16

    with torch.device("meta"):
        ours, theirs = ARCHITECTURES["vgg16"](Inputs((3, 224, 224), 1000)), vgg16()
    shapes = {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    assert {name: tensor.shape for name, tensor in ours.state_dict().items()} == shapes


def test_vgg16_is_drawn_as_torchvision_draws() -> None:
    module = nn.Sequential(nn.Conv2d(8, 32, 3), nn.Linear(500, 40))
    draw_vgg16(module, torch.Generator().manual_seed(1))
    assert module[0].weight.std().item() == pytest.approx((2 / (9 * 32)) ** 0.5, rel=0.05)
    assert module[1].weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert not module[0].bias.any() and not module[1].bias.any()


def test_the_preactivation_net_keeps_a_batch_norm_that_is_never_called() -> None:
    module = models.build("resnet20_preact", 1, inputs=COLOUR)
    module(torch.rand(2, 3, 32, 32))
    state = module.state_dict()
    assert state["layer1.0.bn1.num_batches_tracked"] == 1 and state["bn.num_batches_tracked"] == 0
    for name in ("bn", "layer3.1.bn2"):
        assert (state[f"{name}.weight"] == 0.5).all() and not state[f"{name}.bias"].any()
    drawn = state["layer3.0.conv2.weight"]
    assert drawn.std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)


def test_shortcut_a_has_no_parameter_and_passes_the_image_through() -> None:
    module = models.build("resnet20", 1, inputs=COLOUR)
    block = module.get_submodule("stage2.0")
    x = torch.rand(1, 16, 32, 32)
    passed = block.get_submodule("shortcut")(x)
    assert not list(block.get_submodule("shortcut").parameters())
    assert (
        torch.equal(passed[:, 8:24], x[:, :, ::2, ::2])
        and not passed[:, :8].any()
        and not passed[:, 24:].any()
    )


def test_recurrent_nets_read_the_last_step_of_both_layers() -> None:
    module = models.build("char_lstm", 1, inputs=Inputs((80,), 80, tokens=80))
    rows = torch.randint(0, 80, (2, 12), generator=torch.Generator().manual_seed(1))
    other = rows.clone()
    other[0, 0] = (other[0, 0] + 1) % 80
    with torch.no_grad():
        assert not torch.equal(module(rows)[0], module(other)[0]) and torch.allclose(
            module(rows)[1], module(other)[1]
        )


def test_dropout_draws_from_its_own_generator() -> None:
    module = nn.Sequential(nn.Dropout(0.25), nn.Linear(1000, 1))
    own_dropout(module)
    x = torch.ones(4, 1000)
    before = torch.get_rng_state()
    outs = []
    for seed in (1, 1, 2):
        reseed(module, seed, torch.device("cpu"))
        outs.append(module[0](x))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert outs[0].unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert abs(outs[0].mean().item() - 1) < 0.05
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(module.eval()[0](x), x)


@pytest.mark.parametrize("whole", [False, True])
def test_dropout_does_not_depend_on_the_memory_format(whole: bool) -> None:
    drop = Dropout(whole=whole)
    rows = torch.ones(2, 3, 4, 5)
    outs = []
    for x in (rows, rows.to(memory_format=torch.channels_last)):
        reseed(drop, 1, torch.device("cpu"))
        outs.append(drop(x))
    assert torch.equal(*outs) and outs[1].is_contiguous(memory_format=torch.channels_last)


def test_one_tensor_under_two_names_has_one_place() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    layout = models.layout_of(module)
    assert [entry.name for entry in layout.entries] == ["0.weight", "0.bias", "1.bias"]
    row = np.arange(8, dtype=np.float32).view(np.uint8)
    models.read_row(module, layout, row)
    assert module[1].weight is module[0].weight and module[1].weight.tolist() == [[0, 1], [2, 3]]


def test_initial_weights_come_from_the_seed_alone() -> None:
    _, first = row_of(built("lenet5", 7))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    _, second = row_of(built("lenet5", 7))
    assert torch.equal(torch.get_rng_state(), before), "the process-global generator was used"
    assert np.array_equal(first, second)
    assert not np.array_equal(first, row_of(built("lenet5", 8))[1])


def test_concurrent_builds_are_alike() -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        rows = [row[1] for row in pool.map(row_of, pool.map(built, ["cnn_digits"] * 8, [3] * 8))]
    assert all(np.array_equal(row, rows[0]) for row in rows)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_state_survives_a_row_anywhere_in_memory(memory_format: torch.memory_format) -> None:
    source = models.build("resnet20", 1, inputs=COLOUR).to(memory_format=memory_format)
    source(torch.rand(2, 3, 32, 32))  # moves the running statistics and the counters
    layout, row = row_of(source)
    odd = np.empty(layout.row_bytes + 1, np.uint8)[1:]
    odd[:] = row
    odd.flags.writeable = False
    target = models.build("resnet20", 2, inputs=COLOUR)
    models.read_row(target, layout, odd)
    wanted = source.state_dict()
    assert wanted["bn1.num_batches_tracked"] == 1
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(InvalidExperiment, match="float64"):
        models.layout_of(nn.Linear(2, 2, dtype=torch.float64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_rows_of_a_module_on_a_gpu() -> None:
    layout, row = row_of(built("cnn_digits", 1))
    module = built("cnn_digits", 2).to("cuda")
    models.read_row(module, layout, row)
    assert np.array_equal(row_of(module)[1], row)


# Permutations

# The number of groups: layers but the last; of residual nets one for each stage, and the inner ones
# of their blocks.
GROUPS = {
    "mlp_digits": 1,
    "cnn_digits": 2,
    "lenet5": 4,
    "lenet_cifar": 4,
    "cnn_femnist": 3,
    "resnet20": 9,
    "resnet20_b": 12,
    "resnet20_preact": 16,
    "resnet18_cifar": 12,
    "vgg16_bn": 15,
    "char_lstm": 2,
    "sent_lstm": 3,
}


def normed(name: str, seed: int, inputs: Inputs, *, projection: int = 0) -> nn.Module:
    """Return a model whose batch norms have seen samples, in eval mode."""
    module = models.build(name, seed, inputs=inputs, projection=projection)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0
    with torch.no_grad():
        module.train()(models.random_samples(inputs, 4))
    return module.eval()


@pytest.mark.parametrize("projection", [0, 16])
@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        pytest.param(
            name, inputs, marks=[pytest.mark.slow] if name.startswith(("vgg", "resnet18")) else []
        )
        for name, inputs in SMALL.items()
    ],
)
def test_a_permuted_model_computes_the_same(name: str, inputs: Inputs, projection: int) -> None:
    draw = np.random.default_rng(1)
    module = normed(name, 1, inputs, projection=projection)
    layout, row = row_of(module)
    batch = models.random_samples(inputs, 4)
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
    # the inputs matter
    assert np.array_equal(row, before) == (not groups) and float(wanted.std(0).max()) > 1e-4
