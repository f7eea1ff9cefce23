"""Images of one's own in torchvision's ImageFolder layout: `<root>/train/<class>/*.png`, `<root>/test/<class>/`.

As there, a class has the images of all folders below its own, also behind links, in the order of their names. Files
that systems leave beside images do not count; all others that are not read are named. If images are split, every node
reads both parts. If they are private, a device reads `train` of its own root, the cloud `test` of its own; a device's
images never leave the device. Any file that Pillow reads will do: of animations the first image.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from common.errors import InvalidExperiment
from common.learning.readers.parts import MOST_BYTES, Labels, Parts, some

SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
CLUTTER: Final = ("thumbs.db", "desktop.ini", "@eadir", "__macosx")  # and hidden files
DARK: Final = 1 << 12  # of 16 bits: images of no more than 12 have no pixel above
RANGED: Final = ("PNG", "PPM")  # whose pixels of mode I are 0 to 65535; of other formats nothing is known


class ClassFiles(NamedTuple):
    """The files of a part, "train" or "test": the images of each class, in order, and what is not read."""

    images: dict[str, list[Path]]
    others: list[Path]


def files_of(folder: Path, classes: Sequence[str]) -> ClassFiles:
    """Return the files of a part, none if it does not exist. A folder that several links lead to is read once.

    Raises InvalidExperiment, also for a class that is not listed.
    """
    found = ClassFiles({name: [] for name in classes}, [])
    if not folder.is_dir():
        return found
    try:
        beside = [path for path in sorted(folder.iterdir()) if not _is_clutter(path.name)]
        if unknown := [path.name for path in beside if path.is_dir() and path.name not in classes]:
            problem, remedy = f"{folder.absolute()} also has {some(unknown)}", "List it, or move it away."
            raise InvalidExperiment("data.classes", list(classes), problem, remedy)
        found.others.extend(path for path in beside if not path.is_dir())
        # A link to another class, or upward, is not followed.
        seen = {folder.resolve(), *folder.resolve().parents, *(path.resolve() for path in beside if path.is_dir())}
        for name in classes:
            tree = _walk(folder / name, seen, found.others) if (folder / name).is_dir() else []
            found.images[name].extend(sorted(tree, key=lambda path: (str(path.parent), path.name)))
    except OSError as error:
        problem = error.strerror or str(error)
        raise InvalidExperiment("data.root", str(error.filename), problem, "Make it readable.") from None
    return found


def _walk(folder: Path, seen: set[Path], others: list[Path]) -> list[Path]:
    """Return the images of a folder and those below it; what is not read is added to `others`."""
    images: list[Path] = []
    for path in sorted(folder.iterdir()):
        is_image = path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
        if _is_clutter(path.name):
            continue
        if path.is_dir() and path.resolve() not in seen:
            seen.add(path.resolve())
            images += _walk(path, seen, others)
        elif is_image and not path.is_dir() and (path.is_file() or path.is_symlink()):  # a broken link is an error
            images.append(path)
        else:
            others.append(path)
    return images


def _is_clutter(name: str) -> bool:
    """Return whether systems leave files or folders of this name beside images; none is an image, whatever its end."""
    hidden = name.startswith(".") and not name.lower().endswith(SUFFIXES)
    return hidden or name.startswith("._") or name.lower() in CLUTTER


def read_folder(root: Path, *, classes: list[str], shape: tuple[int, ...], parts: Sequence[str]) -> Parts:
    """Read these parts, "train" and "test", scaled to `shape` (C, H, W); of a private one a class may be missing.

    Raises InvalidExperiment.
    """
    notes: list[str] = []
    nothing = np.empty((0, *shape), np.uint8), np.empty(0, np.int64)
    train, test = (
        _read(root / part, classes=classes, shape=shape, whole=part == "train" and len(parts) > 1, notes=notes)
        if part in parts
        else nothing
        for part in ("train", "test")
    )
    return Parts(train[0], train[1], test[0], test[1], classes=len(classes), names=classes, notes=notes)


def _read(
    folder: Path, *, classes: list[str], shape: tuple[int, ...], whole: bool, notes: list[str]
) -> tuple[npt.NDArray[np.uint8], Labels]:
    """Return the images of a part, uint8 [N, C, H, W], and their classes, int64 [N]; `whole`: of each class."""
    layout = f"{folder.absolute()}/<class>/*.png with the classes {', '.join(classes)}"

    def refuse(problem: str) -> NoReturn:
        raise InvalidExperiment("data.root", str(folder.parent), problem, "Put this node's own images there.")

    if not folder.is_dir():
        refuse(f"not found: {layout}")
    found = files_of(folder, classes)
    named = [(path, label) for label, paths in enumerate(found.images.values()) for path in paths]
    skipped = [str(path.relative_to(folder)) for path in found.others]
    if not named:
        refuse(f"no image in {layout}" + (f", but {some(skipped)}" if skipped else ""))
    for name, paths in found.images.items():
        if not paths and (whole or (folder / name).is_dir()):
            held = [each for each in skipped if each.startswith(f"{name}{os.sep}")]
            problem = f"no image in {(folder / name).absolute()}" + (f", but {some(held)}" if held else "")
            raise InvalidExperiment("data.classes", name, problem, "Put its images there, or remove the class.")
    if skipped:
        count = "1 file or link is" if len(skipped) == 1 else f"{len(skipped)} files and links are"
        notes.append(f"{folder}: {count} not read: {some(skipped)}. Names of images end in {', '.join(SUFFIXES)}")
    if (size := len(named) * prod(shape)) > MOST_BYTES:
        problem = f"{len(named)} images of {list(shape)} take {size / 1e9:.0f} GB"
        raise InvalidExperiment("data.image_shape", list(shape), problem, "Use fewer or smaller images.")
    images, brightest = np.empty((len(named), *shape), np.uint8), 0
    for i, (path, _) in enumerate(named):
        images[i], bright = _image(path, shape)
        brightest = max(brightest, bright)
    if 0 < brightest < DARK:
        notes.append(f"{folder}: no pixel of its 16-bit images is above {brightest} of 65535: they are nearly black")
    return images, np.array([label for _, label in named], np.int64)


def _image(path: Path, shape: tuple[int, ...]) -> tuple[npt.NDArray[np.uint8], int]:
    """Return an image, uint8 [C, H, W], and if it is one of 16 bits its largest pixel, else 0."""
    from PIL import Image  # imported here: no other data set needs it

    channels, height, width = shape
    brightest = 0
    try:
        with Image.open(path) as file:
            if file.mode == "F" or (file.mode == "I" and file.format not in RANGED):
                raise ValueError(f"pixels of mode {file.mode}, whose range is unknown: convert it to 8 or 16 bits")
            image: Image.Image = file
            if file.mode.startswith("I"):  # of 16 bits, of which Pillow would keep the lower half
                deep = np.asarray(file).clip(0, 65535)
                brightest = int(deep.max())
                image = Image.fromarray((deep // 256).astype(np.uint8))
            image = image.convert("RGBA") if image.mode == "P" else image  # else Pillow warns of some palettes
            image = image.convert("L" if channels == 1 else "RGB")
    except Exception as error:  # noqa: BLE001 - Pillow's decoders raise many types on damaged files
        reason = str(error).removesuffix(f" {str(path)!r}")
        problem = f"this file is not an image that can be read ({reason})"
        raise InvalidExperiment("data.root", str(path), problem, "Replace it, or move it away.") from None
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, np.uint8).reshape(height, width, channels)
    return pixels.transpose(2, 0, 1), brightest
