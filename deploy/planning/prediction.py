"""Prediction of a global round's duration: a simulation of one global round from the experiment and measured speeds.

    cloud --> institutions --> devices: train;  tau_i rounds;  --> mean --> cloud: mean

A transfer takes bytes / rate plus the delay; a host runs as many computations at once as it has cores. If each node has
its own machine, equal devices are simulated once, and so are equal institutions: ten million devices take a second.
Losses, late children, quorums (all children are waited for) and the selection of children are not simulated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Final

from common.experiment.links import LinkDirection
from common.experiment.schema import TransferSettings
from common.protocol.manifest import chunk_bytes_for
from common.protocol.receiver import SLOT_BYTES_S
from common.protocol.round_state import Timeline
from deploy.planning.packets import down_bytes, up_bytes
from deploy.planning.virtual_time import PlannedHost, Process, VirtualTime

AT_PARENT: Final = 0.4  # share of a round's messaging work done by the parent, child by child; the rest is elsewhere


@dataclass(frozen=True, slots=True)
class MachineSpeeds:
    """Measured speeds of this machine: seconds of one core, and the number of cores.

    step_s: per SGD step    training_s: per training, without its steps    evaluation_s: per pass over the test set
    message_s: messaging of a round with one child, at both ends and in the broker
    round_s: opening, closing and keeping a round at the parent, however many children
    byte_s: the same per byte of a model, in each direction    mix_byte_s: mixing, per byte of the uploads
    record_s: writing the results of a global round, with a checkpoint
    share: of a core, that the measured trainings had
    """

    step_s: float
    training_s: float
    evaluation_s: float
    message_s: float
    round_s: float
    byte_s: float
    mix_byte_s: float
    record_s: float
    cores: int
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Bytes of an encoded model in a tier, by direction, with those of vectors behind it."""

    tier: str
    up: int
    down: int
    extras_up: int = 0
    extras_down: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a model: in memory (`row`), and encoded, by tier from the cloud down."""

    row: int
    tiers: tuple[TierSizes, ...]


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """`count` equal devices in a parent's round: their link, and the seconds of one training."""

    count: int
    down: LinkDirection
    up: LinkDirection
    train_s: float
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Branch:
    """`count` equal institutions: their link, the children of each that take part in a round, and its rounds."""

    count: int
    down: LinkDirection
    up: LinkDirection
    children: tuple[Branch | PlannedDevice, ...]
    rounds: int = 1

    def devices(self) -> int:
        """Return the devices that take part in a round of each of them."""
        return sum(kind.count * (kind.devices() if isinstance(kind, Branch) else 1) for kind in self.children)


@dataclass(frozen=True, slots=True)
class PlannedLab:
    """A lab to simulate: the children of the cloud that take part in a global round.

    `interface`: rate of each host's network interface, bytes per second, in each direction. `payload`: share of a
    link's rate that carries MQTT; the rest is headers, where the links count those. `recorded`: share of the global
    rounds after which a checkpoint is written.
    """

    children: tuple[Branch | PlannedDevice, ...]
    sizes: Sizes
    transfer: TransferSettings
    one_host: bool
    interface: float
    payload: float = 1.0
    recorded: float = 1.0


def seconds(lab: PlannedLab, speeds: MachineSpeeds) -> dict[str, float]:
    """Return a global round's seconds by phase, as in rounds.csv; they add up to the whole global round."""
    return _SimulatedGlobalRound(lab, speeds).phases()


