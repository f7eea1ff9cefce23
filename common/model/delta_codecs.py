"""Codecs of changes: the arithmetic of one, fedstrata's or the user's own, and the blob that it
makes.

    blob = [ the codec's bytes | float32 buffers | int64 buffers ] [ float32 extras ]

The codec's bytes are of d = x - z: the trainable columns of the model that a node sends, minus
those of the model that it received. The receiver has y = z + C(d). Buffers and extras are always
transferred exactly. A codec encodes all columns at once, or each tensor by itself, and then the
bytes of the tensors lie one after another.

C is unbiased, E[C(d)] = d, or a contraction, ||d - C(d)||^2 <= (1 - delta) ||d||^2 with some delta
> 0. What a contraction leaves out is lost, unless the sender adds it next time
(`common/runtime/upload_encoder.py`).
"""

from __future__ import annotations

from typing import Final

from fedstrata.common.errors import InvalidExperiment, RefusedModel, WireError, described
from fedstrata.common.lazy import np, npt
from fedstrata.common.model.codec_settings import CodecSettings
from fedstrata.common.model.layout import ModelLayout, Row, Section
from fedstrata.common.settings import own
from fedstrata.common.settings.own import OwnName, OwnSettings
from fedstrata.common.settings.tables import OWN

CODEC_KEY: Final = "up.name"
# encoded at once: they, and what becomes of them, fit into a core's cache
PIECE_COLUMNS: Final = 65_536
SCALE_COLUMNS: Final = 1024  # with a scale of their own


class DeltaCodec:
    """The arithmetic of a codec of changes. One's own inherits from it; its keywords are the
    experiment's keys.

    It has no state: methods may be called from any thread. `unbiased`: whether the mean of what it
    decodes, over its random numbers, is the change; else it is a contraction. `by_tensor`: whether
    it encodes each tensor by itself, in exactly `nbytes`: a layer's biases would lose all precision
    with a scale that they share with its weights.
    """

    unbiased: bool = False
    by_tensor: bool = False

    def nbytes(self, columns: int) -> int:
        """Return the most bytes of the change of so many columns."""
        raise NotImplementedError

    def encode(self, delta_D: npt.NDArray[np.float32], chance: np.random.Generator) -> bytes:
        """Return the bytes of a change, float32 [D]. `chance`: of this node and this task, so that
        a run repeats.

        A change with a number that is not finite must give bytes that `decode` refuses, or that
        have such a number.
        """
        raise NotImplementedError

    def decode(self, data: bytes, columns: int) -> npt.NDArray[np.float32]:
        """Return the change, float32 [columns], of bytes from the network, at most `nbytes` of
        them.

        Raises WireError, or ValueError, if they are invalid.
        """
        raise NotImplementedError


class OwnCodec(CodecSettings, OwnSettings):
    """A codec of the user's own; the other keys are its keywords."""

    name: OwnName  # the class, `package.module:Name`

    def build(self) -> DeltaCodec:
        return GuardedCodec(self)


class GuardedCodec(DeltaCodec):
    """The user's codec. An error in it ends the run as InvalidExperiment, or refuses bytes from the
    network.

    What it encodes is decoded at once, at the sender: if that fails, the codec is wrong, not the
    bytes.
    """

    def __init__(self, settings: OwnCodec) -> None:
        self._name = settings.name
        self._codec = own.build(CODEC_KEY, settings, DeltaCodec)
        self.unbiased = self._codec.unbiased
        self.by_tensor = self._codec.by_tensor

    def nbytes(self, columns: int) -> int:
        """Return its number. Raises InvalidExperiment unless it is one."""
        with own.guarded({CODEC_KEY: self._name}):
            most = self._codec.nbytes(columns)
        if not isinstance(most, int) or most < 0:
            own.refuse(
                CODEC_KEY,
                self._name,
                f"nbytes returns {most!r:.100}{own.place(self._codec.nbytes)}",
                "Return a whole number of bytes.",
            )
        return most

    def encode(self, delta_D: npt.NDArray[np.float32], chance: np.random.Generator) -> bytes:
        """Return its bytes. Raises InvalidExperiment unless they are so many as it may have."""
        most = self.nbytes(delta_D.size)
        with own.guarded({CODEC_KEY: self._name}):
            found = self._codec.encode(delta_D, chance)
        if not isinstance(found, bytes):
            problem = f"encode returns {type(found).__name__}{own.place(self._codec.encode)}"
            own.refuse(CODEC_KEY, self._name, problem, "Return bytes.")
        if len(found) > most:
            problem = (
                f"encode returns {len(found)} bytes of {delta_D.size} columns, and nbytes is {most}"
            )
            own.refuse(CODEC_KEY, self._name, problem, "Return the most that it may be in nbytes.")
        if self.by_tensor and len(found) < most:
            problem = (
                f"encode returns {len(found)} bytes of a tensor of {delta_D.size} columns, "
                f"and nbytes is {most}"
            )
            own.refuse(CODEC_KEY, self._name, problem, "Return as many, or omit by_tensor.")
        if np.isfinite(delta_D).all():  # else `decode` may refuse it
            self._check(found, delta_D.size)
        return found

    def _check(self, data: bytes, columns: int) -> None:
        """Check that it decodes its own bytes. Raises InvalidExperiment."""
        with own.guarded({CODEC_KEY: self._name}, everything=True):
            found: object = self._codec.decode(data, columns)
        if problem := _misfit(found, columns):
            at = own.place(self._codec.decode)
            own.refuse(
                CODEC_KEY,
                self._name,
                f"decode returns {problem}{at}",
                "Return as many float32 numbers.",
            )

    def decode(self, data: bytes, columns: int) -> npt.NDArray[np.float32]:
        """Return its change. Raises WireError if it raises ValueError, RefusedModel for whatever
        else it raises.
        """
        try:
            with own.guarded({CODEC_KEY: self._name}, everything=True):
                return self._decode(data, columns)
        except (InvalidExperiment, MemoryError) as error:
            raise RefusedModel(str(error)) from None

    def _decode(self, data: bytes, columns: int) -> npt.NDArray[np.float32]:
        try:
            return self._codec.decode(data, columns)
        except ValueError as error:
            raise WireError(described(error)) from None


