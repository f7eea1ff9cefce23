"""`make bench NAME=scale`: 100 to 3,000 devices on this machine: seconds, CPU seconds, memory of a
round.

    python tests/bench/scale.py [DEVICES ...] [--null] [--processes N] [--rounds N] [--json FILE]

Each lab is one `fedstrata run`: a real mosquitto, ten institutions, LeNet-5, 20 made-up samples for
each device, one epoch. With `--null` the devices add noise in place of training
(`tests/helpers/null_lab.py`). `--processes` puts the devices of such a lab into so many processes.
The first global round, in which caches fill, is not counted.

start      seconds from the command until the last institution has all its devices
round      wall seconds of a global round, median; ms of it for each device
CPU        CPU seconds of a global round by kind of process, mean; ms of their sum for each device
memory     proportional set size (PSS) of all processes of a kind, after the last global round but
one

The last lines are the least-squares lines over the labs: how far the cost of a device changes over
the whole range, against its mean, and the memory that one more device takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import psutil

from tests.helpers.commands import command
from tests.helpers.pss import pss

INSTITUTIONS: Final = 10
DEVICES: Final = (100, 300, 1000, 3000)
KINDS: Final = {  # of processes, by the first of these words in their command
    "evaluator_process": "evaluator",
    "fork_server": "workers",
    "mosquitto": "broker",
    "cloud": "cloud",
    "institution": "institutions",
    "device": "devices",
    "run": "command",
}
EXPERIMENT: Final = """
name = "scale"
rounds = {rounds}
topology = {{ institutions = {institutions}, devices = {devices} }}
data = {{ dataset = "synthetic", image_shape = [1, 28, 28], classes = 10, samples = {samples}, test_samples = 100 }}
model = {{ name = "lenet5" }}
training = {{ epochs = 1, batch_size = 10 }}
links = {{ check = "off" }}
"""
SAMPLES: Final = 20
MB: Final = 1e6


@dataclass(slots=True)
class Measured:
    """One lab; `cpu_s` of a global round and `memory_mb` by kind of process."""

    devices: int
    start_s: float = 0.0
    start_cpu_s: float = 0.0
    round_s: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    memory_mb: dict[str, float] = field(default_factory=dict)
    processes: dict[str, int] = field(default_factory=dict)

    @property
    def round_cpu_s(self) -> float:
        return sum(self.cpu_s.values())


class Lab:
    """The processes of a lab that runs, from the process of its command."""

    def __init__(self, lab: subprocess.Popen[str]) -> None:
        self._root = psutil.Process(lab.pid)
        self._kinds: dict[psutil.Process, str] = {}

    def find(self) -> None:
        """Find the processes of all roles."""
        for process in (self._root, *self._root.children(recursive=True)):
            words = [Path(word).name.rpartition(".")[2] for word in process.cmdline()]
            self._kinds[process] = next((KINDS[word] for word in words if word in KINDS), "")

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each kind so far."""
        return self._sums(lambda process: sum(process.cpu_times()[:2]))

    def memory_mb(self) -> dict[str, float]:
        """Return the PSS of each kind."""
        return self._sums(lambda process: pss(process.pid) / MB)

    def counts(self) -> dict[str, int]:
        """Return the number of processes of each kind."""
        return {
            kind: list(self._kinds.values()).count(kind)
            for kind in KINDS.values()
            if kind in self._kinds.values()
        }

    def _sums(self, of: Callable[[psutil.Process], float]) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for process, kind in self._kinds.items():
            sums[kind] += of(process)
        return dict(sums)


