"""Devices trained vmapped: equal to each one's own training, whoever leaves, and whatever memory there is."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from common.experiment.training import TrainingSettings
from common.learning import models
from common.learning.computing import set_up
from common.learning.inputs import Inputs
from common.learning.nets import Dropout, reseed
from common.model.layout import LinkLayouts, ModelLayout, Row
from device.jobs import Cancelled
from device.training.batches import Changes, change_images, draw_changes
from device.training.objectives.objective import Objective
from device.training.sgd import LocalSteps, forward_of
from device.training.vectors import TaskVectors
from device.vmapped import calibration, loop
from device.vmapped import models as vmapped_models
from device.vmapped.calibration import most_in_memory, problem_of
from device.vmapped.loop import Turn, Visits, VmappedResult
from device.vmapped.models import Recipe, VmappedModels, keep_batch_norm_fp32
from device.vmapped.schedule import Load
from tests.helpers.examples import slow
from tests.helpers.steps import run_steps

CPU = torch.device("cpu")
BATCHES_OF_4 = TrainingSettings(batch_size=4, learning_rate=0.05, momentum=0.9, weight_decay=0.01)
RAGGED = (Load(7, 2), Load(12, 1), Load(3, 3), Load(20, 1), Load(8, 2))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def mlp(inputs: Inputs) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(inputs.shape)), 32), nn.ReLU(), nn.Linear(32, 10))


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
    layers = [nn.Conv2d(1, 4, 3), norm or nn.Identity(), Dropout(0.25, whole=True), nn.ReLU(), nn.Flatten()]
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
            for k, (row, load, visits) in enumerate(zip(self.rows, self.loads, self.visits, strict=True))
        ]

    def _reported(self, k: int) -> Callable[[int, int], None]:
        return lambda done, total: self.progress[k].append((done, total))

    def _done(self, k: int) -> Callable[[VmappedResult | Exception], None]:
        def done(how: VmappedResult | Exception) -> None:
            assert self.ended[k] is None
            self.ended[k] = how

        return done

    def train(self, most: int = 100) -> list[VmappedResult]:
        loop.train(self.recipe, self.turns, most=most)
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
            [(epoch, inputs.to(on), labels.to(on)) for epoch, inputs, labels in self._batches(k)][:steps],
            training=self.training,
            learning_rate=0.05,
            last_epoch=load.epochs - 1,
            watch=lambda _: None,
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
                    images = change_images(images, visits.changes[some], crop=self.training.image_changes.crop)
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
        made = loop.plan(list(self.loads), batch_size=self.training.batch_size, pad=self.recipe.pads)
        places = {int(k): place for place, k in enumerate(made.order)}
        return [{name: t[places[k]] for name, t in kept[-1].items()} for k in range(len(self.loads))]


def of(name: str, shape: tuple[int, ...]) -> nn.Module:
    return models.build(name, 1, inputs=Inputs(shape, 10))


def text_case(name: str, loads: tuple[Load, ...] = RAGGED, dtype: torch.dtype = torch.float64) -> Case:
    module = models.build(name, 1, inputs=Inputs((6,), 10, tokens=20))
    return Case(module, (6,), loads=loads, dtype=dtype, tokens=20)


def with_objective(objective: dict[str, Any], **more: Any) -> TrainingSettings:
    settings = {"batch_size": 4, "weight_decay": 0.01, "objective": objective, **more}
    return TrainingSettings.model_validate(settings)


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: Case(mlp(Inputs((1, 8, 8), 10)), (1, 8, 8)),
    "no momentum": lambda: Case(
        mlp(Inputs((1, 8, 8), 10)), (1, 8, 8), training=TrainingSettings(batch_size=4, momentum=0.0, weight_decay=0.1)
    ),
    "nesterov, clipped": lambda: Case(
        mlp(Inputs((1, 8, 8), 10)), (1, 8, 8), training=TrainingSettings(batch_size=4, nesterov=True, clip_norm=0.5)
    ),
    "augmented": lambda: Case(
        mlp(Inputs((1, 8, 8), 10)),
        (1, 8, 8),
        training=TrainingSettings.model_validate({"batch_size": 4, "augmentation": {"flip": True, "crop": 2}}),
    ),
    "adam": lambda: Case(
        mlp(Inputs((1, 8, 8), 10)),
        (1, 8, 8),
        training=TrainingSettings.model_validate({"batch_size": 4, "optimizer": {"name": "adam", "weight_decay": 0.1}}),
    ),
    "adamw, odd": lambda: Case(
        _Odd(), (1, 8, 8), training=TrainingSettings.model_validate({"batch_size": 4, "optimizer": {"name": "adamw"}})
    ),
    "adam, batch norm": lambda: Case(
        of("resnet20", (3, 16, 16)),
        (3, 16, 16),
        loads=RAGGED[:3],
        training=TrainingSettings.model_validate({"batch_size": 4, "optimizer": {"name": "adam"}}),
    ),
    "odd": lambda: Case(_Odd(), (1, 8, 8)),
    "fedprox": lambda: Case(
        mlp(Inputs((1, 8, 8), 10)), (1, 8, 8), training=with_objective({"name": "fedprox", "mu": 1.0})
    ),
    "fedprox, odd": lambda: Case(_Odd(), (1, 8, 8), training=with_objective({"name": "fedprox", "mu": 1.0})),
    "fedsam": lambda: Case(
        mlp(Inputs((1, 8, 8), 10)), (1, 8, 8), training=with_objective({"name": "fedsam"}, clip_norm=0.5)
    ),
    "fedsam, resnet20": lambda: Case(
        of("resnet20", (3, 16, 16)), (3, 16, 16), loads=RAGGED[:3], training=with_objective({"name": "fedsam"})
    ),
    "lenet5": lambda: Case(of("lenet5", (1, 28, 28)), (1, 28, 28)),
    "cnn_fedavg": lambda: Case(of("cnn_fedavg", (1, 20, 20)), (1, 20, 20)),
    "dropout": lambda: Case(dropping(), (1, 8, 8)),
    "dropout, fedsam": lambda: Case(dropping(), (1, 8, 8), training=with_objective({"name": "fedsam"})),
    "dropout, batch norm": lambda: Case(dropping(nn.BatchNorm2d(4)), (1, 8, 8), loads=RAGGED[:3]),
    "char_lstm": lambda: text_case("char_lstm", RAGGED[:3]),
    "sent_lstm": lambda: text_case("sent_lstm", RAGGED[:3]),
    "lstm, seldom form": lambda: Case(_Sequences(), (1, 8, 8), loads=RAGGED[:3]),
    "resnet20": lambda: Case(of("resnet20", (3, 16, 16)), (3, 16, 16), loads=RAGGED[:3]),
    "resnet20_preact": lambda: Case(of("resnet20_preact", (1, 16, 16)), (1, 16, 16), loads=RAGGED[:3]),
}


@pytest.mark.parametrize("name", slow(CASES, but=CASES.keys() - {"fedsam, resnet20", "resnet20_preact"}))
def test_vmapped_training_gives_what_each_gives_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]()
    states = case.states(monkeypatch)
    for k, (state, how) in enumerate(zip(states, case.ended, strict=True)):
        wanted, loss, steps = case.alone(k)
        before = torch.from_numpy(case.layout.floats(case.rows[k]).copy())
        assert isinstance(how, VmappedResult) and how.steps == steps and how.loss == pytest.approx(loss, abs=1e-10)
        for entry, tensor in state.items():
            torch.testing.assert_close(tensor, wanted[entry], rtol=0, atol=1e-10)
        views = case.layout.views(how.row)
        for entry, view in views.items():
            np.testing.assert_allclose(view, wanted[entry], rtol=2.0**-23, atol=1e-6)  # a view is float32
        assert np.abs(case.layout.floats(how.row) - before.numpy()).max() > 1e-3


@pytest.mark.parametrize("name", ["lenet5", "resnet20"])
def test_one_step_in_float32(name: str) -> None:
    case = CASES[name]()
    case = Case(case.module.float(), case.shape, loads=(Load(4, 1), Load(3, 1), Load(4, 1)), dtype=torch.float32)
    for k, how in enumerate(case.train()):
        wanted, loss, _ = case.alone(k)
        assert how.loss == pytest.approx(loss, rel=1e-5)
        for entry, view in case.layout.views(how.row).items():
            np.testing.assert_allclose(view, wanted[entry], rtol=1e-5, atol=1e-5)


def test_bf16_is_near_its_own_training() -> None:
    # In smaller batches a CPU's linear layers compute in fp32 (`device.training.sgd`), but not vmapped.
    training = TrainingSettings(batch_size=32, learning_rate=0.05, precision="bf16")
    case = Case(mlp(Inputs((1, 8, 8), 10)), (1, 8, 8), training=training, dtype=torch.float32)
    for k, how in enumerate(case.train()):
        wanted, loss, _ = case.alone(k)
        assert how.loss == pytest.approx(loss, rel=0.02)
        for entry, view in case.layout.views(how.row).items():
            np.testing.assert_allclose(view, wanted[entry], rtol=0, atol=5e-3)


def resnet_in(precision: str, device: torch.device = CPU) -> Case:
    training = TrainingSettings.model_validate({"batch_size": 8, "precision": precision})
    return Case(of("resnet20", (3, 16, 16)), (3, 16, 16), (Load(8, 1), Load(8, 1)), training, torch.float32, device)


def test_on_a_gpu_batch_norm_computes_in_fp32_beside_bf16() -> None:
    case, inputs = resnet_in("bf16"), torch.randn(2, 8, 16, 4, 4).to(torch.bfloat16)
    norm = next(layer for layer in case.module.modules() if isinstance(layer, nn.BatchNorm2d))
    wanted = norm(inputs[0].float())

    def outputs(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = norm(batch)
        return found

    keep_batch_norm_fp32(case.module, case.training, device=CPU)
    keep_batch_norm_fp32(case.module, TrainingSettings(), device=torch.device("cuda"))
    assert outputs(inputs[0]).dtype == torch.bfloat16
    keep_batch_norm_fp32(case.module, case.training, device=torch.device("cuda"))
    assert torch.equal(outputs(inputs[0]), wanted)
    assert problem_of(case.recipe, case.turns) == ""  # nor does it change the trial in float64


def quick(loads: tuple[Load, ...] = RAGGED, **training: Any) -> Case:
    return Case(mlp(Inputs((1, 8, 8), 10)), (1, 8, 8), loads=loads, dtype=torch.float32)


def rows_of(case: Case) -> list[bytes | None]:
    return [how.row.tobytes() if isinstance(how, VmappedResult) else None for how in case.ended]


def test_each_reports_its_own_progress_and_ends_with_its_own_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOOK_S", 0.0)
    case = quick()
    ends: list[int] = []
    turns = case.turns
    for k, turn in enumerate(turns):
        done = turn.done
        object.__setattr__(turn, "done", lambda how, k=k, done=done: (ends.append(k), done(how)))
    loop.train(case.recipe, turns, most=100)
    totals = [4, 3, 3, 5, 4]
    assert [seen[-1] for seen in case.progress] == [(total, total) for total in totals]
    assert all(seen == sorted(seen) for seen in case.progress)
    assert [totals[k] for k in ends] == sorted(totals)


class _Clock:
    """Every step takes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        step = VmappedModels.step

        def slow(*args: Any) -> None:
            self.now += 1.0
            step(*args)

        monkeypatch.setattr(VmappedModels, "step", slow)
        monkeypatch.setattr(loop.time, "monotonic", lambda: self.now)


