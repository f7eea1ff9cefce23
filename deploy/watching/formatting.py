"""Text and JSON of a watched lab: log lines, counts, missing nodes, sparklines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from common.protocol.messages import NodeState, Step
from common.protocol.status import STEPS
from deploy.console.tabular import size
from deploy.watching.lab import AT_WORK, Node, WatchedLab, is_gone

BARS: Final = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
FULL_LEAST: Final = 0.05  # of the greatest value: the least full height of a sparkline
NOTED: Final = ("restarted", "refused", "declined", "warning")
GREATEST: Final = 1e300  # differences of smaller values are finite
ORDER: Final = (NodeState.LOST, NodeState.FAILED, NodeState.DISCONNECTED, "absent", *STEPS)


def line(lab: WatchedLab, event: str, facts: Mapping[str, Any]) -> str | None:
    """Return the log line for an event, or None if the event is not logged."""
    reason = f" ({facts['reason']})" if "reason" in facts else ""
    text: str | None = None
    match event:
        case "run":
            nodes = ", ".join(f"{count} {kind}" for kind, count in facts["nodes"].items())
            text = f"run {facts['run']}: {facts['experiment']}, {nodes}, {facts['global_rounds']} global rounds"
        case "global_round":
            loss = "" if facts["loss"] is None else f"  training loss {facts['loss']:.4f}"
            text = f"global round {facts['global_round']}/{lab.experiment.rounds}{loss}  {traffic(lab)}"
        case "evaluated":
            loss = "" if facts["loss"] is None else f"  loss {facts['loss']:.4f}"
            text = f"global round {facts['global_round']}: {lab.experiment.score.label} {facts['score']:.4f}{loss}"
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


def note(lab: WatchedLab, event: str, facts: Mapping[str, Any]) -> str | None:
    """Return what a live view keeps of an event below the tree, failures and restarts, or None."""
    gone = event == "state" and is_gone(facts["state"])
    return line(lab, event, facts) if gone or event in NOTED else None


def progress(lab: WatchedLab) -> str:
    """Return the progress of a run in one line."""
    if lab.cloud.status is None:
        return f"run {lab.run}: no status from the cloud"
    score = "" if lab.score is None else f"  {lab.experiment.score.label} {lab.score:.4f}"
    return f"run {lab.run}: global round {lab.global_round}/{lab.experiment.rounds}{score}  {traffic(lab)}"


def traffic(lab: WatchedLab) -> str:
    """Return the bytes of each tier in both directions together."""
    flows = lab.flows()
    both = {tier: flows[f"{tier}_up"].total + flows[f"{tier}_down"].total for tier in lab.experiment.tier_names}
    return ", ".join(f"{tier} {size(total)}" for tier, total in both.items())


def facts_of(lab: WatchedLab, event: str, facts: Mapping[str, Any], now: float) -> dict[str, object]:
    """Return an event's JSON object; `at_s` counts from the watch's start. A global round's has the sums so far."""
    content: dict[str, object] = {"event": event, "at_s": round(now - lab.began, 3), **facts}
    return content | sums(lab) if event in ("global_round", "end") else content


def sums(lab: WatchedLab) -> dict[str, object]:
    """Return the last training loss and score, and the bytes of each tier and direction."""
    flows = {f"{name}_bytes": flow.total for name, flow in lab.flows().items()}
    return {"train_loss": lab.loss, "score": lab.score, **flows}


def tree(lab: WatchedLab, now: float) -> dict[str, object]:
    """Return the whole state of a run as a JSON object."""
    facts = {"run": lab.run, "experiment": lab.experiment.name, "global_rounds": lab.experiment.rounds}
    facts |= {"global_round": lab.global_round, **sums(lab)}
    facts |= {"phases": {each.name: each.seconds for each in lab.progress.phases}}
    brokers = {broker.address: "connected" if broker.up else "away" for broker in lab.brokers}
    return {**facts, "brokers": brokers, "nodes": {lab.cloud.name: branch(lab, lab.cloud, now)}}


