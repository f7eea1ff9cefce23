"""The prediction of a run's costs: its content, and its text for people."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from common.experiment.schema import Experiment
from common.host.machine import LoadMeter, MachineLoad
from deploy.console.tabular import size
from deploy.local.beforehand import check_code, require_torch
from deploy.planning import workload
from deploy.planning.calibration import FittedCosts, MachineSpeeds, measure, read_costs, write_costs
from deploy.planning.footprint import direct_bytes, memory_of
from deploy.planning.simulated import SimulatedRun, Site, changes, simulate
from deploy.planning.workload import OF_THE_SPLIT, PlannedWorkload

INTERFACE_MBIT: Final = 1000.0
STAGES: Final = 4  # of a prediction
SHARE_LEAST: Final = 0.9  # of a core, that trainings have on an idle machine
OTHERS_MOST: Final = 0.1  # share of all cores that others may use


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """Predictions for one kind of lab. This machine is measured once for all experiments that train alike.

    site: where the nodes are    interface_mbit: rate of each host's network interface
    rounds: global rounds to simulate    nodes: of a larger lab, a sample of as many; None: the defaults
    calibration: file of `--calibrate`, by default this machine's if it has one
    """

    site: Site
    interface_mbit: float = INTERFACE_MBIT
    rounds: int | None = None
    nodes: int | None = None
    calibration: Path | None = None
    _measured: dict[str, tuple[MachineSpeeds, MachineLoad]] = field(default_factory=dict)

    def predict(
        self,
        experiment: Experiment,
        *,
        begin: Callable[[str], object] = lambda stage: None,
        reach: Callable[[float], object] = lambda share: None,
    ) -> dict[str, Any]:
        """Return the content of prediction.json. Raises InvalidExperiment, and RunFailed if the simulated run fails.

        For one global round: `seconds` by phase, `bytes` of MQTT by link (`FROM TO`), and `tiers`, MQTT bytes by tier.
        `simulated_rounds` has the seconds of each simulated global round, `simulated_nodes` the number of nodes. Also
        `memory`, bytes by role; `assumed`, the assumptions as text; `speeds`, the measured speeds of this machine, and
        `load`, that of other processes meanwhile.

        `begin` is called with each of STAGES, `reach` with the share of the simulation that is done.
        """
        check_code(experiment)
        require_torch(experiment)
        fitted = read_costs(self.calibration)
        begin(f"reads and splits {experiment.data.dataset}")
        work = workload.workload(experiment)
        speeds, load = self._speeds(work, fitted, begin)
        begin("finds the epochs of each institution")
        workload.rehearse(work, speeds)
        begin("simulates the lab in virtual time")
        run = simulate(
            work,
            speeds,
            site=self.site,
            interface_mbit=self.interface_mbit,
            rounds=self.rounds,
            nodes=self.nodes,
            reach=reach,
        )
        seconds, all_nodes = run.seconds(), sum(map(sum, experiment.sizes()))
        devices = 1 if self.site is Site.HOSTS else max(experiment.sizes()[-1])
        held = {"data_bytes": work.data_bytes, "kept_bytes": work.kept_bytes}
        memory = memory_of(experiment, work.layout, devices=devices, **held)
        if self.site is Site.DIRECT:
            memory = {"worker": direct_bytes(experiment, work.layout, **held)}
        return {
            "experiment": experiment.name,
            "experiment_digest": experiment.digest,
            "one_host": self.site is not Site.HOSTS,
            "global_rounds": experiment.rounds,
            "global_round_s": sum(seconds.values()),
            "total_s": run.total_s(experiment.rounds),
            "seconds": seconds,
            "simulated_rounds": [round(each.seconds, 6) for each in run.rounds],
            "simulated_nodes": run.sample.nodes,
            "nodes": all_nodes,
            "bytes": {} if run.sample.loads else run.bytes_(),
            "tiers": run.tiers(),
            "memory": memory,
            "epochs": dict(work.epochs),
            "assumed": [*work.assumed, *self._assumed(run, all_nodes, fitted)],
            "speeds": asdict(speeds),
            "load": asdict(load) | {"busy": is_busy(load, speeds.share)},
            "calibration": None if fitted is None else asdict(fitted),
        }

    def _speeds(
        self, work: PlannedWorkload, fitted: FittedCosts | None, begin: Callable[[str], object]
    ) -> tuple[MachineSpeeds, MachineLoad]:
        """Return the speeds of this machine with an experiment's trainings, and its load when they were measured."""
        cores, together = len(os.sched_getaffinity(0)), self.site is not Site.HOSTS
        at_once = f"{cores} devices at once, as many as cores" if together and cores > 1 else "one device"
        begin(f"measures training and evaluation of {work.experiment.model.name}, {at_once}")
        key = trains_like(work.calibrated)
        if key not in self._measured:
            meter = LoadMeter()
            speeds = measure(work, cores=cores, together=together, fitted=fitted)
            self._measured[key] = speeds, meter.read()
        return self._measured[key]

    def _assumed(self, run: SimulatedRun, nodes: int, fitted: FittedCosts | None) -> list[str]:
        """Return the assumptions of a simulation as text."""
        found = []
        if run.sample.loads:
            found.append(f"a sample of {run.sample.nodes:,} of the {nodes:,} nodes is simulated, and multiplied")
        simulated, rounds = len(run.rounds), run.sample.experiment.rounds
        if simulated < rounds and changes(run.sample.experiment, self.site):
            found.append(f"links and absences change as in the first {simulated:,} of {rounds:,} global rounds")
        if self.site is Site.HOSTS:
            found.append(f"each host has a {self.interface_mbit:g} Mbit/s interface")
        if self.site is not Site.DIRECT:
            costs = "scaled from a reference machine" if fitted is None else fitted.described()
            found.append(f"the costs of messages: {costs}")
        return found


