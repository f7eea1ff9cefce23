"""Errors of commands: a FedstrataError, or wrong usage, becomes one line on standard error and an
exit code.

Wrong usage (exit code 2) names what is wrong with which option, and what to write instead.
"""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperGroup

from fedstrata.common.errors import (
    MESSAGE_MOST,
    FedstrataError,
    InvalidExperiment,
    bounded,
    installing,
)
from fedstrata.common.host.files import failure, is_of_disk
from fedstrata.common.host.processes import interruptible
from fedstrata.deploy.console.logs import ERROR, frame_lines, write_line

INTERRUPTED = 130
# Packages that fedstrata's own extras install.
EXTRAS: Final[Mapping[str, str]] = {
    "torch": "learning",
    "torchvision": "learning",
    "PIL": "learning",
    "matplotlib": "report",
    "jinja2": "report",
    "scipy": "methods",
    "tensorboardX": "tensorboard",
    "wandb": "wandb",
    "pandas": "notebook",
    "distributed": "cluster",
}


def missing(package: str) -> InvalidExperiment:
    """Return the error of a package of an extra that is not installed."""
    return InvalidExperiment(
        "package", package, "not installed here", f"{installing(EXTRAS[package])}."
    )


def require(package: str) -> None:
    """Check that a package is installed, without importing it. Raises InvalidExperiment."""
    if find_spec(package) is None:
        raise missing(package)


def report(error: FedstrataError, *, node: str = "") -> None:
    """Write an error to standard error, prefixed by the failed node's name if `node` is given.

    The frames of own code that failed stand below it, at the log level info.
    """
    where = f"{node}: " if node else ""
    write_line(f"{ERROR}{where}{error}", level=logging.ERROR)
    for line in frame_lines(error.frames) if isinstance(error, InvalidExperiment) else ():
        write_line(line)


class StandardOutput(io.TextIOWrapper):
    """Standard output; raises StorageFailed if it is a file that cannot be written, for instance on
    a full disk.
    """

    def write(self, text: str, /) -> int:
        """Write a text."""
        with self._guarded():
            return super().write(text)

    def flush(self) -> None:
        """Write what is buffered."""
        with self._guarded():
            super().flush()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno == errno.EPIPE:  # nobody reads any more, which ends a command as usual
                raise
            # Python writes the rest when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            raise failure(error, Path("standard output")) from None


@contextmanager
def reporting() -> Iterator[None]:
    """End the command with one line and the exit code on a FedstrataError, a missing extra and a
    full disk.

    An interruption, by any of the ending signals, has exit code 130.
    """
    try:
        with interruptible():
            yield
    except FedstrataError as error:
        report(error)
        raise typer.Exit(error.exit_code) from None
    except ModuleNotFoundError as error:
        if error.name is None or error.name not in EXTRAS:
            raise
        report(missing(error.name))
        raise typer.Exit(InvalidExperiment.exit_code) from None
    except OSError as error:
        if not (is_of_disk(error) and error.filename):
            raise
        known = failure(error, Path(error.filename))
        report(known)
        raise typer.Exit(known.exit_code) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        write_line("fedstrata: interrupted", level=logging.ERROR)
        raise typer.Exit(INTERRUPTED) from None


USAGE: Final = 2
OF_ALL: Final = ("--log-level", "--log-format")  # options of all commands
_USAGE_ERROR: Final[type[Exception]] = typer.BadParameter.__mro__[1]  # typer bundles its own click
_NO_COMMAND: Final = re.compile(r"No such command '(.*?)'")
_EXTRA: Final = re.compile(r"unexpected extra argument.*? \((\S+?)[ )]")
_CHOICES: Final = re.compile(r"'([^']*)' is not one of (.*?)\.?$")
_REMEDIES: Final[Mapping[str, str]] = {"--target": "Write a fraction: 0.9 for 90 %."}


class Commands(TyperGroup):
    """The commands. Each kind of wrong usage, of whichever command, ends with one line."""

    def make_context(
        self, info_name: str | None, args: list[str], *arguments: Any, **keywords: Any
    ) -> Any:
        """Parse the options of all commands, which may also be behind the command."""
        with _explained(), reporting():
            _check_empty(args)
            _check_once(self, args)
            return super().make_context(
                info_name, _those_of_all_first(args), *arguments, **keywords
            )

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        longest = max(map(len, self.commands))
        for name, command in self.commands.items():
            row = name.ljust(longest), command.get_short_help_str(formatter.width - 6 - longest)
            groups.setdefault(getattr(command, "rich_help_panel", ""), []).append(row)
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        """Parse the command and its options, and run it."""
        with _explained(), reporting():
            return super().invoke(ctx)


def _check_empty(arguments: list[str]) -> None:
    """Refuse an empty value, as of a variable of the shell that is not set: a path would be the
    current folder.
    """
    before = ""
    for word in arguments:
        name, equals, value = word.partition("=")
        if not word or (name.startswith("--") and equals and not value):
            named = name or (before if before.startswith("-") else "")
            raise typer.BadParameter(
                "an empty value. Write one, or omit it", param_hint=named or "''"
            )
        before = word


