"""The speeds of the machines of a simulated run, and the run with them.

They are known before the run and stay in its manifest: those of an earlier simulated run, those that the experiment
states (`step_s` of every device), or those of one calibration, made alone on this machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from cloud.results import SIMULATED, RunFolder
from common.errors import InvalidExperiment
from common.experiment.schema import Experiment
from common.host.files import replacing
from common.host.machine import LoadMeter
from common.text import json_text
from deploy.planning import workload
from deploy.planning.calibration import REFERENCE, MachineSpeeds, measure, read_costs
from deploy.planning.predicting import is_busy
from deploy.planning.simulated import NETWORK_DELAY_S, WORK_CALLS, Site, conditions_of, placement_of
from deploy.results.run import Run
from deploy.simulation.computing import MachineSeconds
from deploy.simulation.link import LinkConditions
from deploy.simulation.loop import OWNER
from deploy.simulation.run import VirtualRun

STAGES: Final = 2  # of a calibration
MEANING: Final = (
    "virtual: each node has a machine of its own, with these speeds, and the links of the experiment; nothing was timed"
)


def machine_speeds(
    experiment: Experiment, *, of: Path | None, begin: Callable[[str], object] = lambda stage: None
) -> dict[str, Any]:
    """Return what the manifest has of the machines: the meaning of the seconds, `speeds`, and their `source`.

    `of`: the folder of a simulated run, or a sweep's file, whose speeds are used. Else they are measured if a device
    states no `step_s`: then `load` is that of other processes meanwhile, and `begin` is called with each of STAGES.
    Raises InvalidExperiment.
    """
    if of is not None:
        return _speeds_of(of, experiment)
    if _states_steps(experiment):
        return _facts(REFERENCE, "training: step_s of each device; else a reference machine of two cores")
    begin(f"reads and splits {experiment.data.dataset}")
    work = workload.workload(experiment)
    begin(f"measures training and evaluation of {experiment.model.name}, alone")
    cores, meter = len(os.sched_getaffinity(0)), LoadMeter()
    speeds = measure(work, cores=cores, together=False, fitted=read_costs(None))
    load = meter.read()
    return {**_facts(speeds, "measured on this host before the run"),
            "load": asdict(load) | {"busy": is_busy(load, speeds.share)}}  # fmt: skip


def simulated_run(folder: RunFolder, facts: Mapping[str, Any], **options: Any) -> VirtualRun:
    """Return the run of a folder on machines of these facts; `options`: of VirtualRun."""
    experiment, speeds = folder.experiment, MachineSpeeds(**facts["speeds"])
    tree = experiment.tree

    def work_s(begin: Callable[[], None]) -> float:
        """Do a work beside a node's event loop; return its share of the mixing of a round, which is never timed."""
        begin()
        uploads = len(tree.children.get(owner.name, ())) if (owner := OWNER.get()) is not None else 0
        return uploads * run.row_bytes * speeds.mix_byte_s / WORK_CALLS if uploads else 0.0

    run = VirtualRun(
        folder,
        MachineSeconds(experiment, speeds.training_s, speeds.step_s, speeds.evaluation_s),
        placement_of(experiment, speeds, site=Site.HOSTS, work_s=work_s),
        {node: LinkConditions(**conditions_of(experiment, node, delay_s=NETWORK_DELAY_S)) for node in tree.nodes},  # type: ignore[arg-type]
        **options,
    )
    return run


def _facts(speeds: MachineSpeeds, source: str) -> dict[str, Any]:
    return {"seconds": MEANING, "source": source, "speeds": asdict(speeds)}


def keep_speeds(file: Path, experiments: Iterable[Experiment], begin: Callable[[str], object]) -> None:
    """Measure what these experiments need that the file lacks, and write it there. Raises InvalidExperiment."""
    known = _read(file) if file.exists() else {}
    for experiment in {_kind(each): each for each in experiments if _kind(each) not in known}.values():
        known[_kind(experiment)] = machine_speeds(experiment, of=None, begin=begin)
        with replacing(file) as written:
            written.write(json_text(known, indent=2).encode())


def _speeds_of(path: Path, experiment: Experiment) -> dict[str, Any]:
    """Return the facts of a run's folder, or of a file of `keep_speeds`. Raises InvalidExperiment."""
    other = Run(path) if path.is_dir() else None
    known = _read(path) if other is None else {_kind(other.experiment): dict(other.manifest.get(SIMULATED, {}))}
    if not (facts := known.get(_kind(experiment))):
        of = ", ".join(kind for kind, facts in known.items() if facts) or "no simulated run"
        remedy = "Name the folder of a simulated run with as long steps, or omit --speeds."
        raise InvalidExperiment("--speeds", str(path), f"of {of}, not of {_kind(experiment)}", remedy)
    return facts if other is None else {**facts, "source": f"of run {other.id}"}


def _read(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidExperiment("--speeds", str(file), f"unreadable: {error}", "Name a simulated run.") from None


def _kind(experiment: Experiment) -> str:
    """Return what the seconds of a training step depend on."""
    own = " with a step_s of each device" if _states_steps(experiment) else ""
    batches = f"batches of {experiment.training.batch_size}"
    return f"{experiment.model.name} on {experiment.data.dataset} in {batches}{own}"


def _states_steps(experiment: Experiment) -> bool:
    return all(experiment.machine(node).step_s for node in experiment.tree.devices)
