"""Figures, drawn by matplotlib: SVG in the colours of a page, light or dark, and files for papers.

All are drawn in the light colours. In the SVG of a page each is replaced by its CSS variable; the
variables are the first rule of `page.css`. This module draws in one style: nothing else changes a
setting of matplotlib.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias
from xml.etree import ElementTree

from fedstrata.deploy.console.tabular import Table, clean

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

Point: TypeAlias = tuple[float, float]
TEMPLATES: Final = Path(__file__).resolve().parents[1] / "templates" / "report"
# of a page, and of a file
STYLE: Final = (TEMPLATES / "page.css").read_text(encoding="utf-8").partition("\n\n")[0]
# The light colours by name. The first series has the colour of docs/. Any two series can be
# distinguished, also by readers who see two primary colours only, and have a contrast of 3 or more
# to the ground (`tests/test_figures.py`).
COLOURS: Final[Mapping[str, str]] = dict(
    re.findall(r"--(\w+): (#\w+)", STYLE.partition("@media")[0])
)
SERIES: Final = 7
PHASES: Final[Mapping[str, str]] = {
    "record": "s6",
    "dispatch": "s2",
    "train": "s0",
    "wait": "s5",
    "collect": "s4",
    "aggregate": "s3",
    "evaluate": "s1",
}
# A series has the next colour with its marker, and the next dash pattern, in points.
DASHES: Final = ((), (4.0, 2.0), (1.3, 2.0), (5.3, 2.0, 1.3, 2.0))
MARKERS: Final = "os^Dvp*"

INCH: Final = 72.0  # points, as all lengths
COLUMN: Final = 3.5 * INCH  # the width of a column in the styles of IEEE and ACM
FONT: Final = 8.0
LETTER: Final = 4.9  # the width of a letter, in matplotlib's font
LINE: Final = 12.0
DPI: Final = 300
PIXELS_MOST: Final = 60_000  # of a PNG's side; matplotlib has a limit of 65,535
PAGE_SCALE: Final = 1.5  # CSS pixels of a point
LEAST: Final = 0.7  # to which a figure shrinks on a small page, which scrolls beyond
SETTINGS: Final[Mapping[Any, Any]] = {
    "font.size": FONT,
    "font.family": ["DejaVu Sans"],  # matplotlib brings it along
    "text.parse_math": False,  # names may have dollar signs
    "text.color": COLOURS["ink"],
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": COLOURS["line"],
    "axes.labelcolor": COLOURS["soft"],
    "axes.labelsize": FONT,
    "axes.titlesize": FONT,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.xmargin": 0.0,
    "axes.ymargin": 0.0,
    **{f"axes.spines.{side}": False for side in ("left", "right", "top")},
    "grid.color": COLOURS["grid"],
    **{f"{axis}tick.color": COLOURS["line"] for axis in "xy"},
    **{f"{axis}tick.labelcolor": COLOURS["ink"] for axis in "xy"},
    **{f"{axis}tick.labelsize": FONT for axis in "xy"},
    "ytick.major.size": 0.0,
    "legend.frameon": False,
    "legend.fontsize": FONT,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.0,
    "lines.scale_dashes": False,
    "pdf.fonttype": 42,  # TrueType; many journals refuse Type 3
    "svg.hashsalt": "fedstrata",
}
_NO_DATE: Final = {
    "pdf": {"CreationDate": None},
    "svg": dict.fromkeys(("Date", "Creator", "Format", "Type")),
}
_SVG: Final = "{http://www.w3.org/2000/svg}"
for _prefix, _name in (("", "2000/svg"), ("xlink", "1999/xlink")):
    ElementTree.register_namespace(_prefix, f"http://www.w3.org/{_name}")
_NAMESPACES: Final = re.compile(r' xmlns(?::\w+)?="[^"]*"|(?<= )xlink:(?=href)')


class Box(NamedTuple):
    """A rectangle in the units of its axes, in a colour of COLOURS."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    tooltip: str = ""
    opacity: float = 1.0


