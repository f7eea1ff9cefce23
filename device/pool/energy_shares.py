"""The energy of a host, divided among the devices of this process.

At each moment the host's power belongs in equal parts to the trainings in progress; while there are
none, to the devices that take part in a run. So the joules of all devices add up to what the host's
counter has counted, from the first request of a training to the last result. Other processes of the
host are part of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from fedstrata.common.accounting.costs import DeviceCosts, added
from fedstrata.common.host.energy_meters import JouleCounter
from fedstrata.common.host.offload import offload

READ_S: Final = 10.0  # counters wrap around, and a power is integrated between two readings


@dataclass(slots=True)
class _Share:
    """A device's joules since its last result, None: some of them are not known."""

    joules: float | None = 0.0
    train_joules: float | None = 0.0

    def add(self, joules: float | None, *, trains: bool) -> None:
        self.joules = added(self.joules, joules)
        if trains:
            self.train_joules = added(self.train_joules, joules)


class EnergyShares:
    """Divides what `counter` counts; `celsius` reads the temperature of the host. None: not
    known.
    """

    def __init__(
        self, counter: JouleCounter | None = None, celsius: Callable[[], float | None] | None = None
    ) -> None:
        self._counter = counter
        self._celsius = celsius
        self._shares: dict[str, _Share] = {}
        self._training: Counter[str] = Counter()
        self._last: float | None = None
        self._reading = asyncio.Lock()

    async def open(self, device: str) -> None:
        """Let a device share the energy from now on, until it leaves."""
        if self._counter is not None and device not in self._shares:
            async with self._reading:
                await self._divide(self._counter)
                self._shares.setdefault(device, _Share())

    def leave(self, device: str) -> None:
        """Forget a device that leaves its run."""
        self._shares.pop(device, None)

    async def begin(self, devices: list[str]) -> None:
        """Note that these devices' trainings begin."""
        if self._counter is not None:
            async with self._reading:
                await self._divide(self._counter)
                self._training.update(devices)

    def stop(self, device: str) -> None:
        """Note that a training has ended, if it had begun."""
        if self._training[device]:
            self._training[device] -= 1
        self._training += Counter()  # without those that are 0

    async def end(self, device: str, costs: DeviceCosts) -> DeviceCosts:
        """Note that a training has ended with a result; return its costs with the energy since the
        last one.
        """
        if self._celsius is not None:
            costs = replace(costs, celsius=await offload(self._celsius))
        if self._counter is None:
            return costs
        async with self._reading:
            await self._divide(self._counter)
            self.stop(device)
            share = self._shares.get(device, _Share(None))
            self._shares[device] = _Share()
        if share.joules is None:
            return costs
        source = self._counter.source
        return replace(
            costs, joules=share.joules, train_joules=share.train_joules, energy_source=source
        )

    async def keep_reading(self) -> None:
        """Read the counter from time to time."""
        while self._counter is not None:
            await asyncio.sleep(READ_S)
            async with self._reading:
                await self._divide(self._counter)

    async def _divide(self, counter: JouleCounter) -> None:
        """Divide what was counted since the last reading."""
        joules = await offload(counter.joules)
        used = None
        if joules is not None and self._last is not None:
            used = joules - self._last
        if used is not None and not 0 <= used < inf:
            used = None  # no counter of ours, but a share that is no number would cost a model
        self._last = joules
        among = self._training.total() or len(self._shares)
        trains = bool(self._training)
        for device, share in self._shares.items():
            parts = self._training[device] if trains else 1
            if parts:
                part = None if used is None else used * parts / among
                share.add(part, trains=trains)
