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

import json
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path
from typing import Final

from fedstrata.deploy.kits.provision import find_wheel
from tests.bench.machines import ROUTER, Checks, KitLab, home_of
from tests.bench.running import Clock, Table, run
from tests.helpers.commands import table
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
LAB: Final = """\
name = "proof"
broker = "main"
[machines]
server = { address = "<server>", cloud = true }
site-0 = { address = "<site-0>" }
site-1 = { address = "<site-1>" }
site-2 = { address = "<site-2>" }
box-0 = { address = "<box-0>", accelerator = "cpu", slots = 1 }
box-1 = { address = "<box-1>", accelerator = "cpu", slots = 1 }
box-2 = { address = "<box-2>", accelerator = "cpu", slots = 1 }
box-3 = { address = "<box-3>", accelerator = "cpu", slots = 1 }
box-4 = { address = "<box-4>", accelerator = "cpu", slots = 1 }
box-5 = { address = "<box-5>", accelerator = "cpu", slots = 1 }
[brokers]
main = { machine = "server" }
site-0 = { machine = "site-0" }
site-1 = { machine = "site-1" }
site-2 = { machine = "site-2" }
[institutions]
institution-0 = { machine = "site-0", broker = "site-0" }
institution-1 = { machine = "site-1", broker = "site-1" }
institution-2 = { machine = "site-2", broker = "site-2" }
[[devices]]
names = ["device-0"]
machine = "box-0"
parent = "institution-0"
[[devices]]
names = ["device-1"]
machine = "box-1"
parent = "institution-0"
[[devices]]
names = ["device-2"]
machine = "box-2"
parent = "institution-1"
[[devices]]
names = ["device-3"]
machine = "box-3"
parent = "institution-1"
[[devices]]
names = ["device-4"]
machine = "box-4"
parent = "institution-2"
[[devices]]
names = ["device-5"]
machine = "box-5"
parent = "institution-2"
"""

During = Callable[[], None]


class Site(KitLab):
    """The lab: its machines, the router that counts between them, and the server's commands."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        names = ("server", *SITES, *BOXES)
        ends = {"server": (ROUTER, None)} | dict.fromkeys(SITES, (ROUTER, WAN_MBIT))
        ends |= {box: (site, LAN_MBIT) for box, site in BOXES.items()}
        wires = [VethPair(i, n, ends[n][0], n, ends[n][1], ends[n][1]) for i, n in enumerate(names)]
        super().__init__(home, LAB, wires)
        self.provision(find_wheel(None))
        spaces = stack.enter_context(self.connected())
        self.router = spaces[ROUTER]
        self._count()
        self.install(*names)

    def run(self, name: str, *pairs: str, during: During | None = None) -> tuple[int, Path]:
        """Run the demo once with the nodes that are there; return the exit code and the run's
        folder.

        `during` is called in the second global round.
        """
        words = ("--lab", self.file, "--format", "json")
        process, runs = self.cloud(name, *words, pairs=("topology=lab", *KEPT, *pairs))
        assert process.stdout is not None
        for line in process.stdout:
            if during is not None and b'"global_round"' in line:
                during()
                during = None
        return process.wait(), next(runs.iterdir())

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
            listed = subprocess.run(line, capture_output=True, check=True).stdout
        stats = json.loads(listed)[0]["stats64"]
        return stats["tx"]["bytes"], stats["rx"]["bytes"]

    def _count(self) -> None:
        addresses = [wire.child_address for wire in self.wires.values()]
        with self.router.entered():
            for a, b in permutations(addresses, 2):
                subprocess.run(["iptables", "-A", "FORWARD", "-s", a, "-d", b], check=True)


def frame_bytes(run: Path, parent: str, child: str) -> int:
    """Return the bytes of a link both ways by links.csv: the TCP streams, and a header for each
    segment.
    """
    rows = [row for row in table(run / "links.csv") if {row["from"], row["to"]} == {parent, child}]
    return sum(
        int(row["wire_bytes"]) + HEADER_BYTES * int(row["segments"])
        for row in rows
        if row["kind"] == "all"
    )


def demo(site: Site, check: Checks) -> Path:
    """Run the demo, hold its bytes against the kernel's, and return its folder."""
    links = {f"institution-{i}": ("cloud", s) for i, s in enumerate(SITES)}
    for i, (box, s) in enumerate(BOXES.items()):
        links[f"device-{i}"] = (f"institution-{SITES.index(s)}", box)
    before = {node: site.counted(machine) for node, (_, machine) in links.items()}
    routed = site.pairs()
    with Clock() as clock:
        code, run = site.run("demo", "rounds=10")
    check(f"demo, Tempo: exit code {code} after {clock.s:.0f} s", code == 0)
    after = {node: site.counted(machine) for node, (_, machine) in links.items()}
    columns = ("link", "links.csv, with headers", "kernel, bytes", "kernel / links.csv")
    counted = Table(*columns, title="the demo, both ways")
    ratios = {}
    for node, (parent, _) in links.items():
        kernel = sum(after[node]) - sum(before[node])
        own = frame_bytes(run, parent, node)
        link = f"{parent} - {node}"
        ratios[link] = kernel / own
        counted.add(link, f"{own:,}", f"{kernel:,}", f"{ratios[link]:.3f}")
    for link, ratio in ratios.items():
        check(f"{link}: links.csv and the kernel agree within 3 %", abs(ratio - 1) <= 0.03)
    passed = Table("from", "to", "bytes", title="at the router, in the demo")
    counts = site.pairs()
    for pair, count in counts.items():
        if count > routed[pair]:
            passed.add(*pair, f"{count - routed[pair]:,}")
    of_boxes = [count for pair, count in counts.items() if {*pair} & {*BOXES}]
    check("no box has sent or received anything over the router", not any(of_boxes))
    return run


