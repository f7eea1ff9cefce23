"""The report: what it reports is what the files say, nothing in it runs or asks a network, and it
can be read.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.cloud.run_folder import RunFolder
from fedstrata.deploy.console.tabular import Column, Table, clean
from fedstrata.deploy.results.figures import Figure
from fedstrata.deploy.results.page import Page, ShownTable, compose
from fedstrata.deploy.results.run import Run
from tests.golden import LAB, RUNS
from tests.helpers.commands import invoke

MakeRun = Callable[..., Path]
HOSTILE = "</style><script>alert(1)</script><img src=x onerror=alert(1)>\x00\u202e]]>&amp;'\"$_{$"
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "p", "div"),
    *("table", "caption", "thead", "tbody", "tr", "th", "td"),
}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


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


def test_nothing_is_asked_of_a_network_and_nothing_runs() -> None:
    text = compose([Run(path) for path in sorted((RUNS / "direct").iterdir())]).html()
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


@pytest.mark.usefixtures("undrawn")
def test_a_run_under_way_learns_it(tmp_path: Path, make_run: MakeRun) -> None:
    path = make_run(tmp_path, LAB, accuracies=(0.5, None), last="")
    folder = RunFolder.reopen(path)
    assert "is still running: 2 of 3" in compose([Run(path)]).html()
    folder.release()
    assert "was interrupted or killed: 2 of 3 global rounds are done" in compose([Run(path)]).html()


@pytest.mark.usefixtures("undrawn")
def test_figures_are_files_in_each_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def files(figure: Figure, kinds: Sequence[str]) -> dict[str, bytes]:
        return {kind: f"{figure.name} as {kind}".encode() for kind in kinds}

    monkeypatch.setattr(Figure, "files", files)
    paths = sorted(shutil.copytree(RUNS / "direct", tmp_path / "runs").iterdir())
    out, folder = tmp_path / "new" / "page.html", tmp_path / "other" / "figures"
    words = ("--out", out, "--figures", folder, "--figure-formats", "pdf, png,svg")
    done = invoke("report", *paths, *words)
    assert done.exit_code == 0 and done.stdout.splitlines() == [str(out), str(folder)]
    page = compose([Run(path) for path in paths])
    wanted: dict[str, bytes] = {}
    for figure in page.figures:
        for kind, content in files(figure, ["pdf", "png", "svg"]).items():
            wanted[f"{figure.name}.{kind}"] = content
    for each in page.tables:
        wanted[f"{each.name}.csv"] = each.csv().encode()
        wanted[f"{each.name}.tex"] = each.latex().encode()
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert found.items() >= wanted.items()
    assert done.stderr.splitlines() == [
        "reading 2 runs",
        f"drawing {len(page.figures)} figures, pdf, png, svg",
        f"{len(page.figures)} figures and {len(page.tables)} tables are in {folder}",
    ]
    facts = json.loads(invoke("report", *paths, *words, "--format", "json").stdout)
    assert facts["report"] == str(out)
    assert {*facts["files"]} == {str(out), *(str(folder / name) for name in found)}
