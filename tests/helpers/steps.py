"""Steps of SGD over single batches, as a device takes them without a program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.settings.training import TrainingSettings
from fedstrata.device.training.batches import LocalDataset, blocks
from fedstrata.device.training.recording import Program
from fedstrata.device.training.sgd import NO_PROGRAMS, Forward, LocalSteps, run_sgd


def run_steps(
    forward: Forward,
    weights: Sequence[Tensor],
    batches: Iterable[tuple[int, Tensor, Tensor]],
    *,
    training: TrainingSettings,
    learning_rate: float,
    last_epoch: int,
    watch: Callable[[int], None] = lambda _: None,
    uniform: Callable[[int], Tensor] | None = None,
    programs: Mapping[int, Program | None] = NO_PROGRAMS,
    **more: Any,
) -> tuple[Tensor, int]:
    """Return what `run_sgd` does, for batches (epoch, inputs, labels); `more` are arguments of
    LocalSteps.
    """
    steps = LocalSteps(forward, weights, training=training, learning_rate=learning_rate, **more)
    blocks = ((epoch, inputs[None], labels[None]) for epoch, inputs, labels in batches)
    return run_sgd(
        steps, blocks, last_epoch=last_epoch, watch=watch, uniform=uniform, programs=programs
    )


def batches_of(
    local: LocalDataset, experiment: Experiment, **which: Any
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the single batches (epoch, inputs, labels) of a local round, in the order of the steps."""
    for epoch, inputs, labels in blocks(local, experiment, **which):
        for batch in zip(inputs, labels, strict=True):
            yield epoch, *batch
