"""`make bench NAME=simulated`: runs in virtual time beside labs of processes: seconds, CPU seconds,
models.

The labs have three layers and 12 devices that emulate slower machines, and a WAN of 20 Mbit/s; one
has a quorum and a straggler, one a trace of the WAN with an outage. Usage: simulated.py [LAB...]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.common.host.processes import python
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.sweeps.grid import merged
from tests.simulation.outcome import model_digest

BASE: Final[dict[str, Any]] = {
    "name": "beside",
    "rounds": 5,
    "topology": {"institutions": 3, "devices": 12},
    "data": {"partition": "dirichlet", "concentration": 0.5},
    "model": {"name": "cnn_digits"},
    "training": {"epochs": 2, "batch_size": 10, "learning_rate": 0.01, "momentum": 0.9},
    "institution": {"rounds": 2},
    "links": {"wan": {"up_mbit": 20, "down_mbit": 20, "delay_ms": 10}, "check": "off"},
    "hardware": {"default": {"step_s": 0.1}},
}
QUORUM: Final = {"closing": {"rule": "quorum", "quorum": 3, "deadline_s": 4.0}}
OUTAGE: Final = {
    "seconds": [0, 8, 13],
    "up_mbit": [20, 0, 5],
    "down_mbit": [20, 0, 5],
    "delay_ms": [10, 10, 40],
}
LABS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "quorum": {"institution": QUORUM, "hardware": {"of": {"device-0": {"step_s": 1.0}}}},
    "trace": {
        "links": {"wan": {"up_mbit": None, "down_mbit": None, "delay_ms": 0, "trace": OUTAGE}}
    },
}
KINDS: Final = {
    "lab": [],
    "simulated": ["--simulate"],
    "simulated, 1 worker": ["--simulate", "--workers", "1"],
    "direct": ["--direct"],
}


def measure(name: str, kind: str, home: Path) -> None:
    """Run a lab in one of the ways and print its figures."""
    file, runs = home / f"{name}.toml", home / name / kind
    file.write_text(to_toml(parse(merged(BASE, LABS[name]))))
    command = [*python("fedstrata"), "run", str(file), "--runs", str(runs), *KINDS[kind]]
    begun, before = time.monotonic(), os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall_s, after = time.monotonic() - begun, os.times()
    cpu_s = sum(after[2:4]) - sum(before[2:4])
    run = Run(next(runs.iterdir()))
    mib = sum(run.totals.values()) / 1e6
    print(
        f"{name:8} {kind:20} {run.seconds:8.2f} s of global rounds  {wall_s:6.1f} s wall  "
        f"{cpu_s:6.1f} CPU s  "
        f"{mib:7.3f} MB  {model_digest(runs)}",
        flush=True,
    )


def main() -> None:
    """Run the labs that are named, or all."""
    with tempfile.TemporaryDirectory(prefix="fedstrata-bench-") as home:
        for name in sys.argv[1:] or LABS:
            for kind in KINDS:
                measure(name, kind, Path(home))


if __name__ == "__main__":
    main()
