"""The prediction of a run's costs: its content, and its text for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fedstrata.common.experiment.schema import Experiment
from fedstrata.deploy.console.tabular import size
from fedstrata.deploy.local.beforehand import check_code, require_torch
from fedstrata.deploy.planning import workload
from fedstrata.deploy.planning.footprint import memory_of
from fedstrata.deploy.planning.machine_speed import load_line
from fedstrata.deploy.planning.simulated import SimulatedRun, changes, simulate
from fedstrata.deploy.planning.simulated_run import INTERFACE_MBIT, machine_speeds, speeds_in
from fedstrata.deploy.planning.workload import OF_THE_SPLIT, sizes_of

STAGES: Final = 3  # of a prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """Predictions. This machine is measured once for all experiments that train alike.

    interface_mbit: rate of each host's network interface
    rounds: global rounds to simulate    nodes: of a larger lab, a sample of as many; None: the
    defaults speeds: a simulated run's folder, or a sweep's file, with the speeds of the machines;
    None: stated or measured ones
    """

    interface_mbit: float = INTERFACE_MBIT
    rounds: int | None = None
    nodes: int | None = None
    speeds: Path | None = None
    _known: dict[str, dict[str, Any]] = field(default_factory=dict)

    def predict(
        self,
        experiment: Experiment,
        *,
        begin: Callable[[str], object] = lambda stage: None,
        reach: Callable[[float], object] = lambda share: None,
    ) -> dict[str, Any]:
        """Return the content of a prediction. Raises InvalidExperiment, and RunFailed if the
        simulated run fails.

        For one global round: `seconds` by phase, `bytes` of MQTT by link (`FROM TO`), and `tiers`,
        MQTT bytes by tier. `simulated_rounds` has the seconds of each simulated global round,
        `simulated_nodes` the number of nodes. Also `memory`, bytes by role; `own_bytes`, of each
        device's samples where it reads no others; `assumed`, the assumptions as text; `speeds` of a
        machine, and if they were measured `load`, that of other processes meanwhile.

        `begin` is called with each of STAGES, `reach` with the share of the simulation that is
        done.
        """
        check_code(experiment)
        require_torch(experiment)
        facts = None if self.speeds is None else machine_speeds(experiment, of=self.speeds)
        begin(f"reads and splits {experiment.data.dataset}")
        work = workload.workload(experiment)
        if facts is None:
            key = trains_like(work.calibrated)
            if key not in self._known:
                self._known[key] = machine_speeds(experiment, of=None, begin=begin, work=work)
            facts = self._known[key]
        begin("simulates the lab in virtual time")
        run = simulate(
            work,
            speeds_in(facts),
            interface_mbit=self.interface_mbit,
            rounds=self.rounds,
            nodes=self.nodes,
            reach=reach,
        )
        seconds = run.seconds()
        nodes = sum(map(sum, experiment.sizes()))
        own = [*work.own_bytes.values()]
        held = {"data_bytes": work.data_bytes, "kept_bytes": work.kept_bytes}
        return {
            "experiment": experiment.name,
            "experiment_digest": experiment.digest,
            "global_rounds": experiment.rounds,
            "global_round_s": sum(seconds.values()),
            "total_s": run.total_s(experiment.rounds),
            "seconds": seconds,
            "simulated_rounds": [round(each.seconds, 6) for each in run.rounds],
            "simulated_nodes": run.sample.nodes,
            "nodes": nodes,
            "bytes": {} if run.sample.loads else run.bytes_(),
            "tiers": run.tiers(),
            "memory": memory_of(experiment, work.layout, devices=1, own_bytes=own, **held),
            "own_bytes": dict(work.own_bytes),
            "epochs": run.epochs() if work.listed else {},
            "assumed": [
                *work.assumed,
                *self._assumed(experiment, run, nodes),
                f"speeds: {facts['source']}; messages and mixing as on a reference machine",
            ],
            "speeds": facts["speeds"],
            "load": facts.get("load"),
        }

    def _assumed(self, experiment: Experiment, run: SimulatedRun, nodes: int) -> list[str]:
        """Return the assumptions of a simulation as text."""
        found = list[str]()
        simulated = run.sample.experiment
        if run.trained:
            found.append(
                f"the epochs that Tempo sets in {len(run.rounds)} global rounds, whose trainings "
                "were run here"
            )
        elif experiment.cloud.epoch_control.name != "fixed":
            found.append(
                f"{experiment.training.epochs} epochs everywhere: Tempo's decisions are not "
                "predicted"
            )
        if run.sample.loads:
            found.append(
                f"a sample of {run.sample.nodes:,} of the {nodes:,} nodes is simulated, and "
                "multiplied"
            )
        if len(run.rounds) < simulated.rounds and changes(simulated):
            found.append(
                f"links and absences change as in the first {len(run.rounds):,} of "
                f"{simulated.rounds:,} global rounds"
            )
        found.append(f"each host has a {self.interface_mbit:g} Mbit/s interface")
        return found


def trains_like(experiment: Experiment) -> str:
    """Return what the measured speeds depend on: equal texts, equal speeds."""
    keys = ("model", "data", "training", "hardware")
    tree = experiment.model_dump(mode="json", include=set(keys))
    for key in OF_THE_SPLIT:
        tree["data"].pop(key, None)
    return str((*(tree[key] for key in keys), experiment.sizes()))


def text_of(found: Mapping[str, Any]) -> str:
    """Return a prediction as text."""
    lines = [f"a global round   {_duration(found['global_round_s'])}"]
    lines += [f"  {phase:<14} {_duration(length)}" for phase, length in found["seconds"].items()]
    lines.append(
        f"{found['global_rounds']} global rounds".ljust(16) + " " + _duration(found["total_s"])
    )
    lines += ["bytes of a global round", *sizes_of(found["tiers"])]
    lines += ["memory of a process", *sizes_of(found["memory"])]
    if own := sorted(found["own_bytes"].values()):
        lines.append(
            f"  own samples    {size(own[0])} to {size(own[-1])} by user, "
            f"{size(own[len(own) // 2])} in the middle"
        )
    lines += [f"assumed: {text}" for text in found["assumed"]]
    measured = load_line(found["load"], found["speeds"]["share"]) if found["load"] else ""
    return "\n".join(lines) + "\n" + measured


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms"
