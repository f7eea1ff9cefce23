"""Prediction by the protocol itself: the real agents in virtual time, on links and machines with measured speeds.

Quorums, deadlines, client selection, cut-through, upload slots and codecs cost what they cost in a run. Models change
by noise in place of training, and work beside the event loops (mixing, encoding) is done here and takes the CPU seconds
it takes here. Of a large lab a sample is simulated (`sample.py`).
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from math import prod
from operator import mul
from pathlib import Path
from statistics import mean
from typing import Any, Final

import numpy as np

from cloud.records import GlobalRoundRecord, LinkRecord
from common.errors import InvalidExperiment, RunFailed
from common.experiment.methods import RuleSettings
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD, Tree
from common.model.layout import ModelLayout, Row
from common.model.tensors import Tensors
from common.protocol.receiver import SLOT_BYTES_S
from deploy.local.network import device_groups, shares
from deploy.planning.calibration import MachineSpeeds
from deploy.planning.sample import NODES, LabSample, sample_of
from deploy.planning.workload import PlannedWorkload, with_tiers
from deploy.results.run import Run
from deploy.simulation.hardware import FORWARD, Durations
from deploy.simulation.lab import BROKER, SimulatedLab, collected_warnings
from deploy.simulation.link import LinkConditions
from deploy.simulation.machines import MessageCosts, Placement, cpu_seconds

ROUNDS: Final = 3  # global rounds to simulate at most, if not given and nothing changes meanwhile
LIMIT_S: Final = 1e8
NETWORK_DELAY_S: Final = 1e-4  # one way, of a link that has no delay
LOOPBACK_S: Final = 2e-5
# Of a round with one child whose models are inside the messages.
AGENT_PACKETS: Final = 8  # sent and received by both agents
BROKER_PACKETS: Final = 8
WORK_CALLS: Final = 3  # of a round without a checkpoint, to functions that run beside the parent's event loop
AT_BROKER: Final = 0.2  # share of a round's messaging work; the rest is that of parent and child
DIRECT_S: Final = 0.7e-3  # of a device in a round without a network, beside its training (docs/running.md)
PAYLOAD: Final = 1448 / 1514  # of an Ethernet frame, which is what the kernel's links count
HOST: Final = "host"
ALL_KINDS: Final = "all"  # of bytes: the row of links.csv that sums the others
BLOBS: Final = ("model", "extras")
CHANGE: Final = 0.01  # of each weight, by a training

WorkSeconds = Callable[[Callable[[], None]], float]


class Site(Enum):
    """Where the nodes of a predicted lab are."""

    HOSTS = "each node, with its broker, on a host of its own"
    ONE_HOST = "all on one host, as by `fedstrata run`"
    DIRECT = "all in one thread of a host, without a network"


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What a simulated run recorded."""

    rounds: Sequence[GlobalRoundRecord]
    links: Sequence[LinkRecord]
    sample: LabSample

    @property
    def settled(self) -> Sequence[GlobalRoundRecord]:
        """The global rounds after the first one, which waits for no writes and no evaluation."""
        return self.rounds[1:] or self.rounds

    def seconds(self) -> dict[str, float]:
        """Return the mean seconds of a global round by phase."""
        return {phase: mean(each.phases[phase] for each in self.settled) for phase in self.settled[0].phases}

    def total_s(self, global_rounds: int) -> float:
        """Return the seconds of so many global rounds: those simulated, and the mean for each of the others."""
        rest = global_rounds - len(self.rounds)
        return sum(each.seconds for each in self.rounds) + rest * sum(self.seconds().values())

    def bytes_(self) -> dict[str, float]:
        """Return the MQTT bytes of a mean global round by direction of a link, `FROM TO`."""
        found: dict[str, float] = {}
        for link in self.links:
            if link.message_bytes and link.kind == ALL_KINDS:
                found[link.goes] = found.get(link.goes, 0.0) + link.message_bytes / len(self.rounds)
        return found

    def tiers(self) -> dict[str, int]:
        """Return the MQTT bytes of a mean global round by tier and direction, multiplied to the whole lab."""
        names, found = self.sample.experiment.tier_names, dict[str, int]()
        for tier, multiple, missing in zip(names, self.sample.multiples, self._missing_reports(), strict=True):
            up, down = self._settled_bytes(tier, "up"), self._settled_bytes(tier, "down")
            found |= {f"{tier}_up": round(multiple * (up + missing)), f"{tier}_down": round(multiple * down)}
        return found

    def _settled_bytes(self, tier: str, way: str) -> float:
        return mean(each.bytes_[f"{tier}_{way}_bytes"] for each in self.settled)

    def _missing_reports(self) -> list[float]:
        """Return for each tier the bytes of reports that go up in a global round on nodes that are not simulated.

        The control messages of a node between are those of a device, and a report on each node below it.
        """
        experiment, multiples = self.sample.experiment, self.sample.multiples
        tree, names = experiment.tree, experiment.tier_names
        counts, control = [len(layer) for layer in tree.layers[1:]], [self._settled_bytes(name, "up") for name in names]
        upward = {(child, tree.parent(child)) for child in tree.nodes}
        for link in self.links:
            if link.kind in BLOBS and (link.from_, link.to) in upward:
                control[names.index(link.tier)] -= (link.message_bytes or 0) / len(self.rounds)
        each_round = control[-1] / (counts[-1] * experiment.device_rounds)
        found = []
        for place, multiple in enumerate(multiples[:-1], start=1):
            reports = control[place - 1] - counts[place - 1] * experiment.rounds_of(place - 1) * each_round
            below = sum(map(mul, multiples[place:], counts[place:])) / multiple
            found.append(reports * (below / sum(counts[place:]) - 1))
        return [*found, 0.0]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDurations(Durations):
    """Seconds of one core: of the steps of each device's training, and of an evaluation.

    `tree`: the simulated nodes. `load`: of the host with all nodes, how many devices each simulated one stands for.
    """

    work: PlannedWorkload
    speeds: MachineSpeeds
    tree: Tree
    load: float

    def training_s(self, node: str, *, epochs: int, drawn: float) -> float:
        """Return a training's seconds, with the epochs that Tempo would set."""
        child = node
        while (parent := self.tree.parent(child)) != CLOUD:
            child = parent
        steps = self.work.steps(self.work.samples_of(node), self.work.epochs.get(child, epochs))
        return self.load * (self.speeds.training_s + steps * self.speeds.step_s)

    def scoring_s(self, node: str, *, share: float) -> float:
        """Return the seconds of the steps of that share of an epoch, forward alone."""
        return FORWARD * self.load * share * self.work.steps(self.work.samples_of(node), 1) * self.speeds.step_s


