"""The machines of a simulated run and their speeds, and the run with them.

The speeds are known before the run and stay in its manifest: those of an earlier simulated run,
those that the experiment states (`step_s` of every device), or those of one calibration, made alone
on this machine. Each node has a machine of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from fedstrata.cloud.run_folder import SIMULATED, RunFolder
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.files import replacing
from fedstrata.common.host.machine import LoadMeter
from fedstrata.common.protocol.receiver import SLOT_BYTES_S
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.text import json_text
from fedstrata.deploy.planning import workload
from fedstrata.deploy.planning.machine_speed import REFERENCE, MachineSpeeds, is_busy, measure
from fedstrata.deploy.results.run import Run, find
from fedstrata.deploy.simulation.link import LinkConditions
from fedstrata.deploy.simulation.simulated_computing import MachineSeconds
from fedstrata.deploy.simulation.simulated_lab import BROKER
from fedstrata.deploy.simulation.simulated_machines import MessageCosts, Placement
from fedstrata.deploy.simulation.virtual_run import VirtualRun

STAGES: Final = 2  # of a calibration
INTERFACE_MBIT: Final = 1000.0
NETWORK_DELAY_S: Final = 1e-4  # one way, of a link that has no delay
# Of a round with one child whose models are inside the messages.
AGENT_PACKETS: Final = 8  # sent and received by both agents
BROKER_PACKETS: Final = 8
# of a round without a checkpoint, to functions that run beside the parent's event loop
WORK_CALLS: Final = 3
AT_BROKER: Final = 0.2  # share of a round's messaging work; the rest is that of parent and child
PAYLOAD: Final = 1448 / 1514  # of an Ethernet frame, which is what the kernel's links count
MEANING: Final = (
    "virtual: each node has a machine of its own, with these speeds, and the links "
    "of the experiment; nothing was timed"
)


def machine_speeds(
    experiment: Experiment,
    *,
    of: Path | None,
    runs: Path = Path("runs"),
    begin: Callable[[str], object] = lambda stage: None,
    work: workload.PlannedWorkload | None = None,
) -> dict[str, Any]:
    """Return what the manifest has of the machines: the meaning of the seconds, `speeds`, and their
    `source`.

    `of`: a simulated run, by its folder or a prefix of its id below `runs`, or a sweep's file,
    whose speeds are used. Else they are measured if a device states no `step_s`, by `work` if it is
    known: then `load` is that of other processes meanwhile, and `begin` is called with each of
    STAGES. Raises InvalidExperiment.
    """
    if of is not None:
        place = of if of.exists() else find(str(of), runs)
        return _speeds_of(place, experiment)
    if _states_steps(experiment):
        return _facts(
            REFERENCE, "training: step_s of each device; else a reference machine of two cores"
        )
    if work is None:
        begin(f"reads and splits {experiment.data.dataset}")
        work = workload.workload(experiment)
    begin(f"measures training and evaluation of {experiment.model.name}, alone")
    meter = LoadMeter()
    speeds = measure(work, cores=len(os.sched_getaffinity(0)))
    load = meter.read()
    return {**_facts(speeds, "measured on this host before the run"),
            "load": asdict(load) | {"busy": is_busy(load, speeds.share)}}  # fmt: skip


def speeds_in(facts: Mapping[str, Any]) -> MachineSpeeds:
    """Return the speeds of a manifest, which may have more of them."""
    return MachineSpeeds(
        **{each.name: facts["speeds"][each.name] for each in fields(MachineSpeeds)}
    )


def simulated_run(
    folder: RunFolder,
    facts: Mapping[str, Any],
    *,
    interface_mbit: float = INTERFACE_MBIT,
    loads: Mapping[str, float] = MappingProxyType({}),
    **options: Any,
) -> VirtualRun:
    """Return the run of a folder on machines of these facts; `options`: of VirtualRun.

    `loads`: by parent, how many children each of its simulated children stands for; by default 1
    """
    experiment = folder.experiment
    speeds = speeds_in(facts)
    tree = experiment.tree
    slots_s = experiment.transfer.upload_slots * SLOT_BYTES_S  # what they pass on of slower links

    def interface(host: str, *, up: bool) -> float:
        rate = interface_mbit * 1e6 / 8
        if host not in loads:
            return rate
        return (min(rate, slots_s) if up else rate) / loads[host]

    def work_s(begin: Callable[[], None], host: str) -> float:
        """Do a work beside a node's event loop; return its share of the mixing of a round, which is
        never timed.
        """
        begin()
        uploads = len(tree.children.get(host, ()))
        if uploads:
            mixing_s = loads.get(host, 1.0) * uploads * run.row_bytes * speeds.mix_byte_s
        else:
            mixing_s = 0.0
        return (mixing_s + speeds.round_s) / WORK_CALLS

    placement = Placement(
        cores=speeds.cores,
        hosts={node: node for node in (CLOUD, *tree.nodes)},
        brokers={BROKER: CLOUD, **{name: name for name in tree.aggregators}},
        costs=_costs(speeds),
        interface=interface,
        work_s=work_s,
        loads=loads,
    )
    conditions = {node: _conditions(experiment, node) for node in tree.nodes}
    run = VirtualRun(folder, seconds_of(experiment, speeds), placement, conditions, **options)
    return run


def seconds_of(experiment: Experiment, speeds: MachineSpeeds) -> MachineSeconds:
    """Return the seconds of trainings and evaluations of an experiment on machines of these
    speeds.
    """
    return MachineSeconds(experiment, speeds.training_s, speeds.step_s, speeds.evaluation_s)


def _costs(speeds: MachineSpeeds) -> MessageCosts:
    """Return the costs of packets whose sum over a round with one child is the cost of such a
    round.
    """
    agents = 1 - AT_BROKER
    broker = AT_BROKER
    return MessageCosts(
        agent_s=agents * speeds.message_s / AGENT_PACKETS,
        agent_byte_s=agents * speeds.byte_s / 2,
        broker_s=broker * speeds.message_s / BROKER_PACKETS,
        broker_byte_s=broker * speeds.byte_s / 2,
    )


def _conditions(experiment: Experiment, node: str) -> LinkConditions:
    """Return the conditions of a node's link to its broker, beside what the agents' buckets shape.

    The interface of the broker's host is as fast as the node's, so that one limits both.
    """
    if experiment.links.enforce == "bucket":
        return LinkConditions(delay_s=NETWORK_DELAY_S)
    payload = PAYLOAD if experiment.links.enforce == "kernel" else 1.0
    link = experiment.link(node)
    return LinkConditions(
        up_rate=link.up.rate and link.up.rate * payload,
        down_rate=link.down.rate and link.down.rate * payload,
        delay_s=max(NETWORK_DELAY_S, link.up.delay_s),
    )


def _facts(speeds: MachineSpeeds, source: str) -> dict[str, Any]:
    return {"seconds": MEANING, "source": source, "speeds": asdict(speeds)}


def keep_speeds(
    file: Path, experiments: Iterable[Experiment], begin: Callable[[str], object]
) -> None:
    """Measure what these experiments need that the file lacks, and write it there. Raises
    InvalidExperiment.
    """
    known = _read(file) if file.exists() else {}
    for experiment in {
        _kind(each): each for each in experiments if _kind(each) not in known
    }.values():
        known[_kind(experiment)] = machine_speeds(experiment, of=None, begin=begin)
        with replacing(file) as written:
            written.write(json_text(known, indent=2).encode())


def _speeds_of(path: Path, experiment: Experiment) -> dict[str, Any]:
    """Return the facts of a run's folder, or of a file of `keep_speeds`. Raises
    InvalidExperiment.
    """
    other = Run(path) if path.is_dir() else None
    if other is None:
        known = _read(path)
    else:
        known = {_kind(other.experiment): dict(other.manifest.get(SIMULATED, {}))}
    if not (facts := known.get(_kind(experiment))):
        of = ", ".join(kind for kind, facts in known.items() if facts) or "no simulated run"
        remedy = "Name the folder of a simulated run with as long steps, or omit --speeds."
        raise InvalidExperiment(
            "--speeds", str(path), f"of {of}, not of {_kind(experiment)}", remedy
        )
    return facts if other is None else {**facts, "source": f"of run {other.id}"}


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidExperiment(
            "--speeds", str(file), f"unreadable: {error}", "Name a simulated run."
        ) from None
    if not (isinstance(found, dict) and all(isinstance(each, dict) for each in found.values())):
        raise InvalidExperiment(
            "--speeds", str(file), "has no speeds of machines", "Name a simulated run."
        )
    return found


def _kind(experiment: Experiment) -> str:
    """Return what the seconds of a training step depend on."""
    own = " with a step_s of each device" if _states_steps(experiment) else ""
    batches = f"batches of {experiment.training.batch_size}"
    return f"{experiment.model.name} on {experiment.data.dataset} in {batches}{own}"


def _states_steps(experiment: Experiment) -> bool:
    return all(experiment.machine(node).step_s for node in experiment.tree.devices)
