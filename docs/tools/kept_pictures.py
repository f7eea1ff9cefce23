"""Draw the curves of kept runs, the score over time and over the cloud's bytes: NAME.svg for each folder of a sweep.

    python -m docs.tools.kept_pictures docs/results

Runs of one task are laid over each other: the data, the split and the model are the same. Each task has a row.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deploy.results.figures import Drawing, Text, svg
from deploy.results.run import Run, folders, tiers_of
from deploy.results.sections import curves
from deploy.results.series import Series, firsts, series_of
from docs.tools.runs_picture import arranged


def pictures(root: Path) -> dict[str, str]:
    """Return the SVG of each folder with kept runs, by its file's name."""
    return {f"{folder.name}.svg": picture(folder) for folder in sorted(root.iterdir()) if folder.is_dir()}


def picture(folder: Path) -> str:
    """Draw the kept runs of a sweep."""
    runs = [Run(path) for path in folders(folder)]
    series, rows, texts = series_of(runs), list[list[Drawing]](), list[str]()
    for task in firsts(series):
        title, lines = _named([each for each in series if each.task == task])
        found = {figure.name: figure for figure in curves(lines)}
        score = lines[0].runs[0].experiment.score.label.replace(" ", "-")
        shown = [found[f"{score}-{over}"] for over in ("seconds", tiers_of(lines[0].runs)[0])]
        rows += [[Drawing((0, 22), [Text(2, 16, title)])]] * bool(title) + [[figure.page() for figure in shown]]
        texts += [title, *(figure.text for figure in shown)]
    return svg(arranged(rows), f"Kept runs of {folder.name}", " ".join(filter(None, texts)))


def _named(series: Sequence[Series]) -> tuple[str, list[Series]]:
    """Return what the names of a task's series have in common, and the series with the rest as labels."""
    names = [each.whole.split(", ") for each in series]
    common = [part for part in names[0] if all(part in name for name in names)]
    labels = [", ".join(part for part in name if part not in common) for name in names]
    return ", ".join(common), [replace(each, label=own, number="") for each, own in zip(series, labels, strict=True)]


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        for name, text in pictures(folder).items():
            (folder / name).write_text(text, encoding="utf-8")
