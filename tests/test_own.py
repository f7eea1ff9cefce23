"""docs/own-*.md: their files and commands, run as they stand there; and what own data sets may
return.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from PIL import Image

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.host.processes import free_port, python
from fedstrata.common.learning import datasets
from fedstrata.common.learning.datasets import Dataset
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.settings.own import permit
from fedstrata.deploy.results.run import Run, folders
from tests.helpers.commands import fedstrata, folder_in, invoke, table
from tests.helpers.own_page import FILES, PAGES

COMMANDS: Final = [
    re.split(r"\s+#", line)[0]
    for block in re.findall(r"^```sh\n(.*?)^```", PAGES, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
LINES_MOST: Final = 40
PATIENCE_S: Final = 90.0


@pytest.fixture
def flats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the page, as the current one."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "make_table.py"], check=True)
    return tmp_path


def test_the_page_is_short() -> None:
    own = FILES["flats.py"] + FILES["flats.toml"]
    assert sum(bool(line.strip()) for line in own.splitlines()) <= LINES_MOST


def test_the_files_of_the_page_are_enough_for_a_run_in_one_process(flats: Path) -> None:
    checked, split, direct = (
        line for line in COMMANDS if "flats.toml" in line and "cloud" not in line
    )
    for line in (checked, split):
        done = invoke(*shlex.split(line)[1:])
        assert done.exit_code == 0, done.stderr
    done = invoke(*shlex.split(direct)[1:], "--format", "json")
    assert done.exit_code == 0, done.stderr
    run = Run(folder_in(done.stdout))
    assert (run.experiment.score.name, run.experiment.score.higher) == ("r2", True)
    assert run.score is not None and run.score > 0.8 and run.accuracy is None
    rows = table(run.path / "rounds.csv")
    assert not any(row["accuracy"] for row in rows) and float(rows[-1]["score"]) == pytest.approx(
        run.score, rel=1e-5
    )
    frame = [row.values() for row in run.rounds]
    assert (
        frame[-1]["score"] == pytest.approx(run.score, rel=1e-5) and frame[-1]["accuracy"] is None
    )
    listed = json.loads(invoke("runs", "list", "--format", "json").stdout)
    assert (listed["score_name"], listed["score"], listed["accuracy"]) == (
        "r2",
        pytest.approx(run.score),
        None,
    )
    assert invoke("report", run.path).exit_code == 0
    page = (run.path / "report.html").read_text()
    assert (
        "R2 over time" in page
        and "test r2" in page
        and "ccuracy" not in re.sub(r'accuracy"?[ =:,]', "", page)
    )
    costs = invoke("compare", run.path, "--target", "0.5", "--format", "json")
    assert costs.exit_code == 0 and json.loads(costs.stdout)["groups"][0]["reached"] == 1, (
        costs.stderr
    )


@pytest.mark.slow
def test_the_other_loss_and_score_of_the_page_run(flats: Path) -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```", PAGES, re.MULTILINE | re.DOTALL)
    other = next(tomllib.loads(block) for block in blocks if "pinball:pinball" in block)
    keys = {
        "training.loss": other["training"]["loss"],
        "score": '{ name = "pinball:covered", better = "higher" }',
    }
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    done = fedstrata(
        "run", "flats.toml", "--direct", "--format", "json", "--set", "rounds=2", *sets
    )
    assert done.returncode == 0, done.stderr
    run = Run(folder_in(done.stdout))
    assert run.score is not None and 0 < run.score <= 1 and run.experiment.score.label == "covered"


@contextmanager
def terminals(
    lines: list[str], folder: Path, env: dict[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run each line in a process of its own, and end all at the end."""
    program = str(Path(sys.executable).with_name("fedstrata"))
    logs = [folder / f"{number}.log" for number in range(len(lines))]
    started = []
    try:
        for line, log in zip(lines, logs, strict=True):
            with log.open("wb") as output:
                command = [program, *shlex.split(line)[1:]]
                started.append(
                    subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)
                )
        yield started
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


@pytest.mark.slow
def test_the_lab_of_the_page_runs_in_terminals(flats: Path) -> None:
    port = str(free_port())
    env = {**os.environ, "FEDSTRATA_BROKER": f"127.0.0.1:{port}"}
    env.pop("PYTHONPATH", None)
    begin = COMMANDS.index("fedstrata broker")
    lab = COMMANDS[begin : COMMANDS.index("fedstrata cloud flats.toml", begin) + 1]
    assert len(lab) == 8
    with terminals([f"{lab[0]} --port {port}", *lab[1:]], flats, env) as processes:
        assert processes[-1].wait(PATIENCE_S) == 0, (flats / "7.log").read_text()
    (path,) = folders(flats / "runs")
    run = Run(path)
    assert run.score is not None and run.score > 0.8
    direct = fedstrata("run", "flats.toml", "--direct", "--format", "json")
    assert [row.score for row in Run(folder_in(direct.stdout)).rounds] == [
        row.score for row in run.rounds
    ]


