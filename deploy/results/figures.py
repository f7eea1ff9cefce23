"""Figures: charts and drawings as marks at their pixels, and the marks as SVG.

A mark has classes of CLASSES. A page includes them as CSS, so that its figures follow its light or dark colours;
`deploy.results.paper` draws the same marks, by the same classes, as files for papers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Final, TypeAlias

from deploy.console.tabular import Table, clean, html

Point: TypeAlias = tuple[float, float]
FONT: Final = "ui-sans-serif, system-ui, sans-serif"
LETTER: Final = 7.2  # pixels: width of a letter at font size 12, in a wide font
SERIES: Final = 7
HEAD: Final = 24.0  # pixels above a picture, for its title
# (light, dark). The first series has the colour of docs/. Any two series can be distinguished, also by readers who see
# two primary colours only, and have a contrast of 3 or more to the ground (`tests/test_report.py`).
COLOURS: Final[Mapping[str, tuple[str, str]]] = {
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#9198a1"),
    "ground": ("#ffffff", "#0d1117"),
    "line": ("#8c959f", "#6e7681"),
    "grid": ("#d8dee4", "#2a313c"),
    "s0": ("#0969da", "#4493f8"),
    "s1": ("#b04400", "#f0883e"),
    "s2": ("#00402b", "#b4f0b8"),
    "s3": ("#8a1a8a", "#b03aa8"),
    "s4": ("#a98a50", "#8a7a30"),
    "s5": ("#399fc8", "#79d5f5"),
    "s6": ("#70707c", "#9198a1"),
}
PHASES: Final[Mapping[str, str]] = {
    "record": "fill-s6", "dispatch": "fill-s2", "train": "fill-s0", "wait": "fill-s5", "collect": "fill-s4",
    "aggregate": "fill-s3", "evaluate": "fill-s1",
}  # fmt: skip
DASHES: Final = ("", "6 3", "2 3", "8 3 2 3")  # a series has the next colour and the next dash pattern
# The CSS properties of each class: names of COLOURS, lengths in pixels. Of two classes the later one goes.
CLASSES: Final[Mapping[str, Mapping[str, str]]] = {
    "ground": {"fill": "ground"},
    "grid": {"stroke": "grid", "fill": "none"},
    "line": {"stroke": "line", "fill": "none"},
    "weight": {"fill": "s0"},
    "node": {"stroke": "line", "fill": "ground"},
    "target": {"stroke": "soft", "fill": "none", "stroke-dasharray": "2 3"},
    **{f"fill-{name}": {"fill": name} for name in COLOURS},
    **{f"stroke-s{i}": {"stroke": f"s{i}", "fill": "none", "stroke-width": "2"} for i in range(SERIES)},
    **{f"dash-{i}": {"stroke-dasharray": dash} for i, dash in enumerate(DASHES) if dash},
    "band": {"fill-opacity": "0.16"},
    "thin": {"stroke-width": "1", "stroke-opacity": "0.7"},
}


def _css(looks: Mapping[str, str]) -> str:
    return "; ".join(f"{key}: {f'var(--{value})' if value in COLOURS else value}" for key, value in looks.items())


_VARIABLES: Final = tuple("".join(f"--{name}: {pair[i]}; " for name, pair in COLOURS.items()) for i in (0, 1))
_CLASSES: Final = " ".join(f".{name} {{ {_css(looks)} }}" for name, looks in CLASSES.items())
STYLE: Final = f""":root {{ color-scheme: light dark; {_VARIABLES[0]}}}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_VARIABLES[1]}}} }}
@media print {{ :root {{ color-scheme: light }} }}
svg text {{ font: 12px {FONT}; fill: var(--ink) }} svg text.soft {{ fill: var(--soft) }}
{_CLASSES}"""


@dataclass(frozen=True, slots=True)
class Text:
    """A text; x, y is a point of its base line, at its start, middle or end. `kind`: ink or soft."""

    x: float
    y: float
    content: str
    anchor: str = "start"
    kind: str = "ink"


@dataclass(frozen=True, slots=True)
class Rect:
    """A rectangle of a class; its title is shown as a tooltip."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    title: str = ""
    opacity: float = 1.0


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points, or the area within them, by its classes."""

    points: Sequence[Point]
    kind: str


@dataclass(frozen=True, slots=True)
class Dot:
    """A disc of a class fill-sN, or that series' marker; its title is shown as a tooltip."""

    x: float
    y: float
    kind: str
    title: str = ""


