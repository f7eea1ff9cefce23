"""`make bench`: rounds through mosquitto beside plain TCP, all in one run, as a table.

A round moves `devices` models down and as many up; goodput = 2 * devices * bytes / time. Ratios are what counts:
a machine's absolute figures wobble.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import oneway
from rich.console import Console
from rich.table import Table
from rounds import Rounds
from tcp import Baseline

SETTINGS = ((45_000_000, 2), (45_000_000, 10), (45_000_000, 40), (250_000, 10), (250_000, 40))
REPEATS = 5


def main() -> None:
    """Measure each setting, its three ways in turn, and print a table of medians."""
    one_way = oneway.play(45_000_000, repeats=REPEATS)
    print(f"one way, 45 MB: {one_way}", flush=True)
    table = Table("round", "fedstrata", "goodput", "raw TCP", "relay", "of raw TCP", "of relay", "parent", "broker")
    for column in table.columns[1:]:
        column.justify = "right"
    for model_bytes, devices in SETTINGS:
        ours_s, raw_s, relay_s, peaks = _measure(model_bytes, devices)
        table.add_row(
            f"{devices} x {model_bytes / 1e6:g} MB",
            f"{ours_s * 1e3:.0f} ms",
            f"{2 * devices * model_bytes / ours_s / 1e9:.2f} GB/s",
            f"{raw_s * 1e3:.0f} ms",
            f"{relay_s * 1e3:.0f} ms",
            f"{100 * raw_s / ours_s:.0f} %",
            f"{100 * relay_s / ours_s:.0f} %",
            *(f"{peak / 1e6:.0f} MB" for peak in peaks),
        )
        print(".", end="", file=sys.stderr, flush=True)
    console = Console(width=140)
    console.print(f"\n{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    console.print(table)


def _measure(model_bytes: int, devices: int) -> tuple[float, float, float, tuple[int, int]]:
    """Return the medians of our round, of raw TCP and of the relay, and peaks of memory of parent and broker."""
    with (
        Rounds(model_bytes, devices) as ours,
        Baseline(model_bytes, down=devices, up=devices, relayed=False) as raw,
        Baseline(model_bytes, down=devices, up=devices, relayed=True) as relay,
    ):
        times = [(ours.seconds(), raw.seconds(), relay.seconds()) for _ in range(REPEATS)]
        peaks = ours.peak_bytes("parent"), ours.peak_bytes("broker")
    ours_s, raw_s, relay_s = (statistics.median(column) for column in zip(*times, strict=True))
    return ours_s, raw_s, relay_s, peaks


if __name__ == "__main__":
    main()
