"""Prediction of a global round's duration: a simulation of one global round from the experiment and measured speeds.

    cloud --WAN--> institutions --LAN--> devices: train;  tau_i rounds;  --LAN--> mean --WAN--> cloud: mean

A transfer takes bytes / rate plus the delay; a host runs as many computations at once as it has cores. If each node has
its own machine, equal devices are simulated once, and so are equal institutions: ten million devices take a second.
Losses, late children, quorums (all children are waited for) and the selection of children are not simulated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Final, TypeVar

from common.experiment.links import LinkDirection
from common.experiment.schema import TransferSettings
from common.protocol.manifest import chunk_bytes_for
from common.protocol.receiver import SLOT_BYTES_S
from common.protocol.timeline import Timeline
from deploy.planning.virtual_time import Host, Process, VirtualTime

AT_PARENT: Final = 0.4  # share of a round's messaging work done by the parent, child by child; the rest is elsewhere


@dataclass(frozen=True, slots=True)
class MachineSpeeds:
    """Measured speeds of this machine: seconds of one core, and the number of cores.

    step_s: per SGD step    training_s: per training, without its steps    evaluation_s: per pass over the test set
    message_s: messaging of a round with one child, at both ends and in the broker
    byte_s: the same per byte of a model, in each direction    mix_byte_s: mixing, per byte of the uploads
    record_s: writing the results of a global round
    """

    step_s: float
    training_s: float
    evaluation_s: float
    message_s: float
    byte_s: float
    mix_byte_s: float
    record_s: float
    cores: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a model: in memory (`row`), and encoded by tier and direction."""

    row: int
    wan_up: int
    wan_down: int
    lan_up: int
    lan_down: int


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """`count` equal devices in an institution's round: their link, and the seconds of one training."""

    count: int
    down: LinkDirection
    up: LinkDirection
    train_s: float
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Branch:
    """`count` equal institutions: their link, and the devices of each that take part in a round."""

    count: int
    down: LinkDirection
    up: LinkDirection
    devices: tuple[PlannedDevice, ...]


@dataclass(frozen=True, slots=True)
class PlannedLab:
    """A lab to simulate. `interface`: rate of each host's network interface, bytes per second, in each direction."""

    branches: tuple[Branch, ...]
    rounds: int
    sizes: Sizes
    transfer: TransferSettings
    one_host: bool
    interface: float


def seconds(lab: PlannedLab, speeds: MachineSpeeds) -> dict[str, float]:
    """Return a global round's seconds by phase, as in rounds.csv; they add up to the whole global round."""
    return _SimulatedGlobalRound(lab, speeds).phases()


