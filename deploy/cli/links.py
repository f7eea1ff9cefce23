"""The commands `fedstrata links ...`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Annotated, Final

import typer

from common.errors import InvalidExperiment, RunFailed
from common.text import json_text
from deploy.console import logs
from deploy.console.options import Output
from deploy.console.reporting import reporting
from deploy.console.tabular import Column, Table

app = typer.Typer(help="Links between hosts: shape this host's, and measure.", no_args_is_help=True)

PORT: Final = 7883  # of the listener
LEAST: Final = 0.001  # Mbit/s
MOST: Final = 100_000.0  # whose queue is the largest that tc can set
APPLIED: Final = (
    Column("device", text=True),
    Column("up", "Mbit/s", digits=3),
    Column("down", "Mbit/s", digits=3),
    Column("delay", "ms", digits=2),
    Column("to", text=True),
)
MEASURED: Final = (
    Column("", text=True),
    Column("measured", digits=3),
    Column("declared", digits=3),
    Column("difference", "%"),
)

ProfileArgument = Annotated[
    str | None, typer.Argument(help="A built-in profile, such as wan-50mbit.", show_default=False)
]
Up = Annotated[float | None, typer.Option(min=LEAST, max=MOST, help="Rate of what this host sends, Mbit/s.")]
Down = Annotated[float | None, typer.Option(min=LEAST, max=MOST, help="Rate of what this host receives, Mbit/s.")]
Delay = Annotated[float | None, typer.Option(min=0, max=10_000, help="Delay of each direction, ms.")]


@app.command()
def apply(
    profile: ProfileArgument = None,
    up: Up = None,
    down: Down = None,
    delay: Delay = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            help="A host: only the traffic with it is shaped, on the interface that leads there. Repeatable.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="The interface. Without --to all of its traffic is shaped, ssh too.", show_default=False),
    ] = None,
    output: Output = "table",
) -> None:
    """Give an interface of this host the rates and the delay of a link, by the kernel's `tc`. Needs root.

    Name the broker by --to. What an earlier call has set is replaced. It lasts until `fedstrata links clear`, or until
    the host starts again.
    """
    from deploy.links import interface
    from deploy.links.kernel import addresses_of, interface_to
    from deploy.links.measurement import link_of

    if not to and device is None:
        raise typer.BadParameter("name the broker by --to, or an interface by --device", param_hint="--to")
    with reporting():
        link = link_of(profile, up_mbit=up, down_mbit=down, delay_ms=delay)
        peers = {host: addresses_of(host) for host in to or ()}
        leads = {host: interface_to(host, addresses) for host, addresses in peers.items()}
        chosen = device or next(iter(leads.values()))
        for host, other in leads.items():
            if other != chosen:
                remedy = "Apply the link of each interface by a command of its own."
                raise InvalidExperiment("--to", host, f"reached by {other}, not by {chosen}", remedy)
        interface.apply(chosen, link, list(dict.fromkeys(one for addresses in peers.values() for one in addresses)))
        cells = [chosen, link.up_mbit, link.down_mbit, link.delay_ms, ", ".join(peers) or "all"]
        row = dict(zip(("device", "up_mbit", "down_mbit", "delay_ms", "to"), cells, strict=True))
        _write(Table("applied", chosen, APPLIED, [cells]), [row], output)


@app.command()
def clear(
    device: Annotated[
        str | None, typer.Option(help="The interface.  [default: all that are shaped]", show_default=False)
    ] = None,
) -> None:
    """Undo `fedstrata links apply`: the interface is as it was before. Needs root."""
    from deploy.links import interface

    with reporting():
        cleared = list(interface.clear(device))
        for name in cleared:
            typer.echo(name)
        if not cleared:
            logs.write_line("no interface was shaped by fedstrata")


@app.command()
def measure(
    profile: ProfileArgument = None,
    to: Annotated[
        str | None, typer.Option(help=f"The listener, host[:port]. Its port is {PORT}.", show_default=False)
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(help="Serve measurements at an address of this host, host[:port].", show_default=False),
    ] = None,
    up: Up = None,
    down: Down = None,
    delay: Delay = None,
    seconds: Annotated[int, typer.Option(min=1, max=60, help="Seconds in each direction.")] = 3,
    tolerance: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="Share by which a measured number may differ.")
    ] = 0.1,
    output: Output = "table",
) -> None:
    """Measure the rates and the round-trip time between two hosts, over TCP and without a broker.

    Start `fedstrata links measure --listen 0.0.0.0` on the other host first. With a profile, or numbers, they are
    compared. Exit code 1: one differs by more than --tolerance.
    """
    if (to is None) == (listen is None):
        raise typer.BadParameter("give one of --to and --listen", param_hint="--to")
    with reporting():
        if listen is not None:
            _listen(listen)
        elif to is not None:
            from deploy.links.measurement import compare, link_of
            from deploy.links.measurement import measure as measured_to

            link = link_of(profile, up_mbit=up, down_mbit=down, delay_ms=delay)
            logs.write_line(f"measures the way to {to} and back, {seconds} s each")
            compared = compare(measured_to(*_address("--to", to), seconds=seconds), link, tolerance)
            cells = [[one.name, one.measured, one.declared, one.difference] for one in compared]
            _write(Table("measured", to, MEASURED, cells), map(asdict, compared), output)
            off = [one for one in compared if not one.agrees]
            if off:
                texts = (f"{one.name} = {one.measured:.4g}, declared {one.declared:g}" for one in off)
                raise RunFailed(f"the link differs by more than {100 * tolerance:g} %: {'; '.join(texts)}")


def _listen(text: str) -> None:
    from common.net.address import host_port
    from deploy.links.measurement import listen, serve

    with listen(*_address("--listen", text)) as listening:
        host, port, *_ = listening.getsockname()
        logs.write_line(f"measurements are served on {host_port(host, port)}")
        serve(listening)


def _address(option: str, text: str) -> tuple[str, int]:
    from common.net.address import parse_host

    try:
        return parse_host(text, port=PORT)
    except ValueError as error:
        raise InvalidExperiment(option, text, str(error), "Write host or host:port.") from None


def _write(table: Table, rows: Iterable[Mapping[str, object]], output: Output) -> None:
    """Write the table, or its rows as JSON lines."""
    if output == "table":
        typer.echo(table.aligned(), nl=False)
    else:
        for row in rows:
            typer.echo(json_text(row))
