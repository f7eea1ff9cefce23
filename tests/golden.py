"""What users see of runs, kept in files: `python -m tests.golden` writes them again, and the lines
of refusals; `python -m tests.golden runs` the runs before.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch
from xml.etree import ElementTree

from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.deploy.console.table_layout import Width
from fedstrata.deploy.results.figures import Figure
from fedstrata.deploy.results.page import Page, compose
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.sweeps.measures import SweepResults
from fedstrata.deploy.sweeps.output import long_table, missing, notes, tables_of, to_json
from tests.conftest import _make_run
from tests.helpers.commands import invoke
from tests.helpers.direct import run_direct
from tests.helpers.sweeps import FIGURES, results, the_best_of_two
from tests.refused import KEPT, rewrite

VIEWS: Final = KEPT / "views"
RUNS: Final = KEPT / "runs"
LAB: dict[str, Any] = {
    "name": "tiny", "rounds": 3, "stop": {"target": 0.99},
    "topology": {"institutions": 2, "devices": 4},
    "data": {"dataset": "synthetic", "classes": 3, "image_shape": [1, 8, 8], "samples": 120,
             "test_samples": 40},
    "model": {"name": "mlp_digits"},
    "links": {"wan": {"up_mbit": 10.0, "down_mbit": 20.0}, "lan": "lan-100mbit"},
}  # fmt: skip
TEMPO: dict[str, Any] = {"cloud": {"epoch_control": {"name": "tempo"}}}
CROSS: dict[str, Any] = {
    "cloud": {"aggregation": {"name": "fedcross", "alpha": 0.9}},
    "institution": {"rounds": 2},
}
LARGER: dict[str, Any] = {"topology": {"institutions": 2, "devices": 8}}
NUMBERS: dict[str, Any] = {
    "data": {"dataset": "flats.csv", "targets": "numbers", "target_column": "price"},
    "model": {"name": "mine:build"},
}
THREE: Final = (0.5, 0.75, 0.9)
# The runs: folder, changes of the lab, accuracies by global round (None: it was run), last event.
Played = tuple[str, dict[str, Any], tuple[float | None, ...] | None, str]
PLAYED: Final[list[Played]] = [
    ("direct", {}, None, "finished"),
    ("direct", TEMPO, None, "finished"),
    ("series", {"seed": 1}, (0.5, 0.75), "finished"),
    ("series", {"seed": 2}, (0.25, 0.5), "finished"),
    ("series", {"seed": 3}, (0.5,), "finished"),
    ("series", {**TEMPO, "seed": 1}, (0.75, 1.0), "finished"),
    ("series", {**TEMPO, "seed": 2}, (0.75, 1.0), "finished"),
    ("series", {**TEMPO, "seed": 4}, (0.75, 1.0), "finished"),
    ("series", {"seed": 5}, (0.125, None), ""),
    ("series", {"seed": 6}, (), "failed"),
    ("tasks", {}, THREE, "finished"),
    ("tasks", LARGER, (0.1, 0.1, 0.1, 0.9), "finished"),
    ("tasks", TEMPO, THREE, "finished"),
    ("tasks", LARGER | TEMPO, (0.1, 0.1, 0.1, 0.9), "finished"),
    ("others", {}, THREE, "finished"),
    ("others", {"links": {"wan": {"up_mbit": 5.0}}}, (0.8, 0.9), "finished"),
    ("others", {"links": {**LAB["links"], "enforce": "kernel"}}, THREE, "finished"),
    ("others", {"hardware": {"default": {"slowdown": 2.0, "overhead_s": 0.5}}}, THREE, "finished"),
    ("others", {"hardware": {"of": {"device-1": "raspberry-pi-4"}}}, THREE, "finished"),
    ("others", CROSS, THREE, "finished"),
    ("others", NUMBERS, THREE, "finished"),
    ("others", {"stop": {"target": 0.8}}, (0.8,), "finished"),
]
MACHINE: Final = {
    "host": "host", "platform": "Linux", "cpus": 2, "instructions": "AVX2", "load": 0.2,
    "python": "3.11.7", "packages": {"fedstrata": "0.1.0", "torch": "2.8.0"},
}  # fmt: skip
TEXTS: Final = ("experiment.toml", "partition.json", "rounds.csv", "links.csv", "devices.csv")


def make_runs() -> None:
    """Play the runs anew, and keep what is text of them, as of one machine and day."""
    shutil.rmtree(RUNS, ignore_errors=True)
    for place, (folder, change, accuracies, last) in enumerate(PLAYED):
        with tempfile.TemporaryDirectory() as place_of_run:
            if accuracies is None:
                path = run_direct(Path(place_of_run), LAB | change)
            else:
                path = _make_run(Path(place_of_run), LAB | change, accuracies=accuracies, last=last)
            made = json.loads((path / "manifest.json").read_text())
            run, started = f"20260101T0000{place:02}Z-aaaa{place:02}", f"20260101T0000{place:02}Z"
            kept = RUNS / folder / f"{started}-tiny-aaaa{place:02}"
            kept.mkdir(parents=True)
            for name in TEXTS:
                if (path / name).exists():
                    shutil.copy(path / name, kept / name)
            facts = {**made, **MACHINE, "run": run, "started": started}
            facts.pop("commit", None)
            (kept / "manifest.json").write_text(json.dumps(facts, indent=1) + "\n")
            events = (path / "events.jsonl").read_text().replace(str(path), "HERE")
            events = re.sub(r'"time": "[^"]*"', '"time": "2026-01-01T00:00:00.000+00:00"', events)
            (kept / "events.jsonl").write_text(events.replace(made["run"], run))
            if change is NUMBERS:
                head, *rows = (kept / "rounds.csv").read_text().splitlines()
                scored = [f"{head},score", *(f"{row},-0.25" for row in rows)]
                (kept / "rounds.csv").write_text("\n".join(scored) + "\n")


# What is seen: by the name of a file, how its text is made in a folder with the runs.

COMMANDS: Final = {
    "compare.txt": "compare series --target 0.75",
    "compare.csv": "compare series --target 0.75 --format csv",
    "compare.json": "compare series --target 0.75 --format json",
    "compare.tex": "compare series --target 0.75 --format latex",
    "compare-paired.txt": "compare series --target 0.5",
    "compare-nobody.csv": "compare aaaa02 aaaa03 --runs series --target 0.95 --format csv",
    "compare-no-fraction.txt": "compare series --target 1.5",
    "compare-own-target.txt": "compare direct",
    "compare-no-target.txt": "compare tasks",
    "compare-tasks.txt": "compare tasks --target 0.9",
    "compare-tasks.csv": "compare tasks --target 0.9 --format csv",
    "compare-tasks.json": "compare tasks --target 0.9 --format json",
    "compare-links.txt": "compare aaaa14 aaaa15 --runs others --target 0.9",
    "compare-links.json": "compare aaaa14 aaaa15 --runs others --target 0.9 --format json",
    "compare-enforced.txt": "compare aaaa14 aaaa16 --runs others --target 0.9",
    "compare-hardware.txt": "compare aaaa14 aaaa17 --runs others --target 0.9",
    "compare-ended.txt": "compare aaaa21 --runs others --target 0.9",
    "compare-two-targets.txt": "compare aaaa14 aaaa21 --runs others",
    "runs.txt": "runs list --runs series",
    "runs.json": "runs list --runs series --format json",
    "runs-of-other-tasks.txt": "runs list --runs others",
}


def by_command(words: str, folder: Path) -> str:
    """Return what a command writes, standard error last."""
    done = invoke(*shlex.split(words))
    text = f"{done.stdout}\n[exit code {done.exit_code}]\n{done.stderr}"
    text = text.replace(str(folder), "HERE")
    text = re.sub(r'"age_s": [\d.]+', '"age_s": 1', text)
    return re.sub(r" *\b\d+ d\b", " AGE", text)


def page_of(*patterns: str, names: Sequence[str] = ()) -> Page:
    """Return the report of the runs whose folders these patterns name."""
    paths = [path for pattern in patterns for path in sorted(Path().glob(pattern))]
    return compose([Run(path) for path in paths], names)


def facts_of(page: Page) -> str:
    """Return what was run, as the top of a page has it."""
    (facts, *_) = (content for kind, content in page.blocks if kind == "facts")
    lines = [f"== {page.title}"]
    for name, texts in facts:
        lines += [f"{name}: {of} {text}" for of, text in texts]
    return "\n".join(lines)


def all_facts(folder: Path) -> str:
    """Return what was run of each run of other settings, and of two together."""
    pages = [page_of(f"others/{path.name}") for path in sorted(Path("others").iterdir())]
    return "\n".join(map(facts_of, [*pages, page_of("others/*14", "others/*19")]))


def tables_in(page: Page) -> str:
    """Return the tables of a page, and of its figures, as CSV, and the first as LaTeX."""
    texts = [f"== {page.title}\n"]
    for table in page.tables:
        texts.append(f"-- {table.title}\n{table.csv()}")
    texts += [table.latex() for table in page.tables[:2]]
    for figure in page.figures:
        rows = "" if figure.table is None else figure.table.csv()
        texts.append(f"-- {figure.name}: {figure.title}\n{rows}")
    return "\n".join(texts)


def words_of(page: Page) -> str:
    """Return the texts of a page without its figures, an element a line."""
    with patch.object(Figure, "svg", lambda figure, key: "<svg/>"):
        html = page.html()
    root = ElementTree.fromstring(re.sub("(<meta [^>]*)>", r"\1/>", html.partition("\n")[2]))
    lines = []
    for element in root.iter():
        text = " ".join((element.text or "").split())
        if element.tag != "style":
            lines.append(f"{element.tag} {sorted(element.attrib.items()) or ''} {text}".strip())
        if tail := " ".join((element.tail or "").split()):
            lines.append(f"  {tail}")
    return "\n".join(lines)


def drawn(page: Page) -> str:
    """Return what the figures of a page draw: elements with whole numbers, paths as their ends."""
    lines = []
    for figure in page.figures:
        lines.append(f"== {figure.name}: {figure.title}")
        for element in ElementTree.fromstring(figure.svg("k-")).iter():
            facts = {key: value for key, value in element.attrib.items() if key != "style"}
            text = f"{element.tag.rpartition('}')[2]} {facts or ''} {(element.text or '').strip()}"
            text = re.sub(r"\b([mp])[0-9a-f]{10}\b", r"\1", text)  # digests of the library
            lines.append(re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.0f}", text))
    return "\n".join(lines)


NAMES: Final = ["an averaged model of two institutions", "Tempo over the slower of both links"]
LOOKS: Final = {"tables": tables_in, "words": words_of, "figures": drawn}
REPORTS: Final[dict[str, Callable[[], Page]]] = {
    "direct": lambda: page_of("direct/*"),
    "series": lambda: page_of("series/*"),
    "tasks": lambda: page_of("tasks/*"),
    "scores": lambda: page_of("others/*14", "others/*20"),
    "named": lambda: page_of("series/*02", "series/*03", "series/*05", "series/*08", names=NAMES),
    "unfinished": lambda: page_of("series/*08", "series/*09"),
    "one": lambda: page_of("direct/*01"),
}
LOOKED_AT: Final = (
    *("direct tables", "series tables", "tasks tables", "scores tables", "one tables"),
    *("direct words", "series words", "named words", "unfinished words"),
    *("series figures", "one figures"),
)


def by_report(name: str, look: str, folder: Path) -> str:
    """Return what a report has, looked at in one way."""
    return LOOKS[look](REPORTS[name]()).replace(str(folder), "HERE")


WIDTHS: Final = (Width(120), Width(40))
SWEEPS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "differences": {
        "measure": [
            {"last": 1, "against": "FedAvg"},
            {"name": "reached"},
            {"name": "rounds"},
            {"name": "steps"},
            {"name": "rounds", "against": "FedAvg", "relation": "speed_up"},
        ],
        "columns": [],
    },
    "paper": {"paper": {"figures": FIGURES}},
    "paper-beside": {"paper": {"figures": FIGURES, "label": "seen"}, "columns": []},
    "partial": {"left_out": [("a", "Other", 2), ("b", "Other", 1), ("b", "Other", 2)]},
    "curve": {"tables": ["split"], "columns": [], "measure": {"every": 1}},
}


def results_of(found: SweepResults) -> str:
    """Return a sweep's tables in their forms."""
    texts = []
    for width in WIDTHS:
        texts += [f"-- {table.title}\n{table.aligned()}" for table in tables_of(found, width)]
    texts.append(long_table(found).csv())
    texts.append(json.dumps(to_json(found), indent=1))
    texts += [*missing(found), *notes(found)]
    return re.sub(r"\d{8}T\d{6}Z-\w{6}", "RUN", "\n".join(texts))


