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

import json
import os
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import numpy as np
import psutil

from tests.bench.running import MB, Clock, folder, processes, run, started
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
    """The processes of a lab that runs, that of its command included."""

    def __init__(self, root: int) -> None:
        self._kinds = dict(processes(root, KINDS))

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each kind so far."""
        return self._sums(lambda process: sum(process.cpu_times()[:2]))

    def memory_mb(self) -> dict[str, float]:
        """Return the PSS of each kind."""
        return self._sums(lambda process: pss(process.pid) / MB)

    def counts(self) -> dict[str, int]:
        """Return the number of processes of each kind."""
        counts = Counter(self._kinds.values())
        return {kind: counts[kind] for kind in KINDS.values() if kind in counts}

    def _sums(self, of: Callable[[psutil.Process], float]) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for process, kind in self._kinds.items():
            sums[kind] += of(process)
        return dict(sums)


def measure(devices: int, *, rounds: int, null: bool, count: int | None) -> Measured:
    """Run a lab and measure it."""
    measured = Measured(devices)
    env = dict(os.environ)
    if count:
        env["NULL_LAB_PROCESSES"] = str(count)
    with folder() as home, Clock() as clock:
        file = home / "scale.toml"
        institutions = min(INSTITUTIONS, devices)
        samples = SAMPLES * devices
        text = EXPERIMENT.format(
            rounds=rounds, institutions=institutions, devices=devices, samples=samples
        )
        file.write_text(text, encoding="utf-8")
        words = command("run", file, "--runs", home / "runs", "--format", "json", null=null)
        ends: list[float] = []
        cpu = []
        with started(words, home / "log", stdout=subprocess.PIPE, stderr=None, env=env) as process:
            assert process.stdout is not None
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "child" and event["state"] == "ready" and not ends:
                    measured.start_s = clock.now_s
                if event["event"] == "global_round":
                    ends.append(float(event["elapsed_s"]))
                    if len(ends) == 1:
                        lab = Lab(process.pid)
                    cpu.append(lab.cpu_s())
                    if len(ends) == rounds - 1:  # after the last one processes begin to end
                        measured.memory_mb = lab.memory_mb()
                        measured.processes = lab.counts()
            code = process.wait()
    if code or len(ends) < rounds:
        raise SystemExit(
            f"the lab of {devices} devices ended with code {code} after {len(ends)} rounds"
        )
    measured.round_s = median(np.diff(ends).tolist())
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
    for kind, number in measured.processes.items():
        cpu_s, memory_mb = measured.cpu_s[kind], measured.memory_mb[kind]
        print(
            f"      {number:>4} {kind:<13} CPU {cpu_s:7.3f} s = {1e3 * cpu_s / count:6.3f} ms "
            "a device   "
            f"PSS {memory_mb:8.1f} MB, {memory_mb / number:7.1f} each",
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


def main(
    *devices: int,
    null: Annotated[bool, "devices add noise in place of training"] = False,
    processes: Annotated[int | None, "of devices, with --null"] = None,
    rounds: Annotated[int, "at least 3"] = 5,
    json_: Annotated[Path | None, "a file for the figures"] = None,
) -> str | None:
    """Measure and print each lab, then the lines over all."""
    if rounds < 3:
        return "--rounds: at least 3"
    if processes and not null:
        return "--processes is valid only with --null"
    labs = []
    for number in devices or DEVICES:
        labs.append(measure(number, rounds=rounds, null=null, count=processes))
        show(labs[-1])
        if json_:
            text = json.dumps([asdict(lab) for lab in labs], indent=2)
            json_.write_text(text + "\n", encoding="utf-8")
    if len(labs) > 1:
        trend(labs)
    return None


if __name__ == "__main__":
    run(main)
