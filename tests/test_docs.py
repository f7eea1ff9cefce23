"""What the documentation says, against the code: pictures, keys and defaults, snippets, links."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import BaseModel

from common.experiment.aggregation import RULES
from common.experiment.reading import parse
from common.experiment.rounds import EpochControl
from docs.tools import metrics_table, sketches
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
TABLES: Final[Mapping[str, type[BaseModel]]] = {**RULES, "cloud.epoch_control": EpochControl}

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
    """Return the same of a table of the experiment; a rule's name is no parameter."""
    table = TABLES[name]
    schema = table.model_json_schema()["properties"]
    fields = {key: field for key, field in table.model_fields.items() if key != "name" or name not in RULES}
    defaults = {key: f"`{json.dumps(f.default)}`" if f.default is not None else "not set" for key, f in fields.items()}
    return [(f"`{key}`", defaults[key], span(schema[key])) for key in fields]


def span(schema: dict[str, Any]) -> str:
    """Return in words what values a key may have."""
    if "anyOf" in schema:
        return span(schema["anyOf"][0])
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if schema["type"] == "boolean":
        return "true, false"
    if "exclusiveMinimum" in schema:
        return f"above {schema['exclusiveMinimum']:g}, at most {schema['maximum']:g}"
    low = f"{schema['minimum']:g}"
    return f"{low} to {schema['maximum']:.10g}" if "maximum" in schema else f"{low} or more"


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_what_the_code_draws(name: str) -> None:
    kept = (PICTURED / name).read_text(encoding="utf-8")
    assert kept == PICTURES[name](), "draw them anew: python -m docs.tools.drawing docs/algorithms"


def test_the_table_of_metrics_is_what_the_code_has() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page.endswith(f"\n\n{metrics_table.table()}"), "print it anew: python -m docs.tools.metrics_table"


@pytest.mark.parametrize("name", sketches.PICTURES)
def test_sketches_are_what_the_code_draws(name: str) -> None:
    kept = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert kept == sketches.PICTURES[name](), "draw them anew: python -m docs.tools.sketches docs"


def test_the_manual_is_what_the_commands_say() -> None:
    kept = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert kept == manual(), "write it anew: python -m docs.tools.manual > docs/commands.md"


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
def test_snippets_are_experiments(snippet: str) -> None:
    parse({**LAB, **tomllib.loads(snippet)})


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
