"""Samples in rows with their names, as SVG: a pixel is a square."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from torch import Tensor


def svg(rows: Mapping[str, Tensor], *, low: float, high: float) -> str:
    """Return rows of images, float32 [n, C, H, W] with C = 1 or 3, whose values are low to high."""
    squares = []
    for line, (name, images) in enumerate(rows.items()):
        shades = (255 * (images.clamp(low, high) - low) / (high - low)).int().expand(-1, 3, -1, -1)
        _, _, tall, wide = shades.shape
        head = 1 + wide // 4
        top = line * (tall + head + 1) + head
        size = wide / 7.5
        squares.append(f'<text y="{top - 1}" font-size="{size:.1f}">{escape(name)}</text>')
        for number, image in enumerate(shades.permute(0, 2, 3, 1).tolist()):
            for y, pixels in enumerate(image):
                for x, (red, green, blue) in enumerate(pixels):
                    left = number * (wide + 1) + x
                    place = f'x="{left}" y="{top + y}" width="1.02" height="1.02"'
                    squares.append(f'<rect {place} fill="#{red:02x}{green:02x}{blue:02x}"/>')
    count = max(len(images) for images in rows.values())
    box = f"0 0 {count * (wide + 1)} {len(rows) * (tall + head + 1)}"
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" width="480">'
    return "\n".join([begin, *squares, "</svg>\n"])