@pytest.mark.parametrize("look_s", [0.0, 3.0, 100.0])
def test_a_steps_time_is_shared_among_those_who_take_it(monkeypatch: pytest.MonkeyPatch, look_s: float) -> None:
    monkeypatch.setattr(loop, "LOOK_S", look_s)
    _Clock(monkeypatch)
    case = quick()
    outcomes = case.train()
    # Steps 1 to 3 have five devices, step 4 three of them, step 5 one.
    wanted = [3 / 5 + 1 / 3, 3 / 5, 3 / 5, 3 / 5 + 1 / 3 + 1, 3 / 5 + 1 / 3]
    assert [how.train_s for how in outcomes] == pytest.approx(wanted)
    assert sum(how.train_s for how in outcomes) == pytest.approx(5)
    assert max(how.wall_s for how in outcomes) == 5
    if look_s == 0.0:
        assert [how.wall_s for how in outcomes] == [4, 3, 3, 5, 4]


@pytest.mark.parametrize("leaving", [{0}, {3}, {1, 4}, {0, 1, 2, 3, 4}])
def test_who_is_called_off_leaves_at_the_next_step_and_the_others_never_see_it(
    leaving: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = quick()
    undisturbed.train()
    case, steps = quick(), 0
    step = VmappedModels.step

    def counted(*args: Any) -> None:
        nonlocal steps
        steps += 1
        step(*args)
        if steps == 2:
            for k in leaving:
                case.cancelled[k].set()

    monkeypatch.setattr(VmappedModels, "step", counted)
    case.train()
    for k, (mine, its) in enumerate(zip(rows_of(case), rows_of(undisturbed), strict=True)):
        assert mine == (None if k in leaving else its)
        assert isinstance(case.ended[k], Cancelled if k in leaving else VmappedResult)
    assert steps == {5: 2, 1: 4 if leaving == {3} else 5, 2: 5}[len(leaving)]


def test_the_leavers_time_goes_to_those_who_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    _Clock(monkeypatch)
    case = quick()
    case.cancelled[0].set()
    assert sum(how.train_s for how in case.train()) == pytest.approx(5)
    assert isinstance(case.ended[0], Cancelled) and not case.progress[0][1:]


EXHAUSTED = (
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)


def short_of_memory(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Let steps of more than `most` places run out of memory; return the sizes of those that did not."""
    errors = itertools.cycle(EXHAUSTED)
    sizes: list[int] = []
    outputs_of = VmappedModels._outputs

    def tight(state: VmappedModels, run: Any, weights: Any, buffers: Any, batch: Any) -> Any:
        made = outputs_of(state, run, weights, buffers, batch)
        if len(batch.samples) > most:
            raise next(errors)
        sizes.append(len(batch.samples))
        return made

    monkeypatch.setattr(VmappedModels, "_outputs", tight)
    return sizes


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *(("mlp", most) for most in (1, 2, 3, 4)),
        ("fedprox", 2),
        ("fedsam", 2),
        pytest.param("resnet20", 2, marks=pytest.mark.slow),
    ],
)
def test_a_group_without_memory_is_halved(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]()
    plenty = CASES[name]()
    plenty.train()
    sizes = short_of_memory(monkeypatch, most)
    case.train()
    assert max(sizes) <= most
    for mine, its in zip(case.ended, plenty.ended, strict=True):
        assert isinstance(mine, VmappedResult) and isinstance(its, VmappedResult) and mine.steps == its.steps
        np.testing.assert_allclose(case.layout.floats(mine.row), case.layout.floats(its.row), rtol=0, atol=1e-6)
        assert np.array_equal(case.layout.integers(mine.row), case.layout.integers(its.row))
        assert mine.loss == pytest.approx(its.loss, abs=1e-9)


def test_no_step_is_taken_again_where_memory_runs_out_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    case = quick()
    outputs_of, calls, samples = VmappedModels._outputs, 0, 0

    def tight(state: VmappedModels, run: Any, weights: Any, buffers: Any, batch: Any) -> Any:
        nonlocal calls, samples
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        samples += len(batch.samples)
        return outputs_of(state, run, weights, buffers, batch)

    monkeypatch.setattr(VmappedModels, "_outputs", tight)
    assert [how.steps for how in case.train()] == [4, 3, 3, 5, 4]
    assert samples == 4 + 3 + 3 + 5 + 4


@pytest.mark.parametrize("failing", [3, 4, 9, 10])  # calls: two for each step
def test_a_second_pass_without_memory_leaves_the_weights(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, plenty = CASES["fedsam"](), CASES["fedsam"]()
    plenty.train()
    outputs_of, calls = VmappedModels._outputs, 0

    def tight(state: VmappedModels, *rest: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return outputs_of(state, *rest)

    monkeypatch.setattr(VmappedModels, "_outputs", tight)
    for mine, its in zip(case.train(), plenty.ended, strict=True):
        assert isinstance(its, VmappedResult) and mine.steps == its.steps
        np.testing.assert_allclose(case.layout.floats(mine.row), case.layout.floats(its.row), rtol=0, atol=1e-6)


def test_without_memory_for_one_device_none_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    case = quick()
    short_of_memory(monkeypatch, 0)
    assert case.train() == [] and case.ended == [None] * 5
    with pytest.raises(torch.OutOfMemoryError, match="cpu has no memory for one vmapped step"):
        problem_of(case.recipe, case.turns)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_cap_makes_several_groups(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = short_of_memory(monkeypatch, most)
    case = quick()
    case.train(most)
    assert max(sizes) == most and all(isinstance(how, VmappedResult) for how in case.ended)


def test_memory_that_runs_out_after_a_draw_changes_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    plenty, case = (Case(dropping(), (1, 8, 8), dtype=torch.float32) for _ in range(2))
    plenty.train()
    step_of, calls = vmapped_models.sgd.step, 0

    def tight(batch: Any, *rest: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            batch.forward()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step_of(batch, *rest, **settings)

    monkeypatch.setattr(vmapped_models.sgd, "step", tight)
    case.train()
    assert calls > 3
    for mine, its in zip(case.ended, plenty.ended, strict=True):
        assert isinstance(mine, VmappedResult) and isinstance(its, VmappedResult)
        np.testing.assert_allclose(case.layout.floats(mine.row), case.layout.floats(its.row), rtol=0, atol=1e-6)


def test_layers_that_draw_from_torchs_own_generator_cannot_be_vmapped() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 10))
    with pytest.raises(RuntimeError, match="random"):
        Case(module, (1, 8, 8), dtype=torch.float32).train()


class _Centred(nn.Module):
    """Depends on the others of its batch in a way that no layer's type reports."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        logits: Tensor = self.fc(flat - flat.mean(0))
        return logits


class _SharedMask(nn.Module):
    """Drops the same values for all its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)
        self.drop = Dropout()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x.flatten(1) * self.drop(torch.ones(1, 64, dtype=x.dtype)))
        return logits


class _Single(nn.Module):
    """Computes as it should in float64, and otherwise if batched in float32."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x.flatten(1))
        if logits.dtype == torch.float64 or not torch._C._functorch.is_batchedtensor(logits):
            return logits
        if self.fault == "raise":
            raise RuntimeError("not here\nand so on")
        return 2 * logits


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (mlp(Inputs((1, 8, 8), 10)), ""),
        (nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 10)), "random"),
        (nn.Sequential(nn.Flatten(), Dropout(), nn.Linear(64, 10)), ""),
        (_SharedMask(), "dropout of values that all devices share"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10, momentum=None)), "RuntimeError"),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 10)), ""),
        (_Centred(), "vmapped steps in float64 that differ by"),
        (_Single("raise"), "RuntimeError in fp32: not here"),
        (_Single("double"), "vmapped steps in fp32 that differ by"),
    ],
)
def test_a_model_that_would_be_vmapped_wrongly_is_found_out(module: nn.Module, problem: str) -> None:
    case = Case(module, (1, 8, 8), dtype=torch.float32)
    found = problem_of(case.recipe, case.turns)
    assert problem in found and bool(problem) == bool(found)
    assert case.ended == [None] * 5 and not any(case.progress)


