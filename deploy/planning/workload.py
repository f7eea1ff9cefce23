"""Workload of an experiment: samples and steps of each device, the first model, epochs.

If the data set is missing, synthetic images of its shape replace it. Above MOST_LISTED devices, all
are assumed equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.settings.data import SHAPES
from fedstrata.common.training.array_trainer import TrainerTester
from fedstrata.deploy.console.tabular import size
from fedstrata.device.jobs import HostedDevice
from fedstrata.device.pool.trainers_by_kind import Trainers

if TYPE_CHECKING:
    from fedstrata.common.learning.datasets import Dataset

MOST_LISTED: Final = 20_000  # devices; above, all are assumed equal
PREPARED_MOST: Final = 32  # devices whose samples a trainer of the user counts
# keys of data that change neither what a training costs nor what crosses the links
OF_THE_SPLIT: Final = (
    "partition",
    "concentration",
    "shards",
    "within",
    "within_concentration",
    "min_samples",
    "noise",
)


# training and test samples of data sets, and the number of classes
IMAGES: Final = MappingProxyType(
    {
        "mnist": (60_000, 10_000, 10),
        "fashionmnist": (60_000, 10_000, 10),
        "cifar10": (50_000, 10_000, 10),
        "cifar100": (50_000, 10_000, 100),
        "femnist": (40_000, 4_000, 62),
    }
)


def sizes_of(counts: Mapping[str, float]) -> list[str]:
    """Return a line with the bytes of each tier or role."""
    return [f"  {name.replace('_', ' '):<14} {size(count)}" for name, count in counts.items()]


@dataclass(slots=True)
class PlannedWorkload:
    """The work of an experiment.

    calibrated: for calibration: the same experiment, or with one device if the data of each device
    are not known layout, first: of its models, and the first one samples, tests: by device, or one
    number for all devices; tests are those on which it scores models kept_bytes: of the personal
    arrays of a device    own_bytes: of each device's samples, if it reads no others here: whether
    the data set is available    assumed: the assumptions, as text
    """

    experiment: Experiment
    calibrated: Experiment
    layout: ModelLayout
    first: Row
    samples: int | Mapping[str, int]
    tests: int | Mapping[str, int]
    data_bytes: int
    here: bool
    kept_bytes: int = 0
    own_bytes: Mapping[str, int] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)

    @property
    def listed(self) -> bool:
        """Whether each device has its own entry."""
        return isinstance(self.samples, Mapping)

    def samples_of(self, device: str) -> int:
        """Return the samples of a device."""
        if isinstance(self.samples, Mapping):
            return self.samples[device]
        return self.samples

    def tests_of(self, device: str) -> int:
        """Return the test samples of a device."""
        if isinstance(self.tests, Mapping):
            return self.tests[device]
        return self.tests


def workload(experiment: Experiment) -> PlannedWorkload:
    """Load the data set, or synthetic images in its place, and split it. Raises
    InvalidExperiment.
    """
    if not experiment.training.trainer.learns_module:
        return _of_trainer(experiment)
    from fedstrata.common.learning import datasets, splits
    from fedstrata.common.learning.evaluation import ModelTester

    assumed: list[str] = []
    try:
        dataset = datasets.load(experiment.data)
        here = experiment
    except InvalidExperiment as error:
        here = _synthetic(experiment, error)
        dataset = datasets.load(here.data)
        assumed.append(
            f"{experiment.data.dataset} is not available: synthetic images of its shape are used"
        )
    tester = ModelTester(here)
    count = sum(experiment.sizes()[-1])
    mean = max(1, len(dataset.train_labels) // count)
    if experiment.data.partition == "dirichlet_overlap":
        mean = experiment.data.partition_size
    sizes = [mean] * count
    if count > MOST_LISTED:
        assumed.append(
            f"all {count} devices are equal, {mean} samples each; links.of and hardware.of are "
            "ignored"
        )
    elif here is experiment and experiment.data.dataset != "folder":
        sizes = [len(part) for part in splits.split_of(experiment).partitions]
    else:
        assumed.append(f"each device has {mean} samples")
    scored = splits.counts_of_tests(dataset, here, samples=sizes)
    trained = [size - experiment.evaluation.taken_of(size) for size in sizes[:MOST_LISTED]]
    samples: int | dict[str, int] = trained[0]
    tests: int | dict[str, int] = round(fmean(scored))
    if count <= MOST_LISTED:
        samples, tests = (
            dict(zip(experiment.tree.devices, each, strict=True)) for each in (trained, scored)
        )
    calibrated = experiment if isinstance(samples, dict) and not assumed else _alone(here, mean)
    nbytes = dataset.train_images.nbytes + dataset.test_images.nbytes
    own_bytes = _own_bytes(experiment, dataset, samples, tests) if here is experiment else {}
    return PlannedWorkload(
        experiment,
        calibrated,
        tester.layout,
        tester.first,
        samples,
        tests,
        nbytes,
        here=here is experiment,
        kept_bytes=tester.parts.kept_bytes,
        own_bytes=own_bytes,
        assumed=assumed,
    )


def _own_bytes(
    experiment: Experiment,
    dataset: Dataset,
    samples: int | Mapping[str, int],
    tests: int | Mapping[str, int],
) -> dict[str, int]:
    """Return the bytes of each device's samples and labels, if devices are users that read their
    own alone.
    """
    from fedstrata.common.learning.splits import own_user

    if not isinstance(samples, Mapping) or not isinstance(tests, Mapping):
        return {}  # so many devices that a run could not have them
    devices = experiment.tree.devices
    if own_user(experiment, node=devices[0]) is None:
        return {}
    each = dataset.train_images[0].nbytes + dataset.train_labels[0].nbytes
    return {node: each * (samples[node] + tests[node]) for node in devices}


def _of_trainer(experiment: Experiment) -> PlannedWorkload:
    """Let the trainer of the user prepare devices, all of a small lab, else the first one."""
    count = sum(experiment.sizes()[-1])
    tester = TrainerTester(experiment)
    trainers = Trainers()
    listed = count <= MOST_LISTED
    calibrated = experiment if listed else _alone(experiment, 1)
    names = calibrated.tree.devices[: count if count <= PREPARED_MOST else 1]
    prepared = [
        trainers.prepare(HostedDevice(calibrated, calibrated.digest, name), "cpu") for name in names
    ]
    some = {name: facts.samples for name, facts in zip(names, prepared, strict=True)}
    each = prepared[0].samples
    assumed = ["the memory of a device is that without its samples and its libraries"]
    if count > PREPARED_MOST:
        assumed.append(f"each device has {each} samples, as the first one")
    samples = {name: some.get(name, each) for name in experiment.tree.devices} if listed else each
    tests = max(1, each // 10) if experiment.evaluation.on_devices else 0
    if tests:
        assumed.append(
            f"each device scores models on {tests} samples, a tenth of those that it trains on"
        )
    return PlannedWorkload(
        experiment,
        calibrated,
        tester.layout,
        tester.first,
        samples,
        tests,
        data_bytes=0,
        here=True,
        assumed=assumed,
    )


def _synthetic(experiment: Experiment, missing: InvalidExperiment) -> Experiment:
    """Return the experiment with synthetic images of its data set's shape. Raises `missing` if the
    shape is unknown.
    """
    data = experiment.data
    if data.dataset in IMAGES:
        (samples, test_samples, classes) = IMAGES[data.dataset]
        shape = [*SHAPES[data.dataset]]
    elif data.dataset == "folder" and isinstance(data.classes, list):
        samples = 1000
        test_samples = 200
        classes = len(data.classes)
        shape = data.image_shape
    else:
        raise missing
    classes = 20 if data.dataset == "cifar100" and data.labels == "coarse" else classes
    made = {"dataset": "synthetic", "classes": classes, "image_shape": shape, "partition": "iid"}
    made |= {"samples": samples, "test_samples": test_samples}
    tree = experiment.model_dump(mode="json") | {"data": made}
    if experiment.evaluation.data == "users":
        tree["evaluation"]["data"] = "test"  # as many for each device
    return parse(tree)


def _alone(experiment: Experiment, samples: int) -> Experiment:
    """Return an experiment of one device, which has as many samples of synthetic data."""
    last = experiment.tiers[-1].aggregation  # its devices' objective may need it
    needed = last.objective or last.sends or last.returns or last.reads_losses
    rule = last.model_dump(mode="json") if needed else {}
    tables: dict[str, Any] = {"cloud": {}, "links": {}, "hardware": {}, "availability": {}}
    if experiment.data.dataset == "synthetic":
        tables["data"] = experiment.data.model_dump(mode="json") | {"samples": samples}
    return with_tiers(experiment, [{"name": "lan", "aggregation": rule}], **tables)


def with_tiers(
    experiment: Experiment, tiers: Sequence[Mapping[str, Any]], **tables: Any
) -> Experiment:
    """Return an experiment with other tiers, without adversaries, and with other tables. Raises
    InvalidExperiment.
    """
    return parse(
        experiment.model_dump(mode="json") | {"adversaries": []} | tables | {"tiers": list(tiers)}
    )
