"""Status records for tests."""

from __future__ import annotations

from common.protocol.messages import ChildCount, ChildStatus, Key, LinkBytes, NodeState, RunStatus, Status, Step


def child(
    name: str,
    step: Step = Step.IDLE,
    *,
    state: NodeState | None = NodeState.READY,
    done: int = 0,
    total: int = 0,
    size: int = 0,
    epochs: int = 0,
    up: int = 0,
    down: int = 0,
    loss: float | None = None,
    seconds: float = 0.0,
    text: str = "",
) -> ChildStatus:
    return ChildStatus(name, state, step, done, total, size, epochs, up, down, loss, seconds, text)


def record(
    *children: ChildStatus,
    at_s: float,
    key: Key | None = None,
    open: bool = True,  # noqa: A002 - the field's name
    tiers: tuple[tuple[int, int], ...] = (),
    others: tuple[ChildCount, ...] = (),
    run: RunStatus | None = None,
) -> Status:
    return Status(at_s, key, open, False, tuple(LinkBytes(*each) for each in tiers), children, others, run)
