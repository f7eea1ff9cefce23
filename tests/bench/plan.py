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

import json
from statistics import mean, median
from typing import Final, TypeAlias

from fedstrata.deploy.results.run import Run, folders
from tests.bench.running import Clock, Table, folder, output, run
from tests.helpers.commands import DEMO

IMAGES: Final = (
    '[data]\ndataset = "synthetic"\nclasses = 10\nimage_shape = [3, 32, 32]\ntest_samples = 50\n'
)


def slow(step_s: float) -> str:
    """Return the table of devices that take so many seconds for a step."""
    return f"[hardware.default]\nstep_s = {step_s}\n"


LABS: Final = {
    "the demo": DEMO.read_text(encoding="utf-8") + slow(0.05),
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


Seconds: TypeAlias = dict[str, float]  # by phase


def compare(name: str, text: str) -> tuple[tuple[float, float, float], Seconds, Seconds]:
    """Predict and run a lab once; return the seconds of `plan`, those of a global round as
    predicted and as measured, and these by phase.
    """
    with folder() as home:
        file = home / "lab.toml"
        file.write_text(text, encoding="utf-8")
        with Clock() as clock:
            plan = json.loads(output("plan", file, "--format", "json"))
        output("run", file, "--runs", home / "runs")
        (found,) = folders(home / "runs")
        rounds = Run(found).rounds
    predicted = plan["global_round_s"]
    if name in WHOLE:
        predicted = mean(plan["simulated_rounds"])
    else:
        rounds = rounds[1:]
    phases = {phase: mean(each.phases[phase] for each in rounds) for phase in plan["seconds"]}
    measured = mean(each.seconds for each in rounds)
    return (clock.s, predicted, measured), plan["seconds"], phases


def main(*labs: str, repetitions: int = 3) -> None:
    """Compare each lab and print a row for it."""
    table = Table(
        "lab", "took", "plan", "measured", "plan / measured", "phases: plan / measured, s"
    )
    for name, text in LABS.items():
        if labs and not name.startswith(labs):
            continue
        seconds, planned, found = zip(
            *(compare(name, text) for _ in range(repetitions)), strict=True
        )
        ratios = [predicted / measured for _, predicted, measured in seconds]
        medians = (f"{median(each):.2f} s" for each in zip(*seconds, strict=True))
        ratio = f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        table.add(name, *medians, ratio, phases(planned, found))


def phases(*ways: tuple[Seconds, ...]) -> str:
    """Return the median seconds of each phase, of those with more than 5 ms."""
    texts = []
    for phase in ways[0][0]:
        seconds = [median(each[phase] for each in way) for way in ways]
        if max(seconds) > 5e-3:
            texts.append(f"{phase} {' / '.join(f'{one:.3f}' for one in seconds)}")
    return ", ".join(texts)


if __name__ == "__main__":
    run(main)
