"""Local training: equal to a plain loop, alike whoever trains beside it, and possible to call off."""

from __future__ import annotations

import copy
import json
import os
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from fedstrata.common.errors import InvalidExperiment, RunFailed
from fedstrata.common.experiment import reading, schema
from fedstrata.common.host import accelerators
from fedstrata.common.host.accelerators import is_lost, out_of_memory
from fedstrata.common.learning import computing, datasets, models
from fedstrata.common.learning.computing import resolve_accelerator
from fedstrata.common.learning.evaluation import evaluate
from fedstrata.common.learning.nets import Dropout
from fedstrata.common.settings.training import TrainingSettings
from fedstrata.device.jobs import Cancelled
from fedstrata.device.training import sgd
from fedstrata.device.training import trainer as trainer_module
from fedstrata.device.training.batches import LocalDataset, load_local_dataset
from fedstrata.device.training.trainer import Trainer
from tests.helpers.plain import first_model, row_of, train_plainly, trained, trainer_of


def experiment(
    *, model: str = "mlp_digits", devices: int = 12, **training: Any
) -> schema.Experiment:
    return reading.parse(
        {"model": {"name": model}, "topology": {"devices": devices}, "training": training}
    )


@pytest.mark.parametrize(
    ("model", "shape", "steps"),
    [
        ("lenet_cifar", [3, 32, 32], 3),
        ("cnn_femnist", [1, 28, 28], 3),
        ("cnn_fedavg", [3, 20, 20], 3),
        # Batch norm over few samples enlarges the rounding of every step.
        ("resnet20", [3, 16, 16], 1),
        ("resnet20_b", [3, 16, 16], 1),
        ("resnet20_preact", [1, 16, 16], 1),
    ],
)
def test_every_kind_of_layer_is_trained_as_in_a_plain_loop(
    model: str, shape: list[int], steps: int
) -> None:
    size = {
        "dataset": "synthetic",
        "classes": 4,
        "image_shape": shape,
        "samples": 8 * steps,
        "test_samples": 1,
    }
    training = {"batch_size": 8, "momentum": 0.9, "weight_decay": 0.01}
    lab = reading.parse({"data": size, "model": {"name": model}, "training": training})
    trainer = trainer_of(lab)
    out, result = trained(trainer, first_model(lab), epochs=1)
    module = models.build(model, lab.seed, inputs=datasets.load(lab.data).inputs)
    loss, _ = train_plainly(module, lab, "device-0", epochs=1, local_round=0)
    wanted = row_of(module)
    # Where rounding moves one value over a ReLU's kink, some of the gradients behind it differ by
    # more.
    apart = np.abs(trainer.layout.floats(out) - trainer.layout.floats(wanted))
    assert np.quantile(apart, 0.99) < 2e-5 and apart.max() < 1e-3
    assert np.array_equal(trainer.layout.integers(out), trainer.layout.integers(wanted))
    assert result.steps == steps and result.loss == pytest.approx(loss, abs=1e-5)


def test_partial_last_batch_is_kept() -> None:
    lab = experiment(batch_size=50)
    trainer = trainer_of(lab)
    assert trainer.samples == 120  # 2 batches of 50, one of 20
    _, result = trained(trainer, first_model(lab), epochs=2)
    assert (result.samples, result.steps) == (120, 6)


def test_bits_do_not_depend_on_who_trains_at_the_same_time() -> None:
    lab = experiment(model="cnn_digits", batch_size=20)
    row = first_model(lab)
    row.flags.writeable = False
    trainers = [trainer_of(lab, f"device-{i}") for i in range(4)]
    alone = [trained(trainer, row, epochs=2)[0] for trainer in trainers]
    with ThreadPoolExecutor(4) as pool:
        together = [
            out for out, _ in pool.map(lambda trainer: trained(trainer, row, epochs=2), trainers)
        ]
    for lone, joint in zip(alone, together, strict=True):
        assert np.array_equal(lone, joint)


def local(lab: schema.Experiment, node: str) -> LocalDataset:
    return load_local_dataset(lab, node, accelerator=torch.device("cpu"))


