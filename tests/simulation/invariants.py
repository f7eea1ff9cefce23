"""Named invariants of the simulated labs. Each returns a description of the violation, or ""."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Final

from fedstrata.common.accounting.counters import LINK_KINDS
from fedstrata.common.processes.subprocess_channel import REPLACEMENTS
from fedstrata.common.protocol.messages import Presence
from fedstrata.common.protocol.topics import ALL
from fedstrata.common.settings.topology import CLOUD, participants
from fedstrata.device.pool.executors import RETRIES
from tests.simulation.drawn import DrawnLab
from tests.simulation.faults import RESTARTS, SIDE, Fault, FaultKind, longest_s, recovery_s
from tests.simulation.frozen import FrozenWorkload, lacks
from tests.simulation.losses import copes_with_a_loss, returned_s, spends_few_deadlines
from tests.simulation.monitor import Evidence, LabRun, LinkCount
from tests.simulation.outcome import LabOutcome

DOCUMENTED: Final = re.compile(
    r"NoProgress|OutOfReach|RunFailed|ParentGaveUp|StateLost|InvalidBelow|ConnectionFailed|StorageFailed"
)
# the end of a node with another node's configuration
MISTAKEN: Final = re.compile(r"InvalidExperiment: --parent")
# at a node, or as its parent reports it
GONE_STATE: Final = re.compile(r"StateLost|gave up: .*\b(is|are) lost\b")
# added to two undisturbed rounds and two keep-alives: back-off, repeats, proof of life
STALL_S: Final = 45.0
# (base, per child)
TASKS_MOST: Final = {"cloud": (16, 2), "institution": (24, 2), "device": (16, 0)}
SIZE_MOST: Final = 48
SIZE_EACH: Final = 16  # entries per child: its byte account has fourteen cells
FLOOD_MOST: Final = 300  # `SEEKERS_MOST`, with a margin
END_S: Final = 5.0  # from the last closing to the end of the run
INVENTED: Final = (
    FaultKind.DUPLICATION,
    FaultKind.STRANGER,
    FaultKind.FLOOD,
    FaultKind.SEEKERS,
    FaultKind.SECOND,
)
REFUSED: Final = re.compile(r"refused \S+'s model|is left out")
MESSAGES_ONLY: Final = (
    FaultKind.MUTE,
    FaultKind.STRANGER,
    FaultKind.DUPLICATION,
    FaultKind.REMAINS,
)
LEAVE_S: Final = 4.0  # to evaluate the last model, and to publish the last state
# messages that may be sent after the other end has left: an answer, a goodbye
LAST_BYTES: Final = 400
COUNTED: Final = (*LINK_KINDS, "probe")
KEPT_MOST: Final = 3  # retained topics per node that was absent at the end: presence, experiment


def ends_as_documented(drawn: DrawnLab, faulty: LabRun, twin: LabRun) -> str:
    """Check that a lab finishes if it can, and else ends with a documented error.

    Whether it can finish despite a permanent fault is checked by `copes_with_a_loss`.
    """
    outcome = faulty.outcome
    if outcome.result == "ok":
        return ""
    if not outcome.result.startswith("failed: "):
        return outcome.result
    wrong = {fault.node for fault in drawn.faults if fault.kind is FaultKind.WRONG}
    errors = {
        n: error
        for n, error in outcome.ended.items()
        if error and not (n in wrong and MISTAKEN.match(error))
    }
    strange = {node: error for node, error in errors.items() if not DOCUMENTED.match(error)}
    if strange:
        return f"undocumented: {strange}"
    if (
        drawn.permanent is not None
        or may_fail(drawn)
        or all(_is_orphan(drawn, outcome, node) for node in errors)
    ):
        return ""
    lost_end = outcome.ended.get(CLOUD) == "" and _end_is_lost(drawn, faulty)
    if lost_end or (forgets(drawn) and any(GONE_STATE.search(error) for error in errors.values())):
        return ""
    return f"could continue: {outcome.result}"


def does_not_stall(drawn: DrawnLab, faulty: LabRun, twin: LabRun) -> str:
    """Check that a global round closes soon enough after the last fault.

    With a permanent fault, `spends_few_deadlines` and `copes_with_a_loss` have the bounds.
    """
    if drawn.permanent is not None:
        return ""
    gap, bound = gap_and_bound(drawn, faulty, twin)
    return (
        f"no global round closed for {gap:.1f} s after the last fault (bound {bound:.1f} s)"
        if gap > bound
        else ""
    )


def leaves_in_time(drawn: DrawnLab, faulty: LabRun, twin: LabRun) -> str:
    """Check that the cloud does not wait for farewells of children that have all left.

    Only where nothing but lost or invented messages disturbs the end, and no link is slow.
    """
    left_s, closed = faulty.evidence.left_s, faulty.evidence.closed_s
    children = drawn.experiment.tree.children[CLOUD]
    if not faulty.outcome.ok or drawn.slow or not left_s.keys() >= {CLOUD, *children} or not closed:
        return ""
    keepalive_s = drawn.experiment.transfer.keepalive_s
    others = [fault for fault in drawn.faults if fault.kind not in MESSAGES_ONLY]
    if any(
        fault.end_s + recovery_s(fault, keepalive_s=keepalive_s) > closed[-1] for fault in others
    ):
        return ""
    last_s = max(closed[-1], *(left_s[name] for name in children))
    waited_s = left_s[CLOUD] - last_s
    return f"the cloud left {waited_s:.1f} s after its last child" if waited_s > LEAVE_S else ""


def gap_and_bound(drawn: DrawnLab, faulty: LabRun, twin: LabRun) -> tuple[float, float]:
    """Return the seconds from the end of the last fault, or the last return, to the next closing,
    and their bound.
    """
    outcome, closed = faulty.outcome, faulty.evidence.closed_s
    last = max(
        returned_s(drawn, faulty),
        *(fault.end_s for fault in drawn.faults if not fault.permanent),
        0.0,
    )
    following = [at for at in closed if at > last] or [
        outcome.virtual_s if outcome.ok and not closed else last
    ]
    longest = max(
        (after - before for before, after in pairwise([0.0, *twin.evidence.closed_s])), default=0.0
    )
    transfer = drawn.experiment.transfer
    waits = transfer.idle_s if may_fail(drawn) or drawn.timed else 0.0
    spread = drawn.durations.spread + 1
    return following[0] - last, 2 * spread * longest + 2 * transfer.keepalive_s + STALL_S + waits


def gives_the_same_model(drawn: DrawnLab, faulty: LabRun, twin: LabRun) -> str:
    """Check that the final model equals the undisturbed one, unless the lab depends on time."""
    if drawn.timed or not faulty.outcome.ok or faulty.outcome.digest == twin.outcome.digest:
        return ""
    if _reports_a_lie(drawn, faulty):
        return ""
    return f"model {faulty.outcome.digest or 'none'}, undisturbed {twin.outcome.digest}"


def stays_bounded(drawn: DrawnLab, faulty: LabRun, twin: LabRun | None = None) -> str:
    """Check that containers and tasks stay within their bounds."""
    evidence = faulty.evidence
    children = max(map(len, drawn.experiment.tree.children.values()))
    flooded = any(fault.kind in (FaultKind.SEEKERS, FaultKind.FLOOD) for fault in drawn.faults)
    most = (FLOOD_MOST if flooded else SIZE_MOST) + SIZE_EACH * children
    wrong = [f"{path}: {size}" for path, size in evidence.sizes.items() if size > most]
    for role, tasks in evidence.tasks.items():
        base, each = TASKS_MOST[role]
        if tasks > base + each * children:
            wrong.append(f"{role} has {tasks} tasks")
    return "; ".join(wrong)


def leaves_clean_brokers(drawn: DrawnLab, faulty: LabRun, twin: LabRun) -> str:
    """Check that brokers retain only presences and experiments of nodes that were absent or killed."""
    if not faulty.outcome.ok:
        return ""
    wrong = [topic for topic in faulty.evidence.retained if not topic.endswith(("/state", "/spec"))]
    names = len(faulty.evidence.starts)
    if len(faulty.evidence.retained) > KEPT_MOST * names:
        wrong.append(f"{len(faulty.evidence.retained)} topics")
    return " ".join(wrong)


def has_agreeing_ledgers(drawn: DrawnLab, faulty: LabRun, twin: LabRun) -> str:
    """Check that no receiver counted more than was sent to it."""
    return plausible_accounts(drawn, faulty.evidence)


def settles_all_results(drawn: DrawnLab, faulty: LabRun, twin: LabRun | None = None) -> str:
    """Check that each accepted result is in one closed round or taken back, and what devices keep
    follows from that.
    """
    evidence = faulty.evidence
    return "; ".join(
        [f"accepted and lost at {found}" for found in evidence.unsettled] + evidence.misled
    )


def opens_no_child(drawn: DrawnLab, faulty: LabRun, twin: LabRun | None = None) -> str:
    """Check that nobody was given shares of both secrets of a child in one exchange."""
    both = [name for (_, name), kinds in faulty.evidence.opened.items() if len(kinds) > 1]
    return f"both secrets were opened of {', '.join(both)}" if both else ""


def weighs_by_what_is_prepared(drawn: DrawnLab, faulty: LabRun, twin: LabRun | None = None) -> str:
    """Check that an institution weighs what its devices had prepared that could take part, whoever
    restarted.

    Not where devices may be below several institutions: nothing that is sent has the ones below
    each.
    """
    if drawn.experiment.tiers[-1].entering or _lied(drawn):
        return ""
    return "; ".join(faulty.evidence.weighed[:5])


def accounts_for_trainings(drawn: DrawnLab, faulty: LabRun, twin: LabRun) -> str:
    """Check that restarts explain repeated trainings, and that no training is missing or
    superfluous.
    """
    evidence = faulty.evidence
    wrong = []
    for (device, local_round), times in faulty.evidence.trained.items():
        nodes = (device, *_above(drawn, device))
        if any(tier.secure for tier in drawn.experiment.tiers):
            # new keys of one child, and the tasks of all begin again
            nodes = (CLOUD, *drawn.experiment.tree.nodes)
        again = sum(evidence.starts[node] - 1 for node in nodes)
        again += sum(
            int(fault.amount) for fault in drawn.faults if fault.kind is FaultKind.STRANGER
        )
        left = drawn.departures(device) * evidence.starts[CLOUD]  # a resumed run repeats them
        # a task that it left behind is another one's, too
        moves = drawn.experiment.tiers[-1].entering > 0
        if times > drawn.runs + again + left and not moves and not _lied(drawn):
            wrong.append(
                f"{device} trained round {local_round} {times} times with {again} restarts, "
                f"{left} absences"
            )
    if faulty.outcome.ok and not drawn.timed and not _reports_a_lie(drawn, faulty):
        lacking = twin.evidence.trained.keys() - evidence.trained.keys()
        if lacking:
            wrong.append(f"never trained: {sorted(lacking)}")
        extra = evidence.trained.keys() - twin.evidence.trained.keys()
        if extra:
            wrong.append(f"superfluous trainings: {sorted(extra)}")
    return "; ".join(wrong)


def has_no_unhandled_errors(drawn: DrawnLab, faulty: LabRun, twin: LabRun | None = None) -> str:
    """Check that there are no unhandled errors."""
    return "; ".join(faulty.outcome.errors)


def warns_of_no_bug(drawn: DrawnLab, faulty: LabRun, twin: LabRun) -> str:
    """Check that faults explain all warnings."""
    kinds = {fault.kind for fault in drawn.faults}
    expected = [
        *_EXPECTED,
        *([_OTHER_RUN] if drawn.runs > 1 else []),
        *([_AWAY] if drawn.experiment.availability.trace is not None else []),
    ]
    strange = []
    for warning in faulty.outcome.warnings:
        if any(pattern.search(warning) for pattern in expected):
            continue
        needed = next((kind for pattern, kind in _EXPLAINED if pattern.search(warning)), None)
        if needed is None or not kinds & needed:
            strange.append(warning)
    return "; ".join(strange[:5])


def brings_frozen_arrays_once(drawn: DrawnLab, faulty: LabRun, twin: LabRun | None = None) -> str:
    """Check that frozen arrays go down where a device lacks them, once if nothing disturbs, and
    nowhere else.
    """
    brought = drawn.frozen_bytes and drawn.experiment.training.trainer.learns_module
    if not brought or any(fault.kind in INVENTED for fault in drawn.faults):
        return ""
    tree, evidence, wrong = drawn.experiment.tree, faulty.evidence, []
    nbytes = FrozenWorkload(drawn.model_bytes, drawn.frozen_bytes).form.nbytes
    for (parent, child), link in evidence.down.items():
        if child == ALL:
            continue
        entered = any(fault.kind in (FaultKind.ENTRY, FaultKind.VISIT) for fault in drawn.faults)
        needed = entered or any(
            lacks(name) for name in (child, *tree.below(child)) if name not in tree.children
        )
        came, times = link.received["frozen payload"], 1 if drawn.spool else drawn.runs
        undisturbed = not (drawn.faults or drawn.slow)
        # A chunk that is broadcast just before a child asks comes once more.
        once = times * nbytes <= came <= 2 * times * nbytes
        if (came and not needed) or (undisturbed and needed and not once):
            wrong.append(
                f"{child} received {came} bytes of frozen arrays from {parent}, which have {nbytes}"
            )
    up = sum(link.sent["frozen"] for link in evidence.up.values())
    return "; ".join([*wrong[:5], *([f"{up} bytes of frozen arrays went up"] if up else [])])


def is_exact(drawn: DrawnLab, twin: LabRun) -> str:
    """Check an undisturbed lab: its end, its warnings, its ledgers, its trainings."""
    outcome, evidence = twin.outcome, twin.evidence
    expected = _EXPECTED if drawn.slow else _UNDISTURBED
    strange = [w for w in outcome.warnings if not any(p.search(w) for p in expected)]
    wrongs = (
        "" if outcome.ok else f"{outcome.result} {outcome.errors}",
        f"warnings: {strange[:5]}" if strange else "",
        # A farewell over a slow link may come after the parent has left its last state for that
        # child.
        f"retained: {evidence.retained}"
        if evidence.retained and not (drawn.timed or drawn.slow)
        else "",
        stays_bounded(drawn, twin),
        exact_accounts(drawn, evidence),
        brings_frozen_arrays_once(drawn, twin),
        settles_all_results(drawn, twin),
        weighs_by_what_is_prepared(drawn, twin),
        _trainings(drawn, twin),
    )
    return "; ".join(filter(None, wrongs))


def _trainings(drawn: DrawnLab, twin: LabRun) -> str:
    most = max(twin.evidence.trained.values(), default=0)
    if most > drawn.runs:
        return f"a round was trained {most} times"
    experiment = drawn.experiment
    *above, last = experiment.tiers
    sizes = [participants(n, last.participation) for n in experiment.sizes()[-1]]
    expected = drawn.runs * experiment.rounds * experiment.device_rounds * sum(sizes)
    everybody = all(tier.participation == 1.0 for tier in above)
    selects = any(tier.aggregation.selects for tier in experiment.tiers)  # then fewer may take part
    if not drawn.timed and everybody and not selects and twin.outcome.trainings != expected:
        return f"{twin.outcome.trainings} trainings, expected {expected}"
    return ""


def may_fail(drawn: DrawnLab) -> bool:
    """Return whether the faults may leave a node without progress for `idle_s`, or a parent without
    enough children.
    """
    if drawn.experiment.availability.moves or (
        drawn.experiment.tiers[-1].move_after_s is not None and drawn.faults
    ):
        return True
    transfer = drawn.experiment.transfer
    if _lied(drawn) or _loses_a_training(drawn) or any(_is_fatal(fault) for fault in drawn.faults):
        return True
    # an absence does not count: the time before and after it does
    if drawn.experiment.availability.trace is not None:
        lasting = (fault for fault in drawn.faults if not fault.permanent)
        return (
            sum(f.for_s + recovery_s(f, keepalive_s=transfer.keepalive_s) for f in lasting)
            >= transfer.idle_s
        )
    return longest_s(drawn.faults, keepalive_s=transfer.keepalive_s) >= transfer.idle_s


def _lied(drawn: DrawnLab) -> bool:
    """Return whether a member lied in what a model needs."""
    return any(fault.kind is FaultKind.LIES and fault.detail != SIDE for fault in drawn.faults)


def _reports_a_lie(drawn: DrawnLab, faulty: LabRun) -> bool:
    """Return whether a member's result was refused, and the run went on without it, as was
    reported.
    """
    return _lied(drawn) and any(REFUSED.search(warning) for warning in faulty.outcome.warnings)


def _is_fatal(fault: Fault) -> bool:
    """Return whether a node may end with an error at once: a process that begins writes to a full
    disk.
    """
    return fault.kind is FaultKind.DISK or (
        fault.kind is FaultKind.EVALUATOR and fault.amount > REPLACEMENTS
    )


def _loses_a_training(drawn: DrawnLab) -> bool:
    """Return whether more workers of a device may die during one training than are replaced."""
    deaths = Counter[str]()
    for fault in drawn.faults:
        deaths[fault.node] += int(fault.amount) if fault.kind is FaultKind.WORKER else 0
    return max(deaths.values(), default=0) > RETRIES


def forgets(drawn: DrawnLab) -> bool:
    """Return whether a restart may lose the state of an institution or of a device, or a second one
    has none.
    """
    experiment = drawn.experiment
    if not any(experiment.remembers(node) for node in experiment.tree.nodes):
        return False
    others = [fault for fault in drawn.faults if fault.node != CLOUD]
    if any(fault.kind is FaultKind.SECOND for fault in others):
        return True  # it has files of its own, and takes the place of one that is absent
    return any(fault.restarts and (not fault.keep or not drawn.spool) for fault in others)


def _is_orphan(drawn: DrawnLab, outcome: LabOutcome, node: str) -> bool:
    """Return whether the run ended well without the node: a second one took its place, or a node
    above it failed.
    """
    if drawn.experiment.tiers[-1].entering and node not in drawn.experiment.tree.aggregators:
        return outcome.ended.get(CLOUD) == ""  # it moved, or looked for a parent, as the run ended
    above = [name for name in _above(drawn, node) if name != CLOUD]
    replaced = any(fault.kind is FaultKind.SECOND and fault.node == node for fault in drawn.faults)
    return outcome.ended.get(CLOUD) == "" and (
        replaced or any(outcome.ended.get(name) != "" for name in above)
    )


def _end_is_lost(drawn: DrawnLab, faulty: LabRun) -> bool:
    """Return whether the broker lost the presence by which the run's end is known, which it had
    acknowledged.
    """
    ends = faulty.evidence.closed_s[-1:]
    lost = (
        fault
        for fault in drawn.faults
        if fault.kind is FaultKind.MUTE and fault.detail == Presence.__name__
    )
    return any(fault.at_s <= end + END_S and end <= fault.end_s for fault in lost for end in ends)


def _above(drawn: DrawnLab, node: str) -> list[str]:
    experiment = drawn.experiment
    if experiment.tiers[-1].entering and node not in experiment.tree.aggregators:  # it may move
        return [CLOUD, *experiment.tree.aggregators]
    return drawn.experiment.tree.path(node).split("/")[:-1]


# Both ends of every link count the same bytes


def exact_accounts(drawn: DrawnLab, evidence: Evidence) -> str:
    """Return the differences between the ends of an undisturbed lab's links, beyond the last
    messages of a run.
    """
    # late children are cut off at the end of the run; repeats may be in flight
    if drawn.timed or drawn.slow:
        return plausible_accounts(replace(drawn, faults=()), evidence)
    wrong = []
    for (parent, child), link in evidence.up.items():
        for kind in COUNTED:
            most = LAST_BYTES if kind == "control" else 0
            if not 0 <= link.sent[kind] - link.received[kind] <= most:
                wrong.append(
                    f"{child} sent {link.sent[kind]} {kind} bytes, {parent} received "
                    f"{link.received[kind]}"
                )
    for (parent, child), link in evidence.down.items():
        if child == ALL:
            continue
        control = link.sent["control"] - evidence.before_join[parent, child]
        if not 0 <= control - link.received["control"] <= LAST_BYTES:
            wrong.append(
                f"{parent} sent {control} control bytes, {child} received "
                f"{link.received['control']}"
            )
        for kind in ("model", "extras", "frozen", "probe"):
            # A broadcast chunk may replace a unicast one, whose topic is longer.
            whole = link.sent[f"{kind} payload"] <= link.received[f"{kind} payload"]
            if not (whole and link.received[kind] <= _sent(evidence, parent, kind)):
                wrong.append(
                    f"{parent} sent {link.sent[kind]} {kind} bytes, {child} received "
                    f"{link.received[kind]}"
                )
    return "; ".join(wrong)


def plausible_accounts(drawn: DrawnLab, evidence: Evidence) -> str:
    """Return the links of which an end counted more than the other sent, over all processes of
    both.
    """
    if any(fault.kind in (*INVENTED, FaultKind.LIES) for fault in drawn.faults):
        return ""
    tree, wrong = drawn.experiment.tree, []
    for (parent, child), link in evidence.up.items():
        for kind in COUNTED:
            if link.received[kind] > link.sent[kind]:
                wrong.append(
                    f"{child} sent {link.sent[kind]} {kind} bytes, {parent} received "
                    f"{link.received[kind]}"
                )
    joined = {_ends(drawn, name) for links in evidence.ledgers.values() for name in links}
    for (parent, child), link in evidence.down.items():
        if child == ALL:
            continue
        may_enter = drawn.experiment.enters(child) or (
            child in tree and parent != tree.parent(child)
        )
        if may_enter and (parent, child) not in joined:
            continue  # it was answered and has never joined here: that counts for no link
        for kind in COUNTED:
            sent = link.sent[kind] if kind == "control" else _sent(evidence, parent, kind)
            if link.received[kind] > sent:
                wrong.append(
                    f"{parent} sent {sent} {kind} bytes, {child} received {link.received[kind]}"
                )
    for owner, name, traffic in (
        (node, *link) for node, links in evidence.ledgers.items() for link in links.items()
    ):
        parent, child = _ends(drawn, name)
        up = evidence.up.get((parent, child), LinkCount()).received
        down = evidence.down.get((parent, child), LinkCount()).received
        if traffic.received > sum(up[kind] for kind in LINK_KINDS):
            wrong.append(
                f"{owner}'s ledger has {traffic.received} bytes of {child}, received were "
                f"{dict(up)}"
            )
        if traffic.sent > sum(down[kind] for kind in LINK_KINDS):
            wrong.append(
                f"{owner}'s ledger has {traffic.sent} bytes to {child}, it received {dict(down)}"
            )
    return "; ".join(wrong[:6])


def _ends(drawn: DrawnLab, name: str) -> tuple[str, str]:
    """Return parent and child of a ledger's name: CHILD, or PARENT/CHILD of one that entered there."""
    *entered_below, child = name.split("/")
    return (entered_below[0] if entered_below else drawn.experiment.tree.parent(child)), child


