"""The source of a host's energy, as the user of the host names it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.host.energy_meters import (
    REPORT_BYTES_MOST,
    EnergyMeter,
    EnergySource,
    HostCounter,
    JouleCounter,
    PlugMeter,
)
from fedstrata.common.host.offload import beside
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.connection import Handlers
from fedstrata.common.protocol.limits import SKIPPED, Skipped
from fedstrata.common.runtime.lab_client import keep
from fedstrata.common.runtime.world import REAL, World, new_session

OPTION: Final = "--energy"
AUTO: Final = "auto"  # the host's own counters, if it has any
UNKNOWN: Final = "none"
COUNTERS: Final = {
    EnergySource.RAPL: "chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj",
    EnergySource.NVML: "Install NVIDIA's driver; the GPU must be from Volta on",
    EnergySource.PMIC: "Run it on a Raspberry Pi 5, in the group video",
}
WILDCARDS: Final = "+#\0"

log = logging.getLogger("fedstrata.energy")


def check_energy(source: str) -> None:
    """Check the name of a source, but not whether this host has it. Raises InvalidExperiment."""
    kind, colon, where = source.partition(":")
    names = (AUTO, UNKNOWN, *COUNTERS)
    if source not in names and not (kind == EnergySource.PLUG and colon and where):
        remedy = f"Use {', '.join(names)} or plug:TOPIC."
        raise InvalidExperiment(OPTION, source, "no such source of energy", remedy)
    if kind == EnergySource.PLUG and (
        len(where) > 1000 or any(each in where for each in WILDCARDS)
    ):
        raise InvalidExperiment(
            OPTION, source, "not the topic of one plug", "Name a topic without + and #."
        )


@asynccontextmanager
async def energy_counter(
    source: str,
    broker: BrokerAddress,
    *,
    world: World = REAL,
    meter: Callable[[], EnergyMeter] = EnergyMeter.of_this_host,
) -> AsyncIterator[JouleCounter | None]:
    """Yield the counter of a source, None if the energy of this host stays unknown.

    auto, none    the host's own counters, if it has any; or nothing
    rapl, nvml, pmic    one of them
    plug:TOPIC    a smart plug that publishes on the broker, over a connection of its own

    Raises InvalidExperiment.
    """
    check_energy(source)
    kind, _, where = source.partition(":")
    if kind == EnergySource.PLUG:
        async with _plug(where, broker, world) as plug:
            yield plug
    elif source == UNKNOWN:
        yield None
    else:
        wanted = EnergySource.NONE if source == AUTO else EnergySource(source)
        counter = HostCounter(meter(), wanted)
        if counter.source is not EnergySource.NONE:
            yield counter
        elif source == AUTO:
            yield None
        else:
            remedy = f"{COUNTERS[wanted]}, or omit {OPTION}."
            raise InvalidExperiment(
                OPTION, source, "this host has no such counter that can be read", remedy
            )


@asynccontextmanager
async def _plug(topic: str, broker: BrokerAddress, world: World) -> AsyncIterator[PlugMeter]:
    """Yield the meter of a plug, which reports on a topic. Retained reports are ignored: their time
    is not known.
    """
    plug = PlugMeter(asyncio.get_running_loop().time, topic=topic)

    def received(_: str, body: bytes, retained: bool) -> None:
        if not retained:
            plug.report(body)

    def refused(_: str) -> None:
        log.warning(
            "broker %s: this login may not read %s. Allow it, or the energy stays unknown.",
            broker,
            topic,
        )

    async def connected() -> None:
        connection.subscribe([topic], qos=0, refused=refused)

    def skipped(_: str, size: int) -> Skipped | None:
        if size > REPORT_BYTES_MOST:
            return SKIPPED
        return None

    connection = world.connection(
        broker,
        Handlers(received, connected, find_place=skipped),
        client_id=f"energy-{new_session(world)}",
        keepalive_s=TransferSettings().keepalive_s,
    )
    async with beside(keep(connection), name="plug"):
        yield plug
