"""`make bench NAME=droplet`: does a cloud with ResNet-18 and five uploads fit into a droplet of 1
GB? As root.

    python tests/bench/droplet.py [--limit-mb 1000]

Broker, cloud and its evaluator, which loads as many made-up images as CIFAR-10 has and scores on
500 of them, are in a cgroup of this limit; five devices outside it train 20 samples each. The
kernel kills what goes beyond the limit, and the run fails. In use: memory of processes and shared
memory, which cannot be dropped as a file's pages can, sampled every 0.1 s.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.bench.running import MB, Clock, folder, run, started
from tests.helpers.cgroups import ControlGroup
from tests.helpers.commands import command

EXPERIMENT = """
name = "droplet"
rounds = 2
topology = { institutions = 0, devices = 5 }
model = { name = "resnet18_cifar" }
training = { batch_size = 10 }
transfer = { idle_s = 600 }

[data]
dataset = "synthetic"
samples = 59_500
test_samples = 500
image_shape = [3, 32, 32]
classes = 10
partition = "dirichlet_overlap"
partition_size = 20
"""


def main(*, limit_mb: float = 1000, port: int = 18_830) -> Any:
    """Run the lab, print the memory, and return the cloud's exit code."""
    group = ControlGroup(f"droplet-{os.getpid()}", int(limit_mb * MB))
    where = ("--broker", f"127.0.0.1:{port}")
    names = [word for i in range(5) for word in ("--name", f"device-{i}")]
    in_use = 0
    with folder(Path()) as home, group as droplet, ExitStack() as stack, Clock() as clock:
        experiment = home / "droplet.toml"
        experiment.write_text(EXPERIMENT)

        def start(*words: str | Path, inside: bool = True) -> Any:
            line = command(*words)
            if inside:
                line = droplet.entering(line)
            return stack.enter_context(started(line, home / f"{words[0]}.log"))

        start("broker", "--port", str(port))
        cloud = start("cloud", experiment, *where, "--runs", home)
        start(
            *("device", *names, "--parent", "cloud", "--slots", "1", *where),
            *("--accelerator", "cpu"),
            inside=False,
        )
        while cloud.poll() is None:
            in_use = max(in_use, droplet.memory_bytes())
            time.sleep(0.1)
        print((home / "cloud.log").read_text()[-2000:])
        print(f"limit {limit_mb:.0f} MB, exit code {cloud.returncode}, {clock.now_s:.0f} s")
        print(
            f"in use at most {in_use / MB:.0f} MB, with files' pages "
            f"{droplet.peak_bytes() / MB:.0f} MB"
        )
    return cloud.returncode


if __name__ == "__main__":
    run(main)
