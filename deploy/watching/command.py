"""The command `fedstrata watch`."""

from __future__ import annotations

import logging
from functools import partial
from typing import Annotated, Literal

import typer

from common.protocol.topics import DEFAULT_LAB
from deploy.console.connecting import ConnectTimeout, LabOption, PasswordFile, Username, address, run_connected


def watch(
    broker: Annotated[
        list[str] | None,
        typer.Option(
            help="The MQTT broker, host[:port]; again for each institution's own.  [default: localhost]",
            envvar="FEDSTRATA_BROKER_ADDRESS",
        ),
    ] = None,
    lab: LabOption = DEFAULT_LAB,
    run: Annotated[
        str | None, typer.Option(help="Which run.  [default: the newest that lives]", show_default=False)
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the present state and end.")] = False,
    devices: Annotated[
        bool | None,
        typer.Option(help="Each device, or counts alone.  [default: as there is room]", show_default=False),
    ] = None,
    light: Annotated[
        bool, typer.Option("--light", help="Do not hear the devices: see above.", show_default=False)
    ] = False,
    output: Annotated[
        Literal["table", "json"], typer.Option("--format", help="Standard output: for people, or JSON lines.")
    ] = "table",
    timeout: Annotated[
        float, typer.Option(min=0.1, help="With --once: seconds to wait for a run, then exit code 5.")
    ] = 10.0,
    username: Username = None,
    password_file: PasswordFile = None,
    connect_timeout: ConnectTimeout = 30.0,
) -> None:
    """Watch a run from its broker alone: who is there, rounds, transfers, trainings, bytes; no accuracy.

    It reads and takes no part: presences and control messages, never chunks of models. Start it beside the broker: what
    it hears costs the broker some bandwidth, and no link of the lab. Models small enough to travel inside control
    messages (transfer.inline_bytes) come along; --light leaves out all that devices and institutions say to each other.

    A node that prepares is shown with those whom it waits for. `?` behind a state: the broker kept it, and the node has
    sent nothing since the watch began.

    It ends with the run: exit code 0 finished, 1 failed, 5 the cloud stayed away.
    """
    from deploy.watching.follower import Follower
    from deploy.watching.screens import look, screen_for

    logging.getLogger("fedstrata.connection").setLevel(logging.ERROR)  # brokers that come and go are shown
    brokers = [address(text, username, password_file) for text in broker or ["localhost"]]

    async def follow() -> None:
        follower = Follower(brokers, lab=lab, run=run, light=light, connect_timeout_s=connect_timeout)
        if once:
            await follower.look(partial(look, json_lines=output == "json", devices=devices), timeout_s=timeout)
        else:
            with screen_for(json_lines=output == "json", devices=devices) as screen:
                await follower.follow(screen)

    run_connected(follow)
