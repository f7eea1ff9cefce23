"""Client selection at one node: the table of selectors, and what it knows of earlier rounds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, Final

from common.aggregation.selection.fedcluster import fedcluster
from common.aggregation.selection.fraction import fraction
from common.aggregation.selection.oort import oort
from common.aggregation.selection.own_selector import OwnSelector
from common.aggregation.selection.power_of_choice import power_of_choice
from common.aggregation.selection.round_robin import round_robin
from common.aggregation.selection.situation import Choose, Participation, ResultFacts, Situation
from common.experiment.rounds import participants
from common.experiment.selection import (
    FedCluster,
    FractionSelection,
    Oort,
    OwnSelection,
    PowerOfChoice,
    RoundRobin,
    SelectionSettings,
)
from common.experiment.tiers import Tier

SELECTORS: Final[Mapping[type[SelectionSettings], Callable[[Any], Choose]]] = MappingProxyType(
    {
        FractionSelection: fraction,
        RoundRobin: round_robin,
        FedCluster: fedcluster,
        PowerOfChoice: power_of_choice,
        Oort: oort,
        OwnSelection: OwnSelector,
    }
)
NOTHING: Final[Mapping[str, int]] = MappingProxyType({})


class ClientSelection:
    """One node's client selection. Its state is the history of the children.

    `choose`: in place of the tier's selector, from a rule that selects the children itself, or as recorded.
    """

    def __init__(self, tier: Tier, *, seed: int, node: str, choose: Choose | None = None) -> None:
        self._tier = tier
        self._seed = seed
        self._node = node
        self._other = choose is not None
        self._choose = choose or SELECTORS[type(tier.selection)](tier.selection)
        self._history: dict[str, Participation] = {}
        self._in_flight: dict[str, int] = {}  # the round of each child's task that goes on

    @property
    def in_flight(self) -> list[str] | None:
        """The children whose tasks of earlier rounds go on, None if tasks end with their rounds."""
        return list(self._in_flight) if self._tier.aggregation.buffers else None

    def begin(self) -> None:
        """Begin rounds in which no child has a task of an earlier one."""
        self._in_flight = {}

    def select(self, children: Sequence[str], r: int, *, samples: Mapping[str, int] = NOTHING) -> list[str]:
        """Return K = max(1, floor(participation * children)) of the children, in their order, for the node's round r.

        A rule may select fewer. Where tasks go on, K children train at once, and so many are selected as those in
        flight leave. `samples`: of each child that has reported them. Raises InvalidExperiment if own code fails.
        """
        count = participants(len(children), self._tier.participation) - len(self._in_flight)
        children = [child for child in children if child not in self._in_flight]
        if count == len(children) and not self._other:
            return list(children)
        now = Situation(children, count, samples, self._history, self._seed, self._node, r)
        chosen = set(self._choose(now))
        return [child for child in children if child in chosen]

    def observe(
        self,
        r: int,
        selected: Sequence[str],
        results: Mapping[str, ResultFacts],
        *,
        unused: Collection[str] = (),
        refused: Collection[str] = (),
    ) -> None:
        """Take note of a closed round; one that is repeated counts once. Children without a result keep their last.

        `unused`: whose results the aggregation left out; `refused`: whose models were refused.
        """
        if self._tier.aggregation.buffers:
            self._in_flight |= dict.fromkeys(selected, r)
            ended = {name: since for name, since in self._in_flight.items() if name in results or name in refused}
            self._in_flight = {name: since for name, since in self._in_flight.items() if name not in ended}
            for name, since in ended.items():
                self._note(since, [name], results, unused)
        else:
            self._note(r, selected, results, unused)

    def _note(
        self, r: int, selected: Sequence[str], results: Mapping[str, ResultFacts], unused: Collection[str]
    ) -> None:
        for name in selected:
            past = self._history.get(name, Participation())
            is_new = r > past.last_round
            self._history[name] = replace(
                past,
                rounds=past.rounds + is_new,
                missed=past.missed + (is_new and name not in results),
                last_round=max(r, past.last_round),
                used_round=max(r, past.used_round) if name in results and name not in unused else past.used_round,
                result=results.get(name, past.result),
            )

    def follows(self, selected: Sequence[str], r: int) -> dict[str, int]:
        """Return for each of these children the number of its last round before r whose result was used, from 1.

        0 for those without one. A node that repeats rounds knows it only if its state was restored.
        """
        used = {name: self._history[name].used_round for name in selected if name in self._history}
        return {name: round_ + 1 if (round_ := used.get(name, -1)) < r else 0 for name in selected}

    def facts(self, selected: Sequence[str]) -> dict[str, object]:
        """Return what a round's plan records: who was selected, unless seed and round alone determine it."""
        is_recorded = self._other or self._tier.selection.remembers or self._tier.aggregation.buffers
        return {"taking_part": list(selected)} if is_recorded else {}

    def save(self) -> dict[str, Any]:
        """Return the state, in a form that JSON can hold."""
        found: dict[str, Any] = {"history": {name: asdict(past) for name, past in self._history.items()}}
        if isinstance(self._choose, OwnSelector):
            found["numbers"] = self._choose.numbers
        return found

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Restore what `save` returned; {}, before the first checkpoint, is no state."""
        self._history = {
            name: Participation(**{**past, "result": past["result"] and ResultFacts(*past["result"])})
            for name, past in facts.get("history", {}).items()
        }
        if isinstance(self._choose, OwnSelector):
            self._choose.selector.numbers = facts.get("numbers", {})
