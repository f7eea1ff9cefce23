"""Machines of a lab as network namespaces on this host, installed by their kits: what benchmarks of
kits share.

Each machine is a folder: `fedstrata provision` writes its kit, and the kit's own installer writes
below that folder. Each unit runs in its machine's network and mount namespace, under a supervisor
that obeys its ExecStart, Environment, Type=notify, WatchdogSec, Restart, RestartSec and exit codes.
The machines share nothing but the network. Needs root.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from configparser import RawConfigParser
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from fedstrata.deploy.kits.lab_file import load
from fedstrata.deploy.kits.provision import INSTALLER, LAB_FILE, provision
from tests.bench.running import Clock, folder
from tests.helpers.commands import DEMO, sets
from tests.helpers.namespaces import Namespace, VethPair, joined
from tests.simulation.outcome import model_digest

PATIENCE_S: Final = 240.0
POLL_S: Final = 0.2
PROGRAM: Final = "/opt/fedstrata/venv/bin/fedstrata"
SETTINGS: Final = "/etc/fedstrata"
INSTALLED_FILE: Final = Path(SETTINGS, LAB_FILE)
INSTALLED: Final = ("/opt/fedstrata", SETTINGS)
OWN_FOLDERS: Final = ("/var/lib/fedstrata", "/var/cache/fedstrata", "/var/tmp", "/tmp")
ROUTER: Final = "router"
# What a machine does not inherit from the shell of this host: which code is imported, and options.
ENVIRONMENT: Final = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("PYTHON", "FEDSTRATA"))
}


class Checks:
    """What was checked, each printed as a line, and what of it is wrong."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def __call__(self, what: str, good: bool) -> None:
        """Print a line."""
        line = f"ok    {what}"
        if not good:
            line = f"WRONG {what}"
            self.wrong.append(line)
        print(line, flush=True)

    def until(
        self, what: str, condition: Callable[[], object], patience_s: float = PATIENCE_S
    ) -> None:
        """Wait until something is true, and print after how many seconds."""
        found = until(condition, patience_s)
        if found is None:
            self(f"{what} never", False)
        else:
            self(f"{what} after {found:.0f} s", True)

    def end(self) -> bool:
        """Print what is wrong, and return whether anything is."""
        print(*self.wrong, sep="\n")
        return bool(self.wrong)


