"""Sharpness, curvature and divergence: against plain twins, and as commands on runs' folders."""

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

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets
from fedstrata.common.learning.landscape import ASCENT, REACH, Around, Surroundings
from fedstrata.common.randomness import Purpose, generator, torch_seed
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

    def __init__(self, path: Path, samples: int = SAMPLES) -> None:
        state = load_file(path)
        self.start, self.biases = (
            [state[f"fc{i}.{kind}"].double() for i in (1, 2)] for kind in ("weight", "bias")
        )
        data = datasets.load(begun(path).data)
        chosen = generator(1, Purpose.SHARPNESS).permutation(len(data.train_labels))[:samples]
        self.x, self.y = (
            data.normaliser()(data.train_images[chosen]).flatten(1).double(),
            data.train_labels[chosen],
        )

    def at(self, moves: list[Tensor]) -> tuple[Tensor, float]:
        logits = self.logits(
            [matrix + move for matrix, move in zip(self.start, moves, strict=True)], self.biases
        )
        return cross_entropy(logits, self.y), float((logits.argmax(1) == self.y).double().mean())

    def logits(self, matrices: list[Tensor], biases: list[Tensor]) -> Tensor:
        return torch.relu(self.x @ matrices[0].T + biases[0]) @ matrices[1].T + biases[1]

    def hessian(self) -> Tensor:
        """Return the Hessian [D, D] of the loss in all parameters."""
        tensors = [*self.start, *self.biases]

        def loss(flat: Tensor) -> Tensor:
            parts = flat.split([each.numel() for each in tensors])
            *matrices, one, other = (
                part.view_as(each) for part, each in zip(parts, tensors, strict=True)
            )
            return cross_entropy(self.logits(matrices, [one, other]), self.y)

        flat = torch.cat([each.flatten() for each in tensors])
        return torch.func.jacrev(torch.func.grad(loss), chunk_size=64)(flat)

    def scaled(self, direction: list[Tensor]) -> list[Tensor]:
        """Return a direction whose rows are as long as those of the matrices."""
        return [
            way * lengths(matrix) / lengths(way)
            for matrix, way in zip(self.start, direction, strict=True)
        ]

    def random(self, distance: float, number: int) -> tuple[float, float]:
        draw = torch.Generator().manual_seed(torch_seed(1, Purpose.SHARPNESS, "", 1 + number))
        shapes = [each.shape for pair in zip(self.start, self.biases, strict=True) for each in pair]
        drawn = [torch.randn(shape, generator=draw).double() for shape in shapes][::2]
        loss, score = self.at([distance * each for each in self.scaled(drawn)])
        return float(loss), score

    def worst(self, distance: float) -> tuple[float, float]:
        moves = [torch.zeros_like(matrix) for matrix in self.start]
        for _ in range(ASCENT if distance else 0):
            gradients = torch.autograd.grad(
                self.at([move.requires_grad_() for move in moves])[0], moves
            )
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
        assert (place.loss, place.score) == (
            pytest.approx(loss, rel=1e-4),
            pytest.approx(score, abs=0.004),
        )
        loss, score = twin.worst(place.distance)
        assert (place.worst_loss, place.worst_score) == (
            pytest.approx(loss, rel=1e-3),
            pytest.approx(score, abs=0.01),
        )


def test_the_steepest_way_rises_most_and_farther_away_more(run: Path, tmp_path: Path) -> None:
    check_rises(around(run, 0.0, 0.05, 0.2))
    path = run_direct(tmp_path, parse({**LAB, "rounds": 1, "model": {"name": "cnn_digits"}}))
    places = Surroundings(begun(path, name="cnn_digits"), samples=100)
    check_rises([places.at(distance, directions=3) for distance in (0.0, 0.05, 0.2)])


def check_rises(places: list[Around]) -> None:
    here, near, far = places
    assert (
        here.loss == here.worst_loss < near.loss < near.worst_loss < far.worst_loss
        and near.loss < far.loss
    )


