"""Codecs of changes: the arithmetic of one, fedstrata's or the user's own, and the blob that it makes.

    blob = [ the codec's bytes | float32 buffers | int64 buffers ] [ float32 extras ]

The codec's bytes are of d = x - z: the trainable columns of the model that a node sends, minus those of the model that
it received. The receiver has y = z + C(d). Buffers and extras are always transferred exactly.

C is unbiased, E[C(d)] = d, or a contraction, ||d - C(d)||^2 <= (1 - delta) ||d||^2 with some delta > 0. What a
contraction leaves out is lost, unless the sender adds it next time (`common/runtime/uploads.py`).
"""

from __future__ import annotations

from typing import Final

from common.errors import InvalidExperiment, RefusedModel, WireError, described
from common.experiment import own
from common.experiment.codecs import CodecSettings
from common.experiment.own import OwnName, OwnSettings
from common.experiment.tables import OWN
from common.lazy import np, npt
from common.model.layout import ModelLayout, Row

KEY: Final = "up.name"
PIECE_COLUMNS: Final = 65_536  # encoded at once: they, and what becomes of them, fit into a core's cache
SCALE_COLUMNS: Final = 1024  # with a scale of their own


class DeltaCodec:
    """The arithmetic of a codec of changes. One's own inherits from it; its keywords are the experiment's keys.

    It has no state: methods may be called from any thread. `unbiased`: whether the mean of what it decodes, over its
    random numbers, is the change; else it is a contraction.
    """

    unbiased: bool = False

    def nbytes(self, columns: int) -> int:
        """Return the most bytes of the change of so many columns."""
        raise NotImplementedError

    def encode(self, delta_D: npt.NDArray[np.float32], chance: np.random.Generator) -> bytes:
        """Return the bytes of a change, float32 [D]. `chance`: of this node and this task, so that a run repeats.

        A change with a number that is not finite must give bytes that `decode` refuses, or that have such a number.
        """
        raise NotImplementedError

    def decode(self, data: bytes, columns: int) -> npt.NDArray[np.float32]:
        """Return the change, float32 [columns], of bytes from the network, at most `nbytes` of them.

        Raises WireError, or ValueError, if they are invalid.
        """
        raise NotImplementedError


class OwnCodec(CodecSettings, OwnSettings):
    """A codec of the user's own; the other keys are its keywords."""

    name: OwnName  # the class, `package.module:Name`

    def build(self) -> DeltaCodec:
        return GuardedCodec(self)


class GuardedCodec(DeltaCodec):
    """The user's codec. An error in it ends the run as InvalidExperiment, or refuses the bytes that it decodes."""

    def __init__(self, settings: OwnCodec) -> None:
        self._name = settings.name
        self._codec = own.build(KEY, settings, DeltaCodec)
        self.unbiased = self._codec.unbiased

    def nbytes(self, columns: int) -> int:
        """Return its number. Raises InvalidExperiment unless it is one."""
        with own.guarded({KEY: self._name}):
            most = self._codec.nbytes(columns)
        if not isinstance(most, int) or most < 0:
            own.refuse(KEY, self._name, f"nbytes returns {most!r:.100}", "Return a whole number of bytes.")
        return most

    def encode(self, delta_D: npt.NDArray[np.float32], chance: np.random.Generator) -> bytes:
        """Return its bytes. Raises InvalidExperiment unless they are so many as it may have."""
        most = self.nbytes(delta_D.size)
        with own.guarded({KEY: self._name}):
            found = self._codec.encode(delta_D, chance)
        if not isinstance(found, bytes):
            own.refuse(KEY, self._name, f"encode returns {type(found).__name__}", "Return bytes.")
        if len(found) > most:
            problem = f"encode returns {len(found)} bytes of {delta_D.size} columns, and nbytes is {most}"
            own.refuse(KEY, self._name, problem, "Return the most that it may be in nbytes.")
        return found

    def decode(self, data: bytes, columns: int) -> npt.NDArray[np.float32]:
        """Return its change. Raises WireError if it raises ValueError, RefusedModel for whatever else it raises."""
        try:
            with own.guarded({KEY: self._name}, everything=True):
                return self._decode(data, columns)
        except (InvalidExperiment, MemoryError) as error:
            raise RefusedModel(str(error)) from None

    def _decode(self, data: bytes, columns: int) -> npt.NDArray[np.float32]:
        try:
            return self._codec.decode(data, columns)
        except ValueError as error:
            raise WireError(described(error)) from None


class LossyDelta:
    """The codec of blobs with changes, see `common.model.codecs.Codec`; one of the user's own is `own` on the wire."""

    is_row, exact, delta, fixed = False, False, True, False

    def __init__(self, settings: CodecSettings) -> None:
        self.name = OWN if own.is_own(settings.name) else settings.name
        self._changes = settings.build()

    def size(self, layout: ModelLayout) -> int:
        return self._changes.nbytes(layout.parameters) + layout.row_bytes - 4 * layout.parameters

    def encode(
        self,
        layout: ModelLayout,
        row: Row,
        *,
        reference: Row | None = None,
        out: Row | None = None,
        chance: np.random.Generator | None = None,
    ) -> memoryview:
        assert reference is not None and chance is not None, f"{self.name} needs a reference, and random numbers"
        columns = slice(0, layout.parameters)
        with np.errstate(over="ignore", invalid="ignore"):
            delta_D = layout.floats(row)[columns] - layout.floats(reference)[columns]
        changes = self._changes.encode(delta_D, chance)
        rest = row[4 * layout.parameters : layout.row_bytes]
        size = len(changes) + rest.size
        blob = np.empty(size, np.uint8) if out is None else out[:size]
        blob[: len(changes)] = np.frombuffer(changes, np.uint8)
        blob[len(changes) :] = rest
        return blob.data

    def buffer(self, layout: ModelLayout, row: Row, *, size: int) -> memoryview:
        return np.empty(size, np.uint8).data

    def decode(self, layout: ModelLayout, blob: memoryview, row: Row, *, reference: Row | None = None) -> None:
        assert reference is not None, f"{self.name} needs a reference"
        columns = slice(0, layout.parameters)
        rest = layout.row_bytes - 4 * layout.parameters
        size = len(blob) - rest
        if not 0 <= size <= self._changes.nbytes(layout.parameters):
            raise WireError(f"a blob of {len(blob)} bytes, which is too short or too long")
        try:
            delta_D = self._changes.decode(bytes(blob[:size]), layout.parameters)
        except ValueError as error:
            raise RefusedModel(str(error)) from None
        if not isinstance(delta_D, np.ndarray) or delta_D.shape != (layout.parameters,) or delta_D.dtype != np.float32:
            what = f"{delta_D.dtype} {list(delta_D.shape)}" if isinstance(delta_D, np.ndarray) else type(delta_D)
            raise RefusedModel(f"decoded to {what}, not to float32 [{layout.parameters}]")
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(layout.floats(reference)[columns], delta_D, out=layout.floats(row)[columns])
        row[4 * layout.parameters : layout.row_bytes] = np.frombuffer(blob, np.uint8)[size:]


def blocks_of(columns: int) -> int:
    """Return the number of blocks of SCALE_COLUMNS columns, the last one of which may be shorter."""
    return -(-columns // SCALE_COLUMNS)
