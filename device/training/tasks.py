"""A device's tasks: from the model received to an order for its trainer, and from there to a result
with its costs.

What a device keeps from task to task is its state: the vectors of its objective, the folder of its
trainer, and what its codec has left out of its results. A task names the one whose state it
follows: the parent may repeat a task after a restart, or not use a result. So the states of all
devices and that of their parent belong together, whoever was killed.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedstrata.common.accounting.work import Work
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.methods.adversary import Adversary
from fedstrata.common.methods.private import NoiseSource, PrivateUpdates, no_secret
from fedstrata.common.methods.rule import link_layouts
from fedstrata.common.model.layout import LinkLayouts, Row
from fedstrata.common.processes.shared_rows import new_row
from fedstrata.common.protocol.messages import Task
from fedstrata.common.runtime.round import NOTES, NUMBERS, WorkResult
from fedstrata.common.runtime.upload_encoder import UploadEncoder, hidden
from fedstrata.common.secure.links import member_of
from fedstrata.common.storage.spool import Spool
from fedstrata.common.storage.states import TaskStates
from fedstrata.device.jobs import LocalResult, Order, Prepared, Progress, TrainerFolder

FILE: Final = "vectors"
OWN: Final = "own"  # the trainer's folder, within a state
STATE: Final = "what this device kept"


class LocalWork:
    """A device's part in one run; each result overwrites the model of the previous one. `states`:
    what it keeps.

    A task is done by `order`, training, `result`, `encoded` and `keep`.

    `secret`: the device's own, for noise. `noise`: random bytes of the system.
    """

    def __init__(
        self,
        experiment: Experiment,
        node: str,
        prepared: Prepared,
        *,
        states: Spool,
        secret: Callable[[], bytes] = no_secret,
        noise: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._experiment = experiment
        self._node = node
        self._adversary = experiment.attackers.adversary(node)
        self.prepared = prepared
        self.layouts = link_layouts(experiment.tier_above(node).aggregation, prepared.layout)
        self._encoder = UploadEncoder.of(experiment, node, self.layouts.up)
        # its part in the sums of its parent, if these are secure
        self.member = member_of(experiment, node, prepared.layout, noise=noise)
        self._memory = DeviceMemory(
            self.layouts,
            kept_bytes=prepared.kept_bytes,
            rounds=experiment.device_rounds,
            rounds_back=experiment.cloud.rounds_back,
            spool=states,
            keeps_folder=prepared.folder,
            left_out_columns=self._encoder.kept_columns,
        )
        privacy = experiment.tier_above(node).privacy
        model = prepared.layout
        source = NoiseSource(privacy, seed=experiment.seed, node=node, secret=secret)
        self._updates = PrivateUpdates(privacy, model, source) if privacy.by_child else None
        self._steps = source if privacy.on_samples else None

    @property
    def keeps(self) -> bool:
        """Whether the device has state that persists between its tasks."""
        return self.prepared.keeps or self._encoder.kept_columns > 0

    def order(self, task: Task, row: Row, progress: Progress) -> Order | WorkResult:
        """Return the order of a task for the model in `row`, uint8 [row_bytes]: train it, or only
        score it.

        Without either return the result. Raises StateLost.
        """
        experiment = self._experiment
        memory = self._memory
        key = task.key
        trains = task.epochs > 0
        place = {"global_round": key.global_round, "local_round": key.local_round}
        scores = experiment.scores(self._node, **place, last=not trains)
        if not trains and not scores:
            return WorkResult(memoryview(b""), Work(self.prepared.samples))
        number = memory.number(task)
        noise = b"" if self._steps is None or not trains else self._steps.key(number, [row])
        return Order(
            memory.begin(task, row),
            memory.out,
            task.epochs,
            number,
            progress,
            scores=scores,
            scores_trained=trains and experiment.scores_trained(self._node, **place),
            folder=memory.folder,
            noise=noise,
        )

    def result(self, result: LocalResult) -> WorkResult:
        """Return the result of a task's order: the work, and no blob yet."""
        plans: dict[str, list[dict[str, object]]] = {}
        if result.numbers or result.notes:
            noted = {NOTES: list(result.notes)} if result.notes else {}
            plans[self._node] = [{NUMBERS: result.numbers, **noted}]
        return WorkResult(memoryview(b""), result.work, plans=plans, start_loss=result.start_loss)

    def encoded(self, task: Task, result: WorkResult, received: Row) -> WorkResult:
        """Return a task's result with the blob of the trained model and its extras; `received`: the
        task's model.

        Once for each training: it changes what the codec has left out.
        """
        memory = self._memory
        number = memory.number(task)
        left_out = memory.left_out
        if self._updates is not None:
            self._updates.protect(received, memory.result, number=number)
        if self._adversary is not None and self._adversary.acts(number):
            result = self._attacked(self._adversary, number, result, received)
        blob = self._encoder.encode(
            memory.result, received=received, task=number, left_out=left_out
        )
        result = replace(result, blob=blob)
        if self.member is None:
            return result
        return hidden(self.member, task.key, result, received=received)

    def delay_s(self, task: Task) -> float:
        """Return the seconds for which an adversary holds a task's result back, infinite if it
        sends none.
        """
        if self._adversary is None or not task.epochs:
            return 0.0
        return self._adversary.delay_s(self._memory.number(task))

    def _attacked(
        self, adversary: Adversary, number: int, result: WorkResult, received: Row
    ) -> WorkResult:
        """Write what an adversary sends over the trained model, which nothing protects any more;
        return its report.
        """
        model = self.prepared.layout
        if not adversary.hosted:
            trained_D, received_D = (
                model.floats(row)[: model.parameters] for row in (self._memory.result, received)
            )
            trained_D[:] = adversary.uploaded(number, trained_D, received_D)
        samples, loss = adversary.reported(result.work.samples, result.work.loss)
        return replace(result, work=replace(result.work, samples=samples, loss=loss))

    def keep(self, task: Task) -> None:
        """Keep the state that a task's training has left, for the next one. Raises
        StorageFailed.
        """
        self._memory.end(task)


