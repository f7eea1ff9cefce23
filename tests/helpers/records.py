"""Records of global rounds and of devices that nobody trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from fedstrata.cloud.records import DeviceRecord, GlobalRoundRecord
from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.work import TrainingPath
from fedstrata.common.protocol.messages import Result
from fedstrata.common.runtime.round import WorkResult

_Reported = TypeVar("_Reported", WorkResult, Result, ChildReport)

PHASES_S: Final = {
    "record": 0.01,
    "dispatch": 0.2,
    "train": 1.0,
    "wait": 0.3,
    "collect": 0.05,
    "aggregate": 0.02,
    "evaluate": 0.0,
}
BYTES: Final = {"wan_up_bytes": 1_000_003, "wan_down_bytes": 2_000_005, "lan_up_bytes": 30_000_007,
                "lan_down_bytes": 40_000_009}  # fmt: skip


def a_global_round(
    number: int, accuracy: float | None, *, names: Sequence[str] = ()
) -> GlobalRoundRecord:
    """Return a global round with the institutions `names`, each with `number` epochs."""
    return GlobalRoundRecord(
        global_round=number,
        elapsed_s=round(number * sum(PHASES_S.values()), 6),
        accuracy=accuracy,
        loss=None if accuracy is None else 1.5,
        train_loss=0.25,
        phases=PHASES_S,
        sgd_steps=100 * number,
        path_steps=10 * number,
        bytes_=BYTES,
        missing=(),
        refused=(),
        epochs=dict.fromkeys(names, number),
        omega=dict.fromkeys(names),
        spread={},
    )


def a_device(global_round: int, node: str, **more: Any) -> DeviceRecord:
    """Return a device's row of devices.csv: one local round of a step, with other columns as
    given.
    """
    row = DeviceRecord(
        global_round=global_round,
        node=node,
        samples=1,
        local_rounds=1,
        epochs=1,
        sgd_steps=1,
        loss=None,
        train_s=0.0,
        wait_s=0.0,
        pause_s=0.0,
        path=TrainingPath.IN_PROCESS,
    )
    return replace(row, **more)


def with_work(reported: _Reported, **changes: Any) -> _Reported:
    """Return a result or a report whose work has other values."""
    return replace(reported, work=replace(reported.work, **changes))
