"""Score and loss of a module on a set of samples, and of an experiment's models on its test set.

A score is one number of all outputs [N, K] and all targets, [N] classes or [N, T] numbers. An
experiment may have several:

    accuracy               share of samples with argmax(o) = y
    r2                     1 - sum (o - t)^2 / sum (t - mean t)^2, the mean over the T targets; a
                           constant target adds 1 if it is met, else 0
    mean_squared_error     mean of (o - t)^2
    mean_absolute_error    mean of |o - t|
    binary_accuracy        share of targets with (o > 0) = (t > 1/2)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.accelerators import choose, out_of_memory
from fedstrata.common.learning import datasets, models
from fedstrata.common.learning.computing import (
    CPU,
    accelerators,
    calls_own_code,
    seeded,
    set_up_evaluation,
)
from fedstrata.common.learning.gpu_memory import memory_of
from fedstrata.common.learning.losses import loss_of, try_loss
from fedstrata.common.methods.attack import LabelledSamples
from fedstrata.common.model.layout import Row
from fedstrata.common.randomness import Purpose, torch_seed
from fedstrata.common.settings import own
from fedstrata.common.settings.own import is_own
from fedstrata.common.settings.training import ACCURACY, CROSS_ENTROPY
from fedstrata.common.training.scores import R2, ScoreSums, packed, packed_sums

Numbers: TypeAlias = npt.NDArray[np.float64]
ScoreFunction: TypeAlias = Callable[[npt.NDArray[Any], npt.NDArray[Any]], float]
SCORE_KEY: Final = "score.name"
ALSO: Final = "score.also"
BATCH: Final = 500
# on a slow machine 500 samples may take longer than the progress that is expected of a process
CPU_BATCH: Final = 100
# of a module and a test set that stay on a GPU between two evaluations
KEPT_BYTES: Final = 500_000_000

log = logging.getLogger("fedstrata.evaluation")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The scores, accuracy as a fraction of 1; the mean loss, of cross-entropy in nats; the sums
    over the samples.
    """

    scores: tuple[float, ...]
    loss: float
    sums: ScoreSums
    # the success of each attack that has tests, NaN without any sample of its own
    attacks: tuple[float, ...] = ()

    @property
    def score(self) -> float:
        """The first score."""
        return self.scores[0]

    @property
    def more(self) -> tuple[float, ...]:
        """The further scores."""
        return self.scores[1:]


