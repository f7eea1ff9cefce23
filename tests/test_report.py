"""The report: what it reports is what the files say, nothing in it runs or asks a network, and it can be read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from io import BytesIO
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image, ImageColor

from cloud.results import RunFolder
from common.experiment import tiers as experiment_tiers
from common.experiment.reading import parse
from common.protocol.round_state import GLOBAL_PHASES
from deploy.console.tabular import THIN, html
from deploy.results import charts
from deploy.results.figures import (
    CLASSES,
    COLOURS,
    LETTER,
    SERIES,
    STYLE,
    Dot,
    Drawing,
    Figure,
    Line,
    Mark,
    Rect,
    Text,
    inks,
)
from deploy.results.maps import Rates, epochs, topology
from deploy.results.page import compose
from deploy.results.run import Run
from tests.helpers.commands import invoke, table
from tests.helpers.direct import run_direct
from tests.helpers.records import BYTES

MakeRun = Callable[..., Path]
AXIS = charts.Axis("x")
LAB: dict[str, Any] = {
    "name": "tiny", "rounds": 3, "stop": {"target": 0.99},
    "topology": {"institutions": 2, "devices": 4},
    "data": {"dataset": "synthetic", "classes": 3, "image_shape": [1, 8, 8], "samples": 120,
             "test_samples": 40},
    "model": {"name": "mlp_digits"},
    "links": {"wan": {"up_mbit": 10.0, "down_mbit": 20.0}, "lan": "lan-100mbit"},
}  # fmt: skip
HOSTILE = "</style><script>alert(1)</script><img src=x onerror=alert(1)>\x00\u202e]]>&amp;'\"$_{$"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the folders of four tiny runs without a network: two seeds, with fixed epochs and under Tempo."""
    root = tmp_path_factory.mktemp("runs")
    paths = []
    for control in ("fixed", "tempo"):
        for seed in (1, 2):
            paths.append(run_direct(root, {**LAB, "seed": seed, "cloud": {"epoch_control": {"name": control}}}))
    return paths


