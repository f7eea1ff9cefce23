"""Sections of a report about links: bytes by tier and link, and the topology with its rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from cloud.records import BROKER, LinkRecord
from common.accounting.counters import LINK_KINDS
from common.experiment.topology import CLOUD
from deploy.console.tabular import Cell, Column, Table
from deploy.report import charts, maps
from deploy.report.charts import Axis
from deploy.report.figures import Figure
from deploy.report.maps import NODES_MOST, Rates
from deploy.runs.run import Run

FOLD: Final = 60  # rows of links.csv beyond which the table is folded

BYTES: Final = (
    "Payload and MQTT packets are counted by the receiver. The TCP stream is the kernel's count for the child's own "
    "broker connection (TCP_INFO); it includes logins, acknowledgements and pings, but not the noise bytes of the link "
    "calibration before the run. It is as of the child's last report. TCP and IP headers are not counted."
)
DIRECT: Final = (
    "This run used no network: bytes are the payload of whole models, seconds are one machine's computing time with "
    "devices trained one after another. Links were declared, but not enforced."
)
TOPOLOGY: Final = "Rates as declared in the experiment, and as measured before the run if link calibration was on."

_BYTE_PARTS: Final = (
    ("fill-s0", "models"),
    ("fill-s3", "extras"),
    ("fill-s2", "control"),
    ("fill-s4", "MQTT's own"),
    ("fill-s1", "rest of TCP"),
)
_THREE: Final = (Column("payload"), Column("MQTT packets"), Column("TCP stream"))


def file_name(name: str, run: Run) -> str:
    """Return a file name that is unique to the run."""
    return f"{name}-{run.id.rpartition('-')[2]}"


def bytes_axis(name: str, lines: Mapping[str, Sequence[charts.Point]]) -> Axis:
    """Return an axis in the byte unit that suits the largest x."""
    most = max((x for line in lines.values() for x, _ in line), default=0.0)
    unit, factor = next(((u, f) for u, f in (("GB", 1e-9), ("MB", 1e-6), ("kB", 1e-3)) if most * f >= 1), ("B", 1.0))
    return Axis(name, unit, factor)


def traffic(run: Run) -> Figure:
    """Return a figure of each tier's bytes: models, extras if any, control messages, MQTT overhead, TCP overhead."""
    rows = {}
    for (tier, direction), found in _by_direction(run).items():
        payloads = [sum(link.payload_bytes or 0 for link in found if link.kind == kind) for kind in LINK_KINDS]
        whole = [link for link in found if link.kind == "all"]
        message = sum(link.message_bytes or 0 for link in whole)
        wire = _carried(whole)
        rest = 0 if wire is None else max(0, wire - message)
        rows[f"{tier.upper()} {direction}"] = [*payloads, message - sum(payloads), rest]
    axis = bytes_axis("bytes", {"": [(sum(values), 0.0) for values in rows.values()]})
    shown = [i for i, (_, part) in enumerate(_BYTE_PARTS) if part != "extras" or any(row[i] for row in rows.values())]
    parts = [_BYTE_PARTS[i] for i in shown]
    rows = {name: [row[i] for i in shown] for name, row in rows.items()}
    return charts.bars(file_name("bytes", run), "Bytes of the run", parts, rows, axis=axis)


def tiers(run: Run) -> Table:
    """Return the three byte counts of each tier and direction, and the prediction for a global round if any."""
    count, prediction = max(len(run.rounds), 1), run.prediction
    columns = [
        Column("tier", text=True),
        Column("direction", text=True),
        *_THREE,
        Column("MQTT a global round", digits=0),
    ]
    columns += [Column("predicted", digits=0)] * (prediction is not None)
    rows: list[list[Cell]] = []
    for (tier, direction), found in _by_direction(run).items():
        whole = [link for link in found if link.kind == "all"]
        message = sum(link.message_bytes or 0 for link in whole)
        payload = sum(link.payload_bytes or 0 for link in whole)
        line: list[Cell] = [tier.upper(), direction, payload, message, _carried(whole), message / count]
        if prediction is not None:
            predicted = [prediction.bytes_[link.goes] for link in whole if link.goes in prediction.bytes_]
            line.append(sum(predicted) if predicted else None)
        rows.append(line)
    return Table(file_name("tiers", run), "Bytes by tier and direction", columns, rows)


