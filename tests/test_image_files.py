"""What files of images have beside 8-bit colours: how it is read, and that a note names it."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageOps

from fedstrata.common.learning.readers.folder import ORIENTATION, read_folder

CORNER: Final = np.zeros((60, 80), np.uint8)
CORNER[:30, :40] = 40
CORNER[:30, 40:] = 250
CORNER[30:, :40] = 120


def read(
    folder: Path, *, channels: int = 3, size: tuple[int, int] = (60, 80)
) -> tuple[npt.NDArray[np.uint8], str]:
    """Return the images of a class, [N, C, H, W], and the notes."""
    found = read_folder(folder, classes=["a"], shape=(channels, *size), parts=["train"])
    return np.asarray(found.train), "\n".join(found.notes)


def place(folder: Path, name: str) -> Path:
    path = folder / "train" / "a" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_stands_as_its_exif_data_notes(
    orientation: int, form: str, tmp_path: Path
) -> None:
    path, exif = place(tmp_path, f"a.{form.lower()}"), Image.Exif()
    exif[ORIENTATION] = orientation
    options: dict[str, Any] = (
        {"tiffinfo": {ORIENTATION: orientation}} if form == "TIFF" else {"exif": exif}
    )
    Image.fromarray(CORNER).save(path, form, **options)
    upright = np.asarray(ImageOps.exif_transpose(with_orientation(orientation)))
    found, notes = read(tmp_path, channels=1, size=upright.shape)
    assert not notes and np.abs(found[0, 0].astype(int) - upright).mean() < 3


def with_orientation(orientation: int) -> Image.Image:
    image = Image.fromarray(CORNER)
    image.getexif()[ORIENTATION] = orientation
    return image


def test_sixteen_bits_are_turned_too(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    Image.fromarray(CORNER.astype(np.uint16) * 256).save(place(tmp_path, "a.png"), exif=exif)
    found, notes = read(tmp_path, channels=1, size=(80, 60))
    assert np.array_equal(found[0, 0], np.rot90(CORNER, -1)) and not notes


def test_exif_data_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    Image.fromarray(CORNER).save(
        place(tmp_path, "a.jpg"), exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x05\x01"
    )
    Image.fromarray(CORNER).save(place(tmp_path, "b.jpg"), exif=b"Exif\0\0II*\0\xff\xff\0\0")
    Image.fromarray(CORNER).save(place(tmp_path, "c.jpg"))
    found, notes = read(tmp_path, channels=1)
    assert all(np.abs(each[0].astype(int) - CORNER).mean() < 3 for each in found)
    assert "2 of its 3 images have EXIF data that cannot be read" in notes


def colours(mode: str, colour: Any) -> Callable[[Path], None]:
    return lambda path: Image.new(mode, (80, 60), colour).save(path)


def palette(path: Path) -> None:
    image = Image.new("P", (80, 60), 1)
    image.putpalette([0, 0, 0, 200, 10, 20])
    image.save(path, transparency=1)


def keyed(path: Path) -> None:
    Image.new("RGB", (80, 60), (200, 10, 20)).save(path, transparency=(200, 10, 20))


def frames(path: Path) -> None:
    several = [Image.new("RGB", (80, 60), (value, 0, 0)) for value in (200, 100)]
    several[0].save(path, save_all=True, append_images=several[1:])


def deep_colours(value: int) -> Callable[[Path], None]:
    """Return a writer of a PNG of 16 bits in each colour, which Pillow does not write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    def write(path: Path) -> None:
        rows = np.full((60, 80, 3), value, ">u2")
        lines = b"".join(b"\0" + row.tobytes() for row in rows)
        head = struct.pack(">IIBBBBB", 80, 60, 16, 2, 0, 0, 0)
        parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + parts)

    return write


BELOW, SEVERAL = (
    "transparent pixels, which count by the colours below",
    "more than one image, of which the first",
)


@pytest.mark.parametrize(
    ("name", "write", "first", "note"),
    [
        ("a.png", colours("RGBA", (200, 10, 20, 0)), 200, BELOW),
        ("a.png", colours("RGBA", (200, 10, 20, 255)), 200, ""),
        ("a.png", colours("LA", (90, 128)), 90, BELOW),
        ("a.webp", colours("RGBA", (0, 0, 0, 0)), 0, BELOW),
        ("a.png", palette, 200, BELOW),
        ("a.png", keyed, 200, BELOW),
        ("a.gif", frames, 200, SEVERAL),
        ("a.png", frames, 200, SEVERAL),
        ("a.tiff", frames, 200, SEVERAL),
        ("a.webp", frames, 200, SEVERAL),
        (
            "a.jpg",
            colours("CMYK", (55, 0, 0, 0)),
            200,
            "inks (CMYK), converted to RGB without a profile",
        ),
        (
            "a.tiff",
            colours("CMYK", (55, 0, 0, 0)),
            200,
            "inks (CMYK), converted to RGB without a profile",
        ),
        ("a.png", deep_colours(200 * 256 + 7), 200, ""),
        ("a.png", deep_colours(4000), 15, "no pixel of its 16-bit images is above 4095 of 65535"),
        ("a.png", colours("RGB", (200, 0, 0)), 200, ""),
        ("a.gif", colours("RGB", (200, 0, 0)), 200, ""),
    ],
)
def test_what_a_file_has_beside_colours_is_named(
    name: str, write: Callable[[Path], None], first: int, note: str, tmp_path: Path
) -> None:
    write(place(tmp_path, name))
    found, notes = read(tmp_path)
    assert abs(int(found[0, 0, 0, 0]) - first) <= 3
    assert note in notes and bool(notes) == bool(note)
    assert "\n" not in notes


def test_a_damaged_second_image_does_not_matter(tmp_path: Path) -> None:
    whole = BytesIO()
    several = [Image.effect_noise((80, 60), 90).convert("RGB") for _ in range(2)]
    several[0].save(whole, "GIF", save_all=True, append_images=several[1:])
    place(tmp_path, "a.gif").write_bytes(whole.getvalue()[:-1500])
    found, _ = read(tmp_path)
    with Image.open(BytesIO(whole.getvalue())) as file:
        assert np.array_equal(found[0].transpose(1, 2, 0), np.asarray(file.convert("RGB")))
