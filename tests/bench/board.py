"""`make bench NAME=board`: an emulated aarch64 board, installed by its kit, in a lab with native
devices.

    python tests/bench/board.py [--suite bookworm] [--root DIR] [--case NAME...]

Debian for arm64 (bookworm with Python 3.11, trixie with 3.13) is unpacked into a folder and run by
QEMU's user-mode emulation, as root on x86-64 under Linux. There the kit of a machine is installed
by its own installer, with stubs for systemd alone. Then devices of the board and native ones train
the demo's network together. Printed: what was installed, its time and size, what `doctor` finds, and
for each case how far the final model is from that of native devices alone, by layer. Then a lab
whose board is killed and resumed, against the same lab undisturbed. Last, test files of each room
of the code, with what fails there.

It needs `apt-get install qemu-user-static debootstrap`, 2 GB below --root, which it keeps, and
half an hour.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
from safetensors.numpy import load_file

from fedstrata.deploy.kits.lab_file import load
from fedstrata.deploy.kits.provision import find_wheel, provision
from tests.bench.machines import PROGRAM
from tests.bench.running import Clock, folder, output, run, started
from tests.helpers.commands import command, sets, tensors

BINFMT: Final = Path("/proc/sys/fs/binfmt_misc")
EMULATOR: Final = "/usr/bin/qemu-aarch64-static"
# The first bytes of a program for aarch64, and which of them count (QEMU's own registration).
FORMAT: Final = (
    r":qemu-aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:"
    r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:"
    f"{EMULATOR}:OCF"
)
CERTIFICATES: Final = "ssl/certs/ca-certificates.crt"
PACKAGES: Final = "python3,python3-venv,ca-certificates,procps"
LAB: Final = """
name = "board"
broker = "main"
[machines]
server = { address = "127.0.0.1", cloud = true }
board = { address = "127.0.0.1" }
[brokers]
main = { machine = "server" }
[[devices]]
names = ["device-2..3"]
machine = "board"
"""
PATIENCE_S: Final = 1800
EXPERIMENT: Final = """
name = "board"
rounds = 3
topology = { institutions = 0, devices = 4 }
data = { dataset = "digits", partition = "dirichlet", concentration = 0.1 }
model = { name = "cnn_digits" }
training = { epochs = 2, batch_size = 10, learning_rate = 0.01 }
transfer = { idle_s = 600 }
"""
CASES: Final = {
    "recorded": ("training.recorded=true",),
    "plain": ("training.recorded=false",),
    "Adam": ("training.optimizer=adam", "training.learning_rate=0.001"),
    "int8 up": ("transfer.wan.up=int8",),
    "top-k up": ("transfer.wan.up=topk",),
}
KILLED: Final = "killed"
TESTS: Final = "tests"
# By room. A test that measures this host, or starts processes without an emulator, is of no use.
SAMPLE: Final = {
    "common/settings, experiment": "mistakes spec links",
    "common/protocol": "wire coordinator participant sessions session_restarts transfer",
    "common/runtime, deploy/simulation": "rounds availability selection simulation",
    "common/model": "codecs delta_codecs layout parts",
    "common/methods": "fedcross fedmr tempo fedcda robust twins",
    "common/learning": "datasets labels partitions models evaluator",
    "device/training": "training objectives recording training_table",
    "common/storage, accounting": "spool stored accountant ledger records",
}
TOOLS: Final = "pytest pytest-timeout pytest-xdist hypothesis psutil scikit-learn scipy"


@dataclass(frozen=True, slots=True)
class Board:
    """A folder with a Debian for aarch64."""

    root: Path

    def words(self, *words: str) -> list[str]:
        """Return the command that runs a program of the board, with /proc and /dev, in mounts of
        its own.
        """
        mounts = f"mount -t proc proc {self.root}/proc && mount --rbind /dev {self.root}/dev"
        line = f"{mounts} && exec chroot {self.root} {shlex.join(words)}"
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", line]

    def run(self, *words: str, check: bool = True) -> str:
        """Run a program of the board to its end, and return its output; exit if it fails."""
        line = self.words(*words)
        done = subprocess.run(line, input="", capture_output=True, text=True, check=False)
        if done.returncode and check:
            sys.exit(f"{shlex.join(words)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.stdout

    def megabytes(self, folder: str) -> float:
        """Return what a folder of the board takes on the disk."""
        return float(printed("du", "-sm", str(self.root / folder.lstrip("/")))[0])


def printed(*words: str) -> list[str]:
    """Return the words that a program of this host prints."""
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.split()


def made(root: Path, suite: str) -> Board:
    """Return the board of a folder, with Debian in it."""
    if not BINFMT.joinpath("register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "none", str(BINFMT)], check=True)
    if not BINFMT.joinpath("qemu-aarch64").exists():
        BINFMT.joinpath("register").write_text(FORMAT)
    if not root.joinpath("usr/bin/python3").exists():
        first = ["debootstrap", "--arch=arm64", "--foreign", "--variant=minbase"]
        unpack = [*first, f"--include={PACKAGES}", suite, str(root), mirror()]
        subprocess.run(unpack, check=True, stdout=subprocess.DEVNULL)
        second = ["chroot", str(root), "/debootstrap/debootstrap", "--second-stage"]
        subprocess.run(second, check=True, stdout=subprocess.DEVNULL)
    # of this host: where packages come from
    for name in ("resolv.conf", "hosts", "pip.conf", CERTIFICATES):
        if Path("/etc", name).exists():
            shutil.copy(Path("/etc", name), root / "etc" / name)
    stub = root / "usr/local/bin/systemctl"
    stub.write_text('#!/bin/sh\necho "$*" >>/var/log/systemctl\n')
    stub.chmod(0o755)
    return Board(root)


def mirror() -> str:
    """Return the address of this host's own mirror of Debian."""
    sites = printed("apt-get", "indextargets", "--format", "$(SITE)")
    return max(sites, key=sites.count)