def evaluate(
    module: nn.Module,
    images: Tensor,
    *,
    labels: Tensor,
    normalise: Callable[[Tensor], Tensor],
    batch_size: int = BATCH,
    loss: str = CROSS_ENTROPY,
    scores: Sequence[str] = (ACCURACY,),
    classes: int = 0,
    watch: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Evaluate in batches, in eval mode and without gradients; the module's mode is restored.

    `images` [N, ...] and `labels`, int64 [N] or float32 [N, T], may be on another device than the
    module; `normalise` belongs to the module's device. The batch size changes the result only by
    rounding. `classes`: how many to count one by one, of accuracy. `watch` is called after each
    batch. Raises InvalidExperiment for own code that fails.
    """
    device = next(module.parameters()).device
    was_training = module.training
    correct = torch.zeros((), dtype=torch.int64, device=device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    each_loss = loss_of(loss)
    outputs = list[Tensor]()
    keeps = any(name != ACCURACY for name in scores)
    # of the samples, and of the right ones
    counts = torch.zeros((2, classes), dtype=torch.int64, device=device)
    module.eval()
    try:
        with torch.inference_mode():
            batches = zip(
                torch.split(images, batch_size), torch.split(labels, batch_size), strict=True
            )
            for some_images, some_labels in batches:
                wanted = some_labels.to(device)
                found = module(normalise(some_images.to(device)))
                if ACCURACY in scores:
                    right = found.argmax(1) == wanted
                    correct += right.sum()
                    if classes:
                        counts += torch.stack(
                            [
                                wanted.bincount(minlength=classes),
                                wanted[right].bincount(minlength=classes),
                            ]
                        )
                if keeps:
                    outputs.append(found.float().cpu())
                if loss == CROSS_ENTROPY:
                    total += functional.cross_entropy(found, wanted, reduction="sum")
                else:
                    total += each_loss(found, wanted).sum()
                watch()
    finally:
        module.train(was_training)
    count = len(labels)
    loss_sum = float(total)
    values = list[float]()
    sums = list[float]()
    whole = torch.cat(outputs).double() if keeps else torch.empty(0)
    wanted = labels.cpu()
    targets = wanted.double() if wanted.is_floating_point() else wanted
    functions = scores_of(scores)
    for name in scores:
        if name == ACCURACY:
            values.append(int(correct) / count)
            sums.append(float(correct))
            continue
        values.append(functions[name](whole.numpy(), targets.numpy()))
        if name == R2:
            for each in (torch.square(whole - targets), targets, torch.square(targets)):
                sums += each.sum(0).tolist()
        else:
            sums.append(count * values[-1])
    by_class = packed(counts.t().flatten().tolist()) if ACCURACY in scores else b""
    return Evaluation(
        tuple(values),
        loss_sum / count,
        ScoreSums(count, loss_sum, packed_sums(sums), classes=by_class),
    )


def accelerator_of(experiment: Experiment, *, beside: torch.device = CPU) -> torch.device:
    """Return where to evaluate an experiment's models: `evaluation.accelerator` of this machine.

    If that has several GPUs, it is the one on which this process trains, `beside`, else the first.
    Raises InvalidExperiment.
    """
    name = experiment.evaluation.accelerator
    if name == CPU.type:  # no driver is asked
        return CPU
    chosen = choose(name, accelerators(), key="evaluation.accelerator")
    if str(beside) in chosen:
        return torch.device(str(beside))
    return torch.device(chosen[0])


class ModelTester:
    """An experiment's test set, and a module to evaluate models with, on `accelerator`; `watch`: of
    progress.

    Raises InvalidExperiment.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        accelerator: torch.device = CPU,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self._experiment = experiment
        self._watch = watch
        self._data = datasets.load(experiment.data)
        # images and labels, where they are
        self._tests = {CPU: (self._data.test_images, self._data.test_labels)}
        self._loss = experiment.training.loss
        self._scores = experiment.score.names
        try_loss(self._loss, self._data.inputs)
        scores_of(self._scores)
        self._module = models.of(experiment, inputs=self._data.inputs)
        self._accelerator = accelerator
        self.parts, self.first, self.initial, notes = models.first_of(experiment, self._module)
        self.layout = self.parts.exchanged
        self.frozen = self.parts.frozen
        self.notes = [*self._data.notes, *notes]
        tests = self._data.test_images.numpy(), self._data.test_labels.numpy()
        targeted = experiment.attackers.targeted if experiment.evaluation.on_cloud else {}
        wanted = [
            each.wanted(LabelledSamples(*tests, self._data.classes)) for each in targeted.values()
        ]
        self._attacks = [
            (torch.from_numpy(each.images), torch.from_numpy(each.labels)) for each in wanted
        ]

    @calls_own_code
    def evaluate(self, row: Row) -> Evaluation:
        """Return score and loss of a flat model, uint8 [row_bytes], on the test set.

        If the accelerator has not enough free memory, because others train on it, this model is
        evaluated on the CPU. Raises InvalidExperiment, AcceleratorLost.
        """
        with seeded(torch_seed(self._experiment.seed, Purpose.OWN_CODE), self._accelerator):
            if is_own(self._experiment.model.name):  # it may keep anything beside its state
                self._module = models.anew(self._experiment, inputs=self._data.inputs)
                models.read_frozen(self._module, self.frozen)
            models.read_row(self._module, self.layout, row)
            if self._accelerator.type != "cpu":
                if (found := self._on_accelerator()) is not None:
                    return found
                log.warning(
                    "%s has not enough free memory: evaluated on the CPU", self._accelerator
                )
            return self._on(CPU)

    def _on_accelerator(self) -> Evaluation | None:
        """Return the result, None if memory ran out; leave the accelerator's memory to others."""
        set_up_evaluation(self._accelerator)
        kept = False
        try:
            self._module.to(self._accelerator)
            found = self._on(self._accelerator)
            kept = self._bytes <= KEPT_BYTES
            return found
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        finally:
            if not kept:
                self._module.to(CPU)
                self._tests.pop(self._accelerator, None)
            memory = memory_of(self._accelerator)
            if memory is not None and (memory.others() or not kept):
                memory.give_back()
        return None

    @property
    def _bytes(self) -> int:
        """The bytes of the module and the test set."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        tensors += [*self._tests[CPU]]
        return sum(tensor.nbytes for tensor in tensors)

    def _copied(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the test set on a device, where it stays; of a large one each batch is copied."""
        images, labels = self._tests[CPU]
        if images.nbytes + labels.nbytes > KEPT_BYTES:
            return images, labels
        return images.to(device), labels.to(device)

    def _on(self, device: torch.device) -> Evaluation:
        data = self._data
        if device not in self._tests:
            self._tests[device] = self._copied(device)
        images, labels = self._tests[device]
        batch = CPU_BATCH if device == CPU else BATCH
        normalise = data.normaliser(device)
        found = evaluate(
            self._module,
            images,
            labels=labels,
            normalise=normalise,
            batch_size=batch,
            loss=self._loss,
            scores=self._scores,
            watch=self._watch,
        )
        successes = []
        for images, labels in self._attacks:
            success = math.nan
            if len(labels):
                success = evaluate(
                    self._module,
                    images,
                    labels=labels,
                    normalise=normalise,
                    batch_size=batch,
                    watch=self._watch,
                ).score
            successes.append(success)
        return replace(found, attacks=tuple(successes))


def scores_of(names: Sequence[str]) -> dict[str, ScoreFunction]:
    """Return an experiment's scores by name, but accuracy, which batches count. Raises
    InvalidExperiment.
    """
    found = {}
    key = SCORE_KEY
    for name in names:
        if name != ACCURACY:
            found[name] = score_of(name, key)
        key = ALSO
    return found


def score_of(name: str, key: str = SCORE_KEY) -> ScoreFunction:
    """Return the score of this name, or the user's own function as one. Raises
    InvalidExperiment.
    """
    if not is_own(name):
        return _SCORES[name]
    found = own.load(key, name)

    def score(outputs: npt.NDArray[Any], targets: npt.NDArray[Any]) -> float:
        # of copies: it may write into them, and other scores read them
        with own.guarded({key: name}):
            value = float(found(outputs.copy(), targets.copy()))
        if math.isnan(value) and np.isfinite(outputs).all():
            _warn_of_nan(key, name, own.place(found))
        return value

    return score


@cache  # once
def _warn_of_nan(key: str, name: str, place: str) -> None:
    """Warn of an own score of outputs that are finite: its function is the cause, or a device's few
    samples.
    """
    log.warning(
        "%s = %r: returns nan for finite outputs%s. It is left out: return a number.",
        key,
        name,
        place,
    )


def r2(outputs: Numbers, targets: Numbers) -> float:
    """Return the coefficient of determination, of several targets the mean."""
    rest = np.square(outputs - targets).sum(0)
    whole = np.square(targets - targets.mean(0)).sum(0)
    constant = np.where(rest == 0, 1.0, 0.0)
    return float(np.mean(np.where(whole > 0, 1 - rest / np.where(whole > 0, whole, 1), constant)))


def mean_squared_error(outputs: Numbers, targets: Numbers) -> float:
    """Return the mean of the squared errors."""
    return float(np.square(outputs - targets).mean())


def mean_absolute_error(outputs: Numbers, targets: Numbers) -> float:
    """Return the mean of the errors' sizes."""
    return float(np.abs(outputs - targets).mean())


def binary_accuracy(outputs: Numbers, targets: Numbers) -> float:
    """Return the share of the targets, 0 or 1, on the side of the outputs' sign."""
    return float(np.mean((outputs > 0) == (targets > 0.5)))


_SCORES: Final = MappingProxyType(
    {each.__name__: each for each in (r2, mean_squared_error, mean_absolute_error, binary_accuracy)}
)
