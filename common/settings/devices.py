"""The devices of an experiment: the hardware that they emulate, and when they are available.

A lab on one machine emulates devices that are slower than it. A result leaves no sooner than
`slowdown` times the device's own training seconds plus `overhead_s` after the model had arrived;
with `step_s` its training takes so many seconds for each step, whatever this machine needs. A wait
for a slot of this machine counts towards that time, because the emulated device would not have
waited. `hardware.toml` beside this file has the built-in profiles.

Devices come and leave at the times of a trace. The numbers of its file become part of the
experiment when it is read, so they travel to the nodes and stay with the run.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import blake2b
from itertools import pairwise
from math import exp, inf
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from pydantic import Field

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.randomness import Purpose, generator
from fedstrata.common.settings.csv_table import CsvTable
from fedstrata.common.settings.links import RateTrace, with_file
from fedstrata.common.settings.tables import Name, Positive, SettingsTable, named, with_own

AVAILABILITY_COLUMNS: Final = ("device", "begin_s", "end_s")  # of a trace of availability
CHANGES_MOST: Final = 50_000  # of all devices together: they are part of one message


class Pace(SettingsTable):
    """An emulated machine under a name. It adds to the profiles that ship, or replaces one of
    them.
    """

    # Training seconds of the emulated machine for one second of this host.
    slowdown: Annotated[float, Field(ge=1)] = 1.0
    # Seconds of a training step of the emulated machine, in place of `slowdown`; omitted:
    # `slowdown` times the host's.
    step_s: Positive | None = None
    overhead_s: Annotated[float, Field(ge=0)] = 0.0  # seconds of overhead for each result

    def emulated_s(self, train_s: float, *, steps: float) -> float:
        """Return the emulated seconds from a model's arrival to the result of a training of so many
        steps.

        `train_s`: the host's seconds.
        """
        emulated_s = self.slowdown * train_s
        if self.step_s is not None:
            emulated_s = self.step_s * steps
        return emulated_s + self.overhead_s


class Machine(Pace):
    """The machine that a device emulates. The name of a profile stands for a table that has only
    `profile`.
    """

    profile: Name | None = None  # it gives the keys that the table leaves out


class HardwareSettings(SettingsTable):
    """The machines that devices emulate: `default` for all, `hardware.of.DEVICE` for single
    devices.
    """

    default: Machine = Machine()
    # Standard deviation of the logarithm of each device's slowdown, drawn log-normally with the
    # default's slowdown as median, never below 1, or of its step_s. Devices in `of` keep theirs.
    spread: Annotated[float, Field(ge=0, le=3)] = 0.0
    of: dict[Name, Machine] = Field(default_factory=dict)
    profiles: dict[Name, Pace] = Field(default_factory=dict)

    def machine(self, device: str, *, seed: int) -> Machine:
        """Return the machine that a device emulates in the runs of a seed."""
        if device in self.of or not self.spread:
            return self.of.get(device, self.default)
        z = float(generator(seed, Purpose.HARDWARE, device).standard_normal())
        usual = self.default
        drawn = {"slowdown": max(1.0, usual.slowdown * exp(self.spread * z))}
        if usual.step_s is not None:
            drawn = {"step_s": usual.step_s * exp(self.spread * z)}
        return usual.model_copy(update=drawn)


@cache
def shipped() -> Mapping[str, Mapping[str, Any]]:
    """Return the built-in profiles by name."""
    return tomllib.loads(Path(__file__).with_name("hardware.toml").read_text(encoding="utf-8"))


def with_machines(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return an experiment's tree with the numbers of the profiles that its machines name.

    Values of a wrong type are left for the tables' own checks. Raises InvalidExperiment if a
    profile is unknown.
    """
    hardware = tree.get("hardware")
    if not isinstance(hardware, Mapping):
        return dict(tree)
    of = hardware.get("of")
    profiles = with_own(shipped(), hardware)
    resolved = dict(hardware)
    if "default" in hardware:
        resolved["default"] = named("hardware.default", hardware["default"], profiles)
    if isinstance(of, Mapping):
        resolved["of"] = {
            device: named(f"hardware.of.{device}", given, profiles) for device, given in of.items()
        }
    return {**tree, "hardware": resolved}


@dataclass(frozen=True)
class OnlineTimes:
    """The times of one device."""

    # Seconds from the run's begin on at which it comes, leaves, comes again, and so on.
    changes: tuple[float, ...]
    # They begin anew after so many seconds; None: after the last one nothing changes.
    repeat_s: float | None = None

    def online(self, t: float) -> bool:
        """Return whether the device is available at t seconds."""
        return self._trace.rate_at(t) > 0

    def next_change(self, t: float) -> float:
        """Return when it comes or leaves next after t seconds, inf: never."""
        return self._trace.next_change(t)

    def returns(self, t: float) -> float:
        """Return when it is available from t seconds on: t if it is, inf if it never is again."""
        while not self.online(t):
            t = self.next_change(t)
            if t == inf:
                break
        return t

    def after(self, begin: float, seconds: float) -> float:
        """Return when it will have been available for so many seconds from `begin` on.

        The time after its last departure counts: then it is lost, as any other device that left.
        """
        return self._patience.finish(max(0.0, begin), seconds) + min(0.0, begin)

    @cached_property
    def _trace(self) -> RateTrace:
        """The times as a rate: 1 while the device is available, else 0."""
        starts = (0.0, *self.changes)
        if self.changes[0] == 0:  # then it is never away at the begin
            starts = self.changes
        skipped = len(starts) == len(self.changes)
        rates = tuple(float((place + skipped) % 2) for place in range(len(starts)))
        return RateTrace(starts, rates, (0.0,) * len(starts), self.repeat_s)

    @cached_property
    def _patience(self) -> RateTrace:
        trace = self._trace
        if self.repeat_s:
            return trace
        return RateTrace(trace.starts, (*trace.rates[:-1], 1.0), trace.delays)


