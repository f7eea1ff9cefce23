"""`make bench NAME=transfers`: rounds through mosquitto beside plain TCP, all in one run, as a
table.

A round moves `devices` models down and as many up; goodput = 2 * devices * bytes / time. Ratios are
what counts:
a machine's absolute figures wobble.
"""

from __future__ import annotations

from fedstrata.common.experiment.schema import TransferSettings
from tests.bench import oneway
from tests.bench.rounds import Rounds
from tests.bench.running import MB, Table, medians, run
from tests.bench.tcp import Baseline

SETTINGS = ((250_000, 10), (250_000, 40), (45_000_000, 2), (45_000_000, 10), (45_000_000, 40))
"""Small models first: for seconds after a large round the kernel still writes and frees its files.
"""
REPEATS = 5
SMALL_REPEATS = 15


def measure(table: Table, model_bytes: int, devices: int) -> None:
    """Measure rounds of one size, first alone, then beside the baselines and in turn with them."""
    repeats = REPEATS if model_bytes > TransferSettings().inline_bytes else SMALL_REPEATS
    with Rounds(model_bytes, devices) as ours:
        (alone_s,) = medians(repeats, ours.seconds)
        with (
            Baseline(model_bytes, down=devices, up=devices, relayed=False) as raw,
            Baseline(model_bytes, down=devices, up=devices, relayed=True) as relay,
        ):
            before = ours.cpu_s()
            ours_s, *others_s = medians(repeats, ours.seconds, raw.seconds, relay.seconds)
            after = ours.cpu_s()
        peaks = ours.peak_bytes("parent"), ours.peak_bytes("broker")
    gigabytes = 2 * devices * model_bytes / 1e9
    cpu = [
        (after[name] - before[name]) / gigabytes / repeats
        for name in ("broker", "parent", "devices-0")
    ]
    table.add(
        f"{devices} x {model_bytes / 1e6:g} MB",
        *(f"{seconds * 1e3:.0f} ms" for seconds in (alone_s, ours_s)),
        f"{gigabytes / ours_s:.2f} GB/s",
        *(f"{seconds * 1e3:.0f} ms" for seconds in others_s),
        *(f"{100 * seconds / ours_s:.0f} %" for seconds in others_s),
        f"{sum(cpu):.2f} = " + " + ".join(f"{cpu_s:.2f}" for cpu_s in cpu),
        *(f"{peak / MB:.0f} MB" for peak in peaks),
    )


def main() -> None:
    """Measure each setting, its three ways in turn, and print a table of medians."""
    table = Table(
        "round", "alone", "beside", "goodput", "raw TCP", "relay", "of raw TCP", "of relay",
        "CPU s per GB: broker + parent + devices", "parent", "broker",
    )  # fmt: skip
    for setting in SETTINGS:
        measure(table, *setting)
    print(f"\none way, 45 MB: {oneway.play(45_000_000, repeats=2 * REPEATS)}")


if __name__ == "__main__":
    run(main)
