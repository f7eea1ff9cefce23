"""Inputs and outputs of a model: the interface between data sets and models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Inputs:
    """A sample's shape and the number of classes.

    Images have shape (C, H, W) and `tokens` 0, float32 once normalised. Text has shape (L,), int64, below `tokens`.
    """

    shape: tuple[int, ...]
    classes: int
    tokens: int = 0

    def __str__(self) -> str:
        kind = f"rows of {self.shape[0]} tokens" if self.tokens else f"images of {list(self.shape)}"
        return f"{kind} in {self.classes} classes"
