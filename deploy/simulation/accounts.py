"""Checks that both ends of every link counted the same bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from common.accounting.counters import LINK_KINDS
from common.protocol.topics import ALL
from deploy.simulation.drawn import DrawnLab
from deploy.simulation.faults import FaultKind
from deploy.simulation.monitor import Evidence, LinkCount

INVENTED: Final = (FaultKind.DUPLICATION, FaultKind.STRANGER, FaultKind.FLOOD, FaultKind.SEEKERS, FaultKind.SECOND)
LAST_BYTES: Final = 400  # messages that may be sent after the other end has left: an answer, a goodbye
KINDS: Final = (*LINK_KINDS, "probe")


def exact_accounts(drawn: DrawnLab, evidence: Evidence) -> str:
    """Return the differences between the ends of an undisturbed lab's links, beyond the last messages of a run."""
    slow = drawn.unequal or drawn.conditions.up_rate is not None  # repeats may be in flight when a round closes
    if drawn.timed or slow:  # late children are cut off at the end of the run
        return plausible_accounts(replace(drawn, faults=()), evidence)
    wrong = []
    for (parent, child), link in evidence.up.items():
        for kind in KINDS:
            most = LAST_BYTES if kind == "control" else 0
            if not 0 <= link.sent[kind] - link.received[kind] <= most:
                wrong.append(f"{child} sent {link.sent[kind]} {kind} bytes, {parent} received {link.received[kind]}")
    for (parent, child), link in evidence.down.items():
        if child == ALL:
            continue
        control = link.sent["control"] - evidence.before_join[parent, child]
        if not 0 <= control - link.received["control"] <= LAST_BYTES:
            wrong.append(f"{parent} sent {control} control bytes, {child} received {link.received['control']}")
        for kind in ("model", "extras", "probe"):
            # A broadcast chunk may replace a unicast one, whose topic is longer.
            whole = link.sent[f"{kind} payload"] <= link.received[f"{kind} payload"]
            if not (whole and link.received[kind] <= _sent(evidence, parent, kind)):
                wrong.append(f"{parent} sent {link.sent[kind]} {kind} bytes, {child} received {link.received[kind]}")
    return "; ".join(wrong)


def plausible_accounts(drawn: DrawnLab, evidence: Evidence) -> str:
    """Return the links of which an end counted more than the other sent, over all processes of both."""
    if any(fault.kind in INVENTED for fault in drawn.faults):
        return ""
    tree, wrong = drawn.experiment.tree, []
    for (parent, child), link in evidence.up.items():
        for kind in KINDS:
            if link.received[kind] > link.sent[kind]:
                wrong.append(f"{child} sent {link.sent[kind]} {kind} bytes, {parent} received {link.received[kind]}")
    for (parent, child), link in evidence.down.items():
        for kind in KINDS if child != ALL else ():
            sent = link.sent[kind] if kind == "control" else _sent(evidence, parent, kind)
            if link.received[kind] > sent:
                wrong.append(f"{parent} sent {sent} {kind} bytes, {child} received {link.received[kind]}")
    for owner, child, traffic in ((node, *link) for node, links in evidence.ledgers.items() for link in links.items()):
        parent = tree.parent(child)
        up = evidence.up.get((parent, child), LinkCount()).received
        down = evidence.down.get((parent, child), LinkCount()).received
        if traffic.received > sum(up[kind] for kind in LINK_KINDS):
            wrong.append(f"{owner}'s ledger has {traffic.received} bytes of {child}, received were {dict(up)}")
        if traffic.sent > sum(down[kind] for kind in LINK_KINDS):
            wrong.append(f"{owner}'s ledger has {traffic.sent} bytes to {child}, it received {dict(down)}")
    return "; ".join(wrong[:6])


def _sent(evidence: Evidence, parent: str, kind: str) -> int:
    """Return the bytes that a parent sent to all children: a broadcast chunk for one child reaches others, too."""
    return sum(link.sent[kind] for (name, _), link in evidence.down.items() if name == parent)
