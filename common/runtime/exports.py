"""Metrics of a node's endpoints, read when Prometheus scrapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Final

from common.accounting.counters import DIRECTIONS, LINK_KINDS
from common.accounting.traffic import Measured
from common.metrics import STATES, Metrics, NodeLabels, Reading
from common.protocol.refusals import Refusal
from common.runtime.broker_statistics import DROPPED, HEAP
from common.runtime.child_endpoint import ChildEndpoint
from common.runtime.endpoint import Endpoint
from common.runtime.parent_endpoint import ParentEndpoint

BROKER: Final = "broker"
KINDS: Final = (*LINK_KINDS, "probe")
# Children that never joined, or left at the end, are omitted.
UP: Final = {"init": 1, "ready": 1, "finished": 1, "failed": 0, "disconnected": 0, "lost": 0}


def export_child(metrics: Metrics, child: ChildEndpoint, node: NodeLabels, *, tier: str) -> None:
    """Export the metrics of a child's endpoint; `tier`: the name of the tier above the node."""
    _export(metrics, child, node, tier=tier, connection=child.session.parent, peers=child.link.peers)


def export_parent(metrics: Metrics, parent: ParentEndpoint, node: NodeLabels, *, tier: str) -> None:
    """Export the metrics of a parent's endpoint: its children, their links, its broker and what it refused.

    `tier`: the name of the tier below the node.
    """
    session, ways = parent.session, parent.link.ways
    coordinator, ledger = session.coordinator, session.ledger
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
        return [((name,), UP[state]) for name, state in coordinator.states().items() if state in UP]

    def idle() -> Reading:
        return [((name,), idle_s) for name, idle_s in coordinator.idle(parent.now()).items()]

    def statistic(topic: str) -> Reading:
        return [((broker,), parent.statistics.values[topic])] if topic in parent.statistics.values else []

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
    metrics: Metrics, endpoint: Endpoint, node: NodeLabels, *, tier: str, connection: str, peers: Sequence[str]
) -> None:
    """Export an endpoint's counts; `connection`: the parent that it serves, or `BROKER` for all children."""
    link, mqtt = endpoint.link, endpoint.connection

    def tallies(part: str) -> Reading:
        cells = dict.fromkeys(product(peers, DIRECTIONS, KINDS), 0)
        return (cells | {cell: getattr(tally, part) for cell, tally in list(link.counters.cells.items())}).items()

    def wire() -> Reading:
        sample = mqtt.meter.sample()
        carried = (("sent", sample.sent), ("received", sample.received))
        return [((connection, direction), count) for direction, count in carried] if sample.measured else []

    def retransmitted() -> Reading:
        sample = mqtt.meter.sample()
        known = sample.measured and not sample.retransmitted_unknown
        return [((connection,), sample.retransmitted)] if known else []

    def rtt() -> Reading:
        sample = mqtt.meter.sample()
        return [((connection,), sample.rtt_us / 1e6)] if sample.measured and sample.rtt_us else []

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
