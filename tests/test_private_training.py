"""DP-SGD beside the plain loops of `test_training_table.py`: its bounds, and what of it devices
refuse.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning.nets import Dropout
from fedstrata.common.model.layout import Row
from fedstrata.common.randomness import SecretNoise
from fedstrata.device.training.dp_sgd import GradientNoise, PrivateSteps, add_clipped
from fedstrata.device.training.objectives.objective import norms, scale
from fedstrata.device.training.trainer import Trainer
from tests.helpers import plain
from tests.helpers.plain import first_model, trainer_of

SAMPLE: Final[dict[str, Any]] = {
    "unit": "sample", "clip_norm": 0.5, "noise_multiplier": 0.8, "delta": 1e-5, "noise": "seeded"
}  # fmt: skip
TRAINING: Final[dict[str, Any]] = {
    "batch_size": 16,
    "learning_rate": 0.1,
    "momentum": 0.9,
    "epochs": 2,
}
NODE: Final = "device-1"


def experiment(privacy: Mapping[str, Any] = {}, **tables: Any) -> Experiment:
    tree: dict[str, Any] = {
        "topology": {"institutions": 0, "devices": 8},
        "data": {"dataset": "digits"},
        "model": {"name": "mlp_digits"},
        "training": TRAINING,
        "cloud": {"privacy": {**SAMPLE, **privacy}},
    }
    return parse(tree | tables)


def prepared(made: Experiment) -> Trainer:
    return trainer_of(made, NODE)


def trained(made: Experiment, *, local_round: int = 3, noise: bytes = b"") -> Row:
    """Return what a device makes of the first model."""
    more = {"epochs": 2, "local_round": local_round, "noise": noise}
    return plain.trained(prepared(made), first_model(made), **more)[0]


def test_an_empty_batch_is_a_step_of_noise_alone() -> None:
    made = experiment({"sampling_rate": 0.006}, training={**TRAINING, "momentum": 0.0})
    out, result = plain.trained(prepared(made), first_model(made))
    assert result.steps == 167 and np.isfinite(out.view(np.float32)).all()


def test_batches_of_less_than_one_sample_are_refused() -> None:
    """Their steps would be more than a parent expects of so many samples."""
    with pytest.raises(
        InvalidExperiment,
        match=r"cloud\.privacy\.sampling_rate = 0\.004: device-1 has 18\d samples",
    ):
        prepared(experiment({"sampling_rate": 0.004}))


def test_a_delta_that_permits_to_publish_a_sample_is_refused() -> None:
    """A device of 180 samples: what publishes one of them, drawn by chance, has epsilon 0 at delta
    = 1 / 180.
    """
    problem = (
        r"cloud\.privacy\.delta = 0\.0057: not below 1 / \d+ samples of device-1, so that it allows"
    )
    with pytest.raises(InvalidExperiment, match=problem):
        prepared(experiment({"delta": 0.0057}))
    prepared(experiment({"delta": 0.0055}))


def test_samples_beyond_the_memory_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = experiment()
    whole = trained(made)
    monkeypatch.setattr("fedstrata.device.training.dp_sgd.NUMBERS_MOST", 5 * len(whole) // 4)
    np.testing.assert_allclose(trained(made).view(np.float32), whole.view(np.float32), atol=1e-5)


def test_norms_of_numbers_and_of_nothing_are_those_of_all_together() -> None:
    tensors = [torch.tensor([3.0, 0.0]), torch.empty(2, 0, 4), torch.tensor([[[4.0]], [[2.0]]])]
    assert norms(tensors).tolist() == [5.0, 2.0]
    scale(tensors, torch.tensor([2.0, 3.0]))
    assert tensors[0].tolist() == [6.0, 0.0] and tensors[2].flatten().tolist() == [8.0, 6.0]
    gradients = {
        "number": torch.tensor([3.0, 0.3, 0.0]),
        "matrix": torch.tensor([[[4.0]], [[0.4]], [[0.0]]]),
    }
    sums = {name: torch.zeros_like(each[0]) for name, each in gradients.items()}
    add_clipped(gradients, sums, clip_norm=1.0)
    assert [float(each.sum()) for each in sums.values()] == pytest.approx([0.9, 1.2])


def test_no_sample_moves_a_step_by_more_than_the_bound() -> None:
    """With one sample more, of any size, the sum differs by the bound at most."""
    gradients = {"a": torch.randn(9, 50), "b": torch.randn(9, 4, 4)}
    gradients["a"][8] *= 1e6
    sums = [
        {name: torch.zeros(each.shape[1:]) for name, each in gradients.items()} for _ in range(2)
    ]
    add_clipped(gradients, sums[0], clip_norm=0.7)
    add_clipped({name: each[:8] for name, each in gradients.items()}, sums[1], clip_norm=0.7)
    apart = torch.cat([(sums[0][name] - sums[1][name]).flatten() for name in gradients])
    assert float(apart.norm()) == pytest.approx(0.7, rel=1e-5)


def test_the_same_key_gives_the_same_bits_and_another_others() -> None:
    made = experiment({"noise": "system"})
    once, again, other = (trained(made, noise=key) for key in (b"a" * 32, b"a" * 32, b"b" * 32))
    assert np.array_equal(once, again) and not np.array_equal(once, other)


class Normalised(nn.Sequential):
    """A model with batch norm."""

    def __init__(self, **_: Any) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))


class Recurrent(nn.Module):
    """A model whose recurrent layer vmap does not batch."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(8, 12, batch_first=True), nn.Linear(12, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Read the rows of an image one after another."""
        outputs, _ = self.cells(images.flatten(1, 2))
        found: Tensor = self.head(outputs[:, -1])
        return found


