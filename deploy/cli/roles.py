"""The commands of the roles: cloud, institution, device."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.protocol.topics import DEFAULT_LAB
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.text import named
from fedstrata.deploy.cli.chosen import Resume, already_finished, kept_once_begun, tree_of
from fedstrata.deploy.cli.serving import METRICS, Insecure, MetricsAddress, serve_metrics
from fedstrata.deploy.console import logs
from fedstrata.deploy.console.login import Login, report_certificates
from fedstrata.deploy.console.options import (
    ConnectTimeout,
    DataFolder,
    DataRoot,
    LabOption,
    LabOrFile,
    Output,
    Overrides,
    Runs,
    check_parents,
    checked_nodes,
    refuse,
    run_agent,
    run_connected,
    with_records,
)
from fedstrata.deploy.console.reporting import reporting
from fedstrata.deploy.console.service import KIT, StatusHandler
from fedstrata.deploy.console.shipped import OptionalExperimentFile

if TYPE_CHECKING:
    from fedstrata.common.experiment.schema import Experiment
    from fedstrata.common.net.address import BrokerAddress
    from fedstrata.common.runtime.roll import Answer
    from fedstrata.common.runtime.world import Host
    from fedstrata.deploy.kits.lab_file import LabAccess

# Kept when the machine restarts, unlike /tmp, and on its own disk: home folders may be on a
# network, with a quota.
SPOOL = "/var/tmp/fedstrata-{uid}"

BROKER_HELP = "The MQTT broker: host[:port], or several addresses of it, separated by commas."
BrokerOption = Annotated[str, typer.Option(help=BROKER_HELP, envvar="FEDSTRATA_BROKER")]
LabBrokerOption = Annotated[
    str | None,
    typer.Option(
        "--broker",
        help=f"{BROKER_HELP}  [default: that of the lab's file, else localhost]",
        envvar="FEDSTRATA_BROKER",
        show_default=False,
    ),
]
SpoolFolder = Annotated[
    str,
    typer.Option(
        "--spool",
        help=(
            "Folder of partly transferred models, kept after a crash; auto = "
            f"{SPOOL.format(uid='UID')}, none = memory "
            "but for what a device keeps from round to round, and frozen arrays: they are in "
            "auto's folder then."
        ),
    ),
]
ROLL_S = 2.0  # as long as the nodes of a lab usually have to answer


def _checked_packages(given: list[str] | None) -> list[str] | None:
    for name in given or ():
        wrong = not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.:]*", name)
        refuse(
            wrong,
            "--allow",
            f"{name!r}: not a package. Write for instance nets.own, and repeat it for others",
        )
    return given


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Options of a process of nodes that wait for runs."""

    lab: LabOption = DEFAULT_LAB
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "A package whose code an experiment may name here, package:Name: models, data, "
                "objectives, rules."
            ),
            envvar="FEDSTRATA_ALLOW",
            callback=_checked_packages,
            show_default=False,
        ),
    ] = None
    data: DataFolder = None
    data_root: DataRoot = Path()
    connect_timeout: ConnectTimeout = 30.0
    metrics: MetricsAddress = METRICS
    insecure: Insecure = False
    once: Annotated[
        bool, typer.Option("--once", help="End with the first run, with its exit code.")
    ] = False

    def hosts(
        self,
        places: Mapping[str, BrokerAddress],
        login: Login,
        *,
        spool: Path | None,
        kept: Path | None,
    ) -> dict[str, Host]:
        """Serve the metrics of the process, and return the host of each node, from its broker.

        `spool`: the folder of partly transferred models; `kept`: that whose disk usage is served.
        """
        from fedstrata.common.runtime.exports import published
        from fedstrata.common.runtime.world import Host

        first = next(iter(places.values()))
        report_certificates(first)
        registry, address = serve_metrics(
            self.metrics, broker=first, login=login, insecure=self.insecure, folders={"spool": kept}
        )
        stay = _stays(self.once)
        return {
            node: Host(
                place,
                self.connect_timeout,
                registry,
                metrics_address=published(address, place),
                lab=self.lab,
                spool=spool,
                allow=self.allow or (),
                data=self.data,
                data_root=self.data_root,
                stay=stay,
                kit=os.environ.get(KIT, ""),
            )
            for node, place in places.items()
        }


