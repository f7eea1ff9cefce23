"""Print the table of the papers' sweeps for docs/reproduction.md: sizes, bytes, and hours of one
core.

    python -m docs.tools.reproduction

Bytes and SGD steps are those of `fedstrata plan FILE`. The seconds of a step are this process's CPU
seconds, in one thread, with random samples, so other load on the machine hardly matters. Data sets
that are missing are assumed, as in `plan`; text has no assumption, so its cells have neither bytes
nor hours.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import lru_cache
from statistics import mean
from typing import Any, Final

import torch
from torch.nn.functional import cross_entropy

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets, models
from fedstrata.common.learning.inputs import Inputs
from fedstrata.deploy.console.shipped import shipped_sweeps
from fedstrata.deploy.planning.machine_speed import MachineSpeeds
from fedstrata.deploy.planning.simulated import simulate
from fedstrata.deploy.planning.workload import workload
from fedstrata.deploy.sweeps.grid import Grid, load
from fedstrata.deploy.sweeps.planning import ROUNDS, groups_of, plan_of

STEPS: Final = 2  # the first warms up
HEAD: Final = (
    "| sweep | devices | global rounds | cells | seeds | GB | core hours |",
    "|---|---|---|---|---|---|---|",
)


def sizes(grid: Grid) -> list[str]:
    """Return a sweep's devices, global rounds of a run, cells and seeds; ranges where cells differ."""
    found = grid.experiments.values()
    devices = _range(sum(each.sizes()[-1]) for each in found)
    return [
        devices,
        _range(each.rounds for each in found),
        str(len(grid.cells)),
        str(len(grid.seeds)),
    ]


def sweeps() -> dict[str, Grid]:
    """Return the papers' sweeps by name."""
    return {
        name: load(path) for name, path in shipped_sweeps().items() if name.startswith("papers/")
    }


def costs(grid: Grid) -> tuple[float, float]:
    """Return the bytes of all runs of a sweep, and the seconds of one core for their SGD steps."""
    planned = plan_of(groups_of(grid), _predict)
    nbytes = sum(sum(group.rounds) * sum(group.tiers.values()) for group in planned)
    return nbytes, sum(group.seconds for group in planned)


def lines() -> Iterator[str]:
    """Yield the lines of the table."""
    yield from HEAD
    for name, grid in sweeps().items():
        nbytes, seconds = costs(grid)
        cells = [
            f"`{name.removeprefix('papers/')}`",
            *sizes(grid),
            _rounded(nbytes / 1e9),
            _rounded(seconds / 3600),
        ]
        yield f"| {' | '.join(cells)} |"


def _predict(experiment: Experiment) -> dict[str, Any]:
    """Return what `plan` predicts, but for the seconds: those of one core for the SGD steps of all
    devices.
    """
    try:
        work = workload(experiment)
    except InvalidExperiment:  # text that is missing
        return {"global_round_s": 0.0, "tiers": {}, "memory": {}, "assumed": []}
    inputs = datasets.load(work.calibrated.data).inputs
    step_s = _step_s(experiment.model.name, inputs, experiment.training.batch_size)
    run = simulate(work, MachineSpeeds(cores=1), rounds=ROUNDS)
    steps = run.sample.multiples[-1] * mean(each.sgd_steps for each in run.settled)
    return {
        "global_round_s": steps * step_s,
        "tiers": run.tiers(),
        "memory": {},
        "assumed": work.assumed,
    }


@lru_cache
def _step_s(model: str, inputs: Inputs, batch: int) -> float:
    """Return the CPU seconds of one step of plain SGD."""
    module = models.build(model, 1, inputs=inputs).train()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.5)
    shape, labels = (batch, *inputs.shape), torch.arange(batch) % inputs.classes
    samples = torch.randint(inputs.tokens, shape) if inputs.tokens else torch.rand(shape)
    seconds = []
    for _ in range(STEPS):
        start = time.process_time()
        optimiser.zero_grad()
        cross_entropy(module(samples), labels).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        seconds.append(time.process_time() - start)
    return min(seconds)


def _rounded(number: float) -> str:
    """Return a number with two significant digits."""
    return f"{float(f'{number:.2g}'):,.0f}"


def _range(numbers: Iterator[int]) -> str:
    found = sorted(set(numbers))
    return f"{found[0]:,}" if len(found) == 1 else f"{found[0]:,} to {found[-1]:,}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in lines():
        print(line, flush=True)
