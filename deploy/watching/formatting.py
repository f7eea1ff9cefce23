"""Text and JSON of a watched lab: log lines, counts, missing nodes, sparklines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from common.accounting.child_report import ChildReport
from common.protocol.messages import Key, NodeState
from deploy.console.tabular import size
from deploy.watching.lab import WatchedLab
from deploy.watching.node import Node, NodeStep

BARS: Final = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
FULL_LEAST: Final = 0.05  # of the greatest value: the least full height of a sparkline
NOTED: Final = ("restarted", "refused", "declined", "warning")
GONE: Final = (NodeState.LOST, NodeState.FAILED, NodeState.DISCONNECTED)


def line(lab: WatchedLab, event: str, facts: Mapping[str, Any], now: float) -> str | None:
    """Return the log line for an event, or None if the event is not logged."""
    reason = f" ({facts['reason']})" if "reason" in facts else ""
    text: str | None = None
    match event:
        case "run":
            nodes = ", ".join(f"{count} {kind}" for kind, count in facts["nodes"].items())
            text = f"run {facts['run']}: {facts['experiment']}, {nodes}, {facts['global_rounds']} global rounds"
        case "global_round":
            loss = "" if lab.loss is None else f"  loss {lab.loss:.4f}"
            flows = lab.flows(now)
            both = {tier: flows[f"{tier}_up"].total + flows[f"{tier}_down"].total for tier in lab.experiment.tier_names}
            traffic = ", ".join(f"{tier} {size(total)}" for tier, total in both.items())
            text = f"global round {facts['global_round']}/{lab.experiment.rounds}{loss}  {traffic}"
        case "state" if facts["state"] not in (NodeState.INIT, "left"):
            text = f"{facts['node']}: {facts['state']}{reason}"
        case "warning":
            text = f"warning: {facts['reason']}"
        case "waiting":
            text = f"{facts['node']}: waits for {facts['waits_for']}"
        case "restarted" | "refused" | "declined":
            text = f"{facts['node']}: {event}{reason}"
        case "broker":
            text = f"broker {facts['broker']}: {facts['state']}"
        case "end":
            text = f"the run has {facts['state']}{reason}"
    return text


def note(lab: WatchedLab, event: str, facts: Mapping[str, Any], now: float) -> str | None:
    """Return what a live view keeps of an event below the tree, failures and restarts, or None."""
    gone = event == "state" and facts["state"] in GONE
    return line(lab, event, facts, now) if gone or event in NOTED else None


def facts_of(lab: WatchedLab, event: str, facts: Mapping[str, Any], now: float) -> dict[str, object]:
    """Return an event's JSON object; `at_s` counts from the watch's start. A global round's has the sums so far."""
    content: dict[str, object] = {"event": event, "at_s": round(now - lab.began, 3), **facts}
    return content | sums(lab, now) if event in ("global_round", "end") else content


def sums(lab: WatchedLab, now: float) -> dict[str, object]:
    """Return the training loss, and the bytes of each tier and direction."""
    return {"loss": lab.loss, **{f"{name}_bytes": flow.total for name, flow in lab.flows(now).items()}}


def tree(lab: WatchedLab, now: float) -> dict[str, object]:
    """Return the whole state of a run as a JSON object."""
    facts = {"run": lab.run, "experiment": lab.experiment.name, "global_rounds": lab.experiment.rounds}
    brokers = {broker.address: "connected" if broker.up else "away" for broker in lab.brokers}
    nodes = {lab.cloud.name: branch(lab.cloud, now)}
    return {**facts, "global_round": lab.global_round, **sums(lab, now), "brokers": brokers, "nodes": nodes}


def branch(node: Node, now: float) -> dict[str, object]:
    """Return the state of a node and of the nodes below it."""
    facts: dict[str, object] = {"role": node.role, "state": node.state}
    if node.alive:
        facts["proven"] = node.proven
    if node.waits_for:
        facts["waits_for"] = node.waits_for
    if node.key is not None:
        facts |= {
            "global_round": node.key.global_round + 1,
            "local_round": node.key.local_round + 1,
            "epochs": node.epochs,
        }
        facts |= {"step": node.step.name.lower(), "done": round(node.done, 4)}
    if node.up.known:
        facts |= {"up_bytes": node.up.total, "down_bytes": node.down.total}
        facts |= {"up_bytes_s": round(node.up.rate(now)), "down_bytes_s": round(node.down.rate(now))}
    if node.children:
        facts["children"] = {name: branch(child, now) for name, child in node.children.items()}
    return facts


