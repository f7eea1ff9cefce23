"""`make bench NAME=namespaces`: an experiment over links that the kernel keeps, as root; ARGS="FILE
--set KEY=VALUE".

    cloud, its broker ===== WAN =====> institution, its broker ===== LAN =====> devices

Each arrow, of any number of tiers, is a veth pair, shaped at both ends. A namespace stands for one
machine: the cloud, an institution, or a process of devices of one parent. Each broker runs at the
parent's end of its links, so a message crosses a link once. Devices in one process still have links
of their own: each uses another address of the broker, and so another interface. Printed are the
seconds of each global round, beside which `fedstrata plan` can be held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from fedstrata.common.errors import RunFailed
from fedstrata.common.experiment.reading import load, parse, to_toml
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.brokers import broker
from tests.bench.running import folder, run
from tests.helpers.commands import DEMO, folder_in, table
from tests.helpers.namespaces import VethPair, joined
from tests.helpers.roles import Role

PORT: Final = 1883
POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """A lab's hosts, named after their processes; the devices of each device process; each child's
    veth pair.
    """

    hosts: tuple[str, ...]
    groups: Mapping[str, tuple[str, ...]]
    wires: Mapping[str, VethPair]


@dataclass(frozen=True, slots=True)
class NamespacedLab:
    """The broker (host:port) of each node for its parent and for its children, and the context of
    each host.
    """

    upward: Mapping[str, str]
    downward: Mapping[str, str]
    inside: Callable[[str], AbstractContextManager[None]]


def by_kernel(experiment: Experiment, *, delays: bool) -> Experiment:
    """Return the experiment with links enforced by the kernel; without their delays if `delays` is
    false.
    """
    tree = experiment.model_dump(mode="json")
    tree["links"]["enforce"] = "kernel"
    if not delays:
        for link in (*(tier["link"] for tier in tree["tiers"]), *tree["links"]["of"].values()):
            link["delay_ms"] = 0.0
    return parse(tree)


def lay_out(experiment: Experiment) -> NetworkPlan:
    """Return a lab's plan, with one process for the devices of each parent."""
    tree = experiment.tree
    wires: dict[str, VethPair] = {}
    groups: dict[str, tuple[str, ...]] = {}
    for parent, children in tree.children.items():
        devices = tuple(name for name in children if name not in tree.children)
        group = f"devices@{parent}"  # no node has an @ in its name
        if devices:
            groups[group] = devices
        for child in children:
            host = group if child in devices else child
            wires[child] = _wire(experiment, child, number=len(wires), hosts=(parent, host))
    return NetworkPlan((CLOUD, *tree.aggregators, *groups), groups, wires)


def _wire(experiment: Experiment, child: str, *, number: int, hosts: tuple[str, str]) -> VethPair:
    link = experiment.link(child)
    up, down = (None if way.rate is None else way.rate * 8 / 1e6 for way in (link.up, link.down))
    return VethPair(number, child, *hosts, up, down, 1e3 * link.up.delay_s)


@contextmanager
def namespaces(plan: NetworkPlan, home: Path) -> Iterator[NamespacedLab]:
    """Open the network of a plan, a broker at each parent; logs go into `home`.

    Raises InvalidExperiment if this machine or user cannot; ConnectionFailed if a broker does not
    start.
    """
    with joined(plan.hosts, tuple(plan.wires.values())) as spaces, ExitStack() as stack:
        ports = {}
        # a log for each
        for port, host in enumerate((host for host in plan.hosts if host not in plan.groups), PORT):
            with spaces[host].entered():
                stack.enter_context(broker.start(directory=home, host="0.0.0.0", port=port))
            ports[host] = port
        upward = {
            node: f"{wire.parent_address}:{ports[wire.parent_host]}"
            for node, wire in plan.wires.items()
        }
        downward = {host: f"127.0.0.1:{port}" for host, port in ports.items()}
        yield NamespacedLab(upward, downward, lambda host: spaces[host].entered())


def run_in_namespaces(experiment: Experiment, runs: Path, *, null: bool = False) -> Path:
    """Run an experiment, whose roles compute nothing with `null`, and return the run's folder.
    Raises RunFailed.
    """
    plan, parent = lay_out(experiment), experiment.tree.parent
    with folder() as home, namespaces(plan, home) as lab, ExitStack() as stack:
        home.chmod(0o755)  # mosquitto reads its configuration there, possibly as another user
        file = home / "experiment.toml"
        file.write_text(to_toml(experiment), encoding="utf-8")

        def start(host: str, *words: str | Path) -> Role:
            with lab.inside(host):
                role = Role(home / f"{host}.log", *words, null=null)
            stack.callback(role.kill)
            return role

        own = ("--broker", lab.downward[CLOUD], "--format", "json")
        cloud = start(CLOUD, "cloud", file, "--runs", runs, *own)
        roles = [cloud]
        for name in experiment.tree.aggregators:
            brokers = ("--broker", lab.upward[name], "--child-broker", lab.downward[name])
            roles.append(
                start(name, "institution", "--name", name, "--parent", parent(name), *brokers)
            )
        for host, devices in plan.groups.items():
            each = (
                ("--name", name, "--parent", parent(name), "--broker", lab.upward[name])
                for name in devices
            )
            roles.append(start(host, "device", *(word for words in each for word in words)))
        while cloud.process.poll() is None:
            time.sleep(POLL_S)
            for role in roles:
                if role.process.poll():
                    raise RunFailed(role.log.read_text())
        if cloud.process.returncode:
            raise RunFailed(cloud.log.read_text())
        return folder_in(cloud.output())


def main(
    file: Path = DEMO,
    /,
    *,
    set_: Annotated[Sequence[str], "KEY=VALUE"] = (),
    runs: Path = Path("runs"),
    no_delay: Annotated[bool, "omit the links' delays, which need netem"] = False,
) -> None:
    """Run an experiment and print its global rounds."""
    path = run_in_namespaces(by_kernel(load(file, set_), delays=not no_delay), runs)
    before_s = 0.0
    for row in table(path / "rounds.csv"):
        print(f"global round {row['global_round']}: {float(row['elapsed_s']) - before_s:.2f} s")
        before_s = float(row["elapsed_s"])
    print(path)


if __name__ == "__main__":
    run(main)
