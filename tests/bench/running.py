"""What benchmarks share: options, tables, turns, folders, processes and what these cost.

def main(*labs: str, repeats: Annotated[int, "of each lab"] = 3) -> None: ...

if __name__ == "__main__":
    run(main)
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from inspect import BoundArguments, Parameter, signature
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from types import NoneType
from typing import Any, Final, NamedTuple, NoReturn, Self, get_args, get_origin, get_type_hints

import psutil

SPAWN: Final = get_context("spawn")
END_S: Final = 10.0  # in which a process may end by itself
MB: Final = 1e6


# Options


def run(main: Callable[..., object]) -> NoReturn:
    """Call `main` with what the command line gives, and exit with its result: true or text is an
    error.

    Its keywords are the options, its other parameters the arguments. A sequence takes several
    values, or is repeated. `Annotated` adds the help, or the values to choose from.
    """
    parser = ArgumentParser(
        description=sys.modules["__main__"].__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    hints = get_type_hints(main, include_extras=True)
    for name, parameter in signature(main).parameters.items():
        _add(parser, parameter, hints[name])
    given = BoundArguments(signature(main), vars(parser.parse_args()))
    sys.exit(main(*given.args, **given.kwargs) or 0)  # type: ignore[arg-type]


def _add(parser: ArgumentParser, parameter: Parameter, hint: Any) -> None:
    how: dict[str, Any] = {"default": SUPPRESS}  # the parameter's own default stays
    notes = getattr(hint, "__metadata__", ())
    for note in notes:
        how["help" if isinstance(note, str) else "choices"] = note
    if notes:
        hint = hint.__origin__
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    together = get_args(kinds[0])
    if together:
        how |= {"action": "append", "nargs": len(together), "type": together[0]}
    elif get_origin(hint) is Sequence:
        how |= {"action": "extend", "nargs": "+", "type": kinds[0]}
    elif hint is bool:
        how["action"] = "store_true"
    else:
        how["type"] = kinds[0]
    name = parameter.name.strip("_")
    if "type" in how and "choices" not in how:
        how["metavar"] = name.upper()
    if parameter.kind is Parameter.KEYWORD_ONLY:
        parser.add_argument(f"--{name.replace('_', '-')}", dest=parameter.name, **how)
        return
    if parameter.kind is Parameter.VAR_POSITIONAL:
        how["nargs"] = "*"
    elif parameter.default is not Parameter.empty:
        how |= {"nargs": "?", "default": parameter.default}
    parser.add_argument(parameter.name, **how)


# Tables


class Table:
    """A table of Markdown, whose rows are printed as they are measured."""

    def __init__(self, *columns: str, title: str = "") -> None:
        show_machine()
        print(f"\n{title}\n" if title else "")
        self._widths = [max(8, len(column)) for column in columns]
        self.add(*columns)
        self.add(*("-" * width for width in self._widths))

    def add(self, *cells: object) -> None:
        """Add a row; its last cells may be missing."""
        texts = [*map(str, cells), *[""] * len(self._widths)]
        first, *others = (text.ljust(width) for text, width in zip(texts, self._widths))  # noqa: B905
        print("|", " | ".join([first, *(text.strip().rjust(len(text)) for text in others)]), "|")
        sys.stdout.flush()


@cache
def show_machine() -> None:
    """Print once what figures depend on: system, cores, load, versions."""
    versions = [f"Python {platform.python_version()}"]
    for name in ("numpy", "torch"):
        if name in sys.modules:
            versions.append(f"{name} {sys.modules[name].__version__}")
    load = os.getloadavg()[0]
    print(f"{platform.platform()}, {os.cpu_count()} cores, load {load:.1f}, {', '.join(versions)}")


def tick() -> None:
    """Show that something was measured whose row comes later."""
    print(".", end="", file=sys.stderr, flush=True)


# Time


class Clock:
    """The seconds of a block, and the CPU seconds of this process and of those that ended in it."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._used = sum(os.times()[:4])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.s = time.monotonic() - self._began
        self.cpu_s = sum(os.times()[:4]) - self._used

    @property
    def now_s(self) -> float:
        """The seconds so far."""
        return time.monotonic() - self._began


def turns(repeats: int, *ways: Callable[[], float]) -> list[tuple[float, ...]]:
    """Return what each way gave, all called in turn, so that a busy minute meets all of them."""
    rounds = [[way() for way in ways] for _ in range(repeats)]
    return list(zip(*rounds, strict=True))


def medians(repeats: int, *ways: Callable[[], float]) -> list[float]:
    """Return the median of each way, all called in turn."""
    return list(map(median, turns(repeats, *ways)))


def least_s(
    repeats: int, *works: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return the least seconds of each call, in turn, after one to warm up: what others do on the
    machine only adds.
    """

    def timed(work: Callable[[], object]) -> Callable[[], float]:
        def seconds() -> float:
            began = clock()
            work()
            return clock() - began

        return seconds

    return [min(found[1:]) for found in turns(repeats + 1, *map(timed, works))]


def on_one_core() -> None:
    """Keep this process on the last of its cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


# Folders and processes


@contextmanager
def folder(parent: Path | None = None, *, prefix: str = "fedstrata-bench-") -> Iterator[Path]:
    """Yield a folder that is removed in the end."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as name:
        yield Path(name)


def output(*words: str | Path, **options: Any) -> str:
    """Run a command of fedstrata to its end and return its output. Raises RuntimeError if it
    fails.
    """
    from tests.helpers.commands import command  # imports much

    done = subprocess.run(command(*words), capture_output=True, text=True, check=False, **options)
    if done.returncode:
        problem = done.stderr.strip()[-2000:]
        raise RuntimeError(f"fedstrata {words[0]} ended with code {done.returncode}: {problem}")
    return str(done.stdout)


@contextmanager
def started(
    words: Sequence[str | Path], log: Path, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program that writes into `log`, and kill it in the end."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, **{"stdout": file, "stderr": file, **options}
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def spawned(work: Callable[..., None], *given: object, **more: object) -> Iterator[BaseProcess]:
    """Run a function in a process of its own, which may end by itself in the end."""
    process = SPAWN.Process(target=work, args=given, kwargs=more)
    process.start()
    try:
        yield process
    finally:
        process.join(END_S)
        process.kill()


def processes(root: int, roles: Mapping[str, str]) -> Iterator[tuple[psutil.Process, str]]:
    """Yield a command's process and those below it, each with its role: that of the first of its
    words that has one, else empty.
    """
    command = psutil.Process(root)
    for process in (command, *command.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            words = [Path(word).name.rpartition(".")[2] for word in process.cmdline()]
            yield process, next((roles[word] for word in words if word in roles), "")


class Costs(NamedTuple):
    """What a process and those below it have."""

    memory: int  # resident bytes; what two of them share counts twice
    files: int  # open ones
    written: int  # bytes to disks, by those that are there


def costs(process: psutil.Process) -> Costs:
    """Return the costs of a process and those below it."""
    each = [process, *process.children(recursive=True)]
    memory = sum(one.memory_info().rss for one in each)
    files = sum(one.num_fds() for one in each)
    return Costs(memory, files, sum(one.io_counters().write_bytes for one in each))


def peak_bytes(process: int | str = "self") -> int:
    """Return the most memory that a process has had resident."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
