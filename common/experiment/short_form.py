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
from itertools import islice
from typing import Annotated, Any, Final

from pydantic import Field

from fedstrata.common.errors import DuplicateName, InvalidExperiment
from fedstrata.common.experiment.schema import Experiment, ExperimentSettings, TransferSettings
from fedstrata.common.experiment.tiers import DEVICE, SHORT, RoundSettings, Tier, double, shares
from fedstrata.common.model.codec_settings import Codecs
from fedstrata.common.settings.cloud import CloudSettings
from fedstrata.common.settings.links import Links, LinkSettings
from fedstrata.common.settings.tables import LISTED_MOST, Count, Name, SettingsTable
from fedstrata.common.settings.topology import CLOUD, RESERVED, joined
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
        if self.institutions == 0:
            return [{"name": "wan", "children": DEVICE, **_children(self.devices)}]
        upper = {"name": "wan", "children": INSTITUTION, **_children(self.institutions)}
        lower = {"name": "lan", "children": DEVICE, **_children(self.devices)}
        if self.members or "members" in lower:
            lower = {"name": "lan", "children": DEVICE, "members": self.homes()}
        return [upper, lower]

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
        left = iter(devices)
        counts = zip(institutions, shares(len(devices), len(institutions)), strict=True)
        return {name: [*islice(left, count)] for name, count in counts}


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
        tiers = []
        for nodes, own, (name, _) in zip(self.topology.tiers(), rounds, SHORT, strict=False):
            link = getattr(self.links, name)
            tiers.append(Tier(**nodes, **own, link=link, transfer=getattr(self.transfer, name)))
        if len(tiers) == 1:
            self._check_no_institution()
        keys = _values(ExperimentSettings, self)
        keys["cloud"] = CloudSettings(**_values(CloudSettings, self.cloud))
        keys["links"] = Links(**_values(Links, self.links))
        keys["transfer"] = TransferSettings(**_values(TransferSettings, self.transfer))
        return Experiment(**keys, tiers=tiers)

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
    if table is None:
        remedy = "Its tiers are wan and lan: use one of them, or [[tiers]]."
        raise InvalidExperiment("--set", ".".join(path), "the file has no such tier", remedy)
    if key == "link":
        return ["links", name, *below]
    if key == "transfer":
        return [key, name, *below]
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
    topology["devices"] = last.number or joined(last.members.values())
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
    keys = {*RoundSettings.model_fields}
    for tier in tree["tiers"]:
        rounds = {key: tier[key] for key in tier if key in keys}
        tables[parent] = {**tables.get(parent, {}), **rounds}
        for table, key in (("links", "link"), ("transfer", "transfer")):
            tables[table] = {**tables.get(table, {}), tier["name"]: tier.get(key, {})}
        parent = tier.get("children", DEVICE)
        keys.add("rounds")  # the first tier's are the experiment's
    return tables


@dataclass(frozen=True, slots=True)
class PresentNode:
    """A node that is there; `role`: institution or device; `host`: the name of its machine."""

    name: str
    role: str
    parent: str
    host: str = ""


def check_topology(topology: Topology) -> None:
    """Check that names differ, and institutions have devices. Raises InvalidExperiment."""
    listed = isinstance(topology.institutions, list) or isinstance(topology.devices, list)
    if listed or topology.members:
        _check_names(topology)
    institutions = _count(topology.institutions)
    devices = _count(topology.devices)
    without = []
    if topology.members:
        without = [name for name, names in topology.homes().items() if not names]
    elif devices < max(1, institutions):
        without = topology.institution_names() or [CLOUD]
    if without:
        problem = f"{without[0]} would have no device"
        remedy = "Use at least one device per institution."
        raise InvalidExperiment("topology.devices", devices, problem, remedy)


