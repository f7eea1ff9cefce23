"""Text about drawn labs: descriptions, violations, summaries, and a trace of one lab's messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from fedstrata.common.errors import WireError
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.experiment.tiers import Tier
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import (
    Ask,
    Message,
    Preparing,
    Presence,
    Progress,
    Question,
    Result,
    Task,
)
from fedstrata.common.settings.closing import Closing
from fedstrata.deploy.simulation.simulated_broker import Routed
from tests.simulation.drawn import DrawnLab
from tests.simulation.fault_draws import LASTING
from tests.simulation.faults import FaultKind
from tests.simulation.lab import ScenarioLab
from tests.simulation.runs import LabReport

TEXT_MOST = 600
DETAIL_MOST = 90


def print_report(report: LabReport) -> None:
    """Print a lab's violations, its faults and the command that repeats it."""
    drawn = report.drawn
    print(f"{drawn.title}: {'VIOLATED' if report.violations else 'holds'}")
    for name, wrong in report.violations:
        print(f"  {name}: {wrong[:TEXT_MOST]}")
    if report.violations:
        print(describe(drawn))
        source = f"--lab {drawn.name}" if drawn.name else f"--seed {drawn.seed}"
        print(f"  python -m tests.simulation {source} --trace", flush=True)


def describe(drawn: DrawnLab) -> str:
    """Return a description of a lab and its faults."""
    experiment = drawn.experiment
    tiers, transfer = experiment.tiers, experiment.transfer

    def each(text: Callable[[Tier], object]) -> str:
        return "/".join(str(text(tier)) for tier in tiers)

    rounds = " x ".join(map(str, (experiment.rounds, *(tier.rounds for tier in tiers[1:]))))
    lines = [
        f"  {experiment.sizes()[-1]} devices, "
        f"{'a broker each' if drawn.broker_each else 'one broker'}, "
        f"{rounds} rounds, about {drawn.expected_s:.0f} s"
        f"{f', {drawn.runs} runs' if drawn.runs > 1 else ''}{f', {drawn.byte_s:g} s a byte' if drawn.byte_s else ''}",
        f"  {each(lambda tier: tier.aggregation.name)}, closing "
        f"{each(lambda tier: _closing(tier.closing))}, "
        f"participation {each(lambda tier: f'{tier.participation:g}')}, "
        f"{experiment.cloud.epoch_control.name}",
        f"  model {drawn.model_bytes} B, inline {transfer.inline_bytes}, chunks "
        f"{transfer.chunk_bytes}, idle "
        f"{transfer.idle_s:g} s, keep-alive {transfer.keepalive_s} s, codecs {each(_codec)}, "
        f"{'files' if drawn.spool else 'no files'}, train {drawn.durations.train_s:g} s",
        *_absences(experiment),
        *(f"  [{place}] {fault}" for place, fault in enumerate(drawn.faults)),
    ]
    return "\n".join(lines)


def _codec(tier: Tier) -> str:
    up = tier.transfer.up
    return up.name + " with feedback" * up.feedback


def _absences(experiment: Experiment) -> list[str]:
    trace = experiment.availability.trace
    found = {} if trace is None else trace.changes
    return [
        f"  {device} comes, leaves, comes ... at {', '.join(map(str, times))} s"
        for device, times in found.items()
    ]


def _closing(closing: Closing) -> str:
    return (
        closing.rule
        if closing.quorum is None
        else f"quorum {closing.quorum} after {closing.deadline_s:.1f} s"
    )


def summary(reports: Sequence[LabReport], *, real_s: float) -> str:
    """Return a summary of many labs."""
    labs, virtual_s = (
        sum(report.labs for report in reports),
        sum(report.virtual_s for report in reports),
    )
    busy_s = sum(report.real_s for report in reports)
    drawn = Counter(
        (fault.kind, fault.permanent) for report in reports for fault in report.drawn.faults
    )
    kinds = Counter(kind for report in reports for kind in _members(report))
    violated = [report.drawn.title for report in reports if report.violations]
    lines = [
        f"{len(reports)} drawn, {labs} labs in {real_s:.0f} s: {labs / max(real_s, 1e-9):.1f} "
        "labs a second, "
        f"{labs / max(busy_s, 1e-9):.1f} a second and process; {virtual_s / 3600:.1f} virtual "
        "hours",
        f"{sum(report.failed for report in reports)} labs ended with a documented error, "
        f"{len(violated)} violate "
        f"an invariant{': ' + ', '.join(violated) if violated else ''}",
        f"{sum(report.drawn.has_everything for report in reports)} have a trainer, its state, "
        "absences, and deaths of "
        "nodes and workers together",
        *(f"  {drawn[kind, False]:6d}  {kind.value}" for kind in FaultKind),
        *(f"  {drawn[kind, True]:6d}  {kind.value}, permanent" for kind in LASTING),
        *(f"  {count:6d}  labs with {kind}" for kind, count in sorted(kinds.items())),
    ]
    return "\n".join(lines)


