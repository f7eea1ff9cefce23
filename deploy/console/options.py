"""Options that several commands have, and the event loop of those that keep a connection open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from common.errors import as_known
from common.experiment.topology import CLOUD
from common.host.processes import ending_signals
from common.protocol.topics import check_lab, check_node
from deploy.console import logs
from deploy.console.reporting import reporting
from deploy.console.service import watched

Output = Annotated[Literal["table", "json"], typer.Option("--format", help="Standard output: table or JSON lines.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a key: --set training.epochs=2.")]
Runs = Annotated[Path, typer.Option(help="The folder that contains the runs' folders.", envvar="FEDSTRATA_RUNS")]
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
        help="Without --data: the folder to which the experiment's data.root is relative, and outside of which no "
        "experiment makes this host read.",
        envvar="FEDSTRATA_DATA_ROOT",
    ),
]


@contextmanager
def _usage(option: str | None = None) -> Iterator[None]:
    """Turn a ValueError into one of wrong usage."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _checked_lab(name: str) -> str:
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
        if parent in names:
            raise typer.BadParameter(f"{parent!r} is its own name", param_hint="--parent")
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


def _checked_lab_or_file(text: str) -> str:
    return text if text.endswith(".toml") else _checked_lab(text)


LabOrFile = Annotated[
    str,
    typer.Option(
        "--lab",
        help="The lab's name, or its file lab.toml, which also names its brokers.",
        envvar="FEDSTRATA_LAB",
        callback=_checked_lab_or_file,
    ),
]
ConnectTimeout = Annotated[float, typer.Option(min=0.1, help="Timeout of the first connection to the broker, seconds.")]


async def run_agent(node: str, agent: Coroutine[Any, Any, object]) -> None:
    """Run a node's agent to its end. Raises FedstrataError; an unexpected error is logged with its traceback first."""
    logs.NODE.set(node)
    try:
        await agent
    except Exception as error:
        if (known := as_known(error, node)) is None:
            raise
        raise known from known.__cause__


def run_connected(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a command's coroutine to its end. The ending signals cancel it; a FedstrataError sets the exit code."""

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
