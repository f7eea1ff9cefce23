"""Draw the pictures of docs/concepts.md: the three layers, a global round, a model in transfer.

python -m docs.tools.sketches docs
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from docs.tools.pictures import picture
from fedstrata.deploy.results.figures import COLOURS, PHASES, Box, Canvas, Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BOX: Final = (70.0, 22.0)  # points
BROKER: Final = (40.0, 14.0)
BAR: Final = 11.0
SLANT: Final = 5.0  # of an arrow between a node and a broker

Point = tuple[float, float]


def layers() -> str:
    """Draw a cloud, two institutions and their devices, their brokers, and the rates of the links."""
    cloud, homes = (190.0, 14.0), ((84.0, 128.0), (296.0, 128.0))
    devices = [(28.0 + 56.0 * i + (44.0 if i > 2 else 0.0), 226.0) for i in range(6)]
    upper, lower = (190.0, 72.0), ((84.0, 180.0), (296.0, 180.0))  # of the brokers
    notes = {
        14.0: "global rounds: a rule over the institutions;\nTempo: the epochs of the next one",
        72.0: "WAN, 20 Mbit/s: a model down, a model up, once",
        128.0: "local rounds: a rule over the devices",
        180.0: "LAN, 100 Mbit/s: the same in each local round",
        226.0: "epochs of SGD on the device's own samples",
    }

    def draw() -> Canvas:
        canvas = Canvas(620, 246)
        axes = canvas.ground()
        ends = [(cloud, upper), *((upper, home) for home in homes), *zip(homes, lower, strict=True)]
        ends += [(lower[i // 3], place) for i, place in enumerate(devices)]
        for (x0, y0), (x1, y1) in ends:
            axes.plot([x0, x1], [y0, y1], color=COLOURS["line"], linewidth=0.8, zorder=0)
        _box(axes, cloud, "cloud", BOX)
        for i, home in enumerate(homes):
            _box(axes, home, f"institution {i}", BOX)
        for i, place in enumerate(devices):
            _box(axes, place, f"device {i}", (48.0, BOX[1]))
        for place in (upper, *lower):
            _box(axes, place, "broker", BROKER, fill="grid")
        for y, note in notes.items():
            axes.text(390, y, note, va="center", color=COLOURS["soft"])
        return canvas

    description = (
        "A cloud and two institutions meet at one MQTT broker over a WAN, each institution and "
        "its three devices at"
        " another over a LAN."
    )
    return picture([[Figure("layers", "", description, draw)]], "The three layers", description)


def global_round() -> str:
    """Draw the time lines of one global round with one local round, and its phases as measured at
    the cloud.
    """
    rows = {
        "cloud": 22.0,
        "institution 0": 56.0,
        "device 0": 90.0,
        "institution 1": 138.0,
        "device 3": 172.0,
    }
    ends = {"dispatch": 174.0, "train": 314.0, "wait": 406.0, "collect": 494.0, "aggregate": 534.0}
    start, phases = 100.0, 206.0

    def draw() -> Canvas:
        canvas = Canvas(580, 234)
        axes = canvas.ground()
        boxes = [Box(ends["collect"], rows["cloud"] - BAR / 2, 40, BAR, PHASES["aggregate"])]
        for name, y in rows.items():
            axes.text(2, y, name, va="center")
            axes.plot([86, 570], [y, y], color=COLOURS["grid"], linewidth=0.8, zorder=0)
        axes.text(2, phases + BAR / 2, "phases", va="center")
        begin = start
        for phase, end in ends.items():
            boxes.append(Box(begin, phases, end - begin - 0.7, BAR, PHASES[phase]))
            axes.text((begin + end) / 2, phases + 22, phase, ha="center", color=COLOURS["soft"])
            axes.plot(
                [end, end],
                [10, phases],
                color=COLOURS["soft"],
                linewidth=0.7,
                linestyle=(0, (1.3, 2)),
            )
            begin = end
        for home, device, arrives, trained, announced, there in (
            ("institution 0", "device 0", 153.0, 267.0, 314.0, 400.0),
            ("institution 1", "device 3", 174.0, 360.0, 406.0, 494.0),
        ):
            boxes.append(
                Box(
                    arrives + 17,
                    rows[device] - BAR / 2,
                    trained - arrives - 17,
                    BAR,
                    PHASES["train"],
                )
            )
            boxes.append(Box(announced - 10, rows[home] - BAR / 2, 10, BAR, PHASES["aggregate"]))
            axes.text(
                (arrives + trained + 17) / 2,
                rows[device] + 15,
                "SGD",
                ha="center",
                color=COLOURS["soft"],
            )
            _arrow(axes, (start, rows["cloud"]), (arrives, rows[home]))
            _arrow(axes, (arrives - 40, rows[home]), (arrives + 17, rows[device]))
            _arrow(axes, (trained, rows[device]), (announced - 10, rows[home]))
            _arrow(axes, (announced, rows[home]), (there, rows["cloud"]))
            axes.text(
                there - 30, rows["cloud"] - 10, "result, model", ha="center", color=COLOURS["soft"]
            )
        axes.text(start + 4, rows["cloud"] - 10, "task, model", color=COLOURS["soft"])
        canvas.boxes(axes, boxes)
        return canvas

    description = (
        "The cloud sends its model to the institutions, which forward the chunks to their devices "
        "as they arrive. The"
        " devices train. Each institution mixes their models and announces its result, and the "
        "cloud fetches it."
    )
    return picture([[Figure("round", "", description, draw)]], "A global round", description)


def transfers() -> str:
    """Draw how a model goes up from a device to the cloud, with a lost chunk, and how the next one
    comes down.
    """
    lanes = {
        "device": 44.0,
        "broker of the LAN": 174.0,
        "institution": 304.0,
        "broker of the WAN": 434.0,
        "cloud": 564.0,
    }
    device, lan, institution, wan, cloud = lanes.values()
    lost = 117.0  # the height of the message that ends at the broker
    up, down = (device, lan, institution), (institution, lan, device)
    up_wan, down_wan = (institution, wan, cloud), (cloud, wan, institution)
    messages = [
        (54.0, up, "Result: the manifest"),
        (75.0, down, "Ask: all chunks"),
        (96.0, up, "chunks 0, 1"),
        (lost, up, "chunk 2"),
        (138.0, up, "chunks 3, 4, 5"),
        (159.0, down, "Ask: chunk 2"),
        (180.0, up, "chunk 2"),
        (242.0, up_wan, "Result: the manifest"),
        (259.0, down_wan, "Ask: all chunks"),
        (276.0, up_wan, "chunks 0 to 5"),
        (310.0, down_wan, "Task: the manifest"),
        (326.0, down, "Task: the manifest"),
    ]
    for i in range(3):
        name, y = f"chunks {2 * i}, {2 * i + 1}", 350.0 + 19 * i
        messages += [(y, down_wan, name), (y + 16, down, name)]
    notes = {
        58.0: "its size, and a digest of each chunk",
        79.0: "what is lacking, how many may be in flight",
        121.0: "lost: a kill, a restart of the broker",
        142.0: "each is checked by its digest",
        163.0: "the repair: 2 was passed, so it is lost",
        195.0: "complete: Ask of nothing, Acknowledgement",
    }
    parts = {
        28.0: "Up: a device's result",
        206.0: "Up: the institution's result",
        293.0: "Down: cut-through",
    }

    def draw() -> Canvas:
        canvas = Canvas(620, 436)
        axes = canvas.ground()
        for name, x in lanes.items():
            axes.text(x, 10, name, ha="center", va="center")
            axes.plot([x, x], [18, 420], color=COLOURS["grid"], linewidth=0.8, zorder=0)
        for y, title in parts.items():
            axes.plot(
                [0, 620], [y, y], color=COLOURS["soft"], linewidth=0.7, linestyle=(0, (1.3, 2))
            )
            axes.text(2, y + 9, title, va="center")
        for y, ends, label in messages:
            _hop(axes, ends, y, label, is_lost=y == lost)
        for y, note in notes.items():
            axes.text(institution + 12, y, note, va="center", color=COLOURS["soft"])
        canvas.boxes(axes, [Box(institution - 5.5, 217, 11, 20, PHASES["aggregate"])])
        made = "the rule makes one model of all results"
        axes.text(institution - 12, 228, made, ha="right", va="center", color=COLOURS["soft"])
        limit = "Each chunk goes on as it arrives: two tiers take the time of the slower link."
        axes.text(2, 429, limit, va="center", color=COLOURS["soft"])
        return canvas

    description = (
        "A device announces its result with a manifest. The institution asks for chunks, checks "
        "each by its digest, and"
        " asks again for one that was lost. It mixes all results and announces its own to the "
        "cloud, which fetches it"
        " the same way. Downwards the institution forwards each chunk to its devices as it "
        "arrives. All messages pass"
        " the broker of their tier."
    )
    return picture(
        [[Figure("transfers", "", description, draw)]], "A model in transfer", description
    )


def _hop(
    axes: Axes, ends: tuple[float, float, float], y: float, label: str, *, is_lost: bool
) -> None:
    """Draw a message from a node over a broker to a node; a lost one ends at the broker."""
    start, broker, end = ends
    _arrow(axes, (start, y), (broker, y + SLANT))
    axes.text((start + broker) / 2, y - 1, label, ha="center", va="bottom", color=COLOURS["soft"])
    if is_lost:
        axes.plot([broker + 10], [y + SLANT], marker="x", markersize=6, color=COLOURS["line"])
    else:
        _arrow(axes, (broker, y + SLANT), (end, y + 2 * SLANT))


def _box(axes: Axes, place: Point, name: str, size: Point, *, fill: str = "ground") -> None:
    """Draw a box with a name around a point."""
    (x, y), (wide, high) = place, size
    corners = (
        [x - wide / 2, x + wide / 2, x + wide / 2, x - wide / 2],
        [y - high / 2] * 2 + [y + high / 2] * 2,
    )
    axes.fill(*corners, facecolor=COLOURS[fill], edgecolor=COLOURS["line"], linewidth=0.8)
    axes.text(x, y, name, ha="center", va="center")


def _arrow(axes: Axes, start: Point, end: Point) -> None:
    axes.annotate(
        "",
        end,
        start,
        arrowprops={"arrowstyle": "->", "color": COLOURS["line"], "shrinkA": 0, "shrinkB": 0},
    )


PICTURES: Final[Mapping[str, Callable[[], str]]] = {
    "concepts-layers.svg": layers,
    "concepts-round.svg": global_round,
    "concepts-transfers.svg": transfers,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(sys.argv[1], name).write_text(draw(), encoding="utf-8")
