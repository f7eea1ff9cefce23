"""Devices of one model that are trained vmapped, and alone."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedstrata.common.learning import models
from fedstrata.common.learning.computing import set_up
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.nets import Dropout, reseed
from fedstrata.common.model.layout import LinkLayouts, ModelLayout, Row
from fedstrata.common.settings.training import TrainingSettings
from fedstrata.deploy.checking import objective_checks
from fedstrata.device.training.batches import Changes, change_images, draw_changes
from fedstrata.device.training.sgd import forward_of
from fedstrata.device.training.vectors import TaskVectors
from fedstrata.device.vmapped import shared_steps
from fedstrata.device.vmapped.schedule import Load
from fedstrata.device.vmapped.shared_steps import Turn, Visits, VmappedResult
from fedstrata.device.vmapped.stacked_models import Recipe, VmappedModels
from tests.helpers.steps import run_steps

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
BATCHES_OF_4 = TrainingSettings(batch_size=4, learning_rate=0.05, momentum=0.9, weight_decay=0.01)
RAGGED = (Load(7, 2), Load(12, 1), Load(3, 3), Load(20, 1), Load(8, 2))


def mlp(inputs: Inputs) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(int(np.prod(inputs.shape)), 32), nn.ReLU(), nn.Linear(32, 10)
    )


class _Odd(nn.Module):
    """A layer that is never called, layer norm, and two weights used in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(64)
        self.scale = nn.Parameter(torch.ones(64))
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(torch.relu(self.norm(x.flatten(1)) * self.scale))
        return logits


