"""The command `fedstrata watch`."""

from __future__ import annotations

import logging
from functools import partial
from typing import Annotated, Literal

import typer

from fedstrata.common.protocol.topics import DEFAULT_LAB
from fedstrata.deploy.console import logs
from fedstrata.deploy.console.login import OPERATOR, Login
from fedstrata.deploy.console.options import (
    SECONDS_MOST,
    ConnectTimeout,
    LabOrFile,
    run_connected,
    with_records,
)


@with_records
def watch(
    broker: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "The MQTT broker: host[:port], or several addresses of it, separated by commas. "
                "Repeat it for each "
                "institution's own broker.  [default: those of the lab's file, else localhost]"
            ),
            envvar="FEDSTRATA_BROKER",
        ),
    ] = None,
    lab: LabOrFile = DEFAULT_LAB,
    run: Annotated[
        str | None,
        typer.Option(help="The run's id.  [default: the newest active run]", show_default=False),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
    devices: Annotated[
        bool | None,
        typer.Option(
            help=(
                "Show devices one by one (with --once all that records name), or only counts.  "
                "[default: as many as the terminal has room for, lost and slow ones first]"
            ),
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Literal["table", "json"],
        typer.Option("--format", help="Standard output: text or JSON lines."),
    ] = "table",
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=SECONDS_MOST,
            help="With --once: seconds to wait for a run before exit code 5.",
        ),
    ] = 10.0,
    connect_timeout: ConnectTimeout = 30.0,
    *,
    login: Login,
) -> None:
    """Watch a run: presence, rounds, accuracy, transfers, training progress and bytes.

    `watch` asks the parents for their status, and shows each node as its parent reports it. While
    somebody asks, each parent publishes one record a second; nothing else is sent, and no model is
    received.

    A preparing node is shown with the nodes that it waits for. A cloud that hangs is shown with the
    age of its last record. A `?` after its state means that the broker retained it and the cloud
    has sent nothing since.

    It ends with the run. Exit codes: 0 finished, 1 failed, 5 the cloud was absent for
    transfer.idle_s.
    """
    from fedstrata.deploy.kits.lab_file import reach
    from fedstrata.deploy.watching.follower import Follower
    from fedstrata.deploy.watching.screens import look, screen_for

    async def follow() -> None:
        reached = reach(lab, broker, login)
        follower = Follower(
            reached.addresses(OPERATOR),
            lab=reached.name,
            run=run,
            connect_timeout_s=connect_timeout,
        )
        with logs.limited("fedstrata.connection", logging.ERROR):  # the screen shows lost brokers
            if once:
                await follower.look(
                    partial(look, json_lines=output == "json", devices=devices), timeout_s=timeout
                )
            else:
                with screen_for(json_lines=output == "json", devices=devices) as screen:
                    await follower.follow(screen)

    run_connected(follow)
