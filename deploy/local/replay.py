"""A replay of a recorded run: its experiment in this process, with the decisions that depended on time."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import load_file

from cloud.results import HELD, RunFolder
from common.errors import InvalidExperiment
from common.experiment.reading import load
from common.runtime.round import Observe
from deploy.local.decisions import Decisions
from deploy.local.direct import run_in_process
from deploy.results.run import Run, State

MODEL: Final = "model.safetensors"


def replayed(run: Run, runs: Path, *, accelerator: str, observe: Observe) -> Path:
    """Replay a finished run as a new one below `runs`; return its folder. Raises FedstrataError, KeyboardInterrupt."""
    if run.state is not State.FINISHED:
        raise InvalidExperiment("RUN", str(run.path), f"it is {run.state}, not finished", "Resume it first.")
    experiment = load(run.path / HELD)
    for tier in experiment.tiers:
        if tier.privacy.secret:
            key, problem = f"{experiment.key(tier)}.privacy.noise", "the noise of this run is not recorded"
            raise InvalidExperiment(
                key, "system", problem, 'Use "seeded" in runs to be replayed, which are not private.'
            )
    homes = {experiment.tree.path(device) for device in experiment.tree.devices}
    if other := next((row.node for row in run.devices if row.node not in homes), None):
        problem = f"{other} has entered or moved, which a replay does not repeat"
        raise InvalidExperiment("RUN", str(run.path), problem, "Replay a run in which each device kept its parent.")
    decisions = Decisions(run, experiment)
    folder = RunFolder.create(runs, experiment, direct=True)
    with folder.removed_unless_begun():
        folder.note(replay_of=run.id)
        run_in_process(folder, resume=False, accelerator=accelerator, observe=observe, decisions=decisions)
    return folder.path


def largest_difference(one: Path, other: Path) -> float | None:
    """Return the largest difference of two runs' final models, None if they are the same bit for bit."""
    models, others = load_file(one / MODEL), load_file(other / MODEL)
    apart = [
        np.abs(values.astype(np.float64) - others[name])
        for name, values in models.items()
        if values.tobytes() != others[name].tobytes()
    ]
    return max(float(np.max(each)) for each in apart) if apart else None
