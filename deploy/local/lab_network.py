"""Network of a lab on this machine: its broker, and the processes of its nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.net.address import BrokerAddress
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.brokers.guard import Guard, one_login
from fedstrata.deploy.console.login import kept_login
from fedstrata.deploy.console.logs import write_line
from fedstrata.device.pool.pool import cores

OWN_LOGIN: Final = {
    f"FEDSTRATA_{name}": ""
    for name in ("USERNAME", "PASSWORD", "PASSWORD_FILE", "TLS", "TLS_CA", "TLS_CERT", "TLS_KEY")
}


@dataclass(frozen=True, slots=True)
class LabNetwork:
    """A lab's running broker, and its processes.

    groups: the devices of each device process
    environment: of each role's process, with the login at the broker
    """

    broker: BrokerAddress
    groups: Mapping[str, Sequence[str]]
    environment: Mapping[str, str] = field(repr=False)

    @property
    def address(self) -> str:
        """The broker as options take it."""
        return f"{self.broker.host}:{self.broker.port}"


# in one process, if there are cores for more processes: a 250 kB round takes 0.12 s of CPU
DEVICES_MOST: Final = 64


def shares(cores: int, processes: int) -> list[int]:
    """Return each process's number of cores, at least 1; the sum is `cores` unless there are more
    processes.
    """
    return [max(1, (cores + index) // processes) for index in range(processes)]


def environment_of(guard: Guard) -> dict[str, str]:
    """Return the environment that gives a role the one login of a guard, and nothing of the user's
    own logins.
    """
    return OWN_LOGIN | dict(
        zip(("FEDSTRATA_USERNAME", "FEDSTRATA_PASSWORD"), guard.login or (), strict=False)
    )


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
            "links.enforce",
            "kernel",
            "a lab on one machine has no links that the kernel could shape",
            "Use bucket.",
        )
    guard = one_login()
    with (
        broker.start(directory=home, guard=guard) as served,
        kept_login(served.port, guard.login or ("", "")),
    ):
        network = LabNetwork(
            BrokerAddress(served.host, served.port, *(guard.login or ())),
            groups=device_groups(experiment.tree.layers[-1], cores()),
            environment=environment_of(guard),
        )
        write_line(f"broker: {served.kind} on {network.address}")
        yield network
