"""Draw the pictures of docs/concepts.md: the three layers, and the messages and phases of a global round.

python -m docs.tools.sketches docs
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from deploy.results.figures import PHASES, Drawing, Line, Mark, Rect, Text, svg

BOX: Final = (104.0, 34.0)


def layers() -> str:
    """Draw a cloud, two institutions and their devices, and the exchanges between the layers."""
    places = {"cloud": (280.0, 16.0), "institution 0": (120.0, 116.0), "institution 1": (440.0, 116.0)}
    devices = [(40.0 + 80.0 * i + (80.0 if i > 2 else 0.0), 216.0) for i in range(6)]
    marks: list[Mark] = []
    for institution in ("institution 0", "institution 1"):
        marks.append(Line([_under(places["cloud"]), places[institution]], "line"))
    for i, place in enumerate(devices):
        home = places["institution 0" if i < 3 else "institution 1"]
        marks.append(Line([_under(home), place], "line"))
    for name, place in places.items():
        marks += _box(place, name, width=BOX[0])
    for i, place in enumerate(devices):
        marks += _box(place, f"device {i}", width=68.0)
    notes = (
        (576.0, 28.0, "global rounds: a rule over the institutions;"),
        (576.0, 44.0, "Tempo: number of epochs in the next one"),
        (576.0, 76.0, "WAN: a model down, a model up, once"),
        (576.0, 128.0, "tau_i local rounds: a rule over the devices"),
        (576.0, 176.0, "LAN: a model down, a model up, tau_i times"),
        (576.0, 228.0, "tau_c epochs of SGD on the device's own data"),
    )
    marks += [Text(x, y, note, kind="soft") for x, y, note in notes]
    description = "A cloud, two institutions with three devices each, and the exchanges between the layers."
    return svg(Drawing((880, 260), marks), "The three layers", description)


def global_round() -> str:
    """Draw the time lines of one global round with one local round, and its phases as measured at the cloud."""
    left, right = 130.0, 850.0
    rows = {"cloud": 60.0, "institution 0": 110.0, "device 0": 160.0, "institution 1": 230.0, "device 3": 280.0}
    marks: list[Mark] = []
    for name, y in rows.items():
        marks += [Text(4, y + 4, name), Line([(left, y), (right, y)], "grid")]
    ends = {"dispatch": 260.0, "train": 470.0, "wait": 610.0, "collect": 740.0, "aggregate": 800.0}
    start = left + 20
    for phase, end in ends.items():
        marks.append(Rect(start, 330, end - start - 1, 16, PHASES[phase]))
        marks.append(Text((start + end) / 2, 364, phase, "middle", "soft"))
        marks.append(Line([(end, 40), (end, 330)], "target"))
        start = end
    for home, device, arrives, trained, announced, there in (
        ("institution 0", "device 0", 230.0, 400.0, 470.0, 600.0),
        ("institution 1", "device 3", 260.0, 540.0, 610.0, 740.0),
    ):
        marks.append(Rect(arrives + 25, rows[device] - 8, trained - arrives - 25, 16, PHASES["train"]))
        marks.append(Text((arrives + trained + 25) / 2, rows[device] - 12, "SGD", "middle", "soft"))
        marks.append(Rect(announced - 14, rows[home] - 8, 14, 16, PHASES["aggregate"]))
        marks += _arrow((left + 20, rows["cloud"]), (arrives, rows[home]), "task, model" if arrives < 240 else "")
        marks += _arrow((arrives - 60, rows[home]), (arrives + 25, rows[device]), "")
        marks += _arrow((trained, rows[device]), (announced - 14, rows[home]), "")
        marks += _arrow((announced, rows[home]), (there, rows["cloud"]), "result, model")
    marks.append(Rect(740, rows["cloud"] - 8, 60, 16, PHASES["aggregate"]))
    marks.append(Text(4, 342, "phases"))
    description = (
        "The cloud sends its model to the institutions, which forward the chunks to their devices as they arrive. The"
        " devices train. Each institution mixes their models and announces its result, and the cloud fetches it."
    )
    return svg(Drawing((right + 10, 376), marks), "A global round", description)


def _box(place: tuple[float, float], name: str, *, width: float) -> list[Mark]:
    x, y = place
    return [Rect(x - width / 2, y, width, BOX[1], "node"), Text(x, y + 21, name, "middle")]


def _under(place: tuple[float, float]) -> tuple[float, float]:
    return place[0], place[1] + BOX[1]


def _arrow(start: tuple[float, float], end: tuple[float, float], label: str) -> list[Mark]:
    """Draw an arrow with a label at its middle."""
    (x0, y0), (x1, y1) = start, end
    length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
    dx, dy = (x1 - x0) / length, (y1 - y0) / length
    head = [(x1 - 8 * dx - 4 * dy, y1 - 8 * dy + 4 * dx), (x1, y1), (x1 - 8 * dx + 4 * dy, y1 - 8 * dy - 4 * dx)]
    drawn: list[Mark] = [Line([start, end], "line"), Line(head, "line")]
    if label:
        drawn.append(Text((x0 + x1) / 2 + 6, (y0 + y1) / 2 - 2, label, kind="soft"))
    return drawn


PICTURES: Final[Mapping[str, Callable[[], str]]] = {"concepts-layers.svg": layers, "concepts-round.svg": global_round}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(sys.argv[1], name).write_text(draw(), encoding="utf-8")
