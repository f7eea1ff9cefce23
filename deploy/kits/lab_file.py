"""`lab.toml`: the machines of a lab, their brokers, institutions and devices, described once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationError

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.validation_messages import explain
from fedstrata.common.net import address, tls
from fedstrata.common.net.address import BrokerAddress, host_port, parse_hosts
from fedstrata.common.settings.links import LinkSettings, shipped
from fedstrata.common.settings.tables import (
    AcceleratorName,
    Count,
    Name,
    Positive,
    SettingsTable,
    form,
    named,
    proposal,
    read_toml,
)
from fedstrata.common.settings.topology import CLOUD, RESERVED
from fedstrata.deploy.console.login import METRICS_NAME, NODE, OPERATOR, Login

RANGE: Final = re.compile(r"(.*?)(\d+)\.\.(\d+)")  # device-0..9
NODES_MOST: Final = 100_000
HERE: Final = "localhost"
KEPT_TLS: Final = "tls"  # folder beside the lab's file on its machines
# files there, and in the authority's folder
AUTHORITY = "ca.crt"
REVOKED = "ca.crl"

Address = Annotated[str, form(r"^[A-Za-z0-9:][A-Za-z0-9_.:%-]*$", "a host name or an IP address")]
AbsolutePath = Annotated[
    str, form(r"^(/[^/\s\"'\\%$]+)+$", "a folder from / on, without spaces, quotes, % and $")
]
User = Annotated[str, form(r"^[a-z_][a-z0-9_-]*$", "a login, for instance pi")]
Energy = Annotated[
    str,
    form(
        r"^(auto|none|rapl|nvml|pmic|plug:[A-Za-z0-9][A-Za-z0-9_./:-]*)$",
        "a source of energy, for instance rapl or plug:TOPIC",
    ),
]
Package = Annotated[str, form(r"^[A-Za-z_][A-Za-z0-9_.:]*$", "a package, for instance nets.own")]


class LabMachine(SettingsTable):
    """A machine of the lab. Its keys below `accelerator` count for the devices on it."""

    address: Address  # host name or IP address by which the other machines reach it
    user: User | None = None  # login for ssh, with sudo
    cloud: bool = False  # runs are started here: install what the cloud's evaluator needs
    # What rules at its nodes need: methods for CluSamp and FedMA, learning for FedDF, FedBE and
    # FedLAW.
    extras: list[Literal["learning", "methods"]] = Field(default_factory=list)
    # of this machine to the brokers above its nodes: a profile's name, or a table
    link: LinkSettings | None = None
    metrics: bool = False  # /metrics beyond this machine, for a Prometheus elsewhere
    memory_gb: Positive | None = None  # most memory of each service
    accelerator: AcceleratorName = "auto"
    slots: Count | None = None  # concurrent trainings; omitted: one per GPU, else one per core
    energy: Energy = "auto"  # what measures the energy of this machine
    # the folder of data sets, in place of the experiments' data.root
    data: AbsolutePath | None = None
    allow: list[Package] = Field(default_factory=list)  # packages whose code an experiment may name


class Broker(SettingsTable):
    """A broker: one that a machine of the lab runs, or one that exists already, with the addresses
    of its nodes.
    """

    machine: Name | None = None
    port: Annotated[int, Field(ge=1, le=65_535)] | None = None  # omitted: 8883, without tls 1883
    # host or host:port, tried in turn
    addresses: Annotated[list[str], Field(min_length=1)] | None = None


class LabInstitution(SettingsTable):
    """An institution, or any node between the cloud and the devices."""

    machine: Name
    parent: Name = CLOUD
    broker: Name | None = None  # on which it meets its children; omitted: its parent's


class Devices(SettingsTable):
    """Devices of one machine and one parent."""

    names: Annotated[list[str], Field(min_length=1)]  # device-0, or device-0..9 for ten of them
    machine: Name
    parent: Name = CLOUD


class Lab(SettingsTable):
    """A lab: `name` is its name on the broker, `broker` the one of `brokers` on which the cloud
    meets its children.
    """

    name: Name
    broker: Name
    machines: dict[Name, LabMachine]
    brokers: dict[Name, Broker]
    institutions: dict[Name, LabInstitution] = Field(default_factory=dict)
    devices: list[Devices] = Field(default_factory=list)
    moves: bool = False  # devices may take part below other parents on their broker
    tls: bool = True  # certificates of the lab's own authority, encrypted connections, access rules
    install: AbsolutePath = "/opt/fedstrata"  # folder of fedstrata on the machines

    @cached_property
    def parents(self) -> Mapping[str, str]:
        """The parent of each institution and device."""
        below = {name: each.parent for name, each in self.institutions.items()}
        return below | {
            name: group.parent for group in self.devices for name in expand(group.names)
        }

    @cached_property
    def machine_of(self) -> Mapping[str, str]:
        """The machine of each institution and device."""
        found = {name: each.machine for name, each in self.institutions.items()}
        return found | {
            name: group.machine for group in self.devices for name in expand(group.names)
        }

    def devices_of(self, machine: str) -> dict[str, str]:
        """Return the devices of a machine, each with its parent."""
        return {
            name: g.parent for g in self.devices if g.machine == machine for name in expand(g.names)
        }

    def brokers_of(self, machine: str) -> dict[str, Broker]:
        """Return the brokers that a machine runs."""
        return {name: each for name, each in self.brokers.items() if each.machine == machine}

    def meeting_place(self, parent: str) -> str:
        """Return the name of the broker on which a parent meets its children."""
        while parent != CLOUD:
            node = self.institutions[parent]
            if node.broker is not None:
                return node.broker
            parent = node.parent
        return self.broker

    def address(self, broker: str, *, machine: str | None = None) -> str:
        """Return the address of a broker as `--broker` takes it, as seen from a machine."""
        found = self.brokers[broker]
        if found.addresses is not None:
            return ",".join(found.addresses)
        assert found.machine is not None
        host = HERE if found.machine == machine else self.machines[found.machine].address
        return host_port(host, self.port(found))

    def port(self, broker: Broker) -> int:
        """Return the port of a broker that a machine of the lab runs."""
        return broker.port or (tls.PORT if self.tls else address.PORT)

    def nodes_of(self, machine: str) -> list[str]:
        """Return the names that a machine's processes use at the brokers; of the cloud's, also
        those of commands.
        """
        own = [name for name, each in self.institutions.items() if each.machine == machine]
        return [
            *own,
            *self.devices_of(machine),
            *((CLOUD, OPERATOR) if self.machines[machine].cloud else ()),
        ]

    def above(self, machine: str) -> list[str]:
        """Return the hosts of the brokers on which a machine's nodes meet their parents, other than
        the machine.
        """
        parents = [each.parent for each in self.institutions.values() if each.machine == machine]
        parents += self.devices_of(machine).values()
        found = [self.address(self.meeting_place(parent), machine=machine) for parent in parents]
        return list(
            dict.fromkeys(host for text in found for host, _ in parse_hosts(text) if host != HERE)
        )

    def addresses(self, node: str = CLOUD) -> list[str]:
        """Return the addresses of the brokers of a node; the cloud's are all on which nodes wait,
        its own first.
        """
        parents = [CLOUD, *self.parents.values()]
        if node != CLOUD:
            parents = [self.parents[node], *([node] if node in self.institutions else [])]
        return [self.address(place) for place in dict.fromkeys(map(self.meeting_place, parents))]

    def check(self) -> Self:
        """Check what types alone cannot check. Raises InvalidExperiment."""
        _known("broker", self.broker, self.brokers)
        for name, broker in self.brokers.items():
            if (broker.machine is None) == (broker.addresses is None):
                problem = "needs the machine that runs it, or the addresses of a broker that exists"
                raise InvalidExperiment(
                    f"brokers.{name}", name, problem, "Give one of machine and addresses."
                )
            if broker.machine is not None:
                _known(f"brokers.{name}.machine", broker.machine, self.machines)
            try:
                parse_hosts(",".join(broker.addresses or [HERE]))
            except ValueError as error:
                key = f"brokers.{name}.addresses"
                raise InvalidExperiment(
                    key, broker.addresses, str(error), "Write host or host:port."
                ) from None
        places = Counter(
            (each.machine, self.port(each)) for each in self.brokers.values() if each.machine
        )
        for (machine, port), count in places.items():
            if count > 1:
                raise InvalidExperiment(
                    "brokers", machine, f"{count} brokers on its port {port}", "Give each a port."
                )
        for name, node in self.institutions.items():
            _known(f"institutions.{name}.machine", node.machine, self.machines)
            if node.broker is not None:
                _known(f"institutions.{name}.broker", node.broker, self.brokers)
        for group in self.devices:
            _known("devices.machine", group.machine, self.machines)
        self._check_nodes()
        return self

    def _check_nodes(self) -> None:
        names = [
            *self.institutions,
            *(name for group in self.devices for name in expand(group.names)),
        ]
        # of certificates
        files = {"ca", METRICS_NAME, *(f"broker-{each}" for each in self.brokers)}
        for name, count in Counter(names).items():
            if name in {*RESERVED, OPERATOR, *files}:
                raise InvalidExperiment(
                    "name", name, "a reserved name", "Give the node another name."
                )
            if count > 1:
                raise InvalidExperiment(
                    "name", name, f"{count} nodes have this name", "Give each its own."
                )
        for name, parent in self.parents.items():
            _known(f"the parent of {name}", parent, [CLOUD, *self.institutions])
            above = parent
            seen = {name}
            while above != CLOUD and above in self.institutions:
                if above in seen:
                    raise InvalidExperiment(
                        "parent", parent, f"{name} is below itself", "Give another parent."
                    )
                seen.add(above)
                above = self.institutions[above].parent


@dataclass(frozen=True, slots=True)
class LabAccess:
    """How a command reaches a lab: its name, its brokers, the cloud's first, the login there, and
    what its file has.
    """

    name: str
    brokers: list[str]
    login: Login
    lab: Lab | None = None

    def check_node(self, key: str, node: str) -> None:
        """Raise InvalidExperiment if the lab's file has no node of this name."""
        if self.lab is not None and node not in (known := [*self.lab.parents, CLOUD, OPERATOR]):
            problem = f"no node of the lab {self.name}"
            remedy = proposal(node, known, what="There are")
            raise InvalidExperiment(key, node, problem, remedy)

    def addresses(self, node: str) -> list[BrokerAddress]:
        """Return the brokers with a node's login. Raises InvalidExperiment."""
        return [self.login.address(text, node=node) for text in self.brokers]


