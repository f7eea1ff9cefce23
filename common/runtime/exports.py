"""Metrics of a node's endpoints, read when Prometheus scrapes, and the addresses at which it finds
them.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Final, TypedDict

from fedstrata.common.accounting.counters import DIRECTIONS, LINK_KINDS
from fedstrata.common.accounting.traffic import Measured
from fedstrata.common.metrics import NODE, STATES, Metrics, NodeLabels, Reading
from fedstrata.common.net.address import BrokerAddress, HostPort, is_loopback
from fedstrata.common.protocol.admission import Refusal
from fedstrata.common.protocol.attendance import HTTPS
from fedstrata.common.protocol.messages import Target
from fedstrata.common.runtime.child_endpoint import ChildEndpoint
from fedstrata.common.runtime.endpoint import DROPPED, HEAP, Endpoint
from fedstrata.common.runtime.parent_endpoint import ParentEndpoint
from fedstrata.common.settings.topology import CLOUD, Tree

BROKER: Final = "broker"
KINDS: Final = (*LINK_KINDS, "probe")
# Children that never joined, have moved, or left at the end, are omitted.
UP: Final = {"init": 1, "ready": 1, "finished": 1, "failed": 0, "disconnected": 0, "lost": 0}
EVERYWHERE: Final = ("", "0.0.0.0", "::")
# of networks for documentation, which are no machine's
OUTSIDE = "198.51.100.1"
OUTSIDE_6 = "2001:db8::1"


def export_child(metrics: Metrics, child: ChildEndpoint, node: NodeLabels, *, tier: str) -> None:
    """Export the metrics of a child's endpoint; `tier`: the name of the tier above the node."""
    _export(
        metrics, child, node, tier=tier, connection=child.session.parent, peers=child.link.peers
    )


def export_parent(metrics: Metrics, parent: ParentEndpoint, node: NodeLabels, *, tier: str) -> None:
    """Export the metrics of a parent's endpoint: its children, their links, its broker and what it
    refused.

    `tier`: the name of the tier below the node.
    """
    session = parent.session
    ways = parent.link.ways
    coordinator = session.coordinator
    ledger = session.ledger
    broker = str(parent.connection.address)

    def nodes() -> Reading:
        seen = list(coordinator.states().values())
        return [((state,), seen.count(state)) for state in STATES]

    def declared() -> Reading:
        for name in parent.peers:
            for direction, way in (("sent", ways.to[name]), ("received", ways.from_[name])):
                if way.rate is not None:
                    yield (name, direction), way.rate

    def measured() -> Reading:
        for name in parent.peers:
            before = ledger.measured.get(name, Measured())
            for direction, source, rate in (
                ("sent", "calibration", before.down),
                ("received", "calibration", before.up),
                ("received", "models", session.rates.get(name)),
            ):
                if rate:
                    yield (name, direction, source), rate

    def up() -> Reading:
        return [
            ((name,), UP[state]) for name, state in coordinator.expected().items() if state in UP
        ]

    def idle() -> Reading:
        return [((name,), idle_s) for name, idle_s in coordinator.idle(parent.now()).items()]

    def statistic(topic: str) -> Reading:
        if topic in parent.statistics.values:
            return [((broker,), parent.statistics.values[topic])]
        return []

    _export(metrics, parent, node, tier=tier, connection=BROKER, peers=parent.peers)
    for name, read in (
        ("nodes", nodes),
        ("child_up", up),
        ("idle_seconds", idle),
        ("link_declared_bytes_per_second", declared),
        ("link_measured_bytes_per_second", measured),
    ):
        metrics.watch(name, (*node, tier), read)
    for name, read in (
        ("idle_most_seconds", lambda: [((), parent.transfer.idle_s)]),
        ("refused_models", lambda: [((), coordinator.refused)]),
        ("late_results", lambda: [((), coordinator.late + coordinator.taken_back)]),
        ("broker_heap_bytes", partial(statistic, HEAP)),
        ("broker_dropped_messages", partial(statistic, DROPPED)),
    ):
        metrics.watch(name, node, read)


