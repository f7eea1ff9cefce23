"""The command `fedstrata doctor`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedstrata.common.errors import ConnectionFailed, InvalidExperiment
from fedstrata.common.protocol.topics import DEFAULT_LAB
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.text import json_text
from fedstrata.deploy.cli.roles import (
    ROLL_S,
    LabBrokerOption,
    SpoolFolder,
    call_the_roll,
    spool_folder,
)
from fedstrata.deploy.console.login import OPERATOR, Login
from fedstrata.deploy.console.options import LabOrFile, Output, checked_nodes, with_records
from fedstrata.deploy.console.reporting import reporting
from fedstrata.deploy.console.stages import stages
from fedstrata.deploy.console.tabular import Column, Table

if TYPE_CHECKING:
    from fedstrata.common.host.examination import Finding
    from fedstrata.common.net.address import BrokerAddress
    from fedstrata.deploy.kits.lab_file import LabAccess

AUTO = "auto"
HOST = "this host"
NODES = "nodes"
NODES_SHOWN = 50  # more of them: only those with a fault
CONNECT_S = 10.0


def _known_name(name: str) -> str:
    """Check the name of a node, or of one of the lab's own logins."""
    if name in (OPERATOR, CLOUD):
        return name
    return str(checked_nodes(name))


@with_records
def doctor(
    broker: LabBrokerOption = None,
    lab: LabOrFile = DEFAULT_LAB,
    name: Annotated[
        str, typer.Option(help="The node whose login and topics are used.", callback=_known_name)
    ] = OPERATOR,
    accelerator: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:N or auto, as for `device`.")
    ] = "auto",
    data: Annotated[
        Path | None,
        typer.Option(
            help="The folder of data sets on this host, as for `device`.",
            envvar="FEDSTRATA_DATA",
            show_default=False,
        ),
    ] = None,
    spool: SpoolFolder = "auto",
    output: Output = "table",
    *,
    login: Login,
) -> None:
    """Examine this host, the brokers and the nodes of a lab: what is missing, and what follows?

    This host: clock, memory, disks, PyTorch, accelerator, data sets. Each broker: name, TCP, TLS,
    login, the own topics, access rules, and packets. With the lab's file also its nodes, if this
    login may call the roll: who is away, has an old kit, another release or clock, and what the
    node's own host lacks.

    It takes some seconds, and disturbs no run. Exit codes: 0 everything needed is there, 1
    something needed is missing, 3 a broker cannot be reached.
    """
    from fedstrata.deploy.brokers.contract import STEPS
    from fedstrata.deploy.kits.lab_file import reach

    with reporting():
        given = None if broker is None else [broker]
        reached = reach(lab, given, login)
        reached.check_node("--name", name)
        brokers = {f"broker {address}": address for address in _brokers(reached, name, broker)}
        sections = {HOST: _host(name, accelerator, data, spool, reached)}
        sections |= {
            section: _broker(address, reached.name, name) for section, address in brokers.items()
        }
        if name in (OPERATOR, CLOUD):
            sections[NODES] = _nodes(reached, name)
        missing: set[tuple[str, str]] = set()
        unreached: set[str] = set()
        every: dict[str, list[Finding]] = {}
        with stages(len(sections)) as begin:
            for section, examined in sections.items():
                if section == NODES and unreached == brokers.keys():
                    continue  # each would be waited for
                begin(f"examines {section}")
                every[section] = list(examined)
                lacks = {one.item for one in every[section] if one.needed and not one.there}
                missing |= {(section, item) for item in lacks}
                unreached |= (
                    {section} if section in brokers and not lacks.isdisjoint(STEPS) else set()
                )
        for section, found in every.items():
            _write(section, found, output)
    if unreached:
        raise typer.Exit(3)
    if missing:
        raise typer.Exit(1)


