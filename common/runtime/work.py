"""The result of a child's task."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from common.accounting.child_report import ChildReport, TrainingPath
from common.model.layout import Row
from common.protocol.messages import Manifest, Phase, Result, Task
from common.runtime.arriving import Arriving
from common.text import JSON_MOST

log = logging.getLogger("fedstrata.work")


@dataclass(frozen=True, slots=True)
class WorkResult:
    """The result of a task: a flat model, uint8 [row_bytes], and its costs. Seconds by this node's clock.

    For `path_steps` (None: as `steps`), `plans` and `path` see the message Result.
    """

    row: Row
    samples: int
    loss: float
    epochs: int
    steps: int
    train_s: float
    wait_s: float
    pause_s: float = 0.0
    path_steps: int | None = None
    children: tuple[ChildReport, ...] = ()
    plans: Mapping[str, Sequence[Mapping[str, object]]] = field(default_factory=dict)
    path: TrainingPath = TrainingPath.NONE

    def announcement(self, task: Task, model: Manifest, inline: bytes | None = None) -> Result:
        """Return the result announcement; `model` is the manifest of the row's blob."""
        plans = json.dumps(self.plans) if self.plans else ""
        if len(plans) > JSON_MOST:
            log.warning("the decisions of %d rules are not reported: %d characters", len(self.plans), len(plans))
            plans = ""
        return Result(
            task.key, model, inline, self.samples, float(self.loss), self.epochs, self.steps,
            self.steps if self.path_steps is None else self.path_steps,
            float(self.train_s), float(self.wait_s), float(self.pause_s), self.children,
            plans, path=self.path,
        )  # fmt: skip


Report: TypeAlias = Callable[[Phase, int, int], None]
Work: TypeAlias = Callable[[Task, Arriving, Report], Awaitable[WorkResult]]
