"""`make bench NAME=transfers`: rounds through mosquitto beside plain TCP, all in one run, as a
table.

A round moves `devices` models down and as many up; goodput = 2 * devices * bytes / time. Ratios are
what counts:
a machine's absolute figures wobble.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import oneway
from rich.console import Console
from rich.table import Table
from rounds import Rounds
from tcp import Baseline

from fedstrata.common.experiment.schema import TransferSettings

SETTINGS = ((250_000, 10), (250_000, 40), (45_000_000, 2), (45_000_000, 10), (45_000_000, 40))
"""Small models first: for seconds after a large round the kernel still writes and frees its files.
"""
REPEATS = 5
SMALL_REPEATS = 15


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians in seconds: a round before the baselines exist, then rounds, raw TCP and the relay in
    turn.

    `cpu`: CPU seconds per GB of broker, parent and devices; `peaks`: bytes of memory of parent and
    broker.
    """

    alone_s: float
    ours_s: float
    raw_s: float
    relay_s: float
    cpu: tuple[float, float, float]
    peaks: tuple[int, int]


def main() -> None:
    """Measure each setting, its three ways in turn, and print a table of medians."""
    table = Table(
        "round", "alone", "beside", "goodput", "raw TCP", "relay", "of raw TCP", "of relay",
        "CPU s per GB: broker + parent + devices", "parent", "broker",
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    for model_bytes, devices in SETTINGS:
        found = measure(model_bytes, devices)
        table.add_row(
            f"{devices} x {model_bytes / 1e6:g} MB",
            *(f"{seconds * 1e3:.0f} ms" for seconds in (found.alone_s, found.ours_s)),
            f"{2 * devices * model_bytes / found.ours_s / 1e9:.2f} GB/s",
            *(f"{seconds * 1e3:.0f} ms" for seconds in (found.raw_s, found.relay_s)),
            *(f"{100 * seconds / found.ours_s:.0f} %" for seconds in (found.raw_s, found.relay_s)),
            f"{sum(found.cpu):.2f} = " + " + ".join(f"{cpu_s:.2f}" for cpu_s in found.cpu),
            *(f"{peak / 1e6:.0f} MB" for peak in found.peaks),
        )
        print(".", end="", file=sys.stderr, flush=True)
    print(f"\none way, 45 MB: {oneway.play(45_000_000, repeats=2 * REPEATS)}", flush=True)
    console = Console(width=160)
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    console.print(
        f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, load "
        f"{load}"
    )
    console.print(table)


def measure(model_bytes: int, devices: int) -> Measured:
    """Measure rounds of one size, first alone, then beside the baselines and in turn with them."""
    repeats = REPEATS if model_bytes > TransferSettings().inline_bytes else SMALL_REPEATS
    with Rounds(model_bytes, devices) as ours:
        alone_s = statistics.median(ours.seconds() for _ in range(repeats))
        with (
            Baseline(model_bytes, down=devices, up=devices, relayed=False) as raw,
            Baseline(model_bytes, down=devices, up=devices, relayed=True) as relay,
        ):
            before = ours.cpu_s()
            times = [(ours.seconds(), raw.seconds(), relay.seconds()) for _ in range(repeats)]
            after = ours.cpu_s()
        peaks = ours.peak_bytes("parent"), ours.peak_bytes("broker")
    gigabytes = repeats * 2 * devices * model_bytes / 1e9
    broker, parent, devices_s = (
        (after[name] - before[name]) / gigabytes for name in ("broker", "parent", "devices-0")
    )
    ours_s, raw_s, relay_s = (statistics.median(column) for column in zip(*times, strict=True))
    return Measured(alone_s, ours_s, raw_s, relay_s, (broker, parent, devices_s), peaks)


if __name__ == "__main__":
    main()
