"""What the documentation names: commands, options, variables, keys, layers and files exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from deploy.cli.main import app
from docs.tools import experiment
from docs.tools.manual import commands

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SECURITY: Final = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
CONTRIBUTING: Final = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PROJECT: Final[Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
COMMANDS: Final = dict(commands())
EVERYWHERE: Final = {"--help", *(option for one in typer.main.get_command(app).params for option in one.opts)}
LINE: Final = re.compile(r"^(?: {4}| {2,3})?(?:sudo )?(?:\.venv/bin/)?(fedstrata [^`\n]*?)(?:  +#.*)?$", re.MULTILINE)
INLINE: Final = re.compile(r"`(fedstrata [^`]*)`")
FENCED: Final = re.compile(r"^ *```sh\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INDENTED: Final = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
TARGETS: Final = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
READING: Final = (  # section 0 of the design: one global round, from the arithmetic to the device
    *("common/methods/mixing.py", "common/methods/fedcross.py", "common/protocol/participant.py"),
    *("common/protocol/coordinator.py", "common/protocol/parent_session.py", "common/runtime/endpoint.py"),
    *("cloud/global_rounds.py", "device/training/trainer.py"),
)
KEYS_MOST: Final = 30


def lines(page: Path) -> Iterator[str]:
    """Yield the commands of fedstrata on a page, continued lines joined."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for block in (*FENCED.findall(text), *INDENTED.findall(text)):
        for line in LINE.findall(block):
            yield from (part for part in re.split(r"\s(?:&&|;|\|)\s", line) if part.startswith("fedstrata "))
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
    known = {option for one in COMMANDS[name].params for option in (*one.opts, *one.secondary_opts)} | EVERYWHERE
    wrong = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
    return f"{name} has no {', '.join(wrong)}" if wrong else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_their_options_exist(page: Path) -> None:
    assert [problem for line in lines(page) if (problem := problem_of(line))] == []


def test_wrong_commands_are_seen() -> None:
    assert problem_of("fedstrata jump --broker HOST") == "no command: fedstrata jump --broker HOST"
    assert problem_of("fedstrata cloud my.toml --high 3") == "cloud has no --high"
    assert len({line for page in PAGES for line in lines(page)}) > 100


def test_variables_of_the_environment_exist() -> None:
    code = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("cloud", "common", "deploy", "device", "institution", "docs/tools")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yml", ".yaml", ".sh", ".env") or path.name == "Containerfile"
    )
    named = {name for page in PAGES for name in re.findall(r"\bFEDSTRATA_[A-Z_]+\b", page.read_text(encoding="utf-8"))}
    assert len(named) > 10 and sorted(name for name in named if name not in code) == []


def test_the_options_and_keys_of_the_page_on_security_exist() -> None:
    options = {option for command in COMMANDS.values() for one in command.params for option in one.opts}
    named = set(re.findall(r"`(--[a-z-]+)", SECURITY))
    assert named and named <= options
    keys = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?: = [^`]*)?`", SECURITY))
    assert keys and all(experiment.field_of(key) for key in keys)
    of_labs = (ROOT / "deploy" / "kits" / "lab.py").read_text(encoding="utf-8")
    assert all(f"    {key}: " in of_labs for key in re.findall(r"`([a-z_]+) = (?:true|false)`", SECURITY))


@pytest.mark.parametrize("key", experiment.MATTER)
def test_a_key_that_matters_exists(key: str) -> None:
    experiment.field_of(key)


def test_the_keys_that_matter_are_few_and_others_are_refused() -> None:
    assert len(experiment.MATTER) <= KEYS_MOST
    for key in ("training.epoch", "rounds.first", "trainings.epochs"):
        with pytest.raises(KeyError):
            experiment.field_of(key)


def test_the_layers_are_those_of_the_import_contracts() -> None:
    block = CONTRIBUTING.partition("`pyproject.toml`:\n")[2].partition("\n| room |")[0]
    lines_ = re.sub(r"\n {5,}", " ", block).split("\n")  # a room's layers may take several lines
    rooms = [line.strip().rpartition(":") for line in lines_ if line.strip()]
    layers = {name: [" ".join(layer.split()) for layer in text.split(">")] for name, _, text in rooms}
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    assert layers == {each.get("containers", [""])[0]: each["layers"] for each in contracts}


def test_the_reading_order_is_that_of_the_design() -> None:
    listed = CONTRIBUTING.partition("Read in this order")[2].partition("\n\n")[2].partition("\n\n")[0]
    items = re.findall(r"^\d+\. `([^`]+)`: (.*(?:\n {3}.*)*)", listed, re.MULTILINE)
    assert tuple(path for path, _ in items) == READING
    assert all((ROOT / path).is_file() and text.count(". ") == 0 and text.endswith(".") for path, text in items)


def test_paths_in_backticks_exist() -> None:
    rooms = "|".join(("cloud", "common", "deploy", "device", "docs", "institution", "tests"))
    path = re.compile(rf"`((?:{rooms})/(?:[\w/.-]*\w\.\w+|[\w/-]*))`")
    found = {one for page in sorted(ROOT.glob("*.md")) for one in path.findall(page.read_text(encoding="utf-8"))}
    assert found and sorted(one for one in found if "NAME" not in one and not (ROOT / one).exists()) == []


def figures(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the first and the last cell of each row of a table whose last head begins with `command`."""
    for table in re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
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
        lacking = [] if any(words[words.index("-k") + 1] in name for name in tests) else [f"-k of {command}"]
    return lacking[0] if lacking else None if paths or words[:2] == ["python", "-m"] else f"kind of {command}"


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "benchmarks.md"], ids=lambda page: page.stem)
def test_each_figure_has_a_command_that_exists(page: Path) -> None:
    rows = [*figures(page)]
    assert len(rows) > 5
    for what, cell in rows:
        named = re.findall(r"`([^`]+)`", cell)
        assert named or cell in ("the same", "[below](#predictions)"), f"{what}: no command"
        assert [lack for command in named if (lack := missing(command))] == [], what


def test_each_section_of_the_benchmarks_with_figures_has_a_command() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    sections = re.split(r"^##+ ", page, flags=re.MULTILINE)[1:]
    assert len(sections) > 5
    for section in sections:
        named = re.findall(r"`((?:make|python|pytest|fedstrata) [^`]+)`", section) + FENCED.findall(section)
        assert named, section.splitlines()[0]
        assert [lack for command in named if "\n" not in command and (lack := missing(command))] == []
