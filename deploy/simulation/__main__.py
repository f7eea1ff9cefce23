"""`python -m deploy.simulation --seed N`: run an undisturbed lab in virtual time and print its outcome."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from common.spec import load, parse
from deploy.simulation.lab import SimulatedLab


def main() -> None:
    """Run one lab; the exit code is 1 if it did not end well."""
    parser = argparse.ArgumentParser(prog="python -m deploy.simulation", description=__doc__)
    parser.add_argument("experiment", nargs="?", type=Path, help="a TOML file; a small lab without it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override the experiment")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: 0)")
    parser.add_argument("--model-bytes", type=int, default=10_000, help="of the simulated model (default: 10000)")
    chosen = parser.parse_args()
    experiment = parse(SMALL) if chosen.experiment is None else load(chosen.experiment, chosen.set)
    begun = time.perf_counter()
    outcome = SimulatedLab(experiment, seed=chosen.seed, model_bytes=chosen.model_bytes).run()
    facts = asdict(outcome) | {"real_s": round(time.perf_counter() - begun, 3)}
    print(json.dumps(facts, indent=2))
    raise SystemExit(0 if outcome.ok else 1)


SMALL = {
    "name": "simulated",
    "iterations": 4,
    "topology": {"institutions": 2, "devices": 6},
    "institution": {"rounds": 2},
    "transfer": {"inline_bytes": 0, "chunk_bytes": 32_768},
}

if __name__ == "__main__":
    main()
