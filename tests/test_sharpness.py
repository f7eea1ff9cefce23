"""Sharpness: against a plain twin, independent of the layers' scales, and as a command on a run's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import InvalidExperiment
from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.learning import datasets
from common.learning.sharpness import ASCENT, REACH, Around, Surroundings
from common.randomness import Purpose, generator, torch_seed
from tests.helpers.commands import invoke
from tests.test_parts import run_direct

SAMPLES: Final = 300
LAB: Final[dict[str, Any]] = {
    "rounds": 3,
    "topology": {"institutions": 0, "devices": 4},
    "model": {"name": "mlp_digits"},
    "training": {"batch_size": 25, "learning_rate": 0.05, "momentum": 0.5},
}
Doubles = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_direct(tmp_path_factory.mktemp("runs"), parse(LAB))


def begun(path: Path, **model: Any) -> Experiment:
    return parse({**LAB, "model": {**LAB["model"], "initial": str(path), **model}})


def around(path: Path, *distances: float, directions: int = 3) -> list[Around]:
    places = Surroundings(begun(path), samples=SAMPLES)
    return [places.at(distance, directions=directions) for distance in distances]


class Twin:
    """A net of two layers in numpy, with its loss and its gradients written out."""

    def __init__(self, path: Path) -> None:
        state = {name: tensor.double().numpy() for name, tensor in load_file(path).items()}
        self.matrices = [state["fc1.weight"], state["fc2.weight"]]
        self._biases = [state["fc1.bias"], state["fc2.bias"]]
        data = datasets.load(begun(path).data)
        chosen = generator(1, Purpose.SHARPNESS).permutation(len(data.train_labels))[:SAMPLES]
        self._x = data.normaliser()(data.train_images[chosen]).flatten(1).double().numpy()
        self._y = data.train_labels[chosen].numpy()

    def _logits(self, matrices: list[Doubles]) -> tuple[Doubles, Doubles]:
        hidden = np.maximum(self._x @ matrices[0].T + self._biases[0], 0)
        return hidden, hidden @ matrices[1].T + self._biases[1]

    def judged(self, matrices: list[Doubles]) -> tuple[float, float]:
        _, logits = self._logits(matrices)
        rest = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), self._y]
        return float(rest.mean()), float((logits.argmax(1) == self._y).mean())

    def gradient(self, matrices: list[Doubles]) -> list[Doubles]:
        hidden, logits = self._logits(matrices)
        back = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        back[np.arange(len(back)), self._y] -= 1
        back /= len(back)
        return [((back @ matrices[1]) * (hidden > 0)).T @ self._x, back.T @ hidden]

    def scaled(self, direction: list[Doubles]) -> list[Doubles]:
        found = [each.copy() for each in direction]
        for each, matrix in zip(found, self.matrices, strict=True):
            for i, row in enumerate(each):
                length = np.linalg.norm(row)
                each[i] = row * np.linalg.norm(matrix[i]) / length if length else 0
        return found

    def moved(self, moves: list[Doubles]) -> list[Doubles]:
        return [matrix + move for matrix, move in zip(self.matrices, moves, strict=True)]

    def random(self, distance: float, number: int) -> tuple[float, float]:
        draw = torch.Generator().manual_seed(torch_seed(1, Purpose.SHARPNESS, "", 1 + number))
        shapes = [(len(self.matrices[0]), self.matrices[0].shape[1]), None, self.matrices[1].shape, None]
        drawn = [
            torch.randn(shape or len(self._biases[place // 2]), generator=draw) for place, shape in enumerate(shapes)
        ]
        direction = self.scaled([drawn[0].double().numpy(), drawn[2].double().numpy()])
        return self.judged(self.moved([distance * each for each in direction]))

    def worst(self, distance: float) -> tuple[float, float]:
        moves = [np.zeros_like(matrix) for matrix in self.matrices]
        for _ in range(ASCENT):
            steps = self.scaled(self.gradient(self.moved(moves)))
            for layer, matrix in enumerate(self.matrices):
                moved = moves[layer] + REACH * distance / ASCENT * steps[layer]
                longest, lengths = distance * np.linalg.norm(matrix, axis=1), np.linalg.norm(moved, axis=1)
                moves[layer] = moved * np.minimum(1.0, longest / np.maximum(lengths, 1e-30))[:, None]
        return self.judged(self.moved(moves))


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
    ("keys", "problem"),
    [
        (
            {"model.personal": ["fc2.*"], "evaluation.at": "devices"},
            r"model\.personal = 'fc2\.\*': no file has a whole",
        ),
        ({"training.trainer": "mine:Trainer"}, r"training\.trainer = 'mine:Trainer': its models are no PyTorch"),
        ({"model.initial": "runs/none"}, r"model\.initial = 'runs/none': .*cannot be read"),
    ],
)
def test_what_has_no_surroundings_is_refused(keys: dict[str, Any], problem: str) -> None:
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        table, _, name = key.partition(".")
        tree.setdefault(table, {})[name] = value
    with pytest.raises(InvalidExperiment, match=problem):
        Surroundings(parse(tree), samples=10)