class DeviceMemory:
    """One device's rows in one run: `out` is written by its training, `result` is the part for its
    parent.

    `kept_bytes`: of the vectors that persist, behind the others in a row. `left_out`, float32
    [left_out_columns], which encoding changes, persists, and so does `folder`, which a training
    changes, with `keeps_folder`. `rounds`: local rounds in each global round; `rounds_back`: global
    rounds that the cloud may return.
    """

    folder: TrainerFolder | None = None  # of the task that has begun, with `keeps_folder`

    def __init__(
        self,
        layouts: LinkLayouts,
        *,
        kept_bytes: int,
        rounds: int,
        rounds_back: int,
        spool: Spool,
        keeps_folder: bool = False,
        left_out_columns: int = 0,
    ) -> None:
        written = layouts.up.row_bytes + kept_bytes
        whole = new_row(written + 4 * left_out_columns)
        self.out: Row = whole[:written]
        self.result: Row = self.out[: layouts.up.row_bytes]
        self.left_out = whole[written:].view(np.float32)
        self._kept = whole[layouts.up.row_bytes :]
        self._kept_bytes = kept_bytes
        row_bytes = layouts.down.row_bytes + kept_bytes
        self._row = new_row(row_bytes * bool(kept_bytes))
        self._states: TaskStates | None = None
        if self._kept.size or keeps_folder:
            self._states = TaskStates(
                spool.states(), rounds_back=rounds_back, what=STATE, who="devices"
            )
        self._own = spool.states() / OWN if keeps_folder else None
        self._rounds = rounds
        self._last = 0, self._kept.copy()

    def number(self, task: Task) -> int:
        """Return the number of a task's local round in the run, from 0."""
        return task.key.global_round * self._rounds + task.key.local_round

    def begin(self, task: Task, received: Row) -> Row:
        """Return the row of a task: what was received, and the vectors kept. Raises StateLost if
        the state is lost.
        """
        if self._states is None:
            return received
        kept = self._after(self._states, task.follows)
        if not self._kept.size:
            return received
        self.left_out[:] = kept[self._kept_bytes :].view(np.float32)
        if not self._kept_bytes:
            return received
        self._row[: received.size] = received
        self._row[received.size :] = kept[: self._kept_bytes]
        return self._row

    def end(self, task: Task) -> None:
        """Keep the state that the task's training has left. Raises StorageFailed."""
        if self._states is None:
            return
        number = self.number(task) + 1
        self._states.write(
            number, self._save, follows=task.follows, global_round=task.key.global_round
        )
        self._last = number, self._kept.copy()

    def _save(self, folder: Path) -> dict[str, object]:
        if self._kept.size:
            (folder / FILE).write_bytes(self._kept.data)
        if self.folder is not None:
            shutil.copytree(self.folder.after, folder / OWN, symlinks=True)
        return {}

    def _after(self, states: TaskStates, task: int) -> Row:
        """Return the vectors, and what was left out, after a task, counted from 1; zeros before the
        first one.

        The trainer's folder begins as it was then.
        """
        last, row = self._last
        before: Path | None = None
        if task != last:
            row = np.zeros_like(self._kept)

        def read(folder: Path, _: Mapping[str, Any]) -> None:
            nonlocal before
            before = folder / OWN
            if task != last and self._kept.size:
                row[:] = np.fromfile(folder / FILE, np.uint8)

        if task and (task != last or self._own is not None):
            states.read(task, read)
        self.folder = None if self._own is None else TrainerFolder(before, self._own)
        return row
