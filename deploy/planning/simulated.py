"""Prediction by the protocol itself: a simulated run whose training is null, on machines with
measured or given speeds.

Quorums, deadlines, client selection, cut-through, upload slots and codecs cost what they cost in
`run --simulate`. Models change by noise in place of training, unless Tempo decides by the training
and it takes seconds. Of a large lab a sample is simulated (`sample.py`).
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import mul
from pathlib import Path
from statistics import fmean, mean
from typing import Any, Final

import numpy as np

from fedstrata.cloud.records import GlobalRoundRecord, LinkRecord
from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.methods.settings import RuleSettings
from fedstrata.common.model.layout import Row
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.planning.machine_speed import MachineSpeeds
from fedstrata.deploy.planning.sample import NODES, LabSample, sample_of
from fedstrata.deploy.planning.simulated_run import INTERFACE_MBIT, seconds_of, simulated_run
from fedstrata.deploy.planning.workload import PlannedWorkload
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.simulation.hardware import Durations, NullWorkload
from fedstrata.deploy.simulation.simulated_computing import BOOT_S, MachineSeconds
from fedstrata.deploy.simulation.simulated_lab import collected_warnings
from fedstrata.deploy.simulation.virtual_run import check_simulated

ROUNDS: Final = 3  # global rounds to simulate at most, if not given and nothing changes meanwhile
TRAINED_LEAST: Final = 3  # global rounds after which Tempo's epochs have settled
TRAINED_MOST: Final = 5  # Tempo draws them anew in each round
TRAINED_S: Final = 20.0
STEP_S: Final = 1e-3  # about what a step takes here, without what follows
WEIGHT_S: Final = 1.2e-8  # for each sample and weight: 120 operations in a convolution, 10 GFLOP/s
ALL_KINDS: Final = "all"  # of bytes: the row of links.csv that sums the others
BLOBS: Final = ("model", "extras")
CHANGE: Final = 0.01  # of each weight, by a training


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What a simulated run recorded. `trained`: its devices have trained, and Tempo has set their
    epochs.
    """

    rounds: Sequence[GlobalRoundRecord]
    links: Sequence[LinkRecord]
    sample: LabSample
    trained: bool

    @property
    def settled(self) -> Sequence[GlobalRoundRecord]:
        """The global rounds after the first one, which waits for no writes and no evaluation."""
        return self.rounds[1:] or self.rounds

    def seconds(self) -> dict[str, float]:
        """Return the mean seconds of a global round by phase."""
        found = {}
        for phase in self.settled[0].phases:
            found[phase] = mean(each.phases[phase] for each in self.settled)
        return found

    def total_s(self, global_rounds: int) -> float:
        """Return the seconds of so many global rounds: those simulated, and the mean for each of
        the others.
        """
        rest = global_rounds - len(self.rounds)
        return sum(each.seconds for each in self.rounds) + rest * sum(self.seconds().values())

    def epochs(self) -> dict[str, float]:
        """Return the mean epochs of each child of the cloud."""
        found = dict[str, float]()
        default = float(self.sample.experiment.training.epochs)
        for name in self.sample.experiment.tree.children[CLOUD]:
            if self.trained:
                own = [epochs for each in self.settled if (epochs := each.epochs.get(name))]
            else:
                own = []
            found[name] = fmean(own) if own else default
        return found

    def bytes_(self) -> dict[str, float]:
        """Return the MQTT bytes of a mean global round by direction of a link, `FROM TO`."""
        found: dict[str, float] = {}
        for link in self.links:
            if link.message_bytes and link.kind == ALL_KINDS:
                found[link.goes] = found.get(link.goes, 0.0) + link.message_bytes / len(self.rounds)
        return found

    def tiers(self) -> dict[str, int]:
        """Return the MQTT bytes of a mean global round by tier and direction, multiplied to the
        whole lab.
        """
        names = self.sample.experiment.tier_names
        found = dict[str, int]()
        for tier, multiple, missing in zip(
            names, self.sample.multiples, self._missing_reports(), strict=True
        ):
            up = self._settled_bytes(tier, "up")
            down = self._settled_bytes(tier, "down")
            found |= {
                f"{tier}_up": round(multiple * (up + missing)),
                f"{tier}_down": round(multiple * down),
            }
        return found

    def _settled_bytes(self, tier: str, way: str) -> float:
        return mean(each.bytes_[f"{tier}_{way}_bytes"] for each in self.settled)

    def _missing_reports(self) -> list[float]:
        """Return for each tier the bytes of reports that go up in a global round on nodes that are
        not simulated.

        The control messages of a node between are those of a device, and a report on each node
        below it.
        """
        experiment = self.sample.experiment
        multiples = self.sample.multiples
        tree = experiment.tree
        names = experiment.tier_names
        counts = [len(layer) for layer in tree.layers[1:]]
        control = [self._settled_bytes(name, "up") for name in names]
        upward = {(child, tree.parent(child)) for child in tree.nodes}
        for link in self.links:
            if link.kind in BLOBS and (link.from_, link.to) in upward:
                control[names.index(link.tier)] -= (link.message_bytes or 0) / len(self.rounds)
        each_round = control[-1] / (counts[-1] * experiment.device_rounds)
        found = []
        for place, multiple in enumerate(multiples[:-1], start=1):
            reports = (
                control[place - 1]
                - counts[place - 1] * experiment.rounds_of(place - 1) * each_round
            )
            below = sum(map(mul, multiples[place:], counts[place:])) / multiple
            found.append(reports * (below / sum(counts[place:]) - 1))
        return [*found, 0.0]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDurations(Durations):
    """Seconds of one core: those that a simulated run's machines take."""

    work: PlannedWorkload
    seconds: MachineSeconds

    def training_s(self, node: str, *, epochs: int, drawn: float) -> float:
        """Return a training's seconds."""
        return self.seconds.training(node, samples=self.work.samples_of(node), epochs=epochs)

    def scoring_s(self, node: str, *, share: float) -> float:
        """Return the seconds of scoring a model on the device's test samples."""
        return self.seconds.scoring(node, samples=self.work.tests_of(node))


