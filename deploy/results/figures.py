"""Figures as SVG elements coloured by CSS classes, so that they follow a page's light or dark colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Final

from deploy.console.tabular import Table, clean, html

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
_VARIABLES: Final = tuple("".join(f"--{name}: {pair[i]}; " for name, pair in COLOURS.items()) for i in (0, 1))
STYLE: Final = f""":root {{ color-scheme: light dark; {_VARIABLES[0]}}}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_VARIABLES[1]}}} }}
@media print {{ :root {{ color-scheme: light }} }}
svg text {{ font: 12px {FONT}; fill: var(--ink) }} svg text.soft {{ fill: var(--soft) }}
.ground {{ fill: var(--ground) }}
.grid {{ stroke: var(--grid); fill: none }} .line {{ stroke: var(--line); fill: none }}
.weight {{ fill: var(--s0) }} .node {{ stroke: var(--line); fill: var(--ground) }}
.target {{ stroke: var(--soft); fill: none; stroke-dasharray: 2 3 }}
.band {{ fill-opacity: 0.16 }} .thin {{ stroke-width: 1; stroke-opacity: 0.7 }}
{" ".join(f".fill-{name} {{ fill: var(--{name}) }}" for name in COLOURS)}
{" ".join(f".stroke-s{i} {{ stroke: var(--s{i}); fill: none; stroke-width: 2 }}" for i in range(SERIES))}
{" ".join(f".dash-{i} {{ stroke-dasharray: {dash} }}" for i, dash in enumerate(DASHES) if dash)}"""


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture. `name` is the file name's stem, `text` the alternative text, `table` has the numbers.

    If it is `headed`, its title is drawn in the HEAD pixels above its elements.
    """

    name: str
    title: str
    text: str
    size: tuple[float, float]
    elements: Sequence[str]
    table: Table | None = None
    headed: bool = True

    @property
    def width(self) -> float:
        """The width in pixels, with the title."""
        return max(self.size[0], LETTER * len(self.title) * self.headed)

    def inline(self, key: str) -> str:
        """Return the `svg` element for a page that includes STYLE; `key` makes its ids unique on the page."""
        return self._svg(f' role="img" aria-labelledby="{key}-t {key}-d"', f' id="{key}-t"', f' id="{key}-d"', "")

    def file(self) -> str:
        """Return an SVG file with its own style and background."""
        own = f"<style>{STYLE}</style>\n{rect(0, 0, self.width, self.size[1], 'ground')}\n"
        return self._svg(' xmlns="http://www.w3.org/2000/svg"', "", "", own) + "\n"

    def _svg(self, attributes: str, title: str, description: str, style: str) -> str:
        width, height = f"{self.width:g}", f"{self.size[1]:g}"
        body = "\n".join([*[text(2, 16, self.title)] * self.headed, *self.elements])
        return (
            f'<svg{attributes} width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n'
            f"<title{title}>{html(self.title)}</title><desc{description}>{html(self.text)}</desc>\n{style}{body}\n</svg>"
        )


def text(x: float, y: float, content: str, *, anchor: str = "start", kind: str = "ink") -> str:
    """Return a text element; x, y is a point of its base line."""
    soft = ' class="soft"' if kind == "soft" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{soft}>{html(content)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str, *, title: str = "", opacity: float = 1) -> str:
    """Return a rectangle with a CSS class; its title is shown as a tooltip."""
    faint = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return (
        f'<rect class="{kind}" {place}{faint}/>'
        if not title
        else (f'<rect class="{kind}" {place}{faint}><title>{html(title)}</title></rect>')
    )


def path(points: Sequence[tuple[float, float]], kind: str) -> str:
    """Return a polyline through points."""
    return f'<path class="{kind}" d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>'


def dot(x: float, y: float, kind: str, *, title: str, radius: float = 2.5) -> str:
    """Return a disc; its title is shown as a tooltip."""
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"><title>{html(title)}</title></circle>'


def legend(x: float, y: float, entries: Sequence[tuple[str, str]], *, width: float) -> tuple[list[str], float]:
    """Return a legend of (class, label) entries, wrapped at `width` as its labels are, and its height."""
    elements, at, line = list[str](), x, 0
    for kind, label in entries:
        swatch = 24 if kind.startswith("stroke") else 11
        words = wrapped(label, width - swatch - 7)
        needed = swatch + 7 + LETTER * max(map(len, words)) + 14
        if at > x and at + needed > x + width + 14:
            at, line = x, line + 1
        top = y + 18 * line
        if kind.startswith("stroke"):
            elements.append(path([(at, top - 4), (at + swatch, top - 4)], kind))
        else:
            elements.append(rect(at, top - 10, swatch, 11, kind))
        elements += [text(at + swatch + 7, top + 16 * i, part) for i, part in enumerate(words)]
        at += needed
        if len(words) > 1:
            at, line = x, line + len(words)
    return elements, 18.0 * (line + (at > x)) if entries else 0.0


def wrapped(label: str, width: float) -> list[str]:
    """Return the lines of a text that fit into a width in pixels, at least one."""
    return wrap(clean(label), max(8, int(width / LETTER))) or [""]
