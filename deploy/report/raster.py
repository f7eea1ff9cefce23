"""PNG rendering of figures with pillow, from the elements of their SVG, at three times the resolution and then reduced.

pillow brings its own font, so the picture does not depend on installed fonts; matplotlib or a browser would be a
hundred times its size. The colours are those of a light page.
"""

from __future__ import annotations

import io
import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree

from deploy.report.figures import COLOURS, DASHES, Figure

if TYPE_CHECKING:
    from PIL import ImageDraw

SCALE: Final = 2  # pixels of the file per pixel of the SVG
FINE: Final = 3  # drawn pixels per pixel of the file, along each axis
_FILLS: Final = {"ground": "ground", "weight": "s0", "node": "ground"}
_STROKES: Final = {"grid": "grid", "line": "line", "node": "line", "target": "soft"}

Point = tuple[float, float]


def png(figure: Figure) -> bytes:
    """Return a figure as a PNG file. Raises ImportError without pillow, ValueError for an unknown element."""
    from PIL import Image, ImageDraw

    width, height = (math.ceil(side * SCALE) for side in figure.size)
    image = Image.new("RGB", (width * FINE, height * FINE), COLOURS["ground"][0])
    brush = _Brush(ImageDraw.Draw(image, "RGBA"))
    for element in ElementTree.fromstring(f"<g>{''.join(figure.elements)}</g>"):
        brush.draw(element)
    file = io.BytesIO()
    image.resize((width, height), Image.Resampling.BOX).save(file, "PNG", optimize=True)
    return file.getvalue()


class _Brush:
    def __init__(self, canvas: ImageDraw.ImageDraw) -> None:
        from PIL import ImageFont

        self._canvas = canvas
        self._font = ImageFont.load_default(12.0 * SCALE * FINE)

    def draw(self, element: ElementTree.Element) -> None:
        """Draw one element."""
        kinds = element.get("class", "").split()
        match element.tag:
            case "rect":
                x, y, width, height = (self._at(element, key) for key in ("x", "y", "width", "height"))
                fill = self._fill(kinds, float(element.get("fill-opacity", "1")))
                box = (x, y, max(x + width - 1, x), max(y + height - 1, y))
                self._canvas.rectangle(box, fill, self._stroke(kinds), SCALE * FINE)
            case "circle":
                x, y, radius = (self._at(element, key) for key in ("cx", "cy", "r"))
                self._canvas.ellipse((x - radius, y - radius, x + radius, y + radius), self._fill(kinds, 1.0))
            case "path":
                numbers = [SCALE * FINE * float(number) for number in re.findall(r"[-\d.]+", element.get("d", ""))]
                self._line(list(zip(numbers[::2], numbers[1::2], strict=True)), kinds)
            case "text":
                anchor = {"start": "ls", "middle": "ms", "end": "rs"}[element.get("text-anchor", "start")]
                place = (self._at(element, "x"), self._at(element, "y"))
                ink = COLOURS["soft" if "soft" in kinds else "ink"][0]
                self._canvas.text(place, element.text or "", ink, self._font, anchor)
            case other:
                raise ValueError(f"{other}: unknown element of a figure")

    def _line(self, points: list[Point], kinds: list[str]) -> None:
        colour = self._stroke(kinds)
        width = SCALE * FINE * (2 if any(kind.startswith("stroke-") for kind in kinds) else 1)
        dash = next((DASHES[int(kind[-1])] for kind in kinds if kind.startswith("dash-")), "")
        dash = DASHES[2] if "target" in kinds else dash
        pieces = _dashed(points, [SCALE * FINE * float(part) for part in dash.split()]) if dash else [points]
        for piece in pieces:
            self._canvas.line(piece, colour, width, joint="curve")

    @staticmethod
    def _at(element: ElementTree.Element, key: str) -> float:
        return SCALE * FINE * float(element.get(key, "0"))

    @staticmethod
    def _fill(kinds: list[str], opacity: float) -> Any:
        names = [_FILLS.get(kind) or kind.removeprefix("fill-") for kind in kinds if kind in _FILLS or "fill-" in kind]
        return f"{COLOURS[names[0]][0]}{round(255 * opacity):02x}" if names else None

    @staticmethod
    def _stroke(kinds: list[str]) -> str | None:
        names = [
            _STROKES.get(kind) or kind.removeprefix("stroke-")
            for kind in kinds
            if kind in _STROKES or "stroke-" in kind
        ]
        return COLOURS[names[0]][0] if names else None


def _dashed(points: list[Point], lengths: list[float]) -> list[list[Point]]:
    """Return the pieces of a line that a dash pattern (drawn, skipped, ...) draws."""
    pieces: list[list[Point]] = [points[:1]]
    part, left = 0, lengths[0]
    for (x, y), (to_x, to_y) in pairwise(points):
        length, gone = math.hypot(to_x - x, to_y - y), 0.0
        while length - gone > left:
            gone += left
            here = (x + (to_x - x) * gone / length, y + (to_y - y) * gone / length)
            if part % 2 == 0:
                pieces[-1].append(here)
            else:
                pieces.append([here])
            part, left = part + 1, lengths[(part + 1) % len(lengths)]
        left -= length - gone
        if part % 2 == 0:
            pieces[-1].append((to_x, to_y))
    return [piece for piece in pieces if len(piece) > 1]
