"""One device's training: by its trainer, and as a textbook does it, in a loop of PyTorch's own parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedstrata.common.accounting.work import Work
from fedstrata.common.experiment import schema
from fedstrata.common.learning import datasets, models
from fedstrata.common.learning.computing import seeded
from fedstrata.common.model.layout import Row
from fedstrata.common.randomness import Noise, Purpose, generator, torch_seed
from fedstrata.common.settings.own import is_own
from fedstrata.common.settings.privacy import PrivacySettings
from fedstrata.common.settings.training import TrainingSettings
from fedstrata.device.jobs import Ending, HostedDevice, LocalResult, Order
from fedstrata.device.pool.trainers_by_kind import Trainers
from fedstrata.device.training import batches
from fedstrata.device.training.sgd import NO_VECTORS
from fedstrata.device.training.trainer import Trainer

CPU = torch.device("cpu")
Batches: TypeAlias = Iterable[tuple[int, Tensor, Tensor]]  # epoch, inputs, labels
# what an objective reads beside the model: a tensor for each parameter, by name
Vectors: TypeAlias = Mapping[str, Sequence[Tensor]]


def first_model(lab: schema.Experiment) -> Row:
    """Return the initial model."""
    make = models.anew if is_own(lab.model.name) else models.of
    return row_of(make(lab, inputs=datasets.load(lab.data).inputs))


def row_of(module: nn.Module) -> Row:
    """Return a module's flat model."""
    layout = models.layout_of(module)
    row = layout.empty()
    models.write_row(module, layout, row)
    return row


def trainer_of(
    lab: schema.Experiment, node: str = "device-0", *, accelerator: str = "cpu"
) -> Trainer:
    """Return a device's trainer, which is prepared."""
    trainer = Trainer(lab, node=node, accelerator=accelerator)
    trainer.prepare()
    return trainer


def trained(
    trainer: Trainer, row: Row, *, epochs: int = 1, local_round: int = 0, **more: Any
) -> tuple[Row, Work]:
    """Return what a trainer makes of a model, and its work; `more`: of its order.

    A model alone is a task's row with zeros for the vectors behind it.
    """
    whole = np.zeros(trainer.vectors.links.down.row_bytes + trainer.vectors.kept_bytes, np.uint8)
    whole[: len(row)] = row
    out = np.zeros(trainer.vectors.links.up.row_bytes + trainer.vectors.kept_bytes, np.uint8)
    return out, trainer.train(Order(whole, out, epochs, local_round, **more)).work


def trained_together(
    lab: schema.Experiment,
    nodes: Sequence[str],
    row: Row | None = None,
    *,
    epochs: int = 1,
    local_round: int = 0,
    times: int = 1,
) -> list[list[tuple[Row, Work]]]:
    """Return what devices of one process make of a model, in each of some trainings, and their
    work.

    None: of the first model.
    """
    trainers, devices = Trainers(), [HostedDevice(lab, lab.digest, node) for node in nodes]
    layouts = [trainers.prepare(device, "cpu").layout for device in devices]
    row, found = first_model(lab) if row is None else row, []
    for _ in range(times):
        orders = [Order(row, layout.empty(), epochs, local_round) for layout in layouts]
        works = ended_works(trainers, devices, orders)
        found.append([(order.out, work) for order, work in zip(orders, works, strict=True)])
    return found


def ended_works(
    trainers: Trainers, devices: Sequence[HostedDevice], orders: Sequence[Order]
) -> list[Work]:
    """Let devices of one process train as ordered; return their work."""
    ended: dict[int, Ending] = {}
    trainers.train(list(zip(devices, orders, strict=True)), "cpu", ended.__setitem__)
    results = [ended[number] for number in range(len(orders))]
    works = [result.work for result in results if isinstance(result, LocalResult)]
    assert len(works) == len(orders), results
    return works


def plain_training(
    lab: schema.Experiment, node: str, row: Row, *, epochs: int, local_round: int, joins: bool
) -> tuple[Row, int]:
    """Return the model and the steps of a plain PyTorch loop from a model; `joins`: see
    LocalDataset.
    """
    module = models.anew(lab, inputs=datasets.load(lab.data).inputs)
    layout = models.layout_of(module)  # the first one: a model may freeze parts of itself
    models.read_row(module, layout, row)
    _, steps = train_plainly(module, lab, node, epochs=epochs, local_round=local_round, joins=joins)
    out = layout.empty()
    models.write_row(module, layout, out)
    return out, steps


