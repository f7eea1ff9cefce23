"""Images of one's own in torchvision's ImageFolder layout: `<root>/train/<class>/*.png`, `<root>/test/<class>/`.

If they are split, every node reads both. If they are private, a device reads `train` of its own root, the cloud `test`
of its own; a device's images never leave the device. Any file that Pillow reads will do: of animations the first image.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from common.errors import InvalidExperiment
from common.learning.readers.parts import MOST_BYTES, Labels, Parts, damaged

SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")


def read_folder(root: Path, *, classes: list[str], shape: tuple[int, ...], parts: Sequence[str]) -> Parts:
    """Read these parts, "train" and "test", scaled to `shape` (C, H, W); a class may be missing.

    Raises InvalidExperiment.
    """
    nothing = np.empty((0, *shape), np.uint8), np.empty(0, np.int64)
    train, test = (
        _read(root / part, classes=classes, shape=shape) if part in parts else nothing for part in ("train", "test")
    )
    return Parts(train[0], train[1], test[0], test[1], classes=len(classes))


def _read(folder: Path, *, classes: list[str], shape: tuple[int, ...]) -> tuple[npt.NDArray[np.uint8], Labels]:
    """Return the images of a folder, uint8 [N, C, H, W], and their classes, int64 [N]."""
    layout = f"{folder.absolute()}/<class>/*.png with the classes {', '.join(classes)}"
    if not folder.is_dir():
        problem = f"not found: {layout}"
        raise InvalidExperiment("data.root", str(folder.parent), problem, "Put this node's own images there.")
    unknown = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name not in classes)
    if unknown:
        raise InvalidExperiment(
            "data.classes", classes, f"{folder.absolute()} also has {', '.join(unknown)}", "List it, or move it away."
        )
    named = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).glob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if not named:
        problem = f"no image in {layout}"
        raise InvalidExperiment("data.root", str(folder.parent), problem, "Put this node's own images there.")
    if (size := len(named) * prod(shape)) > MOST_BYTES:
        problem = f"{len(named)} images of {list(shape)} take {size / 1e9:.0f} GB"
        raise InvalidExperiment("data.image_shape", list(shape), problem, "Use fewer or smaller images.")
    images = np.empty((len(named), *shape), np.uint8)
    for i, (path, _) in enumerate(named):
        images[i] = _image(path, shape)
    return images, np.array([label for _, label in named], np.int64)


def _image(path: Path, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    from PIL import Image  # imported here: no other data set needs it

    channels, height, width = shape
    try:
        with Image.open(path) as file:
            deep = file.mode.startswith("I")  # of 16 bits, of which Pillow would keep the lower half
            image = Image.fromarray((np.asarray(file).clip(0, 65535) // 256).astype(np.uint8)) if deep else file
            image = image.convert("RGBA") if image.mode == "P" else image  # else Pillow warns of some palettes
            image = image.convert("L" if channels == 1 else "RGB")
    except Exception as error:  # noqa: BLE001 - Pillow's decoders raise many types on damaged files
        raise damaged(path, f"is not an image ({error})") from None
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, np.uint8).reshape(height, width, channels)
    return pixels.transpose(2, 0, 1)