@with_records
def cloud(
    experiment: OptionalExperimentFile = None,
    overrides: Overrides = None,
    broker: LabBrokerOption = None,
    lab: LabOrFile = DEFAULT_LAB,
    runs: Runs = Path("runs"),
    resume: Resume = None,
    output: Output = "table",
    connect_timeout: ConnectTimeout = 30.0,
    metrics: MetricsAddress = METRICS,
    insecure: Insecure = False,
    spool: SpoolFolder = "auto",
    queue: Annotated[
        bool, typer.Option("--queue", help="If another run has the lab, wait for its end.")
    ] = False,
    # no other cloud can be on this broker
    sole: Annotated[bool, typer.Option("--sole", hidden=True)] = False,
    *,
    login: Login,
) -> None:
    """Run an experiment in a lab: announce it to the nodes, run the global rounds and write the
    run's folder.

    An experiment with `topology = "lab"` takes all nodes that `fedstrata lab status` lists.
    """
    from fedstrata.cloud.cloud_agent import CloudAgent
    from fedstrata.cloud.run_folder import RunFolder
    from fedstrata.common.experiment.reading import parse
    from fedstrata.common.experiment.short_form import LAB
    from fedstrata.common.host.energy_meters import EnergyMeter
    from fedstrata.common.runtime.claim import claim
    from fedstrata.common.runtime.discovery import check_carried
    from fedstrata.common.runtime.world import Host
    from fedstrata.deploy.kits.lab_file import reach
    from fedstrata.deploy.local.beforehand import check_cloud
    from fedstrata.deploy.results.stragglers import straggler_note
    from fedstrata.deploy.watching.showing import show

    with reporting():
        if not sole and already_finished(experiment, overrides, resume, output=output):
            return
        tree = tree_of(experiment, overrides, resume)

    again = ["fedstrata", "cloud"]  # what resumes the run
    given = {
        "--broker": (broker, None),
        "--lab": (lab, DEFAULT_LAB),
        "--metrics": (metrics, METRICS),
    }
    for option, (value, usual) in given.items():
        if value is not None and value != usual:
            again += [option, value]
    again += [*login.options(), *["--insecure"] * insecure]
    if sole:
        again = []  # the process that has started this one reports it

    def checked() -> Experiment:
        found = parse(tree)
        home = None if resume else runs
        check_cloud(found, home)
        return found

    async def run_cloud() -> None:
        def waiting(by: str) -> None:
            logs.write_line(f"lab {reached.name} is used by {by}: waiting for its end")

        brokers = None if broker is None else [broker]
        reached = reach(lab, brokers, login)
        where, *_ = reached.addresses(CLOUD)
        report_certificates(where)
        chosen = None if tree.get("topology") == LAB else checked()
        await check_carried(where, CLOUD, lab=reached.name, connect_timeout_s=connect_timeout)
        alone = partial(
            claim,
            where,
            lab=reached.name,
            connect_timeout_s=connect_timeout,
            queue=queue,
            waiting=waiting,
        )
        async with nullcontext() if sole else alone():
            await run_alone(reached, where, chosen)

    async def run_alone(
        reached: LabAccess, where: BrokerAddress, chosen: Experiment | None
    ) -> None:
        if chosen is None or reached.lab is not None:
            found, old = await _nodes_there(reached, connect_timeout)
            if chosen is None:
                tree["topology"] = _topology(found, old)
                chosen = checked()
            _check_fit(chosen, old)
        folders = {"runs": runs, "spool": spool_folder(spool)}
        registry, address = serve_metrics(
            metrics, broker=where, login=reached.login, insecure=insecure, folders=folders
        )
        if not resume and (note := straggler_note(chosen, runs)):
            logs.write_line(note)
        folder = RunFolder.reopen(resume) if resume else RunFolder.create(runs, chosen)
        shown = show(folder.experiment, json_lines=output == "json", broker=str(where))
        with kept_once_begun(folder, again), shown as observe:
            host = Host(
                where, connect_timeout, registry, address, lab=reached.name, spool=folders["spool"]
            )
            agent = CloudAgent(
                folder,
                host,
                resume=resume is not None,
                observe=observe,
                energy=EnergyMeter.of_this_host(),
            )
            await run_agent("cloud", agent.run())

    _run_role(run_cloud, "cloud")


