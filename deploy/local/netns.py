"""`fedstrata run --netns`: a lab in network namespaces, with links emulated by the kernel.

    cloud, its broker ===== WAN =====> institution, its broker ===== LAN =====> devices

Each arrow, of any number of tiers, is a veth pair, shaped at both ends. A namespace stands for one machine: the cloud,
an institution, or a process of devices of one parent. Each broker runs at the parent's end of its links, so a message
crosses a link once. Devices in one process still have links of their own: each uses another address of the broker, and
so another interface.

With one broker for all, at the cloud, institutions forward the packets of those below: a device's model crosses the WAN
up and down again, and a model for N devices crosses it once up and N times down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.errors import InvalidExperiment
from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD
from deploy.brokers import broker
from deploy.console.logs import write_line
from deploy.links.replay import Replay, TracedInterface
from deploy.local.namespaces import VethPair, joined
from deploy.local.network import LabNetwork

PORT: Final = 1883


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """A lab's hosts, named after their processes; the devices of each device process; each child's veth pair."""

    hosts: tuple[str, ...]
    groups: Mapping[str, tuple[str, ...]]
    wires: Mapping[str, VethPair]


def by_kernel(experiment: Experiment, *, delays: bool) -> Experiment:
    """Return the experiment with links enforced by the kernel; without their delays if `delays` is false."""
    tree = experiment.model_dump(mode="json")
    tree["links"]["enforce"] = "kernel"
    if not delays:
        for link in (*(tier["link"] for tier in tree["tiers"]), *tree["links"]["of"].values()):
            link["delay_ms"] = 0.0
            if link.get("trace"):
                link["trace"]["delay_ms"] = []
    return parse(tree)


def lay_out(experiment: Experiment) -> NetworkPlan:
    """Return a lab's plan, with one process for the devices of each parent."""
    tree = experiment.tree
    wires: dict[str, VethPair] = {}
    groups: dict[str, tuple[str, ...]] = {}
    for parent, children in tree.children.items():
        devices = tuple(name for name in children if name not in tree.children)
        group = f"devices@{parent}"  # no node has an @ in its name
        if devices:
            groups[group] = devices
        for child in children:
            host = group if child in devices else child
            wires[child] = _wire(experiment, child, number=len(wires), hosts=(parent, host))
    return NetworkPlan((CLOUD, *tree.aggregators, *groups), groups, wires)


def routing(plan: NetworkPlan) -> dict[str, list[str]]:
    """Return, by host, the `ip` commands that route each node through those above it to the cloud's broker.

    The broker has an address for each node, so that each node's packets use the node's own link.
    """
    lines: dict[str, list[str]] = {host: [] for host in plan.hosts}
    for wire in plan.wires.values():
        if wire.parent_host == CLOUD:
            continue
        lines[CLOUD].append(f"addr add {wire.far_address}/32 dev lo")
        hop = wire
        lines[hop.child_host].append(f"route add {wire.far_address}/32 via {hop.parent_address}")
        while hop.parent_host != CLOUD:
            hop = plan.wires[hop.parent_host]
            lines[hop.child_host].append(f"route add {wire.far_address}/32 via {hop.parent_address}")
            lines[hop.parent_host].append(f"route add {wire.child_address}/32 via {hop.child_address}")
    return lines


@contextmanager
def namespaces(experiment: Experiment, home: Path, *, one_broker: bool) -> Iterator[LabNetwork]:
    """Open the network of a lab in namespaces; logs go into `home`.

    Raises InvalidExperiment if this machine or user cannot, or if links.enforce is not kernel; ConnectionFailed if a
    broker does not start.
    """
    if (enforce := experiment.links.enforce) != "kernel":
        raise InvalidExperiment(
            "links.enforce",
            enforce,
            "with --netns the kernel enforces the links",
            "Use kernel, or run without --netns.",
        )
    plan = lay_out(experiment)
    institutions = experiment.tree.aggregators
    with joined(plan.hosts, tuple(plan.wires.values())) as spaces, ExitStack() as stack:
        ports = {}
        for port, host in enumerate([CLOUD] if one_broker else [CLOUD, *institutions], PORT):  # log names need the port
            with spaces[host].entered():
                served = stack.enter_context(broker.start(directory=home, host="0.0.0.0", port=port))
            ports[host] = port
        upward = {CLOUD: f"127.0.0.1:{PORT}"}
        for node, wire in plan.wires.items():
            if wire.parent_host in ports:
                upward[node] = f"{wire.parent_address}:{ports[wire.parent_host]}"
            else:
                upward[node] = f"{wire.far_address}:{PORT}"
        if one_broker:
            for host, lines in routing(plan).items():
                spaces[host].batch("ip", lines)
            for institution in institutions:
                spaces[institution].forward()

        def change(host: str, traced: Sequence[TracedInterface], t: float) -> None:
            spaces[host].batch("tc", [each.line(t) for each in traced])
            with spaces[host].entered():
                for each in traced:
                    each.wake()

        replay = Replay(traces(experiment, plan), change)
        stack.enter_context(replay.running())
        where = "at the cloud" if one_broker else "at the cloud and at each institution"
        write_line(f"{len(spaces)} network namespaces; broker: {served.kind} {where}")
        yield LabNetwork(
            upward=upward,
            downward={name: f"127.0.0.1:{ports[name]}" if name in ports else upward[name] for name in institutions},
            groups=plan.groups,
            inside=lambda process: spaces[process].entered(),
            flags=" --netns --one-broker" if one_broker else " --netns",
            begun=replay.begin,
        )


def _wire(experiment: Experiment, child: str, *, number: int, hosts: tuple[str, str]) -> VethPair:
    link = experiment.link(child)
    up, down = (None if way.rate is None else way.rate * 8 / 1e6 for way in (link.up, link.down))
    return VethPair(number, child, *hosts, up, down, 1e3 * link.up.delay_s)


def traces(experiment: Experiment, plan: NetworkPlan) -> list[TracedInterface]:
    """Return the interfaces whose rates change, at both ends of each link with a trace."""
    found = []
    for child, wire in plan.wires.items():
        link = experiment.link(child)
        if link.up.trace is not None and link.down.trace is not None:
            up, down = f"up{wire.number}", f"down{wire.number}"
            found.append(TracedInterface(wire.child_host, up, wire.parent_address, link.up.trace))
            found.append(TracedInterface(wire.parent_host, down, wire.child_address, link.down.trace))
    return found
