"""A replay of a recorded run: its experiment in this process, with the decisions that depended on
time.

Of each round they are in its plan (`events.jsonl`): who took part, if the selector reads earlier
rounds, and whose result was not used. If a resumed run has repeated a round, its last plan counts.
So the replay is the run, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import load_file

from fedstrata.cloud.run_folder import HELD, RunFolder
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import read, recorded
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.methods.selection import TAKING_PART, Choose, Situation
from fedstrata.common.runtime.round import Observe
from fedstrata.deploy.local.calls import RoundDecisions
from fedstrata.deploy.local.direct import run_in_process
from fedstrata.deploy.results.run import Run, State

MODEL: Final = "model.safetensors"


class Decisions:
    """The decisions of one run."""

    def __init__(self, run: Run, experiment: Experiment) -> None:
        self._run = run
        self._experiment = experiment
        self._rounds: dict[tuple[str, int], RoundDecisions] = {}
        for event in run.events:
            if event.name in ("plan", "scoring") and "node_round" in event.facts:
                without, unreported, absent = (
                    frozenset(event.facts.get(name, ()))
                    for name in ("without", "unreported", "absent")
                )
                used = frozenset(event.facts["used"]) if "used" in event.facts else None
                found = RoundDecisions(
                    event.facts.get(TAKING_PART), without, unreported, used, absent
                )
                self._rounds[event.facts["node"], event.facts["node_round"]] = found

    def of_round(self, node: str, global_round: int, local_round: int) -> RoundDecisions:
        """Return the decisions of a node's local round in a global round, both from 0. Raises
        InvalidExperiment.
        """
        rounds = self._experiment.rounds_of(self._experiment.tree.depth(node))
        return self._of(node, global_round * rounds + local_round)

    def choose(self, node: str) -> Choose | None:
        """Return the recorded client selection of a node; None if seed and round determine it."""
        tier = self._experiment.tier_below(node)
        if not (tier.selection.remembers or tier.aggregation.buffers):
            return None

        def choose(now: Situation) -> Sequence[str]:
            return self._of(node, now.r).taking_part or now.children

        return choose

    def _of(self, node: str, r: int) -> RoundDecisions:
        if (found := self._rounds.get((node, r))) is None:
            problem = f"it has no plan of {node}'s round {r}, counted from 0"
            remedy = "Runs whose events.jsonl was cut cannot be replayed."
            raise InvalidExperiment("RUN", str(self._run.path), problem, remedy)
        return found


def replayed(run: Run, runs: Path, *, accelerator: str, observe: Observe) -> Path:
    """Replay a finished run as a new one below `runs`; return its folder. Raises FedstrataError,
    KeyboardInterrupt.
    """
    if run.state is not State.FINISHED:
        raise InvalidExperiment(
            "RUN", str(run.path), f"it is {run.state}, not finished", "Resume it first."
        )
    if not run.path.is_dir():
        problem = "a kept run has no record of its decisions"
        raise InvalidExperiment("RUN", str(run.path), problem, "Name a run's folder.")
    experiment = recorded(read(run.path / HELD))
    for tier in experiment.tiers:
        if tier.privacy.secret:
            key = f"{experiment.key(tier)}.privacy.noise"
            problem = "the noise of this run is not recorded"
            raise InvalidExperiment(
                key,
                "system",
                problem,
                'Use "seeded" in runs to be replayed, which are not private.',
            )
    homes = {experiment.tree.path(device) for device in experiment.tree.devices}
    if other := next((row.node for row in run.devices if row.node not in homes), None):
        problem = f"{other} has entered or moved, which a replay does not repeat"
        raise InvalidExperiment(
            "RUN", str(run.path), problem, "Replay a run in which each device kept its parent."
        )
    decisions = Decisions(run, experiment)
    folder = RunFolder.create(runs, experiment, direct=True)
    with folder.removed_unless_begun():
        folder.note(replay_of=run.id)
        run_in_process(
            folder, resume=False, accelerator=accelerator, observe=observe, decisions=decisions
        )
    return folder.path


def largest_difference(one: Path, other: Path) -> float | None:
    """Return the largest difference of two runs' final models, None if they are the same bit for
    bit.
    """
    models = load_file(one / MODEL)
    others = load_file(other / MODEL)
    apart = [
        np.abs(values.astype(np.float64) - others[name])
        for name, values in models.items()
        if values.tobytes() != others[name].tobytes()
    ]
    if apart:
        return max(float(np.max(each)) for each in apart)
    return None