@with_records
def institution(
    name: Annotated[
        str, typer.Option(help="This institution's name in the experiment.", callback=checked_nodes)
    ],
    parent: Annotated[
        str, typer.Option(help="Its parent, the cloud or another institution.")
    ] = CLOUD,
    broker: BrokerOption = "localhost",
    child_broker: Annotated[
        str | None,
        typer.Option(
            help="The broker of its children, like --broker.  [default: its parent's]",
            show_default=False,
        ),
    ] = None,
    spool: SpoolFolder = "auto",
    *,
    own: NodeOptions,
    login: Login,
) -> None:
    """Start an institution: it takes part in each run of its parent, and waits for the next.

    In a run it receives the experiment and runs its local rounds with its children. It reads data
    for rules that need samples at the node, and then needs fedstrata[learning] as devices do.
    """
    from fedstrata.institution.institution_agent import InstitutionAgent

    check_parents([parent], [name])

    async def take_part() -> None:
        folder = spool_folder(spool)
        host = own.hosts(
            {name: login.address(broker, node=name)}, login, spool=folder, kept=folder
        )[name]
        below = login.address(child_broker or broker, node=name, option="--child-broker")
        await run_agent(name, InstitutionAgent(name, host, parent=parent, child_broker=below).run())

    _run_role(take_part, name)


@with_records
def device(
    name: Annotated[
        list[str],
        typer.Option(
            help="This device's name. Repeat it for several devices in one process.",
            callback=checked_nodes,
        ),
    ],
    parent: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Its parent, an institution or the cloud: one for all names, or one per name.  "
                "[default: cloud]"
            ),
            show_default=False,
        ),
    ] = None,
    broker: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{BROKER_HELP} One broker for all names, or one per name.  [default: localhost]",
            envvar="FEDSTRATA_BROKER",
        ),
    ] = None,
    accelerator: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or auto.")] = "auto",
    slots: Annotated[
        str,
        typer.Option(
            help="Concurrent trainings: a number, or auto = one per GPU, else one per core."
        ),
    ] = "auto",
    energy: Annotated[
        str,
        typer.Option(
            help=(
                "What measures this host's energy: auto = its own counters, none, rapl, nvml, "
                "pmic, or plug:TOPIC of a "
                "smart plug on the first device's broker."
            ),
            envvar="FEDSTRATA_ENERGY",
        ),
    ] = "auto",
    spool: SpoolFolder = "none",
    together: Annotated[
        bool,
        typer.Option(
            "--together", help="With --once: end all devices if one fails before any has trained."
        ),
    ] = False,
    *,
    own: NodeOptions,
    login: Login,
) -> None:
    """Start one or more devices: they take part in each run of their parent, and wait for the next.

    In a run they train each model that their parent assigns.
    """
    refuse(together and not own.once, "--together", "valid only with --once")
    brokers = broker or ["localhost"]
    parents = parent or [CLOUD]
    for given, option in ((parents, "--parent"), (brokers, "--broker")):
        refuse(
            len(given) not in (1, len(name)),
            option,
            f"{len(given)} values given for {len(name)} names",
        )
    count = None if slots == "auto" else int(slots) if slots.isdecimal() else 0
    refuse(count == 0, "--slots", f"{slots!r}: use auto, or a number from 1")
    refuse(len(set(name)) < len(name), "--name", "duplicate name")
    check_parents(parents, name)
    from fedstrata.common.host.accelerators import check_name
    from fedstrata.common.runtime.energy_source import check_energy

    with reporting():
        check_name(accelerator)
        check_energy(energy)
    homes = parents * len(name) if len(parents) == 1 else parents
    addresses = brokers * len(name) if len(brokers) == 1 else brokers

    async def take_part() -> None:
        from fedstrata.common.host import nvidia
        from fedstrata.common.host.energy_meters import PlugMeter
        from fedstrata.common.host.machine import export_plug, hottest_celsius
        from fedstrata.common.runtime.energy_source import energy_counter
        from fedstrata.deploy.local.agents import run_agents
        from fedstrata.device.device_agent import DeviceAgent
        from fedstrata.device.pool.energy_shares import EnergyShares
        from fedstrata.device.pool.pool import Pool

        places = {
            each: login.address(where, node=each)
            for each, where in zip(name, addresses, strict=True)
        }
        partly = spool_folder(spool)
        states = partly or spool_folder("auto")  # what a method keeps
        hosts = own.hosts(places, login, spool=partly, kept=states)
        first = hosts[name[0]]
        async with (
            energy_counter(energy, first.broker) as counter,
            Pool(
                accelerator=accelerator,
                slots=count,
                devices=len(name),
                energy=EnergyShares(counter, partial(hottest_celsius, nvidia.find())),
            ) as pool,
        ):
            if isinstance(counter, PlugMeter):
                export_plug(first.metrics, counter)
            agents = {
                each: DeviceAgent(each, hosts[each], parent=home, pool=pool, states=states).run
                for each, home in zip(name, homes, strict=True)
            }
            await run_agents(
                agents,
                shared_failure=lambda: pool.failure,
                together=lambda: together and pool.moves == 0,
            )

    _run_role(take_part)