def measure(devices: int, *, rounds: int, null: bool, processes: int | None) -> Measured:
    """Run a lab and measure it."""
    measured, began = Measured(devices), time.monotonic()
    env = dict(os.environ) | ({"NULL_LAB_PROCESSES": str(processes)} if processes else {})
    with tempfile.TemporaryDirectory() as home:
        file = Path(home) / "scale.toml"
        institutions = min(INSTITUTIONS, devices)
        text = EXPERIMENT.format(
            rounds=rounds, institutions=institutions, devices=devices, samples=SAMPLES * devices
        )
        file.write_text(text, encoding="utf-8")
        words = command("run", file, "--runs", f"{home}/runs", "--format", "json", null=null)
        lab = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)
        assert lab.stdout is not None
        seen, ends, cpu = Lab(lab), [], []
        for line in lab.stdout:
            event = json.loads(line)
            if event["event"] == "child" and event["state"] == "ready" and not ends:
                measured.start_s = time.monotonic() - began
            if event["event"] == "global_round":
                ends.append(float(event["elapsed_s"]))
                if len(ends) == 1:
                    seen.find()
                cpu.append(seen.cpu_s())
                if len(ends) == rounds - 1:  # after the last one processes begin to end
                    measured.memory_mb, measured.processes = seen.memory_mb(), seen.counts()
        if lab.wait() or len(ends) < rounds:
            raise SystemExit(
                f"the lab of {devices} devices ended with code {lab.returncode} after {len(ends)} "
                "rounds"
            )
    measured.round_s = statistics.median(np.diff(ends).tolist())
    measured.cpu_s = {kind: (cpu[-1][kind] - cpu[0][kind]) / (rounds - 1) for kind in cpu[0]}
    measured.start_cpu_s = sum(cpu[0].values()) - sum(measured.cpu_s.values())
    return measured


def show(measured: Measured) -> None:
    """Print a lab."""
    count = measured.devices
    print(
        f"{count:>5} devices   start {measured.start_s:.1f} s ({measured.start_cpu_s:.1f} CPU)   "
        f"round {measured.round_s:.2f} s = {1e3 * measured.round_s / count:.2f} ms a device   "
        f"CPU {measured.round_cpu_s:.2f} s = {1e3 * measured.round_cpu_s / count:.2f} ms a device"
    )
    for kind, processes in measured.processes.items():
        cpu_s, memory_mb = measured.cpu_s[kind], measured.memory_mb[kind]
        print(
            f"      {processes:>4} {kind:<13} CPU {cpu_s:7.3f} s = {1e3 * cpu_s / count:6.3f} ms "
            "a device   "
            f"PSS {memory_mb:8.1f} MB, {memory_mb / processes:7.1f} each",
            flush=True,
        )


def trend(labs: list[Measured]) -> None:
    """Print the least-squares lines over the labs."""
    counts = np.array([lab.devices for lab in labs], dtype=float)
    for name, costs in (
        ("CPU", [1e3 * lab.round_cpu_s / lab.devices for lab in labs]),
        ("wall", [1e3 * lab.round_s / lab.devices for lab in labs]),
    ):
        slope, _ = np.polyfit(counts, costs, 1)
        change = slope * (counts.max() - counts.min()) / np.mean(costs)
        print(
            f"{name} of a device and round: {100 * change:+.0f} % over {counts.min():.0f} to "
            f"{counts.max():.0f}"
        )
    for kind in ("devices", "institutions", "broker", "cloud"):
        slope, _ = np.polyfit(counts, [lab.memory_mb[kind] for lab in labs], 1)
        print(f"memory of the {kind}: {slope:.3f} MB for one more device")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("devices", type=int, nargs="*", default=DEVICES)
    parser.add_argument("--null", action="store_true")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.rounds < 3:
        parser.error("--rounds: at least 3")
    if asked.processes and not asked.null:
        parser.error("--processes is valid only with --null")
    labs = []
    for devices in asked.devices:
        labs.append(
            measure(devices, rounds=asked.rounds, null=asked.null, processes=asked.processes)
        )
        show(labs[-1])
        if asked.json:
            asked.json.write_text(
                json.dumps([asdict(lab) for lab in labs], indent=2) + "\n", encoding="utf-8"
            )
    if len(labs) > 1:
        trend(labs)


if __name__ == "__main__":
    main()
