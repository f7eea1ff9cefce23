"""Data sets: files in their true formats, damaged files, and what is said when they are missing."""

from __future__ import annotations

import hashlib
import json
import pickle
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment import reading, schema
from fedstrata.common.learning import datasets, originals
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.settings.topology import CLOUD
from tests.helpers.commands import invoke
from tests.helpers.mnist import idx, write_mnist


def load(name: str, root: Path, node: str = CLOUD, **more: Any) -> datasets.Dataset:
    return datasets.load(
        reading.parse({"data": {"dataset": name, "root": str(root), **more}}).data, node=node
    )


def python2_batch(images: npt.NDArray[np.uint8], labels: list[int], **more: list[int]) -> bytes:
    """Write a batch opcode by opcode as Python 2 did: strings are bytes, which Python 3 cannot
    write.
    """

    def text(value: str) -> bytes:
        return b"U" + bytes([len(value)]) + value.encode()

    def integer(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    raw = images.tobytes()
    dtype = (
        b"cnumpy\ndtype\n"
        + text("u1")
        + b"K\0K\1\x87R(K\3"
        + text("|")
        + b"NNN"
        + integer(-1) * 2
        + b"K\0tb"
    )
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + text("b") + b"\x87R"
        + b"(K\1" + integer(len(images)) + integer(images[0].size) + b"\x86" + dtype
        + b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    )  # fmt: skip
    lists = {**({} if more else {"labels": labels}), **more}
    listed = b"".join(
        text(key) + b"](" + b"".join(map(integer, numbers)) + b"e" for key, numbers in lists.items()
    )
    return (
        b"\x80\2}(" + text("batch_label") + text("a batch") + listed + text("data") + array + b"u."
    )


def write_cifar(
    root: Path, labels: list[int] | None = None
) -> tuple[npt.NDArray[np.uint8], list[int]]:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng(1)
    images = draw.integers(0, 256, (24, 3, 32, 32), np.uint8)
    labels = draw.integers(0, 10, 24).tolist() if labels is None else labels
    for i, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        (folder / name).write_bytes(
            python2_batch(images[4 * i : 4 * i + 4], labels[4 * i : 4 * i + 4])
        )
    return images, labels


def test_digits_are_always_the_same_and_split_by_class() -> None:
    digits = datasets.load(schema.Data())
    parts = (digits.train_images, digits.train_labels, digits.test_images, digits.test_labels)
    digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()
    assert digest == "a817fd0f988a4cafb3ca13e6fb18c3285f382137c4dab01e84a88ccc669d5542"
    assert digits.train_images.shape == (1438, 1, 8, 8) and digits.test_images.shape == (
        359,
        1,
        8,
        8,
    )
    assert digits.train_images.dtype == torch.uint8 and digits.train_labels.dtype == torch.int64
    assert digits.train_images.max() == 16
    tested = torch.bincount(digits.test_labels).double()
    everyone = tested + torch.bincount(digits.train_labels)
    assert (tested / everyone - 359 / 1797).abs().max() < 1 / 170


def test_normalised_digits_have_mean_0_and_deviation_1() -> None:
    digits = datasets.load(schema.Data())
    images = digits.normaliser()(digits.train_images)
    assert images.dtype == torch.float32
    assert images.mean().abs() < 2e-3 and (images.std() - 1).abs() < 2e-3
    wanted = (digits.train_images.double() / 16 - digits.mean[0]) / digits.std[0]
    torch.testing.assert_close(images.double(), wanted, rtol=0, atol=1e-6)


def normalised_by(choice: Any, **more: Any) -> tuple[datasets.Dataset, torch.Tensor]:
    loaded = datasets.load(reading.parse({"data": {"normalise": choice, **more}}).data)
    return loaded, loaded.normaliser()(loaded.train_images)


def test_digits_are_normalised_as_chosen() -> None:
    published, as_ever = normalised_by("published")
    assert (published.mean, published.std) == ((0.305,), (0.376,))
    assert torch.equal(as_ever, datasets.load(schema.Data()).normaliser()(published.train_images))
    own, images = normalised_by("own")
    assert own.mean[0] == pytest.approx(
        float(published.train_images.double().mean()) / 16, abs=5e-5
    )
    assert images.mean().abs() < 3e-4 and (images.std(correction=0) - 1).abs() < 3e-4
    assert torch.equal(normalised_by("none")[1], published.train_images / 16)
    given = normalised_by([[0.25], [2]])[1]
    torch.testing.assert_close(given, (published.train_images / 16 - 0.25) / 2, rtol=0, atol=1e-6)


