"""Images of a node's own, and made-up ones: what is read, by whom, and what is said when it is not
right.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.learning import datasets, models
from fedstrata.common.learning.evaluation import evaluate
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.settings.data import Data, found_in
from fedstrata.common.settings.topology import CLOUD

CLASSES = ["dog", "cat"]


def picture(path: Path, colour: Any, *, size: tuple[int, int] = (8, 6), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def own(root: Path | str, *, channels: int = 3, **more: Any) -> Data:
    tree = {
        "dataset": "folder",
        "root": str(root),
        "classes": CLASSES,
        "image_shape": [channels, 6, 8],
    }
    return parse({"data": {**tree, "partition": "natural", **more}}).data


def refused(data: Data, *, match: str, node: str = CLOUD) -> None:
    with pytest.raises(InvalidExperiment, match=match):
        datasets.load(data, node=node)


def test_a_device_reads_its_training_images_and_the_cloud_its_test_images(tmp_path: Path) -> None:
    picture(tmp_path / "device-0" / "train" / "cat" / "b.png", (1, 2, 3))
    picture(tmp_path / "device-0" / "train" / "cat" / "a.PNG", (4, 5, 6))
    picture(tmp_path / "device-0" / "train" / "dog" / "c.png", (7, 8, 9))
    (tmp_path / "device-0" / "train" / "cat" / "notes.txt").write_text("not an image")
    picture(tmp_path / "device-1" / "train" / "cat" / "d.png", (10, 11, 12))
    picture(tmp_path / "cloud" / "test" / "dog" / "e.png", (13, 14, 15))
    data = own(tmp_path / "{node}")
    first, second, cloud = (
        datasets.load(data, node=node) for node in ("device-0", "device-1", "cloud")
    )
    assert first.train_images.shape == (3, 3, 6, 8) and first.inputs == cloud.inputs == Inputs(
        (3, 6, 8), 2
    )
    assert first.train_images[:, :, 0, 0].tolist() == [[7, 8, 9], [4, 5, 6], [1, 2, 3]]
    assert first.train_labels.tolist() == [0, 1, 1]  # in the order of the list, then of the names
    assert second.train_labels.tolist() == [1] and not len(second.test_labels)
    assert cloud.test_images[0, :, 0, 0].tolist() == [13, 14, 15] and not len(cloud.train_labels)


def test_images_are_brought_into_the_shape_that_all_agree_on(tmp_path: Path) -> None:
    picture(tmp_path / "train" / "dog" / "grey.png", 100, mode="L", size=(16, 12))
    picture(tmp_path / "train" / "dog" / "palette.png", 0, mode="P")
    picture(tmp_path / "train" / "dog" / "transparent.png", (50, 50, 50, 0), mode="RGBA")
    assert datasets.load(own(tmp_path), node="d").train_images[:, :, 0, 0].tolist() == [
        [100] * 3,
        [0] * 3,
        [50] * 3,
    ]
    assert datasets.load(own(tmp_path, channels=1), node="d").train_images.shape == (3, 1, 6, 8)
    normalised = datasets.load(own(tmp_path), node="d").normaliser()(
        torch.full((1, 3, 6, 8), 255, dtype=torch.uint8)
    )
    assert (normalised == 1).all()


def test_a_class_that_is_not_listed(tmp_path: Path) -> None:
    picture(tmp_path / "train" / "cat" / "a.png", (1, 2, 3))
    picture(tmp_path / "train" / "Dog" / "a.png", (1, 2, 3))
    refused(own(tmp_path), node="device-0", match=r"data\.classes = .*also has Dog")


def test_missing_or_empty_folders_name_the_layout(tmp_path: Path) -> None:
    refused(
        own(tmp_path),
        node="device-0",
        match=r"not found: .*/train/<class>/\*\.png with the classes dog, cat",
    )
    refused(own(tmp_path), match=r"not found: .*/test/<class>")
    (tmp_path / "train" / "cat").mkdir(parents=True)
    refused(own(tmp_path), node="device-0", match=r"no image in .*/train")


def split(root: Path, **more: Any) -> Data:
    return own(root, **{"partition": "iid", **more})


def both_parts(root: Path) -> None:
    """Write an image of each class into both parts."""
    for place, name in enumerate(CLASSES):
        for part in ("train", "test"):
            picture(root / part / name / "0.png", (place, 0, 0))


def reds(images: torch.Tensor) -> list[int]:
    return images[:, 0, 0, 0].tolist()


def test_images_below_a_class_are_its_own_in_the_order_of_torchvision(tmp_path: Path) -> None:
    both_parts(tmp_path)
    train, elsewhere = tmp_path / "train", tmp_path / "elsewhere"
    names = (
        "cat/b/1.png cat/a-b/2.png cat/a/3.png cat/a/z/4.png cat/10.png cat/9.PNG dog/only/5.png"
    )
    for place, name in enumerate(names.split()):
        picture(train / name, (10 + place, 0, 0))
    picture(elsewhere / "more" / "1.png", (99, 0, 0))
    (train / "dog" / "linked").symlink_to(elsewhere, target_is_directory=True)
    (train / "dog" / "0.png").unlink()
    found = datasets.load(split(tmp_path))
    wanted = []
    for name in CLASSES:  # as torchvision.datasets.folder.make_dataset, whose import takes seconds
        for folder, _, files in sorted(os.walk(train / name, followlinks=True)):
            wanted += [
                Image.open(Path(folder) / file).getpixel((0, 0))[0] for file in sorted(files)
            ]  # type: ignore[index]
    assert reds(found.train_images) == wanted
    assert found.train_labels.tolist() == [0] * 2 + [1] * 7 and found.notes == ()


def test_what_systems_leave_beside_images_does_not_count(tmp_path: Path) -> None:
    both_parts(tmp_path)
    for name in (
        "train/.DS_Store",
        "train/cat/.DS_Store",
        "train/cat/Thumbs.db",
        "train/dog/desktop.ini",
    ):
        (tmp_path / name).write_bytes(b"\0")
    for name in (
        "train/cat/._0.png",
        "train/._cat",
        "test/__MACOSX/cat/._0.png",
        "train/@eaDir/x/0.jpg",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"\0\5\x16\7")
    for name in ("train/.ipynb_checkpoints", "train/cat/@eaDir/0.png", "train/cat/.thumbnails"):
        picture(tmp_path / name / "a.png", (7, 7, 7))
    found = datasets.load(split(tmp_path))
    assert reds(found.train_images) == [0, 1] and found.notes == ()


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    both_parts(tmp_path)
    train = tmp_path / "train"
    for name in ("labels.csv", "cat/notes.txt", "cat/1.heic", "dog/deep/0.npy"):
        (train / name).parent.mkdir(exist_ok=True)
        (train / name).write_text("no image")
    picture(train / "stray.png", (9, 9, 9))
    picture(train / "cat" / ".hidden.png", (9, 9, 9))
    (train / "cat" / "again").symlink_to("../cat")
    (train / "cat" / "up").symlink_to("../../..")
    (train / "cat" / "others").symlink_to("../dog")
    os.mkfifo(train / "dog" / "pipe.png")
    found = datasets.load(split(tmp_path))
    assert reds(found.train_images) == [0, 1]
    assert found.notes == (
        f"{train}: 10 files and links are not read: labels.csv, stray.png, dog/deep/0.npy and 7 "
        "more. Names of images"
        " end in .jpg, .jpeg, .png, .ppm, .bmp, .pgm, .tif, .tiff, .webp, .gif",
    )


def test_a_folder_with_several_links_is_read_once(tmp_path: Path) -> None:
    both_parts(tmp_path)
    for place in range(3):
        picture(tmp_path / "album" / f"{place}.png", (50 + place, 0, 0))
    for name in ("b", "a"):
        (tmp_path / "train" / "cat" / name).symlink_to(tmp_path / "album", target_is_directory=True)
    found = datasets.load(split(tmp_path))
    assert (
        reds(found.train_images) == [0, 1, 50, 51, 52]
        and "1 file or link is not read: cat/b." in found.notes[0]
    )


def test_nodes_that_list_a_folder_in_another_order_have_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_parts(tmp_path)
    names = "cat/x/1.png cat/x-y/2.png cat/a/b/3.png dog/9.png dog/10.png"
    for place, name in enumerate(names.split()):
        picture(tmp_path / "train" / name, (10 + place, 0, 0))
    (tmp_path / "train" / "cat" / "n.txt").write_text("no image")
    (tmp_path / "train" / "cat" / "k").symlink_to("x")
    (tmp_path / "train" / "cat" / "z").symlink_to("x")
    listing, found = Path.iterdir, []
    for step in (1, -1):
        monkeypatch.setattr(
            Path, "iterdir", lambda path, step=step: iter(sorted(listing(path))[::step])
        )
        datasets._load.cache_clear()
        found.append(datasets.load(split(tmp_path)))
    assert all(
        torch.equal(one.train_images, found[0].train_images) and one.notes == found[0].notes
        for one in found
    )
    assert (
        reds(found[0].train_images) == [0, 14, 13, 1, 12, 10, 11]
        and "3 files and links" in found[0].notes[0]
    )


@pytest.mark.parametrize(
    ("removed", "added", "problem"),
    [
        (
            "train/cat/0.png",
            [],
            r"data\.classes = 'cat': no image in .*/train/cat\. Put its images there, or remove",
        ),
        ("train/cat", [], r"data\.classes = 'cat': no image in .*/train/cat\."),
        ("test/dog/0.png", [], r"data\.classes = 'dog': no image in .*/test/dog\."),
        (
            "train/cat/0.png",
            ["train/cat/1.heic", "train/cat/a/2.heic"],
            r"/cat, but cat/1\.heic, cat/a/2\.heic\.",
        ),
    ],
)
def test_a_class_without_images_is_refused(
    tmp_path: Path, removed: str, added: list[str], problem: str
) -> None:
    both_parts(tmp_path)
    if (tmp_path / removed).is_dir():
        shutil.rmtree(tmp_path / removed)
    else:
        (tmp_path / removed).unlink()
    for name in added:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("no image")
    with pytest.raises(InvalidExperiment, match=problem) as refused:
        datasets.load(split(tmp_path))
    assert refused.value.exit_code == 4


def test_a_class_that_only_the_training_samples_have_is_named(tmp_path: Path) -> None:
    both_parts(tmp_path)
    shutil.rmtree(tmp_path / "test" / "dog")
    assert datasets.load(split(tmp_path)).notes == (
        "folder: no test sample has these classes of the training samples: 'dog'",
    )


def test_a_device_may_lack_a_class_but_not_its_images(tmp_path: Path) -> None:
    picture(tmp_path / "train" / "cat" / "a.png", (1, 2, 3))
    assert datasets.load(own(tmp_path), node="device-0").train_labels.tolist() == [1]
    (tmp_path / "train" / "dog").mkdir()
    refused(own(tmp_path, noise=0.1), node="device-0", match=r"data\.classes = 'dog': no image in")


def save(path: Path, pixels: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def test_a_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_parts(tmp_path)
    picture(tmp_path / "train" / "cat" / "secret" / "1.png", (1, 2, 3))
    listing = Path.iterdir

    def refusing(path: Path) -> Iterator[Path]:
        if path.name == "secret":  # root could list it
            raise PermissionError(13, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr(Path, "iterdir", refusing)
    refused(
        split(tmp_path), match=r"data\.root = '.*/train/cat/secret': Permission denied\. Make it"
    )


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    both_parts(tmp_path)
    (tmp_path / "train" / "cat" / "gone.png").symlink_to("nowhere.png")
    refused(
        split(tmp_path), match=r"gone\.png': this file is not an image .*No such file.* Replace it"
    )


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_pixels_of_an_unknown_range_are_refused(tmp_path: Path, kind: Any) -> None:
    save(tmp_path / "train" / "dog" / "a.tiff", np.full((6, 8), 1, kind))
    refused(
        own(tmp_path),
        node="device-0",
        match=r"a\.tiff': this .* range is unknown: convert it to 8 or 16",
    )


def test_images_of_16_bits_keep_their_higher_half(tmp_path: Path) -> None:
    save(tmp_path / "train" / "dog" / "a.png", np.full((6, 8), 200 * 256 + 3, np.uint16))
    save(tmp_path / "train" / "dog" / "b.tiff", np.full((6, 8), 100 * 256 + 255, np.uint16))
    picture(tmp_path / "train" / "cat" / "c.png", (50, 0, 0))
    found = datasets.load(own(tmp_path), node="device-0")
    assert reds(found.train_images) == [200, 100, 50] and found.notes == ()
    for name, value in (("a.png", 4095), ("b.tiff", 17)):
        save(tmp_path / "train" / "dog" / name, np.full((6, 8), value, np.uint16))
    dark = datasets.load(own(tmp_path, noise=0.1), node="device-0")
    assert dark.notes == (
        f"{tmp_path}/train: no pixel of its 16-bit images is above 4095 of 65535: they are nearly "
        "black",
    )


@pytest.mark.parametrize(
    ("mode", "colour", "wanted"),
    [
        ("1", 1, [255, 255, 255]),
        ("LA", (90, 0), [90, 90, 90]),
        ("CMYK", (255, 0, 255, 0), [0, 255, 0]),
        ("YCbCr", (76, 85, 255), [254, 0, 0]),
    ],
)
def test_images_of_any_mode_become_colours(
    tmp_path: Path, mode: str, colour: Any, wanted: list[int]
) -> None:
    end = "tiff" if mode in ("CMYK", "YCbCr") else "png"
    picture(tmp_path / "train" / "dog" / f"a.{end}", colour, mode=mode)
    found = datasets.load(own(tmp_path), node="device-0").train_images
    assert np.abs(found[0, :, 0, 0].numpy().astype(int) - wanted).max() <= 1


@pytest.mark.parametrize("raw", [b"", b"no image", None])
def test_a_damaged_image_is_named(tmp_path: Path, raw: bytes | None) -> None:
    path = tmp_path / "train" / "cat" / "a.png"
    picture(path, (1, 2, 3), size=(200, 200))
    path.write_bytes(path.read_bytes()[:-60] if raw is None else raw)
    refused(own(tmp_path), node="device-0", match=r"a\.png.*this file is not an image")


def synthetic(**more: Any) -> Data:
    tree = {
        "dataset": "synthetic",
        "classes": 4,
        "image_shape": [1, 8, 8],
        "samples": 50,
        "test_samples": 10,
        **more,
    }
    return parse({"data": tree}).data


def test_made_up_images_have_the_size_that_is_asked_for_and_are_always_alike() -> None:
    data = datasets.load(synthetic())
    assert data.train_images.shape == (50, 1, 8, 8) and data.test_images.shape == (10, 1, 8, 8)
    assert data.inputs == Inputs((1, 8, 8), 4) and np.bincount(data.train_labels).tolist() == [
        13,
        13,
        12,
        12,
    ]
    assert data.train_images.double().sum() == 412690
    larger = datasets.load(synthetic(samples=9000))
    assert torch.equal(larger.train_images[:50], data.train_images)
    refused(
        synthetic(samples=10_000_000, image_shape=[3, 64, 64]), match=r"data\.samples.*take 123 GB"
    )


def test_made_up_images_can_be_distinguished() -> None:
    data = datasets.load(synthetic(samples=400, test_samples=100))
    module = models.build("mlp_digits", 1, inputs=data.inputs)
    images = data.normaliser()(data.train_images)
    for _ in range(30):
        module.zero_grad()
        torch.nn.functional.cross_entropy(module(images), data.train_labels).backward()
        with torch.no_grad():  # an optimiser would import sympy
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
    found = evaluate(module, data.test_images, labels=data.test_labels, normalise=data.normaliser())
    assert found.score > 0.9


def test_a_hosts_own_folder_takes_the_place_of_the_experiments(tmp_path: Path) -> None:
    picture(tmp_path / "device-0" / "train" / "dog" / "a.png", (1, 2, 3))
    data = own("elsewhere")
    experiment = parse({"data": data.model_dump(mode="json")})
    here = experiment.with_data_root(str(tmp_path / "{node}"))
    assert datasets.load(here.data, node="device-0").train_labels.tolist() == [0]
    assert here.with_data_root(data.root).to_json() == experiment.to_json()


def test_the_data_sets_of_a_folder(tmp_path: Path) -> None:
    assert found_in(tmp_path) == []
    for name in ("MNIST", "cifar-100-python", "notes"):
        (tmp_path / name).mkdir()
    assert found_in(tmp_path) == ["mnist", "cifar100"]
