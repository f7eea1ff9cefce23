"""The short form of a lab's nodes: a cloud, institutions or none, and devices (`tiers.py` has the general one)."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Annotated, Final

from pydantic import Field

from common.errors import InvalidExperiment
from common.experiment.tables import Name, SettingsTable

CLOUD: Final = "cloud"
RESERVED: Final = frozenset({CLOUD, "all"})  # `all` is the broadcast stream


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


def check_topology(topology: Topology) -> None:
    if isinstance(topology.institutions, list) or isinstance(topology.devices, list) or topology.members:
        _check_names(topology)
    for parent, size in enumerate(topology.sizes()[-1]):
        if size == 0:
            name = topology.institution_names()[parent] if topology.institutions else CLOUD
            problem, remedy = f"{name} would have no device", "Use at least one device per institution."
            raise InvalidExperiment("topology.devices", _count(topology.devices), problem, remedy)


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