class NoiseWorkload(NullWorkload):
    """Workload that changes each weight by about `CHANGE` of itself, as a training does: codecs
    send what they send.
    """

    partition = "planned"

    def __init__(self, work: PlannedWorkload) -> None:
        self._work = work
        self.layout = work.layout
        self.frozen = {}  # each device builds them
        self.first = work.first
        noise = np.random.default_rng(0).standard_normal(2 * self.layout.columns, np.float32)
        self._factors = 1 + np.float32(CHANGE) * noise  # each device takes its own window of them

    def samples(self, node: str, experiment: Experiment) -> tuple[int, int]:
        """Return the numbers of a device's training and test samples."""
        return self._work.samples_of(node), self._work.tests_of(node)

    def train(
        self, node: str, row: Row, out: Row, *, epochs: int, local_round: int
    ) -> tuple[float, int]:
        """Change the flat model `row` into `out`; return a loss and the number of steps."""
        columns = self.layout.columns
        begin = zlib.crc32(f"{node} {local_round}".encode()) % columns
        np.multiply(
            self.layout.floats(row),
            self._factors[begin : begin + columns],
            out=self.layout.floats(out),
        )
        self.layout.extra_columns(out)[:] = 1.0
        return 1.0, epochs * self._work.experiment.steps_in_epoch(self._work.samples_of(node))


