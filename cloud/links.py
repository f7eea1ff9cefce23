"""Rows of links.csv: per link and direction the bytes of models, of their extras, of control messages, and of all.

The `all` rows have three counts: payload (blobs and message bodies), MQTT packets, and the bytes of the child's broker
connection, as its kernel counted them. That connection carries only this link. So the kernel's count exceeds the others
by logins, subscriptions, presences, acknowledgements and pings. The child is the sender of the upward direction, and
its kernel knows the retransmissions of that direction only. A parent's connection carries all its links and has its own
rows, `broker`. Counts without kernel statistics are empty.

Payload and packets are counted on arrival. Wire bytes are those of the child's last report: during a run they lag
behind, and the unreported bytes of a killed child are missing. Before the run each link was calibrated
(`measured_mbit`) with `probe_bytes` of noise. The wire bytes include the noise, the other counts and the overhead do
not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Final, NamedTuple

from cloud.records import BROKER, LinkRecord
from common.accounting.child_report import ChildReport
from common.accounting.counters import LINK_KINDS, Direction
from common.accounting.ledger import Ledger
from common.accounting.traffic import Measured, TcpStats, Traffic
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD

MEASURED: Final = "counted by the kernels (TCP_INFO)"
UNMEASURED: Final = "not available on this platform"


def records(reports: Mapping[str, ChildReport], wire: TcpStats, experiment: Experiment) -> list[LinkRecord]:
    """Return the rows of all links in the run, from the cloud down, then those of the parents' connections.

    `reports`, `wire`: the cloud's byte ledger's reports on all nodes, and its own connection.
    """
    tree, tiers = experiment.tree, experiment.tier_names
    table = [record for link in _links(reports, experiment) for record in _link_records(link)]
    brokers = [(tiers[0], CLOUD, wire)]
    brokers += [(tiers[tree.depth(name)], name, reports[name].broker) for name in tree.aggregators if name in reports]
    for tier, parent, counted in brokers:
        table.append(_sent(LinkRecord(tier=tier, from_=parent, to=BROKER, kind=BROKER), counted))
        table.append(_received(LinkRecord(tier=tier, from_=BROKER, to=parent, kind=BROKER), counted))
    return table


def tier_bytes(ledger: Ledger, tiers: Sequence[str]) -> dict[str, int]:
    """Return the MQTT bytes of all links by tier and direction, `wan_up_bytes`, `wan_down_bytes`, and so on.

    `tiers`: the tiers' names from the cloud down.
    """
    counted = chain(ledger.tiers(), repeat(Traffic()))  # nothing is known before the first report
    sums = zip(tiers, counted, strict=False)
    ways = [(tier, way, count) for tier, links in sums for way, count in (("up", links.received), ("down", links.sent))]
    return {f"{tier}_{way}_bytes": count for tier, way, count in ways}


def wire_status(reports: Mapping[str, ChildReport], experiment: Experiment) -> str:
    """Return whether all links have wire bytes, and which have none; "" before the first report of a child."""
    links = _links(reports, experiment)
    counted = {link.child: link.traffic.wire for link in links if link.traffic.wire.connections}
    missing = [child for child, wire in counted.items() if not wire.measured]
    if not missing:
        return MEASURED if counted else ""
    return UNMEASURED if len(missing) == len(counted) else f"{UNMEASURED}: {', '.join(missing)}"


class _Link(NamedTuple):
    tier: str
    parent: str
    child: str
    traffic: Traffic
    measured: Measured


def _links(reports: Mapping[str, ChildReport], experiment: Experiment) -> Iterator[_Link]:
    tree = experiment.tree
    for name in tree.below(CLOUD):
        if name in reports:
            report = reports[name]
            yield _Link(experiment.tier_above(name).name, tree.parent(name), name, report.traffic, report.measured)


def _link_records(link: _Link) -> list[LinkRecord]:
    """Return a link's rows; `traffic.sent_*` is the downward direction, `received_*` the upward one."""
    tier, parent, child, traffic, before = link
    down = _calibrated(LinkRecord(tier=tier, from_=parent, to=child, kind="all"), before.down, before.down_bytes)
    up = _calibrated(LinkRecord(tier=tier, from_=child, to=parent, kind="all"), before.up, before.up_bytes)
    return [
        *_direction(_received(down, traffic.wire), traffic, "sent"),
        *_direction(_sent(up, traffic.wire), traffic, "received"),
    ]


def _direction(whole: LinkRecord, traffic: Traffic, direction: Direction) -> list[LinkRecord]:
    """Return the rows of one direction by kind, those of extras only if there were any, and of all kinds.

    The overhead is the excess of wire bytes over payload; it is empty where the child's report lags behind.
    """
    parts = [
        LinkRecord(
            tier=whole.tier,
            from_=whole.from_,
            to=whole.to,
            kind=kind,
            payload_bytes=getattr(traffic, f"{direction}_{kind}_payload"),
            message_bytes=getattr(traffic, f"{direction}_{kind}_message"),
        )
        for kind in LINK_KINDS
    ]
    total = sum(part.payload_bytes or 0 for part in parts)
    message = sum(part.message_bytes or 0 for part in parts)
    carried = (whole.wire_bytes or 0) - (whole.probe_bytes or 0)
    overhead = 100 * (carried - total) / total if 0 < total <= carried else None
    whole = replace(whole, payload_bytes=total, message_bytes=message, overhead_percent=overhead)
    return [*(part for part in parts if part.message_bytes or part.kind != "extras"), whole]


def _calibrated(record: LinkRecord, rate: float, probe_bytes: int) -> LinkRecord:
    """Add the calibration before the run, `rate` in bytes per second."""
    return replace(record, measured_mbit=rate * 8e-6, probe_bytes=probe_bytes) if rate else record


def _sent(record: LinkRecord, wire: TcpStats) -> LinkRecord:
    """Add the counts of the direction in which the node itself sends."""
    if not wire.measured:
        return record
    return replace(
        _with_rtt(record, wire),
        wire_bytes=wire.sent,
        segments=wire.sent_segments,
        retransmitted_bytes=None if wire.retransmitted_unknown else wire.retransmitted,
        retransmitted_segments=wire.retransmitted_segments,
    )


def _received(record: LinkRecord, wire: TcpStats) -> LinkRecord:
    if not wire.measured:
        return record
    return replace(_with_rtt(record, wire), wire_bytes=wire.received, segments=wire.received_segments)


def _with_rtt(record: LinkRecord, wire: TcpStats) -> LinkRecord:
    return replace(record, rtt_ms=wire.rtt_us / 1000 or None, rtt_min_ms=wire.rtt_min_us / 1000 or None)
