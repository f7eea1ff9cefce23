"""What the trainings of a device cost on its host; None and "" where the host does not know it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypeVar

from fedstrata.common.host.energy_meters import EnergySource

JOULES_MOST: Final = 1e12  # of one local round
CPU_SECONDS_MOST: Final = 1e9  # of one local round
MEMORY_MOST: Final = 2**50
CELSIUS_MOST: Final = 1000.0

_T = TypeVar("_T", int, float)


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """The costs of a device's work in a round."""

    # the device's share of its host's energy since its last result, by `energy_source`
    joules: float | None = None
    train_joules: float | None = None  # the part of it during its own training
    # CPU seconds of the training's thread; of vmapped training the device's share
    cpu_s: float | None = None
    # the most resident memory of the process that trained, since that process began
    memory_bytes: int | None = None
    celsius: float | None = None  # of the host's hottest sensor at the end of the training
    energy_source: EnergySource = EnergySource.NONE

    def after(self, earlier: DeviceCosts) -> DeviceCosts:
        """Return these costs with those of earlier work: sums, the most memory, the highest
        temperature.

        A sum with an unknown part is unknown, and so is energy by different sources.
        """
        joules = train_joules = None
        source = EnergySource.NONE
        if self.energy_source is earlier.energy_source:
            joules = added(earlier.joules, self.joules)
            train_joules = added(earlier.train_joules, self.train_joules)
        if joules is not None:
            source = self.energy_source
        return DeviceCosts(
            joules,
            train_joules,
            added(earlier.cpu_s, self.cpu_s),
            _highest(earlier.memory_bytes, self.memory_bytes),
            _highest(earlier.celsius, self.celsius),
            source,
        )

    def plausible(self, *, rounds: int) -> DeviceCosts:
        """Return these costs without those that no work of so many local rounds has."""
        found = DeviceCosts(
            cpu_s=_within(self.cpu_s, 0.0, CPU_SECONDS_MOST * rounds),
            memory_bytes=_within(self.memory_bytes, 0, MEMORY_MOST),
            celsius=_within(self.celsius, -CELSIUS_MOST, CELSIUS_MOST),
        )
        joules = _within(self.joules, 0.0, JOULES_MOST * rounds)
        train_joules = _within(self.train_joules, 0.0, JOULES_MOST * rounds)
        source = self.energy_source
        if joules is None or train_joules is None or source is EnergySource.NONE:
            return found
        return replace(found, joules=joules, train_joules=train_joules, energy_source=source)


UNKNOWN_COSTS: Final = DeviceCosts()


def _highest(one: _T | None, other: _T | None) -> _T | None:
    """Return the higher value, the known one if one is not known."""
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)


def _within(value: _T | None, least: _T, most: _T) -> _T | None:
    """Return a value within bounds, None for another one; NaN is in none."""
    if value is not None and least <= value <= most:
        return value
    return None


def added(one: float | None, other: float | None) -> float | None:
    """Return the sum, None if one of both is not known."""
    if one is None or other is None:
        return None
    return one + other
