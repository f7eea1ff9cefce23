"""The decisions of a recorded run that depended on time, so that it can be replayed bit for bit.

Of each round they are in its plan (`events.jsonl`): who took part, if the selector reads earlier rounds, and whose
result was not used. If a resumed run has repeated a round, its last plan counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from common.errors import InvalidExperiment
from common.experiment.schema import Experiment
from common.methods.selection import TAKING_PART, Choose, Situation
from deploy.results.run import Run


@dataclass(frozen=True, slots=True)
class RoundDecisions:
    """One round: who took part, None if seed and round determine it; who was not used, or not known yet.

    `used`: whose results were used where tasks go on, else None. `absent`: those that could not take part.
    """

    taking_part: Sequence[str] | None = None
    without: frozenset[str] = frozenset()
    unreported: frozenset[str] = frozenset()
    used: frozenset[str] | None = None
    absent: frozenset[str] = frozenset()

    def uses(self, name: str) -> bool:
        """Return whether a child's result may be used in this round."""
        return name not in self.without and (self.used is None or name in self.used)


ALL_USED: Final = RoundDecisions()


class Decisions:
    """The decisions of one run."""

    def __init__(self, run: Run, experiment: Experiment) -> None:
        self._run = run
        self._experiment = experiment
        self._rounds: dict[tuple[str, int], RoundDecisions] = {}
        for event in run.events:
            if event.name in ("plan", "scoring") and "node_round" in event.facts:
                without, unreported, absent = (
                    frozenset(event.facts.get(name, ())) for name in ("without", "unreported", "absent")
                )
                used = frozenset(event.facts["used"]) if "used" in event.facts else None
                found = RoundDecisions(event.facts.get(TAKING_PART), without, unreported, used, absent)
                self._rounds[event.facts["node"], event.facts["node_round"]] = found

    def of_round(self, node: str, global_round: int, local_round: int) -> RoundDecisions:
        """Return the decisions of a node's local round in a global round, both from 0. Raises InvalidExperiment."""
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
