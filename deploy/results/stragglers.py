"""A note before a run: the device for which rounds will wait, by the steps that an earlier run of
the same work measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Final

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.schema import Experiment
from fedstrata.deploy.results.run import Run, folders

LOOKED_AT: Final = 5  # runs, the last ones: each is parsed before the lab starts
DEVICES_LEAST: Final = 3  # whose steps were measured
SLOWER: Final = 3.0  # than the median of the others
LEAST_S: Final = 1.0  # of a local round


def straggler_note(experiment: Experiment, root: Path) -> str:
    """Return the note about the slowest device, "" if none is much slower or nothing was measured.

    Only runs in this lab's real time count, and only devices of this experiment.
    """
    if experiment.tiers[-1].closing.rule == "quorum":
        return ""  # it waits for nobody
    for folder in reversed(_last(root)):
        try:
            run = Run(folder)
            if run.direct or run.simulated or _work(run.experiment) != _work(experiment):
                continue
            return _note(_epoch_s(run, experiment), experiment, run)
        except InvalidExperiment:  # a damaged run, or one of another format
            continue
    return ""


def _last(root: Path) -> list[Path]:
    try:
        return folders(root)[-LOOKED_AT:]
    except InvalidExperiment:  # no run yet
        return []


def _work(experiment: Experiment) -> tuple[object, ...]:
    """Return what the seconds of an epoch depend on, beside the device."""
    training = experiment.training
    chosen = experiment.data.model_dump(exclude={"root"})
    kinds = (training.trainer, training.objective, training.optimizer, training.precision)
    return experiment.model.name, chosen, training.batch_size, *kinds


def _epoch_s(run: Run, experiment: Experiment) -> Mapping[str, tuple[float, float]]:
    """Return the seconds of an epoch and of a step of each device, medians over its rows."""
    epochs = defaultdict[str, list[float]](list)
    steps = defaultdict[str, list[float]](list)
    known = set(experiment.tree.devices)
    for row in run.devices:
        if row.device in known and row.epochs and row.sgd_steps:
            # a device that emulates slower hardware is as slow as that
            seconds = row.train_s + row.pause_s
            epochs[row.device].append(seconds / row.epochs)
            steps[row.device].append(seconds / row.sgd_steps)
    return {name: (median(epochs[name]), median(steps[name])) for name in epochs}


def _note(found: Mapping[str, tuple[float, float]], experiment: Experiment, run: Run) -> str:
    if len(found) < DEVICES_LEAST:
        return ""
    slowest = max(found, key=lambda name: found[name])
    epochs = experiment.training.epochs
    own_s = epochs * found[slowest][0]
    usual_s = epochs * median(each for name, (each, _) in found.items() if name != slowest)
    if own_s < max(SLOWER * usual_s, LEAST_S):
        return ""
    step_ms = 1000 * found[slowest][1]
    return (
        f"{slowest} will be the straggler: {own_s:.3g} s a local round by its {step_ms:.3g} ms a "
        f"step, the others {usual_s:.2g} s (measured in run {run.id}). Give it fewer samples, or "
        'close rounds by closing.rule = "quorum".'
    )
