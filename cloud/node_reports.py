"""What the nodes below the cloud report with their results: decisions, numbers, notes, work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, starmap
from typing import Any, Final

from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.protocol.limits import plans_of
from fedstrata.common.protocol.messages import Result
from fedstrata.common.runtime.round import NOTES, NUMBERS, UNSCORED, ClosedRound, Observe
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.text import TEXT_MOST, TextLimit, escaped_within, short

SPREAD_MOST: Final = 0.37  # measured on digits; up to 0.15 was healthy

NOTE: Final = TextLimit(TEXT_MOST, cut=True)
NOTES_MOST: Final = 32  # of a run


class NodeReports:
    """The reports in one run. `notes`: those that are reported already."""

    def __init__(self, folder: RunFolder, notes: Iterable[str], *, observe: Observe) -> None:
        self._folder = folder
        self._observe = observe
        self._noted = set(notes)
        # of each child: the devices, and the aggregating nodes, at and below it
        self._devices: dict[str, list[str]] = {}
        self._aggregators: dict[str, set[str]] = {}
        tree = folder.experiment.tree
        for child, names in tree.below_each(CLOUD).items():
            here = (child, *names)
            self._devices[child] = [name for name in here if name not in tree.children]
            self._aggregators[child] = tree.children.keys() & here

    def unscored(self, closed_round: ClosedRound) -> dict[str, str]:
        """Return the nodes whose scores a parent has left out in a round, each with the reason."""
        found = dict(closed_round.unscored)
        for plan in chain(*self.plans_below(closed_round.results).values()):
            named = plan.get(UNSCORED)
            if isinstance(named, dict):
                found |= {short(str(name)): short(str(reason)) for name, reason in named.items()}
        return found

    def plans_below(self, results: Mapping[str, Result]) -> dict[str, list[dict[str, Any]]]:
        """Return the decisions of the aggregating nodes below the cloud."""
        plans: dict[str, list[dict[str, Any]]] = {}
        for child, result in results.items():
            plans |= self.of_aggregators(child, plans_of(result))
        return plans

    def of_aggregators(
        self, child: str, plans: Mapping[str, list[dict[str, Any]]]
    ) -> dict[str, list[dict[str, Any]]]:
        """Return the decisions of the aggregating nodes at and below a child, of those in its
        report.
        """
        nodes = self._aggregators.get(child, ())
        return {node: found for node, found in plans.items() if node in nodes}

    def add_numbers(
        self, global_round: int, node: str, results: Sequence[Mapping[str, Any]]
    ) -> None:
        """Record what the trainer of a device reports with each of its results, and report its
        notes.
        """
        for i, each in enumerate(results):
            if numbers := each.get(NUMBERS):
                facts = {"global_round": global_round, "node": node, "result": i}
                self._folder.event("trained", {**facts, NUMBERS: numbers})
            notes = each.get(NOTES)
            if isinstance(notes, list):
                for note in notes:
                    self._note(node, note)

    def _note(self, node: str, note: object) -> None:
        """Report what the trainer of a device noted, once a run, of the first device that did."""
        if not isinstance(note, str):
            return
        text = escaped_within(note, NOTE)
        if text and text not in self._noted and len(self._noted) < NOTES_MOST:
            self._noted.add(text)
            self._observe("warning", {"node": node, "reason": f"{node}: {text}"})

    def add_plans(
        self, global_round: int, plans: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> dict[str, float]:
        """Record each node's aggregation decisions; return the last spread of each multi-model
        node.
        """
        spreads = {}
        for name, found in plans.items():
            facts = {"global_round": global_round, "node": name}
            for i, plan in enumerate(found):
                self._folder.event("plan", {**facts, "local_round": i, **plan})
                if "spread" in plan:
                    spreads[name] = float(plan["spread"])
        for name, spread in spreads.items():
            if spread > SPREAD_MOST:
                size = f"{name}'s models differ by {spread:.2f} of their size"
                reason = f"{size}: if they stay beyond {SPREAD_MOST}, they have collapsed"
                facts = {"global_round": global_round, "node": name}
                self._observe("warning", {**facts, "reason": reason})
        return spreads

    def of_devices(self, results: Mapping[str, Result]) -> list[ChildReport]:
        """Return the reports on all devices below the cloud."""
        return [*chain.from_iterable(starmap(self.of_child, results.items()))]

    def of_child(self, child: str, result: Result) -> list[ChildReport]:
        """Return the reports on the devices at and below a child, in their order."""
        parent = "" if child in self._devices else CLOUD
        own = replace(result.work_of(child), parent=parent)
        found = {report.link: report for report in (own, *result.children)}
        entered = [report for report in found.values() if report.parent]
        named = [found[name] for name in self._devices.get(child, ()) if name in found]
        return named + entered
