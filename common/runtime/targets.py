"""A run's roles as Prometheus' service discovery wants them, and the address under which this machine is reached."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from common.metrics import NODE, Node
from common.protocol.targets import Targets

EVERYWHERE: Final = ("", "0.0.0.0", "::")


def discovery(
    targets: Targets, devices: Mapping[str, Sequence[str]], *, cloud: str, run: str
) -> list[dict[str, object]]:
    """Return the run's scrape targets as Prometheus' HTTP service discovery reads them, one for each address.

    `devices`: those of each institution; of others nobody may speak. The labels are those that all nodes at the
    address share: a process of several devices is one target, and its metrics say themselves whose they are.
    """
    nodes: dict[str, list[Node]] = defaultdict(list)
    nodes[cloud].append(("cloud", "", ""))
    for institution in targets.own():
        nodes[institution.metrics].append(("institution", institution.name, ""))
    for home, members in devices.items():
        for device in targets.below(home):
            if device.name in members:
                nodes[device.metrics].append(("device", home, device.name))
    return [{"targets": [address], "labels": _labels(found) | {"run": run}} for address, found in nodes.items()]


def reachable(host: str, broker: tuple[str, int]) -> str:
    """Return the address to publish for a server that listens on `host`.

    Where that is all addresses, it is the one from which this machine's packets to the broker leave; to find out, none
    is sent.
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
