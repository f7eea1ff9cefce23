"""What an experiment asks of its nodes: samples and steps of each device, bytes of each model, epochs.

Where the data are not here, made-up images of their shape stand for them; where the devices are more than can be
listed, they are all alike.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from common.aggregation.selection import select
from common.errors import InvalidExperiment
from common.experiment.reading import parse
from common.experiment.rounds import participants
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD
from common.learning import datasets, splits
from common.learning.datasets import Dataset
from common.learning.evaluation import ModelTester
from common.model.codecs import codec_of
from common.model.layout import ModelLayout, Row
from deploy.planning.prediction import Branch, MachineSpeeds, PlannedDevice, PlannedLab, Sizes
from deploy.runs.run import Run

MOST_LISTED: Final = 20_000  # devices; beyond them all are alike
REHEARSED: Final = 3  # global rounds: by then Tempo's epochs have found their way
REHEARSAL_S: Final = 60.0


class Shape(NamedTuple):
    """A data set's training and test samples, the shape of an image, and its classes."""

    samples: int
    test_samples: int
    image: tuple[int, int, int]
    classes: int


KNOWN: Final = MappingProxyType(
    {
        "mnist": Shape(60_000, 10_000, (1, 28, 28), 10),
        "fashionmnist": Shape(60_000, 10_000, (1, 28, 28), 10),
        "cifar10": Shape(50_000, 10_000, (3, 32, 32), 10),
        "cifar100": Shape(50_000, 10_000, (3, 32, 32), 100),
        "femnist": Shape(40_000, 4_000, (1, 28, 28), 62),
    }
)


