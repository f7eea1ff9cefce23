"""What gradient inversion is tried on: a device's first upload, as one step, five epochs, a codec
or noise make it, and the model that a recombining rule sends to another device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.methods.multi_model import MixingRule
from fedstrata.common.methods.rule import RuleContext, Uploads
from fedstrata.common.model.codec_settings import Codecs
from fedstrata.common.model.codecs import codec_of
from fedstrata.common.model.layout import Row
from fedstrata.common.settings.privacy import NO_PRIVACY
from fedstrata.deploy.audits.samples import Samples, given, of_device
from fedstrata.deploy.audits.uploads import AuditedModel, Upload, upload

EPOCHS: Final = 5


@dataclass(frozen=True, slots=True, eq=False)
class InversionTrial:
    """A gradient, `like` [n] with the labels of what is to be restored, and all `true` samples."""

    gradient: list[Tensor]
    like: Samples
    true: Samples


class InversionTrials:
    """The trials of a device of an experiment; `count`: samples of one step, other ones in each."""

    def __init__(self, experiment: Experiment, device: str, *, count: int) -> None:
        """Raise InvalidExperiment for a model that is not audited."""
        self._experiment = experiment
        self._device = device
        self._count = count
        self.model = AuditedModel.first(experiment)

    @property
    def kinds(self) -> dict[str, Callable[[int], InversionTrial]]:
        """Functions for the n-th trial, by what is inverted."""
        tier = self._experiment.tiers[-1]
        privacy = tier.privacy.model_copy(update={"sampling_rate": None})
        found: dict[str, Callable[[int], InversionTrial]] = {
            "one step": self._step,
            f"{EPOCHS} epochs": self._epochs,
        }
        if not codec_of(tier.transfer.up).exact:
            found[f"one step, {tier.transfer.up.name}"] = partial(
                self._step, transfer=tier.transfer
            )
        if privacy.on_samples or privacy.by_child:
            found[f"one step, noise {privacy.multiplier:g}"] = partial(self._step, privacy=privacy)
        if isinstance(tier.aggregation, MixingRule):
            found[f"one step, next model of {tier.aggregation.name}"] = partial(
                self._recombined, tier.aggregation
            )
        return found

    def _step(self, number: int, **more: Any) -> InversionTrial:
        some = self._some(self._device, number)
        sent = self._sent(self._device, some, **more)
        return self._trial(sent.row, sent.report.path_steps, some, some)

    def _epochs(self, number: int) -> InversionTrial:
        every = of_device(self._experiment, self._device)
        size = self._experiment.training.batch_size
        sent = self._sent(self._device, every, epochs=EPOCHS, size=size)
        some = self._some(self._device, number)
        return self._trial(sent.row, sent.report.path_steps, some, every)

    def _recombined(self, settings: MixingRule, number: int) -> InversionTrial:
        """Return the trial of the next model that is mostly the device's own upload."""
        tree = self._experiment.tree
        parent = tree.parent(self._device)
        siblings = tuple(tree.children[parent])
        layout = self.model.layout
        each = [self._some(name, number) for name in siblings]
        sent = [self._sent(name, some) for name, some in zip(siblings, each, strict=True)]
        rule = settings.build(
            RuleContext(
                layout,
                parent,
                self._experiment.seed,
                measures=False,
                rows=lambda name, count: np.zeros((count, layout.row_bytes), np.uint8),
                children=len(siblings),
            )
        )
        rule.begin(self.model.row)
        rows_K = np.stack([one.row for one in sent])
        reports = tuple(one.report for one in sent)
        mixed = settings.acts_from - 1  # the first round whose models are mixed ones
        rule.aggregate(mixed - 1, Uploads(siblings, rows_K, reports, lambda: None))
        models = rule.dispatch(mixed, siblings)
        place = siblings.index(self._device) if len(models) > 1 else 0
        some = self._some(self._device, number)
        return self._trial(models[place][0], 1, some, Samples.joined(each))

    def _some(self, device: str, number: int) -> Samples:
        """Return the samples of a device in the n-th trial."""
        every = of_device(self._experiment, device)
        return every[torch.arange(number * self._count, (number + 1) * self._count) % len(every)]

    def _sent(
        self, device: str, samples: Samples, *, epochs: int = 1, size: int = 0, **more: Any
    ) -> Upload:
        """Return a device's first upload after training on some samples, by default in one step.

        `more`: of its tier, in place of exact codecs and no privacy.
        """
        experiment = self._experiment
        work = {"epochs": epochs, "batch_size": size or len(samples)}
        of_tier = {"transfer": Codecs(), "privacy": NO_PRIVACY, **more}
        tiers = [*experiment.tiers[:-1], experiment.tiers[-1].model_copy(update=of_tier)]
        training = experiment.training.model_copy(update=work)
        with TemporaryDirectory() as folder:
            alone = given(experiment, Path(folder), {device: samples})
            alone = alone.model_copy(update={"training": training, "tiers": tiers})
            return upload(alone, device, self.model, epochs=epochs, number=0)

    def _trial(self, row: Row, steps: int, like: Samples, true: Samples) -> InversionTrial:
        """Return a trial of the mean gradient of some steps to a flat model."""
        length = self._experiment.learning_rate_in(0) * steps
        return InversionTrial([-move / length for move in self.model.moves(row)], like, true)
