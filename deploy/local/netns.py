"""`fedstrata run --netns`: a lab in network namespaces, its links kept by the kernel.

    cloud, its broker ===== WAN =====> institution, its broker ===== LAN =====> devices

Each arrow is a pair of interfaces, shaped at both ends. A namespace holds what would run on one machine: the cloud,
an institution, or a process of devices of one institution. A broker stands at the parent's end of the links that
meet there, so a message crosses a link once. A device has a link of its own even where it shares its process: each
reaches its broker by another address, and so by another interface.

With one broker for all, at the cloud, institutions pass on what their devices send and get: a device's model crosses
the WAN up and down again, and what an institution sends its N devices crosses it once up and N times down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.errors import InvalidExperiment
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD
from deploy.brokers import broker
from deploy.console.logs import write_line
from deploy.local.namespaces import VethPair, joined
from deploy.local.network import LabNetwork

PORT: Final = 1883


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """A lab's hosts, named as the processes there; the devices of each process of devices; each child's wire."""

    hosts: tuple[str, ...]
    groups: Mapping[str, tuple[str, ...]]
    wires: Mapping[str, VethPair]


def by_kernel(experiment: Experiment, *, delays: bool) -> Experiment:
    """Return the experiment with its links left to the kernel, and without their delays where they are not wanted."""
    links = experiment.links.model_copy(update={"enforce": "kernel"})
    if not delays:
        prompt = {"delay_ms": 0.0}
        tiers = {"wan": links.wan.model_copy(update=prompt), "lan": links.lan.model_copy(update=prompt)}
        nodes = {child: link.model_copy(update=prompt) for child, link in links.of.items()}
        links = links.model_copy(update={**tiers, "of": nodes})
    return experiment.model_copy(update={"links": links})


def lay_out(experiment: Experiment) -> NetworkPlan:
    """Return a lab's plan, with one process of devices for each institution."""
    children = experiment.topology.children()
    wires: dict[str, VethPair] = {}
    groups: dict[str, tuple[str, ...]] = {}
    for institution, devices in children.items():
        wires[institution] = _wire(experiment, institution, number=len(wires), hosts=(CLOUD, institution))
        group = f"devices@{institution}"  # no node has an @ in its name
        groups[group] = tuple(devices)
        for device in devices:
            wires[device] = _wire(experiment, device, number=len(wires), hosts=(institution, group))
    return NetworkPlan((CLOUD, *children, *groups), groups, wires)


def routing(plan: NetworkPlan) -> dict[str, list[str]]:
    """Return, by host, the commands of `ip` that lead each device past its institution to the cloud's broker.

    There the broker has an address for each device, so that a device's way there goes by its own wire.
    """
    lines: dict[str, list[str]] = {host: [] for host in plan.hosts}
    for wire in plan.wires.values():
        if wire.parent_host != CLOUD:
            wan = plan.wires[wire.parent_host]
            lines[CLOUD] += [
                f"addr add {wire.far_address}/32 dev lo",
                f"route add {wire.child_address}/32 via {wan.child_address}",
            ]
            lines[wan.child_host].append(f"route add {wire.far_address}/32 via {wan.parent_address}")
            lines[wire.child_host].append(f"route add {wire.far_address}/32 via {wire.parent_address}")
    return lines


@contextmanager
def namespaces(experiment: Experiment, home: Path, *, one_broker: bool) -> Iterator[LabNetwork]:
    """Open the network of a lab in namespaces; logs go into `home`.

    Raises InvalidExperiment where this machine or user cannot, or where the links are not the kernel's to keep;
    ConnectionFailed where a broker does not start.
    """
    if (enforce := experiment.links.enforce) != "kernel":
        raise InvalidExperiment("links.enforce", enforce, "with --netns the kernel keeps the links", "Run without it.")
    plan = lay_out(experiment)
    institutions = list(experiment.topology.children())
    with joined(plan.hosts, tuple(plan.wires.values())) as spaces, ExitStack() as stack:
        ports = {}
        for port, host in enumerate([CLOUD] if one_broker else [CLOUD, *institutions], PORT):  # each names its log
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
        where = "at the cloud" if one_broker else "at the cloud and at each institution"
        write_line(f"{len(spaces)} network namespaces; broker: {served.kind} {where}")
        yield LabNetwork(
            upward=upward,
            downward={name: f"127.0.0.1:{ports[name]}" if name in ports else upward[name] for name in institutions},
            groups=plan.groups,
            inside=lambda process: spaces[process].entered(),
            flags=" --netns --one-broker" if one_broker else " --netns",
        )


def _wire(experiment: Experiment, child: str, *, number: int, hosts: tuple[str, str]) -> VethPair:
    link = experiment.link(child)
    return VethPair(number, child, *hosts, link.up_mbit, link.down_mbit, link.delay_ms)
