"""The checks of an objective of the user's own, on a small model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fedstrata.common.learning import models
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.models import head_places
from fedstrata.common.model.layout import LinkLayouts
from fedstrata.common.settings import own
from fedstrata.common.settings.training import CrossEntropy, TrainingSettings
from fedstrata.device.training.objectives.objective import LocalUpdate, Minibatch
from fedstrata.device.training.objectives.objectives_by_name import objective_of
from fedstrata.device.training.sgd import LocalSteps, features_of
from fedstrata.device.training.vectors import TaskVectors

KEY: Final = "training.objective.name"
SAMPLES = 40
BATCH = 10
STEPS = 3
INPUTS: Final = Inputs((1, 8, 8), 10)


class Trial:
    """A small model, samples, and the vectors of an objective, with noise in them."""

    def __init__(self, training: TrainingSettings) -> None:
        draw = torch.Generator().manual_seed(1)
        self.images = torch.rand(SAMPLES, *INPUTS.shape, generator=draw)
        self.labels = torch.randint(0, 10, (SAMPLES,), generator=draw)
        self.training = training
        self.objective = objective_of(training)
        self.module = models.build("mlp_digits", 1, inputs=INPUTS)
        self.layout = models.layout_of(self.module)
        self.weights = list(self.module.parameters())
        shape = (self.layout.parameters,)
        names = self.objective.receives, self.objective.returns
        down, up = (self.layout.with_extras(dict.fromkeys(some, shape)) for some in names)
        self.task = TaskVectors(LinkLayouts(self.layout, down, up), tuple(self.objective.keeps))
        noise = torch.Generator().manual_seed(2)
        self.vectors = {}
        for name in self.task.shapes:
            drawn = [torch.randn(weight.shape, generator=noise) for weight in self.weights]
            self.vectors[name] = [each / 10 for each in drawn]
        draws = self.objective.draws(self.task.shapes, INPUTS.classes)
        self.uniform = torch.from_numpy(
            np.random.default_rng(3).random((SAMPLES, draws), np.float32)
        )
        self.features = features_of(self.module, training, device=torch.device("cpu"))
        self.head = head_places(self.module, self.layout)


def of(training: TrainingSettings) -> Iterator[tuple[str, str]]:
    """Yield items, each with its problem, "" for none. Raises InvalidExperiment if the objective
    fails.
    """
    with own.guarded({KEY: training.objective.name}):
        yield from _checks(training)


def _checks(training: TrainingSettings) -> Iterator[tuple[str, str]]:
    trial = Trial(training)
    weights = trial.weights
    images = trial.images
    before = [weight.detach().clone() for weight in weights]
    received = [weight + 0.1 for weight in before] if trial.objective.uses_received else []
    batch = Minibatch(
        lambda: trial.module(images), trial.labels, weights, received, vectors=trial.vectors,
        features=partial(trial.features, images), uniform=trial.uniform, head=trial.head,
    )  # fmt: skip
    loss = trial.objective.backward(batch)
    gradients = [weight.grad for weight in weights]
    moved = any(not torch.equal(one, other) for one, other in zip(weights, before, strict=True))
    yield (
        "weights after backward",
        "it changes them; only gradients are its result" if moved else "",
    )
    shaped = all(
        grad is None or grad.stride() == own.stride()
        for grad, own in zip(gradients, weights, strict=True)
    )
    finite = all(grad is None or bool(torch.isfinite(grad).all()) for grad in gradients)
    problem = "" if finite else "not finite"
    yield (
        "gradients",
        problem
        or ("" if shaped else "not strided as the weights are; let autograd.backward write them"),
    )
    right = (
        isinstance(loss, Tensor)
        and loss.shape == ()
        and not loss.requires_grad
        and bool(torch.isfinite(loss))
    )
    yield "loss", "" if right else "`backward` must return it finite, detached, of shape []"
    trained = [_train(training) for _ in range(2)]
    same = all(torch.equal(one, other) for one, other in zip(*trained, strict=True))
    yield "the same twice", "" if same else "training with the same samples gives other weights"
    yield "vectors", _finish(trial)
    plain = _train(training.model_copy(update={"objective": CrossEntropy()}))
    equal = all(torch.equal(one, other) for one, other in zip(trained[0], plain, strict=True))
    yield (
        "other than cross-entropy",
        "the same weights after some steps: does it have an effect?" if equal else "",
    )


def _train(training: TrainingSettings) -> list[Tensor]:
    """Return the weights after some steps."""
    trial = Trial(training)
    steps = LocalSteps(
        trial.module,
        trial.weights,
        training=training,
        learning_rate=0.05,
        buffers=list(trial.module.buffers()),
        vectors=trial.vectors,
        features=trial.features,
        head=trial.head,
    )
    for first in range(0, BATCH * STEPS, BATCH):
        steps.take(
            [each[first : first + BATCH] for each in (trial.images, trial.labels, trial.uniform)]
        )
    return [weight.detach() for weight in trial.weights]


def _finish(trial: Trial) -> str:
    """Return what is wrong with the vectors that the objective makes of a training, "" for
    nothing.
    """
    draw = np.random.default_rng(1)
    columns = trial.layout.parameters
    shapes = trial.task.shapes
    received_D, trained_D, *others = draw.normal(size=(2 + len(shapes), columns)).astype(np.float32)
    given = dict(zip(shapes, others, strict=True))
    counts = np.ones(INPUTS.classes, np.float32)
    update = LocalUpdate(received_D, trained_D, trained_D, given, STEPS, 0.05, float(STEPS), counts)
    found = objective_of(trial.training).finish(update)
    wanted = trial.task.expected
    if sorted(found) != sorted(wanted):
        return f"`finish` returns {sorted(found)}, and must return {sorted(wanted)}"
    wrong = [
        name
        for name, each in found.items()
        if np.shape(each) != (columns,) or not np.isfinite(each).all()
    ]
    if wrong:
        return f"`finish` returns {wrong[0]} that is not {columns} finite numbers"
    return ""