def test_each_channel_has_its_own_constants() -> None:
    made = {
        "dataset": "synthetic",
        "classes": 3,
        "image_shape": [3, 8, 8],
        "samples": 2500,
        "test_samples": 5,
    }
    loaded, images = normalised_by("own", **made)
    scaled = loaded.train_images.double() / 255
    assert len(set(loaded.mean)) == 3
    np.testing.assert_allclose(loaded.mean, scaled.mean((0, 2, 3)), rtol=5e-4)
    np.testing.assert_allclose(loaded.std, scaled.std((0, 2, 3), correction=0), rtol=5e-4)
    assert images.mean((0, 2, 3)).abs().max() < 2e-3
    by_channel = normalised_by([[0, 0.5, 0], [1, 1, 2]], **made)[1]
    torch.testing.assert_close(by_channel[:, 1].double(), scaled[:, 1] - 0.5, rtol=0, atol=1e-6)
    torch.testing.assert_close(by_channel[:, 2].double(), scaled[:, 2] / 2, rtol=0, atol=1e-6)
    with pytest.raises(
        InvalidExperiment,
        match=r"data\.normalise = .*3 channels or features\. List one number, or 3",
    ):
        normalised_by([[0, 0], [1, 1]], **made)


def test_a_feature_that_never_changes_has_the_deviation_1() -> None:
    rows = torch.tensor([[1.0, 7.0], [3.0, 7.0]])
    assert datasets.own_constants(rows, scale=1.0) == ((2.0, 7.0), (1.0, 1.0))
    whites = torch.full((2, 1, 4, 4), 255, dtype=torch.uint8)
    assert datasets.own_constants(whites, scale=1 / 255) == ((1.0,), (1.0,))


@pytest.mark.parametrize("value", [0.1, 0.3, 1e6 / 7, -5.5, 0.0])
@pytest.mark.parametrize("shape", [(1777, 2), (1777, 2, 3, 3)])
def test_rounding_errors_are_no_deviation(value: float, shape: tuple[int, ...]) -> None:
    rows = torch.full(shape, value)
    rows[::3, 0] = torch.nextafter(rows[::3, 0], torch.tensor(0.0))
    rows[:, 1] = torch.linspace(-1, 1, 1777).reshape(-1, *(1 for _ in shape[2:]))
    mean, deviation = datasets.own_constants(rows, scale=1.0)
    assert deviation[0] == 1.0 and mean[0] == pytest.approx(value, rel=1e-3)
    assert abs(mean[1]) < 1e-9 and deviation[1] == pytest.approx(3**-0.5, rel=2e-3)


def test_a_mean_beside_a_small_deviation_has_the_digits_that_it_needs() -> None:
    rows = torch.tensor([[1234.567], [1234.569]]) + torch.tensor([0.0])
    (mean,), (deviation,) = datasets.own_constants(rows, scale=1.0)
    assert ((rows.double() - mean) / deviation).flatten().tolist() == pytest.approx(
        [-1, 1], abs=1e-3
    )
    shifted = torch.arange(256.0).reshape(-1, 1) + 2**22
    (mean,), (deviation,) = datasets.own_constants(shifted, scale=1.0)
    assert ((shifted.double() - mean) / deviation).mean().abs() < 1e-3


def test_arrays_are_normalised_by_feature(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).normal([5.0, -3.0], [2.0, 0.1], (400, 2)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x=rows, y=np.arange(400) % 2)
    choice = {"dataset": "rows.npz", "root": str(tmp_path)}
    loaded, as_it_is = normalised_by("published", **choice)
    assert torch.equal(as_it_is, loaded.train_images)
    for mode in ("own", [[5.0, -3.0], [2.0, 0.1]]):
        images = normalised_by(mode, **choice)[1]
        assert images.shape == loaded.train_images.shape
        assert images.mean(0).abs().max() < 0.25 and (images.std(0) - 1).abs().max() < 0.25


