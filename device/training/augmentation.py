"""Flips and crops of images, many at once, on the device that trains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from common.experiment.training import Augmentation


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """Changes of n images: `flips` bool [n], and `shifts` int64 [n, 2], the first row and column of the windows."""

    flips: Tensor
    shifts: Tensor

    def __getitem__(self, some: slice | Tensor) -> Changes:
        return Changes(self.flips[some], self.shifts[some])

    def to(self, device: torch.device) -> Changes:
        """Return the same changes on another device."""
        return Changes(self.flips.to(device), self.shifts.to(device))


def draw(augmentation: Augmentation, count: int, *, source: np.random.Generator, device: torch.device) -> Changes:
    """Draw the changes of `count` images: half of them flipped, all windows in the frame equally likely."""
    flips = source.random(count) < (0.5 if augmentation.flip else 0.0)
    shifts = source.integers(0, 2 * augmentation.crop + 1, (count, 2))
    return Changes(torch.from_numpy(flips).to(device), torch.from_numpy(shifts).to(device))


def change(images: Tensor, changes: Changes, *, crop: int) -> Tensor:
    """Return the images [n, C, H, W] of any dtype, padded by `crop` zero pixels, cropped to their windows and flipped.

    The order does not matter: a window of a flipped image is another window, flipped.
    """
    height, width = images.shape[2:]
    columns = torch.arange(width, device=images.device)
    columns = torch.where(changes.flips[:, None], columns.flip(0), columns) + changes.shifts[:, 1:]
    rows = torch.arange(height, device=images.device) + changes.shifts[:, :1]
    framed = functional.pad(images, (crop, crop, crop, crop)).permute(0, 2, 3, 1)
    each = torch.arange(len(images), device=images.device)
    found = framed[each[:, None, None], rows[:, :, None], columns[:, None, :]]  # [n, H, W, C]
    return found.permute(0, 3, 1, 2).contiguous()
