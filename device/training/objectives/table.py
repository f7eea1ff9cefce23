"""The objectives by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from common.experiment.training import TrainingSettings
from device.training.objectives.fedprox import ProximalObjective
from device.training.objectives.fedsam import SharpnessAwareObjective
from device.training.objectives.objective import Objective

_BUILT: Final[Mapping[str, Callable[[Any], Objective]]] = MappingProxyType(
    {
        "cross_entropy": Objective,
        "fedprox": ProximalObjective,
        "fedsam": SharpnessAwareObjective,
    }
)


def objective_of(training: TrainingSettings) -> Objective:
    """Return the objective that an experiment selects."""
    return _BUILT[training.objective.name](training.objective)
