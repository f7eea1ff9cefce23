"""Text and JSON of a watched lab: log lines, counts, missing nodes, sparklines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from fedstrata.common.protocol.messages import LIVING, NodeState, Step
from fedstrata.common.protocol.status import STEPS
from fedstrata.common.text import counted
from fedstrata.deploy.console.tabular import size
from fedstrata.deploy.watching.lab_state import LEFT, WatchedLab
from fedstrata.deploy.watching.nodes import AT_WORK, Node, is_gone

BARS: Final = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
FULL_LEAST: Final = 0.05  # of the greatest value: the least full height of a sparkline
NOTED: Final = ("restarted", "refused", "declined", "warning")
GREATEST: Final = 1e300  # differences of smaller values are finite
ORDER: Final = (NodeState.LOST, NodeState.FAILED, NodeState.DISCONNECTED, "absent", *STEPS)


def line(lab: WatchedLab, event: str, facts: Mapping[str, Any]) -> str | None:
    """Return the log line for an event, or None if the event is not logged."""
    reason = f" ({facts['reason']})" if "reason" in facts else ""
    match event:
        case "run":
            nodes = ", ".join(counted(count, kind) for kind, count in facts["nodes"].items())
            rounds = counted(facts["global_rounds"], "global rounds")
            text = f"run {facts['run']}: {facts['experiment']}, {nodes}, {rounds}"
        case "global_round":
            loss = "" if facts["loss"] is None else f"  training loss {facts['loss']:.4f}"
            text = (
                f"global round {facts['global_round']}/{lab.experiment.rounds}{loss}  "
                f"{traffic(lab)}"
            )
        case "evaluated":
            loss = "" if facts["loss"] is None else f"  loss {facts['loss']:.4f}"
            text = (
                f"global round {facts['global_round']}: {lab.experiment.score_label} "
                f"{facts['score']:.4f}{loss}"
            )
        case "state":
            shown = facts["state"] not in (NodeState.INIT, LEFT)
            if shown:
                return f"{facts['node']}: {facts['state']}{reason}"
            return None
        case "warning":
            text = f"warning: {facts['reason']}"
        case "waiting":
            text = f"{facts['node']}: waits for {facts['waits_for']}"
        case "broker":
            text = f"broker {facts['broker']}: {facts['state']}"
        case "end":
            text = f"the run has {facts['state']}{reason}"
        case _:
            text = f"{facts['node']}: {event}{reason}"
    return text


def note(lab: WatchedLab, event: str, facts: Mapping[str, Any]) -> str | None:
    """Return what a live view keeps of an event below the tree, failures and restarts, or None."""
    gone = event == "state" and is_gone(facts["state"])
    if gone or event in NOTED:
        return line(lab, event, facts)
    return None


def progress(lab: WatchedLab) -> str:
    """Return the progress of a run in one line."""
    if lab.cloud.status is None:
        return f"run {lab.run}: no status from the cloud"
    score = "" if lab.score is None else f"  {lab.experiment.score_label} {lab.score:.4f}"
    return (
        f"run {lab.run}: global round {lab.global_round}/{lab.experiment.rounds}{score}  "
        f"{traffic(lab)}"
    )


def traffic(lab: WatchedLab) -> str:
    """Return the bytes of each tier in both directions together."""
    flows = lab.flows()
    texts = []
    for tier in lab.experiment.tier_names:
        total = flows[f"{tier}_up"].total + flows[f"{tier}_down"].total
        texts.append(f"{tier} {size(total)}")
    return ", ".join(texts)


def facts_of(
    lab: WatchedLab, event: str, facts: Mapping[str, Any], now: float
) -> dict[str, object]:
    """Return an event's JSON object; `at_s` counts from the watch's start. A global round's has the
    sums so far.
    """
    content: dict[str, object] = {"event": event, "at_s": round(now - lab.began, 3), **facts}
    if event in ("global_round", "end"):
        return content | sums(lab)
    return content


def sums(lab: WatchedLab) -> dict[str, object]:
    """Return the last training loss and score, and the bytes of each tier and direction."""
    flows = {f"{name}_bytes": flow.total for name, flow in lab.flows().items()}
    return {"train_loss": lab.loss, "score": lab.score, **flows}


def tree(lab: WatchedLab, now: float) -> dict[str, object]:
    """Return the whole state of a run as a JSON object."""
    return {
        "run": lab.run,
        "experiment": lab.experiment.name,
        "global_rounds": lab.experiment.rounds,
        "global_round": lab.global_round,
        **sums(lab),
        "phases": {each.name: each.seconds for each in lab.progress.phases},
        "brokers": {broker.address: broker.state for broker in lab.brokers},
        "nodes": {lab.cloud.name: branch(lab.cloud, now)},
    }


def branch(node: Node, now: float) -> dict[str, object]:
    """Return the state of a node and of the nodes below it; `seen_s`, `status_s`: since when it was
    last seen.
    """
    facts: dict[str, object] = {"role": node.role, "state": node.state}
    if node.alive:
        facts["proven"] = node.proven
    if node.proven:
        facts["seen_s"] = round(now - node.seen_at, 1)
    if node.text:
        facts["text"] = node.text
    if (entry := node.entry) is not None:
        facts |= {"step": entry.step, "done": round(node.done, 4), "epochs": entry.epochs}
        facts |= {"up_bytes": entry.up, "down_bytes": entry.down}
    if node.status is not None:
        facts["status_s"] = round(now - node.received_at, 1)
    if node.key is not None:
        facts |= {
            "global_round": node.key.global_round + 1,
            "local_round": node.key.local_round + 1,
        }
    if node.children:
        facts["children"] = {name: branch(child, now) for name, child in node.children.items()}
    return facts


def activity(node: Node) -> str:
    """Return a node's activity: its step in its parent's round, else its state."""
    if node.state == NodeState.INIT and node.text:
        return "preparing"
    above = None if node.parent is None else node.parent.status
    if above is not None and above.measuring and node.alive:
        return "measuring"
    return _doing(node.state, node.step)


def _doing(state: str | None, step: Step | None) -> str:
    idle = is_gone(state) or state is None or step in (None, Step.IDLE)
    if idle:
        return str(state or "absent")
    return str(step)


def counts(node: Node, children: Iterable[Node]) -> str:
    """Return the numbers of a node's children by activity, lost ones first, and the slowest one.

    `children`: those to be counted of the ones that its last record names; those that it only
    counts are added.
    """
    named = [child for child in children if child.entry is not None]
    found = Counter(map(activity, named))
    for group in [] if node.status is None else node.status.others:
        found[_doing(group.state, group.step)] += group.count
    text = ", ".join(f"{found[name]} {name}" for name in sorted(found, key=_place))
    slowest = min((child for child in named if child.works), key=_progress, default=None)
    if slowest is not None and advances(slowest):
        return f"{text}; slowest {slowest.name}, {step(slowest)}"
    return text


def _place(name: str) -> tuple[int, str]:
    return ORDER.index(name) if name in ORDER else len(ORDER), name


def _progress(child: Node) -> tuple[int, float]:
    return STEPS.index(child.step or Step.IDLE), child.done


def step(node: Node) -> str:
    """Return a node's activity with its progress in percent, if that is known."""
    return activity(node) + (f" {100 * node.done:.0f} %" if advances(node) else "")


