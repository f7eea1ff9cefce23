"""The energy of the cloud's host during the global rounds, for manifest.json."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from cloud.results import RunFolder
from common.errors import StorageFailed
from common.host.energy import EnergyMeter
from common.host.offload import offload

READ_S: Final = 10.0  # a power is integrated between two readings


@asynccontextmanager
async def energy_noted(folder: RunFolder, meter: EnergyMeter | None) -> AsyncIterator[None]:
    """Add what this host takes meanwhile to the run's manifest; nothing if its energy is not known."""
    if meter is None:
        yield
        return
    begun, before = time.monotonic(), dict(await offload(meter.read))
    reading = asyncio.create_task(_keep_reading(meter), name="energy")
    try:
        yield
    finally:
        reading.cancel()
        after = dict(meter.read())
        used = {" ".join(part): joules - before[part] for part, joules in after.items() if part in before}
        with suppress(StorageFailed):  # what is essential to the run is written by others, who report it
            folder.add_energy(used, seconds=time.monotonic() - begun)


async def _keep_reading(meter: EnergyMeter) -> None:
    while True:
        await asyncio.sleep(READ_S)
        await offload(meter.read)