def topology_of(
    nodes: Sequence[PresentNode], *, unfit: int = 0
) -> tuple[dict[str, Any], list[str]]:
    """Return the `topology` table of the nodes that are there, and a line for each other one.

    All institutions with a device and all devices whose parent is there take part. Names are in the
    order of their numbers, device-2 before device-10. `unfit`: how many others are there and cannot
    take part, as was reported. Raises DuplicateName; InvalidExperiment if no device could take
    part, or if the lab has no form of one or two tiers.
    """
    twice = double(n.name for n in nodes)
    if twice is not None:
        hosts = [n.host for n in nodes if n.name == twice]
        called = f"{len(hosts)} nodes of the lab are called {twice!r}, on {' and '.join(hosts)}"
        raise DuplicateName(f"{called}. Give each its own name.")
    institutions = [n for n in _in_order(nodes) if n.role == INSTITUTION]
    devices = [n for n in _in_order(nodes) if n.role == DEVICE]
    names = {n.name for n in institutions}
    for n in institutions:
        if n.parent in names:
            problem = f"{n.name} is below {n.parent}, so the lab has more than two tiers"
            raise InvalidExperiment("topology", LAB, problem, "Describe it by [[tiers]].")
    below: dict[str, list[str]] = {n.name: [] for n in institutions if n.parent == CLOUD}
    direct = below[CLOUD] = []
    left_out = []
    for n in (*institutions, *devices):
        if n.parent not in below:
            left_out.append(f"{n.name} is left out: its parent {n.parent!r} is not there")
        elif n.role == DEVICE:
            below[n.parent].append(n.name)
    del below[CLOUD]
    members = {name: each for name, each in below.items() if each}
    left_out += [f"{name} is left out: it has no device" for name in below if name not in members]
    if direct and members:
        some = ", ".join(direct[:LISTED_MOST])
        problem = f"some devices are below institutions, others below the cloud ({some})"
        remedy = "Start all with an institution as --parent, or none."
        raise InvalidExperiment("topology", LAB, problem, remedy)
    if direct:
        return {"institutions": 0, "devices": direct}, left_out
    if not members:
        remedy = "Start devices first."
        if unfit:
            remedy = f"Fix what is left out as above: {counted(unfit, 'nodes')}."
        raise InvalidExperiment("topology", LAB, "no device is there that could take part", remedy)
    taking_part = [n.name for n in devices if n.parent in members]
    return {"institutions": list(members), "devices": taking_part, "members": members}, left_out


def _check_names(topology: Topology) -> None:
    institutions = topology.institution_names()
    devices = topology.device_names()
    remedy = "Give every node its own name."
    if topology.institutions == []:
        instead = "Use at least one institution, or 0 for a cloud and devices."
        raise InvalidExperiment("topology.institutions", [], "no institution", instead)
    for key, names in (("topology.institutions", institutions), ("topology.devices", devices)):
        twice = double(names)
        if twice is not None:
            raise InvalidExperiment(key, twice, "duplicate name", remedy)
    both = set(institutions) & set(devices)
    for name in (*institutions, *devices):
        if name in RESERVED:
            raise InvalidExperiment("topology", name, "the name is reserved", remedy)
        if name in both:
            raise InvalidExperiment("topology", name, "two roles share this name", remedy)
    _check_homes(topology, institutions, devices)


def _check_homes(topology: Topology, institutions: list[str], devices: list[str]) -> None:
    children = topology.homes()
    for unknown, names in topology.members.items():
        if unknown not in children:
            remedy = "Remove it."
            if institutions:
                remedy = f"Use one of topology.institutions: {', '.join(institutions)}."
            key = f"topology.members.{unknown}"
            raise InvalidExperiment(key, names, "no institution has this name", remedy)
    if not institutions:
        return
    homes = Counter(joined(children.values()))
    for device in devices:
        if homes[device] != 1:
            problem = "is in more than one institution" if homes[device] else "is in no institution"
            remedy = "List each device in exactly one institution."
            raise InvalidExperiment("topology.members", device, problem, remedy)
    for device in homes.keys() - set(devices):
        problem = "not a device of topology.devices"
        raise InvalidExperiment("topology.members", device, problem, "Add it there.")


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
        found = []
        for part in re.split(r"([0-9]+)", node.name):
            if part.isdigit():
                found.append((int(part), ""))
            else:
                found.append((-1, part))
        return found

    return sorted(nodes, key=parts)


def _children(given: int | list[str]) -> dict[str, Any]:
    """Return the keys of a tier for a number of children, or for the names of the cloud's."""
    if isinstance(given, int):
        return {"number": given}
    return {"members": {CLOUD: given}}


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
