"""Compare the aggregation rules and Tempo on digits: five paired seeds each, with a table per part.

    python deploy/experiments/study.py [--part 'two-*' ...] [--seeds 5] [--jobs 2] [--quick] [--out runs/study]

Runs of one seed share the split, the selected devices and the batches, so differences are paired. Each run is a lab
without a network (`deploy.local.direct`) in a process of a pool. Results are cached by the experiment's digest, so an
interrupted study can be continued. `study.csv` has a row for each run, `study.md` the tables of all complete parts.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # for this process and its pool; before numpy is imported

import argparse
import csv
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.host.processes import interruptible
from deploy.experiments.configurations import PARTS, Seen, StudyPart, merged

LAST = 10  # global rounds over which the final accuracy is averaged: a single one varies by a point


@dataclass(frozen=True, slots=True)
class StudyRun:
    """Results of a run: the accuracy after each global round, and cumulative seconds, steps, path steps and bytes."""

    accuracies: list[float]
    seconds: list[float]
    steps: list[int]
    path_steps: list[int]
    nbytes: list[int]
    wall_s: float

    @property
    def final(self) -> float:
        """The mean accuracy of the last global rounds, in percent."""
        return 100 * mean(self.accuracies[-LAST:])

    def at(self, global_round: int) -> float:
        """Return the accuracy after a number of global rounds, in percent."""
        return 100 * self.accuracies[min(global_round, len(self.accuracies)) - 1]

    def reached(self, target: float) -> int | None:
        """Return the index of the first global round that reached the accuracy, or None."""
        return next((place for place, accuracy in enumerate(self.accuracies) if accuracy >= target), None)


def experiment(part: StudyPart, row: str, seed: int, *, quick: bool) -> Experiment:
    """Return the experiment of a part's row; if `quick`, with a twentieth of the global rounds."""
    tree = merged(part.base, part.rows[row], {"seed": seed})
    return parse(merged(tree, {"rounds": max(3, tree["rounds"] // 20)}) if quick else tree)


def run_experiment(tree: str) -> StudyRun:
    """Run an experiment, given as JSON, without a network. Called in a process of the pool."""
    from cloud.results import RunFolder
    from deploy.local import direct
    from deploy.runs.run import columns_of

    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fedstrata-study-") as home:
        folder = RunFolder.create(Path(home), parse(tree))
        direct.run_in_process(folder, resume=False, accelerator="cpu", observe=lambda event, facts: None)
        with (folder.path / "rounds.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    columns = columns_of(parse(tree).tier_names)
    return StudyRun(
        [float(row["accuracy"]) for row in rows],
        [float(row["elapsed_s"]) for row in rows],
        _sums([int(row["sgd_steps"]) for row in rows]),
        _sums([int(row["path_steps"]) for row in rows]),
        _sums([sum(int(row[column]) for column in columns) for row in rows]),
        time.monotonic() - start,
    )


def _sums(values: Sequence[int]) -> list[int]:
    return list(accumulate(values))


class StudyCache:
    """Finished runs by the digests of their experiments."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, wanted: Experiment) -> StudyRun | None:
        """Return the run, or None if it is not finished."""
        path = self._folder / f"{wanted.digest}.json"
        return StudyRun(**json.loads(path.read_text())) if path.exists() else None

    def put(self, finished: Experiment, run: StudyRun) -> None:
        """Save a run."""
        partial = self._folder / f"{finished.digest}.partial"
        partial.write_text(json.dumps(asdict(run)))
        os.replace(partial, partial.with_suffix(".json"))


def complete(part: StudyPart, seeds: int, cache: StudyCache, *, quick: bool) -> dict[str, list[StudyRun]] | None:
    """Return each row's runs, in the order of their seeds, or None if one is missing."""
    found: dict[str, list[StudyRun]] = {}
    for row in part.rows:
        runs = [cache.get(experiment(part, row, seed, quick=quick)) for seed in range(1, seeds + 1)]
        found[row] = [run for run in runs if run is not None]
    return found if all(len(runs) == seeds for runs in found.values()) else None


def spread(values: Sequence[float]) -> str:
    """Return mean ± standard deviation over the seeds."""
    return f"{mean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else f"{mean(values):.1f}"


def table(part: StudyPart, found: Mapping[str, Sequence[StudyRun]]) -> list[str]:
    """Return a part's table. Δ: paired differences from the first row; costs: up to the target accuracy."""
    first = next(iter(found.values()))
    lines = [
        f"| | round {part.early} | Δ | final | Δ | {100 * part.target:g} % | global rounds | steps | path | MB | s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, runs in found.items():
        early = spread([run.at(part.early) for run in runs])
        early_gain = spread([run.at(part.early) - other.at(part.early) for run, other in zip(runs, first, strict=True)])
        gain = spread([run.final - other.final for run, other in zip(runs, first, strict=True)])
        there = [(run, place) for run in runs if (place := run.reached(part.target)) is not None]
        costs = ["-"] * 5
        if there:
            numbers = (
                [place + 1 for _, place in there],
                [run.steps[place] for run, place in there],
                [run.path_steps[place] for run, place in there],
            )
            costs = [f"{mean(values):.0f}" for values in numbers]
            costs.append(f"{mean(run.nbytes[place] for run, place in there) / 1e6:.1f}")
            costs.append(f"{mean(run.seconds[place] for run, place in there):.1f}")
        final = spread([run.final for run in runs])
        lines.append(
            f"| {row} | {early} | {early_gain} | {final} | {gain} | {len(there)}/{len(runs)} | {' | '.join(costs)} |"
        )
    return lines


def compared(seen: Seen, part: StudyPart, found: Mapping[str, Sequence[StudyRun]]) -> str:
    """Return a line that compares a row with a reference result: whether it is within two deviations over the seeds.

    One seed has no deviation, and so no verdict.
    """
    first = next(iter(found.values()))
    at = [run.at(seen.round) for run in found[seen.rule]]
    if seen.below:
        at = [other.at(seen.round) - value for value, other in zip(at, first, strict=True)]
    low, high = seen.percent
    off = max(low - mean(at), mean(at) - high, 0.0)
    verdict = "no verdict of one seed"
    if len(at) > 1:
        verdict = f"{'within' if off <= 2 * stdev(at) else 'not within'} two deviations"
    what = f"points below {next(iter(part.rows))}" if seen.below else "percent"
    wanted = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    return f"- {seen.rule}, round {seen.round}: {spread(at)} {what}; seen elsewhere {wanted}: {verdict}"


def report(out: Path, cache: StudyCache, seeds: int, *, quick: bool) -> None:
    """Write study.csv and study.md of all parts that are complete."""
    lines: list[str] = []
    rows: list[dict[str, Any]] = []
    for name, part in PARTS.items():
        found = complete(part, seeds, cache, quick=quick)
        if found is None:
            continue
        took = sum(run.wall_s for runs in found.values() for run in runs)
        lines += [f"## {name}", "", f"{part.title}. {seeds} seeds, {took / 60:.0f} minutes of runs.", ""]
        lines += [*table(part, found), "", *(compared(seen, part, found) for seen in part.seen), ""]
        for row, runs in found.items():
            for seed, run in enumerate(runs, start=1):
                place = run.reached(part.target)
                costs: dict[str, Sequence[float]] = {"steps": run.steps, "path_steps": run.path_steps}
                costs |= {"bytes": run.nbytes, "seconds": run.seconds}
                facts: dict[str, Any] = {"part": name, "configuration": row, "seed": seed}
                facts |= {"digest": experiment(part, row, seed, quick=quick).digest, "early": run.at(part.early)}
                facts |= {"final": run.final, "target": part.target, "rounds": "" if place is None else place + 1}
                rows.append(facts | {key: "" if place is None else values[place] for key, values in costs.items()})
    (out / "study.md").write_text("\n".join(lines))
    if rows:
        with (out / "study.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def main() -> None:
    """Run the missing experiments of the chosen parts, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", help=f"pattern of part names: {', '.join(PARTS)}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the global rounds, as a smoke test")
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    chosen = parser.parse_args()
    cache = StudyCache(chosen.out / "done")
    patterns = chosen.part or ["*"]
    parts = {name: part for name, part in PARTS.items() if any(fnmatch(name, pattern) for pattern in patterns)}
    if not parts:
        parser.error(f"no part matches {' or '.join(patterns)}. The parts are {', '.join(PARTS)}.")
    wanted: dict[str, Experiment] = {}
    for seed in range(1, chosen.seeds + 1):  # seed by seed, so that an interrupted study has complete seeds
        for name, part in parts.items():
            for row in part.rows:
                one = experiment(part, row, seed, quick=chosen.quick)
                if cache.get(one) is None:
                    wanted[f"{name}: {row}, seed {seed}"] = one
    with interruptible(), ProcessPoolExecutor(chosen.jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run_experiment, one.to_json()): what for what, one in wanted.items()}
        try:
            for done, future in enumerate(as_completed(running), start=1):
                what, run = running[future], future.result()
                cache.put(wanted[what], run)
                print(f"{done}/{len(running)} {what}: {run.final:.1f} %, {run.wall_s:.1f} s", file=sys.stderr)
        finally:
            pool.shutdown(cancel_futures=True)
    report(chosen.out, cache, chosen.seeds, quick=chosen.quick)
    print((chosen.out / "study.md").read_text(), end="")


if __name__ == "__main__":
    main()
