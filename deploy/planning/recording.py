"""Measurement of what a cloud writes after a global round: tables, byte counts and a checkpoint, all on the disk.

Meanwhile the model is evaluated, as in a run: where that takes all cores, each wait for the disk ends later.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Final

from cloud import checkpoint
from cloud.records import GlobalRoundRecord
from cloud.results import RunFolder
from common.accounting.child_report import ChildReport
from common.accounting.counters import Account
from common.accounting.ledger import Ledger
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD
from common.model.layout import ModelLayout, Row
from common.protocol.round_state import GLOBAL_PHASES
from common.storage.states import write_state

REPEATS: Final = 5
ENOUGH_S: Final = 2.0


def record_seconds(
    experiment: Experiment, *, layout: ModelLayout, row: Row, beside: Callable[[], object] = lambda: None
) -> float:
    """Return the seconds of writing the results of a global round, and a checkpoint, into a folder for such files.

    `beside` evaluates a model in another thread.
    """
    tree, seconds = experiment.tree, list[float]()
    below = tree.below_each(CLOUD)
    ledger = Ledger(tree.children[CLOUD], Account(), below=below)
    for child, names in below.items():
        ledger.enter_reports(child, "session", map(ChildReport, names))
    devices = [ChildReport(name) for name in tree.devices]
    with tempfile.TemporaryDirectory(prefix="fedstrata-") as home, ThreadPoolExecutor(1) as evaluator:
        folder = RunFolder.create(Path(home), experiment)
        while len(seconds) < REPEATS and sum(seconds) < ENOUGH_S:
            evaluating = evaluator.submit(beside)
            start = time.perf_counter()
            name = f"round-{len(seconds):06d}"
            folder.add_devices(len(seconds), devices)
            record = GlobalRoundRecord(
                global_round=len(seconds), elapsed_s=0.0, train_loss=None, phases=dict.fromkeys(GLOBAL_PHASES, 0.0),
                sgd_steps=0, path_steps=0, bytes_={}, missing=(), refused=(), epochs={}, omega={}, spread={},
            )  # fmt: skip
            folder.add_round(record)
            folder.event("global_round", record.values())
            folder.write_of_ledger(ledger)()
            folder.sync()
            write_state(folder.checkpoints, name, lambda path: {})
            checkpoint.save_model(folder.checkpoints / f"{name}.safetensors", layout=layout, row=row, facts={})
            seconds.append(time.perf_counter() - start)
            evaluating.result()
        folder.release()
    return median(seconds)