class _SimulatedGlobalRound:
    def __init__(self, lab: PlannedLab, speeds: MachineSpeeds) -> None:
        self._lab, self._speeds = lab, speeds
        self._clock = VirtualTime()
        self._shared = Host(speeds.cores) if lab.one_host else None
        self._timeline = Timeline(0.0, 0.0)
        self._first, self._last = inf, 0.0
        self._aggregated = self._evaluated = 0.0

    def phases(self) -> dict[str, float]:
        """Simulate the global round and return its seconds by phase."""
        self._clock.run(self._beside([self._rounds(), self._evaluation()]))
        timeline = self._timeline
        timeline.first_result, timeline.last_result = self._first, self._last
        phases = {"record": self._speeds.record_s} | timeline.phases()
        phases["aggregate"] = self._aggregated - (timeline.closed or 0.0)
        phases["evaluate"] = max(0.0, self._evaluated - self._aggregated)
        return phases

    def _rounds(self) -> Process:
        """Simulate the cloud: all institutions, then the mixing of their models."""
        host, pipe = Host(1), Host(1)
        branches = _one_by_one(self._lab.branches) if self._shared else self._lab.branches
        yield [self._institution(branch, host, pipe) for branch in branches]
        self._timeline.closed = self._clock.now
        yield host, self._mixing(sum(branch.count for branch in branches))
        self._aggregated = self._clock.now

    def _evaluation(self) -> Process:
        """Simulate the evaluation of the previous global round's model, in a process of its own."""
        yield self._cores(), self._speeds.evaluation_s
        self._evaluated = self._clock.now

    def _institution(self, branch: Branch, cloud: Host, pipe: Host) -> Process:
        sizes = self._lab.sizes
        yield cloud, self._half(sizes.wan_down, branch.count)
        wan_s = self._crossing(branch.down, sizes.wan_down, branch.count)
        first_s = self._crossing(branch.down, self._chunk(branch.down, sizes.wan_down), branch.count)
        arrived = self._clock.now + wan_s
        self._timeline.dispatched = max(self._timeline.dispatched or 0.0, arrived)
        host, own_pipe = Host(1), Host(1)
        devices = _one_by_one(branch.devices) if self._shared else branch.devices
        selected = sum(device.count for device in devices)
        for local_round in range(self._lab.rounds):
            children = []
            for device in devices:
                lan_s = self._crossing(device.down, sizes.lan_down, selected)
                if local_round == 0:  # cut-through: the institution forwards chunks as they arrive
                    last_s = self._crossing(device.down, self._chunk(device.down, sizes.lan_down), selected)
                    lan_s = max(wan_s + last_s, first_s + lan_s)
                children.append(self._device(device, lan_s, host, own_pipe))
            yield children
            yield host, self._mixing(selected)
        self._first = min(self._first, self._clock.now)
        self._last = max(self._last, self._clock.now)
        yield self._upload(branch.up, sizes.wan_up, branch.count, pipe)
        yield cloud, self._half(sizes.wan_up, branch.count)

    def _device(self, device: PlannedDevice, arrival_s: float, parent: Host, pipe: Host) -> Process:
        sizes, speeds = self._lab.sizes, self._speeds
        yield parent, self._half(sizes.lan_down, device.count)
        yield arrival_s
        work_s = speeds.message_s + (sizes.lan_down + sizes.lan_up) * speeds.byte_s
        yield self._cores(), device.train_s + work_s * (1.0 if self._shared else 1 - AT_PARENT)
        yield device.pause_s
        yield self._upload(device.up, sizes.lan_up, device.count, pipe)
        yield parent, self._half(sizes.lan_up, device.count)

    def _cores(self) -> Host:
        """Return the host on which a device or the evaluator computes: the shared one, or one of its own."""
        return self._shared or Host(1)

    def _half(self, nbytes: int, children: int) -> float:
        """Return the parent's seconds for one direction of a round; on one host 0, as the children's include them."""
        if self._shared:
            return 0.0
        return children * AT_PARENT * (self._speeds.message_s / 2 + nbytes * self._speeds.byte_s)

    def _mixing(self, uploads: int) -> float:
        return uploads * self._lab.sizes.row * self._speeds.mix_byte_s

    def _chunk(self, link: LinkDirection, nbytes: int) -> int:
        return min(nbytes, chunk_bytes_for(link.rate, self._lab.transfer.chunk_bytes))

    def _delay(self, link: LinkDirection, nbytes: int) -> float:
        """Return the delays before the first byte: the announcement's; for a model not inline, ask and chunk too."""
        return link.delay_s * (1 if nbytes <= self._lab.transfer.inline_bytes else 3)

    def _crossing(self, link: LinkDirection, nbytes: int, children: int) -> float:
        """Return the seconds of sending a model down to `children` children."""
        link_s = nbytes / link.rate if link.rate else 0.0
        return self._delay(link, nbytes) + max(link_s, children * nbytes / self._lab.interface)

    def _upload(self, link: LinkDirection, nbytes: int, children: int, pipe: Host) -> list[Process]:
        """Return the two concurrent limits of an upload: the child's link, and the parent's concurrent uploads."""
        most = self._lab.interface
        if link.rate:
            most = min(most, self._lab.transfer.upload_slots * max(SLOT_BYTES_S, link.rate))
        link_s = self._delay(link, nbytes) + (nbytes / link.rate if link.rate else 0.0)
        return [_wait(link_s), _use(pipe, children * nbytes / most)]

    @staticmethod
    def _beside(processes: list[Process]) -> Process:
        yield processes


def _wait(seconds: float) -> Process:
    yield seconds


def _use(host: Host, seconds: float) -> Process:
    yield host, seconds


_Kind = TypeVar("_Kind", Branch, PlannedDevice)


def _one_by_one(kinds: Iterable[_Kind]) -> list[_Kind]:
    return [replace(kind, count=1) for kind in kinds for _ in range(kind.count)]