class Canvas:
    """A figure of matplotlib, of a size in points."""

    def __init__(self, width: float, height: float) -> None:
        from matplotlib.figure import Figure as Sheet

        self.sheet = Sheet(figsize=(width / INCH, height / INCH))
        self.size = (width, height)
        self.tooltips: dict[str, list[str]] = {}  # of an artist's marks, by its id

    def axes(self) -> Axes:
        """Add axes, which `place` gives their place."""
        return self.sheet.add_axes((0, 0, 1, 1))

    def place(self, axes: Axes, *, left: float, top: float, right: float, bottom: float) -> None:
        """Place axes by their margins."""
        width, height = self.size
        across = (width - left - right) / width
        up = (height - top - bottom) / height
        axes.set_position((left / width, bottom / height, across, up))

    def ground(self, *, left: float = 0.0, top: float = 0.0, right: float = 0.0) -> Axes:
        """Add axes without lines and numbers, whose units are points from their upper left corner
        on.
        """
        axes = self.axes()
        self.place(axes, left=left, top=top, right=right, bottom=0.0)
        axes.set(xlim=(0, self.size[0] - left - right), ylim=(self.size[1] - top, 0))
        axes.set_axis_off()
        return axes

    def describe(self, artist: Artist, tooltips: Sequence[str]) -> None:
        """Give each mark of an artist its tooltip."""
        key = f"marks{len(self.tooltips)}"
        artist.set_gid(key)
        self.tooltips[key] = [clean(text) for text in tooltips]

    def boxes(self, axes: Axes, boxes: Sequence[Box]) -> None:
        """Draw rectangles."""
        from matplotlib.collections import PolyCollection
        from matplotlib.colors import to_rgba

        corners = []
        for x, y, wide, high, *_ in boxes:
            corners.append([(x, y), (x + wide, y), (x + wide, y + high), (x, y + high)])
        faces = [to_rgba(COLOURS[box.colour], box.opacity) for box in boxes]
        drawn = PolyCollection(corners, facecolors=faces, linewidths=0)
        axes.add_collection(drawn, autolim=False)
        self.describe(drawn, [box.tooltip for box in boxes])

    def legend(self, handles: Mapping[str, Artist]) -> None:
        """Draw a legend by label at the lower edge, which has the height `legend_height`."""
        columns, lines = legend_layout(handles, self.size[0])
        self.sheet.legend(
            handles.values(),
            ["\n".join(each) for each in lines],
            loc="lower left",
            bbox_to_anchor=(0, 0),
            ncols=columns,
            borderpad=0.2,
            borderaxespad=0.2,
            labelspacing=0.4,
            columnspacing=1.2,
            handlelength=2.4,
            handletextpad=0.6,
        )

    def saved(self, kind: str) -> bytes:
        """Return the file of a kind: pdf, png or svg."""
        file = io.BytesIO()
        dpi = min(DPI, PIXELS_MOST * INCH / max(self.size))
        self.sheet.savefig(file, format=kind, dpi=dpi, metadata=_NO_DATE.get(kind))
        return file.getvalue()


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture. `name` is the file name's stem, `text` the alternative text, `table` has the
    numbers.

    `draw` draws it, inside of `style`.
    """

    name: str
    title: str
    text: str
    draw: Callable[[], Canvas]
    table: Table | None = None

    def svg(self, key: str) -> str:
        """Return an element of a page that has STYLE. The key makes its ids unique on the page."""
        with style({"svg.fonttype": "none"}):
            return _themed(self.draw(), self, key)

    def files(self, formats: Iterable[str]) -> dict[str, bytes]:
        """Return the files for a paper by format: pdf, png or svg."""
        with style({"savefig.facecolor": "white"}):
            canvas = self.draw()
            return {kind: canvas.saved(kind) for kind in formats}


def styled(ranks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the colour and the dash pattern of each line of a chart, given by its rank and that of
    its condition.

    Equal ranks have one colour, in every chart; conditions differ in the pattern. If there is but
    one condition, each rank has a pattern, too. Where these are the same for two lines, the later
    one has the next pattern that is free, and beyond the patterns the next colour.
    """
    conditions = list(dict.fromkeys(condition for _, condition in ranks))
    found: list[tuple[int, int]] = []
    for rank, condition in ranks:
        pattern = conditions.index(condition) if len(conditions) > 1 else rank
        every = (
            (rank + more, pattern + next_) for more in range(SERIES) for next_ in range(len(DASHES))
        )
        styles = [(colour % SERIES, dash % len(DASHES)) for colour, dash in every]
        found.append(next((style for style in styles if style not in found), styles[0]))
    return found


