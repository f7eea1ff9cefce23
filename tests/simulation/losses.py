"""Invariants of labs with a permanent fault: a lab that can close its rounds without the device
finishes, others end.

The experiment alone decides. A parent can close every round without one of its children if its
quorum is less than the number of children that it selects, whichever they are. A rule that draws
its children itself may draw one twice, so that its round has fewer of them, and a quorum that is
all of them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from fedstrata.common.experiment.tiers import Tier
from fedstrata.common.settings.topology import CLOUD, participants
from tests.simulation.drawn import DrawnLab
from tests.simulation.faults import FaultKind
from tests.simulation.monitor import LabRun

KNOWN: Final = (FaultKind.KILL, FaultKind.HANG)  # the parent knows that the device is not ready
RESTART_S: Final = 15.0  # a broker is away for up to 3 s, then the nodes connect again
# added to `idle_s` and a global round: chunks sent again count as progress, for up to 20 s
ENDING_S: Final = 30.0


def copes_with_a_loss(drawn: DrawnLab, faulty: LabRun, twin: LabRun) -> str:
    """Check that a lab finishes if it can without the lost device, and else ends soon."""
    fault, outcome = drawn.permanent, faulty.outcome
    if fault is None or outcome.ok:
        return ""
    home, siblings = _home(drawn, fault.node)
    failed = {node for node, error in outcome.ended.items() if error}
    if _continues_at_institution(drawn, siblings):
        return (
            ""
            if failed <= {fault.node}
            else f"could continue without {fault.node}: {outcome.result}"
        )
    if CLOUD not in failed and failed <= {home, *siblings}:
        return ""
    if _continues_at_cloud(drawn):
        return f"could continue without {home}: {outcome.result}"
    took_s, bound_s = seconds_to_the_end(drawn, faulty, twin)
    return (
        f"it ended {took_s:.1f} s after the loss (bound {bound_s:.1f} s)"
        if took_s > bound_s
        else ""
    )


def seconds_to_the_end(drawn: DrawnLab, faulty: LabRun, twin: LabRun) -> tuple[float, float]:
    """Return the seconds from the loss, the last closing or the last return to the cloud's failure,
    and their bound.
    """
    evidence = faulty.evidence
    begun_s = max([_lost_s(drawn, faulty), returned_s(drawn, faulty), *evidence.closed_s])
    ended_s = faulty.outcome.virtual_s if evidence.failed_s is None else evidence.failed_s
    hangs = drawn.permanent is not None and drawn.permanent.kind is FaultKind.HANG
    # for which a quorum waits for it
    gathering_s = drawn.experiment.tiers[-1].closing.deadline_s if hangs else None
    attempts = 1 + any(
        tier.min_available is not None for tier in drawn.experiment.tiers
    )  # one more without the lost one
    attempt_s = drawn.experiment.transfer.idle_s + _round_s(drawn, twin)
    bound_s = attempts * attempt_s + (gathering_s or 0.0) + ENDING_S + drawn.waits_s
    return ended_s - begun_s, bound_s


def spends_few_deadlines(drawn: DrawnLab, faulty: LabRun, twin: LabRun) -> str:
    """Check that a device costs one deadline if it is known to be lost, else at most one in each
    local round.
    """
    fault, institution = drawn.permanent, drawn.experiment.tiers[-1]
    deadline_s = institution.closing.deadline_s
    if fault is None or deadline_s is None:
        return ""
    if not _continues_at_institution(drawn, _home(drawn, fault.node)[1]):
        return ""
    if _round_s(drawn, twin) + RESTART_S > deadline_s:
        return ""  # a round may last as long for another reason
    back_s, closed_s = returned_s(drawn, faulty), faulty.evidence.closed_s
    begun_s = max(_lost_s(drawn, faulty), back_s)
    rounds = [
        (max(before, back_s), after)
        for before, after in pairwise([0.0, *closed_s])
        if after > begun_s
    ]
    paid = [int((after - before) // deadline_s) for before, after in rounds]
    few = sum(paid) <= 1 if fault.kind in KNOWN else max(paid, default=0) <= institution.rounds
    return (
        ""
        if few
        else f"{paid} deadlines of {deadline_s:.1f} s spent on {fault.node} in the global rounds"
    )


def returned_s(drawn: DrawnLab, faulty: LabRun) -> float:
    """Return when the last device had returned that was away by its trace, 0 without traces, or if
    they never began.
    """
    zero_s, after_s = faulty.evidence.zero_s, drawn.last_return_s
    return zero_s + after_s if zero_s is not None and after_s else 0.0


def _home(drawn: DrawnLab, device: str) -> tuple[str, list[str]]:
    home = drawn.experiment.tree.parent(device)
    return home, drawn.experiment.tree.children[home]


def _continues_at_institution(drawn: DrawnLab, siblings: list[str]) -> bool:
    institution = drawn.experiment.tiers[-1]
    return _closes_without_one(drawn, institution, len(siblings))


def _continues_at_cloud(drawn: DrawnLab) -> bool:
    return _closes_without_one(
        drawn, drawn.experiment.tiers[0], len(drawn.experiment.tree.children[CLOUD])
    )


def _closes_without_one(drawn: DrawnLab, node: Tier, children: int) -> bool:
    buffered, fault = node.aggregation.closes_with, drawn.permanent
    if buffered is not None:  # it begins with all its children
        return (
            fault is not None
            and fault.kind is not FaultKind.HANG
            and buffered < participants(children, node.participation)
        )
    enough = None if node.aggregation.selects else node.closing.quorum
    return enough is not None and enough < participants(children, node.participation)


def _lost_s(drawn: DrawnLab, faulty: LabRun) -> float:
    """Return when the permanent fault began, 0 if the lab was over before."""
    return next(
        (at_s for at_s, fault in faulty.outcome.faults if fault == str(drawn.permanent)), 0.0
    )


def _round_s(drawn: DrawnLab, twin: LabRun) -> float:
    """Return the longest time of a global round that waits for nobody, seconds; trainings differ by
    their spread.
    """
    longest = max(
        (after - before for before, after in pairwise([0.0, *twin.evidence.closed_s])), default=0.0
    )
    return (1 + drawn.durations.spread) * longest