def activity(node: Node) -> str:
    """Return a node's activity: its step in the current round, else its state."""
    return _activity(node, node.parent.round_key if node.parent is not None else None)


def _activity(node: Node, round_key: Key | None) -> str:
    if node.state in GONE or (node.key is None and not node.measuring):
        return "preparing" if node.preparing and node.state not in GONE else node.state
    if node.measuring:
        return "measuring"
    return node.step.name.lower() if node.key == round_key else node.state


def counts(node: Node, children: Sequence[Node] | None = None) -> str:
    """Return the number of children by activity, lost ones first, and the slowest of the working ones.

    `children`: some of the node's, by default all.
    """
    children = list(node.children.values()) if children is None else children
    round_key = node.round_key
    found = Counter(_activity(child, round_key) for child in children)
    order = [*GONE, "absent", *(step.name.lower() for step in NodeStep)]
    parts = sorted(found, key=lambda name: (order.index(name) if name in order else len(order), name))
    text = ", ".join(f"{found[name]} {name}" for name in parts)
    takes_part = [child for child in children if child.key is not None and child.key == round_key]
    working = [child for child in takes_part if child.step < NodeStep.DONE and child.state not in GONE]
    if working:
        first, *others = sorted(working, key=_progress)
        alone = not others or _progress(others[0]) > _progress(first)
        return f"{text}; slowest {first.name}, {step(first)}" if alone else text
    reports = [child.report for child in children if child.report is not None]
    if reports and not takes_part:
        slow = max(reports, key=seconds)
        return f"{text}; slowest {slow.name}, {seconds(slow):.1f} s in its last global round"
    return text


def _progress(child: Node) -> tuple[NodeStep, float]:
    return child.step, child.done


def seconds(report: ChildReport) -> float:
    """Return the seconds of a device's work in a global round, without transfers."""
    return report.train_s + report.wait_s + report.pause_s


def step(node: Node) -> str:
    """Return a node's activity with its progress in percent, if that is known."""
    return activity(node) + (f" {100 * node.done:.0f} %" if advances(node) else "")


def advances(node: Node) -> bool:
    """Return whether a node is in a step whose progress is known. An aggregator reports none of its training."""
    unknown = not node.measured or (node.children and node.step is NodeStep.TRAINING)
    measured = node.step in (NodeStep.FETCHING, NodeStep.TRAINING, NodeStep.OFFERING) and not unknown
    return measured and activity(node) == node.step.name.lower()


def missing(lab: WatchedLab) -> list[str]:
    """Return the nodes that the lab waits for before its first round, such as `device-3 of institution-0`."""
    return [] if lab.begun or not lab.cloud.alive else list(_missing(lab.cloud, lab))


def _missing(node: Node, lab: WatchedLab) -> Iterator[str]:
    """Yield the absent nodes below a node that waits for them; where the lab is not `deep`, those that it reports."""
    for child in node.children.values():
        if not child.alive:
            yield child.name if node is lab.cloud else f"{child.name} of {node.name}"
        elif lab.deep and child.state == NodeState.INIT:
            yield from _missing(child, lab)
        else:
            below = lab.experiment.tree.children.get(child.name, ())
            named = [reason.split(" ")[0] for reason in child.waits_for.split("; ")]
            yield from (f"{name} of {child.name}" for name in named if name in below)


def sparkline(values: Sequence[float], *, most: int) -> str:
    """Return the last values, `most` at most, as bars from the least on.

    Their full height is the greatest difference, or FULL_LEAST of the greatest value: small changes look small.
    """
    shown = [value for value in values if math.isfinite(value)][-most:]
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    height = max(high - low, FULL_LEAST * max(abs(low), abs(high)))
    scale = (len(BARS) - 1) / height if height > 0 else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)
