"""What `fedstrata plan` and `plan --simulate` predict beside what is measured: `make bench-plan`.

Each lab is predicted and then run on this machine by `fedstrata run --plan`; the first global round, in which caches
fill and Tempo has not yet decided, is left out of the measured mean. The quick prediction knows neither quorums nor
deadlines, nor traces of links. Names of labs may be given, by their beginnings.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Final

from rich.console import Console
from rich.table import Table

from deploy.runs.run import Run, folders

ROOT: Final = Path(__file__).parents[2]
IMAGES: Final = '[data]\ndataset = "synthetic"\nclasses = 10\nimage_shape = [3, 32, 32]\ntest_samples = 50\n'
LABS: Final = {
    "the demo": (ROOT / "deploy" / "experiments" / "demo.toml").read_text(encoding="utf-8"),
    "10 x 45 MB, 50 Mbit/s": f"""
rounds = 4
{IMAGES}samples = 200
[topology]
devices = 10
[model]
name = "resnet18_cifar"
[links]
lan = "wan-50mbit"
check = "off"
""",
    "3 x 8 devices, mixed links": f"""
rounds = 5
{IMAGES}samples = 2400
[topology]
institutions = 3
devices = 24
[model]
name = "resnet20"
[institution]
rounds = 2
[links]
wan = {{ up_mbit = 20, down_mbit = 20, delay_ms = 10 }}
lan = {{ up_mbit = 40, down_mbit = 100, delay_ms = 1 }}
check = "off"
[links.of]
institution-1 = {{ up_mbit = 5, down_mbit = 50, delay_ms = 20 }}
device-3 = {{ up_mbit = 2, down_mbit = 8, delay_ms = 30 }}
device-17 = {{ up_mbit = 10, down_mbit = 10, delay_ms = 5 }}
""",
    "a quorum with a straggler": f"""
rounds = 5
{IMAGES}samples = 400
[topology]
institutions = 0
devices = 4
[model]
name = "resnet20"
[cloud]
closing = {{ rule = "quorum", quorum = 3, deadline_s = 4.0 }}
[links]
wan = {{ up_mbit = 20, down_mbit = 20, delay_ms = 10 }}
check = "off"
[hardware.of]
device-3 = {{ overhead_s = 30.0 }}
""",
    "an outage of 15 s": f"""
rounds = 4
{IMAGES}samples = 400
[topology]
institutions = 2
devices = 4
[model]
name = "resnet20"
[links]
check = "off"
wan = {{ trace = {{ seconds = [0, 8, 23], up_mbit = [10, 0, 10], down_mbit = [10, 0, 10] }} }}
""",
    "1,000 devices": """
rounds = 3
[topology]
institutions = 4
devices = 1000
[data]
dataset = "synthetic"
classes = 10
samples = 10000
[model]
name = "mlp_digits"
[links]
check = "off"
""",
}

WHOLE: Final = ("an outage of 15 s",)  # labs compared with their first round: it may be the one with the outage


def main() -> None:
    """Run each lab and print a table."""
    table = Table("lab", "plan", "plan --simulate", "measured", "ratios", "phases: plan / simulated / measured")
    wanted = tuple(sys.argv[1:])
    for name, text in LABS.items():
        if wanted and not name.startswith(wanted):
            continue
        with tempfile.TemporaryDirectory() as home:
            file = Path(home) / "lab.toml"
            file.write_text(text, encoding="utf-8")
            command = [sys.executable, "-m", "deploy.cli", "run", str(file), "--plan", "--runs", f"{home}/runs"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            (folder,) = folders(Path(home) / "runs")
            plan = [
                sys.executable,
                "-m",
                "deploy.cli",
                "plan",
                str(file),
                "--one-host",
                "--simulate",
                "--format",
                "json",
            ]
            simulated = json.loads(subprocess.run(plan, check=True, stdout=subprocess.PIPE).stdout)
            run = Run(folder)
            reported = run.prediction
            whole = name in WHOLE
            rounds = run.rounds if whole else run.rounds[1:]
        assert reported is not None
        predicted, measured = sum(reported.seconds.values()), mean(sum(r.phases.values()) for r in rounds)
        phases = ", ".join(
            f"{phase} {seconds:.2f}/{simulated['seconds'][phase]:.2f}/{mean(r.phases[phase] for r in rounds):.2f}"
            for phase, seconds in reported.seconds.items()
            if seconds > 0.005
        )
        also = mean(simulated["simulated_rounds"]) if whole else simulated["global_round_s"]
        ratios = f"{predicted / measured:.2f}, {also / measured:.2f}"
        table.add_row(name, f"{predicted:.2f} s", f"{also:.2f} s", f"{measured:.2f} s", ratios, phases)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
