"""SVG files of the docs: figures side by side, which follow the light or dark colours of a reader."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Final

from fedstrata.deploy.console.tabular import clean
from fedstrata.deploy.results.figures import PAGE_SCALE, STYLE, Figure, wrapped

HEAD: Final = 18.0  # pixels of a line of a title, above a figure
GAP: Final = 16.0
SVG: Final = "http://www.w3.org/2000/svg"
FILE_STYLE: Final = (
    "svg { background: var(--ground) } text { font: 12px var(--font); fill: var(--ink) }"
)


def picture(rows: Sequence[Sequence[Figure]], title: str, text: str, *, note: str = "") -> str:
    """Return an SVG file of figures side by side in rows, each below its title, with a note below
    all of them.
    """
    parts, width, down = list[str](), 0.0, 0.0
    for i, row in enumerate(rows):
        across = 0.0
        drawn = [figure.svg(f"f{i}-{j}-") for j, figure in enumerate(row)]
        heads = [
            wrapped(figure.title, _side("width", one) / PAGE_SCALE)
            for figure, one in zip(row, drawn, strict=True)
        ]
        head = HEAD * max(len(lines) if any(lines) else 0 for lines in heads)
        for lines, one in zip(heads, drawn, strict=True):
            for k, line in enumerate(lines):
                parts.append(
                    f'<text x="{across + 2:g}" '
                    f'y="{down + HEAD * (k + 1) - 6:g}">{escape(clean(line))}</text>'
                )
            parts.append(one.replace("<svg", f'<svg x="{across:g}" y="{down + head + 4:g}"', 1))
            across += _side("width", one) + GAP
        width, down = (
            max(width, across - GAP),
            down + head + max(_side("height", one) for one in drawn) + GAP,
        )
    if note:
        parts.append(f'<text x="2" y="{down + 4:g}">{escape(clean(note))}</text>')
        down += HEAD
    size = (
        f'role="img" aria-labelledby="t d" width="{width:g}" height="{down:g}" viewBox="0 0 '
        f'{width:g} {down:g}"'
    )
    words = f'<title id="t">{escape(title)}</title><desc id="d">{escape(clean(text))}</desc>'
    style = f"<style>{STYLE}\n{FILE_STYLE}</style>"
    return f'<svg xmlns="{SVG}" {size}>{words}{style}\n' + "\n".join(parts) + "\n</svg>\n"


def _side(name: str, element: str) -> float:
    found = re.search(rf' {name}="(\d+)"', element)
    return float(found[1]) if found else 0.0
