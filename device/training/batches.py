"""A device's local dataset, the batches of a local round, and the flips and crops of many images at
once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment import schema
from fedstrata.common.learning import datasets, splits
from fedstrata.common.learning.computing import seeded
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.methods.adversary import Adversary
from fedstrata.common.methods.attack import LabelledSamples
from fedstrata.common.methods.mixing import Floats
from fedstrata.common.randomness import Purpose, generator, torch_seed
from fedstrata.common.settings import own
from fedstrata.common.settings.training import Augmentation, OwnAugmentation


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """Changes of n images: `flips` bool [n], and `shifts` int64 [n, 2], the first row and column of
    the windows.
    """

    flips: Tensor
    shifts: Tensor

    def __getitem__(self, some: slice | Tensor) -> Changes:
        return Changes(self.flips[some], self.shifts[some])

    def to(self, device: torch.device) -> Changes:
        """Return the same changes on another device."""
        return Changes(self.flips.to(device), self.shifts.to(device))

    @classmethod
    def joined(cls, parts: Iterable[Changes | None]) -> Changes | None:
        """Return the changes of all images of all parts, None if no part has any."""
        some = [part for part in parts if part is not None]
        if not some:
            return None
        return cls(
            torch.cat([part.flips for part in some]), torch.cat([part.shifts for part in some])
        )


def draw_changes(
    augmentation: Augmentation, count: int, *, source: np.random.Generator, device: torch.device
) -> Changes:
    """Draw the changes of `count` images: half of them flipped, all windows in the frame equally
    likely.
    """
    flips = source.random(count) < (0.5 if augmentation.flip else 0.0)
    shifts = source.integers(0, 2 * augmentation.crop + 1, (count, 2))
    return Changes(torch.from_numpy(flips).to(device), torch.from_numpy(shifts).to(device))


def change_images(images: Tensor, changes: Changes, *, crop: int) -> Tensor:
    """Return the images [n, C, H, W] of any dtype, padded by `crop` zero pixels, cropped to their
    windows and flipped.

    The order does not matter: a window of a flipped image is another window, flipped.
    """
    height, width = images.shape[2:]
    columns = torch.arange(width, device=images.device)
    columns = torch.where(changes.flips[:, None], columns.flip(0), columns) + changes.shifts[:, 1:]
    rows = torch.arange(height, device=images.device) + changes.shifts[:, :1]
    framed = functional.pad(images, (crop, crop, crop, crop)).permute(0, 2, 3, 1)
    each = torch.arange(len(images), device=images.device)
    found = framed[each[:, None, None], rows[:, :, None], columns[:, None, :]]  # [n, H, W, C]
    return found.permute(0, 3, 1, 2).contiguous()


class OwnSamples:
    """The user's own augmentation: an object of the class, made anew for each local round. Raises
    InvalidExperiment.
    """

    def __init__(self, settings: OwnAugmentation) -> None:
        self._name = settings.name
        made = own.build(AUGMENTATION_KEY, settings, object)
        if not callable(made):
            own.refuse(
                AUGMENTATION_KEY,
                self._name,
                f"makes {type(made).__name__}, which is not callable",
                "Let it be.",
            )
        self._augment = made

    def __call__(self, samples: Tensor, *, seed: int) -> Tensor:
        """Return the samples [n, ...] as the object changes each, with the generators seeded.
        Raises InvalidExperiment.

        A sample keeps its shape and type.
        """
        with seeded(seed, samples.device), own.guarded({AUGMENTATION_KEY: self._name}):
            found = [self._augment(sample) for sample in samples.unbind()]
        for given, made in zip(samples, found, strict=True):
            if not isinstance(made, Tensor) or (made.shape, made.dtype) != (
                given.shape,
                given.dtype,
            ):
                if isinstance(made, Tensor):
                    has = f"{made.dtype} {list(made.shape)}"
                else:
                    has = type(made).__name__
                problem = f"returns {has} for a sample of {given.dtype} {list(given.shape)}"
                own.refuse(
                    AUGMENTATION_KEY,
                    self._name,
                    problem,
                    "Return a tensor of the same shape and type.",
                )
        return torch.stack(found).to(samples.device)


def try_augmentation(settings: OwnAugmentation, local: LocalDataset) -> None:
    """Check that an augmentation changes samples, the same ones twice in the same way. Raises
    InvalidExperiment.
    """
    some = local.images.index_select(0, local.samples[:TRIED_SAMPLES])
    once, again = (OwnSamples(settings)(some.clone(), seed=1) for _ in range(2))
    if not torch.equal(once, again):
        remedy = "Draw random numbers from torch's, numpy's or Python's own generator."
        own.refuse(AUGMENTATION_KEY, settings.name, "the same samples twice become others", remedy)


log = logging.getLogger("fedstrata.data")

AUGMENTATION_KEY: Final = "training.augmentation.name"
TRIED_SAMPLES: Final = 8

# of samples gathered, changed and normalised at once: they stay in a core's cache
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class ScoredSamples:
    """`samples` int64 [m], at least one, are a device's test samples: indices in `images` and
    `labels`, on the accelerator.
    """

    images: Tensor
    labels: Tensor
    samples: Tensor

    def on(self, accelerator: torch.device) -> ScoredSamples:
        """Return a copy of these samples alone on an accelerator."""
        images = self.images[self.samples].to(accelerator)
        labels = self.labels[self.samples].to(accelerator)
        return ScoredSamples(images, labels, torch.arange(len(labels), device=accelerator))


@dataclass(frozen=True, slots=True, eq=False)
class LocalDataset:
    """`samples` int64 [n] are the indices of this device's samples in `images` and `labels`, on the
    accelerator.

    `partition` is the digest of the whole split, empty if nothing is split. `joins`: the model
    cannot train on one sample, which therefore joins the batch before. `tests`: the samples on
    which the device scores models, if it does.
    """

    inputs: Inputs
    images: Tensor
    labels: Tensor
    samples: Tensor
    normalise: datasets.Normalise
    partition: str
    joins: bool = False
    tests: ScoredSamples | None = None

    def sizes(self, batch_size: int) -> list[int]:
        """Return the sizes of an epoch's batches, whose last one may be partial."""
        whole, rest = divmod(len(self.samples), batch_size)
        if self.joins and whole and rest == 1:
            return [*[batch_size] * (whole - 1), batch_size + 1]
        return [batch_size] * whole + [rest] * (rest > 0)

    def label_counts(self) -> Floats:
        """Return how many of the device's samples each label has, float32 [classes]; of numbers
        [0].
        """
        if self.inputs.numbers:
            return np.zeros(0, np.float32)
        counts = torch.bincount(self.labels[self.samples], minlength=self.inputs.classes)
        return counts.float().cpu().numpy()


