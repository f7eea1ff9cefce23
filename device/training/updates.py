"""What an objective makes of a training: the vectors that a device keeps, and those for its parent."""

from __future__ import annotations

from common.experiment.schema import Experiment
from common.model.layout import ModelLayout, Row
from device.training.objectives.objective import LocalUpdate
from device.training.objectives.table import objective_of
from device.vectors import TaskVectors


def vectors_of(experiment: Experiment, node: str, layout: ModelLayout) -> TaskVectors:
    """Return the vectors of a device's tasks. Raises InvalidExperiment."""
    rule, objective = experiment.tier_above(node).aggregation, objective_of(experiment.training)
    return TaskVectors(layout, tuple(rule.sends), tuple(rule.returns), tuple(objective.keeps))


def finish(experiment: Experiment, vectors: TaskVectors, row: Row, out: Row, *, steps: int, local_round: int) -> None:
    """Write the vectors behind a trained model, which the objective makes of those that training began with."""
    if vectors.returned or vectors.kept:
        columns = slice(0, vectors.layout.parameters)
        received_D, trained_D = (vectors.layout.floats(each)[columns] for each in (row, out))
        rate, momentum = experiment.learning_rate_in(local_round), experiment.training.momentum
        update = LocalUpdate(received_D, trained_D, vectors.read(row), steps, rate, momentum)
        vectors.write(out, objective_of(experiment.training).finish(update))
