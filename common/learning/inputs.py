"""Inputs and outputs of a model: the interface between data sets and models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Inputs:
    """A sample's shape, and the number of classes, or of the numbers to predict: a model's outputs.

    Images have shape (C, H, W), rows of a table (F,), own data any, with `tokens` 0, float32 once
    normalised. Text has shape (L,), int64, below `tokens`.
    """

    shape: tuple[int, ...]
    classes: int
    tokens: int = 0
    numbers: bool = False

    @property
    def are_images(self) -> bool:
        """Whether a sample is (C, H, W)."""
        return not self.tokens and len(self.shape) == 3

    def __str__(self) -> str:
        if self.are_images:
            kind = f"images of {list(self.shape)}"
        else:
            kind = f"samples of {list(self.shape)}"
        kind = f"rows of {self.shape[0]} tokens" if self.tokens else kind
        if self.numbers:
            return f"{kind} with {self.classes} numbers to predict"
        return f"{kind} in {self.classes} classes"
