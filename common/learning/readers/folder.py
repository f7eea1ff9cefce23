"""The node's own images in torchvision's ImageFolder layout: `<root>/train/<class>/*.png`, `<root>/test/<class>/`.

A device reads `train` of its own root, the cloud `test` of its own. A device's images never leave the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from common.errors import InvalidExperiment
from common.learning.readers.parts import Parts, damaged

SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def read_folder(root: Path, *, classes: list[str], shape: tuple[int, ...], test: bool) -> Parts:
    """Read `train` or `test`, scaled to `shape` (C, H, W); some classes may be missing. Raises InvalidExperiment."""
    folder = root / ("test" if test else "train")
    layout = f"{folder.absolute()}/<class>/*.png with the classes {', '.join(classes)}"
    if not folder.is_dir():
        raise InvalidExperiment("data.root", str(root), f"not found: {layout}", "Put this node's own images there.")
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
        raise InvalidExperiment("data.root", str(root), f"no image in {layout}", "Put this node's own images there.")
    images = np.empty((len(named), *shape), np.uint8)
    for i, (path, _) in enumerate(named):
        images[i] = _image(path, shape)
    labels = np.array([label for _, label in named], np.int64)
    nothing, no_labels = np.empty((0, *shape), np.uint8), np.empty(0, np.int64)
    if test:
        return Parts(nothing, no_labels, images, labels, classes=len(classes))
    return Parts(images, labels, nothing, no_labels, classes=len(classes))


def _image(path: Path, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    from PIL import Image  # imported here: no other data set needs it

    channels, height, width = shape
    try:
        with Image.open(path) as file:
            image = file.convert("L" if channels == 1 else "RGB")
    except Exception as error:  # noqa: BLE001 - Pillow's decoders raise many types on damaged files
        raise damaged(path, f"is not an image ({error})") from None
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, np.uint8).reshape(height, width, channels)
    return pixels.transpose(2, 0, 1)
