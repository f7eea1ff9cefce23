"""Accuracy and loss of a module on a set of images, and of an experiment's models on its test set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.experiment.schema import Experiment
from common.learning import datasets, models
from common.model.layout import Row


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Accuracy as a fraction of 1; mean cross-entropy in nats."""

    accuracy: float
    loss: float


def evaluate(
    module: nn.Module, images: Tensor, *, labels: Tensor, normalise: Callable[[Tensor], Tensor], batch_size: int = 500
) -> Evaluation:
    """Evaluate in batches, in eval mode and without gradients; the module's mode is restored.

    `images` uint8 or float32 [N, C, H, W] and `labels` int64 [N] may be on another device than the module;
    `normalise` belongs to the module's device. The batch size changes the result only by rounding.
    """
    device = next(module.parameters()).device
    was_training = module.training
    correct = torch.zeros((), dtype=torch.int64, device=device)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    module.eval()
    try:
        with torch.inference_mode():
            batches = zip(torch.split(images, batch_size), torch.split(labels, batch_size), strict=True)
            for some_images, some_labels in batches:
                wanted = some_labels.to(device)
                logits = module(normalise(some_images.to(device)))
                correct += (logits.argmax(1) == wanted).sum()
                loss += functional.cross_entropy(logits, wanted, reduction="sum")
    finally:
        module.train(was_training)
    return Evaluation(int(correct) / len(labels), float(loss) / len(labels))


class ModelTester:
    """An experiment's test set, and a module to evaluate models with. Raises InvalidExperiment."""

    def __init__(self, experiment: Experiment) -> None:
        self._data = datasets.load(experiment.data)
        self._module = models.of(experiment, inputs=self._data.inputs)
        self.layout = models.layout_of(self._module)
        self.first = self.layout.empty()  # the initial model
        models.write_row(self._module, self.layout, self.first)

    def evaluate(self, row: Row) -> Evaluation:
        """Return accuracy and loss of a flat model, uint8 [row_bytes], on the test set."""
        models.read_row(self._module, self.layout, row)
        data = self._data
        return evaluate(self._module, data.test_images, labels=data.test_labels, normalise=data.normaliser())
