"""Measure a small version of Tempo's Table 1: time and costs of reaching an accuracy, Tempo against fixed epochs.

    python deploy/experiments/table1.py [--seeds 3] [--target 0.9] [--runs runs/table1] [--format latex]

Each run is a lab of processes on this machine, on digits, over links shaped to 20 and 100 Mbit/s. It ends when it
reaches the accuracy. Finished runs are not repeated. At the end `fedstrata compare` prints the costs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Final

from common.experiment.reading import load
from deploy.local.lab import LocalLab
from deploy.runs.run import Run, State, folders

DEMO: Final = Path(__file__).with_name("demo.toml")
C: Final = 6  # the paper's
FIXED: Final = (4, 6, 8)


def main() -> int:
    """Run the missing experiments, compare all runs, and return the exit code of `compare`."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--target", type=float, default=0.9)
    arguments.add_argument("--runs", type=Path, default=Path("runs/table1"))
    arguments.add_argument("--format", default="table", choices=("table", "json", "csv", "latex"))
    given = arguments.parse_args()
    found = []
    for epochs, control in [*((epochs, "fixed") for epochs in FIXED), (C, "tempo")]:
        for seed in range(1, given.seeds + 1):
            keys = {"name": f"{control}-{epochs}", "seed": seed, "rounds": 40, "target_accuracy": given.target}
            keys |= {"training.epochs": epochs, "cloud.epoch_control.name": control, "links.check": "off"}
            experiment = load(DEMO, [f"{key}={value}" for key, value in keys.items()])
            done = _finished(given.runs, experiment.digest)
            if done is None:
                print(f"{experiment.name}, seed {seed}", file=sys.stderr)
                if LocalLab(experiment, runs=given.runs, resume=None, json_lines=True, metrics=("127.0.0.1:0",)).run():
                    return 1
                done = _finished(given.runs, experiment.digest)
            if done is not None:
                found.append(str(done))
    labels = [option for epochs in FIXED for option in ("--label", f"{epochs} epochs")]
    labels += ["--label", f"Tempo, c = {C}"]
    compare = [sys.executable, "-m", "deploy.cli", "compare", *found, "--format", given.format, *labels]
    return subprocess.run([*compare, "--target", str(given.target)], check=False).returncode


def _finished(root: Path, digest: str) -> Path | None:
    """Return the folder of a finished run of an experiment, or None."""
    for path in folders(root) if root.is_dir() else ():
        run = Run(path)
        if run.state is State.FINISHED and run.manifest["experiment_digest"] == digest:
            return path
    return None


if __name__ == "__main__":
    sys.exit(main())
