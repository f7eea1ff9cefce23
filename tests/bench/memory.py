"""`make bench NAME=memory`: models in the memory of each role, by the size of the model; ARGS="--mb
45 200 500".

A lab of processes: a cloud with its evaluator, an institution, two devices of one process with two
workers. The trainer changes its arrays where they are, so it needs one model. A process's memory is
its Pss (what it shares with others counts in parts) at its own peak, sampled every 0.05 s, less
that of the same process with a model of 4 kB, in models. The last columns are the most memory of
all at once, and what `fedstrata plan` has for a role.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.bench.running import MB, Table, folder, output, processes, run, started
from tests.helpers.commands import command, sets
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


def measure(home: Path, *pairs: str) -> tuple[Mapping[str, float], float]:
    """Run the lab; return the most bytes of a process by role, and of all at once."""
    words = command("run", "bulk.toml", "--runs", home / "runs", *sets(*pairs))
    most: dict[str, float] = defaultdict(float)
    together = 0.0
    with started(words, home / "log", cwd=home) as process:
        while process.poll() is None:
            total = 0.0
            for each, role in processes(process.pid, ROLES):
                if not role:
                    continue
                with suppress(OSError):  # it has ended
                    size = pss(each.pid)
                    total += size
                    most[role] = max(most[role], size)
            together = max(together, total)
            time.sleep(LOOK_S)
    if process.returncode:
        raise SystemExit((home / "log").read_text())
    return most, together


def main(*, mb: Sequence[float] = (45, 200, 500)) -> None:
    """Print a table: a row for each role and size."""
    table = Table("model, MB", "role", "MB", "in models", "`plan`, MB")
    with folder() as home:
        (home / "bulk.py").write_text(TRAINER)
        (home / "bulk.toml").write_text(LAB)
        empty, nothing = measure(home)
        for size in mb:
            columns = round(size * MB / 4)
            pair = f"training.trainer.columns={columns}"
            most, together = measure(home, pair)
            plan = json.loads(
                output("plan", "bulk.toml", *sets(pair), "--format", "json", cwd=home)
            )
            for role in sorted(most):
                models = (most[role] - empty[role]) / (4 * columns)
                row = [f"{size:g}", role, f"{most[role] / MB:.0f}", f"{models:.1f}"]
                if role in plan["memory"]:
                    row.append(f"{plan['memory'][role] / MB:.0f}")
                table.add(*row)
            models = (together - nothing) / (4 * columns)
            table.add(f"{size:g}", "all at once", f"{together / MB:.0f}", f"{models:.1f}")


if __name__ == "__main__":
    run(main)
