"""The command `fedstrata doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from common.protocol.topics import DEFAULT_LAB
from deploy.console import logs
from deploy.console.connecting import LabOption
from deploy.console.login import OPERATOR, Login, with_login
from deploy.console.options import Output
from deploy.console.reporting import reporting
from deploy.console.tabular import Column, Table


@with_login
def doctor(
    broker: Annotated[
        str,
        typer.Option(
            help="The MQTT broker: host[:port], or several addresses of it, separated by commas: each is examined.",
            envvar="FEDSTRATA_BROKER_ADDRESS",
        ),
    ] = "localhost",
    lab: LabOption = DEFAULT_LAB,
    name: Annotated[str, typer.Option(help="The node whose login and topics are used.")] = OPERATOR,
    output: Output = "table",
    *,
    login: Login,
) -> None:
    """Examine a broker: does it have what fedstrata needs, and what follows where it does not?

    It takes some seconds and 32 MB of the broker's memory, and disturbs no run. Exit codes: 0 everything needed is
    there, 1 something needed is missing, 3 no connection.
    """
    from deploy.brokers.contract import examine

    healthy = True
    with reporting():
        for one in login.address(broker, node=name).each:
            found = list(examine(one, lab=lab, name=name))
            healthy = healthy and all(finding.there for finding in found if finding.needed)
            if output == "json":
                for finding in found:
                    typer.echo(json.dumps({"broker": str(one)} | asdict(finding)))
                continue
            cells = [
                [
                    finding.item,
                    "needed" if finding.needed else "useful",
                    "ok" if finding.there else "missing",
                    finding.note if not finding.there or finding.needed else "",
                ]
                for finding in found
            ]
            columns = [Column(name, text=True) for name in ("item", "", "found", "note")]
            logs.write_line(f"broker {one}")
            typer.echo(Table("contract", f"broker {one}", columns, cells).aligned(), nl=False)
    if not healthy:
        raise typer.Exit(1)
