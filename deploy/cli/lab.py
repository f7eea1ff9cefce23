"""The commands `fedstrata lab ...`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from common.protocol.topics import DEFAULT_LAB
from deploy.cli.roles import ROLL_S, BrokerOption
from deploy.console import logs
from deploy.console.connecting import ConnectTimeout, LabOption, PasswordFile, Username, address, run_connected
from deploy.console.options import Output
from deploy.console.tabular import Column, Table

app = typer.Typer(help="The nodes of a lab.", no_args_is_help=True)


@app.callback()
def _lab() -> None:
    """The nodes of a lab."""


@app.command()
def status(
    broker: BrokerOption = "localhost",
    lab: LabOption = DEFAULT_LAB,
    wait: Annotated[float, typer.Option(min=0.1, help="Seconds in which nodes may answer.")] = ROLL_S,
    output: Output = "table",
    username: Username = None,
    password_file: PasswordFile = None,
    connect_timeout: ConnectTimeout = 30.0,
) -> None:
    """List the nodes that stay in a lab: role, parent, run, release, host and hardware.

    Institutions and devices answer, whether they wait or take part in a run. With brokers of their own the devices of
    an institution answer on that broker. Exit code 5: nobody answered.
    """
    from common.runtime.roll import call_the_roll

    async def ask() -> None:
        where = address(broker, username, password_file)
        found = await call_the_roll(where, lab=lab, wait_s=wait, connect_timeout_s=connect_timeout)
        rows = [{"node": node} | asdict(here) for node, here in found]
        for row in rows:
            del row["nonce"]
        if output == "json":
            for row in rows:
                typer.echo(json.dumps(row))
        elif rows:
            columns = [Column(name, text=True) for name in rows[0]]
            cells = [[value or ("waits" if name == "run" else "-") for name, value in row.items()] for row in rows]
            typer.echo(Table("nodes", f"lab {lab}", columns, cells).aligned(), nl=False)
        if not rows:
            logs.write_line(f"nobody of lab {lab} answered on broker {where} within {wait:g} s")
            raise typer.Exit(5)

    run_connected(ask)
