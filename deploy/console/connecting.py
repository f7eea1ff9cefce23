"""Options for the broker connection, and the event loop of commands that keep a connection open."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common.errors import InvalidExperiment
from common.protocol.topics import check_lab
from deploy.console import logs
from deploy.console.reporting import reporting
from deploy.console.service import watched

if TYPE_CHECKING:
    from common.net.address import BrokerAddress

Username = Annotated[str | None, typer.Option(help="Login at the broker.", envvar="FEDSTRATA_USERNAME")]
PasswordFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the password. Without it, FEDSTRATA_PASSWORD is used.", envvar="FEDSTRATA_PASSWORD_FILE"
    ),
]


def _checked_lab(name: str) -> str:
    try:
        return check_lab(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


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


def address(text: str, username: str | None, password_file: Path | None, *, option: str = "--broker") -> BrokerAddress:
    """Return the broker at host[:port], or at several such addresses, with the login. Raises InvalidExperiment."""
    from common.net.address import BrokerAddress, parse_hosts

    try:
        (host, port), *others = parse_hosts(text)
    except ValueError as error:
        remedy = "Write host, host:port or [IPv6 address]:port; separate several addresses of one broker by commas."
        raise InvalidExperiment(option, text, str(error), remedy) from None
    password = os.environ.get("FEDSTRATA_PASSWORD")
    if password_file is not None:
        try:
            password = password_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise InvalidExperiment(
                "--password-file", str(password_file), error.strerror or str(error), "Name a readable file."
            ) from None
    return BrokerAddress(host, port, username, password, tuple(others))


async def run_agent(node: str, agent: Coroutine[Any, Any, object]) -> None:
    """Run a node's agent to its end. Raises FedstrataError; an unexpected error is logged with its traceback first."""
    from common.runtime.lifecycle import as_known

    logs.NODE.set(node)
    try:
        await agent
    except Exception as error:
        if (known := as_known(error, node)) is None:
            raise
        raise known from known.__cause__


def run_connected(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a command's coroutine to its end. SIGINT and SIGTERM cancel it; a FedstrataError sets the exit code."""

    async def interruptible() -> None:
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            if task is not None:
                loop.add_signal_handler(number, task.cancel)
        async with watched():
            await work()

    with reporting():
        asyncio.run(interruptible())
