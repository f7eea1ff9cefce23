"""A picture of a split: a row per device, a column per class or bin, and squares whose areas show the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deploy.console.tabular import Column, Table
from deploy.report.figures import LETTER, Figure, rect, text
from deploy.report.many import spaced

CELL, TOP, GAP = 14, 52.0, 6  # pixels


def figure(facts: Mapping[str, Any], *, name: str = "partition") -> Figure:
    """Return the picture of a split, given the content of partition.json.

    The area of a square is proportional to its samples; its title has the number. Of many devices evenly spaced ones
    are shown.
    """
    devices = facts["devices"]
    data = facts.get("data", {})
    split = f"{data.get('dataset', '')}, {data.get('partition', '')}"
    homes: dict[str, list[str]] = {}
    for device, held in devices.items():
        homes.setdefault(str(held["parent"]), []).append(device)
    kind = "bin" if any("by_bin" in held for held in devices.values()) else "class"
    counts = {device: [int(count) for count in held[f"by_{kind}"]] for device, held in devices.items()}
    classes = max(map(len, counts.values()), default=0)
    most = max((count for held in counts.values() for count in held), default=0) or 1
    rows = spaced([(home, device) for home, members in homes.items() for device in members])
    if len(rows) < len(devices):
        split += f", {len(rows)} of {len(devices)} devices, evenly spaced (partition.json has all)"
    left = 12 + LETTER * max((len(f"{home} / {device}") for home, device in rows), default=0)
    elements = [text(2, 16, f"{split}, seed {facts.get('seed', '')}: {facts.get('digest', '')}")]
    for label in range(0, classes, max(1, -(-classes // 20))):
        elements.append(text(left + CELL * (label + 0.5), TOP - 6, str(label), anchor="middle", kind="soft"))
    y, before = TOP, rows[0][0] if rows else ""
    for home, device in rows:
        y, before = y + GAP * (home != before), home
        named = f"{home} / {device}"
        elements.append(text(left - 8, y + 11, named, anchor="end"))
        for label, count in enumerate(counts[device]):
            if count:
                side = max(1.0, (CELL - 2) * (count / most) ** 0.5)
                corner = (left + CELL * label + (CELL - side) / 2, y + (CELL - side) / 2)
                elements.append(rect(*corner, side, side, "weight", title=f"{named}, {kind} {label}: {count}"))
        elements.append(text(left + CELL * classes + 8, y + 11, str(sum(counts[device]))))
        y += CELL
    elements.append(rect(left, TOP, CELL * classes, y - TOP, "grid"))
    columns = [Column("parent", text=True), Column("device", text=True), *(Column(str(c)) for c in range(classes))]
    table = Table(
        name, f"Samples by device and {kind}", columns, [(*row, *_padded(counts[row[1]], classes)) for row in rows]
    )
    size = (max(left + CELL * classes + 70, 470.0), y + 10)
    return Figure(name, f"Samples by device and {kind}", split, size, elements, table)


def _padded(counts: Sequence[int], classes: int) -> list[int]:
    return [*counts, *[0] * (classes - len(counts))]