async def call_the_roll(
    reached: LabAccess, name: str, *, connect_timeout_s: float, wait_s: float
) -> list[Answer]:
    """Return the nodes on all brokers of a lab, which a node asks, see `call_rolls`. Raises
    ConnectionFailed.
    """
    from fedstrata.common.runtime.roll import call_rolls

    expected = reached.lab.parents if reached.lab is not None else ()
    return await call_rolls(
        reached.addresses(name),
        lab=reached.name,
        name=name,
        wait_s=wait_s,
        connect_timeout_s=connect_timeout_s,
        expected=expected,
    )


async def _nodes_there(
    reached: LabAccess, connect_timeout_s: float
) -> tuple[list[Answer], Mapping[str, str]]:
    """Return the nodes that are there, and why some cannot take part: of another release, or with
    another lab's kit.
    """
    from fedstrata.deploy.kits.answers import stale

    found = await call_the_roll(reached, CLOUD, connect_timeout_s=connect_timeout_s, wait_s=ROLL_S)
    others = {each.node: each.other_release for each in found if each.other_release}
    if reached.lab is not None:
        others |= dict(stale(found, reached.lab))
    return found, others


def _topology(found: Sequence[Answer], old: Mapping[str, str]) -> dict[str, Any]:
    """Return the `topology` table of the nodes that are there, and report who is left out."""
    from fedstrata.common.experiment.short_form import PresentNode, topology_of

    there = [
        PresentNode(each.node, each.here.role, each.here.parent, each.here.host)
        for each in found
        if each.node not in old
    ]
    for node, reason in old.items():
        logs.write_line(f"{node} is left out: {reason}")
    topology, left_out = topology_of(there, unfit=len(old))
    for line in left_out:
        logs.write_line(line)
    return topology


def _check_fit(chosen: Experiment, old: Mapping[str, str]) -> None:
    """Report the nodes of an experiment that cannot take part. Raises InvalidExperiment if there
    are any.
    """
    unfit = [node for node in chosen.tree.nodes if node in old]
    for node in unfit:
        logs.write_line(f"{node} cannot take part: {old[node]}")
    if unfit:
        problem = f"{len(unfit)} of the experiment's nodes cannot take part, as above"
        raise InvalidExperiment(
            "nodes", named(unfit), problem, "Fix them, or leave them out of the experiment."
        )


def _stays(once: bool) -> bool:
    """Return whether a node waits for the next run; one that does reports its activity to systemd,
    too.
    """
    if not once:
        logging.getLogger(logs.ACTIVITY).addHandler(StatusHandler())
    return not once


def spool_folder(text: str) -> Path | None:
    if text == "none":
        return None
    if text == "auto":
        return Path(SPOOL.format(uid=os.getuid()))
    return Path(text)


def _run_role(role: Callable[[], Coroutine[Any, Any, None]], node: str = "") -> None:
    from fedstrata.common.host.memory import keep_large_buffers

    keep_large_buffers()
    before = logs.NODE.set(node)
    try:
        run_connected(role)
    finally:
        logs.NODE.reset(before)
