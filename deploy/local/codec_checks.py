"""What a codec of the user's own must do before a lab relies on it, and what the tests ask of fedstrata's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from common.errors import InvalidExperiment, RefusedModel, WireError
from common.experiment.codecs import CodecSettings
from common.model.delta_codecs import DeltaCodec

WIDTHS: Final = (1, 2, 63, 1025, 5000)
MEANS: Final = 400  # encodings of a change, of which the mean is taken
FEW: Final = 63  # columns of it
SIGMAS: Final = 6.0
GARBAGE: Final = 200


def of(settings: CodecSettings) -> Iterator[tuple[str, str]]:
    """Yield each item and its problem, "" for none. Raises InvalidExperiment if the codec fails in encoding."""
    codec = settings.build()
    changes = [_change(i, columns) for i, columns in enumerate(WIDTHS)]
    yield "sizes", next(filter(None, (_wrong_size(codec, delta_D) for delta_D in changes)), "")
    yield "the same twice", next(filter(None, (_differs(codec, delta_D) for delta_D in changes)), "")
    if codec.unbiased:
        yield "unbiased", _bias(codec, _change(9, FEW))
    else:
        yield "a contraction", next(filter(None, (_grows(codec, delta_D) for delta_D in changes)), "")
    yield "any bytes", next(filter(None, (_fails(codec, columns) for columns in WIDTHS)), "")
    yield "numbers that are not finite", next(filter(None, (_hides(codec, value) for value in (np.nan, np.inf))), "")


def _change(seed: int, columns: int) -> npt.NDArray[np.float32]:
    return (1e-3 * np.random.default_rng(seed).laplace(size=columns)).astype(np.float32)


def _chance(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def _decoded(codec: DeltaCodec, delta_D: npt.NDArray[np.float32], seed: int = 0) -> npt.NDArray[np.float64]:
    return codec.decode(codec.encode(delta_D.copy(), _chance(seed)), delta_D.size).astype(np.float64)


def _wrong_size(codec: DeltaCodec, delta_D: npt.NDArray[np.float32]) -> str:
    columns = delta_D.size
    found = codec.decode(codec.encode(delta_D.copy(), _chance()), columns)
    if not isinstance(found, np.ndarray) or found.shape != (columns,) or found.dtype != np.float32:
        shape = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
        return f"decode returns {shape}, not float32 [{columns}]"
    return ""


def _differs(codec: DeltaCodec, delta_D: npt.NDArray[np.float32]) -> str:
    same = codec.encode(delta_D.copy(), _chance(5)) == codec.encode(delta_D.copy(), _chance(5))
    return "" if same else "its bytes differ; draw random numbers from `chance`"


def _grows(codec: DeltaCodec, delta_D: npt.NDArray[np.float32]) -> str:
    d = delta_D.astype(np.float64)
    share = np.sum((d - _decoded(codec, delta_D)) ** 2) / np.sum(d**2)
    return f"of {d.size} columns it leaves out {share:.4g} times what there is" if not share < 1 else ""


def _bias(codec: DeltaCodec, delta_D: npt.NDArray[np.float32]) -> str:
    found = np.array([_decoded(codec, delta_D, seed) for seed in range(MEANS)])
    apart = np.abs(found.mean(axis=0) - delta_D)
    allowed = SIGMAS * found.std(axis=0).max() / np.sqrt(MEANS) + 1e-4 * np.abs(delta_D).max()
    if (apart <= allowed).all():
        return ""
    share = apart.max() / np.abs(delta_D).max()
    return f"the mean of {MEANS} decoded changes differs from the change by {share:.2g} of its largest column"


def _fails(codec: DeltaCodec, columns: int) -> str:
    """Return why bytes from the network are not handled: each gives a change, WireError or ValueError."""
    draw, most = np.random.default_rng(columns), codec.nbytes(columns)
    sound = codec.encode(_change(1, columns), _chance())
    tried = [sound[: draw.integers(len(sound) + 1)] for _ in range(GARBAGE // 4)]
    tried += [draw.bytes(int(draw.integers(most + 1))) for _ in range(GARBAGE // 2)]
    for _ in range(GARBAGE // 4 if sound else 0):
        flipped = bytearray(sound)
        flipped[draw.integers(len(sound))] ^= 1 << int(draw.integers(8))
        tried.append(bytes(flipped))
    for data in tried:
        try:
            found = codec.decode(data, columns)
        except (WireError, ValueError):
            continue
        except RefusedModel as error:
            return f"decode must raise ValueError for {len(data)} bytes that are invalid: {error}"
        if not isinstance(found, np.ndarray) or found.shape != (columns,) or found.dtype != np.float32:
            return f"decode returns no float32 [{columns}] of {len(data)} invalid bytes"
    return ""


def _hides(codec: DeltaCodec, value: float) -> str:
    """Return why a model that diverged would not be refused."""
    delta_D = _change(2, 1025)
    delta_D[700] = value
    try:
        with np.errstate(all="ignore"):
            found = codec.decode(codec.encode(delta_D, _chance()), delta_D.size)
    except (WireError, ValueError, RefusedModel, InvalidExperiment):
        return ""
    hides = np.isfinite(found).all()
    return f"a change with {value} is decoded to finite numbers, so the parent would use it" if hides else ""
