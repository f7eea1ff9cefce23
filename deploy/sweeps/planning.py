"""The plan of a sweep: hours, bytes and memory of all its runs. Runs of equal cost are predicted
once.

Runs have equal costs if they differ in the seed, in the number of global rounds, or in how data are
distributed. A few global rounds of each kind are simulated, and multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from fedstrata.common.experiment.schema import Experiment
from fedstrata.deploy.console.tabular import Column, Table
from fedstrata.deploy.planning.workload import OF_THE_SPLIT, sizes_of
from fedstrata.deploy.sweeps.grid import Grid

WITHOUT_COST: Final = ("seed", "name", "rounds", "stop")
# global rounds to simulate, if not given: the first one waits for no writes and no evaluation
ROUNDS: Final = 2
Predict: TypeAlias = Callable[[Experiment], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PlannedRuns:
    """Runs of equal cost: the label of the first, their global rounds, and seconds and bytes of one
    global round.
    """

    label: str
    rounds: Sequence[int]
    global_round_s: float
    tiers: Mapping[str, float]
    memory: Mapping[str, int]
    assumed: Sequence[str]

    @property
    def seconds(self) -> float:
        """The seconds of all runs, one after another."""
        return sum(self.rounds) * self.global_round_s


def groups_of(grid: Grid) -> list[list[tuple[str, Experiment]]]:
    """Return the runs of a sweep with their labels, grouped by costs."""
    groups: dict[str, list[tuple[str, Experiment]]] = {}
    labels = grid.labels()
    for digest, experiment in grid.experiments.items():
        groups.setdefault(_cost(experiment), []).append((labels[digest], experiment))
    return list(groups.values())


def plan_of(
    groups: Sequence[Sequence[tuple[str, Experiment]]],
    predict: Predict,
    begin: Callable[[str], object] = lambda stage: None,
) -> list[PlannedRuns]:
    """Return the plan of each group of runs. `predict` gives the content of prediction.json, of the
    first of a group.

    `begin` is called with what begins, once for each group.
    """
    planned = []
    for runs in groups:
        label, first = runs[0]
        begin(f"predicts {len(runs)} runs like {label}")
        found = predict(first)
        rounds = [experiment.rounds for _, experiment in runs]
        parts = (found[key] for key in ("global_round_s", "tiers", "memory", "assumed"))
        planned.append(PlannedRuns(label, rounds, *parts))
    return planned


def to_json(grid: Grid, planned: Sequence[PlannedRuns]) -> dict[str, Any]:
    """Return the plan: sums over all runs, the memory of the largest run by process, and the
    groups.
    """
    bytes_: dict[str, float] = {}
    memory: dict[str, int] = {}
    groups = []
    for group in planned:
        rounds = sum(group.rounds)
        for tier, count in group.tiers.items():
            bytes_[tier] = bytes_.get(tier, 0.0) + rounds * count
        for role, held in group.memory.items():
            memory[role] = max(memory.get(role, 0), held)
        facts = {"first": group.label, "runs": len(group.rounds), "global_rounds": rounds}
        groups.append(facts | {"global_round_s": group.global_round_s, "seconds": group.seconds})
    return {
        "title": grid.file.title,
        "runs": len(grid.experiments),
        "total_s": sum(group.seconds for group in planned),
        "bytes": bytes_,
        "memory": memory,
        "groups": groups,
        "assumed": list(dict.fromkeys(text for group in planned for text in group.assumed)),
    }


def text_of(plan: Mapping[str, Any]) -> str:
    """Return the plan as text."""
    heads = {
        "first": Column("runs like", text=True),
        "runs": Column("runs"),
        "global_rounds": Column("global rounds"),
        "global_round_s": Column("global round", "s", 3),
        "hours": Column("time", "h", 2),
    }
    groups = [{**each, "hours": each["seconds"] / 3600} for each in plan["groups"]]
    table = Table.of_keys("plan", plan["title"], heads, groups).on_terminal()
    lines = [f"{plan['runs']} runs   {plan['total_s'] / 3600:.2f} h", "bytes of all runs"]
    lines += sizes_of(plan["bytes"])
    lines.append("memory of a process, the largest run")
    lines += sizes_of(plan["memory"])
    lines += [f"assumed: {text}" for text in plan["assumed"]]
    return table + "\n".join(lines) + "\n"


def _cost(experiment: Experiment) -> str:
    tree = experiment.model_dump(mode="json", exclude=set(WITHOUT_COST))
    for key in OF_THE_SPLIT:
        tree["data"].pop(key, None)
    return str(tree)