def _export(
    metrics: Metrics,
    endpoint: Endpoint,
    node: NodeLabels,
    *,
    tier: str,
    connection: str,
    peers: Sequence[str],
) -> None:
    """Export an endpoint's counts; `connection`: the parent that it serves, or `BROKER` for all
    children.
    """
    link = endpoint.link
    mqtt = endpoint.connection

    def tallies(part: str) -> Reading:
        cells = dict.fromkeys(product(peers, DIRECTIONS, KINDS), 0)
        for cell, tally in list(link.counters.cells.items()):
            cells[cell] = getattr(tally, part)
        return cells.items()

    def wire() -> Reading:
        sample = mqtt.meter.sample()
        carried = (("sent", sample.sent), ("received", sample.received))
        if sample.measured:
            return [((connection, direction), count) for direction, count in carried]
        return []

    def retransmitted() -> Reading:
        sample = mqtt.meter.sample()
        known = sample.measured and not sample.retransmitted_unknown
        if known:
            return [((connection,), sample.retransmitted)]
        return []

    def rtt() -> Reading:
        sample = mqtt.meter.sample()
        if sample.measured and sample.rtt_us:
            return [((connection,), sample.rtt_us / 1e6)]
        return []

    for name, read in (
        ("payload_bytes", partial(tallies, "payload")),
        ("message_bytes", partial(tallies, "message")),
        ("wire_bytes", wire),
        ("retransmitted_bytes", retransmitted),
        ("rtt_seconds", rtt),
    ):
        metrics.watch(name, (*node, tier), read)
    for name, read in (
        ("ignored_messages", lambda: [((kind.value,), link.refusals.of(kind)) for kind in Refusal]),
        ("reconnects", lambda: [((), mqtt.reconnects)]),
        ("chunks_published", lambda: [((), link.sender.chunks_published)]),
        ("chunks_repeated", lambda: [((), link.sender.chunks_repeated)]),
        ("chunks_refused", lambda: [((), link.receiver.chunks_refused)]),
        ("chunks_lost", lambda: [((), link.receiver.chunks_lost)]),
    ):
        metrics.watch(name, node, read)


class ScrapeTarget(TypedDict):
    """One entry of Prometheus' HTTP service discovery."""

    targets: list[str]
    labels: dict[str, str]


def discovery(targets: Iterable[Target], tree: Tree, *, cloud: str, run: str) -> list[ScrapeTarget]:
    """Return the run's scrape targets in the format of Prometheus' HTTP service discovery, one per
    address.

    The labels are those that all nodes at the address share: a process with several devices is one
    target, and its metrics have the devices' labels. `cloud`: the address at which Prometheus
    asked; addresses of the cloud's machine alone are left out if Prometheus is elsewhere.
    """
    elsewhere = not is_loopback(_host(cloud))
    nodes: dict[str, list[NodeLabels]] = defaultdict(list)
    nodes[cloud].append(NodeLabels("cloud", CLOUD))
    for target in targets:
        if elsewhere and is_loopback(_host(target.metrics)):
            continue
        role = "institution" if target.name in tree.children else "device"
        # of a device that has entered
        parent = tree.parent(target.name) if target.name in tree else ""
        nodes[target.metrics].append(NodeLabels(role, target.name, parent=parent))
    targets_found: list[ScrapeTarget] = []
    for address, found in nodes.items():
        labels = _labels(found) | {"run": run}
        if address.startswith(HTTPS):
            labels["__scheme__"] = "https"
        targets_found.append({"targets": [address.removeprefix(HTTPS)], "labels": labels})
    return targets_found


def reachable(host: str, broker: BrokerAddress) -> str:
    """Return the address to publish for a server that listens on `host`.

    For a wildcard address it is the source address of this machine's packets to the broker, to the
    first of its addresses that has a route and the server's family; if the broker is on this
    machine, of packets to other networks. No packet is sent to find it.
    """
    if host not in EVERYWHERE:
        return _in_url(host)
    family = socket.AF_UNSPEC if host == "::" else socket.AF_INET
    source = next((source for source, _ in _routes(broker.hosts, family)), "")
    if source and is_loopback(source):
        outside = ((OUTSIDE_6 if ":" in source else OUTSIDE, 9),)
        source = next((source for source, _ in _routes(outside, socket.AF_UNSPEC)), source)
    return _in_url(source or socket.gethostname())


def published(address: str, broker: BrokerAddress) -> str:
    """Return the address of /metrics as a node publishes it over a broker, to its parent.

    An address that only this machine reaches is published over a broker of this machine alone, else
    empty: elsewhere it would be another server's.
    """
    if not is_loopback(_host(address)):
        return address
    if any(source == there for source, there in _routes(broker.hosts, socket.AF_UNSPEC)):
        return address
    return ""


def passed_on(targets: Iterable[Target], broker: BrokerAddress) -> tuple[Target, ...]:
    """Return the targets of the nodes below that a node publishes over the broker of its parent,
    see `published`.
    """
    return tuple(each for each in targets if published(each.metrics, broker))


def _routes(hosts: Iterable[HostPort], family: socket.AddressFamily) -> Iterator[tuple[str, str]]:
    """Yield this machine's address and the other one, of a packet to each of these hosts that has a
    route.
    """
    for where in hosts:
        try:
            found, kind, protocol, _, address = socket.getaddrinfo(
                *where, family, socket.SOCK_DGRAM
            )[0]
            with socket.socket(found, kind, protocol) as sock:
                sock.connect(address)
                yield str(sock.getsockname()[0]), str(address[0])
        except OSError:
            continue


def _host(address: str) -> str:
    return address.removeprefix(HTTPS).rpartition(":")[0]


def _in_url(host: str) -> str:
    if ":" in host:
        return f"[{host}]"
    return host


def _labels(nodes: list[NodeLabels]) -> dict[str, str]:
    labels = dict.fromkeys(NODE, "")
    for label, values in zip(NODE, zip(*nodes, strict=True), strict=True):
        if len(set(values)) == 1:
            labels[label] = values[0]
    return labels