def branch(lab: WatchedLab, node: Node, now: float) -> dict[str, object]:
    """Return the state of a node and of the nodes below it."""
    facts: dict[str, object] = {"role": node.role, "state": node.state}
    if node.alive:
        facts["proven"] = node.proven
    if node.text:
        facts["text"] = node.text
    if (entry := node.entry) is not None:
        facts |= {"step": entry.step, "done": round(node.done, 4), "epochs": entry.epochs}
        facts |= {"up_bytes": entry.up, "down_bytes": entry.down}
    if node.status is not None:
        facts["status_s"] = round(now - node.received_at, 1)  # its age
        if node.key is not None:
            facts |= {"global_round": node.key.global_round + 1, "local_round": node.key.local_round + 1}
    if node.children:
        facts["children"] = {name: branch(lab, child, now) for name, child in node.children.items()}
    return facts


def activity(node: Node) -> str:
    """Return a node's activity: its step in its parent's round, else its state."""
    if node.state == NodeState.INIT and node.text:
        return "preparing"
    above = None if node.parent is None else node.parent.status
    if above is not None and above.measuring and node.alive:
        return "measuring"
    return node.state if is_gone(node.state) or node.step in (None, Step.IDLE) else str(node.step)


def counts(node: Node, children: Sequence[Node] | None = None) -> str:
    """Return the number of children by activity, lost ones first, and the slowest of the working ones.

    `children`: some of the node's, by default all.
    """
    children = list(node.children.values()) if children is None else children
    unnamed = {child.name for child in node.children.values() if child.entry is None}
    found: Counter[str] = Counter()
    if node.status is not None and node.status.others and unnamed <= {child.name for child in children}:
        for group in node.status.others:
            state = "absent" if group.state is None else group.state
            idle = group.step is Step.IDLE or is_gone(state) or state == "absent"
            found[str(state if idle else group.step)] += group.count
        children = [child for child in children if child.entry is not None]
    found.update(map(activity, children))
    text = ", ".join(f"{found[name]} {name}" for name in sorted(found, key=_place))
    working = [child for child in children if child.works and not is_gone(child.state)]
    if working:
        first, *others = sorted(working, key=_progress)
        alone = not others or _progress(others[0]) > _progress(first)
        return f"{text}; slowest {first.name}, {step(first)}" if alone else text
    worked = [(child.entry.seconds, child.name) for child in children if child.entry is not None]
    seconds, name = max(worked, default=(0.0, ""))
    return f"{text}; slowest {name}, {seconds:.1f} s in its last round" if seconds > 0 else text


def _place(name: str) -> tuple[int, str]:
    return ORDER.index(name) if name in ORDER else len(ORDER), name


def _progress(child: Node) -> tuple[int, float]:
    return STEPS.index(child.step or Step.IDLE), child.done


def step(node: Node) -> str:
    """Return a node's activity with its progress in percent, if that is known."""
    return activity(node) + (f" {100 * node.done:.0f} %" if advances(node) else "")


def advances(node: Node) -> bool:
    """Return whether a node is in a step whose progress is known. An aggregator reports none of its training."""
    return node.entry is not None and node.entry.total > 0 and node.step in AT_WORK and activity(node) == node.step


def missing(lab: WatchedLab) -> list[str]:
    """Return the nodes that the lab waits for before its first round, such as `device-3 of institution-0`."""
    return [] if lab.begun or not lab.cloud.alive else list(_missing(lab.cloud, lab))


def _missing(node: Node, lab: WatchedLab) -> Iterator[str]:
    """Yield the absent nodes below a node that waits for them; those that it reports, where they are not seen."""
    for child in node.children.values():
        if not child.alive:
            yield child.name if node is lab.cloud else f"{child.name} of {node.name}"
        elif child.state == NodeState.INIT and any(below.state != "absent" for below in child.children.values()):
            yield from _missing(child, lab)
        elif child.state == NodeState.INIT:
            named = [reason.split(" ")[0] for reason in child.text.split("; ")]
            yield from (f"{name} of {child.name}" for name in named if name in child.children)


def sparkline(values: Sequence[float], *, most: int) -> str:
    """Return the last values, `most` at most, as bars from the least on.

    Their full height is the greatest difference, or FULL_LEAST of the greatest value: small changes look small.
    """
    shown = [value for value in values if abs(value) < GREATEST][-most:]
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    height = max(high - low, FULL_LEAST * max(abs(low), abs(high)))
    scale = (len(BARS) - 1) / height if height > 0 else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)
