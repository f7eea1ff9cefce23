"""Where a model ended: how the loss rises around it, its curvature, and the distance to a
centralised run's model.

Sharpness. A direction d moves the parameters to w + r d. It has the length of the parameters filter
by filter, so that the rises of two models are comparable, whatever the scales of their layers (Li
et al., NeurIPS 2018, section 4):

    d_i = g_i ||w_i|| / ||g_i||        w_i: the weights into one neuron or channel i

Of a random direction g is drawn from a normal distribution. Parameters with one dimension, such as
biases and those of norms, stay as they are, as in the authors' code (tomgoldstein/loss-landscape).
The steepest way up to the distance r is found by projected gradient ascent, in ASCENT steps: g is
the gradient of the loss at the point reached, and no filter moves by more than r ||w_i||.
Statistics of norms are the model's, as in its evaluation.

Curvature. The eigenvalue of the Hessian of the mean loss that is largest in magnitude, by the power
method over all trainable parameters: v <- H v / ||H v||, lambda = v.H v. H v = grad(grad(loss).v)
is summed over blocks of samples.

Divergence (Tempo, left side of eq. 8). ||w - w*||, w* of a run of one device that has all data,
from the same start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

import torch
from torch import Tensor

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets, models
from fedstrata.common.learning.computing import own_code, seeded
from fedstrata.common.learning.evaluation import CPU_BATCH, Evaluation, evaluate
from fedstrata.common.learning.losses import loss_of
from fedstrata.common.randomness import Purpose, generator, torch_seed
from fedstrata.common.settings import own

ASCENT: Final = 10
PRODUCTS_MOST: Final = 200  # of the power method
TOLERANCE: Final = 1e-4  # relative change of the eigenvalue at which it ends
REACH: Final = 2.0  # distances that the steps of an ascent go together: some of it along the border


@dataclass(frozen=True, slots=True)
class Around:
    """Loss and score at a distance from a model: the means over random directions, and along the
    steepest way up.
    """

    distance: float
    loss: float
    worst_loss: float
    score: float
    worst_score: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """The length of the difference of two models, over trainable parameters, and its share of the
    second one's.
    """

    length: float
    relative: float


class Surroundings:
    """A model of an experiment, `model.initial`, and training samples on which its surroundings are
    evaluated.

    `samples`: how many are drawn by the experiment's seed, at most; they and the directions are the
    same for all models of a seed and a data set. On the CPU. Raises InvalidExperiment.
    """

    def __init__(self, experiment: Experiment, *, samples: int) -> None:
        training = experiment.training
        model = experiment.model
        if not training.trainer.learns_module:
            problem = "its models are no PyTorch modules"
            remedy = "Name a run of the trainer sgd."
            raise InvalidExperiment("training.trainer", training.trainer.whose, problem, remedy)
        if model.personal:
            problem = "no file has a whole model, as devices keep these arrays"
            remedy = "Name a run without."
            raise InvalidExperiment("model.personal", ", ".join(model.personal), problem, remedy)
        data = datasets.load(experiment.data)
        if not len(data.train_labels):
            problem = "the training samples are on the devices alone"
            remedy = "Name a run on a shared data set."
            raise InvalidExperiment("data.partition", experiment.data.partition, problem, remedy)
        self._experiment = experiment
        self._module = models.of(experiment, inputs=data.inputs).eval()
        parts, row, _, _ = models.first_of(experiment, self._module)
        models.read_row(self._module, parts.exchanged, row)
        self._weights = list(models.weights_of(self._module, parts.exchanged).values())
        self._start = [weight.detach().clone() for weight in self._weights]
        draw = generator(experiment.seed, Purpose.SHARPNESS)
        chosen = torch.from_numpy(draw.permutation(len(data.train_labels))[:samples])
        self._samples = data.train_images[chosen]
        self._labels = data.train_labels[chosen]
        self._normalise = data.normaliser()

    @classmethod
    def of(cls, experiment: Experiment, run: Path, *, samples: int) -> Surroundings:
        """Return those of a run's final model."""
        model = experiment.model.model_copy(update={"initial": str(run)})
        return cls(experiment.model_copy(update={"model": model}), samples=samples)

    def at(self, distance: float, *, directions: int) -> Around:
        """Return loss and score at a distance, in shares of each filter's length. Raises
        InvalidExperiment.
        """
        found = []
        if not distance:
            directions = 1
        for number in range(directions):
            draw = torch.Generator().manual_seed(
                torch_seed(self._experiment.seed, Purpose.SHARPNESS, "", 1 + number)
            )
            drawn = [torch.randn(weight.shape, generator=draw) for weight in self._start]
            found.append(self._evaluated([distance * each for each in self._scaled(drawn)]))
        worst = self._evaluated(self._ascent(distance)) if distance else found[0]
        loss = fmean(each.loss for each in found)
        score = fmean(each.score for each in found)
        return Around(distance, loss, worst.loss, score, worst.score)

    def eigenvalue(self) -> float:
        """Return the eigenvalue of the Hessian that is largest in magnitude, at the model. Raises
        InvalidExperiment.
        """
        draw = torch.Generator().manual_seed(torch_seed(self._experiment.seed, Purpose.SHARPNESS))
        vector = [torch.randn(weight.shape, generator=draw) for weight in self._start]
        found = 0.0
        for _ in range(PRODUCTS_MOST):
            length = _norm(vector)
            if not length:
                return 0.0
            vector = [each / length for each in vector]
            product = self._hessian_product(vector)
            before = found
            pairs = zip(vector, product, strict=True)
            found = sum(float((one * other).sum()) for one, other in pairs)
            if abs(found - before) <= TOLERANCE * abs(found):
                break
            vector = product
        return found

    def divergence(self, central: Surroundings) -> Divergence:
        """Return the divergence from the model of a centralised run. Raises InvalidExperiment for
        another model.
        """
        if [weight.shape for weight in self._start] != [weight.shape for weight in central._start]:
            name = central._experiment.model.name
            problem = "the centralised run has another model"
            raise InvalidExperiment("model.name", name, problem, "Name another run.")
        apart = [one - other for one, other in zip(self._start, central._start, strict=True)]
        return Divergence(_norm(apart), _norm(apart) / _norm(central._start))

    def _ascent(self, distance: float) -> list[Tensor]:
        """Return the move at the end of the steepest way up."""
        moves = [torch.zeros_like(weight) for weight in self._start]
        for _ in range(ASCENT):
            steps = self._scaled(self._gradient(moves))
            moves = [
                move + REACH * distance / ASCENT * step
                for move, step in zip(moves, steps, strict=True)
            ]
            ends = self._scaled(moves)  # of the same directions, at the distance 1
            moves = [
                torch.where(_lengths(move) > distance * _lengths(end), distance * end, move)
                for move, end in zip(moves, ends, strict=True)
            ]
        return moves

    def _scaled(self, direction: Sequence[Tensor]) -> list[Tensor]:
        """Return a direction with the length of the parameters, filter by filter."""
        found = []
        for each, weight in zip(direction, self._start, strict=True):
            if weight.dim() > 1:
                lengths = _lengths(each).clamp_min(torch.finfo(each.dtype).tiny)
                found.append(each * (_lengths(weight) / lengths))
            else:
                found.append(torch.zeros_like(weight))
        return found

    def _gradient(self, moves: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradient of the mean loss over the samples, where some moves lead."""
        return self._summed(
            moves, lambda loss: torch.autograd.grad(loss, self._weights, allow_unused=True)
        )

    def _hessian_product(self, vector: Sequence[Tensor]) -> list[Tensor]:
        """Return the product of the Hessian, at the model, and a vector."""

        def product(loss: Tensor) -> Sequence[Tensor | None]:
            found = torch.autograd.grad(loss, self._weights, create_graph=True, allow_unused=True)
            along = sum(
                (part * each).sum()
                for part, each in zip(found, vector, strict=True)
                if part is not None
            )
            # a loss without weights, or linear in them
            if not isinstance(along, Tensor) or not along.requires_grad:
                return [None] * len(vector)
            return torch.autograd.grad(along, self._weights, allow_unused=True)

        return self._summed([torch.zeros_like(weight) for weight in self._start], product)

    def _summed(
        self, moves: Sequence[Tensor], derived: Callable[[Tensor], Sequence[Tensor | None]]
    ) -> list[Tensor]:
        """Return what is derived of the mean loss over the samples, where some moves lead, block by
        block.
        """
        loss = loss_of(self._experiment.training.loss)
        with own.guarded(own_code(self._experiment)), self._seeded():
            self._go(moves)
            total = [torch.zeros_like(weight) for weight in self._start]
            batches = (torch.split(each, CPU_BATCH) for each in (self._samples, self._labels))
            for some, labels in zip(*batches, strict=True):
                value = loss(self._module(self._normalise(some)), labels).sum() / len(self._labels)
                for place, part in enumerate(derived(value)):
                    if part is not None:
                        total[place] = total[place] + part
        return total

    def _evaluated(self, moves: Sequence[Tensor]) -> Evaluation:
        training = self._experiment.training
        score = self._experiment.score.name
        with own.guarded(own_code(self._experiment)), self._seeded():
            self._go(moves)
            return evaluate(
                self._module,
                self._samples,
                labels=self._labels,
                normalise=self._normalise,
                batch_size=CPU_BATCH,
                loss=training.loss,
                scores=[score],
            )

    @torch.no_grad()
    def _go(self, moves: Sequence[Tensor]) -> None:
        for weight, start, move in zip(self._weights, self._start, moves, strict=True):
            weight.copy_(start + move)

    def _seeded(self) -> AbstractContextManager[None]:
        return seeded(torch_seed(self._experiment.seed, Purpose.OWN_CODE))


def _norm(tensors: Sequence[Tensor]) -> float:
    """Return the length of one vector of many tensors."""
    return math.sqrt(sum(float(each.double().square().sum()) for each in tensors))


def _lengths(weight: Tensor) -> Tensor:
    """Return the length of each filter of a tensor, [F, 1, ...]; of one with a single dimension, of
    each number.
    """
    inner = tuple(range(1, weight.dim()))
    return torch.linalg.vector_norm(weight, dim=inner, keepdim=True) if inner else weight.abs()