def main() -> bool:
    """Run the lab and print what was seen; return whether anything is not as it should be."""
    check = Checks()
    with home_of("kits") as home, ExitStack() as stack:
        site = Site(home, stack)
        with Clock() as clock:
            site.boot(*site.machines)
        count = sum(len(machine.units) for machine in site.machines.values())
        print(f"{count} services of {len(site.machines)} machines ready in {clock.s:.0f} s")
        code, *_ = site.status(site.file)
        check("lab status: all nodes of lab.toml are there", code == 0)
        first = demo(site, check)

        site.machines["box-2"].shut_down(signal.SIGKILL)
        code, *_ = site.status(site.file)
        check("lab status: with a box without power exit code 5", code == 5)
        site.boot("box-2")
        code, second = site.run("fedcross", "rounds=5", *FEDCROSS)
        check(f"FedCross at both tiers: exit code {code}", code == 0)
        box = site.machines["box-4"]
        code, _ = site.run("fails", "rounds=1000", during=lambda: box.shut_down(signal.SIGKILL))
        check(f"a box loses its power in the run: exit code {code}", code == 5)
        site.boot("box-4")
        code, third = site.run("again", "rounds=10")
        check(f"the demo again: exit code {code}", code == 0)
        for each in (first, second):
            name = each.parent.name
            check(f"{name}: the model is that of --direct, bit for bit", site.same(each))
        same = model_digest(first.parent) == model_digest(third.parent)
        check("the demo's two models are the same", same)

        code, *_ = site.fedstrata("doctor", "--lab", site.file)
        check("doctor: nothing needed is missing", code == 0)
        old = site.file.with_name("edited.toml")  # the certificates are beside it
        old.write_text(site.file.read_text().replace("slots = 1 }", "slots = 2 }", 1))
        code, listed, _ = site.fedstrata("doctor", "--lab", old, "--format", "json")
        rows = map(json.loads, listed.splitlines())
        named = [row["item"] for row in rows if "kit of machine" in row["note"]]
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
    return check.end()


if __name__ == "__main__":
    run(main)