class NoiseWorkload:
    """Workload that changes each weight by about `CHANGE` of itself, as a training does: codecs take what they take."""

    partition = "planned"

    def __init__(self, work: PlannedWorkload, moved: Callable[[], object]) -> None:
        self._work = work
        self._moved = moved
        self.layout: ModelLayout = work.layout
        self.frozen: Tensors = {}  # each device builds them
        self.first: Row = work.first
        columns = self.layout.columns
        noise = np.random.default_rng(0).standard_normal(2 * columns, np.float32)
        self._factors = 1 + np.float32(CHANGE) * noise  # each device takes its own window of them

    def layout_at(self, node: str, frozen: Path | None) -> ModelLayout:
        """Return the same for all."""
        return self.layout

    def samples(self, node: str, experiment: Experiment) -> tuple[int, int]:
        """Return the numbers of a device's training and test samples: it joins the run."""
        self._moved()
        return self._work.samples_of(node), self._work.tests_of(node)

    def kept_bytes(self, experiment: Experiment) -> int:
        """Return those of the objective's vectors; no link carries personal arrays."""
        return 4 * self.layout.parameters * len(experiment.training.objective.keeps)

    def train(self, node: str, row: Row, out: Row, *, epochs: int, local_round: int) -> tuple[float, int]:
        """Change the flat model `row` into `out`; return a loss and the number of steps."""
        self._moved()
        columns = self.layout.columns
        begin = zlib.crc32(f"{node} {local_round}".encode()) % columns
        np.multiply(self.layout.floats(row), self._factors[begin : begin + columns], out=self.layout.floats(out))
        self.layout.extra_columns(out)[:] = 1.0
        return 1.0, round(self._work.steps(self._work.samples_of(node), epochs))

    def evaluate(self, row: Row) -> tuple[float, float]:
        """Return constants."""
        return 0.5, 1.0


