"""`python -m tests.simulation`: run labs in virtual time.

--seeds N [--from K]     N random labs with faults, each with its undisturbed twin, checked against invariants;
                         every fifth lab loses one device for good; from 400000 on tiers are asynchronous, from 450000
                         on their devices keep a model, and from 500000 on devices leave and return
--seed K [--trace]       one of them
--kill-each K --seed S   one small lab, with a kill after every K-th message, of each role in turn
EXPERIMENT [--set ...]   an undisturbed lab; prints its outcome as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from common.experiment.reading import load
from deploy.simulation.lab import SimulatedLab
from tests.simulation.kills import kill_each
from tests.simulation.report import describe, print_report, print_trace, summary
from tests.simulation.runs import reduce_faults, run_seed, run_seeds


def main() -> None:
    """Run the chosen labs; the exit code is 1 if an invariant is violated or a lab fails."""
    chosen = _parser().parse_args()
    if chosen.experiment is not None:
        raise SystemExit(_run_experiment(chosen))
    if chosen.kill_each:
        raise SystemExit(kill_each(chosen.kill_each, seed=chosen.seed or 0, jobs=chosen.jobs))
    if chosen.seed is not None:
        raise SystemExit(_run_one(chosen))
    raise SystemExit(_run_many(chosen))


def _run_many(chosen: argparse.Namespace) -> int:
    begun, reports = time.perf_counter(), []
    for report in run_seeds(range(chosen.first, chosen.first + chosen.seeds), jobs=chosen.jobs):
        reports.append(report)
        if report.violations:
            print_report(report)
    print(summary(reports, real_s=time.perf_counter() - begun))
    return int(any(report.violations for report in reports))


def _run_one(chosen: argparse.Namespace) -> int:
    only = None if chosen.only is None else frozenset(int(place) for place in chosen.only.split(",") if place)
    print(describe(chosen.seed))
    if chosen.reduce:
        only = reduce_faults(chosen.seed)
        print(f"sufficient faults: --only {','.join(map(str, sorted(only)))}")
    report = run_seed(chosen.seed, only=only, watch=print_trace if chosen.trace else None)
    print_report(report)
    return int(bool(report.violations))


def _run_experiment(chosen: argparse.Namespace) -> int:
    experiment = load(chosen.experiment, chosen.set)
    begun = time.perf_counter()
    outcome = SimulatedLab(experiment, seed=chosen.seed or 0, model_bytes=chosen.model_bytes).run()
    print(json.dumps(asdict(outcome) | {"real_s": round(time.perf_counter() - begun, 3)}, indent=2))
    return int(not outcome.ok)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", nargs="?", type=Path, help="a TOML file, run undisturbed")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override the experiment")
    parser.add_argument("--model-bytes", type=int, default=10_000, help="size of the model (default: 10000)")
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="number of seeds to run (default: 100)")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="K", help="the first seed (default: 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--seed", type=int, metavar="K", help="run only this seed")
    parser.add_argument("--trace", action="store_true", help="print the messages of its faulty lab")
    parser.add_argument("--only", metavar="I,J", help="inject only these of its faults, by number")
    parser.add_argument("--reduce", action="store_true", help="search the fewest faults with the same violation")
    parser.add_argument("--kill-each", type=int, metavar="K", help="kill after every K-th message of a small lab")
    return parser


if __name__ == "__main__":
    main()