def test_devices_share_the_images() -> None:
    first, second = (local(experiment(), node) for node in ("device-0", "device-1"))
    assert first.images.data_ptr() == second.images.data_ptr()


def test_compute_threads_are_one() -> None:
    lab = experiment()
    trainer = trainer_of(lab)
    torch.set_num_threads(2)
    trained(trainer, first_model(lab))
    assert torch.get_num_threads() == 1


def test_each_thread_that_trains_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    lab = experiment()
    trainer, row = trainer_of(lab), first_model(lab)
    monkeypatch.setattr(trainer_module, "set_up", lambda *_: threads.append(threading.get_ident()))
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            threads.append(pool.submit(threading.get_ident).result())
            pool.submit(trained, trainer, row).result()
    assert threads[0] == threads[1] and threads[2] == threads[3]


def test_a_process_computes_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)

    def supported(*, including_emulation: bool) -> bool:
        calls.append("bf16")  # asked of the current GPU
        return True

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    gpu = torch.device("cuda", 1)
    with restored():
        computing.set_up(gpu, TrainingSettings(precision="bf16"))
        computing.set_up_evaluation(gpu)
    computing.set_up(torch.device("cpu"), TrainingSettings())
    computing.set_up_evaluation(torch.device("cpu"))
    assert calls == [gpu, "bf16", gpu]


