"""The prediction of a run's costs: its content, and its text for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deploy.console.tabular import size

if TYPE_CHECKING:
    from common.experiment.schema import Experiment
    from common.host.load import MachineLoad

INTERFACE_MBIT: Final = 1000.0
STAGES: Final = 4  # of a prediction
SHARE_LEAST: Final = 0.9  # of a core, that trainings have on an idle machine
OTHERS_MOST: Final = 0.1  # share of all cores that others may use


def predict(
    experiment: Experiment,
    *,
    one_host: bool,
    interface_mbit: float = INTERFACE_MBIT,
    simulate: bool = False,
    rounds: int | None = None,
    calibration: Path | None = None,
    begin: Callable[[str], object] = lambda stage: None,
) -> dict[str, Any]:
    """Return the content of prediction.json. Raises InvalidExperiment, and RunFailed if a simulated run fails.

    For one global round: `seconds` by phase, `bytes` of MQTT by link (`FROM TO`), and `tiers`, MQTT bytes by tier.
    Also `memory`, bytes by role; `assumed`, the assumptions as text; `speeds`, the measured speeds of this machine, and
    `load`, that of other processes meanwhile. `begin` is called with each of STAGES.
    `simulate`: run the agents in virtual time, for `rounds` global rounds; then `simulated_rounds` has the seconds of
    each. `calibration`: file of `--calibrate`, by default this machine's if it has one.
    """
    import os
    from dataclasses import asdict

    from common.host.load import LoadMeter
    from deploy.local.beforehand import check_code
    from deploy.planning import constants, footprint, prediction, workload
    from deploy.planning.calibration import measure

    check_code(experiment)
    fitted = constants.read(calibration)
    begin(f"reads and splits {experiment.data.dataset}")
    work = workload.workload(experiment)
    cores = len(os.sched_getaffinity(0))
    at_once = f"{cores} devices at once, as many as cores" if one_host and cores > 1 else "one device"
    begin(f"measures training and evaluation of {experiment.model.name}, {at_once}")
    meter = LoadMeter()
    speeds = measure(work, cores=cores, together=one_host, fitted=fitted)
    load = meter.read()
    begin("finds the epochs of each institution")
    workload.rehearse(work, speeds)
    begin("simulates a global round")
    lab = workload.lab(work, speeds, one_host=one_host, interface_mbit=interface_mbit)
    if simulate:
        from deploy.planning import simulated

        run = simulated.simulate(work, speeds, one_host=one_host, interface_mbit=interface_mbit, rounds=rounds)
        found = simulated.prediction_of(work, run)
    else:
        if any(link.trace for link in (*(tier.link for tier in experiment.tiers), *experiment.links.of.values())):
            work.assumed.append("links have the mean rates of their traces; --simulate replays them")
        if experiment.availability.trace is not None:
            work.assumed.append("every device is available; --simulate replays the trace of availability")
        seconds = prediction.seconds(lab, speeds)
        found = {
            "global_round_s": sum(seconds.values()),
            "total_s": sum(seconds.values()) * experiment.rounds,
            "seconds": seconds,
            "bytes": footprint.links_of(experiment, work.sizes) if work.listed else {},
            "tiers": footprint.tiers_of(lab),
        }
    devices = max(experiment.sizes()[-1]) if one_host else 1
    costs = "scaled from a reference machine" if fitted is None else fitted.described()
    return {
        "experiment": experiment.name,
        "experiment_digest": experiment.digest,
        "one_host": one_host,
        "global_rounds": experiment.rounds,
        **found,
        "memory": footprint.memory_of(lab, experiment, data_bytes=work.data_bytes, devices=devices),
        "epochs": dict(work.epochs),
        "assumed": [
            *work.assumed,
            *([] if one_host else [f"each host has a {interface_mbit:g} Mbit/s interface"]),
            f"the costs of messages: {costs}",
        ],
        "speeds": asdict(speeds),
        "load": asdict(load) | {"busy": is_busy(load, speeds.share)},
        "calibration": None if fitted is None else asdict(fitted),
    }


def calibrate(file: Path | None) -> str:
    """Measure what messages cost on this machine, keep it for later plans, and return it as a text."""
    from deploy.planning import constants
    from deploy.planning.fitting import measure_costs

    costs = measure_costs()
    kept = constants.write(costs, file)
    return (
        f"a round: {costs.round_s * 1e3:.2f} ms, and {costs.message_s * 1e3:.2f} ms for each child; a byte: "
        f"{costs.byte_s * 1e9:.2f} ns; {costs.described()}: {kept}"
    )


def text_of(found: Mapping[str, Any]) -> str:
    """Return a prediction as text."""
    lines = [f"a global round   {_duration(found['global_round_s'])}"]
    lines += [f"  {phase:<14} {_duration(length)}" for phase, length in found["seconds"].items()]
    lines.append(f"{found['global_rounds']} global rounds".ljust(15) + _duration(found["total_s"]))
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
