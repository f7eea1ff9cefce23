"""`make bench-kits`: a lab of ten machines as network namespaces, installed by its kits, over runs in a row.

    server: cloud, broker == router ==20 Mbit/s== site-0..2: institution, broker ==50 Mbit/s== box-0..5: a device each

The built wheel is installed by the kits' installers, once with PyTorch and once without. Each unit runs in its
machine's network and mount namespace, under a supervisor that obeys its ExecStart, Environment, Type=notify,
WatchdogSec, Restart, RestartSec and exit codes. The machines share nothing but the network and the installed files;
each has the certificates of its own nodes, and the brokers their access rules. Every run is one command at the server.
Between runs a box loses its power; in one run, too, for good, which therefore fails. Printed: the runs, their models
against `--direct`, links.csv against the kernel's counters, and the bytes of each pair of machines at the router. Needs
root and iptables.
"""

from __future__ import annotations

import csv
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from configparser import RawConfigParser
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.kits.lab import load
from deploy.kits.provision import find_wheel, provision
from deploy.local.namespaces import Namespace, VethPair, joined
from deploy.simulation.outcome import model_digest

DEMO = Path(__file__).parents[2] / "deploy" / "experiments" / "demo.toml"
SITES = tuple(f"site-{i}" for i in range(3))
BOXES = {f"box-{i}": SITES[i // 2] for i in range(6)}
WAN_MBIT, LAN_MBIT = 20.0, 50.0
HEADER_BYTES = 66  # Ethernet, IP and TCP with timestamps
PATIENCE_S = 240
PROGRAM = "/opt/fedstrata/venv/bin/fedstrata"
OWN_FOLDERS = ("/var/lib/fedstrata", "/var/cache/fedstrata", "/var/tmp", "/tmp")
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
console = Console(width=120)

During = Callable[[], None]


class Unit:
    """A systemd unit on a machine: started, watched, and started again as its file demands."""

    def __init__(self, file: Path, machine: Machine) -> None:
        read = RawConfigParser()
        read.optionxform = str  # type: ignore[assignment, method-assign]
        read.read_string(file.read_text())
        self.service = read["Service"]
        self.name, self._machine = file.stem, machine
        self.starts, self.ready, self._wanted = 0, threading.Event(), False
        self._process: subprocess.Popen[bytes] | None = None
        self._watching: threading.Thread | None = None

    def start(self) -> None:
        self._wanted = True
        self._watching = threading.Thread(target=self._keep, daemon=True)
        self._watching.start()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop for good; with SIGKILL as a power failure does."""
        self._wanted = False
        if self._watching is None or self._process is None:
            return
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
        self._watching.join()

    def _keep(self) -> None:
        refused = self.service["RestartPreventExitStatus"].split()
        while self._wanted:
            code = self._run()
            if code in (0, int(self.service["SuccessExitStatus"])) or str(code) in refused:
                return
            if self._wanted:
                time.sleep(float(self.service["RestartSec"]))

    def _run(self) -> int:
        self.starts += 1
        allowed_s = float(self.service["WatchdogSec"])
        path = self._machine.home / f"{self.name}-{self.starts}.notify"
        own = dict(pair.split("=", 1) for pair in self.service["Environment"].split())
        env = {**own, "NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": str(round(allowed_s * 1e6))}
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified,
            self._machine.log(self.name).open("ab") as log,
        ):
            notified.bind(str(path))
            notified.settimeout(1.0)
            process = self._process = self._machine.popen(shlex.split(self.service["ExecStart"]), log=log, env=env)
            alive = time.monotonic()
            while process.poll() is None:
                try:
                    message = notified.recv(4096)
                except TimeoutError:
                    if self.ready.is_set() and time.monotonic() > alive + allowed_s:
                        os.killpg(process.pid, signal.SIGKILL)  # as systemd's watchdog does
                    continue
                alive = time.monotonic()
                if b"READY=1" in message:
                    self.ready.set()
        self.ready.clear()
        return process.returncode


class Machine:
    """A machine: a network namespace, folders of its own, and the units of its kit."""

    def __init__(self, space: Namespace, *, kit: Path, home: Path, installed: Path) -> None:
        self.space, self.home = space, home
        self._binds = {str(installed / "opt" / "fedstrata"): "/opt/fedstrata"}
        for folder in OWN_FOLDERS:
            own = home / folder.strip("/").replace("/", "-")
            own.mkdir(parents=True)
            self._binds[str(own)] = folder
        self._binds[str(kit / "tls")] = "/etc/fedstrata/tls"
        self.units = [Unit(file, self) for file in sorted((kit / "units").iterdir())]

    def log(self, name: str) -> Path:
        return self.home / f"{name}.log"

    def popen(
        self, argv: Sequence[str], *, log: Any, env: Mapping[str, str], out: Any = None
    ) -> subprocess.Popen[bytes]:
        """Start a program in the machine's network, with the machine's folders in place of this host's."""
        binds = [f"mount --bind {shlex.quote(own)} {folder}" for own, folder in self._binds.items()]
        script = " && ".join([*binds, f"cd /var/lib/fedstrata && exec {shlex.join(argv)}"])
        with self.space.entered():
            return subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
                stdin=subprocess.DEVNULL, stdout=out or log, stderr=log, env={**os.environ, **env},
                start_new_session=True,
            )  # fmt: skip

    def boot(self) -> None:
        for unit in self.units:
            unit.start()

    def power_off(self) -> None:
        for unit in self.units:
            unit.stop(signal.SIGKILL)


class Site:
    """The lab: its machines, the router between them, and the server's commands."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        names = ("server", *SITES, *BOXES)
        ends = {"server": ("router", None)} | dict.fromkeys(SITES, ("router", WAN_MBIT))
        ends |= {box: (site, LAN_MBIT) for box, site in BOXES.items()}
        self.wires = {n: VethPair(i, n, ends[n][0], n, ends[n][1], ends[n][1]) for i, n in enumerate(names)}
        self.file, self.demo, kits = home / "lab.toml", home / "demo.toml", home / "kits"
        self.file.write_text(self._described())
        shutil.copyfile(DEMO, self.demo)
        provision(load(self.file), self.file, wheel=find_wheel(None), out=kits)
        installed = {name: home / f"installed-{name}" for name in ("box-0", "site-0")}
        for kit, root in installed.items():
            began = time.monotonic()
            done = subprocess.run(
                [kits / kit / "install.sh", "--root", root], capture_output=True, text=True, check=False
            )
            if done.returncode:
                sys.exit(done.stderr)
            console.print(f"{kit}'s kit installed in {time.monotonic() - began:.0f} s")
        spaces = stack.enter_context(joined(["router", *names], tuple(self.wires.values())))
        self.router = spaces["router"]
        self._route(spaces)
        for folder in ("/opt/fedstrata", "/etc/fedstrata/tls", *OWN_FOLDERS):
            os.makedirs(folder, exist_ok=True)
        self.machines = {
            name: Machine(
                spaces[name],
                kit=kits / name,
                home=home / name,
                installed=installed["site-0" if name in SITES else "box-0"],
            )
            for name in names
        }
        self.units = [unit for machine in self.machines.values() for unit in machine.units]
        stack.callback(lambda: [unit.stop() for unit in self.units])

    def address(self, machine: str) -> str:
        return self.wires[machine].child_address

    def boot(self, *machines: str) -> None:
        """Boot machines, and wait until their services are ready."""
        for machine in machines:
            self.machines[machine].boot()
        for machine in machines:
            for unit in self.machines[machine].units:
                if not unit.ready.wait(PATIENCE_S):
                    sys.exit(f"{unit.name} of {machine}:\n{self.machines[machine].log(unit.name).read_text()[-2000:]}")

    def fedstrata(self, *words: str | Path, during: During | None = None) -> tuple[int, str]:
        """Run a command at the server; return its exit code and output. `during` is called in the second round."""
        server = self.machines["server"]
        with server.log("commands").open("ab") as log:
            process = server.popen([PROGRAM, *map(str, words)], log=log, env={}, out=subprocess.PIPE)
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line.decode())
                if during is not None and '"global_round"' in lines[-1]:
                    during()
                    during = None
            return process.wait(), "".join(lines)

    def run(self, name: str, *sets: str, during: During | None = None) -> tuple[int, Path]:
        """Run the demo once with the nodes that are there; return the exit code and the run's folder."""
        runs = self.machines["server"].home / "runs" / name
        words = [word for pair in ("topology=lab", *KEPT, *sets) for word in ("--set", pair)]
        code, _ = self.fedstrata(
            "cloud", self.demo, "--lab", self.file, "--runs", runs, "--format", "json", *words, during=during
        )
        return code, next(runs.iterdir())

    def direct(self, run: Path) -> Path:
        """Return the folder of the same experiment, run in one process without a network."""
        runs = self.machines["server"].home / "direct" / run.parent.name
        code, _ = self.fedstrata("run", run / "experiment.toml", "--direct", "--runs", runs, "--format", "json")
        assert code == 0
        return next(runs.iterdir())

    def pairs(self) -> dict[tuple[str, str], int]:
        """Return the bytes that the router has forwarded between machines, IP headers included."""
        with self.router.entered():
            listed = subprocess.run(["iptables", "-nvxL", "FORWARD"], capture_output=True, text=True, check=True).stdout
        names = {self.address(name): name for name in self.wires}
        lines = [line.split() for line in listed.splitlines()[2:]]
        return {(names[fields[-2]], names[fields[-1]]): int(fields[1]) for fields in lines}

    def counted(self, machine: str) -> tuple[int, int]:
        """Return the bytes that the kernel has sent and received on a machine's own link."""
        line = ["ip", "-s", "-j", "link", "show", f"up{self.wires[machine].number}"]
        with self.machines[machine].space.entered():
            stats = json.loads(subprocess.run(line, capture_output=True, check=True).stdout)[0]["stats64"]
        return stats["tx"]["bytes"], stats["rx"]["bytes"]

    def _route(self, spaces: Mapping[str, Namespace]) -> None:
        for name, wire in self.wires.items():
            spaces[name].batch("ip", [f"route add default via {wire.parent_address}"])
        for name in ("router", *SITES):
            spaces[name].forward()
        spaces["router"].batch(
            "ip", [f"route add {self.address(box)}/32 via {self.address(site)}" for box, site in BOXES.items()]
        )
        with spaces["router"].entered():
            for pair in ((a, b) for a in self.wires for b in self.wires if a != b):
                rule = ["iptables", "-A", "FORWARD", "-s", self.address(pair[0]), "-d", self.address(pair[1])]
                subprocess.run(rule, check=True)

    def _described(self) -> str:
        where = {name: f'address = "{self.address(name)}"' for name in self.wires}
        lines = ['name = "proof"', 'broker = "main"', "[machines]", f"server = {{ {where['server']}, cloud = true }}"]
        lines += [f"{site} = {{ {where[site]} }}" for site in SITES]
        lines += [f'{box} = {{ {where[box]}, accelerator = "cpu", slots = 1 }}' for box in BOXES]
        lines += [
            "[brokers]",
            'main = { machine = "server" }',
            *(f'{site} = {{ machine = "{site}" }}' for site in SITES),
        ]
        lines += ["[institutions]"]
        lines += [f'institution-{i} = {{ machine = "{site}", broker = "{site}" }}' for i, site in enumerate(SITES)]
        for i, (box, site) in enumerate(BOXES.items()):
            lines += ["[[devices]]", f'names = ["device-{i}"]', f'machine = "{box}"']
            lines += [f'parent = "institution-{SITES.index(site)}"']
        return "\n".join(lines) + "\n"


def frame_bytes(run: Path, parent: str, child: str) -> int:
    """Return the bytes of a link both ways by links.csv: the TCP streams, and a header for each segment."""
    with (run / "links.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if {row["from"], row["to"]} == {parent, child}]
    return sum(int(row["wire_bytes"]) + HEADER_BYTES * int(row["segments"]) for row in rows if row["kind"] == "all")


def main() -> None:
    """Run the lab and print what was seen; exit with 1 if anything is not as it should be."""
    wrong: list[str] = []

    def check(what: str, good: bool) -> None:
        console.print(f"{'ok   ' if good else 'WRONG'} {what}")
        wrong.extend([] if good else [what])

    home = Path(tempfile.mkdtemp(prefix="fedstrata-kits-", dir="/var"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        site = Site(home, stack)
        began = time.monotonic()
        site.boot(*site.machines)
        console.print(
            f"{len(site.units)} services of {len(site.machines)} machines ready in {time.monotonic() - began:.0f} s"
        )
        code, _ = site.fedstrata("lab", "status", "--lab", site.file)
        check("lab status: all nodes of lab.toml are there", code == 0)

        links = {f"institution-{i}": ("cloud", s) for i, s in enumerate(SITES)}
        links |= {f"device-{i}": (f"institution-{SITES.index(s)}", b) for i, (b, s) in enumerate(BOXES.items())}
        before = {node: site.counted(machine) for node, (_, machine) in links.items()}
        routed = site.pairs()
        began = time.monotonic()
        code, first = site.run("demo", "rounds=10")
        check(f"demo, Tempo: exit code {code} after {time.monotonic() - began:.0f} s", code == 0)
        table = Table(
            "link", "links.csv, with headers", "kernel, bytes", "kernel / links.csv", title="the demo, both ways"
        )
        for node, (parent, machine) in links.items():
            kernel = sum(b - a for a, b in zip(before[node], site.counted(machine), strict=True))
            counted = frame_bytes(first, parent, node)
            ratio = kernel / counted
            table.add_row(f"{parent} - {node}", f"{counted:,}", f"{kernel:,}", f"{ratio:.3f}")
            check(f"{parent} - {node}: links.csv and the kernel agree within 3 %", abs(ratio - 1) <= 0.03)
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

        site.machines["box-2"].power_off()
        code, _ = site.fedstrata("lab", "status", "--lab", site.file)
        check("lab status: with a box without power exit code 5", code == 5)
        site.boot("box-2")
        code, second = site.run("fedcross", "rounds=5", *FEDCROSS)
        check(f"FedCross at both tiers: exit code {code}", code == 0)
        code, _ = site.run("fails", "rounds=1000", during=site.machines["box-4"].power_off)
        check(f"a box loses its power in the run: exit code {code}", code == 5)
        site.boot("box-4")
        code, third = site.run("again", "rounds=10")
        check(f"the demo again: exit code {code}", code == 0)
        models = {run: model_digest(run.parent) for run in (first, second, third)}
        for run in (first, second):
            direct = model_digest(site.direct(run).parent)
            check(f"{run.parent.name}: the model is that of --direct, bit for bit", direct == models[run])
        check("the demo's two models are the same", models[first] == models[third])

        code, _ = site.fedstrata("doctor", "--lab", site.file)
        check("doctor: nothing needed is missing", code == 0)
        old = site.file.with_name("edited.toml")  # the certificates are beside it
        old.write_text(site.file.read_text().replace("slots = 1 }", "slots = 2 }", 1))
        code, listed = site.fedstrata("doctor", "--lab", old, "--format", "json")
        named = [row["item"] for row in map(json.loads, listed.splitlines()) if "kit of machine" in row["note"]]
        check(f"doctor with an edited lab file: an old kit at {', '.join(named)}", (code, named) == (1, ["device-0"]))
        again = [name for name, machine in site.machines.items() if any(unit.starts > 1 for unit in machine.units)]
        check(f"services started again on {', '.join(again)}", again == ["box-2", "box-4"])
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
