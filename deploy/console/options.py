"""Options that several commands have, records of them, and the event loop of commands that keep a
connection open.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_type_hints

import typer

from fedstrata.common.errors import as_known
from fedstrata.common.host.processes import ending_signals
from fedstrata.common.protocol.topics import check_lab, check_node
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.console import logs
from fedstrata.deploy.console.reporting import reporting
from fedstrata.deploy.console.service import watched

Output = Annotated[
    Literal["table", "json"], typer.Option("--format", help="Standard output: table or JSON lines.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key: --set training.epochs=2.")
]
Runs = Annotated[
    Path, typer.Option(help="The folder that contains the runs' folders.", envvar="FEDSTRATA_RUNS")
]
Accelerator = Annotated[
    str | None,
    typer.Option(
        help="With --direct or --simulate: cpu, cuda, cuda:N or auto.  [default: cpu]",
        show_default=False,
    ),
]
DataFolder = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="The folder of data sets on this host, in place of the experiment's data.root.",
        envvar="FEDSTRATA_DATA",
        show_default=False,
    ),
]
DataRoot = Annotated[
    Path,
    typer.Option(
        "--data-root",
        help="Without --data: the folder to which the experiment's data.root is relative, and "
        "outside of which no "
        "experiment makes this host read.",
        envvar="FEDSTRATA_DATA_ROOT",
    ),
]


def with_records(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, in place of each parameter whose type is a dataclass, the options that are
    its fields.
    """
    signature = inspect.signature(command, eval_str=True)
    records: dict[str, Any] = {}
    own = []
    for name, each in signature.parameters.items():
        if is_dataclass(each.annotation):
            records[name] = each.annotation
        else:
            own.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    for kind in records.values():
        hints = get_type_hints(kind, include_extras=True)
        for one in fields(kind):
            option = inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default
            )
            own.append(option.replace(annotation=hints[one.name]))

    @wraps(command)
    def with_options(**given: Any) -> None:
        made = {}
        for name, kind in records.items():
            own = {one.name: given.pop(one.name) for one in fields(kind)}
            made[name] = kind(**own)
        command(**given, **made)

    with_options.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    with_options.__annotations__ = {each.name: each.annotation for each in own}
    return with_options


def refuse(wrong: object, option: str, problem: str) -> None:
    """Refuse an option, or a combination of options, that is wrong. Raises BadParameter."""
    if wrong:
        raise typer.BadParameter(problem, param_hint=option)


def refuse_given(context: typer.Context, names: Collection[str], problem: str) -> None:
    """Refuse the first of these parameters that the command line itself has, not the environment.
    Raises BadParameter.

    `names`: those of the command's parameters, such as `connect_timeout`.
    """
    for each in context.command.params:
        source = context.get_parameter_source(each.name or "")
        if each.name in names and source is not None and source.name == "COMMANDLINE":
            name = (each.name or "").upper()
            if each.param_type_name == "option":
                name = max(each.opts, key=len)
            refuse(True, name, problem)


@contextmanager
def _usage(option: str | None = None) -> Iterator[None]:
    """Turn a ValueError into one of wrong usage."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _checked_lab(name: str) -> str:
    if name.endswith(".toml"):  # as a name it would be a lab that nobody else is in
        raise typer.BadParameter(
            f"{name!r} is a lab's file: give the lab's name, which the file has"
        )
    with _usage():
        return check_lab(name)


def checked_nodes(given: str | list[str] | None) -> str | list[str] | None:
    """Return the given name, or names, of nodes; the callback of an option."""
    with _usage():
        for name in [given] if isinstance(given, str) else given or ():
            check_node(name)
    return given


def check_parents(parents: Sequence[str], names: Sequence[str]) -> None:
    """Check the names of parents. Raises BadParameter."""
    for parent in parents:
        refuse(parent in names, "--parent", f"{parent!r} is its own name")
        if parent != CLOUD:
            with _usage("--parent"):
                check_node(parent)


LabOption = Annotated[
    str,
    typer.Option(
        "--lab",
        help="The lab's name. Labs with different names can share a broker.",
        envvar="FEDSTRATA_LAB",
        callback=_checked_lab,
    ),
]


def checked_lab_or_file(text: str | None) -> str | None:
    """Return the given name of a lab, or the path of a lab's file; the callback of an option."""
    if text is None or text.endswith(".toml"):
        return text
    return _checked_lab(text)


LabOrFile = Annotated[
    str,
    typer.Option(
        "--lab",
        help="The lab's name, or its file lab.toml, which also names its brokers.",
        envvar="FEDSTRATA_LAB",
        callback=checked_lab_or_file,
    ),
]
SECONDS_MOST: Final = 1e9
ConnectTimeout = Annotated[
    float,
    typer.Option(
        min=0.1, max=SECONDS_MOST, help="Timeout of the first connection to the broker, seconds."
    ),
]


async def run_agent(node: str, agent: Coroutine[Any, Any, object]) -> None:
    """Run a node's agent to its end. Raises FedstrataError; an unexpected error is logged with its
    traceback first.
    """
    logs.NODE.set(node)
    try:
        await agent
    except Exception as error:
        if (known := as_known(error, node)) is None:
            raise
        raise known from known.__cause__


def run_connected(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a command's coroutine to its end. The ending signals cancel it; a FedstrataError sets the
    exit code.
    """

    async def interruptible() -> None:
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            if task is not None:
                loop.add_signal_handler(number, task.cancel)
        async with watched():
            await work()

    with reporting():
        asyncio.run(interruptible())
