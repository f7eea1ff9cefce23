"""The short form of a lab of one or two tiers: a cloud, institutions or none, and devices.

Files have either form. Inside there are `[[tiers]]` only (`schema.py`): the short form becomes
tiers when it is read, `wan` between the cloud and its children and `lan` between institutions and
devices, and is written again for people. The nodes may be those that are present when the cloud
begins, `topology = "lab"`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any, Final

from pydantic import Field

from fedstrata.common.errors import DuplicateName, InvalidExperiment
from fedstrata.common.experiment.schema import (
    SHORT,
    Experiment,
    ExperimentSettings,
    TransferSettings,
)
from fedstrata.common.experiment.tiers import DEVICE, RoundSettings, Tier, shares
from fedstrata.common.model.codec_settings import Codecs
from fedstrata.common.settings.cloud import CloudSettings
from fedstrata.common.settings.links import Links, LinkSettings
from fedstrata.common.settings.tables import LISTED_MOST, Count, Name, SettingsTable
from fedstrata.common.settings.topology import CLOUD, RESERVED
from fedstrata.common.text import counted

LAB: Final = "lab"
INSTITUTION: Final = "institution"


class Topology(SettingsTable):
    """The nodes of a lab of one or two tiers, and the institution of each device.

    `topology = "lab"` stands for all institutions and devices that are present when `fedstrata
    cloud` begins.
    """

    # A number makes the names `institution-0`, `institution-1`, ...; a list gives them; 0 = devices
    # below the cloud.
    institutions: Annotated[int, Field(ge=0, le=1_000_000)] | list[Name] = 1
    # All devices of the lab: a number makes `device-0`, `device-1`, ...; a list gives names.
    devices: Annotated[int, Field(ge=1, le=100_000_000)] | list[Name] = 1
    # The devices of each institution. Without it, institutions get consecutive devices, in numbers
    # that differ by at most one.
    members: dict[Name, list[Name]] = Field(default_factory=dict)

    def tiers(self) -> list[dict[str, Any]]:
        """Return the name of each tier, what its children are, and their number or names."""
        devices = {CLOUD: self.device_names()} if isinstance(self.devices, list) else {}
        if self.institutions == 0:
            return [{"name": "wan", "children": DEVICE, **_children(self.devices, devices)}]
        if isinstance(self.institutions, list):
            institutions = {CLOUD: self.institution_names()}
        else:
            institutions = {}
        upper = {
            "name": "wan",
            "children": INSTITUTION,
            **_children(self.institutions, institutions),
        }
        if devices or self.members:
            devices = self.homes()
        return [upper, {"name": "lan", "children": DEVICE, **_children(self.devices, devices)}]

    def institution_names(self) -> list[str]:
        """Return the institutions in order."""
        return _names(INSTITUTION, self.institutions)

    def device_names(self) -> list[str]:
        """Return all devices in order."""
        return _names(DEVICE, self.devices)

    def homes(self) -> dict[str, list[str]]:
        """Return each institution's devices: those of `members`, else contiguous blocks, sizes
        within 1.
        """
        institutions = self.institution_names()
        devices = self.device_names()
        if self.members or not institutions:
            return {name: list(self.members.get(name, [])) for name in institutions}
        ends = accumulate(shares(len(devices), len(institutions)), initial=0)
        return {
            name: devices[start:end]
            for name, (start, end) in zip(institutions, pairwise(ends), strict=True)
        }


class Cloud(CloudSettings, RoundSettings):
    """The cloud's global rounds over the institutions selected, and what it does besides."""


class Institution(RoundSettings):
    """An institution's local rounds over the devices selected."""

    rounds: Count = 1  # local rounds in each global round (tau_i)


class LinksOfTiers(Links):
    """The links of the two tiers: `wan` between cloud and institution, `lan` between institution
    and device.

    `links.of.NODE` is the link of a single node to its parent. A link is a table, or the name of a
    profile.
    """

    wan: LinkSettings = LinkSettings()
    lan: LinkSettings = LinkSettings()


class TransferOfTiers(TransferSettings):
    """How models are transferred, and how long a node may make no progress."""

    wan: Codecs = Codecs()
    lan: Codecs = Codecs()


