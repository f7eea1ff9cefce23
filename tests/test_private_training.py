"""DP-SGD against plain loops over single samples, and what of it a lab's devices refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import models
from fedstrata.common.learning.nets import Dropout
from fedstrata.common.model.layout import Row
from fedstrata.common.randomness import Noise, Purpose, SecretNoise, SeededNoise
from fedstrata.device.training.batches import blocks
from fedstrata.device.training.private import GradientNoise, PrivateSteps, add_clipped
from fedstrata.device.training.trainer import Trainer
from tests.helpers import plain
from tests.helpers.plain import first_model, trained_together, trainer_of

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


def trained(
    trainer: Trainer, row: Row, *, epochs: int = 2, local_round: int = 3, noise: bytes = b""
) -> tuple[Row, Work]:
    return plain.trained(trainer, row, epochs=epochs, local_round=local_round, noise=noise)


def plain_gradient(
    module: nn.Module, inputs: Tensor, labels: Tensor, *, clip_norm: float
) -> list[Tensor]:
    """Return the sum of the clipped gradients of single samples, one backward pass for each."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    sums = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
    for sample, label in zip(inputs, labels, strict=True):
        module.zero_grad()
        functional.cross_entropy(module(sample[None]), label[None]).backward()
        gradients = [weight.grad.double() for weight in weights if weight.grad is not None]
        norm = float(torch.cat([each.flatten() for each in gradients]).norm())
        for whole, each in zip(sums, gradients, strict=True):
            whole.add_(each, alpha=min(1.0, clip_norm / norm))
    return sums


def plain_loop(
    trainer: Trainer,
    made: Experiment,
    row: Row,
    batches: Any,
    noise: Noise,
    *,
    divisor: float | None = None,
    mu: float = 0.0,
) -> npt.NDArray[np.float64]:
    """Return the weights that DP-SGD by plain loops gives, float64 [D], with momentum as
    torch.optim.SGD's.
    """
    module = models.of(made, inputs=trainer._prepared.local.inputs)
    models.read_row(module, trainer.layout, row)
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    received = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for _, inputs, labels in batches:
        for some, theirs in zip(inputs, labels, strict=True):
            sums = plain_gradient(module, some, theirs, clip_norm=0.5)
            drawn = torch.from_numpy(0.8 * 0.5 * noise.normals(sum(each.numel() for each in sums)))
            for weight, each, part, start in zip(
                weights, sums, drawn.split([each.numel() for each in sums]), received, strict=True
            ):
                gradient = (each + part.view(each.shape)) / (divisor or len(theirs))
                weight.grad = gradient.float() + mu * (weight.detach() - start)
            optimizer.step()
    return np.concatenate([weight.detach().double().numpy().ravel() for weight in weights])


def weights_in(trainer: Trainer, row: Row) -> npt.NDArray[np.float64]:
    """Return a row's weights in the order of the module's parameters."""
    made = models.of(trainer._experiment, inputs=trainer._prepared.local.inputs)
    views = trainer.layout.views(row)
    return np.concatenate(
        [views[name].astype(np.float64).ravel() for name, _ in made.named_parameters()]
    )


@pytest.mark.parametrize("name", ["mlp_digits", "cnn_digits"])
@pytest.mark.parametrize("objective", ["cross_entropy", "fedprox"])
def test_a_local_round_is_that_of_a_plain_loop_over_single_samples(
    name: str, objective: str
) -> None:
    training = {
        **TRAINING,
        "objective": {"name": objective} | ({"mu": 0.3} if objective == "fedprox" else {}),
    }
    made = experiment(
        model={"name": name}, training=training, topology={"institutions": 0, "devices": 40}
    )
    trainer = prepared(made)
    row = first_model(made)
    out, result = trained(trainer, row)
    batches = list(blocks(trainer._prepared.local, made, node=NODE, epochs=2, local_round=3))
    noise = SeededNoise(made.seed, Purpose.PRIVACY, NODE, 3)
    expected = plain_loop(
        trainer, made, row, batches, noise, mu=0.3 if objective == "fedprox" else 0.0
    )
    moved = np.linalg.norm(expected - weights_in(trainer, row))
    assert np.linalg.norm(weights_in(trainer, out) - expected) < 1e-5 * moved
    assert result.steps == 2 * len(trainer._prepared.local.sizes(16)) and result.loss is not None


