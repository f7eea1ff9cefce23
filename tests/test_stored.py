"""Data sets that processes share: made once, mapped by all, and made anew when they are stale or
damaged.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedstrata.common.experiment.reading import parse
from fedstrata.common.learning import datasets, stored
from fedstrata.common.learning.stored import Stored
from fedstrata.common.settings.data import Data
from tests.helpers.mnist import write_mnist

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fedstrata" / "data"


class Maker:
    """Makes something of each kind, and counts how often."""

    def __init__(self, value: int = 1) -> None:
        self.value = value
        self.made = 0

    def __call__(self) -> Stored:
        self.made += 1
        tensors = {
            "bytes": torch.full((5, 3), self.value, dtype=torch.uint8),
            "floats": torch.arange(7, dtype=torch.float32) + self.value,
            "integers": torch.arange(4) + self.value,
            "none": torch.zeros(0, 2, dtype=torch.int64),
        }
        return Stored(tensors, {"names": ["a", "b"], "value": self.value})


def assert_same(one: Stored, other: Stored) -> None:
    assert one.facts == other.facts and one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype and torch.equal(
            tensor, other.tensors[name]
        ), name


def test_made_once_and_found_by_its_digest(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    make = Maker()
    for _ in range(3):
        assert_same(stored.shared("d", make), Maker()())
    assert make.made == 1 and [path.name for path in place.glob("d*")] == ["d.safetensors"]
    assert_same(stored.shared("e", Maker(2)), Maker(2)())
    for tensor in stored.shared("d", make).tensors.values():
        assert tensor.data_ptr() % tensor.element_size() == 0
    assert caplog.text == ""


def test_who_comes_while_it_is_made_waits() -> None:
    begun, go_on = threading.Event(), threading.Event()
    make = Maker()

    def slowly() -> Stored:
        begun.set()
        assert go_on.wait(30)
        return make()

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(stored.shared, "d", slowly)]
        assert begun.wait(30)
        found += [pool.submit(stored.shared, "d", make) for _ in range(3)]
        go_on.set()
        for each in found:
            assert_same(each.result(), Maker()())
    assert make.made == 1


def test_a_write_reaches_nobody_else() -> None:
    mine, theirs = stored.shared("d", Maker()), stored.shared("d", Maker())
    mine.tensors["bytes"].add_(1)
    assert_same(theirs, Maker()())
    assert_same(stored.shared("d", Maker()), Maker()())


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:-1],
        lambda raw: raw + b"\0",
        lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
        lambda raw: b"\xff" * 64,
        lambda raw: raw.replace(b'value\\\\": 1', b'value\\\\": 2').replace(
            b'value\\": 1', b'value\\": 2'
        ),
    ],
)
def test_what_is_damaged_is_made_anew(
    damage: Callable[[bytes], bytes], place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = Maker()
    stored.shared("d", make)
    path = place / "d.safetensors"
    raw = path.read_bytes()
    assert damage(raw) != raw
    path.write_bytes(damage(raw))
    assert_same(stored.shared("d", make), Maker()())
    assert_same(stored.shared("d", make), Maker()())
    assert make.made == 2 and "is damaged" in caplog.text


def test_without_a_folder_each_keeps_its_own(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    place.parent.mkdir()
    place.write_text("a file where the folder should be")  # root may write into any folder
    make = Maker()
    for _ in range(2):
        assert_same(stored.shared("d", make), Maker()())
    assert make.made == 2 and "its own copy of the data: /" in caplog.text


def test_a_full_disk_costs_no_second_reading(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stored.os, "replace", full)
    make = Maker()
    assert_same(stored.shared("d", make), Maker()())
    assert make.made == 1 and not list(place.glob("*.safetensors"))


def test_those_that_were_not_used_for_longest_go_first(
    monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    for age, name in enumerate(("young", "old", "oldest")):
        stored.shared(name, Maker())
        os.utime(place / f"{name}.safetensors", (1e9 - age, 1e9 - age))
    size = (place / "old.safetensors").stat().st_size
    (place / "killed.partial").write_text("half")
    stored.shared("oldest", Maker())  # used now
    monkeypatch.setattr(stored, "MOST_BYTES", 3 * size)
    stored.shared("new", Maker())
    assert {path.stem for path in place.glob("*.safetensors")} == {"oldest", "young", "new"}
    assert not list(place.glob("*.partial"))


def test_the_digest_is_of_facts_and_files(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("one")
    first = stored.digest_of({"noise": 0.0}, [path])
    assert (
        first
        == stored.digest_of({"noise": 0.0}, [path])
        != stored.digest_of({"noise": 0.1}, [path])
    )
    os.utime(path, ns=(1, 1))
    touched = stored.digest_of({"noise": 0.0}, [path])
    path.write_text("longer")
    os.utime(path, ns=(1, 1))
    assert (
        len(
            {
                first,
                touched,
                stored.digest_of({"noise": 0.0}, [path]),
                stored.digest_of({"noise": 0.0}, []),
            }
        )
        == 4
    )


def cifar_sized(samples: int = 4000, **more: object) -> Data:
    tree = {
        "dataset": "synthetic",
        "image_shape": [3, 32, 32],
        "classes": 10,
        "samples": samples,
        "test_samples": 10,
    }
    return parse({"data": tree | more}).data


LOAD = """
import re, sys
from fedstrata.common.learning import datasets
from fedstrata.common.experiment.reading import parse
print("ready", flush=True)
sys.stdin.readline()
data = datasets.load(parse(sys.argv[1]).data)
print(int(data.train_images.sum()), flush=True)
sys.stdin.read()
"""


def mapped_bytes(pid: int | str, path: Path) -> tuple[int, int]:
    """Return how many bytes of the file a process has mapped, and how many of them are its own."""
    part = Path(f"/proc/{pid}/smaps").read_text().partition(str(path))[2]
    found = [
        int(re.search(rf"^{key}: +(\d+) kB", part, re.MULTILINE)[1]) << 10
        for key in ("Size", "Anonymous")
    ]  # type: ignore[index]
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_processes_that_start_at_once_make_a_set_once_and_share_it(
    place: Path, tmp_path: Path
) -> None:
    data = cifar_sized()
    experiment = parse({"data": data.model_dump()}).to_json()
    command = [sys.executable, "-c", LOAD, experiment]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    ) as other:
        assert other.stdin and other.stdout and other.stdout.readline() == "ready\n"
        other.stdin.write("load\n")
        other.stdin.flush()
        images = datasets.load(data).train_images
        assert other.stdout.readline() == f"{int(images.sum())}\n"
        (path,) = place.glob("*.safetensors")
        for process in (other.pid, "self"):
            size, own = mapped_bytes(process, path)
            assert size >= 4010 * 3072 and own == 0
        born = path.stat().st_ino
        datasets._load.cache_clear()
        datasets.load(data)
        assert path.stat().st_ino == born


def test_the_set_is_the_one_that_is_not_stored(
    monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    data = cifar_sized(samples=50, noise=0.1)
    monkeypatch.setattr(stored, "SMALL_BYTES", 1)
    shared = datasets.load(data)
    assert len(list(place.glob("*.safetensors"))) == 1
    monkeypatch.setattr(stored, "SMALL_BYTES", 1 << 40)
    datasets._load.cache_clear()
    own = datasets.load(data)
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        one, other = getattr(shared, name), getattr(own, name)
        assert one.dtype == other.dtype and np.array_equal(one.numpy(), other.numpy())
    assert shared.inputs == own.inputs


def test_small_sets_are_not_stored_and_the_split_does_not_matter(place: Path) -> None:
    datasets.load(cifar_sized(samples=100))
    datasets.load(parse({}).data)
    assert not place.exists()
    for split in ({}, {"partition": "dirichlet", "concentration": 0.1}):
        datasets.load(cifar_sized(samples=3999, **split))
    assert len(list(place.glob("*.safetensors"))) == 1


def test_another_file_makes_it_stale(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "SMALL_BYTES", 1)
    data = parse({"data": {"dataset": "mnist", "root": str(tmp_path)}}).data
    for seed in (1, 2):
        arrays = write_mnist(tmp_path, [3, 4], [3, 4], seed=seed)
        for path in tmp_path.glob("MNIST/raw/*"):
            os.utime(path, (seed, seed))
        datasets._load.cache_clear()
        assert np.array_equal(
            datasets.load(data).train_images[:, 0], arrays["train-images-idx3-ubyte"]
        )
    assert len(list(place.glob("*.safetensors"))) == 2


def test_an_image_behind_a_link_makes_it_stale_and_its_notes_are_kept(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "SMALL_BYTES", 1)
    tree = {
        "dataset": "folder",
        "root": str(tmp_path / "root"),
        "classes": ["a"],
        "image_shape": [1, 2, 2],
    }
    for name in ("root/train/a/0.png", "root/test/a/0.png", "album/1.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2), 7).save(tmp_path / name)
    (tmp_path / "root" / "train" / "a" / "notes.txt").write_text("no image")
    (tmp_path / "root" / "train" / "a" / "album").symlink_to(
        tmp_path / "album", target_is_directory=True
    )
    data = parse({"data": tree}).data
    for colour in (7, 9):
        Image.new("L", (2, 2), colour).save(tmp_path / "album" / "1.png")
        os.utime(tmp_path / "album" / "1.png", (colour, colour))
        for _ in range(2):  # made, and found
            datasets._load.cache_clear()
            found = datasets.load(data)
            assert found.train_images[:, 0, 0, 0].tolist() == [7, colour]
            assert (
                len(found.notes) == 1
                and "1 file or link is not read: a/notes.txt." in found.notes[0]
            )
    assert len(list(place.glob("*.safetensors"))) == 2
