"""The events of a run's cloud, applied to a watched lab: accuracies, refusals, missing nodes, and the byte ledger."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from common.protocol.messages import Key, NodeState, Phase
from common.protocol.round_state import ChildState
from deploy.console.tabular import size
from deploy.watching.lab import WatchedLab
from deploy.watching.meter import RateMeter
from deploy.watching.node import STEP_OF, Node, NodeStep

STEPS: Final[Mapping[str, NodeStep]] = {
    ChildState.ASSIGNED.value: NodeStep.ASSIGNED,
    ChildState.ANNOUNCED.value: NodeStep.OFFERING,
    ChildState.ACCEPTED.value: NodeStep.DONE,
    ChildState.REFUSED.value: NodeStep.REFUSED,
}
WAITS: Final = "waits for "


class CloudFeed:
    """The cloud's events of one run. Where the lab receives no messages (`deep`), they also move the cloud's children.

    `run`, `row` and `finished`: the facts of the last event of that kind.
    """

    def __init__(self, lab: WatchedLab) -> None:
        self.run: Mapping[str, Any] = {}
        self.row: Mapping[str, Any] = {}
        self.finished: Mapping[str, Any] = {}
        self._lab = lab

    def take(self, event: str, facts: Mapping[str, Any], now: float) -> None:
        """Apply an event."""
        lab = self._lab
        match event:
            case "run":
                self.run, lab.run, lab.folder, lab.closed = facts, facts["run"], facts["folder"], facts["done"]
            case "global_round":
                self.row, lab.closed = facts, facts["global_round"]
                if not lab.deep:
                    lab.begin_round(now)
            case "evaluated":
                lab.evaluations.append((number(facts["score"]), number(facts["loss"])))
            case "waiting":
                self._prepare(facts["nodes"])
            case "child" if not lab.deep:
                _set_state(lab.cloud.children[facts["node"]], facts["state"], facts.get("reason", ""))
            case "progress":
                self._count(facts, now)
                if not lab.deep:
                    self._move(facts["states"], now)
            case "finished":
                self.finished = facts
                self._count(facts, now)

    def note(self, event: str, facts: Mapping[str, Any]) -> str | None:
        """Return what the live view keeps of an event below the tree, or None."""
        if event == "run" and facts.get("simulated"):
            return "times and rates are simulated"
        lost = event == "child" and facts["state"] in ("lost", "failed") and not self._lab.deep
        return self.line(event, facts) if lost or event in ("refused", "warning") else None

    def line(self, event: str, facts: Mapping[str, Any]) -> str | None:
        """Return the log line for an event, or None if the event is not logged."""
        match event:
            case "run":
                lab = ", ".join(f"{count} {kind}" for kind, count in facts["nodes"].items())
                model = f"{facts['model']} ({size(facts['model_bytes'])})"
                where = f"in {facts['folder']}" + "".join(f", broker {b.address}" for b in self._lab.brokers)
                return f"run {facts['run']}: {facts['experiment']}, {lab}, {model}, {where}"
            case "evaluated":
                row, seconds = self.row, "simulated s" if self.run.get("simulated") else "s"
                traffic = ", ".join(f"{tier} {size(_both(row, tier))}" for tier in tiers_in(row))
                return (
                    f"global round {facts['global_round']}/{self.run.get('global_rounds', '?')}  "
                    f"{self._lab.experiment.score.label} {number(facts['score']):.4f}  "
                    f"loss {number(facts['loss']):.4f}  "
                    f"{row.get('elapsed_s', 0):.1f} {seconds}  {traffic}"
                )
            case "refused":
                return f"refused {facts['node']}'s model: {facts['reason']}"
            case "warning":
                return f"warning: {facts['reason']}"
            case "child" if facts["state"] in ("ready", "lost", "failed", "disconnected"):
                reason = f" ({facts['reason']})" if facts.get("reason") else ""
                return f"{facts['node']}: {facts['state']}{reason}"
        return None

    def _prepare(self, reasons: Mapping[str, str]) -> None:
        """Set what each child of the cloud waits for."""
        lab = self._lab
        _set_state(lab.cloud, NodeState.READY)
        for name, child in lab.cloud.children.items():
            reason = reasons.get(name, "")
            child.waits_for = reason.removeprefix(WAITS) if reason.startswith(WAITS) else ""

    def _move(self, states: Mapping[str, Mapping[str, Any]], now: float) -> None:
        """Set the state of each child of the cloud in the open round."""
        lab, key = self._lab, Key(0, self._lab.closed, 0)
        _set_state(lab.cloud, NodeState.READY)
        if not lab.begun:
            lab.begin_round(now)
        for name, facts in states.items():
            _move(lab.cloud.children[name], facts, key)

    def _count(self, facts: Mapping[str, Any], now: float) -> None:
        """Take the bytes of each tier and direction; a resumed cloud may have forgotten the last ones."""
        counted = self._lab.counted
        for name in (name for name in facts if name.endswith(("_up_bytes", "_down_bytes"))):
            way, count = name.removesuffix("_bytes"), int(facts[name])
            if way not in counted or count < counted[way].total:
                counted[way] = RateMeter()
            counted[way].take(count, now)


def number(fact: float | None) -> float:
    """Return a number of an event, NaN where it was not finite: JSON has no such numbers."""
    return math.nan if fact is None else fact


def _set_state(node: Node, state: str, reason: str = "") -> None:
    node.states[0], node.reason, node.proven = state, reason, True
    node.waits_for = node.waits_for if state == NodeState.INIT else ""


def _move(child: Node, facts: Mapping[str, Any], key: Key) -> None:
    """Set a child's state in the open round as the cloud's coordinator has it."""
    if facts["presence"] not in ("absent", child.state):
        _set_state(child, facts["presence"])
    child.waits_for, child.epochs = "", facts["epochs"]
    if facts["state"] == ChildState.IDLE.value:
        child.key, child.step = None, NodeStep.IDLE
        return
    phase = Phase(facts["phase"]) if facts["phase"] else None
    working = STEP_OF[phase] if phase is not None else NodeStep.ASSIGNED
    child.key, child.step = key, STEPS.get(facts["state"], working)
    child.measured = bool(facts["total"]) and child.step is working
    child.share = child.fetch.share = min(1.0, facts["done"] / facts["total"]) if child.measured else 0.0


def tiers_in(names: Iterable[str]) -> list[str]:
    """Return the tiers whose bytes have these columns or facts, from the cloud down."""
    return [name.removesuffix("_up_bytes") for name in names if name.endswith("_up_bytes")]


def _both(row: Mapping[str, Any], tier: str) -> int:
    return int(row.get(f"{tier}_up_bytes", 0)) + int(row.get(f"{tier}_down_bytes", 0))
