"""Score and loss of a module on a set of samples, and of an experiment's models on its test set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.experiment.schema import Experiment
from common.experiment.score import ACCURACY, CROSS_ENTROPY
from common.learning import datasets, models
from common.learning.losses import loss_of, try_loss
from common.learning.scores import score_of
from common.model.layout import Row


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The score, of accuracy as a fraction of 1; the mean loss, of cross-entropy in nats."""

    score: float
    loss: float


def evaluate(
    module: nn.Module,
    images: Tensor,
    *,
    labels: Tensor,
    normalise: Callable[[Tensor], Tensor],
    batch_size: int = 500,
    loss: str = CROSS_ENTROPY,
    score: str = ACCURACY,
) -> Evaluation:
    """Evaluate in batches, in eval mode and without gradients; the module's mode is restored.

    `images` [N, ...] and `labels`, int64 [N] or float32 [N, T], may be on another device than the module; `normalise`
    belongs to the module's device. The batch size changes the result only by rounding. Raises InvalidExperiment for
    own code that fails.
    """
    device = next(module.parameters()).device
    was_training = module.training
    correct = torch.zeros((), dtype=torch.int64, device=device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    each_loss, outputs = loss_of(loss), list[Tensor]()
    module.eval()
    try:
        with torch.inference_mode():
            batches = zip(torch.split(images, batch_size), torch.split(labels, batch_size), strict=True)
            for some_images, some_labels in batches:
                wanted = some_labels.to(device)
                found = module(normalise(some_images.to(device)))
                if score == ACCURACY:
                    correct += (found.argmax(1) == wanted).sum()
                else:
                    outputs.append(found.float().cpu())
                if loss == CROSS_ENTROPY:
                    total += functional.cross_entropy(found, wanted, reduction="sum")
                else:
                    total += each_loss(found, wanted).sum()
    finally:
        module.train(was_training)
    if score == ACCURACY:
        return Evaluation(int(correct) / len(labels), float(total) / len(labels))
    whole, wanted = torch.cat(outputs).double(), labels.cpu()
    targets = wanted.double() if wanted.is_floating_point() else wanted
    return Evaluation(score_of(score)(whole.numpy(), targets.numpy()), float(total) / len(labels))


class ModelTester:
    """An experiment's test set, and a module to evaluate models with. Raises InvalidExperiment."""

    def __init__(self, experiment: Experiment) -> None:
        self._data = datasets.load(experiment.data)
        self._loss, self._score = experiment.training.loss, experiment.score.name
        try_loss(self._loss, self._data.inputs)
        score_of(self._score)
        self._module = models.of(experiment, inputs=self._data.inputs)
        self.layout = models.layout_of(self._module)
        self.first = self.layout.empty()  # the initial model
        models.write_row(self._module, self.layout, self.first)

    def evaluate(self, row: Row) -> Evaluation:
        """Return score and loss of a flat model, uint8 [row_bytes], on the test set. Raises InvalidExperiment."""
        models.read_row(self._module, self.layout, row)
        data = self._data
        return evaluate(
            self._module,
            data.test_images,
            labels=data.test_labels,
            normalise=data.normaliser(),
            loss=self._loss,
            score=self._score,
        )