def _members(report: LabReport) -> set[str]:
    """Return what members, guests and clients have done in a lab."""
    drawn, faults = report.drawn, report.drawn.faults
    found = {f"lies about {subject}" for subject in report.lies}
    places = drawn.experiment.tiers[-1].entering or 0
    if sum(fault.kind is FaultKind.VISIT for fault in faults) > places:
        found.add("more guests than places")
    own = not drawn.experiment.training.trainer.learns_module
    killed = {fault.node for fault in faults if fault.kind is FaultKind.KILL}
    if killed & set(drawn.experiment.tree.devices):
        found.add("clients of an own trainer that die" if own else "devices that die")
    return found


def print_trace(lab: ScenarioLab) -> None:
    """Print every routed message, every fault, and every node that ends."""
    seen = {"faults": 0}
    ended: dict[str, str] = {}

    def hook(message: Routed) -> None:
        for at, fault in lab.faults[seen["faults"] :]:
            print(f"{at:9.3f} --- {fault}")
        seen["faults"] = len(lab.faults)
        for node, error in lab.ended.items():
            if ended.get(node) != error:
                ended[node] = error
                print(f"{lab.now():9.3f} === {node} ended {error}")
        print(f"{lab.now():9.3f} {message.broker[:13]:13} {line(message)}")

    lab.network.hooks.append(hook)


def line(message: Routed) -> str:
    """Return one line for a message."""
    try:
        topic = topics.parse(message.topic)
        session, content = (
            serialization.decode(message.body)
            if not _is_chunk(topic) and message.body
            else ("", None)
        )
    except WireError as error:
        return f"{message.topic} {len(message.body)} bytes: {error}"
    if isinstance(topic, topics.ChunkTopic):
        return (
            f"{topic.node} -> {topic.stream}: chunk {topic.index} of {topic.blob[:6]} no. "
            f"{topic.number}"
        )
    if isinstance(topic, topics.InboxTopic):
        head = f"{topic.sender}({session[:4]}) -> {topic.node}"
    elif isinstance(topic, topics.AskTopic):
        head = f"{topic.asker}({session[:4]}) asks {topic.node}"
    elif isinstance(topic, topics.AnswerTopic):
        head = f"{topic.node}({session[:4]}) -> {topic.asker}"
    else:
        head = f"{topic.node}({session[:4]}) {'retains' if message.retain else 'publishes'}"
    return f"{head}: {_brief(content)}"


def _is_chunk(topic: topics.Topic) -> bool:
    return isinstance(topic, topics.ChunkTopic)


def _brief(content: Message | None) -> str:
    if content is None:
        return "nothing"
    text = type(content).__name__
    if isinstance(content, Presence):
        text += f" {content.state} {content.reason[:DETAIL_MOST]} {content.answers[:4]}"
    elif isinstance(content, Task | Result):
        inline = " inline" if content.inline is not None else ""
        text += (
            f" {tuple(content.key)} {content.model.blob[:6]} {content.model.chunks} chunks{inline}"
        )
    elif isinstance(content, Progress):
        text += f" {tuple(content.key)} {content.phase} {content.done}/{content.total}"
    elif isinstance(content, Ask):
        restart = " restart" if content.restart else ""
        seen = f"{content.seen_all}/{content.seen_own}"
        text += f" {content.blob[:6]} lacks {content.lacking.hex()} seen {seen}{restart}"
    elif isinstance(content, Preparing | Question):
        text = str(content)[:DETAIL_MOST]
    else:
        key = getattr(content, "key", None)
        text += (
            f" {tuple(key) if key else ''} "
            f"{getattr(content, 'reason', '') or getattr(content, 'blob', '')}"
        )
    return text
