"""The report: what it reports is what the files say, nothing in it runs or asks a network, and it
can be read.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedstrata.cloud.results import RunFolder
from fedstrata.common.protocol.round_state import GLOBAL_PHASES
from fedstrata.deploy.console.tabular import THIN, Column, Table, clean
from fedstrata.deploy.results.page import Page, ShownTable, compose
from fedstrata.deploy.results.run import Run
from tests.helpers.commands import invoke, table
from tests.helpers.direct import run_direct

MakeRun = Callable[..., Path]
LAB: dict[str, Any] = {
    "name": "tiny", "rounds": 3, "stop": {"target": 0.99},
    "topology": {"institutions": 2, "devices": 4},
    "data": {"dataset": "synthetic", "classes": 3, "image_shape": [1, 8, 8], "samples": 120,
             "test_samples": 40},
    "model": {"name": "mlp_digits"},
    "links": {"wan": {"up_mbit": 10.0, "down_mbit": 20.0}, "lan": "lan-100mbit"},
}  # fmt: skip
HOSTILE = "</style><script>alert(1)</script><img src=x onerror=alert(1)>\x00\u202e]]>&amp;'\"$_{$"
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "p", "div"),
    *("table", "caption", "thead", "tbody", "tr", "th", "td"),
}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the folders of four tiny runs without a network: two seeds, with fixed epochs and
    under Tempo.
    """
    root = tmp_path_factory.mktemp("runs")
    paths = []
    for control in ("fixed", "tempo"):
        for seed in (1, 2):
            paths.append(
                run_direct(
                    root, {**LAB, "seed": seed, "cloud": {"epoch_control": {"name": control}}}
                )
            )
    return paths


class Tree:
    """A page, parsed as XML, so that all tags are closed in order: its text, its elements, its
    tables by caption.
    """

    def __init__(self, page: str) -> None:
        root = ElementTree.fromstring(re.sub("(<meta [^>]*)>", r"\1/>", page.partition("\n")[2]))
        self.words = "".join(root.itertext())
        self.seen = {element.tag for element in root.iter()}
        self.attributes = [pair for element in root.iter() for pair in element.attrib.items()]
        self.tables = {
            "".join(caption.itertext()): [
                ["".join(cell.itertext()) for cell in row] for row in table.iter("tr")
            ]
            for table in root.iter("table")
            for caption in table.iter("caption")
        }


def number(cell: str) -> float:
    return float(cell.replace(THIN, ""))


@pytest.mark.usefixtures("undrawn")
def test_bytes_in_the_report_are_those_of_the_files(played: list[Path]) -> None:
    run = Run(played[2])
    tree = Tree(compose([run]).html())
    wanted = table(run.path / "links.csv")
    tiers = {
        (row[0].lower(), row[1]): row for row in tree.tables["Bytes by tier and direction"][1:]
    }
    for (tier, way), row in tiers.items():
        parents = {"cloud"} if tier == "wan" else set(run.experiment.tree.aggregators)
        mine = [
            x
            for x in wanted
            if (x["tier"], x["kind"], x["from"] in parents) == (tier, "all", way == "down")
        ]
        assert number(row[2]) == sum(int(x["payload_bytes"]) for x in mine) > 0
        assert number(row[3]) == sum(int(x["message_bytes"]) for x in mine)
        assert number(row[3]) == run.totals[f"{tier}_{way}_bytes"]  # rounds.csv counts the same


@pytest.mark.usefixtures("undrawn")
def test_phases_add_up_to_the_global_rounds(played: list[Path]) -> None:
    for path in played:
        run = Run(path)
        for before, row in pairwise([None, *run.rounds]):
            assert row is not None
            passed = row.elapsed_s - (before.elapsed_s if before else 0)
            assert row.seconds == pytest.approx(passed, rel=0.01)
        caption = "Seconds of a global round, mean ± standard deviation (n - 1) over runs"
        rows = {row[0]: number(row[1]) for row in Tree(compose([run]).html()).tables[caption][1:]}
        total = rows.pop("sum of the phases")
        assert rows.keys() == set(GLOBAL_PHASES) and total == pytest.approx(
            sum(rows.values()), abs=0.001
        )
        assert total * len(run.rounds) == pytest.approx(run.seconds, rel=0.01, abs=0.001)