def reach(lab: str, brokers: list[str] | None, login: Login) -> LabAccess:
    """Return how to reach a lab.

    `lab` is the name, or the path of its file, which also names the brokers unless `brokers` are
    given, and beside which the certificates are unless `login` has others. Raises
    InvalidExperiment.
    """
    if not lab.endswith(".toml"):
        return LabAccess(lab, brokers or [HERE], login)
    found = load(Path(lab))
    if found.tls and login == Login():
        login = _kept_login(Path(lab).absolute().parent, found)
    return LabAccess(found.name, brokers or found.addresses(), login, found)


def authority_of(lab: Lab, source: Path) -> Path:
    """Return the folder of a lab's authority, beside the lab's file."""
    return source.absolute().parent / f"{lab.name}-authority"


def _kept_login(folder: Path, lab: Lab) -> Login:
    """Return the login by the certificates beside a lab's file: of an installed kit, else of the
    authority itself.
    """
    for authority, issued in (
        (folder / KEPT_TLS, ""),
        (authority_of(lab, folder / "lab.toml"), "issued"),
    ):
        if (authority / AUTHORITY).exists():
            own = str(authority / issued / NODE)
            ca, crl = (str(authority / file) for file in (AUTHORITY, REVOKED))
            return Login(tls_ca=ca, tls_cert=f"{own}.crt", tls_key=f"{own}.key", tls_crl=crl)
    remedy = f"Install a kit, run `fedstrata provision`, or set tls = false in {lab.name}'s file."
    raise InvalidExperiment(
        "--lab", str(folder), "there are no certificates beside the lab's file", remedy
    )


