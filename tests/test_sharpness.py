"""Sharpness: against a plain twin, independent of the layers' scales, and as a command on a run's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from common.errors import InvalidExperiment
from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.learning import datasets
from common.learning.sharpness import ASCENT, REACH, Around, Surroundings
from common.randomness import Purpose, generator, torch_seed
from tests.helpers.commands import invoke
from tests.helpers.direct import run_direct

SAMPLES: Final = 300
LAB: Final[dict[str, Any]] = {
    "rounds": 3,
    "topology": {"institutions": 0, "devices": 4},
    "model": {"name": "mlp_digits"},
    "training": {"batch_size": 25, "learning_rate": 0.05, "momentum": 0.5},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_direct(tmp_path_factory.mktemp("runs"), parse(LAB))


def begun(path: Path, **model: Any) -> Experiment:
    return parse({**LAB, "model": {**LAB["model"], "initial": str(path), **model}})


def around(path: Path, *distances: float, directions: int = 3) -> list[Around]:
    places = Surroundings(begun(path), samples=SAMPLES)
    return [places.at(distance, directions=directions) for distance in distances]


def lengths(matrix: Tensor) -> Tensor:
    return matrix.norm(dim=1, keepdim=True).clamp_min(1e-30)


class Twin:
    """A net of two layers in double precision: its loss and score where its matrices are moved."""

    def __init__(self, path: Path) -> None:
        state = load_file(path)
        self.start, self.biases = ([state[f"fc{i}.{kind}"].double() for i in (1, 2)] for kind in ("weight", "bias"))
        data = datasets.load(begun(path).data)
        chosen = generator(1, Purpose.SHARPNESS).permutation(len(data.train_labels))[:SAMPLES]
        self.x, self.y = data.normaliser()(data.train_images[chosen]).flatten(1).double(), data.train_labels[chosen]

    def at(self, moves: list[Tensor]) -> tuple[Tensor, float]:
        first, second = (matrix + move for matrix, move in zip(self.start, moves, strict=True))
        logits = torch.relu(self.x @ first.T + self.biases[0]) @ second.T + self.biases[1]
        return cross_entropy(logits, self.y), float((logits.argmax(1) == self.y).double().mean())

    def scaled(self, direction: list[Tensor]) -> list[Tensor]:
        """Return a direction whose rows are as long as those of the matrices."""
        return [way * lengths(matrix) / lengths(way) for matrix, way in zip(self.start, direction, strict=True)]

    def random(self, distance: float, number: int) -> tuple[float, float]:
        draw = torch.Generator().manual_seed(torch_seed(1, Purpose.SHARPNESS, "", 1 + number))
        shapes = [each.shape for pair in zip(self.start, self.biases, strict=True) for each in pair]
        drawn = [torch.randn(shape, generator=draw).double() for shape in shapes][::2]
        loss, score = self.at([distance * each for each in self.scaled(drawn)])
        return float(loss), score

    def worst(self, distance: float) -> tuple[float, float]:
        moves = [torch.zeros_like(matrix) for matrix in self.start]
        for _ in range(ASCENT if distance else 0):
            gradients = torch.autograd.grad(self.at([move.requires_grad_() for move in moves])[0], moves)
            steps = self.scaled(list(gradients))
            for layer, matrix in enumerate(self.start):
                moved = moves[layer].detach() + REACH * distance / ASCENT * steps[layer]
                moves[layer] = moved * (distance * lengths(matrix) / lengths(moved)).clamp_max(1)
        loss, score = self.at(moves)
        return float(loss), score


def test_losses_are_those_of_a_plain_twin(run: Path) -> None:
    twin = Twin(run / "model.safetensors")
    for place in around(run, 0.0, 0.1, 0.5):
        each = [twin.random(place.distance, number) for number in range(3)]
        loss, score = (float(np.mean(values)) for values in zip(*each, strict=True))
        assert (place.loss, place.score) == (pytest.approx(loss, rel=1e-4), pytest.approx(score, abs=0.004))
        loss, score = twin.worst(place.distance)
        assert (place.worst_loss, place.worst_score) == (pytest.approx(loss, rel=1e-3), pytest.approx(score, abs=0.01))


def test_the_steepest_way_rises_most_and_farther_away_more(run: Path, tmp_path: Path) -> None:
    check_rises(around(run, 0.0, 0.05, 0.2))
    path = run_direct(tmp_path, parse({**LAB, "rounds": 1, "model": {"name": "cnn_digits"}}))
    places = Surroundings(begun(path, name="cnn_digits"), samples=100)
    check_rises([places.at(distance, directions=3) for distance in (0.0, 0.05, 0.2)])


def check_rises(places: list[Around]) -> None:
    here, near, far = places
    assert here.loss == here.worst_loss < near.loss < near.worst_loss < far.worst_loss and near.loss < far.loss


def test_the_scales_of_layers_do_not_matter(run: Path, tmp_path: Path) -> None:
    """Behind a ReLU a layer four times as large and the next a quarter as large are the same function."""
    state = load_file(run / "model.safetensors")
    state |= {"fc1.weight": 4 * state["fc1.weight"], "fc1.bias": 4 * state["fc1.bias"]}
    save_file({**state, "fc2.weight": state["fc2.weight"] / 4}, tmp_path / "scaled.safetensors")
    assert around(tmp_path / "scaled.safetensors", 0.1, 0.5) == around(run, 0.1, 0.5)


def test_the_command_shows_a_row_for_each_distance(run: Path) -> None:
    done = invoke("runs", "sharpness", run, "--samples", "100", "--directions", "2", "--distance", "0.3")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["distance", "loss", "loss,", "worst", "accuracy", "accuracy,", "worst"]
    assert [line[-5] for line in lines[1:]] == ["0.000", "0.300"]
    shown = invoke("runs", "sharpness", run, "--samples", "100", "--distance", "0.3", "--format", "json").stdout
    points = json.loads(shown)["points"]
    assert [point["distance"] for point in points] == [0.0, 0.3] and points[1]["worst_loss"] > points[1]["loss"]


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        (
            {"model": {"personal": ["fc2.*"]}, "evaluation": {"at": "devices"}},
            r"model\.personal = 'fc2\.\*': no file has a whole",
        ),
        ({"training": {"trainer": "mine:Trainer"}}, r"training\.trainer = 'mine:Trainer': its models are no PyTorch"),
        ({"model": {"initial": "runs/none"}}, r"model\.initial = 'runs/none': .*cannot be read"),
    ],
)
def test_what_has_no_surroundings_is_refused(tree: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidExperiment, match=problem):
        Surroundings(parse(tree), samples=10)