class ShortForm(ExperimentSettings):
    """All that defines a run. Equal experiments with equal seeds give equal models, bit for bit, on
    CPUs.
    """

    topology: Topology = Topology()
    cloud: Cloud = Cloud()
    institution: Institution = Institution()
    links: LinksOfTiers = LinksOfTiers()
    transfer: TransferOfTiers = TransferOfTiers()

    def experiment(self) -> Experiment:
        """Return the experiment, with tiers. Raises InvalidExperiment."""
        check_topology(self.topology)
        rounds = (_values(RoundSettings, self.cloud), _values(Institution, self.institution))
        tiers = [
            Tier(
                **nodes,
                **own,
                link=getattr(self.links, name),
                transfer=getattr(self.transfer, name),
            )
            for nodes, own, (name, _) in zip(self.topology.tiers(), rounds, SHORT, strict=False)
        ]
        if len(tiers) == 1:
            self._check_no_institution()
        parts: dict[str, type[SettingsTable]] = {
            "cloud": CloudSettings,
            "links": Links,
            "transfer": TransferSettings,
        }
        plain = {key: table(**_values(table, getattr(self, key))) for key, table in parts.items()}
        return Experiment(**{**_values(ExperimentSettings, self), **plain, "tiers": tiers})

    def _check_no_institution(self) -> None:
        """Check that no key is set that has no effect without institutions."""
        for key, found, default in (
            ("institution", self.institution, Institution()),
            ("links.lan", self.links.lan, LinkSettings()),
            ("transfer.lan", self.transfer.lan, Codecs()),
        ):
            if found != default:
                at, value = _difference(key, found, default)
                raise InvalidExperiment(at, value, "this lab has no institution", f"Remove {key}.")


def short_key(path: Sequence[str]) -> list[str]:
    """Return the short form's key of `tiers.NAME.KEY...`. Raises InvalidExperiment where it has
    none.
    """
    _, name, key, *below = path
    table = {"wan": CLOUD, "lan": INSTITUTION}.get(name)
    if key in ("link", "transfer") and table:
        return ["links" if key == "link" else key, name, *below]
    if table is None:
        remedy = "Its tiers are wan and lan: use one of them, or [[tiers]]."
        raise InvalidExperiment("--set", ".".join(path), "the file has no such tier", remedy)
    return [table, key, *below]


def as_written(experiment: Experiment) -> dict[str, Any]:
    """Return the tree of a file of this experiment: in the short form where it has one."""
    tree: dict[str, Any] = experiment.model_dump(mode="json", exclude_none=True)
    if not experiment.is_short:
        return tree
    first = experiment.tiers[0]
    last = experiment.tiers[-1]
    topology: dict[str, Any] = {"institutions": 0}
    if last is not first:
        topology = {"institutions": first.number or first.members[CLOUD]}
    topology["devices"] = last.number or [name for names in last.members.values() for name in names]
    if last is not first and last.members:
        topology["members"] = last.members
    return {"topology": topology, **by_table(tree)}