def files_of(wheel: Path) -> set[tuple[str, int]]:
    """Return the names and checksums of a wheel's files: it may have been built again."""
    with zipfile.ZipFile(wheel) as archive:
        return {(each.filename, each.CRC) for each in archive.infolist()}


def install(board: Board, home: Path) -> None:
    """Install the kit of the machine `board` by its own installer, if it is not there."""
    wheel = find_wheel(None)
    kit = board.root / "root" / "kit"
    done = board.root / "root" / "installed"
    if done.exists() and files_of(done) == files_of(wheel):
        print("the kit is installed")
        return
    done.unlink(missing_ok=True)
    file = home / "lab.toml"
    file.write_text(LAB)
    provision(load(file), file, wheel=wheel, out=home / "kits")
    shutil.rmtree(kit, ignore_errors=True)
    shutil.copytree(home / "kits" / "board", kit)
    with Clock() as clock:
        board.run("sh", "/root/kit/install.sh")
    size = board.megabytes("/opt/fedstrata")
    print(f"the kit was installed in {clock.s:.0f} s: /opt/fedstrata takes {size:.0f} MB")
    versions = "import torch, sys, platform; print(torch.__version__, sys.version.split()[0], platform.machine())"
    found = board.run("/opt/fedstrata/venv/bin/python", "-c", versions)
    print("PyTorch, Python, machine:", found)
    units = sorted(board.root.joinpath("etc/systemd/system").glob("fedstrata-*.service"))
    print("units:", ", ".join(unit.name for unit in units))
    print(board.root.joinpath("var/log/systemctl").read_text())
    print(board.run(PROGRAM, "doctor", check=False), flush=True)
    shutil.copy(wheel, done)


def play_tests(board: Board) -> None:
    """Run a sample of the tests by the board's own Python, room by room."""
    source = board.root / "root" / "source"
    shutil.rmtree(source, ignore_errors=True)
    for name in printed("git", "ls-files"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, source / name)
    python = "/opt/fedstrata/venv/bin/python"
    board.run(python, "-m", "pip", "install", "--quiet", *TOOLS.split())
    for room, names in SAMPLE.items():
        tests = [f"tests/test_{name}.py" for name in names.split()]
        line = [python, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]
        with Clock() as clock:
            printed_lines = board.run(
                "sh", "-c", f"cd /root/source && {shlex.join(line)}", check=False
            ).splitlines()
        failed = [text for text in printed_lines if text.startswith(("FAILED", "ERROR"))]
        last = printed_lines[-1] if printed_lines else "pytest could not begin"
        print(f"{room}, {clock.s:.0f} s: {last}", *failed, sep="\n  ", flush=True)


