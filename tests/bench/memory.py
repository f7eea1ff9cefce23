"""`make bench NAME=memory`: models in the memory of each role, by the size of the model; ARGS="--mb
45 200 500".

A lab of processes: a cloud with its evaluator, an institution, two devices of one process with two
workers. The trainer changes its arrays where they are, so it needs one model. A process's memory is
its Pss (what it shares with others counts in parts) at its own peak, sampled every 0.05 s, less
that of the same process with a model of 4 kB, in models. The last columns are the most memory of
all at once, and what `fedstrata plan` has for a role.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from tests.helpers.commands import command
from tests.helpers.pss import pss

TRAINER: Final = """
import numpy as np
from fedstrata import ArrayTrainer, Scored, Trained

class Bulk(ArrayTrainer):
    def __init__(self, *, columns):
        self.columns = columns

    def initial(self, seed):
        return {f"w{i}": np.full(self.columns // 4, 0.5, np.float32) for i in range(4)}

    def prepare(self, site):
        return 20

    def train(self, arrays, task):
        for array in arrays.values():
            array *= np.float32(0.999)
        return Trained(arrays, 0.5, 1)

    def evaluate(self, arrays, task):
        return Scored(10, 0.5, 0.5)
"""
LAB: Final = """
rounds = 3
topology = { institutions = 1, devices = 2 }
institution = { rounds = 2 }
training = { trainer = { name = "bulk:Bulk", columns = 1000 } }
"""
ROLES: Final = {  # by a word of the command line
    "evaluator_process": "evaluator",
    "fork_server": "worker",
    "mosquitto": "broker",
    "institution": "institution",  # before the cloud, which is a parent
    "device": "device agent",
    "cloud": "cloud",
}
LOOK_S: Final = 0.05
MB: Final = 1e6


def processes(root: psutil.Process) -> Iterator[tuple[int, str]]:
    """Yield the processes of a run, each with its role."""
    for process in root.children(recursive=True):
        with suppress(psutil.Error):
            words = process.cmdline()
            for word, role in ROLES.items():
                if any(word == each or each.endswith((f".{word}", f"/{word}")) for each in words):
                    yield process.pid, role
                    break


def measure(home: Path, columns: int) -> tuple[Mapping[str, float], float]:
    """Run the lab; return the most bytes of a process by role, and of all at once."""
    words = command(
        "run", "bulk.toml", "--runs", home / "runs", "--set", f"training.trainer.columns={columns}"
    )
    most: dict[str, float] = defaultdict(float)
    together = 0.0
    with (home / "log").open("wb") as log:
        run = psutil.Popen([*map(str, words)], cwd=home, stdout=log, stderr=log)
        while run.poll() is None:
            total = 0.0
            for pid, role in processes(run):
                with suppress(OSError):  # it has ended
                    size = pss(pid)
                    total += size
                    most[role] = max(most[role], size)
            together = max(together, total)
            time.sleep(LOOK_S)
    if run.returncode:
        raise SystemExit((home / "log").read_text())
    return most, together


def planned(home: Path, columns: int) -> Mapping[str, int]:
    """Return what `plan` has for a role's memory."""
    words = command(
        "plan", "bulk.toml", "--set", f"training.trainer.columns={columns}", "--format", "json"
    )
    done = subprocess.run([*map(str, words)], cwd=home, capture_output=True, text=True, check=True)
    memory: Mapping[str, int] = json.loads(done.stdout)["memory"]
    return memory


def main() -> None:
    """Print a table: a row for each role and size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, nargs="+", default=[45, 200, 500])
    chosen = parser.parse_args()
    print("| model, MB | role | MB | in models | `plan`, MB |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "bulk.py").write_text(TRAINER)
        (home / "bulk.toml").write_text(LAB)
        empty, nothing = measure(home, 1000)
        for size in chosen.mb:
            columns = round(size * MB / 4)
            most, together = measure(home, columns)
            plans = planned(home, columns)
            for role in sorted(most):
                models = (most[role] - empty[role]) / (4 * columns)
                plan = f"{plans[role] / MB:.0f}" if role in plans else ""
                print(
                    f"| {size:g} | {role} | {most[role] / MB:.0f} | {models:.1f} | {plan} |",
                    flush=True,
                )
            models = (together - nothing) / (4 * columns)
            print(f"| {size:g} | all at once | {together / MB:.0f} | {models:.1f} | |", flush=True)


if __name__ == "__main__":
    main()
