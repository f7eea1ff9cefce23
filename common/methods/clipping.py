"""Lengths of vectors from where they began, and their clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.lazy import np
from common.methods.mixing import Floats, cut, over
from common.methods.statistics import Doubles


def lengths(
    vectors: Sequence[tuple[Floats, Floats | None]], *, release: Callable[[], None] = lambda: None
) -> list[float]:
    """Return ||v - z|| of each v, float32 [D], and z, from where its length is measured; None is zero."""

    def block(columns: slice) -> Doubles:
        squares = []
        for own, origin in vectors:
            step = own[columns].astype(np.float64)
            if origin is not None:
                step -= origin[columns]
            squares.append(step @ step)
        return np.array(squares)

    size = len(vectors[0][0]) if vectors else 0
    squares = over(list(cut(0, size)), block, release=release)
    found: list[float] = np.sqrt(np.sum(squares, axis=0)).tolist() if squares else [0.0] * len(vectors)
    return found


def shorten(own: Floats, origin: Floats | None, share: float, *, release: Callable[[], None] = lambda: None) -> None:
    """Replace a vector v by z + share (v - z)."""

    def block(columns: slice) -> None:
        start = np.float64(0) if origin is None else origin[columns].astype(np.float64)
        own[columns] = start + share * (own[columns] - start)

    over(list(cut(0, len(own))), block, release=release)