def test_nothing_is_asked_of_a_network_and_nothing_runs(played: list[Path]) -> None:
    text = compose([Run(path) for path in played]).html()
    tree = Tree(text)
    assert not re.search(r"https?://|url\([^#]|@import|href=.[^#]", text)
    assert not {name for name, _ in tree.attributes} & {"src", "action", "srcset"}
    assert not {"script", "img", "iframe", "object", "link", "form"} & tree.seen
    assert any("default-src 'none'" in value for _, value in tree.attributes)
    ids = [value for name, value in tree.attributes if name == "id"]
    assert len(ids) == len(set(ids)) > 0
    labelled = [value for name, value in tree.attributes if name == "aria-labelledby"]
    assert len(labelled) == text.count("<svg") > 0
    assert {key for value in labelled for key in value.split()} < set(ids)
    links = [value.removeprefix("#") for name, value in tree.attributes if name == "href"]
    assert set(links) < set(ids)


def hostile(path: Path) -> Path:
    with (path / "events.jsonl").open("a") as file:
        for name, facts in (("refused", {"node": HOSTILE, "reason": "\ud800"}), (HOSTILE,
        {HOSTILE: [HOSTILE]}),
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
    (path / "experiment.toml").write_text(
        f"{(path / 'experiment.toml').read_text()}# {HOSTILE}\n".replace("\x00", "")
    )
    done = invoke("report", path, "--figures", tmp_path / "figures", "--figure-formats", "svg")
    assert done.exit_code == 0, done.output
    text = (path / "report.html").read_text(encoding="utf-8")
    tree = Tree(text)
    assert not {"script", "img"} & tree.seen and "<script" not in text and "alert(1)" in tree.words
    assert (
        "\x00" not in text
        and "\u202e" not in text
        and not any(name.startswith("on") for name, _ in tree.attributes)
    )
    for file in (tmp_path / "figures").glob("*.svg"):
        ElementTree.fromstring(file.read_text(encoding="utf-8"))


@given(words=st.text())
def test_any_text_is_safe_in_html_and_xml(words: str) -> None:
    table = Table("t", words, [Column(words, text=True)], [[words]])
    text = Page(
        words, blocks=[("paragraph", words), ("table", ShownTable(table, folded=False))]
    ).html()
    element = Tree(text)
    assert clean(words) in element.words and "\x00" not in text and element.seen < TAGS
    text.encode()


@pytest.mark.usefixtures("undrawn")
def test_a_run_under_way_or_killed_learns_it_far(tmp_path: Path, make_run: MakeRun) -> None:
    killed = make_run(tmp_path, LAB, accuracies=(0.5, None), last="")
    text = compose([Run(killed)]).html()
    assert "was interrupted or killed: 2 of 3 global rounds are done" in text
    folder = RunFolder.reopen(killed)
    assert "is still running: 2 of 3" in compose([Run(killed)]).html()
    del folder
    failed = make_run(tmp_path, LAB, accuracies=(), last="failed")
    tree = Tree(compose([Run(failed)]).html())
    assert "failed: so 0 of 3 global rounds are done" in tree.words and not any(
        caption.startswith("Seconds") for caption in tree.tables
    )
    both = Tree(compose([Run(killed), Run(failed)]).html())
    assert [row[2] for row in both.tables["The runs, bytes as MQTT packets"][1:]] == [
        "interrupted",
        "failed",
    ]


def test_several_runs_are_laid_over_each_other_and_compared(
    played: list[Path], tmp_path: Path
) -> None:
    svg = ("--figures", tmp_path, "--figure-formats", "svg")
    done = invoke("report", *played, "--out", tmp_path / "all.html", *svg, "--format", "json")
    facts = json.loads(done.stdout)
    assert facts["report"] == str(tmp_path / "all.html") and all(
        Path(file).is_file() for file in facts["files"]
    )
    assert len(set(facts["files"])) == len(facts["files"])
    rows = table(tmp_path / "accuracy-rounds.csv")
    assert {row["series"] for row in rows} == {"fixed", "tempo"} and len(rows) == 6
    assert "test_accuracy_percent_sd" in rows[0]
    compared = invoke("compare", *played).stdout.splitlines()  # the experiments' own target
    assert [line.split()[:2] for line in compared] == [
        ["experiment", "reached"],
        ["fixed", "0/2"],
        ["tempo", "0/2"],
    ]


@pytest.mark.slow
def test_figures_are_files_too(played: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "figures"
    options = (
        "--figures",
        folder,
        "--figure-formats",
        "pdf, png,svg",
        "--out",
        tmp_path / "r.html",
    )
    assert invoke("report", played[0], *options).exit_code == 0
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    page = compose([Run(played[0])])
    again: dict[str, str | bytes] = {}
    for each in page.tables:
        again |= {f"{each.name}.csv": each.csv(), f"{each.name}.tex": each.latex()}
    for figure in page.figures[:1] + page.figures[-1:]:
        again |= {
            f"{figure.name}.{kind}": file
            for kind, file in figure.files(["pdf", "png", "svg"]).items()
        }
    for name, content in again.items():
        assert files[name] == (content if isinstance(content, bytes) else content.encode()), name
    names = {name.partition(".")[0] for name in files if name.endswith(".png")}
    assert {name.partition("-")[0] for name in names} == {
        "accuracy", "budget", "bytes", "epochs", "loss", "partition", "seconds", "topology", "train"
    }  # fmt: skip
    for name in names:
        assert ElementTree.fromstring(files[f"{name}.svg"].decode()).tag.endswith("svg")
        pdf = files[f"{name}.pdf"]
        assert (
            pdf.startswith(b"%PDF")
            and b"/FontFile2" in pdf
            and b"/Type3" not in pdf
            and b"CreationDate" not in pdf
        )
        with Image.open(BytesIO(files[f"{name}.png"])) as picture:
            assert (
                name.partition("-")[0] in ("epochs", "partition", "topology")
                or picture.width == 3.5 * 300
            )
            assert len(picture.getcolors(1 << 20) or ()) > 5
    latex = next(folder.glob("phases*.tex")).read_text()
    assert (
        latex.startswith("{\\footnotesize") and "\\begin{tabular}" in latex and "train & $" in latex
    )


def test_without_matplotlib_there_is_one_line(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(tmp_path, LAB)
    monkeypatch.setattr("fedstrata.deploy.console.reporting.find_spec", {"jinja2": True}.get)
    done = invoke("report", path)
    assert done.exit_code == 4 and not (path / "report.html").exists()
    line = "fedstrata: package = 'matplotlib': not installed here. pip install 'fedstrata[report]'."
    assert done.stderr.splitlines() == [line]
    assert invoke("report", path, "--figure-formats", "gif").exit_code == 2


def test_the_option_that_names_no_writable_place_is_reported(
    tmp_path: Path, make_run: MakeRun
) -> None:
    path, file = make_run(tmp_path, LAB, accuracies=()), tmp_path / "file"
    file.touch()
    for option, place in (("--figures", file), ("--out", file / "r.html")):
        done = invoke("report", path, option, place, "--figure-formats", "svg")
        assert done.exit_code == 4 and f"{option} = '{place}': " in done.stderr


def requests(log: str) -> list[str]:
    """Return what a page asked of a network, by a browser's log: what the browser asks itself has
    no origin.
    """
    asked = [event.get("params", {}) for event in json.loads(log)["events"]]
    return [
        params["url"]
        for params in asked
        if params.get("initiator", "not an origin") != "not an origin"
    ]


def browse(page: Path, home: Path) -> tuple[str, str, list[str]]:
    """Return a page's document, what a browser said of it, and what it asked of a network."""
    log = home / "net.json"
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            f"--user-data-dir={home / 'profile'}",
            "--enable-logging=stderr",
            f"--log-net-log={log}",
            "--window-size=390,800",
            "--dump-dom",
            f"file://{page}",
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return done.stdout, done.stderr, requests(log.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_shows_it_without_an_error_or_a_request(
    tmp_path: Path, make_run: MakeRun
) -> None:
    path = hostile(make_run(tmp_path, LAB))
    assert invoke("report", path).exit_code == 0
    document, said, asked = browse(path / "report.html", tmp_path)
    assert "CONSOLE" not in said and asked == []
    assert document.count("<svg") == document.count("</svg>") > 5 and "<script" not in document
    loud = tmp_path / "loud.html"  # the test would see it
    loud.write_text('<script>console.error("x")</script><img src="http://127.0.0.1:9/x">')
    _, said, asked = browse(loud, tmp_path)
    assert "CONSOLE" in said and asked == ["http://127.0.0.1:9/x"]
