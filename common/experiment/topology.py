"""The short form of a lab's nodes: a cloud, institutions or none, and devices (`tiers.py` has the general one).

The nodes may be those that are present when the cloud begins, `topology = "lab"`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Final

from pydantic import Field

from common.errors import DuplicateName, InvalidExperiment
from common.experiment.tables import LISTED_MOST, Name, SettingsTable

CLOUD: Final = "cloud"
RESERVED: Final = frozenset({CLOUD, "all"})  # `all` is the broadcast stream
LAB: Final = "lab"


class Topology(SettingsTable):
    """The nodes of a lab of one or two tiers, and the institution of each device.

    `topology = "lab"` stands for all institutions and devices that are there when `fedstrata cloud` begins.
    """

    # A number makes the names `institution-0`, `institution-1`, ...; a list gives them; 0 = devices below the cloud.
    institutions: Annotated[int, Field(ge=0, le=1_000_000)] | list[Name] = 1
    # All devices of the lab: a number makes `device-0`, `device-1`, ...; a list gives names.
    devices: Annotated[int, Field(ge=1, le=100_000_000)] | list[Name] = 1
    # The devices of each institution. Without it, institutions get consecutive devices, in numbers that differ by at
    # most one.
    members: dict[Name, list[Name]] = Field(default_factory=dict)

    def institution_names(self) -> list[str]:
        """Return the institutions in order."""
        return _names("institution", self.institutions)

    def device_names(self) -> list[str]:
        """Return all devices in order; a device's position in this list is the number of its data partition."""
        return _names("device", self.devices)

    def layers(self) -> list[dict[str, list[str]]]:
        """Return the children of each parent, by layer from the cloud down."""
        if self.institutions == 0:
            return [{CLOUD: self.device_names()}]
        return [{CLOUD: self.institution_names()}, self.homes()]

    def homes(self) -> dict[str, list[str]]:
        """Return each institution's devices: those of `members`, else contiguous blocks, sizes within 1."""
        if self.members or not self.institutions:
            return {name: list(self.members.get(name, [])) for name in self.institution_names()}
        devices = self.device_names()
        ends = self._ends()
        names = self.institution_names()
        return {name: devices[start:end] for name, start, end in zip(names, [0, *ends[:-1]], ends, strict=True)}

    def sizes(self) -> list[list[int]]:
        """Return the number of children of each parent, by layer, without generating names: there may be millions."""
        if self.institutions == 0:
            return [[_count(self.devices)]]
        if self.members:
            return [[_count(self.institutions)], [len(devices) for devices in self.homes().values()]]
        return [[_count(self.institutions)], [end - start for start, end in pairwise([0, *self._ends()])]]

    def _ends(self) -> list[int]:
        institutions, devices = _count(self.institutions), _count(self.devices)
        return [devices * (m + 1) // institutions for m in range(institutions)]


@dataclass(frozen=True, slots=True)
class PresentNode:
    """A node that is there; `role`: institution or device; `host`: the name of its machine."""

    name: str
    role: str
    parent: str
    host: str = ""


def check_topology(topology: Topology) -> None:
    if isinstance(topology.institutions, list) or isinstance(topology.devices, list) or topology.members:
        _check_names(topology)
    for parent, size in enumerate(topology.sizes()[-1]):
        if size == 0:
            name = topology.institution_names()[parent] if topology.institutions else CLOUD
            problem, remedy = f"{name} would have no device", "Use at least one device per institution."
            raise InvalidExperiment("topology.devices", _count(topology.devices), problem, remedy)


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


def _check_names(topology: Topology) -> None:
    institutions, devices = topology.institution_names(), topology.device_names()
    if topology.institutions == []:
        remedy = "Use at least one institution, or 0 for a cloud and devices."
        raise InvalidExperiment("topology.institutions", [], "no institution", remedy)
    for key, names in (("topology.institutions", institutions), ("topology.devices", devices)):
        if len(set(names)) < len(names):
            double = next(name for name, times in Counter(names).items() if times > 1)
            raise InvalidExperiment(key, double, "duplicate name", "Give every node its own name.")
    both = set(institutions) & set(devices)
    for name in [*institutions, *devices]:
        if name in RESERVED or name in both:
            problem = "the name is reserved" if name in RESERVED else "two roles share this name"
            raise InvalidExperiment("topology", name, problem, "Give every node its own name.")
    children = topology.homes()
    for unknown in (name for name in topology.members if name not in children):
        raise InvalidExperiment(
            f"topology.members.{unknown}",
            topology.members[unknown],
            "no institution has this name",
            f"Use one of topology.institutions: {', '.join(institutions)}." if institutions else "Remove it.",
        )
    homes = Counter(device for members in children.values() for device in members)
    for device in devices if institutions else ():
        if homes[device] != 1:
            problem = "is in no institution" if device not in homes else "is in more than one institution"
            raise InvalidExperiment("topology.members", device, problem, "List each device in exactly one institution.")
    for device in homes.keys() - set(devices):
        raise InvalidExperiment("topology.members", device, "not a device of topology.devices", "Add it there.")


def _count(given: int | list[str]) -> int:
    return given if isinstance(given, int) else len(given)


def _names(kind: str, given: int | list[str]) -> list[str]:
    return [f"{kind}-{i}" for i in range(given)] if isinstance(given, int) else list(given)


def _in_order(nodes: Iterable[PresentNode]) -> list[PresentNode]:
    """Return nodes by name, numbers in names compared as numbers."""

    def parts(node: PresentNode) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", node.name)]

    return sorted(nodes, key=parts)
