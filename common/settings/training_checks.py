"""The keys of `[training]` that contradict each other, the trainer or the data."""

from __future__ import annotations

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.settings.data import NUMBERS, TEXTS, Data, is_csv
from fedstrata.common.settings.tables import Refused, SettingsTable, check_table
from fedstrata.common.settings.trainers import TRAINER_KEY
from fedstrata.common.settings.training import (
    CROSS_ENTROPY,
    OF_MODULES,
    OF_SGD,
    OptimizerTable,
    TrainingSettings,
)


def check_training(training: TrainingSettings, data: Data) -> None:
    """Check the keys against each other and against the data. Raises InvalidExperiment."""
    if training.trainer.learns_module:
        check_table("training", training, _refused(training, data))
    else:
        _check_foreign(training)


def _refused(training: TrainingSettings, data: Data) -> Refused:
    if training.by_round:
        yield "by_round", "it is for trainers of your own", "Omit it, or use training.schedule."
    if not training.by_sgd:
        yield from _refused_beside(training, training.optimizer)
    elif training.nesterov and not training.momentum:
        remedy = "Set training.momentum above 0, or omit it."
        yield "nesterov", "it is a form of momentum", remedy
    schedule = training.schedule
    needed = {"step": ("every", "factor"), "exponential": ("factor",), "inverse": ("halving",)}
    for name in needed.get(schedule.name, ()):
        if getattr(schedule, name) is None:
            key = f"schedule.{name}"
            yield key, f"schedule {schedule.name!r} needs it", f"Set training.{key}."
    augmentation = training.image_changes
    if augmentation.changes and (data.dataset in TEXTS or is_csv(data.dataset)):
        kind = "text" if data.dataset in TEXTS else "a table"
        key = "flip" if augmentation.flip else "crop"
        yield f"augmentation.{key}", f"{data.dataset} is {kind}", "Omit it."
    given = "objective" in training.model_fields_set
    if training.loss != CROSS_ENTROPY and training.plain and given:
        yield "objective.name", f"training.loss is {training.loss}", "Omit training.objective."
    if data.targets == NUMBERS and training.objective.name == "fedgen":
        problem = "it needs labels, and data.targets are numbers"
        yield "objective.name", problem, "Use another objective and rule."


def _refused_beside(training: TrainingSettings, optimizer: OptimizerTable) -> Refused:
    """Yield the keys that do not go with an optimiser that is not SGD."""
    for key in OF_SGD:
        if key in training.model_fields_set:
            remedy = "Omit it."
            if hasattr(optimizer, key):
                remedy = f"Set training.optimizer.{key}."
            yield key, f"{optimizer.name} does not read it", remedy
    if training.objective.name == "scaffold":
        problem = "scaffold estimates gradients from the steps of SGD"
        yield "optimizer.name", problem, "Use sgd, or another objective and rule."


def _check_foreign(training: TrainingSettings) -> None:
    """Check the keys of a trainer that is not fedstrata's. Raises InvalidExperiment."""
    for key in OF_MODULES:
        if key in training.model_fields_set:
            value = getattr(training, key)
            if isinstance(value, SettingsTable):
                value = value.model_dump()
            problem = f"{TRAINER_KEY} {training.trainer.whose} trains in its own way"
            raise InvalidExperiment(f"training.{key}", value, problem, "Omit it.")
    # what others decide, or need to know
    for key, instead in (("epochs", "epochs"), ("learning_rate", "schedule")):
        if key in training.by_round:
            at = f"training.by_round.{key}"
            remedy = f"Use training.{instead}."
            raise InvalidExperiment(at, training.by_round[key], "has keys of its own", remedy)