def _host(
    name: str, accelerator: str, data: Path | None, spool: str, reached: LabAccess
) -> Iterator[Finding]:
    """Yield the findings of this host, of which the lab's file may know what the node's service is
    given.
    """
    from fedstrata.common.host.examination import examine_host
    from fedstrata.common.settings.data import Data, examine_data

    learns = name == CLOUD
    if reached.lab is not None and name in reached.lab.machine_of:
        machine = reached.lab.machines[reached.lab.machine_of[name]]
        learns = name not in reached.lab.institutions
        accelerator = machine.accelerator if accelerator == AUTO else accelerator
        data = Path(machine.data) if data is None and machine.data is not None else data
    folders = {"cache": Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")}
    if (partly := spool_folder(spool)) is not None:
        folders["spool"] = partly
    yield from examine_host(folders, learns=learns)
    yield _accelerator(accelerator)
    yield examine_data(data or Path(Data.model_fields["root"].default), needed=data is not None)


def _accelerator(asked: str) -> Finding:
    """Return whether PyTorch sees the accelerator asked for, or any GPU whose driver is here."""
    from fedstrata.common.host.accelerators import choose, may_have_gpu
    from fedstrata.common.host.examination import Finding

    driver = may_have_gpu()
    if asked == "cpu" or (asked == AUTO and not driver):
        return Finding("accelerator", True, True, "cpu")
    try:
        from fedstrata.common.learning.computing import accelerators

        chosen = choose(asked, accelerators())
    except (ModuleNotFoundError, InvalidExperiment) as error:
        return Finding("accelerator", asked != AUTO, False, str(error))
    blind = driver and chosen == ("cpu",)
    if blind:
        note = "a GPU's driver is here, but PyTorch sees no GPU: install its CUDA build"
    else:
        note = ", ".join(chosen)
    return Finding("accelerator", asked != AUTO, not blind, note)


def _brokers(reached: LabAccess, name: str, given: str | None) -> list[BrokerAddress]:
    """Return the brokers of a node of the lab's file, else those of the lab, each address alone."""
    lab = reached.lab
    if lab is not None and name in lab.parents and given is None:
        texts = lab.addresses(name)
    else:
        texts = reached.brokers
    return [one for text in texts for one in reached.login.address(text, node=name).each]


def _broker(address: BrokerAddress, lab: str, name: str) -> Iterator[Finding]:
    from fedstrata.common.host.examination import Finding
    from fedstrata.deploy.brokers.contract import STEPS, examine, steps

    there = True
    for step in steps(address):
        there = there and (step.there or not step.needed)
        yield step
    if there:
        try:
            yield from examine(address, lab=lab, name=name)
        except ConnectionFailed as error:  # it ended meanwhile
            yield Finding(STEPS[-1], True, False, str(error))


def _nodes(reached: LabAccess, name: str) -> Iterator[Finding]:
    """Yield each node that answers or should; nothing if no broker can be reached, which its
    section has.
    """
    from fedstrata.common.host.examination import Finding
    from fedstrata.deploy.kits.answers import faults

    asked = call_the_roll(reached, name, connect_timeout_s=CONNECT_S, wait_s=ROLL_S)
    with suppress(ConnectionFailed):
        for node, problems in faults(asyncio.run(asked), reached.lab).items():
            yield Finding(node, True, not problems, "; ".join(problems))


def _write(section: str, found: Sequence[Finding], output: str) -> None:
    """Write a section's findings as a table or as JSON lines; of many nodes only those with a
    fault.
    """
    if output == "json":
        for one in found:
            typer.echo(json_text({"section": section} | asdict(one)))
        return
    shown = found
    if section == NODES and len(found) > NODES_SHOWN:
        shown = [one for one in found if not one.there]
    cells = []
    for one in shown:
        needed = "needed" if one.needed else "useful"
        there = "ok" if one.there else "missing"
        cells.append([one.item, needed, there, one.note])
    columns = [Column(name, text=True) for name in ("item", "", "found", "note")]
    if cells:
        typer.echo(f"{section}\n{Table('doctor', section, columns, cells).on_terminal()}")
