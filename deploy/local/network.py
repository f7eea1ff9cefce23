"""Network of a lab on this machine: its brokers, and the processes of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from common.errors import InvalidExperiment
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD
from common.net.address import BrokerAddress
from deploy.brokers import broker
from deploy.brokers.guard import Guard, one_login
from deploy.console.login import kept_login
from deploy.console.logs import write_line
from device.pool.pool import cores

OWN_LOGIN: Final = {
    f"FEDSTRATA_{name}": ""
    for name in ("USERNAME", "PASSWORD", "PASSWORD_FILE", "TLS", "TLS_CA", "TLS_CERT", "TLS_KEY")
}


@dataclass(frozen=True, slots=True)
class LabNetwork:
    """A lab's running brokers, and its processes.

    upward: the broker (host:port) between each node and its parent; for the cloud, the one of its children
    downward: each institution's broker for its children    groups: the devices of each device process
    environment: of each role's process, with the login at the brokers
    watched: the broker, with the login, if there is one that this process reaches
    begun(elapsed_s): is called when the global rounds begin or go on, as far into the run
    inside(process): context in which that process is started    flags: options of `fedstrata run` for such a network
    """

    upward: Mapping[str, str]
    downward: Mapping[str, str]
    groups: Mapping[str, Sequence[str]]
    inside: Callable[[str], AbstractContextManager[None]] = lambda process: nullcontext()
    flags: str = ""
    environment: Mapping[str, str] = field(default_factory=OWN_LOGIN.copy, repr=False)
    watched: BrokerAddress | None = None
    begun: Callable[[float], None] = lambda elapsed_s: None


DEVICES_MOST: Final = 64  # in one process, if there are cores for more processes: a 250 kB round takes 0.12 s of CPU

Open: TypeAlias = Callable[[Experiment, Path], AbstractContextManager[LabNetwork]]


def shares(cores: int, processes: int) -> list[int]:
    """Return each process's number of cores, at least 1; the sum is `cores` unless there are more processes."""
    return [max(1, (cores + index) // processes) for index in range(processes)]


def environment_of(guard: Guard) -> dict[str, str]:
    """Return the environment that gives a role the one login of a guard, and nothing of the user's own logins."""
    return OWN_LOGIN | dict(zip(("FEDSTRATA_USERNAME", "FEDSTRATA_PASSWORD"), guard.login or (), strict=False))


def processes_of(devices: int, cores: int) -> int:
    """Return the number of device processes of a lab on a host."""
    return min(-(-devices // DEVICES_MOST), cores)


def device_groups(devices: Sequence[str], cores: int) -> dict[str, Sequence[str]]:
    """Return the devices of each device process of a lab on a host."""
    processes = processes_of(len(devices), cores)
    return {f"devices-{index}": devices[index::processes] for index in range(processes)}


@contextmanager
def one_host(experiment: Experiment, home: Path) -> Iterator[LabNetwork]:
    """Open the network of a lab with one broker on this machine; logs go into `home`.

    Raises ConnectionFailed, and InvalidExperiment if links.enforce is kernel.
    """
    if experiment.links.enforce == "kernel":
        raise InvalidExperiment(
            "links.enforce", "kernel", "without --netns there are no links that the kernel could shape", "Use --netns."
        )
    tree = experiment.tree
    guard = one_login()
    with broker.start(directory=home, guard=guard) as served, kept_login(served.port, guard.login or ("", "")):
        address = f"{served.host}:{served.port}"
        write_line(f"broker: {served.kind} on {address}")
        yield LabNetwork(
            upward=dict.fromkeys((CLOUD, *tree.nodes), address),
            downward=dict.fromkeys(tree.aggregators, address),
            environment=environment_of(guard),
            watched=BrokerAddress(served.host, served.port, *(guard.login or ())),
            groups=device_groups(tree.layers[-1], cores()),
        )
