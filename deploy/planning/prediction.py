"""What a global round will take, on paper: a simulation of one, from the experiment and a machine's speeds.

    cloud --WAN--> institutions --LAN--> devices: train;  tau_i rounds;  --LAN--> mean --WAN--> cloud: mean

A link takes bytes / rate and its delay; a host computes so many things at once as it has cores. Devices alike are
played once where each has a machine of its own, and so are institutions alike: ten million take a second. Not
simulated are losses, late children, quorums (all children are waited for), and which children are drawn.
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

AT_PARENT: Final = 0.4  # of the work of a round with one child, a queue there; the rest is the child's and the broker's


@dataclass(frozen=True, slots=True)
class MachineSpeeds:
    """What calibration found of this machine: seconds of one core, and how many cores there are.

    `step_s`: a step of SGD; `training_s`: a training besides its steps; `evaluation_s`: the test set, once. Of a round
    with one child, at both ends and in the broker: `message_s`, and `byte_s` for each byte of a model, either way.
    `mix_byte_s`: for each byte of the uploads that are mixed. `record_s`: what the cloud writes after a global round.
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
    """Bytes of a model: in memory, and as it travels on either tier."""

    row: int
    wan_up: int
    wan_down: int
    lan_up: int
    lan_down: int


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """Devices alike, `count` of them in an institution's round: their link, and the seconds of one training."""

    count: int
    down: LinkDirection
    up: LinkDirection
    train_s: float
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Branch:
    """Institutions alike, `count` of them: their link, and the devices of each that take part in a round."""

    count: int
    down: LinkDirection
    up: LinkDirection
    devices: tuple[PlannedDevice, ...]


@dataclass(frozen=True, slots=True)
class PlannedLab:
    """What is played: `interface` is what each host's network carries, bytes per second either way."""

    branches: tuple[Branch, ...]
    rounds: int
    sizes: Sizes
    transfer: TransferSettings
    one_host: bool
    interface: float


def seconds(lab: PlannedLab, speeds: MachineSpeeds) -> dict[str, float]:
    """Return a global round's seconds by phase, in the columns of rounds.csv; they add up to the global round."""
    return _SimulatedGlobalRound(lab, speeds).phases()


class _SimulatedGlobalRound:
    def __init__(self, lab: PlannedLab, speeds: MachineSpeeds) -> None:
        self._lab, self._speeds = lab, speeds
        self._stage = VirtualTime()
        self._shared = Host(speeds.cores) if lab.one_host else None
        self._timeline = Timeline(0.0, 0.0)
        self._first, self._last = inf, 0.0
        self._aggregated = self._evaluated = 0.0

    def phases(self) -> dict[str, float]:
        """Play the global round and return its seconds by phase."""
        self._stage.play(self._beside([self._rounds(), self._evaluation()]))
        timeline = self._timeline
        timeline.first_result, timeline.last_result = self._first, self._last
        phases = {"record": self._speeds.record_s} | timeline.phases()
        phases["aggregate"] = self._aggregated - (timeline.closed or 0.0)
        phases["evaluate"] = max(0.0, self._evaluated - self._aggregated)
        return phases

    def _rounds(self) -> Process:
        """Play the cloud: all institutions, and what it makes of their models."""
        host, pipe = Host(1), Host(1)
        branches = _one_by_one(self._lab.branches) if self._shared else self._lab.branches
        yield [self._institution(branch, host, pipe) for branch in branches]
        self._timeline.closed = self._stage.now
        yield host, self._mixing(sum(branch.count for branch in branches))
        self._aggregated = self._stage.now

    def _evaluation(self) -> Process:
        """Evaluate the model of the global round before, in a process of its own."""
        yield self._cores(), self._speeds.evaluation_s
        self._evaluated = self._stage.now

    def _institution(self, branch: Branch, cloud: Host, pipe: Host) -> Process:
        sizes = self._lab.sizes
        yield cloud, self._half(sizes.wan_down, branch.count)
        wan_s = self._crossing(branch.down, sizes.wan_down, branch.count)
        first_s = self._crossing(branch.down, self._chunk(branch.down, sizes.wan_down), branch.count)
        arrived = self._stage.now + wan_s
        self._timeline.dispatched = max(self._timeline.dispatched or 0.0, arrived)
        host, own_pipe = Host(1), Host(1)
        devices = _one_by_one(branch.devices) if self._shared else branch.devices
        drawn = sum(device.count for device in devices)
        for local_round in range(self._lab.rounds):
            children = []
            for device in devices:
                lan_s = self._crossing(device.down, sizes.lan_down, drawn)
                if local_round == 0:  # chunks are passed on as they come
                    last_s = self._crossing(device.down, self._chunk(device.down, sizes.lan_down), drawn)
                    lan_s = max(wan_s + last_s, first_s + lan_s)
                children.append(self._device(device, lan_s, host, own_pipe))
            yield children
            yield host, self._mixing(drawn)
        self._first = min(self._first, self._stage.now)
        self._last = max(self._last, self._stage.now)
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
        """Return where a device, or the evaluator, computes: the host of all, or a machine of its own."""
        return self._shared or Host(1)

    def _half(self, nbytes: int, children: int) -> float:
        """Return the parent's seconds for one way of a round with so many children; on one host they are in theirs."""
        if self._shared:
            return 0.0
        return children * AT_PARENT * (self._speeds.message_s / 2 + nbytes * self._speeds.byte_s)

    def _mixing(self, uploads: int) -> float:
        return uploads * self._lab.sizes.row * self._speeds.mix_byte_s

    def _chunk(self, way: LinkDirection, nbytes: int) -> int:
        return min(nbytes, chunk_bytes_for(way.rate, self._lab.transfer.chunk_bytes))

    def _delay(self, way: LinkDirection, nbytes: int) -> float:
        """Return the delays before the first byte: the announcement's, and of what it does not carry ask and chunk."""
        return way.delay_s * (1 if nbytes <= self._lab.transfer.inline_bytes else 3)

    def _crossing(self, way: LinkDirection, nbytes: int, children: int) -> float:
        """Return the seconds of a model's way down, to all of so many children."""
        link_s = nbytes / way.rate if way.rate else 0.0
        return self._delay(way, nbytes) + max(link_s, children * nbytes / self._lab.interface)

    def _upload(self, way: LinkDirection, nbytes: int, children: int, pipe: Host) -> list[Process]:
        """Return the ways that a child's upload takes: its link, and its share of what the parent takes at once."""
        most = self._lab.interface
        if way.rate:
            most = min(most, self._lab.transfer.upload_slots * max(SLOT_BYTES_S, way.rate))
        link_s = self._delay(way, nbytes) + (nbytes / way.rate if way.rate else 0.0)
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