class Dropping(nn.Sequential):
    """A model that drops most of its features."""

    def __init__(self, **_: Any) -> None:
        super().__init__(nn.Flatten(), Dropout(0.9), nn.Linear(64, 10))


def test_vmap_starts_before_the_first_round_whose_seconds_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    take = PrivateSteps.take

    def taken(steps: PrivateSteps, tensors: Sequence[Tensor]) -> Tensor:
        sizes.append(len(tensors[0]))
        return take(steps, tensors)

    monkeypatch.setattr(PrivateSteps, "take", taken)
    made = experiment()
    prepared(made)
    assert made.training.batch_size in sizes


def test_a_model_that_mixes_samples_is_refused() -> None:
    with pytest.raises(
        InvalidExperiment, match=r"cloud\.privacy\.unit = 'sample': .*its 2 mixes the samples"
    ):
        prepared(experiment(model={"name": f"{__name__}:Normalised"}))


def test_a_model_without_gradients_of_single_samples_is_refused() -> None:
    with pytest.raises(InvalidExperiment, match="Recurrent': fails in training by DP-SGD on"):
        prepared(experiment(model={"name": f"{__name__}:Recurrent"}))


class Reading(nn.Module):
    """A model of texts, as fedstrata's own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells = nn.Embedding(20, 8), nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 10)

    def forward(self, texts: Tensor) -> Tensor:
        """Read texts, int64 [B, L]."""
        outputs, _ = self.cells(self.words(texts))
        found: Tensor = self.head(outputs[:, -1])
        return found


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_step_of_an_lstm_is_that_of_a_plain_loop() -> None:
    torch.manual_seed(1)
    module, made = Reading(), experiment(training={**TRAINING, "momentum": 0.0})
    texts, labels = torch.randint(0, 20, (6, 7)), torch.randint(0, 10, (6,))
    twin = copy.deepcopy(module)
    private = GradientNoise(0.5, 0.8, SecretNoise(bytes(32)))
    steps = PrivateSteps(
        module, dict(module.named_parameters()), made, learning_rate=1.0, private=private
    )
    loss = steps.take([texts, labels])
    wanted, _ = plain.plain_steps(
        twin,
        [(0, texts, labels)],
        training=made.training,
        rate=1.0,
        last_epoch=0,
        private=(made.tiers[-1].privacy, SecretNoise(bytes(32)), 6),
    )
    assert 6 * float(loss) == pytest.approx(wanted)
    for weight, other in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(weight, other, atol=1e-6, rtol=1e-4)


def test_each_sample_has_its_own_dropout_mask() -> None:
    made = experiment(
        {"noise_multiplier": 0.0, "clip_norm": 100.0}, model={"name": f"{__name__}:Dropping"}
    )
    once, again, later = (trained(made, local_round=number) for number in (3, 3, 4))
    assert np.array_equal(once, again) and not np.array_equal(once, later)


def test_neither_clipping_nor_noise_takes_the_recorded_steps() -> None:
    made, public = experiment({"clip_norm": None, "noise_multiplier": 0.0}), experiment(cloud={})
    assert np.array_equal(trained(made), trained(public))
