"""What the trainings of a device cost on its host; None and "" where the host does not know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

from fedstrata.common.host.energy import EnergySource

JOULES_MOST: Final = 1e12  # of one local round
CPU_SECONDS_MOST: Final = 1e9  # of one local round
MEMORY_MOST: Final = 2**50
CELSIUS_MOST: Final = 1000.0

_T = TypeVar("_T", int, float)


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """The costs of a device's work in a round.

    joules: the device's share of its host's energy since its last result, by `energy_source`
    train_joules: the part of it during its own training
    cpu_s: CPU seconds of the training's thread; of vmapped training the device's share
    memory_bytes: the most resident memory of the process that trained, since that process began
    celsius: of the hottest sensor of the host at the end of the training
    """

    joules: float | None = None
    train_joules: float | None = None
    cpu_s: float | None = None
    memory_bytes: int | None = None
    celsius: float | None = None
    energy_source: EnergySource = EnergySource.NONE

    def after(self, earlier: DeviceCosts) -> DeviceCosts:
        """Return these costs with those of earlier work: sums, the most memory, the highest
        temperature.

        A sum with an unknown part is unknown, and so is energy by different sources.
        """
        joules = train_joules = None
        if self.energy_source is earlier.energy_source:
            joules = added(earlier.joules, self.joules)
            train_joules = added(earlier.train_joules, self.train_joules)
        memory = [each.memory_bytes for each in (earlier, self) if each.memory_bytes is not None]
        celsius = [each.celsius for each in (earlier, self) if each.celsius is not None]
        return DeviceCosts(
            joules,
            train_joules,
            added(earlier.cpu_s, self.cpu_s),
            max(memory, default=None),
            max(celsius, default=None),
            EnergySource.NONE if joules is None else self.energy_source,
        )

    def plausible(self, *, rounds: int) -> DeviceCosts:
        """Return these costs without those that no work of so many local rounds has."""
        energy = [each for each in (self.joules, self.train_joules) if each is not None]
        measured = len(energy) == 2 and self.energy_source is not EnergySource.NONE
        known = measured and all(0 <= each <= JOULES_MOST * rounds for each in energy)
        return DeviceCosts(
            joules=self.joules if known else None,
            train_joules=self.train_joules if known else None,
            cpu_s=_within(self.cpu_s, 0.0, CPU_SECONDS_MOST * rounds),
            memory_bytes=_within(self.memory_bytes, 0, MEMORY_MOST),
            celsius=_within(self.celsius, -CELSIUS_MOST, CELSIUS_MOST),
            energy_source=self.energy_source if known else EnergySource.NONE,
        )


UNKNOWN_COSTS: Final = DeviceCosts()


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