REMEDY: Final = "Name a lab's TOML file."


def load(path: Path) -> Lab:
    """Return the lab of a TOML file. Raises InvalidExperiment."""
    tree = read_toml("lab", path, remedy=REMEDY)
    if "machines" not in tree and not tree.keys() <= Lab.model_fields.keys():
        what = "a sweep" if "axes" in tree else "an experiment"
        raise InvalidExperiment("lab", str(path), f"{what}: it has no [machines]", REMEDY)
    return parse(tree)


def parse(tree: dict[str, Any]) -> Lab:
    """Validate a tree and return the lab. Raises InvalidExperiment."""
    if isinstance(machines := tree.get("machines"), dict):
        for name, machine in machines.items():
            if isinstance(machine, dict) and "link" in machine:
                machine["link"] = named(f"machines.{name}.link", machine["link"], shipped())
    try:
        return Lab.model_validate(tree).check()
    except ValidationError as error:
        raise explain(error, Lab) from None


def expand(names: Iterable[str]) -> list[str]:
    """Return single names: `device-0..2` stands for device-0, device-1 and device-2. Raises
    InvalidExperiment.
    """
    found: list[str] = []
    for name in names:
        match = RANGE.fullmatch(name)
        if match is None:
            found.append(name)
            continue
        stem = match[1]
        first = int(match[2])
        last = int(match[3])
        if not first <= last <= first + NODES_MOST:
            raise InvalidExperiment(
                "devices.names", name, "not a range of names", "Write for instance device-0..9."
            )
        found += [f"{stem}{number}" for number in range(first, last + 1)]
    for name in found:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
            problem = "not a node's name: letters, digits, _ . -, at most 64"
            raise InvalidExperiment("devices.names", name, problem, "Write for instance device-0.")
    return found


def _known(key: str, name: str, known: Iterable[str]) -> None:
    names = list(known)
    if name not in names:
        raise InvalidExperiment(
            key, name, "nothing in this lab has this name", proposal(name, names, what="There are")
        )