def until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> float | None:
    """Wait until something is true; return the seconds that it took, None if it did not become
    true.
    """
    with Clock() as clock:
        while not condition():
            if clock.now_s > patience_s:
                return None
            time.sleep(POLL_S)
        return clock.now_s


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
        path = self._machine.home / f"{self.name}-{time.monotonic_ns()}.notify"
        own = dict(pair.split("=", 1) for pair in self.service["Environment"].split())
        env = {**own, "NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": str(round(allowed_s * 1e6))}
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified,
            self._machine.log(self.name).open("ab") as log,
        ):
            notified.bind(str(path))
            notified.settimeout(1.0)
            process = self._process = self._machine.popen(
                shlex.split(self.service["ExecStart"]), log=log, env=env
            )
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

    def __init__(self, space: Namespace, *, home: Path) -> None:
        self.space, self.home, self.root = space, home, home / "root"
        self.units: list[Unit] = []
        folders = {folder: home / folder.strip("/").replace("/", "-") for folder in OWN_FOLDERS}
        folders |= {folder: self.root / folder.strip("/") for folder in INSTALLED}
        for own in folders.values():
            own.mkdir(parents=True)
        self._binds = {str(own): folder for folder, own in folders.items()}

    def install(self, kit: Path, *, like: Machine | None = None) -> None:
        """Install a kit, or another in its place; the packages of a machine of the same kind need
        not be fetched.
        """
        if like is not None:
            subprocess.run(["cp", "-al", like.root / "opt", self.root], check=True)
        line = [str(kit / INSTALLER), "--root", str(self.root)]
        done = subprocess.run(line, capture_output=True, text=True, check=False, env=ENVIRONMENT)
        if done.returncode:
            sys.exit(done.stderr)
        self.units = [
            Unit(file, self)
            for file in sorted((self.root / "etc/systemd/system").glob("*.service"))
        ]

    def log(self, name: str) -> Path:
        return self.home / f"{name}.log"

    def popen(
        self, argv: Sequence[str], *, log: Any, env: Mapping[str, str], out: Any = None
    ) -> subprocess.Popen[bytes]:
        """Start a program in the machine's network, with the machine's folders in place of this
        host's.
        """
        binds = [f"mount --bind {shlex.quote(own)} {folder}" for own, folder in self._binds.items()]
        script = " && ".join([*binds, f"cd /var/lib/fedstrata && exec {shlex.join(argv)}"])
        with self.space.entered():
            return subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
                stdin=subprocess.DEVNULL, stdout=out or log, stderr=log, env={**ENVIRONMENT, **env},
                start_new_session=True,
            )  # fmt: skip

    def boot(self) -> None:
        """Start all services."""
        for unit in self.units:
            unit.start()

    def await_ready(self) -> None:
        for unit in self.units:
            if not unit.ready.wait(PATIENCE_S):
                sys.exit(
                    f"{unit.name} of {self.home.name}:\n{self.log(unit.name).read_text()[-2000:]}"
                )

    def shut_down(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop all services; with SIGKILL as a power failure does."""
        for unit in reversed(self.units):
            unit.stop(number)


class KitLab:
    """A lab: its machines, the wires between them, and the commands of the machine `server`."""

    def __init__(self, home: Path, text: str, wires: Sequence[VethPair]) -> None:
        """Describe a lab, whose file is `text` with the address of each machine in place of <its
        name>.
        """
        self.file, self.kits, self._home = home / "lab.toml", home / "kits", home
        self.wires = {wire.child_host: wire for wire in wires}
        for name, wire in self.wires.items():
            text = text.replace(f"<{name}>", wire.child_address)
        self.file.write_text(text)
        self.demo = home / "demo.toml"
        shutil.copyfile(DEMO, self.demo)
        self.machines: dict[str, Machine] = {}

    @contextmanager
    def connected(self) -> Iterator[Mapping[str, Namespace]]:
        """Connect the machines, with a router between them; end their services in the end."""
        with (
            joined([ROUTER, *self.wires], tuple(self.wires.values())) as spaces,
            ExitStack() as stack,
        ):
            for name, wire in self.wires.items():
                spaces[name].batch("ip", [f"route add default via {wire.parent_address}"])
                if (above := wire.parent_host) != ROUTER:
                    near = self.wires[above].child_address
                    spaces[ROUTER].batch("ip", [f"route add {wire.child_address}/32 via {near}"])
            for name in {wire.parent_host for wire in self.wires.values()}:
                spaces[name].forward()
            for folder in (*INSTALLED, *OWN_FOLDERS):
                os.makedirs(folder, exist_ok=True)
            self.machines = {
                name: Machine(spaces[name], home=self._home / name) for name in self.wires
            }
            for machine in self.machines.values():
                stack.callback(machine.shut_down)
            yield spaces

    def provision(self, wheel: Path) -> None:
        """Write the kits."""
        provision(load(self.file), self.file, wheel=wheel, out=self.kits)

    def install(self, *machines: str, ready: bool = True) -> None:
        """Install the kits of machines, which then run what they ran before, and wait until it is
        `ready`.

        Print the seconds.
        """
        with Clock() as clock:
            for name in machines:
                machine = self.machines[name]
                ran = bool(machine.units)
                machine.shut_down()
                machine.install(self.kits / name, like=None if ran else self._like(name))
                if ran:
                    machine.boot()
            for name in machines:
                if ready and self.machines[name].units[0].starts:
                    self.machines[name].await_ready()
        print(f"the kits of {', '.join(machines)} installed in {clock.s:.0f} s", flush=True)

    def _like(self, name: str) -> Machine | None:
        """Return a machine with the packages that another one needs, too."""

        def extras(machine: str) -> str:
            lines = (self.kits / machine / "kit.env").read_text().splitlines()
            return next(line for line in lines if line[:7] == "EXTRAS=")

        for other, machine in self.machines.items():
            if machine.units and extras(other) == extras(name):
                return machine
        return None

    def boot(self, *machines: str) -> None:
        """Boot machines, and wait until their services are ready."""
        for name in machines:
            self.machines[name].boot()
        for name in machines:
            self.machines[name].await_ready()

    def start(self, *words: str | Path, out: Any = subprocess.PIPE) -> subprocess.Popen[bytes]:
        """Start a command of fedstrata at the server; its standard error is in the server's log
        `commands`.
        """
        server = self.machines["server"]
        with server.log("commands").open("ab") as log:
            return server.popen([PROGRAM, *map(str, words)], log=log, env={}, out=out)

    def fedstrata(self, *words: str | Path) -> tuple[int, str, str]:
        """Run a command at the server; return its exit code, its output, and what it wrote for
        people.
        """
        log = self.machines["server"].log("commands")
        before = log.stat().st_size if log.exists() else 0
        process = self.start(*words)
        output = process.communicate()[0].decode()
        return process.returncode, output, log.read_bytes()[before:].decode()

    def cloud(
        self, name: str, *words: str | Path, pairs: Sequence[str], **more: Any
    ) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a run of the demo at the server; return its process, and the folder of its folder."""
        runs = self.machines["server"].home / "runs" / name
        return self.start("cloud", self.demo, *words, "--runs", runs, *sets(*pairs), **more), runs

    def status(self, file: Path = INSTALLED_FILE) -> tuple[int, str, str]:
        """Run `lab status`; return what `fedstrata` does."""
        return self.fedstrata("lab", "status", "--lab", file)

    def same(self, run: Path) -> bool:
        """Return whether a run's model is that of its experiment in one process, without a network."""
        runs = self.machines["server"].home / "direct" / run.parent.name
        experiment = run / "experiment.toml"
        code, *_ = self.fedstrata("run", experiment, "--direct", "--runs", runs, "--format", "json")
        assert code == 0
        return model_digest(runs) == model_digest(run.parent)


@contextmanager
def home_of(name: str) -> Iterator[Path]:
    """Yield a folder for the machines, removed in the end; below /var, as /tmp is hidden from them."""
    with folder(Path("/var"), prefix=f"fedstrata-{name}-") as home:
        yield home
