"""Images of one's own in torchvision's ImageFolder layout: `<root>/train/<class>/*.png`,
`<root>/test/<class>/`.

As there, a class has the images of all folders below its own, also behind links, in the order of
their names. Files that systems leave beside images do not count; all others that are not read are
named. If images are split, every node reads both parts. If they are private, a device reads `train`
of its own root, the cloud `test` of its own; a device's images never leave the device.

Any file that Pillow reads will do. An image is turned by its EXIF data. What such a file has beside
8-bit colours is named in a note: transparency, whose pixels count by the colours below it, as in
torchvision; more than one image, of which the first counts; inks (CMYK), which are converted
without a profile; 16 bits, of which the higher 8 count, where they are nearly black.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.learning.readers.reader_result import MOST_BYTES, Labels, Parts, some

if TYPE_CHECKING:
    from PIL.Image import Image, Transpose
    from PIL.ImageFile import ImageFile

SUFFIXES: Final = (
    ".jpg",
    ".jpeg",
    ".png",
    ".ppm",
    ".bmp",
    ".pgm",
    ".tif",
    ".tiff",
    ".webp",
    ".gif",
)
CLUTTER: Final = ("thumbs.db", "desktop.ini", "@eadir", "__macosx")  # and hidden files
DARK: Final = 1 << 12  # of 16 bits: images of no more than 12 have no pixel above
# whose pixels of mode I are 0 to 65535; of other formats nothing is known
RANGED: Final = ("PNG", "PPM")
ORIENTATION: Final = 0x0112  # of EXIF
# What an image's file has that its pixels here do not show, as a note has it.
TRANSPARENT: Final = "transparent pixels, which count by the colours below"
SEVERAL: Final = "more than one image, of which the first counts"
INKS: Final = "inks (CMYK), converted to RGB without a profile"
UNCLEAR: Final = "EXIF data that cannot be read, so they may lie on a side"


@dataclass(frozen=True, slots=True, eq=False)
class _Picture:
    """An image, uint8 [C, H, W], what is peculiar of its file, and if it has 16 bits its largest
    pixel, else 0.
    """

    pixels: npt.NDArray[np.uint8]
    peculiar: Sequence[str]
    brightest: int


class ClassFiles(NamedTuple):
    """The files of a part, "train" or "test": the images of each class, in order, and what is not
    read.
    """

    images: dict[str, list[Path]]
    others: list[Path]


def files_of(folder: Path, classes: Sequence[str]) -> ClassFiles:
    """Return the files of a part, none if it does not exist. A folder that several links lead to is
    read once.

    Raises InvalidExperiment, also for a class that is not listed.
    """
    found = ClassFiles({name: [] for name in classes}, [])
    if not folder.is_dir():
        return found
    try:
        beside = [path for path in sorted(folder.iterdir()) if not _is_clutter(path.name)]
        if unknown := [path.name for path in beside if path.is_dir() and path.name not in classes]:
            problem = f"{folder.absolute()} also has {some(unknown)}"
            remedy = "List it, or move it away."
            raise InvalidExperiment("data.classes", list(classes), problem, remedy)
        found.others.extend(path for path in beside if not path.is_dir())
        # A link to another class, or upward, is not followed.
        seen = {
            folder.resolve(),
            *folder.resolve().parents,
            *(path.resolve() for path in beside if path.is_dir()),
        }
        for name in classes:
            tree = _walk(folder / name, seen, found.others) if (folder / name).is_dir() else []
            found.images[name].extend(sorted(tree, key=lambda path: (str(path.parent), path.name)))
    except OSError as error:
        problem = error.strerror or str(error)
        raise InvalidExperiment(
            "data.root", str(error.filename), problem, "Make it readable."
        ) from None
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
        # a broken link is an error
        elif is_image and not path.is_dir() and (path.is_file() or path.is_symlink()):
            images.append(path)
        else:
            others.append(path)
    return images


def _is_clutter(name: str) -> bool:
    """Return whether systems leave files or folders of this name beside images; none is an image,
    whatever its end.
    """
    hidden = name.startswith(".") and not name.lower().endswith(SUFFIXES)
    return hidden or name.startswith("._") or name.lower() in CLUTTER


def read_folder(
    root: Path, *, classes: list[str], shape: tuple[int, ...], parts: Sequence[str]
) -> Parts:
    """Read these parts, "train" and "test", scaled to `shape` (C, H, W); of a private one a class
    may be missing.

    Raises InvalidExperiment.
    """
    notes: list[str] = []

    def read(part: str, *, whole: bool) -> tuple[npt.NDArray[np.uint8], Labels]:
        if part not in parts:
            return np.empty((0, *shape), np.uint8), np.empty(0, np.int64)
        return _read(root / part, classes=classes, shape=shape, whole=whole, notes=notes)

    train = read("train", whole=len(parts) > 1)
    test = read("test", whole=False)
    return Parts(*train, *test, classes=len(classes), names=classes, notes=notes)


def _but(others: Sequence[str]) -> str:
    """Return the files that are no images, for people."""
    if others:
        return f", but {some(others)}"
    return ""


def _read(
    folder: Path, *, classes: list[str], shape: tuple[int, ...], whole: bool, notes: list[str]
) -> tuple[npt.NDArray[np.uint8], Labels]:
    """Return the images of a part, uint8 [N, C, H, W], and their classes, int64 [N]; `whole`: of
    each class.
    """
    layout = f"{folder.absolute()}/<class>/*.png with the classes {', '.join(classes)}"

    def refuse(problem: str) -> NoReturn:
        remedy = "Put this node's own images there."
        raise InvalidExperiment("data.root", str(folder.parent), problem, remedy)

    if not folder.is_dir():
        refuse(f"not found: {layout}")
    found = files_of(folder, classes)
    named = [(path, label) for label, paths in enumerate(found.images.values()) for path in paths]
    skipped = [str(path.relative_to(folder)) for path in found.others]
    if not named:
        refuse(f"no image in {layout}{_but(skipped)}")
    for name, paths in found.images.items():
        if not paths and (whole or (folder / name).is_dir()):
            held = [each for each in skipped if each.startswith(f"{name}{os.sep}")]
            problem = f"no image in {(folder / name).absolute()}{_but(held)}"
            remedy = "Put its images there, or remove the class."
            raise InvalidExperiment("data.classes", name, problem, remedy)
    if skipped:
        count = "1 file or link is" if len(skipped) == 1 else f"{len(skipped)} files and links are"
        notes.append(
            f"{folder}: {count} not read: {some(skipped)}. Names of images end in "
            f"{', '.join(SUFFIXES)}"
        )
    if (size := len(named) * prod(shape)) > MOST_BYTES:
        problem = f"{len(named)} images of {list(shape)} take {size / 1e9:.0f} GB"
        raise InvalidExperiment(
            "data.image_shape", list(shape), problem, "Use fewer or smaller images."
        )
    images = np.empty((len(named), *shape), np.uint8)
    brightest = 0
    peculiar = Counter[str]()
    for i, (path, _) in enumerate(named):
        picture = _picture(path, shape)
        images[i] = picture.pixels
        brightest = max(brightest, picture.brightest)
        peculiar.update(picture.peculiar)
    if 0 < brightest < DARK:
        notes.append(
            f"{folder}: no pixel of its 16-bit images is above {brightest} of 65535: they are "
            "nearly black"
        )
    for what, number in sorted(peculiar.items()):
        notes.append(f"{folder}: {number} of its {len(named)} images have {what}")
    return images, np.array([label for _, label in named], np.int64)


def _picture(path: Path, shape: tuple[int, ...]) -> _Picture:
    """Read an image. Raises InvalidExperiment."""
    from PIL import Image  # imported here: no other data set needs it

    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            # Not by its path: Pillow 13 maps plain TIFF files into memory then, and scrambles those
            # to be turned.
            with path.open("rb") as raw, Image.open(raw) as file:
                picture = _read_picture(file, shape)
    except Exception as error:  # noqa: BLE001 - Pillow's decoders raise many types on damaged files
        reason = str(error).removesuffix(f" {str(path)!r}").partition(" <_io.")[0]
        problem = f"this file is not an image that can be read ({reason})"
        raise InvalidExperiment(
            "data.root", str(path), problem, "Replace it, or move it away."
        ) from None
    unclear = UNCLEAR in picture.peculiar
    for each in said:
        if "EXIF" not in str(each.message):
            warnings.warn(each.message, stacklevel=2)
        elif not unclear:
            unclear = True
            picture = replace(picture, peculiar=[*picture.peculiar, UNCLEAR])
    return picture


def _read_picture(file: ImageFile, shape: tuple[int, ...]) -> _Picture:
    """Return an open file's first image. Raises what Pillow's decoders raise."""
    from PIL import Image

    channels, height, width = shape
    if file.mode == "F" or (file.mode == "I" and file.format not in RANGED):
        raise ValueError(
            f"pixels of mode {file.mode}, whose range is unknown: convert it to 8 or 16 bits"
        )
    # colours, of which Pillow keeps the higher half
    halved = ";16" in str(file.tile) and not file.mode.startswith("I")
    file.load()
    image: Image.Image = file
    brightest = 0
    if file.mode.startswith("I"):  # of 16 bits, of which Pillow would keep the lower half
        deep = np.asarray(file).clip(0, 65535)
        brightest = int(deep.max())
        image = Image.fromarray((deep // 256).astype(np.uint8))
    peculiar = [TRANSPARENT] if _shows_below(image) else []
    if image.mode == "CMYK":
        peculiar.append(INKS)
    # else Pillow warns of some palettes
    if image.mode == "P":
        image = image.convert("RGBA")
    colours = "L" if channels == 1 else "RGB"
    image = image.convert(colours)
    highest = int(np.asarray(image).max()) if halved else 0
    if highest:
        brightest = 256 * highest + 255
    try:
        turn = _turn(file)
    except Exception:  # noqa: BLE001 - damaged EXIF data raises many types, and the pixels are whole
        turn = None
        peculiar.append(UNCLEAR)
    if turn is not None:
        image = image.transpose(turn)
    if _has_more(file):
        peculiar.append(SEVERAL)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, np.uint8).reshape(height, width, channels)
    return _Picture(pixels.transpose(2, 0, 1), peculiar, brightest)


def _shows_below(image: Image) -> bool:
    """Return whether a pixel is not opaque."""
    if "A" not in image.getbands() and "transparency" not in image.info:
        return False
    lowest, _ = image.convert("RGBA").getchannel("A").getextrema()
    return bool(lowest != 255)


def _turn(file: ImageFile) -> Transpose | None:
    """Return how a loaded image is turned upright, None if it stands. Raises what damaged EXIF data
    raises.
    """
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return turns.get(file.getexif().get(ORIENTATION, 1))


def _has_more(file: ImageFile) -> bool:
    """Return whether a file has further images; of those damaged nothing is known, and nothing
    needed.
    """
    with suppress(Exception):
        return bool(getattr(file, "is_animated", False))
    return False
