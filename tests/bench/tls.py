"""`make bench NAME=tls`: rounds with mutual TLS beside rounds without: time, CPU time of each
process.
"""

from __future__ import annotations

from fedstrata.common.net.tls import Tls
from fedstrata.deploy.brokers.guard import Guard
from fedstrata.deploy.kits.authority import Authority
from tests.bench.rounds import Rounds
from tests.bench.running import Table, folder, medians, run

SETTINGS = ((45_000_000, 10), (250_000, 40))
REPEATS = 7
ROLES = ("parent", "broker", "devices-0")


def main() -> None:
    """Play rounds of both kinds in turn and print a table of medians."""
    table = Table("round", "", "time", "goodput", "CPU s/GB: parent", "broker", "devices")
    with folder() as home:
        authority = Authority.open(home, name="bench")
        authority.of("broker", hosts=["127.0.0.1"])
        authority.of("node")
        broker, node = (
            Tls(f"{home}/ca.crt", f"{home}/issued/{n}.crt", f"{home}/issued/{n}.key")
            for n in ("broker", "node")
        )
        for model_bytes, devices in SETTINGS:
            gigabytes = 2 * devices * model_bytes / 1e9
            with (
                Rounds(model_bytes, devices) as plain,
                Rounds(model_bytes, devices, guard=Guard(tls=broker), tls=node) as secure,
            ):
                kinds = {"plain": plain, "mutual TLS": secure}
                before = [rounds.cpu_s() for rounds in kinds.values()]
                seconds = medians(REPEATS, plain.seconds, secure.seconds)
                for (kind, rounds), had, each_s in zip(kinds.items(), before, seconds, strict=True):
                    spent = rounds.cpu_s()
                    table.add(
                        f"{devices} x {model_bytes / 1e6:g} MB",
                        kind,
                        f"{each_s * 1e3:.0f} ms",
                        f"{gigabytes / each_s:.2f} GB/s",
                        *(f"{(spent[r] - had[r]) / gigabytes / REPEATS:.2f}" for r in ROLES),
                    )


if __name__ == "__main__":
    run(main)
