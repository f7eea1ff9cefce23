"""Refusals that are kept: what is given, the exit code, and the whole line.

A case is a paragraph: lines that are given, then the exit code with the line. Three dots stand for
what depends on the machine or on a library, `<x*3>` for xxx.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any, Final, NamedTuple

from fedstrata.common.errors import MESSAGE_MOST, InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.deploy.sweeps.grid import expand, merged
from tests.helpers.commands import invoke

KEPT: Final = Path(__file__).with_name("kept")
ROOT: Final = KEPT.parents[1]
SWEEP: Final = tomllib.loads((KEPT / "two-by-two.toml").read_text())


class Refusal(NamedTuple):
    """A paragraph of a file."""

    kind: str
    given: str
    line: str

    def agrees(self, found: str) -> bool:
        """Return whether the kept line describes the one that was found."""
        return re.fullmatch(".*".join(map(re.escape, self.line.split("..."))), found) is not None


def spelled(text: str) -> str:
    """Write out what is repeated."""
    return re.sub(r"<(.+?)\*(\d+)>", lambda found: found[1] * int(found[2]), text)


def byte(found: re.Match[bytes]) -> bytes:
    """Return the byte that `\\x..` stands for."""
    return bytes.fromhex(found[1].decode())


def by_command(given: str, folder: Path) -> str:
    """Return the exit code and the line of a command, beside files with the lines before it."""
    *lines, command = given.split("\n")
    texts: dict[str, list[str]] = {}
    name = "it.toml"
    for line in lines:
        if line.startswith("@ "):
            name = line.removeprefix("@ ")
        else:
            texts.setdefault(name, []).append(line[2:])
    for name, text in texts.items():
        raw = spelled("\n".join(text)).encode()
        (folder / name).write_bytes(re.sub(rb"\\x(..)", byte, raw))
    with chdir(folder):
        done = invoke(*shlex.split(spelled(command.removeprefix("$ "))))
    assert done.stdout == "" and done.stderr.count("\n") == 1, done.output
    assert done.stderr.startswith("fedstrata: ")
    assert {path.name for path in folder.iterdir()} == texts.keys(), "it wrote a file"
    line = done.stderr.removeprefix("fedstrata: ").strip()
    assert len(line) < MESSAGE_MOST + len(str(folder))
    return f"{done.exit_code} {line.replace(str(folder), 'HERE').replace(str(ROOT), 'ROOT')}"


def refusal_of(read: Callable[[], object]) -> str:
    """Return the exit code and the line of what is refused."""
    try:
        read()
    except InvalidExperiment as error:
        return f"{error.exit_code} {error}"
    return "0 accepted"


def tree_of(given: str) -> dict[str, Any]:
    """Return lines of TOML, with semicolons between them, as a tree."""
    return tomllib.loads(given.replace("; ", "\n"))


def of_experiment(given: str, folder: Path) -> str:
    """Return what is refused of an experiment, in TOML and in JSON."""
    tree = tree_of(given)
    found = refusal_of(lambda: parse(tree))
    assert found == refusal_of(lambda: parse(json.dumps(tree)))
    return found


def of_sweep(given: str, folder: Path) -> str:
    """Return what is refused of a sweep with these changes."""
    return refusal_of(lambda: expand(merged(SWEEP, tree_of(given)), Path("two-by-two.toml")))


KINDS: Final[dict[str, Callable[[str, Path], str]]] = {
    "commands": by_command,
    "experiments": of_experiment,
    "sweeps": of_sweep,
}


def refusals() -> list[Refusal]:
    """Return the cases of all files."""
    found = []
    for kind in KINDS:
        for paragraph in (KEPT / f"{kind}.txt").read_text().strip().split("\n\n"):
            if not paragraph.startswith("#"):
                found.append(Refusal(kind, *paragraph.rsplit("\n", 1)))
    return found


def rewrite(folder: Callable[[], Path]) -> None:
    """Write the lines again that have changed."""
    for kind, line_of in KINDS.items():
        file = KEPT / f"{kind}.txt"
        paragraphs = file.read_text().strip().split("\n\n")
        for place, paragraph in enumerate(paragraphs):
            if not paragraph.startswith("#"):
                case = Refusal(kind, *paragraph.rsplit("\n", 1))
                found = line_of(case.given, folder())
                if not case.agrees(found):
                    paragraphs[place] = f"{case.given}\n{found}"
        file.write_text("\n\n".join(paragraphs) + "\n")
