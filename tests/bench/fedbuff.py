"""`make bench NAME=fedbuff`: synchronous rounds, a quorum and FedBuff with one slow device, five
seeds.

A cloud and six devices, digits by `dirichlet` 0.5, the perceptron. Five devices take 0.2 s longer
for a task than this host, one 2 s. Each lab runs for some 50 seconds. Each seed is a split and a
start; means and standard deviations over the seeds.
"""

from __future__ import annotations

import sys
from statistics import fmean, stdev
from typing import Final

from tests.bench.running import Table, folder, run
from tests.helpers.commands import run_lab, table

SLOW: Final = "device-1"
LAB: Final = f"""
topology = {{ institutions = 0, devices = 6 }}
data = {{ dataset = "digits", partition = "dirichlet", concentration = 0.5 }}
model = {{ name = "mlp_digits" }}
training = {{ epochs = 1, batch_size = 10, learning_rate = 0.05 }}

[hardware.default]
overhead_s = 0.2

[hardware.of]
{SLOW} = {{ overhead_s = 2.0 }}
"""
QUORUM: Final = "{rule='quorum', quorum=5, deadline_s=0.01}"
WAYS: Final = {
    "FedAvg, uniform, all six": ("rounds=25", "cloud.aggregation.weights='uniform'"),
    "FedAvg, uniform, quorum of five": (
        "rounds=200",
        "cloud.aggregation.weights='uniform'",
        f"cloud.closing={QUORUM}",
    ),
    "FedBuff, buffer 5": ("rounds=200", "cloud.aggregation={name='fedbuff', buffer=5}"),
    "FedBuff, buffer 2": ("rounds=400", "cloud.aggregation={name='fedbuff', buffer=2}"),
    "FedBuff, buffer 1": ("rounds=450", "cloud.aggregation={name='fedbuff', buffer=1}"),
}
TARGETS: Final = (0.9, 0.93)
LAST: Final = 10  # rounds over which the accuracy at the end is averaged


def measure(way: tuple[str, ...], seed: int) -> dict[str, float | None]:
    """Return one lab's figures; a target that was not reached is None."""
    with folder() as runs:
        experiment = runs / "experiment.toml"
        experiment.write_text(LAB, encoding="utf-8")
        lab = run_lab(experiment, runs, *way, f"seed={seed}")
        rows = table(lab / "rounds.csv")
        used = [row for row in table(lab / "devices.csv") if row["node"].endswith(SLOW)]
    rounds = [(float(row["elapsed_s"]), float(row["accuracy"])) for row in rows]
    found: dict[str, float | None] = {"global rounds a minute": 60 * len(rounds) / rounds[-1][0]}
    for target in TARGETS:
        reached = (at for at, accuracy in rounds if accuracy >= target)
        found[f"s to {target:.0%}"] = next(reached, None)
    last = fmean(accuracy for _, accuracy in rounds[-LAST:])
    found["accuracy, mean of the last ten"] = 100 * last
    found["results of the slow device"] = len(used)
    return found


def summary(values: list[float | None]) -> str:
    """Return mean and deviation, and how many there are if not all."""
    reached = [value for value in values if value is not None]
    if not reached:
        return "not reached"
    digits = 0 if min(reached) >= 100 else 1
    text = f"{fmean(reached):.{digits}f}"
    if len(reached) > 1:
        text += f" ± {stdev(reached):.{digits}f}"
    return text if len(reached) == len(values) else f"{text} ({len(reached)} of {len(values)})"


def main(*, seeds: int = 5) -> None:
    """Run all ways for each seed in turn, and print a table."""
    found: dict[str, list[dict[str, float | None]]] = {name: [] for name in WAYS}
    for seed in range(1, seeds + 1):
        for name, way in WAYS.items():
            found[name].append(measure(way, seed))
            print(f"seed {seed}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    columns = list(found["FedBuff, buffer 1"][0])
    shown = Table("", *columns, title=f"{seeds} seeds")
    for name, runs in found.items():
        shown.add(name, *(summary([each[column] for each in runs]) for column in columns))


if __name__ == "__main__":
    run(main)