def advances(node: Node) -> bool:
    """Return whether a node is in a step whose progress is known. An aggregator reports none of its
    training.
    """
    return (
        node.entry is not None
        and node.entry.total > 0
        and node.step in AT_WORK
        and activity(node) == node.step
    )


def missing(lab: WatchedLab) -> list[tuple[str, int]]:
    """Return the nodes that the lab waits for before its first round, such as `device-3 of
    institution-0`.

    Each with their number, which is 1 but for those that a record only counts.
    """
    begun = lab.cloud.key is not None or lab.progress.scores
    if begun or not lab.cloud.alive:
        return []
    return list(_missing(lab.cloud))


def _missing(node: Node) -> Iterator[tuple[str, int]]:
    """Yield the absent nodes below a node that waits for them; by its text, where it has published
    no record.
    """
    of = "" if node.parent is None else f" of {node.name}"
    if node.status is None:
        names = [reason.split(" ")[0] for reason in node.text.split("; ")]
        yield from ((name + of, 1) for name in names if name in node.children)
        return
    for child in node.children.values():
        if child.entry is not None and not child.alive:
            yield child.name + of, 1
        elif child.state == NodeState.INIT:
            yield from _missing(child)
    count = sum(group.count for group in node.status.others if group.state not in LIVING)
    if count:
        yield f"{count} more{of}", count


def sparkline(values: Sequence[float], *, most: int) -> str:
    """Return the last values, `most` at most, as bars from the least on.

    Their full height is the greatest difference, or FULL_LEAST of the greatest value: small changes
    look small.
    """
    shown = [value for value in values if abs(value) < GREATEST][-most:]
    if len(shown) < 2:
        return ""
    low = min(shown)
    high = max(shown)
    height = max(high - low, FULL_LEAST * max(abs(low), abs(high)))
    scale = (len(BARS) - 1) / height if height > 0 else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)
