"""The simulated part of a lab: all of its nodes, or of a large lab a sample of its branches.

In a sample each parent has some of the children that take part in its round, in equal steps from
the fastest to the slowest. Each of them stands for several: for so many its parent's host, its
broker and its interface do the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import ceil, prod
from typing import Any, Final, NamedTuple

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.experiment.tiers import Tier
from fedstrata.common.methods.selection import ClientSelection
from fedstrata.common.settings.topology import CLOUD, participants
from fedstrata.deploy.planning.machine_speed import MachineSpeeds
from fedstrata.deploy.planning.workload import PlannedWorkload, with_tiers

# of a lab that is simulated as a whole, and of a sample: some 30 ms of one core each
NODES: Final = 300
MODELS_HELD: Final = 3  # by a device that has taken part
BYTES_MOST: Final = 3_000_000_000  # of models


@dataclass(frozen=True, slots=True)
class LabSample:
    """What is simulated.

    experiment: of the simulated nodes
    loads: by parent, how many children that take part each simulated child stands for; 1 for all
    others multiples: by tier, how many links of a global round a simulated link stands for
    """

    experiment: Experiment
    multiples: Sequence[float]
    loads: Mapping[str, float] = field(default_factory=dict)

    @property
    def nodes(self) -> int:
        """The number of simulated nodes below the cloud."""
        return len(self.experiment.tree.nodes)


class _Place(NamedTuple):
    """A node, and its number in its layer."""

    name: str
    number: int


def sample_of(work: PlannedWorkload, speeds: MachineSpeeds, *, nodes: int = NODES) -> LabSample:
    """Return all of a lab, or a sample of at most `nodes` if it has more nodes, or too many large
    models.

    Raises InvalidExperiment if the sample is no possible lab.
    """
    experiment = work.experiment
    sizes = experiment.sizes()
    tiers = experiment.tiers
    widest = [
        participants(max(layer), tier.participation)
        for layer, tier in zip(sizes, tiers, strict=True)
    ]
    devices = sum(sizes[-1])
    held = MODELS_HELD * work.layout.row_bytes
    taking_part = min(devices, 2 * prod(widest))  # others in the next global round
    # uploads that cannot be sampled
    buffers = [tier.aggregation.name for tier in tiers if tier.aggregation.buffers]
    if (sum(map(sum, sizes)) <= nodes and taking_part * held <= BYTES_MOST) or (
        buffers and work.listed
    ):
        return LabSample(experiment, [1.0] * len(tiers))
    if buffers:
        problem = "the uploads of so large an asynchronous lab cannot be sampled"
        raise InvalidExperiment("aggregation.name", buffers[0], problem, "Use fewer devices.")
    most = next(
        count for count in range(nodes, 0, -1) if count == 1 or _fits(widest, count, nodes, held)
    )
    return _sampled(work, speeds, sizes, most)


def _fits(widest: Sequence[int], most: int, nodes: int, held: int) -> bool:
    layers = list(accumulate((min(size, most) for size in widest), int.__mul__))
    return sum(layers) <= nodes and layers[-1] * held <= BYTES_MOST


def _sampled(
    work: PlannedWorkload, speeds: MachineSpeeds, sizes: Sequence[Sequence[int]], most: int
) -> LabSample:
    """Return a sample with at most so many children of each parent."""
    experiment = work.experiment
    parents = [_Place(CLOUD, 0)]
    counts = {CLOUD: 1.0}
    loads: dict[str, float] = {}
    tiers = list[dict[str, Any]]()
    multiples = list[float]()
    for tier, layer in zip(experiment.tiers, sizes, strict=True):
        begins = [0, *accumulate(layer)]
        members: dict[str, list[_Place]] = {}
        for parent in parents:
            count = participants(layer[parent.number], tier.participation)
            members[parent.name] = _children(
                work, speeds, tier, parent, (begins[parent.number], count), most
            )
            loads[parent.name] = count / len(members[parent.name])
        counts |= {
            each.name: counts[up] * loads[up]
            for up, children in members.items()
            for each in children
        }
        parents = [each for children in members.values() for each in children]
        multiples.append(sum(counts[each.name] for each in parents) / len(parents))
        tiers.append(_tier(tier, members, loads))
    names = {*counts} - {CLOUD}
    listed = names if work.listed else set[str]()
    tables = _of_nodes(experiment, listed)
    # A message on behalf of several children takes their time, in which nobody else makes progress.
    tables["transfer"]["idle_s"] *= max(loads.values())
    try:
        return LabSample(with_tiers(experiment, tiers, **tables), multiples, loads)
    except InvalidExperiment as error:
        raise InvalidExperiment(
            "--nodes", len(names), f"no lab: {error}", "Simulate more nodes."
        ) from None


def _children(
    work: PlannedWorkload,
    speeds: MachineSpeeds,
    tier: Tier,
    parent: _Place,
    taking_part: tuple[int, int],
    most: int,
) -> list[_Place]:
    """Return at most so many of the children that take part in a parent's first round.

    `taking_part`: the number of its first child in their layer, and how many take part
    """
    begin, count = taking_part
    size = min(count, most)
    if not work.listed:  # all are equal
        return [
            _Place(f"{tier.children}-{number}", number) for number in range(begin, begin + size)
        ]
    experiment = work.experiment
    names = experiment.tree.children[parent.name]
    numbers = {name: number for number, name in enumerate(names, begin)}
    samples = {name: _samples(work, name) for name in names}
    selection = ClientSelection(tier, seed=experiment.seed, node=parent.name)
    chosen = sorted(selection.select(names, 0, samples=samples), key=partial(_effort, work, speeds))
    # equal ones, up to the last child
    steps = [chosen[(step + 1) * len(chosen) // size - 1] for step in range(size)]
    return [_Place(name, numbers[name]) for name in steps]


def _samples(work: PlannedWorkload, name: str) -> int:
    """Return the samples of a device, or of all devices below a node."""
    below = work.experiment.tree.children.get(name)
    if below is None:
        return work.samples_of(name)
    return sum(_samples(work, child) for child in below)


def _effort(work: PlannedWorkload, speeds: MachineSpeeds, name: str) -> float:
    """Return about the seconds of a node's round: of its link, and of the slowest node below or its
    training.
    """
    experiment = work.experiment
    link = experiment.link(name)
    rates = [way.rate for way in (link.up, link.down) if way.rate is not None]
    link_s = sum(work.layout.row_bytes / rate for rate in rates)
    below = experiment.tree.children.get(name)
    if below is not None:
        return link_s + max(_effort(work, speeds, child) for child in below)
    steps = experiment.training.epochs * experiment.steps_in_epoch(work.samples_of(name))
    train_s = speeds.training_s + speeds.step_s * steps
    return link_s + experiment.machine(name).emulated_s(train_s, steps=steps)


def _tier(
    tier: Tier, members: Mapping[str, Sequence[_Place]], loads: Mapping[str, float]
) -> dict[str, Any]:
    """Return a tier whose parents have these children, all of which take part."""
    tree = tier.model_dump(mode="json", exclude={"fan_out", "number", "participation", "selection"})
    if tier.closing.quorum is not None:
        least = min(map(len, members.values()))
        load = max(loads[parent] for parent in members)
        tree["closing"]["quorum"] = min(least, ceil(tier.closing.quorum / load))
    named = {}
    for parent, children in members.items():
        named[parent] = [each.name for each in children]
    return tree | {"members": named}


def _of_nodes(experiment: Experiment, names: set[str]) -> dict[str, Any]:
    """Return the tables that name nodes, without those that are not simulated, and that of
    transfers.
    """
    tree = experiment.model_dump(mode="json")
    for table in (tree["links"], tree["hardware"]):
        table["of"] = {name: each for name, each in table["of"].items() if name in names}
    trace = tree["availability"]["trace"]
    if trace is not None:
        trace["changes"] = {name: each for name, each in trace["changes"].items() if name in names}
        tree["availability"] = {"trace": trace} if trace["changes"] else {}
    return {key: tree[key] for key in ("links", "hardware", "availability", "transfer")}
