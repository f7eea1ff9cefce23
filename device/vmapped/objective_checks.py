"""The checks of an objective: on a small model, in-process and vmapped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from common.errors import InvalidExperiment
from common.experiment import own
from common.experiment.objectives import CrossEntropy
from common.experiment.training import TrainingSettings
from common.learning import models
from common.learning.inputs import Inputs
from device.training.objectives.objective import Minibatch
from device.training.objectives.table import objective_of
from device.training.sgd import run_sgd
from device.vmapped import calibration
from device.vmapped.loop import Turn, Visits
from device.vmapped.models import Recipe
from device.vmapped.schedule import Load

KEY: Final = "training.objective.name"
SAMPLES, BATCH, STEPS = 40, 10, 3
INPUTS: Final = Inputs((1, 8, 8), 10)


def of(training: TrainingSettings) -> Iterator[tuple[str, str]]:
    """Yield items, each with its problem, "" for none. Raises InvalidExperiment if the objective fails."""
    try:
        yield from _in_process(training)
    except InvalidExperiment:
        raise
    except Exception as error:  # noqa: BLE001 - own code may raise anything
        own.refuse(KEY, training.objective.name, f"fails with {own.short(error)}", "Correct it.")
    problem = calibration.problem_of(*_vmapped(training))
    yield "vmapped as in-process", problem and f"{problem}. Until then devices train one by one"


def _in_process(training: TrainingSettings) -> Iterator[tuple[str, str]]:
    images, labels = _samples()
    module = models.build("mlp_digits", 1, inputs=INPUTS)
    weights = list(module.parameters())
    before = [weight.detach().clone() for weight in weights]
    objective = objective_of(training)
    received = [weight + 0.1 for weight in before] if objective.uses_received else []
    loss = objective.backward(Minibatch(lambda: module(images), labels, weights, received))
    gradients = [weight.grad for weight in weights]
    moved = any(not torch.equal(one, other) for one, other in zip(weights, before, strict=True))
    yield "weights after backward", "it changes them; only gradients are its result" if moved else ""
    shaped = all(grad is None or grad.stride() == own.stride() for grad, own in zip(gradients, weights, strict=True))
    finite = all(grad is None or bool(torch.isfinite(grad).all()) for grad in gradients)
    problem = "" if finite else "not finite"
    yield "gradients", problem or ("" if shaped else "not strided as the weights are; let autograd.backward write them")
    right = isinstance(loss, Tensor) and loss.shape == () and not loss.requires_grad and bool(torch.isfinite(loss))
    yield "loss", "" if right else "`backward` must return it finite, detached, of shape []"
    trained = [_train(training) for _ in range(2)]
    same = all(torch.equal(one, other) for one, other in zip(*trained, strict=True))
    yield "the same twice", "" if same else "training with the same samples gives other weights"
    plain = _train(training.model_copy(update={"objective": CrossEntropy()}))
    equal = all(torch.equal(one, other) for one, other in zip(trained[0], plain, strict=True))
    yield "other than cross-entropy", "the same weights after some steps: does it have an effect?" if equal else ""


def _train(training: TrainingSettings) -> list[Tensor]:
    """Return the weights after some steps."""
    images, labels = _samples()
    module = models.build("mlp_digits", 1, inputs=INPUTS)
    parts = [(0, images[i : i + BATCH], labels[i : i + BATCH]) for i in range(0, BATCH * STEPS, BATCH)]
    weights = list(module.parameters())
    run_sgd(
        module, weights, parts, training=training, learning_rate=0.05, last_epoch=0, watch=lambda _: None,
        buffers=list(module.buffers()),
    )  # fmt: skip
    return [weight.detach() for weight in weights]


def _samples() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.rand(SAMPLES, *INPUTS.shape, generator=draw), torch.randint(0, 10, (SAMPLES,), generator=draw)


def _vmapped(training: TrainingSettings) -> tuple[Recipe, list[Turn]]:
    images, labels = _samples()
    module = models.build("mlp_digits", 1, inputs=INPUTS)
    layout = models.layout_of(module)
    row = layout.empty()
    models.write_row(module, layout, row)
    recipe = Recipe(module, layout, images, labels, _unchanged, training, 0.05)
    places = torch.arange(SAMPLES).view(2, -1)
    turns = [Turn(row, Load(len(each), 1), Visits(each, None), _ignore, threading.Event(), _ignore) for each in places]
    return recipe, turns


def _unchanged(images: Tensor) -> Tensor:
    return images


def _ignore(*_: object) -> None:
    """Take a report."""