def load_local_dataset(
    experiment: schema.Experiment, node: str, *, accelerator: torch.device
) -> LocalDataset:
    """Load the data and select the device's samples. Takes seconds. Raises InvalidExperiment."""
    alone = splits.own_user(experiment, node=node)
    dataset = datasets.load(experiment.data, node=node) if alone is None else alone[0]
    # else the cloud shows them, for all
    for note in dataset.notes if experiment.data.private else ():
        log.warning("%s: %s", node, note)
    asked = experiment.training.image_changes
    if asked.changes and not dataset.inputs.are_images:
        key, value = ("flip", True) if asked.flip else ("crop", asked.crop)
        problem = f"the data set has {dataset.inputs}"
        raise InvalidExperiment(f"training.augmentation.{key}", value, problem, "Omit it.")
    if experiment.data.private or alone is not None:
        samples = torch.arange(len(dataset.train_labels))
        partition = "" if alone is None else alone[1]
    else:
        split = splits.split_of(experiment, node=node)
        samples = torch.from_numpy(splits.samples_of(experiment, split, node=node))
        partition = split.digest
    images = dataset.train_images
    labels = dataset.train_labels
    samples, tests = _without_tests(samples, dataset, experiment, node, alone=alone is not None)
    if accelerator.type != "cpu":
        images = images[samples].to(accelerator)
        labels = labels[samples].to(accelerator)
        samples = torch.arange(len(samples), device=accelerator)
        tests = None if tests is None else tests.on(accelerator)
    normalise = dataset.normaliser(accelerator)
    local = LocalDataset(dataset.inputs, images, labels, samples, normalise, partition, tests=tests)
    if experiment.training.own_augmentation is not None:
        try_augmentation(experiment.training.own_augmentation, local)
    return local


class WrongSamples:
    """The samples on which a device trains in place of its own, if it is an adversary of labels or
    images.
    """

    def __init__(self, adversary: Adversary | None) -> None:
        self._adversary = adversary
        self._made: LocalDataset | None = None

    def used_in(self, local_round: int) -> bool:
        """Return whether they are those of a local round."""
        adversary = self._adversary
        return (
            adversary is not None
            and adversary.attack.does("poison")
            and adversary.acts(local_round)
        )

    def of(self, local: LocalDataset) -> LocalDataset:
        """Return them, always the same. Raises InvalidExperiment."""
        assert self._adversary is not None
        if self._made is None:
            images, labels = (each[local.samples] for each in (local.images, local.labels))
            given = LabelledSamples(
                images.cpu().numpy(), labels.cpu().numpy(), local.inputs.classes
            )
            found = self._adversary.poisoned(given)
            wrong = [
                torch.from_numpy(each).to(images.device) for each in (found.images, found.labels)
            ]
            places = torch.arange(len(labels), device=images.device)
            self._made = replace(local, images=wrong[0], labels=wrong[1], samples=places)
        return self._made