def trains_like(experiment: Experiment) -> str:
    """Return what the measured speeds depend on: equal texts, equal speeds."""
    tree = experiment.model_dump(mode="json")
    data = {key: value for key, value in tree["data"].items() if key not in OF_THE_SPLIT}
    return str((tree["model"], data, tree["training"], experiment.sizes()))


def calibrate(file: Path | None) -> str:
    """Measure what messages cost on this machine, keep it for later plans, and return it as a text."""
    from deploy.planning.fitting import measure_costs

    costs = measure_costs()
    kept = write_costs(costs, file)
    return (
        f"a round: {costs.round_s * 1e3:.2f} ms, and {costs.message_s * 1e3:.2f} ms for each child; a byte: "
        f"{costs.byte_s * 1e9:.2f} ns; {costs.described()}: {kept}"
    )


def text_of(found: Mapping[str, Any]) -> str:
    """Return a prediction as text."""
    lines = [f"a global round   {_duration(found['global_round_s'])}"]
    lines += [f"  {phase:<14} {_duration(length)}" for phase, length in found["seconds"].items()]
    lines.append(f"{found['global_rounds']} global rounds".ljust(16) + " " + _duration(found["total_s"]))
    lines.append("bytes of a global round")
    lines += [f"  {tier.replace('_', ' '):<14} {size(count)}" for tier, count in found["tiers"].items()]
    lines.append("memory of a process")
    lines += [f"  {role.replace('_', ' '):<14} {size(count)}" for role, count in found["memory"].items()]
    lines += [f"assumed: {text}" for text in found["assumed"]]
    return "\n".join(lines) + "\n" + load_line(found["load"], found["speeds"]["share"])


def is_busy(load: MachineLoad, share: float) -> bool:
    """Return whether other processes had so much of the machine that the measured speeds are not its own."""
    return share < SHARE_LEAST or (load.others_cores or 0.0) > OTHERS_MOST * load.cores


def load_line(load: Mapping[str, Any], share: float) -> str:
    """Return the line with the load under which this machine was measured."""
    others = "an unknown number" if load["others_cores"] is None else f"{load['others_cores']:.1f}"
    line = (
        f"measured while other processes used {others} of {load['cores']} cores (load average"
        f" {load['load_average']:.1f}); training had {share:.0%} of a core"
    )
    busy = ": this machine is busy, so is the one predicted. Measure again when it is idle."
    return f"{line}{busy if load['busy'] else ''}\n"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
