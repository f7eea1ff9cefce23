"""The commands `fedstrata lab ...` and `fedstrata provision`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstrata.common.errors import NoProgress
from fedstrata.common.protocol.topics import DEFAULT_LAB
from fedstrata.common.text import json_text
from fedstrata.deploy.cli.roles import ROLL_S, LabBrokerOption, call_the_roll
from fedstrata.deploy.console import logs
from fedstrata.deploy.console.login import OPERATOR, Login
from fedstrata.deploy.console.options import (
    SECONDS_MOST,
    ConnectTimeout,
    LabOrFile,
    Output,
    run_connected,
    with_records,
)
from fedstrata.deploy.console.reporting import reporting
from fedstrata.deploy.console.tabular import Column, Table

app = typer.Typer(help="The nodes of a lab.", no_args_is_help=True)


@app.callback()
def _lab() -> None:
    """The nodes of a lab."""


@app.command()
@with_records
def status(
    broker: LabBrokerOption = None,
    lab: LabOrFile = DEFAULT_LAB,
    wait: Annotated[
        float, typer.Option(min=0.1, max=SECONDS_MOST, help="Seconds in which nodes may answer.")
    ] = ROLL_S,
    output: Output = "table",
    connect_timeout: ConnectTimeout = 30.0,
    *,
    login: Login,
) -> None:
    """List the nodes that stay in a lab: role, parent, run, release, host, accelerators and data
    sets.

    Institutions and devices answer, whether they wait or take part in a run; the progress of that
    run is reported on standard error. With brokers of their own the devices of an institution
    answer on that broker: with the lab's file all brokers are asked, and nodes that are away are
    listed, too. Exit code 5: nobody answered, or a node of the lab's file is away.
    """
    from fedstrata.deploy.kits.lab_file import reach
    from fedstrata.deploy.watching.follower import Follower
    from fedstrata.deploy.watching.formatting import progress

    async def ask() -> None:
        given = None if broker is None else [broker]
        reached = reach(lab, given, login)
        expected = reached.lab.parents if reached.lab is not None else {}
        brokers = reached.addresses(OPERATOR)
        found = await call_the_roll(
            reached, OPERATOR, connect_timeout_s=connect_timeout, wait_s=wait
        )
        there = {each.node for each in found}
        away = {node: parent for node, parent in expected.items() if node not in there}
        rows: list[dict[str, Any]] = [
            {"node": each.node, "there": True} | asdict(each.here) for each in found
        ]
        for row, each in zip(rows, found, strict=True):
            for inner in ("nonce", "clock_s", "findings"):
                del row[inner]
            if each.other_release:
                row["protocol"] = each.protocol
        rows += [{"node": node, "there": False, "parent": parent} for node, parent in away.items()]
        if output == "json":
            for row in rows:
                typer.echo(json_text(row))
        elif rows:
            typer.echo(_table(reached.name, rows).on_terminal(), nl=False)
        for each in found:
            if each.other_release:
                logs.write_line(f"{each.node}: {each.other_release}")
        if runs := {each.here.run for each in found if each.here.run}:
            follower = Follower(
                brokers, lab=reached.name, run=max(runs), connect_timeout_s=connect_timeout
            )
            with suppress(NoProgress):  # its cloud is away, and its announcement with it
                await follower.look(
                    lambda watched, now: logs.write_line(progress(watched)), timeout_s=wait
                )
        if not found:
            logs.write_line(
                f"nobody of lab {reached.name} answered on broker {', '.join(map(str, brokers))} "
                f"within {wait:g} s"
            )
        if away or not found:
            raise typer.Exit(5)

    run_connected(ask)


def provision(
    lab: Annotated[Path, typer.Argument(help="The lab's file, lab.toml.")],
    out: Annotated[Path, typer.Option(help="Folder for the kits.")] = Path("kits"),
    wheel: Annotated[
        Path | None,
        typer.Option(
            help="The wheel that the machines install.  [default: the newest in dist/]",
            show_default=False,
        ),
    ] = None,
    authority: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Folder of the lab's certificate authority.  [default: NAME-authority beside the "
                "lab's file]"
            ),
            show_default=False,
        ),
    ] = None,
    revoke: Annotated[
        list[str] | None,
        typer.Option(
            help="First revoke all certificates of this node, or broker-NAME; it gets a new one.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a kit for each machine of a lab: its services as systemd units, fedstrata's wheel, and
    an installer.

    A kit's README has the two commands that install it; install.yml is an Ansible playbook that
    installs all kits. Certificates are kept by the lab's authority, and renewed 60 days before
    their end: provision and install again.
    The authority's folder has its key: keep it on this machine.
    """
    from fedstrata.deploy.kits.lab_file import load
    from fedstrata.deploy.kits.provision import PLAYBOOK, find_wheel, provision, revoke_certificates

    with reporting():
        found = load(lab)
        chosen = find_wheel(wheel)
        then = revoke_certificates(found, lab, revoke, authority=authority) if revoke else ""
        kits = provision(found, lab, wheel=chosen, out=out, authority=authority)
        for kit in kits:
            typer.echo(str(kit))
        logs.write_line(
            f"{len(kits)} kits; each has a README. All at once: ansible-playbook -i "
            f"{out}/hosts.ini {out}/{PLAYBOOK}"
        )
        if then:
            logs.write_line(then)


def _table(lab: str, rows: list[dict[str, Any]]) -> Table:
    names = ("node", "role", "parent", "run", "release", "host", "hardware", "data")

    shown = []
    for row in rows:
        cells = {name: row.get(name) or "-" for name in names}
        if "protocol" in row:
            cells["release"] += f" (protocol {row['protocol']})"
        cells["run"] = (row["run"] or "waits") if row["there"] else "away"
        shown.append(cells)
    heads = {name: Column(name, text=True) for name in names}
    return Table.of_keys("nodes", f"lab {lab}", heads, shown)
