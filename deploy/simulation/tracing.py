"""Trace of a simulated lab: a line for each message, each fault, and each node that ends."""

from __future__ import annotations

from common.errors import WireError
from common.protocol import serialization, topics
from common.protocol.messages import Ask, Message, Preparing, Presence, Progress, Result, Task, WhoIsThere
from deploy.simulation.broker import Routed
from deploy.simulation.lab import SimulatedLab

TEXT_MOST = 90


def print_trace(lab: SimulatedLab) -> None:
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
        session, content = serialization.decode(message.body) if not _is_chunk(topic) and message.body else ("", None)
    except WireError as error:
        return f"{message.topic} {len(message.body)} bytes: {error}"
    if isinstance(topic, topics.ChunkTopic):
        return f"{topic.node} -> {topic.stream}: chunk {topic.index} of {topic.blob[:6]} no. {topic.number}"
    if isinstance(topic, topics.InboxTopic):
        head = f"{topic.sender}({session[:4]}) -> {topic.node}"
    elif isinstance(topic, topics.SeekTopic):
        head = f"{topic.child}({session[:4]}) seeks {topic.parent}"
    elif isinstance(topic, topics.RollTopic):
        head = f"{topic.asker} calls the roll"
    elif isinstance(topic, topics.HereTopic):
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
        text += f" {content.state} {content.reason[:TEXT_MOST]} {content.answers[:4]}"
    elif isinstance(content, Task | Result):
        inline = " inline" if content.inline is not None else ""
        text += f" {tuple(content.key)} {content.model.blob[:6]} {content.model.chunks} chunks{inline}"
    elif isinstance(content, Progress):
        text += f" {tuple(content.key)} {content.phase} {content.done}/{content.total}"
    elif isinstance(content, Ask):
        restart = " restart" if content.restart else ""
        seen = f"{content.seen_all}/{content.seen_own}"
        text += f" {content.blob[:6]} lacks {content.lacking.hex()} seen {seen}{restart}"
    elif isinstance(content, Preparing | WhoIsThere):
        text = str(content)[:TEXT_MOST]
    else:
        key = getattr(content, "key", None)
        text += f" {tuple(key) if key else ''} {getattr(content, 'reason', '') or getattr(content, 'blob', '')}"
    return text
