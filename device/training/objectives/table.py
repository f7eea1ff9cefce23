"""The objectives by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from common.experiment.own import build
from common.experiment.training import OwnObjective, TrainingSettings
from common.learning.losses import loss_of
from device.training.objectives.feddyn import DynamicObjective
from device.training.objectives.fedgen import GeneratedObjective
from device.training.objectives.fedprox import ProximalObjective
from device.training.objectives.fedsam import SharpnessAwareObjective
from device.training.objectives.moon import ContrastiveObjective
from device.training.objectives.objective import Objective
from device.training.objectives.scaffold import ControlledObjective

_BUILT: Final[Mapping[str, Callable[[Any], Objective]]] = MappingProxyType(
    {
        "cross_entropy": lambda _: Objective(),
        "fedprox": ProximalObjective,
        "fedsam": SharpnessAwareObjective,
        "scaffold": ControlledObjective,
        "feddyn": DynamicObjective,
        "moon": ContrastiveObjective,
        "fedgen": GeneratedObjective,
    }
)


def objective_of(training: TrainingSettings) -> Objective:
    """Return the objective that an experiment selects. Raises InvalidExperiment."""
    settings = training.objective
    if isinstance(settings, OwnObjective):
        made = build("training.objective.name", settings, Objective)
    else:
        made = _BUILT[settings.name](settings)
    made.sample_loss = loss_of(training.loss)
    return made
