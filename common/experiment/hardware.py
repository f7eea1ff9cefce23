"""The emulated speed of an experiment's devices: a factor on their training seconds and a constant overhead.

A lab on one machine emulates devices that are slower than it. A result leaves no sooner than `slowdown` times the
device's own training seconds plus `overhead_s` after the model had arrived. A wait for a slot of this machine counts
towards that time, because the emulated device would not have waited. `hardware.toml` beside this file has the built-in
profiles.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from math import exp
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from common.experiment.tables import Name, SettingsTable, named
from common.randomness import Purpose, generator


class Pace(SettingsTable):
    """An emulated machine under a name. It adds to the profiles that ship, or replaces one of them."""

    # Training seconds of the emulated machine for one second of this host.
    slowdown: Annotated[float, Field(ge=1)] = 1.0
    overhead_s: Annotated[float, Field(ge=0)] = 0.0  # seconds of overhead for each result

    def emulated_s(self, train_s: float) -> float:
        """Return the emulated seconds from a model's arrival to the result, given the host's training seconds."""
        return self.slowdown * train_s + self.overhead_s


class Machine(Pace):
    """The machine that a device emulates. The name of a profile stands for a table that has only `profile`."""

    profile: Name | None = None  # it gives the keys that the table leaves out


class HardwareSettings(SettingsTable):
    """The machines that devices emulate: `default` for all, `hardware.of.DEVICE` for single devices."""

    default: Machine = Machine()
    # Standard deviation of the logarithm of each device's slowdown, drawn log-normally with the default's slowdown as
    # median, never below 1. Devices in `of` keep theirs.
    spread: Annotated[float, Field(ge=0, le=3)] = 0.0
    of: dict[Name, Machine] = Field(default_factory=dict)
    profiles: dict[Name, Pace] = Field(default_factory=dict)

    def machine(self, device: str, *, seed: int) -> Machine:
        """Return the machine that a device emulates in the runs of a seed."""
        if device in self.of or not self.spread:
            return self.of.get(device, self.default)
        z = float(generator(seed, Purpose.HARDWARE, device).standard_normal())
        return self.default.model_copy(update={"slowdown": max(1.0, self.default.slowdown * exp(self.spread * z))})


@cache
def shipped() -> Mapping[str, Mapping[str, Any]]:
    """Return the built-in profiles by name."""
    return tomllib.loads(Path(__file__).with_name("hardware.toml").read_text(encoding="utf-8"))


def resolve(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return an experiment's tree with the numbers of the profiles that its machines name.

    Values of a wrong type are left for the tables' own checks. Raises InvalidExperiment if a profile is unknown.
    """
    hardware = tree.get("hardware")
    if not isinstance(hardware, Mapping):
        return dict(tree)
    own, of = hardware.get("profiles"), hardware.get("of")
    profiles = {**shipped(), **(own if isinstance(own, Mapping) else {})}
    resolved = dict(hardware)
    if "default" in hardware:
        resolved["default"] = named("hardware.default", hardware["default"], profiles)
    if isinstance(of, Mapping):
        resolved["of"] = {device: named(f"hardware.of.{device}", given, profiles) for device, given in of.items()}
    return {**tree, "hardware": resolved}
