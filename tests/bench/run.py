"""`make bench`: rounds through mosquitto beside plain TCP, all in one run, as a table.

A round moves `devices` models down and as many up; goodput = 2 * devices * bytes / time. Ratios are what counts:
a machine's absolute figures wobble.
"""

from __future__ import annotations

import os
import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import rounds
import tcp
from rich.console import Console
from rich.table import Table

SETTINGS = ((45_000_000, 2), (45_000_000, 10), (250_000, 10), (250_000, 40))


def main() -> None:
    """Measure each setting and print a row for it as it comes."""
    table = Table("round", "fedstrata", "goodput", "raw TCP", "relay", "of raw TCP", "of relay", "parent's peak memory")
    for column in table.columns[1:]:
        column.justify = "right"
    for model_bytes, devices in SETTINGS:
        raw_s = tcp.raw_tcp(model_bytes, devices)
        relay_s = tcp.relay(model_bytes, devices)
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:  # a peak of memory of its own
            timing = fresh.submit(rounds.play, model_bytes, devices).result()
        table.add_row(
            f"{devices} x {model_bytes / 1e6:g} MB",
            f"{timing.seconds * 1e3:.0f} ms",
            f"{2 * devices * model_bytes / timing.seconds / 1e9:.2f} GB/s",
            f"{raw_s * 1e3:.0f} ms",
            f"{relay_s * 1e3:.0f} ms",
            f"{100 * raw_s / timing.seconds:.0f} %",
            f"{100 * relay_s / timing.seconds:.0f} %",
            f"{timing.parent_peak / 1e6:.0f} MB",
        )
        print(".", end="", file=sys.stderr, flush=True)
    console = Console(width=140)
    console.print(f"\n{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    console.print(table)


if __name__ == "__main__":
    main()