def test_the_scales_of_layers_do_not_matter(run: Path, tmp_path: Path) -> None:
    """Behind a ReLU a layer four times as large and the next a quarter as large are the same
    function.
    """
    state = load_file(run / "model.safetensors")
    state |= {"fc1.weight": 4 * state["fc1.weight"], "fc1.bias": 4 * state["fc1.bias"]}
    save_file({**state, "fc2.weight": state["fc2.weight"] / 4}, tmp_path / "scaled.safetensors")
    assert around(tmp_path / "scaled.safetensors", 0.1, 0.5) == around(run, 0.1, 0.5)


def test_the_eigenvalue_is_the_hessians_largest(run: Path) -> None:
    values = torch.linalg.eigvalsh(Twin(run / "model.safetensors", 130).hessian())
    assert values[-1] > 1.05 * values[-2] > 0 and values[-1] > -values[0]
    found = Surroundings.of(parse(LAB), run, samples=130).eigenvalue()  # two blocks
    assert found == pytest.approx(float(values[-1]), rel=1e-3)


def test_the_divergence_is_that_of_two_files(tmp_path: Path) -> None:
    """With one step of the whole data in each round FedAvg takes the steps of the centralised run;
    with four it diverges: here against the norm of the files' difference.
    """
    lab = LAB | {"training": {"batch_size": 2000, "learning_rate": 0.1, "momentum": 0.0}}
    one = {"topology": {"institutions": 0, "devices": 1}}
    short, long = ({"training": lab["training"] | {"epochs": epochs}} for epochs in (1, 4))
    for epochs, limit in ((short, 1e-5), (long, 1.0)):
        mine, central = (run_direct(tmp_path, parse(lab | epochs | each)) for each in ({}, one))
        shown = invoke("runs", "divergence", mine, central, "--format", "json").stdout
        facts = json.loads(shown)
        states = [load_file(path / "model.safetensors") for path in (mine, central)]
        flat = [
            torch.cat([value.double().flatten() for value in state.values()]) for state in states
        ]
        apart = float((flat[0] - flat[1]).norm())
        assert facts["length"] == pytest.approx(apart, rel=1e-4)
        assert facts["relative"] == pytest.approx(apart / float(flat[1].norm()), rel=1e-4)
        assert facts["seed"] == 1 and facts["relative"] < limit
    assert facts["relative"] > 1e-3
    done = invoke("runs", "divergence", mine)
    assert done.exit_code == 4 and "has no centralised run of its seed" in done.stderr


def test_the_command_shows_a_row_for_each_distance(run: Path) -> None:
    done = invoke(
        "runs", "sharpness", run, "--samples", "100", "--directions", "2", "--distance", "0.3"
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["distance", "loss", "loss,", "worst", "accuracy", "accuracy,", "worst"]
    assert [line[-5] for line in lines[1:]] == ["0.000", "0.300"]
    shown = invoke(
        "runs", "sharpness", run, "--samples", "100", "--distance", "0.3", "--format", "json"
    ).stdout
    points = json.loads(shown)["points"]
    assert [point["distance"] for point in points] == [0.0, 0.3] and points[1][
        "worst_loss"
    ] > points[1]["loss"]
    done = invoke("runs", "sharpness", run, "--samples", "100", "--distance", "0.3", "--eigenvalue")
    head, here, away = (line.split() for line in done.stdout.splitlines())
    assert head[-1] == "eigenvalue" and float(here[-1]) > 0 and away[-1] == "-"


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        (
            {"model": {"personal": ["fc2.*"]}, "evaluation": {"at": "devices"}},
            r"model\.personal = 'fc2\.\*': no file has a whole",
        ),
        (
            {"training": {"trainer": "mine:Trainer"}},
            r"training\.trainer = 'mine:Trainer': its models are no PyTorch",
        ),
        ({"model": {"initial": "runs/none"}}, r"model\.initial = 'runs/none': .*cannot be read"),
    ],
)
def test_what_has_no_surroundings_is_refused(tree: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidExperiment, match=problem):
        Surroundings(parse(tree), samples=10)
