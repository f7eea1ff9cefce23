"""Link calibration before a run: a little noise in each direction, fetched like a model and timed
on arrival.

    parent                       child
      | --------- Probe ---------> |   the noise that it may fetch; repeated until answered
      | <--- chunks, its asks ---> |
      | <-------- Probed --------- |   the measured rate, and noise for the way back
      | <--- asks, its chunks ---> |

Both directions are measured with 64 kB first, then with ten times as much as long as they carry
that quickly, up to what their rates ask for: on a link that is slower than declared all else would
wait behind the noise. A fast link shows its rate only in a longer exchange, because 64 kB are over
before TCP has opened its window.

Noise is counted separately from models, so a run's byte counts do not include it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Final

from fedstrata.common.accounting.traffic import Measured
from fedstrata.common.errors import InvalidExperiment, RefusedModel
from fedstrata.common.protocol.limits import NOISE_MOST
from fedstrata.common.protocol.manifest import describe
from fedstrata.common.protocol.messages import Manifest, Probe, Probed
from fedstrata.common.protocol.receiver import Fetched, ReceiverEvent
from fedstrata.common.runtime.endpoint import Endpoint
from fedstrata.common.runtime.world import World
from fedstrata.common.settings.links import Links, LinkSet

# duration of a probe on a link of a declared rate, or eight chunks if that is more
PROBE_S: Final = 0.25
CHUNK_LEAST: Final = 8192
CHUNKS_LEAST: Final = 8
CHUNKS_MOST: Final = 32
CHUNKS_USUAL: Final = 16
# bytes per second: a link of no declared rate is measured as if it had this one
UNDECLARED: Final = 2e6
FIRST: Final = 256e3  # bytes per second: the most that the first exchange asks for
GROWTH: Final = 10.0  # of the rate from one exchange to the next
FAR_LESS: Final = 0.25  # of the rate that an exchange asks for: it was the last one
REPEAT_S: Final = 2.0
CODEC: Final = "noise"
# limit of parallel calibrations: above it the broker is measured, not the links
TOGETHER_BYTES_S: Final = 25e6
TOGETHER_MOST: Final = 4
PATIENCE: Final = 0.5  # of `idle_s` per child, because others wait for the end of the calibration

log = logging.getLogger("fedstrata.probes")


class Probes:
    """The link calibrations of one endpoint, in either role."""

    def __init__(self, endpoint: Endpoint, world: World) -> None:
        self._endpoint = endpoint
        self._world = world
        self._answers: dict[str, tuple[str, asyncio.Future[Probed]]] = {}
        self._fetches: dict[tuple[str, str], asyncio.Future[float]] = {}
        self._measuring: dict[str, list[asyncio.Future[Any]]] = {}
        self._asked: Manifest | None = None
        self._asked_rate = FIRST
        self._answer: Probed | None = None
        self._answering: asyncio.Task[None] | None = None

    async def measure(self, peer: str) -> Measured:
        """Calibrate the link to a child. Raises TimeoutError, or RefusedModel on an invalid
        reply.
        """
        link = self._endpoint.link
        down, up = (ways[peer].rate or UNDECLARED for ways in (link.ways.to, link.ways.from_))
        step = FIRST
        async with asyncio.timeout(PATIENCE * link.transfer.idle_s):
            while True:
                found = await self._exchange(peer, min(down, step))
                asked = ((found.down, min(down, step)), (found.up, min(up, step)))
                if step >= max(down, up) or any(
                    rate and rate <= FAR_LESS * most for rate, most in asked
                ):
                    return found
                step *= GROWTH

    async def _exchange(self, peer: str, rate: float) -> Measured:
        """Measure both directions once, with noise for a link of `rate` bytes per second."""
        noise = self._offer(peer, rate)
        answered: asyncio.Future[Probed] = asyncio.get_running_loop().create_future()
        self._answers[peer] = noise.blob, answered
        self._measuring[peer] = [answered]
        try:
            while not answered.done():
                self._send(peer, Probe(noise))
                await asyncio.wait((answered,), timeout=REPEAT_S)
            answer = answered.result()
            most = PROBE_S * max(rate, self._endpoint.link.ways.from_[peer].rate or UNDECLARED)
            up = await self._fetch(
                peer, answer.model, most=2 * max(CHUNKS_LEAST * CHUNK_LEAST, most)
            )
            counters = self._endpoint.link.counters
            return Measured(
                up, answer.rate, counters.probed(peer, "received"), counters.probed(peer, "sent")
            )
        finally:
            del self._answers[peer]
            self._measuring.pop(peer, None)
            self._endpoint.retire(noise.blob)

    def receive(self, peer: str, message: Probe | Probed) -> None:
        """Handle a peer's probe, or its reply to one."""
        if isinstance(message, Probed):
            asked, answered = self._answers.get(peer, ("", None))
            if answered is not None and not answered.done() and message.asked == asked:
                answered.set_result(message)
        elif self._asked != message.model:
            rate = min(self._endpoint.link.ways.to[peer].rate or UNDECLARED, self._asked_rate)
            self._withdraw()
            self._asked = message.model
            self._answering = asyncio.create_task(
                self._respond(peer, message.model, rate), name="answer a probe"
            )
        elif self._answer is not None:
            self._send(peer, self._answer)

    def transferred(self, event: ReceiverEvent) -> None:
        """Handle a finished or failed fetch of noise."""
        fetched = self._fetches.pop((event.owner, event.blob), None)
        if fetched is None or fetched.done():
            return
        if isinstance(event, Fetched):
            fetched.set_result(event.rate or 0.0)
        else:
            _fail(fetched, event.reason)

    def abandon(self, peer: str) -> None:
        """Stop calibrating the link to a child whose process ended or restarted: it no longer holds
        the noise.
        """
        for measuring in self._measuring.pop(peer, ()):
            if not measuring.done():
                _fail(measuring, "its process has changed")

    def end(self) -> None:
        """Withdraw the reply to a probe: the run begins."""
        self._withdraw()
        self._asked_rate = FIRST

    def _withdraw(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
        if self._answer is not None:
            self._endpoint.retire(self._answer.model.blob)
        self._asked = self._answer = self._answering = None

    async def _respond(self, peer: str, noise: Manifest, rate: float) -> None:
        try:
            found = await self._fetch(peer, noise, most=NOISE_MOST)
        except RefusedModel:
            self._asked = None  # the probe will be repeated
            return
        self._answer = Probed(noise.blob, found, self._offer(peer, rate))
        self._asked_rate *= GROWTH
        self._send(peer, self._answer)

    async def _fetch(self, peer: str, noise: Manifest, *, most: float) -> float:
        if noise.codec != CODEC or noise.size > most:
            raise RefusedModel(f"{peer} probes with {noise.size} bytes of {noise.codec[:32]!r}")
        link = self._endpoint.link
        now = self._endpoint.now
        fetched: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._fetches[peer, noise.blob] = fetched
        if peer in self._measuring:
            self._measuring[peer].append(fetched)
        link.fetch_aside("probe", peer, noise, memoryview(bytearray(noise.size)), now())
        self._endpoint.wake()
        try:
            return await fetched
        finally:
            self._fetches.pop((peer, noise.blob), None)
            link.receiver.drop(peer, blob=noise.blob, now=now())

    def _offer(self, peer: str, rate: float) -> Manifest:
        link = self._endpoint.link
        chunk_bytes = int(
            min(max(rate * PROBE_S / CHUNKS_USUAL, CHUNK_LEAST), link.offers.chunk_most)
        )
        chunks = int(min(max(rate * PROBE_S / chunk_bytes, CHUNKS_LEAST), CHUNKS_MOST))
        data = memoryview(self._world.noise(chunk_bytes * chunks))
        noise = describe(data, chunk_bytes=chunk_bytes, codec=CODEC, layout="")
        link.offers.add_aside("probe", noise, data, peer)
        return noise

    def _send(self, peer: str, message: Probe | Probed) -> None:
        self._endpoint.link.outbox.send(peer, message, self._endpoint.now())
        self._endpoint.wake()


async def measure_all(
    probes: Probes, ways: LinkSet, links: Links, peers: Iterable[str]
) -> dict[str, Measured]:
    """Calibrate the links to these children, a few at a time, following `links.check`.

    A child that does not reply is omitted, with a warning. Raises InvalidExperiment if a link
    differs from its declared rate.
    """
    found: dict[str, Measured] = {}
    if links.check == "off":
        return found
    for group in _groups(ways, peers):
        results = await asyncio.gather(
            *(probes.measure(peer) for peer in group), return_exceptions=True
        )
        for peer, result in zip(group, results, strict=True):
            if isinstance(result, Measured):
                found[peer] = result
            elif isinstance(result, TimeoutError | RefusedModel):
                log.warning(
                    "the link of %s could not be measured: %s", peer, str(result) or "no reply"
                )
            else:
                raise result
    for peer, measured in found.items():
        for direction, declared, carries in (
            ("up", ways.from_[peer].rate, measured.up),
            ("down", ways.to[peer].rate, measured.down),
        ):
            if declared is not None and carries and abs(carries / declared - 1) > links.tolerance:
                _complain(peer, direction, declared, carries, links)
    return found


def _complain(peer: str, direction: str, declared: float, carries: float, links: Links) -> None:
    problem = f"it carries {carries * 8e-6:.4g} Mbit/s, {100 * (carries / declared - 1):+.0f} %"
    if links.check == "warn":
        log.warning(
            "link of %s %s, declared %.4g Mbit/s: %s", peer, direction, declared * 8e-6, problem
        )
        return
    raise InvalidExperiment(
        f"links: {peer}.{direction}_mbit",
        float(f"{declared * 8e-6:.4g}"),
        problem,
        "Declare the measured rate, raise links.tolerance, or set links.check = 'warn'.",
    )


def _groups(ways: LinkSet, peers: Iterable[str]) -> list[list[str]]:
    """Return groups of children whose links together carry at most `TOGETHER_BYTES_S`; a group has
    at least one.
    """
    groups: list[list[str]] = []
    load = 0.0
    for peer in peers:
        rate = max(
            way.rate or TOGETHER_BYTES_S / TOGETHER_MOST
            for way in (ways.to[peer], ways.from_[peer])
        )
        if not groups or load + rate > TOGETHER_BYTES_S or len(groups[-1]) == TOGETHER_MOST:
            groups.append([])
            load = 0.0
        groups[-1].append(peer)
        load += rate
    return groups


def _fail(future: asyncio.Future[Any], reason: str) -> None:
    """Set an error. Whoever waited may have run out of time at the same moment; then nobody asks
    for it.
    """
    future.set_exception(RefusedModel(reason))
    future.exception()