def _without_tests(
    samples: Tensor,
    dataset: datasets.Dataset,
    experiment: schema.Experiment,
    node: str,
    *,
    alone: bool,
) -> tuple[Tensor, ScoredSamples | None]:
    """Return those of a device's samples on which it trains, and its test samples, None if it has
    none.

    `alone`: whether the data set has no samples of others.
    """
    evaluation = experiment.evaluation
    devices = experiment.tree.devices
    if evaluation.takes_samples:
        taken = splits.taken_of(
            samples.numpy(), evaluation=evaluation, seed=experiment.seed, node=node
        )
        left = torch.from_numpy(np.setdiff1d(samples.numpy(), taken, assume_unique=True))
        tests = ScoredSamples(dataset.train_images, dataset.train_labels, torch.from_numpy(taken))
        return left, tests if len(taken) else None
    if not evaluation.on_devices:
        return samples, None
    if node not in devices:
        return samples, None  # the test samples are divided among the others
    place = devices.index(node)
    count = len(dataset.test_labels)
    if evaluation.data == "users" and alone:
        part = np.arange(count)
    elif evaluation.data == "users":
        part = np.flatnonzero(splits.users_of_tests(dataset, experiment.data.dataset) == place)
    else:
        part = splits.tests_of(count, devices=len(devices), place=place, seed=experiment.seed)
    tests = ScoredSamples(dataset.test_images, dataset.test_labels, torch.from_numpy(part))
    return samples, tests if len(part) else None


def blocks(
    local: LocalDataset, experiment: schema.Experiment, *, node: str, epochs: int, local_round: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (epoch, inputs [n, b, ...], labels int64 [n, b] or float32 [n, b, T]) of n batches of
    the same size.

    The order is new in each epoch, and the last batch is kept.
    """
    training = experiment.training
    augment = None
    if training.own_augmentation is not None:
        augment = OwnSamples(training.own_augmentation)
        seeds = generator(experiment.seed, Purpose.AUGMENTATION, node, local_round)
    sizes = local.sizes(training.batch_size)
    # Whole batches; the result for a sample depends on no other sample, so the block size does not
    # affect it.
    batch_bytes = 4 * training.batch_size * local.images[0].numel()
    block = max(1, BLOCK_BYTES // batch_bytes)
    for epoch, (places, changes) in enumerate(
        orders(local, experiment, node=node, epochs=epochs, local_round=local_round)
    ):
        for first in range(0, len(sizes), block):
            here = sizes[first : first + block]
            start = first * training.batch_size
            chosen = slice(start, start + sum(here))
            images = local.images.index_select(0, places[chosen])
            if changes is not None:
                images = change_images(images, changes[chosen], crop=training.image_changes.crop)
            if augment is not None:
                each = [
                    augment(batch, seed=int(seeds.integers(2**63)))
                    for batch in torch.split(images, here)
                ]
                images = torch.cat(each)
            inputs = local.normalise(images)
            labels = local.labels.index_select(0, places[chosen])
            for size, alike in groupby(here):
                count = len(list(alike))
                some = inputs[: count * size]
                inputs = inputs[count * size :]
                theirs = labels[: count * size]
                labels = labels[count * size :]
                yield (
                    epoch,
                    some.view(count, size, *some.shape[1:]),
                    theirs.view(count, size, *theirs.shape[1:]),
                )


def orders(
    local: LocalDataset, experiment: schema.Experiment, *, node: str, epochs: int, local_round: int
) -> Iterator[tuple[Tensor, Changes | None]]:
    """Yield each epoch's samples in the order of its batches, int64 [n] indices of the images, and
    their changes.
    """
    training = experiment.training
    device = local.samples.device
    count = len(local.samples)
    order = generator(experiment.seed, Purpose.BATCHES, node, local_round)
    asked = training.image_changes
    changes = None
    if asked.changes:
        source = generator(experiment.seed, Purpose.AUGMENTATION, node, local_round)
    for _ in range(epochs):
        places = local.samples[torch.from_numpy(order.permutation(count)).to(device)]
        if asked.changes:
            changes = draw_changes(asked, count, source=source, device=device)
        yield places, changes


def uniform_numbers(
    experiment: schema.Experiment, draws: int, *, node: str, local_round: int, device: torch.device
) -> Callable[[int], Tensor] | None:
    """Return a function for the random numbers of the next n samples, float32 [n, draws], None if
    there are none.

    They do not depend on how the samples are cut into batches.
    """
    if not draws:
        return None
    source = generator(experiment.seed, Purpose.UNIFORM, node, local_round)

    def numbers(samples: int) -> Tensor:
        return torch.from_numpy(source.random((samples, draws), np.float32)).to(device)

    return numbers


def dropout_seed(experiment: schema.Experiment, *, node: str, local_round: int) -> int:
    """Return the seed of a local round's dropout masks."""
    return torch_seed(experiment.seed, Purpose.DROPOUT, node, local_round)