def _sent(evidence: Evidence, parent: str, kind: str) -> int:
    """Return the bytes that a parent sent to all children: a broadcast chunk for one child reaches
    others, too.
    """
    return sum(link.sent[kind] for (name, _), link in evidence.down.items() if name == parent)


_UNDISTURBED: Final = [
    re.compile(pattern)
    for pattern in (
        r"waits for its children",
        r"no (device|institution) is present",
        r" begins without: ",
        r", declared ",
        r"it wants to enter, and all places are taken",
        r"begins again with other children",
        r"'s model is left out: ",
    )
]
_EXPECTED: Final = [
    *_UNDISTURBED,
    re.compile(r"leaves run"),
    re.compile(r"\(unknown (session|sender)\)"),
    re.compile(r"could not be measured"),
]
_OTHER_RUN: Final = re.compile(r"of another run")
_AWAY: Final = re.compile(r"waits for devices that are away by their traces")
_EXPLAINED: Final = [
    (re.compile(r"\(malformed\)"), {FaultKind.FLIP, FaultKind.STRANGER, FaultKind.LIES}),
    (re.compile(r"\(too large\)"), {FaultKind.STRANGER, FaultKind.LIES}),
    (REFUSED, {FaultKind.LIES}),
    (re.compile(r"costs that cannot be"), {FaultKind.LIES}),
    (re.compile(r"refuses the subscription to"), {FaultKind.UNREAD}),
    (re.compile(r"The run waits for it|no room for|not on the disk"), {FaultKind.DISK}),
    # no broker reorders
    (re.compile(r"drops messages"), {FaultKind.LOSS, FaultKind.MUTE, FaultKind.REORDERING}),
    (re.compile(r"\(too many\)"), {FaultKind.FLOOD, FaultKind.SEEKERS, FaultKind.STRANGER}),
    (
        re.compile(r"\(does not fit\)"),
        {FaultKind.STRANGER, FaultKind.REORDERING, FaultKind.LIES, *RESTARTS},
    ),
]

DISTURBED: Final[Mapping[str, Callable[[DrawnLab, LabRun, LabRun], str]]] = {
    check.__name__: check
    for check in (
        ends_as_documented,
        copes_with_a_loss,
        spends_few_deadlines,
        gives_the_same_model,
        has_no_unhandled_errors,
        does_not_stall,
        leaves_in_time,
        stays_bounded,
        leaves_clean_brokers,
        has_agreeing_ledgers,
        settles_all_results,
        opens_no_child,
        weighs_by_what_is_prepared,
        accounts_for_trainings,
        warns_of_no_bug,
        brings_frozen_arrays_once,
    )
}
UNDISTURBED: Final[Mapping[str, Callable[[DrawnLab, LabRun], str]]] = {
    "undisturbed lab is exact": is_exact,
    "undisturbed lab has no unhandled errors": has_no_unhandled_errors,
}