@dataclass(frozen=True, slots=True)
class MixedLab:
    """A lab with two native devices, and two of the board."""

    board: Board
    home: Path
    port: int

    def play(self, name: str, pairs: Sequence[str], *, killed: bool = False) -> tuple[Path, float]:
        """Play a run; return its folder and its seconds. Its board may be killed in round 2."""
        runs = self.home / name
        runs.mkdir()
        native = command("device", *self._roles("device-0", "device-1"))
        emulated = self.board.words(PROGRAM, "device", *self._roles("device-2", "device-3"))
        where = ("--runs", runs, "--broker", f"127.0.0.1:{self.port}")
        words = command("cloud", self.home / "board.toml", *where, *sets(*pairs))
        with ExitStack() as stack:
            stack.enter_context(started(native, runs / "native.log"))
            board = stack.enter_context(started(emulated, runs / "board.log"))
            clock = Clock()
            cloud = stack.enter_context(started(words, runs / "cloud.log"))
            while cloud.poll() is None and clock.now_s < PATIENCE_S:
                if killed and rounds_of(runs) == 1:
                    killed = False
                    board.kill()
                    board = stack.enter_context(started(emulated, runs / "board.log"))
                time.sleep(0.2)
            if cloud.returncode != 0:
                sys.exit(f"{name}: {(runs / 'cloud.log').read_text()[-3000:]}")
        (found,) = runs.glob("2*")
        return found, clock.now_s

    def direct(self, name: str, pairs: Sequence[str]) -> Path:
        """Run the experiment with native devices alone, without a network; return its folder."""
        runs = self.home / f"{name}-direct"
        output("run", self.home / "board.toml", "--direct", "--runs", runs, *sets(*pairs))
        (found,) = runs.glob("2*")
        return found

    def _roles(self, *names: str) -> Iterable[str]:
        for name in names:
            yield from ("--name", name)
        yield from ("--parent", "cloud", "--broker", f"127.0.0.1:{self.port}")
        yield from ("--accelerator", "cpu", "--spool", "auto", "--once")


def rounds_of(runs: Path) -> int:
    """Return how many global rounds the run in a folder has recorded."""
    found = list(runs.glob("2*/rounds.csv"))
    return len(found[0].read_text().splitlines()) - 1 if found else 0


def differences(left: Path, right: Path) -> dict[str, float]:
    """Return the largest difference of each array of two final models."""
    ours = load_file(left / "model.safetensors")
    theirs = load_file(right / "model.safetensors")
    return {name: float(np.abs(ours[name] - theirs[name]).max()) for name in ours}


def main(
    *,
    suite: str = "bookworm",
    root: Path = Path("/var/tmp/fedstrata-board"),
    case: Annotated[Sequence[str], (*CASES, KILLED, TESTS)] = (*CASES, KILLED, TESTS),
    port: int = 18_850,
) -> None:
    """Build, install, play and compare."""
    if os.geteuid() or not Path(EMULATOR).exists() or not shutil.which("debootstrap"):
        sys.exit("as root, after: apt-get install qemu-user-static debootstrap")
    with Clock() as clock:
        board = made(root / suite, suite)
    print(f"Debian {suite} for arm64 after {clock.s:.0f} s")
    broker = command("broker", "--port", str(port))
    with folder() as home, started(broker, home / "broker.log"):
        (home / "board.toml").write_text(EXPERIMENT)
        install(board, home)
        lab = MixedLab(board, home, port)
        for name in case:
            if name == TESTS:
                play_tests(board)
                continue
            pairs = CASES.get(name, ())
            played, seconds = lab.play(name, pairs, killed=name == KILLED)
            if name == KILLED:
                other, _ = lab.play("undisturbed", pairs)
                same = tensors(played) == tensors(other)
                print(f"killed and resumed: bit for bit as undisturbed: {same}")
                continue
            found = differences(played, lab.direct(name, pairs))
            apart = ", ".join(f"{array} {most:.1e}" for array, most in found.items())
            print(f"{name}, {seconds:.0f} s, largest difference by array: {apart}", flush=True)


if __name__ == "__main__":
    run(main)
