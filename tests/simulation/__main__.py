"""`python -m tests.simulation`: run labs in virtual time.

--seeds N [--from K]     N random labs with faults, each with its undisturbed twin, checked against
invariants
--seed K [--trace]       one of them    --keep NAME: write it to a file, which the tests run from
then on
--lab NAME [--trace]     one that was kept (`tests/simulation/labs/NAME.toml`)
--mutation NAME          --seeds N labs with a bug put back, until one finds it
(`tests/simulation/mutations.py`) --kill-each K --seed S   one small lab, with a kill after every
K-th message, of each role in turn
EXPERIMENT [--set ...]   an undisturbed lab; prints its outcome as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from fedstrata.common.experiment.reading import load
from tests.simulation.kills import kill_each
from tests.simulation.lab import ScenarioLab
from tests.simulation.labs import LABS, write_lab
from tests.simulation.mutations import MUTATIONS, mutated
from tests.simulation.report import describe, print_report, print_trace, summary
from tests.simulation.runs import check_lab, check_many, lab_of, reduce_faults, with_only


def main() -> None:
    """Run the chosen labs; the exit code is 1 if an invariant is violated or a lab fails."""
    chosen = _parser().parse_args()
    if chosen.experiment is not None:
        raise SystemExit(_run_experiment(chosen))
    if chosen.mutation is not None:
        raise SystemExit(_find_mutation(chosen))
    if chosen.kill_each:
        raise SystemExit(kill_each(chosen.kill_each, seed=chosen.seed or 0, jobs=chosen.jobs))
    if chosen.seed is not None or chosen.lab is not None:
        raise SystemExit(_run_one(chosen))
    raise SystemExit(_run_many(chosen))


def _run_many(chosen: argparse.Namespace) -> int:
    begun, reports = time.perf_counter(), []
    for report in check_many(range(chosen.first, chosen.first + chosen.seeds), jobs=chosen.jobs):
        reports.append(report)
        if report.violations:
            print_report(report)
    print(summary(reports, real_s=time.perf_counter() - begun))
    return int(any(report.violations for report in reports))


def _find_mutation(chosen: argparse.Namespace) -> int:
    """Run labs with a bug until one finds it; return 1 if none does."""
    for count, seed in enumerate(range(chosen.first, chosen.first + chosen.seeds), 1):
        with mutated(chosen.mutation):
            report = check_lab(lab_of(seed))
        if report.violations:
            print_report(report)
            print(f"{chosen.mutation}: found by lab {count}")
            return 0
    print(f"{chosen.mutation}: not found by {chosen.seeds} labs")
    return 1


def _run_one(chosen: argparse.Namespace) -> int:
    drawn = lab_of(chosen.seed if chosen.lab is None else LABS / f"{chosen.lab}.toml")
    if chosen.only is not None:
        drawn = with_only(drawn, {int(place) for place in chosen.only.split(",") if place})
    print(describe(drawn))
    if chosen.reduce:
        needed = reduce_faults(drawn)
        print(f"sufficient faults: {','.join(map(str, sorted(needed)))}")
        drawn = with_only(drawn, needed)
    report = check_lab(drawn, watch=print_trace if chosen.trace else None)
    print_report(report)
    if chosen.keep is not None:
        why = "; ".join(f"{name}: {wrong}" for name, wrong in report.violations)
        (LABS / f"{chosen.keep}.toml").write_text(write_lab(drawn, why=why), encoding="utf-8")
    return int(bool(report.violations))


def _run_experiment(chosen: argparse.Namespace) -> int:
    experiment = load(chosen.experiment, chosen.set)
    begun = time.perf_counter()
    outcome = ScenarioLab(experiment, seed=chosen.seed or 0, model_bytes=chosen.model_bytes).run()
    print(json.dumps(asdict(outcome) | {"real_s": round(time.perf_counter() - begun, 3)}, indent=2))
    return int(not outcome.ok)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiment", nargs="?", type=Path, help="a TOML file, run undisturbed")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override the experiment"
    )
    parser.add_argument(
        "--model-bytes", type=int, default=10_000, help="size of the model (default: 10000)"
    )
    parser.add_argument(
        "--seeds", type=int, default=100, metavar="N", help="number of seeds to run (default: 100)"
    )
    parser.add_argument(
        "--from", dest="first", type=int, default=0, metavar="K", help="the first seed (default: 0)"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)"
    )
    parser.add_argument("--seed", type=int, metavar="K", help="run only this seed")
    parser.add_argument("--lab", metavar="NAME", help="run only this lab, which was kept")
    parser.add_argument("--mutation", choices=list(MUTATIONS), help="put this bug back")
    parser.add_argument(
        "--keep", metavar="NAME", help="keep the lab that is run, after --only or --reduce"
    )
    parser.add_argument("--trace", action="store_true", help="print the messages of the faulty lab")
    parser.add_argument("--only", metavar="I,J", help="inject only these of its faults, by number")
    parser.add_argument(
        "--reduce", action="store_true", help="search the fewest faults with the same violation"
    )
    parser.add_argument(
        "--kill-each", type=int, metavar="K", help="kill after every K-th message of a small lab"
    )
    return parser


if __name__ == "__main__":
    main()
