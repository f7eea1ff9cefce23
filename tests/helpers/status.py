"""Status records for tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fedstrata.common.protocol.messages import ChildStatus, LinkBytes, NodeState, Status, Step


def child(
    name: str, step: Step = Step.IDLE, *, state: NodeState | None = NodeState.READY, **facts: Any
) -> ChildStatus:
    """Return what a parent reports of a child: nothing done, but for the facts."""
    nothing = dict.fromkeys(("done", "total", "size", "epochs", "up", "down"), 0)
    return ChildStatus(
        name, state, step, **{**nothing, "loss": None, "seconds": 0.0, "text": "", **facts}
    )


def record(
    *children: ChildStatus, at_s: float, tiers: Iterable[tuple[int, int]] = (), **facts: Any
) -> Status:
    """Return a parent's record. `tiers`: bytes up and down of each."""
    usual: dict[str, Any] = {
        "key": None,
        "open": True,
        "measuring": False,
        "others": (),
        "run": None,
    }
    return Status(
        at_s=at_s,
        tiers=tuple(LinkBytes(*each) for each in tiers),
        children=children,
        **usual | facts,
    )
