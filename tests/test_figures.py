"""The figures of reports: what is drawn is what the numbers say, in colours that all readers can
distinguish.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import BytesIO
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.text import Text
from PIL import Image, ImageColor

from docs.tools.pictures import SVG, picture
from fedstrata.common.experiment.reading import parse
from fedstrata.common.settings.topology import Tree
from fedstrata.deploy.results import charts
from fedstrata.deploy.results.charts import Axis, Curve
from fedstrata.deploy.results.figures import COLOURS, MARKERS, SERIES, STYLE, Figure
from fedstrata.deploy.results.maps import Rates, topology
from tests.helpers.figures import boxes_of, curves_of, drawn, texts, tooltips

AXIS = Axis("x")
PARTS = [("s0", "train"), ("s5", "wait")]
AMOUNTS = st.floats(0, 1e6)
LONG = [f"cloud.aggregation.alpha={i} {'institution_' * 9}" for i in range(9)]
LONG_CURVES = {name: Curve([(1.0, i), (9.0, 2 * i)], [i, i]) for i, name in enumerate(LONG)}


def test_points_bands_and_targets_are_those_of_the_curves() -> None:
    points, deviations = [(0.0, 1.0), (4.0, 3.0), (10.0, 5.0)], [0.5, 0.25, 1.0]
    curve = Curve(points, deviations, rest=[[(1.0, 2.0), (9.0, 4.0)]])
    y = Axis("score", "%", 100.0, (0.0, 5.5))
    figure = charts.curves("n", "t", {"a": curve}, x=Axis("time", "s", 2.0), y=y, target=2.5)
    axes = drawn(figure).sheet.axes[0]
    thin, whole, target = (np.asarray(line.get_xydata()) for line in axes.lines)
    assert np.array_equal(whole, [(0, 100), (8, 300), (20, 500)]) and np.array_equal(
        thin, [(2, 200), (18, 400)]
    )
    assert np.array_equal(target[:, 1], [250, 250])
    (band,) = (each for each in axes.collections if isinstance(each, FillBetweenPolyCollection))
    around = {(x, y) for x, y in band.get_paths()[0].vertices.tolist()}
    # within the bounds
    assert around == {(0, 50), (0, 150), (8, 275), (8, 325), (20, 400), (20, 550)}
    assert axes.get_xlim() == (0, 20) and axes.get_ylim() == (0, 600)
    assert tooltips(drawn(figure)) == ["a: 0 s, 100 %", "a: 8 s, 300 %", "a: 20 s, 500 %"]


def test_bars_are_stacked() -> None:
    axis = Axis("time", "s", 2.0)
    figure = charts.bars("n", "t", PARTS, {"a": (1.0, 3.0), "b": (0.0, 2.0)}, axis=axis)
    canvas = drawn(figure)
    boxes = sorted(boxes_of(canvas), key=lambda box: (box[1], box[0]))
    assert [(x, wide) for x, _, wide, _ in boxes] == [(0, 2), (2, 6), (0, 4)]
    assert boxes[0][1] == boxes[1][1] and boxes[2][1] > boxes[0][1] + charts.THICK
    assert canvas.sheet.axes[0].get_xlim() == (0, 8) and {"a: 8.00 s", "b: 4.00 s"} <= set(
        texts(figure)
    )
    assert tooltips(canvas) == ["a, train: 2.000 s", "a, wait: 6.000 s", "b, wait: 4.000 s"]


def test_a_page_has_the_variables_of_its_colours_and_tooltips() -> None:
    lines = {"a": Curve([(1.0, 2.0), (2.0, 3.0)], [0.1, 0.1]), "b": Curve([(1.0, 1.0)])}
    figure = charts.curves("n", "t<", lines, x=AXIS, y=AXIS)
    text = figure.svg("k-")
    assert not re.search("#[0-9a-f]{6}", text) and {"s0", "s1", "ink", "line", "grid"} < set(
        re.findall(r"--(\w+)", text)
    )
    root = ElementTree.fromstring(text)
    found = [title.text for use in root.iter("use") for title in use.iter("title")]
    assert found == ["a: 1 x, 2 ", "a: 2 x, 3 ", "b: 1 x, 1 "]
    assert root.get("aria-labelledby") == "k-title k-desc" and root.findtext("title") == "t<"
    assert all(key.startswith("k-") for each in root.iter() if (key := each.get("id")))
    file = ElementTree.fromstring(
        picture([[figure, figure], [figure]], "title", "text", note="a note")
    )
    assert len(file.findall(f"{{{SVG}}}svg")) == 3 and "a note" in [*file.itertext()]
    ids = [key for each in file.iter() if (key := each.get("id"))]
    assert len(ids) == len(set(ids))


def test_files_for_papers_are_in_the_light_colours_with_their_font() -> None:
    curve = Curve([(float(i), float(i)) for i in range(120)])
    figure = charts.curves("n", "t", {"a": curve, "$_{$": curve}, x=AXIS, y=AXIS)
    files = figure.files(["pdf", "png", "svg"])
    assert files == figure.files(["pdf", "png", "svg"])
    assert (
        b"/FontFile2" in files["pdf"]
        and b"/Type3" not in files["pdf"]
        and b"CreationDate" not in files["pdf"]
    )
    assert COLOURS["s0"] in files["svg"].decode() and "var(" not in files["svg"].decode()
    with Image.open(BytesIO(files["png"])) as image:
        assert image.width == 3.5 * 300
        assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_each_series_has_a_colour_and_a_marker() -> None:
    lines = {str(i): Curve([(float(x), float(i + x)) for x in range(120)]) for i in range(SERIES)}
    found = curves_of(drawn(charts.curves("n", "t", lines, x=AXIS, y=AXIS)))
    assert [line.get_color() for line in found.values()] == [
        COLOURS[f"s{i}"] for i in range(SERIES)
    ]
    assert "".join(str(line.get_marker()) for line in found.values()) == MARKERS
    assert [line.get_markevery() for line in found.values()] == [8] * SERIES


@example(levels=[(0.00025, 0.0)], ends=[199_999.0])
@given(
    levels=st.lists(st.tuples(AMOUNTS, AMOUNTS), min_size=1, max_size=4),
    ends=st.lists(AMOUNTS, min_size=1),
)
def test_no_text_is_outside_of_its_chart(
    levels: list[tuple[float, float]], ends: list[float]
) -> None:
    points = [Curve([(end, level) for end in ends]) for level, _ in levels]
    lines = {f"line {i}": line for i, line in enumerate(points)}
    for figure in (
        charts.curves("n", "t", lines, x=AXIS, y=AXIS, target=levels[0][1]),
        charts.bars(
            "n", "t", PARTS, {f"bar {i}": both for i, both in enumerate(levels)}, axis=AXIS
        ),
    ):
        check_inside(figure)


@pytest.mark.parametrize(
    "figure",
    [
        charts.curves("n", "t", LONG_CURVES, x=AXIS, y=AXIS),
        charts.curves("n", "t", {"_a": Curve([(1.0, 0.5)]), "b": Curve([])}, x=AXIS, y=AXIS),
        charts.bars("n", "t", PARTS, dict.fromkeys(LONG, (1.0, 2e6)), axis=AXIS),
        topology("t", Tree([{"cloud": LONG[:1]}, {LONG[0]: LONG[1:]}]), {}),
    ],
    ids=["curves", "points", "bars", "topology"],
)
def test_no_label_is_cut_off(figure: Figure) -> None:
    check_inside(figure)


def check_inside(figure: Figure) -> None:
    """Check that what is drawn lies within the figure."""
    sheet = drawn(figure).sheet
    box, (width, height) = sheet.get_tightbbox(), sheet.get_size_inches()
    assert box.x0 >= -0.03 and box.y0 >= -0.03, box
    assert box.x1 <= width + 0.03 and box.y1 <= height + 0.03, box


def test_global_rounds_are_whole_numbers() -> None:
    whole = Axis("global round", whole=True)
    curve = charts.curves("n", "t", {"a": Curve([(1.0, 0.0), (2.0, 1.0)])}, x=whole, y=AXIS)
    assert "1.5" not in texts(curve)


def test_a_chart_has_whole_labels_and_no_title_inside() -> None:
    points = [(1.0, 0.5), (11.0, 0.75)]
    lines = {"alpha=1": Curve(points), "alpha=2": Curve(points[:1])}
    words = texts(charts.curves("n", "t", lines, x=AXIS, y=Axis("accuracy", "%", 100.0)))
    assert {"accuracy, %", "alpha=1", "alpha=2", "10"} <= set(words) and "t" not in words


# Machado et al. 2009: linear RGB as it is, and as seen without long, middle and short cones.
VISIONS = np.array(
    [
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ],
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ],
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ],
    ]
)
# Ottosson's Oklab: linear RGB to cones, and their cube roots to lightness and two colour axes.
CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
LAB_AXES = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_every_reader_can_distinguish_any_two_series(theme: int) -> None:
    light, _, dark = STYLE.partition("@media")
    colours_of = dict(re.findall(r"--(\w+): (#\w+)", (light, dark)[theme]))

    def linear(name: str) -> Any:
        share = np.array(ImageColor.getrgb(colours_of[name])) / 255
        return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)

    colours = [linear(f"s{i}") for i in range(SERIES)]
    seen = np.array(
        [
            [LAB_AXES @ np.cbrt(CONES @ np.clip(vision @ colour, 0, 1)) for vision in VISIONS]
            for colour in colours
        ]
    )
    for one, other in combinations(seen, 2):
        assert np.linalg.norm(one - other, axis=1).min() > 0.09  # the colours before had 0.005
    luminances = [colour @ (0.2126, 0.7152, 0.0722) for colour in (*colours, linear("ground"))]
    for each in luminances[:-1]:
        low, high = sorted((each, luminances[-1]))
        assert (high + 0.05) / (low + 0.05) >= 3.0  # WCAG 1.4.11


def test_equal_curves_are_drawn_once_and_share_a_name() -> None:
    points = [(1.0, 0.25), (2.0, 0.5)]
    lines = {
        "slow, a": Curve(points),
        "slow, b": Curve([(1.0, 0.5), (2.0, 0.75)]),
        "fast, a": Curve(list(points)),
        "none": Curve([]),
        "none, too": Curve([]),
    }
    figure = charts.curves("n", "t", lines, x=AXIS, y=AXIS)
    words, found = texts(figure), curves_of(drawn(figure))
    assert {"slow, a = fast, a", "slow, b", "none", "none, too"} <= set(
        words
    ) and "slow, a" not in words
    assert [line.get_color() for line in found.values()] == [COLOURS["s0"], COLOURS["s1"]]
    assert figure.table is not None and len(figure.table.rows) == 6  # each curve has its numbers


def test_a_legend_has_what_can_be_seen() -> None:
    parts = [("s0", "train"), ("s5", "wait"), ("s2", "evaluate"), ("s1", "collect")]
    bars = {"a": (1.0, 0.5, 0.0, 1e-4), "b": (0.5, 0.0, 0.0, 0.0)}
    figure = charts.bars("n", "t", parts, bars, axis=AXIS)
    words = texts(figure)
    assert {"train", "wait"} <= set(words) and not {"evaluate", "collect"} & set(words)
    assert figure.table is not None and "evaluate" in [
        column.name for column in figure.table.columns
    ]


@example(low=5e-324, span=0.0)
@given(low=st.floats(-1e9, 1e9), span=st.floats(0, 1e9))
def test_levels_are_few_and_hold_the_range(low: float, span: float) -> None:
    figure = charts.curves("n", "t", {"a": Curve([(1.0, low), (2.0, low + span)])}, x=AXIS, y=AXIS)
    axes = figure.draw().sheet.axes[0]
    found: Sequence[float] = axes.get_yticks()
    slack = 1e-6 * (found[1] - found[0]) + 1e-9 * abs(low)
    assert 2 <= len(found) <= 9
    assert found[0] <= low + slack and found[-1] >= low + span - slack
    assert axes.get_ylim() == (found[0], found[-1])


def test_devices_of_like_links_are_one_box() -> None:
    slow, fast = Rates((1.0, 0.5), 30.0, (0.9, None)), Rates((None, None), 0.0, (None, None))
    tree = Tree([{"cloud": ["i"]}, {"i": ["a", "b", "c"]}])
    figure = topology("t", tree, {"i": fast, "a": slow, "b": fast, "c": slow})
    words = texts(figure)
    assert {"2 devices", "b", "1 / 0.5 Mbit/s, 30 ms", "measured 0.9 / -", "unlimited"} <= set(
        words
    )


@pytest.mark.parametrize("tiers", [1, 2, 3])
def test_each_layer_is_a_column(tiers: int) -> None:
    tree = parse(
        {"tiers": [{"name": f"t{i}", "children": f"n{i}", "fan_out": 2} for i in range(tiers)]}
    ).tree
    rates = {name: Rates((float(i), 1.0), 0.0, (None, None)) for i, name in enumerate(tree.nodes)}
    canvas = drawn(topology("t", tree, rates))
    names = [
        text for text in canvas.sheet.findobj(Text) if text.get_text() in {"cloud", *tree.nodes}
    ]
    assert len({text.get_position()[0] for text in names}) == tiers + 1
    assert len(names) == len(tree.nodes) + 1
