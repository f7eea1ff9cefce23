"""Results on their way up: what a node's work has made, encoded as its parent decodes it, with
error feedback.

    x' = x + e;  the blob is of x';  the parent has y;  the next e is x' - y           (Seide et al.
    2014)

over the trainable columns, float32. x is the model that a node would send, e what was left out of
the ones before, zeros at first. A node has one e towards its parent. It is state after a task as
any other: the next task names the one that it follows, so what was left out of a result that was
not used is left out of the next one in its place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedstrata.common.errors import RefusedModel
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.model.codec_settings import CodecSettings
from fedstrata.common.model.codecs import Codec, codec_of
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.protocol.messages import Key
from fedstrata.common.randomness import Purpose, generator
from fedstrata.common.runtime.link_models import decode_row
from fedstrata.common.runtime.round import WorkResult
from fedstrata.common.secure.member import SecureMember


@dataclass(frozen=True)
class UploadEncoder:
    """One node's codec towards its parent; `layout`: of what goes up. A blob is made once for each
    task.
    """

    settings: CodecSettings
    layout: ModelLayout
    seed: int
    node: str

    @classmethod
    def of(cls, experiment: Experiment, node: str, layout: ModelLayout) -> UploadEncoder:
        """Return that of a node of an experiment."""
        return cls(experiment.tier_above(node).transfer.up, layout, experiment.seed, node)

    @property
    def kept_columns(self) -> int:
        """The columns of e: all trainable ones with feedback, none without."""
        if self.settings.feedback:
            return self.layout.parameters
        return 0

    @cached_property
    def codec(self) -> Codec:
        """The codec. Raises InvalidExperiment for own code."""
        return codec_of(self.settings)

    def encode(
        self, row: Row, *, received: Row, task: int, left_out: npt.NDArray[np.float32]
    ) -> memoryview:
        """Return the blob of a model, which may share the row's memory.

        `received`: the task's model. `task`: its number in the run. `left_out`: e, float32
        [kept_columns], which becomes the next one. If that is not finite, or the parent refuses the
        model, it becomes zeros: else it would spoil all later ones.
        """
        if not left_out.size:
            return self._encode(row, received, task)
        wanted = row.copy()
        got = self.layout.empty()
        columns = slice(0, self.layout.parameters)
        with np.errstate(over="ignore", invalid="ignore"):
            self.layout.floats(wanted)[columns] += left_out
            blob = self._encode(wanted, received, task)
            try:
                decode_row(self.codec, self.layout, blob, got, received)
            except RefusedModel:
                left_out[:] = 0
                return blob
            np.subtract(
                self.layout.floats(wanted)[columns], self.layout.floats(got)[columns], out=left_out
            )
            if not np.isfinite(left_out).all():
                left_out[:] = 0
        return blob

    def decoded(self, row: Row, *, received: Row, task: int) -> Row:
        """Return a model as the parent decodes it, without feedback. Raises RefusedModel if it
        refuses it.
        """
        if self.codec.exact:
            return row
        got = self.layout.empty()
        decode_row(self.codec, self.layout, self._encode(row, received, task), got, received)
        return got

    def _encode(self, row: Row, received: Row, task: int) -> memoryview:
        chance = generator(self.seed, Purpose.CODEC, self.node, task) if self.codec.delta else None
        return self.codec.encode(self.layout, row, reference=received, chance=chance)


def hidden(member: SecureMember, key: Key, result: WorkResult, *, received: Row) -> WorkResult:
    """Return a task's result with its model masked for a secure sum; its losses are in the sum.

    What cannot be in one is withdrawn.
    """
    work = result.work
    children = tuple(
        replace(report, work=replace(report.work, loss=None)) for report in result.children
    )
    shown = replace(result, work=replace(work, loss=None), children=children, start_loss=None)
    row = np.frombuffer(result.blob, np.uint8)
    try:
        words = member.masked(key, row, received, samples=work.samples, loss=work.loss)
    except RefusedModel as error:
        return replace(shown, blob=memoryview(b""), withdrawn=str(error))
    return replace(shown, blob=words.data)