class _Sequences(nn.Module):
    """An LSTM without biases over the rows of images, the batch second, from a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.linspace(-1, 1, 6))
        self.lstm = nn.LSTM(8, 6, bias=False)
        self.fc = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = self.first.expand(1, len(x), 6), torch.zeros_like(self.first).expand(1, len(x), 6)
        steps, (_, cell) = self.lstm(x[:, 0].transpose(0, 1), state)
        logits: Tensor = self.fc(torch.cat([steps[-1], cell[0]], 1))
        return logits


def dropping(norm: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(1)
    layers = [
        nn.Conv2d(1, 4, 3),
        norm or nn.Identity(),
        Dropout(0.25, whole=True),
        nn.ReLU(),
        nn.Flatten(),
    ]
    return nn.Sequential(*layers, nn.Linear(144, 32), nn.ReLU(), Dropout(), nn.Linear(32, 10))


@dataclass
class Case:
    """Devices with models of their own, and what each gives alone."""

    module: nn.Module
    shape: tuple[int, ...]
    loads: tuple[Load, ...] = RAGGED
    training: TrainingSettings = BATCHES_OF_4
    dtype: torch.dtype = torch.float64
    device: torch.device = CPU
    tokens: int = 0  # of texts in place of images
    cancelled: list[threading.Event] = field(default_factory=list)
    progress: list[list[tuple[int, int]]] = field(default_factory=list)
    ended: list[VmappedResult | Exception | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        set_up(self.device, self.training)  # as trainers do before each training
        draw_ = np.random.default_rng(1)
        self.images = torch.from_numpy(draw_.integers(0, 256, (100, *self.shape), np.uint8))
        if self.tokens:
            self.images = self.images.long() % self.tokens
        self.labels = torch.from_numpy(draw_.integers(0, 10, 100))
        self.layout: ModelLayout = models.layout_of(self.module)
        self.module = self.module.to(self.device, self.dtype).train()
        self.rows = [self._row(k) for k in range(len(self.loads))]
        self.visits = [self._visits(k, load, draw_) for k, load in enumerate(self.loads)]
        self.cancelled = [threading.Event() for _ in self.loads]
        self.progress = [[] for _ in self.loads]
        self.ended = [None for _ in self.loads]

    def _row(self, k: int) -> Row:
        row = self.layout.empty()
        models.write_row(self.module.float(), self.layout, row)
        noise = np.random.default_rng(k).standard_normal(self.layout.parameters, np.float32)
        self.layout.floats(row)[: self.layout.parameters] += np.float32(0.02) * noise
        self.module.to(self.dtype)
        return row

    def _visits(self, k: int, load: Load, source: np.random.Generator) -> Visits:
        part = source.permutation(100)[: load.samples]
        places = np.concatenate([source.permutation(part) for _ in range(load.epochs)])
        some = self.training.image_changes
        changing = some.flip or some.crop
        changes = draw_changes(some, len(places), source=source, device=CPU) if changing else None
        return Visits(torch.from_numpy(places), changes)

    def normalise(self, images: Tensor) -> Tensor:
        return images if self.tokens else images.to(self.dtype) / 255 - 0.5

    @property
    def recipe(self) -> Recipe:
        where = self.device
        return Recipe(
            self.module,
            TaskVectors(LinkLayouts.plain(self.layout)),
            self.images.to(where),
            self.labels.to(where),
            self.normalise,
            self.training,
            0.05,
        )

    @property
    def turns(self) -> list[Turn]:
        return [
            Turn(row, load, visits, self._reported(k), self.cancelled[k], self._done(k), seed=k)
            for k, (row, load, visits) in enumerate(
                zip(self.rows, self.loads, self.visits, strict=True)
            )
        ]

    def _reported(self, k: int) -> Callable[[int, int], None]:
        return lambda done, total: self.progress[k].append((done, total))

    def _done(self, k: int) -> Callable[[VmappedResult | Exception], None]:
        def done(how: VmappedResult | Exception) -> None:
            assert self.ended[k] is None
            self.ended[k] = how

        return done

    def train(self, most: int = 100) -> list[VmappedResult]:
        shared_steps.train(self.recipe, self.turns, most=most)
        return [how for how in self.ended if isinstance(how, VmappedResult)]

    def alone(
        self, k: int, steps: int | None = None, *, on: torch.device = CPU
    ) -> tuple[dict[str, Tensor], float, int]:
        """Train one device as its trainer does; return its state, its loss, and its steps."""
        module, load = copy.deepcopy(self.module).to(on), self.loads[k]
        models.read_row(module, self.layout, self.rows[k])
        reseed(module, k, on)
        losses, taken = run_steps(
            forward_of(module, self.training, device=on),
            list(module.parameters()),
            [(epoch, inputs.to(on), labels.to(on)) for epoch, inputs, labels in self._batches(k)][
                :steps
            ],
            training=self.training,
            learning_rate=0.05,
            last_epoch=load.epochs - 1,
            buffers=list(module.buffers()),
        )
        return dict(module.state_dict()), float(losses) / load.samples, taken

    def _batches(self, k: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        load, visits = self.loads[k], self.visits[k]
        for epoch in range(load.epochs):
            for start in range(0, load.samples, self.training.batch_size):
                some = slice(
                    epoch * load.samples + start,
                    epoch * load.samples + min(start + self.training.batch_size, load.samples),
                )
                images = self.images[visits.places[some]]
                if isinstance(visits.changes, Changes):
                    images = change_images(
                        images, visits.changes[some], crop=self.training.image_changes.crop
                    )
                yield epoch, self.normalise(images), self.labels[visits.places[some]]

    def states(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
        """Train vmapped and return each device's state in full precision."""
        kept: list[dict[str, Tensor]] = []
        read = VmappedModels.read

        def spy(state: VmappedModels, places: list[int]) -> Any:
            kept.append({**state._weights, **state._buffers})
            return read(state, places)

        monkeypatch.setattr(VmappedModels, "read", spy)
        self.train()
        made = shared_steps.plan(
            list(self.loads), batch_size=self.training.batch_size, pad=self.recipe.pads
        )
        places = {int(k): place for place, k in enumerate(made.order)}
        return [
            {name: t[places[k]] for name, t in kept[-1].items()} for k in range(len(self.loads))
        ]


def of(name: str, shape: tuple[int, ...]) -> nn.Module:
    return models.build(name, 1, inputs=Inputs(shape, 10))


def text_case(
    name: str, loads: tuple[Load, ...] = RAGGED, dtype: torch.dtype = torch.float64
) -> Case:
    module = models.build(name, 1, inputs=Inputs((6,), 10, tokens=20))
    return Case(module, (6,), loads=loads, dtype=dtype, tokens=20)


def dense(**training: Any) -> Case:
    return Case(mlp(Inputs((1, 8, 8), 10)), (1, 8, 8), training=settings_of(**training))