def make_run(root: Path, tree: Mapping[str, Any], **more: Any) -> Path:
    """Leave the folder of a run that nobody played, as of one machine."""
    path = _make_run(root, tree, **more)
    file = path / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **MACHINE}))
    return path


def of_sweep(changes: dict[str, Any], folder: Path) -> str:
    """Return the tables of a sweep with these changes."""
    return results_of(results(folder / "sweep", make_run, **changes))


def views() -> Iterator[tuple[str, Callable[[Path], str]]]:
    """Yield the name of each view's file, and what makes its text."""
    for name, words in COMMANDS.items():
        yield name, partial(by_command, words)
    yield "facts.txt", all_facts
    yield "defaults.toml", lambda folder: to_toml(parse({}))
    for each in LOOKED_AT:
        name, look = each.split()
        yield f"report-{name}-{look}.txt", partial(by_report, name, look)
    for name, changes in SWEEPS.items():
        yield f"sweep-{name}.txt", partial(of_sweep, changes)
    yield "sweep-best.txt", lambda folder: results_of(the_best_of_two(folder / "sweep", make_run))


LONG: Final = re.compile(r"(?<![\w.])\d+\.\d{13,}(e-\d+)?\b")


def text_of(make: Callable[[Path], str]) -> str:
    """Return the text of a view, made in a new folder with the runs."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shutil.copytree(RUNS, folder, dirs_exist_ok=True)
        with chdir(folder):
            lines = make(folder).splitlines()
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    # from Python 3.12 on, sum() rounds once: the last digits are others
    return LONG.sub(lambda found: f"{float(found[0]):.12g}", text)


if __name__ == "__main__":
    if "runs" in sys.argv:
        make_runs()
    rewrite(lambda: Path(tempfile.mkdtemp()))
    shutil.rmtree(VIEWS, ignore_errors=True)
    VIEWS.mkdir()
    for name, make in views():
        (VIEWS / name).write_text(text_of(make))
