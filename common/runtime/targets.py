"""A run's scrape targets for Prometheus' service discovery, and the address of this machine."""

from __future__ import annotations

import socket
from collections import defaultdict
from typing import Final

from common.experiment.tiers import Tree
from common.experiment.topology import CLOUD
from common.metrics import NODE, Node
from common.protocol.targets import Targets

EVERYWHERE: Final = ("", "0.0.0.0", "::")


def discovery(targets: Targets, tree: Tree, *, cloud: str, run: str) -> list[dict[str, object]]:
    """Return the run's scrape targets in the format of Prometheus' HTTP service discovery, one per address.

    Reports on nodes that are not the reporting child's are ignored. The labels are those that all nodes at the address
    share: a process with several devices is one target, and its metrics have the devices' labels.
    """
    nodes: dict[str, list[Node]] = defaultdict(list)
    nodes[cloud].append(("cloud", "", ""))
    for child in targets.own():
        is_parent = child.name in tree.children
        nodes[child.metrics].append(("institution", child.name, "") if is_parent else ("device", CLOUD, child.name))
    for parent in tree.aggregators:
        for device in targets.below(parent):
            if device.name in tree.children[parent]:
                nodes[device.metrics].append(("device", parent, device.name))
    return [{"targets": [address], "labels": _labels(found) | {"run": run}} for address, found in nodes.items()]


def reachable(host: str, broker: tuple[str, int]) -> str:
    """Return the address to publish for a server that listens on `host`.

    For a wildcard address it is the source address of this machine's packets to the broker; no packet is sent to find
    it.
    """
    if host not in EVERYWHERE:
        return f"[{host}]" if ":" in host else host
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(*broker, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(address)
            found = str(sock.getsockname()[0])
    except OSError:
        return socket.gethostname()
    return f"[{found}]" if ":" in found else found


def _labels(nodes: list[Node]) -> dict[str, str]:
    shared = [values[0] if len(set(values)) == 1 else "" for values in zip(*nodes, strict=True)]
    return dict(zip(NODE, shared, strict=True))
