"""The documentation against the code: what is made from it, keys and defaults, snippets, names,
commands.

Links, headings and the index are what `make docs` checks.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_type_hints

import pytest
import typer
from pydantic import BaseModel

from docs.tools import experiment, kept_pictures, metrics_table, sketches
from docs.tools.drawing import PICTURES
from docs.tools.manual import commands, manual
from fedstrata.cloud.records import STATISTICS, DeviceRecord, GlobalRoundRecord, LinkRecord
from fedstrata.common.experiment.reading import parse
from fedstrata.common.host.examination import Finding
from fedstrata.common.learning import datasets
from fedstrata.common.methods.settings import RULES, SELECTORS
from fedstrata.common.protocol import messages
from fedstrata.common.protocol.limits import (
    MESSAGE_MOST,
    REPORT_BYTES,
    SMALL_BYTES,
    TARGET_BYTES,
    TRAFFIC_BYTES,
    SenderBounds,
)
from fedstrata.common.protocol.round_state import GLOBAL_PHASES
from fedstrata.common.protocol.serialization import KINDS, VERSION
from fedstrata.common.settings.cloud import EpochControl
from fedstrata.common.settings.data import TEXTS
from fedstrata.common.settings.training import OBJECTIVES
from fedstrata.common.text import JSON_MOST, JsonText, NameText, ShortText
from fedstrata.deploy.cli.main import app
from fedstrata.deploy.kits.lab_file import parse as lab_of
from fedstrata.deploy.sweeps.grid import expand, is_sweep

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = {
    path: path.read_text("utf-8")
    for path in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")))
}
FENCED_TOML: Final = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED_TOML: Final = re.compile(r"(?:^\n|^ {4}.*\n)+", re.MULTILINE)
TABLE: Final = re.compile(
    r"^\| key of `([a-z_.]+)` \| default \| meaning \| range \|\n\|[-|]+\n((?:\|.*\n)+)",
    re.MULTILINE,
)
LAB: Final = {"topology": {"institutions": 4, "devices": 24}}  # of snippets that name none
OF_OBJECTIVES: Final = {
    f"objective.{name}" if name == "fedgen" else name: table for name, table in OBJECTIVES.items()
}
# selected by their names, those without parameters left out
SELECTED: Final[Mapping[str, type[BaseModel]]] = {
    name: table
    for tables in (RULES, OF_OBJECTIVES, SELECTORS)
    for name, table in tables.items()
    if len(table.model_fields) > 1
}
TABLES: Final[Mapping[str, type[BaseModel]]] = {**SELECTED, "cloud.epoch_control": EpochControl}

README_LINES: Final = 150
README_COLUMNS: Final = 120

Row = tuple[str, str, str]


def page(name: str, begin: str = "", end: str = "\0") -> str:
    """Return the text of a page, between two texts that it has."""
    text = PAGES[ROOT / name]
    return text.partition(begin)[2].partition(end)[0] if begin else text


def files_of(name: str) -> dict[str, str]:
    """Return the files that a page shows, each with its name as the first line, by their names."""
    return dict(re.findall(r"^```\w+\n# ([\w.]+)\n(.*?)^```", page(name), re.MULTILINE | re.DOTALL))


def snippets() -> list[Any]:
    """Return the TOML of all pages: fenced, or in the README indented and opening a table."""
    found = []
    for path, text in PAGES.items():
        blocks = FENCED_TOML.findall(text)
        blocks += [
            block
            for block in INDENTED_TOML.findall(text)
            if re.match(r"\n* {4}\[[a-z_.]+\]\n", block)
        ]
        found += [pytest.param(block, id=f"{path.stem}-{i}") for i, block in enumerate(blocks)]
    return found


def written() -> dict[str, list[Row]]:
    """Return key, default and range of each row of each table of parameters."""
    tables = {}
    for text in PAGES.values():
        for name, body in TABLE.findall(text):
            rows = [
                [cell.strip() for cell in line.strip("|").split(" | ")]
                for line in body.splitlines()
            ]
            tables[name] = [(key, default, span) for key, default, _, span in rows]
    return tables


def defined(name: str) -> list[Row]:
    """Return the same of a table of the experiment; a name that selects a table is no parameter."""
    table = TABLES[name]
    schema = table.model_json_schema()["properties"]
    fields = {
        key: field
        for key, field in table.model_fields.items()
        if key != "name" or name not in SELECTED
    }
    given = {key: field.get_default(call_default_factory=True) for key, field in fields.items()}
    defaults = {
        key: "not set" if value is None else f"`{json.dumps(value)}`"
        for key, value in given.items()
    }
    return [(f"`{key}`", defaults[key], experiment.values(schema[key])) for key in fields]


RESULTS: Final = ROOT / "docs" / "results"
MADE: Final = {  # by file or pattern of files: what the code makes of it, and by which command
    "docs/algorithms/*.svg": (
        lambda: {name: draw() for name, draw in PICTURES.items()},
        "drawing docs/algorithms",
    ),
    "docs/concepts-*.svg": (
        lambda: {name: draw() for name, draw in sketches.PICTURES.items()},
        "sketches docs",
    ),
    "docs/results/*.svg": (lambda: kept_pictures.pictures(RESULTS), "kept_pictures docs/results"),
    "docs/experiment.md": (
        lambda: {"experiment.md": experiment.page()},
        "experiment > docs/experiment.md",
    ),
    "docs/commands.md": (lambda: {"commands.md": manual()}, "manual > docs/commands.md"),
}


@pytest.mark.parametrize("files", MADE)
def test_what_is_made_from_the_code_is_what_the_code_makes(files: str) -> None:
    make, words = MADE[files]
    kept = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob(files)}
    assert kept == make(), f"make it anew: python -m docs.tools.{words}"


def test_the_table_of_metrics_is_what_the_code_has() -> None:
    made = f"\n\n{metrics_table.table()}"
    assert page("docs/metrics.md").endswith(made), (
        "print it anew: python -m docs.tools.metrics_table"
    )


def test_each_key_of_the_experiment_has_a_meaning() -> None:
    assert "|  |" not in page("docs/experiment.md"), (
        "a key of common/settings/ has no comment, which is its meaning"
    )


def test_the_readme_is_short() -> None:
    lines = page("README.md").splitlines()
    assert len(lines) <= README_LINES
    assert [line for line in lines if len(line) > README_COLUMNS] == []


def test_the_messages_of_the_protocol_are_the_codes() -> None:
    text = page("docs/protocol.md")
    rows = re.findall(r"^\| (\d+) \| (\w+) \| \w+ \| (.*?) ?\|$", text, re.MULTILINE)
    kinds = [(int(n), name, re.findall(r"`(\w+): ", fields_)) for n, name, fields_ in rows]
    assert kinds == [
        (n, kind.__name__, [field.name for field in dataclasses.fields(kind)])
        for n, kind in enumerate(KINDS)
    ]
    assert f"[{VERSION}, session, kind," in text and f"{VERSION} is the version" in text
    types = {int: "int", float: "float", NameText: "name", ShortText: "text", JsonText: "json"}
    others = (messages.Manifest, messages.Target, messages.LinkBytes, messages.ChildCount)
    for kind in (*KINDS, *others, Finding):
        row = next(
            line
            for line in text.splitlines()
            if re.match(rf"\| (\d+ \| )?{kind.__name__} \|", line)
        )
        hints = get_type_hints(kind, include_extras=True)
        assert [
            name
            for name, hint in hints.items()
            if hint in types and f"`{name}: {types[hint]}`" not in row
        ] == []


def test_the_sizes_of_the_protocol_are_the_codes() -> None:
    text = page("docs/protocol.md", "**Sizes.**", "## ")
    nothing = SenderBounds(nodes=0, blob_bytes=0, inline_bytes=0, plans=False, announces=False)
    small = f"{SMALL_BYTES:,}"
    assert dict(re.findall(r"^\| (.*?) \| (.*?) \|$", text, re.MULTILINE)) == {
        "message": "bytes at most",
        "Task": f"{small}, 8 for each 1,024 bytes of a model, and `transfer.inline_bytes`",
        "Result": f"the same, {REPORT_BYTES} for each node below its sender, and {JSON_MOST:,} of "
        "`plans` if it "
        "aggregates",
        "Reports": f"{small}, and {REPORT_BYTES} for each node below its sender",
        "Presence, Alive": f"{small}, and {TARGET_BYTES} for each node below its sender; a "
        "parent's Alive also what an "
        "Announcement may have",
        "Announcement": f"{SenderBounds().most(messages.Announcement):,}",
        "Progress, Farewell": f"{small}, and {TRAFFIC_BYTES} for each tier below its sender",
        "Ask": f"{small}, and one for each 8,192 bytes of a model",
        "FrozenOffered": f"{small}, and {messages.DIGEST_BYTES} for each "
        f"{messages.MIN_CHUNK_BYTES:,} bytes of frozen "
        "arrays",
        "Probe, Probed": (
            f"{nothing.most(messages.Probe):,}: noise has at most 4,096 chunks, and 64 MB"
        ),
        "Here": f"{nothing.most(messages.Here):,}",
        "Status": f"{nothing.most(messages.Status):,}",
        "all others": f"{nothing.most(messages.Goodbye):,}",
        "a chunk": f"{messages.MAX_CHUNK_BYTES:,}",
        "any message": f"{MESSAGE_MOST:,}",
    }


def test_each_column_of_a_runs_tables_is_described() -> None:
    kinds = (GlobalRoundRecord, LinkRecord, DeviceRecord)
    groups = (
        "phases",
        "bytes_",
        "epochs",
        "omega",
        "spread",
        "epsilon",
        "other_scores",
        "by_devices",
        "more",
    )
    fields_ = {field.name for kind in kinds for field in dataclasses.fields(kind)} - set(groups)
    columns = {field.removesuffix("_") for field in fields_} | {
        f"{phase}_s" for phase in GLOBAL_PHASES
    }
    columns |= {"TIER_up_bytes", "TIER_down_bytes", "score", "mixed_score"}
    columns |= {f"devices_{name}" for name in STATISTICS} | {
        "personalised_scored",
        "personalised_s",
    }
    assert [column for column in columns if f"`{column}`" not in page("docs/runs.md")] == []


def test_the_constants_of_each_data_set_are_the_codes() -> None:
    text = page("docs/data.md", "## Normalisation", "\n## ")
    listed = {
        name: tuple(tuple(map(float, cell.split(","))) for cell in cells)
        for names, *cells in re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) \|", text, re.M)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert listed == {
        name: tuple(
            (each[0],) if len(set(each)) == 1 else each for each in (source.mean, source.std)
        )
        for name, source in datasets._SOURCES.items()
        if name not in TEXTS
    }


def test_each_message_of_the_troubleshooting_is_in_the_code() -> None:
    words = re.sub(r'"\s*\n\s*f?"', "", code(".py"))  # a message may stand in several lines
    titles = re.findall(r"^### `(.*)`$", page("docs/troubleshooting.md"), re.MULTILINE)
    assert len(titles) > 10
    for message in titles:
        for part in (part.strip() for part in message.split("...")):
            assert not part.strip(":;") or part in words, f"{part!r} of {message!r}"


@pytest.mark.parametrize("snippet", snippets())
def test_snippets_are_experiments_sweeps_or_labs(
    snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text(files_of("docs/flower.md")["pyproject.toml"])
    monkeypatch.chdir(tmp_path)
    given = tomllib.loads(snippet)
    if "machines" in given:
        assert lab_of(given).parents
        return
    if is_sweep(given):
        assert expand(given, ROOT / "sweep.toml").cells
        return
    parse(given if "tiers" in given else {**LAB, **given})


def test_parameters_defaults_and_ranges_are_the_codes() -> None:
    assert written() == {name: defined(name) for name in TABLES}


# What pages name: commands, options, variables, keys, layers and files

PROJECT: Final[Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
COMMANDS: Final = dict(commands())
EVERYWHERE: Final = {
    "--help",
    *(option for one in typer.main.get_command(app).params for option in one.opts),
}
LINE: Final = re.compile(
    r"^(?: {4}| {2,3})?(?:sudo )?(?:\.venv/bin/)?(fedstrata [^`\n]*?)(?:  +#.*)?$", re.MULTILINE
)
INLINE: Final = re.compile(r"`(fedstrata [^`]*)`")
FENCED: Final = re.compile(r"^ *```sh\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INDENTED: Final = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
TARGETS: Final = set(
    re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
)
BENCHES: Final = {
    path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "bench").glob("*.py")
}
READING: Final = (  # section 0 of the design: one global round, from the arithmetic to the device
    *("common/methods/mixing.py", "common/methods/fedcross.py", "common/protocol/participant.py"),
    *(
        "common/protocol/coordinator.py",
        "common/protocol/parent_session.py",
        "common/runtime/endpoint.py",
    ),
    *("cloud/global_rounds.py", "device/training/local_training.py"),
)
KEYS_MOST: Final = 30


def lines(text: str) -> Iterator[str]:
    """Yield the commands of fedstrata on a page, continued lines joined."""
    text = text.replace("\\\n", " ")
    for block in (*FENCED.findall(text), *INDENTED.findall(text)):
        for line in LINE.findall(block):
            yield from (
                part for part in re.split(r"\s(?:&&|;|\|)\s", line) if part.startswith("fedstrata ")
            )
    yield from (" ".join(line.split()) for line in INLINE.findall(text))


def problem_of(line: str) -> str | None:
    """Return what is wrong with a command, None if nothing: its name and its options exist."""
    words = shlex.split(re.sub(r"\s\.\.\.", "", line), comments=True)[1:]
    if not words or words[0].startswith("-") or not words[0].islower():
        return None
    name = next((name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS), None)
    if name is None:
        is_group = any(each.startswith(f"{words[0]} ") for each in COMMANDS)
        return None if is_group and len(words) == 1 else f"no command: {line}"
    known = {
        option for one in COMMANDS[name].params for option in (*one.opts, *one.secondary_opts)
    } | EVERYWHERE
    wrong = [
        word for word in words if word.startswith("--") and word.partition("=")[0] not in known
    ]
    return f"{name} has no {', '.join(wrong)}" if wrong else None


def test_commands_and_their_options_exist() -> None:
    found = {line for text in PAGES.values() for line in lines(text)}
    assert len(found) > 100 and [problem for line in found if (problem := problem_of(line))] == []
    assert problem_of("fedstrata jump --broker HOST") == "no command: fedstrata jump --broker HOST"
    assert problem_of("fedstrata cloud my.toml --high 3") == "cloud has no --high"


def code(*kinds: str) -> str:
    """Return the text of the product's files of some kinds."""
    rooms = ("cloud", "common", "deploy", "device", "institution", "docs/tools")
    files = (path for room in rooms for path in (ROOT / room).rglob("*"))
    return "".join(
        path.read_text(encoding="utf-8")
        for path in files
        if path.suffix in kinds or path.name in kinds
    )


