"""Prediction by the protocol itself: the real agents in virtual time, on links and machines with measured speeds.

Quorums, deadlines, client selection, cut-through, upload slots and codecs cost what they cost in a run. Models change
by noise in place of training, and work beside the event loops (mixing, encoding) is done here and takes the CPU seconds
it takes here.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, Final

import numpy as np

from cloud.records import GlobalRoundRecord, LinkRecord
from common.errors import InvalidExperiment, RunFailed
from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD
from common.model.layout import ModelLayout, Row
from deploy.local.network import device_groups, shares
from deploy.planning.prediction import AT_PARENT, MachineSpeeds
from deploy.planning.workload import PAYLOAD, PlannedWorkload
from deploy.results.run import Run
from deploy.simulation.hardware import Durations
from deploy.simulation.lab import BROKER, SimulatedLab
from deploy.simulation.link import LinkConditions
from deploy.simulation.machines import MessageCosts, Placement, cpu_seconds

ROUNDS_MOST: Final = 5  # global rounds to simulate, if not given
DEVICES_MOST: Final = 20_000
LIMIT_S: Final = 1e8
NETWORK_DELAY_S: Final = 1e-4  # one way, of a link that has no delay
LOOPBACK_S: Final = 2e-5
# Of a round with one child whose models are inside the messages.
AGENT_PACKETS: Final = 8  # sent and received by both agents
BROKER_PACKETS: Final = 8
WORK_CALLS: Final = 3  # of a round without a checkpoint, to functions that run beside the parent's event loop
AT_CHILD: Final = 0.4  # share of a round's messaging work done by the child; the rest is the parent's and the broker's
ALL_KINDS: Final = "all"  # of bytes: the row of links.csv that sums the others
CHANGE: Final = 0.01  # of each weight, by a training

WorkSeconds = Callable[[Callable[[], None]], float]


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What a simulated run recorded."""

    rounds: Sequence[GlobalRoundRecord]
    links: Sequence[LinkRecord]

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
        """Return the MQTT bytes of a mean global round by tier and direction."""
        names = self.settled[0].bytes_
        return {name.removesuffix("_bytes"): round(mean(each.bytes_[name] for each in self.settled)) for name in names}


@dataclass(frozen=True, slots=True)
class PlannedDurations(Durations):
    """Seconds of one core: of the steps of each device's training, and of an evaluation."""

    work: PlannedWorkload | None = None
    speeds: MachineSpeeds | None = None

    def training_s(self, node: str, *, epochs: int, drawn: float) -> float:
        """Return a training's seconds, with the epochs that Tempo would set."""
        assert self.work is not None and self.speeds is not None
        tree = self.work.experiment.tree
        path = (tree.parent(node), node)
        while path[0] != CLOUD:
            path = (tree.parent(path[0]), path[0])
        steps = self.work.steps(self.work.samples_of(node), self.work.epochs.get(path[1], epochs))
        return self.speeds.training_s + steps * self.speeds.step_s


class NoiseWorkload:
    """Workload that changes each weight by about `CHANGE` of itself, as a training does: codecs take what they take."""

    partition = "planned"

    def __init__(self, work: PlannedWorkload) -> None:
        self._work = work
        self.layout: ModelLayout = work.layout
        self.first: Row = work.first
        columns = self.layout.columns
        noise = np.random.default_rng(0).standard_normal(2 * columns, np.float32)
        self._factors = 1 + np.float32(CHANGE) * noise  # each device takes its own window of them

    def samples(self, node: str) -> int:
        """Return the number of a device's training samples."""
        return self._work.samples_of(node)

    def train(self, node: str, row: Row, out: Row, *, epochs: int, local_round: int) -> tuple[float, int]:
        """Change the flat model `row` into `out`; return a loss and the number of steps."""
        columns = self.layout.columns
        begin = zlib.crc32(f"{node} {local_round}".encode()) % columns
        np.multiply(self.layout.floats(row), self._factors[begin : begin + columns], out=self.layout.floats(out))
        self.layout.extra_columns(out)[:] = 1.0
        return 1.0, round(self._work.steps(self.samples(node), epochs))

    def evaluate(self, row: Row) -> tuple[float, float]:
        """Return constants."""
        return 0.5, 1.0


