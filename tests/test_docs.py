"""The documentation against the code: pictures, keys and defaults, snippets, links."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_type_hints

import pytest
from pydantic import BaseModel

from cloud.records import STATISTICS, DeviceRecord, GlobalRoundRecord, LinkRecord
from common.experiment.data import TEXTS
from common.experiment.methods import RULES, SELECTORS
from common.experiment.reading import parse
from common.experiment.schema import EpochControl
from common.experiment.training import OBJECTIVES
from common.host.examination import Finding
from common.learning import datasets
from common.protocol import messages
from common.protocol.limits import MESSAGE_MOST, REPORT_BYTES, SMALL_BYTES, TARGET_BYTES, TRAFFIC_BYTES, SenderBounds
from common.protocol.round_state import GLOBAL_PHASES
from common.protocol.serialization import KINDS, VERSION
from common.text import JSON_MOST, JsonText, NameText, ShortText
from deploy.kits.lab import parse as lab_of
from deploy.sweeps.grid import expand, is_sweep
from docs.tools import experiment, kept_pictures, metrics_table, sketches
from docs.tools.drawing import PICTURES
from docs.tools.manual import manual

ROOT: Final = Path(__file__).parents[1]
PICTURED: Final = ROOT / "docs" / "algorithms"
PAGES: Final = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED: Final = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED: Final = re.compile(r"(?:^\n|^ {4}.*\n)+", re.MULTILINE)
LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
TABLE: Final = re.compile(
    r"^\| key of `([a-z_.]+)` \| default \| meaning \| range \|\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE
)
LAB: Final = {"topology": {"institutions": 4, "devices": 24}}  # of snippets that name none
OF_OBJECTIVES: Final = {f"objective.{name}" if name == "fedgen" else name: table for name, table in OBJECTIVES.items()}
SELECTED: Final[Mapping[str, type[BaseModel]]] = {  # selected by their names, those without parameters left out
    name: table
    for tables in (RULES, OF_OBJECTIVES, SELECTORS)
    for name, table in tables.items()
    if len(table.model_fields) > 1
}
TABLES: Final[Mapping[str, type[BaseModel]]] = {**SELECTED, "cloud.epoch_control": EpochControl}

README_LINES: Final = 150
README_COLUMNS: Final = 120

Row = tuple[str, str, str]


def snippets() -> list[Any]:
    """Return the TOML of all pages: fenced, or in the README indented and opening a table."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = FENCED.findall(text)
        blocks += [block for block in INDENTED.findall(text) if re.match(r"\n* {4}\[[a-z_.]+\]\n", block)]
        found += [pytest.param(block, id=f"{page.stem}-{i}") for i, block in enumerate(blocks)]
    return found


def written() -> dict[str, list[Row]]:
    """Return key, default and range of each row of each table of parameters."""
    tables = {}
    for page in PAGES:
        for name, body in TABLE.findall(page.read_text(encoding="utf-8")):
            rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in body.splitlines()]
            tables[name] = [(key, default, span) for key, default, _, span in rows]
    return tables


def defined(name: str) -> list[Row]:
    """Return the same of a table of the experiment; a name that selects a table is no parameter."""
    table = TABLES[name]
    schema = table.model_json_schema()["properties"]
    fields = {key: field for key, field in table.model_fields.items() if key != "name" or name not in SELECTED}
    given = {key: field.get_default(call_default_factory=True) for key, field in fields.items()}
    defaults = {key: "not set" if value is None else f"`{json.dumps(value)}`" for key, value in given.items()}
    return [(f"`{key}`", defaults[key], experiment.values(schema[key])) for key in fields]


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_what_the_code_draws(name: str) -> None:
    kept = (PICTURED / name).read_text(encoding="utf-8")
    assert kept == PICTURES[name](), "draw them anew: python -m docs.tools.drawing docs/algorithms"


def test_pictures_of_results_are_those_of_the_kept_runs() -> None:
    drawn = kept_pictures.pictures(ROOT / "docs" / "results")
    kept = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "results").glob("*.svg")}
    assert kept == drawn, "draw them anew: python -m docs.tools.kept_pictures docs/results"


def test_the_table_of_metrics_is_what_the_code_has() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page.endswith(f"\n\n{metrics_table.table()}"), "print it anew: python -m docs.tools.metrics_table"


@pytest.mark.parametrize("name", sketches.PICTURES)
def test_sketches_are_what_the_code_draws(name: str) -> None:
    kept = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert kept == sketches.PICTURES[name](), "draw them anew: python -m docs.tools.sketches docs"


def test_the_page_of_the_experiment_is_what_the_schema_has() -> None:
    kept = (ROOT / "docs" / "experiment.md").read_text(encoding="utf-8")
    assert kept == experiment.page(), "write it anew: python -m docs.tools.experiment > docs/experiment.md"
    assert "|  |" not in kept, "a key of common/experiment/ has no comment, which is its meaning"


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= README_LINES
    assert [line for line in lines if len(line) > README_COLUMNS] == []