class _SimulatedGlobalRound:
    def __init__(self, lab: PlannedLab, speeds: MachineSpeeds) -> None:
        self._lab, self._speeds = lab, speeds
        self._clock = VirtualTime()
        self._shared = PlannedHost(speeds.cores) if lab.one_host else None
        self._timeline = Timeline(0.0, 0.0)
        self._first, self._last = inf, 0.0
        self._aggregated = self._evaluated = 0.0

    def phases(self) -> dict[str, float]:
        """Simulate the global round and return its seconds by phase."""
        self._clock.run(self._beside([self._rounds(), self._evaluation()]))
        timeline = self._timeline
        timeline.first_result, timeline.last_result = self._first, self._last
        phases = {"record": timeline.opened} | timeline.phases()
        phases["aggregate"] = self._aggregated - (timeline.closed or 0.0)
        phases["evaluate"] = max(0.0, self._evaluated - self._aggregated)
        return phases

    def _rounds(self) -> Process:
        """Simulate the cloud: the writes of the last global round, all children, then the mixing of their models."""
        cloud = PlannedHost(1)
        yield self._lab.recorded * self._speeds.record_s
        self._timeline.opened = self._clock.now
        yield self._children(self._lab.children, 0, cloud, (0.0, 0.0))
        self._timeline.closed = self._clock.now
        yield self._shared or cloud, self._closing(self._lab.children)
        self._aggregated = self._clock.now

    def _evaluation(self) -> Process:
        """Simulate the evaluation of the previous global round's model, in a process of its own."""
        yield self._cores(), self._speeds.evaluation_s
        self._evaluated = self._clock.now

    def _children(
        self, kinds: tuple[Branch | PlannedDevice, ...], depth: int, parent: PlannedHost, arrival: tuple[float, float]
    ) -> list[Process]:
        """Return the processes of a parent's children in one round.

        `arrival`: seconds until the first chunk and until the whole model are at the parent, which forwards chunks as
        they arrive (cut-through).
        """
        pipe, siblings = PlannedHost(1), sum(kind.count for kind in kinds)
        single = [replace(kind, count=1) for kind in kinds for _ in range(kind.count)] if self._shared else kinds
        return [self._child(kind, depth, parent, pipe, arrival, siblings) for kind in single]

    def _child(
        self, kind: Branch | PlannedDevice, depth: int, parent: PlannedHost, pipe: PlannedHost,
        above: tuple[float, float], siblings: int,
    ) -> Process:  # fmt: skip
        tier = self._lab.sizes.tiers[depth]
        yield parent, self._half(tier.down, kind.count)
        chunk_s = self._crossing(kind.down, self._chunk(kind.down, tier.down), siblings)
        whole_s = self._crossing(kind.down, tier.down, siblings)
        arrival = above[0] + chunk_s, max(above[1] + chunk_s if above[1] else 0.0, above[0] + whole_s)
        if depth == 0:
            self._timeline.dispatched = max(self._timeline.dispatched or 0.0, self._clock.now + arrival[1])
        messaging_s = self._speeds.message_s + (tier.down + tier.up) * self._speeds.byte_s
        work_s = messaging_s * (1.0 if self._shared else 1 - AT_PARENT)
        if isinstance(kind, Branch):
            host = PlannedHost(1)
            for r in range(kind.rounds):
                yield self._children(kind.children, depth + 1, host, (0.0, 0.0) if r else arrival)
                yield self._shared or host, self._closing(kind.children)
            yield self._shared or host, work_s
        else:
            yield arrival[1]
            yield self._cores(), kind.train_s + work_s
            yield kind.pause_s
        if depth == 0:
            self._first = min(self._first, self._clock.now)
            self._last = max(self._last, self._clock.now)
        yield self._upload(kind, tier.up, pipe)
        yield parent, self._half(tier.up, kind.count)

    def _cores(self) -> PlannedHost:
        """Return the host on which a device or the evaluator computes: the shared one, or one of its own."""
        return self._shared or PlannedHost(1)

    def _half(self, nbytes: int, children: int) -> float:
        """Return the parent's seconds for one direction of a round; on one host 0, as the children's include them."""
        if self._shared:
            return 0.0
        return children * AT_PARENT * (self._speeds.message_s / 2 + nbytes * self._speeds.byte_s)

    def _closing(self, children: tuple[Branch | PlannedDevice, ...]) -> float:
        """Return the parent's seconds of a round beside the messages, the mixing of its uploads included."""
        uploads = sum(kind.count for kind in children)
        return self._speeds.round_s + uploads * self._lab.sizes.row * self._speeds.mix_byte_s

    def _chunk(self, link: LinkDirection, nbytes: int) -> int:
        return min(nbytes, chunk_bytes_for(link.rate, self._lab.transfer.chunk_bytes))

    def _delay(self, link: LinkDirection, nbytes: int) -> float:
        """Return the delays before the first byte: the announcement's; for a model not inline, ask and chunk too."""
        return link.delay_s * (1 if nbytes <= self._lab.transfer.inline_bytes else 3)

    def _sending(self, link: LinkDirection, nbytes: int) -> float:
        return nbytes / (link.rate * self._lab.payload) if link.rate else 0.0

    def _crossing(self, link: LinkDirection, nbytes: int, children: int) -> float:
        """Return the seconds of sending a model, or its first chunk, down to `children` children."""
        sent = down_bytes(nbytes, self._lab.transfer)
        return self._delay(link, nbytes) + max(self._sending(link, sent), children * sent / self._lab.interface)

    def _upload(self, kind: Branch | PlannedDevice, nbytes: int, pipe: PlannedHost) -> list[Process]:
        """Return the two concurrent limits of an upload: the child's link, and the parent's concurrent uploads."""
        sent = up_bytes(nbytes, self._lab.transfer, devices=kind.devices() if isinstance(kind, Branch) else 0)
        link, most = kind.up, self._lab.interface
        if link.rate:
            most = min(most, self._lab.transfer.upload_slots * max(SLOT_BYTES_S, link.rate))
        link_s = self._delay(link, nbytes) + self._sending(link, sent)
        return [_wait(link_s), _use(pipe, kind.count * sent / most)]

    @staticmethod
    def _beside(processes: list[Process]) -> Process:
        yield processes


def _wait(seconds: float) -> Process:
    yield seconds


def _use(host: PlannedHost, seconds: float) -> Process:
    yield host, seconds
