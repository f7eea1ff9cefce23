"""`make bench NAME=hours`: an emulated board and native roles for hours, with clocks that jump: flat?

    python tests/bench/hours.py [--hours 2] [--suite bookworm] [--root DIR] [--installed]

One run follows another in a lab of services: an institution, two native devices, and two of an
emulated aarch64 board (`make bench NAME=board` has what it needs). The clocks of the board and of
the server, its cloud and institution, jump by seconds to weeks at random moments (libfaketime).
Each run must leave the model of the first one, bit for bit. Printed after each: the memory, the open
files and the bytes that each service has written to its disk in an hour: on a board, to its SD card.

It needs `apt-get install faketime`, too.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import psutil

from tests.bench.board import Board, install, made
from tests.bench.machines import PROGRAM
from tests.bench.running import MB, Clock, Table, costs, folder, run, started
from tests.helpers.commands import command, tensors

EXPERIMENT: Final = """
name = "hours"
rounds = 25
topology = { institutions = 1, devices = 4 }
data = { dataset = "digits" }
model = { name = "mlp_digits" }
training = { epochs = 1, batch_size = 32 }
hardware = { default = { step_s = 0.5 } }
cloud = { checkpoint_every = 5 }
transfer = { idle_s = 900 }
"""
JUMPS_S: Final = (-3e6, -86400, -3600, -2, 0, 2, 3600, 86400, 3e6)
PAUSE_S: Final = (20.0, 120.0)  # between two jumps
PATIENCE_S: Final = 3600.0  # of one run
FAKE: Final = "/usr/lib/{}-linux-gnu/faketime/libfaketimeMT.so.1"
HOUR_S: Final = 3600.0


class JumpingClock:
    """The wall clock of some programs; that of intervals and deadlines is the machine's own."""

    def __init__(self, root: Path, machine: str) -> None:
        self._file = root / "root" / "clock"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self.jump(0)
        inside = "/root/clock" if machine == "aarch64" else str(self._file)
        self.variables: Mapping[str, str] = {
            "LD_PRELOAD": FAKE.format(machine),
            "FAKETIME_TIMESTAMP_FILE": inside,
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_CACHE_DURATION": "1",
        }

    def jump(self, seconds: float) -> None:
        """Set it so many seconds off."""
        self._file.write_text(f"{seconds:+.0f}\n")

    def words(self, *words: str | Path) -> list[str]:
        """Return the command that starts a program with it."""
        variables = [f"{name}={text}" for name, text in self.variables.items()]
        return ["env", *variables, *map(str, words)]


class LongLab:
    """The services of the lab, and its runs."""

    def __init__(self, board: Board, home: Path, port: int, stack: ExitStack) -> None:
        self.home = home
        self.runs = home / "runs"
        self.runs.mkdir()
        self._where = ("--broker", f"127.0.0.1:{port}")
        self._stack = stack
        self.clocks = JumpingClock(home, "x86_64"), JumpingClock(board.root, "aarch64")
        server, card = self.clocks
        of_board = card.words(PROGRAM, "device", *self._devices("device-2", "device-3"))
        institution = ("institution", "--name", "institution-0", *self._where)
        words = {
            "broker": command("broker", "--port", str(port)),
            "institution": server.words(*command(*institution, stay=True)),
            "native devices": command("device", *self._devices("device-0", "device-1"), stay=True),
            "board": board.words(*of_board),
        }
        self.services = {name: self._start(name, own) for name, own in words.items()}

    def _devices(self, *names: str) -> list[str]:
        named = [word for name in names for word in ("--name", name)]
        here = ("--parent", "institution-0", "--accelerator", "cpu", "--spool", "auto")
        return [*named, *here, *self._where]

    def _start(self, name: str, words: list[str]) -> psutil.Process:
        process = self._stack.enter_context(started(words, self.home / f"{name}.log"))
        return psutil.Process(process.pid)

    def run(self, draw: random.Random) -> tuple[bytes, int]:
        """Play a run to its good end; return its model, and how often a clock has jumped."""
        jumps = 0
        server = self.clocks[0]
        before = set(self.runs.iterdir())  # their names have the time, which jumps
        cloud = command("cloud", self.home / "hours.toml", "--runs", self.runs, *self._where)
        clock = Clock()
        with started(server.words(*cloud), self.home / "cloud.log") as process:
            jump_at = clock.now_s + draw.uniform(*PAUSE_S)
            while process.poll() is None and clock.now_s < PATIENCE_S:
                time.sleep(0.5)
                if clock.now_s >= jump_at:
                    draw.choice(self.clocks).jump(draw.choice(JUMPS_S))
                    jump_at = clock.now_s + draw.uniform(*PAUSE_S)
                    jumps += 1
        if process.returncode != 0:
            sys.exit((self.home / "cloud.log").read_text()[-3000:])
        (played,) = set(self.runs.iterdir()) - before
        return tensors(played), jumps


def main(
    *,
    hours: float = 2.0,
    suite: str = "bookworm",
    root: Path = Path("/var/tmp/fedstrata-board"),
    installed: bool = False,
    seed: int = 1,
    port: int = 18_860,
) -> bool:
    """Play runs until the time is over; return whether a model differs."""
    draw = random.Random(seed)
    board = made(root / suite, suite)
    with folder() as home, ExitStack() as stack:
        if not installed:
            install(board, home)
        board.run("sh", "-c", "apt-get update -qq && apt-get install -y -qq libfaketime")
        (home / "hours.toml").write_text(EXPERIMENT)
        lab = LongLab(board, home, port, stack)
        columns = [f"{name}: MB, files, MB/h written" for name in lab.services]
        table = Table("minute", "rounds' run", "jumps", "same model", *columns)
        expected, _ = lab.run(draw)
        before = {name: costs(service) for name, service in lab.services.items()}
        clock = Clock()
        same = []
        jumps = 0
        while clock.now_s < hours * HOUR_S:
            model, jumped = lab.run(draw)
            jumps += jumped
            same.append(model == expected)
            cells = []
            for name, service in lab.services.items():
                cost = costs(service)
                written = (cost.written - before[name].written) / clock.now_s * HOUR_S
                cells.append(f"{cost.memory / MB:.0f}, {cost.files}, {written / MB:.2f}")
            table.add(f"{clock.now_s / 60:.0f}", len(same), jumps, same[-1], *cells)
    print(f"{sum(same)} of {len(same)} runs with the model of the first one, bit for bit")
    return not all(same)


if __name__ == "__main__":
    run(main)
