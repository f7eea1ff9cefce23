"""`run --simulate`: a run in virtual time."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.cli.chosen import kept_once_begun
from deploy.console import logs
from deploy.console.stages import stages

if TYPE_CHECKING:
    from common.experiment.schema import Experiment


def run_simulated(
    chosen: Experiment,
    *,
    runs: Path,
    resume: Path | None,
    json_lines: bool,
    accelerator: str,
    workers: int | None,
    speeds: Path | None,
) -> None:
    """Run, or resume, an experiment in virtual time. Raises FedstrataError, KeyboardInterrupt."""
    from cloud.results import SIMULATED, RunFolder
    from common.host.memory import keep_large_buffers
    from deploy.planning.predicting import load_line
    from deploy.planning.simulated_run import STAGES, machine_speeds, simulated_run
    from deploy.results.run import Run
    from deploy.simulation.run import check_simulated
    from deploy.watching.showing import show

    check_simulated(chosen)
    keep_large_buffers()
    logging.getLogger(logs.ACTIVITY).setLevel(logging.WARNING)  # the cloud's events are shown, not each node's
    if resume is None:
        with stages(STAGES) as begin:
            facts = machine_speeds(chosen, of=speeds, begin=begin)
        if facts.get("load", {}).get("busy"):
            logs.write_line(load_line(facts["load"], facts["speeds"]["share"]).strip(), level=logging.WARNING)
        folder = RunFolder.create(runs, chosen, simulated=facts)
    else:
        facts = Run(resume).manifest[SIMULATED]
        folder = RunFolder.reopen(resume, simulated=True)
    run = simulated_run(folder, facts, accelerator=accelerator, workers=workers)
    command = ["fedstrata", "run", "--simulate", *(["--accelerator", accelerator] if accelerator != "cpu" else [])]
    with kept_once_begun(folder, command), show(chosen, json_lines=json_lines, clock=run.now) as observe:
        run.run(observe)
