"""The samples of an audit, and experiments whose devices have others than their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets
from fedstrata.common.randomness import Purpose, generator
from fedstrata.common.settings.data import CLASSES, Data
from fedstrata.common.settings.evaluation import EvaluationSettings
from fedstrata.common.settings.topology import CLOUD
from fedstrata.device.training.batches import load_local_dataset

FILE: Final = "samples.npz"
CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Normalised `inputs` [n, ...], float32 or of texts int64, and `labels`, int64 [n]."""

    inputs: Tensor
    labels: Tensor

    def __getitem__(self, places: Tensor) -> Samples:
        return Samples(self.inputs[places], self.labels[places])

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def joined(cls, some: Sequence[Samples]) -> Samples:
        """Return those of several in one."""
        return cls(
            torch.cat([each.inputs for each in some]), torch.cat([each.labels for each in some])
        )


def check(experiment: Experiment) -> None:
    """Check that an audit can be made of an experiment. Raises InvalidExperiment."""
    if not experiment.training.trainer.learns_module or experiment.data.targets != CLASSES:
        problem = "an audit attacks classifiers that fedstrata trains"
        remedy = 'Use the trainer sgd, and data.targets = "classes".'
        raise InvalidExperiment(
            "training.trainer", experiment.training.trainer.whose, problem, remedy
        )
    if experiment.model.personal:
        problem = "no upload has these arrays"
        names = ", ".join(experiment.model.personal)
        raise InvalidExperiment("model.personal", names, problem, "Audit a run without.")


def of_device(experiment: Experiment, device: str) -> Samples:
    """Return the samples on which a device trains, in an order drawn by the seed."""
    local = load_local_dataset(experiment, device, accelerator=CPU)
    order = generator(experiment.seed, Purpose.AUDIT, device).permutation(len(local.samples))
    places = local.samples[torch.from_numpy(order)]
    return Samples(local.normalise(local.images[places]), local.labels[places])


def of_tests(experiment: Experiment) -> Samples:
    """Return the test samples, in an order drawn by the seed."""
    data = datasets.load(experiment.data)
    order = generator(experiment.seed, Purpose.AUDIT, CLOUD).permutation(len(data.test_labels))
    places = torch.from_numpy(order)
    return Samples(data.normaliser()(data.test_images[places]), data.test_labels[places])


def given(experiment: Experiment, folder: Path, nodes: Mapping[str, Samples]) -> Experiment:
    """Return an experiment whose nodes have these samples, written below a folder.

    Raises InvalidExperiment for texts.
    """
    for node, some in nodes.items():
        if not some.inputs.is_floating_point():
            problem = "this audit gives devices other samples, and cannot with texts"
            raise InvalidExperiment("data.dataset", experiment.data.dataset, problem, "Omit it.")
        (folder / node).mkdir()
        np.savez(folder / node / FILE, x=some.inputs.numpy(), y=some.labels.numpy())
    classes = datasets.load(experiment.data).classes
    root = str(folder / "{node}")
    data = Data(dataset=FILE, root=root, partition="private", classes=classes)
    return experiment.model_copy(update={"data": data, "evaluation": EvaluationSettings()})