def simulate(
    work: PlannedWorkload,
    speeds: MachineSpeeds,
    *,
    interface_mbit: float = INTERFACE_MBIT,
    rounds: int | None = None,
    nodes: int | None = None,
    reach: Callable[[float], object] = lambda share: None,
) -> SimulatedRun:
    """Run the lab of an experiment in virtual time. Raises InvalidExperiment, and RunFailed with
    the run's own reason.

    rounds: global rounds to simulate at most, by default those of `_rounds`
    nodes: of a larger lab, a sample of as many, by default `NODES`
    reach: called with the share of the global rounds that are done
    """
    sample = sample_of(work, speeds, nodes=nodes or NODES)
    trained = 0 if sample.loads else _trained_rounds(work)
    most = max(trained, rounds or 0) or _rounds(sample.experiment)
    epoch_control = "" if trained else "fixed"
    experiment = _simulated(sample.experiment, most, epoch_control)
    seconds = seconds_of(experiment, speeds)
    durations = PlannedDurations(
        boot_s=BOOT_S, evaluate_s=speeds.evaluation_s, work=work, seconds=seconds
    )

    def observe(event: str, facts: Mapping[str, Any]) -> None:
        if event == "global_round":
            reach(facts["global_round"] / experiment.rounds)

    with tempfile.TemporaryDirectory(prefix="fedstrata-") as home, collected_warnings():
        folder = RunFolder.create(Path(home), experiment)
        null = None if trained else (NoiseWorkload(work), durations)
        simulated_run(
            folder,
            {"speeds": asdict(speeds)},
            interface_mbit=interface_mbit,
            loads=sample.loads,
            null=null,
        ).run(observe)
        run = Run(folder.path)
        return SimulatedRun(run.rounds, run.links, sample, bool(trained))


def changes(experiment: Experiment) -> bool:
    """Return whether links or absences change with the time, and with them the seconds of a global
    round.
    """
    links = [*(tier.link for tier in experiment.tiers), *experiment.links.of.values()]
    return experiment.availability.trace is not None or any(
        link.trace is not None for link in links
    )


def _rounds(experiment: Experiment) -> int:
    """Return how many global rounds to simulate: `ROUNDS`, and more of a small lab in which
    something changes.
    """
    return ROUNDS * (max(1, NODES // len(experiment.tree.nodes)) if changes(experiment) else 1)


def _trained_rounds(work: PlannedWorkload) -> int:
    """Return in how many global rounds devices train, so that Tempo sets their epochs; 0 if that
    takes too long.
    """
    experiment = work.experiment
    if experiment.cloud.epoch_control.name == "fixed" or not (work.here and work.listed):
        return 0
    steps = sum(
        experiment.steps_in_epoch(work.samples_of(device)) for device in experiment.tree.devices
    )
    step_s = STEP_S + WEIGHT_S * work.layout.parameters * experiment.training.batch_size
    round_s = experiment.device_rounds * experiment.training.epochs * steps * step_s
    rounds = int(min(TRAINED_MOST, TRAINED_S / round_s))
    if rounds >= TRAINED_LEAST:
        return rounds
    return 0


def _simulated(experiment: Experiment, rounds: int, epoch_control: str) -> Experiment:
    """Return the experiment to simulate, with other epoch control if it is given. Raises
    InvalidExperiment.
    """
    tree = experiment.model_dump(mode="json")
    tree["rounds"] = min(experiment.rounds, rounds)
    tree["stop"] = {}
    if epoch_control:
        tree["cloud"]["epoch_control"] = {"name": epoch_control}
    tree["links"]["check"] = "off"
    for table, tier in zip(tree["tiers"], experiment.tiers, strict=True):
        table["aggregation"] = _without_refinement(tier.aggregation)
    simulated = parse(tree)
    check_simulated(simulated)
    return simulated


def _without_refinement(rule: RuleSettings) -> dict[str, Any]:
    """Return the settings of a rule without a step of its own training at the node."""
    tree: dict[str, Any] = rule.resolved.model_dump(mode="json")
    tree.pop("refine", None)
    return tree | {key: 0 for key in ("steps", "epochs") if rule.refines and key in tree}
