"""The checks of an objective: on a small model, in-process and vmapped."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.experiment import own
from common.experiment.training import CrossEntropy, TrainingSettings
from common.learning import models
from common.learning.inputs import Inputs
from common.learning.models import head_places
from common.model.layout import LinkLayouts, ModelLayout
from device.training.objectives.objective import LocalUpdate, Minibatch
from device.training.objectives.table import objective_of
from device.training.sgd import LocalSteps, features_of
from device.training.vectors import TaskVectors
from device.vmapped import calibration
from device.vmapped.loop import Turn, Visits
from device.vmapped.models import Recipe
from device.vmapped.schedule import Load

KEY: Final = "training.objective.name"
CPU: Final = torch.device("cpu")
SAMPLES, BATCH, STEPS = 40, 10, 3
INPUTS: Final = Inputs((1, 8, 8), 10)


def of(training: TrainingSettings) -> Iterator[tuple[str, str]]:
    """Yield items, each with its problem, "" for none. Raises InvalidExperiment if the objective fails."""
    with own.guarded({KEY: training.objective.name}):
        yield from _in_process(training)
        problem = calibration.problem_of(*_vmapped(training))
    yield "vmapped as in-process", problem and f"{problem}. Until then devices train one by one"


def _in_process(training: TrainingSettings) -> Iterator[tuple[str, str]]:
    images, labels = _samples()
    module = models.build("mlp_digits", 1, inputs=INPUTS)
    weights = list(module.parameters())
    before = [weight.detach().clone() for weight in weights]
    objective = objective_of(training)
    received = [weight + 0.1 for weight in before] if objective.uses_received else []
    vectors = _like_weights(training, weights)
    features = partial(features_of(module, training, device=CPU), images)
    head = head_places(module, models.layout_of(module))
    drawn = torch.from_numpy(_numbers(training))
    batch = Minibatch(
        lambda: module(images), labels, weights, received, vectors=vectors, features=features, uniform=drawn, head=head
    )
    loss = objective.backward(batch)
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
    yield "vectors", _finish(training)
    plain = _train(training.model_copy(update={"objective": CrossEntropy()}))
    equal = all(torch.equal(one, other) for one, other in zip(trained[0], plain, strict=True))
    yield "other than cross-entropy", "the same weights after some steps: does it have an effect?" if equal else ""


def _train(training: TrainingSettings) -> list[Tensor]:
    """Return the weights after some steps."""
    images, labels = _samples()
    module = models.build("mlp_digits", 1, inputs=INPUTS)
    weights, drawn = list(module.parameters()), torch.from_numpy(_numbers(training))
    steps = LocalSteps(
        module, weights, training=training, learning_rate=0.05, buffers=list(module.buffers()),
        vectors=_like_weights(training, weights), features=features_of(module, training, device=CPU),
        head=head_places(module, models.layout_of(module)),
    )  # fmt: skip
    for first in range(0, BATCH * STEPS, BATCH):
        steps.take([each[first : first + BATCH] for each in (images, labels, drawn)])
    return [weight.detach() for weight in weights]


def _finish(training: TrainingSettings) -> str:
    """Return what is wrong with the vectors that the objective makes of a training, "" for nothing."""
    vectors = _vectors(training, models.layout_of(models.build("mlp_digits", 1, inputs=INPUTS)))
    draw, columns = np.random.default_rng(1), vectors.layout.parameters
    received_D, trained_D, *others = draw.normal(size=(2 + len(vectors.shapes), columns)).astype(np.float32)
    given = dict(zip(vectors.shapes, others, strict=True))
    counts = np.ones(INPUTS.classes, np.float32)
    update = LocalUpdate(received_D, trained_D, trained_D, given, STEPS, 0.05, float(STEPS), counts)
    found, wanted = objective_of(training).finish(update), vectors.expected
    if sorted(found) != sorted(wanted):
        return f"`finish` returns {sorted(found)}, and must return {sorted(wanted)}"
    wrong = [name for name, each in found.items() if np.shape(each) != (columns,) or not np.isfinite(each).all()]
    return f"`finish` returns {wrong[0]} that is not {columns} finite numbers" if wrong else ""


def _vectors(training: TrainingSettings, layout: ModelLayout) -> TaskVectors:
    objective, shape = objective_of(training), (layout.parameters,)
    down, up = (layout.with_extras(dict.fromkeys(names, shape)) for names in (objective.receives, objective.returns))
    return TaskVectors(LinkLayouts(layout, down, up), tuple(objective.keeps))


def _numbers(training: TrainingSettings) -> npt.NDArray[np.float32]:
    """Return random numbers for the samples, float32 [SAMPLES, draws]."""
    vectors = _vectors(training, models.layout_of(models.build("mlp_digits", 1, inputs=INPUTS)))
    draws = objective_of(training).draws(vectors.shapes, INPUTS.classes)
    return np.random.default_rng(3).random((SAMPLES, draws), np.float32)


def _like_weights(training: TrainingSettings, weights: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """Return noise for each vector, like the weights."""
    draw = torch.Generator().manual_seed(2)
    layout = models.layout_of(models.build("mlp_digits", 1, inputs=INPUTS))
    names = _vectors(training, layout).shapes
    return {name: [torch.randn(weight.shape, generator=draw) / 10 for weight in weights] for name in names}


def _samples() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.rand(SAMPLES, *INPUTS.shape, generator=draw), torch.randint(0, 10, (SAMPLES,), generator=draw)


def _vmapped(training: TrainingSettings) -> tuple[Recipe, list[Turn]]:
    images, labels = _samples()
    module = models.build("mlp_digits", 1, inputs=INPUTS)
    layout = models.layout_of(module)
    vectors = _vectors(training, layout)
    row = np.zeros(layout.row_bytes + 4 * layout.parameters * len(vectors.shapes), np.uint8)
    models.write_row(module, layout, row)
    recipe = Recipe(module, vectors, images, labels, _unchanged, training, 0.05)
    places = torch.arange(SAMPLES).view(2, -1)
    visits = [Visits(each, None, torch.from_numpy(_numbers(training))[each]) for each in places]
    turns = [Turn(row, Load(len(each.places), 1), each, _ignore, threading.Event(), _ignore) for each in visits]
    return recipe, turns


def _unchanged(images: Tensor) -> Tensor:
    return images


def _ignore(*_: object) -> None:
    """Take a report."""
