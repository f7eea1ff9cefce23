"""Rows of links.csv: per link and direction the bytes of models, of control messages, and of both (`all`).

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

from typing import Final, NamedTuple, TypeAlias

from common.accounting.ledger import Ledger
from common.accounting.traffic import Measured, TcpStats, Traffic
from common.experiment.topology import CLOUD

FIELDS: Final = (
    "tier", "from", "to", "kind", "payload_bytes", "message_bytes", "wire_bytes", "overhead_percent", "segments",
    "retransmitted_bytes", "retransmitted_segments", "rtt_ms", "rtt_min_ms", "measured_mbit", "probe_bytes",
)  # fmt: skip
BROKER: Final = "broker"
MEASURED: Final = "counted by the kernels (TCP_INFO)"
UNMEASURED: Final = "not available on this platform"

Row: TypeAlias = dict[str, object]


def rows(ledger: Ledger) -> list[Row]:
    """Return the rows of all links in the run, WAN links first, then those of the parents' connections."""
    table = [row for link in _links(ledger) for row in _link_rows(link)]
    brokers = [("wan", CLOUD, ledger.broker())]
    brokers += [("lan", institution, wire) for institution, wire in ledger.brokers().items()]
    for tier, parent, wire in brokers:
        table.append({"tier": tier, "from": parent, "to": BROKER, "kind": BROKER, **_sent(wire)})
        table.append({"tier": tier, "from": BROKER, "to": parent, "kind": BROKER, **_received(wire)})
    return table


def wire_status(ledger: Ledger) -> str:
    """Return whether all links have wire bytes, and which have none; "" before the first report of a child."""
    counted = {link.child: link.traffic.wire for link in _links(ledger) if link.traffic.wire.connections}
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


def _links(ledger: Ledger) -> list[_Link]:
    links = [
        _Link("wan", CLOUD, name, traffic, ledger.measured.get(name, Measured()))
        for name, traffic in ledger.links().items()
    ]
    for institution, reports in ledger.reports().items():
        links += [_Link("lan", institution, report.name, report.traffic, report.measured) for report in reports]
    return links


def _link_rows(link: _Link) -> list[Row]:
    """Return a link's six rows; `traffic.sent_*` is the downward direction, `received_*` the upward one."""
    tier, parent, child, t, before = link
    down = _received(t.wire) | _before(before.down, before.down_bytes)
    up = _sent(t.wire) | _before(before.up, before.up_bytes)
    return [
        *_direction(tier, parent, child, (t.sent_model_payload, t.sent_control_payload),
                    (t.sent_model_message, t.sent_control_message), down),
        *_direction(tier, child, parent, (t.received_model_payload, t.received_control_payload),
                    (t.received_model_message, t.received_control_message), up),
    ]  # fmt: skip


def _direction(
    tier: str, source: str, target: str, payload: tuple[int, int], message: tuple[int, int], wire: Row
) -> list[Row]:
    """Return the three rows of one direction; `payload` and `message` are counts of models and of control messages."""
    link: Row = {"tier": tier, "from": source, "to": target}
    counts = zip(("model", "control", "all"), (*payload, sum(payload)), (*message, sum(message)), strict=True)
    found = [link | {"kind": kind, "payload_bytes": body, "message_bytes": packets} for kind, body, packets in counts]
    found[-1] |= wire | _overhead(wire, sum(payload))
    return found


def _before(rate: float, probe_bytes: int) -> Row:
    """Return the cells of the calibration before the run."""
    return {"measured_mbit": f"{rate * 8e-6:.4g}", "probe_bytes": probe_bytes} if rate else {}


def _sent(wire: TcpStats) -> Row:
    """Return the cells of the direction in which the node itself sends."""
    if not wire.measured:
        return {}
    return {
        "wire_bytes": wire.sent,
        "segments": wire.sent_segments,
        "retransmitted_bytes": "" if wire.retransmitted_unknown else wire.retransmitted,
        "retransmitted_segments": wire.retransmitted_segments,
        **_rtt(wire),
    }


def _received(wire: TcpStats) -> Row:
    if not wire.measured:
        return {}
    return {"wire_bytes": wire.received, "segments": wire.received_segments, **_rtt(wire)}


def _rtt(wire: TcpStats) -> Row:
    return {"rtt_ms": wire.rtt_us / 1000 or "", "rtt_min_ms": wire.rtt_min_us / 1000 or ""}


def _overhead(wire: Row, payload: int) -> Row:
    """Return the excess of wire bytes over payload in percent; empty where the child's report lags behind."""
    carried, probe = wire.get("wire_bytes"), wire.get("probe_bytes", 0)
    if not isinstance(carried, int) or not isinstance(probe, int) or payload == 0 or carried - probe < payload:
        return {}
    carried -= probe
    return {"overhead_percent": f"{100 * (carried - payload) / payload:.4g}"}