def line_style(colour: int, dash: int) -> dict[str, Any]:
    """Return how a series' lines are drawn."""
    return {"color": COLOURS[f"s{colour % SERIES}"], "linestyle": (0, DASHES[dash % len(DASHES)])}


def wrapped(label: str, width: float) -> list[str]:
    """Return the lines of a text that fit into a width, at least one."""
    return wrap(clean(label), max(8, int(width / LETTER))) or [""]


def legend_layout(labels: Iterable[str], width: float) -> tuple[int, list[list[str]]]:
    """Return the columns of a legend that fit into a width, and the lines of each label."""
    swatch = 3.6 * FONT
    lines = [wrapped(label, width - swatch - 6) for label in labels]
    longest = max((len(line) for each in lines for line in each), default=0)
    return max(1, int(width / (swatch + LETTER * longest + 6))), lines


def legend_height(labels: Collection[str], width: float) -> float:
    """Return the height of a legend."""
    columns, lines = legend_layout(labels, width)
    rows = -(-len(labels) // columns)
    if labels:
        return sum(sorted((LINE * len(each) + 1.5 for each in lines), reverse=True)[:rows]) + 4
    return 0.0


@contextmanager
def style(more: Mapping[Any, Any] | None = None) -> Iterator[None]:
    """Draw in our style, whatever the settings of this process are. `more`: further settings of
    matplotlib.
    """
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a letter that the font has not
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**SETTINGS, **(more or {})})
        yield


def _themed(canvas: Canvas, figure: Figure, key: str) -> str:
    """Return the SVG of a canvas in CSS variables, with its title, its text, and its tooltips."""
    root = ElementTree.fromstring(canvas.saved("svg"))
    for group in root.iter(f"{_SVG}g"):
        marks = list(group.iter(f"{_SVG}use")) or group.findall(f"{_SVG}path")
        for mark, text in zip(marks, canvas.tooltips.get(group.get("id", ""), ()), strict=False):
            ElementTree.SubElement(mark, f"{_SVG}title").text = text
    # of all elements, which have their own
    root[:] = [each for each in root if each.find(f"{_SVG}style") is None]
    for tag, text in (("desc", figure.text), ("title", figure.title)):
        element = ElementTree.Element(f"{_SVG}{tag}", id=tag)
        element.text = clean(text)
        root.insert(0, element)
    width, height = canvas.size
    root.attrib |= {
        "width": f"{PAGE_SCALE * width:.0f}",
        "height": f"{PAGE_SCALE * height:.0f}",
        "role": "img",
    }
    root.set("style", f"min-width: {PAGE_SCALE * LEAST * width:.0f}px")
    root.set("aria-labelledby", f"{key}title {key}desc")
    drawn = _NAMESPACES.sub("", ElementTree.tostring(root, encoding="unicode"))
    drawn = re.sub(r'( id="|url\(#| href="#)', rf"\g<1>{key}", drawn).replace(
        "'DejaVu Sans'", "var(--font)"
    )
    for name, colour in COLOURS.items():
        drawn = drawn.replace(colour, f"var(--{name})")
    return drawn
