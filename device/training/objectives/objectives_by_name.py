"""The objectives by name, each with its class, which is imported when it is needed, as a user's
own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Never

from torch import Tensor

from fedstrata.common.learning.losses import loss_of
from fedstrata.common.settings import own
from fedstrata.common.settings.tables import named_in_module
from fedstrata.common.settings.training import OwnObjective, TrainingSettings
from fedstrata.device.training.objectives.objective import Minibatch, Objective

OBJECTIVE_KEY: Final = "training.objective.name"
BUILT: Final[Mapping[str, str]] = {
    "fedprox": "fedstrata.device.training.objectives.fedprox:ProximalObjective",
    "fedsam": "fedstrata.device.training.objectives.fedsam:SharpnessAwareObjective",
    "scaffold": "fedstrata.device.training.objectives.scaffold:ControlledObjective",
    "feddyn": "fedstrata.device.training.objectives.feddyn:DynamicObjective",
    "moon": "fedstrata.device.training.objectives.moon:ContrastiveObjective",
    "fedgen": "fedstrata.device.training.objectives.fedgen:GeneratedObjective",
}


def objective_of(training: TrainingSettings) -> Objective:
    """Return the objective that an experiment selects. Raises InvalidExperiment."""
    settings = training.objective
    made = Objective()
    if isinstance(settings, OwnObjective):
        made = own.build(OBJECTIVE_KEY, settings, Objective)
    elif not training.plain:
        made = named_in_module(BUILT[settings.name])(settings)
    with own.guarded({OBJECTIVE_KEY: settings.name}):
        made.sample_loss = loss_of(training.loss)
        if isinstance(settings, OwnObjective):
            _check_results(settings.name, made)
    return made


def _check_results(name: str, objective: Objective) -> None:
    """Let a user's objective raise InvalidExperiment for a loss that is none."""
    losses_of = objective.losses
    backward_of = objective.backward

    def losses(batch: Minibatch, logits: Tensor) -> Tensor:
        found = losses_of(batch, logits)
        if not isinstance(found, Tensor):
            _refuse_type(name, losses_of, found)
        if found.dim():
            problem = (
                f"losses returns a tensor of {list(found.shape)}, not of []{own.place(losses_of)}"
            )
            own.refuse(
                OBJECTIVE_KEY,
                name,
                problem,
                "Return the mean over the samples: `batch.mean(each)`.",
            )
        if logits.requires_grad and not found.requires_grad:
            problem = (
                f"losses returns a loss that does not depend on the model{own.place(losses_of)}"
            )
            own.refuse(OBJECTIVE_KEY, name, problem, "Compute it with torch, from the logits.")
        return found

    def backward(batch: Minibatch) -> Tensor:
        found = backward_of(batch)
        if not isinstance(found, Tensor):
            _refuse_type(name, backward_of, found)
        return found

    objective.losses = losses  # type: ignore[method-assign]
    objective.backward = backward  # type: ignore[method-assign]


def _refuse_type(name: str, method: Callable[..., object], found: object) -> Never:
    problem = f"{method.__name__} returns {type(found).__name__}, not a tensor{own.place(method)}"
    own.refuse(OBJECTIVE_KEY, name, problem, "Return the mean loss as torch computes it.")