def train_plainly(
    module: nn.Module,
    lab: schema.Experiment,
    node: str,
    *,
    epochs: int,
    local_round: int,
    joins: bool = False,
    noise: Noise | None = None,
    **more: Any,
) -> tuple[float, int]:
    """Train a module on a device's samples; return the mean loss of the last epoch, and the steps.

    `more`: as in `plain_steps`.
    """
    local = batches.load_local_dataset(lab, node, accelerator=CPU)
    privacy = lab.tiers[-1].privacy
    order = generator(lab.seed, Purpose.BATCHES, node, local_round)

    def places() -> Iterator[tuple[int, Tensor]]:
        for epoch in range(epochs):
            if privacy.sampling_rate is not None:
                assert noise is not None
                for _ in range(round(1 / privacy.sampling_rate)):
                    joining = noise.uniforms(len(local.samples)) < privacy.sampling_rate
                    yield epoch, local.samples[torch.from_numpy(np.flatnonzero(joining))]
                continue
            drawn = local.samples[torch.from_numpy(order.permutation(len(local.samples)))]
            *whole, last = drawn.split(lab.training.batch_size)
            if joins and whole and len(last) == 1:
                last = torch.cat([whole.pop(), last])
            yield from ((epoch, some) for some in (*whole, last))

    with seeded(torch_seed(lab.seed, Purpose.OWN_CODE, node, local_round)):
        some = (
            (epoch, local.normalise(local.images[each]), local.labels[each])
            for epoch, each in places()
        )
        losses, steps = plain_steps(
            module,
            some,
            training=lab.training,
            rate=lab.learning_rate_in(local_round),
            last_epoch=epochs - 1,
            private=(privacy, noise, len(local.samples)) if noise is not None else None,
            **more,
        )
    return losses / len(local.samples), steps


def plain_steps(
    module: nn.Module,
    some: Batches,
    *,
    training: TrainingSettings,
    rate: float,
    last_epoch: int,
    vectors: Vectors = NO_VECTORS,
    personal: Collection[str] = (),
    private: tuple[PrivacySettings, Noise, int] | None = None,
) -> tuple[float, int]:
    """Take a step for each batch; return the sum of the losses of the last epoch, and the steps.

    `vectors`: of the objective. `personal`: the parameters that were not received. `private`: of
    DP-SGD, with the number of the device's samples.
    """
    optimiser = optimiser_of(training, module.parameters(), rate)
    received = module
    if training.objective.name != "cross_entropy":
        received = copy.deepcopy(module)
    gradients = GRADIENTS.get(training.objective.name, _of_the_loss)
    losses = 0.0
    steps = 0
    for epoch, inputs, labels in some:
        optimiser.zero_grad()
        module.train()
        task = Task(module, received, training.objective, vectors, personal, inputs, labels)
        loss = gradients(task) if private is None else _of_samples(task, *private)
        if training.clip_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), training.clip_norm)
        optimiser.step()
        steps += 1
        losses += loss * len(labels) if epoch == last_epoch else 0.0
    return losses, steps


def optimiser_of(
    training: TrainingSettings, weights: Iterable[Tensor], rate: float
) -> torch.optim.Optimizer:
    """Return PyTorch's optimiser of an experiment."""
    chosen: Any = training.optimizer
    if chosen.name == "sgd":
        return torch.optim.SGD(
            weights,
            rate,
            training.momentum,
            weight_decay=training.weight_decay,
            nesterov=training.nesterov,
        )
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[chosen.name]
    return kind(weights, rate, (chosen.beta1, chosen.beta2), chosen.epsilon, chosen.weight_decay)


# The gradients of each objective, of its whole loss by autograd