def simulate(
    work: PlannedWorkload,
    speeds: MachineSpeeds,
    *,
    one_host: bool,
    interface_mbit: float,
    rounds: int | None = None,
    work_s: WorkSeconds = cpu_seconds,
) -> SimulatedRun:
    """Run the lab of an experiment in virtual time. Raises InvalidExperiment, and RunFailed with the run's own reason.

    `rounds`: global rounds to simulate, by default at most `ROUNDS_MOST`.
    """
    experiment = _simulated(work, rounds)
    # The evaluation runs beside the writes of the results, which leave the cores to it.
    evaluate_s = max(0.0, speeds.evaluation_s - speeds.record_s / work.experiment.cloud.checkpoint_every)
    found: list[SimulatedRun] = []

    def keep(lab: SimulatedLab) -> None:
        folder = next(lab.agents.runs.glob("*/manifest.json"), None)
        if folder is not None:
            run = Run(folder.parent)
            found.append(SimulatedRun(_recorded(run.rounds, work.experiment, speeds.record_s), run.links))

    async def set_links(lab: SimulatedLab) -> None:
        for node in experiment.tree.nodes:
            delay_s = LOOPBACK_S if one_host else NETWORK_DELAY_S
            lab.link(node).change(**conditions_of(experiment, node, delay_s=delay_s))

    lab = SimulatedLab(
        experiment,
        seed=experiment.seed,
        scenario=set_links,
        workload=NoiseWorkload(work),
        durations=PlannedDurations(boot_s=0.01, evaluate_s=evaluate_s, work=work, speeds=speeds),
        conditions=LinkConditions(delay_s=LOOPBACK_S),
        placement=placement_of(experiment, speeds, one_host=one_host, interface_mbit=interface_mbit, work_s=work_s),
        broker_each=not one_host,
        spool=False,
        time_limit_s=LIMIT_S,
        at_end=keep,
    )
    with _uncollected():
        outcome = lab.run()
    if not outcome.ended.get(CLOUD) == "" or not found or not found[0].rounds:
        raise RunFailed(f"the simulated run failed: {outcome.ended.get(CLOUD) or outcome.result}")
    return found[0]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Leave out garbage collections, which would search all agents again and again; they leave few cycles."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def placement_of(
    experiment: Experiment, speeds: MachineSpeeds, *, one_host: bool, interface_mbit: float, work_s: WorkSeconds
) -> Placement:
    """Return what runs where: all on one host as by `fedstrata run`, or each node, with its broker, on its own."""
    tree = experiment.tree
    nodes = (CLOUD, *tree.nodes)
    costs, call_s = costs_of(speeds), speeds.round_s / WORK_CALLS

    def timed(begin: Callable[[], None]) -> float:
        return work_s(begin) + call_s

    if one_host:
        groups = device_groups(tree.layers[-1], speeds.cores)
        slots = shares(speeds.cores, len(groups))
        processes = {
            device: (process, count)
            for (process, devices), count in zip(groups.items(), slots, strict=True)
            for device in devices
        }
        hosts, brokers = dict.fromkeys(nodes, "host"), {BROKER: "host"}
        return Placement(speeds.cores, hosts, brokers, processes, costs, None, timed)
    hosts = {node: node for node in nodes}
    brokers = {BROKER: CLOUD, **{name: name for name in tree.aggregators}}
    return Placement(speeds.cores, hosts, brokers, {}, costs, interface_mbit * 1e6 / 8, timed)


def costs_of(speeds: MachineSpeeds) -> MessageCosts:
    """Return the costs of packets whose sum over a round with one child is the measured cost of such a round."""
    agents, broker = AT_PARENT + AT_CHILD, 1 - AT_PARENT - AT_CHILD
    return MessageCosts(
        agent_s=agents * speeds.message_s / AGENT_PACKETS,
        agent_byte_s=agents * speeds.byte_s / 2,
        broker_s=broker * speeds.message_s / BROKER_PACKETS,
        broker_byte_s=broker * speeds.byte_s / 2,
    )


def _simulated(work: PlannedWorkload, rounds: int | None) -> Experiment:
    """Return the experiment to simulate. Raises InvalidExperiment."""
    experiment = work.experiment
    count = sum(experiment.sizes()[-1])
    if count > DEVICES_MOST:
        remedy = f"Simulate at most {DEVICES_MOST} devices, or leave --simulate out."
        raise InvalidExperiment("topology.devices", count, "too many for agents in virtual time", remedy)
    for tier in experiment.tiers:
        if tier.aggregation.refines:
            problem = "its training at a node is not simulated"
            raise InvalidExperiment("aggregation.name", tier.aggregation.name, problem, "Leave --simulate out.")
    tree = experiment.model_dump(mode="json")
    tree["rounds"] = min(experiment.rounds, rounds or ROUNDS_MOST)
    tree["stop"] = {}
    tree["links"]["check"] = "off"
    tree["cloud"]["checkpoint_every"] = tree["rounds"]  # the seconds of the writes are those of `_recorded`
    tree["cloud"]["epoch_control"] = {"name": "fixed"}  # Tempo's epochs are those of `rehearse`
    return parse(tree)


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


def prediction_of(work: PlannedWorkload, run: SimulatedRun) -> Mapping[str, Any]:
    """Return the keys of prediction.json that come from a simulated run."""
    seconds = run.seconds()
    return {
        "simulated_rounds": [round(each.seconds, 6) for each in run.rounds],
        "global_round_s": sum(seconds.values()),
        "total_s": run.total_s(work.experiment.rounds),
        "seconds": seconds,
        "bytes": run.bytes_(),
        "tiers": run.tiers(),
    }
