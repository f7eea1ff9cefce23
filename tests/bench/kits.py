"""`make bench NAME=kits`: a lab of ten machines as network namespaces, installed by its kits, as
root.

    server: cloud, broker == router ==20 Mbit/s== site-0..2: institution, broker ==50 Mbit/s==
    box-0..5: a device each

The built wheel is installed by the kits' installers (`tests/bench/machines.py`). Each has the
certificates of its own nodes, and the brokers their access rules. Every run is one command at the
server. Between runs a box loses its power; in one run, too, for good, which therefore fails.
Printed: the runs, their models against `--direct`, links.csv against the kernel's counters, and the
bytes of each pair of machines at the router. Needs root and iptables.
"""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from rich.table import Table

from fedstrata.deploy.kits.provision import find_wheel
from tests.bench.machines import DEMO, ROUTER, Checks, KitLab, console, home_of
from tests.helpers.namespaces import VethPair
from tests.simulation.outcome import model_digest

SITES = tuple(f"site-{i}" for i in range(3))
BOXES = {f"box-{i}": SITES[i // 2] for i in range(6)}
WAN_MBIT, LAN_MBIT = 20.0, 50.0
HEADER_BYTES = 66  # Ethernet, IP and TCP with timestamps
KEPT = (
    "links.enforce=kernel",
    f"links.wan={{ up_mbit = {WAN_MBIT}, down_mbit = {WAN_MBIT} }}",
    f"links.lan={{ up_mbit = {LAN_MBIT}, down_mbit = {LAN_MBIT} }}",
    "transfer.idle_s=15",
)
FEDCROSS = (
    "cloud.epoch_control.name=fixed",
    "cloud.aggregation.name=fedcross",
    "institution.aggregation.name=fedcross",
)

During = Callable[[], None]


class Site(KitLab):
    """The lab: its machines, the router that counts between them, and the server's commands."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        names = ("server", *SITES, *BOXES)
        ends = {"server": (ROUTER, None)} | dict.fromkeys(SITES, (ROUTER, WAN_MBIT))
        ends |= {box: (site, LAN_MBIT) for box, site in BOXES.items()}
        wires = [VethPair(i, n, ends[n][0], n, ends[n][1], ends[n][1]) for i, n in enumerate(names)]
        super().__init__(home, described, wires)
        self.demo = home / "demo.toml"
        shutil.copyfile(DEMO, self.demo)
        self.provision(find_wheel(None))
        spaces = stack.enter_context(self.connected())
        self.router = spaces[ROUTER]
        self._count()
        self.install(*names)

    def run(self, name: str, *sets: str, during: During | None = None) -> tuple[int, Path]:
        """Run the demo once with the nodes that are there; return the exit code and the run's
        folder.

        `during` is called in the second global round.
        """
        runs = self.machines["server"].home / "runs" / name
        words = [word for pair in ("topology=lab", *KEPT, *sets) for word in ("--set", pair)]
        process = self.start(
            "cloud", self.demo, "--lab", self.file, "--runs", runs, "--format", "json", *words
        )
        assert process.stdout is not None
        for line in process.stdout:
            if during is not None and b'"global_round"' in line:
                during()
                during = None
        return process.wait(), next(runs.iterdir())

    def direct(self, run: Path) -> Path:
        """Return the folder of the same experiment, run in one process without a network."""
        runs = self.machines["server"].home / "direct" / run.parent.name
        code, *_ = self.fedstrata(
            "run", run / "experiment.toml", "--direct", "--runs", runs, "--format", "json"
        )
        assert code == 0
        return next(runs.iterdir())

    def pairs(self) -> dict[tuple[str, str], int]:
        """Return the bytes that the router has forwarded between machines, IP headers included."""
        with self.router.entered():
            listed = subprocess.run(
                ["iptables", "-nvxL", "FORWARD"], capture_output=True, text=True, check=True
            ).stdout
        names = {wire.child_address: name for name, wire in self.wires.items()}
        lines = [line.split() for line in listed.splitlines()[2:]]
        return {(names[fields[-2]], names[fields[-1]]): int(fields[1]) for fields in lines}

    def counted(self, machine: str) -> tuple[int, int]:
        """Return the bytes that the kernel has sent and received on a machine's own link."""
        line = ["ip", "-s", "-j", "link", "show", f"up{self.wires[machine].number}"]
        with self.machines[machine].space.entered():
            stats = json.loads(subprocess.run(line, capture_output=True, check=True).stdout)[0][
                "stats64"
            ]
        return stats["tx"]["bytes"], stats["rx"]["bytes"]

    def _count(self) -> None:
        addresses = [wire.child_address for wire in self.wires.values()]
        with self.router.entered():
            for a, b in ((a, b) for a in addresses for b in addresses if a != b):
                subprocess.run(["iptables", "-A", "FORWARD", "-s", a, "-d", b], check=True)


def described(addresses: Mapping[str, str]) -> str:
    """Return the lab's file."""
    where = {name: f'address = "{address}"' for name, address in addresses.items()}
    lines = [
        'name = "proof"',
        'broker = "main"',
        "[machines]",
        f"server = {{ {where['server']}, cloud = true }}",
    ]
    lines += [f"{site} = {{ {where[site]} }}" for site in SITES]
    lines += [f'{box} = {{ {where[box]}, accelerator = "cpu", slots = 1 }}' for box in BOXES]
    lines += [
        "[brokers]",
        'main = { machine = "server" }',
        *(f'{site} = {{ machine = "{site}" }}' for site in SITES),
    ]
    lines += ["[institutions]"]
    lines += [
        f'institution-{i} = {{ machine = "{site}", broker = "{site}" }}'
        for i, site in enumerate(SITES)
    ]
    for i, (box, site) in enumerate(BOXES.items()):
        lines += ["[[devices]]", f'names = ["device-{i}"]', f'machine = "{box}"']
        lines += [f'parent = "institution-{SITES.index(site)}"']
    return "\n".join(lines) + "\n"


def frame_bytes(run: Path, parent: str, child: str) -> int:
    """Return the bytes of a link both ways by links.csv: the TCP streams, and a header for each
    segment.
    """
    with (run / "links.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if {row["from"], row["to"]} == {parent, child}]
    return sum(
        int(row["wire_bytes"]) + HEADER_BYTES * int(row["segments"])
        for row in rows
        if row["kind"] == "all"
    )


def main() -> None:
    """Run the lab and print what was seen; exit with 1 if anything is not as it should be."""
    check = Checks()
    with home_of("kits") as home, ExitStack() as stack:
        site = Site(home, stack)
        began = time.monotonic()
        site.boot(*site.machines)
        count = sum(len(machine.units) for machine in site.machines.values())
        console.print(
            f"{count} services of {len(site.machines)} machines ready in "
            f"{time.monotonic() - began:.0f} s"
        )
        code, *_ = site.fedstrata("lab", "status", "--lab", site.file)
        check("lab status: all nodes of lab.toml are there", code == 0)

        links = {f"institution-{i}": ("cloud", s) for i, s in enumerate(SITES)}
        links |= {
            f"device-{i}": (f"institution-{SITES.index(s)}", b)
            for i, (b, s) in enumerate(BOXES.items())
        }
        before = {node: site.counted(machine) for node, (_, machine) in links.items()}
        routed = site.pairs()
        began = time.monotonic()
        code, first = site.run("demo", "rounds=10")
        check(f"demo, Tempo: exit code {code} after {time.monotonic() - began:.0f} s", code == 0)
        table = Table(
            "link",
            "links.csv, with headers",
            "kernel, bytes",
            "kernel / links.csv",
            title="the demo, both ways",
        )
        for node, (parent, machine) in links.items():
            kernel = sum(b - a for a, b in zip(before[node], site.counted(machine), strict=True))
            counted = frame_bytes(first, parent, node)
            ratio = kernel / counted
            table.add_row(f"{parent} - {node}", f"{counted:,}", f"{kernel:,}", f"{ratio:.3f}")
            check(
                f"{parent} - {node}: links.csv and the kernel agree within 3 %",
                abs(ratio - 1) <= 0.03,
            )
        console.print(table)
        table = Table("from", "to", "bytes", title="at the router, in the demo")
        after = site.pairs()
        for (a, b), count in after.items():
            if count > routed[a, b]:
                table.add_row(a, b, f"{count - routed[a, b]:,}")
        console.print(table)
        check("no box has sent or received anything over the router", all(
            count == 0 for pair, count in after.items() if set(pair) & set(BOXES)
        ))  # fmt: skip

        site.machines["box-2"].shut_down(signal.SIGKILL)
        code, *_ = site.fedstrata("lab", "status", "--lab", site.file)
        check("lab status: with a box without power exit code 5", code == 5)
        site.boot("box-2")
        code, second = site.run("fedcross", "rounds=5", *FEDCROSS)
        check(f"FedCross at both tiers: exit code {code}", code == 0)
        code, _ = site.run(
            "fails", "rounds=1000", during=lambda: site.machines["box-4"].shut_down(signal.SIGKILL)
        )
        check(f"a box loses its power in the run: exit code {code}", code == 5)
        site.boot("box-4")
        code, third = site.run("again", "rounds=10")
        check(f"the demo again: exit code {code}", code == 0)
        models = {run: model_digest(run.parent) for run in (first, second, third)}
        for run in (first, second):
            direct = model_digest(site.direct(run).parent)
            check(
                f"{run.parent.name}: the model is that of --direct, bit for bit",
                direct == models[run],
            )
        check("the demo's two models are the same", models[first] == models[third])

        code, *_ = site.fedstrata("doctor", "--lab", site.file)
        check("doctor: nothing needed is missing", code == 0)
        old = site.file.with_name("edited.toml")  # the certificates are beside it
        old.write_text(site.file.read_text().replace("slots = 1 }", "slots = 2 }", 1))
        code, listed, _ = site.fedstrata("doctor", "--lab", old, "--format", "json")
        named = [
            row["item"]
            for row in map(json.loads, listed.splitlines())
            if "kit of machine" in row["note"]
        ]
        check(
            f"doctor with an edited lab file: an old kit at {', '.join(named)}",
            (code, named) == (1, ["device-0"]),
        )
        again = [
            name
            for name, machine in site.machines.items()
            if any(unit.starts > 1 for unit in machine.units)
        ]
        check(f"services started again on {', '.join(again)}", again == ["box-2", "box-4"])
    sys.exit(1 if check.wrong else 0)


if __name__ == "__main__":
    main()