def odd(**training: Any) -> Case:
    return Case(_Odd(), (1, 8, 8), training=settings_of(**training))


def resnet(name: str = "resnet20", shape: tuple[int, ...] = (3, 16, 16), **training: Any) -> Case:
    return Case(of(name, shape), shape, loads=RAGGED[:3], training=settings_of(**training))


def settings_of(**training: Any) -> TrainingSettings:
    return (
        TrainingSettings.model_validate({"batch_size": 4, **training}) if training else BATCHES_OF_4
    )


PROX: dict[str, Any] = {"weight_decay": 0.01, "objective": {"name": "fedprox", "mu": 1.0}}
SAM: dict[str, Any] = {"weight_decay": 0.01, "objective": {"name": "fedsam"}}

CASES: dict[str, Callable[[], Case]] = {
    "mlp": dense,
    "no momentum": lambda: dense(momentum=0.0, weight_decay=0.1),
    "nesterov, clipped": lambda: dense(nesterov=True, clip_norm=0.5),
    "augmented": lambda: dense(augmentation={"flip": True, "crop": 2}),
    "adam": lambda: dense(optimizer={"name": "adam", "weight_decay": 0.1}),
    "adamw, odd": lambda: odd(optimizer={"name": "adamw"}),
    "adam, batch norm": lambda: resnet(optimizer={"name": "adam"}),
    "odd": odd,
    "fedprox": lambda: dense(**PROX),
    "fedprox, odd": lambda: odd(**PROX),
    "fedsam": lambda: dense(**SAM, clip_norm=0.5),
    "fedsam, resnet20": lambda: resnet(**SAM),
    "lenet5": lambda: Case(of("lenet5", (1, 28, 28)), (1, 28, 28)),
    "cnn_fedavg": lambda: Case(of("cnn_fedavg", (1, 20, 20)), (1, 20, 20)),
    "dropout": lambda: Case(dropping(), (1, 8, 8)),
    "dropout, fedsam": lambda: Case(dropping(), (1, 8, 8), training=settings_of(**SAM)),
    "dropout, batch norm": lambda: Case(dropping(nn.BatchNorm2d(4)), (1, 8, 8), loads=RAGGED[:3]),
    "char_lstm": lambda: text_case("char_lstm", RAGGED[:3]),
    "sent_lstm": lambda: text_case("sent_lstm", RAGGED[:3]),
    "lstm, seldom form": lambda: Case(_Sequences(), (1, 8, 8), loads=RAGGED[:3]),
    "resnet20": resnet,
    "resnet20_preact": lambda: resnet("resnet20_preact", (1, 16, 16)),
}


def resnet_in(precision: str, device: torch.device = CPU) -> Case:
    training = TrainingSettings.model_validate({"batch_size": 8, "precision": precision})
    return Case(
        of("resnet20", (3, 16, 16)),
        (3, 16, 16),
        (Load(8, 1), Load(8, 1)),
        training,
        torch.float32,
        device,
    )


def quick() -> Case:
    return Case(mlp(Inputs((1, 8, 8), 10)), (1, 8, 8), dtype=torch.float32)


def objective_trial(training: TrainingSettings) -> tuple[Recipe, list[Turn]]:
    """Return two devices' vmapped trainings of a small model, by an objective whose vectors are
    noise.
    """
    trial = objective_checks.Trial(training)
    row = np.zeros(
        trial.layout.row_bytes + 4 * trial.layout.parameters * len(trial.vectors), np.uint8
    )
    models.write_row(trial.module, trial.layout, row)
    recipe = Recipe(
        trial.module, trial.task, trial.images, trial.labels, lambda images: images, training, 0.05
    )
    visits = [
        Visits(places, None, trial.uniform[places])
        for places in torch.arange(len(trial.labels)).view(2, -1)
    ]
    loads = [Load(len(each.places), 1) for each in visits]
    turns = zip(loads, visits, strict=True)
    return recipe, [
        Turn(row, *each, lambda *_: None, threading.Event(), lambda _: None) for each in turns
    ]


def rows_of(case: Case) -> list[bytes | None]:
    return [how.row.tobytes() if isinstance(how, VmappedResult) else None for how in case.ended]