def test_the_messages_of_the_protocol_are_the_codes() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\w+) \| \w+ \| (.*?) ?\|$", page, re.MULTILINE)
    kinds = [(int(n), name, re.findall(r"`(\w+): ", fields_)) for n, name, fields_ in rows]
    assert kinds == [
        (n, kind.__name__, [field.name for field in dataclasses.fields(kind)]) for n, kind in enumerate(KINDS)
    ]
    assert f"[{VERSION}, session, kind," in page and f"{VERSION} is the version" in page
    types = {int: "int", float: "float", NameText: "name", ShortText: "text", JsonText: "json"}
    others = (messages.Manifest, messages.Target, messages.LinkBytes, messages.ChildCount)
    for kind in (*KINDS, *others, Finding):
        row = next(line for line in page.splitlines() if re.match(rf"\| (\d+ \| )?{kind.__name__} \|", line))
        hints = get_type_hints(kind, include_extras=True)
        assert [name for name, hint in hints.items() if hint in types and f"`{name}: {types[hint]}`" not in row] == []


def test_the_sizes_of_the_protocol_are_the_codes() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8").partition("**Sizes.**")[2].partition("## ")[0]
    nothing = SenderBounds(nodes=0, blob_bytes=0, inline_bytes=0, plans=False, announces=False)
    small = f"{SMALL_BYTES:,}"
    assert dict(re.findall(r"^\| (.*?) \| (.*?) \|$", page, re.MULTILINE)) == {
        "message": "bytes at most",
        "Task": f"{small}, 8 for each 1,024 bytes of a model, and `transfer.inline_bytes`",
        "Result": f"the same, {REPORT_BYTES} for each node below its sender, and {JSON_MOST:,} of `plans` if it "
        "aggregates",
        "Reports": f"{small}, and {REPORT_BYTES} for each node below its sender",
        "Presence, Alive": f"{small}, and {TARGET_BYTES} for each node below its sender; a parent's Alive also what an "
        "Announcement may have",
        "Announcement": f"{SenderBounds().most(messages.Announcement):,}",
        "Progress, Farewell": f"{small}, and {TRAFFIC_BYTES} for each tier below its sender",
        "Ask": f"{small}, and one for each 8,192 bytes of a model",
        "FrozenOffered": f"{small}, and {messages.DIGEST_BYTES} for each {messages.MIN_CHUNK_BYTES:,} bytes of frozen "
        "arrays",
        "Probe, Probed": f"{nothing.most(messages.Probe):,}: noise has at most 4,096 chunks, and 64 MB",
        "Here": f"{nothing.most(messages.Here):,}",
        "Status": f"{nothing.most(messages.Status):,}",
        "all others": f"{nothing.most(messages.Goodbye):,}",
        "a chunk": f"{messages.MAX_CHUNK_BYTES:,}",
        "any message": f"{MESSAGE_MOST:,}",
    }


def test_each_column_of_a_runs_tables_is_described() -> None:
    page = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    kinds, groups = (
        (GlobalRoundRecord, LinkRecord, DeviceRecord),
        ("phases", "bytes_", "epochs", "omega", "spread", "epsilon", "other_scores", "by_devices", "more"),
    )
    fields_ = {field.name for kind in kinds for field in dataclasses.fields(kind)} - set(groups)
    columns = {field.removesuffix("_") for field in fields_} | {f"{phase}_s" for phase in GLOBAL_PHASES}
    columns |= {"TIER_up_bytes", "TIER_down_bytes", "score", "mixed_score"}
    columns |= {f"devices_{name}" for name in STATISTICS} | {"personalised_scored", "personalised_s"}
    assert [column for column in columns if f"`{column}`" not in page] == []


def test_each_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= set(LINK.findall(index))


def test_the_manual_is_what_the_commands_say() -> None:
    kept = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert kept == manual(), "write it anew: python -m docs.tools.manual > docs/commands.md"


def test_the_constants_of_each_data_set_are_the_codes() -> None:
    text = (
        (ROOT / "docs" / "data.md").read_text(encoding="utf-8").partition("## Normalisation")[2].partition("\n## ")[0]
    )
    listed = {
        name: tuple(tuple(map(float, cell.split(","))) for cell in cells)
        for names, *cells in re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) \|", text, re.M)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert listed == {
        name: tuple((each[0],) if len(set(each)) == 1 else each for each in (source.mean, source.std))
        for name, source in datasets._SOURCES.items()
        if name not in TEXTS
    }


def test_each_message_of_the_troubleshooting_is_in_the_code() -> None:
    folders = ("cloud", "common", "deploy", "device", "institution")
    code = "".join(path.read_text(encoding="utf-8") for name in folders for path in (ROOT / name).rglob("*.py"))
    words = re.sub(r'"\s*\n\s*f?"', "", code)  # a message may stand in several lines
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(messages) > 10
    for message in messages:
        for part in (part.strip() for part in message.split("...")):
            assert not part.strip(":;") or part in words, f"{part!r} of {message!r}"


def test_no_picture_is_left_over() -> None:
    assert {path.name for path in PICTURED.glob("*.svg")} == set(PICTURES)


@pytest.mark.parametrize("snippet", snippets())
def test_snippets_are_experiments_sweeps_or_labs(snippet: str) -> None:
    given = tomllib.loads(snippet)
    if "machines" in given:
        assert lab_of(given).parents
        return
    if is_sweep(given):
        assert expand(given, ROOT / "sweep.toml").cells
        return
    parse(given if "tiers" in given else {**LAB, **given})


def test_each_table_of_parameters_is_there() -> None:
    assert set(written()) == set(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_parameters_defaults_and_ranges_are_the_codes(name: str) -> None:
    assert written()[name] == defined(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], target
