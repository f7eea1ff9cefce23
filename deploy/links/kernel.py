"""The programs of iproute2, `ip` and `tc`, by which the kernel's network is set and read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from typing import Any


class CommandRefused(Exception):
    """A command of `ip` or `tc` that failed: the problem, and the remedy where it is known."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy


def path_of(program: str) -> str:
    """Return the path of `ip` or `tc`. Raises CommandRefused if it is not installed."""
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        raise CommandRefused(f"the program {program!r} was not found", "Install iproute2 (apt install iproute2).")
    return found


def batch(program: str, lines: Iterable[str]) -> None:
    """Run commands of `ip` or `tc` up to the first that fails. Raises CommandRefused with the program's message."""
    _output(program, "-batch", "-", given="\n".join(lines))


def query(program: str, *arguments: str) -> list[dict[str, Any]]:
    """Return what `ip` or `tc` lists. Raises CommandRefused with the program's message."""
    listed: list[dict[str, Any]] = json.loads(_output(program, "-json", *arguments) or "[]")
    return [each for each in listed if each]  # `ip` writes {} for what a filter leaves out


def _output(program: str, *arguments: str, given: str = "") -> str:
    command = [path_of(program), *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        message = " ".join(done.stderr.split())
        remedy = "Run as root (sudo)." if "Operation not permitted" in message else ""
        raise CommandRefused(f"{program}: {message}", remedy)
    return done.stdout
