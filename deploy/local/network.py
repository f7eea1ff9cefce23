"""Where the processes of a lab run, and through which brokers its nodes meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from common.errors import InvalidExperiment
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD
from deploy.brokers import broker
from deploy.console.logs import write_line
from device.pool.pool import cores


@dataclass(frozen=True, slots=True)
class LabNetwork:
    """A lab's brokers, which answer, and the places of its processes.

    `upward`: each node's broker, host:port, at which it meets its parent, and the cloud its children. `downward`: each
    institution's broker for its devices. `groups`: the devices of each process of devices, all in one place.
    `inside(process)` is entered while that process is started; `flags` of `fedstrata run` open such a network again.
    """

    upward: Mapping[str, str]
    downward: Mapping[str, str]
    groups: Mapping[str, Sequence[str]]
    inside: Callable[[str], AbstractContextManager[None]] = lambda process: nullcontext()
    flags: str = ""


DEVICES_MOST: Final = 64  # in one process, where there are cores for more: a round of 250 kB takes it 0.12 s of CPU

Open: TypeAlias = Callable[[Experiment, Path], AbstractContextManager[LabNetwork]]


def shares(cores: int, processes: int) -> list[int]:
    """Return each process's part of the cores: they add up, unless there are fewer cores than processes."""
    return [max(1, (cores + index) // processes) for index in range(processes)]


@contextmanager
def one_host(experiment: Experiment, home: Path) -> Iterator[LabNetwork]:
    """Open the network of a lab around one broker on this machine.

    Logs go into `home`. Raises ConnectionFailed, and InvalidExperiment where the kernel would have to keep the links.
    """
    if experiment.links.enforce == "kernel":
        raise InvalidExperiment(
            "links.enforce", "kernel", "on one host there are no links for it to keep", "Run with --netns."
        )
    children = experiment.topology.children()
    devices = [device for members in children.values() for device in members]
    processes = min(-(-len(devices) // DEVICES_MOST), cores())
    with broker.start(directory=home) as served:
        address = f"{served.host}:{served.port}"
        write_line(f"broker: {served.kind} on {address}")
        yield LabNetwork(
            upward=dict.fromkeys((CLOUD, *children, *devices), address),
            downward=dict.fromkeys(children, address),
            groups={f"devices-{index}": devices[index::processes] for index in range(processes)},
        )