def test_noise_has_its_deviation_and_is_always_the_same() -> None:
    clean, noisy = datasets.load(schema.Data()), datasets.load(schema.Data(noise=0.4))
    for name in ("train_images", "test_images"):
        noise = (getattr(noisy, name) - getattr(clean, name).float()) * noisy.scale
        assert (
            float(noise.std()) == pytest.approx(0.4, rel=0.01) and abs(float(noise.mean())) < 0.005
        )
        assert float(torch.corrcoef(noise.flatten(1)[:2])[0, 1]) < 0.3
    assert torch.equal(clean.train_labels, noisy.train_labels)
    before = noisy.test_images.clone()
    normalised = noisy.normaliser()(noisy.test_images)
    assert normalised.dtype == torch.float32 and torch.equal(noisy.test_images, before)
    datasets._load.cache_clear()
    assert torch.equal(datasets.load(schema.Data(noise=0.4)).test_images, before)


def test_one_data_set_per_process() -> None:
    loaded: list[datasets.Dataset] = []
    threads = [
        threading.Thread(target=lambda: loaded.append(datasets.load(schema.Data())))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(dataset is loaded[0] for dataset in loaded)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashionmnist", "FashionMNIST")])
def test_idx_files(tmp_path: Path, name: str, folder: str, zipped: bool) -> None:
    arrays = write_mnist(tmp_path, name=folder, zipped=zipped)
    loaded = load(name, tmp_path)
    assert np.array_equal(loaded.train_images[:, 0], arrays["train-images-idx3-ubyte"])
    assert np.array_equal(loaded.train_labels, arrays["train-labels-idx1-ubyte"])
    assert np.array_equal(loaded.test_images[:, 0], arrays["t10k-images-idx3-ubyte"])
    assert loaded.test_labels.dtype == torch.int64 and loaded.inputs == Inputs((1, 28, 28), 10)


@pytest.mark.parametrize(
    ("file", "damage", "problem"),
    [
        ("train-images-idx3-ubyte", lambda raw: raw[:-1], "the 15680 bytes it announces"),
        ("train-images-idx3-ubyte", lambda raw: raw + b"\0", "holds more than"),
        ("train-images-idx3-ubyte", lambda raw: raw[:9], "ends inside its header"),
        ("train-images-idx3-ubyte", lambda raw: b"", "begins with nothing"),
        (
            "train-images-idx3-ubyte",
            lambda raw: b"\0\0\x08\x01" + raw[4:],
            "begins with 00000801, not 00000803",
        ),
        (
            "train-images-idx3-ubyte",
            lambda raw: b"\0\0\x08\x03" + b"\xff" * 12 + raw[16:],
            "claims",
        ),
        ("t10k-images-idx3-ubyte.gz", lambda raw: raw[: len(raw) // 2], "cannot be read"),
        ("t10k-images-idx3-ubyte.gz", lambda raw: b"no gzip at all", "cannot be read"),
    ],
)
def test_damaged_idx_file_is_named(
    tmp_path: Path, file: str, damage: Callable[[bytes], bytes], problem: str
) -> None:
    write_mnist(tmp_path, zipped=file.endswith("gz"))
    path = tmp_path / "MNIST" / "raw" / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InvalidExperiment, match=problem) as caught:
        load("mnist", tmp_path)
    assert str(caught.value).startswith("data.root = ") and str(path) in str(caught.value)


@pytest.mark.parametrize("labels", [np.zeros(19, np.uint8), np.full(20, 10, np.uint8)])
def test_labels_must_fit(tmp_path: Path, labels: npt.NDArray[np.uint8]) -> None:
    write_mnist(tmp_path)
    (tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte").write_bytes(idx(labels))
    with pytest.raises(InvalidExperiment, match="20 samples"):
        load("mnist", tmp_path)


def test_cifar_batches(tmp_path: Path) -> None:
    images, labels = write_cifar(tmp_path)
    loaded = load("cifar10", tmp_path)
    assert np.array_equal(loaded.train_images, images[:20]) and np.array_equal(
        loaded.test_images, images[20:]
    )
    assert (
        loaded.train_labels.tolist() == labels[:20] and loaded.test_labels.tolist() == labels[20:]
    )
    normalised = loaded.normaliser()(
        torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1).expand(2, 3, 1, 1)
    )
    torch.testing.assert_close(normalised[:, 2].flatten(), torch.tensor([-1.0, 1.0]))


def write_cifar100(root: Path) -> npt.NDArray[np.uint8]:
    folder = root / "cifar-100-python"
    folder.mkdir()
    images = np.random.default_rng(1).integers(0, 256, (6, 3, 32, 32), np.uint8)
    train = python2_batch(images[:4], [], fine_labels=[99, 0, 5, 7], coarse_labels=[19, 4, 1, 2])
    (folder / "train").write_bytes(train)
    (folder / "test").write_bytes(
        python2_batch(images[4:], [], fine_labels=[3, 1], coarse_labels=[8, 0])
    )
    return images


def test_cifar100_has_two_kinds_of_labels(tmp_path: Path) -> None:
    images = write_cifar100(tmp_path)
    fine, coarse = (load("cifar100", tmp_path, labels=labels) for labels in ("fine", "coarse"))
    assert np.array_equal(fine.train_images, images[:4]) and np.array_equal(
        coarse.test_images, images[4:]
    )
    assert (fine.train_labels.tolist(), fine.test_labels.tolist()) == ([99, 0, 5, 7], [3, 1])
    assert (coarse.train_labels.tolist(), coarse.test_labels.tolist()) == ([19, 4, 1, 2], [8, 0])
    assert fine.inputs == Inputs((3, 32, 32), 100) and coarse.inputs == Inputs((3, 32, 32), 20)
    black = fine.normaliser()(torch.zeros((1, 3, 1, 1), dtype=torch.uint8)).flatten()
    torch.testing.assert_close(
        black, torch.tensor([-0.4914 / 0.2023, -0.4822 / 0.1994, -0.4465 / 0.2010])
    )


def test_cifar100_without_the_labels_that_are_wanted(tmp_path: Path) -> None:
    images = write_cifar100(tmp_path)
    (tmp_path / "cifar-100-python" / "test").write_bytes(
        python2_batch(images[4:], [], fine_labels=[3, 1])
    )
    assert load("cifar100", tmp_path).classes == 100
    with pytest.raises(InvalidExperiment, match=r"cifar-100-python/test.*coarse_labels"):
        load("cifar100", tmp_path, labels="coarse")


def test_each_node_may_have_a_root_of_its_own(tmp_path: Path) -> None:
    for node in ("cloud", "device-3"):
        write_mnist(tmp_path / node)
    one, other = (load("mnist", tmp_path / "{node}", node) for node in ("cloud", "device-3"))
    assert torch.equal(one.train_images, other.train_images)
    with pytest.raises(InvalidExperiment, match="device-4/MNIST/raw"):
        load("mnist", tmp_path / "{node}", "device-4")


class _Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


def test_harmful_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    trace = tmp_path / "harm"
    batch = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    batch.write_bytes(pickle.dumps({"data": _Harmful(trace), "labels": [1]}, protocol=2))
    with pytest.raises(InvalidExperiment, match=r"data_batch_3.*not allowed"):
        load("cifar10", tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"\x80\2cbuiltins\neval\n.", "not allowed"),
        (b"\x80\2cos\nsystem\n.", "not allowed"),
        (b"\x80\2cnumpy\nload\n.", "not allowed"),
        (b"\x80\2cnumpy.core.multiarray\nfromfile\n.", "not allowed"),
        (b"", ""),
        (b"\x80\2}.", ""),
        (b"not a pickle", ""),
        (pickle.dumps({"data": [[1, 2]], "labels": [1]}, protocol=2), ""),
        (python2_batch(np.zeros((2, 3, 32, 32), np.uint8), [1]), ""),
        (python2_batch(np.zeros((1, 3, 32, 31), np.uint8), [1]), ""),
        (python2_batch(np.zeros((1, 3, 32, 32), np.uint8), [1])[:-100], ""),
    ],
)
def test_damaged_or_harmful_cifar_batch_is_named(tmp_path: Path, raw: bytes, problem: str) -> None:
    write_cifar(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_5").write_bytes(raw)
    with pytest.raises(InvalidExperiment, match=f"data_batch_5.*{problem}"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("name", "folder", "path"),
    [
        ("mnist", "MNIST", "MNIST/raw/train-images-idx3-ubyte"),
        ("fashionmnist", "FashionMNIST", "FashionMNIST/raw/t10k-labels-idx1-ubyte.gz"),
        ("cifar10", "CIFAR10", "cifar-10-batches-py/data_batch_1"),
        ("cifar100", "CIFAR100", "cifar-100-python/train"),
    ],
)
def test_missing_files_are_named_with_the_command_that_fetches_them(
    tmp_path: Path, name: str, folder: str, path: str
) -> None:
    with pytest.raises(InvalidExperiment) as caught:
        load(name, tmp_path / "nowhere")
    assert str(tmp_path / "nowhere" / path) in str(caught.value)
    assert f"torchvision.datasets.{folder}({str(tmp_path / 'nowhere')!r}, download=True)" in str(
        caught.value
    )


def test_only_what_is_missing_is_named(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(InvalidExperiment) as caught:
        load("cifar10", tmp_path)
    assert "data_batch_4" in str(caught.value) and "data_batch_3" not in str(caught.value)


# The command


def test_a_root_is_described(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    done = invoke("data", "check", "--root", tmp_path, "--format", "json")
    assert done.exit_code == 0, done.stderr
    facts = json.loads(done.stdout)
    assert len(facts.pop("digest")) == 16
    assert facts == {
        "dataset": "mnist",
        "train": 20,
        "test": 5,
        "shape": [1, 28, 28],
        "classes": 10,
        "numbers": 0,
        "tokens": 0,
        "users": 0,
        "original": "no",
    }
    table = invoke("data", "check", "mnist", "--root", tmp_path).stdout.splitlines()
    assert [line.split("\t")[:3] for line in table] == [
        ["dataset", "train", "test"],
        ["mnist", "20", "5"],
    ]


def test_each_file_decides_the_digest_by_which_two_machines_are_compared(tmp_path: Path) -> None:
    def digest() -> str:
        datasets._load.cache_clear()
        return str(
            json.loads(
                invoke("data", "check", "mnist", "--root", tmp_path, "--format", "json").stdout
            )["digest"]
        )

    write_mnist(tmp_path)
    found = [digest(), digest()]
    for file in sorted((tmp_path / "MNIST" / "raw").iterdir()):
        *head, last = file.read_bytes()
        file.write_bytes(bytes((*head, last ^ 1)))
        found.append(digest())
    assert found[0] == found[1] and len(set(found)) == 5


def test_a_data_set_is_the_original_by_its_digest_or_its_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path)
    images, labels = write_cifar(tmp_path, [*range(10), *range(10), *range(4)])

    def found() -> list[str]:
        done = invoke("data", "check", "mnist", "cifar10", "--root", tmp_path, "--format", "json")
        return [json.loads(line)["original"] for line in done.stdout.splitlines()]

    assert found() == ["no", "no"]
    monkeypatch.setattr(
        originals, "DIGESTS", {"mnist": originals.digest_of(load("mnist", tmp_path))}
    )
    means = [tuple(part.mean((0, 2, 3)).tolist()) for part in (images[:20], images[20:])]
    monkeypatch.setattr(originals, "MEANS", {"cifar10": tuple(means)})
    assert found() == ["yes", "yes, in some order"]
    write_cifar(tmp_path, [9, *labels[1:]])
    datasets._load.cache_clear()
    assert found() == ["yes", "no"]
    assert originals.original("digits", load("digits", tmp_path)) == "unknown"


def test_what_is_damaged_or_missing_ends_with_4_and_the_rest_is_described(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    for root in (good, bad):
        write_mnist(root)
        (root / "cifar-10-batches-py").mkdir()
    (bad / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").write_bytes(b"")
    done = invoke("data", "check", "--root", good)
    assert done.exit_code == 4 and "mnist\t20" in done.stdout and "data_batch_1" in done.stderr
    done = invoke("data", "check", "--root", bad)
    assert (
        done.exit_code == 4
        and "t10k-labels-idx1-ubyte" in done.stderr
        and "data_batch_1" in done.stderr
    )
    assert invoke("data", "check", "--root", tmp_path / "absent").exit_code == 4
    assert "not read from a root" in invoke("data", "check", "digits", "--root", tmp_path).stderr


def test_the_data_sets_of_a_sweep_are_checked_by_its_name(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    done = invoke("data", "check", "papers/tempo-table1", "--root", tmp_path)
    assert done.exit_code == 4 and "mnist\t20" in done.stdout
    assert "FashionMNIST/raw" in done.stderr and "cifar-10-batches-py/test_batch" in done.stderr
    missing = invoke("data", "check", "papers/tempo-table7", "--root", tmp_path)
    assert missing.exit_code == 4 and "papers/tempo-table7" in missing.stderr
