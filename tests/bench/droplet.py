"""`make bench NAME=droplet`: does a cloud with ResNet-18 and five uploads fit into a droplet of 1
GB? As root.

    python tests/bench/droplet.py [--limit-mb 1000]

Broker, cloud and its evaluator, which loads as many made-up images as CIFAR-10 has and scores on
500 of them, are in a cgroup of this limit; five devices outside it train 20 samples each. The
kernel kills what goes beyond the limit, and the run fails. In use: memory of processes and shared
memory, which cannot be dropped as a file's pages can, sampled every 0.1 s.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
MB = 1e6


def main() -> None:
    """Run the lab and print the memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit-mb", type=float, default=1000)
    parser.add_argument("--port", type=int, default=18_830)
    chosen = parser.parse_args()
    group = ControlGroup(f"droplet-{os.getpid()}", int(chosen.limit_mb * MB))
    with tempfile.TemporaryDirectory(dir=".") as name, group as droplet:
        folder, broker = Path(name), f"127.0.0.1:{chosen.port}"
        experiment = folder / "droplet.toml"
        experiment.write_text(EXPERIMENT)
        started = time.monotonic()

        def start(*words: str | Path, log: Path) -> subprocess.Popen[bytes]:
            with log.open("wb") as file:
                return subprocess.Popen(droplet.entering(command(*words)), stdout=file, stderr=file)

        start("broker", "--port", str(chosen.port), log=folder / "broker.log")
        cloud = start(
            "cloud", experiment, "--broker", broker, "--runs", folder, log=folder / "cloud.log"
        )
        names = [word for i in range(5) for word in ("--name", f"device-{i}")]
        words = ["--parent", "cloud", "--slots", "1", "--broker", broker]
        with (folder / "devices.log").open("wb") as log:
            devices = subprocess.Popen(
                command("device", *names, *words, "--accelerator", "cpu"), stderr=log
            )
        in_use = 0
        while cloud.poll() is None:
            in_use = max(in_use, droplet.memory_bytes())
            time.sleep(0.1)
        print((folder / "cloud.log").read_text()[-2000:])
        print(
            f"limit {chosen.limit_mb:.0f} MB, exit code {cloud.returncode}, "
            f"{time.monotonic() - started:.0f} s"
        )
        print(
            f"in use at most {in_use / MB:.0f} MB, with files' pages "
            f"{droplet.peak_bytes() / MB:.0f} MB"
        )
        devices.kill()
        devices.wait()
    sys.exit(cloud.returncode)


if __name__ == "__main__":
    main()
