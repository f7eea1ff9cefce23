"""A run's scrape targets for Prometheus' service discovery, and the address of this machine."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterable
from typing import Final, TypedDict

from common.experiment.tiers import Tree
from common.experiment.topology import CLOUD
from common.metrics import NODE, NodeLabels
from common.net.address import BrokerAddress
from common.protocol.messages import Target
from common.protocol.targets import HTTPS

EVERYWHERE: Final = ("", "0.0.0.0", "::")


class ScrapeTarget(TypedDict):
    """One entry of Prometheus' HTTP service discovery."""

    targets: list[str]
    labels: dict[str, str]


def discovery(targets: Iterable[Target], tree: Tree, *, cloud: str, run: str) -> list[ScrapeTarget]:
    """Return the run's scrape targets in the format of Prometheus' HTTP service discovery, one per address.

    The labels are those that all nodes at the address share: a process with several devices is one target, and its
    metrics have the devices' labels.
    """
    nodes: dict[str, list[NodeLabels]] = defaultdict(list)
    nodes[cloud].append(NodeLabels("cloud", CLOUD))
    for target in targets:
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
    addresses that has a route and the server's family; no packet is sent to find it.
    """
    if host not in EVERYWHERE:
        return _in_url(host)
    family = socket.AF_UNSPEC if host == "::" else socket.AF_INET
    for where in broker.hosts:
        try:
            found, kind, protocol, _, address = socket.getaddrinfo(*where, family, socket.SOCK_DGRAM)[0]
            with socket.socket(found, kind, protocol) as sock:
                sock.connect(address)
                return _in_url(str(sock.getsockname()[0]))
        except OSError:
            continue
    return socket.gethostname()


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _labels(nodes: list[NodeLabels]) -> dict[str, str]:
    shared = [values[0] if len(set(values)) == 1 else "" for values in zip(*nodes, strict=True)]
    return dict(zip(NODE, shared, strict=True))