def test_variables_of_the_environment_exist() -> None:
    known = code(".py", ".yml", ".yaml", ".sh", ".env", "Containerfile")
    named = {name for text in PAGES.values() for name in re.findall(r"\bFEDSTRATA_[A-Z_]+\b", text)}
    assert len(named) > 10 and sorted(name for name in named if name not in known) == []


def test_the_options_and_keys_of_the_page_on_security_exist() -> None:
    options = {
        option for command in COMMANDS.values() for one in command.params for option in one.opts
    }
    named = set(re.findall(r"`(--[a-z-]+)", page("SECURITY.md")))
    assert named and named <= options
    keys = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?: = [^`]*)?`", page("SECURITY.md")))
    assert keys and all(experiment.field_of(key) for key in keys)
    of_labs = (ROOT / "deploy" / "kits" / "lab_file.py").read_text(encoding="utf-8")
    assert all(
        f"    {key}: " in of_labs
        for key in re.findall(r"`([a-z_]+) = (?:true|false)`", page("SECURITY.md"))
    )


def test_the_keys_that_matter_are_few_and_exist_and_others_are_refused() -> None:
    assert len(experiment.MATTER) <= KEYS_MOST and all(map(experiment.field_of, experiment.MATTER))
    for key in ("training.epoch", "rounds.first", "trainings.epochs"):
        with pytest.raises(KeyError):
            experiment.field_of(key)


def test_the_layers_are_those_of_the_import_contracts() -> None:
    block = page("CONTRIBUTING.md", "the contracts in `pyproject.toml`:\n", "\n| room |")
    lines_ = re.sub(r"\n {5,}", " ", block).split("\n")  # a room's layers may take several lines
    rooms = [line.strip().rpartition(":") for line in lines_ if line.strip()]
    layers = {
        name: [" ".join(layer.split()) for layer in text.split(">")] for name, _, text in rooms
    }
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    assert layers == {
        each["containers"][0].removeprefix("fedstrata").removeprefix("."): each["layers"]
        for each in contracts
    }


def test_the_reading_order_is_that_of_the_design() -> None:
    listed = page("CONTRIBUTING.md", "Read in this order").partition("\n\n")[2].partition("\n\n")[0]
    items = re.findall(r"^\d+\. `([^`]+)`: (.*(?:\n {3}.*)*)", listed, re.MULTILINE)
    assert tuple(path for path, _ in items) == READING
    assert all(
        (ROOT / path).is_file() and text.count(". ") == 0 and text.endswith(".")
        for path, text in items
    )


def test_paths_in_backticks_exist() -> None:
    rooms = "|".join(("cloud", "common", "deploy", "device", "docs", "institution", "tests"))
    path = re.compile(rf"`((?:{rooms})/(?:[\w/.-]*\w\.\w+|[\w/-]*))`")
    found = {one for file in ROOT.glob("*.md") for one in path.findall(PAGES[file])}
    assert (
        found
        and sorted(one for one in found if "NAME" not in one and not (ROOT / one).exists()) == []
    )


def figures(text: str) -> Iterator[tuple[str, str]]:
    """Yield the first and the last cell of each row of a table whose last head begins with
    `command`.
    """
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = [
            [cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()
        ]
        if head[-1].startswith("command"):
            yield from ((row[0], row[-1]) for row in rows)


def missing(command: str) -> str | None:
    """Return what a command in backticks names and the repository has not."""
    words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
    if words[0] == "make":
        return None if words[1] in TARGETS else f"target {words[1]}"
    if words[0] == "fedstrata":
        return problem_of(command)
    paths = [word for word in words if word.endswith(".py")]
    lacking = [path for path in paths if not (ROOT / path).exists()]
    if "-k" in words and not lacking:
        tests = re.findall(r"def (test_\w+)", (ROOT / paths[0]).read_text(encoding="utf-8"))
        lacking = (
            []
            if any(words[words.index("-k") + 1] in name for name in tests)
            else [f"-k of {command}"]
        )
    return (
        lacking[0]
        if lacking
        else None
        if paths or words[:2] == ["python", "-m"]
        else f"kind of {command}"
    )


def test_benchmarks_are_listed_by_their_names_and_those_that_pages_name_exist() -> None:
    listed = {
        name: re.findall(r'^"""`make bench NAME=(\w+)`: ', text) for name, text in BENCHES.items()
    }
    assert [name for name, found in listed.items() if found not in ([], [name])] == []
    named = {name for text in PAGES.values() for name in re.findall(r"make bench NAME=(\w+)", text)}
    assert len(named) > 10 and sorted(name for name in named if not listed.get(name)) == []


def test_each_figure_has_a_command_that_exists() -> None:
    rows = [*figures(page("docs/benchmarks.md"))]
    assert len(rows) > 5
    for what, cell in rows:
        named = re.findall(r"`([^`]+)`", cell)
        assert named or cell in ("the same", "[below](#predictions)"), f"{what}: no command"
        assert [lack for command in named if (lack := missing(command))] == [], what


def test_each_section_of_the_benchmarks_with_figures_has_a_command() -> None:
    sections = re.split(r"^##+ ", page("docs/benchmarks.md"), flags=re.MULTILINE)[1:]
    assert len(sections) > 5
    for section in sections:
        named = re.findall(r"`((?:make|python|pytest|fedstrata) [^`]+)`", section) + FENCED.findall(
            section
        )
        assert named, section.splitlines()[0]
        assert [
            lack for command in named if "\n" not in command and (lack := missing(command))
        ] == []