class Tree:
    """A page, parsed as XML, so that all tags are closed in order: its text, its elements, its tables by caption."""

    def __init__(self, page: str) -> None:
        root = ElementTree.fromstring(re.sub("(<meta [^>]*)>", r"\1/>", page.partition("\n")[2]))
        self.words = "".join(root.itertext())
        self.seen = {element.tag for element in root.iter()}
        self.attributes = [pair for element in root.iter() for pair in element.attrib.items()]
        self.tables = {
            "".join(caption.itertext()): [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
            for table in root.iter("table")
            for caption in table.iter("caption")
        }


def render(figure: Figure, formats: list[str]) -> dict[str, bytes]:
    """Render a figure by matplotlib, which only the process of these tests has to import."""
    from deploy.results import paper

    return paper.render(figure, formats)


def texts(figure: Figure, *, paper: bool = False) -> list[str]:
    """Return the texts of a figure on a page, or on a paper."""
    drawing = figure.draw(True) if paper else figure.page()
    return [mark.content for mark in drawing.marks if isinstance(mark, Text)]


def titles(figure: Figure, paper: bool = False) -> list[str]:
    """Return the tooltips of a figure."""
    return [mark.title for mark in figure.draw(paper).marks if isinstance(mark, Rect | Dot) and mark.title]


def number(cell: str) -> float:
    return float(cell.replace(THIN, ""))


def test_bytes_in_the_report_are_those_of_the_files(played: list[Path]) -> None:
    run = Run(played[2])
    tree = Tree(compose([run])[0].html("t"))
    wanted = table(run.path / "links.csv")
    heads, *rows = tree.tables["Bytes of each link"]
    assert heads[:6] == ["tier", "from", "to", "kind", "payload", "MQTT"] and len(rows) == len(wanted)
    for row, line in zip(rows, wanted, strict=True):
        assert row[:4] == [line["tier"], line["from"], line["to"], line["kind"]]
        for cell, name in zip(row[4:7], ("payload_bytes", "message_bytes", "wire_bytes"), strict=True):
            assert cell.replace(THIN, "") == (line[name] or "-")
    tiers = {(row[0].lower(), row[1]): row for row in tree.tables["Bytes by tier and direction"][1:]}
    for (tier, way), row in tiers.items():
        parents = {"cloud"} if tier == "wan" else set(run.experiment.tree.aggregators)
        mine = [x for x in wanted if (x["tier"], x["kind"], x["from"] in parents) == (tier, "all", way == "down")]
        assert number(row[2]) == sum(int(x["payload_bytes"]) for x in mine) > 0
        assert number(row[3]) == sum(int(x["message_bytes"]) for x in mine)
        assert number(row[3]) == run.totals[f"{tier}_{way}_bytes"]  # rounds.csv counts the same
    global_rounds = tree.tables["Each global round"]
    for row, line in zip(global_rounds[1:], table(run.path / "rounds.csv"), strict=True):
        assert [number(cell) for cell in row[-5:-1]] == [int(line[name]) for name in BYTES]
        assert number(row[2]) == pytest.approx(float(line["accuracy"]), abs=5e-5)


def test_phases_add_up_to_the_global_rounds(played: list[Path]) -> None:
    for path in played:
        run = Run(path)
        for before, row in pairwise([None, *run.rounds]):
            assert row is not None
            passed = row.elapsed_s - (before.elapsed_s if before else 0)
            assert row.seconds == pytest.approx(passed, rel=0.01)
        rows = {row[0]: row for row in Tree(compose([run])[0].html("t")).tables["Seconds by phase"][1:]}
        total = number(rows["sum of the phases"][1])
        assert total == pytest.approx(sum(number(rows[phase][1]) for phase in GLOBAL_PHASES), abs=0.004)
        assert total == pytest.approx(number(rows["elapsed"][1]), rel=0.01)


def test_nothing_is_asked_of_a_network_and_nothing_runs(played: list[Path]) -> None:
    text = compose([Run(path) for path in played])[0].html("t")
    tree = Tree(text)
    assert not re.search(r"https?://|url\(|@import", text)
    assert not {name for name, _ in tree.attributes} & {"src", "href", "action", "srcset", "style"}
    assert not {"script", "img", "iframe", "object", "link", "form"} & tree.seen
    assert any("default-src 'none'" in value for _, value in tree.attributes)
    ids = [value for name, value in tree.attributes if name == "id"]
    assert len(ids) == len(set(ids)) > 0
    labelled = [value for name, value in tree.attributes if name == "aria-labelledby"]
    assert len(labelled) == text.count("<svg")
    assert {key for value in labelled for key in value.split()} == set(ids)


def hostile(path: Path) -> Path:
    with (path / "events.jsonl").open("a") as file:
        for name, facts in (("refused", {"node": HOSTILE, "reason": "\ud800"}), (HOSTILE, {HOSTILE: [HOSTILE]}),
                            ("plan", {"node": HOSTILE, HOSTILE: {HOSTILE: 1.0}, "global_round": 1})):  # fmt: skip
            file.write(json.dumps({"time": HOSTILE, "event": name, **facts}) + "\n")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["links"]["of"][HOSTILE] = {"up_mbit": HOSTILE, "down_mbit": True}
    (path / "manifest.json").write_text(json.dumps(manifest | {"host": HOSTILE, HOSTILE: HOSTILE}))
    split = {"digest": HOSTILE, "seed": HOSTILE, "data": {"dataset": HOSTILE},
             "devices": {HOSTILE: {"parent": HOSTILE, "by_class": [1, 0, 4]}}}  # fmt: skip
    (path / "partition.json").write_text(json.dumps(split))
    return path


def test_what_files_say_is_text_never_markup(tmp_path: Path, make_run: MakeRun) -> None:
    path = hostile(make_run(tmp_path, LAB, last=""))
    (path / "experiment.toml").write_text(f"{(path / 'experiment.toml').read_text()}# {HOSTILE}\n".replace("\x00", ""))
    done = invoke("report", path, "--figures", tmp_path / "figures", "--figure-formats", "svg")
    assert done.exit_code == 0, done.output
    text = (path / "report.html").read_text(encoding="utf-8")
    tree = Tree(text)
    assert not {"script", "img"} & tree.seen and "<script" not in text and "alert(1)" in tree.words
    assert "\x00" not in text and "\u202e" not in text and not any(name.startswith("on") for name, _ in tree.attributes)
    for file in (tmp_path / "figures").glob("*.svg"):
        ElementTree.fromstring(file.read_text(encoding="utf-8"))


@given(words=st.text())
def test_any_text_is_safe_in_html_and_xml(words: str) -> None:
    safe = html(words)
    element = ElementTree.fromstring(f"<a b='{safe}'>{safe}</a>")
    assert element.get("b") == (element.text or "")
    assert not set(safe) & set("<>\"'\x00")
    safe.encode()


def test_a_run_under_way_or_killed_learns_it_far(tmp_path: Path, make_run: MakeRun) -> None:
    killed = make_run(tmp_path, LAB, accuracies=(0.5, None), last="")
    text = compose([Run(killed)])[0].html("t")
    assert "was interrupted or killed: 2 of 3 global rounds are done" in text
    folder = RunFolder.reopen(killed)
    assert "is still running: 2 of 3" in compose([Run(killed)])[0].html("t")
    del folder
    failed = make_run(tmp_path, LAB, accuracies=(), last="failed")
    tree = Tree(compose([Run(failed)])[0].html("t"))
    assert "failed: so 0 of 3 global rounds are done" in tree.words and "Seconds by phase" not in tree.tables
    both = Tree(compose([Run(killed), Run(failed)])[0].html("t"))
    assert [row[2] for row in both.tables["The runs, bytes as MQTT packets"][1:]] == ["interrupted", "failed"]


def test_predictions_stand_beside_what_was_measured(played: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(played[0], path)
    reported = {"seconds": {"train": 2.0, "wait": 0.5}, "bytes": {f"cloud institution-{i}": 5000 for i in range(2)}}
    (path / "prediction.json").write_text(json.dumps(reported))
    tree = Tree(compose([Run(path)])[0].html("t"))
    rows = {row[0]: row[-1] for row in tree.tables["Seconds by phase"]}
    assert (rows["phase"], rows["train"], rows["collect"]) == ("predicted, s", "2.0000", "-")
    assert rows["sum of the phases"] == "2.5000"
    tiers = {(row[0], row[1]): row[-1] for row in tree.tables["Bytes by tier and direction"]}
    assert tiers["WAN", "down"] == f"10{THIN}000" and tiers["LAN", "down"] == "-"


def test_several_runs_are_laid_over_each_other_and_compared(played: list[Path], tmp_path: Path) -> None:
    svg = ("--figures", tmp_path, "--figure-formats", "svg")
    done = invoke("report", *played, "--out", tmp_path / "all.html", *svg, "--format", "json")
    facts = json.loads(done.stdout)
    assert facts["report"] == str(tmp_path / "all.html") and all(Path(file).is_file() for file in facts["files"])
    assert len(set(facts["files"])) == len(facts["files"])
    rows = table(tmp_path / "accuracy-rounds.csv")
    assert {row["series"] for row in rows} == {"fixed", "tempo"} and len(rows) == 6
    assert "test_accuracy_percent_sd" in rows[0]
    compared = invoke("compare", *played).stdout.splitlines()  # the experiments' own target
    assert [line.split()[:2] for line in compared] == [["experiment", "reached"], ["fixed", "0/2"], ["tempo", "0/2"]]


@pytest.mark.slow
def test_figures_are_files_too(played: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "figures"
    options = ("--figures", folder, "--figure-formats", "pdf, png,svg", "--out", tmp_path / "r.html")
    assert invoke("report", played[0], *options).exit_code == 0
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    page, _ = compose([Run(played[0])])
    again: dict[str, str | bytes] = {}
    for each in page.tables:
        again |= {f"{each.name}.csv": each.csv(), f"{each.name}.tex": each.latex()}
    for figure in {figure.draw(True).headed: figure for figure in page.figures}.values():  # a drawing and a chart
        again |= {f"{figure.name}.{kind}": file for kind, file in render(figure, ["pdf", "png", "svg"]).items()}
    for name, content in again.items():
        assert files[name] == (content if isinstance(content, bytes) else content.encode()), name
    names = {name.partition(".")[0] for name in files if name.endswith(".png")}
    assert {name.partition("-")[0] for name in names} == {
        "accuracy", "budget", "bytes", "epochs", "loss", "partition", "seconds", "topology", "train"
    }  # fmt: skip
    for name in names:
        assert ElementTree.fromstring(files[f"{name}.svg"].decode()).tag.endswith("svg")
        pdf = files[f"{name}.pdf"]
        assert pdf.startswith(b"%PDF") and b"/FontFile2" in pdf and b"/Type3" not in pdf and b"CreationDate" not in pdf
        with Image.open(BytesIO(files[f"{name}.png"])) as picture:
            assert name.partition("-")[0] in ("epochs", "partition", "topology") or picture.width == 3.5 * 300
            assert len(picture.getcolors(1 << 20) or ()) > 5
    latex = next(folder.glob("phases-*.tex")).read_text()
    assert latex.startswith("\\begin{tabular}") and "train & $" in latex


def test_without_matplotlib_there_is_a_page_and_one_line(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(tmp_path, LAB)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "deploy.results.paper", raising=False)
    assert invoke("report", path).exit_code == 0
    done = invoke("report", path, "--figures", tmp_path / "figures")
    assert done.exit_code == 4 and not (tmp_path / "figures").exists()
    line = "fedstrata: package = 'matplotlib': not installed here. pip install 'fedstrata[report]'."
    assert done.stderr.splitlines() == [line]
    assert invoke("report", path, "--figure-formats", "gif").exit_code == 2


def test_the_option_that_names_no_writable_place_is_reported(tmp_path: Path, make_run: MakeRun) -> None:
    path, file = make_run(tmp_path, LAB, accuracies=()), tmp_path / "file"
    file.touch()
    for option, place in (("--figures", file), ("--out", file / "r.html")):
        done = invoke("report", path, option, place, "--figure-formats", "svg")
        assert done.exit_code == 4 and f"{option} = '{place}': " in done.stderr


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render a ninth of the pixels, where no test counts them."""
    monkeypatch.setattr("deploy.results.paper.DPI", 100)


def pixels(*marks: Mark, height: int = 100) -> Any:
    """Return the red, green and blue [y, x, 3] of marks on a paper of 400 by `height` pixels."""
    figure = Figure("n", "t", "", lambda paper: Drawing((400, height), marks, headed=paper))
    with Image.open(BytesIO(render(figure, ["png"])["png"])) as picture:
        return np.asarray(picture.convert("RGB")).astype(int)


def test_papers_have_the_colours_of_the_page() -> None:
    paints = [kind for kind, looks in CLASSES.items() if {"fill", "stroke"} & set(looks)]
    kinds, tall = [*paints, "band fill-s1", "stroke-s1 thin", "stroke-s1 dash-1"], 40
    outline = [(50, 8), (300, 8), (300, 32), (50, 32), (50, 8)]
    marks = [Line([(x, y + tall * i) for x, y in outline], kind) for i, kind in enumerate(kinds)]
    whole = pixels(*marks, height=tall * len(kinds))
    for kind, found in zip(kinds, np.array_split(whole, len(kinds)), strict=True):
        looks = {key: value for each in kind.split() for key, value in CLASSES[each].items()}
        for key in ("fill", "stroke"):
            if (colour := looks.get(key, "none")) != "none":
                paint = np.array(ImageColor.getrgb(COLOURS[colour][0])) - 255
                ink = 255 + paint * float(looks.get(f"{key}-opacity", 1))
                assert np.abs(found.reshape(-1, 3) - ink).max(axis=1).min() < 2, kind


def test_papers_have_the_dashes_and_widths_of_the_page() -> None:
    def drawn(kind: str) -> tuple[float, float]:
        inked = pixels(Line([(50, 50), (350, 50)], kind)).min(axis=2) < 200
        return inked.any(axis=0).sum() / (300 * 25 / 9), inked.sum(axis=0).max() * 9 / 25

    for kind, share, width in (("", 1, 2), ("dash-1", 6 / 9, 2), ("dash-2", 2 / 5, 2), ("thin", 1, 1)):
        assert drawn(f"stroke-s0 {kind}") == (pytest.approx(share, abs=0.08), pytest.approx(width, abs=0.5))


def test_classes_go_before_those_that_they_change() -> None:
    order = re.findall(r"(?:^| )\.([\w-]+) {", STYLE, re.MULTILINE)
    assert order == list(CLASSES)  # of a page's rules the last one goes
    assert max(map(order.index, (f"stroke-s{i}" for i in range(SERIES)))) < order.index("thin")


@pytest.mark.usefixtures("coarse")
def test_each_series_has_a_marker_on_papers_and_a_disc_on_pages() -> None:
    shapes = {(pixels(Dot(50, 50, inks(i, i)[1])).min(axis=2) < 128).tobytes() for i in range(SERIES)}
    assert len(shapes) == SERIES
    lines = {"a": charts.Curve([(float(i), float(i)) for i in range(30)]), "b": charts.Curve([(0.0, 1.0)])}
    figure = charts.curves("n", "t", lines, x=AXIS, y=AXIS)
    dots = [[mark for mark in figure.draw(paper).marks if isinstance(mark, Dot)] for paper in (False, True)]
    assert len(dots[0]) == figure.svg().count("<circle") == 31 and all(dot.title for dot in dots[0])
    assert len(dots[1]) == 10 + 1 + 2  # and those of the legend


PARTS = [("fill-s0", "train"), ("fill-s5", "wait")]
AMOUNTS = st.floats(0, 1e6)


@example(levels=[(0.00025, 0.0)], ends=[199_999.0])
@given(levels=st.lists(st.tuples(AMOUNTS, AMOUNTS), min_size=1, max_size=4), ends=st.lists(AMOUNTS, min_size=1))
def test_no_text_is_outside_of_its_chart(levels: list[tuple[float, float]], ends: list[float]) -> None:
    points = [charts.Curve([(end, level) for end in ends]) for level, _ in levels]
    lines = {f"line {i}": line for i, line in enumerate(points)}
    for figure in (
        charts.curves("n", "t", lines, x=AXIS, y=AXIS, target=levels[0][1]),
        charts.bars("n", "t", PARTS, {f"bar {i}": both for i, both in enumerate(levels)}, axis=AXIS),
        charts.columns("n", "t", PARTS, levels, x=AXIS, axis=AXIS),
    ):
        for drawing in (figure.page(), figure.draw(True)):
            for text in (mark for mark in drawing.marks if isinstance(mark, Text)):
                start = text.x - LETTER * len(text.content) * {"start": 0, "middle": 0.5, "end": 1}[text.anchor]
                assert start >= -0.1 and start + LETTER * len(text.content) <= drawing.size[0] + 0.1, text
                assert 10 <= text.y <= drawing.size[1]


def scales(drawing: Drawing) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """Return the pixels of a value on the x axis and on the y axis, by the first and the last number at each."""

    def scale(anchor: str, place: Callable[[Text], float]) -> Callable[[float], float]:
        numbers = [mark for mark in drawing.marks if isinstance(mark, Text) and mark.anchor == anchor]
        at = {float(mark.content): place(mark) for mark in numbers if mark.content.replace(".", "").isdigit()}
        low, high = min(at, default=0.0), max(at, default=1.0)
        assert all(at[low] + (at[high] - at[low]) * (v - low) / (high - low) == pytest.approx(at[v]) for v in at)
        return lambda value: at[low] + (at[high] - at[low]) * (value - low) / (high - low)

    return scale("middle", lambda mark: mark.x), scale("end", lambda mark: mark.y - 4)


@pytest.mark.parametrize("paper", [False, True])
def test_points_bands_and_targets_are_where_the_axes_say(paper: bool) -> None:
    points, deviations = [(0.0, 1.0), (4.0, 3.0), (10.0, 5.0)], [0.5, 0.25, 1.0]
    curve = charts.Curve(points, deviations, rest=[[(1.0, 2.0), (9.0, 4.0)]])
    drawing = charts.curves("n", "t", {"a": curve}, x=AXIS, y=AXIS, target=2.5).draw(paper)
    x, y = scales(drawing)

    def placed(points: Sequence[tuple[float, float]]) -> Any:
        return pytest.approx(np.array([(x(at), y(level)) for at, level in points]))

    lines = {mark.kind: mark.points for mark in drawing.marks if isinstance(mark, Line)}
    assert np.array([(mark.x, mark.y) for mark in drawing.marks if isinstance(mark, Dot)]) == placed(points)
    (whole,) = (points for kind, points in lines.items() if kind.startswith("stroke-s0") and "thin" not in kind)
    (thin,) = (points for kind, points in lines.items() if kind.endswith(" thin"))
    (band,) = (points for kind, points in lines.items() if kind.startswith("band"))
    spread = [*zip(points, deviations, strict=True)]
    above, below = ([(at, level + way * d) for (at, level), d in spread] for way in (1, -1))
    assert np.array(whole) == placed(points) and np.array(thin) == placed([(1.0, 2.0), (9.0, 4.0)])
    assert np.array(band) == placed([*above, *reversed(below)])
    assert np.array(lines["target"]) == placed([(0.0, 2.5), (10.0, 2.5)])


def test_bars_and_columns_are_stacked_and_as_long_as_the_axes_say() -> None:
    for paper in (False, True):
        drawing = charts.bars("n", "t", PARTS, {"a": (1.0, 3.0), "b": (0.0, 2.0)}, axis=AXIS).draw(paper)
        (x, _), rects = scales(drawing), [mark for mark in drawing.marks if isinstance(mark, Rect) and mark.title]
        spans = [(x(low), x(high) - x(low) - 1) for low, high in ((0.0, 1.0), (1.0, 4.0), (0.0, 2.0))]
        assert np.array([(mark.x, mark.width) for mark in rects]) == pytest.approx(np.array(spans))
        assert rects[0].y == rects[1].y and rects[2].y >= rects[0].y + rects[0].height
        drawing = charts.columns("n", "t", PARTS, [(1.0, 2.0), (4.0, 0.0)], x=AXIS, axis=AXIS).draw(paper)
        (_, y), rects = scales(drawing), [mark for mark in drawing.marks if isinstance(mark, Rect) and mark.title]
        spans = [(y(high), y(low) - y(high)) for low, high in ((0.0, 1.0), (1.0, 3.0), (0.0, 4.0))]
        assert np.array([(mark.y, mark.height) for mark in rects]) == pytest.approx(np.array(spans))
        assert rects[0].x == rects[1].x and rects[2].x >= rects[0].x + rects[0].width


def test_global_rounds_are_whole_numbers() -> None:
    whole, axis = charts.Axis("global round", whole=True), charts.Axis("time", "s")
    curve = charts.curves("n", "t", {"a": charts.Curve([(1.0, 0.0), (2.0, 1.0)])}, x=whole, y=AXIS)
    assert "1.5" not in texts(curve)
    bars = charts.columns("n", "t", PARTS, [(1.0, 1.0)] * 30, x=whole, axis=axis)
    assert {"10", "20", "30"} < set(texts(bars)) and "29" not in texts(bars)


def test_papers_name_the_y_axis_and_have_whole_labels_and_no_room_on_the_right() -> None:
    points = [(1.0, 0.5), (11.0, 0.75)]
    lines = {"alpha=1": charts.Curve(points), "alpha=2": charts.Curve(points[:1])}
    y = charts.Axis("accuracy", "%", 100.0)
    figure = charts.curves("n", "t", lines, x=AXIS, y=y, short={"alpha=1": "#1", "alpha=2": "#2"})
    page, paper = (texts(figure, paper=paper) for paper in (False, True))
    assert {"t", "#1", "#2", "15"} <= set(page) and not {"accuracy, %", "alpha=1"} & set(page)
    assert {"accuracy, %", "alpha=1", "alpha=2", "10"} <= set(paper) and not {"t", "#1", "15"} & set(paper)
    last = max(mark.x for mark in figure.draw(True).marks if isinstance(mark, Dot))
    assert last == pytest.approx(figure.draw(True).size[0] - charts.RIGHT)


LONG = [f"cloud.aggregation.alpha={i} {'institution_' * 9}" for i in range(9)]
CURVES = {name: charts.Curve([(1.0, i), (9.0, 2 * i)], [i, i]) for i, name in enumerate(LONG)}


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize(
    "figure",
    [
        charts.curves("n", "t", CURVES, x=AXIS, y=AXIS),
        charts.curves("n", "t", {"_a": charts.Curve([(1.0, 0.5)]), "b": charts.Curve([])}, x=AXIS, y=AXIS),
        charts.bars("n", "t", PARTS, dict.fromkeys(LONG, (1.0, 2e6)), axis=AXIS),
        charts.columns("n", "t", PARTS, [], x=AXIS, axis=AXIS),
        topology("t", experiment_tiers.Tree([{"cloud": LONG[:1]}, {LONG[0]: LONG[1:]}]), {}),
    ],
    ids=["curves", "points", "bars", "columns", "drawing"],
)
def test_no_label_is_cut_off(figure: Figure) -> None:
    with Image.open(BytesIO(render(figure, ["png"])["png"])) as picture:
        width, height = picture.size
        dark = picture.convert("L").point(lambda level: 255 * (level < 250))
        left, top, right, bottom = dark.getbbox() or (0, 0, 0, 0)
    assert left > 0 and top > 0 and right < width and bottom < height


# Machado et al. 2009: linear RGB as it is, and as seen without long, middle and short cones.
VISIONS = np.array([
    [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
])  # fmt: skip
# Ottosson's Oklab: linear RGB to cones, and their cube roots to lightness and two colour axes.
CONES = np.array([[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
                  [0.0883024619, 0.2817188376, 0.6299787005]])  # fmt: skip
LAB_AXES = np.array([[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
                     [0.0259040371, 0.7827717662, -0.8086757660]])  # fmt: skip


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_every_reader_can_distinguish_any_two_series(theme: int) -> None:
    def linear(name: str) -> Any:
        share = np.array(ImageColor.getrgb(COLOURS[name][theme])) / 255
        return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)

    colours = [linear(f"s{i}") for i in range(SERIES)]
    seen = np.array([
        [LAB_AXES @ np.cbrt(CONES @ np.clip(vision @ colour, 0, 1)) for vision in VISIONS] for colour in colours
    ])  # fmt: skip
    for one, other in combinations(seen, 2):
        assert np.linalg.norm(one - other, axis=1).min() > 0.09  # the colours before had 0.005
    light = [colour @ (0.2126, 0.7152, 0.0722) for colour in (*colours, linear("ground"))]
    for each in light[:-1]:
        low, high = sorted((each, light[-1]))
        assert (high + 0.05) / (low + 0.05) >= 3.0  # WCAG 1.4.11


def test_equal_curves_are_drawn_once_and_share_a_name() -> None:
    points = [(1.0, 0.25), (2.0, 0.5)]
    lines = {
        "slow, a": charts.Curve(points),
        "slow, b": charts.Curve([(1.0, 0.5), (2.0, 0.75)]),
        "fast, a": charts.Curve(list(points)),
        "none": charts.Curve([]),
        "none, too": charts.Curve([]),
    }
    figure = charts.curves("n", "t", lines, x=AXIS, y=AXIS, short={"slow, a": "#1", "fast, a": "#3"})
    drawn, words = figure.svg("key"), texts(figure)
    assert {"#1 = #3", "slow, b", "none", "none, too"} <= set(words) and "slow, a" not in words
    assert drawn.count('class="stroke-s0 dash-0"') == 2  # the line and its legend
    assert "stroke-s2" not in drawn
    assert figure.table is not None and len(figure.table.rows) == 6  # each curve has its numbers


def test_a_legend_has_what_can_be_seen() -> None:
    parts = [("fill-s0", "train"), ("fill-s5", "wait"), ("fill-s1", "collect"), ("fill-s2", "evaluate")]
    bars = [(1.0, 0.5, 1e-4, 0.0), (0.5, 0.0, 0.0, 0.0)]
    for figure in (
        charts.bars("n", "t", parts, {"a": bars[0], "b": bars[1]}, axis=AXIS),
        charts.columns("n", "t", parts, bars, x=AXIS, axis=AXIS),
    ):
        words = texts(figure)
        assert {"train", "wait", "too short to be seen: collect"} <= set(words) and "collect" not in words
        assert figure.table is not None and "collect" in [column.name for column in figure.table.columns]


def test_drawings_for_papers_have_a_columns_or_a_pages_width_and_no_title() -> None:
    narrow, wide = (epochs("epochs", {"institution-0": [2] * count}) for count in (3, 15))
    assert narrow.title in texts(narrow) and f">{narrow.title}</text>" in narrow.svg()
    for figure, inches in ((narrow, 3.5), (wide, 7.16)):
        assert figure.title not in texts(figure, paper=True)
        with Image.open(BytesIO(render(figure, ["png"])["png"])) as picture:
            assert picture.width == round(inches * 300)
            dark = picture.convert("L").point(lambda level: 255 * (level < 250)).getbbox()
        assert dark is not None and dark[1] < 0.2 * 300  # no room is left for a title


@example(low=5e-324, span=0.0)
@given(low=st.floats(-1e9, 1e9), span=st.floats(0, 1e9))
def test_ticks_are_few_round_and_hold_the_range(low: float, span: float) -> None:
    found = charts.ticks(low, low + span)
    step = found[1] - found[0]
    assert 2 <= len(found) <= 9
    slack = 1e-6 * step + 1e-9 * abs(low)
    assert found[0] <= low + slack and found[-1] >= low + span - slack


def test_many_global_rounds_are_joined_to_means() -> None:
    axis = charts.Axis("global_round")
    figure = charts.columns("n", "t", PARTS, [[1.0, 2.0]] * 150, x=axis, axis=charts.Axis("s", "s"))
    assert [sum("global_round" in title for title in titles(figure, paper)) for paper in (False, True)] == [100, 300]
    assert figure.table is not None and len(figure.table.rows) == 150 and "3 global rounds" in figure.text


def test_epochs_of_a_long_run_are_reported_in_stretches() -> None:
    figure = epochs("epochs", {"i": [2] * 400 + [None] + [4] * 100})
    assert titles(figure) == ["i, global round 1 to 400: 2 epochs", "i, global round 402 to 501: 4 epochs"]


def test_devices_of_like_links_are_one_box() -> None:
    slow, fast = Rates((1.0, 0.5), 30.0, (0.9, None)), Rates((None, None), 0.0, (None, None))
    tree = experiment_tiers.Tree([{"cloud": ["i"]}, {"i": ["a", "b", "c"]}])
    figure = topology("t", tree, {"i": fast, "a": slow, "b": fast, "c": slow})
    words = texts(figure)
    assert {"2 devices", "b", "1 / 0.5 Mbit/s, 30 ms", "measured 0.9 / -", "unlimited"} <= set(words)


@pytest.mark.parametrize("tiers", [1, 2, 3])
def test_each_layer_is_a_column(tiers: int) -> None:
    tree = parse({"tiers": [{"name": f"t{i}", "children": f"n{i}", "fan_out": 2} for i in range(tiers)]}).tree
    rates = {name: Rates((float(i), 1.0), 0.0, (None, None)) for i, name in enumerate(tree.nodes)}
    figure = topology("t", tree, rates)
    lefts = {mark.x for mark in figure.page().marks if isinstance(mark, Rect) and mark.kind == "node"}
    words = texts(figure)
    assert len(lefts) == tiers + 1
    assert sum(word in tree.nodes for word in words) == len(tree.nodes)


def requests(log: str) -> list[str]:
    """Return what a page asked of a network, by a browser's log: what the browser asks itself has no origin."""
    asked = [event.get("params", {}) for event in json.loads(log)["events"]]
    return [params["url"] for params in asked if params.get("initiator", "not an origin") != "not an origin"]


def browse(page: Path, home: Path) -> tuple[str, str, list[str]]:
    """Return a page's document, what a browser said of it, and what it asked of a network."""
    log = home / "net.json"
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         f"--user-data-dir={home / 'profile'}", "--enable-logging=stderr", f"--log-net-log={log}",
         "--window-size=390,800", "--dump-dom", f"file://{page}"],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    return done.stdout, done.stderr, requests(log.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_shows_it_without_an_error_or_a_request(tmp_path: Path, make_run: MakeRun) -> None:
    path = hostile(make_run(tmp_path, LAB))
    assert invoke("report", path).exit_code == 0
    document, said, asked = browse(path / "report.html", tmp_path)
    assert "CONSOLE" not in said and asked == []
    assert document.count("<svg") == document.count("</svg>") > 5 and "<script" not in document
    loud = tmp_path / "loud.html"  # the test would see it
    loud.write_text('<script>console.error("x")</script><img src="http://127.0.0.1:9/x">')
    _, said, asked = browse(loud, tmp_path)
    assert "CONSOLE" in said and asked == ["http://127.0.0.1:9/x"]
