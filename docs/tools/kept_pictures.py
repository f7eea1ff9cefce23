"""Draw what kept runs show, a dot for each method: NAME.svg for each folder of a sweep.

    python -m docs.tools.kept_pictures docs/results

Each task has a chart: the data, the split and the model are the same. A report of a folder has the
curves.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from docs.tools.kept_dots import dots
from docs.tools.pictures import picture
from fedstrata.deploy.results.figures import Figure
from fedstrata.deploy.results.run import Run, folders
from fedstrata.deploy.results.series import Series, baselines, series_of


def pictures(root: Path) -> dict[str, str]:
    """Return the SVG of each folder with kept runs, by its file's name."""
    return {
        f"{folder.name}.svg": drawn(folder) for folder in sorted(root.iterdir()) if folder.is_dir()
    }


def drawn(folder: Path) -> str:
    """Draw the kept runs of a sweep."""
    runs = [Run(path) for path in folders(folder)]
    series, rows = series_of(runs), list[list[Figure]]()
    for task in baselines(series):
        title, members = _named([each for each in series if each.task == task])
        for chart in dots(folder.name, members):
            rows.append([replace(chart, title=f"{title}: {chart.title}" if title else chart.title)])
    return picture(
        rows, f"Kept runs of {folder.name}", " ".join(figure.text for row in rows for figure in row)
    )


def _named(series: Sequence[Series]) -> tuple[str, list[Series]]:
    """Return what the names of a task's series have in common, and the series with the rest as
    labels.
    """
    names = [each.whole.split(", ") for each in series]
    common = [part for part in names[0] if all(part in name for name in names)]
    labels = [", ".join(part for part in name if part not in common) for name in names]
    return ", ".join(common), [
        replace(each, label=own) for each, own in zip(series, labels, strict=True)
    ]


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        for name, text in pictures(folder).items():
            (folder / name).write_text(text, encoding="utf-8")
