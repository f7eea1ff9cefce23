"""The commands `fedstrata links ...`."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.text import json_text
from fedstrata.deploy.console import logs
from fedstrata.deploy.console.options import Output, refuse
from fedstrata.deploy.console.reporting import reporting
from fedstrata.deploy.console.tabular import Column, Table

app = typer.Typer(help="Links between hosts: shape this host's.", no_args_is_help=True)

LEAST: Final = 0.001  # Mbit/s
MOST: Final = 100_000.0  # whose queue is the largest that tc can set
APPLIED: Final = (
    Column("device", text=True),
    Column("up", "Mbit/s", digits=3),
    Column("down", "Mbit/s", digits=3),
    Column("delay", "ms", digits=2),
    Column("to", text=True),
)

ProfileArgument = Annotated[
    str | None, typer.Argument(help="A built-in profile, such as wan-50mbit.", show_default=False)
]
Up = Annotated[
    float | None, typer.Option(min=LEAST, max=MOST, help="Rate of what this host sends, Mbit/s.")
]
Down = Annotated[
    float | None, typer.Option(min=LEAST, max=MOST, help="Rate of what this host receives, Mbit/s.")
]
Delay = Annotated[
    float | None, typer.Option(min=0, max=10_000, help="Delay of each direction, ms.")
]


@app.command()
def apply(
    profile: ProfileArgument = None,
    up: Up = None,
    down: Down = None,
    delay: Delay = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "A host: only the traffic with it is shaped, on the interface that leads there. "
                "Repeatable."
            ),
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="The interface. Without --to all of its traffic is shaped, ssh too.",
            show_default=False,
        ),
    ] = None,
    output: Output = "table",
) -> None:
    """Give an interface of this host the rates and the delay of a link, by the kernel's `tc`. Needs
    root.

    Name the broker by --to. What an earlier call has set is replaced. It lasts until `fedstrata
    links clear`, or until the host starts again.
    """
    from fedstrata.deploy.links import interface
    from fedstrata.deploy.links.kernel import addresses_of, interface_to

    refuse(
        not to and device is None, "--to", "name the broker by --to, or an interface by --device"
    )
    with reporting():
        link = interface.link_of(profile, up_mbit=up, down_mbit=down, delay_ms=delay)
        peers = {host: addresses_of(host) for host in to or ()}
        leads = {host: interface_to(host, addresses) for host, addresses in peers.items()}
        chosen = device or next(iter(leads.values()))
        for host, other in leads.items():
            if other != chosen:
                remedy = "Apply the link of each interface by a command of its own."
                raise InvalidExperiment(
                    "--to", host, f"reached by {other}, not by {chosen}", remedy
                )
        interface.apply(
            chosen,
            link,
            list(dict.fromkeys(one for addresses in peers.values() for one in addresses)),
        )
        cells = [chosen, link.up_mbit, link.down_mbit, link.delay_ms, ", ".join(peers) or "all"]
        if output == "table":
            typer.echo(Table("applied", chosen, APPLIED, [cells]).on_terminal(), nl=False)
        else:
            typer.echo(
                json_text(
                    dict(
                        zip(
                            ("device", "up_mbit", "down_mbit", "delay_ms", "to"), cells, strict=True
                        )
                    )
                )
            )


@app.command()
def clear(
    device: Annotated[
        str | None,
        typer.Option(help="The interface.  [default: all that are shaped]", show_default=False),
    ] = None,
) -> None:
    """Undo `fedstrata links apply`: the interface is as it was before. Needs root."""
    from fedstrata.deploy.links import interface

    with reporting():
        cleared = list(interface.clear(device))
        for name in cleared:
            typer.echo(name)
        if not cleared:
            logs.write_line("no interface was shaped by fedstrata")