def links(run: Run) -> Table:
    """Return the rows of links.csv, with the declared rates; without the links of more than NODES_MOST devices."""
    columns = [Column("tier", text=True), Column("from", text=True), Column("to", text=True), Column("kind", text=True),
               Column("payload"), Column("MQTT"), Column("TCP, noise included"), Column("noise before the run"),
               Column("over payload", "%", 2), Column("sent again"), Column("round trip", "ms", 2),
               Column("least", "ms", 3), Column("declared", "Mbit/s"), Column("measured", "Mbit/s", 2)]  # fmt: skip
    rows: list[list[Cell]] = []
    of, title, devices = _declared_links(run), "Bytes of each link", frozenset[str]()
    if len(run.nodes.devices) > NODES_MOST:
        devices = frozenset(run.nodes.devices)
        title += f" but those of the {len(devices)} devices (links.csv has them)"
    for link in run.links:
        if link.to in devices or link.from_ in devices:
            continue
        declared = _declared(run, link, of) if link.kind == "all" else None
        rows.append([link.tier, link.from_, link.to, link.kind, link.payload_bytes, link.message_bytes, link.wire_bytes,
                     link.probe_bytes or 0, link.overhead_percent, link.retransmitted_bytes, link.rtt_ms,
                     link.rtt_min_ms, declared, link.measured_mbit])  # fmt: skip
    return Table(file_name("links", run), title, columns, rows)


def topology(run: Run) -> Figure:
    """Return a drawing of the lab's nodes and links."""
    measured = {link.goes: link.measured_mbit for link in run.links if link.kind == "all"}
    rates = {}
    for name, link in _declared_links(run).items():
        parent = run.nodes.parent(name) if name in run.nodes else CLOUD
        declared = (_rate(link.get("down_mbit")), _rate(link.get("up_mbit")))
        seen = (measured.get(f"{parent} {name}"), measured.get(f"{name} {parent}"))
        rates[name] = Rates(declared, _rate(link.get("delay_ms")) or 0.0, seen)
    return maps.topology(file_name("topology", run), run.nodes, rates)


def _by_direction(run: Run) -> dict[tuple[str, str], list[LinkRecord]]:
    """Return the rows of the links by tier and direction."""
    found: dict[tuple[str, str], list[LinkRecord]] = {(tier, to): [] for tier in run.tiers for to in ("down", "up")}
    for link in run.links:
        if link.kind != BROKER and link.tier in run.tiers:
            found[link.tier, "down" if _goes_down(run, link) else "up"].append(link)
    return found


def _goes_down(run: Run, link: LinkRecord) -> bool:
    return link.to != CLOUD and link.to in run.nodes and run.nodes.parent(link.to) == link.from_


def _carried(whole: Sequence[LinkRecord]) -> int | None:
    """Return the bytes of the TCP streams without link calibration, or None if a child has not reported."""
    wires = [link.wire_bytes - (link.probe_bytes or 0) for link in whole if link.wire_bytes is not None]
    return sum(wires) if whole and len(wires) == len(whole) else None


def _declared_links(run: Run) -> dict[str, Mapping[str, Any]]:
    links = run.manifest.get("links")
    of = links.get("of") if isinstance(links, Mapping) else None
    return (
        {str(name): link for name, link in of.items() if isinstance(link, Mapping)} if isinstance(of, Mapping) else {}
    )


def _declared(run: Run, link: LinkRecord, of: Mapping[str, Mapping[str, Any]]) -> float | None:
    up, down = None if _goes_down(run, link) else of.get(link.from_), of.get(link.to)
    return _rate(up.get("up_mbit") if up is not None else (down or {}).get("down_mbit"))


def _rate(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