class Move(SettingsTable):
    """A device's change of its parent."""

    at_s: Annotated[float, Field(ge=0)]  # seconds from the first global round on
    parent: Name  # to which it moves


@dataclass(frozen=True, slots=True)
class Moves:
    """A device's moves in a run, in order."""

    each: Sequence[Move]

    def due(self, t: float) -> Move | None:
        """Return the last move up to t seconds since the run's begin, None before the first one."""
        return next((move for move in reversed(self.each) if move.at_s <= t), None)

    def next_change(self, t: float) -> float:
        """Return when the next move is due, inf if there is none."""
        return next((move.at_s for move in self.each if move.at_s > t), inf)


Online: TypeAlias = Mapping[str, OnlineTimes | None]  # by node; None: always


class AvailabilityTrace(SettingsTable):
    """When devices are available. The name of a CSV file stands for a table that has only `file`.

    The file has the columns device, begin_s and end_s: a row for each interval in which a device is
    available, in seconds from the first global round on. An empty end_s stands for the end of the
    run. Devices without a row are always available.
    """

    file: str = ""  # relative to the experiment's folder
    # Seconds after which the trace begins anew; omitted: after its last interval a device is away
    # for good.
    repeat_s: Positive | None = None
    # By device: the seconds at which it comes, leaves, comes again, and so on.
    changes: dict[Name, Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1)]] = (
        Field(default_factory=dict)
    )

    def recorded(self) -> dict[str, Any]:
        """Return the trace without its numbers; the digest, 16 hexadecimal digits, identifies
        them.
        """
        digest = blake2b(self.model_dump_json(exclude={"file"}).encode(), digest_size=8).hexdigest()
        return {
            "file": self.file,
            "repeat_s": self.repeat_s,
            "devices": len(self.changes),
            "digest": digest,
        }

    def times(self, device: str) -> OnlineTimes | None:
        """Return the times of a device, None if it is always available."""
        changes = self.changes.get(device)
        if changes is None:
            return None
        return OnlineTimes(tuple(changes), self.repeat_s)


class Availability(SettingsTable):
    """When devices take part. One that is away neither trains nor answers; its parent sees that it
    has left.
    """

    trace: AvailabilityTrace | None = None  # or the name of its CSV file
    # By device: the parents to which it moves, `[{ at_s = 60, parent = "institution-1" }]`, each
    # with the seconds from the first global round on. It needs `entering`.
    moves: dict[Name, Annotated[list[Move], Field(min_length=1)]] = Field(default_factory=dict)


def check_availability(
    availability: Availability, check_device: Callable[[str, str], None]
) -> None:
    """Raise InvalidExperiment if a trace cannot be replayed, or names another node than devices."""
    trace = availability.trace
    if trace is None:
        return
    key = "availability.trace"
    if not trace.changes:
        remedy = f"Write rows {','.join(AVAILABILITY_COLUMNS)}."
        raise InvalidExperiment(key, trace.file, "no interval of any device", remedy)
    count = sum(map(len, trace.changes.values()))
    if count > CHANGES_MOST:
        remedy = f"Use at most {CHANGES_MOST:,} in all."
        raise InvalidExperiment(f"{key}.changes", count, "too many changes", remedy)
    for device, changes in trace.changes.items():
        at = f"{key}.changes"
        check_device(at, device)
        if any(after <= before for before, after in pairwise(changes)):
            remedy = "Sort the intervals; they must not overlap."
            raise InvalidExperiment(f"{at}.{device}", changes[0], "does not grow", remedy)
        if trace.repeat_s is None:
            continue
        end = changes[-1]
        open_ended = len(changes) % 2 == 1
        if trace.repeat_s < end or (open_ended and trace.repeat_s == end):
            problem = f"{device}'s trace is longer"
            remedy = f"Repeat after more than {end:g} s."
            raise InvalidExperiment(f"{key}.repeat_s", trace.repeat_s, problem, remedy)


def with_availability(tree: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return an experiment's tree with the numbers of the file that `availability.trace` names.

    Raises InvalidExperiment.
    """
    table = tree.get("availability")
    if not isinstance(table, Mapping) or "trace" not in table:
        return dict(tree)
    trace = with_file(
        "availability.trace",
        table["trace"],
        folder,
        numbers="changes",
        columns=AVAILABILITY_COLUMNS,
        convert=_changes,
    )
    return {**tree, "availability": {**table, "trace": trace}}


def _changes(table: CsvTable) -> dict[str, Any]:
    of_device, of_begin, of_end = table.places(AVAILABILITY_COLUMNS)
    changes: dict[str, list[float]] = {}
    for row in table:
        device = row[of_device].strip()
        begin = table.number(row, of_begin)
        end = table.number(row, of_end) if row[of_end].strip() else inf
        interval = f"in line {table.line}, {device}'s interval from {begin:g} s"
        if not begin < end:
            raise table.wrong(f"{interval} ends at {end:g} s", "Correct that line.")
        found = changes.setdefault(device, [])
        if found and found[-1] == begin and len(found) % 2 == 0:
            del found[-1]  # the intervals touch
        elif len(found) % 2 or (found and found[-1] > begin):
            problem = f"{interval} begins before the end of the one above it"
            raise table.wrong(problem, "Sort the intervals.")
        else:
            found.append(begin)
        if end < inf:
            found.append(end)
    return {"changes": changes}
