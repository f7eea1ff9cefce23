"""Augmentations of the user's own: drawn by the experiment's seed, tried before the run, and
refused in one line.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.settings.own import permit
from fedstrata.device.jobs import most_together
from fedstrata.device.training import batches
from fedstrata.device.training.trainer import Trainer
from tests.helpers.plain import first_model, trained, trainer_of
from tests.helpers.steps import batches_of

HERE = "tests.test_own_augmentation"
CPU = torch.device("cpu")


class Same:
    def __call__(self, sample: Tensor) -> Tensor:
        return sample


class Noise:
    """Draws from all three generators."""

    def __init__(self, *, most: int = 3) -> None:
        self.most = most

    def __call__(self, sample: Tensor) -> Tensor:
        drawn = (
            int(torch.randint(self.most, ()))
            + int(np.random.randint(self.most))
            + random.randrange(self.most)
        )
        return (sample + drawn).to(sample.dtype)


class Counts(Noise):
    """Keeps what no state has."""

    calls = 0

    def __call__(self, sample: Tensor) -> Tensor:
        self.calls += 1
        return (sample + self.calls % 2).to(sample.dtype)


class Keeps:
    """Keeps what all of them share, without an effect."""

    calls = 0

    def __call__(self, sample: Tensor) -> Tensor:
        Keeps.calls += 1
        return sample


class Cropped:
    def __call__(self, sample: Tensor) -> Tensor:
        return sample[..., 1:]


class Scaled:
    def __call__(self, sample: Tensor) -> Tensor:
        return sample / 255


class Array:
    def __call__(self, sample: Tensor) -> Any:
        return sample.numpy()


class Fails:
    def __call__(self, sample: Tensor) -> Tensor:
        raise KeyError("x")


class Unseeded:
    def __call__(self, sample: Tensor) -> Tensor:
        return (sample + int(np.random.default_rng().integers(100))).to(sample.dtype)


class NotCallable:
    pass


def function() -> Callable[[Tensor], Tensor]:
    return Same()


def experiment(name: str = "", **keywords: Any) -> Experiment:
    training: dict[str, Any] = {"batch_size": 10}
    if name:
        training["augmentation"] = {"name": f"{HERE}:{name}", **keywords}
    return parse(
        {"topology": {"devices": 12}, "model": {"name": "mlp_digits"}, "training": training}
    )


def inputs_of(lab: Experiment, *, epochs: int = 2, local_round: int = 0) -> list[Tensor]:
    local = batches.load_local_dataset(lab, "device-1", accelerator=CPU)
    some = batches_of(local, lab, node="device-1", epochs=epochs, local_round=local_round)
    return [inputs for _, inputs, _ in some]


def test_it_is_drawn_anew_in_each_epoch_and_round_and_the_same_again() -> None:
    lab, plain = experiment("Noise"), inputs_of(experiment())
    once, again, later = inputs_of(lab), inputs_of(lab), inputs_of(lab, local_round=1)
    assert all(map(torch.equal, once, again))
    assert not any(map(torch.equal, once, plain)) and not any(map(torch.equal, once, later))
    shifts = [changed - given for changed, given in zip(once, plain, strict=True)]
    # one number for each sample
    assert all(float(each.flatten(1).std(1).max()) < 1e-4 for each in shifts)
    drawn = torch.cat([each.flatten(1).mean(1) for each in shifts])
    assert len(drawn.round(decimals=3).unique()) == 7  # 0 to 6 levels
    half = len(drawn) // 2
    assert not torch.equal(drawn[:half].sort().values, drawn[half:].sort().values)


# a class, and a function that makes an object
@pytest.mark.parametrize("name", ["Same", "function"])
def test_one_that_changes_nothing_gives_the_batches_without_any(name: str) -> None:
    assert all(map(torch.equal, inputs_of(experiment(name)), inputs_of(experiment())))


def test_it_leaves_the_global_generators() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    inputs_of(experiment("Noise"))
    assert torch.equal(torch.get_rng_state(), before)


def test_it_is_made_anew_for_each_local_round() -> None:
    lab = experiment("Counts")
    assert all(map(torch.equal, inputs_of(lab, local_round=1), inputs_of(lab, local_round=1)))


def test_a_trainer_gives_the_same_model_twice() -> None:
    lab = experiment("Noise", most=9)
    assert np.array_equal(
        *(trained(trainer_of(lab, "device-1"), first_model(lab))[0] for _ in range(2))
    )


@pytest.mark.parametrize(
    ("name", "keywords", "problem"),
    [
        (
            "Cropped",
            {},
            (
                r"returns torch.uint8 \[1, 8, 7\] for a sample of torch.uint8 \[1, 8, 8\]. Return "
                r"a "
                r"tensor of"
            ),
        ),
        ("Scaled", {}, r"returns torch.float32 \[1, 8, 8\] for a sample of torch.uint8"),
        ("Array", {}, "returns ndarray for a sample of"),
        (
            "Fails",
            {},
            r"fails with KeyError: 'x', in Fails.__call__ \(tests/test_own_augmentation.py:\d+\)",
        ),
        ("Unseeded", {}, "the same samples twice become others"),
        ("NotCallable", {}, "makes NotCallable, which is not callable"),
        ("Absent", {}, "cannot be imported"),
    ],
)
def test_what_is_wrong_ends_the_run_before_it_begins(
    name: str, keywords: dict[str, int], problem: str
) -> None:
    trainer = Trainer(experiment(name, **keywords), node="device-1", accelerator="cpu")
    with pytest.raises(
        InvalidExperiment, match=rf"^training\.augmentation\.name = '{HERE}:{name}': .*{problem}"
    ):
        trainer.prepare()


def test_what_it_keeps_for_all_devices_of_a_process_is_named() -> None:
    trainer = Trainer(experiment("Keeps"), node="device-1", accelerator="cpu")
    trainer.prepare()
    (note,) = trainer.notes
    assert note.startswith(
        f"training.augmentation.name = '{HERE}:Keeps': each training changes {HERE}.Keeps.calls, "
    )


def test_it_runs_on_devices_that_allow_it() -> None:
    lab = experiment("Noise")
    names = lab.code_at("device-1")
    assert names["training.augmentation.name"] == f"{HERE}:Noise"
    assert "training.augmentation.name" not in lab.code_at("cloud") | lab.code_at("institution-0")
    permit(names, ["tests"])
    with pytest.raises(InvalidExperiment, match=r"training\.augmentation\.name.*--allow tests"):
        permit(names, [])
    assert "training.augmentation.name" not in experiment().code_at("device-1")


def test_devices_are_trained_one_after_another() -> None:
    assert most_together(experiment(), "cuda:0") > 1
    assert most_together(experiment("Noise"), "cuda:0") == 1


def test_flips_and_crops_have_the_keys_of_before() -> None:
    lab = parse({"training": {"augmentation": {"flip": True, "crop": 2}}})
    assert json.loads(lab.to_json())["training"]["augmentation"] == {"flip": True, "crop": 2}