class LossyDelta:
    """The codec of blobs with changes, see `common.model.codecs.Codec`; one of the user's own is
    `own` on the wire.
    """

    is_row = False
    exact = False
    delta = True
    fixed = False

    def __init__(self, settings: CodecSettings) -> None:
        self.name = OWN if own.is_own(settings.name) else settings.name
        self._changes = settings.build()

    def size(self, layout: ModelLayout) -> int:
        changes = sum(self._changes.nbytes(each.stop - each.start) for each in self._parts(layout))
        return changes + layout.row_bytes - 4 * layout.parameters

    def encode(
        self,
        layout: ModelLayout,
        row: Row,
        *,
        reference: Row | None = None,
        out: Row | None = None,
        chance: np.random.Generator | None = None,
    ) -> memoryview:
        assert reference is not None and chance is not None, (
            f"{self.name} needs a reference, and random numbers"
        )
        columns = slice(0, layout.parameters)
        with np.errstate(over="ignore", invalid="ignore"):
            delta_D = layout.floats(row)[columns] - layout.floats(reference)[columns]
        changes = b"".join(
            [self._changes.encode(delta_D[each], chance) for each in self._parts(layout)]
        )
        rest = row[4 * layout.parameters : layout.row_bytes]
        size = len(changes) + rest.size
        blob = np.empty(size, np.uint8) if out is None else out[:size]
        blob[: len(changes)] = np.frombuffer(changes, np.uint8)
        blob[len(changes) :] = rest
        return blob.data

    def buffer(self, layout: ModelLayout, row: Row, *, size: int) -> memoryview:
        return np.empty(size, np.uint8).data

    def decode(
        self, layout: ModelLayout, blob: memoryview, row: Row, *, reference: Row | None = None
    ) -> None:
        assert reference is not None, f"{self.name} needs a reference"
        parts = self._parts(layout)
        rest = layout.row_bytes - 4 * layout.parameters
        size = len(blob) - rest
        sizes = [self._changes.nbytes(each.stop - each.start) for each in parts]
        if not 0 <= size <= sum(sizes) or (size < sum(sizes) and self._changes.by_tensor):
            raise WireError(f"a blob of {len(blob)} bytes, which is too short or too long")
        origin_D = layout.floats(reference)
        model_D = layout.floats(row)
        start = 0
        for columns, most in zip(parts, sizes, strict=True):
            stop = min(start + most, size)
            delta_D = self._decoded(bytes(blob[start:stop]), columns.stop - columns.start)
            start = stop
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(origin_D[columns], delta_D, out=model_D[columns])
        row[4 * layout.parameters : layout.row_bytes] = np.frombuffer(blob, np.uint8)[size:]

    def _parts(self, layout: ModelLayout) -> list[slice]:
        """Return the columns that are encoded together: all, or those of each tensor."""
        if not self._changes.by_tensor:
            return [slice(0, layout.parameters)]
        trained = [entry for entry in layout.entries if entry.section is Section.PARAMETER]
        return [slice(entry.start, entry.stop) for entry in trained if entry.stop > entry.start]

    def _decoded(self, data: bytes, columns: int) -> npt.NDArray[np.float32]:
        """Return the change, float32 [columns]. Raises RefusedModel."""
        try:
            delta_D = self._changes.decode(data, columns)
        except ValueError as error:
            raise RefusedModel(str(error)) from None
        if problem := _misfit(delta_D, columns):
            raise RefusedModel(f"decoded to {problem}")
        return delta_D


def _misfit(found: object, columns: int) -> str:
    """Return what was decoded in place of float32 [columns], "" if it is that."""
    if not isinstance(found, np.ndarray):
        return f"{type(found).__name__}, not float32 [{columns}]"
    if found.shape != (columns,) or found.dtype != np.float32:
        return f"{found.dtype} {list(found.shape)}, not float32 [{columns}]"
    return ""


def blocks_of(columns: int) -> int:
    """Return the number of blocks of SCALE_COLUMNS columns, the last one of which may be
    shorter.
    """
    return -(-columns // SCALE_COLUMNS)
