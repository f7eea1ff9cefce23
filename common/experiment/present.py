"""The topology of the lab that is there: `topology = "lab"` in an experiment."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from common.errors import DuplicateName, InvalidExperiment
from common.experiment.tables import LISTED_MOST
from common.experiment.topology import CLOUD

LAB: Final = "lab"


@dataclass(frozen=True, slots=True)
class PresentNode:
    """A node that is there; `role`: institution or device; `host`: the name of its machine."""

    name: str
    role: str
    parent: str
    host: str = ""


def topology_of(nodes: Sequence[PresentNode], *, unfit: int = 0) -> tuple[dict[str, Any], list[str]]:
    """Return the `topology` table of the nodes that are there, and one line for each node that has no place in it.

    All institutions with a device and all devices whose parent is there take part. Names are in the order of their
    numbers, device-2 before device-10. `unfit`: how many others are there and cannot take part, as was reported. Raises
    DuplicateName; InvalidExperiment if no device could take part, or if the lab has no form of one or two tiers.
    """
    for name, count in Counter(n.name for n in nodes).items():
        if count > 1:
            hosts = " and ".join(n.host for n in nodes if n.name == name)
            raise DuplicateName(f"{count} nodes of the lab are called {name!r}, on {hosts}. Give each its own name.")
    institutions = [n for n in _in_order(nodes) if n.role == "institution"]
    devices = [n for n in _in_order(nodes) if n.role == "device"]
    names = {n.name for n in institutions}
    for n in institutions:
        if n.parent in names:
            problem = f"{n.name} is below {n.parent}, so the lab has more than two tiers"
            raise InvalidExperiment("topology", LAB, problem, "Describe it by [[tiers]].")
    below: dict[str, list[str]] = {CLOUD: [], **{n.name: [] for n in institutions if n.parent == CLOUD}}
    left_out = []
    for n in (*institutions, *devices):
        if n.parent not in below:
            left_out.append(f"{n.name} is left out: its parent {n.parent!r} is not there")
        elif n.role == "device":
            below[n.parent].append(n.name)
    direct = below.pop(CLOUD)
    left_out += [f"{name} is left out: it has no device" for name, each in below.items() if not each]
    members = {name: each for name, each in below.items() if each}
    if direct and members:
        problem = f"some devices are below institutions, others below the cloud ({', '.join(direct[:LISTED_MOST])})"
        raise InvalidExperiment("topology", LAB, problem, "Start all with an institution as --parent, or none.")
    if direct:
        return {"institutions": 0, "devices": direct}, left_out
    if not members:
        remedy = f"Fix the {unfit} nodes that are left out, as above." if unfit else "Start devices first."
        raise InvalidExperiment("topology", LAB, "no device is there that could take part", remedy)
    taking_part = [n.name for n in devices if n.parent in members]
    return {"institutions": list(members), "devices": taking_part, "members": members}, left_out


def _in_order(nodes: Iterable[PresentNode]) -> list[PresentNode]:
    """Return nodes by name, numbers in names compared as numbers."""

    def parts(node: PresentNode) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", node.name)]

    return sorted(nodes, key=parts)