def simulate(
    work: PlannedWorkload,
    speeds: MachineSpeeds,
    *,
    site: Site,
    interface_mbit: float = 1000.0,
    rounds: int | None = None,
    nodes: int | None = None,
    reach: Callable[[float], object] = lambda share: None,
    work_s: WorkSeconds = cpu_seconds,
) -> SimulatedRun:
    """Run the lab of an experiment in virtual time. Raises InvalidExperiment, and RunFailed with the run's own reason.

    rounds: global rounds to simulate at most, by default those of `_rounds`
    nodes: of a larger lab, a sample of as many, by default `NODES`
    reach: called with the share of the simulation that is done
    """
    sample = sample_of(work, speeds, nodes=nodes or NODES)
    experiment = _simulated(sample.experiment, rounds or _rounds(sample.experiment, site), site)
    evaluate_s = speeds.evaluation_s
    if site is not Site.DIRECT:  # it runs beside the writes of the results, which leave the cores to it
        evaluate_s = max(0.0, evaluate_s - speeds.record_s / work.experiment.cloud.checkpoint_every)
    devices = len(experiment.tree.devices)
    trainings = devices * prod(tier.participation for tier in experiment.tiers) * experiment.device_rounds
    moves, all_moves = count(1), devices + trainings * experiment.rounds

    async def set_links(lab: SimulatedLab) -> None:
        for node in experiment.tree.nodes:
            delay_s = NETWORK_DELAY_S if site is Site.HOSTS else LOOPBACK_S
            lab.link(node).change(**conditions_of(experiment, node, delay_s=delay_s))

    lab = SimulatedLab(
        experiment,
        seed=experiment.seed,
        scenario=set_links,
        workload=NoiseWorkload(work, lambda: reach(min(1.0, next(moves) / all_moves))),
        durations=PlannedDurations(
            boot_s=0.01,
            evaluate_s=evaluate_s,
            work=work,
            speeds=speeds,
            tree=experiment.tree,
            load=1.0 if site is Site.HOSTS else sample.multiples[-1],
        ),
        conditions=LinkConditions(delay_s=LOOPBACK_S),
        placement=placement_of(
            experiment, speeds, site=site, interface_mbit=interface_mbit, work_s=work_s, sample=sample
        ),
        broker_each=site is Site.HOSTS,
        spool=False,
        time_limit_s=LIMIT_S,
    )
    with _uncollected(), closing(lab):
        with collected_warnings():
            result = lab.play()
        folder = next(lab.agents.runs.glob("*/manifest.json"), None)
        run = Run(folder.parent) if folder is not None else None
        if lab.ended.get(CLOUD) != "" or run is None or not run.rounds:
            raise RunFailed(f"the simulated run failed: {lab.ended.get(CLOUD) or result}")
        return SimulatedRun(_recorded(run.rounds, work.experiment, speeds.record_s), run.links, sample)


def changes(experiment: Experiment, site: Site) -> bool:
    """Return whether links or absences change with the time, and with them the seconds of a global round."""
    links = [*(tier.link for tier in experiment.tiers), *experiment.links.of.values()]
    traced = experiment.availability.trace is not None or any(link.trace is not None for link in links)
    return traced and site is not Site.DIRECT