@contextmanager
def restored() -> Iterator[None]:
    """Give this process's settings for GPUs their values back."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def settings() -> tuple[bool, ...]:
    """Return this process's settings for GPUs: TF32, in both of torch's interfaces, and
    determinism.
    """
    backends = torch.backends
    older = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
    if hasattr(backends.cudnn, "conv"):  # from torch 2.9 on
        newer = [
            each.fp32_precision == "tf32" for each in (backends.cuda.matmul, backends.cudnn.conv)
        ]
        assert (*newer, backends.cudnn.rnn.fp32_precision == "tf32") == (*older, older[1])
    return (*older, torch.are_deterministic_algorithms_enabled(), backends.cudnn.deterministic)


def test_the_first_matrix_product_of_a_process_warns_of_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch warns if it is that of a backward pass, and warnings are errors here."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    text = (
        "Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set "
        "the primary context..."
    )
    for set_up in (
        partial(computing.set_up, training=TrainingSettings()),
        computing.set_up_evaluation,
    ):
        with restored(), warnings.catch_warnings():
            with pytest.raises(UserWarning, match="no current CUDA context"):
                warnings.warn(text, UserWarning, stacklevel=1)
            set_up(torch.device("cuda", 0))
            warnings.warn(text, UserWarning, stacklevel=1)


def test_a_gpu_computes_in_tf32_only_where_the_experiment_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    gpu = torch.device("cuda", 0)
    with restored():
        for precision, tf32 in (("fp32", False), ("tf32", True), ("bf16", False)):
            computing.set_up(gpu, TrainingSettings.model_validate({"precision": precision}))
            assert settings() == (tf32, tf32, False, False)
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8", (
                "torch looks for it before it is needed"
            )
        computing.set_up(gpu, TrainingSettings(precision="tf32", deterministic=True))
        assert settings() == (True, True, True, True)
        computing.set_up_evaluation(gpu)
        assert settings() == (False, False, False, False)


@pytest.mark.parametrize(("workspaces", "refused"), [(":16:8", False), (":0:0", True)])
def test_workspaces_of_the_environment_must_be_deterministic(
    workspaces: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    gpu = torch.device("cuda", 0)
    with restored():
        monkeypatch.setenv(computing.WORKSPACES, workspaces)
        computing.set_up(gpu, TrainingSettings())
        named = r"training.deterministic = True: .*=:0:0.* Unset it, or use :4096:8 or :16:8"
        with pytest.raises(InvalidExperiment, match=named) if refused else nullcontext():
            computing.set_up(gpu, TrainingSettings(deterministic=True))
        assert os.environ[computing.WORKSPACES] == workspaces
        assert torch.are_deterministic_algorithms_enabled() is not refused


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB.", True),
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", True),
        ("CUDA driver error: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", True),
        (
            "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if the input is not "
            "contiguous",
            False,
        ),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", False),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", True),
        ("GET was unable to find an engine to execute this computation", True),
        ("Unable to find a valid cuDNN algorithm to run convolution", True),
        (
            "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
            True,
        ),
        ("HIP out of memory. Tried to allocate 20.00 MiB.", True),
        ("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", True),
        (
            'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":838'
            ", please report a bug to PyTorch.",
            True,
        ),
        ("NvMapMemAllocInternalTagged: 1075072515 error 12", True),
        ("NvMapMemHandleAlloc: error 0", True),
        ("CUDA error: CUDNN_STATUS_BAD_PARAM", False),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_failures_to_allocate_count_as_out_of_memory(text: str, memory: bool) -> None:
    assert out_of_memory(RuntimeError(text)) is memory
    assert out_of_memory(torch.OutOfMemoryError(text)) and not out_of_memory(ValueError(text))


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (
            "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be "
            "asynchronously",
            True,
        ),
        ("CUDA error: device-side assert triggered", True),
        ("CUDA error: unspecified launch failure", True),
        ("CUDA error: misaligned address", True),
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("HIP error: an illegal memory access was encountered", True),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`", True),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", True),
        ("CUDA error: out of memory", False),
        ("CUDA error: invalid device ordinal", False),
        ("CUDA error: no kernel image is available for execution on the device", False),
        ("mat1 and mat2 shapes cannot be multiplied (2x64 and 3x10)", False),
    ],
)
def test_failures_of_each_later_call_are_known(text: str, lost: bool) -> None:
    assert is_lost(RuntimeError(text)) is lost and not is_lost(KeyError(text))
    assert not (lost and out_of_memory(RuntimeError(text)))


@pytest.mark.parametrize(("name", "maker"), [("mps", "Apple"), ("xpu", "Intel")])
def test_a_gpu_on_which_nothing_is_computed_is_named_once(
    name: str, maker: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accelerators._warn_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        {"mps": torch.backends.mps, "xpu": torch.xpu}[name], "is_available", lambda: True
    )
    assert computing.accelerators() == ["cpu", name]
    assert computing.resolve_accelerator("cpu") == torch.device("cpu") and caplog.messages == []
    for _ in range(2):
        assert computing.resolve_accelerator("auto") == torch.device("cpu")
    assert caplog.messages == [
        f"the {maker} GPU of this machine ({name}) is not used: fedstrata computes on the CPU"
    ]
    with pytest.raises(
        InvalidExperiment, match=r"this machine has no such accelerator\. It has cpu; or use auto"
    ):
        computing.resolve_accelerator("cuda")
    assert (
        accelerators.choose("auto", ["cpu", "cuda:0", name]) == ("cuda:0",)
        and len(caplog.messages) == 1
    )


def test_dropout_depends_on_seed_node_and_round_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    source = nn.Sequential(Dropout(), nn.Flatten(), nn.Linear(64, 10))
    monkeypatch.setattr(models, "build", lambda *_, **__: copy.deepcopy(source))
    # one batch: the order of the samples matters to dropout alone
    lab = experiment(batch_size=1000)
    trainers = [trainer_of(lab), trainer_of(lab), trainer_of(lab, "device-1")]
    row = row_of(source)
    torch.manual_seed(2)
    first, again, other = (trained(trainer, row)[0] for trainer in trainers)
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert not np.array_equal(first, trained(trainers[0], row, local_round=1)[0])


def test_progress_is_monotone_and_ends_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "PROGRESS_S", 0.0)
    seen: list[tuple[int, int]] = []
    lab = experiment(recorded=False)
    _, result = trained(
        trainer_of(lab), first_model(lab), epochs=2, progress=lambda *args: seen.append(args)
    )
    assert seen == sorted(seen) and seen[-1] == (24, 24) and len(seen) > 22
    assert {total for _, total in seen} == {24} and result.steps == 24


def test_progress_is_rare() -> None:
    seen: list[tuple[int, int]] = []
    lab = experiment()
    trained(trainer_of(lab), first_model(lab), progress=lambda *args: seen.append(args))
    assert len(seen) < 12 and seen[-1] == (12, 12)


@pytest.mark.parametrize("recorded", [False, True])
def test_cancelled_between_steps_then_trained_again(
    recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "PROGRESS_S", 0.0)
    monkeypatch.setattr(sgd, "RUN_S", 0.0)
    monkeypatch.setattr(sgd, "FIRST_STEPS", 1)
    lab = experiment(recorded=recorded)
    row = first_model(lab)
    trainer = trainer_of(lab)
    wanted, _ = trained(trainer, row)
    cancelled = threading.Event()
    steps: list[int] = []

    def progress(done: int, total: int) -> None:
        steps.append(done)
        if done == 5:
            cancelled.set()

    with pytest.raises(Cancelled):
        trained(trainer, row, progress=progress, cancelled=cancelled)
    assert steps[-1] == 5
    assert np.array_equal(trained(trainer, row)[0], wanted)


def test_unknown_accelerator_lists_what_is_there() -> None:
    for name, problem in (
        ("tpu", "Use cpu"),
        ("cuda:99", "It has cpu"),
        ("cuda:-1", "Use cpu"),
        ("CPU", "Use cpu"),
    ):
        with pytest.raises(InvalidExperiment, match=rf"--accelerator = '{name}'.*{problem}"):
            Trainer(experiment(), node="device-0", accelerator=name)
    assert resolve_accelerator("auto").type in ("cpu", "cuda")


def test_unknown_node_and_model_that_does_not_fit() -> None:
    with pytest.raises(InvalidExperiment, match="device-99"):
        Trainer(experiment(), node="device-99", accelerator="cpu")
    with pytest.raises(InvalidExperiment, match="lenet5"):
        trainer_of(experiment(model="lenet5"))


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("no memory"), RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")],
)
def test_exhausted_memory_fails_the_run_and_spares_the_trainer(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    lab = experiment(recorded=False)
    trainer = trainer_of(lab)

    def exhausted(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_fused_sgd_", exhausted)
        with pytest.raises(RunFailed, match=r"training\.batch_size = 10.*smaller") as caught:
            trained(trainer, first_model(lab))
    assert caught.value.__context__ is None
    assert trained(trainer, first_model(lab))[1].steps == 12


def write_leaf(root: Path, **rows: int) -> None:
    """Write LEAF's Shakespeare of some users with so many rows, for training and again for the
    test.
    """
    text = 2 * (
        "to be or not to be, that is the question: whether tis nobler in the mind to suffer the "
        "slings and arrows "
    )
    for part in ("train", "test"):
        users = {}
        for i, (name, count) in enumerate(
            (rows or {"HAMLET": 4, "OPHELIA": 5, "YORICK": 6}).items()
        ):
            starts = range(i, i + count)
            users[name] = {
                "x": [text[j : j + 80] for j in starts],
                "y": [text[j + 80] for j in starts],
            }
        folder = root / "shakespeare" / "data" / part
        folder.mkdir(parents=True)
        tree = {
            "users": [*users],
            "num_samples": [len(user["y"]) for user in users.values()],
            "user_data": users,
        }
        (folder / "all.json").write_text(json.dumps(tree))


def test_text_is_trained_and_evaluated(tmp_path: Path) -> None:
    write_leaf(tmp_path)
    tree = {
        "data": {"dataset": "shakespeare", "root": str(tmp_path), "partition": "natural"},
        "model": {"name": "char_lstm"},
        "topology": {"devices": 3},
        "training": {"learning_rate": 0.5, "batch_size": 3},
    }
    lab = reading.parse(tree)
    assert [len(local(lab, f"device-{i}").samples) for i in range(3)] == [4, 5, 6]
    row, trainer = first_model(lab), trainer_of(lab, "device-2")
    out, result = trained(trainer, row, epochs=5)
    assert np.array_equal(out, trained(trainer, row, epochs=5)[0])
    data = datasets.load(lab.data)
    module = models.build("char_lstm", 1, inputs=data.inputs)
    losses = []
    for state in (row, out):
        models.read_row(module, trainer.layout, state)
        losses.append(
            evaluate(
                module, data.test_images, labels=data.test_labels, normalise=data.normaliser()
            ).loss
        )
    assert losses[1] < losses[0] - 0.2 and result.steps == 10


def test_a_device_trains_on_all_images_of_its_own(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    for device, count in (("device-0", 5), ("device-1", 3)):
        for i in range(count):
            path = tmp_path / device / "train" / ("odd" if i % 2 else "even") / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (16, 16, 3), np.uint8)).save(path)
    tree = {
        "data": {
            "dataset": "folder",
            "root": str(tmp_path / "{node}"),
            "classes": ["even", "odd"],
            "image_shape": [3, 16, 16],
            "partition": "natural",
        },
        "model": {"name": "cnn_fedavg"},
        "topology": {"devices": 2},
    }
    assert [len(local(reading.parse(tree), f"device-{i}").samples) for i in range(2)] == [5, 3]


def test_devices_with_copies_of_one_set_split_it_alike(tmp_path: Path) -> None:
    for node in ("device-0", "device-1", "cloud"):
        write_leaf(tmp_path / node)
    tree = {"dataset": "shakespeare", "partition": "iid"}
    shared, own = (
        reading.parse(
            {
                "data": {**tree, "root": str(root)},
                "model": {"name": "char_lstm"},
                "topology": {"devices": 2},
            }
        )
        for root in (tmp_path / "cloud", tmp_path / "{node}")
    )
    for node in ("device-0", "device-1"):
        assert torch.equal(local(shared, node).samples, local(own, node).samples)


def test_an_operation_without_a_deterministic_form_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = experiment(deterministic=True, recorded=False)
    trainer = trainer_of(lab)

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError(
            "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but "
            "you"
        )

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_fused_sgd_", refused)
        with pytest.raises(
            InvalidExperiment,
            match=r"^training\.deterministic = True: adaptive.*cuda has no.*false",
        ):
            trained(trainer, first_model(lab))
        patch.setattr(torch, "_fused_sgd_", lambda *_, **__: torch.zeros(2) @ torch.zeros(3))
        with pytest.raises(RuntimeError, match="size"):
            trained(trainer, first_model(lab))
    assert np.array_equal(
        trained(trainer, first_model(lab))[0],
        trained(trainer_of(experiment()), first_model(lab))[0],
    )


def test_a_global_rounds_rounds_have_its_learning_rate() -> None:
    schedule = {"name": "step", "warmup": 1, "every": 1, "factor": 0.5}
    tree = {"topology": {"devices": 4}, "institution": {"rounds": 3}, "rounds": 4}
    lab = reading.parse({**tree, "training": {"learning_rate": 0.04, "schedule": schedule}})
    assert [lab.learning_rate_in(local_round) for local_round in (0, 2, 3, 6, 11)] == [
        0.02,
        0.02,
        0.04,
        0.02,
        0.01,
    ]


@pytest.mark.parametrize(("model", "batch_size"), [("cnn_digits", 10), ("mlp_digits", 20)])
def test_bf16_is_near_to_fp32_and_the_same_again(model: str, batch_size: int) -> None:
    lab, low = (
        experiment(model=model, batch_size=batch_size, precision=precision)
        for precision in ("fp32", "bf16")
    )
    row = first_model(lab)
    wanted, result = trained(trainer_of(lab), row)
    trainer = trainer_of(low)
    out, in_low = trained(trainer, row)
    assert np.array_equal(out, trained(trainer_of(low), row)[0])
    apart = np.abs(trainer.layout.floats(out) - trainer.layout.floats(wanted))
    moved = np.abs(trainer.layout.floats(wanted) - trainer.layout.floats(row))
    assert 0 < np.linalg.norm(apart) < 0.1 * np.linalg.norm(moved)
    assert in_low.loss == pytest.approx(result.loss, rel=2e-2) and in_low.loss != result.loss


@pytest.mark.parametrize(
    ("model", "low"), [("cnn_digits", "tf32"), ("mlp_digits", "tf32"), ("mlp_digits", "bf16")]
)
def test_on_a_cpu_tf32_is_fp32_and_so_are_linear_layers_in_small_batches(
    model: str, low: str
) -> None:
    labs = [
        experiment(model=model, batch_size=10, precision=precision) for precision in ("fp32", low)
    ]
    assert np.array_equal(*(trained(trainer_of(lab), first_model(lab))[0] for lab in labs))
