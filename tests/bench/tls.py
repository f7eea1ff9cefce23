"""`make bench NAME=tls`: rounds with mutual TLS beside rounds without: time, CPU time of each
process.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from rich.console import Console
from rich.table import Table
from rounds import Rounds

from fedstrata.common.net.tls import Tls
from fedstrata.deploy.brokers.guard import Guard
from fedstrata.deploy.kits.authority import Authority

SETTINGS = ((45_000_000, 10), (250_000, 40))
REPEATS = 7


def main() -> None:
    """Play rounds of both kinds in turn and print a table of medians."""
    table = Table("round", "", "time", "goodput", "CPU s/GB: parent", "broker", "devices")
    for column in table.columns[2:]:
        column.justify = "right"
    with tempfile.TemporaryDirectory() as name:
        authority = Authority.open(Path(name), name="bench")
        authority.of("broker", hosts=["127.0.0.1"])
        authority.of("node")
        broker, node = (
            Tls(f"{name}/ca.crt", f"{name}/issued/{n}.crt", f"{name}/issued/{n}.key")
            for n in ("broker", "node")
        )
        for model_bytes, devices in SETTINGS:
            with (
                Rounds(model_bytes, devices) as plain,
                Rounds(model_bytes, devices, guard=Guard(tls=broker), tls=node) as secure,
            ):
                kinds = {"plain": plain, "mutual TLS": secure}
                before = {kind: rounds.cpu_s() for kind, rounds in kinds.items()}
                times = [
                    {kind: rounds.seconds() for kind, rounds in kinds.items()}
                    for _ in range(REPEATS)
                ]
                gigabytes = 2 * devices * model_bytes / 1e9
                for kind, rounds in kinds.items():
                    seconds = statistics.median(each[kind] for each in times)
                    spent = {role: s - before[kind][role] for role, s in rounds.cpu_s().items()}
                    table.add_row(
                        f"{devices} x {model_bytes / 1e6:g} MB",
                        kind,
                        f"{seconds * 1e3:.0f} ms",
                        f"{gigabytes / seconds:.2f} GB/s",
                        *(
                            f"{spent[role] / gigabytes / REPEATS:.2f}"
                            for role in ("parent", "broker", "devices-0")
                        ),
                    )
    console = Console(width=120)
    console.print(
        f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    console.print(table)


if __name__ == "__main__":
    main()