@dataclass(slots=True)
class PlannedWorkload:
    """An experiment's work. `single` is it with one device, to calibrate with; `epochs` are each institution's.

    `samples`: each device's, or one number for all; `here`: the data are. `assumed` says in words what was not known.
    """

    experiment: Experiment
    single: Experiment
    sizes: Sizes
    samples: int | Mapping[str, int]
    data_bytes: int
    here: bool
    epochs: Mapping[str, int] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)

    @property
    def listed(self) -> bool:
        """Return whether devices are told apart."""
        return isinstance(self.samples, Mapping)

    def steps(self, samples: int, epochs: int) -> int:
        """Return the steps of SGD of one training."""
        return epochs * -(-samples // self.experiment.training.batch_size)


def workload(experiment: Experiment) -> PlannedWorkload:
    """Load the data, or what stands for them, and split them. Raises InvalidExperiment."""
    assumed: list[str] = []
    try:
        dataset = datasets.load(experiment.data)
        here = experiment
    except InvalidExperiment as error:
        here = _made_up(experiment, error)
        dataset = datasets.load(here.data)
        assumed.append(f"{experiment.data.dataset} is not here: made-up images of its shape")
    examiner = ModelTester(here)
    count = sum(experiment.topology.sizes())
    mean = _mean_samples(experiment, dataset, count)
    samples: int | dict[str, int] = mean
    if count > MOST_LISTED:
        assumed.append(f"all {count} devices alike, {mean} samples each; links.of and hardware.of are left out")
    elif here is experiment and experiment.data.dataset != "folder":
        parts = splits.split_of(experiment).parts
        samples = dict(zip(experiment.topology.device_names(), map(len, parts), strict=True))
    else:
        assumed.append(f"each device has {mean} samples")
        samples = dict.fromkeys(experiment.topology.device_names(), mean)
    alone = {"topology": {"institutions": 1, "devices": 1}, "cloud": {}, "institution": {}, "links": {}}
    single = parse(here.model_dump(mode="json") | alone)
    nbytes = dataset.train_images.nbytes + dataset.test_images.nbytes
    sizes = _sizes(experiment, examiner.layout, examiner.first)
    return PlannedWorkload(experiment, single, sizes, samples, nbytes, here=here is experiment, assumed=assumed)


def rehearse(work: PlannedWorkload, speeds: MachineSpeeds) -> None:
    """Fill in the epochs: `training.epochs`, or where Tempo decides, those of some rounds on this machine."""
    experiment = work.experiment
    names = experiment.topology.institution_names() if work.listed else []
    work.epochs = dict.fromkeys(names, experiment.training.epochs)
    if experiment.cloud.epoch_control.name == "fixed":
        return
    if isinstance(work.samples, Mapping) and work.here:
        steps = sum(work.steps(samples, experiment.training.epochs) for samples in work.samples.values())
        cost_s = REHEARSED * (experiment.institution.rounds * steps * speeds.step_s * 1.5 + speeds.evaluation_s)
        if cost_s <= REHEARSAL_S:
            work.epochs = _play(experiment)
            work.assumed.append(f"epochs as Tempo has them after {REHEARSED - 1} global rounds, which were played here")
            return
    work.assumed.append(f"{experiment.training.epochs} epochs everywhere: what Tempo will decide is not known")


def lab(work: PlannedWorkload, speeds: MachineSpeeds, *, one_host: bool, interface_mbit: float) -> PlannedLab:
    """Return what the simulation plays: devices and institutions, like ones together."""
    experiment, training = work.experiment, work.experiment.training
    institutions: Counter[tuple[Any, ...]] = Counter()
    share = experiment.institution.participation
    if isinstance(work.samples, Mapping):
        children = experiment.topology.children()
        for name in select(list(children), experiment.cloud.participation, seed=experiment.seed, node=CLOUD, r=0):
            devices: Counter[PlannedDevice] = Counter()
            for device in select(children[name], share, seed=experiment.seed, node=name, r=0):
                steps = work.steps(work.samples[device], work.epochs[name])
                link, machine = experiment.link(device), experiment.machine(device)
                train_s = speeds.training_s + steps * speeds.step_s
                devices[PlannedDevice(1, link.down, link.up, train_s, machine.emulated_s(train_s) - train_s)] += 1
            link = experiment.link(name)
            institutions[link.down, link.up, tuple(_counted(devices))] += 1
    else:
        wan, lan, machine = experiment.links.wan, experiment.links.lan, experiment.hardware.default
        steps = work.steps(work.samples, training.epochs)
        every = experiment.topology.sizes()
        for size in every[: participants(len(every), experiment.cloud.participation)]:
            train_s = speeds.training_s + steps * speeds.step_s
            pause_s = machine.emulated_s(train_s) - train_s
            devices_of_it = (PlannedDevice(participants(size, share), lan.down, lan.up, train_s, pause_s),)
            institutions[wan.down, wan.up, devices_of_it] += 1
    branches = tuple(Branch(count, down, up, devices) for (down, up, devices), count in institutions.items())
    interface = math.inf if one_host else interface_mbit * 1e6 / 8
    return PlannedLab(branches, experiment.institution.rounds, work.sizes, experiment.transfer, one_host, interface)


def _counted(devices: Counter[PlannedDevice]) -> list[PlannedDevice]:
    return [PlannedDevice(count, kind.down, kind.up, kind.train_s, kind.pause_s) for kind, count in devices.items()]


def _made_up(experiment: Experiment, missing: InvalidExperiment) -> Experiment:
    """Return the experiment with images of the shape that its data set has. Raises `missing` where that is unknown."""
    data = experiment.data
    shape = KNOWN.get(data.dataset)
    if data.dataset == "folder" and isinstance(data.classes, list):
        channels, height, width = data.image_shape
        shape = Shape(1000, 200, (channels, height, width), len(data.classes))
    if shape is None:
        raise missing
    classes = 20 if data.dataset == "cifar100" and data.labels == "coarse" else shape.classes
    made = {"dataset": "synthetic", "classes": classes, "image_shape": list(shape.image), "partition": "iid"}
    made |= {"samples": shape.samples, "test_samples": shape.test_samples}
    return parse(experiment.model_dump(mode="json") | {"data": made})


def _mean_samples(experiment: Experiment, dataset: Dataset, devices: int) -> int:
    if experiment.data.partition == "dirichlet_overlap":
        return experiment.data.partition_size
    return max(1, len(dataset.train_labels) // devices)


def _sizes(experiment: Experiment, layout: ModelLayout, row: Row) -> Sizes:
    """Return the bytes of the first model as each tier's codecs write it; a delta is of a hundredth of the weights."""
    floats = np.random.default_rng(0).standard_normal(layout.columns).astype(np.float32)
    after = row.copy()
    layout.floats(after)[...] *= 1 + floats / 100

    def size(name: str) -> int:
        return codec_of(name).encode(layout, after, reference=row).nbytes

    wan, lan = experiment.transfer.wan, experiment.transfer.lan
    return Sizes(layout.row_bytes, size(wan.up), size(wan.down), size(lan.up), size(lan.down))


def _play(experiment: Experiment) -> dict[str, int]:
    """Return the institutions' epochs after some global rounds without a network."""
    from cloud.results import RunFolder
    from deploy.local import direct

    with tempfile.TemporaryDirectory(prefix="fedstrata-") as home:
        short = parse(experiment.model_dump(mode="json") | {"rounds": REHEARSED, "target_accuracy": None})
        folder = RunFolder.create(Path(home), short)
        direct.play(folder, resume=False, accelerator="cpu", observe=lambda event, facts: None)
        epochs = Run(folder.path).rounds[-1].epochs
    return {name: epochs.get(name, experiment.training.epochs) for name in experiment.topology.institution_names()}