def by_table(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return an experiment's tree with a table of rounds for each kind of parent, as the short form
    has them.

    The links and transfers of tiers are below their names. The nodes are left out.
    """
    tables = {key: value for key, value in tree.items() if key != "tiers"}
    parent = CLOUD
    for tier in tree["tiers"]:
        keys = RoundSettings.model_fields.keys() | ({"rounds"} if parent != CLOUD else set())
        tables[parent] = {
            **tables.get(parent, {}),
            **{key: tier[key] for key in tier if key in keys},
        }
        for table, key in (("links", "link"), ("transfer", "transfer")):
            tables[table] = {**tables.get(table, {}), tier["name"]: tier.get(key, {})}
        parent = tier.get("children", DEVICE)
    return tables


@dataclass(frozen=True, slots=True)
class PresentNode:
    """A node that is there; `role`: institution or device; `host`: the name of its machine."""

    name: str
    role: str
    parent: str
    host: str = ""


def check_topology(topology: Topology) -> None:
    """Check that all names differ, and that each institution has a device. Raises
    InvalidExperiment.
    """
    if (
        isinstance(topology.institutions, list)
        or isinstance(topology.devices, list)
        or topology.members
    ):
        _check_names(topology)
    institutions = _count(topology.institutions)
    devices = _count(topology.devices)
    without = ""
    if topology.members:
        without = next((name for name, names in topology.homes().items() if not names), "")
    elif devices < max(1, institutions):
        without = topology.institution_names()[0] if institutions else CLOUD
    if without:
        problem = f"{without} would have no device"
        remedy = "Use at least one device per institution."
        raise InvalidExperiment("topology.devices", devices, problem, remedy)


def topology_of(
    nodes: Sequence[PresentNode], *, unfit: int = 0
) -> tuple[dict[str, Any], list[str]]:
    """Return the `topology` table of the nodes that are there, and one line for each node that has
    no place in it.

    All institutions with a device and all devices whose parent is there take part. Names are in the
    order of their numbers, device-2 before device-10. `unfit`: how many others are there and cannot
    take part, as was reported. Raises DuplicateName; InvalidExperiment if no device could take
    part, or if the lab has no form of one or two tiers.
    """
    for name, count in Counter(n.name for n in nodes).items():
        if count > 1:
            hosts = " and ".join(n.host for n in nodes if n.name == name)
            raise DuplicateName(
                f"{count} nodes of the lab are called {name!r}, on {hosts}. Give each its own name."
            )
    institutions = [n for n in _in_order(nodes) if n.role == "institution"]
    devices = [n for n in _in_order(nodes) if n.role == "device"]
    names = {n.name for n in institutions}
    for n in institutions:
        if n.parent in names:
            problem = f"{n.name} is below {n.parent}, so the lab has more than two tiers"
            raise InvalidExperiment("topology", LAB, problem, "Describe it by [[tiers]].")
    below: dict[str, list[str]] = {
        CLOUD: [],
        **{n.name: [] for n in institutions if n.parent == CLOUD},
    }
    left_out = []
    for n in (*institutions, *devices):
        if n.parent not in below:
            left_out.append(f"{n.name} is left out: its parent {n.parent!r} is not there")
        elif n.role == "device":
            below[n.parent].append(n.name)
    direct = below.pop(CLOUD)
    left_out += [
        f"{name} is left out: it has no device" for name, each in below.items() if not each
    ]
    members = {name: each for name, each in below.items() if each}
    if direct and members:
        problem = (
            "some devices are below institutions, others below the cloud "
            f"({', '.join(direct[:LISTED_MOST])})"
        )
        raise InvalidExperiment(
            "topology", LAB, problem, "Start all with an institution as --parent, or none."
        )
    if direct:
        return {"institutions": 0, "devices": direct}, left_out
    if not members:
        if unfit:
            remedy = f"Fix what is left out as above: {counted(unfit, 'nodes')}."
        else:
            remedy = "Start devices first."
        raise InvalidExperiment("topology", LAB, "no device is there that could take part", remedy)
    taking_part = [n.name for n in devices if n.parent in members]
    return {"institutions": list(members), "devices": taking_part, "members": members}, left_out


def _check_names(topology: Topology) -> None:
    institutions = topology.institution_names()
    devices = topology.device_names()
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
        key = f"topology.members.{unknown}"
        remedy = f"Use one of topology.institutions: {', '.join(institutions)}."
        remedy = remedy if institutions else "Remove it."
        raise InvalidExperiment(
            key, topology.members[unknown], "no institution has this name", remedy
        )
    homes = Counter(device for members in children.values() for device in members)
    for device in devices if institutions else ():
        if homes[device] != 1:
            if device not in homes:
                problem = "is in no institution"
            else:
                problem = "is in more than one institution"
            raise InvalidExperiment(
                "topology.members", device, problem, "List each device in exactly one institution."
            )
    for device in homes.keys() - set(devices):
        raise InvalidExperiment(
            "topology.members", device, "not a device of topology.devices", "Add it there."
        )


def _count(given: int | list[str]) -> int:
    if isinstance(given, int):
        return given
    return len(given)


def _names(kind: str, given: int | list[str]) -> list[str]:
    if isinstance(given, int):
        return [f"{kind}-{i}" for i in range(given)]
    return list(given)


def _in_order(nodes: Iterable[PresentNode]) -> list[PresentNode]:
    """Return nodes by name, numbers in names compared as numbers."""

    def parts(node: PresentNode) -> list[tuple[int, str]]:
        return [
            (int(part), "") if part.isdigit() else (-1, part)
            for part in re.split(r"([0-9]+)", node.name)
        ]

    return sorted(nodes, key=parts)


def _children(given: int | list[str], members: Mapping[str, list[str]]) -> dict[str, Any]:
    if members:
        return {"members": members}
    return {"number": _count(given)}


def _values(table: type[SettingsTable], found: SettingsTable) -> dict[str, Any]:
    """Return the values of the keys of a table, from a table that has more."""
    return {key: getattr(found, key) for key in table.model_fields}


def _difference(key: str, found: object, default: object) -> tuple[str, object]:
    """Return the first key below a table that is not its default, and the value there."""
    if isinstance(found, SettingsTable) and type(found) is type(default):
        for name in type(found).model_fields:
            one = getattr(found, name)
            other = getattr(default, name)
            if one != other:
                return _difference(f"{key}.{name}", one, other)
    if isinstance(found, SettingsTable):  # of another name, as rules and selectors have one
        return f"{key}.name", getattr(found, "name", "")
    return key, found
