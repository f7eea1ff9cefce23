"""Trials of a device's first model before the run: own code fails here, and in no round.

They find the form in which a user's own model trains, and whether the same training twice gives the
same model.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.host.accelerators import out_of_memory
from fedstrata.common.learning import models
from fedstrata.common.learning.computing import own_code
from fedstrata.common.learning.models import MODEL_KEY, random_samples, random_targets
from fedstrata.common.model.layout import Row
from fedstrata.common.settings import own
from fedstrata.common.settings.own import is_own
from fedstrata.common.settings.own_values import changed, kept_in_files
from fedstrata.common.settings.privacy import check_delta
from fedstrata.common.text import named
from fedstrata.device.jobs import Order
from fedstrata.device.training.batches import LocalDataset, try_augmentation
from fedstrata.device.training.dp_sgd import check_module
from fedstrata.device.training.local_training import LocalTraining, PreparedTraining
from fedstrata.device.training.trained_network import Network, NetworkSource

TRIED_SAMPLES: Final = 8
ROUNDING_MOST: Final = 0.1  # of a step; 0.02 was seen (batch norm)


class TriedTraining(LocalTraining):
    """The trainings of one device, and their trials."""

    def formed(self, made: PreparedTraining) -> NetworkSource:
        """Return the source in the form in which the user's own model trains as it is, and fastest.

        It depends on the experiment alone. Raises InvalidExperiment if the model fails in training,
        or if the same training twice gives other models.
        """
        source = made.source
        few = min(TRIED_SAMPLES, self._experiment.training.batch_size)
        try:
            self.tried(made, 1)
        except InvalidExperiment:
            if few == 1:
                raise
            source = replace(source, joins=True)
        once = self.repeated(replace(made, source=source), few)
        if self._accelerator.type == "cpu" and not self.privacy.on_samples:
            fast = replace(source, memory_format=torch.channels_last)
            with suppress(InvalidExperiment):  # for instance of a view that needs another order
                other = self.tried(replace(made, source=fast), few)
                if self._near(made, self._first(made), once, other):
                    source = fast
        return source

    def repeated(self, made: PreparedTraining, samples: int) -> Row:
        """Train the first model twice on the same random samples; return what that gives.

        Raises InvalidExperiment if both results differ. What the user's files keep of the second
        training, they keep of each, and pass it on from one device to the next: that is reported by
        its name.
        """
        names = [name for name in self._experiment.code_at(self._node).values() if is_own(name)]
        first = self._first(made)
        once = self.tried(made, samples, first)
        before = kept_in_files(names)
        again = self.tried(made, samples, first)
        augmentation = self._experiment.training.own_augmentation
        if augmentation is not None:
            try_augmentation(augmentation, made.local)
        shared = changed(before, kept_in_files(names))
        if self._accelerator.type == "cpu" or self._experiment.training.deterministic:
            same = np.array_equal(once, again)
        else:
            same = self._near(made, first, once, again)
        key, name = next(each for each in own_code(self._experiment).items() if is_own(each[1]))
        if not same:
            problem = "the same training twice gives other models"
            if shared:
                problem += f", and changes {named(shared)}"
            remedy = "Draw random numbers from torch's, numpy's or Python's own generator"
            own.refuse(key, name, problem, f"{remedy}; keep nothing in its module.")
        if shared:
            problem = f"each training changes {named(shared)}, which the devices of a process share"
            remedy = "Keep it in the model: each training makes a new one."
            made.source.note(f"{key} = {name!r}: {problem}. {remedy}")
        return once

    def _near(self, made: PreparedTraining, start: Row, once: Row, other: Row) -> bool:
        """Return whether two steps from one model differ by no more than rounding."""
        start_D, once_D, other_D = map(made.source.parts.exchanged.floats, (start, once, other))
        step = np.linalg.norm(once_D - start_D)
        return bool(np.linalg.norm(other_D - once_D) <= ROUNDING_MOST * step)

    def tried(self, made: PreparedTraining, samples: int, first: Row | None = None) -> Row:
        """Return a model, the first one, after a step of training on so many random samples. Raises
        InvalidExperiment.

        So own code fails before the run, and no round's seconds include the start of PyTorch's
        compiler or of vmap.
        """
        inputs = made.local.inputs
        given = random_samples(inputs, samples).to(self._accelerator)
        labels = random_targets(inputs, samples).to(self._accelerator)
        row = self._first(made) if first is None else first
        network = made.source.network()
        out = np.zeros(made.vectors.links.up.row_bytes + made.vectors.kept_bytes, np.uint8)
        local = LocalDataset(
            inputs, given, labels, torch.arange(samples), lambda images: images, ""
        )
        by = " by DP-SGD" if self.privacy.on_samples else ""
        problem = f"fails in training{by} on {samples} samples with {{}}"
        try:
            with own.guarded(own_code(self._experiment), problem=problem, everything=True):
                try:
                    once = [(0, given[None], labels[None])]
                    private = self.gradient_noise(local, b"", 0)
                    order = Order(row, out, 1, 0)
                    tried = replace(made, local=local)
                    self.trained(
                        tried, network, order, watch=lambda _: None, private=private, some=once
                    )
                except RuntimeError as error:
                    self._explain(error, network)
                    raise
        finally:
            self.release(network)
        return out

    def _explain(self, error: RuntimeError, network: Network) -> None:
        """Raise the error of a trial in its place whose cause is known."""
        if out_of_memory(error):
            raise self.exhausted() from None
        for name, weight in network.module.named_parameters():
            if weight.grad is not None and weight.grad.is_sparse:
                problem = f"the gradient of its {name} is sparse"
                remedy = "Use sparse=False."
                own.refuse(MODEL_KEY, self._experiment.model.name, problem, remedy)

    def _first(self, made: PreparedTraining) -> Row:
        """Return the first model of a run, with zeros behind it."""
        row = np.zeros(made.vectors.links.down.row_bytes + made.vectors.kept_bytes, np.uint8)
        models.write_row(made.source.network().module, made.source.parts.exchanged, row)
        return row

    def check_private(self, source: NetworkSource, *, samples: int) -> None:
        """Check that a batch may expect a sample, and that no layer mixes samples. Raises
        InvalidExperiment.
        """
        table = f"{self._experiment.key(self._experiment.tiers[-1])}.privacy"
        check_delta(table, self.privacy, samples, f"samples of {self._node}")
        rate = self.privacy.sampling_rate
        if rate is not None and rate * samples < 1:
            problem = f"{self._node} has {samples} samples, so a batch would have less than one"
            remedy = f"Use at least {1 / samples:.2g}."
            raise InvalidExperiment(f"{table}.sampling_rate", rate, problem, remedy)
        check_module(source.network().module, self._experiment)
