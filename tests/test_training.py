"""A local round's settings: learning rates as PyTorch's schedulers give them, steps as
torch.optim.SGD takes them, and images changed as a loop over pixels changes them.
"""

from __future__ import annotations

import json
import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets
from fedstrata.common.settings.training import (
    Augmentation,
    Schedule,
    TrainingSettings,
    learning_rate,
)
from fedstrata.device.training import batches
from tests.helpers.steps import batches_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Let nothing so small wait for a second thread, which a busy machine gives late."""
    torch.set_num_threads(1)


def rates(schedule: Schedule, global_rounds: int, *, start: float = 0.1) -> list[float]:
    training = TrainingSettings(learning_rate=start, schedule=schedule)
    return [
        learning_rate(training, global_round=t, global_rounds=global_rounds)
        for t in range(global_rounds)
    ]


def by_pytorch(schedule: Schedule, global_rounds: int, *, start: float = 0.1) -> list[float]:
    optimiser = torch.optim.SGD([torch.zeros(1)], start)
    after: lr_scheduler.LRScheduler
    if schedule.name == "step":
        assert schedule.every and schedule.factor
        after = lr_scheduler.StepLR(optimiser, schedule.every, schedule.factor)
    elif schedule.name == "exponential":
        assert schedule.factor
        after = lr_scheduler.ExponentialLR(optimiser, schedule.factor)
    elif schedule.name == "cosine":
        length = global_rounds - schedule.warmup
        after = lr_scheduler.CosineAnnealingLR(optimiser, length, start * schedule.final)
    else:
        after = lr_scheduler.ConstantLR(optimiser, 1.0)
    found = [
        start * (t + 1) / (schedule.warmup + 1) for t in range(min(schedule.warmup, global_rounds))
    ]
    with warnings.catch_warnings(action="ignore"):  # of schedulers without steps
        while len(found) < global_rounds:
            found.append(optimiser.param_groups[0]["lr"])
            after.step()
    return found


@given(
    name=st.sampled_from(["constant", "step", "exponential", "cosine"]),
    warmup=st.integers(0, 12),
    every=st.integers(1, 9),
    factor=st.floats(0.1, 1),
    final=st.floats(0, 1),
    global_rounds=st.integers(1, 30),
)
def test_schedules_are_pytorchs(
    name: Any, warmup: int, every: int, factor: float, final: float, global_rounds: int
) -> None:
    schedule = Schedule(name=name, warmup=warmup, every=every, factor=factor, final=final)
    found = rates(schedule, global_rounds)
    np.testing.assert_allclose(found, by_pytorch(schedule, global_rounds), rtol=1e-9, atol=1e-15)
    assert all(rate > 0 for rate in found)
    rising, falling = found[: warmup + 1], found[warmup:]
    assert rising == sorted(rising) and all(a >= b * (1 - 1e-12) for a, b in pairwise(falling))


def test_rates_written_out() -> None:
    assert rates(Schedule(warmup=3), 5) == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
    assert rates(Schedule(name="inverse", halving=2, warmup=1), 4) == pytest.approx(
        [0.05, 0.1, 0.1 * 2 / 3, 0.05]
    )


def test_the_keys_of_sgd_may_stand_in_its_table() -> None:
    short = parse({"training": {"momentum": 0.5, "weight_decay": 0.1}})
    table = parse(
        {"training": {"optimizer": {"name": "sgd", "momentum": 0.5, "weight_decay": 0.1}}}
    )
    assert table == short and table.digest == short.digest
    assert parse({"training": {"optimizer": "sgd"}}) == parse({})
    adam = parse({"training": {"optimizer": "adam"}})
    assert (
        parse(adam.to_json()) == adam and "momentum" not in json.loads(adam.to_json())["training"]
    )


def changed_by_hand(
    image: np.ndarray, *, flip: bool, shift: tuple[int, int], crop: int
) -> np.ndarray:
    channels, height, width = image.shape
    out = np.zeros_like(image)
    for c in range(channels):
        for i in range(height):
            for j in range(width):
                row, column = i + shift[0] - crop, (width - 1 - j if flip else j) + shift[1] - crop
                if 0 <= row < height and 0 <= column < width:
                    out[c, i, j] = image[c, row, column]
    return out


@given(
    shape=st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
    flip=st.booleans(),
    crop=st.integers(0, 3),
    dtype=st.sampled_from([np.uint8, np.float32]),
)
def test_images_change_as_in_a_loop_over_pixels(
    shape: tuple[int, int, int, int], flip: bool, crop: int, dtype: Any
) -> None:
    images = np.random.default_rng(1).integers(1, 256, shape).astype(dtype)
    settings = Augmentation(flip=flip, crop=crop)
    changes = batches.draw_changes(
        settings, len(images), source=np.random.default_rng(2), device=CPU
    )
    found = batches.change_images(torch.from_numpy(images), changes, crop=crop)
    assert found.shape == images.shape and found.is_contiguous()
    for i, image in enumerate(images):
        y, x = changes.shifts[i].tolist()
        wanted = changed_by_hand(image, flip=bool(changes.flips[i]), shift=(y, x), crop=crop)
        np.testing.assert_array_equal(found[i].numpy(), wanted)


def test_half_are_flipped_and_all_windows_alike_likely() -> None:
    def draw(**settings: Any) -> batches.Changes:
        return batches.draw_changes(
            Augmentation(**settings), 9000, source=np.random.default_rng(1), device=CPU
        )

    both = draw(flip=True, crop=1)
    assert abs(float(both.flips.float().mean()) - 0.5) < 0.02
    counts = torch.bincount(3 * both.shifts[:, 0] + both.shifts[:, 1])
    assert len(counts) == 9 and int(counts.min()) > 850 and int(counts.max()) < 1150
    assert not draw(crop=4).flips.any() and int(draw(crop=4).shifts.max()) == 8
    assert not draw(flip=True).shifts.any()


def lab_of(**settings: Any) -> Experiment:
    return parse({"training": {"augmentation": settings, "batch_size": 7}})


def rounds_inputs(
    lab: Experiment, *, node: str = "device-0", local_round: int = 0, epochs: int = 2
) -> list[torch.Tensor]:
    device = batches.load_local_dataset(
        parse({"topology": {"devices": 1}}), "device-0", accelerator=CPU
    )
    return [
        inputs
        for _, inputs, _ in batches_of(
            device, lab, node=node, epochs=epochs, local_round=local_round
        )
    ]


def test_a_device_makes_no_list_of_all_samples_of_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many devices it would leave holes in the process's memory, each as large as all devices'
    samples.
    """
    lab, made = parse({"topology": {"devices": 4}}), []
    batches.load_local_dataset(lab, "device-0", accelerator=CPU)  # caches
    arange = torch.arange
    monkeypatch.setattr(
        torch, "arange", lambda *sizes, **options: made.append(sizes) or arange(*sizes, **options)
    )
    assert len(batches.load_local_dataset(lab, "device-1", accelerator=CPU).samples) and not made


