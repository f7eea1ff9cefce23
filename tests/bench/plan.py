"""`make bench NAME=plan`: what `fedstrata plan` predicts beside what is measured, and how long it
takes.

    python tests/bench/plan.py [LAB...] [--repetitions N]

Each lab is predicted and then run on this machine, again and again: medians of the ratios, and
their smallest and largest. Devices emulate machines that are slower than their share of this one,
so that it stands for one machine each. LAB is the beginning of a lab's name: each takes below three
minutes. The first global round, in which caches fill, is left out of the measured mean. `took`: the
seconds of the command `plan`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Final

from rich.console import Console
from rich.table import Table

from fedstrata.deploy.results.run import Run, folders

ROOT: Final = Path(__file__).parents[2]
IMAGES: Final = (
    '[data]\ndataset = "synthetic"\nclasses = 10\nimage_shape = [3, 32, 32]\ntest_samples = 50\n'
)


def slow(step_s: float) -> str:
    """Return the table of devices that take so many seconds for a step."""
    return f"[hardware.default]\nstep_s = {step_s}\n"


LABS: Final = {
    "the demo": (ROOT / "deploy" / "experiments" / "demo.toml").read_text(encoding="utf-8")
    + slow(0.05),
    "10 x 45 MB, 50 Mbit/s": f"""
rounds = 3
{IMAGES}samples = 200
[topology]
devices = 10
[model]
name = "resnet18_cifar"
[links]
lan = "wan-50mbit"
check = "off"
{slow(30.0)}
""",
    "3 x 8 devices, mixed links": f"""
rounds = 4
{IMAGES}samples = 960
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
{slow(3.0)}
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
{slow(1.0)}
[hardware.of]
device-3 = {{ step_s = 1.0, overhead_s = 30.0 }}
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
{slow(1.0)}
""",
    "1,000 devices": f"""
rounds = 3
[topology]
institutions = 10
devices = 1000
[data]
dataset = "synthetic"
classes = 10
image_shape = [1, 28, 28]
samples = 10000
test_samples = 1000
[model]
name = "lenet5"
[training]
batch_size = 10
[links]
check = "off"
{slow(30.0)}
""",
}
# labs compared with their first round: it may be the one with the outage
WHOLE: Final = ("an outage of 15 s",)


@dataclass(slots=True)
class Comparison:
    """What the repetitions of one lab gave: seconds of a global round, and of its phases in the
    same order.
    """

    took: list[float] = field(default_factory=list)
    plan: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    phases: list[tuple[dict[str, float], dict[str, float]]] = field(default_factory=list)


def main() -> None:
    """Compare each lab and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("labs", nargs="*", metavar="LAB")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    columns = ("lab", "took", "plan", "measured", "plan / measured")
    table, details = Table(*columns), Table("lab", "phases: plan / measured")
    for name, text in LABS.items():
        if options.labs and not name.startswith(tuple(options.labs)):
            continue
        found = Comparison()
        for _ in range(options.repetitions):
            compare(name, text, found)
        seconds = (f"{median(each):.2f} s" for each in (found.took, found.plan, found.measured))
        table.add_row(name, *seconds, ratios(found))
        details.add_row(name, phases(found))
    console = Console(width=150)
    console.print(table)
    console.print(details)


def compare(name: str, text: str, found: Comparison) -> None:
    """Predict and run a lab once."""
    with tempfile.TemporaryDirectory() as home:
        file = Path(home) / "lab.toml"
        file.write_text(text, encoding="utf-8")
        begun = time.monotonic()
        plan = json.loads(command("plan", str(file), "--format", "json"))
        found.took.append(time.monotonic() - begun)
        command("run", str(file), "--runs", f"{home}/runs")
        (folder,) = folders(Path(home) / "runs")
        run = Run(folder)
        whole = name in WHOLE
        rounds = run.rounds if whole else run.rounds[1:]
    found.plan.append(mean(plan["simulated_rounds"]) if whole else plan["global_round_s"])
    found.measured.append(mean(each.seconds for each in rounds))
    measured = {phase: mean(each.phases[phase] for each in rounds) for phase in plan["seconds"]}
    found.phases.append((plan["seconds"], measured))


def command(*words: str) -> str:
    """Run a command of fedstrata and return its standard output."""
    words = (sys.executable, "-m", "fedstrata", *words)
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def ratios(found: Comparison) -> str:
    """Return the median of predicted / measured, with the smallest and the largest."""
    each = [ours / theirs for ours, theirs in zip(found.plan, found.measured, strict=True)]
    return f"{median(each):.3f} ({min(each):.3f} to {max(each):.3f})"


def phases(found: Comparison) -> str:
    """Return the median seconds of each phase, of those with more than 5 ms."""
    texts = []
    for phase in found.phases[0][0]:
        seconds = [median(each[way][phase] for each in found.phases) for way in range(2)]
        if max(seconds) > 5e-3:
            texts.append(f"{phase} {' / '.join(f'{one:.3f}' for one in seconds)}")
    return ", ".join(texts)


if __name__ == "__main__":
    main()
