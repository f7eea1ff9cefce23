"""The links of a run in its report: bytes by tier and direction, and the lab with its rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fedstrata.cloud.records import BROKER, RARE, LinkRecord
from fedstrata.common.accounting.counters import LINK_KINDS
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.console.tabular import Cell, Column, Table
from fedstrata.deploy.results import charts, maps
from fedstrata.deploy.results.charts import Axis
from fedstrata.deploy.results.figures import Figure
from fedstrata.deploy.results.maps import Rates
from fedstrata.deploy.results.run import Run

BYTES: Final = (
    "Payload and MQTT packets are counted by the receiver. The TCP stream is the kernel's count "
    "for the child's own broker connection (TCP_INFO); it includes logins, acknowledgements and "
    "pings, but not the noise bytes of the link calibration before the run. It is as of the "
    "child's last report. TCP and IP headers are not counted."
)
DIRECT: Final = (
    "This run used no network: bytes are the payload of whole models, seconds are one machine's "
    "computing time with devices trained one after another. Links were declared, but not enforced."
)
SIMULATED: Final = (
    "These seconds are simulated: virtual ones, of the machines and links that manifest.json has. "
    "Models, messages and packets are those of a lab of processes; of a TCP stream the MQTT "
    "packets are counted."
)
TOPOLOGY: Final = (
    "Rates as declared in the experiment, and as measured before the run if link "
    "calibration was on."
)
_PARTS: Final = (
    ("s0", "models"),
    ("s3", "extras"),
    ("s5", "frozen arrays"),
    ("s2", "control"),
    ("s4", "MQTT's own"),
    ("s1", "rest of TCP"),
)
_UNITS: Final = (("GB", 1e-9), ("MB", 1e-6), ("kB", 1e-3))


def bytes_axis(name: str, most: float) -> Axis:
    """Return an axis in the byte unit that suits the largest number."""
    for unit, factor in _UNITS:
        if most * factor >= 1:
            return Axis(name, unit, factor)
    return Axis(name, "B")


@dataclass(frozen=True, slots=True)
class _Direction:
    """The bytes of a tier in one direction. `wire`: of the TCP streams without link calibration,
    None if a child has not reported.
    """

    tier: str
    way: str
    kinds: Sequence[int]  # payload of each of LINK_KINDS
    payload: int
    message: int
    wire: int | None


def _directions(run: Run) -> list[_Direction]:
    """Return the bytes of each tier and direction."""
    rows: dict[tuple[str, str], list[LinkRecord]] = {}
    for tier in run.tiers:
        rows[tier, "down"] = []
        rows[tier, "up"] = []
    for link in run.links:
        if link.kind != BROKER and link.tier in run.tiers:
            way = "down" if _goes_down(run, link) else "up"
            rows[link.tier, way].append(link)
    found = []
    for (tier, way), links in rows.items():
        kinds = [_payload(links, kind) for kind in LINK_KINDS]
        whole = [link for link in links if link.kind == "all"]
        message = sum(link.message_bytes or 0 for link in whole)
        found.append(
            _Direction(tier.upper(), way, kinds, _payload(links, "all"), message, _wire(whole))
        )
    return found


def _payload(links: Sequence[LinkRecord], kind: str) -> int:
    return sum(link.payload_bytes or 0 for link in links if link.kind == kind)


def _wire(whole: Sequence[LinkRecord]) -> int | None:
    wires = []
    for link in whole:
        if link.wire_bytes is None:
            return None
        wires.append(link.wire_bytes - (link.probe_bytes or 0))
    if wires:
        return sum(wires)
    return None


def _goes_down(run: Run, link: LinkRecord) -> bool:
    tree = run.experiment.tree
    return link.to != CLOUD and link.to in tree and tree.parent(link.to) == link.from_


def traffic(run: Run) -> Figure:
    """Return a figure of each tier's bytes: models, extras and frozen arrays if any, control
    messages, overheads.
    """
    rows = {}
    for each in _directions(run):
        rest = max(0, (each.wire or 0) - each.message)
        own = each.message - sum(each.kinds)
        rows[f"{each.tier} {each.way}"] = [*each.kinds, own, rest]
    axis = bytes_axis("bytes", max(map(sum, rows.values()), default=0.0))
    parts = []
    shown: dict[str, list[int]] = {name: [] for name in rows}
    for i, part in enumerate(_PARTS):
        counts = [row[i] for row in rows.values()]
        if any(counts) or i >= len(LINK_KINDS) or LINK_KINDS[i] not in RARE:
            parts.append(part)
            for name, row in rows.items():
                shown[name].append(row[i])
    return charts.bars(run.file_name("bytes"), "Bytes of the run", parts, shown, axis=axis)


def tiers(run: Run) -> Table:
    """Return the three byte counts of each tier and direction."""
    count = max(len(run.rounds), 1)
    columns = [
        Column("tier", text=True),
        Column("direction", text=True),
        Column("payload"),
        Column("MQTT packets"),
        Column("TCP stream"),
        Column("MQTT a global round", digits=0),
    ]
    rows: list[list[Cell]] = []
    for each in _directions(run):
        counts: list[Cell] = [each.payload, each.message, each.wire, each.message / count]
        rows.append([each.tier, each.way, *counts])
    return Table(run.file_name("tiers"), "Bytes by tier and direction", columns, rows)


def topology(run: Run) -> Figure:
    """Return a drawing of the lab's nodes and links."""
    tree = run.experiment.tree
    measured = {link.goes: link.measured_mbit for link in run.links if link.kind == "all"}
    rates = {}
    for name, link in declared_links(run).items():
        parent = tree.parent(name) if name in tree else CLOUD
        declared = (_rate(link.get("down_mbit")), _rate(link.get("up_mbit")))
        seen = (measured.get(f"{parent} {name}"), measured.get(f"{name} {parent}"))
        rates[name] = Rates(declared, _rate(link.get("delay_ms")) or 0.0, seen)
    return maps.topology(run.file_name("topology"), tree, rates)


def declared_links(run: Run) -> dict[str, Mapping[str, Any]]:
    """Return the links that the manifest has by node; a kept run's has none."""
    links = run.manifest.get("links")
    of = links.get("of") if isinstance(links, Mapping) else None
    known = of if isinstance(of, Mapping) else {}
    return {str(name): link for name, link in known.items() if isinstance(link, Mapping)}


def _rate(value: object) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return None
