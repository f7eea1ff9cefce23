"""The environment of one simulated process: implements `common.runtime.world.World`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final

from common.net.address import BrokerAddress
from common.net.packets import FindPlace, Place
from common.protocol.bounds import skip_large
from common.runtime.world import Connection, Received
from deploy.simulation.broker import SimulatedBroker
from deploy.simulation.connection import SimulatedConnection
from deploy.simulation.network import SimulatedLink, SimulatedNetwork
from deploy.simulation.process import SimulatedProcess

NOISE_DRAWN: Final = 1021  # a prime, so that chunks begin at different offsets of the pattern
EPOCH_S: Final = 1_700_000_000.0  # Unix seconds where the virtual time is 0


class SimulatedWorld:
    """A process's simulated network, tokens drawn from the seed, and a wall clock with an offset of `clock_offset_s`.

    The host of a broker's address is the broker's name, or one of its names. `process` is set once it exists.
    """

    process: SimulatedProcess

    def __init__(
        self, network: SimulatedNetwork, name: str, *, generation: int = 0, clock_offset_s: float = 0.0
    ) -> None:
        self._network = network
        self._name = name
        self._clock_offset_s = clock_offset_s
        self.connections: list[SimulatedConnection] = []
        self._rng = random.Random(f"{network.seed} process {name} {generation}")

    def connection(
        self,
        address: BrokerAddress,
        *,
        client_id: str,
        keepalive_s: int,
        received: Received,
        connected: Callable[[], Awaitable[None]],
        lost: Callable[[], None],
        find_place: FindPlace = skip_large,
        landed: Callable[[str, Place], None] = lambda topic, place: None,
        will: tuple[str, bytes] | None = None,
    ) -> Connection:
        """Return a connection to a simulated broker."""
        connection = SimulatedConnection(
            address,
            reach=self._reach,
            process=self.process,
            client_id=client_id,
            keepalive_s=keepalive_s,
            received=received,
            connected=connected,
            lost=lost,
            find_place=find_place,
            landed=landed,
            will=will,
        )
        self.connections.append(connection)
        return connection

    def _reach(self, address: BrokerAddress) -> tuple[SimulatedBroker, SimulatedLink]:
        return self._network.brokers[address.host], self._network.link(self._name, address.host)

    async def packet_limit(self, address: BrokerAddress, *, topic: str, most: int) -> int | None:
        """Return the broker's packet limit in bytes, or None."""
        return self._network.brokers[address.host].packet_limit

    def token(self, nbytes: int) -> str:
        """Return random bytes as hexadecimal digits."""
        return self._rng.randbytes(nbytes).hex()

    def wall(self) -> float:
        """Return Unix seconds by this process's clock."""
        return EPOCH_S + self._clock_offset_s + asyncio.get_running_loop().time()

    def noise(self, nbytes: int) -> bytes:
        """Return a repeated pattern of random bytes: fully random ones would take most of the simulation's time."""
        drawn = self._rng.randbytes(NOISE_DRAWN)
        return (drawn * (nbytes // NOISE_DRAWN + 1))[:nbytes]
