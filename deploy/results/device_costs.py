"""What a run cost on the hosts of its devices: sums over devices.csv, and a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import fsum
from typing import Final

from fedstrata.cloud.records import DeviceRecord
from fedstrata.deploy.console.tabular import Column, Table
from fedstrata.deploy.results.run import Run

SUMS: Final = ("joules", "cpu_s")
# Of `costs_until`, with the columns of a table.
COSTS: Final[Mapping[str, Column]] = {
    "joules": Column("energy", "J"),
    "joules_per_point": Column("energy per point of the score", "J", 3),
    "joules_per_mb": Column("energy per MB", "J", 3),
    "cpu_s": Column("CPU of trainings", "s", 2),
}
NOTE: Final = (
    "Energy is that of the devices' hosts, all their programs, from a device's first training to "
    "its last result, idle "
    "time included; several devices of a process share it. Empty: not known for all of them."
)


def costs_until(run: Run, global_round: int) -> dict[str, float]:
    """Return the sums over all devices up to a global round, without those that are not known of
    all results.

    joules_per_point    over 100 times the score of that round, where a score is a share of 1
    joules_per_mb       over the MQTT bytes of all links until then
    """
    found: dict[str, float] = {}
    for name in SUMS:
        value = total(run.devices, name, until=global_round)
        if value is not None:
            found[name] = value
    if "joules" in found:
        rounds = [row for row in run.rounds if row.global_round <= global_round]
        score = rounds[-1].score if rounds else None
        count = sum(sum(row.bytes_.values()) for row in rounds)
        if run.experiment.score.share and score is not None and score > 0:
            found["joules_per_point"] = found["joules"] / (100 * score)
        if count:
            found["joules_per_mb"] = found["joules"] / (count / 1e6)
    return {name: found[name] for name in COSTS if name in found}


def total(rows: Sequence[DeviceRecord], name: str, *, until: int | None = None) -> float | None:
    """Return the sum of a column over the rows with work, None if a cell is empty, or if there are
    none.
    """
    work = [
        row for row in rows if row.local_rounds and (until is None or row.global_round <= until)
    ]
    values = [getattr(row, name) for row in work]
    if not values or None in values:
        return None
    return fsum(values)


def most(rows: Sequence[DeviceRecord], name: str) -> float | None:
    """Return the greatest known value of a column."""
    return max((value for row in rows if (value := getattr(row, name)) is not None), default=None)


def sources_of(runs: Sequence[Run]) -> str:
    """Return what measured the energy of some runs' devices, such as `plug and rapl`; empty if
    nothing did.
    """
    return " and ".join(
        sorted({row.energy_source for run in runs for row in run.devices if row.energy_source})
    )


_CELLS: Final[Mapping[Column, Callable[[Sequence[DeviceRecord]], float | None]]] = {
    COSTS["joules"]: lambda rows: total(rows, "joules"),
    Column("of it in training", "J"): lambda rows: total(rows, "train_joules"),
    COSTS["cpu_s"]: lambda rows: total(rows, "cpu_s"),
    Column("peak memory", "MB"): lambda rows: (
        None if (found := most(rows, "memory_bytes")) is None else found / 1e6
    ),
    Column("hottest", "°C"): lambda rows: most(rows, "celsius"),
}


def table(run: Run, *, each_most: int) -> Table | None:
    """Return a table of each device's costs, under those of all; of more than `each_most` devices
    those of all alone.

    None if nothing is known.
    """
    devices: dict[str, list[DeviceRecord]] = {}
    for row in run.devices:
        devices.setdefault(row.node, []).append(row)
    groups = {"all": list(run.devices)} | (devices if len(devices) <= each_most else {})
    known = []
    for column, cell in _CELLS.items():
        values = [cell(found) for found in groups.values()]
        if values.count(None) < len(values):
            known.append((column, values))
    if not known:
        return None
    sources = sources_of([run])
    title = "Costs on the devices' hosts" + (f", energy by {sources}" if sources else "")
    if run.rounds and (ratios := costs_until(run, run.rounds[-1].global_round)):
        for key in ("joules_per_point", "joules_per_mb"):
            if key in ratios:
                name = COSTS[key].name.removeprefix("energy ")
                title += f", {ratios[key]:.3g} {COSTS[key].unit} {name}"
    values_of = [values for _, values in known]
    rows = [list(row) for row in zip(groups, *values_of, strict=True)]
    columns = [Column("device", text=True), *(column for column, _ in known)]
    return Table(run.file_name("costs"), title, columns, rows)
