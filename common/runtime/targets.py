"""Where Prometheus finds a run's roles: each tells its address in its birth, an institution also those below it.

The cloud knows its institutions by their presence, and devices, which may be on another broker, by what their
institution's presence says of them. All of it is retained state, so it survives a restart of anybody.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from common.metrics import NODE, Node
from common.protocol.messages import NodeState, Presence, Target

STAYING: Final = (NodeState.INIT, NodeState.READY, NodeState.FINISHED)
AWAITED: Final = (NodeState.LOST, NodeState.DISCONNECTED)
TELL_S: Final = 1.0  # a hundred devices that come together are told in one word or two
ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.%]{2,45}\]|[\w.-]{1,253}):[0-9]{1,5}")
EVERYWHERE: Final = ("", "0.0.0.0", "::")


class Targets:
    """The /metrics of a parent's children that are alive, and of those below them.

    `tell` is called with the children's as they change, at most once in `TELL_S`.
    """

    def __init__(self) -> None:
        self._own: dict[str, str] = {}
        self._below: dict[str, tuple[Target, ...]] = {}
        self._told: tuple[Target, ...] = ()
        self._due: asyncio.TimerHandle | None = None
        self.tell: Callable[[tuple[Target, ...]], None] = lambda targets: None

    def hear(self, child: str, presence: Presence | None) -> None:
        """Take a child's state.

        An institution that is away may come back, and its devices wait for it: what it said of them holds so long.
        """
        if presence is not None and presence.state in STAYING:
            self._own[child], self._below[child] = presence.metrics, presence.targets
        else:
            self._own.pop(child, None)
            if presence is None or presence.state not in AWAITED:
                self._below.pop(child, None)
        if self._due is None and self.own() != self._told:
            self._due = asyncio.get_running_loop().call_later(TELL_S, self._speak)

    def own(self) -> tuple[Target, ...]:
        """Return the addresses of the children, those that told one."""
        return tuple(Target(name, address) for name, address in sorted(self._own.items()) if ADDRESS.fullmatch(address))

    def below(self, child: str) -> tuple[Target, ...]:
        """Return what a child said of its own."""
        return tuple(target for target in self._below.get(child, ()) if ADDRESS.fullmatch(target.metrics))

    def _speak(self) -> None:
        self._due = None
        self._told = self.own()
        self.tell(self._told)


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
