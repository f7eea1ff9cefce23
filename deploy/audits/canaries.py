"""A lower bound of epsilon of one upload under DP-SGD, by one training (Steinke et al. 2023).

Canaries are random sparse samples with random labels; each joins a device's samples with
probability 1/2. The auditor knows all but who joined. Of the upload it estimates how much of each
canary's clipped gradient g_i, at the model received, is in it, and guesses about those with the
most and the least:

    u = (z - v) b / (learning rate epochs)                  b: the samples of a batch
    a = (G G' + 4 s^2 I)^-1 G (u - own - sum g_i / 2)       s = z C sqrt(steps) / epochs
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.methods.statistics import Doubles
from fedstrata.common.randomness import Purpose, generator
from fedstrata.common.settings.privacy import PrivacySettings
from fedstrata.deploy.audits.estimates import LEVEL, Estimate, least_epsilon
from fedstrata.deploy.audits.samples import Samples, given, of_device
from fedstrata.deploy.audits.uploads import AuditedModel, upload
from fedstrata.device.training.objectives.objectives_by_name import objective_of

SHARES: Final = (0.1, 0.25, 0.5, 1.0)  # of the canaries, about which it guesses
CANARIES: Final = 1000
PARAMETERS_MOST: Final = 200_000  # 1.6 GB of canaries' gradients
# Sparse inputs, larger than samples: their gradients are nearly orthogonal, and are clipped.
DENSITY: Final = 0.05
SCALE: Final = 3.0


def check(experiment: Experiment) -> PrivacySettings:
    """Return the privacy that canaries audit. Raises InvalidExperiment without."""
    tier = experiment.tiers[-1]
    if not (tier.privacy.on_samples and tier.privacy.multiplier and tier.privacy.accounted):
        problem = "canaries audit epsilon of samples"
        remedy = 'Set it to "sample", with clip_norm, noise_multiplier and delta.'
        key = f"{experiment.key(tier)}.privacy.unit"
        raise InvalidExperiment(key, tier.privacy.unit, problem, remedy)
    return tier.privacy


def bound(experiment: Experiment, device: str) -> Estimate:
    """Return the bound of a device's first upload, and the accountant's epsilon as the upper end.

    Raises FedstrataError.
    """
    privacy = check(experiment)
    assert privacy.delta is not None and privacy.clip_norm is not None
    model = AuditedModel.first(experiment)
    if model.layout.parameters > PARAMETERS_MOST:
        problem = f"{CANARIES} gradients of {model.layout.parameters} numbers each are too many"
        remedy = f"Use a model of at most {PARAMETERS_MOST}."
        raise InvalidExperiment("model.name", experiment.model.name, problem, remedy)
    own = of_device(experiment, device)
    drawn = _drawn(own, CANARIES, seed=experiment.seed)
    joins = generator(experiment.seed, Purpose.AUDIT, "joins").random(CANARIES) < 0.5
    epochs = experiment.training.epochs
    with TemporaryDirectory() as folder:
        everything = Samples.joined([own, drawn[torch.from_numpy(joins)]])
        audited = given(experiment, Path(folder), {device: everything})
        sent = upload(audited, device, model, epochs=epochs, number=0)
    size = float(min(len(everything), experiment.training.batch_size))
    if privacy.sampling_rate is not None:
        size = privacy.sampling_rate * len(everything)
    moved = torch.cat([each.flatten() for each in model.moves(sent.row)]).double().numpy()
    seen_D = -moved * size / (experiment.learning_rate_in(0) * epochs)
    known_D = _gradients(experiment, model, own, privacy.clip_norm).sum(0)
    canaries_MD = _gradients(experiment, model, drawn, privacy.clip_norm)
    deviation = privacy.multiplier * privacy.clip_norm * sent.report.path_steps**0.5 / epochs
    rest_D = seen_D - known_D - canaries_MD.sum(0) / 2
    gram_MM = canaries_MD @ canaries_MD.T + 4 * deviation**2 * np.eye(CANARIES)
    scores = np.linalg.solve(gram_MM, canaries_MD @ rest_D)
    epsilon = privacy.epsilon(privacy.releases(epochs))
    least = _least(scores, joins, delta=privacy.delta)
    return Estimate(least, least, epsilon, "one run; the accountant's")


def _least(scores: Doubles, joins: npt.NDArray[np.bool_], *, delta: float) -> float:
    """Return the best bound of guesses about each of SHARES, at the level of all together."""
    order = np.argsort(-scores)
    found = 0.0
    for share in SHARES:
        each = int(share * len(scores) / 2)
        right = int(joins[order[:each]].sum() + (~joins[order[-each:]]).sum())
        p = (1 - LEVEL) / len(SHARES)
        found = max(found, least_epsilon(len(scores), 2 * each, right, delta=delta, p=p))
    return found


def _drawn(own: Samples, count: int, *, seed: int) -> Samples:
    chance = generator(seed, Purpose.AUDIT, "canaries")
    shape = (count, *own.inputs.shape[1:])
    values = chance.standard_normal(shape, np.float32) * (chance.random(shape) < DENSITY)
    scale = SCALE * float(own.inputs.std()) / DENSITY**0.5
    inputs = own.inputs.mean() + scale * torch.from_numpy(values)
    labels = chance.choice(np.unique(own.labels.numpy()), count)
    return Samples(inputs, torch.from_numpy(labels))


def _gradients(
    experiment: Experiment, model: AuditedModel, samples: Samples, clip_norm: float
) -> Doubles:
    """Return the clipped gradients of samples at a model, float64 [n, D]."""
    module = model.read(model.row)
    loss = objective_of(experiment.training).sample_loss
    weights = {
        name: weight.detach() for name, weight in module.named_parameters() if weight.requires_grad
    }

    def one(weights: Mapping[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        return loss(functional_call(module, dict(weights), (sample[None],)), label[None])[0]

    each: Any = vmap(grad(one), in_dims=(None, 0, 0))
    found = each(weights, samples.inputs, samples.labels)
    flat = torch.cat([part.flatten(1) for part in found.values()], 1).double()
    shares = (clip_norm / flat.norm(dim=1, keepdim=True)).clamp(max=1)
    clipped: Doubles = (flat * shares).numpy()
    return clipped