def test_poisson_batches_are_those_of_a_plain_loop() -> None:
    made = experiment({"sampling_rate": 0.1})
    trainer = prepared(made)
    row, local = first_model(made), trainer._prepared.local
    key = bytes(range(32))
    out, result = trained(trainer, row, noise=key)
    noise, sizes = SecretNoise(key), []
    count = len(local.samples)

    def batches() -> Any:
        for _ in range(20):
            chosen = local.samples[np.flatnonzero(noise.uniforms(count) < 0.1)]
            sizes.append(len(chosen))
            yield 0, local.normalise(local.images[chosen])[None], local.labels[chosen][None]

    expected = plain_loop(trainer, made, row, batches(), noise, divisor=0.1 * count)
    moved = np.linalg.norm(expected - weights_in(trainer, row))
    assert np.linalg.norm(weights_in(trainer, out) - expected) < 1e-5 * moved
    assert result.steps == 20 and len(set(sizes)) > 5


def test_an_empty_batch_is_a_step_of_noise_alone() -> None:
    made = experiment({"sampling_rate": 0.006}, training={**TRAINING, "momentum": 0.0})
    trainer = prepared(made)
    out, result = trained(trainer, first_model(made), epochs=1)
    assert result.steps == 167 and np.isfinite(weights_in(trainer, out)).all()


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
    trainer = prepared(made)
    row = first_model(made)
    whole, _ = trained(trainer, row)
    monkeypatch.setattr(
        "fedstrata.device.training.private.NUMBERS_MOST", 5 * trainer.layout.parameters
    )
    parts, _ = trained(trainer, row)
    np.testing.assert_allclose(weights_in(trainer, parts), weights_in(trainer, whole), atol=1e-5)


def test_gradients_are_clipped_over_all_weights_of_a_sample() -> None:
    gradients = {
        "a": torch.tensor([[3.0], [0.3], [0.0]]),
        "b": torch.tensor([[[4.0]], [[0.4]], [[0.0]]]),
    }
    sums = {"a": torch.zeros(1), "b": torch.zeros(1, 1)}
    add_clipped(gradients, sums, clip_norm=1.0)
    torch.testing.assert_close(sums["a"], torch.tensor([0.6 + 0.3]))
    torch.testing.assert_close(sums["b"], torch.tensor([[0.8 + 0.4]]))


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
    trainer = prepared(made)
    row = first_model(made)
    once, again, other = (
        trained(trainer, row, noise=key)[0] for key in (b"a" * 32, b"a" * 32, b"b" * 32)
    )
    assert np.array_equal(once, again) and not np.array_equal(once, other)


def test_devices_that_could_be_vmapped_train_one_after_another(vmapped_on_cpu: None) -> None:
    made = experiment()
    row = first_model(made)
    (found,) = trained_together(made, ("device-0", NODE), row, epochs=2, local_round=3)
    assert all(how.path == "in-process" for _, how in found)
    assert np.array_equal(found[1][0], trained(prepared(made), row)[0])


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
    expected = [each / 6 for each in plain_gradient(module, texts, labels, clip_norm=0.5)]
    module.zero_grad()
    before = [weight.detach().clone() for weight in module.parameters()]
    private = GradientNoise(0.5, 0.0, SecretNoise(bytes(32)))
    steps = PrivateSteps(
        module, dict(module.named_parameters()), made, learning_rate=1.0, private=private
    )
    steps.take([texts, labels])
    for weight, start, gradient in zip(module.parameters(), before, expected, strict=True):
        torch.testing.assert_close(
            (start - weight.detach()).double(), gradient, atol=1e-6, rtol=1e-4
        )


def test_each_sample_has_its_own_dropout_mask() -> None:
    made = experiment(
        {"noise_multiplier": 0.0, "clip_norm": 100.0}, model={"name": f"{__name__}:Dropping"}
    )
    trainer = prepared(made)
    row = first_model(made)
    once, again = (trained(trainer, row)[0] for _ in range(2))
    assert np.array_equal(once, again) and not np.array_equal(
        once, trained(trainer, row, local_round=4)[0]
    )


def test_neither_clipping_nor_noise_takes_the_recorded_steps() -> None:
    made, public = experiment({"clip_norm": None, "noise_multiplier": 0.0}), experiment(cloud={})
    row = first_model(made)
    assert np.array_equal(trained(prepared(made), row)[0], trained(prepared(public), row)[0])


def test_wide_clipping_without_noise_is_sgd() -> None:
    made = experiment({"clip_norm": 1e6, "noise_multiplier": 0.0})
    plain = experiment({"clip_norm": None, "noise_multiplier": 0.0})
    one, other = prepared(made), prepared(plain)
    row = first_model(made)
    found, expected = (weights_in(each, trained(each, row)[0]) for each in (one, other))
    np.testing.assert_allclose(found, expected, atol=1e-5)
