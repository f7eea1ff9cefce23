"""Images of a node's own, and made-up ones: what is read, by whom, and what is said when it is not right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from common.errors import InvalidExperiment
from common.experiment.data import Data, found_in
from common.experiment.reading import parse
from common.learning import datasets, models
from common.learning.evaluation import evaluate
from common.learning.inputs import Inputs

CLASSES = ["dog", "cat"]


def picture(path: Path, colour: Any, *, size: tuple[int, int] = (8, 6), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def own(root: Path | str, *, channels: int = 3, **more: Any) -> Data:
    tree = {"dataset": "folder", "root": str(root), "classes": CLASSES, "image_shape": [channels, 6, 8]}
    return parse({"data": {**tree, "partition": "natural", **more}}).data


def test_a_device_reads_its_training_images_and_the_cloud_its_test_images(tmp_path: Path) -> None:
    picture(tmp_path / "device-0" / "train" / "cat" / "b.png", (1, 2, 3))
    picture(tmp_path / "device-0" / "train" / "cat" / "a.PNG", (4, 5, 6))
    picture(tmp_path / "device-0" / "train" / "dog" / "c.png", (7, 8, 9))
    (tmp_path / "device-0" / "train" / "cat" / "notes.txt").write_text("not an image")
    picture(tmp_path / "device-1" / "train" / "cat" / "d.png", (10, 11, 12))
    picture(tmp_path / "cloud" / "test" / "dog" / "e.png", (13, 14, 15))
    data = own(tmp_path / "{node}")
    first, second, cloud = (datasets.load(data, node=node) for node in ("device-0", "device-1", "cloud"))
    assert first.train_images.shape == (3, 3, 6, 8) and first.inputs == cloud.inputs == Inputs((3, 6, 8), 2)
    assert first.train_images[:, :, 0, 0].tolist() == [[7, 8, 9], [4, 5, 6], [1, 2, 3]]
    assert first.train_labels.tolist() == [0, 1, 1]  # in the order of the list, then of the names
    assert second.train_labels.tolist() == [1] and not len(second.test_labels)
    assert cloud.test_images[0, :, 0, 0].tolist() == [13, 14, 15] and not len(cloud.train_labels)


def test_images_are_brought_into_the_shape_that_all_agree_on(tmp_path: Path) -> None:
    picture(tmp_path / "train" / "dog" / "grey.png", 100, mode="L", size=(16, 12))
    picture(tmp_path / "train" / "dog" / "palette.png", 0, mode="P")
    picture(tmp_path / "train" / "dog" / "transparent.png", (50, 50, 50, 0), mode="RGBA")
    assert datasets.load(own(tmp_path), node="d").train_images[:, :, 0, 0].tolist() == [[100] * 3, [0] * 3, [50] * 3]
    assert datasets.load(own(tmp_path, channels=1), node="d").train_images.shape == (3, 1, 6, 8)
    normalised = datasets.load(own(tmp_path), node="d").normaliser()(torch.full((1, 3, 6, 8), 255, dtype=torch.uint8))
    assert (normalised == 1).all()


def test_a_class_that_is_not_listed(tmp_path: Path) -> None:
    picture(tmp_path / "train" / "cat" / "a.png", (1, 2, 3))
    picture(tmp_path / "train" / "Dog" / "a.png", (1, 2, 3))
    with pytest.raises(InvalidExperiment, match=r"data\.classes = .*also has Dog"):
        datasets.load(own(tmp_path), node="device-0")


def test_missing_or_empty_folders_name_the_layout(tmp_path: Path) -> None:
    with pytest.raises(InvalidExperiment, match=r"not found: .*/train/<class>/\*\.png with the classes dog, cat"):
        datasets.load(own(tmp_path), node="device-0")
    with pytest.raises(InvalidExperiment, match=r"not found: .*/test/<class>"):
        datasets.load(own(tmp_path))
    (tmp_path / "train" / "cat").mkdir(parents=True)
    with pytest.raises(InvalidExperiment, match=r"no image in .*/train"):
        datasets.load(own(tmp_path), node="device-0")


@pytest.mark.parametrize("raw", [b"", b"no image", None])
def test_a_damaged_image_is_named(tmp_path: Path, raw: bytes | None) -> None:
    path = tmp_path / "train" / "cat" / "a.png"
    picture(path, (1, 2, 3), size=(200, 200))
    path.write_bytes(path.read_bytes()[:-60] if raw is None else raw)
    with pytest.raises(InvalidExperiment, match=r"a\.png.*this file is not an image"):
        datasets.load(own(tmp_path), node="device-0")


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"classes": None}, "classes"),
        ({"classes": 2}, "classes"),
        ({"classes": ["a", "a"]}, "classes"),
        ({"classes": ["../elsewhere"]}, "classes"),
        ({"classes": ["a/b"]}, "classes"),
        ({"image_shape": [2, 6, 8]}, "image_shape"),
        ({"image_shape": [3, 6]}, "image_shape"),
        ({"dataset": "mnist"}, "partition"),
        ({"dataset": "synthetic", "partition": "iid"}, "classes"),
    ],
)
def test_what_the_experiment_must_say(data: dict[str, Any], key: str) -> None:
    tree = {"dataset": "folder", "classes": CLASSES, "partition": "natural", **data}
    with pytest.raises(InvalidExperiment, match=rf"^data\.{key}"):
        parse({"data": tree})


def synthetic(**more: Any) -> Data:
    tree = {"dataset": "synthetic", "classes": 4, "image_shape": [1, 8, 8], "samples": 50, "test_samples": 10, **more}
    return parse({"data": tree}).data


def test_made_up_images_have_the_size_that_is_asked_for_and_are_always_alike() -> None:
    data = datasets.load(synthetic())
    assert data.train_images.shape == (50, 1, 8, 8) and data.test_images.shape == (10, 1, 8, 8)
    assert data.inputs == Inputs((1, 8, 8), 4) and np.bincount(data.train_labels).tolist() == [13, 13, 12, 12]
    assert data.train_images.double().sum() == 412690
    larger = datasets.load(synthetic(samples=9000))
    assert torch.equal(larger.train_images[:50], data.train_images)
    with pytest.raises(InvalidExperiment, match=r"data\.samples.*take 123 GB"):
        datasets.load(synthetic(samples=10_000_000, image_shape=[3, 64, 64]))


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