def _check_once(command: Any, arguments: list[str]) -> None:
    """Refuse an option that takes one value and is given twice: only the last would count."""
    given: set[str] = set()
    words = iter(arguments)
    for word in words:
        if word == "--":
            return
        if inner := getattr(command, "commands", {}).get(word):
            command = inner
            continue
        name, has_value, _ = word.partition("=")
        options = [
            each
            for each in command.params
            if each.param_type_name == "option" and name in each.opts
        ]
        if not options or options[0].is_flag:
            continue
        if not has_value:
            next(words, None)
        if name in given and not options[0].multiple:
            raise typer.BadParameter("given twice. Give it once", param_hint=name)
        given.add(name)


def _those_of_all_first(arguments: list[str]) -> list[str]:
    first = []
    others = []
    left = iter(arguments)
    for word in left:
        name, has_value, _ = word.partition("=")
        if name in OF_ALL:
            value = [] if has_value else [*islice(left, 1)]
            if not (has_value or value):
                raise typer.BadParameter("requires an argument", param_hint=name)
            first += [word, *value]
        else:
            others += [word, *left] if word == "--" else [word]
    return [*first, *others]


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except _USAGE_ERROR as error:
        # the help, for a command that has only sub-commands
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        write_line(f"fedstrata: {bounded(explain(error), MESSAGE_MOST)}", level=logging.ERROR)
        raise typer.Exit(USAGE) from None


def explain(error: Any) -> str:
    """Return the line for a usage error of typer."""
    command: Any = error.ctx.command if error.ctx is not None else None
    path = error.ctx.command_path if error.ctx is not None else "fedstrata"
    if unknown := _NO_COMMAND.match(error.message):
        return _unknown(
            unknown[1], command.commands, f"no such command of {path}", what="There are"
        )
    if given := getattr(error, "option_name", ""):
        if type(error).__name__ == "NoSuchOption":
            known = [
                option for each in command.params for option in each.opts if option.startswith("--")
            ]
            return _no_option(given, known, f"no such option of {path}")
        problem = error.message.partition(f"'{given}'")[2].strip(" .") or error.message
        return f"{given}: {problem}."
    name = _name(error)
    if type(error).__name__ == "MissingParameter":
        return _sentence(
            f"{name}: missing. {getattr(error.param, 'help', None) or f'See {path} --help'}"
        )
    if name:
        return _sentence(name + _problem(error, name))
    extra = _EXTRA.search(error.message)
    problem = f"{extra[1]!r}: one argument too many" if extra else error.message.rstrip(".")
    return f"{problem}. See {path} --help."


def _unknown(given: str, known: Any, problem: str, *, what: str) -> str:
    from fedstrata.common.settings.tables import proposal
    from fedstrata.deploy.console.shipped import shipped

    remedy = proposal(given, list(known), what=what)
    if "run" in known and (given in shipped() or given.endswith(".toml")):
        remedy = f"Did you mean 'run {given}'?"
    elif given == "version":
        remedy = "Did you mean '--version'?"
    return f"{given!r}: {problem}. {remedy}"


def _no_option(given: str, options: list[str], problem: str) -> str:
    """Return the line for an unknown option, which may be the name of a key of the experiment."""
    from fedstrata.common.experiment.schema import Experiment
    from fedstrata.common.experiment.validation_messages import places
    from fedstrata.common.settings.tables import proposal

    key = given.strip("-").replace("-", "_")
    keys = places(key, Experiment) if "--set" in options else []
    if keys:
        return f"{given}: {problem}. Did you mean --set {keys[0]}=VALUE?"
    names = [option.strip("-") for option in options]
    remedy = re.sub("'(.*)'", r"'--\1'", proposal(given.strip("-"), names, what="There are"))
    return f"{given}: {problem}. {remedy}"


def _name(error: Any) -> str:
    """Return the option or argument of an error, such as --format."""
    if isinstance(hint := getattr(error, "param_hint", None), str):
        return hint
    parameter = getattr(error, "param", None)
    if parameter is None:
        return ""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name).upper().rstrip(".")
    return str(max(parameter.opts, key=len))


def _sentence(text: str) -> str:
    if text.endswith((".", "?")):
        return text
    return f"{text}."


def _problem(error: Any, name: str) -> str:
    """Return a value, if it is known, and what is wrong with it."""
    from fedstrata.common.experiment.validation_messages import problem_of
    from fedstrata.common.settings.tables import proposal

    if choices := _CHOICES.search(error.message):
        known = re.findall(r"'([^']*)'", choices[2])
        return (
            f" = {choices[1]!r}: not one of its values. "
            f"{proposal(choices[1], known, what='There are')}"
        )
    errors = getattr(error.__cause__, "errors", None)  # of pydantic, which reads numbers for typer
    if errors is None:
        return f": {error.message}"
    first = errors(include_url=False)[0]
    problem, remedy = problem_of(first)
    return f" = {first['input']!r}: {problem}. {_REMEDIES.get(name, remedy)}"