def test_the_precision_that_will_run_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs_of, seen = VmappedModels._outputs, []

    def noted(state: VmappedModels, *rest: Any) -> Any:
        mixed = torch.is_autocast_enabled("cpu")
        (logits,), moved = outputs_of(state, *rest)
        seen.append((logits.dtype, state._recipe.training.precision, mixed))
        return (logits,), moved

    monkeypatch.setattr(VmappedModels, "_outputs", noted)
    training = TrainingSettings(batch_size=32, learning_rate=0.05, precision="bf16")
    case = Case(mlp(Inputs((1, 8, 8), 10)), (1, 8, 8), training=training, dtype=torch.float32)
    assert problem_of(case.recipe, case.turns) == ""
    steps = calibration.TRIAL_STEPS
    assert seen == [(torch.float64, "fp32", False)] * steps + [(torch.float32, "bf16", False)] * steps


def with_proximal_term(weights: Sequence[Tensor], mu: float) -> list[Any]:
    """Add the gradient of mu / 2 |w - w0|^2 to that of each weight, w0 its present value; return the hooks."""

    def add(weight: Tensor) -> Any:
        received = weight.detach().clone()
        return weight.register_hook(lambda gradient: gradient + mu * (weight.detach() - received))

    return [add(weight) for weight in weights]