def _rounds(experiment: Experiment, site: Site) -> int:
    """Return how many global rounds to simulate: `ROUNDS`, and more of a small lab in which something changes."""
    return ROUNDS * (max(1, NODES // len(experiment.tree.nodes)) if changes(experiment, site) else 1)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Leave out garbage collections, which would search all agents again and again; they leave few cycles."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def placement_of(
    experiment: Experiment,
    speeds: MachineSpeeds,
    *,
    site: Site,
    interface_mbit: float = 1000.0,
    work_s: WorkSeconds = cpu_seconds,
    sample: LabSample | None = None,
) -> Placement:
    """Return what runs where. `sample`: the simulated nodes, None: all of the experiment."""
    tree = experiment.tree
    nodes = (CLOUD, *tree.nodes)
    loads = {} if sample is None else sample.loads
    if site is Site.HOSTS:
        hosts = {node: node for node in nodes}
        brokers = {BROKER: CLOUD, **{name: name for name in tree.aggregators}}
        slots_s = experiment.transfer.upload_slots * SLOT_BYTES_S  # what they pass on of slower links

        def interface(host: str, *, up: bool) -> float:
            rate = interface_mbit * 1e6 / 8
            if host not in loads:
                return rate
            return (min(rate, slots_s) if up else rate) / loads[host]

        return Placement(
            speeds.cores, hosts, brokers, {}, costs_of(speeds), interface, _timed(speeds, work_s, loads), loads
        )
    hosts, brokers = dict.fromkeys(nodes, HOST), {BROKER: HOST}
    if sample is not None:
        loads = {HOST: sample.multiples[-1]}
    if site is Site.DIRECT:
        costs = MessageCosts(agent_s=DIRECT_S / AGENT_PACKETS)
        slots = dict.fromkeys(tree.devices, (HOST, 1))
        return Placement(1, hosts, brokers, slots, costs, None, lambda begin, host: work_s(begin), loads)
    groups = device_groups(tree.layers[-1], speeds.cores)
    slots = {
        device: (process, slots_)
        for (process, devices), slots_ in zip(groups.items(), shares(speeds.cores, len(groups)), strict=True)
        for device in devices
    }
    timed = _timed(speeds, work_s, loads)
    return Placement(speeds.cores, hosts, brokers, slots, costs_of(speeds), None, timed, loads)


def _timed(
    speeds: MachineSpeeds, work_s: WorkSeconds, loads: Mapping[str, float]
) -> Callable[[Callable[[], None], str], float]:
    """Return the function that does work of a host and returns its seconds."""
    call_s = speeds.round_s / WORK_CALLS
    return lambda begin, host: loads.get(host, 1.0) * work_s(begin) + call_s


def costs_of(speeds: MachineSpeeds) -> MessageCosts:
    """Return the costs of packets whose sum over a round with one child is the measured cost of such a round."""
    agents, broker = 1 - AT_BROKER, AT_BROKER
    return MessageCosts(
        agent_s=agents * speeds.message_s / AGENT_PACKETS,
        agent_byte_s=agents * speeds.byte_s / 2,
        broker_s=broker * speeds.message_s / BROKER_PACKETS,
        broker_byte_s=broker * speeds.byte_s / 2,
    )


def _simulated(experiment: Experiment, rounds: int, site: Site) -> Experiment:
    """Return the experiment to simulate. Raises InvalidExperiment."""
    rounds = min(experiment.rounds, rounds)
    tree = experiment.model_dump(mode="json")
    tables: dict[str, Any] = {"rounds": rounds, "stop": {}}
    # The seconds of the writes are those of `_recorded`, Tempo's epochs those of `rehearse`.
    tables["cloud"] = tree["cloud"] | {"checkpoint_every": rounds, "epoch_control": {"name": "fixed"}}
    tables["links"] = tree["links"] | {"check": "off"}
    if site is Site.DIRECT:
        tables |= {"links": {"check": "off"}, "hardware": {}, "availability": {}}
    children, tiers = experiment.tree.children, list[dict[str, Any]]()
    for tier, layer in zip(experiment.tiers, experiment.tree.layers, strict=False):
        each = tier.model_dump(mode="json", exclude={"fan_out", "number"})
        each |= {"members": {parent: children[parent] for parent in layer}}
        each["aggregation"] = _without_refinement(tier.aggregation)
        tiers.append(each | {"link": {}} if site is Site.DIRECT else each)
    simulated = with_tiers(experiment, tiers, **tables)
    for tier in simulated.tiers:
        if tier.aggregation.refines:
            problem = "its training at a node cannot be predicted"
            raise InvalidExperiment("aggregation.name", tier.aggregation.name, problem, "Use another rule.")
    return simulated


def _without_refinement(rule: RuleSettings) -> dict[str, Any]:
    """Return the settings of a rule without a step of its own training at the node."""
    tree: dict[str, Any] = rule.model_dump(mode="json")
    return tree | {key: 0 for key in ("steps", "epochs") if rule.refines and key in tree}


def _recorded(
    rounds: Sequence[GlobalRoundRecord], experiment: Experiment, record_s: float
) -> Sequence[GlobalRoundRecord]:
    """Return the global rounds with the writes of the global round before each."""
    found, every = list(rounds), experiment.cloud.checkpoint_every
    for place, each in enumerate(found):
        if place and place % every == 0:
            found[place] = replace(each, phases={**each.phases, "record": each.phases["record"] + record_s})
    return found


def conditions_of(experiment: Experiment, node: str, *, delay_s: float) -> dict[str, float | None]:
    """Return the conditions of a node's link to its broker, beside what the agents' buckets shape.

    The interface of the broker's host is as fast as the node's, so that one limits both.
    """
    if experiment.links.enforce == "bucket":
        return {"delay_s": delay_s}
    payload = PAYLOAD if experiment.links.enforce == "kernel" else 1.0
    link = experiment.link(node)
    up_rate, down_rate = (None if way.rate is None else way.rate * payload for way in (link.up, link.down))
    return {"up_rate": up_rate, "down_rate": down_rate, "delay_s": max(delay_s, link.up.delay_s)}
