"""The objectives by name, each with its class, which is imported when it is needed, as a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from common.experiment.own import build
from common.experiment.tables import named_in_module
from common.experiment.training import OwnObjective, TrainingSettings
from common.learning.losses import loss_of
from device.training.objectives.objective import Objective

BUILT: Final[Mapping[str, str]] = {
    "fedprox": "device.training.objectives.fedprox:ProximalObjective",
    "fedsam": "device.training.objectives.fedsam:SharpnessAwareObjective",
    "scaffold": "device.training.objectives.scaffold:ControlledObjective",
    "feddyn": "device.training.objectives.feddyn:DynamicObjective",
    "moon": "device.training.objectives.moon:ContrastiveObjective",
    "fedgen": "device.training.objectives.fedgen:GeneratedObjective",
}


def objective_of(training: TrainingSettings) -> Objective:
    """Return the objective that an experiment selects. Raises InvalidExperiment."""
    settings = training.objective
    made = Objective()
    if isinstance(settings, OwnObjective):
        made = build("training.objective.name", settings, Objective)
    elif not training.plain:
        made = named_in_module(BUILT[settings.name])(settings)
    made.sample_loss = loss_of(training.loss)
    return made