def test_a_rounds_images_depend_on_seed_node_and_round_and_not_on_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = lab_of(flip=True, crop=1)
    first = torch.cat(rounds_inputs(lab))
    assert torch.equal(torch.cat(rounds_inputs(lab)), first)
    assert not torch.equal(torch.cat(rounds_inputs(lab, local_round=1)), first)
    assert not torch.equal(torch.cat(rounds_inputs(lab, node="device-1")), first)
    monkeypatch.setattr(batches, "BLOCK_BYTES", 1)
    assert torch.equal(torch.cat(rounds_inputs(lab)), first)


def test_the_order_is_as_without_augmentation_and_each_epoch_changes_images_anew() -> None:
    plain, flipped = rounds_inputs(lab_of()), rounds_inputs(lab_of(flip=True))
    count = len(datasets.load(lab_of().data).train_labels)
    assert [len(batch) for batch in flipped] == [len(batch) for batch in plain]
    straight, turned = torch.cat(plain), torch.cat(flipped)
    as_it_was = (turned == straight).flatten(1).all(1)
    mirrored = (turned == straight.flip(3)).flatten(1).all(1)
    assert (as_it_was | mirrored).all() and len(turned) == 2 * count
    for epoch in (as_it_was[:count], as_it_was[count:]):
        assert 0.45 < float(epoch.float().mean()) < 0.55
    assert not torch.equal(as_it_was[:count], as_it_was[count:])