Mark: TypeAlias = Text | Rect | Line | Dot


@dataclass(frozen=True, slots=True)
class Drawing:
    """Marks, within a size in pixels. If it has no head, its first HEAD pixels are empty."""

    size: Point
    marks: Sequence[Mark]
    headed: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture. `name` is the file name's stem, `text` the alternative text, `table` has the numbers.

    `draw(paper)` draws it for a page, or as wide as a paper's column, with the head of its y axis and whole labels.
    """

    name: str
    title: str
    text: str
    draw: Callable[[bool], Drawing]
    table: Table | None = None

    def page(self) -> Drawing:
        """Draw it for a page, with its title as head."""
        drawing = self.draw(False)
        size = (max(drawing.size[0], LETTER * len(self.title)), drawing.size[1])
        return Drawing(size, [Text(2, 16, self.title), *drawing.marks], headed=True)

    def svg(self, key: str = "") -> str:
        """Return an SVG file; with a key, an element of a page that includes STYLE."""
        return svg(self.page(), self.title, self.text, key)


def svg(drawing: Drawing, title: str, text: str, key: str = "") -> str:
    """Return an SVG file with its own style and ground.

    With a key, return an element of a page that includes STYLE; the key makes its ids unique on the page.
    """
    width, height = (f"{side:g}" for side in drawing.size)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<title id="{key}t">{html(title)}</title><desc id="{key}d">{html(text)}</desc>'
    lines = [f'role="img" aria-labelledby="{key}t {key}d" {size}>', head, *map(element, drawing.marks), "</svg>"]
    if key:
        return "<svg " + "\n".join(lines)
    lines[2:2] = [f"<style>{STYLE}</style>", element(Rect(0, 0, *drawing.size, "ground"))]
    return '<svg xmlns="http://www.w3.org/2000/svg" ' + "\n".join(lines) + "\n"


def element(mark: Mark) -> str:
    """Return the SVG element of a mark."""
    match mark:
        case Text(x, y, content, anchor, kind):
            soft = ' class="soft"' if kind == "soft" else ""
            return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{soft}>{html(content)}</text>'
        case Line(points, kind):
            return f'<path class="{kind}" d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>'
        case Rect(x, y, width, height, kind, _, opacity):
            faint = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
            tag, attributes = "rect", f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"{faint}'
        case Dot(x, y, kind):
            tag, attributes = "circle", f'cx="{x:.1f}" cy="{y:.1f}" r="2.5"'
    tooltip = f"><title>{html(mark.title)}</title></{tag}>" if mark.title else "/>"
    return f'<{tag} class="{kind}" {attributes}{tooltip}'


def inks(colour: int, dash: int) -> tuple[str, str]:
    """Return the classes of a series' lines, and of its areas and dots."""
    return f"stroke-s{colour % SERIES} dash-{dash % len(DASHES)}", f"fill-s{colour % SERIES}"


def legend(
    x: float, y: float, entries: Sequence[tuple[str, str]], *, width: float, dots: Sequence[str] = ()
) -> tuple[list[Mark], float]:
    """Return a legend of (class, label) entries, wrapped at `width` as its labels are, and its height.

    `dots`: the classes of dots on its lines.
    """
    marks, at, line = list[Mark](), x, 0
    for i, (kind, label) in enumerate(entries):
        swatch = 24 if kind.startswith("stroke") else 11
        words = wrapped(label, width - swatch - 7)
        needed = swatch + 7 + LETTER * max(map(len, words)) + 14
        if at > x and at + needed > x + width + 14:
            at, line = x, line + 1
        top = y + 18 * line
        if kind.startswith("stroke"):
            marks.append(Line([(at, top - 4), (at + swatch, top - 4)], kind))
            marks += [Dot(at + swatch / 2, top - 4, dot) for dot in dots[i : i + 1]]
        else:
            marks.append(Rect(at, top - 10, swatch, 11, kind))
        marks += [Text(at + swatch + 7, top + 16 * j, part) for j, part in enumerate(words)]
        at += needed
        if len(words) > 1:
            at, line = x, line + len(words)
    return marks, 18.0 * (line + (at > x)) if entries else 0.0


def wrapped(label: str, width: float) -> list[str]:
    """Return the lines of a text that fit into a width in pixels, at least one."""
    return wrap(clean(label), max(8, int(width / LETTER))) or [""]
