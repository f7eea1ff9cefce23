"""A run's scrape targets for Prometheus' service discovery, and the address of this machine."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final, TypedDict

from common.experiment.tiers import Tree
from common.experiment.topology import CLOUD
from common.metrics import NODE, NodeLabels
from common.net.address import BrokerAddress, HostPort, is_loopback
from common.protocol.messages import Target
from common.protocol.targets import HTTPS

EVERYWHERE: Final = ("", "0.0.0.0", "::")
OUTSIDE, OUTSIDE_6 = "198.51.100.1", "2001:db8::1"  # of networks for documentation, which are no machine's


class ScrapeTarget(TypedDict):
    """One entry of Prometheus' HTTP service discovery."""

    targets: list[str]
    labels: dict[str, str]


def discovery(targets: Iterable[Target], tree: Tree, *, cloud: str, run: str) -> list[ScrapeTarget]:
    """Return the run's scrape targets in the format of Prometheus' HTTP service discovery, one per address.

    The labels are those that all nodes at the address share: a process with several devices is one target, and its
    metrics have the devices' labels. `cloud`: the address at which Prometheus asked; addresses of the cloud's machine
    alone are left out if Prometheus is elsewhere.
    """
    elsewhere = not is_loopback(_host(cloud))
    nodes: dict[str, list[NodeLabels]] = defaultdict(list)
    nodes[cloud].append(NodeLabels("cloud", CLOUD))
    for target in targets:
        if elsewhere and is_loopback(_host(target.metrics)):
            continue
        role = "institution" if target.name in tree.children else "device"
        nodes[target.metrics].append(NodeLabels(role, target.name, parent=tree.parent(target.name)))
    return [
        {
            "targets": [address.removeprefix(HTTPS)],
            "labels": _labels(found) | {"run": run} | ({"__scheme__": "https"} if address.startswith(HTTPS) else {}),
        }
        for address, found in nodes.items()
    ]


def reachable(host: str, broker: BrokerAddress) -> str:
    """Return the address to publish for a server that listens on `host`.

    For a wildcard address it is the source address of this machine's packets to the broker, to the first of its
    addresses that has a route and the server's family; if the broker is on this machine, of packets to other networks.
    No packet is sent to find it.
    """
    if host not in EVERYWHERE:
        return _in_url(host)
    routes = _routes(broker.hosts, socket.AF_UNSPEC if host == "::" else socket.AF_INET)
    source = next((source for source, _ in routes), "")
    if source and is_loopback(source):
        outside = ((OUTSIDE_6 if ":" in source else OUTSIDE, 9),)
        source = next((source for source, _ in _routes(outside, socket.AF_UNSPEC)), source)
    return _in_url(source or socket.gethostname())


def published(address: str, broker: BrokerAddress) -> str:
    """Return the address of /metrics as a node publishes it over a broker, to its parent.

    An address that only this machine reaches is published over a broker of this machine alone, else empty: elsewhere
    it would be another server's.
    """
    if not is_loopback(_host(address)):
        return address
    return address if any(source == there for source, there in _routes(broker.hosts, socket.AF_UNSPEC)) else ""


def passed_on(targets: Iterable[Target], broker: BrokerAddress) -> tuple[Target, ...]:
    """Return the targets of the nodes below that a node publishes over the broker of its parent, see `published`."""
    return tuple(each for each in targets if published(each.metrics, broker))


def _routes(hosts: Iterable[HostPort], family: socket.AddressFamily) -> Iterator[tuple[str, str]]:
    """Yield this machine's address and the other one, of a packet to each of these hosts that has a route."""
    for where in hosts:
        try:
            found, kind, protocol, _, address = socket.getaddrinfo(*where, family, socket.SOCK_DGRAM)[0]
            with socket.socket(found, kind, protocol) as sock:
                sock.connect(address)
                yield str(sock.getsockname()[0]), str(address[0])
        except OSError:
            continue


def _host(address: str) -> str:
    return address.removeprefix(HTTPS).rpartition(":")[0]


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _labels(nodes: list[NodeLabels]) -> dict[str, str]:
    shared = [values[0] if len(set(values)) == 1 else "" for values in zip(*nodes, strict=True)]
    return dict(zip(NODE, shared, strict=True))