@dataclass(frozen=True, eq=False)
class Task:
    """A batch, the module at which its gradients are taken, and the model that was received."""

    module: nn.Module
    received: nn.Module
    objective: Any
    vectors: Vectors
    personal: Collection[str]
    inputs: Tensor
    labels: Tensor

    @property
    def weights(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return [weight for weight in self.module.parameters() if weight.requires_grad]

    @property
    def moves(self) -> list[Tensor]:
        """How far the trained parameters are from the received ones, personal ones nowhere."""
        pairs = zip(self.module.named_parameters(), self.received.parameters(), strict=True)
        return [
            weight - (weight if name in self.personal else start).detach()
            for (name, weight), start in pairs
            if weight.requires_grad
        ]

    def loss(self) -> Tensor:
        """Return the cross-entropy of the batch."""
        return functional.cross_entropy(self.module(self.inputs), self.labels)

    def away(self) -> Tensor:
        """Return the square of the distance to the received model."""
        return torch.stack([move.square().sum() for move in self.moves]).sum()

    def along(self, name: str) -> Tensor:
        """Return the product of a vector and the weights."""
        pairs = zip(self.vectors[name], self.weights, strict=True)
        return torch.stack([(part * weight).sum() for part, weight in pairs]).sum()


def _ended(loss: Tensor, *terms: Any) -> float:
    torch.autograd.backward(loss + sum(terms))
    return loss.item()


def _of_the_loss(task: Task) -> float:
    return _ended(task.loss())


def _of_fedprox(task: Task) -> float:
    return _ended(task.loss(), task.objective.mu / 2 * task.away())


def _of_scaffold(task: Task) -> float:
    return _ended(task.loss(), task.along("control"), -task.along("own_control"))


def _of_feddyn(task: Task) -> float:
    return _ended(task.loss(), task.objective.alpha / 2 * task.away(), -task.along("own_gradient"))


def _of_fedsam(task: Task) -> float:
    """The gradients at the moved parameters, of a second module."""
    moved = copy.deepcopy(task.module)
    loss = task.loss()
    slopes = torch.autograd.grad(loss, task.weights)
    norm = torch.cat([slope.flatten() for slope in slopes]).norm()
    others = [weight for weight in moved.parameters() if weight.requires_grad]
    with torch.no_grad():
        for weight, slope in zip(others, slopes, strict=True):
            weight.add_(task.objective.rho * slope / norm)
    torch.autograd.backward(functional.cross_entropy(moved(task.inputs), task.labels))
    for weight, other in zip(task.weights, others, strict=True):
        weight.grad = other.grad
    return loss.item()


def features(module: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return a batch's logits, and what the last linear layer gets of it."""
    found: list[Tensor] = []
    *_, last = (layer for layer in module.modules() if isinstance(layer, nn.Linear))
    with last.register_forward_pre_hook(lambda _, given: found.append(given[0])):
        logits = module(inputs)
    return logits, found[0]


def _of_moon(task: Task) -> float:
    """A cross-entropy of two logits, of which the first one is right, as the authors write it."""
    logits, mine = features(task.module, task.inputs)
    previous = copy.deepcopy(task.received)
    if any(part.any() for part in task.vectors["previous"]):
        with torch.no_grad():
            trained = [weight for weight in previous.parameters() if weight.requires_grad]
            for weight, part in zip(trained, task.vectors["previous"], strict=True):
                weight.copy_(part)
    with torch.no_grad():
        others = [
            features(copy.deepcopy(other).train(), task.inputs)[1]
            for other in (task.received, previous)
        ]
    pairs = torch.stack([functional.cosine_similarity(mine, other) for other in others], 1)
    right = torch.zeros(len(task.labels), dtype=torch.long)
    term = functional.cross_entropy(pairs / task.objective.temperature, right)
    return _ended(functional.cross_entropy(logits, task.labels), task.objective.mu * term)


def _of_samples(task: Task, privacy: PrivacySettings, noise: Noise, samples: int) -> float:
    """The sum of the clipped gradients of single samples, one backward pass for each, and noise."""
    assert privacy.clip_norm is not None
    sums = [torch.zeros_like(weight, dtype=torch.float64) for weight in task.weights]
    losses = 0.0
    for sample, label in zip(task.inputs, task.labels, strict=True):
        task.module.zero_grad()
        loss = functional.cross_entropy(task.module(sample[None]), label[None])
        torch.autograd.backward(loss)
        losses += loss.item()
        each = [weight.grad.double() for weight in task.weights if weight.grad is not None]
        norm = float(torch.cat([gradient.flatten() for gradient in each]).norm())
        for whole, gradient in zip(sums, each, strict=True):
            whole.add_(gradient, alpha=min(1.0, privacy.clip_norm / norm))
    counts = [weight.numel() for weight in task.weights]
    drawn = torch.from_numpy(privacy.multiplier * privacy.clip_norm * noise.normals(sum(counts)))
    divisor = float(len(task.labels))
    if privacy.sampling_rate is not None:
        divisor = privacy.sampling_rate * samples
    mu = getattr(task.objective, "mu", 0.0)
    for weight, whole, part, move in zip(
        task.weights, sums, drawn.split(counts), task.moves, strict=True
    ):
        weight.grad = ((whole + part.view(whole.shape)) / divisor).float() + mu * move.detach()
    return losses / max(1, len(task.labels))


GRADIENTS: Mapping[str, Callable[[Task], float]] = {
    "fedprox": _of_fedprox,
    "fedsam": _of_fedsam,
    "scaffold": _of_scaffold,
    "feddyn": _of_feddyn,
    "moon": _of_moon,
}
