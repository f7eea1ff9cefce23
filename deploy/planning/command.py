"""The command `fedstrata plan`: predict a run's costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from deploy.console.options import Overrides
from deploy.console.reporting import reporting
from deploy.console.shipped import ExperimentFile
from deploy.console.tabular import size

if TYPE_CHECKING:
    from common.experiment.schema import Experiment

INTERFACE_MBIT = 1000.0


def plan(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    one_host: Annotated[
        bool, typer.Option("--one-host", help="Predict a lab on this machine, as started by `fedstrata run`.")
    ] = False,
    interface: Annotated[
        float, typer.Option(min=0.001, help="Rate of each host's network interface, Mbit/s.")
    ] = INTERFACE_MBIT,
    out: Annotated[
        Path | None, typer.Option(help="Also write the prediction to this file, as JSON.", show_default=False)
    ] = None,
    output: Annotated[
        Literal["table", "json"], typer.Option("--format", help="Standard output: table or JSON.")
    ] = "table",
) -> None:
    """Predict seconds, bytes and memory of a run from its experiment and from this machine's measured speed.

    Without --one-host each node is assumed to have its own machine, as fast as this one.
    """
    from common.errors import InvalidExperiment
    from common.experiment.reading import load

    with reporting():
        found = predict(load(experiment, overrides or ()), one_host=one_host, interface_mbit=interface)
        if out is not None:
            try:
                out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
            except OSError as error:
                raise InvalidExperiment("--out", str(out), error.strerror or str(error), "Name another file.") from None
        typer.echo(json.dumps(found) if output == "json" else _table(found), nl=output == "json")


def predict(experiment: Experiment, *, one_host: bool, interface_mbit: float = INTERFACE_MBIT) -> dict[str, Any]:
    """Return the content of prediction.json. Raises InvalidExperiment.

    For one global round: `seconds` by phase, `bytes` of MQTT by link (`FROM TO`), and `tiers`, MQTT bytes by tier.
    Also `memory`, bytes by role; `assumed`, the assumptions as text; and `speeds`, the measured speeds of this machine.
    """
    import os
    from dataclasses import asdict

    from deploy.local.beforehand import check_code
    from deploy.planning import footprint, prediction, workload
    from deploy.planning.calibration import measure

    check_code(experiment)
    work = workload.workload(experiment)
    cores = len(os.sched_getaffinity(0))
    speeds = measure(work.single, cores=cores, together=one_host, row_bytes=work.sizes.row)
    workload.rehearse(work, speeds)
    lab = workload.lab(work, speeds, one_host=one_host, interface_mbit=interface_mbit)
    seconds = prediction.seconds(lab, speeds)
    global_round_s = sum(seconds.values())
    devices = max(experiment.sizes()[-1]) if one_host else 1
    return {
        "experiment": experiment.name,
        "experiment_digest": experiment.digest,
        "one_host": one_host,
        "global_rounds": experiment.rounds,
        "global_round_s": global_round_s,
        "total_s": global_round_s * experiment.rounds,
        "seconds": seconds,
        "bytes": footprint.links_of(experiment, work.sizes) if work.listed else {},
        "tiers": footprint.tiers_of(lab),
        "memory": footprint.memory_of(lab, experiment, data_bytes=work.data_bytes, devices=devices),
        "epochs": dict(work.epochs),
        "assumed": [*work.assumed, *([] if one_host else [f"each host has a {interface_mbit:g} Mbit/s interface"])],
        "speeds": asdict(speeds),
    }


def _table(found: dict[str, Any]) -> str:
    lines = [f"a global round   {_duration(found['global_round_s'])}"]
    lines += [f"  {phase:<14} {_duration(length)}" for phase, length in found["seconds"].items()]
    lines.append(f"{found['global_rounds']} global rounds".ljust(15) + _duration(found["total_s"]))
    lines.append("bytes of a global round")
    lines += [f"  {tier.replace('_', ' '):<14} {size(count)}" for tier, count in found["tiers"].items()]
    lines.append("memory of a process")
    lines += [f"  {role.replace('_', ' '):<14} {size(count)}" for role, count in found["memory"].items()]
    lines += [f"assumed: {text}" for text in found["assumed"]]
    return "\n".join(lines) + "\n"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