def test_a_file_named_as_a_room_of_fedstratas_replaces_nothing(flats: Path) -> None:
    for name in ("device", "cloud", "common", "deploy"):
        (flats / f"{name}.py").write_text("raise SystemExit('mine')\n")
    done = subprocess.run(
        [*python("fedstrata"), "--version"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


LOADERS: Final = """
import numpy as np
import torch
from torch.utils.data import TensorDataset
from fedstrata.common.learning.readers.reader_result import Parts

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6) % 2

class Pairs:
    def __init__(self, *pairs): self.pairs = pairs
    def __len__(self): return len(self.pairs)
    def __getitem__(self, i): return self.pairs[i]

def arrays(): return (X.double().numpy(), Y.numpy().astype(np.int8)), (X[:2].numpy(), [1, 0])
def tensors(*, root): return (X, Y), (X[:2], Y[:2])
def sets(): return TensorDataset(X, Y), TensorDataset(X[:2], Y[:2])
def users(): return (X, Y, list("babaab")), (X[:2], Y[:2])
def many(): return (X, torch.stack([Y, 1 - Y], 1)), (X[:2], torch.ones(2, 2))
def series(): return (torch.ones(6, 3, 4, 5, 2), Y), (torch.ones(1, 3, 4, 5, 2), Y[:1])
def mine(*, node): return None if node == "cloud" else (X[int(node[-1]):], Y[int(node[-1]):]), (X[:1], Y[:1])

def one(): return X, Y
def ragged(): return Pairs((X[0], 1), (X[0, :1], 1)), Pairs((X[0], 1))
def single(): return Pairs(X[0]), Pairs((X[0], 1))
def broken(): return Pairs((X[0], 1), None), None
def texts(): return (np.array([["a"]]), [1]), (np.array([["a"]]), [1])
def shorter(): return (X, Y[:5]), (X, Y)
def failing(*, root): return open(root / "absent")
def other(*, folder): return sets()
def wider(): return (X, Y), (X[:, :1], Y)
def nothing(): return None, None
def lists(): return ([[1.0], [2.0, 3.0]], [0, 1]), None

IMAGES = np.zeros((4, 1, 2, 2), np.uint8)

def parts(*, train=IMAGES, labels=np.arange(4), test=IMAGES[:2], **more):
    return Parts(train, labels, test, np.arange(2), **{"classes": 4, **more})

def pixels(): return parts(train=np.full((4, 1, 2, 2), 255, np.uint8), labels=np.arange(4, dtype=np.int32))
def owned(): return parts(users=("a", "b"), owners=np.array([0, 1, 1, 0]))
def tokens(): return parts(train=np.full((4, 3), 6), test=np.zeros((2, 3), np.int64), tokens=7)
def double(): return parts(train=np.zeros((4, 1, 2, 2)), test=np.zeros((2, 1, 2, 2), np.float16))

def empty(): return None
def flat(): return parts(train=np.zeros((4, 4), np.uint8))
def mixed(): return parts(train=np.zeros((4, 1, 2, 2), np.float32))
def beyond(): return parts(labels=np.arange(1, 5))
def strange(): return parts(train=np.full((4, 3), 7), test=np.zeros((2, 3), np.int64), tokens=7)
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Dataset]:
    """A function that loads a data set by the name of its function."""
    (tmp_path / "loaders.py").write_text(LOADERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def read(name: str, node: str = "cloud", **more: Any) -> Dataset:
        data = {"dataset": f"loaders:{name}", "root": str(tmp_path), **more}
        return datasets.load(parse({"data": data}).data, node=node)

    return read


@pytest.mark.parametrize("name", ["arrays", "tensors", "sets", "users"])
def test_own_data_are_arrays_tensors_or_data_sets(name: str, load: Callable[..., Dataset]) -> None:
    found = load(name)
    assert found.inputs == Inputs((2,), 2) and found.train_images.dtype == torch.float32
    assert found.train_images.tolist() == np.arange(12).reshape(6, 2).tolist()
    assert found.train_labels.tolist() == [0, 1] * 3 and len(found.test_labels) == 2
    if name == "users":
        assert (
            found.users == ("a", "b")
            and found.owners is not None
            and found.owners.tolist() == [1, 0, 1, 0, 0, 1]
        )


def test_own_numbers_own_shapes_and_own_data_of_each_device(load: Callable[..., Dataset]) -> None:
    assert load("many", targets="numbers").inputs == Inputs((2,), 2, numbers=True)
    assert load("tensors", targets="numbers").inputs == Inputs((2,), 1, numbers=True)
    assert load("series").inputs == Inputs((3, 4, 5, 2), 2)
    nodes = ("cloud", "device-0", "device-3")
    found = [load("mine", node, partition="private", classes=2) for node in nodes]
    assert [(len(each.train_labels), len(each.test_labels)) for each in found] == [
        (0, 1),
        (6, 1),
        (3, 1),
    ]


def test_own_data_are_parts_of_images_texts_or_arrays(load: Callable[..., Dataset]) -> None:
    pixels, owned, tokens = (load(name) for name in ("pixels", "owned", "tokens"))
    assert pixels.inputs == Inputs((1, 2, 2), 4) and pixels.train_labels.dtype == torch.int64
    assert torch.equal(pixels.normaliser()(pixels.train_images), torch.ones(4, 1, 2, 2))
    assert load("double").train_images.dtype == torch.float32
    assert tokens.inputs == Inputs((3,), 4, 7) and tokens.train_images.dtype == torch.int64
    assert (
        owned.users == ("a", "b")
        and owned.owners is not None
        and owned.owners.tolist() == [0, 1, 1, 0]
    )


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("absent", "cannot be imported"),
        ("empty", "returns NoneType.*Return two pairs of samples and targets"),
        ("other", "needs folder, which is none of root, node"),
        ("failing", "fails with FileNotFoundError"),
        ("flat", r"has samples of uint8 \[4, 4\]\. Convert them"),
        ("mixed", r"training and test samples of float32 \[4, 1, 2, 2\] and uint8 \[2, 1, 2, 2\]"),
        ("strange", "integers outside of 0 to 6"),
        ("one", "returns Tensor for one of both sets"),
        ("ragged", r"its sample 1 has another shape, \[1\] instead of \[2\]"),
        ("single", "its sample 0 is no pair"),
        ("broken", "its sample 1 is no pair"),
        ("texts", "has samples of <U1"),
        ("shorter", "has 6 samples with 5 targets"),
        ("wider", r"training and test samples of float32 \[6, 2\] and float32 \[6, 1\]"),
        ("nothing", "has no samples"),
        ("lists", "has samples that are no array"),
    ],
)
def test_own_data_that_do_not_fit_are_refused(
    name: str, problem: str, load: Callable[..., Dataset]
) -> None:
    with pytest.raises(
        InvalidExperiment, match=rf"^data\.dataset = 'loaders:{name}': .*{problem}"
    ) as refused:
        load(name)
    assert "\n" not in str(refused.value)


def test_labels_beyond_the_classes_are_refused(load: Callable[..., Dataset]) -> None:
    with pytest.raises(InvalidExperiment, match="labels that should be 0 to 3"):
        load("beyond")


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "webp", "tiff", "gif", "ppm"])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1", "CMYK", "I;16"])
def test_images_of_any_kind_are_brought_into_one_shape(
    tmp_path: Path, suffix: str, mode: str
) -> None:
    for part, size in (("train", (9, 5)), ("test", (20, 30))):
        path = tmp_path / part / "a" / f"x.{suffix}"
        path.parent.mkdir(parents=True)
        white = {
            "RGB": (255,) * 3,
            "RGBA": (255,) * 4,
            "CMYK": (0,) * 4,
            "I;16": 65535,
            "1": 1,
        }.get(mode, 255)
        image = Image.new(mode, size, white)
        if mode == "P":
            image.putpalette([255] * 768)
        try:
            image.save(path)
        except (OSError, KeyError, ValueError):
            pytest.skip(f"{suffix} has no mode {mode}")
    for channels in (1, 3):
        data = {
            "dataset": "folder",
            "root": str(tmp_path),
            "classes": ["a"],
            "image_shape": [channels, 6, 8],
        }
        found = datasets.load(parse({"data": data}).data)
        assert found.train_images.shape == found.test_images.shape == (1, channels, 6, 8)
        assert found.train_images.min() >= 250 and found.test_images.min() >= 250


def test_a_device_without_the_users_permission_imports_nothing(flats: Path) -> None:
    experiment = parse(tomllib.loads(FILES["flats.toml"]))
    own = parse({**tomllib.loads(FILES["flats.toml"]), "training": {"loss": "pinball:pinball"}})
    assert experiment.code_at("device-0")["training.loss"] == "mean_squared_error"
    with pytest.raises(
        InvalidExperiment, match=r"training\.loss = 'pinball:pinball': this host does not import"
    ):
        permit(own.code_at("device-0"), ["flats"])
    permit(own.code_at("device-0"), ["flats", "pinball"])