@pytest.mark.parametrize("name", slow(["mlp", "lenet5", "resnet20"], but=["mlp", "lenet5"]))
def test_a_term_that_only_one_path_has_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FedProx's term is zero at the received parameters, so a first step does not show it."""
    case = CASES[name]()
    case = Case(case.module.float(), case.shape, case.loads[:2], case.training, torch.float32)
    made = calibration.LocalSteps
    hooks: list[Any] = []

    def proximal(forward: Any, weights: Sequence[Tensor], **settings: Any) -> LocalSteps:
        while hooks:
            hooks.pop().remove()
        hooks.extend(with_proximal_term(weights, 1e-3))
        return made(forward, weights, **settings)

    assert problem_of(case.recipe, case.turns) == ""
    with monkeypatch.context() as patch:
        patch.setattr(calibration, "LocalSteps", proximal)
        assert "vmapped steps in float64 that differ by" in problem_of(case.recipe, case.turns)
        patch.setattr(calibration, "TRIAL_STEPS", 1)
        assert problem_of(case.recipe, case.turns) == ""


def plain_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vmapped_models, "objective_of", lambda _: Objective())


def received_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the objective the present weights as the received ones: its term is zero, without an error."""
    start = VmappedModels.__init__

    def moving(state: VmappedModels, *given: Any) -> None:
        start(state, *given)
        state._received = state._weights

    monkeypatch.setattr(VmappedModels, "__init__", moving)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("objective", "ignore"),
    [
        ({"name": "fedprox", "mu": 1e-3}, plain_objective),
        ({"name": "fedprox", "mu": 1e-3}, received_that_moves),
        ({"name": "fedsam", "rho": 1e-3}, plain_objective),
    ],
)
def test_an_objective_that_vmapped_steps_ignore_is_found_out(
    objective: dict[str, Any],
    ignore: Callable[[pytest.MonkeyPatch], None],
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = with_objective(objective, precision=precision)
    case = Case(mlp(Inputs((1, 8, 8), 10)), (1, 8, 8), RAGGED[:2], training, torch.float32)
    assert problem_of(case.recipe, case.turns) == ""
    ignore(monkeypatch)
    assert "vmapped steps in float64 that differ by" in problem_of(case.recipe, case.turns)


def test_momentum_that_only_one_path_has_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    case, made = quick(), calibration.LocalSteps

    def plain(*given: Any, training: TrainingSettings, **settings: Any) -> LocalSteps:
        return made(*given, training=training.model_copy(update={"momentum": 0.0}), **settings)

    monkeypatch.setattr(calibration, "LocalSteps", plain)
    assert "vmapped steps in float64 that differ by" in problem_of(case.recipe, case.turns)


def test_both_paths_take_the_objective_of_one_step_function(monkeypatch: pytest.MonkeyPatch) -> None:
    losses_of = Objective.losses
    case, plain = CASES["nesterov, clipped"](), CASES["nesterov, clipped"]()
    monkeypatch.setattr(Objective, "losses", lambda *batch: 0.1 * losses_of(*batch))
    states = case.states(monkeypatch)
    own = [case.alone(k)[0] for k in range(len(states))]
    monkeypatch.setattr(Objective, "losses", losses_of)
    for k, state in enumerate(states):
        for entry, tensor in state.items():
            torch.testing.assert_close(tensor, own[k][entry], rtol=0, atol=1e-10)
        assert not torch.allclose(state["1.weight"], plain.alone(k)[0]["1.weight"], rtol=0, atol=1e-3)


def test_what_vmap_lacks_is_found_out_and_an_lstm_is_not_among_it() -> None:
    lstm = text_case("char_lstm", RAGGED[:2], torch.float32)
    assert problem_of(lstm.recipe, lstm.turns) == ""
    lstm.module.lstm = nn.LSTM(8, 128, num_layers=2, batch_first=True, bidirectional=True)
    both = Case(lstm.module, (6,), RAGGED[:2], dtype=torch.float32, tokens=20)
    assert "lstm" in problem_of(both.recipe, both.turns)


def test_trying_leaves_the_turns_as_they_were() -> None:
    case = quick()
    assert problem_of(case.recipe, case.turns) == ""
    for k, how in enumerate(case.train()):
        wanted = case.alone(k)[0]
        for entry, view in case.layout.views(how.row).items():
            np.testing.assert_allclose(view, wanted[entry], rtol=0, atol=1e-5)


def test_a_cap_follows_from_what_a_few_devices_take(monkeypatch: pytest.MonkeyPatch) -> None:
    case = quick()
    assert most_in_memory(case.recipe, case.turns[0]) >= 5  # a host's memory is not asked
    gpu = SimpleNamespace(accelerator=torch.device("cuda", 0))
    monkeypatch.setattr(calibration, "_peak_bytes", lambda _, turns: 100 + 50 * len(turns))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 5000))
    assert most_in_memory(gpu, case.turns[0]) == 16  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10, 5000))
    assert most_in_memory(gpu, case.turns[0]) == 1  # type: ignore[arg-type]


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cpu") for name in ("char_lstm", "dropout")),  # the test itself
        *(pytest.param(name, "cuda:0", marks=[pytest.mark.gpu, needs_cuda]) for name in CASES),
    ],
)
def test_on_a_gpu_as_alone_on_the_cpu(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]()
    case = replace(case, module=case.module.float(), device=torch.device(device))
    # A GPU's generator draws other masks from a seed than the CPU's.
    drops = any(isinstance(layer, Dropout) for layer in case.module.modules())
    for k, state in enumerate(case.states(monkeypatch)):
        wanted, loss, _ = case.alone(k, on=case.device if drops else CPU)
        for entry, tensor in state.items():
            torch.testing.assert_close(tensor.cpu(), wanted[entry].cpu(), rtol=0, atol=1e-8)
        how = case.ended[k]
        assert isinstance(how, VmappedResult) and how.loss == pytest.approx(loss, abs=1e-8)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_is_left_as_it_was_and_trains_lenet_vmapped(precision: str) -> None:
    training = TrainingSettings.model_validate({"batch_size": 10, "precision": precision})
    module, where = of("lenet5", (1, 28, 28)), torch.device("cuda", 0)
    case = Case(module, (1, 28, 28), (Load(40, 2),) * 40, training, torch.float32, where)
    recipe, turns = case.recipe, case.turns
    assert problem_of(recipe, turns) == ""
    assert most_in_memory(recipe, turns[0]) >= 40
    before = torch.cuda.memory_allocated()
    loop.train(recipe, turns, most=40)
    assert all(isinstance(how, VmappedResult) for how in case.ended)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_gpu_has_kernels_for_vmapped_batch_norm(precision: str) -> None:
    case = resnet_in(precision, torch.device("cuda", 0))
    keep_batch_norm_fp32(case.module, case.training, device=case.device)
    set_up(case.device, case.training)
    assert "Error" not in problem_of(case.recipe, case.turns)


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_that_runs_out_of_memory_halves_the_group() -> None:
    """The process may have some 400 MB, of which 64 models of 2.3 MB, three times each, are too much."""
    training, where = TrainingSettings(batch_size=4), torch.device("cuda", 0)
    case = Case(of("cnn_fedavg", (1, 28, 28)), (1, 28, 28), (Load(8, 1),) * 64, training, torch.float32, where)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(where).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, 4e8 / total), where)
    try:
        loop.train(case.recipe, case.turns, most=64)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, where)
    assert all(isinstance(how, VmappedResult) and how.steps == 2 for how in case.ended)
