"""What one child, or its parent, may send at most, as far as the experiment decides it.

Both know the experiment, so a message beyond these limits is no mistake of a link. The limit of a parent is at least
the sum of those below it: what passes at one node must not be refused at the next one, with the work of its siblings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from common.errors import RefusedModel
from common.experiment.data import samples_most
from common.experiment.devices import OnlineTimes
from common.experiment.schema import Experiment
from common.protocol.messages import Task

COUNT_MOST: Final = 10**12
EPOCHS_GROW: Final = 2  # times `training.epochs`, of Tempo
PLATO_GROW: Final = 2  # times the number of children, of Tempo's public code
SECONDS_MOST: Final = 1e9  # of one local round


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Limits of one child's presence and results.

    `samples`: of its training data; `rounds`: local rounds of a device below it for each of its tasks; `below`: the
    most samples of each node below it, and `aggregators` the names of those of them, and itself, that have children.
    `online`: when a device is there by its trace; at other times nothing is expected of it.
    """

    samples: int = COUNT_MOST
    rounds: int = 1
    below: Mapping[str, int] = field(default_factory=dict)
    aggregators: Collection[str] = ()
    online: OnlineTimes | None = None

    def steps(self, epochs: int) -> int:
        """Return the most SGD steps of a task: batches have at least one sample."""
        return min(COUNT_MOST, self.rounds * epochs * self.samples)


ANY: Final = ChildLimits()  # of a node below which there is nobody, with any data


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """Limits of a parent's tasks: global rounds, local rounds in each, and epochs.

    `below_parent`, `below_node`: the numbers of nodes below the parent, and below the node that gets the tasks.
    """

    global_rounds: int
    local_rounds: int
    epochs: int
    below_parent: int = 0
    below_node: int = 0

    def check(self, task: Task) -> None:
        """Check a task's numbers. Raises RefusedModel."""
        key = task.key
        if key.global_round >= self.global_rounds or key.local_round >= self.local_rounds:
            least = f"{self.global_rounds} global rounds of {self.local_rounds}"
            raise RefusedModel(f"round {key.global_round}.{key.local_round}, this run has {least}")
        number = key.global_round * self.local_rounds + key.local_round
        if task.follows > number:
            raise RefusedModel(f"follows task {task.follows}, only {number} can precede it")
        if not 1 <= task.epochs <= self.epochs:
            raise RefusedModel(f"{task.epochs} epochs, this run has 1 to {self.epochs}")


def limits_below(experiment: Experiment, parent: str) -> dict[str, ChildLimits]:
    """Return the limits of each child of a node."""
    tree, each = experiment.tree, samples_most(experiment.data, devices=len(experiment.tree.devices))
    rounds = experiment.device_rounds // experiment.rounds_of(tree.depth(parent))
    found = {}
    for child, names in tree.below_each(parent).items():
        everybody = (child, *names)
        devices = {name: sum(below not in tree.children for below in (name, *tree.below(name))) for name in everybody}
        found[child] = ChildLimits(
            samples=each * devices[child],
            rounds=rounds,
            below={name: each * devices[name] for name in names},
            aggregators=frozenset(name for name in everybody if name in tree.children),
            online=experiment.online(child),
        )
    return found


def task_limits(experiment: Experiment, node: str) -> TaskLimits:
    """Return the limits of a node's tasks."""
    tree = experiment.tree
    epochs = experiment.training.epochs
    if experiment.cloud.epoch_control.name == "tempo":
        epochs *= EPOCHS_GROW
        epochs = max(epochs, PLATO_GROW * len(tree.children[tree.layers[0][0]]))
    return TaskLimits(
        experiment.rounds,
        experiment.rounds_of(tree.depth(node) - 1),
        epochs,
        below_parent=tree.count_below(tree.parent(node)),
        below_node=tree.count_below(node),
    )
